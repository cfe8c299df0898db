"""The terms that a job file and a roster come to."""

from dataclasses import replace

import pytest

from federation import job as job_file
from federation.blobs import BlobRef
from federation.errors import ConfigurationError
from federation.messages import MembershipStatement, Role, StepKind, StepStart
from federation.sums import SumField
from privacy.secure_aggregation.rostersum import rules
from privacy.secure_aggregation.rostersum.plans import args_of, index_of, plan_id, seats, task_digest, terms_of
from privacy.secure_aggregation.rostersum.terms import Churn, Kind, Ring, Terms, TrainCodec

JOB = """
format = 1
name = "heart"
[task]
kind = "tabular"
target = "binary"
[data]
dataset = "heart"
label = "disease"
columns = [{ name = "age", kind = "numeric", range = [0, 120] }]
[model]
name = "logistic_regression"
[strategy]
name = "fedavg"
[rounds]
maximum = 3
[cohort]
minimum_sites = 3
"""
STATISTICS = (SumField("count", 1, 0, 0.0, 1e6), SumField("sum", 1, 20, -1e6, 1e6))
EVALUATION = (SumField("rows", 1, 0, 0.0, 1e6), SumField("bins", 32, 0, 0.0, 1e6))


def _roster(sites: int) -> tuple[MembershipStatement, ...]:
    return tuple(
        MembershipStatement(
            "heart", f"{n:032x}", f"site{n}", f"org{n}", Role.SITE, bytes(32), bytes([n + 1]) * 32, 1, 2, bytes(64)
        )
        for n in range(sites)
    )


def _terms(privacy: str = "", sites: int = 4, job: str = JOB, statistics: tuple[SumField, ...] = STATISTICS) -> Terms:
    text = f"{job}[privacy]\n{privacy}\n"
    return terms_of(job_file.parse(text), bytes(16), _roster(sites), b"\xc0" * 32, 14, statistics, EVALUATION)


@pytest.mark.parametrize("churn", ["cells", "open"])
@pytest.mark.parametrize("sites", [3, 4, 5, 10, 50, 100])
def test_the_terms_of_a_job_that_names_nothing_are_such_as_sites_accept(sites: int, churn: str) -> None:
    """Defaults hold for every size of roster: no rule is broken, and the words are those of model and fields."""
    terms = _terms(f'churn = "{churn}"', sites)
    keys = {rule.rule for rule in rules.broken(terms)}
    assert keys <= {rules.Rule.WEAK_KEY}  # this roster's keys are made up
    statistics, train, evaluation = terms.plans
    assert [plan.kind for plan in terms.plans] == [Kind.STAT, Kind.TRAIN, Kind.EVAL]
    assert (train.ring, train.words, train.churn) == (Ring.WORD, 14 + 5, Churn(churn))
    assert (statistics.words, evaluation.words) == (2 + 4, 33 + 4)
    assert isinstance(train.codec, TrainCodec)
    assert sites * train.codec.steps < 2**31 <= 2 * sites * (train.codec.steps + 1) + sites
    assert train.codec.weighting == ("records" if churn == "cells" else "uniform")


def test_open_churn_takes_the_jobs_quorum_and_rescues_only_where_one_opening_stays_certain() -> None:
    """m_min is the quorum where that is safe; t + m_min >= n + c_max + 1, or no escrow."""
    text = JOB.replace("minimum_sites = 3", "minimum_sites = 10\nquorum = 8")
    train = _terms('churn = "open"', 10, text).plans[1]
    assert (train.m_min, train.t) == (8, 6)
    assert _terms('churn = "open"\nrescue = false', 10, text).plans[1].t == 0
    low = _terms('churn = "open"', 10).plans[1]
    assert (low.m_min, low.t) == (5, 0)


def test_cells_are_named_by_sites_and_an_unknown_one_is_refused() -> None:
    """Their order in the file does not matter."""
    cells = 'cells = [["site5", "site3", "site4"], ["site0", "site2", "site1"]]\ncolluding_sites = 1'
    assert _terms(cells, 6).cells == ((0, 1, 2), (3, 4, 5))
    with pytest.raises(ConfigurationError, match="the roster does not hold the site 'site5'"):
        _terms(cells, 5)


def test_a_task_without_statistics_has_no_plan_for_them() -> None:
    """Plans keep their numbers."""
    assert [plan.plan_id for plan in _terms(statistics=()).plans] == [2, 3]
    assert [plan_id(kind) for kind in StepKind] == [1, 2, 3]


def test_the_order_of_a_roster_does_not_matter() -> None:
    """Indices go by organisation and name."""
    roster = _roster(5)
    assert seats(roster[::-1]) == roster
    assert index_of(roster[::-1], "site3") == 3
    assert _terms().job_hash == _terms().job_hash


def test_one_site_alone_has_no_terms() -> None:
    """There is nobody to hide among."""
    with pytest.raises(ConfigurationError, match="needs at least 3 sites of 3 organisations"):
        _terms(sites=1)


def test_the_task_digest_names_the_work_and_not_the_run() -> None:
    """Another model is other work; more rounds are not."""
    job = job_file.parse(JOB)
    assert task_digest(job) == task_digest(job_file.parse(JOB.replace("maximum = 3", "maximum = 9")))
    assert task_digest(job) != task_digest(job_file.parse(JOB.replace("[0, 120]", "[0, 130]")))


def test_the_arguments_of_a_step_are_its_preparation_and_round() -> None:
    """Statistics have none; two rounds differ."""
    ref = BlobRef.of(b"x")
    train = StepStart("heart-1", 2, 0, StepKind.TRAIN, 1, ref, ref, 8, 1.0)
    assert args_of(train) != args_of(replace(train, round=2))
    assert args_of(train) == args_of(replace(train, step=4, attempt=3))
    assert args_of(StepStart("heart-1", 1, 0, StepKind.STATISTICS, 0, None, None, 8, 1.0)) == b""
