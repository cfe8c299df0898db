"""Predicts with a trained model: reads a model package, checks rows against the job's contract, and labels them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - part of the public signature that tools read at run time
from typing import TYPE_CHECKING

import pydantic

from federation import job as job_file
from federation import plugins
from federation.errors import DataContractError, RemoteProtocolError, StorageError, WhoActs
from federation.findings import refusals, told
from federation.vector import from_safetensors

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from tasks.task import Task, TaskFile

__all__ = ["Predictor"]


class _Card(pydantic.BaseModel):
    """What a prediction needs of a model card; the card's other entries are for people."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True)

    job: str
    preparation: str
    model_digest: str


@dataclass(frozen=True)
class Predictor:
    """A task, its preparation and a model with its trained weights."""

    task: Task
    preparation: bytes
    module: torch.nn.Module

    @classmethod
    def load(cls, folder: Path) -> Predictor:
        """The predictor of the model package `folder`: `model.safetensors` and `card.json`.

        Raises:
            StorageError: A file is missing or unreadable, or the model is not the one that the card describes.
            ConfigurationError: The card's job is not one that this release can do.
            RemoteProtocolError: The model or its preparation does not fit the job.
        """
        from tasks.models import model

        card = _card(_read(folder / "card.json"))
        weights = _read(folder / "model.safetensors")
        found = hashlib.sha256(weights).hexdigest()
        if found != card.model_digest:
            raise StorageError(
                f"the model in {folder} has SHA-256 {found[:12]}..., its card says {card.model_digest[:12]}...: "
                "one of them was changed",
                fix="get the model anew from the coordinator",
            )
        job = job_file.parse(card.job, source="the model card's job")
        file: TaskFile = plugins.load("tasks", job.task.kind)
        task = file.make(job)
        module = model.build(job.model, task.features, task.outputs, seed=0)
        model.load_state(module, *from_safetensors(weights))
        module.eval()
        return cls(task, card.preparation.encode(), module)

    def predict(self, table: pd.DataFrame) -> pd.DataFrame:
        """The task's prediction columns, a row for each of `table`'s, under its index; no label or split is needed.

        Raises:
            DataContractError: Rows do not meet the contract that the model was trained under; no value is shown.
        """
        import pandas as pd
        import torch

        refused = refusals(self.task.inspect(table, labelled=False))
        if refused:
            raise DataContractError(
                f"the rows do not meet the model's data contract:\n{told(refused)}",
                fix="correct the rows; the model knows nothing about values outside its contract",
                who=WhoActs.YOU,
            )
        inputs = torch.from_numpy(self.task.inputs(table, self.preparation))
        with torch.inference_mode():
            outputs = self.module(inputs).numpy()
        return pd.DataFrame(dict(self.task.describe(outputs)), index=table.index)


def _card(content: bytes) -> _Card:
    try:
        return _Card.model_validate_json(content)
    except pydantic.ValidationError as broken:
        where = ".".join(str(step) for step in broken.errors()[0]["loc"]) or "its text"
        raise RemoteProtocolError(
            f"card.json is not a model card; the first thing wrong is {where}",
            fix="get the model anew",
            who=WhoActs.YOU,
        ) from broken


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as refused:
        raise StorageError(
            f"cannot read {path}: {refused.strerror}", fix="name a folder that holds model.safetensors and card.json"
        ) from refused
