"""A rehearsal: once through all that a server does, on a few records.

What runs for the first time is slow: modules are imported, code is read from disk, memory is
touched. When a server is lost everybody waits for its replacement, so the replacement, or the
process that it is forked off, has done all of it before.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from planaria.kernels.types import Floats
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.server.job import ServerJob
from planaria.server.machine import ServerMachine
from planaria.server.peeking import LocalPeeks
from planaria.tables import Table, make_arenas
from planaria.wire.codec import decode, encode
from planaria.wire.machine import COORDINATOR, Outbox
from planaria.wire.messages import Install, Lookup, Member, Message, Prepare, Push, View

DIM, ROWS, BEFORE = 4, 400, 2  # steps before the loss
TOKEN, TRAINER = bytes(32), "trainer-0"


class Rehearsal:
    """Four servers, one of which is lost after some steps; its replacement is `spare`."""

    def __init__(self, lost: int = 2) -> None:
        arenas = make_arenas([Table("a", ROWS, DIM)], Optimizer("adagrad"))
        self.layout = Layout.fresh(4, 1)
        self.job = ServerJob(
            arenas, self.layout, seed=0, rebuild_chunk=3, peeks=LocalPeeks(os.getpid(), 1)
        )
        self.names = [f"server-{place}" for place in self.layout.places]
        self.servers: dict[Member, ServerMachine] = {}
        for place, name in enumerate(self.names):
            server = ServerMachine(name, self.job, fresh_place=place, restored_at=0)
            assert server.store
            server.store.set_all_valid()  # zeros are as good as any others
            self.servers[name] = server
        self._install(View(1, 0), committed=0, rebuilding=[])
        for step in range(1, BEFORE + 1):
            self._train(View(1, 0), step)
        self.lost = self.servers.pop(self.names[lost])
        others = replace(self.job, peeks=LocalPeeks(os.getpid(), 2))
        self.spare = ServerMachine("spare", others)
        self.servers["spare"], self.names[lost] = self.spare, "spare"
        self._install(View(2, 0), committed=BEFORE, rebuilding=[lost])
        self._train(View(2, 0), BEFORE + 1)
        now = 0.0
        while not self.spare.whole:
            now += 1.0
            self._deliver(self.spare.tick(now) + self.spare.sweep(), "spare")

    def _install(self, view: View, committed: int, rebuilding: list[int]) -> None:
        install = Install(
            view=view,
            committed=committed,
            servers=self.names,
            trainers=[TRAINER],
            rebuilding=rebuilding,
        )
        for message in (Prepare(view=view), install):
            self._deliver([(name, message) for name in self.names], COORDINATOR)

    def _train(self, view: View, step: int) -> None:
        """Every record changes, those that are still to be rebuilt as well."""
        sent: Outbox = []
        for place, name in enumerate(self.names):
            records = self.layout.arena(ROWS).data_records(place)
            index = [np.arange(records)]
            count = np.arange(records * DIM, dtype=np.float32).reshape(records, DIM)
            gradients: list[Floats] = [count + place]
            asks = Lookup(view=view, rank=0, step=step + 1, part=0, indices=index)
            push = Push(view=view, rank=0, step=step, indices=index, gradients=gradients, lrs=[0.1])
            sent += [(name, asks), (name, push)]
        self._deliver(sent, TRAINER)
        for name, server in self.servers.items():
            self._deliver(server.protect(), name)

    def _deliver(self, sent: Outbox, sender: Member) -> None:
        """These, and whatever is said because of them, over the wire as it would be."""
        messages: list[tuple[Member, Member, Message]] = [(sender, *one) for one in sent]
        while messages:
            sender, to, message = messages.pop(0)
            frames = encode(TOKEN, sender, "", message)
            came = decode(TOKEN, [*frames[:2], *(array.data.cast("B") for array in frames[2:])])
            if to in self.servers:
                assert isinstance(came.message, Message)
                answers = self.servers[to].receive(sender, came.message)
                messages += [(to, *answer) for answer in answers]
