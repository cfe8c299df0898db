"""What a site must never forget under secure aggregation: its durable state, one transaction with fsync at a time.

A SQLite file holds one row for each job, tombstone and data family, and one for each line of the privacy ledger; a
change writes only the rows that changed, so the tombstones of years cost nothing. A *witness* counts the changes:
beside it, or better where no backup and no snapshot of its disk takes it along (`keep_witness`).
"""

import hashlib
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from client import ledger_store
from federation import files
from federation.blobs import sync_folder
from federation.errors import LocalProtocolError, ParleyError, StorageError, WhoActs
from privacy import ledger
from privacy.crypto import canonical
from privacy.ledger import Book, Ended, Entry
from privacy.secure_aggregation.rostersum.durable import Charge, Durable
from privacy.secure_aggregation.rostersum.fields import unpack
from privacy.secure_aggregation.rostersum.site_events import Persist
from privacy.secure_aggregation.rostersum.terms import Plan

__all__ = ["Vault", "keep_witness", "ledger_in", "vault_in", "witness_in"]

_FILE, _WITNESS, _POINTER = "vault.db", "vault.count", "vault.witness"
"""In a site's home: its state, the file that counts its changes, and the one that says where else that file lies."""

_VERSION = 2
_SCHEMA = f"""
    CREATE TABLE vault (identity BLOB NOT NULL, changes INTEGER NOT NULL);
    CREATE TABLE state (
        number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, content BLOB NOT NULL, digest BLOB NOT NULL
    );
    {ledger_store.SCHEMA}
    PRAGMA user_version = {_VERSION};
"""
_UNCHAINED = 1
"""Before the ledger was a chain of events, charges stood in a table of their own, each with its whole plan."""
_CHAINED = f"""
    {ledger_store.SCHEMA}
    DROP TABLE charges;
    PRAGMA user_version = {_VERSION};
"""
_PRAGMAS = (
    "PRAGMA synchronous = FULL",  # NORMAL does not sync each commit in WAL mode
    "PRAGMA fullfsync = ON",  # without it macOS leaves what was synced in the drive's own cache
    "PRAGMA secure_delete = ON",  # shares that are erased are written over
)
_PATIENCE = 5.0
"""Seconds to wait for a program that looks into the file; another process of this site is not waited for."""

_REENTER = "run `parley site restore`, which enters again from the audit log what it lacks"
_RESTORE = f"put the newest copy back; if it is an older one, {_REENTER}"

_MEANINGS = {
    "SQLITE_BUSY": ("is used by another process", "end the other process of this site (lsof names it)"),
    "SQLITE_NOTADB": ("is damaged", _RESTORE),
    "SQLITE_CORRUPT": ("is damaged", _RESTORE),
    "SQLITE_FULL": ("has no room on its disk", "free disk space, then start the site again"),
    "SQLITE_READONLY": ("cannot be written", "let this user write the file and its folder"),
    "SQLITE_CANTOPEN": ("cannot be opened", "let this user read and write the file and its folder"),
}
"""What SQLite's errors mean and what helps; an extended code begins with its kind."""
_DISK = ("cannot be read or written by its disk", "check the disk, then start the site again")


class Vault:
    """A site's durable state: what `persist` was given survives a kill or a power cut once it has returned.

    An older copy put back is refused as soon as it is opened, by the witness, which has counted more changes than it.
    What the witness cannot notice: that it was itself put back together with the file (a snapshot of the whole disk or
    machine); that a copy ran elsewhere meanwhile and comes back with as many changes or more; and, after a power cut,
    the loss of the last seconds' count. Such a site counts as colluding. What this program cannot notice either is a
    disk, or a file system, that says of fsync what is not so.

    One thread at a time uses it. Opening it waits for no other process that has it open: two would make two vectors of
    one attempt.

    Args:
        file: The state; made where this site never ran.
        witness: Where changes are counted.
        restored: The administrator's word that `file` is an older copy: it is opened in spite of its witness, to be
            given what it lacks by `reenter`. Until then nothing changes, and without this word it is refused as before.
        clock: The time that the ledger's lines bear, in Unix seconds; it orders nothing.

    Raises:
        StorageError: Another process uses it, it is an older copy, damaged, lost or a newer release's, or the disk does
            not take it or cannot fsync; nothing changed.
    """

    def __init__(
        self, file: Path, witness: Path, *, restored: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._file = file
        self._witness = witness
        self._clock = clock
        _require_sync(file.parent)
        self._lock = _connected(file.with_name(f"{file.name}.lock"), patience=0)
        try:
            with _told(file):
                self._lock.execute("BEGIN EXCLUSIVE")  # SQLite's own lock: on every system, and it ends with a process
            self._open(restored=restored)
        except BaseException:
            self._lock.close()
            raise
        self._failed = False

    def _open(self, *, restored: bool) -> None:
        count = _Count.read(self._witness)
        if count is None and not self._file.exists():
            count = _Count(os.urandom(16), 0)
            count.create(self._witness)
        if count is not None and count.changes and not self._file.exists():
            raise self._lost(count)
        self._behind = restored
        self._connection = _connected(self._file, patience=_PATIENCE)
        try:
            with _told(self._file):
                _prepare(self._connection, self._file, count)
                self._durable = self._loaded()
                self._count = self._counted(count, restored=restored)
                self._chain()
                self._tail, self._book = self._ledger()
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Lets go of the files."""
        self._connection.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def durable(self) -> Durable:
        """The state that is durable: that of the last `persist` which returned. The order of its jobs means nothing."""
        return self._durable

    @property
    def book(self) -> Book:
        """What the privacy ledger comes to; only this changes it."""
        return self._book

    def persist(self, work: Persist) -> None:
        """Makes the state durable, and with it what it costs: all, or nothing.

        A round's charge, the promise to a job that was accepted, and the end of one that is closed are lines of the
        ledger in the same transaction.

        Raises:
            StorageError: The disk does not take it. The process must end, for its machines are ahead of the disk; no
                further change is taken.
            LocalProtocolError: It would forget a job, or charge a round twice, or this is an older copy that was given
                nothing yet: a bug of ours. The process must end.
            ConfigurationError: The charge is no event: a bug of ours, since it was found payable. The process must end.
        """
        self._require_served()
        self._write(work.durable, () if work.charge is None else (ledger.charged(work.charge),))

    def post(self, entries: Iterable[Entry]) -> None:
        """Makes entries of the ledger durable, all of them or none.

        Raises:
            StorageError: As `persist`.
            LocalProtocolError: They contradict the ledger, or this is an older copy that was given nothing yet: a bug
                of ours. The process must end.
        """
        self._require_served()
        self._write(self._durable, entries)

    def _require_served(self) -> None:
        if self._behind:
            raise LocalProtocolError(f"{self._file} is an older copy, and was to serve before it had what it lacks")

    def reenter(self, durable: Durable, entries: Iterable[Entry]) -> None:
        """Makes what an older copy lacked durable, all at once: from now on it is the newest, and may serve.

        Raises:
            StorageError: The disk does not take it; the process must end, and the copy is still an older one.
            LocalProtocolError: It would forget a job, or charge a round twice: a bug of ours. The process must end.
        """
        if self._behind:
            self._count.create(self._witness)
        self._write(durable, entries)
        self._behind = False

    def _write(self, durable: Durable, entries: Iterable[Entry]) -> None:
        if self._failed:
            raise StorageError(
                f"{self._file} did not take a change, and this process knows more than it",
                fix="end this process and start the site again",
                who=WhoActs.SITE,
            )
        self._failed = True
        _require_memory(self._durable, durable)
        count, lines = self._count.next, (*entries, *self._implied(durable))
        for entry in lines:
            self._book.post(entry)  # it is ahead of a disk that refuses: then this process changes nothing any more
        with _told(self._file), self._connection as transaction:
            transaction.execute("BEGIN IMMEDIATE")
            for name, piece in _changes(self._durable, durable):
                _put(transaction, name, piece)
            tail = ledger_store.append(transaction, self._tail, lines, self._clock()) if lines else self._tail
            transaction.execute("UPDATE vault SET changes = ?", (count.changes,))
        self._durable, self._count, self._tail = durable, count, tail
        count.update(self._witness)
        self._failed = False

    def _implied(self, durable: Durable) -> Iterator[Entry]:
        """What the ledger is to say of jobs that are accepted with this change, or over with it."""
        known = {job.job_hash for job in self._durable.jobs}
        fresh = (job for job in durable.jobs if job.job_hash not in known)
        yield from ledger.promised(fresh)
        for job_hash in known - {job.job_hash for job in durable.jobs}:
            if self._book.promise(job_hash) is not None:
                yield Ended(job_hash)

    # --------------------------------------------------------------------------------------------------- what it holds

    def _loaded(self) -> Durable:
        (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise self._damaged(found)
        pieces: list[Durable] = []
        rows = self._connection.execute("SELECT name, content, digest FROM state ORDER BY number")
        for name, content, digest in rows:
            if hashlib.sha256(content).digest() != digest:
                raise self._damaged(f"the entry {name} has other bytes")
            pieces.append(Durable.decode(content))
        return Durable(
            tuple(job for piece in pieces for job in piece.jobs),
            tuple(stone for piece in pieces for stone in piece.closed),
            tuple(family for piece in pieces for family in piece.families),
        )

    def _chain(self) -> None:
        """Brings the charges of an older release into the ledger; what it was is the newest state, or restored."""
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version != _UNCHAINED:
            return
        rows = self._connection.execute("SELECT content FROM charges ORDER BY number").fetchall()
        try:
            entries = [ledger.charged(_charge_of(content)) for (content,) in rows]
        except (ValueError, TypeError, ParleyError) as damaged:
            raise self._damaged(f"a charge cannot be read ({damaged})") from damaged
        with self._connection as transaction:
            transaction.execute("BEGIN IMMEDIATE")
            for statement in _CHAINED.split(";"):
                transaction.execute(statement)
            ledger_store.append(transaction, ledger_store.EMPTY, entries, self._clock())

    def _ledger(self) -> tuple[ledger_store.Tail, Book]:
        view = ledger_store.loaded(self._connection)
        if view.broken is not None:
            raise self._damaged(f"{view.broken}, in its ledger")
        return view.tail, view.book

    def _counted(self, witness: "_Count | None", *, restored: bool) -> "_Count":
        """The count with which this file goes on."""
        row = self._connection.execute("SELECT identity, changes FROM vault").fetchone()
        if row is None:
            raise self._damaged("it does not say how often it was changed")
        kept = _Count(*row)
        if restored:
            return _Count(kept.identity, max(kept.changes, 0 if witness is None else witness.changes) + 1)
        if witness is None:
            raise _older(self._file, f"its witness {self._witness} is missing")
        _require_newest(self._file, self._witness, kept, witness)
        kept.create(self._witness)
        return kept

    # -------------------------------------------------------------------------------------------------------- refusals

    def _lost(self, witness: "_Count") -> StorageError:
        return StorageError(
            f"{self._file} is lost: its witness {self._witness} has counted {witness.changes} changes",
            fix=f"{_RESTORE}; if there is no copy, enrol the site anew, with new keys, and remove the witness",
            who=WhoActs.SITE,
        )

    def _damaged(self, why: str) -> StorageError:
        return StorageError(f"{self._file} is damaged: {why}", fix=_RESTORE, who=WhoActs.SITE)


# ---------------------------------------------------------------------------------------------------------- the places


def vault_in(home: Path) -> Path:
    """Where the vault of the site with this home lies."""
    return home / _FILE


def witness_in(home: Path) -> Path:
    """Where the changes of the vault of the site with this home are counted.

    Raises:
        StorageError: The file that says where cannot be read.
    """
    pointer = home / _POINTER
    if not pointer.exists():
        return home / _WITNESS
    return Path(files.read(pointer, "let this user read it").decode().rstrip("\n"))


def keep_witness(home: Path, folder: Path) -> Path:
    """Has the changes counted in `folder` from now on, made if need be and this user's alone; gives the file.

    No process has the vault open. A crash leaves the old place in force, or the new one.

    Raises:
        StorageError: Another vault's witness is there, there is none to move, or a disk refuses.
    """
    old, new = witness_in(home), folder.absolute() / _WITNESS
    count, other = _Count.read(old), _Count.read(new)
    if count is None:
        raise StorageError(
            f"{old}, which counts the changes of this site's vault, is not there",
            fix="run the site once; if it ran before, find that file, or run `parley site restore`",
            who=WhoActs.SITE,
        )
    if other is not None and other.identity != count.identity:
        raise StorageError(f"{new} is another site's", fix="name a folder of this site's own", who=WhoActs.SITE)
    if new == old:
        return new
    count.create(new)
    files.write(home / _POINTER, f"{new}\n".encode(), secret=True)
    with suppress(OSError):  # it says no more than the newer one
        old.unlink()
    return new


def ledger_in(home: Path) -> ledger_store.View:
    """The privacy ledger of the site with this home as it is durable now, also beside its agent; nothing is written.

    Raises:
        StorageError: It cannot be read, was made by an older release, or stands in an older copy of the vault.
    """
    file, witness = vault_in(home), witness_in(home)
    count = _Count.read(witness)  # before the vault: it may grow meanwhile, and its witness after it
    view = ledger_store.look(file)
    if count is not None:
        kept = _Count(count.identity, 0) if view.counted is None else _Count(*view.counted)  # lost, or emptied
        _require_newest(file, witness, kept, count)
    return view


# --------------------------------------------------------------------------------------------------------- the witness


@dataclass(frozen=True, slots=True)
class _Count:
    """How often a vault was changed."""

    identity: bytes
    changes: int

    @property
    def next(self) -> "_Count":
        return _Count(self.identity, self.changes + 1)

    @property
    def line(self) -> bytes:
        """Always as long: it is written in place, within one block of any disk."""
        return b"%s %020d\n" % (self.identity.hex().encode(), self.changes)

    @classmethod
    def read(cls, file: Path) -> "_Count | None":
        """The count in the file, None where there is no file."""
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as refused:
            raise _unusable(file, refused) from refused
        found = re.fullmatch(rb"([0-9a-f]{32}) ([0-9]{20})\n", content)
        if found is None:
            problem = f"{file}, which counts the changes of this site's vault, is damaged"
            raise StorageError(problem, fix=f"remove it, then {_REENTER}", who=WhoActs.SITE)
        return cls(bytes.fromhex(found[1].decode()), int(found[2]))

    def create(self, file: Path) -> None:
        """Writes it durably."""
        files.write(file, self.line, secret=True)

    def update(self, file: Path) -> None:
        """Writes it in place, and leaves it to the system when it reaches the disk: a kill loses nothing of it."""
        try:
            with file.open("r+b", buffering=0) as witness:
                witness.write(self.line)
        except OSError as refused:
            raise _unusable(file, refused) from refused


def _require_newest(file: Path, witness: Path, kept: _Count, counted: _Count) -> None:
    """Returns only if a vault has all the changes that its witness has counted."""
    if counted.identity != kept.identity:
        raise _older(file, f"its witness {witness} is another vault's")
    if counted.changes > kept.changes:
        raise _older(file, f"it has {kept.changes} changes where its witness has counted {counted.changes}")


def _older(file: Path, why: str) -> StorageError:
    return StorageError(
        f"{file} may be an older copy: {why}. What it has forgotten may have left this site",
        fix=_RESTORE,
        who=WhoActs.SITE,
    )


def _unusable(file: Path, refused: OSError) -> StorageError:
    return StorageError(
        f"{file}, which counts the changes of this site's vault, cannot be used: {refused.strerror}",
        fix="let this user read and write it; do not remove it",
        who=WhoActs.SITE,
    )


# ------------------------------------------------------------------------------------------------------------ the state


def _require_memory(before: Durable, after: Durable) -> None:
    """A job hash is known for ever, open first and then as a tombstone; so is a data family."""
    ended = {job.job_hash for job in before.jobs} - {job.job_hash for job in after.jobs}
    stones = after.closed is before.closed or set(after.closed).issuperset(before.closed)
    families = {family.name for family in before.families} <= {family.name for family in after.families}
    if not (stones and families and all(after.knows(job_hash) for job_hash in ended)):
        raise LocalProtocolError("a change would make this site forget a job that it has accepted, or a data family")


def _changes(before: Durable, after: Durable) -> Iterator[tuple[str, Durable | None]]:
    """The entries that differ, by name, and None for one that is gone; what was not touched is the same object."""
    for job in after.jobs:
        if job not in before.jobs:
            yield f"job {job.job_hash.hex()}", Durable(jobs=(job,))
    for gone in {job.job_hash for job in before.jobs} - {job.job_hash for job in after.jobs}:
        yield f"job {gone.hex()}", None
    if after.closed is not before.closed:
        known = set(before.closed)
        for stone in after.closed:
            if stone not in known:
                yield f"closed {stone.job_hash.hex()}", Durable(closed=(stone,))
    for family in after.families:
        if family not in before.families:
            yield f"family {family.name}", Durable(families=(family,))


def _put(transaction: sqlite3.Connection, name: str, piece: Durable | None) -> None:
    if piece is None:
        transaction.execute("DELETE FROM state WHERE name = ?", (name,))
        return
    content = piece.encode()
    transaction.execute(
        "INSERT OR REPLACE INTO state (name, content, digest) VALUES (?, ?, ?)",
        (name, content, hashlib.sha256(content).digest()),
    )


def _charge_of(content: bytes) -> Charge:
    match canonical.dec(content):
        case (str(family), bytes(job_hash), int(r), plan, int(members), int(c_max), int(rounds)):
            return Charge(family, job_hash, r, unpack(Plan, plan), members, c_max, rounds)
        case _:
            raise ValueError("it has other fields")


# --------------------------------------------------------------------------------------------------------- the database


def _require_sync(folder: Path) -> None:
    """Refuses a folder, made if need be, that cannot fsync."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.fsync(probe.fileno())
        sync_folder(folder)
    except OSError as refused:
        raise StorageError(
            f"{folder} cannot make anything durable: {refused.strerror}",
            fix="put the site's home on a local disk that this user may write to",
            who=WhoActs.SITE,
        ) from refused


def _connected(file: Path, patience: float) -> sqlite3.Connection:
    with _told(file):
        if not file.exists():
            with suppress(OSError):  # SQLite will say what is wrong
                file.touch(0o600)
        return sqlite3.connect(file, timeout=patience, isolation_level=None, check_same_thread=False)


def _prepare(connection: sqlite3.Connection, file: Path, count: _Count | None) -> None:
    """Makes the tables where there are none, and sees to it that each commit is synced."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version > _VERSION or (not version and (tables or count is None or count.changes)):
        what = "a newer release's" if version > _VERSION else "not a vault, or was emptied"
        raise StorageError(f"{file} is {what}", fix=f"install that release, or {_RESTORE}", who=WhoActs.SITE)
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        problem = f"{file} lies on a file system that SQLite cannot use safely"
        raise StorageError(problem, fix="put the site's home on a local disk", who=WhoActs.SITE)
    for pragma in _PRAGMAS:
        connection.execute(pragma)
    if not version and count is not None:
        with connection as transaction:
            transaction.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";"):
                transaction.execute(statement)
            row = count.identity, count.changes
            transaction.execute("INSERT INTO vault (identity, changes) VALUES (?, ?)", row)


@contextmanager
def _told(file: Path) -> Iterator[None]:
    """Turns SQLite's errors into ones that name who must act."""
    try:
        yield
    except sqlite3.IntegrityError as contradiction:
        raise LocalProtocolError(f"a change contradicts what {file} holds: {contradiction}") from contradiction
    except sqlite3.Error as refused:
        code = getattr(refused, "sqlite_errorname", "")
        problem, fix = next((_MEANINGS[kind] for kind in _MEANINGS if code.startswith(kind)), _DISK)
        raise StorageError(f"{file} {problem} ({refused})", fix=fix, who=WhoActs.SITE) from refused
