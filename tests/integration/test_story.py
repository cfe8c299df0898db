"""The whole story: from a job file to a model that predicts."""

import hashlib
import json
from pathlib import Path

import pandas as pd
import pytest

from federation.job import digest, parse
from parley.heart import baselines
from serving.predictor import Predictor
from tests.integration.alliance import SITES, Alliance, command, ended, job_file, started

ROUNDS = 6
TEXT = job_file(rounds=ROUNDS, privacy="")
"""Under what a job has that asks for nothing else: secure aggregation."""


@pytest.fixture(scope="module")
def job(alliance: Alliance) -> str:
    """The id of a job that has been submitted and watched to its end, as a user does it."""
    said = ended(started(alliance.admin, "job", "submit", alliance.write(TEXT), "--watch", "--json"))
    assert (said.code, said.err) == (0, "")
    assert said.json["state"] == "finished"
    assert said.json["reason"] == f"all {ROUNDS} rounds done"
    return str(said.json["id"])


@pytest.fixture(scope="module")
def package(alliance: Alliance, job: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the job's model."""
    folder = tmp_path_factory.mktemp("models") / "risk"
    alliance.admin_does("model", "get", job, "--to", str(folder))
    return folder


def test_a_watched_job_ends_with_exit_code_0_and_its_last_view(alliance: Alliance, job: str) -> None:
    """Watching a job that is over tells the same at once."""
    said = command(alliance.admin, "job", "watch", job, "--json")
    assert said.code == 0
    shown = alliance.job(job)
    assert [said.json[key] for key in ("id", "state", "round")] == [shown[key] for key in ("id", "state", "round")]


def test_every_round_is_told_with_its_sites_and_metrics(alliance: Alliance, job: str) -> None:
    """Rounds 1 to R, all three sites in each, a loss that falls, and bytes and seconds that are spent."""
    view = alliance.job(job)
    assert [each["number"] for each in view["history"]] == list(range(1, ROUNDS + 1))
    assert {each["sites"] for each in view["history"]} == {3}
    assert all(each["seconds"] > 0 and each["bytes"] > 0 for each in view["history"])
    losses = [alliance.metrics(view, number)["loss"] for number in range(1, ROUNDS + 1)]
    assert losses[-1] < losses[0]
    tests = sum((alliance.tables[site]["split"] == "test").sum() for site in SITES)
    assert alliance.metrics(view, ROUNDS)["n"] == tests
    assert [(site["name"], site["connected"], site["trouble"]) for site in view["sites"]] == [
        (name, True, "") for name in SITES
    ]


def test_the_federated_model_is_about_as_good_as_one_from_all_rows_in_one_place(alliance: Alliance, job: str) -> None:
    """AUC and accuracy on the same test rows, within 3 points of logistic regression on the same training rows."""
    central = baselines.pooled({site: alliance.tables[site] for site in SITES}, parse(TEXT))
    federated = alliance.metrics(alliance.job(job), ROUNDS)
    assert central.auc is not None
    assert central.auc > 0.75
    assert federated["auc"] == pytest.approx(central.auc, abs=0.03)
    assert federated["accuracy"] == pytest.approx(central.accuracy, abs=0.05)


def test_the_card_tells_what_the_model_is_and_where_it_came_from(alliance: Alliance, job: str, package: Path) -> None:
    """Job, contract, sites, rounds, metrics, privacy, versions and digests; the model's digest is the file's."""
    card = json.loads((package / "card.json").read_text())
    assert card == alliance.admin_does("model", "show", job, "--json").json
    assert card["model_digest"] == hashlib.sha256((package / "model.safetensors").read_bytes()).hexdigest()
    assert (card["job_id"], card["job"], card["job_digest"]) == (job, TEXT, digest(TEXT).hex())
    assert (card["contract"]["dataset"], card["contract"]["label"]) == ("patients", "sick")
    assert [column["name"] for column in card["contract"]["columns"]] == ["age", "pressure", "sex"]
    assert card["sites"] == [{"name": name, "organisation": name} for name in SITES]
    assert (card["round"], card["rounds"], len(card["history"])) == (ROUNDS, ROUNDS, ROUNDS)
    assert card["metrics"] == alliance.metrics(alliance.job(job), ROUNDS)
    assert "No record left its site" in card["privacy"]["statement"]
    assert set(card["versions"]) >= {"parley-fl", "python"}
    assert hashlib.sha256(card["preparation"].encode()).hexdigest() == card["preparation_digest"]


def test_models_are_listed_with_their_digest_and_found_by_its_beginning(alliance: Alliance, job: str) -> None:
    """What `model list` shows is enough to fetch a model."""
    (listed,) = [each for each in alliance.admin_does("model", "list", "--json").json if each["job"] == job]
    card = alliance.admin_does("model", "show", listed["digest"][:10], "--json").json
    assert card["job_id"] == job
    assert job in alliance.admin_does("model", "list").out
    assert "logistic_regression by fedavg" in alliance.admin_does("model", "show", job).out


def test_a_package_is_never_written_over(alliance: Alliance, job: str, package: Path) -> None:
    """A folder that holds something is refused before anything is fetched."""
    said = command(alliance.admin, "model", "get", job, "--to", str(package))
    assert said.code == 2
    assert f"{package} is there already and not empty" in said.err
    assert "name another folder with --to" in said.err


def test_predict_gives_the_predictor_s_probabilities(alliance: Alliance, package: Path, tmp_path: Path) -> None:
    """One row for each row of the CSV, in its order; new data need neither label nor split."""
    new = alliance.tables["athens"].drop(columns=["sick", "stage", "stay", "split"])
    csv = tmp_path / "new.csv"
    new.to_csv(csv, index=False)
    output = tmp_path / "predictions.csv"
    said = command(None, "predict", str(package), str(csv), "--output", str(output))
    assert (said.code, said.err) == (0, "")
    assert "120 predictions in" in said.out
    expected = Predictor.load(package).predict(new)
    pd.testing.assert_frame_equal(pd.read_csv(output), expected, check_dtype=False)
    said = command(None, "predict", str(package), str(csv), "--output", str(tmp_path / "nowhere" / "p.csv"))
    assert (said.code, said.out) == (1, "")
    assert f"cannot write {tmp_path / 'nowhere' / 'p.csv'}: " in said.err
    assert "name another file with --output" in said.err


def test_rows_outside_the_contract_are_not_predicted(alliance: Alliance, package: Path, tmp_path: Path) -> None:
    """The column and the range are named, no value is, and exit code 2 says that the file is wrong."""
    table = alliance.tables["athens"].copy()
    table.loc[3, "age"] = 734.5
    csv = tmp_path / "new.csv"
    table.to_csv(csv, index=False)
    said = command(None, "predict", str(package), str(csv))
    assert (said.code, said.out) == (2, "")
    assert "data.columns.age: fewer than 5 rows lie outside the public range 0 to 120" in said.err
    assert "734" not in said.err


def test_no_log_has_a_traceback(alliance: Alliance, job: str) -> None:
    """Nor do the sites' logs show a record."""
    assert job
    for running in (alliance.coordinator, *alliance.sites.values()):
        assert "Traceback" not in running.said
        assert "ERROR" not in running.said
