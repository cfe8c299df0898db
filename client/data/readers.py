"""Reads a registered data set into a table; every way in which that fails names what to do and shows no record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from federation.errors import DataContractError

if TYPE_CHECKING:
    import pandas as pd

    from client.data.registry import DataSet

__all__ = ["read"]

_EMPTY = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "?")
"""What a CSV cell without a value looks like; "None" is not among them, for it is a category often enough."""
_DELIMITERS = ",;\t|"


def read(dataset: DataSet) -> pd.DataFrame:
    """All rows of `dataset`.

    Raises:
        DataContractError: It cannot be read, has no rows, or two columns of one name.
    """
    match dataset.kind:
        case "csv":
            table = _csv(dataset)
        case "parquet":
            table = _parquet(dataset)
        case "sql":
            table = _sql(dataset)
        case _:
            assert_never(dataset.kind)
    if not len(table):
        raise DataContractError(f"data set {dataset.name!r} has no rows", fix="register a table that has records")
    if not table.columns.is_unique:
        raise DataContractError(
            f"data set {dataset.name!r} has two columns of one name", fix="name each column once, in SQL with AS"
        )
    return table.reset_index(drop=True)


def _csv(dataset: DataSet) -> pd.DataFrame:
    import pandas as pd

    path = _file(dataset)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
        delimiter = max(_DELIMITERS, key=header.count)
        return pd.read_csv(
            path, sep=delimiter, encoding="utf-8-sig", keep_default_na=False, na_values=list(_EMPTY), low_memory=False
        )
    except OSError as refused:
        raise _unreadable(dataset, refused) from refused
    except pd.errors.EmptyDataError:
        raise DataContractError(
            f"the file of data set {dataset.name!r} is empty", fix="register a file that has a header and records"
        ) from None
    except UnicodeDecodeError:  # the causes of both are left out: they show what stands in the file
        raise DataContractError(f"the file of data set {dataset.name!r} is not UTF-8", fix="save it as UTF-8") from None
    except (pd.errors.ParserError, ValueError):
        raise DataContractError(
            f"the file of data set {dataset.name!r} is not a CSV table: its lines have different numbers of fields",
            fix="save it as CSV with one header line, and quote text that holds the delimiter",
        ) from None


def _parquet(dataset: DataSet) -> pd.DataFrame:
    import pandas as pd
    import pyarrow as pa

    path = _file(dataset)
    try:
        return pd.read_parquet(path)
    except OSError as refused:
        if refused.errno is None:  # pyarrow's own word for a damaged file
            raise _not_parquet(dataset) from None
        raise _unreadable(dataset, refused) from refused
    except (pa.ArrowException, ValueError):
        raise _not_parquet(dataset) from None


def _sql(dataset: DataSet) -> pd.DataFrame:
    """The query's rows; causes are left out of the errors, for drivers tell passwords and records in theirs."""
    import pandas as pd
    import sqlalchemy as sa

    try:
        engine = sa.create_engine(dataset.location, poolclass=sa.NullPool)
    except sa.exc.NoSuchModuleError:
        raise DataContractError(
            f"the URL of data set {dataset.name!r} names a kind of database that is not known here",
            fix="begin it with postgresql+psycopg://, mysql+pymysql://, mssql+pyodbc:// or sqlite:///",
        ) from None
    except ImportError as missing:
        raise DataContractError(
            f"data set {dataset.name!r} needs the database driver {missing.name!r}, which is not installed",
            fix=f"install it beside Parley: pip install {missing.name}",
        ) from None
    except (sa.exc.SQLAlchemyError, ValueError):
        raise DataContractError(
            f"the URL of data set {dataset.name!r} cannot be read",
            fix="write driver://user:password@host:port/database, with special characters percent-encoded",
        ) from None
    try:
        with engine.connect() as connection:
            try:
                return pd.read_sql_query(sa.text(dataset.query), connection)
            except (pd.errors.DatabaseError, sa.exc.SQLAlchemyError, ValueError) as failed:
                raise DataContractError(
                    f"the database refused the query of data set {dataset.name!r} ({_kind(failed)})",
                    fix="run the query in the database's own client, correct it and register it anew",
                ) from None
    except sa.exc.SQLAlchemyError as failed:
        raise DataContractError(
            f"no connection to the database of data set {dataset.name!r} at {dataset.shown} ({_kind(failed)})",
            fix="check that it runs, that this machine may reach it, and the URL's user and password",
        ) from None
    finally:
        engine.dispose()


def _file(dataset: DataSet) -> Path:
    path = Path(dataset.location)
    if not path.exists():
        raise DataContractError(
            f"the file of data set {dataset.name!r} is not there: {path}", fix="put it back, or register its new place"
        )
    if path.is_dir():
        raise DataContractError(f"data set {dataset.name!r} is a folder: {path}", fix="register the file in it")
    return path


def _unreadable(dataset: DataSet, refused: OSError) -> DataContractError:
    return DataContractError(
        f"the file of data set {dataset.name!r} cannot be read: {refused.strerror}",
        fix="let the user that runs the site's client read it",
    )


def _not_parquet(dataset: DataSet) -> DataContractError:
    return DataContractError(
        f"the file of data set {dataset.name!r} is not a Parquet table", fix="write it anew, or register it as CSV"
    )


def _kind(failed: Exception) -> str:
    """What kind of failure it was, in the driver's word and without its text."""
    inner = failed.__cause__ or failed  # pandas wraps SQLAlchemy's error, which wraps the driver's
    return type(getattr(inner, "orig", None) or inner).__name__
