import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.audit import Break
from federation.errors import ConfigurationError
from privacy import ledger_chain
from privacy.differential_privacy.events import Purpose
from privacy.differential_privacy.events import Unit as Protected
from privacy.ledger import BudgetSet, Charged, Ended, Entry, Promised
from privacy.ledger_chain import Line, entry_json, entry_of
from tests.privacy.test_ledger import GDP, LINE, RDP, rounds

ENTRIES: tuple[Entry, ...] = (
    RDP,
    Promised("hearts", b"j", (LINE, replace(LINE, purpose=Purpose.EVALUATION)), 1e-8),
    Charged("hearts", rounds(0, 4), 5e-10),
    Charged("hearts", replace(rounds(0, 0), purpose=Purpose.EVALUATION)),
    replace(GDP, family="lungs", q_most=0.25, unit=Protected.PERSON, reason='"a" \u00e9'),
    Ended(b"j"),
)


def chained(entries: Iterable[Entry], at: Callable[[int], float] = float) -> list[tuple[bytes, bytes]]:
    """The entries as a ledger holds them."""
    before, lines = bytes(32), []
    for number, entry in enumerate(entries, 1):
        text, before = ledger_chain.write(number, before, at(number), entry)
        lines.append((text, before))
    return lines


def broken(lines: list[tuple[bytes, bytes]]) -> Break:
    """The break at which a walk ends, and nothing follows it."""
    *whole, last = ledger_chain.walk(lines)
    assert all(isinstance(each, Line) for each in whole)
    assert isinstance(last, Break)
    assert last.line == len(whole) + 1
    return last


def test_a_whole_chain_gives_its_entries_back() -> None:
    """In order; times may fall, as clocks do."""
    found = list(ledger_chain.walk(chained(ENTRIES, lambda number: 100.0 - number)))
    assert [each.entry for each in found if isinstance(each, Line)] == list(ENTRIES)
    assert [each.at for each in found if isinstance(each, Line)] == [99.0, 98.0, 97.0, 96.0, 95.0, 94.0]
    assert list(ledger_chain.walk([])) == []


@given(st.integers(0, len(ENTRIES) - 1), st.data())
@settings(max_examples=50, deadline=None)
def test_any_changed_byte_is_named_by_its_line(at: int, data: st.DataObject) -> None:
    """Of a line, or of the digest beside it."""
    lines = chained(ENTRIES)
    which = data.draw(st.integers(0, 1))
    content = bytearray(lines[at][which])
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    changed = list(lines[at])
    changed[which] = bytes(content)
    lines[at] = changed[0], changed[1]
    assert broken(lines).line == at + 1


def test_lines_moved_removed_doubled_or_forged_are_named() -> None:
    """Whoever writes one anew, digest and all, must write all that follow anew: the last digest shows it."""
    lines = chained(ENTRIES)
    assert "that written as line 3" in broken([*lines[:1], *lines[2:]]).found
    assert "that written as line 2" in broken([*lines[:2], lines[1], *lines[2:]]).found
    assert broken([lines[1], lines[0]]).line == 1
    forged = chained((ENTRIES[0], replace(ENTRIES[1], added_delta=0.0)))[1]  # type: ignore[type-var] # a promise
    assert "an entry that follows" in broken([lines[0], forged, *lines[2:]]).expected
    anew = chained((*ENTRIES[:1], *ENTRIES[2:]))
    assert anew[-1][1] != lines[-1][1]


def test_a_chain_that_contradicts_itself_is_broken() -> None:
    """Its digests are right, and its charges cannot have been."""
    found = broken(chained((*ENTRIES[:3], ENTRIES[2])))
    assert (found.line, found.expected) == (4, "an entry that may follow those before it")
    assert "charged twice" in found.found


ODD = {
    "no JSON": b"x",
    "too deep": b"[" * 100_000,
    "no object": b"[]",
    "another entry": b'{"line":1,"before":"' + b"0" * 64 + b'","at":1.0,"entry":"gift"}',
    "more fields": b'{"line":1,"before":"' + b"0" * 64 + b'","at":1.0,"entry":"end","job":"00","x":1}',
    "no digest": b'{"line":1,"before":"xyz","at":1.0,"entry":"end","job":"00"}',
    "an impossible event": json.dumps(
        {"line": 1, "before": "0" * 64, "at": 1.0, **entry_json(ENTRIES[2])}, separators=(",", ":")
    )
    .replace('"q":1.0', '"q":2.0')
    .encode(),
}


@pytest.mark.parametrize("case", ODD)
def test_a_line_that_is_none_is_named(case: str) -> None:
    """Whatever was written there with a digest that fits."""
    text = ODD[case]
    found = broken([(text, ledger_chain._digest(text))])
    assert (found.line, found.expected) == (1, "an entry of a ledger")


BUDGETS = st.builds(
    BudgetSet,
    family=st.text(min_size=1, max_size=8),
    epsilon=st.floats(1e-3, 1e3),
    delta=st.floats(1e-12, 0.5),
    order=st.none() | st.integers(2, 256),
    unit=st.sampled_from(list(Protected)),
    q_most=st.floats(1e-6, 1.0),
    reason=st.text(max_size=40),
)


@given(BUDGETS, st.floats(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_any_budget_is_read_as_it_was_written(budget: BudgetSet, at: float) -> None:
    """To the last digit, in whatever letters."""
    text, digest = ledger_chain.write(1, bytes(32), at, budget)
    line = ledger_chain.read(text)
    assert (line.entry, line.at, line.digest) == (budget, at, digest)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_is_a_json_object_of_its_own(entry: Entry) -> None:
    """So the audit log can hold it; a field more or less is none."""
    content: Any = json.loads(json.dumps(entry_json(entry)))
    assert entry_of(content) == entry
    with pytest.raises((ValueError, ConfigurationError)):
        entry_of({**content, "more": 1})
    for key in content:
        with pytest.raises((ValueError, ConfigurationError)):
            entry_of({name: value for name, value in content.items() if name != key})
