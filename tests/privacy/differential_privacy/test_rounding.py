from collections.abc import Callable
from math import floor, isqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.vector import BLOCK
from privacy.differential_privacy import rounding
from privacy.differential_privacy.rounding import dithered, round_within, rounded

Fixed = Callable[[str], Callable[[int], bytes]]
QUICK = settings(max_examples=50, deadline=None)
VALUES = st.lists(st.floats(-(2.0**40), 2.0**40), max_size=30)


@QUICK
@given(values=VALUES, words=st.data())
def test_rounding_goes_up_with_the_fraction_as_probability(values: list[float], words: st.DataObject) -> None:
    """A value becomes the integer below it, or the next where the word's 53 bits are below its fraction."""
    drawn = words.draw(st.lists(st.integers(0, 2**64 - 1), min_size=len(values), max_size=len(values)))

    found = rounded(np.array(values, np.float64), np.array(drawn, np.uint64))

    low = [floor(value) for value in values]
    up = [(word >> 11) / 2**53 < value - below for word, value, below in zip(drawn, values, low, strict=True)]
    assert found.tolist() == [below + more for below, more in zip(low, up, strict=True)]


def test_whole_numbers_stay() -> None:
    """What has no fraction is rounded to itself by every word."""
    values = np.arange(-5.0, 6.0)

    for word in (0, 2**64 - 1):
        assert rounded(values, np.full(11, word, np.uint64)).tolist() == values.tolist()


def test_dither_is_unbiased(fixed: Fixed) -> None:
    """I16: over 2^18 roundings the mean is the value, within five standard deviations."""
    for value in (0.1, -0.1, 1234.75, -1e-9):
        parts = list(dithered(np.full(1 << 18, value), 1.0, fixed(f"unbiased {value}")))
        found = np.concatenate(parts)

        assert [part.size for part in parts] == [BLOCK] * 4
        share = value - floor(value)
        assert abs(found.mean() - value) <= 5 * (share * (1 - share) / found.size) ** 0.5 + 1e-9
        assert set(found.tolist()) <= {floor(value), floor(value) + 1}


@pytest.mark.filterwarnings("error")
def test_dither_bears_what_is_not_finite() -> None:
    """NaN and infinities count as 0, and what is absurdly large is cut: nothing that data holds stops a round."""
    values = np.array([np.nan, np.inf, -np.inf, 1e300, -1e300, 2.0])

    (found,) = dithered(values, 4.0)

    assert found.tolist() == [0, 0, 0, 2**52, -(2**52), 8]


def test_dither_is_fresh_each_time() -> None:
    """Two attempts at one sum round it with different randomness."""
    values = np.full(4096, 0.5)

    assert next(dithered(values, 1.0)).tolist() != next(dithered(values, 1.0)).tolist()


@QUICK
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), slack=st.integers(0, 40))
def test_rounding_within_a_norm_never_passes_it(values: list[float], slack: int) -> None:
    """Squares add up to at most the limit, and each value is rounded up or down, or towards zero."""
    vector = np.array(values)
    limit = sum(int(value) ** 2 for value in values) + slack

    found = round_within(vector.copy(), limit).tolist()

    assert sum(each**2 for each in found) <= limit
    assert all(floor(value) <= each <= floor(value) + 1 for each, value in zip(found, values, strict=True))


def test_each_try_has_randomness_of_its_own(fixed: Fixed) -> None:
    """What does not fit is rounded again with another key; with one key for ever it would end at zero."""
    draw, keys = fixed("tries"), []

    def counted(size: int) -> bytes:
        keys.append(draw(size))
        return keys[-1]

    found = round_within(np.full(9000, 0.5), 4400, counted)

    assert 0 < (found**2).sum() <= 4400
    assert 1 < len(set(keys)) == len(keys) < 1000


def test_what_never_fits_is_rounded_towards_zero() -> None:
    """After 1000 tries values are truncated, which fits wherever the exact vector does."""
    values = np.array([0.999999, -0.999999, 3.5, -3.5] * 25)

    found = round_within(values.copy(), 18 * 25)

    assert found.tolist() == [0, 0, 3, -3] * 25


def test_the_law_is_rounding_given_that_it_fits(fixed: Fixed) -> None:
    """Of the four roundings of (1/2, 1/4) the one that is too long never comes; the others keep their proportions."""
    draw, counts = fixed("given"), np.zeros(4)
    for _ in range(4000):
        one, other = round_within(np.array([0.5, 0.25]), 1, draw)
        counts[2 * one + other] += 1

    wanted = np.array([3 / 8, 1 / 8, 3 / 8, 0]) / (7 / 8) * 4000
    assert counts[3] == 0
    assert np.abs(counts - wanted)[:3].max() < 5 * 32


def test_rounding_takes_the_vectors_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The integers stand where the values stood, also over parts and after many tries."""
    monkeypatch.setattr(rounding, "PART", 64)
    values = np.random.default_rng(1).uniform(-3, 3, 1000)
    exact = values.copy()

    found = round_within(values, isqrt(10**8))

    assert np.shares_memory(found, values)
    assert np.abs(found - exact).max() < 1
