"""The seal of one pair and attempt: ChaCha20-Poly1305 under a key that closes one message and no other."""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from federation.errors import RemoteProtocolError

__all__ = ["TAG", "close", "open"]

TAG = 16
"""Bytes by which a sealed message is longer."""

_NONCE = bytes(12)
"""Zero, since a key is derived for one context, sender and receiver, and used once."""


def close(key: bytes, associated: bytes, plaintext: bytes) -> bytes:
    """`plaintext` under a seal that `open` breaks only with the same key and associated data; 16 bytes longer.

    A key of 32 bytes closes **one** message: a second one under it would give both away.
    """
    return ChaCha20Poly1305(key).encrypt(_NONCE, plaintext, associated)


def open(key: bytes, associated: bytes, sealed: bytes) -> bytes:  # noqa: A001 - `seal.open` is the protocol's word
    """The plaintext that was closed with this key and associated data.

    Raises:
        RemoteProtocolError: These bytes were not closed so.
    """
    cipher = ChaCha20Poly1305(key)
    try:
        return cipher.decrypt(_NONCE, sealed, associated)
    except InvalidTag as broken:
        raise RemoteProtocolError(
            f"a seal of {len(sealed)} bytes does not open: its two sites do not share a key, or it was changed",
            fix="begin a new epoch; if the pair fails again, leave out the site with more failing pairs",
        ) from broken
