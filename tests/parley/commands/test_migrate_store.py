"""`parley coordinator migrate-store` moves a store, shows what it moved, and says what comes next."""

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from coordinator.records import SitePresence
from coordinator.store import Store, StoreReader, url_in
from federation.errors import ConfigurationError, StorageError
from parley.commands.migrate_store import migrate_store
from parley.terminal import exit_code

HERE = SitePresence("cleveland", connected=True, last_seen=6.0, state="training")

app = typer.Typer()
app.command()(migrate_store)


@pytest.fixture
def source(tmp_path: Path) -> str:
    """The store of a coordinator's home."""
    folder = tmp_path / "home" / "coordinator"
    folder.mkdir(parents=True)
    with Store(url_in(folder)) as store:
        store.set_presence((HERE,))
    return url_in(folder)


@pytest.fixture
def target(tmp_path: Path) -> str:
    """Where no store is."""
    (tmp_path / "target").mkdir()
    return url_in(tmp_path / "target")


def test_a_move_is_shown(source: str, target: str) -> None:
    """Rows and digest of each table, and how the coordinator is started from now on."""
    done = CliRunner().invoke(app, ["--from", source, "--to", target])
    assert done.exit_code == 0
    assert "presence" in done.stdout
    assert f"{target} now tells what {source} tells" in done.stdout
    assert f"parley coordinator serve --store {target}" in done.stdout
    with StoreReader(target) as reader:
        assert reader.presence() == (HERE,)


def test_a_move_is_told_to_programs(source: str, target: str) -> None:
    """One JSON object, and nothing else on standard output."""
    done = CliRunner().invoke(app, ["--from", source, "--to", target, "--json"])
    told = json.loads(done.stdout)
    assert (told["from"], told["to"]) == (source, target)
    assert {table["table"]: table["rows"] for table in told["tables"]}["presence"] == 1
    assert all(len(table["digest"]) == 64 for table in told["tables"])
    assert done.stderr == ""


def test_the_store_of_this_home_moves_unless_another_is_named(source: str, target: str, tmp_path: Path) -> None:
    """Without --from."""
    done = CliRunner().invoke(app, ["--home", str(tmp_path / "home"), "--to", target, "--json"])
    assert json.loads(done.stdout)["from"] == source


def test_a_running_coordinator_is_a_refusal(source: str, target: str) -> None:
    """Exit code 1: nothing changed."""
    with Store(source):
        done = CliRunner().invoke(app, ["--from", source, "--to", target])
    assert isinstance(done.exception, StorageError)
    assert f"a coordinator (process {os.getpid()} on " in str(done.exception)
    assert exit_code(done.exception) == 1


def test_a_wrong_url_is_a_mistake_in_the_command(source: str) -> None:
    """Exit code 2; a password in it is not repeated."""
    for target in (source, "mysql://parley:swordfish@localhost/parley"):
        done = CliRunner().invoke(app, ["--from", source, "--to", target])
        assert isinstance(done.exception, ConfigurationError)
        assert exit_code(done.exception) == 2
        assert "swordfish" not in str(done.exception)
