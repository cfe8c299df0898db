"""What the adaptive strategies share: both moments of the mean update, and the step that they give."""

from collections.abc import Callable
from typing import Annotated

import numpy as np
from pydantic import Field

from federation.vector import F64
from strategies.strategy import ServerStep, State, SumStrategy

__all__ = ["Decay", "Rate", "Tau", "adaptive"]

Rate = Annotated[float, Field(gt=0)]
"""eta: about how far one round moves a coordinate whose updates keep their direction."""
Decay = Annotated[float, Field(ge=0, lt=1)]
"""beta1, beta2: share of a moment that is kept from round to round."""
Tau = Annotated[float, Field(gt=0)]
"""tau: degree of adaptivity; updates much below it move the model in proportion, those above it by eta."""


def adaptive(*, eta: float, beta1: float, tau: float, second_moment: Callable[[F64, F64], F64]) -> SumStrategy:
    """The step of Reddi et al. 2021 (ICLR, "Adaptive Federated Optimization", Algorithm 2).

    As in the paper there is no bias correction; v starts at tau^2, the least that the paper allows, and m at 0.

    Args:
        eta: Server learning rate.
        beta1: Decay of the first moment.
        tau: Degree of adaptivity.
        second_moment: From (v, update^2) to the next v; the line in which the strategies differ.
    """

    def formula(update: F64, state: State) -> tuple[F64, State]:
        m = beta1 * state["first_moment"] + (1 - beta1) * update
        v = second_moment(state["second_moment"], update**2)
        return eta * m / (np.sqrt(v) + tau), {"first_moment": m, "second_moment": v}

    return ServerStep(formula, memory={"first_moment": 0.0, "second_moment": tau**2})
