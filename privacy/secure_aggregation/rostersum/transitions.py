"""The shape of a machine's transition table: the code obeys the table, and diagrams are drawn from it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

__all__ = ["Transition", "follows"]

S = TypeVar("S", bound=Enum)
C = TypeVar("C", bound=Enum)


@dataclass(frozen=True, slots=True)
class Transition(Generic[S, C]):
    """In any state of `sources`, `cause` (a message or event that passes its guards) leads to one of `targets`.

    Attributes:
        sources: The states it can happen in.
        cause: What happens.
        targets: Where it can lead; none means that the state stays as it is.
        effect: What is done, in a few words, for the diagram.
    """

    sources: tuple[S, ...]
    cause: C
    targets: tuple[S, ...]
    effect: str


def follows(table: Iterable[Transition[S, C]], state: S, cause: C) -> frozenset[S]:
    """The states that may follow; none where the cause has no place in this state."""
    found = [each for each in table if each.cause is cause and state in each.sources]
    return frozenset(target for each in found for target in (each.targets or (state,)))
