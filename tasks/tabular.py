"""Tables of numbers and categories with a binary, multi-class or numeric label, standardised over all sites."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, Strict

from federation.errors import ConfigurationError, DataContractError, RemoteProtocolError
from federation.findings import Finding, rows
from federation.job import CategoricalColumn, NumericColumn, TaskSettings
from federation.sums import MOST_ROWS, SumField
from tasks import _columns
from tasks._evaluation import (
    BINARY_BETTER,
    CLASS_BETTER,
    COARSE,
    VALUE_BETTER,
    BinaryCounts,
    ClassCounts,
    Counts,
    ValueCounts,
)
from tasks._preparation import NumericPreparation, Preparation
from tasks.partition import stratified_split
from tasks.task import Examples, Loss

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt
    import pandas as pd

    from federation.job import DataContract, Job
    from federation.toml_lines import KeyPath
    from federation.vector import F32, F64
    from tasks.task import Better

__all__ = ["Settings", "TabularTask", "check_job", "example", "make"]

_BETTER = {"binary": BINARY_BETTER, "multiclass": CLASS_BETTER, "regression": VALUE_BETTER}

_AS_TUPLE = Strict(strict=False)
"""Takes TOML's list where a frozen value has a tuple; the items stay exact."""
_FEW = Field(max_length=1000)
"""The evaluation counts pairs of classes: a million words at most."""
_WIDEST = 1e30
_NO_VARIANCE = 1e-12
"""Variance, in squared half-widths of the public range, below which a column is a constant plus rounding."""
_FRAC = 30
"""Binary places of a sum of values within -1..1: a hundred sites' sums fit 62 bits."""
_SLACK = 1e-6
"""What summation in another order, or at fixed point, may add to a statistic, relative to the number of values."""


class Settings(TaskSettings):
    """What is predicted, and how numeric columns are scaled.

    `standardise`: `federated` takes mean and deviation over all sites' training rows by a statistics step before the
    first round; `ranges` maps each column's public range onto 0..1; `none` takes the numbers as they are.
    `classes`: the label's values of a multi-class task, in the order of the model's outputs.
    `label_range`: the public range of a regression's label; the model learns the label scaled by it to -1..1.
    """

    kind: Literal["tabular"]
    target: Literal["binary", "multiclass", "regression"]
    classes: Annotated[tuple[str, ...], _AS_TUPLE, _FEW] | Annotated[tuple[int, ...], _AS_TUPLE, _FEW] = ()
    label_range: Annotated[tuple[float, float], _AS_TUPLE] | None = None
    standardise: Literal["federated", "ranges", "none"] = "federated"

    def contradictions(self) -> Iterator[tuple[KeyPath, str]]:
        """A class that stands twice, or a range that goes nowhere."""
        for index, name in enumerate(self.classes):
            if name in self.classes[:index]:
                yield ("classes", index), f"the class {name!r} stands twice"
        if self.label_range is not None:
            low, high = self.label_range
            if not -_WIDEST <= low < high <= _WIDEST:
                yield ("label_range",), f"the range must go from a lower to a higher number within +-{_WIDEST:g}"


def check_job(job: Job) -> None:
    """Refuses what this task cannot do.

    Raises:
        ConfigurationError: Its message begins with the key's full path.
    """
    settings = _settings(job)
    _check_target(settings, job.data)
    for index, column in enumerate(job.data.columns):
        if isinstance(column, NumericColumn) and column.missing == "mean" and settings.standardise != "federated":
            low, high = column.range
            raise ConfigurationError(
                f'data.columns[{index}].missing: "mean" is the federation\'s mean of {column.name!r}, which only the '
                f"statistics step knows; task.standardise is {settings.standardise!r}",
                fix=f'set task.standardise = "federated", or missing = a constant such as {(low + high) / 2:g}',
            )
    if job.data.split.method == "column" and job.data.split.column in {job.data.label, *_names(job.data)}:
        raise ConfigurationError(
            f"data.split.column: {job.data.split.column!r} is also the label or an input",
            fix="name a column that only says train or test",
        )
    _check_metrics(job, _BETTER[settings.target])


def make(job: Job) -> TabularTask:
    """The task of `job`, which `check_job` let pass."""
    return TabularTask(_settings(job), job.data, coarse=job.privacy.secure_aggregation != "plain")


@dataclass(frozen=True)
class TabularTask:
    """A table's rows as examples. Inputs: numeric columns one each, categories one-hot without the first.

    A category's own column for missing values stands after its others. `coarse`: scores are counted in 32 bins, the
    most that exact secure sums may have, instead of 512.
    """

    settings: Settings
    contract: DataContract
    coarse: bool = False

    @cached_property
    def features(self) -> int:
        """Columns of the model's input."""
        return sum(_width(column) for column in self.contract.columns)

    @property
    def outputs(self) -> int:
        """1, or the number of classes."""
        return len(self.settings.classes) if self.settings.target == "multiclass" else 1

    @property
    def statistics_size(self) -> int:
        """Three words for each numeric column when standardisation is federated, otherwise 0."""
        return 3 * len(self._numeric) if self.settings.standardise == "federated" else 0

    @property
    def evaluation_size(self) -> int:
        """Words of the evaluation vector."""
        return self._counts.size

    @property
    def statistics_fields(self) -> tuple[SumField, ...]:
        """Count, sum and squares of each numeric column, values in half-widths of its public range: within -1..1."""
        if not self.statistics_size:
            return ()
        return tuple(
            SumField(f"column {number}: {what}", 1, frac, low, float(MOST_ROWS))
            for number in range(len(self._numeric))
            for what, frac, low in (("count", 0, 0.0), ("sum", _FRAC, -float(MOST_ROWS)), ("squares", _FRAC, 0.0))
        )

    @property
    def evaluation_fields(self) -> tuple[SumField, ...]:
        """What the evaluation counts."""
        return self._counts.fields

    @property
    def loss(self) -> Loss:
        """What local training minimises."""
        return {"binary": Loss.LOGISTIC, "multiclass": Loss.CROSS_ENTROPY, "regression": Loss.SQUARED}[
            self.settings.target
        ]

    @property
    def better(self) -> Mapping[str, Better]:
        """The metrics and which way each improves."""
        return self._counts.better

    def inspect(self, table: pd.DataFrame, *, labelled: bool = True) -> tuple[Finding, ...]:
        """What of the contract `table` does not meet, column by column; no value of the table is in any finding.

        Without labels (rows to predict for) the label is not asked for, and a row that training would drop for a
        missing value is refused.
        """
        found = [
            finding
            for column in self.contract.columns
            for finding in _columns.inspect_column(table, column, complete=not labelled)
        ]
        if labelled:
            found.extend(self._inspect_label(table))
            if self.contract.split.method == "column":
                gone = _columns.absent(table, self.contract.split.column, "data.split.column")
                found.extend([gone] if gone is not None else [])
        return tuple(found)

    def split(self, table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Training and test rows in the table's order; rows without a value in a `drop_row` column are in neither."""
        keep = np.ones(len(table), dtype=np.bool_)
        for column in self.contract.columns:
            if column.missing == "drop_row":
                keep &= ~_columns.missing(table, column)
        kept, rule = table[keep], self.contract.split
        if rule.method == "column":
            part = kept[rule.column].astype("string").str.strip()
            return kept[(part == "train").fillna(value=False)], kept[(part == "test").fillna(value=False)]
        strata = np.zeros(len(kept), np.int64) if self.settings.target == "regression" else self.labels(kept)
        train, test = stratified_split(strata.astype(np.int64), rule.test_fraction, np.random.default_rng(rule.seed))
        return kept.iloc[train], kept.iloc[test]

    def statistics(self, training: pd.DataFrame) -> F64:
        """[n, sum u, sum u^2] of each numeric column's measured values [3 * columns].

        u = (value - middle) / half-width of the public range lies in -1..1, so that sums of squares do not cancel when
        the variance is taken from them, and a fixed-point encoding knows their bound.
        """
        if not self.statistics_size:
            return np.empty(0, dtype=np.float64)
        words = np.zeros((len(self._numeric), 3))
        for row, column in zip(words, self._numeric, strict=True):
            middle, half = _middle_half(column.range)
            values, _ = _columns.numbers(training[column.name], zero_is_missing=column.zero_is_missing)
            unit = (values[~np.isnan(values)] - middle) / half
            row[:] = unit.size, unit.sum(), unit @ unit
        return words.ravel()

    def prepare(self, total: F64 | None) -> bytes:
        """The preparation from all sites' summed statistics, or from the contract alone when there is no such step.

        A column that no site measured is centred on the middle of its range; one that does not vary is scaled by the
        half-width, so that a later, other value stays small.

        Raises:
            RemoteProtocolError: No values within the public ranges have these sums.
        """
        if not self.statistics_size:
            return Preparation(columns=tuple(self._public(column) for column in self._numeric)).to_bytes()
        if total is None or total.shape != (self.statistics_size,):
            words = "no" if total is None else str(total.size)
            raise RemoteProtocolError(f"summed statistics have {words} words where {self.statistics_size} are needed")
        columns = zip(self._numeric, total.reshape(-1, 3), strict=True)
        return Preparation(columns=tuple(_standard(column, *map(float, row)) for column, row in columns)).to_bytes()

    def inputs(self, table: pd.DataFrame, preparation: bytes) -> F32:
        """Model inputs [rows, features].

        Raises:
            RemoteProtocolError: The preparation is not one of this contract.
            DataContractError: A cell has no meaning in the contract; `inspect` tells which.
        """
        prepared = self._read(preparation)
        out = np.zeros((len(table), self.features), dtype=np.float32)
        start = 0
        for column in self.contract.columns:
            block = out[:, start : start + _width(column)]
            start += _width(column)
            if isinstance(column, NumericColumn):
                _fill_number(block, table[column.name], column, prepared[column.name])
            else:
                _fill_category(block, table[column.name], column)
        if not np.isfinite(out).all():
            raise DataContractError("a value is missing where the contract refuses that", fix="check the data first")
        return out

    def labels(self, table: pd.DataFrame) -> npt.NDArray[np.generic]:
        """Labels [rows]: int64 classes, or float32 values scaled by `label_range` to -1..1."""
        cells = table[self.contract.label]
        if self.contract.label_above is not None:
            return (_columns.numbers(cells)[0] > self.contract.label_above).astype(np.int64)
        if self.settings.target == "regression":
            middle, half = _middle_half(self._label_range)
            return ((_columns.numbers(cells)[0] - middle) / half).astype(np.float32)
        return _columns.codes(cells, self._label_values)

    def examples(self, table: pd.DataFrame, preparation: bytes) -> Examples:
        """Model inputs and labels of `table`'s rows."""
        return Examples(self.inputs(table, preparation), self.labels(table))

    def evaluate(self, outputs: F32, labels: npt.NDArray[np.generic]) -> F64:
        """This site's share of the evaluation [evaluation_size]."""
        return self._counts.count(outputs, labels)

    def metrics(self, total: F64) -> Mapping[str, float]:
        """The metrics of summed evaluations, all finite; one that the rows do not define is left out."""
        return self._counts.metrics(total)

    def describe(self, outputs: F32) -> Mapping[str, npt.NDArray[np.generic]]:
        """`probability` and `class` (binary); `class` and `probability_<class>`; or `value` in the label's unit."""
        if self.settings.target == "regression":
            middle, half = _middle_half(self._label_range)
            return {"value": middle + half * outputs.reshape(-1).astype(np.float64)}
        logits = outputs.astype(np.float64)
        if self.settings.target == "binary":
            logit = logits.reshape(-1)
            return {"probability": np.exp(-np.logaddexp(0.0, -logit)), "class": (logit > 0).astype(np.int64)}
        odds = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        shares = odds / odds.sum(axis=1, keepdims=True)
        named = {f"probability_{name}": shares[:, k] for k, name in enumerate(self.settings.classes)}
        return {"class": np.asarray(self.settings.classes)[logits.argmax(axis=1)], **named}

    @cached_property
    def _numeric(self) -> tuple[NumericColumn, ...]:
        return tuple(column for column in self.contract.columns if isinstance(column, NumericColumn))

    @cached_property
    def _counts(self) -> Counts:
        match self.settings.target:
            case "binary":
                return BinaryCounts(COARSE) if self.coarse else BinaryCounts()
            case "multiclass":
                return ClassCounts(len(self.settings.classes))
            case "regression":
                return ValueCounts(_middle_half(self._label_range)[1])

    @property
    def _label_range(self) -> tuple[float, float]:
        bounds = self.settings.label_range
        if bounds is None:
            raise ConfigurationError("task.label_range: a regression needs the public range of its label")
        return bounds

    @property
    def _label_values(self) -> _columns.Categories:
        return self.settings.classes if self.settings.target == "multiclass" else (0, 1)

    def _inspect_label(self, table: pd.DataFrame) -> Iterator[Finding]:
        gone = _columns.absent(table, self.contract.label, "data.label")
        if gone is not None:
            yield gone
            return
        cells = table[self.contract.label]
        if self.contract.label_above is not None or self.settings.target == "regression":
            values, wrong = _columns.numbers(cells)
            yield from _columns.inspect_numbers(values, wrong, "data.label", self.settings.label_range)
            empty = int(np.sum(np.isnan(values) & ~wrong))
        else:
            found = _columns.codes(cells, self._label_values)
            yield from _columns.inspect_codes(found, "data.label", self._label_values)
            empty = int(np.sum(found == _columns.MISSING))
        if empty:
            yield Finding("data.label", f"{rows(empty)} have no label", "label or remove those rows")

    def _public(self, column: NumericColumn) -> NumericPreparation:
        """The preparation that needs no data."""
        low, high = column.range
        fill = column.missing if isinstance(column.missing, float) else (low + high) / 2
        if self.settings.standardise == "ranges":
            return NumericPreparation(name=column.name, shift=low, scale=high - low, fill=fill)
        return NumericPreparation(name=column.name, shift=0.0, scale=1.0, fill=fill)

    def _read(self, preparation: bytes) -> dict[str, NumericPreparation]:
        """The preparation by column, once it is one that `prepare` can have written."""
        read = Preparation.from_bytes(preparation)
        if tuple(column.name for column in read.columns) != tuple(column.name for column in self._numeric):
            raise RemoteProtocolError("a preparation is not of this contract's numeric columns, in their order")
        for given, column in zip(read.columns, self._numeric, strict=True):
            (low, high), (_, half) = column.range, _middle_half(column.range)
            possible = (
                low <= min(given.shift, given.fill)
                and max(given.shift, given.fill) <= high
                and half * _NO_VARIANCE**0.5 / 2 <= given.scale <= half * (1 + _SLACK)
                if self.statistics_size
                else given == self._public(column)
            )
            if not possible:
                raise RemoteProtocolError(
                    f"a preparation scales {column.name!r} as no values within its public range would"
                )
        return {column.name: column for column in read.columns}


def example(rng: np.random.Generator) -> tuple[str, pd.DataFrame]:
    """A small binary job and 60 rows that meet it, some values missing where the contract allows it."""
    import pandas as pd

    age, pain = rng.uniform(20, 90, 60).round(), rng.choice(["none", "typical", "other"], 60)
    sick = rng.random(60) < 1 / (1 + np.exp(-(age - 55) / 10 - (pain == "typical")))
    pressure = np.where(rng.permutation(60) % 5 == 0, np.nan, rng.uniform(90, 180, 60).round())
    return _EXAMPLE, pd.DataFrame({"age": age, "pressure": pressure, "pain": pain, "sick": sick.astype(np.int64)})


_EXAMPLE = """\
format = 1
name = "tabular-example"

[task]
kind = "tabular"
target = "binary"

[data]
dataset = "patients"
label = "sick"
columns = [
  { name = "age", kind = "numeric", unit = "years", range = [0, 120] },
  { name = "pressure", kind = "numeric", unit = "mmHg", range = [50, 250], zero_is_missing = true, missing = "mean" },
  { name = "pain", kind = "categorical", categories = ["none", "typical", "other"] },
]

[model]
name = "logistic_regression"

[strategy]
name = "fedavg"

[rounds]
maximum = 3
best_metric = "auc"

[cohort]
minimum_sites = 2

[privacy]
secure_aggregation = "plain"
"""


def _settings(job: Job) -> Settings:
    if not isinstance(job.task, Settings):
        raise ConfigurationError(f"task.kind: {job.task.kind!r} is not a table", fix='use kind = "tabular"')
    return job.task


def _check_target(settings: Settings, contract: DataContract) -> None:
    target = settings.target
    if target == "multiclass" and len(settings.classes) < 2:  # noqa: PLR2004 - one class needs no model
        raise ConfigurationError("task.classes: multiclass needs the label's values", fix='classes = ["a", "b", "c"]')
    if target != "multiclass" and settings.classes:
        raise ConfigurationError(
            f"task.classes: only multiclass has classes, the target is {target}",
            fix='remove it, or target = "multiclass"',
        )
    if target == "regression" and settings.label_range is None:
        raise ConfigurationError(
            "task.label_range: a regression needs the public range of its label", fix="label_range = [low, high]"
        )
    if target != "regression" and settings.label_range is not None:
        raise ConfigurationError(f"task.label_range: only a regression has it, the target is {target}", fix="remove it")
    if target != "binary" and contract.label_above is not None:
        raise ConfigurationError(
            f"data.label_above: it makes a binary label, and the target is {target}",
            fix='remove it, or task.target = "binary"',
        )


def _check_metrics(job: Job, better: Mapping[str, Better]) -> None:
    stop = job.rounds.early_stop
    asked = {"rounds.best_metric": job.rounds.best_metric, "rounds.early_stop.metric": stop.metric if stop else None}
    for path, metric in asked.items():
        if metric is not None and metric not in better:
            raise ConfigurationError(
                f"{path}: this task has no metric {metric!r}", fix=f"use one of {', '.join(sorted(better))}"
            )


def _names(contract: DataContract) -> tuple[str, ...]:
    return tuple(column.name for column in contract.columns)


def _middle_half(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    return (low + high) / 2, (high - low) / 2


def _width(column: NumericColumn | CategoricalColumn) -> int:
    if isinstance(column, NumericColumn):
        return 1
    return len(column.categories) - 1 + (column.missing == "own_category")


def _standard(column: NumericColumn, count: float, linear: float, quadratic: float) -> NumericPreparation:
    """Mean and standard deviation of `count` values from their centred and scaled sums."""
    middle, half = _middle_half(column.range)
    slack = _SLACK * (count + 1)
    if not (0 <= count < np.inf and abs(linear) <= count + slack and -slack <= quadratic <= count + slack):
        raise RemoteProtocolError(
            f"the summed statistics of {column.name!r} are those of no values within its public range",
            fix="find the site whose statistics are wrong",
        )
    mean = min(max(linear / count, -1.0), 1.0) if count >= 1 else 0.0
    variance = quadratic / count - mean * mean if count >= 1 else 0.0
    shift = min(max(middle + half * mean, column.range[0]), column.range[1])  # rounding may step over the edge
    scale = half * min(variance, 1.0) ** 0.5 if variance > _NO_VARIANCE else half
    fill = column.missing if isinstance(column.missing, float) else shift
    return NumericPreparation(name=column.name, shift=shift, scale=scale, fill=fill)


def _fill_number(block: F32, cells: pd.Series, column: NumericColumn, given: NumericPreparation) -> None:
    values, _ = _columns.numbers(cells, zero_is_missing=column.zero_is_missing)
    if column.missing == "mean" or isinstance(column.missing, float):
        values[np.isnan(values)] = given.fill
    block[:, 0] = (values - given.shift) / given.scale


def _fill_category(block: F32, cells: pd.Series, column: CategoricalColumn) -> None:
    found = _columns.codes(cells, column.categories)
    if column.missing == "own_category":
        found[found == _columns.MISSING] = len(column.categories)
    elif column.missing == "reference":
        found[found == _columns.MISSING] = 0
    if found.min(initial=0) < 0:
        raise DataContractError(
            f"column {column.name!r} holds what is none of its categories", fix="check the data first"
        )
    block[np.flatnonzero(found), found[found > 0] - 1] = 1.0
