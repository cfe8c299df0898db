"""Noise is the least that keeps a promise, the same at every site, and the promise is read from the terms alone."""

from dataclasses import replace
from math import frexp

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import ConfigurationError, LocalProtocolError
from privacy.differential_privacy import sampler
from privacy.differential_privacy.accounting import ORDERS, renyi_overhead
from privacy.differential_privacy.site_level import SiteMechanism
from privacy.secure_aggregation.rostersum import promise, rules
from privacy.secure_aggregation.rostersum.noise import round_noise
from privacy.secure_aggregation.rostersum.promise import Aim, calibrated, epsilon_of, promised, tried
from privacy.secure_aggregation.rostersum.terms import Churn, Mechanism, Terms
from simulations.loopback_job import LoopbackJob
from tests.privacy.secure_aggregation.rostersum.conftest import TRAIN, consortium_of
from tests.privacy.secure_aggregation.rostersum.noisy import plan

AIM = Aim(epsilon=2.0, delta=1e-5, rounds=20, clip=3.0, law=Mechanism.DDGAUSS)


def terms_of(aim: Aim, dimension: int = 64, sites: int = 10, c_max: int = 3, least: int = 7) -> Terms:
    """A job of one plan whose noise is made for the aim."""
    found = replace(plan(dimension), dp=calibrated(aim, dimension, sites, least, c_max), m_min=least)
    return consortium_of(sites, (found,), c_max=c_max, g_max=min(c_max, 1)).terms


aims = st.builds(
    Aim,
    epsilon=st.floats(0.5, 20),
    delta=st.floats(1e-7, 1e-2),
    rounds=st.integers(1, 200),
    clip=st.floats(1e-3, 1e3),
    law=st.sampled_from(Mechanism),
)
sizes = st.integers(3, 100).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 3)))


@given(aims, sizes, st.integers(3, 14), st.data())
@settings(max_examples=25, deadline=None)
def test_noise_is_the_least_that_keeps_the_promise(
    aim: Aim, size: tuple[int, int], log_dimension: int, data: st.DataObject
) -> None:
    """Its epsilon is within what was asked; with a multiplier one step less, of four digits, it is not."""
    sites, c_max = size
    least = data.draw(st.integers(max(3, c_max + 2), sites))
    found = calibrated(aim, 1 << log_dimension, sites, least, c_max)
    terms = terms_of(aim, 1 << log_dimension, sites, c_max, least)
    assert 0 < epsilon_of(terms, terms.plans[0]) <= aim.epsilon
    assert float(f"{found.z:.4g}") == found.z
    assert frexp(found.scale)[0] == 0.5
    step = 10.0 ** (np.floor(np.log10(found.z)) - 3)
    less = replace(terms.plans[0], dp=replace(found, z=float(f"{found.z - step:.5g}")))
    assert epsilon_of(terms, less) > aim.epsilon


@given(aims, sizes, st.integers(3, 14))
@settings(max_examples=25, deadline=None)
def test_the_sum_of_any_number_of_sites_fits_its_words(aim: Aim, size: tuple[int, int], log_dimension: int) -> None:
    """The modulus rule holds with room, for all sites at the clip (I2), and no rule of the terms is broken."""
    sites, c_max = size
    least = max(3, c_max + 2)
    found = calibrated(aim, 1 << log_dimension, sites, least, c_max)
    mechanism = SiteMechanism(1 << log_dimension, found.clip, 2 * found.scale, found.z)
    mechanism.require_room(sites, least - max(1, c_max), 32)
    terms = terms_of(aim, 1 << log_dimension, sites, c_max, least)
    assert rules.broken(terms) == ()


def test_a_finer_grid_would_not_fit() -> None:
    """The scale is the largest power of two at which twelve standard deviations of a coordinate fit the word."""
    found = calibrated(AIM, 64, 10, 7, 3)
    mechanism = SiteMechanism(64, 3.0, found.scale, found.z)
    mechanism.require_room(10, 4, 32)
    with pytest.raises(ConfigurationError, match="wraps around a ring"):
        replace(mechanism, scale=6 * found.scale).require_room(10, 4, 32)


@pytest.mark.parametrize(("epsilon", "delta", "rounds", "z"), [(1, 1e-4, 20, 15.691020), (1, 1e-5, 100, 40.453854)])
def test_on_a_fine_grid_noise_is_that_of_the_reference(epsilon: float, delta: float, rounds: int, z: float) -> None:
    """Rényi DP at integer orders (section 5 of the DP text, column R), rounded up to four digits."""
    found = calibrated(Aim(epsilon, delta, rounds, 1.0, Mechanism.DDGAUSS), 8, 10, 7, 3)
    assert z <= found.z <= z * 1.001


@pytest.mark.parametrize("law", Mechanism)
def test_the_epsilon_holds_whatever_set_is_summed(law: Mechanism) -> None:
    """It is no less than that of any number of members between m_min and n, shares rounded up as they are drawn."""
    terms = terms_of(replace(AIM, law=law))
    (found,) = terms.plans
    for members in range(found.m_min, terms.n + 1):
        cost = round_noise(found, members, terms.c_max).divergence
        own = min(AIM.rounds * cost.renyi(order) + renyi_overhead(order, AIM.delta) for order in ORDERS)
        assert own <= epsilon_of(terms, found) <= AIM.epsilon


def test_what_no_noise_gives_is_refused() -> None:
    """An epsilon below what the orders prove, or Skellam noise wider than is drawn: with the way out."""
    with pytest.raises(
        ConfigurationError, match=r"no noise that fits a word gives epsilon = 0\.001 .*a larger epsilon"
    ):
        calibrated(replace(AIM, epsilon=0.001, delta=1e-9), 64, 10, 7, 3)
    with pytest.raises(ConfigurationError, match="or mechanism ddgauss"):
        calibrated(Aim(0.3, 1e-9, 20_000, 1.0, Mechanism.SKELLAM), 1 << 24, 3, 3, 0)


def test_of_noise_that_is_too_coarse_nothing_is_proved() -> None:
    """A share of variance below 64 has no epsilon, and so has a plan without noise."""
    coarse = plan(scale=4.0)
    terms = consortium_of(5, (coarse,)).terms
    with pytest.raises(ConfigurationError, match="variance below 64, of which nothing is proved"):
        epsilon_of(terms, coarse)
    with pytest.raises(LocalProtocolError, match="plan 1 has no noise, and its epsilon was asked for"):
        epsilon_of(terms, TRAIN)


# ------------------------------------------------------------------------------------------------------------ in words


def test_the_statement_says_what_is_promised_and_what_is_not() -> None:
    """Level, unit, epsilon, delta, c, n_eff, z, rounds, computational, and what lies outside."""
    terms = terms_of(AIM)
    (text,) = promised(terms)
    noise = terms.plans[0].dp
    assert noise is not None
    for part in (
        "level site, unit: all records of one site",
        f"(epsilon = {epsilon_of(terms, terms.plans[0]):.5f}"[:16],
        "delta = 1e-05)-indistinguishable",
        "any c = 3 other sites",
        "all 20 rounds that the job may charge",
        f"z = {noise.z:g} (ddgauss)",
        "n_eff = 4 or more",
        "It is computational",
        "Outside it: statistics and evaluations are exact sums over whole cells",
        "which round is chosen",
        "does not hide that a site takes part",
        "There are 10 sites: below about 50",
    ):
        assert part in text
    assert promised(consortium_of().terms) == ()
    many = LoopbackJob.of(60, 8, Churn.DP, post_quantum=False).terms
    assert "There are" not in promised(many)[0]


def test_the_printed_epsilon_is_never_below_the_computed_one() -> None:
    """Rounded up to six digits."""
    terms = terms_of(AIM)
    printed = promised(terms)[0].partition("epsilon = ")[2].partition(",")[0]
    assert float(printed) >= epsilon_of(terms, terms.plans[0])
    assert float(printed) <= AIM.epsilon


# ------------------------------------------------------------------------------------------------------------ the trial


@pytest.mark.parametrize("law", Mechanism)
def test_noise_as_a_job_needs_it_passes_its_trial(law: Mechanism) -> None:
    """And a job without noise needs none."""
    tried(terms_of(replace(AIM, law=law)))
    tried(consortium_of().terms)


def test_noise_of_another_variance_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that draws four fifths of the variance protects nothing: the site hears why."""
    real = promise.sampler_of

    def weaker(law: Mechanism, variance: int) -> sampler.Sampler:
        return replace(real(law, variance), terms=real(law, variance * 4 // 5).terms)

    monkeypatch.setattr(promise, "sampler_of", weaker)
    promise._test.cache_clear()
    with pytest.raises(LocalProtocolError, match="the noise sampler failed its self-test: variance"):
        tried(terms_of(AIM))


def test_noise_that_would_change_delta_fails_the_trial() -> None:
    """With an epsilon beyond all sense the sampler's tiny error is no longer tiny."""
    with pytest.raises(ConfigurationError, match="more than a thousandth"):
        tried(terms_of(replace(AIM, epsilon=90.0, rounds=1, delta=1e-9)))
