"""Performs what the machine of secure sums wants done beside training: what is durable, what is logged, masks, uploads.

```
Persist --> vault      Record --> audit log      Mask --> one thread --> masked vector --> upload, beside the stream
```
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar, assert_never

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client.connection import Connection
from client.ledger import SiteLedger
from client.masking import Contributions
from client.session_events import Assigned, Event, MaskFailed, Record, StopUploads, UploadMasked
from client.vault import Vault
from federation.audit import AuditLog
from federation.blobs import BlobRef
from federation.errors import ParleyError
from privacy.secure_aggregation.rostersum import site_events as sums

__all__ = ["Performed", "Sealing", "Summing", "Transfer"]

log = logging.getLogger("parley.site")

Transfer = Callable[[Connection], Awaitable[None]]
"""Something sent or fetched over a connection, from where it was cut off."""

Performed = sums.Persist | sums.Mask | sums.Erase | sums.Abandon | Record | UploadMasked | StopUploads

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sealing:
    """What a site needs to take part in jobs under secure aggregation; this process alone has them open.

    Attributes:
        key: The site's protocol key.
        vault: Its durable state.
        audit: Its audit log.
    """

    key: Ed25519PrivateKey = field(repr=False)
    vault: Vault
    audit: AuditLog

    @property
    def ledger(self) -> SiteLedger:
        """The site's privacy ledger, which is kept in its vault."""
        return SiteLedger(self.vault, self.audit)


class Summing:
    """Performs a site's effects under secure aggregation. Of updates nothing outlives its process.

    Args:
        folder: Where updates and masked vectors lie, theirs alone; what an ended process left there is gone.
        sealing: Key, vault and log.
        feed: Tells the session of an event.
        persist: Makes a transfer, through cuts, until it is made.
    """

    def __init__(
        self,
        folder: Path,
        sealing: Sealing,
        feed: Callable[[Event], None],
        persist: Callable[[Transfer], Awaitable[None]],
    ) -> None:
        self.contributions = Contributions(folder)
        self._sealing = sealing
        self._feed = feed
        self._persist = persist
        self._thread = ThreadPoolExecutor(1, "masks")
        self._masking: dict[bytes, asyncio.Task[None]] = {}
        self._uploads: dict[bytes, asyncio.Task[None]] = {}

    def perform(self, effect: Performed) -> None:
        """Performs an effect, or begins to; what is to be durable is so when this returns.

        Raises:
            StorageError: The vault or the audit log does not take it: the process must end.
            LocalProtocolError: The vault found a bug of ours: the process must end.
        """
        match effect:
            case sums.Persist():
                self._sealing.vault.persist(effect)
            case Record(entries):
                self._sealing.audit.extend(entries, time.time())
            case sums.Mask(ctx=ctx):
                self._masking[ctx] = _begun(self._mask(effect))
            case sums.Erase(update=update):
                self.contributions.erase(update)
            case sums.Abandon(ctx=ctx):
                self._masking.pop(ctx, None)  # it ends by itself, within a block
                _stop(self._uploads.pop(ctx, None))
                self.contributions.abandon(ctx)
            case UploadMasked(job, payload):
                if payload.ctx not in self._uploads:
                    self._uploads[payload.ctx] = _begun(self._upload(job, payload))
            case StopUploads():
                while self._uploads:
                    _stop(self._uploads.popitem()[1])
            case _:
                assert_never(effect)

    async def hold(self, assigned: Assigned, *, rows: int, declared: int) -> None:
        """Holds the result that lies at `contributions.result`, found finite, until it is erased.

        Raises:
            DeclineError: A value is not finite; the result is erased.
            ParleyError: It is no result of its plan, or cannot be read; it is erased.
        """
        plan, prepare = assigned.work.plan, self.contributions.prepare
        await self._threaded(partial(prepare, assigned.update, plan, rows=rows, declared=declared))

    async def close(self) -> None:
        """Ends what is under way; masks end within a block."""
        for ctx in tuple(self._masking):
            self.perform(sums.Abandon(b"", ctx))
        self.perform(StopUploads())
        await asyncio.to_thread(self._thread.shutdown)

    async def _threaded(self, work: Callable[[], T]) -> T:
        """What the one thread of masks made of it; a task that is cancelled ends only once the thread is done."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # whatever it was, its task has been cancelled
                await future
            raise

    async def _mask(self, mask: sums.Mask) -> None:
        try:
            payload = await self._threaded(partial(self.contributions.mask, mask))
        except ParleyError as failed:
            if self._masking.pop(mask.ctx, None) is not None:
                self._feed(MaskFailed(mask, str(failed)))
            return
        self._masking.pop(mask.ctx, None)
        if payload is not None:
            self._feed(sums.Masked(mask.job_hash, mask.ctx, payload.digest))

    async def _upload(self, job: str, payload: sums.UploadPayload) -> None:
        ref, blobs = BlobRef(payload.y_hash, payload.size), self.contributions.payloads
        try:
            await self._persist(partial(Connection.upload, job=job, ref=ref, blobs=blobs))
        except ParleyError as refused:
            log.warning("job %s: a masked vector did not reach the coordinator: %s", job, refused)
            return
        finally:
            if self._uploads.get(payload.ctx) is asyncio.current_task():
                del self._uploads[payload.ctx]
        self._feed(sums.UploadDone(payload.job_hash, payload.ctx))


def _begun(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    task.add_done_callback(_tell)
    return task


def _stop(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the agent failed at a masked vector", exc_info=error)
