"""What a data family has spent of its privacy budget: by job, over time, and how many rounds more it could pay."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from scipy.optimize import brentq

from federation.errors import ConfigurationError, WhoActs
from privacy.differential_privacy.accounting import ORDERS, gaussian_mu, renyi_epsilon, renyi_overhead
from privacy.differential_privacy.events import Event, Releases
from privacy.differential_privacy.filters import Account
from privacy.ledger import Book, BudgetSet, payable
from privacy.ledger_chain import Line

__all__ = ["Moment", "Spending", "SpentByJob", "order_for", "over_time", "spending"]

_ANOTHER = b"another job"
_MOST_MORE = 1_000_000
"""Rounds that are counted at most: where the budget pays so many, it is no limit."""


@dataclass(frozen=True, slots=True)
class SpentByJob:
    """What one job was charged with rounds of one kind.

    Attributes:
        event: Such rounds.
        charged: How many were charged; 0 for a job that was promised some and has not begun.
        promised: Rounds that it may still charge; 0 for a job that is over.
        epsilon: What they cost by themselves, at the budget's delta.
        more: Rounds like them that the budget pays another job beside all that is promised; at most a million.
    """

    event: Event
    charged: int
    promised: int
    epsilon: float
    more: int


@dataclass(frozen=True, slots=True)
class Spending:
    """Where a data family's budget stands.

    Epsilons do not add up; what the budget's rule sums does, so shares are of that.

    Attributes:
        family: The data family.
        budget: What it is allowed.
        epsilon: What all charges come to, however jobs were chosen.
        epsilon_promised: The same, once open jobs have charged all that they were promised.
        used: The share of the budget that is charged.
        taken: The share that is charged or promised; above 1 no further round is charged.
        added_delta: What rounding and sampling have added to delta.
        jobs: Each job, in the order in which they were first charged; jobs that were only promised rounds come last.
    """

    family: str
    budget: BudgetSet
    epsilon: float
    epsilon_promised: float
    used: float
    taken: float
    added_delta: float
    jobs: tuple[SpentByJob, ...]


def spending(book: Book, family: str, asked: BudgetSet | None = None) -> Spending:
    """Where the family's budget stands, or would stand if it were the one that is asked for.

    Raises:
        PolicyRefused: It has none.
        ConfigurationError: A charge protects less than the budget.
    """
    budget = asked or book.allowed(family)
    account = book.account(family, budget)
    rule, promised = account.budget.rule, _promised(account)
    spent, taken = (account.budget.cost(each) for each in (account.events, (*account.events, *promised)))
    return Spending(
        family,
        budget,
        rule.proved(spent),
        rule.proved(taken),
        spent / rule.limit,
        taken / rule.limit,
        book.added_delta(family),
        tuple(_by_job(account, promised)),
    )


def _promised(account: Account) -> tuple[Event, ...]:
    """The rounds that open jobs may still charge."""
    return tuple(event for each in account.reservations for event in each.rest(account.events))


def _by_job(account: Account, promised: tuple[Event, ...]) -> Iterator[SpentByJob]:
    left = {(each.job, each.purpose, each.population): each for each in promised}
    for event in account.events:
        rest = left.pop((event.job, event.purpose, event.population), None)
        yield _row(account, event, event.count, 0 if rest is None else rest.count)
    for rest in left.values():
        yield _row(account, rest, 0, rest.count)


def _row(account: Account, event: Event, charged: int, promised: int) -> SpentByJob:
    alone = account.budget.rule.proved(account.budget.cost((event,))) if charged else 0.0
    alike = replace(event, job=_ANOTHER, first_round=0, last_round=_MOST_MORE - 1, count=_MOST_MORE)
    return SpentByJob(event, charged, promised, alone, payable(account, _ANOTHER, (alike,)))


@dataclass(frozen=True, slots=True)
class Moment:
    """A data family after one line of its ledger.

    Attributes:
        at: Unix seconds, never before those of an earlier line: a clock that was set back does not bend the curve.
        epsilon: What was charged by then comes to.
        allowed: The budget's epsilon then.
    """

    at: float
    epsilon: float
    allowed: float


def over_time(lines: Iterable[Line], family: str) -> Iterator[Moment]:
    """The family after each line that is about it, from its first budget on."""
    book, at = Book(), 0.0
    for line in lines:
        before = len(book.events(family)), book.rounds(family), book.budget(family)
        book.post(line.entry)
        at = max(at, line.at)
        budget = book.budget(family)
        if budget is not None and before != (len(book.events(family)), book.rounds(family), budget):
            yield Moment(at, book.account(family).proved, budget.epsilon)


def order_for(epsilon: float, delta: float, rate: float, steps: int) -> int:
    """The Rényi order that lets `steps` steps at this record rate use the whole budget with the least noise.

    Raises:
        ConfigurationError: The numbers are no budget, or no plan, or no order leaves anything of the budget.
    """
    _ = gaussian_mu(epsilon, delta)
    if min(renyi_overhead(order, delta) for order in ORDERS) >= epsilon:
        raise ConfigurationError(
            f"an epsilon of {epsilon:g} at delta = {delta:g} leaves nothing to spend at any Rényi order",
            fix="choose rule gdp, or a larger epsilon",
            who=WhoActs.SITE,
        )

    def excess(z: float) -> float:
        return renyi_epsilon((Releases(rate, z, steps),), delta)[0] - epsilon

    most = 2.0
    while excess(most) > 0:
        most *= 2
    low = most
    while low > 1 / 64 and excess(low) <= 0:
        low /= 2
    z = brentq(excess, low, most, rtol=1e-6) if excess(low) > 0 else low
    return renyi_epsilon((Releases(rate, z, steps),), delta)[1]
