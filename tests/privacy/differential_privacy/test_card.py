import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import ConfigurationError
from privacy.differential_privacy.card import differences, event_json, event_of, section
from privacy.differential_privacy.events import EVERY_RECORD, Event, Level, Part, Population, Purpose, Unit
from privacy.differential_privacy.record import share_variance
from privacy.differential_privacy.statement import guarantee, statement

EVENT = Event(
    job=b"job",
    first_round=1,
    last_round=100,
    level=Level.RECORD_SHARED,
    unit=Unit.RECORD,
    q=1.0,
    v=share_variance(37.3064, 1 << 60, 7),
    n_eff=7,
    squared=1 << 60,
    count=100,
    purpose=Purpose.TRAIN,
    population=EVERY_RECORD,
)
EVALUATED = replace(EVENT, purpose=Purpose.EVALUATION, count=20, population=Population("split", Part.TEST))


def told(**changes: Any) -> dict[str, Any]:
    """A card's section as a program reads it."""
    found: dict[str, Any] = json.loads(json.dumps(section((EVENT, EVALUATED), 1e-5, c_max=3, added_delta=2e-8)))
    return {**found, **changes}


EVENTS = st.builds(
    lambda job, first, count, unit, q, z, squared, n_eff, purpose, split, part: Event(
        job=job,
        first_round=first,
        last_round=first + count - 1,
        level=Level.SITE if unit is Unit.SITE else Level.RECORD_SHARED if n_eff > 1 else Level.RECORD_SITE,
        unit=unit,
        q=1.0 if unit is Unit.SITE else q,
        v=share_variance(z, squared, n_eff),
        n_eff=max(2, n_eff) if unit is Unit.SITE else n_eff,
        squared=squared,
        count=count,
        purpose=purpose,
        population=Population(split, part),
    ),
    job=st.binary(min_size=1, max_size=32),
    first=st.integers(0, 2**63),
    count=st.integers(1, 2**62),
    unit=st.sampled_from(list(Unit)),
    q=st.floats(1e-9, 1.0),
    z=st.floats(0.5, 1e6),
    squared=st.integers(1 << 20, 1 << 90),
    n_eff=st.integers(1, 99),
    purpose=st.sampled_from(list(Purpose)),
    split=st.text(max_size=10),
    part=st.sampled_from(list(Part)),
)


@given(EVENTS)
@settings(max_examples=50, deadline=None)
def test_any_event_is_read_as_it_was_written(event: Event) -> None:
    """To the last digit of its integers, which other readers of JSON would round as numbers."""
    content = json.loads(json.dumps(event_json(event)))
    assert event_of(content) == event
    assert (type(content["v"]), type(content["squared"])) == (str, str)


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "a field more": ({"more": 1}, "an event has other fields than events have"),
    "a part more": ({"population": {"split": "", "part": "all", "x": 1}}, "other fields than events have"),
    "v as a number": ({"v": 218650}, "other fields than events have"),
    "v in hexadecimal": ({"v": "0x10"}, "'0x10' is no decimal number"),
    "v with a zero in front": ({"v": "0100"}, "'0100' is no decimal number"),
    "v in other digits": ({"v": "\u0661\u0662"}, "is no decimal number"),
    "no digest": ({"job": "xyz"}, "an event cannot be read: non-hexadecimal"),
    "another level": ({"level": "local"}, "'local' is not a valid Level"),
    "too little noise": ({"v": "5"}, "a noise share of variance 5 is below 64"),
    "more charges than rounds": ({"count": 101}, "rounds 1 to 100 do not hold 101 charges"),
}


@pytest.mark.parametrize("case", ODD)
def test_an_event_that_cannot_be_is_refused(case: str) -> None:
    """With its place in the card."""
    changed, message = ODD[case]
    with pytest.raises(ConfigurationError, match=message):
        event_of({**event_json(EVENT), **changed})
    content = told()
    content["events"][1] = {**content["events"][1], **changed}
    with pytest.raises(ConfigurationError, match="event 2 of the card: "):
        differences(content)


@pytest.mark.parametrize("name", event_json(EVENT))
def test_an_event_without_a_field_is_refused(name: str) -> None:
    """Each is needed."""
    with pytest.raises(ConfigurationError, match="other fields than events have"):
        event_of({key: value for key, value in event_json(EVENT).items() if key != name})


def test_a_section_states_what_its_events_prove() -> None:
    """The very sentence and numbers of the statement, and the events that they come from."""
    found = guarantee((EVENT, EVALUATED), 1e-5, c_max=3, added_delta=2e-8)
    content = told()
    assert content["format"] == "parley-privacy-1"
    assert content["statement"] == statement(found)
    assert (content["epsilon"], content["adaptive_epsilon"]) == (found.spent.value, found.spent.renyi)
    assert (content["total_delta"], content["adaptive_order"]) == (found.delta, found.spent.order)
    assert [event_of(each) for each in content["events"]] == [EVENT, EVALUATED]
    assert differences(content) == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"epsilon": 0.5}, "epsilon is 0.5, and its events come to 1.10"),
        ({"adaptive_epsilon": 0.5}, "adaptive_epsilon is 0.5"),
        ({"adaptive_order": 3}, "adaptive_order is 3"),
        ({"method": "guessed"}, "method is 'guessed'"),
        ({"total_delta": 1e-5}, "total_delta is 1e-05, and its events come to 1.002e-05"),
        ({"statement": "All is private."}, "statement is 'All is private.', and its events come to "),
        ({"statement": None}, "statement is missing"),
        ({"epsilon": True}, "epsilon is True"),
        ({"epsilon": "1.0"}, "epsilon is '1.0'"),
    ],
)
def test_what_differs_is_named(changed: dict[str, Any], message: str) -> None:
    """With what the card says and what it comes to."""
    (found,) = differences(told(**changed))
    assert found.startswith(message)


def test_events_left_out_or_weakened_are_noticed() -> None:
    """Fewer rounds, or more noise than there was, give another epsilon than the card's."""
    fewer = told()
    fewer["events"].pop()
    weaker = told()
    weaker["events"][0]["v"] = str(EVENT.v * 2)
    for content in (fewer, weaker):
        assert next(iter(differences(content))).startswith("epsilon is ")


def test_a_hair_of_rounding_is_no_difference() -> None:
    """Two machines' accountants need not agree in every bit."""
    content = told()
    content["epsilon"] *= 1 + 1e-9
    assert differences({**content, "note": "kept"}) == ()


@pytest.mark.parametrize(
    "changed",
    [{"format": "parley-privacy-2"}, {"delta": "1e-5"}, {"events": {}}, {"c_max": 1.5}, {"added_delta": None}],
)
def test_another_section_is_refused(changed: dict[str, Any]) -> None:
    """By its name."""
    with pytest.raises(ConfigurationError, match="no section of the format parley-privacy-1 with delta"):
        differences(told(**changed))


def test_a_section_without_events_proves_nothing() -> None:
    """It is no statement at all."""
    with pytest.raises(ConfigurationError, match="a statement is about charged rounds"):
        differences(told(events=[]))
