"""What the store tells, as the coordinator's own values; every answer is of one instant and changes nothing."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from sqlalchemy import Engine, String, type_coerce
from sqlmodel import Session, col, select

from coordinator.records import JobRecord, JobSite, ModelRecord, Secured, Share, SitePresence, StepRecord
from coordinator.store import database, tables
from coordinator.store.meaning import told
from federation.errors import ConfigurationError, WhoActs
from federation.messages import EnrolmentRequest, MembershipStatement, Metric, RevocationList, StepKind

__all__ = ["PATIENCE", "StoreReader", "job_records", "step_records", "transaction"]

PATIENCE = 5.0
"""Seconds for which a call waits for another program's transaction before it gives up."""

_HEX = re.compile(r"[0-9a-f]{1,64}")


class StoreReader:
    """The store as it stands, for reading only: a missing store is not made and an old one not migrated.

    Args:
        url: `sqlite:///PATH` or `postgresql://USER@HOST/DATABASE`.
        patience: Seconds to wait for another program's lock.

    Raises:
        ConfigurationError: `url` is none that a store can have.
        StorageError: There is no store, or none that this release can read. Every method raises it too when the
            database fails.
    """

    def __init__(self, url: str, *, patience: float = PATIENCE) -> None:
        self._engine = database.opened_for_reading(url, patience)

    def close(self) -> None:
        """Lets go of the database."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[Session]:
        """A session that sees one state of the store."""
        with transaction(self._engine) as session:
            yield session

    # ---------------------------------------------------------------------------------------------- the consortium

    def members(self) -> tuple[MembershipStatement, ...]:
        """All members ever added, the oldest first; whether one is revoked, the revocation list says."""
        with self._transaction() as session:
            return tuple(session.exec(select(col(tables.Member.statement)).order_by(col(tables.Member.number))))

    def certificate(self, serial: str) -> bytes | None:
        """The TLS certificate (PEM) of the member with this serial."""
        with self._transaction() as session:
            return session.exec(select(tables.Member.certificate).where(tables.Member.serial == serial)).first()

    def enrolment(self, invitation: str) -> EnrolmentRequest | None:
        """The request made under this invitation, whether it still waits or not."""
        with self._transaction() as session:
            wanted = tables.Enrolment.invitation == invitation
            return session.exec(select(col(tables.Enrolment.request)).where(wanted)).first()

    def enrolled(self, invitation: str) -> MembershipStatement | None:
        """The membership that came of this invitation; None while its request waits, or when there is none."""
        with self._transaction() as session:
            joined = select(col(tables.Member.statement)).join(tables.Enrolment)
            return session.exec(joined.where(tables.Enrolment.invitation == invitation)).first()

    def pending(self) -> tuple[EnrolmentRequest, ...]:
        """The requests that wait for approval, the oldest first."""
        with self._transaction() as session:
            waiting = select(col(tables.Enrolment.request)).where(col(tables.Enrolment.serial).is_(None))
            return tuple(session.exec(waiting.order_by(col(tables.Enrolment.number))))

    def revocations(self) -> RevocationList | None:
        """The newest revocation list."""
        with self._transaction() as session:
            return session.exec(select(col(tables.Revocations.content))).first()

    # ------------------------------------------------------------------------------------------------------- jobs

    def job(self, job: str) -> JobRecord | None:
        """The job with this id, as it stands after its last committed step."""
        with self._transaction() as session:
            row = session.get(tables.Job, job)
            return None if row is None else job_records(session, [row])[0]

    def jobs(self) -> tuple[JobRecord, ...]:
        """All jobs, the newest first."""
        with self._transaction() as session:
            rows = session.exec(select(tables.Job)).all()
            # sorted here and not there: each PostgreSQL database has its own order of words
            return job_records(session, sorted(rows, key=lambda row: (row.submitted, row.id), reverse=True))

    def steps(self, job: str) -> tuple[StepRecord, ...]:
        """The job's committed steps in their order."""
        with self._transaction() as session:
            return step_records(session, job)

    def secured(self, job: str) -> Secured | None:
        """What the job with this id must not forget under secure aggregation; None where it sums without it.

        It stands apart from the job's record: up to some hundred kilobytes, which only its conductor reads.
        """
        with self._transaction() as session:
            row = session.get(tables.SecureJob, job)
            return None if row is None else Secured(row.terms, row.standing)

    # ----------------------------------------------------------------------------------------------------- models

    def models(self) -> tuple[ModelRecord, ...]:
        """All final models, the newest first."""
        with self._transaction() as session:
            rows = session.exec(select(tables.Model)).all()
            newest = sorted(rows, key=lambda row: (row.created, row.job), reverse=True)
            return tuple(_model_record(session, row) for row in newest)

    def model(self, name: str) -> ModelRecord | None:
        """The final model of the job with this id, or else the one whose digest begins with these hexadecimal digits.

        Jobs that ended with the very same model share its digest; the newest of them answers.

        Raises:
            ConfigurationError: Different models begin so.
        """
        with self._transaction() as session:
            row = session.get(tables.Model, name)
            if row is not None:
                return _model_record(session, row)
            if _HEX.fullmatch(name.lower()) is None:
                return None
            digest = type_coerce(col(tables.Model.payload), String)
            found = session.exec(
                select(tables.Model).where(digest.startswith(name.lower())).order_by(col(tables.Model.created).desc())
            ).all()
            several = len({row.payload for row in found})
            if several > 1:
                raise ConfigurationError(
                    f"{several} models have digests that begin with {name}", fix="give more digits", who=WhoActs.YOU
                )
            return _model_record(session, found[0]) if found else None

    def referenced_blobs(self) -> frozenset[bytes]:
        """Digests of the payloads still needed: all of a job that goes on; of one that is over what it has learnt.

        Contributions on their way, and a model uploaded for a job not yet submitted, are not in the store.
        """
        with self._transaction() as session:
            finals = {row.job: row.payload for row in session.exec(select(tables.Model))}
            needed = set(finals.values())
            for job in session.exec(select(tables.Job)):
                kept = {job.preparation}
                if job.id not in finals:
                    kept |= {job.model, job.best_model}
                if not job.state.over:
                    kept |= {job.initial_model, job.strategy_state}
                needed |= {reference for reference in kept if reference is not None}
            return frozenset(reference.digest for reference in needed)

    # --------------------------------------------------------------------------------------------------- presence

    def presence(self) -> tuple[SitePresence, ...]:
        """Every site's presence as last told, by name."""
        with self._transaction() as session:
            rows = sorted(session.exec(select(tables.Presence)), key=lambda row: row.name)
            return tuple(SitePresence(row.name, row.connected, row.last_seen, row.state, row.trouble) for row in rows)


@contextmanager
def transaction(engine: Engine) -> Iterator[Session]:
    """A session in one transaction: all of it is kept when the block ends, nothing when it raises."""
    with told(engine), Session(engine, expire_on_commit=False) as session, session.begin():
        yield session


def job_records(session: Session, rows: Sequence[tables.Job]) -> tuple[JobRecord, ...]:
    """The jobs of these rows, in their order."""
    ids = [row.id for row in rows]
    rosters = defaultdict[str, list[MembershipStatement]](list)
    seats = select(tables.Seat).where(col(tables.Seat.job).in_(ids))
    for seat in session.exec(seats.order_by(col(tables.Seat.position))):
        rosters[seat.job].append(seat.statement)
    sites = defaultdict[str, list[JobSite]](list)
    answers = select(tables.JobSite).where(col(tables.JobSite.job).in_(ids))
    for answer in session.exec(answers.order_by(col(tables.JobSite.position))):
        sites[answer.job].append(JobSite(answer.site, answer.answer, answer.findings))
    measured = _step_metrics(session, ids)
    metrics = defaultdict[str, dict[int, tuple[Metric, ...]]](dict)
    evaluations = select(col(tables.Step.job), col(tables.Step.number), col(tables.Step.round))
    evaluations = evaluations.where(col(tables.Step.job).in_(ids), tables.Step.kind == StepKind.EVALUATE)
    for job, step, number in session.exec(evaluations.order_by(col(tables.Step.number))):
        metrics[job][number] = measured[job, step]
    return tuple(
        JobRecord(
            id=row.id,
            name=row.name,
            text=row.text,
            submitted=row.submitted,
            roster=tuple(rosters[row.id]),
            initial_model=row.initial_model,
            state=row.state,
            reason=row.reason,
            started=row.started,
            ended=row.ended,
            next_step=row.next_step,
            round=row.round,
            evaluated_round=row.evaluated_round,
            best_round=row.best_round,
            model=row.model,
            best_model=row.best_model,
            strategy_state=row.strategy_state,
            preparation=row.preparation,
            sites=tuple(sites[row.id]),
            metrics=tuple(sorted(metrics[row.id].items(), key=lambda item: item[0])),
        )
        for row in rows
    )


def step_records(session: Session, job: str, number: int | None = None) -> tuple[StepRecord, ...]:
    """The job's committed steps in their order, or the one of this number."""
    rows = select(tables.Step).where(tables.Step.job == job)
    parts = select(tables.Share).where(tables.Share.job == job)
    if number is not None:
        rows, parts = rows.where(tables.Step.number == number), parts.where(tables.Share.step == number)
    shares = defaultdict[int, list[Share]](list)
    for part in session.exec(parts.order_by(col(tables.Share.step), col(tables.Share.position))):
        shares[part.step].append(Share(part.site, part.outcome, part.cause, part.seconds, part.bytes))
    metrics = _step_metrics(session, [job])
    finals = {row.step: row for row in session.exec(select(tables.Model).where(tables.Model.job == job))}
    return tuple(
        StepRecord(
            job=job,
            step=row.number,
            attempt=row.attempt,
            kind=row.kind,
            round=row.round,
            started=row.started,
            ended=row.ended,
            shares=tuple(shares[row.number]),
            model=row.model,
            strategy_state=row.strategy_state,
            preparation=row.preparation,
            metrics=metrics[job, row.number],
            best_round=row.best_round,
            state=row.state,
            reason=row.reason,
            final=_model_record(session, finals[row.number]) if row.number in finals else None,
        )
        for row in session.exec(rows.order_by(col(tables.Step.number)))
    )


def _step_metrics(session: Session, jobs: list[str]) -> defaultdict[tuple[str, int], tuple[Metric, ...]]:
    """What each step of the jobs measured, by job and step."""
    rows = select(tables.Metric).where(col(tables.Metric.job).in_(jobs)).order_by(col(tables.Metric.position))
    metrics = defaultdict[tuple[str, int], tuple[Metric, ...]](tuple)
    for row in session.exec(rows):
        metrics[row.job, row.step] += (Metric(row.name, row.value),)
    return metrics


def _model_record(session: Session, row: tables.Model) -> ModelRecord:
    rows = select(tables.ModelMetric).where(tables.ModelMetric.job == row.job)
    return ModelRecord(
        job=row.job,
        name=row.name,
        payload=row.payload,
        round=row.round,
        created=row.created,
        metrics=tuple(
            Metric(each.name, each.value) for each in session.exec(rows.order_by(col(tables.ModelMetric.position)))
        ),
        card=row.card,
    )
