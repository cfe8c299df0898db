from __future__ import annotations

import pytest

from federation.greeting import Greeting


def test_a_greeting_arrives_as_it_was_said() -> None:
    """Among other metadata; the clock to a millisecond."""
    greeting = Greeting(1, "0.1.0", 1_764_517_800.125)
    assert Greeting.of((("other", "x"), *greeting.entries(), ("other-bin", b"x"))) == greeting


@pytest.mark.parametrize("missing", ["parley-protocol", "parley-release", "parley-clock"])
def test_half_a_greeting_is_none(missing: str) -> None:
    """A part that is missing, or is no number, makes the rest worthless."""
    entries = Greeting(1, "0.1.0", 1.0).entries()
    assert Greeting.of(each for each in entries if each[0] != missing) is None
    if missing != "parley-release":
        assert Greeting.of((*entries, (missing, "x"))) is None
