"""Group sums, regrouped from round to round: nine sites in threes, by the four classes of lines of an affine plane.

Each two sites are in one group once, so twelve sums of three have one solution: every site's input.
"""

from collections.abc import Callable
from dataclasses import replace

from privacy.secure_aggregation.rostersum.rules import Rule
from privacy.secure_aggregation.rostersum.site_events import Assignment
from tests.attacks.siege import Secret, besiege, isolated, secret
from tests.privacy.secure_aggregation.rostersum.conftest import TRAIN

GROUPED = replace(TRAIN, group=1)

CLASSES = (
    ((0, 1, 2), (3, 4, 5), (6, 7, 8)),
    ((0, 3, 6), (1, 4, 7), (2, 5, 8)),
    ((0, 4, 8), (1, 5, 6), (2, 3, 7)),
    ((0, 5, 7), (1, 3, 8), (2, 4, 6)),
)
"""Four ways to group nine sites; the first is that of the job."""

EVERYBODY = {idx: secret(idx) for idx in range(9)}


def unchanging(idx: int, _: Assignment) -> Secret:
    """An update by a model that hardly moves."""
    return EVERYBODY[idx]


def over_rounds() -> dict[int, Secret]:
    """The groups of one class in each round of one job."""
    b = besiege(9, (GROUPED,), work=unchanging, cells=CLASSES[0])
    opened = {}
    for r, groups in enumerate(CLASSES, 1):
        for members in groups:
            total = b.round(r, 0, members)
            if total is not None:
                opened[frozenset(members)] = total
    return isolated(opened)


def test_groups_are_those_of_the_job(disarm: Callable[..., None]) -> None:
    """The cells stand in job_hash: three sums open, of nine unknowns. With any groups four rounds solve for all."""
    assert over_rounds() == {}
    disarm("_churn")
    assert over_rounds() == EVERYBODY


def over_jobs() -> dict[int, Secret]:
    """The groups of one class in each of four jobs on the same data."""
    b = besiege(9, (GROUPED,), work=unchanging, cells=CLASSES[0])
    opened = {}
    for number, groups in enumerate(CLASSES):
        job = b.another(bytes([number] * 16), cells=groups)
        for members in groups if job.inside(0) else ():
            total = job.round(1, 0, members)
            if total is not None:
                opened[frozenset(members)] = total
    return isolated(opened)


def test_groups_stay_the_same_over_all_jobs(disarm: Callable[..., None], overlook: Callable[..., None]) -> None:
    """A site's cell is pinned to its data: a job with other groups is refused, and so is each of its rounds."""
    assert over_jobs() == {}
    overlook(Rule.PIN)
    assert over_jobs() == {}
    disarm("_pin")
    assert over_jobs() == EVERYBODY
