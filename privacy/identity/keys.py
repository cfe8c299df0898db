"""A member's two keys, and what makes a public key acceptable."""

import hashlib
from dataclasses import dataclass, field
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as generate_ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
)

from federation.errors import IdentityError, WhoActs

__all__ = ["MemberKeys", "protocol_public", "spki", "tls_digest", "tls_public", "verifies"]

_P = 2**255 - 19
_ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_SMALL_ORDER = frozenset({0, 1, _P - 1, _ORDER_8, _P - _ORDER_8})
"""y coordinates of the eight points of small order: under such a key one signature verifies for many messages."""


@dataclass(frozen=True, slots=True)
class MemberKeys:
    """A member's private keys: P-256 for TLS (gRPC takes no Ed25519 leaf), Ed25519 for what it signs."""

    tls: EllipticCurvePrivateKey = field(repr=False)
    protocol: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        """Fresh keys from the operating system's generator."""
        return cls(generate_ec(SECP256R1()), Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, tls_pem: bytes, protocol_pem: bytes) -> Self:
        """The keys in two unencrypted PEM texts.

        Raises:
            IdentityError: They are not such keys.
        """
        try:
            tls = load_pem_private_key(tls_pem, None)
            protocol = load_pem_private_key(protocol_pem, None)
        except (TypeError, ValueError) as broken:
            raise _unreadable() from broken
        if not isinstance(tls, EllipticCurvePrivateKey) or not isinstance(tls.curve, SECP256R1):
            raise _unreadable()
        if not isinstance(protocol, Ed25519PrivateKey):
            raise _unreadable()
        return cls(tls, protocol)

    @property
    def tls_pem(self) -> bytes:
        """The TLS key as an unencrypted PKCS8 PEM text (a member starts unattended)."""
        return self.tls.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def protocol_pem(self) -> bytes:
        """The protocol key as an unencrypted PKCS8 PEM text."""
        return self.protocol.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def tls_spki(self) -> bytes:
        """The TLS public key (SubjectPublicKeyInfo, DER)."""
        return spki(self.tls.public_key())

    @property
    def tls_key(self) -> bytes:
        """SHA-256 of `tls_spki`: what a membership statement names."""
        return tls_digest(self.tls_spki)

    @property
    def protocol_key(self) -> bytes:
        """The raw Ed25519 public key (32 bytes)."""
        return self.protocol.public_key().public_bytes_raw()


def tls_digest(key: bytes) -> bytes:
    """SHA-256 of a TLS public key's SubjectPublicKeyInfo (DER)."""
    return hashlib.sha256(key).digest()


def spki(key: EllipticCurvePublicKey) -> bytes:
    """The one DER form of a TLS public key that is accepted."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def tls_public(key: bytes) -> EllipticCurvePublicKey:
    """The P-256 key in `key` (DER).

    Raises:
        IdentityError: It is no P-256 key, or one not in its canonical form.
    """
    try:
        public = load_der_public_key(key)
    except ValueError:
        public = None
    canonical = isinstance(public, EllipticCurvePublicKey) and isinstance(public.curve, SECP256R1)
    if not canonical or not isinstance(public, EllipticCurvePublicKey) or spki(public) != key:
        raise IdentityError("the TLS key is not a P-256 key", fix="make new keys with this release", who=WhoActs.SITE)
    return public


def protocol_public(raw: bytes) -> Ed25519PublicKey:
    """The Ed25519 key in `raw` (32 bytes), never one of small order or in a non-canonical form.

    OpenSSL refuses signatures whose scalar is not reduced; it accepts such keys, so they are refused here
    (RFC 8032, section 5.1.7; Chalkias et al. 2020, "Taming the many EdDSAs").

    Raises:
        IdentityError: It is one of those.
    """
    y = int.from_bytes(raw, "little") & (2**255 - 1)
    if y >= _P or y in _SMALL_ORDER:
        raise IdentityError(
            "the protocol key is of small order or not canonical: anybody could sign for it",
            fix="make new keys with this release",
            who=WhoActs.SITE,
        )
    return Ed25519PublicKey.from_public_bytes(raw)


def verifies(key: Ed25519PublicKey, signature: bytes, content: bytes) -> bool:
    """Whether `signature` is `key`'s over `content`."""
    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True


def _unreadable() -> IdentityError:
    return IdentityError(
        "a member's key file does not hold its P-256 or Ed25519 key",
        fix="restore it from a backup, or move the identity folder away and enrol again",
        who=WhoActs.YOU,
    )
