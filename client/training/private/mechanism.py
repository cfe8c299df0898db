"""The public numbers of a job's private steps, and how a clipped sum becomes integers with noise, and a mean gradient.

The DP text's section 2 at level `record-site`: one site, which adds all of the noise by itself (n_eff = 1), each local
step being a round.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, inf
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from federation.errors import ConfigurationError
from privacy.differential_privacy.calibration import require_delta
from privacy.differential_privacy.record import (
    Dither,
    Exact,
    Grid,
    beta_of,
    finest_grid,
    share_variance,
)
from privacy.differential_privacy.rounding import dithered
from privacy.differential_privacy.sampler import gaussian, require_close
from privacy.differential_privacy.self_test import self_test
from privacy.differential_privacy.stream import PART

if TYPE_CHECKING:
    from collections.abc import Iterable

    from client.training.private.plan import Plan
    from federation.vector import F32, F64
    from privacy.differential_privacy.sampler import Sampler
    from privacy.differential_privacy.stream import Draw
    from privacy.differential_privacy.table import I64

__all__ = ["Mechanism", "Terms"]

_LARGE = 100_000
"""Parameters from which on a site's integer sums are bounded by an eighth of its batch: the text's rule."""

_FINE = 1 << 16
"""The finest s C of the dither path. A finer one changes D by less than a thousandth below 2 million parameters, and
its noise tables leave the processor's cache, which doubles the cost of noise. Nothing else depends on it."""


_PIECE = 2 * PART
"""Values that go all the way from a sum to a mean while they are in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a job says of its private steps, before the first of them.

    Attributes:
        clip: C, the largest L2 norm of one record's gradient.
        rate: q, with which each record is in a step.
        n_pub: The public number of records: what a sum is divided by is rate * n_pub, whatever the batch was.
        z: The noise multiplier.
        epsilon: What the noise was calibrated for.
        delta: The same.
        steps: T, of all rounds together.
        path: How gradients become integers: one by one, which is exact, or their sum, which is quick.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    clip: float
    rate: float
    n_pub: int
    z: float
    epsilon: float
    delta: float
    steps: int
    path: Literal["exact", "dither"] = "dither"

    def __post_init__(self) -> None:
        """Refuses what no step can be made of."""
        if not (2.0**-30 <= self.clip < inf and 0 < self.rate <= 1 and 0 < self.z < inf and self.steps >= 1):
            raise ConfigurationError(
                f"private steps with clip {self.clip}, rate {self.rate}, noise multiplier {self.z} and {self.steps} "
                "steps cannot be made",
                fix="choose a positive clip, a rate above 0 and at most 1, a positive z, and at least one step",
            )
        if not 0 < self.epsilon < inf:
            raise ConfigurationError(f"epsilon = {self.epsilon} is no budget", fix="choose a positive number")
        require_delta(self.delta, self.n_pub)

    @property
    def expected(self) -> float:
        """Records of a step, on average and in public."""
        return self.rate * self.n_pub

    def mechanism(self, plan: Plan) -> Mechanism:
        """The integers and the noise of these steps, as every site finds them from the job's terms and plan.

        Raises:
            ConfigurationError: They have no grid, or the noise sampler would change delta.
        """
        exact = self.path == "exact"
        rounding = Exact() if exact else Dither(plan.values, beta_of(self.delta, self.steps), plan.gamma)
        reach = Fraction(plan.most, 8 if plan.values > _LARGE else 1)
        grid = finest_grid(rounding, clip=self.clip, z=self.z, sites=1, shares=1, reach=reach)
        if not exact and grid.scale * self.clip > _FINE:
            grid = Grid(rounding, self.clip, _FINE / self.clip, ceil(reach * _FINE))
        variance = share_variance(self.z, grid.squared, 1)
        grid.require_room(1, variance)
        sampler = gaussian(variance)
        require_close(sampler, epsilon=self.epsilon, delta=self.delta, rounds=self.steps, values=plan.values, sites=1)
        return Mechanism(self, grid, variance, sampler)


@dataclass(frozen=True, slots=True)
class Mechanism:
    """What becomes of a step's clipped sum.

    Attributes:
        terms: The job's.
        grid: The integers; `grid.squared` is D^2, for the ledger's event.
        variance: v of the noise, for the same event; n_eff is 1.
        sampler: The noise's law.
    """

    terms: Terms
    grid: Grid
    variance: int
    sampler: Sampler = field(repr=False, compare=False)  # its law is the variance's

    def tested(self, draw: Draw = os.urandom) -> Self:
        """This mechanism, once its noise has passed the self-test.

        Raises:
            LocalProtocolError: It does not look like its law: no step may be made.
        """
        self_test(self.sampler, draw)
        return self

    def mean(self, total: F64, out: F32, draw: Draw = os.urandom) -> None:
        """Fills `out` with the noisy mean gradient of a clipped sum [values]: dither, clamp, noise, public denominator.

        **Formal guarantee.** `out` is a function of integers that one record moves by at most D, and of discrete
        Gaussian noise of variance v on every one of them, whose randomness is the operating system's.
        """
        pieces = (total[start : start + _PIECE] for start in range(0, total.size, _PIECE))
        self._finish((part for piece in pieces for part in dithered(piece, self.grid.scale, draw)), out, draw)

    def mean_of_integers(self, parts: Iterable[I64], out: F32, draw: Draw = os.urandom) -> None:
        """The same of a sum that is of integers already, given in parts that this may change."""
        self._finish(parts, out, draw)

    def _finish(self, parts: Iterable[I64], out: F32, draw: Draw) -> None:
        start = 0
        pieces = (part[each : each + _PIECE] for part in parts for each in range(0, part.size, _PIECE))
        for words in self.grid.encode(pieces, self.sampler.share(draw)):
            for values in self.grid.decode(words, self.terms.rate, self.terms.n_pub):
                np.copyto(out[start : start + values.size], values, casting="same_kind")
                start += values.size
