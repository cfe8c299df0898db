"""The tables, one class each; a column holds a value of the house's own types wherever there is one."""

from enum import Enum
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter
from sqlalchemy import BigInteger, Column, Double, LargeBinary, String, Text, UniqueConstraint
from sqlalchemy import Enum as EnumType
from sqlalchemy import ForeignKeyConstraint as Refers
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator
from sqlmodel import Field, SQLModel

from coordinator.records import Outcome
from federation import codec
from federation.blobs import BlobRef
from federation.findings import Finding
from federation.messages import EnrolmentRequest, JobState, MembershipStatement, RevocationList, StepKind

__all__ = [
    "Enrolment",
    "Job",
    "JobSite",
    "Member",
    "Metric",
    "Migration",
    "Model",
    "ModelMetric",
    "Presence",
    "Revocations",
    "Seat",
    "SecureJob",
    "Share",
    "Step",
]

Kept = TypeVar("Kept", MembershipStatement, EnrolmentRequest, RevocationList)

_FINDINGS = TypeAdapter(tuple[Finding, ...])


class Reference(TypeDecorator[BlobRef]):
    """A payload's name as text that people can read and search by prefix: SHA-256 in hexadecimal, colon, bytes."""

    impl = String(96)
    cache_ok = True

    def process_bind_param(self, value: BlobRef | None, dialect: Dialect) -> str | None:  # noqa: ARG002 - SQLAlchemy's
        """The text of a name."""
        return None if value is None else f"{value.hex}:{value.length}"

    def process_result_value(self, value: str | None, dialect: Dialect) -> BlobRef | None:  # noqa: ARG002 - the same
        """The name in a text."""
        if value is None:
            return None
        digest, _, length = value.partition(":")
        return BlobRef(bytes.fromhex(digest), int(length))


class Message(TypeDecorator[Kept], Generic[Kept]):
    """A message as the bytes that travel, so that a signature over it stays good whatever the tables become."""

    impl = LargeBinary
    cache_ok = True

    def __init__(self, kind: type[Kept]) -> None:
        super().__init__()
        self.kind: type[Kept] = kind

    def process_bind_param(self, value: Kept | None, dialect: Dialect) -> bytes | None:  # noqa: ARG002 - SQLAlchemy's
        """The bytes of a message."""
        return None if value is None else codec.encode(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Kept | None:  # noqa: ARG002 - the same
        """The message in the bytes."""
        return None if value is None else codec.decode(self.kind, value)


class Findings(TypeDecorator[tuple[Finding, ...]]):
    """What a site found, as JSON text."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: tuple[Finding, ...] | None, dialect: Dialect) -> str:  # noqa: ARG002 - the same
        """The text of the findings."""
        return _FINDINGS.dump_json(value or ()).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[Finding, ...]:  # noqa: ARG002 - the same
        """The findings in the text."""
        return _FINDINGS.validate_json(value or "[]")


class Words(TypeDecorator[str]):
    """Text from anybody: PostgreSQL's own cannot hold NUL, so it is kept as U+FDD0 (never a character) and a 0."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002 - the same
        """The text as it is kept."""
        return None if value is None else value.replace("\ufdd0", "\ufdd01").replace("\0", "\ufdd00")

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002 - the same
        """The text as it was given."""
        return None if value is None else value.replace("\ufdd00", "\0").replace("\ufdd01", "\ufdd0")


def _words() -> Any:
    return Field(sa_column=Column(Words(), nullable=False))


def _word(kind: type[Enum]) -> EnumType:
    """A column for an Enum's values as plain text, which reads the same in every database."""
    return EnumType(
        kind, native_enum=False, length=16, values_callable=lambda members: [each.value for each in members]
    )


def _reference(*, nullable: bool = True) -> Any:
    return Field(default=None, sa_column=Column(Reference(), nullable=nullable))


def _double() -> Any:
    """A column for a measure, or for a time in seconds, in double precision everywhere."""
    return Field(sa_column=Column(Double(), nullable=False))


def _of_step() -> Refers:
    return Refers(["job", "step"], ["step.job", "step.number"])


class Migration(SQLModel, table=True):
    """Which release of Parley brought the schema to a revision; every release, old or new, can read this table."""

    revision: str = Field(primary_key=True)
    software: str
    migrated: float = _double()


class Member(SQLModel, table=True):
    """A member, as the root signed it, with its TLS certificate (PEM)."""

    number: int | None = Field(default=None, primary_key=True)
    serial: str = Field(unique=True)
    statement: MembershipStatement = Field(sa_column=Column(Message(MembershipStatement), nullable=False))
    certificate: bytes
    added: float = _double()


class Enrolment(SQLModel, table=True):
    """A newcomer's request; it waits as long as `serial`, the membership that came of it, is null."""

    number: int | None = Field(default=None, primary_key=True)
    invitation: str = Field(unique=True)
    request: EnrolmentRequest = Field(sa_column=Column(Message(EnrolmentRequest), nullable=False))
    requested: float = _double()
    serial: str | None = Field(default=None, foreign_key="member.serial")
    approved: float | None = Field(default=None, sa_column=Column(Double()))


class Revocations(SQLModel, table=True):
    """The consortium's newest revocation list: one row."""

    consortium: str = Field(primary_key=True)
    version: int = Field(sa_column=Column(BigInteger(), nullable=False))
    content: RevocationList = Field(sa_column=Column(Message(RevocationList), nullable=False))


class Job(SQLModel, table=True):
    """A job as it stands after its last committed step."""

    id: str = Field(primary_key=True)
    name: str = _words()
    text: str = _words()
    submitted: float = _double()
    initial_model: BlobRef = _reference(nullable=False)
    state: JobState = Field(sa_column=Column(_word(JobState), nullable=False))
    reason: str = _words()
    started: float = _double()
    ended: float = _double()
    next_step: int
    round: int
    evaluated_round: int
    best_round: int
    model: BlobRef | None = _reference()
    best_model: BlobRef | None = _reference()
    strategy_state: BlobRef | None = _reference()
    preparation: BlobRef | None = _reference()


class Seat(SQLModel, table=True):
    """One member of a job's roster, at its index."""

    job: str = Field(primary_key=True, foreign_key="job.id")
    position: int = Field(primary_key=True)
    statement: MembershipStatement = Field(sa_column=Column(Message(MembershipStatement), nullable=False))


class JobSite(SQLModel, table=True):
    """What a roster's site answered to the job's offer."""

    job: str = Field(primary_key=True, foreign_key="job.id")
    site: str = Field(primary_key=True)
    position: int
    answer: str = _words()
    findings: tuple[Finding, ...] = Field(default=(), sa_column=Column(Findings(), nullable=False))


class SecureJob(SQLModel, table=True):
    """What a job under secure aggregation must not forget; apart from the job's row, which is read far more often."""

    job: str = Field(primary_key=True, foreign_key="job.id")
    terms: bytes
    standing: bytes


class Step(SQLModel, table=True):
    """One committed step of a job."""

    job: str = Field(primary_key=True, foreign_key="job.id")
    number: int = Field(primary_key=True)
    attempt: int
    kind: StepKind = Field(sa_column=Column(_word(StepKind), nullable=False))
    round: int
    started: float = _double()
    ended: float = _double()
    model: BlobRef | None = _reference()
    strategy_state: BlobRef | None = _reference()
    preparation: BlobRef | None = _reference()
    best_round: int
    state: JobState = Field(sa_column=Column(_word(JobState), nullable=False))
    reason: str = _words()


class Share(SQLModel, table=True):
    """One site's part in a step; a site has at most one."""

    __table_args__ = (_of_step(), UniqueConstraint("job", "step", "site"))

    job: str = Field(primary_key=True)
    step: int = Field(primary_key=True)
    position: int = Field(primary_key=True)
    site: str
    outcome: Outcome = Field(sa_column=Column(_word(Outcome), nullable=False))
    cause: str = _words()
    seconds: float = _double()
    bytes: int = Field(sa_column=Column(BigInteger(), nullable=False))


class Metric(SQLModel, table=True):
    """One metric that a step measured."""

    __table_args__ = (_of_step(),)

    job: str = Field(primary_key=True)
    step: int = Field(primary_key=True)
    position: int = Field(primary_key=True)
    name: str = _words()
    value: float = _double()


class Model(SQLModel, table=True):
    """A job's final model, made by its last step."""

    __table_args__ = (_of_step(),)

    job: str = Field(primary_key=True)
    step: int
    name: str = _words()
    payload: BlobRef = Field(sa_column=Column(Reference(), nullable=False))
    round: int
    created: float = _double()
    card: str = _words()


class ModelMetric(SQLModel, table=True):
    """One metric of a final model."""

    job: str = Field(primary_key=True, foreign_key="model.job")
    position: int = Field(primary_key=True)
    name: str = _words()
    value: float = _double()


class Presence(SQLModel, table=True):
    """Whether a site attends and what it does, as last told."""

    name: str = Field(primary_key=True)
    connected: bool
    last_seen: float = _double()
    state: str = _words()
    trouble: str = _words()
