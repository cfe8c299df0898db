from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from federation.errors import ConfigurationError
from parley.commands.service import Service, coordinator_service, site_service, unit, windows

if TYPE_CHECKING:
    from pathlib import Path

SITE = Service("parley-site", "Parley site", ("site", "run"), "/var/lib/parley", "parley", "/opt/parley/bin/python")

app = typer.Typer()
app.command("site")(site_service)
app.command("coordinator")(coordinator_service)


def _read(text: str) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]  # keys of units are case-sensitive
    parsed.read_string(text)
    return parsed


def _printed(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_sites_unit_restarts_it_and_confines_it() -> None:
    """Whatever ends it, it comes back; it may write its home alone and gain no privilege."""
    service = _read(unit(SITE, trains=True))["Service"]
    assert service["ExecStart"] == "/opt/parley/bin/python -P -m parley site run --home /var/lib/parley"
    expected = {
        "User": "parley",
        "Restart": "always",
        "NoNewPrivileges": "true",
        "ProtectSystem": "strict",
        "ProtectHome": "true",
        "PrivateTmp": "true",
        "ReadWritePaths": '"/var/lib/parley"',
        "CapabilityBoundingSet": "",
        "OOMScoreAdjust": "500",
    }
    assert {key: service[key] for key in expected} == expected
    assert "PrivateDevices" not in service  # an accelerator is a device


def test_a_coordinators_unit_sees_no_device() -> None:
    """It trains nothing, and is not the first to go when memory runs out."""
    service = _read(unit(replace(SITE, arguments=("coordinator", "serve")), trains=False))["Service"]
    assert service["PrivateDevices"] == "true"
    assert "OOMScoreAdjust" not in service


def test_a_home_below_home_stays_visible() -> None:
    """ProtectHome would hide the very files that it needs."""
    service = _read(unit(replace(SITE, home="/home/ann/.parley"), trains=True))["Service"]
    assert service["ProtectHome"] == "read-only"
    assert service["ReadWritePaths"] == '"/home/ann/.parley"'


def test_a_home_with_a_space_is_quoted() -> None:
    """Systemd would split it otherwise."""
    assert '--home "/srv/our parley"' in unit(replace(SITE, home="/srv/our parley"), trains=True)


@pytest.mark.parametrize("home", ["", "/srv/a\nExecStartPre=/bin/sh", '/srv/"', "/srv/$x", "/srv/%h", "C:\\it's"])
def test_what_would_change_the_meaning_of_a_unit_is_refused(home: str) -> None:
    """A line break in a path is another directive."""
    with pytest.raises(ConfigurationError, match=r"a service cannot be made of .*choose another folder"):
        replace(SITE, home=home)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
@pytest.mark.parametrize("trains", [True, False])
def test_systemd_finds_nothing_wrong(tmp_path: Path, trains: bool) -> None:  # noqa: FBT001 - a parameter of the table
    """Its own verification accepts the unit, with a user and a program that exist here."""
    file = tmp_path / "parley-site.service"
    file.write_text(unit(replace(SITE, user="root", python=sys.executable), trains=trains))
    checked = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert (checked.returncode, [line for line in checked.stderr.splitlines() if file.name in line]) == (0, [])


def test_windows_gets_a_recipe_that_says_what_it_is() -> None:
    """A task of the scheduler, started with the machine and again after every end; and why it is no service."""
    script = windows(replace(SITE, home="D:\\parley", python="C:\\Parley\\python.exe"))
    assert "$home_  = 'D:\\parley'" in script
    assert "$python = 'C:\\Parley\\python.exe'" in script
    assert "Register-ScheduledTask -TaskName 'parley-site'" in script
    assert "-AtStartup" in script
    assert "-RepetitionInterval (New-TimeSpan -Minutes 1)" in script
    assert "error 1053" in script
    assert "-P -m parley site run --home" in script


def test_a_recipe_made_elsewhere_has_the_usual_places_of_windows() -> None:
    """The paths of this machine mean nothing there."""
    script = windows(SITE)
    assert "C:\\ProgramData\\parley" in script
    assert "/var/lib" not in script


def test_the_commands_print_for_this_home_and_this_python(tmp_path: Path) -> None:
    """So that the unit starts what was just tried by hand."""
    site = _read(_printed("site", "--home", tmp_path, "--user", "ann"))["Service"]
    assert site["ExecStart"] == f"{sys.executable} -P -m parley site run --home {tmp_path}"
    assert site["User"] == "ann"
    hub = _read(_printed("coordinator", "--home", tmp_path, "--health-port", "9000"))["Service"]
    assert hub["ExecStart"].endswith(f"parley coordinator serve --health-port 9000 --home {tmp_path}")
    assert "Register-ScheduledTask -TaskName 'parley-coordinator'" in _printed("coordinator", "--windows")
