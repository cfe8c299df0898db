from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import RemoteProtocolError
from privacy.crypto import shamir
from privacy.secure_aggregation.rostersum.messages import Share
from privacy.secure_aggregation.rostersum.opening import Escrow, Rescued

SEEDS = {1: b"\x01" * 32, 4: b"\x04" * 32}


def dealt(threshold: int, holders: tuple[int, ...]) -> dict[int, tuple[Share, ...]]:
    """By holder, the shares of both seeds, from fixed polynomials."""
    coefficients = iter(range(7, 7 + 2 * threshold))
    by_dealer = {
        dealer: shamir.split(seed, threshold, holders, lambda _: next(coefficients)) for dealer, seed in SEEDS.items()
    }
    return {holder: tuple(Share(dealer, by_dealer[dealer][holder]) for dealer in SEEDS) for holder in holders}


def escrow(threshold: int, seeds: Mapping[int, bytes] = SEEDS) -> Escrow:
    """Wants the seeds of sites 1 and 4."""
    return Escrow((1, 4), threshold, lambda dealer, seed: seeds[dealer] == seed)


def wrong(shares: tuple[Share, ...]) -> tuple[Share, ...]:
    """Shares of other seeds."""
    return tuple(Share(each.idx, bytes(32) + b"\x05") for each in shares)


def test_threshold_right_shares_give_the_seeds() -> None:
    """Both seeds come with the share of the third holder, not before, and once."""
    shares, asked = dealt(3, (0, 2, 3, 5)), escrow(3)
    assert asked.add(0, shares[0]) == ()
    assert asked.add(2, shares[2]) == ()

    found = asked.add(5, shares[5])

    assert found == tuple(Rescued(dealer, seed, frozenset()) for dealer, seed in SEEDS.items())
    assert asked.wanted == ()
    assert asked.add(3, shares[3]) == ()


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_half_of_the_spare_shares_may_be_wrong(data: st.DataObject) -> None:
    """With m shares and threshold t the seeds come in spite of floor((m - t) / 2) wrong ones, in any order."""
    holders = (0, 2, 3, 5, 6, 7, 8)
    threshold = data.draw(st.integers(1, 6))
    order = data.draw(st.permutations(holders))
    liars = set(data.draw(st.permutations(holders))[: (len(holders) - threshold) // 2])
    shares, asked = dealt(threshold, holders), escrow(threshold)

    found = [each for idx in order for each in asked.add(idx, wrong(shares[idx]) if idx in liars else shares[idx])]

    assert {each.dealer: each.seed for each in found} == SEEDS
    assert all(each.wrong <= liars for each in found)


def test_wrong_shares_are_named() -> None:
    """Whose share does not fit is told with the seed: holder or dealer lies."""
    shares, asked = dealt(2, (0, 2, 3, 5)), escrow(2)
    asked.add(0, wrong(shares[0]))
    assert asked.add(2, shares[2]) == ()
    assert asked.add(3, shares[3]) == ()

    found = asked.add(5, shares[5])

    assert [each.wrong for each in found] == [frozenset({0})] * 2


def test_a_seed_without_its_commitment_is_never_given() -> None:
    """A dealer that shared another seed than it is committed to gets nothing opened, however many shares agree."""
    shares, asked = dealt(2, (0, 2, 3)), escrow(2, {1: SEEDS[1], 4: b"\x99" * 32})

    found = [each for idx in (0, 2, 3) for each in asked.add(idx, shares[idx])]

    assert [each.dealer for each in found] == [1]
    assert asked.wanted == (4,)


def test_a_member_that_opens_after_all_is_not_rescued() -> None:
    """Its shares are counted no more."""
    shares, asked = dealt(1, (0, 2)), escrow(1)
    asked.drop(4)

    assert [each.dealer for each in asked.add(0, shares[0])] == [1]
    assert asked.wanted == ()


@pytest.mark.parametrize(
    ("shares", "problem"),
    [
        ((Share(1, bytes(33)),), r"sent shares of \[1\] where those of \[1, 4\] were asked"),
        ((Share(4, bytes(33)), Share(1, bytes(33))), r"sent shares of \[4, 1\]"),
        ((Share(1, bytes(33)), Share(4, b"\xff" * 33)), "no share of a secret"),
    ],
    ids=["too few", "disordered", "not in the field"],
)
def test_malformed_shares_change_nothing(shares: tuple[Share, ...], problem: str) -> None:
    """Shares that are not exactly those asked for are refused, and the holder may still send the right ones."""
    asked, right = escrow(1), dealt(1, (0,))

    with pytest.raises(RemoteProtocolError, match=problem):
        asked.add(0, shares)

    assert asked.holders == frozenset()
    assert [each.dealer for each in asked.add(0, right[0])] == [1, 4]


def test_a_holder_cannot_change_its_mind() -> None:
    """A second, other share of one holder is refused; the same again is not."""
    shares, asked = dealt(2, (0, 2)), escrow(2)
    asked.add(0, shares[0])
    asked.add(0, shares[0])

    with pytest.raises(RemoteProtocolError, match="its first ones stand"):
        asked.add(0, wrong(shares[0]))

    assert len(asked.add(2, shares[2])) == 2
