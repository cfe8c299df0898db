"""One exact draw from a discrete Gaussian, by rejection with integers alone (Canonne, Kamath and Steinke 2020).

Its law is the stated one with nothing to add to delta. It is for single numbers; `sampler` is for vectors.
"""

import os
from fractions import Fraction
from math import isqrt

from federation.errors import LocalProtocolError
from privacy.differential_privacy.stream import Draw

__all__ = ["discrete_gaussian"]


def discrete_gaussian(variance: Fraction, draw: Draw = os.urandom) -> int:
    """One draw of N_Z(0, variance), exactly (their algorithm 3); about 20 calls of `draw`.

    Raises:
        LocalProtocolError: The variance is not above 0.
    """
    if variance <= 0:
        raise LocalProtocolError(f"a discrete Gaussian has a variance above 0, not {variance}")
    scale = isqrt(int(variance)) + 1
    while True:
        candidate = _laplace(scale, draw)
        excess = abs(candidate) - variance / scale
        if _bernoulli_exp(excess**2 / (2 * variance), draw):
            return candidate


def _laplace(scale: int, draw: Draw) -> int:
    """A discrete Laplace draw, P(x) ~ exp(-|x| / scale) (their algorithm 2)."""
    while True:
        fine = _below(scale, draw)
        if not _bernoulli_exp(Fraction(fine, scale), draw):
            continue
        coarse = 0
        while _bernoulli_exp(Fraction(1), draw):
            coarse += 1
        size, negative = fine + scale * coarse, _below(2, draw) == 1
        if size or not negative:
            return -size if negative else size


def _bernoulli_exp(exponent: Fraction, draw: Draw) -> bool:
    """True with probability exp(-exponent), exponent >= 0 (their algorithm 1)."""
    while exponent > 1:
        if not _bernoulli_exp(Fraction(1), draw):
            return False
        exponent -= 1
    tries = 1
    while _below(exponent.denominator * tries, draw) < exponent.numerator:
        tries += 1
    return tries % 2 == 1


def _below(limit: int, draw: Draw) -> int:
    """A uniform integer of 0 to limit - 1."""
    bits = (limit - 1).bit_length()
    size = (bits + 7) // 8
    while True:
        found = int.from_bytes(draw(size), "big") >> (8 * size - bits)
        if found < limit:
            return found
