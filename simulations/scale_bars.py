"""What every benchmark of scale offers: what it needs, how it tells its progress, and the bars it is held against."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["Bar", "Benchmark", "Measured", "Tell"]

Tell = Callable[[str, float], None]
"""Says what is being done, and which share of the whole benchmark lies behind."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure beside the most that it may be.

    Attributes:
        what: The figure, in words.
        measured: What it is.
        limit: What it may be at most.
        unit: Of both.
    """

    what: str
    measured: float
    limit: float
    unit: str

    @property
    def holds(self) -> bool:
        """Whether the figure is within its limit."""
        return self.measured <= self.limit

    @property
    def plain(self) -> dict[str, str | float | bool]:
        """The bar as JSON."""
        return {
            "what": self.what,
            "measured": round(self.measured, 3),
            "limit": self.limit,
            "unit": self.unit,
            "holds": self.holds,
        }


class Measured(Protocol):
    """What a benchmark has found."""

    @property
    def plain(self) -> Mapping[str, object]:
        """The figures as JSON; memory in MiB."""
        ...

    @property
    def bars(self) -> tuple[Bar, ...]:
        """The bars that they are held against."""
        ...


class Benchmark(Protocol):
    """One question of scale, with its sizes."""

    @property
    def disk(self) -> int:
        """Bytes that it writes at most."""
        ...

    def measure(self, folder: Path, tell: Tell) -> Measured:
        """The answer; processes and files are gone afterwards but for what lies in `folder`.

        Raises:
            ParleyError: A process ended, or something took too long.
        """
        ...
