"""One attempt at a round as a site holds it in memory: its self seed, its masks' keys, its seals (section 4.2)."""

from collections.abc import Callable
from dataclasses import dataclass, field

from federation.errors import RemoteProtocolError
from privacy.crypto import canonical, seal, shamir
from privacy.crypto.masks import SignedKey
from privacy.secure_aggregation.rostersum.evidence import Evidence, GuardError, Suspicion, contradiction
from privacy.secure_aggregation.rostersum.keys import SiteKeys
from privacy.secure_aggregation.rostersum.messages import (
    Code,
    Full,
    RoundStart,
    Seal,
    Share,
    Upload,
    commitment,
    verify,
    verify_entry,
)
from privacy.secure_aggregation.rostersum.terms import Plan, Terms

__all__ = ["Attempt", "Draw", "begin", "certified"]

Draw = Callable[[int], bytes]
"""So many bytes, each drawn from the operating system's generator (in annex B: from the annex)."""

_SEED = 32


@dataclass(slots=True)
class Attempt:
    """What this site needs until the attempt is opened or sealed; to seal it is to drop this value.

    Attributes:
        start: The ROUND_START.
        ctx: Its context.
        plan: Its plan.
        b: The self seed.
        commitment: C, what the upload says of `b`.
        self_key: Key of the self mask.
        pair_keys: Signs and keys of the pair masks, by the other member's index, ascending.
        seals: One for each other member, closed.
        inbound: Keys of the others' seals to this site: kept so that re-keying cannot hurt the attempt.
        upload: The UPLOAD once the vector is masked; it is sent again as the same bytes.
    """

    start: RoundStart
    ctx: bytes
    plan: Plan
    b: bytes = field(repr=False)
    commitment: bytes
    self_key: bytes = field(repr=False)
    pair_keys: tuple[SignedKey, ...] = field(repr=False)
    seals: tuple[Seal, ...]
    inbound: dict[int, bytes] = field(repr=False)
    upload: Upload | None = None


def begin(start: RoundStart, plan: Plan, idx: int, keys: SiteKeys, draw: Draw) -> Attempt:
    """A new attempt with a fresh self seed; `keys` has a root with each other member."""
    ctx = start.ctx
    others = tuple(member for member in start.members if member != idx)
    b = draw(_SEED)
    bound = commitment(ctx, idx, b)
    shares = shamir.split(b, plan.t, others, _below(draw)) if plan.t else dict.fromkeys(others, b"")
    pair_keys: list[SignedKey] = []
    seals: list[Seal] = []
    inbound: dict[int, bytes] = {}
    for other in others:
        root = keys.root(other)
        pair_keys.append((1 if idx < other else -1, canonical.derive(root.mask, "pair-mask", ctx)))
        key = canonical.derive(root.seal, "seal", ctx, idx, other)
        seals.append(Seal(other, seal.close(key, canonical.enc(ctx, idx, other, bound), shares[other])))
        inbound[other] = canonical.derive(root.seal, "seal", ctx, other, idx)
    self_key = canonical.derive(b, "self-mask", ctx)
    return Attempt(start, ctx, plan, b, bound, self_key, tuple(pair_keys), tuple(seals), inbound)


def certified(attempt: Attempt, upload: Upload, full: Full, terms: Terms) -> tuple[Share, ...]:
    """This site's shares of the other members' self seeds, from a FULL that passes all its guards; none where t = 0.

    Raises:
        GuardError: It is another set (E_FULL), not all is signed (E_SIG), this site's entry is not its own (E_FULL), or
            a seal is missing or broken (E_SEAL, naming its sender).
    """
    members = attempt.start.members
    if tuple(entry.idx for entry in full.entries) != members:
        raise GuardError(Code.E_FULL, f"this FULL does not list exactly the members {list(members)} in order")
    if not verify(full, terms.roster.coordinator_vk):
        raise GuardError(Code.E_SIG, "the coordinator did not sign this FULL")
    for entry in full.entries:
        if not verify_entry(attempt.ctx, entry, terms.roster.members[entry.idx].vk):
            raise GuardError(Code.E_SIG, f"site {entry.idx} did not sign this upload for this attempt", entry.idx)
    if upload.entry not in full.entries:
        raise GuardError(Code.E_FULL, "this FULL holds another upload of this site", evidence=(_twice(upload, full),))
    return _unsealed(attempt, upload.idx, full)


def _twice(mine: Upload, full: Full) -> Evidence:
    return contradiction(Suspicion.TWO_UPLOADS, mine.idx, mine, full)


def _unsealed(attempt: Attempt, me: int, full: Full) -> tuple[Share, ...]:
    committed = {entry.idx: entry.commitment for entry in full.entries}
    sealed = {each.idx: each.sealed for each in full.seals}
    shares: list[Share] = []
    for other in attempt.inbound:
        if other not in sealed:
            raise GuardError(Code.E_SEAL, f"the seal of site {other} is missing", other)
        associated = canonical.enc(attempt.ctx, other, me, committed[other])
        try:
            share = seal.open(attempt.inbound[other], associated, sealed[other])
            if attempt.plan.t:
                shamir.number(share)
        except RemoteProtocolError as broken:
            raise GuardError(Code.E_SEAL, f"site {other}: {broken.problem}", other) from None
        if attempt.plan.t:
            shares.append(Share(other, share))
        elif share:
            raise GuardError(Code.E_SEAL, f"site {other} sealed a share where there is no escrow", other)
    if tuple(each.idx for each in full.seals) != tuple(attempt.inbound):
        raise GuardError(Code.E_SEAL, "the seals are not one of each other member, ascending")
    return tuple(shares)


def _below(draw: Draw) -> Callable[[int], int]:
    """Uniform integers below a bound, by rejection."""

    def below(bound: int) -> int:
        size = (bound.bit_length() + 7) // 8
        while True:
            value = int.from_bytes(draw(size), "big") >> (8 * size - bound.bit_length())
            if value < bound:
                return value

    return below
