"""The database under the store: how it is opened and migrated, and what its errors mean to whoever must act."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, inspect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlmodel import SQLModel, col, insert, select

from coordinator.store import tables
from federation.errors import ConfigurationError, LocalProtocolError, StorageError, WhoActs

__all__ = ["VERSION_TABLE", "alembic_config", "opened", "opened_for_reading", "told", "url_in"]

VERSION_TABLE = "parley_schema"
"""Alembic's own table; not its usual name, because a PostgreSQL database may serve other programs too."""

_MIGRATIONS = Path(__file__).parent / "migrations"

_PRAGMAS = (
    "PRAGMA journal_mode = WAL",  # readers never wait for the writer, nor it for them
    "PRAGMA synchronous = FULL",  # NORMAL does not sync each commit in WAL mode: a power cut would take rounds back
    "PRAGMA foreign_keys = ON",
)

_LOCKED = ("is locked by another program", "stop the other coordinator or tool that has it open, then try again")
_DAMAGED = "restore it from a backup, or move it away to begin a new one"
_CLOSED = ("cannot be opened", "let this user read and write the file and its folder")

_SQLITE = {
    "SQLITE_BUSY": _LOCKED,
    "SQLITE_LOCKED": _LOCKED,
    "SQLITE_NOTADB": ("is not a SQLite database", _DAMAGED),
    "SQLITE_CORRUPT": ("is damaged", _DAMAGED),
    "SQLITE_READONLY": ("cannot be written", "make the file and its folder writable to this user"),
    "SQLITE_CANTOPEN": ("cannot be opened", "make its folder, and let this user read and write there"),
    "SQLITE_PERM": _CLOSED,
    "SQLITE_AUTH": _CLOSED,
    "SQLITE_FULL": ("has no room on its disk", "free disk space, then try again"),
    "SQLITE_IOERR": ("cannot be read or written by its disk", "check the disk and its free space, then try again"),
}
"""What SQLite's errors mean and what helps; an extended code, such as SQLITE_READONLY_DBMOVED, begins with its kind."""


def url_in(home: Path) -> str:
    """The URL of the embedded store in a coordinator's home folder."""
    return URL.create("sqlite", database=str(home / "parley.db")).render_as_string()


def opened(url: str, patience: float) -> Engine:
    """The database at `url`, made if there is none, with the schema of this release.

    Raises:
        ConfigurationError: `url` is none that a store can have.
        StorageError: The database cannot be used as it is; nothing in it changed.
    """
    engine = _engine(_checked(url), patience)
    try:
        with told(engine), engine.begin() as connection:
            _migrate(connection)
    except BaseException:
        engine.dispose()
        raise
    return engine


def opened_for_reading(url: str, patience: float) -> Engine:
    """The database at `url` as it stands: nothing that is done with the engine changes it.

    Raises:
        ConfigurationError: `url` is none that a store can have.
        StorageError: There is no store, or none that this release can read.
    """
    address = _checked(url)
    if address.get_backend_name() == "sqlite":
        address = _read_only(address)
    engine = _engine(address, patience, read_only=True)
    try:
        with told(engine), engine.begin() as connection:
            _check_schema(connection)
    except BaseException:
        engine.dispose()
        raise
    return engine


@contextmanager
def told(engine: Engine) -> Iterator[None]:
    """Turns a database's errors into ones that name who must act.

    Raises:
        LocalProtocolError: A row contradicts what is kept already.
        StorageError: The database does not take or give what it must.
    """
    try:
        yield
    except IntegrityError as contradiction:
        raise LocalProtocolError(f"the store keeps something else already: {contradiction.orig}") from contradiction
    except DBAPIError as refused:
        raise _meaning(engine.url, refused) from refused
    except SQLAlchemyError as broken:
        raise StorageError(
            f"{_place(engine.url)} does not work: {broken}", fix="check its URL and driver", who=WhoActs.COORDINATOR
        ) from broken


def alembic_config(connection: Connection) -> Config:
    """Alembic's settings for the migrations of this package, over `connection`."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


# -------------------------------------------------------------------------------------------------------------- opening


def _checked(url: str) -> URL:
    fix = "give sqlite:///PATH or postgresql://USER@HOST/DATABASE"
    try:
        address = make_url(url)
    except ArgumentError as unreadable:
        raise ConfigurationError(
            "the store's URL is not a database URL", fix=fix, who=WhoActs.COORDINATOR
        ) from unreadable
    match address.get_backend_name():
        case "sqlite" if address.database in {None, "", ":memory:"}:
            raise ConfigurationError("a store in memory forgets every job at its end", fix=fix, who=WhoActs.COORDINATOR)
        case "sqlite":
            return address
        case "postgresql":
            return address.set(drivername="postgresql+psycopg")
        case other:
            raise ConfigurationError(f"a store cannot be kept in {other}", fix=fix, who=WhoActs.COORDINATOR)


def _read_only(address: URL) -> URL:
    path = Path(address.database or "")
    if not path.is_file():
        raise StorageError(
            f"there is no store at {path}", fix="start the coordinator, which makes it, or name another one"
        )
    return URL.create("sqlite", database=f"file:{quote(str(path.absolute()))}", query={"mode": "ro", "uri": "true"})


def _engine(address: URL, patience: float, *, read_only: bool = False) -> Engine:
    if address.get_backend_name() != "sqlite":
        # Several SELECTs of one read must see one state, as they do in SQLite.
        return create_engine(address, isolation_level="REPEATABLE READ", pool_pre_ping=True)
    engine = create_engine(address, connect_args={"check_same_thread": False, "timeout": patience})
    pragmas = ("PRAGMA query_only = ON",) if read_only else _PRAGMAS
    busy = f"PRAGMA busy_timeout = {round(patience * 1000)}"

    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # the driver's own BEGIN would leave SELECTs outside of the transaction
        for pragma in (busy, *pragmas):
            connection.execute(pragma)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


# --------------------------------------------------------------------------------------------------------------- schema


def _migrate(connection: Connection) -> None:
    scripts = ScriptDirectory(str(_MIGRATIONS))
    head = str(scripts.get_current_head())
    found = _revision(connection)
    if found == head:
        return
    _refuse_newer(connection, found, scripts)
    if found is None:
        _refuse_foreign(connection)
    command.upgrade(alembic_config(connection), "head")
    made = {"revision": head, "software": metadata.version("parley-fl"), "migrated": time.time()}
    connection.execute(insert(tables.Migration).values(**made))


def _check_schema(connection: Connection) -> None:
    scripts = ScriptDirectory(str(_MIGRATIONS))
    found = _revision(connection)
    _refuse_newer(connection, found, scripts)
    if found != scripts.get_current_head():
        schema = f"schema {found}" if found else "no schema of Parley's"
        raise StorageError(
            f"{_place(connection.engine.url)} has {schema}; this release reads {scripts.get_current_head()}",
            fix="start the coordinator of this release on it once, or name another store",
        )


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


def _refuse_newer(connection: Connection, found: str | None, scripts: ScriptDirectory) -> None:
    known = {script.revision for script in scripts.walk_revisions()}
    if found is None or found in known:
        return
    newest = select(tables.Migration.software).order_by(col(tables.Migration.migrated).desc()).limit(1)
    software = connection.execute(newest).scalar_one_or_none() or "a newer release"
    raise StorageError(
        f"{_place(connection.engine.url)} was written by Parley {software} (schema {found}); "
        f"this is {metadata.version('parley-fl')} (schema {scripts.get_current_head()})",
        fix=f"install Parley {software}, or restore the copy made before the upgrade",
    )


def _refuse_foreign(connection: Connection) -> None:
    foreign = sorted(SQLModel.metadata.tables.keys() & set(inspect(connection).get_table_names()))
    if foreign:
        raise StorageError(
            f"{_place(connection.engine.url)} has a table {foreign[0]!r} that Parley did not make",
            fix="give the coordinator a database of its own",
        )


# --------------------------------------------------------------------------------------------------------------- errors


def _place(address: URL) -> str:
    if address.get_backend_name() != "sqlite":
        return f"the store at {address.render_as_string(hide_password=True)}"
    return f"the store {(address.database or '').removeprefix('file:')}"


def _meaning(address: URL, refused: DBAPIError) -> StorageError:
    cause: Any = refused.orig
    place = _place(address)
    if not isinstance(cause, sqlite3.Error):
        fix = "check its URL, that the server runs, and that this user may create and change tables there"
        return StorageError(f"{place} does not answer as it must: {cause}", fix=fix, who=WhoActs.COORDINATOR)
    code = getattr(cause, "sqlite_errorname", "")
    for name, (problem, fix) in _SQLITE.items():
        if code.startswith(name):
            return StorageError(f"{place} {problem} ({cause})", fix=fix, who=WhoActs.COORDINATOR)
    return StorageError(f"{place} does not work: {cause}", fix="restore it from a backup", who=WhoActs.COORDINATOR)
