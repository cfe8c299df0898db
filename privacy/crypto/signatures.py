"""Ed25519 signatures over canonical statements, verified strictly, and the keys for which anybody can sign."""

from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from federation.errors import IdentityError
from privacy.crypto.canonical import KEY, Field, statement

__all__ = ["SIGNATURE", "refuse_weak_key", "sign", "verify"]

SIGNATURE = 64
"""Bytes of a signature."""

_PRIME = 2**255 - 19
_SIGN_BIT = 1 << 255
_SMALL_ORDER = frozenset(
    int.from_bytes(bytes.fromhex(encoding), "little")
    for encoding in (
        "00" * 32,
        "01" + "00" * 31,
        "ec" + "ff" * 30 + "7f",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    )
)
"""The points of order 1, 2, 4 and 8 of edwards25519, without the bit that holds the sign of x."""


def sign(private: Ed25519PrivateKey, kind: str, *fields: Field) -> bytes:
    """The signature, 64 bytes, of the statement that `fields` make under the type `kind`.

    Raises:
        LocalProtocolError: There is no such type, or a field cannot be encoded.
    """
    return private.sign(statement(kind, *fields))


def verify(vk: bytes, signature: bytes, kind: str, *fields: Field) -> bool:
    """Whether `signature` is S < L with encode([S]B - [k]A) equal to R byte for byte, A being the key `vk`.

    OpenSSL decides by exactly this rule (RFC 8032, section 5.1.7, without cofactor): no signature has a second form.
    Under a key that `refuse_weak_key` refuses the answer means nothing.

    Raises:
        LocalProtocolError: There is no such type, or a field cannot be encoded.
    """
    stated = statement(kind, *fields)
    try:
        _public(vk).verify(signature, stated)
    except (InvalidSignature, ValueError):  # ValueError: the key has another length
        return False
    return True


@lru_cache(maxsize=1024)
def _public(vk: bytes) -> Ed25519PublicKey:
    """The key, decoded once: a roster's keys are used in every round."""
    return Ed25519PublicKey.from_public_bytes(vk)


def refuse_weak_key(vk: bytes) -> None:
    """Accepts 32 bytes that can be a site's key: the canonical encoding of no point of small order.

    Raises:
        IdentityError: They are not; under such a key anybody can sign, or one key has two encodings.
    """
    fix = "make the member a new identity key with Parley and enrol it again"
    if len(vk) != KEY:
        raise IdentityError(f"an Ed25519 key has {KEY} bytes, not {len(vk)}", fix=fix)
    y = int.from_bytes(vk, "little") & ~_SIGN_BIT
    if y >= _PRIME:
        raise IdentityError(f"the Ed25519 key {vk.hex()} is not written canonically", fix=fix)
    if y in _SMALL_ORDER:
        raise IdentityError(f"the Ed25519 key {vk.hex()} has small order: anybody can sign for it", fix=fix)
