"""A process dies in the middle of a job, as in a power cut: the job goes on, and each round counts exactly once."""

from functools import partial
from typing import Any

import psutil

from coordinator.records import Outcome, StepRecord
from federation.messages import StepKind
from tests.integration.alliance import SITES, Alliance, job_file

ROUNDS = 10


def exactly_once(steps: tuple[StepRecord, ...]) -> None:
    """The statistics, then each round trained and evaluated once, with all three sites counted in each step."""
    rounds = [(kind, number) for number in range(1, ROUNDS + 1) for kind in (StepKind.TRAIN, StepKind.EVALUATE)]
    assert [(step.kind, step.round) for step in steps] == [(StepKind.STATISTICS, 0), *rounds]
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    for step in steps:
        assert sorted((share.site, share.outcome) for share in step.shares) == [
            (site, Outcome.COUNTED) for site in SITES
        ]


def midway(alliance: Alliance) -> str:
    """A job that is in its third round or a little later; a round takes some tenths of a second."""
    job = alliance.submit(job_file(rounds=ROUNDS, epochs=100))
    alliance.until_job(job, lambda view: view["round"] >= 2)
    return job


def _further(before: int, view: dict[str, Any]) -> bool:
    return bool(view["round"] > before) or view["state"] == "finished"


def test_a_coordinator_that_was_killed_goes_on_from_its_last_committed_step(alliance: Alliance) -> None:
    """Twice in one job: sites come back by themselves, and nothing is lost or counted twice."""
    job = midway(alliance)
    for _ in range(2):
        before = alliance.job(job)["round"]
        starts = alliance.coordinator.said.count("serves study")
        alliance.coordinator.kill()
        alliance.coordinator.start()
        alliance.coordinator.says("serves study", starts + 1)
        alliance.until_job(job, partial(_further, before))
    view = alliance.finished(job)
    exactly_once(alliance.steps(job))
    assert [each["number"] for each in view["history"]] == list(range(1, ROUNDS + 1))


def test_a_site_whose_agent_was_killed_takes_its_place_again(alliance: Alliance) -> None:
    """The others wait for it; its trainer ends with it."""
    job = midway(alliance)
    cork = alliance.sites["cork"]
    trainer = cork.child()
    cork.kill()
    psutil.wait_procs([trainer], timeout=30)
    assert not trainer.is_running()
    cork.start()
    alliance.finished(job)
    exactly_once(alliance.steps(job))


def test_a_trainer_that_was_killed_is_replaced(alliance: Alliance) -> None:
    """The site says that it had too little memory, which such a death mostly means, and is asked again."""
    job = midway(alliance)
    alliance.sites["berlin"].child().kill()
    alliance.finished(job)
    exactly_once(alliance.steps(job))
    assert "this machine ran out of memory" in alliance.sites["berlin"].said
