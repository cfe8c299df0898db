from pathlib import Path

import pytest

from tests.fuzz import run


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of the passes that were made; the third of them finds something."""
    made: list[int] = []

    def pass_(_: Path, seed: int) -> int:
        made.append(seed)
        return 1 if len(made) == 3 else 0

    monkeypatch.setattr(run, "_pass", pass_)
    return made


def test_the_first_failure_ends_the_run_and_names_its_seed(
    seeds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each pass has a seed of its own; the one that found something can be run again, and its status is the run's."""
    assert run.main(["--minutes", "1", "--seed", "7"]) == 1
    assert seeds == [7, 8, 9]
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("fuzz: pass 1, of seed 7, found nothing; 0.0 of 1 minutes are over")
    assert told[2].startswith("fuzz: pass 3, of seed 9, found something after")


def test_a_run_makes_at_least_one_pass(seeds: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """However few its minutes are; then it says how much the corpus has."""
    assert run.main(["--minutes", "0"]) == 0
    assert len(seeds) == 1
    assert "inputs were kept that led somewhere new" in capsys.readouterr().out
