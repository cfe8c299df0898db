"""`parley model get` and `parley predict`, as far as they need no coordinator."""

from pathlib import Path

import pytest

from federation.errors import ConfigurationError, StorageError, UnreachableError
from tests.parley.commands.calls import refused
from tests.parley.commands.conftest import Founded


def test_a_folder_that_holds_something_is_refused_before_anything_is_fetched(complete: Founded, tmp_path: Path) -> None:
    """What is there stays; an empty folder is taken, and then the coordinator is asked."""
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    error = refused("model", "get", "x", "--to", full, "--home", complete.admin)
    assert isinstance(error, ConfigurationError)
    assert str(error) == f"{full} is there already and not empty. To fix (you): name another folder with --to"
    assert [file.name for file in full.iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    error = refused("model", "get", "x", "--to", tmp_path / "empty", "--home", complete.admin)
    assert isinstance(error, UnreachableError)


def test_data_that_are_not_there_are_told_to_you(tmp_path: Path) -> None:
    """It is your file, not a site's."""
    error = refused("predict", tmp_path, tmp_path / "new.csv")
    assert isinstance(error, ConfigurationError)
    assert str(error).startswith(f"there is no file {tmp_path / 'new.csv'}. To fix (you): name a CSV or Parquet file")


@pytest.mark.parametrize("made", [True, False])
def test_a_folder_without_a_model_is_told(tmp_path: Path, made: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """With what a model's folder holds."""
    data = tmp_path / "new.csv"
    data.write_text("age\n41\n")
    folder = tmp_path / "model"
    if made:
        folder.mkdir()
    error = refused("predict", folder, data)
    assert isinstance(error, StorageError)
    assert "model.safetensors and card.json" in error.fix
