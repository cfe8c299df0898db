"""A second ENCAPS for one pair of keys: a colluding site that would spoil rounds after the others have opened them."""

from dataclasses import dataclass
from typing import Any

import pytest

from privacy.crypto import agreement
from privacy.secure_aggregation.rostersum import attempt, messages
from privacy.secure_aggregation.rostersum.keys import SiteKeys
from privacy.secure_aggregation.rostersum.messages import Encaps, decode
from privacy.secure_aggregation.rostersum.proof import Rule, Signer, check, prove
from privacy.secure_aggregation.rostersum.site_events import Log
from tests.attacks.siege import Siege, besiege

COLLUDER, VICTIM = 0, 1


@dataclass(frozen=True)
class Damage:
    """What came of it: who opened, how many sums are right, and whom the victim's log convicts."""

    opened: frozenset[int]
    right: int
    convicted: tuple[tuple[Rule, Signer], ...]


def encapsulated_twice() -> Damage:
    """Site 0 makes a second secret for the same keys of site 1, good and signed, and then takes part in a round."""
    b = besiege(pq=1)
    (first,) = (each for each in b.sent(b.effects[COLLUDER], Encaps) if each.hi == VICTIM)
    ct, _ = agreement.encapsulate(b.keys[VICTIM].mlkem_pk)
    second = Encaps(first.job_hash, 1, COLLUDER, VICTIM, first.keys_digest_lo, first.keys_digest_hi, ct)
    b.say(VICTIM, messages.sign(second, b.consortium.sites[COLLUDER]))
    b.order(1)
    start = b.start(1)
    uploads = b.tried(start)
    seeds = b.seeds(uploads)
    right = seeds.keys() == uploads.keys() and b.unmasked(start.ctx, seeds) == b.total(range(3), 1)
    return Damage(frozenset(seeds), int(right), convicted(b))


def convicted(b: Siege) -> tuple[tuple[Rule, Signer], ...]:
    """Whom the evidence in the victim's log proves to have contradicted itself."""
    logged = [decode(content) for log in b.of(b.effects[VICTIM], Log) for content in log.evidence.messages]
    proofs = prove(lambda: iter([b.terms, *logged])).proofs
    for each in proofs:
        check(each)
    return tuple((each.rule, each.signer) for each in proofs)


def latest_wins(keys: SiteKeys, message: Encaps, revoked: frozenset[bytes], take: Any = SiteKeys.take_encaps) -> None:
    """A machine that takes each ENCAPS as if it were the first."""
    keys._received.pop(message.lo, None)
    take(keys, message, revoked)


def test_a_second_encaps_changes_no_pair_and_convicts_its_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stands: the round opens, and the victim's log proves who signed two.

    Where the latest wins, the pair has two roots and the attempt cannot end, and nothing proves who did it; the seals,
    which confirm the roots, still keep the two from opening. Where seals are not looked at either, all open noise.
    """
    assert encapsulated_twice() == Damage(frozenset({0, 1, 2}), 1, ((Rule.ENCAPS, Signer(0, "org0", "s0")),))
    monkeypatch.setattr(SiteKeys, "take_encaps", latest_wins)
    assert encapsulated_twice() == Damage(frozenset({2}), 0, ())
    monkeypatch.setattr(attempt, "_unsealed", lambda *_: ())
    assert encapsulated_twice() == Damage(frozenset({0, 1, 2}), 0, ())
