"""What noise a plan means: each site's share, and what a round moves at most, in integers, from the plan and |P| alone.

Sites draw their shares by it, their ledgers are charged by it, and a guarantee is stated by it: the three cannot differ
(section 7, unit "site").
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

from federation.errors import LocalProtocolError
from privacy.differential_privacy import sampler
from privacy.differential_privacy.sampler import Sampler
from privacy.differential_privacy.site_level import SiteMechanism, rdp_ddgauss, rdp_skellam, share_sum_distance
from privacy.secure_aggregation.rostersum.terms import DpCodec, Mechanism, Noise, Plan, Unit

__all__ = ["Divergence", "RoundNoise", "mechanism_of", "round_noise", "sampler_of"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """What an opened sum costs a site: all that the accounting of its mechanism asks for, in integer units.

    Attributes:
        law: Of a share.
        total: Variance of the shares that count, together, in one coordinate: n_eff v.
        squared: D^2: the squares of what one site adds, its noise apart, add up to at most this.
        l1: The magnitudes of the same add up to at most this.
        dimension: Coordinates.
        tau: How far the sum of the shares is from one discrete Gaussian.
    """

    law: Mechanism
    total: int
    squared: int
    l1: float
    dimension: int
    tau: float

    def renyi(self, order: int) -> float:
        """The cost of one sum as Rényi DP at an integer order from 2 on."""
        match self.law:
            case Mechanism.DDGAUSS:
                moved = {"variance": self.total, "squared": self.squared, "l1": self.l1}
                return rdp_ddgauss(order, **moved, dimension=self.dimension, tau=self.tau)
            case Mechanism.SKELLAM:
                return rdp_skellam(order, variance=self.total, squared=self.squared, l1=self.l1)
            case _:
                assert_never(self.law)


@dataclass(frozen=True, slots=True)
class RoundNoise:
    """The noise of one opened sum, in integer units.

    Attributes:
        law: Of a share.
        variance: v, of each site's share in each coordinate.
        shares: n_eff, the shares that nobody who looks at the sum knows.
        mechanism: How an update becomes integers.
    """

    law: Mechanism
    variance: int
    shares: int
    mechanism: SiteMechanism

    @property
    def squared(self) -> int:
        """D^2 of the ledger: the squares of what one site adds, its noise apart, add up to at most this."""
        return self.mechanism.squared

    @property
    def divergence(self) -> Divergence:
        """What the opened sum costs a site."""
        return Divergence(
            self.law,
            self.shares * self.variance,
            self.squared,
            self.mechanism.l1,
            self.mechanism.dimension,
            share_sum_distance(self.variance, self.shares),
        )

    @property
    def sampler(self) -> Sampler:
        """What draws a share, as `sampler_of`."""
        return sampler_of(self.law, self.variance)


def mechanism_of(plan: Plan) -> SiteMechanism:
    """How an update becomes integers under a plan that protects a site, and the sum an update again.

    Raises:
        LocalProtocolError: The plan protects something else, or nothing.
        ConfigurationError: Its numbers make no mechanism.
    """
    return _read(plan)[0]


def round_noise(plan: Plan, members: int, c_max: int) -> RoundNoise:
    """The noise of a round of a plan that protects a site, over `members` sites of which `c_max` may collude.

    Raises:
        LocalProtocolError: The plan protects something else, or nothing.
        ConfigurationError: Fewer than two shares count, or its numbers make no mechanism.
    """
    mechanism, noise = _read(plan)
    shares = sampler.noise_shares(members, c_max)
    return RoundNoise(noise.mechanism, mechanism.share_variance(shares), shares, mechanism)


def _read(plan: Plan) -> tuple[SiteMechanism, Noise]:
    if plan.dp is None or plan.dp.unit is not Unit.SITE or not isinstance(plan.codec, DpCodec):
        raise LocalProtocolError(f"plan {plan.plan_id} does not protect a site, and was taken for one that does")
    return SiteMechanism(plan.codec.dimension, plan.dp.clip, plan.dp.scale, plan.dp.z), plan.dp


@lru_cache(maxsize=4)
def sampler_of(law: Mechanism, variance: int) -> Sampler:
    """What draws a share of this law; its tables are made once in a process, in up to two seconds.

    Raises:
        ConfigurationError: The variance is below 64, or more than is drawn.
    """
    match law:
        case Mechanism.DDGAUSS:
            return sampler.gaussian(variance)
        case Mechanism.SKELLAM:
            return sampler.skellam(variance)
        case _:
            assert_never(law)
