import math
import sys
from dataclasses import replace
from fractions import Fraction

import dp_accounting
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import ConfigurationError, WhoActs
from privacy.differential_privacy.events import (
    EVERY_RECORD,
    Event,
    Level,
    Part,
    Population,
    Purpose,
    Releases,
    Unit,
    dp_event,
    exposures,
    noise_multiplier,
    protecting,
    require_dp_accounting,
)
from privacy.differential_privacy.record import share_variance

EVENT = Event(
    job=b"job",
    first_round=0,
    last_round=99,
    level=Level.RECORD_SHARED,
    unit=Unit.RECORD,
    q=1.0,
    v=share_variance(37.3064, 1 << 32, 9),
    n_eff=9,
    squared=1 << 32,
    count=100,
    purpose=Purpose.TRAIN,
    population=EVERY_RECORD,
)


@settings(max_examples=50, deadline=None)
@given(v=st.integers(64, 1 << 56), squared=st.integers(1, 1 << 62), n_eff=st.integers(1, 200))
def test_noise_multiplier_is_the_largest_float_below_the_integers_own(v: int, squared: int, n_eff: int) -> None:
    """Z^2 D^2 <= n_eff v - 4 holds for the multiplier, and for no float above it."""
    z = noise_multiplier(v, squared, n_eff)
    above = math.nextafter(z, math.inf)
    assert Fraction(z) ** 2 * squared <= n_eff * v - 4 < Fraction(above) ** 2 * squared


@settings(max_examples=50, deadline=None)
@given(z=st.floats(0.3, 300), units=st.integers(1 << 8, 1 << 26), n_eff=st.integers(1, 99))
def test_integers_have_at_least_the_calibrated_noise(z: float, units: int, n_eff: int) -> None:
    """A multiplier that became a share's variance comes back as large, and hardly larger."""
    found = noise_multiplier(share_variance(z, units**2, n_eff), units**2, n_eff)
    assert z <= found <= z * (1 + n_eff / (z * units) ** 2)


def test_event_recomputes_its_noise_from_integers() -> None:
    """An event of the reference job shows its z, and is one value with others of the same fields."""
    assert EVENT.z == pytest.approx(37.3064, rel=1e-12)
    assert EVENT.releases == Releases(1.0, EVENT.z, 100)
    assert replace(EVENT, v=EVENT.v // 4).z == pytest.approx(37.3064 / 2, rel=1e-8)
    assert len({EVENT, replace(EVENT)}) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"v": 63}, r"variance 63 is below 64.*choose a finer grid"),
        ({"v": 100.0}, r"v = 100\.0, D\^2 = 4294967296 and n_eff = 9 must be positive integers"),
        ({"squared": 0}, r"D\^2 = 0 .*must be positive integers"),
        ({"n_eff": 0}, r"n_eff = 0 must be positive integers"),
        ({"n_eff": 1}, r"level record-shared with 1 shares.*at least two where sites share the noise"),
        ({"level": Level.RECORD_SITE}, r"level record-site with 9 shares.*count one share at level record-site"),
        ({"unit": Unit.SITE}, r"level record-shared does not protect a site"),
        ({"level": Level.SITE}, r"level site does not protect a record"),
        ({"level": Level.SITE, "unit": Unit.SITE, "q": 0.5}, r"level site takes no sampling.*set q = 1"),
        ({"q": 0.0}, r"record rate of 0\.0 is not in \(0, 1\]"),
        ({"q": math.nan}, r"record rate of nan is not in"),
        ({"q": 1.5}, r"record rate of 1\.5 is not in"),
        ({"count": 0}, r"0 rounds cannot be accounted"),
        ({"count": 101}, r"rounds 0 to 99 do not hold 101 charges.*charge each round once"),
        ({"first_round": 100}, r"rounds 100 to 99 do not hold"),
        ({"first_round": -1}, r"rounds -1 to 99 do not hold"),
        ({"job": b""}, r"an event belongs to a job"),
    ],
)
def test_event_that_cannot_have_been_is_refused(changed: dict[str, object], message: str) -> None:
    """Fields that contradict one another, or noise that no guarantee is for, make no event."""
    with pytest.raises(ConfigurationError, match=message):
        replace(EVENT, **changed)


@pytest.mark.parametrize("z", [0.0, -1.0, 0.0099, math.nan, math.inf])
def test_releases_without_noise_are_refused(z: float) -> None:
    """A multiplier that is tiny, negative or no number protects nothing."""
    for q in (0.1, 1.0):
        with pytest.raises(ConfigurationError, match="protects nothing, or is no number"):
            Releases(q, z / 10_000, 1)


def test_coarser_protection_counts_with_half_its_noise() -> None:
    """A record moves a vector that was clipped for a whole person or site by up to twice the clip norm."""
    person = replace(EVENT, unit=Unit.PERSON)
    site = replace(EVENT, level=Level.SITE, unit=Unit.SITE)
    halved = Releases(1.0, EVENT.z / 2, 100)
    assert protecting((EVENT, person, site), Unit.RECORD) == (EVENT.releases, halved, halved)
    assert protecting((person, site), Unit.PERSON) == (EVENT.releases, halved)
    assert protecting((site,), Unit.SITE) == (EVENT.releases,)


@pytest.mark.parametrize("unit", [Unit.PERSON, Unit.SITE])
def test_finer_protection_says_nothing_of_a_coarser_unit(unit: Unit) -> None:
    """Noise for one record bounds nothing about a person or a site."""
    with pytest.raises(ConfigurationError, match=f"protects one record, which says nothing of one {unit}"):
        protecting((EVENT,), unit)


def _on(split: str, part: Part) -> Event:
    return replace(EVENT, population=Population(split, part), job=f"{split}/{part}".encode())


def test_train_and_test_records_of_one_split_are_charged_apart() -> None:
    """No record is on both sides of a split; whatever reads all records is in each history."""
    train, test = _on("a", Part.TRAIN), _on("a", Part.TEST)
    assert set(exposures((EVENT, train, test))) == {(EVENT, train), (EVENT, test)}
    assert exposures((EVENT,)) == ((EVENT,),)
    assert exposures(()) == ((),)


def test_parts_of_different_splits_may_meet_in_one_record() -> None:
    """A record that one split trains on may be another's test record: each pair of sides is a history."""
    first, second = (_on("a", Part.TRAIN), _on("a", Part.TEST)), (_on("b", Part.TRAIN), _on("b", Part.TEST))
    found = {frozenset(world) for world in exposures((*first, *second))}
    assert found == {frozenset((one, other)) for one in first for other in second}


def test_many_splits_all_count() -> None:
    """Past six splits every event counts for every record, which is never too little."""
    events = tuple(_on(name, part) for name in "abcdefg" for part in (Part.TRAIN, Part.TEST))
    assert exposures(events) == (events,)


def test_dp_event_is_what_other_accountants_understand() -> None:
    """Whole batches become Gaussian events and samples Poisson-sampled ones, each with its count."""
    found = dp_event((Releases(1.0, 2.0, 3), Releases(0.1, 4.0, 5)))
    gaussian = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.0), 3)
    sampled = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(4.0))
    assert found == dp_accounting.ComposedDpEvent([gaussian, dp_accounting.SelfComposedDpEvent(sampled, 5)])
    assert require_dp_accounting().pld.PLDAccountant().supports(found)


def test_missing_library_is_told_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dp-accounting whoever asks for a printed epsilon reads what to install."""
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigurationError, match=r'needs dp-accounting.*pip install "parley-fl\[privacy\]"') as refused:
        dp_event((Releases(1.0, 2.0, 3),))
    assert refused.value.who is WhoActs.YOU
