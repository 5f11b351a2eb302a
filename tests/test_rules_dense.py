"""Controls for the rules of the dense state: its copies, its sums, and the lookups in parts.

As in test_rules.py: break one, and the simulator finds a schedule that fails.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from broken_rules import HARD, OVER, Control, assert_found, broken

from planaria.coordinator.machine import CoordinatorMachine
from planaria.kernels.types import Bytes, Floats
from planaria.server.machine import ServerMachine
from planaria.simulator import ToyJob, World
from planaria.simulator.campaigns import run_seed
from planaria.trainer.machine import LAST_PART, TrainerMachine
from planaria.trainer.reducing import Reduction
from planaria.wire.messages import (
    Answer,
    DenseCopy,
    DenseRequest,
    Install,
    Lookup,
    Member,
    Message,
    Promise,
    View,
)

LOSSY: dict[str, Any] = {"steps": 3, "drop": 0.1, "duplicate": 0.3}
KEEPERS: dict[str, Any] = {
    "servers": 4,
    "k": 1,
    "r": 3,
    "trainers": 1,
    "drop": 0.02,
    "duplicate": 0.1,
    "count": 8,
    "spares": 2,
    "kinds": ("kill server", "kill trainer", "kill rebuilding", "suspect trainer"),
}
THREE: dict[str, Any] = {"trainers": 3, "count": 6, "kinds": ("kill server", "kill trainer")}
SHORT: dict[str, Any] = {**KEEPERS, "steps": 1, "drop": 0.0}
ONE_KEEPER: dict[str, Any] = {
    "servers": 3,
    "k": 1,
    "r": 1,
    "trainers": 1,
    "steps": 8,
    "network": "ragged",
    "drop": 0.05,
    "duplicate": 0.0,
    "count": 12,
    "spares": 2,
    "kinds": ("kill server", "kill trainer"),
}
ENDING: dict[str, Any] = {**KEEPERS, "steps": 2, "drop": 0.0}
PARTS: dict[str, Any] = {"network": "echoing", "duplicate": 0.5, "drop": 0.1, "steps": 8}


# ---------------------------------------------------------------- keepers


class VotesWithoutTheDenseState(ServerMachine):
    """Rule 4: a keeper votes for a step when it has the dense state after it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.dense.protects = lambda step, committed: step  # type: ignore[method-assign]


class TakesLaterStates(ServerMachine):
    """Rule 5: one after the other, so that a keeper has that of the committed step, too."""

    def _on_dense(self, message: DenseCopy) -> None:
        if self.dense.due and message.step > self.dense.step + 1:
            self.dense.put(message.step, message.state)
        super()._on_dense(message)


class KeepsOneState(ServerMachine):
    """Rule 5: keepers have the state after the last two steps."""

    def _on_dense(self, message: DenseCopy) -> None:
        super()._on_dense(message)
        self.dense.states = {step: self.dense.states[step] for step in [*self.dense.states][-1:]}


class CountsBareKeepers(CoordinatorMachine):
    """Rule 8: a keeper that has no copy yet is none."""

    def _on_promise(self, sender: Member, promise: Promise) -> None:
        if sender in self.keepers:
            promise = msgspec.structs.replace(promise, dense=True)
        super()._on_promise(sender, promise)


class HoldsWithoutTheDenseState(ServerMachine):
    """Rule 8: a keeper holds no step whose dense state it lacks."""

    def held(self) -> Promise:
        held = self.store.held_step if self.store else 0
        return msgspec.structs.replace(super().held(), held=held)


class AsksNoKeeper(TrainerMachine):
    """Rule 12: keepers give the dense state to a new trainer, too."""

    def _ask_for_dense(self, install: Install) -> None:
        for peer in install.trainers:
            if peer != self.member:
                self.send(peer, DenseRequest(view=self.view, as_of=install.committed))


class SendsNoCopies(TrainerMachine):
    """Rule 11: keepers are sent their copies in a new view. They ask for what does not come."""

    def on_install(self, old: Install | None, new: Install) -> None:
        self._send_copies = lambda first: None  # type: ignore[method-assign]
        super().on_install(old, new)
        del self._send_copies


class AsksForNoCopies(ServerMachine):
    """Rule 15: what a keeper lacks it asks for."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.dense.wanted = lambda step, committed: None  # type: ignore[method-assign]


# ---------------------------------------------------------------- sums


class InOrderOfArrival(Reduction):
    """Rule 2: sums are taken in rank order."""

    def sum_part(self, step: int, rank: int) -> Floats | None:
        came = self._came.get(step, {})
        self._came[step] = dict(enumerate(came.values()))
        total = super().sum_part(step, rank)
        self._came[step] = came
        return total


class SumsInOrderOfArrival(TrainerMachine):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.reduction = InOrderOfArrival(self.reduction.trainers)


class KeepsNoSum(TrainerMachine):
    """Rule 5: a sum is kept for whoever lacks it, also when this trainer has used it."""

    def give_state(self, step: int, state: Bytes) -> None:
        super().give_state(step, state)
        del self.reduction.sums[step]


class KeepsOneDenseState(TrainerMachine):
    """Rule 5: trainers have the state after the last two steps."""

    def give_state(self, step: int, state: Bytes) -> None:
        super().give_state(step, state)
        self.dense.states = {step: state}


class StartsAnywhere(TrainerMachine):
    """Rule 12: a new trainer starts from the state after the committed step."""

    def _send_dense(self, to: Member, as_of: int) -> None:
        super()._send_dense(to, self.dense.step)

    def _start_at(self, copy: DenseCopy) -> None:
        assert self.install
        committed, self.install.committed = self.install.committed, copy.step
        super()._start_at(copy)
        self.install.committed = committed


class SumsBeforeTheVotes(TrainerMachine):
    """Rule 4: dense gradients leave with the others, when the step before is protected."""

    def give_gradients(self, step: int, *computed: Any, **named: Any) -> None:
        super().give_gradients(step, *computed, **named)
        if self._live() and step > self.pushed:
            self._send_contributions(step, range(self.reduction.trainers))

    def _reduce(self) -> None:
        pushed, self.pushed = self.pushed, max(self.pushed, *self.pushes, 0)
        super()._reduce()
        self.pushed = pushed


# ---------------------------------------------------------------- lookups


class MistakesParts(TrainerMachine):
    """Rule 1: an answer is to one part of a step."""

    def on_message(self, sender: Member, message: Message) -> None:
        if isinstance(message, Answer):
            parts = [part for step, part in self.asked if step == message.step]
            message = msgspec.structs.replace(message, part=max(parts, default=0))
        super().on_message(sender, message)


class SaysNotThatItWasTheLast(TrainerMachine):
    """Rule 6: the last lookup says that it is the last."""

    def finish(self) -> None:
        super().finish()
        self._unflag()

    def _unflag(self) -> None:
        for _, message in self.outbox:
            if isinstance(message, Lookup):
                message.last = False


class SaysItOnce(SaysNotThatItWasTheLast):
    """Rule 6, in a new view as well."""

    def finish(self) -> None:
        TrainerMachine.finish(self)

    def on_install(self, old: Install | None, new: Install) -> None:
        super().on_install(old, new)
        self._unflag()


class EndsWithoutACopy(ServerMachine):
    """A bug that was found: the job ended while a keeper had no copy."""

    @property
    def done(self) -> bool:
        return self.whole and self.step == self.last and not self.frozen()


class ServerComesLate(ServerMachine):
    """A bug that was found: given up before its first view, it came back with its first records."""

    def on_install(self, old: Install | None, new: Install) -> None:
        super().on_install(new if old is None and self.store is not None else old, new)


class EndsWithAnyPart(TrainerMachine):
    """A bug that was found: a late answer to an empty lookup was taken for one to the last."""

    def on_message(self, sender: Member, message: Message) -> None:
        if isinstance(message, Answer) and self.last is not None:
            message = msgspec.structs.replace(message, part=LAST_PART)
        super().on_message(sender, message)


CONTROLS: list[Control] = [
    ("rule 1, one part for another", broken(MistakesParts), 0, PARTS),
    ("rule 2, dense", broken(SumsInOrderOfArrival), 0, THREE),
    ("rule 4, keepers", broken(VotesWithoutTheDenseState), 11, KEEPERS),
    ("rule 4, dense", broken(SumsBeforeTheVotes), 39, HARD),
    ("rule 5, one after the other", broken(TakesLaterStates), 67, ONE_KEEPER),
    ("rule 5, keepers", broken(KeepsOneState), 1, KEEPERS),
    ("rule 5, sums", broken(KeepsNoSum), 2, THREE),
    ("rule 5, states", broken(KeepsOneDenseState), 28, {}),
    ("rule 6", broken(SaysNotThatItWasTheLast), 0, {}),
    ("rule 6, again", broken(SaysItOnce), 15, ENDING),
    ("rule 8, bare keepers", broken(CountsBareKeepers), 1, {**OVER, **KEEPERS, "count": 8}),
    ("rule 12, from c", broken(StartsAnywhere), 2, THREE),
    ("rule 8, held", broken(HoldsWithoutTheDenseState), 74, KEEPERS),
    ("rule 12, keepers", broken(AsksNoKeeper), 0, KEEPERS),
    ("rule 15, copies", broken(AsksForNoCopies), 0, KEEPERS),
    ("found: any part ends", broken(EndsWithAnyPart), 245, LOSSY),
    ("found: ends without a copy", broken(EndsWithoutACopy, SendsNoCopies), 10, SHORT),
]


@pytest.mark.parametrize(
    ("_rule", "world", "seed", "campaign"), CONTROLS, ids=[c[0] for c in CONTROLS]
)
def test_a_broken_rule_of_the_dense_state_is_found(
    _rule: str, world: type[World], seed: int, campaign: dict[str, Any]
) -> None:
    assert_found(world, seed, campaign)


def test_copies_are_sent_at_once_to_save_a_wait() -> None:
    """What a keeper is not sent it asks for, a little later."""
    world = broken(SendsNoCopies)
    assert [run_seed(seed, world, **KEEPERS).failed for seed in range(20)] == [None] * 20


def test_a_trainer_that_comes_late_starts_blank() -> None:
    """It was given up before its first view, and then taken for a spare by the next coordinator."""
    job = ToyJob(servers=3, k=1, r=1, trainers=1)
    trainer = TrainerMachine("trainer-1", job.trainer_job(1.0), job.first_dense(), fresh_rank=0)
    servers = [f"server-{place}" for place in range(job.servers)]
    install = Install(
        view=View(2, 5),
        committed=4,
        servers=servers,
        trainers=["trainer-1"],
        rebuilding=[],
        keepers=1,
    )
    sent = trainer.receive("coordinator", install)
    assert [(to, type(message)) for to, message in sent] == [(servers[0], DenseRequest)]
    state = np.zeros(20, np.uint8)
    trainer.receive(servers[0], DenseCopy(view=View(2, 5), step=4, state=state))
    assert (trainer.blank, trainer.step, trainer.dense.as_of(4)) == (False, 5, state)


@pytest.mark.parametrize(("kind", "step"), [(ServerMachine, 3), (ServerComesLate, 0)])
def test_a_server_that_was_given_up_before_its_first_view_starts_blank(
    kind: type[ServerMachine], step: int
) -> None:
    """And with a control. A schedule in which that happens is rare."""
    job = ToyJob(4, 2, 1, 1)
    server = kind("server-0", job.server_job(1.0), fresh_place=0)
    others = [f"server-{n}" for n in range(4, 7)]
    install = Install(
        view=View(1, 2),
        committed=3,
        servers=[others[0], "server-0", *others[1:]],
        trainers=["trainer-0"],
        rebuilding=[1],
    )
    server.receive("coordinator", install)
    assert (server.step, server.whole) == (step, step == 0)
    assert server.place == (1 if step else 0)
