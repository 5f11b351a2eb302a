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
from typing import Any

from planaria.checkpoints import DENSE
from planaria.config import Config
from planaria.control.acting import Kill, Send, Start
from planaria.control.children import EXIT_DONE, EXIT_FAILED, EXIT_FENCED, Ended, Failure
from planaria.control.remembering import Answered, Asked, Question, Remembering
from planaria.control.rolling_back import RollBackMachine
from planaria.control.saving import Discard, Publish, SaveMachine
from planaria.control.supervising import SupervisorMachine
from planaria.coordinator.machine import DONE
from planaria.coordinator.watch import Pulse
from planaria.simulator.checks import Failure as Broken
from planaria.simulator.control_checks import check_end, check_saved
from planaria.simulator.control_coordinator import (
    BEAT_S,
    OnDisk,
    Process,
    after_call,
    ask_again,
    become_coordinator,
    obey,
    on_answer,
    tick_coordinator,
)
from planaria.simulator.control_faults import KINDS, end_when_heard, strike
from planaria.simulator.control_training import train
from planaria.simulator.disk import Disk
from planaria.simulator.puppets import Puppet
from planaria.wire.control import (
    ClaimEpoch,
    EpochClaimed,
    Heard,
    Listening,
    Obeyed,
    Orders,
    PartFailed,
    PartSaved,
    Ready,
    SaveState,
    ServerHolds,
    StateSaved,
    StepDone,
    Tell,
    Told,
    TrainerHolds,
)
from planaria.wire.machine import COORDINATOR, Outbox
from planaria.wire.messages import NO_VIEW, Heartbeat, Member, Message
from planaria.wire.telling import Listener

TICK_S = 0.1
STEP_S = 0.1
END_S = 400.0  # within which a run must be over, whatever happens to it


class ControlWorld:
    """One job under one schedule. `run` raises Broken when a promise is."""

    supervisor_class: type[SupervisorMachine] = SupervisorMachine
    saves_class: type[SaveMachine] = SaveMachine
    rolling_back_class: type[RollBackMachine] = RollBackMachine
    remembering_class: type[Remembering] = Remembering
    question_class: type[Question] = Question

    def __init__(self, seed: int, kinds: tuple[str, ...] = KINDS, count: int | None = None) -> None:
        draw = self.random = random.Random(f"control {seed}")
        self.seed, self.kinds = seed, kinds
        self.distant = seed % 2 == 0  # whether coordinators are on other machines
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
        self.on_disk: dict[int, int] = {}  # steps of checkpoints that count, and whose they are
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
        self.holds: set[str] = set()  # who has told what it holds in the end
        self.disk = Disk()
        self.remembering = self.remembering_class(OnDisk(self.disk))
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
            become_coordinator(self, action.member, process)
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
        self.tell(action.member, Listening(role=action.role, address=f"at {action.member}"))
        self.tell(action.member, Ready())
        self.after(self.random.uniform(0.0, TICK_S), self._tick, action.member, generation)
        self.after(self.random.uniform(0.0, BEAT_S), self._beat, action.member, generation)

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
            check_end(self)
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
        end_when_heard(self, kill.member, process)

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

    def tell(self, member: Member, what: Told) -> None:
        process = self.processes[member]
        teller = process.puppet.teller if process.puppet else process.teller
        self.to_supervisor(member, teller.tell(what, self.now))

    def to_supervisor(self, member: Member, message: Tell | Obeyed | Heartbeat | Asked) -> None:
        if self.random.random() >= self.drop and not self._is_cut(member):
            delay = self.random.expovariate(200)
            self.after(
                delay, self._supervise, self._on_supervisor, member, message, self.generation
            )

    def _is_cut(self, member: Member) -> bool:
        process = self.processes.get(member)
        return process is not None and self.now < process.cut_until

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
            case ClaimEpoch() | SaveState():
                current = member == self.supervisor.coordinator
                self._send_control(member, self.remembering.answer(message, current=current))

    def _on_told(self, member: Member, what: Told) -> None:
        self.supervisor.receive(member, what, self.now)
        match what:
            case PartSaved():
                self.saves.on_part(what, self.now)
            case PartFailed():
                self.saves.on_part_failed(what, self.now)
            case ServerHolds() | TrainerHolds():
                self.holds.add(self.supervisor.who(member))
            case StepDone(rank=0):
                self.saves.on_step(what.step, self.now)

    def _send_control(self, member: Member, message: Orders | Heard | Answered) -> None:
        if self.random.random() >= self.drop and not self._is_cut(member):
            delay = self.random.expovariate(200)
            self.after(delay, self._on_control, member, message, self.generation)

    def _on_control(
        self, member: Member, message: Orders | Heard | Answered, generation: int
    ) -> None:
        answers = isinstance(message, EpochClaimed | StateSaved)
        arguments = (member, message, generation)
        process = self._awake(member, generation, self._on_control, *arguments, asks=answers)
        if process is None:
            return
        if isinstance(message, EpochClaimed | StateSaved):
            on_answer(self, member, process, message)
        elif isinstance(message, Heard):
            (process.puppet.teller if process.puppet else process.teller).heard(message.number)
        elif process.puppet:
            process.puppet.on_orders(message)
            self.flush(member, process.puppet)
        else:
            obey(self, member, process, message)

    def _awake(
        self,
        member: Member,
        generation: int,
        again: Callable[..., None],
        *arguments: Any,
        asks: bool = False,
    ) -> Process | None:
        """The process, if it is there and does not stand still; else it gets that later. asks: it
        may be one that waits for an answer.
        """
        process = self.processes.get(member) if generation == self.generation else None
        if process and (self.now < process.paused_until or (process.question and not asks)):
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
            if process.question:
                ask_again(self, member, process)
            elif process.machine:
                tick_coordinator(self, member, process)
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
            self._exit_soon(member, Ended(EXIT_DONE if puppet.stopped == DONE else EXIT_FENCED))
            return
        self.post(member, puppet.tick(self.now))
        if (step := puppet.due(self.now)) is not None:
            self.after(self._disk_s(), self._written, member, step, self.generation)
        puppet.out += puppet.teller.due(self.now)
        self.flush(member, puppet)

    def flush(self, member: Member, puppet: Puppet) -> None:
        out, puppet.out = puppet.out, []
        for message in out:
            if isinstance(message, Tell | Obeyed):
                self.to_supervisor(member, message)

    def post(self, member: Member, outbox: Outbox) -> None:
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
            check_saved(self, message)
            self.post(to, process.puppet.receive(sender, message, self.now))
            self.flush(to, process.puppet)
        elif process.machine and process.watch:
            age_s = message.age_ms / 1000 if isinstance(message, Heartbeat) else 0.0
            process.watch.heard(sender, self.now, age_s)
            outbox = process.machine.receive(sender, message, self.now)
            after_call(self, to, process, outbox)

    def _beat(self, member: Member, generation: int) -> None:
        process = self.processes.get(member) if generation == self.generation else None
        if process is None:
            return
        awake = self.now >= process.paused_until
        if process.puppet and (awake or process.beats):
            beat = Heartbeat(view=NO_VIEW, age_ms=process.pulse.beat(self.now))
            self.post(member, [(COORDINATOR, beat)])
        elif process.role == "coordinator" and awake:
            self.to_supervisor(member, Heartbeat(view=NO_VIEW))
        self.after(BEAT_S, self._beat, member, generation)

    def _train(self, generation: int) -> None:
        if generation == self.generation and not self.ended:
            train(self)
            self.after(STEP_S, self._train, generation)

    # ------------------------------------------------------------------ disks

    def _disk_s(self) -> float:
        return self.random.uniform(1.0, 8.0) if self.now < self.disk_slow_until else 0.05

    def _written(self, member: Member, step: int, generation: int) -> None:
        process = self._awake(member, generation, self._written, member, step, generation)
        if process and process.puppet:
            why_not = "no space is left" if self.now < self.disk_fails_until else None
            process.puppet.written(step, why_not, 0.05, self.now)
            self.flush(member, process.puppet)

    def _do(self, work: Any, generation: int) -> None:
        """The archive's work. What was begun before all rolled back counts all the same."""
        if isinstance(work, Publish):
            if {part.place for part in work.parts} != {DENSE, *self.config.layout.places}:
                raise Broken(f"step {work.step} is published without all of its parts")
            fails = self.now < self.disk_fails_until
            if not fails:
                self.on_disk[work.step] = generation
            if generation == self.generation:
                if fails:
                    self.saves.on_publish_failed(work.step, "no space is left", self.now)
                else:
                    self.saves.on_published(work.step, self.now)
                self._act() if not self.ended else None
        elif isinstance(work, Discard) and self.on_disk.get(work.step) == generation:
            raise Broken(f"what was published of step {work.step} is discarded")

    # ------------------------------------------------------------------ what faults do

    def strike(self) -> None:
        if not self.ended:
            strike(self)

    def end(self, member: Member, ended: Ended) -> None:
        """A process ends by itself, or somebody kills it."""
        self._exit_soon(member, ended)

    def pause(self, member: Member, seconds: float, *, beats: bool, told: bool = True) -> None:
        """beats: its heart goes on. told: somebody may be blamed for it."""
        process = self.processes[member]
        process.paused_until = max(process.paused_until, self.now + seconds)
        process.beats, process.struck = beats, process.struck or told
        if told:
            self.note(f"{member} stands still for {seconds:.1f} s")
