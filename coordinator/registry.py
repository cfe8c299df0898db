"""The final model's card: what it is, where it came from, how good it is, and what was promised about privacy."""

import json
import platform
from importlib import metadata

from coordinator.records import JobRecord, StepRecord
from federation import disclosure
from federation.blobs import BlobRef, BlobStore
from federation.errors import LocalProtocolError
from federation.job import Job, digest
from federation.messages import Metric
from federation.vector import from_safetensors

__all__ = ["card"]

_AGGREGATION = {
    "plain": "Aggregation was plain: the coordinator saw each site's update and weight.",
    "rostersum": "Aggregation was secure: the coordinator saw sums over several sites, and no site's update or weight.",
}
"""What the coordinator saw of the sites' contributions."""


def card(record: JobRecord, job: Job, step: StepRecord, blobs: BlobStore) -> str:
    """The card of the model with which `step` ends the job, as JSON text with sorted keys.

    It carries all that predicting needs beside the tensors: the job file and the preparation.
    """
    final = step.final
    if final is None or record.preparation is None:
        raise LocalProtocolError(f"job {record.id} ends without a model")
    preparation = blobs.get(record.preparation)
    history = [
        {"round": number, **_plain(metrics)}
        for number, metrics in sorted({**dict(record.metrics), step.round: step.metrics}.items())
    ]
    content = {
        "format": 1,
        "name": record.name,
        "description": job.description,
        "job_id": record.id,
        "job": record.text,
        "job_digest": digest(record.text).hex(),
        "task": job.task.kind,
        "model": job.model.name,
        "strategy": job.strategy.name,
        "contract": {
            "dataset": job.data.dataset,
            "label": job.data.label,
            "columns": [column.model_dump(mode="json") for column in job.data.columns],
        },
        "model_digest": final.payload.hex,
        "model_bytes": final.payload.length,
        "preparation": preparation.decode(),
        "preparation_digest": record.preparation.hex,
        "sites": [{"name": member.name, "organisation": member.organisation} for member in record.roster],
        "round": final.round,
        "rounds": step.round,
        "ended_because": step.reason,
        "metrics": _plain(final.metrics),
        "history": history,
        "privacy": {
            "secure_aggregation": job.privacy.secure_aggregation,
            "statement": (
                f"No record left its site. {_AGGREGATION[job.privacy.secure_aggregation]} "
                f"{_guarantee(job, len(record.roster), final.payload, blobs)}"
            ),
        },
        "submitted": record.submitted,
        "created": final.created,
        "versions": {"parley-fl": metadata.version("parley-fl"), "python": platform.python_version()},
    }
    return json.dumps(content, indent=2, sort_keys=True)


def _guarantee(job: Job, sites: int, model: BlobRef, blobs: BlobStore) -> str:
    """What noise in the sums promised each site; or that there was none."""
    if job.privacy.churn != "dp":
        return "No differential privacy was applied: the model itself may reveal something about training records."
    from privacy.secure_aggregation.rostersum import plans, promise  # accountants, which other jobs need no memory for

    layout, _ = from_safetensors(blobs.mapped(model))
    found = plans.foreseen(job, sites, layout.size)
    if found is None:
        raise LocalProtocolError("a job with noise promises nothing")
    return promise.statement(found)


def _plain(metrics: tuple[Metric, ...]) -> dict[str, float]:
    """Metrics as the card shows them to whoever has the model."""
    return {metric.name: metric.value for metric in disclosure.shown(metrics)}
