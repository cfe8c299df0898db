import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from federation.blobs import BlobRef
from federation.messages import Jobs, JobState, JobView, Metric, Models, ModelView, RoundView
from parley import measured
from parley.commands import jobs, models

FEW = (Metric("n", 12.0), Metric("auc", 0.8125))
FEWER = (Metric("n", 4.0), Metric("auc", 0.8125))
MANY = (Metric("n", 254.0), Metric("auc", 0.8125))
WITHHELD = "over fewer than 20 rows: not shown"
VIEW = JobView("risk-1", "risk", JobState.RUNNING, 1, 9, 1, "", 1.0, 2.0, "", (), (RoundView(1, FEW, 3, 1.0, 10),))


def _model(metrics: tuple[Metric, ...]) -> ModelView:
    card = {
        "job_id": "risk-1",
        "model": "mlp",
        "strategy": "fedavg",
        "round": 1,
        "rounds": 2,
        "model_digest": "ab",
        "metrics": {},
        "sites": [],
        "contract": {"columns": []},
        "privacy": {"statement": "No record left its site."},
    }
    return ModelView("risk-1", "risk", BlobRef.of(b"model"), 1, 1.0, metrics, json.dumps(card))


def test_metrics_are_told_with_why_some_are_not() -> None:
    """Rates over few rows give way to words; where nothing was measured there are none."""
    assert measured.words(MANY) == "n 254  auc 0.8125"
    assert measured.words(FEW) == f"n 12  {WITHHELD}"
    assert measured.words(FEWER) == WITHHELD
    assert measured.words(()) == ""


def test_a_job_for_programs_holds_what_people_may_see() -> None:
    """Round by round, and all else as it was."""
    view = replace(VIEW, history=(*VIEW.history, RoundView(2, MANY, 3, 1.0, 10)))
    told = measured.disclosed(view)
    assert [each.metrics for each in told.history] == [FEW[:1], MANY]
    assert replace(told, history=view.history) == view


@pytest.mark.parametrize("command", [["list"], ["show", "risk-1"], ["watch", "risk-1"]])
@pytest.mark.parametrize("programs", [[], ["--json"]])
def test_no_command_on_jobs_shows_a_rate_over_few_rows(
    command: list[str], programs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For people with the reason; a round of more rows is shown."""
    over = replace(VIEW, state=JobState.FINISHED)
    monkeypatch.setattr(jobs, "ask", lambda *_: Jobs((over,)) if command == ["list"] else over)
    monkeypatch.setattr(jobs, "watched", lambda *_: over)
    monkeypatch.setattr(jobs, "_live", lambda *_: None)
    monkeypatch.setattr(jobs, "run", lambda _: jobs.console.print(jobs.drawn(over)) or over)
    said = CliRunner().invoke(jobs.app, [*command, *programs], env={"COLUMNS": "200"})
    assert said.exit_code == 0
    assert "0.8125" not in said.stdout
    assert "12" in said.stdout
    assert (WITHHELD in said.stdout) == (not programs)


@pytest.mark.parametrize("command", [["list"], ["show", "risk-1"]])
@pytest.mark.parametrize("metrics", [FEW, MANY])
def test_no_command_on_models_shows_a_rate_over_few_rows(
    command: list[str], metrics: tuple[Metric, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor its JSON; one over more rows is shown."""
    found = _model(metrics)
    monkeypatch.setattr(models, "ask", lambda *_: Models((found,)) if command == ["list"] else found)
    said = CliRunner().invoke(models.app, command, env={"COLUMNS": "200"})
    assert said.exit_code == 0
    assert ("0.8125" in said.stdout, WITHHELD in said.stdout) == (metrics is MANY, metrics is FEW)
    told = json.loads(CliRunner().invoke(models.app, [*command, "--json"]).stdout)
    if command == ["list"]:
        assert told[0]["metrics"] == {metric.name: metric.value for metric in (MANY if metrics is MANY else FEW[:1])}
