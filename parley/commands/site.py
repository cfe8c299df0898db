"""`parley site`: join a consortium, register data, and attend, on a hospital's or bank's own machine."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from client import pause as pausing
from client import resumption
from client.backoff import Backoff
from client.connection import Connection as Wire
from client.connection import Line
from client.data.registry import DataSet, DataSets
from client.policy import EXAMPLE, Policy, SecureAggregation, floor, parse
from client.proxy import FILE, Proxy, chosen
from client.session_events import SiteIdentity
from federation import audit, files
from federation.errors import ConfigurationError, StorageError, UnreachableError, WhoActs
from federation.messages import Credential, EnrolmentRequest, EnrolmentState
from parley.commands import site_ledger
from parley.commands.consortium import read_string
from parley.commands.service import site_service
from parley.dialling import line
from parley.homes import Connection, Identity, MemberHome
from parley.terminal import HomeOption, JsonOption, console, emit, errors, home, logs, run
from privacy import identity
from privacy.secure_aggregation.rostersum.site_events import Clock, ReTable

if TYPE_CHECKING:
    from client.summing import Sealing

__all__ = ["app", "approved", "door", "install", "join_as", "only_agent", "read_policy", "sealing"]

app = typer.Typer(no_args_is_help=True, help="Join a consortium, register data, attend (hospital or bank).")
dataset = typer.Typer(no_args_is_help=True, help="The data sets that this site may use; they stay where they are.")
app.add_typer(dataset, name="dataset")
app.add_typer(site_ledger.budget, name="budget")

log = logging.getLogger("parley.site")

_POLICY = "policy.toml"

app.command("service")(site_service)
app.command("ledger")(site_ledger.ledger)


@app.command()
def join(
    invitation: Annotated[
        str, typer.Argument(help="What the consortium's administrator sent you, or a file that holds it.")
    ],
    proxy: Annotated[
        str, typer.Option(help="http://[user:password@]host:port of a proxy to dial through.", show_default=False)
    ] = "",
    home_: HomeOption = None,
) -> None:
    """Makes this site's keys here, asks to join, and waits until the administrator approves."""
    member = home(home_).site
    join_as(member, read_string(invitation), proxy)
    policy = member.folder / _POLICY
    if not policy.exists():
        files.write(policy, EXAMPLE.encode())
    console.print(f"What this site takes part in is for you to say: {policy}")
    console.print("Next:  parley site dataset add NAME PATH   and then   parley site run")


def join_as(member: MemberHome, text: str, proxy: str = "") -> None:
    """Enrols the member whose home this is, under an invitation; returns when it is approved and installed.

    Raises:
        IdentityError: The invitation, or what came back, is not what it must be.
    """
    invitation = identity.Invitation.parse(text, int(time.time()))
    invited = invitation.invited
    if invited.role is not member.role:
        raise ConfigurationError(
            f"this invitation is for the role {invited.role.value}",
            fix=f"use: parley {invited.role.value} join INVITATION",
            who=WhoActs.YOU,
        )
    request = identity.make_request(invitation, member.begin(), metadata.version("parley-fl"))
    through = chosen(invitation.address, os.environ, flag=proxy, folder=member.folder)
    prints = identity.fingerprints(request)
    errors.print(f"Joining {invitation.consortium} as [bold]{invited.name}[/] through {invitation.address}")
    errors.print(f"Root fingerprint, to compare with the administrator's: {invitation.root.fingerprint}")
    errors.print(f"This {invited.role.value}'s, to read out:")
    errors.print(f"  TLS key       {prints.tls}\n  protocol key  {prints.protocol}")
    errors.print(f"Waiting until the administrator runs:  parley consortium approve {invited.name}")
    with errors.status("Waiting ..."):
        credential = run(approved(door(invitation, through), request))
    me = install(member, invitation, credential)
    if proxy:
        files.write(member.folder / FILE, proxy.encode(), secret=True)
    console.print(f"[bold]{me.statement.name}[/] is a member of {me.root.consortium}.")


def door(invitation: identity.Invitation, proxy: Proxy | None = None) -> Line:
    """The line on which an invitation's holder may ask to be enrolled, and nothing else."""
    return Line(
        invitation.address,
        invitation.tls_name,
        invitation.root.pem,
        invitation.certificate_pem,
        invitation.key_pem,
        proxy=proxy,
    )


async def approved(door: Line, request: EnrolmentRequest) -> Credential:
    """The credential of a request, once the administrator has approved it; waits through any number of cuts."""
    backoff = Backoff(longest=10.0)
    told = ""
    while True:
        try:
            async with Wire.opened(door) as wire:
                async for status in wire.enrol(request):
                    backoff.reset()
                    told = ""
                    if status.state is EnrolmentState.APPROVED and status.credential is not None:
                        return status.credential
        except UnreachableError as away:
            if str(away) != told:
                told = str(away)
                errors.print(f"{told}. Trying again until it answers ...", markup=False, highlight=False)
        await asyncio.sleep(backoff.seconds())


def install(member: MemberHome, invitation: identity.Invitation, credential: Credential) -> Identity:
    """Puts what the root signed beside the keys made here."""
    connection = Connection(invitation.address, invitation.consortium, invitation.coordinator)
    name = invitation.invited.name
    return member.install(credential, invitation.root, connection, name=name, now=int(time.time()))


@app.command("run")
def attend(
    proxy: Annotated[
        str, typer.Option(help="http://[user:password@]host:port of a proxy to dial through.", show_default=False)
    ] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
    home_: HomeOption = None,
) -> None:
    """Attends until it is told to end. It only dials out, and comes back by itself after every cut."""
    logs(verbose)
    member = home(home_).site
    own = member.load()
    identity.verify_statement(
        own.statement, own.root.public_key, own.root.consortium, int(time.time()), own.revocations
    )
    read_policy(member)
    if not DataSets(member.folder).list():
        log.warning("no data set is registered here yet: parley site dataset add NAME PATH")
    with only_agent(member.folder), contextlib.suppress(asyncio.CancelledError):
        run(_attend(member, proxy))
    log.info("ended")


@contextlib.contextmanager
def only_agent(folder: Path) -> Iterator[None]:
    """Holds the site's folder: two agents would close one another's streams and delete one another's work.

    Raises:
        StorageError: An agent runs, or a command decides something for it.
    """
    with (folder / "agent.lock").open("a+b") as lock:
        try:
            if sys.platform == "win32":
                import msvcrt

                msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as taken:
            raise StorageError(
                f"another agent of this site runs already, with the folder {folder}",
                fix="let that one run; or end it, do this, and start it again",
            ) from taken
        yield


@contextlib.contextmanager
def sealing(folder: Path, own: Identity, *, restored: bool = False) -> "Iterator[Sealing]":
    """A site's protocol key with its vault and its audit log, open in this process and in no other.

    Raises:
        StorageError: Another process has them open, they are damaged, the vault is an older copy (but not if it is
            `restored`), or the disk refuses.
    """
    from client.summing import Sealing
    from client.vault import Vault, vault_in, witness_in

    name = audit.LogName(own.statement.name, own.statement.role.value)
    with (
        Vault(vault_in(folder), witness_in(folder), restored=restored) as vault,
        audit.AuditLog(folder / audit.FILE, name, time.time()) as log_,
    ):
        yield Sealing(own.keys.protocol, vault, log_)


async def _attend(member: MemberHome, proxy: str) -> None:
    from client.agent import Agent

    own = member.load()
    with sealing(member.folder, own) as sealed:
        agent = Agent(
            member.folder,
            line(member, proxy),
            SiteIdentity(own.statement, own.root, own.revocations),
            _PolicyReader(member),
            member.update_revocations,
            sealing=sealed,
        )
        _end_on_signals()
        log.info("%s dials %s", own.statement.name, own.connection.address)
        await agent.run()


def _end_on_signals() -> None:
    """Ends the agent, and not this process in the middle of what it does."""
    task = asyncio.current_task()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows has no handlers: Ctrl-C interrupts asyncio.run there
            if task is not None:
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)


@app.command()
def pause(home_: HomeOption = None) -> None:
    """Pauses this site, also through restarts: it puts down what it does and takes part in no step until it resumes.

    It goes on attending, so that operators see who paused it; rounds with a quorum do not wait for it.
    """
    folder = _own(home_)
    told = "is paused" if pausing.pause(folder) else "was paused already"
    console.print(f"This site {told}. Its agent heeds it within a second. To go on:  parley site resume")


@app.command()
def resume(home_: HomeOption = None) -> None:
    """Lets this site take part in steps again."""
    told = "goes on" if pausing.resume(_own(home_)) else "was not paused"
    console.print(f"This site {told}.")


@app.command("resume-job")
def resume_job(
    job: Annotated[str, typer.Argument(help="The job's id, as this site's log names it.")], home_: HomeOption = None
) -> None:
    """Lets one job go on that waits for you: under secure aggregation, after rounds that ended badly at this site."""
    resumption.resume_job(_own(home_), job)
    console.print(f"The agent of this site lets {job} go on within a second, if it waits for you.")


# ------------------------------------------------------------------------- what only the site's administrator grants

FamilyArgument = Annotated[str, typer.Argument(help="The data family, as the refusal names it.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask; what it exposes has been read.")]


@app.command()
def recell(
    family: FamilyArgument,
    cell: Annotated[str, typer.Option(help="The new cell's digest, as the refusal of a job names it.")],
    yes: YesOption = False,
    home_: HomeOption = None,
) -> None:
    """Lets a data family be summed over another cell of sites. The agent must not run.

    Exact sums over the old cell can then be subtracted from those over the new one: first it says whom that exposes.
    """
    from parley.commands import site_decisions

    site_decisions.recell(home(home_).site, family, cell, yes=yes)


@app.command()
def answer(
    family: FamilyArgument,
    plan: Annotated[str, typer.Option(help="The statistic's digest, as the refusal of a job names it.")],
    yes: YesOption = False,
    home_: HomeOption = None,
) -> None:
    """Lets a data family answer one more exact statistic than the few that are free. The agent must not run.

    Each further exact sum over the same records tells more of them.
    """
    from parley.commands import site_decisions

    site_decisions.answer(home(home_).site, family, plan, yes=yes)


@app.command()
def restore(
    head: Annotated[
        str, typer.Option(help="A head of the audit log noted elsewhere: it must stand in it.", show_default=False)
    ] = "",
    yes: YesOption = False,
    home_: HomeOption = None,
) -> None:
    """Gives a vault put back from a backup what it lacks, from the audit log, so that the site may run again.

    The newest audit log must be here: what it does not show is lost. Jobs that were under way end for this site.
    """
    from parley.commands import site_decisions

    site_decisions.restore(home(home_).site, head, yes=yes)


@app.command()
def witness(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder on another disk, which backups leave out.", show_default=False)
    ] = None,
    home_: HomeOption = None,
) -> None:
    """Shows where the changes of this site's vault are counted, or has them counted elsewhere. The agent must not run.

    The count notices an older vault put back, unless it is put back with it: keep it on another disk.
    """
    from parley.commands import site_decisions

    site_decisions.witness(home(home_).site, folder)


def _own(home_: Path | None) -> Path:
    """The folder of a site that has joined.

    Raises:
        StorageError: It has not.
    """
    member = home(home_).site
    member.load()
    return member.folder


@app.command()
def policy(home_: HomeOption = None, as_json: JsonOption = False) -> None:
    """Shows this site's policy: what it takes part in."""
    member = home(home_).site
    rules = read_policy(member)
    if as_json:
        emit(rules.model_dump())
        return
    console.print(f"{member.folder / _POLICY}", style="bold")
    _show(rules)
    console.print("  [secure_aggregation]", highlight=False, markup=False)
    _show(rules.secure_aggregation)


def _show(rules: Policy | SecureAggregation) -> None:
    """Each rule of a table, and none of the tables below it."""
    for key, value in rules.model_dump(mode="json", exclude={"secure_aggregation"}).items():
        console.print(f"  {key} = {value}", highlight=False, markup=False)


def read_policy(member: MemberHome) -> Policy:
    """The site's policy as its file states it now.

    Raises:
        ConfigurationError: There is none, or it is wrong.
    """
    path = member.folder / _POLICY
    try:
        text = path.read_text()
    except OSError as missing:
        raise ConfigurationError(
            f"this site has no policy at {path}", fix="write it; `parley site join` makes the first", who=WhoActs.SITE
        ) from missing
    except UnicodeDecodeError as broken:
        raise ConfigurationError(f"{path} is not UTF-8 text", fix="save it as UTF-8", who=WhoActs.SITE) from broken
    return parse(text, str(path))


class _PolicyReader:
    """Reads the policy each time; a broken file leaves the last good one in force and is told once."""

    def __init__(self, member: MemberHome) -> None:
        self._member = member
        self._last = read_policy(member)
        self._told = ""

    def __call__(self) -> Policy:
        """The policy in force."""
        try:
            self._last = read_policy(self._member)
            self._told = ""
        except ConfigurationError as broken:
            if str(broken) != self._told:
                log.warning("the policy cannot be read, the last good one stays in force: %s", broken)
            self._told = str(broken)
        return self._last


@dataset.command("add")
def add_dataset(
    name: Annotated[str, typer.Argument(help="The name that jobs use, such as heart.")],
    location: Annotated[str, typer.Argument(help="A CSV or Parquet file, or an SQLAlchemy URL.")],
    query: Annotated[str, typer.Option(help="What to select, when LOCATION is a URL.", show_default=False)] = "",
    home_: HomeOption = None,
) -> None:
    """Registers data and checks that it can be read. Nothing is copied."""
    found = DataSet.of(name, location, query)
    with errors.status(f"Reading {found.shown} ..."):
        rows = DataSets(home(home_).site.folder).add(found)
    console.print(f"[bold]{name}[/]: {rows} rows at {escape(found.shown)}. They stay there.")


@dataset.command("list")
def list_datasets(home_: HomeOption = None, as_json: JsonOption = False) -> None:
    """Lists the registered data sets."""
    found = DataSets(home(home_).site.folder).list()
    if as_json:
        emit([{"name": each.name, "kind": each.kind, "location": each.shown, "query": each.query} for each in found])
        return
    table = Table("name", "kind", "location", "query")
    for each in found:
        table.add_row(each.name, each.kind, Text(each.shown), Text(each.query))  # as Text: SQL may have brackets
    console.print(table if found else "No data set is registered yet. Next:  parley site dataset add NAME PATH")


@dataset.command("accept")
def accept_dataset(
    name: Annotated[str, typer.Argument(help="The data set's name.")],
    rows_changed: Annotated[int, typer.Option(help="How many rows are new, other, or gone.")],
    home_: HomeOption = None,
) -> None:
    """Lets new jobs sum over the present version of a data set. The agent must not run, nor a job on it be open.

    Under secure aggregation the difference of sums over two versions is the change: few rows must not be all of it.
    """
    from client import tables
    from client.data import readers

    member = home(home_).site
    own, rules = member.load(), read_policy(member)
    with errors.status(f"Reading {name} ..."):
        version = tables.version(readers.read(DataSets(member.folder).get(name)))
    change = ReTable(rules.secure_aggregation.family(name), version, rows_changed)
    with only_agent(member.folder), sealing(member.folder, own) as held:
        tables.accept(held, floor(rules, (), own.revocations), change, Clock(time.time(), time.monotonic()))
    console.print(f"[bold]{name}[/]: exact sums of new jobs read its present version.")


@dataset.command("remove")
def remove_dataset(name: Annotated[str, typer.Argument(help="The data set's name.")], home_: HomeOption = None) -> None:
    """Forgets a data set; the data stay where they are."""
    DataSets(home(home_).site.folder).remove(name)
    console.print(f"{name} is no longer registered; the data are untouched.")
