"""A consortium of processes that are killed, seen from outside: starts them again as systemd would, and reads the store.

`python -m tests.faults.outside --minutes 5 --seed 1` kills processes drawn at random at times drawn at random, and holds
every job to what it comes to when nobody is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from client.connection import Connection
from client.policy import EXAMPLE
from coordinator.records import Outcome
from coordinator.store import Store, StoreReader, url_in
from federation.blobs import BlobRef, BlobStore
from federation.errors import UnreachableError
from federation.messages import Credential, JobState, JobView, Role, ShowJob, StepKind, SubmitJob
from federation.vector import Layout, TensorSpec, to_safetensors
from parley.commands.site import install
from parley.dialling import ask, line
from parley.homes import Home
from privacy import identity
from tests.consortium import free_port
from tests.faults import killing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.process import BaseProcess

    from coordinator.records import JobRecord, StepRecord
    from federation.messages import OperatorRequest
    from parley.homes import Consortium

__all__ = ["ROUNDS", "SITES", "Founded", "Process", "Study", "found", "job_text", "learnt"]

SITES = ("a", "b", "c")
ROUNDS = 3
PATIENCE = 60.0
"""Seconds after which what is waited for counts as never coming; machines that run tests may be very busy."""

_DAY = 24 * 3600
_LAYOUT = Layout((TensorSpec("weight", (1, 4095)), TensorSpec("bias", (1,))))
"""16 kB: two chunks, as small as they are here."""

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
name = "fedavgm"

[rounds]
maximum = {rounds}

[cohort]
minimum_sites = 3
quorum = {quorum}
deadline_seconds = {deadline}

[privacy]
secure_aggregation = "plain"
"""

_fork = multiprocessing.get_context("forkserver")
# The parent of all processes has loaded what they run: two seconds of CPU less for each of a hundred starts.
_fork.set_forkserver_preload([killing.__name__, *(["pytest"] if "pytest" in sys.modules else [])])


def job_text(quorum: int = len(SITES), deadline: int = 600, rounds: int = ROUNDS) -> str:
    """A job whose strategy remembers, so that each of its models depends on all that came before."""
    return _JOB.format(rounds=rounds, quorum=quorum, deadline=deadline)


@dataclass
class Process:
    """A command of Parley's in a process of its own.

    Attributes:
        command: Its arguments.
        log: Where it says what it says, through all its lives.
        options: Of `tests.faults.killing`, in each of its lives.
        deaths: How often it was killed.
    """

    command: tuple[str, ...]
    log: Path
    options: tuple[str, ...] = ("--light", "0")
    deaths: int = 0
    running: BaseProcess | None = None

    def start(self, point: str = "never", count: int = 0, *options: str) -> None:
        """Starts it; in this life it dies at `point`."""
        arguments = [point, str(count), *self.options, *options, "--", *self.command]
        self.running = _fork.Process(target=killing.run, args=(arguments, self.log), daemon=True)
        self.running.start()

    def tend(self) -> None:
        """Starts it again if it was killed; it must not end otherwise."""
        if self.running is None or self.running.exitcode is None:
            return
        assert self.running.exitcode == -signal.SIGKILL, f"{self.command} ended by itself:\n{self.tail()}"
        self.deaths += 1
        self.start()

    def kill(self) -> None:
        """Ends it at once, as a power cut does; `tend` starts it again."""
        if self.running is not None:
            self.running.kill()
            self.running.join()

    def end(self) -> None:
        """Ends it as systemd does."""
        if self.running is not None:
            self.running.terminate()
            self.running.join(PATIENCE)
            self.running.kill()
            self.running = None

    def said(self) -> str:
        """All of its log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.said().splitlines()[-25:])


@dataclass(frozen=True)
class Founded:
    """A consortium whose sites are enrolled, in folders; its coordinator's home is copied for each study."""

    folder: Path
    port: int
    consortium: Consortium
    sites: dict[str, Process]

    @property
    def hub(self) -> Home:
        """The administrator's home, and an operator's; the coordinator's is to be copied."""
        return Home(self.folder / "hub")

    def site(self, name: str) -> Path:
        """A site's own folder."""
        return Home(self.folder / "sites" / name).site.folder


@contextmanager
def found(folder: Path, pause: float = 0.0) -> Iterator[Founded]:
    """A consortium with three sites, which attend until the block ends. They joined a day ago."""
    now = int(time.time())
    hub, port = Home(folder / "hub"), free_port()
    consortium = hub.consortium.create("kills", f"127.0.0.1:{port}", "hub", passphrase=None, now=now - _DAY)
    request = hub.coordinator.request("hub", "kills", "0.1.0")
    hub.coordinator.install_text(consortium.admit(request, now=now - _DAY), now)
    with Store(url_in(hub.coordinator.folder)) as store:
        for name in SITES:
            home = Home(folder / "sites" / name)
            invitation = consortium.invite(name, name, Role.SITE, now=now - _DAY)
            asked = identity.make_request(invitation, home.site.begin(), "0.1.0")
            member = consortium.approve(asked, now=now - _DAY)
            me = hub.coordinator.load()
            credential = Credential(member.certificate, member.statement, me.statement, me.revocations)
            install(home.site, invitation, credential)
            (home.site.folder / "policy.toml").write_text(EXAMPLE)
            store.add_member(member.statement, member.certificate, now)
    with ExitStack() as ending:
        sites = {}
        for name in SITES:
            command = ("site", "run", "--home", str(folder / "sites" / name))
            sites[name] = Process(command, folder / f"{name}.log", ("--light", str(pause)))
            sites[name].start()
            ending.callback(sites[name].end)
        yield Founded(folder, port, consortium, sites)


@dataclass
class Study:
    """A coordinator with a store and payloads of its own, and the consortium's sites.

    Attributes:
        founded: The consortium.
        folder: The coordinator's home.
        url: Where its store is; what the consortium's members are is in there.
        options: Of `tests.faults.killing`, in each of the coordinator's lives.
        prefix: What the first of the coordinator's lives is started by.
    """

    founded: Founded
    folder: Path
    url: str
    coordinator: Process = field(init=False)

    def __post_init__(self) -> None:
        """Prepares the coordinator; `serving` starts it."""
        address = f"127.0.0.1:{self.founded.port}"
        command = ("coordinator", "serve", "--listen", address, "--store", self.url, "--home", str(self.folder))
        self.coordinator = Process(command, self.folder / "coordinator.log")

    @classmethod
    def of(cls, founded: Founded, folder: Path) -> Study:
        """A study with a store in a file."""
        home = folder / "study"
        shutil.copytree(founded.hub.coordinator.folder, home / "coordinator")
        return cls(founded, home, url_in(home / "coordinator"))

    @contextmanager
    def serving(self, point: str = "never", count: int = 0, *options: str) -> Iterator[None]:
        """The coordinator runs, and dies at `point`; processes that were killed are started again by `until`."""
        self.coordinator.start(point, count, *options)
        try:
            yield
        finally:
            self.coordinator.end()

    @property
    def payloads(self) -> Path:
        """Where the coordinator keeps payloads."""
        return Home(self.folder).coordinator.folder

    # ------------------------------------------------------------------------------------------------ as people do

    def tend(self) -> None:
        """Starts again whoever was killed."""
        for process in (self.coordinator, *self.founded.sites.values()):
            process.tend()

    def until(self, holds: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
        """Returns once `holds` does."""
        end = time.monotonic() + patience
        while not holds():
            self.tend()
            if time.monotonic() > end:
                raise AssertionError(f"waited in vain for {what}; the coordinator said:\n{self.coordinator.tail()}")
            time.sleep(0.02)  # other processes set no event here

    def asks(self, request: OperatorRequest) -> object:
        """The coordinator's answer to an operator, who asks until there is one."""
        found: list[object] = []

        def answered() -> bool:
            with suppress(UnreachableError):
                found.append(ask(self.founded.hub.operator, request))
            return bool(found)

        self.until(answered, f"an answer to {request}")
        return found[0]

    def view(self, job: str) -> JobView:
        """What `parley job show` shows."""
        view = self.asks(ShowJob(job))
        assert isinstance(view, JobView)
        return view

    def submit(self, text: str = "") -> str:
        """Submits a job and returns its id. An operator who heard no answer looks whether it was taken, and repeats."""
        before = {record.id for record in self.jobs()}
        added: set[str] = set()

        def taken() -> bool:
            try:
                asyncio.run(self._submit(text or job_text()))
            except UnreachableError:
                time.sleep(0.05)
            added.update(record.id for record in self.jobs() if record.id not in before)
            return bool(added)

        self.until(taken, "a job to be taken")
        (job,) = added
        return job

    async def _submit(self, text: str) -> None:
        desk = BlobStore(self.folder / "desk")
        model = desk.put(to_safetensors(_LAYOUT, np.zeros(_LAYOUT.size, dtype=np.float32)))
        async with Connection.opened(line(self.founded.hub.operator.load())) as connection:
            await connection.upload("", model, desk)
            await connection.operate(SubmitJob(text, model))

    # -------------------------------------------------------------------------------------------- what is there

    def jobs(self) -> tuple[JobRecord, ...]:
        """All jobs in the store."""
        with StoreReader(self.url) as store:
            return store.jobs()

    def over(self, job: str) -> tuple[StepRecord, ...]:
        """The steps of a job, once it is over."""
        with StoreReader(self.url) as store:

            def ended() -> bool:
                record = store.job(job)
                return record is not None and record.state.over

            self.until(ended, f"the end of job {job}")
            return store.steps(job)

    def exactly_once(self, job: str, expected: Sequence[object] | None = None) -> tuple[StepRecord, ...]:
        """Waits for the job's end, and holds it to this: each round once, each site once in it, and nothing left over.

        With `expected`, what the job has learnt must be that to the last bit.
        """
        steps = self.over(job)
        with StoreReader(self.url) as store:
            record = store.job(job)
            (final,) = (model for model in store.models() if model.job == job)
        assert record is not None
        assert (record.state, record.next_step) == (JobState.FINISHED, len(steps) + 1)
        rounds = [(kind, number) for number in range(1, record.round + 1) for kind in (StepKind.TRAIN, StepKind.EVALUATE)]
        assert [(step.kind, step.round) for step in steps] == [(StepKind.STATISTICS, 0), *rounds]
        assert [step.step for step in steps] == list(range(1, len(steps) + 1))
        for step in steps:
            assert [share.site for share in step.shares] == list(SITES), f"step {step.step}"
        content = BlobStore(self.payloads / "jobs" / job).get(final.payload)
        assert BlobRef.of(content) == final.payload
        if expected is not None:
            assert learnt(steps) == tuple(expected)
            self.until(lambda: not self.leftovers(job), "what is not needed to go")
            assert self.leftovers(job) == []
        return steps

    def leftovers(self, job: str) -> list[str]:
        """Payloads, results and notes that a job that is over has left where they are needed no more."""
        kept: dict[str, set[str]] = {record.id: _named(record) for record in self.jobs()}
        files = [path for path in (self.payloads / "jobs").rglob("*") if path.is_file()]
        orphans = [path for path in files if path.name not in kept.get(path.parent.name, ())]
        orphans += [path for path in (self.payloads / "spool").rglob("*") if path.is_file()]
        for name in SITES:
            site = self.founded.site(name)
            orphans += [*(site / "work").glob(f"{job}*"), *(site / "journal").glob(f"{job}*")]
        return [str(path) for path in orphans]


def learnt(steps: tuple[StepRecord, ...]) -> tuple[object, ...]:
    """What a job has learnt, step by step, and from whom: all but times and costs."""
    return tuple(
        (
            (step.step, step.kind, step.round, step.best_round),
            (step.model, step.strategy_state, step.preparation),
            step.metrics,
            tuple((share.site, share.outcome) for share in step.shares),
            (step.state, step.final.payload if step.final else None),
        )
        for step in steps
    )


def _named(record: JobRecord) -> set[str]:
    """The payloads that a job's record names."""
    named = (record.initial_model, record.model, record.best_model, record.strategy_state, record.preparation)
    return {ref.hex for ref in named if ref is not None}


# --------------------------------------------------------------------------------------------------------- at random


def soak(minutes: float, seed: int, pause: float = 0.02) -> None:
    """Runs one job after another while processes are killed; prints what was done, and fails at what was lost or doubled."""
    draw = random.Random(seed)
    end = time.monotonic() + 60 * minutes
    jobs = 0
    with tempfile.TemporaryDirectory(prefix="parley-kills-") as folder, found(Path(folder), pause) as founded:
        study = Study.of(founded, Path(folder))
        processes = (study.coordinator, *founded.sites.values())
        with study.serving():
            expected = learnt(study.exactly_once(study.submit()))
            while time.monotonic() < end:
                job = study.submit()
                with StoreReader(study.url) as store:
                    strike = time.monotonic() + draw.expovariate(1 / 1.0)

                    def ended() -> bool:
                        nonlocal strike
                        if time.monotonic() > strike:
                            for process in draw.sample(processes, draw.choice((1, 1, 1, 2, 4))):
                                process.kill()
                            strike = time.monotonic() + draw.expovariate(1 / 1.5)
                        record = store.job(job)
                        return record is not None and record.state.over

                    study.until(ended, f"the end of job {job}", patience=10 * PATIENCE)
                study.exactly_once(job, expected)
                jobs += 1
                deaths = ", ".join(f"{process.command[0]} {process.log.stem} {process.deaths}" for process in processes)
                print(f"{jobs} jobs, each exactly once; killed: {deaths}", flush=True)  # noqa: T201 - its output


def main() -> None:
    """The soak's command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    soak(given.minutes, given.seed)


if __name__ == "__main__":
    main()
