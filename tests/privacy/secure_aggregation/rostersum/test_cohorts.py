from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.secure_aggregation.rostersum.cohorts import allowed, lanes, largest, without
from privacy.secure_aggregation.rostersum.terms import Churn, Member, Plan

CELLS = ((0, 1, 2), (3, 4, 5, 6))


def test_a_sum_is_made_among_all_sites_or_in_each_cell(consortium: Callable[..., Any], train: Plan) -> None:
    """Group mode has a sum for each cell; every other plan has one."""
    terms = consortium(7, cells=CELLS).terms

    assert lanes(terms, train) == (tuple(range(7)),)
    assert lanes(terms, replace(train, group=1)) == CELLS


@pytest.mark.parametrize(
    ("churn", "group", "available", "expected"),
    [
        (Churn.CELLS, 0, range(7), tuple(range(7))),
        (Churn.CELLS, 0, (0, 1, 2, 3, 4, 6), (0, 1, 2)),
        (Churn.CELLS, 0, (1, 2, 3, 4, 5, 6), (3, 4, 5, 6)),
        (Churn.CELLS, 0, (0, 1, 3, 4, 5), ()),
        (Churn.DP, 0, (0, 2, 3, 6), (0, 2, 3, 6)),
        (Churn.OPEN, 0, (0, 2, 6), (0, 2, 6)),
        (Churn.OPEN, 0, (0, 2), ()),
    ],
)
def test_the_largest_set_that_the_churn_rule_allows(
    consortium: Callable[..., Any],
    train: Plan,
    churn: Churn,
    group: int,
    available: tuple[int, ...],
    expected: tuple[int, ...],
) -> None:
    """Whole cells under `cells`, anybody else where m_min are there; nobody when that is impossible."""
    terms, plan = consortium(7, cells=CELLS).terms, replace(train, churn=churn, group=group)

    assert largest(terms, plan, tuple(range(7)), available) == expected


def test_a_group_is_exactly_one_cell(consortium: Callable[..., Any], train: Plan) -> None:
    """In group mode a cell without one of its sites has no set, and two cells together are none."""
    terms, plan = consortium(7, cells=CELLS).terms, replace(train, group=1)

    assert largest(terms, plan, CELLS[1], range(7)) == CELLS[1]
    assert largest(terms, plan, CELLS[1], (0, 1, 2, 3, 4, 5)) == ()
    assert not allowed(terms, plan, tuple(range(7)))


def test_organisations_are_counted_as_sites_are(consortium: Callable[..., Any], train: Plan) -> None:
    """I11: three sites of two organisations are no set where three organisations are asked for."""
    terms = consortium(4).terms
    shared = replace(terms.roster.members[1], org=terms.roster.members[0].org)
    members = (terms.roster.members[0], shared, *terms.roster.members[2:])
    terms = replace(terms, roster=replace(terms.roster, members=members))
    plan = replace(train, churn=Churn.OPEN)

    assert not allowed(terms, plan, (0, 1, 2))
    assert allowed(terms, plan, (0, 2, 3))
    assert isinstance(shared, Member)


def test_the_site_with_more_failing_pairs_is_left_out() -> None:
    """Site 2 fails with two others: it goes, and both others stay."""
    assert without(range(4), {(0, 2), (1, 2)}) == {0, 1, 3}


def test_other_failing_pairs_decide_between_two() -> None:
    """The pair (0, 3) must part; 0 also failed with 1 before, so 0 goes although its index is lower."""
    assert without(range(4), {(0, 3)}, {(0, 3), (0, 1)}) == {1, 2, 3}
    assert without(range(4), {(0, 3)}) == {0, 1, 2}


@settings(deadline=None, max_examples=50)
@given(st.sets(st.sampled_from(list(combinations(range(6), 2)))))
def test_no_failing_pair_stays_together(pairs: set[tuple[int, int]]) -> None:
    """Whatever fails, nobody who is in no failing pair is left out."""
    kept = without(range(6), pairs)

    assert not [pair for pair in pairs if kept.issuperset(pair)]
    assert kept >= frozenset(range(6)) - {idx for pair in pairs for idx in pair}
