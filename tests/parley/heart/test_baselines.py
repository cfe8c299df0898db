from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from federation.job import Job, parse
from parley.heart import baselines, data


@pytest.fixture
def job() -> Job:
    """The demonstration's job, of the committed split."""
    return parse(data.job_text(0, data.job_template()))


@pytest.fixture
def tables(heart_csv: Path) -> dict[str, pd.DataFrame]:
    """The four hospitals' records."""
    return data.hospitals(heart_csv)


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(5, 60), features=st.integers(1, 6))
@settings(deadline=None, max_examples=25)
def test_the_fit_is_the_penalised_optimum(seed: int, rows: int, features: int) -> None:
    """At the returned weights the gradient of log loss + |w|^2 / 2 vanishes, the intercept unpenalised."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(rows, features))
    labels = (np.arange(rows) % 2).astype(np.float64)

    weights, intercept = baselines._logistic(inputs, labels)

    excess = expit(inputs @ weights + intercept) - labels
    np.testing.assert_allclose(inputs.T @ excess + weights, 0, atol=0.01)
    np.testing.assert_allclose(excess.sum(), 0, atol=0.01)


def test_rows_of_one_class_give_a_model_that_says_that_class() -> None:
    """The fit stays finite although its optimum is not."""
    inputs = np.random.default_rng(0).normal(size=(30, 3))

    for label in (0.0, 1.0):
        weights, intercept = baselines._logistic(inputs, np.full(30, label))
        assert np.isfinite(weights).all()
        assert np.isfinite(intercept)
        assert ((inputs @ weights + intercept > 0) == bool(label)).all()


def test_all_records_in_one_place_reach_the_known_accuracy(tables: dict[str, pd.DataFrame], job: Job) -> None:
    """On the committed split the pooled model is right on 80 % of all 254 test rows, with an AUC of 0.88."""
    score = baselines.pooled(tables, job)

    assert score.n == 254
    assert score.accuracy == pytest.approx(0.80, abs=0.015)
    assert score.auc == pytest.approx(0.88, abs=0.01)


def test_each_hospital_alone_is_scored_on_its_own_and_on_all_test_rows(
    tables: dict[str, pd.DataFrame], job: Job
) -> None:
    """Every hospital counts its own test rows and all 254, and none alone does better than all together."""
    scores = baselines.alone(tables, job)
    together = baselines.pooled(tables, job)

    assert {site: score.own.n for site, score in scores.items()} == {
        "cleveland": 104,
        "hungary": 89,
        "switzerland": 16,
        "long-beach": 45,
    }
    assert {score.everywhere.n for score in scores.values()} == {254}
    assert max(score.everywhere.accuracy for score in scores.values()) < together.accuracy


def test_a_hospital_of_sick_patients_only_learns_to_say_so(tables: dict[str, pd.DataFrame], job: Job) -> None:
    """Switzerland's training rows are of one class: alone it is right on who is ill, and tells nobody apart."""
    tests = pd.concat([table[table["split"] == "test"] for table in tables.values()])

    swiss = baselines.alone(tables, job)["switzerland"]

    assert swiss.everywhere.accuracy == pytest.approx(tests["disease"].mean())
    assert swiss.everywhere.auc == pytest.approx(0.5, abs=0.01)


def test_an_auc_that_the_rows_do_not_define_is_none(tables: dict[str, pd.DataFrame], job: Job) -> None:
    """A hospital whose test rows are of one class has an accuracy but no AUC of its own."""
    hungary = tables["hungary"]
    tables["hungary"] = hungary[(hungary["split"] == "train") | (hungary["disease"] == 1)]

    score = baselines.alone(tables, job)["hungary"].own

    assert (score.auc, score.n) == (None, 33)
    assert 0 < score.accuracy < 1


def test_the_rows_are_those_that_the_job_splits_off(tables: dict[str, pd.DataFrame]) -> None:
    """Another seed is another split of the same rows, hence another score; the same seed gives the same one."""
    scores = [baselines.pooled(tables, parse(data.job_text(seed, data.job_template()))) for seed in (0, 1, 1)]

    assert scores[1] == scores[2]
    assert scores[0] != scores[1]
