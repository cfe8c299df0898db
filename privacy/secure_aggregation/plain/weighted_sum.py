"""Both halves of plain aggregation: little-endian values, and their weighted sum, made a block at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import numpy as np

from federation.errors import LocalProtocolError, RemoteProtocolError
from federation.vector import BLOCK, F32, F64, spans
from privacy.secure_aggregation.interface import Source, WordType

__all__ = ["Plain", "PlainSum"]

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
    """A weighted sum that is never whole in memory: it is made a block at a time, from the stored contributions.

    A contribution is checked whole when it is added, so a refusal changes nothing. Sums are made in the order of
    adding (the roster's): one order gives one result, bit for bit; another may differ in the last bits of float64.

    Args:
        size: Values in each contribution.
        words: Their type on the wire: `<f4` or `<f8`.
    """

    def __init__(self, size: int, words: WordType) -> None:
        self._size = size
        self._dtype = np.dtype(words)
        self._added: list[tuple[float, Source]] = []
        self._reach = 0.0

    @property
    def size(self) -> int:
        """Values in each contribution and in the sum."""
        return self._size

    @property
    def weight(self) -> float:
        """Sum of the weights added so far; 0 before the first."""
        return sum(weight for weight, _ in self._added)

    def add(self, site: str, weight: float, source: Source) -> None:
        """Adds `weight` times the contribution of `site`.

        Raises:
            RemoteProtocolError: The weight is not above 0 and at most 1e15, the bytes are not `size` values, a value is
                not finite, or the sum could pass 1e300; the sum is exactly as before.
        """
        if not 0 < weight <= _HEAVIEST:
            raise _refusal(site, f"weighs {weight!r}", f"send a weight above 0 and at most {_HEAVIEST:g}")
        reach = self._reach + weight * self._largest(site, source)
        if reach > _FARTHEST:
            raise _refusal(site, f"could bring the sum up to {reach:g}", f"keep sums below {_FARTHEST:g}")
        self._reach = reach
        self._added.append((weight, source))

    def mean(self, block: int = BLOCK, start: int = 0, stop: int | None = None) -> Iterator[F64]:
        """The weighted mean from value `start` to `stop` (the end), in blocks of `block` values but for the last.

        Raises:
            LocalProtocolError: Nothing was added, or a contribution is no longer what it was when it was added.
        """
        if not self._added:
            raise LocalProtocolError("a sum to which nothing was added has no mean")
        weight = self.weight
        stop = self._size if stop is None else stop
        return (np.divide(part, weight, out=part) for part in self._blocks(block, start, stop))

    def total(self) -> F64:
        """The weighted sum [size]; zeros before the first contribution.

        Raises:
            LocalProtocolError: A contribution is no longer what it was when it was added.
        """
        return np.concatenate([np.zeros(0), *self._blocks(BLOCK, 0, self._size)])

    def _blocks(self, most: int, first: int, end: int) -> Iterator[F64]:
        width = self._dtype.itemsize
        for start, stop in spans(most, first, end):
            total = np.zeros(stop - start)
            for weight, source in self._added:
                content = source(start * width, total.size * width)
                if len(content) < total.size * width:
                    raise LocalProtocolError("a contribution was checked and then, read again, was shorter")
                total += np.multiply(np.frombuffer(content, self._dtype), weight, dtype=np.float64)
            yield total

    def _largest(self, site: str, source: Source) -> float:
        """The largest magnitude in a contribution that is as it must be."""
        width, largest = self._dtype.itemsize, 0.0
        for start in range(0, self._size, BLOCK):
            count = min(BLOCK, self._size - start)
            content = source(start * width, count * width)
            if len(content) < count * width:
                found = f"{start * width + len(content)} bytes instead of {self._size * width}"
                raise self._length_refusal(site, found)
            values = np.frombuffer(content, self._dtype)
            low, high = float(values.min()), float(values.max())  # one NaN makes both NaN
            if not (isfinite(low) and isfinite(high)):
                raise _refusal(site, "holds NaN or infinite values", "send finite values only")
            largest = max(largest, -low, high)
        if source(self._size * width, 1):
            raise self._length_refusal(site, f"more than {self._size * width} bytes")
        return largest

    def _length_refusal(self, site: str, what: str) -> RemoteProtocolError:
        return _refusal(site, f"has {what}", f"send exactly {self._size} values of type {self._dtype.str}")


def _refusal(site: str, what: str, fix: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"the contribution of site {site!r} {what}; the sum stays as it was", fix=fix)
