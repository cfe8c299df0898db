"""The dashboard starts only when it can show something, and says what is missing otherwise."""

import socket
from pathlib import Path

import pytest

from coordinator.store import Store, url_in
from federation.errors import ConfigurationError, StorageError
from parley.commands import dashboard as command
from parley.commands.dashboard import dashboard


def test_a_missing_store_is_refused_by_name(tmp_path: Path) -> None:
    """The refusal names the file that the coordinator of this home would have made."""
    with pytest.raises(StorageError) as refused:
        dashboard(tmp_path, "", 8501)
    assert f"there is no store at {tmp_path / 'coordinator' / 'parley.db'}" in str(refused.value)
    assert "start the coordinator" in str(refused.value)


def test_a_url_goes_before_the_home(tmp_path: Path) -> None:
    """What --store names is opened, and nothing else."""
    with pytest.raises(StorageError, match=r"there is no store at .*/elsewhere/parley.db"):
        dashboard(tmp_path, url_in(tmp_path / "elsewhere"), 8501)


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    """Before Streamlit starts, with the option that helps."""
    Store(url_in(tmp_path)).close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} of this machine cannot be used: .*with --port"):
            dashboard(tmp_path, url_in(tmp_path), port)


def test_an_installation_without_the_dashboard_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamlit and Plotly are an extra of the package; its name is told."""
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "streamlit" else object())
    with pytest.raises(ConfigurationError, match=r'are not installed.*pip install "parley-fl\[dashboard\]"'):
        dashboard(tmp_path, "", 8501)
