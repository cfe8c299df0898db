"""What a round of secure aggregation is measured on, and what it costs: the same vectors, and CPU time by party."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federation.errors import ParleyError, WhoActs

__all__ = ["COORDINATOR", "TRANSPORT", "Cost", "Meter", "Updates"]

COORDINATOR = -1
"""The coordinator's number among the parties; a site's is its index."""

TRANSPORT = -2
"""Whatever carries messages and vectors, at either end; a party of its own, since neither side's is its protocol."""

_NORM = 0.9
"""L2 norm of an update, about: neither side clips it."""
_EXACT = 1e-5
"""By how much a mean may be off: above the coarser side's quantisation of 2^22 steps from -8 to 8."""

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Updates:
    """The vectors that all sides sum, made anew whenever they are asked for, always the same.

    Attributes:
        sites: How many sites have one each; all weigh the same.
        parameters: Values of a vector.
    """

    sites: int
    parameters: int

    @property
    def missing(self) -> range:
        """The sites that drop out, where sites do: a tenth, and at least one."""
        return range(max(1, self.sites // 10))

    def of(self, idx: int) -> F32:
        """The update of a site [parameters]."""
        scale = np.float32(_NORM / np.sqrt(self.parameters))
        return scale * np.random.default_rng(idx).standard_normal(self.parameters, dtype=np.float32)

    def check(self, side: str, mean: npt.NDArray[np.floating], members: Collection[int]) -> None:
        """Accepts the mean of the members' updates.

        Raises:
            ParleyError: It is another vector: what was measured is no aggregation.
        """
        expected: F64 = np.zeros(self.parameters)
        for idx in members:
            expected += self.of(idx)
        off = float(np.abs(mean - expected / len(members)).max()) if mean.shape == expected.shape else np.inf
        if not off <= _EXACT:
            raise ParleyError(
                f"{side}'s sum over {len(members)} sites is off by {off:.3g}: its figures would mean nothing",
                fix="report it with the versions installed",
                who=WhoActs.DEVELOPERS,
            )


@dataclass(frozen=True, slots=True)
class Cost:
    """What something cost, in CPU seconds and in bytes.

    Attributes:
        client_cpu: Of a site, on average over those that saw it through.
        coordinator_cpu: Of the coordinator.
        client_bytes: That such a site sent, on average, as messages and payloads without the transport's frames.
        transport_cpu: Of carrying everything, for all together.
    """

    client_cpu: float
    coordinator_cpu: float
    client_bytes: float
    transport_cpu: float

    @classmethod
    def of(cls, cpu: Mapping[int, float], sent: Mapping[int, int], through: Collection[int], times: int = 1) -> "Cost":
        """The cost of one of `times` repetitions, by party.

        Args:
            cpu: CPU seconds of the coordinator and of sites.
            sent: Bytes of sites.
            through: The sites that saw it through.
            times: Repetitions that `cpu` and `sent` hold.
        """
        share = times * len(through)
        return cls(
            client_cpu=sum(cpu.get(idx, 0.0) for idx in through) / share,
            coordinator_cpu=cpu.get(COORDINATOR, 0.0) / times,
            client_bytes=sum(sent.get(idx, 0) for idx in through) / share,
            transport_cpu=cpu.get(TRANSPORT, 0.0) / times,
        )


class Meter:
    """Shares this process's CPU time, all its threads', out among the parties that live in it.

    Args:
        clock: CPU seconds so far.
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._spent: defaultdict[int | None, float] = defaultdict(float)
        self._party: int | None = None
        self._since = clock()

    @contextmanager
    def of(self, party: int | None) -> Iterator[None]:
        """Counts what is done in the block for `party`, or for nobody, and not for the party of the block around it."""
        around = self._turn(party)
        try:
            yield
        finally:
            self._turn(around)

    def take(self) -> dict[int, float]:
        """What each party has used since this was last asked, or since the beginning."""
        self._turn(self._party)
        spent, self._spent = self._spent, defaultdict(float)
        return {party: seconds for party, seconds in spent.items() if party is not None}

    def _turn(self, party: int | None) -> int | None:
        now = self._clock()
        self._spent[self._party] += now - self._since
        before, self._party, self._since = self._party, party, now
        return before
