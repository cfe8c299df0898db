"""One coordinator at a time changes a store: only a connection that holds it writes, and a hold ends with its process.

SQLite: an exclusive lock on a file beside the database, which says whose it is. PostgreSQL: an advisory lock of the
very session that writes. When that session breaks off in the middle of a commit, the next one gets the lock only after
the server has settled the old transaction; so what the next one reads is final, and nobody else wrote in between.
"""

import json
import os
import re
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.engine import URL
from sqlalchemy.pool import ConnectionPoolEntry

from coordinator.store.meaning import disk_told, file_of, place
from federation.errors import StorageError, WhoActs

__all__ = ["only_holders_write"]

_KEY = (int.from_bytes(b"parl"), int.from_bytes(b"stor"))
"""Of the advisory lock; one of each key exists in every database of a server."""

_NAMED = re.compile(r"parley-(\w+) (\d+) [0-9a-f]{8} (.*)")


@dataclass(frozen=True, slots=True)
class Holder:
    """Who uses a store: a coordinator or a migration; `since` is 0 where the server does not tell."""

    purpose: str
    process: int
    host: str
    since: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime(" since %Y-%m-%d %H:%M:%S UTC")
        return f"{self.purpose} (process {self.process} on {self.host}{since if self.since else ''})"


def only_holders_write(engine: Engine, purpose: str) -> None:
    """From now on a connection of `engine` holds its store, until the engine is disposed of; it may have one at a time.

    Connecting raises StorageError when another process holds the store, or another engine of this one. On PostgreSQL
    it waits for them as long as the session's lock_timeout says: a server needs a moment to notice a dead process.
    """
    if engine.dialect.name == "sqlite":
        _by_file(engine, purpose)
    else:
        _by_session(engine, purpose)


def _in_use(address: URL, purpose: str, by: Holder | None) -> StorageError:
    if by is None:
        return StorageError(
            f"another program uses {place(address)}",
            fix="stop it, then try again (lsof names who has a lock file open, pg_stat_activity a server's sessions)",
            who=WhoActs.COORDINATOR,
        )
    return StorageError(
        f"{'another' if by.purpose == purpose else 'a'} {by} uses {place(address)}",
        fix=f"stop it there (kill {by.process}, or systemctl stop when it is a service), then try again",
        who=WhoActs.COORDINATOR,
    )


# --------------------------------------------------------------------------------------------------------------- SQLite


def _by_file(engine: Engine, purpose: str) -> None:
    held: list[int] = []

    @event.listens_for(engine, "connect")
    def _take(connection: Any, _record: ConnectionPoolEntry) -> None:
        try:
            if not held:
                held.append(_locked(engine.url, purpose))
        except BaseException:
            connection.close()
            raise

    @event.listens_for(engine, "engine_disposed")
    def _release(_engine: Engine) -> None:
        while held:
            os.close(held.pop())


def _locked(address: URL, purpose: str) -> int:
    """The descriptor of the lock file, locked and signed."""
    database = file_of(address).resolve()
    path = database.with_name(database.name + ".lock")
    with disk_told(address):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, address, purpose, path)
            _share_owner(descriptor, database)
            me = Holder(purpose, os.getpid(), socket.gethostname(), time.time())
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(asdict(me)).encode())
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def _lock(descriptor: int, address: URL, purpose: str, path: Path) -> None:
    if os.name == "nt":
        return  # Windows runs sites only
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as taken:
        raise _in_use(address, purpose, _signed_by(path)) from taken


def _share_owner(descriptor: int, database: Path) -> None:
    """Keeps a lock file that root made usable to the coordinator's own user, as SQLite does with its files."""
    if os.name != "nt" and os.geteuid() == 0:
        owner = (database if database.exists() else database.parent).stat()
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


def _signed_by(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None  # it is about to sign


# ----------------------------------------------------------------------------------------------------------- PostgreSQL


def _by_session(engine: Engine, purpose: str) -> None:
    me = f"parley-{purpose} {os.getpid()} {secrets.token_hex(4)} {socket.gethostname()}"[:63]  # what PostgreSQL keeps

    @event.listens_for(engine, "connect")
    def _take(connection: Any, _record: ConnectionPoolEntry) -> None:
        try:
            _sign(connection, me)
            _acquire(connection, engine.url, purpose)
        except BaseException:
            connection.close()
            raise


def _sign(connection: Any, me: str) -> None:
    """Names this session, and ends an earlier one of this engine that the server believes to be alive."""
    connection.execute("SELECT set_config('application_name', %s, false)", (me,))
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = %s AND datname = current_database() AND pid <> pg_backend_pid()",
        (me,),
    )
    connection.commit()


def _acquire(connection: Any, address: URL, purpose: str) -> None:
    import psycopg

    try:
        connection.execute("SELECT pg_advisory_lock(%s, %s)", _KEY)
        connection.commit()
    except psycopg.errors.LockNotAvailable as taken:
        connection.rollback()
        raise _in_use(address, purpose, _holding(connection)) from taken


def _holding(connection: Any) -> Holder | None:
    found = connection.execute(
        "SELECT application_name, extract(epoch FROM backend_start)::float8"
        " FROM pg_locks JOIN pg_stat_activity USING (pid)"
        " WHERE locktype = 'advisory' AND granted AND classid = %s AND objid = %s"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        _KEY,
    ).fetchone()
    named = found and _NAMED.fullmatch(found[0] or "")
    return Holder(named[1], int(named[2]), named[3], found[1] or 0.0) if named else None
