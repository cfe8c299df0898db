"""Jobs of every kind between real processes: each strategy, each kind of label, both models."""

import pandas as pd
import pytest

from tests.integration.alliance import SITES, Alliance, command, job_file


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_every_strategy_finishes(alliance: Alliance, strategy: str) -> None:
    """Two rounds; the card names it and the model is better than a coin's toss."""
    job = alliance.submit(job_file(strategy=f'name = "{strategy}"'))
    view = alliance.finished(job)
    assert [each["sites"] for each in view["history"]] == [3, 3]
    assert alliance.metrics(view, 2)["auc"] > 0.6
    assert alliance.admin_does("model", "show", job, "--json").json["strategy"] == strategy


def test_more_than_two_classes_are_learnt(alliance: Alliance) -> None:
    """By a network with a hidden layer; better than always saying the commonest class."""
    text = job_file(
        task='target = "multiclass"\nclasses = ["a", "b", "c"]',
        label="stage",
        model='name = "mlp"\nhidden = [8]',
        rounds=3,
        epochs=10,
    )
    view = alliance.finished(alliance.submit(text))
    tests = [table[table["split"] == "test"]["stage"] for name, table in alliance.tables.items() if name in SITES]
    commonest = max(sum((labels == each).sum() for labels in tests) for each in "abc") / sum(map(len, tests))
    assert alliance.metrics(view, 3)["accuracy"] > commonest


def test_a_number_is_learnt(alliance: Alliance) -> None:
    """The mean absolute error is smaller than that of always saying the mean."""
    text = job_file(task='target = "regression"\nlabel_range = [0, 60]', label="stay", rounds=3, epochs=10, rate=0.05)
    job = alliance.submit(text)
    metrics = alliance.metrics(alliance.finished(job), 3)
    tests = [table[table["split"] == "test"]["stay"] for name, table in alliance.tables.items() if name in SITES]
    truth = pd.concat(tests)
    assert metrics["mae"] < (truth - truth.mean()).abs().mean()


def test_a_watch_without_a_terminal_tells_each_round_in_a_line(alliance: Alliance) -> None:
    """So that a log has it; the last view comes whole."""
    said = command(alliance.admin, "job", "submit", alliance.write(job_file(rounds=2)), "--watch")
    assert said.code == 0
    assert "finished  round 2 of 2" in said.out
    for word in ("what holds it back", *SITES, "all 2 rounds done", "auc"):
        assert word in said.out
