from __future__ import annotations

import asyncio
import errno
import json
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from client.data.registry import DataSet, DataSets
from client.doctor import Check, Level
from client.policy import EXAMPLE
from client.probe import Stage, Walk
from client.session_events import SiteIdentity
from coordinator.store import Store, url_in
from federation.messages import Credential, Role
from parley.commands import doctor
from parley.commands.doctor import Port
from parley.homes import Connection, Home, MemberHome
from tests.consortium import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

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


# --------------------------------------------------------------------------------------------------------- coordinator


def _me(consortium: Consortium) -> SiteIdentity:
    return SiteIdentity(consortium.hub.statement, consortium.root.public, consortium.nobody)


def test_a_coordinator_that_does_not_run_is_a_warning(tmp_path: Path, consortium: Consortium) -> None:
    """Its port is free, and there is no store yet."""
    _enrolled(Home(tmp_path).coordinator, consortium, "hub", f"127.0.0.1:{free_port()}")
    code, said = _run("--home", tmp_path, "--json")
    checks = {check["name"]: check for check in json.loads(said)["checks"]}
    assert code == 0
    assert (checks["port"]["level"], checks["store"]["level"]) == ("warn", "warn")
    assert "parley coordinator serve" in checks["port"]["fix"]
    assert "the first `serve` makes it" in checks["store"]["fix"]


def test_a_port_that_this_coordinator_serves_is_well(running: Serving, consortium: Consortium) -> None:
    """It shows this coordinator's own certificate; another coordinator's would fail."""

    async def story() -> None:
        async with running() as hub:
            found = await asyncio.to_thread(doctor._look_at_port, f"0.0.0.0:{hub.port}", "hub.heart-study.parley")
            check = doctor.port(found, _me(consortium))
            assert (check.name, check.level) == ("port", Level.OK)
            assert "is served by this coordinator" in check.found
            other = replace(_me(consortium), statement=consortium.member("hub", Role.COORDINATOR).statement)
            check = doctor.port(found, other)
            assert check.level is Level.FAIL
            assert "another program has" in check.found

    asyncio.run(story())


def test_a_port_that_another_program_has_is_told(consortium: Consortium) -> None:
    """With how to find out which."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        walked = Walk(address, None, Stage.TLS, "no answer within 5 s")
        check = doctor.port(Port(address, errno.EADDRINUSE, walked), _me(consortium))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(doctor.probe, "walk", lambda *_: walked)
            assert doctor._look_at_port(address, "hub") == Port(address, errno.EADDRINUSE, walked)
    assert check.level is Level.FAIL
    assert check.found == f"another program, or a coordinator that hangs, has {address}: no answer within 5 s"
    assert "ss -ltnp" in check.fix


@pytest.mark.parametrize(
    ("refused", "found", "fix"),
    [
        (errno.EACCES, "this user may not listen on 0.0.0.0:443", "a port above 1023"),
        (errno.EADDRNOTAVAIL, "cannot be listened on: Cannot assign requested address", "an address of this machine"),
    ],
)
def test_a_port_that_cannot_be_listened_on_is_told(consortium: Consortium, refused: int, found: str, fix: str) -> None:
    """A privileged port, or an address that this machine does not have."""
    check = doctor.port(Port("0.0.0.0:443", refused), _me(consortium))
    assert check.level is Level.FAIL
    assert found in check.found
    assert fix in check.fix


def test_an_address_of_another_machine_is_not_listened_on() -> None:
    """The system refuses it, whatever the port."""
    assert doctor._look_at_port("192.0.2.1:9", "hub").refused == errno.EADDRNOTAVAIL


def test_the_store_is_opened_and_left_as_it_is(tmp_path: Path) -> None:
    """Missing, good, and damaged."""
    url = url_in(tmp_path)
    assert doctor.store(url).level is Level.WARN
    assert list(tmp_path.iterdir()) == []
    with Store(url):
        pass
    good = doctor.store(url)
    assert (good.level, good.found) == (Level.OK, "opens, and is of this release; 0 jobs")
    (tmp_path / "parley.db").write_bytes(b"not a database, but long enough to look like one" * 100)
    for leftover in tmp_path.glob("parley.db-*"):
        leftover.unlink()
    damaged = doctor.store(url)
    assert damaged.level is Level.FAIL
    assert "is not a SQLite database" in damaged.found
    assert "restore it from a backup" in damaged.fix


def test_the_health_probe_is_asked(running: Serving) -> None:
    """SERVING, or what there is instead."""

    async def story() -> None:
        port = free_port()
        async with running(health_port=port):
            check = doctor.health(port, await doctor._ask_health(port))
            assert (check.level, check.found) == (Level.OK, f"SERVING on 127.0.0.1:{port}")
        check = doctor.health(port, await doctor._ask_health(port))
        assert check.level is Level.FAIL
        assert check.found == f"127.0.0.1:{port}: no health service answers"
        assert f"--health-port {port}" in check.fix

    asyncio.run(story())
