from xml.etree import ElementTree as ET

import pytest

from parley.step_chart import Series, drawn

SVG = "{http://www.w3.org/2000/svg}"


def test_a_panel_shows_steps_limit_and_time() -> None:
    """The value's line goes up in steps and never left; what stands in it is text, whatever it is."""
    points = ((0.0, 0.0, 3.0), (60.0, 1.0, 3.0), (120.0, 2.5, 4.0))
    picture = ET.fromstring(drawn((Series("heart <b>&", points), Series("lungs", points)), "a & b"))  # noqa: S314 - our own
    texts = [each.text for each in picture.iter(f"{SVG}text")]
    assert texts[0] == "heart <b>&"
    assert {"1970-01-01 00:00", "1970-01-01 00:02"} <= set(texts)
    assert [each.text for each in picture.iter(f"{SVG}title")] == ["a & b"]
    limit, value, *rest = [each.get("d") for each in picture.iter(f"{SVG}path") if each.get("fill") == "none"]
    assert (limit, value) == tuple(rest) or len(rest) == 2
    assert value is not None
    moves = [float(each.split("V")[0]) for each in value.split("H")[1:]]
    assert moves == sorted(moves)
    heights = [float(each.split("V")[1]) for each in value.split("H")[1:-1]]
    assert heights == sorted(heights, reverse=True)


@pytest.mark.parametrize("value", [1e-6, 0.3, 7.0, 1e9])
def test_one_point_of_any_size_is_a_picture(value: float) -> None:
    """With a few ticks on its axis, of round numbers."""
    picture = ET.fromstring(drawn((Series("x", ((5.0, 0.0, value),)),), "x"))  # noqa: S314 - our own
    ticks = [each.text for each in picture.iter(f"{SVG}text") if each.get("text-anchor") == "end"][:-1]
    assert 2 <= len(ticks) <= 6
    assert ticks[0] == "0"


def test_nothing_to_draw_is_an_empty_picture() -> None:
    """And still one."""
    assert ET.fromstring(drawn((), "nothing")).tag == f"{SVG}svg"  # noqa: S314 - our own
