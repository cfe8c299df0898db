"""Record-level sums as integers: the grid and its sensitivity, both ways of rounding, clamp, noise share and decoding.

The DP text's section 2, steps 2 to 7, for one site and one attempt:

    exact    each record's gradient -> clip -> truncate -> add                 |
    dither   each record's gradient -> clip -> add as floats -> round the sum  |-> clamp -> add a noise share -> words

**Formal guarantee.** One record more or less moves the integers before the noise by a vector whose squared L2 norm is
at most `Grid.squared`, whatever the other records are, in what order or chunks they are added, and at every site: with
`Exact` always, with `Dither` except with probability `beta` over its own randomness, which the round adds to delta.
The clamp is public and moves no two vectors apart.

| edge | what happens |
| --- | --- |
| a gradient with NaN or infinity, or too long for binary64 | counts as 0, silently |
| a gradient of zeros or denormals | truncated like any other |
| no records at all | zeros, and noise |
| an integer sum beyond the bound | set to the bound, silently |
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf, isqrt, log, nextafter, sqrt

import numpy as np
import numpy.typing as npt

from federation.errors import ConfigurationError, LocalProtocolError
from federation.vector import BLOCK, F64
from privacy.crypto.masks import Words
from privacy.differential_privacy.sampler import Share
from privacy.differential_privacy.table import I64

__all__ = [
    "CHUNK",
    "GAMMA",
    "RING",
    "Dither",
    "Exact",
    "ExactSum",
    "Grid",
    "Rounding",
    "beta_of",
    "finest_grid",
    "gamma_of_chunks",
    "share_variance",
]

RING = 32
"""Bits of a word: the widest sums that a grid is chosen for."""

GAMMA = 2.0**-20
"""What floating point adds to one record's part of a clipped sum, in clip norms: accumulated in float64."""

CHUNK = 64
"""Records at most that are summed in float32 before they are added in float64 (`gamma_of_chunks`)."""

_INSIDE = 1 - 2.0**-20
"""Gradients are clipped a hair within C, so that no rounding of floats carries them beyond it."""

_MOST = (1 << RING - 1) - 1
_TAILS = 12
"""Standard deviations of the opened sum's noise that have room: wrapping has probability exp(-72) a coordinate."""

_Gradients = npt.NDArray[np.float32] | F64


def gamma_of_chunks(records: int) -> float:
    """What floating point adds, in clip norms, where `CHUNK` records at a time are summed in float32."""
    return records * 2.0**-17


def beta_of(delta: float, rounds: int) -> float:
    """The probability that one round's dither moves a record's part too far; delta pays for it in each round."""
    return delta / (1000 * rounds)


@dataclass(frozen=True, slots=True)
class Exact:
    """Each record's gradient becomes integers before it is added."""

    def squared_sensitivity(self, scale: float, clip: float) -> int:
        """D^2 = floor(s C)^2."""
        return floor(scale * clip) ** 2


@dataclass(frozen=True, slots=True)
class Dither:
    """The sum of `values` floats becomes integers, by adding u uniform in [0, 1) and rounding down.

    Attributes:
        values: d, the sum's length.
        beta: With what probability, over u, one record may move the integers by more than D.
        gamma: What floating point adds to a record's part, in clip norms.
    """

    values: int
    beta: float
    gamma: float = GAMMA

    def __post_init__(self) -> None:
        """Refuses numbers that bound nothing."""
        if not (self.values >= 1 and 0 < self.beta < 1 and 0 <= self.gamma < inf):
            raise ConfigurationError(
                f"dither of {self.values} values with beta {self.beta} and gamma {self.gamma} has no bound",
                fix="choose at least one value, beta within (0, 1), and a finite gamma of at least 0",
            )

    def squared_sensitivity(self, scale: float, clip: float) -> int:
        """D^2 = (s C')^2 + d/4 + sqrt(2 ln(1/beta)) (s C' + sqrt(d)/2), C' = C (1 + gamma), and not above D^2 + 1.

        Hoeffding's inequality for the difference of two sums rounded with the same u (the DP text, section 3).
        """
        reach = Fraction(scale) * Fraction(clip) * (1 + Fraction(self.gamma))
        deviation = Fraction(sqrt(-2 * log(self.beta)) * (1 + 2.0**-40))  # above the real number
        root = Fraction(isqrt(self.values << 64) + 1, 1 << 32)
        return ceil(reach**2 + Fraction(self.values, 4) + deviation * (reach + root / 2))


Rounding = Exact | Dither


def share_variance(z: float, squared: int, shares: int) -> int:
    """V = (z^2 D^2 + 4) / n_eff, rounded up: the variance of each of `shares` honest sites' noise shares.

    The 4 pays for the rounding to integers, so that the opened sum is a post-processing of continuous Gaussian noise
    of multiplier sqrt(n_eff v - 4) / D >= z.
    """
    return ceil((Fraction(z) ** 2 * squared + 4) / shares)


@dataclass(frozen=True, slots=True)
class Grid:
    """The integers that a job's sums are made of: public, and fixed before its first round.

    Attributes:
        rounding: How sums become integers.
        clip: C, the largest L2 norm of one record's gradient.
        scale: s, integers for one unit of a gradient.
        bound: B, the largest magnitude of a coordinate of a site's integer sum.

    Raises:
        ConfigurationError: The numbers are not positive, or their sums do not fit a ring of 32 bits.
    """

    rounding: Rounding
    clip: float
    scale: float
    bound: int

    def __post_init__(self) -> None:
        """Refuses what no sum can be made of."""
        reach = self.scale * self.clip
        if not (self.clip > 0 and self.scale > 0 and 1 <= reach <= _MOST and 1 <= self.bound <= _MOST):
            raise ConfigurationError(
                f"a grid of clip {self.clip}, scale {self.scale} and bound {self.bound} holds no gradient",
                fix="choose positive numbers with 1 <= scale * clip <= 2^31 - 1 and 1 <= bound <= 2^31 - 1",
            )

    @property
    def squared(self) -> int:
        """D^2: one record moves a site's integers by at most D in L2 norm. Squared norms of integers are integers."""
        return self.rounding.squared_sensitivity(self.scale, self.clip)

    @property
    def sensitivity(self) -> int:
        """The least integer D."""
        return isqrt(self.squared - 1) + 1

    def require_room(self, sites: int, variance: int) -> None:
        """Accepts sums of so many sites, each with noise of this variance, as they practically never wrap around.

        A sum that does costs accuracy, and no privacy.

        Raises:
            ConfigurationError: They do not fit.
        """
        if not self._has_room(sites, variance):
            raise ConfigurationError(
                f"the sum of {sites} sites, each within {self.bound} and with noise of variance {variance}, "
                f"wraps around a ring of {RING} bits",
                fix="choose a smaller scale or bound, or less noise",
            )

    def encode(self, parts: Iterable[I64], share: Share) -> Iterator[Words]:
        """A site's integer sum, in parts that this may change: clamped to +-bound, with its noise share, as words."""
        return share.noised((np.clip(part, -self.bound, self.bound, out=part) for part in parts), RING)

    def decode(self, total: Words, rate: float, n_pub: int) -> Iterator[F64]:
        """The mean gradient that an opened sum [d] stands for, in blocks: its integers over s * rate * n_pub.

        The denominator is public: neither the number of records nor that of the batch.
        """
        values = total.view(f"<i{total.itemsize}")
        for start in range(0, values.size, BLOCK):
            yield values[start : start + BLOCK] / (self.scale * rate * n_pub)

    def _has_room(self, sites: int, variance: int) -> bool:
        left = _MOST - sites * self.bound
        return left >= 0 and _TAILS**2 * sites * variance <= left**2


def finest_grid(rounding: Rounding, *, clip: float, z: float, sites: int, shares: int, reach: Fraction) -> Grid:
    """The grid of the largest power of two s C whose sums over `sites` sites have room, `shares` of them honest.

    Args:
        rounding: How sums become integers.
        clip: C.
        z: The noise multiplier.
        sites: The most sites of an opened sum.
        shares: n_eff of the fewest sites that a sum may have: they add the most noise each.
        reach: B in clip norms: the largest plausible batch of a site, or an eighth of that for a large model.

    Raises:
        ConfigurationError: Not even s C = 1 has room.
    """
    for power in range(RING - 2, -1, -1):
        scale = _scale(1 << power, clip)
        bound = ceil(reach * (1 << power))
        if bound <= _MOST:
            grid = Grid(rounding, clip, scale, bound)
            if grid._has_room(sites, share_variance(z, grid.squared, shares)):  # noqa: SLF001 - a grid's own file
                return grid
    raise ConfigurationError(
        f"sums of {sites} sites with batches of {float(reach):g} clip norms and noise multiplier {z:g} have no grid",
        fix="choose smaller batches, or a smaller noise multiplier",
    )


def _scale(reach: int, clip: float) -> float:
    """S with s C >= reach in binary64, and hardly above: below it D would be reach - 1, and clipped gradients lost."""
    scale = reach / clip
    while scale * clip < reach:
        scale = nextafter(scale, inf)
    return scale


class ExactSum:
    """The integers of a batch's gradients [d], each clipped and truncated by itself: exact, in any order and chunks.

    Attributes:
        total: The sum so far; zeros before the first record.
    """

    def __init__(self, size: int, grid: Grid) -> None:
        self.total: I64 = np.zeros(size, np.int64)
        self._grid = grid
        self._rows = max(1, BLOCK // size)

    def add(self, gradients: _Gradients) -> None:
        """Adds the gradients [m, d] of m records, m being 0 or more. They are left as they are.

        Raises:
            LocalProtocolError: They have another shape.
        """
        if gradients.ndim != 2 or gradients.shape[1] != self.total.size:  # noqa: PLR2004 - records by values
            raise LocalProtocolError(f"gradients of shape {gradients.shape} were added to {self.total.size} values")
        for start in range(0, len(gradients), self._rows):
            self._add(np.array(gradients[start : start + self._rows], np.float64))

    def parts(self) -> Iterator[I64]:
        """The sum in fresh blocks, to be encoded for one attempt."""
        for start in range(0, self.total.size, BLOCK):
            yield self.total[start : start + BLOCK].copy()

    def _add(self, rows: F64) -> None:
        with np.errstate(all="ignore"):  # infinite and vanishing norms are meant
            norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
            factors = np.minimum(1, self._grid.clip * _INSIDE / norms) * self._grid.scale
        rows[~np.isfinite(norms)] = 0
        factors[~np.isfinite(norms)] = 0
        rows *= factors[:, np.newaxis]
        integers = np.trunc(rows, out=rows).astype(np.int64)
        integers[np.einsum("ij,ij->i", integers, integers) > self._grid.squared] = 0
        self.total += integers.sum(axis=0)
