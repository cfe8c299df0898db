"""Jobs of every kind between real processes: strategies, tasks and models, stops, latecomers and absentees."""

import pytest

from tests.integration.alliance import SITES, Alliance, command, job_file, paused, patients

ENDLESS = 100_000
"""Rounds of a job that is stopped by hand."""
WITH_DUBLIN = f"sites = {[*SITES, 'dublin']}".replace("'", '"')


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
    tests = [table[table["split"] == "test"]["stage"] for table in alliance.tables.values()]
    commonest = max(sum((labels == each).sum() for labels in tests) for each in "abc") / sum(map(len, tests))
    assert alliance.metrics(view, 3)["accuracy"] > commonest


def test_a_number_is_learnt(alliance: Alliance, tmp_path: object) -> None:
    """The mean absolute error is smaller than that of always saying the mean."""
    text = job_file(
        task='target = "regression"\nlabel_range = [0, 60]', label="stay", rounds=3, epochs=10, rate=0.05
    )
    job = alliance.submit(text)
    metrics = alliance.metrics(alliance.finished(job), 3)
    tests = [table[table["split"] == "test"]["stay"] for name, table in alliance.tables.items() if name in SITES]
    everything = sum((list(labels) for labels in tests), [])
    mean = sum(everything) / len(everything)
    assert metrics["mae"] < sum(abs(value - mean) for value in everything) / len(everything)


def test_a_stopped_job_ends_at_once_and_keeps_its_rounds(alliance: Alliance) -> None:
    """Its watcher gets exit code 4; the sites hear of it and are free for the next job."""
    job = alliance.submit(job_file(rounds=ENDLESS))
    alliance.until_job(job, lambda view: view["round"] >= 2)
    assert alliance.admin_does("job", "stop", job).out == f"{job} is stopped: stopped by admin.\n"
    watched = command(alliance.admin, "job", "watch", job, "--json")
    assert (watched.code, watched.json["state"], watched.json["reason"]) == (4, "stopped", "stopped by admin")
    rounds = [each["number"] for each in watched.json["history"]]
    assert rounds == list(range(1, len(rounds) + 1))
    assert len(rounds) >= 2
    again = alliance.admin_does("job", "stop", job, "--json").json
    assert again == {"job": job, "state": "stopped"}
    for site in alliance.sites.values():
        site.says(f"job {job} stopped: stopped by admin")
    alliance.finished(alliance.submit(job_file(rounds=1)))


def test_a_watch_without_a_terminal_tells_each_round_in_a_line(alliance: Alliance) -> None:
    """So that a log has it; the last view comes whole."""
    said = command(alliance.admin, "job", "submit", alliance.write(job_file(rounds=2)), "--watch")
    assert said.code == 0
    assert "finished  round 2 of 2" in said.out
    for word in ("what holds it back", *SITES, "all 2 rounds done", "auc"):
        assert word in said.out


def test_a_site_that_stands_still_is_told_as_what_holds_the_round_back(alliance: Alliance) -> None:
    """By name, before it counts as away; when it moves again the job goes on."""
    job = alliance.submit(job_file(rounds=ENDLESS))
    alliance.until_job(job, lambda view: view["round"] >= 1)
    with paused(alliance.sites["berlin"]):
        view = alliance.until_job(
            job, lambda view: any("the round waits for it" in site["trouble"] for site in view["sites"])
        )
        assert view["reason"] == "waiting for berlin"
        troubled = {site["name"]: site["trouble"] for site in view["sites"] if site["trouble"]}
        assert list(troubled) == ["berlin"]
        stood = view["round"]
    alliance.until_job(job, lambda view: view["round"] > stood + 1)
    alliance.admin_does("job", "stop", job)


def test_a_member_that_attends_later_takes_part_from_the_next_round_and_may_go(alliance: Alliance) -> None:
    """The job began without it; when it has gone it is shown as away, and the job goes on without it."""
    alliance.enrol("dublin")
    csv = alliance.folder / "dublin.csv"
    table = patients(4)
    table.to_csv(csv, index=False)
    alliance.gives("dublin", table, str(csv))
    job = alliance.submit(job_file(rounds=ENDLESS, cohort=WITH_DUBLIN))
    alliance.until_job(job, lambda view: view["round"] >= 2)
    assert alliance.site_in(job, "dublin")["state"] == "away"

    dublin = alliance.attends("dublin")
    view = alliance.until_job(job, lambda view: view["history"][-1]["sites"] == 4)
    assert [each["sites"] for each in view["history"]][:2] == [3, 3]

    assert dublin.stop() == 0
    gone = alliance.until_job(job, lambda view: view["history"][-1]["sites"] == 3)
    away = next(site for site in gone["sites"] if site["name"] == "dublin")
    assert (away["connected"], away["state"]) == (False, "away")
    alliance.until_job(job, lambda view: view["round"] > gone["round"] + 1)
    alliance.admin_does("job", "stop", job)
    assert "Traceback" not in dublin.said
