"""Updates with noise: clipped, rotated, rounded within D^2 and noised, whatever they hold; and what their sum means."""

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import LocalProtocolError
from federation.vector import BLOCK
from privacy.crypto import canonical
from privacy.secure_aggregation.rostersum.encoding import GUARD, BurnedError
from privacy.secure_aggregation.rostersum.noise import mechanism_of, round_noise
from privacy.secure_aggregation.rostersum.noised import NoisedSum, decode, prepare, rotation_key
from privacy.secure_aggregation.rostersum.terms import Mechanism, Plan
from tests.privacy.secure_aggregation.rostersum.noisy import plan

CTX = b"c" * 32


def fixed() -> Callable[[int], bytes]:
    """Bytes that are the same for each call of the test: the first drawn is the noise's key."""
    numbers = count()
    return lambda size: next(numbers).to_bytes(size, "big")


def words_of(of: Plan, update: np.ndarray, members: int = 3) -> np.ndarray:
    """The whole vector of an attempt, signed, under the fixed bytes."""
    blocks = list(prepare(of, update.astype("<f4")).encode(CTX, members, 1, fixed()))
    assert all(block.size <= BLOCK for block in blocks)
    return np.concatenate(blocks).view("<i4").astype(np.int64)


def integers_of(of: Plan, update: np.ndarray) -> np.ndarray:
    """What the update alone puts into the sum: the same noise is in that of no update."""
    return words_of(of, update)[:-GUARD] - words_of(of, np.zeros(update.size))[:-GUARD]


values = st.one_of(
    st.floats(-1, 1, width=32), st.floats(width=32), st.sampled_from([3e38, -3e38, 1e-45, np.nan, np.inf, -np.inf])
)


@given(st.lists(values, min_size=9, max_size=16))
@settings(max_examples=50, deadline=None)
def test_what_one_site_moves_the_sum_by_is_bounded_whatever_it_holds(update: list[float]) -> None:
    """Its squares add up to at most D^2, in integers, from words to words: clip, rotation and rounding included."""
    moved = integers_of(plan(16, scale=2.0**10), np.array(update, np.float32))
    assert int(moved @ moved) <= mechanism_of(plan(16, scale=2.0**10)).squared


def test_without_the_clip_the_bound_would_not_hold() -> None:
    """An update at the clip nearly reaches D^2, so the bound is no slack; twice the clip is cut to it."""
    of = plan(16)
    at_clip = np.full(16, 0.5)  # norm 2, the clip
    reached = [int(moved @ moved) for moved in (integers_of(of, at_clip), integers_of(of, 2 * at_clip))]
    squared = mechanism_of(of).squared
    assert all(0.999 * squared < found <= squared for found in reached)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_counts_as_zero_and_is_noised(bad: float) -> None:
    """Nothing else shows: the very same vector leaves as for an update of zeros (I15, I24)."""
    update = np.ones(13)
    update[7] = bad
    of = plan(16)
    assert words_of(of, update).tolist() == words_of(of, np.zeros(13)).tolist()
    assert np.abs(words_of(of, update)[:-GUARD]).min() > 0
    assert prepare(of, update.astype("<f4")).clipped == ("an update that holds NaN or infinite values to zero",)


@pytest.mark.parametrize(
    ("update", "told"),
    [(np.full(9, 0.1), ()), (np.full(9, 2.0), ("the update's norm of 6 to 2",)), (np.full(9, 3e38), None)],
)
def test_what_is_cut_off_is_for_the_sites_own_log(update: np.ndarray, told: tuple[str, ...] | None) -> None:
    """A norm above the clip, in words; the square of a value of 3e38 is still a number."""
    found = prepare(plan(16), update.astype("<f4"))
    assert found.clipped == (told if told is not None else (f"the update's norm of {found.norm:.6g} to 2",))
    assert found.words == 16 + GUARD


@pytest.mark.parametrize("law", Mechanism)
@pytest.mark.parametrize("size", [5, 3 * BLOCK // 2])
def test_a_sum_is_the_updates_plus_noise_of_all_shares(law: Mechanism, size: int) -> None:
    """Decoded, it differs from the updates' sum by noise of the members' variance, and is divided by |P| alone."""
    of = plan(8 if size == 5 else 2 * BLOCK, mechanism=law, z=0.25, scale=2.0**14)
    random = np.random.default_rng(1)
    updates = [(random.normal(size=size) / size**0.5).astype("<f4") for _ in range(4)]
    total = sum(np.concatenate(list(prepare(of, each).encode(CTX, 4, 1))) for each in updates)
    dimension = mechanism_of(of).dimension
    found = decode(of, total, 4, CTX, np.empty(dimension)).first(size)
    assert (found.size, found.weight, found.members) == (size, 4.0, 4)
    deviation = (4 * round_noise(of, 4, 1).variance) ** 0.5 / 2.0**14
    left = found.values - np.sum(updates, axis=0)
    assert np.abs(left).max() < 7 * deviation
    if size > BLOCK:
        assert np.std(left) == pytest.approx(deviation, rel=0.02)
    means = list(found.mean(block=BLOCK))
    assert [part.size for part in means] == ([5] if size == 5 else [BLOCK, BLOCK // 2])
    assert np.concatenate(means).tolist() == (found.values / 4).tolist()


def test_each_attempt_is_rounded_and_noised_anew() -> None:
    """Two attempts of one update share neither noise nor rounding; another context is another rotation."""
    ready = prepare(plan(4096), np.full(4000, 0.01, "<f4"))
    one, two = (np.concatenate(list(ready.encode(CTX, 3, 1))) for _ in range(2))
    assert np.count_nonzero(one == two) < 40
    assert rotation_key(CTX) == canonical.digest("rotation", CTX) != rotation_key(b"d" * 32)


@pytest.mark.parametrize("size", [1, 5, 8, 9, 16])
def test_every_vector_is_as_long_and_its_guard_has_no_noise(size: int) -> None:
    """Whatever pads to D makes D + 4 words; the last four are 1."""
    of = plan(8 if size <= 8 else 16)
    words = words_of(of, np.ones(size))
    assert words.size == of.words
    assert words[-GUARD:].tolist() == [1] * GUARD


@pytest.mark.parametrize("size", [0, 8, 17])
def test_an_update_that_does_not_pad_to_the_plan_is_refused(size: int) -> None:
    """It is of another model."""
    with pytest.raises(LocalProtocolError, match=f"an update of {size} values does not pad to the plan's 16"):
        prepare(plan(16), np.zeros(size, "<f4"))


def test_a_wrong_guard_burns_the_sum() -> None:
    """A member that did not add its guard is found (I23); another length is a bug of ours."""
    of = plan(8)
    total = np.concatenate(list(prepare(of, np.zeros(8, "<f4")).encode(CTX, 3, 1)))
    with pytest.raises(BurnedError, match="its guard says"):
        decode(of, total, 3, CTX, np.empty(8))
    with pytest.raises(LocalProtocolError, match="a sum of 8 values was decoded as one of 16"):
        decode(plan(16), total, 1, CTX, np.empty(16))
    with pytest.raises(LocalProtocolError, match="decoded as one of 8"):
        decode(of, total, 1, CTX, np.empty(16))


def test_a_sum_is_not_cut_to_a_model_that_pads_otherwise() -> None:
    """Eight values are none of a model of nine."""
    found = NoisedSum(np.zeros(8), 3)
    assert found.first(5).size == 5
    with pytest.raises(LocalProtocolError, match="a sum of 8 values was taken for one of updates of 9 values"):
        found.first(9)
