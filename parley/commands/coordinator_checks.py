"""Looks at what a coordinator needs on its machine: store and log, the folders of sums, open files, and its port."""

import asyncio
import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from client import doctor as members
from client import probe
from client.checks import Check, Level, failed
from client.probe import Stage, Walk
from client.session_events import SiteIdentity
from federation.audit import LogName
from federation.errors import ParleyError, WhoActs
from federation.messages import MembershipStatement, RevocationList, Role
from parley.homes import Identity

__all__ = [
    "Port",
    "Room",
    "Store",
    "ask_health",
    "coordinator",
    "files",
    "health",
    "look_at_files",
    "look_at_port",
    "look_at_rooms",
    "look_at_store",
    "port",
    "room",
    "store",
]

_HEALTH_SECONDS = 3.0
_FILES_A_SITE = 3
"""Its connection, its upload, and the upload once more while it is summed."""
_FILES_BESIDE = 64
"""What the coordinator has open whoever attends: its store, its log, its port, and what Python loads."""
_ROOMS = ("sealed", "spool")
"""Where uploads lie while they are collected and summed, with and without secure aggregation; a folder for each job."""


async def coordinator(
    folder: Path, own: Identity, me: SiteIdentity, now: float, *, listen: str, url: str, health_port: int
) -> tuple[Check, ...]:
    """All checks of a coordinator; `listen`, `url` and `health_port` as `parley coordinator serve` was given them."""
    from coordinator.store import url_in

    address = listen or f"0.0.0.0:{own.connection.address.rpartition(':')[2]}"
    rooms = await asyncio.to_thread(look_at_rooms, folder)  # before the store: it knows every job that has one
    stored = await asyncio.to_thread(look_at_store, url or url_in(folder), me.revocations, now)
    name = LogName(own.statement.name, own.statement.role.value)
    secured = (folder / "sealed").exists()
    checks = [
        members.papers(me, own.certificate, own.keys, now),
        members.disk(await asyncio.to_thread(members.look_at_disk, folder)),
        store(stored),
        *await members.log(folder, name, ran=secured),
        *(room(each, stored) for each in rooms),
    ]
    checks += [files(most, stored.sites) for most in (look_at_files(),) if most is not None]
    checks.append(port(await asyncio.to_thread(look_at_port, address, own.connection.tls_name), me))
    if health_port:
        checks.append(health(health_port, await ask_health(health_port)))
    return tuple(checks)


# ------------------------------------------------------------------------------------------------------------ the store


@dataclass(frozen=True, slots=True)
class Store:
    """What a look at the store found.

    Attributes:
        missing: Where it is to be and is not; empty when it is there.
        jobs: How many jobs it knows.
        live: Those that are not over, by id; None when nobody knows.
        sites: How many sites may attend.
        trouble: Why it cannot be read, if it cannot.
    """

    missing: str = ""
    jobs: int = 0
    live: frozenset[str] | None = None
    sites: int = 0
    trouble: ParleyError | None = None


def look_at_store(url: str, revocations: RevocationList, now: float) -> Store:
    """Reads what the coordinator knows."""
    from coordinator.store.reader import StoreReader

    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not path.exists():
        return Store(missing=str(path))
    try:
        with StoreReader(url) as reader:
            jobs, known = reader.jobs(), reader.members()
    except ParleyError as refused:
        return Store(trouble=refused)
    revoked = frozenset(revocations.serials)
    sites = {each.name for each in known if each.role is Role.SITE and _holds(each, revoked, now)}
    return Store(jobs=len(jobs), live=frozenset(each.id for each in jobs if not each.state.over), sites=len(sites))


def _holds(member: MembershipStatement, revoked: frozenset[str], now: float) -> bool:
    return member.serial not in revoked and member.not_after > now


def store(found: Store) -> Check:
    """Whether the store opens and is of this release."""
    if found.missing:
        told = f"there is no store at {found.missing} yet"
        return Check("store", Level.WARN, told, "the first `serve` makes it", WhoActs.YOU)
    if found.trouble is not None:
        return failed("store", found.trouble)
    return Check("store", Level.OK, f"opens, and is of this release; {found.jobs} jobs")


# -------------------------------------------------------------------------------------- folders of sums, and open files


@dataclass(frozen=True, slots=True)
class Room:
    """A folder in which uploads lie while they are summed: bytes by job, and why it cannot be written, if it cannot."""

    folder: Path
    jobs: tuple[tuple[str, int], ...] = ()
    trouble: str = ""


def look_at_rooms(folder: Path) -> tuple[Room, ...]:
    """The folders that are there; the first sum makes them. What vanishes meanwhile counts as nothing."""
    return tuple(_look_at_room(folder / name) for name in _ROOMS if (folder / name).exists())


def _look_at_room(folder: Path) -> Room:
    trouble = members.look_at_disk(folder).trouble
    try:
        jobs = tuple((each.name, _size(each)) for each in sorted(folder.iterdir()) if each.is_dir())
    except OSError as refused:
        return Room(folder, (), trouble or refused.strerror or str(refused))
    return Room(folder, jobs, trouble)


def _size(folder: Path) -> int:
    size = 0
    for within, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += (Path(within) / name).lstat().st_size
    return size


def room(found: Room, stored: Store) -> Check:
    """Whether uploads can be written, and nothing lies there of jobs that are over."""
    name = found.folder.name
    if found.trouble:
        fix = "make the folder writable to the user that runs Parley, and leave nobody else's files in it"
        return Check(name, Level.FAIL, f"{found.folder} cannot be written: {found.trouble}", fix, WhoActs.YOU)
    over = [(job, size) for job, size in found.jobs if stored.live is not None and job not in stored.live]
    if over:
        told = f"{_size_words(over)} in {found.folder} of jobs that are over: {', '.join(job for job, _ in over)}"
        fix = "look again in a minute, for the end of a job takes it away; what stays, a crash left: remove it"
        return Check(name, Level.WARN, told, fix, WhoActs.YOU)
    return Check(name, Level.OK, f"{_size_words(found.jobs)} of {len(found.jobs)} jobs, in {found.folder}")


def _size_words(jobs: Iterable[tuple[str, int]]) -> str:
    return f"{sum(size for _, size in jobs) / 2**20:.1f} MiB"


def look_at_files() -> int | None:
    """How many files this user's programs may have open at most; None where the system sets no such limit."""
    if sys.platform == "win32":
        return None
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if most == resource.RLIM_INFINITY else most


def files(most: int, sites: int) -> Check:
    """Whether the coordinator may open a connection and two files for each site at the same time."""
    needed = _FILES_A_SITE * sites + _FILES_BESIDE
    told = f"this user may have {most} files open, and {sites} sites take up to {needed}"
    if most >= needed:
        return Check("open files", Level.OK, told)
    fix = "raise the hard limit: LimitNOFILE in the systemd unit, or nofile in /etc/security/limits.conf"
    return Check("open files", Level.FAIL, told, fix, WhoActs.YOU)


# ------------------------------------------------------------------------------------------- the port, and what answers


@dataclass(frozen=True, slots=True)
class Port:
    """The port that the coordinator listens on: why it cannot be listened on (errno; 0: it can), and who answers."""

    address: str
    refused: int = 0
    answers: Walk | None = None


def look_at_port(address: str, tls_name: str) -> Port:
    """Tries to listen on the port and lets go of it at once; whoever has it is dialled."""
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


async def ask_health(number: int) -> str:
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
