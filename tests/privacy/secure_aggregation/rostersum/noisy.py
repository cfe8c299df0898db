"""Plans with noise for tests: of any dimension, law and set, with the noise multiplier as given."""

from dataclasses import replace
from typing import Any

from privacy.secure_aggregation.rostersum.terms import (
    GUARD_WORDS,
    Churn,
    DpCodec,
    Mechanism,
    Noise,
    Plan,
    Unit,
)
from tests.privacy.secure_aggregation.rostersum.conftest import TRAIN


def noise(**changes: Any) -> Noise:
    """Gaussian noise of 0.5 clips on a fine grid."""
    return replace(Noise(Unit.SITE, Mechanism.DDGAUSS, 2.0, 2.0**16, 0.5, 1e-5, 10), **changes)


def plan(dimension: int = 16, **changes: Any) -> Plan:
    """A plan that protects a site, over updates that pad to so many values."""
    words = dimension + GUARD_WORDS
    return replace(TRAIN, churn=Churn.DP, words=words, codec=DpCodec(dimension), dp=noise(**changes))
