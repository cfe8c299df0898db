"""What a site's data was charged for, as values that any accountant can interpret: integers first, never an epsilon."""

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any

from federation.errors import ConfigurationError, WhoActs

__all__ = [
    "EVERY_RECORD",
    "LEAST_VARIANCE",
    "Event",
    "Level",
    "Part",
    "Population",
    "Purpose",
    "Releases",
    "Unit",
    "dp_event",
    "exposures",
    "noise_multiplier",
    "protecting",
    "require_dp_accounting",
]

LEAST_VARIANCE = 64
"""The least variance of one site's share: from here on a sum of shares is a discrete Gaussian (L2)."""

_LEAST_NOISE, _LEAST_TOTAL = 0.01, 1e-6
"""Of sampled releases, and of whole batches, of which thousands may be counted as one: with less, formulas overflow."""

_MOST_SPLITS = 6
"""Splits of one data set into train and test whose combinations are told apart; of more, every part counts for all."""


class Level(StrEnum):
    """Who adds the noise, and what it protects (section 1)."""

    RECORD_SITE = "record-site"
    RECORD_SHARED = "record-shared"
    SITE = "site"


class Unit(StrEnum):
    """What one data set has and its neighbour has not, from the finest to the coarsest."""

    RECORD = "record"
    PERSON = "person"
    SITE = "site"

    def within(self, other: "Unit") -> bool:
        """Whether one of these is part of one of the `other`."""
        order = tuple(Unit)
        return order.index(self) < order.index(other)


class Purpose(StrEnum):
    """What the charged sum is for."""

    TRAIN = "train"
    STATISTICS = "stat"
    EVALUATION = "eval"
    COUNT = "count"


class Part(StrEnum):
    """The records of one keyed split that a sum reads."""

    TRAIN = "train"
    TEST = "test"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Population:
    """The records that an event reads: one part of one split.

    Parts TRAIN and TEST of one split are disjoint. Parts of two splits may overlap, whatever they are called.

    Attributes:
        split: What names the key and the fraction of the split; two events may share it only if both are the same.
        part: Which side of it.
    """

    split: str
    part: Part


EVERY_RECORD = Population("", Part.ALL)


@dataclass(frozen=True, slots=True)
class Releases:
    """`count` sums of clipped vectors with Gaussian noise of `z` clip norms, each record in each with probability `q`.

    Raises:
        ConfigurationError: q is not in (0, 1], z tiny or no number, or count not a positive integer.
    """

    q: float
    z: float
    count: int

    def __post_init__(self) -> None:
        """Refuses what no accountant can interpret."""
        if not 0 < self.q <= 1:
            raise ConfigurationError(f"a record rate of {self.q} is not in (0, 1]", fix="set q to a share of records")
        if not (_LEAST_NOISE if self.q < 1 else _LEAST_TOTAL) <= self.z < math.inf:
            raise ConfigurationError(
                f"a noise multiplier of {self.z} protects nothing, or is no number", fix="calibrate z from epsilon"
            )
        if type(self.count) is not int or self.count < 1:
            raise ConfigurationError(f"{self.count} rounds cannot be accounted", fix="plan at least one round")


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a site's ledger: `count` charged rounds of one job, with discrete Gaussian noise (section 6).

    Skellam noise has no event: these accountants do not hold for it.

    Attributes:
        job: The job's digest.
        first_round: The first round that it covers.
        last_round: The last.
        level: Who added the noise.
        unit: What it protects.
        q: The rate of records; 1 for whole batches.
        v: Variance of one site's noise share, in integer units.
        n_eff: Shares that count: sites of the opened sum less colluding ones; 1 at level record-site.
        squared: D^2, the most that the squares of one unit's moves of the integer sum add up to.
        count: Rounds charged.
        purpose: What the sums were for.
        population: The records that they read.

    Raises:
        ConfigurationError: The fields contradict one another, or their noise is not that of any guarantee.
    """

    job: bytes
    first_round: int
    last_round: int
    level: Level
    unit: Unit
    q: float
    v: int
    n_eff: int
    squared: int
    count: int
    purpose: Purpose
    population: Population

    def __post_init__(self) -> None:
        """Refuses an event that cannot have been."""
        noise_multiplier(self.v, self.squared, self.n_eff)
        _ = self.releases
        if not self.job:
            raise ConfigurationError("an event belongs to a job", fix="name the job's digest")
        if not 0 <= self.first_round <= self.last_round or self.count > self.last_round - self.first_round + 1:
            raise ConfigurationError(
                f"rounds {self.first_round} to {self.last_round} do not hold {self.count} charges",
                fix="charge each round once",
            )
        if (self.level is Level.SITE) != (self.unit is Unit.SITE):
            raise ConfigurationError(
                f"level {self.level} does not protect a {self.unit}", fix="choose level site, or unit record or person"
            )
        if self.level is Level.SITE and self.q != 1:
            raise ConfigurationError("level site takes no sampling of records", fix="set q = 1")
        if (self.level is Level.RECORD_SITE) != (self.n_eff == 1):
            raise ConfigurationError(
                f"level {self.level} with {self.n_eff} shares that count",
                fix="count one share at level record-site, and at least two where sites share the noise",
            )

    @property
    def z(self) -> float:
        """The noise multiplier of these integers."""
        return noise_multiplier(self.v, self.squared, self.n_eff)

    @property
    def releases(self) -> Releases:
        """The event as accountants see it."""
        return Releases(self.q, self.z, self.count)


@lru_cache(maxsize=1 << 14)
def noise_multiplier(v: int, squared: int, n_eff: int) -> float:
    """The largest float that is not above sqrt((n_eff*v - 4)/D^2), from integers alone (section 3, L3).

    The 4 is the variance that rounding to integers costs: with this z the opened sums are a post-processing of
    continuous Gaussian ones.

    Raises:
        ConfigurationError: v < 64, or D^2 or n_eff is not a positive integer.
    """
    if any(type(each) is not int for each in (v, squared, n_eff)) or squared < 1 or n_eff < 1:
        raise ConfigurationError(
            f"v = {v}, D^2 = {squared} and n_eff = {n_eff} must be positive integers",
            fix="take them from the job's calibration",
        )
    if v < LEAST_VARIANCE:
        raise ConfigurationError(
            f"a noise share of variance {v} is below {LEAST_VARIANCE}: a sum of such shares is no discrete Gaussian",
            fix="choose a finer grid (a larger scale), or more noise",
        )
    variance = n_eff * v - 4
    z = math.sqrt(variance / squared)
    while Fraction(z) ** 2 * squared > variance:
        z = math.nextafter(z, 0)
    return z


def protecting(events: tuple[Event, ...], unit: Unit) -> tuple[Releases, ...]:
    """What the events cost one `unit`.

    An event that protects something coarser clips the unit together with others, so that the unit moves the clipped
    vector by up to twice the clip norm: it counts with half its noise multiplier. One that protects something finer
    bounds nothing here.

    Raises:
        ConfigurationError: An event protects a finer unit than this.
    """
    found = []
    for event in events:
        if event.unit.within(unit):
            raise ConfigurationError(
                f"an event protects one {event.unit}, which says nothing of one {unit}",
                fix=f"account for one {event.unit}, or let jobs protect one {unit}",
            )
        z = event.z / 2 if unit.within(event.unit) else event.z
        found.append(Releases(event.q, z, event.count))
    return tuple(found)


def exposures(events: tuple[Event, ...]) -> tuple[tuple[Event, ...], ...]:
    """The events that can meet in one record: it is on one side of each split, and in everything that reads all.

    Every record's history is within one of the results; none is left out. Without events there is one, empty.
    """
    parts: dict[str, set[Part]] = {}
    for event in events:
        if event.population.part is not Part.ALL:
            parts.setdefault(event.population.split, set()).add(event.population.part)
    if len(parts) > _MOST_SPLITS:
        return (events,)
    sides = [tuple(Population(split, part) for part in sorted(found)) for split, found in sorted(parts.items())]
    return tuple(
        tuple(event for event in events if event.population.part is Part.ALL or event.population in world)
        for world in product(*sides)
    )


def require_dp_accounting() -> Any:
    """The package `dp_accounting`, imported only where somebody asks for its accountants.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        import dp_accounting.pld
    except ImportError as missing:
        raise ConfigurationError(
            f"the accountant of differential privacy needs dp-accounting, which cannot be used: {missing}",
            fix='pip install "parley-fl[privacy]"',
            who=WhoActs.YOU,
        ) from missing
    return dp_accounting


def dp_event(releases: tuple[Releases, ...]) -> Any:
    """The releases as one `dp_accounting.DpEvent`, for any accountant of that library.

    Raises:
        ConfigurationError: `dp_accounting` is not installed.
    """
    library = require_dp_accounting()
    events = []
    for each in releases:
        once = library.GaussianDpEvent(each.z)
        if each.q < 1:
            once = library.PoissonSampledDpEvent(each.q, once)
        events.append(library.SelfComposedDpEvent(once, each.count))
    return library.ComposedDpEvent(events)
