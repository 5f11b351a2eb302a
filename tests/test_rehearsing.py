"""A replacement that is ready: it has rehearsed, its memory is touched, first things are first."""

from collections.abc import Callable

import numpy as np

from planaria.cluster.node import MemberNode
from planaria.cluster.server_node import resident_bytes
from planaria.layout import Layout
from planaria.optimizers import Optimizer
from planaria.server.decode_jobs import DecodeJob
from planaria.server.rebuilding import HEAD_START_S, Rebuilder
from planaria.server.rehearsing import BEFORE, Rehearsal
from planaria.server.reserve import Reserve
from planaria.server.store import Store
from planaria.tables import Table, make_arenas
from planaria.wire.codec import Envelope, Frames
from planaria.wire.control import Orders
from planaria.wire.machine import Outbox
from planaria.wire.messages import NO_VIEW, Hello, Install, MateReply, Message, Stop, View


def test_the_replacement_of_a_rehearsal_has_what_was_lost_and_takes_part() -> None:
    played = Rehearsal()
    spare, lost = played.spare, played.lost
    assert spare.whole
    assert not spare.errors
    assert {server.step for server in played.servers.values()} == {BEFORE + 1}
    assert lost.store is not None
    assert spare.store is not None
    own = spare.store.own.after(BEFORE)[0][0]
    records = spare.store.arenas[0].records.copy()
    records[own.indices] ^= own.delta  # as of the step at which it was lost
    data = spare.store.arenas[0].data_records
    assert np.array_equal(records[:data], lost.store.arenas[0].records.read(0, data))
    assert {server.protected for server in played.servers.values()} == {BEFORE + 1}


# ---------------------------------------------------------------------------- memory of a spare

ARENAS = make_arenas([Table("a", 9000, 16), Table("b", 70_001, 40)], Optimizer("adagrad"))
LAYOUT = Layout.fresh(7, 2)


def test_a_store_of_touched_memory_is_a_store_like_others_at_every_place() -> None:
    for place in LAYOUT.places:
        reserve = Reserve(ARENAS, LAYOUT)
        while reserve.touch():
            pass
        warm = Store(ARENAS, LAYOUT, place, blank_at=5, reserve=reserve)
        cold = Store(ARENAS, LAYOUT, place, blank_at=5)
        for one, other in zip(warm.arenas, cold.arenas, strict=True):
            assert np.array_equal(one.records.copy(), other.records.copy())
            assert one.records.read(0, len(one.records)).flags.c_contiguous
        assert warm.invalid_records == cold.invalid_records


def test_every_page_is_touched_and_nothing_else_is_taken() -> None:
    before = resident_bytes()
    reserve = Reserve(ARENAS, LAYOUT)
    pieces = 0
    while reserve.touch():
        pieces += 1
    needed = sum(
        max(LAYOUT.arena(arena.rows).records(place) for place in LAYOUT.places) * arena.words * 4
        for arena in ARENAS
    )
    assert needed <= resident_bytes() - before <= needed + (8 << 20)
    assert pieces > len(ARENAS)  # one at a time: a spare goes on listening


def test_memory_is_given_once_also_if_it_is_not_all_touched() -> None:
    reserve = Reserve(ARENAS, LAYOUT)
    assert reserve.touch()
    first = reserve.take(0, 10)
    assert first is not None
    assert len(first) >= 10  # with room to grow
    assert first.shape[1] == ARENAS[0].words
    assert reserve.take(0, 10) is None
    while reserve.touch():  # the rest is still there
        pass
    assert reserve.take(1, 3) is not None


# ---------------------------------------------------------------------------- what comes first


def blank() -> tuple[Rebuilder, Callable[[float], set[bool]]]:
    """A replacement's rebuilder, and what kinds of jobs it starts at a time: swept or not."""
    played = Rehearsal()
    job = played.job
    store = Store(job.arenas, job.layout, 2, blank_at=BEFORE)
    rebuilder = Rebuilder(store, job)
    view = View(2, 0)
    rebuilder.on_install(
        Install(view=view, committed=BEFORE, servers=played.names, trainers=[], rebuilding=[2])
    )

    def asks(now: float) -> set[bool]:
        rebuilder.refill(now)
        before = set(rebuilder.jobs)
        rebuilder.take_requests(view, BEFORE)
        rebuilder.take_sweep(view, BEFORE)
        return {job.sweep for number, job in rebuilder.jobs.items() if number not in before}

    return rebuilder, asks


def test_what_a_step_waits_for_is_asked_for_before_the_sweep_begins() -> None:
    rebuilder, asks = blank()
    assert asks(10.0) == set()
    rebuilder.want(0, np.array([0, 1, 2]))
    assert asks(10.0 + HEAD_START_S / 2) == {False}
    [(number, job)] = rebuilder.jobs.items()
    assert isinstance(job, DecodeJob)
    for place, (rows, _) in list(job.asked.items()):
        records = np.zeros((len(rows), rebuilder.store.arenas[0].arena.words), np.uint32)
        reply = MateReply(
            view=View(2, 0),
            request=number,
            place=place,
            status="value",
            committed=BEFORE,
            records=records,
        )
        rebuilder.on_reply(reply, BEFORE)
    assert asks(10.0 + HEAD_START_S / 2) == {True}


def test_the_sweep_does_not_wait_for_long_where_nobody_waits() -> None:
    _, asks = blank()
    assert asks(10.0) == set()
    assert asks(10.0 + HEAD_START_S) == {True}


# ---------------------------------------------------------------------------- saying hello


class Scene:
    """All that surrounds a member which starts: its orders come after its first look, and then the
    end. It has no view.
    """

    install = None
    coordinator = ""

    def __init__(self) -> None:
        self.coming: list[list[Orders | Stop]] = [
            [Orders(number=1, coordinator="there")],
            [Stop(view=NO_VIEW, reason="over")],
        ]
        self.sent: list[tuple[str, Message]] = []
        self.address, self.starved_at = "here", None

    def receive(self) -> list[Envelope]:
        return [Envelope("supervisor", "", message) for message in self.coming.pop(0)]

    def encode(self, message: Message) -> Frames:
        frames = Frames((message,))
        frames.array_bytes = 0
        return frames

    def send_all(self, messages: list[tuple[str, Frames]]) -> None:
        self.sent += [(to, frames[0]) for to, frames in messages]

    def tick(self, now: float) -> Outbox:
        return []

    def nothing(self, *_: object) -> None: ...

    poll = turn = say = close = nothing


def test_a_member_says_hello_as_soon_as_it_knows_to_whom() -> None:
    """It said it to nobody first, and waited a tenth of a second before it said it again: so long
    everybody waited for a trainer that was replaced.
    """
    scene, member = Scene(), object.__new__(MemberNode)
    vars(member).update(transport=scene, line=scene, machine=scene, sent={})
    vars(member).update(member="trainer-1", role="trainer", orders=Orders(), book={}, stopped=None)
    assert member.run() == "over"
    [(to, hello)] = scene.sent
    assert to == "there"
    assert isinstance(hello, Hello)
