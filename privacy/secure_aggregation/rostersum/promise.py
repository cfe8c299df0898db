"""From an epsilon to a plan's noise, the same at every site, and from terms back to an epsilon and to words for people.

Every site computes both from the job file and the terms; nobody's word is taken (section 7, unit "site").
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from federation.errors import ConfigurationError, LocalProtocolError
from privacy.differential_privacy.accounting import ORDERS, renyi_overhead
from privacy.differential_privacy.events import LEAST_VARIANCE
from privacy.differential_privacy.sampler import noise_shares, require_close
from privacy.differential_privacy.self_test import self_test
from privacy.differential_privacy.site_level import SiteMechanism, share_sum_distance
from privacy.differential_privacy.statement import rounded_down, rounded_up
from privacy.secure_aggregation.rostersum.noise import Divergence, mechanism_of, round_noise, sampler_of
from privacy.secure_aggregation.rostersum.terms import Mechanism, Noise, Plan, Ring, Terms, Unit

__all__ = ["Aim", "SitePromise", "calibrated", "epsilon_of", "promise_of", "promised", "statement", "tried"]

_DIGITS = 4
"""Significant digits of a noise multiplier: no difference between two machines' arithmetic reaches the last one."""

_FIRST = 10 ** (_DIGITS - 1)
_PER_DECADE = 9 * _FIRST
_LEAST_NOISE, _MOST_NOISE = -3, 9
"""Powers of ten between which a noise multiplier lies: the first protects nothing, and the second drowns everything."""

_ROOM = 12.0
"""k of the modulus rule, which asks for 4: in words of 32 bits a wrap then never happens, and nothing is lost by it."""

_MOST_VARIANCE = {Mechanism.DDGAUSS: 2**56, Mechanism.SKELLAM: 2**32}
"""Of a share that the sampler draws."""

_FEW = 50
"""Sites below which a site's noise drowns what the others have learnt."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What a job's author asks of the noise.

    Attributes:
        epsilon: All rounds together cost a site at most this,
        delta: at this delta.
        rounds: Rounds that may be charged.
        clip: C, the largest L2 norm of an update.
        law: Of a share.
    """

    epsilon: float
    delta: float
    rounds: int
    clip: float
    law: Mechanism


@lru_cache(maxsize=64)
def calibrated(aim: Aim, dimension: int, sites: int, least: int, c_max: int) -> Noise:
    """The least noise, on the finest grid for words of 32 bits, whose rounds cost a site at most the epsilon asked for.

    Whatever set is summed, of `least` to `sites` sites with `c_max` colluding ones. The noise multiplier has four
    significant digits and the scale is a power of two, so that all sites find the same numbers.

    Raises:
        ConfigurationError: No noise gives that epsilon, or none of it fits the words.
    """
    shares = tuple(noise_shares(members, c_max) for members in range(least, sites + 1))
    exponent = 31 - math.frexp(aim.clip)[1]  # scale * clip < 2^31, and less below
    while 2.0**exponent * aim.clip + math.sqrt(dimension) >= 2**31:
        exponent -= 1
    z = _least_z(SiteMechanism(dimension, aim.clip, 2.0**exponent, 1.0), aim, shares)
    while True:  # the noise shrinks with the scale until it fits; a coarser grid never needs less of it
        mechanism = SiteMechanism(dimension, aim.clip, 2.0**exponent, z)
        if _fits(mechanism, aim.law, sites, shares[0]):
            z = _least_z(mechanism, aim, shares)
            if _fits(replace(mechanism, z=z), aim.law, sites, shares[0]):
                return Noise(Unit.SITE, aim.law, aim.clip, mechanism.scale, z, aim.delta, aim.rounds)
        exponent -= 1


def _least_z(mechanism: SiteMechanism, aim: Aim, shares: tuple[int, ...]) -> float:
    """The least noise multiplier of four digits with which all rounds cost at most the epsilon asked for."""

    def pays(place: int) -> bool:
        found = _worst(replace(mechanism, z=_z_at(place)), aim.law, shares)
        return found is not None and _epsilon(found, aim.rounds, aim.delta) <= aim.epsilon

    low, high = _LEAST_NOISE * _PER_DECADE, _MOST_NOISE * _PER_DECADE
    if not pays(high):
        raise ConfigurationError(
            f"no noise that fits a word gives epsilon = {aim.epsilon:g} at delta = {aim.delta:g} over {aim.rounds} "
            f"rounds to {mechanism.dimension} values",
            fix="choose a larger epsilon or delta, fewer rounds, or mechanism ddgauss",
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return _z_at(high)


def _z_at(place: int) -> float:
    """The decimal of four digits with this number in their order; the 0th is 1."""
    exponent, rest = divmod(place, _PER_DECADE)
    return float((rest + _FIRST) * Fraction(10) ** (exponent + 1 - _DIGITS))


def _worst(mechanism: SiteMechanism, law: Mechanism, shares: tuple[int, ...]) -> Divergence | None:
    """A bound on what a sum costs over any of these numbers of shares; None where a share's variance is too small.

    Shares that are rounded up make together no less than the one share that would be all the noise.
    """
    least = mechanism.share_variance(max(shares))
    if least < LEAST_VARIANCE:
        return None
    tau = share_sum_distance(least, max(shares))
    return Divergence(law, mechanism.share_variance(1), mechanism.squared, mechanism.l1, mechanism.dimension, tau)


def _epsilon(found: Divergence, rounds: int, delta: float) -> float:
    """Of so many rounds, however each was chosen by what the ones before showed (Feldman and Zrnic 2021)."""
    return max(0.0, min(rounds * found.renyi(order) + renyi_overhead(order, delta) for order in ORDERS))


def _fits(mechanism: SiteMechanism, law: Mechanism, sites: int, shares: int) -> bool:
    """The modulus rule with more room than it asks for, and a share that can be drawn; `shares` are the fewest."""
    share = mechanism.share_variance(shares)
    spread = (mechanism.reach * sites) ** 2 / mechanism.dimension + (1 / 4 + share) * sites
    return 2 * _ROOM * math.sqrt(spread) <= 2.0**Ring.WORD and share <= _MOST_VARIANCE[law]


# ------------------------------------------------------------------------------------------------- from terms to words


def epsilon_of(terms: Terms, plan: Plan) -> float:
    """What all rounds of a plan that protects a site cost it at the plan's delta, whatever sets are summed.

    Raises:
        LocalProtocolError: The plan protects something else, or nothing.
        ConfigurationError: A share's variance is below 64: nothing is proved of such noise.
    """
    if plan.dp is None:
        raise LocalProtocolError(f"plan {plan.plan_id} has no noise, and its epsilon was asked for")
    shares = tuple(noise_shares(members, terms.c_max) for members in range(plan.m_min, terms.n + 1))
    found = _worst(mechanism_of(plan), plan.dp.mechanism, shares)
    if found is None:
        raise ConfigurationError(
            f"a site's noise share has a variance below {LEAST_VARIANCE}, of which nothing is proved",
            fix="let this release make the job's terms",
        )
    return _epsilon(found, plan.dp.rounds, plan.dp.delta)


def tried(terms: Terms) -> None:
    """Returns once this process has drawn noise as each plan that protects a site needs it, and found it right.

    Raises:
        LocalProtocolError: The draws do not look like their law: no noise of this process protects anything.
        ConfigurationError: The sampler would add more to delta than a thousandth of it, or does not draw such noise.
    """
    for plan in terms.plans:
        if plan.dp is not None and plan.dp.unit is Unit.SITE:
            noise = round_noise(plan, terms.n, terms.c_max)
            require_close(
                noise.sampler,
                epsilon=epsilon_of(terms, plan),
                delta=plan.dp.delta,
                rounds=plan.dp.rounds,
                values=noise.mechanism.dimension,
                sites=terms.n,
            )
            _test(plan.dp.mechanism, noise.variance)


@lru_cache(maxsize=4)
def _test(law: Mechanism, variance: int) -> None:
    self_test(sampler_of(law, variance))


@dataclass(frozen=True, slots=True)
class SitePromise:
    """What a job promises each site as a whole.

    Attributes:
        epsilon: What all rounds cost it,
        delta: at this delta.
        rounds: Rounds that may be charged.
        clip: C, the largest L2 norm of an update.
        z: The noise multiplier, of all shares that count together.
        law: Of a share.
        sites: In the roster.
        colluding: c, those whose shares do not count.
        shares: n_eff, the shares that count in the smallest sum.
    """

    epsilon: float
    delta: float
    rounds: int
    clip: float
    z: float
    law: Mechanism
    sites: int
    colluding: int
    shares: int

    @property
    def blur(self) -> float:
        """The standard deviation of the noise in each value of a mean over all sites."""
        return self.z * self.clip / math.sqrt(self.sites * (self.sites - self.colluding))


def promise_of(terms: Terms, plan: Plan) -> SitePromise:
    """What a plan that protects a site promises, computed from the terms alone.

    Raises:
        LocalProtocolError: The plan protects something else, or nothing.
        ConfigurationError: Nothing is proved of its noise.
    """
    epsilon, noise = epsilon_of(terms, plan), plan.dp
    if noise is None:
        raise LocalProtocolError(f"plan {plan.plan_id} has no noise, and was asked what it promises")
    return SitePromise(
        epsilon=epsilon,
        delta=noise.delta,
        rounds=noise.rounds,
        clip=noise.clip,
        z=noise.z,
        law=noise.mechanism,
        sites=terms.n,
        colluding=max(1, terms.c_max),
        shares=noise_shares(plan.m_min, terms.c_max),
    )


def promised(terms: Terms) -> tuple[str, ...]:
    """What a job promises each site as a whole, a paragraph for each plan that protects one; none where none does."""
    return tuple(
        statement(promise_of(terms, plan)) for plan in terms.plans if plan.dp is not None and plan.dp.unit is Unit.SITE
    )


def statement(found: SitePromise) -> str:
    """A promise as one paragraph for people: level, unit, epsilon, delta, c, n_eff, z, rounds, and what lies outside.

    Epsilon and delta are rounded up, the noise multiplier down.
    """
    return " ".join((_promise(found), _covered(found), _ASSUMED, _OUTSIDE, *_few(found)))


_ASSUMED = (
    "It assumes that n_eff honest sites of each sum add their share of the noise, a secure sum that shows one sum a "
    "round over sites that this one agreed to, no side channel (timing, sizes), and programs that do what they say. It "
    "is computational: it holds against whoever cannot break the generator that noise and masks are drawn from."
)
_OUTSIDE = (
    "Outside it: statistics and evaluations are exact sums over whole cells, and so is all that follows from them, "
    "which is how inputs are prepared and which round is chosen or the last. It does not hide that a site takes part, "
    "nor how large its messages are."
)


def _promise(found: SitePromise) -> str:
    return (
        "Differential privacy, level site, unit: all records of one site. For every site, its updates and none at all "
        f"are (epsilon = {rounded_up(found.epsilon)}, delta = {rounded_up(found.delta)})-indistinguishable to the "
        f"coordinator together with any c = {found.colluding} other sites, whatever they know and send."
    )


def _covered(found: SitePromise) -> str:
    return (
        f"That covers all {found.rounds} rounds that the job may charge, at clip {found.clip:g}, noise multiplier "
        f"z = {rounded_down(found.z)} ({found.law}) and n_eff = {found.shares} or more noise shares that count; it is "
        "computed by Rényi DP at integer orders, so it holds however rounds are chosen by what earlier ones showed."
    )


def _few(found: SitePromise) -> Iterator[str]:
    if found.sites < _FEW:
        yield (
            f"There are {found.sites} sites: below about {_FEW}, noise that hides a whole site drowns what all of them "
            "learn."
        )
