"""What all members have in common: views, fences, and an outbox.

A machine is a plain state machine: a message and the time go in, messages come out. It has no
sockets, clocks, threads or random numbers; the same class runs over sockets and in the simulator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

from planaria.wire.messages import (
    NO_VIEW,
    Done,
    Install,
    Member,
    Message,
    Prepare,
    Promise,
    View,
)

Outbox: TypeAlias = list[tuple[Member, Message]]

COORDINATOR: Member = "coordinator"
"""Where members send what is meant for the coordinator, whichever process that is."""

MAX_WAITING = 4096  # messages of a newer view kept until its install
MAX_WAITING_BYTES = 256 << 20
BACK_OFF = 1.5  # every wait in vain is so many times as long as the one before
MAX_BACK_OFF = 8  # but no longer than so many times retry_s


class Retries:
    """When to ask again for what does not come.

    Not sooner than twice the time that a step takes here, however long that is: who is slow has
    everything. Then ever more rarely, until something changes.
    """

    def __init__(self, retry_s: float) -> None:
        self.retry_s = retry_s
        self.step_s = 0.0  # how long one takes, smoothed
        self._step: tuple[int, float] | None = None  # and since when
        self._spoilt = False
        self._mark: object = None
        self._since = 0.0  # of the last change, or the last time that this was due
        self._wait_s = retry_s

    def spoil(self) -> None:
        """Something was lost: how long this step takes says nothing about how long one takes.

        Else waits would make steps longer, and steps waits.
        """
        self._spoilt = True

    def found(self) -> None:
        """What was lost is known and was sent again: an answer should come soon."""
        self._spoilt, self._mark = True, None

    def restart(self) -> None:
        """A new view: everything was sent anew. The time that took is not a step's."""
        self._mark = self._step = None

    def due(self, now: float, step: int, mark: object) -> bool:
        """mark: different whenever something that is waited for has come."""
        longest_s = MAX_BACK_OFF * self.retry_s
        if self._step is None:
            self._step = (step, now)
        elif step != self._step[0]:
            took_s = now - self._step[1]
            if not self._spoilt:
                self.step_s += (took_s - self.step_s) / 4 if self.step_s else took_s
            self._step, self._spoilt = (step, now), False
        if mark != self._mark:
            self._mark, self._since = mark, now
            self._wait_s = min(max(self.retry_s, 2 * self.step_s), longest_s)
        if now - self._since < self._wait_s:
            return False
        self._since, self._wait_s = now, min(BACK_OFF * self._wait_s, longest_s)
        return True


class Machine(ABC):
    """A member of views: fenced against older ones, patient with newer ones (rules 7 and 11)."""

    def __init__(self, member: Member, retry_s: float) -> None:
        self.member = member
        self.retries = Retries(retry_s)
        self.view: View = NO_VIEW
        self.promised: View = NO_VIEW
        self.install: Install | None = None
        self.left = False  # in this view: nothing depends on this member any more
        self.outbox: Outbox = []
        self._waiting: list[tuple[Member, Message]] = []
        self._waiting_bytes = 0

    # What a member adds to this: ----------------------------------------------------------

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the last step is done here; the driver then tells what is held, and `leave`s."""

    @abstractmethod
    def held(self) -> Promise:
        """What this member holds, said in the view that is being prepared."""

    @abstractmethod
    def on_install(self, old: Install | None, new: Install) -> None: ...

    @abstractmethod
    def on_message(self, sender: Member, message: Message) -> None: ...

    @abstractmethod
    def report(self) -> None:
        """Tell the coordinator that the view is installed, and whether all records are valid."""

    @abstractmethod
    def progress(self) -> tuple[int, object]:
        """The step, and something that changes whenever what is waited for comes."""

    @abstractmethod
    def on_retry(self) -> None:
        """Ask for what has not come, or send it again (rule 15)."""

    # --------------------------------------------------------------------------------------

    def send(self, to: Member, message: Message) -> None:
        self.outbox.append((to, message))

    def take_outbox(self) -> Outbox:
        sent, self.outbox = self.outbox, []
        return sent

    def leave(self) -> Outbox:
        """The driver has told what this member holds at the end; it may go once everybody may."""
        self.left = True
        self.send(COORDINATOR, Done(view=self.view))
        return self.take_outbox()

    def receive(self, sender: Member, message: Message) -> Outbox:
        self._handle(sender, message)
        return self.take_outbox()

    def tick(self, now: float) -> Outbox:
        if self.install and not self.frozen() and self.retries.due(now, *self.progress()):
            self.on_retry()
            if self.left:
                self.send(COORDINATOR, Done(view=self.view))
        return self.take_outbox()

    def frozen(self) -> bool:
        """Between a promise and its install nothing may move."""
        return self.promised > self.view

    def _handle(self, sender: Member, message: Message) -> None:
        if isinstance(message, Prepare):
            self._prepare(sender, message.view)
        elif isinstance(message, Install):
            self._install(message)
        elif message.view < self.view or message.view < self.promised:
            return  # late, or a zombie's
        elif message.view > self.view:
            self._keep(sender, message)
        else:
            self.on_message(sender, message)

    def _keep(self, sender: Member, message: Message) -> None:
        """Until the install of its view. Beyond the bounds its sender will be asked for it."""
        size = message.array_bytes()
        if len(self._waiting) < MAX_WAITING and self._waiting_bytes + size <= MAX_WAITING_BYTES:
            self._waiting.append((sender, message))
            self._waiting_bytes += size

    def _prepare(self, sender: Member, view: View) -> None:
        if view < self.promised or view <= self.view:
            return
        self.promised = view
        self.send(sender, self.held())

    def _install(self, install: Install) -> None:
        if install.view < self.promised or install.view < self.view:
            return
        if install.view == self.view:
            self.report()  # what was said before was lost, or something has changed since
            return
        old, self.install = self.install, install
        self.view = self.promised = install.view
        self.left = False
        self.retries.restart()
        self.on_install(old, install)
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for sender, message in waiting:
            self._handle(sender, message)
