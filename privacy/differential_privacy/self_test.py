"""A sampler's trial at start: chi-square, variance and tails of its own draws, before it protects anything."""

import os
from math import sqrt

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, bdtrc, chdtrc, ndtr, ndtri

from federation.errors import LocalProtocolError, WhoActs
from federation.vector import F64
from privacy.differential_privacy.sampler import Sampler
from privacy.differential_privacy.stream import Draw
from privacy.differential_privacy.table import I64

__all__ = ["self_test"]

_DRAWS = 1 << 18
_BINS = 32
_CHANCE = 1e-12
"""How seldom each of the four checks may refuse a sampler that is right."""

_FAR = 3.5
_NEVER = 10
"""Standard deviations: 122 of the draws lie beyond the first, and none in 10^13 trials beyond the second."""


def self_test(sampler: Sampler, draw: Draw = os.urandom) -> None:
    """Accepts a sampler whose draws look like its law; a right one is refused once in 10^11 starts.

    It sees a variance that is wrong by 4 %, a table cut short or stuck, and randomness that repeats itself. It takes a
    tenth of a second.

    Raises:
        LocalProtocolError: The draws do not look so: nothing may be sent with this noise.
    """
    draws = np.empty(_DRAWS, np.int64)
    sampler.share(draw).fill(draws)
    _require("variance", _variance_chance(draws, sampler))
    _require("tails", _tail_chance(draws, sampler))
    _require("chi-square", _spread_chance(draws, sampler))
    _require("chi-square of remainders", _remainder_chance(draws, sampler.step))


def _require(check: str, chance: float) -> None:
    if not chance >= _CHANCE:
        raise LocalProtocolError(
            f"the noise sampler failed its self-test: {check} as odd as this has probability {chance:.2g}",
            fix="reinstall Parley with its libraries; if the test fails again, take this machine out of service",
            who=WhoActs.SITE,
        )


def _cdf(limits: npt.NDArray[np.integer], sampler: Sampler) -> F64:
    """P(X <= limit): a normal law's, with the first terms of Edgeworth's and of Euler and Maclaurin's expansions.

    What is left out is below 1e-5 at variance 64 and shrinks with its square.
    """
    place = (limits + 0.5) / sqrt(sampler.variance)
    density = np.exp(-(place**2) / 2) / sqrt(2 * np.pi)
    shape = sampler.excess * (place**3 - 3 * place) - place
    return np.asarray(ndtr(place) - density * shape / (24 * sampler.variance))


def _spread_chance(draws: I64, sampler: Sampler) -> float:
    middle = ndtri(np.arange(1, _BINS) / _BINS) * sqrt(sampler.variance)
    edges = np.unique(np.rint(middle).astype(np.int64))
    counts = np.bincount(np.searchsorted(edges, draws), minlength=edges.size + 1)
    return _chi_square(counts, np.diff(_cdf(edges, sampler), prepend=0, append=1))


def _remainder_chance(draws: I64, step: int) -> float:
    """Of the draws modulo the coarse table's factor, which are uniform within e^-100."""
    groups = min(step, _BINS)
    counts = np.bincount(np.mod(draws, step) * groups // step, minlength=groups)
    sizes = np.diff(-(-np.arange(groups + 1) * step // groups))  # group g: remainders r with r * groups // step == g
    return _chi_square(counts, sizes / step) if groups > 1 else 1.0


def _chi_square(counts: npt.NDArray[np.integer], chances: F64) -> float:
    expected = chances * _DRAWS
    return float(chdtrc(counts.size - 1, np.sum((counts - expected) ** 2 / expected)))


def _variance_chance(draws: I64, sampler: Sampler) -> float:
    found = float(np.mean((draws / sqrt(sampler.variance)) ** 2))
    deviation = sqrt((2 + sampler.excess / sampler.variance) / _DRAWS)
    return float(2 * ndtr(-abs(found - 1) / deviation))


def _tail_chance(draws: I64, sampler: Sampler) -> float:
    sizes = np.abs(draws) / sqrt(sampler.variance)
    if float(sizes.max()) > _NEVER:
        return 0.0
    limit = int(_FAR * sqrt(sampler.variance))
    chance = 2 * float(_cdf(np.array([-limit - 1]), sampler)[0])
    beyond = int(np.count_nonzero(np.abs(draws) > limit))
    return float(2 * min(bdtr(beyond, _DRAWS, chance), bdtrc(beyond - 1, _DRAWS, chance)))
