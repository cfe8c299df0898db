"""What operators ask, over real mutual TLS: what is done, and what is refused in which words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from coordinator.records import JobRecord
from federation.blobs import BlobRef, BlobStore
from federation.errors import ConfigurationError, IdentityError, ParleyError, RemoteProtocolError
from federation.messages import (
    Done,
    JobEnded,
    Jobs,
    JobState,
    JobView,
    ListJobs,
    ListModels,
    ListSites,
    PublishRevocations,
    Role,
    ShowJob,
    ShowModel,
    StepKind,
    StepStart,
    StopJob,
    SubmitJob,
)
from tests.consortium import Answer, Consortium, Person, Running, Site, initial_model, prepared, soon, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from client.connection import Connection

Serving = Callable[..., AbstractAsyncContextManager[Running]]
Sites = Callable[..., Site]
Text = Callable[..., str]


@pytest.fixture
def operator(consortium: Consortium) -> Person:
    """One who submits and watches."""
    return consortium.member("op", Role.OPERATOR)


def _silent_from_training(step: StepStart) -> Answer:
    return prepared(step) if step.kind is StepKind.STATISTICS else None


# -------------------------------------------------------------------------------------------------------------- submit


def test_a_job_that_cannot_be_is_refused_and_is_none(
    running: Serving, site: Sites, job_text: Text, operator: Person
) -> None:
    """Unknown sites, too few of them, a broken file, a model that was not uploaded or is none: nothing is kept."""
    a, b = site("a"), site("b")
    good, text = initial_model(), job_text(minimum=2)
    named = text.replace("[cohort]", '[cohort]\nsites = ["a", "x", "y"]')
    wrong: tuple[tuple[str, bytes, type[ParleyError], str], ...] = (
        (named, good, ConfigurationError, r"cohort.sites names x, y, which the consortium does not have.*: a, b"),
        (job_text(minimum=3), good, ConfigurationError, r"needs 3 sites \(cohort.minimum_sites\), and 2 have joined"),
        ("format = 1", good, ConfigurationError, "job file: name: missing"),
        ("[[[", good, ConfigurationError, "not valid TOML"),
        (text, b"", RemoteProtocolError, "this is shorter than its header"),
        (text, b"\x10" + bytes(30), RemoteProtocolError, "header is not JSON"),
        (text, initial_model(np.nan, 1.0), RemoteProtocolError, "a model holds NaN or infinite values"),
    )

    async def story() -> None:
        async with running() as hub:
            for each in (a, b):
                await hub.coordinator.members.meet(each.member.statement)
            for job, model, kind, words in wrong:
                with pytest.raises(kind, match=words):
                    await hub.submit(operator, job, model or b"none")
            async with hub.opened(operator) as connection:
                with pytest.raises(RemoteProtocolError, match=r"initial model was not uploaded.*parley job submit"):
                    await connection.operate(SubmitJob(text, BlobRef.of(b"elsewhere")))
                assert await connection.operate(ListJobs()) == Jobs(())
            assert hub.store.jobs() == ()

    asyncio.run(story())


def test_a_job_without_a_consortium_says_that_nobody_joined(running: Serving, job_text: Text, operator: Person) -> None:
    """The first thing that a new consortium's researcher reads."""

    async def story() -> None:
        async with running() as hub:
            with pytest.raises(ConfigurationError, match=r"and 0 have joined.*invite and approve more sites"):
                await hub.submit(operator, job_text(minimum=2))
            named = job_text(minimum=2).replace("[cohort]", '[cohort]\nsites = ["a", "b"]')
            with pytest.raises(ConfigurationError, match="use its sites: none has joined yet"):
                await hub.submit(operator, named)

    asyncio.run(story())


def test_a_job_takes_the_sites_it_names(running: Serving, site: Sites, job_text: Text, operator: Person) -> None:
    """In the job's order; the others are not asked."""

    async def story() -> None:
        a, b, c = site("a"), site("b"), site("c")
        async with running() as hub, hub.attending(a, b, c):
            text = job_text(rounds=1, minimum=2).replace("[cohort]", '[cohort]\nsites = ["c", "a"]')
            job = await hub.submit(operator, text)
            await a.until(JobEnded)
            record = hub.store.job(job)
            assert record is not None
            assert record.roster == (c.member.statement, a.member.statement)
            assert [type(message).__name__ for message in b.heard if not isinstance(message, StepStart)] == ["Welcome"]

    asyncio.run(story())


def test_an_operators_model_is_sent_once(running: Serving, operator: Person, tmp_path: Path) -> None:
    """A second upload of the same bytes, and one that is under way already, cost nothing and spoil nothing."""

    async def story() -> None:
        blobs = BlobStore(tmp_path / "desk")
        ref = blobs.put(initial_model())
        async with running() as hub, hub.opened(operator) as connection:
            await connection.upload("", ref, blobs)
            await connection.upload("", ref, blobs)
            other = blobs.put(initial_model(1.0, 2.0))
            incoming, _ = await hub.coordinator.operation.upload(other)
            assert incoming is not None
            second = asyncio.create_task(connection.upload("", other, blobs))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):  # it waits for the first
                    await asyncio.shield(second)
            incoming.pause()
            await second
            assert {path.name for path in (tmp_path / "incoming").iterdir()} == {ref.hex, other.hex}

    asyncio.run(story())


# ------------------------------------------------------------------------------------------------------ stop and watch


def test_a_job_is_stopped_while_a_step_is_open(
    running: Serving, site: Sites, job_text: Text, operator: Person, tmp_path: Path
) -> None:
    """Its sites are told by whom, what was sent for the step goes, and it stays stopped after a restart."""

    async def story() -> None:
        a, b = site("a"), site("b", _silent_from_training)
        async with running() as hub, hub.attending(a, b), hub.opened(operator) as connection:
            job = await hub.submit(operator, job_text(minimum=2))
            run = hub.coordinator.conductor.job(job).run
            await until(lambda: run._round is not None and len(run._round.counted) == 1)
            assert await connection.operate(StopJob(job)) == Done()
            ended = await b.until(JobEnded)
            assert ended == JobEnded(job, JobState.STOPPED, "stopped by op")
            assert await connection.operate(StopJob(job)) == Done()  # it is: nothing changes
            await until(lambda: not (tmp_path / "spool" / job).exists())
        async with running() as hub, hub.opened(operator) as connection:
            view = await connection.operate(ShowJob(job))
            assert (view.state, view.reason, view.history) == (JobState.STOPPED, "stopped by op", ())
            assert await connection.operate(StopJob(job)) == Done()
            with pytest.raises(RemoteProtocolError, match=r"there is no job 'heart-9'.*see: parley job list"):
                await connection.operate(StopJob("heart-9"))

    asyncio.run(story())


async def _rest(stream: AsyncIterator[JobView]) -> list[JobView]:
    return [view async for view in stream]


async def _views(connection: Connection, job: str) -> list[JobView]:
    return [view async for view in connection.watch(job)]


def test_watching_shows_a_job_to_its_end(
    running: Serving, site: Sites, job_text: Text, operator: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From waiting over its rounds to the last view; a job that is over is shown once."""
    monkeypatch.setattr("coordinator.operation._VIEWS_PER_SECOND", 1000)

    async def story() -> None:
        a, b = site("a"), site("b")
        async with running() as hub:
            for each in (a, b):
                await hub.coordinator.members.meet(each.member.statement)
            job = await hub.submit(operator, job_text(minimum=2))
            async with hub.opened(operator) as connection:
                stream = connection.watch(job)
                first = await soon(anext(stream))
                assert (first.state, first.reason) == (
                    JobState.WAITING,
                    "waiting for 2 more of 2 sites (not attending: a, b)",
                )
                async with hub.attending(a, b):
                    views = [view async for view in stream]
                states = [view.state for view in views]
                assert sorted(states, key=list(JobState).index) == states
                assert {JobState.RUNNING, JobState.FINISHED} <= set(states)
                last = views[-1]
                assert (last.reason, last.round, len(last.history)) == ("all 2 rounds done", 2, 2)
                assert [(each.name, each.connected) for each in last.sites] == [("a", True), ("b", True)]
                assert all(each.bytes > 0 for each in last.sites)
                assert [view.state for view in await soon(_views(connection, job))] == [JobState.FINISHED]
                assert hub.coordinator.conductor.find(job) is None
        async with running() as hub, hub.opened(operator) as connection:
            (again,) = await soon(_views(connection, job))
            assert (again.state, again.history, again.seconds) == (
                last.state,
                last.history,
                pytest.approx(last.seconds, abs=0.5),
            )
            with pytest.raises(RemoteProtocolError, match=r"there is no job 'heart-9'.*see: parley job list"):
                await soon(_views(connection, "heart-9"))

    asyncio.run(story())


def test_a_revoked_operator_watches_no_longer(
    running: Serving, site: Sites, consortium: Consortium, job_text: Text, operator: Person
) -> None:
    """The stream that it had open ends with the next view, and says why."""

    async def story() -> None:
        a, b = site("a"), site("b")
        other = consortium.member("op2", Role.OPERATOR)
        async with running() as hub:
            for each in (a, b):
                await hub.coordinator.members.meet(each.member.statement)
            job = await hub.submit(operator, job_text(minimum=2))
            async with hub.opened(operator) as watching, hub.opened(other) as connection:
                stream = watching.watch(job)
                await soon(anext(stream))
                await connection.operate(PublishRevocations(consortium.revoked(operator)))
                with pytest.raises(IdentityError, match="the membership of op was revoked"):
                    await soon(_rest(stream))
                await until(lambda: not hub.coordinator.conductor.job(job).watchers)

    asyncio.run(story())


# --------------------------------------------------------------------------------------------------------------- lists


def test_jobs_sites_and_models_are_listed(running: Serving, site: Sites, job_text: Text, operator: Person) -> None:
    """The newest job first; models by job or by the first digits of their digest; unknown ones are refused."""

    async def story() -> None:
        a, b = site("a"), site("b")
        async with running() as hub, hub.attending(a, b), hub.opened(operator) as connection:
            first = await hub.submit(operator, job_text(rounds=1, minimum=2))
            await a.until(JobEnded)
            second = await hub.submit(operator, job_text(rounds=2, minimum=2))
            await a.until(JobEnded, 2)
            assert [view.id for view in (await connection.operate(ListJobs())).jobs] == [second, first]
            models = (await connection.operate(ListModels())).models
            assert [model.job for model in models] == [second, first]
            assert await connection.operate(ShowModel(first)) == models[1]
            assert await connection.operate(ShowModel(models[0].payload.hex[:16])) == models[0]
            with pytest.raises(ConfigurationError, match=r"there is no model 'zzz'.*see: parley model list"):
                await connection.operate(ShowModel("zzz"))
            sites = (await connection.operate(ListSites())).sites
            assert [(each.name, each.connected, each.state) for each in sites] == [
                ("a", True, "attending"),
                ("b", True, "attending"),
            ]
        async with running() as hub, hub.opened(operator) as connection:
            listed = (await connection.operate(ListJobs())).jobs
            assert [(view.id, view.state, view.round) for view in listed] == [
                (second, JobState.FINISHED, 2),
                (first, JobState.FINISHED, 1),
            ]
            assert [(each.name, each.connected) for each in listed[0].sites] == [("a", False), ("b", False)]

    asyncio.run(story())


def test_a_long_list_of_jobs_arrives(
    running: Serving, consortium: Consortium, job_text: Text, operator: Person
) -> None:
    """More text than a chunk of a payload may have: four jobs with long descriptions, 3.6 MB."""

    async def story() -> None:
        member = consortium.member("a").statement
        note = "# " + 900_000 * "x"
        async with running() as hub, hub.opened(operator) as connection:
            for number in range(4):
                text = f"{job_text(minimum=2)}\n{note}"
                job = JobRecord(f"heart-{number}", "heart", text, 1.0, (member,), BlobRef.of(b""), JobState.WAITING)
                hub.store.add_job(job)
                hub.store.set_job_state(job.id, JobState.STOPPED, "stopped by op", 2.0)
            listed = (await soon(connection.operate(ListJobs()))).jobs
            assert [(view.id, view.seconds) for view in listed] == [(f"heart-{number}", 1.0) for number in (3, 2, 1, 0)]

    asyncio.run(story())
