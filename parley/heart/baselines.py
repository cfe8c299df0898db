"""What the federation is compared with: one model from all records in one place, and one from each hospital's alone.

Rows, features and metrics are the job's own, so all figures speak of the same test rows. The model is logistic
regression, fitted to its optimum by L-BFGS with scikit-learn's customary penalty (C = 1; the intercept goes free).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from scipy.special import expit

from federation import plugins
from federation.job import Job
from federation.vector import F32, F64
from tasks.task import Examples, Task

__all__ = ["Alone", "Score", "alone", "pooled"]


@dataclass(frozen=True, slots=True)
class Score:
    """How a model did on `n` test rows. `auc` is None where they are all of one class."""

    accuracy: float
    auc: float | None
    n: int


@dataclass(frozen=True, slots=True)
class Alone:
    """How one hospital's own model did on its own test rows, and on those of all hospitals."""

    own: Score
    everywhere: Score


def pooled(tables: Mapping[str, pd.DataFrame], job: Job) -> Score:
    """The model that all hospitals' training rows in one place would give, scored on all their test rows."""
    task = _task(job)
    parts = [task.split(table) for table in tables.values()]
    return _Model.fitted(task, [train for train, _ in parts]).score([test for _, test in parts])


def alone(tables: Mapping[str, pd.DataFrame], job: Job) -> dict[str, Alone]:
    """What each hospital could do without the others: its own training rows, scaled by their own statistics."""
    task = _task(job)
    parts = {site: task.split(table) for site, table in tables.items()}
    everywhere = [test for _, test in parts.values()]
    scores: dict[str, Alone] = {}
    for site, (train, test) in parts.items():
        model = _Model.fitted(task, [train])
        scores[site] = Alone(own=model.score([test]), everywhere=model.score(everywhere))
    return scores


@dataclass(frozen=True, slots=True)
class _Model:
    """A fitted model: the task's preparation, a weight per feature, and the intercept."""

    task: Task
    preparation: bytes
    weights: F64
    intercept: float

    @classmethod
    def fitted(cls, task: Task, tables: Iterable[pd.DataFrame]) -> "_Model":
        """The optimum on the rows of all `tables`, prepared by the sum of their statistics."""
        trains = list(tables)
        total = _sum(task.statistics(train) for train in trains) if task.statistics_size else None
        preparation = task.prepare(total)
        examples = [task.examples(train, preparation) for train in trains]
        inputs = np.concatenate([each.inputs for each in examples]).astype(np.float64)
        labels = np.concatenate([each.labels for each in examples]).astype(np.float64)
        weights, intercept = _logistic(inputs, labels)
        return cls(task, preparation, weights, intercept)

    def score(self, tables: Iterable[pd.DataFrame]) -> Score:
        """The task's own metrics over the rows of all `tables`."""
        examples = [self.task.examples(table, self.preparation) for table in tables]
        metrics = self.task.metrics(_sum(self.task.evaluate(self._logits(each), each.labels) for each in examples))
        return Score(metrics["accuracy"], metrics.get("auc"), int(metrics["n"]))

    def _logits(self, examples: Examples) -> F32:
        """One column of logits, as the job's own model gives them [rows, 1]."""
        logits = examples.inputs.astype(np.float64) @ self.weights + self.intercept
        return logits.astype(np.float32)[:, np.newaxis]


def _task(job: Job) -> Task:
    task: Task = plugins.load("tasks", job.task.kind).make(job)
    return task


def _sum(vectors: Iterable[F64]) -> F64:
    total: F64 = np.sum(list(vectors), axis=0)
    return total


def _logistic(inputs: F64, labels: F64) -> tuple[F64, float]:
    """Weights [features] and intercept that minimise the summed log loss + |weights|^2 / 2.

    Rows of one class have their optimum at an infinite intercept; L-BFGS stops at a finite one that says that class.
    """

    def loss(parameters: F64) -> tuple[float, F64]:
        weights, intercept = parameters[:-1], parameters[-1]
        logits = inputs @ weights + intercept
        excess = expit(logits) - labels
        value = np.logaddexp(0, logits).sum() - labels @ logits + weights @ weights / 2
        return float(value), np.append(inputs.T @ excess + weights, excess.sum())

    best = minimize(loss, np.zeros(inputs.shape[1] + 1), jac=True, method="L-BFGS-B").x
    return best[:-1], float(best[-1])
