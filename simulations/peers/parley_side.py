"""Parley's side: the coordinator's own command, with mutual TLS and its store, and each bare site in its process."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from client.connection import Connection
from coordinator.store import StoreReader, url_in
from federation import codec
from federation.blobs import CHUNK, BlobStore
from federation.errors import ParleyError, UnreachableError
from federation.messages import (
    JobAdded,
    JobState,
    JobView,
    ListSites,
    RevocationList,
    Role,
    Sites,
    StepKind,
    SubmitJob,
)
from federation.vector import F32, Layout, TensorSpec, header
from privacy.identity import Root
from simulations.bare_site import Membership
from simulations.peers.measure import Figures, Mark, Processes, figures
from simulations.peers.trial import Size, Trial, free_port, progress

__all__ = ["Deployment", "attended", "job_text", "measure", "submitted", "watched"]

_CONSORTIUM = "rounds"
_COORDINATOR = "hub"
_PATIENCE = 60.0
"""Seconds for the coordinator to start and all sites to attend."""
_PARLEY = (sys.executable, "-P", "-m", "parley")

_JOB = """\
format = 1
name = "rounds"

[task]
kind = "tabular"
target = "binary"
standardise = "none"

[data]
dataset = "prepared"
label = "label"
columns = [{{ name = "value", kind = "numeric", range = [0, 1] }}]

[model]
name = "mlp"
hidden = [{hidden}, {hidden}]

[strategy]
name = "fedavg"

[rounds]
maximum = {rounds}

[cohort]
minimum_sites = {sites}
deadline_seconds = 3600

[privacy]
{privacy}
"""
_PLAIN = 'secure_aggregation = "plain"'
_SECURE = "clip = 1000.0"
"""So that the prepared vectors are not cut down."""


def measure(trial: Trial, *, secure: bool = False) -> Figures:
    """What Parley's rounds cost: train and evaluate steps, with all that makes them durable.

    Args:
        trial: What is moved.
        secure: Whether the steps are summed by RosterSum instead of in plain.

    Raises:
        ParleyError: A process ended, or the job did not finish.
    """
    deployment = Deployment.found(trial.folder)
    with Processes(trial.folder) as processes:
        deployment.serve(processes)
        for folder, update in zip(deployment.sites(len(trial.updates)), trial.updates, strict=True):
            deployment.attend(processes, folder.name, (folder,), update, secure=secure)
        job, marks = asyncio.run(_run(trial, processes, deployment, secure=secure))
        peak = processes.peak_mb("coordinator")
    return figures(deployment.ends(job), marks, values=trial.size.values, peak=peak)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A consortium on this machine whose root's key is at hand, to sign members without ado.

    Attributes:
        folder: The home of the consortium and of its coordinator lies below it, and each member's folder.
        address: Where the coordinator listens.
        root: Signs members.
        revocations: The consortium's list: nobody is on it.
    """

    folder: Path
    address: str
    root: Root
    revocations: RevocationList

    @classmethod
    def found(cls, folder: Path) -> Self:
        """Makes a consortium and its coordinator, by the commands that an administrator uses."""
        home, address = _home(folder), f"127.0.0.1:{free_port()}"
        _parley(home, "consortium", "init", _CONSORTIUM, "--address", address, "--no-passphrase")
        request = _parley(home, "coordinator", "init", "--name", _COORDINATOR)
        credential = _parley(home, "consortium", "admit", request, "--yes")
        _parley(home, "coordinator", "install", credential)
        files = home / "consortium"
        root = Root.load((files / "root.key").read_bytes(), (files / "root.pem").read_bytes(), None)
        return cls(folder, address, root, codec.decode(RevocationList, (files / "revocations.bin").read_bytes()))

    def serve(self, processes: Processes) -> None:
        """Starts the coordinator's own command, as the process `coordinator`."""
        listen = ("coordinator", "serve", "--listen", self.address, "--home", str(_home(self.folder)))
        processes.start("coordinator", *_PARLEY, *listen)

    def member(self, name: str, role: Role) -> Membership:
        """A new member."""
        now = int(time.time())
        return Membership.sign(
            self.root, self.revocations, name, role, address=self.address, coordinator=_COORDINATOR, now=now
        )

    def sites(self, count: int) -> tuple[Path, ...]:
        """So many new sites: the folder of each, which bears its name and holds its membership."""
        folders = tuple(self.folder / f"site-{number}" for number in range(count))
        for folder in folders:
            folder.mkdir()
            self.member(folder.name, Role.SITE).store(folder)
        return folders

    def attend(
        self, processes: Processes, name: str, folders: Sequence[Path], update: Path, *, secure: bool = False
    ) -> None:
        """Starts the process `name`, in which the sites of these folders attend, with this vector for an update."""
        site = ("-P", "-m", "simulations.bare_site", *map(str, folders), "--vector", str(update))
        site += ("--secure",) if secure else ()
        processes.start(name, sys.executable, *site)

    def ends(self, job: str) -> tuple[float, ...]:
        """When each round's evaluation, its last step, was done; the store keeps that for every step."""
        with StoreReader(url_in(_home(self.folder) / "coordinator")) as store:
            return tuple(step.ended for step in store.steps(job) if step.kind is StepKind.EVALUATE)


def _home(folder: Path) -> Path:
    return folder / "home"


def _parley(home: Path, *command: str) -> str:
    done = subprocess.run([*_PARLEY, *command, "--home", str(home)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ParleyError(f"parley {' '.join(command[:2])} failed:\n{done.stderr}")
    return done.stdout.strip()


async def _run(trial: Trial, processes: Processes, deployment: Deployment, *, secure: bool) -> tuple[str, list[Mark]]:
    """Submits the job and watches it to its end: its id, and a mark for each view of it."""
    marks: list[Mark] = []
    ended = 0

    def seen(view: JobView) -> None:
        nonlocal ended
        marks.append(processes.mark())
        if (now := sum(bool(each.metrics) for each in view.history)) > ended:
            ended = now
            progress(f"parley {trial.size.name}: {ended} of {trial.rounds} rounds")

    async with Connection.opened(deployment.member("operator", Role.OPERATOR).line) as connection:
        await attended(connection, processes, len(trial.updates))
        text = job_text(trial.size, rounds=trial.rounds, sites=len(trial.updates), secure=secure)
        job = await submitted(connection, trial.folder, text, trial.size, np.load(trial.model, mmap_mode="r"))
        await watched(connection, processes, job, seen)
    return job, marks


async def attended(
    connection: Connection, processes: Processes, count: int, seen: Callable[[int], None] = lambda _: None
) -> None:
    """Returns when `count` sites attend; tells `seen` how many do.

    Raises:
        ParleyError: They did not in time, or a process ended.
    """
    limit = time.monotonic() + _PATIENCE
    while time.monotonic() < limit:
        processes.check()
        with suppress(UnreachableError):  # the coordinator is still starting
            reply = await connection.operate(ListSites())
            here = sum(site.connected for site in reply.sites) if isinstance(reply, Sites) else 0
            seen(here)
            if here == count:
                return
        await asyncio.sleep(0.05)
    raise processes.waited(_PATIENCE, f"{count} sites to attend")


def job_text(size: Size, *, rounds: int, sites: int, secure: bool = False) -> str:
    """A job of so many rounds with all of so many sites, whose model is of this size."""
    privacy = _SECURE if secure else _PLAIN
    return _JOB.format(hidden=size.hidden, rounds=rounds, sites=sites, privacy=privacy)


async def submitted(connection: Connection, folder: Path, text: str, size: Size, model: F32) -> str:
    """The id of a new job that starts from `model` [size.values], which is sent from a file below `folder`."""
    blobs = BlobStore(folder / "desk")
    with blobs.draft() as draft:
        draft.write(header(_layout(size)))
        for start in range(0, model.size, CHUNK):
            draft.write(np.ascontiguousarray(model[start : start + CHUNK], dtype="<f4").tobytes())
        ref = draft.keep()
    await connection.upload("", ref, blobs)
    blobs.drop(ref)
    reply = await connection.operate(SubmitJob(text, ref))
    if not isinstance(reply, JobAdded):
        raise ParleyError(f"the coordinator answered with {type(reply).__name__}, which was not asked for")
    return reply.job


async def watched(connection: Connection, processes: Processes, job: str, seen: Callable[[JobView], None]) -> None:
    """Returns when the job has finished; hands `seen` every view of it, at most ten a second.

    Raises:
        ParleyError: It ended otherwise, or a process ended.
    """
    view: JobView | None = None
    async for view in connection.watch(job):
        processes.check()
        seen(view)
    if view is None or view.state is not JobState.FINISHED:
        raise ParleyError(f"job {job} did not finish: {view.reason if view else 'nothing was shown of it'}")


def _layout(size: Size) -> Layout:
    """The perceptron's tensors, under the names that torch gives them."""
    h = size.hidden
    shapes = {
        "0.weight": (h, 1),
        "0.bias": (h,),
        "2.weight": (h, h),
        "2.bias": (h,),
        "4.weight": (1, h),
        "4.bias": (1,),
    }
    return Layout(tuple(TensorSpec(name, shape) for name, shape in shapes.items()))
