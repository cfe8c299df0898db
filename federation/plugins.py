"""Finds a plug-in by its file name: a new strategy, model or task is one new file, and nothing else changes."""

import difflib
import importlib
import pkgutil
from functools import cache
from types import ModuleType

from federation.errors import ConfigurationError

__all__ = ["load", "names"]

_INTERFACES = frozenset({"strategy", "task", "model", "device", "models", "interface", "partition", "moments"})
"""What stands in a plug-in room and is no plug-in: the interface, what plug-ins share, and a room within the room."""


@cache
def names(room: str) -> tuple[str, ...]:
    """The plug-ins in `room` (a dotted package name such as `strategies`), sorted."""
    package = importlib.import_module(room)
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(sorted(name for name in found if name not in _INTERFACES and not name.startswith("_")))


def load(room: str, name: str) -> ModuleType:
    """The module of plug-in `name` in `room`.

    Raises:
        ConfigurationError: There is none of that name; the nearest names are told.
    """
    known = names(room)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigurationError(
            f"there is no {room.replace('.', ' ')} plug-in named {name!r}",
            fix=f"{guess}use one of {', '.join(known)}",
        )
    return importlib.import_module(f"{room}.{name}")
