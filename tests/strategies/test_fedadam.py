import math
from collections.abc import Callable

import numpy as np
import pytest

from strategies.fedadam import Settings, make

Rounds = list[list[float]]


def reference(rounds: Rounds, eta: float, beta1: float, beta2: float, tau: float) -> Rounds:
    """Reddi et al. 2021, Algorithm 2, the line of FedAdam, value by value in Python's floats."""
    size = len(rounds[0])
    x, m, v = [0.0] * size, [0.0] * size, [tau * tau] * size
    models = []
    for update in rounds:
        for k, delta in enumerate(update):
            m[k] = beta1 * m[k] + (1 - beta1) * delta
            v[k] = beta2 * v[k] + (1 - beta2) * delta**2
            x[k] = float(np.float32(x[k] + eta * m[k] / (math.sqrt(v[k]) + tau)))
        models.append(list(x))
    return models


@pytest.mark.parametrize(("eta", "beta1", "beta2", "tau"), [(0.1, 0.9, 0.99, 1e-3), (0.5, 0.0, 0.3, 0.1)])
def test_it_is_the_papers_formula(
    play: Callable[..., Rounds], rounds: Rounds, eta: float, beta1: float, beta2: float, tau: float
) -> None:
    """Every round's model is the slow reference's, at the defaults and away from them."""
    settings = Settings(name="fedadam", learning_rate=eta, beta1=beta1, beta2=beta2, tau=tau)
    expected = reference(rounds, eta, beta1, beta2, tau)
    np.testing.assert_allclose(play(settings, rounds), expected, rtol=1e-6, atol=1e-9)


def test_the_defaults_are_documented() -> None:
    """The defaults are those that the settings' docstring tells."""
    assert Settings(name="fedadam").model_dump() == {
        "name": "fedadam",
        "learning_rate": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "tau": 1e-3,
    }


def test_the_first_step_by_hand() -> None:
    """From update 1: m = 0.1, v = 0.99e-6 + 0.01, so x = 0.1 * 0.1 / (sqrt(v) + 0.001); no bias correction."""
    strategy = make(Settings(name="fedadam"))
    moved, state = strategy.step(np.zeros(1, np.float32), np.ones(1), strategy.initial(1))
    assert state["first_moment"][0] == pytest.approx(0.1)
    assert state["second_moment"][0] == pytest.approx(0.01000099)
    assert moved[0] == pytest.approx(0.01 / (math.sqrt(0.01000099) + 0.001))
