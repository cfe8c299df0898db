"""Parley's side: the coordinator's own command, with mutual TLS and its store, and each bare site in its process."""

import asyncio
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from client.connection import Connection
from coordinator.store import StoreReader, url_in
from federation import codec
from federation.blobs import BlobStore
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
from federation.vector import Layout, TensorSpec, to_safetensors
from privacy.identity import Root
from simulations.bare_site import Membership
from simulations.peers.measure import Figures, Mark, Processes, figures
from simulations.peers.trial import Size, Trial, free_port, progress

__all__ = ["measure"]

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

[privacy]
secure_aggregation = "plain"
"""


def measure(trial: Trial) -> Figures:
    """What Parley's rounds cost: train and evaluate steps, with all that makes them durable.

    Raises:
        ParleyError: A process ended, or the job did not finish.
    """
    home, address = trial.folder / "home", f"127.0.0.1:{free_port()}"
    _found(home, address)
    with Processes(trial.folder) as processes:
        listen = ("coordinator", "serve", "--listen", address, "--home", str(home))
        processes.start("coordinator", *_PARLEY, *listen)
        operator = _start_sites(trial, processes, home, address)
        job, marks = asyncio.run(_run(trial, processes, operator))
        peak = processes.peak_mb("coordinator")
    return figures(_ends(home, job), marks, values=trial.size.values, peak=peak)


def _found(home: Path, address: str) -> None:
    """Makes a consortium and its coordinator, by the commands that an administrator uses."""
    _parley(home, "consortium", "init", _CONSORTIUM, "--address", address, "--no-passphrase")
    request = _parley(home, "coordinator", "init", "--name", _COORDINATOR)
    credential = _parley(home, "consortium", "admit", request, "--yes")
    _parley(home, "coordinator", "install", credential)


def _parley(home: Path, *command: str) -> str:
    done = subprocess.run([*_PARLEY, *command, "--home", str(home)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ParleyError(f"parley {' '.join(command[:2])} failed:\n{done.stderr}")
    return done.stdout.strip()


def _start_sites(trial: Trial, processes: Processes, home: Path, address: str) -> Membership:
    """Signs as many sites as there are updates and starts them; returns an operator, signed as well."""
    files = home / "consortium"
    root = Root.load((files / "root.key").read_bytes(), (files / "root.pem").read_bytes(), None)
    revocations = codec.decode(RevocationList, (files / "revocations.bin").read_bytes())

    def signed(name: str, role: Role) -> Membership:
        now = int(time.time())
        return Membership.sign(root, revocations, name, role, address=address, coordinator=_COORDINATOR, now=now)

    for number, update in enumerate(trial.updates):
        name = f"site-{number}"
        folder = trial.folder / name
        folder.mkdir()
        signed(name, Role.SITE).store(folder)
        site = ("-P", "-m", "simulations.bare_site", str(folder), "--vector", str(update))
        processes.start(name, sys.executable, *site)
    return signed("operator", Role.OPERATOR)


async def _run(trial: Trial, processes: Processes, operator: Membership) -> tuple[str, list[Mark]]:
    """Submits the job and watches it to its end: its id, and a mark for each view of it."""
    async with Connection.opened(operator.line) as connection:
        await _attended(connection, processes, len(trial.updates))
        job = await _submitted(connection, trial)
        marks: list[Mark] = []
        ended = 0
        view: JobView | None = None
        async for view in connection.watch(job):  # at most ten views a second, however short the rounds are
            marks.append(processes.mark())
            processes.check()
            if (now := sum(bool(each.metrics) for each in view.history)) > ended:
                ended = now
                progress(f"parley {trial.size.name}: {ended} of {trial.rounds} rounds")
    if view is None or view.state is not JobState.FINISHED:
        raise ParleyError(f"job {job} did not finish: {view.reason if view else 'nothing was shown of it'}")
    return job, marks


async def _attended(connection: Connection, processes: Processes, count: int) -> None:
    """Returns when `count` sites attend."""
    limit = time.monotonic() + _PATIENCE
    while time.monotonic() < limit:
        processes.check()
        with suppress(UnreachableError):  # the coordinator is still starting
            reply = await connection.operate(ListSites())
            if isinstance(reply, Sites) and sum(site.connected for site in reply.sites) == count:
                return
        await asyncio.sleep(0.05)
    raise processes.waited(_PATIENCE, f"{count} sites to attend")


async def _submitted(connection: Connection, trial: Trial) -> str:
    blobs = BlobStore(trial.folder / "desk")
    ref = blobs.put(to_safetensors(_layout(trial.size), np.load(trial.model)))
    await connection.upload("", ref, blobs)
    text = _JOB.format(hidden=trial.size.hidden, rounds=trial.rounds, sites=len(trial.updates))
    reply = await connection.operate(SubmitJob(text, ref))
    if not isinstance(reply, JobAdded):
        raise ParleyError(f"the coordinator answered with {type(reply).__name__}, which was not asked for")
    return reply.job


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


def _ends(home: Path, job: str) -> tuple[float, ...]:
    """When each round's evaluation, its last step, was done; the store keeps that for every step."""
    with StoreReader(url_in(home / "coordinator")) as store:
        return tuple(step.ended for step in store.steps(job) if step.kind is StepKind.EVALUATE)
