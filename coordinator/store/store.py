"""The store as the coordinator writes it: every method is one transaction, kept whole or not at all.

A method that raised StorageError may have been kept all the same: the connection can break off after the commit and
before its answer. Every method may therefore be called again with the same arguments, and then changes nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from sqlmodel import Session, SQLModel, col, delete, func, insert, select, update

from coordinator.records import JobRecord, JobSite, ModelRecord, SitePresence, StepRecord
from coordinator.store import database, tables
from coordinator.store.reader import PATIENCE, StoreReader, job_records, step_records, transaction
from federation.blobs import BlobRef
from federation.errors import LocalProtocolError
from federation.messages import EnrolmentRequest, JobState, MembershipStatement, RevocationList, StepKind

__all__ = ["Store"]

_OPEN = tuple(state for state in JobState if not state.over)


class Store(StoreReader):
    """The coordinator's memory. Opening makes or migrates the database; what a method wrote survives a power cut.

    One thread of one process writes; any number may read meanwhile. After a StorageError the same object goes on
    working as soon as disk, lock or server do.

    Args:
        url: `sqlite:///PATH` or `postgresql://USER@HOST/DATABASE`.
        patience: Seconds to wait for another program's lock.

    Raises:
        ConfigurationError: `url` is none that a store can have.
        StorageError: Another coordinator uses it, or it cannot be used as it is (locked, damaged, not writable, of a
            newer release); nothing in it changed.
    """

    def __init__(self, url: str, *, patience: float = PATIENCE) -> None:
        self._writer = database.opened(url, patience)
        try:
            super().__init__(url, patience=patience)
        except BaseException:
            self._writer.dispose()
            raise

    def close(self) -> None:
        """Lets go of the database; another coordinator may use it."""
        super().close()
        self._writer.dispose()

    @contextmanager
    def _change(self) -> Iterator[Session]:
        with transaction(self._writer) as session:
            yield session

    # ---------------------------------------------------------------------------------------------- the consortium

    def add_member(self, statement: MembershipStatement, certificate: bytes, when: float) -> None:
        """Keeps a member with its TLS certificate (PEM).

        Raises:
            LocalProtocolError: Another member, or another certificate, is kept under this serial.
        """
        with self._change() as session:
            _add_member(session, statement, certificate, when)

    def add_enrolment(self, request: EnrolmentRequest, when: float) -> None:
        """Keeps a newcomer's request until it is approved. The same request again changes nothing.

        Raises:
            LocalProtocolError: Another request was made under this invitation.
        """
        with self._change() as session:
            row = _enrolment(session, request.invitation)
            if row is None:
                waiting: Row = {"invitation": request.invitation, "request": request, "requested": when}
                _put(session, tables.Enrolment, waiting)
            elif row.request != request:
                raise LocalProtocolError(f"invitation {request.invitation} was used already, for {row.request.name}")

    def approve_enrolment(
        self, invitation: str, statement: MembershipStatement, certificate: bytes, when: float
    ) -> None:
        """Makes the newcomer of this invitation a member and closes its enrolment, in one.

        Raises:
            LocalProtocolError: No request waits under this invitation, or another member is kept under the serial.
        """
        with self._change() as session:
            row = _enrolment(session, invitation)
            if row is None or row.serial not in {None, statement.serial}:
                raise LocalProtocolError(f"no enrolment waits under invitation {invitation}")
            _add_member(session, statement, certificate, when)
            if row.serial is None:
                row.serial = statement.serial
                row.approved = when

    def put_revocations(self, revocations: RevocationList) -> None:
        """Keeps the list in the place of an older one. The same list again changes nothing.

        Raises:
            LocalProtocolError: A newer list, or another of the same version or consortium, is kept already.
        """
        with self._change() as session:
            row = session.exec(select(tables.Revocations)).first()
            if row is None:
                kept: Row = {"consortium": revocations.consortium, "version": revocations.version}
                _put(session, tables.Revocations, {**kept, "content": revocations})
                return
            if row.content == revocations:
                return
            if row.consortium != revocations.consortium or row.version >= revocations.version:
                raise LocalProtocolError(
                    f"revocation list {revocations.version} of {revocations.consortium} cannot replace "
                    f"list {row.version} of {row.consortium}"
                )
            row.version = revocations.version
            row.content = revocations

    # ------------------------------------------------------------------------------------------------------- jobs

    def add_job(self, record: JobRecord, terms: bytes | None = None) -> None:
        """Keeps a new job, with its `terms` where it sums under secure aggregation.

        Raises:
            LocalProtocolError: Another job, or the same with other terms, is kept under this id, or `record` tells of
                steps that were never committed.
        """
        if record.next_step != 1 or record.metrics:
            raise LocalProtocolError(f"job {record.id} tells of steps before it was added")
        with self._change() as session:
            kept = session.get(tables.Job, record.id)
            if kept is not None and job_records(session, [kept]) == (record,) and _terms(session, record.id) == terms:
                return
            if kept is not None:
                raise LocalProtocolError(f"there is a job {record.id} already")
            _put(session, tables.Job, _job_row(record))
            seats = ({"job": record.id, "position": at, "statement": one} for at, one in enumerate(record.roster))
            _put(session, tables.Seat, *seats)
            _put(session, tables.JobSite, *(_site_row(record.id, at, site) for at, site in enumerate(record.sites)))
            if terms is not None:
                _put(session, tables.SecureJob, {"job": record.id, "terms": terms, "standing": b""})

    def set_standing(self, job: str, standing: bytes) -> None:
        """Keeps how far the job's secure aggregation has come, in the place of what was kept; also once it is over.

        Raises:
            LocalProtocolError: There is no such job, or it sums without secure aggregation.
        """
        with self._change() as session:
            _stand(session, job, standing)

    def set_job_state(self, job: str, state: JobState, reason: str, when: float) -> None:
        """Puts the job into `state`; the first time that it runs is its start, and an end is its end.

        Raises:
            LocalProtocolError: There is no such job, or it is over.
        """
        with self._change() as session:
            row = _known_job(session, job)
            if state.over and (row.state, row.reason, row.ended) == (state, reason, when):
                return
            _require_open(row)
            _enter(row, state, reason, started=when, ended=when)

    def set_job_site(self, job: str, site: JobSite) -> None:
        """Keeps the site's answer to the job's offer in the place of an earlier one.

        Raises:
            LocalProtocolError: There is no such job.
        """
        with self._change() as session:
            _known_job(session, job)
            row = session.get(tables.JobSite, (job, site.site))
            if row is None:
                position = session.exec(select(func.count()).where(tables.JobSite.job == job)).one()
                _put(session, tables.JobSite, _site_row(job, position, site))
            else:
                row.answer = site.answer
                row.findings = site.findings

    def commit_step(self, record: StepRecord, standing: bytes | None = None) -> None:
        """Keeps the step with its shares and metrics and moves the job on, in one: all of it, once, or nothing.

        So is `standing`, how far the job's secure aggregation has come with this step; None leaves what is kept. A step
        that is committed already leaves it too: what is kept is at least as far.

        Raises:
            LocalProtocolError: Another step of this number is committed, it is not the job's next, or there is no such
                job, or it is over, or `standing` is given and it sums without secure aggregation.
        """
        if record.final is not None and record.final.job != record.job:
            raise LocalProtocolError(f"step {record.step} of job {record.job} ends with a model of {record.final.job}")
        with self._change() as session:
            job = _claimed(session, record)
            if job is None:
                return
            _move_on(session, job, record)
            if standing is not None:
                _stand(session, record.job, standing)
            _put(session, tables.Step, _step_row(record))
            key = {"job": record.job, "step": record.step}
            _put(session, tables.Share, *({**key, "position": at, **asdict(it)} for at, it in enumerate(record.shares)))
            _put(
                session, tables.Metric, *({**key, "position": at, **asdict(it)} for at, it in enumerate(record.metrics))
            )
            if record.final is not None:
                _put_model(session, record.final, record.step)

    # --------------------------------------------------------------------------------------------------- presence

    def set_presence(self, sites: tuple[SitePresence, ...]) -> None:
        """Keeps what is told of these sites in the place of what was; other sites' presence stays."""
        with self._change() as session:
            session.exec(delete(tables.Presence).where(col(tables.Presence.name).in_([site.name for site in sites])))
            _put(session, tables.Presence, *(asdict(site) for site in sites))


# ----------------------------------------------------------------------------------------------------------- one step


def _claimed(session: Session, record: StepRecord) -> tables.Job | None:
    """The job's row, moved to the step after `record`; None when this very step is committed already."""
    claimed = session.exec(
        update(tables.Job)
        .where(
            col(tables.Job.id) == record.job,
            col(tables.Job.next_step) == record.step,
            col(tables.Job.state).in_(_OPEN),
        )
        .values(next_step=record.step + 1)
    )
    if claimed.rowcount == 1:
        return session.get_one(tables.Job, record.job)
    job = _known_job(session, record.job)
    if step_records(session, record.job, record.step) == (record,):
        return None
    _require_open(job)
    raise LocalProtocolError(
        f"step {record.step} of job {record.job} cannot be committed: its next step is {job.next_step}"
    )


def _move_on(session: Session, job: tables.Job, record: StepRecord) -> None:
    if record.kind is StepKind.TRAIN:
        job.round = record.round
    if record.kind is StepKind.EVALUATE:
        job.evaluated_round = record.round
    job.model = record.model or job.model
    job.strategy_state = record.strategy_state or job.strategy_state
    job.preparation = record.preparation or job.preparation
    if record.best_round != job.best_round:
        job.best_round = record.best_round
        job.best_model = _model_of(session, job, record, record.best_round)
    _enter(job, record.state, record.reason, started=record.started, ended=record.ended)


def _model_of(session: Session, job: tables.Job, record: StepRecord, number: int) -> BlobRef:
    """The model with which training round `number` ended; round 0 is the initial one."""
    if number == 0:
        return job.initial_model
    if number == job.round and job.model is not None:
        return job.model
    trained = select(col(tables.Step.model)).where(
        tables.Step.job == job.id, tables.Step.kind == StepKind.TRAIN, tables.Step.round == number
    )
    model = session.exec(trained).first()
    if model is None:
        raise LocalProtocolError(
            f"step {record.step} of job {job.id} calls round {number} the best, which has no model"
        )
    return model


def _enter(job: tables.Job, state: JobState, reason: str, *, started: float, ended: float) -> None:
    if state is JobState.RUNNING and job.started == 0:
        job.started = started
    if state.over:
        job.ended = ended
    job.state = state
    job.reason = reason


# --------------------------------------------------------------------------------------------------------------- rows


Row = dict[str, object]


def _put(session: Session, table: type[SQLModel], *rows: Row) -> None:
    """Inserts the rows now, in the order of the calls: rows that refer to others come after them."""
    if rows:
        session.connection().execute(insert(table), rows)


def _job_row(record: JobRecord) -> Row:
    return {
        "id": record.id,
        "name": record.name,
        "text": record.text,
        "submitted": record.submitted,
        "initial_model": record.initial_model,
        "state": record.state,
        "reason": record.reason,
        "started": record.started,
        "ended": record.ended,
        "next_step": record.next_step,
        "round": record.round,
        "evaluated_round": record.evaluated_round,
        "best_round": record.best_round,
        "model": record.model,
        "best_model": record.best_model,
        "strategy_state": record.strategy_state,
        "preparation": record.preparation,
    }


def _site_row(job: str, position: int, site: JobSite) -> Row:
    return {"job": job, "site": site.site, "position": position, "answer": site.answer, "findings": site.findings}


def _step_row(record: StepRecord) -> Row:
    return {
        "job": record.job,
        "number": record.step,
        "attempt": record.attempt,
        "kind": record.kind,
        "round": record.round,
        "started": record.started,
        "ended": record.ended,
        "model": record.model,
        "strategy_state": record.strategy_state,
        "preparation": record.preparation,
        "best_round": record.best_round,
        "state": record.state,
        "reason": record.reason,
    }


def _put_model(session: Session, model: ModelRecord, step: int) -> None:
    row: Row = {
        "job": model.job,
        "step": step,
        "name": model.name,
        "payload": model.payload,
        "round": model.round,
        "created": model.created,
        "card": model.card,
    }
    _put(session, tables.Model, row)
    metrics = ({"job": model.job, "position": at, **asdict(metric)} for at, metric in enumerate(model.metrics))
    _put(session, tables.ModelMetric, *metrics)


def _add_member(session: Session, statement: MembershipStatement, certificate: bytes, when: float) -> None:
    kept = session.exec(select(tables.Member).where(tables.Member.serial == statement.serial)).first()
    if kept is not None and (kept.statement, kept.certificate) == (statement, certificate):
        return
    if kept is not None:
        raise LocalProtocolError(f"a member with serial {statement.serial} is kept already")
    row: Row = {"serial": statement.serial, "statement": statement, "certificate": certificate, "added": when}
    _put(session, tables.Member, row)


def _enrolment(session: Session, invitation: str) -> tables.Enrolment | None:
    return session.exec(select(tables.Enrolment).where(tables.Enrolment.invitation == invitation)).first()


def _known_job(session: Session, job: str) -> tables.Job:
    row = session.get(tables.Job, job)
    if row is None:
        raise LocalProtocolError(f"there is no job {job}")
    return row


def _terms(session: Session, job: str) -> bytes | None:
    row = session.get(tables.SecureJob, job)
    return None if row is None else row.terms


def _stand(session: Session, job: str, standing: bytes) -> None:
    kept = update(tables.SecureJob).where(col(tables.SecureJob.job) == job).values(standing=standing)
    if session.exec(kept).rowcount != 1:
        _known_job(session, job)
        raise LocalProtocolError(f"job {job} sums without secure aggregation: it has no standing to keep")


def _require_open(job: tables.Job) -> None:
    if job.state.over:
        raise LocalProtocolError(f"job {job.id} is over: {job.state.value}")
