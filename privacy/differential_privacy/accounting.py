"""From events to one epsilon at a given delta: by exact Gaussian, PLD, Fourier and Rényi accountants that must agree.

Section 4 says which number is printed. The others are there to catch a wrong one: where they disagree nothing is
printed. Directions: a record is removed (the mixture against the noise) or added (the noise against the mixture).
"""

import math
import sys
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context
from enum import StrEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr, logsumexp, ndtr

from federation.errors import ConfigurationError, LocalProtocolError
from privacy.differential_privacy.events import Releases, dp_event, require_dp_accounting

__all__ = [
    "LEAST_PLD_DELTA",
    "ORDERS",
    "Epsilon",
    "Method",
    "combined",
    "epsilon",
    "fourier_epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_mu",
    "pld_epsilon",
    "pld_grid",
    "renyi",
    "renyi_epsilon",
    "renyi_overhead",
]

ORDERS = range(2, 257)
"""The Rényi orders that are tried. Whole numbers: at others the formula does not hold for the discrete law (L1)."""

LEAST_PLD_DELTA = 1e-9
"""Below it the FFT's rounding and truncation can be seen in a PLD's tail; RDP is printed instead."""

_GRIDS_PER_DEVIATION = 100
_MOST_GRID_POINTS = 1 << 20
"""Points of one round's PLD: some ten seconds and half a gigabyte. Where the grid needs more, RDP is printed."""

_MERGED_DIGITS = 9
_FOURIER_SLACK = 1e-3
_RENYI_SLACK = 1e-6
_REACH = 12.0
"""Standard deviations of noise that quadratures cover beyond the outermost centre: exp(-72) is left."""

_Reals = npt.NDArray[np.floating]
_Complexes = npt.NDArray[np.complexfloating]


class Method(StrEnum):
    """Where a printed epsilon comes from."""

    GDP = "exact Gaussian"
    PLD = "pessimistic privacy loss distribution"
    RDP = "Rényi DP at integer orders"


@dataclass(frozen=True, slots=True)
class Epsilon:
    """What events cost at `delta`, agreed on by three accountants.

    Attributes:
        value: The number to print.
        method: What it was computed with.
        delta: The delta that it holds at.
        renyi: The larger one that also holds when rounds are chosen by what earlier ones showed.
        order: The Rényi order of that one.
    """

    value: float
    method: Method
    delta: float
    renyi: float
    order: int


def epsilon(releases: tuple[Releases, ...], delta: float) -> Epsilon:
    """The epsilon of all the releases together, by the rule of section 4.

    **Formal guarantee.** The releases are (value, delta)-indistinguishable for neighbours, provided that (q, z, count)
    of all were fixed beforehand, and (renyi, delta) even where each was chosen by the outputs before it and only the
    order, and the sum of Rényi divergences at it, were fixed.

    | case | result |
    | --- | --- |
    | no releases | 0 |
    | all q = 1 | exact (Balle-Wang 2018) |
    | delta < 1e-9, or a loss too fine for a PLD of 2^20 points | RDP |
    | delta not in (0, 1) | refused |

    Raises:
        ConfigurationError: delta is not in (0, 1), or dp-accounting is needed and not installed.
        LocalProtocolError: The accountants disagree; the message has no epsilon.
    """
    _require_delta(delta)
    return _epsilon(combined(releases), delta)


@lru_cache(maxsize=256)
def _epsilon(merged: tuple[Releases, ...], delta: float) -> Epsilon:
    if not merged:
        return Epsilon(0.0, Method.GDP, delta, 0.0, ORDERS[0])
    bound, order = renyi_epsilon(merged, delta)
    if all(each.q == 1 for each in merged):
        value, method = gaussian_epsilon(_mu(merged), delta), Method.GDP
    elif delta >= LEAST_PLD_DELTA and _points(merged) <= _MOST_GRID_POINTS:
        value, method = pld_epsilon(merged, delta), Method.PLD
    else:
        value, method = bound, Method.RDP
    _require_agreement(merged, delta, fourier_epsilon(merged, delta), value, bound)
    return Epsilon(value, method, delta, bound, order)


def combined(releases: tuple[Releases, ...]) -> tuple[Releases, ...]:
    """The same releases, those with equal (q, z) counted together and all with q = 1 made one, in order of (q, z).

    Whole-batch releases add up in 1/z^2, exactly. Elsewhere z is first rounded down to nine digits, so that rounds
    whose noise differs by a rounding of v share one loss distribution.
    """
    whole = tuple(each for each in releases if each.q == 1)
    counts: dict[tuple[float, float], int] = {}
    for each in releases:
        if each.q < 1:
            key = each.q, _rounded_down(each.z, _MERGED_DIGITS)
            counts[key] = counts.get(key, 0) + each.count
    merged = [Releases(q, z, count) for (q, z), count in sorted(counts.items())]
    if whole:
        merged.append(Releases(1.0, 1 / _mu(whole), 1))
    return tuple(merged)


def _rounded_down(value: float, digits: int) -> float:
    """The value cut to so many significant digits: not above it."""
    return float(Context(prec=digits, rounding=ROUND_FLOOR).create_decimal(value))


def _require_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigurationError(
            f"delta = {delta} is no probability of failure", fix="choose delta above 0 and at most 1/(10 N_pub)"
        )


def _require_agreement(
    merged: tuple[Releases, ...], delta: float, fourier: float, printed: float, bound: float
) -> None:
    """Returns only for finite numbers of which the printed one lies between its cross-checks (section 4)."""
    within = fourier * (1 - _FOURIER_SLACK) <= printed <= bound * (1 + _RENYI_SLACK)
    if within and math.isfinite(printed):
        return
    facts = ", ".join(f"{each.count} rounds of q = {each.q:.6g}, z = {each.z:.6g}" for each in merged)
    raise LocalProtocolError(
        f"the accountants disagree about {facts} at delta = {delta:.3g}: no epsilon is printed",
        fix="report these numbers; until then choose other q, z or rounds",
    )


# ------------------------------------------------------------------------------------------------- whole batches, exact


def _mu(releases: tuple[Releases, ...]) -> float:
    return math.sqrt(math.fsum(each.count / each.z**2 for each in releases))


def gaussian_delta(mu: float, eps: float) -> float:
    """The delta Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), exactly (Balle-Wang 2018, Theorem 8).

    Written with Mills' ratio m(t) = Phi(-t)/phi(t), as phi(x) (m(x) - m(x + mu)) at x = eps/mu - mu/2, so that far out
    it is no difference of two numbers that are nearly equal. mu > 0, eps >= 0.
    """
    x = eps / mu - mu / 2
    if x < 0:
        return float(ndtr(-x) - math.exp(eps + log_ndtr(-x - mu)))
    mills = erfcx(x / math.sqrt(2)) - erfcx((x + mu) / math.sqrt(2))
    return float(math.exp(-x * x / 2) * mills / 2)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least epsilon >= 0 at which a Gaussian mechanism of parameter mu > 0 is (epsilon, delta)-private."""
    if gaussian_delta(mu, 0) <= delta:
        return 0.0
    most = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    return float(brentq(lambda eps: gaussian_delta(mu, eps) - delta, 0, most, xtol=1e-15, rtol=1e-14))


def gaussian_mu(eps: float, delta: float) -> float:
    """The largest mu that is (epsilon, delta)-private; `gaussian_epsilon`'s inverse. eps > 0.

    Raises:
        ConfigurationError: delta is not in (0, 1), or epsilon not positive and finite.
    """
    _require_delta(delta)
    if not 0 < eps < math.inf:
        raise ConfigurationError(
            f"epsilon = {eps} is no privacy budget", fix="choose a positive one, usually 0.1 to 10"
        )
    most = 4 * (math.sqrt(eps) + eps + 10)
    return float(brentq(lambda mu: gaussian_delta(mu, eps) - delta, 1e-30, most, xtol=1e-30, rtol=1e-14, maxiter=500))


# ------------------------------------------------------------------------------------------------ Rényi, integer orders


@lru_cache(maxsize=1 << 14)
def renyi(q: float, z: float, order: int) -> float:
    """The Rényi divergence of one release at an integer order: of the discrete law exactly, without loss (L1).

    (order - 1) R = ln Sum_k binom(order, k) (1-q)^(order-k) q^k exp((k^2-k)/(2 z^2)) (Mironov-Talwar-Zhang 2019),
    summed without its first two terms' cancelling ones, so that a small q costs no digits.

    Raises:
        LocalProtocolError: The order is not an integer of at least 2.
    """
    if type(order) is not int or order < ORDERS[0]:
        raise LocalProtocolError(
            f"a Rényi divergence of order {order} is not that of the discrete law", fix="use whole orders from 2 on"
        )
    if q == 1:
        return order / (2 * z * z)
    k = np.arange(2, order + 1)
    ways = np.array([math.log(math.comb(order, each)) for each in range(2, order + 1)])
    gain = (k * k - k) / (2 * z * z)
    terms = ways + (order - k) * math.log1p(-q) + k * math.log(q) + gain + np.log(-np.expm1(-gain))
    return float(np.logaddexp(0, logsumexp(terms)) / (order - 1))


def renyi_overhead(order: int, delta: float) -> float:
    """What turns a divergence R into an epsilon: ln(1 - 1/order) - ln(delta order)/(order - 1), to be added.

    Canonne-Kamath-Steinke 2020, Proposition 12.
    """
    return math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def renyi_epsilon(releases: tuple[Releases, ...], delta: float) -> tuple[float, int]:
    """The least epsilon that Rényi divergences at orders 2 to 256 prove, and the order that proves it."""
    found = [(_renyi_sum(releases, order) + renyi_overhead(order, delta), order) for order in ORDERS]
    value, order = min(found)
    return max(0.0, value), order


def _renyi_sum(releases: tuple[Releases, ...], order: int) -> float:
    return math.fsum(each.count * renyi(each.q, each.z, order) for each in releases)


# ----------------------------------------------------------------------------------- privacy loss distribution, printed


def pld_epsilon(releases: tuple[Releases, ...], delta: float) -> float:
    """A number that is not below the true epsilon, by dp_accounting's connect-the-dots PLDs on the grid of `pld_grid`.

    Raises:
        ConfigurationError: dp-accounting is not installed.
    """
    accountant = require_dp_accounting().pld.PLDAccountant(value_discretization_interval=pld_grid(releases))
    return float(accountant.compose(dp_event(releases)).get_epsilon(delta))


def pld_grid(releases: tuple[Releases, ...]) -> float:
    """The largest power of two that is at most a hundredth of every single loss's standard deviation.

    A power of two, since then more noise never changes to a coarser grid's disadvantage: epsilon falls in z.
    """
    finest = min(_loss_deviation(each.q, each.z) for each in releases) / _GRIDS_PER_DEVIATION
    return math.ldexp(1.0, math.frexp(finest)[1] - 1)


@lru_cache(maxsize=256)
def _loss_deviation(q: float, z: float) -> float:
    """The standard deviation of one release's privacy loss, the smaller of the two directions."""
    if q == 1:
        return 1 / z
    x = np.arange(-_REACH, 1 / z + _REACH, 1 / 64)
    loss = _log_ratio(q, z, x)
    return min(_deviation(loss, -x * x / 2), _deviation(loss, loss - x * x / 2))


def _deviation(values: _Reals, logs: _Reals) -> float:
    weights = np.exp(logs - logs.max())
    mean = np.average(values, weights=weights)
    return float(np.sqrt(np.average((values - mean) ** 2, weights=weights)))


def _points(releases: tuple[Releases, ...]) -> float:
    """Grid points that one release's loss takes: the finest grid over the widest loss."""
    spans = []
    for each in releases:
        ends = np.array([-10.0, 10.0 + 1 / each.z])
        low, high = _log_ratio(each.q, each.z, ends) if each.q < 1 else ends / each.z
        spans.append(high - low)
    return float(max(spans) / pld_grid(releases))


def _log_ratio(q: float, z: float, x: _Reals) -> _Reals:
    """ln(1 - q + q exp(x/z - 1/(2 z^2))): the mixture's density over the noise's, at x standard deviations of noise."""
    return np.asarray(np.logaddexp(math.log1p(-q), math.log(q) + x / z - 1 / (2 * z * z)))


# ------------------------------------------------------------------------------------------------- Fourier, cross-check


_ALIASES = 32.0
"""Negative logarithm of what aliases of the inversion may add, relative to delta: 1e-14."""

_TRUNCATION = 1e-7
"""What the cut tail of the inversion may add, relative to delta."""

_SMOOTHING = 40.0
"""How many times narrower than the loss and than delta's own slope the inversion smooths: 1e-7 of delta."""

_MOST_HEIGHTS = 1 << 16
_MOST_EXPONENTIALS = 1 << 26
"""Work that the window lets through at most: a few seconds. Only a few rounds of a small q would need more."""

_FIRST_SADDLE = 0.02
_BLOCK = 256
_WEIGHTLESS = 45.0
"""Negative logarithm of the weights, relative to the largest, whose oscillation need not be resolved: 3e-20."""

_CELLS = 1 << 18
"""Complex numbers that a quadrature works on at a time: 4 MiB."""


@dataclass(frozen=True)
class _Loss:
    """The privacy loss L of all releases together, the record removed or added, by its moments E[exp(s L)]."""

    releases: tuple[Releases, ...]
    removed: bool

    def log_moments(self, s: _Complexes) -> _Complexes:
        """The logarithm of E[exp(s L)] for each s: of the ratio's power s + 1 (removed) or -s (added) over noise."""
        powers = s + 1 if self.removed else -s
        return np.asarray(sum(each.count * _log_moments(each.q, each.z, powers) for each in self.releases))

    @property
    def deviation(self) -> float:
        """The loss's standard deviation."""
        return math.sqrt(math.fsum(each.count * _loss_deviation(each.q, each.z) ** 2 for each in self.releases))

    def heights(self, tilt: float, step: float) -> float:
        """How many heights above `tilt` are worth their work: the quadrature's nodes grow with the height."""
        power = tilt + 1 if self.removed else -tilt
        fastest = max((_nodes(each.q, each.z, power).fastest for each in self.releases if each.q < 1), default=0.0)
        return min(_MOST_HEIGHTS, math.sqrt(_MOST_EXPONENTIALS / (2 * step * max(fastest, 1e-9))))

    def chernoff(self, delta: float, enough: float) -> tuple[float, float]:
        """A point near the saddle of the moments, and the epsilon that it proves by Markov's inequality.

        The search ends early at an epsilon that is `enough`.
        """
        best, point, s = math.inf, 0.0, _FIRST_SADDLE
        while best > enough:
            grown = float(self.log_moments(np.array([s + 0j]))[0].real)
            proved = (grown + s * math.log(s) - (s + 1) * math.log1p(s) - math.log(delta)) / s
            if proved >= best:
                break
            best, point, s = proved, s, s * 1.2
        return point, best


@dataclass(frozen=True)
class _Contour:
    """delta at any epsilon, from ln E[exp(s L)] at evenly spaced s = tilt + iy, y >= 0.

    delta(eps) = E[(1 - exp(eps - L))_+] is 1/(2 pi) times the integral over y of exp(K(s) - s eps)/(s (s + 1)), for
    every tilt > 0: the characteristic function (Zhu-Dong-Wang 2022, the analytical Fourier accountant) inverted on a
    tilted line (Alghamdi et al. 2023, the saddle-point accountant), here by the trapezoid rule.
    """

    tilt: float
    heights: _Reals
    logs: _Complexes

    @property
    def top(self) -> float:
        """The logarithm of the largest moment, at y = 0."""
        return float(self.logs[0].real)

    def log_delta(self, eps: float) -> float:
        """The logarithm of delta at this epsilon; far below any where the integral is lost in its own rounding."""
        s = self.tilt + 1j * self.heights
        values = (np.exp(self.logs - self.top - 1j * self.heights * eps) / (s * (s + 1))).real
        integral = float(values.sum() - values[0] / 2) * self.heights[1] / math.pi
        return self.top - self.tilt * eps + math.log(max(integral, sys.float_info.min))


def fourier_epsilon(releases: tuple[Releases, ...], delta: float) -> float:
    """The epsilon of the continuous mechanism to about six digits, by Fourier inversion: a check, never printed."""
    removed = _inverted(_Loss(releases, removed=True), delta, 0.0)
    return _inverted(_Loss(releases, removed=False), delta, removed)


def _inverted(loss: _Loss, delta: float, least: float) -> float:
    """The loss's epsilon, or `least` where that is more; to prove the latter often needs no inversion."""
    saddle, most = loss.chernoff(delta, least)
    if most <= least:
        return least
    goal = math.log(delta)
    contour = _contour(loss, saddle, goal, most)
    if contour.log_delta(least) <= goal:
        return least
    if contour.log_delta(most) >= goal:
        return most
    return float(brentq(lambda eps: contour.log_delta(eps) - goal, least, most, xtol=1e-15, rtol=1e-13))


def _contour(loss: _Loss, saddle: float, goal: float, most: float) -> _Contour:
    """Half way to the saddle, so that aliases from below and from above fall off at the same rate.

    The trapezoid rule of step 2 pi/P adds delta(eps + kP) exp(tilt k P) for all k != 0. From below that is at most
    exp(-tilt P); from above at most exp(K(saddle) - saddle eps - tilt P), and the saddle's bound is near delta.
    The window (1 - u) e^u, u = (s/width)^2/2, is a fourth-order kernel over epsilon: without it the moments of a few
    rounds of a small q would fall off too slowly to be summed.
    """
    tilt = saddle / 2
    step = 2 * math.pi * tilt / (_ALIASES - goal)
    width = min(_SMOOTHING * max(saddle, 1 / loss.deviation), step * loss.heights(tilt, step) / 8)
    blocks: list[_Complexes] = []
    while True:
        heights = step * np.arange(len(blocks) * _BLOCK, (len(blocks) + 1) * _BLOCK)
        s = tilt + 1j * heights
        u = (s / width) ** 2 / 2
        blocks.append(loss.log_moments(s) + u + np.log(1 - u))
        cut = float(blocks[-1].real.max()) - tilt * most - math.log(math.pi * heights[-1])
        if cut < goal + math.log(_TRUNCATION):
            return _Contour(tilt, step * np.arange(len(blocks) * _BLOCK), np.concatenate(blocks))


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Where a quadrature over the noise has any weight: its ends, its widest step, and the loss's fastest change."""

    first: float
    last: float
    step: float
    fastest: float

    def at(self, height: float) -> _Reals:
        """Nodes that resolve oscillation at this height, and the Gaussian's own spectrum."""
        return np.arange(self.first, self.last, min(self.step, 2 * math.pi / (height * self.fastest + 16)))


@lru_cache(maxsize=64)
def _nodes(q: float, z: float, power: float) -> _Nodes:
    first, last, step = min(0.0, power / z) - _REACH, max(0.0, power / z) + _REACH, min(1 / 8, math.pi * z / 4)
    x = np.arange(first, last, step)
    ratio = _log_ratio(q, z, x)
    weights = power * ratio - x * x / 2
    slopes = -np.expm1(math.log1p(-q) - ratio) / z
    return _Nodes(first, last, step, float(slopes[weights > weights.max() - _WEIGHTLESS].max()))


def _log_moments(q: float, z: float, powers: _Complexes) -> _Complexes:
    """The logarithm of E[ratio^t] over standard Gaussian noise, for t of equal real parts, by the trapezoid rule.

    The integrand is analytic in a strip of half width pi z, so the rule converges exponentially. With a step of 1/(z D)
    it would be the discrete law itself (L3).
    """
    if q == 1:
        return powers * (powers - 1) / (2 * z * z)
    x = _nodes(q, z, float(powers[0].real)).at(float(np.abs(powers.imag).max()))
    ratio = _log_ratio(q, z, x)
    found = np.empty(len(powers), complex)
    rows = max(1, _CELLS // len(x))
    for start in range(0, len(powers), rows):
        exponents = powers[start : start + rows, None] * ratio - x * x / 2
        tops = exponents.real.max(axis=1)
        found[start : start + rows] = np.log(np.exp(exponents - tops[:, None]).sum(axis=1)) + tops
    found += math.log((x[1] - x[0]) / math.sqrt(2 * math.pi))
    return found
