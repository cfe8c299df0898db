"""A store that moved tells what it told before; a move that fails leaves the target empty and the source as it was."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count, zip_longest
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, inspect, text

from coordinator.records import JobRecord, SitePresence, StepRecord
from coordinator.store import Store, StoreReader, database, transfer, url_in
from federation.errors import ConfigurationError, LocalProtocolError, StorageError
from federation.messages import EnrolmentRequest, MembershipStatement, RevocationList
from tests.coordinator.store import values
from tests.coordinator.store.values import everything
from tests.servers.postgresql import PASSWORD, PostgreSQL

Changes = tuple[Callable[[Store], None], ...]


def silent(_table: str, _done: int, _rows: int) -> None:
    """Tells nobody of the progress."""


def told(url: str) -> dict[str, object]:
    """Everything that the store at `url` tells."""
    with StoreReader(url) as reader:
        return everything(reader)


@pytest.fixture
def filled(url: str, changes: Changes) -> str:
    """A store in a file, with something in every table."""
    with Store(url) as store:
        for change in changes:
            change(store)
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of each kind in turn in which there is no store yet."""
    if request.param == "postgresql":
        server = request.getfixturevalue("postgresql")
        return server.url(server.database())
    (tmp_path / "target").mkdir()
    return url_in(tmp_path / "target")


def test_a_store_moves_whole(filled: str, target: str) -> None:
    """Every table has the same rows; the source stays as it was, and the target is a coordinator's own store."""
    before = told(filled)
    copied = transfer.transfer(filled, target, progress=silent)
    assert told(target) == told(filled) == before
    assert {each.table: each.rows for each in copied} == {
        "enrolment": 1,
        "job": 2,
        "jobsite": 1,
        "member": 2,
        "metric": 2,
        "migration": 1,
        "model": 1,
        "modelmetric": 1,
        "presence": 1,
        "revocations": 1,
        "seat": 8,
        "securejob": 1,
        "share": 8,
        "step": 2,
    }
    assert all(len(each.digest) == 64 for each in copied)


def test_a_moved_store_goes_on(
    filled: str,
    target: str,
    member: Callable[..., MembershipStatement],
    job: Callable[..., JobRecord],
    step: Callable[..., StepRecord],
) -> None:
    """New rows follow the copied ones, also where the database numbers them."""
    transfer.transfer(filled, target, progress=silent)
    with Store(target) as store:
        store.add_member(member("long-beach", 3), b"pem", 20.0)
        store.add_job(job("heart-3"))
        store.commit_step(step(1, job="heart-3"))
        assert [each.name for each in store.members()] == ["hungary", "cleveland", "long-beach"]
        assert store.steps("heart-3") == (step(1, job="heart-3"),)


def test_there_and_back_is_the_same_store(filled: str, postgresql: PostgreSQL, tmp_path: Path) -> None:
    """The digests of the tables are those of the first store."""
    server = postgresql.url_over_tcp(postgresql.database())
    there = transfer.transfer(filled, server, progress=silent)
    (tmp_path / "back").mkdir()
    back = transfer.transfer(server, url_in(tmp_path / "back"), progress=silent)
    assert there == back
    assert told(url_in(tmp_path / "back")) == told(filled)


def test_progress_is_told_table_by_table(filled: str, tmp_path: Path) -> None:
    """From none to all rows, in batches; tables that others refer to come first."""
    with Store(filled) as store:
        store.set_presence(tuple(SitePresence(f"s{n}", connected=False, last_seen=1.0, state="") for n in range(250)))
    heard: list[tuple[str, int, int]] = []
    (tmp_path / "target").mkdir()
    transfer.transfer(filled, url_in(tmp_path / "target"), progress=lambda *what: heard.append(what))
    assert [what for what in heard if what[0] == "presence"] == [("presence", n, 251) for n in (0, 100, 200, 251)]
    order = list(dict.fromkeys(table for table, _, _ in heard))
    assert order.index("job") < order.index("step") < order.index("share")


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_running_coordinator_is_not_moved(store: Store, store_url: str, tmp_path: Path) -> None:
    """The refusal names its process and how to stop it; nothing was made at the target."""
    assert store.jobs() == ()
    (tmp_path / "target").mkdir()
    with pytest.raises(StorageError) as refused:
        transfer.transfer(store_url, url_in(tmp_path / "target"), patience=0.05, progress=silent)
    assert refused.match(rf"a coordinator \(process {os.getpid()} on .* uses the store .*stop it there \(kill ")
    assert list((tmp_path / "target").iterdir()) == []


def test_a_target_in_use_is_refused(store: Store, store_url: str, tmp_path: Path) -> None:
    """A coordinator that runs on the target is not written over."""
    assert store.jobs() == ()
    (tmp_path / "source").mkdir()
    Store(url_in(tmp_path / "source")).close()
    with pytest.raises(StorageError, match=r"a coordinator \(process"):
        transfer.transfer(url_in(tmp_path / "source"), store_url, patience=0.05, progress=silent)


def test_no_coordinator_starts_meanwhile(filled: str, target: str) -> None:
    """Both stores are held until the move is over."""
    refused = []

    def start(_table: str, _done: int, _rows: int) -> None:
        for url in (filled, target):
            with suppress(StorageError):
                Store(url, patience=0.01)
                return
        refused.append(_table)

    copied = transfer.transfer(filled, target, progress=start)
    assert set(refused) == {each.table for each in copied}


def test_a_target_with_something_in_it_is_refused(filled: str, target: str) -> None:
    """Nothing there is touched."""
    here = SitePresence("oslo", connected=True, last_seen=6.0, state="training")
    with Store(target) as store:
        store.set_presence((here,))
    with pytest.raises(StorageError, match=r"is not empty: its table 'presence' has 1 rows.*name an empty database"):
        transfer.transfer(filled, target, progress=silent)
    with StoreReader(target) as reader:
        assert reader.presence() == (here,)
        assert reader.members() == ()


def test_a_store_that_never_kept_anything_is_a_target(filled: str, target: str) -> None:
    """A coordinator may have been started on it once."""
    Store(target).close()
    transfer.transfer(filled, target, progress=silent)
    assert told(target) == told(filled)


def test_a_store_is_not_moved_onto_itself(store_url: str, tmp_path: Path) -> None:
    """Whichever way it is written."""
    (tmp_path / "link.db").symlink_to(tmp_path / "parley.db")
    for other in (store_url, store_url.replace("parley.db", "link.db").replace("parley@/", "parley:x@/")):
        with pytest.raises(ConfigurationError, match=r"cannot be copied onto itself.*name another database"):
            transfer.transfer(store_url, other, progress=silent)


def test_a_missing_source_is_told(target: str, tmp_path: Path) -> None:
    """No store is made in its place."""
    with pytest.raises(StorageError, match=r"there is no store at .*/parley.db"):
        transfer.transfer(url_in(tmp_path), target, progress=silent)
    assert not (tmp_path / "parley.db").exists()


@pytest.mark.parametrize("newer", ["source", "target"])
def test_a_store_of_another_release_is_refused(filled: str, target: str, newer: str) -> None:
    """Neither is migrated on the way."""
    Store(target).close()
    url = filled if newer == "source" else target
    engine = create_engine(database.checked(url))
    with engine.begin() as connection:
        connection.execute(text("UPDATE parley_schema SET version_num = '0099'"))
        connection.execute(text("INSERT INTO migration VALUES ('0099', '9.9.0', 4e9)"))
    engine.dispose()
    with pytest.raises(StorageError, match=r"was written by Parley 9\.9\.0 \(schema 0099\)"):
        transfer.transfer(filled, target, progress=silent)


def test_passwords_are_not_told(filled: str, postgresql: PostgreSQL) -> None:
    """Not in a refusal, whichever end it is about."""
    wrong = postgresql.url_over_tcp("nowhere")
    for ends in ((filled, wrong), (wrong, filled)):
        with pytest.raises(StorageError) as refused:
            transfer.transfer(*ends, progress=silent)
        assert "does not exist" in str(refused.value)
        assert PASSWORD not in str(refused.value)


# ----------------------------------------------------------------------------------------------------------- accidents


@pytest.mark.parametrize("cut", ["job", "presence"])
def test_a_move_that_breaks_off_leaves_an_empty_target(filled: str, target: str, cut: str) -> None:
    """Neither rows nor tables; the next try succeeds."""
    before = told(filled)

    def interrupt(table: str, done: int, _rows: int) -> None:
        if table == cut and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transfer.transfer(filled, target, progress=interrupt)
    engine = create_engine(database.checked(target))
    with engine.connect() as connection:
        assert inspect(connection).get_table_names() == []
    engine.dispose()
    transfer.transfer(filled, target, progress=silent)
    assert told(target) == told(filled) == before


SPOILING = {
    "sqlite": """
        CREATE TRIGGER spoil AFTER INSERT ON share
        BEGIN UPDATE share SET bytes = bytes + 1 WHERE rowid = NEW.rowid; END
    """,
    "postgresql": """
        CREATE FUNCTION spoil() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.bytes := NEW.bytes + 1; RETURN NEW; END';
        CREATE TRIGGER spoil BEFORE INSERT ON share FOR EACH ROW EXECUTE FUNCTION spoil()
    """,
}


def test_a_target_that_keeps_something_else_is_refused(filled: str, target: str) -> None:
    """A row that reads otherwise than it was written stops the move before anything is kept."""
    Store(target).close()
    engine = create_engine(database.checked(target))
    with engine.begin() as connection:
        connection.exec_driver_sql(SPOILING[engine.dialect.name])
    with pytest.raises(StorageError, match=r"table 'share' reads otherwise in the store .*nothing was kept"):
        transfer.transfer(filled, target, progress=silent)
    with StoreReader(target) as reader:
        assert reader.members() == ()
    engine.dispose()


def test_rows_count_in_any_order_and_each_value_counts() -> None:
    """The digest of a table is that of its set of rows; no two rows that differ share one."""

    def digest(*rows: dict[str, object]) -> str:
        tally = transfer._Tally()
        tally.add(rows)
        return tally.digest

    one, two = {"a": "x", "b": 1}, {"a": "y", "b": None}
    assert digest(one, two) == digest(two, one)
    different = [
        {"a": "x", "b": None},
        {"a": "x", "b": "1"},
        {"a": "x", "b": 1.0},
        {"a": "x", "b": b"1"},
        {"a": "x1", "b": 1},
        {"a": b"x", "b": 1},
        {"a": None, "b": 1},
    ]
    assert len({digest(each) for each in (one, *different)}) == len(different) + 1
    assert digest({"a": 0.0}) == digest({"a": -0.0})
    assert digest({"a": True}) == digest({"a": 1})


# ---------------------------------------------------------------------------------------------------------- properties

fresh = count()


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    members=st.lists(values.members, max_size=4),
    enrolments=st.lists(values.enrolments, max_size=3),
    revocations=st.none() | values.revocations,
    jobs=st.lists(values.jobs, max_size=3, unique_by=lambda job: job.id),
    terms=st.none() | st.binary(max_size=40),
    step=values.steps,
    presence=values.presences,
)
def test_whatever_a_store_keeps_moves(
    emptied: Callable[[], str],
    migrated_file: Path,
    tmp_path: Path,
    members: list[MembershipStatement],
    enrolments: list[EnrolmentRequest],
    revocations: RevocationList | None,
    jobs: list[JobRecord],
    terms: bytes | None,
    step: StepRecord,
    presence: tuple[SitePresence, ...],
) -> None:
    """From a file to a server and back: the three stores tell the same by every method."""
    folders = [tmp_path / f"{next(fresh)}" for _ in range(2)]
    for folder in folders:
        folder.mkdir()
        shutil.copy(migrated_file, folder)
    source, server, back = url_in(folders[0]), emptied(), url_in(folders[1])
    with Store(source) as store:
        for number, member in enumerate(members):
            with suppress(LocalProtocolError):  # the same serial twice
                store.add_member(member, b"pem", float(number))
        for request, member in zip_longest(enrolments, members[: len(enrolments)]):
            with suppress(LocalProtocolError):  # the same invitation twice
                store.add_enrolment(request, 8.0)
                if member is not None:
                    store.approve_enrolment(request.invitation, member, b"pem", 9.0)
        if revocations is not None:
            store.put_revocations(revocations)
        for job in jobs:
            store.add_job(job, terms)
            with suppress(LocalProtocolError):  # a job that is over takes no step
                moved = replace(step, job=job.id, final=step.final and replace(step.final, job=job.id))
                store.commit_step(moved, terms and terms[::-1])
        store.set_presence(presence)
    assert transfer.transfer(source, server, progress=silent) == transfer.transfer(server, back, progress=silent)
    assert told(source) == told(server) == told(back)
