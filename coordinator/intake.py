"""An upload on its way to the disk: chunks are hashed and written beside the event loop, in order."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from federation.blobs import Incoming
from federation.messages import Bytes

__all__ = ["Intake"]

T = TypeVar("T")

_SMALL = 64 * 1024
"""Bytes that are hashed and written in less time than it takes to have a thread do it."""


class Intake:
    """One upload, of which at most one chunk is being added at a time; to hash it takes as long as to move it.

    Args:
        incoming: Where the bytes go; it is this intake's alone.
    """

    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming
        self._turn = threading.Lock()

    @property
    def offset(self) -> int:
        """Bytes that are here."""
        return self._incoming.offset

    async def append(self, chunk: Bytes) -> None:
        """Adds the next bytes; those that have come are kept even if the call that brought them is cut off meanwhile.

        Raises:
            RemoteProtocolError, StorageError: As `Incoming.append`.
        """
        if len(chunk) <= _SMALL:
            self._in_turn(lambda: self._incoming.append(chunk))
        else:
            await self._beside(lambda: self._incoming.append(chunk))

    def finish(self) -> Path:
        """Gives the payload its name, as `Incoming.finish` does, and returns its path; no other call comes between.

        Raises:
            RemoteProtocolError, StorageError: As `Incoming.finish`.
        """
        return self._in_turn(self._incoming.finish)

    def pause(self) -> None:
        """Ends this intake, so that a later one continues it; waits for the chunk that is being added."""
        with self._turn:
            self._incoming.pause()

    async def _beside(self, work: Callable[[], T]) -> T:
        """What `work` gives, in a thread; it is waited for whatever happens to the call."""
        doing = asyncio.ensure_future(asyncio.to_thread(self._in_turn, work))
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            await doing
            raise

    def _in_turn(self, work: Callable[[], T]) -> T:
        with self._turn:
            return work()
