import math
import tracemalloc
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from federation.vector import BLOCK, F64
from privacy.secure_aggregation.interface import Aggregation, Source, Sum, WordType, load
from privacy.secure_aggregation.plain import Plain, PlainSum, make

QUICK = settings(max_examples=40, deadline=None)
WORDS: list[WordType] = ["<f4", "<f8"]


def stored(content: bytes) -> Source:
    """`content` as it is read from a file."""
    return lambda offset, count: content[offset : offset + count]


def contribution(seed: int, size: int, words: WordType) -> np.ndarray:
    """Values such as training gives, over many magnitudes."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=size) * 10.0 ** rng.integers(-6, 7, size)).astype(words)


def whole(blocks: Iterable[F64]) -> F64:
    """Blocks as one vector."""
    return np.concatenate([np.zeros(0), *blocks])


def fingerprint(total: PlainSum) -> tuple[bytes, float]:
    """All that a sum shows, bit for bit."""
    return total.total().tobytes(), total.weight


@QUICK
@given(
    words=st.sampled_from(WORDS),
    size=st.integers(min_value=0, max_value=50),
    weights=st.lists(st.floats(min_value=1e-3, max_value=1e6), min_size=1, max_size=5),
)
def test_the_sum_is_numpys(words: WordType, size: int, weights: list[float]) -> None:
    """The sum is bit for bit numpy's float64 weighted sum in the same order."""
    total = PlainSum(size, words)
    expected = np.zeros(size)
    for seed, weight in enumerate(weights):
        values = contribution(seed, size, words)
        total.add(f"site-{seed}", weight, stored(values.tobytes()))
        expected = expected + weight * values.astype(np.float64)
    assert total.total().tobytes() == expected.tobytes()
    assert total.weight == sum(weights)
    assert whole(total.mean()).tobytes() == (expected / sum(weights)).tobytes()


def test_the_mean_is_the_exact_weighted_mean() -> None:
    """The mean agrees with rational arithmetic to float64's precision."""
    weights = [199, 172, 30, 85]
    sites = [contribution(seed, 20, "<f4") for seed in range(4)]
    total = PlainSum(20, "<f4")
    for seed, weight in enumerate(weights):
        total.add(f"site-{seed}", weight, stored(sites[seed].tobytes()))
    exact = [
        float(sum(Fraction(w) * Fraction(float(v)) for w, v in zip(weights, column, strict=True)) / sum(weights))
        for column in zip(*sites, strict=True)
    ]
    np.testing.assert_allclose(whole(total.mean()), exact, rtol=1e-9)


@pytest.mark.parametrize("words", WORDS)
def test_more_values_than_one_block_holds_are_added(words: WordType) -> None:
    """A vector of several blocks is added in full, and given out in blocks that are whole but for the last."""
    values = contribution(1, 2 * BLOCK + 7, words)
    total = PlainSum(values.size, words)
    total.add("alpha", 2.0, stored(values.tobytes()))
    assert total.total().tobytes() == (2.0 * values.astype(np.float64)).tobytes()
    assert [block.size for block in total.mean()] == [BLOCK, BLOCK, 7]
    assert {block.size for block in total.mean(1000)} == {1000, (2 * BLOCK + 7) % 1000}
    assert whole(total.mean(1000)).tobytes() == whole(total.mean()).tobytes()
    parts = [*total.mean(1000, 0, 3000), *total.mean(1000, 3000, 3000), *total.mean(1000, 3000)]
    assert whole(parts).tobytes() == whole(total.mean()).tobytes()


@QUICK
@given(order=st.permutations(range(6)))
def test_adding_in_sorted_order_is_deterministic(order: list[int]) -> None:
    """Contributions that came in any order give equal bits when added in sorted order."""
    arrived = {site: contribution(site, 30, "<f4").tobytes() for site in order}

    def summed() -> tuple[bytes, float]:
        total = PlainSum(30, "<f4")
        for site in sorted(arrived):
            total.add(str(site), site + 0.1, stored(arrived[site]))
        return fingerprint(total)

    first = summed()
    arrived = dict(reversed(arrived.items()))
    assert summed() == first


def spoilt(words: WordType, position: int, value: float) -> bytes:
    """Twelve values, one of which is `value`."""
    values = contribution(9, 12, words)
    values[position] = value
    return values.tobytes()


GOOD = contribution(9, 12, "<f4").tobytes()
BAD: dict[str, tuple[float, bytes, str]] = {
    "NaN": (1.0, spoilt("<f4", 11, math.nan), "holds NaN or infinite values"),
    "infinite": (1.0, spoilt("<f4", 0, math.inf), "holds NaN or infinite values"),
    "minus infinite": (1.0, spoilt("<f4", 5, -math.inf), "holds NaN or infinite values"),
    "signalling NaN": (1.0, GOOD[:44] + b"\x01\x00\xa0\x7f", "holds NaN or infinite values"),
    "a byte short": (1.0, GOOD[:-1], "has 47 bytes instead of 48"),
    "a value short": (1.0, GOOD[:-4], "has 44 bytes instead of 48"),
    "empty": (1.0, b"", "has 0 bytes instead of 48"),
    "a byte long": (1.0, GOOD + b"\x00", "has more than 48 bytes"),
    "a value long": (1.0, GOOD + GOOD[:4], "has more than 48 bytes"),
    "no weight": (0.0, GOOD, "weighs 0.0"),
    "negative weight": (-1.0, GOOD, "weighs -1.0"),
    "NaN weight": (math.nan, GOOD, "weighs nan"),
    "infinite weight": (math.inf, GOOD, "weighs inf"),
    "overweight": (math.nextafter(1e15, math.inf), GOOD, "weighs 1000000000000000.1"),
}


@pytest.mark.parametrize(("weight", "content", "problem"), BAD.values(), ids=BAD.keys())
def test_a_bad_contribution_is_refused_and_the_sum_is_bit_equal(weight: float, content: bytes, problem: str) -> None:
    """What is not as it must be is refused by its site's name, changes no bit, and the next site is added."""
    total = PlainSum(12, "<f4")
    total.add("alpha", 3.0, stored(contribution(1, 12, "<f4").tobytes()))
    before = fingerprint(total)
    with pytest.raises(RemoteProtocolError) as refused:
        total.add("clinic-b", weight, stored(content))
    assert str(refused.value).startswith(f"the contribution of site 'clinic-b' {problem}; the sum stays as it was")
    assert refused.value.fix
    assert fingerprint(total) == before
    total.add("gamma", 1e15, stored(GOOD))
    assert total.weight == 3.0 + 1e15


@QUICK
@given(
    position=st.integers(0, 39),
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
    words=st.sampled_from(WORDS),
)
def test_no_position_hides_a_value_that_is_not_finite(position: int, value: float, words: WordType) -> None:
    """One NaN or infinity anywhere is found before anything is added."""
    values = contribution(4, 40, words)
    values[position] = value
    total = PlainSum(40, words)
    before = fingerprint(total)
    with pytest.raises(RemoteProtocolError, match="'clinic-b' holds NaN or infinite values"):
        total.add("clinic-b", 1.0, stored(values.tobytes()))
    assert fingerprint(total) == before


def test_a_sum_that_could_overflow_is_refused() -> None:
    """Finite float64 values whose weighted sum could leave float64 are refused before they are added."""
    huge = np.array([1e299, -9e299]).tobytes()
    total = PlainSum(2, "<f8")
    total.add("alpha", 1.0, stored(huge))
    before = fingerprint(total)
    for weight in (1.0, 1e15):
        with pytest.raises(RemoteProtocolError, match=r"'clinic-b' could bring the sum up to .*; .*below 1e\+300"):
            total.add("clinic-b", weight, stored(huge))
    assert fingerprint(total) == before


def test_a_disk_that_gives_out_changes_nothing() -> None:
    """A source that fails while the contribution is checked leaves the sum in use."""

    def broken(*_: int) -> bytes:
        raise OSError("the disk is gone")

    total = PlainSum(12, "<f4")
    before = fingerprint(total)
    with pytest.raises(OSError, match="the disk is gone"):
        total.add("alpha", 1.0, broken)
    assert fingerprint(total) == before


def test_a_contribution_that_shrinks_after_its_check_is_our_own_fault() -> None:
    """No site is blamed for a file that somebody cut after it was checked; nothing is made of it."""
    held = bytearray(GOOD)
    total = PlainSum(12, "<f4")
    total.add("alpha", 1.0, lambda offset, count: bytes(held[offset : offset + count]))
    del held[40:]
    for use in (total.total, lambda: whole(total.mean())):
        with pytest.raises(LocalProtocolError, match="was checked and then, read again, was shorter"):
            use()


def test_the_sum_of_nobody_has_no_mean() -> None:
    """Before the first contribution the total is zeros, the weight 0, and a mean is refused."""
    total = PlainSum(3, "<f4")
    assert (total.total().tolist(), total.weight) == ([0.0, 0.0, 0.0], 0.0)
    with pytest.raises(LocalProtocolError, match="nothing was added has no mean"):
        total.mean()


def test_what_a_sum_gives_out_is_not_its_accumulator() -> None:
    """Writing into a total or a mean does not change the sum."""
    total = PlainSum(12, "<f4")
    total.add("alpha", 1.0, stored(GOOD))
    before = fingerprint(total)
    total.total()[:] = 0
    for block in total.mean():
        block[:] = 0
    assert fingerprint(total) == before


def test_memory_grows_neither_with_the_sites_nor_with_the_vector() -> None:
    """What a sum allocates while it is made are a few blocks, for any number of sites and any size."""

    def peak(sites: int, size: int) -> int:
        content = bytes(4 * size)
        total = PlainSum(size, "<f4")
        tracemalloc.start()
        for site in range(sites):
            total.add(f"site-{site}", 1.0, stored(content))
        for _ in total.mean():
            pass
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    blocks = 8 * BLOCK
    assert peak(2, 4 * BLOCK) < 8 * blocks
    assert peak(50, 4 * BLOCK) < peak(2, 4 * BLOCK) + blocks / 8
    assert peak(2, 40 * BLOCK) < peak(2, 4 * BLOCK) + blocks / 8


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("order", ["<", ">"])
def test_encode_is_the_little_endian_identity(words: WordType, order: str) -> None:
    """A contribution's bytes are its values, little endian in their own precision, whatever their order in memory."""
    values = contribution(5, 9, words)
    assert Plain().encode(values.astype(order + words[1:])[::-1][::-1]) == values.tobytes()


def test_what_encode_gives_a_sum_takes() -> None:
    """One site's contribution is its own mean: both halves speak one language."""
    protocol = make()
    values = contribution(6, 9, "<f4")
    total = protocol.open(9, "<f4")
    total.add("alpha", 7.0, stored(protocol.encode(values)))
    np.testing.assert_allclose(whole(total.mean()), values, rtol=1e-15)


def test_the_protocol_is_found_by_its_name() -> None:
    """The job's word `plain` finds this protocol, which keeps the seam; another word is refused with the choices."""
    protocol = load("plain")
    assert isinstance(protocol, Aggregation)
    assert isinstance(protocol.open(1, "<f8"), Sum)
    with pytest.raises(ConfigurationError, match=r"plug-in named 'plane'.*did you mean 'plain'"):
        load("plane")
