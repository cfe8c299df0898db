"""Agents in a job under secure aggregation, over real mutual TLS, with a stand-in for the trainer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from client import agent as agent_module
from client import policy
from client.agent import Agent
from client.backoff import Backoff
from client.pause import pause, resume
from client.session_events import SiteIdentity
from client.summing import Sealing
from client.training.protocol import Answer, CheckData, ComputeStatistics, Done, Evaluate, Request, Table, Train, Warm
from client.vault import Vault
from coordinator.records import Outcome
from federation import audit
from federation import job as jobs
from federation.audit import AuditLog, LogName
from federation.errors import StorageError
from federation.messages import JobState, Role
from privacy.secure_aggregation.rostersum import site_events as sums
from privacy.secure_aggregation.rostersum.durable import Durable, Point
from privacy.secure_aggregation.rostersum.logged import Passed, read
from privacy.secure_aggregation.rostersum.messages import Open
from tasks import tabular
from tests.consortium import Consortium, Person, Running, until

Serving = Callable[..., AbstractAsyncContextManager[Running]]


@dataclass
class Trainer:
    """Stands in for the child process: writes small results of the right lengths."""

    asked: list[type[Request]] = field(default_factory=list)
    holds: bool = False

    async def ask(self, request: Request) -> Answer:
        """Does it at once, but what is held for ever."""
        table = Table("ab" * 32, 40, 20, 15)
        if isinstance(request, Warm):
            return Done()
        self.asked.append(type(request))
        if isinstance(request, CheckData):
            return Done(table=table)
        if self.holds and isinstance(request, Train):
            await asyncio.Event().wait()
        return Done(_write(request), weight=40.0, table=table)

    async def close(self) -> None:
        """Nothing runs."""


def _write(request: Train | Evaluate | ComputeStatistics) -> int:
    """Writes an honest result, and gives its length."""
    return Path(request.output).write_bytes(_result(request))


def _result(request: Train | Evaluate | ComputeStatistics) -> bytes:
    """An honest result of few rows."""
    task = tabular.make(jobs.parse(request.subject.job))
    match request:
        case ComputeStatistics():
            return np.array([10.0, 1.0, 5.0], dtype="<f8").tobytes()
        case Train():
            return np.array([0.5, -0.25], dtype="<f4").tobytes()
        case Evaluate():
            words = np.zeros(task.evaluation_size, dtype="<f8")
            words[:3] = 4, 3, 1.0  # rows, correct, summed loss
            bins = (words.size - 3) // 2
            words[3 + bins // 2] = words[3 + bins + bins // 4] = 2  # two rows of each class, told apart
            return words.tobytes()


@dataclass
class Hospital:
    """An agent with its trainer, its vault and its log."""

    member: Person
    folder: Path
    trainer: Trainer = field(default_factory=Trainer)
    vault: Vault | None = None

    @asynccontextmanager
    async def running(self, hub: Running) -> AsyncIterator[asyncio.Task[None]]:
        """Its agent runs until the block ends."""
        me = SiteIdentity(self.member.statement, hub.consortium.root.public, hub.consortium.nobody)
        rules = policy.parse(policy.EXAMPLE, "policy.toml")
        with (
            Vault(self.folder / "vault.db", self.folder / "vault.count") as vault,
            AuditLog(self.folder / audit.FILE, LogName(self.member.name, "site"), float(hub.consortium.now)) as log,
        ):
            self.vault = vault
            sealing = Sealing(self.member.keys.protocol, vault, log)
            agent = Agent(
                self.folder, hub.line(self.member), me, lambda: rules, lambda _: None, self.trainer, sealing=sealing
            )
            task = asyncio.create_task(agent.run())
            try:
                await until(lambda: hub.coordinator.attendance.present(self.member.name) or task.done())
                yield task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def hospitals(consortium: Consortium, tmp_path: Path) -> tuple[Hospital, ...]:
    """Three of them, of three organisations."""
    return tuple(Hospital(consortium.member(name), tmp_path / "homes" / name) for name in "abc")


@pytest.fixture
def operator(consortium: Consortium) -> Person:
    """One who submits."""
    return consortium.member("op", Role.OPERATOR)


@pytest.fixture
def text(job_text: Callable[..., str]) -> str:
    """A job of two rounds under secure aggregation."""
    sealed = job_text().replace('secure_aggregation = "plain"', "").replace("minimum_sites = 2", "minimum_sites = 3")
    return sealed.replace("maximum = 5", "maximum = 2")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for the next try."""
    monkeypatch.setattr(agent_module, "Backoff", lambda **_: Backoff(0.005, 0.01))


def test_three_agents_do_a_sealed_job(
    running: Serving, hospitals: tuple[Hospital, ...], text: str, operator: Person
) -> None:
    """Statistics, training and evaluation are summed; afterwards no update is left, and each log is whole."""

    async def story() -> None:
        async with running() as hub, AsyncExitStack() as stack:
            for each in hospitals:
                await stack.enter_async_context(each.running(hub))
            job = await hub.submit(operator, text)
            run = hub.coordinator.conductor.job(job).run
            await until(lambda: run.over)
            assert (run.record.state, run.record.reason) == (JobState.FINISHED, "all 2 rounds done")
            for each in hospitals:
                await until(lambda vault=each.vault: vault.durable.jobs == ())  # type: ignore[misc]  # a bound default

    asyncio.run(story())
    for each in hospitals:
        assert each.trainer.asked == [CheckData, ComputeStatistics, Train, Evaluate, Train, Evaluate]
        assert [file for file in (each.folder / "updates").rglob("*") if file.is_file()] == []
        assert audit.verify(each.folder / audit.FILE).whole
        entries = [read(entry.kind, entry.content) for entry in audit.entries(each.folder / audit.FILE)]
        opened = [entry for entry in entries if isinstance(entry, Passed) and isinstance(entry.message, Open)]
        assert len(opened) == 5
        with Vault(each.folder / "vault.db", each.folder / "vault.count") as vault:
            assert len(vault.durable.closed) == 1


def test_a_site_that_is_ended_or_paused_in_its_work_goes_on_later(
    running: Serving, hospitals: tuple[Hospital, ...], text: str, operator: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended in the middle of its training and started again, then paused in it and let go on: every step has all."""
    monkeypatch.setattr(agent_module, "_PAUSE_SECONDS", 0.02)
    a, b, c = hospitals

    async def story() -> None:
        async with running() as hub, a.running(hub), c.running(hub):
            b.trainer.holds = True
            async with b.running(hub):
                job = await hub.submit(operator, text)
                await until(lambda: Train in b.trainer.asked)
            b.trainer.asked.clear()
            async with b.running(hub):
                await until(lambda: Train in b.trainer.asked)
                pause(b.folder)
                b.trainer.holds = False
                run = hub.coordinator.conductor.job(job).run
                await until(lambda: run.doing("b", 0.0) == ("paused", "its administrator has paused it"))
                resume(b.folder)
                await until(lambda: run.over)
            assert (run.record.state, run.record.reason) == (JobState.FINISHED, "all 2 rounds done")
            counted = [
                [share.site for share in step.shares if share.outcome is Outcome.COUNTED]
                for step in hub.store.steps(job)
            ]
            assert counted == [["a", "b", "c"]] * 5

    asyncio.run(story())


@pytest.mark.parametrize("kept", ["the vault", "the log"])
def test_an_agent_that_cannot_keep_what_it_must_ends(
    running: Serving,
    hospitals: tuple[Hospital, ...],
    text: str,
    operator: Person,
    kept: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the words of whoever must act, and nothing that would have followed is said."""

    def full(*_: object) -> None:
        raise StorageError("the disk is full", fix="free disk space, then start the site again")

    async def story() -> None:
        async with running() as hub, AsyncExitStack() as stack:
            tasks = [await stack.enter_async_context(each.running(hub)) for each in hospitals]
            monkeypatch.setattr(*((Vault, "persist", full) if kept == "the vault" else (AuditLog, "extend", full)))
            job = await hub.submit(operator, text)
            for task in tasks:
                await until(task.done)
                with pytest.raises(StorageError, match="the disk is full"):
                    task.result()
            assert hub.coordinator.conductor.job(job).run.record.state is JobState.WAITING

    asyncio.run(story())


def test_an_effect_of_sums_is_never_performed_after_one_that_failed(tmp_path: Path) -> None:
    """Neither the rest of its own event's effects, nor those of a later event."""
    performed: list[object] = []

    def perform(_: object, effect: object) -> None:
        performed.append(effect)
        raise StorageError("the disk is full")

    class Fake:
        """A session that wants three things for each event."""

        def receive(self, *_: object) -> tuple[object, ...]:
            """Persists, and then says something."""
            persist = sums.Persist(Point.NOTE, Durable())
            return (persist, sums.Erase(b"", "u1"), persist)

    async def story() -> None:
        agent = Agent(tmp_path, None, None, None, None, object())  # type: ignore[arg-type]  # nothing of these is used
        summing = type("Fake", (), {"perform": perform})()
        agent._session, agent._summing = Fake(), summing  # type: ignore[assignment]
        agent._feed(sums.TimePassed())
        agent._feed(sums.TimePassed())

    asyncio.run(story())
    assert len(performed) == 1
