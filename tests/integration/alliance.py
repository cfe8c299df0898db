"""A consortium of real processes, founded, run and asked through the command line as people do."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import psutil

from coordinator.records import StepRecord
from coordinator.store import StoreReader, url_in
from parley.__main__ import main
from parley.homes import Consortium, Home
from simulations.bare_site import PLAIN_POLICY
from tests.consortium import free_port

SITES = ("athens", "berlin", "cork")
PATIENCE = 90.0
"""Seconds after which what a test waits for counts as never coming; machines that run tests may be very busy."""

_JOB = """
format = 1
name = "{name}"

[task]
kind = "tabular"
{task}

[data]
dataset = "{dataset}"
label = "{label}"

[[data.columns]]
name = "age"
kind = "numeric"
unit = "years"
range = {age}

[[data.columns]]
name = "pressure"
kind = "numeric"
unit = "mmHg"
range = [50, 250]
missing = "{missing}"

[[data.columns]]
name = "{sex}"
kind = "categorical"
categories = ["f", "m"]

[data.split]
method = "column"
column = "split"

[model]
{model}

[training]
epochs = {epochs}
batch_size = 16
learning_rate = {rate}

[strategy]
{strategy}

[rounds]
maximum = {rounds}

[cohort]
minimum_sites = {minimum}
deadline_seconds = {deadline}
{cohort}

[privacy]
{privacy}
"""


def job_file(
    name: str = "risk",
    *,
    task: str = 'target = "binary"',
    dataset: str = "patients",
    label: str = "sick",
    age: str = "[0, 120]",
    sex: str = "sex",
    model: str = 'name = "logistic_regression"',
    strategy: str = 'name = "fedavg"',
    rounds: int = 2,
    epochs: int = 4,
    rate: float = 0.2,
    minimum: int = 3,
    deadline: int = 120,
    missing: str = "mean",
    cohort: str = 'sites = ["athens", "berlin", "cork"]',
    privacy: str = 'secure_aggregation = "plain"',
) -> str:
    """A job on the data that `patients` makes."""
    return _JOB.format(**locals())


def patients(seed: int, rows: int = 120) -> pd.DataFrame:
    """Made-up patients: two measurements, a category, three labels that follow from them, and which rows test."""
    draw = np.random.default_rng(seed)
    age = draw.uniform(20, 90, rows).round(1)
    pressure = draw.normal(130, 15, rows).clip(60, 240).round()
    sex = draw.choice(["f", "m"], rows)
    risk = (age - 55) / 12 + (pressure - 130) / 15 + 0.8 * (sex == "m") + draw.logistic(0, 0.7, rows)
    stage = np.select([risk < -1, risk < 1], ["a", "b"], "c")
    return pd.DataFrame(
        {
            "age": age,
            "pressure": pressure,
            "sex": sex,
            "sick": (risk > 0).astype(int),
            "stage": stage,
            "stay": (20 + 3 * risk).clip(0, 60).round(1),
            "split": np.where(np.arange(rows) % 3 == 0, "test", "train"),
        }
    )


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, as JSON."""
        return json.loads(self.out)


def command(home: Path | None, *arguments: str) -> Said:
    """Runs a command in this process: the very same code without the second that a new interpreter takes."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["parley", *arguments, *([] if home is None else ["--home", str(home)])]
    wide = {"COLUMNS": "400"}
    code = 0
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with patch.object(sys, "argv", argv), patch.dict(os.environ, wide), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
    root.handlers[:], root.level = handlers, level  # commands that stay send the log to their own standard error
    return Said(code, out.getvalue(), err.getvalue())


def started(home: Path, *arguments: str) -> subprocess.Popen[str]:
    """A command in a process of its own, its output piped; it may be interrupted, also where the tests may not."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "parley", *arguments, "--home", str(home)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_interruptible,  # noqa: PLW1509 - it takes no lock that another thread could hold
    )


def _interruptible() -> None:
    """A shell that runs tests in the background has them ignore SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ended(process: subprocess.Popen[str]) -> Said:
    """What a process said, once it has ended; one that does not end is killed, and the test fails."""
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {PATIENCE:.0f} s; it said {out!r} and {err!r}") from None
    return Said(process.returncode, out, err)


def until(holds: Callable[[], bool], what: Callable[[], str] = lambda: "") -> None:
    """Returns once `holds` does; `what` tells what there was instead."""
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(f"waited {PATIENCE:.0f} s in vain; {what()}")
        time.sleep(0.2)  # other processes set no event here; asking costs them, and us, some 30 ms of a core


@dataclass
class Running:
    """A process that stays, and its log."""

    home: Path
    arguments: tuple[str, ...]
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        """Starts it."""
        self.start()

    def start(self) -> None:
        """Starts it anew; its log goes on."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "parley", *self.arguments, "--home", str(self.home)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """All of its log."""
        return self.log.read_text()

    def says(self, words: str, times: int = 1) -> None:
        """Returns once its log has these words so many times."""
        until(lambda: self.said.count(words) >= times, lambda: f"wanted {words!r} in: {self.said}")

    def child(self) -> psutil.Process:
        """Its trainer."""
        (trainer,) = psutil.Process(self.process.pid).children()
        return trainer

    def kill(self) -> None:
        """Ends it at once, as a power cut does."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Ends it as an administrator does (SIGTERM), and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.code()

    def code(self) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(PATIENCE)


@dataclass
class Alliance:
    """The whole consortium: the administrator's home, the coordinator, and sites by name."""

    folder: Path
    port: int = field(default_factory=free_port)
    health_port: int = field(default_factory=free_port)
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    sites: dict[str, Running] = field(default_factory=dict)
    coordinator: Running = field(init=False)

    @property
    def admin(self) -> Path:
        """The administrator's home; also an operator's."""
        return self.folder / "admin"

    @property
    def address(self) -> str:
        """Where the coordinator listens."""
        return f"127.0.0.1:{self.port}"

    def home(self, name: str) -> Path:
        """A member's home."""
        return self.folder / name

    def found(self) -> None:
        """Makes root and coordinator, and starts the coordinator."""
        passphrase = self.folder / "passphrase"
        passphrase.write_text("correct horse battery staple\n")
        self.admin_does("consortium", "init", "study", "--address", self.address, "--passphrase-file", str(passphrase))
        request = self.folder / "request"
        request.write_text(self._good(command(self.home("hub"), "coordinator", "init")).out)
        credential = self.folder / "credential"
        credential.write_text(self.admin_does("consortium", "admit", str(request), "--yes", *self.unlocked).out)
        self._good(command(self.home("hub"), "coordinator", "install", str(credential)))
        serve = ("coordinator", "serve", "--listen", self.address, "--health-port", str(self.health_port))
        self.coordinator = Running(self.home("hub"), serve, self.folder / "hub.log")
        self.coordinator.says("serves study")

    @property
    def unlocked(self) -> tuple[str, str]:
        """The options that open the root key."""
        return "--passphrase-file", str(self.folder / "passphrase")

    def admin_does(self, *arguments: str) -> Said:
        """A command at the administrator's, which must succeed."""
        return self._good(command(self.admin, *arguments))

    def invitation(self, name: str, *options: str) -> str:
        """An invitation's string."""
        return self.admin_does("consortium", "invite", name, *options, *self.unlocked).out.strip()

    def enrol(self, *names: str, role: str = "site") -> None:
        """Newcomers join, in processes of their own, and the administrator approves them; sites allow plain jobs."""
        joining = [started(self.home(name), role, "join", self.invitation(name, "--role", role)) for name in names]
        for name, process in zip(names, joining, strict=True):
            self.until_pending(name)
            self.admin_does("consortium", "approve", name, "--yes", *self.unlocked)
            said = self._good(ended(process))
            assert f"{name} is a member of study." in said.out
            if role == "site":
                (self.home(name) / "site" / "policy.toml").write_text(PLAIN_POLICY)

    def pending(self) -> list[dict[str, Any]]:
        """Who waits for approval."""
        found: list[dict[str, Any]] = self.admin_does("consortium", "pending", "--json").json
        return found

    def until_pending(self, name: str) -> None:
        """Returns once a newcomer of this name waits for approval."""
        until(lambda: name in [each["name"] for each in self.pending()], lambda: f"{name} does not ask to join")

    def gives(self, name: str, table: pd.DataFrame, location: str, *options: str) -> None:
        """A site registers its data as `patients`."""
        self.tables[name] = table
        said = self._good(command(self.home(name), "site", "dataset", "add", "patients", location, *options))
        assert f"patients: {len(table)} rows" in said.out

    def attends(self, name: str) -> Running:
        """A site's agent, attending."""
        self.sites[name] = Running(self.home(name), ("site", "run"), self.folder / f"{name}.log")
        self.sites[name].says("attending hub")
        return self.sites[name]

    # --------------------------------------------------------------------------------------------------------- jobs

    def unlock(self) -> Consortium:
        """The consortium with its root key, to make what no command makes."""
        return Home(self.admin).consortium.unlock((self.folder / "passphrase").read_text().strip())

    def write(self, text: str) -> str:
        """A job file with this text."""
        path = self.folder / "job.toml"
        path.write_text(text)
        return str(path)

    def submit(self, text: str) -> str:
        """Submits a job and returns its id."""
        return str(self.admin_does("job", "submit", self.write(text), "--json").json["job"])

    def job(self, job: str) -> dict[str, Any]:
        """What `job show --json` tells."""
        view: dict[str, Any] = self.admin_does("job", "show", job, "--json").json
        return view

    def until_job(self, job: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The job's view, once `holds` is true of it. Fails at once when the job ended otherwise."""
        view: dict[str, Any] = {}

        def enough() -> bool:
            view.update(self.job(job))
            if holds(view):
                return True
            assert view["state"] in {"waiting", "running"}, view["reason"]
            return False

        until(enough, lambda: f"the job: {view}")
        return view

    def finished(self, job: str) -> dict[str, Any]:
        """The job's last view, once it has finished."""
        return self.until_job(job, lambda view: view["state"] == "finished")

    def steps(self, job: str) -> tuple[StepRecord, ...]:
        """The job's committed steps, from the coordinator's store."""
        with StoreReader(url_in(Home(self.home("hub")).coordinator.folder)) as store:
            return store.steps(job)

    @staticmethod
    def site(view: dict[str, Any], name: str) -> dict[str, Any]:
        """A site's row in a job's view."""
        return next(row for row in view["sites"] if row["name"] == name)

    def metrics(self, view: dict[str, Any], number: int) -> dict[str, float]:
        """A round's metrics."""
        (found,) = [each for each in view["history"] if each["number"] == number]
        return {metric["name"]: metric["value"] for metric in found["metrics"]}

    def end(self) -> None:
        """Ends what still runs."""
        running: Sequence[Running] = [*self.sites.values(), self.coordinator]
        for each in running:
            if each.process.poll() is None:
                each.process.send_signal(signal.SIGCONT)
                each.process.send_signal(signal.SIGTERM)
        for each in running:
            try:
                each.process.wait(20)
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()

    @staticmethod
    def _good(said: Said) -> Said:
        assert said.code == 0, said
        return said


@contextmanager
def paused(running: Running) -> Iterator[None]:
    """A process stands still for the block, as on a machine that sleeps."""
    running.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        running.process.send_signal(signal.SIGCONT)
