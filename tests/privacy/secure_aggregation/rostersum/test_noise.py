"""The noise of a plan is a function of the plan and the number of members, and the same for whoever asks."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import ConfigurationError, LocalProtocolError
from privacy.differential_privacy.site_level import rdp_ddgauss, rdp_skellam
from privacy.secure_aggregation.rostersum.noise import mechanism_of, round_noise, sampler_of
from privacy.secure_aggregation.rostersum.terms import Mechanism, Plan, Unit
from tests.privacy.secure_aggregation.rostersum.conftest import TRAIN
from tests.privacy.secure_aggregation.rostersum.noisy import plan


@given(st.integers(3, 100), st.integers(0, 30), st.sampled_from(Mechanism))
@settings(max_examples=50, deadline=None)
def test_shares_of_any_set_add_up_to_the_plans_noise(members: int, c_max: int, law: Mechanism) -> None:
    """V = (s z C)^2 / n_eff, rounded up, n_eff = |P| - max(1, c_max): what nobody knows has at least (s z C)^2."""
    shares = members - max(1, c_max)
    if shares < 2:
        with pytest.raises(ConfigurationError, match="which leaves"):
            round_noise(plan(mechanism=law), members, c_max)
        return
    found = round_noise(plan(mechanism=law), members, c_max)
    whole = Fraction(2**16) ** 2
    assert (found.shares, found.variance, found.law) == (shares, ceil(whole / shares), law)
    assert whole <= found.shares * found.variance < whole + shares
    assert (found.squared, found.divergence.squared) == (mechanism_of(plan()).squared, found.squared)


@pytest.mark.parametrize("law", Mechanism)
def test_what_a_round_costs_is_what_its_mechanism_proves(law: Mechanism) -> None:
    """Each law has its own formula, in the integers that the noise is drawn by."""
    found = round_noise(plan(mechanism=law), 5, 1)
    mechanism = found.mechanism
    integers = {"variance": 4 * found.variance, "squared": mechanism.squared, "l1": mechanism.l1}
    expected = {
        Mechanism.DDGAUSS: rdp_ddgauss(8, **integers, dimension=16, tau=0.0),
        Mechanism.SKELLAM: rdp_skellam(8, **integers),
    }
    assert found.divergence.renyi(8) == expected[law]


def test_the_sampler_is_that_of_the_law_and_its_tables_are_made_once() -> None:
    """A Gaussian has no excess; Skellam noise has some; the same variance gives the same tables."""
    gaussian, skellam = (round_noise(plan(mechanism=law), 3, 1).sampler for law in Mechanism)
    assert (gaussian.excess, skellam.excess) == (0, 1)
    assert gaussian.variance == skellam.variance == 2**31
    assert sampler_of(Mechanism.DDGAUSS, 2**31) is gaussian


@pytest.mark.parametrize("other", [TRAIN, replace(plan(), codec=TRAIN.codec), plan(unit=Unit.RECORD)])
def test_a_plan_that_protects_no_site_has_no_such_noise(other: Plan) -> None:
    """No noise, no rotation, or another unit: to ask is a bug of ours."""
    with pytest.raises(LocalProtocolError, match="plan 1 does not protect a site"):
        round_noise(other, 5, 1)
