"""Strangers at the door: garbage, floods and keys that are not the job's change nothing."""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from cluster_garbage import (
    FIRST,
    as_stream,
    impossible,
    knock,
    misshapen,
    rows,
    strange_streams,
    zmtp_noise,
)
from cluster_jobs import BeatenRun, leaving_nothing, tiny, undisturbed

from planaria.cluster.attempt import Attempt
from planaria.cluster.events import JobEvent
from planaria.cluster.sockets import Sockets
from planaria.cluster.streams import MAGIC
from planaria.cluster.transport import Keys
from planaria.wire.codec import decode, encode
from planaria.wire.control import Listening, ServerHolds, StepDone, Viewed
from planaria.wire.messages import MateRequest, Message, Stop

pytestmark = pytest.mark.torch

BROKEN_TIMES = 100  # each of some 64 messages


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with leaving_nothing():
        yield


class Stranger:
    """Over ZeroMQ: it writes to servers, and listens for what they answer."""

    def __init__(self, keys: Keys, **curve: bytes) -> None:
        """curve: a key pair of its own and the key that it takes for the job's."""
        self.keys = keys
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.ROUTER)
        self.inbox.bind("tcp://127.0.0.1:*")
        self.address = self.inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self.curve = curve

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def post_as_member(self, address: str, messages: list[Message], *, linger_ms: int) -> None:
        """With the job's token: only encryption can keep these out."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = dealer.sndtimeo = linger_ms
            for option, value in self.curve.items():
                setattr(dealer, option, value)
            dealer.connect(address)
            for message in messages:
                dealer.send_multipart(encode(self.keys.token, "stranger", self.address, message))

    def answers(self, wait_ms: int) -> list[str]:
        found = []
        while self.inbox.poll(wait_ms):
            _, *frames = self.inbox.recv_multipart()
            found.append(type(decode(self.keys.token, frames).message).__name__)
        return found


def listening_servers(run: BeatenRun) -> list[str]:
    spoken = {member: listening.address for member, listening in run.of(Listening)}
    return [spoken[member] for member in sorted(spoken) if member.startswith("server")]


def on_hold_at(step: int, visit: Callable[[Attempt], None]) -> Callable[..., None]:
    """Calls `visit` once, while the only trainer with samples stands still and the servers wait."""
    visits: list[int] = []

    def on_event(processes: Attempt, event: JobEvent) -> None:
        if isinstance(event.what, StepDone) and event.what.step >= step and not visits:
            visits.append(step)
            processes.signal("trainer-0", signal.SIGSTOP)
            visit(processes)
            processes.signal("trainer-0", signal.SIGCONT)

    return on_event


def test_20000_strange_messages_leave_the_servers_up_and_the_digest_right() -> None:
    answered: list[str] = []

    def attack(processes: Attempt) -> None:
        keys = processes.files.keys()
        broken = b"".join(map(as_stream, misshapen(keys.token)))
        one = Sockets("stranger", keys, "tcp://127.0.0.1:*")
        for number, address in enumerate(listening_servers(run)[:3]):
            for said in strange_streams(number, 340, keys.token):
                knock(address, said)
            knock(address, MAGIC + keys.token + b"\0" + BROKEN_TIMES * broken)
            for message in impossible():  # with the job's token: whoever has that is a member
                one.send(address, one.encode(message))
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            one.poll(50)
            answered.extend(type(envelope.message).__name__ for envelope in one.receive())
        one.close()

    config = tiny("servers=3", "parity=1", "cluster.transport=tcp")
    run = BeatenRun(config, on_event=on_hold_at(5, attack))
    assert run.run()["digest"] == undisturbed()
    assert [tuple(viewed.view) for _, viewed in run.of(Viewed)] == [(1, 1)]
    refused = [holds.refused for _, holds in run.of(ServerHolds)]
    assert all(count >= 6330 for count in refused), refused  # it all arrived
    assert answered.count("MateReply") >= 3  # a control: with the token, servers do answer
    assert all(refuses_connections(address) for address in listening_servers(run))


def test_without_the_jobs_key_nobody_gets_past_the_handshake() -> None:
    answered: list[str] = []
    request = MateRequest(view=FIRST, request=1, arena=0, as_of=0, indices=rows(0))
    stop = Stop(view=FIRST, reason="because I know the token")

    def visit(processes: Attempt) -> None:
        keys = processes.files.keys()
        assert keys.public is not None
        public, secret = zmq.curve_keypair()
        own = {"curve_publickey": public, "curve_secretkey": secret}
        for curve in ({}, {**own, "curve_serverkey": public}):
            with Stranger(keys, **curve) as stranger:
                for address in listening_servers(run)[:3]:
                    stranger.post_as_member(address, [request, stop], linger_ms=300)
                    knock(address, zmtp_noise(random.Random(5)))
                answered.extend(stranger.answers(300))

    config = tiny("servers=3", "parity=1", "cluster.transport=tcp", "cluster.encryption=on")
    run = BeatenRun(config, on_event=on_hold_at(5, visit))
    assert run.run()["digest"] == undisturbed()
    assert answered == []
    assert all(holds.refused > 0 for _, holds in run.of(ServerHolds))
    assert [tuple(viewed.view) for _, viewed in run.of(Viewed)] == [(1, 1)]


def refuses_connections(address: str) -> bool:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0
