"""FedAvg: the next model is the model plus the weighted mean of the updates."""

from typing import Annotated, Literal

from pydantic import Field

from federation.job import StrategySettings
from federation.vector import F64
from strategies.strategy import Formula, ServerStep, State, SumStrategy

__all__ = ["Settings", "average", "make"]


class Settings(StrategySettings):
    """FedAvg's choices.

    Attributes:
        learning_rate: Server step; at 1 the next model is the weighted mean of the local models, as in the paper.
    """

    name: Literal["fedavg"]
    learning_rate: Annotated[float, Field(gt=0)] = 1.0


def average(learning_rate: float) -> Formula:
    """The mean update times the server step (Reddi et al. 2021, ICLR, Algorithm 1, with SGD on the server)."""

    def formula(update: F64, state: State) -> tuple[F64, State]:
        return learning_rate * update, state

    return formula


def make(settings: Settings) -> SumStrategy:
    """FedAvg (McMahan et al. 2017, AISTATS, Algorithm 1)."""
    return ServerStep(average(settings.learning_rate))
