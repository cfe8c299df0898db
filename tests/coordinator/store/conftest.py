"""A store in a fresh folder, and a job of four hospitals to keep in it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.records import JobRecord, Outcome, Share, StepRecord
from coordinator.store import Store, url_in
from federation.blobs import BlobRef
from federation.messages import MembershipStatement, Metric, Role, StepKind

SITES = ("cleveland", "hungary", "long-beach", "switzerland")


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
def member() -> Callable[..., MembershipStatement]:
    """Makes a site's membership statement; the number makes its serial."""

    def make(name: str = "cleveland", number: int = 1) -> MembershipStatement:
        keys = bytes([number]) * 32, bytes([number + 1]) * 32
        return MembershipStatement("heart", f"{number:032x}", name, name, Role.SITE, *keys, 1, 2**33, b"s" * 64)

    return make


@pytest.fixture
def job(member: Callable[..., MembershipStatement]) -> Callable[..., JobRecord]:
    """Makes a new job of four hospitals."""

    def make(name: str = "heart-1", submitted: float = 1000.0) -> JobRecord:
        roster = tuple(member(site, number) for number, site in enumerate(SITES, 1))
        return JobRecord(name, "heart", 'name = "heart"', submitted, roster, BlobRef.of(b"initial"))

    return make


@pytest.fixture
def step() -> Callable[..., StepRecord]:
    """Makes a committed step; steps of odd number train, those of even number evaluate."""

    def make(number: int, job: str = "heart-1") -> StepRecord:
        trains = number % 2 == 1
        round_ = (number + 1) // 2
        return StepRecord(
            job=job,
            step=number,
            attempt=0,
            kind=StepKind.TRAIN if trains else StepKind.EVALUATE,
            round=round_,
            started=1000.0 + number,
            ended=1000.5 + number,
            shares=tuple(Share(site, Outcome.COUNTED, "", 0.25, 4096) for site in SITES),
            model=BlobRef.of(f"model {round_}".encode()) if trains else None,
            strategy_state=BlobRef.of(f"state {round_}".encode()) if trains else None,
            metrics=() if trains else (Metric("accuracy", 0.5 + round_ / 100), Metric("loss", 1 / round_)),
            best_round=round_ - 1 if trains else round_,
        )

    return make
