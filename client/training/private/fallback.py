"""Per-record gradients of models that the one-backward engine does not know: by vmap, or Opacus' hooks in float32."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.func import functional_call, grad, vmap

from client.training.private.sums import norms
from federation.errors import ConfigurationError, WhoActs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from client.training.private.losses import Loss, Precision
    from client.training.private.sums import Total

__all__ = ["ByHooks", "ByVmap", "Rows", "require_opacus"]


class Rows:
    """Gradients that are kept as they are [rows, values], float32 (`sums.Gradients`)."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._factors = torch.empty(0)

    def norms(self) -> Tensor:
        """L2 norms [rows]."""
        return norms(self._rows).double()

    def weigh(self, factors: Tensor) -> None:
        """Keeps the factors: they are multiplied in while the rows are added."""
        self._factors = factors
        if not bool(factors.all()):
            self._rows = self._rows.masked_fill((factors == 0)[:, None], 0)

    def add(self, records: slice, total: Total) -> None:
        """One pass over the gradients."""
        total.part.addmv_(self._rows[records].T, self._factors[records])

    def rows(self) -> Tensor:
        """The gradients."""
        return self._rows


class ByVmap:
    """Each record's gradient as `torch.func` computes it, all of a physical batch at once.

    It knows every layer whose operators torch can batch, tied and reused ones, attention and LSTM among them.
    """

    def __init__(self, module: nn.Module, loss: Loss, precision: Precision) -> None:
        self._module, self._loss, self._precision = module, loss, precision

    def gradients(self, inputs: Tensor, labels: Tensor) -> Rows:
        """The gradients of a physical batch. No parameter's `.grad` changes."""
        named = dict(self._module.named_parameters())
        trained = {name: each.detach() for name, each in named.items() if each.requires_grad}
        rest = {name: each.detach() for name, each in named.items() if not each.requires_grad}
        rest.update(self._module.named_buffers())

        def loss_of(weights: Mapping[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
            outputs = functional_call(self._module, {**weights, **rest}, (record[None],))
            return self._loss(outputs, label[None])[0] * self._precision.scale

        with warnings.catch_warnings(), self._precision.autocast(inputs.device):
            warnings.filterwarnings("ignore", message="There is a performance drop")  # the plan's reason says so
            found = vmap(grad(loss_of), in_dims=(None, 0, 0), randomness="different")(trained, inputs, labels)
        return Rows(torch.cat([each.flatten(1).float() for each in found.values()], dim=1))


class ByHooks:
    """Each record's gradient as Opacus' layer rules compute it, in float32 whatever the precision asks for.

    Raises:
        ConfigurationError: Opacus is not installed.
    """

    def __init__(self, module: nn.Module, loss: Loss, precision: Precision) -> None:
        self._opacus = require_opacus()
        self._module, self._loss, self._scale = module, loss, precision.scale
        self._trained = [each for each in module.parameters() if each.requires_grad]

    def gradients(self, inputs: Tensor, labels: Tensor) -> Rows:
        """The gradients of a physical batch. Afterwards the module is as it was, without hooks."""
        before = [each.grad for each in self._trained]
        for each in self._trained:
            each.grad = None  # what is there would be added to, in place
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of full backward hooks on inputs without gradients, which are meant
            hooked = self._opacus.grad_sample.GradSampleModule(self._module, loss_reduction="sum", strict=False)
            try:
                losses = self._loss(hooked(inputs), labels)
                (losses.sum() * self._scale).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                parts = [_sample_of(each, len(inputs)) for each in self._trained]
            finally:
                hooked.to_standard_module()
                for each, gradient in zip(self._trained, before, strict=True):
                    each.grad = gradient
        return Rows(torch.cat(parts, dim=1))


def _sample_of(parameter: Tensor, records: int) -> Tensor:
    """What Opacus left at a parameter: nothing if it took no part, a list if a layer ran more than once."""
    found = getattr(parameter, "grad_sample", None)
    if found is None:
        return parameter.new_zeros(records, parameter.numel(), dtype=torch.float32)
    samples = found if isinstance(found, list) else [found]
    return torch.stack([each.flatten(1).float() for each in samples]).sum(0)


def require_opacus() -> Any:
    """The package `opacus`, imported only where a model needs it.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        import opacus.grad_sample  # type: ignore[import-untyped]  # it brings no types
        import opacus.layers  # type: ignore[import-untyped]  # the same
    except ImportError as missing:
        raise ConfigurationError(
            f"this model's per-record gradients need Opacus, which cannot be used: {missing}",
            fix='pip install "parley-fl[privacy]"',
            who=WhoActs.YOU,
        ) from missing
    return opacus
