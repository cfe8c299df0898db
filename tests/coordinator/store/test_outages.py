"""When disk, lock or server fail, the coordinator is told who must act; when they are back, the same call succeeds."""

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import worker
from coordinator.records import JobRecord, SitePresence, StepRecord
from coordinator.store import Store, StoreReader, url_in
from coordinator.worker import Worker
from federation.errors import StorageError
from tests.coordinator.store.values import everything
from tests.servers.postgresql import PostgreSQL
from tests.servers.relay import Cut, Relay

MakeJob = Callable[..., JobRecord]
MakeStep = Callable[..., StepRecord]

HERE = SitePresence("cleveland", connected=True, last_seen=6.0, state="training")
LONG = "".join(map(str, range(80_000)))
"""A text of some hundred kilobytes, which compresses badly."""


# --------------------------------------------------------------------------------------------------- a server goes away


def test_a_server_that_restarts_loses_and_doubles_nothing(
    postgresql: PostgreSQL, postgresql_url: str, job: MakeJob, step: MakeStep
) -> None:
    """While it is away every call is refused and says so; then the same call on the same store works."""
    with Store(postgresql_url) as store, StoreReader(postgresql_url) as reader:
        store.add_job(job())
        store.commit_step(step(1))
        postgresql.stop()
        for call in (lambda: store.commit_step(step(2)), lambda: store.job("heart-1"), reader.jobs):
            for _ in range(2):
                with pytest.raises(StorageError, match=r"does not answer: no server runs there .*start PostgreSQL"):
                    call()
        postgresql.start()
        store.commit_step(step(2))
        assert store.steps("heart-1") == reader.steps("heart-1") == (step(1), step(2))
        with pytest.raises(StorageError, match="another coordinator"):
            Store(postgresql_url, patience=0.05)


def test_a_coordinator_waits_for_its_server(
    postgresql: PostgreSQL, postgresql_url: str, job: MakeJob, step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the coordinator insists on is kept as soon as the server is back."""
    monkeypatch.setattr(worker, "_RETRY_SECONDS", 0.01)

    async def meanwhile(store: Store) -> None:
        thread = Worker("store")
        insisting = asyncio.create_task(thread.insist("a step", lambda: store.commit_step(step(1))))
        await asyncio.to_thread(postgresql.start)
        await insisting
        thread.close()

    with Store(postgresql_url) as store:
        store.add_job(job())
        postgresql.stop()
        asyncio.run(meanwhile(store))
        assert store.steps("heart-1") == (step(1),)


def test_another_coordinator_that_was_quicker_keeps_the_store(
    postgresql: PostgreSQL, postgresql_url: str, job: MakeJob, step: MakeStep
) -> None:
    """Who lost its session while another one took the store writes nothing more: its calls are refused."""
    with Store(postgresql_url, patience=0.05) as first:
        first.add_job(job())
        postgresql.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        with Store(postgresql_url) as second:
            with pytest.raises(StorageError, match=r"another coordinator \(process"):
                first.commit_step(step(1))
            second.commit_step(step(1))
        assert first.steps("heart-1") == (step(1),)


@pytest.mark.usefixtures("postgresql_url")
@pytest.mark.parametrize("cut", Cut, ids=lambda cut: cut.name.lower())
def test_a_commit_that_breaks_off_is_made_once(
    postgresql: PostgreSQL,
    migrated: str,
    changes: tuple[Callable[[Store], None], ...],
    cut: Cut,
    tmp_path: Path,
) -> None:
    """Whether or not the server kept it, whoever asks again succeeds, for every method; all of it is there once."""
    with Relay(postgresql.port) as relay, Store(postgresql.url_over_tcp(migrated, port=relay.port)) as store:
        for change in changes:
            relay.cut = cut
            with pytest.raises(StorageError, match="does not answer: the connection broke off"):
                change(store)
            assert relay.cut is None
            change(store)
        told = everything(store)
    with Store(url_in(tmp_path)) as unharmed:
        for change in changes:
            change(unharmed)
        assert told == everything(unharmed)


# --------------------------------------------------------------------------------------------------------------- a lock


def test_a_locked_store_is_refused(store_url: str, tmp_path: Path) -> None:
    """Another program's transaction is waited for, and then told; afterwards the same call works."""
    with Store(store_url, patience=0.05) as store:
        with locking(store_url, tmp_path), pytest.raises(StorageError, match=r"is locked by another .*stop the other"):
            store.set_presence((HERE,))
        store.set_presence((HERE,))
        assert store.presence() == (HERE,)


@contextlib.contextmanager
def locking(store_url: str, folder: Path) -> Iterator[None]:
    """Another program has the store locked."""
    if store_url.startswith("sqlite"):
        other = sqlite3.connect(folder / "parley.db", isolation_level=None)
        with contextlib.closing(other):
            other.execute("BEGIN IMMEDIATE")
            yield
        return
    import psycopg

    with psycopg.connect(store_url) as connection:
        connection.execute("LOCK TABLE presence")
        yield


# --------------------------------------------------------------------------------------------------------------- a disk


def test_a_file_that_cannot_grow_is_told(url: str, job: MakeJob) -> None:
    """SQLite's own limit stands for a full disk, where no other can be had."""
    with Store(url) as store:
        limit(store, 1)
        with pytest.raises(StorageError, match=r"parley.db has no room on its disk .*free disk space"):
            store.add_job(replace(job(), text=LONG))
        assert store.jobs() == ()
        limit(store, 10**9)
        store.add_job(replace(job(), text=LONG))
        assert store.jobs() == (replace(job(), text=LONG),)


def limit(store: Store, pages: int) -> None:
    """Lets the file grow to so many pages, and no further."""
    with store._writer.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")


@pytest.fixture
def small_disk(postgresql: PostgreSQL) -> Iterator[Path]:
    """A file system of its own, with room for one empty database."""
    folder = Path(tempfile.mkdtemp(prefix="parley-disk-"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    try:
        if mounted.returncode != 0:
            pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
        if postgresql.owner is not None:
            shutil.chown(folder, postgresql.owner)
        yield folder
    finally:
        subprocess.run(["umount", folder], capture_output=True, check=False)
        folder.rmdir()


@pytest.fixture(params=["sqlite", "postgresql"])
def on_small_disk(request: pytest.FixtureRequest, small_disk: Path, postgresql: PostgreSQL) -> Iterator[str]:
    """A store on that disk."""
    if request.param == "sqlite":
        yield url_in(small_disk)
        return
    postgresql.sql(f"CREATE TABLESPACE small LOCATION '{small_disk}'")
    name = postgresql.database(options="TABLESPACE small")
    yield postgresql.url(name)
    postgresql.sql(f"DROP DATABASE {name} WITH (FORCE)")
    postgresql.sql("DROP TABLESPACE small")


def test_a_full_disk_is_told(on_small_disk: str, small_disk: Path, job: MakeJob, step: MakeStep) -> None:
    """The step is refused whole; when there is room again, the same call on the same store keeps it."""
    with Store(on_small_disk) as store:
        store.add_job(job())
        long = replace(step(1), reason=LONG)
        ballast = small_disk / "ballast"
        fill(ballast)
        with pytest.raises(StorageError, match=r"has no room on its (server's )?disk .*free disk space"):
            store.commit_step(long)
        assert store.steps("heart-1") == ()
        ballast.unlink()
        store.commit_step(long)
        assert store.steps("heart-1") == (long,)


def fill(ballast: Path) -> None:
    """Leaves no room on a file's disk."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_folder_that_cannot_be_written_is_told() -> None:
    """The store is refused by name and works as soon as its folder may be written."""
    folder = Path(tempfile.mkdtemp(prefix="parley-folder-"))
    try:
        with plain_user(folder):
            Store(url_in(folder)).close()
            folder.chmod(0o500)
            (folder / "parley.db").chmod(0o400)
            (folder / "parley.db.lock").chmod(0o400)
            with pytest.raises(StorageError, match=r"parley.db cannot be written .*make the file and its folder"):
                Store(url_in(folder))
            for file in (folder, *folder.iterdir()):
                file.chmod(0o700)
            Store(url_in(folder)).close()
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def plain_user(folder: Path) -> Iterator[None]:
    """Root may write everywhere: as somebody else, who owns the folder."""
    if os.geteuid() != 0:
        yield
        return
    nobody = 65534
    os.chown(folder, nobody, nobody)
    os.seteuid(nobody)
    try:
        yield
    finally:
        os.seteuid(0)
