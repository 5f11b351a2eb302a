"""Schedules of the control plane: the real supervisor, saves, roll-backs and coordinator.

Members are puppets (puppets.py); what they hold is one number, their step. Processes start late or
die at birth, end with exceptions, freeze and hang; the supervisor sleeps; messages between it and
the others are lost; the disk of checkpoints is slow or fails. One seed decides everything.

What must hold: the run ends in time; it ends well, or with a sentence that names what happened and
is allowed by the faults; a run that ends well has published its last step, or says that it has not;
nobody is killed without a reason; all roll back to nothing but a checkpoint that was published.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planaria.config import Config
from planaria.control.rolling_back import RollBackMachine
from planaria.control.saving import Discard, Publish, SaveMachine
from planaria.control.supervising import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_FENCED,
    Ended,
    Failure,
    Kill,
    Send,
    Start,
    SupervisorMachine,
)
from planaria.coordinator.machine import DONE, SUPERVISOR, CoordinatorMachine, first_state
from planaria.coordinator.watch import Pulse, Silence, Watch
from planaria.simulator.checks import Failure as Broken
from planaria.simulator.disk import Disk
from planaria.simulator.puppets import Puppet
from planaria.wire.control import (
    Finished,
    Heard,
    Listening,
    Obeyed,
    Orders,
    PartFailed,
    PartSaved,
    Ready,
    Silent,
    StepDone,
    Tell,
    Told,
    Viewed,
    WantMore,
)
from planaria.wire.machine import COORDINATOR, Outbox
from planaria.wire.messages import NO_VIEW, Heartbeat, Member, Message, Spawn, Suspect
from planaria.wire.telling import Listener, Teller

TICK_S = 0.1
BEAT_S = 0.2
STEP_S = 0.1
END_S = 400.0  # within which a run must be over, whatever happens to it
KINDS = (
    "kill",
    "kill",
    "kill coordinator",
    "error",  # an exception, once
    "stubborn error",  # whoever has that place ends with an exception, again and again
    "freeze",  # SIGSTOP for less or more than the limit
    "hang",  # the main loop stands still, the heart beats
    "freeze coordinator",
    "sleep",  # the supervisor alone
    "sleep all",  # a paused container
    "stillborn",  # the next processes end before they are of any use
    "slow disk",
    "failing disk",
)


@dataclass
class Process:
    role: str
    puppet: Puppet | None = None
    machine: CoordinatorMachine | None = None
    watch: Watch | None = None
    pulse: Pulse = field(default_factory=lambda: Pulse(BEAT_S, 0.0))
    teller: Teller = field(default_factory=Teller)  # of a coordinator
    orders: Orders = field(default_factory=Orders)
    paused_until: float = 0.0
    beats: bool = False  # also while it is paused
    backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    silent: dict[Member, Silence] = field(default_factory=dict)
    again: int = 0
    announced: Any = None
    struck: bool = False  # a fault has hit it
    told_end: bool = False


class ControlWorld:
    """One job under one schedule. `run` raises Broken when a promise is."""

    supervisor_class: type[SupervisorMachine] = SupervisorMachine
    saves_class: type[SaveMachine] = SaveMachine
    rolling_back_class: type[RollBackMachine] = RollBackMachine

    def __init__(self, seed: int, kinds: tuple[str, ...] = KINDS, count: int | None = None) -> None:
        draw = self.random = random.Random(f"control {seed}")
        self.seed, self.kinds = seed, kinds
        servers, k, parity = draw.choice(((4, 2, 1), (5, 2, 2), (3, 1, 1)))
        self.strategy = draw.choice(("erasure", "erasure", "checkpoint", "none"))
        self.steps = 40
        self.config = Config.from_dict(
            {
                "servers": servers,
                "k": k,
                "parity": parity,
                "strategy": self.strategy,
                "trainers": draw.choice((1, 2)),
                "spares": draw.choice((0, 1, 2)),
                "steps": self.steps,
                "cluster": {"deadline_s": 10.0},
                "checkpoint": {"path": "memory", "every_steps": draw.choice((5, 8, 40))},
            }
        )
        self.drop = draw.choice((0.0, 0.0, 0.05, 0.1))
        self.now = 1000.0
        self.began = self.now
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.sequence = 0
        self.story: list[str] = []
        self.failures: list[Failure] = []
        self.on_disk: set[int] = set()  # steps of checkpoints that count
        self.disk_slow_until = self.disk_fails_until = 0.0
        self.slept_until = 0.0  # the supervisor
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.stillborn = 0
        self.cursed: set[tuple[str, int]] = set()  # places whose processes end with an exception
        self.sentence: str | None = None
        self.lost = self.ended = False
        self.rolled_back: list[tuple[int, int]] = []
        self.rolling_back = self.rolling_back_class(self.config.survival, 0)
        self.saves = self.saves_class(self.config, 0, self.now)
        self._start_all(0)
        for _ in range(draw.randint(1, 5) if count is None else count):
            self.after(draw.uniform(0.0, 8.0), self.strike)

    # ------------------------------------------------------------------ one set of processes

    def _start_all(self, step: int) -> None:
        self.start = self.trained = step
        self.generation = getattr(self, "generation", 0) + 1
        self.processes: dict[Member, Process] = {}
        self.listeners: dict[Member, Listener] = {}
        self.disk = Disk()
        self.supervisor = self.supervisor_class(self.config, step, self.now)
        self._act()
        generation = self.generation
        self.after(TICK_S, self._tick_supervisor, generation)
        self.after(STEP_S, self._train, generation)

    def _launch(self, action: Start, generation: int) -> None:
        if generation != self.generation or self.ended:
            return
        if self.stillborn and action.number is None:
            self.stillborn -= 1
            self.note(f"{action.member} dies at birth")
            self._exit_soon(action.member, Ended(EXIT_FAILED, "MemoryError"))
            return
        process = self.processes[action.member] = Process(action.role)
        process.pulse = Pulse(BEAT_S, self.now)
        if action.role == "coordinator":
            self._become_coordinator(action.member, process)
        else:
            process.puppet = Puppet(
                action.member,
                action.role,
                action.number,
                self.steps,
                self.config.save_every_steps,
                self.config.saves_last_step,
                self.config.servers,
                self.start if action.number is not None else 0,
            )
        self._tell(action.member, Listening(role=action.role, address=f"at {action.member}"))
        self._tell(action.member, Ready())
        self.after(self.random.uniform(0.0, TICK_S), self._tick, action.member, generation)
        self.after(self.random.uniform(0.0, BEAT_S), self._beat, action.member, generation)

    def _become_coordinator(self, member: Member, process: Process) -> None:
        epoch = self.disk.free_epoch()
        self.disk.create(epoch, member)
        config = self.config
        fresh = first_state(
            epoch,
            [f"server-{place}" for place in range(config.servers)],
            [f"trainer-{rank}" for rank in range(config.ranks)],
            committed=self.start,
        )
        state = self.disk.state if self.disk.states else fresh
        process.machine = CoordinatorMachine(
            state,
            config.layout,
            epoch=epoch,
            now=self.now,
            retry_s=0.5,
            deadline_s=config.cluster.deadline_s,
        )
        limit_s = config.cluster.heartbeat_limit_ms / 1000
        process.watch = Watch(limit_s, config.cluster.hang_limit_s)
        if state.epoch < epoch:
            for expected in process.machine.members:
                process.watch.heard(expected, self.now)
        self._after_coordinator(member, process, process.machine.take_outbox())

    def _exit_soon(self, member: Member, ended: Ended) -> None:
        self.processes.pop(member, None)
        self.after(0.002, self._supervise, self.supervisor.on_exit, member, ended, self.generation)

    # ------------------------------------------------------------------ time

    def after(self, delay: float, event: Callable[..., None], *arguments: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + delay, self.sequence, event, arguments))

    def run(self) -> ControlWorld:
        try:
            while not self.ended:
                self.now, _, event, arguments = heapq.heappop(self.events)
                event(*arguments)
                if self.now - self.began > END_S:
                    raise Broken(f"it hangs at step {self.trained}: {sorted(self.processes)}")
            self._check_end()
        except Exception as error:
            what = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
            raise Broken(f"seed {self.seed}: {what}; {'; '.join(self.story)}") from error
        return self

    def note(self, what: str) -> None:
        self.story.append(f"{self.now - self.began:.2f} {what}")

    # ------------------------------------------------------------------ the supervisor

    def _supervise(self, call: Callable[..., None], *arguments: Any) -> None:
        """Something for the supervisor; it waits while it sleeps. Last: the generation."""
        *rest, generation = arguments
        if generation != self.generation or self.ended:
            return
        if self.now < self.slept_until:
            self.backlog.append((self._supervise, (call, *arguments)))
            return
        call(*rest, self.now)
        self._act()

    def _tick_supervisor(self, generation: int) -> None:
        if generation != self.generation or self.ended:
            return
        if self.now >= self.slept_until:
            backlog, self.backlog = self.backlog, []
            for event, arguments in backlog:
                event(*arguments)
            if generation != self.generation or self.ended:
                return
            self.supervisor.tick(self.now)
            self.saves.tick(self.now)
            saves = self.saves
            self.supervisor.order(
                save_at=saves.save_at, save_all=saves.save_all, saved=saves.newest()
            )
            self._act()
        self.after(TICK_S, self._tick_supervisor, generation)

    def _act(self) -> None:
        for action in self.supervisor.take():
            match action:
                case Start():
                    delay = self.random.uniform(0.05, 0.5)
                    self.after(delay, self._launch, action, self.generation)
                case Kill():
                    self._on_kill(action)
                case Send():
                    self._send_control(action.to, action.orders)
        for work in self.saves.take_work():
            self.after(self._disk_s(), self._do, work, self.generation)
        self.failures += self.supervisor.failures
        self.supervisor.failures = []
        self.saves.notes.clear()
        verdict = self.supervisor.verdict
        if verdict and (verdict.sentence is not None or not self.saves.busy):
            self._on_verdict(verdict.sentence, verdict.lost)

    def _on_kill(self, kill: Kill) -> None:
        process = self.processes.get(kill.member)
        if process is None:
            return
        if not process.struck:
            raise Broken(f"{kill.member} was killed for nothing: {kill.why}")
        self.note(f"the supervisor kills {kill.member}: {kill.why}")
        self._exit_soon(kill.member, Ended(-9, "killed by SIGKILL"))

    def _on_verdict(self, sentence: str | None, lost: bool) -> None:
        self.processes.clear()
        if sentence is None or not lost:
            self._end(sentence, False)
            return
        self.saves.close(self.now)
        for work in self.saves.take_work():
            self._do(work, self.generation)
        newest = max(self.on_disk, default=None)
        back = self.rolling_back.on_lost(self.supervisor.step, newest)
        if back is None:
            self._end(sentence, True)
            return
        if back not in {self.start, 0, newest}:
            raise Broken(f"all roll back to step {back}, which was never published")
        self.note(f"all roll back from {self.supervisor.step} to {back}: {sentence}")
        self.rolled_back.append((self.supervisor.step, back))
        self.saves = self.saves.after_rollback(self.config, back, self.now)
        self.backlog.clear()
        self._start_all(back)

    def _end(self, sentence: str | None, lost: bool) -> None:
        self.saves.close(self.now)
        for work in self.saves.take_work():
            self._do(work, self.generation)
        self.sentence, self.lost, self.ended = sentence, lost, True

    # ------------------------------------------------------------------ messages

    def _tell(self, member: Member, what: Told) -> None:
        process = self.processes[member]
        teller = process.puppet.teller if process.puppet else process.teller
        self._to_supervisor(member, teller.tell(what, self.now))

    def _to_supervisor(self, member: Member, message: Tell | Obeyed | Heartbeat) -> None:
        if self.random.random() >= self.drop:
            delay = self.random.expovariate(200)
            self.after(
                delay, self._supervise, self._on_supervisor, member, message, self.generation
            )

    def on_delivery(self, member: Member, message: Any) -> None:
        """Before the supervisor gets a message; for those who strike at a chosen one."""

    def _on_supervisor(self, member: Member, message: Any, now: float) -> None:
        self.on_delivery(member, message)
        match message:
            case Tell():
                listener = self.listeners.setdefault(member, Listener())
                for what in listener.receive(message):
                    self._on_told(member, what)
                self._send_control(member, listener.heard())
            case Obeyed():
                self.supervisor.receive(member, message, now)
            case Heartbeat():
                self.supervisor.heard(member, now)

    def _on_told(self, member: Member, what: Told) -> None:
        self.supervisor.receive(member, what, self.now)
        match what:
            case PartSaved():
                self.saves.on_part(what, self.now)
            case PartFailed():
                self.saves.on_part_failed(what, self.now)
            case StepDone(rank=0):
                self.saves.on_step(what.step, self.now)

    def _send_control(self, member: Member, message: Orders | Heard) -> None:
        if self.random.random() >= self.drop:
            delay = self.random.expovariate(200)
            self.after(delay, self._on_control, member, message, self.generation)

    def _on_control(self, member: Member, message: Orders | Heard, generation: int) -> None:
        process = self._awake(member, generation, self._on_control, member, message, generation)
        if process is None:
            return
        if isinstance(message, Heard):
            (process.puppet.teller if process.puppet else process.teller).heard(message.number)
        elif process.puppet:
            process.puppet.on_orders(message)
            self._flush(member, process.puppet)
        else:
            self._on_coordinators_orders(member, process, message)

    def _awake(
        self, member: Member, generation: int, again: Callable[..., None], *arguments: Any
    ) -> Process | None:
        """The process, if it is there and does not stand still; else it gets that later."""
        process = self.processes.get(member) if generation == self.generation else None
        if process and self.now < process.paused_until:
            process.backlog.append((again, arguments))
            return None
        return process

    # ------------------------------------------------------------------ members

    def _tick(self, member: Member, generation: int) -> None:
        process = self.processes.get(member) if generation == self.generation else None
        if process is None:
            return
        if self.now >= process.paused_until:
            backlog, process.backlog = process.backlog, []
            for event, arguments in backlog:
                event(*arguments)
            process.pulse.turn(self.now)
            if process.machine:
                self._tick_coordinator(member, process)
            elif process.puppet:
                self._tick_puppet(member, process.puppet)
        if member in self.processes:
            self.after(TICK_S, self._tick, member, generation)

    def _tick_puppet(self, member: Member, puppet: Puppet) -> None:
        if (puppet.role, puppet.number) in self.cursed and puppet.step > self.start:
            self.note(f"{member} ends with an exception")
            self._exit_soon(member, Ended(EXIT_FAILED, "ZeroDivisionError"))
            return
        if puppet.stopped is not None:
            if not puppet.teller.unheard or puppet.stopped != DONE:
                code = EXIT_DONE if puppet.stopped == DONE else EXIT_FENCED
                self._exit_soon(member, Ended(code))
                return
        else:
            self._post(member, puppet.tick(self.now))
            if (step := puppet.due(self.now)) is not None:
                self.after(self._disk_s(), self._written, member, step, self.generation)
        puppet.out += puppet.teller.due(self.now)
        self._flush(member, puppet)

    def _flush(self, member: Member, puppet: Puppet) -> None:
        out, puppet.out = puppet.out, []
        for message in out:
            if isinstance(message, Tell | Obeyed):
                self._to_supervisor(member, message)

    def _post(self, member: Member, outbox: Outbox) -> None:
        """Where the coordinator is, a member knows from its orders."""
        puppet = self.processes[member].puppet
        known = puppet.orders.coordinator.removeprefix("at ") if puppet else ""
        for to, message in outbox:
            to = known if to == COORDINATOR else to
            delay = self.random.expovariate(300)
            self.after(delay, self._deliver, member, to, message, self.generation)

    def _deliver(self, sender: Member, to: Member, message: Message, generation: int) -> None:
        arguments = (sender, to, message, generation)
        process = self._awake(to, generation, self._deliver, *arguments)
        if process is None:
            return
        if process.puppet:
            self._post(to, process.puppet.receive(message, self.now))
            self._flush(to, process.puppet)
        elif process.machine and process.watch:
            age_s = message.age_ms / 1000 if isinstance(message, Heartbeat) else 0.0
            process.watch.heard(sender, self.now, age_s)
            outbox = process.machine.receive(sender, message, self.now)
            self._after_coordinator(to, process, outbox)

    def _beat(self, member: Member, generation: int) -> None:
        process = self.processes.get(member) if generation == self.generation else None
        if process is None:
            return
        awake = self.now >= process.paused_until
        if process.puppet and (awake or process.beats):
            beat = Heartbeat(view=NO_VIEW, age_ms=process.pulse.beat(self.now))
            self._post(member, [(COORDINATOR, beat)])
        elif process.machine and awake:
            self._to_supervisor(member, Heartbeat(view=NO_VIEW))
        self.after(BEAT_S, self._beat, member, generation)

    def _train(self, generation: int) -> None:
        """A step, if everybody of the view in force is there for it."""
        if generation != self.generation or self.ended:
            return
        members = self._ready_members()
        if members and self.trained < self.steps:
            self.trained = min(puppet.step for puppet in members) + 1
            for puppet in members:
                puppet.on_step(self.trained, self.now)
                self._flush(puppet.member, puppet)
        self.after(STEP_S, self._train, generation)

    def _ready_members(self) -> list[Puppet]:
        if not self.disk.states:
            return []
        install = self.disk.install
        found = []
        for member in (*install.servers, *install.trainers):
            process = self.processes.get(member)
            if process is None or process.puppet is None or self.now < process.paused_until:
                return []
            puppet = process.puppet
            if puppet.view != install.view or puppet.frozen or puppet.blank or puppet.stopped:
                return []
            found.append(puppet)
        return found if len({puppet.step for puppet in found}) == 1 else self._caught_up(found)

    def _caught_up(self, members: list[Puppet]) -> list[Puppet]:
        """A replacement starts at the committed step, and the others redo nothing."""
        behind = min(puppet.step for puppet in members)
        for puppet in members:
            puppet.step = behind
        return members

    # ------------------------------------------------------------------ the coordinator

    def _tick_coordinator(self, member: Member, process: Process) -> None:
        assert process.machine
        assert process.watch
        machine = process.machine
        for silence in process.watch.tick(self.now):
            if silence.member not in machine.members:
                process.watch.forget(silence.member)
            elif silence.member not in machine.dead:
                process.silent[silence.member] = silence
                suspect = Suspect(view=NO_VIEW, member=silence.member, gone=False)
                self._after_coordinator(
                    member, process, machine.receive(SUPERVISOR, suspect, self.now)
                )
        self._after_coordinator(member, process, machine.tick(self.now))
        for tell in process.teller.due(self.now):
            self._to_supervisor(member, tell)

    def _on_coordinators_orders(self, member: Member, process: Process, orders: Orders) -> None:
        assert process.machine
        if orders.number > process.orders.number:
            process.orders = orders
            for gone in orders.gone:
                if gone not in process.machine.dead:
                    suspect = Suspect(view=NO_VIEW, member=gone, gone=True)
                    outbox = process.machine.receive(SUPERVISOR, suspect, self.now)
                    self._after_coordinator(member, process, outbox)
            if orders.again > process.again:
                process.again = orders.again
                self._after_coordinator(member, process, process.machine.start_afresh(self.now))
        self._to_supervisor(member, Obeyed(number=process.orders.number))

    def _after_coordinator(self, member: Member, process: Process, outbox: Outbox) -> None:
        machine = process.machine
        if machine is None or member not in self.processes:
            return
        state = machine.take_state()
        if state is not None:
            if self.disk.refuses(state.epoch, member):
                self._exit_soon(member, Ended(EXIT_FAILED, "another epoch"))
                return
            self.disk.write(state)
        for given_up in sorted(process.silent.keys() & machine.dead):
            silence = process.silent.pop(given_up)
            told = Silent(member=given_up, seconds=silence.seconds, hung=silence.hung)
            self._tell(member, told)
        for to, message in outbox:
            if to == SUPERVISOR and isinstance(message, Spawn):
                self._tell(member, WantMore(role=message.role, count=message.count))
        self._post(member, [(to, message) for to, message in outbox if to != SUPERVISOR])
        install = machine.install
        if install.addresses and install.view != process.announced:
            process.announced = install.view
            viewed = Viewed(
                view=install.view,
                committed=install.committed,
                servers=install.servers,
                trainers=install.trainers,
                rebuilding=install.rebuilding,
            )
            self._tell(member, viewed)
        if machine.finished and not process.told_end:
            process.told_end = True
            self._tell(member, Finished(failure=machine.failure))

    # ------------------------------------------------------------------ disks

    def _disk_s(self) -> float:
        return self.random.uniform(1.0, 8.0) if self.now < self.disk_slow_until else 0.05

    def _written(self, member: Member, step: int, generation: int) -> None:
        process = self._awake(member, generation, self._written, member, step, generation)
        if process and process.puppet:
            why_not = "no space is left" if self.now < self.disk_fails_until else None
            process.puppet.written(step, why_not, 0.05, self.now)
            self._flush(member, process.puppet)

    def _do(self, work: Any, generation: int) -> None:
        """The archive's work. What was begun before all rolled back counts all the same."""
        if isinstance(work, Publish):
            fails = self.now < self.disk_fails_until
            if not fails:
                self.on_disk.add(work.step)
            if generation == self.generation:
                if fails:
                    self.saves.on_publish_failed(work.step, "no space is left", self.now)
                else:
                    self.saves.on_published(work.step, self.now)
                self._act() if not self.ended else None
        elif isinstance(work, Discard) and work.step in self.on_disk:
            raise Broken(f"what was published of step {work.step} is discarded")

    # ------------------------------------------------------------------ faults

    def strike(self) -> None:
        if self.ended:
            return
        kind, draw = self.random.choice(self.kinds), self.random
        coordinator = self.supervisor.coordinator
        members = sorted(name for name, one in self.processes.items() if one.puppet)
        if kind in ("kill", "error", "freeze", "hang") and members:
            self._strike_member(kind, draw.choice(members))
        elif kind == "stubborn error":
            role = draw.choice(("server", "trainer"))
            self.cursed.add((role, 0))
            self.note(f"{role}:0 is cursed")
        elif kind == "kill coordinator" and coordinator in self.processes:
            self.note(f"kill {coordinator}")
            self._exit_soon(coordinator, Ended(-9, "killed by SIGKILL"))
        elif kind == "freeze coordinator" and coordinator in self.processes:
            self._pause(coordinator, draw.uniform(0.5, 90.0), beats=False)
        elif kind in ("sleep", "sleep all"):
            seconds = draw.uniform(0.5, 90.0)
            self.note(f"{kind} for {seconds:.1f} s")
            self.slept_until = max(self.slept_until, self.now + seconds)
            if kind == "sleep all":
                for member in list(self.processes):
                    self._pause(member, seconds, beats=False, told=False)
        elif kind == "stillborn":
            self.stillborn += draw.choice((1, 2, 8))
        elif kind == "slow disk":
            self.disk_slow_until = self.now + draw.uniform(1.0, 20.0)
        elif kind == "failing disk":
            self.disk_fails_until = self.now + draw.uniform(1.0, 20.0)

    def _strike_member(self, kind: str, member: Member) -> None:
        self.note(f"{kind} {member}")
        if kind == "kill":
            self._exit_soon(member, Ended(-9, "killed by SIGKILL"))
        elif kind == "error":
            self._exit_soon(member, Ended(EXIT_FAILED, "MemoryError"))
        else:
            self._pause(member, self.random.uniform(0.5, 90.0), beats=kind == "hang")

    def _pause(self, member: Member, seconds: float, *, beats: bool, told: bool = True) -> None:
        process = self.processes[member]
        process.paused_until = max(process.paused_until, self.now + seconds)
        process.beats, process.struck = beats, process.struck or told
        if told:
            self.note(f"{member} stands still for {seconds:.1f} s")

    # ------------------------------------------------------------------ what must hold

    def _check_end(self) -> None:
        last = [one for one in self.saves.published if one["step"] == self.steps]
        if self.sentence is None:
            if self.trained != self.steps:
                raise Broken(f"it says that it is done, at step {self.trained}")
            if not last:
                raise Broken("it is done, and not a word is said of the last save")
            if ("failed" in last[-1]) == (self.steps in self.on_disk):
                raise Broken(f"of the last save it says {last[-1]}, which is not true")
        elif self.lost:
            if not any(word in self.sentence for word in ("lost", "no trainer is left")):
                raise Broken(f"it says that this is lost: {self.sentence}")
        elif not self._is_allowed(self.sentence):
            raise Broken(f"the job ended for nothing: {self.sentence}")

    def _is_allowed(self, sentence: str) -> bool:
        """Whether the faults of this schedule can make a job end with this sentence."""
        if "in a row" in sentence:
            return bool(self.cursed) or any("dies at birth" in line for line in self.story)
        if "times at step" in sentence:
            hit = [line for line in self.story if " error " in line or " hang " in line]
            return bool(self.cursed) or len(hit) > 1
        return False


class StrikesAt(ControlWorld):
    """An undisturbed schedule, but for one blow just before the supervisor hears a message.

    victim: "sender", whoever sent it; "coordinator"; "supervisor", which falls asleep; or "member",
    one of the servers.
    """

    def __init__(self, boundary: int, victim: str) -> None:
        self.boundary, self.victim = boundary, victim
        self.heard = 0
        super().__init__(0, count=0)
        self.drop = 0.0

    def on_delivery(self, member: Member, message: Any) -> None:
        if isinstance(message, Heartbeat):
            return
        self.heard += 1
        if self.heard != self.boundary:
            return
        victim = {"sender": member, "coordinator": self.supervisor.coordinator}.get(self.victim)
        if self.victim == "supervisor":
            self.slept_until = self.now + 50.0
            return
        if victim is None:
            victim = self.supervisor.servers[0] if self.supervisor.servers else "server-0"
        if victim in self.processes:
            self.note(f"kill {victim} at message {self.boundary}")
            self._exit_soon(victim, Ended(-9, "killed by SIGKILL"))


def run_control_seed(seed: int, kind: type[ControlWorld] = ControlWorld, **more: Any) -> str | None:
    """What was broken, if anything."""
    try:
        kind(seed, **more).run()
    except Broken as broken:
        return str(broken)
    return None
