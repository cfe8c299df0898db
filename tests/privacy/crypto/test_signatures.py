import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import IdentityError, LocalProtocolError
from privacy.crypto import signatures

QUICK = settings(max_examples=40, deadline=None)

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEY = PRIVATE.public_key().public_bytes_raw()
ORDER = 2**252 + 27742317777372353535851937790883648493
PRIME = 2**255 - 19

EIGHTH = (
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
)
SMALL = [
    y.to_bytes(32, "little")
    for point in (0, 1, PRIME - 1, *(int.from_bytes(bytes.fromhex(each), "little") for each in EIGHTH))
    for y in (point, point | 1 << 255)
]
"""The points of small order as keys, with either sign of x."""

IDENTITY = (1).to_bytes(32, "little")


def field(signature: bytes) -> tuple[int, int]:
    """R and S as numbers."""
    return int.from_bytes(signature[:32], "little"), int.from_bytes(signature[32:], "little")


def made(r: int, s: int) -> bytes:
    """A signature of these numbers."""
    return r.to_bytes(32, "little") + s.to_bytes(32, "little")


def test_a_signature_covers_type_and_fields() -> None:
    """What was signed is verified; another type, other fields or another key's owner is not."""
    signature = signatures.sign(PRIVATE, "ready", 1, b"x")

    assert len(signature) == signatures.SIGNATURE
    assert signatures.verify(KEY, signature, "ready", 1, b"x")
    assert not signatures.verify(KEY, signature, "decline", 1, b"x")
    assert not signatures.verify(KEY, signature, "ready", 1, b"y")
    assert not signatures.verify(bytes(31) + b"\1", signature, "ready", 1, b"x")


@QUICK
@given(bit=st.integers(0, 511))
def test_each_changed_bit_breaks_a_signature(bit: int) -> None:
    """A signature has no second form: whichever bit is flipped, it is none."""
    signature = bytearray(signatures.sign(PRIVATE, "keys", 7))
    signature[bit // 8] ^= 1 << bit % 8
    assert not signatures.verify(KEY, bytes(signature), "keys", 7)


@pytest.mark.parametrize("times", range(1, 9))
def test_s_is_below_the_groups_order(times: int) -> None:
    """S + k L satisfies the curve's equation for every k, and is refused: S < L."""
    r, s = field(signatures.sign(PRIVATE, "keys", 7))
    assert s + times * ORDER < 2**256
    assert not signatures.verify(KEY, made(r, s + times * ORDER), "keys", 7)


def test_r_is_compared_byte_for_byte() -> None:
    """The one point with S = 0 under a key of order 1 is the identity: its canonical form verifies, no other does."""
    assert signatures.verify(IDENTITY, made(1, 0), "keys", 7)
    for r in (PRIME + 1, 1 | 1 << 255, PRIME + 1 | 1 << 255):
        assert not signatures.verify(IDENTITY, made(r, 0), "keys", 7)


@pytest.mark.parametrize("r", SMALL, ids=bytes.hex)
def test_r_of_small_order_verifies_nothing_under_an_honest_key(r: bytes) -> None:
    """The equation without cofactor leaves no signature with a small R, whatever S: S = 0 and S = 1 are tried."""
    for s in (0, 1):
        assert not signatures.verify(KEY, r + s.to_bytes(32, "little"), "keys", 7)


@pytest.mark.parametrize("vk", SMALL, ids=bytes.hex)
def test_anybody_can_sign_for_a_key_of_small_order(vk: bytes) -> None:
    """With S = 0 one of at most eight R fits any message: forgeries by trying, which is why such a key is refused."""
    forged = [
        (r, message) for message in range(64) for r in SMALL if signatures.verify(vk, r + bytes(32), "keys", message)
    ]

    assert len(forged) >= 8
    with pytest.raises(IdentityError, match=r"small order: anybody can sign.*consortium"):
        signatures.refuse_weak_key(vk)


@pytest.mark.parametrize("y", [PRIME, PRIME + 1, PRIME + 5, 2**255 - 1])
@pytest.mark.parametrize("sign", [0, 1])
def test_a_key_has_one_form(y: int, sign: int) -> None:
    """A key whose y is not reduced is refused, with either sign of x: it is a second form of another."""
    with pytest.raises(IdentityError, match="not written canonically"):
        signatures.refuse_weak_key((y | sign << 255).to_bytes(32, "little"))


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_has_32_bytes(length: int) -> None:
    """A key of another length is refused, and no signature is by it."""
    with pytest.raises(IdentityError, match=f"32 bytes, not {length}"):
        signatures.refuse_weak_key(KEY[:1] * length)
    assert not signatures.verify(KEY[:1] * length, signatures.sign(PRIVATE, "keys", 7), "keys", 7)


@pytest.mark.parametrize("length", [0, 63, 65])
def test_a_signature_has_64_bytes(length: int) -> None:
    """One that is cut or longer is none."""
    assert not signatures.verify(KEY, (signatures.sign(PRIVATE, "keys", 7) + b"\0")[:length], "keys", 7)


def test_honest_keys_are_accepted() -> None:
    """A key as it is generated is not weak."""
    for seed in range(32):
        vk = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32).public_key().public_bytes_raw()
        signatures.refuse_weak_key(vk)


def test_a_purpose_must_be_one_of_the_texts() -> None:
    """Neither signing nor verifying knows a type that the text does not list."""
    with pytest.raises(LocalProtocolError, match="no purpose"):
        signatures.sign(PRIVATE, "hello", 1)
    with pytest.raises(LocalProtocolError, match="no purpose"):
        signatures.verify(KEY, bytes(64), "hello", 1)
