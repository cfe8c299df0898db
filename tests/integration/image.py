"""Looks for vectors in a process's memory and in files: for 16 bytes in a row of any of them, wherever they begin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Words = np.ndarray[tuple[int], np.dtype[np.uint64]]

__all__ = ["Traces", "memory"]

_WINDOW = 16
_ANCHOR = 8
_WORD = 4
_PART = 16 * 1024 * 1024
_BITS = 22
_READABLE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r.*?(\[v\w+\])?$", re.MULTILINE)
"""First and last address of a range; the kernel's own, which nothing is written to, have a name of this form."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: the high bits of a product with it spread well."""


class Traces:
    """What is looked for.

    Sixteen bytes of a vector hold, wherever they begin, eight bytes that begin at one of its words. So each eight bytes
    of a content, at each of its offsets, are held against the eight bytes at each word of each vector, which a table of
    hashes makes quick; where they agree, the bytes around them are compared. Eight zeros are passed over.
    """

    def __init__(self, vectors: Iterable[bytes]) -> None:
        self._vectors = tuple(vectors)
        places: dict[int, list[tuple[int, int]]] = {}
        for number, vector in enumerate(self._vectors):
            for start in range(0, len(vector) - _ANCHOR + 1, _WORD):
                anchor = int.from_bytes(vector[start : start + _ANCHOR], "little")
                if anchor:
                    places.setdefault(anchor, []).append((number, start))
        self._places = places
        self._anchors = np.array(sorted(places), dtype=np.uint64)
        self._table = np.zeros(1 << _BITS, dtype=np.bool_)
        self._table[_hashed(self._anchors)] = True

    def count(self, parts: Iterable[bytes]) -> int:
        """How many places of these contents hold sixteen bytes or more of a vector; each part is taken by itself."""
        return sum(1 for part in parts for _ in self._found(part))

    def _found(self, content: bytes) -> Iterator[int]:
        seen = -1
        for at in sorted(self._candidates(content)):
            if at < seen:
                continue  # in the stretch found last
            for number, start in self._places[int.from_bytes(content[at : at + _ANCHOR], "little")]:
                begin, end = _stretch(content, at, self._vectors[number], start)
                if end - begin >= _WINDOW:
                    seen = end
                    yield begin
                    break

    def _candidates(self, content: bytes) -> set[int]:
        """Where eight bytes are those at a word of a vector."""
        found: set[int] = set()
        for shift in range(min(_ANCHOR, max(0, len(content) - _ANCHOR + 1))):
            words = np.frombuffer(content, "<u8", (len(content) - shift) // _ANCHOR, shift).copy()  # aligned
            likely = np.flatnonzero(np.take(self._table, _hashed(words)))
            if likely.size and self._anchors.size:
                nearest = np.minimum(np.searchsorted(self._anchors, words[likely]), self._anchors.size - 1)
                sure = likely[self._anchors[nearest] == words[likely]]
                found.update((sure * _ANCHOR + shift).tolist())
        return found


def _hashed(words: Words) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    hashes: Words = (words * _SPREAD) >> np.uint64(64 - _BITS)
    return hashes.view(np.int64)


def _stretch(content: bytes, at: int, vector: bytes, start: int) -> tuple[int, int]:
    """From where to where `content` agrees with `vector` around `at`, which stands at `start` there."""
    begin = at
    while begin > 0 and start - (at - begin) > 0 and content[begin - 1] == vector[start - (at - begin) - 1]:
        begin -= 1
    end = at
    while end < len(content) and start + (end - at) < len(vector) and content[end] == vector[start + (end - at)]:
        end += 1
    return begin, end


def memory(pid: int) -> Iterator[bytes]:
    """All memory that a process can read, in parts that overlap; it should stand still."""
    ranges = _READABLE.findall(Path(f"/proc/{pid}/maps").read_text())
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as file:
        for first, last, kernels in ranges:
            for start in range(int(first, 16), int(last, 16), _PART) if not kernels else ():
                file.seek(start)
                part = file.read(min(_PART + _WINDOW, int(last, 16) - start))
                if part.count(0) < len(part):
                    yield part
