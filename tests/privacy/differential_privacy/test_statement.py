import re
from dataclasses import replace

import pytest

from federation.errors import ConfigurationError
from privacy.differential_privacy.accounting import epsilon
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
from privacy.differential_privacy.record import share_variance
from privacy.differential_privacy.statement import Guarantee, guarantee, statement

EVENT = Event(
    job=b"job",
    first_round=0,
    last_round=99,
    level=Level.RECORD_SHARED,
    unit=Unit.RECORD,
    q=1.0,
    v=share_variance(37.3064, 1 << 40, 7),
    n_eff=7,
    squared=1 << 40,
    count=100,
    purpose=Purpose.TRAIN,
    population=EVERY_RECORD,
)


def stated(*events: Event, delta: float = 1e-5, c_max: int = 3, added_delta: float = 2e-8) -> str:
    """The paragraph about these events."""
    return statement(guarantee(events, delta, c_max=c_max, added_delta=added_delta))


def test_statement_is_complete() -> None:
    """It names all that section 4 asks for, with the numbers recomputed from the integers."""
    text = stated(EVENT)
    for fact in (
        "level record-shared, unit record",
        "any two of its data sets that differ in one record",
        "(epsilon = 0.999998, delta = 1.002e-05)-indistinguishable",
        "the coordinator together with any c = 3 other sites",
        "T_i = 100 rounds (train) at q = 1, z = 37.3064, n_eff = 7",
        "at delta = 1e-05 (exact Gaussian)",
        "add 2e-08 to delta",
        "fully adaptive epsilon = 1.0926 holds",
        "Rényi DP at order 17",
        "The guarantee is computational",
        "n_eff honest sites of each sum add their share",
        "no side channel",
        "the site's own samples stay secret",
        "It does not protect the site",
        "(its case mix, a broken scanner, its size) may be learnt",
        "not protected from the owner of their own site",
    ):
        assert fact in text, fact
    assert "\n" not in text


def test_printed_numbers_never_promise_too_much() -> None:
    """Epsilon and delta are rounded up, z down, at six digits."""
    found = guarantee((EVENT,), 1e-5, c_max=1, added_delta=1.23456789e-8)
    text = statement(found)
    shown = [float(number) for number in re.findall(r"epsilon = ([\d.e-]+\d)", text)]
    assert found.spent.value * (1 - 1e-11) <= shown[0] <= found.spent.value * 1.00001
    assert found.spent.renyi * (1 - 1e-11) <= shown[1] <= found.spent.renyi * 1.00001
    delta, z = (float(re.findall(rf"{name} = ([\d.e-]+\d)", text)[0]) for name in ("delta", "z"))
    assert found.delta * (1 - 1e-11) <= delta <= found.delta * 1.00001
    assert EVENT.z * 0.99999 <= z <= EVENT.z * (1 + 1e-11)


def test_at_least_one_site_counts_as_colluding() -> None:
    """A job that assumes no collusion still has one curious member."""
    assert "any c = 1 other sites" in stated(EVENT, c_max=0)


def test_sampled_rounds_are_stated_with_their_rate() -> None:
    """A sampled job names q, and that its number is a loss distribution's."""
    text = stated(replace(EVENT, q=0.1, v=share_variance(2.17806, 1 << 40, 7)))
    assert "T_i = 100 rounds (train) at q = 0.1, z = 2.17806, n_eff = 7" in text
    assert "pessimistic privacy loss distribution" in text


def test_rounds_of_one_noise_are_one_line() -> None:
    """Rounds over different sets are told by their n_eff, and jobs are counted."""
    more = replace(EVENT, job=b"other", v=share_variance(37.3064, 1 << 40, 9), n_eff=9, count=40)
    text = stated(replace(EVENT, last_round=59, count=60), replace(EVENT, first_round=60, count=40), more)
    assert "Charged over 2 jobs: T_i = 100 rounds (train) at q = 1, z = 37.3064, n_eff = 7; T_i = 40 rounds" in text


def test_evaluation_is_stated_for_the_records_that_pay_most() -> None:
    """Of two sides of a split the one with the larger epsilon is told."""
    train = replace(EVENT, population=Population("split", Part.TRAIN))
    test = replace(EVENT, purpose=Purpose.EVALUATION, population=Population("split", Part.TEST), count=10)
    found = guarantee((test, train), 1e-5, c_max=1)
    assert found.events == (train,)
    assert found.spent == epsilon((train.releases,), 1e-5)


def test_person_is_told_about_a_second_site() -> None:
    """At k sites a person has z/k, with the number for two of them."""
    person = replace(EVENT, unit=Unit.PERSON)
    doubled = epsilon((Releases(1.0, EVENT.z / 2, 100),), 1e-5).value
    text = stated(person)
    assert "differ in all the records of one person" in text
    assert "has z/k: at 2 sites z = 18.6532, epsilon = 2.1" in text
    assert float(re.findall(r"epsilon = ([\d.]+\d)", text)[-1]) == pytest.approx(doubled, rel=1e-5)
    assert "z/k" not in stated(EVENT)


def test_record_site_needs_nobody() -> None:
    """A site with the full noise of its own trusts no sum and no share."""
    text = stated(replace(EVENT, level=Level.RECORD_SITE, v=share_variance(37.3064, 1 << 40, 1), n_eff=1))
    assert "level record-site" in text
    assert "the coordinator together with all other sites" in text
    assert "honest sites" not in text
    assert "It does not protect the site" in text


def test_site_level_hides_no_presence() -> None:
    """At level site the records are protected together, and what stays visible is another thing."""
    text = stated(replace(EVENT, level=Level.SITE, unit=Unit.SITE))
    assert "level site, unit site: for every site, its data and none at all" in text
    assert "It does not hide that the site takes part" in text
    assert "It does not protect the site" not in text
    assert "samples stay secret" not in text


@pytest.mark.parametrize("events", [(), (EVENT, replace(EVENT, unit=Unit.PERSON))])
def test_levels_and_units_are_not_mixed(events: tuple[Event, ...]) -> None:
    """No events, or events of two units, make no statement."""
    with pytest.raises(ConfigurationError, match="one level and one unit"):
        guarantee(events, 1e-5, c_max=1)


@pytest.mark.parametrize("added", [2e-7, -1e-9])
def test_additions_to_delta_are_small(added: float) -> None:
    """What rounding and sampling add is at most a hundredth of delta, or the statement would be about another one."""
    with pytest.raises(ConfigurationError, match="more than a hundredth"):
        guarantee((EVENT,), 1e-5, c_max=1, added_delta=added)


def test_guarantee_is_a_value_for_the_model_card() -> None:
    """The same facts, without words."""
    found = guarantee((EVENT,), 1e-5, c_max=3, added_delta=2e-8)
    assert found == Guarantee((EVENT,), epsilon((EVENT.releases,), 1e-5), 2e-8, 3, None)
    assert (found.level, found.unit, found.delta) == (Level.RECORD_SHARED, Unit.RECORD, pytest.approx(1.002e-5))
