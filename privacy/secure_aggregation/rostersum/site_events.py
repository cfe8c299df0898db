"""What happens to a site under RosterSum, and what it wants done: events and effects of `site.py`."""

from dataclasses import dataclass, field
from enum import Enum

from privacy.crypto.masks import SignedKey
from privacy.secure_aggregation.rostersum.durable import Charge, Durable, Point
from privacy.secure_aggregation.rostersum.evidence import Evidence
from privacy.secure_aggregation.rostersum.floor import Data, Floor
from privacy.secure_aggregation.rostersum.messages import Message
from privacy.secure_aggregation.rostersum.rules import Broken
from privacy.secure_aggregation.rostersum.terms import Plan, Terms

__all__ = [
    "Abandon",
    "Accepted",
    "Assignment",
    "Because",
    "Cannot",
    "Clock",
    "Closed",
    "Connected",
    "Drift",
    "Drifted",
    "Effect",
    "Erase",
    "Event",
    "FloorChanged",
    "JobEvent",
    "JobRefused",
    "Log",
    "Mask",
    "Masked",
    "Offered",
    "Persist",
    "ReCell",
    "ReTable",
    "Received",
    "Resumed",
    "Send",
    "Suspend",
    "TimePassed",
    "Unreadable",
    "Updated",
    "UploadDone",
    "UploadPayload",
    "Work",
]


@dataclass(frozen=True, slots=True)
class Clock:
    """The time of an event.

    Attributes:
        wall: Unix seconds, by the wall clock.
        steady: Seconds of a clock that is never set.
    """

    wall: float
    steady: float


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a TRAIN asks for; an update made for one serves no other, opened or not."""

    r: int
    plan_id: int
    model_hash: bytes
    args_hash: bytes


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Offered:
    """A job is offered, or offered again after a reconnect; `data` is what the administrator lets it read."""

    terms: Terms
    data: Data


@dataclass(frozen=True, slots=True)
class Received:
    """A message came, in the line that belongs to this job."""

    job_hash: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Bytes came, in the line that belongs to this job, that `messages.decode` refused."""

    job_hash: bytes


@dataclass(frozen=True, slots=True)
class Connected:
    """The coordinator is reached again: what it may have lost is said again, in the same bytes."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened but time."""


@dataclass(frozen=True, slots=True)
class Updated:
    """The work is done, its result is finite and weighs at least w_min.

    Attributes:
        update: Names the result until `Erase`.
        table: Digest of the table version that was read.
    """

    job_hash: bytes
    assignment: Assignment
    update: str
    table: bytes


class Because(Enum):
    """Why an assignment cannot be done; nobody but the site's own log is told."""

    DATA = "data"
    RESOURCES = "resources"


@dataclass(frozen=True, slots=True)
class Cannot:
    """The work, or the masking of its result, cannot be done."""

    job_hash: bytes
    assignment: Assignment
    because: Because


@dataclass(frozen=True, slots=True)
class Drifted:
    """The model of this assignment lies further from an earlier one than `Work.drift` allows."""

    job_hash: bytes
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Masked:
    """`Mask` was performed: the masked vector lies ready, and `y_hash` is its SHA-256."""

    job_hash: bytes
    ctx: bytes
    y_hash: bytes


@dataclass(frozen=True, slots=True)
class UploadDone:
    """The last byte of a masked vector was sent."""

    job_hash: bytes
    ctx: bytes


@dataclass(frozen=True, slots=True)
class FloorChanged:
    """The site's policy file states these limits now."""

    floor: Floor


@dataclass(frozen=True, slots=True)
class Resumed:
    """The administrator has looked into a suspended job and lets it go on."""

    job_hash: bytes


@dataclass(frozen=True, slots=True)
class ReCell:
    """The administrator lets a data family be summed over another cell: `cell` is its digest (8.4).

    Sums of the old cell can be subtracted from those of the new one; who left, or came alone, is exposed.
    """

    family: str
    cell: bytes


@dataclass(frozen=True, slots=True)
class ReTable:
    """The administrator accepts a new version of a family's table between jobs; so many rows are other (S5)."""

    family: str
    table: bytes
    rows_changed: int


JobEvent = Received | Unreadable | Updated | Cannot | Drifted | Masked | UploadDone | Resumed
"""What happens to one job."""

Event = JobEvent | Offered | Connected | TimePassed | FloorChanged | ReCell | ReTable


# ------------------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class Send:
    """Says something to the coordinator, in the line that belongs to this job."""

    job_hash: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class Persist:
    """Makes the state durable, with the ledger's charge where there is one, in one transaction with fsync.

    What follows it among the effects is done only once it is durable. If it fails the process must end: the machine is
    ahead of the disk.
    """

    point: Point
    durable: Durable
    charge: Charge | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The job is accepted, or was and goes on."""

    job_hash: bytes


@dataclass(frozen=True, slots=True)
class JobRefused:
    """The job is not accepted, for these reasons; the coordinator is told a code and no detail."""

    job_hash: bytes
    reasons: tuple[Broken, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """How far each weight may lie from those of an earlier model: `most` (section 4.2, optional)."""

    model_hash: bytes
    most: float


@dataclass(frozen=True, slots=True)
class Work:
    """Brings the payloads here and does the work; answers `Updated`, `Cannot` or `Drifted`.

    `table` is the one version of the family's table that may be read.
    """

    job_hash: bytes
    assignment: Assignment
    plan: Plan
    family: str
    table: bytes
    drift: Drift | None = None


@dataclass(frozen=True, slots=True)
class Mask:
    """Encodes the update afresh (rounding and noise fresh, noise for so many members) and adds the masks to it.

    Answers `Masked`. The keys serve this once: a second vector under them would give the difference of the two away.
    """

    job_hash: bytes
    ctx: bytes
    update: str
    plan: Plan
    members: int
    c_max: int
    self_key: bytes = field(repr=False)
    pair_keys: tuple[SignedKey, ...] = field(repr=False)

    @property
    def masks(self) -> tuple[SignedKey, ...]:
        """All masks with their signs, as `masks.add` takes them."""
        return ((1, self.self_key), *self.pair_keys)


@dataclass(frozen=True, slots=True)
class UploadPayload:
    """Brings the masked vector of `size` bytes to the coordinator; answers `UploadDone`."""

    job_hash: bytes
    ctx: bytes
    y_hash: bytes
    size: int


@dataclass(frozen=True, slots=True)
class Erase:
    """Erases an update."""

    job_hash: bytes
    update: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """Stops the masking and uploading of an attempt, and erases its masked vector."""

    job_hash: bytes
    ctx: bytes


@dataclass(frozen=True, slots=True)
class Suspend:
    """The job waits for this site's administrator, who is told why."""

    job_hash: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The job is over; nothing of it is in memory any more."""

    job_hash: bytes


@dataclass(frozen=True, slots=True)
class Log:
    """Appends to the site's hash-chained log."""

    job_hash: bytes
    evidence: Evidence


Effect = Send | Persist | Accepted | JobRefused | Work | Mask | UploadPayload | Erase | Abandon | Suspend | Closed | Log
