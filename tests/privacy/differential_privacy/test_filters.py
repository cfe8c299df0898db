import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import ndtr

from federation.errors import ConfigurationError, LocalProtocolError, PolicyRefused, WhoActs
from privacy.differential_privacy import filters
from privacy.differential_privacy.accounting import epsilon, fourier_epsilon, gaussian_mu, renyi, renyi_overhead
from privacy.differential_privacy.events import (
    EVERY_RECORD,
    Event,
    Level,
    Part,
    Population,
    Purpose,
    Releases,
    Unit,
)
from privacy.differential_privacy.filters import (
    Account,
    Budget,
    GdpFilter,
    RenyiFilter,
    best_order,
    budget_filter,
)
from privacy.differential_privacy.record import share_variance

SQUARED = 1 << 40
WHOLE = Account(Budget(budget_filter("gdp", 3.0, 1e-5)))
SAMPLED = Account(Budget(budget_filter("rdp", 3.0, 1e-5, 12)))


def plan(job: str, z: float, *, q: float = 1.0, count: int = 100, n_eff: int = 9) -> Event:
    """A job's line: rounds 0 to count - 1 with this noise."""
    return Event(
        job=job.encode(),
        first_round=0,
        last_round=count - 1,
        level=Level.RECORD_SHARED,
        unit=Unit.RECORD,
        q=q,
        v=share_variance(z, SQUARED, n_eff),
        n_eff=n_eff,
        squared=SQUARED,
        count=count,
        purpose=Purpose.TRAIN,
        population=EVERY_RECORD,
    )


def rounds(line: Event, first: int, last: int) -> Event:
    """The charge of some of a line's rounds."""
    return replace(line, first_round=first, last_round=last, count=last - first + 1)


def run(account: Account, line: Event) -> Account:
    """The account after a whole job, its first round charged by itself."""
    account = account.reserve(line.job, (line,)).charge(rounds(line, 0, 0))
    return (account.charge(rounds(line, 1, line.count - 1)) if line.count > 1 else account).close(line.job)


# ------------------------------------------------------------------------------------------- the rules, and one refused


@pytest.mark.parametrize(("account", "q", "count"), [(WHOLE, 1.0, 20), (SAMPLED, 0.1, 200)])
def test_adaptive_filter(account: Account, q: float, count: int) -> None:
    """Jobs that are each chosen by what was spent before are stopped at the budget, and never above it."""
    refused = 0
    for number in range(60):
        z = 4.0 + 9 * (math.sin(number) + account.proved / 3)  # any function of the past
        line = plan(f"job {number}", max(1.5, z), q=q, count=count)
        try:
            account = run(account, line)
        except PolicyRefused:
            refused += 1
        assert account.proved <= 3.0
    assert refused > 20
    assert account.proved > 2.5
    assert account.budget.cost(account.events) <= account.budget.rule.limit


def test_filters_spend_exactly_the_budget() -> None:
    """Noise for the very budget is paid for, in whole batches and at one order; a millionth less of it is not."""
    z = math.sqrt(100) / gaussian_mu(3, 1e-5) * (1 + 1e-9)
    assert run(WHOLE, plan("job", z)).proved == pytest.approx(3, rel=1e-6)
    with pytest.raises(
        PolicyRefused, match=r"budget of epsilon = 3 at delta = 1e-05 is short of the whole job: 100 rou"
    ):
        WHOLE.reserve(b"job", (plan("job", z * (1 - 1e-6)),))
    limit = SAMPLED.budget.rule.limit
    z = brentq(lambda each: 100 * renyi(0.1, each, 12) - limit, 0.5, 20) * (1 + 1e-9)
    assert run(SAMPLED, plan("job", z, q=0.1)).proved == pytest.approx(3, rel=1e-6)
    with pytest.raises(PolicyRefused, match="is short of the whole job"):
        SAMPLED.reserve(b"job", (plan("job", z * (1 - 1e-6), q=0.1),))


def test_filter_sums_are_those_of_their_papers() -> None:
    """Sum count/z^2 against mu^2, and Sum R(order) against epsilon - [ln(1 - 1/a) - ln(delta a)/(a - 1)]."""
    releases = (Releases(1.0, 10.0, 7), Releases(1.0, 20.0, 4))
    assert WHOLE.budget.rule.cost(releases) == pytest.approx(0.08, rel=1e-12)
    assert WHOLE.budget.rule.limit == pytest.approx(gaussian_mu(3, 1e-5) ** 2, rel=1e-9)
    assert SAMPLED.budget.rule.cost(releases) == pytest.approx(12 * 0.08 / 2, rel=1e-12)
    assert SAMPLED.budget.rule.limit == pytest.approx(3 - (math.log(1 - 1 / 12) - math.log(12e-5) / 11), rel=1e-12)


def _sampled_delta(z: float, eps: np.ndarray, q: float) -> np.ndarray:
    """The delta of one sampled release, the record removed, at any epsilon: closed form."""
    found = -np.expm1(np.minimum(eps, 0))
    above = eps > math.log1p(-q)
    x = z * (np.log(np.expm1(eps[above]) + q) - math.log(q)) + 1 / (2 * z)
    found[above] = (1 - q) * ndtr(-x) + q * ndtr(1 / z - x) - np.exp(eps[above]) * ndtr(-x)
    return found


def _whole_delta(z: float, eps: np.ndarray) -> np.ndarray:
    return np.asarray(ndtr(1 / (2 * z) - eps * z) - np.exp(eps) * ndtr(-1 / (2 * z) - eps * z))


FIRST, RATE, EPS, DELTA = 5.0, 0.01, 1.0, 1e-5
"""A first job of one whole batch at this z; then either a sampled batch or a whole one."""

_SEEN = 1 / FIRST * np.linspace(-9, 9, 4001) + 1 / (2 * FIRST**2)
_CHANCE = np.exp(-(np.linspace(-9, 9, 4001) ** 2) / 2) / np.exp(-(np.linspace(-9, 9, 4001) ** 2) / 2).sum()
"""The first job's loss, which its output shows, and how likely it is where the record was present."""


def _after(sampled: float, whole: float) -> tuple[float, float, float]:
    """Delta at EPS: always the sampled job second, always the whole one, or whichever costs more by then."""
    costs = _sampled_delta(sampled, EPS - _SEEN, RATE), _whole_delta(whole, EPS - _SEEN)
    return tuple(float((_CHANCE * each).sum()) for each in (*costs, np.maximum(*costs)))


def test_stopping_at_a_loss_distribution_would_be_invalid() -> None:
    """Two continuations, each worth exactly the budget by its composed distribution: choosing between them costs more.

    So a rule that asks whether the composed PLD is within the budget admits either and is broken by 80 % in delta. The
    filters refuse at least one of them.
    """
    whole = 1 / math.sqrt(gaussian_mu(EPS, DELTA) ** 2 - 1 / FIRST**2)
    sampled = brentq(lambda z: _after(z, whole)[0] - DELTA, 0.2, 10, xtol=1e-15, rtol=1e-13)
    first = Releases(1.0, FIRST, 1)
    for second in (Releases(RATE, sampled, 1), Releases(1.0, whole, 1)):
        assert fourier_epsilon((first, second), DELTA) == pytest.approx(EPS, rel=1e-5)
    one, other, chosen = _after(sampled, whole)
    assert (one, other) == (pytest.approx(DELTA, rel=1e-6), pytest.approx(DELTA, rel=1e-6))
    assert chosen > 1.8 * DELTA

    account = Account(Budget(budget_filter("rdp", EPS, DELTA, 14)))
    spent = run(account, plan("first", FIRST, count=1))
    with pytest.raises(PolicyRefused, match="is short of the whole job"):
        spent.reserve(b"second", (plan("second", sampled, q=RATE, count=1),))


def test_choosing_within_a_renyi_filter_stays_within_the_budget() -> None:
    """The same choice between two jobs that one order admits to the last: delta holds, whichever is chosen when."""
    order = 14
    left = EPS - renyi_overhead(order, DELTA) - renyi(1.0, FIRST, order)
    sampled = brentq(lambda z: renyi(RATE, z, order) - left, 0.2, 10)
    whole = math.sqrt(order / (2 * left))
    assert max(_after(sampled, whole)) <= DELTA


def test_no_filter_asks_a_loss_distribution() -> None:
    """The rule across jobs has no way to a PLD: its module names none of the accountants of one."""
    text = Path(filters.__file__).read_text(encoding="utf-8")
    assert not any(name in text for name in ("pld_epsilon", "fourier_epsilon", "dp_accounting"))


@pytest.mark.parametrize(
    ("name", "order", "message"),
    [
        ("pld", None, "is no rule to stop at across jobs.*choose filter gdp where all jobs have q = 1, else rdp"),
        ("pld", 12, "is no rule to stop at across jobs"),
        ("epsilon", None, "there is no filter 'epsilon'"),
        ("gdp", 12, "filter gdp with order 12: gdp takes none"),
        ("rdp", None, "filter rdp with order None: gdp takes none, and rdp one of 2 to 256"),
        ("rdp", 257, "filter rdp with order 257"),
        ("rdp", 12.5, r"filter rdp with order 12\.5"),
        ("rdp", 3, "at Rényi order 3 an epsilon of 3 at delta = 1e-05 leaves nothing to spend.*a higher order"),
    ],
)
def test_filters_that_hold_nothing_are_refused(name: str, order: int | None, message: str) -> None:
    """A site's administrator reads why a rule is none, and which to take."""
    with pytest.raises(ConfigurationError, match=message) as refused:
        budget_filter(name, 3.0, 1e-5, order)
    assert refused.value.who is WhoActs.SITE


@pytest.mark.parametrize(("eps", "delta"), [(0.0, 1e-5), (math.inf, 1e-5), (3.0, 0.0)])
def test_budgets_that_are_none_are_refused(eps: float, delta: float) -> None:
    """A budget is finite and positive, in both numbers."""
    with pytest.raises(ConfigurationError, match=r"is no privacy budget|is no probability"):
        budget_filter("gdp", eps, delta)


def test_filters_are_values() -> None:
    """What is fixed at enrolment is two numbers and a name, or three."""
    assert budget_filter("gdp", 3.0, 1e-5) == GdpFilter(3.0, 1e-5)
    assert budget_filter("rdp", 3.0, 1e-5, 12) == RenyiFilter(3.0, 1e-5, 12)


def test_order_is_the_best_for_the_declared_plan() -> None:
    """For the reference plan it is 12; an empty plan has none."""
    planned = (plan("a", 1.4146195, q=0.01, count=1000), plan("b", 37.306316, count=100))
    assert best_order(planned, 1e-5) == 12
    with pytest.raises(ConfigurationError, match="there are none"):
        best_order((), 1e-5)


def test_what_is_proved_is_the_adaptive_number() -> None:
    """The spent epsilon of a filter is above the number that fixed parameters would have, at the enrolled order."""
    both = plan("a", 1.4146195, q=0.01, count=1000), plan("b", 37.306316, count=100)
    account = SAMPLED
    for line in both:
        account = account.reserve(line.job, (line,)).charge(line).close(line.job)
    assert account.proved == pytest.approx(1.588209, abs=2e-6)
    assert account.proved > epsilon(tuple(line.releases for line in both), 1e-5).value
    assert Account(SAMPLED.budget).proved == Account(WHOLE.budget).proved == 0


# ------------------------------------------------------------------------------------ reserving, charging, releasing


def test_a_job_is_reserved_whole_and_released_to_what_was_charged() -> None:
    """Half a budget twice fits, a third does not; once a job ends early, what it did not use is there again."""
    z = math.sqrt(200) / gaussian_mu(3, 1e-5) * (1 + 1e-9)
    first, second, third = (plan(name, z) for name in "abc")
    account = WHOLE.reserve(b"a", (first,)).reserve(b"b", (second,))
    assert account.proved == 0
    with pytest.raises(PolicyRefused, match="is short of the whole job"):
        account.reserve(b"c", (third,))
    for number in range(50):
        account = account.charge(rounds(first, number, number))
    with pytest.raises(PolicyRefused, match="is short of the whole job"):
        account.reserve(b"c", (replace(third, count=50),))
    account = account.close(b"a").reserve(b"c", (replace(third, count=50),))
    assert account.budget.cost(account.events) == pytest.approx(account.budget.rule.limit / 4, rel=1e-6)


def test_nothing_is_refunded() -> None:
    """Closing, and closing again, changes nothing of what was charged; no event ever leaves the account."""
    line = plan("a", 40.0)
    account = WHOLE.reserve(b"a", (line,)).charge(rounds(line, 0, 9))
    closed = account.close(b"a")
    assert (closed.events, closed.proved) == (account.events, account.proved)
    assert closed.close(b"a") == closed


def test_fail_closed_when_all_rounds_are_used() -> None:
    """After T rounds a job is charged no further round, whatever the budget has left."""
    line = plan("a", 400.0, count=3)
    account = WHOLE.reserve(b"a", (line,)).charge(rounds(line, 0, 2))
    with pytest.raises(PolicyRefused, match=r"all 3 rounds that the job was promised for train are used.*a new job"):
        account.charge(rounds(line, 2, 2))


def test_fail_closed_above_the_sites_rate() -> None:
    """A job's q above the site's cap is refused before anything is reserved."""
    account = Account(replace(SAMPLED.budget, q_most=0.02))
    assert account.reserve(b"a", (plan("a", 40.0, q=0.02),)).reservations
    with pytest.raises(PolicyRefused, match=r"q = 0\.03, and this site allows at most 0\.02") as refused:
        account.reserve(b"a", (plan("a", 40.0, q=0.03),))
    assert refused.value.who is WhoActs.SITE


def test_fail_closed_on_sampling_under_a_whole_batch_filter() -> None:
    """A budget that was enrolled for whole batches does not turn into another rule at a later job's wish."""
    with pytest.raises(PolicyRefused, match=r"whole batches only.*enrol a data set with filter rdp"):
        WHOLE.reserve(b"a", (plan("a", 40.0, q=0.5),))


@pytest.mark.parametrize(
    "changed",
    [
        {"job": b"other"},
        {"purpose": Purpose.EVALUATION},
        {"population": Population("split", Part.TRAIN)},
        {"unit": Unit.PERSON},
        {"q": 0.02},
        {"v": share_variance(35.0, SQUARED, 9)},
        {"last_round": 100},
    ],
)
def test_a_charge_outside_its_reservation_is_refused(changed: dict[str, object]) -> None:
    """Another job, purpose, population, unit, a larger q, less noise, or a later round was promised nothing."""
    line = plan("a", 40.0, q=0.01)
    account = SAMPLED.reserve(b"a", (line,))
    assert account.charge(rounds(line, 0, 0)).events
    with pytest.raises(LocalProtocolError, match=r"no reservation covers.*reserve the whole job"):
        account.charge(replace(rounds(line, 0, 0), **changed))


def test_rounds_over_more_sites_are_of_the_same_line() -> None:
    """The share's variance follows the sites of each attempt, and z stays: such rounds are charged to one line."""
    line, more = plan("a", 40.0), plan("a", 40.0, n_eff=12)
    account = WHOLE.reserve(b"a", (line,)).charge(rounds(more, 0, 0)).charge(rounds(line, 1, 1))
    assert account.affordable
    assert [event.n_eff for event in account.events] == [12, 9]


def test_a_round_that_costs_more_than_promised_needs_budget() -> None:
    """On a coarse grid rounding moves z a little; where the budget has no room for that, the round is refused."""
    squared = 4
    line = replace(plan("a", 8.0), squared=squared, v=share_variance(8.0, squared, 2) + 1, n_eff=2)
    weaker = replace(rounds(line, 0, 0), v=line.v - 1)
    tight = budget_filter("gdp", WHOLE.budget.rule.proved(100 / line.z**2) * (1 + 1e-9), 1e-5)
    account = Account(Budget(tight)).reserve(b"a", (line,))
    assert account.charge(rounds(line, 0, 0)).events
    with pytest.raises(PolicyRefused, match="does not pay for this round's noise"):
        account.charge(weaker)


def test_a_job_is_reserved_once() -> None:
    """Neither an open job nor one that was charged is promised rounds again."""
    line = plan("a", 400.0)
    account = WHOLE.reserve(b"a", (line,))
    for known in (account, account.charge(rounds(line, 0, 0)).close(b"a")):
        with pytest.raises(PolicyRefused, match="was promised its rounds before"):
            known.reserve(b"a", (line,))
    assert account.close(b"a").reserve(b"a", (line,)) == account


@pytest.mark.parametrize("lines", [(), (plan("a", 40.0), plan("a", 50.0)), (plan("b", 40.0),)])
def test_a_reservation_is_one_jobs_lines(lines: tuple[Event, ...]) -> None:
    """No lines, two for one purpose, or another job's are no reservation."""
    with pytest.raises(ConfigurationError, match="one line for each purpose and population of one job"):
        WHOLE.reserve(b"a", lines)


def test_train_and_test_records_pay_apart() -> None:
    """A budget is that of one record: training and evaluating, on two sides of one split, each may use all of it."""
    z = math.sqrt(100) / gaussian_mu(3, 1e-5) * (1 + 1e-9)
    train = replace(plan("a", z), population=Population("split", Part.TRAIN))
    test = replace(train, purpose=Purpose.EVALUATION, population=Population("split", Part.TEST))
    account = WHOLE.reserve(b"a", (train, test)).charge(train).charge(test)
    assert account.proved == pytest.approx(3, rel=1e-6)
    with pytest.raises(PolicyRefused, match="is short of the whole job"):
        WHOLE.reserve(b"a", (train, replace(test, population=Population("other split", Part.TEST))))


def test_a_budget_for_people_takes_no_jobs_that_protect_records() -> None:
    """What protects a single record says nothing of a person's, and is refused by name."""
    with pytest.raises(ConfigurationError, match="protects one record, which says nothing of one person"):
        Account(replace(WHOLE.budget, unit=Unit.PERSON)).reserve(b"a", (plan("a", 40.0),))
