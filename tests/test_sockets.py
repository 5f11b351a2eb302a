"""Plain sockets: members reach each other whatever strangers do, and nobody else gets anywhere."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_jobs import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.cluster import sockets as module
from planaria.cluster import streams
from planaria.cluster.sockets import Sockets
from planaria.cluster.streams import MAGIC, SIZES, as_stream
from planaria.cluster.transport import Keys, open_transport
from planaria.cluster.zeromq import ZeroMQ
from planaria.kernels.types import Bytes
from planaria.wire.codec import decode_trusted
from planaria.wire.limits import Limits
from planaria.wire.messages import NO_VIEW, DenseCopy, Lookup, Message, Suspect

KEYS = Keys.make(bytes(range(16)), encrypt=False)
GREETING = MAGIC + KEYS.token + b"\0"  # nothing of it can wait
LOOPBACK = "tcp://127.0.0.1:*"
SMALL = Limits(header=1000, other=1 << 20, frames=20)
LIMIT_S = 30.0  # for what takes milliseconds


@contextmanager
def listening(
    name: str, bind: str = LOOPBACK, limits: Limits = SMALL, *, can_wait: bool = False
) -> Iterator[Sockets]:
    transport = Sockets(name, KEYS, bind, limits, can_wait=can_wait)
    try:
        yield transport
    finally:
        transport.forget(set())
        transport.close()


def knocking(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), LIMIT_S)


def hears_the_end(connection: socket.socket, of: Sockets) -> bool:
    """Whether the other side closes the connection."""
    connection.settimeout(0.01)

    def ended() -> bool:
        of.poll(0)
        list(of.receive())
        try:
            return connection.recv(1 << 16) == b""
        except TimeoutError:
            return False
        except ConnectionResetError:
            return True

    return wait_until(ended, LIMIT_S)


def suspect(number: int) -> Suspect:
    return Suspect(view=NO_VIEW, member=str(number), gone=False)


def say(member: Sockets, to: str, number: int) -> None:
    member.send(to, member.encode(suspect(number)))


def heard(transport: Sockets) -> list[str]:
    return [
        envelope.message.member
        for envelope in transport.receive()
        if isinstance(envelope.message, Suspect)
    ]


def hears(transport: Sockets, number: int, *others: Sockets) -> bool:
    """Whether it comes; what comes before it is thrown away. Others do their part meanwhile."""

    def came() -> bool:
        for other in others:
            list(other.receive())
        return str(number) in heard(transport)

    return wait_until(came, LIMIT_S)


def stream(message: Message) -> bytes:
    """As it is on its way."""
    with listening("x") as sender:
        buffers, size = as_stream(sender.encode(message))
    found = b"".join(buffers)
    assert len(found) == size
    return found


def state(size: int) -> DenseCopy:
    return DenseCopy(view=NO_VIEW, step=1, state=np.arange(size, dtype=np.uint8))


def states(receiver: Sockets) -> list[Bytes]:
    """Those that have come."""
    messages = [envelope.message for envelope in receiver.receive()]
    return [one.state for one in messages if isinstance(one, DenseCopy)]


def test_who_encrypts_has_zeromq_and_who_does_not_has_none() -> None:
    for encrypt, kind in ((True, ZeroMQ), (False, Sockets)):
        keys = Keys.make(bytes(16), encrypt=encrypt)
        transport = open_transport("x", keys, LOOPBACK)
        assert isinstance(transport, kind)
        transport.close()


# ---------------------------------------------------------------------------- messages


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 200_000)), min_size=1, max_size=5),
    st.lists(st.integers(1, 100_000), max_size=8),
)
def test_messages_come_whole_however_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    whole = GREETING + b"".join(stream(state(size)) for size in sizes)
    found: list[bytes] = []
    with listening("a") as receiver, knocking(receiver.address) as connection:
        first = 0
        for cut in [*cuts, len(whole)]:
            connection.sendall(whole[first : first + cut])
            first += cut
            _more(receiver, found)
        assert wait_until(lambda: _more(receiver, found) == len(sizes), LIMIT_S)
    assert found == [state(size).state.tobytes() for size in sizes]


def _more(receiver: Sockets, found: list[bytes]) -> int:
    found += [state.tobytes() for state in states(receiver)]
    return len(found)


def test_arrays_are_aligned_and_views_of_one_piece_of_memory() -> None:
    lookup = Lookup(
        view=NO_VIEW,
        rank=0,
        step=1,
        part=0,
        indices=[np.arange(n, dtype=np.int64) for n in (0, 1, 7, 0)],
    )
    with listening("a") as receiver, listening("b") as sender:
        sender.send(receiver.address, sender.encode(lookup))
        found: list[Lookup] = []

        def arrived() -> bool:
            found.extend(e.message for e in receiver.receive() if isinstance(e.message, Lookup))
            return bool(found)

        assert wait_until(arrived, LIMIT_S)
    indices = found[0].indices
    assert [one.tolist() for one in indices] == [one.tolist() for one in lookup.indices]
    assert all(one.flags.aligned for one in indices)


@pytest.mark.parametrize("bind", [LOOPBACK, "ipc://{}/{}"])
def test_two_that_write_more_than_the_kernel_holds_to_each_other_both_get_it(
    bind: str, tmp_path: Path
) -> None:
    """Each drives its own sockets, and neither waits for the other."""
    large = Limits(other=64 << 20)
    with (
        listening("a", bind.format(tmp_path, "a"), large) as one,
        listening("b", bind.format(tmp_path, "b"), large) as other,
    ):
        for sender, to in ((one, other), (other, one)):
            for _ in range(3):
                sender.send(to.address, sender.encode(state(16 << 20)))
        counts = [0, 0]

        def all_here() -> bool:
            for at, receiver in enumerate((one, other)):
                counts[at] += sum(len(one) == 16 << 20 for one in states(receiver))
            return counts == [3, 3]

        assert wait_until(all_here, LIMIT_S)


def test_what_can_wait_wakes_nobody_who_is_busy_but_is_received_with_the_rest() -> None:
    with (
        listening("a") as busy,
        listening("b", can_wait=True) as patient,
        listening("c") as urgent,
    ):
        say(patient, busy.address, 0)
        assert hears(busy, 0)
        busy.defer(on=True)
        say(patient, busy.address, 1)
        assert not busy.poll(100)
        say(urgent, busy.address, 2)
        found: list[str] = []

        def came() -> bool:
            if busy.poll(10):
                found.extend(heard(busy))
            return "2" in found

        assert wait_until(came, LIMIT_S)
        assert found == ["1", "2"] or found == ["2", "1"]
        say(patient, busy.address, 3)
        busy.defer(on=False)
        assert busy.poll(1000)  # a control
        assert hears(busy, 3)


def test_a_queue_is_bounded_and_what_it_has_no_room_for_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "QUEUE_BYTES", 4 << 20)
    with listening("a") as receiver, listening("b") as sender:
        for _ in range(40):
            sender.send(receiver.address, sender.encode(state(1 << 19)))
        assert sender._peers[receiver.address].waiting <= 4 << 20
        came: list[Bytes] = []

        def gone() -> bool:
            list(sender.receive())
            came.extend(states(receiver))
            return sender._peers[receiver.address].waiting == 0

        assert wait_until(gone, LIMIT_S)
        say(sender, receiver.address, 7)  # there is room again
        assert hears(receiver, 7, sender)
        assert 0 < len(came) < 30


# ---------------------------------------------------------------------------- strangers


def test_nothing_that_a_stranger_says_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def counted(frames: Any, limits: Any) -> Any:
        decoded.append(len(frames))
        return decode_trusted(frames, limits)

    monkeypatch.setattr(module, "decode_trusted", counted)
    wrong = MAGIC + bytes(16)
    with listening("coordinator") as coordinator, listening("server-0") as member:
        for said in (wrong + stream(suspect(1)), b"GET / HTTP/1.1\r\n\r\n" * 3, os.urandom(200)):
            with knocking(coordinator.address) as connection:
                connection.sendall(said)
                assert hears_the_end(connection, coordinator)
        assert (coordinator.refused, decoded) == (3, [])
        say(member, coordinator.address, 2)
        assert hears(coordinator, 2, member)
        assert decoded == [1]
        with knocking(coordinator.address) as connection:  # a control: it knows the token
            connection.sendall(GREETING + stream(suspect(3)))
            assert hears(coordinator, 3)


@pytest.mark.parametrize(
    "sizes",
    [
        (0, SMALL.header + 1, 0),
        (0, 10, SMALL.frames - 1),
        (2 * SMALL.largest, 10, 1),
        (2**63, 2**31, 2**31),
        (64, 10, 1),  # and an array of another size
    ],
)
def test_sizes_beyond_the_limits_cost_the_connection_and_no_memory(
    sizes: tuple[int, int, int],
) -> None:
    with listening("coordinator") as coordinator, knocking(coordinator.address) as connection:
        connection.sendall(GREETING + SIZES.pack(*sizes) + bytes(200))
        assert hears_the_end(connection, coordinator)
        assert coordinator.refused == 1


def test_a_header_that_is_none_is_refused_and_the_next_message_comes() -> None:
    with listening("coordinator") as coordinator, knocking(coordinator.address) as connection:
        connection.sendall(GREETING + SIZES.pack(0, 5, 0) + b"noise\0\0\0" + stream(suspect(1)))
        assert hears(coordinator, 1)
        assert coordinator.refused == 1


def test_who_does_not_greet_is_seen_off_and_members_come_in_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(module, "MOST_STRANGERS", 10)
    with (
        ExitStack() as stack,
        listening("coordinator") as coordinator,
        listening("server-0") as member,
    ):
        silent = [stack.enter_context(knocking(coordinator.address)) for _ in range(30)]
        silent[0].sendall(GREETING[:10])
        say(member, coordinator.address, 1)
        assert hears(coordinator, 1, member)
        assert all(hears_the_end(one, coordinator) for one in silent)
        say(member, coordinator.address, 2)
        assert hears(coordinator, 2, member)


# ---------------------------------------------------------------------------- connections

ECHO = """
import resource, sys
from planaria.cluster import sockets
from planaria.cluster.transport import Keys
from planaria.wire.messages import Stop

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
sockets.HANDSHAKE_S = sockets.MOST_STRANGERS = 600  # strangers stay until they leave by themselves
keys = Keys.make(bytes(range(16)), encrypt=False)
echo = sockets.Sockets("echo", keys, sys.argv[2] if len(sys.argv) > 2 else "tcp://127.0.0.1:*")
print(echo.address, flush=True)
while True:
    echo.poll(1000)
    for envelope in echo.receive():
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


def test_100_idle_connections_leave_a_process_without_descriptors_but_at_work() -> None:
    with ExitStack() as stack:
        process, address = stack.enter_context(child(ECHO, "60"))
        member = stack.enter_context(listening("server-0"))
        say(member, address, 1)
        assert hears(member, 1)
        with ExitStack() as strangers:
            for _ in range(100):
                strangers.enter_context(knocking(address))
            in_use = Path(f"/proc/{process.pid}/fd")
            assert wait_until(lambda: len(os.listdir(in_use)) >= 59, LIMIT_S)
            say(member, address, 2)
            assert hears(member, 2)
            # The oldest of those who have not greeted make room.
            newcomer = stack.enter_context(listening("server-1"))
            say(newcomer, address, 3)
            assert hears(newcomer, 3)
            ticks = _cpu_of(process.pid)
            time.sleep(1.0)
            assert _cpu_of(process.pid) - ticks < 50, "it turns round and round before its door"
            assert process.poll() is None
        say(member, address, 4)
        assert hears(member, 4)


def _cpu_of(pid: int) -> int:
    """In hundredths of a second."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[11:13]
    return int(user) + int(system)


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_a_peer_that_dies_and_comes_back_at_its_address_is_written_to_again(
    kind: str, tmp_path: Path
) -> None:
    with listening("a") as member:
        bind = LOOPBACK if kind == "tcp" else f"ipc://{tmp_path}/echo"
        with child(ECHO, "100", bind) as (process, address):
            say(member, address, 1)
            assert hears(member, 1)
            process.kill()
            process.wait()
            for number in range(5):
                say(member, address, number)
                list(member.receive())
        if kind == "ipc":
            os.unlink(tmp_path / "echo")
        with child(ECHO, "100", address) as (_, again):
            assert again == address
            say(member, address, 9)
            assert hears(member, 9)


def test_what_is_said_before_anybody_listens_waits_for_them(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/later"
    with listening("a") as member:
        say(member, address, 1)
        with listening("later", address) as later:
            assert hears(later, 1, member)


def test_a_peer_that_is_stopped_holds_up_nobody_and_hears_all_when_it_goes_on() -> None:
    with listening("a") as member, listening("b") as other, child(ECHO, "100") as (echo, address):
        say(member, address, 0)
        assert hears(member, 0)
        echo.send_signal(signal.SIGSTOP)
        for _ in range(20):
            member.send(address, member.encode(state(1 << 19)))
        say(member, address, 1)
        say(member, other.address, 2)
        assert hears(other, 2, member)
        echo.send_signal(signal.SIGCONT)
        assert hears(member, 1)


def test_a_thread_of_its_own_can_have_a_connection_of_its_own() -> None:
    with listening("a") as member, listening("b") as other:
        frames = member.encode(suspect(5))

        def speak() -> None:
            connection = member.connect(other.address)
            connection.send(frames)
            connection.close()

        thread = threading.Thread(target=speak)
        thread.start()
        assert hears(other, 5)
        thread.join()


def test_the_last_words_before_close_arrive() -> None:
    large = Limits(other=64 << 20)
    with listening("b", limits=large) as other:
        found: list[Bytes] = []
        over = threading.Event()

        def listen() -> None:
            while not over.is_set() and not found:
                other.poll(10)
                found.extend(states(other))

        thread = threading.Thread(target=listen)
        thread.start()
        member = Sockets("a", KEYS, LOOPBACK, large)
        member.send(other.address, member.encode(state(32 << 20)))
        member.close()
        thread.join(LIMIT_S)
        over.set()
        assert [len(one) for one in found] == [32 << 20]


def test_only_the_owner_can_write_to_a_socket_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "server-0.ipc"
    before = os.umask(0)
    try:
        with listening("server-0", f"ipc://{path}"), listening("x", f"ipc://{tmp_path}/x") as x:
            assert path.stat().st_mode & 0o777 == 0o600
            say(x, x.address, 1)
            assert hears(x, 1)  # a control: its owner can
        assert not path.exists()
    finally:
        os.umask(before)


def test_a_process_may_open_what_the_system_allows() -> None:
    program = (
        "import resource; from planaria.cluster.transport import raise_descriptor_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))\n"
        "print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    with child(program) as (_, said):
        assert said == "300 300 300"
