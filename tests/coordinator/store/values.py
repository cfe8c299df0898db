"""Everything that a store tells, and values of every kind that it may be given."""

import string

from hypothesis import strategies as st

from coordinator.records import JobRecord, JobSite, ModelRecord, Outcome, Share, SitePresence, StepRecord
from coordinator.store import StoreReader
from federation.blobs import BlobRef
from federation.findings import Finding
from federation.messages import EnrolmentRequest, JobState, MembershipStatement, Metric, RevocationList, Role, StepKind

__all__ = ["enrolments", "everything", "jobs", "members", "models", "presences", "revocations", "steps"]


INVITATIONS = tuple(digit * 32 for digit in "abcdef")


def everything(store: StoreReader) -> dict[str, object]:
    """What every method tells; of what is asked for by name, all that there is."""
    jobs_, models_ = store.jobs(), store.models()
    return {
        "members": store.members(),
        "certificates": [store.certificate(member.serial) for member in store.members()],
        "pending": store.pending(),
        "enrolments": [(store.enrolment(name), store.enrolled(name)) for name in INVITATIONS],
        "revocations": store.revocations(),
        "jobs": jobs_,
        "each job": [(store.job(job.id), store.steps(job.id), store.secured(job.id)) for job in jobs_],
        "models": models_,
        "each model": [(store.model(model.job), store.model(model.payload.hex)) for model in models_],
        "referenced": store.referenced_blobs(),
        "presence": store.presence(),
    }


words = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
names = st.text(string.ascii_lowercase, min_size=1, max_size=8)
references = st.builds(BlobRef, st.binary(min_size=32, max_size=32), st.integers(0, 2**40))
numbers = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.floats(0, 1e10)
metrics = st.lists(st.builds(Metric, words, numbers), max_size=4).map(tuple)
shares = st.lists(
    st.builds(Share, names, st.sampled_from(Outcome), words, seconds, st.integers(0, 2**50)),
    max_size=4,
    unique_by=lambda share: share.site,
).map(tuple)
findings = st.lists(st.builds(Finding, words, words, words, st.sampled_from(("refusal", "warning"))), max_size=3).map(
    tuple
)
sites = st.lists(st.builds(JobSite, names, words, findings), max_size=3, unique_by=lambda site: site.site).map(tuple)
members = st.builds(
    MembershipStatement,
    consortium=names,
    serial=st.text("0123456789abcdef", min_size=32, max_size=32),
    name=names,
    organisation=names,
    role=st.sampled_from(Role),
    tls_key=st.binary(min_size=32, max_size=32),
    protocol_key=st.binary(min_size=32, max_size=32),
    not_before=st.integers(1, 2**31),
    not_after=st.integers(2**31 + 1, 2**33),
    signature=st.binary(min_size=64, max_size=64),
)
jobs = st.builds(
    JobRecord,
    id=names,
    name=names,
    text=words,
    submitted=seconds,
    roster=st.lists(members, max_size=3).map(tuple),
    initial_model=references,
    state=st.sampled_from(JobState),
    reason=words,
    started=seconds,
    ended=seconds,
    next_step=st.just(1),
    round=st.integers(0, 99),
    evaluated_round=st.integers(-1, 99),
    best_round=st.integers(0, 99),
    model=st.none() | references,
    best_model=st.none() | references,
    strategy_state=st.none() | references,
    preparation=st.none() | references,
    sites=sites,
)
models = st.builds(ModelRecord, st.just(""), words, references, st.integers(0, 99), seconds, metrics, words)
steps = st.builds(
    StepRecord,
    job=st.just("heart-1"),
    step=st.just(1),
    attempt=st.integers(0, 99),
    kind=st.sampled_from(StepKind),
    round=st.integers(0, 99),
    started=seconds,
    ended=seconds,
    shares=shares,
    model=st.none() | references,
    strategy_state=st.none() | references,
    preparation=st.none() | references,
    metrics=metrics,
    best_round=st.just(0),
    state=st.sampled_from(JobState),
    reason=words,
    final=st.none()
    | st.builds(ModelRecord, st.just("heart-1"), words, references, st.integers(0, 99), seconds, metrics, words),
)
enrolments = st.builds(
    EnrolmentRequest,
    invitation=st.sampled_from(INVITATIONS),
    name=names,
    organisation=names,
    role=st.sampled_from(Role),
    tls_key=st.binary(min_size=1, max_size=64),
    protocol_key=st.binary(min_size=32, max_size=32),
    tls_proof=st.binary(min_size=1, max_size=64),
    protocol_proof=st.binary(min_size=64, max_size=64),
    software=words,
)
revocations = st.builds(
    RevocationList,
    consortium=names,
    version=st.integers(0, 2**62),
    issued=st.integers(0, 2**31),
    serials=st.lists(st.text("0123456789abcdef", min_size=32, max_size=32), max_size=3).map(tuple),
    signature=st.binary(min_size=64, max_size=64),
)
presences = st.lists(
    st.builds(SitePresence, names, st.booleans(), seconds, words, words), max_size=4, unique_by=lambda site: site.name
).map(tuple)
