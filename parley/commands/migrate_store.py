"""`parley coordinator migrate-store`: the coordinator's store moves to another database."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from parley import terminal
from parley.terminal import HomeOption, JsonOption

if TYPE_CHECKING:
    from coordinator.store.transfer import Copied

__all__ = ["migrate_store"]


def migrate_store(
    target: Annotated[
        str,
        typer.Option("--to", help="URL of an empty database: postgresql://USER@HOST/DATABASE or sqlite:///PATH."),
    ],
    source: Annotated[
        str, typer.Option("--from", help="URL of the store [default: the one in HOME].", show_default=False)
    ] = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copies the stopped coordinator's store to another database, and compares every row.

    Leave passwords to ~/.pgpass or PGPASSWORD: in a URL, other users of this machine may see them. Stop the coordinator
    first; payloads stay in its folder. Afterwards start it with --store and the new URL; the old store stays as it is.
    """
    from coordinator.store import database, url_in
    from coordinator.store.meaning import shown
    from coordinator.store.transfer import transfer

    source = source or url_in(terminal.home(home).coordinator.folder)
    with _bar(quiet=as_json) as progress:
        copied = transfer(source, target, progress=progress)
    here, there = (shown(database.checked(url)) for url in (source, target))
    if as_json:
        terminal.emit({"from": here, "to": there, "tables": copied})
        return
    terminal.console.print(_table(copied))
    terminal.console.print(f"{there} now tells what {here} tells.", markup=False)
    terminal.console.print(
        f"Next:  parley coordinator serve --store {there}   and never again on the old one", markup=False
    )


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on standard error, a line a table."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=terminal.errors, disable=quiet) as bar:
        tasks: dict[str, TaskID] = {}

        def progress(table: str, done: int, rows: int) -> None:
            if table not in tasks:
                tasks[table] = bar.add_task(table, total=rows)
            bar.update(tasks[table], completed=done)

        yield progress


def _table(copied: "tuple[Copied, ...]") -> Table:
    listed = Table("table", "rows", "digest")
    for each in copied:
        listed.add_row(each.table, str(each.rows), each.digest[:16])
    return listed
