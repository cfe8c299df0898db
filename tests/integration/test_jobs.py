"""Jobs of every kind between real processes: strategies, tasks and models, stops, latecomers and absentees."""

import pandas as pd
import pytest

from tests.integration.alliance import SITES, Alliance, command, job_file, patients, paused


@pytest.fixture(scope="module")
def dublin(alliance: Alliance) -> str:
    """A fourth member, which does not attend yet."""
    alliance.enrol("dublin")
    csv = alliance.folder / "dublin.csv"
    table = patients(4)
    table.to_csv(csv, index=False)
    alliance.gives("dublin", table, str(csv))
    return "dublin"


@pytest.fixture
def endless(alliance: Alliance, dublin: str) -> str:
    """A running job that only an operator ends, with dublin in its roster; tests share it while it runs."""
    name = "endless"
    for job in alliance.admin_does("job", "list", "--json").json:
        if job["name"] == name and job["state"] == "running":
            return str(job["id"])
    sites = ", ".join(f'"{site}"' for site in (*SITES, dublin))
    job = alliance.submit(job_file(name, rounds=100_000, epochs=1, deadline=5, cohort=f"sites = [{sites}]"))
    alliance.until_job(job, lambda view: view["round"] >= 2)
    return job


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


def test_a_site_that_stands_still_is_told_as_what_holds_the_round_back(alliance: Alliance, endless: str) -> None:
    """By name, long before it counts as away; when it moves again the job goes on."""
    with paused(alliance.sites["berlin"]):
        view = alliance.until_job(endless, lambda view: "berlin" in view["reason"])
        assert view["reason"] == "waiting for berlin"
        berlin = alliance.site(view, "berlin")
        assert (berlin["connected"], berlin["state"] != "away") == (True, True)
        assert "the round waits for it" in berlin["trouble"]
    alliance.until_job(endless, lambda later: later["round"] > view["round"] + 1)


def test_a_member_that_attends_later_takes_part_from_the_next_round_and_may_go(
    alliance: Alliance, endless: str, dublin: str
) -> None:
    """The job began without it; when it has gone it is shown as away, and the job goes on without it."""
    view = alliance.job(endless)
    assert alliance.site(view, dublin)["state"] == "away"
    assert {each["sites"] for each in view["history"]} == {3}

    running = alliance.attends(dublin)
    view = alliance.until_job(endless, lambda view: view["history"][-1]["sites"] == 4)
    assert alliance.site(view, dublin)["connected"]

    assert running.stop() == 0
    assert "Traceback" not in running.said
    view = alliance.until_job(endless, lambda view: view["history"][-1]["sites"] == 3)
    assert (alliance.site(view, dublin)["connected"], alliance.site(view, dublin)["state"]) == (False, "away")


def test_a_stopped_job_ends_at_once_and_keeps_its_rounds(alliance: Alliance, endless: str) -> None:
    """Its watcher gets exit code 4, the sites hear of it, and stopping it again changes nothing."""
    assert alliance.admin_does("job", "stop", endless).out == f"{endless} is stopped: stopped by admin.\n"
    watched = command(alliance.admin, "job", "watch", endless, "--json")
    assert (watched.code, watched.json["state"], watched.json["reason"]) == (4, "stopped", "stopped by admin")
    rounds = [each["number"] for each in watched.json["history"]]
    assert rounds == list(range(1, len(rounds) + 1))
    assert len(rounds) >= 2
    assert alliance.admin_does("job", "stop", endless, "--json").json == {"job": endless, "state": "stopped"}
    for site in SITES:
        alliance.sites[site].says(f"job {endless} stopped: stopped by admin")
