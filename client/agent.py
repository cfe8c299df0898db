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
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Protocol, assert_never

from client.backoff import Backoff
from client.connection import Connection, Line
from client.journal import Journal
from client.pause import paused
from client.policy import Policy
from client.session import (
    CheckData,
    Connected,
    DataChecked,
    Disconnect,
    Disconnected,
    Effect,
    Event,
    Fetch,
    Fetched,
    Forget,
    Keep,
    KeepRevocations,
    Note,
    Paused,
    Received,
    Remembered,
    Send,
    Session,
    SiteIdentity,
    Upload,
    Uploaded,
    Work,
    Worked,
    WorkFailed,
)
from client.training import protocol
from client.training.trainer import Trainer
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
from strategies import strategy

__all__ = ["Agent", "Works"]

log = logging.getLogger("parley.site")

_HEARTBEAT_SECONDS = 5.0
_SILENCE_SECONDS = 20.0
_PAUSE_SECONDS = 1.0
"""How often the agent looks whether its administrator has paused the site."""
_PATIENCE = 3.0
"""Work that has taken so many of its job's deadlines is given up: nobody waits for it, and its trainer may hang."""
_PATIENT_SECONDS = 300.0
"""No work is given up sooner: a trainer's start alone may take long on an old machine."""
_GRACE_SECONDS = 2.0 * _HEARTBEAT_SECONDS


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
    """

    def __init__(
        self,
        folder: Path,
        line: Line,
        me: SiteIdentity,
        read_policy: Callable[[], Policy],
        keep_revocations: Callable[[RevocationList], None],
        worker: Works | None = None,
    ) -> None:
        self._folder = folder
        self._work = folder / "work"
        self._line = line
        self._me = me
        self._read_policy = read_policy
        self._keep_revocations = keep_revocations
        self._journal = Journal(folder / "journal")
        self._session = Session(me)
        self._trainer = worker or Trainer(folder)
        self._outgoing: asyncio.Queue[FromSite | None] = asyncio.Queue()
        self._connection: Connection
        self._doing: asyncio.Task[None] | None = None
        self._training = False
        self._warming: asyncio.Task[None] | None = None
        self._ended: ParleyError | None = None

    async def run(self) -> None:
        """Attends until cancelled; comes back by itself after every cut, after a jittered wait.

        Raises:
            ParleyError: Whom we reached is not our coordinator, or it does not accept us: somebody must act.
        """
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
            if self._doing is not None:
                self._doing.cancel()
            await self._trainer.close()

    def _recall(self) -> None:
        """Takes up results that were not counted when this site was last ended; other leftovers go."""
        kept = [each for each in self._journal.remembered() if self._blobs(each.offer.job).has(each.result.payload)]
        self._session = Session(self._me, tuple(kept))
        jobs = {each.offer.job for each in kept}
        for folder in self._work.glob("*"):
            if folder.name not in jobs:
                shutil.rmtree(folder, ignore_errors=True)
                self._journal.forget(folder.name)
        for each in kept:  # a download may be damaged where its length is right: it does not outlive a power cut
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
        """Tells the session whether the site's administrator has paused it: now, and every second."""
        while True:
            self._feed(Paused(paused(self._folder)))
            await asyncio.sleep(_PAUSE_SECONDS)

    # ----------------------------------------------------------------------------------------------------- effects

    def _feed(self, event: Event) -> None:
        for effect in self._session.receive(event, time.time()):
            self._perform(effect)

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
                assert_never(effect)

    def _do(self, work: Awaitable[Event], subject: JobOffer | StepStart, *, training: bool = False) -> None:
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
        return BlobStore(self._work / job)

    async def _check(self, offer: JobOffer) -> Event:
        answer = await self._trainer.ask(protocol.CheckData(self._subject(offer)))
        match answer:
            case protocol.Done(findings=findings):
                if not any(each.level == "refusal" for each in findings):
                    self._warming = asyncio.create_task(self._warm())
                return DataChecked(offer.job, findings)
            case protocol.Failed(cause, problem):
                return WorkFailed(offer, DeclineCause(cause), problem)
            case _:
                assert_never(answer)

    async def _fetch(self, step: StepStart) -> Event:
        blobs = BlobStore(self._work / step.job, durable=False)  # a large model's fsync would keep the stream waiting
        wanted = [ref for ref in (step.model, step.preparation) if ref is not None]
        blobs.drop_others(wanted)
        for ref in wanted:
            await self._persist(partial(Connection.download, ref=ref, blobs=blobs))
        return Fetched(step)

    async def _upload(self, step: StepStart, payload: BlobRef) -> Event:
        await self._persist(partial(Connection.upload, job=step.job, ref=payload, blobs=self._blobs(step.job)))
        return Uploaded(step)

    async def _persist(self, transfer: Callable[[Connection], Awaitable[None]]) -> None:
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
        limit = max(_PATIENT_SECONDS, _PATIENCE * parse(offer.text, offer.job).cohort.deadline_seconds)
        try:
            async with asyncio.timeout(limit):  # ends the trainer; the next work starts another
                answer = await self._trainer.ask(self._request(step, offer, blobs, result))
        except TimeoutError:
            problem = f"step {step.step} was given up, and its trainer ended, after {limit:.0f} s"
            return WorkFailed(step, DeclineCause.RESOURCES, problem)
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

    async def _warm(self) -> None:
        """Loads torch while the other sites are still checking their data."""
        with contextlib.suppress(ParleyError):  # the first step will tell
            await self._trainer.ask(protocol.Warm())

    def _subject(self, offer: JobOffer) -> protocol.Subject:
        return protocol.Subject(offer.text, parse(offer.text, offer.job).data.dataset, str(self._folder))

    def _request(self, step: StepStart, offer: JobOffer, blobs: BlobStore, result: Path) -> protocol.Request:
        subject = self._subject(offer)
        if step.kind is StepKind.STATISTICS:
            return protocol.ComputeStatistics(subject, str(result))
        if step.model is None or step.preparation is None:
            raise LocalProtocolError(f"step {step.step} of job {step.job} came without its payloads")
        model, preparation = str(blobs.path(step.model)), str(blobs.path(step.preparation))
        if step.kind is StepKind.EVALUATE:
            return protocol.Evaluate(subject, model, preparation, str(result))
        settings = parse(offer.text, offer.job).strategy
        return protocol.Train(
            subject,
            self._me.statement.name,
            step.round,
            model,
            preparation,
            str(result),
            proximal=strategy.load(settings).local.proximal,
        )


def _named(file: Path) -> BlobRef:
    """The name of a file's content, which is durable from now on."""
    with file.open("rb+") as content:
        digest = hashlib.file_digest(content, "sha256")
        os.fsync(content.fileno())
    return BlobRef(digest.digest(), file.stat().st_size)


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the agent failed at its work", exc_info=error)
