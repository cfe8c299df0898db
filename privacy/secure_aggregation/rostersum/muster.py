"""Who of a sum's sites is ready for its next attempt, who is waited for, and over which set it can begin."""

from privacy.secure_aggregation.rostersum.cohorts import largest, without
from privacy.secure_aggregation.rostersum.coordinator_job import Job
from privacy.secure_aggregation.rostersum.terms import Plan

__all__ = ["Muster"]


class Muster:
    """The sites of one sum in one round.

    Attributes:
        ready: Those whose READY holds: made with their newest keys.
        out: Those that will not contribute to this round.
        late: Those that kept an attempt from its end; sets without them are preferred from then on.
    """

    def __init__(self, job: Job, plan: Plan, sites: tuple[int, ...]) -> None:
        self.ready: set[int] = set()
        self.out: set[int] = set()
        self.late: set[int] = set()
        self._job = job
        self._plan = plan
        self._sites = sites

    @property
    def able(self) -> frozenset[int]:
        """The sites that may yet take part."""
        return frozenset(self._sites) - self.out - self._job.excluded

    @property
    def hopeless(self) -> bool:
        """Whether no set is allowed even when all able sites are ready."""
        return not self._largest(self.able)

    @property
    def _here(self) -> frozenset[int]:
        return self.able & self.ready & self._job.present

    def missing(self) -> tuple[int, ...]:
        """The sites that are waited for: not ready, not here, or without a root with another that is."""
        here = self._here
        unsettled = {idx for pair in self._job.keys.unsettled(here) for idx in pair}
        return tuple(sorted((self.able - here) | unsettled))

    def members(self, *, due: bool) -> tuple[int, ...]:
        """P: the largest allowed set of ready sites; empty while it is better to wait, or when there is none.

        Before it is `due`, all that are not late are waited for.
        """
        if not due and set(self.missing()) - self.late:
            return ()
        usable = without(self._here, self._job.keys.unsettled(self._here))
        return self._largest(usable - self.late) or self._largest(usable)

    def _largest(self, sites: frozenset[int]) -> tuple[int, ...]:
        return largest(self._job.terms, self._plan, self._sites, sites)
