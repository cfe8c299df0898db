"""A site's own rules on what it takes part in: a file on its machine that no message can change."""

import tomllib

import pydantic
from pydantic import Field, field_validator

from federation.errors import ConfigurationError, WhoActs
from federation.findings import Finding
from federation.job import Frozen, Job, digest

__all__ = ["EXAMPLE", "Policy", "allowed", "parse"]

EXAMPLE = """\
# What this site takes part in. Nothing that the coordinator sends can change or weaken these rules.
# "*" allows all of a kind. Changes hold for jobs that are offered from then on.

datasets = ["*"]        # names of data sets, as given to: parley site dataset add NAME PATH
tasks = ["*"]           # kinds of task, such as "tabular"
models = ["*"]          # kinds of model, such as "logistic_regression"
jobs = ["*"]            # names of jobs, or sha256:... digests of job files (see: parley job check FILE --json)
minimum_sites = 2       # fewest sites with which a round may count

# With plain aggregation the coordinator sees this site's update of the model (never a record).
allow_plain_aggregation = true
"""


class Policy(Frozen):
    """The rules. An empty list allows nothing; plain aggregation needs its explicit line."""

    datasets: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    minimum_sites: int = Field(default=2, ge=2)
    allow_plain_aggregation: bool = False

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
        known = ", ".join(Policy.model_fields)
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
                "its administrator may set allow_plain_aggregation = true",
            )
        )
    return tuple(found)
