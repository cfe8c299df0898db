"""A plug-in is one file in its room, found by its name."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import strategies
from federation import plugins
from federation.errors import ConfigurationError, WhoActs


@pytest.fixture(autouse=True)
def _fresh_names() -> Iterator[None]:
    """No test sees another's plug-ins."""
    plugins.names.cache_clear()
    yield
    plugins.names.cache_clear()


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is part of the room `strategies` for the test."""
    monkeypatch.setattr(strategies, "__path__", [*strategies.__path__, str(tmp_path)])
    return tmp_path


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("tasks", {"tabular"}),
        ("tasks.models", {"logistic_regression", "mlp"}),
        ("strategies", {"fedadagrad", "fedadam", "fedavg", "fedavgm", "fedprox", "fedyogi"}),
    ],
)
def test_a_room_has_its_plug_ins_sorted_and_nothing_else(name: str, known: set[str]) -> None:
    """Interfaces, shared files and rooms within the room are no plug-ins."""
    found = plugins.names(name)
    assert known <= set(found)
    assert list(found) == sorted(found)
    assert not {"task", "models", "partition", "model", "strategy", "moments"} & set(found)
    assert not [each for each in found if each.startswith("_")]


def test_a_new_file_is_a_new_plug_in(room: Path) -> None:
    """Nothing but the file is needed."""
    (room / "fedtest.py").write_text("ANSWER = 42\n")
    importlib.invalidate_caches()
    assert "fedtest" in plugins.names("strategies")
    assert plugins.load("strategies", "fedtest").ANSWER == 42


def test_a_file_with_an_underscore_is_no_plug_in(room: Path) -> None:
    """Plug-ins may share files that are none."""
    (room / "_shared.py").write_text("")
    importlib.invalidate_caches()
    assert "_shared" not in plugins.names("strategies")


def test_an_unknown_name_is_refused_with_the_nearest_and_all_names() -> None:
    """The job's author is told what there is."""
    with pytest.raises(ConfigurationError) as refused:
        plugins.load("strategies", "fedavgg")
    assert refused.value.who is WhoActs.AUTHOR
    assert "there is no strategies plug-in named 'fedavgg'" in str(refused.value)
    assert "did you mean 'fedavg'" in str(refused.value)
    assert ", ".join(plugins.names("strategies")) in str(refused.value)


@pytest.mark.parametrize("name", ["os", "strategy", "fedavg.Settings", "..tasks", ""])
def test_no_other_module_is_ever_imported(name: str) -> None:
    """A name in a job file cannot reach beyond the room's plug-ins."""
    with pytest.raises(ConfigurationError, match="there is no strategies plug-in named"):
        plugins.load("strategies", name)
