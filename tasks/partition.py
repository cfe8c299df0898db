"""How rows are divided: drawn from a generator that the caller seeds, so that every run divides alike."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["stratified_split"]


_ROUNDING = 1e-9
"""0.07 * 100 is 7.000000000000001 in binary; its ceiling must be 7."""


def stratified_split(
    strata: npt.NDArray[np.int64], test_fraction: float, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row positions for training and for testing; together they are all rows, each once.

    The test part has ceil(rows * test_fraction) rows. Each stratum gives its share, rounded by largest remainders (the
    earlier stratum on a tie), so no stratum is more than one row away from its exact share.

    Args:
        strata: The stratum of each row [rows], e.g. its class; all equal for a plain random split.
        test_fraction: Share of the test rows, between 0 and 1.
        rng: Decides which rows of a stratum are drawn.
    """
    names, members, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    exact = sizes * (ceil(strata.size * test_fraction - _ROUNDING) / max(strata.size, 1))
    taken = np.floor(exact + _ROUNDING).astype(np.int64)
    short = ceil(strata.size * test_fraction - _ROUNDING) - int(taken.sum())
    taken[np.argsort(taken - exact, kind="stable")[:short]] += 1
    drawn = [rng.permutation(np.flatnonzero(members == k))[: taken[k]] for k in range(names.size)]
    testing = np.zeros(strata.size, dtype=np.bool_)
    testing[np.concatenate([np.empty(0, dtype=np.int64), *drawn])] = True
    return np.flatnonzero(~testing), np.flatnonzero(testing)
