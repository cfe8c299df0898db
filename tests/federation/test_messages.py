"""Every refusal of `federation.messages`, read by its text: a message cannot exist invalid."""

import ast
import dataclasses
import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from federation import messages
from federation.blobs import BlobRef
from federation.errors import RemoteProtocolError
from federation.findings import Finding
from federation.messages import (
    ApproveEnrolment,
    Contribution,
    Credential,
    DeclineCause,
    Declined,
    DownloadRequest,
    EnrolmentRequest,
    EnrolmentState,
    EnrolmentStatus,
    Hello,
    JobAccepted,
    JobAdded,
    JobEnded,
    JobOffer,
    JobRefused,
    Jobs,
    JobState,
    JobView,
    MembershipStatement,
    Metric,
    Models,
    ModelView,
    Pending,
    Phase,
    Progress,
    Refusal,
    RevocationList,
    Role,
    RoundView,
    Sealed,
    ShowJob,
    ShowModel,
    Sites,
    SiteView,
    StepEnded,
    StepKind,
    StepStart,
    StopJob,
    SubmitJob,
    UploadChunk,
    UploadOffset,
    UploadOpen,
    Welcome,
)

NAN, INFINITY = float("nan"), float("inf")
HUGE = 2**63
YEAR_10000 = 253_402_300_800
MEBIBYTE = 1024 * 1024

PAYLOAD = BlobRef(b"d" * 32, 1000)
STATEMENT = MembershipStatement(
    consortium="heart",
    serial="0f" * 16,
    name="cleveland",
    organisation="clinic",
    role=Role.SITE,
    tls_key=b"t" * 32,
    protocol_key=b"p" * 32,
    not_before=1,
    not_after=2,
    signature=b"s" * 64,
)
REVOCATIONS = RevocationList("heart", 0, 0, ("0f" * 16,), b"s" * 64)
REQUEST = EnrolmentRequest(
    invitation="0f" * 16,
    name="cleveland",
    organisation="clinic",
    role=Role.SITE,
    tls_key=b"t" * 91,
    protocol_key=b"p" * 32,
    tls_proof=b"s" * 70,
    protocol_proof=b"s" * 64,
    software="parley 0.1.0",
)
CREDENTIAL = Credential(b"PEM", STATEMENT, STATEMENT, REVOCATIONS)
WAITING = EnrolmentStatus(EnrolmentState.WAITING)
HELLO = Hello(1, "parley 0.1.0", STATEMENT, b"n" * 32, 1.5)
WELCOME = Welcome(1, "parley 0.1.0", STATEMENT, b"s" * 64, REVOCATIONS, 5.0, 1.5)
OFFER = JobOffer("job-1", "format = 1", (STATEMENT,))
SEALED = Sealed("job-1", b"x")
ACCEPTED = JobAccepted("job-1", b"d" * 32)
REFUSED = JobRefused("job-1", (Finding("data.label", "there is no such column", "add it"),))
STEP = StepStart("job-1", 1, 0, StepKind.TRAIN, 1, PAYLOAD, PAYLOAD, 14, 600.0)
PROGRESS = Progress("job-1", 1, Phase.WORKING)
CONTRIBUTION = Contribution("job-1", 1, 0, PAYLOAD, 199.0, 0.25)
DECLINED = Declined("job-1", 1, 0, DeclineCause.POLICY)
STEP_ENDED = StepEnded("job-1", 1, counted=True)
JOB_ENDED = JobEnded("job-1", JobState.FINISHED, "")
REFUSAL = Refusal("Contribution", "it came late", "the site's administrator", "nothing")
DOWNLOAD = DownloadRequest(PAYLOAD, 0)
OPEN = UploadOpen("", PAYLOAD)
CHUNK = UploadChunk(b"x")
OFFSET = UploadOffset(0)
SUBMIT = SubmitJob("format = 1", PAYLOAD)
SHOW_JOB, STOP_JOB, SHOW_MODEL = ShowJob("job-1"), StopJob("job-1"), ShowModel("f" * 64)
APPROVE = ApproveEnrolment("0f" * 16, b"PEM", STATEMENT)
METRIC = Metric("auc", 0.9)
ROUND = RoundView(0, (METRIC,), 4, 0.5, 1000)
SITE = SiteView("cleveland", "clinic", connected=True, state="", last_seen=0.0, seconds=0.0, bytes=0, trouble="")
JOB = JobView("job-1", "heart", JobState.RUNNING, 1, 40, 0, "", 1.5, 0.5, "format = 1", (SITE,), (ROUND,))
MODEL = ModelView("job-1", "heart", PAYLOAD, 40, 1.5, (METRIC,), "{}")

COUNT = "a count must be a whole number from 0 to 2^63 - 1"
SECONDS = "a time or duration must be a number of seconds from 0 to the year 9999"
BAD_NAME = "must be 1-63 of a-z 0-9 . _ -, not"
DIGITS = "must be 32 hexadecimal digits"
CERTIFICATE = "a certificate must have 1..65536 bytes"
MEMBERSHIP = "a membership must begin before it ends"


@dataclass(frozen=True)
class Case:
    """A valid message, the change that makes it invalid, and the refusal's words."""

    valid: Any
    change: dict[str, Any]
    problem: str

    def __str__(self) -> str:
        """What pytest shows."""
        return f"{type(self.valid).__name__}.{'+'.join(self.change)}: {self.problem[:40]}"


CASES = [
    Case(STATEMENT, {"consortium": "Heart"}, f"a consortium's name {BAD_NAME} 'Heart'"),
    Case(STATEMENT, {"serial": "0F" * 16}, f"a membership's serial {DIGITS}"),
    Case(STATEMENT, {"name": ""}, f"a member's name {BAD_NAME} ''"),
    Case(STATEMENT, {"name": "a" * 100}, f"a member's name {BAD_NAME} '{'a' * 70}'"),
    Case(STATEMENT, {"name": "a\n"}, f"a member's name {BAD_NAME} 'a\\n'"),
    Case(STATEMENT, {"organisation": "-"}, f"an organisation's name {BAD_NAME} '-'"),
    Case(STATEMENT, {"tls_key": b"t" * 31}, "a TLS key's digest must have 32 bytes"),
    Case(STATEMENT, {"protocol_key": b""}, "a protocol key must have 32 bytes"),
    Case(STATEMENT, {"signature": b"s" * 65}, "a root signature must have 64 bytes"),
    Case(STATEMENT, {"not_after": 1}, MEMBERSHIP),
    Case(STATEMENT, {"not_before": 0}, MEMBERSHIP),
    Case(STATEMENT, {"not_before": True}, COUNT),
    Case(STATEMENT, {"not_after": 1.5}, COUNT),
    Case(STATEMENT, {"not_after": YEAR_10000}, SECONDS),
    Case(REVOCATIONS, {"consortium": "a b"}, f"a consortium's name {BAD_NAME} 'a b'"),
    Case(REVOCATIONS, {"version": -1}, "a revocation list's version and time cannot be negative"),
    Case(REVOCATIONS, {"issued": -1}, "a revocation list's version and time cannot be negative"),
    Case(REVOCATIONS, {"version": HUGE}, COUNT),
    Case(REVOCATIONS, {"issued": YEAR_10000}, SECONDS),
    Case(REVOCATIONS, {"serials": ("0f" * 16,) * 10_001}, "a revocation list is too long"),
    Case(REVOCATIONS, {"serials": ("0f" * 16, "0f")}, f"a revoked serial {DIGITS}"),
    Case(REVOCATIONS, {"signature": b""}, "a root signature must have 64 bytes"),
    Case(REQUEST, {"invitation": ""}, f"an invitation's serial {DIGITS}"),
    Case(REQUEST, {"name": "a/b"}, f"a member's name {BAD_NAME} 'a/b'"),
    Case(REQUEST, {"organisation": ".a"}, f"an organisation's name {BAD_NAME} '.a'"),
    Case(REQUEST, {"tls_key": b""}, "a TLS public key must have 1..512 bytes"),
    Case(REQUEST, {"tls_key": b"t" * 513}, "a TLS public key must have 1..512 bytes"),
    Case(REQUEST, {"protocol_key": b"p" * 33}, "a protocol key must have 32 bytes"),
    Case(REQUEST, {"tls_proof": b""}, "a proof of the TLS key must have 1..512 bytes"),
    Case(REQUEST, {"tls_proof": b"s" * 513}, "a proof of the TLS key must have 1..512 bytes"),
    Case(REQUEST, {"protocol_proof": b""}, "a proof of the protocol key must have 64 bytes"),
    Case(REQUEST, {"software": "x" * 101}, "a software version has 101 characters; at most 100 are allowed"),
    Case(CREDENTIAL, {"certificate": b""}, CERTIFICATE),
    Case(CREDENTIAL, {"certificate": bytes(65_537)}, CERTIFICATE),
    Case(WAITING, {"credential": CREDENTIAL}, "an approved enrolment, and no other, carries a credential"),
    Case(WAITING, {"state": EnrolmentState.APPROVED}, "an approved enrolment, and no other, carries a credential"),
    Case(HELLO, {"software": "x" * 101}, "a software version has 101 characters; at most 100 are allowed"),
    Case(HELLO, {"nonce": b"n" * 16}, "a nonce must have 32 bytes"),
    Case(HELLO, {"protocol": True}, COUNT),
    Case(HELLO, {"clock": NAN}, SECONDS),
    Case(HELLO, {"clock": YEAR_10000}, SECONDS),
    Case(WELCOME, {"software": "x" * 101}, "a software version has 101 characters; at most 100 are allowed"),
    Case(WELCOME, {"proof": b""}, "a coordinator's proof must have 64 bytes"),
    Case(WELCOME, {"heartbeat_seconds": 0.0}, "heartbeats must come within an hour"),
    Case(WELCOME, {"heartbeat_seconds": 3601.0}, "heartbeats must come within an hour"),
    Case(WELCOME, {"heartbeat_seconds": NAN}, "heartbeats must come within an hour"),
    Case(WELCOME, {"protocol": -1}, COUNT),
    Case(WELCOME, {"clock": INFINITY}, SECONDS),
    Case(WELCOME, {"heartbeat_seconds": True}, SECONDS),
    Case(OFFER, {"terms": bytes(1024 * 1024 + 1)}, "a job's terms are too long"),
    Case(SEALED, {"job": "Job 1"}, f"a job's id {BAD_NAME} 'Job 1'"),
    Case(SEALED, {"content": b""}, "a message of secure aggregation must have 1..262144 bytes"),
    Case(OFFER, {"job": ""}, f"a job's id {BAD_NAME} ''"),
    Case(OFFER, {"text": "x" * (MEBIBYTE + 1)}, "a job file has 1048577 characters; at most 1048576 are allowed"),
    Case(OFFER, {"roster": ()}, "a job's roster must name its sites"),
    Case(OFFER, {"roster": (STATEMENT,) * 10_001}, "a job's roster must name its sites"),
    Case(ACCEPTED, {"job": "Job"}, f"a job's id {BAD_NAME} 'Job'"),
    Case(ACCEPTED, {"job_digest": b""}, "a job's digest must have 32 bytes"),
    Case(REFUSED, {"job": "../x"}, f"a job's id {BAD_NAME} '../x'"),
    Case(REFUSED, {"findings": ()}, "a refusal must say why"),
    Case(STEP, {"job": ""}, f"a job's id {BAD_NAME} ''"),
    Case(STEP, {"step": 0}, "steps count from 1, rounds from 0"),
    Case(STEP, {"attempt": -1}, "steps count from 1, rounds from 0"),
    Case(STEP, {"round": -1}, "steps count from 1, rounds from 0"),
    Case(STEP, {"length": 0}, "a contribution must have a length"),
    Case(STEP, {"deadline_seconds": 0.0}, "a deadline must lie ahead"),
    Case(STEP, {"deadline_seconds": NAN}, "a deadline must lie ahead"),
    Case(STEP, {"length": HUGE}, COUNT),
    Case(STEP, {"deadline_seconds": INFINITY}, SECONDS),
    Case(STEP, {"model": None}, "training and evaluation need a model and a preparation"),
    Case(STEP, {"preparation": None}, "training and evaluation need a model and a preparation"),
    Case(PROGRESS, {"job": ""}, f"a job's id {BAD_NAME} ''"),
    Case(PROGRESS, {"step": 0}, "steps count from 1"),
    Case(PROGRESS, {"step": True}, COUNT),
    Case(CONTRIBUTION, {"job": ""}, f"a job's id {BAD_NAME} ''"),
    Case(CONTRIBUTION, {"step": 0}, "steps count from 1"),
    Case(CONTRIBUTION, {"attempt": -1}, "steps count from 1"),
    Case(CONTRIBUTION, {"weight": 0.0}, "a weight must be a positive number of at most 1e15"),
    Case(CONTRIBUTION, {"weight": NAN}, "a weight must be a positive number of at most 1e15"),
    Case(CONTRIBUTION, {"weight": INFINITY}, "a weight must be a positive number of at most 1e15"),
    Case(CONTRIBUTION, {"seconds": -0.1}, "work cannot take less than no time"),
    Case(CONTRIBUTION, {"seconds": NAN}, "work cannot take less than no time"),
    Case(CONTRIBUTION, {"step": HUGE}, COUNT),
    Case(CONTRIBUTION, {"seconds": INFINITY}, SECONDS),
    Case(DECLINED, {"job": ""}, f"a job's id {BAD_NAME} ''"),
    Case(DECLINED, {"step": 0}, "steps count from 1"),
    Case(DECLINED, {"attempt": HUGE}, COUNT),
    Case(STEP_ENDED, {"job": ""}, f"a job's id {BAD_NAME} ''"),
    Case(STEP_ENDED, {"step": 0}, "steps count from 1"),
    Case(STEP_ENDED, {"step": HUGE}, COUNT),
    Case(JOB_ENDED, {"job": ""}, f"a job's id {BAD_NAME} ''"),
    Case(JOB_ENDED, {"state": JobState.RUNNING}, "a job ends finished, failed or stopped"),
    Case(JOB_ENDED, {"reason": "x" * 1001}, "a reason has 1001 characters; at most 1000 are allowed"),
    *(
        Case(REFUSAL, {name: "x" * 4001}, "a refusal's text has 4001 characters; at most 4000 are allowed")
        for name in ("about", "problem", "who", "fix")
    ),
    Case(DOWNLOAD, {"offset": -1}, "an offset must lie inside the payload"),
    Case(DOWNLOAD, {"offset": 1001}, "an offset must lie inside the payload"),
    Case(OPEN, {"job": "Job"}, "a job's id is malformed"),
    Case(CHUNK, {"content": b""}, "a chunk must have 1 byte to 2 MiB"),
    Case(CHUNK, {"content": bytes(2 * MEBIBYTE + 1)}, "a chunk must have 1 byte to 2 MiB"),
    Case(OFFSET, {"offset": -1}, "an offset cannot be negative"),
    Case(OFFSET, {"offset": False}, COUNT),
    Case(SUBMIT, {"text": "x" * (MEBIBYTE + 1)}, "a job file has 1048577 characters; at most 1048576 are allowed"),
    Case(SHOW_JOB, {"job": "x" * 101}, "a job's id has 101 characters; at most 100 are allowed"),
    Case(STOP_JOB, {"job": "x" * 101}, "a job's id has 101 characters; at most 100 are allowed"),
    Case(SHOW_MODEL, {"model": "x" * 101}, "a model's name has 101 characters; at most 100 are allowed"),
    Case(APPROVE, {"invitation": "0f"}, f"an invitation's serial {DIGITS}"),
    Case(APPROVE, {"certificate": b""}, CERTIFICATE),
    Case(METRIC, {"name": "x" * 101}, "a metric's name has 101 characters; at most 100 are allowed"),
    *(
        Case(METRIC, {"value": value}, "a metric's value must be a finite number")
        for value in (NAN, INFINITY, -INFINITY, True)
    ),
    Case(ROUND, {"number": -1}, COUNT),
    Case(ROUND, {"sites": True}, COUNT),
    Case(ROUND, {"bytes": HUGE}, COUNT),
    Case(ROUND, {"metrics": (METRIC,) * 10_001}, "a round's metrics has 10001 entries; at most 10000 are allowed"),
    Case(ROUND, {"seconds": NAN}, SECONDS),
    Case(SITE, {"name": ""}, f"a member's name {BAD_NAME} ''"),
    Case(SITE, {"organisation": "x" * 101}, "an organisation's name has 101 characters; at most 100 are allowed"),
    Case(SITE, {"state": "x" * 1001}, "a site's state has 1001 characters; at most 1000 are allowed"),
    Case(SITE, {"trouble": "x" * 65_537}, "a site's trouble has 65537 characters; at most 65536 are allowed"),
    Case(SITE, {"last_seen": INFINITY}, SECONDS),
    Case(SITE, {"seconds": -1.0}, SECONDS),
    Case(SITE, {"bytes": -1}, COUNT),
    Case(JOB, {"id": ""}, f"a job's id {BAD_NAME} ''"),
    Case(JOB, {"name": "Heart"}, f"a job's name {BAD_NAME} 'Heart'"),
    Case(JOB, {"round": -1}, COUNT),
    Case(JOB, {"rounds": HUGE}, COUNT),
    Case(JOB, {"best_round": -1}, COUNT),
    Case(JOB, {"reason": "x" * 1001}, "a reason has 1001 characters; at most 1000 are allowed"),
    Case(JOB, {"submitted": NAN}, SECONDS),
    Case(JOB, {"seconds": INFINITY}, SECONDS),
    Case(JOB, {"text": "x" * (MEBIBYTE + 1)}, "a job file has 1048577 characters; at most 1048576 are allowed"),
    Case(JOB, {"sites": (SITE,) * 10_001}, "a job's list of sites has 10001 entries; at most 10000 are allowed"),
    Case(JOB, {"history": (ROUND,) * 100_001}, "a job's history has 100001 entries; at most 100000 are allowed"),
    Case(MODEL, {"job": ""}, f"a job's id {BAD_NAME} ''"),
    Case(MODEL, {"name": ""}, f"a model's name {BAD_NAME} ''"),
    Case(MODEL, {"round": -1}, COUNT),
    Case(MODEL, {"created": -1.0}, SECONDS),
    Case(MODEL, {"metrics": (METRIC,) * 10_001}, "a model's metrics has 10001 entries; at most 10000 are allowed"),
    Case(MODEL, {"card": "x" * (MEBIBYTE + 1)}, "a model card has 1048577 characters; at most 1048576 are allowed"),
    Case(JobAdded("job-1"), {"job": ""}, f"a job's id {BAD_NAME} ''"),
    Case(Jobs(()), {"jobs": (JOB,) * 10_001}, "a list of jobs has 10001 entries; at most 10000 are allowed"),
    Case(
        Pending(()),
        {"requests": (REQUEST,) * 10_001},
        "a list of enrolments has 10001 entries; at most 10000 are allowed",
    ),
    Case(Models(()), {"models": (MODEL,) * 10_001}, "a list of models has 10001 entries; at most 10000 are allowed"),
    Case(Sites(()), {"sites": (SITE,) * 10_001}, "a list of sites has 10001 entries; at most 10000 are allowed"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_invalid_message_cannot_exist(case: Case) -> None:
    """The valid message with one thing changed is refused, in words that name the thing, and the way out."""
    with pytest.raises(RemoteProtocolError) as refused:
        dataclasses.replace(case.valid, **case.change)
    assert refused.value.problem == case.problem
    assert refused.value.fix == "install the same release of Parley on both sides"


def test_every_refusal_has_a_case() -> None:
    """A message has as many different refusals among the cases as its dataclass has checks, or more."""
    told = Counter(name for name, _ in {(type(case.valid).__name__, case.problem) for case in CASES})
    checks = Counter[str]()
    for definition in ast.parse(inspect.getsource(messages)).body:
        if isinstance(definition, ast.ClassDef):
            calls = [node.func for node in ast.walk(definition) if isinstance(node, ast.Call)]
            checks[definition.name] = sum(isinstance(call, ast.Name) and call.id.startswith("_") for call in calls)
    assert not {name: asked for name, asked in checks.items() if told[name] < asked}


def test_the_bounds_themselves_are_allowed() -> None:
    """The largest count, time, text, chunk and weight make messages."""
    assert UploadOffset(HUGE - 1).offset == HUGE - 1
    assert dataclasses.replace(HELLO, clock=YEAR_10000 - 1).clock == YEAR_10000 - 1
    assert len(dataclasses.replace(SUBMIT, text="x" * MEBIBYTE).text) == MEBIBYTE
    assert len(UploadChunk(bytes(2 * MEBIBYTE)).content) == 2 * MEBIBYTE
    assert dataclasses.replace(CONTRIBUTION, weight=1e15).weight == 1e15
    assert Metric("loss", -1.7976931348623157e308).value == -1.7976931348623157e308


def test_statistics_need_no_model() -> None:
    """The statistics step comes before there is a model or a preparation."""
    step = dataclasses.replace(STEP, kind=StepKind.STATISTICS, model=None, preparation=None)
    assert (step.model, step.preparation) == (None, None)


@pytest.mark.parametrize("state", JobState)
def test_only_finished_failed_and_stopped_jobs_are_over(state: JobState) -> None:
    """Nothing follows after these three states, and after no other."""
    assert state.over == (state in {JobState.FINISHED, JobState.FAILED, JobState.STOPPED})
