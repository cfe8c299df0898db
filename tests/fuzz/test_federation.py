"""A job and its sites on lines that break: whatever is cut, killed, paused, delayed or late, each step counts once."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
from coordinator.events import Complete, SiteArrived, SiteLeft, SitePaused
from coordinator.records import JobRecord, Outcome
from coordinator.run import MAX_FAILURES, Run
from federation.blobs import BlobRef
from federation.messages import (
    Availability,
    Contribution,
    DeclineCause,
    FromCoordinator,
    FromSite,
    Hello,
    JobState,
    StepKind,
    StepStart,
)
from tests.client.test_session import NONCE, NOW, OPEN, Consortium
from tests.coordinator.test_run import BETTER, LENGTHS, Stage
from tests.fuzz.profiles import budget
from tests.fuzz.test_run import JOB, NEEDED, ROUNDS, TEXT

CONSORTIUM = Consortium.found()
SITES = tuple(CONSORTIUM.sites)
WELCOMES = {site: CONSORTIUM.welcome(site) for site in SITES}
IDENTITIES = {site: CONSORTIUM.identity(site) for site in SITES}

sites = st.sampled_from(SITES)


def result(site: str, step: StepStart) -> BlobRef:
    """What a site's work comes to: another site's, or another question's, is another."""
    content = f"{site} {step.step} {step.kind} {step.model} {step.preparation}".encode()
    return BlobRef(BlobRef.of(content).digest, step.length)


@dataclass(eq=False)
class Place:
    """One site: its session, what its agent is doing, what it keeps through a kill, and its line, both ways."""

    name: str
    session: Session
    doing: Effect | None = None
    let_go: Effect | None = None
    journal: dict[str, Remembered] = field(default_factory=dict)
    linked: bool = False
    inbox: deque[FromCoordinator] = field(default_factory=deque)
    outbox: deque[FromSite] = field(default_factory=deque)


class Federation(RuleBasedStateMachine):
    """One coordinator and three sites, none of which lies; only the world around them is bad."""

    @initialize(statistics=st.sampled_from((24, 0)))
    def begin(self, statistics: int) -> None:
        """A job was submitted, and nobody attends yet."""
        roster = tuple(CONSORTIUM.sites.values())
        record = JobRecord("heart-1", "heart", TEXT, 1000.0, roster, BlobRef.of(b"initial model"))
        lengths = LENGTHS if statistics else type(LENGTHS)(0, LENGTHS.train, LENGTHS.evaluate)
        self.stage = Stage(Run(record, JOB, lengths, BETTER))
        self.places = {site: Place(site, Session(IDENTITIES[site])) for site in SITES}
        self.attending: set[str] = set()  # as the coordinator believes
        self.dead: set[str] = set()  # of those, who is on the other end of no stream that they know of
        self.spool: set[tuple[str, BlobRef]] = set()
        self.asked: dict[int, StepStart] = {}
        self.failures = 0

    # Honest turns.

    @rule(turns=st.integers(1, 40), order=st.randoms(use_true_random=False))
    def go_on(self, turns: int, order: object) -> None:
        """So many things happen that should, in any order."""
        for _ in range(turns):
            moves = list(self.moves())
            if not moves:
                break
            order.choice(moves)()  # type: ignore[attr-defined]  # hypothesis' own Random

    def moves(self) -> Iterator[Callable[[], object]]:
        """What can happen next that should."""
        for place in self.places.values():
            if not place.linked:
                yield lambda place=place: self.dial(place)
            if place.inbox:
                yield lambda place=place: self.feed(place, Received(place.inbox.popleft(), OPEN))
            if place.outbox:
                yield lambda place=place: self.arrive(place, place.outbox.popleft())
            if place.doing is not None and (place.linked or not isinstance(place.doing, Fetch | Upload)):
                yield lambda place=place: self.finish(place)
        if self.stage.work:
            yield self.complete
        if self.stage.commits:
            yield self.commit

    def dial(self, place: Place) -> None:
        """A site opens a stream."""
        place.linked = True
        self.feed(place, Connected(NONCE, "0.1.0"))

    def arrive(self, place: Place, message: FromSite) -> None:
        """What a site said comes to the coordinator, which never has to refuse an honest site's word."""
        match message:
            case Hello():
                if place.name in self.attending:
                    self.stage.feed(SiteLeft(place.name))  # the older stream, whose end nobody noticed
                self.attending.add(place.name)
                self.dead.discard(place.name)
                place.inbox.append(WELCOMES[place.name])
                self.stage.feed(SiteArrived(place.name))
            case Availability(available):
                self.stage.feed(SitePaused(place.name, not available))
            case _:
                if isinstance(message, Contribution) and self.stage.run.expects(place.name, message.payload):
                    assert (place.name, message.payload) in self.spool
                self.stage.hear(place.name, message)
        self.post()

    def finish(self, place: Place) -> None:
        """What a site is doing ends; a transfer that the coordinator does not want now ends badly."""
        done, place.doing = place.doing, None
        run = self.stage.run
        match done:
            case CheckData(offer):
                self.feed(place, DataChecked(offer.job, ()))
            case Fetch(step):
                wanted = [ref for ref in (step.model, step.preparation) if ref is not None]
                got = not run.over and all(run.offers(ref) for ref in wanted)
                self.feed(place, Fetched(step) if got else WorkFailed(step, DeclineCause.INTERNAL, "not offered"))
            case Work(step):
                self.feed(place, Worked(step, result(place.name, step), 10.0, 1.0))
            case Upload(step, payload) if run.expects(place.name, payload):
                self.spool.add((place.name, payload))
                self.feed(place, Uploaded(step))
            case Upload(step):
                self.feed(place, WorkFailed(step, DeclineCause.INTERNAL, "not waited for"))
            case _:
                raise AssertionError(done)

    def complete(self) -> None:
        """A sum is done."""
        self.stage.complete()
        self.post()

    def commit(self) -> None:
        """A step is stored."""
        self.stage.commit()
        self.spool.clear()
        self.post()

    # What goes wrong.

    @rule(site=sites, noticed=st.booleans())
    def cut(self, site: str, noticed: bool) -> None:  # noqa: FBT001 - hypothesis names it
        """A line breaks with all that was on it; the coordinator notices now, or when the site comes back."""
        place = self.places[site]
        place.inbox.clear()
        place.outbox.clear()
        if place.linked:
            place.linked = False
            self.feed(place, Disconnected())
        self.dead.add(site)
        if noticed and site in self.attending:
            self.attending.discard(site)
            self.stage.feed(SiteLeft(site))
            self.post()

    @rule(site=sites)
    def kill(self, site: str) -> None:
        """A site is killed, and started again with its journal."""
        self.cut(site, noticed=True)
        place = self.places[site]
        place.session = Session(IDENTITIES[site], tuple(place.journal.values()))
        place.doing = place.let_go = None

    @rule(stored=st.booleans())
    def restart(self, stored: bool) -> None:  # noqa: FBT001 - hypothesis names it
        """The coordinator is killed, and what it was storing is stored or not; uploads are sent again."""
        if stored and self.stage.commits:
            record = self.stage.commits.popleft()
            self.stage.stored.append(record)
            self.stage.run.store(record)
        self.stage = self.stage.restarted()
        self.attending.clear()
        self.spool.clear()
        for site in SITES:
            self.cut(site, noticed=False)

    @precondition(lambda self: self.stage.deadlines)
    @rule()
    def time_up(self) -> None:
        """The deadline passes."""
        self.stage.time_up()
        self.post()

    @rule(site=sites, paused=st.booleans())
    def pause(self, site: str, paused: bool) -> None:  # noqa: FBT001 - hypothesis names it
        """A site's administrator pauses it, or lets it go on."""
        self.feed(self.places[site], Paused(paused))

    @rule(site=sites, cause=st.sampled_from((DeclineCause.RESOURCES, DeclineCause.INTERNAL)))
    def fail(self, site: str, cause: DeclineCause) -> None:
        """A site's work fails."""
        place = self.places[site]
        if isinstance(place.doing, Fetch | Work | Upload):
            self.failures += 1
            step, place.doing = place.doing.step, None
            self.feed(place, WorkFailed(step, cause, "it failed"))

    @rule(site=sites)
    def end_late(self, site: str) -> None:
        """Training that was let go ends all the same."""
        place = self.places[site]
        if isinstance(place.let_go, Work):
            step, place.let_go = place.let_go.step, None
            self.feed(place, Worked(step, result(site, step), 10.0, 1.0))

    @rule(site=sites)
    def say_twice(self, site: str) -> None:
        """A word is delivered twice; only a first word cannot be."""
        place = self.places[site]
        if place.outbox and not isinstance(place.outbox[0], Hello):
            self.arrive(place, place.outbox[0])

    # What both ends do.

    def feed(self, place: Place, event: Event) -> None:
        """Something happens at a site."""
        for effect in place.session.receive(event, NOW):
            match effect:
                case Send(message) if place.linked:
                    place.outbox.append(message)
                case CheckData() | Fetch() | Work() | Upload():
                    assert place.doing is None, f"{effect} while {place.doing}"
                    place.doing = effect
                case Forget(""):
                    place.let_go, place.doing = place.doing, None
                case Forget(job):
                    place.journal.pop(job, None)
                case Keep(remembered):
                    place.journal[remembered.offer.job] = remembered
                case Disconnect(reason):
                    raise AssertionError(reason)
                case _:
                    pass

    def post(self) -> None:
        """What the coordinator has said since goes onto the lines that are there."""
        for site, message in self.stage.said:
            if isinstance(message, StepStart):
                self.asked[message.step] = message
            if site in self.attending - self.dead:
                self.places[site].inbox.append(message)
        self.stage.said.clear()

    # What holds whatever happens.

    @invariant()
    def sums_are_of_answers_to_this_very_question(self) -> None:
        """A sum has each site's own result for its step and model, uploaded before, and no site's twice."""
        for work in self.stage.work:
            self.check(work)

    def check(self, work: Complete) -> None:
        """Holds one sum to that."""
        names = [each.site for each in work.contributions]
        assert names == sorted(set(names))
        for each in work.contributions:
            asked = self.asked[work.step]
            assert asked.model in {None, work.model}
            assert each.payload == result(each.site, asked)

    @invariant()
    def steps_grow_by_one(self) -> None:
        """No step is lost or committed twice, over all restarts."""
        steps = [record.step for record in self.stage.stored]
        assert steps == list(range(1, len(steps) + 1))
        assert len(self.stage.commits) <= 1

    def teardown(self) -> None:
        """From here, with lines that hold, the job ends by itself, and every site forgets it."""
        target(len(self.stage.stored), label="steps that were stored")
        for place in self.places.values():
            self.feed(place, Paused(paused=False))
        for _ in range(4000):
            if move := next(self.moves(), None):
                move()
            elif self.stage.run.over:
                break
            else:
                self.time_up()
        run = self.stage.run
        assert run.over, run.view(self.stage.now)
        if run.record.state is JobState.FAILED:
            assert self.failures >= MAX_FAILURES, run.record.reason
        else:
            assert run.record.reason == f"all {ROUNDS} rounds done"
            rounds = [record.round for record in self.stage.stored if record.kind is StepKind.TRAIN]
            assert rounds == list(range(1, ROUNDS + 1))
        for record in self.stage.stored:
            counted = [share.site for share in record.shares if share.outcome is Outcome.COUNTED]
            assert len(counted) >= NEEDED or not record.shares
        assert not any(place.session._jobs for place in self.places.values())


TestFederation = Federation.TestCase
TestFederation.settings = budget(20)
