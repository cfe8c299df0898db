"""A symmetric law on the integers as a table of 128-bit thresholds, from which a draw takes one comparison.

Walker's alias method: every column holds the same mass, split by its threshold between its own magnitude and another.
Thresholds and draws are compared in 64 bits, and in 64 more where these are equal, so nothing is lost but the first
rounding.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from privacy.differential_privacy.stream import Stream

__all__ = ["BITS", "I64", "Table"]

I64 = npt.NDArray[np.int64]

BITS = 128
"""Bits of a threshold."""

_COLUMN = 1 << BITS
_HALF = 64
_LOW = (1 << _HALF) - 1
_SIGN = np.uint32(31)


class Table:
    """Draws x with P(|x|) as given by `masses`, either sign being as likely.

    Args:
        masses: Of |x| = 0, 1, ..., in proportion; fewer than 2^30.
    """

    def __init__(self, masses: Sequence[int]) -> None:
        thresholds, others = _columns(masses)
        self._high = np.array([each >> _HALF for each in thresholds], np.uint64)
        self._low = np.array([each & _LOW for each in thresholds], np.uint64)
        self._others = np.array(others, np.int64)
        self._mask = np.uint32(len(thresholds) - 1)

    def draw(self, stream: Stream, out: I64) -> None:
        """Fills `out`, at most `stream.PART` long, with independent draws."""
        word = stream.words(out.size)
        column = (word & self._mask).astype(np.int64)
        sign = -(word >> _SIGN).astype(np.int64)
        place = stream.longs(out.size)
        high = self._high.take(column)
        own = place < high
        for tie in np.flatnonzero(place == high):
            own[tie] = stream.longs(1)[0] < self._low[column[tie]]
        np.copyto(out, np.where(own, column, self._others.take(column)))
        out ^= sign  # with the next line: -x where sign is -1
        out -= sign


def _columns(masses: Sequence[int]) -> tuple[list[int], list[int]]:
    """Each column's threshold, of 2^128, and the magnitude above it (Vose 1991), with no mass lost."""
    rest = _shares(masses)
    thresholds, others = [0] * len(rest), list(range(len(rest)))
    small = [column for column, share in enumerate(rest) if share < _COLUMN]
    large = [column for column, share in enumerate(rest) if share >= _COLUMN]
    while small:
        column, donor = small.pop(), large[-1]
        thresholds[column], others[column] = rest[column], donor
        rest[donor] -= _COLUMN - rest[column]
        if rest[donor] < _COLUMN:
            small.append(large.pop())
    return thresholds, others  # a column left over is exactly full: 0, and itself above


def _shares(masses: Sequence[int]) -> list[int]:
    """The masses, rounded to whole units of a column's 2^-128, of as many columns as the next power of two."""
    columns = 1 << (len(masses) - 1).bit_length()
    whole, before, so_far, shares = sum(masses), 0, 0, []
    for mass in masses:
        so_far += mass
        edge = so_far * (columns << BITS) // whole
        shares.append(edge - before)
        before = edge
    return shares + [0] * (columns - len(masses))
