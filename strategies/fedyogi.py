"""FedYogi: FedAdam whose second moment changes by a step that does not depend on how large it has grown."""

from typing import Literal

import numpy as np

from federation.job import StrategySettings
from federation.vector import F64
from strategies.moments import Decay, Rate, Tau, adaptive
from strategies.strategy import SumStrategy

__all__ = ["Settings", "make"]


class Settings(StrategySettings):
    """FedYogi's choices, called as in the paper, whose experiments fix both betas and tau at these defaults.

    Attributes:
        learning_rate: eta. The paper tunes it per task; 0.1 moves a coordinate by about 0.1 a round.
        beta1: Decay of the first moment.
        beta2: 1 - beta2 is the rate at which the second moment follows the squared update.
        tau: Degree of adaptivity.
    """

    name: Literal["fedyogi"]
    learning_rate: Rate = 0.1
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    tau: Tau = 1e-3


def make(settings: Settings) -> SumStrategy:
    """FedYogi (Reddi et al. 2021, ICLR, Algorithm 2)."""
    beta2 = settings.beta2

    def second_moment(v: F64, squared: F64) -> F64:
        return v - (1 - beta2) * squared * np.sign(v - squared)

    return adaptive(eta=settings.learning_rate, beta1=settings.beta1, tau=settings.tau, second_moment=second_moment)
