"""Plain sockets where much comes at once, or where somebody else has them, too."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq
from cluster_jobs import wait_until
from test_sockets import (
    GREETING,
    LIMIT_S,
    SMALL,
    heard,
    hears,
    knocking,
    listening,
    say,
    stream,
    suspect,
)

from planaria.cluster.line import Line
from planaria.cluster.sockets import MOST_STRANGERS, Sockets
from planaria.cluster.transport import Keys, raise_descriptor_limit
from planaria.cluster.zeromq import ZeroMQ
from planaria.wire.control import HeldOut, Tell
from planaria.wire.limits import Limits

# ---------------------------------------------------------------------------- forked children


@contextmanager
def forked() -> Iterator[None]:
    """A child that has copies of all descriptors, as a DataLoader's worker has."""
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def wakes(transport: Sockets, seconds: float) -> int:
    """How often something wakes it meanwhile."""
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        count += transport.poll(50)
        list(transport.receive())
    return count


@pytest.mark.parametrize("can_wait", [False, True])
def test_a_peer_that_goes_is_forgotten_also_where_a_forked_child_has_its_connection(
    can_wait: bool,
) -> None:
    with listening("a") as member, ExitStack() as stack:
        peer = stack.enter_context(listening("b", can_wait=can_wait))
        say(member, peer.address, 1)
        say(peer, member.address, 2)
        assert hears(peer, 1)
        assert hears(member, 2)
        with forked():
            stack.close()  # the peer goes
            wakes(member, 0.2)
            assert wakes(member, 0.5) < 5
            member.forget(set())
            assert wakes(member, 0.3) < 5


# ---------------------------------------------------------------------------- many at once


def test_more_members_than_strangers_may_be_are_all_heard() -> None:
    """They come while others talk; whoever has greeted is no stranger any more."""
    raise_descriptor_limit()
    newcomers = 2 * MOST_STRANGERS + 88
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * newcomers + 200:
        pytest.skip("too few descriptors")
    found: set[str] = set()
    with listening("a") as member, ExitStack() as stack:
        chatty = [stack.enter_context(listening(f"c{number}")) for number in range(3)]
        for peer in chatty:
            say(peer, member.address, 0)
        assert hears(member, 0)
        for number in range(1, newcomers + 1):
            connection = stack.enter_context(knocking(member.address))
            connection.sendall(GREETING + stream(suspect(number)))

        def all_here() -> bool:
            for peer in chatty:
                say(peer, member.address, 0)
            member.poll(1)
            found.update(heard(member))
            return len(found) == newcomers + 1

        assert wait_until(all_here, LIMIT_S)


def test_what_nobody_takes_is_left_to_its_senders() -> None:
    with listening("a") as slow, listening("b") as sender, listening("c") as other:
        for number in range(50):
            say(sender, slow.address, number)
        assert wait_until(lambda: bool(list(slow.receive(1))), LIMIT_S)
        before = len(slow._received)
        for _ in range(20):
            for number in range(50):
                say(sender, slow.address, number)
                say(other, slow.address, number)
            assert len(list(slow.receive(1))) == 1
        assert len(slow._received) <= before + 50  # with what came with a greeting, once
        say(sender, slow.address, 777)  # a control: all of it is there in the end
        assert hears(slow, 777, sender)


# ---------------------------------------------------------------------------- a process's line


def held_out(samples: int) -> HeldOut:
    labels, logits = np.zeros(samples, np.uint8), np.zeros(samples, np.float32)
    return HeldOut(rank=0, first=0, labels=labels, logits=logits)


@pytest.mark.parametrize("samples", [16_384, 400_000])
def test_what_is_larger_than_the_kernels_buffers_is_told_once_and_holds_up_nothing(
    tmp_path: Path, samples: int
) -> None:
    large = Limits(other=64 << 20)
    with (
        listening("supervisor", f"ipc://{tmp_path}/s", large) as supervisor,
        listening("trainer-0", f"ipc://{tmp_path}/t", large) as member,
    ):
        line = Line(member, supervisor.address, 0.1)
        line.tell(held_out(samples))
        line.tell(held_out(1))
        numbers: list[int] = []

        def both() -> bool:
            supervisor.poll(10)
            for envelope in supervisor.receive():
                assert isinstance(envelope.message, Tell)
                numbers.append(envelope.message.number)
            return len(numbers) >= 2

        assert wait_until(both, LIMIT_S)
        assert numbers == [1, 2]  # nothing was said again on the way, which takes a second
        line.heard(2)
        line.close()


def test_a_heart_without_a_descriptor_beats_as_soon_as_there_is_one(tmp_path: Path) -> None:
    keys = Keys.make(bytes(16), encrypt=True)
    supervisor = ZeroMQ("supervisor", keys, f"ipc://{tmp_path}/s", SMALL)
    member = ZeroMQ("server-0", keys, f"ipc://{tmp_path}/m", SMALL)
    connect, refusals = member._new_dealer, [2]

    def refuse(address: str) -> zmq.Socket[bytes]:
        if address == "ipc://late" and refusals[0]:
            refusals[0] -= 1
            raise zmq.ZMQError(24)  # EMFILE
        return connect(supervisor.address)

    member._new_dealer = refuse  # type: ignore[method-assign]
    line = Line(member, supervisor.address, 0.02)
    try:
        line.coordinator = "ipc://late"

        def beats() -> bool:
            supervisor.poll(10)
            return any(envelope.sender == "server-0" for envelope in supervisor.receive())

        assert wait_until(beats, LIMIT_S)
        assert refusals == [0]
    finally:
        line.close()
        member.close()
        supervisor.close()
