"""The interface of a task: pure functions from tables and sums to arrays and metrics. No torch, no pandas."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    from federation.findings import Finding
    from federation.job import Job
    from federation.sums import SumField
    from federation.vector import F32, F64

__all__ = ["Better", "Examples", "Loss", "Task", "TaskFile"]

Better = Literal["higher", "lower"]
"""Which way a metric improves."""


class Loss(Enum):
    """What local training minimises, given outputs [rows, outputs] and labels [rows]."""

    LOGISTIC = "logistic"
    """Binary cross-entropy of one logit; labels 0 and 1."""
    CROSS_ENTROPY = "cross_entropy"
    """Softmax cross-entropy of one logit per class; labels 0 .. outputs - 1."""
    SQUARED = "squared"
    """Mean squared error of one value."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Model inputs and labels: `inputs` [rows, features] float32; `labels` [rows] int64 (classes) or float32."""

    inputs: F32
    labels: npt.NDArray[np.generic]


@runtime_checkable
class Task(Protocol):
    """A task of one job. Everything that crosses sites is a float64 vector which is *summed*.

    The task alone knows what the words of such a vector mean.
    """

    @property
    def features(self) -> int:
        """Columns of a model's input."""
        ...

    @property
    def outputs(self) -> int:
        """Columns of a model's output: 1 (binary logit, regression) or the number of classes."""
        ...

    @property
    def statistics_size(self) -> int:
        """Words of the statistics vector; 0 when the job needs no statistics step."""
        ...

    @property
    def evaluation_size(self) -> int:
        """Words of the evaluation vector."""
        ...

    @property
    def statistics_fields(self) -> tuple[SumField, ...]:
        """What the words of the statistics vector are, in their order; none when the job needs no statistics step."""
        ...

    @property
    def evaluation_fields(self) -> tuple[SumField, ...]:
        """What the words of the evaluation vector are, in their order."""
        ...

    @property
    def loss(self) -> Loss:
        """What local training minimises."""
        ...

    @property
    def better(self) -> Mapping[str, Better]:
        """Every metric by which a best model may be chosen, and which way it improves."""
        ...

    def inspect(self, table: pd.DataFrame, *, labelled: bool = True) -> tuple[Finding, ...]:
        """What of the contract's columns (and label, where the table has one) `table` does not meet; shows no value."""
        ...

    def split(self, table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Training and test rows, as the contract says; rows that the contract drops are gone."""
        ...

    def statistics(self, training: pd.DataFrame) -> F64:
        """This site's share of the federated statistics [statistics_size], from its training rows."""
        ...

    def prepare(self, total: F64 | None) -> bytes:
        """The preparation (canonical JSON: means, scales, fills) from the summed statistics, or from public ranges."""
        ...

    def inputs(self, table: pd.DataFrame, preparation: bytes) -> F32:
        """Model inputs [rows, features] of `table`'s rows, labelled or not."""
        ...

    def labels(self, table: pd.DataFrame) -> npt.NDArray[np.generic]:
        """Labels [rows] of `table`'s rows: int64 classes or float32 values."""
        ...

    def examples(self, table: pd.DataFrame, preparation: bytes) -> Examples:
        """Model inputs and labels of `table`'s rows."""
        ...

    def evaluate(self, outputs: F32, labels: npt.NDArray[np.generic]) -> F64:
        """This site's share of the evaluation [evaluation_size]: counts, losses and score histograms of test rows."""
        ...

    def metrics(self, total: F64) -> Mapping[str, float]:
        """Metrics of summed evaluations, by name: `loss`, `n`, and e.g. `accuracy`, `auc`, `rmse`."""
        ...

    def describe(self, outputs: F32) -> Mapping[str, npt.NDArray[np.generic]]:
        """Columns of predictions that people read: probabilities, class, value."""
        ...


class TaskFile(Protocol):
    """What a file in `tasks/` offers, beside `Settings` (below `TaskSettings`, its `kind` the file's name)."""

    def check_job(self, job: Job) -> None:
        """Refuses, with a ConfigurationError that names the key, what this task cannot do."""
        ...

    def make(self, job: Job) -> Task:
        """The task of a job that `check_job` let pass."""
        ...

    def example(self, rng: np.random.Generator) -> tuple[str, pd.DataFrame]:
        """A small job file of this kind and rows that meet it: what the contract suite runs."""
        ...
