"""The coordinator as a process: it listens, saves, and watches hearts."""

from __future__ import annotations

import queue
import secrets
import time
from typing import Any

from planaria.cluster.files import JobFiles
from planaria.cluster.node import POLL_MS, Node
from planaria.coordinator.machine import SUPERVISOR, CoordinatorMachine, first_state
from planaria.coordinator.watch import Watch
from planaria.wire.machine import Outbox
from planaria.wire.messages import (
    NO_VIEW,
    Heartbeat,
    Install,
    Member,
    Message,
    Spawn,
    Stop,
    Suspect,
)

ORPHANS_S = 0.2  # how long processes without a supervisor may take to end


class CoordinatorNode(Node):
    def __init__(self, files: JobFiles, member: Member) -> None:
        self._suspects: queue.SimpleQueue[Member] = queue.SimpleQueue()
        super().__init__(files, member, "coordinator")
        config = self.config
        self.owner = f"{member} {secrets.token_hex(8)}"  # no other process ever has this name
        epoch = files.claim(self.owner)
        saved = files.load()
        state = saved or first_state(
            epoch,
            [f"server-{place}" for place in range(config.servers)],
            [f"trainer-{rank}" for rank in range(config.ranks)],
            committed=files.start(),
        )
        self.machine = CoordinatorMachine(
            state,
            config.layout,
            epoch=epoch,
            now=time.monotonic(),
            retry_s=config.cluster.retry_ms / 1000,
            deadline_s=config.cluster.deadline_s,
            partial=config.strategy == "cpr",
        )
        self.watch = Watch(config.cluster.heartbeat_limit_ms / 1000, config.cluster.deadline_s)
        if saved:  # everybody was there once: who does not show up is silent
            for expected in self.machine.members:
                self.watch.heard(expected, time.monotonic())
        self.book.update(state.install.addresses)
        self._announced: Install | None = None
        self._silent: set[Member] = set()  # ever found to be, and not given up so far

    def _on_order(self, order: dict[str, Any]) -> None:
        super()._on_order(order)
        if "suspect" in order:
            self._suspects.put(order["suspect"])

    def _on_orphan(self) -> None:
        """Cleans up in the supervisor's place; the others end at the same moment."""
        time.sleep(ORPHANS_S)
        self.files.remove()

    def run(self) -> str:
        self._after(self.machine.take_outbox())
        while not self.machine.finished:
            self.transport.poll(POLL_MS)
            now = time.monotonic()
            for envelope in self.transport.receive():
                message = envelope.message
                age_s = message.age_ms / 1000 if isinstance(message, Heartbeat) else 0.0
                self.watch.heard(envelope.sender, now, age_s)
                self.book[envelope.sender] = envelope.address
                self._receive(envelope.sender, envelope.message)
            self.machine.partial &= self.told.get("partial", True)
            while not self._suspects.empty():
                self._suspect(self._suspects.get_nowait(), gone=True)
            for silence in self.watch.tick(now):
                if silence.member not in self.machine.members:
                    self.watch.forget(silence.member)
                elif silence.member not in self.machine.dead:
                    self._silent.add(silence.member)
                    self._suspect(silence.member, gone=False)
            self._after(self.machine.tick(now))
        self.link.say("finished", failure=self.machine.failure)
        self.transport.close()  # once everybody has been told to stop
        return self.machine.failure or ""

    def _suspect(self, member: Member, *, gone: bool) -> None:
        self._receive(SUPERVISOR, Suspect(view=NO_VIEW, member=member, gone=gone))

    def _receive(self, sender: Member, message: Message) -> None:
        self._after(self.machine.receive(sender, message, time.monotonic()))

    def _after(self, outbox: Outbox) -> None:
        """Saves before it sends: what was never saved was never said."""
        state = self.machine.take_state()
        if state is not None:
            self.files.save(state, self.owner)
        for given_up in sorted(self._silent & self.machine.dead):
            self._silent.discard(given_up)
            self.link.say("silent", member=given_up)
        to_members: Outbox = []
        for to, message in outbox:
            if to != SUPERVISOR:
                to_members.append((to, message))
            elif isinstance(message, Spawn):
                self.link.say("spawn", role=message.role, count=message.count)
            elif isinstance(message, Stop):
                pass  # said by `run`
        self.post(to_members)
        install = self.machine.install
        if install is not self._announced and install.addresses:
            if self._announced is None or install.view != self._announced.view:
                self.link.say(
                    "view",
                    view=list(install.view),
                    committed=install.committed,
                    servers=install.servers,
                    trainers=install.trainers,
                    rebuilding=install.rebuilding,
                )
            self._announced = install
