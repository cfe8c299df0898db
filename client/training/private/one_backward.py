"""Per-record gradients from one forward and one backward pass, without a second backward pass for the clipped sum.

After Lee & Kifer 2021 and Bu et al. 2023 ("book-keeping"): what a layer's gradients are made of is kept, norms are
taken from it, and the clipped sum is formed directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from client.training.private.kept import Buffers
from client.training.private.layers import Tape, layers_of, recording
from federation.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from client.training.private.kept import Kept
    from client.training.private.layers import Use
    from client.training.private.losses import Loss, Precision
    from client.training.private.sums import Total

__all__ = ["KeptGradients", "OneBackward"]


class OneBackward:
    """The engine for models made of `layers.SUPPORTED` and of layers without parameters.

    Args:
        module: The model; it is left as it is, and may be trained further.
        loss: Losses [rows] of outputs and labels.
        precision: Autocast's type, and the static loss scale.
        ghosts: Names of layers whose per-record gradients are never made.

    Raises:
        ConfigurationError: A layer is not supported: it is named, with the way out.
    """

    def __init__(
        self, module: nn.Module, loss: Loss, precision: Precision, ghosts: frozenset[str] = frozenset()
    ) -> None:
        self._module, self._loss, self._precision = module, loss, precision
        self._trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._layers = layers_of(module, ghosts)
        self._buffers = Buffers()
        self._uses: dict[str, Use] = {}

    @property
    def uses(self) -> dict[str, Use]:
        """How the last physical batch used each layer that multiplies, by name."""
        return self._uses

    def gradients(self, inputs: Tensor, labels: Tensor) -> KeptGradients:
        """The gradients of a physical batch, which stand until the next call. No parameter's `.grad` changes.

        Raises:
            ConfigurationError: A layer is used twice, or on something whose first dimension is not the batch, or a
                parameter is used outside its layer.
        """
        tape = Tape(len(inputs), self._buffers)
        before = [each.grad for _, each in self._trained]
        with recording(self._layers, tape), self._precision.autocast(inputs.device):
            losses = self._loss(self._module(inputs), labels)
        for _, each in self._trained:
            each.grad = None
        try:
            if losses.requires_grad:
                (losses.sum() * self._precision.scale).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._require_none_outside()
        finally:
            for (_, each), gradient in zip(self._trained, before, strict=True):
                each.grad = gradient
        self._uses = tape.uses
        return KeptGradients(tape.kept, len(inputs), [each.shape for _, each in self._trained], inputs.device)

    def _require_none_outside(self) -> None:
        used = [name for name, each in self._trained if each.grad is not None]
        if used:
            raise ConfigurationError(
                f"parameter {used[0]!r} is used outside its layer, where its gradient is already summed over records",
                fix="use the parameter through its layer only, or let vmap compute the gradients",
            )


class KeptGradients:
    """Per-record gradients as their layers keep them (`sums.Gradients`)."""

    def __init__(self, kept: Sequence[Kept], records: int, shapes: Sequence[torch.Size], device: torch.device) -> None:
        self._kept, self._records, self._shapes, self._device = kept, records, shapes, device

    def norms(self) -> Tensor:
        """L2 norms [rows] over all layers."""
        parts = [norm for each in self._kept for norm in each.norms()]
        if not parts:
            return torch.zeros(self._records, dtype=torch.float64, device=self._device)
        return torch.stack(parts).double().square_().sum(0).sqrt_()

    def weigh(self, factors: Tensor) -> None:
        """Multiplies every layer's part."""
        clear = not bool(factors.all())
        for each in self._kept:
            each.weigh(factors, clear=clear)

    def add(self, records: slice, total: Total) -> None:
        """Adds every layer's part."""
        for each in self._kept:
            each.add(records, total)

    def rows(self) -> Tensor:
        """The gradients [rows, values]; zeros where a layer took no part."""
        found: dict[int, Tensor] = {}
        for each in self._kept:
            found.update(each.rows())
        parts = [
            found[place] if place in found else torch.zeros(self._records, shape.numel(), device=self._device)
            for place, shape in enumerate(self._shapes)
        ]
        return torch.cat(parts, dim=1)
