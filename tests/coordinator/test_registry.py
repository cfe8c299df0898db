"""The final model's card: all that predicting needs, where the model came from, and nothing of any site's update."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from coordinator import registry
from coordinator.records import ModelRecord, Outcome, Share, StepRecord
from federation.blobs import BlobRef, BlobStore
from federation.errors import LocalProtocolError, StorageError
from federation.job import digest, parse
from federation.messages import JobState, Metric, StepKind
from federation.vector import Layout, TensorSpec, to_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from coordinator.records import JobRecord

MODEL = BlobRef.of(b"the best model")
METRICS = (Metric("accuracy", 0.8), Metric("loss", 0.5))


@pytest.fixture
def last(
    job_text: Callable[..., str], new_record: Callable[..., JobRecord], tmp_path: Path
) -> tuple[JobRecord, StepRecord]:
    """A job before its last step, and that step."""
    preparation = BlobStore(tmp_path).put(b'{"columns": []}')
    record = new_record(job_text(), "athens", "berlin")
    record = replace(record, preparation=preparation, metrics=((1, METRICS),), round=2, next_step=5)
    step = StepRecord(
        job=record.id,
        step=5,
        attempt=0,
        kind=StepKind.EVALUATE,
        round=2,
        started=2000.0,
        ended=2001.0,
        shares=(Share("athens", Outcome.COUNTED, seconds=1.5, bytes=4096),),
        metrics=(Metric("accuracy", 0.75),),
        best_round=1,
        state=JobState.FINISHED,
        reason="all 2 rounds done",
        final=ModelRecord(record.id, "heart", MODEL, 1, 2001.0, METRICS, ""),
    )
    return record, step


def test_a_card_tells_what_the_model_is_and_where_it_came_from(
    last: tuple[JobRecord, StepRecord], tmp_path: Path
) -> None:
    """Job, contract, preparation, sites, rounds, metrics, privacy, versions and digests; the same each time."""
    record, step = last
    text = registry.card(record, parse(record.text), step, BlobStore(tmp_path))
    card = json.loads(text)
    assert list(card) == sorted(card)
    assert card["job"] == record.text
    assert card["job_digest"] == digest(record.text).hex()
    assert card["model_digest"] == MODEL.hex
    assert card["model_bytes"] == MODEL.length
    assert card["preparation"] == '{"columns": []}'
    assert card["preparation_digest"] == BlobRef.of(b'{"columns": []}').hex
    assert card["contract"]["label"] == "disease"
    assert [column["name"] for column in card["contract"]["columns"]] == ["age"]
    assert [site["name"] for site in card["sites"]] == ["athens", "berlin"]
    assert (card["round"], card["rounds"], card["ended_because"]) == (1, 2, "all 2 rounds done")
    assert card["metrics"] == {"accuracy": 0.8, "loss": 0.5}
    assert card["history"] == [{"round": 1, "accuracy": 0.8, "loss": 0.5}, {"round": 2, "accuracy": 0.75}]
    assert card["versions"].keys() == {"parley-fl", "python"}
    assert registry.card(record, parse(record.text), step, BlobStore(tmp_path)) == text


def test_a_card_shows_no_rate_over_few_rows(last: tuple[JobRecord, StepRecord], tmp_path: Path) -> None:
    """Neither the model's nor a round's; of fewer than five rows not even their number."""
    record, step = last
    few = (Metric("accuracy", 0.8), Metric("n", 19.0))
    final = replace(step.final, metrics=few)
    record = replace(record, metrics=((1, few),))
    step = replace(step, final=final, metrics=(Metric("accuracy", 0.75), Metric("n", 4.0)))
    card = json.loads(registry.card(record, parse(record.text), step, BlobStore(tmp_path)))
    assert card["metrics"] == {"n": 19.0}
    assert card["history"] == [{"round": 1, "n": 19.0}, {"round": 2}]


def test_a_card_does_not_promise_more_privacy_than_there_was(
    last: tuple[JobRecord, StepRecord], tmp_path: Path
) -> None:
    """Plain aggregation and no differential privacy are said in plain words."""
    record, step = last
    privacy = json.loads(registry.card(record, parse(record.text), step, BlobStore(tmp_path)))["privacy"]
    assert privacy["secure_aggregation"] == "plain"
    assert "the coordinator saw each site's update and weight" in privacy["statement"]
    assert "No differential privacy was applied" in privacy["statement"]


def test_a_card_tells_that_aggregation_was_secure(last: tuple[JobRecord, StepRecord], tmp_path: Path) -> None:
    """Of secure aggregation it says what the coordinator saw, and that no differential privacy was applied."""
    record, step = last
    record = replace(record, text=record.text.replace('secure_aggregation = "plain"', ""))
    privacy = json.loads(registry.card(record, parse(record.text), step, BlobStore(tmp_path)))["privacy"]
    assert privacy["secure_aggregation"] == "rostersum"
    assert "the coordinator saw sums over several sites, and no site's update or weight" in privacy["statement"]
    assert "No differential privacy was applied" in privacy["statement"]


def test_a_card_tells_what_noise_has_promised(last: tuple[JobRecord, StepRecord], tmp_path: Path) -> None:
    """Of this roster and this model: level, epsilon, delta, and what lies outside."""
    record, step = last
    model = BlobStore(tmp_path).put(to_safetensors(Layout((TensorSpec("w", (5,)),)), np.zeros(5, np.float32)))
    noise = 'churn = "dp"\n[privacy.differential_privacy]\nlevel = "site"\nepsilon = 6.0\ndelta = 0.01\n'
    text = record.text.replace('secure_aggregation = "plain"', noise)
    record = replace(record, text=text, roster=record.roster[:1] * 4)
    step = replace(step, final=replace(step.final, payload=model))
    privacy = json.loads(registry.card(record, parse(text), step, BlobStore(tmp_path)))["privacy"]["statement"]
    assert "No differential privacy" not in privacy
    assert "level site, unit: all records of one site" in privacy
    assert "(epsilon = 6, delta = 0.01)-indistinguishable" in privacy
    assert "There are 4 sites" in privacy
    assert "Outside it: statistics and evaluations are exact sums" in privacy


def test_a_card_tells_nothing_of_a_single_site_but_its_name(last: tuple[JobRecord, StepRecord], tmp_path: Path) -> None:
    """Not its seconds, its bytes, or whether it was counted."""
    record, step = last
    card = json.loads(registry.card(record, parse(record.text), step, BlobStore(tmp_path)))
    assert [set(site) for site in card["sites"]] == [{"name", "organisation"}] * 2


def test_a_job_that_ends_without_a_model_has_no_card(last: tuple[JobRecord, StepRecord], tmp_path: Path) -> None:
    """Asking for one is our own mistake."""
    record, step = last
    for job, end in ((record, replace(step, final=None)), (replace(record, preparation=None), step)):
        with pytest.raises(LocalProtocolError, match="job heart-1 ends without a model"):
            registry.card(job, parse(record.text), end, BlobStore(tmp_path))


def test_a_lost_preparation_is_named(last: tuple[JobRecord, StepRecord], tmp_path: Path) -> None:
    """The conductor insists until it is restored."""
    record, step = last
    with pytest.raises(StorageError, match="restore it from a backup"):
        registry.card(record, parse(record.text), step, BlobStore(tmp_path / "elsewhere"))
