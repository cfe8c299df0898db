"""Performs what the run machines ask for: sends, sums, stores, calls back at deadlines. It decides nothing itself."""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import assert_never

from coordinator import registry
from coordinator.arithmetic import Arithmetic
from coordinator.records import JobRecord, StepRecord
from coordinator.run import (
    Commit,
    Committed,
    Complete,
    Completed,
    Effect,
    Event,
    Run,
    SaveSite,
    SaveState,
    Send,
    SetDeadline,
    SiteArrived,
    SiteLeft,
    TimeUp,
)
from coordinator.store.store import Store
from coordinator.worker import Worker
from federation.blobs import BlobRef, BlobStore, Incoming
from federation.errors import RemoteProtocolError, WhoActs
from federation.job import parse
from federation.messages import (
    FromCoordinator,
    FromSite,
    Heartbeat,
    Hello,
    JobState,
    MembershipStatement,
    RoundView,
    StepKind,
    UploadOpen,
)
from federation.vector import from_safetensors

__all__ = ["Conducted", "Conductor", "Post", "rounds_of"]

log = logging.getLogger("parley.coordinator")

Post = Callable[[str, FromCoordinator], None]
"""Says something to a site by its name; lost when the site is not here."""


@dataclass(eq=False, slots=True)
class Conducted:
    """A job's run with what performs it, and who watches it."""

    run: Run
    arithmetic: Arithmetic
    blobs: BlobStore
    roster: frozenset[str]
    watchers: set[asyncio.Event] = field(default_factory=set)
    deadline: asyncio.TimerHandle | None = None
    summed: Complete | None = None


class Conductor:
    """All jobs of this process.

    Args:
        folder: Where payloads lie: `jobs/ID/` and, while a step is collected, `spool/SITE/`.
        store: The durable memory.
        worker: The thread in which the store is used.
        post: Says something to a site.
        present: Whether a site attends.
    """

    def __init__(self, folder: Path, store: Store, worker: Worker, post: Post, present: Callable[[str], bool]) -> None:
        self._folder = folder
        self._store = store
        self._worker = worker
        self._sums = Worker("sums")
        self._post = post
        self._present = present
        self._jobs: dict[str, Conducted] = {}
        self._uploads: dict[tuple[str, bytes], Incoming] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --------------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Takes up every job that is not over. Call inside the running loop, before any site can attend."""
        shutil.rmtree(self._folder / "spool", ignore_errors=True)  # sites send again what was not committed
        for record in self._store.jobs():
            if not record.state.over:
                self._take_up(record, rounds_of(self._store.steps(record.id)))
                log.info("job %s goes on after step %d", record.id, record.next_step - 1)

    async def close(self) -> None:
        """Returns when what was being summed or stored has ended; the rest is done again after a restart."""
        for conducted in self._jobs.values():
            if conducted.deadline is not None:
                conducted.deadline.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sums.close()

    async def add(self, record: JobRecord, model: Path) -> None:
        """Begins a job, durably; `model` is the file of its initial model."""
        blobs = self._blobs(record.id)
        await self._worker.do(lambda: blobs.put(model.read_bytes()))
        await self._worker.do(lambda: self._store.add_job(record))
        conducted = self._take_up(record, ())
        for site in sorted(conducted.roster):
            if self._present(site):
                self.feed(record.id, SiteArrived(site))

    def _take_up(self, record: JobRecord, history: tuple[RoundView, ...]) -> Conducted:
        blobs = self._blobs(record.id)
        job = parse(record.text, record.id)
        layout, _ = from_safetensors(blobs.get(record.initial_model))
        arithmetic = Arithmetic(job, layout, blobs, self._spool)
        run = Run(record, job, arithmetic.lengths, history)
        conducted = Conducted(run, arithmetic, blobs, frozenset(member.name for member in record.roster))
        self._jobs[record.id] = conducted
        return conducted

    def _blobs(self, job: str) -> BlobStore:
        return BlobStore(self._folder / "jobs" / job)

    def _spool(self, site: str) -> BlobStore:
        return BlobStore(self._folder / "spool" / site)

    # --------------------------------------------------------------------------------------------- what happens

    def job(self, name: str) -> Conducted:
        """A job of this process.

        Raises:
            RemoteProtocolError: There is none of that id.
        """
        if name not in self._jobs:
            raise RemoteProtocolError(f"there is no running job {name!r}", fix="see: parley job list", who=WhoActs.YOU)
        return self._jobs[name]

    def find(self, name: str) -> Conducted | None:
        """A job of this process, if it is one."""
        return self._jobs.get(name)

    def arrived(self, site: str) -> None:
        """A site attends: every job that has it in its roster hears of it."""
        for name in self._with(site):
            self.feed(name, SiteArrived(site))

    def left(self, site: str) -> None:
        """A site went away."""
        for name in self._with(site):
            self.feed(name, SiteLeft(site))

    def heard(self, site: str, message: FromSite) -> None:
        """A site said something about a job.

        Raises:
            RemoteProtocolError: It cannot be; nothing changed.
        """
        if isinstance(message, Hello | Heartbeat):
            raise RemoteProtocolError(f"site {site} says {type(message).__name__} where it should speak of a job")
        conducted = self.job(message.job)
        self._perform(conducted, conducted.run.hear(site, message, time.time()))

    def doing(self, site: str) -> str:
        """What a site is doing, in words; empty when no job is running with it."""
        running = (self._jobs[name].run for name in self._with(site) if not self._jobs[name].run.over)
        return next((run.doing(site) for run in running), "")

    def feed(self, name: str, event: Event) -> None:
        """Something happened to a job."""
        conducted = self.job(name)
        self._perform(conducted, conducted.run.receive(event, time.time()))

    def _with(self, site: str) -> tuple[str, ...]:
        return tuple(name for name, conducted in self._jobs.items() if site in conducted.roster)

    # ----------------------------------------------------------------------------------------------------- payloads

    def download(self, member: MembershipStatement, payload: BlobRef) -> tuple[BlobStore, Callable[[int], None]]:
        """The folder of a payload that a running job offers to this site, and whom to tell of bytes sent.

        Raises:
            RemoteProtocolError: No job offers it to this site.
        """
        for name in self._with(member.name):
            conducted = self._jobs[name]
            if conducted.run.offers(payload) and member in conducted.run.record.roster:
                return conducted.blobs, partial(conducted.run.moved, member.name)
        raise RemoteProtocolError(
            f"payload {payload.hex[:12]} is not offered to {member.name}",
            fix="ask for the payload that the step names",
            who=WhoActs.SITE,
        )

    def upload(self, member: MembershipStatement, opened: UploadOpen) -> tuple[Incoming | None, Callable[[int], None]]:
        """Where to put a payload that a job waits for (None: it is here already), and whom to tell of bytes.

        Raises:
            RemoteProtocolError: The job does not wait for it.
        """
        run = self.job(opened.job).run
        if not run.expects(member.name, opened.payload):
            raise RemoteProtocolError(
                f"job {opened.job} does not wait for {opened.payload.length} bytes of {member.name} now",
                fix="wait for the next step; if this comes back, install the same release on both sides",
                who=WhoActs.SITE,
            )
        key = (member.name, opened.payload.digest)
        older = self._uploads.pop(key, None)
        if older is not None:
            older.pause()  # the site lost that stream and continues on this one
        spool = self._spool(member.name)
        if spool.has(opened.payload):
            return None, partial(run.moved, member.name)
        self._uploads[key] = incoming = spool.receive(opened.payload)
        return incoming, partial(run.moved, member.name)

    # ------------------------------------------------------------------------------------------------------ effects

    def _perform(self, conducted: Conducted, effects: tuple[Effect, ...]) -> None:
        run = conducted.run
        for effect in effects:
            match effect:
                case Send(site, message):
                    self._post(site, message)
                case SetDeadline(step, attempt, seconds):
                    if conducted.deadline is not None:
                        conducted.deadline.cancel()
                    event = TimeUp(step, attempt)
                    conducted.deadline = asyncio.get_running_loop().call_later(seconds, self.feed, run.id, event)
                case Complete():
                    self._spawn(self._complete(conducted, effect))
                case Commit(record):
                    self._spawn(self._commit(conducted, record))
                case SaveSite(site):
                    self._spawn(self._save(partial(self._store.set_job_site, run.id, site)))
                case SaveState(state, reason):
                    self._spawn(self._save(partial(self._store.set_job_state, run.id, state, reason, time.time())))
                    _log_state(run.id, state, reason)
                case _:
                    assert_never(effect)
        for changed in conducted.watchers:
            changed.set()

    async def _complete(self, conducted: Conducted, work: Complete) -> None:
        conducted.summed = work
        what = f"step {work.step} of job {conducted.run.id}"
        completion = await self._sums.insist(what, lambda: conducted.arithmetic.complete(work))
        self.feed(conducted.run.id, Completed(work.step, work.attempt, completion))

    async def _commit(self, conducted: Conducted, record: StepRecord) -> None:
        run, before = conducted.run, conducted.run.record
        what = f"step {record.step} of job {run.id}"
        if record.final is not None:
            final = record.final
            text = await self._worker.insist(what, lambda: registry.card(before, run.job, record, conducted.blobs))
            record = replace(record, final=replace(final, card=text))
        await self._worker.insist(what, lambda: self._store.commit_step(record))
        if run.over:
            return  # stopped while the step was being stored: the step counts, and the job stays stopped
        run.store(record)
        self._tidy(conducted, before)
        self.feed(run.id, Committed(record.step))
        if record.state.over:
            _log_state(run.id, record.state, record.reason)

    def _tidy(self, conducted: Conducted, before: JobRecord) -> None:
        """Drops payloads that no later step, restart or reader needs."""
        after = conducted.run.record
        needed = {after.model, after.best_model, after.initial_model, after.strategy_state, after.preparation}
        for ref in {before.model, before.best_model, before.strategy_state} - needed:
            if ref is not None:
                conducted.blobs.drop(ref)
        if conducted.summed is not None:
            for each in conducted.summed.contributions:
                self._spool(each.site).drop(each.payload)
            conducted.summed = None

    async def _save(self, write: Callable[[], None]) -> None:
        await self._worker.insist("a job's state", write)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the coordinator failed", exc_info=error)


def rounds_of(steps: tuple[StepRecord, ...]) -> tuple[RoundView, ...]:
    """Committed steps as the rounds that people see."""
    views: dict[int, RoundView] = {}
    for step in steps:
        if step.kind is not StepKind.STATISTICS:
            views[step.round] = step.shown(views.get(step.round))
    return tuple(views[number] for number in sorted(views))


def _log_state(job: str, state: JobState, reason: str) -> None:
    log.info("job %s %s%s", job, state.value, f": {reason}" if reason else "")
