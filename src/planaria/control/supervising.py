"""Supervising: who is started, who is killed, and when a job cannot go on.

Whatever happens to one process, an exit, an exception, silence or a hung loop, is handled as that
process's death, and another takes its place. A job ends only where the coordinator says that more
is lost than the code bears, or where the same place fails again and again at the same step.

The driver hands in what happened and the time of its own clock; it does what `take` gives it.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection

import msgspec

from planaria.config import Config
from planaria.control.acting import Action, Kill, Send, Start, Verdict
from planaria.control.children import (
    EXIT_DONE,
    EXIT_FENCED,
    EXIT_ORPHAN,
    EXIT_REFUSED,
    IDLE_S,
    Child,
    Ended,
    Failure,
)
from planaria.control.leaving import Leaving
from planaria.control.room import Room
from planaria.coordinator.watch import Watch
from planaria.wire.control import (
    Finished,
    HeldOut,
    LeftLoop,
    Listening,
    Obeyed,
    Orders,
    PartSaved,
    Ready,
    Rebuilding,
    Reloaded,
    ServerHolds,
    Silent,
    StepDone,
    Told,
    TrainerHolds,
    Viewed,
    Waiting,
    WantMore,
    Working,
)
from planaria.wire.messages import NO_VIEW, Member, View

AGAIN_S = 0.25  # between two times that the same orders are sent
STALL_S = 30.0  # beyond cluster.deadline_s: without progress for so long, something is amiss
END_S = 1.0  # within which a coordinator that was killed must have ended
START_S = 120.0  # a process that starts may say nothing for so long
MOST_DELAY_S = 30.0  # before another process is started in place of one that could not start
MOST_BARREN = 5  # so many in a row that end before they are of any use
OF_USE_S = 60.0  # a spare that has been ready for longer was of use
LAST_FAILED = 3  # named with their reasons where more is lost than the code bears
GONE_KEPT = 256  # names of ended processes that a new coordinator is told
# How often one place may fail at one step, by what happened to it.
PATIENCE: dict[str, int] = {"error": 2, "hung": 3, "signal": 8}


class SupervisorMachine:
    """The supervisor of one set of processes. `verdict` says how it ended, once it has."""

    def __init__(self, config: Config, start: int, now: float) -> None:
        """start: the step that the processes start from."""
        self.config = config
        self.step = start
        self.children: dict[Member, Child] = {}
        self.coordinator: Member = ""
        self.view: View = NO_VIEW
        self.servers: list[Member] = []
        self.trainers: list[Member] = []
        self.orders = Orders(number=1)
        self.failures: list[Failure] = []  # new ones, for whoever takes them
        self.notes: list[str] = []
        self.verdict: Verdict | None = None
        self.waiting: dict[Member, Waiting] = {}  # what stalled trainers wait for
        self._actions: list[Action] = []
        self._names = {"server": config.servers, "trainer": config.trainers, "coordinator": 0}
        self._due: list[tuple[float, str]] = []  # when to start a process, of which role
        self._barren: Counter[str] = Counter()  # by role: ended before they were of use, in a row
        self._wanted: Counter[str] = Counter()  # by role: asked for by the coordinator
        self._failed: set[Member] = set()
        self._last_failed: list[str] = []  # who, and why
        self._coordinators_ends: list[str] = []  # why, in a row
        self._failed_at: Counter[tuple[str, int | None, int, str]] = Counter()
        cluster = config.cluster
        self._watch = Watch(cluster.heartbeat_limit_ms / 1000, cluster.hang_limit_s)
        self._limit_s = cluster.deadline_s + STALL_S
        self._moved_at = self._now = self._ticked = now
        self._leaving = Leaving(start)
        self._changes = 0  # how often servers or trainers have come or gone
        self._stalled_at = -1  # the step at which nothing moved last
        self._stalls = 0  # how often, at that step
        self._room = Room(cluster.join_s, self.notes)
        self._begin()

    def take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    @property
    def spares(self) -> list[Member]:
        """Servers that nobody needs yet."""
        return [
            name
            for name, child in self.children.items()
            if child.role == "server" and not child.placed and not child.condemned
        ]

    def who(self, member: Member) -> str:
        """The name of a process in the job."""
        child = self.children.get(member)
        if child is None or child.role == "coordinator":
            return "coordinator"
        if child.retired_at is not None:
            return "retired"
        role, number = self._part(member, child)
        return "spare" if number is None else f"{role}:{number}"

    @property
    def lost(self) -> list[str]:
        """Places and ranks of the view whose processes are gone."""
        named = (("server", self.servers), ("trainer", self.trainers))
        return [
            f"{role}:{number}"
            for role, members in named
            for number, member in enumerate(members)
            if member not in self.children
        ]

    def _part(self, member: Member, child: Child) -> tuple[str, int | None]:
        """The role of a process, and the place or rank that it has or began with."""
        members = {"server": self.servers, "trainer": self.trainers}.get(child.role, [])
        return child.role, members.index(member) if member in members else child.number

    # ------------------------------------------------------------------ starting

    def _begin(self) -> None:
        config = self.config
        self._start("coordinator")
        for place in range(config.servers):
            self._start_as("server", f"server-{place}", place)
        for rank in range(config.trainers):
            self._start_as("trainer", f"trainer-{rank}", rank)
        for _ in range(config.spares):
            self._start("server")

    def _start(self, role: str) -> None:
        member = f"{role}-{self._names[role]}"
        self._names[role] += 1
        if role == "coordinator":
            self.coordinator = member
            self._watch.forget(member)
        self._start_as(role, member, None)

    def _start_as(self, role: str, member: Member, number: int | None) -> None:
        self.children[member] = Child(role, number, self._now, placed=number is not None)
        self._actions.append(Start(role, member, number))

    def _start_later(self, role: str) -> None:
        """Sooner or later, by how often it came to nothing."""
        barren = self._barren[role]
        if barren <= 1:
            self._start(role)
        else:
            self._due.append((self._now + min(2.0 ** (barren - 2), MOST_DELAY_S), role))

    def _on_want_more(self, told: WantMore) -> None:
        """Asked for again and again, if they take long: less those that are on their way."""
        if not told.grows:
            self._wanted[told.role] = told.count
        since = self._now - self.config.cluster.deadline_s
        coming = sum(
            one.role == told.role and one.starts and (one.bides or one.heard_at >= since)
            for one in self.children.values()
        )
        for _ in range(told.count - coming):
            self._start(told.role)

    # ------------------------------------------------------------------ what happens

    def receive(self, member: Member, told: Told | Obeyed, now: float) -> None:
        self._now = now
        child = self.children.get(member)
        if child is None or self.verdict:
            return
        if child.role == "coordinator" and member != self.coordinator:
            return  # it was replaced, though its host still runs it
        child.heard_at = now
        match told:
            case Obeyed():
                child.obeyed = max(child.obeyed, told.number)
            case Listening():
                self._on_listening(member, child, told)
            case Ready():
                child.ready_at = now
                self._moved()
            case Working(what=what, done=done) | Rebuilding(place=what, rows=done):
                if child.work[0] != what or done > child.work[1]:
                    child.work = (what, done)
                    self._moved()
            case StepDone():
                self.waiting.pop(member, None)
                self.step = max(self.step, told.step)
                self._moved()
                self._leaving.on_step(member, told.step)
            case Waiting():
                self.waiting[member] = told
                self._leaving.on_step(member, told.step)
            case LeftLoop():
                self._leaving.on_left(member, told)
            case Viewed():
                self._on_view(told)
            case Silent():
                self._on_silent(told)
            case WantMore():
                self._on_want_more(told)
            case Finished():
                self.verdict = self._verdict_of(told)
            case Reloaded() | PartSaved() | HeldOut() | ServerHolds() | TrainerHolds():
                self._moved()

    def heard(self, member: Member, now: float) -> None:
        """A heartbeat, which only the coordinator sends to the supervisor."""
        self._now = now
        child = self.children.get(member)
        if child and member == self.coordinator:
            child.heard_at = now
            self._watch.heard(member, now, 0.0)

    def on_exit(self, member: Member, ended: Ended, now: float) -> None:
        self._now = now
        child = self.children.pop(member, None)
        if child is None or self.verdict:
            return
        self.waiting.pop(member, None)
        self._leaving.on_gone(member)
        if child.role == "coordinator":
            if member == self.coordinator:
                self._on_coordinator_gone(member, child, ended)
            return
        self._set_orders(gone=[*self.orders.gone, member][-GONE_KEPT:])
        if ended.code == EXIT_REFUSED:
            self._end(ended.last_words or f"{member} refused to go on; its log says why")
        elif child.placed:
            self._on_member_gone(member, child, ended)
        else:
            self._on_unplaced_gone(member, child, ended)

    def on_waiting(self, members: Collection[Member], now: float) -> None:
        """Whom no host has room for, and nobody has started so far."""
        for member, child in self.children.items():
            child.waits = member in members
            child.heard_at = now if child.waits else child.heard_at

    def tick(self, now: float) -> None:
        slept_s = now - self._ticked
        self._now = self._ticked = now
        if slept_s > self._watch.base_s / 2:  # nobody else is to blame for that
            self._moved_at = now
            for child in self.children.values():
                child.heard_at = now
        for silence in self._watch.tick(now):
            if silence.member == self.coordinator and silence.member in self.children:
                self.kill(silence.member, f"silent for {silence.seconds:.1f} s")
                self._watch.gave_up(silence, now)
        self._end_unending_coordinator()
        for at, role in list(self._due):
            if now >= at:
                self._due.remove((at, role))
                self._start(role)
        if not self.verdict:
            self._wait_for_room()
            self._end_slow_starts()
            self._end_stall()
            self._end(self._leaving.tick(now))
        self._send_orders()

    def order(self, **changes: object) -> None:
        """What all processes must be told; nothing is sent if nothing changes."""
        self._set_orders(**changes)
        self._send_orders()

    # ------------------------------------------------------------------ messages

    def _on_listening(self, member: Member, child: Child, told: Listening) -> None:
        child.listening = True
        if member == self.coordinator:
            self._watch.heard(member, self._now, 0.0)
            self._set_orders(coordinator=told.address)
        child.sent = (0, 0.0)
        self._send_orders()

    def _on_view(self, told: Viewed) -> None:
        if told.view <= self.view:
            return  # a new coordinator tells of the last one again
        dropped = {*self.servers, *self.trainers} - {*told.servers, *told.trainers}
        changes = len(told.resizes) + len(told.shifts)
        retires, self._changes = changes > self._changes, changes
        self.view, self.servers, self.trainers = told.view, told.servers, told.trainers
        self._wanted.clear()
        for child in map(self.children.get, (*told.servers, *told.trainers)):
            if child and not child.placed:
                child.placed = True
                self._barren[child.role] = 0
        for member in sorted(dropped):
            child = self.children.get(member)
            if child and retires:  # it leaves by itself, once what it saves is saved
                child.retired_at = self._now
            elif child:  # silent, so that its memory is freed
                self.kill(member, "the others go on without it")
        self._barren["coordinator"] = 0
        self._moved()
        due = sum(role == "server" for _, role in self._due)
        lacking = self.config.spares - len(self.spares) - due
        for _ in range(lacking):
            if self._barren["server"] < MOST_BARREN:
                self._start_later("server")

    def _on_silent(self, told: Silent) -> None:
        child = self.children.get(told.member)
        if child is None:
            return  # it has ended meanwhile, and how is known
        key = "hang_limit_s" if told.hung else "heartbeat_limit_ms"
        what = "its main loop hangs" if told.hung else "it is silent"
        reason = (
            f"{what} for {told.seconds:.1f} s; if it was only slow, on a machine with too much to "
            f"do, raise cluster.{key}"
        )
        if child.placed:
            self._note_failure(told.member, child, "hung", reason)
        else:  # a spare: no view will drop it
            self.kill(told.member, reason)

    def _on_coordinator_gone(self, member: Member, child: Child, ended: Ended) -> None:
        reason = child.condemned or ended.reason
        self._note_failure(member, child, ended.kind, reason)
        self._barren["coordinator"] += 1
        if self._barren["coordinator"] == 1:
            self._coordinators_ends.clear()
        self._coordinators_ends.append(reason)
        if self._barren["coordinator"] > MOST_BARREN:
            reasons = "; ".join(dict.fromkeys(self._coordinators_ends))
            self._end(f"the coordinator ended {MOST_BARREN + 1} times in a row: {reasons}")
            return
        self._set_orders(coordinator="")
        self.coordinator = ""
        self._start_later("coordinator")

    def _on_member_gone(self, member: Member, child: Child, ended: Ended) -> None:
        if ended.code in (EXIT_DONE, EXIT_FENCED, EXIT_ORPHAN) or child.retired_at is not None:
            return
        self._note_failure(member, child, ended.kind, child.condemned or ended.reason)

    def _on_unplaced_gone(self, member: Member, child: Child, ended: Ended) -> None:
        """A spare is never fatal; one that a view waits for is tried again, but not for ever."""
        role = child.role
        if child.ready_at is not None and self._now - child.ready_at > OF_USE_S:
            self._barren[role] = 0
        # Not if it was of use until then, or was never started.
        self._barren[role] += not (child.waits or (child.ready and child.condemned))
        self.notes.append(f"{member}, which had no place yet, ended: {ended.reason}")
        if self._barren[role] < MOST_BARREN:
            if self._wanted[role] or (role == "server" and len(self.spares) < self.config.spares):
                self._start_later(role)
        elif self._wanted[role]:
            self._end(
                f"{MOST_BARREN} {role}s in a row ended before they could take a place: "
                f"{ended.reason}"
            )
        else:
            self.notes.append(f"no more spares are started: {MOST_BARREN} in a row have ended")

    def _verdict_of(self, told: Finished) -> Verdict:
        if told.failure is None:
            return Verdict(None)
        why = "; ".join(self._last_failed)
        return Verdict(f"{told.failure} ({why})" if why else told.failure, lost=True)

    def _note_failure(self, member: Member, child: Child, kind: str, reason: str) -> None:
        if member in self._failed:
            return
        self._failed.add(member)
        role, number = self._part(member, child)
        who = role if number is None else f"{role}:{number}"
        self.failures.append(Failure(who, member, role, number, self.step, reason))
        self._last_failed = [*self._last_failed, f"{who}: {reason}"][-LAST_FAILED:]
        key = (role, number, self.step, kind)
        self._failed_at[key] += 1
        times = self._failed_at[key]
        if role != "coordinator" and times >= PATIENCE[kind]:
            self._end(f"{who} failed {times} times at step {self.step}: {reason}")

    # ------------------------------------------------------------------ time

    def _moved(self) -> None:
        self._moved_at = self._now

    def _wait_for_room(self) -> None:
        if lacks := self._room.lacks(self.children.values(), self._wanted, self._now):
            self._moved()
            self._end(self._room.sentence(lacks, self._now))

    def _end_slow_starts(self) -> None:
        """Who starts and says nothing for long is replaced; who should have left is ended."""
        for member, child in list(self.children.items()):
            if self._now - (child.retired_at or self._now) > self.config.checkpoint.stall_s:
                self.kill(member, "it was retired, and does not leave")
            quiet_s = self._now - child.heard_at
            # A coordinator that listens beats, and is watched for that.
            started = child.listening if child.role == "coordinator" else child.ready
            limit_s = START_S
            if child.nears_its_first_batch:
                self._moved()  # whoever waits for it is not stalled
                limit_s = max(IDLE_S, self.config.cluster.hang_limit_s)
            if not started and quiet_s > limit_s:
                self.kill(member, f"it has started and said nothing for {quiet_s:.0f} s")

    def _end_unending_coordinator(self) -> None:
        """Killed, and nobody tells of its end: its host may be gone. The next one takes over."""
        child = self.children.get(self.coordinator)
        if child and child.condemned and self._now - child.condemned_at > END_S:
            self._on_coordinator_gone(self.coordinator, child, Ended(-signal.SIGKILL))

    def _end_stall(self) -> None:
        """Nothing moves: everybody starts afresh in a new view; then whom all wait for is replaced;
        and then it is the end.
        """
        quiet_s, limit_s = self._now - self._moved_at, self._limit_s
        if self.step >= self.config.steps:  # a slow disk may be at work on the last save
            limit_s = max(limit_s, self.config.checkpoint.stall_s + STALL_S)
        if quiet_s <= limit_s:
            return
        self._moved_at = self._now
        self._stalls = 1 if self.step > self._stalled_at else self._stalls + 1
        self._stalled_at = self.step
        blamed = {place for one in self.waiting.values() for place in one.places}
        quiet = f"nothing has moved for {quiet_s:.0f} s"
        if self._stalls == 1:
            self.notes.append(f"{quiet}: everybody starts afresh")
            self._set_orders(again=self.orders.again + 1)
        elif self._stalls == 2 and blamed and self.servers:
            self.notes.append(f"{quiet}: whom all wait for is replaced")
            # Others may only wait for one of them in turn: no more than can be borne.
            for place in sorted(blamed)[: max(self.config.r, 1)]:
                if self.servers[place] in self.children:
                    self.kill(self.servers[place], "trainers wait for it in vain")
        else:
            waiting = "; ".join(map(self._describe, self.waiting))
            named = waiting or f"the processes are {', '.join(self.children)}"
            self._end(f"{quiet} at step {self.step}, not even after a new view; {named}")

    def _describe(self, trainer: Member) -> str:
        """Whom a trainer waits for."""
        one = self.waiting[trainer]
        places = ", ".join(f"server:{place}" for place in one.places) or "the other trainers"
        return f"{self.who(trainer)} waits in step {one.step} for {one.what} of {places}"

    # ------------------------------------------------------------------ orders and the end

    def _set_orders(self, **changes: object) -> None:
        changed = msgspec.structs.replace(self.orders, **changes)
        if changed != self.orders:
            self.orders = msgspec.structs.replace(changed, number=self.orders.number + 1)

    def _send_orders(self) -> None:
        for member, child in self.children.items():
            if not child.listening or child.obeyed >= self.orders.number:
                continue
            number, at = child.sent
            if number < self.orders.number or self._now - at >= AGAIN_S:
                child.sent = (self.orders.number, self._now)
                self._actions.append(Send(member, self.orders))

    def kill(self, member: Member, why: str) -> None:
        child = self.children[member]
        if not child.condemned:
            child.condemned, child.condemned_at = why, self._now
            self._actions.append(Kill(member, why))
            if child.role == "coordinator" or not child.placed:
                self.notes.append(f"{member} is killed: {why}")

    def _end(self, sentence: str | None) -> None:
        if sentence is not None:
            self.verdict = self.verdict or Verdict(sentence)
