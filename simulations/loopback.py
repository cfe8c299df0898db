"""Sites and coordinator of one RosterSum job in one process, joined by a network that can be broken on purpose.

The machines are those of the product. Here their effects are performed: messages travel as bytes through a `Network`
that may delay, drop, double, reorder or change them; disks keep what was persisted, as bytes; a party can be stopped
before or after any effect and started again from its disk. Time is virtual: nothing sleeps.

```
loop = Loopback(terms, coordinator_key, site_keys, lambda idx, assignment: my_words(idx))
outcome = loop.step(plan_id=1, model=b"...")        # runs until the step is opened, or has failed
outcome.sums[0].members, outcome.sums[0].words
```
"""

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from random import Random
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.blobs import BlobRef
from federation.errors import LocalProtocolError, ParleyError
from federation.vector import F32
from privacy.crypto import masks
from privacy.crypto.masks import Words
from privacy.secure_aggregation.interface import Source
from privacy.secure_aggregation.rostersum import coordinator_events as at_coordinator
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum import site_events as at_site
from privacy.secure_aggregation.rostersum.coordinator import Coordinator, Patience
from privacy.secure_aggregation.rostersum.coordinator_state import Standing
from privacy.secure_aggregation.rostersum.durable import Charge, Durable
from privacy.secure_aggregation.rostersum.floor import Data, Floor, Ledger
from privacy.secure_aggregation.rostersum.messages import FromSite, Message, Relayed
from privacy.secure_aggregation.rostersum.site import Site
from privacy.secure_aggregation.rostersum.site_events import Assignment, Clock
from privacy.secure_aggregation.rostersum.sums import MaskedSum
from privacy.secure_aggregation.rostersum.terms import Churn, Kind, Plan, Terms

__all__ = [
    "COORDINATOR",
    "Contribute",
    "Delivery",
    "Encode",
    "Interrupt",
    "Loopback",
    "Lossy",
    "Network",
    "Outcome",
    "Parcel",
    "Stop",
    "Summation",
    "Unlimited",
    "as_contributed",
    "floor_for",
    "reliable",
]

COORDINATOR = -1
"""The coordinator's number among the parties; a site's is its index."""

_EPOCH = 1_700_000_000.0
"""Unix seconds when the virtual clock shows 0."""
_LATENCY = 0.05
_GUARD = 4


# ------------------------------------------------------------------------------------------------------------ network


@dataclass(frozen=True, slots=True)
class Parcel:
    """What travels: an encoded message, or a masked vector (`payload`), from party to party."""

    sender: int
    receiver: int
    content: bytes = field(repr=False)
    payload: bool = False


@dataclass(frozen=True, slots=True)
class Delivery:
    """That a parcel, perhaps changed, arrives after so many seconds."""

    parcel: Parcel
    seconds: float = _LATENCY


Network = Callable[[Parcel], Sequence[Delivery]]
"""What becomes of a parcel: one delivery, none, several, or of other bytes."""


def reliable(parcel: Parcel) -> Sequence[Delivery]:
    """A network like one TLS stream for each site: everything arrives, unchanged and in order."""
    return (Delivery(parcel),)


@dataclass(frozen=True, slots=True)
class Lossy:
    """A network that drops, doubles, reorders and changes parcels with these probabilities.

    Attributes:
        random: Where chance comes from; seeded, a run can be repeated.
        drop: That a parcel never arrives.
        double: That it arrives twice.
        reorder: That it is late by up to `most` seconds, and overtaken.
        corrupt: That one of its bits is flipped.
        most: Seconds.
    """

    random: Random
    drop: float = 0.0
    double: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    most: float = 5.0

    def __call__(self, parcel: Parcel) -> Sequence[Delivery]:
        """The deliveries of one parcel."""
        if self.random.random() < self.drop:
            return ()
        copies = 2 if self.random.random() < self.double else 1
        return tuple(Delivery(self._changed(parcel), self._late()) for _ in range(copies))

    def _changed(self, parcel: Parcel) -> Parcel:
        if self.random.random() >= self.corrupt:
            return parcel
        content = bytearray(parcel.content)
        content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        return replace(parcel, content=bytes(content))

    def _late(self) -> float:
        late = self.random.random() < self.reorder
        return _LATENCY + (self.random.random() * self.most if late else 0.0)


# ---------------------------------------------------------------------------------------------------------- behaviour


class Contribute(Protocol):
    """A site's work: its vector [d], guard and all, in words of the plan's ring; None: it cannot, and declines.

    Where vectors are encoded for each attempt, it is what they are encoded from.
    """

    def __call__(self, idx: int, assignment: Assignment, /) -> Words | F32 | None:
        """The vector of site `idx` for this assignment."""
        ...


Encode = Callable[[at_site.Mask, Words | F32], Words]
"""What a site sends in one attempt, its masks apart, made of what it contributed: fresh memory, each time."""


def as_contributed(_: at_site.Mask, words: Words | F32) -> Words:
    """The vector itself, the same in each attempt."""
    if not np.issubdtype(words.dtype, np.unsignedinteger):
        raise LocalProtocolError(f"a vector of {words.dtype} was contributed, and nothing says how it is encoded")
    return words.astype(words.dtype)


class Unlimited:
    """A ledger that pays every round: in a simulation there is nothing to protect."""

    def affords(self, charge: Charge) -> bool:  # noqa: ARG002 - whatever it is
        """Yes."""
        return True


class Stop(Enum):
    """When, beside an effect, a party is stopped."""

    NOT = 0
    BEFORE = 1
    AFTER = 2


Interrupt = Callable[[int, object], Stop]
"""Asked before each effect of each party: whether the party is stopped there, as a killed process is."""


def _never(_party: int, _effect: object) -> Stop:
    return Stop.NOT


@dataclass(frozen=True, slots=True)
class Summation:
    """One opened sum: over these members, its words modulo the ring, of the attempt with this context."""

    members: tuple[int, ...]
    words: Words = field(repr=False)
    ctx: bytes = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended: its sums (several in group mode), or why there is none."""

    sums: tuple[Summation, ...]
    failures: tuple[at_coordinator.Failed, ...]


def floor_for(terms: Terms) -> Floor:
    """The limits of a site that takes part in everything a job asks for."""
    return Floor(
        c_max=0,
        g_max=0,
        rosters=frozenset({terms.roster.hash}),
        tasks=frozenset(plan.task_digest for plan in terms.plans),
        families=frozenset({"family"}),
        churns=frozenset((kind, churn) for kind in Kind for churn in Churn),
        allow_open=True,
    )


@dataclass(order=True, slots=True)
class _Item:
    due: float
    number: int
    act: Callable[[], None] = field(compare=False)
    stands: Callable[[], bool] = field(compare=False)
    timer: bool = field(compare=False)


class Loopback:
    """One job's coordinator and sites, and what lies between them.

    Args:
        terms: The job.
        coordinator_key: The coordinator's protocol key.
        site_keys: The sites', in the roster's order.
        contribute: What each site sends.
        network: What becomes of parcels.
        patience: The coordinator's.
        interrupt: Where parties are stopped.
        downtime: Seconds until a stopped party runs again.
        floor: The sites' limits; by default those that allow the job.
        encode: What a site sends in an attempt; by default what it contributed, the same in each.
        ledger: What the sites ask whether they can pay for noise; by default they can.

    Attributes:
        now: Virtual seconds.
        coordinator: The coordinator's machine; None while it is stopped.
        sites: The sites' machines, each None while stopped.
        disks: What each party persisted last, encoded.
        sent: Called with each parcel that leaves.
        refusals: What parties refused, in order: party and error.
        performed: Called with each party and effect, before it is performed.
        charges: What each site's ledger was charged, durable with what it persisted.
    """

    def __init__(
        self,
        terms: Terms,
        coordinator_key: Ed25519PrivateKey,
        site_keys: Sequence[Ed25519PrivateKey],
        contribute: Contribute,
        *,
        network: Network = reliable,
        patience: Patience | None = None,
        interrupt: Interrupt = _never,
        downtime: float = 1.0,
        floor: Floor | None = None,
        encode: Encode = as_contributed,
        ledger: Ledger | None = None,
    ) -> None:
        self.terms = terms
        self.now = 0.0
        self.network = network
        self.interrupt = interrupt
        self.coordinator: Coordinator | None = None
        self.sites: list[Site | None] = [None] * terms.n
        self.disks: dict[int, bytes] = {}
        self.refusals: list[tuple[int, ParleyError]] = []
        self.sent: Callable[[Parcel], None] = lambda _: None
        self.performed: Callable[[int, object], None] = lambda _party, _effect: None
        self.charges: list[list[Charge]] = [[] for _ in range(terms.n)]
        self._keys = (coordinator_key, tuple(site_keys))
        self._contribute = contribute
        self._patience = patience
        self._downtime = downtime
        self._floor = floor or floor_for(terms)
        self._encode = encode
        self._ledger = ledger or Unlimited()
        self._items: list[_Item] = []
        self._number = 0
        self._lines = [0] * terms.n
        self._lives = dict.fromkeys(range(COORDINATOR, terms.n), 0)
        self._updates: dict[tuple[int, str], Words | F32] = {}
        self._vectors: dict[tuple[int, bytes], bytes] = {}
        self._spool: dict[tuple[int, bytes], bytes] = {}
        self._expected: set[tuple[int, bytes]] = set()
        self._sums: dict[bytes, Words] = {}
        self._opened: list[Summation] = []
        self._failed: list[at_coordinator.Failed] = []
        self._wakes: dict[int, float | None] = {}
        self._start_coordinator()
        for idx in range(terms.n):
            self._start_site(idx)

    # ------------------------------------------------------------------------------------------------------ for users

    def step(self, plan_id: int, model: bytes = b"", args: bytes = b"") -> Outcome:
        """Runs one step to its end: opened and committed, or failed."""
        self.begin(plan_id, model, args)
        self.run(lambda: self.idle)
        return self.outcome()

    def begin(self, plan_id: int, model: bytes = b"", args: bytes = b"") -> None:
        """Begins a step, without running it.

        Raises:
            LocalProtocolError: The coordinator is stopped, or not free.
        """
        self._opened.clear()
        self._failed.clear()
        hashes = hashlib.sha256(model).digest(), hashlib.sha256(args).digest()
        self._tell_coordinator(at_coordinator.Begin(plan_id, *hashes))

    @property
    def idle(self) -> bool:
        """Whether the coordinator runs and no step is under way."""
        return self.coordinator is not None and self.coordinator.free

    def outcome(self) -> Outcome:
        """What has been opened, and what failed, since the last step began."""
        return Outcome(tuple(self._opened), tuple(self._failed))

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Lets everything happen in its order, until `until` holds or nothing is left but timers of finished work.

        Raises:
            LocalProtocolError: Nothing can happen any more, and `until` does not hold.
        """
        while until is None or not until():
            if not self._happen():
                if until is None:
                    return
                raise LocalProtocolError("the simulation has come to rest before what it was run for")

    @property
    def in_flight(self) -> int:
        """Parcels under way and work under way; timers are not counted."""
        return sum(1 for item in self._items if not item.timer and item.stands())

    def deliver(self, which: int) -> None:
        """Lets the thing under way with this place in the order happen now, before all others; time stands still."""
        waiting = sorted(item for item in self._items if not item.timer and item.stands())
        item = waiting[which % len(waiting)]
        self._items.remove(item)
        heapq.heapify(self._items)
        item.act()

    def pass_time(self, seconds: float) -> None:
        """Moves the clock on; what was due meanwhile happens."""
        end = self.now + seconds
        while self._items and self._items[0].due <= end:
            self._happen()
        self.now = end

    def cut(self, idx: int) -> None:
        """Breaks the line between a site and the coordinator: what is under way is lost, and both know at once."""
        self._lines[idx] += 1
        if self.coordinator is not None:
            self._tell_coordinator(at_coordinator.Departed(idx))

    def join(self, idx: int) -> None:
        """Connects a site with the coordinator, if both run."""
        if self.coordinator is None or self.sites[idx] is None:
            return
        self._lines[idx] += 1
        self._tell_coordinator(at_coordinator.Arrived(idx))
        self._tell_site(idx, at_site.Connected())

    def stop(self, party: int, downtime: float | None = None) -> None:
        """Kills a party: what it held in memory is gone; it starts again from its disk after `downtime` seconds."""
        seconds = self._downtime if downtime is None else downtime
        self._lives[party] += 1
        self._wakes.pop(party, None)
        if party == COORDINATOR:
            self.coordinator = None
            self._lines = [line + 1 for line in self._lines]
            self._later(seconds, self._start_coordinator, lambda: self.coordinator is None)
            return
        self.sites[party] = None
        self._updates = {key: words for key, words in self._updates.items() if key[0] != party}
        self._vectors = {key: content for key, content in self._vectors.items() if key[0] != party}
        self.cut(party)
        self._later(seconds, lambda: self._start_site(party), lambda: self.sites[party] is None)

    # ------------------------------------------------------------------------------------------------------- the queue

    def _later(
        self, seconds: float, act: Callable[[], None], stands: Callable[[], bool], *, timer: bool = False
    ) -> None:
        self._number += 1
        heapq.heappush(self._items, _Item(self.now + seconds, self._number, act, stands, timer))

    def _happen(self) -> bool:
        """Lets the next thing happen; False when there is none."""
        while self._items:
            item = heapq.heappop(self._items)
            self.now = max(self.now, item.due)
            if item.stands():
                item.act()
                return True
        return False

    def _alive(self, party: int) -> Callable[[], bool]:
        life = self._lives[party]
        return lambda: self._lives[party] == life

    def _soon(self, party: int, act: Callable[[], None]) -> None:
        """Work that the party does beside its machine: gone if it is stopped meanwhile."""
        self._later(0.0, act, self._alive(party))

    # -------------------------------------------------------------------------------------------------- the coordinator

    def _start_coordinator(self) -> None:
        stored = self.disks.get(COORDINATOR)
        standing = None if stored is None else Standing.decode(stored)
        self.coordinator = Coordinator(self.terms, self._keys[0], self._patience, standing)
        self._tell_coordinator(at_coordinator.Started())
        for idx in range(self.terms.n):
            self.join(idx)

    def _tell_coordinator(self, event: at_coordinator.Event) -> None:
        if self.coordinator is None:
            raise LocalProtocolError("the coordinator is stopped")
        try:
            effects = self.coordinator.receive(event, self.now)
        except LocalProtocolError:
            raise
        except ParleyError as refused:
            self.refusals.append((COORDINATOR, refused))
            return
        self._perform(COORDINATOR, iter(effects))

    def _perform(self, party: int, effects: Iterator[object]) -> None:
        alive = self._alive(party)
        for effect in effects:
            self.performed(party, effect)
            stop = self.interrupt(party, effect)
            if stop is not Stop.BEFORE:
                self._one(party, effect)
            if stop is not Stop.NOT and alive():
                self.stop(party)
            if not alive():
                return

    def _one(self, party: int, effect: object) -> None:
        if party == COORDINATOR:
            self._for_coordinator(effect)
        else:
            self._for_site(party, effect)

    def _for_coordinator(self, effect: object) -> None:
        match effect:
            case at_coordinator.Persist(state):
                self.disks[COORDINATOR] = state.encode()
            case at_coordinator.Send(idx, message):
                self._send(COORDINATOR, idx, message)
            case at_coordinator.Expect(idx, payload):
                self._expected.add((idx, payload.digest))
                self._stored(idx, payload.digest)
            case at_coordinator.Sum():
                self._soon(COORDINATOR, lambda: self._sum(effect))
            case at_coordinator.Opened():
                self._soon(COORDINATOR, lambda: self._commit(effect))
            case at_coordinator.SetDeadline(at):
                self._wake(COORDINATOR, at)
            case at_coordinator.Failed():
                self._failed.append(effect)
            case _:
                pass  # suspects are for people

    def _sum(self, effect: at_coordinator.Sum) -> None:
        plan = self._plan(effect.plan_id)
        total = MaskedSum(np.zeros(plan.words, masks.dtype(plan.ring)))
        for term in effect.terms:
            content = self._spool[term.idx, term.payload.digest]
            total.add(term.idx, term.payload.digest, _reader(content))
        sum_hash = total.unmask((term.idx, term.self_key) for term in effect.terms)
        words = total.words()
        if any(int(word) != len(effect.terms) for word in words[-_GUARD:]):
            self._tell_coordinator(at_coordinator.Broken(effect.ctx, "the guard words are not |P|"))
            return
        self._sums[effect.ctx] = words
        self._tell_coordinator(at_coordinator.Summed(effect.ctx, sum_hash))

    def _commit(self, effect: at_coordinator.Opened) -> None:
        """The one transaction of state, model and round."""
        self.disks[COORDINATOR] = effect.state.encode()
        self._opened.extend(Summation(each.members, self._sums.pop(each.ctx), each.ctx) for each in effect.sums)
        self._spool.clear()
        self._expected.clear()
        self._tell_coordinator(at_coordinator.Committed(effect.r))

    def _stored(self, idx: int, digest: bytes) -> None:
        content = self._spool.get((idx, digest))
        if content is not None and (idx, digest) in self._expected:
            payload = BlobRef(digest, len(content))
            self._soon(COORDINATOR, lambda: self._tell_coordinator(at_coordinator.Stored(idx, payload)))

    # -------------------------------------------------------------------------------------------------------- the sites

    @property
    def clock(self) -> Clock:
        """The sites' clocks."""
        return Clock(_EPOCH + self.now, self.now)

    def _start_site(self, idx: int) -> None:
        stored = self.disks.get(idx)
        durable = Durable() if stored is None else Durable.decode(stored)
        self.sites[idx] = Site(self._keys[1][idx], self._floor, durable, self._ledger)
        self._tell_site(idx, at_site.Offered(self.terms, Data("family", bytes(32), 10**6, 10**6)))
        self.join(idx)

    def _tell_site(self, idx: int, event: at_site.Event) -> None:
        site = self.sites[idx]
        if site is None:
            return
        try:
            effects = site.receive(event, self.clock)
        except LocalProtocolError:
            raise
        except ParleyError as refused:
            self.refusals.append((idx, refused))
            return
        self._perform(idx, iter(effects))
        if self.sites[idx] is site:
            self._wake(idx, site.wake_at(self.clock))

    def _for_site(self, idx: int, effect: object) -> None:
        match effect:
            case at_site.Persist(_, durable, charge):
                self.disks[idx] = durable.encode()
                self.charges[idx] += () if charge is None else (charge,)
            case at_site.Send(_, message):
                self._send(idx, COORDINATOR, message)
            case at_site.Work():
                self._soon(idx, lambda: self._work(idx, effect))
            case at_site.Mask():
                self._soon(idx, lambda: self._mask(idx, effect))
            case at_site.UploadPayload(_, ctx, y_hash):
                self._upload(idx, ctx, y_hash)
            case at_site.Erase(_, update):
                self._updates.pop((idx, update), None)
            case at_site.Abandon(_, ctx):
                self._vectors.pop((idx, ctx), None)
            case at_site.JobRefused(_, reasons):
                raise LocalProtocolError(f"site {idx} refused the job: {'; '.join(each.problem for each in reasons)}")
            case _:
                pass  # what the administrator and the log are told

    def _work(self, idx: int, effect: at_site.Work) -> None:
        words = self._contribute(idx, effect.assignment)
        if words is None:
            self._tell_site(idx, at_site.Cannot(effect.job_hash, effect.assignment, at_site.Because.RESOURCES))
            return
        name = f"round {effect.assignment.r}"
        self._updates[idx, name] = words
        self._tell_site(idx, at_site.Updated(effect.job_hash, effect.assignment, name, effect.table))

    def _mask(self, idx: int, effect: at_site.Mask) -> None:
        words = self._updates.get((idx, effect.update))
        if words is None:
            return  # let go meanwhile
        vector = self._encode(effect, words)
        masks.add(vector, effect.masks)
        self._vectors[idx, effect.ctx] = vector.tobytes()
        y_hash = hashlib.sha256(self._vectors[idx, effect.ctx]).digest()
        self._tell_site(idx, at_site.Masked(effect.job_hash, effect.ctx, y_hash))

    def _upload(self, idx: int, ctx: bytes, y_hash: bytes) -> None:
        """The payload's stream: it is whole, with the promised digest, or it does not arrive."""

        def arrived(parcel: Parcel) -> None:
            if hashlib.sha256(parcel.content).digest() == y_hash:
                self._spool[idx, y_hash] = parcel.content
                self._stored(idx, y_hash)

        self._carry(Parcel(idx, COORDINATOR, self._vectors[idx, ctx], payload=True), idx, arrived)
        self._soon(idx, lambda: self._tell_site(idx, at_site.UploadDone(self.terms.job_hash, ctx)))

    # -------------------------------------------------------------------------------------------------------- the lines

    def _send(self, sender: int, receiver: int, message: Message) -> None:
        site = receiver if sender == COORDINATOR else sender
        self._carry(Parcel(sender, receiver, messages.encode(message)), site, self._arrived)

    def _carry(self, parcel: Parcel, site: int, arrived: Callable[[Parcel], None]) -> None:
        """Parcels of a line that was cut since are lost."""
        self.sent(parcel)
        line = self._lines[site]

        def stands() -> bool:
            return self._lines[site] == line and self.coordinator is not None

        for delivery in self.network(parcel):
            self._later(delivery.seconds, partial(arrived, delivery.parcel), stands)

    def _arrived(self, parcel: Parcel) -> None:
        try:
            message = messages.decode(parcel.content)
        except ParleyError as refused:
            self.refusals.append((parcel.receiver, refused))
            if parcel.receiver != COORDINATOR:
                self._tell_site(parcel.receiver, at_site.Unreadable(self.terms.job_hash))
            return
        if parcel.receiver != COORDINATOR:
            self._tell_site(parcel.receiver, at_site.Received(self.terms.job_hash, message))
        elif isinstance(message, FromSite | Relayed):
            self._tell_coordinator(at_coordinator.Received(parcel.sender, message))

    def _wake(self, party: int, at: float | None) -> None:
        if at == self._wakes.get(party):
            return
        self._wakes[party] = at
        if at is None:
            return

        def wake() -> None:
            self._wakes.pop(party, None)
            if party == COORDINATOR:
                self._tell_coordinator(at_coordinator.TimeUp())
            else:
                self._tell_site(party, at_site.TimePassed())

        alive = self._alive(party)
        self._later(at - self.now, wake, lambda: alive() and self._wakes.get(party) == at, timer=True)

    def _plan(self, plan_id: int) -> Plan:
        plan = self.terms.plan(plan_id)
        if plan is None:
            raise LocalProtocolError(f"the job has no plan {plan_id}")
        return plan


def _reader(content: bytes) -> Source:
    return lambda start, count: content[start : start + count]
