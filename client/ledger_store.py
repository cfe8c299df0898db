"""A privacy ledger's lines in the file of a site's vault, and a look at them beside a site that runs."""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from federation.audit import Break
from federation.errors import StorageError, WhoActs
from privacy import ledger, ledger_chain
from privacy.crypto import canonical
from privacy.ledger import Book, Entry
from privacy.ledger_chain import Line

__all__ = ["EMPTY", "SCHEMA", "Tail", "View", "append", "loaded", "look"]

SCHEMA = """
    CREATE TABLE ledger (number INTEGER PRIMARY KEY, charge BLOB UNIQUE, line BLOB NOT NULL, digest BLOB NOT NULL);
    ALTER TABLE vault ADD COLUMN ledger BLOB;
"""
"""A row for each line; of charges, what no two of them have in common; beside the count of changes the last digest."""

_FIRST = 2
"""The vault's first version that has a ledger."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Where a ledger ends: how many lines it has, and the digest of the last."""

    number: int
    digest: bytes


EMPTY = Tail(0, bytes(32))


@dataclass(frozen=True, slots=True)
class View:
    """What a look at a ledger found.

    Attributes:
        lines: All whole lines, up to the first broken one.
        broken: The first broken line, if there is one.
        counted: The vault's identity, and how often it was changed; None of a site that never ran.
    """

    lines: tuple[Line, ...] = ()
    broken: Break | None = None
    counted: tuple[bytes, int] | None = None

    @property
    def book(self) -> Book:
        """What the whole lines come to."""
        return Book(line.entry for line in self.lines)

    @property
    def tail(self) -> Tail:
        """Where they end."""
        return Tail(self.lines[-1].number, self.lines[-1].digest) if self.lines else EMPTY


def append(transaction: sqlite3.Connection, tail: Tail, entries: Iterable[Entry], at: float) -> Tail:
    """Adds entries within a transaction, and gives where the ledger will then end.

    Raises:
        sqlite3.Error: The disk does not take them, or a charge is there already.
    """
    for entry in entries:
        number = tail.number + 1
        text, digest = ledger_chain.write(number, tail.digest, at, entry)
        transaction.execute("INSERT INTO ledger VALUES (?, ?, ?, ?)", (number, _key(entry), text, digest))
        tail = Tail(number, digest)
    if tail.number:
        transaction.execute("UPDATE vault SET ledger = ?", (tail.digest,))
    return tail


def _key(entry: Entry) -> bytes | None:
    key = ledger.key_of(entry)
    return None if key is None else canonical.enc(*key)


def loaded(connection: sqlite3.Connection) -> View:
    """All lines of a ledger, checked: each by itself, against the one before it, and the last against the vault."""
    rows = connection.execute("SELECT line, digest FROM ledger ORDER BY number")
    found = tuple(ledger_chain.walk(_texts(rows)))
    lines = tuple(each for each in found if isinstance(each, Line))
    broken = next((each for each in found if isinstance(each, Break)), None)
    kept, *counted = connection.execute("SELECT ledger, identity, changes FROM vault").fetchone()
    view = View(lines, broken, tuple(counted))
    if broken is None and (kept or EMPTY.digest) != view.tail.digest:
        cut = Break(
            view.tail.number + 1, f"a line, up to the one of digest {kept.hex() if kept else 'none'}", "the end"
        )
        return replace(view, broken=cut)
    return view


def _texts(rows: Iterable[tuple[object, object]]) -> Iterator[tuple[bytes, bytes]]:
    """The rows as bytes, whatever somebody wrote into them."""
    for line, digest in rows:
        yield tuple(each if isinstance(each, bytes) else str(each).encode() for each in (line, digest))  # type: ignore[misc] # two of them


def look(file: Path) -> View:
    """The ledger in a vault as it is durable now; a site that runs is not disturbed, and nothing is written.

    A site that never ran has an empty one.

    Raises:
        StorageError: The file cannot be read, or was made by an older release and never opened since.
    """
    if not file.exists():
        return View()
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.execute("BEGIN")  # one state, whatever is committed meanwhile
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version >= _FIRST:
                return loaded(connection)
            (made,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error as refused:
        raise StorageError(
            f"the ledger in {file} cannot be read ({refused})",
            fix="let this user read the file and its folder; if it is damaged, put the newest copy back",
            who=WhoActs.SITE,
        ) from refused
    if made:
        raise StorageError(
            f"{file} was made by an older release, which kept no ledger",
            fix="start the site once: parley site run",
            who=WhoActs.SITE,
        )
    return View()
