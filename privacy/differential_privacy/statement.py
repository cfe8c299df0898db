"""What differential privacy promises of a job, in one paragraph with every assumption, for people to read."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

from federation.errors import ConfigurationError
from privacy.differential_privacy.accounting import Epsilon, epsilon
from privacy.differential_privacy.events import Event, Level, Unit, exposures

__all__ = ["Guarantee", "guarantee", "rounded_down", "rounded_up", "statement"]

_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Guarantee:
    """What a site's charged events prove, recomputed from their integers.

    Attributes:
        events: The charges of the record that is in most of them; all of one level and unit.
        spent: Their epsilon, and the one that holds however rounds were chosen.
        added_delta: What rounding (T beta) and the sampler add to delta.
        colluding: c, the sites that may work together with the coordinator.
        twofold: For unit person: the epsilon of somebody with records at two of the sites.
    """

    events: tuple[Event, ...]
    spent: Epsilon
    added_delta: float
    colluding: int
    twofold: Epsilon | None

    @property
    def level(self) -> Level:
        """Who added the noise."""
        return self.events[0].level

    @property
    def unit(self) -> Unit:
        """What is protected."""
        return self.events[0].unit

    @property
    def delta(self) -> float:
        """The delta of the whole guarantee."""
        return self.spent.delta + self.added_delta


def guarantee(events: tuple[Event, ...], delta: float, *, c_max: int, added_delta: float = 0.0) -> Guarantee:
    """What these events prove at `delta`, for the record that is in most of them.

    Raises:
        ConfigurationError: There are no events, they differ in level or unit, or added_delta is above delta/100.
        LocalProtocolError: The accountants disagree.
    """
    if len({(event.level, event.unit) for event in events}) != 1:
        raise ConfigurationError(
            "a statement is about charged rounds of one level and one unit",
            fix="state what each level and unit proves by itself",
        )
    if not 0 <= added_delta <= delta / 100:
        raise ConfigurationError(
            f"rounding and sampling would add {added_delta:.3g} to delta = {delta:.3g}, more than a hundredth of it",
            fix="take a finer beta, or a sampler of more bits",
        )
    worlds = ((_spent(world, delta, 1), world) for world in exposures(events))
    spent, worst = max(worlds, key=lambda found: found[0].value)
    twofold = _spent(worst, delta, 2) if worst[0].unit is Unit.PERSON else None
    return Guarantee(worst, spent, added_delta, max(1, c_max), twofold)


def _spent(events: tuple[Event, ...], delta: float, sites: int) -> Epsilon:
    """The epsilon of somebody with records at so many sites, who moves the sums so many times as far."""
    releases = (event.releases for event in events)
    return epsilon(tuple(replace(each, z=each.z / sites) for each in releases), delta)


def statement(found: Guarantee) -> str:
    """The guarantee as one paragraph: level, unit, epsilon, delta, c, n_eff, q, z, rounds, and what it does not say.

    Epsilons and deltas are rounded up, noise multipliers down.
    """
    return " ".join(
        (_promise(found), _charged(found), _adaptive(found), _assumed(found), _COMPUTATIONAL, *_unprotected(found))
    )


_COMPUTATIONAL = (
    "The guarantee is computational: it holds against whoever cannot break the generator that noise, samples and masks "
    "are drawn from."
)


def _promise(found: Guarantee) -> str:
    match found.unit:
        case Unit.RECORD:
            neighbours = "any two of its data sets that differ in one record"
        case Unit.PERSON:
            neighbours = "any two of its data sets that differ in all the records of one person"
        case Unit.SITE:
            neighbours = "its data and none at all"
    alone = found.level is Level.RECORD_SITE
    others = "all other sites" if alone else f"any c = {found.colluding} other sites"
    return (
        f"Differential privacy, level {found.level}, unit {found.unit}: for every site, {neighbours} are "
        f"(epsilon = {rounded_up(found.spent.value)}, delta = {rounded_up(found.delta)})-indistinguishable to the "
        f"coordinator together with {others}, whatever they know and send."
    )


def _charged(found: Guarantee) -> str:
    counts: dict[tuple[str, float, str, int], int] = {}
    for event in found.events:
        key = str(event.purpose), event.q, rounded_down(event.z), event.n_eff
        counts[key] = counts.get(key, 0) + event.count
    rounds = "; ".join(
        f"T_i = {count} rounds ({purpose}) at q = {q:g}, z = {z}, n_eff = {n_eff}"
        for (purpose, q, z, n_eff), count in sorted(counts.items())
    )
    jobs = len({event.job for event in found.events})
    over = "" if jobs == 1 else f" over {jobs} jobs"
    return (
        f"Charged{over}: {rounds}. Epsilon is computed at delta = {found.spent.delta:g} ({found.spent.method}) from "
        f"the integers that were used; rounding and the noise's sampler add {rounded_up(found.added_delta)} to delta."
    )


def _adaptive(found: Guarantee) -> str:
    return (
        "It holds for q, z and rounds fixed beforehand; where they were chosen by what earlier rounds or jobs showed, "
        f"the fully adaptive epsilon = {rounded_up(found.spent.renyi)} holds (Rényi DP at order {found.spent.order}, "
        "fixed beforehand)."
    )


def _assumed(found: Guarantee) -> str:
    shared = (
        "that n_eff honest sites of each sum add their share of the noise, a secure sum that shows one sum a round "
        "over sites that this one agreed to, "
    )
    sampled = " and that the site's own samples stay secret"
    return (
        f"It assumes {'' if found.level is Level.RECORD_SITE else shared}no side channel (timing, sizes, a step that "
        "fails because of data), floating-point sums within the margin of the clip,"
        f"{'' if found.level is Level.SITE else sampled} and programs that do what they say."
    )


def _unprotected(found: Guarantee) -> Iterator[str]:
    if found.level is Level.SITE:
        yield "It does not hide that the site takes part, nor how large its messages are."
    else:
        yield (
            "It does not protect the site: whatever its records have in common (its case mix, a broken scanner, its "
            "size) may be learnt."
        )
    if found.twofold is not None:
        least = min(event.z for event in found.events) / 2
        yield (
            "Somebody with records at k of the sites moves the sums k times as far and has z/k: at 2 sites "
            f"z = {rounded_down(least)}, epsilon = {rounded_up(found.twofold.value)}."
        )
    yield "Members are not protected from the owner of their own site."


def rounded_up(value: float) -> str:
    """A number for people, six significant digits, not below the value."""
    return _shown(value, ROUND_CEILING)


def rounded_down(value: float) -> str:
    """A number for people, six significant digits, not above the value."""
    return _shown(value, ROUND_FLOOR)


def _shown(value: float, rounding: str) -> str:
    """Six significant digits, rounded this way from the first twelve: beyond them binary fractions look odd."""
    return f"{float(Context(prec=_DIGITS, rounding=rounding).create_decimal(f'{value:.12g}')):g}"
