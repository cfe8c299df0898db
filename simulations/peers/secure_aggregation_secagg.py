"""Flower's side of a round: its secure aggregation workflow and its client mod, driven in this process.

Each message is carried as in its deployment, by Flower's own protobuf form, so that nobody shares an object with
another: that is transport. What a strategy and an app do counts for nobody.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from federation.errors import ParleyError
from simulations.peers.secure_aggregation_costs import COORDINATOR, TRANSPORT, Cost, Meter, Updates
from simulations.peers.trial import progress

if TYPE_CHECKING:
    from flwr.app import Context, Message

__all__ = ["THRESHOLD", "measure"]

THRESHOLD = 2 / 3
"""Shares that give a secret, of all: the two of three in Flower's example; with 50 sites 33, RosterSum's threshold."""

_WEIGHT = 1000
"""Records of each site: Flower's default for the largest weight."""
_SERVER = 1
_FIRST = 2
"""Node number of the first site."""
_STAGES = ("keys", "shares of keys", "masked vectors", "shares for unmasking")
_MASKED = 2
"""The stage at which sites drop out: all wait for their vectors."""
_TOLD = 10
"""Sites between two lines for whoever waits."""


def measure(updates: Updates, *, dropouts: bool) -> Cost:
    """What a round costs, its mean checked: all four stages of `SecAggWorkflow`, in which each site shares with all.

    With `dropouts`, sites vanish when their masked vectors are due: the others reveal shares of their keys.

    Raises:
        ParleyError: The workflow gave up, or its result is not the mean.
    """
    meter = Meter()
    missing = updates.missing if dropouts else ()
    grid = _Grid(updates, meter, missing)
    with _quiet():
        mean = _aggregated(updates, grid, meter)
    through = [idx for idx in range(updates.sites) if idx not in missing]
    if mean is None:
        raise ParleyError(f"Flower's workflow gave up on a round of {updates.sites} sites")
    updates.check("flower", mean, through)
    return Cost.of(meter.take(), grid.sent, through)


def _aggregated(updates: Updates, grid: "_Grid", meter: Meter) -> npt.NDArray[np.floating] | None:
    """The model after one round of Flower's workflow; None if there is none."""
    from flwr.app import ConfigRecord
    from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.compat.common import recorddict_compat as compat
    from flwr.server.compat.legacy_context import LegacyContext
    from flwr.server.workflow import SecAggWorkflow
    from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
    from flwr.server.workflow.constant import Key as WorkflowKey
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = _SERVER
    strategy: Any = _Bystander(updates.sites, meter)
    crowd: Any = _Crowd(updates)
    carrier: Any = grid
    server = LegacyContext(_context(_SERVER), strategy=strategy, client_manager=crowd)
    model = ndarrays_to_parameters([np.zeros(updates.parameters, np.float32)])
    server.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
    server.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(model, keep_input=True)
    before = server.state.array_records[MAIN_PARAMS_RECORD]
    with meter.of(COORDINATOR):
        SecAggWorkflow(THRESHOLD)(carrier, server)
    after = server.state.array_records[MAIN_PARAMS_RECORD]
    if after is before:
        return None
    (mean,) = parameters_to_ndarrays(compat.arrayrecord_to_parameters(after, keep_input=True))
    return mean


def _context(node: int) -> "Context":
    from flwr.app import Context, RecordDict

    return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})


@contextmanager
def _quiet() -> Iterator[None]:
    """Flower tells only errors."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Grid:
    """Carries the workflow's messages to the sites' mods and their replies back; a missing site never replies.

    Attributes:
        sent: Bytes of each site's replies.
    """

    def __init__(self, updates: Updates, meter: Meter, missing: Collection[int]) -> None:
        self.sent: Counter[int] = Counter()
        self._updates = updates
        self._meter = meter
        self._missing = missing
        self._contexts = [_context(_FIRST + idx) for idx in range(updates.sites)]
        self._stage = 0

    def send_and_receive(self, messages: "Iterable[Message]", *, timeout: float | None = None) -> "list[Message]":
        """What the sites reply; there is nothing to wait for."""
        del timeout
        replies = []
        for number, message in enumerate(messages):
            if number % _TOLD == 0:
                stage = f"{_STAGES[self._stage]}, site {number + 1}"
                progress(f"flower, {self._updates.sites} sites{self._dropping}: {stage}")
            idx = message.metadata.dst_node_id - _FIRST
            if self._stage < _MASKED or idx not in self._missing:
                replies.append(self._replied(idx, message))
        self._stage += 1
        return replies

    @property
    def _dropping(self) -> str:
        return f", {len(self._missing)} drop out" if self._missing else ""

    def _replied(self, idx: int, message: "Message") -> "Message":
        from flwr.client.mod import secaggplus_mod

        with self._meter.of(TRANSPORT):
            arrived = _carried(message)[0]
        with self._meter.of(idx):
            reply = secaggplus_mod(arrived, self._contexts[idx], self._trained)
        with self._meter.of(TRANSPORT):
            returned, size = _carried(reply)
        self.sent[idx] += size
        return returned

    def _trained(self, message: "Message", _: "Context") -> "Message":
        """The app behind the mod: its update, as if it had been trained."""
        from flwr.app import Message
        from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
        from flwr.compat.common import recorddict_compat as compat

        with self._meter.of(None):
            update = self._updates.of(message.metadata.dst_node_id - _FIRST)
            result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([update]), _WEIGHT, {})
            return Message(compat.fitres_to_recorddict(result, keep_input=False), reply_to=message)


def _carried(message: "Message") -> "tuple[Message, int]":
    """The message as it is read at the other end, and the bytes that it took."""
    from flwr.common.serde import message_from_proto, message_to_proto

    form = message_to_proto(message)
    content = form.SerializeToString()
    return message_from_proto(type(form).FromString(content)), len(content)


@dataclass(frozen=True, slots=True)
class _Proxy:
    """All that the workflow asks of a site."""

    node_id: int


@dataclass(frozen=True, slots=True)
class _Crowd:
    """All that the workflow asks of who is there."""

    updates: Updates

    def num_available(self) -> int:
        """How many sites there are."""
        return self.updates.sites


class _Bystander:
    """A strategy that asks all sites and takes the mean as it comes; what it costs counts for nobody."""

    def __init__(self, sites: int, meter: Meter) -> None:
        self._sites = sites
        self._meter = meter

    def configure_fit(self, _round: int, parameters: Any, _clients: object) -> list[tuple[_Proxy, Any]]:
        """Every site with the model."""
        from flwr.common import FitIns

        with self._meter.of(None):
            return [(_Proxy(_FIRST + idx), FitIns(parameters, {})) for idx in range(self._sites)]

    def aggregate_fit(
        self, _round: int, results: list[tuple[Any, Any]], _failures: object
    ) -> tuple[Any, dict[str, Any]]:
        """The mean, which the workflow has put into each result."""
        return results[0][1].parameters, {}
