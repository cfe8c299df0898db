"""The site's agent: attends, performs what the session asks for, and comes back by itself when cut off."""

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Protocol, assert_never

from client import drift, resumption
from client.backoff import Backoff
from client.connection import Connection, Line
from client.journal import Journal
from client.pause import paused
from client.policy import Policy
from client.sealed import SealedJobs
from client.session import Session
from client.session_events import (
    Assigned,
    CheckData,
    Connected,
    Contribute,
    DataChecked,
    Disconnect,
    Disconnected,
    Effect,
    Event,
    Fetch,
    Fetched,
    Forget,
    Held,
    JobResumed,
    Keep,
    KeepRevocations,
    Note,
    Paused,
    Received,
    Record,
    Remembered,
    Send,
    SiteIdentity,
    TableFacts,
    Upload,
    Uploaded,
    Work,
    Worked,
    WorkFailed,
)
from client.summing import Performed, Sealing, Summing, Transfer
from client.training import protocol
from client.training.trainer import Trainer
from federation import heap
from federation.blobs import BlobRef, BlobStore
from federation.errors import (
    IdentityError,
    LocalProtocolError,
    ParleyError,
    StorageError,
    UnreachableError,
    WhoActs,
)
from federation.job import parse
from federation.messages import DeclineCause, FromSite, Heartbeat, JobOffer, RevocationList, StepKind, StepStart
from privacy.secure_aggregation.rostersum import site_events as sums
from privacy.secure_aggregation.rostersum.encoding import DeclineError
from strategies import strategy

__all__ = ["Agent", "Works"]

log = logging.getLogger("parley.site")

_job = lru_cache(maxsize=16)(parse)
"""A job's text takes milliseconds to read, and is asked about in every step."""

_HEARTBEAT_SECONDS = 5.0
_SILENCE_SECONDS = 20.0
_PAUSE_SECONDS = 1.0
"""How often the agent looks whether its administrator has paused the site."""
_PATIENCE = 3.0
"""Work that has taken so many of its job's deadlines is given up: nobody waits for it, and its trainer may hang."""
_PATIENT_SECONDS = 300.0
"""No work is given up sooner: a trainer's start alone may take long on an old machine."""
_GRACE_SECONDS = 2.0 * _HEARTBEAT_SECONDS
_LEAST_WAIT = 0.01
"""Seconds until the session is called about time again, however late it is already."""


class Works(Protocol):
    """Does the site's work: the trainer, or a benchmark's stand-in for it."""

    async def ask(self, request: protocol.Request) -> protocol.Answer:
        """The answer to `request`; requests wait for one another."""
        ...

    async def close(self) -> None:
        """Ends what it runs once the request that is being answered is done."""
        ...


class Agent:
    """A site's agent.

    Args:
        folder: The site's home; payloads and results lie in `work/` below it.
        line: How to reach the coordinator.
        me: Who this site is.
        read_policy: Reads the site's policy as its file states it now.
        keep_revocations: Stores a newer revocation list.
        worker: Does the work; the trainer, a child process, when none is given.
        sealing: What it takes part in jobs under secure aggregation with; without it, it refuses them.
    """

    def __init__(
        self,
        folder: Path,
        line: Line,
        me: SiteIdentity,
        read_policy: Callable[[], Policy],
        keep_revocations: Callable[[RevocationList], None],
        worker: Works | None = None,
        sealing: Sealing | None = None,
    ) -> None:
        self._folder = folder
        self._work = folder / "work"
        self._line = line
        self._me = me
        self._read_policy = read_policy
        self._keep_revocations = keep_revocations
        self._journal = Journal(folder / "journal")
        self._sealing = sealing
        self._summing: Summing | None = None
        self._session = Session(me)
        self._trainer = worker or Trainer(folder)
        self._outgoing: asyncio.Queue[FromSite | None] = asyncio.Queue()
        self._connection: Connection
        self._doing: asyncio.Task[None] | None = None
        self._training = False
        self._warming: asyncio.Task[None] | None = None
        self._ended: ParleyError | None = None
        self._running: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Attends until cancelled; comes back by itself after every cut, after a jittered wait.

        Raises:
            ParleyError: Whom we reached is not our coordinator, or it does not accept us, or this machine does not
                keep what must be durable: somebody must act.
        """
        self._running = asyncio.current_task()
        heap.set_up()
        try:
            await self._attend_again_and_again()
        except asyncio.CancelledError:
            if self._ended is not None:
                raise self._ended from None
            raise

    async def _attend_again_and_again(self) -> None:
        backoff = Backoff()
        self._recall()
        pauses = asyncio.create_task(self._watch_pauses())
        try:
            while True:
                # a new channel each time: the old one may go on talking to a connection that is dead and not closed
                async with Connection.opened(self._line) as connection:
                    self._connection = connection
                    try:
                        await self._attend(connection, backoff)
                    except IdentityError:
                        raise
                    except ParleyError as cut:
                        log.warning("%s", cut)
                if self._ended is not None:
                    raise self._ended
                seconds = backoff.seconds()
                log.info("dialling again in %.1f s", seconds)
                await asyncio.sleep(seconds)
        finally:
            pauses.cancel()
            if self._alarm is not None:
                self._alarm.cancel()
            if self._doing is not None:
                self._doing.cancel()
            await self._trainer.close()
            if self._summing is not None:
                await self._summing.close()

    def _recall(self) -> None:
        """Takes up results that were not counted when this site was last ended; other leftovers go."""
        kept = [each for each in self._journal.remembered() if self._blobs(each.offer.job).intact(each.result.payload)]
        sealed = None
        if self._sealing is not None:
            sealed = SealedJobs(self._sealing.key, self._sealing.vault.durable, self._sealing.ledger)
            self._summing = Summing(self._folder / "updates", self._sealing, self._feed, self._persist)
        self._session = Session(self._me, tuple(kept), sealed)
        jobs = {each.offer.job for each in kept}
        for folder in self._work.glob("*"):
            if folder.name not in jobs:
                shutil.rmtree(folder, ignore_errors=True)
                self._journal.forget(folder.name)
        for each in kept:  # a download may be damaged where its length is right
            self._blobs(each.offer.job).drop_others([each.result.payload])

    async def _attend(self, connection: Connection, backoff: Backoff) -> None:
        self._outgoing = asyncio.Queue()
        self._feed(Connected(secrets.token_bytes(32), metadata.version("parley-fl")))
        beat = asyncio.create_task(self._beat())
        try:
            async with contextlib.aclosing(connection.attend(self._said())) as messages:
                while self._ended is None:
                    async with asyncio.timeout(_SILENCE_SECONDS):
                        message = await anext(messages)
                    self._feed(Received(message, self._read_policy()))
                    if self._session.attending:
                        backoff.reset()
        except StopAsyncIteration:
            raise UnreachableError("the coordinator ended the stream") from None
        except TimeoutError:
            raise UnreachableError(f"nothing heard from the coordinator for {_SILENCE_SECONDS:.0f} s") from None
        finally:
            beat.cancel()
            self._outgoing.put_nowait(None)  # gRPC would wait for our next word for ever, even on a call that has ended
            self._feed(Disconnected())

    async def _said(self) -> AsyncIterator[FromSite]:
        outgoing = self._outgoing
        while (message := await outgoing.get()) is not None:
            yield message

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            self._outgoing.put_nowait(Heartbeat())

    async def _watch_pauses(self) -> None:
        """Tells the session whether its administrator has paused it, or lets a job go on: now, and every second."""
        while True:
            self._feed(Paused(paused(self._folder)))
            for job in resumption.taken(self._folder, self._session.knows):
                self._feed(JobResumed(job))
            await asyncio.sleep(_PAUSE_SECONDS)

    # ----------------------------------------------------------------------------------------------------- effects

    def _feed(self, event: Event) -> None:
        if self._ended is not None:
            return
        try:
            for effect in self._session.receive(event, time.time(), time.monotonic()):
                self._perform(effect)
        except _UnkeptError as unkept:
            self._ended = unkept.reason
            if self._running is not None:
                self._running.cancel()
            return
        self._set_alarm()

    def _sum(self, effect: Performed) -> None:
        """Performs what secure aggregation wants; if it cannot be kept the machines are ahead of the disk: we end."""
        if self._summing is None:
            return  # nothing is asked for where no job under secure aggregation is accepted
        try:
            self._summing.perform(effect)
        except ParleyError as refused:
            if isinstance(effect, sums.Persist | Record):
                raise _UnkeptError(refused) from refused
            log.warning("%s", refused)

    def _set_alarm(self) -> None:
        """Calls the session when time itself changes something."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        at = self._session.wake_at(time.time(), time.monotonic())
        if at is not None:
            wait = max(_LEAST_WAIT, at - time.monotonic())
            self._alarm = asyncio.get_running_loop().call_later(wait, self._feed, sums.TimePassed())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self._outgoing.put_nowait(message)
            case CheckData(offer):
                self._do(self._check(offer), offer, training=True)
            case Fetch(step):
                self._do(self._fetch(step), step)
            case Work(step, offer):
                self._do(self._train(step, offer), step, training=True)
            case Contribute(assigned, offer, declared):
                self._do(self._contribute(assigned, offer, declared), assigned, training=True)
            case Upload(step, payload):
                self._do(self._upload(step, payload), step)
            case Keep(remembered):
                self._keep(remembered)
            case Forget(job):
                self._forget(job)
            case KeepRevocations(revocations):
                self._keep_revocations(revocations)
            case Disconnect(reason):
                self._ended = reason
            case Note(text, trouble):
                log.log(logging.WARNING if trouble else logging.INFO, "%s", text)
            case _:
                self._sum(effect)  # mypy holds that these are all that is left

    def _do(self, work: Awaitable[Event], subject: JobOffer | StepStart | Assigned, *, training: bool = False) -> None:
        """Does one piece of work beside the stream; the session never asks for two at once."""

        async def done() -> None:
            try:
                event = await work
            except StorageError as failed:
                event = WorkFailed(subject, DeclineCause.RESOURCES, str(failed))
            except ParleyError as failed:
                event = WorkFailed(subject, DeclineCause.INTERNAL, str(failed))
            except OSError as failed:
                event = WorkFailed(subject, DeclineCause.RESOURCES, f"this machine's disk refused: {failed}")
            except Exception as bug:  # whatever it is: the coordinator must hear that nothing will come
                log.exception("the agent failed at its work")
                event = WorkFailed(subject, DeclineCause.INTERNAL, f"the agent failed: {type(bug).__name__}")
            if asyncio.current_task() is self._doing:
                self._doing = None
            self._feed(event)

        self._training = training
        self._doing = asyncio.create_task(done())
        self._doing.add_done_callback(_tell)

    def _keep(self, remembered: Remembered) -> None:
        try:
            self._journal.keep(remembered)
        except StorageError as full:  # a kill from now on costs this step's work, and nothing else
            log.warning("the journal does not take a result: %s", full)

    def _forget(self, job: str) -> None:
        if job:
            self._journal.forget(job)
            shutil.rmtree(self._work / job, ignore_errors=True)
        elif self._doing is not None:
            if self._training:  # cancelling ends the trainer, whose next start costs seconds: short work may end
                asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._doing.cancel)
            else:
                self._doing.cancel()
            self._doing = None

    def _blobs(self, job: str) -> BlobStore:
        """Where a job's payloads lie: a kill spares them, and what a power cut damages is fetched or done again."""
        return BlobStore(self._work / job, durable=False)  # a large model's fsync would keep the round waiting

    async def _check(self, offer: JobOffer) -> Event:
        answer = await self._trainer.ask(protocol.CheckData(self._subject(offer)))
        match answer:
            case protocol.Done(findings=findings, table=table):
                if not any(each.level == "refusal" for each in findings):
                    self._warming = asyncio.create_task(self._warm())
                return DataChecked(offer.job, findings, None if table is None else _facts(table))
            case protocol.Failed(cause, problem):
                return WorkFailed(offer, DeclineCause(cause), problem)
            case _:
                assert_never(answer)

    async def _fetch(self, work: StepStart | Assigned) -> Event:
        step = work.step if isinstance(work, Assigned) else work
        limit = work.work.drift if isinstance(work, Assigned) else None
        blobs = self._blobs(step.job)
        wanted = [ref for ref in (step.model, step.preparation) if ref is not None]
        blobs.drop_others(wanted if limit is None else [*wanted, BlobRef(limit.model_hash, 0)])
        for ref in wanted:
            await self._persist(partial(Connection.download, ref=ref, blobs=blobs))
        if isinstance(work, Assigned) and limit is not None and step.model is not None:
            earlier = blobs.folder / limit.model_hash.hex()
            moved = await asyncio.to_thread(drift.farthest, blobs.path(step.model), earlier)
            if moved > limit.most:
                return sums.Drifted(work.work.job_hash, work.work.assignment)
        return Fetched(work)

    async def _upload(self, step: StepStart, payload: BlobRef) -> Event:
        await self._persist(partial(Connection.upload, job=step.job, ref=payload, blobs=self._blobs(step.job)))
        return Uploaded(step)

    async def _persist(self, transfer: Transfer) -> None:
        """Makes a transfer, from where it was cut off, until it is made."""
        backoff = Backoff(first=0.2, longest=10.0)
        while True:
            try:
                await transfer(self._connection)
            except (UnreachableError, StorageError) as cut:
                if isinstance(cut, StorageError) and cut.who is not WhoActs.COORDINATOR:
                    raise  # this machine's disk; the coordinator's has room again when its operator has seen to it
                seconds = backoff.seconds()
                log.info("a transfer was cut off (%s); it goes on in %.1f s", cut.problem, seconds)
                await asyncio.sleep(seconds)
            else:
                return

    async def _train(self, step: StepStart, offer: JobOffer) -> Event:
        blobs = self._blobs(step.job)
        result = blobs.folder / f"step-{step.step}.result"
        answer = await self._worked_out(step, offer, result)
        match answer:
            case protocol.Done(weight=weight, seconds=seconds):
                ref = await asyncio.to_thread(_named, result)
                if ref.length != step.length:
                    problem = f"its result has {ref.length} bytes where the coordinator takes {step.length}"
                    return WorkFailed(step, DeclineCause.INTERNAL, problem)
                blobs.adopt(result, ref)
                return Worked(step, ref, weight, seconds)
            case protocol.Failed(cause, problem):
                return WorkFailed(step, DeclineCause(cause), problem)
            case _:
                assert_never(answer)

    async def _contribute(self, assigned: Assigned, offer: JobOffer, declared: int) -> Event:
        """Does the work and holds its result; what is let go meanwhile leaves nothing of it."""
        if self._summing is None:
            raise LocalProtocolError("work under secure aggregation was begun without what it takes")
        held = self._summing.contributions
        try:
            answer = await self._worked_out(assigned.step, offer, held.result(assigned.update))
            match answer:
                case protocol.Done(weight=rows, table=table) if table is not None:
                    await self._summing.hold(assigned, rows=int(rows), declared=declared)
                    return Held(assigned, bytes.fromhex(table.digest))
                case protocol.Done():
                    held.erase(assigned.update)
                    return WorkFailed(assigned, DeclineCause.INTERNAL, "the trainer did not say which table it read")
                case protocol.Failed(cause, problem):
                    held.erase(assigned.update)
                    return WorkFailed(assigned, DeclineCause(cause), problem)
                case _:
                    assert_never(answer)
        except DeclineError as declined:
            return WorkFailed(assigned, DeclineCause.DATA, str(declined))
        except BaseException:
            held.erase(assigned.update)
            raise

    async def _worked_out(self, step: StepStart, offer: JobOffer, result: Path) -> protocol.Answer:
        """The trainer's answer; it is ended if it takes too long, and the next work starts another."""
        limit = max(_PATIENT_SECONDS, _PATIENCE * _job(offer.text, offer.job).cohort.deadline_seconds)
        try:
            async with asyncio.timeout(limit):
                return await self._trainer.ask(self._request(step, offer, self._blobs(step.job), result))
        except TimeoutError:
            problem = f"step {step.step} was given up, and its trainer ended, after {limit:.0f} s"
            return protocol.Failed("resources", problem)

    async def _warm(self) -> None:
        """Loads torch while the other sites are still checking their data."""
        with contextlib.suppress(ParleyError):  # the first step will tell
            await self._trainer.ask(protocol.Warm())

    def _subject(self, offer: JobOffer) -> protocol.Subject:
        return protocol.Subject(offer.text, _job(offer.text, offer.job).data.dataset, str(self._folder))

    def _request(self, step: StepStart, offer: JobOffer, blobs: BlobStore, result: Path) -> protocol.Request:
        subject = self._subject(offer)
        if step.kind is StepKind.STATISTICS:
            return protocol.ComputeStatistics(subject, str(result))
        if step.model is None or step.preparation is None:
            raise LocalProtocolError(f"step {step.step} of job {step.job} came without its payloads")
        model, preparation = str(blobs.path(step.model)), str(blobs.path(step.preparation))
        if step.kind is StepKind.EVALUATE:
            return protocol.Evaluate(subject, model, preparation, str(result))
        settings = _job(offer.text, offer.job).strategy
        return protocol.Train(
            subject,
            self._me.statement.name,
            step.round,
            model,
            preparation,
            str(result),
            proximal=strategy.load(settings).local.proximal,
        )


class _UnkeptError(Exception):
    """What must be durable before anything follows is not."""

    def __init__(self, reason: ParleyError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _facts(table: protocol.Table) -> TableFacts:
    return TableFacts(bytes.fromhex(table.digest), table.rows, table.test_rows, table.rarest)


def _named(file: Path) -> BlobRef:
    """The name of a file's content."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256")
        return BlobRef(digest.digest(), os.fstat(content.fileno()).st_size)


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the agent failed at its work", exc_info=error)
