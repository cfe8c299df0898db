from decimal import Decimal, localcontext
from fractions import Fraction
from math import factorial

import pytest

from privacy.differential_privacy.laws import gaussian_masses, skellam_masses

LEAST = Decimal(2) ** -128


def most_wrong(masses: list[int], weights: list[Decimal]) -> Decimal:
    """The largest error of a mass, in units of the first."""
    return max(
        abs(Decimal(mass) / masses[0] - weight / weights[0]) for mass, weight in zip(masses, weights, strict=False)
    )


def gaussian_weights(variance: Fraction, reach: int) -> list[Decimal]:
    """exp(-x^2 / (2 variance)), twice but for 0."""
    exact = Decimal(variance.numerator) / variance.denominator
    return [(2 if x else 1) * (-(x**2) / (2 * exact)).exp() for x in map(Decimal, range(reach))]


def skellam_weight(variance: int, x: int) -> Decimal:
    """exp(-v) I_x(v) of both signs, by the series of I_x."""
    half, order = Decimal(variance) / 2, 0
    term = total = half**x / factorial(x)
    while term > total * Decimal(2) ** -300:
        order += 1
        term *= half * half / (order * (order + x))
        total += term
    return (2 if x else 1) * Decimal(-variance).exp() * total


@pytest.mark.parametrize("variance", [Fraction(25, 4), Fraction(9), Fraction(4 * 506 - 225, 36), Fraction(12345)])
def test_gaussian_masses_are_the_discrete_gaussian(variance: Fraction) -> None:
    """Each mass is right to 2^-190 of the whole, and less than 2^-128 of it lies beyond the last."""
    with localcontext(prec=110):
        masses = gaussian_masses(variance)
        weights = gaussian_weights(variance, 2 * len(masses))
        wrong = most_wrong(masses, weights)
        beyond = sum(weights[len(masses) :]) / sum(weights)

    assert 0 < beyond < LEAST
    assert wrong < Decimal(2) ** -190


@pytest.mark.parametrize("variance", [9, 64])
def test_skellam_masses_are_the_difference_of_two_poisson_numbers(variance: int) -> None:
    """Each mass is right to 2^-190 of the whole, and less than 2^-128 of it lies beyond the last."""
    with localcontext(prec=110):
        masses = skellam_masses(variance)
        weights = [skellam_weight(variance, x) for x in range(len(masses))]
        wrong = most_wrong(masses, weights)
        beyond = 1 - sum(weights)

    assert 0 < beyond < LEAST
    assert wrong < Decimal(2) ** -190


@pytest.mark.parametrize("variance", [64, 10**4, 10**6])
def test_skellam_masses_have_its_variance(variance: int) -> None:
    """Mass times x^2 adds up to the variance, and times x^4 to 3 v^2 + v, to 30 digits."""
    masses = skellam_masses(variance)
    whole = sum(masses)

    second = Fraction(sum(mass * x**2 for x, mass in enumerate(masses)), whole)
    fourth = Fraction(sum(mass * x**4 for x, mass in enumerate(masses)), whole)

    assert abs(second / variance - 1) < Fraction(1, 10**30)
    assert abs(fourth / (3 * variance**2 + variance) - 1) < Fraction(1, 10**30)
