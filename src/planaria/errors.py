"""Every error that Planaria raises on purpose.

    PlanariaError
    ├── LayoutError        servers, k, r, rows or fault domains do not fit together
    ├── CodeError          an erasure code was asked for something it cannot do
    ├── ArgumentError      an array has the wrong shape, dtype or memory layout
    │   ├── RowError       a row or record number is out of range, or stands twice where it may not
    │   └── NotFiniteError  a NaN or an infinity, where only numbers can be sent
    ├── ConfigError        a key or value of the configuration, or a schedule, is wrong
    ├── OutsideJob         a collection was used where no job, or no step of one, is in progress
    ├── ExactnessError     a trainer would not compute the same bits as the others
    ├── DataError          the training data is not as it should be
    ├── CheckpointError    a checkpoint could not be written, found or read
    │   ├── DamagedCheckpoint  it is torn, was tampered with, or lacks a file
    │   ├── LeaseHeld      another job uses the folder
    │   └── LeaseLost      another job has taken the folder over
    ├── PlacementError     statistics or a plan cannot be read, or servers lack room for the tables
    ├── StateError         what a trainer keeps is no bytes, or bytes are not what it keeps
    ├── WireError          a message is not of this protocol or not of this job
    ├── ClusterError       processes could not be started, or the job cannot go on
    │   ├── LossError      more was lost than the parity can bear
    │   ├── Interrupted    somebody wanted the job to end
    │   └── JobOver        the job has ended, and somebody still waits for something of it
    ├── TierError          the file of a server's cold records fails; that server ends
    └── StoreError         a server's store cannot do what was asked of it
        ├── StepError      a step arrived out of order
        ├── HistoryGone    a read reaches further back than the history does
        └── InvalidRecord  a record was needed before it was rebuilt

Each message says what happened and what to do next, and nothing was changed when one is raised.
"""


class PlanariaError(Exception):
    """Root of the tree; catch it to catch everything that Planaria raises on purpose."""


class TierError(PlanariaError):
    """The file of a server's cold records is full, fails, or gives back other bytes than it got.

    The store is of no use any more: this is the one error after which something may have changed.
    """


class LayoutError(PlanariaError, ValueError):
    """Servers, k, r, rows or fault domains do not fit together."""


class CodeError(PlanariaError, ValueError):
    """An erasure code was asked for something that it cannot do."""


class ArgumentError(PlanariaError, ValueError):
    """An array or number has the wrong shape, dtype, memory layout or range."""


class RowError(ArgumentError):
    """A row or record number is out of range, or stands twice where it may stand once."""


class NotFiniteError(ArgumentError):
    """Rows with a NaN or an infinity cannot be sent within a bound; the message has the table."""


class ConfigError(PlanariaError, ValueError):
    """A key or value of the configuration, or a schedule of failures, is not as it should be."""


class OutsideJob(PlanariaError, RuntimeError):
    """A collection was used where no job, or no step of one, is in progress."""


class ExactnessError(PlanariaError):
    """A trainer would not compute the same bits as the others did, or as before the resume."""


class DataError(PlanariaError, ValueError):
    """The training data is not as it should be: a wrong line, or a file that changed or is gone."""


class CheckpointError(PlanariaError):
    """A checkpoint could not be written, found or read."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is torn, was tampered with, or lacks a file; the one before it may be whole."""


class LeaseHeld(CheckpointError):
    """Another job uses the folder of checkpoints, or may do so."""


class LeaseLost(CheckpointError):
    """Another job has taken the folder of checkpoints over; this one must change nothing in it."""


class StoreError(PlanariaError):
    """A server's store cannot do what was asked of it."""


class StepError(StoreError):
    """A step arrived out of order."""


class HistoryGone(StoreError):
    """A read reaches further back than the history does; `oldest` is the oldest step it has."""

    def __init__(self, message: str, oldest: int) -> None:
        super().__init__(message)
        self.oldest = oldest


class InvalidRecord(StoreError):
    """A record was needed before it was rebuilt; `indices` are the records to decode first."""

    def __init__(self, message: str, indices: list[int]) -> None:
        super().__init__(message)
        self.indices = indices


class PlacementError(PlanariaError):
    """Statistics or a plan cannot be read, or servers lack room for the tables."""


class StateError(PlanariaError, ValueError):
    """What a trainer keeps cannot be turned into bytes, or bytes do not fit what it keeps."""


class WireError(PlanariaError):
    """A message is not of this protocol, or not of this job."""


class ClusterError(PlanariaError):
    """Processes could not be started, or the job cannot go on."""


class LossError(ClusterError):
    """More was lost than the parity can bear; the message names the groups."""


class Interrupted(ClusterError):
    """Somebody wanted the job to end before it was done; the message says what is saved."""


class JobOver(ClusterError):
    """The job has ended; the message says why."""
