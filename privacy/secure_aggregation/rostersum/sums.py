"""The streaming sum of masked vectors: one accumulator of ring words, however many sites are in it."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from federation.errors import LocalProtocolError, StorageError, WhoActs
from federation.vector import BLOCK, spans
from privacy.crypto.masks import RINGS, Masks, Ring, Words, dtype
from privacy.secure_aggregation.interface import Source

__all__ = ["MaskedSum", "Parts"]

T = TypeVar("T")

_PART = 8 * BLOCK
"""Words that are worked on by themselves, perhaps beside others: whole blocks of every mask's keystream."""


class Parts(Protocol):
    """Has each part of a vector worked on, one after another or several at once."""

    def __call__(self, size: int, most: int, work: Callable[[slice], T], /) -> Iterator[T]:
        """What `work` makes of each part of `size` words, parts of `most` but for the last, in their order."""
        ...


def _in_turn(size: int, most: int, work: Callable[[slice], T], /) -> Iterator[T]:
    return (work(slice(*span)) for span in spans(most, 0, size))


class MaskedSum:
    """The sum of the vectors of one attempt modulo 2^ring; until `unmask` it looks uniform to whoever holds it.

    Pair masks cancel in the sum over all members of a context and are never made here; self masks are subtracted once,
    all together. A vector is added as it is read, a block of `BLOCK` words at a time, and its digest may be checked on
    the way: bytes other than those its site signed make the whole sum useless, and it says so to everything after.

    Args:
        words: The accumulator [d]: little-endian words of a ring, all zero, in memory or mapped from a file. It is
            changed in place, and the sum is in it.
        parts: How its parts are worked on; one after another, unless it is told otherwise.
    """

    def __init__(self, words: Words, parts: Parts = _in_turn) -> None:
        ring: Ring | None = next((ring for ring in RINGS if dtype(ring) == words.dtype), None)
        if ring is None or words.ndim != 1:
            raise LocalProtocolError(f"a sum is of one vector of little-endian words of {RINGS} bits")
        self._ring: Ring = ring
        self._words = words
        self._parts = parts
        self._added: set[int] = set()
        self._broken = False
        self._unmasked = False

    @property
    def added(self) -> frozenset[int]:
        """The sites whose vectors are in the sum."""
        return frozenset(self._added)

    def add(self, idx: int, y_hash: bytes | None, source: Source) -> None:
        """Adds the vector of site `idx`, whose bytes have the digest `y_hash`.

        None where this process itself checked it as the bytes came in: that takes three times as long as adding them.

        Raises:
            LocalProtocolError: The site is in the sum already, or the sum is unmasked.
            StorageError: The bytes are not those of the digest, or too few or many, or an earlier vector's were not;
                the sum is useless.
        """
        self._check()
        if idx in self._added or self._unmasked:
            raise LocalProtocolError(f"the vector of site {idx} comes a second time, or after the sum was unmasked")
        self._broken = True  # until the last byte has proven right
        seen = hashlib.sha256()

        def taken(part: slice) -> None:
            for first, last in spans(BLOCK, part.start, part.stop):
                content = self._read(idx, slice(first, last), source)
                if y_hash is not None:
                    seen.update(content)

        for _ in (self._parts if y_hash is None else _in_turn)(self._words.size, _PART, taken):
            pass
        if source(self._words.nbytes, 1) or y_hash not in {None, seen.digest()}:
            raise _changed(idx, "has other bytes")
        self._broken = False
        self._added.add(idx)

    def unmask(self, self_keys: Iterable[tuple[int, bytes]]) -> bytes:
        """Subtracts the self mask of each site added, by its key, and gives the SHA-256 of the d words, little endian.

        Raises:
            LocalProtocolError: The sites are not exactly those added, or the sum is unmasked already.
            StorageError: A vector's bytes were not those of its digest.
        """
        self._check()
        keys = sorted(self_keys)
        if self._unmasked or [idx for idx, _ in keys] != sorted(self._added):
            raise LocalProtocolError(f"the self masks of sites {sorted(self._added)} are subtracted together, and once")
        self._unmasked = True
        seen = hashlib.sha256()

        def unmasked(part: slice) -> Words:
            block = self._words[part]
            Masks(self._ring, [(-1, key) for _, key in keys], part.start).add(block, part.start)
            return block

        for block in self._parts(self._words.size, _PART, unmasked):
            seen.update(block.data)
        return seen.digest()

    def words(self) -> Words:
        """The d words of the sum, for the codec to decode: the accumulator itself.

        Raises:
            LocalProtocolError: The sum is still masked.
        """
        if not self._unmasked:
            raise LocalProtocolError("a sum is decoded after its self masks were subtracted, not before")
        return self._words

    def _check(self) -> None:
        if self._broken:
            raise StorageError(
                "this sum holds a vector whose bytes were not those its site signed",
                fix="sum the attempt's stored vectors anew, or burn the round",
            )

    def _read(self, idx: int, part: slice, source: Source) -> bytes:
        """The bytes of a block of the vector of site `idx`, which are in the sum now."""
        block = self._words[part]
        start = part.start * block.itemsize
        content = source(start, block.nbytes)
        if len(content) != block.nbytes:
            raise _changed(idx, f"ends after {start + len(content)} bytes of {self._words.nbytes}")
        np.add(block, np.frombuffer(content, block.dtype), out=block)
        return content


def _changed(idx: int, what: str) -> StorageError:
    return StorageError(
        f"the stored vector of site {idx} {what}: it is not what its site signed",
        fix="check the coordinator's disk; the round can be summed anew or burned",
        who=WhoActs.COORDINATOR,
    )
