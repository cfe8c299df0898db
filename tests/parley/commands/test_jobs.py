"""`parley job` without a coordinator: what is refused before anything is sent, and how a job is drawn."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from federation.errors import ConfigurationError, StorageError, UnreachableError
from federation.job import parse
from federation.messages import JobState, JobView, Metric, RoundView, SiteView
from federation.vector import from_safetensors
from parley.commands import job_files
from parley.commands.jobs import drawn, initial_model
from tests.parley.commands.calls import refused
from tests.parley.commands.conftest import Founded


def _site(name: str, state: str, *, seconds: float = 0.0, count: int = 0, trouble: str = "") -> SiteView:
    here = state != "away"
    seen = 1.0 if here else 0.0
    return SiteView(name, name, here, state, last_seen=seen, seconds=seconds, bytes=count, trouble=trouble)


VIEW = JobView(
    id="risk-1",
    name="risk",
    state=JobState.RUNNING,
    round=2,
    rounds=9,
    best_round=1,
    reason="waiting for berlin",
    submitted=1.0,
    seconds=3.25,
    text="",
    sites=(
        _site("athens", "ready", seconds=0.25, count=1_500),
        _site("berlin", "away", count=2_500_000, trouble="refused: data: [/] stands in [brackets]"),
    ),
    history=(
        RoundView(1, (Metric("loss", 0.5), Metric("auc", 0.81234)), 2, 1.0, 10),
        RoundView(2, (), 2, 1.0, 10),
    ),
)


def shown(view: JobView) -> str:
    """A job as it is drawn on a wide screen."""
    screen = io.StringIO()
    Console(file=screen, width=200).print(drawn(view))
    return screen.getvalue()


def test_a_job_is_drawn_with_a_row_for_each_site() -> None:
    """State, last seen, seconds, bytes, and the cause of trouble in the site's own words, brackets included."""
    told = shown(VIEW)
    assert "risk-1  running  round 2 of 9  3.2 s" in told
    assert "waiting for berlin" in told
    assert "round 2: being evaluated" in told
    assert "best so far: round 1: loss 0.5  auc 0.8123" in told
    lines = [re.split(r"\s*│\s*", line) for line in told.splitlines() if "│" in line]
    rows = {cells[1]: cells[1:7] for cells in lines}
    assert rows["athens"] == ["athens", "ready", "now", "0.25", "1.5 kB", "-"]
    assert rows["berlin"] == ["berlin", "away", "never", "-", "2.5 MB", "refused: data: [/] stands in [brackets]"]


def test_a_job_that_has_not_begun_is_drawn_without_metrics() -> None:
    """Nothing is made up."""
    told = shown(replace(VIEW, state=JobState.WAITING, round=0, best_round=0, history=(), reason=""))
    assert "risk-1  waiting  round 0 of 9" in told
    assert "best" not in told
    assert "evaluated" not in told


def test_the_initial_model_is_the_same_for_the_same_job_file() -> None:
    """Whoever submits it, and wherever."""
    job = parse(job_files.example())
    first = initial_model(job)
    assert first == initial_model(job)
    layout, flat = from_safetensors(first)
    assert layout.size == flat.size > 0


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot read"), (b"\xff", "not UTF-8 text"), (b"format = 2", "format"), (b"format = ", "")],
)
def test_a_job_file_that_is_wrong_is_not_sent(tmp_path: Path, content: bytes | None, problem: str) -> None:
    """Its problems are told with the file's name, as `job check` tells them."""
    file = tmp_path / "job.toml"
    if content is not None:
        file.write_bytes(content)
    error = refused("job", "submit", file, "--home", tmp_path)
    assert isinstance(error, ConfigurationError)
    assert str(file) in error.problem
    assert problem in error.problem


@pytest.mark.parametrize(
    "arguments",
    [
        ("job", "list"),
        ("job", "show", "x"),
        ("job", "watch", "x"),
        ("job", "watch", "x", "--json"),
        ("job", "stop", "x"),
        ("model", "list"),
        ("model", "show", "x"),
    ],
)
def test_only_an_enrolled_operator_asks(complete: Founded, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Others are told how to become one; an operator whose coordinator is away is told that."""
    error = refused(*arguments, "--home", tmp_path / "nobody")
    assert isinstance(error, StorageError)
    assert "parley operator join INVITATION" in error.fix
    error = refused(*arguments, "--home", complete.admin)
    assert isinstance(error, UnreachableError)
    assert f"the coordinator at {complete.address} cannot be reached" in error.problem
    assert "parley coordinator serve" in error.fix


def test_a_job_for_a_coordinator_that_is_away_is_not_submitted(complete: Founded, tmp_path: Path) -> None:
    """Nor is it kept: it is to be submitted again."""
    file = tmp_path / "job.toml"
    file.write_text(job_files.example())
    error = refused("job", "submit", file, "--home", complete.admin)
    assert isinstance(error, UnreachableError)
