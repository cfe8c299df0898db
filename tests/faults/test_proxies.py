"""Sites behind proxies: they join, attend and ask through them; a proxy that refuses or looks inside is named."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from client import doctor
from client.agent import Agent
from client.connection import Connection
from client.doctor import Level
from client.policy import parse
from client.proxy import Proxy as Named
from client.proxy import chosen
from client.session_events import SiteIdentity
from federation.errors import UnreachableError
from federation.messages import ApproveEnrolment, EnrolmentState, ListJobs, Role
from privacy import identity
from privacy.identity import MemberKeys
from simulations.bare_site import PLAIN_POLICY
from tests.consortium import soon, until
from tests.faults.conftest import LightWork
from tests.faults.network import Inspector, Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from client.connection import Line
    from tests.consortium import Consortium, Person, Running

    Serving = Callable[..., AbstractAsyncContextManager[Running]]

NAME = "hub.example.org"
"""The coordinator's name, which only the proxies know."""


def _through(hub: Running, member: Person, environment: Mapping[str, str]) -> Line:
    """The member's line to the coordinator's name, by whatever proxy the environment names."""
    address = f"{NAME}:{hub.port}"
    return replace(hub.line(member), address=address, proxy=chosen(address, environment))


def _proxy(credentials: str = "", inspector: Inspector | None = None) -> Proxy:
    return Proxy(credentials=credentials, hosts={NAME: "127.0.0.1"}, inspector=inspector)


def _agent(line: Line, member: Person, consortium: Consortium, folder: Path) -> Agent:
    me = SiteIdentity(member.statement, consortium.root.public, consortium.nobody)
    rules = parse(PLAIN_POLICY, "policy.toml")
    return Agent(folder, line, me, lambda: rules, lambda _: None, LightWork())


@pytest.mark.parametrize("credentials", ["", "ann:p%40ss%3Aword"])
@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy"])
def test_a_site_joins_and_attends_through_a_proxy(
    running: Serving, consortium: Consortium, tmp_path: Path, credentials: str, variable: str
) -> None:
    """Named in either case, with and without a password: enrolment, attendance and calls all go through tunnels."""

    async def story() -> None:
        async with running() as hub, _proxy(credentials.replace("%40", "@").replace("%3A", ":")) as proxy:
            environment = {variable: proxy.url(credentials)}
            operator = consortium.member("op", Role.OPERATOR)
            invitation = consortium.invitation("newcomer", f"{NAME}:{hub.port}")
            request = identity.make_request(invitation, MemberKeys.generate(), "0.1.0")
            door = replace(
                _through(hub, operator, environment),
                certificate=invitation.certificate_pem,
                tls_key=invitation.key_pem,
                statement=b"",
            )
            async with Connection.opened(door) as wire:
                answers = wire.enrol(request)
                assert (await soon(anext(answers))).state is EnrolmentState.WAITING
                certificate, statement = consortium.root.approve(request, consortium.now)
                async with Connection.opened(_through(hub, operator, environment)) as desk:
                    await desk.operate(ApproveEnrolment(request.invitation, certificate, statement))
                assert (await soon(anext(answers))).state is EnrolmentState.APPROVED
            site = consortium.member("a")
            attending = asyncio.create_task(
                _agent(_through(hub, site, environment), site, consortium, tmp_path / "a").run()
            )
            await until(lambda: hub.coordinator.attendance.present("a"))
            attending.cancel()
            assert proxy.tunnels == 3
            assert set(proxy.asked) == {f"{NAME}:{hub.port}"}

    asyncio.run(story())


def test_the_sites_own_proxy_is_used_whatever_grpc_reads(
    running: Serving, consortium: Consortium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPC itself would obey no_proxy here although a proxy is named, and dial through a dead one where none is."""

    async def story() -> None:
        async with running() as hub, _proxy() as proxy:
            operator = consortium.member("op", Role.OPERATOR)
            monkeypatch.setenv("no_proxy", "*")
            named = replace(hub.line(operator), proxy=Named.parse(proxy.url(), "--proxy"))
            async with Connection.opened(named) as desk:
                await soon(desk.operate(ListJobs()))
            assert proxy.tunnels == 1
            monkeypatch.delenv("no_proxy")
            monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
            async with Connection.opened(hub.line(operator)) as desk:
                await soon(desk.operate(ListJobs()))
            assert proxy.tunnels == 1

    asyncio.run(story())


@pytest.mark.parametrize(
    ("credentials", "words"),
    [
        ("", r"asks for a user name and a password \(HTTP 407\)"),
        ("ann:wr0ng", r"does not accept this user name and password \(HTTP 407\)"),
    ],
)
def test_a_wrong_password_is_named(running: Serving, consortium: Consortium, credentials: str, words: str) -> None:
    """By the call and by the doctor, with where the proxy was named, and without the password."""

    async def story() -> None:
        async with running() as hub, _proxy("ann:s3cret") as proxy:
            operator = consortium.member("op", Role.OPERATOR)
            line = _through(hub, operator, {"HTTPS_PROXY": proxy.url(credentials)})
            async with Connection.opened(line) as desk:
                with pytest.raises(UnreachableError, match=words) as told:
                    await soon(desk.operate(ListJobs()))
            assert "from the environment variable HTTPS_PROXY" in told.value.problem
            check = await _failing(line, operator, consortium)
            assert (check.name, check.found) == ("proxy", told.value.problem)
            assert "wr0ng" not in f"{told.value} {check}"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("refusal", "words"), [("403 Forbidden", "refuses to connect to"), ("503 Busy", "cannot reach")]
)
def test_a_proxy_that_does_not_let_us_through_is_named(
    running: Serving, consortium: Consortium, refusal: str, words: str
) -> None:
    """The network department learns which address it must allow."""

    async def story() -> None:
        async with running() as hub, _proxy() as proxy:
            proxy.refusal = refusal
            operator = consortium.member("op", Role.OPERATOR)
            line = _through(hub, operator, {"HTTPS_PROXY": proxy.url()})
            async with Connection.opened(line) as desk:
                with pytest.raises(UnreachableError, match=f"{words} {NAME}:{hub.port}"):
                    await soon(desk.operate(ListJobs()))
            assert (await _failing(line, operator, consortium)).name == "proxy"

    asyncio.run(story())


def test_a_proxy_that_is_away_is_named(running: Serving, consortium: Consortium) -> None:
    """It is the proxy that cannot be reached, and not the coordinator."""

    async def story() -> None:
        async with running() as hub, _proxy() as proxy:
            proxy.refuse()
            operator = consortium.member("op", Role.OPERATOR)
            line = _through(hub, operator, {"HTTPS_PROXY": proxy.url()})
            async with Connection.opened(line) as desk:
                with pytest.raises(UnreachableError, match=rf"the proxy {proxy.url()} \(from .*\) cannot be reached"):
                    await soon(desk.operate(ListJobs()))
            check = await _failing(line, operator, consortium)
            assert check.name == "port"
            assert check.found.startswith(f"the proxy {proxy.url()}")

    asyncio.run(story())


def test_whoever_inspects_tls_is_named(
    running: Serving, consortium: Consortium, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent's log and the doctor say who made the certificate, and the agent goes on trying."""

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "parley.site"]

    async def story() -> None:
        async with running() as hub, _proxy(inspector=Inspector("Zealous Firewalls")) as proxy:
            site = consortium.member("a")
            line = _through(hub, site, {"HTTPS_PROXY": proxy.url()})
            attending = asyncio.create_task(_agent(line, site, consortium, tmp_path / "a").run())
            await until(lambda: bool(told()))
            assert not attending.done()
            attending.cancel()
            check = await _failing(line, site, consortium)
            assert check.name == "TLS"
            for words in (told()[0], check.found):
                assert f"TLS to {NAME}:{hub.port} is opened on the way" in words
                assert "made by 'Zealous Firewalls Inspection CA (Zealous Firewalls)'" in words
            assert f"exempt {NAME}:{hub.port} from TLS inspection" in check.fix

    asyncio.run(story())


async def _failing(line: Line, member: Person, consortium: Consortium) -> doctor.Check:
    """The one check of the way that fails."""
    me = SiteIdentity(member.statement, consortium.root.public, consortium.nobody)
    walked = await asyncio.to_thread(doctor.probe.walk, line.address, line.tls_name, line.proxy)
    (check,) = (each for each in doctor.way(walked, me, line.tls_name, consortium.now) if each.level is not Level.OK)
    assert check.level is Level.FAIL
    return check
