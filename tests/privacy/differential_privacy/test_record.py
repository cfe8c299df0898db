from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import ConfigurationError, LocalProtocolError
from federation.vector import BLOCK
from privacy.crypto.masks import Words
from privacy.differential_privacy import record
from privacy.differential_privacy.record import (
    CHUNK,
    GAMMA,
    Dither,
    Exact,
    ExactSum,
    Grid,
    beta_of,
    finest_grid,
    gamma_of_chunks,
    share_variance,
)
from privacy.differential_privacy.rounding import dithered
from privacy.differential_privacy.sampler import gaussian, noise_shares
from privacy.differential_privacy.table import I64

Fixed = Callable[[str], Callable[[int], bytes]]
QUICK = settings(max_examples=50, deadline=None)

AWKWARD = st.one_of(
    st.floats(-2, 2),
    st.integers(-9, 9).map(lambda k: (k + 0.5) / 4),
    st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 2.2e-308, 0.5, -0.5, 1e200, np.inf, -np.inf, np.nan]),
)
"""Values of gradients: usual ones, halves of the grid, denormals, and what no gradient should have."""


@dataclass(frozen=True)
class Nearest:
    """Rounding of the sum to nearest, which the text allows with a larger D: not part of the product."""

    values: int

    def squared_sensitivity(self, scale: float, clip: float) -> int:
        """(s C' + sqrt d)^2."""
        return ceil((scale * clip * (1 + GAMMA) + sqrt(self.values)) ** 2)


class Silent:
    """A noise share of zeros, to see what the noise is added to."""

    def noised(self, parts: Iterable[I64], ring: int) -> Iterator[Words]:
        """The parts as words."""
        return (part.astype(f"<u{ring // 8}") for part in parts)


def encoded(grid: Grid, values: I64) -> I64:
    """What a grid makes of an integer sum without noise, as signed integers."""
    return np.concatenate(list(grid.encode([values.copy()], Silent()))).view("<i4").astype(np.int64)  # type: ignore[arg-type] # a share's double


# ----------------------------------------------------------------------------------------------------------- exact path


@QUICK
@given(
    rows=st.lists(st.lists(AWKWARD, min_size=3, max_size=3), min_size=1, max_size=8),
    single=st.booleans(),
    scale=st.sampled_from((4.0, 5.5, 1000.0, 2.0**24)),
    clip=st.sampled_from((1.0, 0.3, 1.7)),
    cuts=st.lists(st.integers(0, 8), max_size=3),
    seed=st.integers(0, 99),
)
@pytest.mark.filterwarnings("error")
def test_exact_path_sensitivity(
    *, rows: list[list[float]], single: bool, scale: float, clip: float, cuts: list[int], seed: int
) -> None:
    """One record moves the integer sum by at most D, whatever it holds, in any order and any chunks."""
    grid = Grid(Exact(), clip, scale, 1 << 30)
    with np.errstate(over="ignore"):
        gradients = np.array(rows, np.float32 if single else np.float64)
    whole, without, alone, shuffled = (ExactSum(3, grid) for _ in range(4))

    whole.add(gradients)
    without.add(gradients[1:])
    alone.add(gradients[:1])
    order = np.random.default_rng(seed).permutation(len(rows))
    for part in np.split(gradients[order], sorted(cut % (len(rows) + 1) for cut in cuts)):
        shuffled.add(part)

    moved = (whole.total - without.total).tolist()
    assert sum(each**2 for each in moved) <= grid.squared <= (scale * clip) ** 2
    assert moved == alone.total.tolist()
    assert shuffled.total.tolist() == whole.total.tolist()


def test_truncation_is_towards_zero_after_the_clip() -> None:
    """A gradient within C keeps its values rounded towards zero; a longer one keeps its direction, a hair within C."""
    grid = Grid(Exact(), 1.0, 1000.0, 1 << 30)
    total = ExactSum(2, grid)

    total.add(np.array([[0.0007, -0.0019], [0.6, -0.8], [6.0, 8.0]]))

    assert total.total.tolist() == [0 + 599 + 599, -1 - 799 + 799]


def test_what_is_too_long_in_integers_counts_as_zero() -> None:
    """Where s C is no integer, integers within s C may be beyond D: they are left out, since D is what noise is for."""
    grid = Grid(Exact(), 1.0, 1.5, 1 << 30)
    total = ExactSum(2, grid)

    total.add(np.array([[0.7, 0.7], [0.9, 0.0]]))

    assert grid.squared == 1
    assert total.total.tolist() == [1, 0]


def test_gradients_are_left_as_they_are_and_may_be_none() -> None:
    """An empty batch is a sum of zeros; what was added is not changed, and comes back in blocks that may be."""
    total = ExactSum(BLOCK + 3, Grid(Exact(), 1.0, 2.0**20, 1 << 30))
    gradients = np.ones((1, BLOCK + 3), np.float32)

    total.add(np.empty((0, BLOCK + 3)))
    assert not total.total.any()
    total.add(gradients)
    for part in total.parts():
        part[:] = 7

    assert [part.size for part in total.parts()] == [BLOCK, 3]
    assert (gradients == 1).all()
    assert (total.total == int(2**20 * (1 - 2**-20) / sqrt(BLOCK + 3))).all()


def test_gradients_of_another_shape_are_refused() -> None:
    """Each record has one value for each of the sum's."""
    total = ExactSum(3, Grid(Exact(), 1.0, 4.0, 8))

    for shape in ((3,), (2, 4), (1, 3, 1)):
        with pytest.raises(LocalProtocolError, match="were added to 3 values"):
            total.add(np.zeros(shape))


# ---------------------------------------------------------------------------------------------------------- dither path


def test_dither_coupling(fixed: Fixed) -> None:
    """With one u in both worlds a record moves the rounded sum by at most D in 10^4 draws, and the bound is not loose.

    The record's part is b with |b| = s C; its most awkward fraction is one half. Each coordinate moves by floor(b) or
    one more, this with b's fraction as probability.
    """
    size, reach, rounds = 4096, 300.0, 10_000
    rng = np.random.default_rng(5)
    sums = rng.uniform(-1000, 1000, size)
    part = np.full(size, 4.5)
    part[: size // 2] = -4.5
    part *= reach / np.linalg.norm(part)
    one, other = fixed("coupled"), fixed("coupled")
    limit = Dither(size, 1e-12, 0.0).squared_sensitivity(reach, 1.0)
    longest, ups = 0, np.zeros(size)

    for _ in range(rounds):
        (before,), (after,) = dithered(sums, 1.0, one), dithered(sums + part, 1.0, other)
        moved = after - before
        longest = max(longest, int(moved @ moved))
        ups += moved - np.floor(part)

    assert reach**2 < longest <= limit < 1.02 * longest
    chance = part - np.floor(part)
    assert np.abs(ups - rounds * chance).max() < 6 * np.sqrt(rounds * chance * (1 - chance)).max()


def test_nearest_rounding_needs_a_larger_d() -> None:
    """Rounded to nearest, a record of s C = 300 moves 4096 coordinates by 320: D = s C would be no bound."""
    part = np.full(4096, 300 / 64)
    sums = np.full(4096, 0.5 - (300 / 64) % 1 + 0.001)

    moved = np.rint(sums + part) - np.rint(sums)

    assert np.linalg.norm(moved) == 320
    assert Dither(4096, 1e-12).squared_sensitivity(300.0, 1.0) < 320**2


@QUICK
@given(
    values=st.integers(1, 10**8),
    beta=st.floats(1e-30, 0.5),
    power=st.integers(0, 30),
    clip=st.floats(0.01, 100),
)
def test_the_dithers_d_is_the_texts(values: int, beta: float, power: int, clip: float) -> None:
    """D^2 is the formula's, rounded up, and never below it."""
    scale = 2.0**power / clip
    reach = scale * clip * (1 + 2.0**-20)

    squared = Dither(values, beta).squared_sensitivity(scale, clip)

    exact = reach**2 + values / 4 + sqrt(2 * np.log(1 / beta)) * (reach + sqrt(values) / 2)
    assert exact * (1 - 1e-14) <= squared <= exact * (1 + 1e-11) + 1


@pytest.mark.parametrize("wrong", [{"values": 0}, {"beta": 0.0}, {"beta": 1.0}, {"gamma": -0.1}, {"gamma": np.inf}])
def test_a_dither_without_a_bound_is_refused(wrong: dict[str, float]) -> None:
    """Numbers that bound nothing are told to the job's author."""
    with pytest.raises(ConfigurationError, match="has no bound"):
        Dither(**{"values": 8, "beta": 1e-9, **wrong})


def test_float_excess_below_gamma() -> None:
    """What adding as floats does to one record's part is within gamma clip norms: by GEMM, in chunks, in any order."""
    rng = np.random.default_rng(11)
    records, size = 2048, 64
    gradients = rng.standard_normal((records, size))
    gradients[::2] = np.abs(gradients[::2])  # a sum that grows, so that its last places are lost
    gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
    sums = {
        "gemm": (lambda rows: np.ones(len(rows)) @ rows, gradients),
        "in turn": (lambda rows: np.cumsum(rows, axis=0)[-1], gradients),
        "chunks": (chunked, gradients.astype(np.float32)),
    }

    excess = dict.fromkeys(sums, 0.0)
    for number in rng.permutation(records)[:40]:
        for name, (add, rows) in sums.items():
            rest = np.delete(rows, number, axis=0)[rng.permutation(records - 1)]
            moved = add(rows) - add(rest)
            excess[name] = max(excess[name], float(np.linalg.norm(moved - rows[number].astype(np.float64))))

    assert 0 < max(excess["gemm"], excess["in turn"]) <= GAMMA / 1000
    assert GAMMA < excess["chunks"] <= gamma_of_chunks(records)


def chunked(rows: np.ndarray) -> np.ndarray:
    """Sums of at most `CHUNK` records in float32, one after the other, added in float64."""
    total = np.zeros(rows.shape[1])
    for start in range(0, len(rows), CHUNK):
        total += np.cumsum(rows[start : start + CHUNK], axis=0, dtype=np.float32)[-1].astype(np.float64)
    return total


# --------------------------------------------------------------------------------------------------- clamp, noise, room


@QUICK
@given(
    one=st.lists(st.integers(-(2**40), 2**40), min_size=4, max_size=4),
    other=st.lists(st.integers(-(2**40), 2**40), min_size=4, max_size=4),
    bound=st.integers(1, 2**31 - 1),
)
def test_clamp_and_headroom(one: list[int], other: list[int], bound: int) -> None:
    """The clamp moves no two sums apart in any coordinate, and keeps each within +-B."""
    grid = Grid(Exact(), 1.0, 1.0, bound)

    first, second = (encoded(grid, np.array(each)) for each in (one, other))

    assert np.abs(first).max() <= bound
    assert (np.abs(first - second) <= np.abs(np.subtract(one, other))).all()
    assert first.tolist() == [max(-bound, min(bound, each)) for each in one]


@pytest.mark.parametrize("sites", [3, 4, 10, 31, 100])
def test_no_sum_wraps_at_saturation(sites: int, fixed: Fixed) -> None:
    """With every site at its bound, sums with their noise stay within 32 bits, on the finest grid that lets them."""
    shares, z, reach = noise_shares(sites, sites // 3), 2.0, Fraction(40)
    grid = finest_grid(Exact(), clip=0.7, z=z, sites=sites, shares=shares, reach=reach)
    variance = share_variance(z, grid.squared, shares)
    sampler, total = gaussian(variance), np.zeros(4096, np.uint32)
    for site in range(sites):
        (words,) = grid.encode([np.full(4096, 2**40)], sampler.share(fixed(f"full {sites} {site}")))
        total += words

    found = np.concatenate(list(grid.decode(total, 1.0, 1))) * grid.scale
    assert np.abs(found - sites * grid.bound).max() < 6 * sqrt(sites * variance)
    assert sites * grid.bound + 12 * sqrt(sites * variance) <= 2**31 - 1
    finer = Grid(Exact(), 0.7, 2 * grid.scale, 2 * grid.bound)
    with pytest.raises(ConfigurationError, match=f"the sum of {sites} sites, .* wraps around a ring of 32 bits"):
        finer.require_room(sites, share_variance(z, finer.squared, shares))


@pytest.mark.parametrize(
    ("sites", "colluders", "values", "reach", "z", "power", "path", "excess", "deviation"),
    [
        (4, 1, 14, 486, 14.246897, 21, "exact", "0.0e+00", 17250018),
        (10, 1, 34, 24000, 37.306316, 16, "nearest", "9.0e-05", 815042.2),
        (10, 3, 2**20, 4096, 2.1780552, 18, "dither", "1.7e-05", 215807.8),
        (10, 3, 2**20, 4096, 2.1780552, 18, "nearest", "3.9e-03", 216647.3),
        (100, 33, 10**7, 65536, 2.1780552, 14, "dither", "4.9e-03", 4381.0),
    ],
)
def test_the_grids_of_the_text(
    sites: int,
    colluders: int,
    values: int,
    reach: int,
    z: float,
    power: int,
    path: str,
    excess: str,
    deviation: float,
) -> None:
    """Section 2's table: the power of two of s C, D over s C, a share's standard deviation, as far as z is given."""
    rounding = {"exact": Exact(), "nearest": Nearest(values), "dither": Dither(values, 1e-12)}[path]
    shares = noise_shares(sites, colluders)

    grid = finest_grid(rounding, clip=1.0, z=z, sites=sites, shares=shares, reach=Fraction(reach, sites))  # type: ignore[arg-type] # one is the test's

    assert grid.scale == 2.0**power
    assert f"{sqrt(grid.squared) / 2**power - 1:.1e}" == excess
    assert sqrt(share_variance(z, grid.squared, shares)) == pytest.approx(deviation, rel=1e-7, abs=0.05)


def test_nearest_at_ten_million_values_costs_a_fifth() -> None:
    """The table's last remark: D is 0.193 above s C with nearest rounding, where dither has 0.005."""
    assert f"{sqrt(Nearest(10**7).squared_sensitivity(2.0**14, 1.0)) / 2**14 - 1:.3f}" == "0.193"


@pytest.mark.parametrize("clip", [0.013, 0.1, 0.7, 0.061, 1.1, 1e-3, 12345.678])
def test_s_c_reaches_its_power_of_two(clip: float) -> None:
    """D is the power of two itself, so that no gradient of norm C is lost to rounding of the scale."""
    grid = finest_grid(Exact(), clip=clip, z=1.0, sites=4, shares=3, reach=Fraction(10))

    assert grid.squared == 2**50
    assert grid.sensitivity == 2**25
    total = ExactSum(1, grid)
    total.add(np.array([[2 * clip]]))
    assert total.total[0] > 2**25 - 64


@QUICK
@given(squared=st.integers(1, 2**62))
def test_d_is_the_least_integer_above_its_square(squared: int) -> None:
    """A ledger that holds D as an integer overstates it by less than one."""

    class Fixed:
        """A rounding of this D^2."""

        def squared_sensitivity(self, _scale: float, _clip: float) -> int:
            """The stated one."""
            return squared

    grid = Grid(Fixed(), 1.0, 1.0, 1)  # type: ignore[arg-type] # a rounding's double

    assert (grid.sensitivity - 1) ** 2 < squared <= grid.sensitivity**2


@QUICK
@given(z=st.floats(0.01, 1000), squared=st.integers(1, 2**50), shares=st.integers(1, 100))
def test_a_shares_variance_gives_at_least_z(z: float, squared: int, shares: int) -> None:
    """V = (z^2 D^2 + 4) / n_eff rounded up: from the integers, sqrt(n_eff v - 4) / D is z or hardly more."""
    variance = share_variance(z, squared, shares)

    left = Fraction(shares * variance - 4)
    assert left >= Fraction(z) ** 2 * squared > left - shares


def test_residual_variance(fixed: Fixed) -> None:
    """The noise of an opened sum less the colluders' shares has variance n_eff v = z^2 D^2 + 4, in every attempt.

    Sites drop out between attempts, and what is left is as noisy: the shares of the second attempt are wider and new.
    """
    z, squared = 1.3, 2**20
    for sites, colluders, draws in ((3, 1, 400_000), (4, 1, 400_000), (10, 3, 1_000_000), (100, 33, 40_000)):
        attempts = []
        for attempt, members in enumerate((sites, max(colluders + 2, sites - 1))):
            shares = noise_shares(members, colluders)
            sampler = gaussian(share_variance(z, squared, shares))
            residual, drawn = np.zeros(draws, np.int64), np.empty(draws, np.int64)
            for site in range(members):
                sampler.share(fixed(f"{sites} {attempt} {site}")).fill(drawn)
                residual += drawn if site >= colluders else 0
            attempts.append(residual / sqrt(z**2 * squared + 4))
        for unit in attempts:
            assert abs((unit**2).mean() - 1) < 4 * sqrt(2 / draws)
            assert abs((unit**4).mean() - 3) < 4 * sqrt(96 / draws)
            assert abs((unit[1:] * unit[:-1]).mean()) < 4 / sqrt(draws)
        assert abs((attempts[0] * attempts[1]).mean()) < 4 / sqrt(draws)


def test_the_whole_path_gives_the_mean_gradient(fixed: Fixed) -> None:
    """Four sites' encoded sums, added modulo 2^32, decode to the pooled sum over q N_pub within the noise."""
    rng, size, sites, rate, n_pub, z = np.random.default_rng(3), BLOCK + 5, 4, 0.5, 100, 1.0
    grid = finest_grid(Exact(), clip=2.0, z=z, sites=sites, shares=3, reach=Fraction(30))
    variance = share_variance(z, grid.squared, 3)
    sampler, total, plain = gaussian(variance), np.zeros(size, np.uint32), np.zeros(size)
    for site in range(sites):
        gradients = rng.standard_normal((3, size)).astype(np.float32) / 1000
        summed = ExactSum(size, grid)
        summed.add(gradients)
        plain += gradients.sum(axis=0, dtype=np.float64)
        total += np.concatenate(list(grid.encode(summed.parts(), sampler.share(fixed(f"path {site}")))))

    parts = list(grid.decode(total, rate, n_pub))
    error = np.concatenate(parts) - plain / (rate * n_pub)

    assert [part.size for part in parts] == [BLOCK, 5]
    unit = grid.scale * rate * n_pub
    assert error.std() * unit == pytest.approx(sqrt(sites * variance), rel=0.02)
    assert abs(error.mean() * unit) < 5 * sqrt(sites * variance / size) + 3 * sites


def test_delta_pays_for_the_dither() -> None:
    """Beta = delta / (1000 T)."""
    assert beta_of(1e-5, 200) == pytest.approx(5e-11)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("clip", "scale", "bound"),
    [(0.0, 1.0, 1), (1.0, -1.0, 1), (1.0, 0.5, 1), (1.0, 2.0**31, 1), (1.0, 1.0, 0), (1.0, 1.0, 2**31), (np.nan, 1, 1)],
)
def test_a_grid_that_holds_nothing_is_refused(clip: float, scale: float, bound: int) -> None:
    """Clip, scale and bound are positive, and a gradient fits 32 bits."""
    with pytest.raises(ConfigurationError, match="holds no gradient"):
        Grid(Exact(), clip, scale, bound)


def test_the_finest_grid_of_all_is_2_to_the_30() -> None:
    """Where neither batches nor noise take any room, a gradient of norm C still fits 32 bits."""
    grid = finest_grid(Exact(), clip=1.0, z=1e-3, sites=3, shares=2, reach=Fraction(1, 8))

    assert grid.squared == 2**60


def test_a_job_without_a_grid_is_refused() -> None:
    """Batches or noise too large for any grid are told with both."""
    with pytest.raises(ConfigurationError, match=r"noise multiplier 1e\+09 have no grid") as refused:
        finest_grid(Exact(), clip=1.0, z=1e9, sites=100, shares=66, reach=Fraction(10))
    assert "choose smaller batches, or a smaller noise multiplier" in str(refused.value)
    with pytest.raises(ConfigurationError, match="have no grid"):
        finest_grid(Exact(), clip=1.0, z=1.0, sites=100, shares=66, reach=Fraction(2**31))


def test_a_ring_has_room_to_its_last_unit() -> None:
    """N B + 12 sqrt(n v) may be 2^31 - 1 and no more."""
    grid = Grid(Exact(), 1.0, 1.0, (2**31 - 1 - 12 * 20) // 4)
    left = 2**31 - 1 - 4 * grid.bound

    grid.require_room(4, left**2 // (144 * 4))
    with pytest.raises(ConfigurationError, match="wraps around"):
        grid.require_room(4, left**2 // (144 * 4) + 1)
    with pytest.raises(ConfigurationError, match="wraps around"):
        grid.require_room(5, 0)
    assert record.RING == 32
