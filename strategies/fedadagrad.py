"""FedAdagrad: the more a coordinate has moved since the first round, the less it moves now."""

from typing import Literal

from federation.job import StrategySettings
from federation.vector import F64
from strategies.moments import Decay, Rate, Tau, adaptive
from strategies.strategy import SumStrategy

__all__ = ["Settings", "make"]


class Settings(StrategySettings):
    """FedAdagrad's choices, called as in the paper.

    Attributes:
        learning_rate: eta. The paper tunes it per task; 0.1 moves a coordinate by about 0.1 in the first round.
        beta1: Decay of the first moment; 0, as Adagrad has no momentum.
        tau: Degree of adaptivity.
    """

    name: Literal["fedadagrad"]
    learning_rate: Rate = 0.1
    beta1: Decay = 0.0
    tau: Tau = 1e-3


def make(settings: Settings) -> SumStrategy:
    """FedAdagrad (Reddi et al. 2021, ICLR, Algorithm 2)."""

    def second_moment(v: F64, squared: F64) -> F64:
        return v + squared

    return adaptive(eta=settings.learning_rate, beta1=settings.beta1, tau=settings.tau, second_moment=second_moment)
