"""What only a site's administrator grants of what jobs ask of a data family, and the word that grants it (8.4, 8.5).

```
reads   which family, in which version of its table, an accepted job reads
asked   what a refused job asks for, and the digest by which it is granted
cell    granted: exact sums over another cell          plan    granted: one more exact statistic
table   granted: another version of the table (`tables.py`)
```

All of it stands in the audit log, in words: that is where a site restored from a backup finds it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from federation.errors import ConfigurationError, LocalProtocolError, WhoActs
from privacy.secure_aggregation.rostersum import logged
from privacy.secure_aggregation.rostersum.durable import Durable, Family, Job, Point
from privacy.secure_aggregation.rostersum.floor import Data, Floor, job_refusals
from privacy.secure_aggregation.rostersum.rules import Broken, Rule
from privacy.secure_aggregation.rostersum.site import Site
from privacy.secure_aggregation.rostersum.site_events import Clock, Persist, ReCell
from privacy.secure_aggregation.rostersum.terms import FieldsCodec, Kind, Plan, Terms

if TYPE_CHECKING:
    from collections.abc import Iterable

    from client.summing import Sealing
    from federation.audit import Entry

__all__ = [
    "ASKED",
    "READS",
    "Grant",
    "Wanted",
    "advised",
    "cells_of",
    "exposure",
    "find",
    "grant",
    "grantable",
    "reads",
    "wanted",
]

ASKED = "asked"
"""Kind of the audit log's entry that a refused job asks for what the administrator may grant."""

READS = "reads"
"""Kind of the audit log's entry that an accepted job reads a data family in a version of its table."""

_RECORD = 3
"""Words that stand before what it is about: the grant, the family, the digest."""


_GRANTED = {Rule.PIN, Rule.EXACT_PLANS, Rule.TABLE}


class Grant(StrEnum):
    """What is granted, as the audit log names it."""

    CELL = "cell"
    PLAN = "plan"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One thing that a job asks of a data family.

    Attributes:
        grant: What it is.
        family: The data family.
        digest: What names it: of a cell that of its sites, of a statistic that of its plan.
        what: Whose cell, or which statistic, for people.
    """

    grant: Grant
    family: str
    digest: bytes
    what: str

    @property
    def command(self) -> str:
        """What the administrator runs to grant it."""
        if self.grant is Grant.CELL:
            return f"parley site recell {self.family} --cell {self.digest.hex()}"
        return f"parley site answer {self.family} --plan {self.digest.hex()}"

    @property
    def asked(self) -> tuple[str, bytes]:
        """Kind and content of the audit log's entry that it was asked for."""
        return ASKED, f"{self.grant.value} {self.family} {self.digest.hex()} {self.what}".encode()

    @property
    def granted(self) -> tuple[str, bytes]:
        """Kind and content of the audit log's entry that it was granted."""
        return self.grant.value, f"{self.family} {self.digest.hex()} {self.what}".encode()


# --------------------------------------------------------------------------------------------------------------- asked


def reads(job: Job) -> tuple[str, bytes]:
    """Kind and content of the audit log's entry of what an accepted job reads."""
    return READS, f"{job.job_hash.hex()} {job.family} {job.table.hex()}".encode()


def wanted(job: str, terms: Terms, idx: int, family: Family, reasons: Iterable[Broken]) -> tuple[Wanted, ...]:
    """What a job, refused at site `idx` for these reasons, asks of a family that the administrator may grant."""
    rules = {each.rule for each in reasons}
    found = []
    if Rule.PIN in rules:
        found.append(Wanted(Grant.CELL, family.name, terms.cell_hash(idx), " ".join(_names(terms, idx))))
    if Rule.EXACT_PLANS in rules:
        found += [
            Wanted(Grant.PLAN, family.name, plan.digest, f"of job {job}: {_fields(plan)}")
            for plan in terms.plans
            if plan.exact and plan.kind is Kind.STAT and plan.digest not in family.plans
        ]
    return tuple(found)


def advised(reasons: tuple[Broken, ...], found: tuple[Wanted, ...], dataset: str) -> tuple[Broken, ...]:
    """The reasons, each that the administrator can do away with naming the command that does."""
    return tuple(replace(each, fix=_advice(each, found, dataset)) for each in reasons)


def _advice(reason: Broken, found: tuple[Wanted, ...], dataset: str) -> str:
    commands = {one: "  ".join(each.command for each in found if each.grant is one) for one in Grant}
    match reason.rule:
        case Rule.PIN:
            other, command = "keep the old cell, or use churn dp", commands[Grant.CELL]
        case Rule.EXACT_PLANS:
            other, command = "ask a statistic that was asked before, or use churn dp", commands[Grant.PLAN]
        case Rule.TABLE:
            other = "put the table back as it was"
            command = f"parley site dataset accept {dataset} --rows-changed N"
        case _:
            return reason.fix
    return f"{other}; or this site's administrator, once no agent runs here:  {command}"


def grantable(floor: Floor, job: Job, durable: Durable) -> tuple[Broken, ...]:
    """What stands against an open job now that the administrator may do away with: other jobs have gone on since."""
    data = Data(job.family, job.table, 0)
    found = job_refusals(floor, job.terms, job.idx, data, durable, None)
    return tuple(each for each in found if each.rule in _GRANTED)


def _names(terms: Terms, idx: int) -> tuple[str, ...]:
    return tuple(sorted(terms.roster.members[each].name for each in terms.cell_of(idx)))


def _fields(plan: Plan) -> str:
    fields = plan.codec.fields if isinstance(plan.codec, FieldsCodec) else ()
    return ", ".join(field.name for field in fields)


# ------------------------------------------------------------------------------------------------------------- granted


def find(entries: Iterable[Entry], one: Grant, family: str, digest: str) -> Wanted:
    """What was asked for under this digest, as the audit log has it.

    Raises:
        ConfigurationError: Nothing was.
    """
    begins = f"{one.value} {family} {digest.strip().lower()} "
    for entry in entries:
        text = entry.content.decode(errors="replace")
        if entry.kind == ASKED and text.startswith(begins):
            *_, named, what = text.split(" ", _RECORD)
            return Wanted(one, family, bytes.fromhex(named), what)
    raise ConfigurationError(
        f"no job that was refused here asked {family!r} for a {one.value} {digest[:70]!r}",
        fix="give family and digest as the refusal names them; see: parley audit show --kind asked",
        who=WhoActs.SITE,
    )


def cells_of(entries: Iterable[Entry], vk: bytes) -> dict[bytes, tuple[str, ...]]:
    """The cells of the site with this key in all jobs that it has accepted, by their digests: `org/site` of each."""
    found = {}
    for entry in entries:
        if entry.kind != logged.Logged.TERMS:
            continue
        terms = logged.read(entry.kind, entry.content)
        if not isinstance(terms, Terms):
            raise LocalProtocolError(f"an entry of the kind {entry.kind} holds no terms")
        idx = terms.roster.index_of(vk)
        if idx is not None:
            found[terms.cell_hash(idx)] = _names(terms, idx)
    return found


def exposure(old: tuple[str, ...] | None, new: tuple[str, ...]) -> str:
    """Whom sums over the new cell expose, once those over the old one are subtracted from them, in words."""
    if old is None:
        return "Who was in the old cell, the audit log does not say: whoever left it, or came since, is exposed."
    left, came = (sorted(set(a) - set(b)) for a, b in ((old, new), (new, old)))
    if not left and not came:
        return "Nobody leaves or comes: nobody is exposed."
    told = [f"{', '.join(who)} {verb}" for who, verb in ((left, "left"), (came, "came")) if who]
    alone = " It is one site: its own statistics, evaluation counts and updates show." * (len(left) + len(came) == 1)
    return f"Exposed, by the difference of two sums: {'; '.join(told)}.{alone}"


def grant(sealing: Sealing, floor: Floor, one: Wanted, clock: Clock) -> None:
    """Grants it from now on, durably; the audit log says so first.

    Raises:
        StorageError: The disk does not take it.
    """
    sealing.audit.append(*one.granted, clock.wall)
    durable = sealing.vault.durable
    if one.grant is Grant.CELL:
        effects = Site(sealing.key, floor, durable).receive(ReCell(one.family, one.digest), clock)
    else:
        family = durable.family(one.family)
        plans = tuple(dict.fromkeys((*family.plans, one.digest)))
        effects = (Persist(Point.NOTE, durable.with_family(replace(family, plans=plans))),)
    for effect in effects:
        if isinstance(effect, Persist):
            sealing.vault.persist(effect)
