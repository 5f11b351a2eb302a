"""What all members have in common: views, fences, and an outbox.

A machine is a plain state machine: a message and the time go in, messages come out. It has no
sockets, clocks, threads or random numbers; the same class runs over ZeroMQ and in the simulator.
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


class Machine(ABC):
    """A member of views: fenced against older ones, patient with newer ones (rules 7 and 11)."""

    def __init__(self, member: Member, retry_s: float) -> None:
        self.member = member
        self.retry_s = retry_s
        self.view: View = NO_VIEW
        self.promised: View = NO_VIEW
        self.install: Install | None = None
        self.refused = 0
        self.left = False  # in this view: nothing depends on this member any more
        self.outbox: Outbox = []
        self._waiting: list[tuple[Member, Message]] = []
        self._last_retry = 0.0

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
    def on_retry(self) -> None:
        """Send again what is unanswered (rule 15)."""

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
        if self.install and self.frozen() is False and now - self._last_retry >= self.retry_s:
            self._last_retry = now
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
            self.refused += 1
        elif message.view > self.view:
            if len(self._waiting) < MAX_WAITING:  # beyond that it is sent again by its sender
                self._waiting.append((sender, message))
        else:
            self.on_message(sender, message)

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
        self.on_install(old, install)
        waiting, self._waiting = self._waiting, []
        for sender, message in waiting:
            self._handle(sender, message)
