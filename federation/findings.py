"""What a contract check finds at a site: precise words for its administrator that show no record."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from federation.errors import RemoteProtocolError

__all__ = ["Finding", "brief", "refusals", "rows", "told"]

Level = Literal["refusal", "warning"]

_MAX_TEXT = 1000
_SMALL = 5
"""Counts below this are not told: a small cell of a table can name a person (statistical offices use 3 to 10)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: where in the contract, what is wrong, how to fix it, and whether it refuses the job.

    No field ever holds a value from the data; counts below 5 are told as "fewer than 5".
    """

    path: str
    problem: str
    fix: str
    level: Level = "refusal"

    def __post_init__(self) -> None:
        """Refuses what no check writes: findings travel."""
        if self.level not in get_args(Level):
            raise RemoteProtocolError(f"a finding is a refusal or a warning, not {self.level[:40]!r}")
        if max(len(self.path), len(self.problem), len(self.fix)) > _MAX_TEXT:
            raise RemoteProtocolError(f"a finding's words are longer than {_MAX_TEXT} characters")

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; {self.fix}"


def rows(count: int) -> str:
    """How many rows, in words that may leave the site."""
    return f"fewer than {_SMALL} rows" if count < _SMALL else f"{count} rows"


def refusals(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those findings that refuse the job."""
    return tuple(finding for finding in findings if finding.level == "refusal")


def brief(findings: Sequence[Finding]) -> str:
    """The first of some findings, how to mend it, and how many more there are."""
    first, more = findings[0], len(findings) - 1
    return f"{first.path}: {first.problem} ({first.fix}){f' and {more} more' if more else ''}"


def told(findings: Iterable[Finding]) -> str:
    """All findings in one text, one a line."""
    return "\n".join(str(finding) for finding in findings)
