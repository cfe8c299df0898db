"""Whole jobs under secure aggregation over real mutual TLS: exact sums, cuts, restarts, tampering, and what is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from coordinator import sealed as sealed_sums
from coordinator import secure_sums, worker
from coordinator.events import BeginSum, CloseSums, NoSum, SumFailed, SumStands
from coordinator.events import Send as Tell
from coordinator.records import Outcome, Secured, StepRecord
from coordinator.sealed import SealedSums, Surroundings
from coordinator.store.store import Store
from federation.blobs import BlobRef, BlobStore
from federation.errors import ConfigurationError, RemoteProtocolError, StorageError
from federation.messages import (
    Availability,
    DeclineCause,
    JobEnded,
    JobState,
    Refusal,
    RevocationList,
    Role,
    Sealed,
    StepEnded,
    StepKind,
    StepStart,
    StopJob,
    Welcome,
)
from federation.vector import from_safetensors
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.coordinator import Patience
from privacy.secure_aggregation.rostersum.coordinator_state import Standing
from privacy.secure_aggregation.rostersum.durable import Point
from privacy.secure_aggregation.rostersum.messages import Close, Open, Ready, Result, RoundStart, Train, Upload
from privacy.secure_aggregation.rostersum.plans import plan_id
from privacy.secure_aggregation.rostersum.site_events import Persist, Send
from tests.consortium import Consortium, Person, Running, Site, prepared, soon, until
from tests.coordinator.sealed_site import SealedSite
from tests.privacy.secure_aggregation.rostersum import looped

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from coordinator.events import Event
    from coordinator.evidence_log import Entry
    from coordinator.sealed import Performed
    from privacy.secure_aggregation.rostersum.site_events import Effect

Serving = Callable[..., AbstractAsyncContextManager[Running]]
Sites = Callable[..., SealedSite]
Text = Callable[..., str]

ROWS = {"a": 300, "b": 100, "c": 200}


def answer_of(name: str) -> Callable[[StepStart], bytes]:
    """What an honest site answers; each site's updates differ."""

    def answer(step: StepStart) -> bytes:
        if step.kind is not StepKind.EVALUATE:
            return prepared(step, ord(name) - ord("a"))
        words = np.zeros(step.length // 8, dtype="<f8")
        bins = (words.size - 3) // 2
        words[:3] = 4, 3, 2.0 / (1 + step.round)  # rows, correct, summed loss
        words[3 + bins // 2] = words[3 + bins + bins // 2 - 1] = 2  # two rows of each class
        return words.tobytes()

    return answer


@pytest.fixture
def operator(consortium: Consortium) -> Person:
    """One who submits."""
    return consortium.member("op", Role.OPERATOR)


@pytest.fixture
def sealed(consortium: Consortium, tmp_path: Path) -> Sites:
    """Makes a site that takes part in secure aggregation, with an answer of its own."""

    def make(name: str, **changes: object) -> SealedSite:
        changes.setdefault("answer", answer_of(name))
        return SealedSite(consortium.member(name), tmp_path / "sites", rows=ROWS[name], **changes)

    return make


@pytest.fixture
def sealed_text(job_text: Text) -> Text:
    """Writes a job file under secure aggregation; `privacy` holds further keys."""

    def write(privacy: str = "", **settings: object) -> str:
        return job_text(**settings).replace('secure_aggregation = "plain"', privacy)

    return write


async def _ended(site: Site, state: JobState) -> str:
    ended = await site.until(JobEnded)
    assert isinstance(ended, JobEnded)
    assert ended.state is state, ended.reason
    return ended.reason


def _steps(hub: Running, job: str) -> list[tuple[int, StepKind, int, tuple[str, ...]]]:
    return [
        (step.step, step.kind, step.round, tuple(each.site for each in step.shares if each.outcome is Outcome.COUNTED))
        for step in hub.store.steps(job)
    ]


def _model(hub: Running, job: str) -> list[float]:
    record = hub.store.job(job)
    assert record is not None
    assert record.model is not None
    _, values = from_safetensors((hub.folder / "jobs" / job / record.model.hex).read_bytes())
    return list(values)


def _mean(rounds: int) -> list[float]:
    """What so many rounds of the sites' prepared updates come to, each site weighing its records."""
    total = sum(ROWS.values())
    bias = sum(rows * (-0.25 - (ord(name) - ord("a"))) for name, rows in ROWS.items()) / total
    return [rounds * 0.5, rounds * bias]


class Once:
    """Strikes at the first effect of a site's machine that is so."""

    def __init__(self, so: Callable[[Effect], bool]) -> None:
        self.so = so
        self.struck = asyncio.Event()

    def __call__(self, effect: Effect) -> bool:
        """Whether it strikes at this effect."""
        strikes = not self.struck.is_set() and self.so(effect)
        if strikes:
            self.struck.set()
        return strikes


def _says(kind: type, plan: int = plan_id(StepKind.TRAIN)) -> Callable[[SealedSite], Once]:
    """Strikes when the site would say this in a round of the plan."""

    def of(site: SealedSite) -> Once:
        def so(effect: Effect) -> bool:
            starts = [each for each in site.told if isinstance(each, Train)]
            return isinstance(effect, Send) and isinstance(effect.message, kind) and starts[-1].plan_id == plan

        return Once(so)

    return of


def _whole(*sites: str) -> list[tuple[int, StepKind, int, tuple[str, ...]]]:
    return [
        (1, StepKind.STATISTICS, 0, sites),
        (2, StepKind.TRAIN, 1, sites),
        (3, StepKind.EVALUATE, 1, sites),
        (4, StepKind.TRAIN, 2, sites),
        (5, StepKind.EVALUATE, 2, sites),
    ]


def test_a_job_is_summed_under_secure_aggregation_to_its_end(
    running: Serving, sealed: Sites, sealed_text: Text, operator: Person, tmp_path: Path
) -> None:
    """Statistics, two rounds, evaluations: the weighted mean is exact, all are counted, and each hears CLOSE first."""
    a, b, c = (sealed(name) for name in "abc")

    async def story() -> None:
        async with running() as hub:
            async with hub.attending(a, b, c):
                job = await hub.submit(operator, sealed_text())
                assert await _ended(a, JobState.FINISHED) == "all 2 rounds done"
                for each in (b, c):
                    await _ended(each, JobState.FINISHED)
            assert _steps(hub, job) == _whole("a", "b", "c")
            assert _model(hub, job) == pytest.approx(_mean(2), abs=1e-5)
            record = hub.store.job(job)
            assert record is not None
            metrics = {metric.name: metric.value for metric in dict(record.metrics)[2]}
            assert metrics["n"] == 12
            for each in (a, b, c):
                assert [step.counted for step in each.heard if isinstance(step, StepEnded)] == [True] * 5
                assert len([said for said in each.told if isinstance(said, Result)]) == 5
                assert [type(said) for said in each.told][-1] is Close
            assert all(share.seconds == 0 for step in hub.store.steps(job) for share in step.shares)
            await until(lambda: not list((tmp_path / "sealed").glob("*/*")))

    asyncio.run(story())


# ------------------------------------------------------------------------------------------------------- lines are cut


def test_a_site_that_leaves_before_it_is_ready_is_waited_for(
    running: Serving, sealed: Sites, sealed_text: Text, operator: Person
) -> None:
    """The view names it and what it owes; it comes back as a new process, is asked again, and nobody uploads twice."""
    a, b, c = (sealed(name) for name in "abc")

    async def story() -> None:
        b.cut = cut = _says(Ready)(b)
        async with running() as hub, hub.attending(a, b, c):
            job = await hub.submit(operator, sealed_text())
            await soon(cut.struck.wait())
            conducted = hub.coordinator.conductor.job(job)
            await until(lambda: conducted.run.view(0.0).reason == "waiting for b to get ready")
            sites = {site.name: site for site in conducted.run.view(0.0).sites}
            assert "went away" in sites["b"].trouble
            assert sites["a"].trouble == ""
            b.restart()
            async with hub.attending(b):
                await _ended(a, JobState.FINISHED)
                await _ended(b, JobState.FINISHED)
                assert _steps(hub, job) == _whole("a", "b", "c")
                assert _model(hub, job) == pytest.approx(_mean(2), abs=1e-5)
                assert len([said for said in a.said if isinstance(said, Upload)]) == 5

    asyncio.run(story())


@pytest.mark.parametrize("restarts", [False, True], ids=["the line is cut", "the process ends"])
def test_a_site_that_leaves_after_its_upload_costs_nothing(
    running: Serving, sealed: Sites, sealed_text: Text, operator: Person, *, restarts: bool
) -> None:
    """It opens when it comes back; a new process that has forgotten its seed is rescued by the others. One upload."""
    a, b, c = (sealed(name) for name in "abc")

    async def story() -> None:
        says = _says(Open)(b)
        opens = Once(lambda effect: isinstance(effect, Persist) and effect.point is Point.OPENED and train(b))
        b.cut = cut = opens if restarts else says
        async with running() as hub, hub.attending(a, b, c):
            job = await hub.submit(operator, sealed_text())
            await soon(cut.struck.wait())
            conducted = hub.coordinator.conductor.job(job)
            await until(lambda: conducted.run.view(0.0).reason == "waiting for b to open the sum")
            if restarts:
                b.restart()
            async with hub.attending(b):
                await _ended(a, JobState.FINISHED)
                assert _steps(hub, job) == _whole("a", "b", "c")
                assert _model(hub, job) == pytest.approx(_mean(2), abs=1e-5)
                assert len([said for said in b.said if isinstance(said, Upload)]) == 5

    def train(site: SealedSite) -> bool:
        return [each for each in site.told if isinstance(each, Train)][-1].plan_id == plan_id(StepKind.TRAIN)

    asyncio.run(story())


def test_a_paused_site_is_waited_for_and_asked_again(
    running: Serving, sealed: Sites, sealed_text: Text, operator: Person
) -> None:
    """It has no seat in the sum while its administrator has paused it; let go on, it takes its place again."""
    a, b, c = (sealed(name) for name in "abc")

    async def story() -> None:
        paused: list[StepStart] = []

        def answer(step: StepStart) -> bytes | None:
            if step.kind is StepKind.TRAIN and not paused:
                paused.append(step)
                b.outgoing.put_nowait(Availability(available=False))
                return None
            return answer_of("b")(step)

        b.answer = answer
        async with running() as hub, hub.attending(a, b, c):
            job = await hub.submit(operator, sealed_text())
            conducted = hub.coordinator.conductor.job(job)
            await until(lambda: conducted.sealed._seated == {"a", "c"} and conducted.run.record.next_step == 2)
            b.outgoing.put_nowait(Availability(available=True))
            await _ended(a, JobState.FINISHED)
            assert _steps(hub, job) == _whole("a", "b", "c")
            assert len([step for step in b.steps if step.kind is StepKind.TRAIN]) == 3

    asyncio.run(story())


# --------------------------------------------------------------------------------------------- the coordinator restarts


@pytest.mark.parametrize(
    ("cut", "attempts"), [(_says(Upload), 2), (_says(Open), 1)], ids=["while it takes uploads", "while sites open"]
)
def test_a_coordinator_restarted_in_mid_round_goes_on(
    running: Serving,
    sealed: Sites,
    sealed_text: Text,
    operator: Person,
    cut: Callable[[SealedSite], Once],
    attempts: int,
) -> None:
    """Before FULL it takes another attempt; after it the very vectors that are here are opened. The sum is exact."""
    a, b, c = (sealed(name) for name in "abc")

    async def story() -> None:
        b.cut = struck = cut(b)
        async with running() as hub, hub.attending(a, b, c):
            job = await hub.submit(operator, sealed_text())
            await soon(struck.struck.wait())
        async with running() as hub, hub.attending(a, b, c):
            await _ended(a, JobState.FINISHED)
            assert _steps(hub, job) == _whole("a", "b", "c")
            assert _model(hub, job) == pytest.approx(_mean(2), abs=1e-5)
        heard = [said for each in (a, b, c) for said in each.told]  # not every site hears of an attempt that is cut
        starts = {(said.r, said.a) for said in heard if isinstance(said, RoundStart) and said.plan_id == 2}
        assert len(starts) == attempts + 1

    asyncio.run(story())


def _full(*_: object, **__: object) -> None:
    raise StorageError("the disk is full", fix="make room")


async def _held_back(hub: Running, operator: Person, text: str) -> str:
    """Submits a job, and returns it once its view says that the disk holds it back."""
    job = await hub.submit(operator, text)
    conducted = hub.coordinator.conductor.job(job)
    await until(lambda: "the disk is full (make room)" in conducted.run.view(0.0).reason)
    return job


def test_a_coordinator_restarted_while_it_sums_makes_the_sum_of_what_lies_here(
    running: Serving,
    sealed: Sites,
    sealed_text: Text,
    operator: Person,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its disk refused the sum, which the view says; after a restart it is made before any site sends again."""
    a, b, c = (sealed(name) for name in "abc")
    monkeypatch.setattr(worker, "_RETRY_SECONDS", 0.01)

    async def story() -> None:
        with monkeypatch.context() as broken:
            broken.setattr(secure_sums, "perform", _full)
            async with running() as hub, hub.attending(a, b, c):
                job = await _held_back(hub, operator, sealed_text())
        async with running() as hub, hub.attending(a, b, c):
            await _ended(a, JobState.FINISHED)
            assert _steps(hub, job) == _whole("a", "b", "c")
            assert _model(hub, job) == pytest.approx(_mean(2), abs=1e-5)
        assert len([said for said in a.said if isinstance(said, Upload)]) == 5

    asyncio.run(story())


@pytest.mark.parametrize(
    "damage",
    [lambda file: file.write_bytes(_flipped(file.read_bytes())), lambda file: file.write_bytes(b""), Path.unlink],
    ids=["other bytes", "no bytes", "no file"],
)
def test_a_vector_that_a_power_cut_damaged_burns_its_round_and_the_job_goes_on(
    running: Serving,
    sealed: Sites,
    sealed_text: Text,
    operator: Person,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], object],
) -> None:
    """Uploads are not synced: what is not what a site signed is never summed; another round gives the exact sum."""
    a, b, c = (sealed(name) for name in "abc")
    monkeypatch.setattr(worker, "_RETRY_SECONDS", 0.01)

    async def story() -> None:
        with monkeypatch.context() as broken:
            broken.setattr(secure_sums, "perform", _full)
            async with running() as hub, hub.attending(a, b, c):
                job = await _held_back(hub, operator, sealed_text())
        (vector,) = hub.folder.glob(f"sealed/{job}/*/b/*")
        damage(vector)
        async with running() as hub, hub.attending(a, b, c):
            await _ended(a, JobState.FINISHED)
            assert _steps(hub, job) == _whole("a", "b", "c")
            assert _model(hub, job) == pytest.approx(_mean(2), abs=1e-5)
        assert len([said for said in a.said if isinstance(said, Upload)]) == 6

    asyncio.run(story())


def test_a_step_whose_commit_was_not_heard_of_is_not_summed_again(
    running: Serving,
    sealed: Sites,
    sealed_text: Text,
    operator: Person,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step and standing are one transaction: after a crash just behind it, run and machine are at the next step."""
    a, b, c = (sealed(name) for name in "abc")
    monkeypatch.setattr(worker, "_RETRY_SECONDS", 0.01)
    commit = Store.commit_step

    def deaf(store: Store, record: StepRecord, standing: bytes | None = None) -> None:
        commit(store, record, standing)
        if record.step == 2:
            raise StorageError("the connection broke off", fix="wait")

    async def story() -> None:
        with monkeypatch.context() as broken:
            broken.setattr(Store, "commit_step", deaf)
            async with running() as hub, hub.attending(a, b, c):
                job = await hub.submit(operator, sealed_text())
                conducted = hub.coordinator.conductor.job(job)
                await until(lambda: "the connection broke off" in conducted.run.view(0.0).reason)
                assert not [said for said in a.told if isinstance(said, Result)][1:], "RESULT left before its commit"
        async with running() as hub, hub.attending(a, b, c):
            await _ended(a, JobState.FINISHED)
            assert _steps(hub, job) == _whole("a", "b", "c")
            assert _model(hub, job) == pytest.approx(_mean(2), abs=1e-5)
        assert len([said for said in a.said if isinstance(said, Upload)]) == 5

    asyncio.run(story())


def test_nothing_leaves_before_what_it_follows_from_is_durable(
    running: Serving,
    sealed: Sites,
    sealed_text: Text,
    operator: Person,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the store refuses a standing, no site hears what was said after it; the view says what holds the job."""
    a, b, c = (sealed(name) for name in "abc")
    monkeypatch.setattr(worker, "_RETRY_SECONDS", 0.01)
    keep, refusing = Store.set_standing, [True]

    def full(store: Store, job: str, standing: bytes) -> None:
        ways = Standing.decode(standing).ways
        if refusing and ways and ways[0].start:
            raise StorageError("the disk is full", fix="make room")
        keep(store, job, standing)

    async def story() -> None:
        monkeypatch.setattr(Store, "set_standing", full)
        async with running() as hub, hub.attending(a, b, c):
            job = await hub.submit(operator, sealed_text())
            conducted = hub.coordinator.conductor.job(job)
            await until(lambda: "the disk is full (make room)" in conducted.run.view(0.0).reason)
            a.outgoing.put_nowait(Sealed(job, b"noise"))
            await a.until(Refusal)  # what the coordinator had said before that has arrived
            assert not [said for said in a.told if isinstance(said, RoundStart)]
            refusing.clear()
            await _ended(a, JobState.FINISHED)

    asyncio.run(story())


# ------------------------------------------------------------------------------------------------- what goes wrong


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def test_a_tampered_upload_burns_the_round_and_the_job_goes_on(
    running: Serving, sealed: Sites, sealed_text: Text, operator: Person
) -> None:
    """One bit of one masked vector: the model does not move, the step is summed again, and the model is exact."""
    a, b, c = (sealed(name) for name in "abc")
    tampered: list[bytes] = []

    def once(content: bytes) -> bytes:
        if len(content) == 4 * (1 + 2 + 4) and not tampered:
            tampered.append(content)
            return _flipped(content)
        return content

    async def story() -> None:
        b.tamper = once
        async with running() as hub, hub.attending(a, b, c):
            job = await hub.submit(operator, sealed_text())
            await _ended(a, JobState.FINISHED)
            assert _steps(hub, job) == _whole("a", "b", "c")
            assert [step.attempt for step in hub.store.steps(job)] == [0, 1, 0, 0, 0]
            assert _model(hub, job) == pytest.approx(_mean(2), abs=1e-5)
            assert [each.counted for each in a.heard if isinstance(each, StepEnded)] == [True, False, *[True] * 4]

    asyncio.run(story())


def test_a_step_whose_sum_is_always_burned_fails_in_words(
    running: Serving, sealed: Sites, sealed_text: Text, operator: Person
) -> None:
    """Three burned sums in a row end the job; nobody can be named, and the words say what did not hold."""
    a, b, c = (sealed(name) for name in "abc")
    b.tamper = _flipped

    async def story() -> None:
        async with running() as hub, hub.attending(a, b, c):
            await hub.submit(operator, sealed_text())
            reason = await _ended(a, JobState.FAILED)
            assert "step 1 (statistics) failed 3 times (the sum did not hold its checks" in reason

    asyncio.run(story())


def test_a_site_that_always_declines_is_named_when_the_job_fails(
    running: Serving, sealed: Sites, sealed_text: Text, operator: Person
) -> None:
    """Its DECLINE gives no reason; the job's end says whose it was."""
    a, b, c = (sealed(name) for name in "abc")
    honest = b.answer
    b.answer = lambda step: DeclineCause.RESOURCES if step.kind is StepKind.TRAIN else honest(step)

    async def story() -> None:
        async with running() as hub, hub.attending(a, b, c):
            await hub.submit(operator, sealed_text())
            reason = await _ended(a, JobState.FAILED)
            told = "b: declined this step; its own log says why"
            assert reason == f"step 2 (train) failed 3 times ({told})"

    asyncio.run(story())


def test_an_upload_may_overtake_the_message_that_announces_it(
    running: Serving, sealed: Sites, sealed_text: Text, operator: Person
) -> None:
    """It waits for its announcement, and every one is taken."""
    a, b, c = (sealed(name) for name in "abc")

    async def story() -> None:
        async with running() as hub, hub.attending(a, b, c):
            job = await hub.submit(operator, sealed_text())
            conducted = hub.coordinator.conductor.job(job)
            b.overtaken = lambda: conducted.sealed._announced._waiters
            await _ended(a, JobState.FINISHED)
            assert _steps(hub, job) == _whole("a", "b", "c")

    asyncio.run(story())


def test_an_upload_that_nobody_announces_is_refused(
    running: Serving,
    sealed: Sites,
    sealed_text: Text,
    operator: Person,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After its wait, in words; nothing of it is kept."""
    a, b = sealed("a"), sealed("b")
    monkeypatch.setattr(sealed_sums, "_EXPECT_SECONDS", 0.05)

    async def story() -> None:
        async with running() as hub, hub.attending(a, b, sealed("c", answer=lambda _: None)):
            job = await hub.submit(operator, sealed_text())
            await a.until(StepStart)
            blobs = BlobStore(tmp_path / "strange")
            ref = blobs.put(b"no vector")
            async with hub.opened(a.member) as connection:
                with pytest.raises(RemoteProtocolError, match="does not wait for 9 bytes of a now"):
                    await connection.upload(job, ref, blobs)
            assert not list((tmp_path / "sealed").rglob(f"{ref.hex}*"))

    asyncio.run(story())


def test_what_no_site_may_say_is_refused_and_changes_nothing(
    running: Serving, site: Callable[..., Site], sealed: Sites, sealed_text: Text, operator: Person
) -> None:
    """To a plain job, before the job is accepted, the coordinator's own words, noise, and another site's message."""
    a, b, c = (sealed(name) for name in "abc")
    c.answer = lambda _: None

    async def story() -> None:
        async with running() as hub, hub.attending(a, b, c):
            job = await hub.submit(operator, sealed_text())
            await until(lambda: [said for said in b.said if isinstance(said, Ready)])
            await until(lambda: [said for said in a.told if isinstance(said, Train)])
            ready = next(said for said in b.said if isinstance(said, Ready))
            close = next(said for said in a.told if isinstance(said, Train))
            for content, words in (
                (messages.encode(ready), "sent the READY of site 1"),
                (messages.encode(close), "sent a TRAIN, which only a coordinator says"),
                (b"noise", ""),
            ):
                refusals = [each for each in a.heard if isinstance(each, Refusal)]
                a.outgoing.put_nowait(Sealed(job, content))
                refusal = await a.until(Refusal, len(refusals) + 1)
                assert isinstance(refusal, Refusal)
                assert words in refusal.problem
            d = site("d", lambda _: None)
            async with hub.attending(d):
                d.outgoing.put_nowait(Sealed(job, messages.encode(ready)))
                refusal = await d.until(Refusal)
                assert isinstance(refusal, Refusal)
                assert "takes part in no secure aggregation" in refusal.problem
            c.answer = answer_of("c")

    asyncio.run(story())


# ------------------------------------------------------------------------------------------------------------- the ends


def test_a_stopped_job_is_closed_at_every_site_also_at_one_that_was_away(
    running: Serving, sealed: Sites, sealed_text: Text, operator: Person, tmp_path: Path
) -> None:
    """CLOSE, then JobEnded: at once, when a site comes back, and after the coordinator was restarted."""
    a, b, c = (sealed(name) for name in "abc")
    c.answer = lambda step: None if step.kind is StepKind.TRAIN else answer_of("c")(step)

    def last(each: SealedSite) -> list[type]:
        """A message that crossed the cut may be refused meanwhile."""
        return [type(said) for said in each.heard if not isinstance(said, Refusal)][-2:]

    async def story() -> None:
        async with running() as hub:
            async with hub.attending(a, b, c):
                job = await hub.submit(operator, sealed_text())
                await until(lambda: hub.coordinator.conductor.job(job).run.record.next_step == 2)
            async with hub.attending(a), hub.opened(operator) as connection:
                await until(lambda: hub.coordinator.conductor.job(job).run.seated == {"a"})
                await connection.operate(StopJob(job))
                await _ended(a, JobState.STOPPED)
                assert last(a) == [Sealed, JobEnded]
                assert isinstance(a.told[-1], Close)
            async with hub.attending(b):
                await _ended(b, JobState.STOPPED)
                assert last(b) == [Sealed, JobEnded]
            await until(lambda: not list((tmp_path / "sealed").glob("*/*")))
        async with running() as hub, hub.attending(c):
            await _ended(c, JobState.STOPPED)
            assert [type(said) for said in c.heard][-3:] == [Welcome, Sealed, JobEnded]
            assert isinstance(c.told[-1], Close)

    asyncio.run(story())


def test_a_revoked_site_is_in_no_sum_any_more(
    running: Serving, sealed: Sites, sealed_text: Text, operator: Person, consortium: Consortium
) -> None:
    """Its round is given up, others are told, and the job waits in words; its machine knows the revocation durably."""
    a, b, c = (sealed(name) for name in "abc")
    c.answer = lambda step: None if step.kind is StepKind.TRAIN else answer_of("c")(step)

    async def story() -> None:
        async with running() as hub, hub.attending(a, b, c):
            job = await hub.submit(operator, sealed_text())
            conducted = hub.coordinator.conductor.job(job)
            await until(lambda: conducted.run.record.next_step == 2 and len(a.steps) == 2)
            revocations: RevocationList = consortium.revoked(b.member)
            hub.coordinator.conductor.revoked(revocations)
            hub.coordinator.attendance.revoked(revocations, hub.coordinator.conductor)
            await until(lambda: conducted.run.view(0.0).reason == "waiting for 1 more of 3 sites (not attending: b)")
            sites = {site.name: site.trouble for site in conducted.run.view(0.0).sites}
            assert sites["b"] == "its membership was revoked"
            await until(lambda: conducted.sealed._machine.standing.revoked == (1,))
        async with running() as hub, hub.attending(a, c):
            conducted = hub.coordinator.conductor.job(job)
            await until(lambda: conducted.run.seated == {"a", "c"})
            assert conducted.run.view(0.0).reason == "waiting for 1 more of 3 sites (not attending: b)"

    asyncio.run(story())


def test_terms_that_no_site_could_accept_are_refused_at_submission(
    running: Serving, sealed: Sites, sealed_text: Text, operator: Person
) -> None:
    """Too few sites, one site in no cell, cells too small: in words, with who must act, and nothing is stored."""
    sites = [sealed(name) for name in "abc"]

    async def story() -> None:
        async with running() as hub:
            for each in sites[:2]:
                await hub.coordinator.members.meet(each.member.statement)
            with pytest.raises(ConfigurationError, match=r"2 sites.*To fix \(the job's author\)"):
                await hub.submit(operator, sealed_text(minimum=2))
            await hub.coordinator.members.meet(sites[2].member.statement)
            with pytest.raises(ConfigurationError, match=r"To fix \(the job's author\)"):
                await hub.submit(operator, sealed_text('cells = [["a", "b"]]'))
            assert hub.store.jobs() == ()
            assert not list(hub.folder.glob("jobs/*"))

    asyncio.run(story())


# ---------------------------------------------------------------------------------------------- without sockets or disk


@dataclass
class Bench:
    """Secure aggregation of one job by itself: what it says and feeds is kept, and what it keeps may have to wait."""

    folder: Path
    standing: Standing = field(default_factory=Standing)
    patience: Patience = field(default_factory=Patience)
    posted: list[tuple[str, object]] = field(default_factory=list)
    fed: list[Event] = field(default_factory=list)
    recorded: list[tuple[Entry, ...]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    durable: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[SealedSums]:
        """Its task runs until the block ends."""
        self.durable.set()

        async def keep(_: bytes) -> None:
            self.asked.set()
            await self.durable.wait()

        async def never(_: object) -> Performed:
            raise AssertionError

        async def tidy(work: Callable[[], None]) -> None:
            work()

        async def record(entries: tuple[Entry, ...]) -> None:
            self.recorded.append(entries)

        around = Surroundings(lambda *said: self.posted.append(said), self.fed.append, keep, record, never, tidy)
        secured = Secured(looped.job().encode(), self.standing.encode())
        summing = SealedSums("heart-1", secured, looped.key(0xC0), self.patience, self.folder, around, 3)
        task = asyncio.create_task(summing.run())
        yield summing
        self.durable.set()
        summing.end()
        await soon(task)

    def trains(self) -> list[str]:
        """Who was told to work, in order."""
        said = [(name, messages.decode(each.content)) for name, each in self.posted if isinstance(each, Sealed)]
        return [name for name, message in said if isinstance(message, Train)]


def _begin(number: int = 1) -> BeginSum:
    model = BlobRef.of(b"model %d" % number)
    kind = StepKind.STATISTICS
    return BeginSum(StepStart("heart-1", number, 0, kind, 0, model, model, 24, 60.0))


async def _turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_site_that_has_gone_is_told_nothing_although_it_was_here_when_that_was_decided(tmp_path: Path) -> None:
    """What was kept back by the disk would reach its next stream, before the job is offered there."""

    async def story() -> None:
        bench = Bench(tmp_path)
        async with bench.at_work() as summing:
            summing.seat(frozenset({"s0", "s1", "s2"}))
            await _turns()
            bench.asked.clear()
            bench.durable.clear()
            summing.perform(_begin())
            await soon(bench.asked.wait())
            assert bench.trains() == []
            summing.seat(frozenset({"s0", "s1"}))
            bench.durable.set()
            await _turns()
            assert bench.trains() == ["s0", "s1"]
            summing.seat(frozenset({"s0", "s1", "s2"}))
            await _turns()
            assert bench.trains() == ["s0", "s1", "s2"]

    asyncio.run(story())


def test_a_bug_ends_the_job_in_words_and_the_sites_still_hear_of_it(tmp_path: Path) -> None:
    """Another step while one is being summed cannot be: the run is told that there will be no sum."""

    async def story() -> None:
        bench = Bench(tmp_path)
        async with bench.at_work() as summing:
            summing.seat(frozenset({"s0", "s1", "s2"}))
            summing.perform(_begin())
            summing.perform(_begin(2))
            await _turns()
            assert "another step than step 2 of job heart-1 is being summed" in bench.fed[-1].problem
            summing.perform(CloseSums((Tell("s0", JobEnded("heart-1", JobState.FAILED, "a bug")),)))
            await _turns()
            assert [name for name, _ in bench.posted[-2:]] == ["s0", "s0"]
            assert bench.posted[-1] == ("s0", JobEnded("heart-1", JobState.FAILED, "a bug"))

    asyncio.run(story())


def test_sums_that_were_closed_before_a_crash_are_not_opened_again(tmp_path: Path) -> None:
    """The stop was not stored, the closing was: the job ends in words."""

    async def story() -> None:
        bench = Bench(tmp_path, Standing(closed=1))
        async with bench.at_work() as summing:
            summing.perform(_begin())
            await _turns()
            assert bench.fed == [NoSum("its secure aggregation was closed already, and opens no further sum")]

    asyncio.run(story())


def test_what_sites_say_is_bounded_while_the_disk_holds_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has no seat is not heard; what would be too much is refused, and taken again once there is room."""
    refuse = messages.Refuse(looped.job().job_hash, 0, 0, 0, messages.Code.E_TERMS, messages.NOBODY, 0, 0, 0)
    content = messages.encode(messages.sign(refuse, looped.key(1)))
    monkeypatch.setattr(sealed_sums, "_MOST_WAITING", len(content))

    async def story() -> None:
        bench = Bench(tmp_path)
        async with bench.at_work() as summing:
            with pytest.raises(RemoteProtocolError, match="site s0 must accept job heart-1"):
                summing.hear("s0", content)
            summing.seat(frozenset({"s0"}))
            summing.hear("s0", content)
            with pytest.raises(RemoteProtocolError, match="cannot take a REFUSE of site s0 now: its disk"):
                summing.hear("s0", content)
            await _turns()
            summing.hear("s0", content)

    asyncio.run(story())


def test_a_site_that_no_set_can_do_without_ends_the_job_when_it_is_revoked(tmp_path: Path) -> None:
    """Nobody may be missing from this cell: a sum is never begun again, and the words name the site."""

    async def story() -> None:
        bench = Bench(tmp_path)
        async with bench.at_work() as summing:
            summing.seat(frozenset({"s0", "s1", "s2"}))
            summing.revoke("s1")
            summing.perform(_begin())
            await _turns()
            told = NoSum("no sum is allowed without s1 (revoked, or without keys in common with another)")
            assert bench.fed[-1] == told

    asyncio.run(story())


def test_a_sum_for_which_nobody_gets_ready_in_time_is_given_up(tmp_path: Path) -> None:
    """After its patience, and as long again: the run is told whom it waited for, and that nothing broke."""

    async def story() -> None:
        bench = Bench(tmp_path, patience=Patience(ready=0.01))
        async with bench.at_work() as summing:
            summing.seat(frozenset({"s0", "s1"}))
            summing.perform(_begin())
            await until(lambda: any(isinstance(event, SumFailed) for event in bench.fed))
            assert bench.fed[-2:] == [
                SumStands(1, 0, frozenset({"s0", "s1", "s2"}), ""),
                SumFailed(1, 0, "too few sites are ready: s0, s1, s2", broken=False),
            ]

    asyncio.run(story())
