"""A bad line: passes Ethernet frames on between pairs of devices, late, and loses some of them.

python relay.py pass SECONDS LOSS DEVICE=DEVICE ...
python relay.py plain DEVICE ...      # frames leave whole and with checksums, as on a wire
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import random
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence

ETH_P_ALL = 3
MOST_BYTES = 1 << 16
SIOCETHTOOL = 0x8946
TX_CHECKSUMS, SCATTER, TSO, GSO, GRO = 0x17, 0x19, 0x1F, 0x24, 0x2C


def leave_plain(device: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for setting in (TX_CHECKSUMS, SCATTER, TSO, GSO, GRO):
            off = ctypes.create_string_buffer(struct.pack("II", setting, 0))
            request = struct.pack("16sP", device.encode(), ctypes.addressof(off))
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def listen(device: str) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    found.bind((device, 0))
    found.setblocking(False)
    return found


def pass_on(seconds: float, loss: float, pairs: Sequence[str]) -> None:
    """Until it is killed."""
    other: dict[socket.socket, socket.socket] = {}
    for pair in pairs:
        one, two = map(listen, pair.split("="))
        other |= {one: two, two: one}
    numbers, draw = itertools.count(), random.Random(1)
    late: list[tuple[float, int, socket.socket, bytes]] = []
    while True:
        wait_s = max(late[0][0] - time.monotonic(), 0.0) if late else 1.0
        for one in select.select([*other], [], [], wait_s)[0]:
            frame, (_, _, kind, *_) = one.recvfrom(MOST_BYTES)
            if kind != socket.PACKET_OUTGOING and draw.random() >= loss:
                due = (time.monotonic() + seconds, next(numbers), other[one], frame)
                heapq.heappush(late, due)
        while late and late[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(late)
            try:
                to.send(frame)
            except OSError:  # its link is down, or full: that frame is lost, too
                pass


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "plain":
        for device in rest:
            leave_plain(device)
    else:
        pass_on(float(rest[0]), float(rest[1]), rest[2:])


if __name__ == "__main__":
    main()
