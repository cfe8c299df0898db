"""`parley audit`: what stands in a member's audit log, whether it is whole, and who contradicted themselves in it."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import typer
from pydantic import TypeAdapter
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from federation import audit
from federation.audit import Entry, Verdict
from federation.errors import ConfigurationError, RemoteProtocolError, StorageError, WhoActs
from parley.terminal import HomeOption, JsonOption, console, emit, errors, home, moment

__all__ = ["app", "digest_of", "say"]

app = typer.Typer(no_args_is_help=True, help="The log that a site or the coordinator keeps of all that was signed.")

LogArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[LOG]", help="The log [default: audit.log of the member in HOME].", show_default=False),
]

_PATIENCE = 2.0
_HEX = 64


# --------------------------------------------------------------------------------------------------------------- verify


@app.command()
def verify(
    log: LogArgument = None,
    head: Annotated[
        str, typer.Option(help="A head noted earlier: it must still stand in the log.", show_default=False)
    ] = "",
    at: Annotated[int, typer.Option(help="The line at which it was noted; 0: any.", min=0, show_default=False)] = 0,
    home_: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Walks the whole chain and names the first broken line. Ends with 0 only if the log is whole.

    The chain shows what was changed, removed or moved. It cannot show lines cut off at its end, or a log written anew:
    note the head and its line somewhere else now and then, and give them back with --head and --at.
    """
    noted = digest_of(head, at)
    path = _own(log, home_)
    with _bar(path, quiet=as_json) as progress:
        verdict = audit.verify(path, noted, progress)
    kept = noted is None or (verdict.noted_at is not None and at in {0, verdict.noted_at})
    if as_json:
        emit(_told(path, verdict, noted, kept=kept))
    else:
        _say(path, verdict)
        if noted is not None:
            _say_noted(verdict, at, kept=kept)
    if not (verdict.whole and kept):
        raise typer.Exit(1)


def digest_of(head: str, at: int = 0) -> bytes | None:
    """The digest that was noted; None if none is given.

    Raises:
        ConfigurationError: It is no digest, or a line is given without one.
    """
    if not head and not at:
        return None
    try:
        digest = bytes.fromhex(head.strip())
    except ValueError:
        digest = b""
    if len(digest) * 2 != _HEX:
        raise ConfigurationError(
            f"--head {head!r} is no digest" if head else "--at says where a head was noted, and --head is missing",
            fix=f"give the {_HEX} hexadecimal digits that `parley audit verify` printed",
            who=WhoActs.YOU,
        )
    return digest


def _told(path: Path, verdict: Verdict, noted: bytes | None, *, kept: bool) -> dict[str, object]:
    return {
        "log": path,
        "name": verdict.name,
        "whole": verdict.whole,
        "lines": verdict.lines,
        "head": verdict.head,
        "broken": verdict.broken,
        "backwards": verdict.backwards,
        "first_backwards": verdict.first_backwards,
        "noted": None if noted is None else {"head": noted, "line": verdict.noted_at, "stands": kept},
    }


def _say(path: Path, verdict: Verdict) -> None:
    whose = "nobody's log" if verdict.name is None else f"the log of {verdict.name.member} ({verdict.name.purpose})"
    say(f"{path}: {whose}")
    if verdict.broken is None:
        say(f"Whole: {_lines(verdict.lines)}, the last of {moment(verdict.at)} UTC.")
        say("To be noted somewhere else, as proof against a cut at the end or a log written anew:")
        say(f"  line {verdict.lines}  head {verdict.head.hex()}")
    else:
        broken = verdict.broken
        say(f"BROKEN at line {broken.line}")
        say(f"  expected  {broken.expected}\n  found     {broken.found}")
        say(f"Whole before it: {_lines(verdict.lines)}. Nothing is known of what stands behind it.")
    if verdict.backwards:
        say(f"The clock was set back at {_lines(verdict.backwards)}, first at line {verdict.first_backwards}.")


def _lines(count: int) -> str:
    return f"{count} line{'' if count == 1 else 's'}"


def _say_noted(verdict: Verdict, at: int, *, kept: bool) -> None:
    if kept:
        say(f"The head noted earlier stands at line {verdict.noted_at}: nothing up to it was changed.")
    elif verdict.noted_at is not None:
        say(f"The head noted earlier stands at line {verdict.noted_at}, not at line {at}: one of the notes is wrong.")
    else:
        say("The head noted earlier is NOT in this log: it was cut off, written anew, or it is another log's.")


def say(text: str) -> None:
    """Prints text that others may have written: no control character in it reaches the terminal."""
    shown = "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text)
    console.print(shown, markup=False, highlight=False)


@contextmanager
def _bar(path: Path, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Takes how many bytes are done; a bar on standard error for what takes longer than two seconds."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=errors)
    task = bar.add_task(path.name, total=path.stat().st_size if path.exists() else None)
    begun, shown = time.monotonic(), False

    with ExitStack() as stack:

        def progress(done: int) -> None:
            nonlocal shown
            if not shown and not quiet and time.monotonic() - begun >= _PATIENCE:
                stack.enter_context(bar)
                shown = True
            bar.update(task, completed=done)

        yield progress


# ----------------------------------------------------------------------------------------------------------------- show


@app.command()
def show(
    log: LogArgument = None,
    kind: Annotated[
        str, typer.Option(help="Only entries of this kind: sent, received, evidence, terms ...", show_default=False)
    ] = "",
    last: Annotated[int, typer.Option(help="Only the last N of them; 0: all.", min=0, show_default=False)] = 0,
    home_: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Says in plain words what stands in the log; with --json, one object a line."""
    found = (each for each in audit.entries(_own(log, home_)) if kind in {"", each.kind})
    for entry in deque(found, last) if last else found:
        if as_json:
            print(TypeAdapter(_Row).dump_json(_Row.of(entry)).decode())
        else:
            say(f"{entry.line:>7}  {moment(entry.at)}  {entry.kind:<9} {_words(entry)}")


@dataclass(frozen=True, slots=True)
class _Row:
    """An entry for programs; bytes in hexadecimal."""

    line: int
    at: float
    kind: str
    words: str
    content: str
    digest: str

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """The row of an entry."""
        return cls(entry.line, entry.at, entry.kind, _words(entry), entry.content.hex(), entry.digest.hex())


def _words(entry: Entry) -> str:
    """What RosterSum says of its entries, text as it stands, and of anything else how long it is."""
    from privacy.secure_aggregation.rostersum import logged

    try:
        held = logged.read(entry.kind, entry.content)
    except RemoteProtocolError as wrong:
        return wrong.problem
    if held is not None:
        return logged.words(held)
    text = entry.content.decode(errors="replace")
    return text if text.isprintable() and "\ufffd" not in text else f"{len(entry.content)} bytes"


# ---------------------------------------------------------------------------------------------------------------- proof


@app.command("proof")
def prove(
    logs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[LOG]...", help="Logs [default: audit.log of the members in HOME].", show_default=False
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder in which each contradiction becomes a file.", show_default=False)
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Check such a file instead, by itself alone.", show_default=False)
    ] = None,
    home_: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Finds pairs of signed messages that no honest party signs both of, and makes each a file that proves it.

    Give the logs of several members to find what no single one shows: a coordinator that tells two sites different
    things.
    """
    from parley.commands import audit_proof

    if check is not None:
        audit_proof.check(check, as_json=as_json)
    else:
        audit_proof.find(logs or _owns(home_), to, as_json=as_json)


# ------------------------------------------------------------------------------------------------------------ which log


def _own(given: Path | None, home_: Path | None) -> Path:
    """The log that is meant.

    Raises:
        StorageError: There is none in the home.
        ConfigurationError: There are two.
    """
    if given is not None:
        return given
    found = _owns(home_)
    if len(found) > 1:
        raise ConfigurationError(
            f"this home has {len(found)} audit logs: {', '.join(map(str, found))}", fix="name one", who=WhoActs.YOU
        )
    return found[0]


def _owns(home_: Path | None) -> list[Path]:
    where = home(home_)
    found = [member.folder / audit.FILE for member in (where.site, where.coordinator)]
    there = [path for path in found if path.exists()]
    if not there:
        raise StorageError(
            f"no member's audit log is in {where.folder}",
            fix="name the file, or the home with --home; a log begins when a member first runs",
        )
    return there
