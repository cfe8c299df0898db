"""The page on rounds, as Streamlit draws it from a real store."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

import dashboard
from coordinator.records import ModelRecord, SitePresence
from dashboard.reading import VARIABLE
from federation.blobs import BlobRef
from federation.messages import Metric, StepKind

APP = Path(dashboard.__file__).with_name("app.py")


@pytest.fixture
def app(url: str, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """The dashboard over the store of the test, not yet drawn."""
    monkeypatch.setenv(VARIABLE, url)
    return AppTest.from_file(str(APP), default_timeout=60)


@pytest.fixture
def play(hospitals: Callable[[float], Any]) -> Any:
    """The coordinator of a job that began an hour and a half ago."""
    return hospitals(time.time() - 5400)


def texts(drawn: AppTest) -> list[str]:
    """All running text of the page."""
    return [each.value for each in drawn.markdown]


def test_a_running_job_in_one_look(app: AppTest, play: Any) -> None:
    """State, round, metrics with their change, and the site that holds the round back, with the cause."""
    play.begin()
    play.rounds()
    play.attend(time.time())
    slow = SitePresence("switzerland", True, time.time(), "uploading", "waiting for its upload")  # noqa: FBT003 - attends
    play.tell(slow)
    drawn = app.run()
    assert not drawn.exception
    assert {metric.label: (metric.value, metric.delta) for metric in drawn.metric} == {
        "Round": ("2 of 15", ""),
        "Accuracy": ("0.800", "+0.100"),
        "AUC": ("0.900", "+0.100"),
        "Sites attending": ("4 of 4", ""),
        "Time": ("1 h 30 min", ""),
        "Data moved": ("16 kB", ""),
    }
    assert [each.value for each in drawn.warning] == ["Round 3 is held back by **switzerland**: waiting for its upload"]
    table = drawn.table[0].value
    assert list(table["Site"]) == [
        ":orange[:material/warning:] **switzerland**",
        "**cleveland**",
        "**hungary**",
        "**long\\-beach**",
    ]
    assert list(table["What holds it back"]) == [
        ":orange-background[waiting for its upload]",
        "nothing",
        "nothing",
        "nothing",
    ]
    assert list(table["Doing"]) == ["uploading", "ready", "ready", "ready"]
    assert drawn.selectbox[0].value == play.job
    assert any("running" in text for text in texts(drawn))
    assert 'name = "heart"' in drawn.code[-1].value
    assert len(drawn.get("plotly_chart")) == 2


def test_a_finished_job_says_how_to_fetch_its_model(app: AppTest, play: Any) -> None:
    """The model's metrics and the command stand on the page; nothing is held back."""
    play.begin()
    play.rounds()
    play.finish()
    drawn = app.run()
    assert not drawn.exception
    assert len(drawn.warning) == 0
    assert drawn.code[0].value == "parley model get heart-5e09c1"
    assert any("accuracy 0.800, auc 0.900 · 5.1 kB · `abababababab`" in text for text in texts(drawn))


def test_another_job_can_be_picked(app: AppTest, play: Any) -> None:
    """The newest job is shown first, an older one when it is chosen."""
    play.begin()
    play.start += 30
    play.submit(job="heart-newer")
    drawn = app.run()
    assert drawn.metric[0].value == "0 of 15"
    assert drawn.selectbox[0].options == ["heart-newer · waiting", "heart-5e09c1 · running"]
    assert drawn.warning[0].value.startswith("The start is held back by **cleveland**: has never attended; ")
    drawn = drawn.selectbox[0].select("heart-5e09c1").run()
    assert not drawn.exception
    assert drawn.warning[0].value.startswith("Round 1 is held back by ")


def test_a_silent_coordinator_is_told(app: AppTest, play: Any) -> None:
    """The page says for how long nothing was told, and how to start the coordinator."""
    play.begin()
    play.attend(time.time() - 3600)
    drawn = app.run()
    assert drawn.error[0].value.startswith("The coordinator has told nothing for 1 h. Start it again: `parley coord")


def test_what_a_site_writes_is_no_markup(app: AppTest, play: Any) -> None:
    """A cause of trouble that holds an image's address is shown as text, and loads nothing."""
    play.begin()
    hostile = "![x](http://example.com/x.png)"
    play.tell(SitePresence("cleveland", True, time.time(), "ready", hostile))  # noqa: FBT003 - attends
    drawn = app.run()
    assert r"\!\[x\]\(http\://example\.com/x\.png\)" in drawn.table[0].value["What holds it back"].iloc[0]
    assert "](http" not in drawn.warning[0].value


def test_an_empty_store_says_which_command_makes_a_job(app: AppTest, store: object) -> None:
    """There is nothing to pick and nothing to draw."""
    assert store
    drawn = app.run()
    assert not drawn.exception
    assert drawn.info[0].value.startswith("No job has been submitted yet")
    assert drawn.code[0].value == "parley job new > job.toml\nparley job submit job.toml"


def test_a_missing_store_is_told_with_the_way_out(app: AppTest) -> None:
    """No traceback: which file is missing, and what to do."""
    drawn = app.run()
    assert not drawn.exception
    assert "there is no store at " in drawn.error[0].value
    assert any("start the coordinator, which makes it" in text for text in texts(drawn))


def test_a_dashboard_without_a_store_is_told(app: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamlit started by hand says what starts the dashboard instead."""
    monkeypatch.delenv(VARIABLE)
    drawn = app.run()
    assert not drawn.exception
    assert "no store is named" in drawn.error[0].value
    assert any("parley dashboard" in text for text in texts(drawn))


def test_metrics_over_few_rows_give_way_to_words(app: AppTest, play: Any) -> None:
    """No number, no chart, and why; not that nothing was evaluated."""
    play.begin()
    play.step(StepKind.TRAIN, 1)
    metrics = (Metric("accuracy", 0.8), Metric("n", 12.0))
    final = ModelRecord(play.job, "heart", BlobRef(b"\xab" * 32, 5120), 1, play.start + 60, metrics, "{}")
    play.step(StepKind.EVALUATE, 1, {"accuracy": 0.8, "n": 12.0}, final=final)
    drawn = app.run()
    assert not drawn.exception
    assert "Accuracy" not in {metric.label for metric in drawn.metric}
    assert "Metrics are over fewer than 20 rows: not shown." in {each.value for each in drawn.caption}
    (model,) = (text for text in texts(drawn) if text.startswith("Round 1"))
    assert " · n 12.000, over fewer than 20 rows: not shown · " in model
    assert len(drawn.get("plotly_chart")) == 1
