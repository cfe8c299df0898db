"""What the tests of tasks share: a small job whose text a test changes, and a table that meets it."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from federation import job
from tasks import tabular

Make = Callable[..., tabular.TabularTask]

COLUMNS = """
  { name = "age", kind = "numeric", unit = "years", range = [0, 120] },
  { name = "pressure", kind = "numeric", range = [50, 250], zero_is_missing = true, missing = "mean" },
  { name = "pain", kind = "categorical", categories = ["none", "typical", "other"] },
"""


@pytest.fixture
def text() -> Callable[..., str]:
    """A job's text from its parts."""

    def written(
        *, task: str = 'target = "binary"', data: str = 'label = "sick"', columns: str = COLUMNS, rounds: str = ""
    ) -> str:
        return f"""
format = 1
name = "small"
[task]
kind = "tabular"
{task}
[data]
dataset = "patients"
columns = [{columns}]
{data}
[model]
name = "logistic_regression"
[strategy]
name = "fedavg"
[rounds]
maximum = 3
{rounds}
[cohort]
minimum_sites = 2
[privacy]
secure_aggregation = "plain"
"""

    return written


@pytest.fixture
def make(text: Callable[..., str]) -> Make:
    """The task of a job with the given parts."""

    def made(**parts: str) -> tabular.TabularTask:
        return tabular.make(job.parse(text(**parts)))

    return made


@pytest.fixture
def table() -> pd.DataFrame:
    """Sixty rows that meet the job's contract."""
    return tabular.example(np.random.default_rng(0))[1]
