"""What do many attending sites cost the coordinator, and how soon are all of them back when it was killed?"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from client.connection import Connection
from federation.messages import Role
from simulations.bare_site import Membership, prepare
from simulations.peers.measure import Processes
from simulations.peers.parley_side import Deployment, attended
from simulations.scale_bars import Bar, Tell

__all__ = ["Attending", "AttendingMeasured"]

_MEMORY_MIB = 300.0
_SHARE = 20.0
_WAVE_SECONDS = 30.0
_PROCESSES = 4
_VALUES = 9
"""Values in a vector that nobody asks for."""


@dataclass(frozen=True, slots=True)
class AttendingMeasured:
    """What the sites cost the coordinator.

    Attributes:
        sites: How many attended, each with its own identity and stream.
        rss_mb: The coordinator's resident memory at the end of the idle time, in MiB.
        peak_rss_mb: Its largest, before or after it was killed.
        core_percent: Share of a core that it used while nothing happened but heartbeats.
        idle_seconds: For so long.
        restart_seconds: From the kill of the coordinator to the first answer of the next one.
        reconnect_seconds: From the kill to the moment at which all sites attend again.
    """

    sites: int
    rss_mb: float
    peak_rss_mb: float
    core_percent: float
    idle_seconds: float
    restart_seconds: float
    reconnect_seconds: float

    @property
    def plain(self) -> Mapping[str, object]:
        """All of it."""
        return {name: round(value, 3) for name, value in asdict(self).items()}

    @property
    def bars(self) -> tuple[Bar, ...]:
        """Memory, idle CPU time, and the wave of reconnects."""
        return (
            Bar(f"coordinator's peak memory with {self.sites} sites", self.peak_rss_mb, _MEMORY_MIB, "MiB"),
            Bar("coordinator's share of a core when idle", self.core_percent, _SHARE, "%"),
            Bar(f"kill of the coordinator until all {self.sites} attend", self.reconnect_seconds, _WAVE_SECONDS, "s"),
        )


@dataclass(frozen=True, slots=True)
class Attending:
    """The benchmark: so many sites, left alone for so many seconds, and then cut off all at once."""

    sites: int
    idle_seconds: float

    @property
    def disk(self) -> int:
        """A few small files for each site."""
        return (self.sites + 1) * 100_000

    def measure(self, folder: Path, tell: Tell) -> AttendingMeasured:
        """What they cost."""
        tell("signing sites", 0.0)
        prepare(folder / "update.npy", _VALUES)
        return asyncio.run(self._measured(folder, tell))

    async def _measured(self, folder: Path, tell: Tell) -> AttendingMeasured:
        deployment = Deployment.found(folder)
        sites, operator = deployment.sites(self.sites), deployment.member("operator", Role.OPERATOR)
        with Processes(folder) as processes:
            deployment.serve(processes)
            for number in range(min(_PROCESSES, self.sites)):
                deployment.attend(processes, f"sites-{number}", sites[number::_PROCESSES], folder / "update.npy")
            await self._arrived(processes, operator, partial(self._count, tell, 0.1))
            core, idle = await _idle(processes, self.idle_seconds, tell)
            rss, peak = processes.rss_mb("coordinator"), processes.peak_mb("coordinator")
            begun = time.monotonic()
            processes.kill("coordinator")
            deployment.serve(processes)
            first: list[float] = []

            def back(here: int) -> None:
                first.append(time.monotonic() - begun)
                self._count(tell, 0.7, here)

            await self._arrived(processes, operator, back)
            seconds = time.monotonic() - begun
            peak = max(peak, processes.peak_mb("coordinator"))
        return AttendingMeasured(self.sites, rss, peak, core, idle, first[0], seconds)

    def _count(self, tell: Tell, share: float, here: int) -> None:
        tell(f"{here} of {self.sites} sites attend", share + 0.3 * here / self.sites)

    async def _arrived(self, processes: Processes, operator: Membership, seen: Callable[[int], None]) -> None:
        async with Connection.opened(operator.line) as connection:
            await attended(connection, processes, self.sites, seen)


async def _idle(processes: Processes, seconds: float, tell: Tell) -> tuple[float, float]:
    """The coordinator's share of a core, in percent, and for how many seconds it was looked at."""
    tell(f"idle for {seconds:.0f} s", 0.4)
    used, begun = processes.cpu_of("coordinator"), time.monotonic()
    await asyncio.sleep(seconds)
    processes.check()
    looked = time.monotonic() - begun
    return 100 * (processes.cpu_of("coordinator") - used) / looked, looked
