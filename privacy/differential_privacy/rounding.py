"""Stochastic rounding: floor(x + u), and floor(x + u) again until the whole vector is no longer than it may be."""

import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from federation.vector import BLOCK, F64
from privacy.crypto.canonical import KEY
from privacy.differential_privacy.stream import PART, Draw, Stream
from privacy.differential_privacy.table import I64

__all__ = ["dithered", "round_within", "rounded"]

_TRIES = 1000
_UNUSED = np.uint64(11)
_FINEST = 2.0**-53
_MOST = 2.0**52
"""Values are cut to this before they become integers; what they may be at most is far below it."""


def rounded(values: F64, words: npt.NDArray[np.uint64]) -> I64:
    """floor(values) or one more, this with the fraction as probability: values [n], one uniform word for each.

    It is floor(values + u) with u = 1 - (k + 1) / 2^53, k a word's first 53 bits: the same words are the same u for any
    values. The fraction is compared, since values + u would itself be rounded in binary64.
    """
    low = np.floor(values)
    low += (words >> _UNUSED) * _FINEST < values - low
    return low.astype(np.int64)


def dithered(values: F64, scale: float, draw: Draw = os.urandom) -> Iterator[I64]:
    """floor(scale * values + u), u uniform in [0, 1) and fresh, in blocks of at most `federation.vector.BLOCK`.

    What is not finite counts as 0: nothing that data can do stops a round.
    """
    stream = Stream(draw)
    for start in range(0, values.size, BLOCK):
        block = np.multiply(values[start : start + BLOCK], scale)
        np.copyto(block, 0, where=~np.isfinite(block))
        np.clip(block, -_MOST, _MOST, out=block)
        integers = np.empty(block.size, np.int64)
        for begin in range(0, block.size, PART):
            part = block[begin : begin + PART]
            integers[begin : begin + PART] = rounded(part, stream.longs(part.size))
        yield integers


def round_within(values: F64, squared: int, draw: Draw = os.urandom) -> I64:
    """Values [d] rounded stochastically until their squares add up to at most `squared`, in the same memory.

    After 1000 tries they are rounded towards zero. Each try has randomness of its own. The sum is made of integers, so
    floating point decides nothing; |values|^2 must be below 2^62 even with every value one larger.
    """
    integers = values.view(np.int64)
    for _ in range(_TRIES):
        key = draw(KEY)
        if sum(int(np.dot(part, part)) for _, part in _parts(values, key)) <= squared:
            for start, part in _parts(values, key):
                integers[start : start + part.size] = part
            return integers
    for start in range(0, values.size, PART):
        integers[start : start + PART] = np.trunc(values[start : start + PART]).astype(np.int64)
    return integers


def _parts(values: F64, key: bytes) -> Iterator[tuple[int, I64]]:
    """The vector rounded with the randomness of one key: the same whenever it is asked for."""
    stream = Stream(lambda _: key)
    for start in range(0, values.size, PART):
        part = values[start : start + PART]
        yield start, rounded(part, stream.longs(part.size))
