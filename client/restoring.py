"""What an older copy of a site's vault lacks, as its audit log tells it (section 8.4): pins, plan hashes, the ledger.

All that ever left the site is in its log before it leaves, so what the log does not show did no harm. A job that was
under way is over for this site: how far it came in it is known, and what it held in memory is not.

Of the ledger the log has budgets, and what jobs without a secure sum were promised and charged, in so many words; the
charges of secure sums follow from the rounds that this site uploaded in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, assert_never

from client import decisions, tables
from client.decisions import Grant
from federation.errors import ParleyError, StorageError, WhoActs
from privacy import ledger, ledger_chain
from privacy.ledger import Book, BudgetSet, Charged, Ended, Promised
from privacy.secure_aggregation.rostersum import logged
from privacy.secure_aggregation.rostersum.durable import Charge, Durable, Family, Job, Tombstone
from privacy.secure_aggregation.rostersum.logged import Logged, Passed
from privacy.secure_aggregation.rostersum.messages import Open, RoundStart, Upload
from privacy.secure_aggregation.rostersum.terms import Churn, Kind, Terms

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from federation.audit import Entry
    from privacy.ledger import Entry as Posted

__all__ = ["Reentry", "reentry"]

_ENROL = "enrol the site anew, with new keys: what this one has answered cannot be known again"


@dataclass(frozen=True, slots=True)
class Reentry:
    """What the vault is to hold before the site serves again.

    Attributes:
        durable: Its state.
        posted: What its ledger lacks, in the order in which it was written.
        ended: Jobs that were under way in the copy, or were accepted since.
    """

    durable: Durable
    posted: tuple[Posted, ...]
    ended: int

    @property
    def charges(self) -> int:
        """How many charges its ledger lacks."""
        return sum(isinstance(entry, Charged) for entry in self.posted)


def reentry(known: Durable, book: Book, entries: Iterable[Entry], vk: bytes) -> Reentry:
    """The state that `known`, an older one, comes to with all that the log of the site with this key says.

    Args:
        known: The state.
        book: What its ledger comes to; it is left as it is.
        entries: The log.
        vk: The site's protocol key.

    Raises:
        StorageError: The log does not say enough: a line is damaged, or an older release wrote it.
    """
    replay = _Replay(vk, {job.job_hash: job for job in known.jobs})
    for entry in entries:
        replay.take(entry)
    over = {stone.job_hash for stone in known.closed}
    stones = tuple(stone for stone in replay.tombstones() if stone.job_hash not in over)
    durable = Durable((), (*known.closed, *stones), known.families)
    for family in replay.families.values():
        durable = durable.with_family(_joined(durable.family(family.name), family))
    return Reentry(durable, tuple(_lacking(book, replay)), len(stones))


def _lacking(book: Book, replay: _Replay) -> Iterator[Posted]:
    """What the log says and the ledger does not, each entry once; of budgets the last of each family."""
    last = {entry.family: entry for entry in replay.posted if isinstance(entry, BudgetSet)}
    told: set[object] = set()
    for entry in replay.posted:
        if entry in last.values() or not isinstance(entry, BudgetSet):
            name = _name(entry)
            if name not in told and not _known(book, entry):
                yield entry
            told.add(name)


def _name(entry: Posted) -> object:
    """What an entry is told by: a round is charged once, whatever its attempts, and a job promised its rounds once."""
    return entry.job if isinstance(entry, Promised) else ledger.key_of(entry) or entry


def _known(book: Book, entry: Posted) -> bool:
    match entry:
        case BudgetSet(family=family):
            return book.budget(family) == entry
        case Promised(job=job):
            return book.knows(job)
        case Charged():
            return book.charged(entry)
        case Ended(job):
            return book.ended(job)
        case _:
            assert_never(entry)


def _joined(kept: Family, told: Family) -> Family:
    """What the log tells last, and what the copy has where the log does not tell."""
    plans = tuple(dict.fromkeys((*kept.plans, *told.plans)))
    return replace(kept, pin=told.pin or kept.pin, table=told.table or kept.table, plans=plans)


@dataclass(slots=True)
class _Replay:
    """What the entries so far say."""

    vk: bytes
    open: dict[bytes, Job]
    terms: dict[bytes, Terms] = field(default_factory=dict)
    reads: dict[bytes, tuple[str, bytes]] = field(default_factory=dict)
    starts: dict[bytes, RoundStart] = field(default_factory=dict)
    last: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    opened: dict[bytes, int] = field(default_factory=dict)
    families: dict[str, Family] = field(default_factory=dict)
    posted: list[Posted] = field(default_factory=list)

    def take(self, entry: Entry) -> None:
        """Takes in the next entry."""
        try:
            self._take(entry)
        except (ParleyError, ValueError) as damaged:
            raise StorageError(
                f"line {entry.line} of the audit log cannot be read: {damaged}", fix=_ENROL, who=WhoActs.SITE
            ) from damaged

    def _take(self, entry: Entry) -> None:
        words = entry.content.decode(errors="replace").split(" ")
        match entry.kind:
            case Logged.TERMS | Logged.RECEIVED | Logged.SENT:
                self._logged(logged.read(entry.kind, entry.content))
            case decisions.READS:
                job_hash, family, table = words
                self.reads[bytes.fromhex(job_hash)] = family, bytes.fromhex(table)
            case tables.ACCEPTED:
                self._family(words[0], table=bytes.fromhex(words[1]))
            case Grant.CELL:
                self._family(words[0], pin=bytes.fromhex(words[1]))
            case Grant.PLAN:
                plans = self._known(words[0]).plans
                self._family(words[0], plans=(*plans, bytes.fromhex(words[1])))
            case ledger.AUDITED:
                self.posted.append(ledger_chain.entry_of(json.loads(entry.content)))
            case _:
                pass

    def _logged(self, held: object) -> None:
        match held:
            case Terms():
                self.terms[held.job_hash] = held
            case Passed(Logged.RECEIVED, _, RoundStart() as start):
                self.starts[start.ctx] = start
                known = self.last.get(start.job_hash, (0, 0))
                self.last[start.job_hash] = max(known, (start.r, start.a))
            case Passed(Logged.SENT, _, Upload(ctx=ctx)):
                self._uploaded(self._start(ctx))
            case Passed(Logged.SENT, _, Open(ctx=ctx)):
                start = self._start(ctx)
                self.opened[start.job_hash] = max(start.r, self.opened.get(start.job_hash, 0))
            case _:
                pass

    def _start(self, ctx: bytes) -> RoundStart:
        start = self.starts.get(ctx)
        if start is None:
            raise ValueError("it answers a ROUND_START that is not in the log")
        return start

    def _uploaded(self, start: RoundStart) -> None:
        """What was durable at this site before this vector left (F3)."""
        terms = self.terms.get(start.job_hash)
        plan = None if terms is None else terms.plan(start.plan_id)
        if terms is None or plan is None:
            raise ValueError("it is of a job whose terms are not in the log")
        idx = terms.roster.index_of(self.vk)
        if idx is None:
            raise ValueError("it is of a job in which this site is not")
        name, table = self._read(start.job_hash)
        family = self._known(name)
        if plan.churn is Churn.CELLS:
            family = replace(family, pin=terms.cell_hash(idx))
        if plan.exact:
            family = replace(family, table=table)
        if plan.exact and plan.kind is Kind.STAT:
            family = replace(family, plans=tuple(dict.fromkeys((*family.plans, plan.digest))))
        self.families[name] = family
        if plan.churn is Churn.DP:
            charge = Charge(name, start.job_hash, start.r, plan, len(start.members), terms.c_max)
            self.posted.append(ledger.charged(charge))

    def _read(self, job_hash: bytes) -> tuple[str, bytes]:
        """The family that a job reads, and the version of its table."""
        if job_hash in self.reads:
            return self.reads[job_hash]
        if job_hash in self.open:
            return self.open[job_hash].family, self.open[job_hash].table
        raise ValueError(f"an older release wrote it, which did not say what the job {job_hash.hex()[:16]} read")

    def _known(self, name: str) -> Family:
        return self.families.get(name, Family(name))

    def _family(self, name: str, **changes: bytes | tuple[bytes, ...]) -> None:
        self.families[name] = replace(self._known(name), **changes)  # type: ignore[arg-type] # two kinds of fields

    def tombstones(self) -> Iterable[Tombstone]:
        """Every job that was ever accepted: none is accepted again."""
        for job_hash in dict.fromkeys((*self.open, *self.terms)):
            stone = self.open[job_hash].tombstone if job_hash in self.open else Tombstone(job_hash, 0, 0, 0)
            last = max(self.last.get(job_hash, (0, 0)), (stone.last_r, stone.last_a))
            yield Tombstone(job_hash, *last, max(self.opened.get(job_hash, 0), stone.opened_r))
