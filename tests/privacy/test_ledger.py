from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import ConfigurationError, LocalProtocolError, PolicyRefused, WhoActs
from privacy import ledger
from privacy.differential_privacy.events import EVERY_RECORD, Event, Level, Part, Population, Purpose
from privacy.differential_privacy.events import Unit as Protected
from privacy.differential_privacy.filters import Account
from privacy.differential_privacy.record import Dither, Exact, Grid, beta_of, share_variance
from privacy.differential_privacy.site_level import SiteMechanism
from privacy.ledger import Book, BudgetSet, Charged, Ended, Entry, Promised
from privacy.secure_aggregation.rostersum.durable import Charge, Job
from privacy.secure_aggregation.rostersum.terms import (
    Churn,
    DpCodec,
    Kind,
    Mechanism,
    Noise,
    Path,
    Plan,
    RecordCodec,
    Unit,
)
from tests.privacy.secure_aggregation.rostersum.conftest import STAT, TRAIN, consortium_of

SITE = replace(
    TRAIN, churn=Churn.DP, codec=DpCodec(8), dp=Noise(Unit.SITE, Mechanism.DDGAUSS, 1.0, 4096.0, 8.0, 1e-6, 10)
)
"""Updates, of which a whole site is protected."""
RECORD = replace(
    SITE,
    plan_id=2,
    codec=RecordCodec(8, Path.EXACT, 1e6, 1000),
    dp=Noise(Unit.RECORD, Mechanism.DDGAUSS, 1.0, 4096.0, 20.0, 1e-6, 10),
)
"""Sums of gradients, of which a record is protected."""
EVAL = replace(RECORD, plan_id=3, kind=Kind.EVAL)
GDP = BudgetSet("hearts", 3.0, 1e-5, None, reason="first")
RDP = BudgetSet("hearts", 3.0, 1e-5, 12, reason="first")
LINE = Event(
    b"j", 0, 99, Level.RECORD_SITE, Protected.RECORD, 1.0, 1600 << 40, 1, 1 << 40, 100, Purpose.TRAIN, EVERY_RECORD
)
"""A hundred rounds with z = 40."""


def charge(plan: Plan, r: int = 1, members: int = 5, c_max: int = 1, rounds: int = 1) -> Charge:
    """A round of a plan."""
    return Charge("hearts", b"j" * 32, r, plan, members, c_max, rounds)


def rounds(first: int, last: int, line: Event = LINE) -> Event:
    """Some of a line's rounds."""
    return replace(line, first_round=first, last_round=last, count=last - first + 1)


def job(name: bytes, count: int, z: float = 40.0) -> Promised:
    """A job of so many rounds with this noise."""
    return Promised(
        "hearts", name, (replace(LINE, job=name, count=count, last_round=count - 1, v=share_variance(z, 1 << 40, 1)),)
    )


# ----------------------------------------------------------------------------------------- what a round is charged with


@pytest.mark.parametrize("members", [3, 4, 10])
@pytest.mark.parametrize("c_max", [0, 1])
def test_a_round_that_protects_sites_is_charged_in_its_integers(members: int, c_max: int) -> None:
    """The sensitivity that rounding is checked against, and the variance that shares are drawn with."""
    mechanism, n_eff = SiteMechanism(8, 1.0, 4096.0, 8.0), members - 1
    event = ledger.charged(charge(SITE, 7, members, c_max)).event
    assert (event.squared, event.v, event.n_eff) == (mechanism.squared, mechanism.share_variance(n_eff), n_eff)
    assert (event.level, event.unit, event.q) == (Level.SITE, Protected.SITE, 1.0)
    assert (event.job, event.first_round, event.last_round, event.count) == (b"j" * 32, 7, 7, 1)
    assert 7.99 < event.z < 8  # below the job's z, since rounding lets an update grow


@pytest.mark.parametrize(
    ("path", "rounding", "parts"), [(Path.EXACT, Exact(), 1), (Path.DITHER, Dither(8, beta_of(1e-6, 10)), 2)]
)
def test_a_round_that_protects_records_is_charged_in_its_integers(
    path: Path, rounding: Exact | Dither, parts: int
) -> None:
    """Those of its grid; without a rate, as if all records were read. Dither and sampler add to delta in each round."""
    plan = replace(RECORD, codec=replace(RECORD.codec, path=path))
    found = ledger.charged(charge(plan, members=6, c_max=2))
    grid, event = Grid(rounding, 1.0, 4096.0, 10**6), found.event
    assert (event.squared, event.n_eff) == (grid.squared, 4)
    assert event.v == share_variance(20.0, grid.squared, 4)
    assert (event.level, event.unit, event.q) == (Level.RECORD_SHARED, Protected.RECORD, 1.0)
    assert event.population == EVERY_RECORD
    assert found.added_delta == pytest.approx(parts * 1e-6 / 1000 / 10)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (TRAIN, "plan 1 has no noise to charge.*choose churn dp"),
        (replace(SITE, codec=TRAIN.codec), "no event holds for noise on codec train"),
        (replace(STAT, churn=Churn.DP, dp=SITE.dp), "no event holds for noise on codec fields"),
        (
            replace(SITE, dp=Noise(Unit.SITE, Mechanism.SKELLAM, 1.0, 4096.0, 8.0, 1e-6, 10)),
            "no accountant of this release holds for skellam noise.*choose mechanism ddgauss",
        ),
        (
            replace(SITE, dp=Noise(Unit.SITE, Mechanism.DDGAUSS, 1.0, 4.0, 1.0, 1e-6, 10)),
            "a noise share of variance 4 is below 64",
        ),
    ],
)
def test_noise_of_which_nothing_is_proved_is_no_event(plan: Plan, message: str) -> None:
    """It is refused by name, and not charged as something else."""
    with pytest.raises(ConfigurationError, match=message):
        ledger.charged(charge(plan))


def test_too_few_shares_are_no_event() -> None:
    """Of three sites with two colluding ones a single share is left."""
    with pytest.raises(ConfigurationError, match="of 3 sites' noise shares 2 may be known"):
        ledger.charged(charge(SITE, members=3, c_max=2))


def test_a_whole_job_is_promised_at_the_set_that_costs_most() -> None:
    """Rounding variances up makes sets of some sizes cheaper by a hair: no round costs more than was promised."""
    plan = replace(SITE, m_min=3, dp=replace(SITE.dp, scale=64.0, z=1.0))  # a coarse grid, where rounding is seen
    terms = consortium_of(9, (TRAIN, plan, STAT)).terms
    found = ledger.promise(terms, "hearts")
    assert found is not None
    (line,) = found.lines
    singles = [ledger.charged(charge(plan, members=members)).event.z for members in range(3, 10)]
    assert line.z == min(singles)
    assert len(set(singles)) > 1
    assert (found.family, found.job, line.count) == ("hearts", terms.job_hash, 10)
    assert (line.first_round, line.last_round) == (0, 2**64 - 1)
    assert found.added_delta == pytest.approx(1e-6 / 1000)


def test_jobs_of_exact_sums_are_promised_nothing() -> None:
    """Neither by themselves, nor among others."""
    exact, noisy = consortium_of(3, (TRAIN, STAT)).terms, consortium_of(5, (SITE,)).terms
    assert ledger.promise(exact, "hearts") is None
    jobs = [Job(terms.job_hash, 0, terms.encode(), "hearts", b"t" * 32) for terms in (exact, noisy)]
    assert list(ledger.promised(jobs)) == [ledger.promise(noisy, "hearts")]


def test_evaluation_is_charged() -> None:
    """Evaluations and statistics with noise are events of their own; tuning charges each run; stopping saves the rest.

    What has no noise is no event: it cannot be charged, and so it is not released as if it were.
    """
    stat = replace(RECORD, plan_id=4, kind=Kind.STAT)
    found = ledger.promise(consortium_of(5, (RECORD, EVAL, stat)).terms, "hearts")
    assert found is not None
    assert [line.purpose for line in found.lines] == [Purpose.TRAIN, Purpose.EVALUATION, Purpose.STATISTICS]
    alone = ledger.promise(consortium_of(5, (RECORD,)).terms, "hearts")
    assert alone is not None
    accounts = []
    for promised in (found, alone):
        ran = [Charged("hearts", replace(line, last_round=line.count - 1)) for line in promised.lines]
        accounts.append(Book((GDP, promised, *ran)).account("hearts"))
    costs = [account.budget.cost(account.events) for account in accounts]
    assert costs[0] == pytest.approx(3 * costs[1])

    book = Book((GDP,))
    for run in range(3):  # hyper-parameters are tried, and two models thrown away
        name = b"run %d" % run
        book.post(job(name, 20))
        book.post(Charged("hearts", replace(rounds(0, 7), job=name)))  # stopped early
        book.post(Ended(name))
    assert book.rounds("hearts") == 24
    assert book.promises("hearts") == ()
    assert book.account("hearts").affordable
    with pytest.raises(ConfigurationError, match="plan 2 has no noise to charge"):
        ledger.charged(charge(STAT))


# ------------------------------------------------------------------------------------------------------------- the book


def test_the_book_knows_what_it_was_told() -> None:
    """Budget, promise, charges, added delta; an end releases the promise and nothing else."""
    book = Book((GDP, replace(job(b"j", 100), added_delta=1e-8), Charged("hearts", rounds(0, 4), 5e-10)))
    assert (book.families, book.budget("hearts"), book.budget("lungs")) == (("hearts",), GDP, None)
    assert book.promise(b"j") == book.promises("hearts")[0]
    assert (book.rounds("hearts"), book.added_delta("hearts"), book.knows(b"j")) == (5, 5e-10, True)
    spent = book.account("hearts").proved
    book.post(Ended(b"j"))
    assert (book.promise(b"j"), book.promises("hearts"), book.ended(b"j")) == (None, (), True)
    assert (book.rounds("hearts"), book.account("hearts").proved) == (5, spent)


CONTRADICTIONS: dict[str, tuple[Entry, str]] = {
    "charged again": (Charged("hearts", rounds(0, 4)), r"round 0 \(train\) of a job would be charged twice"),
    "with other noise": (Charged("hearts", replace(rounds(0, 4), v=1 << 50)), "with other numbers"),
    "overlapping from below": (Charged("hearts", rounds(4, 9)), "rounds 4 to 9.*charged before as rounds 0 to 4"),
    "overlapping from above": (Charged("hearts", rounds(19, 25)), "rounds 19 to 25.*charged before as rounds 20 to 29"),
    "around": (Charged("hearts", rounds(6, 40)), "rounds 6 to 40.*charged before as rounds 20 to 29"),
    "within": (Charged("hearts", rounds(21, 22)), "rounds 21 to 22.*charged before as rounds 20 to 29"),
    "another family": (Charged("lungs", rounds(50, 50)), "a job that reads 'hearts' would charge 'lungs'"),
    "promised again": (job(b"j", 100), "promised rounds a second time"),
    "promised after its end": (job(b"over", 1), "promised rounds a second time, or after its end"),
    "another rule": (replace(GDP, order=8), "the rule of the budget of 'hearts' would change"),
    "another unit": (replace(GDP, unit=Protected.SITE), "the rule of the budget of 'hearts' would change"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_contradicts_the_book_is_refused(case: str) -> None:
    """And changes nothing."""
    entry, message = CONTRADICTIONS[case]
    book = Book(
        (GDP, job(b"j", 100), Charged("hearts", rounds(0, 4)), Charged("hearts", rounds(20, 29)), Ended(b"over"))
    )
    with pytest.raises(LocalProtocolError, match=message):
        book.post(entry)
    assert (book.rounds("hearts"), book.budget("hearts"), book.families) == (15, GDP, ("hearts",))


def test_rounds_between_others_may_be_charged() -> None:
    """Of other purposes, too; what was charged in the very same way is known to be paid."""
    book = Book((GDP, job(b"j", 100), Charged("hearts", rounds(0, 4)), Charged("hearts", rounds(20, 29))))
    for event in (rounds(5, 19), replace(rounds(0, 4), purpose=Purpose.EVALUATION), rounds(30, 30)):
        assert not book.paid(event)
        book.post(Charged("hearts", event))
        assert book.paid(event)
    assert book.rounds("hearts") == 36


def test_the_rule_may_change_until_something_was_spent() -> None:
    """Before the first job an administrator may think again; afterwards only the numbers change."""
    book = Book((GDP, RDP, replace(RDP, epsilon=4.0)))
    assert not book.written("hearts")
    book.post(job(b"j", 100))
    assert book.written("hearts")
    book.post(replace(RDP, epsilon=1.0, q_most=0.5))
    assert book.budget("hearts") == replace(RDP, epsilon=1.0, q_most=0.5)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"a", b"b"]), st.sampled_from([20.0, 40.0]), st.integers(1, 5), st.sampled_from(list(Part))
        ),
        max_size=12,
    )
)
@settings(max_examples=50, deadline=None)
def test_counting_alike_rounds_together_changes_no_cost(steps: list[tuple[bytes, float, int, Part]]) -> None:
    """The account of the book costs what all charges cost one by one."""
    book, events, first = Book((RDP,)), [], 0
    for name, z, count, part in steps:
        line = replace(LINE, job=name, q=0.1, v=share_variance(z, 1 << 40, 1), population=Population("split", part))
        event = rounds(first, first + count - 1, line)
        first += count
        events.append(event)
        book.post(Charged("hearts", event))
    account = book.account("hearts")
    assert len(account.events) <= 12
    assert sum(event.count for event in account.events) == first
    single = Account(RDP.budget, tuple(events))
    assert account.proved == pytest.approx(single.proved, rel=1e-9)


# ----------------------------------------------------------------------------------------------------- what can be paid


@given(st.floats(5.0, 60.0), st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_a_refusal_names_the_rounds_that_could_be_paid(z: float, before: int) -> None:
    """That many are accepted, one more is not; whatever was charged before."""
    book = Book(
        (
            GDP,
            *(
                (job(b"old", before), Charged("hearts", rounds(0, before - 1, job(b"old", 1).lines[0])))
                if before
                else ()
            ),
        )
    )
    most = ledger.payable(book.account("hearts"), b"new", job(b"new", 100_000, z).lines)
    assert 0 <= most < 100_000
    if most:
        ledger.require_payable(book, job(b"new", most, z))
    with pytest.raises(
        PolicyRefused, match=rf"would pay {most} rounds of this noise, and the job plans {most + 1} \(train\)"
    ):
        ledger.require_payable(book, job(b"new", most + 1, z))


def test_a_short_budget_says_who_can_do_what() -> None:
    """The author may plan less; the administrator may allow more."""
    with pytest.raises(PolicyRefused) as refused:
        ledger.require_payable(Book((GDP,)), job(b"j", 100, 1.0))
    assert refused.value.who is WhoActs.AUTHOR
    assert "privacy budget of 'hearts' (epsilon = 3 at delta = 1e-05) would pay 0 rounds" in refused.value.problem
    assert "plan a job with more noise" in refused.value.fix
    assert "parley site budget set hearts" in refused.value.fix


def test_a_job_of_several_purposes_is_cut_evenly() -> None:
    """The number named is that of rounds of each purpose."""
    lines = job(b"j", 1000).lines
    both = Promised("hearts", b"j", (*lines, replace(lines[0], purpose=Purpose.EVALUATION)))
    book = Book((GDP,))
    one = ledger.payable(book.account("hearts"), b"j", job(b"j", 10_000).lines)
    two = ledger.payable(book.account("hearts"), b"j", both.lines)
    assert two == one // 2
    with pytest.raises(PolicyRefused, match=rf"would pay {two} rounds .* plans 1000 \(train\), 1000 \(eval\)"):
        ledger.require_payable(book, replace(both, lines=tuple(replace(each, count=1000) for each in both.lines)))


def test_a_family_without_a_budget_pays_nothing() -> None:
    """And the words say how its administrator sets one."""
    with pytest.raises(PolicyRefused, match="has set no privacy budget for the data family 'hearts'") as refused:
        ledger.require_payable(Book(), job(b"j", 1))
    assert "parley site budget set hearts --epsilon 8 --delta 1e-5" in refused.value.fix
    assert refused.value.who is WhoActs.SITE


@pytest.mark.parametrize(
    ("budget", "promised", "message"),
    [
        (replace(GDP, q_most=0.5), job(b"j", 1), "samples records with q = 1, and this site allows at most 0.5"),
        (GDP, Promised("hearts", b"j", (replace(LINE, q=0.5),)), "pays for whole batches only"),
        (GDP, job(b"old", 1), "this job was promised its rounds before"),
        (GDP, job(b"over", 1), "this job was promised its rounds before"),
        (GDP, replace(job(b"j", 1), added_delta=2e-6), r"would add 2\.22e-06 to the delta = 1e-05 .* more than a 10th"),
        (GDP, replace(job(b"j", 1), added_delta=9e-7), r"would add 1\.1\d*e-06 to the delta"),
    ],
)
def test_other_reasons_are_told_as_they_are(budget: BudgetSet, promised: Promised, message: str) -> None:
    """A rate above the cap, sampling under a whole-batch rule, a known job, a delta that rounding would fill."""
    old = replace(job(b"old", 10), added_delta=2.2e-7)
    paid = Charged("hearts", replace(rounds(0, 4), job=b"old"), 1.1e-7)
    book = Book((replace(budget, q_most=1.0), old, paid, budget, Ended(b"over")))
    with pytest.raises(PolicyRefused, match=message):
        ledger.require_payable(book, promised)


def test_a_budget_for_whole_sites_takes_no_job_that_protects_records() -> None:
    """The other way round a job counts with half its noise, since a record's site moves by twice the clip at most."""
    with pytest.raises(ConfigurationError, match="protects one record, which says nothing of one site"):
        ledger.require_payable(Book((replace(GDP, unit=Protected.SITE),)), job(b"j", 1))
    site = ledger.promise(consortium_of(5, (replace(SITE, dp=replace(SITE.dp, z=40.0)),)).terms, "hearts")
    assert site is not None
    costs = []
    for unit in (Protected.SITE, Protected.RECORD):
        account = Book((replace(GDP, unit=unit),)).account("hearts")
        costs.append(account.budget.cost(site.lines))
    assert costs[1] == pytest.approx(4 * costs[0])


def test_a_budget_lowered_below_what_is_spent_charges_no_further_round() -> None:
    """Nor one below what is promised; raised again, it does."""
    paid = Charged("hearts", rounds(0, 4))
    book = Book((GDP, job(b"j", 100), paid))
    another = Charged("hearts", rounds(5, 5))
    ledger.require_chargeable(book, another)
    proved = GDP.budget.rule.proved(GDP.budget.cost(job(b"j", 100).lines))
    for epsilon in (0.01, proved * 0.99):
        book.post(replace(GDP, epsilon=epsilon))
        with pytest.raises(
            PolicyRefused, match=r"comes to epsilon = .*, and its budget is now.*no further round is charged"
        ):
            ledger.require_chargeable(book, another)
    book.post(replace(GDP, epsilon=proved * 1.01))
    ledger.require_chargeable(book, another)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epsilon": 0.0}, "epsilon = 0.0 is no privacy budget"),
        ({"delta": 0.0}, "delta = 0.0 is no probability"),
        ({"order": 2}, "at Rényi order 2 an epsilon of 3"),
        ({"order": 300}, "filter rdp with order 300"),
    ],
)
def test_a_budget_that_is_none_is_refused(changed: dict[str, Any], message: str) -> None:
    """By the filter that it would be."""
    with pytest.raises(ConfigurationError, match=message):
        _ = replace(GDP, **changed).budget


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan")])
def test_a_highest_rate_that_is_none_is_refused(rate: float) -> None:
    """It is a share of records."""
    with pytest.raises(ConfigurationError, match=r"a highest rate of .* is not in \(0, 1\]"):
        replace(GDP, q_most=rate)
