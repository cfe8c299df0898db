"""`parley job check` and `parley job new`: a job file is told apart and written without running anything."""

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, assert_never

import typer
from rich.console import Console
from rich.table import Table

from federation import job as job_file
from federation.errors import ConfigurationError, ParleyError
from federation.job import (
    CategoricalColumn,
    Cohort,
    Column,
    Frozen,
    Job,
    JobProblem,
    NumericColumn,
    Privacy,
    Rounds,
    Training,
)

__all__ = ["check", "example", "load", "new", "read"]

_REFUSED = 2
"""Exit code: what was given is not right, and nothing was changed."""


def read(file: Path) -> str:
    """The text of a job file, byte for byte (its digest names the job).

    Raises:
        ConfigurationError: There is no such file, or it is no text of at most 1 MiB.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(job_file.LARGEST + 1)
    except OSError as refused:
        raise ConfigurationError(
            f"cannot read {file}: {refused.strerror}", fix="name a job file; `parley job new FILE` writes an example"
        ) from refused
    if len(content) > job_file.LARGEST:
        raise ConfigurationError(
            f"{file} has more than {job_file.LARGEST} bytes, which no job file has", fix="name a job file"
        )
    try:
        return content.decode()
    except UnicodeDecodeError as broken:
        line = content.count(b"\n", 0, broken.start) + 1
        raise ConfigurationError(f"{file}:{line}: not UTF-8 text", fix="save the file as UTF-8") from broken


def load(file: Path) -> tuple[Job, str]:
    """The job in `file`, and its text.

    Raises:
        ConfigurationError: The file cannot be read, or with every problem of the job, one a line.
    """
    text = read(file)
    return job_file.parse(text, str(file)), text


def example() -> str:
    """A complete job file with every key's meaning, default and choices."""
    return resources.files("parley.commands").joinpath("example_job.toml").read_text(encoding="utf-8")


def check(
    file: Annotated[Path, typer.Argument(help="The job file.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")] = False,
) -> None:
    """Tell everything that is wrong with a job file, or in plain words what it asks for. Nothing is run or sent."""
    text: str | None = None
    job: Job | None = None
    try:
        text = read(file)
    except ParleyError as unreadable:
        problems: tuple[JobProblem, ...] = (JobProblem("", 0, str(unreadable)),)
        told = [str(unreadable)]
    else:
        job, problems = job_file.check(text)
        told = [problem.told(str(file)) for problem in problems]
    if as_json:
        print(json.dumps(_report(text, job, problems), indent=2))
    elif job is not None and text is not None:
        Console(markup=False, highlight=False).print(_summary(job, job_file.digest(text)))
    else:
        _complain(*told)
    if problems:
        raise typer.Exit(_REFUSED)


def new(
    file: Annotated[
        Path | None, typer.Argument(help="Where to write; standard output if left out.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if there is one.")] = False,
) -> None:
    """Write a commented example of a job file: every key with its meaning, default and choices."""
    if file is None:
        print(example(), end="")
        return
    try:
        with file.open("w" if force else "x", encoding="utf-8", newline="\n") as opened:
            opened.write(example())
    except FileExistsError:
        _complain(f"{file} is there already and stays as it is. To overwrite it, add --force")
        raise typer.Exit(_REFUSED) from None
    except OSError as refused:
        _complain(f"cannot write {file}: {refused.strerror}. Name a file in a folder that you may write to")
        raise typer.Exit(_REFUSED) from None
    Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(
        f"Wrote {file}. Edit it, then: parley job check {file}"
    )


def _complain(*lines: str) -> None:
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line, style="red")


def _report(text: str | None, job: Job | None, problems: tuple[JobProblem, ...]) -> Mapping[str, Any]:
    """What `--json` prints."""
    return {
        "ok": job is not None,
        "problems": [
            {"path": found.path, "line": found.line, "problem": found.problem, "expected": found.expected}
            for found in problems
        ],
        "digest": job_file.digest(text).hex() if text is not None else None,
        "job": job.model_dump(mode="json") if job is not None else None,
    }


def _summary(job: Job, digest: bytes) -> Table:
    """The job in plain words, a row for each thing that a member of the consortium asks."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows = (
        ("Job", f"{job.name}: no problems found"),
        ("About", job.description),
        ("Digest", digest.hex()),
        ("Task", f"{job.task.kind}{_settings(job.task, 'kind')}"),
        ("Data", f'data set "{job.data.dataset}", at least {job.data.minimum_rows} rows at each site'),
        ("Label", _label(job)),
        ("Columns", "\n".join(_column(column) for column in job.data.columns)),
        ("Test rows", _test_rows(job)),
        ("Model", f"{job.model.name}{_settings(job.model, 'name')}"),
        ("Training", _training(job.training)),
        ("Strategy", f"{job.strategy.name}{_settings(job.strategy, 'name')}"),
        ("Rounds", _rounds(job.rounds)),
        ("Cohort", _cohort(job.cohort)),
        ("Who sees what", _sight(job)),
        ("Guarantee", _guarantee(job)),
    )
    for name, words in rows:
        if words:
            table.add_row(name, words)
    return table


def _settings(settings: Frozen, but: str) -> str:
    """A plug-in's own settings, those left out with their defaults, as `: key value, key value`."""
    told = [
        f"{key} {', '.join(map(str, value)) if isinstance(value, tuple) else value}"
        for key, value in settings
        if key != but and value not in (None, ())
    ]
    return f": {', '.join(told)}" if told else ""


def _label(job: Job) -> str:
    above = job.data.label_above
    return job.data.label if above is None else f"whether {job.data.label} is above {above:g}"


def _column(column: Column) -> str:
    match column:
        case NumericColumn():
            low, high = column.range
            kind = f"number from {low:g} to {high:g}{' ' if column.unit else ''}{column.unit}"
            zero = ", 0 means missing" if column.zero_is_missing else ""
        case CategoricalColumn():
            kind, zero = f"one of {', '.join(map(str, column.categories))}", ""
        case _:
            assert_never(column)
    return f"{column.name}: {kind}{zero}; {_missing(column.missing)}"


def _missing(rule: str | float) -> str:
    words = {
        "refuse": "a missing value is refused",
        "mean": "a missing value becomes the mean over all sites",
        "drop_row": "a row without it is left out",
        "reference": "a missing value counts as the first category",
        "own_category": "missing is a category of its own",
    }
    return words[rule] if isinstance(rule, str) else f"a missing value becomes {rule:g}"


def _test_rows(job: Job) -> str:
    split = job.data.split
    if split.method == "column":
        return f'those in which column "{split.column}" says test; those that say train train'
    return f"{split.test_fraction:.0%} of each site's rows, drawn there (seed {split.seed})"


def _training(training: Training) -> str:
    passes = f"{training.epochs} {'pass' if training.epochs == 1 else 'passes'} over the rows"
    amount = passes if training.steps is None else f"{training.steps} steps"
    extras: Iterator[str] = (
        f", {name} {value:g}"
        for name, value in (("momentum", training.momentum), ("weight decay", training.weight_decay))
        if value
    )
    return (
        f"{amount} in batches of {training.batch_size} at each site and round, {training.optimiser} with learning rate "
        f"{training.learning_rate:g}{''.join(extras)}"
    )


def _rounds(rounds: Rounds) -> str:
    best = f"the best by {rounds.best_metric}" if rounds.best_metric else "the last round's"
    stop = rounds.early_stop
    early = f"; stops after {stop.patience} rounds in which {stop.metric} got no better" if stop else ""
    return f"at most {rounds.maximum}{early}; the final model is {best}"


def _cohort(cohort: Cohort) -> str:
    named = f"only {', '.join(cohort.sites)}" if cohort.sites else "any member that serves the data set"
    return (
        f"waits for {cohort.minimum_sites} sites ({named}); a round counts with {cohort.needed} of them and waits for "
        f"them for {cohort.deadline_seconds:g} seconds"
    )


def _sight(job: Job) -> str:
    """Who sees what, as the job's privacy settings have it."""
    match job.privacy.secure_aggregation:
        case "plain":
            coordinator = (
                "The coordinator sees each site's update, and each site's sums for statistics and evaluation; a site "
                "takes part only if its policy allows that."
            )
        case "rostersum":
            coordinator = (
                f"The coordinator sees sums over many sites (RosterSum) and no site's own update, statistics or "
                f"evaluation. {_churn(job.privacy)}{_rows_asked(job.privacy)}"
            )
        case never:
            assert_never(never)
    return f"No record leaves its site. {coordinator} Every site sees the global model of each round."


def _churn(privacy: Privacy) -> str:
    """Who may be missing from a sum, and what that costs."""
    bears = "a third of the sites" if privacy.colluding_sites is None else f"{privacy.colluding_sites} sites"
    holds = f"That holds while at most {bears} work together with the coordinator."
    match privacy.churn:
        case "cells" if len(privacy.cells) > 1:
            missing = (
                f"A sum holds whole cells of sites ({len(privacy.cells)} cells): one missing site keeps its cell out, "
                "and no subtraction of sums shows a site."
            )
        case "cells":
            missing = (
                "Nobody may be missing from a sum: each round waits for all sites, and no subtraction of sums shows "
                "one of them."
            )
        case "dp":
            missing = (
                "Any site may be missing from a sum of updates. The price is noise in each: every site adds its share, "
                "is charged for each round it takes part in, whether that succeeds or not, and its policy (allow_dp) "
                "and its privacy budget must allow it."
            )
        case "open":
            missing = (
                "Any site may be missing from a sum of updates. The price: whoever sees two sums that differ by one "
                "site can subtract them and see that site's update; every site's policy must allow it (allow_open)."
            )
        case never:
            assert_never(never)
    return f"{missing} {holds}"


def _rows_asked(privacy: Privacy) -> str:
    """What each site's policy must say for a job that asks for many rows; nothing of one that any site answers."""
    weighed = privacy.weighting == "records" or (privacy.weighting is None and privacy.churn == "cells")
    asked = max(privacy.rows_minimum, privacy.weights[0] if weighed else 0)
    if asked <= Privacy.model_fields["rows_minimum"].default:
        return ""
    return (
        f" It asks for {asked} rows at each site: a site refuses it unless its policy has rows_asked_most = {asked} or "
        "more (under secure_aggregation), for whether it takes part tells whether it has as many."
    )


def _guarantee(job: Job) -> str:
    """What noise promises each site and what it costs, or why it cannot; nothing of a job without."""
    from privacy.secure_aggregation.rostersum import plans, promise

    try:
        found = plans.foreseen(job)
    except ConfigurationError as refused:
        return f"None: {refused}"
    if found is None:
        return ""
    return (
        f"{promise.statement(found)} The numbers are those of {found.sites} sites, the fewest that it begins with. "
        f"Each value of a mean over all of them has noise of standard deviation {found.blur:.3g}, where a whole update "
        f"is cut to length {found.clip:g}."
    )
