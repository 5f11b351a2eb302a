"""Stand-ins for members, for schedules of the control plane: they start, beat, save and leave.

What a step does to records is the business of `world`, where the real machines run. A puppet only
knows which step it is at, and does with views, orders and saves what a member's process does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from planaria.checkpoints import DENSE, PartSummary
from planaria.wire.control import (
    Obeyed,
    Orders,
    PartFailed,
    PartSaved,
    Rebuilt,
    ServerHolds,
    StepDone,
    Tell,
    Told,
    TrainerHolds,
)
from planaria.wire.machine import COORDINATOR, Outbox
from planaria.wire.messages import (
    NO_VIEW,
    Done,
    Hello,
    Install,
    Installed,
    Member,
    Message,
    Prepare,
    Promise,
    Stop,
    View,
)
from planaria.wire.telling import Teller

REBUILD_S = 0.3


@dataclass
class Puppet:
    """A server or a trainer. number: the place or rank that it began the job with."""

    member: Member
    role: str
    number: int | None
    steps: int
    every: int
    saves_last: bool
    servers: int
    step: int = 0
    view: View = NO_VIEW
    promised: View = NO_VIEW
    install: Install | None = None
    whole_at: float = 0.0
    epoch: int = 0  # of the coordinator that it follows
    orders: Orders = field(default_factory=Orders)
    teller: Teller = field(default_factory=Teller)
    out: list[Told | Obeyed | Tell] = field(default_factory=list)  # to the supervisor
    told_in: View = NO_VIEW  # the view in which it told what it holds
    stopped: str | None = None
    saved: int = 0  # the last step that it has begun to save
    writing: int | None = None
    last_done: bool = False
    told_whole: bool = False

    def __post_init__(self) -> None:
        self.blank = self.number is None
        self.saved = self.step
        self.last_done = not self.saves_last or self.step >= self.steps

    # ------------------------------------------------------------------ views

    @property
    def frozen(self) -> bool:
        return self.promised > self.view

    def is_whole(self, now: float) -> bool:
        return not self.blank and now >= self.whole_at

    def receive(self, sender: Member, message: Message, now: float) -> Outbox:
        if isinstance(message, Prepare | Install) and message.view.epoch > self.epoch:
            self.epoch = message.view.epoch
            self.orders = msgspec.structs.replace(self.orders, coordinator=f"at {sender}")
        match message:
            case Prepare() if message.view >= self.promised and message.view > self.view:
                self.promised = message.view
                whole = self.is_whole(now)
                promise = Promise(
                    view=message.view,
                    held=self.step,
                    blank=self.blank,
                    whole=whole,
                    dense=not self.blank,
                )
                return [(COORDINATOR, promise)]
            case Install() if message.view >= self.promised and message.view >= self.view:
                return self._install(message, now)
            case Stop():
                self.stopped = message.reason
        return []

    def _install(self, install: Install, now: float) -> Outbox:
        if install.view > self.view:
            self.view = self.promised = install.view
            self.install = install
            members = install.servers if self.role == "server" else install.trainers
            if self.member in members:
                self.number = members.index(self.member)
                if self.blank:
                    self.blank, self.step = False, install.committed
                    self.whole_at = now + (REBUILD_S if self.role == "server" else 0.0)
        return [(COORDINATOR, self._installed(now))]

    def _installed(self, now: float) -> Installed:
        return Installed(view=self.view, whole=self.is_whole(now), dense=not self.blank)

    def tick(self, now: float) -> Outbox:
        """Everything that goes by time."""
        if self.install is None:
            hello = Hello(
                view=NO_VIEW, member=self.member, role=self.role, address=f"at {self.member}"
            )
            return [(COORDINATOR, hello)]
        if self.role == "server" and self.is_whole(now) and not self.told_whole:
            self.told_whole = True
            self.tell(Rebuilt(place=self.number or 0, rows=1, bytes=1), now)
        outbox: Outbox = [(COORDINATOR, self._installed(now))]
        if self.step == self.steps and self.last_done and not self.frozen and self.is_whole(now):
            if self.told_in != self.view:
                self.told_in = self.view
                self._tell_what_it_holds(now)
            elif not self.teller.unheard:
                outbox.append((COORDINATOR, Done(view=self.view)))
        return outbox

    def _tell_what_it_holds(self, now: float) -> None:
        digest, number = ("1", "1"), self.number or 0
        if self.role == "server":
            holds: Told = ServerHolds(
                place=number, digest=digest, data=1, parity=0, resident=1, refused=0
            )
        else:
            holds = TrainerHolds(rank=number, digest=digest, loss=None)
        self.tell(holds, now)

    # ------------------------------------------------------------------ steps and saves

    def on_step(self, step: int, now: float) -> None:
        self.step = step
        if self.role == "trainer":
            done = StepDone(rank=self.number or 0, step=step, rows=[1] * self.servers, loss=0.5)
            self.tell(done, now)

    @property
    def place(self) -> int | None:
        """Whose part it saves, if any."""
        if self.role == "server":
            return self.number
        return DENSE if self.number == 0 else None

    def due(self, now: float) -> int | None:
        """The step to save now, as PartSaver.due and its callers decide it."""
        if self.role == "trainer" and self.number != 0:
            self.last_done = True
        self.last_done |= self.orders.saved == self.steps
        if self.place is None or self.blank or self.writing is not None:
            return None
        self.saved = max(self.saved, self.orders.saved)
        wanted = self.orders.save_at if self.orders.save_at <= self.step else 0
        if self.every:
            wanted = max(wanted, self.step - self.step % self.every)
        if self.saves_last and self.step == self.steps:
            wanted = self.step
        if wanted <= self.saved or (wanted == self.steps and not self.is_whole(now)):
            return None
        self.saved = wanted
        if wanted != self.step:
            return None
        if not self.is_whole(now):
            self._tell_failed(wanted, "it is being rebuilt", now)
            return None
        self.writing = wanted
        return wanted

    def written(self, step: int, why_not: str | None, seconds: float, now: float) -> None:
        """The disk is done with a part."""
        self.writing = None
        place = self.place
        assert place is not None
        if why_not:
            self._tell_failed(step, why_not, now)
        else:
            part = PartSummary(f"{self.member}-{step}", place, 1, 1, "", 32, 1, {})
            saved = PartSaved(
                step=step,
                place=place,
                part=part,
                base=None,
                rows="all",
                lacks=0,
                seconds=seconds,
                blocked_s=0.0,
                rested_s=0.0,
            )
            self.tell(saved, now)
        self.last_done |= step == self.steps

    def _tell_failed(self, step: int, why: str, now: float) -> None:
        assert self.place is not None
        self.tell(PartFailed(step=step, place=self.place, why=why, late=False), now)

    # ------------------------------------------------------------------ the supervisor

    def tell(self, what: Told, now: float) -> None:
        self.out.append(self.teller.tell(what, now))

    def on_orders(self, orders: Orders) -> None:
        if orders.number > self.orders.number:
            self.orders = orders
        self.out.append(Obeyed(number=self.orders.number))
