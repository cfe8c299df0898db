"""One job from its first offer to its final model: which step comes next, when to stop, and what to store.

```
WAITING --- enough sites accepted ---> RUNNING --- last round, early stop ---> FINISHED
   |                                    |  ^
   |                                    v  | statistics -> (train -> evaluate) x rounds, each one step
   |-- too many sites refused -> FAILED <--|-- the same step failed for good
   `-- stop ------------------> STOPPED <--'
```
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from coordinator import cohort
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
from coordinator.judging import best_round, stalled
from coordinator.records import JobRecord, JobSite, ModelRecord, Outcome, Share, StepRecord
from coordinator.round import (
    Contributed,
    DeadlinePassed,
    PayloadRefused,
    Round,
    RoundState,
    SealedRound,
    SiteDeclined,
)
from federation.blobs import BlobRef
from federation.errors import LocalProtocolError, RemoteProtocolError, WhoActs
from federation.findings import Finding, brief
from federation.job import Job
from federation.job import digest as digest_of
from federation.messages import (
    Contribution,
    DeclineCause,
    Declined,
    JobAccepted,
    JobEnded,
    JobOffer,
    JobRefused,
    JobState,
    JobView,
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

__all__ = ["MAX_FAILURES", "PAUSED", "Run"]

MAX_FAILURES = 3
"""Attempts at one step that may fail in a row although enough sites were here, before the job fails."""

_MAX_WORDS = 1000
"""Characters of a reason or trouble that a view or message carries."""

PAUSED = "its administrator has paused it"
"""What holds a paused site back, in words."""

_MADE = {StepKind.STATISTICS: Prepared, StepKind.TRAIN: Stepped, StepKind.EVALUATE: Measured}
"""What a step's sum is made into."""

_CAUSES = {
    DeclineCause.POLICY: "its own policy forbids this step",
    DeclineCause.DATA: "its data cannot give a finite result",
    DeclineCause.RESOURCES: "it ran out of memory or disk",
    DeclineCause.CANCELLED: "its administrator cancelled the work",
    DeclineCause.PAUSED: PAUSED,
    DeclineCause.INTERNAL: "its trainer failed; the site's log says why",
}


@dataclass(slots=True)
class _Site:
    """What the run knows of one site of its roster."""

    organisation: str
    attending: bool = False
    paused: bool = False
    overdue: int = 0
    last_seen: float = 0.0
    answer: str = ""
    findings: tuple[Finding, ...] = ()
    phase: Phase | None = None
    trouble: str = ""
    seconds: float = 0.0
    transferred: int = 0

    @property
    def here(self) -> bool:
        """Whether it attends and takes part in steps."""
        return self.attending and not self.paused


class Run:
    """The state of one job. It owns no socket, clock or file: events go in with the time, effects come out.

    Args:
        record: The job as stored; a run made from it goes on after the last committed step.
        job: The job file, parsed.
        lengths: Bytes of each kind's contributions.
        better: Of each metric of the task, whether higher or lower is better.
        history: The rounds already committed, for people.
        sealing: The secure aggregation by which its steps are summed; None where sums are plain.
    """

    def __init__(
        self,
        record: JobRecord,
        job: Job,
        lengths: Lengths,
        better: Mapping[str, Better],
        history: tuple[RoundView, ...] = (),
        sealing: Sealing | None = None,
    ) -> None:
        self.record = record
        self.job = job
        self.lengths = lengths
        self.better = better
        self.sealing = sealing
        self._digest = digest_of(record.text)
        self._history = {view.number: view for view in history}
        self._sites = {statement.name: _Site(statement.organisation) for statement in record.roster}
        for known in record.sites:
            self._sites[known.site].answer = known.answer
            self._sites[known.site].findings = known.findings
        self._round: Round | SealedRound | None = None
        self._attempt = 0
        self._failures = 0
        self._kind = StepKind.STATISTICS
        self._began = 0.0
        self._asked = 0
        self._put_down: set[str] = set()  # for whom their pause has answered the step under way
        self._committing = False
        self._storing = False
        self._end_after_store: tuple[JobState, str] | None = None
        self._transferred: dict[str, int] = {}
        self._metrics = dict(record.metrics)

    # ------------------------------------------------------------------------------------------------ what it knows

    @property
    def id(self) -> str:
        """The job's id."""
        return self.record.id

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.record.state.over

    def expects(self, site: str, payload: BlobRef) -> bool:
        """Whether this site may upload this payload now."""
        return self._round is not None and self._round.takes(site, payload)

    @property
    def seated(self) -> frozenset[str]:
        """The sites that take part in the job now: here, not paused, and with the job accepted since they came."""
        here = (name for name, site in self._sites.items() if site.here and site.answer == "accepted")
        return frozenset() if self.over else frozenset(here)

    def offers(self, payload: BlobRef) -> bool:
        """Whether the job's sites may download this payload."""
        return payload in {self._model, self.record.preparation}

    def moved(self, site: str, count: int) -> None:
        """Counts payload bytes to or from a site."""
        if site in self._sites:
            self._sites[site].transferred += count
            self._transferred[site] = self._transferred.get(site, 0) + count

    def doing(self, site: str, now: float) -> tuple[str, str]:
        """What a site of the roster is doing for this job, and what holds it back, in words."""
        view = self._site_view(site, self._sites[site], now)
        return view.state, view.trouble

    def view(self, now: float) -> JobView:
        """The job as an operator sees it."""
        end = self.record.ended or now
        return JobView(
            id=self.record.id,
            name=self.record.name,
            state=self.record.state,
            round=self.record.round,
            rounds=self.job.rounds.maximum,
            best_round=self.record.best_round,
            reason=_short(self.record.reason or self._waits_for()),
            submitted=self.record.submitted,
            seconds=max(0.0, end - (self.record.started or self.record.submitted)),
            text=self.record.text,
            sites=tuple(self._site_view(name, site, now) for name, site in sorted(self._sites.items())),
            history=tuple(self._history[number] for number in sorted(self._history)),
        )

    # ------------------------------------------------------------------------------------------------------- events

    def receive(self, event: Event, now: float) -> tuple[Effect, ...]:  # noqa: PLR0911 - one for each event
        """Takes an event in and says what to do.

        Raises:
            LocalProtocolError: The event cannot be: a bug of ours; nothing changed.
        """
        match event:
            case SiteArrived(site):
                return self._arrived(site, now)
            case SiteLeft(site, for_good):
                return self._left(site, now, for_good=for_good)
            case SitePaused(site, paused):
                return self._paused(site, now) if paused else self._let_go_on(site, now)
            case TimeUp(step, attempt):
                if self._round is None or (step, attempt) != (self.record.next_step, self._attempt):
                    return ()
                self._round.receive(DeadlinePassed())
                return self._settled(now)
            case Completed(step, attempt, completion):
                return self._completed(step, attempt, completion, now)
            case Committed(step):
                return self._committed(step, now)
            case NotCommitted(step, problem):
                if step != self.record.next_step or not self._storing:
                    raise LocalProtocolError(f"step {step} of job {self.id} failed to be stored out of turn")
                self._storing = False
                return self._end(JobState.FAILED, f"step {step} could not be stored: {problem}", now)
            case StopAsked(by):
                return self._end(JobState.STOPPED, f"stopped by {by}", now)
            case SumStands() | SumOpened() | SumFailed() | NoSum():
                return self._summing(event, now)
            case _:
                assert_never(event)

    def hear(self, site: str, message: Answer, now: float) -> tuple[Effect, ...]:
        """Takes in what a site said.

        Raises:
            RemoteProtocolError: The site broke the protocol; nothing changed and the job goes on.
        """
        known = self._sites.get(site)
        if known is None:
            raise RemoteProtocolError(f"site {site} is not in the roster of job {self.id}")
        known.last_seen = now
        if self.over:
            return self._farewell(site)
        match message:
            case JobAccepted(_, digest):
                return self._accepted(site, digest, now)
            case JobRefused(_, findings):
                return self._refused(site, findings, now)
            case Progress(_, step, phase):
                return self._progressed(site, step, phase, now)
            case Contribution():
                event = Contributed(site, message.payload, message.weight, message.seconds)
                return self._answered(site, message.step, message.attempt, event, now)
            case Declined(_, step, attempt, cause):
                return self._answered(site, step, attempt, SiteDeclined(site, cause), now)
            case _:
                assert_never(message)

    # -------------------------------------------------------------------------------------------------- the offer

    def _arrived(self, site: str, now: float) -> tuple[Effect, ...]:
        known = self._site(site)
        known.attending = True
        known.paused = False
        known.overdue = 0
        known.last_seen = now
        if self.over:
            return self._farewell(site)
        known.phase = None
        known.answer = ""  # it may have restarted and know of no job; one that refused may have been mended: ask again
        terms = b"" if self.sealing is None else self.sealing.terms
        return (Send(site, JobOffer(self.id, self.record.text, self.record.roster, terms)),)

    def _left(self, site: str, now: float, *, for_good: bool) -> tuple[Effect, ...]:
        known = self._site(site)
        known.attending = False
        known.last_seen = now
        known.phase = None
        if for_good:
            known.trouble = "its membership was revoked"
            if self._round is not None and self._round.expects(site):
                self._round.receive(SiteDeclined(site, DeclineCause.POLICY))
                return self._settled(now)
        return self._advance(now)  # the job may have waited for this site's answer alone

    def _paused(self, site: str, now: float) -> tuple[Effect, ...]:
        """Nobody waits for a paused site: neither this step nor the answer to an offer."""
        known = self._site(site)
        known.paused = True
        known.phase = None
        known.trouble = PAUSED
        if self._round is not None and self._round.expects(site):
            self._put_down.add(site)
            self._round.receive(SiteDeclined(site, DeclineCause.PAUSED))
            return self._settled(now)
        return self._advance(now)

    def _let_go_on(self, site: str, now: float) -> tuple[Effect, ...]:
        known = self._site(site)
        known.paused = False
        known.trouble = ""
        known.overdue = 0  # what it was late with was put down
        return (*self._asked_again(site, now), *self._advance(now))

    def _asked_again(self, site: str, now: float) -> tuple[Effect, ...]:
        """Asks a site for the step under way, if it is to take part in it yet."""
        ready = site in self.seated and self._round is not None and self._round.asks(site)
        return (self._ask(site, now),) if ready else ()

    def _progressed(self, site: str, step: int, phase: Phase, now: float) -> tuple[Effect, ...]:
        known = self._sites[site]
        if step == self.record.next_step:
            known.phase = phase
        elif known.overdue and phase is Phase.UPLOADING:
            return self._caught_up(site, step, now)
        return ()

    def _caught_up(self, site: str, step: int, now: float) -> tuple[Effect, ...]:
        """A site has done what it was late with: that is not counted, and from now on it is asked again."""
        known = self._sites[site]
        known.overdue = 0
        known.trouble = f"was late with step {step}, which went on without it"
        return (Send(site, StepEnded(self.id, step, counted=False)), *self._advance(now))

    def _accepted(self, site: str, digest: bytes, now: float) -> tuple[Effect, ...]:
        if digest != self._digest:
            raise RemoteProtocolError(f"site {site} accepted another job file than job {self.id}'s")
        known = self._sites[site]
        effects: list[Effect] = []
        if known.answer != "accepted":
            known.answer, known.findings, known.trouble = "accepted", (), ""
            effects.append(SaveSite(JobSite(site, "accepted")))
        return (*effects, *self._asked_again(site, now), *self._advance(now))

    def _refused(self, site: str, findings: tuple[Finding, ...], now: float) -> tuple[Effect, ...]:
        known = self._sites[site]
        known.answer, known.findings = "refused", findings
        known.trouble = f"refused: {brief(findings)}"
        effects: tuple[Effect, ...] = (SaveSite(JobSite(site, "refused", findings)),)
        if self.record.started and (given_up := self._given_up(now)):
            return (*effects, *given_up)
        if self._round is not None and self._round.expects(site):
            self._round.receive(SiteDeclined(site, DeclineCause.POLICY))
            return (*effects, *self._settled(now))
        return (*effects, *self._advance(now))

    def _given_up(self, now: float) -> tuple[Effect, ...]:
        """The end of a job that so many sites refused that it can never have enough, with what each of them said."""
        refused = [name for name, each in self._sites.items() if each.answer == "refused"]
        needed = max(self.job.cohort.needed, *self._least.values(), 0) if self.record.started else self._minimum
        left = frozenset(self._sites).difference(refused)
        summable = all(
            len(self._summable(kind, left)) >= max(self.job.cohort.needed, least) for kind, least in self._least.items()
        )
        if summable and not cohort.hopeless(self._sites, refused, needed):
            return ()
        told = "; ".join(f"{name}: {brief(self._sites[name].findings)}" for name in sorted(refused))
        return self._end(JobState.FAILED, f"too many sites refused the job ({told})", now)

    # --------------------------------------------------------------------------------------------------- the steps

    def _site(self, name: str) -> _Site:
        if name not in self._sites:
            raise LocalProtocolError(f"site {name} is not in the roster of job {self.id}")
        return self._sites[name]

    @property
    def _minimum(self) -> int:
        """Sites without which the job does not start, since some step of it could never be summed."""
        return max(self.job.cohort.minimum_sites, *self._least.values(), 0)

    @property
    def _needed(self) -> int:
        """Sites without which the next step does not begin."""
        return max(self.job.cohort.needed, self._least.get(self._next_kind(), 0))

    @property
    def _least(self) -> Mapping[StepKind, int]:
        return {} if self.sealing is None else self.sealing.least

    def _summable(self, kind: StepKind, sites: frozenset[str]) -> frozenset[str]:
        """Those of the sites that can be in a sum of this kind when no others are there."""
        return sites if self.sealing is None else self.sealing.summable(kind, sites)

    @property
    def _model(self) -> BlobRef:
        return self.record.model or self.record.initial_model

    def _next_kind(self) -> StepKind:
        if self.record.preparation is None:
            return StepKind.STATISTICS
        if self.record.round > 0 and self.record.evaluated_round < self.record.round:
            return StepKind.EVALUATE
        return StepKind.TRAIN

    def _number(self) -> int:
        """The round that the current step belongs to."""
        match self._kind:
            case StepKind.STATISTICS:
                return 0
            case StepKind.TRAIN:
                return self.record.round + 1
            case StepKind.EVALUATE:
                return self.record.round
            case _:
                assert_never(self._kind)

    def _advance(self, now: float) -> tuple[Effect, ...]:
        """Starts the next step if none is under way and enough sites are here."""
        if self.over or self._round is not None or self._committing:
            return ()
        accepted = [name for name, site in self._sites.items() if site.answer == "accepted"]
        attending = [name for name, site in self._sites.items() if site.here]
        prompt = [name for name in attending if not self._sites[name].overdue]
        effects: list[Effect] = []
        if not self.record.started:
            if any(self._sites[name].answer == "" for name in attending):
                return ()  # whoever is here is heard first: also what each of them has against the job
            given_up = self._given_up(now)
            if given_up or cohort.missing(accepted, attending, self._minimum):
                return given_up
            self.record = replace(self.record, started=now, state=JobState.RUNNING)
            effects.append(SaveState(JobState.RUNNING, ""))
        self._kind = self._next_kind()
        if self._kind is StepKind.STATISTICS and self.lengths.statistics == 0:
            self._round = Round(frozenset(), 0, 0)
            self._round.receive(DeadlinePassed())
            self._begin(now)
            return (*effects, *self._settled(now))
        members = cohort.ready(accepted, prompt, self._needed)
        if len(self._summable(self._kind, members)) < self._needed:
            return tuple(effects)
        return (*effects, *self._gather(members, now))

    def _gather(self, members: frozenset[str], now: float) -> tuple[Effect, ...]:
        """Begins an attempt among these sites: a plain one ends at its deadline, a sealed one as its machine says."""
        self._begin(now)
        asked = tuple(self._ask(site, now) for site in sorted(members))
        if self.sealing is not None:
            self._round = SealedRound(members)
            return (*asked, BeginSum(self._start(now)))
        self._round = Round(members, self._needed, self.lengths.of(self._kind))
        return (SetDeadline(self.record.next_step, self._attempt, self.job.cohort.deadline_seconds), *asked)

    def _summing(self, event: SumStands | SumOpened | SumFailed | NoSum, now: float) -> tuple[Effect, ...]:
        if self.sealing is None:
            raise LocalProtocolError(f"job {self.id} is summed plainly, and a sealed sum was told of")
        if isinstance(event, NoSum):
            return self._end(JobState.FAILED, event.problem, now)
        attempt = self._round
        current = (event.step, event.attempt) == (self.record.next_step, self._attempt)
        if not isinstance(attempt, SealedRound) or not current or self._committing:
            return ()  # of an attempt that is over
        match event:
            case SumStands(behind=behind, waits=waits, declined=declined):
                attempt.stands(behind, waits, declined)
                for site, cause in declined:
                    self._site(site).trouble = cause
            case SumOpened(members=members, missing=missing):
                attempt.opened(members, missing)
                for site in members:
                    self._site(site).trouble = ""
            case SumFailed(problem=problem, broken=broken):
                attempt.failed(problem, broken=broken)
            case _:
                assert_never(event)
        return self._settled(now)

    def _begin(self, now: float) -> None:
        self._began = now
        self._asked = self.record.next_step
        self._put_down = set()
        self._transferred = {}
        for site in self._sites.values():
            site.phase = None

    def _ask(self, site: str, now: float) -> Send:
        return Send(site, self._start(now))

    def _start(self, now: float) -> StepStart:
        statistics = self._kind is StepKind.STATISTICS
        left = self.job.cohort.deadline_seconds - (now - self._began)
        return StepStart(
            job=self.id,
            step=self.record.next_step,
            attempt=self._attempt,
            kind=self._kind,
            round=self._number(),
            model=None if statistics else self._model,
            preparation=None if statistics else self.record.preparation,
            length=self.lengths.of(self._kind),
            deadline_seconds=max(0.001, left),
        )

    def _answered(
        self, site: str, step: int, attempt: int, event: Contributed | SiteDeclined, now: float
    ) -> tuple[Effect, ...]:
        if self._round is None or (step, attempt) != (self.record.next_step, self._attempt):
            if (step, attempt) > (self.record.next_step, self._attempt):
                raise RemoteProtocolError(f"site {site} answered step {step} of job {self.id}, which was never asked")
            if self._sites[site].overdue:
                return self._caught_up(site, step, now)
            return (Send(site, StepEnded(self.id, step, counted=False)),)
        late = self._round.state is not RoundState.COLLECTING and not self._round.answered(site)
        if late or site in self._put_down:  # the question and the pause may have crossed on the way
            return (Send(site, StepEnded(self.id, step, counted=False)),)
        self._round.receive(event)
        known = self._sites[site]
        known.phase = None
        if isinstance(event, Contributed):
            known.trouble = ""
            known.seconds = event.seconds
        else:
            known.trouble = _CAUSES[event.cause]
        return self._settled(now)

    def _settled(self, now: float) -> tuple[Effect, ...]:
        """What follows when the round has closed or failed; nothing while it collects."""
        match self._open.state:
            case RoundState.COLLECTING:
                return ()
            case RoundState.CLOSED:
                if self._committing:
                    return ()
                self._committing = True
                return (self._complete(),)
            case RoundState.FAILED:
                return self._failed(now)
            case state:
                assert_never(state)

    @property
    def _open(self) -> Round | SealedRound:
        if self._round is None:
            raise LocalProtocolError(f"job {self.id} has no step under way")
        return self._round

    def _complete(self) -> Complete:
        return Complete(
            self.record.next_step,
            self._attempt,
            self._kind,
            self._open.counted,
            self._model,
            self.record.strategy_state,
        )

    def _failed(self, now: float) -> tuple[Effect, ...]:
        shares, broken = self._open.shares(self._transferred), self._open.broken
        told = [Send(share.site, StepEnded(self.id, self.record.next_step, counted=False)) for share in shares]
        self._note(shares)
        self._round = None
        self._committing = False
        self._attempt += 1
        # Only answers count as failures: who went away or is paused is waited for, who is late goes on with its work.
        answered = [share for share in shares if share.outcome in {Outcome.DECLINED, Outcome.REFUSED}]
        failed = [share for share in answered if share.cause != DeclineCause.PAUSED.value]
        reasons = [f"{share.site}: {self._sites[share.site].trouble}" for share in failed] + [broken] * bool(broken)
        self._failures = self._failures + 1 if reasons else 0
        if self._failures >= MAX_FAILURES:
            reason = (
                f"step {self.record.next_step} ({self._kind.value}) failed {MAX_FAILURES} times ({'; '.join(reasons)})"
            )
            return (*told, *self._end(JobState.FAILED, reason, now))
        return (*told, *self._advance(now))

    def _note(self, shares: tuple[Share, ...]) -> None:
        for share in shares:
            if share.outcome is Outcome.LATE:
                self._sites[share.site].trouble = share.cause
            elif share.outcome is Outcome.REFUSED:
                self._sites[share.site].trouble = f"its contribution was refused: {share.cause}"

    def _completed(self, step: int, attempt: int, completion: Completion, now: float) -> tuple[Effect, ...]:
        if (step, attempt) != (self.record.next_step, self._attempt) or not self._committing or self._storing:
            return ()  # the job was stopped, or failed, meanwhile
        match completion:
            case Rejected(problems):
                if not problems or not {each.site for each in self._open.counted}.issuperset(dict(problems)):
                    raise LocalProtocolError(f"step {step} of job {self.id} rejected payloads that it does not count")
                refusals: list[Effect] = []
                for site, problem in dict(problems).items():
                    self._open.receive(PayloadRefused(site, problem))
                    fix = "see the site's log; check its data for extreme values"
                    about = f"step {step} of {self.id}"
                    refusals.append(Send(site, Refusal(about, problem, WhoActs.SITE.value, fix)))
                self._committing = False
                return (*refusals, *self._settled(now))
            case Broken(problem):
                return self._end(JobState.FAILED, problem, now)
            case Prepared() | Stepped() | Measured():
                if not isinstance(completion, _MADE[self._kind]):
                    made = type(completion).__name__
                    raise LocalProtocolError(f"step {step} ({self._kind.value}) of job {self.id} cannot come to {made}")
                self._storing = True
                return (Commit(self._step_record(completion, now)),)
            case _:
                assert_never(completion)

    def _step_record(self, completion: Prepared | Stepped | Measured, now: float) -> StepRecord:
        record = StepRecord(
            job=self.id,
            step=self.record.next_step,
            attempt=self._attempt,
            kind=self._kind,
            round=self._number(),
            started=self._began,
            ended=max(now, self._began),  # the clock may have been set back meanwhile
            shares=self._open.shares(self._transferred),
            best_round=self.record.best_round,
        )
        match completion:
            case Prepared(preparation):
                return replace(record, preparation=preparation)
            case Stepped(model, strategy_state):
                return replace(record, model=model, strategy_state=strategy_state)
            case Measured(metrics):
                return self._judged(replace(record, metrics=metrics), now)
            case _:
                assert_never(completion)

    def _judged(self, record: StepRecord, now: float) -> StepRecord:
        """The evaluation's record with the best round so far, and the job's end if this was the last round."""
        metrics = self._metrics | {record.round: record.metrics}
        best = best_round(metrics, self.job.rounds.best_metric, self.better)
        record = replace(record, best_round=best)
        stop = self.job.rounds.early_stop
        reason = ""
        if stop is not None and stalled(metrics, stop, self.better):
            reason = f"early stop after round {record.round}: {stop.metric} no better for {stop.patience} rounds"
        elif record.round >= self.job.rounds.maximum:
            reason = f"all {record.round} rounds done"
        if not reason:
            return record
        best_model = self._model if best == record.round else (self.record.best_model or self._model)
        final = ModelRecord(self.id, self.record.name, best_model, best, now, metrics[best], card="")
        return replace(record, state=JobState.FINISHED, reason=reason, final=final)

    def _committed(self, step: int, now: float) -> tuple[Effect, ...]:
        if not self._storing or (step, self._asked) != (self.record.next_step - 1, step):
            raise LocalProtocolError(f"step {step} of job {self.id} was committed out of turn")
        self._committing = self._storing = False
        shares, works_on = self._open.shares(self._transferred), self._open.works_on
        self._round = None
        told: list[Effect] = []
        for share in shares:
            site = self._sites[share.site]
            late = share.outcome is Outcome.LATE and works_on
            if late and site.here and site.answer == "accepted" and not self.over:
                site.overdue = step  # it goes on with its work, and nobody waits for it until that is done
            else:
                told.append(Send(share.site, StepEnded(self.id, step, counted=share.outcome is Outcome.COUNTED)))
        if self.over:
            return (*told, *self._farewell())
        if self._end_after_store is not None:
            return (*told, *self._end(*self._end_after_store, now))
        return (*told, *self._advance(now))

    def store(self, record: StepRecord) -> None:
        """Makes a stored step part of the run's memory; called once the transaction is durable, before `Committed`."""
        model = record.model or self.record.model
        better = record.best_round != self.record.best_round
        self._note(record.shares)
        if record.kind is StepKind.EVALUATE:
            self._metrics[record.round] = record.metrics
        self._remember(record)
        self.record = replace(
            self.record,
            next_step=record.step + 1,
            round=record.round if record.kind is StepKind.TRAIN else self.record.round,
            evaluated_round=record.round if record.kind is StepKind.EVALUATE else self.record.evaluated_round,
            model=model,
            best_model=model if better else self.record.best_model,
            best_round=record.best_round,
            strategy_state=record.strategy_state or self.record.strategy_state,
            preparation=record.preparation or self.record.preparation,
            metrics=tuple(sorted(self._metrics.items())),
            state=record.state,
            reason=record.reason,
            ended=record.ended if record.state.over else 0.0,
        )
        self._attempt = 0
        self._failures = 0

    def _remember(self, record: StepRecord) -> None:
        if record.kind is not StepKind.STATISTICS:
            self._history[record.round] = record.shown(self._history.get(record.round))

    # ------------------------------------------------------------------------------------------------------ the end

    def _end(self, state: JobState, reason: str, now: float) -> tuple[Effect, ...]:
        if self.over:
            return ()
        if self._storing:  # the store is taking a step in, which may be the last: that comes first, and counts
            self._end_after_store = self._end_after_store or (state, reason)
            return ()
        reason = _short(reason)
        self.record = replace(self.record, state=state, reason=reason, ended=now)
        self._round = None
        self._committing = False
        return (SaveState(state, reason), *self._farewell())

    def _farewell(self, *sites: str) -> tuple[Effect, ...]:
        """Tells these sites, or all that attend, that the job is over."""
        told = sites or [name for name, site in sorted(self._sites.items()) if site.attending]
        farewell = tuple(Send(name, self._ended()) for name in told)
        return farewell if self.sealing is None else (CloseSums(farewell),)

    def _ended(self) -> JobEnded:
        return JobEnded(self.id, self.record.state, self.record.reason)

    # ------------------------------------------------------------------------------------------------- for people

    def _waits_for(self) -> str:
        if self.over:
            return ""
        accepted = [name for name, site in self._sites.items() if site.answer == "accepted"]
        attending = [name for name, site in self._sites.items() if site.here and not site.overdue]
        needed = self._needed if self.record.started else self._minimum
        here = cohort.ready(accepted, attending, 0)
        whole = self._summable(self._next_kind(), here) if self.record.started else here
        short = cohort.missing(here, here, needed)
        if self._round is None and len(whole) < needed:
            reasons = {
                "not attending": [name for name, site in self._sites.items() if not site.attending],
                "paused": [name for name, site in self._sites.items() if site.attending and site.paused],
                "late": [name for name, site in self._sites.items() if site.here and site.overdue],
            }
            listed = "; ".join(f"{why}: {', '.join(sorted(names))}" for why, names in reasons.items() if names)
            told = f" ({listed})" if listed else ""
            if not short:
                return f"waiting for {needed} sites in whole cells; {len(whole)} are here{told}"
            return f"waiting for {short} more of {needed} sites{told}"
        undecided = sorted(name for name in attending if self._sites[name].answer == "")
        if not self.record.started and undecided:
            return f"waiting for the answer of {', '.join(undecided)}"
        holding, what = (frozenset[str](), "") if self._round is None else self._round.holding
        return f"waiting for {', '.join(sorted(holding))}{what and ' '}{what}" if holding else ""

    def _site_view(self, name: str, site: _Site, now: float) -> SiteView:
        state = self._doing(name, site)
        trouble = site.trouble
        if not trouble and self._round is not None and name in self._round.outstanding:
            waited = now - self._began
            if not site.attending:
                trouble = f"went away; the round waits for it until its deadline ({waited:.0f} s so far)"
            elif name in self._round.holding[0]:
                trouble = f"the round waits for it: {state} for {waited:.0f} s"
        if site.here and site.overdue:
            trouble = f"missed the deadline of step {site.overdue}; rounds go on without it until it has done that work"
        return SiteView(
            name=name,
            organisation=site.organisation,
            connected=site.attending,
            state=state,
            last_seen=now if site.attending else site.last_seen,
            seconds=site.seconds,
            bytes=site.transferred,
            trouble=_short(trouble),
        )

    def _doing(self, name: str, site: _Site) -> str:
        if not site.here:
            return "paused" if site.attending else "away"
        if site.answer != "accepted":
            return site.answer or "checking its data"
        if self._round is not None and name in self._round.outstanding:
            if site.phase is Phase.WORKING:
                return {StepKind.TRAIN: "training", StepKind.EVALUATE: "evaluating"}.get(self._kind, "counting")
            return site.phase.value if site.phase is not None else "asked"
        return "late" if site.overdue else "ready"


def _short(words: str) -> str:
    """`words`, cut to what a message carries: they may quote what many sites found."""
    return words if len(words) <= _MAX_WORDS else f"{words[: _MAX_WORDS - 3]}..."
