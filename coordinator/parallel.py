"""What a step's arithmetic does at once: several parts of a vector, and the disk's work beside them."""

import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self, TypeVar

from federation.blobs import BlobRef, Draft

__all__ = ["Settling", "in_parts"]

T = TypeVar("T")

_THREADS = min(4, os.cpu_count() or 1)
_UNSETTLED = 8 * 1024 * 1024
"""Bytes of a draft that wait before the disk is given them."""


def in_parts(size: int, most: int, work: Callable[[slice], T]) -> Generator[T, None, None]:
    """What `work` makes of each part of a vector of `size` values, parts of `most` but for the last, in their order.

    It is at most one part ahead of each thread, so that memory does not grow with the vector. When a part fails, or the
    iterator is closed, those that have begun are finished first and the others are never begun.
    """
    parts = [slice(start, min(size, start + most)) for start in range(0, size, most)]
    if len(parts) < 2 or _THREADS < 2:  # noqa: PLR2004 - there is nothing to do at once
        yield from map(work, parts)
        return
    with ThreadPoolExecutor(_THREADS, "parts") as threads:
        ahead: deque[Future[T]] = deque()
        try:
            for part in parts:
                ahead.append(threads.submit(work, part))
                if len(ahead) > _THREADS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for each in ahead:
                each.cancel()


class Settling:
    """Writes a draft while a thread brings to the disk what is written: `keep` waits for little more than the rest.

    Args:
        draft: What is written. It is lost when the disk refuses any of it.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._thread = ThreadPoolExecutor(1, "settling")
        self._settling: Future[None] | None = None
        self._unsettled = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failed: object) -> None:
        self._thread.shutdown()

    def write(self, content: bytes | memoryview) -> None:
        """Adds the next bytes.

        Raises:
            StorageError: The disk does not take them, or did not take earlier ones.
        """
        self._draft.write(content)
        self._unsettled += len(content)
        if self._unsettled >= _UNSETTLED and self._settled():
            self._unsettled = 0
            self._settling = self._thread.submit(self._draft.settle)

    def keep(self) -> BlobRef:
        """Gives the draft its name, durably.

        Raises:
            StorageError: The disk does not take it.
        """
        if self._settling is not None:
            self._settling.result()  # the system tells of a failed write once
        return self._draft.keep()

    def _settled(self) -> bool:
        """Whether the thread is free; it tells of what it could not do."""
        if self._settling is not None and self._settling.done():
            self._settling.result()
            self._settling = None
        return self._settling is None
