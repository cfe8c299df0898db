"""Two symmetric laws on the integers, discrete Gaussian and Skellam, as fixed-point masses made of integers alone.

No floating point decides a mass. Each is right to 2^-190 of the whole, and what lies beyond the last is below 2^-128.
"""

from fractions import Fraction
from math import asinh, isqrt, log, sqrt

__all__ = ["gaussian_masses", "skellam_masses"]

_BITS = 256
"""Binary places of a mass. A million steps, each off by their number in units of the last place, leave 2^-190."""

_ONE = 1 << _BITS
_GUARD = 32
_TAIL = 129 * log(2)
"""Minus the logarithm of what may lie beyond the last mass on one side."""


def gaussian_masses(variance: Fraction) -> list[int]:
    """Masses of |x|, x = 0, 1, ..., in proportion, for P(x) ~ exp(-x^2 / (2 variance)), variance >= 1.

    The tail: P(|X| > r) <= 2 exp(-r^2 / (2 variance)) (Canonne, Kamath and Steinke 2020, corollary 25).
    """
    reach = isqrt(int(179 * variance)) + 1  # 2 * 129 * ln 2 = 178.84
    ratio, step = _exp_minus(1 / (2 * variance)), _exp_minus(1 / variance)
    masses, mass = [_ONE], _ONE
    for _ in range(reach):
        mass = mass * ratio >> _BITS
        masses.append(2 * mass)
        ratio = ratio * step >> _BITS
    return masses


def skellam_masses(variance: int) -> list[int]:
    """Masses of |x|, x = 0, 1, ..., in proportion, for the difference of two Poisson numbers of mean variance / 2.

    P(x) = exp(-variance) I_x(variance), by the recurrence I_(x-1) = I_(x+1) + (2x / variance) I_x downwards from
    beyond the tail (Miller's algorithm), in which every term is positive.
    """
    reach, start = _skellam_reach(variance, _TAIL), _skellam_reach(variance, 2 * _TAIL)
    above, here, found = 0, _ONE, [_ONE]
    for x in range(start, 0, -1):
        above, here = here, above + 2 * x * here // variance
        found.append(here)
    found.reverse()
    return [found[0], *(2 * mass for mass in found[1 : reach + 1])]


def _skellam_reach(variance: int, tail: float) -> int:
    """The least r with P(X >= r) <= exp(-tail), by Chernoff's bound."""
    low, high = 0, 1
    while _skellam_exponent(high, variance) < tail:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _skellam_exponent(middle, variance) >= tail else (middle, high)
    return high


def _skellam_exponent(x: int, variance: int) -> float:
    # sqrt(x^2 + v^2) - v written so that nothing cancels where x is far below v
    return x * asinh(x / variance) - x * x / (sqrt(x * x + variance * variance) + variance)


def _exp_minus(x: Fraction) -> int:
    """2^_BITS exp(-x) for 0 < x <= 1, less at most two units: Taylor's series with guard bits."""
    term = total = _ONE << _GUARD
    order = 1
    while term:
        term = term * x.numerator // (x.denominator * order)
        total += -term if order % 2 else term
        order += 1
    return (total >> _GUARD) - 1
