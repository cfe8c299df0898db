"""Key agreement of two sites: X25519, with ML-KEM-768 beside it where a job asks for it, and the roots both give."""

import hmac
from dataclasses import dataclass, field
from functools import cache

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from federation.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError, WhoActs
from privacy.crypto.canonical import KEY, statement

try:
    from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
except ImportError:  # pragma: no cover - an older cryptography; `require_ml_kem` tells it to whoever asks
    MLKEM768PrivateKey = MLKEM768PublicKey = None  # type: ignore[assignment,misc] # absent is absent

__all__ = ["CIPHERTEXT", "MLKEM_KEY", "Keys", "PairRoot", "encapsulate", "generate", "pair_root", "require_ml_kem"]

MLKEM_KEY = 1184
"""Bytes of an ML-KEM-768 encapsulation key."""

CIPHERTEXT = 1088
"""Bytes of an ML-KEM-768 ciphertext."""


@dataclass(frozen=True, slots=True)
class PairRoot:
    """The two keys that a pair of sites shares for one epoch: one for its masks, one for its seals, 32 bytes each."""

    mask: bytes = field(repr=False)
    seal: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Keys:
    """A site's private keys of one epoch; they live in memory only and are never printed."""

    x25519: X25519PrivateKey = field(repr=False)
    mlkem: "MLKEM768PrivateKey | None" = field(repr=False)

    @property
    def public(self) -> tuple[bytes, bytes]:
        """The X25519 key, 32 bytes, and the ML-KEM-768 key, 1184 bytes or none."""
        mlkem = b"" if self.mlkem is None else self.mlkem.public_key().public_bytes_raw()
        return self.x25519.public_key().public_bytes_raw(), mlkem

    def exchange(self, peer: bytes) -> bytes:
        """The X25519 secret, 32 bytes, shared with the owner of the public key `peer` (RFC 7748, section 6.1).

        Raises:
            RemoteProtocolError: `peer` has another length than 32, or small order: the secret would be all zero.
        """
        try:
            return self.x25519.exchange(X25519PublicKey.from_public_bytes(peer))
        except ValueError as refused:
            raise RemoteProtocolError(
                f"an X25519 key of {len(peer)} bytes gives no secret", fix="send a fresh X25519 public key of 32 bytes"
            ) from refused

    def decapsulate(self, ciphertext: bytes) -> bytes:
        """The ML-KEM-768 secret, 32 bytes, that `ciphertext` holds; a forged one gives a secret nobody else has.

        Raises:
            RemoteProtocolError: The ciphertext has another length than 1088 (FIPS 203, section 7.3).
            LocalProtocolError: These keys were generated without ML-KEM-768.
        """
        if self.mlkem is None:
            raise LocalProtocolError("keys without ML-KEM-768 were asked to decapsulate")
        try:
            return self.mlkem.decapsulate(ciphertext)
        except ValueError as refused:
            raise RemoteProtocolError(
                f"{len(ciphertext)} bytes are no ML-KEM-768 ciphertext", fix=f"send {CIPHERTEXT} bytes"
            ) from refused


def require_ml_kem() -> None:
    """Returns if this installation has ML-KEM-768.

    Raises:
        ConfigurationError: It has not, so a job with pq = 1 cannot run here.
    """
    if not _has_ml_kem():
        raise ConfigurationError(
            "the job asks for post-quantum key agreement (pq = 1); the cryptography installed here has no ML-KEM-768",
            fix="upgrade the package cryptography to 50.0 or newer, from a wheel with OpenSSL 3.5 or newer; "
            "or ask the job's author for pq = 0",
            who=WhoActs.SITE,
        )


@cache
def _has_ml_kem() -> bool:
    if MLKEM768PrivateKey is None:
        return False
    try:
        MLKEM768PrivateKey.generate()
    except UnsupportedAlgorithm:  # pragma: no cover - a cryptography whose OpenSSL is older than 3.5
        return False
    return True


def generate(pq: bool) -> Keys:  # noqa: FBT001 - the job's own word for it
    """New private keys from the operating system's generator; with `pq` also for ML-KEM-768.

    Raises:
        ConfigurationError: `pq` is asked for and this installation has no ML-KEM-768.
    """
    if pq:
        require_ml_kem()
    return Keys(X25519PrivateKey.generate(), MLKEM768PrivateKey.generate() if pq else None)


def encapsulate(mlkem: bytes) -> tuple[bytes, bytes]:
    """A ciphertext, 1088 bytes, for the owner of the public key `mlkem`, and the secret, 32 bytes, that it holds.

    Raises:
        RemoteProtocolError: `mlkem` is no ML-KEM-768 key: another length than 1184, or coefficients that are not
            reduced (FIPS 203, section 7.2).
        ConfigurationError: This installation has no ML-KEM-768.
    """
    require_ml_kem()
    try:
        shared, ciphertext = MLKEM768PublicKey.from_public_bytes(mlkem).encapsulate()
    except ValueError as refused:
        raise RemoteProtocolError(
            f"{len(mlkem)} bytes are no ML-KEM-768 public key", fix=f"send the {MLKEM_KEY} bytes of a fresh one"
        ) from refused
    return ciphertext, shared


def pair_root(salt: bytes, mlkem_ss: bytes, x25519_ss: bytes) -> PairRoot:
    """Both keys of a pair: HKDF (RFC 5869) with SHA-256 of both secrets under `salt`, 64 bytes, halved.

    `mlkem_ss` is empty where the job asks for no post-quantum agreement.

    Raises:
        LocalProtocolError: A secret or the salt has not 32 bytes.
    """
    if not (len(salt) == len(x25519_ss) == KEY and len(mlkem_ss) in (0, KEY)):
        raise LocalProtocolError(f"a pair's root is made of a salt and secrets of {KEY} bytes each")
    extracted = hmac.digest(salt, mlkem_ss + x25519_ss, "sha256")
    expanded = HKDFExpand(SHA256(), 2 * KEY, statement("pair-root")).derive(extracted)
    return PairRoot(expanded[:KEY], expanded[KEY:])
