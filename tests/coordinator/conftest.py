"""What the tests of the coordinator's machines share: a job's text, and the record with which it begins."""

from collections.abc import Callable

import pytest

from coordinator.records import JobRecord
from federation.blobs import BlobRef
from federation.messages import MembershipStatement, Role

_TEXT = """
format = 1
name = "heart"

[task]
kind = "tabular"
target = "binary"

[data]
dataset = "heart"
label = "disease"
columns = [{{ name = "age", kind = "numeric", range = [0, 120] }}]

[model]
name = "logistic_regression"

[strategy]
name = "fedavg"

[rounds]
maximum = {rounds}
{best}

[cohort]
minimum_sites = {minimum}
quorum = {quorum}
deadline_seconds = 60

[privacy]
secure_aggregation = "plain"
"""


@pytest.fixture(scope="session")
def job_text() -> Callable[..., str]:
    """Writes a job file of so many rounds and sites; `best` holds further keys of its rounds."""

    def write(*, rounds: int = 2, minimum: int = 3, quorum: int | None = None, best: str = "") -> str:
        return _TEXT.format(rounds=rounds, minimum=minimum, quorum=quorum or minimum, best=best)

    return write


@pytest.fixture(scope="session")
def new_record() -> Callable[..., JobRecord]:
    """Makes the record of a job that was just submitted for these sites."""

    def make(text: str, *sites: str) -> JobRecord:
        roster = tuple(
            MembershipStatement("heart", f"{number:032x}", site, site, Role.SITE, bytes(32), bytes(32), 1, 9, bytes(64))
            for number, site in enumerate(sites, 1)
        )
        return JobRecord("heart-1", "heart", text, 1000.0, roster, BlobRef.of(b"initial model"))

    return make
