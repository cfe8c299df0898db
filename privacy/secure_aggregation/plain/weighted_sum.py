"""Both halves of plain aggregation: little-endian values, and their weighted sum in one float64 accumulator."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

from federation.errors import LocalProtocolError, RemoteProtocolError
from federation.vector import F32, F64
from privacy.secure_aggregation.interface import Source, WordType

__all__ = ["Plain", "PlainSum"]

_BLOCK = 65_536
"""Values worked on at a time: they stay in the processor's cache (measured: fewer cost calls, more gain nothing)."""

_HEAVIEST = 1e15
"""Largest weight: any number of rows that is exact in float64, with room to add thousands of them."""

_FARTHEST = 1e300
"""Largest magnitude the sum may reach: so far below float64's end that rounding cannot push a sum over it."""


@dataclass(frozen=True, slots=True)
class Plain:
    """The protocol that hides nothing: a contribution is its values, and its weight stands openly in the message."""

    def encode(self, values: F32 | F64) -> bytes:
        """The values themselves, little endian, in their own precision."""
        return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()

    def open(self, size: int, words: WordType) -> "PlainSum":
        """An empty sum of contributions of `size` values of type `words`."""
        return PlainSum(size, words)


class PlainSum:
    """A streaming weighted sum: one float64 accumulator of `size` values, however many sites are added.

    Each contribution is read twice: once to check all of it, once to add it, so a refusal changes nothing and needs no
    second copy. Adding in one order (the roster's) gives one result, bit for bit, however the bytes are chunked;
    another order may differ in the last bits of float64.

    Args:
        size: Values in each contribution.
        words: Their type on the wire: `<f4` or `<f8`.
    """

    def __init__(self, size: int, words: WordType) -> None:
        self._dtype = np.dtype(words)
        self._sum = np.zeros(size)
        self._scaled = np.empty(min(size, _BLOCK))
        self._weight = 0.0
        self._reach = 0.0
        self._torn = False

    @property
    def size(self) -> int:
        """Values in each contribution and in the sum."""
        return self._sum.size

    @property
    def weight(self) -> float:
        """Sum of the weights added so far; 0 before the first."""
        return self._weight

    def add(self, site: str, weight: float, source: Source) -> None:
        """Adds `weight` times the contribution of `site`, read from `source` twice.

        Raises:
            RemoteProtocolError: The weight is not above 0 and at most 1e15, the bytes are not `size` values, a value is
                not finite, or the sum could pass 1e300; the sum is exactly as before.
            LocalProtocolError: The second reading differs in length from the first. This, and an error that `source`
                itself raises then, leaves a sum that refuses all further use: make a new one.
        """
        self._check_whole()
        if not 0 < weight <= _HEAVIEST:
            raise _refusal(site, f"weighs {weight!r}", f"send a weight above 0 and at most {_HEAVIEST:g}")
        reach = self._reach + weight * self._largest(site, source())
        if reach > _FARTHEST:
            raise _refusal(site, f"could bring the sum up to {reach:g}", f"keep sums below {_FARTHEST:g}")
        self._torn = True  # until the last value is in
        self._accumulate(weight, source())
        self._torn = False
        self._reach = reach
        self._weight += weight

    def mean(self) -> F64:
        """The weighted mean [size], a new array.

        Raises:
            LocalProtocolError: Nothing was added.
        """
        self._check_whole()
        if self._weight == 0:
            raise LocalProtocolError("a sum to which nothing was added has no mean")
        return self._sum / self._weight

    def total(self) -> F64:
        """The weighted sum [size], a new array; zeros before the first contribution."""
        self._check_whole()
        return self._sum.copy()

    def _check_whole(self) -> None:
        if self._torn:
            raise LocalProtocolError(
                "a sum broke off inside a contribution, which could not be read a second time",
                fix="open a new sum and add the stored contributions again",
            )

    def _largest(self, site: str, chunks: Iterable[bytes | memoryview]) -> float:
        """The largest magnitude in a contribution that is as it must be."""
        largest = 0.0
        try:
            for values in self._blocks(chunks):
                low, high = float(values.min()), float(values.max())  # one NaN makes both NaN
                if not (isfinite(low) and isfinite(high)):
                    raise _refusal(site, "holds NaN or infinite values", "send finite values only")
                largest = max(largest, -low, high)
        except _LengthError as length:
            fix = f"send exactly {self.size} values of type {self._dtype.str}"
            raise _refusal(site, f"has {length}", fix) from None
        return largest

    def _accumulate(self, weight: float, chunks: Iterable[bytes | memoryview]) -> None:
        start = 0
        try:
            for values in self._blocks(chunks):
                scaled = self._scaled[: values.size]
                np.multiply(values, weight, out=scaled, dtype=np.float64)
                self._sum[start : start + values.size] += scaled
                start += values.size
        except _LengthError as length:
            raise LocalProtocolError(f"a contribution was checked and then, read again, had {length}") from None

    def _blocks(self, chunks: Iterable[bytes | memoryview]) -> Iterator[npt.NDArray[np.floating]]:
        """The values in `chunks`, at most `_BLOCK` at a time, `size` in all; a value may lie across chunks."""
        width = self._dtype.itemsize
        split = b""
        for chunk in _exactly(width * self.size, chunks):
            rest = chunk
            if split:
                missing = width - len(split)
                split, rest = split + rest[:missing], rest[missing:]
                if len(split) < width:
                    continue
                yield np.frombuffer(split, self._dtype)
            whole = len(rest) - len(rest) % width
            for start in range(0, whole, width * _BLOCK):
                yield np.frombuffer(rest[start : min(start + width * _BLOCK, whole)], self._dtype)
            split = bytes(rest[whole:])


class _LengthError(Exception):
    """A contribution is shorter or longer than its size says; an error of the tree is raised in its place."""


def _exactly(length: int, chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """`chunks`, which are `length` bytes in all; an endless reading is left at the first byte too many."""
    seen = 0
    for chunk in chunks:
        seen += len(chunk)
        if seen > length:
            raise _LengthError(f"more than {length} bytes")
        yield memoryview(chunk)
    if seen < length:
        raise _LengthError(f"{seen} bytes instead of {length}")


def _refusal(site: str, what: str, fix: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"the contribution of site {site!r} {what}; the sum stays as it was", fix=fix)
