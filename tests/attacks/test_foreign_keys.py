"""Keys that are not what they seem: sybils', substituted, replayed and small ones, to get between a site and its peers.

In all of them the attacker plays the coordinator and, towards site 0, both of its peers: what it then knows of each
pair opens the seals in which the victim deals its self seed, and takes off the masks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.errors import RemoteProtocolError
from privacy.crypto import agreement, canonical, seal
from privacy.secure_aggregation.rostersum import keys as site_keys
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.evidence import GuardError
from privacy.secure_aggregation.rostersum.keys import SiteKeys
from privacy.secure_aggregation.rostersum.messages import Code, Epoch, Keys, Relayed
from privacy.secure_aggregation.rostersum.rules import Rule
from privacy.secure_aggregation.rostersum.site_events import Offered
from privacy.secure_aggregation.rostersum.terms import Member, Roster
from tests.attacks.siege import Secret, Siege, besiege, combined, secret
from tests.privacy.secure_aggregation.rostersum.conftest import TRAIN, consortium_of, private, public

VICTIM, PEERS = 0, (1, 2)
THREE = replace(TRAIN, t=2)
"""Three sites, two of whose shares give a seed."""


@dataclass(frozen=True)
class Mask:
    """What the attacker shows in a peer's place, and how it comes to the secret shared with the victim."""

    keys: Keys
    shared: Callable[[bytes], bytes]


def held(keys: Keys, own: agreement.Keys) -> Mask:
    """Public keys to which the attacker has the private ones."""
    return Mask(replace(keys, x25519_pk=own.public[0]), own.exchange)


def intruded(b: Siege, shown: Mapping[int, Mask], epoch: int = 1) -> Secret | None:
    """The victim's input, if it takes these keys for its peers' and deals its self seed to them."""
    if not b.inside(VICTIM):
        return None
    for each in shown.values():
        b.say(VICTIM, each.keys)
    b.order(1, (VICTIM,))
    digests = {VICTIM: b.keys[VICTIM].digest, **{idx: each.keys.digest for idx, each in shown.items()}}
    start = b.sign(replace(b.start(1), epoch=epoch, keyset=messages.keyset(tuple(sorted(digests.items())))))
    uploads = b.tried(start, (VICTIM,))
    if not uploads:
        return None
    upload = uploads[VICTIM]
    shares: dict[int, bytes] = {}
    pair_masks = []
    for idx, each in shown.items():
        salted = (b.job_hash, epoch, VICTIM, idx, b.keys[VICTIM].digest, each.keys.digest, b"")
        root = agreement.pair_root(canonical.digest("pair-salt", *salted), b"", each.shared(b.keys[VICTIM].x25519_pk))
        key = canonical.derive(root.seal, "seal", start.ctx, VICTIM, idx)
        associated = canonical.enc(start.ctx, VICTIM, idx, upload.commitment)
        sealed = next(other.sealed for other in upload.seals if other.idx == idx)
        try:
            shares[idx] = seal.open(key, associated, sealed)
        except RemoteProtocolError:
            return None
        pair_masks.append(canonical.derive(root.mask, "pair-mask", start.ctx))
    seed = combined(upload, shares, THREE.t)
    return None if seed is None else b.unmasked(start.ctx, {VICTIM: seed}, [(-1, each) for each in pair_masks])


def alone(roster: Roster | None = None, floor: Mapping[str, Any] | None = None) -> Siege:
    """The victim, offered a job and asked for its keys: its peers are the attacker's to play."""
    b = besiege(3, (THREE,), ready=False, floor=floor, roster=roster or consortium_of().terms.roster)
    b.do(VICTIM, Offered(b.terms, b.data))
    if b.inside(VICTIM):
        b.say(VICTIM, b.sign(Epoch(b.job_hash, 1)))
    return b


def fresh(b: Siege, idx: int, signer: Ed25519PrivateKey) -> Mask:
    """KEYS that the attacker made and that this key signs."""
    own = agreement.generate(pq=False)
    mask = held(Keys(b.job_hash, 1, idx, 5, bytes(32), b"", b"\x77" * 32), own)
    return replace(mask, keys=messages.sign(mask.keys, signer))


# --------------------------------------------------------------------------------------------------------------- sybils


def peopled(first: Ed25519PrivateKey, second: Ed25519PrivateKey) -> Roster:
    """A roster of the victim and two seats whose keys the attacker made."""
    honest = consortium_of().terms.roster
    seats = tuple(Member(f"org{idx}", f"s{idx}", public(key)) for idx, key in ((1, first), (2, second)))
    return replace(honest, members=(honest.members[0], *seats))


def outvoted(first: Ed25519PrivateKey, second: Ed25519PrivateKey, compared: Roster) -> Secret | None:
    """The victim is asked into a job of this roster's seats; `compared` is the roster that its people have compared."""
    b = alone(peopled(first, second), {"rosters": frozenset({compared.hash})})
    return intruded(b, {1: fresh(b, 1, first), 2: fresh(b, 2, second)}) if b.inside(VICTIM) else None


def test_sybils_need_a_roster_that_people_compared(overlook: Callable[..., None]) -> None:
    """A site joins no job of a roster that its administrator has not compared; else all of its peers are one party.

    Two lines hold, when the job is offered and at each TRAIN: both ask the floor, which is made to overlook it.
    """
    honest = consortium_of().terms.roster
    assert outvoted(private(0x51), private(0x52), honest) is None
    overlook(Rule.FLOOR_ROSTER)
    assert outvoted(private(0x51), private(0x52), honest) == secret(VICTIM, 1)


def test_a_member_with_two_seats_is_refused(overlook: Callable[..., None]) -> None:
    """One colluding member that sits under two names with one key counts twice; no two seats have the same key."""
    twice = private(0x51), private(0x51)
    assert outvoted(*twice, peopled(*twice)) is None
    overlook(Rule.KEY_TWICE)
    assert outvoted(*twice, peopled(*twice)) == secret(VICTIM, 1)


# -------------------------------------------------------------------------------------------------------- substitution


def between(b: Siege) -> Secret | None:
    """The coordinator relays its own keys to the victim in the place of its peers'."""
    shown = {}
    for idx in PEERS:
        shown[idx] = held(replace(b.keys[idx], gen=2**40, signature=bytes(64)), agreement.generate(pq=False))
    return intruded(b, shown)


def test_substituted_keys_put_nobody_between_two_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """KEYS bear their owner's signature; whoever relays them could share every pair's secret otherwise."""
    assert between(besiege(3, (THREE,))) is None
    monkeypatch.setattr(site_keys, "verify", lambda *_: True)
    assert between(besiege(3, (THREE,))) == secret(VICTIM, 1)


# -------------------------------------------------------------------------------------------------------------- replay


def stolen(b: Siege) -> dict[int, Mask]:
    """The peers' KEYS, signed by them, with the private keys that were in their memory at the time."""
    held_by: dict[int, SiteKeys] = {idx: b.sites[idx]._seats[b.job_hash]._keys for idx in PEERS}  # type: ignore[misc] # they have keys
    return {idx: Mask(b.keys[idx], each._keys.exchange) for idx, each in held_by.items()}


def next_epoch() -> Secret | None:
    """The keys of an epoch that is over are found out, and shown to the victim in the next one."""
    b = besiege(3, (THREE,))
    old = stolen(b)
    b.say(VICTIM, b.sign(Epoch(b.job_hash, 2)))
    return intruded(b, old, epoch=2)


def other_job() -> Secret | None:
    """The keys of a job that is over are found out, and shown to the victim in another one."""
    old = stolen(besiege(3, (THREE,)))
    b = besiege(3, (THREE,), ready=False, job_id=b"another job of 3")
    b.do(VICTIM, Offered(b.terms, b.data))
    b.say(VICTIM, b.sign(Epoch(b.job_hash, 1)))
    return intruded(b, old)


def unbound(keys: SiteKeys, message: Relayed, author: int, _revoked: frozenset[bytes] = frozenset()) -> None:
    """A guard that asks for the signature and for nothing else."""
    if not messages.verify(message, keys._terms.roster.members[author].vk):
        raise GuardError(Code.E_KEYS, "unsigned")


@pytest.mark.parametrize("attack", [next_epoch, other_job])
def test_replayed_keys_serve_in_no_other_epoch_or_job(
    attack: Callable[[], Secret | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was signed for one epoch of one job is taken in no other: keys found out later open nothing."""
    assert attack() is None
    monkeypatch.setattr(SiteKeys, "_guard", unbound)
    assert attack() == secret(VICTIM, 1)


# --------------------------------------------------------------------------------------------------------- small order

LOW_ORDER = {
    "zero": bytes(32),
    "one": (1).to_bytes(32, "little"),
    "order 8": bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    "p - 1": (2**255 - 20).to_bytes(32, "little"),
}
"""Points of X25519 whose secret with everybody is zero (RFC 7748, section 6.1)."""


def small(b: Siege, point: bytes) -> Secret | None:
    """The peers' generators are broken and make such keys, signed as they should be: nobody needs a private key."""
    shown = {}
    for idx in PEERS:
        keys = replace(b.keys[idx], x25519_pk=point, gen=2**40)
        shown[idx] = Mask(messages.sign(keys, b.consortium.sites[idx]), lambda _: bytes(32))
    return intruded(b, shown)


def careless(keys: agreement.Keys, peer: bytes, exchange: Any = agreement.Keys.exchange) -> bytes:
    """An X25519 that lets an all-zero secret pass."""
    try:
        return bytes(exchange(keys, peer))
    except RemoteProtocolError:
        return bytes(32)


@pytest.mark.parametrize("point", LOW_ORDER.values(), ids=LOW_ORDER)
def test_x25519_keys_of_small_order_share_no_secret(point: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-zero secret is refused; taken, whoever sees the traffic unmasks the victim without any key."""
    assert small(besiege(3, (THREE,)), point) is None
    monkeypatch.setattr(agreement.Keys, "exchange", careless)
    assert small(besiege(3, (THREE,)), point) == secret(VICTIM, 1)


WEAK = (
    "0100000000000000000000000000000000000000000000000000000000000000",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
)
"""Keys of Ed25519 of orders 1 and 8."""
SMALL_R = [bytes.fromhex(each) for each in (*WEAK, "ec" + "ff" * 30 + "7f", "00" * 32)]


def conjured(b: Siege, idx: int, vk: bytes) -> Mask:
    """KEYS signed for the key of small order by trying: S = 0, and R among the points of small order."""
    own = agreement.generate(pq=False)
    for nonce in range(1000):
        mask = held(Keys(b.job_hash, 1, idx, 5, bytes(32), b"", nonce.to_bytes(32, "big")), own)
        for r in SMALL_R:
            forged = replace(mask.keys, signature=r + bytes(32))
            if messages.verify(forged, vk):
                return replace(mask, keys=forged)
    raise AssertionError("no signature was found")


def signed_by_nobody() -> Secret | None:
    """Two seats of a roster, which people did compare, have keys of small order: the attacker holds no private key."""
    honest = consortium_of().terms.roster
    vks = {idx: bytes.fromhex(each) for idx, each in zip(PEERS, WEAK, strict=True)}
    roster = replace(honest, members=(honest.members[0], *(replace(honest.members[idx], vk=vks[idx]) for idx in PEERS)))
    b = alone(roster)
    return intruded(b, {idx: conjured(b, idx, vk) for idx, vk in vks.items()})


def test_identity_keys_of_small_order_are_in_no_roster(overlook: Callable[..., None]) -> None:
    """Anybody can sign for them: a job with one is refused; taken, its seats are whoever wants to be them."""
    assert signed_by_nobody() is None
    overlook(Rule.WEAK_KEY)
    assert signed_by_nobody() == secret(VICTIM, 1)
