"""Does a large vector ever lie whole in memory? It goes from sites to the coordinator and comes back, in one round."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isqrt
from pathlib import Path

import numpy as np

from client.connection import Connection
from federation.messages import JobView, Role
from simulations.bare_site import prepare
from simulations.peers.measure import AnonymousPeaks, Processes
from simulations.peers.parley_side import Deployment, attended, job_text, submitted, watched
from simulations.peers.trial import Size
from simulations.scale_bars import Bar, Tell

__all__ = ["Vector", "VectorMeasured"]

_MIB = 2**20
_MOST = 1.15
"""Vectors' worth of anonymous memory that either side may take above its idle process."""
_JOURNEYS = 3
"""Times that a round moves the vector for each site: the model, the update, and the next model to evaluate."""


@dataclass(frozen=True, slots=True)
class VectorMeasured:
    """What the vector costs.

    Attributes:
        vector_mb: Its size in MiB.
        sites: Sites that send and take it, each in a process of its own.
        coordinator_idle_mb: Anonymous memory of the coordinator before the job, in MiB.
        coordinator_above_idle_mb: What it took above that at its peak.
        site_idle_mb: The same of a site's process before the job: of the site that took most.
        site_above_idle_mb: What that one took above that.
        seconds: From the submission of the initial model to the end of the round.
    """

    vector_mb: float
    sites: int
    coordinator_idle_mb: float
    coordinator_above_idle_mb: float
    site_idle_mb: float
    site_above_idle_mb: float
    seconds: float

    @property
    def plain(self) -> Mapping[str, object]:
        """All of it."""
        return {name: round(value, 3) for name, value in asdict(self).items()}

    @property
    def bars(self) -> tuple[Bar, ...]:
        """Either side's anonymous memory."""
        limit = round(_MOST * self.vector_mb, 1)
        return (
            Bar("coordinator's anonymous memory above idle", self.coordinator_above_idle_mb, limit, "MiB"),
            Bar("a site's anonymous memory above idle", self.site_above_idle_mb, limit, "MiB"),
        )


@dataclass(frozen=True, slots=True)
class Vector:
    """The benchmark: a float32 vector of at least so many million bytes, and so many sites."""

    megabytes: int
    sites: int

    @property
    def size(self) -> Size:
        """The smallest square model that is no smaller than was asked for."""
        return Size(f"{self.megabytes} million bytes", isqrt(self.megabytes * 250_000 + 2) + 1)

    @property
    def disk(self) -> int:
        """Each site keeps a model and its update, the coordinator an update of each and a few models."""
        return (3 * self.sites + 6) * 4 * self.size.values

    def measure(self, folder: Path, tell: Tell) -> VectorMeasured:
        """What it costs."""
        tell(f"writing a vector of {self.megabytes} MB", 0.0)
        update = folder / "update.npy"
        prepare(update, self.size.values)
        return asyncio.run(self._measured(folder, update, tell))

    async def _measured(self, folder: Path, update: Path, tell: Tell) -> VectorMeasured:
        journeys = _JOURNEYS * self.sites * 4 * self.size.values

        def seen(view: JobView) -> None:
            moved = sum(site.bytes for site in view.sites)
            tell(f"{moved / 1e6:.0f} of {journeys / 1e6:.0f} MB moved", min(1.0, moved / journeys))

        deployment = Deployment.found(folder)
        with Processes(folder) as processes:
            tell("starting", 0.0)
            deployment.serve(processes)
            for site in deployment.sites(self.sites):
                deployment.attend(processes, site.name, (site,), update)
            async with Connection.opened(deployment.member("operator", Role.OPERATOR).line) as connection:
                await attended(connection, processes, self.sites)
                names = ("coordinator", *(f"site-{number}" for number in range(self.sites)))
                idle = {name: processes.anonymous_mb(name) for name in names}
                with AnonymousPeaks(processes, *names) as peaks:
                    begun = time.monotonic()
                    text = job_text(self.size, rounds=1, sites=self.sites)
                    tell("submitting the initial model", 0.0)
                    job = await submitted(connection, folder, text, self.size, np.load(update, mmap_mode="r"))
                    await watched(connection, processes, job, seen)
                    seconds = time.monotonic() - begun
        above = {name: peaks.mb(name) - idle[name] for name in names}
        worst = max(names[1:], key=above.__getitem__)
        return VectorMeasured(
            vector_mb=4 * self.size.values / _MIB,
            sites=self.sites,
            coordinator_idle_mb=idle["coordinator"],
            coordinator_above_idle_mb=above["coordinator"],
            site_idle_mb=idle[worst],
            site_above_idle_mb=above[worst],
            seconds=seconds,
        )
