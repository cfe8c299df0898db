from collections.abc import Callable
from fractions import Fraction
from math import exp

import pytest
from scipy.special import chdtrc

from federation.errors import LocalProtocolError
from privacy.differential_privacy.exact import _bernoulli_exp, discrete_gaussian

Fixed = Callable[[str], Callable[[int], bytes]]


@pytest.mark.parametrize("variance", [Fraction(1, 3), Fraction(1), Fraction(25, 4), Fraction(64)])
def test_draws_are_the_discrete_gaussian(variance: Fraction, fixed: Fixed) -> None:
    """5000 draws fit N_Z(0, v) by chi-square, over all values that are to come five times or more."""
    draw, tries = fixed(f"exact {variance}"), 5000
    found = [discrete_gaussian(variance, draw) for _ in range(tries)]

    reach = 40
    weights = {x: exp(-(x**2) / (2 * float(variance))) for x in range(-reach, reach + 1)}
    expected = {x: tries * weight / sum(weights.values()) for x, weight in weights.items()}
    usual = [x for x in expected if expected[x] >= 5]
    rest, seen = tries - sum(expected[x] for x in usual), tries - sum(found.count(x) for x in usual)
    square = sum((found.count(x) - expected[x]) ** 2 / expected[x] for x in usual) + (seen - rest) ** 2 / max(rest, 1)

    assert chdtrc(len(usual), square) > 1e-6


@pytest.mark.parametrize("exponent", [Fraction(0), Fraction(1, 7), Fraction(1), Fraction(5, 2)])
def test_coins_of_exponential_chance(exponent: Fraction, fixed: Fixed) -> None:
    """A coin of probability exp(-x) comes up so often, within five standard deviations."""
    draw, tries, chance = fixed(f"coins {exponent}"), 20_000, exp(-exponent)

    heads = sum(_bernoulli_exp(exponent, draw) for _ in range(tries))

    assert abs(heads - tries * chance) <= 5 * (tries * chance * (1 - chance)) ** 0.5


def test_a_wide_law_has_its_variance(fixed: Fixed) -> None:
    """Where values are as large as the noise of a count may be, 2000 draws have the stated variance within 16 %."""
    draw, variance = fixed("wide"), Fraction(10**12) + Fraction(1, 3)
    found = [discrete_gaussian(variance, draw) for _ in range(2000)]

    assert abs(sum(x**2 for x in found) / (len(found) * variance) - 1) < Fraction(16, 100)


def test_the_operating_system_draws_by_default() -> None:
    """Without a source, draws are integers of both signs that differ from call to call."""
    found = [discrete_gaussian(Fraction(10**6)) for _ in range(64)]

    assert min(found) < 0 < max(found)
    assert len(set(found)) > 32


def test_no_variance_is_refused() -> None:
    """A variance of 0 protects nothing: it is no law to draw from."""
    with pytest.raises(LocalProtocolError, match="a variance above 0, not 0"):
        discrete_gaussian(Fraction(0))
