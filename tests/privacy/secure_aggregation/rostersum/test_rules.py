from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from privacy.secure_aggregation.rostersum import rules
from privacy.secure_aggregation.rostersum.rules import Rule, TermsError
from privacy.secure_aggregation.rostersum.terms import (
    Churn,
    DpCodec,
    Kind,
    Mechanism,
    Noise,
    Path,
    Plan,
    RecordCodec,
    Ring,
    StatField,
    Terms,
    Unit,
    Weighting,
)

Make = Callable[..., Any]
Change = Callable[[Terms], Terms]

SITE = Noise(Unit.SITE, Mechanism.DDGAUSS, 1.0, 100.0, 1.0, 1e-6, 10)
RECORD = Noise(Unit.RECORD, Mechanism.DDGAUSS, 1.0, 1024.0, 4.0, 1e-6, 10)


def member(at: int, **changes: Any) -> Change:
    """The roster with one member changed."""

    def change(terms: Terms) -> Terms:
        members = list(terms.roster.members)
        members[at] = replace(members[at], **changes)
        return replace(terms, roster=replace(terms.roster, members=tuple(members)))

    return change


def terms(**changes: Any) -> Change:
    """The terms changed."""
    return lambda whole: replace(whole, **changes)


def plan(**changes: Any) -> Change:
    """The first plan changed."""
    return lambda whole: replace(whole, plans=(replace(whole.plans[0], **changes), *whole.plans[1:]))


def codec(**changes: Any) -> Change:
    """The first plan's codec changed."""
    return lambda whole: plan(codec=replace(whole.plans[0].codec, **changes))(whole)


def field(**changes: Any) -> Change:
    """The statistic's first field changed."""

    def change(whole: Terms) -> Terms:
        stat = whole.plans[1]
        fields = (replace(stat.codec.fields[0], **changes), *stat.codec.fields[1:])  # type: ignore[union-attr] # a statistic
        return replace(whole, plans=(whole.plans[0], replace(stat, codec=replace(stat.codec, fields=fields))))

    return change


def stat(**changes: Any) -> Change:
    """The statistic's plan changed."""
    return lambda whole: replace(whole, plans=(whole.plans[0], replace(whole.plans[1], **changes)))


def dp(noise: Noise | None = SITE, **changes: Any) -> Change:
    """The first plan under site-level noise, changed."""
    base: dict[str, Any] = {"churn": Churn.DP, "codec": DpCodec(8), "dp": noise}
    return plan(**{**base, **changes})


def record(noise: Noise = RECORD, **changes: Any) -> Change:
    """The first plan under record-level noise, changed."""
    base: dict[str, Any] = {"churn": Churn.DP, "codec": RecordCodec(8, Path.EXACT, 2.0**20, 1000), "dp": noise}
    return plan(**{**base, **changes})


def halves(whole: Terms) -> Terms:
    """Two cells of three."""
    return replace(whole, cells=((0, 1, 2), (3, 4, 5)))


def by_records(whole: Terms) -> Terms:
    """Weights by record counts where anybody may be missing."""
    return plan(churn=Churn.OPEN, codec=replace(whole.plans[0].codec, weighting=Weighting.RECORDS))(whole)


WEAK = bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a")

BROKEN: list[tuple[str, Rule, Change]] = [
    ("a name with a capital", Rule.NAME, member(0, org="Org")),
    ("a name that begins with a dot", Rule.NAME, member(0, site=".s")),
    ("a name of 64 characters", Rule.NAME, member(0, site="s" * 64)),
    ("a site twice", Rule.SITE_TWICE, member(0, org="org1", site="s1")),
    ("a key of small order", Rule.WEAK_KEY, member(0, vk=WEAK)),
    ("a key of small order, its top bit set", Rule.WEAK_KEY, member(0, vk=WEAK[:31] + bytes([WEAK[31] | 0x80]))),
    ("a key not written canonically", Rule.WEAK_KEY, member(0, vk=(2**255 - 19 + 3).to_bytes(32, "little"))),
    ("g_max above c_max", Rule.G_MAX, terms(c_max=0)),
    ("a site in no cell", Rule.CELL_PARTITION, terms(cells=((0, 1, 2, 3, 4),))),
    ("a site in two cells", Rule.CELL_PARTITION, terms(cells=((0, 1, 2), (2, 3, 4, 5)))),
    ("an empty cell", Rule.CELL_PARTITION, terms(cells=((), (0, 1, 2, 3, 4, 5)))),
    ("a cell not sorted", Rule.CELL_ORDER, terms(cells=((1, 0, 2, 3, 4, 5),))),
    ("cells not sorted", Rule.CELL_ORDER, terms(cells=((3, 4, 5), (0, 1, 2)))),
    ("cells of c_max + 1", Rule.CELL_SITES, lambda whole: plan(m_min=4)(replace(halves(whole), c_max=2))),
    ("no plan", Rule.NO_PLAN, terms(plans=())),
    ("a plan number twice", Rule.PLAN_TWICE, stat(plan_id=1)),
    ("m_min below c_max + 2", Rule.M_MIN, lambda whole: plan(m_min=3)(replace(whole, c_max=2))),
    ("m_min above n", Rule.M_MIN, plan(m_min=7)),
    ("o_min below three", Rule.O_MIN, plan(o_min=2)),
    ("o_min above m_min", Rule.O_MIN, plan(o_min=5)),
    ("t + m_min = n + c_max", Rule.ESCROW, plan(m_min=4, t=3)),
    ("t = m_min", Rule.ESCROW_MOST, plan(m_min=4, t=4)),
    ("a group under open churn", Rule.GROUP_CHURN, plan(group=1, churn=Churn.OPEN)),
    ("m_min above a group", Rule.GROUP_SITES, lambda whole: plan(group=1, m_min=4)(halves(whole))),
    ("t of a group at c_max", Rule.GROUP_ESCROW, plan(group=1, t=1)),
    ("t of a group at its size", Rule.GROUP_ESCROW, plan(group=1, t=6)),
    ("a statistic in 32 bits", Rule.RING, stat(ring=Ring.WORD)),
    ("an open statistic", Rule.CHURN, stat(churn=Churn.OPEN)),
    ("dp without noise", Rule.NOISE, plan(churn=Churn.DP)),
    ("noise without dp", Rule.NOISE, dp(churn=Churn.OPEN)),
    ("a statistic's codec in training", Rule.CODEC, lambda whole: plan(codec=whole.plans[1].codec)(whole)),
    ("the train codec under dp", Rule.CODEC, lambda whole: dp(codec=whole.plans[0].codec)(whole)),
    ("no value beside weight and guard", Rule.WORDS, plan(words=5)),
    ("a statistic's words", Rule.WORDS, stat(words=8)),
    ("the words under dp", Rule.WORDS, dp(words=13)),
    ("rows_min of nine", Rule.ROWS, plan(rows_min=9)),
    ("w_min of zero", Rule.WEIGHTS, codec(w_min=0)),
    ("w_min above w_max", Rule.WEIGHTS, codec(w_min=2)),
    ("w_max above 4096 w_min", Rule.WEIGHTS, codec(w_max=4097)),
    ("weights by records in open churn", Rule.WEIGHTING, by_records),
    ("no bits", Rule.CODEC_VALUES, codec(q_bits=0)),
    ("a bound of zero", Rule.CODEC_VALUES, codec(bound=0.0)),
    ("a clip below zero", Rule.CODEC_VALUES, codec(clip=-1.0)),
    ("a range upside down", Rule.CODEC_VALUES, field(lo=200.0)),
    ("a field twice", Rule.CODEC_VALUES, field(name="n")),
    ("a D that is no power of two", Rule.CODEC_VALUES, dp(codec=DpCodec(12), words=16)),
    ("a D below eight", Rule.CODEC_VALUES, dp(codec=DpCodec(4), words=8)),
    ("no public denominator", Rule.CODEC_VALUES, record(codec=RecordCodec(8, Path.EXACT, 2.0**20, 0))),
    ("a z of zero", Rule.NOISE_VALUES, dp(replace(SITE, z=0.0))),
    ("a delta of one", Rule.NOISE_VALUES, dp(replace(SITE, delta=1.0))),
    ("no rounds", Rule.NOISE_VALUES, dp(replace(SITE, rounds=0))),
    ("a scale beyond every ring", Rule.NOISE_VALUES, dp(replace(SITE, scale=1e300))),
    ("skellam for records", Rule.NOISE_VALUES, record(replace(RECORD, mechanism=Mechanism.SKELLAM))),
    ("too little variance", Rule.NOISE_VALUES, record(replace(RECORD, scale=1.0))),
    ("records in 64 bits", Rule.RING, record(ring=Ring.LONG)),
    ("23 bits of six sites in 24", Rule.HEADROOM, codec(q_bits=30)),
    ("totals beyond 62 bits", Rule.HEADROOM, field(hi=2.0**60)),
    ("too many binary places", Rule.HEADROOM, field(frac=63)),
    ("a sum with noise beyond the ring", Rule.HEADROOM, dp(replace(SITE, scale=1e9))),
    ("records' noise beyond the ring", Rule.HEADROOM, record(replace(RECORD, scale=2.0**28))),
    ("dithered records beyond the ring", Rule.HEADROOM, record(codec=RecordCodec(8, Path.DITHER, 2.0**30, 1000))),
]
"""Each line of section 2 (and of 6 and 7, to which it points), broken alone."""


@pytest.fixture
def sound(consortium: Make, train: Plan, stat: Plan) -> Terms:
    """Six sites; a train plan over any three, and a statistic over all."""
    whole: Terms = consortium(6, (train, replace(stat, m_min=6))).terms
    return whole


def test_sound_terms_break_no_rule(sound: Terms) -> None:
    """Neither those of annex B and of the tests, nor the same under noise."""
    for change in (terms(), halves, dp(), record(), plan(group=1, t=2), plan(m_min=5, t=4)):
        assert rules.broken(change(sound)) == ()
    rules.require(sound)


@pytest.mark.parametrize(("rule", "change"), [pytest.param(rule, change, id=name) for name, rule, change in BROKEN])
def test_i18_each_line_of_the_terms_is_refused_by_itself(sound: Terms, rule: Rule, change: Change) -> None:
    """Broken alone it is the only one told, with a problem and a way out; `require` raises exactly it."""
    broken = change(sound)
    found = rules.broken(broken)
    assert {each.rule for each in found} == {rule}
    assert found[0].problem
    assert found[0].fix
    with pytest.raises(TermsError) as refused:
        rules.require(broken)
    assert refused.value.found == found
    assert refused.value.problem.startswith(found[0].problem)


def test_i18_every_rule_for_all_sites_is_broken_by_some_case() -> None:
    """No rule stands untested; those of the roster as a whole, and a site's own, have tests of their own."""
    apart = {Rule.ROSTER_SIZE, Rule.KEY_TWICE, Rule.C_MAX, Rule.CELL_ORGS, Rule.GROUP_ORGS}
    own = {each for each in Rule if list(Rule).index(each) > list(Rule).index(Rule.HEADROOM)}
    assert {rule for _, rule, _ in BROKEN} | apart | own == set(Rule)


def test_i18_a_roster_has_three_to_a_hundred_sites(consortium: Make) -> None:
    """Two are too few, since each learns the other's; 101 are too many, also in groups."""
    for n in (2, 101):
        found = rules.broken(consortium(n).terms)
        assert (found[0].rule, found[0].problem) == (Rule.ROSTER_SIZE, f"the roster has {n} sites")
    assert Rule.ROSTER_SIZE not in {each.rule for each in rules.broken(consortium(3).terms)}


def test_i18_no_two_parties_share_a_key(sound: Terms) -> None:
    """Neither two sites nor a site and the coordinator."""
    vks = [each.vk for each in sound.roster.members]
    for vk in (vks[1], sound.roster.coordinator_vk):
        assert [each.rule for each in rules.broken(member(0, vk=vk)(sound))] == [Rule.KEY_TWICE]


def test_i18_two_honest_sites_are_left(sound: Terms) -> None:
    """c_max = n - 1 leaves one, whatever else then breaks."""
    assert Rule.C_MAX in {each.rule for each in rules.broken(replace(sound, c_max=5))}
    assert Rule.C_MAX not in {each.rule for each in rules.broken(replace(sound, c_max=4))}


def test_i18_organisations_of_cells_and_groups(sound: Terms) -> None:
    """A cell of two organisations is none; an o_min above a cell's organisations leaves a group without rounds."""
    poor = member(0, org="org1")(halves(sound))
    assert {each.rule for each in rules.broken(poor)} == {Rule.CELL_ORGS}
    assert {each.rule for each in rules.broken(plan(group=1, o_min=4, m_min=4)(halves(sound)))} == {
        Rule.GROUP_SITES,
        Rule.GROUP_ORGS,
    }


def test_i7_the_least_escrow_is_taken_and_one_less_is_not(consortium: Make, train: Plan) -> None:
    """T + m_min = n + c_max + 1 passes and n + c_max does not, for every n to 12 and every c_max."""
    for n in range(3, 13):
        for c_max in range(n - 1):
            for m_min in range(max(3, c_max + 2), n + 1):
                t = n + c_max + 1 - m_min
                if not 2 <= t <= m_min - 1:
                    continue
                whole = consortium(n, (replace(train, m_min=m_min, t=t),), c_max=c_max, g_max=0).terms
                assert rules.broken(whole) == ()
                (found,) = rules.broken(plan(t=t - 1)(whole))
                assert found.rule is Rule.ESCROW


def test_a_statistic_may_be_summed_by_record_in_32_bits(sound: Terms) -> None:
    """Section 7: unit "record" follows the text on differential privacy for every kind."""
    codec = RecordCodec(8, Path.EXACT, 2.0**20, 1000)
    assert rules.broken(stat(churn=Churn.DP, ring=Ring.WORD, words=12, codec=codec, dp=RECORD)(sound)) == ()


def test_many_broken_rules_are_all_told(sound: Terms) -> None:
    """The first in words, how many more in a number."""
    with pytest.raises(TermsError, match="and 1 more"):
        rules.require(plan(rows_min=0, words=5)(sound))


def test_a_field_of_no_width_is_refused(sound: Terms) -> None:
    """It would sum nothing."""
    empty = StatField("age", 0, 8, 0.0, 100.0)
    found = rules.broken(field(width=0)(sound))
    assert {each.rule for each in found} == {Rule.CODEC_VALUES, Rule.WORDS}
    assert empty.width == 0


def test_kinds_are_exact_where_no_noise_is(train: Plan) -> None:
    """Only statistics and evaluations without noise count against the family."""
    assert [replace(train, kind=kind).exact for kind in Kind] == [False, True, True]
    assert not replace(train, kind=Kind.STAT, churn=Churn.DP).exact
