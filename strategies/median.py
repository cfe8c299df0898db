"""Coordinate-wise median: fewer than half of the groups, whatever they send, cannot move a value beyond the others'."""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from federation.job import StrategySettings
from federation.vector import F64
from strategies.fedavg import average
from strategies.strategy import GroupStep, GroupStrategy, ServerStep

__all__ = ["Settings", "make", "median"]


class Settings(StrategySettings):
    """The median's choices.

    Attributes:
        learning_rate: Server step; 1 as in FedAvg.
    """

    fewest_groups: ClassVar[int] = 3
    name: Literal["median"]
    learning_rate: Annotated[float, Field(gt=0)] = 1.0


def median(group_means: F64) -> F64:
    """The median of each column [size]; of an even number of groups, the mean of the middle two.

    Yin et al. 2018 (ICML, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", Definition 1).
    """
    ordered, groups = np.sort(group_means, axis=0), len(group_means)  # np.median takes two to four times as long
    middle: F64 = (ordered[(groups - 1) // 2] + ordered[groups // 2]) / 2
    return middle


def make(settings: Settings) -> GroupStrategy:
    """FedAvg over the coordinate-wise median (Yin et al. 2018, ICML, Algorithm 1, Option I)."""
    return GroupStep(median, ServerStep(average(settings.learning_rate)))
