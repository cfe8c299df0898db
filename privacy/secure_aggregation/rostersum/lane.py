"""One sum's way through a round, from READYs to RESULT: over all sites or, in group mode, over one cell.

The machine is the table `stages.TRANSITIONS`: an event that has no row in a stage is refused and changes nothing.
"""

from collections.abc import Iterable
from dataclasses import replace

from federation.blobs import BlobRef
from federation.errors import LocalProtocolError, RemoteProtocolError
from privacy.secure_aggregation.rostersum.coordinator_attempt import Attempt, require_signature, restored, stored
from privacy.secure_aggregation.rostersum.coordinator_events import (
    Arrived,
    Begin,
    Broken,
    Close,
    Committed,
    Effect,
    Event,
    Expect,
    Failed,
    OpenedSum,
    Reason,
    Received,
    Revoked,
    Send,
    Started,
    Stored,
    Sum,
    Summed,
    Suspect,
    TimeUp,
)
from privacy.secure_aggregation.rostersum.coordinator_job import Job
from privacy.secure_aggregation.rostersum.coordinator_state import Ending, Seed, Step, Way
from privacy.secure_aggregation.rostersum.messages import (
    NOTHING,
    Code,
    Decline,
    Encaps,
    FromCoordinator,
    Keys,
    Message,
    Open,
    Outcome,
    Ready,
    Refuse,
    Relayed,
    Result,
    Shares,
    Train,
    Upload,
    encode,
)
from privacy.secure_aggregation.rostersum.muster import Muster
from privacy.secure_aggregation.rostersum.opening import Escrow
from privacy.secure_aggregation.rostersum.stages import CAUSES, TRANSITIONS, Stage
from privacy.secure_aggregation.rostersum.transitions import follows

__all__ = ["LAST_ATTEMPT", "Lane"]

LAST_ATTEMPT = 7
"""Attempts at a round are numbered from 0 to this."""

_FULL_WITHIN = 840.0
"""Seconds from the first stored vector to FULL: a site seals its attempt T_full = 900 s after its last byte."""

_PASSING = frozenset((Code.E_SIG, Code.E_EPOCH, Code.E_STATE, Code.E_KEYSET, Code.E_KEYS, Code.E_KEYAGE))
"""Refusals that a message said again, or new keys, can cure; all others keep a site out of the round."""


class Lane:
    """The machine of one sum of round `r`. It owns no clock: time is an argument, in seconds.

    Args:
        job: What all sums of the job share.
        r: The round.
        step: What the sites do.
        sites: Those among which the sum is made.
        way: How far it had come when the coordinator was last stopped.
    """

    def __init__(self, job: Job, r: int, step: Step, sites: tuple[int, ...], way: Way | None = None) -> None:
        plan = job.terms.plan(step.plan_id)
        if plan is None:
            raise LocalProtocolError(f"the job has no plan {step.plan_id}")
        self.sites = sites
        self.stage = Stage.IDLE
        self.deadline: float | None = None
        self.way = way or Way()
        self.failing: set[tuple[int, int]] = set()
        self.summed: OpenedSum | None = None
        self._job = job
        self._plan = plan
        self._r = r
        self._step = step
        self._attempt = restored(self.way, plan, job.terms.roster)
        self._muster = Muster(job, plan, sites)
        self._lost: set[int] = set()
        self._unable: set[int] = set()
        self._escrow: Escrow | None = None
        self._asked_again = False

    @property
    def busy(self) -> bool:
        """Whether an attempt has left and has no RESULT yet: no new epoch may come between."""
        return self.stage not in (Stage.IDLE, Stage.GATHERING)

    @property
    def summing(self) -> bytes | None:
        """The context whose sum is being made; None where none is."""
        return self._now.ctx if self.stage is Stage.SUMMING else None

    def due(self, now: float) -> bool:
        """Whether its deadline has come."""
        return self.deadline is not None and now >= self.deadline

    def receive(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Takes the event in and says what to do; what a site sent bears its own index already.

        Raises:
            RemoteProtocolError: What a site sent is late, or not what it must be; nothing changed.
            LocalProtocolError: The event cannot be here: a bug of ours.
        """
        cause = CAUSES[type(event.message if isinstance(event, Received) else event)]
        allowed = follows(TRANSITIONS, self.stage, cause)
        if not allowed and isinstance(event, Received):
            if isinstance(event.message, Open):
                return ()  # a site that comes back says it until it has heard RESULT
            raise RemoteProtocolError(
                f"{cause.value} of site {event.idx} came when the sum of round {self._r} was {self.stage.value}"
            )
        if not allowed:
            raise LocalProtocolError(f"{cause.value}, while the sum of round {self._r} was {self.stage.value}")
        effects = self._told(event.idx, event.message, now) if isinstance(event, Received) else self._met(event, now)
        if self.stage not in allowed:
            raise LocalProtocolError(f"{cause.value} led to {self.stage.value}, against the table")
        return effects

    def _told(self, idx: int, message: Message, now: float) -> tuple[Effect, ...]:  # noqa: PLR0911 - one for each
        match message:
            case Keys():
                return self._rekeyed(idx, now)
            case Encaps():
                return self._gathered(now) if self.stage is Stage.GATHERING else ()
            case Ready():
                return self._is_ready(message, now)
            case Decline():
                return self._declined(message, now)
            case Upload():
                return self._uploaded(message)
            case Open():
                return self._opened(message, now)
            case Shares():
                return self._shared(message)
            case Refuse():
                return self._refused(message, now)
            case _:
                raise LocalProtocolError(f"a {message.TAG} is not for a coordinator")

    def _met(self, event: Event, now: float) -> tuple[Effect, ...]:  # noqa: PLR0911 - one for each event
        match event:
            case Begin():
                return self._hopeless() or self._gather(now + self._job.patience.ready, self._train_all())
            case Started():
                return self._resume(now)
            case Arrived(idx):
                return (*self._greeting(idx), *(self._gathered(now) if self.stage is Stage.GATHERING else ()))
            case Revoked(idx):
                return self._revoked(idx, now)
            case Stored(idx, payload):
                return self._stored(idx, payload, now)
            case Summed(ctx, sum_hash):
                return self._held(ctx, sum_hash)
            case Broken(problem=problem):
                return self._give_up(Reason.CHECKS, (), problem)
            case Committed():
                return self._committed()
            case TimeUp():
                return self._overdue(now)
            case Close():
                return self._give_up(Reason.CLOSED, (), "the job was ended") if self.stage is not Stage.IDLE else ()
            case _:
                raise LocalProtocolError(f"{type(event).__name__} is not about one sum")

    # ------------------------------------------------------------------------------------------- who is ready, and P

    def rekeying(self, now: float) -> tuple[Effect, ...]:
        """A new epoch begins: each READY is to come again, with new keys."""
        self._muster.ready.clear()
        return self._gather(max(self.deadline or now, now + self._job.patience.again), self._train_all())

    def _gather(self, until: float, effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
        self.stage, self.deadline, self._asked_again = Stage.GATHERING, until, False
        return effects

    def _train_all(self) -> tuple[Effect, ...]:
        return tuple(
            each for idx in self.sites if idx not in self._muster.ready for each in self._say(idx, self._train())
        )

    def _train(self) -> Train:
        return self._job.train(self._r, self._step)

    def _say(self, idx: int, message: FromCoordinator | Relayed) -> tuple[Effect, ...]:
        return (Send(idx, message),) if idx in self._job.present else ()

    def _is_ready(self, ready: Ready, now: float) -> tuple[Effect, ...]:
        if self.stage is Stage.IDLE:
            return ()
        job, step, idx = self._job, self._step, ready.idx
        asked = (job.terms.job_hash, job.keys.epoch, self._r, step.plan_id, step.model_hash, step.args_hash)
        told = (ready.job_hash, ready.epoch, ready.r, ready.plan_id, ready.model_hash, ready.args_hash)
        if told != asked or ready.keys_digest != job.keys.digest(idx):
            raise RemoteProtocolError(f"the READY of site {idx} is for other work or other keys than are current")
        self._signed(ready, idx)
        self._muster.ready.add(idx)
        self._muster.out.discard(idx)
        return self._gathered(now) if self.stage is Stage.GATHERING else ()

    def _declined(self, decline: Decline, now: float) -> tuple[Effect, ...]:
        if (decline.job_hash, decline.r) != (self._job.terms.job_hash, self._r) or decline.idx in self._muster.ready:
            raise RemoteProtocolError(f"the DECLINE of site {decline.idx} is of another round, or after its READY")
        self._signed(decline, decline.idx)
        self._muster.out.add(decline.idx)
        return self._gathered(now) if self.stage is Stage.GATHERING else ()

    def _gathered(self, now: float, *, due: bool = False) -> tuple[Effect, ...]:
        """Starts the attempt once all that are wanted are ready, or at the deadline whoever is; waits otherwise."""
        if given_up := self._hopeless():
            return given_up
        if self._job.stale:
            self.deadline = None if due else self.deadline
            return ()  # new keys come first, and with them a new deadline; each READY then comes again
        members = self._muster.members(due=due)
        if members:
            return self._start(members, now)
        return self._ask_again(now) if due else ()

    def _hopeless(self) -> tuple[Effect, ...]:
        """Gives up if no set can be allowed any more, whoever gets ready."""
        if not self._muster.hopeless:
            return ()
        who = tuple(idx for idx in self.sites if idx not in self._muster.able)
        return self._give_up(Reason.COHORT, who, f"without sites {list(who)} no set is allowed")

    def _ask_again(self, now: float) -> tuple[Effect, ...]:
        missing = self._muster.missing()
        if self._asked_again:
            return self._give_up(Reason.COHORT, missing, f"sites {list(missing)} were not ready in time")
        self._asked_again, self.deadline = True, now + self._job.patience.ready
        return tuple(effect for idx in missing for effect in (*self._relayed(idx), *self._say(idx, self._train())))

    def _relayed(self, idx: int) -> tuple[Effect, ...]:
        """What a site must know of the others' keys, said once more."""
        return tuple(each for message in self._job.keys.known(idx) for each in self._say(idx, message))

    # -------------------------------------------------------------------------------------------------- the attempt

    @property
    def _now(self) -> Attempt:
        if self._attempt is None:
            raise LocalProtocolError(f"round {self._r} has no attempt yet")
        return self._attempt

    @property
    def _next(self) -> int:
        return 0 if self._attempt is None else self._attempt.start.a + 1

    def _start(self, members: tuple[int, ...], now: float) -> tuple[Effect, ...]:
        """The one place that signs a ROUND_START: its number is one that was never signed before."""
        job = self._job
        start = job.start(self._r, self._next, self._step, members)
        self._attempt = Attempt(start, self._plan, job.terms.roster)
        self.way = Way(encode(start))
        self._lost, self._unable, self._escrow = set(), set(), None
        self.stage, self.deadline = Stage.UPLOADING, now + job.patience.upload
        return tuple(each for idx in members for each in self._say(idx, start))

    def _next_attempt(self, now: float) -> tuple[Effect, ...]:
        """Gives the attempt up, which costs all a re-upload; nobody opens it, since no FULL of it ever leaves."""
        attempt = self._now
        if self._next > LAST_ATTEMPT:
            behind = tuple(idx for idx in attempt.members if idx not in attempt.stored or idx in self._lost)
            return self._give_up(Reason.ATTEMPTS, behind, f"round {self._r} took {self._next} attempts")
        effects = self._gather(now + self._job.patience.again, self._train_all())
        return (*effects, *self._gathered(now))

    def _uploaded(self, upload: Upload) -> tuple[Effect, ...]:
        payload = self._now.take_upload(upload)
        return () if payload is None else (Expect(upload.idx, payload),)

    def _stored(self, idx: int, payload: BlobRef, now: float) -> tuple[Effect, ...]:
        if self.stage is not Stage.UPLOADING or self.deadline is None or not self._now.take_stored(idx, payload):
            return ()  # of an attempt that is over
        if not self._now.complete:
            self.deadline = min(self.deadline, now + _FULL_WITHIN)
            return ()
        if now >= self.deadline or (self._lost and not self._can_rescue(len(self._now.members) - len(self._lost))):
            return self._next_attempt(now)
        return self._full(now)

    def _can_rescue(self, records: int) -> bool:
        return 0 < self._plan.t <= records

    def _full(self, now: float) -> tuple[Effect, ...]:
        attempt = self._now
        uploads = tuple(encode(attempt.uploads[idx]) for idx in attempt.members)
        self.way = replace(self.way, uploads=uploads, full_signature=attempt.sign_full(self._job.private))
        return self._open(now)

    def _open(self, now: float) -> tuple[Effect, ...]:
        self.stage, self._asked_again, self._unable = Stage.OPENING, False, set(self._lost)
        self.deadline = now + self._job.patience.opening
        return self._say_full(self._now.shut)

    def _say_full(self, to: Iterable[int]) -> tuple[Effect, ...]:
        make = self._now.full(self.way.full_signature)
        return tuple(Send(idx, make(idx)) for idx in to if idx in self._job.present)

    # -------------------------------------------------------------------------------------------------- the opening

    def _opened(self, message: Open, now: float) -> tuple[Effect, ...]:
        attempt, idx = self._now, message.idx
        if self.stage is Stage.IDLE:
            attempt.require_member(idx, message.ctx)
            return self._greeting(idx)  # it asks for the RESULT
        if self.stage in (Stage.SUMMING, Stage.SUMMED):
            attempt.require_member(idx, message.ctx)
            return ()  # its seed is known, from itself or from others
        if not attempt.take_open(message):
            return ()
        self.way = replace(self.way, opens=(*self.way.opens, encode(message)))
        if self._escrow is not None:
            self._escrow.drop(idx)
        return self._proceed(now)

    def _proceed(self, now: float) -> tuple[Effect, ...]:
        shut = self._now.shut
        if not shut:
            return self._sum()
        if self.stage is Stage.OPENING and self._unable.issuperset(shut):
            return self._rescue(now)
        return ()

    def _rescue(self, now: float) -> tuple[Effect, ...]:
        """Nobody else opens: asks those who did for shares of the others' seeds, or burns the round."""
        attempt = self._now
        if not self._can_rescue(len(attempt.opens)):
            return self._give_up(Reason.OPENING, attempt.shut, f"sites {list(attempt.shut)} did not open")
        self._escrow = Escrow(attempt.shut, self._plan.t, attempt.commits)
        self.stage, self._asked_again = Stage.RESCUING, False
        self.deadline = now + self._job.patience.opening
        return self._say_rescue(sorted(attempt.opens))

    def _say_rescue(self, to: Iterable[int]) -> tuple[Effect, ...]:
        if self._escrow is None:
            raise LocalProtocolError("a RESCUE was to be said again before it was said")
        rescue = self._job.rescue(self._now.ctx, self._escrow.missing)
        owing = [idx for idx in to if idx in self._now.opens and idx not in self._escrow.holders]
        return tuple(each for idx in owing for each in self._say(idx, rescue))

    def _shared(self, message: Shares) -> tuple[Effect, ...]:
        attempt, idx = self._now, message.idx
        attempt.require_member(idx, message.ctx)
        if self._escrow is None or self.stage is not Stage.RESCUING:
            return ()  # fewer sufficed
        if idx not in attempt.opens:
            raise RemoteProtocolError(f"site {idx} sent shares, and was not asked: it has not opened itself")
        self._signed(message, idx)
        found = self._escrow.add(idx, message.shares)
        seeds = {each.dealer: Seed(each.dealer, each.seed) for each in found}
        attempt.rescued.update(seeds)
        self.way = replace(self.way, rescued=(*self.way.rescued, *seeds.values()))
        suspects = tuple(Suspect(each.dealer, each.wrong) for each in found if each.wrong)
        return (*suspects, *(() if attempt.shut else self._sum()))

    def _sum(self) -> tuple[Effect, ...]:
        self.stage, self.deadline = Stage.SUMMING, None
        return (Sum(self._now.ctx, self._step.plan_id, self._now.terms()),)

    def _held(self, ctx: bytes, sum_hash: bytes) -> tuple[Effect, ...]:
        self.stage = Stage.SUMMED
        self.summed = OpenedSum(self._now.members, ctx, sum_hash)
        return ()

    # ------------------------------------------------------------------------------------------------------ the end

    @property
    def concluded(self) -> Way:
        """The way as it will be when model and round are stored with it: with the RESULT, which may leave then."""
        if self.summed is None:
            return self.way
        return self._ended(Ending.OPENED, Outcome.OPENED, self.summed.sum_hash)

    def _ended(self, ending: Ending, outcome: Outcome, sum_hash: bytes) -> Way:
        if self._attempt is None:
            return replace(self.way, ending=ending)
        result = self._job.result(self._attempt.ctx, outcome, sum_hash)
        return replace(self.way, ending=ending, result=encode(result))

    def _committed(self) -> tuple[Effect, ...]:
        self.way = self.concluded
        return self._over()

    def _give_up(self, reason: Reason, who: tuple[int, ...], detail: str) -> tuple[Effect, ...]:
        self.way = self._ended(Ending.BURNED, Outcome.BURNED, NOTHING)
        failed = Failed(self._r, reason, who, detail, self.sites)
        return (*self._over(), failed)

    def _over(self) -> tuple[Effect, ...]:
        self.stage, self.deadline = Stage.IDLE, None
        members = () if self._attempt is None else self._attempt.members
        return tuple(each for idx in members for each in self._greeting(idx))

    # ----------------------------------------------------------------------------------------------- what goes wrong

    def _greeting(self, idx: int) -> tuple[Effect, ...]:  # noqa: PLR0911 - one for each stage
        """What a site that arrives must be told, or told again."""
        attempt = self._attempt
        member = attempt is not None and idx in attempt.members
        match self.stage:
            case Stage.GATHERING:
                return self._say(idx, self._train())
            case Stage.UPLOADING if member and idx not in self._now.uploads:
                return self._say(idx, self._now.start)
            case Stage.UPLOADING if not member:
                return self._say(idx, self._train())
            case Stage.OPENING | Stage.RESCUING if idx in self._now.shut:
                return self._say_full((idx,))
            case Stage.RESCUING:
                return self._say_rescue((idx,))
            case Stage.IDLE if member and self.way.result:
                return self._say(idx, stored(Result, self.way.result))
            case _:
                return ()

    def _rekeyed(self, idx: int, now: float) -> tuple[Effect, ...]:
        """New keys mean a new process: the site has forgotten its update and its self seed, if it had any."""
        if self.stage is Stage.OPENING and idx in self._now.shut and not self._job.stale:
            self._unable.add(idx)  # with a record it would have opened before it sent keys
            return self._proceed(now)
        if self.stage not in (Stage.GATHERING, Stage.UPLOADING):
            return ()
        self._muster.ready.discard(idx)
        if self.stage is Stage.UPLOADING and idx in self._now.members:
            self._lost.add(idx)
            if idx not in self._now.stored or not self._can_rescue(len(self._now.members) - len(self._lost)):
                return self._next_attempt(now)
        return self._say(idx, self._train())

    def _revoked(self, idx: int, now: float) -> tuple[Effect, ...]:
        if self.stage is Stage.GATHERING:
            return self._gathered(now)
        if self.stage is Stage.UPLOADING and idx in self._now.members:
            return self._next_attempt(now)
        return ()

    def _refused(self, refuse: Refuse, now: float) -> tuple[Effect, ...]:
        self._signed(refuse, refuse.idx)
        if refuse.r != self._r:
            return ()
        match self.stage:
            case Stage.GATHERING:
                return self._work_refused(refuse, now)
            case Stage.UPLOADING if refuse.a == self._now.start.a:
                return self._start_refused(refuse, now)
            case Stage.OPENING if refuse.a == self._now.start.a:
                return self._full_refused(refuse, now)
            case _:
                return ()

    def _work_refused(self, refuse: Refuse, now: float) -> tuple[Effect, ...]:
        behind = refuse.last_r <= self._r and refuse.opened_r < self._r
        if refuse.code in _PASSING or (refuse.code is Code.E_REPLAY and behind):
            return ()  # what it refused was said twice, or is of an attempt that is over
        self._muster.ready.discard(refuse.idx)
        self._muster.out.add(refuse.idx)
        return self._gathered(now)

    def _start_refused(self, refuse: Refuse, now: float) -> tuple[Effect, ...]:
        idx, code = refuse.idx, refuse.code
        accepted = (refuse.last_r, refuse.last_a) == (self._r, self._now.start.a)
        if idx not in self._now.members or idx in self._now.uploads or (code is Code.E_REPLAY and accepted):
            return ()
        again: tuple[Effect, ...] = ()
        if code is Code.E_STATE:
            self._muster.ready.discard(idx)
        elif code is Code.E_KEYAGE:
            self._job.stale = True
        elif code in _PASSING:
            again = self._relayed(idx)
        else:
            self._muster.out.add(idx)
        return (*again, *self._next_attempt(now))

    def _full_refused(self, refuse: Refuse, now: float) -> tuple[Effect, ...]:
        idx = refuse.idx
        if idx not in self._now.shut or refuse.code not in (Code.E_SEAL, Code.E_STATE):
            return ()
        if refuse.code is Code.E_SEAL and refuse.about in self._now.members and refuse.about != idx:
            self.failing.add((min(idx, refuse.about), max(idx, refuse.about)))
        self._unable.add(idx)
        return self._proceed(now)

    def _overdue(self, now: float) -> tuple[Effect, ...]:
        match self.stage:
            case Stage.GATHERING:
                return self._gathered(now, due=True)
            case Stage.UPLOADING:
                self._muster.late.update(set(self._now.members) - self._now.stored)
                return self._next_attempt(now)
            case Stage.OPENING | Stage.RESCUING if not self._asked_again:
                self._asked_again, self.deadline = True, now + self._job.patience.opening
                rescue = self._say_rescue(sorted(self._now.opens)) if self.stage is Stage.RESCUING else ()
                return (*self._say_full(self._now.shut), *rescue)
            case Stage.OPENING:
                return self._rescue(now)
            case Stage.RESCUING:
                shut = self._now.shut
                return self._give_up(Reason.OPENING, shut, f"the seeds of sites {list(shut)} could not be rescued")
            case _:
                return ()

    def _resume(self, now: float) -> tuple[Effect, ...]:
        """Goes on where the durable state ends: what may have left is never signed differently."""
        if self.way.ending is not Ending.NONE:
            return ()
        if not self.way.uploads:
            return self._hopeless() or self._gather(now + self._job.patience.ready, self._train_all())
        return self._open(now) if self._now.shut else self._sum()

    def _signed(self, message: Ready | Decline | Shares | Refuse, idx: int) -> None:
        require_signature(self._job.terms.roster, message, idx)
