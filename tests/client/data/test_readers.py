import sqlite3
from pathlib import Path

import pandas as pd
import pytest

from client.data import readers
from client.data.registry import DataSet
from federation.errors import DataContractError

TABLE = pd.DataFrame({"age": [50.0, 60.5], "pain": ["none", "typical"]})


def refused(dataset: DataSet) -> DataContractError:
    """The error of reading `dataset`; it names a way out and drags no foreign text along."""
    with pytest.raises(DataContractError) as caught:
        readers.read(dataset)
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_csv_file_is_read_whatever_its_delimiter(tmp_path: Path, delimiter: str) -> None:
    """The header tells the delimiter; a byte-order mark, as spreadsheets write it, is no part of a name."""
    path = tmp_path / "x.csv"
    TABLE.to_csv(path, sep=delimiter, index=False, encoding="utf-8-sig")
    pd.testing.assert_frame_equal(readers.read(DataSet.of("x", str(path))), TABLE)


def test_empty_cells_are_missing_and_words_are_not(tmp_path: Path) -> None:
    """`None` is a category often enough; NA, NaN, null and a question mark are not measured."""
    path = tmp_path / "x.csv"
    path.write_text("pain,age\nNone,NA\n,?\nNA,null\n")
    table = readers.read(DataSet.of("x", str(path)))
    assert list(table["pain"].isna()) == [False, True, True]
    assert table["age"].isna().all()


def test_a_parquet_file_is_read(tmp_path: Path) -> None:
    """Types come from the file."""
    path = tmp_path / "x.parquet"
    TABLE.to_parquet(path)
    pd.testing.assert_frame_equal(readers.read(DataSet.of("x", str(path))), TABLE)


@pytest.fixture
def database(tmp_path: Path) -> str:
    """The URL of a database that holds the table."""
    path = tmp_path / "x.db"
    connection = sqlite3.connect(path)
    TABLE.to_sql("patients", connection, index=False)
    connection.close()
    return f"sqlite:///{path}"


def test_a_query_is_read_from_a_database(database: str) -> None:
    """Any SQLAlchemy URL with a query is a table."""
    table = readers.read(DataSet.of("x", database, "SELECT age, pain FROM patients ORDER BY age"))
    pd.testing.assert_frame_equal(table, TABLE)


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    """The path is the administrator's own and is shown."""
    assert f"is not there: {tmp_path / 'x.csv'}" in str(refused(DataSet.of("x", str(tmp_path / "x.csv"))))
    (tmp_path / "y.csv").mkdir()
    assert "is a folder" in str(refused(DataSet.of("y", str(tmp_path / "y.csv"))))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_file_that_may_not_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """The system's own words say why."""
    path = tmp_path / f"x.{ending}"
    path.write_text("age\n1\n")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pd, "read_parquet" if ending == "parquet" else "read_csv", denied)
    assert "cannot be read: Permission denied" in str(refused(DataSet.of("x", str(path))))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (b"age,pain\n", "has no rows"),
        (b"age,pain\n1,caf\xe9\n", "is not UTF-8"),
        (b"age,pain\n1,2\n1,2,Meyer\n", "its lines have different numbers of fields"),
    ],
)
def test_a_csv_file_that_holds_no_table_is_refused_without_its_text(tmp_path: Path, content: bytes, told: str) -> None:
    """Each fault has its own words, and none of the file's."""
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    error = refused(DataSet.of("x", str(path)))
    assert told in str(error)
    assert "Meyer" not in str(error)
    assert error.__cause__ is None


@pytest.mark.parametrize("content", [b"", b"no parquet", b"PAR1" + bytes(40) + b"PAR1"])
def test_a_damaged_parquet_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """An empty, foreign or damaged file is no Parquet table."""
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    assert "is not a Parquet table" in str(refused(DataSet.of("x", str(path))))


def test_a_failing_query_is_told_without_its_text(database: str) -> None:
    """The driver's kind of error is shown; its text could hold a record."""
    error = refused(DataSet.of("x", database, "SELECT secret FROM patients"))
    assert "the database refused the query of data set 'x' (OperationalError)" in str(error)
    assert "secret" not in str(error)
    assert error.__cause__ is None


def test_a_query_that_gives_one_name_twice_is_refused(database: str) -> None:
    """A column's name must mean one column."""
    error = refused(DataSet.of("x", database, "SELECT age, age FROM patients"))
    assert "has two columns of one name" in str(error)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nosuch://ward:secret@host/db", "names a kind of database that is not known here"),
        ("postgresql://ward:secret@host:notaport/db", "the URL of data set 'x' cannot be read"),
        ("mssql+pymssql://ward:secret@host/db", "needs the database driver 'pymssql', which is not installed"),
        (
            "postgresql+psycopg://ward:secret@127.0.0.1:1/db",
            "no connection to the database of data set 'x' at postgres",
        ),
    ],
)
def test_a_database_that_cannot_be_reached_is_told_without_the_password(url: str, told: str) -> None:
    """A wrong URL, a missing driver and a silent host each have their own words."""
    error = refused(DataSet.of("x", url, "SELECT 1"))
    assert told in str(error)
    assert "secret" not in str(error)
    assert error.__cause__ is None
