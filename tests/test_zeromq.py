"""ZeroMQ: members reach each other whatever strangers do, and nobody else gets anywhere."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from cluster_garbage import HANDSHAKE, rows
from cluster_jobs import wait_until

from planaria.cluster import zeromq as module
from planaria.cluster.transport import MAX_QUEUE, QUEUE_BYTES, Keys
from planaria.cluster.zeromq import (
    MIN_INCOMING,
    MIN_OUTGOING,
    REFUSED_FRAMES,
    ZeroMQ,
    queue_messages,
)
from planaria.config.job import MAX_PROCESSES
from planaria.wire.codec import decode_trusted, encode
from planaria.wire.limits import Limits
from planaria.wire.messages import NO_VIEW, Lookup, Stop, Suspect

KEYS = Keys.make(bytes(range(16)), encrypt=False)
LOOPBACK = "tcp://127.0.0.1:*"
NOBODY = "tcp://127.0.0.1:9"
SMALL = Limits(header=1000, other=1 << 20, frames=20)
LIMIT_S = 30.0  # for what takes milliseconds


@contextmanager
def listening(name: str, bind: str = LOOPBACK, limits: Limits = SMALL) -> Iterator[ZeroMQ]:
    transport = ZeroMQ(name, KEYS, bind, limits)
    try:
        yield transport
    finally:
        transport.forget(set())
        transport.close()


@contextmanager
def stranger(address: str) -> Iterator[zmq.Socket[bytes]]:
    """A peer that speaks ZeroMQ, but has no token."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(address)
        yield dealer


def knocking(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), LIMIT_S)


def hears_the_end(connection: socket.socket) -> bool:
    """Waits until the other side has closed the connection, whatever it says before."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def say(member: ZeroMQ, to: str, number: int) -> None:
    member.send(to, member.encode(Suspect(view=NO_VIEW, member=str(number), gone=False)))


def heard(transport: ZeroMQ) -> list[str]:
    return [
        envelope.message.member
        for envelope in transport.receive()
        if isinstance(envelope.message, Suspect)
    ]


def hears(transport: ZeroMQ, number: int) -> bool:
    """Whether it comes; what comes before it is thrown away."""
    return wait_until(lambda: str(number) in heard(transport), LIMIT_S)


# ---------------------------------------------------------------------------- floods


def test_members_get_through_a_flood_of_large_messages_none_of_which_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[int] = []

    def counted(frames: Any, limits: Any) -> Any:
        decoded.append(len(frames))
        return decode_trusted(frames, limits)

    monkeypatch.setattr(module, "decode_trusted", counted)
    over = threading.Event()

    def flood(address: str) -> None:
        with stranger(address) as dealer:
            dealer.sndtimeo = 100
            while not over.is_set():
                try:
                    dealer.send_multipart([bytes(16), bytes(900_000), bytes(900_000)])
                except zmq.Again:
                    pass

    with listening("coordinator") as coordinator, listening("server-0") as member:
        floods = [threading.Thread(target=flood, args=(coordinator.address,)) for _ in range(3)]
        for thread in floods:
            thread.start()
        try:
            assert wait_until(lambda: not heard(coordinator) and coordinator.refused > 0, LIMIT_S)
            for number in range(100):  # one after the other: each has the flood around it
                say(member, coordinator.address, number)
                assert hears(coordinator, number)
        finally:
            over.set()
            for thread in floods:
                thread.join()
        assert coordinator.refused > 3
        assert decoded == [1] * 100


def test_refused_messages_take_no_places_and_bounded_work() -> None:
    """256 was all that one call looked at, whoever had sent it."""
    with listening("coordinator") as coordinator, stranger(coordinator.address) as dealer:
        for _ in range(400):
            dealer.send_multipart([b"noise"])
        assert wait_until(lambda: not heard(coordinator) and coordinator.refused == 400, LIMIT_S)
        frames = [b"noise"] * (3 * REFUSED_FRAMES)
        dealer.send_multipart(frames)
        dealer.send_multipart(encode(KEYS.token, "me", "", Stop(view=NO_VIEW, reason="")))
        calls = 0
        assert coordinator.poll(int(LIMIT_S * 1000))  # a message comes whole, or not at all
        while not list(coordinator.receive()):
            calls += 1
            assert coordinator.refused == 401
            assert coordinator.poll(int(LIMIT_S * 1000))
        assert calls >= 3


def test_a_message_of_too_many_frames_is_refused_whoever_sends_it() -> None:
    with listening("coordinator") as coordinator, stranger(coordinator.address) as dealer:
        lookup = Lookup(view=NO_VIEW, rank=0, step=1, part=0, indices=[rows()] * (SMALL.frames - 2))
        for message in (lookup, Stop(view=NO_VIEW, reason="")):
            dealer.send_multipart([*encode(KEYS.token, "me", "", message), b"one more"])
        dealer.send_multipart(encode(KEYS.token, "me", "", lookup))
        found: list[str] = []

        def arrived() -> bool:
            found.extend(type(e.message).__name__ for e in coordinator.receive())
            return bool(found)

        assert wait_until(arrived, LIMIT_S)
        assert found == ["Lookup"]  # a control: without the one more
        assert coordinator.refused == 2


def test_a_frame_beyond_all_limits_costs_the_connection_and_is_never_stored() -> None:
    with listening("coordinator") as coordinator:
        with knocking(coordinator.address) as connection:
            size = (SMALL.largest + 1).to_bytes(8, "big")
            connection.sendall(HANDSHAKE + b"\x02" + size)
            assert hears_the_end(connection)
        with stranger(coordinator.address) as dealer:  # a control: one that is as large as can be
            dealer.send_multipart([bytes(SMALL.largest)])
            assert wait_until(lambda: not heard(coordinator) and coordinator.refused == 1, LIMIT_S)


@pytest.mark.parametrize("least", [MIN_INCOMING, MIN_OUTGOING])
def test_queues_hold_no_more_than_their_bytes_where_messages_are_large(least: int) -> None:
    for size in (1, 1000, 1 << 17, 1 << 20, 7 << 20, 1 << 30, 1 << 40):
        limits = Limits(header=1, other=size)
        count = queue_messages(limits, least)
        assert least <= count <= MAX_QUEUE
        assert count * size <= max(QUEUE_BYTES, least * size)
        assert count == MAX_QUEUE or (count + 1) * size > QUEUE_BYTES


# ---------------------------------------------------------------------------- connections

ECHO = """
import resource, sys
from planaria.cluster import zeromq
from planaria.cluster.transport import Keys
from planaria.cluster.zeromq import ZeroMQ
from planaria.wire.messages import Stop

descriptors = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
zeromq.HANDSHAKE_S = 600.0  # strangers stay until they leave by themselves
echo = ZeroMQ("echo", Keys.make(bytes(range(16)), encrypt=False), "tcp://127.0.0.1:*")
print(echo.address, flush=True)
while True:
    echo.poll(1000)
    for envelope in echo.receive():
        if isinstance(envelope.message, Stop):
            print(*echo._dealers, flush=True)
            sys.exit()
        echo.send(envelope.address, echo.encode(envelope.message))
"""


@contextmanager
def child(program: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of its own, and the first line that it prints."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_300_idle_connections_leave_a_process_without_descriptors_but_at_work() -> None:
    descriptors = 100
    with ExitStack() as stack:
        process, address = stack.enter_context(child(ECHO, str(descriptors)))
        member = stack.enter_context(listening("server-0"))
        say(member, address, 1)
        assert hears(member, 1)
        with ExitStack() as strangers:
            for _ in range(300):
                strangers.enter_context(knocking(address))
            in_use = Path(f"/proc/{process.pid}/fd")
            assert wait_until(lambda: len(os.listdir(in_use)) == descriptors, LIMIT_S)
            say(member, address, 2)
            assert hears(member, 2)
            # To answer here, it would have to open a connection. It has to do without.
            suspect = Suspect(view=NO_VIEW, member="3", gone=False)
            elsewhere = encode(KEYS.token, "x", NOBODY, suspect)
            member.send(address, elsewhere)
            say(member, address, 4)
            assert hears(member, 4)
            newcomer = stack.enter_context(listening("server-1"))
            say(newcomer, address, 5)
            assert process.poll() is None
        assert wait_until(lambda: len(os.listdir(in_use)) < descriptors - 20, LIMIT_S)
        say(newcomer, address, 6)
        assert hears(newcomer, 6)
        member.send(address, member.encode(Stop(view=NO_VIEW, reason="")))
        assert process.stdout is not None
        connected = process.stdout.readline().split()
        assert member.address in connected
        assert NOBODY not in connected  # a control: there was no descriptor left for 3
        assert process.wait(LIMIT_S) == 0


def test_connections_that_lead_to_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(module, "SILENT_S", 0.05)
    monkeypatch.setattr(module, "GONE_S", 0.2)
    with listening("coordinator") as coordinator, listening("server-0") as member:
        say(member, coordinator.address, 0)
        assert hears(coordinator, 0)
        for said in (b"", b"GET", HANDSHAKE[:30], HANDSHAKE):  # the last one is silent ever after
            with knocking(coordinator.address) as connection:
                connection.sendall(said)
                assert hears_the_end(connection)
        say(member, coordinator.address, 1)
        assert hears(coordinator, 1)


SPEAKER = """
import itertools, sys, time
from planaria.cluster.transport import Keys
from planaria.cluster.zeromq import ZeroMQ
from planaria.wire.messages import NO_VIEW, Suspect

speaker = ZeroMQ("speaker", Keys.make(bytes(range(16)), encrypt=False), "tcp://127.0.0.1:*")
print(speaker.address, flush=True)
for number in itertools.count():
    speaker.send(sys.argv[1], speaker.encode(Suspect(view=NO_VIEW, member=str(number), gone=False)))
    time.sleep(0.01)
"""


def test_a_member_that_was_stopped_for_longer_than_its_connection_lasts_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.05)
    monkeypatch.setattr(module, "GONE_S", 0.2)
    with (
        listening("coordinator") as coordinator,
        child(SPEAKER, coordinator.address) as (speaker, _),
    ):
        assert wait_until(lambda: len(heard(coordinator)) > 0, LIMIT_S)
        with coordinator._router.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            speaker.send_signal(signal.SIGSTOP)
            assert monitor.poll(int(LIMIT_S * 1000))
            coordinator._router.disable_monitor()
        while heard(coordinator):
            pass  # what it had said before
        speaker.send_signal(signal.SIGCONT)
        assert wait_until(lambda: len(heard(coordinator)) > 0, LIMIT_S)


def test_a_process_can_write_to_more_peers_than_zeromq_has_sockets_by_default() -> None:
    with listening("coordinator") as coordinator:
        assert coordinator.context.get(zmq.MAX_SOCKETS) > 2 * MAX_PROCESSES
    with zmq.Context() as context:
        assert context.get(zmq.MAX_SOCKETS) < 2 * MAX_PROCESSES  # a control


# ---------------------------------------------------------------------------- files


def test_only_the_owner_can_write_to_a_socket_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "server-0.ipc"
    before = os.umask(0)
    try:
        with listening("server-0", f"ipc://{path}"), listening("x", f"ipc://{tmp_path}/x") as x:
            assert path.stat().st_mode & 0o777 == 0o600
            say(x, x.address, 1)
            assert hears(x, 1)  # a control: its owner can
    finally:
        os.umask(before)


def test_a_short_queue_drops_nothing_that_its_receiver_keeps_up_with() -> None:
    """ZeroMQ looks only now and then at what has left a queue; until then it seemed full."""
    large = Limits(other=QUEUE_BYTES)
    with listening("a", limits=large) as sender, listening("b", limits=large) as receiver:
        assert queue_messages(large, MIN_OUTGOING) == MIN_OUTGOING
        came: list[str] = []
        for first in range(0, 4000, 16):
            for number in range(first, first + 16):
                say(sender, receiver.address, number)

            def all_came(last: str = str(first + 15)) -> bool:
                came.extend(heard(receiver))
                return came[-1:] == [last]

            assert wait_until(all_came, LIMIT_S)
        assert came == [str(number) for number in range(4000)]
