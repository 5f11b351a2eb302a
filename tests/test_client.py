"""The trainer as a library: a caller and a talker, two threads and one machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from planaria.dense import DenseCopies
from planaria.errors import JobOver, StepError
from planaria.kernels.types import Bytes
from planaria.layout import Layout
from planaria.trainer.client import Client
from planaria.trainer.job import Gradients, TrainerJob
from planaria.trainer.machine import LAST_PART, TrainerMachine
from planaria.wire.messages import Answer, DenseCopy, Install, Lookup, Push, View, Vote

FIRST = View(1, 1)
LIMIT_S = 30.0
SOON_S = 0.05  # in which a thread that could go on would have


def state_of(step: int) -> Bytes:
    return np.full(8, step, np.uint8)


class Talker:
    """One trainer and one server, which is played by the test. No message is sent anywhere."""

    def __init__(self, *, fresh: bool = True) -> None:
        dense = DenseCopies()
        if fresh:
            dense.put(0, state_of(0))
        job = TrainerJob(Layout.fresh(1, 0), rows=[8], dims=[2])
        self.machine = TrainerMachine("trainer-0", job, dense, fresh_rank=0 if fresh else None)
        self.wakes = 0
        self.client = Client(self.machine, self._wake)
        self.sent: list[object] = []

    def _wake(self) -> None:
        self.wakes += 1

    def receive(self, sender: str, message: Install | Answer | Vote | DenseCopy) -> None:
        with self.client.lock:
            self.sent += [sent for _, sent in self.machine.receive(sender, message)]
        self.client.moved()

    def install(self, committed: int = 0) -> None:
        install = Install(
            view=FIRST,
            committed=committed,
            servers=["server-0"],
            trainers=["trainer-0"],
            rebuilding=[],
            keepers=1,
        )
        self.receive("coordinator", install)

    def answer(self, step: int, part: int, rows: int = 1, protected: int = 0) -> None:
        weights = np.full((rows, 2), step, np.float32)
        self.receive(
            "server-0",
            Answer(
                whole=True,
                view=FIRST,
                place=0,
                step=step,
                part=part,
                protected=protected,
                weights=[weights],
            ),
        )

    def taken(self) -> list[object]:
        with self.client.lock:
            self.sent += [sent for _, sent in self.machine.take_outbox()]
        return self.sent


ROW = {0: [np.zeros(1, np.int64)]}
PUSHED = Gradients(ROW, {0: [np.ones((1, 2), np.float32)]}, [0.1])
DENSE = np.arange(3, dtype=np.float32)


@contextmanager
def calling(talker: Talker) -> Iterator[Callable[..., Future[Any]]]:
    """Calls in a thread of their own. Whatever happens, none is left waiting."""
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit
        finally:
            talker.client.end("the test is over")


def wait_until_waiting(client: Client, callers: int = 1) -> None:
    until = time.monotonic() + LIMIT_S
    while client.waits < callers:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_step_of_two_threads() -> None:
    talker = Talker()
    client = talker.client

    def one_step() -> tuple[float, list[float]]:
        rank, step, state = client.start()
        assert (rank, step, state.tolist()) == (0, 0, state_of(0).tolist())
        client.ask(1, 0, ROW)
        seen = float(client.rows(1, 0)[0][0][0, 0])
        client.push(1, PUSHED, DENSE)
        total = client.sum(1).tolist()
        client.end_step(1, state_of(1))
        client.finish()
        return seen, total

    with calling(talker) as call:
        done = call(one_step)
        wait_until_waiting(client)
        talker.install()
        wait_until_waiting(client)
        talker.answer(1, 0)
        assert done.result(LIMIT_S) == (1.0, DENSE.tolist())
    kinds = [type(message) for message in talker.taken()]
    assert kinds.count(Push) == 1
    lookups = [message for message in talker.sent if isinstance(message, Lookup)]
    assert [(lookup.step, lookup.part, lookup.last) for lookup in lookups] == [
        (1, 0, False),
        (2, LAST_PART, True),
    ]
    assert DenseCopy in kinds  # server:0 keeps one, since there is one trainer
    assert talker.wakes > 0


def test_a_trainer_knows_whose_rows_votes_or_gradients_it_waits_for() -> None:
    """One that waited for a vote said that it waited for other trainers, though there were none."""
    talker = Talker()
    client, machine = talker.client, talker.machine
    talker.install()
    for step in (1, 2):
        client.ask(step, 0, ROW)
        assert machine.waits_for() == ("rows", [0])
        talker.answer(step, 0)
        client.rows(step, 0)
        assert machine.waits_for() == ("gradients", [])
        client.push(step, PUSHED, DENSE)
        if step == 1:
            client.end_step(step, state_of(step))
    assert machine.waits_for() == ("votes", [0])
    assert machine.sum_of(2) is None
    talker.receive("server-0", Vote(view=FIRST, place=0, protected=1))
    assert machine.waits_for() == ("gradients", [])
    assert machine.sum_of(2) is not None


def test_each_of_two_callers_gets_its_own_rows() -> None:
    """The second to wait was given the first one's, and the first waited for ever."""
    talker = Talker()
    client, found = talker.client, ThreadPoolExecutor(2)
    talker.install()
    for part, rows in enumerate((1, 3)):
        client.ask(1, part, {0: [np.arange(rows, dtype=np.int64)]})
    with found:
        try:
            both = [found.submit(client.rows, 1, part) for part in range(2)]
            wait_until_waiting(client, 2)
            talker.answer(1, 1, rows=3)
            talker.answer(1, 0, rows=1)
            assert [len(one.result(LIMIT_S)[0][0]) for one in both] == [1, 3]
        finally:
            client.end("the test is over")


def test_a_new_trainer_waits_for_the_state_of_the_committed_step() -> None:
    talker = Talker(fresh=False)
    with calling(talker) as call:
        start = call(talker.client.start)
        talker.install(committed=7)
        time.sleep(SOON_S)
        assert not start.done()
        talker.receive("server-0", DenseCopy(view=FIRST, step=7, state=state_of(7)))
        assert start.result(LIMIT_S).step == 7


def test_who_waits_is_woken_once_and_only_when_all_is_there() -> None:
    talker = Talker()
    client = talker.client
    talker.install()
    client.ask(1, 0, ROW)
    with calling(talker) as call:
        rows = call(client.rows, 1, 0)
        wait_until_waiting(client)
        for _ in range(3):
            client.moved()
            talker.answer(1, 0, rows=2)  # of another shape: not what was asked for
        time.sleep(SOON_S)
        assert not rows.done()
        assert client.waits
        talker.answer(1, 0)
        talker.answer(1, 0)
        assert rows.result(LIMIT_S)[0][0].shape == (1, 2)
    assert not client.waits


def test_what_is_there_is_not_waited_for() -> None:
    talker = Talker()
    talker.install()
    talker.client.ask(1, 0, ROW)
    talker.answer(1, 0)
    assert talker.client.rows(1, 0)[0][0].tolist() == [[1.0, 1.0]]


def test_the_end_of_the_job_ends_every_wait_and_every_later_call() -> None:
    talker = Talker()
    talker.install()
    talker.client.ask(1, 0, ROW)
    with calling(talker) as call:
        rows = call(talker.client.rows, 1, 0)
        wait_until_waiting(talker.client)
        talker.client.end("done")
        with pytest.raises(JobOver, match="done"):
            rows.result(LIMIT_S)
    for later in (
        lambda: talker.client.ask(2, 0, ROW),
        lambda: talker.client.rows(1, 0),
        talker.client.start,
        talker.client.finish,
    ):
        with pytest.raises(JobOver, match="done"):
            later()
    talker.client.end("for another reason")
    with pytest.raises(JobOver, match="done"):  # the first reason stays
        talker.client.finish()


def test_an_exception_of_the_talker_comes_out_where_the_caller_waits() -> None:
    talker = Talker()
    with calling(talker) as call:
        start = call(talker.client.start)
        wait_until_waiting(talker.client)
        talker.client.end(ZeroDivisionError("in the talker"))
        with pytest.raises(ZeroDivisionError, match="in the talker"):
            start.result(LIMIT_S)


def test_an_exception_of_the_machine_leaves_the_lock_free() -> None:
    talker = Talker()
    talker.install()
    with pytest.raises(StepError, match="step 9"):
        talker.client.ask(9, 0, ROW)
    taken = threading.Event()

    def take() -> None:
        with talker.client.lock:
            taken.set()

    threading.Thread(target=take).start()
    assert taken.wait(LIMIT_S)


def test_a_caller_turns_while_it_waits_or_calls_and_hangs_when_it_does_neither() -> None:
    talker = Talker()
    client = talker.client
    talker.install()
    assert client.turns()
    assert not client.turns()  # it computes, or hangs
    client.ask(1, 0, ROW)
    assert client.turns()
    assert not client.turns()
    with calling(talker) as call:
        rows = call(client.rows, 1, 0)
        wait_until_waiting(client)
        assert client.turns()
        assert client.turns()  # whoever waits does not hang
        talker.answer(1, 0)
        rows.result(LIMIT_S)
        assert client.turns()
        assert not client.turns()


def test_the_talker_goes_on_while_the_caller_computes() -> None:
    """Votes come and pushes leave, whatever the other thread does for however long."""
    talker = Talker()
    client = talker.client
    talker.install()
    client.ask(1, 0, ROW)
    talker.answer(1, 0)
    client.rows(1, 0)
    client.push(1, PUSHED, DENSE)
    client.end_step(1, state_of(1) + np.uint8(client.sum(1)[0]))
    client.ask(2, 0, ROW)
    talker.answer(2, 0)
    client.rows(2, 0)
    client.push(2, PUSHED, DENSE)
    assert [push.step for push in talker.taken() if isinstance(push, Push)] == [1]
    talker.receive("server-0", Vote(view=FIRST, place=0, protected=1))
    assert [push.step for push in talker.taken() if isinstance(push, Push)] == [1, 2]


def test_who_is_to_pause_after_a_step_ends_it_and_waits() -> None:
    talker = Talker()
    client = talker.client
    talker.install()
    client.pause_after = 1
    client.ask(1, 0, ROW)
    talker.answer(1, 0)
    client.rows(1, 0)
    client.push(1, PUSHED, DENSE)
    state = state_of(1) + np.uint8(client.sum(1)[0])
    with calling(talker) as call:
        ended = call(client.end_step, 1, state)
        wait_until_waiting(client)
        assert talker.machine.dense.step == 1  # for all others the step is over
        client.moved()
        assert not ended.done()
        client.pause_after = 5
        client.moved()
        ended.result(LIMIT_S)
