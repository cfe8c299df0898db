"""`parley audit`: a log is verified and shown, and a contradiction in it becomes a file that proves itself."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result as Invoked
from typer.testing import CliRunner

from federation.audit import FILE, AuditLog, LogName
from federation.errors import ConfigurationError, IdentityError, ParleyError, RemoteProtocolError, StorageError
from parley.command_line import app
from parley.commands import audit
from parley.terminal import exit_code
from privacy.secure_aggregation.rostersum.evidence import Evidence, Suspicion, contradiction
from privacy.secure_aggregation.rostersum.logged import Logged, evidence_entry, message_entry, terms_entry
from privacy.secure_aggregation.rostersum.messages import Open, Outcome, Result, RoundStart, sign
from tests.parley.commands.calls import refused, run
from tests.privacy.secure_aggregation.rostersum.conftest import consortium_of

STUDY = consortium_of(3)
JOB = STUDY.terms.job_hash
H, OTHER = b"\x11" * 32, b"\x22" * 32
AT = 1_764_529_770.0


def start(model: bytes = H) -> RoundStart:
    """A ROUND_START as the coordinator signs it."""
    return sign(RoundStart(JOB, 1, 1, 0, 1, (0, 1, 2), H, model, H), STUDY.coordinator)


def result(sum_hash: bytes = H) -> Result:
    """A RESULT as the coordinator signs it."""
    return sign(Result(start().ctx, Outcome.OPENED, sum_hash), STUDY.coordinator)


@dataclass(frozen=True)
class Logs:
    """A home, and the log of the site in it: the terms of a job, a ROUND_START, and what the test adds."""

    home: Path

    @property
    def path(self) -> Path:
        """The site's log."""
        return self.home / "site" / FILE

    def add(self, *entries: tuple[str, bytes], role: str = "site", at: float = AT + 2) -> None:
        """Appends to the log of this member."""
        with AuditLog(self.home / role / FILE, LogName("cleveland", role), AT) as log:
            log.extend(entries, at)


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    """The log of a site that has accepted a job."""
    made = Logs(tmp_path / "home")
    made.add(terms_entry(STUDY.terms), message_entry(Logged.RECEIVED, start(), None), at=AT + 1)
    return made


def failed(*arguments: object) -> Invoked:
    """A command that says what it found, and ends with 1."""
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit), (done.output, done.exception)
    return done


def told(*arguments: object) -> Any:
    """What a command says to programs."""
    return json.loads(run(*arguments, "--json").stdout)


# -------------------------------------------------------------------------------------------------------------- verify


def test_a_whole_log_is_said_with_what_to_note(logs: Logs) -> None:
    """Whose it is, its lines, and the head with which a cut can be proven later; nothing on standard error."""
    done = run("audit", "verify", "--home", logs.home)
    head = told("audit", "verify", logs.path)["head"]
    assert "the log of cleveland (site)" in done.stdout
    assert "Whole: 3 lines, the last of 2025-11-30 19:09:31 UTC." in done.stdout
    assert f"line 3  head {head}" in done.stdout
    assert done.stderr == ""


def test_a_whole_log_is_told_to_programs(logs: Logs) -> None:
    """One JSON object."""
    found = told("audit", "verify", "--home", logs.home)
    assert found == {
        "log": str(logs.path),
        "name": {"member": "cleveland", "purpose": "site"},
        "whole": True,
        "lines": 3,
        "head": found["head"],
        "broken": None,
        "backwards": 0,
        "first_backwards": None,
        "noted": None,
    }
    assert len(found["head"]) == 64


def test_a_broken_log_ends_with_1_and_names_the_line(logs: Logs) -> None:
    """What was expected, and what stands there."""
    first, second, third = logs.path.read_bytes().splitlines(keepends=True)
    logs.path.write_bytes(first + third + second)
    done = failed("audit", "verify", "--home", logs.home)
    assert "BROKEN at line 2" in done.stdout
    assert "expected  the entry written as line 2" in done.stdout
    assert "found     that written as line 3: lines were removed, added or moved" in done.stdout
    assert "Whole before it: 1 line. Nothing is known" in done.stdout
    found = json.loads(failed("audit", "verify", logs.path, "--json").stdout)
    assert (found["whole"], found["broken"]["line"], found["lines"]) == (False, 2, 1)


def test_a_file_that_is_no_log_is_nobodys(tmp_path: Path) -> None:
    """What it holds is shown without its control characters."""
    (tmp_path / "other").write_bytes(b"\x1b[31mred\n")
    done = failed("audit", "verify", tmp_path / "other")
    assert "nobody's log" in done.stdout
    assert "\x1b" not in done.stdout
    assert r"\x1b[31mred\n" in done.stdout


def test_a_name_with_control_characters_is_shown_without_them(tmp_path: Path) -> None:
    """Another's log is another's text."""
    AuditLog(tmp_path / FILE, LogName("a\x1b[2Jb", "site"), AT).close()
    assert "the log of a\ufffd[2Jb (site)" in run("audit", "verify", tmp_path / FILE).stdout


def test_a_clock_that_was_set_back_is_noted(logs: Logs) -> None:
    """The log is whole all the same."""
    logs.add(("decision", b"re-cell"), at=AT)
    assert "The clock was set back at 1 line, first at line 4." in run("audit", "verify", "--home", logs.home).stdout


def test_a_head_noted_earlier_is_found_again(logs: Logs) -> None:
    """At its line, after more was written; digits may be large."""
    head = told("audit", "verify", logs.path)["head"]
    logs.add(("decision", b"more"))
    for options in ((), ("--at", 3)):
        done = run("audit", "verify", logs.path, "--head", head.upper(), *options)
        assert "The head noted earlier stands at line 3: nothing up to it was changed." in done.stdout
    noted = told("audit", "verify", logs.path, "--head", head)["noted"]
    assert noted == {"head": head, "line": 3, "stands": True}


def test_a_head_that_was_cut_off_ends_with_1(logs: Logs) -> None:
    """Though the chain is whole."""
    whole = logs.path.read_bytes()
    head = told("audit", "verify", logs.path)["head"]
    logs.path.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 1])
    done = failed("audit", "verify", logs.path, "--head", head)
    assert "Whole: 2 lines" in done.stdout
    assert "The head noted earlier is NOT in this log" in done.stdout
    found = json.loads(failed("audit", "verify", logs.path, "--head", head, "--json").stdout)
    assert (found["whole"], found["noted"]) == (True, {"head": head, "line": None, "stands": False})


def test_a_head_at_another_line_ends_with_1(logs: Logs) -> None:
    """One of the two notes is wrong."""
    head = told("audit", "verify", logs.path)["head"]
    done = failed("audit", "verify", logs.path, "--head", head, "--at", 2)
    assert "stands at line 3, not at line 2" in done.stdout


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--head", "12ab"), "--head '12ab' is no digest"),
        (("--head", "x" * 64), f"--head '{'x' * 64}' is no digest"),
        (("--at", "3"), "--at says where a head was noted, and --head is missing"),
    ],
)
def test_what_is_no_digest_is_a_mistake_in_the_command(logs: Logs, options: tuple[str, ...], problem: str) -> None:
    """Exit code 2."""
    error = refused("audit", "verify", logs.path, *options)
    assert (error.problem, exit_code(error)) == (problem, 2)
    assert "64 hexadecimal digits" in error.fix


def test_a_home_without_a_log_is_told(tmp_path: Path) -> None:
    """And so is a file that is not there."""
    for command in ("verify", "show", "proof"):
        error = refused("audit", command, "--home", tmp_path)
        assert isinstance(error, StorageError)
        assert error.problem == f"no member's audit log is in {tmp_path}"
        error = refused("audit", command, tmp_path / "none.log")
        assert error.problem == f"there is no audit log {tmp_path / 'none.log'}"


def test_of_two_logs_one_must_be_named(logs: Logs) -> None:
    """A home may hold a site and a coordinator."""
    logs.add(role="coordinator")
    for command in ("verify", "show"):
        error = refused("audit", command, "--home", logs.home)
        assert isinstance(error, ConfigurationError)
        assert error.problem.startswith("this home has 2 audit logs: ")


@pytest.mark.parametrize(("patience", "shown"), [(0.0, True), (1e9, False)])
def test_a_bar_is_shown_for_what_takes_long(
    logs: Logs,
    monkeypatch: pytest.MonkeyPatch,
    patience: float,
    shown: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """On standard error, and never to programs."""
    monkeypatch.setattr(audit, "_PATIENCE", patience)
    assert (FILE in run("audit", "verify", logs.path).stderr) is shown
    assert run("audit", "verify", logs.path, "--json").stderr == ""


# ---------------------------------------------------------------------------------------------------------------- show


def test_entries_are_shown_in_plain_words(logs: Logs) -> None:
    """RosterSum's by what they mean, text as it stands, and the rest by its length."""
    logs.add(("decision", b"re-cell hearts [by Ann]"), ("blob", b"\x00\x1b"), (Logged.SENT.value, b"\x00"))
    lines = run("audit", "show", "--home", logs.home).stdout.splitlines()
    assert lines[0].split(maxsplit=3)[:3] == ["1", "2025-11-30", "19:09:30"]
    said = [line.split(maxsplit=4)[3:] for line in lines]
    assert said[1][0] == "terms"
    assert said[1][1].startswith(f"job {JOB.hex()[:8]} accepted: 3 sites of 3 organisations")
    assert said[2][1].startswith("received from the coordinator: ROUND_START, ")
    assert said[3:5] == [["decision", "re-cell hearts [by Ann]"], ["blob", "2 bytes"]]
    assert said[5][1].startswith("an entry of the kind sent does not hold what its kind promises")


def test_entries_are_chosen_by_kind_and_number(logs: Logs) -> None:
    """The last ones of a kind; for programs an object a line."""
    for number in range(5):
        logs.add(("decision", f"number {number}".encode()), ("other", b""))
    done = run("audit", "show", logs.path, "--kind", "decision", "--last", 2, "--json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["line"], row["words"]) for row in rows] == [(10, "number 3"), (12, "number 4")]
    assert rows[0]["content"] == b"number 3".hex()
    assert rows[0]["at"] == AT + 2


def test_a_broken_log_is_shown_as_far_as_it_is_whole(logs: Logs) -> None:
    """Then its first broken line is a refusal."""
    with logs.path.open("ab") as file:
        file.write(b"cut")
    done = CliRunner().invoke(app, ["audit", "show", str(logs.path)])
    assert len(done.stdout.splitlines()) == 3
    assert isinstance(done.exception, StorageError)
    assert "line 4 is broken: expected an entry and the end of its line, found 3 bytes and no end" in str(
        done.exception
    )


# --------------------------------------------------------------------------------------------------------------- proof


def test_the_coordinators_own_log_is_found_in_its_home_and_convicts_a_site(tmp_path: Path) -> None:
    """The same three commands, with no log named: it tells from whom it heard what, and proves two OPENs of a round."""
    home = Logs(tmp_path / "hub")
    other = replace(start(), a=1, model_hash=OTHER)
    starts = [sign(each, STUDY.coordinator) for each in (start(), other)]
    opens = [sign(Open(each.ctx, 2, H, H), STUDY.sites[2]) for each in starts]
    heard = (message_entry(Logged.RECEIVED, each, 2) for each in opens)
    said = (message_entry(Logged.SENT, each, 0) for each in starts)
    home.add(terms_entry(STUDY.terms), *said, *heard, role="coordinator")
    assert "(coordinator)" in run("audit", "verify", "--home", home.home).stdout
    shown = run("audit", "show", "--home", home.home).stdout
    assert "sent to site 0: ROUND_START, " in shown
    assert "received from site 2: OPEN, " in shown
    (path,) = told("audit", "proof", "--home", home.home, "--to", tmp_path / "proofs")["files"]
    done = run("audit", "proof", "--check", path)
    assert "PROVEN: one key signed OPENs of two attempts at one round by one site." in done.stdout
    assert "The file says site 2 (s2 of org2)" in done.stdout


def test_a_log_without_contradiction_accuses_nobody(logs: Logs) -> None:
    """Exit code 0."""
    done = run("audit", "proof", "--home", logs.home)
    assert f"No contradiction is proven by the 1 messages in {logs.path}." in done.stdout
    assert told("audit", "proof", logs.path) == {"messages": 1, "unproven": 0, "proofs": [], "files": []}


def test_a_contradiction_becomes_a_file_that_proves_itself(logs: Logs, tmp_path: Path) -> None:
    """Far from the log, with words on what it proves and what not; the same one gets the same file."""
    logs.add(evidence_entry(JOB, contradiction(Suspicion.TWO_STARTS, None, start(), start(OTHER))))
    done = run("audit", "proof", "--home", logs.home, "--to", tmp_path / "proofs")
    assert "the coordinator signed two ROUND_STARTs of one job, round and attempt that share a site" in done.stdout
    assert "A signature shows who, not why" in done.stdout
    assert told("audit", "proof", "--home", logs.home, "--to", tmp_path / "proofs")["files"] == [
        str(path) for path in (tmp_path / "proofs").iterdir()
    ]
    (path,) = (tmp_path / "proofs").iterdir()
    logs.path.unlink()
    done = run("audit", "proof", "--check", path)
    assert "PROVEN: one key signed two ROUND_STARTs of one job, round and attempt that share a site." in done.stdout
    assert done.stdout.count("ROUND_START, job ") == 2
    assert STUDY.terms.roster.coordinator_vk.hex() in done.stdout
    assert "Not proven: whose key it is. The file says the coordinator" in done.stdout
    assert "Not proven: intent." in done.stdout
    assert "restored from a copy, or running twice" in done.stdout
    assert told("audit", "proof", "--check", path)["proven"] is True


def test_the_logs_of_two_sites_prove_what_neither_does(logs: Logs, tmp_path: Path) -> None:
    """A coordinator that shows each of them another model."""
    other = Logs(tmp_path / "other")
    other.add(terms_entry(STUDY.terms), message_entry(Logged.RECEIVED, start(OTHER), None))
    for alone in (logs, other):
        assert told("audit", "proof", alone.path)["proofs"] == []
    (found,) = told("audit", "proof", logs.path, other.path)["proofs"]
    assert found["rule"] == "STARTS"
    assert found["says"].startswith("the coordinator signed two ROUND_STARTs")
    done = run("audit", "proof", logs.path, other.path)
    assert "To make each a file of its own:  parley audit proof --to FOLDER" in done.stdout


def test_what_no_key_of_the_job_signed_is_told_as_unproven(logs: Logs) -> None:
    """Anybody can forge a contradiction, and log it."""
    forged = sign(replace(start(OTHER)), STUDY.sites[0])
    garbled = Evidence(Suspicion.REFUSED, "E_STATE", None, (b"no message",))
    logs.add(evidence_entry(JOB, contradiction(Suspicion.TWO_STARTS, None, start(), forged)))
    logs.add(evidence_entry(JOB, garbled), (Logged.RECEIVED.value, b"\x00"))
    done = run("audit", "proof", logs.path)
    assert "1 more that no key of the logged jobs has signed both sides of" in done.stdout
    assert "No contradiction is proven by the 3 messages" in done.stdout


def test_a_broken_log_is_searched_as_far_as_it_is_whole(logs: Logs) -> None:
    """A proof stands by itself, whatever became of the log."""
    logs.add(message_entry(Logged.RECEIVED, result(), None), message_entry(Logged.RECEIVED, result(OTHER), None))
    with logs.path.open("ab") as file:
        file.write(b"cut")
    done = run("audit", "proof", logs.path)
    assert "the coordinator signed two RESULTs of one attempt" in done.stdout
    assert "line 6 is broken" in done.stderr
    assert "what stands behind it was not read" in done.stderr


@pytest.fixture
def sheet(logs: Logs, tmp_path: Path) -> Path:
    """The file of a proof."""
    logs.add(message_entry(Logged.RECEIVED, result(), None), message_entry(Logged.RECEIVED, result(OTHER), None))
    run("audit", "proof", logs.path, "--to", tmp_path)
    (path,) = tmp_path.glob("proof-results-*.json")
    return path


def changed(sheet: Path, **changes: object) -> ParleyError:
    """The error with which the file is refused once these fields are others."""
    held = json.loads(sheet.read_text())
    sheet.write_text(json.dumps(held | changes))
    return refused("audit", "proof", "--check", sheet)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"key": STUDY.terms.roster.members[0].vk.hex()}, "this proves nothing: message 1 is not signed with the key"),
        ({"key": "00" * 32}, "this proves nothing: the Ed25519 key .* has small order"),
        ({"rule": "FULLS"}, "this proves nothing: the two messages do not break the rule: two FULLs of one attempt"),
        ({"index": 1}, "this proves nothing: message 1 is one of the coordinator, not of site 1"),
        ({"rule": "SPEED"}, ".* is no proof: parley-proof-1 with the rule SPEED is unknown"),
        ({"format": "parley-proof-2"}, ".* is no proof: parley-proof-2 with the rule RESULTS is unknown"),
        ({"key": "hello"}, ".* is no proof: non-hexadecimal number"),
        ({"messages": ["00"]}, ".* is no proof: 1 of its fields are missing or wrong"),
    ],
)
def test_a_file_that_proves_nothing_is_refused(sheet: Path, changes: dict[str, object], problem: str) -> None:
    """Exit code 1, and nobody is accused."""
    error = changed(sheet, **changes)
    assert isinstance(error, IdentityError)
    assert exit_code(error) == 1
    assert re.match(problem, error.problem)


def test_a_file_of_other_bytes_is_refused(sheet: Path) -> None:
    """They are no messages."""
    assert isinstance(changed(sheet, messages=["00", "00"]), RemoteProtocolError)


def test_a_file_that_is_no_proof_is_refused(tmp_path: Path) -> None:
    """Missing, not JSON, or far too large to be one."""
    path = tmp_path / "proof.json"
    assert "there is no " in refused("audit", "proof", "--check", path).problem
    path.write_text("{")
    assert "is no proof: 1 of its fields are missing or wrong" in refused("audit", "proof", "--check", path).problem
    path.write_bytes(bytes(2**20 + 1))
    assert "is no proof: it has 1048577 bytes" in refused("audit", "proof", "--check", path).problem


def test_names_in_a_file_reach_no_terminal_as_they_are(sheet: Path) -> None:
    """Whoever made it may have written anything into it."""
    held = json.loads(sheet.read_text())
    sheet.write_text(json.dumps(held | {"organisation": "\x1b[2J", "says": "\x1b[2J"}))
    assert "\x1b" not in run("audit", "proof", "--check", sheet).stdout
