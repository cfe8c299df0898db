from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.median import median
from strategies.trimmed_mean import Settings, make, trimmed_mean


@given(groups=st.integers(1, 40), percent=st.integers(1, 49), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_it_is_the_mean_of_what_is_left(groups: int, percent: int, seed: int) -> None:
    """By sorting each column in exact arithmetic; beta * groups is rounded up, and one or two groups always stay."""
    means = np.random.default_rng(seed).normal(size=(groups, 3))
    out = -(-groups * percent // 100)
    out = min(out, (groups - 1) // 2)
    expected = []
    for column in means.T.tolist():
        kept = sorted(Fraction(value) for value in column)[out : groups - out]
        expected.append(float(sum(kept) / len(kept)))
    np.testing.assert_allclose(trimmed_mean(percent / 100)(means), expected, rtol=1e-12, atol=1e-15)


def test_what_is_meant_as_a_whole_number_of_groups_is_one() -> None:
    """0.1 of 30 are 3 groups at each end, though binary fractions say a little more."""
    means = np.arange(30.0).reshape(30, 1) ** 2
    assert trimmed_mean(0.1)(means)[0] == pytest.approx(float((np.arange(3, 27) ** 2).mean()))


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_where_nothing_would_be_left_it_is_the_median(groups: int) -> None:
    """Of few groups no more are left out than leave one or two."""
    means = np.random.default_rng(groups).normal(size=(groups, 5))
    assert trimmed_mean(0.49)(means).tolist() == pytest.approx(median(means).tolist())


def test_the_share_that_is_left_out_may_send_anything() -> None:
    """A fifth of ten groups at either end of the number line: the mean stays within the others'."""
    honest = np.linspace(-1.0, 1.0, 8).reshape(8, 1)
    for bad in (1e12, -1e12):
        found = float(trimmed_mean(0.2)(np.vstack([honest, np.full((2, 1), bad)]))[0])
        assert -1.0 <= found <= 1.0


def test_the_step_is_the_trimmed_mean_times_the_rate() -> None:
    """W <- w + eta * mean of the middle."""
    means = np.array([[1.0], [2.0], [4.0], [900.0], [-900.0]])
    settings_ = Settings(name="trimmed_mean", beta=0.2, learning_rate=3.0)
    moved, state = make(settings_).step_groups(np.ones(1, np.float32), means, {})
    assert (moved.tolist(), state) == ([8.0], {})


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_share_that_is_none_or_leaves_none_is_refused(beta: float) -> None:
    """At 0 it would be the mean, at a half nothing would be left."""
    with pytest.raises(ValueError, match="beta"):
        Settings(name="trimmed_mean", beta=beta)
