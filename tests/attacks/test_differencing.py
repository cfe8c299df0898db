"""Sums of unchanging inputs over different sets: whoever is in some and not in others is what is left over.

Three sets that never differ by one site, one after the other, isolate site 4: {0,1,2}, {0,1,3}, {0,1,2,4}.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from privacy.secure_aggregation.rostersum.rules import Rule
from privacy.secure_aggregation.rostersum.site_events import Assignment
from privacy.secure_aggregation.rostersum.terms import Churn
from tests.attacks.siege import Secret, Siege, besiege, isolated, secret
from tests.privacy.secure_aggregation.rostersum.conftest import STAT, TRAIN, consortium_of

CELLS = ((0, 1, 2), (3, 4, 5))
SETS = ((0, 1, 2), (0, 1, 3), (0, 1, 2, 4))
VICTIM = 4


def unchanging(idx: int, _: Assignment) -> Secret:
    """A statistic, or an update by a model that hardly moves: the same each time."""
    return secret(idx)


def table(idx: int, _: Assignment) -> Secret:
    """Three totals of a table."""
    return tuple(abs(each) for each in secret(idx, size=3))


def summed(b: Siege, sets: Sequence[Sequence[int]], plan_id: int = 1, first: int = 1) -> dict[frozenset[int], Secret]:
    """The sums that open, a round for each of these sets."""
    opened = {}
    for r, members in enumerate(sets, first):
        total = b.round(r, 0, members, plan_id=plan_id) if all(b.inside(idx) for idx in members) else None
        if total is not None:
            opened[frozenset(members)] = total
    return opened


# --------------------------------------------------------------------------------------------------------- over rounds


def over_rounds() -> dict[int, Secret]:
    """Each set in a round of its own."""
    b = besiege(6, (TRAIN,), work=unchanging, cells=CELLS)
    return isolated(summed(b, (*SETS, *CELLS)))


def test_sets_over_rounds_isolate_nobody(disarm: Callable[..., None]) -> None:
    """With churn "cells" P is a union of whole cells; whatever else is asked is refused, and no site stands alone."""
    assert over_rounds() == {}
    disarm("_churn")
    assert over_rounds()[VICTIM] == secret(VICTIM)


def over_attempts() -> dict[int, Secret]:
    """Each set in an attempt of one round, which is opened before the next is tried."""
    b = besiege(6, (replace(TRAIN, churn=Churn.OPEN),), work=unchanging)
    opened = {}
    for a, members in enumerate(SETS):
        total = b.round(1, a, members, model=b"model + %d" % a)
        if total is not None:
            opened[frozenset(members)] = total
    return isolated(opened)


def test_sets_over_attempts_isolate_nobody(disarm: Callable[..., None]) -> None:
    """Even where any set may be summed, who has opened a round is in no other sum of it."""
    assert over_attempts() == {}
    disarm("_unopened")
    assert over_attempts()[VICTIM] == secret(VICTIM)


# ---------------------------------------------------------------------------------------------------------- over plans


def over_plans(*, open_sums: bool = False) -> dict[int, Secret]:
    """The whole cells by one plan, and sets that split them by another plan of the same job."""
    loose = replace(TRAIN, plan_id=2, churn=Churn.OPEN)
    floor = {"allow_open": open_sums}
    b = besiege(6, (TRAIN, loose), work=unchanging, cells=CELLS, floor=floor)
    return isolated({**summed(b, CELLS), **summed(b, SETS, plan_id=2, first=10)})


def test_a_second_plan_with_open_sums_needs_the_sites_own_word() -> None:
    """A plan over any set lets sums be subtracted from those of another: no site takes it unless its file says so."""
    assert over_plans() == {}
    assert over_plans(open_sums=True)[VICTIM] == secret(VICTIM)


def over_statistics() -> dict[int, Secret]:
    """A statistic over whole cells, and another that any set may answer."""
    loose = replace(STAT, plan_id=1, churn=Churn.OPEN)
    return isolated(summed(besiege(6, (STAT, loose), work=table, cells=CELLS), SETS))


def test_exact_statistics_over_any_set_are_in_no_job(overlook: Callable[..., None]) -> None:
    """A statistic does not change from round to round: even where open sums are allowed, it is over whole cells."""
    assert over_statistics() == {}
    overlook(Rule.CHURN)
    assert over_statistics()[VICTIM] == tuple(abs(each) for each in secret(VICTIM, size=3))


# ----------------------------------------------------------------------------------------------------------- over jobs


def over_jobs(*, early: bool) -> dict[int, Secret]:
    """A job of all four sites, and one of the same without the last; `early`: both are accepted before either sums."""
    four, three = consortium_of(4).terms.roster, consortium_of(3).terms.roster
    plan = replace(TRAIN, m_min=3)
    rosters = {"rosters": frozenset({four.hash, three.hash})}
    b = besiege(4, (plan,), work=unchanging, floor=rosters)

    def without_the_last() -> Siege:
        return b.another(b"one site less...", roster=three, cells=((0, 1, 2),))

    other = without_the_last() if early else None
    opened = summed(b, ((0, 1, 2, 3),))
    return isolated({**opened, **summed(other or without_the_last(), ((0, 1, 2),))})


@pytest.mark.parametrize("early", [True, False], ids=["both accepted first", "one after the other"])
def test_a_second_job_without_one_site_is_refused(
    early: bool,  # noqa: FBT001 - a table's column
    disarm: Callable[..., None],
    overlook: Callable[..., None],
) -> None:
    """A family's sums stay over one cell, in all jobs: who left would be the difference.

    The pin is asked when a job is accepted, and again at each ROUND_START, where the first job to sum has set it.
    """
    assert over_jobs(early=early) == {}
    overlook(Rule.PIN)
    assert over_jobs(early=early) == {}
    disarm("_pin")
    assert over_jobs(early=early)[3] == secret(3)


# ----------------------------------------------------------------------------------------------------------- rank test


SEVEN = ((0, 1, 2), (3, 4, 5, 6))


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sets(st.integers(0, 6), min_size=3), min_size=1, max_size=6), st.integers(0, 6))
def test_no_history_of_sets_isolates_a_site(sets: list[set[int]], colluder: int) -> None:
    """Rank test: with a colluder's input known, what opens of any sets determines no other site's input.

    The whole cells are always among what is asked, so that something opens.
    """
    b = besiege(7, (replace(TRAIN, m_min=3),), work=unchanging, cells=SEVEN)
    opened = summed(b, [*(sorted(each) for each in sets), *SEVEN])
    assert opened.keys() >= {frozenset(cell) for cell in SEVEN}
    assert isolated({**opened, frozenset({colluder}): secret(colluder)}) == {colluder: secret(colluder)}


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """The cells of a job of the first three to seven sites: one or two, in any mixture."""
    order = draw(st.permutations(range(draw(st.integers(3, 7)))))
    cut = 3 if len(order) >= 6 and draw(st.booleans()) else len(order)
    return tuple(sorted(tuple(sorted(part)) for part in (order[:cut], order[cut:]) if part))


@settings(deadline=None, max_examples=8)
@given(st.lists(partitions(), min_size=2, max_size=4), st.integers(0, 6))
def test_no_history_of_jobs_isolates_a_site(history: list[tuple[tuple[int, ...], ...]], colluder: int) -> None:
    """Rank test over jobs with overlapping rosters and other cells: of each cell and of all its sites is asked."""
    rosters = {n: consortium_of(n).terms.roster for n in range(3, 8)}
    floor = {"rosters": frozenset(each.hash for each in rosters.values())}
    b = besiege(7, work=unchanging, floor=floor, ready=False)
    opened = {}
    for number, cells in enumerate(history):
        everybody = tuple(sorted(idx for cell in cells for idx in cell))
        job = b.another(bytes([number] * 16), roster=rosters[len(everybody)], cells=cells)
        opened.update(summed(job, [*cells, everybody]))
    assert opened.keys() >= {frozenset(cell) for cell in history[0]}
    assert isolated({**opened, frozenset({colluder}): secret(colluder)}) == {colluder: secret(colluder)}


def test_the_rank_test_finds_whom_sets_isolate(disarm: Callable[..., None]) -> None:
    """The same test on machines that sum any set: every site but those who are always together stands alone."""
    disarm("_churn")
    b = besiege(7, (replace(TRAIN, m_min=3),), work=unchanging, cells=SEVEN)
    sets = [(0, 1, 2), (0, 1, 3), (0, 1, 2, 4), (0, 1, 3, 5, 6), (2, 3, 4)]
    found = isolated(summed(b, sets))
    assert found == {idx: secret(idx) for idx in (2, 3, 4)}


def test_the_solver_gives_what_follows_and_no_more() -> None:
    """By itself: {a,b}, {b,c}, {a,c} determine all three; {a,b}, {c,d} none; nothing follows from what is not there."""
    a, b, c = (3, 1), (-5, 2), (7, 7)

    def of(*terms: Secret) -> Secret:
        return tuple(sum(each) for each in zip(*terms, strict=True))

    pairs = {frozenset({0, 1}): of(a, b), frozenset({1, 2}): of(b, c), frozenset({0, 2}): of(a, c)}
    assert isolated(pairs) == {0: a, 1: b, 2: c}
    assert isolated({frozenset({0, 1}): a, frozenset({2, 3}): b}) == {}
    assert isolated({}) == {}
