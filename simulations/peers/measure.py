"""What one side of a comparison costs: its rounds' wall time, and CPU time and memory of its processes, from /proc."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

import numpy as np

from federation.errors import ConfigurationError, ParleyError, WhoActs

__all__ = ["AnonymousPeaks", "Figures", "Mark", "Processes", "figures", "until"]

_PROC = Path("/proc")
_GRACE = 10.0
"""Seconds that processes have to end by themselves before they are killed."""
_MIB = 1024
_EVERY = 0.05
"""Seconds between two looks at a process's anonymous memory, of which the kernel keeps no peak."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a run: the time, and the CPU seconds that this side and the whole machine have used until then."""

    time: float
    cpu: float
    machine: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What a side's rounds cost in steady state: all but the first round.

    Attributes:
        seconds_per_round: Median wall time of a round.
        cpu_seconds: CPU time of all the side's processes, per round.
        peak_rss_mb: Largest resident memory of the server's process since its start, in MiB.
        slowest_round_seconds: Wall time of the slowest round.
        others_load: CPU seconds per second that everything else on this machine used meanwhile.
        rounds: Rounds that the figures come from.
        values: float32 values in one vector.
        serverapp_peak_rss_mb: Largest resident memory of a second server process, if the side has one.
    """

    seconds_per_round: float
    cpu_seconds: float
    peak_rss_mb: float
    slowest_round_seconds: float
    others_load: float
    rounds: int
    values: int
    serverapp_peak_rss_mb: float | None = None


def figures(
    ends: Sequence[float], marks: Sequence[Mark], *, values: int, peak: float, second_peak: float | None = None
) -> Figures:
    """The figures of a run.

    Args:
        ends: When each round ended; at least two.
        marks: Taken during the run, in order. What was used at a round's end is interpolated between them, so they need
            not coincide with the ends.
        values: Values in one vector.
        peak: The server's peak memory in MiB.
        second_peak: The same of its second process.
    """
    seconds = [after - before for before, after in pairwise(ends)]
    times = [mark.time for mark in marks]
    used, machine = (
        float(np.diff(np.interp((ends[0], ends[-1]), times, spent))[0])
        for spent in ([mark.cpu for mark in marks], [mark.machine for mark in marks])
    )
    return Figures(
        seconds_per_round=median(seconds),
        cpu_seconds=used / len(seconds),
        peak_rss_mb=peak,
        slowest_round_seconds=max(seconds),
        others_load=max(0.0, machine - used) / sum(seconds),
        rounds=len(seconds),
        values=values,
        serverapp_peak_rss_mb=second_peak,
    )


class Processes:
    """The processes of one side, each in a session of its own; all of them are gone when the block ends.

    Whatever they start is measured and ended with them, even in another session, or when its parent has ended.

    Args:
        folder: Where each process's output is kept, as NAME.log.

    Raises:
        ConfigurationError: This system has no /proc to read.
    """

    def __init__(self, folder: Path) -> None:
        if not (_PROC / "self" / "stat").exists():
            raise ConfigurationError(
                "this benchmark reads CPU time and memory from Linux's /proc, which is not here",
                fix="run it on Linux",
                who=WhoActs.YOU,
            )
        self._folder = folder
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._sessions: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(self, name: str, *command: str, environment: Mapping[str, str] | None = None) -> None:
        """Starts a process of this side; `environment` is added to this process's own."""
        with (self._folder / f"{name}.log").open("wb") as log:
            process = self._started[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(environment or {}),
                start_new_session=True,  # Ctrl-C ends the benchmark, which then ends them
            )
        self._sessions.add(process.pid)

    def check(self) -> None:
        """Nothing, while all that were started run.

        Raises:
            ParleyError: One has ended, with the end of its output.
        """
        for name, process in self._started.items():
            if process.poll() is not None:
                raise ParleyError(f"{name} ended with status {process.returncode}:\n{self.tail(name)}")

    def tail(self, name: str) -> str:
        """The last lines that a process has printed."""
        return "\n".join((self._folder / f"{name}.log").read_text(errors="replace").splitlines()[-20:])

    def waited(self, seconds: float, what: str) -> ParleyError:
        """The error that says what did not come within `seconds`, with the last lines of every process."""
        said = "".join(f"\n--- {name}\n{self.tail(name)}" for name in self._started)
        return ParleyError(f"waited {seconds:.0f} s for {what}{said}")

    def mark(self) -> Mark:
        """This moment."""
        return Mark(time.time(), sum(process.cpu for process in self._alive()), _machine_cpu())

    def peak_mb(self, name: str) -> float:
        """The largest resident memory that the process `name` has had, in MiB."""
        return _status_mb(self._started[name].pid, "VmHWM")

    def rss_mb(self, name: str) -> float:
        """The resident memory that the process `name` has now, in MiB."""
        return _status_mb(self._started[name].pid, "VmRSS")

    def anonymous_mb(self, name: str) -> float:
        """Its anonymous memory now, in MiB: what the system cannot drop and read again from a file."""
        return _status_mb(self._started[name].pid, "RssAnon")

    def cpu_of(self, name: str) -> float:
        """CPU seconds that the process `name` has used so far."""
        pid = self._started[name].pid
        return sum(each.cpu for each in _all() if each.pid == pid)

    def peak_mb_of(self, program: str) -> float:
        """The same of the largest process whose command line names `program`; 0 when there is none."""
        named = (each.pid for each in self._alive() if program in _command(each.pid))
        return max((_status_mb(pid, "VmHWM") for pid in named), default=0.0)

    def kill(self, name: str) -> None:
        """Kills the process `name` without a warning; another may be started under its name."""
        process = self._started.pop(name)
        process.kill()
        process.wait()

    def end(self) -> None:
        """Ends all of them, the last started first, and whatever they have started."""
        alive = self._alive()  # also finds those in other sessions while their parents can still be seen
        for process in reversed(self._started.values()):
            process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + _GRACE
        while time.monotonic() < limit and any(each.running for each in alive):
            time.sleep(0.02)
            for process in self._started.values():
                process.poll()
            alive = self._alive()
        for left in alive:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(left.pid, signal.SIGKILL)
        for process in self._started.values():
            process.wait()
        self._started.clear()

    def _alive(self) -> list["_Process"]:
        """The processes of the sessions known, and all that descend from them; their sessions are known from now on."""
        table, found = list(_all()), 0
        while True:
            ours = {each.pid for each in table if each.session in self._sessions}
            family = [each for each in table if each.pid in ours or each.parent in ours]
            self._sessions.update(each.session for each in family)
            if len(family) == found:
                return family
            found = len(family)


class AnonymousPeaks:
    """The largest anonymous memory that processes have, from the block's start to its end, looked at every 50 ms.

    Args:
        processes: The side that they belong to.
        names: Whom to look at.
    """

    def __init__(self, processes: Processes, *names: str) -> None:
        self._processes = processes
        self._peaks = {name: processes.anonymous_mb(name) for name in names}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def mb(self, name: str) -> float:
        """The largest so far, in MiB."""
        return self._peaks[name]

    def _look(self) -> None:
        while not self._ended.wait(_EVERY):
            for name, peak in self._peaks.items():
                self._peaks[name] = max(peak, self._processes.anonymous_mb(name))


def until(holds: Callable[[], bool], processes: Processes, what: str, *, patience: float, every: float = 0.02) -> None:
    """Returns when `holds` does.

    Raises:
        ParleyError: It did not within `patience` seconds, or one of the processes ended.
    """
    limit = time.monotonic() + patience
    while not holds():
        processes.check()
        if time.monotonic() > limit:
            raise processes.waited(patience, what)
        time.sleep(every)


@dataclass(frozen=True, slots=True)
class _Process:
    """A line of the process table; `cpu` counts its ended children that it has waited for, in seconds."""

    pid: int
    parent: int
    session: int
    cpu: float
    running: bool


def _all() -> Iterator[_Process]:
    """Every process of this machine, those included that have ended and that nobody has waited for."""
    tick = os.sysconf("SC_CLK_TCK")
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since the folder was listed
        # proc(5): "pid (name) state ppid pgrp session ...": a name may hold blanks and brackets
        fields = text.rpartition(")")[2].split()
        spent = sum(int(ticks) for ticks in fields[11:15])
        yield _Process(int(entry.name), int(fields[1]), int(fields[3]), spent / tick, fields[0] not in "ZX")


def _machine_cpu() -> float:
    """CPU seconds that this machine has spent on anything since its start; guests are in user time already."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    ticks = dict(zip(names, map(int, (_PROC / "stat").read_text().split()[1:9]), strict=True))
    return sum(spent for name, spent in ticks.items() if name not in {"idle", "iowait"}) / os.sysconf("SC_CLK_TCK")


def _status_mb(pid: int, field: str) -> float:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / _MIB for line in lines if line.startswith(f"{field}:")), 0.0)


def _command(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "cmdline").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
