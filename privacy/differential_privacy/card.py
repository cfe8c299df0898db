"""A privacy statement for programs: the events that it stands on, as JSON, and what of it they do not come to.

```
{"format": "parley-privacy-1", "delta": 1e-05, "c_max": 3, "added_delta": 2e-08, "events": [EVENT, ...],
 "epsilon": 0.999998, "method": "exact Gaussian", "adaptive_epsilon": 1.0926, "adaptive_order": 17,
 "total_delta": 1.002e-05, "statement": "Differential privacy, level ..."}

EVENT = {"job": "9f86..", "rounds": [1, 100], "count": 100, "level": "record-shared", "unit": "record",
         "purpose": "train", "population": {"split": "", "part": "all"},
         "q": 1.0, "v": "218650", "n_eff": 7, "squared": "1099511627776"}
```

`v` and `squared` are decimal text: they pass 2^53, where most readers of JSON begin to round.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from federation.errors import ConfigurationError, ParleyError
from privacy.differential_privacy.events import Event, Level, Part, Population, Purpose, Unit

__all__ = ["FORMAT", "Json", "differences", "event_json", "event_of", "section"]

FORMAT = "parley-privacy-1"
"""What the section of a model card begins with."""

Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"

_AGREES = 1e-6
"""Relative: two machines' accountants round apart by less."""

_FIX = "take the card as the coordinator made it; if it is unchanged, ask its operator who changed the model's record"


# --------------------------------------------------------------------------------------------------------------- events


def event_json(event: Event) -> dict[str, Json]:
    """The event as a JSON object; `event_of` gives the very event back."""
    return {
        "job": event.job.hex(),
        "rounds": [event.first_round, event.last_round],
        "count": event.count,
        "level": event.level.value,
        "unit": event.unit.value,
        "purpose": event.purpose.value,
        "population": {"split": event.population.split, "part": event.population.part.value},
        "q": event.q,
        "v": str(event.v),
        "n_eff": event.n_eff,
        "squared": str(event.squared),
    }


def event_of(found: object) -> Event:
    """The event that a JSON object is of.

    Raises:
        ConfigurationError: It is of none: a field is missing, more than there are, or cannot be.
    """
    match found:
        case {
            "job": str(job),
            "rounds": [int(first), int(last)],
            "count": int(count),
            "level": str(level),
            "unit": str(unit),
            "purpose": str(purpose),
            "population": {"split": str(split), "part": str(part), **no_more},
            "q": float() | int() as q,
            "v": str(v),
            "n_eff": int(n_eff),
            "squared": str(squared),
            **rest,
        } if not no_more and not rest:
            try:
                return Event(
                    job=bytes.fromhex(job),
                    first_round=first,
                    last_round=last,
                    level=Level(level),
                    unit=Unit(unit),
                    q=q,
                    v=_natural(v),
                    n_eff=n_eff,
                    squared=_natural(squared),
                    count=count,
                    purpose=Purpose(purpose),
                    population=Population(split, Part(part)),
                )
            except ValueError as wrong:
                raise ConfigurationError(f"an event cannot be read: {wrong}", fix=_FIX) from wrong
        case _:
            raise ConfigurationError("an event has other fields than events have", fix=_FIX)


def _natural(text: str) -> int:
    """The number that a decimal text without sign or leading zeros is."""
    if not (text.isascii() and text.isdigit() and (text == "0" or text[0] != "0")):
        raise ValueError(f"{text[:40]!r} is no decimal number")
    return int(text)


# ------------------------------------------------------------------------------------------------- the card's section


def section(events: tuple[Event, ...], delta: float, *, c_max: int, added_delta: float = 0.0) -> dict[str, Json]:
    """The section of a model card about these events: what they are, what they prove, and the statement for people.

    Raises:
        ConfigurationError: There are no events, or no one statement is about them.
        LocalProtocolError: The accountants disagree.
    """
    from privacy.differential_privacy.statement import guarantee, statement

    found = guarantee(events, delta, c_max=c_max, added_delta=added_delta)
    return {
        "format": FORMAT,
        "delta": delta,
        "c_max": c_max,
        "added_delta": added_delta,
        "events": [event_json(each) for each in events],
        "epsilon": found.spent.value,
        "method": found.spent.method.value,
        "adaptive_epsilon": found.spent.renyi,
        "adaptive_order": found.spent.order,
        "total_delta": found.delta,
        "statement": statement(found),
    }


def differences(found: Mapping[str, object]) -> tuple[str, ...]:
    """What of a card's section its own events do not come to, recomputed here; none if the section holds.

    Keys that a section has not are left alone.

    Raises:
        ConfigurationError: It is no section of the kind, its events cannot be, or no one statement is about them.
        LocalProtocolError: The accountants disagree.
    """
    match found:
        case {
            "format": str(form),
            "delta": float(delta),
            "c_max": int(c_max),
            "added_delta": float() | int() as added,
            "events": [*events],
        } if form == FORMAT:
            own = section(_numbered(events), delta, c_max=c_max, added_delta=float(added))
        case _:
            raise ConfigurationError(
                f"the card has no section of the format {FORMAT} with delta, c_max, added_delta and events",
                fix=_FIX,
            )
    return tuple(
        f"{name} is {_shown(found.get(name))}, and its events come to {_shown(expected)}"
        for name, expected in own.items()
        if name != "events" and not _same(found.get(name), expected)
    )


def _numbered(events: Sequence[object]) -> tuple[Event, ...]:
    """The events; the one that cannot be is named by its place, from 1."""
    read = []
    for number, each in enumerate(events, 1):
        try:
            read.append(event_of(each))
        except ParleyError as wrong:
            raise ConfigurationError(f"event {number} of the card: {wrong.problem}", fix=wrong.fix or _FIX) from wrong
    return tuple(read)


def _same(told: object, expected: Json) -> bool:
    if isinstance(expected, float):
        number = isinstance(told, float | int) and not isinstance(told, bool)
        return number and abs(float(str(told)) - expected) <= _AGREES * abs(expected)
    return told == expected


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)
