"""Which round was the best, and whether the rounds still bring anything: from metrics that are there already."""

from collections.abc import Mapping

from federation.job import EarlyStop
from federation.messages import Metric
from tasks.task import Better

__all__ = ["best_round", "stalled"]

Metrics = Mapping[int, tuple[Metric, ...]]
"""Each evaluated round's metrics by round number."""


def best_round(metrics: Metrics, name: str | None, better: Mapping[str, Better]) -> int:
    """The round with the best `name`; the first of equals; the last where `name` is None or was never measured.

    `better` says of each metric whether higher or lower values are better.
    """
    last = max(metrics)
    if name is None:
        return last
    measured = [(number, value) for number in sorted(metrics) if (value := _value(metrics[number], name)) is not None]
    if not measured:
        return last
    best, value = measured[0]
    for number, candidate in measured[1:]:
        if _gain(better[name], candidate, value) > 0:
            best, value = number, candidate
    return best


def stalled(metrics: Metrics, stop: EarlyStop, better: Mapping[str, Better]) -> bool:
    """Whether the last `stop.patience` rounds brought no gain in its metric of more than `stop.minimum_gain`."""
    values = [value for number in sorted(metrics) if (value := _value(metrics[number], stop.metric)) is not None]
    best: float | None = None
    since = 0
    for value in values:
        if best is None or _gain(better[stop.metric], value, best) > stop.minimum_gain:
            best, since = value, 0
        else:
            since += 1
    return since >= stop.patience


def _value(metrics: tuple[Metric, ...], name: str) -> float | None:
    return next((metric.value for metric in metrics if metric.name == name), None)


def _gain(better: Better, new: float, old: float) -> float:
    """How much better `new` is than `old`; negative when worse."""
    return old - new if better == "lower" else new - old
