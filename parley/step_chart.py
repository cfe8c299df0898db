"""A small picture of numbers that only rise, over time, as SVG: no library is needed, and every browser shows it."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Series", "drawn"]

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 260, 70, 20, 44, 40
_TICKS = 4


@dataclass(frozen=True, slots=True)
class Series:
    """One panel.

    Attributes:
        title: What stands above it.
        points: Time in Unix seconds, the value from then on, and the limit from then on; times do not fall.
    """

    title: str
    points: tuple[tuple[float, float, float], ...]


def drawn(series: Sequence[Series], name: str) -> str:
    """The panels below one another, each value a line of steps and its limit a dashed one; `name` is for readers."""
    height = max(1, len(series)) * _PANEL
    first = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" role="img" font-size="12"'
    parts = [
        f'{first} font-family="sans-serif"><title>{escape(name)}</title>',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, each in enumerate(series):
        parts += _panel(each, number * _PANEL)
    return "\n".join((*parts, "</svg>", ""))


def _panel(series: Series, top: float) -> Iterator[str]:
    begin, end = series.points[0][0], series.points[-1][0]
    span = max(end - begin, 1.0)
    most = 1.05 * max(max(value, limit) for _, value, limit in series.points)
    step = _nice(most / _TICKS)
    low, high = top + _PANEL - _BOTTOM, top + _TOP

    def x(at: float) -> float:
        return _LEFT + (at - begin) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return low - value / most * (low - high)

    yield f'<text x="{_LEFT}" y="{top + 20}" font-weight="bold">{escape(series.title)}</text>'
    for tick in range(int(most / step) + 1):
        at = y(tick * step)
        yield f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tick * step:g}</text>'
    for at, anchor in ((begin, "start"), (begin + span, "end")):
        shown = time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))
        yield f'<text x="{x(at):.1f}" y="{low + 20}" text-anchor="{anchor}">{shown}</text>'
    for column, style in ((2, 'stroke="#c33" stroke-dasharray="6 4"'), (1, 'stroke="#136" stroke-width="2"')):
        path = f"M{x(begin):.1f} {y(series.points[0][column]):.1f}"
        path += "".join(f"H{x(each[0]):.1f}V{y(each[column]):.1f}" for each in series.points)
        yield f'<path d="{path}H{_WIDTH - _RIGHT}" fill="none" {style}/>'


def _nice(step: float) -> float:
    """The least of 1, 2 or 5 times a power of ten that is not below."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
