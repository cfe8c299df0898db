from collections.abc import Callable
from dataclasses import replace
from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import ConfigurationError, LocalProtocolError
from federation.vector import BLOCK
from privacy.differential_privacy import rounding
from privacy.differential_privacy.sampler import Sampler, gaussian, skellam
from privacy.differential_privacy.site_level import (
    BETA,
    SiteMechanism,
    rdp_ddgauss,
    rdp_skellam,
    share_sum_distance,
)
from privacy.differential_privacy.table import I64

Fixed = Callable[[str], Callable[[int], bytes]]
KEY = bytes(range(32))
SMALL = SiteMechanism(dimension=64, clip=1.0, scale=30.0, z=2.0)


def quantised(mechanism: SiteMechanism, update: np.ndarray, draw: Callable[[int], bytes] | None = None) -> I64:
    """An update's integers as one vector."""
    parts = mechanism.quantise(update, KEY) if draw is None else mechanism.quantise(update, KEY, draw)
    return np.concatenate(list(parts))


# ----------------------------------------------------------------------------------------------------------- guarantees


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 999),
    size=st.integers(0, 64),
    length=st.sampled_from((0.0, 1e-300, 0.3, 1.0, 50.0, 1e300)),
    scale=st.sampled_from((0.2, 3.0, 30.0, 1e6)),
    rotated=st.booleans(),
    beta=st.sampled_from((BETA, 0.0, 0.99)),
)
def test_integers_are_within_both_sensitivities(
    *, seed: int, size: int, length: float, scale: float, rotated: bool, beta: float
) -> None:
    """Whatever the update, its integers' squares add up to at most Delta2^2 and their magnitudes to at most Delta1."""
    mechanism = replace(SMALL, scale=scale, rotated=rotated, beta=beta)
    update = np.random.default_rng(seed).standard_normal(size)
    update *= length / max(1e-9, float(np.linalg.norm(update)))

    found = quantised(mechanism, update).tolist()

    assert len(found) == 64
    assert sum(each**2 for each in found) <= mechanism.squared
    assert sum(map(abs, found)) <= mechanism.l1


def test_the_hardest_vector_fits(fixed: Fixed) -> None:
    """Where every coordinate is halfway between integers, one rounding in forty passes Delta2; none is sent."""
    mechanism = SiteMechanism(4096, 1.0, 32.0, 1.0, rotated=False)
    update, draw = np.full(4096, 1 / 64), fixed("hardest")

    lengths = [int((quantised(mechanism, update, draw) ** 2).sum()) for _ in range(400)]

    assert mechanism.squared == 2112
    assert 2100 < max(lengths) <= 2112
    assert np.mean(lengths) > 2030


def test_the_sensitivities_are_the_texts() -> None:
    """Delta2^2 is the smaller of both bounds and Delta1 = Delta2 min(sqrt D, Delta2), with beta = e^-1/2."""
    for dimension, reach in ((8, 0.5), (64, 30.0), (2**20, 20000.0), (2**20, 1.0)):
        found = SiteMechanism(dimension, 1.0, reach, 1.0)
        root = sqrt(dimension)
        typical = reach**2 + dimension / 4 + sqrt(2 * log(1 / exp(-0.5))) * (reach + root / 2)

        assert found.squared == int(min((reach + root) ** 2, typical))
        assert found.l1 == pytest.approx(sqrt(found.squared) * min(root, sqrt(found.squared)))
        assert replace(found, beta=0.0).squared == int((reach + root) ** 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e200])
def test_what_is_not_finite_counts_as_zero(wrong: float) -> None:
    """A site whose update is NaN, infinite or without a norm contributes zeros, and says nothing."""
    update = np.ones(50)
    update[7] = wrong

    assert not quantised(SMALL, update).any()


def test_an_update_survives_rounding(fixed: Fixed) -> None:
    """The mean of many encodings of one update is the update, clipped to C and rotated back; it is left as it is."""
    update = np.random.default_rng(4).standard_normal(50).astype(np.float32)
    before, draw = update.copy(), fixed("mean")
    total = sum(quantised(SMALL, update, draw) for _ in range(2000))

    found = SMALL.decode(total.astype(np.uint32), KEY) / 2000

    assert np.array_equal(update, before)
    assert np.abs(found[:50] - update / np.linalg.norm(update)).max() < 5 / 2 / sqrt(2000) / 30 + 1e-3
    assert np.abs(found[50:]).max() < 5 / 2 / sqrt(2000) / 30 + 1e-3


def test_short_updates_are_scaled_and_not_stretched() -> None:
    """An update within C keeps its length: without rotation and with a whole grid it is its own integers."""
    mechanism = SiteMechanism(4, 10.0, 8.0, 1.0, rotated=False)

    assert quantised(mechanism, np.array([1.0, -0.5, 0.125])).tolist() == [8, -4, 1, 0]


def test_each_attempt_is_rounded_afresh() -> None:
    """The same update twice gives different integers, by the operating system's bytes."""
    update = np.full(64, 0.1)

    assert quantised(SMALL, update).tolist() != quantised(SMALL, update).tolist()


def test_rounding_falls_back_on_truncation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a try the update is truncated, which fits by the clip alone."""
    monkeypatch.setattr(rounding, "_TRIES", 0)

    found = quantised(SMALL, np.random.default_rng(1).standard_normal(64))

    assert 0 < (found**2).sum() <= 30**2


@pytest.mark.parametrize("make", [gaussian, skellam])
def test_a_noisy_sum_decodes_to_the_sum_of_updates(make: Callable[[int], Sampler], fixed: Fixed) -> None:
    """Ten sites' words, added modulo 2^32 in blocks, give the sum of their updates within the noise and rounding."""
    sites, shares, size = 10, 7, 2 * BLOCK
    mechanism = SiteMechanism(size, 1.0, 500.0, 0.5)
    variance = mechanism.share_variance(shares)
    sampler, rng = make(variance), np.random.default_rng(8)
    total, plain = np.zeros(size, np.uint32), np.zeros(size)
    mechanism.require_room(sites, shares, 32)
    for site in range(sites):
        update = rng.standard_normal(size - 5).astype(np.float32)
        update *= 0.9 / np.linalg.norm(update)
        plain[: update.size] += update
        parts = mechanism.quantise(update, KEY, fixed(f"rounding {site}"))
        blocks = list(sampler.share(fixed(f"noise {site}")).noised(parts, 32))
        assert [block.size for block in blocks] == [BLOCK, BLOCK]
        total += np.concatenate(blocks)

    error = (mechanism.decode(total, KEY) - plain) * 500

    # a value of an update is well below one unit here, and rounds up or down by chance: that adds at most 1/4 a site
    assert sites * variance <= error.var() * 1.02
    assert error.var() <= 1.02 * sites * (variance + 1 / 4)
    assert abs(error.mean()) < 5 * sqrt(sites * (variance + 1) / size)


# ----------------------------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize(
    ("sites", "mechanism", "rounds", "gauss", "skell"),
    [
        (10, SiteMechanism(2**20, 1.0, 20000.0, 6.4), 100, "7.974125", "7.974125"),
        (100, SiteMechanism(2**16, 0.5, 300.0, 2.0), 50, "31.88330", "31.88384"),
        (1000, SiteMechanism(2**20, 1.0, 1000.0, 1.5, beta=0.0), 10, "28.33364", "28.33365"),
    ],
)
def test_the_reference_rows(sites: int, mechanism: SiteMechanism, rounds: int, gauss: str, skell: str) -> None:
    """Epsilon at delta 1e-5 of three jobs, by RDP at integer orders and proposition 12 of Canonne and others 2020."""
    variance = (mechanism.reach * mechanism.z) ** 2
    tau = share_sum_distance(variance / sites, sites)
    bounds = {"variance": variance, "squared": mechanism.squared, "l1": mechanism.l1}

    def epsilon(rdp: Callable[[int], float]) -> float:
        orders = range(2, 512)
        return min(rounds * rdp(a) + log(1 - 1 / a) - log(1e-5 * a) / (a - 1) for a in orders)

    by_gauss = epsilon(lambda a: rdp_ddgauss(a, dimension=mechanism.dimension, tau=tau, **bounds))
    by_skellam = epsilon(lambda a: rdp_skellam(a, **bounds))

    digits = len(gauss) - gauss.index(".") - 1
    assert (f"{by_gauss:.{digits}f}", f"{by_skellam:.{digits}f}") == (gauss, skell)


def test_each_bound_of_either_law_is_used() -> None:
    """The smallest of the bounds holds: wide noise, narrow noise, and shares that do not quite add up."""
    assert rdp_skellam(2, variance=1e6, squared=4, l1=8) == pytest.approx(4e-6 + 60 / 4e12)
    assert rdp_skellam(64, variance=4.0, squared=400, l1=20) == pytest.approx(64 * 400 / 8 + 3 * 20 / 8)
    one = rdp_ddgauss(3, variance=100, squared=25, l1=20, dimension=64, tau=1e-3)
    assert one == pytest.approx(min(0.375 + 0.064, 1.5 * (0.25 + 0.004 + 64e-6), 1.5 * (0.5 + 8e-3) ** 2))
    assert rdp_ddgauss(3, variance=100, squared=25, l1=20, dimension=64, tau=0) == pytest.approx(0.375)
    assert rdp_ddgauss(100, variance=1, squared=1, l1=1, dimension=4, tau=0.1) == pytest.approx(50.4)
    assert rdp_ddgauss(2, variance=1, squared=1, l1=9, dimension=4, tau=0.1) == pytest.approx(1.4)
    assert rdp_ddgauss(2, variance=1, squared=1, l1=9, dimension=400, tau=0.01) == pytest.approx(1.22)
    assert rdp_ddgauss(2, variance=1, squared=1, l1=90, dimension=400, tau=0.01) == pytest.approx(1.44)


@pytest.mark.parametrize("variance", [1, 4, 64])
def test_tau_is_the_texts_sum(variance: int) -> None:
    """10 sum of exp(-2 pi^2 v k / (k + 1)); one share alone is what it is."""
    terms = [exp(-2 * np.pi**2 * variance * k / (k + 1)) for k in (1, 2, 3)]

    assert share_sum_distance(variance, 4) == pytest.approx(10 * sum(terms), rel=1e-12)
    assert share_sum_distance(variance, 1) == 0


def test_a_shares_variance_is_rounded_up() -> None:
    """(s z C)^2 / n_eff, as an integer that is never less."""
    assert SMALL.share_variance(7) == 515  # 3600 / 7 = 514.3
    assert SMALL.share_variance(9) == 400


# ------------------------------------------------------------------------------------------------------------- refusals


def test_the_modulus_rule() -> None:
    """2^ring >= 2 k sqrt((C n s)^2 / D + (1/4 + v) n), k = 4, to its last bit; D counts as 1 without rotation."""
    mechanism = SiteMechanism(2**10, 1.0, 1000.0, 4.0)
    spread = sqrt((1000 * 10) ** 2 / 2**10 + (0.25 + 16e6 / 4) * 10)
    assert 2**15 < 8 * spread < 2**16

    mechanism.require_room(10, 4, 16)
    with pytest.raises(ConfigurationError, match="the sum of 10 sites with its noise wraps around a ring of 16 bits"):
        replace(mechanism, scale=1000.0 * 2**16 / (8 * spread) * 1.001).require_room(10, 4, 16)
    with pytest.raises(ConfigurationError, match="wraps around") as refused:
        replace(mechanism, rotated=False).require_room(10, 4, 16)
    assert "choose a smaller scale or a wider ring" in str(refused.value)
    full = replace(mechanism, scale=sqrt((2**26 - 1250) * 2**10) / 1000, z=1e-3)  # 1250 = (1/4 + 1) * 1000
    replace(full, scale=full.scale * (1 - 1e-9)).require_room(1000, 4, 16)
    with pytest.raises(ConfigurationError, match="wraps around"):
        replace(full, scale=full.scale * (1 + 1e-9)).require_room(1000, 4, 16)


@pytest.mark.parametrize("dimension", [4, 12, 1000])
def test_a_dimension_that_cannot_be_rotated_is_refused(dimension: int) -> None:
    """Rotated vectors have a power of two of values, from 8 on; others any number."""
    with pytest.raises(ConfigurationError, match=f"a vector of {dimension} values cannot be rotated"):
        replace(SMALL, dimension=dimension)

    assert replace(SMALL, dimension=dimension, rotated=False).squared


@pytest.mark.parametrize(
    "wrong",
    [
        {"clip": 0.0},
        {"scale": -1.0},
        {"z": np.nan},
        {"clip": np.inf},
        {"beta": 1.0},
        {"beta": -0.1},
        {"scale": 2.0**31 - 8},
        {"dimension": 0, "rotated": False},
    ],
)
def test_numbers_that_make_no_mechanism_are_refused(wrong: dict[str, float]) -> None:
    """Sizes are positive, beta is a probability, and squared norms fit 64 bits."""
    with pytest.raises(ConfigurationError, match="no mechanism for"):
        replace(SMALL, **wrong)


def test_vectors_of_another_length_are_refused() -> None:
    """An update is no longer than D, a sum exactly D."""
    with pytest.raises(LocalProtocolError, match=r"an update of shape \(65,\)"):
        SMALL.quantise(np.zeros(65), KEY)
    with pytest.raises(LocalProtocolError, match=r"an update of shape \(2, 3\)"):
        SMALL.quantise(np.zeros((2, 3)), KEY)
    with pytest.raises(LocalProtocolError, match=r"a sum of shape \(63,\)"):
        SMALL.decode(np.zeros(63, np.uint32), KEY)
