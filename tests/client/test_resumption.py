"""Jobs that wait for the administrator: let go on once each, and only jobs."""

from pathlib import Path

import pytest

from client.resumption import resume_job, taken
from federation.errors import ConfigurationError


def _known(_: str) -> bool:
    return True


def test_a_job_that_is_let_go_on_is_heeded_once(tmp_path: Path) -> None:
    """Asking twice before the agent looks is asking once."""
    assert taken(tmp_path, _known) == ()
    for job in ("risk-1", "stroke-2", "risk-1"):
        resume_job(tmp_path, job)
    assert (taken(tmp_path, _known), taken(tmp_path, _known)) == (("risk-1", "stroke-2"), ())


def test_a_job_that_was_not_offered_yet_waits(tmp_path: Path) -> None:
    """The command may come before the agent has reached the coordinator."""
    for job in ("risk-1", "stroke-2"):
        resume_job(tmp_path, job)
    assert taken(tmp_path, lambda job: job == "risk-1") == ("risk-1",)
    assert taken(tmp_path, _known) == ("stroke-2",)


def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """Its command has not ended yet."""
    resume_job(tmp_path, "risk-1")
    (tmp_path / "resumed" / "stroke-2.new").touch()
    assert taken(tmp_path, _known) == ("risk-1",)
    assert (tmp_path / "resumed" / "stroke-2.new").exists()


@pytest.mark.parametrize("job", ["", "../policy", "Risk 1"])
def test_what_is_no_jobs_id_is_refused(tmp_path: Path, job: str) -> None:
    """It would name a file elsewhere, or one that nobody looks for."""
    with pytest.raises(ConfigurationError, match="is no job's id"):
        resume_job(tmp_path, job)
    assert list(tmp_path.iterdir()) == []
