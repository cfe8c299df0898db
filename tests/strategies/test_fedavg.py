from collections.abc import Callable

import numpy as np
import pytest

from federation.vector import F32
from privacy.secure_aggregation.interface import Source
from privacy.secure_aggregation.plain import PlainSum
from strategies.fedavg import Settings, make

Rounds = list[list[float]]


def stored(values: F32) -> Source:
    """Values as they are read from a file."""
    content = values.tobytes()
    return lambda offset, count: content[offset : offset + count]


def test_it_is_the_papers_formula(play: Callable[..., Rounds], rounds: Rounds) -> None:
    """W <- w + eta * mean update, value by value."""
    w = [0.0] * 5
    expected = []
    for update in rounds:
        w = [float(np.float32(old + 0.5 * delta)) for old, delta in zip(w, update, strict=True)]
        expected.append(w)
    assert play(Settings(name="fedavg", learning_rate=0.5), rounds) == expected


def test_the_default_is_the_papers() -> None:
    """Without a word about it the server step is 1, and the sites add nothing to their loss."""
    settings = Settings(name="fedavg")
    assert settings.learning_rate == 1.0
    assert make(settings).local.proximal == 0.0


def test_one_site_gives_that_sites_model() -> None:
    """With a single site the next model is the site's local model, to float32's precision."""
    rng = np.random.default_rng(2)
    model, local = rng.normal(size=(2, 100)).astype(np.float32)
    total = PlainSum(100, "<f4")
    total.add("alpha", 303.0, stored(local - model))
    strategy = make(Settings(name="fedavg"))
    moved, state = strategy.step(model, next(total.mean()), strategy.initial(100))
    np.testing.assert_allclose(moved, local, rtol=0, atol=3e-7)
    assert state == {}


def test_sites_count_by_their_weight() -> None:
    """Two sites' models are averaged by their rows: (1*4 + 3*8) / 4 = 7."""
    total = PlainSum(1, "<f4")
    total.add("alpha", 1.0, stored(np.array([4.0], "<f4")))
    total.add("beta", 3.0, stored(np.array([8.0], "<f4")))
    moved, _ = make(Settings(name="fedavg")).step(np.zeros(1, np.float32), next(total.mean()), {})
    assert moved.tolist() == [7.0]


def test_a_rate_of_zero_is_refused() -> None:
    """A server that never moves is no strategy."""
    with pytest.raises(ValueError, match="learning_rate"):
        Settings(name="fedavg", learning_rate=0.0)
