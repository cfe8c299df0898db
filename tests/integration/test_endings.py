"""Coordinator and sites end when they are told to, quietly and with exit code 0; a watcher may go at any time."""

import shutil
import signal
from pathlib import Path

from tests.integration.alliance import SITES, Alliance, command, ended, job_file, started


def test_a_coordinator_that_is_told_to_end_ends_well_and_its_sites_come_back(alliance: Alliance) -> None:
    """SIGTERM: exit code 0, no traceback; the sites hear why, and attend again by themselves."""
    attended = {site: alliance.sites[site].said.count("attending hub") for site in SITES}
    starts = alliance.coordinator.said.count("serves study")
    assert alliance.coordinator.stop() == 0
    assert alliance.coordinator.said.endswith("ended\n")
    assert "Traceback" not in alliance.coordinator.said

    away = command(alliance.admin, "job", "list")
    assert (away.code, away.out) == (3, "")
    assert f"unreachable: the coordinator at {alliance.address} cannot be reached" in away.err
    assert "to fix (you): check that it runs (parley coordinator serve)" in away.err
    assert command(alliance.admin, "job", "list", "--json").json["error"]["kind"] == "UnreachableError"

    alliance.coordinator.start()
    alliance.coordinator.says("serves study", starts + 1)
    for site in SITES:
        alliance.sites[site].says("attending hub", attended[site] + 1)
        assert "the coordinator is shutting down" in alliance.sites[site].said
        assert "Traceback" not in alliance.sites[site].said
        assert "ERROR" not in alliance.sites[site].said


def test_a_job_waits_for_a_site_that_ended_and_a_watcher_may_go(alliance: Alliance) -> None:
    """SIGTERM: the site ends with exit code 0. Interrupting who watches the waiting job gives 130 and no traceback."""
    cork = alliance.sites["cork"]
    assert cork.stop() == 0
    assert cork.said.endswith("ended\n")
    assert "Traceback" not in cork.said

    job = alliance.submit(job_file(rounds=1))
    reason = "waiting for 1 more of 3 sites (not attending: cork)"  # at first it waits for the others' answers too
    view = alliance.until_job(job, lambda view: view["reason"] == reason)
    assert (alliance.site(view, "cork")["connected"], alliance.site(view, "cork")["state"]) == (False, "away")

    watcher = started(alliance.admin, "job", "watch", job)
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == f"{job}  waiting  round 0 of 1\n"
    watcher.send_signal(signal.SIGINT)
    said = ended(watcher)
    assert (said.code, said.out, said.err) == (130, "", "")

    cork.start()
    alliance.finished(job)


def test_a_second_coordinator_cannot_take_the_store_or_the_port(alliance: Alliance, tmp_path: Path) -> None:
    """It says who holds the one, and how to find out who holds the other."""
    said = ended(started(alliance.home("hub"), "coordinator", "serve", "--listen", alliance.address))
    assert (said.code, said.out) == (1, "")
    assert f"another coordinator (process {alliance.coordinator.process.pid} " in said.err

    shutil.copytree(alliance.home("hub") / "coordinator" / "identity", tmp_path / "coordinator" / "identity")
    said = ended(started(tmp_path, "coordinator", "serve", "--listen", alliance.address))
    assert (said.code, said.out) == (1, "")
    assert f"cannot listen on {alliance.address}" in said.err
    assert "choose another with --listen" in said.err
