"""What all sums of a coordinator's job have in common, and all that it signs but FULL."""

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from privacy.secure_aggregation.rostersum.coordinator_state import Step
from privacy.secure_aggregation.rostersum.keybook import KeyBook
from privacy.secure_aggregation.rostersum.messages import (
    Close,
    Epoch,
    Outcome,
    Rescue,
    Result,
    RoundStart,
    Train,
    sign,
)
from privacy.secure_aggregation.rostersum.terms import Terms

__all__ = ["Job", "Patience"]


@dataclass(frozen=True, slots=True)
class Patience:
    """How many seconds are waited for what, and how often a round is done anew.

    Attributes:
        ready: For the sites' work, and again where too few had done it by then.
        again: For sites that restart between two attempts.
        upload: For the vectors.
        opening: For OPENs, and again after FULL was said once more; so for SHARES.
        rounds: Rounds that a step may take when all attempts of one are spent.
    """

    ready: float = 3000.0
    again: float = 300.0
    upload: float = 800.0
    opening: float = 120.0
    rounds: int = 2


@dataclass(slots=True)
class Job:
    """What the sums of a job have in common, and what is signed for them.

    Attributes:
        terms: The job.
        private: The coordinator's protocol key.
        patience: How long to wait.
        keys: The sites' keys.
        present: Sites that attend.
        excluded: Sites that are in no further set.
        stale: Whether a new epoch must begin before the next attempt.
    """

    terms: Terms
    private: Ed25519PrivateKey = field(repr=False)
    patience: Patience
    keys: KeyBook
    present: set[int] = field(default_factory=set)
    excluded: frozenset[int] = frozenset()
    stale: bool = False

    def epoch(self) -> Epoch:
        """The EPOCH of the present keys."""
        return sign(Epoch(self.terms.job_hash, self.keys.epoch), self.private)

    def train(self, r: int, step: Step) -> Train:
        """The TRAIN of a step, in the present epoch."""
        hashes = step.model_hash, step.args_hash
        return sign(Train(self.terms.job_hash, self.keys.epoch, r, step.plan_id, *hashes), self.private)

    def start(self, r: int, a: int, step: Step, members: tuple[int, ...]) -> RoundStart:
        """The ROUND_START of an attempt over `members`, with their newest keys; it is signed once for each (r, a)."""
        work = step.plan_id, members, self.keys.keyset(members), step.model_hash, step.args_hash
        return sign(RoundStart(self.terms.job_hash, self.keys.epoch, r, a, *work), self.private)

    def rescue(self, ctx: bytes, missing: tuple[int, ...]) -> Rescue:
        """The RESCUE that asks for shares of these members' seeds."""
        return sign(Rescue(ctx, missing), self.private)

    def result(self, ctx: bytes, outcome: Outcome, sum_hash: bytes) -> Result:
        """The RESULT of an attempt."""
        return sign(Result(ctx, outcome, sum_hash), self.private)

    def close(self) -> Close:
        """The CLOSE of the job."""
        return sign(Close(self.terms.job_hash), self.private)
