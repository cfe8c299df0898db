"""The coordinator's side of one job under RosterSum: it relays keys, runs rounds, and opens sums of exactly one set.

It sees no vector and no single site's seed before that site has opened; what it may sign is decided here, and nothing
is signed twice differently. Its stages stand in `stages.TRANSITIONS`, and `lane.py` walks them for each sum.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import assert_never

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.errors import LocalProtocolError, RemoteProtocolError, WhoActs
from privacy.secure_aggregation.rostersum.cohorts import lanes, without
from privacy.secure_aggregation.rostersum.coordinator_events import (
    Arrived,
    Begin,
    Broken,
    Close,
    Committed,
    Departed,
    Effect,
    Event,
    Failed,
    Opened,
    Persist,
    Reason,
    Received,
    Revoked,
    Send,
    SetDeadline,
    Started,
    Stored,
    Summed,
    TimeUp,
)
from privacy.secure_aggregation.rostersum.coordinator_job import Job, Patience
from privacy.secure_aggregation.rostersum.coordinator_state import FailedPair, Standing, Step
from privacy.secure_aggregation.rostersum.keybook import KeyBook
from privacy.secure_aggregation.rostersum.lane import Lane
from privacy.secure_aggregation.rostersum.messages import (
    Encaps,
    FromCoordinator,
    FromSite,
    Keys,
    Refuse,
    Relayed,
)
from privacy.secure_aggregation.rostersum.stages import TRANSITIONS, Cause, Stage
from privacy.secure_aggregation.rostersum.terms import Terms

__all__ = ["TRANSITIONS", "Cause", "Coordinator", "Patience", "Stage"]

_AGAIN = 2
"""Epochs in which a pair's seals must have failed before one of the two is left out."""


class Coordinator:
    """The machine of one job. It owns no socket, clock, file or vector, and takes no randomness.

    `Persist` always stands before everything that follows from the state it holds, so that whatever left was durable
    first. One step runs at a time. What a site sends is refused with `RemoteProtocolError`, and nothing changes, when
    it is late, malformed, unsigned or another's; the very same message again is no error.

    Args:
        terms: The job.
        private: The coordinator's protocol key, the one in the roster.
        patience: How long it waits.
        standing: Its durable state, when it ran before.
    """

    def __init__(
        self,
        terms: Terms,
        private: Ed25519PrivateKey,
        patience: Patience | None = None,
        standing: Standing | None = None,
    ) -> None:
        if private.public_key().public_bytes_raw() != terms.roster.coordinator_vk:
            raise LocalProtocolError("the roster names another coordinator's key than this one's")
        self._standing = self._durable = standing or Standing()
        self._job = Job(terms, private, patience or Patience(), KeyBook(terms, self._standing.epoch), stale=True)
        self._lanes = self._restored(self._standing)
        self._deadline: float | None = None
        self._rounds = 0
        self._running = False
        self._asked: Opened | None = None
        self._exclude()

    def _restored(self, standing: Standing) -> tuple[Lane, ...]:
        step, terms = standing.step, self._job.terms
        plan = None if step is None else terms.plan(step.plan_id)
        if step is None or plan is None:
            return ()
        among = zip(lanes(terms, plan), standing.ways, strict=True)
        return tuple(Lane(self._job, standing.r, step, sites, way) for sites, way in among)

    @property
    def standing(self) -> Standing:
        """The durable state as the last `Persist`, or the transaction of the last `Opened`, holds it."""
        return self._durable

    @property
    def free(self) -> bool:
        """Whether a step may begin."""
        return not self._standing.closed and all(lane.stage is Stage.IDLE for lane in self._lanes)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Where the sums of the last step stand: one, or in group mode one for each cell."""
        return tuple(lane.stage for lane in self._lanes)

    def receive(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Takes an event in, at `now` seconds of a steady clock, and says what to do, in this order.

        Raises:
            RemoteProtocolError: What a site sent is refused; nothing changed.
            ContradictionError: The same, and it is evidence.
            LocalProtocolError: The event cannot be now: a bug of ours; nothing changed.
        """
        if isinstance(event, Started) is self._running:
            raise LocalProtocolError("a coordinator's first event is Started, and it comes once")
        effects = (*self._taken(event, now), *self._settled(now))
        self._running = True
        deadline = min((lane.deadline for lane in self._lanes if lane.deadline is not None), default=None)
        if deadline != self._deadline:
            self._deadline = deadline
            effects = (*effects, SetDeadline(deadline))
        return (*self._persisted(), *effects)

    def _taken(self, event: Event, now: float) -> tuple[Effect, ...]:  # noqa: C901, PLR0911, PLR0912 - one for each
        if self._standing.closed:
            return self._after_the_end(event)
        match event:
            case Started():
                return self._all(event, now)
            case Begin(plan_id, model_hash, args_hash):
                return self._begin(Step(plan_id, model_hash, args_hash), now)
            case Arrived(idx):
                return self._arrived(idx, event, now)
            case Departed(idx):
                self._job.present.discard(idx)
                return ()
            case Revoked(idx):
                self._standing = replace(self._standing, revoked=tuple(sorted({*self._standing.revoked, idx})))
                self._exclude()
                return self._of(idx, event, now)
            case Received(idx, message):
                return self._received(idx, message, event, now)
            case Stored(idx):
                return self._of(idx, event, now)
            case Committed(r):
                return self._committed(r, event, now)
            case TimeUp():
                return self._all(event, now, tuple(lane for lane in self._lanes if lane.due(now)))
            case Close():
                return self._close(event, now)
            case Summed(ctx) | Broken(ctx):
                return self._all(event, now, tuple(lane for lane in self._lanes if lane.summing == ctx))
            case _:
                assert_never(event)

    # ------------------------------------------------------------------------------------------------------- a step

    def _begin(self, step: Step, now: float) -> tuple[Effect, ...]:
        if not self.free:
            raise LocalProtocolError("a step was begun before the one under way was over")
        if self._job.terms.plan(step.plan_id) is None:
            raise LocalProtocolError(f"the job has no plan {step.plan_id}")
        self._rounds = 0
        return self._next_round(step, now)

    def _next_round(self, step: Step, now: float) -> tuple[Effect, ...]:
        terms = self._job.terms
        plan = terms.plan(step.plan_id)
        if plan is None:
            raise LocalProtocolError(f"the job has no plan {step.plan_id}")
        r = self._standing.r + 1
        self._rounds += 1
        self._asked = None
        self._standing = replace(self._standing, r=r, step=step)
        self._lanes = tuple(Lane(self._job, r, step, sites) for sites in lanes(terms, plan))
        return self._all(Begin(step.plan_id, step.model_hash, step.args_hash), now)

    def _all(self, event: Event, now: float, among: tuple[Lane, ...] | None = None) -> tuple[Effect, ...]:
        effects = [each for lane in (self._lanes if among is None else among) for each in lane.receive(event, now)]
        spent = [each for each in effects if isinstance(each, Failed) and each.reason is Reason.ATTEMPTS]
        step = self._standing.step
        if not spent or step is None or len(self._lanes) > 1 or self._rounds >= self._job.patience.rounds:
            return tuple(effects)
        return (*(each for each in effects if each not in spent), *self._next_round(step, now))

    def _of(self, idx: int, event: Event, now: float) -> tuple[Effect, ...]:
        return self._all(event, now, tuple(lane for lane in self._lanes if idx in lane.sites))

    def _committed(self, r: int, event: Event, now: float) -> tuple[Effect, ...]:
        if self._asked is None or self._asked.r != r:
            raise LocalProtocolError(f"round {r} was committed, and nobody asked for it")
        self._durable, self._asked = self._asked.state, None
        return self._all(event, now, tuple(lane for lane in self._lanes if lane.stage is Stage.SUMMED))

    # ------------------------------------------------------------------------------------------- what sites say, keys

    def _received(self, idx: int, message: FromSite | Relayed, event: Event, now: float) -> tuple[Effect, ...]:
        author = message.lo if isinstance(message, Encaps) else message.idx
        if author != idx or idx >= self._job.terms.n:
            raise RemoteProtocolError(
                f"site {idx} sent the {message.TAG.upper()} of site {author}",
                fix=f"find out who holds the identity of site {idx}",
                who=WhoActs.CONSORTIUM,
            )
        match message:
            case Keys():
                if not self._job.keys.take_keys(idx, message):
                    return ()
                return (*self._say(self._job.present, message), *self._of(idx, event, now))
            case Encaps(hi=hi):
                if not self._job.keys.take_encaps(idx, message):
                    return ()
                return (*self._say({hi}, message), *self._of(idx, event, now))
            case Refuse() if not self._lanes:
                return ()
            case _ if not self._lanes:
                raise RemoteProtocolError(f"site {idx} sent {message.TAG.upper()} before any step began")
            case _:
                return self._of(idx, event, now)

    def _arrived(self, idx: int, event: Event, now: float) -> tuple[Effect, ...]:
        job = self._job
        job.present.add(idx)
        epoch = () if job.stale else self._say({idx}, job.epoch())
        keys = tuple(each for message in job.keys.known(idx) for each in self._say({idx}, message))
        return (*epoch, *keys, *self._of(idx, event, now))

    def _say(self, to: Collection[int], message: FromCoordinator | Relayed) -> tuple[Effect, ...]:
        return tuple(Send(idx, message) for idx in sorted(self._job.present.intersection(to)))

    # -------------------------------------------------------------------------------------------------- after an event

    def _settled(self, now: float) -> tuple[Effect, ...]:
        """What follows when all sums have taken the event: a new epoch, or the commit of the step."""
        self._note_failed_pairs()
        effects: tuple[Effect, ...] = ()
        job, standing = self._job, self._standing
        if job.stale and not standing.closed and not self._busy:
            job.stale = False
            self._standing = replace(standing, epoch=standing.epoch + 1)
            job.keys.begin(self._standing.epoch)
            gathering = (lane for lane in self._lanes if lane.stage is Stage.GATHERING)
            again = (each for lane in gathering for each in lane.rekeying(now))
            effects = (*self._say(job.present, job.epoch()), *again)
        done = all(lane.stage in (Stage.IDLE, Stage.SUMMED) for lane in self._lanes)
        sums = tuple(lane.summed for lane in self._lanes if lane.stage is Stage.SUMMED and lane.summed is not None)
        if done and sums and self._asked is None:
            state = replace(self._standing, ways=tuple(lane.concluded for lane in self._lanes))
            self._asked = Opened(self._standing.r, sums, state)
            effects = (*effects, self._asked)
        return effects

    @property
    def _busy(self) -> bool:
        """Whether an epoch that begins now would disturb a sum.

        One that is summed has nothing left to seal. Its RESULT waits for the whole step, so perhaps for a group that
        gathers and needs the new keys: it does not hold those back.
        """
        gathering = any(lane.stage is Stage.GATHERING for lane in self._lanes)
        return any(lane.busy and not (gathering and lane.stage is Stage.SUMMED) for lane in self._lanes)

    def _note_failed_pairs(self) -> None:
        """A pair whose seals did not open gets new keys; if it fails again, one of the two is left out."""
        found = {pair for lane in self._lanes for pair in lane.failing}
        if not found:
            return
        epochs = {(pair.lo, pair.hi): pair.epochs for pair in self._standing.failed_pairs}
        for lane in self._lanes:
            lane.failing.clear()
        for pair in found:
            epochs[pair] = tuple(sorted({*epochs.get(pair, ()), self._standing.epoch}))
        failed = tuple(FailedPair(*pair, epochs[pair]) for pair in sorted(epochs))
        self._standing = replace(self._standing, failed_pairs=failed)
        self._job.stale = True
        self._exclude()

    def _exclude(self) -> None:
        failed = self._standing.failed_pairs
        again = {(pair.lo, pair.hi) for pair in failed if len(pair.epochs) >= _AGAIN}
        kept = without(range(self._job.terms.n), again, {(pair.lo, pair.hi) for pair in failed})
        self._job.excluded = frozenset(range(self._job.terms.n)) - kept | set(self._standing.revoked)

    def _persisted(self) -> tuple[Effect, ...]:
        state = replace(self._standing, ways=tuple(lane.way for lane in self._lanes))
        if state == self._durable:
            return ()
        self._durable = state
        return (Persist(state),)

    # ------------------------------------------------------------------------------------------------------- the end

    def _close(self, event: Event, now: float) -> tuple[Effect, ...]:
        given_up = self._all(event, now)
        self._standing = replace(self._standing, closed=1)
        return (*given_up, *self._say(self._job.present, self._job.close()))

    def _after_the_end(self, event: Event) -> tuple[Effect, ...]:
        match event:
            case Arrived(idx):
                self._job.present.add(idx)
                return self._say({idx}, self._job.close())
            case Departed(idx):
                self._job.present.discard(idx)
                return ()
            case Received(idx):
                raise RemoteProtocolError(f"the job has ended: nothing of site {idx} is taken")
            case Started() | TimeUp() | Close() | Stored() | Summed() | Broken():
                return ()
            case _:
                raise LocalProtocolError(f"{type(event).__name__} came after the job had ended")
