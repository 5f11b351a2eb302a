"""The coordinator as a state machine: rules 7 and 8.

It changes the view when a member is gone: prepare, gather what everybody holds, decide, install.
A member that is only silent counts as gone if the job can bear that; if not, it is waited for.
What it must remember is `CoordinatorState`; a driver saves it, whenever `take_state` gives one,
before it sends anything. A coordinator that starts again with the saved state begins with a view
change, because it cannot know what its predecessor had sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from planaria.coordinator.bearing import unbearable
from planaria.coordinator.moving import Moving
from planaria.coordinator.scrubbing import Scrubs
from planaria.coordinator.shifting import Shifting
from planaria.coordinator.state import Gathering
from planaria.layout import Layout
from planaria.layout.resizing import layout_after
from planaria.wire.control import CoordinatorState
from planaria.wire.machine import Outbox
from planaria.wire.messages import (
    Done,
    Heartbeat,
    Hello,
    Install,
    Installed,
    Member,
    Message,
    Prepare,
    Promise,
    Scale,
    ScaleTrainers,
    Scrub,
    Scrubbed,
    Spawn,
    Stop,
    Suspect,
    View,
)

SUPERVISOR: Member = "supervisor"
QUIET_S = 0.5  # spares say hello several times as often; who does not may be frozen
FENCED = "fenced: the others went on without this process"
RETIRED = "retired: the job goes on with fewer processes"
RETIRED_KEPT = 64  # names
DONE = "the job is done"


class CoordinatorMachine:
    """The owner of the view.

    `epoch`: claimed by this process, above that of every coordinator before it. The state is
    `first_state` of that epoch, or the newest one that an earlier coordinator has saved.
    """

    def __init__(
        self,
        state: CoordinatorState,
        layout: Layout,
        *,
        epoch: int,
        now: float,
        retry_s: float = 0.25,
        deadline_s: float = 10.0,
        partial: bool = False,
        most_trainers: int = 0,
        by_survivors: bool = False,
    ) -> None:
        """layout: that the job began with; partial: a lost server's place is filled from its last
        save, so that none is missed; most_trainers: 0, where their number is fixed; by_survivors:
        these rebuild what was lost.
        """
        self.first_layout = layout
        self.partial = partial
        self.retry_s, self.deadline_s = retry_s, deadline_s
        restarted = state.epoch < epoch
        self.state = CoordinatorState(epoch, state.n, state.install, state.ended)
        self.failure: str | None = None
        self.finished = False
        self.dead: set[Member] = set()
        self.silent: dict[Member, float] = {}  # not given up yet, and since when
        self.addresses: dict[Member, str] = dict(state.install.addresses)
        # By role, in the order in which they came: when each has said hello last.
        self.spares: dict[str, dict[Member, float]] = {"server": {}, "trainer": {}}
        self.installed: set[Member] = set()
        self.whole: set[Member] = set()
        # Trainers and keepers that may not have the dense state yet.
        self.bare: set[Member] = set(self.dense_members if restarted else self.keepers)
        self.done: set[Member] = set()
        self.mirrored: set[Member] = set()
        self.resting: set[Member] = set()
        self.gathering: Gathering | None = None
        self.moving = Moving(by_survivors=by_survivors and not partial)
        self.shifting = Shifting(layout.r, most_trainers, deadline_s)
        self.scrubs = Scrubs()
        self._asked: dict[str, int] = {"server": 0, "trainer": 0}
        self._unsaved = True
        self._outbox: Outbox = []
        self._now = self._asked_at = self._last_retry = self._last_tick = now
        if state.ended:
            self._finish(state.ended)
        elif restarted:
            self._change()

    @property
    def install(self) -> Install:
        return self.state.install

    @property
    def layout(self) -> Layout:
        return layout_after(self.first_layout, self.install.resizes, self.install.moving)

    @property
    def retired(self) -> set[Member]:
        return set(self.install.retired)

    @property
    def members(self) -> list[Member]:
        return [*self.install.servers, *self.install.trainers]

    @property
    def expected(self) -> set[Member]:
        """Whose silence matters: a spare that is silent must not take a place."""
        return {*self.members, *self.spares["server"], *self.spares["trainer"]} - self.dead

    @property
    def keepers(self) -> list[Member]:
        """Servers that keep the dense state as well."""
        return self.install.keeping()

    @property
    def dense_members(self) -> list[Member]:
        """Who has the dense state, or should have it."""
        return [*self.install.trainers, *self.keepers]

    def take_state(self) -> CoordinatorState | None:
        """The state, if it must be saved before the outbox is sent."""
        unsaved, self._unsaved = self._unsaved, False
        return self.state if unsaved else None

    def take_outbox(self) -> Outbox:
        sent, self._outbox = self._outbox, []
        return sent

    def receive(self, sender: Member, message: Message, now: float) -> Outbox:
        self._now = now
        match message:
            case Hello():
                self._on_hello(message)
            case Heartbeat():
                self._on_heartbeat(sender, message)
            case Suspect():
                self._on_suspect(message)
            case Promise():
                self._on_promise(sender, message)
            case Installed() if message.view == self.install.view:
                self._on_installed(sender, message)
            case Scale() | ScaleTrainers():
                self._on_scale(sender, message)
            case Scrub():
                self._outbox += self.scrubs.start(sender, self.install)
            case Scrubbed() if message.view == self.install.view:
                self._outbox += self.scrubs.on_found(message, self.install)
            case Done() if message.view == self.install.view:
                self.done.add(sender)
                self._finish_if_done()
        return self.take_outbox()

    def _on_hello(self, hello: Hello) -> None:
        if hello.member in self.dead or hello.member in self.install.retired:
            return
        known = self._all_known()
        self.addresses[hello.member] = hello.address
        if hello.member in self.members:
            if self.gathering is not None:
                self._decide_if_complete()
            elif self._all_known():
                # The last to come completes the view; who says hello after that has missed it.
                self._send_install([hello.member] if known else self.members)
        elif (spares := self.spares.get(hello.role)) is not None:
            is_new = hello.member not in spares
            spares[hello.member] = self._now
            if is_new:
                self._asked[hello.role] = max(self._asked[hello.role] - 1, 0)
                self._decide_if_complete()
                self._move_on()

    def _on_installed(self, sender: Member, installed: Installed) -> None:
        self.installed.add(sender)
        if installed.dense:
            self.bare.discard(sender)
        for told, members in (
            (installed.whole, self.whole),
            (installed.mirrored, self.mirrored),
            (installed.rests, self.resting),
        ):
            if told:
                members.add(sender)
        self._finish_if_done()
        self._move_on()

    def start_afresh(self, now: float) -> Outbox:
        """Nothing moves and nobody knows why: a new view makes everybody send again."""
        self._now = now
        if self.gathering is None:
            self._change()
        return self.take_outbox()

    # ------------------------------------------------------------------ who is gone

    def _on_suspect(self, suspect: Suspect) -> None:
        member = suspect.member
        if member in self.dead or self.finished:
            return
        if member in self.members and not suspect.gone:
            self.silent.setdefault(member, self._now)  # weighed by the next tick, all together
        else:
            self._give_up([member])

    def _on_heartbeat(self, sender: Member, beat: Heartbeat) -> None:
        if sender in self.dead or sender in self.retired:
            reason = FENCED if sender in self.dead else RETIRED
            self._send(sender, Stop(view=self.install.view, reason=reason))
        elif sender in self.silent and beat.age_ms / 1000 < self._now - self.silent[sender]:
            # Its main loop has turned since it was suspected. What it said is true, however late
            # it comes: at worst it is suspected again.
            del self.silent[sender]

    def _give_up_if_bearable(self) -> None:
        """Silent is not gone: who would be missed is waited for, until the deadline."""
        if self.silent and not self._missed(self.dead | set(self.silent)):
            self._give_up(list(self.silent))

    def _give_up(self, gone: Sequence[Member]) -> None:
        self.dead.update(gone)
        for member in gone:
            self.silent.pop(member, None)
            for spares in self.spares.values():
                spares.pop(member, None)
        if not set(gone).isdisjoint(self.members):
            self._change()

    def _missed(self, gone: set[Member]) -> str | None:
        """What would be lost without these, as far as is known now."""
        promises = self.gathering.promises if self.gathering else {}
        servers = self.install.servers
        whole = {
            place
            for place, member in enumerate(servers)
            if member not in gone
            and (promises[member].whole if member in promises else self._was_whole(place))
        }
        replicas = [
            member
            for member in self.dense_members
            if member not in gone
            and (promises[member].dense if member in promises else member not in self.bare)
        ]
        return self._what_is_lost(whole, bool(replicas))

    def _was_whole(self, place: int) -> bool:
        """When it took part in the view last, as far as it has told."""
        return place not in self.install.rebuilding or self.install.servers[place] in self.whole

    # ------------------------------------------------------------------ a view change

    def _change(self) -> None:
        """Rule 7: a number never used before, saved first; then everybody who lives prepares."""
        if self.failure or self.finished:
            return
        self.state = CoordinatorState(self.state.epoch, self.state.n + 1, self.state.install)
        self._unsaved = True
        view = View(self.state.epoch, self.state.n)
        living = {member for member in self.members if member not in self.dead}
        self.gathering = Gathering(view, set(living), self._now)
        for member in sorted(living):
            self._send(member, Prepare(view=view))
        self._decide_if_complete()

    def _on_promise(self, sender: Member, promise: Promise) -> None:
        gathering = self.gathering
        if gathering and promise.view == gathering.view and sender in gathering.waiting:
            gathering.waiting.discard(sender)
            gathering.promises[sender] = promise
            self.silent.pop(sender, None)
            self._decide_if_complete()

    def _decide_if_complete(self) -> None:
        gathering = self.gathering
        if gathering is None or gathering.waiting or not self._all_known():
            return
        if lost := self._missed(self.dead):
            self._finish(lost)
            return
        for role, places in (("server", self.install.servers), ("trainer", self.install.trainers)):
            if self._lacks(role, sum(member in self.dead for member in places)):
                return
        self._decide(gathering)

    def _lacks(self, role: str, wanted: int, *, grows: bool = False) -> bool:
        """Whether there are too few spares; asks for those that are missing."""
        missing = wanted - len(self.spares[role])
        if self._now - self._asked_at > self.deadline_s:
            self._asked[role] = 0  # those that were asked for have died, or will be too many
        if missing > self._asked[role]:
            self._asked_at = self._now
            view = View(self.state.epoch, self.state.n)
            self._send(SUPERVISOR, Spawn(view=view, role=role, count=missing, grows=grows))
            self._asked[role] = missing
        return missing > 0

    def _what_is_lost(self, whole: set[int], replicated: bool) -> str | None:
        lost = unbearable(self.layout, len(self.install.servers), whole)
        if lost and not self.partial:
            return lost
        return None if replicated else "nobody is left who holds the dense network"

    def _decide(self, gathering: Gathering) -> None:
        """Rule 8: the committed step is what everybody holds who holds anything."""
        promises = gathering.promises
        held = min(p.held for p in promises.values() if not p.blank)
        committed = max(held, self.install.committed)
        servers = [self._living_or_spare("server", member) for member in self.install.servers]
        trainers = [self._living_or_spare("trainer", member) for member in self.install.trainers]
        blank = {m for m in servers if m not in promises or not promises[m].whole}
        spares = self._by_readiness("server")
        moves = self.moving.next(self.install, servers, promises, spares, self.layout, self.keepers)
        for member in moves.servers:
            self.spares["server"].pop(member, None)
        waiting = len(self.spares["trainer"])
        crew = self.shifting.next(self.install, trainers, promises, committed, waiting)
        trainers = crew.trainers + [self._take_spare("trainer") for _ in range(crew.come)]
        install = Install(
            view=gathering.view,
            committed=committed,
            servers=moves.servers,
            trainers=trainers,
            rebuilding=[p for p, member in enumerate(moves.servers) if member in blank],
            step_s=self._step_s(promises.values()),
            addresses={member: self.addresses[member] for member in moves.servers + trainers},
            resizes=moves.resizes,
            moving=moves.moving,
            keepers=crew.keepers,
            shifts=crew.shifts,
            shift=crew.shift,
            retired=[*self.install.retired, *moves.retire, *crew.retire][-RETIRED_KEPT:],
        )
        self.state = CoordinatorState(self.state.epoch, self.state.n, install)
        self._unsaved, self.gathering = True, None
        for told in (self.installed, self.whole, self.mirrored, self.resting, self.done):
            told.clear()
        self.bare = {m for m in self.dense_members if m not in promises or not promises[m].dense}
        for member in self.members:
            self._send(member, install)
        for member in (*moves.retire, *crew.retire):  # told again when it beats
            self._send(member, Stop(view=install.view, reason=RETIRED))

    def _step_s(self, promises: Iterable[Promise]) -> float:
        """How long a step took while everybody was whole; while somebody was not, as before."""
        known = [promise.step_s for promise in promises if promise.step_s > 0]
        undisturbed = all(self._was_whole(place) for place in range(len(self.install.servers)))
        return sorted(known)[len(known) // 2] if known and undisturbed else self.install.step_s

    def _all_known(self) -> bool:
        """Whether every living member has said hello: the first install waits for that."""
        return all(m in self.addresses for m in self.members if m not in self.dead)

    def _send_install(self, members: Iterable[Member]) -> None:
        """To those that do not have it, or are at work because of it."""
        install, rebuilding = self._with_addresses(), self._rebuilding()
        for member in members:
            if member not in self.installed or member in rebuilding or self._owes(member):
                self._send(member, install)

    def _with_addresses(self) -> Install:
        addresses = {member: self.addresses[member] for member in self.members}
        if addresses != self.install.addresses:
            install = msgspec.structs.replace(self.install, addresses=addresses)
            self.state = CoordinatorState(self.state.epoch, self.state.n, install)
            self._unsaved = True
        return self.install

    def _living_or_spare(self, role: str, member: Member) -> Member:
        return member if member not in self.dead else self._take_spare(role)

    def _take_spare(self, role: str) -> Member:
        chosen = self._by_readiness(role)[0]
        del self.spares[role][chosen]
        return chosen

    def _by_readiness(self, role: str) -> list[Member]:
        """Spares: who is awake, and who came first."""
        spares = self.spares[role]
        return sorted(spares, key=lambda spare: self._now - spares[spare] > QUIET_S)

    # ------------------------------------------------------------------ coming and going

    def _on_scale(self, sender: Member, wanted: Scale | ScaleTrainers) -> None:
        """Asked for again and again by whoever waits for it."""
        install, now = self.install, self._now
        if isinstance(wanted, ScaleTrainers):
            scaled = self.shifting.on_scale(wanted, install, len(self.spares["trainer"]), now)
        else:
            scaled = self.moving.on_scale(wanted, install, self.layout, self.partial, now)
            waiting, there = len(self.spares["server"]), self.whole & self.mirrored
            scaled.why = scaled.why or self.moving.progress(install, waiting, there)
        self._send(sender, scaled)
        self._move_on()

    def _move_on(self) -> None:
        """Begins what is wanted, or ends what is under way, once everybody is ready for it."""
        self.moving.forget(self._now)
        self.shifting.forget(self._now)
        if self.gathering is not None or self.finished or not self._all_known():
            return
        there = self.installed - self.bare
        if there.issuperset(self.install.servers) and not self._rebuilding():
            lacks = self._lacks("server", self.moving.comes(self.install), grows=True)
            if not lacks and self.moving.is_due(self.install, self._by_readiness("server")):
                self._change()
                return
        present = self.installed.issuperset(self.members) and not self.bare
        if present and self.shifting.is_due(self.install, self.resting, self._now):
            if not self._lacks("trainer", self.shifting.comes(self.install), grows=True):
                self._change()

    # ------------------------------------------------------------------ timers and the end

    def tick(self, now: float) -> Outbox:
        self._wait_longer(now - self._last_tick)
        self._now = self._last_tick = now
        if self.finished:
            return self.take_outbox()
        self._give_up_if_bearable()
        self._move_on()
        if now - self._last_retry >= self.retry_s:
            self._last_retry = now
            self._retry(now)
        return self.take_outbox()

    def _wait_longer(self, gap_s: float) -> None:
        """Time in which this process did not run is nobody's delay but its own."""
        if gap_s > self.retry_s:
            self.silent = {member: since + gap_s for member, since in self.silent.items()}
            if self.gathering:
                self.gathering.since += gap_s

    def _retry(self, now: float) -> None:
        waited_for = {**self.silent}
        if self.gathering:
            waited_for |= dict.fromkeys(self.gathering.waiting, self.gathering.since) | self.silent
        late = sorted(m for m, since in waited_for.items() if now - since > self.deadline_s)
        if late:
            self._give_up(late)
            return
        if self.gathering is None:
            self._outbox += self.scrubs.ask(self.install)
            if self._all_known():
                self._send_install(self.members)
        elif now - self.gathering.since > self.deadline_s and not self.gathering.waiting:
            # Those that were asked for died before they could say hello.
            self._asked = dict.fromkeys(self._asked, 0)
            self.gathering.since = now
            self._decide_if_complete()
        else:
            for member in sorted(self.gathering.waiting):
                self._send(member, Prepare(view=self.gathering.view))

    def _rebuilding(self) -> set[Member]:
        """Those that are at work. Who leaves need not be whole."""
        return {*self.install.staying()} - (self.whole & self.mirrored)

    def _owes(self, member: Member) -> bool:
        """Whether a shift waits until it rests, or a view for its dense state: that may be lost."""
        shift = self.install.shift
        works = shift is not None and member in {*self.install.trainers} - self.resting
        return works or member in self.bare

    def _finish_if_done(self) -> None:
        """All trainers hold all answers, all servers all records (rule 6), and have told so."""
        if self.gathering is None and not self.finished and self.done.issuperset(self.members):
            self._finish(DONE)

    def _finish(self, reason: str) -> None:
        self.finished = True
        self.failure = None if reason == DONE else reason
        # A coordinator that was replaced finds out before it stops anybody.
        self.state = msgspec.structs.replace(self.state, ended=reason)
        self._unsaved = True
        spares = [*self.spares["server"], *self.spares["trainer"]]
        for member in (*self.members, *spares, *self.install.retired, SUPERVISOR):
            if member not in self.dead:
                self._send(member, Stop(view=self.install.view, reason=reason))

    def _send(self, to: Member, message: Message) -> None:
        self._outbox.append((to, message))
