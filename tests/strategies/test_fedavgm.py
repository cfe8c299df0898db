from collections.abc import Callable

import numpy as np
import pytest

from strategies import fedavg
from strategies.fedavgm import Settings

Rounds = list[list[float]]


def test_it_is_the_papers_formula(play: Callable[..., Rounds], rounds: Rounds) -> None:
    """V <- beta * v + dw; w <- w - v with dw = -update, value by value, with the paper's beta and no server rate."""
    w, v = [0.0] * 5, [0.0] * 5
    expected = []
    for update in rounds:
        for k, delta in enumerate(update):
            v[k] = 0.9 * v[k] + (-delta)
            w[k] = float(np.float32(w[k] - v[k]))
        expected.append(list(w))
    assert play(Settings(name="fedavgm"), rounds) == expected


def test_without_momentum_it_is_fedavg(play: Callable[..., Rounds], rounds: Rounds) -> None:
    """A velocity that keeps nothing is the update itself."""
    without = Settings(name="fedavgm", momentum=0.0, learning_rate=0.5)
    assert play(without, rounds) == play(fedavg.Settings(name="fedavg", learning_rate=0.5), rounds)


def test_a_steady_update_gathers_speed(play: Callable[..., Rounds]) -> None:
    """Under one update for ever, a round's move tends to learning_rate / (1 - momentum) times it."""
    models = play(Settings(name="fedavgm", momentum=0.5, learning_rate=0.25), [[1.0]] * 60)
    assert models[-1][0] - models[-2][0] == pytest.approx(0.5)


def test_a_momentum_of_one_is_refused() -> None:
    """A velocity that never fades is refused."""
    with pytest.raises(ValueError, match="momentum"):
        Settings(name="fedavgm", momentum=1.0)
