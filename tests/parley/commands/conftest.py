"""What the tests of the commands share: homes of a consortium whose coordinator does not run."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.consortium import free_port
from tests.parley.commands.calls import run


@dataclass(frozen=True)
class Founded:
    """A consortium's homes, and the address where nobody listens."""

    admin: Path
    hub: Path
    address: str


@pytest.fixture
def address() -> str:
    """Where nobody listens."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def founded(tmp_path: Path, address: str) -> Founded:
    """A consortium that was founded, its root key unencrypted; it has no coordinator yet."""
    homes = Founded(tmp_path / "admin", tmp_path / "hub", address)
    run("consortium", "init", "study", "--address", address, "--no-passphrase", "--home", homes.admin)
    return homes


@pytest.fixture
def complete(founded: Founded, tmp_path: Path) -> Founded:
    """The same, with a coordinator that was admitted and installed, and does not run."""
    request = tmp_path / "request"
    request.write_text(run("coordinator", "init", "--home", founded.hub).stdout)
    credential = tmp_path / "credential"
    credential.write_text(run("consortium", "admit", request, "--yes", "--home", founded.admin).stdout)
    run("coordinator", "install", credential, "--home", founded.hub)
    return founded
