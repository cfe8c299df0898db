"""Random words for noise, rounding and samples: AES-256-CTR under a key of the operating system's, never seeded."""

import os
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from privacy.crypto.canonical import KEY
from privacy.crypto.masks import keystream

__all__ = ["PART", "Draw", "Stream"]

Draw: TypeAlias = Callable[[int], bytes]
"""Gives so many bytes that nobody can foretell: `os.urandom` wherever a record is protected.

Nothing takes another but tests, whose bytes are fixed so that they cannot fail by chance.
"""

PART = 1 << 13
"""Words drawn at a time: a sampler's temporaries of 64 KiB stay in the processor's cache. Larger ones cost more."""

_WIDEST = 8
_SLACK = 15
"""Bytes by which `update_into` wants its buffer longer than what it writes."""
_ZEROS = memoryview(bytes(PART * _WIDEST))


class Stream:
    """One keystream, under a key drawn for it alone: read once, forwards, and forgotten with this object."""

    def __init__(self, draw: Draw = os.urandom) -> None:
        self._make = keystream(draw(KEY)).update_into
        self._buffer = memoryview(bytearray(len(_ZEROS) + _SLACK))

    def longs(self, count: int) -> npt.NDArray[np.uint64]:
        """At most `PART` uniform words of 64 bits; they stand until the next call."""
        return np.frombuffer(self._next(8 * count), "<u8")

    def words(self, count: int) -> npt.NDArray[np.uint32]:
        """At most `PART` uniform words of 32 bits; they stand until the next call."""
        return np.frombuffer(self._next(4 * count), "<u4")

    def _next(self, size: int) -> memoryview:
        self._make(_ZEROS[:size], self._buffer)
        return self._buffer[:size]
