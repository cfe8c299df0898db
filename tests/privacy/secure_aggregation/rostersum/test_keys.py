from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from federation.errors import PolicyRefused
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.evidence import Suspicion
from privacy.secure_aggregation.rostersum.keys import SiteKeys
from privacy.secure_aggregation.rostersum.messages import Code, Encaps, Epoch, Keys, Open
from privacy.secure_aggregation.rostersum.site_events import Mask, Persist, Resumed, Suspend, TimePassed

Make = Callable[..., Any]

LOW_ORDER = bytes(32)
"""An X25519 public key whose secret with everybody is zero."""


def keys_of(bench: Any, idx: int) -> SiteKeys:
    """The keys that site `idx` holds in memory."""
    keys: SiteKeys = bench.sites[idx]._seats[bench.job_hash]._keys
    return keys


def resigned(bench: Any, idx: int, /, **changes: Any) -> Keys:
    """The KEYS of site `idx`, changed and signed by it again."""
    return messages.sign(replace(bench.keys[idx], **changes), bench.consortium.sites[idx])


def test_both_sites_of_a_pair_share_its_root_and_no_other(bench: Make) -> None:
    """With and without ML-KEM: (i, j) and (j, i) are one root, and all pairs' differ."""
    for pq in (0, 1):
        b = bench(4, pq=pq)
        roots = {(i, j): keys_of(b, i).root(j) for i in range(4) for j in range(4) if i != j}
        assert all(roots[i, j] == roots[j, i] for i, j in roots)
        assert len({root.mask for root in roots.values()} | {root.seal for root in roots.values()}) == 12


@pytest.mark.parametrize(
    "changes",
    [
        {"job_hash": bytes(32)},
        {"epoch": 2},
        {"idx": 7},
        {"mlkem_pk": bytes(1184)},
        {"x25519_pk": LOW_ORDER, "gen": 2**40},
        {"gen": 2**40, "signature": bytes(64)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_i10_keys_that_are_not_a_members_own_of_this_epoch_are_refused(bench: Make, changes: dict[str, Any]) -> None:
    """Another job's or epoch's, an unknown member's, of another length, of low order, or unsigned: E_KEYS."""
    b = bench()
    before = keys_of(b, 0).root(1)
    wrong = resigned(b, 1, **changes) if "signature" not in changes else replace(b.keys[1], **changes)
    assert b.refused(0, wrong) is Code.E_KEYS
    assert keys_of(b, 0).root(1) == before


def test_i10_keys_that_another_member_signed_are_refused(bench: Make) -> None:
    """Site 2 cannot put its own key in the place of site 1's."""
    b = bench()
    forged = messages.sign(replace(b.keys[2], idx=1, gen=2**40), b.consortium.sites[2])
    assert b.refused(0, forged) is Code.E_KEYS


def test_i10_keys_of_a_revoked_member_are_refused(bench: Make) -> None:
    """Its name on the site's list is enough."""
    b = bench(floor={"revoked": frozenset({bytes(32)})})
    b.sites[0]._premises.floor = replace(b.floor, revoked=frozenset({b.terms.roster.members[1].vk}))
    assert b.refused(0, resigned(b, 1, gen=2**40)) is Code.E_KEYS


def test_i10_bites_without_the_signature(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it whoever relays KEYS puts in its own and shares every mask of the pair."""
    b = bench()
    forged = replace(b.keys[2], idx=1, gen=2**40, signature=bytes(64))
    monkeypatch.setattr("privacy.secure_aggregation.rostersum.keys.verify", lambda *_: True)
    b.say(0, forged)
    assert keys_of(b, 0).keyset((0, 1)) == messages.keyset(((0, b.keys[0].digest), (1, forged.digest)))


def test_i10_copied_public_keys_are_harmless(bench: Make) -> None:
    """Site 2 may show site 1's public key as its own: the salt separates the pairs, and site 1 is not locked out."""
    b = bench()
    copied = resigned(b, 2, x25519_pk=b.keys[1].x25519_pk, gen=2**40)
    b.say(0, copied)
    assert keys_of(b, 0).root(1) != keys_of(b, 0).root(2)
    assert keys_of(b, 0).root(1) == keys_of(b, 1).root(0)


def test_i22_known_and_replayed_keys_change_nothing(bench: Make) -> None:
    """The same KEYS again, and older ones of the same epoch, are ignored."""
    b = bench()
    old, root = b.keys[1], keys_of(b, 0).root(1)
    assert (b.say(0, old), keys_of(b, 0).root(1)) == ((), root)
    b.crash(1)
    b.epoch(1, [1])
    newer = keys_of(b, 0).root(1)
    assert newer != root
    assert (b.say(0, old), keys_of(b, 0).root(1)) == ((), newer)


def test_i22_two_keys_of_one_generation_are_evidence_and_the_first_stays(bench: Make) -> None:
    """E_KEYS, both are kept; KEYS of a greater generation are taken."""
    b = bench()
    root = keys_of(b, 0).root(1)
    assert b.refused(0, resigned(b, 1, nonce=bytes(32))) is Code.E_KEYS
    assert (b.evidence(0), keys_of(b, 0).root(1)) == ([Suspicion.TWO_KEYS], root)
    b.say(0, resigned(b, 1, gen=b.keys[1].gen + 1))
    assert keys_of(b, 0).root(1) != root


def test_i22_a_second_encaps_is_refused_and_resets_nothing(bench: Make) -> None:
    """The first stands; the same again is ignored; another one of the same keys is evidence."""
    b = bench(pq=1)
    (encaps,) = (each for each in b.sent(b.effects[0], Encaps) if each.hi == 1)
    root = keys_of(b, 1).root(0)
    assert b.say(1, encaps) == ()
    second = messages.sign(replace(encaps, ct=bytes([encaps.ct[0] ^ 1, *encaps.ct[1:]])), b.consortium.sites[0])
    assert b.refused(1, second) is Code.E_KEYS
    assert (b.evidence(1), keys_of(b, 1).root(0)) == ([Suspicion.TWO_ENCAPS], root)


@pytest.mark.parametrize(
    "changes",
    [{"hi": 2}, {"lo": 1}, {"epoch": 2}, {"keys_digest_lo": bytes(32)}, {"keys_digest_hi": bytes(32)}],
    ids=lambda changes: next(iter(changes)),
)
def test_i22_an_encaps_for_other_keys_is_refused(bench: Make, changes: dict[str, Any]) -> None:
    """It must be from the lower to this site, for the newest keys of both."""
    b = bench(pq=1)
    (encaps,) = (each for each in b.sent(b.effects[0], Encaps) if each.hi == 1)
    wrong = messages.sign(replace(encaps, **changes), b.consortium.sites[0])
    assert b.refused(1, wrong) is Code.E_KEYS


def test_i22_an_encaps_where_none_belongs_is_refused(bench: Make) -> None:
    """A job without pq has none."""
    b = bench()
    encaps = Encaps(b.job_hash, 1, 0, 1, b.keys[0].digest, b.keys[1].digest, bytes(1088))
    assert b.refused(1, messages.sign(encaps, b.consortium.sites[0])) is Code.E_KEYS


def test_i22_a_root_waits_for_its_encaps(bench: Make) -> None:
    """Until then the higher index has no root, and a ROUND_START with the pair is E_KEYSET."""
    b = bench(pq=1)
    b.train(1)
    b.say(1, resigned(b, 0, gen=b.keys[0].gen + 1))
    assert keys_of(b, 1).keyset((0, 1, 2)) is None
    assert b.refused(1, b.start(1)) is Code.E_KEYSET


def test_i22_rekeying_in_flight_changes_nothing_in_flight(bench: Make) -> None:
    """Between UPLOAD and FULL site 1 makes new keys: the seals still open, and the attempt is opened."""
    b = bench()
    b.train(1)
    uploads = b.uploads(b.start(1))
    b.say(0, resigned(b, 1, gen=b.keys[1].gen + 1))
    assert b.sent(b.say(0, b.full(0, uploads)), Open)


def test_i26_the_generation_grows_over_a_restored_disk(bench: Make) -> None:
    """Time carries it above what the lost state had; the others take the new keys, and the old ones no more."""
    b = bench()
    older = b.of(b.effects[1], Persist)[0].durable
    for _ in range(3):
        b.crash(1)
        b.epoch(1, [1])
    lost = b.keys[1].gen
    b.pass_time(60)
    b.crash(1, older)
    b.epoch(1, [1])
    assert b.keys[1].gen > lost
    assert keys_of(b, 0).root(1) == keys_of(b, 1).root(0)


def test_i26_bites_without_time(bench: Make) -> None:
    """With a clock that stands at zero a restored disk repeats a generation, and honest peers refuse its keys."""
    b = bench()
    older = b.of(b.effects[1], Persist)[0].durable
    b.crash(1, older)
    now, b.clock = b.clock, replace(b.clock, wall=0.0)
    b.say(1, b.sign(Epoch(b.job_hash, 1)))
    b.clock = now
    assert b.keys[1].gen == 1
    assert b.say(0, b.keys[1]) == ()
    assert keys_of(b, 0).keyset((0, 1)) != messages.keyset(((0, b.keys[0].digest), (1, b.keys[1].digest)))


def test_i26_a_process_stops_on_foreign_keys_of_its_own_index(bench: Make) -> None:
    """Another process holds its identity key: every job is suspended, nothing more is said, the administrator is told.

    The restarted process makes no keys before the job is resumed.
    """
    b = bench()
    effects = b.say(0, resigned(b, 0, gen=b.keys[0].gen + 1))
    assert (len(b.of(effects, Suspend)), b.evidence(0)) == (1, [Suspicion.FOREIGN_KEYS])
    with pytest.raises(PolicyRefused, match="another process holds its identity key"):
        b.do(0, TimePassed())
    b.crash(0)
    assert b.refused(0, b.sign(Epoch(b.job_hash, 1))) is Code.E_STATE
    b.do(0, Resumed(b.job_hash))
    assert b.sent(b.say(0, b.sign(Epoch(b.job_hash, 1))), Keys)


def test_i26_its_own_and_older_keys_relayed_back_are_nothing_foreign(bench: Make) -> None:
    """The coordinator may send a site what it sent itself, before or after a restart."""
    b = bench()
    old = b.keys[0]
    assert b.say(0, old) == ()
    b.crash(0)
    b.epoch(1, [0])
    assert b.say(0, old) == ()
    forged = replace(old, gen=2**40)
    assert b.refused(0, forged) is Code.E_KEYS


def test_keys_before_an_epoch_are_refused(bench: Make) -> None:
    """A process that has no keys of its own has no use for others'."""
    b = bench()
    b.crash(0)
    assert b.refused(0, b.keys[1]) is Code.E_STATE
    assert not b.of(b.say(0, b.start(1)), Mask)
