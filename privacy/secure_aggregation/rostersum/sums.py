"""The streaming sum of masked vectors: one accumulator of ring words, however many sites are in it."""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from federation.errors import LocalProtocolError, StorageError, WhoActs
from federation.vector import BLOCK
from privacy.crypto.masks import RINGS, Masks, Ring, Words, dtype
from privacy.secure_aggregation.interface import Source

__all__ = ["MaskedSum"]


class MaskedSum:
    """The sum of the vectors of one attempt modulo 2^ring; until `unmask` it looks uniform to whoever holds it.

    Pair masks cancel in the sum over all members of a context and are never made here; self masks are subtracted once,
    all together. A vector is added as it is read, a block of `BLOCK` words at a time, and its digest may be checked on
    the way: bytes other than those its site signed make the whole sum useless, and it says so to everything after.

    Args:
        words: The accumulator [d]: little-endian words of a ring, all zero, in memory or mapped from a file. It is
            changed in place, and the sum is in it.
    """

    def __init__(self, words: Words) -> None:
        ring: Ring | None = next((ring for ring in RINGS if dtype(ring) == words.dtype), None)
        if ring is None or words.ndim != 1:
            raise LocalProtocolError(f"a sum is of one vector of little-endian words of {RINGS} bits")
        self._ring: Ring = ring
        self._words = words
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
        for start, block in self._blocks():
            content = source(start * block.itemsize, block.nbytes)
            if len(content) != block.nbytes:
                raise _changed(idx, f"ends after {start * block.itemsize + len(content)} bytes of {self._words.nbytes}")
            if y_hash is not None:
                seen.update(content)
            np.add(block, np.frombuffer(content, block.dtype), out=block)
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
        masks = Masks(self._ring, [(-1, key) for _, key in keys])
        seen = hashlib.sha256()
        for start, block in self._blocks():
            masks.add(block, start)
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

    def _blocks(self) -> Iterator[tuple[int, Words]]:
        return ((start, self._words[start : start + BLOCK]) for start in range(0, self._words.size, BLOCK))


def _changed(idx: int, what: str) -> StorageError:
    return StorageError(
        f"the stored vector of site {idx} {what}: it is not what its site signed",
        fix="check the coordinator's disk; the round can be summed anew or burned",
        who=WhoActs.COORDINATOR,
    )
