"""What all the jobs of one site share: its identity, its limits, its ledger, and the one durable state."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from privacy.crypto import agreement
from privacy.secure_aggregation.rostersum.attempt import Draw
from privacy.secure_aggregation.rostersum.durable import Charge, Durable, Family, Job, Point
from privacy.secure_aggregation.rostersum.floor import Floor, Ledger
from privacy.secure_aggregation.rostersum.site_events import Persist

__all__ = ["Premises"]


@dataclass(slots=True)
class Premises:
    """What the seats of one site share: its identity, its limits, its ledger, and what it knows durably.

    Attributes:
        private: The identity key; it serves this protocol only.
        floor: The site's own limits.
        ledger: Its ledger; without one it accepts no plan with churn "dp".
        durable: The durable state, as the last Persist has it.
        draw: The operating system's generator.
        generate: Makes fresh key-agreement keys; the argument is the job's pq.
    """

    private: Ed25519PrivateKey = field(repr=False)
    floor: Floor
    ledger: Ledger | None
    durable: Durable
    draw: Draw = field(repr=False)
    generate: Callable[[bool], agreement.Keys] = field(repr=False)

    def persist(
        self, point: Point, *, job: Job | None = None, family: Family | None = None, charge: Charge | None = None
    ) -> Persist:
        """Makes what changed durable."""
        if job is not None:
            self.durable = self.durable.with_job(job)
        if family is not None:
            self.durable = self.durable.with_family(family)
        return Persist(point, self.durable, charge)
