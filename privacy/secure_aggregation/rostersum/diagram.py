"""Draws both machines' transition tables as text: `python -m privacy.secure_aggregation.rostersum.diagram`."""

import sys
from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

from privacy.secure_aggregation.rostersum import stages, states
from privacy.secure_aggregation.rostersum.transitions import Transition

__all__ = ["draw"]

S = TypeVar("S", bound=Enum)
C = TypeVar("C", bound=Enum)


def draw(table: Iterable[Transition[S, C]], states: Iterable[S]) -> str:
    """The table as lines `states -- cause --> states: effect`, in its own order; "any" are all that have a row."""
    rows = tuple(table)
    live = {state for state in states if any(state in row.sources for row in rows)}
    cells = [(_named(row.sources, live), str(row.cause.value), _to(row), row.effect) for row in rows]
    left, middle, right = (max(len(cell[column]) for cell in cells) for column in range(3))
    return "\n".join(f"{a:{left}} -- {b:{middle}} --> {c:{right}} : {d}".rstrip() for a, b, c, d in cells)


def _named(states: tuple[S, ...], live: set[S]) -> str:
    return "any" if live <= set(states) else " | ".join(str(state.value) for state in states)


def _to(row: Transition[S, C]) -> str:
    return " | ".join(str(state.value) for state in row.targets) or "(stays)"


def main() -> None:
    """Prints both machines' tables."""
    sys.stdout.write(f"A site\n======\n{draw(states.TRANSITIONS, states.State)}\n\n")
    sys.stdout.write(f"The coordinator\n===============\n{draw(stages.TRANSITIONS, stages.Stage)}\n")


if __name__ == "__main__":
    main()
