"""The demonstration that a newcomer runs first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from federation.errors import ParleyError, UnreachableError
from parley.heart import data
from tests.integration.alliance import Said


def _never(_folder: Path) -> Path:
    raise UnreachableError("the heart data is not cached, and tests download nothing", fix="run make data")


@pytest.fixture
def csv() -> Path:
    """All four hospitals' records, as `make data` cached them."""
    try:
        return data.obtain(data.cache_folder(os.environ), fetch=_never)
    except ParleyError as missing:
        pytest.skip(str(missing))


def _demo(csv: Path, folder: Path, *options: str) -> Said:
    run = subprocess.run(
        [sys.executable, "-P", "-m", "parley", "demo", "--json", "--data", str(csv), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert run.returncode == 0, run.stderr
    return Said(run.returncode, run.stdout, run.stderr)


@pytest.mark.long
def test_the_demo_learns_from_four_hospitals_what_one_place_would_learn(csv: Path, tmp_path: Path) -> None:
    """Its JSON has the promised fields; federated is within 3 points of pooled; nothing of it stays behind.

    It is summed securely, and half a point from what the same rounds come to where the coordinator sees each update.
    """
    said = _demo(csv, tmp_path)
    told = said.json
    fields = [
        "federated",
        "pooled",
        "alone",
        "seconds",
        "cpu_seconds",
        "bytes",
        "seeds",
        "aggregation",
        "churn",
        "guarantee",
    ]
    assert list(told) == fields
    assert set(told["alone"]) == {"cleveland", "hungary", "switzerland", "long-beach"}
    for metric in ("accuracy", "auc"):
        assert told["federated"][metric] == pytest.approx(told["pooled"][metric], abs=0.03)
    assert told["federated"]["n"] == told["pooled"]["n"] == 254
    assert told["federated"]["auc"] > 0.8
    assert (told["seeds"], told["aggregation"], told["churn"], told["guarantee"]) == (1, "rostersum", "cells", None)
    assert told["bytes"] > 0
    assert told["cpu_seconds"] > 0
    assert told["seconds"] > 0
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in said.err
    assert "cannot be reached" not in said.err
    assert said.err.replace("\n", " ").count("its own policy says rows_of_each_class = 0") == 1
    plain = _demo(csv, tmp_path, "--plain").json
    assert (plain["aggregation"], plain["churn"]) == ("plain", None)
    assert told["federated"]["accuracy"] == pytest.approx(plain["federated"]["accuracy"], abs=0.005)


@pytest.mark.long
def test_the_demo_runs_where_any_hospital_may_be_missing(csv: Path, tmp_path: Path) -> None:
    """With noise, whose guarantee it tells, paid from budgets that it sets; and open, as good as with all of them."""
    noisy = _demo(csv, tmp_path, "--churn", "dp").json
    assert noisy["churn"] == "dp"
    assert "level site, unit: all records of one site" in noisy["guarantee"]
    assert "(epsilon = 8, delta = 0.01)-indistinguishable" in noisy["guarantee"]
    assert noisy["federated"]["n"] == 254
    opened = _demo(csv, tmp_path, "--churn", "open").json
    assert (opened["churn"], opened["guarantee"]) == ("open", None)
    for metric in ("accuracy", "auc"):
        assert opened["federated"][metric] == pytest.approx(opened["pooled"][metric], abs=0.03)
    assert list(tmp_path.iterdir()) == []


def test_plain_sums_have_no_churn_rule(tmp_path: Path) -> None:
    """Both asked for at once is a mistake, told before anything is founded."""
    run = subprocess.run(
        [sys.executable, "-P", "-m", "parley", "demo", "--plain", "--churn", "dp", "--data", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2
    assert "churn dp is a matter of secure aggregation, and --plain is without" in run.stderr
