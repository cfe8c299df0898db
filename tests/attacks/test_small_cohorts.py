"""Sums of too few: of a victim and a colluder, or of a victim and one other organisation."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from privacy.secure_aggregation.rostersum.rules import Rule
from privacy.secure_aggregation.rostersum.terms import Churn, Plan, Roster
from tests.attacks.siege import OPEN, Secret, Siege, besiege, less, secret
from tests.privacy.secure_aggregation.rostersum.conftest import consortium_of

VICTIM = 0


def without_colluders(b: Siege, members: Sequence[int], colluders: Sequence[int]) -> Secret | None:
    """A sum over these members, less what the colluders among them have put in."""
    if not all(b.inside(idx) for idx in members):
        return None
    total = b.round(1, 0, members)
    return None if total is None else less(total, b.total(colluders, 1))


def two_hospitals_of_one_bank() -> Roster:
    """Five sites, of which sites 1 and 2 are of one organisation."""
    roster = consortium_of(5).terms.roster
    members = tuple(replace(each, org="bank") if idx in (1, 2) else each for idx, each in enumerate(roster.members))
    return replace(roster, members=members)


CROWDS = {
    "one other site": (partial(besiege, 5, (OPEN,)), (VICTIM, 4), (4,)),
    "one other organisation": (
        partial(besiege, 5, (OPEN,), c_max=1, g_max=1, roster=two_hospitals_of_one_bank()),
        (VICTIM, 1, 2),
        (1, 2),
    ),
}
"""Who besieges, over which set, and who of it colludes."""


@pytest.mark.parametrize("crowd", CROWDS)
def test_a_set_below_the_plans_numbers_is_never_summed(crowd: str, disarm: Callable[..., None]) -> None:
    """m_min counts sites and o_min organisations, each by itself: with two, each learns the other's input."""
    siege, members, colluders = CROWDS[crowd]
    assert without_colluders(siege(), members, colluders) is None
    disarm("_cohort")
    assert without_colluders(siege(), members, colluders) == secret(VICTIM, 1)


PLANS = {
    "of two sites": (replace(OPEN, m_min=2, o_min=2), (VICTIM, 4), (4,)),
    "of two organisations": (replace(OPEN, o_min=2), (VICTIM, 1, 2), (1, 2)),
}
"""A plan, a set that it would allow, and who of the set colludes."""


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_for_sums_of_too_few_is_refused(name: str, overlook: Callable[..., None]) -> None:
    """A job cannot lower the numbers either: whatever it says, three sites of three organisations are the least."""
    plan, members, colluders = PLANS[name]

    def siege(of: Plan = plan) -> Siege:
        return besiege(5, (of,), roster=two_hospitals_of_one_bank())

    assert without_colluders(siege(), members, colluders) is None
    overlook(Rule.M_MIN, Rule.O_MIN)
    assert without_colluders(siege(), members, colluders) == secret(VICTIM, 1)


def test_a_cell_too_small_for_the_colluders_is_refused(overlook: Callable[..., None]) -> None:
    """With two colluders a cell of three is the victim and them: no job has such a cell, and no plan such an m_min."""
    plan = replace(OPEN, churn=Churn.CELLS)

    def siege() -> Siege:
        return besiege(6, (plan,), c_max=2, cells=((0, 1, 2), (3, 4, 5)))

    assert without_colluders(siege(), (0, 1, 2), (1, 2)) is None
    overlook(Rule.M_MIN)
    assert without_colluders(siege(), (0, 1, 2), (1, 2)) is None
    overlook(Rule.CELL_SITES)
    assert without_colluders(siege(), (0, 1, 2), (1, 2)) == secret(VICTIM, 1)
