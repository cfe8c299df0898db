"""`parley privacy`: what noise a guarantee takes before a job is written, and whether a model's card says the truth."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from federation.errors import ConfigurationError, StorageError, WhoActs
from parley.terminal import JsonOption, console, emit, errors

if TYPE_CHECKING:
    from privacy.differential_privacy.accounting import Epsilon

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, help="Differential privacy before and after a job: plan its noise, verify a model's card."
)

_POINTS = 10
"""Of the curve of epsilon over steps."""


# ----------------------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class _Setting:
    """What a job's author chooses."""

    epsilon: float
    delta: float
    rate: float
    steps: int

    @property
    def others(self) -> "tuple[tuple[str, _Setting], ...]":
        """One of them halved or doubled."""
        rate, steps = self.rate, self.steps
        found = [
            (f"steps {factor}", _Setting(self.epsilon, self.delta, rate, max(1, round(steps * times))))
            for factor, times in (("/ 2", 0.5), ("x 2", 2))
        ]
        found += [
            (f"rate {factor}", _Setting(self.epsilon, self.delta, rate * times, steps))
            for factor, times in (("/ 2", 0.5), ("x 2", 2))
            if rate * times <= 1
        ]
        found += [
            (f"epsilon {factor}", _Setting(self.epsilon * times, self.delta, rate, steps))
            for factor, times in (("/ 2", 0.5), ("x 2", 2))
        ]
        return tuple(found)


@app.command()
def plan(
    epsilon: Annotated[float, typer.Option(help="What the whole job may cost; 1 is strict, 8 is usual.")],
    delta: Annotated[float, typer.Option(help="At this delta; at most 1 over ten times the number of records.")],
    rate: Annotated[float, typer.Option(help="The share of records that each step samples; 1 takes all of them.")],
    steps: Annotated[int, typer.Option(help="Steps of the whole job.", min=1)],
    rows: Annotated[
        int, typer.Option(help="About how many records there are; tells the expected batch.", min=0, show_default=False)
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Says how much noise a guarantee takes, how epsilon grows over the steps, and what other settings would cost.

    The noise multiplier z is in units of the clip norm: each step's sum of clipped gradients gets Gaussian noise of z
    times that. Against the size of the batch it is what costs accuracy: more records, or fewer steps, cost less.
    """
    from privacy.differential_privacy.accounting import epsilon as proved
    from privacy.differential_privacy.calibration import calibrated, require_delta
    from privacy.differential_privacy.events import Releases

    asked = _Setting(epsilon, delta, rate, steps)
    if rows:
        require_delta(delta, rows)
    shown = sorted({max(1, round(steps * point / _POINTS)) for point in range(1, _POINTS + 1)})
    with _bar(len(shown) + len(asked.others) + 1, quiet=as_json) as done:
        z = calibrated(epsilon, delta, rate, steps)
        done()
        curve: list[tuple[int, Epsilon]] = []
        for step in shown:
            curve.append((step, proved((Releases(rate, z, step),), delta)))
            done()
        others: list[tuple[str, _Setting, float]] = []
        for name, each in asked.others:
            others.append((name, each, calibrated(each.epsilon, each.delta, each.rate, each.steps)))
            done()
    if as_json:
        emit(_told(asked, z, rows, curve, others))
    else:
        _say(asked, z, rows, curve, others)


@contextmanager
def _bar(total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """Counts what is done, with a bar on standard error: it takes some ten seconds."""
    if quiet:
        yield lambda: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("Accounting", total=total)
        yield lambda: bar.advance(task)


def _say(
    asked: _Setting,
    z: float,
    rows: int,
    curve: "list[tuple[int, Epsilon]]",
    others: list[tuple[str, _Setting, float]],
) -> None:
    last = curve[-1][1]
    _print(f"noise multiplier z = {z:g}, for epsilon = {asked.epsilon:g} at delta = {asked.delta:g}")
    if rows:
        _print(f"expected batch     {asked.rate * rows:.6g} of {rows} records in each of {asked.steps} steps")
        _print(f"noise per record   {z / (asked.rate * rows):.3g} clip norms in each coordinate of a mean gradient")
    _print(f"printed            epsilon = {last.value:.6g} ({last.method})")
    _print(f"cross-check        epsilon = {last.renyi:.6g} (Rényi DP at order {last.order}); it also holds")
    _print("                   for steps chosen by what earlier ones showed, as a site's budget of that order sums it")
    table = Table("steps", "epsilon", "Rényi DP")
    for step, found in curve:
        table.add_row(str(step), f"{found.value:.4g}", f"{found.renyi:.4g}")
    console.print(table)
    table = Table("instead", "epsilon", "rate", "steps", "z", *(("batch", "noise per record") if rows else ()))
    for name, each, noise in (("as asked", asked, z), *others):
        batch = each.rate * rows
        more = (f"{batch:.5g}", f"{noise / batch:.3g}") if rows else ()
        table.add_row(name, f"{each.epsilon:g}", f"{each.rate:g}", str(each.steps), f"{noise:g}", *more)
    console.print(table)


def _print(text: str) -> None:
    console.print(text, markup=False, highlight=False)


def _told(
    asked: _Setting,
    z: float,
    rows: int,
    curve: "list[tuple[int, Epsilon]]",
    others: list[tuple[str, _Setting, float]],
) -> dict[str, object]:
    last = curve[-1][1]
    return {
        "asked": asked,
        "z": z,
        "batch": asked.rate * rows if rows else None,
        "epsilon": last.value,
        "method": last.method,
        "renyi": {"epsilon": last.renyi, "order": last.order},
        "curve": [{"steps": step, "epsilon": found.value, "renyi": found.renyi} for step, found in curve],
        "instead": [{"change": name, "setting": each, "z": noise} for name, each, noise in others],
    }


# --------------------------------------------------------------------------------------------------------------- verify


@app.command()
def verify(
    card: Annotated[Path, typer.Argument(help="A model's card.json, or the folder that `parley model get` made.")],
    as_json: JsonOption = False,
) -> None:
    """Recomputes a model card's privacy statement from the charged rounds that it lists. Ends with 0 only if it holds.

    It shows that the words and numbers follow from those rounds. That the rounds are all there were is for each site to
    say: `parley site ledger` lists what it charged.
    """
    from privacy.differential_privacy.card import differences

    file = card / "card.json" if card.is_dir() else card
    found = _section(file)
    with errors.status("Accounting ..."):
        different = differences(found)
    if as_json:
        emit({"card": file, "holds": not different, "differences": different, "statement": found.get("statement")})
    elif different:
        _print(f"{file} does NOT hold:")
        for each in different:
            _print(f"  {each}")
    else:
        _print(f"{file} holds: its events come to what it says.")
        _print(str(found["statement"]))
    if different:
        raise typer.Exit(1)


def _section(file: Path) -> dict[str, object]:
    """The section about differential privacy of the card in a file.

    Raises:
        StorageError: The file cannot be read.
        ConfigurationError: It is no card, or a card that promises no differential privacy.
    """
    try:
        content = json.loads(file.read_bytes())
    except OSError as refused:
        raise StorageError(f"cannot read {file}: {refused.strerror}", fix="name a model's card.json") from refused
    except (ValueError, RecursionError) as broken:
        raise ConfigurationError(f"{file} is no JSON", fix="name a model's card.json", who=WhoActs.YOU) from broken
    match content:
        case {"privacy": {"differential_privacy": {**section}}}:
            return {str(key): value for key, value in section.items()}
        case {"privacy": {**_rest}}:
            raise ConfigurationError(
                f"{file} promises no differential privacy: there is nothing to verify",
                fix="train with churn dp, or with DP-SGD at the sites, for a model that does",
            )
        case _:
            raise ConfigurationError(f"{file} is no model's card", fix="name a model's card.json", who=WhoActs.YOU)
