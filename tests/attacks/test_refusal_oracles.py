"""Refusals and DECLINEs as an oracle: a coordinator that asks about one site's records by what the site does not do."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from privacy.secure_aggregation.rostersum import durable, messages
from privacy.secure_aggregation.rostersum.encoding import DeclineError, TrainCodec
from privacy.secure_aggregation.rostersum.messages import Code, Decline, Epoch, Ready, Refuse
from privacy.secure_aggregation.rostersum.rules import Broken, Rule
from privacy.secure_aggregation.rostersum.site import Site
from privacy.secure_aggregation.rostersum.site_events import Assignment, Effect, Offered, Send
from privacy.secure_aggregation.rostersum.terms import Plan
from tests.attacks.siege import Secret, Siege, besiege, by_records
from tests.privacy.secure_aggregation.rostersum.conftest import TRAIN

VICTIM = 0
VALUE = 0b11101101
"""A number in one of the victim's records: eight bits."""


def answered(b: Siege, kind: type) -> int:
    """How often the victim has said this so far."""
    return len(b.sent(b.effects[VICTIM], kind))


# ------------------------------------------------------------------------------------------------------------ DECLINE


def halved(*, kill: bool) -> int | None:
    """The victim's number, by models that are not finite if it is so large: one DECLINE or READY is one bit.

    `kill`: after each answer the victim's process ends and starts again.
    """
    questions: dict[int, int] = {}

    def overflowing(_: int, asked: Assignment) -> Secret:
        if questions[asked.r] <= VALUE:
            raise DeclineError("the update holds NaN or infinite values")
        return (0,) * 8

    b = besiege(work=overflowing)
    low, high = 0, 256
    for r in count(1):
        if high - low == 1:
            return low
        questions[r] = (low + high) // 2
        before = answered(b, Decline), answered(b, Ready)
        b.order(r, (VICTIM,), model=b"not finite from %d on" % questions[r])
        after = answered(b, Decline), answered(b, Ready)
        if before == after:
            return None
        low, high = (low, questions[r]) if before[0] == after[0] else (questions[r], high)
        if kill:
            b.crash(VICTIM)
            b.say(VICTIM, b.sign(Epoch(b.job_hash, 1)))
    raise AssertionError("unreachable")


@pytest.mark.parametrize("kill", [False, True], ids=["alive", "killed after each"])
def test_the_third_decline_ends_the_questions(kill: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 - a table's column
    """Three DECLINEs for data suspend the job for the administrator, whether or not the site starts again in between.

    Without the limit eight models give the number.
    """
    assert halved(kill=kill) is None
    monkeypatch.setattr(durable, "MOST_DECLINES", 10**6)
    assert halved(kill=kill) == VALUE


def halved_over_jobs() -> int | None:
    """The victim's number, by one such model in each of many jobs on its data."""
    b = besiege(ready=False)
    low, high = 0, 256
    while high - low > 1:
        edge = (low + high) // 2

        def overflowing(_: int, __: Assignment, edge: int = edge) -> Secret:
            if edge <= VALUE:
                raise DeclineError("the update holds NaN or infinite values")
            return (0,) * 8

        job = b.another(edge.to_bytes(16, "big"), work=overflowing)
        job.order(1, (VICTIM,))
        if answered(job, Decline):
            low = edge
        elif answered(job, Ready):
            high = edge
        else:
            return None
    return low


def test_the_third_decline_ends_the_questions_of_other_jobs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is the data's, not the job's: a new job on them is not answered until the administrator has looked."""
    assert halved_over_jobs() is None
    monkeypatch.setattr(durable, "MOST_DECLINES", 10**6)
    assert halved_over_jobs() == VALUE


# ------------------------------------------------------------------------------------------------------------ weights


RECORDS = 2741
"""How many records the victim has."""


def weighed() -> int | None:
    """The victim's number of records, by jobs whose largest weight is chosen for it: does it decline to weigh more?"""
    low, high = 1, 4096
    seen = 0
    b = besiege(ready=False)
    while high - low > 1:
        most = (low + high) // 2
        codec = TrainCodec(0.5, 1.0, 22, "records", 1, most)

        def prepared(idx: int, _: Assignment, codec: TrainCodec = codec) -> Secret:
            codec.prepare(np.zeros(7, "<f4"), RECORDS if idx == VICTIM else 1)
            return (0,) * 8

        job = b.another(most.to_bytes(16, "big"), plans=(by_records(1, most),), work=prepared)
        job.order(1, (VICTIM,))
        declined = answered(job, Decline)
        seen += declined
        low, high = (most, high) if declined else (low, most)
    return high if seen else None


def refusing(codec: TrainCodec, number: int) -> int:
    """A machine that refuses to be cut down."""
    if number > codec.w_max:
        raise DeclineError("this site weighs more than the job allows")
    return number


def test_a_site_that_weighs_more_does_not_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is clipped in silence: a DECLINE would compare it with a number that the coordinator chose.

    (The limit on DECLINEs is off as well: it would end the questions early.)
    """
    assert weighed() is None
    monkeypatch.setattr(durable, "MOST_DECLINES", 10**6)
    monkeypatch.setattr(TrainCodec, "weight_of", refusing)
    assert weighed() == RECORDS


def bisected(plan_of: Callable[[int], Plan], **floor: int) -> int | None:
    """The victim's number of records, by jobs that it accepts or not as it has so many: none has a round."""
    b = besiege(ready=False, floor=floor)
    b.data = replace(b.data, rows=RECORDS)
    low, high, accepted = 11, 1_000_000, 0
    while high - low > 1:
        edge = (low + high) // 2
        job = b.another(edge.to_bytes(16, "big"), plans=(plan_of(edge),))
        inside = job.inside(VICTIM)
        accepted += inside
        low, high = (edge, high) if inside else (low, edge)
    return low if accepted else None


@pytest.mark.parametrize(
    "plan_of", [lambda edge: replace(TRAIN, rows_min=edge), lambda edge: by_records(edge, edge)], ids=["rows", "weight"]
)
def test_a_site_does_not_let_jobs_count_its_records(plan_of: Callable[[int], Plan]) -> None:
    """The job names the number that the site's rows are compared with; the site's own file says how large it may be."""
    assert bisected(plan_of) is None
    assert bisected(plan_of, rows_asked_most=1_000_000) == RECORDS


# ------------------------------------------------------------------------------------------------------------- REFUSE


def reasons() -> set[bytes]:
    """The REFUSEs of one site for different reasons: too few rows, too few of a class, too light, or its own policy."""
    told: set[bytes] = set()
    for rows, rarest, tasks in ((9, 9, True), (10, 4, True), (10, 9, True), (50, 9, False)):
        b = besiege(
            3,
            (by_records(11, 100),),
            ready=False,
            floor={"rows_asked_most": 11, **({} if tasks else {"tasks": frozenset()})},
        )
        b.do(VICTIM, Offered(b.terms, replace(b.data, rows=rows, rarest=rarest)))
        told.update(messages.encode(refuse) for refuse in b.sent(b.effects[VICTIM], Refuse))
    return told


def telling(site: Site, job_hash: bytes, idx: int, found: tuple[Broken, ...]) -> list[Effect]:
    """A machine that says which rule it was."""
    refuse = Refuse(job_hash, list(Rule).index(found[0].rule), 0, idx, Code.E_TERMS, messages.NOBODY, 0, 0, 0)
    return [Send(job_hash, messages.sign(refuse, site._premises.private))]


def test_a_refused_job_is_refused_in_the_same_bytes_whatever_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """E_TERMS has no detail: records that do not suffice look like a policy that does not allow it."""
    assert len(reasons()) == 1
    monkeypatch.setattr(Site, "_not_accepted", telling)
    assert len(reasons()) == 4
