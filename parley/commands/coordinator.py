"""`parley coordinator`: set up and run the server."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from importlib import metadata
from typing import Annotated

import typer

from parley.commands.consortium import read_string
from parley.commands.migrate_store import migrate_store
from parley.commands.service import coordinator_service
from parley.homes import MemberHome, coordinator_request
from parley.terminal import HomeOption, console, errors, home, logs, run
from privacy import identity

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Set up and run the coordinator.")
app.command("migrate-store")(migrate_store)

log = logging.getLogger("parley.coordinator")

app.command("service")(coordinator_service)


@app.command()
def init(
    name: Annotated[str, typer.Option(help="Its member name, as the consortium's administrator chose it.")] = "hub",
    organisation: Annotated[str, typer.Option(help="Who runs it [default: NAME].", show_default=False)] = "",
    home_: HomeOption = None,
) -> None:
    """Makes the coordinator's keys here and prints the request for the consortium's administrator."""
    member = home(home_).coordinator
    request = member.request(name, organisation or name, metadata.version("parley-fl"))
    prints = identity.fingerprints(coordinator_request(request))
    errors.print(f"To read out to the administrator:\n  TLS key       {prints.tls}\n  protocol key  {prints.protocol}")
    errors.print("The administrator runs:  parley consortium admit REQUEST")
    print(request)


@app.command()
def install(
    credential: Annotated[str, typer.Argument(help="What `parley consortium admit` printed, or a file that holds it.")],
    home_: HomeOption = None,
) -> None:
    """Installs the credential that the consortium's administrator made."""
    me = home(home_).coordinator.install_text(read_string(credential), int(time.time()))
    console.print(
        f"[bold]{me.statement.name}[/] is the coordinator of {me.root.consortium}. Next:  parley coordinator serve"
    )


@app.command()
def serve(
    listen: Annotated[
        str,
        typer.Option(
            help="host:port to listen on [default: every address, the port in the invitations].", show_default=False
        ),
    ] = "",
    store: Annotated[
        str,
        typer.Option(help="Store's SQLAlchemy URL [default: an SQLite file in HOME/coordinator].", show_default=False),
    ] = "",
    health_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the health probe, on 127.0.0.1 only; 0: none.")
    ] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
    home_: HomeOption = None,
) -> None:
    """Runs the coordinator until it is told to end; jobs go on from their last committed step."""
    logs(verbose)
    if listen:
        identity.require_address(listen)
    member = home(home_).coordinator
    run(_serve(member, listen, store, health_port))


async def _serve(member: MemberHome, listen: str, store: str, health_port: int) -> None:
    from coordinator.coordinator import Coordinator
    from coordinator.members import CoordinatorIdentity
    from coordinator.service import serve as listening
    from coordinator.store import Store, url_in

    own = member.load()
    identity.verify_statement(
        own.statement, own.root.public_key, own.root.consortium, int(time.time()), own.revocations
    )
    me = CoordinatorIdentity(
        own.root.consortium,
        own.root.pem,
        own.certificate,
        own.keys.tls_pem,
        own.keys.protocol,
        own.statement,
        own.revocations,
    )
    address = listen or f"0.0.0.0:{own.connection.address.rpartition(':')[2]}"
    with Store(store or url_in(member.folder)) as opened:
        coordinator = Coordinator(member.folder, opened, me)
        coordinator.start()
        server = await listening(coordinator, address, health_port)
        name, number = own.statement.name, os.getpid()
        log.info("%s serves %s on %s (TLS 1.3, mutual), process %d", name, me.consortium, address, number)
        ended = asyncio.Event()
        for signalled in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):  # Windows has none: Ctrl-C interrupts asyncio.run there
                asyncio.get_running_loop().add_signal_handler(signalled, ended.set)
        try:
            await ended.wait()
        finally:
            await coordinator.leave()  # the sites are told; they come back by themselves
            await server.stop(grace=2)
            await coordinator.close()
            log.info("ended")
