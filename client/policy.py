"""A site's own rules on what it takes part in: a file on its machine that no message can change."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import pydantic
from pydantic import Field, Strict, field_validator

from federation.errors import ConfigurationError, WhoActs
from federation.findings import Finding
from federation.job import NAME, Frozen, Job, digest
from federation.messages import JobOffer, RevocationList
from privacy.secure_aggregation.rostersum.floor import ROWS_OF_EACH_CLASS, Floor
from privacy.secure_aggregation.rostersum.plans import task_digest
from privacy.secure_aggregation.rostersum.terms import Churn, Kind, Terms

__all__ = [
    "EXAMPLE",
    "SIGNED",
    "Admitted",
    "FamilyOf",
    "Policy",
    "SecureAggregation",
    "allowed",
    "example",
    "floor",
    "parse",
]

SIGNED = "signed"
"""Among the rosters of a policy: any roster whose every member the consortium's root signed."""

EXAMPLE = """\
# What this site takes part in. Nothing that the coordinator sends can change or weaken these rules.
# "*" allows all of a kind. Changes hold for jobs that are offered from then on.

datasets = ["*"]        # names of data sets, as given to: parley site dataset add NAME PATH
tasks = ["*"]           # kinds of task, such as "tabular"
models = ["*"]          # kinds of model, such as "logistic_regression"
jobs = ["*"]            # names of jobs, or sha256:... digests of job files (see: parley job check FILE --json)
minimum_sites = 2       # fewest sites with which a round may count

# In a job of plain aggregation the coordinator sees this site's own update of the model, and its own statistics and
# evaluation counts (never a record). Only this line, set to true here, lets it.
allow_plain_aggregation = false

# What the secure aggregation of a job must at least promise, for this site to take part.
[secure_aggregation]
colluding_sites = 1           # so many other sites may work together with the coordinator and learn nothing
colluding_organisations = 1   # of so many organisations
rows_minimum = 10             # fewest rows of each site, as the job asks for them
rows_asked_most = 10          # the most that a job may ask for: who asks for 20, 40, 30 job by job learns how many
# Rows of each class that this site must have, or it does not take part. Each class is counted over all sites together;
# with few rows of a class here, or none, somebody who knows the other sites' counts (all of them together, say) learns
# from the pooled count of that class how few they are: with 1, that it is one person; with 0, that nobody here has it.
# A site that may tell that can lower this, down to 0. No message of the coordinator can.
rows_of_each_class = 5
allow_open = false            # sums that differ by one site, whose difference is that site's update
allow_dp = false              # sums of whoever is there, with noise: charged to this site's privacy ledger, which needs
                              # a budget as well (parley site budget set)
declared_weight = 1           # this site's public weight, where a job weighs by such
rosters = ["signed"]          # "signed": any whose members the consortium's root signed; or digests you compared
# drift_max = 10.0            # how far any weight of a model may move in a round
# families = [{ dataset = "heart", family = "cardiology" }]   # data sets that share records; else each is its own
"""


def example(
    *, plain: bool = False, dp: bool = False, opened: bool = False, rows_of_each_class: int = ROWS_OF_EACH_CLASS
) -> str:
    """`EXAMPLE` with these lines as given: the text of a demonstration's or a benchmark's policy."""
    rows = "rows_of_each_class = {}"
    text = EXAMPLE.replace(rows.format(ROWS_OF_EACH_CLASS), rows.format(rows_of_each_class))
    for line, allowed_here in (("allow_plain_aggregation", plain), ("allow_dp", dp), ("allow_open", opened)):
        text = text.replace(f"{line} = false", f"{line} = {str(allowed_here).lower()}")
    return text


_AS_TUPLE = Strict(strict=False)
"""Takes TOML's list where a frozen value has a tuple; the items stay exact."""
_MOST = 98
"""Colluders among 100 sites, the largest roster, that leave two honest ones."""


class FamilyOf(Frozen):
    """The word for the tables that share records with a data set."""

    dataset: Annotated[str, Field(pattern=NAME)]
    family: Annotated[str, Field(pattern=NAME)]


class SecureAggregation(Frozen):
    """The least that the secure aggregation of a job must promise; `floor` makes the machine's limits of it."""

    colluding_sites: int = Field(default=1, ge=0, le=_MOST)
    colluding_organisations: int = Field(default=1, ge=0, le=_MOST)
    rows_minimum: int = Field(default=10, ge=10)
    rows_asked_most: int = Field(default=10, ge=10)
    rows_of_each_class: int = Field(default=ROWS_OF_EACH_CLASS, ge=0)
    allow_open: bool = False
    allow_dp: bool = False
    declared_weight: int = Field(default=1, ge=1, le=2**52)
    rosters: Annotated[tuple[Annotated[str, Field(pattern=f"^({SIGNED}|[0-9a-f]{{64}})$")], ...], _AS_TUPLE] = (SIGNED,)
    drift_max: float | None = Field(default=None, gt=0)
    families: Annotated[tuple[FamilyOf, ...], _AS_TUPLE] = ()

    def family(self, dataset: str) -> str:
        """The data family of a data set: its own name, unless the administrator has named another."""
        return next((each.family for each in self.families if each.dataset == dataset), dataset)


class Policy(Frozen):
    """The rules. An empty list allows nothing; plain aggregation needs its explicit line."""

    datasets: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    minimum_sites: int = Field(default=2, ge=2)
    allow_plain_aggregation: bool = False
    secure_aggregation: SecureAggregation = SecureAggregation()

    @field_validator("datasets", "tasks", "models", "jobs", mode="before")
    @classmethod
    def _tuple(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


def parse(text: str, source: str) -> Policy:
    """The policy that a file's text states.

    Raises:
        ConfigurationError: It does not; every wrong line is named.
    """
    try:
        return Policy.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as broken:
        raise ConfigurationError(f"{source} is not TOML: {broken}", fix="mend that line", who=WhoActs.SITE) from broken
    except pydantic.ValidationError as wrong:
        told = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in wrong.errors())
        known = (
            ", ".join(Policy.model_fields) + "; in [secure_aggregation] " + ", ".join(SecureAggregation.model_fields)
        )
        raise ConfigurationError(
            f"{source} is no policy: {told}", fix=f"use the keys {known}", who=WhoActs.SITE
        ) from wrong


def allowed(policy: Policy, job: Job, text: str, roster: int) -> tuple[Finding, ...]:
    """Why this site does not take part in a job; empty when it may.

    Args:
        policy: The site's rules.
        job: The job offered.
        text: Its file, as offered.
        roster: Number of sites in its roster.
    """
    by_digest = f"sha256:{digest(text).hex()}"
    rules = (
        ("data.dataset", "data set", job.data.dataset, policy.datasets, "datasets"),
        ("task.kind", "task", job.task.kind, policy.tasks, "tasks"),
        ("model.name", "model", job.model.name, policy.models, "models"),
    )
    found = [
        Finding(
            path, f"this site's policy does not allow the {noun} {value!r}", f"its administrator may add it to {key}"
        )
        for path, noun, value, list_, key in rules
        if value not in list_ and "*" not in list_
    ]
    if not {job.name, by_digest, "*"} & set(policy.jobs):
        found.append(
            Finding(
                "name",
                f"this site's policy does not allow the job {job.name!r}",
                "its administrator may add it to jobs",
            )
        )
    fewest = min(roster, job.cohort.needed)
    if fewest < policy.minimum_sites:
        found.append(
            Finding(
                "cohort.quorum",
                f"a round may count with {fewest} sites; this site takes part with at least {policy.minimum_sites}",
                "raise the job's quorum or invite more sites, or its administrator may lower minimum_sites",
            )
        )
    if job.privacy.secure_aggregation == "plain" and not policy.allow_plain_aggregation:
        found.append(
            Finding(
                "privacy.secure_aggregation",
                "this site's policy does not let the coordinator see its update (plain aggregation)",
                "leave the line secure_aggregation out of the job, or its administrator may set "
                "allow_plain_aggregation = true",
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A job under secure aggregation: its roster is the root's, and its terms are those that its file comes to."""

    job: Job
    offer: JobOffer
    terms: Terms


def floor(policy: Policy, jobs: Iterable[Admitted], revocations: RevocationList) -> Floor:
    """The limits of this site's machine of secure sums, under which those of `jobs` may run that the policy allows.

    Args:
        policy: The site's rules.
        jobs: The jobs that it is asked for, or takes part in.
        revocations: The consortium's list.
    """
    rules = policy.secure_aggregation
    known = tuple(jobs)
    runs = [each for each in known if not allowed(policy, each.job, each.offer.text, len(each.offer.roster))]
    rosters = {bytes.fromhex(each) for each in rules.rosters if each != SIGNED}
    if SIGNED in rules.rosters:
        rosters |= {each.terms.roster.hash for each in runs}
    churns = (Churn.CELLS, *([Churn.DP] * rules.allow_dp), *([Churn.OPEN] * rules.allow_open))
    members = (member for each in known for member in each.offer.roster)
    return Floor(
        c_max=rules.colluding_sites,
        g_max=rules.colluding_organisations,
        rosters=frozenset(rosters),
        tasks=frozenset(task_digest(each.job) for each in runs),
        families=frozenset(rules.family(each.job.data.dataset) for each in runs),
        churns=frozenset((kind, churn) for kind in Kind for churn in churns),
        rows_min=rules.rows_minimum,
        rows_asked_most=rules.rows_asked_most,
        rows_of_each_class=rules.rows_of_each_class,
        allow_open=rules.allow_open,
        declared=rules.declared_weight,
        drift_max=rules.drift_max,
        revoked=frozenset(each.protocol_key for each in members if each.serial in revocations.serials),
    )
