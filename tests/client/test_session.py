from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.policy import Policy
from client.session import Session
from client.session_events import (
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
    SiteIdentity,
    Upload,
    Uploaded,
    Work,
    Worked,
    WorkFailed,
)
from federation import job as jobs
from federation.blobs import BlobRef
from federation.errors import IdentityError, RemoteProtocolError
from federation.findings import Finding
from federation.messages import (
    PROTOCOL,
    Availability,
    Contribution,
    DeclineCause,
    Declined,
    FromCoordinator,
    FromSite,
    Heartbeat,
    Hello,
    JobAccepted,
    JobEnded,
    JobOffer,
    JobRefused,
    JobState,
    MembershipStatement,
    Phase,
    Progress,
    Refusal,
    RevocationList,
    Role,
    StepEnded,
    StepKind,
    StepStart,
    Welcome,
)
from privacy.identity import MemberKeys, Root, request_for, sign_welcome

NOW = 1_800_000_000
NONCE = bytes(range(32))
OPEN = Policy(datasets=("*",), tasks=("*",), models=("*",), jobs=("*",), allow_plain_aggregation=True)
MODEL, PREPARATION = BlobRef.of(b"model"), BlobRef.of(b"preparation")

T = TypeVar("T")


@dataclass(frozen=True)
class Consortium:
    """A root, a coordinator, and what the root says of sites."""

    root: Root
    coordinator: MembershipStatement
    coordinator_keys: MemberKeys
    sites: dict[str, MembershipStatement]

    @classmethod
    def found(cls, name: str = "heart") -> "Consortium":
        """A new consortium of a coordinator and three hospitals."""
        root = Root.create(name, NOW)
        keys = MemberKeys.generate()
        sites = {site: enrolled(root, site) for site in ("athens", "berlin", "cork")}
        return cls(root, enrolled(root, "hub", Role.COORDINATOR, keys), keys, sites)

    def revocations(self, version: int = 1, *serials: str) -> RevocationList:
        """A list that the root signed."""
        return self.root.sign_revocations(version, NOW, serials)

    def identity(self, site: str = "athens", held: int = 1) -> SiteIdentity:
        """A site that holds the revocation list of this version."""
        return SiteIdentity(self.sites[site], self.root.public, self.revocations(held))

    def welcome(self, site: str = "athens", nonce: bytes = NONCE) -> Welcome:
        """What the coordinator says to a site's hello."""
        serials = self.sites[site].serial, self.coordinator.serial
        proof = sign_welcome(self.coordinator_keys.protocol, nonce, *serials)
        return Welcome(PROTOCOL, "0.1.0", self.coordinator, proof, self.revocations(), 5.0, NOW)

    def offer(self, text: str, job: str = "risk-1", *sites: str) -> JobOffer:
        """A job for these sites, or for all."""
        return JobOffer(job, text, tuple(self.sites[site] for site in sites or self.sites))


def enrolled(root: Root, name: str, role: Role = Role.SITE, keys: MemberKeys | None = None) -> MembershipStatement:
    """A member that the root approved."""
    return root.approve(request_for(name, name, role, keys or MemberKeys.generate(), "test"), NOW)[1]


@dataclass
class Site:
    """A session with an agent that keeps what it is told to do, and does it when a test says so."""

    consortium: Consortium
    session: Session
    doing: Effect | None = None
    effects: list[Effect] = field(default_factory=list)

    def feed(self, event: Event) -> tuple[Effect, ...]:
        """Something happens; the session never asks for two pieces of work at once."""
        effects = self.session.receive(event, NOW)
        for effect in effects:
            match effect:
                case CheckData() | Fetch() | Work() | Upload():
                    assert self.doing is None, f"{effect} while {self.doing}"
                    self.doing = effect
                case Forget(""):
                    self.doing = None
                case _:
                    pass
        self.effects.extend(effects)
        return effects

    def hear(self, message: FromCoordinator, policy: Policy = OPEN) -> tuple[Effect, ...]:
        """The coordinator says something."""
        return self.feed(Received(message, policy))

    def attend(self) -> "Site":
        """Connects and is welcomed."""
        self.feed(Connected(NONCE, "0.1.0"))
        self.hear(self.consortium.welcome())
        return self

    def finish(self, content: str = "result", findings: tuple[Finding, ...] = ()) -> tuple[Effect, ...]:
        """What is being done ends well."""
        done, self.doing = self.doing, None
        match done:
            case CheckData(offer):
                return self.feed(DataChecked(offer.job, findings))
            case Fetch(step):
                return self.feed(Fetched(step))
            case Work(step):
                ref = BlobRef(BlobRef.of(f"{content} {step.job} {step.step}".encode()).digest, step.length)
                return self.feed(Worked(step, ref, 100.0, 2.0))
            case Upload(step):
                return self.feed(Uploaded(step))
            case _:
                raise AssertionError(f"nothing is being done: {done}")

    def fail(self, cause: DeclineCause = DeclineCause.RESOURCES, problem: str = "no memory") -> tuple[Effect, ...]:
        """What is being done fails."""
        done, self.doing = self.doing, None
        match done:
            case CheckData(offer):
                return self.feed(WorkFailed(offer, cause, problem))
            case Fetch(step) | Work(step) | Upload(step):
                return self.feed(WorkFailed(step, cause, problem))
            case _:
                raise AssertionError(f"nothing is being done: {done}")

    def accept(self, text: str, job: str = "risk-1") -> None:
        """Is offered a job and accepts it."""
        self.hear(self.consortium.offer(text, job))
        self.finish()

    def said(self, kind: type[T]) -> list[T]:
        """All messages of one kind to the coordinator."""
        return [e.message for e in self.effects if isinstance(e, Send) and isinstance(e.message, kind)]

    def did(self, kind: type[T]) -> list[T]:
        """All effects of one kind."""
        return [effect for effect in self.effects if isinstance(effect, kind)]


def start(step: int = 1, attempt: int = 0, job: str = "risk-1", kind: StepKind = StepKind.TRAIN) -> StepStart:
    """A question of the coordinator's."""
    return StepStart(job, step, attempt, kind, 1, MODEL, PREPARATION, 400, 60.0)


def sent(*messages: FromSite) -> tuple[Send, ...]:
    """The effects that say this."""
    return tuple(Send(message) for message in messages)


def texts(effects: tuple[Effect, ...]) -> list[str]:
    """What the site's administrator is told."""
    return [effect.text for effect in effects if isinstance(effect, Note)]


@pytest.fixture(scope="session")
def consortium() -> Consortium:
    """The consortium of these tests."""
    return Consortium.found()


@pytest.fixture(scope="session")
def other() -> Consortium:
    """Another consortium of the same name and members."""
    return Consortium.found()


@pytest.fixture(scope="session")
def text(job_text: Callable[..., str]) -> str:
    """The job file that is offered."""
    return job_text()


@pytest.fixture
def site(consortium: Consortium) -> Site:
    """A site that attends."""
    return Site(consortium, Session(consortium.identity())).attend()


# --------------------------------------------------------------------------------------------------------- the welcome


def test_a_site_says_hello_and_attends_when_the_welcome_holds(consortium: Consortium) -> None:
    """It says who it is and what it speaks with a fresh nonce, and attends once that nonce came back signed."""
    site = Site(consortium, Session(consortium.identity()))

    assert site.feed(Connected(NONCE, "0.1.0")) == sent(
        Hello(PROTOCOL, "0.1.0", consortium.sites["athens"], NONCE, NOW)
    )
    assert not site.session.attending

    assert texts(site.hear(consortium.welcome())) == ["attending hub as athens"]
    assert site.session.attending
    assert not site.did(KeepRevocations)


Forge = Callable[[Consortium, Consortium], Welcome]


@pytest.mark.parametrize(
    ("forge", "words"),
    [
        (
            lambda ours, _: replace(ours.welcome(), protocol=2, software="0.9.0"),
            "version 2 of the protocol (0.9.0), this site 1. To fix (Parley's developers): install the same release",
        ),
        (
            lambda ours, theirs: replace(theirs.welcome(), revocations=ours.revocations()),
            "the membership of hub was not signed by heart's root",
        ),
        (
            lambda ours, theirs: replace(ours.welcome(), revocations=theirs.revocations()),
            "the revocation list was not signed by heart's root",
        ),
        (
            lambda ours, _: replace(ours.welcome(), proof=bytes(64)),
            "the coordinator hub did not prove that it holds its protocol key",
        ),
        (
            lambda ours, _: ours.welcome(nonce=bytes(32)),
            "the coordinator hub did not prove that it holds its protocol key",
        ),
        (
            lambda ours, _: ours.welcome("berlin"),
            "the coordinator hub did not prove that it holds its protocol key",
        ),
        (
            lambda ours, _: replace(ours.welcome(), revocations=ours.revocations(2, ours.coordinator.serial)),
            "the membership of hub was revoked (revocation list 2)",
        ),
        (
            lambda ours, _: replace(ours.welcome(), revocations=ours.revocations(0)),
            "the revocation list has version 0, and version 1 is held already",
        ),
        (
            lambda ours, _: replace(ours.welcome(), statement=ours.sites["berlin"]),
            "berlin poses as a coordinator; its role is site",
        ),
        (
            lambda ours, _: replace(ours.welcome(), statement=enrolled(ours.root, "hub", Role.COORDINATOR)),
            "the coordinator hub did not prove that it holds its protocol key",
        ),
    ],
    ids=[
        "protocol",
        "root",
        "revocations-root",
        "proof",
        "nonce",
        "other-site",
        "revoked",
        "older-revocations",
        "site-as-coordinator",
        "other-key",
    ],
)
def test_a_welcome_that_does_not_hold_ends_the_attendance(
    consortium: Consortium, other: Consortium, forge: Forge, words: str
) -> None:
    """The reason says what was wrong; nothing that such a coordinator says later is taken in."""
    site = Site(consortium, Session(consortium.identity()))
    site.feed(Connected(NONCE, "0.1.0"))

    effects = site.hear(forge(consortium, other))

    (reason,) = [effect.reason for effect in effects if isinstance(effect, Disconnect)]
    assert words in str(reason)
    assert not site.session.attending
    assert site.hear(consortium.welcome()) == ()
    assert not site.did(KeepRevocations)


def test_an_expired_coordinator_is_not_attended(consortium: Consortium) -> None:
    """Its membership is judged by this site's own clock."""
    site = Site(consortium, Session(consortium.identity()))
    site.feed(Connected(NONCE, "0.1.0"))

    (end,) = site.session.receive(Received(consortium.welcome(), OPEN), NOW + 400 * 24 * 3600)

    assert isinstance(end, Disconnect)
    assert "the membership of hub expired on" in str(end.reason)


def test_another_word_before_the_welcome_ends_the_attendance(consortium: Consortium, text: str) -> None:
    """A coordinator that has not proven itself offers nothing."""
    site = Site(consortium, Session(consortium.identity()))
    site.feed(Connected(NONCE, "0.1.0"))

    (end,) = site.hear(consortium.offer(text))

    assert isinstance(end, Disconnect)
    assert str(end.reason) == "the coordinator must say welcome first"
    assert isinstance(end.reason, RemoteProtocolError)


def test_a_newer_revocation_list_comes_with_the_welcome(consortium: Consortium) -> None:
    """It is kept, and an older one is refused from then on."""
    site = Site(consortium, Session(consortium.identity()))
    site.feed(Connected(NONCE, "0.1.0"))
    newer = consortium.revocations(2, consortium.sites["cork"].serial)

    site.hear(replace(consortium.welcome(), revocations=newer))

    assert site.did(KeepRevocations) == [KeepRevocations(newer)]
    (note,) = texts(site.hear(consortium.revocations(1)))
    assert "version 1, and version 2 is held already" in note


def test_a_second_welcome_is_ignored(site: Site, consortium: Consortium) -> None:
    """It changes nothing and the administrator is told."""
    assert texts(site.hear(consortium.welcome())) == ["the coordinator said welcome twice; ignored"]
    assert site.session.attending


def test_words_after_the_stream_has_ended_are_not_heard(site: Site, consortium: Consortium, text: str) -> None:
    """What is left of an old stream starts nothing."""
    site.feed(Disconnected())

    assert site.hear(consortium.offer(text)) == ()


# ----------------------------------------------------------------------------------------------------------- the offer


def test_an_offer_is_accepted_when_policy_roster_and_data_allow(site: Site, consortium: Consortium, text: str) -> None:
    """The data is checked first; the acceptance names the very text that was read."""
    offer = consortium.offer(text)

    assert site.hear(offer) == (CheckData(offer),)
    assert site.finish() == (*sent(JobAccepted("risk-1", jobs.digest(text))), Note("accepted job risk-1"))


@pytest.mark.parametrize(
    ("rule", "path"),
    [
        ({"datasets": ()}, "data.dataset"),
        ({"tasks": ()}, "task.kind"),
        ({"models": ()}, "model.name"),
        ({"jobs": ()}, "name"),
        ({"minimum_sites": 4}, "cohort.quorum"),
        ({"allow_plain_aggregation": False}, "privacy.secure_aggregation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_policy_forbids_is_refused_unchecked(
    site: Site, consortium: Consortium, text: str, rule: dict[str, object], path: str
) -> None:
    """Each rule refuses by itself, as the file states it at that moment; the data is not even opened."""
    effects = site.hear(consortium.offer(text), OPEN.model_copy(update=rule))

    assert site.doing is None
    (refusal,) = site.said(JobRefused)
    assert [finding.path for finding in refusal.findings] == [path]
    assert texts(effects) == [f"refused job risk-1: {path}: {refusal.findings[0].problem} ({refusal.findings[0].fix})"]


def test_a_roster_with_an_invented_member_is_refused(
    site: Site, consortium: Consortium, other: Consortium, text: str
) -> None:
    """The coordinator cannot add members: each must be signed by this consortium's root."""
    offer = consortium.offer(text)

    site.hear(replace(offer, roster=(*offer.roster[:2], other.sites["cork"])))

    (refusal,) = site.said(JobRefused)
    assert refusal.findings[0].path == "roster"
    assert "the membership of cork was not signed by heart's root" in refusal.findings[0].problem


def test_a_roster_with_a_revoked_member_is_refused(site: Site, consortium: Consortium, text: str) -> None:
    """Revocation holds for rosters from the moment that the list is here."""
    site.hear(consortium.revocations(2, consortium.sites["cork"].serial))

    site.hear(consortium.offer(text))

    assert "the membership of cork was revoked" in site.said(JobRefused)[0].findings[0].problem


def test_a_roster_without_this_site_is_refused(site: Site, consortium: Consortium, text: str) -> None:
    """A site takes part in no job that is not its own."""
    site.hear(consortium.offer(text, "risk-1", "berlin", "cork"))

    assert site.said(JobRefused)[0].findings[0].problem == "the roster of job risk-1 does not hold this site"
    assert site.doing is None


def test_an_unknown_plug_in_is_refused_by_name(
    site: Site, consortium: Consortium, job_text: Callable[..., str]
) -> None:
    """Code never travels: what is not installed here cannot be learned here."""
    site.hear(consortium.offer(job_text(model="transformer")))

    (finding,) = site.said(JobRefused)[0].findings
    assert finding.path == "job"
    assert "model.name" in finding.problem
    assert "transformer" in finding.problem


def test_a_job_file_with_very_many_faults_is_refused_in_words_that_travel(site: Site, consortium: Consortium) -> None:
    """The refusal is cut to what a message carries, and the session goes on."""
    site.hear(consortium.offer("\n".join(f"key_{number} = 1" for number in range(60))))

    (finding,) = site.said(JobRefused)[0].findings
    assert len(finding.problem) == 1000


def test_data_that_does_not_meet_the_contract_is_refused(site: Site, consortium: Consortium, text: str) -> None:
    """Findings that refuse are told to the coordinator; warnings stay at home."""
    refusal = Finding("data.columns.age", "the column is missing", "add it")
    warning = Finding("data.label", "there is one class only", "nothing", "warning")
    site.hear(consortium.offer(text))

    effects = site.finish(findings=(warning, refusal))

    assert site.said(JobRefused) == [JobRefused("risk-1", (refusal,))]
    assert texts(effects) == [
        "job risk-1: data.label: there is one class only (nothing)",
        "refused job risk-1: data.columns.age: the column is missing (add it)",
    ]


def test_warnings_are_noted_here_and_refuse_nothing(site: Site, consortium: Consortium, text: str) -> None:
    """One class only is for this site's administrator to know; the coordinator hears of an acceptance."""
    warning = Finding("data.label", "there is one class only", "nothing", "warning")
    site.hear(consortium.offer(text))

    effects = site.finish(findings=(warning,))

    assert Note("job risk-1: data.label: there is one class only (nothing)", trouble=True) in effects
    assert site.said(JobAccepted)
    assert not site.said(JobRefused)


def test_a_check_that_cannot_be_made_refuses_the_job(site: Site, consortium: Consortium, text: str) -> None:
    """A data set that cannot be read is a refusal with its problem, however long that is."""
    site.hear(consortium.offer(text))

    site.fail(problem="the file is gone " * 100)

    (finding,) = site.said(JobRefused)[0].findings
    assert finding.path == "data"
    assert finding.problem.startswith("the file is gone")


def test_very_many_findings_are_cut_to_what_a_message_carries(site: Site, consortium: Consortium, text: str) -> None:
    """A table with thousands of wrong columns is refused in one message."""
    site.hear(consortium.offer(text))

    site.finish(findings=tuple(Finding(f"data.columns[{n}]", "missing", "add it") for n in range(12_000)))

    assert len(site.said(JobRefused)[0].findings) == 100


def test_an_accepted_job_is_accepted_again_without_a_second_check(
    site: Site, consortium: Consortium, text: str
) -> None:
    """After a reconnect the same offer is answered at once."""
    site.accept(text)
    site.feed(Disconnected())
    site.attend()

    effects = site.hear(consortium.offer(text))

    assert effects == sent(JobAccepted("risk-1", jobs.digest(text)))
    assert len(site.did(CheckData)) == 1


def test_a_check_that_ends_while_away_is_answered_after_the_reconnect(
    site: Site, consortium: Consortium, text: str
) -> None:
    """Nothing is said into a line that is cut; the acceptance is said when the job is offered again."""
    site.hear(consortium.offer(text))
    site.feed(Disconnected())
    assert sent() == tuple(effect for effect in site.finish() if isinstance(effect, Send))
    site.attend()

    assert site.hear(consortium.offer(text)) == sent(JobAccepted("risk-1", jobs.digest(text)))


def test_an_offer_of_other_terms_under_a_known_name_is_ignored(
    site: Site, consortium: Consortium, text: str, job_text: Callable[..., str]
) -> None:
    """What was accepted stays what it was."""
    site.accept(text)

    effects = site.hear(consortium.offer(job_text(name="other")))

    assert effects == (Note("job risk-1 was offered again with other terms; ignored", trouble=True),)


def test_a_refused_job_is_checked_anew_when_it_is_offered_again(site: Site, consortium: Consortium, text: str) -> None:
    """The administrator may have changed the policy in between."""
    site.hear(consortium.offer(text), Policy())

    site.hear(consortium.offer(text))

    assert site.doing == CheckData(consortium.offer(text))


def test_a_check_of_a_job_that_ended_disturbs_nothing(site: Site, consortium: Consortium, text: str) -> None:
    """Its late answer neither accepts a job nor frees hands that are busy with another."""
    site.accept(text, "other-1")
    site.hear(consortium.offer(text))
    site.hear(JobEnded("risk-1", JobState.STOPPED, "stopped by olga"))
    site.hear(start(job="other-1"))

    assert site.feed(DataChecked("risk-1", ())) == ()

    assert [message.job for message in site.said(JobAccepted)] == ["other-1"]
    site.finish()
    assert isinstance(site.doing, Work)


# ----------------------------------------------------------------------------------------------------------- the steps


def test_a_step_of_a_job_that_was_not_accepted_is_declined(site: Site, consortium: Consortium, text: str) -> None:
    """Neither an unknown job nor one whose check is under way is worked on."""
    site.hear(start(3, 1, "unknown-1"))
    site.hear(consortium.offer(text))
    site.hear(start(3, 1))

    declined = site.said(Declined)
    assert declined == [Declined(job, 3, 1, DeclineCause.POLICY) for job in ("unknown-1", "risk-1")]
    assert not site.did(Fetch)


def test_a_step_is_fetched_worked_uploaded_and_told(site: Site, text: str) -> None:
    """In that order, each once, with the progress told on the way."""
    site.accept(text)
    site.effects.clear()
    step = start()

    site.hear(step)
    site.finish()
    site.finish()
    site.finish()

    work, upload = site.did(Work)[0], site.did(Upload)[0]
    assert work.offer.text == text
    assert site.effects == [
        Send(Progress("risk-1", 1, Phase.DOWNLOADING)),
        Fetch(step),
        Send(Progress("risk-1", 1, Phase.WORKING)),
        work,
        Keep(Remembered(work.offer, Worked(step, upload.payload, 100.0, 2.0))),
        Send(Progress("risk-1", 1, Phase.UPLOADING)),
        upload,
        Send(Contribution("risk-1", 1, 0, upload.payload, 100.0, 2.0)),
    ]


@pytest.mark.parametrize("finished", [0, 1, 2], ids=["fetching", "working", "uploading"])
def test_a_step_that_fails_is_declined_with_its_cause(site: Site, text: str, finished: int) -> None:
    """The coordinator learns the coarse cause, the administrator what happened, and the next step is taken."""
    site.accept(text)
    site.hear(start(1, 2))
    for _ in range(finished):
        site.finish()

    effects = site.fail(DeclineCause.RESOURCES, "no memory left on this machine")

    assert Send(Declined("risk-1", 1, 2, DeclineCause.RESOURCES)) in effects
    assert texts(effects) == ["job risk-1: no memory left on this machine"]
    site.hear(start(2))
    assert isinstance(site.doing, Fetch)


def test_a_failure_of_work_that_nobody_does_is_noted_only(site: Site, text: str) -> None:
    """A late word about abandoned work declines nothing and lets nothing go."""
    site.accept(text)
    site.hear(start())

    for abandoned in (start(1, 0, "other-1"), start(2), site.consortium.offer(text)):
        assert site.feed(WorkFailed(abandoned, DeclineCause.INTERNAL, "cut short")) == (
            Note(f"job {abandoned.job}: cut short", trouble=True),
        )
    site.finish()
    assert isinstance(site.doing, Work)


def test_the_same_step_asked_again_is_uploaded_again_and_not_trained_again(site: Site, text: str) -> None:
    """The contribution got lost with the line: the result that is still here answers the same question."""
    site.accept(text)
    site.hear(start())
    for _ in range(3):
        site.finish()
    site.feed(Disconnected())
    site.attend()

    site.hear(replace(start(), deadline_seconds=20.0))
    site.finish()

    assert (len(site.did(Work)), len(site.did(Upload))) == (1, 2)
    first, second = site.said(Contribution)
    assert first == second


def test_work_goes_on_while_the_line_is_cut(site: Site, text: str) -> None:
    """Asked again in the middle of its training, the site does not begin anew; the newest question is answered."""
    site.accept(text)
    site.hear(start(1, 0))
    site.finish()
    assert isinstance(site.doing, Work)
    assert site.feed(Disconnected()) == ()
    site.attend()

    assert site.hear(replace(start(1, 1), deadline_seconds=20.0)) == ()
    site.finish()
    site.finish()

    assert len(site.did(Work)) == 1
    assert [(told.step, told.attempt) for told in site.said(Contribution)] == [(1, 1)]


def test_a_result_made_while_away_waits_until_it_is_asked_for(site: Site, text: str) -> None:
    """No update leaves the site for a coordinator that has not proven itself on this line."""
    site.accept(text)
    site.hear(start())
    site.finish()
    site.feed(Disconnected())
    site.feed(Connected(NONCE, "0.1.0"))
    site.effects.clear()

    assert [type(effect) for effect in site.finish()] == [Keep]

    site.hear(site.consortium.welcome())
    assert not site.did(Upload)
    site.hear(start())
    assert len(site.did(Upload)) == 1
    site.finish()
    assert len(site.said(Contribution)) == 1


def test_a_result_made_before_the_step_is_asked_again_waits_for_that(site: Site, text: str) -> None:
    """After a reconnect the coordinator may have gone on: it is not offered what it has not asked for on this line."""
    site.accept(text)
    site.hear(start())
    site.finish()
    site.feed(Disconnected())
    site.feed(Connected(NONCE, "0.1.0"))
    site.hear(site.consortium.welcome())

    site.finish()

    assert not site.did(Upload)
    site.hear(start())
    assert len(site.did(Upload)) == 1


def test_a_result_outlives_the_site(site: Site, text: str) -> None:
    """Killed after its work was done, a site holds its data against the contract again and does no work twice."""
    site.accept(text)
    site.hear(start())
    site.finish()
    site.finish()
    (kept,) = site.did(Keep)

    again = Site(site.consortium, Session(site.consortium.identity(), (kept.remembered,))).attend()
    again.accept(text)
    again.hear(start(1, 1))
    again.finish()

    assert [len(again.did(kind)) for kind in (CheckData, Fetch, Work, Upload)] == [1, 0, 0, 1]
    assert again.said(Contribution) == [Contribution("risk-1", 1, 1, kept.remembered.result.payload, 100.0, 2.0)]


def test_a_result_of_another_step_is_no_answer_after_a_restart(site: Site, text: str) -> None:
    """What was kept for one step is not sent to the next."""
    site.accept(text)
    site.hear(start())
    site.finish()
    site.finish()
    (kept,) = site.did(Keep)

    again = Site(site.consortium, Session(site.consortium.identity(), (kept.remembered,))).attend()
    again.accept(text)
    again.hear(start(2))

    assert isinstance(again.doing, Fetch)


def test_a_policy_that_was_tightened_holds_from_the_next_offer(site: Site, text: str) -> None:
    """A job accepted earlier is refused when it is offered again under a policy that forbids it."""
    site.accept(text)

    effects = site.hear(site.consortium.offer(text), Policy())

    assert any(isinstance(each, Send) and isinstance(each.message, JobRefused) for each in effects)
    site.hear(start())
    assert [each.cause for each in site.said(Declined)] == [DeclineCause.POLICY]


@pytest.mark.parametrize("finished", [0, 1, 2], ids=["fetching", "working", "uploading"])
def test_work_for_a_job_that_is_refused_after_all_is_let_go(site: Site, text: str, finished: int) -> None:
    """Its step is stopped and its next one not begun; late words about it change nothing, and another job goes on."""
    site.accept(text)
    site.accept(text, "other-2")
    site.hear(start())
    site.hear(start(1, 0, "other-2"))
    for _ in range(finished):
        site.finish()
    let_go = site.doing

    effects = site.hear(site.consortium.offer(text), Policy())

    assert effects[0] == Forget("")
    assert isinstance(site.doing, Fetch)
    assert site.doing.step.job == "other-2"
    under_way = site.doing
    site.doing = let_go
    site.finish()
    site.doing = under_way
    for _ in range(3):
        site.finish()
    assert [each.job for each in site.said(Contribution)] == ["other-2"]


@pytest.mark.parametrize("finished", [0, 2], ids=["fetching", "uploading"])
def test_a_transfer_is_let_go_with_the_line(site: Site, text: str, finished: int) -> None:
    """It begins again, from where it was cut off, when the step is asked again; queued steps wait for that as well."""
    site.accept(text)
    site.accept(text, "other-1")
    site.hear(start())
    site.hear(start(job="other-1"))
    for _ in range(finished):
        site.finish()

    assert site.feed(Disconnected()) == (Forget(""),)

    site.attend()
    assert site.doing is None
    site.hear(start())
    assert isinstance(site.doing, Upload if finished else Fetch)


def test_a_newer_attempt_replaces_a_queued_one(site: Site, text: str) -> None:
    """Of a step that waits behind another job's work only the newest attempt is done."""
    site.accept(text)
    site.accept(text, "other-1")
    site.hear(start(job="other-1"))

    site.hear(start(1, 0))
    site.hear(start(1, 1))
    for _ in range(6):
        site.finish()

    assert site.doing is None
    assert [(told.job, told.attempt) for told in site.said(Contribution)] == [("other-1", 0), ("risk-1", 1)]


def test_a_newer_step_replaces_the_one_under_way(site: Site, text: str) -> None:
    """What is being done for a step that is over is stopped."""
    site.accept(text)
    site.hear(start(1))
    site.finish()

    effects = site.hear(start(2))

    assert effects[0] == Forget("")
    assert site.doing == Fetch(start(2))
    for _ in range(3):
        site.finish()
    assert [told.step for told in site.said(Contribution)] == [2]


def test_a_result_does_not_answer_another_question(site: Site, text: str) -> None:
    """The same step from another model, as after a restored backup of the coordinator, is worked anew."""
    site.accept(text)
    site.hear(start())
    for _ in range(3):
        site.finish()

    site.hear(replace(start(), model=BlobRef.of(b"another model")))

    assert isinstance(site.doing, Fetch)


def test_an_attempt_that_did_not_count_leaves_the_result(site: Site, text: str) -> None:
    """The next attempt at the same step is answered by uploading what is here."""
    site.accept(text)
    site.hear(start(1, 0))
    for _ in range(3):
        site.finish()
    site.hear(StepEnded("risk-1", 1, counted=False))

    site.hear(start(1, 1))
    site.finish()

    assert len(site.did(Work)) == 1
    assert [told.attempt for told in site.said(Contribution)] == [0, 1]


def test_words_about_another_phase_of_a_step_are_late(site: Site, text: str) -> None:
    """A transfer that was let go and ends all the same neither trains a second time nor cuts the training short."""
    site.accept(text)
    site.hear(start())
    site.finish()

    assert site.feed(Fetched(start())) == ()
    assert site.feed(Uploaded(start())) == ()

    site.finish()
    site.finish()
    assert len(site.said(Contribution)) == 1


def test_a_paused_site_puts_its_step_down_and_says_so(site: Site, text: str) -> None:
    """What it is asked meanwhile is declined as paused, by its administrator; once it goes on it takes steps up."""
    site.accept(text)
    site.hear(start())
    site.finish()

    effects = site.feed(Paused(paused=True))

    assert effects[:2] == (Forget(""), Send(Availability(available=False)))
    assert site.feed(Paused(paused=True)) == ()
    assert site.hear(start(2)) == sent(Declined("risk-1", 2, 0, DeclineCause.PAUSED))
    assert site.doing is None
    assert site.feed(Paused(paused=False))[0] == Send(Availability(available=True))
    assert site.feed(Paused(paused=False)) == ()
    site.hear(start(3))
    assert site.doing == Fetch(start(3))


def test_a_result_that_was_being_uploaded_when_the_site_was_paused_answers_the_step_asked_again(
    site: Site, text: str
) -> None:
    """Pausing costs no work that was done."""
    site.accept(text)
    site.hear(start())
    site.finish()
    site.finish()
    site.feed(Paused(paused=True))
    site.feed(Paused(paused=False))
    site.hear(start(attempt=1))
    assert isinstance(site.doing, Upload)


def test_a_paused_site_checks_its_data_once_it_goes_on(site: Site, consortium: Consortium, text: str) -> None:
    """A check under way is put down, one offered meanwhile waits, and both are answered in their order."""
    site.hear(consortium.offer(text))
    site.feed(Paused(paused=True))
    assert site.doing is None
    site.hear(consortium.offer(text, "risk-2"))
    assert site.doing is None
    site.feed(Paused(paused=False))
    site.finish()
    site.finish()
    assert [accepted.job for accepted in site.said(JobAccepted)] == ["risk-1", "risk-2"]


def test_a_site_that_is_paused_says_so_when_it_attends(consortium: Consortium) -> None:
    """Paused before its start, or while it was away: right after the welcome, before it answers any offer."""
    site = Site(consortium, Session(consortium.identity()))
    assert [effect for effect in site.feed(Paused(paused=True)) if isinstance(effect, Send)] == []
    site.attend()
    assert site.said(Availability) == [Availability(available=False)]
    site.feed(Disconnected())
    site.feed(Paused(paused=False))
    site.attend()
    assert site.said(Availability) == [Availability(available=False)]


def test_a_step_that_ended_without_this_site_is_stopped(site: Site, text: str) -> None:
    """Its work is let go, the administrator is told, and the next in the queue begins."""
    site.accept(text)
    site.accept(text, "other-1")
    site.hear(start())
    site.finish()
    site.hear(start(job="other-1"))

    effects = site.hear(StepEnded("risk-1", 1, counted=False))

    assert effects[0] == Forget("")
    assert texts(effects) == ["job risk-1: step 1 ended without this site"]
    assert site.doing == Fetch(start(job="other-1"))


def test_a_queued_step_that_ended_is_not_begun(site: Site, text: str) -> None:
    """Nothing is trained for a step that is over."""
    site.accept(text)
    site.accept(text, "other-1")
    site.hear(start(job="other-1"))
    site.hear(start())

    site.hear(StepEnded("risk-1", 1, counted=False))
    for _ in range(3):
        site.finish()

    assert site.doing is None
    assert [told.job for told in site.said(Contribution)] == ["other-1"]


def test_two_jobs_are_worked_one_after_the_other(site: Site, text: str) -> None:
    """In the order in which they asked; an offer that comes meanwhile is checked in its turn."""
    site.accept(text)
    site.accept(text, "other-1")

    site.hear(start())
    site.hear(start(job="other-1"))
    site.hear(site.consortium.offer(text, "third-1"))
    for _ in range(7):
        site.finish()

    assert site.doing is None
    assert [told.job for told in site.said(Contribution)] == ["risk-1", "other-1"]
    assert site.said(JobAccepted)[-1].job == "third-1"


def test_a_job_that_ended_is_forgotten(site: Site, text: str) -> None:
    """Its work stops, its payloads go, the reason is told, and its later steps are declined."""
    site.accept(text)
    site.hear(start())

    effects = site.hear(JobEnded("risk-1", JobState.FINISHED, "all 5 rounds done"))

    assert effects == (Forget(""), Forget("risk-1"), Note("job risk-1 finished: all 5 rounds done"))
    site.hear(start(2))
    assert site.said(Declined) == [Declined("risk-1", 2, 0, DeclineCause.POLICY)]
    assert site.hear(JobEnded("risk-1", JobState.FINISHED, "")) == ()


def test_a_queued_step_of_a_job_that_ended_is_not_begun(site: Site, text: str) -> None:
    """It goes with its job; what another job asked is not touched."""
    site.accept(text)
    site.accept(text, "other-1")
    site.hear(start(job="other-1"))
    site.hear(start())

    effects = site.hear(JobEnded("risk-1", JobState.STOPPED, "stopped by olga"))

    assert effects == (Forget("risk-1"), Note("job risk-1 stopped: stopped by olga"))
    for _ in range(3):
        site.finish()
    assert site.doing is None
    assert [told.job for told in site.said(Contribution)] == ["other-1"]


def test_words_about_unknown_jobs_and_refusals_change_nothing(site: Site) -> None:
    """A refusal is told to the administrator with what to do; a heartbeat is nothing to tell."""
    assert site.hear(StepEnded("unknown-1", 1, counted=True)) == ()
    assert site.hear(Heartbeat()) == ()
    refusal = Refusal("step 1 of risk-1", "not finite", "the site's administrator", "check the data")
    assert texts(site.hear(refusal)) == [
        "the coordinator refused step 1 of risk-1: not finite. To fix (the site's administrator): check the data"
    ]


# --------------------------------------------------------------------------------------------------------- revocations


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _, theirs: theirs.revocations(9), "was not signed by heart's root, but by another root or nobody"),
        (lambda ours, _: ours.revocations(0), "has version 0, and version 1 is held already"),
        (lambda ours, _: ours.revocations(1, "0" * 32), "there are two different revocation lists of version 1"),
    ],
    ids=["another-root", "older", "forked"],
)
def test_a_revocation_list_that_cannot_be_is_refused(
    site: Site,
    consortium: Consortium,
    other: Consortium,
    make: Callable[[Consortium, Consortium], RevocationList],
    words: str,
) -> None:
    """The one that is held stays, the administrator is told, and the attendance goes on."""
    (note,) = texts(site.hear(make(consortium, other)))

    assert note.startswith("a revocation list was refused: ")
    assert words in note
    assert not site.did(KeepRevocations)
    assert site.session.attending


def test_a_newer_revocation_list_is_kept(site: Site, consortium: Consortium, text: str) -> None:
    """Jobs with the revoked member go on, and the administrator is told which."""
    site.accept(text)
    newer = consortium.revocations(2, consortium.sites["cork"].serial)

    effects = site.hear(newer)

    assert effects[0] == KeepRevocations(newer)
    (note,) = texts(effects)
    assert note.startswith("job risk-1 goes on without a revoked member: the membership of cork was revoked")


def test_a_coordinator_that_is_revoked_is_left_at_once(site: Site, consortium: Consortium, text: str) -> None:
    """The list that it passed on itself ends the attendance, for good; what was under way for it is not sent."""
    site.accept(text)
    site.hear(start())
    newer = consortium.revocations(2, consortium.coordinator.serial)

    effects = site.hear(newer)

    assert effects[:2] == (KeepRevocations(newer), Forget(""))
    (end,) = [effect for effect in effects if isinstance(effect, Disconnect)]
    assert isinstance(end.reason, IdentityError)
    assert str(end.reason).startswith("the membership of the coordinator hub was revoked")
    assert not site.session.attending


# ------------------------------------------------------------------------------------------------------------ disorder

_JOBS = st.sampled_from(("one-1", "two-1", "bad-1", "strange-1"))
_STEPS = st.integers(1, 3)

_WORDS: st.SearchStrategy[tuple[object, ...]] = st.one_of(
    st.tuples(st.just("offer"), _JOBS),
    st.tuples(st.just("start"), _STEPS, st.integers(0, 1), _JOBS),
    st.tuples(st.just("ended"), _JOBS, _STEPS, st.booleans()),
    st.tuples(st.just("over"), _JOBS),
    st.tuples(st.just("revocations"), st.integers(0, 3)),
    st.tuples(st.sampled_from(("finish", "finish", "fail", "warn", "cut", "connect", "welcome", "beat", "refusal"))),
)


def _message(  # noqa: PLR0911 - one for each message
    site: Site, text: str, unknown: str, word: tuple[object, ...]
) -> FromCoordinator | None:
    """What the coordinator says in this word of disorder, if it is one of its."""
    match word:
        case ("offer", "strange-1"):
            return site.consortium.offer(text, "strange-1", "berlin", "cork")
        case ("offer", str(job)):
            return site.consortium.offer(unknown if job == "bad-1" else text, job)
        case ("start", int(step), int(attempt), str(job)):
            return start(step, attempt, job)
        case ("ended", str(job), int(step), bool(counted)):
            return StepEnded(job, step, counted=counted)
        case ("over", str(job)):
            return JobEnded(job, JobState.STOPPED, "stopped")
        case ("revocations", int(version)):
            return site.consortium.revocations(version)
        case ("welcome",):
            return site.consortium.welcome()
        case ("beat",):
            return Heartbeat()
        case ("refusal",):
            return Refusal("x", "y", "z", "")
        case _:
            return None


def _happen(site: Site, word: tuple[object, ...]) -> None:
    """What happens here in this word of disorder, if it is nothing that the coordinator says."""
    match word:
        case ("finish",) if site.doing is not None:
            site.finish()
        case ("warn",) if site.doing is not None:
            site.finish(findings=(Finding("data", "one class only", "nothing", "warning"),))
        case ("fail",) if site.doing is not None:
            site.fail()
        case ("cut",):
            site.feed(Disconnected())
        case ("connect",):
            site.feed(Disconnected())
            site.feed(Connected(NONCE, "0.1.0"))
        case _:
            pass


@given(words=st.lists(_WORDS, max_size=60))
@settings(deadline=None, max_examples=50)
def test_no_order_of_words_makes_a_site_contribute_unasked(
    consortium: Consortium, job_text: Callable[..., str], words: list[tuple[object, ...]]
) -> None:
    """Nothing raises, no two works run at once, and whatever is sent is for a job that was accepted and is not over."""
    site = Site(consortium, Session(consortium.identity())).attend()
    accepted: set[str] = set()
    seen = 0

    for word in words:
        attended = site.session.attending
        message = _message(site, job_text(), job_text(model="transformer"), word)
        if message is None:
            _happen(site, word)
        else:
            site.hear(message)
        for effect in site.effects[seen:]:
            match effect:
                case Send(JobAccepted(job)):
                    accepted.add(job)
                case Work(step) | Upload(step) | Fetch(step):
                    assert step.job in accepted
                    assert site.session.attending
                case Send(Contribution(job)):
                    assert job in accepted
                case Send(message):
                    assert attended or site.session.attending or isinstance(message, Hello)
                case _:
                    pass
        if word[0] == "over" and site.session.attending:
            accepted.discard(str(word[1]))
        seen = len(site.effects)

    assert accepted <= {"one-1", "two-1"}


@given(
    events=st.lists(
        st.sampled_from(
            [
                DataChecked("one-1", ()),
                Fetched(start(1, 0, "one-1")),
                Worked(start(1, 0, "one-1"), BlobRef(bytes(32), 400), 1.0, 1.0),
                Uploaded(start(1, 0, "one-1")),
                WorkFailed(start(1, 0, "one-1"), DeclineCause.INTERNAL, "late"),
                Received(start(1, 1, "one-1"), OPEN),
                Received(start(2, 0, "one-1"), OPEN),
                Received(JobEnded("one-1", JobState.STOPPED, ""), OPEN),
                Disconnected(),
            ]
        ),
        max_size=12,
    )
)
@settings(deadline=None, max_examples=50)
def test_late_words_about_abandoned_work_raise_nothing(consortium: Consortium, text: str, events: list[Event]) -> None:
    """An agent may tell of work that the session has let go; at most one contribution comes of any one upload."""
    session = Site(consortium, Session(consortium.identity())).attend()
    session.accept(text, "one-1")
    effects: list[Effect] = []

    for event in events:
        effects.extend(session.session.receive(event, NOW))

    told = sum(isinstance(effect, Send) and isinstance(effect.message, Contribution) for effect in effects)
    assert told <= sum(isinstance(event, Uploaded) for event in events)
    assert told <= sum(isinstance(effect, Upload) for effect in effects)
