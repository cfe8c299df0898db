"""Numbers and texts as people read them."""

import re

__all__ = ["ago", "bytes_", "change", "count", "number", "plain", "span"]

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#+\-.!|~:$&])")

_UNITS = ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def count(number: int, noun: str) -> str:
    """`1 site`, `2 sites`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def ago(seconds: float) -> str:
    """How long ago something was, in one unit: `just now`, `40 seconds ago`, `2 hours ago`."""
    for unit, noun in _UNITS:
        if seconds >= unit:
            return f"{count(int(seconds // unit), noun)} ago"
    return "just now"


def span(seconds: float) -> str:
    """A length of time in at most two units: `0.4 s`, `38 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 10:  # noqa: PLR2004 - a tenth still tells something below ten seconds
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    for unit, name, part, part_name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // part
            return f"{whole // unit} {name} {rest} {part_name}" if rest else f"{whole // unit} {name}"
    return f"{whole} s"


def bytes_(amount: int) -> str:
    """An amount of data in decimal units: `312 B`, `4.1 kB`, `67 MB`."""
    value = float(amount)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:  # noqa: PLR2004 - what would be rounded to 1000 goes into the next unit
            return f"{value:.0f} {unit}" if unit == "B" or value >= 9.95 else f"{value:.1f} {unit}"  # noqa: PLR2004 - two digits are enough
        value /= 1000
    return f"{value:,.1f} TB"


def number(value: float) -> str:
    """A metric: three decimals, or three significant digits where those would say nothing."""
    if value == 0 or 0.001 <= abs(value) < 1000:  # noqa: PLR2004 - where three decimals tell
        return f"{value:.3f}"
    return f"{value:,.0f}" if abs(value) < 1e6 and value == round(value) else f"{value:.3g}"  # noqa: PLR2004 - whole counts


def change(value: float) -> str:
    """A metric's change, always with its sign."""
    return f"-{number(-value)}" if value < 0 else f"+{number(value)}"


def plain(text: str) -> str:
    """`text` as Markdown that shows exactly it: what a site wrote must neither format the page nor load anything."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))
