from collections.abc import Callable
from math import isclose

import numpy as np
import pytest

from client.training.private.mechanism import Mechanism, Terms
from client.training.private.plan import EngineName, Plan
from federation.errors import ConfigurationError, LocalProtocolError
from privacy.differential_privacy.events import EVERY_RECORD, Event, Level, Purpose, Unit
from privacy.differential_privacy.record import Dither, Exact, beta_of, share_variance

Fixed = Callable[[str], Callable[[int], bytes]]
PLAN = Plan(EngineName.ONE_BACKWARD, 64, 360, 2000, "test")


def terms(**changes: object) -> Terms:
    """A job's terms."""
    return Terms(
        **{
            "clip": 0.5,
            "rate": 0.05,
            "n_pub": 5000,
            "z": 1.1,
            "epsilon": 3.0,
            "delta": 1e-6,
            "steps": 100,
            **changes,
        }  # type: ignore[arg-type]  # as the test says
    )


def test_grid_and_noise_follow_from_public_numbers_alone() -> None:
    """D^2 and v are those of the text's formulas for the plan's gamma, and make an event that accountants take."""
    found = terms().mechanism(PLAN)

    assert found.grid.rounding == Dither(2000, beta_of(1e-6, 100), PLAN.gamma)
    assert found.grid.scale * 0.5 == 2**16
    assert found.grid.bound == 360 * 2**16
    assert found.variance == share_variance(1.1, found.grid.squared, 1) == found.sampler.variance
    event = Event(
        b"job", 0, 9, Level.RECORD_SITE, Unit.RECORD, 0.05, found.variance, 1, found.grid.squared, 10, Purpose.TRAIN,
        EVERY_RECORD,
    )  # fmt: skip
    assert 1.1 <= event.z < 1.1 * (1 + 1e-6)
    assert found == terms().mechanism(PLAN)


def test_the_exact_path_takes_the_finest_grid() -> None:
    """Records that become integers one by one lose least on the finest grid, where D is exactly s C."""
    found = terms(path="exact").mechanism(PLAN)

    assert found.grid.rounding == Exact()
    assert found.grid.sensitivity == found.grid.scale * 0.5 == 2**22


def test_a_coarse_grid_costs_less_than_a_thousandth() -> None:
    """Up to two million parameters the capped grid's D is that of real numbers to a thousandth, gamma aside."""
    for values in (10, 100_001, 2_000_000):
        plan = Plan(EngineName.ONE_BACKWARD, 64, 360, values, "test")
        found = terms(delta=1e-6).mechanism(plan)
        assert found.grid.sensitivity <= 2**16 * (1 + plan.gamma) * 1.001
        assert found.grid.bound == 360 * 2**16 // (8 if values > 100_000 else 1)


def test_the_mean_is_the_sums_over_the_public_denominator(fixed: Fixed) -> None:
    """On average a mean gradient is the clipped sum over rate * N_pub, with noise of z clip norms over the same."""
    found = terms().mechanism(PLAN)
    total = np.linspace(-3, 3, 2000)
    draws = np.empty((400, 2000), np.float32)
    for number, out in enumerate(draws):
        found.mean(total, out, fixed(f"mean {number}"))

    deviation = 1.1 * 0.5 * (1 + PLAN.gamma) / 250
    assert np.abs(draws.mean(axis=0) - total / 250).max() < 5 * deviation / 20
    assert isclose((draws - total / 250).std(), deviation, rel_tol=0.01)


def test_a_sum_beyond_the_bound_is_set_to_it(fixed: Fixed) -> None:
    """No data makes integers wrap around: they are clamped, silently, and so is what is not finite."""
    found = terms().mechanism(PLAN)
    total = np.zeros(2000)
    total[0], total[1], total[2] = 1e300, -1e9, np.nan
    out = np.empty(2000, np.float32)

    found.mean(total, out, fixed("bound"))

    assert out[0] == pytest.approx(360 * 0.5 / 250, abs=0.03)
    assert out[1] == pytest.approx(-360 * 0.5 / 250, abs=0.03)
    assert abs(out[2]) < 0.03


def test_integers_have_no_dither(fixed: Fixed) -> None:
    """A sum of integers goes as it is to clamp and noise."""
    found = terms(path="exact").mechanism(PLAN)
    out, again = np.empty(2000, np.float32), np.empty(2000, np.float32)

    found.mean_of_integers([np.full(1500, 7), np.full(500, 7)], out, fixed("same"))
    found.mean_of_integers([np.full(1500, 1031), np.full(500, 1031)], again, fixed("same"))

    assert np.allclose((again - out) * 250 * found.grid.scale, 1024, rtol=0.01)


def test_a_broken_sampler_is_found_before_the_first_step(fixed: Fixed) -> None:
    """Randomness that repeats itself fails the self-test, and no step may be made."""
    found = terms().mechanism(PLAN)

    assert isinstance(found.tested(fixed("good")), Mechanism)
    with pytest.raises(LocalProtocolError, match="noise sampler failed its self-test"):
        Mechanism(found.terms, found.grid, 4 * found.variance, _Wrong(found)).tested(fixed("bad"))  # type: ignore[arg-type]  # a double


class _Wrong:
    """A sampler that claims half of the deviation that its draws have."""

    def __init__(self, mechanism: Mechanism) -> None:
        self.variance, self.excess, self.step = mechanism.variance // 4, 0, mechanism.sampler.step
        self.share = mechanism.sampler.share


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip": 0.0}, "private steps with clip 0.0"),
        ({"clip": 1e-12}, "private steps with clip 1e-12"),
        ({"clip": float("nan")}, "private steps with clip nan"),
        ({"rate": 0.0}, "rate 0.0"),
        ({"rate": 1.5}, "rate 1.5"),
        ({"z": 0.0}, "noise multiplier 0.0"),
        ({"steps": 0}, "and 0 steps"),
        ({"epsilon": 0.0}, "epsilon = 0.0 is no budget"),
        ({"delta": 0.01}, r"delta = 0.01 for about 5000 records"),
        ({"n_pub": 0}, "for about 0 records"),
    ],
)
def test_terms_that_protect_nothing_are_refused(changes: dict[str, object], message: str) -> None:
    """Numbers out of their range are told to the job's author."""
    with pytest.raises(ConfigurationError, match=message):
        terms(**changes)


def test_a_job_whose_sampler_would_change_delta_is_refused() -> None:
    """What the noise tables leave out is charged to delta, and must be less than a thousandth of it."""
    with pytest.raises(ConfigurationError, match=r"noise sampler would add .* to delta"):
        terms(epsilon=200.0, delta=1e-6).mechanism(PLAN)
