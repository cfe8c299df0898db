"""Which engine trains a model privately, in physical batches of how many rows, with the reason in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil, sqrt
from typing import TYPE_CHECKING, assert_never

from client.training.private.fallback import ByHooks, ByVmap
from client.training.private.losses import Precision
from client.training.private.one_backward import OneBackward
from client.training.private.probe import Example, require_independent, require_right
from client.training.private.repair import require_private
from client.training.private.sums import gamma_of
from federation.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

    from client.training.private.layers import Use
    from client.training.private.losses import Loss
    from client.training.private.probe import Engine

__all__ = ["ACCELERATOR_MEMORY", "MEMORY", "ROUND", "EngineName", "Plan", "choose"]

MEMORY, ACCELERATOR_MEMORY = 64 << 20, 1 << 30
"""Bytes that the kept gradients of one physical batch may take: about twice a last cache (measured), or on a device."""

ROUND = 16
"""Physical batches are filled up to a multiple of this: their shapes, and their time, tell so much less of a step."""

_FLOAT = 4
_LARGEST = 512
"""Rows: no physical batch is larger."""

_COPIES = 3
"""Of all gradients of a record, while vmap or hooks make them."""

_PRODUCT = 0.025
"""Nanoseconds for one multiplication in float32: one core of 2020."""

_READ, _WIDE = 0.6, 2.0
"""Nanoseconds to write and read one value of a kept gradient; how much slower float64 is than float32."""

_SPREAD = 6


class EngineName(StrEnum):
    """The engines, the fastest first."""

    ONE_BACKWARD = "one-backward"
    VMAP = "vmap"
    HOOKS = "opacus-hooks"


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model's private steps are computed. It depends on nothing private.

    Attributes:
        engine: Which engine.
        rows: Of a physical batch, at most: the last of a step is filled up to a multiple of `ROUND`.
        most: Records of a step that the float32 sums are sized for; with more, their chunks shrink.
        values: The model's trained parameters.
        reason: Why this engine, for people.
        ghosts: Layers whose per-record gradients are never made.
    """

    engine: EngineName
    rows: int
    most: int
    values: int
    reason: str
    ghosts: frozenset[str] = frozenset()

    @property
    def gamma(self) -> float:
        """What floating point adds to one record's part of a sum, in clip norms."""
        return gamma_of(self.most)

    def engine_of(self, module: nn.Module, loss: Loss, precision: Precision) -> Engine:
        """The engine at work on `module`."""
        return _engine(self.engine, module, loss, precision, *self.ghosts)


def choose(
    module: nn.Module,
    loss: Loss,
    example: Example,
    *,
    expected: float,
    whole_rows: bool = False,
    memory: int | None = None,
) -> Plan:
    """The first engine that computes the gradients of `example`'s records as autograd does one by one.

    Args:
        module: The model; its weights and buffers stay as they are, and it is in training mode afterwards.
        loss: Losses [rows] of outputs and labels.
        example: Public rows of the inputs' shape and type.
        expected: Records of a step: the public rate times the public number of records.
        whole_rows: Whether each record's gradient is wanted as one row, as the exact path does.
        memory: Bytes for the per-record gradients of a physical batch, if not the device's usual.

    Raises:
        ConfigurationError: A layer is not private, the model mixes records, or no engine knows it: every engine's
            reason is told.
    """
    require_private(module)
    require_independent(module.train(), example)
    values = sum(each.numel() for each in module.parameters() if each.requires_grad)
    if not values:
        raise ConfigurationError("the model has no parameters to train", fix="let some require gradients")
    if memory is None:
        memory = MEMORY if example.inputs.device.type == "cpu" else ACCELERATOR_MEMORY
    refused: list[str] = []
    for name in EngineName:
        try:
            rows, ghosts, why = _tried(name, module, loss, example, values, memory, whole_rows=whole_rows)
        except ConfigurationError as reason:
            refused.append(f"{name} cannot: {reason}")
        except Exception as bug:
            if name is EngineName.ONE_BACKWARD:
                raise  # the model itself does not run, or we have a bug
            text = str(bug).partition("\n")[0]  # whatever a foreign engine says to a model that it does not know
            refused.append(f"{name} cannot: {type(bug).__name__}: {text}")
        else:
            most = ceil(expected + _SPREAD * sqrt(expected)) + ROUND
            return Plan(name, rows, most, values, "; ".join((*refused, *why)), ghosts)
    raise ConfigurationError(
        "no engine computes this model's per-record gradients:\n" + "\n".join(refused),
        fix="build it of the layers that are supported",
    )


def _tried(
    name: EngineName,
    module: nn.Module,
    loss: Loss,
    example: Example,
    values: int,
    memory: int,
    *,
    whole_rows: bool,
) -> tuple[int, frozenset[str], tuple[str, ...]]:
    """Rows of a physical batch, ghosts and reason for this engine, once it is right about the example."""
    engine = _engine(name, module, loss, Precision())
    require_right(engine, module, loss, example, training=name is EngineName.HOOKS)  # Opacus' do nothing otherwise
    if not isinstance(engine, OneBackward):
        return _rows(_COPIES * _FLOAT * values, memory), frozenset(), ()
    uses = engine.uses
    ghosts = frozenset(each for each, use in uses.items() if not whole_rows and _is_ghost(use, memory))
    kept = values if whole_rows else sum(_kept(use, ghost=each in ghosts) for each, use in uses.items())
    rows = _rows(_FLOAT * kept, memory)
    why = "every layer is supported: one backward pass for norms and clipped sum"
    told = f"; too large to be kept, so by inner products: {', '.join(sorted(ghosts))}" if ghosts else ""
    return rows, ghosts, (why + told,)


def _engine(name: EngineName, module: nn.Module, loss: Loss, precision: Precision, *ghosts: str) -> Engine:
    match name:
        case EngineName.ONE_BACKWARD:
            return OneBackward(module, loss, precision, frozenset(ghosts))
        case EngineName.VMAP:
            return ByVmap(module, loss, precision)
        case EngineName.HOOKS:
            return ByHooks(module, loss, precision)
        case _:
            assert_never(name)


def _kept(use: Use, *, ghost: bool) -> int:
    """Floats that a layer keeps of one record beside its inputs and errors."""
    return use.copied + (0 if ghost or use.positions == 1 else use.values)


def _is_ghost(use: Use, memory: int) -> bool:
    """Whether a weight's gradients are too many to be kept, or slower to read than inner products are to make."""
    if use.positions == 1:
        return False  # its norm is a product already
    kept = use.values * _READ + use.products * _PRODUCT
    pairs = use.groups * use.positions**2 * (use.inputs + use.outputs)
    return _FLOAT * ROUND * use.values > memory or kept > _WIDE * (use.products + pairs) * _PRODUCT


def _rows(row_bytes: int, memory: int) -> int:
    """The most rows of a physical batch whose kept gradients fit in `memory`: fewer batches cost fewer calls."""
    fitting = min(_LARGEST, memory // max(row_bytes, 1))
    return fitting - fitting % ROUND if fitting >= ROUND else max(fitting, 1)
