"""The rotation that spreads a vector over all its coordinates: random signs, then Walsh and Hadamard's transform."""

from math import sqrt

import numpy as np

from federation.errors import LocalProtocolError
from federation.vector import F64
from privacy.crypto.masks import keystream

__all__ = ["LEAST", "padded", "rotate", "unrotate", "walsh_hadamard"]

LEAST = 8
"""Coordinates of the shortest vector."""

_CACHED = 1 << 14
"""Values worked on at a time, 128 KiB: with a temporary of half their size they stay in a second-level cache."""
_SIGNS = 1 << 16


def padded(size: int) -> int:
    """D: the length of a vector of `size` values once it can be rotated, a power of two from 8 on."""
    return max(LEAST, 1 << (size - 1).bit_length())


def rotate(values: F64, key: bytes) -> None:
    """Multiplies by the signs of `key` and transforms, in place: values [D], D a power of two from 8 on.

    The L2 norm stays what it is. Sign k is 1 - 2 bit, bit = (byte[k >> 3] >> (7 - (k & 7))) & 1 of AES-256-CTR.

    Raises:
        LocalProtocolError: D is no such number, or the key has not 32 bytes.
    """
    _require(values)
    _sign(values, key)
    walsh_hadamard(values)


def unrotate(values: F64, key: bytes) -> None:
    """Undoes `rotate` with the same key, in place.

    Raises:
        LocalProtocolError: As `rotate`.
    """
    walsh_hadamard(values)
    _sign(values, key)


def walsh_hadamard(values: F64) -> None:
    """The orthonormal Walsh-Hadamard transform in Sylvester's order, in place: twice gives the vector back.

    Raises:
        LocalProtocolError: The vector's length is no power of two from 8 on.
    """
    _require(values)
    inner = min(values.size, _CACHED)
    side = 1 << inner.bit_length() // 2
    for line in values.reshape(-1, inner):
        square = line.reshape(side, -1)
        _butterflies(square)
        _through_copy(square.T)
    rows = values.reshape(-1, inner)
    width = max(1, _CACHED // len(rows))
    for start in range(0, inner if len(rows) > 1 else 0, width):
        _through_copy(rows[:, start : start + width])
    values *= 1 / sqrt(values.size)


def _through_copy(lines: F64) -> None:
    """The transform along the first axis of a view whose memory is not in one piece."""
    together = np.ascontiguousarray(lines)
    _butterflies(together)
    lines[:] = together


def _butterflies(lines: F64) -> None:
    """The transform along the first axis of [2^k, w], not normalised, in place; quick where w is not small."""
    half = 1
    while half < len(lines):
        pairs = lines.reshape(-1, 2, half * lines.shape[1])
        upper, lower = pairs[:, 0], pairs[:, 1]
        difference = upper - lower
        upper += lower
        lower[:] = difference
        half *= 2


def _sign(values: F64, key: bytes) -> None:
    stream = keystream(key)
    for start in range(0, values.size, _SIGNS):
        part = values[start : start + _SIGNS]
        bits = np.unpackbits(np.frombuffer(stream.update(bytes(-(-part.size // 8))), np.uint8), count=part.size)
        np.negative(part, out=part, where=bits.view(bool))


def _require(values: F64) -> None:
    if values.size < LEAST or values.size & (values.size - 1):
        raise LocalProtocolError(f"a vector of {values.size} values was rotated: no power of two of at least {LEAST}")
