import pytest

from federation.errors import RemoteProtocolError
from federation.findings import Finding, brief, refusals, rows, told


def test_small_counts_are_not_told() -> None:
    """A count below five could name a person; from five on it is told."""
    assert [rows(count) for count in (1, 4, 5, 120)] == ["fewer than 5 rows"] * 2 + ["5 rows", "120 rows"]


def test_a_finding_reads_as_place_problem_and_fix() -> None:
    """The words are those that a site's administrator sees; refusals are told from warnings."""
    refusal, warning = (
        Finding("data.label", "is missing", "add it"),
        Finding("data.split", "is small", "none", "warning"),
    )
    assert told([refusal, warning]) == "data.label: is missing; add it\ndata.split: is small; none"
    assert refusals([refusal, warning]) == (refusal,)


def test_many_findings_are_told_in_brief_by_the_first() -> None:
    """Where a line must do: place, problem, remedy, and how many more wait."""
    label, split = Finding("data.label", "is missing", "add it"), Finding("data.split", "is small", "none")
    assert brief([label]) == "data.label: is missing (add it)"
    assert brief([label, split, split]) == "data.label: is missing (add it) and 2 more"


def test_a_finding_that_no_check_writes_is_refused() -> None:
    """Findings travel: an unknown level and an endless text do not exist."""
    with pytest.raises(RemoteProtocolError, match="a finding is a refusal or a warning, not 'note'"):
        Finding("data", "x", "y", "note")  # type: ignore[arg-type]  # what a peer could send
    with pytest.raises(RemoteProtocolError, match="longer than 1000 characters"):
        Finding("data", "x" * 1001, "y")
