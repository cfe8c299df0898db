"""What happens to a job's run, and what the run wants done: the events and effects of `coordinator/run.py`."""

from dataclasses import dataclass
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
)

__all__ = [
    "Answer",
    "Broken",
    "Commit",
    "Committed",
    "Complete",
    "Completed",
    "Completion",
    "Effect",
    "Event",
    "Lengths",
    "Measured",
    "NotCommitted",
    "Prepared",
    "Rejected",
    "SaveSite",
    "SaveState",
    "Send",
    "SetDeadline",
    "SiteArrived",
    "SiteLeft",
    "SitePaused",
    "Stepped",
    "StopAsked",
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


Event = SiteArrived | SiteLeft | SitePaused | TimeUp | Completed | Committed | NotCommitted | StopAsked

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


Effect = Send | SetDeadline | Complete | Commit | SaveSite | SaveState
