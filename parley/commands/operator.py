"""`parley operator`: become one who submits and watches jobs."""

from typing import Annotated

import typer

from parley.commands.consortium import read_string
from parley.commands.site import join_as
from parley.terminal import HomeOption, console, home

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Become an operator: one who submits and watches jobs (researcher).")


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
    """Makes an operator's keys here, asks to join, and waits until the administrator approves."""
    join_as(home(home_).operator, read_string(invitation), proxy)
    console.print("Next:  parley job new heart.toml   and   parley job submit heart.toml")
