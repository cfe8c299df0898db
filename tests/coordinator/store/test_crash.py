"""A coordinator killed at any instant leaves whole steps and a job that agrees with them."""

import itertools
import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
from sqlalchemy import event

from coordinator.records import JobRecord, Secured, StepRecord
from coordinator.store import Store
from federation.messages import StepKind

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork and SIGKILL")


def commit_until_killed(url: str, step: Callable[[int], StepRecord], fatal: int, told: Connection) -> None:
    """Commits one step after another and tells each, until SIGKILL comes before the statement of number `fatal`."""
    store = Store(url)
    statements = itertools.count(1)

    def count(*_: object) -> None:
        if next(statements) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(store._writer, "before_cursor_execute", count)
    event.listen(store._writer, "commit", count)
    for number in itertools.count(1):
        store.commit_step(step(number), f"step {number}".encode())
        told.send(number)


@pytest.mark.parametrize("fatal", range(10, 20))
def test_a_killed_coordinator_leaves_whole_steps(
    store_url: str, job: Callable[[], JobRecord], step: Callable[[int], StepRecord], fatal: int
) -> None:
    """Wherever in a step the kill strikes, no half of it is there, nothing told is lost, and the job's row agrees.

    So does the standing of its secure aggregation.

    The next coordinator takes the store over at once: the hold ended with the process.
    """
    with Store(store_url) as store:
        store.add_job(job(), b"terms")
    fork = get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    coordinator = fork.Process(target=commit_until_killed, args=(store_url, step, fatal, theirs))
    coordinator.start()
    coordinator.join()
    assert coordinator.exitcode == -signal.SIGKILL
    told = 0
    while ours.poll():
        told = ours.recv()
    with Store(store_url) as store:
        kept, steps = store.job("heart-1"), store.steps("heart-1")
        assert kept is not None
        assert len(steps) == told > 0
        assert steps == tuple(step(number) for number in range(1, told + 1))
        trained = [each for each in steps if each.kind is StepKind.TRAIN][-1]
        evaluated = tuple((each.round, each.metrics) for each in steps if each.kind is StepKind.EVALUATE)
        assert (kept.next_step, kept.round, kept.model) == (told + 1, trained.round, trained.model)
        assert (kept.metrics, kept.best_round) == (evaluated, steps[-1].best_round)
        assert store.secured("heart-1") == Secured(b"terms", f"step {told}".encode())
        store.commit_step(step(kept.next_step))
