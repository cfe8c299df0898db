"""A site's durable state is there whole after every cut, in one process at a time, and never silently an older copy."""

import errno
import hashlib
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client import ledger_store
from client.vault import Vault, keep_witness, ledger_in, vault_in, witness_in
from federation.errors import ConfigurationError, LocalProtocolError, StorageError
from privacy import ledger, ledger_chain
from privacy.crypto import canonical
from privacy.ledger import BudgetSet, Charged, Ended, Entry, Promised
from privacy.secure_aggregation.rostersum.durable import Charge, Durable, Family, Job, Point, Record
from privacy.secure_aggregation.rostersum.fields import pack
from privacy.secure_aggregation.rostersum.messages import Share
from privacy.secure_aggregation.rostersum.site_events import Persist
from privacy.secure_aggregation.rostersum.terms import Churn, Mechanism, Noise, RecordCodec, Unit
from privacy.secure_aggregation.rostersum.terms import Path as Rounding
from tests.privacy.secure_aggregation.rostersum.conftest import TRAIN, Bench, consortium_of, floor_for

TERMS = consortium_of().terms.encode()
RECORD = Record(3, 1, b"c" * 32, (0, 1, 2), 2, b"an OPEN", (Share(1, b"s" * 33),), 1_800_000_000)
NOISY = replace(
    TRAIN,
    plan_id=2,
    churn=Churn.DP,
    words=12,
    codec=RecordCodec(8, Rounding.EXACT, 4096.0, 1000),
    dp=Noise(Unit.RECORD, Mechanism.DDGAUSS, 1.0, 64.0, 1.0, 1e-6, 10),
)
CHARGE = Charge("hearts", b"j" * 32, 2**64 - 1, NOISY, 3, 1)
PAID = ledger.charged(CHARGE)
BUDGET = BudgetSet("hearts", 3.0, 1e-5, 8, reason="first")


def job(number: int = 0, **changes: Any) -> Job:
    """A job that this site has accepted."""
    accepted = Job(hashlib.sha256(b"%d" % number).digest(), 0, TERMS, "hearts", b"t" * 32)
    return replace(accepted, **changes)


def paid(r: int) -> Charged:
    """The ledger's line about another round of the same job."""
    return ledger.charged(replace(CHARGE, r=r))


def persist(durable: Durable, charge: Charge | None = None) -> Persist:
    """What a machine asks for."""
    return Persist(Point.ATTEMPT, durable, charge)


OLD = Durable((job(0), job(1, record=RECORD)), (), (Family("hearts"),))
"""Two open jobs, one of which has opened a round."""
NEW = replace(OLD.without(job(1)).with_job(job(0, last_r=7, opened_r=7)), families=(Family("hearts", b"p" * 32),))
"""One closed, one gone on, and a pin: four entries differ."""


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, Path]:
    """Where a vault and its witness would lie."""
    return tmp_path / "site" / "vault.db", tmp_path / "log" / "vault.count"


@pytest.fixture
def vault(place: tuple[Path, Path]) -> Iterator[Vault]:
    """An empty vault."""
    with Vault(*place) as opened:
        yield opened


def kept(place: tuple[Path, Path]) -> tuple[Durable, tuple[Entry, ...]]:
    """What a new process finds."""
    with Vault(*place) as opened:
        return opened.durable, entries(place)


def entries(place: tuple[Path, Path]) -> tuple[Entry, ...]:
    """What the ledger says."""
    view = ledger_store.look(place[0])
    assert view.broken is None
    return tuple(line.entry for line in view.lines)


# ------------------------------------------------------------------------------------------------------- what is kept


def test_a_new_site_knows_nothing(place: tuple[Path, Path]) -> None:
    """Its files are this user's alone."""
    assert kept(place) == (Durable(), ())
    for path in (*place[0].parent.iterdir(), place[1]):
        assert path.stat().st_mode & 0o077 == 0
    assert place[0].parent.stat().st_mode & 0o077 == 0


def test_state_and_charge_are_found_again(place: tuple[Path, Path]) -> None:
    """In the same order, to the last field, whatever a round's number."""
    with Vault(*place) as vault:
        vault.persist(persist(OLD))
        vault.persist(persist(NEW, CHARGE))
        assert vault.durable == NEW
    assert kept(place) == (NEW, (PAID,))


def test_each_commit_is_synced(vault: Vault) -> None:
    """A power cut takes nothing back: the write-ahead log is synced at each commit; what is erased is written over."""
    pragmas = ("journal_mode", "synchronous", "fullfsync", "secure_delete")
    found = [vault._connection.execute(f"PRAGMA {pragma}").fetchone()[0] for pragma in pragmas]
    assert found == ["wal", 2, 1, 1]


def test_only_what_changed_is_written(vault: Vault) -> None:
    """A round of one job rewrites its row: neither other jobs nor the tombstones of years."""
    stones = tuple(job(number).tombstone for number in range(2, 500))
    before = replace(OLD, closed=stones)
    vault.persist(persist(before))
    rows = vault._connection.execute("SELECT count(*), max(number) FROM state").fetchone()
    statements: list[str] = []
    vault._connection.set_trace_callback(statements.append)
    vault.persist(persist(before.with_job(job(0, last_r=1)), CHARGE))
    assert [statement.split()[0] for statement in statements] == [
        "BEGIN",
        *("INSERT", "INSERT", "UPDATE"),  # the job, a line of the ledger, and its digest
        *("UPDATE", "COMMIT"),
    ]
    assert vault._connection.execute("SELECT count(*), max(number) FROM state").fetchone() == (rows[0], rows[1] + 1)


def test_a_real_round_is_found_again_at_every_point(place: tuple[Path, Path]) -> None:
    """Three sites' machines go through two rounds and the end; after each Persist a new process has its very state."""
    consortium = consortium_of()
    bench = Bench(consortium, floor_for(consortium.terms))
    bench.accept()
    bench.epoch()
    for r in (1, 2):
        bench.train(r)
        start = bench.open(r)
        bench.say(0, bench.result(start.ctx))
    persists = bench.of(bench.effects[0], Persist)
    assert {work.point for work in persists} >= {Point.JOB, Point.KEYS, Point.ATTEMPT, Point.OPENED, Point.NOTE}
    for work in persists:
        with Vault(*place) as vault:
            vault.persist(work)
        assert kept(place) == (work.durable, ())


def ordered(durable: Durable) -> tuple[list[Any], ...]:
    """The state in one order."""
    by_hash: Callable[[Any], bytes] = lambda each: each.job_hash  # noqa: E731 - two kinds of values have it
    families = sorted(durable.families, key=lambda family: family.name)
    return sorted(durable.jobs, key=by_hash), sorted(durable.closed, key=by_hash), families


HASHES = st.integers(0, 5)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("job"), HASHES, st.integers(0, 2**64 - 1)),
            st.tuples(st.just("close"), HASHES, st.just(0)),
            st.tuples(st.just("family"), HASHES, st.integers(0, 255)),
        ),
        max_size=10,
    )
)
def test_any_history_is_found_again(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    """Jobs that come, go on and end, and families whose pins change: all is there, in an order that means nothing."""
    folder = tmp_path_factory.mktemp("vault")
    place = folder / "vault.db", folder / "vault.count"
    durable = Durable()
    with Vault(*place) as vault:
        for kind, number, value in steps:
            known = durable.knows(job(number).job_hash)
            match kind:
                case "job" if not known or any(each.job_hash == job(number).job_hash for each in durable.jobs):
                    durable = durable.with_job(job(number, last_r=value))
                case "close" if durable.jobs:
                    durable = durable.without(durable.jobs[number % len(durable.jobs)])
                case "family":
                    durable = durable.with_family(Family(f"f{number}", bytes([value]) * 32))
            vault.persist(persist(durable))
            assert vault.durable == durable
    assert ordered(kept(place)[0]) == ordered(durable)


def test_a_readers_look_stops_nothing(vault: Vault, place: tuple[Path, Path]) -> None:
    """Who reads the ledger beside a running site sees what is durable, and the site goes on."""
    vault.persist(persist(OLD, CHARGE))
    assert entries(place) == (PAID,)
    reader = sqlite3.connect(f"file:{place[0]}?mode=ro", uri=True)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM ledger").fetchone() == (1,)
    vault.persist(persist(NEW))
    assert vault.durable == NEW
    reader.close()


# --------------------------------------------------------------------------------------------------------------- cuts


class Cut(Exception):  # noqa: N818 - it is not an error but the end
    """The process ends here."""


class Cutting:
    """A connection whose process ends before the statement of this number, and says nothing more to the disk."""

    def __init__(self, connection: sqlite3.Connection, left: int) -> None:
        self.connection, self.left = connection, left

    def execute(self, *statement: Any) -> Any:
        """The statement's answer."""
        self.left -= 1
        if self.left < 0:
            raise Cut
        return self.connection.execute(*statement)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.execute("COMMIT")


@pytest.mark.parametrize("writes", range(10))
def test_a_cut_between_any_two_writes_leaves_old_or_new(place: tuple[Path, Path], tmp_path: Path, writes: int) -> None:
    """Whole, with the charge or without it; the process that was cut takes no further change."""
    with Vault(*place) as vault:
        vault.persist(persist(OLD))
        whole = vault._connection
        vault._connection = Cutting(whole, writes)  # type: ignore[assignment] # a fake of the part that is used
        cut = False
        try:
            vault.persist(persist(NEW, CHARGE))
        except Cut:
            cut = True
        copy = tmp_path / "copy" / "vault.db", tmp_path / "copy" / "vault.count"
        copy[0].parent.mkdir()
        for suffix in ("", "-wal"):
            shutil.copy(f"{place[0]}{suffix}", f"{copy[0]}{suffix}")
        shutil.copy(place[1], copy[1])
        if cut:
            with pytest.raises(StorageError, match="did not take a change, and this process knows more than it"):
                vault.persist(persist(NEW))
        vault._connection = whole
    assert cut == (writes < 9)
    assert kept(copy) == ((OLD, ()) if cut else (NEW, (PAID,)))


def test_a_count_that_was_not_written_is_no_loss(place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process cut between the commit and its count is no older copy of itself."""
    with Vault(*place) as vault:
        vault.persist(persist(OLD))
        with monkeypatch.context() as patch:
            patch.setattr("client.vault._Count.update", lambda *_: (_ for _ in ()).throw(Cut))
            with pytest.raises(Cut):
                vault.persist(persist(NEW))
    assert kept(place) == (NEW, ())


LOOP = """
import sys
from dataclasses import replace
from pathlib import Path
from client.vault import Vault
from privacy.secure_aggregation.rostersum.site_events import Persist

with Vault(Path(sys.argv[1]), Path(sys.argv[2])) as vault:
    from tests.client.test_vault import CHARGE, job, persist
    r = max((each.last_r for each in vault.durable.jobs), default=0)
    while True:
        r += 1
        state = vault.durable.with_job(job(0, last_r=r)).with_job(job(1, last_r=r))
        vault.persist(persist(state, replace(CHARGE, r=r)))
        print(r, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_process_loses_nothing_it_was_told(place: tuple[Path, Path]) -> None:
    """Killed again and again at any instant: what was acknowledged is there, each state whole, and it goes on."""
    last = 0
    for lines in (1, 25):
        process = subprocess.Popen(
            [sys.executable, "-c", LOOP, *map(str, place)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        assert process.stdout is not None
        for _ in range(lines):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        acknowledged = [last, *map(int, process.stdout.read().split(b"\n")[:-1])][-1]
        process.stdout.close()
        process.wait()
        durable, charged = kept(place)
        rounds = {each.last_r for each in durable.jobs}
        assert len(rounds) == 1
        assert max(rounds) in (acknowledged, acknowledged + 1)
        assert [each.event.first_round for each in charged if isinstance(each, Charged)] == list(
            range(1, max(rounds) + 1)
        )


# --------------------------------------------------------------------------------------------------------- older copies


def copied(place: tuple[Path, Path], folder: Path) -> Callable[[], None]:
    """Copies the state now, and puts the copy back when it is called."""
    folder.mkdir()
    shutil.copy(place[0], folder)

    def back() -> None:
        shutil.copy(folder / place[0].name, place[0])

    return back


def test_an_older_copy_is_refused(place: tuple[Path, Path], tmp_path: Path) -> None:
    """It says how much it lacks and who must act; nothing changes, and the newest state is taken as before."""
    with Vault(*place) as vault:
        vault.persist(persist(OLD))
    put_back = copied(place, tmp_path / "backup")
    with Vault(*place) as vault:
        vault.persist(persist(NEW))
    newest = copied(place, tmp_path / "newest")
    put_back()
    for _ in range(2):
        with pytest.raises(StorageError) as refused:
            Vault(*place)
        assert refused.match(r"vault.db may be an older copy: it has 1 changes where its witness has counted 2\. What")
        assert refused.match(r"\(the site's administrator\): put the newest copy back.*from the audit log")
    newest()
    assert kept(place) == (NEW, ())


def test_an_older_copy_is_taken_at_the_administrators_word(place: tuple[Path, Path], tmp_path: Path) -> None:
    """With what it lacked, once: from then on it is the newest, and the state that it replaced is the older one."""
    with Vault(*place) as vault:
        vault.persist(persist(OLD))
    put_back = copied(place, tmp_path / "backup")
    with Vault(*place) as vault:
        vault.persist(persist(NEW))
    newest = copied(place, tmp_path / "newest")
    put_back()
    with Vault(*place, restored=True) as vault:
        assert vault.durable == OLD
        vault.reenter(NEW, (PAID, paid(1)))
        assert vault.durable == NEW
        vault.persist(persist(NEW, replace(CHARGE, r=2)))
    assert kept(place) == (NEW, (PAID, paid(1), paid(2)))
    newest()
    with pytest.raises(StorageError, match="it has 2 changes where its witness has counted 5"):
        Vault(*place)


def test_an_older_copy_serves_nobody_before_it_has_what_it_lacks(
    place: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened with the administrator's word and closed, cut, or refused by its disk, it is an older copy as before."""
    with Vault(*place) as vault:
        vault.persist(persist(OLD))
    put_back = copied(place, tmp_path / "backup")
    with Vault(*place) as vault:
        vault.persist(persist(NEW))
    put_back()
    with (
        Vault(*place, restored=True) as vault,
        pytest.raises(LocalProtocolError, match="was to serve before it had what it lacks"),
    ):
        vault.persist(persist(OLD))
    for writes in range(8):
        with Vault(*place, restored=True) as vault:
            whole = vault._connection
            vault._connection = Cutting(whole, writes)  # type: ignore[assignment] # a fake of the part that is used
            with pytest.raises(Cut):
                vault.reenter(NEW, (PAID,))
            if whole.in_transaction:
                whole.execute("ROLLBACK")
            vault._connection = whole
        with pytest.raises(StorageError, match="may be an older copy"):
            Vault(*place)
    with monkeypatch.context() as patch:
        patch.setattr("client.vault._Count.update", lambda *_: (_ for _ in ()).throw(Cut))
        with Vault(*place, restored=True) as vault, pytest.raises(Cut):
            vault.reenter(NEW, (PAID,))
    assert kept(place) == (NEW, (PAID,))  # it was durable, and only its count was not


# --------------------------------------------------------------------------------------------------------- the places


def test_changes_are_counted_on_another_disk(tmp_path: Path) -> None:
    """From the move on, also after a restart; the old count is gone, and a home put back whole is noticed."""
    home, disk = tmp_path / "home", tmp_path / "disk" / "site"
    assert witness_in(home) == home / "vault.count"
    with Vault(vault_in(home), witness_in(home)) as vault:
        vault.persist(persist(OLD))
    assert keep_witness(home, disk) == witness_in(home) == disk / "vault.count"
    assert keep_witness(home, disk) == disk / "vault.count"
    assert not (home / "vault.count").exists()
    shutil.copytree(home, tmp_path / "backup")
    with Vault(vault_in(home), witness_in(home)) as vault:
        vault.persist(persist(NEW))
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "backup", home)
    with pytest.raises(StorageError, match="it has 1 changes where its witness has counted 2"):
        Vault(vault_in(home), witness_in(home))


def test_a_disk_that_is_not_there_stops_the_site(tmp_path: Path) -> None:
    """Nothing is counted anew."""
    home = tmp_path / "home"
    Vault(vault_in(home), witness_in(home)).close()
    keep_witness(home, tmp_path / "disk")
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    with pytest.raises(StorageError, match=r"its witness .*disk/vault.count is missing"):
        Vault(vault_in(home), witness_in(home))
    assert not (tmp_path / "disk").exists()


def test_a_count_is_not_moved_over_another_sites(tmp_path: Path) -> None:
    """Nor is one made up where there is none."""
    home, other = tmp_path / "home", tmp_path / "other"
    with pytest.raises(StorageError, match=r"home/vault.count, which counts .* is not there"):
        keep_witness(home, tmp_path / "disk")
    for each in (home, other):
        Vault(vault_in(each), witness_in(each)).close()
    with pytest.raises(StorageError, match=r"other/vault.count is another site's"):
        keep_witness(home, other)
    assert witness_in(home) == home / "vault.count"
    Vault(vault_in(home), witness_in(home)).close()


def test_a_lost_state_is_not_begun_anew(place: tuple[Path, Path]) -> None:
    """A site that has forgotten its jobs would accept them a second time."""
    with Vault(*place) as vault:
        vault.persist(persist(OLD))
    place[0].unlink()
    for restored in (False, True):
        with pytest.raises(
            StorageError, match=r"vault.db is lost: its witness .* has counted 1 changes.*enrol the site"
        ):
            Vault(*place, restored=restored)
    place[0].touch()
    with pytest.raises(StorageError, match="is not a vault, or was emptied"):
        Vault(*place)


def test_a_site_cut_before_its_first_state_begins_anew(place: tuple[Path, Path]) -> None:
    """With its witness, and without a file or with an empty one."""
    Vault(*place).close()
    for leave in (lambda: None, place[0].touch):
        place[0].unlink()
        leave()
        assert kept(place) == (Durable(), ())


def test_a_missing_or_foreign_witness_is_refused(place: tuple[Path, Path], tmp_path: Path) -> None:
    """A folder put back from a backup brings no witness, or that of another site."""
    with Vault(*place) as vault:
        vault.persist(persist(OLD))
    Vault(tmp_path / "other" / "vault.db", tmp_path / "other" / "count").close()
    with pytest.raises(StorageError, match=r"may be an older copy: its witness .*/other/count is another vault's"):
        Vault(place[0], tmp_path / "other" / "count")
    place[1].unlink()
    with pytest.raises(StorageError, match=r"may be an older copy: its witness .*/vault.count is missing"):
        Vault(*place)
    with Vault(*place, restored=True) as vault:
        vault.reenter(OLD, ())
    assert kept(place) == (OLD, ())


def test_a_damaged_witness_is_refused(place: tuple[Path, Path]) -> None:
    """It counts nothing any more; the administrator must say that the state is the newest."""
    Vault(*place).close()
    place[1].write_bytes(b"12\n")
    with pytest.raises(StorageError, match=r"vault.count, which counts the changes.*is damaged.*remove it"):
        Vault(*place)


def test_a_witness_that_goes_missing_stops_the_site(vault: Vault, place: tuple[Path, Path]) -> None:
    """From then on an older copy would not be noticed."""
    place[1].unlink()
    with pytest.raises(StorageError, match=r"vault.count, which counts .* cannot be used: No such file"):
        vault.persist(persist(OLD))
    with pytest.raises(StorageError, match="end this process"):
        vault.persist(persist(OLD))


# ------------------------------------------------------------------------------------------------------------ refusals


def test_one_process_has_it(vault: Vault, place: tuple[Path, Path]) -> None:
    """Another one, of this system or within this one, is told who must end; afterwards it may."""
    program = f"from client.vault import Vault; from pathlib import Path; Vault(*map(Path, {list(map(str, place))!r}))"
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert other.returncode == 1
    assert "vault.db is used by another process" in other.stderr
    assert "end the other process of this site" in other.stderr
    with pytest.raises(StorageError, match="is used by another process"):
        Vault(*place)
    vault.persist(persist(OLD))
    vault.close()
    assert kept(place) == (OLD, ())


@pytest.mark.parametrize("refused", [stat.S_ISREG, stat.S_ISDIR], ids=["file", "folder"])
def test_a_disk_that_cannot_sync_is_refused(
    place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, refused: Callable[[int], bool]
) -> None:
    """Files or names: before anything is written, since what such a disk promises, a power cut breaks."""
    system = os.fsync

    def refusing(descriptor: int) -> None:
        if refused(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        system(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)
    with pytest.raises(StorageError, match=r"site cannot make anything durable: Invalid argument.*a local disk"):
        Vault(*place)
    assert list(place[0].parent.iterdir()) == []


def test_a_change_that_forgets_is_refused(vault: Vault) -> None:
    """Jobs and families are known for ever; a bug that loses one costs a process, not the promise."""
    closed = OLD.without(OLD.jobs[0])
    for before, after in (
        (OLD, replace(OLD, jobs=OLD.jobs[1:])),
        (closed, replace(closed, closed=())),
        (closed, replace(closed, families=())),
    ):
        vault._failed, vault._durable = False, before
        with pytest.raises(
            LocalProtocolError, match="would make this site forget a job that it has accepted, or a data"
        ):
            vault.persist(persist(after))


def test_a_round_is_charged_once(vault: Vault) -> None:
    """A second charge for it is refused with the change that brings it."""
    vault.persist(persist(OLD, CHARGE))
    with pytest.raises(
        LocalProtocolError, match=r"round 18446744073709551615 \(train\) of a job would be charged twice"
    ):
        vault.persist(persist(NEW, CHARGE))
    assert vault.durable == OLD
    with pytest.raises(StorageError, match="did not take a change"):
        vault.persist(persist(NEW))


def test_a_round_is_charged_once_even_where_the_book_is_wrong(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file itself has each job, purpose and round once."""
    vault.persist(persist(OLD, CHARGE))
    monkeypatch.setattr(vault._book, "post", lambda _: None)
    with pytest.raises(LocalProtocolError, match=r"a change contradicts what .*vault.db holds: UNIQUE"):
        vault.persist(persist(NEW, CHARGE))
    assert vault.durable == OLD


def test_what_is_no_event_is_charged_to_nobody(vault: Vault) -> None:
    """A charge that no accountant could interpret is refused with the change that brings it."""
    odd = replace(CHARGE, plan=replace(NOISY, codec=TRAIN.codec))
    with pytest.raises(ConfigurationError, match="no event holds for noise on codec train"):
        vault.persist(persist(OLD, odd))
    assert vault.durable == Durable()


DAMAGES = {
    "other bytes": "UPDATE state SET content = zeroblob(length(content)) WHERE name LIKE 'job%'",
    "other digest": "UPDATE state SET digest = zeroblob(32)",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_entry_that_changed_is_told(place: tuple[Path, Path], damage: str) -> None:
    """Each entry has its digest: a flipped bit in a round's number would cost more than the round."""
    with Vault(*place) as vault:
        vault.persist(persist(OLD))
        vault._connection.execute(DAMAGES[damage])
    with pytest.raises(StorageError, match=r"is damaged: the entry job [0-9a-f]{64} has other bytes.*administrator"):
        Vault(*place)


LEDGER_DAMAGES = {
    "a changed line": (
        "UPDATE ledger SET line = replace(line, '7', '8') WHERE number = 2",
        "line 2 is broken: expected",
    ),
    "a line of text": (
        "UPDATE ledger SET line = 'x' WHERE number = 2",
        "line 2 is broken: expected the digest of what",
    ),
    "a changed digest": ("UPDATE ledger SET digest = zeroblob(32) WHERE number = 2", "line 2 is broken: expected the"),
    "no first line": ("DELETE FROM ledger WHERE number = 1", "line 1 is broken: expected the entry written as line 1"),
    "no middle line": ("DELETE FROM ledger WHERE number = 2", "line 2 is broken: expected the entry written as line 2"),
    "no last line": (
        "DELETE FROM ledger WHERE number = 3",
        "line 3 is broken: expected a line, up to the one of digest",
    ),
    "no line": ("DELETE FROM ledger", "line 1 is broken: expected a line, up to the one of digest"),
    "no end": ("UPDATE vault SET ledger = NULL", "line 4 is broken: expected a line, up to the one of digest none"),
}


@pytest.mark.parametrize("damage", LEDGER_DAMAGES)
def test_a_damaged_ledger_is_told(place: tuple[Path, Path], damage: str) -> None:
    """By the first line that is not what it must be: to the agent, which does not start, and to whoever looks."""
    statement, problem = LEDGER_DAMAGES[damage]
    with Vault(*place) as vault:
        vault.post((BUDGET, PAID, paid(7)))
        vault._connection.execute(statement)
    with pytest.raises(StorageError, match=rf"vault.db is damaged: {problem}.*in its ledger.*parley site restore"):
        Vault(*place)
    assert str(ledger_store.look(place[0]).broken).startswith(problem)


def test_lines_written_anew_from_another_ledger_are_told(place: tuple[Path, Path], tmp_path: Path) -> None:
    """A line that is right by itself does not follow another one."""
    other = tmp_path / "other.db", tmp_path / "other.count"
    for each, budget in ((place, BUDGET), (other, replace(BUDGET, epsilon=9.0))):
        with Vault(*each) as vault:
            vault.post((budget, PAID))
    with Vault(*place) as vault:
        vault._connection.execute("ATTACH ? AS other", (str(other[0]),))
        vault._connection.execute(
            "UPDATE ledger SET (line, digest) = (SELECT line, digest FROM other.ledger AS o WHERE "
            "o.number = 2) WHERE number = 2"
        )
    with pytest.raises(StorageError, match="line 2 is broken: expected an entry that follows"):
        Vault(*place)


# ---------------------------------------------------------------------------------------------------------- the ledger


def test_what_a_job_may_cost_is_promised_with_its_acceptance(place: tuple[Path, Path]) -> None:
    """In the very transaction, and released in that of its end; jobs of exact sums are promised nothing."""
    study = consortium_of(3, (TRAIN, NOISY))
    taken = Job(study.terms.job_hash, 0, study.terms.encode(), "hearts", b"t" * 32)
    state = OLD.with_job(taken)
    charge = replace(CHARGE, job_hash=taken.job_hash, r=3)
    with Vault(*place) as vault:
        vault.post((BUDGET,))
        vault.persist(persist(OLD))
        vault.persist(persist(state))
        vault.persist(persist(state, charge))
        (promise,) = vault.book.promises("hearts")
        assert [line.count for line in promise.lines] == [10]
    with Vault(*place) as vault:
        vault.persist(persist(state.without(taken)))
    found = ledger.promise(study.terms, "hearts")
    assert kept(place)[1] == (BUDGET, found, ledger.charged(charge), Ended(taken.job_hash))
    assert isinstance(found, Promised)


def test_a_ledger_of_many_lines_is_found_again(place: tuple[Path, Path]) -> None:
    """In their order, each with the writer's time; a clock that was set back changes nothing else."""
    times = iter((5000.0, 100.0, 7.5))
    with Vault(*place, clock=lambda: next(times)) as vault:
        for each in (BUDGET, PAID, paid(1)):
            vault.post((each,))
    lines = ledger_store.look(place[0]).lines
    assert [line.at for line in lines] == [5000.0, 100.0, 7.5]
    assert kept(place)[1] == (BUDGET, PAID, paid(1))


def test_a_look_writes_nothing_and_notices_an_older_copy(tmp_path: Path) -> None:
    """Beside a running site too: what it shows is durable, and never silently that of a backup."""
    home = tmp_path / "site"
    assert ledger_in(home) == ledger_store.View()
    with Vault(vault_in(home), witness_in(home)) as vault:
        vault.post((BUDGET,))
        assert [line.entry for line in ledger_in(home).lines] == [BUDGET]
    put_back = copied((vault_in(home), witness_in(home)), tmp_path / "backup")
    with Vault(vault_in(home), witness_in(home)) as vault:
        vault.post((PAID,))
        assert ledger_in(home).book.rounds("hearts") == 1
    before = vault_in(home).read_bytes()
    assert ledger_in(home).tail.number == 2
    assert vault_in(home).read_bytes() == before
    put_back()
    for gone in (lambda: None, vault_in(home).unlink, vault_in(home).touch):
        gone()
        with pytest.raises(StorageError, match=r"may be an older copy: it has [01] changes where its witness .* 2\."):
            ledger_in(home)
    vault_in(home).write_bytes(b"not a database" * 100)
    with pytest.raises(StorageError, match=r"the ledger in .*vault.db cannot be read"):
        ledger_in(home)


def test_a_look_sees_one_state(place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a running site commits while somebody looks makes no broken ledger of a whole one."""
    walked = ledger_chain.walk
    with Vault(*place) as vault:
        vault.post((BUDGET,))

        def walk(lines: Any) -> Any:
            found = tuple(walked(lines))
            vault.post((PAID,))
            return found

        with monkeypatch.context() as patch:
            patch.setattr(ledger_chain, "walk", walk)
            assert entries(place) == (BUDGET,)
        assert entries(place) == (BUDGET, PAID)


def as_before_the_chain(place: tuple[Path, Path], charges: tuple[Charge, ...]) -> None:
    """Makes the vault what an older release would have left: charges in a table of their own, and no chain."""
    database = sqlite3.connect(place[0], isolation_level=None)
    database.execute("DROP TABLE ledger")
    database.execute("ALTER TABLE vault DROP COLUMN ledger")
    database.execute(
        "CREATE TABLE charges (number INTEGER PRIMARY KEY, job BLOB NOT NULL, r BLOB NOT NULL, "
        "content BLOB NOT NULL, UNIQUE (job, r))"
    )
    for each in charges:
        numbers = each.members, each.c_max, each.rounds
        content = canonical.enc(each.family, each.job_hash, each.r, pack(each.plan), *numbers)
        row = each.job_hash, each.r.to_bytes(8), content
        database.execute("INSERT INTO charges (job, r, content) VALUES (?, ?, ?)", row)
    database.execute("PRAGMA user_version = 1")
    database.close()


def test_a_vault_of_an_older_release_is_brought_up_to_date(place: tuple[Path, Path], tmp_path: Path) -> None:
    """With its state, its charges as events in the chain, and its count; again and again it is the same."""
    with Vault(*place) as vault:
        vault.persist(persist(OLD))
    older = copied(place, tmp_path / "older")
    with Vault(*place) as vault:
        vault.persist(persist(NEW))
    as_before_the_chain(place, (CHARGE, replace(CHARGE, r=1)))
    with pytest.raises(StorageError, match=r"was made by an older release, which kept no ledger.*parley site run"):
        ledger_store.look(place[0])
    for _ in range(2):
        assert kept(place) == (NEW, (PAID, paid(1)))
    with Vault(*place) as vault:
        vault.persist(persist(NEW, replace(CHARGE, r=2)))
    assert kept(place) == (NEW, (PAID, paid(1), paid(2)))
    older()
    as_before_the_chain(place, ())
    content = place[0].read_bytes()
    with pytest.raises(StorageError, match="it has 1 changes where its witness has counted 3"):
        Vault(*place)
    assert place[0].read_bytes() == content


def test_an_older_releases_charge_that_says_nothing_is_told(place: tuple[Path, Path]) -> None:
    """And nothing is brought up to date without it."""
    with Vault(*place) as vault:
        vault.persist(persist(OLD))
    as_before_the_chain(place, (CHARGE,))
    database = sqlite3.connect(place[0], isolation_level=None)
    for content in (b"x", b"", b"i" + (8).to_bytes(4) + bytes(8)):
        database.execute("UPDATE charges SET content = ?", (content,))
        with pytest.raises(StorageError, match=r"vault.db is damaged: a charge cannot be read"):
            Vault(*place)
    assert database.execute("PRAGMA user_version").fetchone() == (1,)
    database.close()


def test_a_file_that_is_no_vault_is_told(place: tuple[Path, Path]) -> None:
    """Overwritten, another program's, a newer release's: each is left as it is."""
    Vault(*place).close()
    place[0].write_bytes(b"not a database" * 100)
    with pytest.raises(StorageError, match=r"vault.db is damaged \(file is not a database\)"):
        Vault(*place)
    place[0].unlink()
    other = sqlite3.connect(place[0])
    other.execute("CREATE TABLE other (x)")
    other.commit()
    before = place[0].read_bytes()
    with pytest.raises(StorageError, match=r"vault.db is not a vault, or was emptied"):
        Vault(*place)
    assert place[0].read_bytes() == before
    other.execute("PRAGMA user_version = 9")
    other.close()
    with pytest.raises(StorageError, match=r"vault.db is a newer release's.*install that release"):
        Vault(*place)


def test_a_truncated_file_is_told(place: tuple[Path, Path]) -> None:
    """SQLite's own structure is checked when it is opened."""
    with Vault(*place) as vault:
        for number in range(40):
            vault.persist(persist(vault.durable.with_job(job(number))))
    content = place[0].read_bytes()
    place[0].write_bytes(content[: len(content) // 2])
    with pytest.raises(StorageError, match=r"vault.db is damaged.*put the newest copy back"):
        Vault(*place)


def test_a_vault_without_its_count_is_told(place: tuple[Path, Path]) -> None:
    """It cannot say whether it is an older copy."""
    with Vault(*place) as vault:
        vault._connection.execute("DELETE FROM vault")
    with pytest.raises(StorageError, match="is damaged: it does not say how often it was changed"):
        Vault(*place)


def test_a_full_disk_ends_the_process(place: tuple[Path, Path]) -> None:
    """The change is not taken, and no other; a new process finds the state before it."""
    with Vault(*place) as vault:
        vault.persist(persist(OLD))
        (pages,) = vault._connection.execute("PRAGMA page_count").fetchone()
        vault._connection.execute(f"PRAGMA max_page_count = {pages}")
        big = OLD.with_job(job(0, record=replace(RECORD, opening=bytes(100_000))))
        with pytest.raises(StorageError, match=r"vault.db has no room on its disk .*free disk space"):
            vault.persist(persist(big))
        with pytest.raises(StorageError, match="did not take a change"):
            vault.persist(persist(NEW))
    assert kept(place) == (OLD, ())


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """With what the system says."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot make anything durable: File exists"):
        Vault(tmp_path / "file" / "vault.db", tmp_path / "count")
