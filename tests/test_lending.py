"""Memory below connections: what is large is lent, and what is said about it is never trusted."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_jobs import wait_until
from test_sockets import GREETING, LIMIT_S, hears, hears_the_end, listening, say, stream, suspect

from planaria.cluster import lending
from planaria.cluster.lending import LINE, LOANS, PAGE, SEALS, SMALLEST, WHERE, Borrowed, Lent
from planaria.cluster.sockets import Sockets
from planaria.cluster.streams import LENT, SIZES, Outgoing, lend
from planaria.errors import WireError
from planaria.kernels.types import Bytes
from planaria.wire.limits import Limits
from planaria.wire.messages import NO_VIEW, DenseCopy

LARGE = Limits(other=64 << 20)
SIZE = 1 << 20


def pair(size: int = SIZE) -> tuple[Lent, Borrowed]:
    lent = Lent(size)
    borrowed = Borrowed(os.dup(lent.descriptor))
    lent.passed()
    return lent, borrowed


def borrow(lent: Lent, borrowed: Borrowed, value: int, size: int) -> Bytes | None:
    loan = lent.lend([np.full(size, value, np.uint8)], [0], size)
    if loan is None:
        return None
    return np.frombuffer(borrowed.take(loan.first, loan.number, size), np.uint8)


def descriptors() -> set[str]:
    """Open ones, and what they are of; one is of the listing itself."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            pass
    return found


# ---------------------------------------------------------------------------- loans


def test_a_loan_is_read_where_it_was_written_and_cannot_be_changed_there() -> None:
    lent, borrowed = pair()
    arrays: list[Any] = [np.arange(5, dtype=np.int64), np.zeros((0, 3), np.float32), np.eye(4)]
    loan = lent.lend(arrays, [0, 40, 40], 168)
    assert loan is not None
    found = borrowed.take(loan.first, loan.number, 168)
    assert found.readonly
    assert bytes(found) == arrays[0].tobytes() + arrays[2].tobytes()


def test_nothing_is_lent_before_it_is_mapped_nor_where_there_is_no_room() -> None:
    lent = Lent(SIZE)
    assert lent.lend([np.zeros(8, np.uint8)], [0], 8) is None
    borrowed = Borrowed(os.dup(lent.descriptor))
    lent.passed()
    assert borrow(lent, borrowed, 1, SIZE + 1) is None
    whole = borrow(lent, borrowed, 1, SIZE)
    assert whole is not None
    assert borrow(lent, borrowed, 2, 1) is None
    del whole
    held = [borrow(lent, borrowed, number, 1) for number in range(LOANS)]
    assert all(one is not None for one in held)
    assert borrow(lent, borrowed, 1, 1) is None  # there is room, but no number


def test_a_loan_ends_with_its_last_view_and_others_stay_what_they_are() -> None:
    """Whatever the order in which they end: random sizes and lives, compared all the time."""
    random = np.random.default_rng(1)
    lent, borrowed = pair()
    held: list[tuple[int, Bytes]] = []
    lent_at_all, refused = 0, 0
    for number in range(2000):
        value = number % 251
        found = borrow(lent, borrowed, value, int(random.integers(1, SIZE // 8)))
        refused += found is None
        if found is not None:
            lent_at_all += 1
            held.append((value, found[len(found) // 2 :][1:2]))  # a view of a view is enough
            held[-1] = (value, found[-3:])
        del found
        while held and (len(held) > 20 or random.random() < 0.4):
            held.pop(int(random.integers(len(held))))
        assert all((view == value).all() for value, view in held)
    assert lent_at_all > 1000
    assert refused > 0
    held.clear()
    assert borrow(lent, borrowed, 7, SIZE) is not None  # nothing was forgotten


def test_the_lowest_room_is_used_again_first() -> None:
    lent, borrowed = pair()
    for _ in range(100):
        loan = lent.lend([np.ones(100_000, np.uint8)], [0], 100_000)
        assert loan is not None
        assert loan.first == PAGE
        borrowed.take(loan.first, loan.number, 100_000)


def test_what_is_written_in_its_room_is_lent_without_a_copy_and_never_written_again() -> None:
    lent, borrowed = pair()
    room = lent.room(1000)
    assert room is not None
    room[:] = 9
    beside = borrow(lent, borrowed, 2, 1000)  # something else is lent meanwhile
    assert lent.room(1000) is None  # one at a time: this one may still be sent
    array = room.view(np.uint32).reshape(25, 10)
    del room
    assert lent.room(1000) is None
    loan = lent.lend([array], [0], 1000)
    assert loan is not None
    array[0, 0] = 0x08080808
    found = borrowed.take(loan.first, loan.number, 1000)
    assert bytes(found) == array.tobytes()  # it is the same memory
    del array
    other = lent.room(1000)
    assert other is not None
    other[:] = 1
    assert bytes(found[:8]) == b"\x08" * 4 + b"\x09" * 4
    assert beside is not None
    assert (beside == 2).all()


def test_room_that_nobody_used_is_free_again() -> None:
    lent, borrowed = pair()
    for _ in range(3 * LOANS):
        assert lent.room(SIZE) is not None
    assert lent.room(8) is not None
    assert borrow(lent, borrowed, 1, SIZE // 2) is not None


def test_a_forked_child_that_forgets_a_loan_does_not_end_it() -> None:
    lent, borrowed = pair()
    held = borrow(lent, borrowed, 3, SIZE)
    child = os.fork()
    if not child:
        del held
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert borrow(lent, borrowed, 4, SIZE) is None
    del held
    assert borrow(lent, borrowed, 4, SIZE) is not None  # a control


def test_views_outlive_both_ends() -> None:
    lent, borrowed = pair()
    held = borrow(lent, borrowed, 5, 1000)
    assert held is not None
    borrowed.close()
    del lent, borrowed
    assert (held == 5).all()


# ---------------------------------------------------------------------------- garbage


@pytest.mark.parametrize(
    ("first", "number", "size"),
    [
        (PAGE, 0, 100),  # the byte that says that the memory is mapped
        (PAGE, LOANS + 1, 100),
        (PAGE, 2**63, 100),
        (PAGE, 2, 100),  # not given
        (0, 1, 100),
        (PAGE - LINE, 1, 100),
        (PAGE + 1, 1, 100),
        (PAGE, 1, 0),
        (PAGE, 1, SIZE + 1),
        (PAGE + SIZE, 1, 1),
        (2**64 - LINE, 1, 100),
    ],
)
def test_what_lies_elsewhere_is_refused(first: int, number: int, size: int) -> None:
    lent, borrowed = pair()
    lent._states[1] = 1
    with pytest.raises(WireError):
        borrowed.take(first, number, size)
    assert len(borrowed.take(PAGE, 1, SIZE)) == SIZE  # a control


def test_a_loan_that_is_being_read_or_has_ended_is_not_given_again() -> None:
    lent, borrowed = pair()
    loan = lent.lend([np.ones(64, np.uint8)], [0], 64)
    assert loan is not None
    held = borrowed.take(loan.first, loan.number, 64)
    for _ in range(2):  # read, and over
        with pytest.raises(WireError):
            borrowed.take(loan.first, loan.number, 64)
        held = memoryview(b"")
    assert not held


def test_memory_that_could_shrink_or_is_none_is_not_mapped() -> None:
    def memory(size: int, seals: int) -> int:
        descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return descriptor

    before = descriptors()
    reader, writer = os.pipe()
    os.close(writer)
    for wrong in (reader, memory(PAGE + SIZE, 0), memory(PAGE, SEALS), memory(0, SEALS)):
        with pytest.raises(WireError):
            Borrowed(wrong)
    Borrowed(memory(PAGE + SIZE, SEALS)).close()  # a control
    assert descriptors() == before


# ---------------------------------------------------------------------------- over sockets


@contextmanager
def two(folder: Path) -> Iterator[tuple[Sockets, Sockets]]:
    """A receiver, and a sender."""
    with (
        listening("a", f"ipc://{folder}/a", LARGE) as receiver,
        listening("b", f"ipc://{folder}/b", LARGE) as sender,
    ):
        yield receiver, sender


def copies(receiver: Sockets, sender: Sockets) -> list[DenseCopy]:
    list(sender.receive())
    messages = [envelope.message for envelope in receiver.receive()]
    return [one for one in messages if isinstance(one, DenseCopy)]


def exchange(receiver: Sockets, sender: Sockets, step: int, size: int) -> Bytes:
    """The state that was sent, as it came."""
    state = np.full(size, step, np.uint8)
    sender.send(receiver.address, sender.encode(DenseCopy(view=NO_VIEW, step=step, state=state)))
    found: list[DenseCopy] = []

    def came() -> bool:
        found.extend(copies(receiver, sender))
        return bool(found)

    assert wait_until(came, LIMIT_S)
    assert (found[0].step, len(found)) == (step, 1)
    assert np.array_equal(found[0].state, state)
    return found[0].state


def is_lent(state: Bytes) -> bool:
    return not state.flags.writeable


def test_what_is_large_is_lent_from_the_third_time_on_and_leaves_no_descriptor(
    tmp_path: Path,
) -> None:
    with two(tmp_path) as (receiver, sender):
        exchange(receiver, sender, 0, 10)
        before = descriptors()
        kinds = [is_lent(exchange(receiver, sender, step, 200_000)) for step in range(1, 9)]
        assert kinds[:1] == [False]
        assert kinds[-5:] == [True] * 5
        assert not is_lent(exchange(receiver, sender, 9, SMALLEST - 1))
        assert descriptors() == before


def test_over_tcp_nothing_is_lent() -> None:
    with listening("a", limits=LARGE) as receiver, listening("b", limits=LARGE) as sender:
        assert not any(is_lent(exchange(receiver, sender, step, 200_000)) for step in range(1, 9))


def test_who_keeps_everything_gets_the_rest_through_the_socket(tmp_path: Path) -> None:
    with two(tmp_path) as (receiver, sender):
        kept = [exchange(receiver, sender, step, 1 << 20) for step in range(1, 60)]
        lent = [is_lent(one) for one in kept]
        assert 20 <= sum(lent) <= 32
        assert not lent[-1]
        assert all((one == step).all() for step, one in enumerate(kept, 1))
        kept.clear()
        assert is_lent(exchange(receiver, sender, 60, 1 << 20))


@pytest.mark.parametrize("what", ["memory", "mapping"])
def test_without_memory_all_goes_through_the_socket(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def fails(*_: object) -> None:
        made.append(1)
        raise OSError(12, "Cannot allocate memory")

    if what == "memory":
        monkeypatch.setattr(os, "memfd_create", fails)
    else:
        mapped = lending._mapped
        monkeypatch.setattr(
            lending, "_mapped", lambda *them: fails() if them[2] == 1 else mapped(*them)
        )
    with two(tmp_path) as (receiver, sender):
        exchange(receiver, sender, 0, 10)
        before = descriptors()
        assert not any(is_lent(exchange(receiver, sender, step, 200_000)) for step in range(1, 9))
        assert receiver.refused == 0
        assert descriptors() == before
    assert len(made) == 1  # it is not tried again and again


def test_a_new_connection_has_memory_of_its_own(tmp_path: Path) -> None:
    with two(tmp_path) as (receiver, sender):
        kept = [exchange(receiver, sender, step, 200_000) for step in range(1, 5)]
        before = descriptors()
        sender.forget(set())
        kept += [exchange(receiver, sender, step, 200_000) for step in range(5, 12)]
        assert all((one == step).all() for step, one in enumerate(kept, 1))
        assert is_lent(kept[-1])
        assert len(descriptors()) == len(before)


@contextmanager
def a_member(receiver: Sockets) -> Iterator[socket.socket]:
    """Who has greeted, and then says whatever the test wants."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(receiver.address.removeprefix("ipc://"))
        connection.sendall(GREETING)
        connection.sendall(stream(suspect(1)))
        assert hears(receiver, 1)
        yield connection


def lent_head(first: int, number: int, size: int) -> bytes:
    """Of a message whose only array lies there."""
    return (
        SIZES.pack(size, 8, 1 + LENT)
        + size.to_bytes(8, "little")
        + bytes(8)
        + WHERE.pack(first, number)
    )


def test_garbage_about_loans_costs_the_connection_and_is_counted(tmp_path: Path) -> None:
    with two(tmp_path) as (receiver, sender):
        said = [
            (None, lent_head(PAGE, 1, 64)),  # there is no memory at all
            (SIZE, lent_head(PAGE, 1, 64)),  # not given
            (SIZE, lent_head(PAGE + SIZE, 1, 64)),
            (0, b"a descriptor of something else"),
        ]
        before = descriptors()
        for number, (size, words) in enumerate(said, 1):
            with a_member(receiver) as connection:
                if size is None:
                    connection.sendall(words)
                else:
                    lent = Lent(size) if size else None
                    passed = lent.descriptor if lent else receiver._door.fileno()
                    socket.send_fds(connection, [words[:1]], [passed])
                    if lent:
                        lent.passed()
                    connection.sendall(words[1:])
                assert hears_the_end(connection, receiver)
            assert receiver.refused == number
        assert descriptors() == before
        say(sender, receiver.address, 5)
        assert hears(receiver, 5, sender)


def test_a_strangers_descriptor_is_not_even_taken(tmp_path: Path) -> None:
    with two(tmp_path) as (receiver, _):
        before = descriptors()
        lent = Lent(SIZE)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(receiver.address.removeprefix("ipc://"))
            socket.send_fds(connection, [GREETING[:5]], [lent.descriptor] * 3)
            list(receiver.receive())
            list(receiver.receive())
            assert len(descriptors()) == len(before) + 3  # both ends, and the memory itself
        lent.passed()
        assert lent._states[0] == 0


def test_a_descriptor_that_may_not_be_passed_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "SCM_RIGHTS", 12345)  # the kernel refuses that
    with two(tmp_path) as (receiver, sender):
        kinds = [is_lent(exchange(receiver, sender, step, 200_000)) for step in range(1, 9)]
        assert not any(kinds)
        assert not any("memfd:planaria" in one for one in descriptors())


def test_what_must_wait_is_not_lent(tmp_path: Path) -> None:
    """It may have to wait for another connection, which knows nothing of this one's memory."""
    with two(tmp_path) as (receiver, sender):
        for step in range(1, 5):
            exchange(receiver, sender, step, 200_000)
        peer = sender._peers[receiver.address]
        assert isinstance(peer, Outgoing)
        big = sender.encode(DenseCopy(view=NO_VIEW, step=5, state=np.zeros(40 << 20, np.uint8)))
        sender.send(receiver.address, big)
        assert peer.waiting > 0
        assert peer._lent is not None
        assert lend(peer._lent, sender.encode(_small(7))) is not None  # a control: there is room
        waiting = peer.waiting
        sender.send(receiver.address, sender.encode(_small(6)))
        assert peer.waiting - waiting > 200_000
        found: list[int] = []

        def both() -> bool:
            found.extend(one.step for one in copies(receiver, sender))
            return found == [5, 6]

        assert wait_until(both, LIMIT_S)


def _small(step: int) -> DenseCopy:
    return DenseCopy(view=NO_VIEW, step=step, state=np.full(200_000, step, np.uint8))
