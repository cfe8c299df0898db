"""The database under the store: which URLs can be one, how it is opened, and the schema in it."""

import sqlite3
import time
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
from sqlalchemy.exc import ArgumentError
from sqlmodel import SQLModel, col, insert, select

from coordinator.store import tables
from coordinator.store.hold import only_holders_write
from coordinator.store.meaning import file_of, place, told
from federation.errors import ConfigurationError, StorageError, WhoActs

__all__ = [
    "VERSION_TABLE",
    "alembic_config",
    "check_schema",
    "checked",
    "migrate",
    "opened",
    "opened_for_reading",
    "reader",
    "revision",
    "url_in",
    "writer",
]

VERSION_TABLE = "parley_schema"
"""Alembic's own table; not its usual name, because a PostgreSQL database may serve other programs too."""

_MIGRATIONS = Path(__file__).parent / "migrations"

_PRAGMAS = (
    "PRAGMA journal_mode = WAL",  # readers never wait for the writer, nor it for them
    "PRAGMA synchronous = FULL",  # NORMAL does not sync each commit in WAL mode: a power cut would take rounds back
    "PRAGMA foreign_keys = ON",
)

_DIALLING = {"connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
_DIALLING |= {"tcp_user_timeout": 20_000}
"""How long this side believes in a server that has fallen silent: half a minute; libpq's own is two hours."""

_SESSION = (
    # a server, database or role may be set to lose the last commits in a crash; never the other way round
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'",
    # how long the server believes in a silent coordinator, whose session keeps the next one from taking its place
    "SET tcp_keepalives_idle = 10",
    "SET tcp_keepalives_interval = 5",
    "SET tcp_keepalives_count = 3",
)


def url_in(home: Path) -> str:
    """The URL of the embedded store in a coordinator's home folder."""
    return URL.create("sqlite", database=str(home / "parley.db")).render_as_string()


# -------------------------------------------------------------------------------------------------------------- opening


def opened(url: str, patience: float) -> Engine:
    """The database at `url`, made if there is none, with the schema of this release; this process alone writes there.

    Raises:
        ConfigurationError: `url` is none that a store can have.
        StorageError: Another process holds it, or it cannot be used as it is; nothing in it changed.
    """
    engine = writer(checked(url), patience, "coordinator")
    try:
        with told(engine), engine.begin() as connection:
            migrate(connection)
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
    engine = reader(checked(url), patience)
    try:
        with told(engine), engine.begin() as connection:
            check_schema(connection)
    except BaseException:
        engine.dispose()
        raise
    return engine


def checked(url: str) -> URL:
    """The address in `url`.

    Raises:
        ConfigurationError: It is none that a store can have, or the driver is not installed.
    """
    fix = "give sqlite:///PATH or postgresql://USER@HOST/DATABASE"
    try:
        address = make_url(url)
    except (ArgumentError, ValueError) as unreadable:
        raise ConfigurationError(
            "the store's URL is not a database URL", fix=fix, who=WhoActs.COORDINATOR
        ) from unreadable
    match address.get_backend_name():
        case "sqlite" if address.database in {None, "", ":memory:"}:
            raise ConfigurationError("a store in memory forgets every job at its end", fix=fix, who=WhoActs.COORDINATOR)
        case "sqlite":
            return address
        case "postgresql":
            _require_driver()
            return address.set(drivername="postgresql+psycopg")
        case other:
            raise ConfigurationError(f"a store cannot be kept in {other}", fix=fix, who=WhoActs.COORDINATOR)


def writer(address: URL, patience: float, purpose: str) -> Engine:
    """An engine of one connection, which holds the store as long as it is open; `purpose` is told to the next one."""
    if address.get_backend_name() == "sqlite":
        engine = create_engine(address, connect_args=_waiting(patience), pool_size=1, max_overflow=0)
        only_holders_write(engine, purpose)
        _configure_sqlite(engine, _PRAGMAS, begin="BEGIN IMMEDIATE")
        return engine
    engine = _postgresql(address, patience, pool_size=1, max_overflow=0)
    only_holders_write(engine, purpose)
    return engine


def reader(address: URL, patience: float) -> Engine:
    """An engine whose connections cannot change the store.

    Raises:
        StorageError: There is no file of a store.
    """
    if address.get_backend_name() == "sqlite":
        engine = create_engine(_read_only(address), connect_args=_waiting(patience))
        _configure_sqlite(engine, ("PRAGMA query_only = ON",), begin="BEGIN")
        return engine
    engine = _postgresql(address, patience)

    @event.listens_for(engine, "connect")
    def _refuse_writes(connection: Any, _record: object) -> None:
        connection.execute("SET default_transaction_read_only = on")
        connection.commit()

    return engine


def _require_driver() -> None:
    try:
        import psycopg  # noqa: F401 - asks whether it is there; SQLAlchemy imports it
    except ImportError as missing:
        raise ConfigurationError(
            f"a store in PostgreSQL needs psycopg, which cannot be used: {missing}",
            fix='pip install "parley-fl[postgresql]"',
            who=WhoActs.COORDINATOR,
        ) from missing


def _read_only(address: URL) -> URL:
    path = file_of(address)
    if not path.is_file():
        raise StorageError(
            f"there is no store at {path}", fix="start the coordinator, which makes it, or name another one"
        )
    return URL.create("sqlite", database=f"file:{quote(str(path.absolute()))}", query={"mode": "ro", "uri": "true"})


def _waiting(patience: float) -> dict[str, Any]:
    return {"check_same_thread": False, "timeout": patience}


def _configure_sqlite(engine: Engine, pragmas: tuple[str, ...], *, begin: str) -> None:
    @event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # the driver's own BEGIN would leave SELECTs outside of the transaction
        for pragma in pragmas:
            connection.execute(pragma)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)


def _postgresql(address: URL, patience: float, **pool: int) -> Engine:
    dialling = {name: value for name, value in _DIALLING.items() if name not in address.query}
    engine = create_engine(
        address,
        connect_args=dialling,
        isolation_level="REPEATABLE READ",  # several SELECTs of one read must see one state, as they do in SQLite
        pool_pre_ping=True,  # a connection that broke off meanwhile is made anew, not used
        **pool,
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: object) -> None:
        for setting in (*_SESSION, f"SET lock_timeout = {max(1, round(patience * 1000))}"):
            connection.execute(setting)
        connection.commit()

    return engine


# --------------------------------------------------------------------------------------------------------------- schema


def alembic_config(connection: Connection) -> Config:
    """Alembic's settings for the migrations of this package, over `connection`."""
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def migrate(connection: Connection) -> None:
    """Brings the schema to this release's, within the connection's transaction.

    Raises:
        StorageError: A newer release or another program made what is there, or the server does not keep what it is
            given.
    """
    _refuse_careless(connection)
    scripts = ScriptDirectory(str(_MIGRATIONS))
    head = str(scripts.get_current_head())
    found = revision(connection)
    if found == head:
        return
    _refuse_newer(connection, found, scripts)
    if found is None:
        _refuse_foreign(connection)
    command.upgrade(alembic_config(connection), "head")
    made = {"revision": head, "software": metadata.version("parley-fl"), "migrated": time.time()}
    connection.execute(insert(tables.Migration).values(**made))


def check_schema(connection: Connection) -> None:
    """Passes when the schema is this release's.

    Raises:
        StorageError: It is another's.
    """
    scripts = ScriptDirectory(str(_MIGRATIONS))
    found = revision(connection)
    _refuse_newer(connection, found, scripts)
    if found != scripts.get_current_head():
        schema = f"schema {found}" if found else "no schema of Parley's"
        raise StorageError(
            f"{place(connection.engine.url)} has {schema}; this release reads {scripts.get_current_head()}",
            fix="start the coordinator of this release on it once, or name another store",
        )


def revision(connection: Connection) -> str | None:
    """The schema's revision; None when Parley made none."""
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


def _refuse_careless(connection: Connection) -> None:
    """Refuses a server that forgets in a power cut, or whose database cannot hold every text."""
    if connection.dialect.name == "sqlite":
        return
    fsync, encoding = (connection.exec_driver_sql(f"SHOW {name}").scalar() for name in ("fsync", "server_encoding"))
    if fsync != "on":
        raise StorageError(
            f"{place(connection.engine.url)} would lose rounds in a power cut: its server has fsync = {fsync}",
            fix="set fsync = on in postgresql.conf and reload the server",
            who=WhoActs.COORDINATOR,
        )
    if encoding != "UTF8":
        raise StorageError(
            f"{place(connection.engine.url)} cannot hold every text: its encoding is {encoding}",
            fix="make another database: createdb --encoding=UTF8 --template=template0 NAME",
            who=WhoActs.COORDINATOR,
        )


def _refuse_newer(connection: Connection, found: str | None, scripts: ScriptDirectory) -> None:
    known = {script.revision for script in scripts.walk_revisions()}
    if found is None or found in known:
        return
    newest = select(tables.Migration.software).order_by(col(tables.Migration.migrated).desc()).limit(1)
    software = connection.execute(newest).scalar_one_or_none() or "a newer release"
    raise StorageError(
        f"{place(connection.engine.url)} was written by Parley {software} (schema {found}); "
        f"this is {metadata.version('parley-fl')} (schema {scripts.get_current_head()})",
        fix=f"install Parley {software}, or restore the copy made before the upgrade",
    )


def _refuse_foreign(connection: Connection) -> None:
    foreign = sorted(SQLModel.metadata.tables.keys() & set(inspect(connection).get_table_names()))
    if foreign:
        raise StorageError(
            f"{place(connection.engine.url)} has a table {foreign[0]!r} that Parley did not make",
            fix="give the coordinator a database of its own",
        )
