"""A round is charged before anything of it leaves, once, whatever ends the process, and never beyond the budget."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from client import restoring
from client.ledger import SiteLedger
from client.vault import Vault, ledger_in, vault_in, witness_in
from federation.audit import FILE, AuditLog, LogName, entries
from federation.errors import ConfigurationError, LocalProtocolError, PolicyRefused, StorageError
from privacy import ledger
from privacy.differential_privacy.events import EVERY_RECORD, Event, Level, Purpose, Unit
from privacy.ledger import BudgetSet, Charged, Ended, Promised
from privacy.secure_aggregation.rostersum.durable import Charge
from privacy.secure_aggregation.rostersum.messages import Close, Code, Outcome, Upload
from privacy.secure_aggregation.rostersum.rules import Rule
from privacy.secure_aggregation.rostersum.site_events import Accepted, Effect, JobRefused, Offered, Persist, Send
from privacy.secure_aggregation.rostersum.site_events import Event as SiteEvent
from tests.client.test_vault import Cut, Cutting
from tests.privacy.secure_aggregation.rostersum.conftest import Bench, consortium_of, floor_for
from tests.privacy.test_ledger import RECORD, SITE

NAME = LogName("athens", "site")
BUDGET = BudgetSet("hearts", 8.0, 1e-5, None, Unit.SITE, reason="first")
STUDY = consortium_of(5, (SITE,))
JOB = STUDY.terms.job_hash
FAMILY = BudgetSet("hearts", 3.0, 1e-5, 12, reason="first")
LINE = Event(
    b"local", 0, 99, Level.RECORD_SITE, Unit.RECORD, 0.05, 16 << 40, 1, 1 << 40, 100, Purpose.TRAIN, EVERY_RECORD
)
"""A hundred local steps with z = 4."""
NO_SIGKILL = not hasattr(signal, "SIGKILL")


@dataclass
class Kept:
    """A site's home, with its vault and audit log open."""

    home: Path
    vault: Vault
    log: AuditLog
    ledger: SiteLedger

    def said(self) -> list[str]:
        """What the audit log says of the ledger."""
        return [each.content.decode() for each in entries(self.home / FILE) if each.kind == ledger.AUDITED]


def opened(home: Path) -> Kept:
    """A new process."""
    vault = Vault(vault_in(home), witness_in(home))
    log = AuditLog(home / FILE, NAME, 1.0)
    return Kept(home, vault, log, SiteLedger(vault, log))


def closed(kept: Kept) -> None:
    """The process ends."""
    kept.vault.close()
    kept.log.close()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    """A site that never ran."""
    made = opened(tmp_path)
    yield made
    closed(made)


def steps(first: int, last: int, **changes: Any) -> Event:
    """Some steps of the local job."""
    return replace(LINE, first_round=first, last_round=last, count=last - first + 1, **changes)


# --------------------------------------------------------------------------------------------------------- secure sums


class Site0(Bench):
    """A bench whose site 0 has a real ledger and keeps what it must; `kept` may be another process's."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.order: list[Persist | Upload] = []
        super().__init__(STUDY, floor_for(STUDY.terms), None)

    def started(self, idx: int, durable: Any) -> Any:
        """Site 0 asks its own ledger; to the others every round is payable."""
        self.ledger = self.kept.ledger if idx == 0 else Rich()  # type: ignore[assignment] # as much of a ledger as is asked
        return super().started(idx, durable)

    def do(self, idx: int, event: SiteEvent) -> tuple[Effect, ...]:
        """What site 0 wants kept is kept, in order, before what follows leaves."""
        effects = super().do(idx, event)
        for effect in effects if idx == 0 else ():
            if isinstance(effect, Persist):
                self.order.append(effect)
                self.kept.vault.persist(effect)
            elif isinstance(effect, Send) and isinstance(effect.message, Upload):
                self.order.append(effect.message)
        return effects

    def whole(self, r: int, a: int = 0, members: tuple[int, ...] = tuple(range(5)), *, opened: bool = True) -> None:
        """All of a round's attempt, to its RESULT at each member."""
        start = self.open(r, a, members)
        for idx in members:
            self.say(idx, self.result(start.ctx, Outcome.OPENED if opened else Outcome.BURNED))

    def restart(self) -> None:
        """The process of site 0 ends, and a new one comes back with what was durable."""
        closed(self.kept)
        self.kept = opened(self.kept.home)
        self.crash(0, self.kept.vault.durable)


class Rich:
    """A ledger that pays everything."""

    def affords(self, _: Charge) -> bool:
        """It does."""
        return True


def played(kept: Kept) -> Site0:
    """A job's life: two attempts at round 1, round 2 without site 0, a burned round 3, a round 4, and the end."""
    kept.ledger.set_budget(BUDGET)
    bench = Site0(kept)
    bench.accept()
    bench.epoch()
    bench.train(1)
    bench.upload(0, bench.start(1))
    bench.whole(1, 1, (0, 1, 2, 3))
    bench.train(2, sites=(1, 2, 3))
    bench.whole(2, 0, (1, 2, 3))
    for r in (3, 4):
        bench.train(r)
        bench.whole(r, opened=r != 3)
    bench.say(0, bench.sign(Close(JOB)))
    return bench


def test_ledger_crash_points(kept: Kept, tmp_path: Path) -> None:
    """A whole job, cut at each flush point and between any two writes of it: charged iff F3 is durable, once a round.

    No upload leaves before its charge; attempts, burned rounds and the job's end change nothing of it; the round that
    this site was not in is not charged.
    """
    bench = played(kept)
    book = kept.vault.book
    assert (book.rounds("hearts"), book.promises("hearts"), book.ended(JOB)) == (3, (), True)
    paid = [each.entry.event.first_round for each in ledger_in(tmp_path).lines if isinstance(each.entry, Charged)]
    assert paid == [1, 3, 4]

    persists = [each for each in bench.order if isinstance(each, Persist)]
    uploads = [at for at, each in enumerate(bench.order) if isinstance(each, Upload)]
    assert (len(uploads), sum(each.charge is not None for each in persists)) == (4, 3)
    charged = [at for at, each in enumerate(bench.order) if isinstance(each, Persist) and each.charge is not None]
    assert [sum(at < upload for at in charged) for upload in uploads] == [1, 1, 2, 3]

    for last in range(len(persists)):
        for writes in (0, 1, 2, 3, 4):
            home = tmp_path / f"cut-{last}-{writes}"
            again = opened(home)
            again.ledger.set_budget(BUDGET)
            for work in persists[:last]:
                again.vault.persist(work)
            whole = again.vault._connection
            again.vault._connection = Cutting(whole, writes)  # type: ignore[assignment] # a fake of the part that is used
            done = persists[:last]
            try:
                again.vault.persist(persists[last])
                done = persists[: last + 1]
            except Cut:
                if whole.in_transaction:
                    whole.execute("ROLLBACK")
            again.vault._connection = whole
            closed(again)
            found = ledger_in(home).book
            assert found.rounds("hearts") == sum(work.charge is not None for work in done)
            assert found.knows(JOB) == any(work.durable.knows(JOB) for work in done)
            assert found.ended(JOB) == bool(done and done[-1].durable.closed)
            shutil.rmtree(home)


@pytest.mark.parametrize("when", ["before F3", "after F3", "after UPLOAD"])
def test_a_round_that_a_crash_interrupts_is_charged_once(kept: Kept, when: str) -> None:
    """The coordinator opens a later attempt with the same site: still one charge for the round."""
    kept.ledger.set_budget(BUDGET)
    bench = Site0(kept)
    bench.accept()
    bench.epoch()
    bench.train(1)
    if when == "after F3":
        bench.say(0, bench.start(1))
    elif when == "after UPLOAD":
        bench.upload(0, bench.start(1))
    bench.restart()
    assert bench.kept.vault.book.rounds("hearts") == (when != "before F3")
    bench.epoch(1, [0])
    bench.epoch(2)
    bench.train(1, sites=[0])
    bench.upload(0, bench.start(1, 1))
    assert bench.kept.vault.book.rounds("hearts") == 1
    closed(bench.kept)


def test_rounds_are_refused_when_the_budget_was_lowered(kept: Kept) -> None:
    """At TRAIN, before any work is done; the job goes on once it is raised again."""
    kept.ledger.set_budget(BUDGET)
    bench = Site0(kept)
    bench.accept()
    bench.epoch()
    kept.ledger.set_budget(replace(BUDGET, epsilon=0.01, reason="an incident"))
    assert bench.refused(0, bench.ask(1)) is Code.E_LEDGER
    kept.ledger.set_budget(replace(BUDGET, reason="it was none"))
    bench.train(1)
    bench.open(1)
    assert kept.vault.book.rounds("hearts") == 1


def test_rounds_beyond_the_plans_are_refused(kept: Kept) -> None:
    """Whatever the coordinator asks for and the budget has left."""
    kept.ledger.set_budget(replace(BUDGET, epsilon=100.0))
    bench = Site0(kept)
    bench.accept()
    bench.epoch()
    for r in range(1, 11):
        bench.train(r)
        bench.whole(r)
    assert bench.refused(0, bench.ask(11)) is Code.E_LEDGER
    (line,) = kept.vault.book.promises("hearts")[0].lines
    with pytest.raises(PolicyRefused, match="all 10 rounds that the job was promised for train are used"):
        kept.ledger.require(replace(line, first_round=11, last_round=11, count=1))


@pytest.mark.parametrize(
    ("plan", "budget", "message"),
    [
        (SITE, None, "has set no privacy budget for the data family 'hearts'"),
        (SITE, replace(BUDGET, epsilon=0.5), r"would pay [1-9] rounds of this noise, and the job plans 10 \(train\)"),
        (SITE, replace(BUDGET, epsilon=0.01), r"would pay 0 rounds of this noise"),
        (replace(SITE, dp=replace(SITE.dp, scale=1.0)), BUDGET, "noise share of variance"),
        (RECORD, BUDGET, "an event protects one record, which says nothing of one site"),
        (SITE, replace(BUDGET, delta=1e-9), "rounding and sampling would add 1e-09 to the delta = 1e-09"),
    ],
)
def test_a_job_is_refused_in_words(kept: Kept, plan: Any, budget: BudgetSet | None, message: str) -> None:
    """To the machine it is a no, to people a reason and what helps; nothing is written."""
    if budget is not None:
        kept.ledger.set_budget(budget)
    study = consortium_of(5, (plan,))
    found = kept.ledger.refusal(study.terms, "hearts")
    assert found is not None
    assert found.rule is Rule.LEDGER
    assert re.search(message, found.problem)
    assert found.fix
    charge = Charge("hearts", study.terms.job_hash, 0, plan, plan.m_min, 1, plan.dp.rounds)
    assert not kept.ledger.affords(charge)
    bench = Bench(study, floor_for(study.terms), kept.ledger)  # type: ignore[arg-type] # as much of a ledger as is asked
    (refused,) = bench.of(bench.do(0, Offered(study.terms, bench.data)), JobRefused)
    assert [each.rule for each in refused.reasons] == [Rule.LEDGER]
    assert not kept.vault.book.knows(study.terms.job_hash)


def test_an_accepted_job_is_not_asked_again(kept: Kept) -> None:
    """Its promise stands, whatever the budget has become: an offer said again is answered as before."""
    assert kept.ledger.refusal(consortium_of(3).terms, "hearts") is None
    kept.ledger.set_budget(BUDGET)
    assert kept.ledger.refusal(STUDY.terms, "hearts") is None
    bench = Site0(kept)
    bench.accept()
    kept.ledger.set_budget(replace(BUDGET, epsilon=0.01, reason="less"))
    assert kept.ledger.refusal(STUDY.terms, "hearts") is None
    assert bench.of(bench.do(0, Offered(STUDY.terms, bench.data)), Accepted)


def test_jobs_share_one_budget(kept: Kept) -> None:
    """What one was promised, another cannot have: the first whole job leaves too little for the second."""
    kept.ledger.set_budget(replace(BUDGET, epsilon=1.8))
    assert kept.ledger.refusal(STUDY.terms, "hearts") is None
    Site0(kept).accept()
    other = replace(STUDY.terms, job_id=b"o" * 16)
    found = kept.ledger.refusal(other, "hearts")
    assert found is not None
    assert "would pay" in found.problem
    assert kept.ledger.refusal(other, "lungs") is not None


# --------------------------------------------------------------------------------------------------------- record-site


def test_a_local_job_is_reserved_charged_and_closed(kept: Kept) -> None:
    """All of it durable, and in the audit log; closing gives back what was not charged."""
    kept.ledger.set_budget(FAMILY)
    kept.ledger.reserve(b"local", "hearts", (LINE,), added_delta=1e-9)
    kept.ledger.require(steps(0, 9))
    assert kept.ledger.charge(steps(0, 9), added_delta=1e-10)
    assert not kept.ledger.charge(steps(0, 9), added_delta=1e-10)
    assert kept.ledger.charge(steps(10, 19))
    kept.ledger.close(b"local")
    kept.ledger.close(b"local")
    expected = (
        FAMILY,
        Promised("hearts", b"local", (LINE,), 1e-9),
        Charged("hearts", steps(0, 9), 1e-10),
        Charged("hearts", steps(10, 19)),
        Ended(b"local"),
    )
    assert tuple(line.entry for line in ledger_in(kept.home).lines) == expected
    assert len(kept.said()) == len(expected)
    assert kept.ledger.book.rounds("hearts") == 20
    for again in (lambda: kept.ledger.reserve(b"local", "hearts", (LINE,)), lambda: kept.ledger.require(steps(20, 20))):
        with pytest.raises((PolicyRefused, LocalProtocolError)):
            again()


def test_a_local_job_goes_on_after_a_restart(tmp_path: Path) -> None:
    """The same reservation is the same promise, and the same rounds are paid."""
    first = opened(tmp_path)
    first.ledger.set_budget(FAMILY)
    first.ledger.reserve(b"local", "hearts", (LINE,))
    first.ledger.charge(steps(0, 9))
    closed(first)
    second = opened(tmp_path)
    second.ledger.reserve(b"local", "hearts", (LINE,))
    assert not second.ledger.charge(steps(0, 9))
    second.ledger.require(steps(0, 9))
    assert second.ledger.charge(steps(10, 19))
    with pytest.raises(PolicyRefused, match="was promised its rounds before"):
        second.ledger.reserve(b"local", "hearts", (replace(LINE, count=50),))
    assert second.vault.book.rounds("hearts") == 20
    closed(second)


def test_a_local_job_is_refused_before_its_first_round(kept: Kept) -> None:
    """With the number of rounds that could be paid; then that many are."""
    with pytest.raises(PolicyRefused, match="has set no privacy budget for the data family 'hearts'"):
        kept.ledger.reserve(b"local", "hearts", (LINE,))
    kept.ledger.set_budget(FAMILY)
    long = replace(LINE, last_round=99_999, count=100_000)
    with pytest.raises(PolicyRefused, match=r"would pay (\d+) rounds of this noise") as refused:
        kept.ledger.reserve(b"local", "hearts", (long,))
    rounds = int(refused.value.problem.split("would pay ")[1].split(" ")[0])
    kept.ledger.reserve(b"local", "hearts", (replace(long, count=rounds),))
    assert [type(line.entry) for line in ledger_in(kept.home).lines] == [BudgetSet, Promised]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (steps(0, 0, job=b"other"), "that no reservation covers"),
        (steps(100, 100), "that no reservation covers"),
        (steps(0, 0, v=1 << 43), "that no reservation covers"),
        (steps(0, 0, purpose=Purpose.EVALUATION), "that no reservation covers"),
        (steps(40, 60), "rounds 40 to 60 .* were charged before as rounds 50 to 59"),
    ],
)
def test_a_charge_that_was_not_promised_is_a_bug(kept: Kept, event: Event, message: str) -> None:
    """Another job, later rounds, less noise, another purpose, rounds half paid: nothing is written."""
    kept.ledger.set_budget(FAMILY)
    kept.ledger.reserve(b"local", "hearts", (LINE,))
    kept.ledger.charge(steps(50, 59))
    for ask in (kept.ledger.require, kept.ledger.charge):
        with pytest.raises(LocalProtocolError, match=message):
            ask(event)
    assert (len(kept.said()), kept.ledger.book.rounds("hearts")) == (3, 10)


def test_a_local_round_is_refused_when_the_budget_was_lowered(kept: Kept) -> None:
    """Before training, and before the charge."""
    kept.ledger.set_budget(FAMILY)
    kept.ledger.reserve(b"local", "hearts", (LINE,))
    kept.ledger.set_budget(replace(FAMILY, epsilon=0.8, reason="less"))
    for ask in (kept.ledger.require, kept.ledger.charge):
        with pytest.raises(PolicyRefused, match="no further round is charged") as refused:
            ask(steps(0, 0))
    assert "parley site budget set hearts" in refused.value.fix
    assert kept.ledger.book.rounds("hearts") == 0


# ------------------------------------------------------------------------------------------- the administrator's word


def test_a_budget_is_logged_with_its_reason(kept: Kept) -> None:
    """Each change, in the order in which they were decided; the last one holds."""
    kept.ledger.set_budget(FAMILY)
    kept.ledger.set_budget(replace(FAMILY, epsilon=4.0, reason="a second study"))
    told = kept.said()
    assert ['"reason": "first"' in told[0], '"reason": "a second study"' in told[1]] == [True, True]
    assert kept.ledger.book.budget("hearts") == replace(FAMILY, epsilon=4.0, reason="a second study")


@pytest.mark.parametrize("changed", [{"order": None}, {"order": 8}, {"unit": Unit.PERSON}])
def test_rule_and_unit_are_fixed_with_the_first_job(kept: Kept, changed: dict[str, Any]) -> None:
    """Until then they may change; epsilon, delta and rate always may."""
    kept.ledger.set_budget(replace(FAMILY, **changed))
    kept.ledger.set_budget(FAMILY)
    kept.ledger.reserve(b"local", "hearts", (LINE,))
    with pytest.raises(
        ConfigurationError, match="sums by rdp at order 12 for one record, and that is fixed"
    ) as refused:
        kept.ledger.set_budget(replace(FAMILY, **changed))
    assert "--rule rdp --order 12 --unit record" in refused.value.fix
    kept.ledger.set_budget(replace(FAMILY, epsilon=5.0, delta=1e-6, q_most=0.1))
    assert len(kept.said()) == 4


def test_a_budget_that_is_none_is_not_set(kept: Kept) -> None:
    """Neither in the log nor in the ledger."""
    with pytest.raises(ConfigurationError, match=r"epsilon = 0\.0 is no privacy budget"):
        kept.ledger.set_budget(replace(FAMILY, epsilon=0.0))
    assert kept.said() == []
    assert ledger_in(kept.home).lines == ()


# ---------------------------------------------------------------------------------------------------- disks and clocks


def test_a_full_disk_lets_nothing_leave(tmp_path: Path) -> None:
    """A charge that the vault's disk does not take is none; once there is room the round is charged, once."""
    kept = opened(tmp_path)
    kept.ledger.set_budget(FAMILY)
    kept.ledger.reserve(b"local", "hearts", (LINE,))
    (pages,) = kept.vault._connection.execute("PRAGMA page_count").fetchone()
    kept.vault._connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageError, match=r"vault.db has no room on its disk"):
        all(kept.ledger.charge(steps(r, r)) for r in range(100))
    with pytest.raises(StorageError, match="did not take a change, and this process knows more than it"):
        kept.ledger.charge(steps(99, 99))
    closed(kept)
    again = opened(tmp_path)
    paid = again.ledger.book.rounds("hearts")
    assert paid < 100
    assert again.ledger.charge(steps(paid, paid))
    assert again.ledger.book.rounds("hearts") == paid + 1
    closed(again)


def test_a_log_that_takes_nothing_charges_nothing(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the log does not have, a restored site could not enter again."""
    kept.ledger.set_budget(FAMILY)
    kept.ledger.reserve(b"local", "hearts", (LINE,))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(StorageError, match="No space left on device"):
            kept.ledger.charge(steps(0, 0))
    assert kept.ledger.book.rounds("hearts") == 0
    assert kept.ledger.charge(steps(0, 0))


def test_a_clock_that_was_set_back_changes_nothing(tmp_path: Path) -> None:
    """Lines keep their order, and no round is charged again or forgotten."""
    times = iter(range(10_000, 0, -7))
    with (
        Vault(vault_in(tmp_path), witness_in(tmp_path), clock=lambda: float(next(times))) as vault,
        AuditLog(tmp_path / FILE, NAME, 1.0) as log,
    ):
        site = SiteLedger(vault, log, lambda: float(next(times)))
        site.set_budget(FAMILY)
        site.reserve(b"local", "hearts", (LINE,))
        for r in range(5):
            assert site.charge(steps(r, r))
    again = opened(tmp_path)
    assert [again.ledger.charge(steps(r, r)) for r in range(6)] == [False] * 5 + [True]
    closed(again)


def test_a_ledger_copied_back_is_noticed_and_made_whole(tmp_path: Path) -> None:
    """By the vault's witness; what it lacks is entered again from the audit log, and then it serves."""
    home = tmp_path / "home"
    kept = opened(home)
    kept.ledger.set_budget(FAMILY)
    kept.ledger.reserve(b"local", "hearts", (LINE,))
    kept.ledger.charge(steps(0, 9))
    closed(kept)
    shutil.copy(vault_in(home), tmp_path / "backup")
    kept = opened(home)
    kept.ledger.charge(steps(10, 19))
    kept.ledger.set_budget(replace(FAMILY, epsilon=4.0, reason="more"))
    spent = kept.ledger.book.account("hearts")
    closed(kept)
    shutil.copy(tmp_path / "backup", vault_in(home))
    for ask in (lambda: opened(home), lambda: ledger_in(home)):
        with pytest.raises(
            StorageError, match=r"may be an older copy: it has 3 changes where its witness has counted 5"
        ):
            ask()
    with Vault(vault_in(home), witness_in(home), restored=True) as vault:
        found = restoring.reentry(vault.durable, vault.book, entries(home / FILE), b"k" * 32)
        assert found.charges == 1
        vault.reenter(found.durable, found.posted)
    kept = opened(home)
    assert kept.ledger.book.account("hearts") == spent
    assert not kept.ledger.charge(steps(10, 19))
    closed(kept)


# ------------------------------------------------------------------------------------------------------------ processes


PROGRAM = """
import os, signal, sys
from pathlib import Path
import client.vault
from client.vault import Vault
from federation.audit import AuditLog
from privacy.ledger import Book
from tests.client.test_ledger import opened, steps

point = sys.argv[2]
kept = opened(Path(sys.argv[1]))

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name):
    setattr(owner, name, die)

def after(owner, name):
    original = getattr(owner, name)
    def wrapped(*arguments):
        original(*arguments)
        die()
    setattr(owner, name, wrapped)

match point:
    case "before the log": before(AuditLog, "append")
    case "after the log": after(AuditLog, "append")
    case "in the book": after(Book, "post")
    case "in the transaction": after(client.vault.ledger_store, "append")
    case "before the witness": before(client.vault._Count, "update")
    case "after the witness": after(client.vault._Count, "update")
kept.ledger.charge(steps(10, 19))
if point == "before the send":
    die()
print("sent", flush=True)
"""


def ran(home: Path, point: str) -> tuple[int, bytes]:
    """A process that charges a round and sends it, unless it dies at this point."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(home), point],
        capture_output=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    return done.returncode, done.stdout


@pytest.mark.skipif(NO_SIGKILL, reason="this system has no SIGKILL")
@pytest.mark.parametrize(
    ("point", "charged"),
    [
        pytest.param("before the log", 10, marks=pytest.mark.kill),
        pytest.param("after the log", 10, marks=pytest.mark.kill),
        pytest.param("in the book", 10, marks=pytest.mark.kill),
        pytest.param("in the transaction", 10, marks=pytest.mark.kill),
        ("before the witness", 20),
        pytest.param("after the witness", 20, marks=pytest.mark.kill),
        pytest.param("before the send", 20, marks=pytest.mark.kill),
    ],
)
def test_a_process_killed_between_charge_and_send_has_charged_or_sent_nothing(
    tmp_path: Path, point: str, charged: int
) -> None:
    """At each of its writes; the next process goes on with the same round and charges it once in all."""
    kept = opened(tmp_path)
    kept.ledger.set_budget(FAMILY)
    kept.ledger.reserve(b"local", "hearts", (LINE,))
    kept.ledger.charge(steps(0, 9))
    closed(kept)
    assert ran(tmp_path, point) == (-signal.SIGKILL, b"")
    found = ledger_in(tmp_path)
    assert found.broken is None
    assert found.book.rounds("hearts") == charged
    assert ran(tmp_path, "none") == (0, b"sent\n")
    assert ledger_in(tmp_path).book.rounds("hearts") == 20


TOGETHER = """
import sys
from pathlib import Path
from dataclasses import replace
from federation.errors import StorageError
from tests.client.test_ledger import LINE, closed, opened

home, name = Path(sys.argv[1]), sys.argv[2].encode()
line = replace(LINE, job=name, v=LINE.v * 100)
for r in range(8):
    while True:
        try:
            kept = opened(home)
        except StorageError as taken:
            assert "is used by another process" in str(taken), taken
            continue
        break
    kept.ledger.reserve(name, "hearts", (line,))
    assert kept.ledger.charge(replace(line, first_round=r, last_round=r, count=1))
    closed(kept)
"""


def test_two_processes_on_one_data_set_compose(tmp_path: Path) -> None:
    """They take turns: each is refused while the other has the ledger, and no round of either is lost."""
    kept = opened(tmp_path)
    kept.ledger.set_budget(FAMILY)
    closed(kept)
    both = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, str(tmp_path), name], stderr=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        for name in ("a", "b")
    ]
    for each in both:
        _, trouble = each.communicate()
        assert each.returncode == 0, trouble
    found = ledger_in(tmp_path)
    assert found.broken is None
    assert [(event.job, event.count) for event in sorted(found.book.events("hearts"), key=lambda each: each.job)] == [
        (b"a", 8),
        (b"b", 8),
    ]
    line = replace(LINE, v=LINE.v * 100, count=16)
    assert found.book.account("hearts").proved == pytest.approx(FAMILY.budget.rule.proved(FAMILY.budget.cost((line,))))
