"""One attempt at one sum, as the coordinator holds it: its uploads, and what opens them."""

from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.blobs import BlobRef
from federation.errors import LocalProtocolError, RemoteProtocolError
from privacy.crypto import canonical
from privacy.secure_aggregation.rostersum.coordinator_events import ContradictionError, Term
from privacy.secure_aggregation.rostersum.coordinator_state import Seed, Way
from privacy.secure_aggregation.rostersum.evidence import Suspicion
from privacy.secure_aggregation.rostersum.messages import (
    FromSite,
    Full,
    Message,
    Open,
    RoundStart,
    Seal,
    Upload,
    commitment,
    decode,
    sign,
    verify,
)
from privacy.secure_aggregation.rostersum.terms import Plan, Roster

__all__ = ["Attempt", "require_signature", "restored", "stored"]

_EMPTY_SEAL = 16
_SHARE_SEAL = 49
_FIX = "update Parley at the site to the coordinator's release"
_T = TypeVar("_T", bound=Message)


class Attempt:
    """What has come for one ROUND_START. Refusing changes nothing.

    Args:
        start: The ROUND_START, signed.
        plan: Its plan.
        roster: The job's sites.

    Attributes:
        uploads: The members' UPLOADs.
        stored: Members whose vectors are here, whole.
        opens: The members' OPENs.
        rescued: Seeds of members that did not open.
    """

    def __init__(self, start: RoundStart, plan: Plan, roster: Roster) -> None:
        self.start = start
        self.ctx = start.ctx
        self.uploads: dict[int, Upload] = {}
        self.stored: set[int] = set()
        self.opens: dict[int, Open] = {}
        self.rescued: dict[int, Seed] = {}
        self._plan = plan
        self._roster = roster

    @property
    def members(self) -> tuple[int, ...]:
        """P."""
        return self.start.members

    @property
    def complete(self) -> bool:
        """Whether the vectors of all members are here."""
        return len(self.stored) == len(self.members)

    @property
    def shut(self) -> tuple[int, ...]:
        """The members whose self seeds are unknown."""
        return tuple(idx for idx in self.members if idx not in self.opens and idx not in self.rescued)

    # ------------------------------------------------------------------------------------------------------- uploads

    def take_upload(self, upload: Upload) -> BlobRef | None:
        """Takes an UPLOAD of a member; gives the vector it announces, or None for one that was here before.

        Raises:
            ContradictionError: The member signed another for this attempt.
            RemoteProtocolError: It is no member's, unsigned, or its seals are not one for each other member.
        """
        idx = upload.idx
        self.require_member(idx, upload.ctx)
        known = self.uploads.get(idx)
        if known == upload:
            return None
        others = tuple(other for other in self.members if other != idx)
        length = _SHARE_SEAL if self._plan.t else _EMPTY_SEAL
        if tuple(seal.idx for seal in upload.seals) != others or any(len(s.sealed) != length for s in upload.seals):
            raise RemoteProtocolError(
                f"the UPLOAD of site {idx} must hold one seal of {length} bytes for each other member, ascending",
                fix=_FIX,
            )
        require_signature(self._roster, upload, idx)
        if known is not None and known.covered() != upload.covered():
            raise ContradictionError(idx, Suspicion.TWO_UPLOADS, known, upload)
        if known is not None:
            raise RemoteProtocolError(f"site {idx} has sent other seals before; its first ones stand", fix=_FIX)
        self.uploads[idx] = upload
        return self._payload(upload)

    def take_stored(self, idx: int, payload: BlobRef) -> bool:
        """Notes that a member's vector is here, whole; whether it is one that was announced."""
        upload = self.uploads.get(idx)
        if upload is None or payload != self._payload(upload):
            return False  # of an attempt that is over
        self.stored.add(idx)
        return True

    @cached_property
    def unsigned_full(self) -> Full:
        """What all FULLs have in common; asked for once all uploads are here."""
        if not self.complete:
            raise LocalProtocolError("a FULL was to be made before all uploads were here")
        return Full(self.ctx, tuple(upload.entry for upload in self._in_order()), ())

    def sign_full(self, private: Ed25519PrivateKey) -> bytes:
        """The signature of all FULLs: it covers what is the same in each."""
        return sign(self.unsigned_full, private).signature

    def full(self, signature: bytes) -> Callable[[int], Full]:
        """Makes each member's FULL, with the seals that the others closed for it."""
        entries = self.unsigned_full.entries
        sealed = {(upload.idx, seal.idx): seal.sealed for upload in self._in_order() for seal in upload.seals}

        def make(idx: int) -> Full:
            seals = tuple(Seal(other, sealed[other, idx]) for other in self.members if other != idx)
            return Full(self.ctx, entries, seals, signature)

        return make

    # ------------------------------------------------------------------------------------------------------ openings

    def take_open(self, message: Open) -> bool:
        """Takes an OPEN of a member; whether it is new.

        Raises:
            ContradictionError: The member opens to another seed than it is committed to.
            RemoteProtocolError: It is no member's, names other uploads, or is unsigned.
        """
        idx = message.idx
        self.require_member(idx, message.ctx)
        if message.transcript != self.unsigned_full.transcript:
            raise RemoteProtocolError(f"the OPEN of site {idx} names other uploads than were shown to it", fix=_FIX)
        require_signature(self._roster, message, idx)
        if not self.commits(idx, message.b):
            raise ContradictionError(idx, Suspicion.REFUSED, self.uploads[idx], message)
        if idx in self.opens:
            return False
        self.opens[idx] = message
        return True

    def commits(self, idx: int, b: bytes) -> bool:
        """Whether a member is committed to the seed `b`."""
        return commitment(self.ctx, idx, b) == self.uploads[idx].commitment

    def terms(self) -> tuple[Term, ...]:
        """Each member's vector and the key of its self mask; all seeds are known."""
        return tuple(
            Term(u.idx, self._payload(u), canonical.derive(self._seed(u.idx), "self-mask", self.ctx))
            for u in self._in_order()
        )

    # --------------------------------------------------------------------------------------------------------- pieces

    def require_member(self, idx: int, ctx: bytes) -> None:
        """Accepts what a member says of this attempt.

        Raises:
            RemoteProtocolError: It is of another attempt, or of no member.
        """
        if ctx != self.ctx:
            raise RemoteProtocolError(f"site {idx} speaks of an attempt that is over, or was never begun")
        if idx not in self.members:
            raise RemoteProtocolError(f"site {idx} is not in this attempt")

    def _in_order(self) -> tuple[Upload, ...]:
        return tuple(self.uploads[idx] for idx in self.members)

    def _payload(self, upload: Upload) -> BlobRef:
        return BlobRef(upload.y_hash, self._plan.size)

    def _seed(self, idx: int) -> bytes:
        return self.opens[idx].b if idx in self.opens else self.rescued[idx].b


def require_signature(roster: Roster, message: FromSite, idx: int) -> None:
    """Accepts a message that site `idx` signed.

    Raises:
        RemoteProtocolError: It does not bear the site's signature.
    """
    if not verify(message, roster.members[idx].vk):
        raise RemoteProtocolError(f"the {message.TAG.upper()} of site {idx} does not bear its signature", fix=_FIX)


def restored(way: Way, plan: Plan, roster: Roster) -> Attempt | None:
    """The attempt of which `way` keeps the ROUND_START; with its uploads and openings if its FULL may have left."""
    if not way.start:
        return None
    attempt = Attempt(stored(RoundStart, way.start), plan, roster)
    uploads = [stored(Upload, content) for content in way.uploads]
    attempt.uploads.update((upload.idx, upload) for upload in uploads)
    attempt.stored.update(attempt.uploads)
    attempt.opens.update((opened.idx, opened) for opened in (stored(Open, content) for content in way.opens))
    attempt.rescued.update((seed.idx, seed) for seed in way.rescued)
    return attempt


def stored(kind: type[_T], content: bytes) -> _T:
    """The message of this kind of which `content` is the encoding.

    Raises:
        LocalProtocolError: It is of another kind: a bug of ours.
    """
    message = decode(content)
    if not isinstance(message, kind):
        raise LocalProtocolError(f"a {message.TAG} is stored where a {kind.TAG} belongs")
    return message
