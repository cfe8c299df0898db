"""Whom a sealed sum waits for, and what for: what people are told, followed from what the machine took in."""

from privacy.secure_aggregation.rostersum.coordinator import Coordinator, Stage
from privacy.secure_aggregation.rostersum.coordinator_events import Begin, Event, Received, Stored
from privacy.secure_aggregation.rostersum.coordinator_state import Way
from privacy.secure_aggregation.rostersum.messages import Code, Decline, Keys, Open, Ready, Refuse, RoundStart, decode

__all__ = ["Awaited"]

_WAITS = {
    Stage.GATHERING: "to get ready",
    Stage.UPLOADING: "to upload",
    Stage.OPENING: "to open the sum",
    Stage.RESCUING: "to open the sum in the place of others",
}

_PASSING = frozenset((Code.E_SIG, Code.E_EPOCH, Code.E_STATE, Code.E_KEYSET, Code.E_KEYS, Code.E_KEYAGE))
"""Refusals after which the protocol goes on with the site: what it refused is said again, or with new keys."""


class Awaited:
    """The sites that one job's sum waits for.

    Args:
        n: Sites of the job.

    Attributes:
        behind: Sites waited for, by index.
        waits: What for, in words; empty when nobody is waited for.
        declined: Why sites will not be in the sum, in words, as far as they said.
    """

    def __init__(self, n: int) -> None:
        self.behind: frozenset[int] = frozenset()
        self.waits = ""
        self.declined: dict[int, str] = {}
        self._all = frozenset(range(n))
        self._ready: set[int] = set()
        self._stored: set[int] = set()
        self._open: set[int] = set()
        self._members: frozenset[int] = frozenset()
        self._stage = Stage.IDLE
        self._epoch = (0, 0)
        self._start = b""
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
            case Received(idx, Refuse() as refuse) if self._keeps_out(refuse):
                self.declined[idx] = f"refused this step ({refuse.code.name}); its own log says why"
            case Received(idx, Open()):
                self._open.add(idx)
            case Stored(idx):
                self._stored.add(idx)
            case _:
                pass  # whom the sum waits for does not change

    def _keeps_out(self, refuse: Refuse) -> bool:
        """Whether the site will be in no attempt of this round; what it refuses later concerns one opening only."""
        if self._stage not in (Stage.GATHERING, Stage.UPLOADING) or refuse.code in _PASSING:
            return False
        _, r = self._epoch
        return refuse.code is not Code.E_REPLAY or refuse.last_r > r or refuse.opened_r >= r

    def follow(self, machine: Coordinator) -> bool:
        """Looks where the machine stands now; whether whom it waits for, or why, has changed."""
        standing = machine.standing
        self._stage = stage = machine.stages[0] if machine.stages else Stage.IDLE
        if self._epoch != (standing.epoch, standing.r):
            self._epoch = (standing.epoch, standing.r)
            self._ready.clear()
        way = standing.ways[0] if standing.ways else Way()
        if way.start != self._start:
            self._attempt(way)
        self.waits = _WAITS.get(stage, "")
        self.behind = self._behind(stage) - frozenset(standing.revoked)
        told = (self.behind, self.waits, dict(self.declined))
        changed, self._told = told != self._told, told
        return changed

    def _attempt(self, way: Way) -> None:
        self._start = way.start
        self._stored.clear()
        start = decode(way.start) if way.start else None
        self._members = frozenset(start.members) if isinstance(start, RoundStart) else frozenset()
        self._open = {opened.idx for opened in map(decode, way.opens) if isinstance(opened, Open)}

    def _behind(self, stage: Stage) -> frozenset[int]:
        match stage:
            case Stage.GATHERING:
                return self._all - self._ready - self.declined.keys()
            case Stage.UPLOADING:
                return self._members - self._stored
            case Stage.OPENING | Stage.RESCUING:
                return self._members - self._open
            case _:
                return frozenset()
