"""What all processes of a job do: listen, tell, obey the supervisor, and leave when told to.

Messages of every kind, rows and orders, come through one socket. Standard input is a lifeline and
nothing else: when its other end closes, the supervisor is gone, and the process leaves at once: no
orphans, however the supervisor ended. Whatever a process prints is in its log.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from planaria.cluster.files import JobFiles
from planaria.cluster.line import Line
from planaria.cluster.transport import open_transport
from planaria.config import Config
from planaria.control.children import EXIT_ORPHAN
from planaria.errors import ClusterError
from planaria.trainer.dense import dlrm_layers
from planaria.wire.codec import Envelope, Frames
from planaria.wire.coding import bytes_spared
from planaria.wire.control import Control, Heard, Listening, Obeyed, Orders, Traffic
from planaria.wire.limits import Limits
from planaria.wire.machine import COORDINATOR, Machine, Outbox
from planaria.wire.messages import NO_VIEW, Delta, Hello, Install, Member, Message, Prepare, Stop

if TYPE_CHECKING:
    from planaria.cluster.parts import PartSaver

POLL_MS = 20  # of the coordinator, who looks for silent members meanwhile
IDLE_MS = 100  # of members, who are woken by messages
STARVED_S = 3.0  # without a descriptor for a connection
HELLO_S = 0.1
LAST_WORDS_S = 5.0  # within which the supervisor must have heard everything, before a process ends


class Node:
    """A process with a socket, a line to the supervisor, and a heart."""

    def __init__(self, files: JobFiles, member: Member, role: str, lifeline: int = 0) -> None:
        """lifeline: the descriptor whose other end closes when whoever started this is gone."""
        self.files = files
        self.member = member
        self.role = role
        self.config = Config.from_dict(files.config())
        self.keys = files.keys()
        bind = files.bind_address(self.config, member)
        limits = limits_of(self.config)
        can_wait = role == "server"  # deltas, to other servers
        self.transport = open_transport(member, self.keys, bind, limits, can_wait=can_wait)
        self.transport.packs = self.config.packs
        self.transport.gradients = self.config.wire.gradients
        self.line = Line(
            self.transport, files.supervisor(), self.config.cluster.heartbeat_ms / 1000
        )
        self.book: dict[Member, str] = {}  # where members listen
        self.sent: Traffic = {}
        self.orders = Orders()
        self.stopped: str | None = None
        watch = threading.Thread(target=self._watch_lifeline, args=(lifeline,), daemon=True)
        watch.start()
        log(f"{member} listens at {self.transport.address}, process {os.getpid()}")
        self.line.tell(Listening(role=role, address=self.transport.address))

    def _watch_lifeline(self, descriptor: int) -> None:
        # Not sys.stdin: a thread that waits in it makes the interpreter abort on its way out.
        with os.fdopen(os.dup(descriptor), "rb", buffering=0) as lifeline:
            while lifeline.read(1):
                pass
        self._orphaned()

    def _orphaned(self) -> None:
        self._on_orphan()
        os._exit(EXIT_ORPHAN)

    def _on_orphan(self) -> None:
        """The supervisor is gone; called in the thread that noticed it."""

    def address_of(self, member: Member) -> str:
        return self.orders.coordinator if member == COORDINATOR else self.book.get(member, "")

    def post(self, outbox: Outbox) -> None:
        """Sends everything, each message encoded once however many it goes to."""
        encoded: dict[int, Frames] = {}
        messages = []
        for to, message in outbox:
            address = self.address_of(to)
            if not address:
                continue
            if id(message) not in encoded:
                encoded[id(message)] = self.transport.encode(message)
            frames = encoded[id(message)]
            messages.append((address, frames))
            if frames.array_bytes:
                kind = type(message).__name__
                count, size, packed = self.sent.get(kind, (0, 0, 0))
                self.sent[kind] = (
                    count + 1,
                    size + frames.array_bytes + bytes_spared(message),
                    packed + frames.packed_bytes,
                )
        self.transport.send_all(messages)

    def on_control(self, message: Control) -> None:
        match message:
            case Heard():
                self.line.heard(message.number)
            case Orders():
                if message.number > self.orders.number:
                    self.orders = message
                    if self.role != "coordinator":
                        self.line.coordinator = message.coordinator
                    self.on_orders()
                self.line.say(Obeyed(number=self.orders.number))

    def on_orders(self) -> None:
        """After new orders."""

    def last_words(self) -> None:
        """Waits until the supervisor has heard everything, and ends the line."""
        deadline = time.monotonic() + LAST_WORDS_S
        while self.line.unheard and time.monotonic() < deadline:
            self.transport.poll(20)
            for envelope in self.transport.receive():
                if isinstance(envelope.message, Heard):
                    self.line.heard(envelope.message.number)
        self.line.close()


class MemberNode(Node):
    """A server or trainer: a machine of views on top of a node."""

    machine: Machine
    saver: PartSaver
    epoch = 0  # of the coordinator that it follows
    guard: AbstractContextManager[object] = contextlib.nullcontext()
    """Held whenever the machine is used, where another thread uses it too."""

    def run(self) -> str:
        """Until the coordinator says stop; returns its reason."""
        last_hello, wait_ms = 0.0, 0
        while self.stopped is None:
            now = time.monotonic()
            self.turn()
            known = self.orders.coordinator  # what is said to nobody would be said again late
            if known and self.machine.install is None and now - last_hello > HELLO_S:
                last_hello = now
                self._hello()
            self.poll(wait_ms)
            for envelope in sorted(self.transport.receive(), key=_can_wait):
                if isinstance(envelope.message, Control):
                    self.on_control(envelope.message)
                else:
                    self._handle(envelope.sender, envelope.address, envelope.message)
                if self.stopped is not None:
                    break
            self._end_if_starved()
            with self.guard:
                outbox = self.machine.tick(time.monotonic())
            self.post(outbox)
            wait_ms = self.work()
        log(f"{self.member} leaves: {self.stopped}")
        self.line.close()
        return self.stopped

    def _end_if_starved(self) -> None:
        """Who cannot reach the others is of no use to them, but another process would be."""
        since = self.transport.starved_at
        if since is not None and time.monotonic() - since > STARVED_S:
            raise ClusterError(
                "there is no descriptor left for a connection to another process; raise ulimit -n"
            )

    def turn(self) -> None:
        """Nothing hangs here."""
        self.line.turn()

    def poll(self, wait_ms: int) -> None:
        """Waits for messages, or for whatever else there is to do."""
        self.transport.poll(wait_ms)

    def work(self) -> int:
        """What a process does between messages; returns for how many ms it can wait for more."""
        return IDLE_MS

    def _handle(self, sender: Member, address: str, message: Message) -> None:
        if isinstance(message, Stop):
            self.stopped = message.reason
            return
        self.book[sender] = address
        if isinstance(message, Prepare | Install) and message.view.epoch > self.epoch:
            # It is the coordinator by now, though the supervisor, who may sleep, has not said so.
            self.epoch = message.view.epoch
            self.orders = msgspec.structs.replace(self.orders, coordinator=address)
            self.line.coordinator = address
        with self.guard:
            before = self.machine.install
            outbox = self.machine.receive(sender, message)
            install = self.machine.install
        if install is not None and install is not before:
            self.book.update(install.addresses)
            self.transport.forget({*install.addresses.values(), self.orders.coordinator})
            log(f"view {tuple(install.view)}, committed step {install.committed}")
            self.on_view()
        self.post(outbox)

    def on_view(self) -> None:
        """After each install."""

    def _hello(self) -> None:
        hello = Hello(
            view=NO_VIEW, member=self.member, role=self.role, address=self.transport.address
        )
        self.post([(COORDINATOR, hello)])


def limits_of(config: Config) -> Limits:
    """How large the messages of a job can be."""
    if config.script.parameters is not None:
        return Limits.of_job(config, config.script.parameters)
    model = config.model
    layers = dlrm_layers(model.tables, model.dim, model.bottom, model.top)
    return Limits.of_job(config, sum(layer.parameters for layer in layers))


def _can_wait(envelope: Envelope) -> bool:
    """Nobody's step waits for a delta: the vote is wanted only a step later."""
    return isinstance(envelope.message, Delta)


_log: list[Path] = []


def log_into(path: Path) -> None:
    """Where standard error is a user's own."""
    _log[:] = [path]


def is_logged(line: str) -> bool:
    """Whether it is one of `log`, and so nobody's last words."""
    return re.match(r"\d\d:\d\d:\d\d ", line) is not None


def log(line: str) -> None:
    """Standard error is the process's log. A disk that is full costs a line, not a process."""
    with contextlib.suppress(OSError):
        said = f"{time.strftime('%H:%M:%S')} {line}\n"
        if _log:
            with _log[0].open("a") as file:
                file.write(said)
        else:
            sys.stderr.write(said)
            sys.stderr.flush()
