"""A database is opened as a durable store, or refused in words that say what to do."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, delete, inspect, text

from coordinator.records import JobRecord, SitePresence, StepRecord
from coordinator.store import Store, StoreReader, database, tables, url_in
from coordinator.store.reader import transaction
from federation.errors import ConfigurationError, StorageError


def written(url: str) -> None:
    """Makes a store with something in it."""
    with Store(url) as store:
        store.set_presence((SitePresence("cleveland", connected=True, last_seen=1.0, state="ready"),))


@contextmanager
def another_program(url: str) -> Iterator[Connection]:
    """Another program's connection to the same database."""
    engine = create_engine(database.checked(url))
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def test_every_connection_is_durable_and_checked(url: str) -> None:
    """Each connection that writes, not only the first, has a write-ahead log, full syncs, foreign keys and patience."""
    pragmas = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
    with Store(url) as store:
        for _ in range(2):
            with store._writer.connect() as connection:
                told = [connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() for pragma in pragmas]
                assert told == ["wal", 2, 1, 5000]
                connection.invalidate()


def test_what_was_written_is_there_when_the_store_opens_again(store_url: str) -> None:
    """Closing and opening loses nothing."""
    written(store_url)
    with Store(store_url) as store:
        assert [site.name for site in store.presence()] == ["cleveland"]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("sqlite://", "a store in memory forgets every job at its end"),
        ("sqlite:///:memory:", "a store in memory forgets every job at its end"),
        ("mysql://root@localhost/parley", "a store cannot be kept in mysql"),
        ("somewhere", "the store's URL is not a database URL"),
        ("postgresql://parley:swordfish@localhost:port/parley", "the store's URL is not a database URL"),
    ],
)
def test_only_sqlite_files_and_postgresql_are_stores(url: str, problem: str) -> None:
    """Any other URL is refused with the two that are possible; a password in it is not repeated."""
    with pytest.raises(ConfigurationError) as refused:
        Store(url)
    assert problem in str(refused.value)
    assert "the coordinator's operator" in str(refused.value)
    assert "give sqlite:///PATH or postgresql://USER@HOST/DATABASE" in str(refused.value)
    assert "sword" not in str(refused.value)


def test_an_installation_without_the_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Psycopg is an extra of the package; its name is told."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigurationError, match=r'needs psycopg.*pip install "parley-fl\[postgresql\]"'):
        Store("postgresql://parley@localhost/parley")


@pytest.mark.parametrize("open_", [Store, StoreReader])
def test_a_file_of_another_kind_is_refused(url: str, tmp_path: Path, open_: type[StoreReader]) -> None:
    """The file stays as it is."""
    file = tmp_path / "parley.db"
    file.write_text("Dear diary, " * 100)
    with pytest.raises(StorageError, match=r"parley.db is not a SQLite database .*restore it from a backup"):
        open_(url)
    assert file.read_text() == "Dear diary, " * 100


def test_a_damaged_store_is_refused(url: str, tmp_path: Path) -> None:
    """Overwritten pages are found, not read as data."""
    written(url)
    file = tmp_path / "parley.db"
    content = file.read_bytes()
    file.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(StorageError, match=r"parley.db is damaged .*restore it from a backup"):
        Store(url)


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A database opened read-only is not half migrated."""
    file = tmp_path / "parley.db"
    file.touch()
    with pytest.raises(StorageError, match=r"parley.db cannot be written .*make the file and its folder"):
        Store(f"sqlite:///file:{file}?mode=ro&uri=true")
    assert file.read_bytes() == b""


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    """The store makes its file, not the folders above it."""
    with pytest.raises(StorageError, match=r"nowhere/parley.db cannot be opened .*make its folder"):
        Store(url_in(tmp_path / "nowhere"))


def test_a_store_of_a_newer_release_is_refused_by_name(empty_url: str) -> None:
    """The refusal says which release wrote it and what to install; neither the coordinator nor a reader touches it."""
    written(empty_url)
    with another_program(empty_url) as connection:
        connection.execute(text("UPDATE parley_schema SET version_num = '0099'"))
        connection.execute(text("INSERT INTO migration VALUES ('0099', '9.9.0', 4e9)"))
        connection.commit()
    for open_ in (Store, StoreReader):
        with pytest.raises(StorageError) as refused:
            open_(empty_url)
        assert "was written by Parley 9.9.0 (schema 0099); this is" in str(refused.value)
        assert "install Parley 9.9.0, or restore the copy made before the upgrade" in str(refused.value)


def test_a_database_of_another_program_is_refused(empty_url: str) -> None:
    """A table that bears one of the store's names and was not made by it stops the migration before it begins."""
    with another_program(empty_url) as connection:
        connection.execute(text("CREATE TABLE job (title TEXT)"))
        connection.commit()
    with pytest.raises(StorageError, match=r"has a table 'job' that Parley did not make.*a database of its own"):
        Store(empty_url)
    with another_program(empty_url) as connection:
        assert inspect(connection).get_table_names() == ["job"]


# ----------------------------------------------------------------------------------------------------------- reading


def test_a_reader_makes_no_store(url: str, tmp_path: Path) -> None:
    """A missing store is refused by name, and stays missing."""
    with pytest.raises(StorageError, match=r"there is no store at .*/parley.db.*start the coordinator"):
        StoreReader(url)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_migrates_nothing(empty_url: str, tmp_path: Path) -> None:
    """A store whose schema is older than the release is refused until a coordinator has brought it up."""
    (tmp_path / "parley.db").touch()
    with pytest.raises(StorageError, match=r"no schema of Parley's; this release reads .*start the coordinator"):
        StoreReader(empty_url)
    with another_program(empty_url) as connection:
        assert inspect(connection).get_table_names() == []


def test_a_reader_sees_what_is_committed_and_nothing_else(store_url: str) -> None:
    """A reader neither waits for an open transaction nor sees what is in it."""
    written(store_url)
    with StoreReader(store_url, patience=0.01) as reader, another_program(store_url) as writer:
        writer.execute(text("UPDATE presence SET state = 'training'"))
        assert [site.state for site in reader.presence()] == ["ready"]
        writer.commit()
        assert [site.state for site in reader.presence()] == ["training"]


def test_many_threads_read_what_one_writes(
    store: Store, job: Callable[[], JobRecord], step: Callable[[int], StepRecord]
) -> None:
    """Each answer is of one instant: no step is seen without its shares, and none before an earlier one."""
    store.add_job(job())
    written_steps = tuple(step(number) for number in range(1, 11))
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(store.steps, "heart-1") for _ in range(20)]
        for each in written_steps:
            store.commit_step(each)
            answers.append(threads.submit(store.steps, "heart-1"))
        for answer in answers:
            assert answer.result() == written_steps[: len(answer.result())]
    assert store.steps("heart-1") == written_steps


def test_a_reader_cannot_write(store_url: str) -> None:
    """The database itself refuses what the types do not offer."""
    written(store_url)
    with StoreReader(store_url) as reader:
        with pytest.raises(StorageError, match="cannot be written"), transaction(reader._engine) as session:
            session.exec(delete(tables.Presence))
        assert len(reader.presence()) == 1


def test_a_url_may_hold_any_path(tmp_path: Path) -> None:
    """Spaces, question marks and per cent signs in a home's path are part of it."""
    home = tmp_path / "a home? 100%25 #1"
    home.mkdir()
    written(url_in(home))
    assert (home / "parley.db").is_file()
    with StoreReader(url_in(home)) as reader:
        assert len(reader.presence()) == 1
