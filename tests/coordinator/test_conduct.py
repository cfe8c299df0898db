"""Whole jobs over real mutual TLS, with sites that answer prepared vectors: what is stored, dropped and survives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from coordinator import worker
from coordinator.conduct import rounds_of
from coordinator.events import StopAsked
from coordinator.records import Outcome
from federation.blobs import BlobRef, BlobStore
from federation.errors import StorageError
from federation.messages import (
    Availability,
    Contribution,
    DeclineCause,
    JobEnded,
    JobOffer,
    JobState,
    ListModels,
    Refusal,
    Role,
    ShowModel,
    StepEnded,
    StepKind,
    StepStart,
)
from federation.vector import from_safetensors
from tests.consortium import Answer, Consortium, Person, Running, Site, prepared, until

if TYPE_CHECKING:
    from pathlib import Path

    from coordinator.events import Complete

Serving = Callable[..., AbstractAsyncContextManager[Running]]
Sites = Callable[..., Site]
Text = Callable[..., str]


@pytest.fixture
def operator(consortium: Consortium) -> Person:
    """One who submits."""
    return consortium.member("op", Role.OPERATOR)


@pytest.fixture(autouse=True)
def _patient_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a disk refuses is asked of it again at once."""
    monkeypatch.setattr(worker, "_RETRY_SECONDS", 0.0)


async def _ended(site: Site, state: JobState) -> str:
    """Why the job ended, in this state."""
    ended = await site.until(JobEnded)
    assert isinstance(ended, JobEnded)
    assert ended.state is state, ended.reason
    return ended.reason


def _steps(hub: Running, job: str) -> list[tuple[int, StepKind, int, tuple[str, ...]]]:
    """The committed steps, and who was counted in each."""
    return [
        (step.step, step.kind, step.round, tuple(each.site for each in step.shares if each.outcome is Outcome.COUNTED))
        for step in hub.store.steps(job)
    ]


def _of_rounds(rounds: int, *sites: str) -> list[tuple[int, StepKind, int, tuple[str, ...]]]:
    """What an undisturbed job commits."""
    steps = [(StepKind.STATISTICS, 0)]
    for number in range(1, rounds + 1):
        steps += [(StepKind.TRAIN, number), (StepKind.EVALUATE, number)]
    return [(at, kind, number, sites) for at, (kind, number) in enumerate(steps, 1)]


def _files(folder: Path) -> set[str]:
    """The names of all files below a folder."""
    found: set[str] = set()
    with suppress(FileNotFoundError):  # a folder that goes while we look holds nothing
        found.update(path.name for path in folder.rglob("*") if path.is_file())
    return found


def _until_round(number: int) -> Callable[[StepStart], Answer]:
    """Answers every step before the training of a round, and then stays silent."""

    def answer(step: StepStart) -> Answer:
        return None if step.kind is StepKind.TRAIN and step.round >= number else prepared(step)

    return answer


def test_a_job_of_three_rounds_is_done_and_its_model_can_be_fetched(
    running: Serving, site: Sites, job_text: Text, operator: Person, tmp_path: Path
) -> None:
    """Every step counts all three sites; the model is the weighted mean's; of the payloads, those needed stay."""

    async def story() -> None:
        a, b = site("a", weight=3.0), site("b", lambda step: prepared(step, 1))
        c = site("c", lambda step: prepared(step, 2))
        async with running() as hub:
            async with hub.attending(a, b, c):
                job = await hub.submit(operator, job_text(rounds=3))
                assert await _ended(a, JobState.FINISHED) == "all 3 rounds done"
                await _ended(b, JobState.FINISHED)
            assert _steps(hub, job) == _of_rounds(3, "a", "b", "c")
            assert {each.counted for each in a.heard if isinstance(each, StepEnded)} == {True}
            async with hub.opened(operator) as connection:
                model = await connection.operate(ShowModel(job))
                assert (await connection.operate(ListModels())).models == (model,)
                fetched = BlobStore(tmp_path / "fetched")
                await connection.download(model.payload, fetched)
            _, values = from_safetensors(fetched.get(model.payload))
            assert values == pytest.approx([3 * 0.5, 3 * (-3 * 0.25 - 1.25 - 2.25) / 5])
            assert {metric.name: metric.value for metric in model.metrics}["accuracy"] == 0.75
            assert json.loads(model.card)["ended_because"] == "all 3 rounds done"
            record = hub.store.job(job)
            assert record is not None
            kept = {record.initial_model, record.model, record.strategy_state, record.preparation}
            await until(lambda: _files(tmp_path / "jobs" / job) == {ref.hex for ref in kept})
            await until(lambda: _files(tmp_path / "spool") == set())
            assert len(hub.coordinator.conductor._uploads) == 0

    asyncio.run(story())


def test_two_jobs_run_side_by_side(running: Serving, site: Sites, job_text: Text, operator: Person) -> None:
    """The same sites, two jobs at once: each gets all its own steps."""

    async def story() -> None:
        a, b = site("a"), site("b")
        async with running() as hub, hub.attending(a, b):
            jobs = await asyncio.gather(*(hub.submit(operator, job_text(minimum=2)) for _ in range(2)))
            await a.until(JobEnded, 2)
            for job in jobs:
                assert _steps(hub, job) == _of_rounds(2, "a", "b")

    asyncio.run(story())


def test_a_job_goes_on_after_a_restart(
    running: Serving, site: Sites, job_text: Text, operator: Person, tmp_path: Path
) -> None:
    """Cut in the middle of the second round, once with an update half there, it ends with the same rounds and model."""

    async def undisturbed() -> BlobRef:
        a, b = site("a"), site("b")
        async with running() as hub, hub.attending(a, b):
            await hub.submit(operator, job_text(rounds=3, minimum=2))
            await _ended(a, JobState.FINISHED)
            return hub.store.models()[0].payload

    async def disturbed() -> BlobRef:
        a, b = site("a"), site("b", _until_round(2))
        async with running() as hub, hub.attending(a, b):
            job = await hub.submit(operator, job_text(rounds=3, minimum=2))
            await until(lambda: len(_steps(hub, job)) == 3)
            run = hub.coordinator.conductor.job(job).run
            await until(lambda: run.record.next_step == 4 and run._round is not None and run._round.counted != ())
        assert _files(tmp_path / "spool") != set()  # a's update of round 2, which counts for nothing now
        b.answer = prepared
        async with running() as hub:
            assert _files(tmp_path / "spool") == set()
            again = hub.coordinator.conductor.job(job).run.view(0.0)
            assert ([each.number for each in again.history], again.round, again.state) == ([1], 1, JobState.RUNNING)
            a.heard.clear()
            async with hub.attending(a, b):
                assert await _ended(a, JobState.FINISHED) == "all 3 rounds done"
            assert [step.step for step in a.steps] == [4, 5, 6, 7]  # none is asked twice, none left out
            assert _steps(hub, job) == _of_rounds(3, "a", "b")
            return hub.store.models()[0].payload

    assert asyncio.run(disturbed()) == asyncio.run(undisturbed())


@pytest.mark.parametrize("method", ["commit_step", "set_job_state", "set_job_site"])
def test_what_the_store_refuses_once_is_not_lost(
    method: str, running: Serving, site: Sites, job_text: Text, operator: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for a moment delays the job, and no step of it is missing or twice there."""
    refused: list[str] = []

    async def story() -> None:
        a, b = site("a"), site("b")
        async with running() as hub, hub.attending(a, b):
            taken = getattr(hub.store, method)

            def once(*given: object) -> object:
                if not refused:
                    refused.append(method)
                    raise StorageError("no room on the disk")
                return taken(*given)

            monkeypatch.setattr(hub.store, method, once)
            job = await hub.submit(operator, job_text(minimum=2))
            await _ended(a, JobState.FINISHED)
            assert _steps(hub, job) == _of_rounds(2, "a", "b")
            record = hub.store.job(job)
            assert record is not None
            assert [each.answer for each in record.sites] == ["accepted", "accepted"]

    asyncio.run(story())
    assert refused == [method]


def test_a_payload_the_disk_refuses_is_summed_again(
    running: Serving, site: Sites, job_text: Text, operator: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums are done again when the next model could not be written."""
    tries: list[int] = []

    async def story() -> None:
        a, b = site("a"), site("b")
        async with running() as hub, hub.attending(a, b):
            put = BlobStore.put

            def once(self: BlobStore, content: bytes | memoryview) -> BlobRef:
                if self.folder.parent.name == "jobs":
                    tries.append(len(content))
                    if len(tries) == 2:  # the preparation: the first is the initial model
                        raise StorageError("no room on the disk")
                return put(self, content)

            monkeypatch.setattr(BlobStore, "put", once)
            job = await hub.submit(operator, job_text(minimum=2))
            await _ended(a, JobState.FINISHED)
            assert _steps(hub, job) == _of_rounds(2, "a", "b")
            assert tries[1] == tries[2]

    asyncio.run(story())


# ---------------------------------------------------------------------------------------------------- what goes wrong


def _spoiled(kind: StepKind, *words: float) -> Callable[[StepStart], Answer]:
    """Prepared vectors, but of this kind of step one that begins with these values."""

    def answer(step: StepStart) -> Answer:
        if step.kind is not kind:
            return prepared(step)
        values = np.frombuffer(prepared(step), dtype="<f4" if kind is StepKind.TRAIN else "<f8").copy()
        values[: len(words)] = words
        return values.tobytes()

    return answer


@pytest.mark.parametrize("kind", [StepKind.TRAIN, StepKind.EVALUATE])
def test_a_job_that_diverged_fails_and_says_where(
    kind: StepKind, running: Serving, site: Sites, job_text: Text, operator: Person, tmp_path: Path
) -> None:
    """A site whose vectors are not finite is refused by name; with too few others the job ends in words."""

    async def story() -> None:
        a, b = (
            site("a"),
            site("b", _spoiled(kind, 4, np.nan, np.nan) if kind is StepKind.EVALUATE else _spoiled(kind, np.nan)),
        )
        async with running() as hub, hub.attending(a, b):
            job = await hub.submit(operator, job_text(minimum=2))
            reason = await _ended(a, JobState.FAILED)
            step = 2 if kind is StepKind.TRAIN else 3
            assert reason.startswith(f"step {step} ({kind.value}) failed 3 times (b: its contribution was refused: ")
            assert "the contribution of site 'b' holds NaN or infinite values" in reason
            refusal = await b.until(Refusal)
            assert isinstance(refusal, Refusal)
            assert refusal.about == f"step {step} of {job}"
            assert not any(isinstance(each, Refusal) for each in a.heard)
            await until(lambda: _files(tmp_path / "spool") == set())

    asyncio.run(story())


def test_a_site_whose_vector_cannot_be_summed_does_not_hold_the_others_up(
    running: Serving, site: Sites, job_text: Text, operator: Person, tmp_path: Path
) -> None:
    """With a quorum of two, the two good contributions count, and the refused one leaves nothing behind."""

    async def story() -> None:
        a, b, c = site("a"), site("b", _spoiled(StepKind.TRAIN, np.inf)), site("c")
        async with running() as hub, hub.attending(a, b, c):
            job = await hub.submit(operator, job_text(quorum=2))
            await _ended(a, JobState.FINISHED)
            counted = [sites for _, kind, _, sites in _steps(hub, job) if kind is StepKind.TRAIN]
            assert counted == [("a", "c"), ("a", "c")]
            await until(lambda: _files(tmp_path / "spool") == set())

    asyncio.run(story())


@pytest.mark.parametrize(
    ("kind", "words", "told"),
    [
        (StepKind.STATISTICS, (-10.0,), "statistics"),
        (StepKind.EVALUATE, (-40,), "a summed evaluation holds counts that no test rows give"),
        (StepKind.TRAIN, (3e38,), "the strategy's step leads to NaN or infinite values"),
    ],
)
def test_sums_that_cannot_be_end_the_job_in_words(
    kind: StepKind, words: tuple[float, ...], told: str, running: Serving, site: Sites, job_text: Text, operator: Person
) -> None:
    """Finite vectors may still be lies, or too large: the job fails with what was found, and does not wait for ever."""

    async def story() -> None:
        a, b = site("a", _spoiled(kind, *words)), site("b", _spoiled(kind, *words))
        async with running() as hub, hub.attending(a, b):
            await hub.submit(operator, job_text(minimum=2).replace('"fedavg"', '"fedavg"\nlearning_rate = 10.0'))
            assert told in await _ended(a, JobState.FAILED)

    asyncio.run(story())


def test_a_failure_of_the_coordinators_own_ends_the_job_in_words(
    running: Serving,
    site: Sites,
    job_text: Text,
    operator: Person,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A bug in the sums is logged for developers and told to everybody; the job does not hang."""

    async def story() -> None:
        a, b = site("a"), site("b")
        async with running() as hub, hub.attending(a, b):

            def broken(*_: object) -> None:
                raise ZeroDivisionError("division by zero")

            monkeypatch.setattr("coordinator.arithmetic.Arithmetic.complete", broken)
            await hub.submit(operator, job_text(minimum=2))
            reason = await _ended(a, JobState.FAILED)
            assert reason == "the coordinator failed at step 1 (ZeroDivisionError: division by zero)"

    asyncio.run(story())
    assert "ZeroDivisionError" in caplog.text


def test_a_contribution_that_was_never_uploaded_is_refused(
    running: Serving, site: Sites, job_text: Text, operator: Person
) -> None:
    """A name of bytes is not the bytes: nothing is counted, and the site may still upload and contribute."""

    async def story() -> None:
        a, b = site("a", _until_round(1)), site("b")
        async with running() as hub, hub.attending(a, b):
            job = await hub.submit(operator, job_text(rounds=1, minimum=2))
            step = await a.until(StepStart, 2)
            assert isinstance(step, StepStart)
            ref = BlobRef.of(prepared(step))
            contribution = Contribution(job, step.step, step.attempt, ref, 1.0, 0.1)
            a.outgoing.put_nowait(contribution)
            refusal = await a.until(Refusal)
            assert refusal == Refusal(
                "Contribution",
                f"site a contributed payload {ref.hex[:12]} to job {job} without having uploaded it",
                "the site's administrator",
                "upload a contribution before naming it",
            )
            a.answer = prepared
            blobs = BlobStore(a.folder / "a")
            async with hub.opened(a.member) as connection:
                await connection.upload(job, blobs.put(prepared(step)), blobs)
            a.outgoing.put_nowait(contribution)
            await _ended(a, JobState.FINISHED)
            assert _steps(hub, job) == _of_rounds(1, "a", "b")

    asyncio.run(story())


def test_a_site_that_declines_three_times_is_told_of_in_the_reason(
    running: Serving, site: Sites, job_text: Text, operator: Person
) -> None:
    """The coarse cause is what an operator needs to know whom to call."""

    async def story() -> None:
        def declines(step: StepStart) -> Answer:
            return DeclineCause.RESOURCES if step.kind is StepKind.TRAIN else prepared(step)

        a, b = site("a"), site("b", declines)
        async with running() as hub, hub.attending(a, b):
            await hub.submit(operator, job_text(minimum=2))
            reason = await _ended(b, JobState.FAILED)
            assert reason == "step 2 (train) failed 3 times (b: it ran out of memory or disk)"
            assert [step.attempt for step in b.steps] == [0, 0, 1, 2]

    asyncio.run(story())


def test_a_deadline_closes_a_step(running: Serving, site: Sites, job_text: Text, operator: Person) -> None:
    """The loop calls back: with the quorum there, the step counts without the late site, and no later one asks it."""

    async def story() -> None:
        a, b, c = site("a"), site("b"), site("c", lambda _: None)
        text = job_text(rounds=1, quorum=2).replace("deadline_seconds = 60", "deadline_seconds = 0.3")
        async with running() as hub, hub.attending(a, b, c):
            job = await hub.submit(operator, text)
            await _ended(a, JobState.FINISHED)
            assert {sites for *_, sites in _steps(hub, job)} == {("a", "b")}
            shares = [share for step in hub.store.steps(job) for share in step.shares if share.site == "c"]
            assert {(share.outcome, share.cause) for share in shares} == {
                (Outcome.LATE, "did not answer before the deadline")
            }
            assert (len(shares), len(c.steps)) == (1, 1)
            await _ended(c, JobState.FINISHED)

    asyncio.run(story())


def test_a_job_whose_step_is_summed_can_be_stopped(
    running: Serving, site: Sites, job_text: Text, operator: Person, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Even while the disk keeps refusing the sum: the job ends, its spool goes, and no try is left behind."""

    async def story() -> None:
        a, b = site("a"), site("b")
        refused = 0

        def never(_: object, __: Complete) -> None:
            nonlocal refused
            refused += 1
            raise StorageError("no room on the disk")

        monkeypatch.setattr("coordinator.arithmetic.Arithmetic.complete", never)
        async with running() as hub, hub.attending(a, b):
            job = await hub.submit(operator, job_text(minimum=2))
            await until(lambda: refused > 2)
            assert _files(tmp_path / "spool") != set()
            hub.coordinator.conductor.feed(job, StopAsked("op"))
            assert await _ended(a, JobState.STOPPED) == "stopped by op"
            await until(lambda: hub.coordinator.conductor._tasks == set())
            assert _files(tmp_path / "spool") == set()

    asyncio.run(story())


def test_a_site_that_attends_later_gets_the_jobs_that_run_and_the_end_of_those_that_ended(
    running: Serving, site: Sites, job_text: Text, operator: Person
) -> None:
    """A job waits for its sites; one that was away at the end hears of it when it is back."""

    async def story() -> None:
        a, b = site("a"), site("b")
        async with running() as hub:
            for member in (a.member, b.member):
                await hub.coordinator.members.meet(member.statement)
            async with hub.attending(a):
                job = await hub.submit(operator, job_text(rounds=1, minimum=2))
                await a.until(JobOffer)
                run = hub.coordinator.conductor.job(job).run
                waits = "waiting for 1 more of 2 sites (not attending: b)"
                await until(lambda: run.view(0.0).reason == waits)  # once the answer of a is in
                async with hub.attending(b):
                    await _ended(b, JobState.FINISHED)
            b.heard.clear()
            async with hub.attending(b):
                assert await _ended(b, JobState.FINISHED) == "all 1 rounds done"

    asyncio.run(story())


def test_rounds_are_told_from_steps(running: Serving, site: Sites, job_text: Text, operator: Person) -> None:
    """After a restart people see the rounds that they saw before it."""

    async def story() -> None:
        a, b = site("a"), site("b")
        async with running() as hub, hub.attending(a, b):
            job = await hub.submit(operator, job_text(minimum=2))
            run = hub.coordinator.conductor.job(job).run
            await _ended(a, JobState.FINISHED)
            view = run.view(0.0)
            assert rounds_of(hub.store.steps(job)) == view.history
            assert [(each.number, each.sites) for each in view.history] == [(1, 2), (2, 2)]

    asyncio.run(story())


def test_a_site_that_was_paused_before_a_job_is_not_asked_for_it(
    running: Serving, site: Sites, job_text: Text, operator: Person
) -> None:
    """Seen by operators with no job too; paused twice is paused; a job submitted meanwhile starts once it goes on."""

    async def story() -> None:
        a, b = site("a"), site("b")
        async with running() as hub, hub.attending(a, b):
            room = hub.coordinator.conductor
            a.outgoing.put_nowait(Availability(available=False))
            a.outgoing.put_nowait(Availability(available=False))
            await until(lambda: room.doing("a") == ("paused", "its administrator has paused it"))
            job = await hub.submit(operator, job_text(rounds=1, minimum=2))
            await until(lambda: room.job(job).run.view(0.0).reason == "waiting for 1 more of 2 sites (paused: a)")
            a.outgoing.put_nowait(Availability(available=True))
            assert await _ended(a, JobState.FINISHED) == "all 1 rounds done"
            assert room.doing("a") == ("", "")

    asyncio.run(story())


def test_a_site_keeps_one_answer_to_a_step_on_the_coordinators_disk(
    running: Serving, site: Sites, job_text: Text, operator: Person, tmp_path: Path
) -> None:
    """Each further payload of the right length takes the place of the one before, whole or in part."""

    async def story() -> None:
        a, b = site("a"), site("b", lambda _: None)
        async with running() as hub, hub.attending(a, b):
            job = await hub.submit(operator, job_text(rounds=1, minimum=2))
            await b.until(StepStart)
            step = b.steps[-1]
            blobs = BlobStore(b.folder / "answers")
            spool = tmp_path / "spool" / job / "1" / "b"
            async with hub.opened(b.member) as connection:
                for count in range(3):
                    ref = blobs.put(prepared(step, count))
                    await connection.upload(job, ref, blobs)
                    assert _files(spool) == {ref.hex}
            b.outgoing.put_nowait(Contribution(job, step.step, step.attempt, ref, 1.0, 0.1))
            await until(lambda: len(b.steps) > 1)

    asyncio.run(story())
