"""A vault put back from any older copy comes, with its audit log, to the pins, plans and ledger of the newest."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from client import decisions, restoring, tables
from client.decisions import Grant, Wanted
from federation.audit import Entry
from federation.errors import StorageError
from federation.messages import StepKind
from privacy import ledger
from privacy.differential_privacy.events import EVERY_RECORD, Event, Level, Purpose
from privacy.differential_privacy.events import Unit as Protected
from privacy.ledger import Book, BudgetSet, Charged, Ended, Promised
from privacy.ledger_chain import entry_json
from privacy.secure_aggregation.rostersum import site_events as sums
from privacy.secure_aggregation.rostersum.durable import Charge, Durable, Family, Job, Tombstone
from privacy.secure_aggregation.rostersum.logged import Logged, message_entry, terms_entry
from privacy.secure_aggregation.rostersum.messages import RoundStart, Upload, sign
from privacy.secure_aggregation.rostersum.terms import Churn, Mechanism, Noise, RecordCodec, Unit
from privacy.secure_aggregation.rostersum.terms import Path as Rounding
from tests.client.test_sealed_session import Consortium, World
from tests.privacy.secure_aggregation.rostersum.conftest import STAT, TRAIN, consortium_of, public

NOISY = replace(
    TRAIN,
    plan_id=4,
    churn=Churn.DP,
    codec=RecordCodec(8, Rounding.EXACT, 4096.0, 1000),
    dp=Noise(Unit.RECORD, Mechanism.DDGAUSS, 1.0, 64.0, 1.0, 1e-6, rounds=10),
)
STUDY = consortium_of(3, (TRAIN, STAT, NOISY))
JOB = STUDY.terms.job_hash
VK = public(STUDY.sites[0])
H, T = b"\x11" * 32, b"\x22" * 32
READ = Job(JOB, 0, STUDY.terms.encode(), "hearts", T)
JOINED = (terms_entry(STUDY.terms), decisions.reads(READ))
"""A job was accepted."""


def written(entries: Iterable[tuple[str, bytes]]) -> list[Entry]:
    """As a log has them."""
    return [Entry(line, H, 1.0, kind, content, H) for line, (kind, content) in enumerate(entries, 1)]


def said(plan: int, r: int, a: int = 0, members: Sequence[int] = (0, 1, 2)) -> tuple[tuple[str, bytes], ...]:
    """A ROUND_START, and the UPLOAD that answers it."""
    start = sign(RoundStart(JOB, 1, r, a, plan, tuple(members), H, H, H), STUDY.coordinator)
    upload = sign(Upload(start.ctx, 0, H, H, ()), STUDY.sites[0])
    return message_entry(Logged.RECEIVED, start, None), message_entry(Logged.SENT, upload, None)


def test_whatever_copy_is_put_back_the_log_makes_it_as_new(tmp_path: Path) -> None:
    """After statistics, rounds and evaluations: each state that the site ever had comes to the pins of the last one.

    Nothing of the job can be asked again: it is closed, with all that it has reached.
    """
    world = World(Consortium.found(), tmp_path).attend()
    steps = (StepKind.STATISTICS, StepKind.TRAIN, StepKind.EVALUATE, StepKind.TRAIN)
    for step, kind in enumerate(steps, 1):
        world.round(step, kind).expect_last()
    for agent in world.sites.values():
        last = Durable.decode(agent.disk)
        (job,), (family,) = last.jobs, last.families
        assert all((family.pin, family.table, family.plans))
        vk = agent.member.statement.protocol_key
        copies = [effect.durable for effect in agent.effects if isinstance(effect, sums.Persist)]
        assert len(copies) > 8
        for copy in (Durable(), *copies):
            found = restoring.reentry(copy, Book(), written(agent.audit), vk)
            assert found.durable.families == (family,)
            assert found.durable.closed == (Tombstone(job.job_hash, job.last_r, job.last_a, job.opened_r),)
            assert (found.durable.jobs, found.posted, found.ended) == ((), (), 1)


def test_the_ledger_is_charged_what_it_lacks_and_no_round_twice() -> None:
    """Whatever its attempts, and only for vectors that left."""
    start = said(4, 9)[0]
    log = written((*JOINED, *said(4, 2), *said(4, 3), *said(4, 3, 1, (0, 2, 1)), *said(1, 4), start))
    charge = Charge("hearts", JOB, 2, NOISY, 3, 1)
    second, third = (ledger.charged(replace(charge, r=r)) for r in (2, 3))
    found = restoring.reentry(Durable(), Book((second,)), log, VK)
    assert (found.posted, found.charges) == ((third,), 1)
    assert restoring.reentry(Durable(), Book(), log, VK).posted == (second, third)
    assert found.durable.closed == (Tombstone(JOB, 9, 0, 0),)


def test_a_round_that_was_charged_in_another_attempt_is_paid() -> None:
    """The ledger has the first attempt's noise, over more sites; the log only the upload of a later one."""
    log = written((*JOINED, *said(4, 2, 1)))
    earlier = ledger.charged(Charge("hearts", JOB, 2, NOISY, 4, 1))
    assert restoring.reentry(Durable(), Book((earlier,)), log, VK).posted == ()


LINE = Event(
    b"r", 0, 99, Level.RECORD_SITE, Protected.RECORD, 0.05, 1 << 44, 1, 1 << 40, 100, Purpose.TRAIN, EVERY_RECORD
)
SAID = (
    BudgetSet("hearts", 3.0, 1e-5, 8, reason="first"),
    Promised("hearts", b"r", (LINE,)),
    Charged("hearts", replace(LINE, last_round=4, count=5)),
    Charged("hearts", replace(LINE, first_round=5, last_round=9, count=5)),
    BudgetSet("hearts", 4.0, 1e-5, 8, reason="a second study"),
    BudgetSet("lungs", 1.0, 1e-5, None, reason="first"),
    Ended(b"r"),
)
"""What a site's ledger said for itself, which it writes into its audit log."""


@pytest.mark.parametrize("had", range(len(SAID) + 1))
def test_budgets_and_what_sites_charged_by_themselves_are_entered_again(had: int) -> None:
    """From whatever copy: the ledger comes to the newest budgets, all charges, and no promise that was released."""
    log = written((ledger.AUDITED, json.dumps(entry_json(entry)).encode()) for entry in (*SAID[:3], *SAID[2:]))
    found = restoring.reentry(Durable(), Book(SAID[:had]), log, VK)
    book = Book((*SAID[:had], *found.posted))
    for family in ("hearts", "lungs"):
        assert book.budget(family) == Book(SAID).budget(family)
        assert (book.events(family), book.promises(family)) == (Book(SAID).events(family), ())
    assert book.ended(b"r")
    assert restoring.reentry(Durable(), book, log, VK).posted == ()


def test_what_the_administrator_granted_is_granted_again() -> None:
    """In the order in which it was: a pin that was replaced is not that of the sums before."""
    pinned = written((*JOINED, *said(2, 1)))
    (family,) = restoring.reentry(Durable(), Book(), pinned, VK).durable.families
    assert family == Family("hearts", STUDY.terms.cell_hash(0), T, (STAT.digest,))
    granted = (
        Wanted(Grant.CELL, "hearts", H, "a/a b/b").granted,
        Wanted(Grant.PLAN, "hearts", H, "of job x: age").granted,
        Wanted(Grant.PLAN, "lungs", T, "of job y: age").granted,
        (tables.ACCEPTED, f"hearts {H.hex()} 12".encode()),
    )
    log = written((*JOINED, *said(2, 1), *granted))
    assert restoring.reentry(Durable(), Book(), log, VK).durable.families == (
        Family("hearts", H, H, (STAT.digest, H)),
        Family("lungs", plans=(T,)),
    )
    again = written((*JOINED, *granted, *said(2, 1)))
    assert restoring.reentry(Durable(), Book(), again, VK).durable.families[0].pin == STUDY.terms.cell_hash(0)


def test_what_only_the_copy_knows_stays() -> None:
    """Its closed jobs, its families, and plans that stand in a log before this one."""
    old = Tombstone(T, 5, 0, 5)
    copy = Durable((), (old,), (Family("hearts", H, H, (H,)), Family("lungs", T)))
    found = restoring.reentry(copy, Book(), written((*JOINED, *said(1, 1))), VK).durable
    assert found.closed[0] == old
    assert found.families == (Family("lungs", T), Family("hearts", STUDY.terms.cell_hash(0), H, (H,)))
    assert restoring.reentry(found, Book(), written((*JOINED, *said(1, 1))), VK).ended == 0


UNSAID = {
    "what a job read": ((terms_entry(STUDY.terms), *said(1, 1)), "line 3 .*older release wrote it"),
    "a job's terms": ((decisions.reads(READ), *said(1, 1)), "line 3 .*terms are not in the log"),
    "a ROUND_START": ((*JOINED, said(1, 1)[1]), "line 3 .*a ROUND_START that is not in the log"),
    "a table's digest": (((tables.ACCEPTED, b"hearts xyz 12"),), "line 1 of the audit log cannot be read"),
    "a ledger's entry": (((ledger.AUDITED, b"{}"),), "line 1 of the audit log cannot be read: it is no entry"),
    "the terms' bytes": (((Logged.TERMS.value, b"x"),), "line 1 of the audit log cannot be read"),
}


@pytest.mark.parametrize("case", UNSAID)
def test_a_log_that_does_not_say_enough_is_refused(case: str) -> None:
    """The site could answer again what it has answered: only new keys make it a site that has answered nothing."""
    entries, problem = UNSAID[case]
    with pytest.raises(StorageError, match=rf"{problem}.*\(the site's administrator\): enrol the site anew"):
        restoring.reentry(Durable(), Book(), written(entries), VK)


def test_a_job_that_the_copy_holds_open_says_itself_what_it_reads() -> None:
    """Also where an older release wrote the log."""
    entries = written((terms_entry(STUDY.terms), *said(1, 1)))
    found = restoring.reentry(Durable((READ,)), Book(), entries, VK)
    assert found.durable.families == (Family("hearts", STUDY.terms.cell_hash(0)),)


def test_a_log_of_another_site_is_refused() -> None:
    """It says nothing of this one."""
    with pytest.raises(StorageError, match="it is of a job in which this site is not"):
        restoring.reentry(Durable(), Book(), written((*JOINED, *said(1, 1))), H)
