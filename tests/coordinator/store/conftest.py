"""A store in a file and one on a server, empty at the start of each test, and a job of four hospitals to keep there."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlmodel import SQLModel

from coordinator.records import JobRecord, JobSite, ModelRecord, Outcome, Share, SitePresence, StepRecord
from coordinator.store import Store, url_in
from federation.blobs import BlobRef
from federation.messages import EnrolmentRequest, JobState, MembershipStatement, Metric, RevocationList, Role, StepKind
from tests.servers.postgresql import PostgreSQL, running

SITES = ("cleveland", "hungary", "long-beach", "switzerland")


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL server; it may have been stopped and started again before."""
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def migrated(postgresql: PostgreSQL) -> str:
    """A database that a store has made its own; making one anew for each test would take most of the tests' time."""
    name = postgresql.database()
    Store(postgresql.url(name)).close()
    return name


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that a store has made its own."""
    folder = tmp_path_factory.mktemp("migrated")
    Store(url_in(folder)).close()
    return folder / "parley.db"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where a store would lie in a file; there is none yet."""
    return url_in(tmp_path)


@pytest.fixture
def emptied(postgresql: PostgreSQL, migrated: str) -> Callable[[], str]:
    """Empties that database and tells its URL."""
    kept = [table for table in reversed(SQLModel.metadata.sorted_tables) if table.name != "migration"]

    def empty() -> str:
        postgresql.sql("; ".join(str(table.delete()) for table in kept), migrated)  # quicker than TRUNCATE by far
        return postgresql.url(migrated)

    return empty


@pytest.fixture
def postgresql_url(emptied: Callable[[], str]) -> str:
    """A store on a server, with nothing in it."""
    return emptied()


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store on each kind of database in turn, with nothing in it."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgresql_url")
    shutil.copy(request.getfixturevalue("migrated_file"), tmp_path)
    return url_in(tmp_path)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, url: str) -> str:
    """A database of each kind in turn in which there is no store yet."""
    if request.param == "sqlite":
        return url
    server = request.getfixturevalue("postgresql")
    return server.url(server.database())


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """An empty store."""
    with Store(store_url, patience=0.5) as opened:
        yield opened


@pytest.fixture
def member() -> Callable[..., MembershipStatement]:
    """Makes a site's membership statement; the number makes its serial."""

    def make(name: str = "cleveland", number: int = 1) -> MembershipStatement:
        keys = bytes([number]) * 32, bytes([number + 1]) * 32
        return MembershipStatement("heart", f"{number:032x}", name, name, Role.SITE, *keys, 1, 2**33, b"s" * 64)

    return make


@pytest.fixture
def job(member: Callable[..., MembershipStatement]) -> Callable[..., JobRecord]:
    """Makes a new job of four hospitals."""

    def make(name: str = "heart-1", submitted: float = 1000.0) -> JobRecord:
        roster = tuple(member(site, number) for number, site in enumerate(SITES, 1))
        return JobRecord(name, "heart", 'name = "heart"', submitted, roster, BlobRef.of(b"initial"))

    return make


@pytest.fixture
def step() -> Callable[..., StepRecord]:
    """Makes a committed step; steps of odd number train, those of even number evaluate."""

    def make(number: int, job: str = "heart-1") -> StepRecord:
        trains = number % 2 == 1
        round_ = (number + 1) // 2
        return StepRecord(
            job=job,
            step=number,
            attempt=0,
            kind=StepKind.TRAIN if trains else StepKind.EVALUATE,
            round=round_,
            started=1000.0 + number,
            ended=1000.5 + number,
            shares=tuple(Share(site, Outcome.COUNTED, "", 0.25, 4096) for site in SITES),
            model=BlobRef.of(f"model {round_}".encode()) if trains else None,
            strategy_state=BlobRef.of(f"state {round_}".encode()) if trains else None,
            metrics=() if trains else (Metric("accuracy", 0.5 + round_ / 100), Metric("loss", 1 / round_)),
            best_round=round_ - 1 if trains else round_,
        )

    return make


@pytest.fixture
def changes(
    member: Callable[..., MembershipStatement], job: Callable[..., JobRecord], step: Callable[..., StepRecord]
) -> tuple[Callable[[Store], None], ...]:
    """A call of every method that changes a store, in an order that is possible."""
    request = EnrolmentRequest("a" * 32, "x", "x", Role.SITE, b"spki", b"p" * 32, b"proof", b"q" * 64, "0.1.0")
    final = ModelRecord("heart-1", "heart", BlobRef.of(b"final"), 1, 9.0, (Metric("auc", 0.75),), "{}")
    last = replace(step(2), state=JobState.FINISHED, reason="done", final=final)
    here = SitePresence("cleveland", connected=True, last_seen=6.0, state="training")
    return (
        lambda store: store.add_member(member("hungary", 2), b"pem", 10.0),
        lambda store: store.add_enrolment(request, 10.0),
        lambda store: store.approve_enrolment(request.invitation, member(), b"pem", 11.0),
        lambda store: store.put_revocations(RevocationList("heart", 3, 5, (), b"s" * 64)),
        lambda store: store.add_job(job(), b"terms"),
        lambda store: store.add_job(job("heart-2")),
        lambda store: store.set_job_site("heart-1", JobSite("cleveland", "accepted")),
        lambda store: store.set_job_state("heart-1", JobState.RUNNING, "", 999.0),
        lambda store: store.set_standing("heart-1", b"begun"),
        lambda store: store.commit_step(step(1), b"one step done"),
        lambda store: store.commit_step(last),
        lambda store: store.set_job_state("heart-2", JobState.STOPPED, "asked", 12.0),
        lambda store: store.set_presence((here,)),
    )
