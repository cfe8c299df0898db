import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.median import Settings, make, median


@given(groups=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_it_is_the_median_of_each_value(groups: int, seed: int) -> None:
    """As the standard library finds it, column by column; of an even number, the mean of the middle two."""
    means = np.random.default_rng(seed).normal(size=(groups, 4))
    assert median(means).tolist() == [statistics.median(column) for column in means.T.tolist()]


def test_less_than_half_of_the_groups_cannot_move_it() -> None:
    """Four of nine at the end of the number line leave it among the five; five of nine do not."""
    honest = np.linspace(-1.0, 1.0, 5).reshape(5, 1)
    four = np.vstack([honest, np.full((4, 1), 1e9)])
    five = np.vstack([honest, np.full((5, 1), 1e9)])
    assert -1.0 <= float(median(four)[0]) <= 1.0
    assert float(median(five)[0]) > 1.0


def test_the_step_is_the_median_times_the_rate() -> None:
    """W <- w + eta * median."""
    means = np.array([[1.0, 0.0], [2.0, 9.0], [40.0, -9.0]])
    moved, state = make(Settings(name="median", learning_rate=0.5)).step_groups(np.ones(2, np.float32), means, {})
    assert (moved.tolist(), state) == ([2.0, 1.0], {})


def test_a_rate_of_zero_is_refused() -> None:
    """A server that never moves is no strategy."""
    with pytest.raises(ValueError, match="learning_rate"):
        Settings(name="median", learning_rate=0.0)
