"""A site's end of the protocol under secure aggregation: its real machine behind a bare stream, its work prepared."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from client.masking import Contributions
from federation.blobs import BlobRef
from federation.errors import ParleyError
from federation.job import digest
from federation.messages import JobAccepted, JobOffer, Sealed, StepStart, Welcome
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.durable import Durable
from privacy.secure_aggregation.rostersum.floor import Data
from privacy.secure_aggregation.rostersum.messages import Upload
from privacy.secure_aggregation.rostersum.site import Site as Machine
from privacy.secure_aggregation.rostersum.site_events import (
    Abandon,
    Because,
    Cannot,
    Clock,
    Connected,
    Erase,
    Mask,
    Masked,
    Offered,
    Persist,
    Received,
    Send,
    Updated,
    UploadDone,
    UploadPayload,
    Work,
)
from privacy.secure_aggregation.rostersum.terms import Terms
from simulations.loopback import floor_for
from tests.consortium import Site

if TYPE_CHECKING:
    from collections.abc import Callable

    from client.connection import Connection
    from federation.messages import FromCoordinator
    from privacy.secure_aggregation.rostersum.messages import Message
    from privacy.secure_aggregation.rostersum.site_events import Effect, Event

DATA = "family"


class Cut(Exception):  # noqa: N818 - no error: the line is cut
    """The site's line is cut here."""


def _never(_effect: object) -> bool:
    return False


def _same(content: bytes) -> bytes:
    return content


@dataclass(eq=False)
class SealedSite(Site):
    """A site that takes part in a job's secure aggregation; what it holds in memory outlives a cut of its line.

    Work to which `answer` says None is put down, and taken up when its step is asked for again.

    Attributes:
        rows: Its records, which are its weight.
        cut: Asked before each effect of its machine: whether its line is cut there.
        tamper: What becomes of a masked vector before its digest is signed.
        overtaken: Waited for between an upload's first bytes and the message that announces it.
        said: What its machine said.
        told: What its machine was told.
        disk: What it persisted last.
    """

    rows: int = 100
    cut: Callable[[Effect], bool] = _never
    tamper: Callable[[bytes], bytes] = _same
    overtaken: Callable[[], object] | None = None
    said: list[Message] = field(default_factory=list)
    told: list[Message] = field(default_factory=list)
    uploads: set[asyncio.Task[None]] = field(default_factory=set)
    disk: bytes = Durable().encode()
    machine: Machine | None = None
    held: Contributions | None = None
    terms: Terms | None = None
    job: str = ""
    asked: StepStart | None = None
    put_down: Work | None = None

    def restart(self) -> None:
        """Its process ends; a new one knows what its disk holds."""
        self.machine = self.held = self.put_down = None

    async def attend(self, running: object) -> None:
        """Attends until the coordinator ends the stream or the line is cut; raises what it is told."""
        try:
            await super().attend(running)  # type: ignore[arg-type] # a `Running`
        except Cut:
            self.welcomed.clear()
        finally:
            for task in self.uploads:
                task.cancel()

    async def _react(self, connection: Connection, message: FromCoordinator) -> None:
        match message:
            case Welcome():
                self.welcomed.set()
            case JobOffer(job, text, _, terms):
                self._offered(job, Terms.decode(terms))
                self.outgoing.put_nowait(JobAccepted(job, digest(text)))
                await self._do(connection, Connected())
            case StepStart():
                self.asked = message
                if self.put_down is not None:
                    await self._work(connection, self.put_down)
            case Sealed(_, content):
                said = messages.decode(content)
                self.told.append(said)
                if self.machine is not None and self.terms is not None:
                    await self._do(connection, Received(self.terms.job_hash, said))

    def _offered(self, job: str, terms: Terms) -> None:
        self.job, self.terms = job, terms
        if self.machine is None:
            self.machine = Machine(self.member.keys.protocol, floor_for(terms), Durable.decode(self.disk))
            self.held = Contributions(self.folder / self.name / "held")
        effects = self.machine.receive(Offered(terms, Data(DATA, bytes(32), self.rows, self.rows)), self._clock)
        for effect in effects:
            if isinstance(effect, Persist):
                self.disk = effect.durable.encode()

    @property
    def _clock(self) -> Clock:
        return Clock(time.time(), time.monotonic())

    async def _do(self, connection: Connection, event: Event) -> None:
        assert self.machine is not None
        try:
            effects = self.machine.receive(event, self._clock)
        except ParleyError:
            return  # the coordinator spoke of a job that is over
        held: list[Send] = []
        for effect in effects:
            if self.cut(effect):
                raise Cut
            if isinstance(effect, Send) and isinstance(effect.message, Upload) and self.overtaken is not None:
                held.append(effect)
                continue
            await self._perform(connection, effect)
        for effect in held:
            assert self.overtaken is not None
            await asyncio.wait_for(_until(self.overtaken), 20)
            await self._perform(connection, effect)

    async def _perform(self, connection: Connection, effect: Effect) -> None:
        assert self.held is not None
        match effect:
            case Persist(_, durable):
                self.disk = durable.encode()
            case Send(_, message):
                self.said.append(message)
                self.outgoing.put_nowait(Sealed(self.job, messages.encode(message)))
            case Work():
                await self._work(connection, effect)
            case Mask():
                payload = self.held.mask(effect)
                if payload is not None:
                    payload = self.held.payloads.put(self.tamper(self.held.payloads.get(payload)))
                    await self._do(connection, Masked(effect.job_hash, effect.ctx, payload.digest))
            case UploadPayload():
                task = asyncio.create_task(self._upload(connection, effect))
                self.uploads.add(task)
            case Erase(_, update):
                self.held.erase(update)
            case Abandon(_, ctx):
                self.held.abandon(ctx)
            case _:
                pass

    async def _work(self, connection: Connection, work: Work) -> None:
        assert self.held is not None
        assert self.asked is not None
        step, self.put_down = self.asked, None
        answer = self.answer(step)
        if answer is None:
            self.put_down = work  # until it is asked again
            return
        if not isinstance(answer, bytes):
            await self._do(connection, Cannot(work.job_hash, work.assignment, Because.RESOURCES))
            return
        update = f"step-{step.step}-{work.assignment.r}"
        self.held.result(update).write_bytes(answer)
        self.held.prepare(update, work.plan, rows=self.rows, declared=1)
        await self._do(connection, Updated(work.job_hash, work.assignment, update, work.table))

    async def _upload(self, connection: Connection, work: UploadPayload) -> None:
        assert self.held is not None
        await connection.upload(self.job, BlobRef(work.y_hash, work.size), self.held.payloads)
        await self._do(connection, UploadDone(work.job_hash, work.ctx))


async def _until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 - it looks at the product's own state, which sets no event
        await asyncio.sleep(0.002)
