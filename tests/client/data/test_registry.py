import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from client.data.registry import DataSet, DataSets
from federation.errors import DataContractError, StorageError


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    """A file of two rows."""
    path = tmp_path / "Heart.CSV"
    path.write_text("age,sick\n50,0\n60,1\n")
    return path


def test_a_registered_data_set_is_there_after_a_restart(tmp_path: Path, csv: Path) -> None:
    """Adding reads the data once and tells its rows; another instance knows it; the data stay where they are."""
    dataset = DataSet.of("heart", str(csv))
    assert DataSets(tmp_path / "site").add(dataset) == 2
    again = DataSets(tmp_path / "site")
    assert again.list() == (dataset,)
    assert again.get("heart") == DataSet("heart", "csv", str(csv))
    again.remove("heart")
    assert again.list() == ()
    assert csv.exists()


def test_the_registry_is_readable_by_its_owner_alone_and_whole(tmp_path: Path, csv: Path) -> None:
    """URLs hold passwords; a replaced file leaves no half-written one beside it."""
    DataSets(tmp_path / "site").add(DataSet.of("heart", str(csv)))
    (file,) = (tmp_path / "site").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text())[0]["name"] == "heart"


def test_a_failed_write_leaves_the_old_list(tmp_path: Path, csv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusing changes nothing: a full disk costs the new entry and nothing else."""
    sets = DataSets(tmp_path / "site")
    sets.add(DataSet.of("heart", str(csv)))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot write .*: No space left on device"):
        sets.add(DataSet.of("lungs", str(csv)))
    assert [dataset.name for dataset in sets.list()] == ["heart"]
    assert len(list((tmp_path / "site").iterdir())) == 1


def test_data_that_cannot_be_read_are_not_registered(tmp_path: Path) -> None:
    """The check comes first."""
    sets = DataSets(tmp_path)
    with pytest.raises(DataContractError, match="the file of data set 'heart' is not there"):
        sets.add(DataSet.of("heart", str(tmp_path / "none.csv")))
    assert sets.list() == ()


def test_a_name_is_given_once(tmp_path: Path, csv: Path) -> None:
    """A second data set of one name would make jobs mean another table."""
    sets = DataSets(tmp_path)
    sets.add(DataSet.of("heart", str(csv)))
    with pytest.raises(DataContractError, match="a data set named 'heart' is registered already"):
        sets.add(DataSet.of("heart", str(csv)))


def test_an_unknown_name_is_told_with_those_that_are_known(tmp_path: Path, csv: Path) -> None:
    """The administrator sees what is there and how to add what is not."""
    sets = DataSets(tmp_path)
    with pytest.raises(
        DataContractError, match=r"registered: none is registered yet.*parley site dataset add lungs PATH"
    ):
        sets.get("lungs")
    sets.add(DataSet.of("heart", str(csv)))
    with pytest.raises(DataContractError, match="registered: heart"):
        sets.remove("lungs")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("Heart data", "x.csv"), "a data set's name must be 1 to 63 of a-z"),
        (("heart", "x.xlsx"), "'x.xlsx' is neither a CSV nor a Parquet file by its ending"),
        (("heart", "x.csv", "SELECT 1"), "data set 'heart': a database needs a query and a file has none"),
        (("heart", "sqlite:///x.db"), "data set 'heart': a database needs a query and a file has none"),
    ],
)
def test_what_cannot_be_a_data_set_is_refused(arguments: tuple[str, ...], told: str) -> None:
    """Name, kind, and query are checked before anything is read."""
    with pytest.raises(DataContractError) as refused:
        DataSet.of(*arguments)
    assert told in str(refused.value)
    assert refused.value.fix


@pytest.mark.parametrize("password", ["secret", "se/cret", "se?cret", "se@cret", "se#c:ret"])
def test_a_password_is_in_nothing_that_people_read(password: str) -> None:
    """Neither the representation nor the shown location holds it, however badly it is written into the URL."""
    dataset = DataSet.of("heart", f"postgresql+psycopg://ward:{password}@db.local:5432/heart?x=secret", "SELECT 1")
    assert dataset.shown == "postgresql+psycopg://db.local:5432/heart"
    assert "cret" not in repr(dataset) + str(dataset)


def test_a_damaged_registry_is_refused_without_showing_it(tmp_path: Path) -> None:
    """The file may hold passwords, so its text is in no message."""
    (tmp_path / "datasets.json").write_text('[{"name": "secret"}]')
    with pytest.raises(StorageError, match="is not a list of data sets") as refused:
        DataSets(tmp_path).list()
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_an_unreadable_registry_is_told(tmp_path: Path) -> None:
    """A folder in its place, or missing rights, name the file."""
    (tmp_path / "datasets.json").mkdir()
    with pytest.raises(StorageError, match=r"cannot read .*datasets\.json"):
        DataSets(tmp_path).list()


def test_a_changed_file_has_another_identity(csv: Path) -> None:
    """What the trainer keeps is keyed by it; a database, and a file that is gone, have none."""
    dataset = DataSet.of("heart", str(csv))
    before = dataset.identity
    csv.write_text("age,sick\n50,0\n")
    assert dataset.identity != before
    csv.unlink()
    assert dataset.identity == (0, 0)
    assert DataSet.of("heart", "sqlite://", "SELECT 1").identity == (0, 0)


def test_the_registry_loads_no_pandas() -> None:
    """The agent knows its data sets without paying for pandas or SQLAlchemy."""
    program = "import sys, client.data.registry; print(sorted({'torch', 'pandas', 'sqlalchemy'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
