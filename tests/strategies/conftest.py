"""What the tests of single strategies share: a few rounds of updates, and how a strategy plays them."""

from collections.abc import Callable

import numpy as np
import pytest

from federation.job import StrategySettings
from strategies.strategy import load

Rounds = list[list[float]]
Play = Callable[[StrategySettings, Rounds], Rounds]


@pytest.fixture
def rounds() -> Rounds:
    """Mean updates [12][5] over several magnitudes; one coordinate rests for a while."""
    rng = np.random.default_rng(7)
    drawn = rng.normal(size=(12, 5)) * np.array([1e-4, 1e-2, 1.0, 10.0, 0.5])
    drawn[3:8, 4] = 0.0
    return [[float(value) for value in row] for row in drawn]


@pytest.fixture
def play() -> Play:
    """Plays the rounds from a model of zeros and gives the model after each."""

    def played(settings: StrategySettings, rounds: Rounds) -> Rounds:
        strategy = load(settings)
        size = len(rounds[0])
        model, state = np.zeros(size, np.float32), strategy.initial(size)
        models = []
        for update in rounds:
            model, state = strategy.step(model, np.array(update), state)
            models.append([float(value) for value in model])
        return models

    return played
