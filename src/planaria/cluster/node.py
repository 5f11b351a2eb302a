"""What all processes of a job do: listen, beat, obey the supervisor, and leave when told to.

The supervisor holds the other ends of a process's standard input and output. It writes lines of
JSON (where the coordinator is, who is suspected) and reads events. When its end of standard input
closes, it is gone, and the process leaves at once: no orphans, however the supervisor ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from planaria.cluster.files import JobFiles
from planaria.cluster.transport import Transport
from planaria.config import Config
from planaria.coordinator.machine import DONE
from planaria.trainer.dense import dlrm_layers
from planaria.wire.codec import Envelope, encode
from planaria.wire.limits import Limits
from planaria.wire.machine import COORDINATOR, Machine, Outbox
from planaria.wire.messages import NO_VIEW, Delta, Heartbeat, Hello, Member, Message, Stop

if TYPE_CHECKING:
    from planaria.cluster.saving import PartSaver

EXIT_FAILED = 1  # with an exception, which is in the log
EXIT_ORPHAN = 5
EXIT_FENCED = 6
EXIT_REFUSED = 7  # for a reason that the last line of the log tells the user
POLL_MS = 20  # of the coordinator, whom the supervisor tells of deaths
IDLE_MS = 100  # of members, who are woken by messages
HELLO_S = 0.1


class Link:
    """The line to the supervisor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        # Whatever else prints must not get between the events.
        os.dup2(2, 1)

    def say(self, event: str, **facts: Any) -> None:
        line = msgspec.json.encode({"event": event, "at": time.monotonic(), **facts}) + b"\n"
        with self._lock:
            try:
                self._out.write(line)
            except BrokenPipeError:
                pass  # the supervisor is gone: whoever listens to it notices, and ends the process

    def listen(
        self, on_order: Callable[[dict[str, Any]], None], on_orphan: Callable[[], None]
    ) -> None:
        """Calls `on_order` for each line from the supervisor, in a thread of its own.

        When the supervisor is gone, it calls `on_orphan` and ends the process.
        """

        def read() -> None:
            # Not sys.stdin: a thread that waits in it makes the interpreter abort on its way out.
            with os.fdopen(os.dup(0), "rb", buffering=0) as orders:
                for line in orders:
                    on_order(msgspec.json.decode(line))
            on_orphan()
            os._exit(EXIT_ORPHAN)

        threading.Thread(target=read, daemon=True).start()


class Node:
    """A process with sockets, a line to the supervisor, and a heart."""

    def __init__(self, files: JobFiles, member: Member, role: str) -> None:
        self.files = files
        self.member = member
        self.role = role
        self.config = Config.from_dict(files.config())
        self.keys = files.keys()
        self.link = Link()
        bind = bind_address(self.config, files, member)
        self.transport = Transport(member, self.keys, bind, limits_of(self.config))
        self.book: dict[Member, str] = {}  # where members listen
        self.coordinator = ""
        self.stopped: str | None = None
        self.told: dict[str, Any] = {}  # the last of each order
        self.link.listen(self._on_order, self._on_orphan)
        self.link.say("listening", member=member, address=self.transport.address)

    def _on_order(self, order: dict[str, Any]) -> None:
        """From the supervisor, in its own thread: only simple assignments here."""
        self.told.update(order)
        if "coordinator" in order:
            self.coordinator = order["coordinator"]

    def _on_orphan(self) -> None:
        """The supervisor is gone; called in the thread that noticed it."""

    def address_of(self, member: Member) -> str:
        return self.coordinator if member == COORDINATOR else self.book.get(member, "")

    def post(self, outbox: Outbox) -> None:
        """Sends everything, each message encoded once however many it goes to."""
        encoded: dict[int, list[Any]] = {}
        for to, message in outbox:
            address = self.address_of(to)
            if not address:
                continue
            if id(message) not in encoded:
                encoded[id(message)] = self.transport.encode(message)
            self.transport.send(address, encoded[id(message)])


class MemberNode(Node):
    """A server or trainer: a machine of views on top of a node."""

    machine: Machine
    saver: PartSaver

    def run(self) -> str:
        """Until the coordinator says stop; returns its reason."""
        threading.Thread(target=self._beat, daemon=True).start()
        last_hello, wait_ms = 0.0, 0
        while self.stopped is None:
            now = time.monotonic()
            if self.machine.install is None and now - last_hello > HELLO_S:
                last_hello = now
                self._hello()
            self.transport.poll(wait_ms)
            for envelope in sorted(self.transport.receive(), key=_can_wait):
                self._handle(envelope.sender, envelope.address, envelope.message)
                if self.stopped is not None:
                    break
            self.post(self.machine.tick(time.monotonic()))
            wait_ms = self.work()
        if self.stopped == DONE:
            self.saver.close()
            self.link.say("left")
        return self.stopped

    def work(self) -> int:
        """What a process does between messages; returns for how many ms it can wait for more."""
        return IDLE_MS

    def _handle(self, sender: Member, address: str, message: Message) -> None:
        if isinstance(message, Stop):
            self.stopped = message.reason
            return
        self.book[sender] = address
        before = self.machine.install
        outbox = self.machine.receive(sender, message)
        install = self.machine.install
        if install is not None and install is not before:
            self.book.update(install.addresses)
            alive = {*install.addresses.values(), self.coordinator}
            self.transport.forget(alive)
            self.on_view()
        self.post(outbox)

    def on_view(self) -> None:
        """After each install."""

    def _hello(self) -> None:
        hello = Hello(
            view=NO_VIEW, member=self.member, role=self.role, address=self.transport.address
        )
        self.post([(COORDINATOR, hello)])

    def _beat(self) -> None:
        """A heart of its own, so that a long computation is not taken for death."""
        dealer: zmq.Socket[bytes] | None = None
        address = ""
        frames = encode(
            self.keys.token, self.member, self.transport.address, Heartbeat(view=NO_VIEW)
        )
        while True:
            try:
                if self.coordinator and self.coordinator != address:
                    if dealer is not None:
                        dealer.close(linger=0)
                    dealer = None
                    dealer = self.transport.new_dealer(self.coordinator)
                    address = self.coordinator
                if dealer is not None:
                    dealer.send_multipart(frames, zmq.NOBLOCK)
            except zmq.ZMQError:
                pass  # no descriptor left, or a full queue: the next beat may get through
            time.sleep(self.config.cluster.heartbeat_ms / 1000)


def limits_of(config: Config) -> Limits:
    """How large the messages of a job can be."""
    model = config.model
    layers = dlrm_layers(model.tables, model.dim, model.bottom, model.top)
    return Limits.of_job(config, sum(layer.parameters for layer in layers))


def _can_wait(envelope: Envelope) -> bool:
    """Nobody's step waits for a delta: its acknowledgement is wanted only a step later."""
    return isinstance(envelope.message, Delta)


def bind_address(config: Config, files: JobFiles, member: Member) -> str:
    """Wildcard ports are given out by the system, and paths are named after the one process."""
    if config.cluster.transport == "ipc":
        return f"ipc://{files.folder}/{member}.ipc"
    return f"tcp://{config.cluster.host}:*"
