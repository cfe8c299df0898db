"""What a database's errors mean: each names the store, the cause, and what helps; no password is ever told."""

import errno
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sqlalchemy import Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from federation.errors import LocalProtocolError, StorageError, WhoActs

__all__ = ["disk_told", "file_of", "place", "shown", "told"]

_LOCKED = ("is locked by another program", "stop the other coordinator or tool that has it open, then try again")
_DAMAGED = "restore it from a backup, or move it away to begin a new one"
_CLOSED = ("cannot be opened", "let this user read and write the file and its folder")
_READ_ONLY = ("cannot be written", "make the file and its folder writable to this user")
_FULL = ("has no room on its disk", "free disk space, then try again")
_DISK = ("cannot be read or written by its disk", "check the disk and its free space, then try again")
_NO_FOLDER = ("cannot be opened", "make its folder, and let this user read and write there")

_SQLITE = {
    "SQLITE_BUSY": _LOCKED,
    "SQLITE_LOCKED": _LOCKED,
    "SQLITE_NOTADB": ("is not a SQLite database", _DAMAGED),
    "SQLITE_CORRUPT": ("is damaged", _DAMAGED),
    "SQLITE_READONLY": _READ_ONLY,
    "SQLITE_CANTOPEN": _NO_FOLDER,
    "SQLITE_PERM": _CLOSED,
    "SQLITE_AUTH": _CLOSED,
    "SQLITE_FULL": _FULL,
    "SQLITE_IOERR": _DISK,
}
"""What SQLite's errors mean and what helps; an extended code, such as SQLITE_READONLY_DBMOVED, begins with its kind."""

_SYSTEM = {
    errno.EACCES: _READ_ONLY,
    errno.EPERM: _READ_ONLY,
    errno.EROFS: _READ_ONLY,
    errno.ENOENT: _NO_FOLDER,
    errno.ENOTDIR: _NO_FOLDER,
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
}
"""What the system's errors mean for a file beside a store."""

_STARTING = ("is starting or stopping", "wait until the server runs again; nothing is lost meanwhile")
_BROKEN_OFF = (
    "does not answer: the connection broke off",
    "check the server and the network between",
)
_CROWDED = ("has no connection left", "raise max_connections on the server, or close other programs")
_SERVER = ("does not answer as it must", "check its URL, and that this user may create and change tables there")

_POSTGRESQL = {
    "08": _BROKEN_OFF,
    "25006": ("cannot be written: it is a standby, or opened for reading", "give the URL of the primary server"),
    "40": _LOCKED,
    "42501": ("does not let this user make or change tables", "grant it CREATE on the schema, or make it the owner"),
    "53100": ("has no room on its server's disk", "free disk space on the server, then try again"),
    "53200": ("has no memory left on its server", "free memory on the server, then try again"),
    "53300": _CROWDED,
    "55P03": _LOCKED,
    "57P01": _STARTING,
    "57P02": _STARTING,
    "57P03": _STARTING,
    "57": _BROKEN_OFF,
    "58": ("cannot be read or written by its server's disk", "check the server's disk, then try again"),
    "XX001": ("is damaged", "restore the database from a backup"),
    "XX002": ("is damaged", "restore the database from a backup"),
}
"""What a SQLSTATE means, or else its class, the first two characters."""

_POSTGRESQL_SAYS = (
    (
        r"password authentication failed|no password supplied",
        ("refuses this user's password", "put the right one into ~/.pgpass, PGPASSWORD or the URL"),
    ),
    (r'role "[^"]*" does not exist', ("does not know this user", "create the role, or name another one in the URL")),
    (
        r'database "[^"]*" does not exist',
        ("does not exist", "create the database: createdb --encoding=UTF8 --template=template0 NAME"),
    ),
    (r"too many (connections|clients)|remaining connection slots", _CROWDED),
    (r"pg_hba\.conf", ("does not let this user in from here", "add a line for it to the server's pg_hba.conf")),
    (r"starting up|shutting down|recovery mode|terminating connection", _STARTING),
    (
        r"Connection refused|No such file or directory",
        ("does not answer: no server runs there", "start PostgreSQL, or correct host and port in the URL"),
    ),
    (
        r"could not translate host name|failed to resolve host|Name or service not known",
        ("does not answer: its host name is unknown", "correct the host in the URL, or the name service"),
    ),
    (
        r"timeout expired|timed out|unreachable",
        ("does not answer: no way leads to its server", "check host, port and the firewalls between"),
    ),
    (
        r"closed the connection|connection is (closed|lost)|consuming input failed|reset by peer",
        _BROKEN_OFF,
    ),
)
"""A refused connection has no SQLSTATE, only words; in another language than English they mean `_SERVER`."""

_SECRETS = ("password", "sslpassword")


@contextmanager
def told(engine: Engine) -> Iterator[None]:
    """Turns a database's errors into ones that name who must act.

    Raises:
        LocalProtocolError: A row contradicts what is kept already, or holds what no database can keep.
        StorageError: The database does not take or give what it must; the same may succeed later.
    """
    try:
        yield
    except IntegrityError as contradiction:
        cause = _one_line(contradiction.orig)
        raise LocalProtocolError(f"the store keeps something else already: {cause}") from contradiction
    except (DataError, OverflowError, UnicodeEncodeError) as impossible:
        cause = _one_line(impossible.orig if isinstance(impossible, DataError) else impossible)
        raise LocalProtocolError(f"the store cannot keep a value: {cause}") from impossible
    except DBAPIError as refused:
        raise _meaning(engine.url, refused.orig) from refused
    except SQLAlchemyError as broken:
        raise StorageError(
            f"{place(engine.url)} does not work: {broken}", fix="check its URL and driver", who=WhoActs.COORDINATOR
        ) from broken


@contextmanager
def disk_told(address: URL) -> Iterator[None]:
    """Turns a system's errors over a file beside the store into ones that name who must act.

    Raises:
        StorageError: The disk or folder does not take or give what it must.
    """
    try:
        yield
    except OSError as refused:
        problem, fix = _SYSTEM.get(refused.errno or 0, _DISK)
        raise StorageError(
            f"{place(address)} {problem} ({refused.strerror})", fix=fix, who=WhoActs.COORDINATOR
        ) from refused


def place(address: URL) -> str:
    """Which store an address names, in words: a file by its path, a database by its URL without passwords."""
    if address.get_backend_name() == "sqlite":
        return f"the store {file_of(address)}"
    return f"the store {shown(address)}"


def shown(address: URL) -> str:
    """An address as a URL that people may read: without its passwords, and without the driver's name."""
    public = address.set(drivername=address.get_backend_name()).difference_update_query(_SECRETS)
    return public.render_as_string(hide_password=True)


def file_of(address: URL) -> Path:
    """The file of a store in SQLite."""
    name = address.database or ""
    if name.startswith("file:") and "uri" in address.query:
        name = unquote(name.removeprefix("file:").partition("?")[0])
    return Path(name)


def _meaning(address: URL, cause: Any) -> StorageError:
    who = WhoActs.COORDINATOR
    if not isinstance(cause, sqlite3.Error):
        problem, fix = _of_postgresql(getattr(cause, "sqlstate", None) or "", str(cause))
        return StorageError(f"{place(address)} {problem} ({_one_line(cause)})", fix=fix, who=who)
    code = getattr(cause, "sqlite_errorname", "")
    for name, (problem, fix) in _SQLITE.items():
        if code.startswith(name):
            return StorageError(f"{place(address)} {problem} ({cause})", fix=fix, who=who)
    return StorageError(f"{place(address)} does not work: {cause}", fix="restore it from a backup", who=who)


def _of_postgresql(state: str, words: str) -> tuple[str, str]:
    for known in (state, state[:2]):
        if known in _POSTGRESQL:
            return _POSTGRESQL[known]
    for pattern, meaning in _POSTGRESQL_SAYS:
        if re.search(pattern, words):
            return meaning
    return _SERVER


def _one_line(cause: object) -> str:
    return " ".join(str(cause).split())
