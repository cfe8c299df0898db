"""`parley dashboard`: the coordinator's store in the browser, on this machine only."""

import os
import socket
from importlib.util import find_spec
from pathlib import Path

from coordinator.store import StoreReader, url_in
from federation.errors import ConfigurationError, WhoActs
from parley import terminal

__all__ = ["dashboard"]

_ADDRESS = "127.0.0.1"


def dashboard(home: Path | None, store: str, port: int) -> None:
    """Serves the dashboard until it is interrupted. It reads the store and changes nothing.

    Args:
        home: The folder of this machine's Parley files; its coordinator's store is shown.
        store: Another store's URL, empty for that one.
        port: Port on 127.0.0.1.

    Raises:
        ConfigurationError: Streamlit is not installed, the port is taken, or `store` is no store's URL.
        StorageError: There is no store, or this release cannot read it.
    """
    if find_spec("streamlit") is None or find_spec("plotly") is None:
        raise ConfigurationError(
            "the dashboard needs Streamlit and Plotly, which are not installed",
            fix='pip install "parley-fl[dashboard]"',
            who=WhoActs.YOU,
        )
    url = store or url_in(terminal.home(home).coordinator.folder)
    StoreReader(url).close()
    _require_free(port)
    import dashboard as package
    from dashboard.reading import VARIABLE

    os.environ[VARIABLE] = url
    terminal.console.print(f"Dashboard: http://{_ADDRESS}:{port}  (Ctrl-C ends it)")
    _serve(Path(package.__file__).with_name("app.py"), port)


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_ADDRESS, port))
        except (OSError, OverflowError) as taken:
            raise ConfigurationError(
                f"port {port} of this machine cannot be used: {taken}",
                fix="choose another with --port",
                who=WhoActs.YOU,
            ) from taken


def _serve(script: Path, port: int) -> None:
    from streamlit.web import cli

    options = {
        "server.address": _ADDRESS,
        "server.port": port,
        "server.headless": "true",  # it would ask for an e-mail address, and open a browser where there may be none
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    cli.main(["run", str(script), *arguments], standalone_mode=False)
