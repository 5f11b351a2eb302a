"""The control plane under a seeded scheduler: it ends well, or says truly why not, and never hangs.

Controls break one rule each, and a schedule fails; the same schedules hold with nothing broken.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from planaria.config import Config
from planaria.control import supervising
from planaria.control.acting import Kill, Start
from planaria.control.children import FIRST_BATCH, Child, Ended
from planaria.control.leaving import APART_S
from planaria.control.rolling_back import RollBackMachine
from planaria.control.saving import Pending, SaveMachine
from planaria.control.supervising import SupervisorMachine
from planaria.coordinator.machine import SUPERVISOR, CoordinatorMachine
from planaria.coordinator.state import first_state
from planaria.simulator.control import ControlWorld
from planaria.simulator.control_campaigns import StrikesAt, run_control_seed
from planaria.simulator.control_faults import KILLED
from planaria.wire.control import (
    LeftLoop,
    Listening,
    Ready,
    Rebuilding,
    Silent,
    StepDone,
    Told,
    Viewed,
    Waiting,
    WantMore,
    Working,
)
from planaria.wire.messages import NO_VIEW, Hello, Member, Promise, Suspect, View

SEEDS = range(500)
SEARCHED = range(120)  # by a control, until one fails
BOUNDARIES = 300  # messages of an undisturbed run, about


def done_by(rank: int, step: int) -> StepDone:
    return StepDone(rank=rank, step=step, rows=[], loss=None)


@pytest.mark.campaign
def test_no_schedule_hangs_ends_for_nothing_or_is_silent_about_the_last_save() -> None:
    assert [broken for seed in SEEDS if (broken := run_control_seed(seed))] == []


@pytest.mark.parametrize("distant", [False, True])
@pytest.mark.parametrize("victim", ["sender", "coordinator", "member", "supervisor"])
@pytest.mark.campaign
def test_a_blow_at_any_message_to_the_supervisor_is_borne(victim: str, distant: bool) -> None:
    struck = 0
    for boundary in range(1, BOUNDARIES, 1 if victim == "sender" else 3):
        world = StrikesAt(boundary, victim, distant=distant)
        world.run()
        struck += world.heard >= boundary
        assert world.sentence is None, (boundary, world.sentence, world.story)
    assert struck > BOUNDARIES / 6  # the others came after the end


def test_schedules_reach_every_end() -> None:
    """A control of the campaign: it is not all one story."""
    worlds = [ControlWorld(seed).run() for seed in range(150)]
    assert any(world.sentence is None and world.failures for world in worlds)
    assert any(world.rolled_back and world.sentence is None for world in worlds)
    assert any(world.lost for world in worlds)
    assert any(world.sentence and not world.lost for world in worlds)
    last = [one for world in worlds for one in world.saves.published if one["step"] == world.steps]
    assert any("failed" in one for one in last)


# ---------------------------------------------------------------------------- controls


class OrdersOnce(SupervisorMachine):
    """Orders are sent, and not again."""

    def _send_orders(self) -> None:
        for child in self.children.values():
            if child.sent[0] == self.orders.number:
                child.obeyed = self.orders.number
        super()._send_orders()


class NeverWatchesTheCoordinator(SupervisorMachine):
    def heard(self, member: Member, now: float) -> None:
        self._watch.forget(member)

    def _on_listening(self, member: Member, child: Child, told: Any) -> None:
        super()._on_listening(member, child, told)
        self._watch.forget(member)


class BlamesOthersForItsSleep(SupervisorMachine):
    def tick(self, now: float) -> None:
        self._watch._last_tick = None
        super().tick(now)


class ASpareIsFatal(SupervisorMachine):
    def _on_unplaced_gone(self, member: Member, child: Child, ended: Ended) -> None:
        self._end(f"{member} ended")


class NeverStartsSparesAgain(SupervisorMachine):
    """Nor what a view waits for."""

    def _on_unplaced_gone(self, member: Member, child: Child, ended: Ended) -> None:
        pass


class RollsBackForEver(RollBackMachine):
    def on_lost(self, step: int, newest: int | None) -> int | None:
        self.barren = -1
        return super().on_lost(step, newest)


class RollsBackToAnything(RollBackMachine):
    def on_lost(self, step: int, newest: int | None) -> int | None:
        back = super().on_lost(step, newest)
        return back and back - 1


class PublishesWhatItHas(SaveMachine):
    """A part that has failed is passed over."""

    def _close_if_all_have_spoken(self, step: int, pending: Pending, now: float) -> None:
        if pending.parts and pending.parts.keys() | pending.problems.keys() >= self._places(
            pending
        ):
            self._complete[step] = self._pending.pop(step)
            self._publish_next(now)
        else:
            super()._close_if_all_have_spoken(step, pending, now)


CONTROLS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"supervisor_class": OrdersOnce}, ("kill coordinator", "kill")),
    ({"supervisor_class": NeverWatchesTheCoordinator}, ("freeze coordinator", "kill")),
    ({"supervisor_class": BlamesOthersForItsSleep}, ("sleep", "sleep all")),
    ({"supervisor_class": ASpareIsFatal}, ("stillborn", "kill")),
    ({"supervisor_class": NeverStartsSparesAgain}, ("stillborn", "kill")),
    ({"rolling_back_class": RollsBackForEver}, ("stubborn error",)),
    ({"rolling_back_class": RollsBackToAnything}, ("kill",)),
    ({"saves_class": PublishesWhatItHas}, ("failing disk",)),
]


@pytest.mark.parametrize(
    ("broken", "kinds"), CONTROLS, ids=[next(iter(c[0].values())).__name__ for c in CONTROLS]
)
def test_a_broken_rule_is_found(broken: dict[str, Any], kinds: tuple[str, ...]) -> None:
    world = type("BrokenWorld", (ControlWorld,), broken)
    for seed in SEARCHED:
        if run_control_seed(seed, world, kinds=kinds):
            assert run_control_seed(seed, kinds=kinds) is None
            return
    pytest.fail("no schedule fails without this rule")


def test_a_silent_spare_is_killed_and_another_one_started_however_often() -> None:
    config = Config.from_dict({"servers": 3, "trainers": 1, "spares": 1})
    machine = SupervisorMachine(config, 0, 0.0)
    for second in range(1, 2 * supervising.MOST_BARREN):
        [spare] = machine.spares
        machine.receive(spare, Ready(), float(second))
        silent = Silent(member=spare, seconds=2.1, hung=False)
        machine.receive("coordinator-0", silent, float(second))
        assert [one.member for one in machine.take() if isinstance(one, Kill)] == [spare]
        machine.on_exit(spare, Ended(-9), float(second))
        assert spare not in machine.spares
    assert (machine.verdict, machine.failures, len(machine.spares)) == (None, [], 1)


def test_spares_that_die_now_and_then_were_of_use_and_are_started_again() -> None:
    config = Config.from_dict({"servers": 3, "trainers": 1, "spares": 1})
    for apart_s, left in ((supervising.OF_USE_S + 1, 1), (1.0, 0)):
        machine, now = SupervisorMachine(config, 0, 0.0), 0.0
        for _ in range(2 * supervising.MOST_BARREN):
            for spare in machine.spares:
                machine.receive(spare, Ready(), now)
                now += apart_s
                machine.on_exit(spare, Ended(-9), now)
            for _ in range(60):  # another one is started, sooner or later
                now += 1.0
                machine.heard("coordinator-0", now)
                machine.receive("server-0", Working(what="much", done=int(now), of=9999), now)
                machine.tick(now)
        assert (machine.verdict, len(machine.spares)) == (None, left)


class FreezesASpare(ControlWorld):
    """A spare stands still for good, and is forgotten when a server dies."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, count=0)
        self.frozen: Member = ""
        self.after(1.2, self._freeze)
        self.after(4.0, self._kill)

    def _freeze(self) -> None:
        coordinator = self.processes[self.supervisor.coordinator].machine
        assert coordinator
        for spare in list(coordinator.spares["server"])[:1]:
            self.frozen = spare
            self.pause(spare, 1000.0, beats=False)

    def _kill(self) -> None:
        if self.supervisor.servers[0] in self.processes:
            self.end(self.supervisor.servers[0], KILLED)


def test_a_frozen_spare_is_killed_and_does_not_delay_who_takes_a_lost_place() -> None:
    """The job stood still until the supervisor's patience was at its end."""
    worlds = [FreezesASpare(seed) for seed in range(60)]
    frozen = [world for world in worlds if world.run() and world.frozen]
    assert len(frozen) > 20
    for world in frozen:
        assert any(f"kills {world.frozen}" in line for line in world.story), world.story
        assert world.now - world.began < 20.0, world.story


@pytest.mark.parametrize(
    ("awake", "chosen"), [(["server-3", "server-4"], "server-3"), (["server-4"], "server-4")]
)
def test_a_spare_that_has_become_quiet_is_not_chosen_while_there_are_others(
    awake: list[Member], chosen: Member
) -> None:
    config = Config.from_dict({"servers": 3, "parity": 1, "trainers": 1})
    servers = ["server-0", "server-1", "server-2"]
    state = first_state(1, servers, ["trainer-0"])
    machine = CoordinatorMachine(state, config.layout, epoch=1, now=0.0)
    said = [(member, 0.0) for member in [*servers, "trainer-0", "server-3", "server-4"]]
    for member, at in [*said, *((member, 1.0) for member in awake)]:
        hello = Hello(view=NO_VIEW, member=member, role=member[:-2], address=f"at {member}")
        machine.receive(member, hello, at)
    machine.receive(SUPERVISOR, Suspect(view=NO_VIEW, member="server-1", gone=True), 1.1)
    assert machine.gathering
    promise = Promise(view=machine.gathering.view, held=0, blank=False, whole=True, dense=True)
    for member in ("server-0", "server-2", "trainer-0"):
        machine.receive(member, promise, 1.2)
    assert machine.install.servers == ["server-0", chosen, "server-2"]


def test_a_start_takes_as_many_messages_as_there_are_members() -> None:
    """Whoever says hello once more is sent the view, and not everybody else with it."""
    servers = [f"server-{place}" for place in range(50)]
    config = Config.from_dict({"servers": 50, "parity": 1, "trainers": 1})
    state = first_state(1, servers, ["trainer-0"])
    machine = CoordinatorMachine(state, config.layout, epoch=1, now=0.0)
    sent = []
    for _ in range(2):  # the second time before anybody has installed it
        for member in [*servers, "trainer-0"]:
            hello = Hello(view=NO_VIEW, member=member, role=member[:-2], address=f"at {member}")
            sent += machine.receive(member, hello, 0.1)
    assert len(sent) == 2 * 51
    assert {to for to, _ in sent} == {*servers, "trainer-0"}


def test_a_stall_gets_a_new_view_then_replaces_whom_all_wait_for_and_only_then_ends() -> None:
    config = Config.from_dict({"servers": 3, "trainers": 1, "spares": 0})
    machine = SupervisorMachine(config, 0, 0.0)
    for member in list(machine.children):
        machine.receive(member, Ready(), 0.0)
    servers, trainers = ["server-0", "server-1", "server-2"], ["trainer-0", "trainer-1"]
    viewed = Viewed(view=View(1, 1), committed=0, servers=servers, trainers=trainers, rebuilding=[])
    machine.receive("coordinator-0", viewed, 0.0)
    machine.receive("trainer-0", Waiting(step=7, places=[1, 2], what="rows"), 1.0)
    machine.take()
    seen: list[tuple[int, list[str]]] = []
    for tenth in range(1, 4000):
        machine.heard("coordinator-0", tenth / 10)
        machine.tick(tenth / 10)
        killed = [one.member for one in machine.take() if isinstance(one, Kill)]
        if (machine.orders.again, killed) not in [(1, []), (0, [])]:
            seen.append((machine.orders.again, killed))
        if machine.verdict:
            break
    assert seen == [(1, ["server-1"])]  # and not those who wait for it in turn
    assert machine.verdict
    assert "trainer:0 waits in step 7 for rows of server:1," in str(machine.verdict.sentence)


def test_a_trainer_that_computes_is_no_stall() -> None:
    """A user thought about a batch for two minutes, and the job was over."""
    machine = SupervisorMachine(
        Config.from_dict({"servers": 2, "trainers": 1, "spares": 0}), 0, 0.0
    )
    for member in list(machine.children):
        machine.receive(member, Ready(), 0.0)
    for second in range(1000):
        machine.heard("coordinator-0", float(second))
        if second % 5 == 0:
            at_work = Working(what="computing", done=second, of=second + 1)
            machine.receive("trainer-0", at_work, float(second))
        machine.tick(float(second))
    assert (machine.verdict, machine.orders.again) == (None, 0)


class SlowScript:
    """A job that has lost its trainer, and runs the script again: second by second."""

    def __init__(self, *sets: str) -> None:
        config = Config.load(None, ["servers=2", "trainers=1", "spares=0", "parity=0", *sets])
        self.machine = SupervisorMachine(config, 0, 0.0)
        self.machine.take()
        self.killed: list[Member] = []
        self.second = 0
        for member in list(self.machine.children):
            self.machine.receive(member, Ready(), 0.0)
        servers, trainers = ["server-0", "server-1"], ["trainer-0"]
        viewed = Viewed(
            view=View(1, 1), committed=0, servers=servers, trainers=trainers, rebuilding=[]
        )
        self.machine.receive("coordinator-0", viewed, 0.0)
        self.machine.on_exit("trainer-0", Ended(-9, "killed by SIGKILL"), 0.0)
        self.started = self.wants(1, 0.0)
        self.machine.receive("trainer-1", Working(what=FIRST_BATCH, done=0, of=1), 0.0)

    def wants(self, trainers: int, now: float) -> list[Member]:
        """Whom the supervisor starts, where the coordinator asks for so many."""
        self.machine.receive("coordinator-0", WantMore(role="trainer", count=trainers), now)
        return [one.member for one in self.machine.take() if isinstance(one, Start)]

    def pass_time(self, seconds: int, *, works: bool) -> None:
        for second in range(self.second + 1, self.second + seconds + 1):
            self.second, now = second, float(second)
            self.machine.heard("coordinator-0", now)
            if works and second % 5 == 0:
                at_work = Working(what=FIRST_BATCH, done=second, of=second + 1)
                self.machine.receive("trainer-1", at_work, now)
            if second % 30 == 0:
                self.started += self.wants(1, now)
            self.machine.tick(now)
            self.killed += [one.member for one in self.machine.take() if isinstance(one, Kill)]


def test_a_script_that_works_up_to_its_first_batch_is_waited_for_and_started_once() -> None:
    """It was killed after two minutes, and the job had stalled before; meanwhile another one was
    started every 30 s.
    """
    job = SlowScript()
    job.pass_time(3600, works=True)
    assert (job.machine.verdict, job.machine.orders.again, job.killed) == (None, 0, [])
    assert job.started == ["trainer-1"]


@pytest.mark.parametrize(("sets", "limit_s"), [([], 300), (["cluster.hang_limit_s=900"], 900)])
def test_a_script_that_does_nothing_before_its_first_batch_is_ended_at_last(
    sets: list[str], limit_s: int
) -> None:
    job = SlowScript(*sets)
    job.pass_time(limit_s, works=False)
    assert (job.machine.verdict, job.machine.orders.again, job.killed) == (None, 0, [])
    job.pass_time(1, works=False)
    assert job.killed == ["trainer-1"]


def test_a_script_that_has_slept_long_before_its_first_batch_is_no_stall_when_it_comes() -> None:
    job = SlowScript()
    job.pass_time(250, works=False)
    job.machine.receive("trainer-1", Listening(role="trainer", address="there"), 250.0)
    job.pass_time(50, works=False)
    assert (job.machine.verdict, job.machine.orders.again, job.killed) == (None, 0, [])
    job.pass_time(50, works=False)
    assert job.machine.orders.again == 1, "from here on it is"


def test_a_second_trainer_that_is_lost_is_replaced_while_a_script_starts() -> None:
    machine = SupervisorMachine(
        Config.from_dict({"servers": 3, "trainers": 2, "spares": 0}), 0, 0.0
    )
    machine.take()
    for number in range(2):  # before any view
        machine.on_exit(f"trainer-{number}", Ended(-9), 1.0)
        machine.receive("coordinator-0", WantMore(role="trainer", count=1 + number), 1.0)
        started = [one.member for one in machine.take() if isinstance(one, Start)]
        assert started == [f"trainer-{2 + number}"]
        machine.receive(f"trainer-{2 + number}", Working(what=FIRST_BATCH, done=0, of=1), 1.0)
    machine.receive("coordinator-0", WantMore(role="trainer", count=2), 31.0)
    assert not [one for one in machine.take() if isinstance(one, Start)]
    machine.on_exit("server-0", Ended(-9), 32.0)
    machine.receive("coordinator-0", WantMore(role="server", count=1), 32.0)
    assert [one.role for one in machine.take() if isinstance(one, Start)] == ["server"]


@pytest.mark.parametrize(("rate", "stalls"), [(0, True), (1, False)])
def test_a_rebuild_that_does_not_move_is_a_stall(rate: int, stalls: bool) -> None:
    """A server told for a quarter of an hour that it had rebuilt nothing so far."""
    config = Config.from_dict({"servers": 3, "trainers": 1, "spares": 0})
    machine = SupervisorMachine(config, 0, 0.0)
    for member in list(machine.children):
        machine.receive(member, Ready(), 0.0)
    for second in range(300):
        machine.heard("coordinator-0", float(second))
        machine.receive("server-1", Rebuilding(place=1, rows=rate * second), float(second))
        machine.tick(float(second))
    assert bool(machine.orders.again) == stalls


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ([LeftLoop(rank=0, step=7), LeftLoop(rank=1, step=8)], "rank 0 .* 7, and rank 1 .* 8;"),
        (
            [LeftLoop(rank=0, step=7), done_by(1, 8)],
            "trainer-1 is in step 8, but rank 0 .* step 7;",
        ),
        (
            [done_by(1, 8), LeftLoop(rank=0, step=7)],
            "trainer-1 is in step 8, but rank 0 .* step 7;",
        ),
        (
            [LeftLoop(rank=0, step=7), Waiting(step=8, places=[0], what="rows")],
            "trainer-1 is in step 8, but rank 0 .* step 7;",
        ),
        ([done_by(1, 7), LeftLoop(rank=0, step=7), LeftLoop(rank=1, step=7)], None),
        ([LeftLoop(rank=0, step=7), done_by(1, 7), LeftLoop(rank=1, step=7)], None),
    ],
)
def test_ranks_leave_their_loops_at_the_same_step(told: list[Told], says: str | None) -> None:
    machine = SupervisorMachine(Config.from_dict({"servers": 3, "trainers": 2}), 0, 0.0)
    for one in told:
        rank = one.rank if isinstance(one, LeftLoop) else 1
        machine.receive(f"trainer-{rank}", one, 1.0)
    for tenth in range(10, 10 * int(2 + APART_S)):
        machine.tick(tenth / 10)
    if says is None:
        assert machine.verdict is None
    else:
        assert machine.verdict
        assert re.search(says, str(machine.verdict.sentence))


def test_a_loop_that_an_exception_has_left_is_gone_on_with_by_whoever_replaces_it() -> None:
    """The loop cannot tell an exception from a break: what it said ended the job, though the
    trainer was replaced.
    """
    machine = SupervisorMachine(Config.from_dict({"servers": 3, "trainers": 2}), 0, 0.0)
    machine.receive("trainer-0", LeftLoop(rank=0, step=7), 1.0)
    machine.receive("trainer-1", Waiting(step=8, places=[], what="gradients"), 1.1)
    machine.tick(1.2)
    machine.on_exit("trainer-0", Ended(1, "MemoryError"), 1.5)
    for step in range(8, 20):
        machine.receive("trainer-2", done_by(0, step), float(step))
        machine.tick(float(step))
    assert machine.verdict is None


def test_one_exception_is_no_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(supervising.PATIENCE, "error", 1)
    assert any(run_control_seed(seed, kinds=("error",)) for seed in SEARCHED)
    monkeypatch.undo()
    assert not any(run_control_seed(seed, kinds=("error",)) for seed in SEARCHED)


def test_a_place_that_always_fails_ends_the_job_and_is_named() -> None:
    sentences = {ControlWorld(seed, ("stubborn error",), 1).run().sentence for seed in range(40)}
    named = [text for text in sentences if text and "times at step" in text]
    assert any("server:0" in text or "trainer:0" in text for text in named)
