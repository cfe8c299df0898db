"""A site's side of all its jobs: what it answers to the coordinator, and what it does, one piece of work at a time.

```
AWAY --connected--> GREETING --welcome holds--> ATTENDING --disconnected--> AWAY
                        `--welcome does not hold--> the stream ends, for good

a job:   offered -> checking its policy, roster and data -> accepted | refused
a step:  queued -> fetching -> working -> uploading -> contributed   (or declined, at any point)

paused: the step under way is put down, and no work is taken up, until the administrator lets the site go on
```
"""

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from client import policy
from client.policy import Policy
from federation.blobs import BlobRef
from federation.errors import ConfigurationError, IdentityError, ParleyError, RemoteProtocolError
from federation.findings import Finding
from federation.job import digest, parse
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
    MembershipStatement,
    Phase,
    Progress,
    Refusal,
    RevocationList,
    StepEnded,
    StepStart,
    Welcome,
)
from federation.refusals import raised
from privacy import identity
from privacy.identity import RootCertificate

__all__ = [
    "CheckData",
    "Connected",
    "DataChecked",
    "Disconnect",
    "Disconnected",
    "Effect",
    "Event",
    "Fetch",
    "Fetched",
    "Forget",
    "Keep",
    "KeepRevocations",
    "Note",
    "Paused",
    "Received",
    "Remembered",
    "Send",
    "Session",
    "SiteIdentity",
    "Upload",
    "Uploaded",
    "Work",
    "WorkFailed",
    "Worked",
]


@dataclass(frozen=True, slots=True)
class SiteIdentity:
    """Who this site is and whom it trusts."""

    statement: MembershipStatement
    root: RootCertificate
    revocations: RevocationList


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Connected:
    """A stream is open; `nonce` is fresh from the operating system."""

    nonce: bytes
    software: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The stream has ended."""


@dataclass(frozen=True, slots=True)
class Received:
    """The coordinator said something; `policy` is the site's policy as its file states it now."""

    message: FromCoordinator
    policy: Policy


@dataclass(frozen=True, slots=True)
class DataChecked:
    """The data set was held against the job's contract."""

    job: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The step's payloads are here."""

    step: StepStart


@dataclass(frozen=True, slots=True)
class Worked:
    """The step's work is done; its result lies ready as `payload`."""

    step: StepStart
    payload: BlobRef
    weight: float
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """What was being done, a job's check or a step, cannot be done here."""

    subject: JobOffer | StepStart
    cause: DeclineCause
    problem: str


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The coordinator holds the step's result, durably."""

    step: StepStart


@dataclass(frozen=True, slots=True)
class Paused:
    """The site's administrator has paused it (`paused`), or let it go on."""

    paused: bool


Event = Connected | Disconnected | Received | DataChecked | Fetched | Worked | WorkFailed | Uploaded | Paused


@dataclass(frozen=True, slots=True)
class Remembered:
    """A job of which this site holds a result that was not counted yet."""

    offer: JobOffer
    result: Worked


# ------------------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class Send:
    """Says something to the coordinator."""

    message: FromSite


@dataclass(frozen=True, slots=True)
class CheckData:
    """Holds the data set against the job's contract; answers `DataChecked` or `WorkFailed`."""

    offer: JobOffer


@dataclass(frozen=True, slots=True)
class Fetch:
    """Brings the step's payloads here; answers `Fetched`."""

    step: StepStart


@dataclass(frozen=True, slots=True)
class Work:
    """Does the step; answers `Worked` or `WorkFailed`."""

    step: StepStart
    offer: JobOffer


@dataclass(frozen=True, slots=True)
class Upload:
    """Brings the result to the coordinator; answers `Uploaded`."""

    step: StepStart
    payload: BlobRef


@dataclass(frozen=True, slots=True)
class Forget:
    """Drops what was kept for a job: its payloads and results; `job` empty: stops what is being done, and no more."""

    job: str


@dataclass(frozen=True, slots=True)
class Keep:
    """Remembers a job's result through a crash: durable before anything that follows it is performed."""

    remembered: Remembered


@dataclass(frozen=True, slots=True)
class KeepRevocations:
    """Stores a newer revocation list."""

    revocations: RevocationList


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Ends the attendance for good: whom we reached is not our coordinator, or does not want us."""

    reason: ParleyError


@dataclass(frozen=True, slots=True)
class Note:
    """Tells the site's administrator something; `trouble` when somebody should act."""

    text: str
    trouble: bool = False


Effect = Send | CheckData | Fetch | Work | Upload | Keep | Forget | KeepRevocations | Disconnect | Note


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
    offer: JobOffer
    accepted: bool = False
    result: Worked | None = None


class Session:
    """The state of a site. It owns no socket, clock, thread or file.

    Args:
        me: Who this site is.
        remembered: Jobs with results that were not counted when the site was last ended, or killed.
    """

    def __init__(self, me: SiteIdentity, remembered: tuple[Remembered, ...] = ()) -> None:
        self._me = me
        self._state = _State.AWAY
        self._nonce = b""
        self._jobs = {each.offer.job: _JobState(each.offer, result=each.result) for each in remembered}
        self._queue: deque[JobOffer | StepStart] = deque()
        self._busy: JobOffer | StepStart | None = None
        self._awaited = False
        self._paused = False
        self._phase = Phase.DOWNLOADING
        self._coordinator: MembershipStatement | None = None

    @property
    def attending(self) -> bool:
        """Whether the coordinator has welcomed us and we it."""
        return self._state is _State.ATTENDING

    def receive(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Takes an event in and says what to do. Bad messages are noted and change nothing.

        Nothing but a hello is said, and no payload is sent, while the coordinator has not proven who it is.
        """
        effects = self._taken(event, now)
        if self.attending or isinstance(event, Connected):
            return effects
        return tuple(effect for effect in effects if not isinstance(effect, Send))

    def _taken(self, event: Event, now: float) -> tuple[Effect, ...]:  # noqa: PLR0911 - one for each event
        match event:
            case Connected(nonce, software):
                self._state, self._nonce = _State.GREETING, nonce
                return (Send(Hello(PROTOCOL, software, self._me.statement, nonce, now)),)
            case Disconnected():
                return self._disconnected()
            case Received(message, rules):
                return self._received(message, rules, now)
            case DataChecked(job, findings):
                return self._checked(job, findings)
            case Fetched(step):
                return self._fetched(step)
            case Worked():
                return self._worked(event)
            case WorkFailed(subject, cause, problem):
                return self._failed(subject, cause, problem)
            case Uploaded(step):
                return self._uploaded(step)
            case Paused(paused):
                return self._pause() if paused else self._resume()
            case _:
                assert_never(event)

    def _pause(self) -> tuple[Effect, ...]:
        """Puts down what is being done: a step for good, unless it is asked again; a check until the site goes on."""
        if self._paused:
            return ()
        self._paused = True
        self._queue = deque(each for each in self._queue if isinstance(each, JobOffer))
        told = (Send(Availability(available=False)), Note("paused: no step is taken up until: parley site resume"))
        if self._busy is None:
            return told
        if isinstance(self._busy, JobOffer):
            self._queue.appendleft(self._busy)
        self._busy = None
        return (Forget(""), *told)

    def _resume(self) -> tuple[Effect, ...]:
        if not self._paused:
            return ()
        self._paused = False
        return (Send(Availability(available=True)), Note("goes on"), *self._next())

    def _disconnected(self) -> tuple[Effect, ...]:
        """Work goes on; what needs the coordinator is let go: every step that still counts will be asked again."""
        self._state = _State.AWAY
        self._awaited = False
        self._queue = deque(each for each in self._queue if isinstance(each, JobOffer))
        if not isinstance(self._busy, StepStart) or self._phase is Phase.WORKING:
            return ()
        self._busy = None
        return (Forget(""), *self._next())

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

    def _told(self, message: FromCoordinator, rules: Policy, now: float) -> tuple[Effect, ...]:  # noqa: PLR0911 - one for each message
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
        effects: list[Effect] = [self._keep(revocations)]
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
            return (Send(JobAccepted(offer.job, digest(offer.text))), *self._again(known))
        self._jobs[offer.job] = _JobState(offer, result=known.result if known is not None else None)
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
        self._jobs.pop(job, None)
        self._queue = deque(each for each in self._queue if each.job != job)
        if self._busy is None or self._busy.job != job:
            return ()
        self._busy = None
        return (Forget(""),)

    def _checked(self, job: str, findings: tuple[Finding, ...]) -> tuple[Effect, ...]:
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
        state.accepted = True
        accepted = Send(JobAccepted(job, digest(state.offer.text)))
        return (*notes, accepted, Note(f"accepted job {job}"), *self._next())

    # ---------------------------------------------------------------------------------------------------- the steps

    def _started(self, step: StepStart) -> tuple[Effect, ...]:
        state = self._jobs.get(step.job)
        if state is None or not state.accepted:
            return (
                Send(Declined(step.job, step.step, step.attempt, DeclineCause.POLICY)),
                Note(f"declined step {step.step} of job {step.job}, which this site did not accept", trouble=True),
            )
        if self._paused:
            return (Send(Declined(step.job, step.step, step.attempt, DeclineCause.PAUSED)),)
        if isinstance(self._busy, StepStart) and _same_work(self._busy, step):
            self._busy = step  # asked again, after a reconnect or as another attempt: what is under way will answer it
            self._awaited = True
            return ()
        if state.result is not None and not _same_work(state.result.step, step):
            state.result = None
        return self._enqueue(step)

    def _enqueue(self, step: StepStart) -> tuple[Effect, ...]:
        """Queues the step in place of any older one of its job."""
        self._queue = deque(each for each in self._queue if isinstance(each, JobOffer) or each.job != step.job)
        self._queue.append(step)
        if isinstance(self._busy, StepStart) and self._busy.job == step.job:
            self._busy = None
            return (Forget(""), *self._next())
        return self._next()

    def _next(self) -> tuple[Effect, ...]:
        if self._busy is not None or self._paused or not self._queue:
            return ()
        self._busy = self._queue.popleft()
        self._awaited = True
        if isinstance(self._busy, JobOffer):
            return (CheckData(self._busy),)
        step = self._busy
        result = self._jobs[step.job].result
        if result is not None:
            return (self._progress(step, Phase.UPLOADING), Upload(step, result.payload))
        return (self._progress(step, Phase.DOWNLOADING), Fetch(step))

    def _progress(self, step: StepStart, phase: Phase) -> Send:
        self._phase = phase
        return Send(Progress(step.job, step.step, phase))

    def _under_way(self, done: StepStart, phase: Phase) -> StepStart | None:
        """The step as last asked, if `done` is this very work in this very phase; None when it was let go meanwhile."""
        step = self._busy
        same = isinstance(step, StepStart) and _same_work(done, step) and self._phase is phase
        return step if isinstance(step, StepStart) and same else None

    def _fetched(self, done: StepStart) -> tuple[Effect, ...]:
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

    def _failed(self, subject: JobOffer | StepStart, cause: DeclineCause, problem: str) -> tuple[Effect, ...]:
        busy = self._busy
        note = Note(f"job {subject.job}: {problem}", trouble=True)
        match busy, subject:
            case StepStart(), StepStart() if _same_work(subject, busy):
                self._busy = None
                return (Send(Declined(busy.job, busy.step, busy.attempt, cause)), note, *self._next())
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
        self._queue = deque(
            each for each in self._queue if isinstance(each, JobOffer) or (each.job, each.step) != (job, step)
        )
        if isinstance(self._busy, StepStart) and self._busy.job == job and self._busy.step == step:
            self._busy = None
            return (Forget(""), Note(f"job {job}: step {step} ended without this site", trouble=True), *self._next())
        return ()

    def _job_ended(self, job: str, text: str) -> tuple[Effect, ...]:
        if job not in self._jobs:
            return ()
        return (*self._drop(job), Forget(job), Note(text), *self._next())


def _finding(path: str, problem: str, fix: str) -> Finding:
    """A finding of words that may be longer than those that travel; all of them stand in the site's log."""
    return Finding(path, problem[:_MAX_WORDS], fix[:_MAX_WORDS])


def _same_work(done: StepStart, asked: StepStart) -> bool:
    """Whether a result made for one question answers another: the same step of the same kind from the same payloads."""
    return replace(done, attempt=asked.attempt, deadline_seconds=asked.deadline_seconds) == asked
