"""Statistics that are of one record: tables with too few rows, a table that grew by one, questions that single out.

The sites' tables are numbers, one for each patient: an age. The attacker is after the age of the oldest.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from privacy.secure_aggregation.rostersum import floor, guards
from privacy.secure_aggregation.rostersum.rules import Rule
from privacy.secure_aggregation.rostersum.site_events import Assignment, Offered
from privacy.secure_aggregation.rostersum.terms import FieldsCodec, StatField
from tests.attacks.siege import Secret, besiege, less, secret
from tests.privacy.secure_aggregation.rostersum.conftest import STAT

OLDEST = 101
AGES = ((44, 51, OLDEST, 63), (38, 80, 72), (29, 55, 66, 47, 90))
"""The patients of three sites."""


# -------------------------------------------------------------------------------------------------------- S1, few rows


def rare(idx: int, _: Assignment) -> Secret:
    """The sums of three columns over the rows of the rare class: the victim has one such row, the others none."""
    return RECORD if idx == 0 else (0, 0, 0)


RECORD = tuple(abs(each) for each in secret(7, size=3))


def of_the_rare_class(rarest: Sequence[int], rows: Sequence[int]) -> Secret | None:
    """The sums over the rows of one class, of sites with so many rows of it, and in all."""
    b = besiege(3, (STAT,), work=rare, ready=False)
    for idx in range(3):
        data = replace(b.data, rows=rows[idx], rarest=rarest[idx])
        b.do(idx, Offered(b.terms, data))
    if not all(b.inside(idx) for idx in range(3)):
        return None
    b.epoch()
    return b.round(1, plan_id=2)


@pytest.mark.parametrize(
    ("rarest", "rows"), [((1, 0, 0), (20, 20, 20)), ((5, 5, 5), (1, 20, 20))], ids=["classes", "rows"]
)
def test_a_site_with_a_handful_of_rows_is_in_no_sum(
    rarest: tuple[int, ...], rows: tuple[int, ...], overlook: Callable[..., None]
) -> None:
    """With fewer than ten rows, or five of each class, a site does not join; else a sum can be of one record."""
    assert of_the_rare_class(rarest, rows) is None
    overlook(Rule.DATA_ROWS, Rule.DATA_CLASSES)
    assert of_the_rare_class(rarest, rows) == RECORD


# -------------------------------------------------------------------------------------------------- S5, a changed table


def grown() -> Secret | None:
    """A statistic before and after one record came to the victim's table: what lies between the sums of two jobs."""
    b = besiege(3, (STAT,), work=before)
    first = b.round(1, plan_id=2)
    b.data = replace(b.data, table=NEW)
    later = b.another(b"one record later", work=after)
    return less(later.round(1, plan_id=2), first) if later.inside(0) else None


NEW = hashlib.sha256(b"the table and one record").digest()


def before(idx: int, _: Assignment) -> Secret:
    """What a site's table comes to at first."""
    return tuple(abs(each) for each in secret(idx, size=3))


def after(idx: int, asked: Assignment) -> Secret:
    """What it comes to when the record is there."""
    return tuple(a + b for a, b in zip(before(idx, asked), rare(idx, asked), strict=True))


def test_a_table_that_grew_by_a_record_does_not_show_it(overlook: Callable[..., None]) -> None:
    """Exact statistics stay on one version of a table: the difference of two versions' sums is the new record."""
    assert grown() is None
    overlook(Rule.TABLE)
    assert grown() == RECORD


# -------------------------------------------------------------------------------------------- S2, S3, narrow questions

FROM = {hashlib.sha256(b"%d" % age).digest(): age for age in range(128)}
"""Arguments of a statistic that an attacker would like: the age from which patients are counted."""

COUNT = FieldsCodec((StatField("n", 1, 0, 0.0, 1e6),))


def older(idx: int, age: int) -> Secret:
    """How many patients of a site are at least so old."""
    return (sum(each >= age for each in AGES[idx]),)


def by_arguments() -> int | None:
    """The largest age that anybody has reached, by halving, from counts whose threshold comes with the question."""
    plan = replace(STAT, codec=COUNT, words=5)
    b = besiege(3, (plan,), work=lambda idx, asked: older(idx, FROM[asked.args_hash]))
    low, high = 0, 128
    for r in range(1, 8):
        age = (low + high) // 2
        total = b.round(r, plan_id=2, args=b"%d" % age)
        if total is None:
            return None
        low, high = (age, high) if total[0] else (low, age)
    return low


def no_arguments_asked(message: Any, view: Any, exact: Callable[..., None] = guards._exact) -> None:
    """The guard of exact sums without its question for arguments."""
    exact(replace(message, args_hash=hashlib.sha256(b"").digest()), view)


def test_a_statistic_takes_no_predicate(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted is installed code over the whole table; by a threshold from outside seven counts find one."""
    assert by_arguments() is None
    for table in ("TRAIN_GUARDS", "START_GUARDS"):
        held = getattr(guards, table)
        monkeypatch.setattr(
            guards, table, tuple(no_arguments_asked if each is guards._exact else each for each in held)
        )
    assert by_arguments() == OLDEST


MOST = 2741
"""The largest value of a laboratory test at any site: twelve bits."""


def reached(edge: int, idx: int, _: Assignment) -> Secret:
    """How many values of a site are at least at the edge: only site 0 has large ones."""
    return (int(idx == 0 and edge <= MOST),)


def by_plans(exact_plans: int) -> int | None:
    """The largest value, by halving, from histograms of two bins: another edge each time, so another plan and job."""
    low, high = 0, 4096
    b = besiege(3, (STAT,), floor={"exact_plans": exact_plans}, ready=False)
    while high - low > 1:
        edge = (low + high) // 2
        plan = replace(STAT, codec=FieldsCodec((StatField(f"from{edge}", 1, 0, 0.0, 1e6),)), words=5)
        job = b.another(edge.to_bytes(16, "big"), plans=(plan,), work=partial(reached, edge))
        total = job.round(1, plan_id=2) if job.inside(0) else None
        if total is None:
            return None
        low, high = (edge, high) if total[0] else (low, edge)
    return low


def test_eight_questions_do_not_find_a_value_of_twelve_bits() -> None:
    """A family answers eight different exact statistics, ever, over all jobs; without the limit twelve find a value."""
    assert by_plans(floor.EXACT_PLANS) is None
    assert by_plans(10**6) == MOST
