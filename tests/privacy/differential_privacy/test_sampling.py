import os
from collections.abc import Callable
from fractions import Fraction
from math import sqrt

import numpy as np
import pytest

from federation.errors import ConfigurationError
from privacy.differential_privacy.sampling import poisson_sample
from privacy.differential_privacy.stream import PART

Fixed = Callable[[str], Callable[[int], bytes]]


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.75])
def test_poisson_sampling(rate: float, fixed: Fixed) -> None:
    """Records are in at the rate, independently of one another and of other rounds: chances, pairs and sizes say so."""
    draw, records, rounds = fixed(f"sample {rate}"), 400, 2000
    taken = np.zeros((rounds, records), bool)
    for number in range(rounds):
        taken[number, poisson_sample(records, rate, draw)] = True

    spread = rate * (1 - rate)
    assert abs(taken.mean() - rate) < 5 * sqrt(spread / taken.size)
    assert np.abs(taken.mean(axis=0) - rate).max() < 6 * sqrt(spread / rounds)
    centred = (taken - rate) / sqrt(spread)
    between = centred.T @ centred / rounds
    np.fill_diagonal(between, 0)
    assert abs((between**2).sum() * rounds / (records * (records - 1)) - 1) < 0.05
    assert np.abs(between).max() < 10 / sqrt(rounds)
    follows = (centred[1:] * centred[:-1]).mean()
    assert abs(follows) < 5 / sqrt(taken.size)
    sizes = taken.sum(axis=1)
    assert abs(sizes.var() / (records * spread) - 1) < 6 * sqrt(2 / rounds)


def test_a_coin_is_compared_with_the_rate_in_all_its_64_bits() -> None:
    """A record is in exactly where its 8 bytes are below floor(rate * 2^64)."""
    rate = 0.3
    limit = int(Fraction(rate) * 2**64)
    coins = [0, limit - 1, limit, limit + 1, 2**64 - 1]

    chosen = poisson_sample(5, rate, lambda _: b"".join(coin.to_bytes(8, "little") for coin in coins))

    assert chosen.tolist() == [0, 1]


def test_large_data_sets_come_in_parts() -> None:
    """Each part has coins of its own, and its indices follow those of the part before."""
    asked: list[int] = []

    def draw(size: int) -> bytes:
        asked.append(size)
        return bytes(size) if len(asked) % 2 else b"\xff" * size

    chosen = poisson_sample(2 * PART + 5, 0.5, draw)

    assert asked == [8 * PART, 8 * PART, 40]
    assert chosen.tolist() == [*range(PART), *range(2 * PART, 2 * PART + 5)]


def test_samples_may_be_empty_or_whole() -> None:
    """No records, no luck and rate 1 are samples like any other."""
    assert poisson_sample(0, 0.5).tolist() == []
    assert poisson_sample(100, 2.0**-60, lambda size: b"\xff" * size).tolist() == []
    assert poisson_sample(3, 1.0).tolist() == [0, 1, 2]
    assert all(each.dtype == np.int64 for each in (poisson_sample(0, 0.5), poisson_sample(3, 1.0)))


def test_two_rounds_differ() -> None:
    """Samples are not repeated: two of a thousand records by the operating system's coins are not the same."""
    assert poisson_sample(1000, 0.5, os.urandom).tolist() != poisson_sample(1000, 0.5).tolist()


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0000001, float("nan")])
def test_other_rates_are_refused(rate: float) -> None:
    """What is no probability above 0 is told to the job's author."""
    with pytest.raises(ConfigurationError, match="at a rate above 0 and at most 1, not") as refused:
        poisson_sample(10, rate)

    assert "correct the job's sampling rate" in str(refused.value)
