"""The seam between a round and the protocol that adds its contributions: a site encodes, the coordinator sums."""

from collections.abc import Callable, Iterator
from typing import Literal, Protocol, runtime_checkable

from federation import plugins
from federation.vector import BLOCK, F32, F64

__all__ = ["Aggregation", "Source", "Sum", "WordType", "load"]

WordType = Literal["<f4", "<f8"]
"""A contribution's values before they are encoded: float32 for updates, float64 for statistics and evaluation."""

Source = Callable[[int, int], bytes]
"""Reads a stored contribution: from this byte on, so many bytes, or fewer where it ends."""


@runtime_checkable
class Sum(Protocol):
    """The coordinator's half: one cohort's contributions, added one by one; its memory does not grow with them."""

    @property
    def size(self) -> int:
        """Values in each contribution and in the sum."""
        ...

    @property
    def weight(self) -> float:
        """Sum of the weights added so far; 0 before the first."""
        ...

    def add(self, site: str, weight: float, source: Source) -> None:
        """Adds `weight` times the contribution of `site`. That each site is added once is the round's duty.

        A protocol that hides weights carries them in the contribution and is given 1 here.

        Raises:
            RemoteProtocolError: Weight, length or values are not what they must be; it names `site`, and the sum is
                exactly as before.
        """
        ...

    def mean(self, block: int = BLOCK, start: int = 0, stop: int | None = None) -> Iterator[F64]:
        """The weighted mean of what was added, in blocks of `block` values but for the last.

        From value `start` to `stop`, the end if None; several threads may each read a range.
        """
        ...

    def total(self) -> F64:
        """The weighted sum [size] of what was added; with weights of 1, what statistics and evaluations mean."""
        ...


@runtime_checkable
class Aggregation(Protocol):
    """One protocol, in both its halves. Its folder offers `make() -> Aggregation`.

    What a protocol sends besides (keys before `encode`, openings between the last `add` and `mean`) is its own affair.
    """

    def encode(self, values: F32 | F64) -> bytes:
        """A site's contribution: the bytes that leave it."""
        ...

    def open(self, size: int, words: WordType) -> Sum:
        """An empty sum of contributions of `size` values each, which were `words` before `encode`."""
        ...


def load(name: str) -> Aggregation:
    """The protocol that the job's `privacy.secure_aggregation` names.

    Raises:
        ConfigurationError: There is none of that name; the nearest names are told.
    """
    protocol: Aggregation = plugins.load("privacy.secure_aggregation", name).make()
    return protocol
