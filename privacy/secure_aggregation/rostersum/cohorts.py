"""Which set of sites an attempt is over: the largest that a plan's churn rule allows."""

from collections import Counter
from collections.abc import Collection

from privacy.secure_aggregation.rostersum.terms import Churn, Plan, Terms

__all__ = ["Pair", "allowed", "lanes", "largest", "without"]

Pair = tuple[int, int]
"""Two sites, the lower index first."""


def lanes(terms: Terms, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The sites among which each of a step's sums is made: all together, or in group mode each cell by itself (8.8)."""
    return terms.cells if plan.group else (tuple(range(terms.n)),)


def allowed(terms: Terms, plan: Plan, members: tuple[int, ...]) -> bool:
    """Whether an attempt of this plan may be over exactly `members`, ascending (sections 2, 4.2 and 8)."""
    if len(members) < plan.m_min or terms.roster.count_orgs(members) < plan.o_min:
        return False
    if plan.group:
        return members in terms.cells
    return plan.churn is not Churn.CELLS or members == _whole_cells(terms, members)


def largest(terms: Terms, plan: Plan, lane: tuple[int, ...], available: Collection[int]) -> tuple[int, ...]:
    """The largest allowed set of `available` sites of a lane, ascending; empty when there is none."""
    sites = tuple(idx for idx in lane if idx in available)
    members = _whole_cells(terms, sites) if plan.churn is Churn.CELLS else sites
    return members if allowed(terms, plan, members) else ()


def without(sites: Collection[int], pairs: Collection[Pair], counted: Collection[Pair] | None = None) -> frozenset[int]:
    """The sites without one of each of these pairs: the one that stands in more pairs, of `counted` where given.

    Of two with equally many the higher index goes, so that the answer is the same on every run.
    """
    kept = frozenset(sites)
    while inside := [pair for pair in pairs if kept.issuperset(pair)]:
        count = Counter(idx for pair in (inside if counted is None else counted) for idx in pair)
        kept -= {max((count[idx], idx) for pair in inside for idx in pair)[1]}
    return kept


def _whole_cells(terms: Terms, sites: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(idx for cell in terms.cells if set(cell) <= set(sites) for idx in cell))
