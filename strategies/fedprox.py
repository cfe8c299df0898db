"""FedProx: FedAvg whose sites are held near the global model by a proximal term in their loss."""

from typing import Annotated, Literal

from pydantic import Field

from federation.job import StrategySettings
from strategies.fedavg import average
from strategies.strategy import LocalTerms, ServerStep, SumStrategy

__all__ = ["Settings", "make"]


class Settings(StrategySettings):
    """FedProx' choices.

    Attributes:
        mu: Weight of the proximal term mu/2 * |w - w_global|^2; 0 is FedAvg. The paper tunes it per data set in
            {0.001, 0.01, 0.1, 1}: the more the sites' data differ, the more it helps.
        learning_rate: Server step; 1 in the paper.
    """

    name: Literal["fedprox"]
    mu: Annotated[float, Field(ge=0)] = 0.01
    learning_rate: Annotated[float, Field(gt=0)] = 1.0


def make(settings: Settings) -> SumStrategy:
    """FedProx (Li et al. 2020, MLSys, Algorithm 2): the sites carry the term, the server averages."""
    return ServerStep(average(settings.learning_rate), local=LocalTerms(proximal=settings.mu))
