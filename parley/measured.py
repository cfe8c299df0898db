"""Metrics as the command line shows them."""

from dataclasses import replace

from federation.disclosure import shown, withheld
from federation.messages import JobView, Metric

__all__ = ["disclosed", "words"]


def words(metrics: tuple[Metric, ...]) -> str:
    """One evaluation's metrics in a line, with why some are not shown; empty where nothing was measured."""
    told = [f"{each.name} {each.value:.4g}" for each in shown(metrics)]
    return "  ".join([*told, *filter(None, [withheld(metrics)])])


def disclosed(view: JobView) -> JobView:
    """A job with those of its metrics that people may see."""
    return replace(view, history=tuple(replace(each, metrics=shown(each.metrics)) for each in view.history))
