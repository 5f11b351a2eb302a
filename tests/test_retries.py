"""Asking again: rarely, and only for what did not come."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from planaria.server.machine import ServerMachine
from planaria.simulator import Faults, ToyJob, World
from planaria.simulator.process import RETRY_S
from planaria.trainer.machine import TrainerMachine
from planaria.wire import machine as wire_machine
from planaria.wire.machine import MAX_BACK_OFF, Retries
from planaria.wire.messages import DenseGradient, DenseSum, Install, Member, Message, Push, View


class SlowServers(World):
    """Every server takes three times retry_s for each step, and counts what is sent."""

    def __init__(self, seed: int) -> None:
        self.sent: Counter[type[Message]] = Counter()
        self.sent_bytes: Counter[type[Message]] = Counter()
        self.seen: set[tuple[Member, int]] = set()
        super().__init__(ToyJob(), seed, Faults(count=0), network="even")

    def send(self, sender: Member, to: Member, message: Message) -> None:
        self.sent[type(message)] += 1
        self.sent_bytes[type(message)] += message.array_bytes()
        super().send(sender, to, message)

    def on_delivery(self, sender: Member, to: Member, message: Message) -> None:
        if isinstance(message, Push) and (to, message.step) not in self.seen:
            self.seen.add((to, message.step))
            self.pause(to, 3 * RETRY_S, beats=True)


class PushesAgain(TrainerMachine):
    """As it was: what is not answered is sent again, gradients and all."""

    def on_retry(self) -> None:
        for step in sorted(self.pushes):
            if step <= self.pushed and self.install:
                self._send_pushes(step, range(self.servers))
                self._send_contributions(step, range(self.reduction.trainers))


class SlowAndImpatient(SlowServers):
    trainer_class = PushesAgain


def test_a_slow_step_sends_no_gradient_twice() -> None:
    """Steps of a second with retry_ms 500 sent 120 MB of pushes a step instead of 45."""
    job = ToyJob()
    pushes = job.steps * job.trainers * job.servers
    sent = again = 0
    for seed in range(5):
        world = SlowServers(seed).run()
        sent += world.sent_bytes[Push]
        assert world.now > 1000 + job.steps * 3 * RETRY_S
        assert world.sent[Push] == pushes
        dense = job.steps * job.trainers * (job.trainers - 1)
        assert world.sent[DenseGradient] == world.sent[DenseSum] == dense
        control = SlowAndImpatient(seed).run()
        assert control.sent[Push] > pushes
        again += control.sent_bytes[Push]
    assert again > 1.3 * sent


def waits(retries: Retries, start: float, seconds: float, step: int) -> list[float]:
    """After how long each retry is due while nothing comes; ticks every 10 ms."""
    ticks = [start + tick / 100 for tick in range(int(seconds * 100))]
    due = [start] + [now for now in ticks if retries.due(now, step, "nothing new")]
    return [round(after - before, 1) for before, after in pairwise(due)]


def test_waits_grow_while_nothing_comes_and_start_over_when_something_does() -> None:
    retries = Retries(1.0)
    grown = [1.0, 1.5, 2.25, 3.375, 5.0625]
    assert waits(retries, 50.0, 20.0, 1) == pytest.approx(grown, abs=0.1)
    assert not retries.due(70.0, 1, "something")
    assert waits(retries, 70.0, 4.0, 1) == [1.0, 1.5]
    retries.restart()
    assert max(waits(retries, 80.0, 99.0, 1)) == MAX_BACK_OFF


@pytest.mark.parametrize("lost", [False, True])
def test_the_first_wait_follows_the_time_that_steps_take_unless_something_was_lost(
    lost: bool,
) -> None:
    retries = Retries(0.5)
    for step in range(1, 20):
        if lost:
            retries.spoil()
        retries.due(100.0 + step, step, step)
    assert waits(retries, 119.0, 3.0, 19)[0] == (0.5 if lost else 2.0)


def test_what_waits_for_an_install_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_machine, "MAX_WAITING_BYTES", 1000)
    server = ServerMachine("server-1", ToyJob().server_job(1.0), fresh_place=0)
    index, gradients = np.zeros(50, np.int64), np.zeros((50, 2), np.float32)
    push = Push(view=View(1, 1), rank=0, step=1, indices=[index], gradients=[gradients], lrs=[0.1])
    assert push.array_bytes() == 800
    for _ in range(3):
        server.receive("trainer-1", push)
    assert len(server._waiting) == 1
    members = [f"server-{place}" for place in range(1, 5)]
    install = Install(
        view=View(1, 1), committed=0, servers=members, trainers=["trainer-1"], rebuilding=[]
    )
    server.receive("coordinator", install)
    assert server._waiting == []
    later = Push(view=View(1, 2), rank=0, step=1, indices=[index], gradients=[gradients], lrs=[0.1])
    server.receive("trainer-1", later)
    assert len(server._waiting) == 1  # what was kept before does not count for ever
