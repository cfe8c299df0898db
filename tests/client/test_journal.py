from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client.journal import Journal
from client.session_events import Remembered, Worked
from federation.blobs import BlobRef
from federation.errors import StorageError
from federation.messages import JobOffer, MembershipStatement, Role, StepKind, StepStart

MEMBER = MembershipStatement("heart", "0f" * 16, "athens", "athens", Role.SITE, bytes(32), bytes(32), 1, 9, bytes(64))


def result(job: str = "risk-1", step: int = 1, weight: float = 10.0, seconds: float = 2.5) -> Remembered:
    """A result of a step of a job."""
    model = BlobRef.of(b"model")
    start = StepStart(job, step, 0, StepKind.TRAIN, 1, model, model, 4, 60.0)
    return Remembered(JobOffer(job, "text", (MEMBER,)), Worked(start, BlobRef.of(b"gain"), weight, seconds))


@given(step=st.integers(1, 2**40), weight=st.floats(1e-9, 1e15), seconds=st.floats(0, 1e9))
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_kept_is_remembered_by_another_process(
    tmp_path: Path, step: int, weight: float, seconds: float
) -> None:
    """Every word of a result comes back, and a later result of the job takes the place of an earlier one."""
    kept = result(step=step, weight=weight, seconds=seconds)
    Journal(tmp_path).keep(result())

    Journal(tmp_path).keep(kept)

    assert Journal(tmp_path).remembered() == (kept,)


def test_jobs_are_kept_side_by_side_and_forgotten_one_by_one(tmp_path: Path) -> None:
    """The end of one job takes nothing from another; forgetting twice is no harm."""
    journal = Journal(tmp_path)
    journal.keep(result("one-1"))
    journal.keep(result("two-2"))

    (tmp_path / "one-1.json.new").write_text("half")
    journal.forget("one-1")
    journal.forget("one-1")

    assert {path.name for path in tmp_path.iterdir()} == {"two-2.json"}
    assert journal.remembered() == (result("two-2"),)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"offer": "zz"}', "[]"])
def test_a_damaged_file_is_left_aside_and_told(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    """A half-written or altered file costs its own job's result and no other's."""
    journal = Journal(tmp_path)
    journal.keep(result("one-1"))
    (tmp_path / "two-2.json").write_text(content)

    assert journal.remembered() == (result("one-1"),)
    assert "two-2.json cannot be read and is left aside" in caplog.text


def test_no_folder_means_nothing_to_remember(tmp_path: Path) -> None:
    """A new site has no journal."""
    assert Journal(tmp_path / "none").remembered() == ()


def test_a_disk_that_does_not_take_it_is_named(tmp_path: Path) -> None:
    """The administrator is told which path."""
    (tmp_path / "journal").write_text("a file where the folder should be")

    with pytest.raises(StorageError, match=r"cannot write .*journal"):
        Journal(tmp_path / "journal").keep(result())
