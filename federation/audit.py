"""A member's audit log: one append-only file in which SHA-256 chains each line to the line before it.

```
{"line":1,"before":"000000..","at":1764529770.1,"kind":"log","content":"eyJmb3..","digest":"5f0c1a.."}   names the log
{"line":2,"before":"5f0c1a..","at":1764529771.0,"kind":"sent","content":"cwAAAA..","digest":"9b77e2.."}
```

A line's digest is the SHA-256 of all that stands before it in its line; its content is in base64. So a changed byte
shows in its own line, and a line removed, doubled or moved in the line that follows. What no chain shows is a cut at
its end, or a chain made anew from some line on: who notes a log's last line and its digest elsewhere can prove later,
with `verify`, that they still stand in it.
"""

import base64
import binascii
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from federation import files
from federation.blobs import sync_folder
from federation.errors import LocalProtocolError, StorageError

__all__ = [
    "FILE",
    "LOG",
    "MOST",
    "TORN",
    "AuditLog",
    "Break",
    "BrokenLogError",
    "Entry",
    "LogName",
    "Verdict",
    "entries",
    "verify",
]

FILE = "audit.log"
"""The log's name in a member's folder."""

LOG = "log"
"""Kind of the first line, which names the log."""

TORN = "torn"
"""Kind of the note that bytes of a line which a crash had cut short were set aside."""

MOST = 1 << 20
"""Bytes that one entry's content may have."""

_FORMAT = "parley-audit-1"
_DIGEST = 32
_NONE = bytes(_DIGEST)
_LONGEST = MOST * 4 // 3 + 1024
_WINDOW = 1 << 16
_REPORT = 1 << 20
_SHOWN = 80
_FAR = 1 << 62
_YEAR_10000 = 253_402_300_800

_KIND = re.compile(r"[a-z][a-z0-9-]{0,31}")
_LINE = re.compile(
    rb'(?P<body>\{"line":(?P<line>[1-9][0-9]{0,15}),"before":"(?P<before>[0-9a-f]{64})","at":(?P<at>[0-9.e+-]{1,32}),'
    rb'"kind":"(?P<kind>[a-z][a-z0-9-]{0,31})","content":"(?P<content>[A-Za-z0-9+/=]*)"),'
    rb'"digest":"(?P<digest>[0-9a-f]{64})"\}\n'
)

log = logging.getLogger("parley.audit")


@dataclass(frozen=True, slots=True)
class LogName:
    """Whose log it is, and what it is for."""

    member: str
    purpose: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One whole line of a log.

    Attributes:
        line: Its place in the file, from 1.
        before: The digest of the line before it; zeros in the first.
        at: Unix seconds, as the writer's clock said.
        kind: What the content is.
        content: The content itself.
        digest: What the next line is chained to.
    """

    line: int
    before: bytes
    at: float
    kind: str
    content: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class Break:
    """The first line that is not what the lines before it and its own digest say it must be."""

    line: int
    expected: str
    found: str

    def __str__(self) -> str:
        return f"line {self.line} is broken: expected {self.expected}, found {self.found}"


class BrokenLogError(StorageError):
    """A line of a log is not what it must be; what stands behind it is not read."""

    def __init__(self, path: Path, broken: Break) -> None:
        fix = f"run `parley audit verify {path}`, and keep the file as it is for whoever looks into it"
        super().__init__(f"{path}: {broken}", fix=fix)
        self.broken = broken


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a walk along a log found.

    Attributes:
        name: Whose log it is; None if its first line does not say.
        lines: Whole lines, up to the first broken one.
        head: The digest of the last of these; zeros if there is none.
        at: The time of the last of these.
        broken: The first broken line, if there is one.
        backwards: Lines whose time lies before that of the line above: a clock was set, and nothing is broken.
        first_backwards: The first of these.
        noted_at: The line that has the digest asked for; None if no line has it.
    """

    name: LogName | None = None
    lines: int = 0
    head: bytes = _NONE
    at: float = 0.0
    broken: Break | None = None
    backwards: int = 0
    first_backwards: int | None = None
    noted_at: int | None = None

    @property
    def whole(self) -> bool:
        """Whether every line is what it must be."""
        return self.broken is None


# -------------------------------------------------------------------------------------------------------------- reading


def entries(path: Path) -> Iterator[Entry]:
    """The entries of a log from its first line on, one line in memory at a time.

    Raises:
        StorageError: The file cannot be read.
        BrokenLogError: A line is broken: what stands before it has been given.
    """
    with _reading(path) as file:
        for each in _walk(file):
            if isinstance(each, Break):
                raise BrokenLogError(path, each)
            yield each


def verify(path: Path, noted: bytes | None = None, progress: Callable[[int], None] = lambda _: None) -> Verdict:
    """Walks the whole chain, one line in memory at a time, and says what it found.

    Args:
        path: The log.
        noted: A digest that was the log's head once; `Verdict.noted_at` says where it stands.
        progress: Told, each mebibyte and at the end, how many bytes have been walked.

    Raises:
        StorageError: The file cannot be read.
    """
    verdict, told = Verdict(), 0
    with _reading(path) as file:
        for each in _walk(file):
            if isinstance(each, Break):
                verdict = replace(verdict, broken=each)
                break
            verdict = _grown(verdict, each, noted)
            if file.tell() - told >= _REPORT:
                told = file.tell()
                progress(told)
        progress(file.tell())
    return verdict


def _grown(verdict: Verdict, entry: Entry, noted: bytes | None) -> Verdict:
    back = entry.at < verdict.at
    return Verdict(
        name=verdict.name or _name(entry),
        lines=entry.line,
        head=entry.digest,
        at=entry.at,
        backwards=verdict.backwards + back,
        first_backwards=verdict.first_backwards or (entry.line if back else None),
        noted_at=entry.line if entry.digest == noted else verdict.noted_at,
    )


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError as missing:
        raise StorageError(
            f"there is no audit log {path}", fix="name the file; a member's log begins when it first runs"
        ) from missing
    except OSError as refused:
        raise StorageError(
            f"cannot read {path}: {refused.strerror}", fix="give this user the right to read it"
        ) from refused


def _walk(file: BinaryIO) -> Iterator[Entry | Break]:
    """The lines in order; after the first broken one nothing follows."""
    number, before = 1, _NONE
    while line := file.readline(_LONGEST + 1):
        entry = _parsed(line, number)
        if isinstance(entry, Entry):
            entry = _linked(entry, number, before)
        yield entry
        if isinstance(entry, Break):
            return
        number, before = number + 1, entry.digest
    if number == 1:
        yield Break(1, "the line that names the log", "an empty file")


def _parsed(line: bytes, number: int) -> Entry | Break:
    """The entry that a line is by itself, wherever it stands; `number` is what a broken one is called."""
    if not line.endswith(b"\n"):
        what = "longer than any entry" if len(line) > _LONGEST else "cut short, or being written at this moment"
        return Break(number, "an entry and the end of its line", f"{len(line)} bytes and no end: {what}")
    found = _LINE.fullmatch(line)
    if found is None:
        return Break(number, "an entry of an audit log", _shown(line))
    digest = hashlib.sha256(found["body"]).digest()
    if digest.hex().encode() != found["digest"]:
        return Break(number, f"the digest of what it holds, {digest.hex()}", found["digest"].decode())
    try:
        at, content = float(found["at"]), base64.b64decode(found["content"], validate=True)
        _require_time(at)
    except (ValueError, binascii.Error, LocalProtocolError):
        return Break(number, "a time, and content in base64", _shown(line))
    before = bytes.fromhex(found["before"].decode())
    return Entry(int(found["line"]), before, at, found["kind"].decode(), content, digest)


def _linked(entry: Entry, number: int, before: bytes) -> Entry | Break:
    """The entry, if it may stand as line `number` behind a line of the digest `before`."""
    if entry.line != number:
        what = "lines were removed, added or moved"
        return Break(number, f"the entry written as line {number}", f"that written as line {entry.line}: {what}")
    if entry.before != before:
        return Break(number, f"an entry that follows {before.hex()}", f"one that follows {entry.before.hex()}")
    if number == 1 and _name(entry) is None:
        return Break(number, f"the line that names a {_FORMAT}", f"an entry of the kind {entry.kind}")
    return entry


def _name(entry: Entry) -> LogName | None:
    """Whose log the first line says it is; None if it does not say."""
    if entry.kind != LOG:
        return None
    try:
        match json.loads(entry.content):
            case {"format": str(form), "member": str(member), "purpose": str(purpose)} if form == _FORMAT:
                return LogName(member, purpose)
    except (ValueError, RecursionError):
        pass
    return None


def _shown(line: bytes) -> str:
    return repr(line[:_SHOWN])[1:] + (f" and {len(line) - _SHOWN} bytes more" if len(line) > _SHOWN else "")


# -------------------------------------------------------------------------------------------------------------- writing


class AuditLog:
    """A log that this process, and no other at the same time, appends to.

    It is made if it is not there. What a crash had cut short at its end is set aside in a file of its own, beside it,
    and noted; the chain goes on from the last whole line. One caller at a time.

    Args:
        path: The file; its folder is made if need be, this user's alone.
        name: Whose log it is; a file that says otherwise is refused.
        at: The time now, in Unix seconds.

    Raises:
        StorageError: Another process appends to it, it is another's log, its first or last line is broken, or the disk
            refuses.
        LocalProtocolError: `at` is no time.
    """

    def __init__(self, path: Path, name: LogName, at: float) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._end = 0
        self._lines = 0
        self._head = _NONE
        _require_time(at)
        with self._disk():
            self._begin(name, at)

    @property
    def lines(self) -> int:
        """How many lines there are."""
        return self._lines

    @property
    def head(self) -> bytes:
        """The digest of the last one."""
        return self._head

    def append(self, kind: str, content: bytes, at: float) -> None:
        """Adds an entry, and returns only once it is durable.

        Args:
            kind: What the content is: at most 32 of a-z, 0-9 and -, a letter first; not `LOG` and not `TORN`.
            content: At most `MOST` bytes.
            at: Unix seconds; a time before that of the last entry is taken as it is, and `verify` counts it.

        Raises:
            StorageError: The disk does not take it, and the log is as it was; or somebody else has changed the file.
            LocalProtocolError: Kind, content or time cannot be, or the log is closed.
        """
        self.extend(((kind, content),), at)

    def extend(self, items: Iterable[tuple[str, bytes]], at: float) -> None:
        """Adds entries of one time, as `append` does, made durable together: all of them, or none if it raises.

        A crash may leave the first of them, whole.
        """
        checked = tuple(items)
        _require_time(at)
        for kind, content in checked:
            _require(kind, content)
        descriptor = self._open_descriptor()
        with self._disk():
            if os.fstat(descriptor).st_size != self._end:
                self.close()
                raise StorageError(
                    f"somebody else has changed {self._path} since this process wrote to it",
                    fix=f"find out who, and run `parley audit verify {self._path}`",
                )
            try:
                self._put(descriptor, checked, at)
            except OSError:
                self._roll_back(descriptor)
                raise

    def close(self) -> None:
        """Lets others append; may be repeated."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise LocalProtocolError(f"an entry was to be added to {self._path}, which is closed")
        return self._descriptor

    def _begin(self, name: LogName, at: float) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(self._path, flags, 0o600)
        try:
            _lock(self._descriptor, self._path)
            self._take_up(self._descriptor, name, at)
        except BaseException:
            self.close()
            raise

    def _take_up(self, descriptor: int, name: LogName, at: float) -> None:
        """Goes on from the last whole line; what stands behind it is set aside first."""
        last, torn = _last_line(descriptor)
        items: list[tuple[str, bytes]] = []
        if last:
            self._check(name, last)
            self._end = os.fstat(descriptor).st_size - len(torn)
        else:
            items.append((LOG, json.dumps({"format": _FORMAT, **asdict(name)}).encode()))
        if torn:
            items.append((TORN, self._set_aside(torn)))
        if items:
            self._put(descriptor, items, at)  # over what was torn: a crash in here leaves a torn line again
            os.ftruncate(descriptor, self._end)
            os.fsync(descriptor)
            sync_folder(self._path.parent)

    def _check(self, name: LogName, last: bytes) -> None:
        """Takes up line and digest of the last line, if this is the member's own log."""
        first = next(entries(self._path))
        found = _name(first)
        if found != name:
            raise StorageError(
                f"{self._path} is the log of {_said(found)}, not of {_said(name)}",
                fix="name another file: each member has a log of its own",
            )
        entry = _parsed(last, first.line)
        if isinstance(entry, Break):
            raise StorageError(
                f"the last line of {self._path} is broken: expected {entry.expected}, found {entry.found}",
                fix="keep the file for whoever looks into it, under another name; a new log begins in its place",
            )
        self._lines, self._head = entry.line, entry.digest

    def _set_aside(self, torn: bytes) -> bytes:
        digest = hashlib.sha256(torn).hexdigest()
        aside = self._path.with_name(f"{self._path.name}.torn-{digest[:16]}")
        files.write(aside, torn, secret=True)
        log.warning(
            "a crash had cut short the last %d bytes of %s; they are set aside in %s", len(torn), self._path, aside
        )
        return json.dumps({"bytes": len(torn), "sha256": digest, "kept": aside.name}).encode()

    def _put(self, descriptor: int, items: Iterable[tuple[str, bytes]], at: float) -> None:
        """Writes the entries behind the last whole line, durably, and counts them once they are."""
        lines, number, head = [], self._lines, self._head
        for kind, content in items:
            number += 1
            line, head = _rendered(number, head, at, kind, content)
            lines.append(line)
        written = b"".join(lines)
        os.lseek(descriptor, self._end, os.SEEK_SET)
        left = memoryview(written)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
        self._end, self._lines, self._head = self._end + len(written), number, head

    def _roll_back(self, descriptor: int) -> None:
        """Takes back what was written of entries that are not durable; failing that, the next to open does it."""
        try:
            os.ftruncate(descriptor, self._end)
            os.fsync(descriptor)
        except OSError:
            self.close()

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as refused:
            raise StorageError(
                f"the disk does not take what is to be added to {self._path}: {refused.strerror}",
                fix="free disk space, or give this user the right to write there",
            ) from refused


def _rendered(number: int, before: bytes, at: float, kind: str, content: bytes) -> tuple[bytes, bytes]:
    """A line, and its digest."""
    encoded = base64.b64encode(content).decode()
    body = (
        f'{{"line":{number},"before":"{before.hex()}","at":{float(at)!r},"kind":"{kind}","content":"{encoded}"'.encode()
    )
    digest = hashlib.sha256(body).digest()
    return body + f',"digest":"{digest.hex()}"}}\n'.encode(), digest


def _require(kind: str, content: bytes) -> None:
    if kind in {LOG, TORN} or not _KIND.fullmatch(kind):
        raise LocalProtocolError(f"an entry cannot be of the kind {kind!r}")
    if len(content) > MOST:
        raise LocalProtocolError(f"an entry holds at most {MOST} bytes, not {len(content)}")


def _require_time(at: float) -> None:
    if not 0 <= at < _YEAR_10000:  # as NaN is not either
        raise LocalProtocolError(f"{at} is no time in Unix seconds")


def _last_line(descriptor: int) -> tuple[bytes, bytes]:
    """The last line that has an end, empty if none has; and the bytes behind it."""
    size, window = os.fstat(descriptor).st_size, _WINDOW
    while True:
        window = min(window, size)
        os.lseek(descriptor, size - window, os.SEEK_SET)
        content = _read(descriptor, window)
        end = content.rfind(b"\n") + 1
        begin = content.rfind(b"\n", 0, max(end - 1, 0)) + 1
        if begin or window == size:
            return content[begin:end], content[end:]
        window *= 2


def _read(descriptor: int, size: int) -> bytes:
    parts = []
    while size and (part := os.read(descriptor, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _said(name: LogName | None) -> str:
    return "nobody" if name is None else f"{name.member} ({name.purpose})"


def _lock(descriptor: int, path: Path) -> None:
    """Holds the file until it is closed; readers are not kept out."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, _FAR, os.SEEK_SET)  # beyond any entry: what is locked there cannot be read either
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as taken:
        raise StorageError(
            f"another process appends to {path} already", fix="let that one run, or end it; two would break the chain"
        ) from taken
