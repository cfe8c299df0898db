"""One coordinator at a time uses a store; the next one is told of it, and gets the store when it ends."""

import os
import socket
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from coordinator.records import SitePresence
from coordinator.store import Store, StoreReader, database
from federation.errors import StorageError
from tests.servers.postgresql import PostgreSQL

HERE = SitePresence("cleveland", connected=True, last_seen=6.0, state="training")


def coordinate(url: str, told: Connection) -> None:
    """A coordinator that does nothing until it is killed."""
    with Store(url):
        told.send("ready")
        told.recv()


def test_a_second_coordinator_is_refused(store_url: str) -> None:
    """The refusal names process, host and time of the first, and how to stop it; the first one goes on."""
    with Store(store_url) as store:
        with pytest.raises(StorageError) as refused:
            Store(store_url, patience=0.05)
        me = rf"process {os.getpid()} on {socket.gethostname()} since 20\d\d-.* UTC"
        assert refused.match(rf"another coordinator \({me}\) uses the store ")
        assert f"stop it there (kill {os.getpid()}, or systemctl stop when it is a service)" in str(refused.value)
        store.set_presence((HERE,))
        assert store.presence() == (HERE,)
    Store(store_url).close()


def test_a_reader_is_not_refused(store: Store, store_url: str) -> None:
    """The dashboard reads what a running coordinator writes."""
    with StoreReader(store_url) as reader:
        store.set_presence((HERE,))
        assert reader.presence() == (HERE,)


def test_a_hold_ends_with_its_process(store_url: str) -> None:
    """A killed coordinator leaves nothing that keeps the next one out."""
    fork = get_context("fork")
    ours, theirs = fork.Pipe()
    other = fork.Process(target=coordinate, args=(store_url, theirs))
    other.start()
    assert ours.recv() == "ready"
    with pytest.raises(StorageError, match=rf"another coordinator \(process {other.pid} on "):
        Store(store_url, patience=0.05)
    other.kill()
    other.join()
    Store(store_url).close()


def test_a_store_that_could_not_be_opened_is_not_held(tmp_path: Path, url: str) -> None:
    """What a refused opening held is free again."""
    (tmp_path / "parley.db").write_text("Dear diary, " * 100)
    for _ in range(2):
        with pytest.raises(StorageError, match="is not a SQLite database"):
            Store(url)


def test_a_file_is_one_store_by_whatever_path(tmp_path: Path, url: str) -> None:
    """A link to the file is no way around."""
    with Store(url):
        (tmp_path / "link.db").symlink_to(tmp_path / "parley.db")
        with pytest.raises(StorageError, match="another coordinator"):
            Store(f"sqlite:///{tmp_path / 'link.db'}")


def test_a_migration_keeps_coordinators_out(store_url: str) -> None:
    """It is told as what it is."""
    engine = database.writer(database.checked(store_url), 0.05, "migration")
    with engine.connect(), pytest.raises(StorageError, match=rf"a migration \(process {os.getpid()} on "):
        Store(store_url, patience=0.05)
    engine.dispose()


def test_an_unsigned_hold_is_refused_all_the_same(postgresql_url: str) -> None:
    """Another program that took the advisory lock is not named, but where to find its name is told."""
    with Store(postgresql_url) as store:
        with store._writer.connect() as connection:
            connection.exec_driver_sql("SELECT set_config('application_name', 'psql', false)")
            connection.commit()
        with pytest.raises(StorageError, match=r"another program uses the store .*pg_stat_activity"):
            Store(postgresql_url, patience=0.05)


def test_two_databases_of_a_server_are_two_stores(postgresql: PostgreSQL, postgresql_url: str) -> None:
    """The hold is of one database."""
    with Store(postgresql_url), Store(postgresql.url(postgresql.database())):
        pass
