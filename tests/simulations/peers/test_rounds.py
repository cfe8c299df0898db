import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from simulations.peers import rounds
from simulations.peers.measure import Figures

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc")

_FIGURES = Figures(
    seconds_per_round=0.2,
    cpu_seconds=0.1,
    peak_rss_mb=100.0,
    slowest_round_seconds=0.3,
    others_load=0.5,
    rounds=11,
    values=262_141,
)
_FLOWER = Figures(
    seconds_per_round=15.0,
    cpu_seconds=11.0,
    peak_rss_mb=150.0,
    slowest_round_seconds=16.0,
    others_load=0.5,
    rounds=3,
    values=262_141,
    serverapp_peak_rss_mb=160.0,
)


def test_parleys_half_prints_its_figures_and_leaves_nothing(tmp_path: Path) -> None:
    """Two rounds, in plain and secure, of real processes over mutual TLS give the promised JSON and leave nothing."""
    command = [sys.executable, "-m", "simulations.peers.rounds", "--json", "--only", "parley", "--secure"]

    done = subprocess.run(
        [*command, "--sizes", "4kB", "--rounds", "2", "--sites", "3"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result) == ["4kB"]
    assert list(result["4kB"]) == ["parley", "parley_secure"]
    for measured in result["4kB"].values():
        assert set(measured) >= {"seconds_per_round", "cpu_seconds", "peak_rss_mb"}
        assert (measured["rounds"], measured["values"]) == (1, 32**2 - 3)
        assert measured["seconds_per_round"] > 0
        assert measured["peak_rss_mb"] > 10
    assert "2 of 2 rounds" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert [line for line in _command_lines() if str(tmp_path) in line] == []


def _command_lines() -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_the_table_says_how_many_times_the_other_side_takes() -> None:
    """A row for each side, and a third with the ratios."""
    console = Console(width=160, file=io.StringIO(), record=True)

    console.print(rounds.table({"1MB": {"parley": _FIGURES, "flower": _FLOWER}}))

    lines = console.export_text().splitlines()
    assert [line for line in lines if "parley" in line and "0.200" in line and "100 MB" in line]
    assert [line for line in lines if "flower" in line and "15.000" in line and "150 MB, ServerApp 160 MB" in line]
    assert [line for line in lines if "flower / parley" in line and "75.0 x" in line and "110.0 x" in line]


def test_the_table_says_what_secure_aggregation_costs() -> None:
    """In multiples of plain."""
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(rounds.table({"1MB": {"parley": _FIGURES, "parley_secure": _FLOWER}}))
    assert [line for line in console.export_text().splitlines() if "secure / plain" in line and "75.0 x" in line]


def test_one_side_alone_has_no_ratios() -> None:
    """There is nothing to compare with."""
    assert rounds.table({"1MB": {"parley": _FIGURES}}).row_count == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rounds", "1"], "the first round does not count"),
        (["--sites", "1"], "the first round does not count"),
        (["--sizes", "1MB,big"], "'big' is not a size"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started, the reason is told, and the exit status is that of a wrong command line."""
    assert rounds.main(["--only", "parley", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_flower_that_is_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal says how to install it, and how to do without."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    assert rounds.main([]) == 2
    assert "pip install 'parley-fl[flower]', or --only parley" in capsys.readouterr().err
