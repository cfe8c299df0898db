"""What a machine remembers and what it refuses, as values: a refusal must leave the memory as it was."""

from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from federation.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["refusal", "snapshot"]


def refusal(act: Callable[[], object]) -> RemoteProtocolError | LocalProtocolError | None:
    """The error of the protocol with which `act` is refused; None if it is not."""
    try:
        act()
    except (RemoteProtocolError, LocalProtocolError) as refused:
        return refused
    return None


def snapshot(value: Any, *, but: frozenset[str] = frozenset()) -> Any:
    """All that `value` holds, however deep, in values that do not change with it; without attributes named in `but`."""
    match value:
        case dict():
            return {key: snapshot(each, but=but) for key, each in value.items()}
        case list() | tuple() | deque():
            return [snapshot(each, but=but) for each in value]
        case set() | frozenset():
            return frozenset(value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in fields(value) if field.name not in but]
            return type(value), [snapshot(getattr(value, name), but=but) for name in names]
        case _ if type(value).__module__.split(".")[0] in {"client", "coordinator"} and hasattr(value, "__dict__"):
            return {name: snapshot(each, but=but) for name, each in vars(value).items() if name not in but}
        case _:
            return value
