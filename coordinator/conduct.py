"""Performs what the run machines ask for: sends, sums, stores, calls back at deadlines. It decides nothing itself."""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar, assert_never
from weakref import WeakValueDictionary

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator import registry, sealed
from coordinator.arithmetic import Arithmetic
from coordinator.events import (
    BeginSum,
    Broken,
    CloseSums,
    Commit,
    Committed,
    Complete,
    Completed,
    Completion,
    Effect,
    Event,
    NotCommitted,
    SaveSite,
    SaveState,
    Send,
    SetDeadline,
    SiteArrived,
    SiteLeft,
    SitePaused,
    StopAsked,
    TimeUp,
)
from coordinator.evidence_log import Entry
from coordinator.intake import Intake
from coordinator.records import JobRecord, Secured, StepRecord
from coordinator.run import PAUSED, Run
from coordinator.sealed import SealedSums, Surroundings
from coordinator.store.store import Store
from coordinator.worker import Worker
from federation.audit import AuditLog
from federation.blobs import BlobRef, BlobStore
from federation.errors import LocalProtocolError, ParleyError, RemoteProtocolError, StorageError, WhoActs
from federation.job import parse
from federation.messages import (
    Availability,
    Contribution,
    FromCoordinator,
    FromSite,
    Heartbeat,
    Hello,
    JobEnded,
    JobState,
    MembershipStatement,
    RevocationList,
    RoundView,
    Sealed,
    StepKind,
    UploadOpen,
)
from federation.vector import from_safetensors
from privacy.secure_aggregation.rostersum.coordinator import Patience
from privacy.secure_aggregation.rostersum.terms import Terms

__all__ = ["Conducted", "Conductor", "Post", "rounds_of"]

log = logging.getLogger("parley.coordinator")

T = TypeVar("T")

_ENDED = 100
"""Jobs of which a site that comes back is told that they are over."""
_REASON = 1000

Post = Callable[[str, FromCoordinator], None]
"""Says something to a site by its name; lost when the site is not here."""


@dataclass(eq=False, slots=True)
class Conducted:
    """A job's run with what performs it, and who watches it."""

    run: Run
    arithmetic: Arithmetic
    blobs: BlobStore
    roster: frozenset[str]
    sealed: SealedSums | None = None
    watchers: set[asyncio.Event] = field(default_factory=set)
    deadline: asyncio.TimerHandle | None = None
    sum: asyncio.Task[None] | None = None
    saved: asyncio.Task[None] | None = None


class Conductor:
    """All jobs of this process.

    Args:
        folder: Where payloads lie: `jobs/ID/` and, while a step is collected, `spool/ID/STEP/SITE/`, or under secure
            aggregation `sealed/ID/ROUND/SITE/`.
        store: The durable memory.
        worker: The thread in which the store is used.
        post: Says something to a site.
        present: Whether a site attends.
        private: The coordinator's protocol key, which signs what it says under secure aggregation.
        audit: The coordinator's audit log; used in one thread of the conductor's.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        worker: Worker,
        post: Post,
        present: Callable[[str], bool],
        private: Ed25519PrivateKey,
        audit: AuditLog,
    ) -> None:
        self._folder = folder
        self._store = store
        self._worker = worker
        self._sums = Worker("sums")
        self._post = post
        self._present = present
        self._private = private
        self._audit = audit
        self._audits = Worker("audit log")
        self._jobs: dict[str, Conducted] = {}
        self._uploads = WeakValueDictionary[tuple[str, str], Intake]()  # of calls that still hold theirs
        self._paused: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: dict[str, tuple[frozenset[str], tuple[FromCoordinator, ...]]] = {}

    # --------------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Takes up every job that is not over. Call inside the running loop, before any site can attend."""
        shutil.rmtree(self._folder / "spool", ignore_errors=True)  # sites send again what was not committed
        for record in reversed(self._store.jobs()):  # the newest last: they are remembered longest
            try:
                secured = self._store.secured(record.id)
                if record.state.over:
                    self._remember(record, None if secured is None else Terms.decode(secured.terms))
                else:
                    self._take_up(record, rounds_of(self._store.steps(record.id)), secured)
                    log.info("job %s goes on after step %d", record.id, record.next_step - 1)
            except ParleyError as broken:  # one job that this release cannot take up holds back no other
                log.exception("job %s cannot go on", record.id)
                self._store.set_job_state(record.id, JobState.FAILED, f"cannot go on: {broken}"[:_REASON], time.time())
        self._sweep()

    async def close(self) -> None:
        """Returns when what was being summed or stored has ended; the rest is done again after a restart."""
        for conducted in self._jobs.values():
            if conducted.deadline is not None:
                conducted.deadline.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sums.close()
        self._audits.close()

    def _sweep(self) -> None:
        """Drops what a kill left behind: payloads that no job names."""
        needed = {digest.hex() for digest in self._store.referenced_blobs()}
        for path in self._folder.glob("jobs/*/*"):
            if path.name not in needed:
                path.unlink(missing_ok=True)
        for folder in self._folder.glob("jobs/*"):
            if not any(folder.iterdir()):
                folder.rmdir()
        for folder in self._folder.glob("sealed/*"):
            if folder.name not in self._jobs:
                _clear(folder)

    async def add(self, record: JobRecord, model: memoryview, terms: Terms | None = None) -> None:
        """Begins a job from an initial model, durably; `terms` are those of its secure aggregation."""
        blobs = self._blobs(record.id)
        await self._worker.do(lambda: blobs.put(model))
        secured = None if terms is None else Secured(terms.encode())
        encoded = None if secured is None else secured.terms
        await self._worker.insist("a job", lambda: self._store.add_job(record, encoded))
        conducted = self._take_up(record, (), secured)
        for site in sorted(conducted.roster):
            if self._present(site):
                self.feed(record.id, SiteArrived(site))
                if site in self._paused:
                    self.feed(record.id, SitePaused(site, paused=True))

    def _take_up(self, record: JobRecord, history: tuple[RoundView, ...], secured: Secured | None) -> Conducted:
        blobs = self._blobs(record.id)
        job = parse(record.text, record.id)
        layout, _ = from_safetensors(blobs.mapped(record.initial_model))
        arithmetic = Arithmetic(job, layout, blobs, partial(self._spool, record.id))
        if (secured is None) != (job.privacy.secure_aggregation == "plain"):
            raise LocalProtocolError(f"job {record.id} is not stored with the terms of its secure aggregation")
        sealing = None if secured is None else sealed.sealing_of(secured)
        run = Run(record, job, arithmetic.lengths, arithmetic.better, history, sealing)
        conducted = Conducted(run, arithmetic, blobs, frozenset(member.name for member in record.roster))
        if secured is not None:
            conducted.sealed = self._sealed(conducted, secured)
        self._jobs[record.id] = conducted
        return conducted

    def _sealed(self, conducted: Conducted, secured: Secured) -> SealedSums:
        """The job's secure aggregation, at work."""
        run = conducted.run
        seconds = run.job.cohort.deadline_seconds
        usual = Patience()
        patience = Patience(seconds, again=min(seconds, usual.again), upload=min(seconds, usual.upload))
        standing = f"how far the secure aggregation of job {run.id} has come"

        async def keep(content: bytes) -> None:
            await self._insist(conducted, self._worker, standing, partial(self._store.set_standing, run.id, content))

        async def record(entries: tuple[Entry, ...]) -> None:
            what = "what is said in secure aggregation, in its audit log"
            await self._insist(conducted, self._audits, what, lambda: self._audit.extend(entries, time.time()))

        def feed(event: Event) -> None:
            if run.id in self._jobs:
                self.feed(run.id, event)

        around = Surroundings(
            post=self._post,
            feed=feed,
            keep=keep,
            record=record,
            perform=partial(self._insist, conducted, self._sums, f"a sum of job {run.id}"),
            tidy=self._sums.do,
        )
        folder = self._folder / "sealed" / run.id
        summing = SealedSums(run.id, secured, self._private, patience, folder, around, run.job.cohort.needed)
        self._spawn(summing.run())
        return summing

    def _blobs(self, job: str) -> BlobStore:
        return BlobStore(self._folder / "jobs" / job)

    def _spool(self, job: str, step: int, site: str) -> BlobStore:
        """Where a site's uploads for a step lie; after a power cut they are sent again."""
        return BlobStore(self._folder / "spool" / job / str(step) / site, durable=False)

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
        self._paused.discard(site)
        for name in self._with(site):
            self.feed(name, SiteArrived(site))
        for roster, words in list(self._ended.values()):
            for message in words if site in roster else ():
                self._post(site, message)  # it may have been away when the job ended

    def left(self, site: str, *, for_good: bool = False) -> None:
        """A site went away, or was revoked."""
        self._paused.discard(site)
        for name in self._with(site):
            self.feed(name, SiteLeft(site, for_good))

    def revoked(self, revocations: RevocationList) -> None:
        """Members were revoked, whether they are here or not: no sum under secure aggregation waits for them."""
        for conducted in list(self._jobs.values()):
            for member in conducted.run.record.roster:
                if conducted.sealed is not None and member.serial in revocations.serials:
                    conducted.sealed.revoke(member.name)

    def paused(self, site: str, *, paused: bool) -> None:
        """A site's administrator has paused it, or let it go on."""
        if paused == (site in self._paused):
            return
        self._paused ^= {site}
        for name in self._with(site):
            self.feed(name, SitePaused(site, paused))

    def heard(self, site: str, message: FromSite) -> None:
        """A site said something about a job.

        Raises:
            RemoteProtocolError: It cannot be; nothing changed.
        """
        if isinstance(message, Hello | Heartbeat | Availability):
            raise RemoteProtocolError(f"site {site} says {type(message).__name__} where it should speak of a job")
        roster, words = self._ended.get(message.job, (frozenset[str](), ()))
        if site in roster:
            self._post(site, words[-1])
            return
        conducted = self.job(message.job)
        if isinstance(message, Sealed):
            self._sealed_sums(conducted, site).hear(site, message.content)
            return
        if isinstance(message, Contribution):
            self._check_uploaded(conducted.run, site, message)
        self._perform(conducted, conducted.run.hear(site, message, time.time()))

    def _sealed_sums(self, conducted: Conducted, site: str) -> SealedSums:
        if conducted.sealed is None or site not in conducted.roster:
            raise RemoteProtocolError(
                f"site {site} takes part in no secure aggregation of job {conducted.run.id}",
                fix=f"update Parley at {site} to the coordinator's release",
            )
        return conducted.sealed

    def _check_uploaded(self, run: Run, site: str, contribution: Contribution) -> None:
        """Passes a contribution whose payload is here, or that will not be counted whatever it names."""
        payload, step = contribution.payload, run.record.next_step
        awaited = contribution.step == step and run.expects(site, payload)
        if awaited and not self._spool(run.id, step, site).has(payload):
            raise RemoteProtocolError(
                f"site {site} contributed payload {payload.hex[:12]} to job {run.id} without having uploaded it",
                fix="upload a contribution before naming it",
                who=WhoActs.SITE,
            )

    def doing(self, site: str) -> tuple[str, str]:
        """What a site is doing and what holds it back, in words; both empty when no job is running with it."""
        running = (self._jobs[name].run for name in self._with(site))
        idle = ("paused", PAUSED) if site in self._paused else ("", "")
        return next((run.doing(site, time.time()) for run in running if not run.over), idle)

    def feed(self, name: str, event: Event) -> None:
        """Something happened to a job."""
        conducted = self.job(name)
        self._perform(conducted, conducted.run.receive(event, time.time()))

    async def stop(self, name: str, by: str) -> None:
        """Ends a job; its end is stored when this returns. A step that is being stored comes first."""
        conducted = self.job(name)
        changed = asyncio.Event()
        conducted.watchers.add(changed)
        self.feed(name, StopAsked(by))
        while not conducted.run.over:
            await changed.wait()
            changed.clear()
        conducted.watchers.discard(changed)
        if conducted.saved is not None:
            await asyncio.shield(conducted.saved)

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

    async def upload(
        self, member: MembershipStatement, opened: UploadOpen
    ) -> tuple[Intake | None, Callable[[int], None]]:
        """Where to put a payload that a job waits for (None: it is here already), and whom to tell of bytes.

        Raises:
            RemoteProtocolError: The job does not wait for it.
        """
        conducted = self.job(opened.job)
        run, summing, site = conducted.run, conducted.sealed, member.name
        if summing is not None:
            await summing.expect(site, opened.payload)

        def moved(count: int) -> None:
            """Counts bytes of a payload that is still waited for."""
            if not _expects(conducted, site, opened.payload):
                raise RemoteProtocolError(
                    f"job {opened.job} does not wait for {opened.payload.length} bytes of {site} now",
                    fix="wait for the next step; if this comes back, install the same release on both sides",
                    who=WhoActs.SITE,
                )
            run.moved(site, count)

        moved(0)
        key = (opened.job, site)
        older = self._uploads.pop(key, None)
        if older is not None:
            older.pause()  # the site lost that stream and continues on this one, or has another answer now
        spool = self._spool(opened.job, run.record.next_step, site) if summing is None else summing.spool(site)
        spool.drop_others([opened.payload])  # a site has one answer to a step, however many it makes up
        if spool.has(opened.payload):
            return None, moved
        self._uploads[key] = incoming = Intake(spool.receive(opened.payload))
        return incoming, moved

    def stored(self, site: str, opened: UploadOpen) -> None:
        """A payload that `upload` let in is here, whole and durable."""
        conducted = self.find(opened.job)
        if conducted is not None and conducted.sealed is not None:
            conducted.sealed.stored(site, opened.payload)

    # ------------------------------------------------------------------------------------------------------ effects

    def _perform(self, conducted: Conducted, effects: tuple[Effect, ...]) -> None:
        run = conducted.run
        for effect in effects:
            match effect:
                case Send(site, message):
                    self._post(site, message)
                case SetDeadline():
                    self._set_deadline(conducted, effect)
                case Complete():
                    conducted.sum = self._spawn(self._complete(conducted, effect))
                case BeginSum() | CloseSums():
                    _summing(conducted).perform(effect)
                case Commit(record):
                    self._spawn(self._commit(conducted, record))
                case SaveSite(site):
                    self._spawn(self._save(conducted, partial(self._store.set_job_site, run.id, site)))
                case SaveState(state, reason):
                    save = partial(self._store.set_job_state, run.id, state, reason, time.time())
                    conducted.saved = self._spawn(self._save(conducted, save))
                    _log_state(run.id, state, reason)
                    if state.over:
                        self._spawn(self._abandon(conducted, conducted.saved))
                case _:
                    assert_never(effect)
        if conducted.sealed is not None:
            conducted.sealed.seat(run.seated)
        for changed in conducted.watchers:
            changed.set()

    def _set_deadline(self, conducted: Conducted, at: SetDeadline) -> None:
        if conducted.deadline is not None:
            conducted.deadline.cancel()
        event = TimeUp(at.step, at.attempt)
        loop = asyncio.get_running_loop()
        conducted.deadline = loop.call_later(at.seconds, self.feed, conducted.run.id, event)

    async def _complete(self, conducted: Conducted, work: Complete) -> None:
        what = f"step {work.step} of job {conducted.run.id}"
        completion: Completion
        try:
            complete = partial(conducted.arithmetic.complete, work)
            if conducted.sealed is not None:
                complete = partial(complete, opened=conducted.sealed.opened)
            completion = await self._insist(conducted, self._sums, what, complete)
        except Exception as bug:  # whatever it is, the job ends in words: nobody would ever end it otherwise
            log.exception("cannot complete %s", what)
            completion = Broken(f"the coordinator failed at step {work.step} ({type(bug).__name__}: {bug})")
        self.feed(conducted.run.id, Completed(work.step, work.attempt, completion))

    async def _abandon(self, conducted: Conducted, saved: asyncio.Task[None]) -> None:
        """Lets go of the step that was under way when its job ended, and of the job once its end is stored."""
        if conducted.deadline is not None:
            conducted.deadline.cancel()
        if conducted.sum is not None:
            conducted.sum.cancel()
        for room in ("spool", "sealed"):
            await self._sums.do(partial(_clear, self._folder / room / conducted.run.id))  # after what is summed from it
        await saved
        self._retire(conducted)

    async def _commit(self, conducted: Conducted, record: StepRecord) -> None:
        run, before = conducted.run, conducted.run.record
        what = f"step {record.step} of job {run.id}"
        if record.final is not None:
            final = record.final
            card = partial(registry.card, before, run.job, record, conducted.blobs)
            text = await self._insist(conducted, self._worker, what, card)
            record = replace(record, final=replace(final, card=text))

        async def write(standing: bytes | None) -> None:
            await self._insist(conducted, self._worker, what, partial(self._store.commit_step, record, standing))

        try:
            await (write(None) if conducted.sealed is None else conducted.sealed.commit(write))
        except LocalProtocolError as bug:
            log.exception("cannot commit %s", what)
            self.feed(run.id, NotCommitted(record.step, str(bug)))
            return
        run.store(record)
        self.feed(run.id, Committed(record.step))
        if record.state.over:
            _log_state(run.id, record.state, record.reason)
            self._retire(conducted)
        await self._sums.do(partial(self._tidy, conducted, run.record, record.step))

    def _tidy(self, conducted: Conducted, after: JobRecord, step: int) -> None:
        """Drops payloads that no later step, restart or reader needs; the next step has begun meanwhile."""
        refs = (after.model, after.best_model, after.initial_model, after.strategy_state, after.preparation)
        try:
            conducted.blobs.drop_others(ref for ref in refs if ref is not None)
        except StorageError as refused:  # they go after the next step, or at the next start
            log.warning("cannot drop what job %s needs no more: %s", after.id, refused)
        spool = self._folder / "spool" / after.id
        _clear(spool if after.state.over else spool / str(step))
        if after.state.over:
            _clear(self._folder / "sealed" / after.id)

    def _retire(self, conducted: Conducted) -> None:
        """Keeps of a job that is over no more than what a site that was away must hear."""
        if conducted.deadline is not None:
            conducted.deadline.cancel()
        self._remember(conducted.run.record, None if conducted.sealed is None else conducted.sealed.terms)
        if conducted.sealed is not None:
            conducted.sealed.end()
        self._jobs.pop(conducted.run.id, None)

    def _remember(self, record: JobRecord, terms: Terms | None) -> None:
        close = () if terms is None else (sealed.farewell(record.id, terms, self._private),)
        over = JobEnded(record.id, record.state, record.reason[:_REASON])
        self._ended[record.id] = (frozenset(member.name for member in record.roster), (*close, over))
        while len(self._ended) > _ENDED:
            del self._ended[next(iter(self._ended))]

    async def _save(self, conducted: Conducted, write: Callable[[], None]) -> None:
        await self._insist(conducted, self._worker, f"the state of job {conducted.run.id}", write)

    async def _insist(self, conducted: Conducted, worker: Worker, what: str, work: Callable[[], T]) -> T:
        """What the worker's `insist` gives; meanwhile the job's view says what holds it back."""
        loop = asyncio.get_running_loop()

        def tried() -> T:
            try:
                return work()
            except StorageError as refused:
                loop.call_soon_threadsafe(_hold, conducted, f"the coordinator cannot store {what}: {_cause(refused)}")
                raise

        try:
            return await worker.insist(what, tried)
        finally:
            _hold(conducted, "")

    @contextmanager
    def taking(self, job: str) -> Iterator[None]:
        """A block that takes a payload in; what the disk refuses stands in the job's view until the step is stored."""
        try:
            yield
        except StorageError as refused:
            log.warning("cannot take an upload: %s", refused)
            if (conducted := self.find(job)) is not None:
                _hold(conducted, f"the coordinator cannot take its sites' uploads: {_cause(refused)}")
            raise

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

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


def _summing(conducted: Conducted) -> SealedSums:
    if conducted.sealed is None:
        raise LocalProtocolError(f"job {conducted.run.id} sums in plain, and was to sum under secure aggregation")
    return conducted.sealed


def _expects(conducted: Conducted, site: str, payload: BlobRef) -> bool:
    if conducted.sealed is None:
        return conducted.run.expects(site, payload)
    return conducted.sealed.expects(site, payload)


def _hold(conducted: Conducted, why: str) -> None:
    """Tells those who watch the job what holds it back; empty when nothing does any more."""
    run = conducted.run
    if run.over or run.record.reason == why:
        return
    run.record = replace(run.record, reason=why)
    for changed in conducted.watchers:
        changed.set()


def _cause(refused: StorageError) -> str:
    return f"{refused.problem} ({refused.fix})" if refused.fix else refused.problem


def _clear(folder: Path) -> None:
    """Drops what sites sent, and what they began to send."""
    shutil.rmtree(folder, ignore_errors=True)


def _log_state(job: str, state: JobState, reason: str) -> None:
    log.info("job %s %s%s", job, state.value, f": {reason}" if reason else "")
