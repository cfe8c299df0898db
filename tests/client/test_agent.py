"""The agent over real mutual TLS, with a trainer that is told what to answer: what it survives, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from client import agent as agent_module
from client import policy
from client.agent import Agent
from client.backoff import Backoff
from client.journal import Journal
from client.pause import pause, resume
from client.session_events import Remembered, SiteIdentity, Worked
from client.training.protocol import CheckData, ComputeStatistics, Done, Evaluate, Failed, Train, Warm
from coordinator import attendance
from coordinator.events import StopAsked
from coordinator.records import Outcome
from federation.blobs import CHUNK, BlobRef, BlobStore
from federation.errors import IdentityError, ParleyError, StorageError, WhoActs
from federation.findings import Finding
from federation.messages import JobOffer, JobState, RevocationList, Role, StepKind, StepStart
from federation.vector import Layout, TensorSpec, to_safetensors
from tests.consortium import Consortium, Person, Running, prepared, soon, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from client.training.protocol import Answer, Request

Serving = Callable[..., AbstractAsyncContextManager[Running]]
Text = Callable[..., str]

PLAIN = policy.example(plain=True)
BIG = Layout((TensorSpec("weight", (1, 700_000)),))
BIG_MODEL = to_safetensors(BIG, np.zeros(BIG.size, dtype=np.float32))


def _step(request: Request, length: int) -> StepStart:
    """The step that a request to the trainer is about."""
    kinds = {ComputeStatistics: StepKind.STATISTICS, Train: StepKind.TRAIN, Evaluate: StepKind.EVALUATE}
    ref = BlobRef.of(b"")
    return StepStart("job", 1, 0, kinds[type(request)], 1, ref, ref, length, 1.0)


@dataclass
class Trainer:
    """Stands in for the child process: writes prepared vectors, or answers as a test says."""

    asked: list[Request] = field(default_factory=list)
    answers: dict[type[Request], Callable[[Request], Answer]] = field(default_factory=dict)
    holds: asyncio.Event | None = None
    held: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: list[type[Request]] = field(default_factory=list)
    values: int = 2
    closed: bool = False

    async def ask(self, request: Request) -> Answer:
        """Does it, once it is let."""
        return self._answered(await self._let(request))

    async def _let(self, request: Request) -> Request:
        self.asked.append(request)
        if self.holds is not None and isinstance(request, Train):
            self.held.set()
            try:
                await self.holds.wait()
            except asyncio.CancelledError:
                self.cancelled.append(type(request))
                raise
        return request

    def _answered(self, request: Request) -> Answer:
        if type(request) in self.answers:
            return self.answers[type(request)](request)
        if isinstance(request, Warm | CheckData):
            return Done()
        length = {ComputeStatistics: 24, Train: 4 * self.values, Evaluate: 8 * 1027}[type(request)]
        content = bytes(length) if isinstance(request, Train) else prepared(_step(request, length))
        Path(request.output).write_bytes(content)
        return Done(length, weight=10.0, seconds=0.1)

    async def close(self) -> None:
        """Nothing runs any more."""
        self.closed = True

    def kinds(self) -> list[type[Request]]:
        """What it was asked, in order, apart from warming up."""
        return [type(request) for request in self.asked if not isinstance(request, Warm)]


@dataclass
class Hospital:
    """An agent with its trainer, its policy, and what it was told to keep."""

    member: Person
    folder: Path
    trainer: Trainer = field(default_factory=Trainer)
    rules: policy.Policy = field(default_factory=lambda: policy.parse(PLAIN, "policy.toml"))
    kept: list[RevocationList] = field(default_factory=list)

    def agent(self, hub: Running) -> Agent:
        """Its agent, attending this coordinator."""
        me = SiteIdentity(self.member.statement, hub.consortium.root.public, hub.consortium.nobody)
        return Agent(self.folder, hub.line(self.member), me, lambda: self.rules, self.kept.append, self.trainer)

    @asynccontextmanager
    async def running(self, hub: Running) -> AsyncIterator[asyncio.Task[None]]:
        """Its agent runs until the block ends."""
        task = asyncio.create_task(self.agent(hub).run())
        try:
            await until(lambda: hub.coordinator.attendance.present(self.member.name) or task.done())
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def hospital(consortium: Consortium, tmp_path: Path) -> Callable[[str], Hospital]:
    """Makes a hospital."""

    def make(name: str) -> Hospital:
        return Hospital(consortium.member(name), tmp_path / "homes" / name)

    return make


@pytest.fixture
def operator(consortium: Consortium) -> Person:
    """One who submits."""
    return consortium.member("op", Role.OPERATOR)


@pytest.fixture
def job_file(job_text: Text) -> Text:
    """Writes a job file of so many rounds."""

    def write(rounds: int) -> str:
        return job_text().replace("maximum = 5", f"maximum = {rounds}")

    return write


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for the next try."""
    monkeypatch.setattr(agent_module, "Backoff", lambda **_: Backoff(0.005, 0.01))


async def _over(hub: Running, job: str) -> tuple[JobState, str]:
    """How the job ended."""
    run = hub.coordinator.conductor.job(job).run
    await until(lambda: run.over)
    return run.record.state, run.record.reason


def _counted(hub: Running, job: str) -> list[tuple[str, ...]]:
    """Who was counted in each committed step."""
    return [
        tuple(share.site for share in step.shares if share.outcome is Outcome.COUNTED) for step in hub.store.steps(job)
    ]


# ------------------------------------------------------------------------------------------------------ what it does


def test_two_agents_do_a_job(
    running: Serving, hospital: Callable[[str], Hospital], job_file: Text, operator: Person
) -> None:
    """Check, statistics, training and evaluation are asked of the trainer in turn; at the end nothing is kept."""
    a, b = hospital("a"), hospital("b")

    async def story() -> None:
        async with running() as hub, a.running(hub), b.running(hub):
            job = await hub.submit(operator, job_file(rounds=2))
            assert await _over(hub, job) == (JobState.FINISHED, "all 2 rounds done")
            assert _counted(hub, job) == [("a", "b")] * 5
            await until(lambda: list((a.folder / "work").iterdir()) == [])
        assert a.trainer.kinds() == [CheckData, ComputeStatistics, Train, Evaluate, Train, Evaluate]
        train = a.trainer.asked[-2]
        assert isinstance(train, Train)
        assert (train.site, train.round_number, train.subject.dataset) == ("a", 2, "heart")
        assert train.subject.registry == str(a.folder)
        assert a.trainer.closed

    asyncio.run(story())


def test_a_sites_disk_does_not_fill_with_the_rounds(
    running: Serving, hospital: Callable[[str], Hospital], job_file: Text, operator: Person
) -> None:
    """In the last of six rounds there lie this round's payloads alone."""
    a, b = hospital("a"), hospital("b")
    seen: list[int] = []

    def counted(request: Request) -> Answer:
        assert isinstance(request, Train)
        seen.append(len(list(Path(request.output).parent.iterdir())))
        Path(request.output).write_bytes(bytes(8))
        return Done(8, weight=1.0)

    a.trainer.answers[Train] = counted

    async def story() -> None:
        async with running() as hub, a.running(hub), b.running(hub):
            job = await hub.submit(operator, job_file(rounds=6))
            assert (await _over(hub, job))[0] is JobState.FINISHED

    asyncio.run(story())
    assert seen == [2] * 6  # a model and a preparation


# -------------------------------------------------------------------------------------------------- what it survives


def test_what_was_downloaded_does_not_outlive_the_agent(
    hospital: Callable[[str], Hospital], consortium: Consortium
) -> None:
    """A power cut may damage a model that was never synced and leave its length right: only results are taken up."""
    athens = hospital("athens")
    blobs, _, result = _journalled(athens)

    athens.agent(Running(consortium, None, None, None, 1))._recall()

    assert [file.name for file in blobs.folder.iterdir()] == [result.hex]


def test_a_result_that_a_power_cut_damaged_is_forgotten(
    hospital: Callable[[str], Hospital], consortium: Consortium
) -> None:
    """The journal names it, and its length is right, but not its bytes: its step is asked again and done again."""
    athens = hospital("athens")
    blobs, journal, result = _journalled(athens)
    blobs.path(result).write_bytes(bytes(result.length))

    athens.agent(Running(consortium, None, None, None, 1))._recall()

    assert not blobs.folder.exists()
    assert journal.remembered() == ()


def _journalled(site: Hospital) -> tuple[BlobStore, Journal, BlobRef]:
    """What a site that was ended in a step leaves: its work folder, its journal, and the result that this names."""
    blobs, journal = BlobStore(site.folder / "work" / "job-1"), Journal(site.folder / "journal")
    model, result = blobs.put(b"a model, never synced"), blobs.put(b"a result")
    (blobs.folder / f"{BlobRef.of(b'half a model').hex}.part").write_bytes(b"half")
    step = StepStart("job-1", 2, 0, StepKind.TRAIN, 1, model, model, result.length, 60.0)
    offer = JobOffer("job-1", "text", (site.member.statement,))
    journal.keep(Remembered(offer, Worked(step, result, 10.0, 1.0)))
    return blobs, journal, result


def test_it_comes_back_after_the_coordinator_restarts(
    running: Serving, hospital: Callable[[str], Hospital], job_file: Text, operator: Person
) -> None:
    """It dials again by itself, and a step whose work was under way meanwhile is answered without being done twice."""
    a, b = hospital("a"), hospital("b")

    async def story() -> None:
        a.trainer.holds = asyncio.Event()
        async with running() as hub:
            tasks = [asyncio.create_task(each.agent(hub).run()) for each in (a, b)]
            await until(lambda: all(hub.coordinator.attendance.present(name) for name in "ab"))
            job = await hub.submit(operator, job_file(rounds=1))
            await soon(a.trainer.held.wait())
        a.trainer.holds.set()  # the work ends while nobody is there to hear of it
        async with running() as hub:
            assert await _over(hub, job) == (JobState.FINISHED, "all 1 rounds done")
            assert _counted(hub, job) == [("a", "b")] * 3
            assert a.trainer.kinds().count(Train) == 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(story())


class Cable:
    """What lies between a site and its coordinator: it breaks, once each way, after so many bytes."""

    def __init__(self, port: int, down: int, up: int) -> None:
        self._port = port
        self._left = {"down": down, "up": up}
        self._ends: set[asyncio.StreamWriter] = set()
        self.broken: list[str] = []

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._plugged, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._cut()

    async def _plugged(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._ends |= {writer, back}
        carried = self._carry(reader, back, "up"), self._carry(there, writer, "down")
        await asyncio.gather(*carried, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        while content := await reader.read(65536):
            writer.write(content)
            await writer.drain()
            self._left[way] -= len(content)
            if self._left[way] < 0 and way not in self.broken:
                self.broken.append(way)
                self._cut()
        writer.close()

    def _cut(self) -> None:
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()


def test_a_transfer_goes_on_after_a_cut(
    running: Serving,
    hospital: Callable[[str], Hospital],
    job_file: Text,
    operator: Person,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cable breaks in the middle of a download and of an upload of 2.8 MB: neither begins anew."""
    a, b = hospital("a"), hospital("b")
    a.trainer.values = b.trainer.values = BIG.size
    model, update = BlobRef.of(BIG_MODEL), BlobRef.of(bytes(4 * BIG.size))
    read: list[tuple[BlobRef, Path, int]] = []
    chunks = BlobStore.chunks

    def spied(self: BlobStore, ref: BlobRef, offset: int = 0) -> Iterator[bytes]:
        read.append((ref, self.folder, offset))
        return chunks(self, ref, offset)

    async def story() -> None:
        async with (
            running() as hub,
            Cable(hub.port, 3 * CHUNK // 2, 3 * CHUNK // 2) as port,
            a.running(replace(hub, port=port)),
            b.running(hub),
        ):
            monkeypatch.setattr(BlobStore, "chunks", spied)
            job = await hub.submit(operator, job_file(rounds=1), BIG_MODEL)
            assert await _over(hub, job) == (JobState.FINISHED, "all 1 rounds done")
            assert _counted(hub, job) == [("a", "b")] * 3

    asyncio.run(story())
    assert a.trainer.kinds().count(Train) == 1
    downloads = sorted(offset for ref, folder, offset in read if ref == model and folder.parent.name == "jobs")
    uploads = [offset for ref, folder, offset in read if ref == update and folder.is_relative_to(a.folder)]
    assert downloads[:2] == [0, 0]  # to a, and to b
    assert downloads[2:] == [CHUNK]  # to a, after the cut
    assert uploads == [0, CHUNK]


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (Failed("data", "a value is missing"), "its data cannot give a finite result"),
        (Failed("resources", "no memory"), "it ran out of memory or disk"),
        (Failed("cancelled", "the work was cancelled"), "its administrator cancelled the work"),
        (Failed("internal", "a bug"), "its trainer failed; the site's log says why"),
        (StorageError("the trainer cannot be started", fix="free memory"), "it ran out of memory or disk"),
        (OSError(28, "No space left on device"), "it ran out of memory or disk"),
        (ParleyError("what is this"), "its trainer failed; the site's log says why"),
        (ZeroDivisionError("a bug"), "its trainer failed; the site's log says why"),
        (Done(4, weight=1.0), "its trainer failed; the site's log says why"),  # and its result has another length
    ],
)
def test_work_that_fails_is_declined_with_its_cause(
    answer: Answer | Exception,
    trouble: str,
    running: Serving,
    hospital: Callable[[str], Hospital],
    job_file: Text,
    operator: Person,
) -> None:
    """Whatever happens in the trainer, the coordinator hears the coarse cause, and the agent goes on attending."""
    a, b = hospital("a"), hospital("b")

    def fails(request: Request) -> Answer:
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(request, Train)
        Path(request.output).write_bytes(bytes(4))
        return answer

    b.trainer.answers[Train] = fails

    async def story() -> None:
        async with running() as hub, a.running(hub), b.running(hub) as task:
            job = await hub.submit(operator, job_file(rounds=1))
            state, reason = await _over(hub, job)
            assert (state, reason) == (JobState.FAILED, f"step 2 (train) failed 3 times (b: {trouble})")
            assert not task.done()
            assert hub.coordinator.attendance.present("b")

    asyncio.run(story())


def test_a_coordinator_whose_disk_is_full_for_a_moment_is_tried_again(
    running: Serving,
    hospital: Callable[[str], Hospital],
    job_file: Text,
    operator: Person,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The site does not decline a step for what is not its own trouble."""
    a, b = hospital("a"), hospital("b")
    refused: list[str] = []

    async def story() -> None:
        async with running() as hub, a.running(hub), b.running(hub):
            upload = hub.coordinator.conductor.upload

            def full(*asked: object) -> object:
                if len(refused) < 2:
                    refused.append("no room")
                    raise StorageError("no room on the disk")
                return upload(*asked)

            monkeypatch.setattr(hub.coordinator.conductor, "upload", full)
            job = await hub.submit(operator, job_file(rounds=1))
            assert await _over(hub, job) == (JobState.FINISHED, "all 1 rounds done")
            assert [step.attempt for step in hub.store.steps(job)] == [0, 0, 0]

    asyncio.run(story())
    assert len(refused) == 2


def test_its_own_full_disk_is_not_waited_for(
    running: Serving,
    hospital: Callable[[str], Hospital],
    job_file: Text,
    operator: Person,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It declines for want of resources, so that the coordinator can go on without it."""
    a, b = hospital("a"), hospital("b")
    receive = BlobStore.receive

    def full(self: BlobStore, ref: BlobRef) -> object:
        if self.folder.is_relative_to(b.folder):
            raise StorageError(f"cannot write to {self.folder}: No space left on device", fix="free disk space")
        return receive(self, ref)

    monkeypatch.setattr(BlobStore, "receive", full)

    async def story() -> None:
        async with running() as hub, a.running(hub), b.running(hub):
            job = await hub.submit(operator, job_file(rounds=1))
            reason = "step 2 (train) failed 3 times (b: it ran out of memory or disk)"
            assert await _over(hub, job) == (JobState.FAILED, reason)

    asyncio.run(story())


def test_work_for_a_step_that_is_over_is_ended(
    running: Serving, hospital: Callable[[str], Hospital], job_file: Text, operator: Person
) -> None:
    """The job is stopped in the middle of a training: the trainer is interrupted, and the next job is done."""
    a, b = hospital("a"), hospital("b")

    async def story() -> None:
        a.trainer.holds = asyncio.Event()
        async with running() as hub, a.running(hub), b.running(hub):
            job = await hub.submit(operator, job_file(rounds=1))
            await soon(a.trainer.held.wait())
            hub.coordinator.conductor.feed(job, StopAsked("op"))
            await until(lambda: a.trainer.cancelled == [Train])
            await until(lambda: list((a.folder / "work").iterdir()) == [])
            a.trainer.holds = None
            again = await hub.submit(operator, job_file(rounds=1))
            assert (await _over(hub, again))[0] is JobState.FINISHED

    asyncio.run(story())


def test_work_that_never_ends_is_given_up(
    running: Serving,
    hospital: Callable[[str], Hospital],
    job_file: Text,
    operator: Person,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trainer that hangs is ended, and the step is declined; the next attempt has a fresh one."""
    monkeypatch.setattr(agent_module, "_PATIENT_SECONDS", 0.2)
    monkeypatch.setattr(agent_module, "_PATIENCE", 0.0)
    a, b = hospital("a"), hospital("b")

    async def story() -> None:
        a.trainer.holds = asyncio.Event()
        async with running() as hub, a.running(hub), b.running(hub):
            job = await hub.submit(operator, job_file(rounds=1))
            await until(lambda: a.trainer.cancelled == [Train])
            a.trainer.holds.set()
            assert (await _over(hub, job))[0] is JobState.FINISHED
            assert hub.store.steps(job)[1].attempt == 1

    asyncio.run(story())


def test_a_pause_and_its_end_are_heeded_while_the_site_attends(
    running: Serving,
    hospital: Callable[[str], Hospital],
    job_file: Text,
    operator: Person,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The training under way is ended, the operator sees who paused the site, and the job ends once it goes on."""
    monkeypatch.setattr(agent_module, "_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(agent_module, "_GRACE_SECONDS", 0.0)
    a, b = hospital("a"), hospital("b")
    a.trainer.holds = asyncio.Event()

    async def story() -> None:
        async with running() as hub, a.running(hub), b.running(hub):
            job = await hub.submit(operator, job_file(rounds=1))
            run = hub.coordinator.conductor.job(job).run
            await until(a.trainer.held.is_set)
            assert pause(a.folder)
            await until(lambda: a.trainer.cancelled == [Train])
            await until(lambda: run.doing("a", 0.0) == ("paused", "its administrator has paused it"))
            await until(lambda: run.view(0.0).reason == "waiting for 1 more of 2 sites (paused: a)")
            a.trainer.holds = None
            assert resume(a.folder)
            assert (await _over(hub, job))[0] is JobState.FINISHED

    asyncio.run(story())


def test_a_silent_coordinator_is_left_and_dialled_again(
    running: Serving,
    hospital: Callable[[str], Hospital],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A connection on which nothing comes counts as cut; once something does, the site stays."""
    monkeypatch.setattr(agent_module, "_SILENCE_SECONDS", 0.05)
    monkeypatch.setattr(attendance, "HEARTBEAT_SECONDS", 1000.0)
    a = hospital("a")

    async def story() -> None:
        async with running() as hub, a.running(hub) as task:
            await until(lambda: caplog.text.count("nothing heard from the coordinator for 0 s") >= 2)
            assert not task.done()

    asyncio.run(story())


def test_it_says_that_it_is_there(
    running: Serving, hospital: Callable[[str], Hospital], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats reach the coordinator."""
    monkeypatch.setattr(agent_module, "_HEARTBEAT_SECONDS", 0.005)
    a = hospital("a")

    async def story() -> None:
        async with running() as hub, a.running(hub):
            peer = hub.coordinator.attendance._peers["a"]
            since = peer.heard
            await until(lambda: peer.heard > since)

    asyncio.run(story())


# ------------------------------------------------------------------------------------------------------ what ends it


def test_a_revoked_site_ends(running: Serving, hospital: Callable[[str], Hospital], consortium: Consortium) -> None:
    """Its agent does not dial again: its administrator must act, and is told why."""
    a, b = hospital("a"), hospital("b")

    async def story() -> None:
        async with running() as hub, b.running(hub), a.running(hub) as task:
            revoked = consortium.revoked(a.member)
            await hub.coordinator.members.revoke(revoked)
            hub.coordinator.attendance.revoked(revoked, hub.coordinator.conductor)
            with pytest.raises(IdentityError, match=r"the membership of a was revoked.*ask the administrator why"):
                await soon(task)
            await until(lambda: b.kept == [revoked])  # the others hold the list from then on
            with pytest.raises(IdentityError, match="the membership of a was revoked"):
                await soon(a.agent(hub).run())

    asyncio.run(story())


def test_a_coordinator_that_cannot_prove_who_it_is_ends_the_attendance(
    running: Serving, hospital: Callable[[str], Hospital], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the right certificate and another protocol key it learns the hello, and nothing more."""
    a = hospital("a")
    monkeypatch.setattr("privacy.identity.sign_welcome", lambda *_: bytes(64))

    async def story() -> None:
        async with running() as hub:
            with pytest.raises(IdentityError, match="hub did not prove that it holds its protocol key") as refused:
                await soon(a.agent(hub).run())
            assert refused.value.who is WhoActs.COORDINATOR

    asyncio.run(story())
    assert a.trainer.closed


# ------------------------------------------------------------------------------------------------------- what it may


def test_a_changed_policy_holds_for_the_next_offer(
    running: Serving, hospital: Callable[[str], Hospital], job_file: Text, operator: Person
) -> None:
    """The file is read anew for every message: what was allowed is refused from now on, and the other way round."""
    a, b = hospital("a"), hospital("b")

    async def story() -> None:
        async with running() as hub, a.running(hub), b.running(hub):
            job = await hub.submit(operator, job_file(rounds=1))
            assert (await _over(hub, job))[0] is JobState.FINISHED
            b.rules = policy.parse(PLAIN.replace('tasks = ["*"]', "tasks = []"), "policy.toml")
            refused = await hub.submit(operator, job_file(rounds=1))
            state, reason = await _over(hub, refused)
            assert state is JobState.FAILED
            assert reason == (
                "too many sites refused the job (b: task.kind: this site's policy does not allow the task 'tabular' "
                "(its administrator may add it to tasks))"
            )
            b.rules = policy.parse(PLAIN, "policy.toml")
            again = await hub.submit(operator, job_file(rounds=1))
            assert (await _over(hub, again))[0] is JobState.FINISHED

    asyncio.run(story())


def test_data_that_do_not_meet_the_contract_are_told_before_the_first_round(
    running: Serving, hospital: Callable[[str], Hospital], job_file: Text, operator: Person
) -> None:
    """The findings reach the job's reason; a check that cannot be made is a refusal too."""
    a, b = hospital("a"), hospital("b")
    finding = Finding("data.columns.age", "the column is missing", "add it")
    b.trainer.answers[CheckData] = lambda _: Done(findings=(finding,))
    a.trainer.answers[CheckData] = lambda _: Failed("data", "there is no data set 'heart' here")

    async def story() -> None:
        async with running() as hub, a.running(hub), b.running(hub):
            job = await hub.submit(operator, job_file(rounds=1))
            state, reason = await _over(hub, job)
            assert state is JobState.FAILED
            assert "b: the column is missing" in reason or "a: there is no data set 'heart' here" in reason

    asyncio.run(story())
    assert a.trainer.kinds() == [CheckData]
