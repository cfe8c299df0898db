"""What every command shares: words for people, JSON for machines, exit codes for scripts."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from federation.errors import (
    ConfigurationError,
    DataContractError,
    IdentityError,
    LocalProtocolError,
    ParleyError,
    PolicyRefused,
    RemoteProtocolError,
    StorageError,
    UnreachableError,
    WhoActs,
)
from federation.messages import JobState
from parley import __main__ as entry
from parley import terminal


@dataclass(frozen=True)
class _Told:
    digest: bytes
    state: JobState
    folder: Path
    parts: tuple[int, ...]


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Leaves the root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_values_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Dataclasses as objects, bytes as hexadecimal, an Enum as its value, a path as text."""
    terminal.emit([_Told(b"\x01\xff", JobState.FINISHED, Path("a/b"), (1, 2))])
    told = json.loads(capsys.readouterr().out)
    assert told == [{"digest": "01ff", "state": "finished", "folder": "a/b", "parts": [1, 2]}]


def test_a_value_that_json_does_not_know_is_our_bug() -> None:
    """It raises; nothing is printed by half."""
    with pytest.raises(TypeError, match="object"):
        terminal.emit(object())


@pytest.mark.parametrize(
    ("seconds_ago", "words"),
    [
        (5, "5 s ago"),
        (89, "89 s ago"),
        (600, "10 min ago"),
        (7200, "2 h ago"),
        (200_000, "2 days ago"),
        (-5, "0 s ago"),
    ],
)
def test_how_long_ago_is_told_in_the_largest_unit_that_says_something(seconds_ago: float, words: str) -> None:
    """A clock that is ahead of ours makes no negative time."""
    assert terminal.ago(time.time() - seconds_ago) == words


def test_a_time_that_never_was_is_no_date() -> None:
    """Times are UTC."""
    assert terminal.ago(0.0) == "never"
    assert terminal.moment(0.0) == "-"
    assert terminal.moment(1_700_000_000) == "2023-11-14 22:13:20"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (IdentityError("x"), 1),
        (PolicyRefused("x"), 1),
        (StorageError("x"), 1),
        (RemoteProtocolError("x"), 1),
        (LocalProtocolError("x"), 1),
        (ParleyError("x"), 1),
        (ConfigurationError("x"), 2),
        (DataContractError("x"), 2),
        (UnreachableError("x"), 3),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: ParleyError, code: int) -> None:
    """As the module's docstring promises them to scripts."""
    assert terminal.exit_code(error) == code


def test_a_complaint_says_what_who_and_how(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error; brackets in it are text and no markup."""
    terminal.complain(IdentityError("it holds [bold]x[/]", fix="mend [it]", who=WhoActs.SITE), as_json=False)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "refused: it holds [bold]x[/]\nto fix (the site's administrator): mend [it]\n"


def test_who_cannot_be_reached_has_refused_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The first word tells the difference, and without a remedy there is one line."""
    terminal.complain(UnreachableError("nobody answers"), as_json=False)
    assert capsys.readouterr().err == "unreachable: nobody answers\n"


def test_a_complaint_is_an_object_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output, where the answer would have been."""
    terminal.complain(ConfigurationError("no such key", fix="remove it"), as_json=True)
    told = capsys.readouterr()
    expected = {"kind": "ConfigurationError", "problem": "no such key", "who": "the job's author", "fix": "remove it"}
    assert (json.loads(told.out), told.err) == ({"error": expected}, "")


def test_the_home_is_given_or_named_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--home goes before PARLEY_HOME."""
    monkeypatch.setenv("PARLEY_HOME", str(tmp_path / "named"))
    assert terminal.home(None).folder == tmp_path / "named"
    assert terminal.home(tmp_path / "given").folder == tmp_path / "given"


@pytest.mark.usefixtures("unlogged")
def test_the_log_is_a_line_an_event_in_utc(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error; debugging only when asked for."""
    terminal.logs(verbose=False)
    log = logging.getLogger("parley.test")
    log.debug("too much")
    log.info("attending")
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.endswith("Z INFO    parley.test  attending\n")
    terminal.logs(verbose=True)
    log.debug("more")
    assert "DEBUG   parley.test  more" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------- the command line


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a command line in this process."""
    monkeypatch.setattr(sys, "argv", ["parley", *arguments])
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_a_refusal_ends_with_words_and_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Never with a traceback; with --json as an object."""
    home = ("--home", str(tmp_path))
    assert ended(monkeypatch, "consortium", "members", *home) == 1
    assert "parley consortium init NAME" in capsys.readouterr().err
    assert ended(monkeypatch, "consortium", "members", "--json", *home) == 1
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "StorageError"


def test_what_the_system_refuses_is_told_like_any_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk under a command that did not expect it."""

    def full() -> None:
        raise OSError(28, "No space left on device", "/home/parley/x")

    monkeypatch.setattr("parley.command_line.app", full)
    assert ended(monkeypatch, "version") == 1
    told = capsys.readouterr().err
    assert "refused: the system refused: No space left on device (/home/parley/x)" in told
    assert "to fix (you):" in told


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Quietly, wherever it comes."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("parley.command_line.app", interrupted)
    assert ended(monkeypatch, "version") == 130
    assert capsys.readouterr() == ("", "")


def test_a_mistyped_command_is_told_with_the_nearest_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, as for every error of the command line."""
    assert ended(monkeypatch, "jobb") == 2
    assert "No such command 'jobb'" in capsys.readouterr().err
    assert ended(monkeypatch, "consortium", "init", "study") == 2
    assert "--address" in capsys.readouterr().err


def test_help_keeps_what_stands_in_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defaults that a newcomer must know, and the form of a proxy."""
    monkeypatch.setenv("COLUMNS", "200")
    assert ended(monkeypatch, "site", "join", "--help") == 0
    told = capsys.readouterr().out
    assert "[default: $PARLEY_HOME, else ~/.parley]" in told
    assert "http://[user:password@]host:port" in told


def test_the_command_prints_its_release() -> None:
    """In a process of its own, which imports neither torch nor gRPC's log lines."""
    program = (
        "import sys; sys.argv = ['parley', 'version']\n"
        "from parley.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as ended: print(ended.code, 'torch' in sys.modules, 'pandas' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    release, rest = run.stdout.splitlines()
    assert release.count(".") >= 2
    assert (rest, run.stderr) == ("0 False False", "")
