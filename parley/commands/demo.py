"""`parley demo`: four hospitals and a coordinator, five real processes with mutual TLS, train one model together."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import assert_never

from rich.table import Table

from client import policy
from client.connection import Connection
from client.data.registry import DataSet, DataSets
from federation.errors import ConfigurationError, ParleyError, UnreachableError, WhoActs
from federation.job import Job, parse
from federation.messages import (
    ApproveEnrolment,
    EnrolmentRequest,
    JobState,
    JobView,
    ListPending,
    ListSites,
    Pending,
    Role,
    Sites,
)
from parley.commands.jobs import screen, submit_text
from parley.commands.site import approved, door, install, sealing
from parley.dialling import line
from parley.heart import baselines, data
from parley.homes import Consortium, Home
from parley.terminal import console, emit, errors
from privacy import identity
from privacy.differential_privacy.events import Unit
from privacy.ledger import BudgetSet
from privacy.secure_aggregation.rostersum.floor import EXACT_PLANS, ROWS_OF_EACH_CLASS
from privacy.secure_aggregation.rostersum.terms import Churn

__all__ = ["demo"]

_PATIENCE = 60.0
_ONE_CLASS = "switzerland"
"""The hospital of 46 patients, one of them healthy; secure sums want 5 of each class unless its policy says less."""
_OWN_WORD = (
    f"All but one of {_ONE_CLASS}'s patients are of one class: it joins secure sums because its own policy says "
    "rows_of_each_class = 0"
)
_SUMS = {
    Churn.CELLS: "Secure aggregation, churn cells: the coordinator saw sums over all four hospitals only, and no "
    "hospital's own update. Had one been missing, each round would have waited for it.",
    Churn.DP: "Secure aggregation, churn dp: the coordinator saw sums over at least three hospitals, with noise of "
    "each, and no hospital's own update. Any one might have been missing.",
    Churn.OPEN: "Secure aggregation, churn open: the coordinator saw sums over at least three hospitals. Had one been "
    "missing, two sums' difference would have shown its update nearly as it is.",
}
_EPSILON, _DELTA = 8.0, 0.01
"""What churn dp promises each hospital here."""
_ONLY_SHOWN = "With four hospitals the demo only shows that it runs."
_EACH = "Plain aggregation: the coordinator saw each hospital's own update, statistics and evaluation."


@dataclass(slots=True)
class _Score:
    """Accuracy, AUC and number of test rows, over all seeds."""

    accuracy: list[float] = field(default_factory=list)
    auc: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def add(self, accuracy: float, auc: float | None, rows: int) -> None:
        self.accuracy.append(accuracy)
        self.rows.append(rows)
        if auc is not None:
            self.auc.append(auc)

    def json(self) -> dict[str, float | None]:
        return {
            "accuracy": fmean(self.accuracy),
            "auc": fmean(self.auc) if self.auc else None,
            "n": round(fmean(self.rows)),
        }

    def row(self) -> tuple[str, str, str]:
        auc = f"{fmean(self.auc):.3f}" if self.auc else "one class only"
        return f"{fmean(self.accuracy):.3f}", auc, f"{fmean(self.rows):.0f}"


def demo(*, seeds: int, keep: bool, plain: bool, churn: Churn, data_file: Path | None, as_json: bool) -> None:
    """Runs the demo and prints its table, or its JSON; `plain` lets the coordinator see each hospital's update.

    Raises:
        ConfigurationError: Plain aggregation is asked for with another churn than cells, the default.
    """
    if plain and churn is not Churn.CELLS:
        raise ConfigurationError(
            f"churn {churn} is a matter of secure aggregation, and --plain is without",
            fix="leave one of them out",
            who=WhoActs.YOU,
        )
    csv = _data(data_file)
    began, cpu = time.monotonic(), _cpu_seconds()
    folder = Path(tempfile.mkdtemp(prefix="parley-demo-"))
    consortium = _Consortium(folder, plain=plain, churn=churn)
    guarantee = ""
    try:
        files = data.write(csv, folder / "data")
        federated, pooled, alone, moved = _Score(), _Score(), {site: _Score() for site in data.SITES}, 0
        for seed in range(seeds):
            if seed % EXACT_PLANS == 0 and not (plain and seed):
                consortium.end()
                consortium = _Consortium(folder / f"from-split-{seed}", plain=plain, churn=churn)
                with _told(_founding(seed)):
                    consortium.found(files)
            text = data.job_text(seed, data.job_template())
            text = data.plain(text) if plain else _asking(text, churn)
            guarantee = _guarantee(parse(text, "heart.toml"))
            view = consortium.train(text, seed, seeds, live=not as_json)
            metrics = {each.name: each.value for each in view.history[-1].metrics}
            federated.add(metrics["accuracy"], metrics.get("auc"), int(metrics["n"]))
            moved += sum(site.bytes for site in view.sites)
            _compare(csv, parse(text, "heart.toml"), pooled, alone)
        if not keep:
            consortium.end()
        result = {
            "federated": federated.json(),
            "pooled": pooled.json(),
            "alone": {site: score.json() for site, score in alone.items()},
            "seconds": time.monotonic() - began,
            "cpu_seconds": None if keep else _cpu_seconds() - cpu,
            "bytes": moved,
            "seeds": seeds,
            "aggregation": "plain" if plain else "rostersum",
            "churn": None if plain else churn.value,
            "guarantee": guarantee or None,
        }
        if as_json:
            emit(result)
        else:
            _print(federated, pooled, alone, result)
            _print_next(consortium.folder, consortium.processes if keep else ())
    except BaseException:
        consortium.end()
        errors.print(f"The processes' logs are in {consortium.folder / 'logs'}")
        raise
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)


def _founding(seed: int) -> str:
    """What is done before a split. In each, other rows train, which makes other statistics of the same table."""
    if seed == 0:
        return "Founding the consortium, enrolling four hospitals over mutual TLS"
    return f"Founding another consortium: no site answers more than {EXACT_PLANS} different exact statistics of a table"


def _asking(text: str, churn: Churn) -> str:
    """The job under this churn rule."""
    match churn:
        case Churn.CELLS:
            return text
        case Churn.DP:
            return data.noisy(text, epsilon=_EPSILON, delta=_DELTA)
        case Churn.OPEN:
            return data.opened(text)
        case _:
            assert_never(churn)


def _guarantee(job: Job) -> str:
    """What noise promises each hospital; nothing of a job without."""
    from privacy.secure_aggregation.rostersum import plans, promise

    found = plans.foreseen(job)
    return "" if found is None else promise.statement(found)


def _data(given: Path | None) -> Path:
    with _told("Heart disease records of four hospitals (UCI, CC BY 4.0)"):
        return data.obtain(data.cache_folder(os.environ), given)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Says what is being done, and how long it took."""
    began = time.monotonic()
    with errors.status(f"{what} ..."):
        yield
    errors.print(f"[green]done[/] {what} ({time.monotonic() - began:.1f} s)")


def _cpu_seconds() -> float:
    """CPU seconds of this process and of all its children that have ended (which Windows does not tell)."""
    return sum(os.times()[:4])


class _Consortium:
    """A whole consortium in one folder: a home for the administrator, and one for each hospital."""

    def __init__(self, folder: Path, *, plain: bool, churn: Churn) -> None:
        self.folder = folder
        self._plain = plain
        self._churn = churn
        self.hub = Home(folder)
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def processes(self) -> tuple[int, ...]:
        """The running processes' ids."""
        return tuple(process.pid for process in self._processes)

    def found(self, files: dict[str, Path]) -> None:
        """Makes root, coordinator and four members, and starts their processes."""
        now = int(time.time())
        port = _free_port()
        consortium = self.hub.consortium.create(
            "heart-alliance", f"127.0.0.1:{port}", "hub", passphrase=None, now=now, organisation="heart-alliance"
        )
        request = self.hub.coordinator.request("hub", "heart-alliance", "demo")
        self.hub.coordinator.install_text(consortium.admit(request, now=now), now)
        self._start("coordinator", self.folder, "coordinator", "serve", "--listen", f"127.0.0.1:{port}")
        homes = {site: Home(self.folder / "hospitals" / site) for site in files}
        asyncio.run(self._enrol(consortium, homes))
        for site, home in homes.items():
            DataSets(home.site.folder).add(DataSet.of("heart", str(files[site])))
            (home.site.folder / "policy.toml").write_text(self._policy(site))
            if self._churn is Churn.DP:
                _set_budget(home)
            self._start(site, home.folder, "site", "run")
        if not self._plain:
            errors.print(_OWN_WORD)
        asyncio.run(self._attended(len(homes)))

    def _policy(self, site: str) -> str:
        """What this hospital's administrator says: the example's rules, and only what this demo needs beside them."""
        if self._plain:
            return policy.example(plain=True)
        rows = 0 if site == _ONE_CLASS else ROWS_OF_EACH_CLASS
        dp, opened = self._churn is Churn.DP, self._churn is Churn.OPEN
        return policy.example(dp=dp, opened=opened, rows_of_each_class=rows)

    async def _enrol(self, consortium: Consortium, homes: dict[str, Home]) -> None:
        """Each hospital makes its keys and asks; the administrator approves; each picks its membership up."""
        now = int(time.time())
        joining = []
        async with Connection.opened(line(self.hub.operator)) as operator:
            await self._pending(operator, 0)  # the coordinator answers: no hospital dials in vain, and none says so
            for site, home in homes.items():
                invitation = consortium.invite(site, site, Role.SITE, now=now)
                request = identity.make_request(invitation, home.site.begin(), "demo")
                joining.append((invitation, home, asyncio.create_task(approved(door(invitation), request))))
            requests = await self._pending(operator, len(homes))
            for request in requests:
                member = consortium.approve(request, now=now)
                await operator.operate(ApproveEnrolment(request.invitation, member.certificate, member.statement))
        for invitation, home, credential in joining:
            install(home.site, invitation, await credential)

    async def _pending(self, operator: Connection, count: int) -> tuple[EnrolmentRequest, ...]:
        """The requests of `count` newcomers, once all of them ask."""
        found: tuple[EnrolmentRequest, ...] = ()

        async def all_ask() -> bool:
            nonlocal found
            reply = await operator.operate(ListPending())
            found = reply.requests if isinstance(reply, Pending) else ()
            return len(found) == count

        await self._until(all_ask, "the hospitals' enrolment")
        return found

    async def _attended(self, count: int) -> None:
        """Returns when `count` sites attend."""
        async with Connection.opened(line(self.hub.operator)) as operator:

            async def all_here() -> bool:
                reply = await operator.operate(ListSites())
                return isinstance(reply, Sites) and sum(site.connected for site in reply.sites) == count

            await self._until(all_here, "the hospitals")

    async def _until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            for process in self._processes:
                if process.poll() is not None:
                    raise ParleyError("a process of the demo ended too early", fix=f"read {self.folder / 'logs'}")
            with suppress(UnreachableError):  # the coordinator is still starting
                if await holds():
                    return
            await asyncio.sleep(0.05)
        raise ParleyError(f"waited {_PATIENCE:.0f} s for {what}", fix=f"read {self.folder / 'logs'}")

    def _start(self, name: str, home: Path, *command: str) -> None:
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        with (logs / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "parley", *command, "--home", str(home)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C ends the demo, which then ends them in order
                )
            )

    def train(self, text: str, seed: int, seeds: int, *, live: bool) -> JobView:
        """Submits the job and returns its last view; shows it live, or a line at its end."""
        job = submit_text(self.hub.operator, text, "heart.toml")
        view = asyncio.run(self._watched(job, live=live and seeds == 1))
        if view.state is not JobState.FINISHED:
            raise ParleyError(f"job {job} {view.state.value}: {view.reason}", fix=f"read {self.folder / 'logs'}")
        if seeds > 1:
            errors.print(f"[green]done[/] split {seed + 1} of {seeds}: {view.round} rounds in {view.seconds:.1f} s")
        return view

    async def _watched(self, job: str, *, live: bool) -> JobView:
        view: JobView | None = None
        async with Connection.opened(line(self.hub.operator)) as operator:
            with screen(errors) if live else nullcontext() as show:
                async for view in operator.watch(job):
                    if show is not None:
                        show(view)
        if view is None:
            raise ParleyError(f"the coordinator showed nothing of job {job}")
        return view

    def end(self) -> None:
        """Ends the processes: the hospitals first, then the coordinator."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()


def _set_budget(home: Home) -> None:
    """This hospital's administrator lets the demo's jobs be paid: as many as the consortium trains at most."""
    with sealing(home.site.folder, home.site.load()) as held:
        budget = BudgetSet("heart", EXACT_PLANS * _EPSILON, _DELTA, None, Unit.SITE, reason="the demo")
        held.ledger.set_budget(budget)


def _compare(csv: Path, job: Job, pooled: _Score, alone: dict[str, _Score]) -> None:
    """Adds what one pooled model, and each hospital alone, reach on the same split."""
    tables = data.hospitals(csv)
    best = baselines.pooled(tables, job)
    pooled.add(best.accuracy, best.auc, best.n)
    for site, score in baselines.alone(tables, job).items():
        alone[site].add(score.everywhere.accuracy, score.everywhere.auc, score.everywhere.n)


def _print(federated: _Score, pooled: _Score, alone: dict[str, _Score], result: dict[str, object]) -> None:
    rule = "plain" if result["churn"] is None else f"churn {result['churn']}"
    table = Table("model", "accuracy", "AUC", "test rows", title=f"All four hospitals' test patients ({rule})")
    for site, score in alone.items():
        table.add_row(f"{site} alone", *score.row())
    table.add_row("federated (Parley)", *federated.row(), style="bold green")
    table.add_row("pooled in one place", *pooled.row())
    console.print(table)
    churn, guarantee = result["churn"], result["guarantee"]
    console.print(_EACH if churn is None else _SUMS[Churn(str(churn))])
    if guarantee:
        console.print(f"{guarantee} {_ONLY_SHOWN}", highlight=False)
    cpu = result["cpu_seconds"]
    spent = f", {cpu:.0f} CPU seconds" if isinstance(cpu, float) else ""
    console.print(
        f"{result['seconds']:.0f} s{spent}; {result['bytes']:,} bytes of updates and models moved, and no record."
    )


def _print_next(folder: Path, processes: tuple[int, ...]) -> None:
    if not processes:
        console.print("To look around in the running consortium:  parley demo --keep")
        return
    console.print("Coordinator and hospitals go on running. Look around:")
    for command in (
        f"export PARLEY_HOME={folder}",
        "parley job list",
        "parley model list",
        "parley dashboard",
        f"kill {' '.join(map(str, processes))}    # ends them",
    ):
        console.print(f"  {command}", highlight=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
