"""What the coordinator remembers, as values: the run machine makes them, the store keeps them."""

from dataclasses import dataclass, field
from enum import Enum

from federation.blobs import BlobRef
from federation.findings import Finding
from federation.messages import JobState, MembershipStatement, Metric, RoundView, StepKind

__all__ = ["JobRecord", "JobSite", "ModelRecord", "Outcome", "Secured", "Share", "SitePresence", "StepRecord"]


class Outcome(Enum):
    """What became of one site's part in a step."""

    COUNTED = "counted"
    DECLINED = "declined"
    REFUSED = "refused"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Share:
    """One site's part in a step: what became of it, why, and what it cost. Bytes are of payloads, both ways."""

    site: str
    outcome: Outcome
    cause: str = ""
    seconds: float = 0.0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """All that one step changed; stored in one transaction, so a step is there whole or not at all.

    `model`, `strategy_state` and `preparation` are the *new* ones, None where the step made none. `round` is the round
    that the step belongs to (0 for statistics and the evaluation of the initial model). Times are unix seconds.
    """

    job: str
    step: int
    attempt: int
    kind: StepKind
    round: int
    started: float
    ended: float
    shares: tuple[Share, ...]
    model: BlobRef | None = None
    strategy_state: BlobRef | None = None
    preparation: BlobRef | None = None
    metrics: tuple[Metric, ...] = ()
    best_round: int = 0
    state: JobState = JobState.RUNNING
    reason: str = ""
    final: "ModelRecord | None" = None

    def shown(self, so_far: RoundView | None) -> RoundView:
        """The step's round as people see it, with what its other step has added `so_far`."""
        view = so_far or RoundView(self.round, (), 0, 0.0, 0)
        counted = sum(share.outcome is Outcome.COUNTED for share in self.shares)
        return RoundView(
            number=self.round,
            metrics=self.metrics or view.metrics,
            sites=counted if self.kind is StepKind.TRAIN else view.sites,
            seconds=view.seconds + max(0.0, self.ended - self.started),
            bytes=view.bytes + sum(share.bytes for share in self.shares),
        )


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A job's final model, with its card (JSON text)."""

    job: str
    name: str
    payload: BlobRef
    round: int
    created: float
    metrics: tuple[Metric, ...]
    card: str


@dataclass(frozen=True, slots=True)
class JobSite:
    """What a roster's site answered to the job's offer: nothing yet, accepted, or refused with findings."""

    site: str
    answer: str = ""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as it stands after its last committed step; a restarted coordinator goes on from here.

    `next_step` is the number of the first step not yet committed; `round` the last committed training round;
    `metrics` holds each evaluated round's metrics by round number.
    """

    id: str
    name: str
    text: str
    submitted: float
    roster: tuple[MembershipStatement, ...]
    initial_model: BlobRef
    state: JobState = JobState.WAITING
    reason: str = ""
    started: float = 0.0
    ended: float = 0.0
    next_step: int = 1
    round: int = 0
    evaluated_round: int = -1
    best_round: int = 0
    model: BlobRef | None = None
    best_model: BlobRef | None = None
    strategy_state: BlobRef | None = None
    preparation: BlobRef | None = None
    sites: tuple[JobSite, ...] = ()
    metrics: tuple[tuple[int, tuple[Metric, ...]], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Secured:
    """What a job under secure aggregation must not forget, in the protocol's own bytes.

    Attributes:
        terms: What its members agreed on; never changes.
        standing: How far its machine had come when it last said so; empty before it said anything.
    """

    terms: bytes = field(repr=False)
    standing: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class SitePresence:
    """Whether a site is attending, when it was last heard, and what it is doing, in words."""

    name: str
    connected: bool
    last_seen: float
    state: str
    trouble: str = ""
