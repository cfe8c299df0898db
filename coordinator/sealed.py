"""Drives one job's secure aggregation: one task takes events in order, and does what its machine says, in that order.

```
Run       -- BeginSum ------------------------> Begin          TRAIN, ROUND_START, FULL, RESULT -> sites
sites     -- Sealed, payloads, seats ---------> Received, ...  Persist -> store, before all that follows it
audit log <- what was heard and will be said -- before the first effect, one fsync for all that waited
Run      <-- SumStands, SumOpened, SumFailed --                Sum -> the sums' thread
store    <-- step and standing, one transaction -- commit ---> Committed
```
"""

import asyncio
import hashlib
import logging
import secrets
import shutil
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator import secure_sums
from coordinator.awaited import Awaited
from coordinator.events import BeginSum, CloseSums, Event, NoSum, Sealing, Send, SumFailed, SumOpened, SumStands
from coordinator.evidence_log import Entry, EvidenceLog
from coordinator.records import Secured
from coordinator.secure_sums import SummedTotals, SummedUpdates
from federation import plugins
from federation.blobs import BlobRef, BlobStore, Reader
from federation.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError, WhoActs
from federation.job import Job
from federation.messages import FromCoordinator, MembershipStatement, Sealed, StepKind, StepStart
from federation.refusals import told
from privacy.secure_aggregation.rostersum import coordinator_events as sums
from privacy.secure_aggregation.rostersum import messages, plans, rules
from privacy.secure_aggregation.rostersum.coordinator import Coordinator, Patience, Stage
from privacy.secure_aggregation.rostersum.coordinator_state import Ending, Standing, Step
from privacy.secure_aggregation.rostersum.messages import Close, FromSite, Relayed
from privacy.secure_aggregation.rostersum.terms import Churn, Terms

if TYPE_CHECKING:
    from tasks.task import Task

__all__ = ["Performed", "SealedSums", "Surroundings", "agreed", "farewell", "sealing_of"]

log = logging.getLogger("parley.coordinator")

_MOST_WAITING = 64 * 1024 * 1024
"""Bytes of messages that may wait for the task, while a disk does not take what must be durable before them."""

_MOST_REASONS = 8
"""Broken rules that a submitter is told of at once."""

_MOST_AT_ONCE = 128
"""Messages that are taken in together, and share one fsync of the audit log; the loop turns before the next."""

_EXPECT_SECONDS = 5.0
"""How long an upload waits for the message that announces it: the two travel in different streams."""

Performed = SummedUpdates | SummedTotals | sums.Broken

_Taken = tuple[sums.Event, tuple[sums.Effect, ...]]
"""An event that the machine took, and what it wants done."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a job's secure aggregation has done for it.

    Attributes:
        post: Says something to a site by its name; lost when the site is not here.
        feed: Tells the job's run of an event.
        keep: Returns once this standing is durable, and not before.
        record: Returns once these entries are durable in the coordinator's audit log, and not before.
        perform: Does this beside the loop, until the disk takes it.
        tidy: Does this beside the loop, after what is performed.
    """

    post: Callable[[str, FromCoordinator], None]
    feed: Callable[[Event], None]
    keep: Callable[[bytes], Awaitable[None]]
    record: Callable[[tuple[Entry, ...]], Awaitable[None]]
    perform: Callable[[Callable[[], Performed]], Awaitable[Performed]]
    tidy: Callable[[Callable[[], None]], Coroutine[None, None, None]]


@dataclass(frozen=True, slots=True)
class _Begun:
    """The attempt of the run's that is being summed."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class _Heard:
    """What a site said, and the bytes that it took."""

    site: str
    message: FromSite | Relayed
    size: int


class SealedSums:
    """One job's machine with what performs it. Whatever is done or said follows from a state that was durable before.

    A masked vector is kept in `folder/ROUND/SITE/` until its round has ended; it and the store survive a restart, after
    which the machine goes on where it was.

    Args:
        job: The job's id.
        secured: Its terms and its standing, as stored.
        private: The coordinator's protocol key.
        patience: How long the machine waits.
        folder: Where masked vectors lie, of this job alone.
        around: What is done for it.
        needed: Sites without which a step that is summed in groups does not count: those of groups with a sum.
    """

    def __init__(
        self,
        job: str,
        secured: Secured,
        private: Ed25519PrivateKey,
        patience: Patience,
        folder: Path,
        around: Surroundings,
        needed: int,
    ) -> None:
        self.terms = Terms.decode(secured.terms)
        self._job = job
        self._private = private
        standing = Standing.decode(secured.standing) if secured.standing else None
        self._machine = Coordinator(self.terms, private, patience, standing)
        self._names = tuple(member.site for member in self.terms.roster.members)
        self._index = {name: idx for idx, name in enumerate(self._names)}
        self._folder = folder
        self._around = around
        self._turns: asyncio.Queue[Callable[[], Awaitable[None]] | None] = asyncio.Queue()
        self._waiting = 0
        self._batch: list[_Heard] | None = None
        self._evidence = EvidenceLog(self.terms)
        self._seated: frozenset[str] = frozenset()
        self._expected: dict[str, BlobRef] = {}
        self._announced = asyncio.Condition()
        self._awaited = Awaited(self.terms)
        self._needed = needed
        self._begun: _Begun | None = None
        self._opened: sums.Opened | None = None
        self._sums: dict[bytes, SummedUpdates | SummedTotals] = {}
        self._given_up: list[sums.Failed] = []
        self._timer: asyncio.TimerHandle | None = None
        self._beside: set[asyncio.Task[None]] = set()
        self._recalled: int | None = None
        self._sweep()
        self._put(sums.Started())

    # ---------------------------------------------------------------------------------------------------- its one task

    async def run(self) -> None:
        """Takes turns, one after the other, until `end`."""
        try:
            while (turn := await self._turns.get()) is not None:
                await self._guarded(turn)
        finally:
            self._stop_timer()
            for task in self._beside:
                task.cancel()
            await asyncio.gather(*self._beside, return_exceptions=True)

    async def _guarded(self, turn: Callable[[], Awaitable[None]]) -> None:
        try:
            await turn()
        except Exception as bug:  # whatever it is, the job ends in words: nobody would ever end it otherwise
            log.exception("secure aggregation of job %s cannot go on", self._job)
            self._around.feed(NoSum(f"the coordinator failed at its secure aggregation ({type(bug).__name__}: {bug})"))

    def _ask(self, turn: Callable[[], Awaitable[None]] | None) -> None:
        """Has the task do this after all that was asked or said before."""
        self._batch = None
        self._turns.put_nowait(turn)

    def _put(self, event: sums.Event) -> None:
        self._ask(partial(self._take, event))

    def end(self) -> None:
        """Has the task end once it has done what was asked before."""
        self._ask(None)

    # -------------------------------------------------------------------------------------------------- what happens

    def seat(self, names: frozenset[str]) -> None:
        """These sites take part now, and no others."""
        for name in sorted(self._seated - names):
            self._put(sums.Departed(self._index[name]))
        for name in sorted(names - self._seated):
            self._put(sums.Arrived(self._index[name]))
        self._seated = names

    def revoke(self, name: str) -> None:
        """A site's membership was revoked."""
        self._put(sums.Revoked(self._index[name]))

    def hear(self, site: str, content: bytes) -> None:
        """A site said something.

        Raises:
            RemoteProtocolError: It is no message of a site, or the site has not accepted the job; nothing changed.
        """
        message = messages.decode(content)
        if not isinstance(message, FromSite | Relayed):
            raise RemoteProtocolError(f"site {site} sent a {message.TAG.upper()}, which only a coordinator says")
        if site not in self._seated:
            raise RemoteProtocolError(f"site {site} must accept job {self._job} before it takes part in its sums")
        if self._waiting + len(content) > _MOST_WAITING:
            raise RemoteProtocolError(
                f"the coordinator cannot take a {message.TAG.upper()} of site {site} now: its disk holds it back",
                fix="see the coordinator's log; the site is asked again",
                who=WhoActs.COORDINATOR,
            )
        self._waiting += len(content)
        if self._batch is None or len(self._batch) >= _MOST_AT_ONCE:
            self._batch = []
            self._turns.put_nowait(partial(self._hear, self._batch))
        self._batch.append(_Heard(site, message, len(content)))

    async def _hear(self, batch: list[_Heard]) -> None:
        """Takes in what sites have said since the turn before; it is in the log before any of it has an effect."""
        if self._batch is batch:
            self._batch = None
        try:
            entries: list[Entry] = []
            outcomes = [self._received(sums.Received(self._index[each.site], each.message), entries) for each in batch]
            await self._record(tuple(entries))
            for heard, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, RemoteProtocolError):
                    self._refuse(heard, outcome)
                else:
                    await self._follow(*outcome)
            self._settle()
        finally:
            self._waiting -= sum(each.size for each in batch)

    def _received(self, event: sums.Received, entries: list[Entry]) -> _Taken | RemoteProtocolError:
        """What the machine wants done about a message; what is to be in the log before that is added to `entries`."""
        try:
            self._evidence.require_room(event.idx, event.message, self._machine.standing.r)
            effects = self._machine.receive(event, asyncio.get_running_loop().time())
        except RemoteProtocolError as refused:
            entries += self._evidence.refused(event, refused)
            return refused
        entries += self._evidence.passed(event, effects)
        return event, effects

    def _refuse(self, heard: _Heard, refused: RemoteProtocolError) -> None:
        contradiction = isinstance(refused, sums.ContradictionError)
        log.log(logging.ERROR if contradiction else logging.WARNING, "%s: %s", heard.site, refused)
        if contradiction:
            log.error("both messages are in the coordinator's audit log; to make them a proof:  parley audit proof")
        self._around.post(heard.site, told(heard.message.TAG.upper(), refused))

    def perform(self, work: BeginSum | CloseSums) -> None:
        """What the run wants: a step is to be summed, or the job has ended."""
        match work:
            case BeginSum(start):
                self._ask(partial(self._begin, start))
            case CloseSums(last):
                self.seat(frozenset())  # the farewell brings CLOSE to all that are here, whether they took part or not
                self._ask(partial(self._close, last))
            case _:
                assert_never(work)

    async def _begin(self, start: StepStart) -> None:
        """Begins a sum; one of the same step that was under way before a restart goes on."""
        machine = self._machine
        if machine.standing.closed:  # it was stopped, and then restarted before that was stored
            self._around.feed(NoSum("its secure aggregation was closed already, and opens no further sum"))
            return
        model = hashlib.sha256(b"").digest() if start.model is None else start.model.digest
        step = Step(plans.plan_id(start.kind), model, hashlib.sha256(plans.args_of(start)).digest())
        self._begun = _Begun(start.step, start.attempt)
        if machine.free:
            await self._take(sums.Begin(step.plan_id, step.model_hash, step.args_hash))
        elif machine.standing.step != step:
            raise LocalProtocolError(f"another step than step {start.step} of job {start.job} is being summed")
        else:
            self._stands(self._begun, self._awaited.behind, self._awaited.waits)
            self._tell()

    async def commit(self, write: Callable[[bytes | None], Awaitable[None]]) -> None:
        """Has a step written with the machine's standing in one transaction, and then says so to the machine.

        Raises:
            Exception: Whatever `write` raises.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ask(partial(self._commit, write, done))
        await done

    async def _commit(self, write: Callable[[bytes | None], Awaitable[None]], done: asyncio.Future[None]) -> None:
        opened = self._opened
        try:
            await write(None if opened is None else opened.state.encode())
        except Exception as refused:  # noqa: BLE001 - whatever it is, it is for whoever asked
            if not done.done():
                done.set_exception(refused)
            return
        self._opened = self._begun = None
        try:
            if opened is not None:
                self._drop_round(opened.r)
                await self._take(sums.Committed(opened.r))
        finally:
            if not done.done():
                done.set_result(None)

    async def _close(self, last: tuple[Send, ...]) -> None:
        self._begun = None
        try:
            await self._take(sums.Close())
            close = messages.sign(Close(self.terms.job_hash), self._private)
            await self._record(tuple(e for send in last for e in self._evidence.said(close, self._index[send.site])))
        finally:
            for send in last:
                self._around.post(send.site, farewell(self._job, self.terms, self._private))
                self._around.post(send.site, send.message)

    # ------------------------------------------------------------------------------------------------------- payloads

    async def expect(self, site: str, payload: BlobRef) -> None:
        """Returns once this payload of the site is waited for, or after a while: it may overtake its announcement."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_EXPECT_SECONDS), self._announced:
                await self._announced.wait_for(lambda: self.expects(site, payload))

    def expects(self, site: str, payload: BlobRef) -> bool:
        """Whether this payload of the site is waited for now."""
        return self._expected.get(site) == payload

    def spool(self, site: str) -> BlobStore:
        """Where the masked vectors of a site lie in this round."""
        return self._vectors(self._machine.standing.r, site)

    def stored(self, site: str, payload: BlobRef) -> None:
        """A payload is here, whole and durable; nothing happens if it is not waited for any more."""
        if self.expects(site, payload):
            self._put(sums.Stored(self._index[site], payload))

    @property
    def opened(self) -> tuple[SummedUpdates | SummedTotals, ...]:
        """The sums that `SumOpened` told of, one or several of groups; none before that, or where nothing is summed."""
        return () if self._opened is None else tuple(self._sums[each.ctx] for each in self._opened.sums)

    # ----------------------------------------------------------------------------------------------------- one event

    async def _take(self, event: sums.Event) -> None:
        effects = self._machine.receive(event, asyncio.get_running_loop().time())
        await self._record(self._evidence.passed(event, effects))
        await self._follow(event, effects)
        self._settle(begun=isinstance(event, sums.Begin))

    async def _record(self, entries: tuple[Entry, ...]) -> None:
        if entries:
            await self._around.record(entries)

    async def _follow(self, event: sums.Event, effects: tuple[sums.Effect, ...]) -> None:
        self._awaited.note(event)
        for effect in effects:
            await self._perform(effect)

    def _settle(self, *, begun: bool = False) -> None:
        """What follows once all effects are performed; `begun` is whether they are those of a step's beginning."""
        if self._given_up and all(stage is Stage.IDLE for stage in self._machine.stages):
            self._failed(at_once=begun)
        self._look()

    async def _perform(self, effect: sums.Effect) -> None:
        match effect:
            case sums.Persist(state):
                await self._around.keep(state.encode())
            case sums.Send(idx, message):
                self._send(self._names[idx], message)
            case sums.Expect(idx, payload):
                await self._expect(self._names[idx], payload)
            case sums.Sum():
                self._spawn(self._guarded(partial(self._sum, effect)))
            case sums.SetDeadline(at):
                self._stop_timer()
                if at is not None:
                    self._timer = asyncio.get_running_loop().call_at(at, self._put, sums.TimeUp())
            case sums.Opened() if self._counts(effect):
                self._opened = effect
                self._tell()
            case sums.Opened():
                self._ask(partial(self._pass_over, effect))
            case sums.Failed(r, detail=detail):
                self._given_up.append(effect)
                why = self._why(effect)
                log.warning("job %s: a sum of round %d was given up: %s (%s)", self._job, r, why, detail)
            case sums.Suspect(dealer, holders):
                names = ", ".join(self._names[idx] for idx in sorted(holders))
                log.error("job %s: shares of %s that %s held are wrong", self._job, self._names[dealer], names)
            case _:
                assert_never(effect)

    def _send(self, name: str, message: messages.FromCoordinator | Relayed) -> None:
        if name in self._seated:  # one that has gone meanwhile, and is back, is told anew once it has accepted the job
            self._around.post(name, Sealed(self._job, messages.encode(message)))

    async def _expect(self, name: str, payload: BlobRef) -> None:
        spool = self.spool(name)
        before = self._expected.get(name)
        if before is not None and before != payload:
            spool.drop(before)  # of an attempt that is over
        async with self._announced:
            self._expected[name] = payload
            self._announced.notify_all()
        if spool.has(payload):
            self.stored(name, payload)

    async def _sum(self, work: sums.Sum) -> None:
        plan = self.terms.plan(work.plan_id)
        if plan is None:
            raise LocalProtocolError(f"job {self._job} has no plan {work.plan_id}")
        r = self._machine.standing.r
        stores = {term.idx: self._vectors(r, self._names[term.idx]) for term in work.terms}
        if lost := [self._names[term.idx] for term in work.terms if not stores[term.idx].has(term.payload)]:
            self._put(sums.Broken(work.ctx, f"the stored vectors of {', '.join(lost)} did not outlive a power cut"))
            return

        def source(term: sums.Term) -> Reader:
            return stores[term.idx].reader(term.payload)

        make = partial(secure_sums.perform, work, plan, source, self._round_folder(r), checked=self._recalled != r)
        done = await self._around.perform(make)
        match done:
            case sums.Broken():
                self._put(done)
            case _:
                self._sums[work.ctx] = done
                self._put(done.event)

    def _tell(self) -> None:
        """Tells the run of the sums that are open, once the run is at its step: after a restart that comes later."""
        if self._opened is None or self._begun is None:
            return
        given_up, self._given_up = self._given_up, []
        members = frozenset(self._names[idx] for each in self._opened.sums for idx in each.members)
        missing = tuple(
            (self._names[idx], f"its group has no sum: {self._why(each)}") for each in given_up for idx in each.sites
        )
        self._around.feed(SumOpened(self._begun.step, self._begun.attempt, members, missing))

    def _counts(self, opened: sums.Opened) -> bool:
        """Whether a step that is summed in groups has enough sites in them, as the job's author asks."""
        step = self._machine.standing.step
        plan = None if step is None else self.terms.plan(step.plan_id)
        return plan is None or not plan.group or sum(len(each.members) for each in opened.sums) >= self._needed

    async def _pass_over(self, opened: sums.Opened) -> None:
        """Ends a step that does not count: no model is made of what its groups' sums say."""
        if self._machine.standing.closed:
            return
        given_up, self._given_up = self._given_up, []
        begun, self._begun = self._begun, None
        await self._around.keep(opened.state.encode())
        self._drop_round(opened.r)
        await self._take(sums.Committed(opened.r))
        if begun is not None:
            count = sum(len(each.members) for each in opened.sums)
            self._give_up(begun, given_up, f"only {count} sites of {self._needed} are in groups that have a sum")

    def _failed(self, *, at_once: bool) -> None:
        """Ends a step of which no sum was opened; `at_once`: none could be, when it began."""
        given_up, self._given_up = self._given_up, []
        self._drop_round(given_up[0].r)
        begun, self._begun = self._begun, None
        if begun is None or any(each.reason is sums.Reason.CLOSED for each in given_up):
            return
        if at_once:  # nobody could decline yet
            who = ", ".join(self._names[idx] for each in given_up for idx in each.who)
            self._around.feed(
                NoSum(f"no sum is allowed without {who} (revoked, or without keys in common with another)")
            )
            return
        self._give_up(begun, given_up, "")

    def _give_up(self, begun: _Begun, given_up: Sequence[sums.Failed], problem: str) -> None:
        """Tells the run that its attempt has no sum that counts, with why each sum of it was given up."""
        broken = any(each.reason is sums.Reason.CHECKS for each in given_up)
        reasons = (f"{self._why(each)}{f' ({each.detail})' * (each.reason is sums.Reason.CHECKS)}" for each in given_up)
        problem = "; ".join(dict.fromkeys(each for each in (problem, *reasons) if each))
        self._stands(begun, {idx for each in given_up for idx in each.who}, "")
        self._around.feed(SumFailed(begun.step, begun.attempt, problem, broken))

    def _why(self, failed: sums.Failed) -> str:
        who = ", ".join(self._names[idx] for idx in failed.who)
        return f"{failed.reason.value}{who and ': '}{who}"

    def _look(self) -> None:
        """Tells the run how far the sum has come, when that has changed."""
        if self._awaited.follow(self._machine) and self._begun is not None:
            self._stands(self._begun, self._awaited.behind, self._awaited.waits)

    def _stands(self, begun: _Begun, behind: Collection[int], waits: str) -> None:
        names = frozenset(self._names[idx] for idx in behind)
        declined = tuple((self._names[idx], why) for idx, why in sorted(self._awaited.declined.items()))
        self._around.feed(SumStands(begun.step, begun.attempt, names, waits, declined))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -------------------------------------------------------------------------------------------------------- the disk

    def _round_folder(self, r: int) -> Path:
        return self._folder / str(r)

    def _vectors(self, r: int, site: str) -> BlobStore:
        """A kill spares them; a vector that a power cut damages is noticed when it is summed, and its round burned."""
        return BlobStore(self._round_folder(r) / site, durable=False)  # else a site waits for the disk with every round

    def _drop_round(self, r: int) -> None:
        """Drops the vectors of this round and of those before it, beside the loop."""
        self._expected.clear()
        self._sums.clear()

        def drop() -> None:
            for folder in self._folder.glob("*"):
                if int(folder.name) <= r:
                    shutil.rmtree(folder, ignore_errors=True)

        self._spawn(self._around.tidy(drop))

    def _sweep(self) -> None:
        """Drops what a kill left behind, but for the vectors that a sum was being made of."""
        standing = self._machine.standing
        needed = any(way.uploads and way.ending is Ending.NONE for way in standing.ways)
        self._recalled = standing.r if needed else None
        for folder in self._folder.glob("*"):
            if not needed or folder.name != str(standing.r):
                shutil.rmtree(folder, ignore_errors=True)


def agreed(job: Job, roster: Sequence[MembershipStatement], me: MembershipStatement, size: int) -> Terms:
    """The terms of a new job among these sites, of a model of `size` values; they break no rule.

    Raises:
        ConfigurationError: No site could accept them; the job's author reads every reason.
    """
    task: Task = plugins.load("tasks", job.task.kind).make(job)
    fields = task.statistics_fields, task.evaluation_fields
    terms = plans.terms_of(job, secrets.token_bytes(16), roster, me.protocol_key, size, *fields)
    if found := rules.broken(terms):
        problems = "; ".join(dict.fromkeys(each.problem for each in found[:_MOST_REASONS]))
        raise ConfigurationError(
            f"no site can take part in these sums: {problems}",
            fix="; ".join(dict.fromkeys(each.fix for each in found[:_MOST_REASONS])),
        )
    return terms


def sealing_of(secured: Secured) -> Sealing:
    """What the run of a job must know of its terms."""
    terms = Terms.decode(secured.terms)
    kinds = {kind: plan for kind in StepKind if (plan := terms.plan(plans.plan_id(kind))) is not None}
    cells = tuple(frozenset(terms.roster.members[idx].site for idx in cell) for cell in terms.cells)
    return Sealing(
        secured.terms,
        {kind: plan.m_min for kind, plan in kinds.items()},
        {kind: cells for kind, plan in kinds.items() if plan.churn is Churn.CELLS},
    )


def farewell(job: str, terms: Terms, private: Ed25519PrivateKey) -> Sealed:
    """The CLOSE of a job, for a site that comes when it is over."""
    return Sealed(job, messages.encode(messages.sign(Close(terms.job_hash), private)))
