"""Coordinate-wise trimmed mean: of each value the extreme groups at both ends are left out, the others averaged."""

from math import ceil
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from federation.job import StrategySettings
from federation.vector import F64
from strategies.fedavg import average
from strategies.strategy import GroupStep, GroupStrategy, Rule, ServerStep

__all__ = ["Settings", "make", "trimmed_mean"]

_ROUNDING = 1e-9
"""What beta * groups may be above a whole number and still mean it: 0.1 * 30 is a little more than 3."""


class Settings(StrategySettings):
    """The trimmed mean's choices.

    Attributes:
        beta: Share of the groups that is left out at each end, and so the share that may send anything. It is rounded
            up to whole groups, so one at least is left out; where that would leave no group, the median is taken.
        learning_rate: Server step; 1 as in FedAvg.
    """

    fewest_groups: ClassVar[int] = 3
    name: Literal["trimmed_mean"]
    beta: Annotated[float, Field(gt=0, lt=0.5)] = 0.2
    learning_rate: Annotated[float, Field(gt=0)] = 1.0


def trimmed_mean(beta: float) -> Rule:
    """The beta-trimmed mean of each column [size].

    Yin et al. 2018 (ICML, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", Definition 2).
    """

    def rule(group_means: F64) -> F64:
        groups = len(group_means)
        out = min(ceil(beta * groups - _ROUNDING), (groups - 1) // 2)
        kept = np.sort(group_means, axis=0)[out : groups - out]
        total = kept[0].copy()
        for row in kept[1:]:  # numpy's own sum rounds differently where a block has one column
            total += row
        mean: F64 = total / len(kept)
        return mean

    return rule


def make(settings: Settings) -> GroupStrategy:
    """FedAvg over the coordinate-wise trimmed mean (Yin et al. 2018, ICML, Algorithm 1, Option II)."""
    return GroupStep(trimmed_mean(settings.beta), ServerStep(average(settings.learning_rate)))
