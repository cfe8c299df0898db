import math
from fractions import Fraction

import pytest

from federation.errors import ConfigurationError
from privacy.differential_privacy import calibration
from privacy.differential_privacy.accounting import epsilon, fourier_epsilon, gaussian_mu, renyi_epsilon
from privacy.differential_privacy.calibration import (
    Noise,
    calibrated,
    linear_defaults,
    require_delta,
    require_reproduced,
)
from privacy.differential_privacy.events import Releases, noise_multiplier
from privacy.differential_privacy.record import Dither, Exact, finest_grid, share_variance
from privacy.differential_privacy.sampler import noise_shares

REFERENCE = [
    (0.1, 1e-4, 1.0, 2, 34.659695, 34.659696, 39.277787),
    (1, 1e-4, 1.0, 20, 14.246897, 14.246897, 15.691020),
    (3, 1e-4, 1.0, 50, 8.649028, 8.649028, 9.397220),
    (10, 1e-4, 1.0, 100, 4.552651, 4.552651, 4.860404),
    (1, 1e-5, 1.0, 100, 37.306316, 37.306317, 40.453854),
    (0.1, 1e-5, 1.0, 65, 247.910928, 247.91105, 273.96917),
    (1, 1e-5, 0.01, 1000, 1.4146195, 1.4146195, 1.5131222),
    (3, 1e-5, 0.01, 1000, 0.8135845, 0.8135849, 0.8682231),
    (1, 1e-5, 0.05, 500, 4.2999482, 4.2999485, 4.6616525),
    (3, 1e-5, 0.1, 200, 2.1780552, 2.1780557, 2.3353452),
    (8, 1e-6, 0.02, 2000, 0.8923094, 0.8923105, 0.9273056),
    (1, 1e-4, 0.1, 100, 3.3799722, 3.3799723, 3.7246276),
    (0.5, 1e-6, 0.005, 5000, 2.9608239, 2.9608275, 3.1779318),
    (0.3, 1e-5, 0.1, 50, 8.1806306, 8.1806308, 8.9689354),
]
"""Section 5: eps, delta, q, T, and z by the closed form or Fourier (A), by PLD (B) and by RDP (R)."""


@pytest.mark.parametrize(("eps", "delta", "q", "rounds", "way_a", "way_b", "way_r"), REFERENCE)
def test_reference_values(
    eps: float, delta: float, q: float, rounds: int, way_a: float, way_b: float, way_r: float
) -> None:
    """Every cell of section 5's z: A and R give back epsilon, and calibration finds B, to five digits."""
    if q == 1:
        assert math.sqrt(rounds) / gaussian_mu(eps, delta) == pytest.approx(way_a, abs=5.1e-7)
    assert fourier_epsilon((Releases(q, way_a, rounds),), delta) == pytest.approx(eps, rel=2e-6)
    assert renyi_epsilon((Releases(q, way_r, rounds),), delta)[0] == pytest.approx(eps, rel=1e-6)
    z = calibrated(eps, delta, q, rounds)
    assert z == pytest.approx(way_b, rel=1e-5)
    assert z >= way_a


@pytest.mark.parametrize(
    ("eps", "delta", "q", "rounds"), [(1, 1e-5, 1.0, 100), (1, 1e-4, 0.1, 100), (2, 1e-10, 0.05, 60)]
)
def test_calibration_finds_the_least_of_six_digits(eps: float, delta: float, q: float, rounds: int) -> None:
    """One unit less in the sixth digit costs more than the budget, whichever accountant prints."""
    z = calibrated(eps, delta, q, rounds)
    unit = 10.0 ** (math.floor(math.log10(z)) - 5)
    assert float(f"{z:.6g}") == z
    assert epsilon((Releases(q, z, rounds),), delta).value <= eps
    assert epsilon((Releases(q, z - unit, rounds),), delta).value > eps


@pytest.mark.parametrize("guess", [3.3, 3.38, 3.5])
def test_calibration_does_not_depend_on_its_first_guess(guess: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed number decides: a guess too low or too high leads to the same z."""
    monkeypatch.setattr(calibration, "_neighbourhood", lambda *_: guess)
    assert calibrated.__wrapped__(1, 1e-4, 0.1, 100) == calibrated(1, 1e-4, 0.1, 100) == 3.37999


@pytest.mark.parametrize(
    ("eps", "delta", "q", "rounds", "units"), [(1, 1e-5, 1.0, 100, 16), (3, 1e-5, 0.1, 200, 1 << 18)]
)
def test_integers_never_cost_more_than_was_asked_for(
    eps: float, delta: float, q: float, rounds: int, units: int
) -> None:
    """The epsilon recomputed from v, D and n_eff is at most the calibrated one, on coarse grids and on fine ones."""
    z = calibrated(eps, delta, q, rounds)
    for n_eff in (2, 7, 66):
        actual = noise_multiplier(share_variance(z, units**2, n_eff), units**2, n_eff)
        assert actual >= z
        assert epsilon((Releases(q, actual, rounds),), delta).value <= eps


@pytest.mark.parametrize(
    ("sites", "colluding", "rounding", "reach", "z", "bits", "deviation"),
    [
        (4, 1, Exact(), Fraction(486, 4), 14.246897, 21, 17250018),
        (10, 3, Dither(1 << 20, 1e-12), Fraction(4096, 10), 2.1780557, 18, 215807.8),
        (100, 33, Dither(10**7, 1e-12), Fraction(65536, 100), 2.1780557, 14, 4381.0),
    ],
)
def test_calibrated_noise_gives_the_reference_grids(
    sites: int, colluding: int, rounding: Exact | Dither, reach: Fraction, z: float, bits: int, deviation: float
) -> None:
    """Section 2's table: from z to the grid to one share's deviation, and back to the z of an event."""
    shares = noise_shares(sites, colluding)
    grid = finest_grid(rounding, clip=1.0, z=z, sites=sites, shares=shares, reach=reach)
    v = share_variance(z, grid.squared, shares)
    assert (grid.scale, math.sqrt(v)) == (1 << bits, pytest.approx(deviation, rel=2e-5))
    assert noise_multiplier(v, grid.squared, shares) == pytest.approx(z, rel=1e-7)


def test_epsilon_that_nothing_proves_is_refused() -> None:
    """Below delta = 1e-9 Rényi orders up to 256 prove no epsilon of 0.03, however much noise there is."""
    with pytest.raises(ConfigurationError, match=r"no noise is proved to give epsilon = 0\.03.*a larger epsilon"):
        calibrated(0.03, 1e-10, 0.5, 50)


@pytest.mark.parametrize(
    ("eps", "delta", "q", "rounds"), [(0, 1e-5, 1.0, 9), (1, 0, 1.0, 9), (1, 1e-5, 0.0, 9), (1, 1e-5, 1.0, 0)]
)
def test_calibration_of_nonsense_is_refused(eps: float, delta: float, q: float, rounds: int) -> None:
    """No budget, no delta, no records and no rounds are each told by name."""
    with pytest.raises(ConfigurationError, match=r"no privacy budget|no probability|record rate|rounds cannot be"):
        calibrated(eps, delta, q, rounds)


@pytest.mark.parametrize(("delta", "n_pub"), [(2.1e-5, 5000), (0.0, 5000), (math.nan, 5000), (1e-5, 0)])
def test_fail_closed_on_a_large_delta(delta: float, n_pub: int) -> None:
    """Delta is at most 1/(10 N_pub)."""
    require_delta(2e-5, 5000)
    with pytest.raises(ConfigurationError, match=r"delta = .* for about \d+ records.*at most 1/\(10 N_pub\)"):
        require_delta(delta, n_pub)


@pytest.mark.parametrize("members", [2, 3])
def test_fail_closed_on_too_few_sites(members: int) -> None:
    """N < max(3, c + 2) leaves fewer than two shares that count."""
    with pytest.raises(ConfigurationError, match=r"noise shares .* may be known to others"):
        noise_shares(members, members - 1)


@pytest.mark.parametrize(
    ("stated", "v", "message"),
    [
        (Noise(14.25, 1 << 42), None, r"z = 14\.25 and not 14\.2469"),
        (Noise(math.nan, 1 << 42), None, r"z = nan and not 14\.2469"),
        (Noise(14.2469, 1 << 40), None, r"D\^2 = 1099511627776 and not 4398046511104"),
        (Noise(14.2469, 1 << 42), 10**14, r"v = 100000000000000 and not \d{15}"),
    ],
)
def test_fail_closed_on_noise_that_is_not_reproduced(stated: Noise, v: int | None, message: str) -> None:
    """A site refuses a z, a D or a v that is not that of its own calibration, and takes its own."""
    own = Noise(14.2469, 1 << 42)
    right = share_variance(own.z, own.squared, 3)
    require_reproduced(own, own, right, 3)
    with pytest.raises(ConfigurationError, match=message):
        require_reproduced(stated, own, right if v is None else v, 3)


def test_last_digit_of_z_may_differ() -> None:
    """Two machines that round the last digit differently agree, as long as v is that of the stated z."""
    stated, own = Noise(14.2470, 1 << 42), Noise(14.2469, 1 << 42)
    require_reproduced(stated, own, share_variance(stated.z, own.squared, 3), 3)
    with pytest.raises(ConfigurationError, match="v = "):
        require_reproduced(stated, own, share_variance(own.z, own.squared, 3), 3)


@pytest.mark.parametrize(
    ("eps", "delta", "n_pub", "parameters", "rounds"),
    [(1, 1e-4, 500, 14, 18), (1, 1e-5, 2000, 34, 40), (10, 1e-5, 5000, 34, 100), (0.1, 1e-4, 100, 14, 2)],
)
def test_linear_defaults_follow_the_public_rule(
    eps: float, delta: float, n_pub: int, parameters: int, rounds: int
) -> None:
    """T is half of mu N sqrt(n_eff/n)/sqrt(d) within 2 and 100, z is sqrt(T)/mu, and half the iterates count."""
    found = linear_defaults(eps, delta, n_pub=n_pub, parameters=parameters, sites=4, n_eff=3)
    signal = gaussian_mu(eps, delta) * n_pub * math.sqrt(3 / 4) / math.sqrt(parameters)
    assert found.rounds == rounds == min(100, max(2, round(signal / 2)))
    assert found.z == pytest.approx(math.sqrt(rounds) / gaussian_mu(eps, delta), rel=1e-5)
    assert (found.q, found.clip, found.learning_rate, found.averaged) == (1, 1, 1, rounds // 2)
