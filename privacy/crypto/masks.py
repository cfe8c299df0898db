"""The mask engine: AES-256-CTR keystreams, read as little-endian words, added to a vector in place."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from federation.errors import LocalProtocolError
from privacy.crypto.canonical import KEY

__all__ = ["RINGS", "Masks", "Ring", "SignedKey", "Words", "add", "dtype", "keystream"]

Ring = Literal[16, 32, 64]
"""Bits of a word; sums are modulo 2 to this power."""

RINGS: tuple[Ring, ...] = (16, 32, 64)

Words: TypeAlias = npt.NDArray[np.unsignedinteger]
"""Little-endian words of a ring: uint16, uint32 or uint64."""

SignedKey = tuple[Literal[1, -1], bytes]
"""A mask: its sign, and its key of 32 bytes, which makes one vector and never another."""

_CHUNK = 1 << 17
"""Bytes worked on at a time: zeros, keystream and values together stay in a second-level cache of 512 KiB.

Measured: 2^16 to 2^18 cost the same within noise; smaller chunks pay for calls.
"""

_COUNTED = AES.block_size // 8
"""Bytes of a keystream for each value of its counter."""

_SLACK = 15
"""Bytes by which `update_into` wants its buffer longer than what it writes."""

_ZEROS = memoryview(bytes(_CHUNK))


def dtype(ring: int) -> np.dtype[np.unsignedinteger]:
    """The little-endian unsigned type of a ring's words.

    Raises:
        LocalProtocolError: There is no such ring.
    """
    if ring not in RINGS:
        raise LocalProtocolError(f"rings have {RINGS} bits, not {ring!r}")
    return np.dtype(f"<u{ring // 8}")


def keystream(key: bytes, start: int = 0) -> CipherContext:
    """AES-256-CTR under a key of 32 bytes, its 16-byte big-endian counter at 0: of zeros it makes the keystream.

    From byte `start` on, where a block of 16 bytes begins.

    Raises:
        LocalProtocolError: The key has another length, or no block begins there.
    """
    if len(key) != KEY:
        raise LocalProtocolError(f"a keystream is made of a key of {KEY} bytes, not of {len(key)}")
    counter, within = divmod(start, _COUNTED)
    if within or start < 0:
        raise LocalProtocolError(f"a keystream is read from a multiple of {_COUNTED} bytes on, not from {start}")
    return Cipher(AES(key), CTR(counter.to_bytes(_COUNTED, "big"))).encryptor()


class Masks:
    """A signed sum of masks, added to a vector that comes block by block and is never whole in memory.

    It costs one keystream and one addition for each key and word, and no memory that grows with the vector. It is
    single-threaded: OpenSSL's keystream is made while Python's global lock is held, so threads would gain nothing.

    Args:
        ring: Bits of a word.
        keys: Each mask's sign and key.
        start: The first word that comes, where a block of 16 bytes of the keystream begins.
    """

    def __init__(self, ring: int, keys: Sequence[SignedKey], start: int = 0) -> None:
        self._dtype = dtype(ring)
        if any(sign not in (1, -1) for sign, _ in keys):
            raise LocalProtocolError("a mask is added (+1) or subtracted (-1)")
        at = start * self._dtype.itemsize
        self._masks = [(np.add if sign > 0 else np.subtract, keystream(key, at).update_into) for sign, key in keys]
        self._buffer = memoryview(bytearray(_CHUNK + _SLACK))
        self._mask: Words = np.frombuffer(self._buffer[:_CHUNK], self._dtype)
        self._next = start

    def add(self, block: Words, start: int) -> None:
        """Adds to `block`, in place and modulo the ring, the words of the masks from `start` on.

        Raises:
            LocalProtocolError: The words are of another type than the ring's, or the block does not begin where the one
                before it ended (at `start` the first): a keystream is read once, forwards.
        """
        if block.dtype != self._dtype or block.ndim != 1:
            raise LocalProtocolError(f"masks of {self._dtype} words cannot be added to {block.ndim}-d {block.dtype}")
        if start != self._next:
            raise LocalProtocolError(f"a block from word {start} was masked where word {self._next} comes next")
        self._next += block.size
        for begin in range(0, block.size, self._mask.size):
            part = block[begin : begin + self._mask.size]
            zeros, mask = _ZEROS[: part.nbytes], self._mask[: part.size]
            for combine, make in self._masks:
                make(zeros, self._buffer)
                combine(part, mask, part)


def add(values: Words, keys: Sequence[SignedKey]) -> None:
    """Adds to the whole vector `values`, in place and modulo its ring, the masks of `keys`, each with its sign.

    Raises:
        LocalProtocolError: The values are not a vector of a ring's words, a key has not 32 bytes, or a sign is neither
            1 nor -1.
    """
    ring: Ring | None = next((ring for ring in RINGS if dtype(ring) == values.dtype), None)
    if ring is None:
        raise LocalProtocolError(f"masks are added to little-endian words of {RINGS} bits, not to {values.dtype}")
    Masks(ring, keys).add(values, 0)
