"""What every command shares: where the home is, how to speak to a person or a machine, and what exit codes mean.

Exit codes: 0 done; 1 refused, and nothing changed; 2 the command line or a file is wrong; 3 the other side cannot be
reached; 4 a job ended without success; 130 interrupted.
"""

import asyncio
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Coroutine
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from federation.errors import ConfigurationError, DataContractError, ParleyError, UnreachableError
from parley.homes import Home, home_folder

__all__ = [
    "HomeOption",
    "JsonOption",
    "ago",
    "complain",
    "console",
    "emit",
    "errors",
    "exit_code",
    "home",
    "logs",
    "moment",
    "run",
]

T = TypeVar("T")

console = Console(soft_wrap=True)
"""For people, on standard output."""
errors = Console(stderr=True, soft_wrap=True)
"""For people, on standard error."""

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        help="Folder of this machine's Parley files [default: $PARLEY_HOME, else ~/.parley].",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def home(given: Path | None) -> Home:
    """This machine's Parley files."""
    return Home(home_folder(given, os.environ))


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end."""
    return asyncio.run(work)


def emit(value: object) -> None:
    """Prints a value as JSON: dataclasses as objects, bytes as hexadecimal."""
    print(json.dumps(value, default=_plain, indent=2))


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(type(value).__name__)


def moment(seconds: float) -> str:
    """A time as people read it, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") if seconds else "-"


def ago(seconds: float) -> str:
    """How long ago a time was, in words."""
    if not seconds:
        return "never"
    passed = max(0.0, time.time() - seconds)
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (129_600, 3600, "h")):
        if passed < limit:
            return f"{passed / unit:.0f} {name} ago"
    return f"{passed / 86_400:.0f} days ago"


def logs(verbose: bool) -> None:
    """Sends the log to standard error, a line an event, times in UTC."""
    formatter = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s  %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)
    for noisy in ("grpc", "alembic", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def exit_code(error: ParleyError) -> int:
    """The exit code that tells a script what kind of error it was."""
    if isinstance(error, ConfigurationError | DataContractError):
        return 2
    return 3 if isinstance(error, UnreachableError) else 1


def complain(error: ParleyError, as_json: bool) -> None:
    """Says what was refused, who must act, and how."""
    if as_json:
        told = {"kind": type(error).__name__, "problem": error.problem, "who": error.who.value, "fix": error.fix}
        print(json.dumps({"error": told}, indent=2))
        return
    word = "unreachable" if isinstance(error, UnreachableError) else "refused"
    errors.print(f"[red]{word}:[/] {_escaped(error.problem)}")
    if error.fix:
        errors.print(f"[bold]to fix[/] ({error.who.value}): {_escaped(error.fix)}")


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
