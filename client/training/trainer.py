"""The agent's end of the trainer: starts the child, asks it one thing at a time, and says why it died if it did."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING

from client.training import protocol
from client.training.protocol import Failed
from federation.errors import StorageError

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from pathlib import Path

    from client.training.protocol import Answer, Request

__all__ = ["Trainer"]

_LINE = 16 * 1024 * 1024
"""Bytes of the longest answer: findings of thousands of columns."""
_KILLED = -9
"""Status of a process that the system ended at once, as it does when memory runs out (SIGKILL)."""


class Trainer:
    """A child process that trains. A child that has died is replaced at the next request.

    Args:
        home: The site's folder; the child's standard error is kept there in `trainer.log`, from its last start on.
    """

    def __init__(self, home: Path) -> None:
        self._log = home / "trainer.log"
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._cancelled = False

    async def ask(self, request: Request) -> Answer:
        """The answer to `request`; requests wait for one another.

        A child that ends instead of answering gives `Failed`: "resources" when the system killed it, "cancelled" after
        `cancel`, otherwise "internal". Cancelling the awaiting task ends the child.
        """
        async with self._turn:
            self._cancelled = False
            process = await self._running()
            if self._cancelled:
                return self._death(0)
            try:
                return await self._exchange(process, request)
            except BaseException:
                await self._end(process)  # its answer, if it still came, would be taken for the next request's
                raise

    async def cancel(self) -> None:
        """Ends the work on the request that is waiting, if one is: it is answered with `Failed("cancelled", ...)`."""
        if self._turn.locked():
            self._cancelled = True
            if self._process is not None:
                await self._end(self._process)

    async def close(self) -> None:
        """Ends the child once the request that is being answered is done; a later `ask` starts another."""
        async with self._turn:
            process, self._process = self._process, None
            if process is None or process.stdin is None:
                return
            process.stdin.close()
            await process.wait()

    async def _running(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("wb") as log:
                # -P: a file named like a library, in whatever folder the agent was started from, is never imported
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    "client.training",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    limit=_LINE,
                    start_new_session=True,  # Ctrl-C is for the agent, which then closes the child's input
                )
        except OSError as refused:
            raise StorageError(
                f"the trainer cannot be started: {refused.strerror}",
                fix=f"make {self._log.parent} writable and free memory",
            ) from refused
        return self._process

    async def _exchange(self, process: Process, request: Request) -> Answer:
        line = b""
        if process.stdin is not None and process.stdout is not None:
            with contextlib.suppress(ConnectionError):  # it died before it read: its exit status tells why
                process.stdin.write(protocol.encode(request))
                await process.stdin.drain()
            line = await process.stdout.readline()
        if line.endswith(b"\n"):
            return protocol.decode_answer(line)
        return self._death(await process.wait())

    def _death(self, status: int) -> Failed:
        if self._cancelled:
            return Failed("cancelled", "the work was cancelled")
        if status == _KILLED:
            return Failed(
                "resources",
                "the trainer was killed, most likely because this machine ran out of memory: free memory or train on a "
                "machine with more",
            )
        return Failed("internal", f"the trainer ended with status {status}; see {self._log}")

    async def _end(self, process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
