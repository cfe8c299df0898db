"""A database is opened as a durable store, or refused in words that say what to do."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from coordinator.records import SitePresence
from coordinator.store import Store, StoreReader, url_in
from federation.errors import ConfigurationError, StorageError


def written(url: str) -> None:
    """Makes a store with something in it."""
    with Store(url) as store:
        store.set_presence((SitePresence("cleveland", connected=True, last_seen=1.0, state="ready"),))


def test_every_connection_is_durable_and_checked(store: Store) -> None:
    """Each connection, not only the first, has a write-ahead log, full syncs, foreign keys and patience."""
    pragmas = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
    with store._engine.connect() as one, store._engine.connect() as two:
        for connection in (one, two):
            told = [connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() for pragma in pragmas]
            assert told == ["wal", 2, 1, 5000]


def test_what_was_written_is_there_when_the_store_opens_again(url: str) -> None:
    """Closing and opening loses nothing."""
    written(url)
    with Store(url) as store:
        assert [site.name for site in store.presence()] == ["cleveland"]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("sqlite://", "a store in memory forgets every job at its end"),
        ("sqlite:///:memory:", "a store in memory forgets every job at its end"),
        ("mysql://root@localhost/parley", "a store cannot be kept in mysql"),
        ("somewhere", "the store's URL is not a database URL"),
    ],
)
def test_only_sqlite_files_and_postgresql_are_stores(url: str, problem: str) -> None:
    """Any other URL is refused with the two that are possible."""
    with pytest.raises(ConfigurationError) as refused:
        Store(url)
    assert problem in str(refused.value)
    assert "the coordinator's operator" in str(refused.value)
    assert "give sqlite:///PATH or postgresql://USER@HOST/DATABASE" in str(refused.value)


def test_a_locked_store_is_refused(url: str, tmp_path: Path) -> None:
    """Another program's transaction is waited for, and then told."""
    written(url)
    other = sqlite3.connect(tmp_path / "parley.db", isolation_level=None)
    with Store(url, patience=0.01) as store:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match=r"parley.db is locked by another program .*stop the other"):
            store.set_presence(())
        other.execute("ROLLBACK")
        store.set_presence(())
    other.close()


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
    with pytest.raises(StorageError, match=r"parley.db.* cannot be written .*make the file and its folder"):
        Store(f"sqlite:///file:{file}?mode=ro&uri=true")
    assert file.read_bytes() == b""


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    """The store makes its file, not the folders above it."""
    with pytest.raises(StorageError, match=r"nowhere/parley.db cannot be opened .*make its folder"):
        Store(url_in(tmp_path / "nowhere"))


def test_a_store_of_a_newer_release_is_refused_by_name(url: str) -> None:
    """The refusal says which release wrote it and what to install; neither the coordinator nor a reader touches it."""
    written(url)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE parley_schema SET version_num = '0099'"))
        connection.execute(text("INSERT INTO migration VALUES ('0099', '9.9.0', 4e9)"))
    for open_ in (Store, StoreReader):
        with pytest.raises(StorageError) as refused:
            open_(url)
        assert "was written by Parley 9.9.0 (schema 0099); this is" in str(refused.value)
        assert "install Parley 9.9.0, or restore the copy made before the upgrade" in str(refused.value)
    engine.dispose()


def test_a_database_of_another_program_is_refused(url: str, tmp_path: Path) -> None:
    """A table that bears one of the store's names and was not made by it stops the migration before it begins."""
    other = sqlite3.connect(tmp_path / "parley.db")
    other.execute("CREATE TABLE job (title TEXT)")
    with pytest.raises(StorageError, match=r"has a table 'job' that Parley did not make.*a database of its own"):
        Store(url)
    assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("job",)]
    other.close()


def test_an_unreachable_server_is_told_without_its_password() -> None:
    """The message names the server, not the secret in its URL."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    with pytest.raises(StorageError) as refused:
        Store("postgresql://parley:swordfish@127.0.0.1:1/parley")
    assert "the store at postgresql+psycopg://parley:***@127.0.0.1:1/parley does not answer" in str(refused.value)
    assert "swordfish" not in str(refused.value)
    assert "that the server runs" in str(refused.value)


# ----------------------------------------------------------------------------------------------------------- reading


def test_a_reader_makes_no_store(url: str, tmp_path: Path) -> None:
    """A missing store is refused by name, and stays missing."""
    with pytest.raises(StorageError, match=r"there is no store at .*/parley.db.*start the coordinator"):
        StoreReader(url)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_migrates_nothing(url: str, tmp_path: Path) -> None:
    """A store whose schema is older than the release is refused until a coordinator has brought it up."""
    (tmp_path / "parley.db").touch()
    with pytest.raises(StorageError, match=r"no schema of Parley's; this release reads .*start the coordinator"):
        StoreReader(url)
    assert (tmp_path / "parley.db").read_bytes() == b""


def test_a_reader_sees_what_is_committed_and_nothing_else(url: str, tmp_path: Path) -> None:
    """A reader neither waits for an open transaction nor sees what is in it."""
    written(url)
    writer = sqlite3.connect(tmp_path / "parley.db", isolation_level=None)
    with StoreReader(url, patience=0.01) as reader:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE presence SET state = 'training'")
        assert [site.state for site in reader.presence()] == ["ready"]
        writer.execute("COMMIT")
        assert [site.state for site in reader.presence()] == ["training"]
    writer.close()


def test_a_reader_cannot_write(url: str) -> None:
    """The database itself refuses what the types do not offer."""
    written(url)
    with StoreReader(url) as reader, pytest.raises(StorageError, match="cannot be written"):
        Store.set_presence(reader, ())  # type: ignore[arg-type]  # the point: a reader is no store


def test_a_url_may_hold_any_path(tmp_path: Path) -> None:
    """Spaces, question marks and per cent signs in a home's path are part of it."""
    home = tmp_path / "a home? 100%25 #1"
    home.mkdir()
    written(url_in(home))
    assert (home / "parley.db").is_file()
    with StoreReader(url_in(home)) as reader:
        assert len(reader.presence()) == 1
