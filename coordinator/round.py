"""One attempt at one step: who was asked, who answered, and when what came is enough.

```
COLLECTING --- all of the cohort answered, enough counted ---> CLOSED
    |  |------ deadline, enough counted ---------------------> CLOSED
    |  |------ deadline or all answered, too few ------------> FAILED
    |          CLOSED --- sums refuse a payload, too few left -> FAILED
    `--- contribution, decline ------------------------------> COLLECTING
```
"""

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from coordinator.records import Outcome, Share
from federation.blobs import BlobRef
from federation.errors import LocalProtocolError, RemoteProtocolError
from federation.messages import DeclineCause

__all__ = ["Contributed", "DeadlinePassed", "PayloadRefused", "Round", "RoundEvent", "RoundState", "SiteDeclined"]


class RoundState(Enum):
    """Where an attempt stands."""

    COLLECTING = "collecting"
    CLOSED = "closed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Contributed:
    """A site's payload is stored here, whole."""

    site: str
    payload: BlobRef
    weight: float
    seconds: float


@dataclass(frozen=True, slots=True)
class SiteDeclined:
    """A site does not contribute to this step."""

    site: str
    cause: DeclineCause


@dataclass(frozen=True, slots=True)
class PayloadRefused:
    """Summing found a site's payload to be none: not finite, or not of its length."""

    site: str
    problem: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The time for this attempt is over."""


RoundEvent = Contributed | SiteDeclined | PayloadRefused | DeadlinePassed


class Round:
    """One attempt at one step. At most one contribution per site of the cohort is counted.

    Args:
        cohort: The sites asked.
        needed: Contributions without which the attempt fails.
        length: Bytes that each payload must have.
    """

    def __init__(self, cohort: frozenset[str], needed: int, length: int) -> None:
        self.cohort = cohort
        self.needed = needed
        self.length = length
        self.state = RoundState.COLLECTING
        self._counted: dict[str, Contributed] = {}
        self._out: dict[str, Share] = {}

    @property
    def counted(self) -> tuple[Contributed, ...]:
        """What is counted, by site name, so that a sum over it is the same on every run."""
        return tuple(self._counted[site] for site in sorted(self._counted))

    @property
    def outstanding(self) -> frozenset[str]:
        """Sites asked that have not answered."""
        return self.cohort - self._counted.keys() - self._out.keys()

    def answered(self, site: str) -> bool:
        """Whether the site has contributed or declined; one that the deadline passed by has not."""
        return site in self._counted or (site in self._out and self._out[site].outcome is not Outcome.LATE)

    def expects(self, site: str) -> bool:
        """Whether a payload of this site would be counted now."""
        return self.state is RoundState.COLLECTING and site in self.outstanding

    def receive(self, event: RoundEvent) -> None:
        """Takes the event in; `state` says what follows.

        Raises:
            RemoteProtocolError: A site's answer cannot be; nothing changed.
            LocalProtocolError: What cannot be summed was never counted: a bug of ours; nothing changed.
        """
        match event:
            case Contributed():
                self._contributed(event)
            case SiteDeclined(site, cause):
                self._open_for(site)
                self._out[site] = Share(site, Outcome.DECLINED, cause.value)
                self._settle()
            case PayloadRefused(site, problem):
                if self.state is not RoundState.CLOSED or self._counted.pop(site, None) is None:
                    raise LocalProtocolError(f"the payload of {site} was refused, and no sum counts it")
                self._out[site] = Share(site, Outcome.REFUSED, problem)
                if len(self._counted) < self.needed:
                    self.state = RoundState.FAILED
            case DeadlinePassed():
                for site in self.outstanding:
                    self._out[site] = Share(site, Outcome.LATE, "did not answer before the deadline")
                self._settle()
            case _:
                assert_never(event)

    def shares(self, transferred: dict[str, int]) -> tuple[Share, ...]:
        """What became of each site of the cohort, by name; `transferred` gives each one's bytes of payload."""
        shares = dict(self._out)
        for site, event in self._counted.items():
            shares[site] = Share(site, Outcome.COUNTED, "", event.seconds)
        return tuple(
            Share(share.site, share.outcome, share.cause, share.seconds, transferred.get(site, 0))
            for site, share in sorted(shares.items())
        )

    def _contributed(self, event: Contributed) -> None:
        earlier = self._counted.get(event.site)
        if earlier is not None and (earlier.payload, earlier.weight) == (event.payload, event.weight):
            return  # re-sent after a reconnect: the same words again say nothing new
        self._open_for(event.site)
        if event.payload.length != self.length:
            raise RemoteProtocolError(
                f"site {event.site} contributed {event.payload.length} bytes where this step takes {self.length}",
                fix=f"update Parley at {event.site} to the coordinator's release",
            )
        self._counted[event.site] = event
        self._settle()

    def _open_for(self, site: str) -> None:
        if site not in self.cohort:
            raise RemoteProtocolError(f"site {site} was not asked to take part in this step")
        if self.answered(site):
            raise RemoteProtocolError(f"site {site} has answered this step already; its first answer stands")
        if self.state is not RoundState.COLLECTING:
            raise RemoteProtocolError(f"site {site} answered after the step had closed")

    def _settle(self) -> None:
        if self.outstanding:
            return
        self.state = RoundState.CLOSED if len(self._counted) >= self.needed else RoundState.FAILED
