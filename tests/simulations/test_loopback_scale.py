import io
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from federation.errors import LocalProtocolError
from privacy.secure_aggregation.rostersum.terms import Churn
from simulations import loopback_scale
from simulations.loopback import Loopback, Outcome, Summation
from simulations.loopback_job import LoopbackJob
from simulations.loopback_scale import LoopbackCost

COST = LoopbackCost(
    sites=100,
    rounds=10,
    parameters=100_000,
    churn=Churn.CELLS,
    seconds=60.0,
    cpu_seconds=50.0,
    setup_cpu_seconds=10.0,
    round_cpu_seconds=4.0,
    load_average=1.5,
)


def test_the_command_prints_the_promised_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The sizes asked for, seconds of all kinds, and the bar; the table goes to standard error."""
    sizes = ["--sites", "4", "--rounds", "2", "--parameters", "1000"]
    assert loopback_scale.main(["--json", *sizes]) == 0

    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    assert (figures["sites"], figures["rounds"], figures["parameters"], figures["churn"]) == (4, 2, 1000, "cells")
    assert 0 < figures["setup_cpu_seconds"] < figures["cpu_seconds"]
    assert figures["bars"][0]["holds"]
    assert "4 sites, 2 rounds, 1,000 parameters" in printed.err


def test_progress_grows_to_the_end() -> None:
    """Whoever waits is told of the keys, and of each round while it goes on."""
    told: list[tuple[str, float]] = []

    loopback_scale.measure(LoopbackJob.of(3, 100, Churn.CELLS, post_quantum=False), 2, lambda *each: told.append(each))

    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert [what for what, _ in told] == ["keys of all pairs", *["round 1 of 2"] * 6, *["round 2 of 2"] * 6, "done"]
    assert shares[-1] == shares[-2] == 1.0


def test_a_wrong_sum_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round whose sum is not that of the vectors ends the benchmark, in words."""
    step = Loopback.step

    def off(loop: Loopback, *arguments: Any) -> Outcome:
        outcome = step(loop, *arguments)
        return replace(outcome, sums=(Summation(outcome.sums[0].members, outcome.sums[0].words + np.uint32(1)),))

    monkeypatch.setattr(Loopback, "step", off)
    with pytest.raises(LocalProtocolError, match="not give the sum of the sites' vectors: it is another sum"):
        loopback_scale.measure(LoopbackJob.of(3, 100, Churn.CELLS, post_quantum=False), 1, lambda *_: None)


@pytest.mark.parametrize("churn", list(Churn))
def test_every_churn_rule_is_measured(churn: Churn, capsys: pytest.CaptureFixture[str]) -> None:
    """Its sums are checked as its rule has them; with noise vectors are padded to a power of two."""
    sizes = ["--sites", "4", "--rounds", "1", "--parameters", "1000"]
    assert loopback_scale.main(["--json", *sizes, "--churn", churn.value]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["churn"], figures["parameters"]) == (churn.value, 1024 if churn is Churn.DP else 1000)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_sum_with_other_noise_is_no_measurement(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Half the noise, or twice as much, ends the benchmark, in words; so does no sum at all."""
    job, encode = LoopbackJob.of(3, 1000, Churn.DP, post_quantum=False), loopback_scale.encoded

    def off(work: Any, update: Any) -> Any:
        words = encode(work, update)
        words[:-4] = (words[:-4].view("<i4") * factor).astype("<i4").view("<u4")
        return words

    monkeypatch.setattr(loopback_scale, "encoded", off)
    with pytest.raises(LocalProtocolError, match=r"a sum's noise has [\d.]+ times the variance") as refused:
        loopback_scale.measure(job, 1, lambda *_: None)
    (told,) = re.findall(r"has ([\d.]+) times", str(refused.value))
    assert float(told) == pytest.approx(factor**2, rel=0.4)  # nine standard errors of a thousand values
    monkeypatch.setattr(Loopback, "step", lambda *_: Outcome((), ()))
    with pytest.raises(LocalProtocolError, match="a round has no sum"):
        loopback_scale.measure(job, 1, lambda *_: None)


@pytest.mark.parametrize(("seconds", "verdict", "holds"), [(119.0, "yes", True), (121.0, "no", False)])
def test_the_table_holds_the_seconds_against_the_bar(seconds: float, verdict: str, holds: bool) -> None:  # noqa: FBT001 - a table's column
    """Wall time is held against two minutes; CPU time stands beside it."""
    cost = replace(COST, seconds=seconds)
    console = Console(width=160, file=io.StringIO(), record=True)

    console.print(loopback_scale.table(cost))

    text = console.export_text()
    assert [bar.holds for bar in cost.bars] == [holds]
    assert f"{seconds:.1f} s" in text
    assert verdict in text
    assert "50.0 s" in text


@pytest.mark.parametrize("sizes", [["--sites", "0"], ["--rounds", "-1"], ["--parameters", "0"], ["--sites", "101"]])
def test_sizes_that_mean_nothing_are_refused(sizes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is told, and the exit status is that of a wrong command line."""
    assert loopback_scale.main(sizes) == 2

    assert "refused: " in capsys.readouterr().err
