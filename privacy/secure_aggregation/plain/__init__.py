"""Plain aggregation: the coordinator sees each contribution and adds it; the sites' policies must allow that."""

from privacy.secure_aggregation.interface import Aggregation
from privacy.secure_aggregation.plain.weighted_sum import Plain, PlainSum

__all__ = ["Plain", "PlainSum", "make"]


def make() -> Aggregation:
    """The plain protocol."""
    return Plain()
