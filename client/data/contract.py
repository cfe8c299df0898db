"""Checks a site's table against a job's data contract, before anything is computed from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from federation.findings import Finding, refusals, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from federation.job import DataContract
    from tasks.task import Task

__all__ = ["check"]


def check(table: pd.DataFrame, contract: DataContract, task: Task) -> tuple[Finding, ...]:
    """Everything in which `table` does not meet `contract`; the site may take part when no finding is a refusal.

    No finding holds a value, a row number, or a count below 5. The number of rows in each part of the split is checked
    once the columns are in order.
    """
    found = task.inspect(table)
    if refusals(found):
        return found
    training, testing = task.split(table)
    return (*found, *_parts(training, testing, contract, task))


def _parts(training: pd.DataFrame, testing: pd.DataFrame, contract: DataContract, task: Task) -> Iterator[Finding]:
    asked = contract.minimum_rows
    if len(training) < asked:
        yield Finding(
            "data.minimum_rows",
            f"{rows(len(training))} are left for training; the contract asks for at least {asked}",
            "register more records, or complete those that the contract drops",
        )
    if testing.empty:
        yield Finding(
            "data.split",
            "no rows are left for testing",
            f"mark some rows as test in column {contract.split.column!r}"
            if contract.split.method == "column"
            else "register more records, or ask the job's author for a larger test_fraction",
        )
    elif len(testing) < asked:
        yield Finding(
            "data.split",
            f"{rows(len(testing))} are left for testing, so this site's own metrics are unsure",
            "mark or register more test rows if you can",
            "warning",
        )
    if np.unique(task.labels(training)).size == 1:
        yield Finding(
            "data.label",
            "all training rows have one and the same label",
            "take part if that is how your records are; a model trained here alone would learn nothing",
            "warning",
        )
