import hashlib
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.secure_aggregation.rostersum import coordinator_events, messages, site_events
from privacy.secure_aggregation.rostersum.coordinator import Patience, Stage
from privacy.secure_aggregation.rostersum.coordinator_events import Failed, Reason
from privacy.secure_aggregation.rostersum.coordinator_state import Ending, Standing
from privacy.secure_aggregation.rostersum.durable import Point
from privacy.secure_aggregation.rostersum.messages import Full, Open, Ready, RoundStart, Upload
from privacy.secure_aggregation.rostersum.site import State
from privacy.secure_aggregation.rostersum.site_events import Persist
from privacy.secure_aggregation.rostersum.terms import Churn, default_thresholds
from simulations.loopback import COORDINATOR, Loopback, Lossy, Stop
from tests.privacy.secure_aggregation.rostersum.looped import Tap, at, exact, job, loop_of, losing, round_of, vector

OPEN_FIVE = {"churn": Churn.OPEN, "m_min": 4, "t": 3}
"""Five sites of which one may be missing, with escrow."""


@pytest.mark.parametrize("pq", [0, 1], ids=["x25519", "with ML-KEM"])
@pytest.mark.parametrize("t", [0, 2], ids=["no escrow", "escrow"])
def test_three_sites_open_the_exact_sum(t: int, pq: int) -> None:
    """I1, from keys to RESULT, three rounds on one set of keys: the sum is exact, and every site is idle again."""
    loop = loop_of(job(t=t, pq=pq))

    for r in (1, 2, 3):
        outcome = loop.step(1, b"model %d" % r)
        assert exact(loop, outcome)
        assert outcome.sums[0].members == (0, 1, 2)
        assert round_of(loop) == r

    loop.run(lambda: not loop.in_flight)
    assert [site and site.state(loop.terms.job_hash) for site in loop.sites] == [State.IDLE] * 3
    assert loop.refusals == []


@settings(deadline=None, max_examples=15)
@given(st.integers(3, 7), st.sampled_from([Churn.CELLS, Churn.OPEN]), st.integers(6, 40), st.data())
def test_any_small_job_opens_exact_sums(n: int, churn: Churn, words: int, data: st.DataObject) -> None:
    """I1 for random n, thresholds and lengths: the default thresholds of each job give the exact sum."""
    c_max = data.draw(st.integers(1, max(1, (n - 1) // 3)))
    numbers = default_thresholds(n, c_max, 1, churn, (tuple(range(n)),))
    loop = loop_of(job(n, churn=churn, m_min=numbers.m_min, t=numbers.t, c_max=c_max, words=words))

    assert exact(loop, loop.step(1))


def test_a_site_that_never_comes_is_left_out() -> None:
    """Where anybody may be missing, the round starts at the deadline without it."""
    loop = loop_of(job(5, **OPEN_FIVE))
    loop.pass_time(1)
    loop.stop(3, downtime=10**9)

    outcome = loop.step(1)

    assert outcome.sums[0].members == (0, 1, 2, 4)
    assert exact(loop, outcome)


def test_one_cell_waits_for_its_member() -> None:
    """Nobody may be missing from a cell: the step waits for the site to come back, and opens with it."""
    loop = loop_of(job(t=2))
    loop.pass_time(1)
    loop.stop(1, downtime=500.0)

    outcome = loop.step(1)

    assert loop.now > 500
    assert outcome.sums[0].members == (0, 1, 2)
    assert exact(loop, outcome)


def test_of_two_cells_the_whole_one_is_summed() -> None:
    """A cell with a missing member sits out; the other's sum is opened."""
    loop = loop_of(job(6, cells=((0, 1, 2), (3, 4, 5))))
    loop.pass_time(1)
    loop.stop(4, downtime=10**9)

    assert loop.step(1).sums[0].members == (0, 1, 2)


def test_groups_run_side_by_side() -> None:
    """In group mode each cell's sum is opened by itself, in one round."""
    loop = loop_of(job(6, cells=((0, 1, 2), (3, 4, 5)), group=1))

    outcome = loop.step(1)

    assert [each.members for each in outcome.sums] == [(0, 1, 2), (3, 4, 5)]
    assert exact(loop, outcome)


def test_a_group_that_fails_is_missing_from_the_step() -> None:
    """One cell without a member fails by itself: the other one's sum is committed all the same."""
    loop = loop_of(job(6, cells=((0, 1, 2), (3, 4, 5)), group=1))
    loop.pass_time(1)
    loop.stop(4, downtime=10**9)

    outcome = loop.step(1)

    assert [each.members for each in outcome.sums] == [(0, 1, 2)]
    assert [(each.reason, each.who) for each in outcome.failures] == [(Reason.COHORT, (4,))]
    assert exact(loop, loop_after(loop, 4))


def test_who_gets_ready_after_its_group_was_given_up_is_not_at_fault() -> None:
    """One of its members declined before: the others' READYs are of no use, and nobody is told of a mistake."""
    loop = loop_of(job(6, cells=((0, 1, 2), (3, 4, 5)), group=1))
    loop._contribute = lambda idx, assignment: None if idx == 4 else vector(loop.terms, idx, assignment.r)
    loop.pass_time(1)
    tap = Tap(loop)

    outcome = loop.step(1)

    assert [each.members for each in outcome.sums] == [(0, 1, 2)]
    assert len(tap.said(Ready)) == 5
    assert loop.refusals == []


def test_new_keys_come_while_another_groups_sum_waits_for_the_step_to_end() -> None:
    """A restarted coordinator asks for new keys, and a group that is summed does not hold them back from the other."""
    loop = loop_of(job(6, cells=((0, 1, 2), (3, 4, 5)), group=1), network=losing(Ready, sender=4, times=1))
    loop.pass_time(1)
    loop.begin(1)
    loop.run(lambda: loop.coordinator is not None and loop.coordinator.stages == (Stage.SUMMED, Stage.GATHERING))

    loop.stop(COORDINATOR)
    loop.run(lambda: loop.idle)

    assert [each.members for each in loop.outcome().sums] == [(0, 1, 2), (3, 4, 5)]
    assert exact(loop, loop.outcome())


def test_a_group_that_waits_for_new_keys_does_not_stop_the_others_clock() -> None:
    """Its deadline passes while a site of the other group does not open: that group is given up, this one is summed."""
    shut, late = losing(Open, sender=1), losing(Ready, sender=4, times=1)
    loop = loop_of(
        job(6, cells=((0, 1, 2), (3, 4, 5)), group=1),
        network=lambda parcel: shut(parcel) and late(parcel),
        patience=Patience(ready=20.0, opening=60.0),
    )
    loop.pass_time(1)
    loop.begin(1)
    loop.run(lambda: loop.coordinator is not None and loop.coordinator.stages == (Stage.OPENING, Stage.GATHERING))

    loop.stop(COORDINATOR)
    loop.run(lambda: loop.idle)

    assert [each.members for each in loop.outcome().sums] == [(3, 4, 5)]
    assert [(each.reason, each.who, each.sites) for each in loop.outcome().failures] == [
        (Reason.OPENING, (1,), (0, 1, 2))
    ]


def loop_after(loop: Loopback, idx: int) -> Any:
    """The next step, once a stopped site runs again."""
    loop._start_site(idx)
    return loop.step(1)


def test_a_site_that_restarts_after_its_upload_is_rescued() -> None:
    """With escrow the others' shares open the sum of a site that forgot its seed after FULL had left."""
    loop = loop_of(job(5, **OPEN_FIVE))
    at(loop, Stage.OPENING)

    loop.stop(2)
    loop.run(lambda: loop.idle)

    outcome = loop.outcome()
    assert outcome.sums[0].members == (0, 1, 2, 3, 4)
    assert exact(loop, outcome)


def test_without_escrow_the_same_burns_the_round() -> None:
    """With t = 0 nobody can open in its place: the round is burned at once, names the site, and the next one works."""
    loop = loop_of(job())
    at(loop, Stage.OPENING)

    loop.stop(2)
    loop.run(lambda: loop.idle)
    assert loop.now < 10, "its new keys tell that it will not open: nobody waits for it"

    (failed,) = loop.outcome().failures
    assert (failed.reason, failed.who) == (Reason.OPENING, (2,))
    assert loop.outcome().sums == ()
    assert exact(loop, loop.step(1))
    assert round_of(loop) == 2


def test_a_site_that_restarts_before_its_upload_costs_an_attempt() -> None:
    """It does its work again and the same round is opened at the next attempt, over the same sites."""
    loop = loop_of(job())
    tap = Tap(loop)
    at(loop, Stage.UPLOADING)

    loop.stop(2)
    loop.run(lambda: loop.idle)

    assert exact(loop, loop.outcome())
    assert sorted({(start.r, start.a) for start in tap.by_coordinator(RoundStart)}) == [(1, 0), (1, 1)]


def test_a_declining_site_is_left_out_or_ends_the_step() -> None:
    """Where one may be missing the others go on; a cell cannot, and the failure names the site at once."""

    def declines(loop: Loopback, who: int) -> Callable[..., Any]:
        return lambda idx, assignment: None if idx == who else vector(loop.terms, idx, assignment.r)

    five, three = loop_of(job(5, **OPEN_FIVE)), loop_of(job())
    five._contribute, three._contribute = declines(five, 1), declines(three, 1)

    assert five.step(1).sums[0].members == (0, 2, 3, 4)
    assert [(each.reason, each.who) for each in three.step(1).failures] == [(Reason.COHORT, (1,))]
    assert three.now < 60


def test_a_set_below_the_minimum_opens_nothing() -> None:
    """Two of five sites are gone where four are needed: the step fails, nobody uploads, and no seed leaves a site."""
    loop = loop_of(job(5, **OPEN_FIVE))
    tap = Tap(loop)
    loop.pass_time(1)
    for idx in (0, 1):
        loop.stop(idx, downtime=10**9)

    (failed,) = loop.step(1).failures

    assert (failed.reason, failed.who) == (Reason.COHORT, (0, 1))
    assert tap.said(RoundStart) == tap.said(Upload) == tap.said(Open) == []


def test_uploads_that_fall_below_the_minimum_open_nothing() -> None:
    """Two of five never finish their upload: attempts pass and fail, and no FULL and no OPEN ever leaves (I11)."""
    patience = Patience(ready=100, again=20, upload=100, opening=20, rounds=1)
    loop = loop_of(job(5, **OPEN_FIVE), patience=patience, network=losing(Upload, sender=0))
    tap = Tap(loop)
    loop.pass_time(1)
    loop.begin(1)
    loop.run(lambda: bool(tap.said(RoundStart)))
    loop.stop(1, downtime=10**9)
    loop.run(lambda: loop.idle)

    (failed,) = loop.outcome().failures
    assert failed.reason in (Reason.COHORT, Reason.ATTEMPTS)
    assert tap.said(Full) == tap.said(Open) == []


@pytest.mark.parametrize("t", [0, 2], ids=["no escrow", "escrow"])
@pytest.mark.parametrize("when", [Stop.BEFORE, Stop.AFTER], ids=["before", "after"])
@pytest.mark.parametrize("point", [Point.JOB, Point.KEYS, Point.ATTEMPT, Point.OPENED])
def test_a_site_killed_at_a_durable_point_goes_on(point: Point, when: Stop, t: int) -> None:
    """I14: killed before or after F1 to F4 a site uses no context twice and opens one seed; the next sum is exact."""
    struck: list[object] = []

    def interrupt(party: int, effect: object) -> Stop:
        if party == 1 and isinstance(effect, Persist) and effect.point is point and not struck:
            struck.append(effect)
            return when
        return Stop.NOT

    loop = loop_of(job(t=t), interrupt=interrupt)
    tap = Tap(loop)
    loop.pass_time(5)
    outcomes = [loop.step(1, b"first"), loop.step(1, b"second")]

    assert struck
    assert exact(loop, outcomes[1])
    assert all(each.reason is Reason.OPENING for each in outcomes[0].failures)
    assert bool(outcomes[0].failures) == (point is Point.OPENED and when is Stop.BEFORE and t == 0)
    uploads, opens = tap.said(Upload, sender=1), tap.said(Open, sender=1)
    assert len({upload.ctx for upload in uploads}) == len(set(uploads)), "one context, one vector"
    assert len({opened.ctx for opened in opens}) == len(set(opens)), "one context, one seed"
    spent = {(start.r, start.a) for start in tap.said(RoundStart, receiver=1)}
    assert len({start.ctx for start in tap.said(RoundStart, receiver=1)}) == len(spent)


@pytest.mark.parametrize("when", [Stop.BEFORE, Stop.AFTER], ids=["before", "after"])
def test_a_site_killed_when_it_closes_a_job_never_takes_it_again(when: Stop) -> None:
    """I14, F5: after the kill the job is closed in the end, and its hash is not accepted a second time."""
    struck: list[object] = []

    def interrupt(party: int, effect: object) -> Stop:
        if party == 1 and isinstance(effect, Persist) and effect.point is Point.CLOSED and not struck:
            struck.append(effect)
            return when
        return Stop.NOT

    loop = loop_of(job(), interrupt=interrupt)
    assert exact(loop, loop.step(1))
    loop._start_site = lambda _: None  # type: ignore[method-assign] # its disk is what is looked at
    loop._tell_coordinator(coordinator_events.Close())
    loop.run(lambda: not loop.in_flight)

    assert struck
    (persist,) = struck
    assert isinstance(persist, Persist)
    closed = persist.durable
    assert [stone.job_hash for stone in closed.closed] == [loop.terms.job_hash]
    assert closed.jobs == ()


@pytest.mark.parametrize("t", [0, 2], ids=["no escrow", "escrow"])
@pytest.mark.parametrize("when", [Stop.BEFORE, Stop.AFTER], ids=["before", "after"])
@pytest.mark.parametrize("nth", range(12))
def test_a_coordinator_killed_at_any_persist_goes_on(nth: int, when: Stop, t: int) -> None:
    """Killed beside its n-th durable write it opens the step all the same, and signs no (r, a) twice differently."""
    seen: list[object] = []

    def interrupt(party: int, effect: object) -> Stop:
        kinds = coordinator_events.Persist, coordinator_events.Opened
        if party == COORDINATOR and isinstance(effect, kinds):
            seen.append(effect)
            return when if len(seen) == nth + 1 else Stop.NOT
        return Stop.NOT

    loop = loop_of(job(t=t), interrupt=interrupt)
    tap = Tap(loop)
    loop.pass_time(5)
    loop.begin(1) if loop.idle else None
    loop.run(lambda: loop.idle and not loop.in_flight)
    if not loop.outcome().sums:
        loop.step(1)

    assert exact(loop, loop.outcome())
    starts = {(start.r, start.a): start for start in tap.by_coordinator(RoundStart)}
    assert set(tap.by_coordinator(RoundStart)) == set(starts.values())


def test_a_coordinator_restarted_while_opening_says_the_same_full_again() -> None:
    """The FULL that a restarted coordinator sends is byte for byte the one that left before."""
    loop = loop_of(job(t=2), network=losing(Open))
    tap = Tap(loop)
    at(loop, Stage.OPENING)
    loop.stop(COORDINATOR)
    loop.network = losing()
    loop.run(lambda: loop.idle)

    assert exact(loop, loop.outcome())
    for idx in range(3):
        assert len(tap.said(Full, receiver=idx)) > 1
        assert len(set(tap.said(Full, receiver=idx))) == 1


def test_a_site_that_lost_the_result_is_told_again() -> None:
    """A site cut off before RESULT hears it when it comes back, and is idle."""
    loop = loop_of(job(), network=losing(messages.Result, receiver=0))
    assert exact(loop, loop.step(1))
    loop.run(lambda: not loop.in_flight)
    assert loop.sites[0] is not None
    assert loop.sites[0].state(loop.terms.job_hash) is State.OPENED

    loop.network = losing()
    loop.cut(0)
    loop.join(0)
    loop.run(lambda: not loop.in_flight)

    assert loop.sites[0].state(loop.terms.job_hash) is State.IDLE


def test_what_leaves_was_durable_before() -> None:
    """(r, a, P) before ROUND_START, the uploads before FULL, OPENs before the sum, RESULT: the disk has it first."""
    loop = loop_of(job(t=2))
    checked: set[type] = set()

    def performed(party: int, effect: object) -> None:
        if party != COORDINATOR or not isinstance(effect, coordinator_events.Send | coordinator_events.Sum):
            return
        (way,) = Standing.decode(loop.disks[COORDINATOR]).ways or (None,)
        message = getattr(effect, "message", effect)
        checked.add(type(message))
        match message:
            case RoundStart():
                assert way is not None
                assert way.start == messages.encode(message)
            case Full():
                assert way is not None
                uploads = [messages.decode(each) for each in way.uploads]
                assert [each.entry for each in uploads if isinstance(each, Upload)] == list(message.entries)
                assert way.full_signature == message.signature
            case coordinator_events.Sum():
                assert way is not None
                assert len(way.opens) == 3
            case messages.Result():
                assert way is not None
                assert (way.result, way.ending) == (messages.encode(message), Ending.OPENED)

    loop.performed = performed
    assert exact(loop, loop.step(1))
    loop.run(lambda: not loop.in_flight)
    assert checked >= {RoundStart, Full, coordinator_events.Sum, messages.Result}


def _secrets(loop: Loopback) -> Callable[[], dict[str, bytes]]:
    """What of each site's memory must never be seen: pair roots and what derives from them, and self seeds."""
    found: dict[str, bytes] = {}

    def collect() -> dict[str, bytes]:
        for idx, site in enumerate(loop.sites):
            for seat in () if site is None else site._seats.values():
                for peer, root in (seat._keys._roots if seat._keys else {}).items():
                    found[f"mask root {idx} {peer} {root.mask[:4].hex()}"] = root.mask
                    found[f"seal root {idx} {peer} {root.seal[:4].hex()}"] = root.seal
                attempt = seat._attempt
                if attempt is not None:
                    pairs = {f"pair key {idx} {each.hex()[:8]}": each for _, each in attempt.pair_keys}
                    inbound = {f"seal key {idx} {each.hex()[:8]}": each for each in attempt.inbound.values()}
                    found.update(pairs | inbound)
        return found

    return collect


def test_nothing_that_leaves_or_lies_on_a_disk_tells_a_pair_or_an_unopened_seed() -> None:
    """I13: no message or file holds a pair-derived value, ever, nor a self seed before its F4, or before its rescue."""
    loop = loop_of(job(5, **OPEN_FIVE))
    collect, outside = _secrets(loop), []
    seeds: dict[bytes, int] = {}
    opened: set[bytes] = set()
    early: list[int] = []

    def look(content: bytes) -> None:
        outside.append(content)
        early.extend(seeds[seed] for seed in seeds.keys() - opened if seed in content)

    def performed(party: int, effect: object) -> None:
        collect()
        site = loop.sites[party] if party != COORDINATOR else None
        attempts = [] if site is None else [seat._attempt for seat in site._seats.values()]
        seeds.update((attempt.b, party) for attempt in attempts if attempt is not None)
        if isinstance(effect, Persist):
            content = effect.durable.encode()
            opened.update(seed for seed in seeds if effect.point is Point.OPENED and seed in content)
            look(content)
        if isinstance(effect, coordinator_events.Persist):
            opened.update(seed.b for way in effect.state.ways for seed in way.rescued)
            look(effect.state.encode())

    loop.performed = performed
    loop.sent = lambda parcel: look(parcel.content)
    at(loop, Stage.UPLOADING)
    loop.stop(4)
    loop.run(lambda: loop.idle)
    assert exact(loop, loop.outcome())
    at(loop, Stage.OPENING)
    loop.stop(3)
    loop.run(lambda: loop.idle)
    assert exact(loop, loop.outcome())

    assert len(seeds) >= 10
    assert early == []
    told = b"\x00\x00".join(outside)
    assert {seed for seed in seeds if seed in told} == opened
    assert len(opened) == 10  # five in each round, one of them from shares
    secrets = collect()
    assert len(secrets) > 50
    assert [name for name, secret in secrets.items() if secret in told] == []


@pytest.mark.parametrize("seed", range(6))
def test_a_bad_network_costs_time_and_never_the_sum(seed: int) -> None:
    """Lost, doubled, reordered and corrupted messages delay a step or fail it; whatever is opened is exact."""
    network = Lossy(Random(seed), drop=0.02, double=0.2, reorder=0.3, corrupt=0.02)  # noqa: S311 - a simulation's chance
    patience = Patience(ready=60, again=30, upload=60, opening=30)
    loop = loop_of(job(5, **OPEN_FIVE), network=network, patience=patience)
    loop.pass_time(5)

    for _ in range(4):
        outcome = loop.step(1)
        assert bool(outcome.sums) != bool(outcome.failures)
        assert not outcome.sums or exact(loop, outcome)
        for idx in range(5):
            loop.cut(idx)
            loop.join(idx)

    loop.network = losing()
    loop.pass_time(2 * 3600)
    for idx in range(5):
        loop.cut(idx)
        loop.join(idx)
    last = loop.step(1)
    assert exact(loop, last), last


def test_twenty_sites_three_rounds() -> None:
    """Twenty sites, ten thousand words, three rounds, each sum exact."""
    numbers = default_thresholds(20, 6, 1, Churn.OPEN, ())
    loop = loop_of(job(20, churn=Churn.OPEN, m_min=numbers.m_min, t=numbers.t, c_max=6, words=10_000))

    for _ in range(3):
        outcome = loop.step(1)
        assert len(outcome.sums[0].members) == 20
        assert exact(loop, outcome)


def test_a_sum_that_fails_its_check_is_burned() -> None:
    """A site that sends another guard than 1 burns the round: the model does not move, the next round goes on."""
    loop = loop_of(job())
    loop._contribute = lambda idx, assignment: vector(loop.terms, idx, assignment.r) * (1 + (idx == assignment.r == 1))

    (failed,) = loop.step(1).failures

    assert isinstance(failed, Failed)
    assert (failed.reason, failed.detail) == (Reason.CHECKS, "the guard words are not |P|")
    assert exact(loop, loop.step(1))


def test_digests_name_what_sites_train_on() -> None:
    """Model and arguments reach the sites as their SHA-256, and an update is bound to both."""
    loop, seen = loop_of(job()), []
    inner = loop._contribute

    def noted(idx: int, assignment: site_events.Assignment, /) -> Any:
        seen.append(assignment)
        return inner(idx, assignment)

    loop._contribute = noted
    loop.step(1, b"the model", b"the arguments")

    digests = hashlib.sha256(b"the model").digest(), hashlib.sha256(b"the arguments").digest()
    assert {(each.model_hash, each.args_hash) for each in seen} == {digests}
    assert replace(seen[0], r=1) == seen[0]
