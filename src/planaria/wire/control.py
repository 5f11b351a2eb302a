"""The messages of the control plane: what a job's processes and its supervisor tell each other.

Members tell; the supervisor orders. What is told is numbered by the member that tells it and sent
again until the supervisor has heard it (`Tell`, `Heard`; see wire.telling). Orders are a standing
state, not a stream: the newest `Orders` holds everything, and is sent again until it is obeyed.
No time in any of them is a reading of a clock, only a duration: clocks of two processes are never
compared.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from planaria.checkpoints.manifest import PartSummary
from planaria.exactness import Fingerprint
from planaria.kernels.types import Bytes, Floats
from planaria.layout.resizing import Resize
from planaria.wire.messages import Install, Member, Shift, View

SavedRows: TypeAlias = Literal["all", "changed", "priority", "interval"]
"""Of what a save has: all records, those that changed since its base, or those that matter most;
and `interval`, the latter with all records of the small tables, once per interval."""


class Control(msgspec.Struct, tag=True, kw_only=True, array_like=True):
    """What all of them have in common: nothing but their form."""


# ---------------------------------------------------------------- any member to the supervisor


class Listening(Control):
    """A process has started and can be written to."""

    role: str
    address: str


class Ready(Control):
    """It has everything that it starts with: records, model, data."""

    fingerprint: Fingerprint | None = None  # of trainers: what the bits of a step depend on


class Working(Control):
    """A long piece of work goes on. More is `done` each time, or it does not."""

    what: str
    done: int
    of: int


class StepDone(Control):
    """A trainer has computed a step. Of rank 0 alone: how well its samples were predicted."""

    rank: int
    step: int
    rows: list[int]  # by place: the distinct rows that it updates
    loss: float | None  # None of a script, whose loss is its own business
    auc: float | None = None
    normalized_entropy: float | None = None


class Waiting(Control):
    """A trainer has waited for a while, and for whom."""

    step: int
    places: list[int]
    what: str


class HeldOut(Control):
    """Held-out samples as the trained model predicts them."""

    rank: int
    first: int  # the number of the first of them, among those of the rank
    labels: Bytes
    logits: Floats


class Short(Control):
    """There are fewer held-out samples than wanted."""

    samples: int
    wanted: int


class DataEnded(Control):
    """There are no samples for this step."""

    step: int
    samples: int


class LeftLoop(Control):
    """A script has left its loop after this step. It goes on with other things, and ends the job
    later, if it does not raise."""

    rank: int
    step: int


class LastStep(Control):
    """A script has ended: no step follows this one, after which it had left its loop."""

    step: int


class SaveWanted(Control):
    """A script wants a checkpoint."""


class PartSaved(Control):
    """A process's part of a checkpoint is durable."""

    step: int
    place: int
    part: PartSummary
    base: int | None
    rows: SavedRows
    lacks: int  # row updates up to this step that neither this save nor one before it has
    seconds: float
    blocked_s: float
    rested_s: float
    resizes: int = 0  # of servers: so often had the layout changed


class PartFailed(Control):
    """A process's part of a checkpoint will never be. late: it was told of the step too late."""

    step: int
    place: int
    why: str
    late: bool


class Reloaded(Control):
    """Partial recovery: a server has gone back to a save."""

    place: int
    step: int
    saved: int
    rows: int
    bytes: int
    seconds: float


class Rebuilding(Control):
    place: int
    rows: int  # so far
    left: int = 0
    left_s: float | None = None  # at the speed so far


class Rebuilt(Control):
    """Every record of a replacement is there again."""

    place: int
    rows: int
    bytes: int


class ScrubFound(Control):
    place: int
    round: int
    records: int
    wrong: int


class Refused(Control):
    """A message that made no sense; nothing was done with it."""

    what: str
    ends: bool = False  # the job, which cannot go on without it


Traffic: TypeAlias = dict[str, tuple[int, int, int]]
"""What a process has sent, by the kind of message: how many, bytes of arrays, and bytes of these as
they were sent."""


class ServerHolds(Control):
    """What a server holds after the last step. tiers: see server.housing.tier_facts."""

    place: int
    digest: tuple[str, str]
    data: int
    parity: int
    resident: int
    refused: int
    sent: Traffic = {}
    tiers: dict[str, float] = {}


class TrainerHolds(Control):
    """What a trainer holds after the last step. loss: the mean of its last steps."""

    rank: int
    digest: tuple[str, str]
    loss: float | None
    sent: Traffic = {}


# ---------------------------------------------------------------- the coordinator to it


class Viewed(Control):
    """A view was installed."""

    view: View
    committed: int
    servers: list[Member]
    trainers: list[Member]
    rebuilding: list[int]
    resizes: list[Resize] = []
    moving: Resize | None = None
    shifts: list[Shift] = []
    shift: Shift | None = None

    @classmethod
    def of(cls, install: Install) -> Viewed:
        return cls(
            view=install.view,
            committed=install.committed,
            servers=install.servers,
            trainers=install.trainers,
            rebuilding=install.rebuilding,
            resizes=install.resizes,
            moving=install.moving,
            shifts=install.shifts,
            shift=install.shift,
        )


class Silent(Control):
    """A member is not heard of, or its main loop stands still."""

    member: Member
    seconds: float
    hung: bool


class WaitedFor(Control):
    """Members are silent that the job cannot do without, so they are not given up so far."""

    members: list[Member]
    deadline_s: float  # after which they are


class WantMore(Control):
    """So many more processes of a role are needed for a view."""

    role: str
    count: int  # with those that are on their way
    grows: bool = False  # nobody was lost: there are to be more


class Finished(Control):
    """The job is over: done, or with what is lost."""

    failure: str | None


class CoordinatorState(msgspec.Struct, frozen=True):
    """What survives the coordinator: which views were used, and the membership in force.

    ended: why the job is over, once it is. Some may have been told already, so all must be.
    """

    epoch: int
    n: int
    install: Install
    ended: str = ""


class ClaimEpoch(Control):
    """A coordinator on another machine wants an epoch of its own. Asked again until answered."""

    owner: str  # that process, and no other


class SaveState(Control):
    """A coordinator on another machine says nothing more before this is saved."""

    owner: str
    number: int  # of what this owner saves, counted from 1
    state: CoordinatorState


Told: TypeAlias = (
    Listening
    | Ready
    | Working
    | StepDone
    | Waiting
    | LeftLoop
    | LastStep
    | SaveWanted
    | HeldOut
    | Short
    | DataEnded
    | PartSaved
    | PartFailed
    | Reloaded
    | Rebuilding
    | Rebuilt
    | ScrubFound
    | Refused
    | ServerHolds
    | TrainerHolds
    | Viewed
    | Silent
    | WaitedFor
    | WantMore
    | Finished
)


class Tell(Control):
    """Something that must be heard; sent again until it is."""

    number: int
    what: Told


# ---------------------------------------------------------------- the supervisor to members


class Heard(Control):
    """Of what this member told, up to this number nothing is missing."""

    number: int


class Base(Control):
    """What the next save may be a difference from, if anything; no earlier step than `keep_from`
    will ever be one.
    """

    step: int | None = None
    keep_from: int = 0


class Orders(Control):
    """All that the supervisor wants, as of now. The highest number holds."""

    number: int = 0
    coordinator: str = ""  # where it listens
    save_at: int = 0  # the next step to save, if saves go by the clock or somebody wants one now
    save_all: bool = False  # that one has all rows, whatever the policy says
    saved: int = 0  # the newest checkpoint that counts
    base: Base = msgspec.field(default_factory=Base)
    partial: bool = True  # whether a lost server may still go back to its save alone
    gone: list[Member] = []  # processes that have ended
    pause_after: int = 0  # trainers wait after this step until it is another one; 0: none
    again: int = 0  # so often was a view change asked for, because nothing moved
    domains: dict[Member, str] = {}  # of servers and spares, where they are to be kept apart


class Obeyed(Control):
    """The orders that a process has by now."""

    number: int


class EpochClaimed(Control):
    """The epoch is the owner's alone. refused: why it has none."""

    owner: str
    epoch: int = 0
    state: CoordinatorState | None = None  # the newest that any coordinator has saved
    refused: str = ""


class StateSaved(Control):
    """It is durable, and no later epoch was claimed before it was. refused: why not."""

    owner: str
    number: int
    refused: str = ""


# ---------------------------------------------------------------- the supervisor and hosts


class Hosted(Control):
    """A process that a host is to run, and every signal that it was ever to be sent."""

    role: str
    member: Member
    number: int | None = None  # the place or rank that it begins with, if any
    signals: list[int] = []


class Rehearsal(Control):
    """A script that a host's trainers run, up to its first batch: the job is not known before."""

    command: list[str]  # with its arguments; none: the one that is ours
    folder: str  # where it runs, if the host has such a folder
    variables: dict[str, str]
    trainers: int  # of the job
    ranks: list[int] = []  # that are to run on this host, from the start
    spares: int = 0  # that are to be kept ready there
    declared: bytes = b""  # what all of them have declared, once they have


class Wanted(Control):
    """All that a supervisor wants of a host, as of now. The highest number holds."""

    by: str  # this run of the supervisor, and no other
    number: int
    folder: str = ""  # the name of the job's folder; "": there is none
    files: dict[str, bytes] = {}  # of that folder, until the host says that it has them
    processes: list[Hosted] = []
    script: Rehearsal | None = None
    heard: int = 0  # so many lines of what is printed there
    over: bool = False  # nothing more will be wanted


class Gone(Control):
    """How a process on a host has ended."""

    member: Member
    code: int
    last_words: str


class Unfit(Control):
    """Why a script cannot be run on a host. given: the settings are wrong, not the script."""

    why: str
    given: bool


class Hosting(Control):
    """All that a host has to say, as of now. It is sent again and again: a host's heartbeat."""

    name: str
    offers: dict[str, int]  # by role: so many processes it has room for
    domain: str = ""  # what it shares with others that may die with it
    run: int = 1  # how often it has begun anew
    by: str = ""  # the run of the supervisor that it follows, if any
    obeyed: int = 0
    folder: str = ""  # whose files it has
    ended: list[Gone] = []  # of those that are wanted
    declared: dict[int, bytes] = {}  # by rank: who is at a script's first batch, before the job
    unfit: Unfit | None = None
    works: dict[Member, int] = {}  # who nears its first batch, and when it was last seen to work
    printed: list[str] = []  # what scripts have printed, from the first line that was not heard on
    line: int = 0  # how many lines came before


# ---------------------------------------------------------------- the supervisor and who asks it


class AskStatus(Control):
    """How is the job? stop: and it is to end, as by Ctrl-C. drain: these hosts get no servers."""

    stop: bool = False
    drain: list[str] = []


class Running(Control):
    """A process of the job."""

    who: str  # "server:2", "spare", "coordinator"
    member: Member
    host: str  # "": the supervisor's machine
    state: str
    domain: str = ""  # what dies together with it, where that has a name of its own


class Status(Control):
    step: int
    steps: int
    saved: int  # the newest checkpoint, if there is any
    failures: int
    processes: list[Running]
    lost: list[str] = []  # places and ranks that nobody has: "server:2"
    moving: str = ""  # what becomes of the number of servers


AnyControl: TypeAlias = (
    Tell
    | Heard
    | Orders
    | Obeyed
    | ClaimEpoch
    | EpochClaimed
    | SaveState
    | StateSaved
    | Wanted
    | Hosting
    | AskStatus
    | Status
)
