"""One frozen dataclass per wire message, valid by construction: a message that exists can be acted on."""

import re
import sys
from dataclasses import dataclass, field
from enum import Enum

from federation.blobs import BlobRef
from federation.errors import RemoteProtocolError
from federation.findings import Finding

__all__ = [
    "PROTOCOL",
    "ApproveEnrolment",
    "Availability",
    "Bytes",
    "Contribution",
    "Credential",
    "DeclineCause",
    "Declined",
    "Done",
    "DownloadRequest",
    "EnrolmentRequest",
    "EnrolmentState",
    "EnrolmentStatus",
    "FromCoordinator",
    "FromSite",
    "Heartbeat",
    "Hello",
    "JobAccepted",
    "JobAdded",
    "JobEnded",
    "JobOffer",
    "JobRefused",
    "JobState",
    "JobView",
    "Jobs",
    "ListJobs",
    "ListModels",
    "ListPending",
    "ListSites",
    "MembershipStatement",
    "Metric",
    "ModelView",
    "Models",
    "OperatorReply",
    "OperatorRequest",
    "Pending",
    "Phase",
    "Progress",
    "PublishRevocations",
    "Refusal",
    "RevocationList",
    "Role",
    "RoundView",
    "Sealed",
    "ShowJob",
    "ShowModel",
    "SiteView",
    "Sites",
    "StepEnded",
    "StepKind",
    "StepStart",
    "StopJob",
    "SubmitJob",
    "UploadChunk",
    "UploadOffset",
    "UploadOpen",
    "UploadReply",
    "UploadRequest",
    "UploadStored",
    "Welcome",
]

Bytes = bytes | memoryview
"""A payload's bytes: what is read through a view is not copied."""

PROTOCOL = 1
"""Version of these messages; a peer of another version is refused by name."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_SERIAL = re.compile(r"[0-9a-f]{32}")
_MAX_TEXT = 1024 * 1024
_SHA256 = 32
_ED25519_KEY = 32
_ED25519_SIGNATURE = 64
_MAX_KEY = 512
_MAX_LIST = 10_000
_MAX_ROUNDS = 100_000
_MAX_CERTIFICATE = 64 * 1024
_MAX_SEALED = 256 * 1024
_MAX_TROUBLE = 64 * 1024  # all findings of a data contract, told in one text
_MAX_COUNT = 2**63 - 1  # what a database's signed integer holds
_MAX_SECONDS = 253_402_300_799  # the last second of the year 9999: later times are no dates
_MAX_FLOAT = sys.float_info.max


def _require(holds: bool, problem: str) -> None:  # noqa: FBT001 - reads as a sentence at each call
    if not holds:
        raise RemoteProtocolError(problem, fix="install the same release of Parley on both sides")


def _name(value: str, what: str) -> None:
    _require(_NAME.fullmatch(value) is not None, f"{what} must be 1-63 of a-z 0-9 . _ -, not {value[:70]!r}")


def _text(value: str, what: str, limit: int = 1000) -> None:
    _require(len(value) <= limit, f"{what} has {len(value)} characters; at most {limit} are allowed")


def _list(values: tuple[object, ...], what: str, limit: int = _MAX_LIST) -> None:
    _require(len(values) <= limit, f"{what} has {len(values)} entries; at most {limit} are allowed")


def _counts(*values: int) -> None:
    whole = all(type(value) is int and 0 <= value <= _MAX_COUNT for value in values)
    _require(whole, "a count must be a whole number from 0 to 2^63 - 1")


def _seconds(*values: float) -> None:
    finite = all(type(value) is not bool and 0 <= value <= _MAX_SECONDS for value in values)
    _require(finite, "a time or duration must be a number of seconds from 0 to the year 9999")


def _certificate(value: bytes) -> None:
    _require(0 < len(value) <= _MAX_CERTIFICATE, "a certificate must have 1..65536 bytes")


class Role(Enum):
    """What a member may do."""

    SITE = "site"
    OPERATOR = "operator"
    COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class MembershipStatement:
    """The consortium's word on one member: binds both of its keys to name, organisation, role and validity.

    `tls_key` is the SHA-256 of the TLS key's SubjectPublicKeyInfo, `protocol_key` the raw Ed25519 key, times are unix
    seconds, `signature` is the root's Ed25519 signature over `privacy.identity.statement_bytes`.
    """

    consortium: str
    serial: str
    name: str
    organisation: str
    role: Role
    tls_key: bytes
    protocol_key: bytes
    not_before: int
    not_after: int
    signature: bytes

    def __post_init__(self) -> None:
        """Refuses what no root would sign."""
        _name(self.consortium, "a consortium's name")
        _require(_SERIAL.fullmatch(self.serial) is not None, "a membership's serial must be 32 hexadecimal digits")
        _name(self.name, "a member's name")
        _name(self.organisation, "an organisation's name")
        _require(len(self.tls_key) == _SHA256, "a TLS key's digest must have 32 bytes")
        _require(len(self.protocol_key) == _ED25519_KEY, "a protocol key must have 32 bytes")
        _require(len(self.signature) == _ED25519_SIGNATURE, "a root signature must have 64 bytes")
        _require(0 < self.not_before < self.not_after, "a membership must begin before it ends")
        _counts(self.not_before, self.not_after)
        _seconds(self.not_before, self.not_after)


@dataclass(frozen=True, slots=True)
class RevocationList:
    """The serials that the consortium's root has revoked; a higher `version` replaces a lower one."""

    consortium: str
    version: int
    issued: int
    serials: tuple[str, ...]
    signature: bytes

    def __post_init__(self) -> None:
        """Refuses what no root would sign."""
        _name(self.consortium, "a consortium's name")
        _require(self.version >= 0 and self.issued >= 0, "a revocation list's version and time cannot be negative")
        _counts(self.version, self.issued)
        _seconds(self.issued)
        _require(len(self.serials) <= _MAX_LIST, "a revocation list is too long")
        _require(all(_SERIAL.fullmatch(s) for s in self.serials), "a revoked serial must be 32 hexadecimal digits")
        _require(len(self.signature) == _ED25519_SIGNATURE, "a root signature must have 64 bytes")


# ---------------------------------------------------------------------------------------------------------- enrolment


@dataclass(frozen=True, slots=True)
class EnrolmentRequest:
    """A newcomer's public keys, with a proof that it holds each private one, under one invitation.

    `tls_key` is the SubjectPublicKeyInfo (DER); the proofs are signatures over `privacy.identity.enrolment_bytes`.
    """

    invitation: str
    name: str
    organisation: str
    role: Role
    tls_key: bytes
    protocol_key: bytes
    tls_proof: bytes
    protocol_proof: bytes
    software: str

    def __post_init__(self) -> None:
        """Refuses what cannot be enrolled."""
        _require(_SERIAL.fullmatch(self.invitation) is not None, "an invitation's serial must be 32 hexadecimal digits")
        _name(self.name, "a member's name")
        _name(self.organisation, "an organisation's name")
        _require(0 < len(self.tls_key) <= _MAX_KEY, "a TLS public key must have 1..512 bytes")
        _require(len(self.protocol_key) == _ED25519_KEY, "a protocol key must have 32 bytes")
        _require(0 < len(self.tls_proof) <= _MAX_KEY, "a proof of the TLS key must have 1..512 bytes")
        _require(len(self.protocol_proof) == _ED25519_SIGNATURE, "a proof of the protocol key must have 64 bytes")
        _text(self.software, "a software version", 100)


class EnrolmentState(Enum):
    """Where an enrolment stands."""

    WAITING = "waiting"
    APPROVED = "approved"


@dataclass(frozen=True, slots=True)
class Credential:
    """All that a member needs to be one: its certificate (PEM), its statement, and the coordinator's statement."""

    certificate: bytes
    statement: MembershipStatement
    coordinator: MembershipStatement
    revocations: RevocationList

    def __post_init__(self) -> None:
        """Refuses what is no certificate."""
        _certificate(self.certificate)


@dataclass(frozen=True, slots=True)
class EnrolmentStatus:
    """The coordinator's answer to an enrolment: first `waiting`, then `approved` with the credential."""

    state: EnrolmentState
    credential: Credential | None = None

    def __post_init__(self) -> None:
        """Refuses an approval without a credential."""
        _require(
            (self.state is EnrolmentState.APPROVED) == (self.credential is not None),
            "an approved enrolment, and no other, carries a credential",
        )


# --------------------------------------------------------------------------------------------------------- attendance


@dataclass(frozen=True, slots=True)
class Hello:
    """A site's first word: who it is, what it speaks, and a fresh nonce (32 bytes) for the coordinator to sign."""

    protocol: int
    software: str
    statement: MembershipStatement
    nonce: bytes
    clock: float

    def __post_init__(self) -> None:
        """Refuses a nonce of another length."""
        _text(self.software, "a software version", 100)
        _require(len(self.nonce) == _SHA256, "a nonce must have 32 bytes")
        _counts(self.protocol)
        _seconds(self.clock)


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator's first word: its statement, and its protocol key's signature over the site's nonce."""

    protocol: int
    software: str
    statement: MembershipStatement
    proof: bytes
    revocations: RevocationList
    heartbeat_seconds: float
    clock: float

    def __post_init__(self) -> None:
        """Refuses a proof of another length."""
        _text(self.software, "a software version", 100)
        _require(len(self.proof) == _ED25519_SIGNATURE, "a coordinator's proof must have 64 bytes")
        _require(0 < self.heartbeat_seconds <= 3600, "heartbeats must come within an hour")  # noqa: PLR2004 - an hour
        _counts(self.protocol)
        _seconds(self.heartbeat_seconds, self.clock)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I am here."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether the site takes part in steps: its administrator has paused it, or let it go on. Until said: it does."""

    available: bool


@dataclass(frozen=True, slots=True)
class JobOffer:
    """A job that the site is invited to: the whole job file and the roster of members who may take part.

    `terms` are those of its secure aggregation, as `rostersum.terms.Terms.encode` writes them; empty when it is plain.
    """

    job: str
    text: str
    roster: tuple[MembershipStatement, ...]
    terms: bytes = b""

    def __post_init__(self) -> None:
        """Refuses what is no job."""
        _name(self.job, "a job's id")
        _text(self.text, "a job file", _MAX_TEXT)
        _require(0 < len(self.roster) <= _MAX_LIST, "a job's roster must name its sites")
        _require(len(self.terms) <= _MAX_TEXT, "a job's terms are too long")


@dataclass(frozen=True, slots=True)
class Sealed:
    """A message of the job's secure aggregation, either way: `content` is its own encoding, with its own signature."""

    job: str
    content: bytes

    def __post_init__(self) -> None:
        """Refuses what no message of the protocol is as long as."""
        _name(self.job, "a job's id")
        _require(0 < len(self.content) <= _MAX_SEALED, "a message of secure aggregation must have 1..262144 bytes")


@dataclass(frozen=True, slots=True)
class JobAccepted:
    """The site's policy allows the job and its data meets the contract; `job_digest` is the text it read."""

    job: str
    job_digest: bytes

    def __post_init__(self) -> None:
        """Refuses a digest of another length."""
        _name(self.job, "a job's id")
        _require(len(self.job_digest) == _SHA256, "a job's digest must have 32 bytes")


@dataclass(frozen=True, slots=True)
class JobRefused:
    """The site does not take part, and why; no finding shows a record."""

    job: str
    findings: tuple[Finding, ...]

    def __post_init__(self) -> None:
        """Refuses a refusal without a reason."""
        _name(self.job, "a job's id")
        _require(0 < len(self.findings) <= _MAX_LIST, "a refusal must say why")


class StepKind(Enum):
    """What a step sums over sites."""

    STATISTICS = "statistics"
    TRAIN = "train"
    EVALUATE = "evaluate"


@dataclass(frozen=True, slots=True)
class StepStart:
    """Asks a site for its contribution to one step. `step` grows over the whole job, over kinds and restarts."""

    job: str
    step: int
    attempt: int
    kind: StepKind
    round: int
    model: BlobRef | None
    preparation: BlobRef | None
    length: int
    deadline_seconds: float

    def __post_init__(self) -> None:
        """Refuses what no site could answer."""
        _name(self.job, "a job's id")
        _require(self.step >= 1 and self.attempt >= 0 and self.round >= 0, "steps count from 1, rounds from 0")
        _require(self.length > 0, "a contribution must have a length")
        _require(self.deadline_seconds > 0, "a deadline must lie ahead")
        _counts(self.step, self.attempt, self.round, self.length)
        _seconds(self.deadline_seconds)
        _require(
            self.kind is StepKind.STATISTICS or (self.model is not None and self.preparation is not None),
            "training and evaluation need a model and a preparation",
        )


class Phase(Enum):
    """What a site is doing for a step."""

    DOWNLOADING = "downloading"
    WORKING = "working"
    UPLOADING = "uploading"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a site stands in a step; for people only, nothing waits for it."""

    job: str
    step: int
    phase: Phase

    def __post_init__(self) -> None:
        """Refuses what names no step."""
        _name(self.job, "a job's id")
        _require(self.step >= 1, "steps count from 1")
        _counts(self.step)


@dataclass(frozen=True, slots=True)
class Contribution:
    """A site's contribution is uploaded: the payload's name, its weight, and the seconds that the work took."""

    job: str
    step: int
    attempt: int
    payload: BlobRef
    weight: float
    seconds: float

    def __post_init__(self) -> None:
        """Refuses a weight that cannot weigh."""
        _name(self.job, "a job's id")
        _require(self.step >= 1 and self.attempt >= 0, "steps count from 1")
        _require(0 < self.weight <= 1e15, "a weight must be a positive number of at most 1e15")  # noqa: PLR2004 - stated
        _require(self.seconds >= 0, "work cannot take less than no time")
        _counts(self.step, self.attempt)
        _seconds(self.seconds)


class DeclineCause(Enum):
    """Why a site does not contribute to a step, in the coarsest words that help an operator."""

    POLICY = "policy"
    DATA = "data"
    RESOURCES = "resources"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Declined:
    """The site does not contribute to this step."""

    job: str
    step: int
    attempt: int
    cause: DeclineCause

    def __post_init__(self) -> None:
        """Refuses what names no step."""
        _name(self.job, "a job's id")
        _require(self.step >= 1 and self.attempt >= 0, "steps count from 1")
        _counts(self.step, self.attempt)


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The step is over for this site: counted, or not (`counted` false: late, left out, or the step failed)."""

    job: str
    step: int
    counted: bool

    def __post_init__(self) -> None:
        """Refuses what names no step."""
        _name(self.job, "a job's id")
        _require(self.step >= 1, "steps count from 1")
        _counts(self.step)


class JobState(Enum):
    """Where a job stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def over(self) -> bool:
        """Whether nothing follows."""
        return self in {JobState.FINISHED, JobState.FAILED, JobState.STOPPED}


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job is over; the site may forget what it kept for it."""

    job: str
    state: JobState
    reason: str

    def __post_init__(self) -> None:
        """Refuses an end that is none."""
        _name(self.job, "a job's id")
        _require(self.state.over, "a job ends finished, failed or stopped")
        _text(self.reason, "a reason")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message was refused and nothing changed: what was wrong, who must act, and how."""

    about: str
    problem: str
    who: str
    fix: str

    def __post_init__(self) -> None:
        """Refuses endless texts."""
        for value in (self.about, self.problem, self.who, self.fix):
            _text(value, "a refusal's text", 4000)


FromSite = Hello | Heartbeat | JobAccepted | JobRefused | Progress | Contribution | Declined | Availability | Sealed
FromCoordinator = Welcome | Heartbeat | JobOffer | StepStart | StepEnded | JobEnded | RevocationList | Refusal | Sealed


# ----------------------------------------------------------------------------------------------------------- payloads


@dataclass(frozen=True, slots=True)
class DownloadRequest:
    """Asks for a payload from `offset` on."""

    payload: BlobRef
    offset: int

    def __post_init__(self) -> None:
        """Refuses an offset outside."""
        _require(0 <= self.offset <= self.payload.length, "an offset must lie inside the payload")


@dataclass(frozen=True, slots=True)
class UploadOpen:
    """Announces a payload for a job; the coordinator answers with the offset from which to send."""

    job: str
    payload: BlobRef

    def __post_init__(self) -> None:
        """Refuses what names no job."""
        _require(self.job == "" or _NAME.fullmatch(self.job) is not None, "a job's id is malformed")


@dataclass(frozen=True, slots=True)
class UploadChunk:
    """The next bytes of the announced payload: one that has come in is a view of the message that brought it."""

    content: Bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Refuses an empty or an oversized chunk."""
        _require(0 < len(self.content) <= 2 * 1024 * 1024, "a chunk must have 1 byte to 2 MiB")


@dataclass(frozen=True, slots=True)
class UploadOffset:
    """The coordinator holds this many bytes of the payload already."""

    offset: int

    def __post_init__(self) -> None:
        """Refuses a negative offset."""
        _require(self.offset >= 0, "an offset cannot be negative")
        _counts(self.offset)


@dataclass(frozen=True, slots=True)
class UploadStored:
    """All of the payload is stored durably."""


UploadRequest = UploadOpen | UploadChunk
UploadReply = UploadOffset | UploadStored


# ----------------------------------------------------------------------------------------------------------- operator


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """Adds a job: its text, and the initial model, uploaded before."""

    text: str
    model: BlobRef

    def __post_init__(self) -> None:
        """Refuses endless texts."""
        _text(self.text, "a job file", _MAX_TEXT)


@dataclass(frozen=True, slots=True)
class ListJobs:
    """Asks for all jobs, the newest first."""


@dataclass(frozen=True, slots=True)
class ShowJob:
    """Asks for one job."""

    job: str

    def __post_init__(self) -> None:
        """Refuses an endless text; whether there is such a one, the answer says."""
        _text(self.job, "a job's id", 100)


@dataclass(frozen=True, slots=True)
class StopJob:
    """Asks that a job end now; what it has learnt stays."""

    job: str

    def __post_init__(self) -> None:
        """Refuses an endless text; whether there is such a one, the answer says."""
        _text(self.job, "a job's id", 100)


@dataclass(frozen=True, slots=True)
class ListPending:
    """Asks for enrolments that wait for approval."""


@dataclass(frozen=True, slots=True)
class ApproveEnrolment:
    """Hands in what the root signed for the newcomer of this invitation."""

    invitation: str
    certificate: bytes
    statement: MembershipStatement

    def __post_init__(self) -> None:
        """Refuses what answers no invitation."""
        _require(_SERIAL.fullmatch(self.invitation) is not None, "an invitation's serial must be 32 hexadecimal digits")
        _certificate(self.certificate)


@dataclass(frozen=True, slots=True)
class PublishRevocations:
    """Hands in a newer revocation list; revoked members' streams close at once."""

    revocations: RevocationList


@dataclass(frozen=True, slots=True)
class ListModels:
    """Asks for all final models, the newest first."""


@dataclass(frozen=True, slots=True)
class ShowModel:
    """Asks for one model, by job id or by digest."""

    model: str

    def __post_init__(self) -> None:
        """Refuses an endless text; whether there is such a one, the answer says."""
        _text(self.model, "a model's name", 100)


@dataclass(frozen=True, slots=True)
class ListSites:
    """Asks who is a member and who is here."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's name and value; a metric that has no finite value is left out."""

    name: str
    value: float

    def __post_init__(self) -> None:
        """Refuses a value that is not finite."""
        _text(self.name, "a metric's name", 100)
        finite = type(self.value) is not bool and -_MAX_FLOAT <= self.value <= _MAX_FLOAT
        _require(finite, "a metric's value must be a finite number")


@dataclass(frozen=True, slots=True)
class RoundView:
    """One committed round. Bytes are of payloads, both ways."""

    number: int
    metrics: tuple[Metric, ...]
    sites: int
    seconds: float
    bytes: int

    def __post_init__(self) -> None:
        """Refuses what no round is."""
        _counts(self.number, self.sites, self.bytes)
        _list(self.metrics, "a round's metrics")
        _seconds(self.seconds)


@dataclass(frozen=True, slots=True)
class SiteView:
    """One site as an operator sees it; `trouble` says in words what holds it back, empty when nothing does."""

    name: str
    organisation: str
    connected: bool
    state: str
    last_seen: float
    seconds: float
    bytes: int
    trouble: str

    def __post_init__(self) -> None:
        """Refuses what no site is."""
        _name(self.name, "a member's name")
        _text(self.organisation, "an organisation's name", 100)
        _text(self.state, "a site's state")
        _text(self.trouble, "a site's trouble", _MAX_TROUBLE)
        _seconds(self.last_seen, self.seconds)
        _counts(self.bytes)


@dataclass(frozen=True, slots=True)
class JobView:
    """One job as an operator sees it; times are unix seconds."""

    id: str
    name: str
    state: JobState
    round: int
    rounds: int
    best_round: int
    reason: str
    submitted: float
    seconds: float
    text: str
    sites: tuple[SiteView, ...]
    history: tuple[RoundView, ...]

    def __post_init__(self) -> None:
        """Refuses what no job is."""
        _name(self.id, "a job's id")
        _name(self.name, "a job's name")
        _counts(self.round, self.rounds, self.best_round)
        _text(self.reason, "a reason")
        _seconds(self.submitted, self.seconds)
        _text(self.text, "a job file", _MAX_TEXT)
        _list(self.sites, "a job's list of sites")
        _list(self.history, "a job's history", _MAX_ROUNDS)


@dataclass(frozen=True, slots=True)
class ModelView:
    """A final model: its payload, the preparation that goes with it, and its card (JSON text)."""

    job: str
    name: str
    payload: BlobRef
    round: int
    created: float
    metrics: tuple[Metric, ...]
    card: str

    def __post_init__(self) -> None:
        """Refuses what no model is."""
        _name(self.job, "a job's id")
        _name(self.name, "a model's name")
        _counts(self.round)
        _seconds(self.created)
        _list(self.metrics, "a model's metrics")
        _text(self.card, "a model card", _MAX_TEXT)


@dataclass(frozen=True, slots=True)
class Done:
    """It is done."""


@dataclass(frozen=True, slots=True)
class JobAdded:
    """The job was added under this id."""

    job: str

    def __post_init__(self) -> None:
        """Refuses what names no job."""
        _name(self.job, "a job's id")


@dataclass(frozen=True, slots=True)
class Jobs:
    """Jobs, the newest first."""

    jobs: tuple[JobView, ...]

    def __post_init__(self) -> None:
        """Refuses an endless list."""
        _list(self.jobs, "a list of jobs")


@dataclass(frozen=True, slots=True)
class Pending:
    """Enrolments that wait for approval."""

    requests: tuple[EnrolmentRequest, ...]

    def __post_init__(self) -> None:
        """Refuses an endless list."""
        _list(self.requests, "a list of enrolments")


@dataclass(frozen=True, slots=True)
class Models:
    """Final models, the newest first."""

    models: tuple[ModelView, ...]

    def __post_init__(self) -> None:
        """Refuses an endless list."""
        _list(self.models, "a list of models")


@dataclass(frozen=True, slots=True)
class Sites:
    """Members with the role of a site."""

    sites: tuple[SiteView, ...]

    def __post_init__(self) -> None:
        """Refuses an endless list."""
        _list(self.sites, "a list of sites")


OperatorRequest = (
    SubmitJob
    | ListJobs
    | ShowJob
    | StopJob
    | ListPending
    | ApproveEnrolment
    | PublishRevocations
    | ListModels
    | ShowModel
    | ListSites
)
OperatorReply = JobAdded | Jobs | JobView | Done | Pending | Models | ModelView | Sites
