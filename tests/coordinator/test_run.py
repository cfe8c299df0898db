import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.events import (
    Answer,
    BeginSum,
    Broken,
    CloseSums,
    Commit,
    Committed,
    Complete,
    Completed,
    Completion,
    Effect,
    Event,
    Lengths,
    Measured,
    NoSum,
    NotCommitted,
    Prepared,
    Rejected,
    SaveSite,
    SaveState,
    Sealing,
    Send,
    SetDeadline,
    SiteArrived,
    SiteLeft,
    SitePaused,
    Stepped,
    StopAsked,
    SumFailed,
    SumOpened,
    SumStands,
    TimeUp,
)
from coordinator.records import JobRecord, JobSite, Outcome, StepRecord
from coordinator.run import MAX_FAILURES, Run
from coordinator.store import Store, url_in
from federation import job
from federation.blobs import BlobRef
from federation.errors import LocalProtocolError, RemoteProtocolError, WhoActs
from federation.findings import Finding
from federation.messages import (
    Contribution,
    DeclineCause,
    Declined,
    FromCoordinator,
    JobAccepted,
    JobEnded,
    JobOffer,
    JobRefused,
    JobState,
    Metric,
    Phase,
    Progress,
    Refusal,
    RoundView,
    SiteView,
    StepEnded,
    StepKind,
    StepStart,
)
from tasks.task import Better

SITES = ("athens", "berlin", "cork")
LENGTHS = Lengths(statistics=24, train=400, evaluate=80)
BETTER: dict[str, Better] = {"auc": "higher", "accuracy": "higher", "loss": "lower", "rmse": "lower"}

Judge = Callable[[int], tuple[Metric, ...]]
T = TypeVar("T")


def measured(number: int) -> tuple[Metric, ...]:
    """What an honest evaluation of a round finds: better every time."""
    return (Metric("auc", 0.5 + number / 100), Metric("loss", 1 / (1 + number)))


@dataclass
class Stage:
    """A conductor without sockets, disks or clocks: it performs effects when told to, and keeps what was said."""

    run: Run
    judge: Judge = measured
    now: float = 2000.0
    said: list[tuple[str, FromCoordinator]] = field(default_factory=list)
    deadlines: list[SetDeadline] = field(default_factory=list)
    work: deque[Complete] = field(default_factory=deque)
    commits: deque[StepRecord] = field(default_factory=deque)
    stored: list[StepRecord] = field(default_factory=list)
    sites: dict[str, JobSite] = field(default_factory=dict)
    states: list[SaveState] = field(default_factory=list)
    sums: list[BeginSum] = field(default_factory=list)

    def feed(self, event: Event) -> tuple[Effect, ...]:
        """Something happens."""
        return self.perform(self.run.receive(event, self.now))

    def hear(self, site: str, message: Answer) -> tuple[Effect, ...]:
        """A site says something."""
        return self.perform(self.run.hear(site, message, self.now))

    def perform(self, effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
        """Keeps what is to be done."""
        for effect in effects:
            match effect:
                case Send(site, message):
                    self.said.append((site, message))
                case SetDeadline():
                    self.deadlines.append(effect)
                case Complete():
                    self.work.append(effect)
                case Commit(record):
                    self.commits.append(record)
                case SaveSite(site):
                    self.sites[site.site] = site
                case SaveState():
                    self.states.append(effect)
                case BeginSum():
                    self.sums.append(effect)
                case CloseSums(farewell):
                    self.said += [(send.site, send.message) for send in farewell]
        return effects

    # What the sites do.

    def attend(self, *sites: str) -> None:
        """Sites attend and accept the job that they are offered."""
        for site in sites:
            self.feed(SiteArrived(site))
            self.accept(site)

    def accept(self, site: str) -> tuple[Effect, ...]:
        """A site accepts the job."""
        return self.hear(site, JobAccepted(self.run.id, job.digest(self.run.record.text)))

    def refuse(self, site: str, problem: str) -> tuple[Effect, ...]:
        """A site refuses the job."""
        return self.hear(site, JobRefused(self.run.id, (Finding("data", problem, "mend it"),)))

    def contribute(self, *sites: str, weight: float = 10.0) -> None:
        """Sites answer what they were asked last."""
        for site in sites:
            self.hear(site, answer_to(self.asked(site), site, weight))

    def decline(self, site: str, cause: DeclineCause = DeclineCause.DATA) -> tuple[Effect, ...]:
        """A site declines what it was asked last."""
        start = self.asked(site)
        return self.hear(site, Declined(start.job, start.step, start.attempt, cause))

    # What the coordinator's threads do.

    def complete(self, completion: Completion | None = None) -> tuple[Effect, ...]:
        """The arithmetic of the step under way is done; by default it is what honest sites come to."""
        work = self.work.popleft()
        done = completion or summed(work, self.judge, self.run.record.round)
        return self.feed(Completed(work.step, work.attempt, done))

    def commit(self) -> tuple[Effect, ...]:
        """The step is stored."""
        record = self.commits.popleft()
        self.stored.append(record)
        self.run.store(record)
        return self.feed(Committed(record.step))

    def step(self, *sites: str) -> None:
        """One whole step to which these sites contribute; the others' time is up."""
        self.contribute(*sites)
        if not self.work:
            self.time_up()
        self.complete()
        self.commit()

    def time_up(self) -> tuple[Effect, ...]:
        """The latest deadline passes."""
        last = self.deadlines[-1]
        self.now += last.seconds
        return self.feed(TimeUp(last.step, last.attempt))

    # What can be seen.

    def told(self, site: str, kind: type[T]) -> list[T]:
        """All messages of one kind to a site."""
        return [message for name, message in self.said if name == site and isinstance(message, kind)]

    def asked(self, site: str) -> StepStart:
        """What a site was asked last."""
        return self.told(site, StepStart)[-1]

    def site(self, name: str) -> SiteView:
        """A site as an operator sees it."""
        return next(site for site in self.run.view(self.now).sites if site.name == name)

    def restarted(self) -> "Stage":
        """Another coordinator, after this one was killed: it knows what was stored, and no more."""
        record = replace(self.run.record, sites=tuple(self.sites.values()))
        if self.states:
            record = replace(record, state=record.state if record.state.over else self.states[-1].state)
        run = Run(record, self.run.job, self.run.lengths, BETTER, self.run.view(self.now).history)
        return Stage(run, self.judge, self.now, stored=self.stored, sites=self.sites, states=self.states)


def answer_to(start: StepStart, site: str, weight: float = 10.0) -> Contribution:
    """What an honest site answers; the same question has the same answer."""
    content = f"{site} {start.step} {start.kind} {start.model} {start.preparation}".encode()
    return Contribution(
        start.job, start.step, start.attempt, BlobRef(BlobRef.of(content).digest, start.length), weight, 3
    )


def summed(work: Complete, judge: Judge, number: int) -> Completion:
    """What the arithmetic makes of a step: names that depend on all that went in, and nothing else."""
    content = repr((work.kind, work.contributions, work.model, work.strategy_state)).encode()
    match work.kind:
        case StepKind.STATISTICS:
            return Prepared(BlobRef.of(b"preparation " + content))
        case StepKind.TRAIN:
            return Stepped(BlobRef.of(b"model " + content), BlobRef.of(b"state " + content))
        case StepKind.EVALUATE:
            return Measured(judge(number))


@pytest.fixture(scope="session")
def stage(job_text: Callable[..., str], new_record: Callable[..., JobRecord]) -> Callable[..., Stage]:
    """Sets the stage for a job that was just submitted."""

    def make(
        *sites: str, lengths: Lengths = LENGTHS, judge: Judge = measured, minimum: int | None = None, **settings: object
    ) -> Stage:
        roster = sites or SITES
        text = job_text(minimum=minimum or len(roster), **settings)
        return Stage(Run(new_record(text, *roster), job.parse(text), lengths, BETTER), judge)

    return make


def refused(stage: Stage, site: str, message: Answer) -> str:
    """The words with which a site's message is refused; nothing has changed but that the site was heard."""
    before = stage.run.view(stage.now)
    with pytest.raises(RemoteProtocolError) as refusal:
        stage.hear(site, message)
    assert stage.run.view(stage.now) == before
    return str(refusal.value)


def play(stage: Stage, *sites: str) -> None:
    """Honest sites bring the job to its end."""
    while not stage.run.over:
        stage.step(*sites)


# ---------------------------------------------------------------------------------------------------------- the offer


def test_a_site_is_offered_the_job_when_it_arrives(stage: Callable[..., Stage]) -> None:
    """The offer holds the whole job file and the roster; nobody else is told anything."""
    here = stage()

    here.feed(SiteArrived("berlin"))

    record = here.run.record
    assert here.said == [("berlin", JobOffer(record.id, record.text, record.roster))]


def test_the_job_waits_for_its_minimum_of_sites(stage: Callable[..., Stage]) -> None:
    """Until enough sites have accepted nothing is asked, and the view says how many are missing and who is away."""
    here = stage()

    here.attend("athens", "berlin")

    view = here.run.view(here.now)
    assert view.state is JobState.WAITING
    assert view.reason == "waiting for 1 more of 3 sites (not attending: cork)"
    assert not here.told("athens", StepStart)


def test_the_job_begins_when_the_last_needed_site_accepts(stage: Callable[..., Stage]) -> None:
    """The start is stored, a deadline is set and every site is asked at once."""
    here = stage()
    here.attend(*SITES)

    assert here.states == [SaveState(JobState.RUNNING, "")]
    assert here.deadlines == [SetDeadline(1, 0, 60.0)]
    expected = StepStart("heart-1", 1, 0, StepKind.STATISTICS, 0, None, None, 24, 60.0)
    assert [here.asked(site) for site in SITES] == [expected] * 3
    assert here.sites == {site: JobSite(site, "accepted") for site in SITES}


def test_the_job_waits_for_the_answer_of_a_site_that_is_here(stage: Callable[..., Stage]) -> None:
    """Enough sites have accepted, but one that attends is still checking its data: the view says whom it waits for."""
    here = stage(minimum=2)
    here.feed(SiteArrived("cork"))

    here.attend("athens", "berlin")

    assert here.run.record.state is JobState.WAITING
    assert here.run.view(here.now).reason == "waiting for the answer of cork"
    assert here.site("cork").state == "checking its data"

    here.accept("cork")
    assert here.asked("cork").kind is StepKind.STATISTICS


def test_the_job_begins_when_the_undecided_site_leaves(stage: Callable[..., Stage]) -> None:
    """A site that goes away without an answer holds up nobody."""
    here = stage(minimum=2)
    here.feed(SiteArrived("cork"))
    here.attend("athens", "berlin")

    here.feed(SiteLeft("cork"))

    assert here.run.record.state is JobState.RUNNING
    assert here.asked("athens").step == 1
    assert not here.told("cork", StepStart)


def test_a_job_that_can_no_longer_have_enough_sites_fails_by_name(stage: Callable[..., Stage]) -> None:
    """The reason names the sites that refused, with what they found; the others are told that the job is over."""
    here = stage("athens", "berlin", "cork", "dublin", minimum=3)
    here.attend("athens", "berlin")
    here.feed(SiteArrived("cork"))
    here.feed(SiteArrived("dublin"))

    here.refuse("cork", "the column age is missing")
    assert not here.run.over
    assert here.site("cork").trouble == "refused: data: the column age is missing (mend it)"
    here.refuse("dublin", "the policy does not allow it")

    reason = (
        "too many sites refused the job (cork: data: the column age is missing (mend it); "
        "dublin: data: the policy does not allow it (mend it))"
    )
    assert (here.run.record.state, here.run.record.reason) == (JobState.FAILED, reason)
    assert here.states[-1] == SaveState(JobState.FAILED, reason)
    assert here.told("athens", JobEnded) == [JobEnded("heart-1", JobState.FAILED, reason)]
    assert here.sites["cork"].findings[0].problem == "the column age is missing"


def test_a_site_that_refused_is_asked_again_when_it_comes_back(stage: Callable[..., Stage]) -> None:
    """Its administrator may have mended what was wrong; an acceptance then counts."""
    here = stage(minimum=2)
    here.feed(SiteArrived("cork"))
    here.refuse("cork", "the column age is missing")

    here.feed(SiteLeft("cork"))
    here.attend("cork", "athens", "berlin")

    assert here.asked("cork").step == 1
    assert here.site("cork").trouble == ""


def test_a_reason_longer_than_a_message_is_cut(stage: Callable[..., Stage]) -> None:
    """Whatever sites write into their findings, the operator can see the job and every site is told its end."""
    here = stage()
    for site in SITES:
        here.feed(SiteArrived(site))

    here.refuse("athens", "x" * 1000)
    assert not here.run.over  # the others are heard first
    for site in SITES[1:]:
        here.refuse(site, "y" * 1000)

    assert here.run.over
    assert len(here.run.view(here.now).reason) == 1000
    assert here.site("athens").trouble.startswith("refused: data: xxx")
    assert here.told("berlin", JobEnded)[0].reason.endswith("xxx...")
    assert here.states[-1].reason == here.run.record.reason == here.run.view(here.now).reason


def test_a_trouble_longer_than_a_view_shows_is_cut(stage: Callable[..., Stage]) -> None:
    """While the job waits for other sites, its operator reads the beginning of what one of them found."""
    here = stage(minimum=2)
    here.feed(SiteArrived("athens"))

    here.refuse("athens", "x" * 1000)

    assert len(here.site("athens").trouble) == 1000


def test_a_view_of_many_absent_sites_is_cut(stage: Callable[..., Stage]) -> None:
    """A hundred long names do not fit into a reason, and the view exists all the same."""
    here = stage(*(f"hospital-{number:03}-{'x' * 40}" for number in range(100)))

    assert len(here.run.view(here.now).reason) == 1000


# ---------------------------------------------------------------------------------------------------------- the steps


def test_steps_come_in_order_and_end_with_the_final_model(stage: Callable[..., Stage]) -> None:
    """Statistics first, then training and evaluation of each round; each step works on what the one before it made."""
    here = stage(rounds=2)
    here.attend(*SITES)

    play(here, *SITES)

    kinds = [StepKind.STATISTICS, *[StepKind.TRAIN, StepKind.EVALUATE] * 2]
    assert [record.kind for record in here.stored] == kinds
    assert [record.round for record in here.stored] == [0, 1, 1, 2, 2]
    assert [record.step for record in here.stored] == [1, 2, 3, 4, 5]
    asked = here.told("athens", StepStart)
    assert [start.length for start in asked] == [24, 400, 80, 400, 80]
    first, second = here.stored[1].model, here.stored[3].model
    assert [start.model for start in asked] == [None, BlobRef.of(b"initial model"), first, first, second]
    assert {start.preparation for start in asked[1:]} == {here.stored[0].preparation}
    last = here.stored[-1]
    assert (last.state, last.reason) == (JobState.FINISHED, "all 2 rounds done")
    assert last.final is not None
    assert (last.final.payload, last.final.round, last.final.metrics) == (second, 2, measured(2))
    assert here.told("cork", JobEnded) == [JobEnded("heart-1", JobState.FINISHED, "all 2 rounds done")]
    assert here.told("cork", StepEnded) == [StepEnded("heart-1", step, counted=True) for step in range(1, 6)]


def test_a_job_without_statistics_begins_with_training(stage: Callable[..., Stage]) -> None:
    """No site is asked for statistics of no length; the preparation is made and stored all the same."""
    here = stage(lengths=replace(LENGTHS, statistics=0))
    here.attend(*SITES)
    assert not here.told("athens", StepStart)
    assert here.work[0].contributions == ()

    here.complete()
    here.commit()

    assert here.stored[0].preparation is not None
    assert here.stored[0].shares == ()
    assert (here.asked("athens").kind, here.asked("athens").step) == (StepKind.TRAIN, 2)


def test_the_strategy_state_is_handed_on(stage: Callable[..., Stage]) -> None:
    """The second training step begins from the state with which the first one ended."""
    here = stage()
    here.attend(*SITES)
    for _ in range(3):
        here.step(*SITES)

    here.contribute(*SITES)

    assert here.work[0].strategy_state == here.stored[1].strategy_state is not None


def test_a_site_that_arrives_during_a_step_takes_part_from_the_next(stage: Callable[..., Stage]) -> None:
    """It is offered the job at once, and asked when the next step begins; meanwhile its payloads are not expected."""
    here = stage(minimum=2)
    here.attend("athens", "berlin")

    here.attend("cork")

    assert not here.told("cork", StepStart)
    assert not here.run.expects("cork", BlobRef(bytes(32), 24))
    here.step("athens", "berlin")
    assert here.asked("cork").kind is StepKind.TRAIN


def test_a_site_that_comes_back_within_a_step_is_asked_again(stage: Callable[..., Stage]) -> None:
    """The question is of the same step and attempt, with the time that is left; the others are not disturbed."""
    here = stage()
    here.attend(*SITES)
    here.feed(SiteLeft("cork"))
    here.now += 20

    here.attend("cork")

    first, again = here.told("cork", StepStart)
    assert again == replace(first, deadline_seconds=40.0)
    assert len(here.told("athens", StepStart)) == 1


def test_a_site_that_has_contributed_is_not_asked_again(stage: Callable[..., Stage]) -> None:
    """It comes back, accepts, and has nothing to do until the next step."""
    here = stage()
    here.attend(*SITES)
    here.contribute("cork")
    here.feed(SiteLeft("cork"))

    here.attend("cork")

    assert len(here.told("cork", StepStart)) == 1


def test_a_site_that_came_back_is_not_asked_before_it_accepts_anew(stage: Callable[..., Stage]) -> None:
    """It may have restarted and know of no job: the next step begins without it, and it joins at the one after."""
    here = stage(quorum=2)
    here.attend(*SITES)
    here.feed(SiteLeft("cork"))
    here.feed(SiteArrived("cork"))

    here.step("athens", "berlin")

    assert here.asked("athens").step == 2
    assert here.asked("cork").step == 1
    assert here.site("cork").state == "checking its data"
    here.accept("cork")
    here.step("athens", "berlin")
    assert here.asked("cork").step == 3


def test_a_site_that_restarts_between_steps_is_waited_for_until_it_accepts(stage: Callable[..., Stage]) -> None:
    """Needed for every step, it is asked for the next one only once it knows the job again, and nothing fails."""
    here = stage()
    here.attend(*SITES)
    here.contribute(*SITES)
    here.feed(SiteLeft("cork"))
    here.feed(SiteArrived("cork"))

    here.complete()
    here.commit()

    assert [here.asked(site).step for site in SITES] == [1, 1, 1]
    assert here.run.view(here.now).reason == "waiting for 1 more of 3 sites"
    here.accept("cork")
    assert [here.asked(site).step for site in SITES] == [2, 2, 2]


def test_all_that_the_sites_have_against_a_job_is_told_at_once(stage: Callable[..., Stage]) -> None:
    """A job that cannot be is not ended at the first word: its author mends it once, not once for each site."""
    here = stage()
    for site in SITES:
        here.feed(SiteArrived(site))

    here.refuse("athens", "the column age is missing")
    here.accept("cork")
    here.refuse("berlin", "it has too few rows")

    assert here.run.over
    assert "athens: data: the column age is missing" in here.run.record.reason
    assert "berlin: data: it has too few rows" in here.run.record.reason


def test_a_revoked_site_is_not_waited_for(stage: Callable[..., Stage]) -> None:
    """Who left for good has declined: with a quorum the step closes at once, and people see why."""
    here = stage(quorum=2)
    here.attend(*SITES)
    here.contribute("athens", "berlin")
    assert not here.work

    here.feed(SiteLeft("cork", for_good=True))

    assert len(here.work) == 1
    assert here.site("cork").trouble == "its membership was revoked"


def test_a_site_that_refuses_during_a_step_is_not_waited_for(stage: Callable[..., Stage]) -> None:
    """Its data changed while it was away: its refusal declines the step that it was asked for."""
    here = stage(quorum=2)
    here.attend(*SITES)
    here.contribute("athens", "berlin")
    here.feed(SiteLeft("cork"))
    here.feed(SiteArrived("cork"))

    here.refuse("cork", "the column age is missing")

    assert [each.site for each in here.work[0].contributions] == ["athens", "berlin"]
    here.complete()
    here.commit()
    assert {share.site: share.outcome for share in here.stored[0].shares}["cork"] is Outcome.DECLINED
    assert here.asked("cork").step == 1


# ------------------------------------------------------------------------------------------------ late, declined, wrong


def test_a_late_contribution_after_the_commit_is_not_counted(stage: Callable[..., Stage]) -> None:
    """The site is told so, the step that is under way is not touched, and the one after asks the site again."""
    here = stage(quorum=2)
    here.attend(*SITES)
    late = answer_to(here.asked("cork"), "cork")
    here.step("athens", "berlin")

    effects = here.hear("cork", late)

    assert effects == (Send("cork", StepEnded("heart-1", 1, counted=False)),)
    assert not here.run.expects("cork", BlobRef(bytes(32), 400))
    assert here.site("cork").trouble == "was late with step 1, which went on without it"
    here.step("athens", "berlin")
    assert here.asked("cork").step == 3


def test_a_dead_site_costs_its_deadline_once_and_is_skipped_until_it_is_back(stage: Callable[..., Stage]) -> None:
    """It attends and says nothing: the steps after its deadline do not ask it, until it reaches the end of its work."""
    here = stage(quorum=2, rounds=9)
    here.attend(*SITES)
    here.step("athens", "berlin")

    for _ in range(4):  # no time passes: nobody waits for a deadline any more
        here.contribute("athens", "berlin")
        here.complete()
        here.commit()

    assert here.now == 2060.0
    assert [share.site for share in here.stored[-1].shares] == ["athens", "berlin"]
    assert (here.site("cork").state, here.told("cork", StepEnded)) == ("late", [])
    assert here.site("cork").trouble == (
        "missed the deadline of step 1; rounds go on without it until it has done that work"
    )
    effects = here.hear("cork", Progress("heart-1", 1, Phase.UPLOADING))
    assert effects == (Send("cork", StepEnded("heart-1", 1, counted=False)),)
    here.step("athens", "berlin")
    assert here.asked("cork").step == 7


def test_a_site_that_declines_what_it_was_late_with_is_asked_again(stage: Callable[..., Stage]) -> None:
    """So is one that came back on a new stream, or was paused and let go on."""
    here = stage(quorum=2, rounds=9)
    here.attend(*SITES)
    here.step("athens", "berlin")
    here.decline("cork")
    here.step("athens", "berlin")
    assert here.asked("cork").step == 3
    here.step("athens", "berlin")
    here.attend("cork")
    here.step("athens", "berlin")
    assert here.asked("cork").step == 5
    here.step("athens", "berlin")
    here.feed(SitePaused("cork", paused=True))
    here.feed(SitePaused("cork", paused=False))
    here.step("athens", "berlin")
    assert here.asked("cork").step == 7


def test_a_job_waits_for_late_sites_when_too_few_others_are_left(stage: Callable[..., Stage]) -> None:
    """The view names the late one; it comes back by ending its work, and the job goes on."""
    here = stage(quorum=2)
    here.attend(*SITES)
    here.contribute("athens", "berlin")
    here.time_up()
    here.complete()
    here.feed(SiteLeft("berlin"))
    here.commit()
    assert here.run.view(here.now).reason == "waiting for 1 more of 2 sites (not attending: berlin; late: cork)"
    here.hear("cork", Progress("heart-1", 1, Phase.UPLOADING))
    assert (here.asked("athens").step, here.asked("cork").step) == (2, 2)


def test_nobody_waits_for_a_paused_site(stage: Callable[..., Stage]) -> None:
    """The step under way goes on at once without it, later ones do not ask it, and the operator sees who paused it."""
    here = stage(quorum=2)
    here.attend(*SITES)
    here.contribute("athens", "berlin")
    here.feed(SitePaused("cork", paused=True))
    here.complete()
    here.commit()
    assert [(share.outcome, share.cause) for share in here.stored[0].shares][2] == (Outcome.DECLINED, "paused")
    here.step("athens", "berlin")
    assert here.asked("cork").step == 1
    assert (here.site("cork").state, here.site("cork").trouble) == ("paused", "its administrator has paused it")
    here.feed(SitePaused("cork", paused=False))
    here.step("athens", "berlin")
    assert here.asked("cork").step == 4


def test_an_answer_that_crosses_the_sites_pause_is_late(stage: Callable[..., Stage]) -> None:
    """The question was on its way when the site was paused: whatever it answers, it is told that it is not counted."""
    here = stage(quorum=2)
    here.attend(*SITES)
    here.feed(SitePaused("cork", paused=True))

    here.decline("cork", DeclineCause.PAUSED)
    here.feed(SitePaused("cork", paused=False))
    here.contribute("cork")

    assert here.told("cork", StepEnded) == [StepEnded("heart-1", 1, counted=False)] * 2
    here.step("athens", "berlin")
    assert [(share.outcome, share.cause) for share in here.stored[0].shares][2] == (Outcome.DECLINED, "paused")
    assert here.asked("cork").step == 2


def test_a_job_that_a_paused_site_holds_back_says_so_and_never_fails_for_it(stage: Callable[..., Stage]) -> None:
    """However often a site is paused, that is no failure of the step."""
    here = stage()
    here.attend(*SITES)
    for _ in range(MAX_FAILURES + 1):
        here.contribute("athens", "berlin")
        here.feed(SitePaused("cork", paused=True))
        assert here.run.view(here.now).reason == "waiting for 1 more of 3 sites (paused: cork)"
        here.feed(SitePaused("cork", paused=False))
    here.step(*SITES)
    assert here.stored[0].attempt == MAX_FAILURES + 1


def test_a_job_starts_without_the_answer_of_a_paused_site(stage: Callable[..., Stage]) -> None:
    """It need not say whether it accepts, if enough others do."""
    here = stage(minimum=2, quorum=2)
    here.feed(SiteArrived("cork"))
    here.attend("athens", "berlin")
    assert here.told("athens", StepStart) == []
    here.feed(SitePaused("cork", paused=True))
    assert here.asked("athens").step == 1


def test_a_late_contribution_during_the_sum_is_not_counted(stage: Callable[..., Stage]) -> None:
    """The deadline closed the round without it: that is said as such, not as a broken protocol."""
    here = stage(quorum=2)
    here.attend(*SITES)
    late = answer_to(here.asked("cork"), "cork")
    here.contribute("athens", "berlin")
    here.time_up()

    assert here.hear("cork", late) == (Send("cork", StepEnded("heart-1", 1, counted=False)),)
    assert [each.site for each in here.work[0].contributions] == ["athens", "berlin"]


def test_a_deadline_with_too_few_asks_again(stage: Callable[..., Stage]) -> None:
    """The attempt's number grows, the step's stays; everybody is told that the attempt did not count."""
    here = stage()
    here.attend(*SITES)
    here.contribute("athens", "berlin")

    here.time_up()

    assert not here.work
    assert here.told("athens", StepEnded) == [StepEnded("heart-1", 1, counted=False)]
    assert [(here.asked(site).step, here.asked(site).attempt) for site in SITES] == [(1, 1)] * 3
    assert here.deadlines[-1] == SetDeadline(1, 1, 60.0)
    here.step(*SITES)
    assert [(record.step, record.attempt) for record in here.stored] == [(1, 1)]


def test_absent_sites_are_waited_for_however_long_that_takes(stage: Callable[..., Stage]) -> None:
    """Deadlines that pass while sites are away fail no job; it goes on when they are back."""
    here = stage()
    here.attend(*SITES)
    here.feed(SiteLeft("berlin"))
    here.feed(SiteLeft("cork"))

    for _ in range(5):
        here.time_up()

    assert here.run.view(here.now).reason == "waiting for 2 more of 3 sites (not attending: berlin, cork)"
    here.attend("berlin", "cork")
    assert {(here.asked(site).step, here.asked(site).attempt) for site in SITES} == {(1, 1)}


def test_a_deadline_too_short_for_the_work_is_made_up_for_by_the_next_attempt(stage: Callable[..., Stage]) -> None:
    """A site that is late goes on with the same work, and is counted in the attempt in which it ends."""
    here = stage()
    here.attend(*SITES)
    for _ in range(5):
        here.contribute("athens", "berlin")
        here.time_up()

    here.step(*SITES)

    assert [(record.step, record.attempt) for record in here.stored] == [(1, 5)]


def test_a_deadline_with_a_quorum_goes_on_without_the_late_site(stage: Callable[..., Stage]) -> None:
    """The late site's share and its trouble say so; it goes on with its work, and is told when that is done."""
    here = stage(quorum=2)
    here.attend(*SITES)

    here.step("athens", "berlin")

    assert [(share.site, share.outcome) for share in here.stored[0].shares] == [
        ("athens", Outcome.COUNTED),
        ("berlin", Outcome.COUNTED),
        ("cork", Outcome.LATE),
    ]
    assert here.told("cork", StepEnded) == []
    assert here.site("cork").trouble.startswith("missed the deadline of step 1")
    here.contribute("cork")
    assert here.told("cork", StepEnded) == [StepEnded("heart-1", 1, counted=False)]
    here.step("athens", "berlin")
    assert here.asked("cork").step == 3
    here.contribute("cork")
    assert here.site("cork").trouble == ""


def test_a_deadline_of_an_earlier_attempt_is_nobodys(stage: Callable[..., Stage]) -> None:
    """Timers that were set for what is over, or under way in the arithmetic, change nothing."""
    here = stage(quorum=2)
    here.attend(*SITES)
    here.step(*SITES)
    here.contribute("athens", "berlin")

    assert here.feed(TimeUp(1, 0)) == ()
    here.contribute("cork")
    assert here.feed(TimeUp(2, 0)) == ()
    here.complete()
    assert here.feed(TimeUp(2, 0)) == ()
    assert [share.outcome for share in here.commits[0].shares] == [Outcome.COUNTED] * 3


def test_three_failed_attempts_fail_the_job_with_the_reasons(stage: Callable[..., Stage]) -> None:
    """A site that declines every time makes the step impossible; the reason names it and says why."""
    here = stage()
    here.attend(*SITES)
    for attempt in range(3):
        assert here.asked("berlin").attempt == attempt
        here.contribute("athens", "cork")
        here.decline("berlin", DeclineCause.RESOURCES)

    reason = "step 1 (statistics) failed 3 times (berlin: it ran out of memory or disk)"
    assert (here.run.record.state, here.run.record.reason) == (JobState.FAILED, reason)
    assert here.told("athens", JobEnded) == [JobEnded("heart-1", JobState.FAILED, reason)]


def test_a_success_between_failures_starts_the_count_anew(stage: Callable[..., Stage]) -> None:
    """Two failed attempts at each step fail no job."""
    here = stage()
    here.attend(*SITES)
    for _ in range(3):
        for _ in range(2):
            here.contribute("athens", "cork")
            here.decline("berlin")
        here.step(*SITES)

    assert here.run.record.next_step == 4
    assert not here.run.over


def test_a_declined_step_goes_on_with_a_quorum(stage: Callable[..., Stage]) -> None:
    """The site's trouble says why in words that an operator can act on, and it is asked again at the next step."""
    here = stage(quorum=2)
    here.attend(*SITES)
    here.contribute("athens", "cork")

    here.decline("berlin", DeclineCause.INTERNAL)

    assert here.site("berlin").trouble == "its trainer failed; the site's log says why"
    here.complete()
    here.commit()
    assert here.asked("berlin").step == 2


def test_a_payload_that_cannot_be_summed_is_refused_and_the_rest_counted(stage: Callable[..., Stage]) -> None:
    """The site is told what was wrong with it and who must act; the sum is made anew without it."""
    here = stage(quorum=2)
    here.attend(*SITES)
    here.contribute(*SITES)

    here.complete(Rejected((("berlin", "a value is not finite"),)))

    fix = "see the site's log; check its data for extreme values"
    expected = Refusal("step 1 of heart-1", "a value is not finite", WhoActs.SITE.value, fix)
    assert here.told("berlin", Refusal) == [expected]
    assert [each.site for each in here.work[0].contributions] == ["athens", "cork"]
    here.complete()
    here.commit()
    assert {share.site: share.outcome for share in here.stored[0].shares}["berlin"] is Outcome.REFUSED
    assert here.told("berlin", StepEnded) == [StepEnded("heart-1", 1, counted=False)]
    assert here.site("berlin").trouble == "its contribution was refused: a value is not finite"


def test_refused_payloads_below_the_quorum_fail_the_attempt(stage: Callable[..., Stage]) -> None:
    """The step is asked again; a site that sends nonsense three times makes the job fail by its name."""
    here = stage()
    here.attend(*SITES)
    for attempt in range(3):
        assert here.asked("athens").attempt == attempt
        here.contribute(*SITES)
        here.complete(Rejected((("berlin", "a value is not finite"),)))

    assert here.run.record.state is JobState.FAILED
    assert "berlin: its contribution was refused: a value is not finite" in here.run.record.reason


def test_a_step_that_cannot_be_made_fails_the_job_at_once(stage: Callable[..., Stage]) -> None:
    """The job's own settings do not work: no attempt can help, and the reason says what is wrong."""
    here = stage()
    here.attend(*SITES)
    here.contribute(*SITES)

    here.complete(Broken("the strategy needs each site's update"))

    assert (here.run.record.state, here.run.record.reason) == (JobState.FAILED, "the strategy needs each site's update")


@pytest.mark.parametrize(
    ("site", "message", "words"),
    [
        ("dublin", Progress("heart-1", 1, Phase.WORKING), "site dublin is not in the roster of job heart-1"),
        ("athens", JobAccepted("heart-1", bytes(32)), "site athens accepted another job file than job heart-1's"),
        (
            "athens",
            Contribution("heart-1", 2, 0, BlobRef(bytes(32), 24), 1, 1),
            "answered step 2 of job heart-1, which was never asked",
        ),
        (
            "athens",
            Declined("heart-1", 1, 1, DeclineCause.DATA),
            "answered step 1 of job heart-1, which was never asked",
        ),
        ("athens", Contribution("heart-1", 1, 0, BlobRef(bytes(32), 8), 1, 1), "8 bytes where this step takes 24"),
        ("berlin", Declined("heart-1", 1, 0, DeclineCause.DATA), "site berlin has answered this step already"),
        (
            "berlin",
            Contribution("heart-1", 1, 0, BlobRef(bytes(32), 24), 1, 1),
            "site berlin has answered this step already",
        ),
    ],
    ids=["stranger", "other-text", "future-step", "future-attempt", "length", "decline-after", "second-payload"],
)
def test_an_illegal_message_is_refused_and_the_job_goes_on(
    stage: Callable[..., Stage], site: str, message: Answer, words: str
) -> None:
    """Each is refused in words that name the site and changes nothing; the others complete the step."""
    here = stage()
    here.attend(*SITES)
    here.contribute("berlin")

    assert words in refused(here, site, message)

    here.contribute("athens", "cork")
    here.complete()
    here.commit()
    assert [share.outcome for share in here.stored[0].shares] == [Outcome.COUNTED] * 3


def test_the_same_contribution_again_changes_nothing(stage: Callable[..., Stage]) -> None:
    """Re-sent after a reconnect it is counted once, while the round collects and while it is summed."""
    here = stage()
    here.attend(*SITES)
    here.contribute("athens", "athens", "berlin", "cork")
    here.contribute("athens")

    assert len(here.work) == 1
    assert [each.site for each in here.work[0].contributions] == list(SITES)


def test_events_that_cannot_be_are_our_own_bugs(stage: Callable[..., Stage]) -> None:
    """A commit out of turn and a site of no roster are refused as such, and the job goes on."""
    here = stage()
    here.attend(*SITES)

    with pytest.raises(LocalProtocolError, match="step 1 of job heart-1 was committed out of turn"):
        here.feed(Committed(1))
    for event in (SiteArrived("dublin"), SiteLeft("dublin")):
        with pytest.raises(LocalProtocolError, match="site dublin is not in the roster of job heart-1"):
            here.feed(event)

    play(here, *SITES)
    assert here.run.record.state is JobState.FINISHED


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Completed(1, 0, Measured(())), r"step 1 \(statistics\) of job heart-1 cannot come to Measured"),
        (Completed(1, 0, Rejected(())), "step 1 of job heart-1 rejected payloads that it does not count"),
        (Completed(1, 0, Rejected((("athens", "x"), ("dublin", "x")))), "step 1 of job heart-1 rejected payloads that"),
        (NotCommitted(1, "the disk is gone"), "step 1 of job heart-1 failed to be stored out of turn"),
        (Committed(0), "step 0 of job heart-1 was committed out of turn"),
    ],
    ids=["another kind's sum", "no rejected payload", "a stranger's payload", "nothing to store", "nothing stored"],
)
def test_what_a_step_cannot_come_to_changes_nothing(stage: Callable[..., Stage], event: Event, words: str) -> None:
    """While a step is summed, none of these can happen; the step is then completed, stored, and counts all sites."""
    here = stage()
    here.attend(*SITES)
    here.contribute(*SITES)

    with pytest.raises(LocalProtocolError, match=words):
        here.feed(event)

    here.complete()
    here.commit()
    assert [share.outcome for share in here.stored[0].shares] == [Outcome.COUNTED] * 3


@pytest.mark.parametrize("event", [Committed(1), NotCommitted(1, "late"), NotCommitted(3, "early")])
def test_while_a_step_is_stored_no_other_is_spoken_of(stage: Callable[..., Stage], event: Event) -> None:
    """What is said again of the step before, or of the next, does not begin or end anything."""
    here = stage()
    here.attend(*SITES)
    here.step(*SITES)
    here.contribute(*SITES)
    here.complete()

    with pytest.raises(LocalProtocolError, match=r"step \d of job heart-1 .* out of turn"):
        here.feed(event)

    here.commit()
    assert here.asked("athens").step == 3


def test_a_payload_rejected_twice_is_rejected_once(stage: Callable[..., Stage]) -> None:
    """Two reasons against one payload are one refusal, with the last of them."""
    here = stage(quorum=2)
    here.attend(*SITES)
    here.contribute(*SITES)

    here.complete(Rejected((("cork", "too long"), ("cork", "not finite"))))

    assert [refusal.problem for refusal in here.told("cork", Refusal)] == ["not finite"]
    assert [each.site for each in here.work[0].contributions] == ["athens", "berlin"]


# ------------------------------------------------------------------------------------------------------------ the end


def judged(name: str, *values: float) -> Judge:
    """Evaluations that give one metric these values, round by round."""
    return lambda number: (Metric(name, values[number - 1]),)


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [("auc", (0.6, 0.9, 0.7, 0.9), 2), ("loss", (0.6, 0.2, 0.7, 0.2), 2), ("rmse", (3.0, 4.0, 2.0, 5.0), 3)],
    ids=["higher", "lower", "rmse"],
)
def test_the_final_model_is_that_of_the_best_round(
    stage: Callable[..., Stage], name: str, values: tuple[float, ...], best: int
) -> None:
    """Higher or lower is better as the metric says; of equals the first; the model is the one trained in that round."""
    here = stage(rounds=4, best=f'best_metric = "{name if name != "rmse" else "loss"}"', judge=judged(name, *values))
    if name == "rmse":
        changed = here.run.job.rounds.model_copy(update={"best_metric": "rmse"})
        here.run.job = here.run.job.model_copy(update={"rounds": changed})
    here.attend(*SITES)

    play(here, *SITES)

    trained = {record.round: record.model for record in here.stored if record.kind is StepKind.TRAIN}
    final = here.stored[-1].final
    assert final is not None
    assert (final.round, final.payload, final.metrics) == (best, trained[best], (Metric(name, values[best - 1]),))
    assert here.run.record.best_model == trained[best]


def test_an_early_stop_ends_the_job_with_its_best_round(stage: Callable[..., Stage]) -> None:
    """Two rounds without a gain of 0.01 end the job; the reason says so, and the final model is the best one."""
    stop = 'best_metric = "auc"\nearly_stop = { metric = "auc", patience = 2, minimum_gain = 0.01 }'
    here = stage(rounds=9, best=stop, judge=judged("auc", 0.7, 0.8, 0.805, 0.806))
    here.attend(*SITES)

    play(here, *SITES)

    assert here.run.record.reason == "early stop after round 4: auc no better for 2 rounds"
    assert here.run.record.state is JobState.FINISHED
    assert here.run.record.best_round == 4


def _waiting(_here: Stage) -> None:
    """Nobody is here."""


def _checking(here: Stage) -> None:
    here.feed(SiteArrived("athens"))


def _collecting(here: Stage) -> None:
    here.attend(*SITES)
    here.contribute("athens")


def _summing(here: Stage) -> None:
    here.attend(*SITES)
    here.contribute(*SITES)


def _alone(here: Stage) -> None:
    here.attend(*SITES)
    here.step(*SITES)
    here.feed(SiteLeft("berlin"))
    here.time_up()


@pytest.mark.parametrize("arrange", [_waiting, _checking, _collecting, _summing, _alone])
def test_an_operator_stops_a_job_wherever_it_stands(
    stage: Callable[..., Stage], arrange: Callable[[Stage], None]
) -> None:
    """The job is over at once, by name; sites that are here are told; nothing that comes later changes anything."""
    here = stage()
    arrange(here)

    here.feed(StopAsked("olga"))

    record = here.run.record
    assert (record.state, record.reason, record.ended) == (JobState.STOPPED, "stopped by olga", here.now)
    assert here.states[-1] == SaveState(JobState.STOPPED, "stopped by olga")
    attending = [site.name for site in here.run.view(here.now).sites if site.connected]
    assert [name for name, message in here.said if isinstance(message, JobEnded)] == attending
    if here.work:
        assert here.complete() == ()
    assert here.feed(StopAsked("olga")) == ()
    assert here.feed(TimeUp(1, 0)) == ()
    ended = JobEnded("heart-1", JobState.STOPPED, "stopped by olga")
    assert here.feed(SiteArrived("cork")) == (Send("cork", ended),)
    assert here.accept("cork") == (Send("cork", ended),)
    assert here.run.record == record


def test_a_stop_while_a_step_is_stored_comes_after_it(stage: Callable[..., Stage]) -> None:
    """The step counts, then the job is stopped: memory and store never disagree."""
    here = stage()
    here.attend(*SITES)
    here.contribute(*SITES)
    here.complete()

    assert here.feed(StopAsked("olga")) == ()
    here.commit()

    assert here.run.record.next_step == 2
    assert (here.run.record.state, here.run.record.reason) == (JobState.STOPPED, "stopped by olga")
    assert here.told("athens", StepEnded) == [StepEnded("heart-1", 1, counted=True)]
    assert len(here.told("athens", StepStart)) == 1


def test_a_stop_while_the_last_step_is_stored_finds_the_job_finished(stage: Callable[..., Stage]) -> None:
    """What is being stored ends the job with its model; there is nothing left to stop."""
    here = stage(rounds=1)
    here.attend(*SITES)
    here.step(*SITES)
    here.step(*SITES)
    here.contribute(*SITES)
    here.complete()

    here.feed(StopAsked("olga"))
    here.commit()

    assert here.run.record.state is JobState.FINISHED
    assert [state.state for state in here.states] == [JobState.RUNNING]


# -------------------------------------------------------------------------------------------------------- for people


def test_the_view_names_the_site_that_holds_a_round_back(stage: Callable[..., Stage]) -> None:
    """It says who is waited for, what each is doing, and for how long."""
    here = stage()
    here.attend(*SITES)
    here.step(*SITES)
    here.contribute("athens")
    here.hear("berlin", Progress("heart-1", 2, Phase.WORKING))
    here.feed(SiteLeft("cork"))
    here.now += 12

    assert here.run.view(here.now).reason == "waiting for berlin, cork"
    assert (here.site("athens").state, here.site("athens").trouble) == ("ready", "")
    assert here.site("berlin").state == here.run.doing("berlin", here.now)[0] == "training"
    assert here.site("berlin").trouble == "the round waits for it: training for 12 s"
    assert here.site("cork").state == "away"
    assert here.site("cork").trouble == "went away; the round waits for it until its deadline (12 s so far)"
    assert here.site("cork").last_seen == here.now - 12


def test_the_view_shows_rounds_as_they_were_committed(stage: Callable[..., Stage]) -> None:
    """Each round with its metrics, the sites that counted, its seconds and the bytes that moved."""
    here = stage(quorum=2)
    here.attend(*SITES)
    here.step(*SITES)
    for site in ("athens", "berlin"):
        here.run.moved(site, 400)
    here.contribute("athens", "berlin")
    here.now += 3
    here.time_up()
    here.complete()
    here.commit()
    here.run.moved("athens", 80)
    here.step(*SITES)

    assert here.run.view(here.now).history == (RoundView(1, measured(1), 2, 63.0, 880),)
    assert here.site("athens").bytes == 480
    assert here.site("athens").seconds == 3.0


def test_progress_of_another_step_is_not_shown(stage: Callable[..., Stage]) -> None:
    """A word about a step that is over does not describe the one under way."""
    here = stage()
    here.attend(*SITES)
    here.step(*SITES)

    here.hear("athens", Progress("heart-1", 1, Phase.UPLOADING))

    assert here.site("athens").state == "asked"


def test_a_model_is_offered_while_it_is_needed(stage: Callable[..., Stage]) -> None:
    """Sites may download the current model and the preparation, and no payload that the job does not name."""
    here = stage()
    here.attend(*SITES)
    here.step(*SITES)
    here.step(*SITES)

    model, preparation = here.stored[1].model, here.stored[0].preparation
    assert model is not None
    assert preparation is not None
    assert here.run.offers(model)
    assert here.run.offers(preparation)
    assert not here.run.offers(BlobRef.of(b"initial model"))


def test_uploads_are_taken_of_the_right_length_from_sites_that_were_asked(stage: Callable[..., Stage]) -> None:
    """Nothing is stored for a site that was not asked, has answered, or sends another length."""
    here = stage(minimum=2)
    right, wrong = BlobRef(bytes(32), 24), BlobRef(bytes(32), 25)
    assert not here.run.expects("athens", right)
    here.attend("athens", "berlin")

    assert here.run.expects("athens", right)
    assert not here.run.expects("athens", wrong)
    assert not here.run.expects("cork", right)
    here.contribute("athens")
    assert not here.run.expects("athens", right)
    here.feed(StopAsked("olga"))
    assert not here.run.expects("berlin", right)


# ------------------------------------------------------------------------------------------------ restarts and disorder


def _lasting(records: list[StepRecord]) -> list[StepRecord]:
    """Steps without the times at which they happened to be made."""
    timeless = [replace(record, started=0.0, ended=0.0) for record in records]
    return [replace(each, final=replace(each.final, created=0.0) if each.final else None) for each in timeless]


@pytest.mark.parametrize("killed_after", range(5))
def test_a_restarted_coordinator_goes_on_with_the_same_steps(stage: Callable[..., Stage], killed_after: int) -> None:
    """Killed after any step, it asks, sums and stores the rest exactly as if nothing had happened."""
    best = 'best_metric = "auc"'
    whole = stage(rounds=2, best=best)
    whole.attend(*SITES)
    play(whole, *SITES)
    cut = stage(rounds=2, best=best)
    cut.attend(*SITES)
    for _ in range(killed_after):
        cut.step(*SITES)

    after = cut.restarted()
    after.attend(*SITES)
    play(after, *SITES)

    assert _lasting(after.stored) == _lasting(whole.stored)
    asked = [start for start in whole.told("athens", StepStart) if start.step > killed_after]
    assert after.told("athens", StepStart) == asked
    assert replace(after.run.record, sites=(), started=0, ended=0) == replace(
        whole.run.record, sites=(), started=0, ended=0
    )
    assert [view.metrics for view in after.run.view(0).history] == [view.metrics for view in whole.run.view(0).history]


def test_a_restart_in_the_middle_of_a_step_takes_the_results_up_again(stage: Callable[..., Stage]) -> None:
    """Contributions that were in memory are gone; sites send the same results for the same step, counted once."""
    cut = stage()
    cut.attend(*SITES)
    cut.step(*SITES)
    cut.contribute("athens", "berlin")

    after = cut.restarted()
    assert after.run.record.state is JobState.RUNNING
    after.attend(*SITES)
    play(after, *SITES)

    assert [record.step for record in after.stored] == [1, 2, 3, 4, 5]
    assert all(len(record.shares) == 3 for record in after.stored)


def test_a_restart_does_not_ask_sites_before_they_accept_anew(stage: Callable[..., Stage]) -> None:
    """That a site accepted is stored; that it still knows of the job is not."""
    cut = stage(quorum=2)
    cut.attend(*SITES)
    after = cut.restarted()
    after.feed(SiteArrived("cork"))

    after.attend("athens", "berlin")

    assert after.asked("athens").step == 1
    assert not after.told("cork", StepStart)


def test_memory_and_store_agree_after_every_step(stage: Callable[..., Stage], tmp_path: Path) -> None:
    """The job as the store gives it back is the job as the run remembers it, so a restart changes nothing."""
    here = stage(rounds=3, best='best_metric = "auc"', judge=judged("auc", 0.7, 0.9, 0.8))
    with Store(url_in(tmp_path)) as store:
        store.add_job(here.run.record)
        here.attend(*SITES)
        for site in here.sites.values():
            store.set_job_site(here.run.id, site)
        store.set_job_state(here.run.id, JobState.RUNNING, "", here.now)
        while not here.run.over:
            here.contribute(*SITES)
            here.complete()
            store.commit_step(here.commits[0])
            here.commit()

            kept = store.job(here.run.id)
            assert kept == replace(here.run.record, sites=tuple(here.sites.values()))


@dataclass
class FakeSite:
    """An honest site on a line that breaks: what was said and not delivered is lost with the line."""

    name: str
    inbox: deque[FromCoordinator] = field(default_factory=deque)
    outbox: deque[Answer] = field(default_factory=deque)
    here: bool = False
    knows: bool = False

    def read(self, text: str) -> None:
        """Takes the next message in, and answers."""
        match self.inbox.popleft():
            case JobOffer(job_id):
                self.knows = True
                self.outbox.append(JobAccepted(job_id, job.digest(text)))
            case StepStart() as start if self.knows:
                self.outbox.append(Progress(start.job, start.step, Phase.WORKING))
                self.outbox.append(answer_to(start, self.name))
            case StepStart() as start:
                self.outbox.append(Declined(start.job, start.step, start.attempt, DeclineCause.POLICY))
            case JobEnded():
                self.knows = False
            case _:
                pass


class Disorder:
    """A conductor and sites whose turns, cuts, restarts and repetitions chance decides."""

    def __init__(self, stage: Stage, chance: random.Random) -> None:
        self.stage = stage
        self.chance = chance
        self.sites = {name: FakeSite(name) for name in sorted(site.name for site in stage.run.view(0).sites)}
        self.refusals: list[str] = []

    def post(self) -> None:
        """Delivers to the lines what the run has said since; a site that is away gets nothing."""
        for name, message in self.stage.said:
            if self.sites[name].here:
                self.sites[name].inbox.append(message)
        self.stage.said.clear()

    def moves(self) -> Iterator[Callable[[], object]]:
        """What honest parties can do now."""
        if self.stage.work:
            yield self.stage.complete
        if self.stage.commits:
            yield self.stage.commit
        for site in self.sites.values():
            if not site.here:
                yield lambda site=site: self.connect(site)
            if site.inbox:
                yield lambda site=site: site.read(self.stage.run.record.text)
            if site.outbox:
                yield lambda site=site: self.say(site, site.outbox.popleft())

    def mishaps(self) -> Iterator[Callable[[], object]]:
        """What can go wrong now."""
        for site in self.sites.values():
            if site.here:
                yield lambda site=site: self.cut(site)
                yield lambda site=site: self.kill(site)
            if site.outbox:
                yield lambda site=site: self.say(site, site.outbox[0])
        if self.stage.deadlines:
            yield self.stage.time_up
        yield self.restart

    def turn(self, *, mishap: bool) -> bool:
        """Does one thing; false when there is nothing to do."""
        moves = list(self.mishaps() if mishap else self.moves())
        if not moves:
            return False
        self.chance.choice(moves)()
        self.post()
        return True

    def say(self, site: FakeSite, message: Answer) -> None:
        """A site's message arrives; what the run refuses changes nothing."""
        try:
            self.stage.hear(site.name, message)
        except RemoteProtocolError as refused:
            self.refusals.append(str(refused))

    def connect(self, site: FakeSite) -> None:
        """A site attends."""
        site.here = True
        self.stage.feed(SiteArrived(site.name))

    def cut(self, site: FakeSite) -> None:
        """A line breaks, with what was on it."""
        site.here = False
        site.inbox.clear()
        site.outbox.clear()
        self.stage.feed(SiteLeft(site.name))

    def kill(self, site: FakeSite) -> None:
        """A site's agent is killed: it forgets the job."""
        self.cut(site)
        site.knows = False

    def restart(self) -> None:
        """The coordinator is killed, in the middle of whatever it does, and started again."""
        for site in self.sites.values():
            site.here = False
            site.inbox.clear()
            site.outbox.clear()
        self.stage = self.stage.restarted()


@given(seed=st.integers(0, 2**32), mishaps=st.integers(0, 60))
@settings(deadline=None, max_examples=50)
def test_every_job_ends_with_each_round_committed_once(stage: Callable[..., Stage], seed: int, mishaps: int) -> None:
    """Four honest sites finish five rounds, whatever is cut, killed, delayed or said twice: in order, none lost."""
    chance = random.Random(seed)  # noqa: S311 - a test's disorder, drawn by hypothesis
    disorder = Disorder(stage("athens", "berlin", "cork", "dublin", rounds=5, quorum=3), chance)
    for _ in range(10_000):
        mishap = mishaps > 0 and chance.random() < 0.2
        mishaps -= mishap
        if not disorder.turn(mishap=mishap):
            if disorder.stage.run.over:
                break
            disorder.stage.time_up()
            disorder.post()

    run = disorder.stage.run
    assert (run.record.state, run.record.reason) == (JobState.FINISHED, "all 5 rounds done")
    assert [record.step for record in disorder.stage.stored] == list(range(1, 12))
    for kind in (StepKind.TRAIN, StepKind.EVALUATE):
        assert [record.round for record in disorder.stage.stored if record.kind is kind] == [1, 2, 3, 4, 5]
    for record in disorder.stage.stored:
        assert sum(share.outcome is Outcome.COUNTED for share in record.shares) >= 3
        assert len({share.site for share in record.shares}) == len(record.shares)
    assert not any("answered this step already" in words for words in disorder.refusals)
    assert not any(site.knows for site in disorder.sites.values())


# -------------------------------------------------------------------------------------------------------- sealed sums

SEALING = Sealing(b"the terms", dict.fromkeys(StepKind, 3))


def sealed(stage: Callable[..., Stage], **settings: object) -> Stage:
    """A stage for a job whose sums are made under secure aggregation."""
    plain = stage(*SITES, "dublin", minimum=2, quorum=2, **settings)
    run = plain.run
    return Stage(Run(run.record, run.job, LENGTHS, BETTER, sealing=SEALING))


def opened(stage: Stage, *members: str) -> tuple[Effect, ...]:
    """The sum under way is open, over these sites."""
    start = stage.sums[-1].start
    return stage.feed(SumOpened(start.step, start.attempt, frozenset(members)))


def given_up(stage: Stage, problem: str = "too few sites are ready", *, broken: bool = False) -> tuple[Effect, ...]:
    """The sum under way is given up."""
    start = stage.sums[-1].start
    return stage.feed(SumFailed(start.step, start.attempt, problem, broken))


def stands(stage: Stage, waits: str, *behind: str, declined: tuple[tuple[str, str], ...] = ()) -> None:
    """The sum under way waits for these sites."""
    start = stage.sums[-1].start
    stage.feed(SumStands(start.step, start.attempt, frozenset(behind), waits, declined))


def test_a_sealed_step_is_asked_then_begun_and_has_no_deadline(stage: Callable[..., Stage]) -> None:
    """Sites are told the step before its sum begins, and the offer brings the terms; too few for any sum are none."""
    at = sealed(stage)
    at.attend("athens", "berlin")
    assert at.run.view(at.now).reason == "waiting for 1 more of 3 sites (not attending: cork, dublin)"
    assert at.sums == []

    at.feed(SiteArrived("cork"))
    effects = at.accept("cork")

    assert [type(effect) for effect in effects][-4:] == [Send, Send, Send, BeginSum]
    assert at.deadlines == []
    assert at.sums[-1].start == replace(at.asked("athens"), deadline_seconds=at.sums[-1].start.deadline_seconds)
    assert at.told("athens", JobOffer)[-1].terms == b"the terms"
    assert at.run.seated == {"athens", "berlin", "cork"}


def test_a_site_that_comes_late_to_a_sealed_step_is_asked_too(stage: Callable[..., Stage]) -> None:
    """Its machine decides whether it is in the sum; if it is, it is counted."""
    at = sealed(stage)
    at.attend(*SITES)
    at.attend("dublin")
    assert at.asked("dublin").step == 1

    opened(at, "athens", "berlin", "dublin")
    at.complete()
    at.commit()

    shares = {share.site: share.outcome for share in at.stored[-1].shares}
    assert shares == dict.fromkeys(("athens", "berlin", "dublin"), Outcome.COUNTED) | {"cork": Outcome.LATE}
    assert [ended.counted for ended in at.told("cork", StepEnded)] == [False]
    assert at.asked("cork").step == 2, "late in a sealed sum, it is asked again at once"


def test_a_sealed_sum_that_is_given_up_without_fault_is_tried_again_for_ever(stage: Callable[..., Stage]) -> None:
    """Who went away or is paused is waited for: no number of such attempts ends the job."""
    at = sealed(stage)
    at.attend(*SITES)
    for attempt in range(2 * MAX_FAILURES):
        assert at.sums[-1].start.attempt == attempt
        at.feed(SitePaused("cork", paused=True))
        at.feed(SitePaused("cork", paused=False))
        given_up(at)
    assert not at.run.over


def test_a_sealed_sum_that_a_site_declines_or_that_breaks_fails_in_the_end(stage: Callable[..., Stage]) -> None:
    """Three in a row are enough, and the words name the site, or what did not hold."""
    at = sealed(stage)
    at.attend(*SITES)
    stands(at, "to get ready", declined=(("berlin", "declined this step; its own log says why"),))
    given_up(at)
    given_up(at, "the sum did not hold its checks", broken=True)
    assert not at.run.over
    given_up(at, "the sum did not hold its checks", broken=True)
    reason = "step 1 (statistics) failed 3 times (the sum did not hold its checks)"
    assert at.run.record.reason == reason
    assert at.told("athens", JobEnded) == [JobEnded(at.run.id, JobState.FAILED, reason)]


def test_whoever_holds_a_sealed_sum_back_is_named(stage: Callable[..., Stage]) -> None:
    """In the job's view with what is waited for, and beside the site; a site that is in the sum has no trouble left."""
    at = sealed(stage)
    at.attend(*SITES)
    stands(at, "to open the sum", "berlin", declined=(("cork", "declined this step"),))
    at.now += 5
    assert at.run.view(at.now).reason == "waiting for berlin to open the sum"
    assert at.site("berlin").trouble == "the round waits for it: asked for 5 s"
    assert at.site("cork").trouble == "declined this step"
    opened(at, *SITES)
    assert at.site("cork").trouble == ""


CELLS = (frozenset({"athens", "berlin"}), frozenset({"cork", "dublin"}))


def in_cells(stage: Callable[..., Stage], **settings: object) -> Stage:
    """A stage for a job of four sites in two cells; updates may be of either."""
    plain = stage(*SITES, "dublin", minimum=4, **settings)
    sealing = Sealing(b"the terms", dict.fromkeys(StepKind, 2), {StepKind.TRAIN: CELLS})
    return Stage(Run(plain.run.record, plain.run.job, LENGTHS, BETTER, sealing=sealing))


def test_a_step_begins_when_enough_sites_are_here_in_whole_cells(stage: Callable[..., Stage]) -> None:
    """Who is here beside them is invited too; kinds without cells ask for none; the view says what is missing."""
    at = in_cells(stage, quorum=2)
    at.attend("athens", "berlin", "cork", "dublin")
    at.feed(SiteLeft("berlin"))
    at.feed(SiteLeft("dublin"))
    opened(at, "athens", "cork")
    at.complete()
    at.commit()
    assert at.stored[-1].kind is StepKind.STATISTICS
    reason = "waiting for 2 sites in whole cells; 0 are here (not attending: berlin, dublin)"
    assert at.run.view(at.now).reason == reason
    assert len(at.sums) == 1

    at.attend("berlin")

    assert at.sums[-1].start.kind is StepKind.TRAIN
    assert [name for name in (*SITES, "dublin") if at.told(name, StepStart) and at.asked(name).step == 2] == [*SITES]
    opened(at, "athens", "berlin")
    at.complete()
    at.commit()
    assert {share.site: share.outcome for share in at.stored[-1].shares} == {
        "athens": Outcome.COUNTED,
        "berlin": Outcome.COUNTED,
        "cork": Outcome.LATE,
    }


def test_a_job_whose_refusals_leave_too_few_whole_cells_fails(stage: Callable[..., Stage]) -> None:
    """One refusal in each cell leaves none whole, though enough sites are left to be counted."""
    at = in_cells(stage, quorum=2)
    at.attend("athens", "berlin", "cork", "dublin")
    refusal = JobRefused(at.run.id, (Finding("privacy", "not here", ""),))
    at.hear("berlin", refusal)
    assert not at.run.over
    at.hear("cork", refusal)
    assert at.run.record.reason.startswith("too many sites refused the job (berlin: ")


def test_a_group_that_has_no_sum_is_told_with_why(stage: Callable[..., Stage]) -> None:
    """In the step's record and beside each of its sites."""
    at = in_cells(stage, quorum=2)
    at.attend("athens", "berlin", "cork", "dublin")
    opened(at, "athens", "berlin", "cork", "dublin")
    at.complete()
    at.commit()
    why = "its group has no sum: too few sites are ready: dublin"
    members = frozenset({"athens", "berlin"})
    at.feed(SumOpened(2, 0, members, (("cork", why), ("dublin", why))))
    at.complete()
    at.commit()
    assert [share.cause for share in at.stored[-1].shares] == ["", "", why, why]
    assert at.site("cork").trouble == why


def test_what_comes_of_a_sealed_sum_that_is_over_changes_nothing(stage: Callable[..., Stage]) -> None:
    """Of an earlier attempt, a second time, or after the job's end."""
    at = sealed(stage)
    at.attend(*SITES)
    late = [SumOpened(1, 0, frozenset(SITES)), SumFailed(1, 0, "late", broken=True), SumStands(1, 0, frozenset(), "")]
    given_up(at)
    assert [at.feed(event) for event in late] == [()] * 3
    opened(at, *SITES)
    assert [at.feed(SumOpened(1, 1, frozenset(SITES))), at.feed(SumFailed(1, 1, "late", broken=True))] == [()] * 2
    at.feed(StopAsked("op"))
    assert at.feed(SumOpened(1, 1, frozenset(SITES))) == at.feed(NoSum("late")) == ()


def test_a_job_that_can_have_no_sum_any_more_fails_in_words(stage: Callable[..., Stage]) -> None:
    """Its sums are closed before anybody is told of its end."""
    at = sealed(stage)
    at.attend(*SITES)
    effects = at.feed(NoSum("without cork, which was revoked, no sum is allowed"))
    assert [type(effect) for effect in effects] == [SaveState, CloseSums]
    assert at.run.record.reason == "without cork, which was revoked, no sum is allowed"
    assert at.run.seated == frozenset()
    assert [type(effect) for effect in at.feed(SiteArrived("cork"))] == [CloseSums]


def test_a_plain_contribution_to_a_sealed_step_is_refused(stage: Callable[..., Stage]) -> None:
    """The coordinator takes no single vector, not even one that is sent."""
    at = sealed(stage)
    at.attend(*SITES)
    answer = answer_to(at.asked("athens"), "athens")
    assert not at.run.expects("athens", answer.payload)
    assert "contributed in plain to a step that is summed under secure aggregation" in refused(at, "athens", answer)
