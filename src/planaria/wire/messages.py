"""The messages of the protocol.

Every message carries the view that its sender was in. Steps and sources make each one idempotent:
a handler that sees a message again does nothing, or answers again.

Arrays are fields like any others; the codec sends each as a frame of its own, without a copy. They
are shared between sender and receiver and never written once sent.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from planaria.kernels.types import Bytes, Floats, Index, Records
from planaria.layout.resizing import Resize

Member: TypeAlias = str
"""The name of one process, such as "server-7". A replacement has another name."""


class View(NamedTuple):
    """A numbered membership; later views compare greater. No number is ever used twice."""

    epoch: int
    n: int


NO_VIEW = View(0, 0)


class Shift(NamedTuple):
    """The job has so many trainers from the step after this one on."""

    after: int
    trainers: int


class Message(msgspec.Struct, tag=True, kw_only=True, array_like=True):
    view: View

    def array_bytes(self) -> int:
        """The size of the arrays in it, which is nearly all of a large message."""
        values = [getattr(self, name) for name in self.__struct_fields__]
        arrays = [*values, *(item for value in values if isinstance(value, list) for item in value)]
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


# ---------------------------------------------------------------- trainers and servers


class Lookup(Message):
    """A trainer wants rows of `step`, as of step - 1. Sent to every server, empty too.

    A step may have several of these, its parts, counted from 0. `last`: no step follows the one
    before; this trainer only wants to hear that all of it is applied.
    """

    rank: int
    step: int
    part: int
    indices: list[Index]  # per arena: record numbers on the server
    last: bool = False
    exact: bool = False  # however rows of this job travel otherwise
    bounds: list[Floats] = []  # one, where tables have bounds in this step: float32[tables]


class Answer(Message):
    """The rows as of step - 1; and a vote, see there."""

    place: int
    step: int
    part: int
    protected: int
    whole: bool  # whether the sender is: none of its records is still to be decoded
    weights: list[Floats]  # per arena: float32[n, dim]
    which: list[Bytes] = []  # if any: per arena, bits; which of the rows. The others came early
    frames: list[Bytes] = []  # if any: per arena, instead of its weights; see wire.coding


class Early(Message):
    """Some rows of a lookup, as of step - 2. The answer brings the others, and again those of these
    that step - 1 changes.
    """

    place: int
    step: int
    part: int
    which: list[Bytes]  # per arena, bits: which of the rows that were asked for
    weights: list[Floats]  # per arena: float32[n, dim]
    frames: list[Bytes] = []  # instead of these, as in an answer


class Vote(Message):
    """Everything up to `protected` is held here: applied, and with the deltas of all whose parity
    the sender holds.
    """

    place: int
    protected: int


class Push(Message):
    """A trainer's gradients of `step`, summed per distinct row. Sent to every server."""

    rank: int
    step: int
    indices: list[Index]  # per arena
    gradients: list[Floats]  # per arena: float32[n, dim]
    lrs: list[float]  # per arena: the learning rates of the step, equal for all ranks


class Ask(Message):
    """A trainer has waited. A server answers with its vote and what it lacks of that rank, whose
    pushes before `step` were sent; a trainer sends once more what it can of the sum of `step`.
    """

    rank: int
    step: int
    lookups: list[tuple[int, int]]  # (step, part) of those that have no answer


class Lacks(Message):
    """What a server has not received: of a trainer, or of another server. Lookups that it has
    answered already count as well.
    """

    place: int
    pushes: list[int] = []  # steps
    lookups: list[tuple[int, int]] = []  # (step, part)
    deltas: list[int] = []  # steps


class DenseGradient(Message):
    """A trainer's gradient of the dense network: the part that the receiver sums."""

    rank: int
    step: int
    gradient: Floats


class DenseSum(Message):
    """One part of the gradient, summed over all ranks."""

    part: int
    step: int
    gradient: Floats


class DenseRequest(Message):
    """A new trainer wants the dense state as of the view's committed step; a keeper wants the next
    one that it should have.
    """

    as_of: int


class DenseCopy(Message):
    """The dense state after `step`."""

    step: int
    state: Bytes


# ---------------------------------------------------------------- servers


class Delta(Message):
    """What `step` did to the records of `place` that the receiver protects. Empty ones count."""

    place: int
    step: int
    indices: list[Index]  # per arena: record numbers on the holder
    deltas: list[Records]  # per arena


class MateRequest(Message):
    """Asks a stripe-mate for records as of a committed step."""

    request: int
    arena: int
    as_of: int
    indices: Index


class RangeRequest(Message):
    """Asks a stripe-mate for records in a row, as of a committed step."""

    request: int
    arena: int
    as_of: int
    first: int
    count: int
    peeks: bool = False  # it would rather read them where they lie


class MatePeek(Message):
    """Where these records lie, for whoever can read the memory of this process. They are as of the
    step that was asked for when the changes are taken out of them; and only if nothing has been
    done to them since, which the counter says.
    """

    request: int
    place: int
    process: int
    at: int  # the first of them
    counter: int  # where this process counts what it does to them, behind its key
    key: int
    count: int
    ends: list[int]  # of the changes: in each part, a record stands once
    indices: Index  # from the first record on
    deltas: Records


class MateReply(Message):
    """The records, or why not: `invalid`, `gone` or `behind`; `committed` is what it knows of."""

    request: int
    place: int
    status: str
    committed: int
    records: Records | None


class Scrub(Message):
    """Verify every parity record against its data records, while training goes on."""

    round: int


class Scrubbed(Message):
    """What a server found, or (to whoever asked) what all servers found."""

    round: int
    place: int
    records: int
    wrong: int


# ---------------------------------------------------------------- views


class Prepare(Message):
    """The coordinator starts a view change: refuse older views and say what you hold."""


class Promise(Message):
    """What a member holds. Blank members (replacements that hold nothing) do not count."""

    held: int
    blank: bool
    whole: bool  # of servers: no record is still to be rebuilt
    dense: bool  # whether it has the dense state
    step_s: float = 0.0  # how long its steps take; 0: it does not know
    mirrored: bool = True  # of servers: no mirror is still to be filled
    moves: int = -1  # those of the install that it has; -1: none
    rests: bool = False  # it has nothing of a step after `held`, and computes none


class Install(Message):
    """The new membership. Steps up to `committed` are final; nothing after it is."""

    committed: int
    servers: list[Member]  # by place
    trainers: list[Member]  # by rank
    rebuilding: list[int]  # places that are not whole
    step_s: float = 0.0  # how long a step took while all were; 0: nobody knows
    addresses: dict[Member, str] = {}
    resizes: list[Resize] = []  # that have been done; the layout follows from them
    moving: Resize | None = None  # that is under way: memberships have mirrors
    keepers: int = 0  # how many servers keep the dense state
    shifts: list[Shift] = []  # that have been done
    shift: Shift | None = None  # that is to come: trainers rest after its step
    retired: list[Member] = []  # they have left for good, whatever comes late of them

    @property
    def moves(self) -> int:
        """How often the layout has changed."""
        return 2 * len(self.resizes) + (self.moving is not None)

    def staying(self) -> list[Member]:
        """The servers that will be there when a resize has ended; others need not be whole."""
        if self.moving is None:
            return self.servers
        return [self.servers[place] for place in self.moving.places(len(self.servers))]

    def keeping(self) -> list[Member]:
        """The servers that keep the dense state: those of the first places; while memberships move,
        also those that will have the first places.
        """
        count = self.keepers
        return [*dict.fromkeys([*self.servers[:count], *self.staying()[:count]])]


class Installed(Message):
    """The sender has installed this view; the rest as in Promise. Sent again on change."""

    whole: bool
    dense: bool
    mirrored: bool = True
    rests: bool = False  # of trainers: after the step of the shift, which all servers hold


class Heartbeat(Message):
    """The sender lives. One from a member that was given up is answered with Stop."""

    age_ms: int = 0  # for how long its main loop has not turned, by its own clock


class Done(Message):
    """The last step is done here: a trainer holds all answers, a server all records; and what they
    hold was told, so that nothing depends on them any more.
    """


class Stop(Message):
    """The job is over, or has failed: leave."""

    reason: str


class Hello(Message):
    """A process has started and can take a place."""

    member: Member
    role: str  # "server" or "trainer"
    address: str = ""


class Suspect(Message):
    """Somebody noticed that a process has ended (gone), or that it is silent or hangs."""

    member: Member
    gone: bool


class Scale(Message):
    """The job is to have so many servers, and these not among them."""

    servers: int | None  # None: as many as it has, less those
    without: list[Member] = []
    number: int = 0  # of the request: a later one takes the place of one that has not begun


class ScaleTrainers(Message):
    """The job is to have so many trainers."""

    trainers: int
    after: int = 0  # from the step after this one on; 0: as soon as can be
    number: int = 0  # of the request, as above


class Scaled(Message):
    """How far that is: `done`, `moving`, `refused` or `given up`, and why."""

    servers: int
    state: str
    why: str = ""
    trainers: int = 0


class Spawn(Message):
    """The coordinator asks the supervisor for more processes."""

    role: str
    count: int  # in all, with those that are on their way
    grows: bool = False  # nobody was lost: there are to be more


AnyMessage: TypeAlias = (
    Lookup
    | Answer
    | Early
    | Vote
    | Push
    | Ask
    | Lacks
    | DenseGradient
    | DenseSum
    | DenseRequest
    | DenseCopy
    | Delta
    | MateRequest
    | RangeRequest
    | MatePeek
    | MateReply
    | Scrub
    | Scrubbed
    | Prepare
    | Promise
    | Install
    | Installed
    | Heartbeat
    | Done
    | Stop
    | Hello
    | Suspect
    | Spawn
    | Scale
    | ScaleTrainers
    | Scaled
)
