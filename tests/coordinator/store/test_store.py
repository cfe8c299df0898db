"""The store keeps exactly what it was given, in whole transactions, and refuses what contradicts it."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis.strategies import none

from coordinator.records import JobRecord, JobSite, ModelRecord, Outcome, Secured, Share, SitePresence, StepRecord
from coordinator.store import Store, url_in
from federation.blobs import BlobRef
from federation.errors import ConfigurationError, LocalProtocolError
from federation.findings import Finding
from federation.messages import EnrolmentRequest, JobState, MembershipStatement, Metric, RevocationList, Role
from tests.coordinator.store.values import everything, jobs, models, steps

MakeJob = Callable[..., JobRecord]
MakeStep = Callable[..., StepRecord]
MakeMember = Callable[..., MembershipStatement]

INVITATION = "a" * 32


def request(name: str = "cleveland", invitation: str = INVITATION) -> EnrolmentRequest:
    """A newcomer's request."""
    return EnrolmentRequest(invitation, name, name, Role.SITE, b"spki", b"p" * 32, b"proof", b"q" * 64, "0.1.0")


def revocations(version: int, *serials: str, consortium: str = "heart") -> RevocationList:
    """A revocation list."""
    return RevocationList(consortium, version, 5, serials, b"s" * 64)


def final(job: str, content: bytes = b"final") -> ModelRecord:
    """A job's final model."""
    return ModelRecord(job, "heart", BlobRef.of(content), 1, 1009.0, (Metric("accuracy", 0.75),), '{"format": 1}')


# ---------------------------------------------------------------------------------------------------- the consortium


def test_members_come_back_in_the_order_in_which_they_came(store: Store, member: MakeMember) -> None:
    """Statement and certificate of each member are those that were put in."""
    one, two = member("hungary", 2), member("cleveland", 1)
    store.add_member(one, b"pem 2", 10.0)
    store.add_member(two, b"pem 1", 11.0)
    assert store.members() == (one, two)
    assert [store.certificate(each.serial) for each in (one, two)] == [b"pem 2", b"pem 1"]
    assert store.certificate("f" * 32) is None


def test_a_serial_is_kept_once(store: Store, member: MakeMember) -> None:
    """A second member with the same serial is refused and the first one stays."""
    store.add_member(member(), b"pem", 10.0)
    for other, certificate in ((member("hungary", 1), b"pem"), (member(), b"other")):
        with pytest.raises(LocalProtocolError, match=f"a member with serial {1:032x} is kept already"):
            store.add_member(other, certificate, 11.0)
    assert (store.members(), store.certificate(f"{1:032x}")) == ((member(),), b"pem")


def test_an_enrolment_waits_until_it_is_approved(store: Store, member: MakeMember) -> None:
    """Approval makes the newcomer a member and takes its request off the waiting list, but not out of the store."""
    assert (store.pending(), store.enrolment(INVITATION), store.enrolled(INVITATION)) == ((), None, None)
    store.add_enrolment(request(), 10.0)
    store.add_enrolment(request(), 11.0)
    assert (store.pending(), store.enrolled(INVITATION)) == ((request(),), None)
    store.approve_enrolment(INVITATION, member(), b"pem", 12.0)
    assert (store.pending(), store.enrolment(INVITATION)) == ((), request())
    assert (store.enrolled(INVITATION), store.members()) == (member(), (member(),))


def test_an_invitation_is_good_for_one_request(store: Store) -> None:
    """Another request under the same invitation is refused and the first one keeps waiting."""
    store.add_enrolment(request(), 10.0)
    with pytest.raises(LocalProtocolError, match=f"invitation {INVITATION} was used already, for cleveland"):
        store.add_enrolment(request("hungary"), 11.0)
    assert store.pending() == (request(),)


def test_an_approval_that_fails_halfway_leaves_the_enrolment_waiting(store: Store, member: MakeMember) -> None:
    """Member and enrolment change together or not at all."""
    store.add_enrolment(request(), 10.0)
    store.add_member(member("hungary", 1), b"pem", 11.0)
    with pytest.raises(LocalProtocolError, match="is kept already"):
        store.approve_enrolment(INVITATION, member("cleveland", 1), b"pem", 12.0)
    assert store.pending() == (request(),)


@pytest.mark.parametrize("approved", [False, True], ids=["unknown", "approved already"])
def test_only_a_waiting_enrolment_can_be_approved(store: Store, member: MakeMember, approved: bool) -> None:  # noqa: FBT001 - a parameter
    """There is nothing to approve under an unknown or a used invitation."""
    if approved:
        store.add_enrolment(request(), 10.0)
        store.approve_enrolment(INVITATION, member(), b"pem", 11.0)
    members = store.members()
    with pytest.raises(LocalProtocolError, match=f"no enrolment waits under invitation {INVITATION}"):
        store.approve_enrolment(INVITATION, member("hungary", 2), b"pem", 12.0)
    assert store.members() == members


def test_a_newer_revocation_list_replaces_the_older(store: Store) -> None:
    """Only the newest list is kept; the same list again is no error."""
    assert store.revocations() is None
    for version in (0, 3, 3):
        store.put_revocations(revocations(version, *["b" * 32][:version]))
    assert store.revocations() == revocations(3, "b" * 32)


@pytest.mark.parametrize(
    "older", [revocations(2), revocations(3), revocations(4, consortium="banks")], ids=["older", "altered", "foreign"]
)
def test_no_list_takes_a_revocation_back(store: Store, older: RevocationList) -> None:
    """An older list, another one of the same version, or another consortium's is refused."""
    store.put_revocations(revocations(3, "b" * 32))
    with pytest.raises(LocalProtocolError, match=f"list {older.version} of .* cannot replace list 3 of heart"):
        store.put_revocations(older)
    assert store.revocations() == revocations(3, "b" * 32)


# -------------------------------------------------------------------------------------------------------------- jobs


def test_jobs_are_told_the_newest_first(store: Store, job: MakeJob) -> None:
    """The order is that of submission, whatever the ids."""
    for name, submitted in (("heart-2", 2.0), ("heart-3", 1.0), ("heart-1", 3.0)):
        store.add_job(job(name, submitted))
    assert [each.id for each in store.jobs()] == ["heart-1", "heart-2", "heart-3"]
    assert store.job("heart-9") is None


def test_a_job_is_added_once(store: Store, job: MakeJob) -> None:
    """A second job of the same id is refused."""
    store.add_job(job())
    with pytest.raises(LocalProtocolError, match="there is a job heart-1 already"):
        store.add_job(job(submitted=7.0))
    assert store.jobs() == (job(),)


def test_a_job_is_added_before_its_first_step(store: Store, job: MakeJob) -> None:
    """A record that tells of steps which no transaction holds is refused."""
    with pytest.raises(LocalProtocolError, match="job heart-1 tells of steps before it was added"):
        store.add_job(replace(job(), next_step=3))
    assert store.jobs() == ()


def test_a_job_starts_once_and_ends_once(store: Store, job: MakeJob) -> None:
    """The first RUNNING is the start; after the end no state follows."""
    store.add_job(job())
    store.set_job_state("heart-1", JobState.RUNNING, "", 5.0)
    store.set_job_state("heart-1", JobState.RUNNING, "", 6.0)
    store.set_job_state("heart-1", JobState.STOPPED, "asked by the operator", 7.0)
    over = store.job("heart-1")
    assert over == replace(job(), state=JobState.STOPPED, reason="asked by the operator", started=5.0, ended=7.0)
    with pytest.raises(LocalProtocolError, match="job heart-1 is over: stopped"):
        store.set_job_state("heart-1", JobState.RUNNING, "", 8.0)
    with pytest.raises(LocalProtocolError, match="there is no job heart-9"):
        store.set_job_state("heart-9", JobState.RUNNING, "", 8.0)
    assert store.job("heart-1") == over


def test_a_site_answers_anew_in_its_own_place(store: Store, job: MakeJob) -> None:
    """A later answer replaces the site's earlier one; the others and their order stay."""
    finding = Finding("data.columns.chol", "fewer than 5 values lie outside of the range", "check the unit")
    asked = tuple(JobSite(member.name) for member in job().roster)
    store.add_job(replace(job(), sites=asked[:2]))
    store.set_job_site("heart-1", JobSite("cleveland", "refused", (finding,)))
    store.set_job_site("heart-1", JobSite("switzerland", "accepted"))
    store.set_job_site("heart-1", JobSite("cleveland", "accepted", (replace(finding, level="warning"),)))
    kept = store.job("heart-1")
    assert kept is not None
    assert kept.sites == (
        JobSite("cleveland", "accepted", (replace(finding, level="warning"),)),
        JobSite("hungary"),
        JobSite("switzerland", "accepted"),
    )
    with pytest.raises(LocalProtocolError, match="there is no job heart-9"):
        store.set_job_site("heart-9", JobSite("cleveland"))


# ------------------------------------------------------------------------------------------------------------- steps


def test_a_step_moves_its_job_on(store: Store, job: MakeJob, step: MakeStep) -> None:
    """After a training step and its evaluation the job knows its next step, model, metrics and best round."""
    store.add_job(job())
    preparation = BlobRef.of(b"preparation")
    store.commit_step(replace(step(1), preparation=preparation))
    store.commit_step(step(2))
    assert store.job("heart-1") == replace(
        job(),
        state=JobState.RUNNING,
        started=step(1).started,
        next_step=3,
        round=1,
        evaluated_round=1,
        best_round=1,
        model=step(1).model,
        best_model=step(1).model,
        strategy_state=step(1).strategy_state,
        preparation=preparation,
        metrics=((1, step(2).metrics),),
    )
    assert store.steps("heart-1") == (replace(step(1), preparation=preparation), step(2))
    assert store.steps("heart-9") == ()


def test_the_best_model_stays_when_later_rounds_are_worse(store: Store, job: MakeJob, step: MakeStep) -> None:
    """The best model is that of the best round, also when an older round is called the best later on."""
    store.add_job(job())
    for number in (1, 2, 3):
        store.commit_step(replace(step(number), best_round=number // 2))
    store.commit_step(replace(step(4), best_round=1))
    worse = store.job("heart-1")
    assert worse is not None
    assert (worse.best_round, worse.best_model, worse.model) == (1, step(1).model, step(3).model)
    store.commit_step(replace(step(5), best_round=2))
    store.commit_step(replace(step(6), best_round=1))
    older = store.job("heart-1")
    assert older is not None
    assert (older.best_round, older.best_model) == (1, step(1).model)
    store.commit_step(replace(step(7), best_round=0))
    initial = store.job("heart-1")
    assert initial is not None
    assert (initial.best_round, initial.best_model) == (0, job().initial_model)


def test_a_best_round_that_never_trained_is_refused(store: Store, job: MakeJob, step: MakeStep) -> None:
    """The step is refused whole, because there is no such model."""
    store.add_job(job())
    with pytest.raises(LocalProtocolError, match="step 1 of job heart-1 calls round 7 the best, which has no model"):
        store.commit_step(replace(step(1), best_round=7))
    assert store.job("heart-1") == job()


@pytest.mark.parametrize("number", [1, 4], ids=["committed already", "not yet due"])
def test_a_step_is_committed_once_and_in_its_turn(store: Store, job: MakeJob, step: MakeStep, number: int) -> None:
    """Any other step than the job's next is refused and changes nothing."""
    store.add_job(job())
    store.commit_step(step(1))
    store.commit_step(step(2))
    before = store.job("heart-1"), store.steps("heart-1")
    with pytest.raises(
        LocalProtocolError, match=f"step {number} of job heart-1 cannot be committed: its next step is 3"
    ):
        store.commit_step(replace(step(number), attempt=7))
    assert (store.job("heart-1"), store.steps("heart-1")) == before
    store.commit_step(step(3))


def test_a_job_that_is_over_takes_no_step(store: Store, job: MakeJob, step: MakeStep) -> None:
    """A step that was under way when the job was stopped does not count."""
    store.add_job(job())
    store.set_job_state("heart-1", JobState.STOPPED, "asked by the operator", 7.0)
    with pytest.raises(LocalProtocolError, match="job heart-1 is over: stopped"):
        store.commit_step(step(1))
    with pytest.raises(LocalProtocolError, match="there is no job heart-9"):
        store.commit_step(step(1, job="heart-9"))
    assert store.steps("heart-1") == ()


def test_a_site_has_at_most_one_share_in_a_step(store: Store, job: MakeJob, step: MakeStep) -> None:
    """A step that counts a site twice is refused whole: neither the job nor any share of it is kept."""
    store.add_job(job())
    twice = (*step(1).shares, Share("cleveland", Outcome.COUNTED))
    with pytest.raises(LocalProtocolError, match=r"(?i)the store keeps something else already: .*unique constraint"):
        store.commit_step(replace(step(1), shares=twice))
    assert (store.job("heart-1"), store.steps("heart-1")) == (job(), ())


def test_the_last_step_brings_the_model(store: Store, job: MakeJob, step: MakeStep) -> None:
    """State, reason, end and final model are committed with the step that ends the job."""
    store.add_job(job())
    store.commit_step(step(1))
    last = replace(step(2), state=JobState.FINISHED, reason="all 1 rounds done", final=final("heart-1"))
    store.commit_step(last)
    ended = store.job("heart-1")
    assert ended is not None
    assert (ended.state, ended.reason, ended.ended) == (JobState.FINISHED, "all 1 rounds done", last.ended)
    assert store.steps("heart-1")[-1] == last
    assert store.models() == (final("heart-1"),)


def test_a_job_ends_with_its_own_model(store: Store, job: MakeJob, step: MakeStep) -> None:
    """A final model of another job is refused."""
    store.add_job(job())
    with pytest.raises(LocalProtocolError, match="step 1 of job heart-1 ends with a model of heart-2"):
        store.commit_step(replace(step(1), final=final("heart-2")))
    assert store.job("heart-1") == job()


# ------------------------------------------------------------------------------------------------ secure aggregation


def test_a_secure_jobs_terms_and_standing_are_kept(store: Store, job: MakeJob) -> None:
    """The terms from the start; the standing as it was last told, also after the job's end."""
    store.add_job(job(), b"terms")
    assert store.secured("heart-1") == Secured(b"terms", b"")
    store.set_standing("heart-1", b"gathering")
    store.set_job_state("heart-1", JobState.STOPPED, "asked", 12.0)
    store.set_standing("heart-1", b"closed")
    assert store.secured("heart-1") == Secured(b"terms", b"closed")
    assert repr(store.secured("heart-1")) == "Secured()"  # not shown by accident in a log


def test_a_job_that_sums_openly_has_no_standing(store: Store, job: MakeJob, step: MakeStep) -> None:
    """None is told of it, and none is taken: a step that brings one is not committed."""
    store.add_job(job())
    assert store.secured("heart-1") is None
    for bring in (lambda: store.set_standing("heart-1", b"x"), lambda: store.commit_step(step(1), b"x")):
        with pytest.raises(LocalProtocolError, match="job heart-1 sums without secure aggregation: it has no standing"):
            bring()
    assert store.job("heart-1") == job()
    with pytest.raises(LocalProtocolError, match="there is no job heart-2"):
        store.set_standing("heart-2", b"x")


def test_a_job_is_added_once_with_its_terms(store: Store, job: MakeJob) -> None:
    """The same again changes nothing; with other terms, or without, it is another job."""
    store.add_job(job(), b"terms")
    store.add_job(job(), b"terms")
    for other in (b"other", None):
        with pytest.raises(LocalProtocolError, match="there is a job heart-1 already"):
            store.add_job(job(), other)
    assert store.secured("heart-1") == Secured(b"terms")


def test_a_step_brings_its_standing(store: Store, job: MakeJob, step: MakeStep) -> None:
    """With the step or not at all; a step that is committed already sets no newer standing back."""
    store.add_job(job(), b"terms")
    store.commit_step(step(1), b"one")
    with pytest.raises(LocalProtocolError, match="step 3 of job heart-1 cannot be committed"):
        store.commit_step(step(3), b"three")
    assert store.secured("heart-1") == Secured(b"terms", b"one")
    store.set_standing("heart-1", b"one and a half")
    store.commit_step(step(1), b"one")
    assert store.secured("heart-1") == Secured(b"terms", b"one and a half")
    store.commit_step(step(2))
    assert store.secured("heart-1") == Secured(b"terms", b"one and a half")


# ------------------------------------------------------------------------------------------------------------- again


def test_every_method_may_be_called_again(
    store: Store, changes: tuple[Callable[[Store], None], ...], tmp_path: Path
) -> None:
    """Whoever did not hear that it was kept asks again: the second call succeeds, and changes nothing."""
    (tmp_path / "once").mkdir()
    with Store(url_in(tmp_path / "once")) as once:
        for change in changes:
            change(once)
            change(store)
            change(store)
        assert everything(store) == everything(once)
    assert [each.step for each in store.steps("heart-1")] == [1, 2]


def test_a_stop_is_told_once(store: Store, job: MakeJob) -> None:
    """Another stop than the one that is kept is refused: the job was over before."""
    store.add_job(job())
    store.set_job_state("heart-1", JobState.STOPPED, "asked", 12.0)
    with pytest.raises(LocalProtocolError, match="job heart-1 is over: stopped"):
        store.set_job_state("heart-1", JobState.STOPPED, "asked", 13.0)


# ------------------------------------------------------------------------------------------------------------ models


def finish(store: Store, record: JobRecord, step: StepRecord, model: ModelRecord) -> None:
    """Runs a job of one step to its end."""
    store.add_job(record)
    store.commit_step(replace(step, job=record.id, state=JobState.FINISHED, reason="done", final=model))


def test_a_model_is_found_by_its_job_or_its_digest(store: Store, job: MakeJob, step: MakeStep) -> None:
    """The id of the job or the first digits of the digest, in either case of letters, name the model."""
    finish(store, job(), step(1), final("heart-1"))
    digest = final("heart-1").payload.hex
    for name in ("heart-1", digest, digest[:7], digest[:8].upper()):
        assert store.model(name) == final("heart-1")
    for name in ("heart-2", "0" * 8, "", "%", digest + "0"):
        assert store.model(name) is None


def test_digits_that_fit_several_models_are_refused(store: Store, job: MakeJob, step: MakeStep) -> None:
    """The refusal says how many fit; equal models of two jobs are one, told by the newest."""
    first = b"0"
    shared = BlobRef.of(first).hex[0]
    second = next(c for n in range(1, 256) if BlobRef.of(c := str(n).encode()).hex[0] == shared)
    finish(store, job("heart-1"), step(1), final("heart-1", first))
    finish(store, job("heart-2"), step(1), replace(final("heart-2", first), created=2000.0))
    assert store.model(shared) == replace(final("heart-2", first), created=2000.0)
    finish(store, job("heart-3"), step(1), final("heart-3", second))
    with pytest.raises(ConfigurationError, match=f"2 models have digests that begin with {shared}.*give more digits"):
        store.model(shared)


def test_what_a_job_still_needs_is_referenced(store: Store, job: MakeJob, step: MakeStep) -> None:
    """A running job needs all its payloads; a finished one its model and preparation; a stopped one what it learnt."""
    preparation = BlobRef.of(b"preparation")
    for name in ("heart-1", "heart-2", "heart-3"):
        store.add_job(job(name))
        store.commit_step(replace(step(1, job=name), preparation=preparation, model=BlobRef.of(name.encode())))
    learnt = {name: BlobRef.of(name.encode()).digest for name in ("heart-1", "heart-2", "heart-3")}
    running = {job().initial_model.digest, BlobRef.of(b"state 1").digest, preparation.digest}
    assert store.referenced_blobs() == running | set(learnt.values())
    for name in ("heart-1", "heart-2"):
        store.commit_step(replace(step(2, job=name), state=JobState.FINISHED, final=final(name), best_round=0))
    store.set_job_state("heart-3", JobState.STOPPED, "asked", 9.0)
    kept = {preparation.digest, final("heart-1").payload.digest, learnt["heart-3"]}
    assert store.referenced_blobs() == kept


# ---------------------------------------------------------------------------------------------------------- presence


def test_presence_is_told_per_site(store: Store) -> None:
    """What is told of a site replaces what was; other sites' presence stays."""
    away = SitePresence("switzerland", connected=False, last_seen=5.0, state="away", trouble="gone for 60 s")
    here = SitePresence("cleveland", connected=True, last_seen=6.0, state="training")
    store.set_presence((away, here))
    assert store.presence() == (here, away)
    store.set_presence((replace(away, connected=True, state="asked", trouble=""),))
    store.set_presence(())
    assert store.presence() == (here, replace(away, connected=True, state="asked", trouble=""))


@pytest.mark.parametrize("text", ["\0", "\ufdd0", "\ufdd00\0001\ufdd01", "a\0b"])
def test_every_text_is_kept(store: Store, text: str) -> None:
    """A site's words may hold what PostgreSQL's text cannot, and the marks that stand for it."""
    told = SitePresence("cleveland", connected=True, last_seen=6.0, state=text, trouble=text)
    store.set_presence((told,))
    assert store.presence() == (told,)


def test_names_have_one_order_in_every_database(store: Store, job: MakeJob) -> None:
    """Byte by byte, whatever language the database sorts by."""
    names = ["a-b", "a.b", "a0b", "a_b", "ab"]
    told = tuple(SitePresence(name, connected=True, last_seen=6.0, state="here") for name in names)
    store.set_presence(told[::-1])
    for name in names:
        store.add_job(job(name))
    assert store.presence() == told
    assert [each.id for each in store.jobs()] == names[::-1]


def test_a_value_that_no_database_holds_is_our_mistake(store: Store, job: MakeJob) -> None:
    """It is not taken for a trouble of the disk's or server's, which would be tried again for ever."""
    with pytest.raises(LocalProtocolError, match="the store cannot keep a value"):
        store.add_job(replace(job(), round=2**70))
    assert store.jobs() == ()


# -------------------------------------------------------------------------------------------------------- properties

fresh = itertools.count()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One store for all examples, on each kind of database; every example has a job of its own."""
    url = url_in(tmp_path_factory.mktemp("store"))
    if request.param == "postgresql":
        server = request.getfixturevalue("postgresql")
        url = server.url(server.database(like=request.getfixturevalue("migrated")))
    with Store(url) as opened:
        yield opened


@settings(deadline=None, max_examples=30)
@given(record=jobs)
def test_a_job_comes_back_exactly(shared: Store, record: JobRecord) -> None:
    """Every field of a new job survives, with roster and sites in their order."""
    record = replace(record, id=f"job-{next(fresh)}")
    shared.add_job(record)
    assert shared.job(record.id) == record


@settings(deadline=None, max_examples=30)
@given(record=steps, final=none() | models)
def test_a_step_comes_back_exactly(shared: Store, record: StepRecord, final: ModelRecord | None) -> None:
    """Every field of a step survives, with shares and metrics in their order, and the final model with it."""
    job = f"job-{next(fresh)}"
    shared.add_job(JobRecord(job, "heart", "", 1.0, (), BlobRef.of(b"initial")))
    model = None if final is None else replace(final, job=job)
    record = replace(record, job=job, final=model)
    shared.commit_step(record)
    assert shared.steps(job) == (record,)
    assert shared.model(job) == model
