"""What of pooled metrics people are shown: no count below 5, and no rate over fewer than 20 rows.

A courtesy to the few people whom such numbers speak of, and no protection: the coordinator has what it does not show
(section 8.5, S7, of the text on secure aggregation).
"""

from collections.abc import Iterable

from federation.messages import Metric

__all__ = ["FEWEST_COUNTED", "FEWEST_RATED", "ROWS", "shown", "withheld"]

ROWS = "n"
"""The metric that counts the rows behind all others of an evaluation."""

FEWEST_COUNTED = 5
FEWEST_RATED = 20


def shown(metrics: Iterable[Metric]) -> tuple[Metric, ...]:
    """Those of one evaluation's metrics that people may see; all of them where none says how many rows are behind.

    Fewer than 20 rows: only their number; fewer than 5: nothing.
    """
    measured = tuple(metrics)
    rows = next((metric.value for metric in measured if metric.name == ROWS), None)
    if rows is None or rows >= FEWEST_RATED:
        return measured
    return tuple(metric for metric in measured if metric.name == ROWS and rows >= FEWEST_COUNTED)


def withheld(metrics: Iterable[Metric]) -> str:
    """Why something of one evaluation's metrics is not shown; empty where all of them are."""
    measured = tuple(metrics)
    return "" if shown(measured) == measured else f"over fewer than {FEWEST_RATED} rows: not shown"
