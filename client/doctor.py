"""Finds out why a member does not work: looks at one thing after another, and names the cause and what helps.

Each check is a function from facts to a `Check`; the functions named `look_...` and `ask` gather the facts.
"""

import asyncio
import shutil
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from client import policy, probe, proxy
from client.checks import Check, Level, failed
from client.connection import Connection, Line
from client.data import readers
from client.data.registry import DataSets
from client.probe import Stage, Walk
from client.session_events import SiteIdentity
from client.training import protocol
from client.training.trainer import Trainer
from federation import audit
from federation.errors import IdentityError, ParleyError, StorageError, UnreachableError, WhoActs
from federation.greeting import Greeting
from federation.messages import PROTOCOL, Role
from privacy import identity
from privacy.identity import MemberKeys

__all__ = [
    "Answer",
    "Check",
    "Disk",
    "Level",
    "Table",
    "acceptance",
    "ask",
    "clock",
    "data",
    "disk",
    "failed",
    "log",
    "look_at_data",
    "look_at_disk",
    "look_at_trainer",
    "member",
    "papers",
    "release",
    "rules",
    "site",
    "trainer",
    "way",
]

_DAYS_LEFT = 30
"""Days before its end at which a membership should be renewed: enrolment goes by way of people."""
_SKEW = 30.0
"""Seconds by which two clocks may differ: logs can still be laid side by side."""
_LITTLE, _TOO_LITTLE = 5 * 2**30, 256 * 2**20
"""Bytes of free disk below which a large model, or any model at all, may not find room."""
_ANSWER_SECONDS = 10.0
_TRAINER_SECONDS = 120.0


# ------------------------------------------------------------------------------------------------------ who it is


def papers(me: SiteIdentity, certificate: bytes, keys: MemberKeys, now: float) -> Check:
    """Whether the membership holds, belongs to the keys beside it, and does so for a while yet."""
    name, statement, root = "identity", me.statement, me.root
    try:
        identity.verify_statement(statement, root.public_key, root.consortium, int(now), me.revocations)
        identity.verify_certificate(certificate, statement, root)
    except IdentityError as wrong:
        return failed(name, wrong)
    if (keys.tls_key, keys.protocol_key) != (statement.tls_key, statement.protocol_key):
        found = f"the keys here are not those of {statement.name}'s membership"
        fix = "restore the identity folder as a whole from a backup, or enrol anew"
        return Check(name, Level.FAIL, found, fix, WhoActs.YOU)
    ends = min(statement.not_after, root.not_after)
    days = int((ends - now) // 86_400)
    found = f"{statement.role.value} {statement.name} of {root.consortium}, for {days} more days"
    if days < _DAYS_LEFT:
        fix = "ask the consortium's administrator for a new invitation in time"
        return Check(name, Level.WARN, found, fix, WhoActs.CONSORTIUM)
    return Check(name, Level.OK, found)


# ---------------------------------------------------------------------------------------------------- this machine


@dataclass(frozen=True, slots=True)
class Disk:
    """The folder's disk: free bytes, and why the folder cannot be written, if it cannot."""

    folder: Path
    free: int
    trouble: str = ""


def look_at_disk(folder: Path) -> Disk:
    """Writes a file there and takes it away again."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            file.write(b"x")
            file.flush()
        return Disk(folder, shutil.disk_usage(folder).free)
    except OSError as refused:
        return Disk(folder, 0, refused.strerror or str(refused))


def disk(found: Disk) -> Check:
    """Whether payloads and results find room."""
    if found.trouble:
        fix = "make the folder writable to the user that runs Parley; in a systemd unit name it in ReadWritePaths"
        return Check("disk", Level.FAIL, f"{found.folder} cannot be written: {found.trouble}", fix, WhoActs.YOU)
    told = f"{found.free / 2**30:.1f} GiB free at {found.folder}"
    if found.free < _LITTLE:
        level = Level.FAIL if found.free < _TOO_LITTLE else Level.WARN
        return Check("disk", level, told, "free disk space, or move the folder (--home)", WhoActs.YOU)
    return Check("disk", Level.OK, told)


def rules(path: Path) -> Check:
    """Whether the site's policy can be read."""
    try:
        read = policy.parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        missing = f"there is no policy at {path}: the site does not start"
        return Check("policy", Level.FAIL, missing, "write it; `parley site join` makes the first", WhoActs.SITE)
    except (OSError, UnicodeDecodeError) as refused:
        return Check("policy", Level.FAIL, f"{path} cannot be read: {refused}", "make it readable", WhoActs.SITE)
    except ParleyError as wrong:
        return failed("policy", wrong)
    empty = [key for key in ("datasets", "tasks", "models", "jobs") if not getattr(read, key)]
    if empty:
        found = f"{path} allows no {', no '.join(empty)}: every job is refused"
        return Check("policy", Level.WARN, found, 'list what is allowed, or "*"', WhoActs.SITE)
    return Check("policy", Level.OK, str(path))


@dataclass(frozen=True, slots=True)
class Table:
    """A registered data set: where it lies, its rows when it was read as a whole, and what is wrong with it."""

    name: str
    shown: str
    rows: int | None = None
    trouble: ParleyError | None = None


def look_at_data(folder: Path, *, deep: bool) -> tuple[Table, ...]:
    """Opens each registered file; `deep` reads them, and the databases, as a training run would.

    Raises:
        StorageError: The list of data sets cannot be read.
    """
    found = []
    for each in DataSets(folder).list():
        try:
            if deep:
                found.append(Table(each.name, each.shown, len(readers.read(each))))
                continue
            if each.kind != "sql":
                with Path(each.location).open("rb") as file:
                    file.read(1)
            found.append(Table(each.name, each.shown))
        except ParleyError as wrong:
            found.append(Table(each.name, each.shown, trouble=wrong))
        except OSError as refused:
            unreadable = StorageError(
                f"the file of data set {each.name!r} cannot be read: {each.shown}: {refused.strerror}",
                fix="put it back, let the user that runs the site read it, or register its new place",
                who=WhoActs.SITE,
            )
            found.append(Table(each.name, each.shown, trouble=unreadable))
    return tuple(found)


def data(tables: tuple[Table, ...]) -> tuple[Check, ...]:
    """Whether there is data to train on, and whether it can be read; a check for each data set."""
    if not tables:
        found = "no data set is registered here: every job is refused"
        return (Check("data", Level.FAIL, found, "run: parley site dataset add NAME PATH", WhoActs.SITE),)
    return tuple(
        Check(f"data {each.name}", Level.OK, each.shown if each.rows is None else f"{each.rows} rows at {each.shown}")
        if each.trouble is None
        else failed(f"data {each.name}", each.trouble)
        for each in tables
    )


async def look_at_trainer() -> protocol.Answer:
    """Starts a trainer of its own, which loads torch; the agent's is left alone."""
    with tempfile.TemporaryDirectory(prefix="parley-doctor-") as folder:
        child = Trainer(Path(folder))
        try:
            async with asyncio.timeout(_TRAINER_SECONDS):
                return await child.ask(protocol.Warm())
        except TimeoutError:
            return protocol.Failed("resources", f"it did not load torch within {_TRAINER_SECONDS:.0f} s")
        except StorageError as refused:
            return protocol.Failed("resources", str(refused))
        finally:
            await child.close()


def trainer(answer: protocol.Answer) -> Check:
    """Whether the process that trains starts, and how long it takes to load torch."""
    match answer:
        case protocol.Done(seconds=seconds, report=report):
            return Check("trainer", Level.OK, f"{report.reason} loaded in {seconds:.1f} s")
        case protocol.Failed(message=message):
            fix = "install Parley again (pip install parley-fl) and leave it memory: torch alone takes 200 MiB"
            return Check("trainer", Level.FAIL, f"the trainer does not start: {message}", fix, WhoActs.SITE)


# ------------------------------------------------------------------------------------------ the way to the coordinator


def way(walked: Walk, me: SiteIdentity, tls_name: str, now: float) -> tuple[Check, ...]:
    """What was met at each layer on the way to the coordinator, up to the first that does not let us through."""
    checks = []
    for layer in (_name, _port, _proxy):
        check = layer(walked)
        if check is not None:
            checks.append(check)
            if check.level is Level.FAIL:
                return tuple(checks)
    return (*checks, _tls(walked, me, tls_name, now))


def _name(walked: Walk) -> Check:
    dialled = walked.proxy.address if walked.proxy else walked.address
    host = dialled.rpartition(":")[0]
    if walked.ended is not Stage.NAME:
        return Check("name", Level.OK, f"{host} is {', '.join(walked.resolved)}")
    whose = "the proxy's name" if walked.proxy else "the coordinator's name"
    fix = f"check the name {host}, and this machine's DNS servers; or have it entered in the hosts file"
    return Check("name", Level.FAIL, f"{whose} {host} cannot be resolved: {walked.trouble}", fix, WhoActs.SITE)


def _port(walked: Walk) -> Check:
    dialled = walked.proxy.address if walked.proxy else walked.address
    if walked.ended is not Stage.PORT:
        return Check("port", Level.OK, f"{dialled} takes connections")
    if walked.proxy is not None:
        return failed("port", proxy.unreachable(walked.proxy, walked.trouble))
    if walked.trouble.startswith("no answer"):
        fix = f"have the network department let this machine dial {dialled}: a firewall that drops packets looks so"
    else:
        fix = f"check that the coordinator runs (parley coordinator serve) and listens on {dialled}"
    return Check("port", Level.FAIL, f"{dialled} takes no connection: {walked.trouble}", fix, WhoActs.SITE)


def _proxy(walked: Walk) -> Check | None:
    if walked.proxy is None:
        return Check("proxy", Level.OK, "none: the coordinator is dialled directly")
    if walked.ended is not Stage.PROXY:
        return Check("proxy", Level.OK, f"{walked.proxy.shown} (from {walked.proxy.source})")
    if walked.status:
        return failed("proxy", proxy.refusal(walked.proxy, walked.address, walked.status))
    return Check(
        "proxy",
        Level.FAIL,
        f"{walked.proxy.shown} (from {walked.proxy.source}) does not behave like an HTTP proxy: {walked.trouble}",
        f"check the proxy's address and port in {walked.proxy.source}",
        WhoActs.SITE,
    )


def _tls(walked: Walk, me: SiteIdentity, tls_name: str, now: float) -> Check:
    if walked.presented is None:
        fix = (
            f"check that {walked.address} is the coordinator's address; a firewall that knows neither TLS 1.3 nor its "
            "name may cut it: have it let this connection through"
        )
        return Check("TLS", Level.FAIL, f"the TLS handshake does not end: {walked.trouble}", fix, WhoActs.SITE)
    wrong = probe.judged(walked.presented, walked.address, tls_name, me.root, now)
    if wrong is not None:
        return failed("TLS", wrong)
    return Check("TLS", Level.OK, f"the certificate of {tls_name}, signed by {walked.presented.issuer}")


# ------------------------------------------------------------------------------------------ what the coordinator says


@dataclass(frozen=True, slots=True)
class Answer:
    """What the coordinator answered: its greeting if it gave one, the seconds it is ahead, and its refusal, if any."""

    greeting: Greeting | None = None
    ahead: float = 0.0
    refused: ParleyError | None = None


async def ask(line: Line) -> Answer:
    """Asks the coordinator whether it accepts this member. No open stream of the member's is disturbed."""
    began = time.time()
    try:
        async with asyncio.timeout(_ANSWER_SECONDS), Connection.opened(line) as connection:
            greeting = await connection.greeting()
    except TimeoutError:
        late = UnreachableError(
            f"the coordinator did not answer within {_ANSWER_SECONDS:.0f} s, although it takes connections",
            fix="look at the coordinator's load and its log; a proxy that holds back HTTP/2 looks the same",
            who=WhoActs.COORDINATOR,
        )
        return Answer(refused=late)
    except ParleyError as refused:
        return Answer(refused=refused)
    ahead = greeting.clock - (began + time.time()) / 2 if greeting else 0.0
    return Answer(greeting, ahead)


def acceptance(answer: Answer) -> Check:
    """Whether the coordinator accepts this member, or with which words it does not."""
    if answer.refused is not None:
        return failed("membership", answer.refused)
    return Check("membership", Level.OK, "the coordinator accepts this member")


def release(greeting: Greeting | None, ours: str) -> Check:
    """Whether both sides speak the same protocol, and are of the same release."""
    if greeting is None:
        found = f"the coordinator does not say its release; this is {ours}"
        return Check("release", Level.WARN, found, f"install Parley {ours} there", WhoActs.COORDINATOR)
    if greeting.protocol != PROTOCOL:
        found = (
            f"the coordinator speaks version {greeting.protocol} of the protocol (Parley {greeting.release}), this "
            f"machine version {PROTOCOL} (Parley {ours})"
        )
        older = greeting.protocol < PROTOCOL
        newest = ours if older else greeting.release
        who = WhoActs.COORDINATOR if older else WhoActs.SITE
        return Check("release", Level.FAIL, found, f"install Parley {newest} {'there' if older else 'here'}", who)
    if greeting.release != ours:
        found = f"the coordinator runs Parley {greeting.release}, this machine {ours}; they speak the same protocol"
        return Check("release", Level.WARN, found, "install the newer one on both sides", WhoActs.YOU)
    return Check("release", Level.OK, f"Parley {ours} on both sides")


def clock(greeting: Greeting | None, ahead: float) -> Check | None:
    """Whether the two clocks agree; None when the coordinator does not say its time."""
    if greeting is None:
        return None
    if abs(ahead) <= _SKEW:
        return Check("clock", Level.OK, "agrees with the coordinator's")
    found = f"this machine's clock is {abs(ahead):.0f} s {'behind' if ahead > 0 else 'ahead of'} the coordinator's"
    fix = "set it (timedatectl set-ntp true); if this one is right, have the coordinator's set"
    return Check("clock", Level.WARN, found, fix, WhoActs.YOU)


# ------------------------------------------------------------------------------------------------------ all of it


async def member(me: SiteIdentity, line: Line, keys: MemberKeys, folder: Path, now: float) -> tuple[Check, ...]:
    """All checks of somebody who dials the coordinator."""
    here = (papers(me, line.certificate, keys, now), disk(await asyncio.to_thread(look_at_disk, folder)))
    walked = await asyncio.to_thread(probe.walk, line.address, line.tls_name, line.proxy)
    there = way(walked, me, line.tls_name, now)
    if any(check.level is Level.FAIL for check in there):
        return (*here, *there)
    answer = await ask(line)
    told: tuple[Check | None, ...] = (acceptance(answer),)
    if answer.refused is None:
        told += (release(answer.greeting, metadata.version("parley-fl")), clock(answer.greeting, answer.ahead))
    return (*here, *there, *(check for check in told if check is not None))


async def log(folder: Path, name: audit.LogName, *, ran: bool) -> tuple[Check, ...]:
    """A member's audit log and its evidence; `ran`: whether the member must have one."""
    from client import durable_checks  # and with it secure aggregation, which other commands need not load

    found = await asyncio.to_thread(durable_checks.look_at_log, folder / audit.FILE)
    noted = durable_checks.evidence(found)
    return (durable_checks.log(found, name, ran=ran), *(() if noted is None else (noted,)))


async def site(name: str, folder: Path, *, deep: bool) -> tuple[Check, ...]:
    """What the site of this name has besides being a member: its policy, what it keeps, its data.

    When `deep`, its trainer too.
    """
    from client import durable_checks

    checks = [rules(folder / "policy.toml")]
    vault = await asyncio.to_thread(durable_checks.look_at_vault, folder)
    ran = vault.changes is not None or vault.trouble is not None
    checks.extend(durable_checks.vault(vault))
    checks.extend(await log(folder, audit.LogName(name, Role.SITE.value), ran=ran))
    try:
        checks.extend(data(await asyncio.to_thread(look_at_data, folder, deep=deep)))
    except StorageError as broken:
        checks.append(failed("data", broken))
    if deep:
        checks.append(trainer(await look_at_trainer()))
    return tuple(checks)
