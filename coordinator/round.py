"""One attempt at one step: who was asked, who answered, and when what came is enough.

```
COLLECTING --- all of the cohort answered, enough counted ---> CLOSED
    |  |------ deadline, enough counted ---------------------> CLOSED
    |  |------ deadline or all answered, too few ------------> FAILED
    |          CLOSED --- sums refuse a payload, too few left -> FAILED
    `--- contribution, decline ------------------------------> COLLECTING
```
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from coordinator.records import Outcome, Share
from federation.blobs import BlobRef
from federation.errors import LocalProtocolError, RemoteProtocolError
from federation.messages import DeclineCause

__all__ = [
    "Contributed",
    "DeadlinePassed",
    "PayloadRefused",
    "Round",
    "RoundEvent",
    "RoundState",
    "SealedRound",
    "SiteDeclined",
]


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

    @property
    def holding(self) -> tuple[frozenset[str], str]:
        """Sites that others wait for, and what for, in words; none before somebody has contributed."""
        return (self.outstanding if self._counted else frozenset(), "")

    @property
    def broken(self) -> str:
        """Why the attempt failed where no site is to blame: here there is always one."""
        return ""

    @property
    def works_on(self) -> bool:
        """Whether a site that was late goes on with its work, and is not asked again before that is done."""
        return True

    def asks(self, site: str) -> bool:
        """Whether a site that has accepted the job is asked (again) to take part."""
        return site in self.outstanding

    def takes(self, site: str, payload: BlobRef) -> bool:
        """Whether this payload of the site would be counted now."""
        return self.expects(site) and payload.length == self.length

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


class SealedRound:
    """One attempt at one step that is summed under secure aggregation, whose own machine says who is in the sum.

    A site is in the cohort once it was asked. Nothing but `opened` closes it, nothing but `failed` fails it; what sites
    say meanwhile tells only why they are missing.

    Args:
        cohort: The sites asked first.
    """

    counted: tuple[Contributed, ...] = ()
    """What a plain sum is made of: nothing."""
    works_on = False
    """A site that was late is asked again at once: its machine knows what became of its work."""

    def __init__(self, cohort: frozenset[str]) -> None:
        self.cohort = cohort
        self.state = RoundState.COLLECTING
        self.broken = ""
        self._behind = cohort
        self._waits = ""
        self._members: frozenset[str] = frozenset()
        self._missing: dict[str, str] = {}
        self._out: dict[str, Share] = {}

    @property
    def outstanding(self) -> frozenset[str]:
        """Sites that the sum waits for."""
        return self._behind - self._out.keys() if self.state is RoundState.COLLECTING else frozenset()

    @property
    def holding(self) -> tuple[frozenset[str], str]:
        """Sites that others wait for, and what for, in words; none while all are waited for alike."""
        behind = self.outstanding
        return (frozenset() if behind == self.cohort else behind, self._waits)

    def asks(self, site: str) -> bool:
        """Has a site that has accepted the job in the cohort; always true before the sum has closed or failed."""
        if self.state is not RoundState.COLLECTING:
            return False
        self.cohort |= {site}
        self._out.pop(site, None)
        return True

    def takes(self, site: str, payload: BlobRef) -> bool:  # noqa: ARG002 - `Round` asks which
        """Whether this payload of the site would be counted now: the coordinator sees no single one."""
        return False

    def answered(self, site: str) -> bool:
        """Whether the site has declined."""
        return site in self._out

    def expects(self, site: str) -> bool:
        """Whether it matters now that the site declines."""
        return self.state is RoundState.COLLECTING and site in self.cohort and site not in self._out

    def receive(self, event: RoundEvent) -> None:
        """Takes in why a site is missing, if the sum is made without it.

        Raises:
            RemoteProtocolError: A site's answer cannot be; nothing changed.
            LocalProtocolError: The event is one of plain sums: a bug of ours; nothing changed.
        """
        match event:
            case SiteDeclined(site, cause):
                if site not in self.cohort:
                    raise RemoteProtocolError(f"site {site} was not asked to take part in this step")
                if self.expects(site):
                    self._decline(site, cause.value)
            case Contributed(site):
                raise RemoteProtocolError(
                    f"site {site} contributed in plain to a step that is summed under secure aggregation",
                    fix=f"update Parley at {site} to the coordinator's release",
                )
            case PayloadRefused() | DeadlinePassed():
                raise LocalProtocolError(f"{type(event).__name__} came for a sealed sum")
            case _:
                assert_never(event)

    def stands(self, behind: frozenset[str], waits: str, declined: tuple[tuple[str, str], ...]) -> None:
        """Notes how far the sum has come; the first reason that is known of a site stands."""
        if self.state is RoundState.COLLECTING:
            self._behind, self._waits = behind, waits
            for site, cause in declined:
                if self.expects(site):
                    self._decline(site, cause)

    def opened(self, members: frozenset[str], missing: tuple[tuple[str, str], ...] = ()) -> None:
        """The sum is open, over exactly these sites; `missing` says why others are not in it, as far as is known."""
        self.cohort |= members
        self._members = members
        self._missing = dict(missing)
        self.state = RoundState.CLOSED

    def failed(self, problem: str, *, broken: bool) -> None:
        """The sum was given up; `broken` when no site declined and it is a failure all the same."""
        self.broken = problem if broken else ""
        self.state = RoundState.FAILED

    def shares(self, transferred: dict[str, int]) -> tuple[Share, ...]:
        """What became of each site of the cohort, by name; `transferred` gives each one's bytes of payload."""
        late = {site: Share(site, Outcome.LATE, self._late(site)) for site in self.cohort}
        counted = {site: Share(site, Outcome.COUNTED) for site in self._members}
        shares = late | self._out | counted
        return tuple(replace(shares[site], bytes=transferred.get(site, 0)) for site in sorted(shares))

    def _late(self, site: str) -> str:
        if self.state is RoundState.CLOSED:
            return self._missing.get(site, "was not in the sum")
        return "the sum was given up, which waited for it" if site in self._behind else ""

    def _decline(self, site: str, cause: str) -> None:
        self._out[site] = Share(site, Outcome.DECLINED, cause)
