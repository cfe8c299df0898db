"""The data sets that a site has registered under a name; the data itself stays where it is."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import pydantic

from federation import files
from federation.errors import DataContractError, StorageError
from federation.job import NAME

__all__ = ["DataSet", "DataSets", "Kind"]

Kind = Literal["csv", "parquet", "sql"]

_ENDINGS: dict[str, Kind] = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".parquet": "parquet", ".pq": "parquet"}


@dataclass(frozen=True, slots=True)
class DataSet:
    """Where a named table lies: a CSV or Parquet file, or a query at a SQLAlchemy URL.

    `location` may hold a password, so it is in no representation; `shown` is what people may read.
    """

    name: str
    kind: Kind
    location: str = field(repr=False)
    query: str = ""

    def __post_init__(self) -> None:
        """Refuses a name or a combination that no data set can have."""
        if re.fullmatch(NAME, self.name) is None:
            raise DataContractError(
                "a data set's name must be 1 to 63 of a-z, 0-9, dot, underscore and hyphen, a letter or digit first",
                fix="choose another name, such as heart or patients-2024",
            )
        if (self.kind == "sql") != bool(self.query.strip()):
            raise DataContractError(
                f"data set {self.name!r}: a database needs a query and a file has none",
                fix='give a URL together with a query such as "SELECT * FROM patients", or a file alone',
            )

    @classmethod
    def of(cls, name: str, location: str, query: str = "") -> DataSet:
        """The data set at `location`: a SQLAlchemy URL, or a file whose ending tells its kind.

        Raises:
            DataContractError: The kind cannot be told, or the query is missing or one too many.
        """
        if "://" in location:
            return cls(name, "sql", location, query)
        path = Path(location).expanduser().absolute()
        kind = _ENDINGS.get(path.suffix.lower())
        if kind is None:
            raise DataContractError(
                f"{path.name!r} is neither a CSV nor a Parquet file by its ending, nor a database URL",
                fix=f"give a file that ends in one of {', '.join(_ENDINGS)}, or a URL such as sqlite:///data.db",
            )
        return cls(name, kind, str(path), query)

    @property
    def shown(self) -> str:
        """The location without password, user or options."""
        if self.kind != "sql":
            return self.location
        scheme, _, rest = self.location.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"

    @property
    def identity(self) -> tuple[int, int]:
        """Modification time (ns) and size of the file, which change when its content does; (0, 0) of a database."""
        if self.kind == "sql":
            return 0, 0
        try:
            facts = Path(self.location).stat()
        except OSError:
            return 0, 0
        return facts.st_mtime_ns, facts.st_size


_STORED = pydantic.TypeAdapter(tuple[DataSet, ...])


class DataSets:
    """The registered data sets, in `datasets.json` of a site's folder, readable by its owner alone.

    Args:
        folder: The site's home; made at the first `add`.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "datasets.json"

    def add(self, dataset: DataSet) -> int:
        """Registers `dataset` durably once it has been read, and returns its number of rows.

        Raises:
            DataContractError: The name is taken, or the data cannot be read.
            StorageError: The folder does not take the file.
        """
        from client.data import readers

        known = self.list()
        if any(other.name == dataset.name for other in known):
            raise DataContractError(
                f"a data set named {dataset.name!r} is registered already",
                fix="choose another name, or remove that one first",
            )
        rows = len(readers.read(dataset))
        self._write((*known, dataset))
        return rows

    def remove(self, name: str) -> None:
        """Forgets `name`; the data stays where it is.

        Raises:
            DataContractError: There is none of that name.
        """
        gone = self.get(name)
        self._write(tuple(dataset for dataset in self.list() if dataset != gone))

    def get(self, name: str) -> DataSet:
        """The data set `name`.

        Raises:
            DataContractError: There is none of that name.
        """
        known = self.list()
        found = next((dataset for dataset in known if dataset.name == name), None)
        if found is None:
            names = ", ".join(dataset.name for dataset in known) or "none is registered yet"
            raise DataContractError(
                f"no data set named {name!r} is registered here (registered: {names})",
                fix=f"run: parley site dataset add {name} PATH",
            )
        return found

    def list(self) -> tuple[DataSet, ...]:
        """All data sets by name.

        Raises:
            StorageError: The file cannot be read or is not what this program wrote.
        """
        try:
            text = self._file.read_bytes()
        except FileNotFoundError:
            return ()
        except OSError as refused:
            raise StorageError(f"cannot read {self._file}: {refused.strerror}", fix="make it readable") from refused
        try:
            return _STORED.validate_json(text, strict=False)
        except (pydantic.ValidationError, DataContractError):
            # the cause is left out: it would show the file's text, which may hold a password
            raise StorageError(
                f"{self._file} is not a list of data sets", fix="move it away and register the data sets anew"
            ) from None

    def _write(self, datasets: tuple[DataSet, ...]) -> None:
        """Replaces the file at once: a reader, or a crash, sees the old list or the new one."""
        text = json.dumps([asdict(dataset) for dataset in sorted(datasets, key=lambda each: each.name)], indent=2)
        files.write(self._file, text.encode() + b"\n", secret=True)
