"""A site's side of all its jobs: what it answers to the coordinator, and what it does, one piece of work at a time.

```
AWAY --connected--> GREETING --welcome holds--> ATTENDING --disconnected--> AWAY
                        `--welcome does not hold--> the stream ends, for good

a job:   offered -> checking its policy, roster and data -> accepted | refused
a step:  queued -> fetching -> working -> uploading -> contributed   (or declined, at any point)
a step of a sealed job: its StepStart tells what the TRAIN that follows is about; then
         queued -> fetching -> working -> held; masking and uploading go on beside the next piece of work (`sealed.py`)

paused: the step under way is put down, and no work is taken up, until the administrator lets the site go on
```
"""

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from client import policy, sealed
from client.policy import Admitted, Policy
from client.sealed import SealedJobs, Turn
from client.session_events import (
    Assigned,
    CheckData,
    Connected,
    Contribute,
    DataChecked,
    Disconnect,
    Disconnected,
    Effect,
    Event,
    Fetch,
    Fetched,
    Forget,
    Held,
    JobResumed,
    Keep,
    KeepRevocations,
    MaskFailed,
    Note,
    Paused,
    Received,
    Remembered,
    Send,
    SiteIdentity,
    StopUploads,
    TableFacts,
    Upload,
    Uploaded,
    UploadMasked,
    Work,
    Worked,
    WorkFailed,
)
from federation.errors import ConfigurationError, IdentityError, ParleyError, PolicyRefused, RemoteProtocolError
from federation.findings import Finding
from federation.job import Job, digest, parse
from federation.messages import (
    PROTOCOL,
    Availability,
    Contribution,
    DeclineCause,
    Declined,
    FromCoordinator,
    Heartbeat,
    Hello,
    JobAccepted,
    JobEnded,
    JobOffer,
    JobRefused,
    MembershipStatement,
    Phase,
    Progress,
    Refusal,
    RevocationList,
    Sealed,
    StepEnded,
    StepStart,
    Welcome,
)
from federation.refusals import raised
from privacy import identity
from privacy.secure_aggregation.rostersum import site_events as sums
from privacy.secure_aggregation.rostersum.rules import Broken
from privacy.secure_aggregation.rostersum.site_events import Because, Clock

__all__ = ["Session"]


_MAX_FINDINGS = 100
"""Findings that a refusal tells; the site's own log has them all."""
_MAX_WORDS = 1000
"""Characters of each text in a finding that travels."""


class _State(Enum):
    AWAY = "away"
    GREETING = "greeting"
    ATTENDING = "attending"


@dataclass(slots=True)
class _JobState:
    """One job; of a sealed one also its terms, the step last told of, and the work last assigned."""

    offer: JobOffer
    accepted: bool = False
    result: Worked | None = None
    sealed: Admitted | None = None
    step: StepStart | None = None
    work: sums.Work | None = None


class Session:
    """The state of a site. It owns no socket, clock, thread or file.

    Args:
        me: Who this site is.
        remembered: Jobs with results that were not counted when the site was last ended, or killed.
        sealed_jobs: Its machine of secure sums; without one it takes part in no job under secure aggregation.
    """

    def __init__(
        self, me: SiteIdentity, remembered: tuple[Remembered, ...] = (), sealed_jobs: SealedJobs | None = None
    ) -> None:
        self._me = me
        self._sealed = sealed_jobs
        self._rules = Policy()
        self._clock = Clock(0.0, 0.0)
        self._updates = 0
        self._state = _State.AWAY
        self._nonce = b""
        self._jobs = {each.offer.job: _JobState(each.offer, result=each.result) for each in remembered}
        self._queue: deque[JobOffer | StepStart | Assigned] = deque()
        self._busy: JobOffer | StepStart | Assigned | None = None
        self._awaited = False
        self._paused = False
        self._phase = Phase.DOWNLOADING
        self._coordinator: MembershipStatement | None = None

    @property
    def attending(self) -> bool:
        """Whether the coordinator has welcomed us and we it."""
        return self._state is _State.ATTENDING

    def knows(self, job: str) -> bool:
        """Whether the coordinator has offered this process a job under secure aggregation by this id."""
        return self._sealed is not None and self._sealed.admission(job) is not None

    def wake_at(self, now: float, steady: float) -> float | None:
        """When, on the steady clock, a `TimePassed` will change something; None while it will not."""
        return None if self._sealed is None else self._sealed.wake_at(Clock(now, steady))

    def receive(self, event: Event, now: float, steady: float | None = None) -> tuple[Effect, ...]:
        """Takes an event in and says what to do. Bad messages are noted and change nothing.

        Nothing but a hello is said, and no payload is sent, while the coordinator has not proven who it is. Effects are
        performed in their order; what follows a `Persist` or a `Record` only once that is durable.

        Args:
            event: What happened.
            now: Unix seconds, by the wall clock.
            steady: Seconds of a clock that is never set; `now` if it is not given.
        """
        self._clock = Clock(now, now if steady is None else steady)
        effects = self._taken(event, now)
        if self.attending or isinstance(event, Connected):
            return effects
        return tuple(effect for effect in effects if not isinstance(effect, Send))

    def _taken(self, event: Event, now: float) -> tuple[Effect, ...]:  # noqa: C901, PLR0911, PLR0912 - one for each event
        match event:
            case Connected(nonce, software):
                self._state, self._nonce = _State.GREETING, nonce
                return (Send(Hello(PROTOCOL, software, self._me.statement, nonce, now)),)
            case Disconnected():
                return self._disconnected()
            case Received(message, rules):
                return self._received(message, rules, now)
            case DataChecked(job, findings, table):
                return self._checked(job, findings, table)
            case Fetched(step):
                return self._fetched(step)
            case Worked():
                return self._worked(event)
            case Held(assigned, table):
                return self._held(assigned, table)
            case WorkFailed(subject, cause, problem):
                return self._failed(subject, cause, problem)
            case Uploaded(step):
                return self._uploaded(step)
            case Paused(paused):
                return self._pause() if paused else self._resume()
            case JobResumed(job):
                return self._job_resumed(job)
            case MaskFailed(mask, problem):
                return self._mask_failed(mask, problem)
            case sums.Drifted(_, assignment):
                return self._drifted(event, assignment)
            case sums.Masked() | sums.UploadDone() | sums.TimePassed():
                return self._summed(event)
            case _:
                assert_never(event)

    def _pause(self) -> tuple[Effect, ...]:
        """Puts down what is being done: a step for good, unless it is asked again; a check until the site goes on."""
        if self._paused:
            return ()
        self._paused = True
        self._queue = deque(each for each in self._queue if isinstance(each, JobOffer))
        told = (Send(Availability(available=False)), Note("paused: no step is taken up until: parley site resume"))
        busy, self._busy = self._busy, None
        if isinstance(busy, JobOffer):
            self._queue.appendleft(busy)
        stop = () if busy is None else (Forget(""),)
        declined = [each for state in self._jobs.values() for each in self._cannot(state)]
        return (*stop, *declined, *told)

    def _resume(self) -> tuple[Effect, ...]:
        if not self._paused:
            return ()
        self._paused = False
        joined = [each for job in self._jobs for each in self._joined(job)]
        return (Send(Availability(available=True)), Note("goes on"), *joined, *self._next())

    def _disconnected(self) -> tuple[Effect, ...]:
        """Work goes on; what needs the coordinator is let go: every step that still counts will be asked again.

        Of sealed jobs nothing is let go, for the coordinator asks no second time: it waits for the next stream.
        """
        self._state = _State.AWAY
        self._awaited = False
        cut: tuple[Effect, ...] = ()
        if self._sealed is not None:
            self._sealed.cut()
            cut = (StopUploads(),)
        self._queue = deque(each for each in self._queue if not isinstance(each, StepStart))
        busy = self._busy
        if busy is None or isinstance(busy, JobOffer) or self._phase is Phase.WORKING:
            return cut
        self._busy = None
        if isinstance(busy, Assigned):
            self._queue.appendleft(busy)
        return (*cut, Forget(""), *self._next())

    # ---------------------------------------------------------------------------------------------------- messages

    def _received(self, message: FromCoordinator, rules: Policy, now: float) -> tuple[Effect, ...]:
        match self._state:
            case _State.AWAY:
                return ()
            case _State.GREETING:
                return self._greeted(message, now)
            case _State.ATTENDING:
                return self._told(message, rules, now)
            case state:
                assert_never(state)

    def _told(self, message: FromCoordinator, rules: Policy, now: float) -> tuple[Effect, ...]:
        self._rules = rules
        return (*self._limited(), *self._heard(message, rules, now))

    def _heard(self, message: FromCoordinator, rules: Policy, now: float) -> tuple[Effect, ...]:  # noqa: PLR0911 - one for each message
        match message:
            case Welcome():
                return (Note("the coordinator said welcome twice; ignored", trouble=True),)
            case Heartbeat():
                return ()
            case JobOffer():
                return self._offered(message, rules, now)
            case StepStart():
                return self._started(message)
            case StepEnded(job, step, counted):
                return self._ended(job, step, counted=counted)
            case JobEnded(job, state, reason):
                return self._job_ended(job, f"job {job} {state.value}: {reason}")
            case RevocationList():
                return self._revoked(message, now)
            case Sealed():
                return self._sealed_message(message)
            case Refusal():
                return (Note(f"the coordinator refused {message.about}: {raised(message)}", trouble=True),)
            case _:
                assert_never(message)

    def _greeted(self, message: FromCoordinator, now: float) -> tuple[Effect, ...]:
        if isinstance(message, Welcome):
            return self._welcomed(message, now)
        return self._disconnect(RemoteProtocolError("the coordinator must say welcome first"))

    def _disconnect(self, reason: ParleyError) -> tuple[Effect, ...]:
        return (*self._disconnected(), Disconnect(reason))

    def _welcomed(self, welcome: Welcome, now: float) -> tuple[Effect, ...]:
        me = self._me
        try:
            if welcome.protocol != PROTOCOL:
                raise RemoteProtocolError(
                    f"the coordinator speaks version {welcome.protocol} of the protocol ({welcome.software}), "
                    f"this site {PROTOCOL}",
                    fix="install the same release of Parley on both sides",
                )
            identity.verify_revocations(welcome.revocations, me.root.public_key, me.root.consortium, me.revocations)
            identity.verify_statement(
                welcome.statement, me.root.public_key, me.root.consortium, int(now), welcome.revocations
            )
            identity.verify_welcome(welcome.proof, welcome.statement, self._nonce, me.statement.serial)
        except ParleyError as refused:
            return self._disconnect(refused)
        self._state, self._coordinator = _State.ATTENDING, welcome.statement
        effects: list[Effect] = [Note(f"attending {welcome.statement.name} as {me.statement.name}")]
        if self._paused:
            effects.append(Send(Availability(available=False)))
        if welcome.revocations != me.revocations:
            effects.append(self._keep(welcome.revocations))
        return tuple(effects)

    def _keep(self, revocations: RevocationList) -> KeepRevocations:
        self._me = replace(self._me, revocations=revocations)
        return KeepRevocations(revocations)

    def _revoked(self, revocations: RevocationList, now: float) -> tuple[Effect, ...]:
        me = self._me
        try:
            identity.verify_revocations(revocations, me.root.public_key, me.root.consortium, me.revocations)
        except IdentityError as refused:
            return (Note(f"a revocation list was refused: {refused}", trouble=True),)
        effects: list[Effect] = [self._keep(revocations), *self._limited()]
        if self._coordinator is not None and self._coordinator.serial in revocations.serials:
            revoked = IdentityError(
                f"the membership of the coordinator {self._coordinator.name} was revoked",
                fix="ask the consortium's administrator which coordinator to attend",
            )
            return (*effects, *self._disconnect(revoked))
        for job, state in list(self._jobs.items()):
            try:
                self._check_roster(state.offer, now)
            except IdentityError as refused:
                effects.append(Note(f"job {job} goes on without a revoked member: {refused}", trouble=True))
        return tuple(effects)

    # ---------------------------------------------------------------------------------------------------- the offer

    def _check_roster(self, offer: JobOffer, now: float) -> None:
        me = self._me
        identity.verify_roster(offer.roster, me.root.public_key, me.root.consortium, int(now), me.revocations)
        if me.statement not in offer.roster:
            raise IdentityError(f"the roster of job {offer.job} does not hold this site", fix="submit the job anew")

    def _offered(self, offer: JobOffer, rules: Policy, now: float) -> tuple[Effect, ...]:
        known = self._jobs.get(offer.job)
        if known is not None and known.offer != offer:
            return (Note(f"job {offer.job} was offered again with other terms; ignored", trouble=True),)
        try:
            job = parse(offer.text, offer.job)
            self._check_roster(offer, now)
        except ConfigurationError as wrong:
            return self._refuse(offer.job, (_finding("job", wrong.problem, wrong.fix),))
        except IdentityError as refused:
            return self._refuse(offer.job, (_finding("roster", refused.problem, refused.fix),))
        found = policy.allowed(rules, job, offer.text, len(offer.roster))
        if found:
            return self._refuse(offer.job, found)
        if known is not None and known.accepted:
            accepted = Send(JobAccepted(offer.job, digest(offer.text)))
            return (accepted, *self._again(known), *self._joined(offer.job), *self._next())
        return self._take_up(offer, job, None if known is None else known.result)

    def _take_up(self, offer: JobOffer, job: Job, result: Worked | None) -> tuple[Effect, ...]:
        """Queues the check of the data for a job that the policy allows, if its terms are what they must be."""
        state = _JobState(offer, result=result)
        try:
            state.sealed = self._admitted(offer, job)
        except (ConfigurationError, PolicyRefused) as wrong:
            return self._refuse(offer.job, (_finding("privacy", wrong.problem, wrong.fix),))
        self._jobs[offer.job] = state
        if offer not in self._queue and self._busy != offer:
            self._queue.append(offer)
        return self._next()

    def _again(self, known: _JobState) -> tuple[Effect, ...]:
        """After a reconnect: a result whose upload was cut off is taken up by the step when it is asked again."""
        return () if known.result is None else (Note(f"job {known.offer.job}: its last result is still here"),)

    def _refuse(self, job: str, findings: tuple[Finding, ...]) -> tuple[Effect, ...]:
        """Says no, and why; what was under way for a job that was accepted before is let go."""
        stop = self._drop(job)
        told = "; ".join(f"{each.path}: {each.problem} ({each.fix})" for each in findings)
        note = Note(f"refused job {job}: {told}", trouble=True)
        return (*stop, Send(JobRefused(job, findings[:_MAX_FINDINGS])), note, *self._next())

    def _drop(self, job: str) -> tuple[Effect, ...]:
        """Forgets a job with the work that waits for it, and stops what is being done for it."""
        state = self._jobs.pop(job, None)
        self._queue = deque(each for each in self._queue if each.job != job)
        stop: tuple[Effect, ...] = ()
        if self._busy is not None and self._busy.job == job:
            self._busy = None
            stop = (Forget(""),)
        if self._sealed is None or state is None or state.sealed is None:
            return stop
        declined = self._cannot(state)
        self._sealed.leave(job)
        return (*stop, *declined)

    def _checked(self, job: str, findings: tuple[Finding, ...], table: TableFacts | None) -> tuple[Effect, ...]:
        if not isinstance(self._busy, JobOffer) or self._busy.job != job:
            return ()  # the job ended while its check was under way
        self._busy = None
        state = self._jobs.get(job)
        if state is None:
            return self._next()
        refusals = tuple(each for each in findings if each.level == "refusal")
        notes = tuple(
            Note(f"job {job}: {each.path}: {each.problem} ({each.fix})", trouble=True)
            for each in findings
            if each.level == "warning"
        )
        if refusals:
            return (*notes, *self._refuse(job, refusals), *self._next())
        if state.sealed is not None:
            return (*notes, *self._offered_to_sums(state.sealed, table), *self._next())
        return (*notes, *self._accept(state), *self._next())

    def _accept(self, state: _JobState) -> tuple[Effect, ...]:
        state.accepted = True
        job = state.offer.job
        accepted = Send(JobAccepted(job, digest(state.offer.text)))
        return (accepted, Note(f"accepted job {job}"), *self._joined(job))

    # ---------------------------------------------------------------------------------------------------- the steps

    def _started(self, step: StepStart) -> tuple[Effect, ...]:
        state = self._jobs.get(step.job)
        if state is None or not state.accepted:
            return (
                Send(Declined(step.job, step.step, step.attempt, DeclineCause.POLICY)),
                Note(f"declined step {step.step} of job {step.job}, which this site did not accept", trouble=True),
            )
        if state.sealed is not None:
            state.step = step  # what it is to be done for says the TRAIN that follows
            return ()
        if self._paused:
            return (Send(Declined(step.job, step.step, step.attempt, DeclineCause.PAUSED)),)
        if isinstance(self._busy, StepStart) and _same_work(self._busy, step):
            self._busy = step  # asked again, after a reconnect or as another attempt: what is under way will answer it
            self._awaited = True
            return ()
        if state.result is not None and not _same_work(state.result.step, step):
            state.result = None
        return self._enqueue(step)

    def _enqueue(self, step: StepStart | Assigned) -> tuple[Effect, ...]:
        """Queues the step in place of any older one of its job."""
        self._queue = deque(each for each in self._queue if isinstance(each, JobOffer) or each.job != step.job)
        self._queue.append(step)
        if isinstance(self._busy, StepStart | Assigned) and self._busy.job == step.job:
            self._busy = None
            return (Forget(""), *self._next())
        return self._next()

    def _next(self) -> tuple[Effect, ...]:
        if self._busy is not None or self._paused:
            return ()
        taken = next((each for each in self._queue if self._may_begin(each)), None)
        if taken is None:
            return ()
        self._queue.remove(taken)
        self._busy = taken
        self._awaited = True
        if isinstance(taken, JobOffer):
            return (CheckData(taken),)
        if isinstance(taken, Assigned):
            return (self._progress(taken.step, Phase.DOWNLOADING), Fetch(taken))
        step = taken
        result = self._jobs[step.job].result
        if result is not None:
            return (self._progress(step, Phase.UPLOADING), Upload(step, result.payload))
        return (self._progress(step, Phase.DOWNLOADING), Fetch(step))

    def _may_begin(self, work: JobOffer | StepStart | Assigned) -> bool:
        """Whether its payloads could be had: those of a sealed job only while the coordinator knows it accepted."""
        return not isinstance(work, Assigned) or (self._sealed is not None and self._sealed.live(work.job))

    def _progress(self, step: StepStart, phase: Phase) -> Send:
        self._phase = phase
        return Send(Progress(step.job, step.step, phase))

    def _under_way(self, done: StepStart, phase: Phase) -> StepStart | None:
        """The step as last asked, if `done` is this very work in this very phase; None when it was let go meanwhile."""
        step = self._busy
        same = isinstance(step, StepStart) and _same_work(done, step) and self._phase is phase
        return step if isinstance(step, StepStart) and same else None

    def _fetched(self, done: StepStart | Assigned) -> tuple[Effect, ...]:
        if isinstance(done, Assigned):
            if self._busy != done or self._phase is not Phase.DOWNLOADING:
                return ()
            offer, declared = self._jobs[done.job].offer, self._rules.secure_aggregation.declared_weight
            return (self._progress(done.step, Phase.WORKING), Contribute(done, offer, declared))
        step = self._under_way(done, Phase.DOWNLOADING)
        if step is None:
            return ()
        return (self._progress(step, Phase.WORKING), Work(step, self._jobs[step.job].offer))

    def _worked(self, result: Worked) -> tuple[Effect, ...]:
        step = self._under_way(result.step, Phase.WORKING)
        if step is None:
            return ()
        state = self._jobs[step.job]
        state.result = result = replace(result, step=step)
        keep = Keep(Remembered(state.offer, result))
        if not (self.attending and self._awaited):  # it is uploaded when the step is asked again
            self._busy = None
            return (keep, *self._next())
        return (keep, self._progress(step, Phase.UPLOADING), Upload(step, result.payload))

    def _uploaded(self, done: StepStart) -> tuple[Effect, ...]:
        step = self._under_way(done, Phase.UPLOADING)
        if step is None:
            return ()
        self._busy = None
        result = self._jobs[step.job].result
        if result is None:
            return self._next()
        told = Contribution(step.job, step.step, step.attempt, result.payload, result.weight, result.seconds)
        return (Send(told), *self._next())

    def _failed(
        self, subject: JobOffer | StepStart | Assigned, cause: DeclineCause, problem: str
    ) -> tuple[Effect, ...]:
        busy = self._busy
        note = Note(f"job {subject.job}: {problem}", trouble=True)
        match busy, subject:
            case StepStart(), StepStart() if _same_work(subject, busy):
                self._busy = None
                return (Send(Declined(busy.job, busy.step, busy.attempt, cause)), note, *self._next())
            case Assigned(), Assigned() if busy == subject:
                self._busy = None
                return (*self._cannot(self._jobs[busy.job], _because(busy, cause)), note, *self._next())
            case JobOffer(), JobOffer() if busy == subject:
                self._busy = None
                finding = _finding("data", problem, "see the site's log")
                return (*self._refuse(busy.job, (finding,)), *self._next())
            case _:
                return (note,)  # of work that was let go

    def _ended(self, job: str, step: int, *, counted: bool) -> tuple[Effect, ...]:
        state = self._jobs.get(job)
        if state is None:
            return ()
        if state.result is not None and state.result.step.step <= step and counted:
            state.result = None
        self._queue = deque(each for each in self._queue if not _is_of(each, job, step))
        if state.work is not None and state.step is not None and state.step.step == step:
            self._cannot(state)  # the machine lets it go; the coordinator, which has gone on, is told nothing
        if _is_of(self._busy, job, step):
            self._busy = None
            return (Forget(""), Note(f"job {job}: step {step} ended without this site", trouble=True), *self._next())
        return ()

    def _job_ended(self, job: str, text: str) -> tuple[Effect, ...]:
        if job not in self._jobs:
            return ()
        return (*self._drop(job), Forget(job), Note(text), *self._next())

    # -------------------------------------------------------------------------------------------------- sealed jobs

    def _admitted(self, offer: JobOffer, job: Job) -> Admitted | None:
        """The job with its terms if it is a sealed one.

        Raises:
            ConfigurationError: Its terms are not those that this site computes.
            PolicyRefused: This site has no machine of secure sums, or another job of the same terms.
        """
        if job.privacy.secure_aggregation == "plain":
            return None
        if self._sealed is None or self._coordinator is None:
            raise PolicyRefused("this agent runs without its protocol key", fix="run it with: parley site run")
        found = sealed.admitted(offer, job, self._coordinator)
        self._sealed.admit(found)
        return found

    def _offered_to_sums(self, job: Admitted, table: TableFacts | None) -> tuple[Effect, ...]:
        if self._sealed is None or table is None:
            finding = _finding("data", "the trainer did not say which table it read", "install one release throughout")
            return self._refuse(job.offer.job, (finding,))
        limited = self._limited()
        return (*limited, *self._turned(self._sealed.offer(job, self._rules, table, self._clock)))

    def _limited(self) -> tuple[Effect, ...]:
        """Holds the machine to the policy and the revocations as they are now."""
        if self._sealed is None:
            return ()
        return self._turned(self._sealed.limit(self._rules, self._me.revocations, self._clock))

    def _joined(self, job: str) -> tuple[Effect, ...]:
        """The coordinator has been told that the job is accepted: what it may have lost of it is said again."""
        state = self._jobs.get(job)
        if self._sealed is None or state is None or state.sealed is None or not (state.accepted and self.attending):
            return ()
        return self._turned(self._sealed.join(job, self._clock))

    def _sealed_message(self, message: Sealed) -> tuple[Effect, ...]:
        if self._sealed is None:
            return (Note(f"a sealed message of job {message.job} came, and this site takes none", trouble=True),)
        return self._turned(self._sealed.heard(message, self._clock))

    def _summed(self, event: sums.Event) -> tuple[Effect, ...]:
        return () if self._sealed is None else self._turned(self._sealed.receive(event, self._clock))

    def _turned(self, turns: tuple[Turn, ...]) -> tuple[Effect, ...]:
        return tuple(effect for turn in turns for effect in self._turn(turn))

    def _turn(self, turn: Turn) -> tuple[Effect, ...]:  # noqa: PLR0911 - one for each
        """What the session does about one thing that the machine said; all others are the agent's to perform."""
        match turn:
            case sums.Accepted(job_hash):
                state = self._state_of(job_hash)
                return () if state is None else self._accept(state)
            case sums.JobRefused(job_hash, reasons):
                return self._refused_by_sums(job_hash, reasons)
            case sums.Work():
                return self._assigned(turn)
            case sums.Suspend(job_hash, reason):
                job = self._name_of(job_hash)
                text = f"job {job} waits for you: {reason}. To go on:  parley site resume-job {job}"
                return (Note(text, trouble=True), *self._let_go(job))
            case sums.Closed(job_hash):
                return self._closed(job_hash)
            case UploadMasked(job):
                state = self._jobs.get(job)
                if state is None or state.step is None:
                    return (turn,)
                return (Send(Progress(job, state.step.step, Phase.UPLOADING)), turn)
            case _:
                return (turn,)

    def _name_of(self, job_hash: bytes) -> str:
        return "" if self._sealed is None else self._sealed.name(job_hash)

    def _state_of(self, job_hash: bytes) -> _JobState | None:
        return self._jobs.get(self._name_of(job_hash))

    def _refused_by_sums(self, job_hash: bytes, reasons: tuple[Broken, ...]) -> tuple[Effect, ...]:
        job = self._name_of(job_hash)
        told = tuple(Note(f"job {job}: {each.problem} ({each.fix})", trouble=True) for each in reasons)
        return (*told, *self._refuse(job, sealed.finding_of(reasons)))

    def _assigned(self, work: sums.Work) -> tuple[Effect, ...]:
        """Queues the work if the step that the coordinator told of is the one that its signature is under."""
        state = self._state_of(work.job_hash)
        if state is None:
            return self._summed(sums.Cannot(work.job_hash, work.assignment, Because.RESOURCES))
        state.work = work
        if self._paused:
            return self._cannot(state)
        step = state.step
        if step is None or not sealed.describes(step, work):
            text = f"job {state.offer.job}: round {work.assignment.r} is signed for another step than was described"
            return (*self._cannot(state), Note(text, trouble=True))
        self._updates += 1
        name = f"{work.job_hash.hex()[:16]}-{work.assignment.r}-{self._updates}"
        return self._enqueue(Assigned(step, work, name))

    def _cannot(self, state: _JobState, because: Because = Because.RESOURCES) -> tuple[Effect, ...]:
        """Lets the job's work go, if some is under way, and tells the coordinator, without a reason."""
        work = state.work
        return () if work is None else self._summed(sums.Cannot(work.job_hash, work.assignment, because))

    def _held(self, assigned: Assigned, table: bytes) -> tuple[Effect, ...]:
        """The machine erases what it did not wait for any more."""
        work = assigned.work
        begin = self._busy == assigned
        if begin:
            self._busy = None
        done = self._summed(sums.Updated(work.job_hash, work.assignment, assigned.update, table))
        return (*done, *self._next()) if begin else done

    def _drifted(self, event: sums.Drifted, assignment: sums.Assignment) -> tuple[Effect, ...]:
        busy = self._busy
        if not isinstance(busy, Assigned) or busy.work.job_hash != event.job_hash or busy.work.assignment != assignment:
            return ()
        self._busy = None
        text = f"job {busy.job}: the model of round {busy.step.round} moved further than this site's policy allows"
        return (*self._summed(event), Note(text, trouble=True), *self._next())

    def _mask_failed(self, mask: sums.Mask, problem: str) -> tuple[Effect, ...]:
        state = self._state_of(mask.job_hash)
        note = Note(f"job {self._name_of(mask.job_hash)}: a result cannot be masked: {problem}", trouble=True)
        return (note,) if state is None else (*self._cannot(state), note)

    def _job_resumed(self, job: str) -> tuple[Effect, ...]:
        known = None if self._sealed is None else self._sealed.admission(job)
        if known is None:
            return (Note(f"there is no sealed job {job} here to resume", trouble=True),)
        resumed = (*self._summed(sums.Resumed(known.terms.job_hash)), Note(f"job {job} goes on"))
        state = self._jobs.get(job)
        return resumed if state is None or not state.accepted else (*resumed, *self._accept(state))

    def _closed(self, job_hash: bytes) -> tuple[Effect, ...]:
        """The coordinator has closed it; that the job has ended, and how, is said apart."""
        if self._sealed is None:
            return ()
        return self._let_go(self._sealed.closed(job_hash))

    def _let_go(self, job: str) -> tuple[Effect, ...]:
        """Stops the work of a sealed job that its machine waits for no more."""
        self._queue = deque(each for each in self._queue if not (isinstance(each, Assigned) and each.job == job))
        if isinstance(self._busy, Assigned) and self._busy.job == job:
            self._busy = None
            return (Forget(""), *self._next())
        return ()


def _is_of(work: JobOffer | StepStart | Assigned | None, job: str, step: int) -> bool:
    """Whether it is the work of this step."""
    asked = work.step if isinstance(work, Assigned) else work
    return isinstance(asked, StepStart) and (asked.job, asked.step) == (job, step)


def _because(busy: Assigned, cause: DeclineCause) -> Because:
    """Why work cannot be done. With noise that is never the records: training that fails on them gives an update of 0.

    What the trainer calls data is then a table that was changed, or taken away, in the middle of the job.
    """
    data = cause is DeclineCause.DATA and busy.work.plan.dp is None
    return Because.DATA if data else Because.RESOURCES


def _finding(path: str, problem: str, fix: str) -> Finding:
    """A finding of words that may be longer than those that travel; all of them stand in the site's log."""
    return Finding(path, problem[:_MAX_WORDS], fix[:_MAX_WORDS])


def _same_work(done: StepStart, asked: StepStart) -> bool:
    """Whether a result made for one question answers another: the same step of the same kind from the same payloads."""
    return replace(done, attempt=asked.attempt, deadline_seconds=asked.deadline_seconds) == asked
