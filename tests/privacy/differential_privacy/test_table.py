from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.differential_privacy.stream import PART, Stream
from privacy.differential_privacy.table import BITS, Table

MASSES = st.lists(st.integers(0, 1 << 200), min_size=1, max_size=40).filter(any)


def law(table: Table) -> list[int]:
    """What each magnitude gets, in units of 2^-128 of a column, read from the table as `draw` reads it."""
    shares = [0] * len(table._high)
    for column, (high, low, other) in enumerate(zip(table._high, table._low, table._others, strict=True)):
        threshold = (int(high) << 64) + int(low)
        shares[column] += threshold
        shares[int(other)] += (1 << BITS) - threshold
    return shares


class Words:
    """Hands a table the words that a test has chosen."""

    def __init__(self, words: list[int], *longs: list[int]) -> None:
        self._words, self._longs = words, list(longs)

    def words(self, count: int) -> np.ndarray:
        """The chosen words of 32 bits."""
        assert count == len(self._words)
        return np.array(self._words, "<u4")

    def longs(self, count: int) -> np.ndarray:
        """The next chosen words of 64 bits."""
        chosen = self._longs.pop(0)
        assert count == len(chosen)
        return np.array(chosen, "<u8")


@settings(max_examples=50, deadline=None)
@given(masses=MASSES)
def test_a_tables_law_is_its_masses(masses: list[int]) -> None:
    """Every magnitude has its mass to within one unit of 2^-128 of a column, and what has none is never drawn."""
    shares, whole = law(Table(masses)), sum(masses)

    units = len(shares) << BITS
    assert sum(shares) == units
    assert not any(shares[len(masses) :])
    for share, mass in zip(shares, masses, strict=False):
        assert abs(share * whole - mass * units) < whole
        assert mass or not share


def test_thresholds_have_128_bits() -> None:
    """A mass of 2^-120 of the whole is in the table, and in the second halves of its thresholds."""
    shares = law(Table([(1 << 120) - 1, 1]))

    assert shares[1] == 2 << (BITS - 120)


@settings(max_examples=30, deadline=None)
@given(masses=MASSES, key=st.binary(min_size=32, max_size=32), count=st.integers(0, 300))
def test_draws_follow_the_table_word_by_word(masses: list[int], key: bytes, count: int) -> None:
    """A draw's column is the low bits of its word, its sign the highest, and its threshold decides between two."""
    table, stream = Table(masses), Stream(lambda _: key)
    words, places = stream.words(count).copy(), stream.longs(count).copy()
    drawn = np.empty(count, np.int64)

    table.draw(Stream(lambda _: key), drawn)

    for found, word, place in zip(drawn, words, places, strict=True):
        column = int(word) % len(table._high)
        size = column if int(place) < int(table._high[column]) else int(table._others[column])
        assert found == (-size if int(word) >> 31 else size)


@pytest.mark.parametrize(("below", "wanted"), [(True, 0), (False, 1)])
def test_equal_halves_are_decided_by_the_other_halves(*, below: bool, wanted: int) -> None:
    """Where a draw's first 64 bits are the threshold's, its next 64 decide, for that draw alone."""
    table = Table([3, 1 << 90, 1 << 90])  # magnitude 0 has a threshold whose two halves are both used
    high, low = int(table._high[0]), int(table._low[0])
    assert table._others[0] in (1, 2)
    assert low > 0
    drawn = np.empty(3, np.int64)

    table.draw(Words([0, 3, 0], [high, 2**64 - 1, high + 1], [low - 1 if below else low]), drawn)  # type: ignore[arg-type] # a stream's double

    assert (drawn[0] == 0) == (wanted == 0)
    assert drawn[2] == table._others[0]


def test_either_sign_is_as_likely_as_the_other(fixed: Callable[[str], Callable[[int], bytes]]) -> None:
    """Of 2^20 draws as many are negative as positive, within six standard deviations, in every magnitude."""
    drawn = np.empty(PART, np.int64)
    table, stream = Table([1, 2, 2, 2, 1]), Stream(fixed("signs"))
    counts = np.zeros(9)
    for _ in range(128):
        table.draw(stream, drawn)
        counts += np.bincount(drawn + 4, minlength=9)

    for size in range(1, 5):
        more, less = counts[4 + size], counts[4 - size]
        assert abs(more - less) < 6 * np.sqrt(more + less)
    assert abs(counts[4] / counts.sum() - 1 / 8) < 6 * np.sqrt(1 / 8 / counts.sum())
