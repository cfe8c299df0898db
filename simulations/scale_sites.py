"""Does the coordinator's memory grow with the number of sites? The same job, run by few sites and then by many."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from client.connection import Connection
from federation.messages import JobView, Role
from simulations.bare_site import prepare
from simulations.peers.measure import AnonymousPeaks, Processes
from simulations.peers.parley_side import Deployment, attended, job_text, submitted, watched
from simulations.peers.trial import Size
from simulations.scale_bars import Bar, Tell

__all__ = ["Cohort", "Cohorts", "CohortsMeasured"]

_MODELS = 3.0
"""Models that the largest cohort may cost the coordinator more than the smallest."""
_PROCESSES = 4
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Cohort:
    """What a cohort costs the coordinator.

    Attributes:
        peak_rss_mb: Its largest resident memory, in MiB: also pages of files, which the system may drop.
        peak_anonymous_mb: Its largest anonymous memory, in MiB.
        seconds_per_round: Median wall time of a round; the first does not count.
    """

    peak_rss_mb: float
    peak_anonymous_mb: float
    seconds_per_round: float


@dataclass(frozen=True, slots=True)
class CohortsMeasured:
    """What each cohort costs, by its size, and a model's size in MiB."""

    model_mb: float
    cohorts: Mapping[int, Cohort]

    @property
    def difference_in_models(self) -> float:
        """How much more the largest cohort costs than the smallest."""
        few, many = (self.cohorts[count] for count in (min(self.cohorts), max(self.cohorts)))
        return (many.peak_rss_mb - few.peak_rss_mb) / self.model_mb

    @property
    def plain(self) -> Mapping[str, object]:
        """Figures by the number of sites, and the difference."""
        figures = {str(count): _rounded(cohort) for count, cohort in self.cohorts.items()}
        return figures | {
            "model_mb": round(self.model_mb, 3),
            "difference_in_models": round(self.difference_in_models, 3),
        }

    @property
    def bars(self) -> tuple[Bar, ...]:
        """The difference, in models."""
        few, many = min(self.cohorts), max(self.cohorts)
        what = f"coordinator's peak with {many} sites, above that with {few}"
        return (Bar(what, self.difference_in_models, _MODELS, "models"),)


def _rounded(cohort: Cohort) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(cohort).items()}


@dataclass(frozen=True, slots=True)
class Cohorts:
    """The benchmark: cohorts of these sizes, one after the other, so many rounds each."""

    size: Size
    counts: Sequence[int]
    rounds: int

    @property
    def disk(self) -> int:
        """Each site keeps a model and its update, the coordinator an update of each and a few models."""
        return (3 * max(self.counts) + 6) * 4 * self.size.values

    def measure(self, folder: Path, tell: Tell) -> CohortsMeasured:
        """What each cohort costs."""
        update = folder / "update.npy"
        prepare(update, self.size.values)
        found: dict[int, Cohort] = {}
        for place, count in enumerate(self.counts):

            def told(what: str, share: float, place: int = place) -> None:
                tell(what, (place + share) / len(self.counts))

            below = folder / str(count)
            below.mkdir()
            found[count] = asyncio.run(self._cohort(below, count, update, told))
        return CohortsMeasured(4 * self.size.values / _MIB, found)

    async def _cohort(self, folder: Path, count: int, update: Path, tell: Tell) -> Cohort:
        def seen(view: JobView) -> None:
            ended = sum(bool(each.metrics) for each in view.history)
            tell(f"{count} sites: {ended} of {self.rounds} rounds", ended / self.rounds)

        tell(f"{count} sites: starting", 0.0)
        deployment = Deployment.found(folder)
        with Processes(folder) as processes:
            deployment.serve(processes)
            sites = deployment.sites(count)
            for number in range(min(_PROCESSES, count)):
                deployment.attend(processes, f"sites-{number}", sites[number::_PROCESSES], update)
            async with Connection.opened(deployment.member("operator", Role.OPERATOR).line) as connection:
                await attended(connection, processes, count)
                text = job_text(self.size, rounds=self.rounds, sites=count)
                with AnonymousPeaks(processes, "coordinator") as anonymous:
                    model = np.load(update, mmap_mode="r")
                    job = await submitted(connection, folder, text, self.size, model)
                    await watched(connection, processes, job, seen)
            ends = deployment.ends(job)
            seconds = median(after - before for before, after in pairwise(ends))
            return Cohort(processes.peak_mb("coordinator"), anonymous.mb("coordinator"), seconds)
