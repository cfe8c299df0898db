"""Poisson sampling: each record of a site is in a round's batch or not, by a coin of its own."""

import os
from fractions import Fraction
from math import floor

import numpy as np

from federation.errors import ConfigurationError
from privacy.differential_privacy.stream import PART, Draw
from privacy.differential_privacy.table import I64

__all__ = ["poisson_sample"]

_WORD = 8
_WHOLE = 1 << 64


def poisson_sample(records: int, rate: float, draw: Draw = os.urandom) -> I64:
    """The indices, ascending, of the records that are in: each of 0 to records - 1 by itself, with probability `rate`.

    **Formal guarantee.** A record's probability is floor(rate * 2^64) / 2^64, exactly and whatever the others do. The
    coins are the operating system's own bytes: no seed, no shuffling, no limit to how many come out. The result may be
    empty. It is drawn once per round: whoever tries the round again takes the same sample.

    | edge | what happens |
    | --- | --- |
    | no records, or none drawn | an empty sample; the round goes on |
    | rate 1 | every record |
    | rate 0, below 0, above 1, NaN | refused |

    Raises:
        ConfigurationError: The rate is not above 0 and at most 1.
    """
    if not 0 < rate <= 1:
        raise ConfigurationError(
            f"records are sampled at a rate above 0 and at most 1, not {rate}", fix="correct the job's sampling rate"
        )
    limit = floor(Fraction(rate) * _WHOLE)
    if limit == _WHOLE:
        return np.arange(records)
    chosen = [np.empty(0, np.int64)]
    for start in range(0, records, PART):
        count = min(PART, records - start)
        coins = np.frombuffer(draw(_WORD * count), "<u8")
        chosen.append(start + np.flatnonzero(coins < np.uint64(limit)))
    return np.concatenate(chosen)
