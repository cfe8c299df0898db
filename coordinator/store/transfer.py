"""Moves a whole store to another database: in one transaction there, and compared row for row before it is kept."""

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Connection, Engine, Enum, MetaData, String, Table, func, select
from sqlalchemy.engine import URL
from sqlalchemy.types import TypeDecorator, TypeEngine
from sqlmodel import SQLModel

from coordinator.store import database, tables
from coordinator.store.meaning import file_of, place, told
from coordinator.store.reader import PATIENCE
from federation.errors import ConfigurationError, StorageError, WhoActs

__all__ = ["Copied", "transfer"]

_PURPOSE = "migration"
_BATCH = 100
"""Rows in memory at a time; the longest, a job's or a model's, have some megabytes at most."""

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Copied:
    """A table as it stands in both stores: its rows, and the sum of their SHA-256 (mod 2^256, in hexadecimal)."""

    table: str
    rows: int
    digest: str


def transfer(
    source: str, target: str, *, patience: float = PATIENCE, progress: Callable[[str, int, int], None]
) -> tuple[Copied, ...]:
    """Afterwards `target` tells what `source` tells, by every method; the source stays as it is.

    Both are held meanwhile: no coordinator writes to either. A failure at any instant leaves the target empty.

    Args:
        source: A store's URL, of this release's schema.
        target: The URL of an empty database, or of a store that never kept anything.
        patience: Seconds to wait for another program's lock.
        progress: Is told of the table, and of how many of how many rows are copied.

    Raises:
        ConfigurationError: A URL is none that a store can have, or both name the same store.
        StorageError: A coordinator uses one of them, the source is no store of this release or the target is not empty,
            or a database fails.
    """
    here, there = database.checked(source), database.checked(target)
    database.opened_for_reading(source, patience).dispose()  # refuses what is no store before a file is made for it
    if _identity(here, patience) == _identity(there, patience):
        raise ConfigurationError(
            f"{place(here)} cannot be copied onto itself", fix="name another database as the target", who=WhoActs.YOU
        )
    with _held(here, patience) as ours, _held(there, patience) as theirs:
        with _reading(ours) as kept, told(theirs), theirs.begin() as new:
            _prepare(new)
            counts = {table.name: _count(kept, table) for table in _tables()}
            copied = tuple(_copied(table, ours, kept, new, counts, progress) for table in _tables())
            _restart_numbers(new)
        return copied


# ------------------------------------------------------------------------------------------------------- both databases


def _identity(address: URL, patience: float) -> object:
    """What two addresses of one database have in common."""
    if address.get_backend_name() == "sqlite":
        path = file_of(address).resolve()
        return (path.stat().st_dev, path.stat().st_ino) if path.exists() else path
    engine = database.reader(address, patience)
    try:
        with told(engine), engine.connect() as connection:
            this = select(func.pg_postmaster_start_time(), func.current_database(), func.current_schema())
            return tuple(connection.execute(this).one())
    finally:
        engine.dispose()


@contextmanager
def _held(address: URL, patience: float) -> Iterator[Engine]:
    engine = database.writer(address, patience, _PURPOSE)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def _reading(engine: Engine) -> Iterator[Connection]:
    """A connection that sees one state of the source; what it reads must be read under `told` of its own."""
    with told(engine):
        connection = engine.connect()
    try:
        with told(engine):
            connection.begin()
        yield connection
    finally:
        connection.close()


def _prepare(new: Connection) -> None:
    """Makes the schema in an empty database."""
    if database.revision(new) is not None:
        database.check_schema(new)
    database.migrate(new)
    for table in _tables():
        rows = 0 if table.name == tables.Migration.__tablename__ else _count(new, table)
        if rows:
            raise StorageError(
                f"{place(new.engine.url)} is not empty: its table {table.name!r} has {rows} rows",
                fix="name an empty database as the target",
                who=WhoActs.YOU,
            )
    new.execute(_plain(SQLModel.metadata.tables["migration"]).delete())  # the source's own history takes its place


def _restart_numbers(new: Connection) -> None:
    """Lets PostgreSQL number new rows after the copied ones."""
    if new.dialect.name == "sqlite":
        return
    for table in _tables():
        column = table.autoincrement_column
        if column is not None:
            last = select(func.max(column)).scalar_subquery()
            new.execute(select(func.setval(func.pg_get_serial_sequence(table.name, column.name), last)))


# ------------------------------------------------------------------------------------------------------------ one table


def _tables() -> list[Table]:
    """All tables of the store; those that others refer to come first."""
    return SQLModel.metadata.sorted_tables


def _copied(
    table: Table,
    source: Engine,
    kept: Connection,
    new: Connection,
    counts: Mapping[str, int],
    progress: Callable[[str, int, int], None],
) -> Copied:
    plain = _plain(table)
    given, total = _Tally(), counts[table.name]
    progress(table.name, 0, total)
    for batch in _batches(source, kept, plain):
        new.execute(plain.insert(), batch)
        given.add(batch)
        progress(table.name, given.rows, total)
    taken = _Tally()
    for batch in _batches(new.engine, new, plain):
        taken.add(batch)
    if taken != given:
        raise StorageError(
            f"table {table.name!r} reads otherwise in {place(new.engine.url)} than it was written; nothing was kept",
            fix="check the target's disk and server, or name another database",
            who=WhoActs.COORDINATOR,
        )
    return Copied(table.name, given.rows, given.digest)


def _batches(engine: Engine, connection: Connection, table: Table) -> Iterator[list[dict[str, object]]]:
    with told(engine):
        rows = connection.execute(select(table), execution_options={"yield_per": _BATCH})
        for batch in rows.mappings().partitions():
            yield [dict(row) for row in batch]


def _count(connection: Connection, table: Table) -> int:
    with told(connection.engine):
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def _plain(table: Table) -> Table:
    """The table with columns of SQL's own types: values go over as they lie, not decoded and made anew."""
    columns = (Column(column.name, _plain_type(column.type)) for column in table.columns)
    return Table(table.name, MetaData(), *columns)


def _plain_type(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    match kind:
        case TypeDecorator():
            return kind.impl_instance
        case Enum():
            return String(kind.length)
        case _:
            return kind


@dataclass(slots=True)
class _Tally:
    """Counts and digests rows in whatever order they come."""

    rows: int = 0
    total: int = 0

    @property
    def digest(self) -> str:
        """The sum of the rows' SHA-256, in hexadecimal."""
        return f"{self.total:064x}"

    def add(self, rows: Iterable[Row]) -> None:
        """Takes these rows in."""
        for row in rows:
            self.rows += 1
            encoded = b"".join(_encoded(value) for value in row.values())
            self.total = (self.total + int.from_bytes(hashlib.sha256(encoded).digest())) % 2**256


def _encoded(value: object) -> bytes:
    """The value with its kind and length, so that different rows never read the same."""
    match value:
        case None:
            kind, content = b"-", b""
        case bool() | int():
            kind, content = b"i", str(int(value)).encode()
        case float():
            kind, content = b"f", struct.pack(">d", value + 0.0)  # SQLite keeps -0.0 as 0.0
        case str():
            kind, content = b"s", value.encode()
        case bytes() | memoryview():
            kind, content = b"b", bytes(value)
        case _:
            raise TypeError(type(value).__name__)
    return kind + len(content).to_bytes(8) + content
