import random
import secrets
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import LocalProtocolError, RemoteProtocolError
from privacy.crypto import shamir

QUICK = settings(max_examples=40, deadline=None)
SECRET = bytes(range(32))


def is_secret(found: bytes) -> bool:
    """The commitment of these tests."""
    return found == SECRET


def test_the_prime_is_the_least_above_two_to_the_256() -> None:
    """2^256 + 297 passes Fermat's test to many bases, and no odd number between does to base 3."""
    assert shamir.PRIME == 2**256 + 297
    assert all(pow(base, shamir.PRIME - 1, shamir.PRIME) == 1 for base in range(2, 60))
    assert all(pow(3, number - 1, number) != 1 for number in range(2**256 + 1, shamir.PRIME, 2))


@pytest.mark.parametrize("threshold", [1, 2, 3, 4, 5])
def test_any_threshold_of_shares_give_the_secret(threshold: int) -> None:
    """Every subset of the threshold's size reconstructs it, and none is found wrong."""
    shares = shamir.split(SECRET, threshold, (0, 2, 3, 7, 99), secrets.randbelow)
    for chosen in combinations(shares, threshold):
        some = {index: shares[index] for index in chosen}
        assert shamir.reconstruct(some, threshold, is_secret) == (SECRET, frozenset())


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_the_least_and_the_largest_secret_are_shared(secret: bytes) -> None:
    """Zero and 2^256 - 1 come back like any other."""
    shares = shamir.split(secret, 3, range(5), secrets.randbelow)
    assert shamir.reconstruct(shares, 3, secret.__eq__) == (secret, frozenset())


def test_fewer_shares_say_nothing() -> None:
    """For each value of the secret there is one polynomial through a share: shares of two secrets can be equal."""
    first = shamir.split(SECRET, 2, [0, 1], lambda _: 5)
    zero = (int.from_bytes(SECRET, "big") + 5) % shamir.PRIME
    second = shamir.split(bytes(32), 2, [0, 1], lambda _: zero)
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_coefficients_are_uniform_over_the_field() -> None:
    """Each coefficient but the secret is one draw below the prime."""
    asked: list[int] = []

    def draw(below: int) -> int:
        asked.append(below)
        return below - 1

    shamir.split(SECRET, 4, range(6), draw)
    assert asked == [shamir.PRIME] * 3


@QUICK
@given(seed=st.integers(0, 2**32), count=st.integers(1, 24), data=st.data())
def test_up_to_half_of_the_spare_shares_may_be_wrong(seed: int, count: int, data: st.DataObject) -> None:
    """With floor((m - t) / 2) of m shares wrong the secret is found, and exactly those are named."""
    rng = random.Random(seed)  # noqa: S311 - a test's choices
    threshold = data.draw(st.integers(1, count))
    wrong = data.draw(st.integers(0, (count - threshold) // 2))
    shares = shamir.split(SECRET, threshold, rng.sample(range(100), count), rng.randrange)
    spoilt = frozenset(rng.sample(sorted(shares), wrong))
    for index in spoilt:
        value = (shamir.number(shares[index]) + rng.randrange(1, shamir.PRIME)) % shamir.PRIME
        shares[index] = value.to_bytes(shamir.SHARE, "big")

    assert shamir.reconstruct(shares, threshold, is_secret) == (SECRET, spoilt)


@pytest.mark.parametrize("threshold", [1, 34, 67, 98])
def test_colluders_may_agree_on_their_wrong_shares(threshold: int) -> None:
    """At 99 shares the most that may be wrong lie on a polynomial of their own, and the true one is still found."""
    shares = shamir.split(SECRET, threshold, range(99), secrets.randbelow)
    other = shamir.split(bytes(32), threshold, range(99), secrets.randbelow)
    liars = frozenset(range((99 - threshold) // 2))
    told = {index: other[index] if index in liars else share for index, share in shares.items()}

    assert shamir.reconstruct(told, threshold, is_secret) == (SECRET, liars)


def test_more_wrong_shares_are_found_out() -> None:
    """One more than half of the spare shares: no secret is given, rather than another."""
    shares = shamir.split(SECRET, 3, range(7), secrets.randbelow)
    other = shamir.split(bytes(32), 3, range(7), secrets.randbelow)
    with pytest.raises(RemoteProtocolError, match=r"7 shares with threshold 3 do not give the committed secret.*burn"):
        shamir.reconstruct(shares | {index: other[index] for index in range(3)}, 3, is_secret)


def test_the_commitment_decides() -> None:
    """Shares that fit together perfectly, of another secret than the committed one, give nothing."""
    shares = shamir.split(bytes(32), 2, range(5), secrets.randbelow)
    with pytest.raises(RemoteProtocolError, match="their dealer shared another"):
        shamir.reconstruct(shares, 2, is_secret)


def test_a_polynomial_whose_secret_is_no_32_bytes_gives_none() -> None:
    """A dealer who shares 2^256 or more has shared no secret, and nobody's `accept` is asked."""
    value = (2**256 + 5).to_bytes(shamir.SHARE, "big")
    with pytest.raises(RemoteProtocolError, match="do not give the committed secret"):
        shamir.reconstruct({0: value, 1: value}, 1, lambda _: pytest.fail("asked"))


@pytest.mark.parametrize(
    "share", [b"", bytes(32), bytes(34), shamir.PRIME.to_bytes(33, "big"), b"\xff" * 33], ids=lambda share: share.hex()
)
def test_what_is_no_element_of_the_field_is_refused(share: bytes) -> None:
    """A share has 33 bytes and is below the prime, alone and among others."""
    with pytest.raises(RemoteProtocolError, match=r"no share of a secret.*33 bytes"):
        shamir.number(share)
    shares = shamir.split(SECRET, 1, range(5), secrets.randbelow)
    with pytest.raises(RemoteProtocolError, match="no share of a secret"):
        shamir.reconstruct(shares | {2: share}, 1, is_secret)


def test_too_few_shares_are_refused() -> None:
    """One less than the threshold gives nothing."""
    shares = shamir.split(SECRET, 3, range(3), secrets.randbelow)
    del shares[1]
    with pytest.raises(RemoteProtocolError, match="2 shares are fewer than the 3"):
        shamir.reconstruct(shares, 3, is_secret)


@pytest.mark.parametrize("indices", [(0, 1, 1), (0, -1), ()])
@pytest.mark.parametrize("threshold", [1, 2])
def test_each_holder_gets_one_share(indices: tuple[int, ...], threshold: int) -> None:
    """Twice the same index, a negative one (whose share could be the secret itself), or nobody is our mistake."""
    with pytest.raises(LocalProtocolError, match=r"each index|cannot have the threshold"):
        shamir.split(SECRET, threshold, indices, secrets.randbelow)


@pytest.mark.parametrize("threshold", [-1, 0, 4])
def test_a_threshold_can_be_met(threshold: int) -> None:
    """It is at least one and at most the number of shares."""
    with pytest.raises(LocalProtocolError, match=f"threshold {threshold}"):
        shamir.split(SECRET, threshold, range(3), secrets.randbelow)


def test_reconstruction_needs_a_threshold_and_indices() -> None:
    """A threshold below one, or the share at x = 0, is our mistake."""
    shares = shamir.split(SECRET, 1, range(3), secrets.randbelow)
    for threshold, given_ in ((0, shares), (1, {-1: shares[0]})):
        with pytest.raises(LocalProtocolError, match="threshold of at least 1"):
            shamir.reconstruct(given_, threshold, is_secret)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_secrets_have_32_bytes(length: int) -> None:
    """Nothing else is shared."""
    with pytest.raises(LocalProtocolError, match=f"32 bytes are shared, not {length}"):
        shamir.split(bytes(length), 1, [0], secrets.randbelow)


def test_right_shares_are_not_called_wrong_when_too_many_others_are() -> None:
    """Half of six shares are wrong and alike: the other half is refused as well, and one more right share decides."""
    secret, lie = b"\x01" * 32, bytes(32) + b"\x05"
    right = shamir.split(secret, 1, (2, 5, 6, 7), lambda _: 0)
    wrong = {0: lie, 3: lie, 8: lie}
    with pytest.raises(RemoteProtocolError, match="too many are wrong"):
        shamir.reconstruct(wrong | {idx: right[idx] for idx in (2, 5, 6)}, 1, lambda found: found == secret)
    assert shamir.reconstruct(wrong | right, 1, lambda found: found == secret) == (secret, frozenset(wrong))
