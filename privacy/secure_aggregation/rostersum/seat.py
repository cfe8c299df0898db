"""One site's part in one job: the machine of section 4.3, whose states and moves are the table of `states.py`.

What a message must be to count as a cause of that table stands in `guards.py`, `keys.py` and `attempt.py`; whatever
does not count is refused and changes nothing.
"""

from dataclasses import replace
from typing import assert_never

from federation.errors import LocalProtocolError
from privacy.secure_aggregation.rostersum import guards, messages
from privacy.secure_aggregation.rostersum.attempt import Attempt, begin, certified
from privacy.secure_aggregation.rostersum.durable import Family, Job, Point, Record
from privacy.secure_aggregation.rostersum.evidence import (
    Evidence,
    ForeignKeysError,
    GuardError,
    Suspicion,
    contradiction,
)
from privacy.secure_aggregation.rostersum.guards import View
from privacy.secure_aggregation.rostersum.keys import SiteKeys
from privacy.secure_aggregation.rostersum.messages import (
    Close,
    Code,
    Decline,
    Encaps,
    Epoch,
    FromCoordinator,
    Full,
    Keys,
    Message,
    Open,
    Outcome,
    Ready,
    Refuse,
    Relayed,
    Rescue,
    Result,
    RoundStart,
    Shares,
    Train,
    Upload,
)
from privacy.secure_aggregation.rostersum.premises import Premises
from privacy.secure_aggregation.rostersum.site_events import (
    Abandon,
    Assignment,
    Because,
    Cannot,
    Clock,
    Closed,
    Connected,
    Drift,
    Drifted,
    Effect,
    Erase,
    JobEvent,
    Log,
    Mask,
    Masked,
    Received,
    Resumed,
    Send,
    Suspend,
    TimePassed,
    Unreadable,
    Updated,
    UploadDone,
    UploadPayload,
    Work,
)
from privacy.secure_aggregation.rostersum.states import SENT, TRANSITIONS, Cause, State
from privacy.secure_aggregation.rostersum.terms import Churn, Kind, Plan
from privacy.secure_aggregation.rostersum.transitions import follows

__all__ = ["Seat"]

T_FULL = 900.0
"""Seconds after an upload's last byte within which a FULL must come."""
T_KEEP = 3600.0
"""Seconds for which an update waits for a ROUND_START."""
T_OPEN = 24 * 3600.0
"""Seconds for which shares are kept for a RESCUE."""
_MOST_BURNED = 3
"""Rounds in a row that this site opened in vain before its administrator is asked."""


class Seat:
    """The state of one job at a site. It owns no socket, clock, thread or file.

    Args:
        premises: What it shares with the site's other jobs.
        job: The job's durable state, new or as it was left.
    """

    def __init__(self, premises: Premises, job: Job) -> None:
        self._premises = premises
        self.job_hash = job.job_hash
        self._terms = job.terms
        self._idx = job.idx
        self.state = State.IDLE if job.record is None else State.OPENED
        self._keys: SiteKeys | None = None
        self._assignment: Assignment | None = None
        self._update: str | None = None
        self._attempt: Attempt | None = None
        self._uploaded: dict[bytes, int] = {}
        self._start: RoundStart | None = None
        self._full: Full | None = None
        self._results: dict[bytes, Result] = {}
        self._deadline: float | None = None
        self._model: tuple[int, bytes] | None = None

    # ------------------------------------------------------------------------------------------------------- questions

    @property
    def job(self) -> Job:
        """The job's durable state."""
        return next(job for job in self._premises.durable.jobs if job.job_hash == self.job_hash)

    def _family(self) -> Family:
        return self._premises.durable.family(self.job.family)

    def wake_at(self, clock: Clock) -> float | None:
        """When, on the steady clock, time itself will change something; None while it will not."""
        shares = None if (expiry := self._shares_expire()) is None else clock.steady + expiry - clock.wall
        return min((at for at in (self._deadline, shares) if at is not None), default=None)

    def _shares_expire(self) -> float | None:
        record = self.job.record
        return None if record is None or (record.settled and not record.shares) else record.opened_at + T_OPEN

    def _view(self, clock: Clock) -> View:
        premises, job = self._premises, self.job
        ready = self._update is not None and bool(follows(TRANSITIONS, self.state, Cause.START))
        return View(
            terms=self._terms,
            idx=self._idx,
            job=job,
            family=premises.durable.family(job.family),
            floor=premises.floor,
            ledger=premises.ledger,
            keys=self._keys,
            answered=self._assignment if ready else None,
            now=clock.steady,
        )

    # ----------------------------------------------------------------------------------------------------------- moves

    def _go(self, cause: Cause, target: State) -> None:
        """Enters `target`; the table must have this move."""
        if target not in follows(TRANSITIONS, self.state, cause):
            raise LocalProtocolError(f"the table has no way from {self.state} to {target} by {cause}")
        self.state, self._deadline = target, None

    def _stay(self, cause: Cause) -> None:
        """The table must allow to stay; no clock is set back."""
        if self.state not in follows(TRANSITIONS, self.state, cause):
            raise LocalProtocolError(f"the table has no way to stay {self.state} by {cause}")

    def _send(self, message: Message) -> Send:
        return Send(self.job_hash, message)

    def _sealed(self) -> list[Effect]:
        """Erases the self seed and the inbound seal keys of the attempt; the update stays bound to its round."""
        attempt, self._attempt = self._attempt, None
        return [] if attempt is None else [Abandon(self.job_hash, attempt.ctx)]

    def _erased(self) -> list[Effect]:
        """Seals the attempt and erases the update."""
        update, self._update = self._update, None
        return [*self._sealed(), *([] if update is None else [Erase(self.job_hash, update)])]

    def _rested(self, cause: Cause) -> list[Effect]:
        """Drops attempt, update and assignment: OPENED with a record, else IDLE."""
        self._go(cause, State.IDLE if self.job.record is None else State.OPENED)
        self._assignment = None
        return self._erased()

    # ---------------------------------------------------------------------------------------------------------- events

    def receive(self, event: JobEvent | Connected | TimePassed, clock: Clock) -> list[Effect]:  # noqa: PLR0911 - one for each event
        """Takes an event in and says what to do. What is refused changes nothing.

        Raises:
            ForeignKeysError: Another process holds this site's identity key; nothing changed yet.
        """
        match event:
            case Received(_, message):
                return self._received(message, clock)
            case Unreadable():
                return self._refused(None, GuardError(Code.E_STATE, "bytes came that are no message of RosterSum"))
            case Connected():
                return self._again()
            case TimePassed():
                return self._timed(clock)
            case Updated():
                return self._updated(event, clock)
            case Cannot():
                return self._cannot(event)
            case Drifted(_, assignment):
                return self._drifted(assignment)
            case Masked(_, ctx, y_hash):
                return self._masked(ctx, y_hash)
            case UploadDone(_, ctx):
                return self._upload_done(ctx, clock)
            case Resumed():
                job, family = replace(self.job, suspended=0, burned=0), replace(self._family(), declines=0)
                return [self._premises.persist(Point.NOTE, job=job, family=family)]
            case _:
                assert_never(event)

    def _received(self, message: Message, clock: Clock) -> list[Effect]:
        try:
            return self._taken(message, clock)
        except GuardError as refused:
            return self._refused(message, refused)

    def _taken(self, message: Message, clock: Clock) -> list[Effect]:  # noqa: PLR0911 - one for each message
        match message:
            case Epoch():
                return self._epoch(message, clock)
            case Keys():
                return self._peer_keys(message)
            case Encaps():
                self._living().take_encaps(message, self._premises.floor.revoked)
                self._stay(Cause.ENCAPS)
                return []
            case Train():
                return self._train(message, clock)
            case RoundStart():
                return self._round_start(message, clock)
            case Full():
                return self._fully(message, clock)
            case Rescue():
                return self._rescue(message)
            case Result():
                return self._result(message)
            case Close():
                return self._close(message)
            case _:
                raise GuardError(Code.E_STATE, f"a site takes no {message.TAG}")

    def _refused(self, message: Message | None, refused: GuardError) -> list[Effect]:
        job = self.job
        r, a = self._round_of(message)
        refuse = Refuse(
            job_hash=self.job_hash,
            r=r,
            a=a,
            idx=self._idx,
            code=refused.code,
            about=refused.about,
            last_r=job.last_r,
            last_a=job.last_a,
            opened_r=job.opened_r,
        )
        seen = (messages.encode(message),) if isinstance(message, FromCoordinator | Relayed) else ()
        log = Evidence(Suspicion.REFUSED, f"{refused.code.name}: {refused.problem}", None, seen)
        return [
            self._send(messages.sign(refuse, self._premises.private)),
            *(Log(self.job_hash, each) for each in (log, *refused.evidence)),
        ]

    def _round_of(self, message: Message | None) -> tuple[int, int]:
        """The (r, a) that a message is about, as far as it or its context says so; else zeros."""
        match message:
            case RoundStart():
                return message.r, message.a
            case Train():
                return message.r, 0
            case Full() | Rescue() | Result():
                record, start = self.job.record, self._start
                if start is not None and start.ctx == message.ctx:
                    return start.r, start.a
                return (record.r, record.a) if record is not None and record.ctx == message.ctx else (0, 0)
            case _:
                return 0, 0

    def _suspend(self, reason: str, job: Job) -> list[Effect]:
        """Stops the job until the administrator lets it go on; records still serve the others."""
        persist = self._premises.persist(Point.NOTE, job=replace(job, suspended=1))
        return [persist, *self._rested(Cause.SUSPEND), Suspend(self.job_hash, reason)]

    # ------------------------------------------------------------------------------------------------------------ keys

    def _living(self) -> SiteKeys:
        if self._keys is None:
            raise GuardError(Code.E_STATE, "this process has no keys: it waits for an EPOCH")
        return self._keys

    def _epoch(self, message: Epoch, clock: Clock) -> list[Effect]:
        guards.signed(message, self._terms)
        job = self.job
        again = message.epoch == job.epoch and self._keys is None
        if message.job_hash != self.job_hash or not (message.epoch > job.epoch or again):
            raise GuardError(Code.E_EPOCH, f"epoch {message.epoch} is not after {job.epoch}, or is of another job")
        if job.suspended:
            raise GuardError(Code.E_STATE, "the job waits for this site's administrator")
        effects = self._rekeyed(message.epoch, clock)
        if self.state in SENT:
            self._go(Cause.EPOCH, State.READY)
            return [*self._sealed(), *effects, *self._promised(clock)]
        self._stay(Cause.EPOCH)
        return [*effects, self._ready()] if self.state is State.READY else effects

    def _rekeyed(self, epoch: int, clock: Clock) -> list[Effect]:
        """Erases the old keys and all pair roots; the new keys' generation is durable before they leave (F2)."""
        premises = self._premises
        gen = max(self.job.gen + 1, int(clock.wall))
        keys = SiteKeys(
            self._terms,
            self._idx,
            premises.private,
            premises.generate(bool(self._terms.pq)),
            epoch=epoch,
            gen=gen,
            nonce=premises.draw(32),
            made=clock.steady,
        )
        self._keys = keys
        return [premises.persist(Point.KEYS, job=replace(self.job, epoch=epoch, gen=gen)), self._send(keys.mine)]

    def _peer_keys(self, message: Keys) -> list[Effect]:
        keys = self._living()
        if keys.foreign(message):
            raise ForeignKeysError(contradiction(Suspicion.FOREIGN_KEYS, self._idx, keys.mine, message))
        encaps = keys.take_keys(message, self._premises.floor.revoked)
        self._stay(Cause.KEYS)
        return [] if encaps is None else [self._send(encaps)]

    def clocks_drifted(self, clock: Clock) -> list[Effect]:
        """This process may be a snapshot that came back: it drops all it holds in memory and makes new keys."""
        effects = self._rested(Cause.DRIFT)
        if self._keys is None:
            return effects
        return effects + self._rekeyed(self.job.epoch, clock)

    def stop(self, reason: str) -> list[Effect]:
        """Another process holds this site's identity key: nothing more is done before the administrator has looked."""
        self._keys = None
        return self._suspend(reason, self.job)

    # ------------------------------------------------------------------------------------------------------ TRAIN, work

    def _train(self, message: Train, clock: Clock) -> list[Effect]:
        view = self._view(clock)
        guards.passes(guards.TRAIN_GUARDS, message, view)
        asked = Assignment(message.r, message.plan_id, message.model_hash, message.args_hash)
        if asked == self._assignment:
            self._stay(Cause.TRAIN)
            return [self._ready()] if self.state is State.READY else []
        effects = self._erased()
        self._go(Cause.TRAIN, State.WORKING)
        self._assignment = asked
        plan = self._plan(asked.plan_id)
        return [*effects, Work(self.job_hash, asked, plan, view.job.family, view.job.table, self._drift(plan, asked.r))]

    def _plan(self, plan_id: int) -> Plan:
        plan = self._terms.plan(plan_id)
        if plan is None:
            raise LocalProtocolError(f"plan {plan_id} passed the guards and is not in the terms")
        return plan

    def _drift(self, plan: Plan, r: int) -> Drift | None:
        most = self._premises.floor.drift_max
        if most is None or self._model is None or plan.kind is not Kind.TRAIN or r <= self._model[0]:
            return None
        return Drift(self._model[1], most * (r - self._model[0]))

    def _ready(self) -> Send:
        keys, asked = self._living(), self._assignment
        if asked is None:
            raise LocalProtocolError("a site is ready for no assignment")
        ready = Ready(
            self.job_hash,
            keys.mine.epoch,
            asked.r,
            asked.plan_id,
            asked.model_hash,
            asked.args_hash,
            self._idx,
            keys.mine.digest,
        )
        return self._send(messages.sign(ready, self._premises.private))

    def _promised(self, clock: Clock) -> list[Effect]:
        self._deadline = clock.steady + T_KEEP
        return [self._ready()]

    def _updated(self, event: Updated, clock: Clock) -> list[Effect]:
        if self.state is not State.WORKING or event.assignment != self._assignment:
            return [Erase(self.job_hash, event.update)]  # the work was let go meanwhile
        if event.table != self.job.table:
            declined = self._declined(event.assignment.r)
            reason = "the table that was read is another version than the job's: its sums' difference is the change"
            return [Erase(self.job_hash, event.update), *self._suspend(reason, self.job), declined]
        self._go(Cause.DONE, State.READY)
        self._update = event.update
        if self._plan(event.assignment.plan_id).kind is Kind.TRAIN:
            self._model = event.assignment.r, event.assignment.model_hash
        return self._promised(clock)

    def _declined(self, r: int) -> Send:
        return self._send(messages.sign(Decline(self.job_hash, r, self._idx), self._premises.private))

    def _cannot(self, event: Cannot) -> list[Effect]:
        asked = self._assignment
        if asked is None or event.assignment != asked or not follows(TRANSITIONS, self.state, Cause.CANNOT):
            return []  # of work that was let go
        data = event.because is Because.DATA
        if data and self._plan(asked.plan_id).churn is Churn.DP:
            raise LocalProtocolError("under dp nothing is declined because of data: what is not finite counts as zero")
        self._go(Cause.CANNOT, State.IDLE)
        self._assignment = None
        effects = [*self._erased(), self._declined(asked.r)]
        if not data:
            return effects
        family = self._family()
        family = replace(family, declines=family.declines + 1)
        told = [self._premises.persist(Point.NOTE, family=family), *effects]
        if not family.waits:
            return told
        return [*told, *self._suspend(family.why, self.job)]

    def _drifted(self, assignment: Assignment) -> list[Effect]:
        if self.state is not State.WORKING or assignment != self._assignment:
            return []
        self._go(Cause.DRIFTED, State.IDLE)
        self._assignment = None
        asked = Train(
            self.job_hash,
            self.job.epoch,
            assignment.r,
            assignment.plan_id,
            assignment.model_hash,
            assignment.args_hash,
        )
        return self._refused(asked, GuardError(Code.E_DRIFT, "the model moved further than this site allows"))

    # --------------------------------------------------------------------------------------------- ROUND_START, UPLOAD

    def _round_start(self, message: RoundStart, clock: Clock) -> list[Effect]:
        view = self._view(clock)
        try:
            guards.passes(guards.START_GUARDS, message, view)
        except GuardError as refused:
            refused.evidence += self._two_starts(message, refused)
            raise
        job = view.job.given_up()
        if job.burned >= _MOST_BURNED:
            waits = GuardError(Code.E_STATE, "the job waits for this site's administrator")
            return [*self._refused(message, waits), *self._suspend(_BURNED, job)]
        return self._started(message, view, job)

    def _two_starts(self, message: RoundStart, refused: GuardError) -> tuple[Evidence, ...]:
        """Two ROUND_STARTs of one (r, a) whose sets share a site: the coordinator never signs both."""
        first = self._start
        if first is None or refused.code is Code.E_SIG or message.job_hash != self.job_hash:
            return ()
        same = (first.r, first.a) == (message.r, message.a) and first.ctx != message.ctx
        shared = not set(first.members).isdisjoint(message.members)
        return (contradiction(Suspicion.TWO_STARTS, None, first, message),) if same and shared else ()

    def _started(self, message: RoundStart, view: View, job: Job) -> list[Effect]:
        keys, update, plan = self._living(), self._update, self._plan(message.plan_id)
        if update is None:
            raise LocalProtocolError("a ROUND_START passed its guards and there is no update")
        attempt = begin(message, plan, self._idx, keys, self._premises.draw)
        charge = guards.charge(view, plan, message.r, len(message.members))
        sealed = self._sealed()
        if message.r != job.last_r:
            self._uploaded.clear()
            self._results.clear()
        started = job.started(message.r, message.a, message.plan_id)
        family = self._family_after(plan, view)
        persist = self._premises.persist(Point.ATTEMPT, job=started, family=family, charge=charge)
        keys.uploads += 1
        self._attempt, self._start, self._full = attempt, message, None
        self._go(Cause.START, State.MASKING)
        mask = Mask(
            job_hash=self.job_hash,
            ctx=attempt.ctx,
            update=update,
            plan=plan,
            members=len(message.members),
            c_max=self._terms.c_max,
            self_key=attempt.self_key,
            pair_keys=attempt.pair_keys,
        )
        return [*sealed, persist, mask]

    def _family_after(self, plan: Plan, view: View) -> Family:
        """The family with pin, table version and plan hash, each as of the first sum that needs it."""
        family = view.family
        if plan.churn is Churn.CELLS:
            family = replace(family, pin=self._terms.cell_hash(self._idx))
        if plan.exact:
            family = replace(family, table=view.job.table)
        if plan.exact and plan.kind is Kind.STAT and plan.digest not in family.plans:
            family = replace(family, plans=(*family.plans, plan.digest))
        return family

    def _masked(self, ctx: bytes, y_hash: bytes) -> list[Effect]:
        attempt = self._attempt
        if attempt is None or attempt.ctx != ctx or self.state is not State.MASKING:
            return [] if attempt is not None and attempt.ctx == ctx else [Abandon(self.job_hash, ctx)]
        self._go(Cause.MASKED, State.UPLOADED)
        upload = Upload(ctx, self._idx, y_hash, attempt.commitment, attempt.seals)
        attempt.upload = messages.sign(upload, self._premises.private)
        self._uploaded[ctx] = attempt.start.r
        return self._uploading(attempt, attempt.upload)

    def _uploading(self, attempt: Attempt, upload: Upload) -> list[Effect]:
        payload = UploadPayload(self.job_hash, attempt.ctx, upload.y_hash, attempt.plan.size)
        return [self._send(upload), payload]

    def _upload_done(self, ctx: bytes, clock: Clock) -> list[Effect]:
        if self.state is State.UPLOADED and self._attempt is not None and self._attempt.ctx == ctx:
            self._stay(Cause.SENT)
            self._deadline = clock.steady + T_FULL
        return []

    # ------------------------------------------------------------------------------------------------------ FULL, OPEN

    def _fully(self, message: Full, clock: Clock) -> list[Effect]:
        attempt, record = self._attempt, self.job.record
        if attempt is not None and attempt.upload is not None and attempt.ctx == message.ctx:
            shares = certified(attempt, attempt.upload, message, self._terms)
            return self._opened(message, attempt, shares, clock)
        if record is None or record.ctx != message.ctx:
            raise GuardError(Code.E_STATE, "this site has uploaded nothing for this FULL")
        guards.signed(message, self._terms)
        opening = messages.decode(record.opening)
        if not isinstance(opening, Open) or opening.transcript != message.transcript:
            first = () if self._full is None else (contradiction(Suspicion.TWO_FULLS, None, self._full, message),)
            raise GuardError(Code.E_FULL, "this site has opened the attempt for another FULL", evidence=first)
        self._stay(Cause.FULL_AGAIN)
        return [self._send(opening)]

    def _opened(
        self, message: Full, attempt: Attempt, shares: tuple[messages.Share, ...], clock: Clock
    ) -> list[Effect]:
        start = attempt.start
        opening = messages.sign(Open(attempt.ctx, self._idx, attempt.b, message.transcript), self._premises.private)
        record = Record(
            r=start.r,
            a=start.a,
            ctx=attempt.ctx,
            members=start.members,
            t=attempt.plan.t,
            opening=messages.encode(opening),
            shares=shares,
            opened_at=int(clock.wall),
        )
        persist = self._premises.persist(Point.OPENED, job=replace(self.job, opened_r=start.r, record=record))
        self._go(Cause.FULL, State.OPENED)
        self._full = message
        return [persist, *self._erased(), self._send(opening)]

    def _rescue(self, message: Rescue) -> list[Effect]:
        guards.signed(message, self._terms)
        record = guards.rescuable(message, self.job.record, self._idx)
        shares = tuple(share for share in record.shares if share.idx in message.missing)
        self._stay(Cause.RESCUE)
        return [self._send(messages.sign(Shares(record.ctx, self._idx, shares), self._premises.private))]

    # --------------------------------------------------------------------------------------------------- RESULT, CLOSE

    def _result(self, message: Result) -> list[Effect]:
        guards.signed(message, self._terms)
        first = self._results.setdefault(message.ctx, message) if self._concerns(message.ctx) else message
        if first.covered() != message.covered():
            evidence = contradiction(Suspicion.TWO_RESULTS, None, first, message)
            raise GuardError(Code.E_STATE, "this attempt had another result", evidence=(evidence,))
        effects = self._settled(message)
        if not self._ends(message.ctx):
            self._stay(Cause.RESULT)
            return effects
        self._go(Cause.RESULT, State.IDLE)
        self._assignment = None
        effects += self._erased()
        return [*effects, *self._suspend(_BURNED, self.job)] if self.job.burned >= _MOST_BURNED else effects

    def _ends(self, ctx: bytes) -> bool:
        """Whether the result of this attempt ends what this site is doing: an upload of its present round."""
        record, asked = self.job.record, self._assignment
        if self.state is State.OPENED and record is not None and record.ctx == ctx:
            return True
        busy = self.state in (State.READY, *SENT)
        return busy and asked is not None and self._uploaded.get(ctx) == asked.r

    def _concerns(self, ctx: bytes) -> bool:
        record = self.job.record
        return ctx in self._uploaded or (record is not None and record.ctx == ctx)

    def _settled(self, message: Result) -> list[Effect]:
        """Erases the record's shares and counts how its round ended, if this is its result."""
        job = self.job.settled(message.ctx, opened=message.outcome is Outcome.OPENED)
        return [] if job is None else [self._premises.persist(Point.NOTE, job=job)]

    def _close(self, message: Close) -> list[Effect]:
        guards.signed(message, self._terms)
        if message.job_hash != self.job_hash:
            raise GuardError(Code.E_EPOCH, "it is of another job")
        job = self.job
        self._go(Cause.CLOSE, State.CLOSED)
        effects = self._erased()
        self._keys = None
        self._premises.durable = self._premises.durable.without(job)
        return [self._premises.persist(Point.CLOSED), *effects, Closed(self.job_hash)]

    # ------------------------------------------------------------------------------------------------ time, connections

    def _timed(self, clock: Clock) -> list[Effect]:
        effects: list[Effect] = []
        if self._deadline is not None and clock.steady >= self._deadline:
            effects += self._deadline_passed(clock)
        expiry = self._shares_expire()
        return effects if expiry is None or clock.wall < expiry else [*effects, *self._shares_expired()]

    def _deadline_passed(self, clock: Clock) -> list[Effect]:
        if self.state is State.UPLOADED:
            self._go(Cause.T_FULL, State.READY)
            self._deadline = clock.steady + T_KEEP
            return self._sealed()
        self._go(Cause.T_KEEP, State.IDLE)
        self._assignment = None
        return self._erased()

    def _shares_expired(self) -> list[Effect]:
        job = self.job.given_up().without_shares()
        persist = self._premises.persist(Point.NOTE, job=job)
        if self.state is State.OPENED:
            self._go(Cause.T_OPEN, State.IDLE)
            self._assignment = None
        else:
            self._stay(Cause.T_OPEN)
        return [persist, *(self._suspend(_BURNED, job) if job.burned >= _MOST_BURNED else [])]

    def _again(self) -> list[Effect]:
        """What the coordinator may have lost: keys, and what this state has said; the very same bytes."""
        effects: list[Effect] = [] if self._keys is None else [self._send(each) for each in self._keys.again()]
        record = self.job.record
        if self.state is State.READY and self._keys is not None:
            effects.append(self._ready())
        if self.state is State.UPLOADED and self._attempt is not None and self._attempt.upload is not None:
            effects += self._uploading(self._attempt, self._attempt.upload)
        if self.state is State.OPENED and record is not None:
            effects.append(self._send(messages.decode(record.opening)))
        return effects


_BURNED = f"{_MOST_BURNED} rounds in a row that this site opened ended without a sum"
