"""A store with the job of four hospitals, filled as a coordinator fills it."""

from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import pytest

from coordinator.records import JobRecord, JobSite, ModelRecord, Outcome, Share, SitePresence, StepRecord
from coordinator.store import Store, url_in
from federation.blobs import BlobRef
from federation.messages import JobState, MembershipStatement, Metric, Role, StepKind

SITES = ("cleveland", "hungary", "long-beach", "switzerland")
HEART = resources.files("parley").joinpath("heart/heart.toml").read_text()


class Hospitals:
    """Plays the coordinator of one job: it begins at `start`, and every step takes ten seconds."""

    job = "heart-5e09c1"

    def __init__(self, store: Store, start: float) -> None:
        self.store = store
        self.start = start
        self.number = 0

    def submit(self, text: str = HEART, job: str = job, answer: str = "accepted") -> None:
        """Adds the job, to whose offer every site gave `answer`."""
        roster = tuple(
            MembershipStatement(
                "heart", f"{i:032x}", site, f"{site}-hospital", Role.SITE, *[bytes([i]) * 32] * 2, 1, 2, b"s" * 64
            )
            for i, site in enumerate(SITES, 1)
        )
        sites = tuple(JobSite(site, answer) for site in SITES)
        self.store.add_job(JobRecord(job, "heart", text, self.start - 60, roster, BlobRef.of(b"initial"), sites=sites))

    def begin(self) -> None:
        """Adds the job and starts it."""
        self.submit()
        self.store.set_job_state(self.job, JobState.RUNNING, "", self.start)

    def step(
        self,
        kind: StepKind,
        round_: int,
        metrics: dict[str, float] | None = None,
        shares: tuple[Share, ...] | None = None,
        final: ModelRecord | None = None,
    ) -> None:
        """Commits one step."""
        at = self.start + 10 * self.number
        self.number += 1
        record = StepRecord(
            job=self.job,
            step=self.number,
            attempt=0,
            kind=kind,
            round=round_,
            started=at,
            ended=at + 10,
            shares=shares or tuple(Share(site, Outcome.COUNTED, "", 2.0, 1000) for site in SITES),
            model=BlobRef.of(f"model {round_}".encode()) if kind is StepKind.TRAIN else None,
            metrics=tuple(Metric(name, round(value, 6)) for name, value in (metrics or {}).items()),
            best_round=round_ if kind is StepKind.EVALUATE else max(0, round_ - 1),
            state=JobState.RUNNING if final is None else JobState.FINISHED,
            reason="" if final is None else "all 2 rounds done",
            final=final,
        )
        self.store.commit_step(record)

    def rounds(self, count: int = 2) -> None:
        """Trains and evaluates so many rounds; accuracy grows by a tenth in each."""
        for number in range(1, count + 1):
            self.step(StepKind.TRAIN, number)
            measured = {"loss": 0.7 - number / 10, "accuracy": 0.6 + number / 10, "auc": 0.7 + number / 10, "n": 254.0}
            self.step(StepKind.EVALUATE, number, measured)

    def finish(self) -> None:
        """Commits a last evaluation that brings the final model."""
        metrics = (Metric("accuracy", 0.8), Metric("auc", 0.9))
        self.step(StepKind.TRAIN, 3)
        final = ModelRecord(self.job, "heart", BlobRef(b"\xab" * 32, 5120), 3, self.start + 60, metrics, "{}")
        self.step(StepKind.EVALUATE, 3, {"accuracy": 0.8, "auc": 0.9}, final=final)

    def attend(self, now: float, **states: str) -> None:
        """Tells that every site attends and is ready, or does what is given for it (`_` stands for `-`)."""
        doing = {site.replace("_", "-"): state for site, state in states.items()}
        self.tell(*(SitePresence(site, True, now, doing.get(site, "ready")) for site in SITES))  # noqa: FBT003 - attends

    def tell(self, *presence: SitePresence) -> None:
        """Tells of some sites' presence."""
        self.store.set_presence(presence)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where the store lies."""
    return url_in(tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """An empty store."""
    with Store(url) as opened:
        yield opened


@pytest.fixture
def hospitals(store: Store) -> Callable[[float], Hospitals]:
    """Makes the coordinator of a job that begins at the given time."""
    return lambda start: Hospitals(store, start)
