from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from federation.blobs import BlobRef
from federation.errors import LocalProtocolError, RemoteProtocolError
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.coordinator import TRANSITIONS, Cause, Coordinator, Patience, Stage
from privacy.secure_aggregation.rostersum.coordinator_events import (
    Arrived,
    Begin,
    Broken,
    Close,
    Committed,
    ContradictionError,
    Departed,
    Failed,
    Opened,
    Persist,
    Reason,
    Received,
    Revoked,
    Send,
    SetDeadline,
    Started,
    Stored,
    Summed,
    Suspect,
    TimeUp,
)
from privacy.secure_aggregation.rostersum.coordinator_state import Standing
from privacy.secure_aggregation.rostersum.evidence import Suspicion
from privacy.secure_aggregation.rostersum.messages import (
    NOTHING,
    Code,
    Decline,
    Encaps,
    Epoch,
    Full,
    Keys,
    Open,
    Outcome,
    Ready,
    Refuse,
    Rescue,
    Result,
    RoundStart,
    Seal,
    Share,
    Shares,
    Train,
    Upload,
)
from privacy.secure_aggregation.rostersum.terms import Churn, Terms
from privacy.secure_aggregation.rostersum.transitions import follows
from simulations.loopback import COORDINATOR, Loopback
from tests.privacy.secure_aggregation.rostersum.looped import (
    Tap,
    altering,
    at,
    decoded,
    exact,
    job,
    key,
    loop_of,
    losing,
    round_of,
)

FIVE = {"churn": Churn.OPEN, "m_min": 4, "t": 3}
SHORT = Patience(ready=100, again=20, upload=100, opening=20, rounds=1)


def memory(coordinator: Coordinator) -> Any:
    """All that a coordinator knows."""
    job = coordinator._job
    lanes = [
        (
            *(lane.stage, lane.way, lane.deadline, lane.summed, set(lane.failing), set(lane._lost), set(lane._unable)),
            *(set(lane._muster.ready), set(lane._muster.out), set(lane._muster.late)),
            lane._attempt and (dict(lane._attempt.uploads), set(lane._attempt.stored), dict(lane._attempt.opens)),
            lane._escrow and (lane._escrow.holders, lane._escrow.wanted),
        )
        for lane in coordinator._lanes
    ]
    keys = dict(job.keys._keys), dict(job.keys._encaps), job.keys.epoch
    return lanes, keys, coordinator._standing, coordinator.standing, set(job.present), job.excluded, job.stale


def machine(loop: Loopback) -> Coordinator:
    """The loop's coordinator, running."""
    assert loop.coordinator is not None
    return loop.coordinator


def says(loop: Loopback, message: Any, idx: int | None = None) -> tuple[object, ...]:
    """What the coordinator does when a site says this."""
    return machine(loop).receive(Received(message.idx if idx is None else idx, message), loop.now)


def refused(loop: Loopback, message: Any, idx: int | None = None) -> str:
    """The words with which the coordinator refuses this; nothing has changed, and the step goes on to its exact sum."""
    before = memory(machine(loop))
    with pytest.raises(RemoteProtocolError) as refusal:
        says(loop, message, idx)
    assert memory(machine(loop)) == before
    return str(refusal.value)


def signed(message: Any, idx: int | None = None) -> Any:
    """The message as its site, or site `idx`, signs it."""
    return messages.sign(message, key((message.idx if idx is None else idx) + 1))


def first(loop: Loopback, kind: type, sender: int, stage: Stage, **changes: Any) -> Any:
    """Runs to `stage` and gives the first message of this kind that the site said on the way, with changes, signed."""
    tap = Tap(loop)
    at(loop, stage)
    return signed(replace(tap.said(kind, sender=sender)[0], **changes))


def opening(t: int = 2, silent: int = 2) -> tuple[Loopback, Tap]:
    """A step of three sites whose site `silent` opens and is not heard; the others' OPENs are here."""
    loop = loop_of(job(t=t), network=losing(Open, sender=silent))
    tap = Tap(loop)
    at(loop, Stage.OPENING)
    loop.run(lambda: not loop.in_flight)
    return loop, tap


def lost(tap: Tap, kind: type, sender: int) -> Any:
    """What a site said last of this kind."""
    return tap.said(kind, sender=sender)[-1]


# --------------------------------------------------------------------------------------------------------- refusals


def test_nobody_speaks_for_another() -> None:
    """A message of another site's index is refused, whatever its signature, and names who must find out."""
    ready = first(loop := loop_of(job()), Ready, 1, Stage.UPLOADING)

    told = refused(loop, ready, idx=0)

    assert "site 0 sent the READY of site 1" in told
    assert "the consortium's administrator" in told
    assert "find out who holds the identity of site 0" in told


def test_an_index_outside_the_roster_is_refused() -> None:
    """Site 7 of three has nothing to say."""
    ready = first(loop := loop_of(job()), Ready, 1, Stage.UPLOADING)

    assert "site 7 sent the READY" in refused(loop, replace(ready, idx=7))


@pytest.mark.parametrize("kind", [Ready, Decline])
def test_unsigned_words_are_refused(kind: type) -> None:
    """A READY or DECLINE that another site signed is refused."""
    loop = loop_of(job(), network=losing(Ready, sender=2))
    tap = Tap(loop)
    at(loop, Stage.GATHERING)
    loop.run(lambda: not loop.in_flight)
    said = {Ready: lost(tap, Ready, 2), Decline: Decline(loop.terms.job_hash, 1, 2)}

    told = refused(loop, signed(said[kind], 1))

    assert f"the {kind.__name__.upper()} of site 2 does not bear its signature" in told


@pytest.mark.parametrize(
    "changes",
    [
        {"r": 2},
        {"epoch": 2},
        {"plan_id": 2},
        {"model_hash": bytes(32)},
        {"args_hash": bytes(32)},
        {"keys_digest": bytes(32)},
        {"job_hash": bytes(32)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_ready_for_anything_else_is_refused(changes: dict[str, Any]) -> None:
    """Another round, epoch, plan, model, arguments, keys or job: the promise is not for this step."""
    loop = loop_of(job(), network=losing(Ready, sender=2))
    tap = Tap(loop)
    at(loop, Stage.GATHERING)
    loop.run(lambda: not loop.in_flight)
    (ready,) = tap.said(Ready, sender=2)

    assert "is for other work or other keys" in refused(loop, signed(replace(ready, **changes)))

    says(loop, ready)
    assert machine(loop).stages == (Stage.UPLOADING,)


def test_a_decline_after_ready_is_refused() -> None:
    """A site that promised does not take it back by DECLINE."""
    loop = loop_of(job(), network=losing(Ready, sender=2))
    at(loop, Stage.GATHERING)
    loop.run(lambda: not loop.in_flight)

    assert "after its READY" in refused(loop, signed(Decline(loop.terms.job_hash, 1, 0)))
    assert "of another round" in refused(loop, signed(Decline(loop.terms.job_hash, 7, 2)))


def test_what_comes_too_early_or_too_late_is_refused() -> None:
    """An UPLOAD before an attempt, a READY when all have uploaded, anything before a step: refused by the table."""
    loop = loop_of(job())
    loop.pass_time(5)
    assert "site 0 sent DECLINE before any step began" in refused(loop, signed(Decline(loop.terms.job_hash, 1, 0)))

    tap = Tap(loop)
    at(loop, Stage.OPENING)
    told = refused(loop, tap.said(Ready, sender=0)[0])
    assert told == "READY of site 0 came when the sum of round 1 was opening"

    loop.run(lambda: loop.idle)
    assert exact(loop, loop.outcome())
    assert "UPLOAD of site 0 came when the sum of round 1 was idle" in refused(loop, tap.said(Upload, sender=0)[0])


def test_an_open_that_is_said_again_is_left_alone() -> None:
    """A site that comes back says its OPEN until it has heard RESULT: after the sum it is no fault, nor does it act."""
    loop = loop_of(job())
    tap = Tap(loop)
    at(loop, Stage.OPENING)
    loop.run(lambda: loop.idle)
    before = memory(machine(loop))
    says(loop, tap.said(Open, sender=0)[0])
    assert memory(machine(loop)) == before
    assert exact(loop, loop.outcome())


def test_words_of_another_attempt_are_refused() -> None:
    """An UPLOAD of an attempt that was given up is late at the next one."""
    loop = loop_of(job(), network=losing(Upload, sender=2, times=1), patience=SHORT)
    tap = Tap(loop)
    at(loop, Stage.UPLOADING)
    loop.run(lambda: len(tap.said(Upload, sender=0)) == 2)

    assert "an attempt that is over" in refused(loop, tap.said(Upload, sender=0)[0])

    loop.run(lambda: loop.idle)
    assert exact(loop, loop.outcome())


def _seals(upload: Upload, change: Callable[[tuple[Seal, ...]], tuple[Seal, ...]]) -> Upload:
    return replace(upload, seals=change(upload.seals))


@pytest.mark.parametrize(
    "change",
    [
        lambda seals: seals[:-1],
        lambda seals: (*seals, Seal(2, seals[0].sealed)),
        lambda seals: seals[::-1],
        lambda seals: (replace(seals[0], idx=2), seals[1]),
        lambda seals: (Seal(seals[0].idx, bytes(16)), seals[1]),
    ],
    ids=["short", "to itself", "disordered", "doubled", "empty in escrow"],
)
def test_an_upload_has_one_seal_for_each_other_member(change: Callable[..., Any]) -> None:
    """Too few, too many, disordered, doubled or empty seals are refused before anything of the upload counts."""
    loop = loop_of(job(t=2), network=losing(Upload, sender=2))
    tap = Tap(loop)
    at(loop, Stage.UPLOADING)
    loop.run(lambda: not loop.in_flight)
    upload = lost(tap, Upload, 2)

    assert "one seal of 49 bytes for each other member" in refused(loop, _seals(upload, change))


def test_unsigned_uploads_and_strangers_are_refused() -> None:
    """An UPLOAD that its site did not sign, or of a site that is not in the attempt."""
    loop = loop_of(job(5, **FIVE), network=losing(Ready, sender=4), patience=SHORT)
    tap = Tap(loop)
    at(loop, Stage.UPLOADING)
    loop.run(lambda: bool(tap.said(Upload, sender=0)))
    upload = tap.said(Upload, sender=0)[0]

    assert "the UPLOAD of site 0 does not bear its signature" in refused(loop, signed(upload, 3))
    assert "site 4 is not in this attempt" in refused(loop, replace(upload, idx=4))


def test_a_second_upload_is_evidence() -> None:
    """Two UPLOADs of one attempt: the first stands, both are kept; other seals under the same signature are refused."""
    loop = loop_of(job(), network=losing(bytes, sender=2))
    tap = Tap(loop)
    at(loop, Stage.UPLOADING)
    loop.run(lambda: not loop.in_flight)
    upload, other = lost(tap, Upload, 2), None
    other = signed(replace(upload, y_hash=bytes(32)))

    with pytest.raises(ContradictionError, match="site 2 signed a UPLOAD that its earlier UPLOAD contradicts") as told:
        says(loop, other)

    assert told.value.evidence.kind is Suspicion.TWO_UPLOADS
    assert told.value.evidence.messages == (messages.encode(upload), messages.encode(other))
    resealed = _seals(upload, lambda seals: (replace(seals[0], sealed=bytes(16)), seals[1]))
    assert "its first ones stand" in refused(loop, resealed)
    assert says(loop, upload) == ()


def test_an_open_for_other_uploads_or_unsigned_is_refused() -> None:
    """T, signature and attempt of an OPEN are checked."""
    loop, tap = opening()
    message = lost(tap, Open, 2)

    assert "names other uploads" in refused(loop, signed(replace(message, transcript=bytes(32))))
    assert "the OPEN of site 2 does not bear its signature" in refused(loop, signed(message, 1))
    assert "an attempt that is over" in refused(loop, signed(replace(message, ctx=bytes(32))))

    loop._tell_coordinator(Received(2, message))
    loop.run(lambda: loop.idle)
    assert exact(loop, loop.outcome())


def test_an_open_against_its_commitment_is_evidence() -> None:
    """A seed that the UPLOAD does not commit to convicts the site, and changes nothing: it can be rescued."""
    loop, tap = opening()
    wrong = signed(replace(lost(tap, Open, 2), b=bytes(32)))
    before = memory(machine(loop))

    with pytest.raises(ContradictionError, match="site 2 signed a OPEN that its earlier UPLOAD contradicts") as told:
        says(loop, wrong)

    assert memory(machine(loop)) == before
    assert told.value.evidence.messages == (messages.encode(lost(tap, Upload, 2)), messages.encode(wrong))
    loop.run(lambda: loop.idle)
    assert exact(loop, loop.outcome())


def test_the_same_again_is_no_error_and_no_effect() -> None:
    """What a site says again after a reconnect changes nothing, in any stage after it was taken."""
    loop, tap = opening()

    for kind, sender in product((Keys, Upload, Open), (0, 1)):
        assert says(loop, lost(tap, kind, sender)) == ()

    loop.run(lambda: loop.idle)
    loop.run(lambda: not loop.in_flight)
    assert exact(loop, loop.outcome())
    (again,) = says(loop, lost(tap, Open, 0))
    assert isinstance(again, Send)
    assert again.message == tap.by_coordinator(Result)[0]


def rescuing() -> tuple[Loopback, Tap, list[Shares]]:
    """A step of five sites without the OPEN of site 4, in RESCUING; the shares of the others were lost on the way."""
    loop = loop_of(job(5, **FIVE))
    held: list[Shares] = []

    def network(parcel: Any) -> Any:
        message = decoded(parcel)
        if isinstance(message, Shares):
            held.append(message)
        keep = not isinstance(message, Shares) and not (isinstance(message, Open) and parcel.sender == 4)
        return losing()(parcel) if keep else ()

    loop.network = network
    tap = Tap(loop)
    at(loop, Stage.RESCUING)
    loop.run(lambda: len(held) == 4)
    loop.network = losing(Open, sender=4)
    return loop, tap, held


def test_shares_are_checked_one_by_one() -> None:
    """Shares of others than were asked, of a site that was not asked, unsigned or malformed ones are refused."""
    loop, _, held = rescuing()
    shares = held[0]

    assert "sent shares of [] where those of [4] were asked" in refused(loop, signed(replace(shares, shares=())))
    assert "no share of a secret" in refused(loop, signed(replace(shares, shares=(Share(4, b"\xff" * 33),))))
    assert "does not bear its signature" in refused(loop, signed(shares, (shares.idx + 1) % 4))
    assert "was not asked: it has not opened itself" in refused(loop, signed(replace(shares, idx=4)))
    assert says(loop, shares) == ()
    other = signed(replace(shares, shares=(Share(4, bytes(33)),)))
    assert "its first ones stand" in refused(loop, other)

    for each in held[1:]:
        loop._tell_coordinator(Received(each.idx, each))
    loop.run(lambda: loop.idle)
    assert exact(loop, loop.outcome())


def test_a_wrong_share_is_survived_and_named() -> None:
    """With threshold 3 and five shares, one wrong: the seed comes with the fifth; holder and dealer are named."""
    loop = loop_of(job(6, churn=Churn.OPEN, m_min=5, t=3))
    tap = Tap(loop)
    inner = altering(Shares, lambda m: signed(replace(m, shares=(Share(5, bytes(33)),))), 0)
    loop.network = lambda parcel: () if isinstance(decoded(parcel), Open) and parcel.sender == 5 else inner(parcel)
    suspects: list[Suspect] = []
    loop.performed = lambda _, effect: suspects.append(effect) if isinstance(effect, Suspect) else None
    at(loop, Stage.RESCUING)
    loop.run(lambda: loop.idle)

    assert exact(loop, loop.outcome())
    assert suspects == [Suspect(5, frozenset({0}))]
    assert len(tap.said(Shares)) == 5


def test_too_many_wrong_shares_burn_the_round() -> None:
    """A dealer whose shares fit nobody's commitment: no seed, RESULT burned, and the dealer named as shut."""

    def spoilt(message: Any) -> Any:
        return signed(replace(message, shares=tuple(Share(each.idx, bytes(33)) for each in message.shares)))

    loop = loop_of(job(5, **FIVE), patience=SHORT)
    tap = Tap(loop)
    changes = [altering(Shares, spoilt, idx) for idx in range(4)]

    def network(parcel: Any) -> Any:
        if isinstance(decoded(parcel), Open) and parcel.sender == 4:
            return ()
        return changes[parcel.sender](parcel) if 0 <= parcel.sender < 4 else losing()(parcel)

    loop.network = network
    (failed,) = loop.step(1).failures

    assert (failed.reason, failed.who) == (Reason.OPENING, (4,))
    loop.run(lambda: not loop.in_flight)
    assert {(each.outcome, each.sum_hash) for each in tap.by_coordinator(Result)} == {(Outcome.BURNED, NOTHING)}


def test_no_rescue_is_asked_of_fewer_than_threshold_records() -> None:
    """Two of five opened where three shares are needed: nobody is asked, the round is burned, and three are named."""
    loop = loop_of(job(5, **FIVE), patience=SHORT)
    loop.network = lambda parcel: () if isinstance(decoded(parcel), Open) and parcel.sender > 1 else losing()(parcel)
    tap = Tap(loop)

    (failed,) = loop.step(1).failures

    assert (failed.reason, failed.who) == (Reason.OPENING, (2, 3, 4))
    assert tap.said(Rescue) == []


# ------------------------------------------------------------------------------------------------ P, attempts, rounds


def test_the_round_starts_as_soon_as_all_are_ready() -> None:
    """Nobody waits for a deadline when all have said READY."""
    loop = loop_of(job())
    at(loop, Stage.UPLOADING)

    assert loop.now < 6


def test_a_missing_upload_costs_an_attempt_and_then_the_site() -> None:
    """Who kept one attempt from its end is not in the next, where the plan can do without it."""
    loop = loop_of(job(5, **FIVE), network=losing(Upload, sender=3), patience=SHORT)
    tap = Tap(loop)

    outcome = loop.step(1)

    assert exact(loop, outcome)
    starts = sorted({(start.r, start.a, start.members) for start in tap.by_coordinator(RoundStart)})
    assert starts == [(1, 0, (0, 1, 2, 3, 4)), (1, 1, (0, 1, 2, 4))]


def test_after_the_last_attempt_comes_a_new_round_and_then_the_end() -> None:
    """A cell with a member whose vectors never arrive: attempts 0 to 7 of two rounds, then a failure that names it."""
    loop = loop_of(job(), network=losing(bytes, sender=1), patience=replace(SHORT, rounds=2))
    tap = Tap(loop)

    (failed,) = loop.step(1).failures

    assert (failed.reason, failed.who, failed.r) == (Reason.ATTEMPTS, (1,), 2)
    starts = {(start.r, start.a) for start in tap.by_coordinator(RoundStart)}
    assert starts == set(product((1, 2), range(8)))
    assert {train.r for train in tap.by_coordinator(Train)} == {1, 2}
    assert tap.said(Full) == []


def test_no_two_starts_of_one_attempt_differ() -> None:
    """Whatever fails, a ROUND_START that a site hears again under one (r, a) is the very same."""
    loop = loop_of(job(5, **FIVE), network=losing(Upload, sender=3), patience=SHORT)
    tap = Tap(loop)
    at(loop, Stage.UPLOADING)
    for idx in (0, 3):
        loop.cut(idx)
        loop.join(idx)
    loop.run(lambda: loop.idle)

    heard = [(start.r, start.a, start) for start in tap.said(RoundStart, receiver=3)]
    assert len(heard) > len({(r, a) for r, a, _ in heard})
    assert len({(r, a) for r, a, _ in heard}) == len({start for *_, start in heard})


def test_a_full_is_not_sent_to_sites_that_may_have_sealed() -> None:
    """Sites seal 900 s after their last byte: the coordinator gives an attempt up 840 s after the first vector."""
    late = Patience(ready=100, again=20, upload=5000, opening=20, rounds=1)
    loop = loop_of(job(), network=losing(bytes, sender=2, times=1), patience=late)
    tap = Tap(loop)
    at(loop, Stage.UPLOADING)
    begun = loop.now
    loop.run(lambda: loop.idle)

    assert exact(loop, loop.outcome())
    assert 840 <= loop.now - begun < 842
    assert {start.a for start in tap.by_coordinator(RoundStart)} == {0, 1}
    assert {each.ctx for each in tap.by_coordinator(Full)} == {tap.by_coordinator(RoundStart)[-1].ctx}


def test_the_last_vector_after_the_deadline_does_not_bring_full() -> None:
    """The deadline counts even where its alarm comes late: a vector stored after it starts the next attempt."""
    loop = loop_of(job(), network=losing(bytes, sender=2, times=1), patience=SHORT)
    tap = Tap(loop)
    at(loop, Stage.UPLOADING)
    loop.run(lambda: not loop.in_flight)
    upload = lost(tap, Upload, 2)
    late = Stored(2, BlobRef(upload.y_hash, loop.terms.plans[0].size))

    effects = machine(loop).receive(late, loop.now + 101)

    assert not [each for each in effects if isinstance(each, Send) and isinstance(each.message, Full)]
    starts = [each.message for each in effects if isinstance(each, Send) and isinstance(each.message, RoundStart)]
    assert {start.a for start in starts} == {1}


@pytest.mark.parametrize(
    ("code", "attempts", "left_out"),
    [
        (Code.E_KEYSET, 2, False),
        (Code.E_SIG, 2, False),
        (Code.E_EPOCH, 2, False),
        (Code.E_LEDGER, 2, True),
        (Code.E_TERMS, 2, True),
        (Code.E_PIN, 2, True),
    ],
)
def test_a_refused_start_costs_an_attempt(code: Code, attempts: int, *, left_out: bool) -> None:
    """What can be cured is tried again with the same site; what the site's own rules refuse goes on without it."""
    loop = loop_of(job(5, **FIVE), network=losing(RoundStart, receiver=3, times=1))
    tap = Tap(loop)
    at(loop, Stage.UPLOADING)
    refuse = Refuse(loop.terms.job_hash, 1, 0, 3, code, messages.NOBODY, 0, 0, 0)

    loop._tell_coordinator(Received(3, signed(refuse)))
    loop.run(lambda: loop.idle)

    assert exact(loop, loop.outcome())
    assert len({start.a for start in tap.by_coordinator(RoundStart)}) == attempts
    assert loop.outcome().sums[0].members == ((0, 1, 2, 4) if left_out else (0, 1, 2, 3, 4))


def test_a_refusal_must_be_signed_and_of_now() -> None:
    """An unsigned REFUSE is refused; one of another attempt, or of a site that has this one, is passed by."""
    loop = loop_of(job())
    at(loop, Stage.UPLOADING)
    refuse = Refuse(loop.terms.job_hash, 1, 0, 2, Code.E_KEYSET, messages.NOBODY, 0, 0, 0)

    assert "the REFUSE of site 2 does not bear its signature" in refused(loop, signed(refuse, 1))
    before = memory(machine(loop))
    assert says(loop, signed(replace(refuse, r=0))) == ()
    assert says(loop, signed(replace(refuse, a=3))) == ()
    assert says(loop, signed(replace(refuse, code=Code.E_REPLAY, last_r=1))) == ()
    assert memory(machine(loop)) == before


def test_a_late_refusal_of_an_earlier_attempt_keeps_nobody_out() -> None:
    """E_REPLAY of a site that has begun this round, and not opened it, is of something said twice; else it is out."""
    loop = loop_of(job(5, **FIVE), network=losing(Ready, sender=4))
    at(loop, Stage.GATHERING)
    loop.run(lambda: not loop.in_flight)
    refuse = Refuse(loop.terms.job_hash, 1, 0, 3, Code.E_REPLAY, messages.NOBODY, 1, 0, 0)
    before = memory(machine(loop))

    assert says(loop, signed(refuse)) == ()
    assert memory(machine(loop)) == before

    says(loop, signed(replace(refuse, opened_r=1)))
    assert machine(loop)._lanes[0]._muster.out == {3}


def test_old_keys_bring_a_new_epoch() -> None:
    """E_KEYAGE: all sites make new keys, say READY again, and the round goes on with the next attempt."""
    loop = loop_of(job())
    tap = Tap(loop)
    loop.pass_time(5)
    loop.pass_time(25 * 3600)

    outcome = loop.step(1)

    assert exact(loop, outcome)
    assert {epoch.epoch for epoch in tap.by_coordinator(Epoch)} == {1, 2} or machine(loop).standing.epoch == 2
    assert {start.a for start in tap.by_coordinator(RoundStart)} == {0, 1}


def test_a_broken_seal_brings_new_keys_and_the_second_one_leaves_a_site_out() -> None:
    """E_SEAL of 0 about 4 and of 1 about 4: new epoch; again: the site with more failing pairs, 4, is left out."""

    def spoilt(upload: Any) -> Any:
        return replace(upload, seals=tuple(Seal(s.idx, bytes(49)) if s.idx < 2 else s for s in upload.seals))

    loop = loop_of(job(5, **FIVE), network=altering(Upload, spoilt, 4))
    for r, epoch in ((1, 2), (2, 3)):
        outcome = loop.step(1)
        assert exact(loop, outcome), "three members opened, and their shares give the other two"
        assert outcome.sums[0].members == (0, 1, 2, 3, 4)
        loop.run(lambda: not loop.in_flight)
        assert (round_of(loop), machine(loop).standing.epoch) == (r, epoch)

    outcome = loop.step(1)

    assert outcome.sums[0].members == (0, 1, 2, 3)
    assert exact(loop, outcome)
    assert [(pair.lo, pair.hi, pair.epochs) for pair in machine(loop).standing.failed_pairs] == [
        (0, 4, (1, 2)),
        (1, 4, (1, 2)),
    ]


def test_a_revoked_site_is_in_no_further_set() -> None:
    """A site revoked while it uploads costs an attempt; the next sets are without it, also after a restart."""
    loop = loop_of(job(5, **FIVE))
    at(loop, Stage.UPLOADING)

    loop._tell_coordinator(Revoked(2))
    loop.run(lambda: loop.idle)
    assert loop.outcome().sums[0].members == (0, 1, 3, 4)
    loop.stop(COORDINATOR)
    loop.run(lambda: loop.idle)

    assert loop.step(1).sums[0].members == (0, 1, 3, 4)


def test_a_cell_without_a_revoked_site_fails_at_once() -> None:
    """Where nobody may be missing the failure names the revoked site, without waiting."""
    loop = loop_of(job())
    loop.pass_time(5)
    loop._tell_coordinator(Revoked(2))

    begun = loop.now
    (failed,) = loop.step(1).failures

    assert (failed.reason, failed.who) == (Reason.COHORT, (2,))
    assert loop.now - begun < 1


def test_two_keys_of_one_generation_are_evidence() -> None:
    """The first keys stand; the site, which answers with a greater generation, is heard again."""
    loop = loop_of(job())
    tap = Tap(loop)
    loop.stop(0)
    loop.pass_time(5)
    keys = lost(tap, Keys, 0)
    before = memory(machine(loop))

    with pytest.raises(ContradictionError) as told:
        says(loop, signed(replace(keys, nonce=bytes(32))))

    assert told.value.evidence.kind is Suspicion.TWO_KEYS
    assert memory(machine(loop)) == before
    effects = says(loop, signed(replace(keys, gen=keys.gen + 1)))
    assert {each.idx for each in effects if isinstance(each, Send)} == {0, 1, 2}


# ------------------------------------------------------------------------------------------------- restarts, the end


@pytest.mark.parametrize("stage", [Stage.GATHERING, Stage.UPLOADING, Stage.OPENING, Stage.SUMMING, Stage.SUMMED])
@pytest.mark.parametrize("t", [0, 2], ids=["no escrow", "escrow"])
def test_a_restarted_coordinator_goes_on(stage: Stage, t: int) -> None:
    """From the durable state alone: the next attempt before FULL, the same attempt after it; one sum, exact."""
    loop = loop_of(job(t=t))
    tap = Tap(loop)
    at(loop, stage)

    loop.stop(COORDINATOR)
    loop.run(lambda: loop.idle)

    assert exact(loop, loop.outcome())
    assert round_of(loop) == 1
    attempts = {start.a for start in tap.by_coordinator(RoundStart)}
    assert attempts == ({0, 1} if stage is Stage.UPLOADING else {0})
    assert exact(loop, loop.step(1))


def test_a_coordinator_restarted_while_rescuing_goes_on() -> None:
    """RESCUE is said again, the shares come again, the sum opens."""
    loop, _, _ = rescuing()
    loop.network = losing(Open, sender=4)

    loop.stop(COORDINATOR)
    loop.run(lambda: loop.idle)

    assert exact(loop, loop.outcome())


def test_no_epoch_disturbs_an_attempt_whose_full_has_left() -> None:
    """After a restart in OPENING nobody is asked for new keys until RESULT: an EPOCH would seal the attempt."""
    loop = loop_of(job(), network=losing(Full))
    tap = Tap(loop)
    at(loop, Stage.OPENING)
    loop.stop(COORDINATOR)
    loop.run(lambda: loop.coordinator is not None)
    assert machine(loop).standing.epoch == 1
    loop.network = losing()
    loop.run(lambda: loop.idle)

    assert exact(loop, loop.outcome())
    assert machine(loop).standing.epoch == 2
    said = [type(decoded(parcel)) for parcel in tap.parcels if parcel.sender == COORDINATOR]
    assert Epoch in said[said.index(Result) :]
    assert Epoch not in said[said.index(Full) : said.index(Result)]


def test_a_closed_job_says_so_and_takes_nothing() -> None:
    """CLOSE reaches all, also who comes later; a step under way is given up; nothing is taken any more."""
    loop = loop_of(job())
    tap = Tap(loop)
    at(loop, Stage.UPLOADING)

    loop._tell_coordinator(Close())
    loop.run(lambda: not loop.in_flight)

    assert [(each.reason, each.who) for each in loop.outcome().failures] == [(Reason.CLOSED, ())]
    assert len(tap.by_coordinator(messages.Close)) == 3
    assert "the job has ended" in refused(loop, lost(tap, Ready, 0))
    with pytest.raises(LocalProtocolError, match="Begin came after the job had ended"):
        machine(loop).receive(Begin(1, bytes(32), bytes(32)), loop.now)
    again = Coordinator(loop.terms, key(0xC0), None, Standing.decode(loop.disks[COORDINATOR]))
    assert again.receive(Started(), 0.0) == ()
    (closing,) = again.receive(Arrived(1), 0.0)
    assert isinstance(closing, Send)
    assert closing.message == tap.by_coordinator(messages.Close)[0]
    assert again.receive(Departed(1), 0.0) == ()
    assert not again.free


# ------------------------------------------------------------------------------------------------- our own mistakes


def test_a_step_begins_when_no_other_runs() -> None:
    """Begin during a step, or with a plan the job has not, is a bug of ours, and changes nothing."""
    loop = loop_of(job())
    loop.pass_time(5)
    with pytest.raises(LocalProtocolError, match="the job has no plan 9"):
        machine(loop).receive(Begin(9, bytes(32), bytes(32)), loop.now)
    at(loop, Stage.UPLOADING)
    before = memory(machine(loop))

    with pytest.raises(LocalProtocolError, match="before the one under way was over"):
        machine(loop).receive(Begin(1, bytes(32), bytes(32)), loop.now)

    assert memory(machine(loop)) == before


def test_the_first_event_is_started_and_it_comes_once() -> None:
    """Nothing happens before the durable state was taken up."""
    coordinator = Coordinator(job(), key(0xC0))
    with pytest.raises(LocalProtocolError, match="first event is Started"):
        coordinator.receive(Arrived(0), 0.0)
    coordinator.receive(Started(), 0.0)
    with pytest.raises(LocalProtocolError, match="comes once"):
        coordinator.receive(Started(), 0.0)


def test_only_what_was_asked_is_committed() -> None:
    """A commit of a round that nobody asked to commit is a bug of ours."""
    loop = loop_of(job())
    at(loop, Stage.UPLOADING)

    with pytest.raises(LocalProtocolError, match="round 1 was committed, and nobody asked for it"):
        machine(loop).receive(Committed(1), loop.now)


def test_the_roster_names_this_coordinator() -> None:
    """A coordinator with another key than the roster's would sign what every site refuses."""
    with pytest.raises(LocalProtocolError, match="the roster names another coordinator's key"):
        Coordinator(job(), key(0x77))


def test_sums_and_payloads_of_an_attempt_that_is_over_are_passed_by() -> None:
    """What the caller was still doing when an attempt ended is no error and has no effect."""
    loop = loop_of(job())
    at(loop, Stage.UPLOADING)

    assert machine(loop).receive(Summed(bytes(32), bytes(32)), loop.now) == ()
    assert machine(loop).receive(Broken(bytes(32), "late"), loop.now) == ()
    assert machine(loop).receive(Stored(0, BlobRef(bytes(32), 48)), loop.now) == ()
    assert machine(loop).receive(TimeUp(), loop.now) == ()


# ---------------------------------------------------------------------------------------------------------- the table


def test_every_stage_and_cause_of_the_table_is_used() -> None:
    """No row is there twice, each stage can be left, and each is reached from IDLE."""
    rows = [(source, row.cause) for row in TRANSITIONS for source in row.sources]
    assert len(rows) == len(set(rows))
    assert {cause for _, cause in rows} == set(Cause)
    reached = {Stage.IDLE}
    for _ in Stage:
        reached |= {target for stage in reached for cause in Cause for target in follows(TRANSITIONS, stage, cause)}
    assert reached == set(Stage)


def test_a_step_is_persisted_before_anything_is_said() -> None:
    """Persist stands first among the effects of every event that changes the durable state."""
    terms: Terms = job()
    coordinator = Coordinator(terms, key(0xC0))
    assert isinstance(coordinator.receive(Started(), 0.0)[0], Persist)
    coordinator.receive(Arrived(0), 0.0)

    effects = coordinator.receive(Begin(1, bytes(32), bytes(32)), 0.0)

    kinds = [type(each) for each in effects]
    assert kinds == [Persist, Send, SetDeadline]
    assert effects[0] == Persist(coordinator.standing)
    assert coordinator.standing.r == 1


def test_opened_asks_for_one_transaction_with_the_result() -> None:
    """The state that goes with the model holds the RESULT, which leaves only after the commit."""
    loop = loop_of(job())
    seen: list[object] = []
    loop.performed = lambda party, effect: seen.append(effect) if party == COORDINATOR else None
    assert exact(loop, loop.step(1))

    (opened,) = [each for each in seen if isinstance(each, Opened)]
    after = seen[seen.index(opened) + 1 :]
    assert [type(each) for each in after] == [Send] * 3
    (way,) = opened.state.ways
    assert {messages.encode(each.message) for each in after if isinstance(each, Send)} == {way.result}
    assert machine(loop).standing == opened.state


def test_failures_name_no_site_when_a_sum_does_not_hold() -> None:
    """Nobody can say whose vector was wrong: the failure names nobody."""
    loop = loop_of(job())
    at(loop, Stage.SUMMING)
    ctx = machine(loop)._lanes[0].summing
    assert ctx is not None

    effects = machine(loop).receive(Broken(ctx, "the norm is too large"), loop.now)

    (failed,) = [each for each in effects if isinstance(each, Failed)]
    assert failed == Failed(1, Reason.CHECKS, (), "the norm is too large", (0, 1, 2))


def test_encaps_are_relayed_and_waited_for() -> None:
    """With pq the round does not start before each pair is settled; the ENCAPS of a pair goes to its higher index."""
    lossy = losing(Encaps, sender=0, receiver=COORDINATOR, times=1)
    loop = loop_of(job(5, **FIVE, pq=1), network=lossy, patience=SHORT)
    tap = Tap(loop)
    at(loop, Stage.GATHERING)
    loop.run(lambda: not loop.in_flight)
    assert machine(loop).stages == (Stage.GATHERING,)

    loop.cut(0)
    loop.join(0)
    loop.run(lambda: loop.idle)

    assert exact(loop, loop.outcome())
    relayed = [(parcel.receiver, decoded(parcel)) for parcel in tap.parcels if parcel.sender == COORDINATOR]
    assert {(to, each.hi) for to, each in relayed if isinstance(each, Encaps)} == {(hi, hi) for hi in range(1, 5)}
    assert loop.outcome().sums[0].members == (0, 1, 2, 3, 4)


def test_rescue_asks_only_those_who_opened_for_those_who_did_not() -> None:
    """RESCUE goes to sites with a record, and V is exactly who is shut, ascending."""
    _, tap, _ = rescuing()

    assert {parcel.receiver for parcel in tap.parcels if isinstance(decoded(parcel), Rescue)} == {0, 1, 2, 3}
    assert {each.missing for each in tap.by_coordinator(Rescue)} == {(4,)}
