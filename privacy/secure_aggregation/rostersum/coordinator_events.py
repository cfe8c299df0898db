"""What happens to the coordinator of a job, and what it wants done: events and effects of `coordinator.py`."""

from dataclasses import dataclass, field
from enum import Enum

from federation.blobs import BlobRef
from federation.errors import RemoteProtocolError, WhoActs
from privacy.secure_aggregation.rostersum.coordinator_state import Standing
from privacy.secure_aggregation.rostersum.evidence import Suspicion, contradiction
from privacy.secure_aggregation.rostersum.messages import FromCoordinator, FromSite, Message, Relayed

__all__ = [
    "Arrived",
    "Begin",
    "Broken",
    "Close",
    "Committed",
    "ContradictionError",
    "Departed",
    "Effect",
    "Event",
    "Expect",
    "Failed",
    "Opened",
    "OpenedSum",
    "Persist",
    "Reason",
    "Received",
    "Revoked",
    "Send",
    "SetDeadline",
    "Started",
    "Stored",
    "Sum",
    "Summed",
    "Suspect",
    "Term",
    "TimeUp",
]


class ContradictionError(RemoteProtocolError):
    """A site signed two messages that no honest one signs both of; the second was refused and changed nothing.

    A restored disk or a second copy of an honest site looks the same.

    Attributes:
        evidence: Both messages, for the log (section 8.7).
    """

    def __init__(self, idx: int, kind: Suspicion, first: Message, second: Message) -> None:
        super().__init__(
            f"site {idx} signed a {second.TAG.upper()} that its earlier {first.TAG.upper()} contradicts",
            fix=f"ask site {idx} whether it runs twice, or was restored from a copy; both messages are evidence",
            who=WhoActs.SITE,
        )
        self.evidence = contradiction(kind, idx, first, second)


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Started:
    """The coordinator runs, for the first time or again: always its first event."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A step is to be summed: sites are to do the work of this plan on this model with these arguments.

    Attributes:
        plan_id: One of the job's plans.
        model_hash: SHA-256 of the model.
        args_hash: SHA-256 of the arguments.
    """

    plan_id: int
    model_hash: bytes
    args_hash: bytes


@dataclass(frozen=True, slots=True)
class Arrived:
    """A site attends (again)."""

    idx: int


@dataclass(frozen=True, slots=True)
class Departed:
    """A site's stream ended."""

    idx: int


@dataclass(frozen=True, slots=True)
class Revoked:
    """A site's membership was revoked: it is in no set any more."""

    idx: int


@dataclass(frozen=True, slots=True)
class Received:
    """A site said something; `idx` is who the channel says it is."""

    idx: int
    message: FromSite | Relayed


@dataclass(frozen=True, slots=True)
class Stored:
    """The payload a site announced is here, whole and durable: of this digest and length."""

    idx: int
    payload: BlobRef


@dataclass(frozen=True, slots=True)
class Summed:
    """A sum is made and its checks held: the guard, the weight and the norm of section 6."""

    ctx: bytes
    sum_hash: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """A sum did not hold one of its checks: it is burned, and the model does not move."""

    ctx: bytes
    problem: str


@dataclass(frozen=True, slots=True)
class Committed:
    """What `Opened` asked for is in the store, in one transaction."""

    r: int


@dataclass(frozen=True, slots=True)
class TimeUp:
    """The time of the last `SetDeadline` has come."""


@dataclass(frozen=True, slots=True)
class Close:
    """The job has ended; a step under way is given up."""


Event = (
    Started | Begin | Arrived | Departed | Revoked | Received | Stored | Summed | Broken | Committed | TimeUp | Close
)


# ------------------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class Persist:
    """Makes the state durable, before anything that follows it is performed."""

    state: Standing


@dataclass(frozen=True, slots=True)
class Send:
    """Tells a site something; lost if it is not here, and said again when it comes back."""

    idx: int
    message: FromCoordinator | Relayed


@dataclass(frozen=True, slots=True)
class Expect:
    """Takes this payload from the site, in chunks and resumably; answers `Stored`, at once if it is here already."""

    idx: int
    payload: BlobRef


@dataclass(frozen=True, slots=True)
class Term:
    """One member's part of a sum: its payload, and the key of the self mask to subtract (32 bytes)."""

    idx: int
    payload: BlobRef
    self_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Sum:
    """Adds the uploads, subtracts self masks, checks and decodes (`sums.MaskedSum`); answers `Summed` or `Broken`."""

    ctx: bytes
    plan_id: int
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Calls back with `TimeUp` at this time, and no more at the one before; never, if it is None."""

    at: float | None


@dataclass(frozen=True, slots=True)
class OpenedSum:
    """A sum that holds: over exactly `members`; its words hash to `sum_hash`."""

    members: tuple[int, ...]
    ctx: bytes
    sum_hash: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """The step is summed: one sum, or in group mode one for each cell that did not fail.

    The caller makes the model of it and stores model, round and `state` in one transaction, then says `Committed`.
    """

    r: int
    sums: tuple[OpenedSum, ...]
    state: Standing


class Reason(Enum):
    """Why a step has no sum."""

    COHORT = "too few sites are ready"
    ATTEMPTS = "all attempts are spent"
    OPENING = "a member's self mask stayed shut"
    CHECKS = "the sum did not hold its checks"
    CLOSED = "the job has ended"


@dataclass(frozen=True, slots=True)
class Failed:
    """The step, or in group mode one cell's part of it, has no sum; the model does not move.

    Attributes:
        r: The step's number; the next `Begin` takes another.
        reason: Why.
        who: Sites that were missing, refused, or kept shut; empty where nobody can be named.
        detail: Facts for people.
        sites: Those among which the sum was to be: all, or in group mode one cell.
    """

    r: int
    reason: Reason
    who: tuple[int, ...]
    detail: str
    sites: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Suspect:
    """Shares of `dealer`'s seed that are wrong: each convicts its holder or the dealer, not which."""

    dealer: int
    holders: frozenset[int]


Effect = Persist | Send | Expect | Sum | SetDeadline | Opened | Failed | Suspect
