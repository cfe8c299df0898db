import math
from collections.abc import Callable

import numpy as np
import pytest

from strategies import fedadam
from strategies.fedyogi import Settings, make

Rounds = list[list[float]]


def reference(rounds: Rounds, eta: float, beta1: float, beta2: float, tau: float) -> Rounds:
    """Reddi et al. 2021, Algorithm 2, the line of FedYogi, value by value in Python's floats."""
    size = len(rounds[0])
    x, m, v = [0.0] * size, [0.0] * size, [tau * tau] * size
    models = []
    for update in rounds:
        for k, delta in enumerate(update):
            m[k] = beta1 * m[k] + (1 - beta1) * delta
            sign = (v[k] > delta**2) - (v[k] < delta**2)
            v[k] = v[k] - (1 - beta2) * delta**2 * sign
            x[k] = float(np.float32(x[k] + eta * m[k] / (math.sqrt(v[k]) + tau)))
        models.append(list(x))
    return models


@pytest.mark.parametrize(("eta", "beta1", "beta2", "tau"), [(0.1, 0.9, 0.99, 1e-3), (0.5, 0.0, 0.3, 0.1)])
def test_it_is_the_papers_formula(
    play: Callable[..., Rounds], rounds: Rounds, eta: float, beta1: float, beta2: float, tau: float
) -> None:
    """Every round's model is the slow reference's, at the defaults and away from them."""
    settings = Settings(name="fedyogi", learning_rate=eta, beta1=beta1, beta2=beta2, tau=tau)
    expected = reference(rounds, eta, beta1, beta2, tau)
    np.testing.assert_allclose(play(settings, rounds), expected, rtol=1e-6, atol=1e-9)


def test_the_defaults_are_documented() -> None:
    """The defaults are those that the settings' docstring tells."""
    assert Settings(name="fedyogi").model_dump() == {
        "name": "fedyogi",
        "learning_rate": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "tau": 1e-3,
    }


def test_it_differs_from_fedadam_in_one_line() -> None:
    """From one state both have one m; v moves by (1 - beta2) * u^2 here and by (1 - beta2) * (u^2 - v) in FedAdam."""
    state = {"first_moment": np.array([0.2, 0.2]), "second_moment": np.array([4.0, 0.25])}
    model, update = np.zeros(2, np.float32), np.array([1.0, 1.0])
    _, yogi = make(Settings(name="fedyogi")).step(model, update, state)
    _, adam = fedadam.make(fedadam.Settings(name="fedadam")).step(model, update, state)
    assert yogi["first_moment"].tolist() == adam["first_moment"].tolist()
    np.testing.assert_allclose(yogi["second_moment"], [4.0 - 0.01, 0.25 + 0.01])
    np.testing.assert_allclose(adam["second_moment"], [4.0 - 0.03, 0.25 + 0.0075])


def test_its_choices_are_fedadams() -> None:
    """Both offer the same choices with the same defaults."""
    yogi, adam = Settings(name="fedyogi").model_dump(), fedadam.Settings(name="fedadam").model_dump()
    assert {**yogi, "name": ""} == {**adam, "name": ""}


def test_the_second_moment_stays_above_zero() -> None:
    """V never leaves the positive numbers, whatever the updates: u^2 < v when it falls, and only by a share of u^2."""
    strategy = make(Settings(name="fedyogi", beta2=0.0))
    model, state = np.zeros(50, np.float32), strategy.initial(50)
    rng = np.random.default_rng(0)
    for _ in range(200):
        model, state = strategy.step(model, rng.normal(size=50) * 10.0 ** rng.integers(-5, 3, 50), state)
        assert (state["second_moment"] >= 0).all()
