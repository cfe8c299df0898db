import os
import tracemalloc
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from math import e, exp, inf, log, pi, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import chdtrc, ive

from federation.errors import ConfigurationError, LocalProtocolError
from privacy.crypto.masks import dtype
from privacy.differential_privacy.laws import gaussian_masses
from privacy.differential_privacy.sampler import (
    Sampler,
    _split,
    gaussian,
    noise_shares,
    require_close,
    sampler_delta,
    skellam,
)
from privacy.differential_privacy.site_level import share_sum_distance
from privacy.differential_privacy.stream import PART
from privacy.differential_privacy.table import BITS, Table

Fixed = Callable[[str], Callable[[int], bytes]]
Make = Callable[[int], Sampler]

PDF = {
    gaussian: lambda x, v: np.exp(-(x**2) / (2 * v)) / sqrt(2 * pi * v),
    skellam: lambda x, v: ive(np.abs(x), v),
}
"""What each sampler's law is, written in other ways than the tables' masses are made."""


def two_sided(table: Table) -> dict[int, Fraction]:
    """The probability of each value that a table can give, exactly, read from its thresholds."""
    shares = [0] * len(table._high)
    for column, (high, low, other) in enumerate(zip(table._high, table._low, table._others, strict=True)):
        threshold = (int(high) << 64) + int(low)
        shares[column] += threshold
        shares[int(other)] += (1 << BITS) - threshold
    whole = 2 * len(shares) << BITS
    chances = {0: Fraction(2 * shares[0], whole)}
    for size, share in enumerate(shares[1:], 1):
        if share:
            chances[size] = chances[-size] = Fraction(share, whole)
    return chances


def convolved(sampler: Sampler) -> dict[int, Fraction]:
    """The probability of each value of a whole draw, exactly."""
    law = {0: Fraction(1)}
    for factor, table in sampler.terms:
        more: dict[int, Fraction] = {}
        for x, chance in two_sided(table).items():
            for y, other in law.items():
                more[factor * x + y] = more.get(factor * x + y, Fraction(0)) + chance * other
        law = more
    return law


# ----------------------------------------------------------------------------------------------------------- the laws


@pytest.mark.parametrize("variance", [64, 100, 506])
def test_sampler_law(variance: int) -> None:
    """The tables' convolution is N_Z(0, v): within exp(+-1e-33) where it has weight, and within `distance` in all."""
    sampler = gaussian(variance)
    law = convolved(sampler)

    with localcontext(prec=80):
        weights = {x: (Decimal(-(x**2)) / (2 * variance)).exp() for x in range(-30 * variance, 30 * variance + 1)}
        whole = sum(weights.values())
        found = {x: Decimal(law[x].numerator) / law[x].denominator for x in law}
        ratios = [abs((found[x] * whole / weights[x]).ln()) for x in law if abs(x) <= 1.5 * sqrt(variance)]
        distance = sum(abs(found.get(x, Decimal(0)) - weight / whole) for x, weight in weights.items()) / 2

    assert sampler.step == int((variance / 6.25) ** 0.25)
    assert sum(law.values()) == 1
    assert max(ratios) < Decimal("1e-33")
    assert distance <= Decimal(sampler.distance)


@settings(max_examples=50, deadline=None)
@given(variance=st.integers(64, 1 << 56))
def test_the_two_tables_are_close_enough_at_every_variance(variance: int) -> None:
    """B = floor((v / 6.25)^(1/4)), v0 = 6.25 b^2, v0 + b^2 v1 = v, and 1 / (1/v1 + b^2/v0) is above 4."""
    step, fine, coarse = _split(variance)

    assert 25 * step**4 <= 4 * variance < 25 * (step + 1) ** 4
    assert fine == 6.25 * step**2
    assert fine + step**2 * coarse == variance
    assert 1 / (1 / coarse + step**2 / fine) >= 4
    assert 4 * exp(-2 * pi**2 * 4) < gaussian(64).distance


@pytest.mark.parametrize("variance", [64, 200])
def test_skellam_law(variance: int) -> None:
    """The table is the difference of two Poisson numbers of mean v / 2: to 12 digits, and v is its variance to 30."""
    law = two_sided(skellam(variance).terms[0][1])
    spread = sum(x**2 * chance for x, chance in law.items())

    for x in range(-60, 61):
        assert float(law[x]) == pytest.approx(float(PDF[skellam](np.array(x), variance)), rel=1e-12)
    assert abs(spread / variance - 1) < Fraction(1, 10**30)


@pytest.mark.parametrize(("make", "variance"), [(gaussian, 64), (gaussian, 5000), (skellam, 64), (skellam, 3000)])
def test_draws_follow_the_law(make: Make, variance: int, fixed: Fixed) -> None:
    """Of 2^20 draws as many have each value as they should, by chi-square."""
    drawn = np.empty(1 << 20, np.int64)
    make(variance).share(fixed(f"{make} {variance}".split(" at ")[0] + str(variance))).fill(drawn)

    reach = int(4 * sqrt(variance))
    values = np.arange(-reach, reach + 1)
    expected = drawn.size * PDF[make](values, variance)  # type: ignore[operator] # a law by its sampler
    counts = np.bincount(np.clip(drawn, -reach - 1, reach + 1) + reach + 1, minlength=values.size + 2)
    rest = drawn.size - expected.sum()
    square = ((counts[1:-1] - expected) ** 2 / expected).sum() + (counts[0] + counts[-1] - rest) ** 2 / rest

    assert chdtrc(values.size, square) > 1e-6


@pytest.mark.parametrize("variance", [215808**2, 17250018**2])
def test_wide_noise_has_the_moments_of_its_law(variance: int, fixed: Fixed) -> None:
    """Mean 0, variance v, kurtosis 3, and consecutive draws that do not know of one another."""
    drawn = np.empty(1 << 20, np.int64)
    gaussian(variance).share(fixed(f"wide {variance}")).fill(drawn)
    unit = drawn / sqrt(variance)

    root = sqrt(drawn.size)
    assert abs(unit.mean()) < 5 / root
    assert abs((unit**2).mean() - 1) < 5 * sqrt(2) / root
    assert abs((unit**4).mean() - 3) < 5 * sqrt(96) / root
    assert abs((unit[1:] * unit[:-1]).mean()) < 5 / root


@pytest.mark.parametrize("variance", [9, 64])
@pytest.mark.parametrize("shares", [2, 3, 7])
def test_share_sum_law(variance: int, shares: int) -> None:
    """L2: the sum of n shares of variance v is N_Z(0, n v) to 1e-14 in log ratio, as tau says."""
    law = floats(gaussian_masses(Fraction(variance)))
    total = law
    for _ in range(shares - 1):
        total = np.convolve(total, law)
    wanted = floats(gaussian_masses(Fraction(shares * variance)))

    near = range(-int(6 * sqrt(shares * variance)), int(6 * sqrt(shares * variance)) + 1)
    ratios = [float(np.log(total[len(total) // 2 + x] / wanted[len(wanted) // 2 + x])) for x in near]
    assert max(map(abs, ratios)) < 1e-14
    assert share_sum_distance(variance, shares) < 1e-14


@pytest.mark.parametrize("shares", [2, 3])
def test_tau_bounds_what_narrow_shares_lack(shares: int) -> None:
    """Where shares are so narrow that their sum is visibly no discrete Gaussian, tau is above that and not far."""
    law = floats(gaussian_masses(Fraction(1)))
    total = law
    for _ in range(shares - 1):
        total = np.convolve(total, law)
    wanted = floats(gaussian_masses(Fraction(shares)))

    ratios = [float(np.log(total[len(total) // 2 + x] / wanted[len(wanted) // 2 + x])) for x in range(-6, 7)]
    tau = share_sum_distance(1, shares)
    assert tau / 1000 < max(map(abs, ratios)) <= tau


@pytest.mark.parametrize("variance", [9, 64])
@pytest.mark.parametrize("shift", [0, 3])
def test_rounding_kernel_law(variance: int, shift: int) -> None:
    """L3: a Gaussian of variance v - 4, rounded by a discrete Gaussian of variance 4 about it, is N_Z(w, v)."""
    fine = np.arange(-16 * 90, 16 * 90 + 1, dtype=np.longdouble) / 16
    density = np.exp(-((fine - shift) ** 2) / (2 * (variance - 4)))
    integers = np.arange(-120, 121, dtype=np.longdouble)
    kernel = np.exp(-((integers[:, np.newaxis] - fine) ** 2) / 8)
    found = (kernel / kernel.sum(axis=0)) @ density / density.sum()
    wanted = floats(gaussian_masses(Fraction(variance)))

    near = range(-int(6 * sqrt(variance)), int(6 * sqrt(variance)) + 1)
    ratios = [float(np.log(found[120 + shift + x] / wanted[len(wanted) // 2 + x])) for x in near]
    assert max(map(abs, ratios)) < 1e-14


def floats(masses: list[int]) -> np.ndarray:
    """The probabilities of -r..r, in extended precision."""
    whole = sum(masses)
    with localcontext(prec=40):
        half = [np.longdouble(str(Decimal(mass) / (2 * whole))) for mass in masses[1:]]
        middle = np.longdouble(str(Decimal(masses[0]) / whole))
    return np.array([*reversed(half), middle, *half])


# ----------------------------------------------------------------------------------------------------------- its shares


def test_each_attempt_has_a_key_of_its_own() -> None:
    """A share asks for one key of 32 bytes; two shares of one sampler have nothing in common."""
    asked: list[int] = []

    def draw(size: int) -> bytes:
        asked.append(size)
        return os.urandom(size)

    sampler, drawn = gaussian(10**10), np.empty((2, 4096), np.int64)
    for row in drawn:
        sampler.share(draw).fill(row)

    assert asked == [32, 32]
    assert np.count_nonzero(drawn[0] == drawn[1]) < 10


@settings(max_examples=30, deadline=None)
@given(size=st.integers(0, 3 * PART), seed=st.integers(0, 99), ring=st.sampled_from((16, 32, 64)))
def test_noised_words_are_values_plus_noise_modulo_the_ring(size: int, seed: int, ring: int) -> None:
    """Every part has its own noise, in the order in which a share draws it, and wraps around; parts stay."""
    sampler = gaussian(10**6)
    values = np.random.default_rng(seed).integers(-(2**40), 2**40, size)
    parts = [values[: size // 3], values[size // 3 :]]
    noise = [np.empty(part.size, np.int64) for part in parts]
    share = sampler.share(lambda _: bytes([seed]) * 32)
    for each in noise:
        share.fill(each)
    before = values.copy()

    words = list(sampler.share(lambda _: bytes([seed]) * 32).noised(parts, ring))

    assert [block.dtype for block in words] == [dtype(ring)] * 2
    wanted = [(int(v) + int(n)) % 2**ring for v, n in zip(values, np.concatenate(noise), strict=True)]
    assert np.concatenate(words).tolist() == wanted
    assert np.array_equal(values, before)


def test_a_long_vector_takes_no_memory_of_its_own() -> None:
    """Filling two million values takes less than 1.5 MiB beside them and the tables."""
    out, sampler = np.empty(2_000_000, np.int64), gaussian(4381**2)
    share = sampler.share()
    tracemalloc.start()
    try:
        share.fill(out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 3 << 19
    assert out.std() == pytest.approx(4381, rel=0.01)


def test_an_empty_vector_has_no_noise() -> None:
    """Nothing is drawn for nothing."""
    sampler = gaussian(64)

    assert [block.size for block in sampler.share().noised([np.empty(0, np.int64)], 32)] == [0]


def test_another_ring_is_refused() -> None:
    """Words have 16, 32 or 64 bits."""
    with pytest.raises(LocalProtocolError, match="not 24"):
        list(gaussian(64).share().noised([], 24))


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("make", [gaussian, skellam])
def test_a_narrow_share_is_refused(make: Make) -> None:
    """Below a variance of 64 shares do not add up to one law: the grid is too coarse."""
    with pytest.raises(ConfigurationError, match="variance 63 is below 64: its grid is too coarse") as refused:
        make(63)

    assert "choose a larger scale" in str(refused.value)


@pytest.mark.parametrize(("make", "most"), [(gaussian, 1 << 56), (skellam, 1 << 32)])
def test_a_share_too_wide_for_its_tables_is_refused(make: Make, most: int) -> None:
    """A variance beyond the largest is told with what to choose instead."""
    with pytest.raises(ConfigurationError, match=f"variance {most + 1} is above {most}") as refused:
        make(most + 1)

    assert "smaller scale" in str(refused.value)


@pytest.mark.parametrize(("members", "c_max", "shares"), [(3, 0, 2), (3, 1, 2), (4, 1, 3), (10, 3, 7), (100, 33, 67)])
def test_colluders_shares_do_not_count(members: int, c_max: int, shares: int) -> None:
    """n_eff = |P| - max(1, c_max): one curious member is assumed even where nobody colludes."""
    assert noise_shares(members, c_max) == shares


@pytest.mark.parametrize(("members", "c_max"), [(2, 0), (2, 1), (5, 4), (3, 3)])
def test_too_few_shares_are_refused(members: int, c_max: int) -> None:
    """Two honest sites' shares are the least that protect either of them."""
    with pytest.raises(ConfigurationError, match="may be known to others") as refused:
        noise_shares(members, c_max)

    assert f"at least {max(1, c_max) + 2} sites" in str(refused.value)


def test_the_sampler_is_charged_to_delta() -> None:
    """(1 + e^eps) T d n t, for the t of two tables: 1e-33 and six times 2^-128."""
    sampler = gaussian(4381**2)

    added = sampler_delta(sampler, epsilon=3, rounds=200, values=10**7, sites=100)

    assert sampler.distance == pytest.approx(1e-33 + 6 * 2.0**-128, rel=1e-12)
    assert skellam(64).distance == 3 * 2.0**-128
    assert added == pytest.approx((1 + e**3) * 200 * 10**7 * 100 * sampler.distance, rel=1e-12)
    require_close(sampler, epsilon=3, delta=1e-5, rounds=200, values=10**7, sites=100)


@pytest.mark.parametrize("epsilon", [log(1e-8 / 1e-33 / 1e10) + 1, 710.0, inf])
def test_a_sampler_that_would_spend_delta_is_refused(epsilon: float) -> None:
    """Where epsilon is so large that the tables' distance is more than a thousandth of delta, no round is run."""
    sampler = gaussian(64)

    require_close(sampler, epsilon=log(1e-8 / 1e-33 / 1e10) - 1, delta=1e-5, rounds=10, values=10**7, sites=100)
    with pytest.raises(ConfigurationError, match="more than a thousandth of 1e-05") as refused:
        require_close(sampler, epsilon=epsilon, delta=1e-5, rounds=10, values=10**7, sites=100)

    assert "choose a smaller epsilon" in str(refused.value)
