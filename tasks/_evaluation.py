"""Evaluation as sums: what a site counts on its test rows, and the metrics that all sites' counts together give."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from federation.errors import RemoteProtocolError
from federation.sums import MOST_ROWS, SumField

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from federation.vector import F32, F64
    from tasks.task import Better

__all__ = [
    "BINARY_BETTER",
    "CLASS_BETTER",
    "COARSE",
    "VALUE_BETTER",
    "BinaryCounts",
    "ClassCounts",
    "Counts",
    "ValueCounts",
]

BINARY_BETTER: Mapping[str, Better] = MappingProxyType({"loss": "lower", "accuracy": "higher", "auc": "higher"})
CLASS_BETTER: Mapping[str, Better] = MappingProxyType(
    {"loss": "lower", "accuracy": "higher", "balanced_accuracy": "higher", "macro_f1": "higher"}
)
VALUE_BETTER: Mapping[str, Better] = MappingProxyType(
    {"loss": "lower", "rmse": "lower", "mae": "lower", "r2": "higher"}
)

_BINS = 512
COARSE = 32
"""Score bins of an exact secure sum: the most that a site answers."""
_MOST_LOSS = 32.0 * MOST_ROWS
"""Largest total loss of one site's rows; a worse model's is counted as this."""
_FRAC = 24
"""Binary places of a total loss: a hundred sites' sums fit 62 bits."""
_FINE = 0.25
_LIMIT = 32.0


class Counts(Protocol):
    """One way to evaluate. The vector of several sites' rows is the sum of the sites' vectors."""

    @property
    def size(self) -> int:
        """Words of the vector."""
        ...

    @property
    def fields(self) -> tuple[SumField, ...]:
        """What the words of the vector are, in their order."""
        ...

    @property
    def better(self) -> Mapping[str, Better]:
        """The metrics and which way each improves."""
        ...

    def count(self, outputs: F32, labels: npt.NDArray[np.generic]) -> F64:
        """The vector [size] of some rows; their number is its first word."""
        ...

    def metrics(self, total: F64) -> Mapping[str, float]:
        """The metrics of a summed vector, all finite; one that the rows do not define is left out.

        Raises:
            RemoteProtocolError: No rows can have counted to this.
        """
        ...


@dataclass(frozen=True, slots=True)
class BinaryCounts:
    """[n, correct, log-loss, positives by score bin, negatives by score bin], for one logit and labels 0 and 1.

    The 512 score bins are equal steps of asinh(logit / 0.25) over |logit| <= 32: steps of 0.005 at a logit of 0, where
    models begin, of 0.04 at 2 and 0.1 at 5. Scores in one bin count as tied: the AUC is that of the rows within half a
    point as long as the scores spread over several bins, and is drawn towards one half when they do not. An exact
    secure sum may have 32 bins at most: they are 16 times as wide.
    """

    bins: int = _BINS
    better: ClassVar[Mapping[str, Better]] = BINARY_BETTER

    @property
    def size(self) -> int:
        """Words of the vector."""
        return 3 + 2 * self.bins

    @property
    def fields(self) -> tuple[SumField, ...]:
        """Rows, correct ones, log-loss, and two histograms of scores."""
        return (
            _count("rows"),
            _count("correct"),
            _loss("log-loss"),
            _count("positives", self.bins),
            _count("negatives", self.bins),
        )

    def count(self, outputs: F32, labels: npt.NDArray[np.generic]) -> F64:
        """The vector [size] of these rows; a positive logit predicts 1."""
        logits = outputs.reshape(-1).astype(np.float64)
        positive = labels.astype(np.bool_)
        losses = np.logaddexp(0.0, logits) - logits * positive
        scale = np.arcsinh(np.clip(logits, -_LIMIT, _LIMIT) / _FINE) / np.arcsinh(_LIMIT / _FINE)
        bins = np.minimum((self.bins * (scale + 1) / 2).astype(np.int64), self.bins - 1)
        return np.concatenate(
            [
                [logits.size, np.sum((logits > 0) == positive), np.sum(losses)],
                np.bincount(bins[positive], minlength=self.bins),
                np.bincount(bins[~positive], minlength=self.bins),
            ]
        ).astype(np.float64)

    def metrics(self, total: F64) -> Mapping[str, float]:
        """`n`, `loss`, `accuracy`, and `auc` (ties count half) where both classes are there."""
        rows = _rows(total, self.size, slice(3, None))
        if rows == 0:
            return {"n": 0.0}
        found = {"n": rows, "loss": float(total[2] / rows), "accuracy": float(total[1] / rows)}
        positives, negatives = total[3 : 3 + self.bins], total[3 + self.bins :]
        pairs = positives.sum() * negatives.sum()
        if pairs > 0:
            below = np.cumsum(negatives) - negatives
            found["auc"] = float(positives @ (below + negatives / 2) / pairs)
        return found


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """[n, log-loss, confusion by true and predicted class], for one logit per class and labels 0 .. classes - 1."""

    classes: int
    better: ClassVar[Mapping[str, Better]] = CLASS_BETTER

    @property
    def size(self) -> int:
        """Words of the vector."""
        return 2 + self.classes * self.classes

    @property
    def fields(self) -> tuple[SumField, ...]:
        """Rows, log-loss, and the confusion."""
        return (_count("rows"), _loss("log-loss"), _count("confusion", self.classes * self.classes))

    def count(self, outputs: F32, labels: npt.NDArray[np.generic]) -> F64:
        """The vector [size] of these rows; the highest logit predicts, the first of equals."""
        logits = outputs.astype(np.float64)
        true = labels.astype(np.int64)
        top = logits.max(axis=1, initial=-np.inf)
        losses = top + np.log(np.exp(logits - top[:, None]).sum(axis=1)) - logits[np.arange(true.size), true]
        cells = true * self.classes + logits.argmax(axis=1)
        confusion = np.bincount(cells, minlength=self.classes * self.classes)
        return np.concatenate([[true.size, np.sum(losses)], confusion]).astype(np.float64)

    def metrics(self, total: F64) -> Mapping[str, float]:
        """`n`, `loss`, `accuracy`, `balanced_accuracy` (mean recall) and `macro_f1` over the classes that are there."""
        rows = _rows(total, self.size, slice(2, None))
        if rows == 0:
            return {"n": 0.0}
        confusion = total[2:].reshape(self.classes, self.classes)
        true, predicted, correct = confusion.sum(axis=1), confusion.sum(axis=0), np.diag(confusion)
        there, seen = true > 0, true + predicted > 0
        return {
            "n": rows,
            "loss": float(total[1] / rows),
            "accuracy": float(correct.sum() / rows),
            "balanced_accuracy": float(np.mean(correct[there] / true[there])),
            "macro_f1": float(np.mean(2 * correct[seen] / (true + predicted)[seen])),
        }


@dataclass(frozen=True, slots=True)
class ValueCounts:
    """[n, squared errors, absolute errors, sum of y, sum of y^2], of labels scaled to [-1, 1] by their public range.

    Args:
        half: Half the width of the label's public range: one scaled unit, in the label's unit.
    """

    half: float
    size: ClassVar[int] = 5
    better: ClassVar[Mapping[str, Better]] = VALUE_BETTER
    fields: ClassVar[tuple[SumField, ...]] = (
        SumField("rows", 1, 0, 0.0, float(MOST_ROWS)),
        SumField("squared errors", 1, _FRAC, 0.0, _MOST_LOSS),
        SumField("absolute errors", 1, _FRAC, 0.0, _MOST_LOSS),
        SumField("labels", 1, _FRAC, -float(MOST_ROWS), float(MOST_ROWS)),
        SumField("squared labels", 1, _FRAC, 0.0, float(MOST_ROWS)),
    )

    def count(self, outputs: F32, labels: npt.NDArray[np.generic]) -> F64:
        """The vector [size] of these rows."""
        truth = labels.astype(np.float64)
        error = outputs.reshape(-1).astype(np.float64) - truth
        return np.array([truth.size, error @ error, np.abs(error).sum(), truth.sum(), truth @ truth])

    def metrics(self, total: F64) -> Mapping[str, float]:
        """`n`, `loss` (scaled), `rmse` and `mae` (the label's unit), and `r2` where the labels vary."""
        rows = _rows(total, self.size)
        if rows == 0:
            return {"n": 0.0}
        squared, absolute, linear, quadratic = (float(word) / rows for word in total[1:])
        found = {"n": rows, "loss": squared, "rmse": self.half * squared**0.5, "mae": self.half * absolute}
        variance = quadratic - linear * linear
        if variance > 1e-12:  # noqa: PLR2004 - the rounding of a difference of squares below 1
            found["r2"] = 1 - squared / variance
        return found


def _count(name: str, width: int = 1) -> SumField:
    return SumField(name, width, 0, 0.0, float(MOST_ROWS))


def _loss(name: str) -> SumField:
    return SumField(name, 1, _FRAC, 0.0, _MOST_LOSS)


def _rows(total: F64, size: int, cells: slice | None = None) -> float:
    """The number of rows behind a summed vector; each row is counted in one of `cells`."""
    if total.shape != (size,):
        raise RemoteProtocolError(f"a summed evaluation has {total.size} words where the task counts {size}")
    possible = bool(np.isfinite(total).all()) and total[:2].min() >= 0
    if possible and cells is not None:
        possible = total[cells].min() >= 0 and round(total[cells].sum()) == round(total[0])
    if not possible:
        raise RemoteProtocolError(
            "a summed evaluation holds counts that no test rows give", fix="find the site whose evaluation is wrong"
        )
    return float(total[0])
