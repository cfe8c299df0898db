from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation.errors import LocalProtocolError, PolicyRefused, RemoteProtocolError
from privacy.crypto import canonical, masks, seal, shamir
from privacy.secure_aggregation.rostersum import attempt, guards, messages
from privacy.secure_aggregation.rostersum.durable import Durable, Point
from privacy.secure_aggregation.rostersum.evidence import Suspicion
from privacy.secure_aggregation.rostersum.messages import (
    Close,
    Code,
    Decline,
    Encaps,
    Entry,
    Epoch,
    Full,
    Keys,
    Open,
    Outcome,
    Ready,
    Refuse,
    Rescue,
    Seal,
    Shares,
    Upload,
)
from privacy.secure_aggregation.rostersum.seat import T_FULL, T_KEEP, T_OPEN
from privacy.secure_aggregation.rostersum.site_events import (
    Abandon,
    Assignment,
    Because,
    Cannot,
    Clock,
    Closed,
    Connected,
    Drifted,
    Erase,
    FloorChanged,
    Log,
    Mask,
    Masked,
    Persist,
    Received,
    Resumed,
    Suspend,
    TimePassed,
    Unreadable,
    Updated,
    UploadPayload,
    Work,
)
from privacy.secure_aggregation.rostersum.states import Cause, State
from privacy.secure_aggregation.rostersum.terms import Churn, DpCodec, Mechanism, Noise, Plan, Unit

Make = Callable[..., Any]

MANY = settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


def without(guard: str) -> tuple[Any, ...]:
    """The guards of ROUND_START but this one."""
    return tuple(each for each in guards.START_GUARDS if each.__name__ != guard)


def assignment(bench: Any, r: int, plan_id: int = 1) -> Assignment:
    """What the TRAIN of round r asks for."""
    asked = bench.ask(r, plan_id)
    return Assignment(r, plan_id, asked.model_hash, asked.args_hash)


@pytest.fixture
def escrow(train: Plan) -> Plan:
    """Four of four sites, two of whose shares rescue a seed."""
    return replace(train, m_min=4, t=2)


@pytest.fixture
def opened(train: Plan) -> Plan:
    """Any three of five sites."""
    return replace(train, churn=Churn.OPEN)


@pytest.fixture
def noisy(train: Plan) -> Plan:
    """Any three sites, with noise in the sum, three rounds of it."""
    dp = Noise(Unit.SITE, Mechanism.DDGAUSS, 1.0, 100.0, 1.0, 1e-6, 3)
    return replace(train, churn=Churn.DP, codec=DpCodec(8), dp=dp)


# ------------------------------------------------------------------------------------------------------------- annex B


def test_i20_the_vectors_of_annex_b_come_out_of_the_machines(annex: Any) -> None:
    """Three machines with the annex's randomness make its keys, its context, its masked vectors, its T and its OPEN."""
    annex.accept()
    annex.epoch()
    annex.train(1)
    start = annex.start(1)
    uploads = annex.uploads(start)
    keys = annex.sites[0]._seats[annex.job_hash]._keys
    assert annex.job_hash.hex() == "fb24972f172c5662f432fea2075a6900590670d21dc82c4a5543351891418afc"
    assert annex.keys[0].digest.hex() == "43e0a65c4256a08887a279531c622c76dbfbe26a72193c003793a0a77aa0ff8a"
    assert annex.keys[0].signature.hex().startswith("cc3fdd056c5372339c859ba7c64236b9588c2df939b27c424b9a29c1bf37f2ec")
    assert keys.root(1).mask.hex() == "e597d9eca3b9814f76c5241348d77d16f3198d4edee5a1942e0af8792899fbf9"
    assert keys.root(1).seal.hex() == "3d66c6f3e7b85387d88664fdf7f9bfc0aa35c818fc782a0b1f5e20e1afb14f62"
    assert start.keyset.hex() == "7eef6bb8b0727285a75a69f01ad461e530a0ff552e32ef3a99164acfc8d4659b"
    assert start.ctx.hex() == "75dc6605326617e9c8e80d31e7d17b4207a863d02692b28db6ef6c0c01e4eaf0"
    mask = annex.of(annex.effects[0], Mask)[0]
    assert mask.self_key.hex() == "9ef25e18ce1bf3c1749a981217931aad2f6f6efdd2503c1521dbf85301ecfa64"
    assert (mask.pair_keys[0][0], mask.pair_keys[0][1].hex()) == (
        1,
        "924fa13294721d294ed697e4bee700e34aa3cb971023624f9f85f25127ba10e4",
    )
    assert uploads[0].commitment.hex() == "e462c358e033e6f6176a292830603ea0a4d9a855f9c45312bcf2aac600bb1e71"
    assert uploads[0].seals[0] == Seal(1, bytes.fromhex("41c8e704bef1608ac3f1e75c05b3d652"))
    assert annex.ys[start.ctx, 0].tobytes().hex() == (
        "e8b83d41ad8618a15afdcec0c391bf5608b7af09d1e4376932e9c18241e2d65498e2202d2914dca325a86774c7b5b474"
    )
    assert annex.ys[start.ctx, 1].tobytes().hex() == (
        "19f5ce7dfa6e8ae5f684413a7cf3b68da16b41e44274f00271bb9e7f4b41bbdc6e46a96081e823fb21bd85f815ced5a8"
    )
    assert uploads[0].y_hash.hex() == "431d7bef56da78229c22a02b9775356155fa8324d5e9efd3300560d965a400d0"
    opens = [annex.sent(annex.say(idx, annex.full(idx, uploads)), Open)[0] for idx in range(3)]
    assert opens[0].transcript.hex() == "e91e5901dcf049042ddfdd00e70d36e14bae746a946d888af95894d300a971c2"
    assert opens[0].signature.hex() == (
        "44c6a05032e5ebe9b1b9a6f4bdeb25926ceda68427cf3ca149ffbd4f999f0ae7"
        "0b17af6d37f9157c5b8179dbf74dd382f71dfdf1485bb8cb644ad580570fbe06"
    )
    assert unmasked(annex, start, opens)[:8] == [6] * 8


def added(ys: list[Any]) -> Any:
    """The sum of masked vectors in their ring."""
    return np.add.reduce(ys, dtype=ys[0].dtype)


def unmasked(bench: Any, start: Any, opens: list[Open]) -> list[int]:
    """The sum of an attempt's masked vectors less the self masks of these seeds."""
    total = added([bench.ys[start.ctx, idx] for idx in start.members])
    masks.add(total, [(-1, canonical.derive(each.b, "self-mask", start.ctx)) for each in opens])
    return [int(word) for word in total]


def test_an_honest_round_opens_the_sum_of_all_members_and_nothing_else(bench: Make, escrow: Plan) -> None:
    """Every member ends IDLE, its update erased, and the guard words show how many they were."""
    b = bench(4, (escrow,))
    b.train(1)
    start = b.open(1)
    opens = [b.sent(b.effects[idx], Open)[0] for idx in range(4)]
    assert unmasked(b, start, opens) == [1 + 2 + 3 + 4] * 8 + [4] * 4
    for idx in range(4):
        b.say(idx, b.result(start.ctx))
        assert b.state(idx) is State.IDLE
        assert b.of(b.effects[idx], Erase) == [Erase(b.job_hash, f"update 1 of {idx}")]


# ---------------------------------------------------------------------------------------------- masks are never reused


def masks_of(bench: Any) -> tuple[Counter[bytes], Counter[bytes]]:
    """How often each pair key and each self key was used, over all attempts."""
    made = [mask for effects in bench.effects for mask in bench.of(effects, Mask)]
    return Counter(key for mask in made for _, key in mask.pair_keys), Counter(mask.self_key for mask in made)


def retried(b: Any) -> None:
    """Two rounds with two attempts each."""
    for r in (1, 2):
        b.train(r)
        for a in (0, 1):
            b.uploads(b.start(r, a))
        b.open(r, 2)


def test_i3_each_pair_key_masks_two_vectors_and_each_self_key_one(bench: Make) -> None:
    """Over two rounds of three attempts each no key serves anything but one pair, or one site, in one attempt."""
    b = bench(4)
    retried(b)
    pairs, selves = masks_of(b)
    assert (set(pairs.values()), len(pairs)) == ({2}, 6 * 6)
    assert (set(selves.values()), len(selves)) == ({1}, 4 * 6)


def test_i3_bites_when_a_context_forgets_its_attempt(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `a` left out of ctx the pair keys of a round's attempts are the same: differences would show."""
    monkeypatch.setattr(messages, "context", lambda start: canonical.digest("ctx", *replace(start, a=0).covered()))
    b = bench(4)
    retried(b)
    pairs, _ = masks_of(b)
    assert set(pairs.values()) == {6}


# --------------------------------------------------------------------------------------------------- (r, a) only grows


STEP = st.tuples(st.integers(1, 4), st.integers(0, 9), st.sampled_from(("", "crash", "late")))
"""(r, a), and what happens afterwards."""


@MANY
@given(steps=st.lists(STEP, max_size=8))
def test_i4_no_attempt_at_or_before_the_last_is_taken(bench: Make, steps: list[tuple[int, int, str]]) -> None:
    """Whatever the schedule, crashes and time-outs, a site uploads for (r, a) exactly if that is above its last."""
    b = bench()
    last = (0, 0)
    for r, a, then in steps:
        for work in b.of(b.say(0, b.ask(r)), Work):
            b.do(0, Updated(b.job_hash, work.assignment, "update", work.table))
        taken = bool(b.of(b.say(0, b.start(r, a)), Mask))
        assert taken == (r >= last[0] and (r, a) > last and a <= guards.LAST_ATTEMPT)
        last = (r, a) if taken else last
        if then == "crash":
            b.crash(0)
            b.epoch(1, [0])
        elif then == "late":
            b.pass_time(T_FULL)
            b.do(0, TimePassed())


def test_i4_a_round_has_one_plan(bench: Make, train: Plan) -> None:
    """Once an attempt of a round was masked under one plan, no TRAIN names another plan for it."""
    b = bench(3, (train, replace(train, plan_id=4)))
    b.train(1)
    b.uploads(b.start(1))
    assert b.refused(0, b.ask(1, plan_id=4)) is Code.E_REPLAY
    assert b.of(b.say(0, b.ask(2, plan_id=4)), Work)


def test_i4_any_first_round_is_taken(bench: Make) -> None:
    """A site that joins late is not locked out by the number of the round."""
    b = bench()
    b.train(2**63)
    assert b.upload(0, b.start(2**63)).idx == 0


def test_i4_bites_without_the_guard(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it one ctx is masked twice: the two vectors' difference has no mask at all but the self masks'."""
    monkeypatch.setattr(guards, "START_GUARDS", without("_fresh"))
    b = bench()
    b.train(1)
    start = b.start(1)
    b.upload(0, start)
    b.upload(0, start)
    first, second = (mask.pair_keys for mask in b.of(b.effects[0], Mask))
    assert first == second


# -------------------------------------------------------------------------------------------------- after F4, and FULL


def test_i5_after_opening_nothing_of_that_round_is_taken(bench: Make) -> None:
    """Neither TRAIN nor ROUND_START of an opened round passes; the next round does."""
    b = bench()
    b.train(1)
    b.open(1)
    assert b.refused(0, b.ask(1)) is Code.E_REPLAY
    assert b.refused(0, b.ask(1, model=b"other")) is Code.E_REPLAY
    assert b.refused(0, b.start(1, 1)) is Code.E_STATE
    b.train(2)
    assert b.refused(0, b.start(1, 1)) is Code.E_STATE
    b.open(2)


def test_i5_the_full_of_an_attempt_that_was_retried_is_refused(bench: Make) -> None:
    """Who uploads again never opens the attempt before."""
    b = bench()
    b.train(1)
    uploads = b.uploads(b.start(1))
    later = b.uploads(b.start(1, 1))
    assert b.refused(0, b.full(0, uploads)) is Code.E_STATE
    assert b.sent(b.say(0, b.full(0, later)), Open)


def test_a_round_start_asks_again_what_its_train_had_passed(
    bench: Make, train: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were a TRAIN of an opened round, or of a second plan, ever taken, the ROUND_START would still be refused."""
    kept = tuple(each for each in guards.TRAIN_GUARDS if each.__name__ not in ("_unopened", "_one_plan"))
    monkeypatch.setattr(guards, "TRAIN_GUARDS", kept)
    b = bench(3, (train, replace(train, plan_id=4)))
    b.train(1)
    b.open(1)
    b.train(1, model=b"another")
    assert b.refused(0, b.start(1, 1, model=b"another")) is Code.E_REPLAY
    b.train(2)
    b.uploads(b.start(2))
    b.train(2, plan_id=4)
    assert b.refused(0, b.start(2, 1, plan_id=4)) is Code.E_REPLAY


def test_i5_bites_without_the_guards(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them a site that has opened a round contributes to a second sum of it."""
    b = bench()
    b.train(1)
    b.open(1)
    for guard in ("TRAIN_GUARDS", "START_GUARDS"):
        kept = tuple(each for each in getattr(guards, guard) if each.__name__ != "_unopened")
        monkeypatch.setattr(guards, guard, kept)
    b.train(1, model=b"another")
    opened_again = b.start(1, 1, model=b"another")
    uploads = b.uploads(opened_again)
    assert b.sent(b.say(0, b.full(0, uploads)), Open)


def test_i8_members_told_different_things_never_open(bench: Make, opened: Plan) -> None:
    """Two members that were given another model hold another ctx: nobody opens, and all self seeds leaked show nothing.

    The same vectors do sum up where all were told the same.
    """
    b = bench(4, (opened,))
    b.train(1, sites=(0, 1))
    b.train(1, sites=(2, 3), model=b"another")
    one, other = b.start(1), b.start(1, model=b"another")
    uploads = [b.upload(idx, one if idx < 2 else other) for idx in range(4)]
    for idx, start in enumerate((one, one, other, other)):
        full = b.sign(replace(b.full(idx, uploads), ctx=start.ctx))
        assert b.refused(idx, full) is Code.E_SIG
    assert not any(b.sent(effects, Open) for effects in b.effects)
    leaked = [mask.self_key for effects in b.effects for mask in b.of(effects, Mask)]
    total = added([b.ys[(one if idx < 2 else other).ctx, idx] for idx in range(4)])
    masks.add(total, [(-1, key) for key in leaked])
    assert not any(int(word) in (10, 4) for word in total)


@pytest.mark.parametrize("differs", ["members", "attempt", "keys"])
def test_i8_every_part_of_an_attempt_is_in_its_context(bench: Make, opened: Plan, differs: str) -> None:
    """Two members told other members, another attempt or other keys share no mask, though both upload."""
    b = bench(5, (opened,))
    b.train(1)
    one = b.start(1, 0, (0, 1, 2, 3))
    if differs == "keys":
        b.crash(1)
        b.say(1, b.sign(Epoch(b.job_hash, 1)))
        b.say(2, b.keys[1])
    other = b.start(1, int(differs == "attempt"), (0, 1, 2, 4) if differs == "members" else (0, 1, 2, 3))
    (first,), (second,) = b.of(b.say(0, one), Mask), b.of(b.say(2, other), Mask)
    assert first.ctx != second.ctx
    assert {key for _, key in first.pair_keys}.isdisjoint(key for _, key in second.pair_keys)


def broken_fulls(b: Any, uploads: tuple[Upload, ...]) -> dict[str, tuple[Full, Code]]:
    """FULLs for site 0 that are not the one that honest members agree on, and the code of each."""
    good = b.full(0, uploads)
    one, two, three = good.entries
    forged = replace(two, y_hash=b"\x55" * 32)
    mine = messages.sign(replace(uploads[0], y_hash=b"\x66" * 32), b.consortium.sites[0]).entry
    torn = bytes([good.seals[0].sealed[0] ^ 1, *good.seals[0].sealed[1:]])

    def full(*entries: Entry, seals: tuple[Seal, ...] = good.seals) -> Full:
        made: Full = b.sign(replace(good, entries=entries, seals=seals))
        return made

    return {
        "forged": (full(one, forged, three), Code.E_SIG),
        "short": (full(one, two), Code.E_FULL),
        "duplicated": (full(one, two, two), Code.E_FULL),
        "reordered": (full(one, three, two), Code.E_FULL),
        "another upload of mine": (full(mine, two, three), Code.E_FULL),
        "unsigned": (replace(good, signature=bytes(64)), Code.E_SIG),
        "seal missing": (full(one, two, three, seals=good.seals[:1]), Code.E_SEAL),
        "seal twice": (full(one, two, three, seals=(good.seals[0], *good.seals)), Code.E_SEAL),
        "seal torn": (full(one, two, three, seals=(Seal(1, torn), good.seals[1])), Code.E_SEAL),
        "seals swapped": (
            full(one, two, three, seals=(Seal(1, good.seals[1].sealed), Seal(2, good.seals[0].sealed))),
            Code.E_SEAL,
        ),
    }


def test_i9_a_full_that_is_not_exactly_right_is_refused(bench: Make) -> None:
    """Forged, short, duplicated, reordered, with another upload of mine, with bad seals: refused, nothing changed."""
    b = bench()
    b.train(1)
    uploads = b.uploads(b.start(1))
    cases = broken_fulls(b, uploads)
    assert {name: b.refused(0, full) for name, (full, _) in cases.items()} == {
        name: code for name, (_, code) in cases.items()
    }
    assert b.evidence(0) == [Suspicion.TWO_UPLOADS]
    assert b.sent(b.say(0, b.full(0, uploads)), Open)


def test_i9_a_broken_seal_names_its_sender(bench: Make) -> None:
    """E_SEAL is about the site whose seal it is."""
    b = bench()
    b.train(1)
    uploads = b.uploads(b.start(1))
    (refuse,) = b.sent(b.say(0, broken_fulls(b, uploads)["seal torn"][0]), Refuse)
    assert (refuse.code, refuse.about, refuse.r, refuse.a) == (Code.E_SEAL, 1, 1, 0)


@pytest.mark.parametrize(
    ("t", "plaintext"),
    [(0, bytes(33)), (2, b""), (2, (2**256 + 297).to_bytes(33, "big"))],
    ids=["share", "none", "large"],
)
def test_i9_a_seal_holds_a_share_exactly_where_there_is_escrow(
    bench: Make, escrow: Plan, t: int, plaintext: bytes
) -> None:
    """Something where t = 0, nothing where t > 0, or no element of the field: E_SEAL about its sender."""
    b = bench(4, (replace(escrow, t=t),))
    b.train(1)
    start = b.start(1)
    uploads = b.uploads(start)
    root = b.sites[1]._seats[b.job_hash]._keys.root(0)
    key = canonical.derive(root.seal, "seal", start.ctx, 1, 0)
    closed = seal.close(key, canonical.enc(start.ctx, 1, 0, uploads[1].commitment), plaintext)
    full = b.full(0, uploads)
    wrong = b.sign(replace(full, seals=(Seal(1, closed), *full.seals[1:])))
    (refuse,) = b.sent(b.say(0, wrong), Refuse)
    assert (refuse.code, refuse.about) == (Code.E_SEAL, 1)
    assert b.sent(b.say(0, full), Open)


def test_i9_bites_without_the_signatures(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them a site opens for a vector that nobody uploaded."""
    b = bench()
    b.train(1)
    uploads = b.uploads(b.start(1))
    forged, _ = broken_fulls(b, uploads)["forged"]
    monkeypatch.setattr(attempt, "verify_entry", lambda *_: True)
    assert b.sent(b.say(0, forged), Open)


# ------------------------------------------------------------------------------------------------------------- RESCUE


def test_i6_shares_are_given_for_the_record_and_give_the_seed(bench: Make, escrow: Plan) -> None:
    """Two shares of the site that did not open give the seed to which it is committed."""
    b = bench(4, (escrow,))
    b.train(1)
    start = b.start(1)
    uploads = b.uploads(start)
    for idx in (0, 1, 2):
        b.say(idx, b.full(idx, uploads))
    rescue = b.sign(Rescue(start.ctx, (3,)))
    given = {idx: b.sent(b.say(idx, rescue), Shares)[0].shares[0].share for idx in (0, 2)}
    bound = uploads[3].commitment
    seed, wrong = shamir.reconstruct(given, 2, lambda b3: messages.commitment(start.ctx, 3, b3) == bound)
    assert (canonical.derive(seed, "self-mask", start.ctx), wrong) == (
        b.of(b.effects[3], Mask)[0].self_key,
        frozenset(),
    )
    assert b.state(0) is State.OPENED


@pytest.mark.parametrize("missing", [(), (0,), (0, 1), (1, 2, 3), (3, 2), (2, 2), (4,), (65535,)], ids=str)
def test_i6_a_rescue_that_names_no_proper_set_is_refused(bench: Make, escrow: Plan, missing: tuple[int, ...]) -> None:
    """Nobody, oneself, more than |P| - t, not ascending, or not a member: E_RESCUE."""
    b = bench(4, (escrow,))
    b.train(1)
    start = b.open(1)
    assert b.refused(0, b.sign(Rescue(start.ctx, missing))) is Code.E_RESCUE


def test_i6_a_rescue_without_a_record_is_refused(bench: Make, escrow: Plan, train: Plan) -> None:
    """Before F4, for another ctx, with t = 0 and after the shares are erased nothing is given."""
    b = bench(4, (escrow,))
    b.train(1)
    start = b.start(1)
    uploads = b.uploads(start)
    rescue = b.sign(Rescue(start.ctx, (3,)))
    assert b.refused(0, rescue) is Code.E_RESCUE
    b.say(0, b.full(0, uploads))
    assert b.refused(0, b.sign(Rescue(bytes(32), (3,)))) is Code.E_RESCUE
    assert b.refused(0, replace(rescue, signature=bytes(64))) is Code.E_SIG
    b.say(0, b.result(start.ctx, Outcome.BURNED))
    assert b.refused(0, rescue) is Code.E_RESCUE
    bare = bench(4, (train,))
    bare.train(1)
    assert bare.refused(0, bare.sign(Rescue(bare.open(1).ctx, (3,)))) is Code.E_RESCUE


def test_i6_bites_without_the_guard(bench: Make, escrow: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a site gives its shares of all others' seeds at once."""
    b = bench(4, (escrow,))
    b.train(1)
    start = b.open(1)
    monkeypatch.setattr(guards, "rescuable", lambda _message, record, _idx: record)
    assert len(b.sent(b.say(0, b.sign(Rescue(start.ctx, (1, 2, 3)))), Shares)[0].shares) == 3


# ------------------------------------------------------------------------------------------------ the set of an attempt


def test_i11_sets_that_are_too_small_are_refused(bench: Make, opened: Plan) -> None:
    """Fewer sites than m_min, or fewer organisations than o_min: E_COHORT."""
    b = bench(5, (replace(opened, m_min=4, o_min=4),))
    b.train(1)
    assert b.refused(0, b.start(1, 0, (0, 1, 2))) is Code.E_COHORT
    assert b.upload(0, b.start(1, 0, (0, 1, 2, 3))).idx == 0


def test_i11_organisations_are_counted_apart_from_sites(bench: Make, opened: Plan, consortium: Make) -> None:
    """Four sites of two organisations are not three organisations."""
    roster = consortium(5).terms.roster
    orgs = ("a", "a", "b", "b", "c")
    members = tuple(replace(each, org=org) for each, org in zip(roster.members, orgs, strict=True))
    b = bench(5, (opened,), roster=replace(roster, members=members))
    b.train(1)
    assert b.refused(0, b.start(1, 0, (0, 1, 2, 3))) is Code.E_COHORT
    assert b.upload(0, b.start(1, 0, (0, 1, 2, 4))).idx == 0


def test_i11_bites_without_the_guard(bench: Make, opened: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a site masks for a set of two, whose other member learns its update from the sum."""
    monkeypatch.setattr(guards, "START_GUARDS", without("_cohort"))
    b = bench(5, (opened,))
    b.train(1)
    start = b.start(1, 0, (0, 1))
    uploads = b.uploads(start)
    opens = [b.sent(b.say(idx, b.full(idx, uploads)), Open)[0] for idx in (0, 1)]
    assert unmasked(b, start, opens)[:8] == [1 + 2] * 8


@pytest.mark.parametrize("members", [(1, 2, 3), (0, 2, 1), (0, 1, 1, 2), (0, 1, 2, 9), ()], ids=str)
def test_a_set_that_is_no_ascending_set_with_this_site_is_refused(
    bench: Make, opened: Plan, members: tuple[int, ...]
) -> None:
    """E_SET, whatever else is right."""
    b = bench(5, (opened,))
    b.train(1)
    assert b.refused(0, b.start(1, 0, members)) is Code.E_SET


def test_a_revoked_member_is_in_no_set(bench: Make, opened: Plan) -> None:
    """As soon as the site's file names it, sets with it are refused, naming it."""
    b = bench(5, (opened,))
    b.train(1)
    b.do(0, FloorChanged(replace(b.floor, revoked=frozenset({b.terms.roster.members[3].vk}))))
    (refuse,) = b.sent(b.say(0, b.start(1)), Refuse)
    assert (refuse.code, refuse.about) == (Code.E_SET, 3)
    assert b.upload(0, b.start(1, 0, (0, 1, 2, 4))).idx == 0


def test_i21_sets_that_split_a_cell_are_refused(bench: Make, train: Plan) -> None:
    """With churn cells P is a union of whole cells; in group mode it is exactly one."""
    cells = ((0, 1, 2), (3, 4, 5))
    grouped = replace(train, plan_id=2, group=1)
    b = bench(6, (train, grouped), cells=cells)
    b.train(1)
    assert b.refused(0, b.start(1, 0, (0, 1, 2, 3))) is Code.E_CHURN
    assert b.refused(0, b.start(1, 0, (0, 1, 3, 4))) is Code.E_CHURN
    assert b.upload(0, b.start(1, 0, (0, 1, 2, 3, 4, 5))).idx == 0
    b.train(2, plan_id=2)
    assert b.refused(0, b.start(2, 0, (0, 1, 2, 3, 4, 5), plan_id=2)) is Code.E_CHURN
    assert b.upload(0, b.start(2, 0, (0, 1, 2), plan_id=2)).idx == 0


def test_i21_bites_without_the_guard(bench: Make, train: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it two sums over sets that differ by one site give that site's update by subtraction."""
    monkeypatch.setattr(guards, "START_GUARDS", without("_churn"))
    b = bench(6, (train,), cells=((0, 1, 2), (3, 4, 5)))
    sums = []
    for r, members in ((1, (0, 1, 2, 3)), (2, (0, 1, 2))):
        b.train(r, sites=members)
        start = b.start(r, 0, members)
        uploads = b.uploads(start)
        opens = [b.sent(b.say(idx, b.full(idx, uploads)), Open)[0] for idx in members]
        sums.append(unmasked(b, start, opens)[0])
    assert sums[0] - sums[1] == 3 + 1


# ------------------------------------------------------------------------------------------------------------- crashes


def test_i14_after_a_crash_at_any_durable_point_no_context_is_masked_twice(bench: Make, escrow: Plan) -> None:
    """Site 0 restarts on what was durable after each Persist of two attempts: its old attempts are never taken again.

    A round that it has opened it opens again with the very same bytes.
    """
    b = bench(4, (escrow,))
    b.train(1)
    b.uploads(b.start(1))
    start = b.open(1, 1)
    persists = b.of(b.effects[0], Persist)
    assert [each.point for each in persists] == [Point.JOB, Point.KEYS, Point.ATTEMPT, Point.ATTEMPT, Point.OPENED]
    uploads = [b.sent(b.effects[idx], Upload)[-1] for idx in range(4)]
    (opening,) = b.sent(b.effects[0], Open)
    used = {mask.ctx for mask in b.of(b.effects[0], Mask)}
    for persist in persists:
        b.crash(0, persist.durable)
        last = persist.durable.jobs[0].last
        again = b.sent(b.say(0, b.full(0, uploads)))
        assert again == [opening] if persist.point is Point.OPENED else again[0].code is Code.E_STATE
        assert b.refused(0, b.start(1, 2)) in (Code.E_EPOCH, Code.E_STATE)
        b.epoch(1, [0])
        asked = b.say(0, b.ask(1))
        if persist.point is Point.OPENED:
            assert b.sent(asked)[0].code is Code.E_REPLAY
            continue
        b.do(0, Updated(b.job_hash, b.of(asked, Work)[0].assignment, "again", b.data.table))
        for a in (0, 1, 2):
            masked = b.of(b.say(0, b.start(1, a)), Mask)
            assert bool(masked) == ((1, a) > last)
            assert not {mask.ctx for mask in masked} & used
    assert start.ctx in used


def test_i14_effects_wait_for_what_they_rely_on(bench: Make) -> None:
    """Each KEYS, Mask and OPEN stands behind its Persist, so a crash before it was durable leaves nothing said."""
    b = bench()
    b.train(1)
    b.open(1)
    relied = {Keys: Point.KEYS, Mask: Point.ATTEMPT, Open: Point.OPENED}
    for kind, point in relied.items():
        order = [effect for effect in b.effects[0] if _is(effect, kind) or getattr(effect, "point", None) is point]
        assert [isinstance(effect, Persist) for effect in order] == [True, False]


def _is(effect: Any, kind: type) -> bool:
    return isinstance(effect, kind) or isinstance(getattr(effect, "message", None), kind)


def test_i13_no_seed_is_durable_before_the_round_is_opened(bench: Make, escrow: Plan) -> None:
    """The self seed stands in no durable state before F4, and no key of a pair or seal stands in any."""
    b = bench(4, (escrow,))
    b.train(1)
    b.open(1)
    persists = b.of(b.effects[0], Persist)
    (opening,) = b.sent(b.effects[0], Open)
    assert [opening.b in each.durable.encode() for each in persists] == [False, False, False, True]
    (mask,) = b.of(b.effects[0], Mask)
    secrets = [mask.self_key, *(key for _, key in mask.pair_keys)]
    said = [messages.encode(message) for message in b.sent(b.effects[0])]
    assert not any(secret in content for secret in secrets for content in (*said, persists[-1].durable.encode()))


# ---------------------------------------------------------------------------------------------- declines and refusals


def test_i15_a_decline_has_no_reason_and_the_third_for_data_suspends(bench: Make) -> None:
    """Declines for data and for lack of resources are the same bytes; three for data stop the job."""
    b, other = bench(), bench()
    said = []
    for r in (1, 2, 3):
        b.say(0, b.ask(r))
        said.append(b.do(0, Cannot(b.job_hash, assignment(b, r), Because.DATA)))
    other.say(0, other.ask(1))
    resources = other.do(0, Cannot(other.job_hash, assignment(other, 1), Because.RESOURCES))
    assert b.sent(said[0], Decline) == other.sent(resources, Decline)
    assert [bool(b.of(each, Suspend)) for each in said] == [False, False, True]
    assert b.refused(0, b.ask(4)) is Code.E_STATE
    b.crash(0)
    assert b.refused(0, b.sign(Epoch(b.job_hash, 1))) is Code.E_STATE
    b.do(0, Resumed(b.job_hash))
    b.epoch(1, [0])
    assert b.of(b.say(0, b.ask(4)), Work)


def test_i15_under_dp_nothing_is_declined_because_of_data(bench: Make, noisy: Plan, fund: Make) -> None:
    """A worker that says so under dp has a bug, and nothing is sent."""
    b = bench(4, (noisy,), ledger=fund(9))
    b.say(0, b.ask(1))
    with pytest.raises(LocalProtocolError, match="counts as zero"):
        b.do(0, Cannot(b.job_hash, assignment(b, 1), Because.DATA))
    assert b.state(0) is State.WORKING
    assert b.sent(b.do(0, Cannot(b.job_hash, assignment(b, 1), Because.RESOURCES)), Decline)


def test_i24_refusals_and_declines_are_the_same_bytes_for_neighbouring_data_sets(bench: Make) -> None:
    """Two sites that differ in their records, and so in their updates and masked vectors, refuse in the same words."""
    said = []
    for rows in (1000, 1001):
        b = bench(ready=False)
        b.data = replace(b.data, rows=rows)
        b.accept()
        b.epoch()
        b.say(0, b.ask(1))
        b.do(0, Cannot(b.job_hash, assignment(b, 1), Because.DATA))
        b.train(2)
        b.say(0, b.start(2, 9))
        (mask,) = b.of(b.say(0, b.start(2)), Mask)
        b.do(0, Masked(b.job_hash, mask.ctx, rows.to_bytes(32, "big")))
        b.say(0, b.start(1))
        b.say(0, b.ask(1))
        b.do(0, Unreadable(b.job_hash))
        told = [each for each in b.sent(b.effects[0]) if isinstance(each, Refuse | Decline)]
        said.append([messages.encode(each) for each in told])
    assert said[0] == said[1]
    assert len(said[0]) == 5


def test_guards_are_asked_in_the_order_of_the_text(bench: Make, opened: Plan) -> None:
    """A ROUND_START in which everything is wrong is refused for the first thing; mended, for the next."""
    b = bench(5, (replace(opened, m_min=4),))
    b.train(1)
    good = b.start(1, 0, (0, 1, 2, 3))
    changes: list[dict[str, Any]] = [
        {"epoch": 7},
        {"model_hash": bytes(32)},
        {"a": 8},
        {"members": (1, 0)},
        {"members": (0, 1, 2)},
        {"keyset": bytes(32)},
    ]
    codes = [Code.E_EPOCH, Code.E_STATE, Code.E_REPLAY, Code.E_SET, Code.E_COHORT, Code.E_KEYSET]
    for first, expected in enumerate(codes):
        wrong = good
        for change in reversed(changes[first:]):
            wrong = replace(wrong, **change)
        assert b.refused(0, wrong) is Code.E_SIG
        assert b.refused(0, b.sign(wrong)) is expected
    assert b.upload(0, good).idx == 0


def test_an_epoch_serves_a_day_and_a_thousand_uploads(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then E_KEYAGE until a new epoch; a refusal uses up no attempt."""
    monkeypatch.setattr("privacy.secure_aggregation.rostersum.keys.KEY_UPLOADS", 1)
    b = bench()
    b.train(1)
    b.upload(0, b.start(1))
    assert b.refused(0, b.start(1, 1)) is Code.E_KEYAGE
    b.epoch(2)
    assert b.upload(0, b.start(1, 1)).idx == 0
    old = bench()
    old.pass_time(24 * 3600 + 1)
    old.train(1)
    assert old.refused(0, old.start(1)) is Code.E_KEYAGE


# ------------------------------------------------------------------------------------------------------------- ledger


def charges(b: Any) -> list[tuple[int, Point, int]]:
    """(round, point, members) of each charge of site 0."""
    persists = b.of(b.effects[0], Persist)
    return [(each.charge.r, each.point, each.charge.members) for each in persists if each.charge is not None]


def test_i17_the_ledger_is_charged_at_f3_once_for_each_round(bench: Make, noisy: Plan, fund: Make) -> None:
    """Retries, burned rounds and refusals charge nothing more; the charge stands in F3's own transaction."""
    b = bench(4, (noisy,), ledger=fund(9))
    b.train(1)
    assert b.refused(0, b.start(1, 9)) is Code.E_REPLAY
    b.uploads(b.start(1))
    b.uploads(b.start(1, 1, (0, 1, 2)))
    b.train(2)
    b.say(0, b.result(b.open(2).ctx, Outcome.BURNED))
    assert charges(b) == [(1, Point.ATTEMPT, 4), (2, Point.ATTEMPT, 4)]


def test_i17_rounds_that_the_plan_or_the_ledger_does_not_pay_are_refused(bench: Make, noisy: Plan, fund: Make) -> None:
    """The fourth of three rounds, and any round once the budget is gone: E_LEDGER."""
    ledger = fund(9)
    b = bench(4, (noisy,), ledger=ledger)
    for r in (1, 2, 3):
        b.train(r)
        b.open(r)
        b.say(0, b.result(b.start(r).ctx))
    assert b.refused(0, b.ask(4)) is Code.E_LEDGER
    poor = bench(4, (noisy,), ledger=ledger)
    poor.train(1)
    ledger.rounds = 0
    assert poor.refused(0, poor.start(1)) is Code.E_LEDGER
    assert charges(poor) == []


def test_i17_bites_when_each_attempt_is_charged(
    bench: Make, noisy: Plan, fund: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rule a retried round is charged twice."""
    charge = guards.charge

    def always(view: Any, *rest: Any) -> Any:
        return charge(replace(view, job=replace(view.job, last_r=0)), *rest)

    monkeypatch.setattr(guards, "charge", always)
    b = bench(4, (noisy,), ledger=fund(9))
    b.train(1)
    b.uploads(b.start(1))
    b.uploads(b.start(1, 1))
    assert len(charges(b)) == 2


# ---------------------------------------------------------------------------------------------------------- wire fuzz


def flips(content: bytes, stride: int) -> list[bytes]:
    """The content with one bit changed, for each bit (of each `stride`-th byte)."""
    return [
        content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
        for at in range(0, len(content), stride)
        for bit in range(8)
    ]


def keys_of_0(b: Any) -> Keys:
    """Site 1 has fresh keys and knows nobody's yet."""
    b.crash(1)
    b.say(1, b.sign(Epoch(b.job_hash, 1)))
    keys: Keys = b.keys[0]
    return keys


def encaps_of_0(b: Any) -> Encaps:
    """Site 1 knows the KEYS of site 0 and waits for its ENCAPS."""
    b.say(1, keys_of_0(b))
    (encaps,) = b.sent(b.say(0, b.keys[1]), Encaps)
    return encaps


def start_of_1(b: Any) -> Any:
    """Site 1 is READY."""
    b.train(1)
    return b.start(1)


def full_of_1(b: Any) -> Full:
    """Site 1 has uploaded."""
    full: Full = b.full(1, b.uploads(start_of_1(b)))
    return full


def opened_by_1(b: Any) -> bytes:
    """Site 1 has opened; the context."""
    full = full_of_1(b)
    b.say(1, full)
    return full.ctx


TAKEN: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "epoch": (1, lambda b: b.sign(Epoch(b.job_hash, 2))),
    "keys": (11, keys_of_0),
    "encaps": (11, encaps_of_0),
    "train": (1, lambda b: b.ask(1)),
    "start": (3, start_of_1),
    "full": (5, full_of_1),
    "rescue": (1, lambda b: b.sign(Rescue(opened_by_1(b), (2,)))),
    "result": (1, lambda b: b.result(opened_by_1(b))),
    "close": (1, lambda b: b.sign(Close(b.job_hash))),
}
"""Each message that a site takes: which of its bytes are flipped, and what brings site 1 to where it takes it."""


@pytest.mark.parametrize("kind", TAKEN)
def test_i19_every_bit_flip_of_every_message_is_refused(bench: Make, escrow: Plan, kind: str) -> None:
    """Each changed message is unreadable or refused and leaves everything as it was: the true one still passes."""
    b = bench(4, (escrow,), pq=int(kind in ("keys", "encaps")))
    stride, reach = TAKEN[kind]
    message = reach(b)
    kept = b.sites[1].durable, b.state(1)
    for wrong in flips(messages.encode(message), stride):
        try:
            effects = b.sites[1].receive(Received(b.job_hash, messages.decode(wrong)), b.clock)
        except RemoteProtocolError:
            effects = b.sites[1].receive(Unreadable(b.job_hash), b.clock)
        assert [type(each) for each in b.sent(effects)] == [Refuse], wrong.hex()
        assert (b.sites[1].durable, b.state(1)) == kept
    assert not b.sent(b.say(1, message), Refuse)


# ------------------------------------------------------------------------------------------------ time, and the record


def test_an_upload_without_full_is_sealed_and_its_update_kept(bench: Make) -> None:
    """After T_full the FULL finds nothing to open; the next attempt needs no new work; after T_keep the update goes."""
    b = bench()
    b.train(1)
    uploads = b.uploads(b.start(1))
    assert b.sites[0].wake_at(b.clock) == b.clock.steady + T_FULL
    b.pass_time(T_FULL)
    assert b.of(b.do(0, TimePassed()), Abandon)
    assert (b.state(0), b.refused(0, b.full(0, uploads))) == (State.READY, Code.E_STATE)
    assert b.upload(0, b.start(1, 1)).idx == 0
    b.pass_time(T_FULL)
    b.do(0, TimePassed())
    b.pass_time(T_KEEP)
    assert b.of(b.do(0, TimePassed()), Erase)
    assert (b.state(0), b.refused(0, b.start(1, 2))) == (State.IDLE, Code.E_STATE)


def test_shares_are_erased_after_a_day_also_over_a_restart(bench: Make, escrow: Plan) -> None:
    """T_open counts from the opening, not from the last start."""
    b = bench(4, (escrow,))
    b.train(1)
    start = b.open(1)
    b.pass_time(T_OPEN - 10)
    b.crash(0)
    b.do(0, TimePassed())
    assert b.sites[0].wake_at(b.clock) == b.clock.steady + 10
    assert b.sent(b.say(0, b.sign(Rescue(start.ctx, (1,)))), Shares)
    b.pass_time(10)
    b.do(0, TimePassed())
    assert (b.state(0), b.refused(0, b.sign(Rescue(start.ctx, (1,))))) == (State.IDLE, Code.E_RESCUE)
    assert b.durable(0).jobs[0].record.shares == ()
    assert b.sites[0].wake_at(b.clock) is None


def test_clocks_that_drift_apart_drop_all_that_is_in_memory(bench: Make) -> None:
    """A resumed snapshot has another wall clock: attempt and update go, and the keys are new at once."""
    b = bench()
    b.train(1)
    uploads = b.uploads(b.start(1))
    gen = b.keys[0].gen
    b.clock = Clock(b.clock.wall + 31, b.clock.steady)
    effects = b.say(0, b.full(0, uploads))
    assert [type(each) for each in effects[:2]] == [Abandon, Erase]
    assert b.sent(effects, Keys)[0].gen > gen
    assert b.sent(effects, Refuse)[0].code is Code.E_STATE
    assert b.state(0) is State.IDLE


def test_clocks_that_stay_together_change_nothing(bench: Make) -> None:
    """Thirty seconds of drift are the network time's; no more."""
    b = bench()
    b.train(1)
    b.clock = Clock(b.clock.wall + 30, b.clock.steady)
    assert b.do(0, TimePassed()) == ()


def test_three_rounds_opened_in_vain_suspend_the_job(bench: Make) -> None:
    """Burned, without a word, or forgotten: at the third the administrator is asked; one good sum starts afresh."""
    b = bench()
    for r, outcome in ((1, Outcome.BURNED), (2, None), (3, Outcome.OPENED), (4, None), (5, Outcome.BURNED)):
        b.train(r)
        start = b.open(r)
        for idx in range(3):
            _ = outcome is None or b.say(idx, b.result(start.ctx, outcome))
    assert b.durable(0).jobs[0].burned == 2
    b.train(6)
    start = b.open(6)
    assert b.of(b.say(0, b.result(start.ctx, Outcome.BURNED)), Suspend)
    assert b.refused(0, b.ask(7)) is Code.E_STATE


def test_a_round_is_not_begun_when_it_would_be_after_the_third_in_vain(bench: Make) -> None:
    """Three openings that nobody answered are enough: the next ROUND_START is refused and the job suspended."""
    b = bench()
    for r in (1, 2, 3):
        b.train(r)
        b.open(r)
    b.train(4)
    effects = b.say(0, b.start(4))
    assert (b.sent(effects)[0].code, len(b.of(effects, Suspend)), b.of(effects, Mask)) == (Code.E_STATE, 1, [])
    assert b.state(0) is State.OPENED


def test_a_result_of_an_attempt_that_others_opened_ends_the_round(bench: Make, escrow: Plan) -> None:
    """Sealed does not mean unopened: a READY site that uploaded lets its update go; a late result changes nothing."""
    b = bench(4, (escrow,))
    b.train(1)
    start = b.start(1)
    b.uploads(start)
    b.pass_time(T_FULL)
    result = b.result(start.ctx)
    assert b.of(b.say(0, result), Erase)
    assert (b.state(0), b.say(0, result)) == (State.IDLE, ())
    b.train(2, sites=(0,))
    assert (b.say(0, result), b.state(0)) == ((), State.READY)


def test_two_results_of_one_attempt_are_evidence(bench: Make) -> None:
    """The coordinator never signs both."""
    b = bench()
    b.train(1)
    start = b.start(1)
    b.uploads(start)
    b.uploads(b.start(1, 1))
    b.say(0, b.result(start.ctx))
    assert b.refused(0, b.result(start.ctx, Outcome.BURNED)) is Code.E_STATE
    assert b.evidence(0) == [Suspicion.TWO_RESULTS]


def test_two_round_starts_of_one_attempt_are_evidence(bench: Make, opened: Plan) -> None:
    """Whatever the second is refused for, both are kept."""
    b = bench(5, (opened,))
    b.train(1)
    b.upload(0, b.start(1, 0, (0, 1, 2)))
    assert b.refused(0, b.start(1, 0, (0, 1, 3))) is Code.E_REPLAY
    assert b.refused(0, b.start(1, 0, (0, 1, 2))) is Code.E_REPLAY
    assert b.evidence(0) == [Suspicion.TWO_STARTS]


def test_two_fulls_of_one_attempt_are_evidence_and_open_nothing_new(bench: Make) -> None:
    """The same FULL brings the same OPEN again; another one of that ctx is refused."""
    b = bench()
    b.train(1)
    start = b.start(1)
    uploads = b.uploads(start)
    full = b.full(0, uploads)
    first = b.sent(b.say(0, full), Open)
    assert b.sent(b.say(0, full), Open) == first
    other = messages.sign(replace(uploads[1], y_hash=bytes(32)), b.consortium.sites[1])
    assert b.refused(0, b.full(0, (uploads[0], other, uploads[2]))) is Code.E_FULL
    assert b.evidence(0) == [Suspicion.TWO_FULLS]


# ------------------------------------------------------------------------------------------------- epochs, connections


def test_an_epoch_seals_what_was_uploaded_and_keeps_the_update(bench: Make) -> None:
    """New keys, the old FULL refused, READY said again with the new keys' digest; the next attempt opens."""
    b = bench()
    b.train(1)
    uploads = b.uploads(b.start(1))
    effects = b.say(0, b.sign(Epoch(b.job_hash, 2)))
    (ready,) = b.sent(effects, Ready)
    assert (ready.epoch, ready.keys_digest, b.state(0)) == (2, b.keys[0].digest, State.READY)
    assert b.refused(0, b.full(0, uploads)) is Code.E_STATE
    assert b.refused(0, b.sign(Epoch(b.job_hash, 2))) is Code.E_EPOCH
    b.epoch(3)
    b.open(1, 1)
    assert b.state(0) is State.OPENED


def test_after_a_reconnect_the_same_bytes_are_said_again(bench: Make) -> None:
    """KEYS; READY, or UPLOAD with its vector, or OPEN, as the site stands."""
    b = bench()
    keys = b.keys[0]
    assert b.sent(b.do(0, Connected())) == [keys]
    b.train(1)
    assert b.sent(b.do(0, Connected())) == [keys, b.sent(b.effects[0], Ready)[0]]
    uploads = b.uploads(b.start(1))
    again = b.do(0, Connected())
    assert b.sent(again) == [keys, uploads[0]]
    assert b.of(again, UploadPayload) == b.of(b.effects[0], UploadPayload)[:1]
    (opening,) = b.sent(b.say(0, b.full(0, uploads)), Open)
    assert b.sent(b.do(0, Connected())) == [keys, opening]


def test_a_train_that_is_held_already_does_nothing_but_say_ready_again(bench: Make) -> None:
    """Asked twice the work is done once; another model for the round is other work."""
    b = bench()
    assert b.of(b.say(0, b.ask(1)), Work)
    assert b.say(0, b.ask(1)) == ()
    b.do(0, Updated(b.job_hash, assignment(b, 1), "u", b.data.table))
    assert [type(each) for each in b.sent(b.say(0, b.ask(1)))] == [Ready]
    effects = b.say(0, b.ask(1, model=b"another"))
    assert (b.of(effects, Erase), len(b.of(effects, Work))) == ([Erase(b.job_hash, "u")], 1)
    assert b.do(0, Updated(b.job_hash, assignment(b, 1), "late", b.data.table)) == (Erase(b.job_hash, "late"),)


def test_a_train_is_signed_and_of_this_job_and_epoch(bench: Make) -> None:
    """E_SIG; E_EPOCH, also in a process that has no keys yet."""
    b = bench()
    good = b.ask(1)
    assert b.refused(0, replace(good, signature=bytes(64))) is Code.E_SIG
    assert b.refused(0, b.sign(replace(good, epoch=2))) is Code.E_EPOCH
    assert b.refused(0, b.sign(replace(good, job_hash=bytes(32)))) is Code.E_EPOCH
    b.crash(0)
    assert b.refused(0, good) is Code.E_EPOCH


def test_a_train_of_an_older_round_is_refused(bench: Make) -> None:
    """Older than the last that was masked: E_REPLAY; work for it would serve nothing."""
    b = bench()
    b.train(2)
    b.upload(0, b.start(2))
    assert b.refused(0, b.ask(1)) is Code.E_REPLAY


def test_a_model_that_moved_too_far_is_refused(bench: Make) -> None:
    """The work is told how far from the last model it may be; if it is further the answer is E_DRIFT."""
    b = bench(floor={"drift_max": 0.5})
    b.train(1)
    b.open(1)
    (work,) = b.of(b.say(0, b.ask(3, model=b"next")), Work)
    assert (work.drift.model_hash, work.drift.most) == (b.ask(1).model_hash, 1.0)
    (refuse,) = b.sent(b.do(0, Drifted(b.job_hash, work.assignment)), Refuse)
    assert (refuse.code, refuse.r, b.state(0)) == (Code.E_DRIFT, 3, State.IDLE)


def test_a_closed_job_is_forgotten_but_for_its_tombstone(bench: Make) -> None:
    """F5 erases keys, update and terms; further messages of the job are an error of the peer's."""
    b = bench()
    b.train(1)
    effects = b.say(0, b.sign(Close(b.job_hash)))
    assert [type(each) for each in effects] == [Persist, Erase, Closed]
    assert (effects[0].point, effects[0].durable.jobs) == (Point.CLOSED, ())
    with pytest.raises(RemoteProtocolError, match="is not in the job"):
        b.say(0, b.ask(2))
    assert b.do(0, Updated(b.job_hash, assignment(b, 1), "late", b.data.table)) == (Erase(b.job_hash, "late"),)


def test_what_only_a_site_says_is_refused_by_a_site(bench: Make) -> None:
    """A relayed OPEN or REFUSE is no message for a site, and its content does not enter the log."""
    b = bench()
    opening = Open(bytes(32), 1, b"\x77" * 32, bytes(32))
    assert b.refused(0, opening) is Code.E_STATE
    assert not any(b"\x77" * 32 in content for log in b.of(b.effects[0], Log) for content in log.evidence.messages)


def test_a_table_that_changed_under_the_work_stops_the_job(bench: Make) -> None:
    """A train plan reads one version per job: the result is erased, the round declined, the administrator asked."""
    b = bench()
    b.say(0, b.ask(1))
    effects = b.do(0, Updated(b.job_hash, assignment(b, 1), "u", bytes(32)))
    assert (b.of(effects, Erase), len(b.of(effects, Suspend))) == ([Erase(b.job_hash, "u")], 1)
    assert b.sent(effects, Decline)


def test_masking_that_fails_declines(bench: Make) -> None:
    """The attempt is sealed and the update erased."""
    b = bench()
    b.train(1)
    b.say(0, b.start(1))
    effects = b.do(0, Cannot(b.job_hash, assignment(b, 1), Because.RESOURCES))
    assert [type(each) for each in effects[:2]] == [Abandon, Erase]
    assert (b.state(0), len(b.sent(effects, Decline))) == (State.IDLE, 1)


def test_a_vector_masked_for_an_attempt_that_is_over_is_erased(bench: Make) -> None:
    """It leaves nothing behind and is not uploaded."""
    b = bench()
    b.train(1)
    (mask,) = b.of(b.say(0, b.start(1)), Mask)
    b.say(0, b.start(1, 1))
    assert b.do(0, Masked(b.job_hash, mask.ctx, bytes(32))) == (Abandon(b.job_hash, mask.ctx),)


def test_what_answers_work_that_was_let_go_changes_nothing(bench: Make) -> None:
    """A worker's late words about another assignment, and a vector masked twice, are passed over."""
    b = bench()
    b.say(0, b.ask(2))
    old = assignment(b, 1)
    assert b.do(0, Cannot(b.job_hash, old, Because.DATA)) == ()
    assert b.do(0, Drifted(b.job_hash, old)) == ()
    b.train(2, sites=(1, 2))
    b.do(0, Updated(b.job_hash, assignment(b, 2), "u", b.data.table))
    start = b.start(2)
    b.upload(0, start)
    assert b.do(0, Masked(b.job_hash, start.ctx, bytes(32))) == ()
    assert b.state(0) is State.UPLOADED


def test_a_move_that_the_table_does_not_have_is_a_bug_of_ours(bench: Make) -> None:
    """The machine obeys its table: it raises rather than go elsewhere, and stays where it was."""
    b = bench()
    seat = b.sites[0]._seats[b.job_hash]
    with pytest.raises(LocalProtocolError, match="no way from idle to opened by FULL"):
        seat._go(Cause.FULL, State.OPENED)
    with pytest.raises(LocalProtocolError, match="no way to stay idle by upload sent"):
        seat._stay(Cause.SENT)
    assert b.state(0) is State.IDLE


def test_a_close_of_another_job_is_refused(bench: Make) -> None:
    """Signed or not, it closes nothing here."""
    b = bench()
    assert b.refused(0, b.sign(Close(bytes(32)))) is Code.E_EPOCH


def test_shares_of_a_round_that_was_left_behind_are_erased_too(bench: Make, escrow: Plan) -> None:
    """T_open runs wherever the site stands by then."""
    b = bench(4, (escrow,))
    b.train(1)
    start = b.open(1)
    b.say(0, b.ask(2))
    b.pass_time(T_OPEN)
    b.do(0, TimePassed())
    assert (b.state(0), b.durable(0).jobs[0].record.shares) == (State.WORKING, ())
    assert b.refused(0, b.sign(Rescue(start.ctx, (1,)))) is Code.E_RESCUE


def test_there_is_no_such_job_to_resume(bench: Make) -> None:
    """The administrator is told."""
    b = bench()
    with pytest.raises(PolicyRefused, match="no such job here to resume"):
        b.do(0, Resumed(bytes(32)))


def test_a_durable_state_comes_back_as_it_was(bench: Make, escrow: Plan) -> None:
    """Whatever happened, its encoding gives the same state."""
    b = bench(4, (escrow,))
    b.train(1)
    b.open(1)
    durable = b.sites[0].durable
    assert Durable.decode(durable.encode()) == durable
