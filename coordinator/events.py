"""What happens to a job's run, and what the run wants done: the events and effects of `coordinator/run.py`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from coordinator.records import JobSite, StepRecord
from coordinator.round import Contributed
from federation.blobs import BlobRef
from federation.messages import (
    Contribution,
    Declined,
    FromCoordinator,
    JobAccepted,
    JobRefused,
    JobState,
    Metric,
    Progress,
    StepKind,
    StepStart,
)

__all__ = [
    "Answer",
    "BeginSum",
    "Broken",
    "CloseSums",
    "Commit",
    "Committed",
    "Complete",
    "Completed",
    "Completion",
    "Effect",
    "Event",
    "Lengths",
    "Measured",
    "NoSum",
    "NotCommitted",
    "Prepared",
    "Rejected",
    "SaveSite",
    "SaveState",
    "Sealing",
    "Send",
    "SetDeadline",
    "SiteArrived",
    "SiteLeft",
    "SitePaused",
    "Stepped",
    "StopAsked",
    "SumFailed",
    "SumOpened",
    "SumStands",
    "TimeUp",
]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Bytes of a contribution to each kind of step; 0 statistics means that the job has no such step."""

    statistics: int
    train: int
    evaluate: int

    def of(self, kind: StepKind) -> int:
        """The bytes for `kind`."""
        match kind:
            case StepKind.STATISTICS:
                return self.statistics
            case StepKind.TRAIN:
                return self.train
            case StepKind.EVALUATE:
                return self.evaluate
            case _:
                assert_never(kind)


@dataclass(frozen=True, slots=True)
class Sealing:
    """That a job's sums are made under secure aggregation.

    Attributes:
        terms: What its members agree on, in the protocol's own encoding.
        least: For each kind of step that is summed, the sites without which no sum of it is allowed.
        cells: For each kind whose sums hold whole cells only, the cells; for others none.
    """

    terms: bytes = field(repr=False)
    least: Mapping[StepKind, int]
    cells: Mapping[StepKind, tuple[frozenset[str], ...]] = field(default_factory=dict)

    def summable(self, kind: StepKind, sites: Collection[str]) -> frozenset[str]:
        """Those of the sites that can be in a sum of this kind when no others are there."""
        cells = self.cells.get(kind)
        if cells is None:
            return frozenset(sites)
        return frozenset(site for cell in cells if cell.issubset(sites) for site in cell)


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class SiteArrived:
    """A site of the roster attends (again)."""

    site: str


@dataclass(frozen=True, slots=True)
class SiteLeft:
    """A site's stream ended; `for_good` when its membership was revoked: nobody waits for it any more."""

    site: str
    for_good: bool = False


@dataclass(frozen=True, slots=True)
class SitePaused:
    """A site's administrator has paused it, or (`paused` false) let it go on."""

    site: str
    paused: bool


Answer = JobAccepted | JobRefused | Progress | Contribution | Declined
"""What a site says about a job."""


@dataclass(frozen=True, slots=True)
class TimeUp:
    """The deadline of this attempt has passed."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """The statistics are summed and made into a preparation."""

    preparation: BlobRef


@dataclass(frozen=True, slots=True)
class Stepped:
    """The updates are summed and made into the next model."""

    model: BlobRef
    strategy_state: BlobRef


@dataclass(frozen=True, slots=True)
class Measured:
    """The evaluations are summed and made into metrics."""

    metrics: tuple[Metric, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """These sites' payloads cannot be summed; nothing was done with any."""

    problems: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """The step cannot be completed whoever contributes: the job's own settings do not work."""

    problem: str


Completion = Prepared | Stepped | Measured | Rejected | Broken


@dataclass(frozen=True, slots=True)
class Completed:
    """The arithmetic of this attempt is done and its blobs are durable."""

    step: int
    attempt: int
    completion: Completion


@dataclass(frozen=True, slots=True)
class Committed:
    """The step is in the store, durably."""

    step: int


@dataclass(frozen=True, slots=True)
class NotCommitted:
    """The store refused the step for good: a bug of ours."""

    step: int
    problem: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """An operator wants the job to end."""

    by: str


@dataclass(frozen=True, slots=True)
class SumStands:
    """How far a sealed sum has come.

    Attributes:
        behind: Sites that it waits for.
        waits: What for, in words that follow "waiting for SITES".
        declined: Sites that will not be in it, each with why, as far as it said.
    """

    step: int
    attempt: int
    behind: frozenset[str]
    waits: str
    declined: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class SumOpened:
    """A step's sealed sums are open, and held their checks: one, or with groups one of each that did not fail.

    Attributes:
        members: The sites that are in them, and no others.
        missing: Sites whose group has no sum, each with why.
    """

    step: int
    attempt: int
    members: frozenset[str]
    missing: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class SumFailed:
    """A step has no sealed sum that counts; `broken` when one was whole and did not hold its checks."""

    step: int
    attempt: int
    problem: str
    broken: bool


@dataclass(frozen=True, slots=True)
class NoSum:
    """No sealed sum of this job can be made any more, whoever comes."""

    problem: str


Event = (
    SiteArrived
    | SiteLeft
    | SitePaused
    | TimeUp
    | Completed
    | Committed
    | NotCommitted
    | StopAsked
    | SumStands
    | SumOpened
    | SumFailed
    | NoSum
)

# ------------------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class Send:
    """Tells a site something; lost if it is not here, and said again when it comes back."""

    site: str
    message: FromCoordinator


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Calls back with `TimeUp(step, attempt)` in so many seconds."""

    step: int
    attempt: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Complete:
    """Sums what came and makes of it what the kind says; answers with `Completed`."""

    step: int
    attempt: int
    kind: StepKind
    contributions: tuple[Contributed, ...]
    model: BlobRef
    strategy_state: BlobRef | None


@dataclass(frozen=True, slots=True)
class Commit:
    """Stores the step in one transaction; answers with `Committed`."""

    record: StepRecord


@dataclass(frozen=True, slots=True)
class SaveSite:
    """Stores what a site answered to the offer."""

    site: JobSite


@dataclass(frozen=True, slots=True)
class SaveState:
    """Stores that the job began, ended or failed outside a step."""

    state: JobState
    reason: str


@dataclass(frozen=True, slots=True)
class BeginSum:
    """Has a step summed under secure aggregation among the job's sites that come to it.

    Answers with `SumOpened` or `SumFailed`, and with `SumStands` on the way.
    """

    start: StepStart


@dataclass(frozen=True, slots=True)
class CloseSums:
    """Ends the job's secure aggregation, durably and at every site that is here; then says the farewell."""

    farewell: tuple[Send, ...]


Effect = Send | SetDeadline | Complete | Commit | SaveSite | SaveState | BeginSum | CloseSums
