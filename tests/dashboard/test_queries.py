"""The page's values say how far a job is, how good, and which site holds it back, and why."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from coordinator.records import JobSite, ModelRecord, Outcome, Share, SitePresence
from coordinator.store import Store, StoreReader
from dashboard import queries
from dashboard.queries import Headline, JobPage, SiteRow
from federation.blobs import BlobRef
from federation.findings import Finding
from federation.messages import JobState, Metric, StepKind

START = 1_000_000.0
NOW = START + 100
SITES = ("cleveland", "hungary", "long-beach", "switzerland")

Play = Callable[[float], Any]


@pytest.fixture
def reader(url: str, store: Store) -> Iterator[StoreReader]:
    """The store as the dashboard opens it."""
    assert store.jobs() == ()
    with StoreReader(url) as opened:
        yield opened


@pytest.fixture
def play(hospitals: Play) -> Any:
    """The coordinator of the job of four hospitals."""
    return hospitals(START)


def page_of(reader: StoreReader, job: str = "heart-5e09c1", now: float = NOW) -> JobPage:
    """The page, which must be there."""
    page = queries.page(reader, job, now)
    assert page is not None
    return page


def row_of(reader: StoreReader, site: str, now: float = NOW) -> SiteRow:
    """One site's row on the page."""
    return next(row for row in page_of(reader, now=now).sites if row.name == site)


def test_an_empty_store_offers_no_job(reader: StoreReader) -> None:
    """Neither a choice nor a page."""
    assert queries.choices(reader) == ()
    assert queries.page(reader, "heart-5e09c1", NOW) is None


def test_jobs_are_offered_the_newest_first(reader: StoreReader, play: Any) -> None:
    """The first choice is the job that was submitted last."""
    play.submit(job="heart-a")
    play.start += 5
    play.submit(job="heart-b")
    assert [(choice.id, choice.state) for choice in queries.choices(reader)] == [
        ("heart-b", JobState.WAITING),
        ("heart-a", JobState.WAITING),
    ]


def test_a_running_job_in_numbers(reader: StoreReader, play: Any) -> None:
    """Round, time, data and the task's two foremost metrics, with their change against the round before."""
    play.begin()
    play.rounds()
    play.attend(NOW)
    page = page_of(reader)
    assert (page.state, page.round, page.maximum, page.best_round, page.attending) == (JobState.RUNNING, 2, 15, 2, 4)
    assert (page.seconds, page.bytes, page.silent, page.held_by) == (100.0, 16_000, 0.0, ())
    assert page.headlines == (
        Headline("accuracy", 0.8, pytest.approx(0.1), lower_is_better=False),
        Headline("auc", 0.9, pytest.approx(0.1), lower_is_better=False),
    )
    assert [(row.number, row.seconds, row.work, row.bytes) for row in page.rounds] == [
        (number, 20.0, dict.fromkeys(SITES, 4.0), 8000) for number in (1, 2)
    ]
    assert page.sites[0] == SiteRow(
        name="cleveland",
        organisation="cleveland-hospital",
        attending=True,
        last_seen=0.0,
        doing="ready",
        seconds=8.0,
        bytes=4000,
        trouble="",
        holds_back=False,
    )


def test_the_metric_that_picks_the_best_round_comes_first(reader: StoreReader, play: Any) -> None:
    """A loss is known to be better when it is lower; the first evaluation has no change to tell."""
    heart = play.submit.__defaults__[0].replace("maximum = 15", 'maximum = 15\nbest_metric = "loss"')
    play.submit(heart)
    play.store.set_job_state(play.job, JobState.RUNNING, "", START)
    play.rounds(1)
    assert page_of(reader).headlines == (
        Headline("loss", pytest.approx(0.6), None, lower_is_better=True),
        Headline("accuracy", 0.7, None, lower_is_better=False),
    )


def test_a_job_of_another_release_is_shown_all_the_same(reader: StoreReader, play: Any) -> None:
    """A job file that this release cannot read costs the number of rounds and the metrics' order, not the page."""
    play.submit("format = 9")
    play.rounds(1)
    page = page_of(reader)
    assert (page.maximum, page.round, page.text) == (None, 1, "format = 9")
    assert [headline.name for headline in page.headlines] == ["accuracy", "auc"]


def test_what_the_coordinator_calls_trouble_holds_the_job_back(reader: StoreReader, play: Any) -> None:
    """The coordinator's own words stand in the row, and the row is the first."""
    play.begin()
    play.rounds()
    play.attend(NOW)
    play.tell(SitePresence("switzerland", True, NOW, "uploading", "waiting for its upload"))  # noqa: FBT003 - attends
    page = page_of(reader)
    assert [(site.name, site.trouble) for site in page.held_by] == [("switzerland", "waiting for its upload")]
    assert page.sites[0].name == "switzerland"


def test_a_site_at_work_when_the_others_are_done_holds_the_job_back(reader: StoreReader, play: Any) -> None:
    """Work that all still do holds nobody back; the last one at it does."""
    play.begin()
    play.attend(NOW, cleveland="training", hungary="training", long_beach="training", switzerland="training")
    assert page_of(reader).held_by == ()
    play.attend(NOW, switzerland="training")
    assert row_of(reader, "switzerland").trouble == "the others are done; it is training"
    assert [site.name for site in page_of(reader).held_by] == ["switzerland"]


def test_a_missing_site_holds_the_job_back(reader: StoreReader, play: Any) -> None:
    """One that went away is told by when it was last seen; one that never came has no such time."""
    play.begin()
    play.attend(NOW)
    play.tell(SitePresence("hungary", False, NOW - 300, "away"))  # noqa: FBT003 - does not attend
    row = row_of(reader, "hungary")
    assert (row.attending, row.last_seen, row.doing, row.trouble, row.holds_back) == (
        False,
        300.0,
        "",
        "is not attending",
        True,
    )


def test_a_job_that_waits_names_whom_it_waits_for(reader: StoreReader, play: Any) -> None:
    """Never seen, not answered, and refused are three causes, and a refusal says what the site found."""
    play.submit(answer="")
    play.tell(*(SitePresence(site, True, NOW, "attending") for site in SITES[1:]))  # noqa: FBT003 - attends
    play.store.set_job_site(play.job, JobSite("hungary", "accepted"))
    finding = Finding("data.columns.chol", "the column is missing", "add it")
    warning = Finding("data", "one class only", "nothing", "warning")
    play.store.set_job_site(play.job, JobSite("switzerland", "refused", (warning, finding)))
    assert {site.name: (site.trouble, site.holds_back) for site in page_of(reader).sites} == {
        "cleveland": ("has never attended", True),
        "hungary": ("", False),
        "long-beach": ("has not answered the job's offer yet", True),
        "switzerland": ("refused the job: data.columns.chol: the column is missing", True),
    }


def test_a_slow_site_holds_the_rounds_back(reader: StoreReader, play: Any) -> None:
    """A site that works twice as long as the next slowest is told, with both times; half as much again is not."""
    play.begin()
    play.attend(NOW)
    work = dict(zip(SITES, (3.0, 10.0, 12.0, 38.0), strict=True))
    play.step(StepKind.TRAIN, 1, shares=tuple(Share(site, Outcome.COUNTED, "", work[site]) for site in SITES))
    assert row_of(reader, "switzerland").trouble == "worked 38 s in round 1, the next slowest 12 s"
    assert [site.name for site in page_of(reader).held_by] == ["switzerland"]
    work["switzerland"] = 18.0
    play.step(StepKind.TRAIN, 2, shares=tuple(Share(site, Outcome.COUNTED, "", work[site]) for site in SITES))
    assert page_of(reader).held_by == ()


def test_a_share_that_did_not_count_is_told(reader: StoreReader, play: Any) -> None:
    """The last step that asked the site says what became of its part."""
    play.begin()
    play.attend(NOW)
    late = Share("long-beach", Outcome.LATE, "did not answer before the deadline")
    play.step(StepKind.TRAIN, 1, shares=(Share("cleveland", Outcome.COUNTED, "", 0.5), late))
    play.step(StepKind.TRAIN, 2, shares=(Share("cleveland", Outcome.COUNTED, "", 0.5),))
    row = row_of(reader, "long-beach")
    assert (row.trouble, row.holds_back) == ("late in round 1: did not answer before the deadline", False)


def test_a_job_that_is_over_is_held_back_by_nobody(reader: StoreReader, play: Any) -> None:
    """The final model is there, the clock stands still, and an absent site is no trouble."""
    play.begin()
    play.rounds()
    play.finish()
    page = page_of(reader, now=NOW + 5000)
    assert (page.state, page.reason, page.held_by, page.silent) == (JobState.FINISHED, "all 2 rounds done", (), 0.0)
    assert page.seconds == 60.0
    assert page.model is not None
    assert page.model.round == 3


def test_a_silent_coordinator_is_told_instead_of_its_last_words(reader: StoreReader, play: Any) -> None:
    """After a minute without a word nobody counts as attending, and no site is blamed."""
    play.begin()
    play.attend(NOW, switzerland="training")
    assert page_of(reader, now=NOW + 59).silent == 0.0
    page = page_of(reader, now=NOW + 61)
    assert (page.silent, page.attending, page.held_by) == (61.0, 0, ())


def test_no_rate_over_few_rows_reaches_a_page(reader: StoreReader, play: Any) -> None:
    """It is said why; from twenty rows on there is nothing to say."""
    play.begin()
    play.step(StepKind.TRAIN, 1)
    play.step(StepKind.EVALUATE, 1, {"accuracy": 0.8, "n": 19.0})
    page = page_of(reader)
    assert (page.headlines, [dict(row.metrics) for row in page.rounds]) == ((), [{"n": 19.0}])
    assert page.withheld == "over fewer than 20 rows: not shown"
    play.step(StepKind.TRAIN, 2)
    assert page_of(reader).withheld == page.withheld
    play.step(StepKind.EVALUATE, 2, {"accuracy": 0.9, "n": 20.0})
    page = page_of(reader)
    assert ([each.name for each in page.headlines], page.withheld) == (["accuracy"], "")


def test_a_final_model_is_shown_without_rates_over_few_rows(reader: StoreReader, play: Any) -> None:
    """Whatever the store holds of it."""
    play.begin()
    play.step(StepKind.TRAIN, 1)
    metrics = (Metric("accuracy", 0.8), Metric("n", 4.0))
    final = ModelRecord(play.job, "heart", BlobRef(b"\xab" * 32, 5120), 1, START + 60, metrics, "{}")
    play.step(StepKind.EVALUATE, 1, {"accuracy": 0.8, "n": 4.0}, final=final)
    page = page_of(reader)
    assert page.model is not None
    assert (page.model.metrics, page.withheld) == ((), "over fewer than 20 rows: not shown")
