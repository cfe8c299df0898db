"""A site's own limits, which no message changes, and what they refuse of a job or a plan (sections 2, 8.4, 8.5)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from privacy.secure_aggregation.rostersum.durable import Charge, Durable, Family, Job
from privacy.secure_aggregation.rostersum.rules import Broken, Rule
from privacy.secure_aggregation.rostersum.terms import Churn, Kind, Plan, Terms, TrainCodec, Weighting

__all__ = [
    "EXACT_PLANS",
    "ROWS_OF_EACH_CLASS",
    "Data",
    "Floor",
    "Ledger",
    "exact_refusals",
    "job_refusals",
    "too_many_evaluations",
]

EXACT_PLANS = 8
"""S3: distinct exact statistics that one data family answers, ever."""

ROWS_OF_EACH_CLASS = 5
"""S1: rows of each class without which a site does not join, unless its own file says another number."""

_ASK = "ask this site's administrator whether the floor may change"
_CLASS_FIX = (
    "do not join, or join with more data; or this site's administrator may lower rows_of_each_class in the policy's "
    "[secure_aggregation], and gives away by it that whoever knows the other sites' counts of a class learns that a "
    "handful of rows of it, or none, are here"
)


class Ledger(Protocol):
    """What a site has spent of its privacy, and whether more can be paid. It is charged with `Persist`, not here."""

    def affords(self, charge: Charge) -> bool:
        """Whether the family's budget pays the charge, its epsilon computed by this site from the plan itself."""
        ...


@dataclass(frozen=True, slots=True)
class Data:
    """What this site would bring to a job, checked once, when its administrator approves it.

    Attributes:
        family: The administrator's word for the tables that share records.
        table: SHA-256 that names the table's version.
        rows: Rows to train on.
        test_rows: Rows of the fixed test split.
        rarest: Rows of the rarest class; None where there are no classes.
    """

    family: str
    table: bytes
    rows: int
    test_rows: int = 0
    rarest: int | None = None


@dataclass(frozen=True, slots=True)
class Floor:
    """A site's own limits: a local file.

    Attributes:
        c_max: Colluding sites that a job must bear.
        g_max: Organisations of theirs that a job must bear.
        rosters: Digests of the rosters that people compared.
        tasks: Digests of the installed tasks that may run.
        families: Data families that may be read.
        churns: Kinds of sums, and who may be missing from each.
        rows_min: The least that a plan's `rows_min` may be.
        rows_asked_most: The most rows that a plan may ask for, where that is more than `rows_min`: this site's number
            is compared with no larger one. Who may choose what it is compared with, job by job, finds it by halving.
        rows_of_each_class: Rows of each class that this site must have to join (S1). It is of this site's table alone,
            so no plan names it and no message tells it.
        allow_open: Whether sums may be such that subtracting them shows this site's update.
        declared: This site's public weight, for plans of weighting "declared".
        exact_plans: Distinct exact statistics of one family.
        drift_max: How far a model may move in a round (largest difference of a weight); None: not watched.
        revoked: Keys of members that the consortium revoked.
    """

    c_max: int
    g_max: int
    rosters: frozenset[bytes]
    tasks: frozenset[bytes]
    families: frozenset[str]
    churns: frozenset[tuple[Kind, Churn]] = frozenset(
        {(Kind.TRAIN, Churn.CELLS), (Kind.STAT, Churn.CELLS), (Kind.EVAL, Churn.CELLS)}
    )
    rows_min: int = 10
    rows_asked_most: int = 10
    rows_of_each_class: int = ROWS_OF_EACH_CLASS
    allow_open: bool = False
    declared: int = 1
    exact_plans: int = EXACT_PLANS
    drift_max: float | None = None
    revoked: frozenset[bytes] = field(default=frozenset())

    def of_terms(self, terms: Terms) -> "_Found":
        """What these limits refuse of a job as a whole."""
        if terms.c_max < self.c_max:
            problem = f"the job bears {terms.c_max} colluding sites, this site asks for {self.c_max}"
            yield Broken(Rule.FLOOR_C_MAX, problem, _ASK)
        if terms.g_max < self.g_max:
            problem = f"the job bears {terms.g_max} colluding organisations, this site asks for {self.g_max}"
            yield Broken(Rule.FLOOR_G_MAX, problem, _ASK)
        if terms.roster.hash not in self.rosters:
            fix = "let people compare the roster's digest out of band, then add it to the site's policy"
            yield Broken(Rule.FLOOR_ROSTER, f"the roster {terms.roster.hash.hex()} is not one that was compared", fix)

    def of_plan(self, plan: Plan) -> "_Found":
        """What these limits refuse of one plan."""
        name = f"plan {plan.plan_id}"
        allowed = {churn for kind, churn in self.churns if kind is plan.kind}
        if not allowed:
            yield Broken(Rule.FLOOR_KIND, f"{name}: this site takes part in no sums of kind {plan.kind}", _ASK)
        elif plan.churn not in allowed:
            yield Broken(Rule.FLOOR_CHURN, f"{name}: this site allows {plan.kind} no churn {plan.churn}", _ASK)
        if plan.churn is Churn.OPEN and not self.allow_open:
            problem = f"{name}: sums that can be subtracted are not allowed here (allow_open)"
            yield Broken(Rule.FLOOR_OPEN, problem, _ASK)
        if plan.task_digest not in self.tasks:
            problem = f"{name}: no installed and allowed task has the digest {plan.task_digest.hex()}"
            yield Broken(Rule.FLOOR_TASK, problem, "install the release that holds the task, then allow it")
        if plan.rows_min < self.rows_min:
            problem = f"{name}: rows_min = {plan.rows_min}, this site asks for {self.rows_min}"
            yield Broken(Rule.FLOOR_ROWS, problem, _ASK)
        if not self.answers(plan):
            problem = (
                f"{name}: asks for {_rows_asked(plan)} rows or more; here no job may ask for that (rows_asked_most)"
            )
            yield Broken(Rule.FLOOR_ROWS, problem, _ASK)

    def answers(self, plan: Plan) -> bool:
        """Whether this site compares its rows with the number that the plan asks for."""
        return _rows_asked(plan) <= max(self.rows_min, self.rows_asked_most)


_Found: TypeAlias = Iterator[Broken]


def _rows_asked(plan: Plan) -> int:
    """The largest number with which a site's rows are compared before it joins."""
    if isinstance(plan.codec, TrainCodec) and plan.codec.weighting is Weighting.RECORDS:
        return max(plan.rows_min, plan.codec.w_min)
    return plan.rows_min


def job_refusals(
    floor: Floor, terms: Terms, idx: int, data: Data, durable: Durable, ledger: Ledger | None
) -> tuple[Broken, ...]:
    """Why this site does not accept the job, none if it does; that the terms break no rule is asked before."""
    return tuple(_job_refusals(floor, terms, idx, data, durable, ledger))


def _job_refusals(floor: Floor, terms: Terms, idx: int, data: Data, durable: Durable, ledger: Ledger | None) -> _Found:
    family = durable.family(data.family)
    if durable.knows(terms.job_hash):
        yield Broken(Rule.JOB_KNOWN, "this job was accepted before; it is never accepted twice", "draw a new job_id")
    yield from floor.of_terms(terms)
    if data.family not in floor.families:
        yield Broken(Rule.FLOOR_FAMILY, f"this site does not open its data family {data.family!r}", _ASK)
    if family.pin not in (b"", terms.cell_hash(idx)) and any(plan.churn is Churn.CELLS for plan in terms.plans):
        yield Broken(
            Rule.PIN,
            f"exact sums of {data.family!r} were over another cell: subtracting them would expose who left or came",
            "keep the old cell, use churn dp, or ask the administrator for a logged re-cell",
        )
    for plan in terms.plans:
        yield from floor.of_plan(plan)
        yield from _data(floor, plan, data)
        if plan.churn is Churn.DP and not _affordable(terms, plan, data, ledger):
            problem = f"plan {plan.plan_id}: the ledger does not pay {plan.dp.rounds if plan.dp else 0} rounds of it"
            yield Broken(Rule.LEDGER, problem, "plan fewer rounds or more noise, or ask for a larger budget")
    yield from exact_refusals(floor, terms.plans, family, data.table)


def _affordable(terms: Terms, plan: Plan, data: Data, ledger: Ledger | None) -> bool:
    if ledger is None or plan.dp is None:
        return False
    charge = Charge(data.family, terms.job_hash, 0, plan, plan.m_min, terms.c_max, plan.dp.rounds)
    return ledger.affords(charge)


def _data(floor: Floor, plan: Plan, data: Data) -> _Found:
    if not floor.answers(plan):
        return  # not even by another refusal
    name = f"plan {plan.plan_id}"
    rows = data.test_rows if plan.kind is Kind.EVAL else data.rows
    if rows < plan.rows_min:
        problem = f"{name}: this site has too few rows (fewer than {plan.rows_min})"
        yield Broken(Rule.DATA_ROWS, problem, "do not join, or join with more data")
    if data.rarest is not None and data.rarest < floor.rows_of_each_class:
        problem = f"{name}: a class has fewer than {floor.rows_of_each_class} rows here"
        yield Broken(Rule.DATA_CLASSES, problem, _CLASS_FIX)
    if isinstance(plan.codec, TrainCodec):
        weights = {Weighting.UNIFORM: plan.codec.w_max, Weighting.DECLARED: floor.declared, Weighting.RECORDS: rows}
        if weights[plan.codec.weighting] < plan.codec.w_min:
            problem = f"{name}: this site's weight is below w_min = {plan.codec.w_min}"
            yield Broken(Rule.DATA_WEIGHT, problem, "do not join, or lower w_min in the job")


def exact_refusals(floor: Floor, plans: tuple[Plan, ...], family: Family, table: bytes) -> tuple[Broken, ...]:
    """S3 and S5: why a family that has answered so much already does not answer these plans on this table version."""
    found: list[Broken] = []
    asked = {plan.digest for plan in plans if plan.exact and plan.kind is Kind.STAT}
    if len(asked | set(family.plans)) > floor.exact_plans and not asked <= set(family.plans):
        problem = f"{family.name!r} has answered {len(family.plans)} exact statistics of at most {floor.exact_plans}"
        found.append(Broken(Rule.EXACT_PLANS, problem, "ask one that was asked before, use churn dp, or " + _ASK))
    if any(plan.exact for plan in plans) and family.table not in (b"", table):
        problem = (
            f"exact sums of {family.name!r} were over another version of its table: their difference is the change"
        )
        found.append(Broken(Rule.TABLE, problem, "let the administrator accept the new version between jobs"))
    return tuple(found)


def too_many_evaluations(terms: Terms, job: Job) -> bool:
    """S4: whether one more exact evaluation would be more than one for each train round of the job, plus one."""
    trained = sum(job.count(plan.plan_id) for plan in terms.plans if plan.kind is Kind.TRAIN)
    evaluated = sum(job.count(plan.plan_id) for plan in terms.plans if plan.exact and plan.kind is Kind.EVAL)
    return evaluated > trained
