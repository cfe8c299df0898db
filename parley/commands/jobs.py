"""`parley job`: write, check, submit and watch jobs."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from client.connection import Connection
from federation import plugins
from federation.blobs import BlobStore
from federation.errors import LocalProtocolError, RemoteProtocolError
from federation.job import Job, parse
from federation.messages import (
    JobAdded,
    Jobs,
    JobState,
    JobView,
    ListJobs,
    Metric,
    ShowJob,
    SiteView,
    StopJob,
    SubmitJob,
)
from federation.vector import to_safetensors
from parley import measured
from parley.commands import job_files
from parley.dialling import ask, line
from parley.homes import MemberHome
from parley.terminal import HomeOption, JsonOption, ago, console, emit, home, moment, run

__all__ = ["app", "drawn", "initial_model", "screen", "submit_text", "watched"]

app = typer.Typer(no_args_is_help=True, help="Write, check, submit and watch jobs (researcher, operator).")
app.command("new")(job_files.new)
app.command("check")(job_files.check)

JobArgument = Annotated[str, typer.Argument(help="The job's id, as `parley job list` shows it.")]

_COLOURS = {
    JobState.WAITING: "yellow",
    JobState.RUNNING: "cyan",
    JobState.FINISHED: "green",
    JobState.FAILED: "red",
    JobState.STOPPED: "magenta",
}


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="The job file.")],
    watch_: Annotated[bool, typer.Option("--watch", help="Watch it until it is over.")] = False,
    home_: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Makes the initial model here and hands the job to the coordinator."""
    operator = home(home_).operator
    job = submit_text(operator, job_files.read(file), str(file))
    if watch_:
        _watch(operator, job, as_json=as_json)
    elif as_json:
        emit({"job": job})
    else:
        console.print(f"Submitted as [bold]{job}[/]. Next:  parley job watch {job}")


@app.command("list")
def list_jobs(home_: HomeOption = None, as_json: JsonOption = False) -> None:
    """Lists all jobs, the newest first."""
    reply = ask(home(home_).operator, ListJobs())
    if not isinstance(reply, Jobs):
        raise _unexpected(reply)
    if as_json:
        emit(tuple(map(measured.disclosed, reply.jobs)))
        return
    table = Table("job", "state", "round", "best metrics", "submitted (UTC)")
    for view in reply.jobs:
        table.add_row(
            view.id, _state(view), f"{view.round}/{view.rounds}", measured.words(_best(view)), moment(view.submitted)
        )
    console.print(table if reply.jobs else "There are no jobs yet. Next:  parley job new FILE")


@app.command()
def show(job: JobArgument, home_: HomeOption = None, as_json: JsonOption = False) -> None:
    """Shows one job: its state, its sites, and what holds it back."""
    view = _view(home(home_).operator, job)
    if as_json:
        emit(measured.disclosed(view))
    else:
        console.print(drawn(view))


@app.command()
def watch(job: JobArgument, home_: HomeOption = None, as_json: JsonOption = False) -> None:
    """Shows a job live until it is over. Exit code 0 only if it finished."""
    _watch(home(home_).operator, job, as_json=as_json)


@app.command()
def stop(job: JobArgument, home_: HomeOption = None, as_json: JsonOption = False) -> None:
    """Ends a job now; what it has learnt stays in its rounds."""
    operator = home(home_).operator
    ask(operator, StopJob(job))
    view = _view(operator, job)
    if as_json:
        emit({"job": job, "state": view.state})
    else:
        console.print(f"{job} is {view.state.value}{f': {view.reason}' if view.reason else ''}.")


def initial_model(job: Job) -> bytes:
    """The safetensors bytes of a job's first model; the same job file gives the same bytes."""
    from tasks.models.model import state_vector

    task = plugins.load("tasks", job.task.kind).make(job)
    module = plugins.load("tasks.models", job.model.name).build(
        job.model, task.features, task.outputs, job.training.seed
    )
    layout, flat = state_vector(module)
    return to_safetensors(layout, flat)


def submit_text(operator: MemberHome, text: str, source: str) -> str:
    """Submits a job file's text and returns the job's id."""
    content = initial_model(parse(text, source))

    async def submitted() -> str:
        with tempfile.TemporaryDirectory() as folder:
            blobs = BlobStore(Path(folder))
            ref = blobs.put(content)
            async with Connection.opened(line(operator)) as connection:
                await connection.upload("", ref, blobs)
                reply = await connection.operate(SubmitJob(text, ref))
        if not isinstance(reply, JobAdded):
            raise _unexpected(reply)
        return reply.job

    return run(submitted())


def watched(operator: MemberHome, job: str) -> JobView:
    """Waits until a job is over, silently, and returns its last view."""

    async def last() -> JobView:
        view: JobView | None = None
        async with Connection.opened(line(operator)) as connection:
            async for view in connection.watch(job):  # noqa: B007 - the last one is wanted
                pass
        if view is None:
            raise RemoteProtocolError(f"the coordinator showed nothing of job {job}")
        return view

    return run(last())


def _watch(operator: MemberHome, job: str, *, as_json: bool) -> None:
    if as_json:
        view = watched(operator, job)
        emit(measured.disclosed(view))
    else:
        view = run(_live(operator, job))
    if view.state is not JobState.FINISHED:
        raise typer.Exit(4)


async def _live(operator: MemberHome, job: str) -> JobView:
    view: JobView | None = None
    async with Connection.opened(line(operator)) as connection:
        with screen(console) as show:
            async for view in connection.watch(job):
                show(view)
    if view is None:
        raise RemoteProtocolError(f"the coordinator showed nothing of job {job}")
    return view


@contextmanager
def screen(to: Console) -> Iterator[Callable[[JobView], None]]:
    """Shows views: in place at a terminal; elsewhere a line for each new round or state, and the last one whole."""
    if to.is_terminal:
        with Live(console=to, refresh_per_second=10, vertical_overflow="visible") as live:
            yield lambda view: live.update(drawn(view))
        return
    told = ""

    def show(view: JobView) -> None:
        nonlocal told
        news = f"{view.id}  {view.state.value}  round {view.round} of {view.rounds}"
        if view.state.over:
            to.print(drawn(view))
        elif news != told:
            to.print(news, highlight=False)
        told = news

    yield show


def _view(operator: MemberHome, job: str) -> JobView:
    reply = ask(operator, ShowJob(job))
    if not isinstance(reply, JobView):
        raise _unexpected(reply)
    return reply


def drawn(view: JobView) -> Group:
    """A job as people see it: its state, its metrics, and a row per site."""
    head = Text.assemble(
        (view.id, "bold"),
        "  ",
        (view.state.value, _COLOURS[view.state]),
        f"  round {view.round} of {view.rounds}  {view.seconds:.1f} s",
    )
    parts: list[Text | Table] = [head]
    if view.reason:
        parts.append(Text(view.reason, style="yellow" if not view.state.over else ""))
    if view.history:
        parts.append(
            Text(f"round {view.history[-1].number}: {measured.words(view.history[-1].metrics) or 'being evaluated'}")
        )
    if view.best_round:
        parts.append(Text(f"best so far: round {view.best_round}: {measured.words(_best(view))}"))
    table = Table("site", "state", "last seen", "seconds", "bytes", "what holds it back")
    for site in view.sites:
        table.add_row(*map(Text, _row(site)), style="yellow" if site.trouble else "")  # as Text: sites write no markup
    return Group(*parts, table)


def _row(site: SiteView) -> tuple[str, ...]:
    seen = "now" if site.connected else ago(site.last_seen)
    seconds = f"{site.seconds:.2f}" if site.seconds else "-"
    return site.name, site.state, seen, seconds, _bytes(site.bytes), site.trouble or "-"


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:  # noqa: PLR2004 - the next unit
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def _best(view: JobView) -> tuple[Metric, ...]:
    return next((each.metrics for each in view.history if each.number == view.best_round), ())


def _state(view: JobView) -> Text:
    return Text(view.state.value, style=_COLOURS[view.state])


def _unexpected(reply: object) -> LocalProtocolError:
    return LocalProtocolError(f"the coordinator answered with {type(reply).__name__}, which was not asked for")
