"""Parley's side of a round: RosterSum's machines, and the product's own functions that encode, mask, sum and decode.

All parties live in this process. Messages travel as their bytes, which each party encodes and decodes for itself.
Masked vectors go from the site's folder into the coordinator's, which is transport, and are read from there, and
checked, when they are summed. What is to be durable is encoded, and no disk is waited for.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from client.masking import Contributions
from coordinator import secure_sums
from coordinator.secure_sums import SummedUpdates
from federation.blobs import BlobRef, BlobStore, Reader
from federation.errors import LocalProtocolError, ParleyError
from privacy.secure_aggregation.rostersum import coordinator_events as at_coordinator
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum import site_events as at_site
from privacy.secure_aggregation.rostersum.coordinator import Coordinator
from privacy.secure_aggregation.rostersum.durable import Durable
from privacy.secure_aggregation.rostersum.floor import Data
from privacy.secure_aggregation.rostersum.messages import FromSite, Message, Relayed, RoundStart
from privacy.secure_aggregation.rostersum.site import Site
from privacy.secure_aggregation.rostersum.terms import GUARD_WORDS, Churn
from simulations.loopback import floor_for
from simulations.loopback_job import PLAN, LoopbackJob
from simulations.peers.secure_aggregation_costs import COORDINATOR, TRANSPORT, Cost, Meter, Updates
from simulations.peers.trial import progress

__all__ = ["RosterSumCosts", "measure", "room"]

_ROUNDS = 3
"""Rounds without drop-outs, of which each is a third of the figures."""
_EPOCH = 1_800_000_000.0
"""Unix seconds when the clock shows 0."""
_COPIES = 3
"""Of each vector, on the disk at once: the update, masked, and masked at the coordinator."""


@dataclass(frozen=True, slots=True)
class RosterSumCosts:
    """What RosterSum cost.

    Attributes:
        setup: New keys of all sites and a root of each pair, X25519 and ML-KEM-768: once in an epoch of up to 24 hours
            and 1000 rounds.
        round: A round of an epoch, without drop-outs.
        with_dropouts: The same when sites vanish once they know the participants: the others mask anew without them.
    """

    setup: Cost
    round: Cost
    with_dropouts: Cost | None


def room(updates: Updates) -> int:
    """Bytes that `measure` writes at most."""
    return _COPIES * updates.sites * 4 * (updates.parameters + 1 + GUARD_WORDS)


def measure(updates: Updates, folder: Path, *, dropouts: bool = True) -> RosterSumCosts:
    """What an epoch's beginning and its rounds cost, all sums checked.

    Args:
        updates: What is summed.
        folder: For all that is written; empty.
        dropouts: Whether there is a round with drop-outs, too.

    Raises:
        ConfigurationError: No job can have so many sites.
        ParleyError: A sum was not made, or is not the mean.
    """
    meter = Meter()
    consortium = _Consortium(updates, folder, meter)
    everyone = range(updates.sites)
    progress(f"parley, {updates.sites} sites: setting an epoch up")
    consortium.set_up()
    setup = Cost.of(meter.take(), consortium.taken(), everyone)
    for number in range(_ROUNDS):
        progress(f"parley, {updates.sites} sites: round {number + 1} of {_ROUNDS}")
        consortium.round(missing=())
    plain = Cost.of(meter.take(), consortium.taken(), everyone, _ROUNDS)
    if not dropouts:
        return RosterSumCosts(setup, plain, None)
    progress(f"parley, {updates.sites} sites: a round in which {len(updates.missing)} drop out")
    consortium.round(missing=updates.missing)
    through = [idx for idx in everyone if idx not in updates.missing]
    return RosterSumCosts(setup, plain, Cost.of(meter.take(), consortium.taken(), through))


class _Consortium:
    """The coordinator, the sites, and lines that lose nothing and keep the order.

    Time stands still while anything is under way; when nothing is, it jumps to the coordinator's next deadline.
    """

    def __init__(self, updates: Updates, folder: Path, meter: Meter) -> None:
        job = LoopbackJob.of(updates.sites, updates.parameters, Churn.OPEN)
        self._terms = job.terms
        self._updates = updates
        self._folder = folder
        self._meter = meter
        self._coordinator = Coordinator(job.terms, job.coordinator)
        self._sites = [Site(each, floor_for(job.terms), Durable()) for each in job.sites]
        self._held = [Contributions(folder / f"site{idx}") for idx in range(updates.sites)]
        self._spools = [BlobStore(folder / f"spool{idx}", durable=False) for idx in range(updates.sites)]
        self._turns: deque[Callable[[], None]] = deque()
        self._now = 0.0
        self._deadline: float | None = None
        self._sent: Counter[int] = Counter()
        self._missing: Collection[int] = ()
        self._gone: set[int] = set()
        self._sum: SummedUpdates | None = None
        self._members: tuple[int, ...] = ()
        self._rounds = 0

    def taken(self) -> Counter[int]:
        """Bytes that each site has sent since this was last asked."""
        sent, self._sent = self._sent, Counter()
        return sent

    def set_up(self) -> None:
        """All sites accept the job and have a root with each other."""
        data = Data("family", bytes(32), 10**6, 10**6)
        for idx in range(self._updates.sites):
            self._tell(idx, at_site.Offered(self._terms, data))
        self._tell_coordinator(at_coordinator.Started())
        for idx in range(self._updates.sites):
            self._tell_coordinator(at_coordinator.Arrived(idx))
        self._run(lambda: not self._turns)

    def round(self, missing: Collection[int]) -> None:
        """One round, its sum checked; sites in `missing` vanish for good when they hear who takes part."""
        self._missing, self._members, self._rounds = missing, (), self._rounds + 1
        model = hashlib.sha256(bytes([self._rounds])).digest()
        self._tell_coordinator(at_coordinator.Begin(PLAN, model, hashlib.sha256(b"").digest()))
        self._run(lambda: self._coordinator.free and not self._turns)
        if self._sum is None:
            raise LocalProtocolError("a round ended without a sum")
        with self._meter.of(COORDINATOR):
            mean = [*self._sum.mean()]
        self._sum = None
        self._updates.check("parley", np.concatenate(mean), self._members)
        if not set(missing).isdisjoint(self._members):
            raise LocalProtocolError("a site that dropped out is in the sum")

    # ------------------------------------------------------------------------------------------------------- the lines

    def _run(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._turns:
                self._turns.popleft()()
            elif self._deadline is not None:
                self._now, self._deadline = self._deadline, None
                self._tell_coordinator(at_coordinator.TimeUp())
            else:
                raise LocalProtocolError("a round came to rest before its end")

    def _tell_coordinator(self, event: at_coordinator.Event) -> None:
        with self._meter.of(COORDINATOR):
            for effect in self._coordinator.receive(event, self._now):
                self._for_coordinator(effect)

    def _tell(self, idx: int, event: at_site.Event) -> None:
        with self._meter.of(idx):
            for effect in self._sites[idx].receive(event, at_site.Clock(_EPOCH + self._now, self._now)):
                self._for_site(idx, effect)

    def _heard_by_coordinator(self, idx: int, content: bytes) -> None:
        with self._meter.of(COORDINATOR):
            message = messages.decode(content)
        if isinstance(message, FromSite | Relayed):
            self._tell_coordinator(at_coordinator.Received(idx, message))

    def _heard_by_site(self, idx: int, content: bytes) -> None:
        if idx in self._gone:
            return
        with self._meter.of(idx):
            message = messages.decode(content)
        if isinstance(message, RoundStart) and idx in self._missing:
            self._gone.add(idx)
            self._tell_coordinator(at_coordinator.Departed(idx))
        else:
            self._tell(idx, at_site.Received(self._terms.job_hash, message))

    # ------------------------------------------------------------------------------------------------- the coordinator

    def _for_coordinator(self, effect: at_coordinator.Effect) -> None:
        match effect:
            case at_coordinator.Persist(state):
                state.encode()
            case at_coordinator.Send(idx, message):
                self._turns.append(partial(self._heard_by_site, idx, messages.encode(message)))
            case at_coordinator.Sum():
                self._turns.append(partial(self._summed, effect))
            case at_coordinator.Opened():
                effect.state.encode()
                self._turns.append(partial(self._tell_coordinator, at_coordinator.Committed(effect.r)))
            case at_coordinator.SetDeadline(at):
                self._deadline = at
            case at_coordinator.Failed():
                raise ParleyError(f"a round of {self._updates.sites} sites has no sum: {effect.detail}")
            case _:
                pass  # payloads come by themselves, and suspects are for people

    def _summed(self, work: at_coordinator.Sum) -> None:
        with self._meter.of(COORDINATOR):
            found = secure_sums.perform(work, self._terms.plans[0], self._source, self._folder, checked=True)
        if not isinstance(found, SummedUpdates):
            raise ParleyError("a round's sum did not hold its checks")
        with self._meter.of(TRANSPORT):
            for spool in self._spools:
                spool.drop_others(())
        self._sum, self._members = found, tuple(term.idx for term in work.terms)
        self._tell_coordinator(found.event)

    def _source(self, term: at_coordinator.Term) -> Reader:
        return self._spools[term.idx].reader(term.payload)

    # ------------------------------------------------------------------------------------------------------- the sites

    def _for_site(self, idx: int, effect: at_site.Effect) -> None:
        held = self._held[idx]
        match effect:
            case at_site.Persist(_, durable):
                durable.encode()
            case at_site.Send(_, message):
                self._send(idx, message)
            case at_site.Work():
                self._turns.append(partial(self._work, idx, effect))
            case at_site.Mask():
                self._turns.append(partial(self._mask, idx, effect))
            case at_site.UploadPayload(_, ctx, y_hash, size):
                self._turns.append(partial(self._upload, idx, ctx, BlobRef(y_hash, size)))
            case at_site.Erase(_, update):
                held.erase(update)
            case at_site.Abandon(_, ctx):
                held.abandon(ctx)
            case at_site.JobRefused(_, reasons):
                raise LocalProtocolError(f"site {idx} refused the job: {reasons[0].problem}")
            case _:
                pass  # what the administrator and the log are told

    def _send(self, idx: int, message: Message) -> None:
        content = messages.encode(message)
        self._sent[idx] += len(content)
        self._turns.append(partial(self._heard_by_coordinator, idx, content))

    def _work(self, idx: int, work: at_site.Work) -> None:
        name, held = f"round-{work.assignment.r}", self._held[idx]
        self._updates.of(idx).tofile(held.result(name))  # training is no part of this
        with self._meter.of(idx):
            held.prepare(name, work.plan, rows=10**6, declared=1)
        self._tell(idx, at_site.Updated(work.job_hash, work.assignment, name, work.table))

    def _mask(self, idx: int, mask: at_site.Mask) -> None:
        with self._meter.of(idx):
            payload = self._held[idx].mask(mask)
        if payload is not None:
            self._tell(idx, at_site.Masked(mask.job_hash, mask.ctx, payload.digest))

    def _upload(self, idx: int, ctx: bytes, payload: BlobRef) -> None:
        """The site reads what it sends, and the coordinator writes it down and sees that it is whole."""
        with self._meter.of(TRANSPORT):
            incoming = self._spools[idx].receive(payload)
            for chunk in self._held[idx].payloads.chunks(payload):
                incoming.append(chunk)
            incoming.finish()
        self._sent[idx] += payload.length
        self._tell(idx, at_site.UploadDone(self._terms.job_hash, ctx))
        self._tell_coordinator(at_coordinator.Stored(idx, payload))
