"""RosterSum's messages, what the signature of each covers, and the digests they share (sections 3 and 4 of the text).

A message cannot exist with a field of another type, width or length. What a field *means* (who may be in a set, which
round may follow which) is the receiving machine's to judge: each guard has a refusal code of its own.

```
coordinator -> site                       site -> coordinator                  relayed between sites
EPOCH TRAIN ROUND_START FULL              READY DECLINE UPLOAD OPEN            KEYS ENCAPS
RESCUE RESULT CLOSE                       SHARES REFUSE
```
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Annotated, Any, ClassVar, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.errors import RemoteProtocolError
from privacy.crypto import canonical, signatures
from privacy.crypto.canonical import Field
from privacy.secure_aggregation.rostersum.fields import (
    Attempt,
    Context,
    Count,
    Hash,
    Index,
    Octets,
    Signature,
    Small,
    pack,
    unpack,
)

__all__ = [
    "MESSAGES",
    "NOBODY",
    "NOTHING",
    "UNSIGNED",
    "Close",
    "Code",
    "Decline",
    "Encaps",
    "Entry",
    "Epoch",
    "FromCoordinator",
    "FromSite",
    "Full",
    "Keys",
    "Message",
    "Open",
    "Outcome",
    "Ready",
    "Refuse",
    "Relayed",
    "Rescue",
    "Result",
    "RoundStart",
    "Seal",
    "Share",
    "Shares",
    "Train",
    "Upload",
    "commitment",
    "context",
    "decode",
    "encode",
    "keyset",
    "sign",
    "transcript",
    "verify",
    "verify_entry",
]

UNSIGNED = bytes(64)
"""Stands where `sign` has not put a signature yet; no key has it for a signature."""

NOBODY = 65535
"""What `Refuse.about` holds when the refusal is about no other site."""

NOTHING = bytes(32)
"""The `sum_hash` of a burned round."""


class Code(IntEnum):
    """Why a site refuses (annex A)."""

    E_SIG = 1
    E_EPOCH = 2
    E_STATE = 3
    E_REPLAY = 4
    E_SET = 5
    E_COHORT = 6
    E_CHURN = 7
    E_PIN = 8
    E_KEYSET = 9
    E_KEYAGE = 10
    E_LEDGER = 11
    E_FULL = 12
    E_SEAL = 13
    E_RESCUE = 14
    E_TERMS = 15
    E_KEYS = 16
    E_DRIFT = 17


class Outcome(IntEnum):
    """How a round ended."""

    OPENED = 1
    BURNED = 2


@dataclass(frozen=True, slots=True)
class Seal:
    """What one site sends another through the coordinator: a share of its self seed, or nothing, under a seal.

    In an UPLOAD `idx` is the receiver, in a FULL the sender.
    """

    idx: Index
    sealed: Annotated[bytes, Octets((16, 49))]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a FULL says of one member: the digest of its masked vector, its commitment, and the UPLOAD's signature."""

    idx: Index
    y_hash: Hash
    commitment: Hash
    signature: Signature


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the self seed of site `idx`."""

    idx: Index
    share: Annotated[bytes, Octets((33,))]


class _Signed:
    """What all messages have: a type, and a signature over all other fields unless the class says otherwise.

    A message never changes, so what follows from its fields alone is worked out once: it is asked for again and again.
    None of that is one of its fields, and a copy with other fields begins without.
    """

    __slots__ = ("_name", "_packed", "_signer")
    TAG: ClassVar[str]
    """The type, on the wire and under the signature."""
    signature: Signature
    _packed: tuple[Any, ...]
    _name: bytes
    _signer: bytes | None

    def __post_init__(self) -> None:
        """Refuses fields of another type, width or length."""
        try:
            packed = pack(self)
        except ValueError as wrong:
            raise RemoteProtocolError(f"a message cannot hold this: {wrong}", fix=_RELEASE) from None
        object.__setattr__(self, "_packed", packed)
        object.__setattr__(self, "_name", b"")
        object.__setattr__(self, "_signer", None)

    def covered(self) -> tuple[Field, ...]:
        """The fields that the signature covers."""
        return self._packed[1:-1]

    def encode(self) -> bytes:
        """The message as bytes: the canonical encoding of its type and all its fields."""
        return canonical.enc(*self._packed)

    def signed_by(self, vk: bytes) -> bool:
        """Whether the signature is that of the key `vk`; asked again of the key whose it is, no work is done again."""
        if self._signer != vk and signatures.verify(vk, self.signature, self.TAG, *self.covered()):
            object.__setattr__(self, "_signer", vk)
        return self._signer == vk

    def _named(self, digest: Callable[[], bytes]) -> bytes:
        """The one digest that names the message, or what it shows; made when it is first asked for."""
        if not self._name:
            object.__setattr__(self, "_name", digest())
        return self._name


_RELEASE = "install the same release of Parley at the coordinator and all sites"


# ----------------------------------------------------------------------------------------------------------------- keys


@dataclass(frozen=True, slots=True)
class Epoch(_Signed):
    """The coordinator asks for new keys."""

    TAG: ClassVar[str] = "epoch"
    job_hash: Hash
    epoch: Small
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Keys(_Signed):
    """A site's public keys of one epoch, to all others; `gen` grows with every key it makes."""

    TAG: ClassVar[str] = "keys"
    job_hash: Hash
    epoch: Small
    idx: Index
    gen: Count
    x25519_pk: Hash
    mlkem_pk: Annotated[bytes, Octets((0, 1184))]
    nonce: Hash
    signature: Signature = UNSIGNED

    @property
    def digest(self) -> bytes:
        """What names these keys: a digest of all fields but the signature."""
        return self._named(lambda: canonical.digest("keys-digest", *self.covered()))


@dataclass(frozen=True, slots=True)
class Encaps(_Signed):
    """The ML-KEM-768 ciphertext that the lower index of a pair sends the higher one."""

    TAG: ClassVar[str] = "encaps"
    job_hash: Hash
    epoch: Small
    lo: Index
    hi: Index
    keys_digest_lo: Hash
    keys_digest_hi: Hash
    ct: Annotated[bytes, Octets((1088,))]
    signature: Signature = UNSIGNED


# -------------------------------------------------------------------------------------------------------------- a round


@dataclass(frozen=True, slots=True)
class Train(_Signed):
    """The coordinator asks for the work of round `r`; the payloads travel by their content addresses."""

    TAG: ClassVar[str] = "train"
    job_hash: Hash
    epoch: Small
    r: Count
    plan_id: Count
    model_hash: Hash
    args_hash: Hash
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Ready(_Signed):
    """A site promises that its work of round `r` is done and it will contribute."""

    TAG: ClassVar[str] = "ready"
    job_hash: Hash
    epoch: Small
    r: Count
    plan_id: Count
    model_hash: Hash
    args_hash: Hash
    idx: Index
    keys_digest: Hash
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Decline(_Signed):
    """A site will not contribute to round `r`; it never says why (8.6)."""

    TAG: ClassVar[str] = "decline"
    job_hash: Hash
    r: Count
    idx: Index
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class RoundStart(_Signed):
    """The coordinator fixes the participants of attempt `a` at round `r`."""

    TAG: ClassVar[str] = "start"
    job_hash: Hash
    epoch: Small
    r: Count
    a: Attempt
    plan_id: Count
    members: tuple[Index, ...]
    keyset: Hash
    model_hash: Hash
    args_hash: Hash
    signature: Signature = UNSIGNED

    @property
    def ctx(self) -> bytes:
        """What names this attempt."""
        return self._named(lambda: context(self))


@dataclass(frozen=True, slots=True)
class Upload(_Signed):
    """A site's masked vector, named by its digest, its commitment to the self seed, and a seal for each other member.

    It announces the payload `y_hash`, which follows. The signature covers neither seals nor bytes: seals are judged by
    their receivers, the bytes by `y_hash`.
    """

    TAG: ClassVar[str] = "upload"
    ctx: Context
    idx: Index
    y_hash: Hash
    commitment: Hash
    seals: tuple[Seal, ...]
    signature: Signature = UNSIGNED

    def covered(self) -> tuple[Field, ...]:
        """The fields that the signature covers: all but the seals."""
        return self.ctx, self.idx, self.y_hash, self.commitment

    @property
    def entry(self) -> Entry:
        """What a FULL says of this upload."""
        return Entry(self.idx, self.y_hash, self.commitment, self.signature)


@dataclass(frozen=True, slots=True)
class Full(_Signed):
    """The coordinator shows a member that all have uploaded, and brings it the seals that the others closed for it."""

    TAG: ClassVar[str] = "full"
    ctx: Context
    entries: tuple[Entry, ...]
    seals: tuple[Seal, ...]
    signature: Signature = UNSIGNED

    @property
    def transcript(self) -> bytes:
        """T: the digest of who uploaded what."""
        return self._named(lambda: transcript(self.ctx, self.entries))

    def covered(self) -> tuple[Field, ...]:
        """The fields that the signature covers: the context and the transcript."""
        return self.ctx, self.transcript


@dataclass(frozen=True, slots=True)
class Open(_Signed):
    """A member gives its self seed away: the only thing that ever unmasks its vector."""

    TAG: ClassVar[str] = "open"
    ctx: Context
    idx: Index
    b: Hash
    transcript: Hash
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Rescue(_Signed):
    """The coordinator asks for shares of the self seeds of members that did not open."""

    TAG: ClassVar[str] = "rescue"
    ctx: Context
    missing: tuple[Index, ...]
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Shares(_Signed):
    """A site's shares of the self seeds that a RESCUE asked for."""

    TAG: ClassVar[str] = "shares"
    ctx: Context
    idx: Index
    shares: tuple[Share, ...]
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Result(_Signed):
    """The coordinator says how an attempt ended; `sum_hash` is the digest of the opened words, or zeros."""

    TAG: ClassVar[str] = "result"
    ctx: Context
    outcome: Outcome
    sum_hash: Hash
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Close(_Signed):
    """The coordinator ends the job."""

    TAG: ClassVar[str] = "close"
    job_hash: Hash
    signature: Signature = UNSIGNED


@dataclass(frozen=True, slots=True)
class Refuse(_Signed):
    """A site refused; nothing changed at it. A function of messages, policy and ledger only, never of records."""

    TAG: ClassVar[str] = "refuse"
    job_hash: Hash
    r: Count
    a: Attempt
    idx: Index
    code: Code
    about: Index
    last_r: Count
    last_a: Attempt
    opened_r: Count
    signature: Signature = UNSIGNED


FromCoordinator = Epoch | Train | RoundStart | Full | Rescue | Result | Close
FromSite = Ready | Decline | Upload | Open | Shares | Refuse
Relayed = Keys | Encaps
Message = FromCoordinator | FromSite | Relayed

MESSAGES: dict[str, type[Message]] = {
    kind.TAG: kind
    for kind in (
        *(Epoch, Keys, Encaps, Train, Ready, Decline, RoundStart, Upload),
        *(Full, Open, Rescue, Shares, Result, Close, Refuse),
    )
}
"""Every message by its type."""

M = TypeVar("M", bound=_Signed)


# -------------------------------------------------------------------------------------------------- signatures, digests


def sign(message: M, private: Ed25519PrivateKey) -> M:
    """The message with the signature of `private` over what its class covers."""
    signature = signatures.sign(private, message.TAG, *message.covered())
    return replace(message, signature=signature)  # type: ignore[type-var] # every subclass is a dataclass


def verify(message: _Signed, vk: bytes) -> bool:
    """Whether the message's signature is that of the key `vk`."""
    return message.signed_by(vk)


def verify_entry(ctx: bytes, entry: Entry, vk: bytes) -> bool:
    """Whether `entry` is of an UPLOAD of the context `ctx` that the key `vk` signed."""
    covered = (ctx, entry.idx, entry.y_hash, entry.commitment)
    return signatures.verify(vk, entry.signature, Upload.TAG, *covered)


def keyset(digests: tuple[tuple[int, bytes], ...]) -> bytes:
    """The digest of the members' keys: `(idx, keys digest)` of each, ascending."""
    return canonical.digest("keyset", digests)


def context(start: RoundStart) -> bytes:
    """ctx: the digest of all that an attempt fixes."""
    return canonical.digest("ctx", *start.covered())


def transcript(ctx: bytes, entries: tuple[Entry, ...]) -> bytes:
    """T: the digest of who uploaded what, without their signatures."""
    return canonical.digest("transcript", ctx, tuple((each.idx, each.y_hash, each.commitment) for each in entries))


def commitment(ctx: bytes, idx: int, b: bytes) -> bytes:
    """C: what binds site `idx` to its self seed `b` of this context."""
    return canonical.digest("commit", ctx, idx, b)


# ----------------------------------------------------------------------------------------------------------------- wire


def encode(message: Message) -> bytes:
    """The message as bytes: the canonical encoding of its type and all its fields."""
    return message.encode()


def decode(content: bytes) -> Message:
    """The message of which `content` is the encoding; `encode(decode(content)) == content`.

    Raises:
        RemoteProtocolError: `encode` gives these bytes for no message.
    """
    fields = canonical.dec(content)
    kind = MESSAGES.get(fields[0]) if fields and isinstance(fields[0], str) else None
    if kind is None:
        raise RemoteProtocolError("this is no message of RosterSum", fix=_RELEASE)
    try:
        return unpack(kind, fields)
    except ValueError as wrong:
        raise RemoteProtocolError(f"this is no message of RosterSum: {wrong}", fix=_RELEASE) from None
