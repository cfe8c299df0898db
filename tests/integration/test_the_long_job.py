"""A job that runs until it is stopped: who stands still, who comes later, who goes."""

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

    with paused(alliance.sites["berlin"]):  # spares the machine that runs the tests: nobody trains meanwhile
        running = alliance.attends(dublin)
        running.says(f"accepted job {endless}")
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
