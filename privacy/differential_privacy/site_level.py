"""Site-level privacy: clip, rotate, round within a norm, add a noise share; and what the opened sum costs, as RDP.

RosterSum's section 7, unit "site" (Kairouz, Liu and Steinke 2021; Agarwal, Kairouz and Liu 2021).

**Formal guarantee.** Whatever a site's update is, its integers before the noise have a squared L2 norm of at most
`SiteMechanism.squared`, compared as integers, and an L1 norm of at most `l1`: replacing the site's contribution by
zero moves the opened sum by no more. The rotation's key may be known to everybody, and even chosen.

| edge | what happens |
| --- | --- |
| an update with NaN or infinity | counts as 0, and is noised |
| an update of zeros | noise alone |
| rounding that never fits | rounded towards zero after 1000 tries, which fits |
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, exp, floor, inf, log, pi, sqrt

import numpy as np
import numpy.typing as npt

from federation.errors import ConfigurationError, LocalProtocolError
from federation.vector import BLOCK, F64
from privacy.crypto.masks import Words
from privacy.differential_privacy.rotation import LEAST, rotate, unrotate
from privacy.differential_privacy.rounding import round_within
from privacy.differential_privacy.stream import Draw
from privacy.differential_privacy.table import I64

__all__ = ["BETA", "SiteMechanism", "rdp_ddgauss", "rdp_skellam", "share_sum_distance"]

BETA = exp(-0.5)
"""Rounding fits at least once in 1 / (1 - beta) = 2.5 tries."""

_FLATNESS = 4
"""k of the modulus rule: half the ring holds so many standard deviations of a coordinate of the opened sum."""

_MOST_REACH = 1 << 31
"""s C + sqrt(D), below which squared norms are sums of 64 bits."""

_INSIDE = 1 - 2.0**-20
"""Updates are clipped a hair within C, so that no rounding of floats keeps them from fitting after truncation."""


@dataclass(frozen=True, slots=True)
class SiteMechanism:
    """How one site's update [d] becomes integers [D], D >= d, and the sum of many an update again.

    Attributes:
        dimension: D; a power of two from 8 on where vectors are rotated.
        clip: C, the largest L2 norm of an update.
        scale: s, integers for one unit.
        z: The noise multiplier.
        rotated: Whether vectors are rotated: updates are, statistics are not.
        beta: How seldom one rounding needs fail to fit; 0 allows for the longest there is.

    Raises:
        ConfigurationError: The numbers make no mechanism.
    """

    dimension: int
    clip: float
    scale: float
    z: float
    rotated: bool = True
    beta: float = BETA

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        size = self.dimension
        if self.rotated and (size < LEAST or size & (size - 1)):
            raise ConfigurationError(
                f"a vector of {size} values cannot be rotated", fix=f"pad it to a power of two of at least {LEAST}"
            )
        numbers = self.clip, self.scale, self.z
        sound = size >= 1 and all(0 < each < inf for each in numbers) and 0 <= self.beta < 1
        if not sound or self.reach + sqrt(size) >= _MOST_REACH:
            raise ConfigurationError(
                f"clip {self.clip}, scale {self.scale}, z {self.z}, beta {self.beta}: no mechanism for {size} values",
                fix="choose positive numbers, beta within [0, 1), and scale * clip + sqrt(values) below 2^31",
            )

    @property
    def reach(self) -> float:
        """S C."""
        return self.scale * self.clip

    @property
    def squared(self) -> int:
        """The most that the integers' squares add up to: Delta2^2, rounded down since such sums are integers."""
        root = sqrt(self.dimension)
        longest = (self.reach + root) ** 2
        if self.beta == 0:
            return floor(longest)
        typical = self.reach**2 + self.dimension / 4 + sqrt(-2 * log(self.beta)) * (self.reach + root / 2)
        return floor(min(longest, typical))

    @property
    def l1(self) -> float:
        """Delta1: the most that the integers' magnitudes add up to."""
        return sqrt(self.squared) * min(sqrt(self.dimension), sqrt(self.squared))

    def share_variance(self, shares: int) -> int:
        """(s z C)^2 / n_eff, rounded up: the variance of each of `shares` honest sites' noise shares."""
        return ceil((Fraction(self.scale) * Fraction(self.z) * Fraction(self.clip)) ** 2 / shares)

    def require_room(self, sites: int, shares: int, ring: int) -> None:
        """Accepts a ring whose words hold 4 standard deviations of a coordinate of the sum of `sites` sites.

        The modulus rule of section 7; what is not rotated can stand in one coordinate, so its D counts as 1 there.

        Raises:
            ConfigurationError: The ring has fewer bits than that takes.
        """
        spread = (self.reach * sites) ** 2 / (self.dimension if self.rotated else 1)
        spread += (1 / 4 + self.share_variance(shares)) * sites
        if 2.0**ring < 2 * _FLATNESS * sqrt(spread):
            raise ConfigurationError(
                f"the sum of {sites} sites with its noise wraps around a ring of {ring} bits",
                fix="choose a smaller scale or a wider ring",
            )

    def quantise(self, update: npt.NDArray[np.floating], key: bytes, draw: Draw = os.urandom) -> Iterator[I64]:
        """The update [d], d <= D, as the integers [D] of one attempt, in blocks; it is left as it is.

        Clipped, scaled, rotated by `key` (RosterSum's H("rotation", ctx)), and rounded within `squared` with
        randomness that is fresh for this call.

        Raises:
            LocalProtocolError: The update is longer than D.
        """
        if update.ndim != 1 or update.size > self.dimension:
            raise LocalProtocolError(f"an update of shape {update.shape} was made integers of {self.dimension} values")
        work = np.zeros(self.dimension)
        work[: update.size] = update
        with np.errstate(over="ignore", invalid="ignore"):  # a norm without bound is met below
            norm = sqrt(float(np.einsum("i,i->", work, work)))
        if norm < inf:
            work *= min(1.0, self.clip * _INSIDE / norm if norm else 1.0) * self.scale
        else:  # or NaN
            work[:] = 0
        if self.rotated:
            rotate(work, key)
        integers = round_within(work, self.squared, draw)
        return (integers[start : start + BLOCK] for start in range(0, self.dimension, BLOCK))

    def decode(self, total: Words, key: bytes) -> F64:
        """The sum of updates [D] that an opened sum [D] stands for: rotated back and divided by the scale.

        Raises:
            LocalProtocolError: The sum has another length.
        """
        if total.shape != (self.dimension,):
            raise LocalProtocolError(f"a sum of shape {total.shape} was decoded as {self.dimension} values")
        values = total.view(f"<i{total.itemsize}").astype(np.float64)
        if self.rotated:
            unrotate(values, key)
        values /= self.scale
        return values


def share_sum_distance(share: float, shares: int) -> float:
    """tau: the sum of `shares` discrete Gaussians of variance `share` is one within exp(+-tau) a coordinate.

    Kairouz, Liu and Steinke 2021, theorem 1.
    """
    return 10 * sum(exp(-2 * pi**2 * share * k / (k + 1)) for k in range(1, shares))


def rdp_skellam(order: int, *, variance: float, squared: float, l1: float) -> float:
    """RDP at an integer order of one opened sum under Skellam noise of total variance `variance`, in integer units.

    Agarwal, Kairouz and Liu 2021, theorem 3.5; `squared` is Delta2^2 and `l1` Delta1.
    """
    more = min(((2 * order - 1) * squared + 6 * l1) / (4 * variance**2), 3 * l1 / (2 * variance))
    return order * squared / (2 * variance) + more


def rdp_ddgauss(order: float, *, variance: float, squared: float, l1: float, dimension: int, tau: float) -> float:
    """RDP at one order of one opened sum under distributed discrete Gaussian noise of total variance `variance`.

    Kairouz, Liu and Steinke 2021, theorem 1; `tau` is `share_sum_distance` of the shares.
    """
    deviation = sqrt(variance)
    return min(
        order * squared / (2 * variance) + tau * dimension,
        order / 2 * (squared / variance + 2 * l1 * tau / deviation + tau**2 * dimension),
        order / 2 * (sqrt(squared) / deviation + sqrt(dimension) * tau) ** 2,
    )
