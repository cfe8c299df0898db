"""FedAvgM: the server moves along a velocity that gathers the mean updates of all rounds."""

from typing import Annotated, Literal

from pydantic import Field

from federation.job import StrategySettings
from federation.vector import F64
from strategies.strategy import ServerStep, State, SumStrategy

__all__ = ["Settings", "make"]


class Settings(StrategySettings):
    """FedAvgM's choices.

    Attributes:
        momentum: Share of the velocity that is kept from round to round; 0 is FedAvg.
        learning_rate: Server step; 1 in the paper. A steady update moves the model by learning_rate / (1 - momentum)
            times itself in the end, so lower it as momentum nears 1.
    """

    name: Literal["fedavgm"]
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    learning_rate: Annotated[float, Field(gt=0)] = 1.0


def make(settings: Settings) -> SumStrategy:
    """FedAvgM (Hsu, Qi and Brown 2019, arXiv:1909.06335, section 4.3); v points where the model goes."""

    def formula(update: F64, state: State) -> tuple[F64, State]:
        velocity = settings.momentum * state["velocity"] + update
        return settings.learning_rate * velocity, {"velocity": velocity}

    return ServerStep(formula, memory={"velocity": 0.0})
