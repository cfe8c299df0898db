"""Losses of single records, and the precision that they and their gradients are computed in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import frexp
from typing import TYPE_CHECKING, TypeAlias, assert_never

import torch
from torch import Tensor
from torch.nn import functional

from federation.errors import ConfigurationError
from tasks import task

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["Loss", "Precision", "per_record"]

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Outputs [rows, outputs] and labels [rows] to losses [rows], each of its own row alone."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The type that autocast may use (None: none), and the number that every loss is multiplied with.

    The scale is fixed before training. One that follows the gradients, as `torch.amp.GradScaler` chooses it, would show
    that some record's gradient was not finite.

    Raises:
        ConfigurationError: The scale is no power of two of at least 1, or float16 goes without one.
    """

    amp_dtype: torch.dtype | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Refuses scales that round gradients, and half precision in which small gradients vanish."""
        if not 1 <= self.scale < float("inf") or frexp(self.scale)[0] != 0.5:  # noqa: PLR2004 - a power of two's
            raise ConfigurationError(
                f"a static loss scale of {self.scale} is no power of two of at least 1",
                fix="choose one, such as 1 or 1024",
            )
        if self.amp_dtype is torch.float16 and self.scale == 1:
            raise ConfigurationError(
                "float16 loses small gradients without a loss scale, and a dynamic one is not private",
                fix="choose bfloat16, or a static loss scale such as 1024",
            )

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """The block that a forward pass runs in."""
        return torch.autocast(device.type, self.amp_dtype) if self.amp_dtype is not None else nullcontext()


def per_record(loss: task.Loss) -> Loss:
    """What a task minimises, for each record by itself, in float32 whatever the outputs' precision is."""
    match loss:
        case task.Loss.LOGISTIC:
            return _logistic
        case task.Loss.CROSS_ENTROPY:
            return _cross_entropy
        case task.Loss.SQUARED:
            return _squared
        case _:
            assert_never(loss)


def _logistic(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs[:, 0].float(), labels.float(), reduction="none")


def _cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.float(), labels, reduction="none")


def _squared(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(outputs[:, 0].float(), labels, reduction="none")
