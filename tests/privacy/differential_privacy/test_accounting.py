import math
from collections.abc import Iterator

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp, ndtr

from federation.errors import ConfigurationError, LocalProtocolError
from privacy.differential_privacy import accounting
from privacy.differential_privacy.accounting import (
    Method,
    combined,
    epsilon,
    fourier_epsilon,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    pld_epsilon,
    pld_grid,
    renyi,
    renyi_epsilon,
)
from privacy.differential_privacy.events import Releases, dp_event

SAMPLED = Releases(0.1, 1.5, 500)


@pytest.fixture
def anew() -> Iterator[None]:
    """Epsilons are computed anew: a test breaks an accountant."""
    accounting._epsilon.cache_clear()
    yield
    accounting._epsilon.cache_clear()


# ------------------------------------------------------------------------------------------------------ Rényi, L1


HIGHEST = 16


def _lattice(sd: float, shift: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Log-masses of a discrete Gaussian on Z^d, and of the same one shifted, where their ratio's powers have weight."""
    axes = [np.arange(-int(10 * sd) - HIGHEST * each, int(10 * sd) + HIGHEST * each + 1) for each in shift]
    points = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
    here, there = (-((points - centre) ** 2).sum(axis=1) / (2 * sd**2) for centre in (0, np.array(shift)))
    whole = len(shift) * logsumexp(-(np.arange(-int(40 * sd), int(40 * sd) + 1.0) ** 2) / (2 * sd**2))
    return here - whole, there - whole


@pytest.mark.parametrize(("q", "z"), [(0.01, 0.8), (0.1, 1.5), (0.5, 3.0), (1.0, 2.0)])
@pytest.mark.parametrize("shift", [(12,), (3, 4)])
def test_rdp_integer_orders_exact(q: float, z: float, shift: tuple[int, ...]) -> None:
    """At integer orders the discrete law's divergence is the formula's; removed in place of added costs no more."""
    noise, shifted = _lattice(z * math.hypot(*shift), shift)
    mixture = np.logaddexp(math.log1p(-q), math.log(q) + shifted - noise) + noise if q < 1 else shifted
    for order in (2, 3, 5, 8, HIGHEST):
        forward = logsumexp(order * mixture + (1 - order) * noise) / (order - 1)
        backward = logsumexp(order * noise + (1 - order) * mixture) / (order - 1)
        assert forward == pytest.approx(renyi(q, z, order), rel=1e-9)
        assert backward <= forward * (1 + 1e-9)


@pytest.mark.parametrize(("q", "z", "order"), [(1e-6, 5.0, 2), (1e-6, 5.0, 256), (0.01, 1.0, 256), (0.9, 0.3, 40)])
def test_renyi_loses_no_digits_of_a_tiny_divergence(q: float, z: float, order: int) -> None:
    """Whatever its size, the divergence equals that of 60 digits to 12 of them."""
    with mpmath.workdps(60):
        rate, noise = mpmath.mpf(q), mpmath.mpf(z)
        moment = mpmath.fsum(
            mpmath.binomial(order, k) * (1 - rate) ** (order - k) * rate**k * mpmath.exp((k * k - k) / (2 * noise**2))
            for k in range(order + 1)
        )
        expected = float(mpmath.log(moment) / (order - 1))
    assert renyi(q, z, order) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("order", [1.5, 2.0, 1, True])
def test_fractional_orders_are_refused(order: float) -> None:
    """The formula does not hold for the discrete law between whole orders, nor below 2."""
    with pytest.raises(LocalProtocolError, match=r"is not that of the discrete law.*use whole orders"):
        renyi(0.1, 1.0, order)


def test_high_orders_explode_under_sampling() -> None:
    """A thousand rounds at q = 0.01 and z = 1.4146 have a divergence of 3243 at order 32, of less than one at 12."""
    assert 1000 * renyi(0.01, 1.4145, 32) == pytest.approx(3243, rel=1e-3)
    assert 1000 * renyi(0.01, 1.4145, 12) < 1


# ---------------------------------------------------------------------------------------------- whole batches, exact


@pytest.mark.parametrize("mu", [1e-7, 1e-3, 0.1, 1.0, 6.0, 60.0])
@pytest.mark.parametrize("far", [0.0, 1.0, 4.0, 7.0])
def test_gaussian_delta_equals_the_closed_form(mu: float, far: float) -> None:
    """The closed form in 60 digits and the one computed agree to ten, from tiny to huge mu and far into the tail."""
    eps = mu * (far + mu / 2)
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(eps)
        expected = float(mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m))
    assert gaussian_delta(mu, eps) == pytest.approx(expected, rel=max(1e-10, 1e-15 / mu))


@settings(max_examples=50, deadline=None)
@given(eps=st.floats(0.01, 20), digits=st.floats(3, 12))
def test_gaussian_mu_and_epsilon_are_inverse(eps: float, digits: float) -> None:
    """The largest mu of a budget costs that budget."""
    delta = 10**-digits
    assert gaussian_epsilon(gaussian_mu(eps, delta), delta) == pytest.approx(eps, rel=1e-9)


def test_a_mechanism_may_cost_nothing_at_its_delta() -> None:
    """Where delta alone pays, epsilon is 0."""
    assert gaussian_epsilon(1e-6, 1e-3) == 0
    assert epsilon((Releases(0.001, 5.0, 1),), 1e-3).value == 0


@settings(max_examples=20, deadline=None)
@given(mu=st.floats(0.01, 8), digits=st.floats(3, 10))
def test_fourier_of_whole_batches_is_the_closed_form(mu: float, digits: float) -> None:
    """The inversion, which knows nothing of Gaussians' closed form, finds it to five digits."""
    delta = 10**-digits
    exact = gaussian_epsilon(mu, delta)
    assert fourier_epsilon((Releases(1.0, 1 / mu, 1),), delta) == pytest.approx(exact, rel=1e-5, abs=1e-9)


def _one_release(q: float, z: float, eps: float) -> float:
    """The delta of one sampled release, the record removed, in closed form: the loss grows with the output."""
    x = z * (math.log(math.expm1(eps) + q) - math.log(q)) + 1 / (2 * z)
    return float((1 - q) * ndtr(-x) + q * ndtr(1 / z - x) - math.exp(eps) * ndtr(-x))


@pytest.mark.parametrize(
    ("q", "z", "delta"), [(0.01, 1.0, 1e-5), (0.5, 5.0, 1e-7), (0.001, 3.0, 1e-6), (0.2, 0.5, 1e-3)]
)
def test_fourier_of_one_sampled_release_is_its_closed_form(q: float, z: float, delta: float) -> None:
    """One round, whose characteristic function falls off slowest, comes out to four digits."""
    found = fourier_epsilon((Releases(q, z, 1),), delta)
    assert _one_release(q, z, found) == pytest.approx(delta, rel=1e-3)


# ---------------------------------------------------------------------------------------------------- reference values


@pytest.mark.parametrize(
    ("z", "q", "rounds", "delta", "fourier", "pld", "rdp"),
    [
        (1.1, 256 / 60000, 3510, 1e-5, 1.132866, 1.132864, 1.280366),
        (1.0, 64 / 5000, 1560, 1e-5, 2.988322, 2.988322, 3.317414),
        (1.5, 0.1, 500, 1e-4, 7.318219, 7.318220, 8.086679),
        (1.0, 0.01, 1000, 1e-5, 1.828237, 1.828237, 2.107753),
        (20.0, 1.0, 20, 1e-4, 0.682042, 0.682042, 0.762946),
    ],
)
def test_reference_values(
    z: float, q: float, rounds: int, delta: float, fourier: float, pld: float, rdp: float
) -> None:
    """Each cell of section 5's epsilons, by each accountant, to five digits."""
    releases = (Releases(q, z, rounds),)
    assert fourier_epsilon(releases, delta) == pytest.approx(fourier, rel=1e-5)
    assert renyi_epsilon(releases, delta)[0] == pytest.approx(rdp, rel=1e-6)
    printed = epsilon(releases, delta)
    assert (printed.value, printed.renyi) == (pytest.approx(pld, rel=1e-5), pytest.approx(rdp, rel=1e-6))
    assert printed.method is (Method.PLD if q < 1 else Method.GDP)


TRAINING = [
    (256 / 60000, 1.1, 3510, 1e-5, 1.280, 1.143, 1.133),
    (64 / 5000, 1.0, 1560, 1e-5, 3.315, 2.999, 2.988),
    (0.1, 1.5, 500, 1e-4, 8.070, 7.329, 7.318),
]
"""q, z, rounds, delta, and epsilon by other libraries' RDP, PRV and PLD."""


@pytest.mark.parametrize(("q", "z", "rounds", "delta", "rdp", "_", "pld"), TRAINING)
def test_other_accountants_find_what_was_measured(
    q: float, z: float, rounds: int, delta: float, rdp: float, _: float, pld: float
) -> None:
    """Their RDP, at fractional orders too, is a little below ours, and our printed number is their PLD."""
    releases = (Releases(q, z, rounds),)
    theirs = dp_accounting.rdp.RdpAccountant().compose(dp_event(releases)).get_epsilon(delta)
    assert theirs == pytest.approx(rdp, abs=3e-3)
    assert theirs <= renyi_epsilon(releases, delta)[0] <= theirs * 1.01
    assert epsilon(releases, delta).value == pytest.approx(pld, abs=6e-4)


@pytest.mark.slow
def test_prv_accountant_brackets_the_printed_number() -> None:
    """Opacus' PRV accountant, whose error is at most 0.01, bounds what is printed from above and below."""
    from opacus.accountants import PRVAccountant

    for q, z, rounds, delta, _, prv, _ in TRAINING:
        accountant = PRVAccountant()
        accountant.history = [(z, q, rounds)]
        theirs = accountant.get_epsilon(delta, eps_error=0.01)
        assert theirs == pytest.approx(prv, abs=1e-3)
        assert theirs - 0.02 <= epsilon((Releases(q, z, rounds),), delta).value <= theirs


def test_discrete_law_costs_what_the_continuous_one_does() -> None:
    """L3, another way: a scalar discrete Gaussian of D = 200 has its own PLD, and the same epsilon to five digits."""
    grid = pld_grid((SAMPLED,))
    own = privacy_loss_distribution.from_discrete_gaussian_mechanism(
        sigma=200 * SAMPLED.z,
        sensitivity=200,
        sampling_prob=SAMPLED.q,
        value_discretization_interval=grid,
        use_connect_dots=True,
    )
    found = own.self_compose(SAMPLED.count).get_epsilon_for_delta(1e-4)
    assert found == pytest.approx(pld_epsilon((SAMPLED,), 1e-4), rel=1e-5)


def test_cross_job_composition() -> None:
    """Events are composed, and turned into an epsilon once: three jobs of epsilon 1 cost 1.87, two cost 1.45."""
    three = (Releases(1.0, math.sqrt(20) / gaussian_mu(1, 1e-4), 20),) * 3
    assert epsilon(three, 1e-4).value == pytest.approx(1.869352, abs=1e-6)
    both = (Releases(0.01, 1.4146195, 1000), Releases(1.0, 37.306316, 100))
    found = epsilon(both, 1e-5)
    assert found.value == pytest.approx(1.452646, abs=1e-5)
    assert found.renyi == pytest.approx(1.588209, abs=2e-6)
    assert (found.method, found.order) == (Method.PLD, 12)


# ---------------------------------------------------------------------------------------------------------- the rule


def test_events_with_the_same_noise_are_composed_at_once() -> None:
    """Rounds whose z differs beyond nine digits share the smaller; whole batches become one release."""
    z = 1.23456789012345
    whole = Releases(1.0, 3.0, 9), Releases(1.0, 4.0, 16)
    found = combined((whole[0], Releases(0.1, z, 1), whole[1], Releases(0.1, z + 1e-12, 2)))
    assert found == (Releases(0.1, 1.23456789, 3), Releases(1.0, found[1].z, 1))
    assert found[1].z == pytest.approx(math.sqrt(1 / 2), rel=1e-15)


@settings(max_examples=50, deadline=None)
@given(value=st.floats(1e-9, 1e9), digits=st.integers(1, 12))
def test_rounding_down_never_rounds_up(value: float, digits: int) -> None:
    """What is cut is not above the value, by less than one unit of the last digit."""
    found = accounting._rounded_down(value, digits)
    assert value * (1 - 10.0 ** (1 - digits)) <= found <= value


def test_nothing_charged_costs_nothing() -> None:
    """Without events epsilon is 0."""
    assert epsilon((), 1e-5).value == 0


@pytest.mark.usefixtures("anew")
def test_whole_batches_need_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """With q = 1 the printed number is exact, and dp-accounting is not asked for."""
    monkeypatch.setattr(accounting, "require_dp_accounting", None)
    found = epsilon((Releases(1.0, 14.246897, 20),), 1e-4)
    assert (found.method, found.value) == (Method.GDP, pytest.approx(1, rel=1e-6))


@pytest.mark.parametrize(("releases", "delta"), [(SAMPLED, 9e-10), (Releases(1e-6, 1.0, 10), 1e-6)])
def test_renyi_is_printed_where_a_pld_is_not_to_be_trusted(releases: Releases, delta: float) -> None:
    """A delta below 1e-9, and a loss that no grid of a million points resolves, are accounted by RDP."""
    found = epsilon((releases,), delta)
    assert (found.method, found.value) == (Method.RDP, renyi_epsilon(combined((releases,)), delta)[0])


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_delta_that_is_none_is_refused(delta: float) -> None:
    """Delta is a probability, neither 0 nor 1."""
    with pytest.raises(ConfigurationError, match="is no probability of failure"):
        epsilon((SAMPLED,), delta)
    with pytest.raises(ConfigurationError, match="is no probability of failure"):
        gaussian_mu(1, delta)


@pytest.mark.parametrize("eps", [0.0, -1.0, math.inf, math.nan])
def test_epsilon_that_is_no_budget_is_refused(eps: float) -> None:
    """A budget is positive and finite."""
    with pytest.raises(ConfigurationError, match="is no privacy budget"):
        gaussian_mu(eps, 1e-5)


@settings(max_examples=20, deadline=None)
@given(q=st.floats(0.001, 0.99), z=st.floats(0.5, 20))
def test_grid_resolves_one_rounds_loss(q: float, z: float) -> None:
    """The grid is a power of two of at most a hundredth of the loss's deviation, in either direction, by simulation."""
    grid = pld_grid((Releases(q, z, 1), Releases(1.0, 1.0, 1)))
    noise = np.random.default_rng(1).standard_normal(200_000)
    deviations = []
    for removed in (True, False):
        sampled = np.random.default_rng(2).random(noise.size) < q
        x = noise + sampled / z * removed
        deviations.append(np.std(np.logaddexp(math.log1p(-q), math.log(q) + x / z - 1 / (2 * z * z))))
    assert math.frexp(grid)[0] == 0.5
    assert grid <= min(deviations) / 100 * 1.1
    assert grid >= min(*deviations, 1.0) / 210


def test_coarse_grid_is_safe_but_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for the grid's rule: at 2e-4 row 13 of the references takes 0.1 % more noise."""
    fine = pld_epsilon((Releases(0.005, 2.963792, 5000),), 1e-6)
    monkeypatch.setattr(accounting, "pld_grid", lambda _: 2e-4)
    coarse = pld_epsilon((Releases(0.005, 2.963792, 5000),), 1e-6)
    assert coarse == pytest.approx(0.5, rel=1e-5)
    assert fine < 0.9995 * coarse


@pytest.mark.parametrize(
    ("q", "z", "rounds", "delta"),
    [
        (0.0009, 3.7, 23, 1e-5),
        (0.03, 0.64, 2, 1e-4),
        (0.2, 2.9, 231, 2e-8),
        (0.045, 0.63, 638, 1e-6),
        (0.24, 19, 304, 1e-8),
        (0.65, 2.5, 208, 1e-7),
        (0.95, 5.0, 2000, 1e-9),
        (0.0009, 1.5, 4148, 2e-6),
    ],
)
def test_accountants_agree(q: float, z: float, rounds: int, delta: float) -> None:
    """Fourier <= PLD <= RDP, and Fourier and PLD, which share no line of code, differ by less than 2e-5."""
    releases = (Releases(q, z, rounds),)
    fourier, printed = fourier_epsilon(releases, delta), pld_epsilon(releases, delta)
    assert fourier <= printed <= renyi_epsilon(releases, delta)[0]
    assert printed == pytest.approx(fourier, rel=2e-5)


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("accountant", "factor"),
    [
        ("pld_epsilon", 0.998),
        ("pld_epsilon", 1.2),
        ("pld_epsilon", math.nan),
        ("pld_epsilon", -1.0),
        ("fourier_epsilon", 1.002),
        ("fourier_epsilon", math.nan),
    ],
)
def test_accountants_agree_or_refuse(accountant: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A printed number that is too small, too large or none is refused, and the refusal shows no epsilon."""
    right = getattr(accounting, accountant)((SAMPLED,), 1e-4)
    monkeypatch.setattr(accounting, accountant, lambda *_: factor * right)
    with pytest.raises(LocalProtocolError, match=r"the accountants disagree.*no epsilon is printed") as refused:
        epsilon((SAMPLED,), 1e-4)
    assert "7.3" not in str(refused.value)
    assert "500 rounds of q = 0.1, z = 1.5 at delta = 0.0001" in str(refused.value)


@pytest.mark.usefixtures("anew")
def test_infinite_epsilon_is_never_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accountants that agree on infinity are refused too."""
    monkeypatch.setattr(accounting, "pld_epsilon", lambda *_: math.inf)
    monkeypatch.setattr(accounting, "renyi_epsilon", lambda *_: (math.inf, 2))
    with pytest.raises(LocalProtocolError, match="no epsilon is printed"):
        epsilon((SAMPLED,), 1e-4)


@pytest.mark.parametrize(("q", "z", "rounds"), [(1.0, 0.01, 10), (0.1, 0.05, 20), (0.999, 0.02, 3), (0.5, 1e6, 9)])
def test_extreme_noise_is_accounted(q: float, z: float, rounds: int) -> None:
    """Too little noise has a huge epsilon and too much none; neither overflows."""
    found = epsilon((Releases(q, z, rounds),), 1e-5).value
    assert found == 0 if z > 1 else found > 100


@pytest.mark.usefixtures("anew")
def test_exact_number_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With q = 1 a wrong closed form is caught by the inversion."""
    monkeypatch.setattr(accounting, "gaussian_epsilon", lambda *_: 0.68)
    with pytest.raises(LocalProtocolError, match="the accountants disagree"):
        epsilon((Releases(1.0, 20.0, 20),), 1e-4)
