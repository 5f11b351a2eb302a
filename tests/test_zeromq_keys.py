"""Whoever has no key, another or an old one, or repeats what a member has said: refused, and
counted.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cluster_jobs import wait_until

from planaria.cluster.transport import Keys
from planaria.cluster.zeromq import ZeroMQ
from planaria.wire.messages import NO_VIEW, Suspect

TOKEN = bytes(range(16))
LOOPBACK = "tcp://127.0.0.1:*"
LIMIT_S = 30.0  # for what takes milliseconds


@contextmanager
def member(name: str, keys: Keys) -> Iterator[ZeroMQ]:
    transport = ZeroMQ(name, keys, LOOPBACK)
    try:
        yield transport
    finally:
        transport.forget(set())
        transport.close()


class Listener:
    """What a process has heard, and whom it has refused."""

    def __init__(self, transport: ZeroMQ) -> None:
        self.transport = transport
        self.heard: list[str] = []

    def _listen(self) -> Listener:
        self.transport.poll(20)
        for envelope in self.transport.receive():
            assert isinstance(envelope.message, Suspect)
            self.heard.append(envelope.message.member)
        return self

    def hears(self, word: str) -> bool:
        return wait_until(lambda: word in self._listen().heard, LIMIT_S)

    def refuses(self, more_than: int = 0) -> bool:
        return wait_until(lambda: self._listen().transport.refused > more_than, LIMIT_S)


def say(transport: ZeroMQ, to: str, word: str) -> None:
    transport.send(to, transport.encode(Suspect(view=NO_VIEW, member=word, gone=False)))


def test_only_who_has_the_key_is_heard() -> None:
    keys = Keys.make(TOKEN, encrypt=True)
    strangers = {
        "another or an old job's key": Keys.make(TOKEN, encrypt=True),
        "no key, but the token": Keys.make(TOKEN, encrypt=False),
    }
    with member("door", keys) as door:
        found = Listener(door)
        for who, theirs in strangers.items():
            before = door.refused
            with member("stranger", theirs) as stranger:
                say(stranger, door.address, who)
                assert found.refuses(before), who
        with member("member", keys) as ours:
            say(ours, door.address, "the job's key")
            assert found.hears("the job's key")
    assert found.heard == ["the job's key"]


class Recorder:
    """Passes a connection on to another address, and keeps what the one who has connected says."""

    def __init__(self, to: str) -> None:
        self.said = b""
        self._to = _split(to)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        """Until either side closes."""
        here, _ = self._listener.accept()
        with self._listener, here, socket.create_connection(self._to) as there:
            other = {here: there, there: here}
            while True:
                for one in select.select([here, there], [], [], LIMIT_S)[0]:
                    data = one.recv(1 << 16)
                    if not data:
                        return
                    self.said += data if one is here else b""
                    other[one].sendall(data)

    def close(self) -> None:
        self._thread.join(LIMIT_S)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def test_what_was_recorded_opens_nothing() -> None:
    keys = Keys.make(TOKEN, encrypt=True)
    with member("door", keys) as door:
        found = Listener(door)
        recorder = Recorder(door.address)
        with member("member", keys) as ours:
            say(ours, recorder.address, "said once")
            assert found.hears("said once")
        recorder.close()
        said = recorder.said
        assert b"said once" not in said  # it is encrypted
        with socket.create_connection(_split(door.address)) as again:
            again.sendall(said)
            assert found.refuses()
        with member("member", keys) as ours:
            say(ours, door.address, "said later")
            assert found.hears("said later")
    assert found.heard == ["said once", "said later"]
