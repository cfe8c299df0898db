"""`parley coordinator` before it serves: keys, request, credential, and where it may listen."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from federation.errors import ConfigurationError, IdentityError, StorageError
from parley.command_line import app
from parley.homes import Home
from tests.parley.commands.calls import refused, run
from tests.parley.commands.conftest import Founded


@pytest.fixture(autouse=True)
def _unlogged() -> Iterator[None]:
    """`serve` sends the log elsewhere; here it stays as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_the_same_keys_are_asked_for_again(founded: Founded) -> None:
    """A request that was lost can be printed anew; it is proven by the same keys."""
    first = run("coordinator", "init", "--home", founded.hub)
    second = run("coordinator", "init", "--home", founded.hub)
    assert [line for line in first.stderr.splitlines() if "key" in line] == [
        line for line in second.stderr.splitlines() if "key" in line
    ]


def test_a_name_that_cannot_be_in_a_certificate_is_refused(tmp_path: Path) -> None:
    """Before keys are made."""
    error = refused("coordinator", "init", "--name", "Hub X", "--home", tmp_path / "hub")
    assert "a member's name becomes part of a host name: 'Hub X' cannot" in error.problem
    assert not (tmp_path / "hub").exists()


def test_an_installed_coordinator_is_not_made_anew(complete: Founded) -> None:
    """Its identity stays, and the folder to move away is named."""
    error = refused("coordinator", "init", "--home", complete.hub)
    assert "holds the identity of coordinator hub in study already" in error.problem
    assert Home(complete.hub).coordinator.complete


@pytest.mark.parametrize("pasted", ["nonsense", "parley-credential1:abc", "parley1:abc"])
def test_what_is_no_credential_installs_nothing(founded: Founded, pasted: str) -> None:
    """It says what to paste."""
    run("coordinator", "init", "--home", founded.hub)
    error = refused("coordinator", "install", pasted, "--home", founded.hub)
    assert isinstance(error, IdentityError)
    assert "paste the whole string that `parley consortium admit` printed" in error.fix
    assert not Home(founded.hub).coordinator.complete


def test_a_credential_for_another_machine_is_refused(complete: Founded, tmp_path: Path) -> None:
    """The keys are not those that were made here."""
    run("coordinator", "init", "--home", tmp_path / "other")
    error = refused("coordinator", "install", tmp_path / "credential", "--home", tmp_path / "other")
    assert "is for other keys than this machine made" in error.problem
    assert complete.hub != tmp_path / "other"


def test_a_coordinator_without_a_credential_does_not_serve(tmp_path: Path) -> None:
    """The three commands that make one are told in their order."""
    error = refused("coordinator", "serve", "--home", tmp_path)
    assert isinstance(error, StorageError)
    for word in ("parley coordinator init", "parley consortium admit REQUEST", "parley coordinator install CREDENTIAL"):
        assert word in error.fix


@pytest.mark.parametrize("listen", ["foo", "127.0.0.1:99999", "127.0.0.1:", ":8443"])
def test_it_listens_on_a_host_and_port(complete: Founded, listen: str) -> None:
    """GRPC would take a port modulo 65536 and listen somewhere else."""
    error = refused("coordinator", "serve", "--listen", listen, "--home", complete.hub)
    assert "is not host:port" in error.problem


def test_the_health_port_is_a_port(complete: Founded) -> None:
    """Exit code 2, as for every error of the command line."""
    serve = ["coordinator", "serve", "--health-port", "99999", "--home", str(complete.hub)]
    result = CliRunner().invoke(app, serve)
    assert result.exit_code == 2
    assert "99999" in result.stderr


@pytest.mark.parametrize("url", ["foo", "mysql://host/parley"])
def test_a_store_that_cannot_be_is_refused(complete: Founded, url: str) -> None:
    """With the two that can."""
    error = refused("coordinator", "serve", "--store", url, "--home", complete.hub)
    assert isinstance(error, ConfigurationError)
    assert "sqlite:///PATH" in error.fix
    assert "postgresql://" in error.fix
