"""The interface of a strategy: what it must see, its explicit state, and one step from model to next model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from federation import plugins
from federation.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError, WhoActs
from federation.job import StrategySettings
from federation.vector import F32, F64

__all__ = [
    "Formula",
    "GroupStep",
    "GroupStrategy",
    "LocalTerms",
    "Rule",
    "ServerStep",
    "State",
    "Strategy",
    "SumStrategy",
    "load",
]

State = Mapping[str, F64]
"""A strategy's memory between rounds as named float64 vectors: all of it is stored with the round."""

Formula = Callable[[F64, State], tuple[F64, State]]
"""A paper's line: mean update [size] and state to the model's change [size] and next state; it changes no argument."""

Rule = Callable[[F64], F64]
"""A robust mean: mean updates [groups, size] to one [size], each column by itself; it changes no argument."""


@dataclass(frozen=True, slots=True)
class LocalTerms:
    """What a strategy adds to local training. `proximal` is FedProx' mu: adds mu/2 * |w - w_global|^2 to the loss."""

    proximal: float = 0.0


@runtime_checkable
class SumStrategy(Protocol):
    """A strategy that needs only the weighted mean of the updates (so it works under secure aggregation).

    A strategy file offers `Settings` (below `StrategySettings`) and `make(settings) -> SumStrategy`.
    """

    @property
    def local(self) -> LocalTerms:
        """What each site adds to its local training."""
        ...

    def initial(self, size: int) -> State:
        """The state before the first round, for a model of `size` values."""
        ...

    def step(self, model: F32, mean_update: F64, state: State) -> tuple[F32, State]:
        """The next model and state; the inputs are not changed.

        Each value goes its own way: a step on slices of all three gives the slices of the step on the whole.

        Args:
            model: The global model [size].
            mean_update: Weighted mean [size] of (local model - model).
            state: What `initial` or the last step gave.

        Raises:
            RemoteProtocolError: The mean update holds a value that is not finite.
            ConfigurationError: The next model or state would.
            LocalProtocolError: Model, update and state are not of one size, or the state is another strategy's.
        """
        ...


@runtime_checkable
class GroupStrategy(Protocol):
    """A strategy that must see the mean update of each of several groups of sites, and of no site in a group.

    Under secure aggregation a group is a cell of the job; under plain aggregation each site is its own group. A
    strategy file offers `Settings` (below `StrategySettings`, `fewest_groups` above 0) and
    `make(settings) -> GroupStrategy`.
    """

    @property
    def local(self) -> LocalTerms:
        """What each site adds to its local training."""
        ...

    def initial(self, size: int) -> State:
        """The state before the first round, for a model of `size` values."""
        ...

    def step_groups(self, model: F32, group_means: F64, state: State) -> tuple[F32, State]:
        """The next model and state; the inputs are not changed.

        Each group counts as one, whatever it weighs, and their order does not matter. Each value goes its own way, as
        in `SumStrategy.step`.

        Args:
            model: The global model [size].
            group_means: Of each group that is here, 1 or more, the weighted mean of (local model - model):
                [groups, size].
            state: What `initial` or the last step gave.

        Raises:
            RemoteProtocolError: A group's mean update holds a value that is not finite.
            ConfigurationError: The next model or state would.
            LocalProtocolError: Model, means and state are not of one size, or the state is another strategy's.
        """
        ...


Strategy: TypeAlias = SumStrategy | GroupStrategy
"""A strategy of either kind: one that needs only the sum, or one that needs the mean of each group."""


@dataclass(frozen=True, slots=True)
class ServerStep:
    """A `SumStrategy` made of one formula: next model = model + change, in float64, then rounded to float32.

    Args:
        formula: From (mean update, state) to (change of the model, next state); it bears the names in `memory`.
        memory: Names of the state's vectors, each with the value that fills it before the first round.
        local: What each site adds to its local training.
    """

    formula: Formula
    memory: Mapping[str, float] = field(default_factory=dict)
    local: LocalTerms = LocalTerms()

    def initial(self, size: int) -> State:
        """The state before the first round, for a model of `size` values."""
        return {name: np.full(size, value) for name, value in self.memory.items()}

    def step(self, model: F32, mean_update: F64, state: State) -> tuple[F32, State]:
        """The next model and state, as `SumStrategy.step` promises."""
        self._check_shapes(model, mean_update, state)
        _require_finite(mean_update, "the mean update")
        with np.errstate(over="ignore", invalid="ignore"):  # told below, in words, instead of by a warning
            change, after = self.formula(mean_update, state)
            moved = (model + change).astype(np.float32)
        if not (np.isfinite(moved).all() and all(np.isfinite(vector).all() for vector in after.values())):
            raise ConfigurationError(
                "the strategy's step leads to NaN or infinite values; model and state stay",
                fix="lower strategy.learning_rate or training.learning_rate",
            )
        return moved, after

    def _check_shapes(self, model: F32, mean_update: F64, state: State) -> None:
        if model.ndim != 1 or model.dtype != np.float32:
            raise LocalProtocolError(f"a model must be one float32 vector, not {model.dtype} of shape {model.shape}")
        if mean_update.shape != model.shape or mean_update.dtype != np.float64:
            raise LocalProtocolError(
                f"the mean update of a model of {model.size} values must be as many float64 values, "
                f"not {mean_update.dtype} of shape {mean_update.shape}"
            )
        if state.keys() != self.memory.keys():
            raise LocalProtocolError(f"the strategy remembers {sorted(self.memory)}; this state holds {sorted(state)}")
        for name, vector in state.items():
            if vector.shape != model.shape or vector.dtype != np.float64:
                raise LocalProtocolError(
                    f"the strategy's {name!r} for a model of {model.size} values must be as many float64 values, "
                    f"not {vector.dtype} of shape {vector.shape}"
                )


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A `GroupStrategy` made of two parts: what `rule` makes of the groups' means is the update that `server` takes.

    Args:
        rule: From mean updates [groups, size] to one [size].
        server: The step that follows.
    """

    rule: Rule
    server: SumStrategy

    @property
    def local(self) -> LocalTerms:
        """What each site adds to its local training."""
        return self.server.local

    def initial(self, size: int) -> State:
        """The state before the first round, for a model of `size` values."""
        return self.server.initial(size)

    def step_groups(self, model: F32, group_means: F64, state: State) -> tuple[F32, State]:
        """The next model and state, as `GroupStrategy.step_groups` promises."""
        if group_means.ndim != 2 or not group_means.shape[0] or group_means.dtype != np.float64:  # noqa: PLR2004 - a row for each group
            raise LocalProtocolError(
                f"the groups' mean updates must be one row of float64 values for each group, "
                f"not {group_means.dtype} of shape {group_means.shape}"
            )
        _require_finite(group_means, "a group's mean update")
        with np.errstate(over="ignore"):  # the server's step tells it, in words
            update = self.rule(group_means)
        return self.server.step(model, update, state)


def load(settings: StrategySettings) -> Strategy:
    """The strategy that `settings` describes, made by the file in `strategies/` that bears `settings.name`.

    Raises:
        ConfigurationError: There is no such file; the nearest names are told.
        LocalProtocolError: The settings are not of that file's type.
    """
    module = plugins.load("strategies", settings.name)
    if not isinstance(settings, module.Settings):
        raise LocalProtocolError(f"strategy {settings.name!r} needs its own Settings, not {type(settings).__name__}")
    strategy: Strategy = module.make(settings)
    return strategy


def _require_finite(update: F64, what: str) -> None:
    if not np.isfinite(update).all():
        raise RemoteProtocolError(
            f"{what} holds NaN or infinite values, so a site sent what no training gives; the model stays",
            fix="discard this round and look at the sites' training losses",
            who=WhoActs.COORDINATOR,
        )
