"""What a coordinator says about itself as it opens a stream to a member: its protocol, its release, and its clock."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

__all__ = ["Greeting"]

_PROTOCOL, _RELEASE, _CLOCK = "parley-protocol", "parley-release", "parley-clock"
"""Names of the metadata entries."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """A coordinator's protocol version, release, and clock (unix seconds) when it answered."""

    protocol: int
    release: str
    clock: float

    def entries(self) -> tuple[tuple[str, str], ...]:
        """The greeting as metadata of a call."""
        return ((_PROTOCOL, str(self.protocol)), (_RELEASE, self.release), (_CLOCK, f"{self.clock:.3f}"))

    @classmethod
    def of(cls, entries: Iterable[tuple[str, str | bytes]]) -> Self | None:
        """The greeting in the metadata of a call; None when there is none that can be read."""
        said = {key: value for key, value in entries if isinstance(value, str)}
        try:
            return cls(int(said[_PROTOCOL]), said[_RELEASE][:100], float(said[_CLOCK]))
        except (KeyError, ValueError):
            return None
