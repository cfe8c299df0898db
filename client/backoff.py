"""How long to wait before the next try: longer each time, and never all at once with everybody else."""

import random
from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass(slots=True)
class Backoff:
    """Waits between tries: doubling from `first` to `longest` seconds, each drawn between half and all of it."""

    first: float = 0.5
    longest: float = 30.0
    tries: int = 0

    def seconds(self) -> float:
        """The next wait."""
        limit = min(self.longest, self.first * 2.0**self.tries)
        self.tries = min(self.tries + 1, 16)
        return limit * random.uniform(0.5, 1.0)  # noqa: S311 - spreads reconnects; nothing secret hangs on it

    def reset(self) -> None:
        """Starts over: it went well."""
        self.tries = 0
