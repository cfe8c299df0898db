"""Reads the columns of a table as a data contract declares them, and finds what does not meet it."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, assert_never

import numpy as np

from federation.findings import Finding, rows
from federation.job import CategoricalColumn, NumericColumn

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    import numpy.typing as npt
    import pandas as pd

    from federation.job import Column
    from federation.vector import F64

__all__ = [
    "FRACTION",
    "MISSING",
    "TEXT",
    "UNKNOWN",
    "Categories",
    "absent",
    "categories_read",
    "codes",
    "inspect_codes",
    "inspect_column",
    "inspect_numbers",
    "missing",
    "numbers",
]

Categories = tuple[str, ...] | tuple[int, ...]

MISSING, UNKNOWN, FRACTION, TEXT = -1, -2, -3, -4
"""What a cell is that is none of the categories."""

_SHOWN = 8


def numbers(cells: pd.Series, *, zero_is_missing: bool = False) -> tuple[F64, npt.NDArray[np.bool_]]:
    """The cells as numbers [rows], NaN where missing or no number, and which cells hold something that is no number.

    Numbers written as text count as numbers, blank text as missing.
    """
    import pandas as pd

    plain = _plain(cells)
    if pd.api.types.is_numeric_dtype(plain):
        values = plain.to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
    elif pd.api.types.is_object_dtype(plain) or pd.api.types.is_string_dtype(plain):
        values = pd.to_numeric(plain, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
    else:  # dates, intervals and the like are numbers to pandas, not to a contract
        values = np.full(len(plain), np.nan)
    wrong = np.isnan(values) & plain.notna().to_numpy()
    if zero_is_missing:
        values[values == 0] = np.nan
    return values, wrong


def codes(cells: pd.Series, categories: Categories) -> npt.NDArray[np.int64]:
    """The index of each cell's category [rows], or MISSING, UNKNOWN, FRACTION or TEXT.

    Whole-number categories match 1, 1.0, "1" and True; text categories match the text, and numbers as they are written.
    """
    import pandas as pd

    places, values = pd.factorize(_plain(cells), use_na_sentinel=True)
    known: dict[Hashable, int] = {category: index for index, category in enumerate(categories)}
    whole = isinstance(categories[0], int)
    found = [_whole(value, known) if whole else _word(value, known) for value in values]
    return np.asarray([*found, MISSING], dtype=np.int64)[places]  # missing cells have place -1: the last entry


def missing(table: pd.DataFrame, column: Column) -> npt.NDArray[np.bool_]:
    """Which rows [rows] have no value in `column`."""
    match column:
        case NumericColumn():
            return np.isnan(numbers(table[column.name], zero_is_missing=column.zero_is_missing)[0])
        case CategoricalColumn():
            return np.equal(codes(table[column.name], column.categories), MISSING)
        case _:
            assert_never(column)


def absent(table: pd.DataFrame, name: str, path: str) -> Finding | None:
    """The finding that `table` has no column `name`, with the nearest name that it has, or None.

    A name that is a number betrays a file without a header, whose first record stands as names: none is shown.
    """
    if name in table.columns:
        return None
    existing = [str(column) for column in table.columns]
    if any(_is_number(column) for column in existing):
        return Finding(path, f"the data has no column {name!r}", "name the columns in the data's first line")
    near = difflib.get_close_matches(name.lower(), [column.lower() for column in existing], n=1)
    shown = next((column for column in existing if near and column.lower() == near[0]), "")
    fix = f"rename {shown[:60]!r} to it" if shown else "add it"
    return Finding(path, f"the data has no column {name!r}", fix)


def inspect_column(table: pd.DataFrame, column: Column, *, complete: bool) -> Iterator[Finding]:
    """What of `column` the table does not meet; `complete` refuses what the contract would drop a row for."""
    path = f"data.columns.{column.name}"
    gone = absent(table, column.name, path)
    if gone is not None:
        yield gone
        return
    cells = table[column.name]
    match column:
        case NumericColumn():
            values, wrong = numbers(cells, zero_is_missing=column.zero_is_missing)
            yield from inspect_numbers(values, wrong, path, column.range, column.unit)
            empty = np.isnan(values) & ~wrong
        case CategoricalColumn():
            found = codes(cells, column.categories)
            yield from inspect_codes(found, path, column.categories)
            empty = found == MISSING
        case _:
            assert_never(column)
    if empty.any() and (column.missing == "refuse" or (complete and column.missing == "drop_row")):
        yield Finding(
            path,
            f"{rows(int(empty.sum()))} have no value",
            "complete or remove those rows, or ask the job's author to set `missing` for this column",
        )


def inspect_numbers(
    values: F64, wrong: npt.NDArray[np.bool_], path: str, bounds: tuple[float, float] | None, unit: str = ""
) -> Iterator[Finding]:
    """Cells that are no numbers (`wrong`), and numbers outside the public `bounds`."""
    if wrong.any():
        yield Finding(
            path,
            f"{rows(int(wrong.sum()))} hold something else where numbers are asked",
            "write numbers with a decimal point, without units, and leave missing values empty",
        )
    if bounds is None:
        return
    low, high = bounds
    outside = int(np.sum((values < low) | (values > high)))
    if outside:
        yield Finding(
            path,
            f"{rows(outside)} lie outside the public range {low:g} to {high:g}{' ' if unit else ''}{unit}",
            "correct the values or their unit, or ask the job's author for a wider range",
        )


def inspect_codes(found: npt.NDArray[np.int64], path: str, categories: Categories) -> Iterator[Finding]:
    """Cells that are none of `categories`, by what they are instead."""
    allowed = categories_read(categories)
    for code, problem in (
        (TEXT, "hold something else where whole numbers are asked"),
        (FRACTION, "hold fractions where whole numbers are asked"),
        (UNKNOWN, "hold none of the contract's values"),
    ):
        count = int(np.sum(found == code))
        if count:
            yield Finding(path, f"{rows(count)} {problem}", f"use {allowed}, and leave missing values empty")


def categories_read(categories: Categories) -> str:
    """The categories as people read them, the first few when there are many."""
    shown = ", ".join(str(category)[:40] for category in categories[:_SHOWN])
    more = len(categories) - _SHOWN
    return f"one of {shown}" + (f" and {more} more" if more > 0 else "")


def _plain(cells: pd.Series) -> pd.Series:
    """The cells as numbers, text without outer blanks, or missing (also for blank text)."""
    import pandas as pd

    if isinstance(cells.dtype, pd.CategoricalDtype):
        cells = cells.astype(cells.dtype.categories.dtype)
    if pd.api.types.is_object_dtype(cells):
        return cells.map(_plain_cell).where(cells.notna(), None)
    if pd.api.types.is_string_dtype(cells):
        text = cells.str.strip()
        return text.where(text != "", None)
    return cells


def _plain_cell(cell: object) -> object:
    if isinstance(cell, str):
        return cell.strip() or None
    if cell is None or isinstance(cell, (bool, int, float, np.generic)):
        return cell
    text = str(cell)  # a database's Decimal becomes its digits; a list or date stays text that is no number
    return text if _is_number(text) else f"?{text}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _whole(value: object, known: dict[Hashable, int]) -> int:
    try:
        number = float(value)  # type: ignore[arg-type]  # a cell may be anything; what is no number raises
    except (TypeError, ValueError):
        return TEXT
    if not np.isfinite(number):
        return TEXT
    return known.get(int(number), UNKNOWN) if number.is_integer() else FRACTION


def _word(value: object, known: dict[Hashable, int]) -> int:
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return known.get(str(int(value)), UNKNOWN)  # pandas reads whole numbers with a gap among them as fractions
    return known.get(str(value), UNKNOWN)
