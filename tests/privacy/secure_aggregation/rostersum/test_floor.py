import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from federation.errors import ConfigurationError, PolicyRefused, StorageError
from privacy.crypto import agreement, canonical
from privacy.secure_aggregation.rostersum.durable import Durable, Family
from privacy.secure_aggregation.rostersum.messages import Close, Code, Refuse
from privacy.secure_aggregation.rostersum.rules import Rule
from privacy.secure_aggregation.rostersum.site_events import (
    Accepted,
    FloorChanged,
    JobRefused,
    Offered,
    Persist,
    ReCell,
    ReTable,
    Work,
)
from privacy.secure_aggregation.rostersum.terms import (
    Churn,
    DpCodec,
    Kind,
    Mechanism,
    Noise,
    Plan,
    Terms,
    Unit,
    Weighting,
)

Make = Callable[..., Any]

NEW_TABLE = hashlib.sha256(b"another table").digest()


def offered(b: Any, terms: Terms | None = None, **data: Any) -> tuple[list[Rule], Code | None]:
    """Offers the job to site 0: the rules for which it is refused, and the code that the coordinator is told."""
    effects = b.do(0, Offered(terms or b.terms, replace(b.data, **data)))
    reasons = [broken.rule for each in b.of(effects, JobRefused) for broken in each.reasons]
    assert bool(b.of(effects, Accepted)) == (not reasons)
    assert bool(b.of(effects, Persist)) == (not reasons)
    return reasons, next((each.code for each in b.sent(effects, Refuse)), None)


def another(b: Any, job: int = 1, **changes: Any) -> Terms:
    """The terms of another job among the same sites."""
    return replace(b.terms, job_id=bytes([job] * 16), **changes)


def weighed(plan: Plan, weighting: Weighting, w_min: int) -> Plan:
    """The plan with these weights."""
    return replace(plan, codec=replace(plan.codec, weighting=weighting, w_min=w_min, w_max=10_000))


@pytest.mark.parametrize(
    ("rule", "floor"),
    [
        (Rule.FLOOR_C_MAX, {"c_max": 2}),
        (Rule.FLOOR_G_MAX, {"g_max": 2}),
        (Rule.FLOOR_ROSTER, {"rosters": frozenset({bytes(32)})}),
        (Rule.FLOOR_KIND, {"churns": frozenset({(Kind.STAT, Churn.CELLS)})}),
        (Rule.FLOOR_CHURN, {"churns": frozenset({(Kind.TRAIN, Churn.DP)})}),
        (Rule.FLOOR_TASK, {"tasks": frozenset({bytes(32)})}),
        (Rule.FLOOR_FAMILY, {"families": frozenset({"lungs"})}),
        (Rule.FLOOR_ROWS, {"rows_min": 11}),
    ],
)
def test_i18_each_limit_of_the_floor_refuses_by_itself(bench: Make, rule: Rule, floor: dict[str, Any]) -> None:
    """The site knows which; the coordinator is told E_TERMS and no detail. Once lifted, the job is accepted."""
    b = bench(ready=False, floor=floor)
    assert offered(b) == ([rule], Code.E_TERMS)
    b.do(0, FloorChanged(replace(b.floor, **lifted(bench, floor))))
    assert offered(b) == ([], None)


def lifted(bench: Make, floor: dict[str, Any]) -> dict[str, Any]:
    """The same limits as a bench has that changes none."""
    usual = bench(ready=False).floor
    return {name: getattr(usual, name) for name in floor}


def test_i18_open_sums_need_the_sites_own_word(bench: Make, train: Plan) -> None:
    """allow_open is false unless the file says otherwise, whatever churns are allowed."""
    b = bench(3, (replace(train, churn=Churn.OPEN),), ready=False, floor={"allow_open": False})
    assert offered(b) == ([Rule.FLOOR_OPEN], Code.E_TERMS)


def test_i18_a_dp_plan_needs_a_ledger_that_pays_all_its_rounds(bench: Make, train: Plan, fund: Make) -> None:
    """Without a ledger it is refused, and with one round too few."""
    dp = Noise(Unit.SITE, Mechanism.DDGAUSS, 1.0, 100.0, 1.0, 1e-6, 10)
    plan = replace(train, churn=Churn.DP, codec=DpCodec(8), dp=dp)
    for ledger, expected in ((None, [Rule.LEDGER]), (fund(9), [Rule.LEDGER]), (fund(10), [])):
        assert offered(bench(3, (plan,), ready=False, ledger=ledger))[0] == expected


def test_i18_a_job_that_breaks_a_rule_for_all_is_refused_before_the_floor_is_asked(bench: Make, train: Plan) -> None:
    """E_TERMS, and nothing is stored."""
    b = bench(3, (replace(train, rows_min=1),), ready=False)
    assert offered(b) == ([Rule.ROWS], Code.E_TERMS)


def test_i18_a_job_with_pq_needs_ml_kem_here(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without it refuses the job rather than fail in its first epoch."""

    def absent() -> None:
        raise ConfigurationError("there is no ML-KEM-768 here", fix="upgrade the package cryptography")

    monkeypatch.setattr(agreement, "require_ml_kem", absent)
    assert offered(bench(pq=1, ready=False)) == ([Rule.ML_KEM], Code.E_TERMS)
    assert offered(bench(ready=False)) == ([], None)


def test_i18_a_site_that_is_not_in_the_roster_says_nothing(bench: Make, consortium: Make) -> None:
    """It has no index to refuse under; its administrator is told."""
    b = bench(4, ready=False)
    fewer = consortium(4).terms
    roster = replace(fewer.roster, members=fewer.roster.members[1:])
    assert offered(b, replace(fewer, roster=roster, cells=((0, 1, 2),))) == ([Rule.NOT_MEMBER], None)


@pytest.mark.parametrize(
    ("rule", "data"),
    [
        (Rule.DATA_ROWS, {"rows": 9}),
        (Rule.DATA_CLASSES, {"rarest": 4}),
    ],
)
def test_s1_a_site_joins_only_with_enough_rows(bench: Make, rule: Rule, data: dict[str, Any]) -> None:
    """rows_min rows, and five of each class; the words do not say how many there are."""
    b = bench(ready=False)
    assert offered(b, **data) == ([rule], Code.E_TERMS)
    (refused,) = b.of(b.effects[0], JobRefused)
    assert "fewer than" in refused.reasons[0].problem


@pytest.mark.parametrize(("least", "rarest", "joins"), [(5, 4, False), (1, 0, False), (0, 0, True), (20, 19, False)])
def test_s1_rows_of_each_class_are_the_sites_own_word(bench: Make, least: int, rarest: int, *, joins: bool) -> None:
    """The floor's line moves it, down to a class that is not here at all; the job says nothing of it."""
    b = bench(ready=False, floor={"rows_of_each_class": least})
    assert offered(b, rarest=rarest)[0] == ([] if joins else [Rule.DATA_CLASSES])
    assert "rows_of_each_class" not in str(b.terms)


def test_s1_a_class_that_is_too_rare_is_refused_with_the_line_and_its_price(bench: Make) -> None:
    """The administrator reads which line of which file it is, and what it would give away."""
    b = bench(ready=False)
    offered(b, rarest=1)
    (refused,) = b.of(b.effects[0], JobRefused)
    (reason,) = refused.reasons
    assert reason.problem.endswith("a class has fewer than 5 rows here")
    assert "this site's administrator may lower rows_of_each_class in the policy's [secure_aggregation]" in reason.fix
    assert "whoever knows the other sites' counts of a class learns that" in reason.fix


def test_s1_an_evaluation_counts_its_test_rows(bench: Make, evaluation: Plan) -> None:
    """Rows to train on do not make up for them."""
    assert offered(bench(3, (evaluation,), ready=False), test_rows=9)[0] == [Rule.DATA_ROWS]


@pytest.mark.parametrize(("weighting", "w_min"), [(Weighting.DECLARED, 6), (Weighting.RECORDS, 1001)])
def test_who_weighs_less_than_w_min_does_not_join(bench: Make, train: Plan, weighting: Weighting, w_min: int) -> None:
    """Its weight would be clipped upwards in each round."""
    limits = {"declared": 5, "rows_asked_most": 1001}
    b = bench(3, (weighed(train, weighting, w_min),), ready=False, floor=limits)
    assert offered(b)[0] == [Rule.DATA_WEIGHT]
    b = bench(3, (weighed(train, weighting, w_min - 1),), ready=False, floor=limits)
    assert offered(b)[0] == []


@pytest.mark.parametrize("rows", [10, 1000])
def test_a_job_that_asks_for_more_rows_than_the_floor_lets_it_is_refused_whatever_the_rows(
    bench: Make, train: Plan, rows: int
) -> None:
    """By `rows_min`, and by the least weight where records weigh: no other word says what the comparison would."""
    for plan in (replace(train, rows_min=11), weighed(train, Weighting.RECORDS, 11)):
        assert offered(bench(3, (plan,), ready=False), rows=rows)[0] == [Rule.FLOOR_ROWS]
        assert offered(bench(3, (plan,), ready=False, floor={"rows_asked_most": 11}), rows=1000)[0] == []
    assert offered(bench(3, (weighed(train, Weighting.DECLARED, 11),), ready=False, floor={"declared": 11}))[0] == []


# ------------------------------------------------------------------------------------------------------- accepted once


def test_i25_a_job_is_accepted_once_ever(bench: Make) -> None:
    """While it is open, offering it again goes on with it; once closed it never comes back, also after a restart."""
    b = bench(ready=False)
    assert offered(b) == ([], None)
    assert b.do(0, Offered(b.terms, b.data)) == (Accepted(b.job_hash),)
    b.say(0, b.sign(Close(b.job_hash)))
    assert offered(b)[0] == [Rule.JOB_KNOWN]
    b.crash(0)
    assert offered(b) == ([Rule.JOB_KNOWN], Code.E_TERMS)


def test_i25_an_open_job_is_not_continued_on_other_data(bench: Make) -> None:
    """Another family or table under the same job is another job."""
    b = bench()
    effects = b.do(0, Offered(b.terms, replace(b.data, table=NEW_TABLE)))
    assert [each.rule for each in b.of(effects, JobRefused)[0].reasons] == [Rule.JOB_KNOWN]
    assert b.durable(0).jobs[0].table == b.data.table


def test_i25_bites_without_tombstones(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them a repeated job starts with last = (0, 0): its contexts come again."""
    b = bench()
    b.train(1)
    start = b.open(1)
    b.say(0, b.sign(Close(b.job_hash)))
    monkeypatch.setattr(Durable, "knows", lambda *_: False)
    b.do(0, Offered(b.terms, b.data))
    assert start.r > b.durable(0).jobs[0].last_r == 0


# ------------------------------------------------------------------------------------------------------- pin and plans


def test_i21_another_cell_is_refused_over_all_jobs(bench: Make, consortium: Make, train: Plan) -> None:
    """Pinned at the first F3 over cells; a job with another cell is E_PIN, until the administrator re-cells."""
    b = bench(6, (replace(train, m_min=6),))
    b.train(1)
    b.upload(0, b.start(1))
    other = another(b, cells=((0, 1, 2), (3, 4, 5)), plans=(train,))
    assert offered(b, other) == ([Rule.PIN], Code.E_PIN)
    b.do(0, ReCell("hearts", other.cell_hash(0)))
    assert offered(b, other) == ([], None)
    assert consortium(6).terms.cell_hash(0) != other.cell_hash(0)


def test_i21_a_pin_set_by_another_job_stops_a_job_that_was_accepted_before(bench: Make, train: Plan) -> None:
    """Both are accepted while nothing is pinned; the first to mask pins the family: the other is E_PIN."""
    b = bench(6, (replace(train, m_min=6),))
    other = another(b, cells=((0, 1, 2), (3, 4, 5)), plans=(train,))
    assert offered(b, other) == ([], None)
    b.do(0, ReCell("hearts", other.cell_hash(0)))
    b.train(1)
    assert b.refused(0, b.start(1)) is Code.E_PIN


def test_i21_a_family_of_another_name_has_its_own_pin(bench: Make, train: Plan) -> None:
    """The administrator's word decides which tables share records."""
    b = bench(6, (replace(train, m_min=6),), floor={"families": frozenset({"hearts", "lungs"})})
    b.train(1)
    b.upload(0, b.start(1))
    other = another(b, cells=((0, 1, 2), (3, 4, 5)), plans=(train,))
    assert offered(b, other, family="lungs") == ([], None)


def test_i27_statistics_take_no_arguments(bench: Make, stat: Plan) -> None:
    """No predicate, bin edge or column list comes with a message."""
    b = bench(3, (stat,))
    assert b.refused(0, b.ask(1, plan_id=2, args=b"age > 60")) is Code.E_TERMS
    assert b.of(b.say(0, b.ask(1, plan_id=2)), Work)


def asked(b: Any, count: int) -> None:
    """Site 0 has answered so many exact statistics."""
    plans = tuple(bytes([at]) * 32 for at in range(count))
    b.sites[0]._premises.durable = b.sites[0].durable.with_family(replace(b.durable(0).family("hearts"), plans=plans))


def test_i27_a_ninth_exact_statistic_of_a_family_is_refused_ever(bench: Make, stat: Plan) -> None:
    """Eight distinct ones, over all jobs; one that was asked before is free."""
    b = bench(3, (stat,), floor={"rows_asked_most": 11})
    b.train(1, plan_id=2)
    b.upload(0, b.start(1, plan_id=2))
    assert b.durable(0).families == (Family("hearts", b.terms.cell_hash(0), b.data.table, (stat.digest,)),)
    eight = (stat.digest, *(bytes([at]) * 32 for at in range(7)))
    b.sites[0]._premises.durable = b.durable(0).with_family(replace(b.durable(0).families[0], plans=eight))
    ninth = replace(stat, rows_min=11)
    assert offered(b, another(b, plans=(ninth,)))[0] == [Rule.EXACT_PLANS]
    assert offered(b, another(b, plans=(stat,)))[0] == []
    assert b.of(b.say(0, b.ask(2, plan_id=2)), Work)


def test_i27_a_job_is_stopped_when_another_has_used_the_family_up(bench: Make, stat: Plan) -> None:
    """Between acceptance and TRAIN, and between TRAIN and ROUND_START."""
    b = bench(3, (stat,))
    asked(b, 8)
    assert b.refused(0, b.ask(1, plan_id=2)) is Code.E_TERMS
    asked(b, 7)
    b.train(1, plan_id=2)
    asked(b, 8)
    assert b.refused(0, b.start(1, plan_id=2)) is Code.E_TERMS


def test_i27_evaluations_are_capped_by_train_rounds(bench: Make, train: Plan, evaluation: Plan) -> None:
    """One for each train round of the job and one more; an attempt again is no evaluation more."""
    b = bench(3, (train, evaluation))
    b.train(1, plan_id=3)
    b.uploads(b.start(1, plan_id=3))
    b.uploads(b.start(1, 1, plan_id=3))
    assert b.refused(0, b.ask(2, plan_id=3)) is Code.E_TERMS
    b.train(2)
    b.open(2)
    b.train(3, plan_id=3)
    b.uploads(b.start(3, plan_id=3))
    assert b.refused(0, b.ask(4, plan_id=3)) is Code.E_TERMS


def test_i27_exact_sums_are_over_one_version_of_a_table(bench: Make, stat: Plan, train: Plan) -> None:
    """A changed table is refused for exact statistics, not for training; the administrator accepts it between jobs."""
    b = bench(3, (stat,))
    b.train(1, plan_id=2)
    b.upload(0, b.start(1, plan_id=2))
    assert offered(b, another(b, plans=(stat,)), table=NEW_TABLE)[0] == [Rule.TABLE]
    assert offered(b, another(b, plans=(train,)), table=NEW_TABLE)[0] == []
    with pytest.raises(PolicyRefused, match="is open"):
        b.do(0, ReTable("hearts", NEW_TABLE, 100))


def test_i27_a_new_version_changes_enough_rows(bench: Make, stat: Plan) -> None:
    """Fewer than rows_min changed rows would stand out in the difference of two sums."""
    b = bench(3, (stat,), ready=False)
    b.sites[0]._premises.durable = Durable(families=(Family("hearts", table=b.data.table),))
    with pytest.raises(PolicyRefused, match="fewer than 10 rows changed"):
        b.do(0, ReTable("hearts", NEW_TABLE, 9))
    b.do(0, ReTable("hearts", NEW_TABLE, 10))
    assert offered(b, table=NEW_TABLE)[0] == []


def test_a_floor_that_was_raised_stops_rounds(bench: Make) -> None:
    """At TRAIN, and at ROUND_START for a TRAIN before it."""
    b = bench()
    b.train(1)
    b.do(0, FloorChanged(replace(b.floor, tasks=frozenset())))
    assert b.refused(0, b.start(1)) is Code.E_TERMS
    assert b.refused(0, b.ask(2)) is Code.E_TERMS
    b.do(0, FloorChanged(replace(b.floor, families=frozenset())))
    assert b.refused(0, b.ask(2)) is Code.E_TERMS


def test_a_plan_that_the_job_does_not_have_is_refused(bench: Make) -> None:
    """E_TERMS."""
    assert bench().refused(0, bench().ask(1, plan_id=77)) is Code.E_TERMS


@pytest.mark.parametrize("content", [b"", b"x", canonical.enc("rostersum-site-1", (), ())])
def test_a_stored_state_that_cannot_be_read_is_refused(content: bytes) -> None:
    """The administrator is told what to put back, or to run, before it serves."""
    with pytest.raises(StorageError, match="run: parley site restore"):
        Durable.decode(content)
