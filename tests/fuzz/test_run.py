"""A job hears anything from anybody at any time: what cannot be changes nothing, no step is lost, it can always end."""

from dataclasses import fields
from typing import Any, get_args, get_type_hints

from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator import events
from coordinator.events import (
    Broken,
    Committed,
    Completed,
    Effect,
    Event,
    NotCommitted,
    Rejected,
    StopAsked,
)
from coordinator.records import JobRecord, Outcome
from coordinator.run import Run
from federation import job as jobs
from federation.blobs import BlobRef
from federation.errors import LocalProtocolError, RemoteProtocolError
from federation.findings import Finding
from federation.messages import (
    Contribution,
    DeclineCause,
    JobState,
    MembershipStatement,
    Metric,
    Phase,
    Role,
    StepKind,
    StepStart,
)
from tests.coordinator.test_run import BETTER, LENGTHS, Stage, answer_to
from tests.fuzz.profiles import budget
from tests.fuzz.snapshot import refusal, snapshot

SITES = ("athens", "berlin", "cork", "dublin")
NEEDED, MINIMUM, ROUNDS = 2, 3, 2
TEXT = f"""
format = 1
name = "heart"

[task]
kind = "tabular"
target = "binary"

[data]
dataset = "heart"
label = "disease"
columns = [{{ name = "age", kind = "numeric", range = [0, 120] }}]

[model]
name = "logistic_regression"

[strategy]
name = "fedavg"

[rounds]
maximum = {ROUNDS}
best_metric = "auc"

[cohort]
minimum_sites = {MINIMUM}
quorum = {NEEDED}
deadline_seconds = 60

[privacy]
secure_aggregation = "plain"
"""
JOB = jobs.parse(TEXT)
ROSTER = tuple(
    MembershipStatement("heart", f"{number:032x}", site, site, Role.SITE, bytes(32), bytes(32), 1, 9, bytes(64))
    for number, site in enumerate(SITES, 1)
)

sites = st.sampled_from((*SITES, "outsider"))
FOUND = (Finding("data", "no rows", "add some"),)
PAYLOADS = st.builds(BlobRef, st.sampled_from((bytes(32), b"x" * 32)), st.sampled_from((24, 400, 80, 0)))
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "site": sites,
    "by": st.just("olga"),
    "problem": st.just("it does not work"),
    "problems": st.lists(st.tuples(sites, st.just("not finite")), max_size=3).map(tuple),
    "metrics": st.sampled_from(((), (Metric("auc", 0.9),), (Metric("loss", 0.1), Metric("auc", 0.5)))),
    "findings": st.just(FOUND),
    "job": st.sampled_from(("heart-1", "heart-2")),
    "job_digest": st.sampled_from((jobs.digest(TEXT), bytes(32))),
    "weight": st.sampled_from((1.0, 1e15)),
    "seconds": st.sampled_from((0.0, 5.0)),
    "behind": st.frozensets(sites),
    "members": st.frozensets(sites),
    "declined": st.lists(st.tuples(sites, st.just("its data"))).map(tuple),
    "missing": st.lists(st.tuples(sites, st.just("its group"))).map(tuple),
    "waits": st.just("their work"),
    "step": st.integers(1, 6),
    "attempt": st.integers(0, 3),
}
BY_TYPE: dict[object, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    BlobRef: PAYLOADS,
    DeclineCause: st.sampled_from(DeclineCause),
    Phase: st.sampled_from(Phase),
}


def drawn(cls: type) -> st.SearchStrategy[Any]:
    """Values of a class, or of the classes of a union, whose fields have any value that they could have here."""
    if options := [each for each in get_args(cls) if isinstance(each, type)]:
        return st.one_of(*map(drawn, options))
    if cls in BY_TYPE:
        return BY_TYPE[cls]
    hints = get_type_hints(cls)
    return st.builds(
        cls,
        **{each.name: BY_NAME[each.name] if each.name in BY_NAME else drawn(hints[each.name]) for each in fields(cls)},
    )


HEARD = frozenset({"last_seen"})
"""A site whose words are refused was heard all the same."""


class Conduct(RuleBasedStateMachine):
    """A run on a stage of four sites, with honest turns so that it gets somewhere, and everything else between them."""

    @initialize(statistics=st.sampled_from((24, 24, 0)), endings=st.sampled_from((False, False, False, True)))
    def submit(self, statistics: int, endings: bool) -> None:  # noqa: FBT001 - hypothesis names it
        """A job was just submitted, which may be ended, or (more often) must live."""
        self.endings = endings
        record = JobRecord("heart-1", "heart", TEXT, 1000.0, ROSTER, BlobRef.of(b"initial model"))
        lengths = events.Lengths(statistics, LENGTHS.train, LENGTHS.evaluate)
        self.stage = Stage(Run(record, JOB, lengths, BETTER))

    # Honest turns.

    @rule(site=st.sampled_from(SITES))
    def attend(self, site: str) -> None:
        """A site attends and accepts."""
        self.stage.attend(site)

    @rule()
    def gather(self) -> None:
        """All sites attend and accept."""
        self.stage.attend(*SITES)

    @rule(site=st.sampled_from(SITES))
    def contribute(self, site: str) -> None:
        """A site answers what it was asked last, be it long ago."""
        for start in self.stage.told(site, StepStart)[-1:]:
            self.hear(site, answer_to(start, site))

    @rule()
    def step(self) -> None:
        """All sites attend and answer what they were asked last, and what comes of it is summed and stored."""
        self.gather()
        for site in SITES:
            self.contribute(site)
        if self.stage.work:
            self.stage.complete()
        if self.stage.commits:
            self.stage.commit()

    @precondition(lambda self: self.stage.work)
    @rule()
    def complete(self) -> None:
        """A sum is done, perhaps of a step that is over."""
        self.stage.complete()

    @precondition(lambda self: self.stage.commits)
    @rule()
    def commit(self) -> None:
        """The store has taken the step."""
        self.stage.commit()

    @precondition(lambda self: self.stage.work)
    @rule(sites=st.lists(st.sampled_from(SITES), min_size=1, max_size=2, unique=True))
    def reject(self, sites: list[str]) -> None:
        """A sum cannot use some of its contributions."""
        work = self.stage.work[0]
        counted = {each.site for each in work.contributions}
        problems = tuple((site, "not finite") for site in sites if site in counted)
        if problems:
            self.stage.complete(Rejected(problems))

    @precondition(lambda self: self.stage.deadlines)
    @rule()
    def time_up(self) -> None:
        """The deadline passes."""
        self.stage.time_up()

    @precondition(lambda self: not self.stage.commits or self.stage.run._storing)
    @rule()
    def restart(self) -> None:
        """The coordinator is killed: what it was storing is stored, or not."""
        self.stage = self.stage.restarted()

    # Everything else.

    @rule(event=drawn(Event))
    def anything(self, event: Event) -> None:
        """An event that may be late, doubled, foreign, or our own mistake."""
        if not self.endings and isinstance(event, StopAsked):
            return
        before = snapshot(self.stage.run, but=HEARD)
        effects: list[Effect] = []
        if bug := refusal(lambda: effects.extend(self.stage.run.receive(event, self.stage.now))):
            assert isinstance(bug, LocalProtocolError)
            assert "heart-1" in bug.problem
            assert snapshot(self.stage.run, but=HEARD) == before
            return
        match event:
            case Committed():
                raise AssertionError("nothing was stored")
            case NotCommitted():
                self.stage.commits.pop()
            case Completed() if effects:
                self.stage.work.pop()  # the sum that was waited for is done, with this
            case Completed():
                assert snapshot(self.stage.run, but=HEARD) == before
            case _:
                pass
        self.stage.perform(tuple(effects))

    @precondition(lambda self: self.stage.work)
    @rule(completion=drawn(events.Completion))
    def misreport(self, completion: events.Completion) -> None:
        """The sum that is waited for comes to anything."""
        work = self.stage.work[-1]
        if self.endings or not isinstance(completion, Broken):
            self.anything(Completed(work.step, work.attempt, completion))

    @precondition(lambda self: self.stage.commits)
    @rule(by=st.integers(-2, 2), stored=st.booleans())
    def misstore(self, by: int, stored: bool) -> None:  # noqa: FBT001 - hypothesis names it
        """The store speaks of the step that it is given, before it has taken it, or of another."""
        step = self.stage.commits[0].step + by
        if stored:
            self.anything(Committed(step))
        elif self.endings or by:
            self.anything(NotCommitted(step, "the disk is gone"))

    @rule(site=sites, message=drawn(events.Answer))
    def say(self, site: str, message: events.Answer) -> None:
        """A site, or who is none, says anything."""
        self.hear(site, message)

    @precondition(lambda self: self.stage.deadlines)
    @rule(
        site=sites,
        change=st.sampled_from(("step", "attempt", "length", "content", "weight")),
        by=st.sampled_from((-1, 1)),
    )
    def nearly_right(self, site: str, change: str, by: int) -> None:
        """An answer to what was asked last, but for one thing."""
        name = site if site in SITES else "athens"
        for start in self.stage.told(name, StepStart)[-1:]:
            right = answer_to(start, name)
            length = right.payload.length + (by if change == "length" else 0)
            digest = right.payload.digest if change != "content" else b"y" * 32
            self.hear(
                site,
                Contribution(
                    right.job,
                    max(1, right.step + (by if change == "step" else 0)),
                    max(0, right.attempt + (by if change == "attempt" else 0)),
                    BlobRef(digest, length),
                    right.weight + (by if change == "weight" else 0),
                    right.seconds,
                ),
            )

    def hear(self, site: str, message: events.Answer) -> None:
        """A site's words; those that are refused changed nothing, and name the site."""
        before = snapshot(self.stage.run, but=HEARD)
        if refused := refusal(lambda: self.stage.hear(site, message)):
            assert isinstance(refused, RemoteProtocolError)
            assert f"site {site}" in refused.problem
            assert snapshot(self.stage.run, but=HEARD) == before

    # What holds whatever happens.

    @invariant()
    def steps_grow_by_one_and_each_is_committed_once(self) -> None:
        """No step is lost, doubled or out of order, and none goes to the store while another is there."""
        stored = [record.step for record in self.stage.stored]
        assert stored == list(range(1, len(stored) + 1))
        assert self.stage.run.record.next_step == len(stored) + 1
        assert len(self.stage.commits) <= 1

    @invariant()
    def each_site_counts_once_with_its_own(self) -> None:
        """A sum has at most one contribution of a site, of the right length, and never fewer than the quorum."""
        for work in self.stage.work:
            names = [each.site for each in work.contributions]
            assert names == sorted(set(names))
            assert {each.payload.length for each in work.contributions} <= {self.stage.run.lengths.of(work.kind)}
            assert len(names) >= NEEDED or work.kind is StepKind.STATISTICS
        for record in self.stage.stored[-1:]:
            assert len({share.site for share in record.shares}) == len(record.shares)
            counted = sum(share.outcome is Outcome.COUNTED for share in record.shares)
            assert counted >= NEEDED or record.kind is StepKind.STATISTICS

    @invariant()
    def it_can_be_seen(self) -> None:
        """The view is one that travels, however the job stands."""
        view = self.stage.run.view(self.stage.now)
        assert view.state is self.stage.run.record.state
        assert {site.name for site in view.sites} == set(SITES)

    def teardown(self) -> None:
        """From here an operator can end the job, and, if nobody does, honest sites bring it to its end."""
        target(len(self.stage.stored), label="steps that were stored")
        stopped = self.stage.restarted()
        stopped.feed(StopAsked("olga"))
        assert stopped.run.over
        here = self.stage
        if here.commits:
            here.commit()
        for _ in range(20):
            if here.run.over:
                break
            here.attend(*SITES)
            for site in SITES:
                for start in here.told(site, StepStart)[-1:]:
                    self.hear(site, answer_to(start, site))
            while here.work:
                here.complete()
            while here.commits:
                here.commit()
            if here.deadlines and not here.run.over:
                here.time_up()
        assert here.run.over
        assert here.run.record.reason
        if here.run.record.state is JobState.FINISHED:
            assert [record.kind for record in here.stored].count(StepKind.TRAIN) == ROUNDS
            assert here.stored[-1].final is not None


TestConduct = Conduct.TestCase
TestConduct.settings = budget(25, steps=40)
