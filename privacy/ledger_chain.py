"""A privacy ledger's lines: JSON that people can read, each naming the digest of the line before it.

```
{"line":1,"before":"000000..","at":1764529770.1,"entry":"budget","family":"heart","epsilon":8.0, ...}
{"line":2,"before":"5f0c1a..","at":1764529771.0,"entry":"charge","family":"heart","event":{ ... },"added_delta":0.0}
```

A line's digest is the SHA-256 of `parley-ledger-1`, a line feed, and its text.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import assert_never

from federation.audit import Break
from federation.errors import LocalProtocolError, ParleyError
from privacy.differential_privacy.card import Json, event_json, event_of
from privacy.differential_privacy.events import Unit
from privacy.ledger import Book, BudgetSet, Charged, Ended, Entry, Promised

__all__ = ["Line", "entry_json", "entry_of", "read", "walk", "write"]

_LABEL = b"parley-ledger-1\n"
_NONE = bytes(32)


@dataclass(frozen=True, slots=True)
class Line:
    """One whole line of a ledger.

    Attributes:
        number: Its place, from 1.
        before: The digest of the line before it; zeros in the first.
        at: Unix seconds, as the writer's clock said: it orders nothing.
        entry: What it says.
        digest: What the next line names.
    """

    number: int
    before: bytes
    at: float
    entry: Entry
    digest: bytes


def write(number: int, before: bytes, at: float, entry: Entry) -> tuple[bytes, bytes]:
    """The line's text, and its digest."""
    head: dict[str, Json] = {"line": number, "before": before.hex(), "at": float(at)}
    text = json.dumps({**head, **entry_json(entry)}, separators=(",", ":"), allow_nan=False).encode()
    return text, _digest(text)


def read(text: bytes) -> Line:
    """The line that `write` wrote.

    Raises:
        ValueError: It is none.
    """
    found = json.loads(text)
    match found:
        case {"line": int(number), "before": str(before), "at": float(at), **rest}:
            return Line(number, bytes.fromhex(before), at, entry_of(rest), _digest(text))
        case _:
            raise ValueError("it has other fields")


def walk(lines: Iterable[tuple[bytes, bytes]]) -> Iterator[Line | Break]:
    """The lines of a ledger, given as texts with the digests kept beside them; behind the first broken one is none."""
    before, book = _NONE, Book()
    for number, (text, digest) in enumerate(lines, 1):
        found = _checked(number, before, text, digest, book)
        yield found
        if isinstance(found, Break):
            return
        before = found.digest


def _checked(number: int, before: bytes, text: bytes, digest: bytes, book: Book) -> Line | Break:
    if _digest(text) != digest:
        return Break(number, f"the digest of what it holds, {_digest(text).hex()}", digest.hex())
    try:
        line = read(text)
    except (ValueError, RecursionError, ParleyError) as wrong:
        return Break(number, "an entry of a ledger", f"{text[:80]!r} ({wrong})")
    if line.number != number:
        return Break(number, f"the entry written as line {number}", f"that written as line {line.number}")
    if line.before != before:
        return Break(number, f"an entry that follows {before.hex()}", f"one that follows {line.before.hex()}")
    try:
        book.post(line.entry)
    except LocalProtocolError as contradiction:
        return Break(number, "an entry that may follow those before it", contradiction.problem)
    return line


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(_LABEL + text).digest()


# ----------------------------------------------------------------------------------------------------- entries as JSON


def entry_json(entry: Entry) -> dict[str, Json]:
    """The entry as a JSON object; `entry_of` gives the very entry back."""
    match entry:
        case BudgetSet():
            return {
                "entry": "budget",
                "family": entry.family,
                "epsilon": entry.epsilon,
                "delta": entry.delta,
                "order": entry.order,
                "unit": entry.unit.value,
                "q_most": entry.q_most,
                "reason": entry.reason,
            }
        case Promised(family, job, lines, added):
            told: list[Json] = [event_json(each) for each in lines]
            return {"entry": "promise", "family": family, "job": job.hex(), "lines": told, "added_delta": added}
        case Charged(family, event, added):
            return {"entry": "charge", "family": family, "event": event_json(event), "added_delta": added}
        case Ended(job):
            return {"entry": "end", "job": job.hex()}
        case _:
            assert_never(entry)


def entry_of(found: object) -> Entry:
    """The entry that a JSON object is of.

    Raises:
        ValueError: It is of none.
        ConfigurationError: Its events or numbers cannot be.
    """
    match found:
        case {
            "entry": "budget",
            "family": str(family),
            "epsilon": float(epsilon),
            "delta": float(delta),
            "order": int() | None as order,
            "unit": str(unit),
            "q_most": float(q_most),
            "reason": str(reason),
            **rest,
        } if not rest:
            return BudgetSet(family, epsilon, delta, order, Unit(unit), q_most, reason)
        case {
            "entry": "promise",
            "family": str(family),
            "job": str(job),
            "lines": [*lines],
            "added_delta": float(added),
            **rest,
        } if not rest:
            return Promised(family, bytes.fromhex(job), tuple(map(event_of, lines)), added)
        case {
            "entry": "charge",
            "family": str(family),
            "event": event,
            "added_delta": float(added),
            **rest,
        } if not rest:
            return Charged(family, event_of(event), added)
        case {"entry": "end", "job": str(job), **rest} if not rest:
            return Ended(bytes.fromhex(job))
        case _:
            raise ValueError("it is no entry of a ledger")
