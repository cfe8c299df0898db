"""`parley consortium`: the root key, invitations, approvals and revocations, on the administrator's machine."""

import getpass
import time
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.prompt import Confirm
from rich.table import Table

from federation.errors import ConfigurationError, IdentityError, ParleyError, UnreachableError, WhoActs
from federation.messages import ApproveEnrolment, EnrolmentRequest, ListPending, Pending, PublishRevocations, Role
from parley.commands.cells import cells
from parley.dialling import ask
from parley.homes import Consortium, ConsortiumHome, Home, coordinator_request
from parley.terminal import HomeOption, JsonOption, console, emit, errors, home, moment
from privacy import identity

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="The consortium's root key, members and invitations (administrator).")
app.command("cells")(cells)

PassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", help="File whose first line is the root key's passphrase.", show_default=False),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask; the fingerprints have been compared.")]


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="The consortium's name, such as heart-alliance.")],
    address: Annotated[str, typer.Option(help="host:port at which sites will reach the coordinator.")],
    coordinator: Annotated[str, typer.Option(help="The coordinator's member name.")] = "hub",
    organisation: Annotated[
        str, typer.Option(help="The administrator's organisation [default: NAME].", show_default=False)
    ] = "",
    passphrase_file: PassphraseFile = None,
    no_passphrase: Annotated[
        bool,
        typer.Option("--no-passphrase", help="Keep the root key unencrypted in its file (offline or encrypted disk)."),
    ] = False,
    home_: HomeOption = None,
) -> None:
    """Makes the root key. It stays on this machine and never goes to the coordinator."""
    where = home(home_)
    if no_passphrase and passphrase_file is not None:
        raise ConfigurationError(
            "--no-passphrase and --passphrase-file exclude one another", fix="give one of them", who=WhoActs.YOU
        )
    passphrase = None if no_passphrase else _new_passphrase(passphrase_file)
    consortium = where.consortium.create(
        name,
        address,
        coordinator,
        passphrase=passphrase,
        now=int(time.time()),
        organisation=organisation or None,
    )
    console.print(f"Consortium [bold]{name}[/] in {where.consortium.folder}. Back that folder up, offline.")
    console.print(f"Root fingerprint, for members to compare: [bold]{consortium.root.fingerprint}[/]")
    console.print(f"Next, on the coordinator's machine:  parley coordinator init --name {coordinator}")


@app.command()
def admit(
    request: Annotated[str, typer.Argument(help="What `parley coordinator init` printed, or a file that holds it.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Further name or address in the coordinator's certificate.", show_default=False),
    ] = None,
    passphrase_file: PassphraseFile = None,
    yes: Yes = False,
    home_: HomeOption = None,
) -> None:
    """Makes a machine the coordinator; prints the credential that it installs."""
    where = home(home_)
    text = read_string(request)
    _show(coordinator_request(text), yes=yes)
    consortium = _unlocked(where.consortium, passphrase_file)
    credential = consortium.admit(text, host or (), now=int(time.time()))
    errors.print("On the coordinator's machine:  parley coordinator install CREDENTIAL")
    print(credential)


@app.command()
def invite(
    name: Annotated[str, typer.Argument(help="The newcomer's name, such as cleveland.")],
    organisation: Annotated[str, typer.Option(help="Its organisation [default: NAME].", show_default=False)] = "",
    role: Annotated[Role, typer.Option(help="What it will be.")] = Role.SITE,
    hours: Annotated[int, typer.Option(help="How long the invitation is good.")] = 48,
    passphrase_file: PassphraseFile = None,
    home_: HomeOption = None,
) -> None:
    """Prints one string for a newcomer. Who has it can ask to join in that name: send it as you would a password."""
    if role is Role.COORDINATOR:
        raise IdentityError("a coordinator is not invited", fix="use: parley consortium admit REQUEST", who=WhoActs.YOU)
    consortium = _unlocked(home(home_).consortium, passphrase_file)
    invitation = consortium.invite(name, organisation or name, role, now=int(time.time()), hours=hours)
    errors.print(f"Invitation for {role.value} [bold]{name}[/], good until {moment(invitation.expires)} UTC. There:")
    errors.print(f"  parley {role.value} join INVITATION")
    print(invitation.text)


@app.command()
def pending(home_: HomeOption = None, as_json: JsonOption = False) -> None:
    """Shows who asks to join."""
    requests = _pending(home(home_))
    if as_json:
        emit(requests)
        return
    if not requests:
        console.print("Nobody waits for approval.")
    for request in requests:
        _print_fingerprints(request, console)


@app.command()
def approve(
    name: Annotated[str, typer.Argument(help="The newcomer's name.")],
    days: Annotated[int, typer.Option(help="How long the membership is good.")] = 365,
    passphrase_file: PassphraseFile = None,
    yes: Yes = False,
    home_: HomeOption = None,
) -> None:
    """Shows a newcomer's fingerprints and, once they were compared, signs its membership."""
    where = home(home_)
    asked = [request for request in _pending(where) if request.name == name]
    if not asked:
        raise IdentityError(
            f"no enrolment of {name} waits for approval",
            fix="see who does: parley consortium pending; it must run: parley site join INVITATION",
            who=WhoActs.YOU,
        )
    _show(asked[0], yes=yes)
    consortium = _unlocked(where.consortium, passphrase_file)
    member = consortium.approve(asked[0], now=int(time.time()), days=days)
    ask(where.operator, ApproveEnrolment(asked[0].invitation, member.certificate, member.statement))
    console.print(f"[bold]{name}[/] is a member until {moment(member.statement.not_after)} UTC.")


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The member's name.")],
    passphrase_file: PassphraseFile = None,
    home_: HomeOption = None,
) -> None:
    """Ends a membership at once: its open streams close and its name is free."""
    where = home(home_)
    revocations = _unlocked(where.consortium, passphrase_file).revoke(name, now=int(time.time()))
    console.print(f"[bold]{name}[/] is revoked (list {revocations.version}).")
    _published(where, PublishRevocations(revocations))


@app.command()
def publish(home_: HomeOption = None) -> None:
    """Hands the newest revocation list to the coordinator again."""
    where = home(home_)
    _published(where, PublishRevocations(where.consortium.revocations()))


@app.command()
def members(home_: HomeOption = None, as_json: JsonOption = False) -> None:
    """Lists who is a member, and until when."""
    where = home(home_)
    revoked = set(where.consortium.revocations().serials)
    found = [member.statement for member in where.consortium.members()]
    if as_json:
        emit([{"revoked": each.serial in revoked, "statement": each} for each in found])
        return
    table = Table("name", "organisation", "role", "until (UTC)", "state")
    for each in found:
        state = "revoked" if each.serial in revoked else "expired" if each.not_after <= time.time() else "member"
        table.add_row(each.name, each.organisation, each.role.value, moment(each.not_after), state)
    console.print(table)


def read_string(given: str) -> str:
    """A pasted string, or the content of the file of that name."""
    try:
        path = Path(given)
        return path.read_text().strip() if len(given) < 1000 and path.is_file() else given.strip()  # noqa: PLR2004 - a path
    except OSError:
        return given.strip()
    except UnicodeDecodeError as broken:
        raise ConfigurationError(
            f"the file {given} is not text", fix="name the file that holds the string", who=WhoActs.YOU
        ) from broken


def _published(where: Home, request: PublishRevocations) -> None:
    try:
        ask(where.operator, request)
    except UnreachableError as away:
        raise UnreachableError(
            f"the coordinator does not know it yet: {away.problem}",
            fix="when it is back: parley consortium publish",
        ) from away
    console.print("The coordinator holds the list; open streams of revoked members are closed.")


def _pending(where: Home) -> tuple[EnrolmentRequest, ...]:
    reply = ask(where.operator, ListPending())
    return reply.requests if isinstance(reply, Pending) else ()


def _show(request: EnrolmentRequest, *, yes: bool) -> None:
    _print_fingerprints(request, errors)
    if not yes and not Confirm.ask("Does the newcomer read out the same fingerprints?", console=errors, default=False):
        raise ParleyError(
            "not approved: the fingerprints were not confirmed", fix="compare them by telephone and try again"
        )


def _print_fingerprints(request: EnrolmentRequest, to: Console) -> None:
    prints = identity.fingerprints(request)
    to.print(f"[bold]{request.name}[/] of {request.organisation} asks to be {request.role.value}")
    to.print(f"  TLS key       {prints.tls}\n  protocol key  {prints.protocol}")


def _new_passphrase(file: Path | None) -> str:
    if file is not None:
        return _first_line(file)
    return _asked("Passphrase for the root key", confirmation=True)


def _unlocked(consortium: ConsortiumHome, file: Path | None) -> Consortium:
    if not consortium.encrypted:
        return consortium.unlock(None)
    return consortium.unlock(_first_line(file) if file else _asked("Passphrase of the root key"))


def _asked(what: str, *, confirmation: bool = False) -> str:
    """What is typed, unseen, at the terminal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", getpass.GetPassWarning)  # without a terminal the typing would be seen
            return str(typer.prompt(what, hide_input=True, confirmation_prompt=confirmation, err=True))
    except getpass.GetPassWarning as blind:
        raise ConfigurationError(
            "there is no terminal here to ask for the root key's passphrase",
            fix="name a file whose first line it is: --passphrase-file FILE",
            who=WhoActs.YOU,
        ) from blind


def _first_line(file: Path) -> str:
    try:
        return file.read_text().splitlines()[0]
    except (OSError, IndexError, UnicodeDecodeError) as broken:
        raise IdentityError(
            f"cannot read a passphrase from {file}", fix="name a file whose first line it is", who=WhoActs.YOU
        ) from broken
