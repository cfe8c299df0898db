"""What a look at one thing came to: well or not, the cause, what helps, and who can do it."""

from dataclasses import dataclass
from enum import Enum

from federation.errors import ParleyError, WhoActs

__all__ = ["Check", "Level", "failed"]


class Level(Enum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: what was found (the cause, when it is not well), what helps, and who can do it."""

    name: str
    level: Level
    found: str
    fix: str = ""
    who: WhoActs | None = None


def failed(name: str, error: ParleyError) -> Check:
    """A check that came out as an error."""
    return Check(name, Level.FAIL, error.problem, error.fix, error.who)
