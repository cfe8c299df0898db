from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from client.checks import Check, Level
from client.durable_checks import Log, evidence, log, look_at_log, look_at_vault, vault
from client.vault import Vault, keep_witness, vault_in, witness_in
from federation.audit import FILE, AuditLog, LogName
from federation.errors import WhoActs
from privacy.ledger import BudgetSet
from privacy.secure_aggregation.rostersum.evidence import Evidence, Suspicion
from privacy.secure_aggregation.rostersum.logged import Logged, evidence_entry

if TYPE_CHECKING:
    from pathlib import Path

NAME = LogName("athens", "site")
JOB = b"j" * 32
CONTRADICTION = evidence_entry(JOB, Evidence(Suspicion.TWO_UPLOADS, "two uploads", 1))
REFUSAL = evidence_entry(JOB, Evidence(Suspicion.REFUSED, "E_STATE"))


def _ran(home: Path, epsilon: float = 3.0) -> None:
    """A site runs, its administrator sets a budget, and it ends."""
    with Vault(vault_in(home), witness_in(home)) as opened:
        opened.post((BudgetSet("hearts", epsilon, 1e-5, 8, reason="decided"),))


def _vault(home: Path) -> dict[str, Check]:
    return {check.name: check for check in vault(look_at_vault(home))}


def _log(path: Path, *, ran: bool = True, name: LogName = NAME) -> Check:
    return log(look_at_log(path), name, ran=ran)


def _holds(check: Check, level: Level, found: str, fix: str, who: WhoActs) -> None:
    assert (check.level, check.who) == (level, who)
    assert found in check.found
    assert fix in check.fix


# ----------------------------------------------------------------------------------------------------------- the vault


def test_a_site_that_never_ran_has_no_vault_and_lacks_nothing(tmp_path: Path) -> None:
    """Nor does the look make one."""
    (check,) = vault(look_at_vault(tmp_path))
    assert (check.level, check.found) == (Level.OK, "there is none yet: it begins when this site first runs")
    assert list(tmp_path.iterdir()) == []


def test_a_vault_is_looked_at_beside_the_agent_that_has_it_open(tmp_path: Path) -> None:
    """What is durable is told, and the agent's next change is not kept waiting."""
    _ran(tmp_path)
    with Vault(vault_in(tmp_path), witness_in(tmp_path)) as opened:
        told = _vault(tmp_path)
        assert {check.level for check in told.values()} == {Level.OK}
        assert told["vault"].found.endswith("vault.db: 1 changes, 1 lines in its privacy ledger, all whole")
        opened.post((BudgetSet("hearts", 4.0, 1e-5, 8, reason="raised"),))
    assert "2 changes, 2 lines" in _vault(tmp_path)["vault"].found


def test_a_witness_on_the_vaults_own_disk_is_hinted_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another disk there is nothing to hint at; neither is a failure."""
    _ran(tmp_path)
    hinted = _vault(tmp_path)["witness"]
    assert hinted.level is Level.OK
    assert "it is on the vault's own disk, and a snapshot takes both back: parley site witness FOLDER" in hinted.found

    plain = type(tmp_path).stat

    def on_a_disk_of_its_own(file: Path, **how: bool) -> os.stat_result:
        real = plain(file, **how)
        return os.stat_result((*real[:2], len(file.name), *real[3:]))

    monkeypatch.setattr(type(tmp_path), "stat", on_a_disk_of_its_own)
    apart = _vault(tmp_path)["witness"]
    assert (apart.level, "hint" in apart.found) == (Level.OK, False)
    assert apart.found.endswith("on another disk than the vault")


def test_a_witness_that_is_missing_is_a_failure(tmp_path: Path) -> None:
    """Its disk may not be mounted: then nothing is to be restored, and the site would not start."""
    home, disk = tmp_path / "home", tmp_path / "disk"
    _ran(home)
    keep_witness(home, disk)
    disk.rename(tmp_path / "unmounted")
    told = _vault(home)
    assert told["vault"].level is Level.OK
    _holds(
        told["witness"],
        Level.FAIL,
        f"{disk / 'vault.count'}, which counts the vault's changes, is missing",
        "mount the disk that it lies on",
        WhoActs.SITE,
    )


def test_an_older_copy_put_back_is_a_failure(tmp_path: Path) -> None:
    """Before the agent is started: the witness has counted more."""
    _ran(tmp_path)
    shutil.copy(vault_in(tmp_path), tmp_path / "backup")
    _ran(tmp_path, 4.0)
    shutil.copy(tmp_path / "backup", vault_in(tmp_path))
    _holds(
        _vault(tmp_path)["vault"],
        Level.FAIL,
        "may be an older copy: it has 1 changes where its witness has counted 2",
        "run `parley site restore`",
        WhoActs.SITE,
    )


def test_a_vault_that_is_lost_is_a_failure(tmp_path: Path) -> None:
    """It is not taken for a site that never ran."""
    _ran(tmp_path)
    vault_in(tmp_path).unlink()
    check = _vault(tmp_path)["vault"]
    _holds(check, Level.FAIL, "is not there, and its witness says that it was", "enrol the site anew", WhoActs.SITE)


def test_a_damaged_vault_is_a_failure(tmp_path: Path) -> None:
    """A page of the file, a line of the ledger, and a file that is no database at all."""
    _ran(tmp_path)
    with closing(sqlite3.connect(vault_in(tmp_path))) as database:
        whole = vault_in(tmp_path).read_bytes()
        database.execute("UPDATE ledger SET line = replace(line, '8', '9')")
        database.commit()
    _holds(_vault(tmp_path)["vault"], Level.FAIL, "of its privacy ledger line 1 is broken", "newest copy", WhoActs.SITE)
    with closing(sqlite3.connect(vault_in(tmp_path))) as database:
        database.execute("PRAGMA journal_mode = DELETE")
    vault_in(tmp_path).write_bytes(whole)
    with closing(sqlite3.connect(vault_in(tmp_path))) as database:
        (page,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'state'").fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    vault_in(tmp_path).write_bytes(whole[: (page - 1) * size] + b"\xff" * size + whole[page * size :])
    _holds(_vault(tmp_path)["vault"], Level.FAIL, "vault.db is damaged: ", "newest copy", WhoActs.SITE)
    vault_in(tmp_path).write_bytes(b"not a database" * 100)
    _holds(_vault(tmp_path)["vault"], Level.FAIL, "cannot be read", "newest copy", WhoActs.SITE)


@pytest.mark.parametrize(("file", "name"), [("vault.db", "vault"), ("vault.count", "witness")])
def test_files_that_this_user_may_not_write_are_a_failure(
    file: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vault, or its witness: the site would end at its first change."""
    _ran(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, _: path.name != file)
    check = _vault(tmp_path)[name]
    _holds(check, Level.FAIL, f"this user may not write {tmp_path / file}", "ReadWritePaths", WhoActs.YOU)


# ------------------------------------------------------------------------------------------------------- the audit log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of three lines."""
    with AuditLog(tmp_path / FILE, NAME, 1.0) as opened:
        opened.append("sent", b"something", 2.0)
        opened.append("sent", b"something else", 3.0)
    return tmp_path / FILE


def test_a_whole_log_is_walked_beside_its_writer(path: Path) -> None:
    """Its lines are counted, and nothing in it is evidence."""
    with AuditLog(path, NAME, 4.0) as opened:
        check = _log(path)
        opened.append("sent", b"more", 5.0)
    assert (check.level, check.found) == (Level.OK, f"{path}: 3 lines, and their chain holds")
    assert evidence(look_at_log(path)) is None


def test_the_first_broken_line_is_named(path: Path) -> None:
    """And the file is to be kept as it is."""
    path.write_bytes(path.read_bytes().replace(b'"at":2.0', b'"at":9.0'))
    _holds(_log(path), Level.FAIL, f"{path}: line 2 is broken: expected", "keep the file as it is", WhoActs.YOU)


def test_a_line_without_an_end_is_a_warning(path: Path) -> None:
    """A crash cut it, and the next start sets it aside; but not where a line before it is broken."""
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    check = _log(path)
    _holds(check, Level.WARN, f"the last line of {path}, line 3, has no end", "sets the line aside", WhoActs.YOU)
    path.write_bytes(whole[:-10].replace(b'"at":2.0', b'"at":9.0'))
    assert _log(path).level is Level.FAIL
    path.write_bytes(b"")
    assert _log(path).level is Level.WARN
    AuditLog(path, NAME, 4.0).close()
    assert _log(path).level is Level.OK


def test_a_log_that_is_missing_is_a_failure_only_where_there_was_one(tmp_path: Path) -> None:
    """A member that never ran has none, and the look makes none."""
    assert _log(tmp_path / FILE, ran=False).level is Level.OK
    check = _log(tmp_path / FILE)
    _holds(check, Level.FAIL, "is missing, and this member has run", "put the newest copy of the log", WhoActs.YOU)
    assert list(tmp_path.iterdir()) == []


def test_another_members_log_is_a_failure(path: Path) -> None:
    """The member would not start with it."""
    check = _log(path, name=LogName("berlin", "site"))
    found = "is the log of athens (site), not of berlin (site)"
    _holds(check, Level.FAIL, found, "put this member's own log back", WhoActs.YOU)


def test_a_log_that_takes_no_more_is_a_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be read, this user may not write it, or its disk is full."""
    found = look_at_log(path)
    check = log(replace(found, free=3 * 2**20), NAME, ran=True)
    _holds(check, Level.FAIL, "has 3 MiB left on its disk", "free disk space", WhoActs.YOU)
    monkeypatch.setattr(os, "access", lambda *_: False)
    _holds(_log(path), Level.FAIL, f"this user may not write {path}", "ReadWritePaths", WhoActs.YOU)
    path.unlink()
    path.mkdir()
    _holds(_log(path), Level.FAIL, f"cannot read {path}: Is a directory", "the right to read it", WhoActs.YOU)


def test_evidence_is_told_by_what_it_is_of(path: Path) -> None:
    """A contradiction is a warning; messages that were refused, or are another release's, are none."""
    with AuditLog(path, NAME, 4.0) as opened:
        opened.extend([REFUSAL, REFUSAL, (Logged.EVIDENCE.value, b"another release's")], 5.0)
    check = evidence(look_at_log(path))
    assert check is not None
    assert (check.level, check.found) == (
        Level.OK,
        "the audit log notes: a message was refused (3 times); nobody contradicted themselves",
    )
    with AuditLog(path, NAME, 6.0) as opened:
        opened.extend([CONTRADICTION], 7.0)
    check = evidence(look_at_log(path))
    assert check is not None
    _holds(
        check,
        Level.WARN,
        "two UPLOADs of one site in one attempt (1 times)",
        f"parley audit proof {path}",
        WhoActs.CONSORTIUM,
    )


def test_evidence_behind_a_broken_line_counts_for_nothing(path: Path) -> None:
    """Anybody may have written it there."""
    with AuditLog(path, NAME, 4.0) as opened:
        opened.extend([CONTRADICTION], 5.0)
    path.write_bytes(path.read_bytes().replace(b'"at":3.0', b'"at":9.0'))
    found: Log = look_at_log(path)
    assert (found.suspicions, found.torn) == ((), False)
