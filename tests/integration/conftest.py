"""What the integration tests share: one consortium of real processes, started once."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.integration.alliance import SITES, Alliance, patients


@pytest.fixture(scope="session")
def alliance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alliance]:
    """A coordinator and three sites that attend: one with CSV, one with Parquet and gaps, one with a database."""
    alliance = Alliance(tmp_path_factory.mktemp("alliance"))
    try:
        alliance.found()
        alliance.enrol(*SITES)
        csv = alliance.folder / "athens.csv"
        table = patients(1)
        table.to_csv(csv, index=False)
        alliance.gives("athens", table, str(csv))

        parquet = alliance.folder / "berlin.parquet"
        table = patients(2)
        table.loc[::10, "pressure"] = None
        table.to_parquet(parquet)
        alliance.gives("berlin", table, str(parquet))

        database = alliance.folder / "cork.db"
        table = patients(3)
        with closing(sqlite3.connect(database)) as connection:
            table.to_sql("admissions", connection, index=False)
        alliance.gives("cork", table, f"sqlite:///{database}", "--query", "SELECT * FROM admissions")

        for name in SITES:
            alliance.attends(name)
        yield alliance
    finally:
        alliance.end()
