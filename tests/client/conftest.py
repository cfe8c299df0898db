"""What the tests of the site's machines share: the text of a job that they are offered."""

from collections.abc import Callable

import pytest

_TEXT = """
format = 1
name = "{name}"

[task]
kind = "tabular"
target = "binary"

[data]
dataset = "heart"
label = "disease"
columns = [{{ name = "age", kind = "numeric", range = [0, 120] }}]

[model]
name = "{model}"

[strategy]
name = "fedavg"

[rounds]
maximum = 5

[cohort]
minimum_sites = 2

[privacy]
secure_aggregation = "plain"
"""


@pytest.fixture(scope="session")
def job_text() -> Callable[..., str]:
    """Writes the job file of a logistic regression on the data set `heart`."""

    def write(name: str = "risk", model: str = "logistic_regression") -> str:
        return _TEXT.format(name=name, model=model)

    return write
