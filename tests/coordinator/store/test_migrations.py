"""The migrations make exactly the schema that the tables declare."""

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import event, inspect, text
from sqlmodel import Session, SQLModel, insert

from coordinator.records import JobRecord, Secured
from coordinator.store import Store, database, tables
from coordinator.store.store import _job_row


def test_migrations_and_tables_agree(store: Store) -> None:
    """Alembic finds no difference between a migrated database and the tables."""
    with store._writer.connect() as connection:
        options = {"version_table": database.VERSION_TABLE, "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, SQLModel.metadata) == []


def test_an_empty_file_becomes_a_store(url: str, tmp_path: Path) -> None:
    """An empty file is an empty database, and is migrated like a new one."""
    (tmp_path / "parley.db").touch()
    with Store(url) as store:
        assert store.jobs() == ()


def test_the_release_that_migrated_signs_its_work(store: Store) -> None:
    """The store remembers which release brought it to its schema, so that an older one can name it."""
    with store._writer.connect() as connection:
        rows = connection.execute(text("SELECT revision, software FROM migration")).all()
    assert rows == [("0002", metadata.version("parley-fl"))]


def test_a_store_of_the_first_release_goes_on(empty_url: str, job: Callable[[], JobRecord]) -> None:
    """Its jobs are there as they were, none of them under secure aggregation; new ones may be."""
    engine = database.writer(database.checked(empty_url), 1.0, "coordinator")
    with engine.begin() as connection:
        command.upgrade(database.alembic_config(connection), "0001")
    with Session(engine) as session, session.begin():
        row = {**_job_row(job()), "model": None, "best_model": None, "strategy_state": None, "preparation": None}
        session.connection().execute(insert(tables.Job), [row])
        seats = [{"job": "heart-1", "position": at, "statement": each} for at, each in enumerate(job().roster)]
        session.connection().execute(insert(tables.Seat), seats)
    engine.dispose()
    with Store(empty_url) as store:
        assert store.jobs() == (job(),)
        assert store.secured("heart-1") is None
        new = replace(job(), id="heart-2")
        store.add_job(new, b"terms")
        assert store.secured("heart-2") == Secured(b"terms")


def test_a_migration_that_fails_leaves_nothing_behind(empty_url: str) -> None:
    """Schema changes are part of the transaction: a cut half-way through leaves an empty database."""
    engine = database.writer(database.checked(empty_url), 1.0, "coordinator")

    @event.listens_for(engine, "before_cursor_execute")
    def cut(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        if "CREATE TABLE securejob" in statement:
            raise InterruptedError

    with pytest.raises(InterruptedError), engine.begin() as connection:
        database.migrate(connection)
    with engine.connect() as connection:
        assert inspect(connection).get_table_names() == []
    engine.dispose()
