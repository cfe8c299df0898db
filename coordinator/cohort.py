"""Whom to invite: which sites a job may count on, and which of them take part in the next step."""

from collections.abc import Collection

__all__ = ["hopeless", "missing", "ready"]


def ready(accepted: Collection[str], attending: Collection[str], needed: int) -> frozenset[str]:
    """The sites that take part in a step now: those that accepted the job and attend; empty when too few are here."""
    here = frozenset(accepted) & frozenset(attending)
    return here if len(here) >= needed else frozenset()


def missing(accepted: Collection[str], attending: Collection[str], needed: int) -> int:
    """How many more sites must attend before a step can start."""
    return max(0, needed - len(frozenset(accepted) & frozenset(attending)))


def hopeless(roster: Collection[str], refused: Collection[str], needed: int) -> bool:
    """Whether so many sites refused that the job can never have `needed`."""
    return len(frozenset(roster) - frozenset(refused)) < needed
