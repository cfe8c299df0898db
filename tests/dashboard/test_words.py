"""People read few digits, one or two units, and exactly what was written."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dashboard import words


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (-1.0, "just now"),
        (0.4, "just now"),
        (1.0, "1 second ago"),
        (59.9, "59 seconds ago"),
        (60.0, "1 minute ago"),
        (7300.0, "2 hours ago"),
        (90_000.0, "1 day ago"),
    ],
)
def test_ago_is_one_unit(seconds: float, told: str) -> None:
    """A time in the past is told in its greatest unit."""
    assert words.ago(seconds) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (-3.0, "0.0 s"),
        (0.42, "0.4 s"),
        (38.4, "38 s"),
        (59.7, "1 min"),
        (200.0, "3 min 20 s"),
        (7500.0, "2 h 5 min"),
        (7200.0, "2 h"),
        (273_600.0, "3 d 4 h"),
    ],
)
def test_a_span_is_at_most_two_units(seconds: float, told: str) -> None:
    """A length of time is told as exactly as somebody who waits wants to know."""
    assert words.span(seconds) == told


@pytest.mark.parametrize(
    ("amount", "told"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9_960, "10 kB"),
        (743_211, "743 kB"),
        (999_600, "1.0 MB"),
        (67_000_000, "67 MB"),
        (4_200_000_000, "4.2 GB"),
        (5_000_000_000_000, "5.0 TB"),
    ],
)
def test_bytes_have_decimal_units(amount: int, told: str) -> None:
    """An amount of data is told in two or three digits."""
    assert words.bytes_(amount) == told


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.0, "0.000"),
        (0.8034, "0.803"),
        (-0.25, "-0.250"),
        (0.00012, "0.00012"),
        (740_000.0, "740,000"),
        (1.5e9, "1.5e+09"),
    ],
)
def test_a_metric_has_the_digits_that_tell_something(value: float, told: str) -> None:
    """Three decimals where they tell, three significant digits elsewhere."""
    assert words.number(value) == told


def test_a_change_has_a_sign() -> None:
    """Better and worse are told apart without colour."""
    assert [words.change(value) for value in (0.0051, -0.02, 0.0)] == ["+0.005", "-0.020", "+0.000"]


def test_nouns_are_counted() -> None:
    """One has no s."""
    assert [words.count(number, "site") for number in (0, 1, 1200)] == ["0 sites", "1 site", "1,200 sites"]


@settings(deadline=None, max_examples=50)
@given(st.text("ab \\`*_{}[]<>()#+-.!|~:$&1\n", max_size=40))
def test_plain_text_is_no_markdown(text: str) -> None:
    """What a site wrote is shown as it is: no link, image, heading or list comes of it."""
    tokens = MarkdownIt("commonmark").parse(words.plain(text))
    inline = [token for token in tokens if token.type == "inline"]
    assert {token.type for token in tokens} <= {"paragraph_open", "inline", "paragraph_close"}
    assert {child.type for token in inline for child in token.children or ()} <= {"text", "text_special"}
    shown = "".join(child.content for token in inline for child in token.children or ())
    assert shown == " ".join(text.split())
