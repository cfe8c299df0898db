"""What an engine must show on a few public records before it may train: each record's gradient, and nothing else's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.modules.dropout import _DropoutNd

from federation.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from client.training.private.losses import Loss
    from client.training.private.sums import Gradients

__all__ = ["Engine", "Example", "require_independent", "require_right"]

_FEWEST, _MOST = 2, 4
_CLOSE = 1e-3
"""Relative: float32 in another order, not another gradient."""


class Engine(Protocol):
    """Computes the gradients of physical batches."""

    def gradients(self, inputs: Tensor, labels: Tensor) -> Gradients:
        """Per-record gradients, times the static loss scale."""
        ...


@dataclass(frozen=True, slots=True)
class Example:
    """Inputs [rows, ...] and labels [rows] of the shapes and types that training will see, and none of its records.

    Raises:
        ConfigurationError: There are fewer than two rows, or not as many labels.
    """

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        """Refuses what shows nothing of a batch."""
        if len(self.inputs) < _FEWEST or len(self.inputs) != len(self.labels):
            raise ConfigurationError(
                f"{len(self.inputs)} inputs with {len(self.labels)} labels are no example of a batch",
                fix="make two or more public rows",
            )

    def first(self, rows: int) -> Example:
        """The first rows, and those again if there are not as many."""
        places = torch.arange(rows) % len(self.inputs)
        return Example(self.inputs[places], self.labels[places])


def require_independent(module: nn.Module, example: Example) -> None:
    """Accepts a model whose training mode gives each record what its own input says, and keeps nothing of it.

    Raises:
        ConfigurationError: A buffer changes, or a record's output changes with another record.
    """
    few = example.first(_FEWEST)
    before = {name: each.detach().clone() for name, each in module.named_buffers()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        together, other = (_outputs(module, each) for each in (few.inputs, torch.stack((few.inputs[0], few.inputs[0]))))
    changed = [name for name, each in module.named_buffers() if not torch.equal(each, before[name])]
    for name, each in module.named_buffers():
        each.data.copy_(before[name])
    if changed:
        raise ConfigurationError(
            f"training changes the buffer {changed[0]!r}, which would keep statistics of the records without noise",
            fix="use layers that keep none, such as GroupNorm, LayerNorm or InstanceNorm without running statistics",
        )
    if len(together) != _FEWEST or not torch.allclose(together[0], other[0], rtol=_CLOSE, atol=1e-6, equal_nan=True):
        raise ConfigurationError(
            "the model's output for one record changes with the other records of its batch",
            fix="compute each record's output from its own input alone, with the batch as first dimension",
        )


def _outputs(module: nn.Module, inputs: Tensor) -> Tensor:
    torch.default_generator.manual_seed(0)
    found: Tensor = module(inputs)
    return found


def require_right(engine: Engine, module: nn.Module, loss: Loss, example: Example, *, training: bool = False) -> None:
    """Accepts an engine that finds of each record alone what autograd finds, its loss scale being 1.

    Dropout would draw something else for each: the module is in evaluation mode, or, with `training`, its dropout is.

    Raises:
        ConfigurationError: It finds something else.
    """
    few = example.first(min(_MOST, max(_FEWEST + 1, len(example.inputs))))
    trained = [each for each in module.parameters() if each.requires_grad]
    modes = {each: each.training for each in module.modules()}
    module.train(training)
    for each in modes:
        if isinstance(each, _DropoutNd):
            each.eval()
    try:
        found = engine.gradients(few.inputs, few.labels).rows()
        for row, value in enumerate(found):
            alone = loss(module(few.inputs[row : row + 1]), few.labels[row : row + 1]).sum()
            parts = torch.autograd.grad(alone, trained, allow_unused=True)
            expected = torch.cat(
                [
                    (torch.zeros_like(each) if part is None else part).flatten()
                    for each, part in zip(trained, parts, strict=True)
                ]
            )
            if not torch.linalg.vector_norm(value - expected) <= _CLOSE * torch.linalg.vector_norm(expected) + 1e-6:
                raise ConfigurationError(
                    "the engine's gradient of a single record is not the record's own",
                    fix="keep the batch as every layer's first dimension, and parameters inside their layers",
                )
    finally:
        for each, mode in modes.items():
            each.training = mode
