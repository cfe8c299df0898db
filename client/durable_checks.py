"""Looks at what a member must never lose: a site's vault and its witness, and any member's audit log.

Only reading, and beside the member's program: it may write to them meanwhile, and no lock keeps it waiting.
"""

import base64
import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from client.checks import Check, Level, failed
from client.vault import ledger_in, vault_in, witness_in
from federation import audit
from federation.audit import Break, LogName, Verdict
from federation.errors import ParleyError, RemoteProtocolError, StorageError, WhoActs
from privacy.secure_aggregation.rostersum import logged
from privacy.secure_aggregation.rostersum.evidence import Suspicion
from privacy.secure_aggregation.rostersum.logged import Logged, Noted

__all__ = ["Log", "Vault", "evidence", "log", "look_at_log", "look_at_vault", "vault"]

_RESTORE = "put its newest copy back, and run `parley site restore` if that is an older one"
_ROOM = 256 * 2**20
"""Bytes of free disk below which a log may soon take no more."""
_EVIDENCE = f',"kind":"{Logged.EVIDENCE.value}",'.encode()
"""What stands in an entry of evidence, and in no other: contents are in base64, which has no quotes."""
_CHUNK = 1 << 20


# ----------------------------------------------------------------------------------------------------------- the vault


@dataclass(frozen=True, slots=True)
class Vault:
    """What a look at a site's vault found.

    Attributes:
        file: The vault.
        changes: How often it was changed; None of a site that never ran.
        lines: Whole lines of its privacy ledger.
        broken: The ledger's first broken line, if there is one.
        witness: The file that counts its changes.
        counted: Whether that file is there.
        apart: Whether it lies on another disk than the vault.
        trouble: Why it cannot be used, if it cannot.
    """

    file: Path
    changes: int | None = None
    lines: int = 0
    broken: Break | None = None
    witness: Path = Path()
    counted: bool = False
    apart: bool = False
    trouble: ParleyError | None = None


def look_at_vault(home: Path) -> Vault:
    """Reads the vault of the site with this home, and the count of its witness."""
    file = vault_in(home)
    try:
        view = ledger_in(home)
        if view.counted is None:
            return Vault(file)
        _require_sound(file)
        witness = witness_in(home)
        counted = witness.exists()
        apart = counted and witness.stat().st_dev != file.stat().st_dev
    except ParleyError as refused:
        return Vault(file, trouble=refused if file.exists() else _lost(file, refused))
    except OSError as refused:
        unreadable = StorageError(
            f"{file} or its witness cannot be read: {refused.strerror}",
            fix="let this user read both, and their folders",
            who=WhoActs.SITE,
        )
        return Vault(file, trouble=unreadable)
    return Vault(file, view.counted[1], len(view.lines), view.broken, witness, counted, apart, _unwritable(file))


def vault(found: Vault) -> tuple[Check, ...]:
    """Whether the vault is whole and the newest, and whether an older one would be noticed."""
    if found.trouble is not None:
        return (failed("vault", found.trouble),)
    if found.changes is None:
        return (Check("vault", Level.OK, "there is none yet: it begins when this site first runs"),)
    if found.broken is not None:
        told = f"{found.file} is damaged: of its privacy ledger {found.broken}"
        return (Check("vault", Level.FAIL, told, _RESTORE, WhoActs.SITE), _witness(found))
    kept = f"{found.file}: {found.changes} changes, {found.lines} lines in its privacy ledger, all whole"
    return Check("vault", Level.OK, kept), _witness(found)


def _witness(found: Vault) -> Check:
    if not found.counted:
        told = f"{found.witness}, which counts the vault's changes, is missing: the vault may be an older copy"
        fix = "mount the disk that it lies on, or put the file back; if it is lost, run `parley site restore`"
        return Check("witness", Level.FAIL, f"{told}, and the site does not start", fix, WhoActs.SITE)
    if (unwritable := _unwritable(found.witness)) is not None:
        return failed("witness", unwritable)
    told = f"no older vault was put back, says {found.witness}"
    if found.apart:
        return Check("witness", Level.OK, f"{told}, on another disk than the vault")
    hint = "it is on the vault's own disk, and a snapshot takes both back: parley site witness FOLDER moves it"
    return Check("witness", Level.OK, f"{told}; a hint: {hint}")


def _lost(file: Path, why: ParleyError) -> StorageError:
    return StorageError(
        f"{file} is not there, and its witness says that it was: {why.problem}",
        fix=f"{_RESTORE}; if there is no copy, enrol the site anew, with new keys",
        who=WhoActs.SITE,
    )


def _require_sound(file: Path) -> None:
    """Returns only if SQLite finds the whole file sound.

    Raises:
        StorageError: It does not.
    """
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            (told,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as refused:
        told = str(refused)
    if told != "ok":
        raise StorageError(f"{file} is damaged: {told}", fix=_RESTORE, who=WhoActs.SITE)


def _unwritable(file: Path) -> StorageError | None:
    if os.access(file, os.W_OK):
        return None
    return StorageError(
        f"this user may not write {file}",
        fix="run Parley as the user that the file belongs to, or give it to this one; in a systemd unit name its "
        "folder in ReadWritePaths",
        who=WhoActs.YOU,
    )


# ------------------------------------------------------------------------------------------------------- the audit log


@dataclass(frozen=True, slots=True)
class Log:
    """What a look at an audit log found.

    Attributes:
        path: The log.
        verdict: What a walk along its chain found; None where there is no log.
        torn: Whether the first broken line is the last one, without an end: a crash, or it is being written.
        suspicions: What its evidence is of, and how often; up to the first broken line.
        free: Bytes free on its disk.
        trouble: Why it cannot be used, if it cannot.
    """

    path: Path
    verdict: Verdict | None = None
    torn: bool = False
    suspicions: tuple[tuple[Suspicion, int], ...] = ()
    free: int = 0
    trouble: ParleyError | None = None


def look_at_log(path: Path) -> Log:
    """Walks the whole log: some twenty seconds for each gigabyte."""
    if not path.exists():
        return Log(path)
    try:
        verdict = audit.verify(path)
        torn = verdict.broken is not None and _ends(path) == verdict.lines
        counts = Counter(_suspicions(path, verdict.lines))
        free = shutil.disk_usage(path).free
    except ParleyError as refused:
        return Log(path, trouble=refused)
    return Log(path, verdict, torn, tuple(sorted(counts.items())), free, _unwritable(path))


def log(found: Log, name: LogName, *, ran: bool) -> Check:
    """Whether the log is the member's own, whole, and takes more; `ran`: whether the member must have one."""
    if found.verdict is None:
        return _no_log(found.path, ran=ran) if found.trouble is None else failed("audit log", found.trouble)
    well = Check("audit log", Level.OK, f"{found.path}: {found.verdict.lines} lines, and their chain holds")
    return next(_ills(found, found.verdict, name), well)


def _ills(found: Log, verdict: Verdict, name: LogName) -> Iterator[Check]:
    """What is wrong with a log, the gravest first."""
    if verdict.broken is not None and not found.torn:
        fix = f"run `parley audit verify {found.path}`, and keep the file as it is for whoever looks into it"
        yield Check("audit log", Level.FAIL, f"{found.path}: {verdict.broken}", fix, WhoActs.YOU)
    if verdict.name not in {None, name}:
        told = f"{found.path} is the log of {_said(verdict.name)}, not of {_said(name)}: the member does not start"
        yield Check("audit log", Level.FAIL, told, "put this member's own log back in its place", WhoActs.YOU)
    if found.trouble is not None:
        yield failed("audit log", found.trouble)
    if found.free < _ROOM:
        told = f"{found.path} has {found.free / 2**20:.0f} MiB left on its disk; what it cannot take is not said"
        yield Check("audit log", Level.FAIL, told, "free disk space: no round goes on without", WhoActs.YOU)
    if found.torn:
        cut = f"the last line of {found.path}, line {verdict.lines + 1}, has no end"
        fix = "look again; if it stays, start the member, which sets the line aside and goes on from the one before"
        yield Check("audit log", Level.WARN, f"{cut}: a crash cut it, or it is written now", fix, WhoActs.YOU)


def evidence(found: Log) -> Check | None:
    """Whether somebody has contradicted what they had signed; None where nothing of the kind was noted."""
    if not found.suspicions:
        return None
    told = "; ".join(f"{kind.value} ({count} times)" for kind, count in found.suspicions)
    if {kind for kind, _ in found.suspicions} == {Suspicion.REFUSED}:
        return Check("evidence", Level.OK, f"the audit log notes: {told}; nobody contradicted themselves")
    fix = (
        f"`parley audit proof {found.path}` names who signed both, and `parley audit show` what was noted; ask them "
        "whether a disk was restored, or a second copy of that member ran"
    )
    return Check("evidence", Level.WARN, f"the audit log notes: {told}", fix, WhoActs.CONSORTIUM)


def _no_log(path: Path, *, ran: bool) -> Check:
    if not ran:
        return Check("audit log", Level.OK, "there is none yet: it begins when this member first runs")
    told = f"{path} is missing, and this member has run: what it said cannot be proven, nor an older vault restored"
    fix = "end the member, put the newest copy of the log back, then start it; without a copy a new log begins"
    return Check("audit log", Level.FAIL, told, fix, WhoActs.YOU)


def _said(name: LogName | None) -> str:
    return "nobody" if name is None else f"{name.member} ({name.purpose})"


def _ends(path: Path) -> int:
    """How many lines of a file have an end."""
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))


def _suspicions(path: Path, lines: int) -> Iterator[Suspicion]:
    """What each entry of evidence among the first `lines`, which are whole, is of."""
    with path.open("rb") as file:
        for line in islice(file, lines):
            if _EVIDENCE in line:
                entry = json.loads(line)
                yield _suspicion(base64.b64decode(entry["content"]))


def _suspicion(content: bytes) -> Suspicion:
    try:
        held = logged.read(Logged.EVIDENCE.value, content)
    except RemoteProtocolError:  # another release's
        return Suspicion.REFUSED
    return held.evidence.kind if isinstance(held, Noted) else Suspicion.REFUSED
