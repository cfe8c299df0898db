import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from simulations import scale
from simulations.peers.trial import Size
from simulations.scale_attend import AttendingMeasured
from simulations.scale_bars import Bar
from simulations.scale_sites import Cohort, CohortsMeasured
from simulations.scale_vector import Vector, VectorMeasured

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc")

_TOY = "--cohorts 2,3 --model 1MB --rounds 2 --megabytes 2 --senders 3 --attending 5 --idle 1"


class _Run(NamedTuple):
    """What a run of all benchmarks at toy sizes printed, and left behind."""

    figures: dict[str, Any]
    shown: str
    left: list[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> _Run:
    """All benchmarks, once: real processes over mutual TLS."""
    folder = tmp_path_factory.mktemp("scale")
    done = subprocess.run(
        [sys.executable, "-m", "simulations.scale", "all", "--json", *_TOY.split()],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return _Run(json.loads(done.stdout), done.stderr, [file.name for file in folder.iterdir()] + _running(folder))


def _running(folder: Path) -> list[str]:
    """Command lines of processes that name `folder`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_text(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [line for line in found if str(folder) in line]


@pytest.mark.long
def test_every_cohort_is_measured(run: _Run) -> None:
    """The coordinator's memory and time with each number of sites, and the difference in models."""
    found = run.figures["sites"]

    assert set(found) == {"2", "3", "model_mb", "difference_in_models", "bars"}
    assert found["model_mb"] == pytest.approx(1.0, rel=0.01)
    for count in ("2", "3"):
        assert 20 < found[count]["peak_anonymous_mb"] < found[count]["peak_rss_mb"] < 1000
        assert found[count]["seconds_per_round"] > 0
    apart = (found["3"]["peak_rss_mb"] - found["2"]["peak_rss_mb"]) / found["model_mb"]
    assert found["difference_in_models"] == pytest.approx(apart, abs=0.02)


@pytest.mark.long
def test_both_ends_of_a_vectors_way_are_measured(run: _Run) -> None:
    """What coordinator and site took above their idle processes, which are real ones."""
    found = run.figures["vector"]

    assert (found["sites"], found["vector_mb"]) == (3, pytest.approx(2e6 / 2**20, rel=0.01))
    assert min(found["coordinator_idle_mb"], found["site_idle_mb"]) > 10
    assert 0 < found["coordinator_above_idle_mb"] < 500
    assert 0 < found["site_above_idle_mb"] < 500
    assert found["seconds"] > 0


@pytest.mark.long
def test_all_sites_are_back_after_the_coordinator_was_killed(run: _Run) -> None:
    """The new coordinator answers first, and then all five attend; meanwhile memory and idle time were looked at."""
    found = run.figures["attend"]

    assert found["sites"] == 5
    assert 20 < found["rss_mb"] <= found["peak_rss_mb"] < 1000
    assert 0 <= found["core_percent"] <= 200
    assert found["idle_seconds"] >= 1
    assert 0 < found["restart_seconds"] <= found["reconnect_seconds"] < 120


@pytest.mark.long
def test_every_figure_has_its_bar_and_nothing_is_left(run: _Run) -> None:
    """People see each bar and whether it holds; no process and no file outlives the run."""
    bars = [bar for found in run.figures.values() for bar in found["bars"]]

    assert len(bars) == 6
    assert [bar["holds"] for bar in bars] == [bar["measured"] <= bar["limit"] for bar in bars]
    assert all(name in run.shown for name in ("sites", "vector", "attend", "holds"))
    assert run.left == []


_FEW, _MANY = Cohort(200.0, 100.0, 1.0), Cohort(242.0, 150.0, 4.0)


@pytest.mark.parametrize(("peak", "holds"), [(326.0, True), (327.0, False)])
def test_three_models_is_what_more_sites_may_cost(peak: float, holds: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """126 MiB are three models of 42; cohorts between the smallest and the largest do not matter."""
    cohorts = {4: _FEW, 8: Cohort(900.0, 1.0, 1.0), 16: Cohort(peak, 150.0, 4.0)}

    (bar,) = CohortsMeasured(42.0, cohorts).bars

    assert (bar.limit, bar.unit, bar.holds) == (3.0, "models", holds)
    assert bar.measured == pytest.approx((peak - 200) / 42)


def test_a_vector_of_a_gigabyte_may_cost_one_and_a_bit_on_either_side() -> None:
    """The smallest square model of 250,000,000 values or more; the bar is 1.15 of its size."""
    size = Vector(1000, 4).size
    measured = VectorMeasured(4 * size.values / 2**20, 4, 75.0, 1096.0, 37.0, 1098.0, 9.0)

    assert 250_000_000 <= size.values < 250_000_000 * 1.001
    assert (size.width - 1) ** 2 - 3 < 250_000_000
    assert [(bar.limit, bar.holds) for bar in measured.bars] == [(1096.8, True), (1096.8, False)]


def test_what_attending_sites_may_cost() -> None:
    """300 MiB at the peak, a fifth of a core when idle, half a minute until all are back."""
    bars = AttendingMeasured(200, 120.0, 310.0, 4.0, 30.0, 5.0, 29.0).bars

    assert [(bar.measured, bar.limit, bar.unit, bar.holds) for bar in bars] == [
        (310.0, 300.0, "MiB", False),
        (4.0, 20.0, "%", True),
        (29.0, 30.0, "s", True),
    ]


def test_the_table_says_which_bar_holds() -> None:
    """Each figure stands beside its limit, with a plain yes or no."""
    found = {
        "sites": CohortsMeasured(42.0, {4: _FEW, 16: _MANY}),
        "attend": AttendingMeasured(200, 120.0, 310.0, 4.0, 30.0, 5.0, 29.0),
    }
    console = Console(width=160, file=io.StringIO(), record=True)

    console.print(scale.table(found))

    lines = console.export_text().splitlines()
    assert [line for line in lines if "sites" in line and "1.0 models" in line and "3 models" in line and "yes" in line]
    assert [line for line in lines if "attend" in line and "310.0 MiB" in line and "300 MiB" in line and "no" in line]


def test_a_bar_is_told_as_json_with_its_verdict() -> None:
    """The limit itself still holds."""
    bar = Bar("seconds", 30.0, 30.0, "s")

    assert bar.plain == {"what": "seconds", "measured": 30.0, "limit": 30.0, "unit": "s", "holds": True}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--cohorts", "4"], "gives nothing to compare"),
        (["--cohorts", "4,many"], "gives nothing to compare"),
        (["--cohorts", "1,4"], "fewer than two sites or rounds"),
        (["--rounds", "1"], "fewer than two sites or rounds"),
        (["--attending", "1"], "fewer than two sites or rounds"),
        (["--megabytes", "0"], "of nothing cannot be measured"),
        (["--idle", "0"], "of nothing cannot be measured"),
        (["--model", "big"], "'big' is not a size"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started, the reason is told, and the exit status is that of a wrong command line."""
    assert scale.main(arguments) == 2
    assert told in capsys.readouterr().err


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal says how much is needed, how much there is, and how to get by."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(30 * 10**9, 29 * 10**9, 10**9))

    assert scale.main(["vector"]) == 2

    told = capsys.readouterr().err
    assert "vector writes up to 18.0 GB" in told
    assert "has 1.0 GB left" in told
    assert "set TMPDIR to a folder with room" in told
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_told_in_bytes_on_disk() -> None:
    """Each site keeps a model and its update, and the coordinator an update of each."""
    parsed = Size.parse("42MB")

    assert scale.Cohorts(parsed, (4, 16), 2).disk == (3 * 16 + 6) * 4 * parsed.values
