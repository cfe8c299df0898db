"""`parley consortium` without a coordinator: what it makes, what it refuses, and in which words."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from federation.errors import ConfigurationError, IdentityError, StorageError, UnreachableError
from parley.commands.consortium import read_string
from parley.homes import Home
from tests.parley.commands.calls import refused, run
from tests.parley.commands.conftest import Founded

PASSPHRASE = "correct horse battery staple"  # noqa: S105 - opens nothing but this test's own key


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The administrator's home."""
    return tmp_path / "admin"


@pytest.fixture
def passphrase(tmp_path: Path) -> Path:
    """A file with a passphrase."""
    file = tmp_path / "passphrase"
    file.write_text(f"{PASSPHRASE}\nnot this line\n")
    return file


# --------------------------------------------------------------------------------------------------------------- init


def test_init_makes_a_root_and_says_what_comes_next(home: Path, address: str) -> None:
    """The fingerprint that members compare, and the next command."""
    told = run("consortium", "init", "study", "--address", address, "--no-passphrase", "--home", home).stdout
    assert Home(home).consortium.root_certificate().fingerprint in told
    assert "parley coordinator init --name hub" in told
    assert not Home(home).consortium.encrypted


def test_init_never_writes_over_a_consortium(founded: Founded) -> None:
    """The root that is there stays."""
    before = Home(founded.admin).consortium.root_certificate().fingerprint
    error = refused(
        "consortium", "init", "other", "--address", founded.address, "--no-passphrase", "--home", founded.admin
    )
    assert str(error) == (
        f"{founded.admin / 'consortium'} holds a consortium already. "
        "To fix (you): keep using it, or choose another folder with --home or PARLEY_HOME"
    )
    assert Home(founded.admin).consortium.root_certificate().fingerprint == before


@pytest.mark.parametrize("bad", ["localhost", "localhost:", "localhost:0", "localhost:99999", "http://hub:1", ""])
def test_init_wants_an_address_that_can_be_dialled(home: Path, bad: str) -> None:
    """And says what one looks like."""
    error = refused("consortium", "init", "study", "--address", bad, "--no-passphrase", "--home", home)
    assert isinstance(error, IdentityError)
    assert "is not host:port" in error.problem
    assert "hub.example.org:8443" in error.fix
    assert not home.exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("Heart Study",), "a consortium's name becomes part of a host name: 'Heart Study' cannot"),
        (("study", "--coordinator", "Hub X"), "a member's name becomes part of a host name: 'Hub X' cannot"),
        (("study", "--coordinator", "admin"), "the coordinator cannot be called admin"),
        (("study", "--organisation", "St. Mary's"), "an organisation cannot be called"),
    ],
)
def test_init_refuses_a_name_that_cannot_be(home: Path, address: str, arguments: tuple[str, ...], problem: str) -> None:
    """It says which name, and nothing is made."""
    error = refused("consortium", "init", *arguments, "--address", address, "--no-passphrase", "--home", home)
    assert problem in error.problem
    assert not home.exists()


def test_init_takes_the_passphrase_from_a_file_s_first_line(home: Path, address: str, passphrase: Path) -> None:
    """The key is encrypted with it."""
    run("consortium", "init", "study", "--address", address, "--passphrase-file", passphrase, "--home", home)
    assert Home(home).consortium.encrypted
    assert Home(home).consortium.unlock(PASSPHRASE).root.consortium == "study"


def test_init_asks_for_the_passphrase_twice(home: Path, address: str) -> None:
    """What is typed differently the second time is asked again."""
    typed = f"first\nsecond\n{PASSPHRASE}\n{PASSPHRASE}\n"
    result = run("consortium", "init", "study", "--address", address, "--home", home, typed=typed)
    assert PASSPHRASE not in result.output
    assert Home(home).consortium.unlock(PASSPHRASE).root.consortium == "study"


def test_a_passphrase_is_not_asked_where_the_typing_would_be_seen(
    home: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal it is to come from a file."""
    import getpass

    def blind(*_: object, **__: object) -> str:
        warnings.warn("Can not control echo on the terminal.", getpass.GetPassWarning, stacklevel=1)
        return "seen"

    monkeypatch.setattr("typer.prompt", blind)
    error = refused("consortium", "init", "study", "--address", address, "--home", home)
    assert isinstance(error, ConfigurationError)
    assert "no terminal here to ask for the root key's passphrase" in error.problem
    assert error.fix.endswith("--passphrase-file FILE")
    assert not home.exists()


def test_no_passphrase_and_a_passphrase_file_exclude_one_another(home: Path, address: str, passphrase: Path) -> None:
    """Otherwise a key that was meant to be encrypted would not be."""
    both = ("--no-passphrase", "--passphrase-file", passphrase)
    error = refused("consortium", "init", "study", "--address", address, *both, "--home", home)
    assert isinstance(error, ConfigurationError)
    assert "exclude one another" in error.problem
    assert not home.exists()


def test_an_empty_passphrase_makes_nothing(home: Path, address: str, tmp_path: Path) -> None:
    """It would protect nothing."""
    file = tmp_path / "file"
    file.write_text("\n")
    error = refused("consortium", "init", "study", "--address", address, "--passphrase-file", file, "--home", home)
    assert "an empty passphrase protects nothing" in error.problem
    assert not home.exists()


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x99"])
def test_a_passphrase_file_must_have_a_first_line(
    home: Path, address: str, tmp_path: Path, content: bytes | None
) -> None:
    """Missing, empty, or no text: the file is named."""
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    error = refused("consortium", "init", "study", "--address", address, "--passphrase-file", file, "--home", home)
    assert str(error) == f"cannot read a passphrase from {file}. To fix (you): name a file whose first line it is"


# ------------------------------------------------------------------------------------------------- invite and members


def test_a_wrong_passphrase_is_told(home: Path, address: str, passphrase: Path, tmp_path: Path) -> None:
    """And that nobody can restore it; the right one, typed, opens the key."""
    run("consortium", "init", "study", "--address", address, "--passphrase-file", passphrase, "--home", home)
    wrong = tmp_path / "wrong"
    wrong.write_text("incorrect horse\n")
    error = refused("consortium", "invite", "athens", "--passphrase-file", wrong, "--home", home)
    assert "this passphrase does not open the root key of study" in error.problem
    assert run("consortium", "invite", "athens", "--home", home, typed=f"{PASSPHRASE}\n").stdout.startswith("parley1:")


def test_an_invitation_alone_goes_to_standard_output(founded: Founded) -> None:
    """So that it can be piped; what to do with it is told beside it."""
    result = run("consortium", "invite", "athens", "--home", founded.admin)
    assert result.stdout.startswith("parley1:")
    assert result.stdout.count("\n") == 1
    assert "Invitation for site athens, good until" in result.stderr
    assert "parley site join INVITATION" in result.stderr
    result = run("consortium", "invite", "rita", "--role", "operator", "--home", founded.admin)
    assert "parley operator join INVITATION" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "problem", "fix"),
    [
        (("athens",), "the name athens is taken by an open invitation", "parley consortium revoke athens"),
        (("hub",), "the name hub is taken by the coordinator", "choose another name"),
        (("admin",), "the name admin is taken by a member (operator of study)", "choose another name"),
        (("Big Hospital",), "a member's name becomes part of a host name", "use 1-63 of a-z 0-9 and -"),
        (("berlin", "--hours", "0"), "an invitation cannot be good for 0 hours", "give 1 to 720 hours"),
        (("berlin", "--hours", "9999"), "an invitation cannot be good for 9999 hours", "give 1 to 720 hours"),
        (("berlin", "--role", "coordinator"), "a coordinator is not invited", "parley consortium admit REQUEST"),
    ],
)
def test_an_invitation_that_cannot_be_is_refused(
    founded: Founded, arguments: tuple[str, ...], problem: str, fix: str
) -> None:
    """What is wrong, and what to do instead."""
    run("consortium", "invite", "athens", "--home", founded.admin)
    error = refused("consortium", "invite", *arguments, "--home", founded.admin)
    assert problem in error.problem
    assert fix in error.fix


def test_members_are_listed_with_their_state(complete: Founded) -> None:
    """For people as a table, for machines as JSON."""
    told = run("consortium", "members", "--home", complete.admin).stdout
    for word in ("admin", "operator", "hub", "coordinator", "member"):
        assert word in told
    listed: list[dict[str, Any]] = json.loads(run("consortium", "members", "--json", "--home", complete.admin).stdout)
    assert [(each["statement"]["name"], each["revoked"]) for each in listed] == [("admin", False), ("hub", False)]


# ----------------------------------------------------------------------------------------------------- the coordinator


def test_a_coordinator_is_admitted_by_its_request(founded: Founded) -> None:
    """The credential alone goes to standard output, and makes that machine the coordinator."""
    asked = run("coordinator", "init", "--home", founded.hub)
    assert asked.stdout.startswith("parley-request1:")
    assert "parley consortium admit REQUEST" in asked.stderr
    admitted = run("consortium", "admit", asked.stdout.strip(), "--home", founded.admin, typed="y\n")
    prints = [line for line in asked.stderr.splitlines() if "key" in line]
    assert prints
    assert all(line in admitted.stderr for line in prints)
    credential = next(line for line in admitted.stdout.splitlines() if line.startswith("parley-credential1:"))
    installed = run("coordinator", "install", credential, "--home", founded.hub).stdout
    assert "hub is the coordinator of study. Next:  parley coordinator serve" in installed


def test_fingerprints_that_were_not_confirmed_admit_nobody(founded: Founded) -> None:
    """The default answer is no."""
    request = run("coordinator", "init", "--home", founded.hub).stdout.strip()
    error = refused("consortium", "admit", request, "--home", founded.admin, typed="\n")
    assert "the fingerprints were not confirmed" in error.problem
    assert "compare them by telephone" in error.fix
    assert [each.statement.name for each in Home(founded.admin).consortium.members()] == ["admin"]


def test_a_coordinator_of_another_name_is_refused(founded: Founded) -> None:
    """With the command that makes the right one."""
    request = run("coordinator", "init", "--name", "other", "--home", founded.hub).stdout.strip()
    error = refused("consortium", "admit", request, "--yes", "--home", founded.admin)
    assert "study's coordinator is called hub" in error.problem
    assert "parley coordinator init --name hub" in error.fix


@pytest.mark.parametrize("pasted", ["nonsense", "parley1:AAAA", "parley-request1:AAAA"])
def test_what_is_no_request_admits_nobody(founded: Founded, pasted: str) -> None:
    """It says what to paste."""
    error = refused("consortium", "admit", pasted, "--yes", "--home", founded.admin)
    assert "`parley coordinator init` printed" in error.fix


# -------------------------------------------------------------------------------- what needs a coordinator that is away


@pytest.mark.parametrize("arguments", [("pending",), ("approve", "athens"), ("publish",)])
def test_a_coordinator_that_does_not_run_is_unreachable(complete: Founded, arguments: tuple[str, ...]) -> None:
    """Its address is named."""
    error = refused("consortium", *arguments, "--home", complete.admin)
    assert isinstance(error, UnreachableError)
    assert f"the coordinator at {complete.address} cannot be reached" in error.problem


def test_a_revocation_holds_here_though_the_coordinator_is_away(complete: Founded) -> None:
    """It says that the coordinator does not know yet, and how to tell it later."""
    run("consortium", "invite", "athens", "--home", complete.admin)
    error = refused("consortium", "revoke", "athens", "--home", complete.admin)
    assert isinstance(error, UnreachableError)
    assert "the coordinator does not know it yet" in error.problem
    assert "parley consortium publish" in error.fix
    assert Home(complete.admin).consortium.revocations().version == 1


def test_before_a_coordinator_is_admitted_nobody_can_be_asked(founded: Founded) -> None:
    """The first operator is complete only then; the message says how."""
    error = refused("consortium", "pending", "--home", founded.admin)
    assert isinstance(error, StorageError)
    assert "parley consortium admit REQUEST" in error.fix


def test_revoking_who_is_not_there_changes_nothing(complete: Founded) -> None:
    """Nor can the last operator go."""
    error = refused("consortium", "revoke", "nobody", "--home", complete.admin)
    assert "there is no member and no open invitation of the name nobody" in error.problem
    error = refused("consortium", "revoke", "admin", "--home", complete.admin)
    assert "admin is the last operator" in error.problem
    assert Home(complete.admin).consortium.revocations().version == 0


# --------------------------------------------------------------------------------------------------------- read_string


def test_a_string_is_pasted_or_the_content_of_a_file(tmp_path: Path) -> None:
    """White space around it is dropped; what cannot be a file's name is the string."""
    file = tmp_path / "string"
    file.write_text("parley1:abc\n")
    assert read_string(str(file)) == "parley1:abc"
    assert read_string("  parley1:abc ") == "parley1:abc"
    assert read_string("parley1:" + "a" * 5000) == "parley1:" + "a" * 5000
    assert read_string(str(tmp_path)) == str(tmp_path)


def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    """Without a traceback."""
    file = tmp_path / "string"
    file.write_bytes(b"\xff\xfe\x99")
    with pytest.raises(ConfigurationError, match=f"the file {file} is not text"):
        read_string(str(file))
