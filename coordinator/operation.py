"""What operators ask: submit, show, watch and stop jobs, approve and revoke members, list models."""

import asyncio
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from coordinator import sealed
from coordinator.attendance import Attendance
from coordinator.conduct import Conductor, rounds_of
from coordinator.intake import Intake
from coordinator.members import Members
from coordinator.records import JobRecord, ModelRecord, Outcome, StepRecord
from coordinator.store.store import Store
from coordinator.worker import Worker
from federation.blobs import BlobRef, BlobStore
from federation.errors import ConfigurationError, RemoteProtocolError, WhoActs
from federation.findings import brief
from federation.job import parse
from federation.messages import (
    ApproveEnrolment,
    Done,
    JobAdded,
    Jobs,
    JobView,
    ListJobs,
    ListModels,
    ListPending,
    ListSites,
    MembershipStatement,
    Models,
    ModelView,
    OperatorReply,
    OperatorRequest,
    Pending,
    PublishRevocations,
    ShowJob,
    ShowModel,
    Sites,
    SiteView,
    StopJob,
    SubmitJob,
)
from federation.vector import from_safetensors

__all__ = ["Operation"]

_VIEWS_PER_SECOND = 10
_TURN_SECONDS = 0.05


class Operation:
    """The operators' side of the coordinator.

    Args:
        folder: Where payloads lie; an operator's uploads in `incoming/`.
        store: The durable memory.
        worker: The thread in which the store is used.
        members: The consortium.
        attendance: Who is here.
        conductor: The jobs.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        worker: Worker,
        members: Members,
        attendance: Attendance,
        conductor: Conductor,
    ) -> None:
        self._folder = folder
        self._store = store
        self._worker = worker
        self._members = members
        self._attendance = attendance
        self._conductor = conductor
        shutil.rmtree(folder / "incoming", ignore_errors=True)  # models of jobs that were never submitted, or were
        self._incoming = BlobStore(folder / "incoming", durable=False)

    async def operate(self, member: MembershipStatement, request: OperatorRequest) -> OperatorReply:  # noqa: PLR0911 - one a request
        """Does what an operator asks.

        Raises:
            ParleyError: It was refused and nothing changed.
        """
        match request:
            case SubmitJob():
                return await self._submit(request)
            case ListJobs():
                return await self._jobs()
            case ShowJob(job):
                return await self._view(job)
            case StopJob(job):
                view = await self._view(job)
                if not view.state.over:
                    await self._conductor.stop(job, member.name)
                return Done()
            case ListPending():
                return Pending(await self._members.pending())
            case ApproveEnrolment():
                await self._members.approve(request)
                return Done()
            case PublishRevocations(revocations):
                await self._members.revoke(revocations)
                self._conductor.revoked(revocations)
                self._attendance.revoked(revocations, self._conductor)
                return Done()
            case ListModels():
                return Models(tuple(_model_view(each) for each in await self._worker.do(self._store.models)))
            case ShowModel(model):
                return await self._model(model)
            case ListSites():
                return Sites(tuple(self._attendance.view(each, self._conductor) for each in self._members.sites()))
            case _:
                assert_never(request)

    async def watch(self, job: str) -> AsyncIterator[JobView]:
        """The job now and after each change, at most ten times a second, until it is over."""
        view = await self._view(job)
        yield view
        conducted = self._conductor.find(job)
        if conducted is None:
            return
        changed = asyncio.Event()
        conducted.watchers.add(changed)
        try:
            while not view.state.over:
                try:
                    async with asyncio.timeout(1.0):
                        await changed.wait()
                except TimeoutError:
                    pass  # a second has passed: the seconds shown have changed
                changed.clear()
                view = conducted.run.view(time.time())
                yield view
                await asyncio.sleep(1 / _VIEWS_PER_SECOND)
        finally:
            conducted.watchers.discard(changed)

    async def upload(self, payload: BlobRef) -> tuple[Intake | None, Callable[[int], None]]:
        """Where to put an initial model (None: it is here already); waits while another operator sends the same."""
        while not self._incoming.has(payload):
            try:
                return Intake(self._incoming.receive(payload)), _uncounted
            except RemoteProtocolError:
                await asyncio.sleep(_TURN_SECONDS)
        return None, _uncounted

    async def download(self, payload: BlobRef) -> tuple[BlobStore, Callable[[int], None]]:
        """The folder of a final model.

        Raises:
            RemoteProtocolError: No finished job has it.
        """
        for model in await self._worker.do(self._store.models):
            if model.payload == payload:
                return BlobStore(self._folder / "jobs" / model.job), _uncounted
        raise RemoteProtocolError(
            f"no job ended with the model {payload.hex[:12]}", fix="see: parley model list", who=WhoActs.YOU
        )

    async def _submit(self, request: SubmitJob) -> JobAdded:
        job = parse(request.text, "job file")
        members = {member.name: member for member in self._members.sites()}
        unknown = [name for name in job.cohort.sites if name not in members]
        if unknown:
            raise ConfigurationError(
                f"cohort.sites names {', '.join(unknown)}, which the consortium does not have",
                fix=f"use its sites: {', '.join(members) or 'none has joined yet'}",
            )
        chosen = job.cohort.sites or tuple(members)
        if len(chosen) < job.cohort.minimum_sites:
            raise ConfigurationError(
                f"the job needs {job.cohort.minimum_sites} sites (cohort.minimum_sites), and {len(chosen)} have joined",
                fix="invite and approve more sites, or lower cohort.minimum_sites",
            )
        if not self._incoming.has(request.model):
            raise RemoteProtocolError("the initial model was not uploaded", fix="submit with: parley job submit FILE")
        model = self._incoming.mapped(request.model)
        layout, _ = from_safetensors(model)
        roster = tuple(members[name] for name in chosen)
        secured = job.privacy.secure_aggregation != "plain"
        terms = sealed.agreed(job, roster, self._members.me.statement, layout.size) if secured else None
        record = JobRecord(
            id=f"{job.name[:50]}-{secrets.token_hex(3)}",
            name=job.name,
            text=request.text,
            submitted=time.time(),
            roster=roster,
            initial_model=request.model,
        )
        await self._conductor.add(record, model, terms)
        return JobAdded(record.id)

    async def _jobs(self) -> Jobs:
        records = await self._worker.do(self._store.jobs)
        return Jobs(tuple([await self._record_view(record) for record in records]))

    async def _view(self, job: str) -> JobView:
        record = await self._worker.do(lambda: self._store.job(job))
        if record is None:
            raise RemoteProtocolError(f"there is no job {job!r}", fix="see: parley job list", who=WhoActs.YOU)
        return await self._record_view(record)

    async def _record_view(self, record: JobRecord) -> JobView:
        conducted = self._conductor.find(record.id)
        if conducted is not None:
            return conducted.run.view(time.time())
        steps = await self._worker.do(lambda: self._store.steps(record.id))
        return JobView(
            id=record.id,
            name=record.name,
            state=record.state,
            round=record.round,
            rounds=parse(record.text, record.id).rounds.maximum,
            best_round=record.best_round,
            reason=record.reason,
            submitted=record.submitted,
            seconds=max(0.0, record.ended - (record.started or record.submitted)),
            text=record.text,
            sites=tuple(self._stored_site(member, record, steps) for member in record.roster),
            history=rounds_of(steps),
        )

    def _stored_site(self, member: MembershipStatement, record: JobRecord, steps: tuple[StepRecord, ...]) -> SiteView:
        """A site of a job that is over: what it did in it, and why it did not, from the store alone."""
        shares = [share for step in steps for share in step.shares if share.site == member.name]
        findings = next((each.findings for each in record.sites if each.site == member.name), ())
        trouble = next((share.cause for share in shares[-1:] if share.outcome is not Outcome.COUNTED), "")
        return replace(
            self._attendance.view(member, self._conductor),
            seconds=sum(share.seconds for share in shares[-1:]),
            bytes=sum(share.bytes for share in shares),
            trouble=f"refused: {brief(findings)}" if findings else trouble,
        )

    async def _model(self, name: str) -> ModelView:
        found = await self._worker.do(lambda: self._store.model(name))
        if found is None:
            raise ConfigurationError(f"there is no model {name!r}", fix="see: parley model list", who=WhoActs.YOU)
        return _model_view(found)


def _uncounted(_: int) -> None:
    """What operators move is in no job's account."""


def _model_view(model: ModelRecord) -> ModelView:
    return ModelView(model.job, model.name, model.payload, model.round, model.created, model.metrics, model.card)
