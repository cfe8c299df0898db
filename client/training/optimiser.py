"""SGD, Adam and AdamW in a few lines each.

torch's own optimisers import its compiler at their first use, which costs a fresh process four seconds of CPU time:
more than all rounds of a small model together. The tests hold these to torch's results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, assert_never

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from federation.job import Training

__all__ = ["Adam", "Optimiser", "Sgd", "make"]


class Optimiser(Protocol):
    """Changes parameters in place by their gradients; call under `torch.no_grad()`."""

    def step(self) -> None:
        """One step; every parameter has a gradient."""
        ...


class Sgd:
    """Gradient descent with heavy-ball momentum (Polyak 1964, as Sutskever et al. 2013 scale it) and an L2 term."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], learning_rate: float, momentum: float, weight_decay: float
    ) -> None:
        self._parameters = parameters
        self._rate = learning_rate
        self._momentum = momentum
        self._decay = weight_decay
        self._velocity: list[torch.Tensor] = []

    def step(self) -> None:
        """V = momentum * v + (gradient + decay * w); w = w - rate * v."""
        moves = [_gradient(w).add(w, alpha=self._decay) if self._decay else _gradient(w) for w in self._parameters]
        if self._momentum:
            if self._velocity:
                for velocity, move in zip(self._velocity, moves, strict=True):
                    velocity.mul_(self._momentum).add_(move)
            else:
                self._velocity = [move.clone() for move in moves]
            moves = self._velocity
        for w, move in zip(self._parameters, moves, strict=True):
            w.sub_(move, alpha=self._rate)


class Adam:
    """Adam (Kingma & Ba 2015, algorithm 1); with `decoupled`, AdamW (Loshchilov & Hutter 2019, algorithm 2)."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], learning_rate: float, weight_decay: float, *, decoupled: bool
    ) -> None:
        import torch

        self._parameters = parameters
        self._rate = learning_rate
        self._decay = weight_decay
        self._decoupled = decoupled
        self._first = [torch.zeros_like(w) for w in parameters]
        self._second = [torch.zeros_like(w) for w in parameters]
        self._steps = 0

    def step(self) -> None:
        """W = w - rate * m / (sqrt(v) + 1e-8), m and v corrected for their start at zero."""
        self._steps += 1
        beta1, beta2 = 0.9, 0.999
        correction1, correction2 = 1 - beta1**self._steps, 1 - beta2**self._steps
        for w, first, second in zip(self._parameters, self._first, self._second, strict=True):
            gradient = _gradient(w)
            if self._decoupled:
                w.mul_(1 - self._rate * self._decay)
            elif self._decay:
                gradient = gradient.add(w, alpha=self._decay)
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            w.addcdiv_(first, (second / correction2).sqrt_().add_(1e-8), value=-self._rate / correction1)


def make(settings: Training, parameters: Sequence[torch.Tensor]) -> Optimiser:
    """The optimiser that the job's `[training]` names."""
    match settings.optimiser:
        case "sgd":
            return Sgd(parameters, settings.learning_rate, settings.momentum, settings.weight_decay)
        case "adam" | "adamw":
            decoupled = settings.optimiser == "adamw"
            return Adam(parameters, settings.learning_rate, settings.weight_decay, decoupled=decoupled)
        case _:
            assert_never(settings.optimiser)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        raise ValueError("a parameter of the model takes no part in its output")
    return gradient
