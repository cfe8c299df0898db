"""A thread that does blocking work in the order in which it was asked, beside the event loop."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from federation.errors import StorageError

__all__ = ["Worker"]

log = logging.getLogger("parley.coordinator")

T = TypeVar("T")

_RETRY_SECONDS = 5.0


class Worker:
    """One thread. Work asked for earlier is done earlier.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)

    async def do(self, work: Callable[[], T]) -> T:
        """The result of `work`, or its error."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def insist(self, what: str, work: Callable[[], T]) -> T:
        """The result of `work`; what disk or database refuse is asked of them again until they take it."""
        while True:
            try:
                return await self.do(work)
            except StorageError as refused:
                log.error("cannot store %s: %s; trying again in %.0f s", what, refused, _RETRY_SECONDS)  # noqa: TRY400 - the message holds the cause
                await asyncio.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Returns when all that was asked is done."""
        self._thread.shutdown(wait=True)
