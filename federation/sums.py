"""What the words of a summed vector are: named totals with their limits, which a fixed-point encoding must know."""

from dataclasses import dataclass
from math import isfinite

from federation.errors import LocalProtocolError

__all__ = ["MOST_ROWS", "SumField"]

MOST_ROWS = 1 << 24
"""Rows of one site that a total allows for; with the finest totals a hundred sites' sum then fits 62 bits."""


@dataclass(frozen=True, slots=True)
class SumField:
    """`width` words of a site's vector: each total lies within [low, high] and is sent in units of 2^-frac."""

    name: str
    width: int
    frac: int
    low: float
    high: float

    def __post_init__(self) -> None:
        """Refuses a field that no task means."""
        if self.width < 1 or self.frac < 0 or not (isfinite(self.low) and isfinite(self.high) and self.low < self.high):
            raise LocalProtocolError(f"the total {self.name!r} has no meaning: {self}")
