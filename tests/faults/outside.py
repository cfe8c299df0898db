"""A consortium of processes that are killed, seen from outside: started again as by systemd, and judged by the store.

`python -m tests.faults.outside --minutes 5 --seed 1` kills processes drawn at random at times drawn at random, and
holds every job to what it comes to when nobody is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from client.connection import Connection
from client.ledger_store import look
from client.policy import example
from client.vault import vault_in
from coordinator.store import Store, StoreReader, url_in
from federation.blobs import BlobRef, BlobStore
from federation.errors import RemoteProtocolError, UnreachableError
from federation.job import parse
from federation.messages import Credential, JobState, JobView, Role, ShowJob, StepKind, SubmitJob
from federation.vector import Layout, TensorSpec, to_safetensors
from parley.commands.site import install, sealing
from parley.dialling import ask, line
from parley.homes import Home
from privacy import identity
from privacy.differential_privacy.events import Unit
from privacy.ledger import BudgetSet
from tests.consortium import free_port
from tests.faults import killing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.process import BaseProcess

    from coordinator.records import JobRecord, StepRecord
    from federation.messages import OperatorRequest
    from parley.homes import Consortium

__all__ = [
    "NOISY",
    "OPEN",
    "PLAIN",
    "ROUNDS",
    "SEALED",
    "SITES",
    "Founded",
    "Process",
    "Study",
    "found",
    "job_text",
    "learnt",
]

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

[training]
epochs = {epochs}

[strategy]
name = "fedavgm"

[rounds]
maximum = {rounds}

[cohort]
minimum_sites = 3
quorum = {quorum}
deadline_seconds = {deadline}

[privacy]
{privacy}
"""

PLAIN = 'secure_aggregation = "plain"'
SEALED = f'weighting = "uniform"\nclip = 1e6\nbound = {(2**29 - 1) / 2**10}'
"""Three sites' values are summed in units of `bound / (2^29 - 1)`: of 2^-10, in which light work's are whole numbers.

So nothing is rounded at random, and secure aggregation, too, comes to the same model to the last bit.
"""
OPEN = f'{SEALED}\nchurn = "open"'
NOISY = """churn = "dp"
clip = 10.0
[privacy.differential_privacy]
level = "site"
epsilon = 20.0
delta = 0.01
spare_rounds = 100
"""
"""Each round is other noise, so that no two runs come to the same model; who is killed may cost some of the rounds."""
_POLICY = example(plain=True, dp=True, opened=True)
_BUDGET = BudgetSet("heart", 10_000.0, 0.01, None, Unit.SITE, reason="a test")

_fork = multiprocessing.get_context("forkserver")
# The parent of all processes has loaded what they run: two seconds of CPU less for each of a hundred starts.
_fork.set_forkserver_preload([killing.__name__, *(["pytest"] if "pytest" in sys.modules else [])])


def job_text(
    rounds: int = ROUNDS, quorum: int = len(SITES), epochs: int = 1, privacy: str = PLAIN, deadline: int = 600
) -> str:
    """A job whose strategy remembers, so that each of its models depends on all that came before."""
    return _JOB.format(rounds=rounds, quorum=quorum, epochs=epochs, privacy=privacy, deadline=deadline)


@dataclass
class Process:
    """A command of Parley's in a process of its own.

    Attributes:
        command: Its arguments.
        log: Where it says what it says, through all its lives.
        options: Of `tests.faults.killing`, in each of its lives.
        fates: Where its next lives end, as `tests.faults.killing` takes it: "POINT N", and options of that life.
        deaths: How often it was killed.
    """

    command: tuple[str, ...]
    log: Path
    options: tuple[str, ...] = ()
    fates: list[str] = field(default_factory=list)
    deaths: int = 0
    running: BaseProcess | None = None

    def start(self, *fates: str) -> None:
        """Starts it; this life and the next ones end as `fates` say, and later ones by themselves."""
        self.fates += fates
        fate = self.fates.pop(0) if self.fates else "never 0"
        arguments = [*fate.split(), *self.options, "--", *self.command]
        self.running = _fork.Process(target=killing.run, args=(arguments, self.log), daemon=True)
        self.running.start()

    @property
    def pid(self) -> int:
        """Its process's number."""
        assert self.running is not None
        assert self.running.pid is not None
        return self.running.pid

    def tend(self) -> None:
        """Starts it again if it was killed; it must not end otherwise."""
        if self.running is None or self.running.exitcode is None:
            return
        assert self.running.exitcode == -signal.SIGKILL, f"{self.command} ended by itself:\n{self.tail()}"
        self.deaths += 1
        self.start()

    def ends(self, status: int) -> None:
        """Returns once it has ended by itself, with this status."""
        assert self.running is not None
        self.running.join(PATIENCE)
        assert self.running.exitcode == status, self.tail()

    def kill(self) -> None:
        """Ends it at once, as a power cut does; `tend` starts it again."""
        if self.running is not None:
            self.running.kill()
            self.running.join()

    def end(self) -> None:
        """Ends it as systemd does, for good."""
        if self.running is not None:
            self.running.terminate()
            self.running.join(PATIENCE)
            self.running.kill()
        self.running = None
        self.fates.clear()

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

    def home(self, name: str) -> Home:
        """A site's home."""
        return Home(self.folder / "sites" / name)

    def charged(self, name: str, since: int = 0) -> int:
        """Rounds that a site's ledger was charged, in all jobs; each stands there once."""
        return sum(event.count for event in look(vault_in(self.home(name).site.folder)).book.events("heart")) - since

    def introduce(self, url: str) -> None:
        """Makes a store in which the sites are members, as they are once they have attended."""
        with Store(url) as store:
            for member in self.consortium.home.members():
                if member.statement.role is Role.SITE:
                    store.add_member(member.statement, member.certificate, member.statement.not_before)


@contextmanager
def found(
    folder: Path, pause: float = 0.0, options: tuple[str, ...] = (), sites: Sequence[str] = SITES
) -> Iterator[Founded]:
    """A consortium with three sites, which attend until the block ends. They joined a day ago.

    They take part in jobs of every kind, and have a budget for those with noise. Their work is light and takes `pause`;
    `options` are further ones of `tests.faults.killing`.
    """
    now = int(time.time())
    hub, port = Home(folder / "hub"), free_port()
    consortium = hub.consortium.create("kills", f"127.0.0.1:{port}", "hub", passphrase=None, now=now - _DAY)
    request = hub.coordinator.request("hub", "kills", "0.1.0")
    hub.coordinator.install_text(consortium.admit(request, now=now - _DAY), now)
    founded = Founded(folder, port, consortium, {})
    me = hub.coordinator.load()
    with ExitStack() as ending:
        for name in sites:
            home = founded.home(name)
            invitation = consortium.invite(name, name, Role.SITE, now=now - _DAY)
            asked = identity.make_request(invitation, home.site.begin(), "0.1.0")
            member = consortium.approve(asked, now=now - _DAY)
            install(
                home.site, invitation, Credential(member.certificate, member.statement, me.statement, me.revocations)
            )
            (home.site.folder / "policy.toml").write_text(_POLICY)
            with sealing(home.site.folder, home.site.load()) as held:
                held.ledger.set_budget(_BUDGET)
            command = ("site", "run", "--home", str(home.folder))
            founded.sites[name] = Process(command, folder / f"{name}.log", ("--light", str(pause), *options))
            founded.sites[name].start()
            ending.callback(founded.sites[name].end)
        founded.introduce(url_in(hub.coordinator.folder))
        yield founded


@dataclass
class Study:
    """A coordinator with a store and payloads of its own, and the consortium's sites.

    Attributes:
        founded: The consortium.
        folder: The coordinator's home.
        url: Where its store is, in which the sites are members already.
        meanwhile: Done again and again while something is waited for.
    """

    founded: Founded
    folder: Path
    url: str
    meanwhile: Callable[[], None] = lambda: None
    coordinator: Process = field(init=False)

    def __post_init__(self) -> None:
        """Prepares the coordinator; `serving` starts it."""
        address = f"127.0.0.1:{self.founded.port}"
        command = ("coordinator", "serve", "--listen", address, "--store", self.url, "--home", str(self.folder))
        self.coordinator = Process(command, self.folder / "coordinator.log")

    @classmethod
    def of(cls, founded: Founded, folder: Path, url: str = "") -> Study:
        """A study with a home in `folder`, and a store in a file there or at `url`."""
        home = folder / "study"
        shutil.copytree(founded.hub.coordinator.folder, home / "coordinator", dirs_exist_ok=True)
        return cls(founded, home, url or url_in(home / "coordinator"))

    @contextmanager
    def serving(self, *fates: str) -> Iterator[None]:
        """The coordinator runs, and its lives end as `fates` say; whoever was killed is started again by `until`."""
        self.coordinator.start(*fates)
        try:
            yield
        finally:
            self.coordinator.end()
            self.store.close()
            for site in self.founded.sites.values():
                site.fates.clear()
                site.tend()

    @cached_property
    def store(self) -> StoreReader:
        """The store as it stands; what the coordinator remembers is not asked."""
        return StoreReader(self.url)

    @property
    def payloads(self) -> Path:
        """Where the coordinator keeps payloads."""
        return Home(self.folder).coordinator.folder

    # ------------------------------------------------------------------------------------------------ as people do

    def tend(self) -> None:
        """Starts again whoever was killed."""
        self.meanwhile()
        for process in (self.coordinator, *self.founded.sites.values()):
            process.tend()

    def until(self, holds: Callable[[], bool], what: str, patience: float = PATIENCE, every: float = 0.05) -> None:
        """Returns once `holds` does, which is asked every so many seconds."""
        end = time.monotonic() + patience
        while not holds():
            self.tend()
            if time.monotonic() > end:
                raise AssertionError(f"waited in vain for {what}; the coordinator said:\n{self.coordinator.tail()}")
            time.sleep(every)  # other processes set no event here

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

    def submit(self, text: str = "", layout: Layout = _LAYOUT) -> str:
        """Submits a job and returns its id. An operator who heard no answer looks whether it was taken, and repeats."""
        before = {record.id for record in self.jobs()}
        added: set[str] = set()

        def taken() -> bool:
            with suppress(UnreachableError, RemoteProtocolError):  # it may have forgotten the model when it is asked
                asyncio.run(self._submit(text or job_text(), layout))
            added.update(record.id for record in self.jobs() if record.id not in before)
            return bool(added)

        self.until(taken, "a job to be taken")
        (job,) = added
        return job

    async def _submit(self, text: str, layout: Layout) -> None:
        desk = BlobStore(self.folder / "desk")
        model = desk.put(to_safetensors(layout, np.zeros(layout.size, dtype=np.float32)))
        async with Connection.opened(line(self.founded.hub.operator)) as connection:
            await connection.upload("", model, desk)
            await connection.operate(SubmitJob(text, model))

    # -------------------------------------------------------------------------------------------- what is there

    def jobs(self) -> tuple[JobRecord, ...]:
        """All jobs in the store."""
        return self.store.jobs()

    def steps(self, job: str) -> tuple[StepRecord, ...]:
        """The steps of a job that are stored."""
        return self.store.steps(job)

    def reaches(self, job: str, step: int) -> None:
        """Returns once so many of the job's steps are stored."""
        self.until(lambda: len(self.steps(job)) >= step, f"step {step} of job {job}")

    def over(self, job: str) -> tuple[JobRecord, tuple[StepRecord, ...]]:
        """A job with its steps, once it is over."""
        found: list[JobRecord] = []

        def ended() -> bool:
            record = self.store.job(job)
            found[:] = [record] if record is not None and record.state.over else []
            return bool(found)

        self.until(ended, f"the end of job {job}", patience=2 * PATIENCE, every=0.1)
        return found[0], self.steps(job)

    def exactly_once(self, job: str, expected: Sequence[object] | None = None) -> tuple[StepRecord, ...]:
        """Waits for the job's end and holds it to this: each round once, each site once in it, and nothing left over.

        With `expected`, what the job has learnt must be that, to the last bit.
        """
        record, steps = self.over(job)
        assert (record.state, record.next_step) == (JobState.FINISHED, len(steps) + 1), record.reason
        rounds = range(1, parse(record.text).rounds.maximum + 1)
        both = [(kind, number) for number in rounds for kind in (StepKind.TRAIN, StepKind.EVALUATE)]
        assert [(step.kind, step.round) for step in steps] == [(StepKind.STATISTICS, 0), *both]
        assert [step.step for step in steps] == list(range(1, len(steps) + 1))
        for step in steps:
            assert [share.site for share in step.shares] == list(SITES), f"step {step.step}"
        if expected is not None:
            assert learnt(steps) == tuple(expected)
        (final,) = (model for model in self.store.models() if model.job == job)
        assert BlobRef.of(BlobStore(self.payloads / "jobs" / job).get(final.payload)) == final.payload
        self.nothing_left(job)
        return steps

    def nothing_left(self, job: str) -> None:
        """Returns once a job that is over has left nothing behind that is not needed."""
        self.until(lambda: not self.leftovers(job), f"the last of {self.leftovers(job)} to go")

    def leftovers(self, job: str) -> list[str]:
        """Payloads, results and notes that a job that is over has left where they are needed no more."""
        kept: dict[str, set[str]] = {record.id: _named(record) for record in self.jobs()}
        files = _files(self.payloads / "jobs")
        orphans = [path for path in files if path.name not in kept.get(path.parent.name, ())]
        for room in ("spool", "sealed"):
            orphans += _files(self.payloads / room)
        for name in SITES:
            site = self.founded.home(name).site.folder
            orphans += [*(site / "work").glob(f"{job}*"), *(site / "journal").glob(f"{job}*")]
            orphans += _files(site / "updates")
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


def soak(minutes: float, seed: int, url: str) -> None:
    """Runs a plain job and a sealed one in turn while processes are killed; fails at the first that is not as it was.

    The store is a file, or at `url`, where there must be none yet.
    """
    draw = random.Random(seed)  # noqa: S311 - so that a seed tells what to repeat
    end, due = time.monotonic() + 60 * minutes, 0.0
    with tempfile.TemporaryDirectory(prefix="parley-kills-") as folder, found(Path(folder), pause=0.02) as founded:
        study = Study.of(founded, Path(folder), url)
        if url:
            founded.introduce(url)
        processes = (study.coordinator, *founded.sites.values())

        def strike() -> None:
            """Kills one process or several when it is time to."""
            nonlocal due
            if time.monotonic() > due:
                due = time.monotonic() + draw.expovariate(1 / 1.5)
                for process in draw.sample(processes, draw.choice((1, 1, 1, 2, 4))):
                    process.kill()

        with study.serving():
            texts = [job_text(privacy=privacy) for privacy in (PLAIN, SEALED)]
            expected = [learnt(study.exactly_once(study.submit(text))) for text in texts]
            study.meanwhile = strike
            jobs = 0
            while time.monotonic() < end:
                study.exactly_once(study.submit(texts[jobs % 2]), expected[jobs % 2])
                jobs += 1
                deaths = ", ".join(f"{process.log.stem} {process.deaths}" for process in processes)
                print(f"{jobs} jobs, each round of each exactly once; kills: {deaths}", flush=True)  # noqa: T201 - its output


def main() -> None:
    """The soak's command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", default="", help="the URL of an empty database [default: a file]")
    given = parser.parse_args()
    soak(given.minutes, given.seed, given.store)


if __name__ == "__main__":
    main()


def _files(folder: Path) -> list[Path]:
    """The files below `folder`, of which some, and whole folders, may vanish meanwhile."""
    return [Path(root) / name for root, _, names in os.walk(folder) for name in names]
