"""A site's jobs under secure aggregation: the machine they share, what it hears and says, and what goes to the log.

```
coordinator --Sealed(job, bytes)--> heard ---> rostersum.site.Site ---> Send, Persist, Work, Mask, UploadPayload ...
                                      `----> Record (audit log) <---------'
```
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client import decisions, policy
from client.policy import Admitted, Policy
from client.session_events import Effect, Note, Record, Send, TableFacts, UploadMasked
from federation import plugins
from federation.errors import (
    ConfigurationError,
    LocalProtocolError,
    ParleyError,
    PolicyRefused,
    RemoteProtocolError,
    WhoActs,
)
from federation.findings import Finding
from federation.job import Job
from federation.messages import JobOffer, MembershipStatement, RevocationList, Sealed, StepKind, StepStart
from privacy.ledger import Payer
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum import site_events as sums
from privacy.secure_aggregation.rostersum.durable import Durable
from privacy.secure_aggregation.rostersum.durable import Job as DurableJob
from privacy.secure_aggregation.rostersum.evidence import Evidence, Suspicion
from privacy.secure_aggregation.rostersum.floor import Data, Floor
from privacy.secure_aggregation.rostersum.logged import Logged, evidence_entry, message_entry, terms_entry
from privacy.secure_aggregation.rostersum.messages import Close, Code, Encaps, FromCoordinator, Keys, Message
from privacy.secure_aggregation.rostersum.plans import args_of, model_size, plan_id, terms_of
from privacy.secure_aggregation.rostersum.rules import Broken, Rule
from privacy.secure_aggregation.rostersum.site import Site
from privacy.secure_aggregation.rostersum.site_events import Clock
from privacy.secure_aggregation.rostersum.states import State
from privacy.secure_aggregation.rostersum.terms import Terms

if TYPE_CHECKING:
    from tasks.task import TaskFile

__all__ = ["SealedJobs", "Turn", "admitted", "describes", "finding_of"]

Turn = Effect | sums.Accepted | sums.JobRefused | sums.Work | sums.Suspend | sums.Closed
"""What is to be done, and what the session has to know of its jobs."""

_NOTHING = Floor(0, 0, frozenset(), frozenset(), frozenset(), frozenset())
"""Allows no job: in force until the first one is offered under a policy."""
_EMPTY = hashlib.sha256(b"").digest()
_OF_DATA = {Rule.DATA_ROWS, Rule.DATA_CLASSES, Rule.DATA_WEIGHT}
"""Refusals that are a function of records: the coordinator is not told which (section 8.6)."""
_GRANTABLE = (f"{Code.E_PIN.name}: ", f"{Code.E_TERMS.name}: ")
"""How the evidence of a refusal begins behind which may be what the administrator can grant."""
_LONGEST = 1000
"""Characters of each text of a finding."""


def _tried(terms: Terms) -> None:
    from privacy.secure_aggregation.rostersum import promise  # its libraries take memory that other jobs need not pay

    promise.tried(terms)


class SealedJobs:
    """The state of a site's jobs under secure aggregation. It owns no socket, clock, thread or file.

    What it says is dropped while the coordinator does not know that the job is accepted here, and said again, in the
    same bytes, once `join` tells that it does.

    Args:
        key: This site's protocol key.
        durable: What it knew last; `Durable()` where it never ran.
        ledger: Its privacy ledger; without one it accepts no job with noise.
        trial: Returns once noise as a job needs it was drawn in this process and found right; it raises where it was
            not.
    """

    def __init__(
        self,
        key: Ed25519PrivateKey,
        durable: Durable,
        ledger: Payer | None = None,
        trial: Callable[[Terms], None] = _tried,
    ) -> None:
        self._site = Site(key, _NOTHING, durable, ledger)
        self._ledger = ledger
        self._trial = trial
        self._vk = key.public_key().public_bytes_raw()
        self._asked: set[tuple[str, bytes]] = set()
        self._jobs: dict[bytes, Admitted] = {}
        self._live: set[bytes] = set()
        self._floor = _NOTHING
        self._basis: tuple[object, ...] = ()
        self._stopped = False

    # ------------------------------------------------------------------------------------------------------- questions

    def admission(self, job: str) -> Admitted | None:
        """What is known of a job, from its first offer until it is closed."""
        return next((each for each in self._jobs.values() if each.offer.job == job), None)

    def name(self, job_hash: bytes) -> str:
        """The job's id; empty if it was not offered to this process."""
        known = self._jobs.get(job_hash)
        return "" if known is None else known.offer.job

    def live(self, job: str) -> bool:
        """Whether the coordinator knows, on this stream, that the job is accepted here."""
        known = self.admission(job)
        return known is not None and known.terms.job_hash in self._live

    def state(self, job: str) -> State:
        """Where the site stands in a job; CLOSED in one that is over, or that it is not in."""
        known = self.admission(job)
        return State.CLOSED if known is None else self._site.state(known.terms.job_hash)

    def wake_at(self, clock: Clock) -> float | None:
        """When, on the steady clock, a `TimePassed` will change something; None while it will not."""
        return None if self._stopped else self._site.wake_at(clock)

    # ---------------------------------------------------------------------------------------------------------- offers

    def admit(self, job: Admitted) -> None:
        """Takes an offer up whose roster and terms hold; whether the job is accepted is asked by `offer`.

        Raises:
            PolicyRefused: Another job here has these very terms: what is said in one would count in the other.
        """
        known = self._jobs.get(job.terms.job_hash)
        if known is not None and known.offer.job != job.offer.job:
            problem = f"the job {known.offer.job} has the same terms, with the same job_id"
            raise PolicyRefused(problem, fix="submit the job anew", who=WhoActs.COORDINATOR)
        self._jobs[job.terms.job_hash] = job

    def offer(self, job: Admitted, rules: Policy, table: TableFacts, clock: Clock) -> tuple[Turn, ...]:
        """Asks the machine whether the job is accepted on this table: `Accepted` or `JobRefused` is among the turns."""
        family = rules.secure_aggregation.family(job.job.data.dataset)
        job_hash = job.terms.job_hash
        known = next((each for each in self._site.durable.jobs if each.job_hash == job_hash), None)
        if known is not None and (known.family, known.table) != (family, table.digest):
            problem = "the table is another version than that with which this job began: sums would show the change"
            fix = "put the data set back as it was when the job began; a new version serves new jobs"
            return (sums.JobRefused(job_hash, (Broken(Rule.TABLE, problem, fix),)),)
        if failed := self._untried(job.terms, rules):
            return (sums.JobRefused(job_hash, failed),)
        data = Data(family, table.digest, table.rows, table.test_rows, table.rarest)
        turns = self.receive(sums.Offered(job.terms, data), clock)
        return tuple(each for turn in turns for each in self._advised(job, family, turn))

    def _untried(self, terms: Terms, rules: Policy) -> tuple[Broken, ...]:
        """Why the noise of this process protects nothing, of a job that needs some and that the policy may allow.

        It is asked again in each process, before the first word in such a job.
        """
        if not rules.secure_aggregation.allow_dp or all(plan.dp is None for plan in terms.plans):
            return ()
        try:
            self._trial(terms)
        except ParleyError as failed:
            return (Broken(Rule.SAMPLER, failed.problem, failed.fix),)
        return ()

    def _advised(self, job: Admitted, family: str, turn: Turn) -> tuple[Turn, ...]:
        """A refusal with the administrator's commands against it, after what it asks for is in the log."""
        idx = job.terms.roster.index_of(self._vk)
        if not isinstance(turn, sums.JobRefused) or idx is None:
            return (turn,)
        unpaid = None if self._ledger is None else self._ledger.refusal(job.terms, family)
        told = tuple(unpaid if unpaid and each.rule is Rule.LEDGER else each for each in turn.reasons)
        entries, reasons = self._asking(job, idx, family, tuple(dict.fromkeys(told)))
        refused = sums.JobRefused(turn.job_hash, reasons)
        return (Record(entries), refused) if entries else (refused,)

    def _asking(
        self, job: Admitted, idx: int, family: str, reasons: tuple[Broken, ...]
    ) -> tuple[tuple[tuple[str, bytes], ...], tuple[Broken, ...]]:
        """What the log does not say yet of what a job asks for, and the reasons against it, with commands."""
        found = decisions.wanted(job.offer.job, job.terms, idx, self._site.durable.family(family), reasons)
        new = [each for each in found if (job.offer.job, each.digest) not in self._asked]
        self._asked |= {(job.offer.job, each.digest) for each in found}
        return tuple(each.asked for each in new), decisions.advised(reasons, found, job.job.data.dataset)

    def limit(self, rules: Policy, revocations: RevocationList, clock: Clock) -> tuple[Turn, ...]:
        """Holds the machine to the site's policy as it is now."""
        basis = (rules, revocations, tuple(self._jobs.values()))
        if basis == self._basis:
            return ()
        self._basis = basis
        limits = policy.floor(rules, self._jobs.values(), revocations)
        if limits == self._floor:
            return ()
        self._floor = limits
        return self.receive(sums.FloorChanged(limits), clock)

    def join(self, job: str, clock: Clock) -> tuple[Turn, ...]:
        """The coordinator knows on this stream that the job is accepted: what it may have lost of it is said again."""
        known = self.admission(job)
        if known is None:
            return ()
        job_hash = known.terms.job_hash
        self._live.add(job_hash)
        passed = self.receive(sums.TimePassed(), clock)
        others = self._live - {job_hash}
        self._live -= others  # they have said it when they joined
        try:
            return (*passed, *self.receive(sums.Connected(), clock))
        finally:
            self._live |= others

    def leave(self, job: str) -> None:
        """The coordinator was told, or has said, that this site is not in the job (any more): nothing is said in it."""
        known = self.admission(job)
        if known is not None:
            self._live.discard(known.terms.job_hash)

    def cut(self) -> None:
        """The stream has ended: nothing is said until the jobs are accepted on another."""
        self._live.clear()

    # ---------------------------------------------------------------------------------------------------------- events

    def heard(self, message: Sealed, clock: Clock) -> tuple[Turn, ...]:
        """Takes in what came in the line of a job; noted and changes nothing if this site is not in it.

        A job that was not offered to this process has no line, but it may be closed.
        """
        terms = self._terms_of(message.job)
        try:
            decoded = messages.decode(message.content)
        except ParleyError:
            return _ignored(message) if terms is None else self.receive(sums.Unreadable(terms.job_hash), clock)
        if terms is None and isinstance(decoded, Close):
            terms = next((job.terms for job in self._site.durable.jobs if job.job_hash == decoded.job_hash), None)
        if terms is None:
            return _ignored(message)
        signed = _signed_by(decoded, terms)
        entries = () if signed is None else (message_entry(Logged.RECEIVED, decoded, signed.peer),)
        return self.receive(sums.Received(terms.job_hash, decoded), clock, entries)

    def _terms_of(self, job: str) -> Terms | None:
        """The terms of a job that this site is in, which was offered to this process."""
        known = self.admission(job)
        if known is None or self._site.state(known.terms.job_hash) is State.CLOSED:
            return None
        return known.terms

    def receive(self, event: sums.Event, clock: Clock, entries: tuple[tuple[str, bytes], ...] = ()) -> tuple[Turn, ...]:
        """Lets the machine take an event in; `entries` go to the log before what it says."""
        try:
            effects = self._site.receive(event, clock)
        except (PolicyRefused, RemoteProtocolError) as refused:
            self._stopped = self._stopped or isinstance(event, sums.TimePassed)  # a stopped site refuses even time
            told = Note(f"secure aggregation: {refused}", trouble=True)
            return (Record(entries), told) if entries else (told,)
        return self._told(effects, entries)

    def _told(self, effects: Iterable[sums.Effect], before: tuple[tuple[str, bytes], ...]) -> tuple[Turn, ...]:
        """The effects as the session knows them, with one `Record` ahead of all that is said."""
        entries = list(before)
        told: list[Turn] = []
        for effect in effects:
            match effect:
                case sums.Send(job_hash, message):
                    if job_hash in self._live:
                        entries.append(message_entry(Logged.SENT, message, None))
                        told.append(Send(Sealed(self.name(job_hash), messages.encode(message))))
                case sums.UploadPayload(job_hash):
                    if job_hash in self._live:
                        told.append(UploadMasked(self.name(job_hash), effect))
                case sums.Log(job_hash, evidence):
                    asked, notes = self._stopped_by(job_hash, evidence)
                    entries += (evidence_entry(job_hash, evidence), *asked)
                    told += notes
                case sums.Accepted(job_hash):
                    entries += (terms_entry(self._jobs[job_hash].terms), *map(decisions.reads, self._open(job_hash)))
                    told.append(effect)
                case _:
                    told.append(effect)
        if entries:
            first = next((at for at, each in enumerate(told) if isinstance(each, Send | sums.Accepted)), len(told))
            told.insert(first, Record(tuple(entries)))
        return tuple(told)

    def _open(self, job_hash: bytes) -> tuple[DurableJob, ...]:
        """The durable state of a job that is open, if it is."""
        return tuple(job for job in self._site.durable.jobs if job.job_hash == job_hash)

    def _stopped_by(
        self, job_hash: bytes, evidence: Evidence
    ) -> tuple[tuple[tuple[str, bytes], ...], tuple[Note, ...]]:
        """Entries and notes where a message was refused because of what the administrator may grant."""
        known = self._jobs.get(job_hash)
        if known is None or evidence.kind is not Suspicion.REFUSED or not evidence.text.startswith(_GRANTABLE):
            return (), ()
        entries: tuple[tuple[str, bytes], ...] = ()
        notes: tuple[Note, ...] = ()
        for job in self._open(job_hash):
            found = decisions.grantable(self._floor, job, self._site.durable)
            asked, reasons = self._asking(known, job.idx, job.family, found)
            entries += asked
            told = (f"job {known.offer.job}: {each.problem} ({each.fix})" for each in reasons)
            notes += tuple(Note(text, trouble=True) for text in told)
        return entries, notes

    def closed(self, job_hash: bytes) -> str:
        """Forgets a job that is over, and gives its id."""
        self._live.discard(job_hash)
        return "" if (known := self._jobs.pop(job_hash, None)) is None else known.offer.job


# ---------------------------------------------------------------------------------------------------------- the offer


def admitted(offer: JobOffer, job: Job, coordinator: MembershipStatement) -> Admitted:
    """The job with the terms offered, which are those that this site computes from the file and the roster itself.

    Raises:
        ConfigurationError: They are other ones, or the file comes to no terms; the first difference is named.
    """
    try:
        offered = Terms.decode(offer.terms)
    except (RemoteProtocolError, LocalProtocolError) as unread:
        raise ConfigurationError(
            "the terms of its secure aggregation cannot be read",
            fix="install the same release of Parley on both sides",
            who=WhoActs.COORDINATOR,
        ) from unread
    train = offered.plan(plan_id(StepKind.TRAIN))
    if train is None:
        raise ConfigurationError("its terms have no plan to train", fix="submit the job anew", who=WhoActs.COORDINATOR)
    file: TaskFile = plugins.load("tasks", job.task.kind)
    task = file.make(job)
    own = terms_of(
        job,
        offered.job_id,
        offer.roster,
        coordinator.protocol_key,
        model_size(train),
        task.statistics_fields,
        task.evaluation_fields,
    )
    if offered != own:
        raise ConfigurationError(
            f"the terms offered are not those of the job file: {_difference(offered, own)}",
            fix="install the same release of Parley on both sides, and find out who changed the terms",
            who=WhoActs.COORDINATOR,
        )
    return Admitted(job, offer, own)


def _difference(offered: Terms, own: Terms) -> str:
    """The first thing in which two terms differ."""
    theirs, ours = offered.roster, own.roster
    if theirs.members != ours.members:
        rows = zip(theirs.members, ours.members, strict=False)
        index = next((at for at, (a, b) in enumerate(rows) if a != b), min(offered.n, own.n))
        return f"the roster is another one from site {index} on"
    if theirs.coordinator_vk != ours.coordinator_vk:
        return "they name another coordinator's key"
    for name in ("c_max", "g_max", "pq", "cells"):
        if getattr(offered, name) != getattr(own, name):
            return f"{name} is {getattr(offered, name)}, and this site finds {getattr(own, name)}"
    numbers = [[plan.plan_id for plan in terms.plans] for terms in (offered, own)]
    if numbers[0] != numbers[1]:
        return f"the plans are {numbers[0]}, and this site finds {numbers[1]}"
    for a, b in zip(offered.plans, own.plans, strict=True):
        for name in (each.name for each in fields(b)):
            if getattr(a, name) != getattr(b, name):
                shown = _shown(getattr(a, name)), _shown(getattr(b, name))
                return f"{name} of plan {b.plan_id} is {shown[0]}, and this site finds {shown[1]}"
    raise LocalProtocolError("two terms differ in nothing that they are compared by")


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)[:200]


def finding_of(reasons: tuple[Broken, ...]) -> tuple[Finding, ...]:
    """What the coordinator is told of a refusal: each rule of terms and policy, and of records only that they are one.

    That records do not suffice is one finding, whatever of them it is.
    """
    found = [
        Finding("privacy", each.problem[:_LONGEST], each.fix[:_LONGEST])
        for each in reasons
        if each.rule not in _OF_DATA
    ]
    if len(found) < len(reasons):
        problem = "this site's data is not what the job's secure aggregation asks of every site"
        found.append(Finding("data", problem, "see the site's log, which says what it is"))
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------ messages


def describes(step: StepStart, work: sums.Work) -> bool:
    """Whether a step is the one that an assignment is of: its kind, its model, its preparation and its round."""
    asked = work.assignment
    model = _EMPTY if step.model is None else step.model.digest
    args = hashlib.sha256(args_of(step)).digest()
    return (plan_id(step.kind), model, args) == (asked.plan_id, asked.model_hash, asked.args_hash)


def _ignored(message: Sealed) -> tuple[Turn, ...]:
    return (Note(f"a message of job {message.job} came, in which this site is not; ignored"),)


@dataclass(frozen=True, slots=True)
class _Author:
    """Whose signature a message bears: a site's index, or None for the coordinator."""

    peer: int | None


def _signed_by(message: Message, terms: Terms) -> _Author | None:
    """Whose signature holds on a message that may come to a site; None if there is no such."""
    match message:
        case Keys(idx=peer) | Encaps(lo=peer):
            known = peer < terms.n and messages.verify(message, terms.roster.members[peer].vk)
            return _Author(peer) if known else None
        case _ if isinstance(message, FromCoordinator):
            return _Author(None) if messages.verify(message, terms.roster.coordinator_vk) else None
        case _:
            return None
