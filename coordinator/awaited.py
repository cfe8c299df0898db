"""Whom a step's sealed sums wait for, and what for: what people are told, followed from what the machine took in."""

from dataclasses import dataclass

from privacy.secure_aggregation.rostersum.cohorts import lanes
from privacy.secure_aggregation.rostersum.coordinator import Coordinator, Stage
from privacy.secure_aggregation.rostersum.coordinator_events import Begin, Event, Received, Stored
from privacy.secure_aggregation.rostersum.coordinator_state import Standing, Way
from privacy.secure_aggregation.rostersum.messages import Code, Decline, Keys, Open, Ready, Refuse, RoundStart, decode
from privacy.secure_aggregation.rostersum.terms import Terms

__all__ = ["Awaited"]

_WAITS = {
    Stage.GATHERING: "to get ready",
    Stage.UPLOADING: "to upload",
    Stage.OPENING: "to open the sum",
    Stage.RESCUING: "to open the sum in the place of others",
}

_PASSING = frozenset((Code.E_SIG, Code.E_EPOCH, Code.E_STATE, Code.E_KEYSET, Code.E_KEYS, Code.E_KEYAGE))
"""Refusals after which the protocol goes on with the site: what it refused is said again, or with new keys."""


@dataclass(frozen=True, slots=True)
class _Sum:
    """One sum of the step, among these sites: where it stands, and its last attempt."""

    sites: frozenset[int]
    stage: Stage = Stage.IDLE
    start: bytes = b""
    members: frozenset[int] = frozenset()


class Awaited:
    """The sites that one job's sums wait for: one sum of a step, or with groups one of each group.

    Args:
        terms: The job.

    Attributes:
        behind: Sites waited for, by index.
        waits: What for, in words; empty when nobody is waited for.
        declined: Why sites will not be in a sum, in words, as far as they said.
    """

    def __init__(self, terms: Terms) -> None:
        self.behind: frozenset[int] = frozenset()
        self.waits = ""
        self.declined: dict[int, str] = {}
        self._terms = terms
        self._ready: set[int] = set()
        self._stored: set[int] = set()
        self._open: set[int] = set()
        self._sums: tuple[_Sum, ...] = ()
        self._epoch = (0, 0)
        self._told: object = None

    def note(self, event: Event) -> None:
        """Takes in an event that the machine has taken in."""
        match event:
            case Begin():
                self._ready.clear()
                self.declined.clear()
            case Received(idx, Ready()):
                self._ready.add(idx)
                self.declined.pop(idx, None)
            case Received(idx, Keys()):
                self._ready.discard(idx)  # of a new process, which has forgotten its work
            case Received(idx, Decline()):
                self.declined[idx] = "declined this step; its own log says why"
            case Received(idx, Refuse() as refuse) if self._keeps_out(idx, refuse):
                self.declined[idx] = f"refused this step ({refuse.code.name}); its own log says why"
            case Received(idx, Open()):
                self._open.add(idx)
            case Stored(idx):
                self._stored.add(idx)
            case _:
                pass  # whom the sums wait for does not change

    def _keeps_out(self, idx: int, refuse: Refuse) -> bool:
        """Whether the site will be in no attempt of this round; what it refuses later concerns one opening only."""
        before = any(idx in each.sites and each.stage in (Stage.GATHERING, Stage.UPLOADING) for each in self._sums)
        if not before or refuse.code in _PASSING:
            return False
        _, r = self._epoch
        return refuse.code is not Code.E_REPLAY or refuse.last_r > r or refuse.opened_r >= r

    def follow(self, machine: Coordinator) -> bool:
        """Looks where the machine stands now; whether whom it waits for, or why, has changed."""
        standing = machine.standing
        if self._epoch != (standing.epoch, standing.r):
            self._epoch = (standing.epoch, standing.r)
            self._ready.clear()
        before = {each.sites: each for each in self._sums}
        self._sums = tuple(
            self._followed(before.get(sites, _Sum(sites)), stage, way)
            for sites, stage, way in zip(self._lanes(standing), machine.stages, standing.ways, strict=True)
        )
        stages = {each.stage for each in self._sums}
        self.waits = " or ".join(words for stage, words in _WAITS.items() if stage in stages)
        self.behind = frozenset(idx for each in self._sums for idx in self._behind(each)) - frozenset(standing.revoked)
        told = (self.behind, self.waits, dict(self.declined))
        changed, self._told = told != self._told, told
        return changed

    def _lanes(self, standing: Standing) -> tuple[frozenset[int], ...]:
        plan = None if standing.step is None else self._terms.plan(standing.step.plan_id)
        return () if plan is None else tuple(frozenset(sites) for sites in lanes(self._terms, plan))

    def _followed(self, known: _Sum, stage: Stage, way: Way) -> _Sum:
        if way.start == known.start:
            return _Sum(known.sites, stage, known.start, known.members)
        self._stored -= known.sites
        start = decode(way.start) if way.start else None
        members = frozenset(start.members) if isinstance(start, RoundStart) else frozenset[int]()
        self._open -= known.sites
        self._open |= {opened.idx for opened in map(decode, way.opens) if isinstance(opened, Open)}
        return _Sum(known.sites, stage, way.start, members)

    def _behind(self, one: _Sum) -> frozenset[int]:
        match one.stage:
            case Stage.GATHERING:
                return one.sites - self._ready - self.declined.keys()
            case Stage.UPLOADING:
                return one.members - self._stored
            case Stage.OPENING | Stage.RESCUING:
                return one.members - self._open
            case _:
                return frozenset()
