from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import typer
from typer.testing import CliRunner

from client.checks import Check, Level
from client.data.registry import DataSet, DataSets
from client.policy import EXAMPLE
from federation.messages import Credential, Role
from parley.commands import doctor
from parley.homes import Connection, Home, MemberHome
from tests.consortium import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    import pytest

    from tests.consortium import Consortium, Running

    Serving = Callable[..., AbstractAsyncContextManager[Running]]

app = typer.Typer()
app.command()(doctor.doctor)


def _run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout


def _enrolled(member: MemberHome, consortium: Consortium, name: str, address: str) -> None:
    """Puts a membership of the consortium into a home."""
    person = consortium.member(name, member.role, keys=member.begin())
    hub = person.statement if member.role is Role.COORDINATOR else consortium.hub.statement
    credential = Credential(person.certificate, person.statement, hub, consortium.nobody)
    where = Connection(address, consortium.root.consortium, "hub")
    member.install(credential, consortium.root.public, where, name=name, now=consortium.now)


def _settings(**changes: object) -> doctor._Settings:
    nothing = doctor._Settings(deep=False, proxy="", listen="", store="", health_port=0)
    return replace(nothing, **changes)


def test_a_home_without_a_member_is_told(tmp_path: Path) -> None:
    """With how to become one, and exit code 1."""
    code, said = _run("--home", tmp_path)
    assert code == 1
    assert "holds no member of a consortium" in said
    assert "parley site join INVITATION" in said


def test_an_enrolment_that_was_not_finished_is_told(tmp_path: Path) -> None:
    """The keys are there and the membership is not."""
    Home(tmp_path).site.begin()
    code, said = _run("--home", tmp_path, "--json")
    (check,) = json.loads(said)["checks"]
    assert (code, check["member"], check["check"] if "check" in check else check["name"]) == (1, "site", "identity")
    assert "parley site join INVITATION" in check["fix"]


def test_machines_read_json_and_people_a_table(tmp_path: Path, consortium: Consortium) -> None:
    """A site whose coordinator is away: what is well, what fails, and an exit code for scripts."""
    address = f"127.0.0.1:{free_port()}"
    _enrolled(Home(tmp_path).site, consortium, "a", address)
    code, said = _run("--home", tmp_path, "--json")
    told = json.loads(said)
    assert (code, told["ok"], told["home"]) == (1, False, str(tmp_path))
    levels = {check["name"]: check["level"] for check in told["checks"]}
    assert levels == {
        "identity": "ok",
        "disk": levels["disk"],
        "name": "ok",
        "port": "FAIL",
        "policy": "FAIL",
        "vault": "ok",
        "audit log": "ok",
        "data": "FAIL",
    }
    code, said = _run("--home", tmp_path)
    assert code == 1
    assert f"{address} takes no connection: Connection refused" in " ".join(said.split())
    assert "to fix (the site's administrator)" in said


def test_a_proxy_that_cannot_be_used_is_told(
    tmp_path: Path, consortium: Consortium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the variable that names it; gRPC would have left it out without a word."""
    _enrolled(Home(tmp_path).operator, consortium, "op", "hub.example.org:8443")
    monkeypatch.setenv("HTTPS_PROXY", "https://proxy:3128")
    code, said = _run("--home", tmp_path, "--json")
    check = json.loads(said)["checks"][-1]
    assert (code, check["name"]) == (1, "proxy")
    assert check["found"].startswith("the proxy in the environment variable HTTPS_PROXY asks for TLS to the proxy")


def test_a_site_in_good_health_ends_with_0(running: Serving, consortium: Consortium, tmp_path: Path) -> None:
    """Every check of a whole site against a running coordinator."""
    home = Home(tmp_path / "home")

    async def story() -> list[tuple[str, Check]]:
        async with running() as hub:
            _enrolled(home.site, consortium, "a", hub.address)
            (home.site.folder / "policy.toml").write_text(EXAMPLE)
            file = tmp_path / "heart.csv"
            file.write_text("age\n60\n")
            DataSets(home.site.folder).add(DataSet.of("heart", str(file)))
            return await doctor._examined(home, _settings())

    found = asyncio.run(story())
    assert [check.found for _, check in found if check.level is Level.FAIL] == []
    assert {role for role, _ in found} == {"site"}
    assert {"membership", "release", "clock", "policy", "data heart"} <= {check.name for _, check in found}


def test_a_coordinator_that_does_not_run_is_a_warning(tmp_path: Path, consortium: Consortium) -> None:
    """Its port is free, and there is no store yet."""
    _enrolled(Home(tmp_path).coordinator, consortium, "hub", f"127.0.0.1:{free_port()}")
    code, said = _run("--home", tmp_path, "--json")
    checks = {check["name"]: check for check in json.loads(said)["checks"]}
    assert code == 0
    assert (checks["port"]["level"], checks["store"]["level"]) == ("warn", "warn")
    assert "parley coordinator serve" in checks["port"]["fix"]
    assert "the first `serve` makes it" in checks["store"]["fix"]
