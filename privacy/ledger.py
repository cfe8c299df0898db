"""What the lines of a site's privacy ledger mean: budgets, promises and charges of each data family, in a hash chain.

```
budget    what the site's administrator allows a data family, with the reason why
promise   a job's whole rounds, before its first one
charge    rounds, before anything of them leaves the site; an event, never an epsilon
end       a job is over: of its promise only what was charged stays
```

Each is a line of a chain (`ledger_chain.py`): never changed, never removed, and no charge is refunded. Where lines are
kept, and what makes them durable, is the client's.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias, assert_never

from federation.errors import ConfigurationError, LocalProtocolError, PolicyRefused, WhoActs
from privacy.differential_privacy.events import EVERY_RECORD, Event, Level, Purpose, Unit
from privacy.secure_aggregation.rostersum.durable import Charge, Job
from privacy.secure_aggregation.rostersum.floor import Ledger
from privacy.secure_aggregation.rostersum.rules import Broken
from privacy.secure_aggregation.rostersum.terms import Churn, DpCodec, Kind, Mechanism, Path, Plan, RecordCodec, Terms

if TYPE_CHECKING:
    from privacy.differential_privacy.filters import Account, Budget

__all__ = [
    "AUDITED",
    "Book",
    "BudgetSet",
    "Charged",
    "Ended",
    "Entry",
    "Payer",
    "Promised",
    "charged",
    "key_of",
    "payable",
    "promise",
    "promised",
    "require_chargeable",
    "require_payable",
]

AUDITED = "ledger"
"""Kind of the audit log's entry that holds an entry of the ledger which no other entry of the log implies."""

_LAST_ROUND = (1 << 64) - 1
"""Rounds of a RosterSum job grow by any step, up to here."""

_ADDED = 10
"""What rounding and sampling add to delta stays below this part of it, over all jobs of a family."""


class Payer(Ledger, Protocol):
    """A ledger that also says, of a whole job, why it does not pay it."""

    def refusal(self, terms: Terms, family: str) -> Broken | None:
        """Why the budget of the family does not pay all rounds of the job, with what would help; None if it does."""
        ...


# -------------------------------------------------------------------------------------------------------------- entries


@dataclass(frozen=True, slots=True)
class BudgetSet:
    """From here on the administrator allows a data family this much, over all its jobs, past and to come.

    Attributes:
        family: The data family: tables that share records.
        epsilon: What its charges may come to, however jobs are chosen,
        delta: at this delta.
        order: The one Rényi order at which charges are summed; None sums them as whole-batch Gaussians (filter gdp).
        unit: What is protected.
        q_most: The highest rate of records that a job may sample with.
        reason: The administrator's.
    """

    family: str
    epsilon: float
    delta: float
    order: int | None
    unit: Unit = Unit.RECORD
    q_most: float = 1.0
    reason: str = ""

    def __post_init__(self) -> None:
        """Refuses numbers that allow nothing, or anything."""
        if not 0 < self.q_most <= 1:
            raise ConfigurationError(
                f"a highest rate of {self.q_most:g} is not in (0, 1]",
                fix="give a share of the records, or 1 to allow every rate",
                who=WhoActs.SITE,
            )

    @property
    def rule(self) -> str:
        """How charges are summed, in words."""
        return "gdp" if self.order is None else f"rdp at order {self.order}"

    @property
    def fixed(self) -> tuple[int | None, Unit]:
        """What is never changed once something was promised or charged."""
        return self.order, self.unit

    @property
    def budget(self) -> "Budget":
        """The budget as accounts know it.

        Raises:
            ConfigurationError: The numbers leave nothing to spend, or are none.
        """
        from privacy.differential_privacy.filters import Budget, budget_filter

        rule = budget_filter("gdp" if self.order is None else "rdp", self.epsilon, self.delta, self.order)
        return Budget(rule, self.unit, self.q_most)


@dataclass(frozen=True, slots=True)
class Promised:
    """A job's whole rounds: one line, with their count, for each purpose and population.

    Attributes:
        family: The data family that it reads.
        job: The job's digest.
        lines: Its rounds.
        added_delta: What rounding and sampling would add to delta in all of them.
    """

    family: str
    job: bytes
    lines: tuple[Event, ...]
    added_delta: float = 0.0


@dataclass(frozen=True, slots=True)
class Charged:
    """Rounds whose sums may have left the site.

    Attributes:
        family: The data family that they read.
        event: What they were.
        added_delta: What rounding and sampling add to delta in them.
    """

    family: str
    event: Event
    added_delta: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A job is over."""

    job: bytes


Entry: TypeAlias = BudgetSet | Promised | Charged | Ended


def key_of(entry: Entry) -> tuple[bytes, Purpose, int] | None:
    """What no two charges have in common: job, purpose and first round; None of what is no charge."""
    if not isinstance(entry, Charged):
        return None
    return entry.event.job, entry.event.purpose, entry.event.first_round


# -------------------------------------------------------------------------------------- what RosterSum is charged with


def charged(charge: Charge) -> Charged:
    """The entry that a round of a plan with noise is charged with, all in the integers that the noise was drawn by.

    Raises:
        ConfigurationError: No event holds for such a plan.
    """
    noise = charge.plan.dp
    if noise is None:
        raise ConfigurationError(f"plan {charge.plan.plan_id} has no noise to charge", fix="choose churn dp")
    variance, shares, squared, level, unit = _integers(charge.plan, charge.members, charge.c_max)
    event = Event(
        job=charge.job_hash,
        first_round=charge.r,
        last_round=charge.r + charge.rounds - 1,
        level=level,
        unit=unit,
        q=1.0,  # terms state no rate of records, and what was sampled costs no more than what was not
        v=variance,
        n_eff=shares,
        squared=squared,
        count=charge.rounds,
        purpose=_PURPOSES[charge.plan.kind],
        population=EVERY_RECORD,  # splits of today's tasks move other records when one is removed
    )
    return Charged(charge.family, event, charge.rounds * _added(charge.plan, noise.delta, noise.rounds))


_PURPOSES = {Kind.TRAIN: Purpose.TRAIN, Kind.STAT: Purpose.STATISTICS, Kind.EVAL: Purpose.EVALUATION}


def _integers(plan: Plan, members: int, c_max: int) -> tuple[int, int, int, Level, Unit]:
    """V, n_eff and D^2 of a plan over a set of sites, who adds the noise, and what it protects."""
    from privacy.differential_privacy.record import Dither, Exact, beta_of, share_variance
    from privacy.differential_privacy.sampler import noise_shares
    from privacy.secure_aggregation.rostersum.noise import round_noise

    match plan.codec, plan.dp:
        case DpCodec(), noise if noise is not None:
            if noise.mechanism is not Mechanism.DDGAUSS:
                raise ConfigurationError(
                    f"plan {plan.plan_id}: no accountant of this release holds for {noise.mechanism} noise",
                    fix="choose mechanism ddgauss",
                )
            found = round_noise(plan, members, c_max)
            return found.variance, found.shares, found.squared, Level.SITE, Unit.SITE
        case RecordCodec(values, path, _, _), noise if noise is not None:
            beta = beta_of(noise.delta, noise.rounds)
            rounding = Exact() if path is Path.EXACT else Dither(values, beta)
            squared = rounding.squared_sensitivity(noise.scale, noise.clip)
            shares = noise_shares(members, c_max)
            return share_variance(noise.z, squared, shares), shares, squared, Level.RECORD_SHARED, Unit.RECORD
        case _:
            raise ConfigurationError(
                f"plan {plan.plan_id}: no event holds for noise on codec {plan.codec.TAG}",
                fix="choose a codec that differential privacy is proved for: dp, or record",
            )


def _added(plan: Plan, delta: float, rounds: int) -> float:
    """What a round adds to delta at most: the sampler's share, which sites refuse above that, and beta of a dither."""
    dithered = isinstance(plan.codec, RecordCodec) and plan.codec.path is Path.DITHER
    return (2 if dithered else 1) * delta / (1000 * rounds)


def promise(terms: Terms, family: str) -> Promised | None:
    """What a job is promised: all rounds of each plan with noise, over whichever set costs most; None of exact sums.

    Raises:
        ConfigurationError: No event holds for a plan.
    """
    lines, added = [], 0.0
    for plan in terms.plans:
        if plan.churn is not Churn.DP or plan.dp is None:
            continue
        asked = [
            charged(Charge(family, terms.job_hash, 0, plan, members, terms.c_max, plan.dp.rounds))
            for members in range(plan.m_min, max(plan.m_min, terms.n) + 1)
        ]
        dearest = min(asked, key=lambda each: each.event.z)
        lines.append(replace(dearest.event, last_round=_LAST_ROUND))
        added += dearest.added_delta
    return Promised(family, terms.job_hash, tuple(lines), added) if lines else None


def promised(jobs: Iterable[Job]) -> Iterator[Promised]:
    """What jobs that were accepted are promised; nothing where their sums are exact."""
    for job in jobs:
        found = promise(job.terms, job.family)
        if found is not None:
            yield found


# ------------------------------------------------------------------------------------------------------------- the book


@dataclass(slots=True)
class _Page:
    """What the book holds of one data family."""

    budget: BudgetSet | None = None
    sums: dict[Event, Event] = field(default_factory=dict)
    open: dict[bytes, Promised] = field(default_factory=dict)
    added_delta: float = 0.0

    @property
    def events(self) -> tuple[Event, ...]:
        """All charges; rounds of the same job, noise and records counted together."""
        return tuple(self.sums.values())

    @property
    def written(self) -> bool:
        """Whether anything was promised or charged."""
        return bool(self.sums or self.open)


class Book:
    """What a ledger's entries come to, one after another.

    **Formal guarantee.** A round of a job and purpose is charged at most once, nothing that was charged is ever taken
    back, and what is the same for all of a family's charges, the rule of its budget and the unit, never changes.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._pages: dict[str, _Page] = {}
        self._events: dict[tuple[bytes, Purpose, int], Event] = {}
        self._rounds: dict[tuple[bytes, Purpose], list[int]] = {}
        self._families: dict[bytes, str] = {}
        self._ended: set[bytes] = set()
        for entry in entries:
            self.post(entry)

    # ------------------------------------------------------------------------------------------------------- questions

    @property
    def families(self) -> tuple[str, ...]:
        """The data families that it knows, by name."""
        return tuple(sorted(self._pages))

    def budget(self, family: str) -> BudgetSet | None:
        """What the administrator allows now; None where nothing was ever said."""
        return self._page(family).budget

    def events(self, family: str) -> tuple[Event, ...]:
        """All that was charged; rounds of the same job, noise and records counted together."""
        return self._page(family).events

    def promises(self, family: str) -> tuple[Promised, ...]:
        """The open jobs."""
        return tuple(self._page(family).open.values())

    def added_delta(self, family: str) -> float:
        """What rounding and sampling have added to delta so far."""
        return self._page(family).added_delta

    def rounds(self, family: str) -> int:
        """How many rounds were charged."""
        return sum(event.count for event in self._page(family).events)

    def written(self, family: str) -> bool:
        """Whether anything of the family was ever charged, or is promised."""
        return self._page(family).written

    def promise(self, job: bytes) -> Promised | None:
        """What an open job was promised."""
        family = self._families.get(job)
        return None if family is None else self._page(family).open.get(job)

    def knows(self, job: bytes) -> bool:
        """Whether the job was ever promised or charged anything."""
        return job in self._families

    def ended(self, job: bytes) -> bool:
        """Whether the job is over."""
        return job in self._ended

    def charged(self, entry: Charged) -> bool:
        """Whether the first round of the entry, for its purpose, was charged before, in whichever attempt."""
        return key_of(entry) in self._events

    def paid(self, event: Event) -> bool:
        """Whether this very event was charged before.

        Raises:
            LocalProtocolError: Some of its rounds were, in another one.
        """
        known = self._events.get((event.job, event.purpose, event.first_round))
        if known == event:
            return True
        starts = self._rounds.get((event.job, event.purpose), [])
        at = bisect_left(starts, event.last_round + 1)
        before = self._events[event.job, event.purpose, starts[at - 1]] if at else None
        if before is not None and before.last_round >= event.first_round:
            raise LocalProtocolError(
                f"rounds {event.first_round} to {event.last_round} ({event.purpose}) of a job were charged before as "
                f"rounds {before.first_round} to {before.last_round}, with other numbers"
            )
        return False

    def allowed(self, family: str) -> BudgetSet:
        """What the administrator allows now.

        Raises:
            PolicyRefused: Nothing was ever said.
        """
        budget = self._page(family).budget
        if budget is None:
            raise PolicyRefused(
                f"this site has set no privacy budget for the data family {family!r}",
                fix="its administrator says what it may give away, once no agent runs here:  "
                f"parley site budget set {family} --epsilon 8 --delta 1e-5",
            )
        return budget

    def account(self, family: str, asked: BudgetSet | None = None) -> "Account":
        """The family's account, under the budget that is asked for, else under that which is set.

        Raises:
            PolicyRefused: It has no budget.
        """
        from privacy.differential_privacy.filters import Account, Reservation

        budget, page = (asked or self.allowed(family)).budget, self._page(family)
        reservations = tuple(Reservation(each.job, each.lines) for each in page.open.values())
        return Account(budget, page.events, reservations)

    def require_delta(self, family: str, more: float) -> None:
        """Returns only if rounding and sampling may add so much more to the family's delta.

        Raises:
            PolicyRefused: They would add a tenth of it or more, all jobs and promises together.
        """
        page = self._page(family)
        if page.budget is None:
            return
        total = page.added_delta + more + sum(self._owed(each) for each in page.open.values())
        if total > page.budget.delta / _ADDED:
            raise PolicyRefused(
                f"rounding and sampling would add {total:.3g} to the delta = {page.budget.delta:g} of {family!r}, "
                f"more than a {_ADDED}th of it",
                fix="set a smaller delta in the job, at most that of the site's budget",
                who=WhoActs.AUTHOR,
            )

    def _owed(self, promised: Promised) -> float:
        """What a promise's rounds to come may add to delta, taken as evenly spread over its rounds."""
        rounds = sum(line.count for line in promised.lines)
        used = sum(event.count for event in self._page(promised.family).events if event.job == promised.job)
        return promised.added_delta * max(0, rounds - used) / rounds

    # --------------------------------------------------------------------------------------------------------- entries

    def post(self, entry: Entry) -> None:
        """Takes in the next entry.

        Raises:
            LocalProtocolError: It contradicts those before it; nothing changed.
        """
        match entry:
            case BudgetSet():
                self._set(entry)
            case Promised():
                self._promise(entry)
            case Charged():
                self._charge(entry)
            case Ended(job):
                if job in self._families:
                    self._page(self._families[job]).open.pop(job, None)
                self._ended.add(job)
            case _:
                assert_never(entry)

    def _set(self, entry: BudgetSet) -> None:
        page = self._page(entry.family)
        if page.budget is not None and page.written and page.budget.fixed != entry.fixed:
            raise LocalProtocolError(f"the rule of the budget of {entry.family!r} would change after its first charge")
        self._pages.setdefault(entry.family, page).budget = entry

    def _promise(self, entry: Promised) -> None:
        if entry.job in self._families or entry.job in self._ended:
            raise LocalProtocolError("a job would be promised rounds a second time, or after its end")
        self._pages.setdefault(entry.family, _Page()).open[entry.job] = entry
        self._families[entry.job] = entry.family

    def _charge(self, entry: Charged) -> None:
        event = entry.event
        if self.paid(event):
            raise LocalProtocolError(f"round {event.first_round} ({event.purpose}) of a job would be charged twice")
        if self._families.setdefault(event.job, entry.family) != entry.family:
            raise LocalProtocolError(f"a job that reads {self._families[event.job]!r} would charge {entry.family!r}")
        page = self._pages.setdefault(entry.family, _Page())
        alike = replace(event, first_round=0, last_round=0, count=1)
        known = page.sums.get(alike)
        page.sums[alike] = event if known is None else _together(known, event)
        page.added_delta += entry.added_delta
        self._events[event.job, event.purpose, event.first_round] = event
        starts = self._rounds.setdefault((event.job, event.purpose), [])
        starts.insert(bisect_left(starts, event.first_round), event.first_round)

    def _page(self, family: str) -> _Page:
        return self._pages.get(family, _Page())


def _together(a: Event, b: Event) -> Event:
    first, last = min(a.first_round, b.first_round), max(a.last_round, b.last_round)
    return replace(a, first_round=first, last_round=last, count=a.count + b.count)


# ----------------------------------------------------------------------------------------------------- what can be paid


def payable(account: "Account", job: bytes, lines: tuple[Event, ...]) -> int:
    """How many rounds of the job, of each purpose at most so many, the budget pays beside all that it has promised.

    Raises:
        ConfigurationError: A line protects less than the budget.
        PolicyRefused: The budget's rule takes no such rounds at all.
    """
    from privacy.differential_privacy.filters import Reservation

    def pays(rounds: int) -> bool:
        cut = tuple(replace(line, count=min(line.count, rounds)) for line in lines if rounds)
        return replace(account, reservations=(*account.reservations, Reservation(job, cut))).affordable

    low, high = 0, max(line.count for line in lines)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if pays(middle) else (low, middle - 1)
    return low


def require_payable(book: Book, promised: Promised) -> None:
    """Returns only if the family's budget pays the whole job, which is not known yet.

    Raises:
        PolicyRefused: It has no budget, or one that is short: the message says how many rounds it would pay; the
            job's rate is above the site's cap, or its rounding adds too much to delta; or the job is over.
        ConfigurationError: The job protects less than the budget.
    """
    family = promised.family
    account = book.account(family)
    if book.knows(promised.job) or book.ended(promised.job):
        raise PolicyRefused("this job was promised its rounds before", fix="submit it as a new job")
    book.require_delta(family, promised.added_delta)
    try:
        account.reserve(promised.job, promised.lines)
    except PolicyRefused as refused:
        if max(line.q for line in promised.lines) > account.budget.q_most:
            raise
        asked = ", ".join(f"{line.count} ({line.purpose})" for line in promised.lines)
        rounds = payable(account, promised.job, promised.lines)
        raise PolicyRefused(
            f"the privacy budget of {family!r} (epsilon = {account.budget.rule.epsilon:g} at delta = "
            f"{account.budget.rule.delta:g}) would pay {rounds} rounds of this noise, and the job plans {asked}",
            fix=f"plan {f'at most {rounds} rounds' if rounds else 'a job with more noise'}, or more noise, or ask this "
            f"site's administrator for a larger budget (parley site budget set {family})",
            who=WhoActs.AUTHOR,
        ) from refused


def require_chargeable(book: Book, entry: Charged) -> None:
    """Returns only if a round of a job that was promised its rounds may be charged now.

    Raises:
        PolicyRefused: The budget was lowered below what is charged and promised, the rounds are used up, or noise that
            is less than promised is not paid for.
        LocalProtocolError: The job was promised nothing of the kind.
    """
    account = book.account(entry.family)
    if not account.affordable:
        rest = (event for each in account.reservations for event in each.rest(account.events))
        rule = account.budget.rule
        comes_to = rule.proved(account.budget.cost((*account.events, *rest)))
        raise PolicyRefused(
            f"what was charged and promised of {entry.family!r} comes to epsilon = {comes_to:.6g}, and its budget is "
            f"now epsilon = {rule.epsilon:g} at delta = {rule.delta:g}: no further round is charged",
            fix="end open jobs, or let this site's administrator raise the budget: "
            f"parley site budget set {entry.family}",
        )
    account.charge(entry.event)
