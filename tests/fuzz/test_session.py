"""A site hears anything from whoever answers, and its agent tells it anything: it never does what it must not."""

from typing import Any

from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from client.policy import Policy
from client.session import Session
from client.session_events import (
    CheckData,
    Connected,
    DataChecked,
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
    Upload,
    Uploaded,
    Work,
    Worked,
    WorkFailed,
)
from federation.blobs import BlobRef
from federation.findings import Finding
from federation.messages import (
    Contribution,
    DeclineCause,
    FromCoordinator,
    Heartbeat,
    Hello,
    JobAccepted,
    JobEnded,
    JobOffer,
    JobState,
    Refusal,
    RevocationList,
    StepEnded,
    StepKind,
    StepStart,
    Welcome,
)
from tests.client.test_session import MODEL, NONCE, NOW, OPEN, PREPARATION, Consortium
from tests.federation.test_codec import valid
from tests.fuzz.profiles import budget
from tests.fuzz.snapshot import snapshot
from tests.fuzz.test_run import TEXT

STRICT = Policy(datasets=(), tasks=("*",), models=("*",), jobs=("*",), allow_plain_aggregation=True)
"""The policy of a site that no longer lends its data."""
SEEN = frozenset({"_clock", "_rules"})
"""The clock and the site's own policy as the session saw them last: no message sets either."""
CONSORTIUM = Consortium.found()
STRANGERS = Consortium.found()
WELCOME = CONSORTIUM.welcome()
JOBS = ("one-1", "two-1")
FINDINGS = ((), (), (Finding("data", "one class", "nothing", "warning"),), (Finding("data", "no rows", "add some"),))

jobs = st.sampled_from(JOBS)
steps = st.builds(
    StepStart,
    st.sampled_from((*JOBS, *JOBS, "other-1")),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from((StepKind.TRAIN, StepKind.TRAIN, StepKind.EVALUATE)),
    st.just(1),
    st.sampled_from((MODEL, PREPARATION)),
    st.just(PREPARATION),
    st.just(400),
    st.sampled_from((60.0, 30.0)),
)
offers = st.sampled_from(
    (
        CONSORTIUM.offer(TEXT, "one-1", "athens", "berlin"),
        CONSORTIUM.offer(TEXT + "# other terms\n", "two-1"),
        CONSORTIUM.offer(TEXT, "strange-1", "berlin", "cork"),
        CONSORTIUM.offer("format = 2", "bad-1"),
        STRANGERS.offer(TEXT, "forged-1"),
    )
)
cork = CONSORTIUM.sites["cork"].serial
lists = st.sampled_from(
    (
        *(CONSORTIUM.revocations(version) for version in range(3)),
        CONSORTIUM.revocations(3, cork),
        STRANGERS.revocations(9),
    )
)
policies = st.sampled_from((OPEN, STRICT))


class Attendance(RuleBasedStateMachine):
    """A session whose agent does what it is told, or fails, or speaks of work that was let go; and its coordinator."""

    @initialize()
    def begin(self) -> None:
        """A site that has just started."""
        self.session = Session(CONSORTIUM.identity())
        self.doing: Effect | None = None
        self.let_go: list[Effect] = []
        self.results: dict[str, Worked] = {}
        self.kept: dict[str, Remembered] = {}
        self.accepted: set[str] = set()
        self.contributions = 0
        self.linked = False

    # What the agent tells.

    @rule()
    def go_to_work(self) -> None:
        """The site attends, if it is paused or away, and accepts both jobs unless it works."""
        if not self.session.attending or self.doing is None:
            self.feed(Paused(paused=False))
            self.connect(WELCOME)
            for job in JOBS:
                self.hear(CONSORTIUM.offer(TEXT, job))
                if isinstance(self.doing, CheckData):
                    self.finish()

    @rule(findings=st.sampled_from(FINDINGS))
    def finish(self, findings: tuple[Finding, ...] = ()) -> None:
        """What is being done ends well."""
        done, self.doing = self.doing, None
        if done is not None:
            self.feed(ended_well(done, findings))

    @rule(cause=st.sampled_from(DeclineCause))
    def fail(self, cause: DeclineCause) -> None:
        """What is being done fails."""
        done, self.doing = self.doing, None
        if done is not None:
            self.feed(failed(done, cause))

    @precondition(lambda self: self.let_go)
    @rule(at=st.integers(0, 3), well=st.booleans())
    def end_late(self, at: int, well: bool) -> None:  # noqa: FBT001 - hypothesis names it
        """Work that was let go ends all the same."""
        done = self.let_go[-1 - at % len(self.let_go)]
        self.feed(ended_well(done, ()) if well else failed(done, DeclineCause.INTERNAL))

    @rule(what=st.sampled_from(("cut", "cut and back", "cut and back", "dial", "forged", "pause", "go on", "restart")))
    def disturb(self, what: str) -> None:
        """The line or the administrator does something to the site."""
        match what:
            case "pause" | "go on":
                self.feed(Paused(paused=what == "pause"))
            case "restart":
                self.restart()
            case "dial" | "forged":
                self.connect(None if what == "dial" else STRANGERS.welcome())
            case _:
                self.feed(Disconnected())
                self.linked = False
                if what == "cut and back":
                    self.connect(WELCOME)

    def connect(self, welcome: Welcome | None) -> None:
        """A stream opens if none is open, and this is said on it first."""
        if not self.linked:
            self.feed(Connected(NONCE, "0.1.0"))
            self.linked = True
        if welcome is not None:
            self.hear(welcome)

    def restart(self) -> None:
        """The site is killed, and started again with what it keeps."""
        self.session = Session(CONSORTIUM.identity(), tuple(self.kept.values()))
        self.doing, self.let_go, self.linked, self.accepted = None, [], False, set()
        self.results = {job: each.result for job, each in self.kept.items()}

    # What the coordinator says.

    @rule(job=jobs, rules=policies)
    def offer(self, job: str, rules: Policy) -> None:
        """A job is offered, perhaps again, and perhaps the site's policy has changed since."""
        self.hear(CONSORTIUM.offer(TEXT, job), rules)

    @rule(step=steps, finish=st.integers(0, 3))
    def ask(self, step: StepStart, finish: int) -> None:
        """A step is asked, of any job, in any order; some of what it takes is done at once."""
        self.hear(step)
        for _ in range(finish):
            if isinstance(self.doing, Fetch | Work | Upload):
                self.finish()

    @rule(
        message=st.one_of(
            st.builds(StepEnded, jobs, st.integers(1, 3), st.booleans()),
            st.builds(JobEnded, jobs, st.just(JobState.STOPPED), st.just("stopped")),
            offers,
            lists,
            *(valid(cls) for cls in (Welcome, Heartbeat, JobOffer, StepStart, StepEnded, JobEnded, Refusal)),
        )
    )
    def say(self, message: FromCoordinator) -> None:
        """Steps and jobs end, other offers and lists of revoked members come, and messages that make no sense here."""
        self.hear(message)

    def hear(self, message: FromCoordinator, rules: Policy = OPEN) -> None:
        """Words that ask for nothing, or are refused, change nothing."""
        before = snapshot(self.session, but=SEEN)
        attended = self.session.attending
        effects = self.feed(Received(message, rules))
        known = {job for job in JOBS if job in self.session._jobs}
        match message:
            case Heartbeat() | Refusal():
                idle = True
            case Welcome():
                idle = attended
            case StepEnded(job) | JobEnded(job):
                idle = job not in known and not effects
            case RevocationList():
                idle = attended and not any(isinstance(effect, KeepRevocations) for effect in effects)
            case _:
                idle = False
        if (attended and idle) or not self.linked:
            assert snapshot(self.session, but=SEEN) == before
            assert all(isinstance(effect, Note) for effect in effects)

    def feed(self, event: Event) -> tuple[Effect, ...]:
        """Something happens; what the session wants done is what it may want."""
        effects = self.session.receive(event, NOW)
        for effect in effects:
            self.perform(effect, event)
        if isinstance(event, Received) and isinstance(event.message, JobEnded) and self.session.attending:
            self.accepted.discard(event.message.job)
        return effects

    def perform(self, effect: Effect, event: Event) -> None:
        """Holds an effect to what a site may do, and does it."""
        match effect:
            case Send(Hello()):
                assert isinstance(event, Connected)
            case Send(message):
                assert self.session.attending
                self.said(message, event)
            case CheckData():
                self.take_up(effect)
            case Fetch(step) | Work(step) | Upload(step):
                assert step.job in self.accepted
                if isinstance(effect, Upload):
                    assert self.session.attending
                    assert effect.payload == self.results[step.job].payload
                self.take_up(effect)
            case Forget(""):
                if self.doing is not None:
                    self.let_go.append(self.doing)
                self.doing = None
            case Forget(job):
                self.kept.pop(job, None)
            case Keep(remembered):
                assert remembered.result.step.job == remembered.offer.job
                self.kept[remembered.offer.job] = remembered
                self.results[remembered.offer.job] = remembered.result
            case _:
                pass

    def said(self, message: Any, event: Event) -> None:
        """What a site says of jobs is what it may say."""
        match message:
            case JobAccepted(job):
                assert job in JOBS
                self.accepted.add(job)
            case Contribution(job, step, _, payload):
                assert isinstance(event, Uploaded)
                assert job in self.accepted
                assert (payload, step) == (self.results[job].payload, self.results[job].step.step)
                self.contributions += 1
            case _:
                pass

    def take_up(self, effect: Effect) -> None:
        """Begins a piece of work: never a second one beside another."""
        assert self.doing is None, f"{effect} while {self.doing}"
        self.doing = effect

    def teardown(self) -> None:
        """From here a good coordinator gets an answer to a job's only step, unless it was revoked meanwhile."""
        target(self.contributions, label="contributions")
        for event in (Disconnected(), Paused(paused=False), Connected(NONCE, "0.1.0")):
            self.feed(event)
        self.session._me = CONSORTIUM.identity()  # whoever was revoked is a member again: the list is not the point
        self.linked = True
        self.hear(WELCOME)
        while self.doing is not None:
            self.finish()
        for job in JOBS:
            self.hear(JobEnded(job, JobState.STOPPED, "stopped"))
        before = self.contributions
        self.hear(CONSORTIUM.offer(TEXT, "one-1"))
        self.finish()
        self.hear(StepStart("one-1", 9, 0, StepKind.TRAIN, 1, MODEL, PREPARATION, 400, 60.0))
        for _ in range(3):
            self.finish()
        assert self.contributions == before + 1


def ended_well(done: Effect, findings: tuple[Finding, ...]) -> Event:
    """What the agent tells when work is done; the same work has the same result."""
    match done:
        case CheckData(offer):
            return DataChecked(offer.job, findings)
        case Fetch(step):
            return Fetched(step)
        case Work(step):
            content = f"{step.job} {step.step} {step.kind} {step.model}".encode()
            return Worked(step, BlobRef(BlobRef.of(content).digest, step.length), 100.0, 2.0)
        case Upload(step):
            return Uploaded(step)
        case _:
            raise AssertionError(done)


def failed(done: Effect, cause: DeclineCause) -> Event:
    """What the agent tells when work cannot be done."""
    match done:
        case CheckData(offer):
            return WorkFailed(offer, cause, "it failed")
        case Fetch(step) | Work(step) | Upload(step):
            return WorkFailed(step, cause, "it failed")
        case _:
            raise AssertionError(done)


TestAttendance = Attendance.TestCase
TestAttendance.settings = budget(25, steps=40)
