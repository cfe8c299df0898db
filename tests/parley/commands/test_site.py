"""`parley site` without a coordinator: data sets, policy, and what keeps a site from joining or attending."""

import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest

from client import tables
from client.policy import EXAMPLE
from client.resumption import taken
from federation import audit
from federation.errors import ConfigurationError, DataContractError, IdentityError, StorageError
from federation.messages import Credential
from parley.commands.site import sealing
from parley.homes import Connection, Home
from privacy.secure_aggregation.rostersum.durable import Family
from tests.consortium import Consortium
from tests.parley.commands.calls import refused, run
from tests.parley.commands.conftest import Founded


@pytest.fixture(autouse=True)
def _unlogged() -> Iterator[None]:
    """`run` sends the log elsewhere; here it stays as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A site's home."""
    return tmp_path / "site-home"


@pytest.fixture
def table() -> pd.DataFrame:
    """A small table."""
    return pd.DataFrame({"age": [41, 52, 63], "sick": [0, 1, 1]})


# ---------------------------------------------------------------------------------------------------------- data sets


def test_a_file_of_each_kind_and_a_database_are_registered(home: Path, table: pd.DataFrame, tmp_path: Path) -> None:
    """CSV, Parquet, and a query with brackets in it, as SQL Server writes them; each is read once."""
    table.to_csv(tmp_path / "a.csv", index=False)
    table.to_parquet(tmp_path / "b.parquet")
    with closing(sqlite3.connect(tmp_path / "c.db")) as database:
        table.to_sql("visits", database, index=False)
    query = "SELECT [age], [sick] FROM [visits]"
    for name, location, options in (
        ("one", tmp_path / "a.csv", ()),
        ("two", tmp_path / "b.parquet", ()),
        ("three", f"sqlite:///{tmp_path / 'c.db'}", ("--query", query)),
    ):
        told = run("site", "dataset", "add", name, location, *options, "--home", home).stdout
        assert told.startswith(f"{name}: 3 rows at {location}. They stay there.")
    listed = json.loads(run("site", "dataset", "list", "--json", "--home", home).stdout)
    assert [(each["name"], each["kind"], each["query"]) for each in listed] == [
        ("one", "csv", ""),
        ("three", "sql", query),
        ("two", "parquet", ""),
    ]


def test_a_listed_query_keeps_its_brackets(
    home: Path, table: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are SQL, no mark-up."""
    monkeypatch.setenv("COLUMNS", "300")
    with closing(sqlite3.connect(tmp_path / "c.db")) as database:
        table.to_sql("visits", database, index=False)
    query = "SELECT [age] FROM [visits]"
    run("site", "dataset", "add", "ages", f"sqlite:///{tmp_path / 'c.db'}", "--query", query, "--home", home)
    assert query in run("site", "dataset", "list", "--home", home).stdout


def test_a_site_without_data_is_told_the_next_command(home: Path) -> None:
    """An empty table would tell nothing."""
    assert "parley site dataset add NAME PATH" in run("site", "dataset", "list", "--home", home).stdout
    assert json.loads(run("site", "dataset", "list", "--json", "--home", home).stdout) == []


def test_a_removed_data_set_can_be_registered_anew(home: Path, table: pd.DataFrame, tmp_path: Path) -> None:
    """Its name is taken until then, and the file stays."""
    file = tmp_path / "a.csv"
    table.to_csv(file, index=False)
    run("site", "dataset", "add", "one", file, "--home", home)
    error = refused("site", "dataset", "add", "one", file, "--home", home)
    assert "a data set named 'one' is registered already" in error.problem
    told = run("site", "dataset", "remove", "one", "--home", home).stdout
    assert told == "one is no longer registered; the data are untouched.\n"
    assert file.exists()
    run("site", "dataset", "add", "one", file, "--home", home)


@pytest.mark.parametrize(
    ("location", "options", "problem"),
    [
        ("missing.csv", (), "is not there"),
        ("sheet.xlsx", (), "is neither a CSV nor a Parquet file by its ending"),
        ("sqlite:///x.db", (), "a database needs a query"),
        ("foo://bar", ("--query", "SELECT 1"), "names a kind of database that is not known here"),
    ],
)
def test_data_that_cannot_be_read_are_not_registered(
    home: Path, location: str, options: tuple[str, ...], problem: str
) -> None:
    """What is wrong, and that the site's administrator must act."""
    error = refused("site", "dataset", "add", "one", location, *options, "--home", home)
    assert isinstance(error, DataContractError)
    assert problem in error.problem
    assert error.fix
    assert not home.exists()


# -------------------------------------------------------------------------------------------------------------- pause


def test_a_site_is_paused_and_let_go_on(home: Path, consortium: Consortium) -> None:
    """Each command says what is so now, and the way back."""
    member = Home(home).site
    person = consortium.member("a", keys=member.begin())
    credential = Credential(person.certificate, person.statement, consortium.hub.statement, consortium.nobody)
    where = Connection("127.0.0.1:9000", consortium.root.consortium, "hub")
    member.install(credential, consortium.root.public, where, name="a", now=consortium.now)
    assert "This site is paused." in run("site", "pause", "--home", home).stdout
    assert "This site was paused already." in run("site", "pause", "--home", home).stdout
    assert "parley site resume" in run("site", "pause", "--home", home).stdout
    assert run("site", "resume", "--home", home).stdout == "This site goes on.\n"
    assert run("site", "resume", "--home", home).stdout == "This site was not paused.\n"


def test_a_job_that_waits_is_let_go_on(home: Path, consortium: Consortium) -> None:
    """The agent takes the word from the site's home."""
    member = Home(home).site
    person = consortium.member("a", keys=member.begin())
    credential = Credential(person.certificate, person.statement, consortium.hub.statement, consortium.nobody)
    where = Connection("127.0.0.1:9000", consortium.root.consortium, "hub")
    member.install(credential, consortium.root.public, where, name="a", now=consortium.now)
    told = run("site", "resume-job", "risk-1a2b3c", "--home", home).stdout
    assert told == "The agent of this site lets risk-1a2b3c go on within a second, if it waits for you.\n"
    assert taken(member.folder, lambda _: True) == ("risk-1a2b3c",)
    assert "is no job's id" in refused("site", "resume-job", "../x", "--home", home).problem


def test_a_sites_vault_and_log_are_opened_once(home: Path, consortium: Consortium) -> None:
    """Two agents of one site would make two vectors of one attempt; the log bears the member's name."""
    member = Home(home).site
    person = consortium.member("a", keys=member.begin())
    credential = Credential(person.certificate, person.statement, consortium.hub.statement, consortium.nobody)
    where = Connection("127.0.0.1:9000", consortium.root.consortium, "hub")
    own = member.install(credential, consortium.root.public, where, name="a", now=consortium.now)
    with sealing(member.folder, own) as first:
        assert first.key is own.keys.protocol
        with pytest.raises(StorageError, match="is used by another process"), sealing(member.folder, own):
            pass
    with sealing(member.folder, own):
        assert audit.verify(member.folder / audit.FILE).name == audit.LogName("a", "site")
    (member.folder / "vault.count").unlink()
    with pytest.raises(StorageError, match="its witness"), sealing(member.folder, own):
        pass
    with sealing(member.folder, own, restored=True) as held:
        held.vault.reenter(held.vault.durable, ())
    with sealing(member.folder, own):
        pass


def test_a_new_version_of_a_data_set_is_accepted(
    home: Path, consortium: Consortium, table: pd.DataFrame, tmp_path: Path
) -> None:
    """Durably and in the log, if enough rows are other; else the difference of two sums would show them."""
    member = Home(home).site
    person = consortium.member("a", keys=member.begin())
    credential = Credential(person.certificate, person.statement, consortium.hub.statement, consortium.nobody)
    where = Connection("127.0.0.1:9000", consortium.root.consortium, "hub")
    own = member.install(credential, consortium.root.public, where, name="a", now=consortium.now)
    (member.folder / "policy.toml").write_text(EXAMPLE)
    table.to_csv(tmp_path / "a.csv", index=False)
    run("site", "dataset", "add", "heart", tmp_path / "a.csv", "--home", home)
    error = refused("site", "dataset", "accept", "heart", "--rows-changed", "9", "--home", home)
    assert "fewer than 10 rows changed: the difference of two sums would show them" in error.problem
    assert not member.folder.joinpath(audit.FILE).read_bytes().count(b'"kind":"table"')

    run("site", "dataset", "accept", "heart", "--rows-changed", "10", "--home", home)
    version = tables.version(table)
    with sealing(member.folder, own) as held:
        assert held.vault.durable.families == (Family("heart", table=version),)
    *_, last = audit.entries(member.folder / audit.FILE)
    assert (last.kind, last.content) == (tables.ACCEPTED, f"heart {version.hex()} 10".encode())


def test_what_is_no_site_cannot_be_paused(home: Path) -> None:
    """It would be told that it is, and nothing would heed it."""
    error = refused("site", "pause", "--home", home)
    assert isinstance(error, StorageError)
    assert "parley site join INVITATION" in str(error)


# ------------------------------------------------------------------------------------------------------------- policy


def test_the_policy_is_shown(home: Path) -> None:
    """As its file states it."""
    (home / "site").mkdir(parents=True)
    (home / "site" / "policy.toml").write_text(EXAMPLE)
    told = run("site", "policy", "--home", home).stdout
    assert str(home / "site" / "policy.toml") in told.replace("\n", "")
    assert "minimum_sites = 2" in told
    assert "  [secure_aggregation]\n  colluding_sites = 1\n" in told
    assert "rosters = ['signed']" in told
    assert "rows_of_each_class = 5" in told
    assert json.loads(run("site", "policy", "--json", "--home", home).stdout)["allow_plain_aggregation"] is False


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "this site has no policy at"),
        (b"minimum_sites = ", "is not TOML"),
        (b"colour = 1", "is no policy"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_a_policy_that_cannot_be_read_is_told(home: Path, content: bytes | None, problem: str) -> None:
    """With its path, and never with a traceback."""
    if content is not None:
        (home / "site").mkdir(parents=True)
        (home / "site" / "policy.toml").write_bytes(content)
    error = refused("site", "policy", "--home", home)
    assert isinstance(error, ConfigurationError)
    assert problem in error.problem
    assert str(home / "site" / "policy.toml") in error.problem


# ------------------------------------------------------------------------------------------------------ join and attend


def test_a_string_that_is_no_invitation_makes_nothing(home: Path, complete: Founded) -> None:
    """Nor does an invitation for another role."""
    for pasted in ("nonsense", "parley1:AAAA"):
        error = refused("site", "join", pasted, "--home", home)
        assert isinstance(error, IdentityError)
        assert "paste the whole string that `parley consortium invite` printed" in error.fix
    invitation = run("consortium", "invite", "rita", "--role", "operator", "--home", complete.admin).stdout.strip()
    error = refused("site", "join", invitation, "--home", home)
    assert "this invitation is for the role operator" in error.problem
    assert "parley operator join INVITATION" in error.fix
    assert not home.exists()


def test_who_has_not_joined_cannot_attend(home: Path) -> None:
    """The command that joins is told."""
    error = refused("site", "run", "--home", home)
    assert isinstance(error, StorageError)
    assert "run `parley site join INVITATION`" in error.fix
