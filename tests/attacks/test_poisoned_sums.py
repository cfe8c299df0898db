"""A site, or a model, that would move the mean further than one member can: overflow, NaN, weight, norm (section 6).

Honest sites encode as the product does. What an attack gains is how far the model moves: the L2 norm of the mean, where
every honest update has at most `CLIP`.
"""

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from privacy.secure_aggregation.rostersum import encoding
from privacy.secure_aggregation.rostersum.encoding import GUARD, BurnedError, DeclineError, TrainCodec, TrainSum
from privacy.secure_aggregation.rostersum.messages import Decline
from privacy.secure_aggregation.rostersum.site_events import Assignment
from tests.attacks.siege import Secret, besiege, by_records, signed, words_of

POISONER = 2
SIZE, CLIP, BOUND = 1024, 1.0, 0.5
CODEC = TrainCodec(BOUND, CLIP, 22, "records", 1, 1000)
PLAN = replace(by_records(1, 1000), words=1 + SIZE + GUARD)
Q = CODEC.q
Decode = Callable[[TrainCodec, np.ndarray, int], TrainSum]


def update(idx: int) -> np.ndarray:
    """A site's update, of norm 1."""
    values = np.random.default_rng(idx).normal(0, 1, SIZE)
    return (values / np.linalg.norm(values)).astype("<f4")


def encoded(values: np.ndarray, records: int) -> Secret:
    """What an honest machine makes of an update."""
    blocks = CODEC.prepare(values, records).encode(PLAN.ring, os.urandom(32))
    return signed(np.concatenate([*blocks]))


def moved(poison: Callable[[], Secret], decode: Decode = TrainCodec.decode) -> float | None:
    """How far the model moves when site 2 contributes this; nothing if the round is declined or burned."""

    def work(idx: int, _: Assignment) -> Secret:
        return poison() if idx == POISONER else encoded(update(idx), 1000)

    b = besiege(3, (PLAN,), work=work)
    total = b.round(1)
    if total is None:
        assert b.sent(b.effects[POISONER], Decline)
        return None
    try:
        summed = decode(CODEC, words_of((*total, *[3] * GUARD), PLAN), 3)
    except BurnedError:
        return None
    return float(np.linalg.norm(np.concatenate([*summed.mean()])))


def unchecked(codec: TrainCodec, total: np.ndarray, _members: int) -> TrainSum:
    """A decoder that takes whatever was opened."""
    values = total.view(f"<i{total.itemsize}")[:-GUARD]
    return TrainSum(codec, values[1:], int(values[0]))


def test_honest_sites_move_the_model_by_what_they_are_due() -> None:
    """The mean of three updates of norm 1 has at most norm 1, checked or not: the yardstick of what follows."""
    for decode in (TrainCodec.decode, unchecked):
        honest = moved(lambda: encoded(update(POISONER), 1000), decode)
        assert honest is not None
        assert honest <= CLIP


def forged(weight: int, *values: int) -> Secret:
    """A vector that no machine makes."""
    return (weight, *values, *[0] * (SIZE - len(values)))


POISONS: dict[str, tuple[Secret, float]] = {
    "a weight that leaves almost none in the sum": (forged(1 - 2 * Q), 1e5),
    "a weight below none": (forged(-2 * Q - 7), 1e4),
    "a value beyond its weight": (forged(Q, 2**30), 40),
    "a value that wraps": (forged(Q, 2**31 - Q), 80),
    "a norm beyond the clip": (forged(Q, *[Q - 1] * SIZE), 5),
}
"""A vector, and how far it moves a model at least."""


@pytest.mark.parametrize("name", POISONS)
def test_a_sum_that_no_honest_members_make_moves_nothing(name: str) -> None:
    """Weight, values and norm of the sum are checked: it is burned. Unchecked, one site throws the model anywhere."""
    vector, far = POISONS[name]
    assert moved(lambda: vector) is None
    thrown = moved(lambda: vector, unchecked)
    assert thrown is not None
    assert thrown > far * CLIP


def not_finite() -> Secret:
    """What an honest machine makes of an update in which one record has brought a NaN."""
    values = update(POISONER)
    values[3] = np.nan
    with np.errstate(invalid="ignore"):
        return encoded(values, 1000)


def test_a_nan_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site declines before it promises anything; were it encoded, the sum would be burned; else the model is lost.

    Two lines hold: what is not finite is found when an update is prepared, and a value beyond its weight when the sum
    is decoded.
    """
    assert moved(not_finite) is None
    with pytest.raises(DeclineError):
        not_finite()
    monkeypatch.setattr(encoding, "isfinite", lambda _: True)
    assert moved(not_finite) is None
    thrown = moved(not_finite, unchecked)
    assert thrown is not None
    assert thrown > 80 * CLIP


def overweight() -> Secret:
    """What an honest machine makes of an update behind which it is said to be a hundred times the largest weight."""
    return encoded(update(POISONER), 100_000)


def test_who_claims_more_records_than_the_largest_weight_counts_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is clipped, so the round opens and nobody outweighs the rest; if it were not, the sum would be burned.

    With neither the model moves by what one site alone wants, and more.
    """
    assert moved(overweight) is not None
    assert (moved(overweight) or 0) <= CLIP
    monkeypatch.setattr(TrainCodec, "weight_of", lambda _, number: number)
    assert moved(overweight) is None
    assert (moved(overweight, unchecked) or 0) > 5 * CLIP
