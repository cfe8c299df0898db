"""Noise shares: samplers of discrete Gaussian and Skellam vectors whose distance from their law is bounded and charged.

    Gaussian of variance v:  x0 + b * x1, two tables     N_Z(0, v) within exp(+-1e-33)     (the DP text, section 2)
    Skellam of variance v:   one table                   difference of two Poisson numbers of mean v / 2

**Formal guarantee.** A draw's total variation distance from its law is at most `Sampler.distance`: 2^-128 for what the
tables leave out, 2^-128 for rounding their thresholds, less than 2^-128 for the arithmetic that made them, and 1e-33
for adding two tables. `require_close` refuses a job whose delta this would change. Besides that the draws are those
of AES-256-CTR under a key of the operating system's: indistinguishable from uniform, not uniform.

| edge | what happens |
| --- | --- |
| a share's variance below 64 | refused: a sum of such shares is no discrete Gaussian |
| a variance above 2^56 (Skellam: 2^32) | refused: wider than any ring of 32 bits holds, or a table of many millions |
| an empty vector | no noise is drawn |
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from math import exp, inf, isqrt

import numpy as np

from federation.errors import ConfigurationError
from privacy.crypto.masks import Words, dtype
from privacy.differential_privacy.events import LEAST_VARIANCE
from privacy.differential_privacy.laws import gaussian_masses, skellam_masses
from privacy.differential_privacy.stream import PART, Draw, Stream
from privacy.differential_privacy.table import BITS, I64, Table

__all__ = [
    "Sampler",
    "Share",
    "gaussian",
    "noise_shares",
    "require_close",
    "sampler_delta",
    "skellam",
]

_TABLE_DISTANCE = 3 * 2.0**-BITS
"""Of one table: its tail, its thresholds' rounding, the arithmetic that made it (`laws`)."""

_SUM_DISTANCE = 1e-33
"""Of x0 + b * x1 from one discrete Gaussian: 4 exp(-2 pi^2 s), where s = 1 / (1/v1 + b^2/v0) > 4 for v >= 64."""

_MOST_VARIANCE = 1 << 56
"""Wider noise fits no ring of 32 bits: 12 standard deviations pass 2^31. A table has half a million columns."""

_MOST_SKELLAM = 1 << 32
"""A table of one million columns, 24 MB. What needs more noise needs no Skellam, which is for rings of few bits."""

_FEWEST = 2
"""Shares of honest members, so that none of them stands alone before the others."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """The law of one coordinate of one site's share, with the tables that it is drawn from.

    Attributes:
        variance: Of a draw, as an integer.
        excess: The law's excess kurtosis times its variance: 0 for a Gaussian, 1 for Skellam.
        terms: A draw is the sum of these, each a factor and a table.
        distance: Bound on the total variation distance of a draw from its law.
    """

    variance: int
    excess: int
    terms: tuple[tuple[int, Table], ...] = field(repr=False)
    distance: float

    @property
    def step(self) -> int:
        """The largest factor: draws modulo this show the finer table alone."""
        return max(factor for factor, _ in self.terms)

    def share(self, draw: Draw = os.urandom) -> "Share":
        """The noise of one attempt, under a key of its own."""
        return Share(self, draw)


class Share:
    """The noise of one attempt at one vector: drawn once, forwards, in blocks of any size."""

    def __init__(self, sampler: Sampler, draw: Draw = os.urandom) -> None:
        self._terms = sampler.terms
        self._stream = Stream(draw)
        self._drawn = np.empty(PART, np.int64)

    def fill(self, out: I64) -> None:
        """Fills a vector with independent draws. It takes memory of its own for a few thousand draws only."""
        for start in range(0, out.size, PART):
            part = out[start : start + PART]
            drawn = self._drawn[: part.size]
            part[:] = 0
            for factor, table in self._terms:
                table.draw(self._stream, drawn)
                np.multiply(drawn, factor, out=drawn)
                part += drawn

    def noised(self, parts: Iterable[I64], ring: int) -> Iterator[Words]:
        """Each part, with this noise added, as words modulo 2^ring. The parts are left as they are.

        Raises:
            LocalProtocolError: There is no such ring.
        """
        words = dtype(ring)
        for part in parts:
            block = np.empty(part.size, np.int64)
            self.fill(block)
            block += part
            yield block.astype(words)  # from integers to fewer bits: the low ones, in two's complement


def gaussian(variance: int) -> Sampler:
    """The sampler of N_Z(0, variance), 64 <= variance <= 2^56.

    Raises:
        ConfigurationError: The variance is outside these.
    """
    _require_variance(variance, _MOST_VARIANCE, "choose a smaller scale")
    step, fine, coarse = _split(variance)
    tables = (1, Table(gaussian_masses(fine))), (step, Table(gaussian_masses(coarse)))
    return Sampler(variance, 0, tables, 2 * _TABLE_DISTANCE + _SUM_DISTANCE)


def skellam(variance: int) -> Sampler:
    """The sampler of the difference of two Poisson numbers of mean variance / 2, 64 <= variance <= 2^32.

    Raises:
        ConfigurationError: The variance is outside these.
    """
    _require_variance(variance, _MOST_SKELLAM, "choose mechanism ddgauss, or a smaller scale")
    return Sampler(variance, 1, ((1, Table(skellam_masses(variance))),), _TABLE_DISTANCE)


def noise_shares(members: int, c_max: int) -> int:
    """n_eff: the shares of an opened sum that nobody who looks at it knows: all but those of c = max(1, c_max).

    One member counts as curious even where no collusion is assumed: it can subtract its own share.

    Raises:
        ConfigurationError: Fewer than two are left.
    """
    shares = members - max(1, c_max)
    if shares < _FEWEST:
        raise ConfigurationError(
            f"of {members} sites' noise shares {max(1, c_max)} may be known to others, which leaves {shares}",
            fix=f"wait for at least {max(1, c_max) + _FEWEST} sites, or choose level record-site",
        )
    return shares


def sampler_delta(sampler: Sampler, *, epsilon: float, rounds: int, values: int, sites: int) -> float:
    """What sampling adds to delta: (1 + e^epsilon) t for each of rounds * values * sites draws."""
    growth = exp(epsilon) if epsilon < 700 else inf  # noqa: PLR2004 - where binary64 ends
    return (1 + growth) * rounds * values * sites * sampler.distance


def require_close(sampler: Sampler, *, epsilon: float, delta: float, rounds: int, values: int, sites: int) -> None:
    """Accepts a job whose delta the sampler changes by no more than a thousandth.

    Raises:
        ConfigurationError: It changes it by more.
    """
    added = sampler_delta(sampler, epsilon=epsilon, rounds=rounds, values=values, sites=sites)
    if not added <= delta / 1000:
        raise ConfigurationError(
            f"the noise sampler would add {added:.2g} to delta, more than a thousandth of {delta:.2g}",
            fix="choose a smaller epsilon, a larger delta, or fewer rounds",
        )


def _split(variance: int) -> tuple[int, Fraction, Fraction]:
    """B = floor((v / 6.25)^(1/4)), v0 = 6.25 b^2, and v1 = (v - v0) / b^2."""
    step = isqrt(isqrt(4 * variance // 25))
    fine = Fraction(25 * step**2, 4)
    return step, fine, (variance - fine) / step**2


def _require_variance(variance: int, most: int, fix: str) -> None:
    if variance < LEAST_VARIANCE:
        raise ConfigurationError(
            f"a noise share of variance {variance} is below {LEAST_VARIANCE}: its grid is too coarse for it",
            fix="choose a larger scale, or more noise",
        )
    if variance > most:
        raise ConfigurationError(f"a noise share of variance {variance} is above {most}, the most drawn here", fix=fix)
