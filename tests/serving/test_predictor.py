import hashlib
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from federation import job as job_file
from federation.errors import DataContractError, RemoteProtocolError, StorageError
from federation.vector import to_safetensors
from serving.predictor import Predictor
from tasks import tabular
from tasks.models import model

TEXT, TABLE = tabular.example(np.random.default_rng(0))
WEIGHTS = np.array([1.0, -0.5, 2.0, 0.25, 0.1], np.float32)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A model package: known weights on the example's job."""
    job = job_file.parse(TEXT)
    task = tabular.make(job)
    layout, _ = model.state_vector(model.build(job.model, task.features, task.outputs, 0))
    weights = to_safetensors(layout, WEIGHTS)
    (tmp_path / "model.safetensors").write_bytes(weights)
    card = {
        "job": TEXT,
        "preparation": task.prepare(task.statistics(TABLE)).decode(),
        "model_digest": hashlib.sha256(weights).hexdigest(),
        "sites": ["north", "south"],
    }
    (tmp_path / "card.json").write_text(json.dumps(card))
    return tmp_path


def test_predictions_are_those_of_the_trained_model(package: Path) -> None:
    """The same inputs and weights give the probability, computed here by hand; the index is the table's own."""
    rows = TABLE.drop(columns="sick").set_axis(range(100, 160))
    found = Predictor.load(package).predict(rows)
    task = tabular.make(job_file.parse(TEXT))
    inputs = task.inputs(TABLE, task.prepare(task.statistics(TABLE)))
    expected = 1 / (1 + np.exp(-(inputs @ WEIGHTS[:4] + WEIGHTS[4])))
    np.testing.assert_allclose(found["probability"], expected, rtol=1e-5)
    assert list(found["class"]) == list((expected > 0.5).astype(int))
    assert list(found.index) == list(range(100, 160))


def test_one_row_and_no_rows_can_be_predicted_for(package: Path) -> None:
    """The number of rows is the table's."""
    predictor = Predictor.load(package)
    assert len(predictor.predict(TABLE[:1])) == 1
    assert len(predictor.predict(TABLE[:0])) == 0


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (TABLE.drop(columns="age"), "data.columns.age: the data has no column 'age'; add it"),
        (TABLE.assign(age=777), "data.columns.age: 60 rows lie outside the public range 0 to 120 years"),
        (TABLE.assign(pain="zebra"), "data.columns.pain: 60 rows hold none of the contract's values"),
        (TABLE.assign(age=np.nan), "data.columns.age: 60 rows have no value"),
    ],
)
def test_rows_outside_the_contract_are_refused_by_count(package: Path, rows: pd.DataFrame, told: str) -> None:
    """The same findings as at a site; no value is shown."""
    with pytest.raises(DataContractError) as refused:
        Predictor.load(package).predict(rows)
    assert told in str(refused.value)
    assert "777" not in str(refused.value)
    assert "zebra" not in str(refused.value)


def test_a_changed_model_is_refused(package: Path) -> None:
    """One flipped bit, and the card no longer describes the file."""
    file = package / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(StorageError, match="one of them was changed"):
        Predictor.load(package)


@pytest.mark.parametrize("name", ["model.safetensors", "card.json"])
def test_an_incomplete_package_names_the_missing_file(package: Path, name: str) -> None:
    """Both files are needed."""
    (package / name).unlink()
    with pytest.raises(StorageError, match=rf"cannot read .*{name}") as refused:
        Predictor.load(package)
    assert refused.value.fix == "name a folder that holds model.safetensors and card.json"


@pytest.mark.parametrize(("text", "where"), [("no card", "its text"), ('{"job": 1}', "job")])
def test_a_card_that_is_none_is_refused(package: Path, text: str, where: str) -> None:
    """The first thing wrong is named."""
    (package / "card.json").write_text(text)
    with pytest.raises(RemoteProtocolError, match=f"card.json is not a model card; the first thing wrong is {where}"):
        Predictor.load(package)


def test_another_jobs_model_is_refused(package: Path) -> None:
    """A card whose digest fits and whose job does not is told by the first tensor that differs."""
    card = json.loads((package / "card.json").read_text())
    card["job"] = card["job"].replace('["none", "typical", "other"]', '["none", "typical"]')
    (package / "card.json").write_text(json.dumps(card))
    with pytest.raises(RemoteProtocolError, match="the first difference is weight"):
        Predictor.load(package)
