"""Controls: break one rule, and the simulator finds a schedule that fails.

Each control overrides as little as it can. The seed beside it failed when the control was written;
it is tried first, and if the simulator has changed since, others are searched. The same seeds hold
with nothing broken, so it is the rule that makes the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest
from broken_rules import (
    AHEAD,
    COORDINATORS,
    FENCE,
    FROZEN_SPARES,
    HARD,
    LATE,
    OVER,
    SEVERAL_PAUSED,
    TRAINERS_FENCE,
    TWO_COORDINATORS,
    Control,
    assert_found,
    broken,
)

from planaria.coordinator.machine import CoordinatorMachine
from planaria.coordinator.state import Gathering, first_state
from planaria.coordinator.watch import Watch
from planaria.errors import StepError
from planaria.kernels.types import Index, Records
from planaria.layout import Layout
from planaria.server.machine import ServerMachine
from planaria.server.rebuilding import Rebuilder
from planaria.server.store import Store
from planaria.simulator import World
from planaria.simulator.campaigns import OldViews, Outcome, run_seed, run_seeds
from planaria.simulator.disk import Disk
from planaria.trainer.machine import TrainerMachine
from planaria.wire.control import CoordinatorState
from planaria.wire.machine import Machine
from planaria.wire.messages import (
    Delta,
    DenseCopy,
    Install,
    Lacks,
    MateRequest,
    Member,
    Message,
    Prepare,
    RangeRequest,
    View,
)

# ---------------------------------------------------------------- servers


class WrongCoefficient(ServerMachine):
    """One parity coefficient of one region is not the code's."""

    def _take_place(self, place: int, blank_at: int | None, layout: Layout | None = None) -> None:
        super()._take_place(place, blank_at, layout)
        assert self.store
        coef = self.store._coef_by_region[min(self.store.sources)]
        coef[np.flatnonzero(coef)[0]] ^= 2


class AppliesADeltaAgain(ServerMachine):
    """Rule 3: holders dedup by (place, step)."""

    def _on_delta(self, sender: Member, message: Delta) -> None:
        assert self.store
        again = message.step <= self.store.history_of(message.place).last
        super()._on_delta(sender, message)
        if again:
            store, by_region = self.store.arenas[0], self.store._coef_by_region[message.place]
            slots, index, delta = store.layout.slots, message.indices[0], message.deltas[0]
            store.records.add_delta(index, slots, by_region, delta)


class SendsNoEmptyDelta(ServerMachine):
    """Rule 3: one delta to each holder, empty included."""

    def _send_delta(self, step: int, holders: Sequence[int]) -> None:
        before = len(self.outbox)
        super()._send_delta(step, holders)
        sent, self.outbox[before:] = self.outbox[before:], []
        for to, message in sent:
            assert isinstance(message, Delta)
            if any(map(len, message.indices)):
                self.outbox.append((to, message))


class ProtectsOneArena(ServerMachine):
    """A delta is of all arenas."""

    def _send_delta(self, step: int, holders: Sequence[int]) -> None:
        before = len(self.outbox)
        super()._send_delta(step, holders)
        for _, message in self.outbox[before:]:
            assert isinstance(message, Delta)
            message.indices[1:] = [index[:0] for index in message.indices[1:]]
            message.deltas[1:] = [delta[:0] for delta in message.deltas[1:]]


class VotesBeforeItIsProtected(ServerMachine):
    """Rule 4: a server votes for what it holds, deltas of others included."""

    @property
    def protected(self) -> int:
        return self.step


class ForgetsWithoutUndoing(ServerMachine):
    """Rule 9: XOR out the deltas after c, *and* forget them."""

    def _take_place(self, place: int, blank_at: int | None, layout: Layout | None = None) -> None:
        super()._take_place(place, blank_at, layout)
        assert self.store
        store = self.store

        def retract(source: int, step: int) -> None:
            store.history_of(source).retract(step)

        store.retract = retract  # type: ignore[method-assign]


class AsksForNoDeltas(ServerMachine):
    """Rule 15: a holder asks for deltas that do not come."""

    def on_retry(self) -> None:
        before = len(self.outbox)
        super().on_retry()
        self.outbox[before:] = [
            sent for sent in self.outbox[before:] if not isinstance(sent[1], Lacks)
        ]


class DecodesAsOfTheNewestStep(ServerMachine):
    """Rule 13: b is never an uncommitted step."""

    def _committed_here(self) -> int:
        assert self.store
        return max(self.store.step, *(history.last for history in self.store.sources.values()))


class BringsNothingForward(ServerMachine):
    """Rule 13: rebuilt parity is brought forward with the deltas that arrived meanwhile."""

    def _take_place(self, place: int, blank_at: int | None, layout: Layout | None = None) -> None:
        super()._take_place(place, blank_at, layout)
        assert self.store
        store = self.store
        restore = store.restore

        def restore_as_is(arena: int, index: Index, values: Records, as_of: int) -> int:
            store._forward = lambda arena, index, values, as_of: values  # type: ignore[method-assign]
            restored = restore(arena, index, values, as_of)
            del store._forward
            return restored

        store.restore = restore_as_is  # type: ignore[method-assign]


class AsksAnybody(ServerMachine):
    """Rule 14, half broken: mates that are being rebuilt are asked too, and say `invalid`."""

    def _take_place(self, place: int, blank_at: int | None, layout: Layout | None = None) -> None:
        class Careless(Rebuilder):
            def on_install(self, install: Install) -> None:
                super().on_install(msgspec.structs.replace(install, rebuilding=[]))

        super()._take_place(place, blank_at, layout)
        assert self.store
        self.rebuilder = Careless(self.store, self.job)


class WaitsForItsOwnRebuild(AsksAnybody):
    """Rule 14: mates answer at once; this one is silent until it has the records itself."""

    def _on_mate_request(self, sender: Member, message: MateRequest | RangeRequest) -> None:
        assert self.store
        if isinstance(message, MateRequest):
            index = message.indices
        else:
            index = np.arange(message.first, message.first + message.count)
        if not len(self.store.missing(message.arena, index)):
            super()._on_mate_request(sender, message)


class RefusesTwoStepsAhead(ServerMachine):
    """A bug that was found: a lookup of c + 3 can reach a replacement at c."""

    def _checked(self, step: int, rank: int, indices: Sequence[object]) -> Store:
        assert self.store
        if step > self.store.step + 2:
            raise StepError(f"step {step} is too far from step {self.store.step}")
        return super()._checked(step, rank, indices)


# ---------------------------------------------------------------- all members, trainers


class DoesNotFreeze(Machine):
    """Rule 7: from the promise on, older views are refused and nothing moves."""

    def _prepare(self, sender: Member, view: View) -> None:
        before = self.promised
        super()._prepare(sender, view)
        self.promised = before


class ServerDoesNotFreeze(DoesNotFreeze, ServerMachine):
    pass


class TrainerDoesNotFreeze(DoesNotFreeze, TrainerMachine):
    pass


class AcceptsOlderViews(Machine):
    """Rule 7: what was said in an older view is refused, whoever said it."""

    def _handle(self, sender: Member, message: Message) -> None:
        if message.view < self.view and not isinstance(message, Prepare | Install):
            message = msgspec.structs.replace(message, view=self.view)
        super()._handle(sender, message)


class ServerAcceptsOlderViews(AcceptsOlderViews, ServerMachine):
    pass


class TrainerAcceptsOlderViews(AcceptsOlderViews, TrainerMachine):
    pass


class KeepsAnswers(TrainerMachine):
    """Rule 11: trainers drop unused answers, and with them the votes of the view before."""

    def on_install(self, old: Install | None, new: Install) -> None:
        answers = {part: dict(places) for part, places in self.arrivals.answers.items()}
        votes = self.protected
        super().on_install(old, new)
        self.arrivals.answers.update(answers)
        self.protected = votes
        self._progress()


class KeepsVotes(TrainerMachine):
    """Rule 10: no vote of an earlier view counts."""

    def on_install(self, old: Install | None, new: Install) -> None:
        votes = self.protected
        super().on_install(old, new)
        self.protected = [max(pair) for pair in zip(votes, self.protected, strict=True)]
        self._progress()


class KeepsOneStep(TrainerMachine):
    """Rule 5: trainers keep the pushes and dense gradients of the last two steps."""

    def give_gradients(self, step: int, *computed: Any, **named: Any) -> None:
        super().give_gradients(step, *computed, **named)
        for old in [kept for kept in self.pushes if kept < step]:
            del self.pushes[old], self.reduction.own[old]


class AnswersLateRequests(TrainerMachine):
    """A bug that was found: a request for dense state can arrive when that state is long gone."""

    def _send_dense(self, to: Member, as_of: int) -> None:
        state = self.dense.states[as_of]
        self.send(to, DenseCopy(view=self.view, step=as_of, state=state))


# ---------------------------------------------------------------- coordinators


class CommitsWhatAnybodyHolds(CoordinatorMachine):
    """Rule 8: c is the minimum over live members."""

    def _decide(self, gathering: Gathering) -> None:
        promises = gathering.promises
        most = max(promise.held for promise in promises.values() if not promise.blank)
        for member, promise in promises.items():
            promises[member] = msgspec.structs.replace(promise, held=most)
        super()._decide(gathering)


class ForgetsTheCheckpoint(CoordinatorMachine):
    """Who starts from a checkpoint has committed its step."""

    def __init__(self, state: CoordinatorState, *arguments: Any, **named: Any) -> None:
        if state.epoch == named["epoch"]:
            state = first_state(state.epoch, state.install.servers, state.install.trainers)
        super().__init__(state, *arguments, **named)


class LosesCount(CoordinatorMachine):
    """Rule 8: more than r members of a group that are dead or not whole end the job."""

    def _missed(self, gone: set[Member]) -> str | None:
        return None


class TakesSilentForGone(CoordinatorMachine):
    """Silent is not gone: who would be missed is waited for."""

    def _give_up_if_bearable(self) -> None:
        if self.silent:
            self._give_up(list(self.silent))


class ForgetsSpares(CoordinatorMachine):
    """A bug that was found: a frozen spare took a place, and nobody missed it there."""

    @property
    def expected(self) -> set[Member]:
        return super().expected & set(self.members)


class ExpectsNobody(Watch):
    """The second line of defence: whoever takes a place must show itself."""

    def expect(self, members: Iterable[Member], now: float) -> None:
        pass


class Shared(Disk):
    """An epoch is claimed by exclusive create, and whoever does not own its epoch is refused."""

    def create(self, epoch: int, owner: Member) -> bool:
        self.claims[epoch] = owner
        return True

    def refuses(self, epoch: int, owner: Member) -> bool:
        return bool(self.states) and max(self.states) > epoch


class SavesTooLate(CoordinatorMachine):
    """Rule 7: epoch and number are on disk before anybody is asked to prepare."""

    def take_state(self) -> CoordinatorState | None:
        state = super().take_state()
        return None if self.gathering else state


class AsksOnce(CoordinatorMachine):
    """A bug that was found: a replacement that dies before its hello is waited for for ever."""

    def _retry(self, now: float) -> None:
        if self.gathering is None or self.gathering.waiting:
            super()._retry(now)


class EndsHalfRebuilt(ServerMachine):
    """A bug that was found: the job ended while records were still to be rebuilt."""

    @property
    def done(self) -> bool:
        return self.store is not None and self.step == self.last and not self.frozen()


class InstallsWithoutAddresses(CoordinatorMachine):
    """A bug that was found: restarted early, it named members that it had never heard of."""

    def _all_known(self) -> bool:
        return True


# ---------------------------------------------------------------- the tests


CONTROLS: list[Control] = [
    ("wrong coefficient", broken(WrongCoefficient), 0, {}),
    ("rule 3, a delta twice", broken(AppliesADeltaAgain), 1, {}),
    ("rule 3, no empty deltas", broken(SendsNoEmptyDelta), 1, {}),
    ("rule 3, one arena", broken(ProtectsOneArena), 0, {}),
    ("rule 4", broken(VotesBeforeItIsProtected), 2, {}),
    ("rule 5", broken(KeepsOneStep), 6, {}),
    ("rule 7, no freeze", broken(ServerDoesNotFreeze, TrainerDoesNotFreeze), 5, HARD),
    ("rule 7, trainers", broken(TrainerAcceptsOlderViews, kind=OldViews), 4, TRAINERS_FENCE),
    ("rule 7, not saved", broken(SavesTooLate), 535, COORDINATORS),
    ("rule 8", broken(CommitsWhatAnybodyHolds), 1, {}),
    ("rule 8, from a checkpoint", broken(ForgetsTheCheckpoint), 0, {}),
    ("silent is not gone", broken(TakesSilentForGone), 0, SEVERAL_PAUSED),
    ("one coordinator", broken(Shared), 2, TWO_COORDINATORS),
    ("rule 9", broken(ForgetsWithoutUndoing), 1, HARD),
    ("rule 10", broken(KeepsVotes), 38, HARD),
    ("rule 11", broken(KeepsAnswers), 12, HARD),
    ("rule 13, uncommitted", broken(DecodesAsOfTheNewestStep), 6, HARD),
    ("rule 13, not forward", broken(BringsNothingForward), 1, {}),
    ("rule 14", broken(WaitsForItsOwnRebuild), 0, HARD),
    ("rule 15, deltas", broken(AsksForNoDeltas), 0, {}),
    ("found: asks once", broken(AsksOnce), 8, {}),
    ("found: ends half rebuilt", broken(EndsHalfRebuilt), 24, HARD),
    ("found: no addresses", broken(InstallsWithoutAddresses), 0, {**COORDINATORS, "steps": 1}),
    ("found: a frozen spare", broken(ForgetsSpares, ExpectsNobody), 2, FROZEN_SPARES),
    ("found: late request", broken(AnswersLateRequests), 5, LATE),
    ("found: two ahead", broken(RefusesTwoStepsAhead), 15, AHEAD),
]


@pytest.mark.parametrize(
    ("_rule", "world", "seed", "campaign"), CONTROLS, ids=[c[0] for c in CONTROLS]
)
def test_a_broken_rule_is_found(
    _rule: str, world: type[World], seed: int, campaign: dict[str, Any]
) -> None:
    assert_found(world, seed, campaign)


def test_mates_that_answer_at_once_may_be_asked_in_vain() -> None:
    """`Install.rebuilding` saves round trips; what rule 14 needs is the answer `invalid`."""
    world = broken(AsksAnybody)
    assert [run_seed(seed, world, **HARD).failed for seed in range(20)] == [None] * 20


@pytest.mark.parametrize("fence", [FENCE, TRAINERS_FENCE], ids=["servers", "trainers"])
def test_messages_of_older_views_change_nothing(fence: dict[str, Any]) -> None:
    outcomes = [run_seed(seed, OldViews, **fence) for seed in range(30)]
    assert [outcome.failed for outcome in outcomes if outcome.failed] == []


def test_a_missing_fence_is_found_in_more_than_one_of_twenty_schedules() -> None:
    """Control of the campaign: a fence that one schedule in a hundred needs is hardly tested."""
    world = broken(TrainerAcceptsOlderViews, kind=OldViews)
    failed = (seed for seed in range(40) if run_seed(seed, world, **TRAINERS_FENCE).failed)
    assert len(list(islice(failed, 3))) == 3


def test_servers_that_listen_to_older_views_hold_what_they_say_they_hold() -> None:
    """A vote says what its sender holds. Deltas and pushes of older views have the same bits as
    those that follow them; so to servers the fence is a second line of defence.
    """
    world = broken(ServerAcceptsOlderViews, kind=OldViews)
    outcomes = [run_seed(seed, world, **FENCE) for seed in range(30)]
    assert [outcome.failed for outcome in outcomes if outcome.failed] == []


def test_losing_more_than_the_code_bears_is_named_and_never_wrong() -> None:
    outcomes: list[Outcome] = list(run_seeds(range(150), **OVER))
    assert [outcome.failed for outcome in outcomes if outcome.failed] == []
    given_up = [outcome.given_up for outcome in outcomes if outcome.given_up]
    assert 25 < len(given_up) < 150
    groups = [reason for reason in given_up if "servers of a group were lost: places" in reason]
    copies = [reason for reason in given_up if "nobody is left" in reason]
    assert len(groups) + len(copies) == len(given_up)
    assert len(groups) > len(copies)


def test_a_coordinator_that_does_not_count_its_dead_is_found() -> None:
    """Control of the test above."""
    world = broken(LosesCount)
    assert any(run_seed(seed, world, **OVER).failed for seed in range(40))
