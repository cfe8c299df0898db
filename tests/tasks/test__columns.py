import datetime as dt
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from federation.job import CategoricalColumn, NumericColumn
from tasks import _columns
from tasks._columns import FRACTION, MISSING, TEXT, UNKNOWN

nan = float("nan")


@pytest.mark.parametrize(
    ("cells", "values", "wrong"),
    [
        (pd.Series([1, 2, None]), [1, 2, nan], [0, 0, 0]),
        (pd.Series(["1.5", " ", "x", None]), [1.5, nan, nan, nan], [0, 0, 1, 0]),
        (pd.Series([True, None, False], dtype=object), [1, nan, 0], [0, 0, 0]),
        (pd.Series([1, None], dtype="Int64"), [1, nan], [0, 0]),
        (pd.Series([Decimal("1.5"), None], dtype=object), [1.5, nan], [0, 0]),
        (pd.Series([[1], pd.NaT, pd.NA, "3"], dtype=object), [nan, nan, nan, 3], [1, 0, 0, 0]),
        (pd.Series([dt.date(2020, 1, 1)], dtype=object), [nan], [1]),
        (pd.Series([pd.Timestamp(2020, 1, 1), pd.NaT]), [nan, nan], [1, 0]),
        (pd.Series([1, 2], dtype="category"), [1, 2], [0, 0]),
        (pd.Series([], dtype=object), [], []),
    ],
)
def test_cells_of_any_kind_are_numbers_missing_or_wrong(
    cells: pd.Series, values: list[float], wrong: list[int]
) -> None:
    """A number may be written as text; blank is missing; dates, lists and words are no numbers."""
    found, flagged = _columns.numbers(cells)
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(flagged, np.array(wrong, dtype=bool))


def test_an_impossible_zero_is_missing_where_the_contract_says_so() -> None:
    """A zero is a value unless it means not measured."""
    np.testing.assert_array_equal(_columns.numbers(pd.Series([0, 1]))[0], [0, 1])
    np.testing.assert_array_equal(_columns.numbers(pd.Series([0, 1]), zero_is_missing=True)[0], [nan, 1])


@pytest.mark.parametrize(
    ("cells", "categories", "codes"),
    [
        (pd.Series([1.0, 3.0, nan, 2.5, 7]), (3, 1), [1, 0, MISSING, FRACTION, UNKNOWN]),
        (pd.Series(["1", " 3 ", "", "word", "inf"]), (3, 1), [1, 0, MISSING, TEXT, TEXT]),
        (pd.Series([True, False]), (0, 1), [1, 0]),
        (pd.Series(["a", " b", "c", " "]), ("a", "b"), [0, 1, UNKNOWN, MISSING]),
        (pd.Series([1.0, nan, 2.0]), ("1", "2"), [0, MISSING, 1]),
        (pd.Series([True, None], dtype=object), ("True", "False"), [0, MISSING]),
        (pd.Series(["a", None], dtype="category"), ("a", "b"), [0, MISSING]),
    ],
)
def test_cells_become_the_place_of_their_category(
    cells: pd.Series, categories: tuple[str, ...] | tuple[int, ...], codes: list[int]
) -> None:
    """Whole-number categories match numbers however they are written; anything else is told apart."""
    assert list(_columns.codes(cells, categories)) == codes


def number(**settings: object) -> NumericColumn:
    """A numeric column named x."""
    return NumericColumn.model_validate(
        {"name": "x", "kind": "numeric", "range": (0.0, 10.0), "unit": "mm", **settings}
    )


def findings(cells: list[object], column: NumericColumn | CategoricalColumn, *, complete: bool = False) -> list[str]:
    """What is found of a column x with these cells, in words."""
    return [str(f) for f in _columns.inspect_column(pd.DataFrame({"x": cells}), column, complete=complete)]


def test_values_outside_the_public_range_are_counted_and_not_shown() -> None:
    """The finding holds the contract's bounds and a count; a small count is not told."""
    (found,) = findings([11.25] * 7 + [5.0], number())
    assert found == (
        "data.columns.x: 7 rows lie outside the public range 0 to 10 mm; "
        "correct the values or their unit, or ask the job's author for a wider range"
    )
    assert "fewer than 5 rows lie outside" in findings([11.25, 5.0], number())[0]


def test_text_where_numbers_are_asked_is_told() -> None:
    """Words in a numeric column are counted, and are not told as missing too."""
    (found,) = findings(["5 mm", "6"], number())
    assert "fewer than 5 rows hold something else where numbers are asked; write numbers with a decimal point" in found


def test_missing_values_are_told_only_where_they_are_refused() -> None:
    """Dropping a row is fine for training and refused for prediction."""
    assert "fewer than 5 rows have no value; complete or remove those rows" in findings([None, 1.0], number())[0]
    assert findings([None, 1.0], number(missing=3.0)) == []
    assert findings([None, 1.0], number(missing="drop_row")) == []
    assert len(findings([None, 1.0], number(missing="drop_row"), complete=True)) == 1


def test_unknown_categories_are_told_without_the_value() -> None:
    """The contract's categories are public; what stands in the cell is not."""
    column = CategoricalColumn(name="x", kind="categorical", categories=("a", "b"))
    (found,) = findings(["zebra", "a"], column)
    assert "hold none of the contract's values; use one of a, b" in found
    assert "zebra" not in found


def test_fractions_and_text_where_whole_numbers_name_categories_are_told() -> None:
    """Each kind of wrong cell has its own words."""
    column = CategoricalColumn(name="x", kind="categorical", categories=(0, 1))
    assert "hold fractions where whole numbers are asked" in findings([0.5, 1.0], column)[0]
    assert "hold something else where whole numbers are asked" in findings(["no", "1"], column)[0]


def test_many_categories_are_told_in_part() -> None:
    """A list of thousands is not a message."""
    assert _columns.categories_read(tuple(range(100))) == "one of 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"


def test_a_missing_column_is_told_with_the_nearest_name() -> None:
    """A column that is there under a similar name is named."""
    table = pd.DataFrame({"Cholesterol": [1], "age": [2]})
    found = _columns.absent(table, "cholesterl", "data.columns.cholesterl")
    assert str(found) == ("data.columns.cholesterl: the data has no column 'cholesterl'; rename 'Cholesterol' to it")
    assert _columns.absent(table, "age", "data.columns.age") is None


def test_a_file_without_a_header_shows_none_of_its_first_record() -> None:
    """Where a record stands as the names, no name is shown."""
    found = _columns.absent(pd.DataFrame({"63": [1], "anginal": [2]}), "angina", "data.columns.angina")
    assert (
        str(found) == "data.columns.angina: the data has no column 'angina'; name the columns in the data's first line"
    )
