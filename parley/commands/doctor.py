"""`parley doctor`: names what is wrong on this machine, or on its way to the coordinator, and what helps."""

import time
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from client import doctor as members
from client.checks import Check, Level
from client.session_events import SiteIdentity
from federation.errors import ConfigurationError, ParleyError, WhoActs
from federation.messages import Role
from parley.commands import coordinator_checks
from parley.dialling import line
from parley.homes import Home, MemberHome
from parley.terminal import HomeOption, JsonOption, console, emit, errors, home, run

__all__ = ["doctor"]

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the command line said."""

    deep: bool
    proxy: str
    listen: str
    store: str
    health_port: int


def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also read every data set whole, and start a trainer (seconds to minutes).")
    ] = False,
    proxy: Annotated[
        str, typer.Option(help="Proxy to dial through, as for `parley site run`.", show_default=False)
    ] = "",
    listen: Annotated[
        str, typer.Option(help="What the coordinator listens on, as for `serve`.", show_default=False)
    ] = "",
    store: Annotated[
        str, typer.Option("--store", help="URL of the coordinator's store, as for `serve`.", show_default=False)
    ] = "",
    health_port: Annotated[int, typer.Option(help="The coordinator's health port, as for `serve`; 0: none.")] = 0,
    as_json: JsonOption = False,
    home_: HomeOption = None,
) -> None:
    """Looks at what this machine is (site, operator, coordinator) and names what is wrong, why, and what helps.

    Ends with 1 when something fails. It changes nothing, and disturbs neither agent nor coordinator.
    """
    where = home(home_)
    with errors.status("Looking ..."):
        found = run(_examined(where, _Settings(deep, proxy, listen, store, health_port)))
    if as_json:
        emit({"home": where.folder, "ok": not _any_failed(found), "checks": [_row(role, each) for role, each in found]})
    else:
        _print(found)
    if _any_failed(found):
        raise typer.Exit(1)


Found = list[tuple[str, Check]]
"""Each check with the role of the member that it is about."""


async def _examined(where: Home, settings: _Settings) -> Found:
    found: Found = []
    for member in (where.site, where.operator, where.coordinator):
        if member.identity_folder.exists():
            found.extend((member.role.value, check) for check in await _member(member, settings))
    if not found:
        fix = "join a consortium (parley site join INVITATION), or name the right folder with --home or PARLEY_HOME"
        nobody = f"{where.folder} holds no member of a consortium"
        found.append(("", Check("home", Level.FAIL, nobody, fix, WhoActs.YOU)))
    return found


async def _member(member: MemberHome, settings: _Settings) -> tuple[Check, ...]:
    try:
        own = member.load()
    except ParleyError as incomplete:
        return (members.failed("identity", incomplete),)
    me = SiteIdentity(own.statement, own.root, own.revocations)
    now = time.time()
    if member.role is Role.COORDINATOR:
        return await coordinator_checks.coordinator(
            member.folder,
            own,
            me,
            now,
            listen=settings.listen,
            url=settings.store,
            health_port=settings.health_port,
        )
    try:
        dialled = line(member, settings.proxy)
    except ConfigurationError as unusable:
        return (members.papers(me, own.certificate, own.keys, now), members.failed("proxy", unusable))
    checks = await members.member(me, dialled, own.keys, member.folder, now)
    if member.role is Role.SITE:
        checks += await members.site(own.statement.name, member.folder, deep=settings.deep)
    return checks


# --------------------------------------------------------------------------------------------------------- printing


def _any_failed(found: Found) -> bool:
    return any(check.level is Level.FAIL for _, check in found)


def _row(role: str, check: Check) -> dict[str, object]:
    return {"member": role, **asdict(check)}


def _print(found: Found) -> None:
    table = Table("member", "check", "state", "found, and what helps", show_lines=False)
    for role, check in found:
        words = Text(check.found)
        if check.level is not Level.OK and check.fix:
            who = f" ({check.who.value})" if check.who else ""
            words.append(f"\nto fix{who}: ", style="bold").append(check.fix)
        table.add_row(role, check.name, Text(check.level.value, style=_STYLES[check.level]), words)
    console.print(table)
