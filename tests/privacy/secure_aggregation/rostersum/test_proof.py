"""Who contradicts themselves is proven from bytes alone, and nobody else is."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import IdentityError, RemoteProtocolError
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.messages import (
    NOTHING,
    Encaps,
    Full,
    Keys,
    Message,
    Open,
    Outcome,
    Ready,
    Result,
    RoundStart,
    Seal,
    Train,
    Upload,
    commitment,
    decode,
    encode,
    sign,
)
from privacy.secure_aggregation.rostersum.proof import Found, Proof, Rule, Signer, check, prove
from privacy.secure_aggregation.rostersum.site_events import Log
from privacy.secure_aggregation.rostersum.terms import Terms
from tests.privacy.secure_aggregation.rostersum.conftest import Bench, consortium_of

H, OTHER = b"\x11" * 32, b"\x22" * 32
STUDY = consortium_of(4)
JOB = STUDY.terms.job_hash
SITE, COORDINATOR = 1, None


def key(party: int | None) -> Ed25519PrivateKey:
    """A party's signing key."""
    return STUDY.coordinator if party is None else STUDY.sites[party]


def start(r: int = 1, members: tuple[int, ...] = (0, 1, 2), *, a: int = 0, model: bytes = H) -> RoundStart:
    """A ROUND_START as the coordinator signs it."""
    return sign(RoundStart(JOB, 1, r, a, 1, members, H, model, H), key(COORDINATOR))


CTX, CTX_2 = start().ctx, start(a=1).ctx


def keys(gen: int = 5, nonce: bytes = H) -> Keys:
    """A site's KEYS."""
    return sign(Keys(JOB, 1, SITE, gen, H, b"", nonce), key(SITE))


def encaps(ct: bytes, hi: int = 2, digest: bytes = H) -> Encaps:
    """A site's ENCAPS."""
    return sign(Encaps(JOB, 1, SITE, hi, H, digest, ct * 1088), key(SITE))


def upload(y_hash: bytes = H, *, b: bytes = H, ctx: bytes = CTX, idx: int = SITE, by: int | None = None) -> Upload:
    """A site's UPLOAD, committed to the seed `b`."""
    seals = (Seal(0, bytes(16)), Seal(2, bytes(16)))
    return sign(Upload(ctx, idx, y_hash, commitment(ctx, idx, b), seals), key(idx if by is None else by))


def opening(b: bytes = H, ctx: bytes = CTX) -> Open:
    """A site's OPEN."""
    return sign(Open(ctx, SITE, b, H), key(SITE))


def full(*uploads: Upload, ctx: bytes = CTX) -> Full:
    """The FULL of these uploads."""
    entries = tuple(each.entry for each in uploads)
    return sign(Full(ctx, entries, (Seal(0, bytes(16)),)), key(COORDINATOR))


def result(outcome: Outcome = Outcome.OPENED, sum_hash: bytes = H, ctx: bytes = CTX) -> Result:
    """How an attempt ended."""
    return sign(Result(ctx, outcome, sum_hash), key(COORDINATOR))


CONTRADICTIONS: dict[str, tuple[Rule, int | None, tuple[Message, ...]]] = {
    "keys": (Rule.KEYS, SITE, (keys(), keys(nonce=OTHER))),
    "encaps": (Rule.ENCAPS, SITE, (encaps(b"a"), encaps(b"b"))),
    "vectors": (Rule.UPLOADS, SITE, (upload(), upload(OTHER))),
    "commitments": (Rule.UPLOADS, SITE, (upload(), upload(b=OTHER))),
    "upload and full": (Rule.UPLOADS, SITE, (upload(), full(upload(idx=0), upload(OTHER)))),
    "opens": (Rule.OPENS, SITE, (start(), start(a=1), opening(), opening(ctx=CTX_2))),
    "seed": (Rule.SEED, SITE, (upload(b=OTHER), opening())),
    "seed in a full": (Rule.SEED, SITE, (full(upload(b=OTHER)), opening())),
    "members": (Rule.STARTS, COORDINATOR, (start(), start(members=(1, 2, 3)))),
    "models": (Rule.STARTS, COORDINATOR, (start(), start(model=OTHER))),
    "transcripts": (Rule.FULLS, COORDINATOR, (full(upload(idx=0)), full(upload(idx=0), upload()))),
    "outcomes": (Rule.RESULTS, COORDINATOR, (result(), result(Outcome.BURNED, NOTHING))),
    "sums": (Rule.RESULTS, COORDINATOR, (result(), result(sum_hash=OTHER))),
}

HONEST: dict[str, tuple[Message, ...]] = {
    "the same again": (keys(), keys(), upload(), upload(), start(), start(), result(), result()),
    "newer keys": (keys(5), keys(6, OTHER)),
    "other pairs": (encaps(b"a"), encaps(b"b", hi=3), encaps(b"c", digest=OTHER)),
    "the next attempt": (upload(), upload(OTHER, ctx=CTX_2), result(), result(Outcome.BURNED, NOTHING, CTX_2)),
    "opens of two rounds": (start(), start(2), opening(), opening(ctx=start(2).ctx)),
    "opens whose rounds nobody knows": (opening(), opening(ctx=CTX_2)),
    "one seed": (upload(), full(upload()), opening()),
    "other seals": (
        upload(),
        sign(replace(upload(), seals=()), key(SITE)),
        full(upload()),
        replace(full(upload()), seals=()),
    ),
    "cells side by side": (start(members=(0, 1)), start(members=(2, 3))),
    "a round later": (start(), start(2), start(a=1)),
    "messages without a rule": (
        sign(Ready(JOB, 1, 1, 1, H, H, SITE, H), key(SITE)),
        sign(Train(JOB, 1, 1, 1, H, H), key(COORDINATOR)),
    ),
}


def searched(*given: Terms | Message) -> Found:
    """What a search of these messages finds."""
    return prove(lambda: iter(given))


def proven(*given: Message) -> Proof:
    """The one contradiction among these messages, by the terms of their job."""
    found = searched(STUDY.terms, *given)
    assert (len(found.proofs), found.unproven) == (1, 0)
    return found.proofs[0]


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_each_rule_is_proven_by_two_signed_messages(name: str) -> None:
    """Of section 8.7: the rule, the key that signed both, and whose it is; in whatever order they stand in the log."""
    rule, party, given = CONTRADICTIONS[name]
    signer = Signer() if party is None else Signer(SITE, "org1", "s1")
    for found in (proven(*given), proven(*(*given[: len(given) - 2], *reversed(given[-2:])))):
        assert (found.rule, found.signer) == (rule, signer)
        assert found.key == key(party).public_key().public_bytes_raw()
        check(found)


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_party_is_never_accused(name: str) -> None:
    """By what it may well say."""
    assert searched(STUDY.terms, *HONEST[name]) == Found(len(HONEST[name]), (), 0)


def test_a_proof_holds_no_seal() -> None:
    """No signature covers seals; those of an UPLOAD are of no concern to whom it is shown."""
    for name in ("vectors", "transcripts"):
        held = [decode(content) for content in proven(*CONTRADICTIONS[name][2]).messages]
        assert [each.seals for each in held if isinstance(each, Upload | Full)] == [(), ()]


def test_a_party_is_accused_once_of_one_thing() -> None:
    """Three ROUND_STARTs that share three sites, and a copy in each of two logs."""
    said = (start(), start(model=OTHER), start(members=(0, 1, 2, 3)))
    found = searched(STUDY.terms, *said, STUDY.terms, *said)
    assert [each.rule for each in found.proofs] == [Rule.STARTS]
    assert found.messages == 6


def test_two_logs_show_what_neither_shows() -> None:
    """A coordinator that tells two sites of two models stands in no single log."""
    first, second = start(), start(model=OTHER)
    for alone in (first, second):
        assert searched(STUDY.terms, alone).proofs == ()
    assert proven(first, second).rule is Rule.STARTS


def test_what_others_forge_accuses_nobody() -> None:
    """Another's signature, none at all, or the terms of another job: told as unproven."""
    forged = (
        upload(OTHER, by=0),
        sign(replace(upload(OTHER)), key(COORDINATOR)),
        replace(upload(OTHER), signature=bytes(64)),
    )
    for each in forged:
        assert searched(STUDY.terms, upload(), each) == Found(2, (), 1)


def test_without_the_terms_nobody_is_named() -> None:
    """Whose keys sign is what the terms of the job say."""
    assert searched(*CONTRADICTIONS["sums"][2]) == Found(2, (), 1)


def test_a_forged_message_hides_no_true_one() -> None:
    """Though it stands in the log first, and says the same as the true one, or a third thing."""
    mauled = replace(start(), signature=bytes(64))
    third = replace(start(2, model=OTHER), r=1)
    assert proven(mauled, third, start(), start(model=OTHER)).rule is Rule.STARTS


def test_one_key_in_two_jobs_contradicts_nothing() -> None:
    """What is said is bound to its job."""
    other = replace(STUDY.terms, c_max=2)
    elsewhere = sign(replace(keys(nonce=OTHER), job_hash=other.job_hash), key(SITE))
    assert searched(STUDY.terms, other, keys(), elsewhere) == Found(2, (), 0)


# ------------------------------------------------------------------------------------------------------------- checking


def test_a_proof_under_another_key_is_refused() -> None:
    """Both messages must be signed with it."""
    wrong = replace(proven(upload(), upload(OTHER)), key=key(0).public_key().public_bytes_raw())
    with pytest.raises(
        IdentityError, match=r"this proves nothing: message 1 is not signed with the key .*accuse nobody"
    ):
        check(wrong)


def test_a_proof_of_two_keys_is_refused() -> None:
    """One of the messages is another's."""
    good = proven(upload(), upload(OTHER))
    with pytest.raises(IdentityError, match="message 2 is not signed with the key"):
        check(replace(good, messages=(good.messages[0], encode(upload(OTHER, by=0)))))


def test_a_proof_under_a_key_for_which_anybody_signs_is_refused() -> None:
    """Whatever it seems to prove."""
    with pytest.raises(IdentityError, match=r"this proves nothing: .* has small order: anybody can sign for it"):
        check(replace(proven(upload(), upload(OTHER)), key=bytes(32)))


@pytest.mark.parametrize("name", HONEST)
def test_messages_that_agree_prove_nothing(name: str) -> None:
    """Under no rule."""
    first, *_, last = HONEST[name]
    party = SITE if isinstance(first, Keys | Encaps | Upload | Open) else COORDINATOR
    for rule in Rule:
        pretended = Proof(
            rule, Signer(party), key(party).public_key().public_bytes_raw(), (encode(first), encode(last))
        )
        with pytest.raises(IdentityError, match="this proves nothing: "):
            check(pretended)


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_proof_of_one_rule_is_none_of_another(name: str) -> None:
    """It says exactly what is broken."""
    found = proven(*CONTRADICTIONS[name][2])
    for rule in set(Rule) - {found.rule}:
        with pytest.raises(IdentityError, match="the two messages do not break the rule: "):
            check(replace(found, rule=rule))


def test_a_proof_against_another_site_is_refused() -> None:
    """The messages say whose they are."""
    with pytest.raises(IdentityError, match="message 1 is one of site 1, not of site 2"):
        check(replace(proven(upload(), upload(OTHER)), signer=Signer(2, "org2", "s2")))
    with pytest.raises(IdentityError, match="message 1 is one of the coordinator, not of site 0"):
        check(replace(proven(result(), result(sum_hash=OTHER)), signer=Signer(0, "org0", "s0")))


def test_opens_prove_nothing_without_their_rounds() -> None:
    """A context by itself does not say of which round it is; another round's ROUND_START does not either."""
    found = proven(*CONTRADICTIONS["opens"][2])
    for starts in ((), found.starts[:1], (found.starts[0], encode(start(2)))):
        with pytest.raises(IdentityError, match="do not break the rule: OPENs of two attempts"):
            check(replace(found, starts=starts))


def test_bytes_that_are_no_messages_are_refused() -> None:
    """As they are everywhere."""
    with pytest.raises(RemoteProtocolError, match=r"cut short|no message"):
        check(replace(proven(upload(), upload(OTHER)), messages=(b"\x00", b"\x00")))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(CONTRADICTIONS)), st.data())
def test_a_proof_with_a_changed_bit_is_refused_or_says_the_same(name: str, data: st.DataObject) -> None:
    """A bit of either message or of the key: what is signed cannot be changed without the key that signed it.

    The coordinator's signature on a FULL is over what sites uploaded, not over their own signatures beside it (no
    digest covers a signature): a bit of those may change, and the FULL says the same.
    """
    found = proven(*CONTRADICTIONS[name][2])
    parts = [found.key, *found.messages]
    which = data.draw(st.integers(0, 2))
    place = data.draw(st.integers(0, len(parts[which]) * 8 - 1))
    flipped = bytearray(parts[which])
    flipped[place // 8] ^= 1 << place % 8
    parts[which] = bytes(flipped)
    changed = replace(found, key=parts[0], messages=(parts[1], parts[2]))
    try:
        check(changed)
    except (IdentityError, RemoteProtocolError):
        return
    assert changed.key == found.key
    before, after = ([decode(each) for each in proof.messages] for proof in (found, changed))
    assert any(isinstance(message, Full) for message in after)
    assert [message.covered() for message in after] == [message.covered() for message in before]


def test_a_full_with_a_mauled_entry_signature_still_proves_what_the_coordinator_signed() -> None:
    """Whoever relays the proof cannot spoil it there, nor make it say another thing."""
    found = proven(*CONTRADICTIONS["transcripts"][2])
    full = decode(found.messages[0])
    assert isinstance(full, Full)
    mauled = replace(full, entries=tuple(replace(each, signature=bytes(64)) for each in full.entries))
    check(replace(found, messages=(encode(mauled), found.messages[1])))


# -------------------------------------------------------------------------------------------------- with real machines


def logged(bench: Bench, idx: int) -> Iterable[Message]:
    """The messages in the evidence that a site's machine has asked to log."""
    return [decode(content) for log in bench.of(bench.effects[idx], Log) for content in log.evidence.messages]


def test_what_a_site_logs_of_an_equivocating_coordinator_proves_it(bench: Callable[..., Bench]) -> None:
    """Two results of one attempt, and two ROUND_STARTs of one, as a real site sees them."""
    made = bench()
    made.train(1)
    begun = made.open(1)
    made.say(0, made.result(begun.ctx))
    made.say(0, made.result(begun.ctx, Outcome.BURNED))
    made.train(2)
    made.say(0, made.start(2))
    made.say(0, made.start(2, model=b"other"))
    found = prove(lambda: iter([made.terms, *logged(made, 0)]))
    assert {(each.rule, each.signer) for each in found.proofs} == {(Rule.RESULTS, Signer()), (Rule.STARTS, Signer())}
    for each in found.proofs:
        check(each)


def test_what_a_site_logs_of_a_doubled_site_proves_it(bench: Callable[..., Bench]) -> None:
    """Two KEYS of one generation: a second copy, or a thief, made the other."""
    made = bench()
    second = messages.sign(replace(made.keys[1], nonce=OTHER), made.consortium.sites[1])
    made.say(0, second)
    (found,) = prove(lambda: iter([made.terms, *logged(made, 0)])).proofs
    assert (found.rule, found.signer) == (Rule.KEYS, Signer(1, "org1", "s1"))
    check(found)
