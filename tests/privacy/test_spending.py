from dataclasses import replace

import pytest

from federation.errors import ConfigurationError, PolicyRefused
from privacy import ledger
from privacy.differential_privacy.accounting import ORDERS, renyi_epsilon
from privacy.differential_privacy.events import Purpose, Releases
from privacy.ledger import Book, Charged, Ended, Entry
from privacy.ledger_chain import Line, walk
from privacy.spending import order_for, over_time, spending
from tests.privacy.test_ledger import GDP, RDP, job, rounds
from tests.privacy.test_ledger_chain import chained

FIRST, SECOND = job(b"first", 100), job(b"second", 50, 20.0)
SPENT: tuple[Entry, ...] = (
    GDP,
    FIRST,
    Charged("hearts", rounds(0, 9, FIRST.lines[0]), 1e-9),
    Ended(b"first"),
    SECOND,
    Charged("hearts", rounds(0, 0, SECOND.lines[0])),
    Charged("hearts", rounds(1, 1, SECOND.lines[0])),
)


def test_what_is_spent_is_told_by_job() -> None:
    """Rounds, what they cost by themselves, what is still promised; shares add up, epsilons need not."""
    found = spending(Book(SPENT), "hearts")
    first, second = found.jobs
    assert [(each.event.job, each.charged, each.promised) for each in found.jobs] == [
        (b"first", 10, 0),
        (b"second", 2, 48),
    ]
    rule = GDP.budget.rule
    costs = [10 / first.event.z**2, 2 / second.event.z**2, 48 / second.event.z**2]
    assert found.used == pytest.approx(sum(costs[:2]) / rule.limit)
    assert found.taken == pytest.approx(sum(costs) / rule.limit)
    assert (found.epsilon, found.epsilon_promised) == (
        pytest.approx(rule.proved(sum(costs[:2]))),
        pytest.approx(rule.proved(sum(costs))),
    )
    assert first.epsilon == pytest.approx(rule.proved(costs[0]))
    assert first.epsilon + second.epsilon > found.epsilon
    assert found.added_delta == 1e-9


def test_rounds_that_could_still_be_paid_are_counted() -> None:
    """Beside all that is promised, for another job with the same noise: one more is refused."""
    book = Book(SPENT)
    first, _ = spending(book, "hearts").jobs
    ledger.require_payable(book, job(b"third", first.more))
    with pytest.raises(PolicyRefused, match=f"would pay {first.more} rounds"):
        ledger.require_payable(book, job(b"third", first.more + 1))


def test_a_job_that_has_not_begun_is_listed() -> None:
    """With what it was promised, and nothing spent."""
    evaluation = replace(FIRST, lines=(*FIRST.lines, replace(FIRST.lines[0], purpose=Purpose.EVALUATION, count=7)))
    found = spending(Book((GDP, evaluation)), "hearts")
    assert [(each.event.purpose, each.charged, each.promised, each.epsilon) for each in found.jobs] == [
        (Purpose.TRAIN, 0, 100, 0.0),
        (Purpose.EVALUATION, 0, 7, 0.0),
    ]
    assert (found.used, found.epsilon) == (0.0, 0.0)
    assert found.taken > 0


def test_a_budget_can_be_tried_before_it_is_set() -> None:
    """A lower one shows what it would stop."""
    book = Book(SPENT)
    assert spending(book, "hearts", replace(GDP, epsilon=0.1)).taken > 1
    assert spending(book, "hearts").taken < 1
    assert book.budget("hearts") == GDP


def test_a_family_without_a_budget_has_no_share() -> None:
    """It is said how to set one."""
    with pytest.raises(PolicyRefused, match="has set no privacy budget for the data family 'lungs'"):
        spending(Book(SPENT), "lungs")


def test_epsilon_over_time_rises_and_follows_the_budget() -> None:
    """A point for each line that is about the family and changes something; a clock set back bends nothing."""
    entries = (*SPENT, replace(GDP, family="lungs"), replace(GDP, epsilon=4.0, reason="more"))
    lines = [each for each in walk(chained(entries, lambda number: 50.0 - (number == 6))) if isinstance(each, Line)]
    found = list(over_time(lines, "hearts"))
    assert [each.at for each in found] == [50.0] * 5
    assert [each.allowed for each in found] == [3.0, 3.0, 3.0, 3.0, 4.0]
    values = [each.epsilon for each in found]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (0.0, spending(Book(SPENT), "hearts").epsilon)
    assert [each.allowed for each in over_time(lines, "lungs")] == [3.0]


@pytest.mark.parametrize(
    ("plan", "order"), [((8.0, 1e-5, 0.05, 500), 4), ((3.0, 1e-5, 0.05, 500), 7), ((1.0, 1e-5, 0.05, 500), 18)]
)
def test_the_order_is_that_of_a_plan_that_uses_the_whole_budget(
    plan: tuple[float, float, float, int], order: int
) -> None:
    """At it the planned job needs less noise than at its neighbours."""
    assert order_for(*plan) == order
    epsilon, delta, rate, steps = plan

    def pays(at: int, z: float) -> bool:
        budget = replace(RDP, epsilon=epsilon, delta=delta, order=at).budget
        return budget.rule.cost((Releases(rate, z, steps),)) <= budget.rule.limit

    z = next(each / 1000 for each in range(500, 20_000) if pays(order, each / 1000))
    assert not any(pays(each, z * 0.99) for each in (order - 1, order, order + 1))
    assert renyi_epsilon((Releases(rate, z, steps),), delta)[0] == pytest.approx(epsilon, rel=0.01)


@pytest.mark.parametrize("plan", [(100.0, 1e-5, 0.5, 50), (0.05, 1e-7, 1.0, 1), (3.0, 1e-5, 1e-6, 1)])
def test_any_plan_has_an_order(plan: tuple[float, float, float, int]) -> None:
    """However much or little it asks for."""
    assert order_for(*plan) in ORDERS


def test_a_budget_that_no_order_can_prove_anything_within_is_refused() -> None:
    """The other rule can."""
    with pytest.raises(
        ConfigurationError, match=r"an epsilon of 0\.01 at delta = 1e-07 leaves nothing.*choose rule gdp"
    ):
        order_for(0.01, 1e-7, 1.0, 1)
