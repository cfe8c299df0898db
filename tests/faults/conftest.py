"""What the tests of bad networks share: a coordinator, three real agents with a wire each, and short waits."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, assert_never

import numpy as np
import pytest

from client import agent
from client.agent import Agent
from client.backoff import Backoff
from client.policy import parse as parse_policy
from client.session_events import SiteIdentity
from client.summing import Sealing
from client.training import protocol
from client.vault import Vault
from coordinator import attendance
from coordinator.coordinator import Coordinator
from coordinator.records import Outcome
from coordinator.service import serve
from coordinator.store import Store, url_in
from federation import audit, blobs
from federation.messages import JobState, Role, StepKind
from federation.vector import Layout, TensorSpec, from_safetensors, to_safetensors
from simulations.bare_site import PLAIN_POLICY
from tests.consortium import Running, free_port, until
from tests.faults.killing import TABLE, evaluation
from tests.faults.network import Weather, Wire
from tests.faults.outside import PLAIN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from coordinator.records import StepRecord
    from tests.consortium import Consortium, Person

GOOD = Weather()
SITES = ("a", "b", "c")
ROUNDS = 3
DELTA = 0.25
"""What each site adds to each weight in each round."""
_PARAMETERS = 15_000
_LAYOUT = Layout((TensorSpec("weight", (1, _PARAMETERS - 1)), TensorSpec("bias", (1,))))

_JOB = """
format = 1
name = "heart"

[task]
kind = "tabular"
target = "binary"

[data]
dataset = "heart"
label = "disease"
columns = [{{ name = "age", kind = "numeric", range = [0, 120] }}]

[model]
name = "logistic_regression"

[strategy]
name = "fedavg"

[rounds]
maximum = {rounds}

[cohort]
minimum_sites = {sites}
quorum = {sites}
deadline_seconds = {deadline}

[privacy]
{privacy}
"""


class LightWork:
    """A site's work without torch: each update adds `DELTA` to every weight. The next training may be held back."""

    def __init__(self) -> None:
        self.trained = 0
        self.may_train = asyncio.Event()
        self.may_train.set()

    async def ask(self, request: protocol.Request) -> protocol.Answer:
        """The answer to a request, at once."""
        match request:
            case protocol.Warm():
                return protocol.Done()
            case protocol.CheckData():
                return protocol.Done(table=TABLE)
            case protocol.ComputeStatistics():
                return _written(request.output, np.array([10.0, 1.0, 5.0]))
            case protocol.Train():
                await self.may_train.wait()
                self.trained += 1
                return _written(request.output, np.full(_PARAMETERS, DELTA, dtype="<f4"))
            case protocol.Evaluate():
                return _written(request.output, evaluation(request.subject.job, 0))
            case _:
                assert_never(request)

    async def close(self) -> None:
        """Nothing runs."""


def _written(output: str, values: np.ndarray) -> protocol.Done:
    values.tofile(output)
    return protocol.Done(length=values.size, weight=1.0, table=TABLE)


@dataclass
class Study:
    """A coordinator on `port`, and for each site a wire to it and an agent that dials the wire.

    Its job says `privacy` and `deadline`.
    """

    consortium: Consortium
    folder: Path
    operator: Person
    port: int
    privacy: str = PLAIN
    deadline: float = 600.0
    vaults: dict[str, Vault] = field(default_factory=dict)
    wires: dict[str, Wire] = field(default_factory=dict)
    work: dict[str, LightWork] = field(default_factory=dict)
    hub: Running | None = None
    _served: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def serve(self, port: int) -> None:
        """Starts the coordinator, from now on on this port; it goes on from its store."""
        self.port = port
        store = self._served.enter_context(Store(url_in(self.folder)))
        coordinator = Coordinator(self.folder, store, self.consortium.me)
        coordinator.start()
        server = await serve(coordinator, f"127.0.0.1:{port}")
        self._served.push_async_callback(coordinator.close)
        self._served.push_async_callback(server.stop, None)
        self._served.push_async_callback(coordinator.leave)
        self.hub = Running(self.consortium, coordinator, store, self.folder, port)

    async def stop(self) -> None:
        """Ends the coordinator."""
        await self._served.aclose()

    async def submit(self) -> str:
        """Submits the job of three rounds once all sites attend; the operator's line is good."""
        await until(lambda: all(self.present(name) for name in SITES))
        model = to_safetensors(_LAYOUT, np.zeros(_PARAMETERS, dtype=np.float32))
        text = _JOB.format(rounds=ROUNDS, sites=len(SITES), privacy=self.privacy, deadline=self.deadline)
        return await self._running.submit(self.operator, text, model)

    def present(self, site: str) -> bool:
        """Whether the coordinator holds the site for here."""
        return self._running.coordinator.attendance.present(site)

    def steps(self, job: str) -> tuple[StepRecord, ...]:
        """The steps that are stored."""
        return self._running.store.steps(job)

    def attempt(self, job: str) -> int:
        """How often the step that is under way was begun anew."""
        return self._running.coordinator.conductor.job(job).run._attempt

    async def finished(self, job: str, seconds: float = 60.0) -> None:
        """Returns when the job is over, and holds it to this: three rounds, each once, each with all three updates."""
        async with asyncio.timeout(seconds):
            while not self.state(job).over:  # noqa: ASYNC110 - a store tells nobody of its changes
                await asyncio.sleep(0.02)
        store = self._running.store
        assert self.state(job) is JobState.FINISHED
        steps = store.steps(job)
        assert [step.step for step in steps] == list(range(1, len(steps) + 1))
        training = [step for step in steps if step.kind is StepKind.TRAIN]
        assert [step.round for step in training] == list(range(1, ROUNDS + 1))
        for step in steps:
            assert sorted(share.site for share in step.shares if share.outcome is Outcome.COUNTED) == list(SITES)
        (model,) = store.models()
        _, weights = from_safetensors(blobs.BlobStore(self.folder / "jobs" / job).get(model.payload))
        assert set(weights.tolist()) == {ROUNDS * DELTA}  # an update lost, or counted twice, would show

    def state(self, job: str) -> JobState:
        """How far the job has come, as it is stored."""
        record = self._running.store.job(job)
        assert record is not None
        return record.state

    @property
    def _running(self) -> Running:
        assert self.hub is not None
        return self.hub


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence counts as absence after three seconds, tries follow each other fast, and chunks are small."""
    monkeypatch.setattr(agent, "_HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(agent, "_SILENCE_SECONDS", 3.0)
    monkeypatch.setattr(agent, "Backoff", partial(Backoff, first=0.05, longest=0.4))
    monkeypatch.setattr(attendance, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(attendance, "SILENCE_SECONDS", 3.0)
    monkeypatch.setattr(blobs, "CHUNK", 8 * 1024)


@pytest.fixture
def study(consortium: Consortium, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Study]]:
    """Starts a coordinator and three agents, each behind a wire of its own in this weather."""

    @asynccontextmanager
    async def started(weather: Weather = GOOD, privacy: str = PLAIN, deadline: float = 600.0) -> AsyncIterator[Study]:
        operator = consortium.member("op", Role.OPERATOR)
        here = Study(consortium, tmp_path / "hub", operator, free_port(), privacy, deadline)
        here.folder.mkdir()
        agents = []
        async with AsyncExitStack() as stack:
            await here.serve(here.port)
            stack.push_async_callback(here.stop)
            for seed, name in enumerate(SITES):
                wire = await stack.enter_async_context(Wire(("127.0.0.1", here.port), weather, seed=seed))
                here.wires[name], here.work[name] = wire, LightWork()
                agents.append(asyncio.create_task(stack.enter_context(_agent(here, name, tmp_path / name)).run()))
            try:
                yield here
                ended = [task.exception() for task in agents if task.done()]
                assert ended == [], "an agent gave up"
            finally:
                for task in agents:
                    task.cancel()
                with contextlib.suppress(BaseExceptionGroup):
                    await asyncio.gather(*agents, return_exceptions=True)

    return started


@contextlib.contextmanager
def _agent(here: Study, name: str, folder: Path) -> Iterator[Agent]:
    member = here.consortium.member(name)
    assert here.hub is not None
    line = Running(here.consortium, here.hub.coordinator, here.hub.store, folder, here.wires[name].port).line(member)
    me = SiteIdentity(member.statement, here.consortium.root.public, here.consortium.nobody)
    rules = parse_policy(PLAIN_POLICY, "policy.toml")
    with (
        Vault(folder / "vault.db", folder / "vault.count") as vault,
        audit.AuditLog(folder / audit.FILE, audit.LogName(name, "site"), float(here.consortium.now)) as log,
    ):
        here.vaults[name] = vault
        sealing = Sealing(member.keys.protocol, vault, log)
        yield Agent(folder, line, me, lambda: rules, lambda _: None, here.work[name], sealing=sealing)
