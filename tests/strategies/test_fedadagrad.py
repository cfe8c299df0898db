import math
from collections.abc import Callable

import numpy as np
import pytest

from strategies.fedadagrad import Settings

Rounds = list[list[float]]


def reference(rounds: Rounds, eta: float, beta1: float, tau: float) -> Rounds:
    """Reddi et al. 2021, Algorithm 2, the line of FedAdagrad, value by value in Python's floats."""
    size = len(rounds[0])
    x, m, v = [0.0] * size, [0.0] * size, [tau * tau] * size
    models = []
    for update in rounds:
        for k, delta in enumerate(update):
            m[k] = beta1 * m[k] + (1 - beta1) * delta
            v[k] = v[k] + delta**2
            x[k] = float(np.float32(x[k] + eta * m[k] / (math.sqrt(v[k]) + tau)))
        models.append(list(x))
    return models


@pytest.mark.parametrize(("eta", "beta1", "tau"), [(0.1, 0.0, 1e-3), (0.5, 0.9, 0.1)])
def test_it_is_the_papers_formula(
    play: Callable[..., Rounds], rounds: Rounds, eta: float, beta1: float, tau: float
) -> None:
    """Every round's model is the slow reference's, at the defaults and away from them."""
    settings = Settings(name="fedadagrad", learning_rate=eta, beta1=beta1, tau=tau)
    expected = reference(rounds, eta, beta1, tau)
    np.testing.assert_allclose(play(settings, rounds), expected, rtol=1e-6, atol=1e-9)


def test_the_defaults_are_documented() -> None:
    """The defaults are those that the settings' docstring tells."""
    assert Settings(name="fedadagrad").model_dump() == {
        "name": "fedadagrad",
        "learning_rate": 0.1,
        "beta1": 0.0,
        "tau": 1e-3,
    }


def test_steps_shrink_as_updates_gather(play: Callable[..., Rounds]) -> None:
    """Under one update for ever, round t moves the model by about eta / sqrt(t)."""
    models = play(Settings(name="fedadagrad"), [[5.0]] * 100)
    assert models[0][0] == pytest.approx(0.1, rel=1e-3)
    assert models[99][0] - models[98][0] == pytest.approx(0.01, rel=1e-2)
