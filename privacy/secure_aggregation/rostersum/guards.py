"""The guards of TRAIN, ROUND_START and RESCUE at a site, each with its own code, in the order of section 4.2.

A guard is a function of the message, of this site's policy, ledger and protocol state, and never of its records: a
refusal tells nothing of them.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from privacy.secure_aggregation.rostersum.durable import Charge, Family, Job, Record
from privacy.secure_aggregation.rostersum.evidence import GuardError
from privacy.secure_aggregation.rostersum.floor import Floor, Ledger, exact_refusals, too_many_evaluations
from privacy.secure_aggregation.rostersum.keys import SiteKeys
from privacy.secure_aggregation.rostersum.messages import (
    Close,
    Code,
    Epoch,
    Full,
    Rescue,
    Result,
    RoundStart,
    Train,
    verify,
)
from privacy.secure_aggregation.rostersum.rules import Broken
from privacy.secure_aggregation.rostersum.site_events import Assignment
from privacy.secure_aggregation.rostersum.terms import Churn, Kind, Plan, Terms

__all__ = ["LAST_ATTEMPT", "START_GUARDS", "TRAIN_GUARDS", "View", "charge", "passes", "rescuable", "signed"]

LAST_ATTEMPT = 7
"""The largest `a`; a round that needs more attempts is a new round."""

_NO_ARGS = hashlib.sha256(b"").digest()


@dataclass(frozen=True, slots=True)
class View:
    """What guards judge a message by.

    Attributes:
        terms: The job's terms.
        idx: This site's place in the roster.
        job: The job's durable state.
        family: The data family's durable state.
        floor: This site's own limits.
        ledger: Its ledger, if it has one.
        keys: Its keys of this epoch; None until an EPOCH.
        answered: The TRAIN that its update answers, where a ROUND_START may come; else None.
        now: The steady clock.
    """

    terms: Terms
    idx: int
    job: Job
    family: Family
    floor: Floor
    ledger: Ledger | None
    keys: SiteKeys | None
    answered: Assignment | None
    now: float


M = TypeVar("M")


def passes(guards: tuple[Callable[[M, View], None], ...], message: M, view: View) -> None:
    """Returns if all guards let the message pass.

    Raises:
        GuardError: Of the first that does not.
    """
    for guard in guards:
        guard(message, view)


def signed(message: Epoch | Train | RoundStart | Full | Rescue | Result | Close, terms: Terms) -> None:
    """E_SIG unless the coordinator signed it."""
    if not verify(message, terms.roster.coordinator_vk):
        raise GuardError(Code.E_SIG, f"the coordinator did not sign this {message.TAG}")


def charge(view: View, plan: Plan, r: int, members: int) -> Charge | None:
    """What the ledger is charged for round r: nothing for a plan without noise, and once whatever its attempts."""
    if plan.churn is not Churn.DP or r == view.job.last_r:
        return None
    return Charge(view.job.family, view.job.job_hash, r, plan, members, view.terms.c_max)


# --------------------------------------------------------------------------------------------- TRAIN and ROUND_START


def _signature(message: Train | RoundStart, view: View) -> None:
    signed(message, view.terms)


def _epoch(message: Train | RoundStart, view: View) -> None:
    if message.job_hash != view.job.job_hash or message.epoch != view.job.epoch or view.keys is None:
        raise GuardError(Code.E_EPOCH, "it is of another job or epoch, or this process has no keys yet")


def _suspended(_: Train, view: View) -> None:
    if view.job.suspended or view.family.waits:
        raise GuardError(Code.E_STATE, "the job waits for this site's administrator")


def _one_plan(message: Train | RoundStart, view: View) -> None:
    if message.r == view.job.last_r and message.plan_id != view.job.last_plan:
        raise GuardError(Code.E_REPLAY, f"round {message.r} was begun with another plan")


def _unopened(message: Train | RoundStart, view: View) -> None:
    if message.r <= view.job.opened_r:
        raise GuardError(Code.E_REPLAY, f"this site has opened round {view.job.opened_r}")


def _plan(message: Train | RoundStart, view: View) -> Plan:
    plan = view.terms.plan(message.plan_id)
    if plan is None:
        raise GuardError(Code.E_TERMS, f"the job has no plan {message.plan_id}")
    return plan


def _exact(message: Train | RoundStart, view: View) -> None:
    """S3 to S5, and S2's empty arguments."""
    plan, job = _plan(message, view), view.job
    if plan.kind is Kind.STAT and message.args_hash != _NO_ARGS:
        raise GuardError(Code.E_TERMS, "statistics take no arguments")
    _allowed(exact_refusals(view.floor, (plan,), view.family, job.table))
    evaluation = plan.kind is Kind.EVAL and plan.exact and message.r != job.last_r
    if evaluation and too_many_evaluations(view.terms, job):
        raise GuardError(Code.E_TERMS, "the job has had an exact evaluation for each train round and one more")


def _allowed(found: tuple[Broken, ...]) -> None:
    if found:
        raise GuardError(Code.E_TERMS, found[0].problem)


def _payable(message: Train | RoundStart, view: View, members: int) -> None:
    plan = _plan(message, view)
    due = charge(view, plan, message.r, members)
    if due is None:
        return
    used_up = plan.dp is None or view.job.count(plan.plan_id) >= plan.dp.rounds
    if used_up or view.ledger is None or not view.ledger.affords(due):
        raise GuardError(Code.E_LEDGER, f"the ledger does not pay another round of plan {plan.plan_id}")


# ------------------------------------------------------------------------------------------------------------- TRAIN


def _not_older(message: Train, view: View) -> None:
    if message.r < view.job.last_r:
        raise GuardError(Code.E_REPLAY, f"round {message.r} is older than round {view.job.last_r}")


def _floor(message: Train | RoundStart, view: View) -> None:
    floor = view.floor
    if view.job.family not in floor.families:
        raise GuardError(Code.E_TERMS, "this site does not open the job's data family any more")
    _allowed((*floor.of_terms(view.terms), *floor.of_plan(_plan(message, view))))


def _affordable(message: Train, view: View) -> None:
    _payable(message, view, _plan(message, view).m_min)


TRAIN_GUARDS: tuple[Callable[[Train, View], None], ...] = (
    _signature,
    _epoch,
    _suspended,
    _not_older,
    _unopened,
    _one_plan,
    _floor,
    _exact,
    _affordable,
)
"""What a TRAIN passes, in this order."""


# -------------------------------------------------------------------------------------------------------- ROUND_START


def _answers(message: RoundStart, view: View) -> None:
    asked = Assignment(message.r, message.plan_id, message.model_hash, message.args_hash)
    if view.answered != asked:
        raise GuardError(Code.E_STATE, f"this site has no update for this TRAIN of round {message.r}")


def _fresh(message: RoundStart, view: View) -> None:
    if (message.r, message.a) <= view.job.last or message.a > LAST_ATTEMPT:
        raise GuardError(Code.E_REPLAY, f"attempt {(message.r, message.a)} is not after {view.job.last}")


def _set(message: RoundStart, view: View) -> None:
    members, roster = message.members, view.terms.roster.members
    ascending = all(earlier < later for earlier, later in pairwise(members))
    if not ascending or view.idx not in members or members[-1] >= len(roster):
        raise GuardError(Code.E_SET, f"{list(members)} is no ascending set of the roster with this site")
    revoked = next((member for member in members if roster[member].vk in view.floor.revoked), None)
    if revoked is not None:
        raise GuardError(Code.E_SET, f"site {revoked} was revoked", revoked)


def _cohort(message: RoundStart, view: View) -> None:
    plan, sites = _plan(message, view), len(message.members)
    orgs = view.terms.roster.count_orgs(message.members)
    if sites < plan.m_min or orgs < plan.o_min:
        problem = f"{sites} sites of {orgs} organisations are fewer than {plan.m_min} of {plan.o_min}"
        raise GuardError(Code.E_COHORT, problem)


def _churn(message: RoundStart, view: View) -> None:
    plan, members = _plan(message, view), set(message.members)
    if plan.churn is not Churn.CELLS:
        return
    whole = [cell for cell in view.terms.cells if members.issuperset(cell)]
    if members != {idx for cell in whole for idx in cell}:
        raise GuardError(Code.E_CHURN, f"{list(message.members)} is no union of whole cells")
    if plan.group and len(whole) != 1:
        raise GuardError(Code.E_CHURN, "a group is exactly one cell")


def _pin(message: RoundStart, view: View) -> None:
    exact = _plan(message, view).churn is Churn.CELLS
    if exact and view.family.pin not in (b"", view.terms.cell_hash(view.idx)):
        raise GuardError(Code.E_PIN, "this data family's sums were over another cell")


def _keyset(message: RoundStart, view: View) -> None:
    if view.keys is None or view.keys.keyset(message.members) != message.keyset:
        raise GuardError(Code.E_KEYSET, "this site knows other keys of these members, or not all of them")


def _key_age(_: RoundStart, view: View) -> None:
    if view.keys is None or view.keys.spent(view.now):
        raise GuardError(Code.E_KEYAGE, "this site's keys have served their time; begin a new epoch")


def _ledger(message: RoundStart, view: View) -> None:
    _payable(message, view, len(message.members))


START_GUARDS: tuple[Callable[[RoundStart, View], None], ...] = (
    _signature,
    _epoch,
    _answers,
    _fresh,
    _unopened,
    _one_plan,
    _set,
    _cohort,
    _churn,
    _pin,
    _keyset,
    _key_age,
    _ledger,
    _floor,
    _exact,
)
"""What a ROUND_START passes, in this order.

The last two stand behind those of the text: between TRAIN and here the site's floor may have changed, or another job
may have used up the family's exact plans.
"""


# -------------------------------------------------------------------------------------------------------------- RESCUE


def rescuable(message: Rescue, record: Record | None, idx: int) -> Record:
    """The record that answers this RESCUE.

    Raises:
        GuardError: There is none, its shares are erased, or the members asked for are not a set it may name (E_RESCUE).
    """
    missing = message.missing
    if record is None or record.ctx != message.ctx or record.t == 0 or not record.shares:
        raise GuardError(Code.E_RESCUE, "this site holds no shares of that attempt")
    ascending = all(earlier < later for earlier, later in pairwise(missing))
    others = set(record.members) - {idx}
    if not ascending or not others.issuperset(missing) or not 1 <= len(missing) <= len(record.members) - record.t:
        raise GuardError(Code.E_RESCUE, f"{list(missing)} is no set whose shares may be asked for")
    return record
