"""`parley doctor`: names what is wrong on this machine, or on its way to the coordinator, and what helps."""

import asyncio
import errno
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from client import doctor as members
from client import probe
from client.doctor import Check, Level
from client.probe import Stage, Walk
from client.session_events import SiteIdentity
from federation.errors import ConfigurationError, ParleyError, WhoActs
from federation.messages import Role
from parley.dialling import line
from parley.homes import Home, Identity, MemberHome
from parley.terminal import HomeOption, JsonOption, console, emit, errors, home, run

__all__ = ["Port", "doctor", "health", "port", "store"]

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
_HEALTH_SECONDS = 3.0


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
        return await _coordinator(member.folder, own, me, now, settings)
    try:
        dialled = line(member, settings.proxy)
    except ConfigurationError as unusable:
        return (members.papers(me, own.certificate, own.keys, now), members.failed("proxy", unusable))
    checks = await members.member(me, dialled, own.keys, member.folder, now)
    if member.role is Role.SITE:
        checks += await members.site(member.folder, deep=settings.deep)
    return checks


# ------------------------------------------------------------------------------------------------------ coordinator


@dataclass(frozen=True, slots=True)
class Port:
    """The port that the coordinator listens on: why it cannot be listened on (errno; 0: it can), and who answers."""

    address: str
    refused: int = 0
    answers: Walk | None = None


async def _coordinator(
    folder: Path, own: Identity, me: SiteIdentity, now: float, settings: _Settings
) -> tuple[Check, ...]:
    from coordinator.store import url_in

    address = settings.listen or f"0.0.0.0:{own.connection.address.rpartition(':')[2]}"
    found = await asyncio.to_thread(_look_at_port, address, own.connection.tls_name)
    checks = [
        members.papers(me, own.certificate, own.keys, now),
        members.disk(await asyncio.to_thread(members.look_at_disk, folder)),
        await asyncio.to_thread(store, settings.store or url_in(folder)),
        port(found, me),
    ]
    if settings.health_port:
        checks.append(health(settings.health_port, await _ask_health(settings.health_port)))
    return tuple(checks)


def store(url: str) -> Check:
    """Whether the store opens and is of this release."""
    from coordinator.store.reader import StoreReader

    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not path.exists():
        return Check("store", Level.WARN, f"there is no store at {path} yet", "the first `serve` makes it", WhoActs.YOU)
    try:
        with StoreReader(url) as reader:
            jobs = len(reader.jobs())
    except ParleyError as refused:
        return members.failed("store", refused)
    return Check("store", Level.OK, f"opens, and is of this release; {jobs} jobs")


def _look_at_port(address: str, tls_name: str) -> Port:
    host, _, number = address.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as trial:
            if os.name == "posix":  # elsewhere this option lets two programs share a port
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, int(number)))
    except OSError as refused:
        if refused.errno != errno.EADDRINUSE:
            return Port(address, refused.errno or errno.EINVAL)
        local = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, address.rpartition(":")[0])  # noqa: S104 - compared, not bound
        return Port(address, errno.EADDRINUSE, probe.walk(f"{local}:{number}", tls_name, None))
    return Port(address)


def port(found: Port, me: SiteIdentity) -> Check:
    """Whether the port is free for the coordinator, or served by it."""
    if not found.refused:
        fix = "run it: parley coordinator serve (or systemctl start parley-coordinator)"
        return Check("port", Level.WARN, f"{found.address} is free: the coordinator does not run", fix, WhoActs.YOU)
    if found.refused == errno.EACCES:
        fix = "choose a port above 1023 with --listen, or give the unit AmbientCapabilities=CAP_NET_BIND_SERVICE"
        return Check("port", Level.FAIL, f"this user may not listen on {found.address}", fix, WhoActs.YOU)
    if found.refused != errno.EADDRINUSE:
        why = os.strerror(found.refused)
        fix = "give an address of this machine with --listen"
        return Check("port", Level.FAIL, f"{found.address} cannot be listened on: {why}", fix, WhoActs.YOU)
    fix = "stop what uses the port (see: ss -ltnp), or choose another with --listen"
    answers = found.answers
    if answers is None or answers.ended is not Stage.ARRIVED or answers.presented is None:
        why = answers.trouble if answers is not None else "it does not answer"
        told = f"another program, or a coordinator that hangs, has {found.address}: {why}"
        return Check("port", Level.FAIL, told, fix, WhoActs.YOU)
    if answers.presented.certificate.serial_number != int(me.statement.serial, 16):
        told = f"another program has {found.address}; its certificate was made by {answers.presented.issuer!r}"
        return Check("port", Level.FAIL, told, fix, WhoActs.YOU)
    return Check("port", Level.OK, f"{found.address} is served by this coordinator, in {answers.seconds * 1000:.0f} ms")


async def _ask_health(number: int) -> str:
    """What the health service says: a status, or why there is none."""
    import grpc
    import grpc.aio
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{number}", options=options) as channel:
        request = health_pb2.HealthCheckRequest()
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_HEALTH_SECONDS)
        except grpc.aio.AioRpcError as refused:
            late = refused.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return f"no answer within {_HEALTH_SECONDS:.0f} s" if late else "no health service answers"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def health(number: int, status: str) -> Check:
    """Whether the health probe says that the coordinator serves."""
    if status == "SERVING":
        return Check("health", Level.OK, f"SERVING on 127.0.0.1:{number}")
    fix = f"run the coordinator with --health-port {number}; if it runs so, look at its log and load"
    return Check("health", Level.FAIL, f"127.0.0.1:{number}: {status}", fix, WhoActs.YOU)


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
