"""`parley site budget` and `parley site ledger`: what a site may give away of its data's privacy, and what it has."""

import re
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from federation.errors import ConfigurationError, StorageError, WhoActs
from federation.job import NAME
from parley.terminal import HomeOption, JsonOption, console, emit, errors, home, moment
from privacy.differential_privacy.events import Unit
from privacy.ledger import Book, BudgetSet
from privacy.ledger_chain import entry_json

if TYPE_CHECKING:
    from client.ledger_store import View
    from parley.homes import MemberHome
    from privacy.spending import Spending, SpentByJob

__all__ = ["budget", "ledger"]

budget = typer.Typer(
    no_args_is_help=True, help="How much privacy each family of data may give away, over all jobs: set, show."
)

_FIRST = "first budget"
_RATE, _STEPS = 0.05, 500
"""What a Rényi order is chosen for where no plan is declared: orders of 8 to 16 serve most jobs that sample."""


class Rule(StrEnum):
    """How charges are summed."""

    GDP = "gdp"
    RDP = "rdp"


# ------------------------------------------------------------------------------------------------------------------ set


@budget.command("set")
def set_budget(
    family: Annotated[str, typer.Argument(help="The data family: a data set's name, unless the policy names another.")],
    epsilon: Annotated[float, typer.Option(help="All jobs together may cost this much; 1 is strict, 8 is usual.")],
    delta: Annotated[float, typer.Option(help="At this delta; at most 1 over ten times the number of records.")],
    rule: Annotated[
        Rule | None,
        typer.Option(
            help="How charges are summed, fixed by the first job: rdp takes every job; gdp only jobs that use all "
            "records in every step, and is tighter for them [default: rdp].",
            show_default=False,
        ),
    ] = None,
    order: Annotated[
        int | None,
        typer.Option(help="For rdp: the one order, 2 to 256 [default: best for --rate, --steps].", show_default=False),
    ] = None,
    rate: Annotated[float, typer.Option(help="The share of records that a step of your jobs will sample.")] = _RATE,
    steps: Annotated[int, typer.Option(help="How many such steps all jobs together will take.", min=1)] = _STEPS,
    unit: Annotated[
        Unit | None,
        typer.Option(
            help="What is protected: one record, all records of one person, or the whole site. Jobs that protect "
            "something coarser count with half their noise, and jobs that protect less are refused [default: record].",
            show_default=False,
        ),
    ] = None,
    highest_rate: Annotated[
        float | None,
        typer.Option(help="The highest rate at which a job may sample records [default: 1].", show_default=False),
    ] = None,
    reason: Annotated[
        str, typer.Option(help="Why it is changed; it stands in the audit log.", show_default=False)
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask; what it allows has been read.")] = False,
    home_: HomeOption = None,
) -> None:
    """Sets or changes what a family of data may give away. Your decision alone: no message can. The agent must not run.

    A family without a budget takes part in no job with differential privacy. What is spent is never given back. Raising
    the budget lets jobs learn more about the same records; lowering it below what is spent stops further rounds.
    """
    from client.ledger import SiteLedger, require_same_rule
    from parley.commands.site import only_agent, sealing
    from parley.commands.site_decisions import confirm

    _require_name(family)
    member = home(home_).site
    own = member.load()
    with only_agent(member.folder), sealing(member.folder, own) as held:
        book = held.vault.book
        before = book.budget(family)
        asked = BudgetSet(
            family,
            epsilon,
            delta,
            _order(before, rule, order, (epsilon, delta, rate, steps)),
            unit or (before.unit if before else Unit.RECORD),
            highest_rate or (before.q_most if before else 1.0),
            reason or ("" if before else _FIRST),
        )
        _ = asked.budget
        require_same_rule(book, asked)
        if before is not None and not reason:
            raise ConfigurationError(
                f"{family!r} has a budget ({_said(before)}), and a change of it needs a reason",
                fix='say why, as in --reason "a second study was approved on ..."',
                who=WhoActs.YOU,
            )
        for line in (*_unknown(member, family), *_meaning(book, before, asked)):
            errors.print(line, markup=False, highlight=False)
        confirm("Is that to be so?", yes=yes)
        SiteLedger(held.vault, held.audit).set_budget(asked)
    console.print(f"{family}: {_said(asked)}. It is in the ledger and in the audit log.", markup=False, highlight=False)
    console.print("Next:  parley site run")


def _require_name(family: str) -> None:
    """Returns only for what can be a data family's name.

    Raises:
        ConfigurationError: It cannot.
    """
    if re.fullmatch(NAME, family) is None:
        raise ConfigurationError(
            f"{family[:70]!r} can be no data family's name",
            fix="give the name of a data set, or of the family that the policy says it is of",
            who=WhoActs.YOU,
        )


def _order(
    before: BudgetSet | None, rule: Rule | None, order: int | None, plan: tuple[float, float, float, int]
) -> int | None:
    """The order of the budget's rule, None for gdp: what was said, what it was, or the best for what is planned."""
    if before is not None and rule is None and order is None:
        return before.order
    if rule is Rule.GDP or order is not None:
        if rule is Rule.GDP and order is not None:
            raise ConfigurationError("the rule gdp has no order", fix="leave --order out", who=WhoActs.YOU)
        return order
    if before is not None and before.order is not None:
        return before.order
    from privacy.spending import order_for

    return order_for(*plan)


def _unknown(member: "MemberHome", family: str) -> Iterator[str]:
    """That no registered data set is of this family: a slip, perhaps."""
    from client.data.registry import DataSets
    from parley.commands.site import read_policy

    of = read_policy(member).secure_aggregation.family
    known = sorted({of(each.name) for each in DataSets(member.folder).list()})
    if family not in known:
        yield f"No data set that is registered here is of the family {family!r} (there are: {', '.join(known) or '-'})."


def _meaning(book: Book, before: BudgetSet | None, asked: BudgetSet) -> Iterator[str]:
    yield f"{asked.family!r} may give away {_said(asked)}, over all jobs, past and to come."
    if before is None:
        return
    yield f"Until now: {_said(before)}."
    if not book.written(asked.family):
        return
    from privacy.spending import spending

    now = spending(book, asked.family, asked)
    yield f"Charged so far: epsilon = {now.epsilon:.4g}; with what open jobs were promised: {now.epsilon_promised:.4g}."
    if now.taken > 1:
        yield "That is more than the budget allows: no further round is charged, in any job."
    elif asked.epsilon > before.epsilon:
        yield "Jobs will be able to learn more about the same records than they were told when their data were given."


def _said(found: BudgetSet) -> str:
    most = "" if found.q_most == 1 else f", rates up to {found.q_most:g}"
    return f"epsilon = {found.epsilon:g} at delta = {found.delta:g} for one {found.unit}, summed by {found.rule}{most}"


# ----------------------------------------------------------------------------------------------------------------- show


@budget.command("show")
def show(home_: HomeOption = None, as_json: JsonOption = False) -> None:
    """Shows the budgets, what is left of each, and every change with its reason. Beside a running agent, too."""
    view = _looked(home(home_).site)
    book = view.book
    found = {each: _spending(book, each) for each in book.families}
    changes = [line for line in view.lines if isinstance(line.entry, BudgetSet)]
    if as_json:
        history = [{"line": line.number, "at": line.at, **entry_json(line.entry)} for line in changes]
        emit({"families": [_family(book, *each) for each in found.items()], "changes": history})
        return
    if not found:
        console.print("No budget is set yet. Next:  parley site budget set FAMILY --epsilon 8 --delta 1e-5")
    for name, spent in found.items():
        _head(name, spent)
        for line in changes:
            if isinstance(line.entry, BudgetSet) and line.entry.family == name:
                told = f"  {moment(line.at)}  {_said(line.entry)}: {line.entry.reason or '-'}"
                console.print(told, markup=False, highlight=False)


def _looked(member: "MemberHome") -> "View":
    from client.vault import ledger_in

    member.load()
    return ledger_in(member.folder)


def _spending(book: Book, family: str) -> "Spending | None":
    from privacy.spending import spending

    return None if book.budget(family) is None else spending(book, family)


def _head(family: str, spent: "Spending | None") -> None:
    if spent is None:
        console.print(f"[bold]{escape(family)}[/]: no budget is set; no further job with privacy is accepted")
        return
    console.print(f"[bold]{escape(family)}[/]: {_said(spent.budget)}", highlight=False)
    told = f"  charged  epsilon = {spent.epsilon:.4g}, {spent.used:.1%} of the budget"
    if spent.taken != spent.used:
        told += f"; with what open jobs were promised: {spent.epsilon_promised:.4g}, {spent.taken:.1%}"
    console.print(told, highlight=False)
    left = "nothing: no further round is charged" if spent.taken > 1 else f"{max(0.0, 1 - spent.taken):.1%}"
    console.print(f"  left     {left}", highlight=False)
    if spent.added_delta:
        console.print(f"  rounding and sampling have added {spent.added_delta:.3g} to delta", highlight=False)


# --------------------------------------------------------------------------------------------------------------- ledger


def ledger(
    plot: Annotated[
        Path | None, typer.Option(help="Draw epsilon over time into this SVG file.", show_default=False)
    ] = None,
    home_: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows what this site's data have spent of their privacy, by job, and checks every line. Beside an agent, too.

    Each line names the digest of the line before it: the first changed line is named, and the exit code is 1. Note the
    last line's digest elsewhere now and then; it must still stand there later.

    If a patient asks for erasure after training: remove the record from the table; no later round reads it. Jobs with
    exact sums take the new version once ten rows or more have changed (`parley site dataset accept`), since the
    difference of two sums would show the one that went. What was charged stays charged: a model that has left cannot
    be made to forget. One trained with differential privacy would have come out nearly alike without the record, and
    its epsilon says how nearly; one trained without it promises nothing of the kind: ask the consortium to train anew.
    """
    view = _looked(home(home_).site)
    book = view.book
    found = {each: _spending(book, each) for each in book.families}
    if plot is not None:
        _plot(view, tuple(name for name, spent in found.items() if spent is not None), plot)
    if as_json:
        emit(_told(view, book, found))
    else:
        for name, spent in found.items():
            _head(name, spent)
            if spent is not None and spent.jobs:
                console.print(_table(spent.jobs, book))
        _chain(view)
        if plot is not None:
            console.print(f"Drawn into {plot}", markup=False, highlight=False)
    if view.broken is not None:
        raise typer.Exit(1)


def _chain(view: "View") -> None:
    tail = view.tail
    if view.broken is not None:
        console.print(f"BROKEN: {view.broken}", markup=False, highlight=False)
        console.print(f"Whole before it: {tail.number} lines. To mend it:  parley site restore")
    elif not tail.number:
        console.print("Nothing is in the ledger yet. Next:  parley site budget set FAMILY --epsilon 8 --delta 1e-5")
    else:
        console.print(f"Whole: {tail.number} lines. To be noted elsewhere: {tail.digest.hex()}", highlight=False)


def _table(jobs: tuple["SpentByJob", ...], book: Book) -> Table:
    table = Table(Column("job", no_wrap=True), "purpose", "rounds", "promised", "rate", "z", "epsilon", "could be paid")
    for each in jobs:
        event = each.event
        table.add_row(
            event.job.hex()[:12],
            event.purpose.value,
            str(each.charged),
            "over" if book.promise(event.job) is None else str(each.promised),
            f"{event.q:g}",
            f"{event.z:.5g}",
            f"{each.epsilon:.4g}",
            f"{each.more} more",
        )
    return table


def _told(view: "View", book: Book, found: "dict[str, Spending | None]") -> dict[str, object]:
    tail = view.tail
    return {
        "whole": view.broken is None,
        "lines": tail.number,
        "head": tail.digest,
        "broken": view.broken,
        "families": [_family(book, *each) for each in found.items()],
        "entries": [
            {"line": line.number, "at": line.at, **entry_json(line.entry), "digest": line.digest.hex()}
            for line in view.lines
        ],
    }


def _family(book: Book, name: str, spent: "Spending | None") -> dict[str, object]:
    if spent is None:
        return {"family": name, "budget": None, "rounds": book.rounds(name)}
    return {
        "family": name,
        "budget": entry_json(spent.budget),
        "epsilon": spent.epsilon,
        "epsilon_promised": spent.epsilon_promised,
        "used": spent.used,
        "taken": spent.taken,
        "added_delta": spent.added_delta,
        "jobs": [
            {
                "job": each.event.job,
                "purpose": each.event.purpose,
                "rounds": each.charged,
                "promised": each.promised,
                "q": each.event.q,
                "z": each.event.z,
                "epsilon": each.epsilon,
                "more": each.more,
            }
            for each in spent.jobs
        ],
    }


def _plot(view: "View", families: tuple[str, ...], file: Path) -> None:
    """Draws each family's epsilon over time.

    Raises:
        ConfigurationError: The file is not to be an SVG, or there is nothing to draw.
        StorageError: It cannot be written.
    """
    from parley.step_chart import Series, drawn
    from privacy.spending import over_time

    if file.suffix.lower() != ".svg":
        raise ConfigurationError(
            f"{file} would hold an SVG picture", fix="name a file that ends in .svg", who=WhoActs.YOU
        )
    if not families:
        raise ConfigurationError("there is no budget to draw", fix="set one: parley site budget set", who=WhoActs.YOU)
    panels = []
    with errors.status("Drawing ..."):
        for name in families:
            points = tuple((each.at, each.epsilon, each.allowed) for each in over_time(view.lines, name))
            panels.append(Series(f"{name}: epsilon spent (line) and allowed (dashed)", points))
    try:
        file.write_text(drawn(panels, f"Privacy ledger, {moment(time.time())} UTC"), encoding="utf-8")
    except OSError as refused:
        raise StorageError(f"cannot write {file}: {refused.strerror}", fix="name another file with --plot") from refused
