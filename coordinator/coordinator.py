"""The coordinator without its sockets: its rooms, put together, and who is told of what."""

import asyncio
import time
from pathlib import Path

from coordinator.attendance import Attendance
from coordinator.conduct import Conductor
from coordinator.members import CoordinatorIdentity, Members
from coordinator.operation import Operation
from coordinator.store.store import Store
from coordinator.worker import Worker
from federation import audit

__all__ = ["Coordinator"]


class Coordinator:
    """The coordinator.

    Args:
        folder: Where payloads lie, and the audit log.
        store: The durable memory; from now on used in one thread of the coordinator's.
        me: The coordinator's identity.

    Raises:
        StorageError: Another process appends to the audit log, it is another's or broken, or the disk refuses.
    """

    def __init__(self, folder: Path, store: Store, me: CoordinatorIdentity) -> None:
        self._worker = Worker("store")
        self.members = Members(me, store, self._worker)
        self.attendance = Attendance(self.members, store, self._worker)
        send, present = self.attendance.send, self.attendance.present
        name = audit.LogName(me.statement.name, me.statement.role.value)
        self._audit = audit.AuditLog(folder / audit.FILE, name, time.time())
        self.conductor = Conductor(folder, store, self._worker, send, present, me.protocol_key, self._audit)
        self.operation = Operation(folder, store, self._worker, self.members, self.attendance, self.conductor)
        self._pulse: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Takes up the jobs that are not over. Call inside the running loop, before listening."""
        self.conductor.start()
        self.conductor.revoked(self.members.revocations)
        self._pulse = asyncio.create_task(self.attendance.pulse(self.conductor))

    async def leave(self) -> None:
        """Ends all streams in words; calls that are still open find every room as it was."""
        if self._pulse is not None:
            self._pulse.cancel()
        await self.attendance.close()

    async def close(self) -> None:
        """Returns when what was being stored is stored; call it when no call is open any more."""
        await self.conductor.close()
        self._audit.close()
        self._worker.close()
