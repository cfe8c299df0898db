"""Flower's side: its own deployment, as its manual starts it, on this machine alone and without TLS."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from federation.errors import ConfigurationError, ParleyError, WhoActs
from simulations.peers.measure import Figures, Mark, Processes, figures, until
from simulations.peers.trial import Trial, free_port, progress

__all__ = ["measure", "require"]

_APP = Path(__file__).parent / "flower_app"
_START = 60.0
_ROUND = 600.0
"""Seconds that one round may take."""


def require() -> None:
    """Nothing, where Flower is installed.

    Raises:
        ConfigurationError: It is not.
    """
    if importlib.util.find_spec("flwr") is None:
        raise ConfigurationError(
            "Flower is not installed here", fix="pip install 'parley-fl[flower]', or --only parley", who=WhoActs.YOU
        )


def measure(trial: Trial) -> Figures:
    """What Flower's rounds cost: training messages both ways; its evaluation is off.

    Raises:
        ParleyError: A process ended, or a round took too long.
    """
    environment = _environment(trial.folder)
    port = free_port()
    _connect(Path(environment["FLWR_HOME"]), port)
    with Processes(trial.folder) as processes:
        _start(trial, processes, environment, port)
        _submit(trial, environment)
        marks, second = _watch(trial, processes)
        peak = processes.peak_mb("superlink")
    ends = [mark.time for mark in marks]
    return figures(ends, marks, values=trial.size.values, peak=peak, second_peak=second)


def _environment(folder: Path) -> dict[str, str]:
    """Flower's home in `folder`, its telemetry and update check off, and its programs found first."""
    return {
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.pathsep.join((str(_programs()), os.environ.get("PATH", ""))),
    }


def _programs() -> Path:
    return Path(sys.executable).parent


def _connect(home: Path, port: int) -> None:
    """Writes the file in which `flwr run` looks the SuperLink up by name."""
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )


def _start(trial: Trial, processes: Processes, environment: dict[str, str], port: int) -> None:
    """Starts the SuperLink on `port` and, once it listens, a SuperNode for each update."""
    link = ("--insecure", "--port", str(port), "--disable-runtime-dependency-installation")
    processes.start("superlink", str(_programs() / "flower-superlink"), *link, environment=environment)
    until(lambda: _listens(port), processes, "Flower's SuperLink to listen", patience=_START)
    for number, update in enumerate(trial.updates):
        node = ("--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port()))
        config = ("--node-config", f"vector={json.dumps(str(update))}")
        program = str(_programs() / "flower-supernode")
        processes.start(f"supernode-{number}", program, *node, *config, environment=environment)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _submit(trial: Trial, environment: dict[str, str]) -> None:
    """Hands the app to the SuperLink."""
    settings = {
        "rounds": trial.rounds,
        "sites": len(trial.updates),
        "model": str(trial.model),
        "ends": str(_ends_file(trial)),
    }
    overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    run = [str(_programs() / "flwr"), "run", str(_APP), "here", "--run-config", overrides]
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=os.environ | environment)
    if done.returncode != 0:
        raise ParleyError(f"flwr run failed:\n{done.stdout}{done.stderr}")


def _ends_file(trial: Trial) -> Path:
    return trial.folder / "ends.txt"


def _watch(trial: Trial, processes: Processes) -> tuple[list[Mark], float]:
    """A mark at each round's end, and the peak memory of the ServerApp's process in MiB."""
    file = _ends_file(trial)
    marks: list[Mark] = []
    peak = 0.0
    for number in range(trial.rounds + 1):  # the first line says that the run begins

        def told(lines: int = number + 1) -> bool:
            return file.exists() and len(file.read_text().splitlines()) >= lines

        until(told, processes, f"round {number} of Flower's run", patience=_ROUND)
        if number > 0:
            marks.append(processes.mark())
            peak = max(peak, processes.peak_mb_of("flwr-serverapp"))
        progress(f"flower {trial.size.name}: {number} of {trial.rounds} rounds")
    return marks, peak
