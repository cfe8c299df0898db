"""The layers whose per-record gradients one backward pass gives: each is run so that it tells what its gradients are.

In the forward pass a supported layer computes what it always does. In the backward pass it hands back the gradient of
its input alone, and gives its input and the gradient of its output to a `Tape`: the gradient of its parameters, summed
over the batch, is never made.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from client.training.private.kept import Buffers, Explicit, Kept, Outer, Places, Sparse, kept_positions
from federation.errors import ConfigurationError, LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

__all__ = ["SUPPORTED", "Layer", "Tape", "Use", "layers_of", "recording", "unsupported"]

_Conv: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d
SUPPORTED: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.Embedding,
    nn.LayerNorm,
    nn.GroupNorm,
)
"""Types with parameters, and no subclass of them: a subclass may compute something else."""

_KEEP: TypeAlias = "Callable[[Tensor, Tensor], None]"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with trained parameters: its dotted name, itself, where they are, and whether its norms are ghosts'."""

    name: str
    module: nn.Module
    places: Places
    ghost: bool = False


def layers_of(module: nn.Module, ghosts: frozenset[str] = frozenset()) -> tuple[Layer, ...]:
    """The layers of `module` that have trained parameters, in its order; `ghosts` names those too large to be kept.

    Raises:
        ConfigurationError: One of them is not supported here; the first is named, with the way out.
    """
    found = unsupported(module)
    if found:
        name, why, repair = found[0]
        raise ConfigurationError(f"layer {name!r}: {why}", fix=repair)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    place = {id(parameter): number for number, parameter in enumerate(trained)}
    layers = []
    for name, each in module.named_modules():
        places = Places(*(place.get(id(getattr(each, own, None))) for own in ("weight", "bias")))
        if type(each) in SUPPORTED and places != Places(None, None):
            layers.append(Layer(name, each, places, name in ghosts))
    return tuple(layers)


def unsupported(module: nn.Module) -> list[tuple[str, str, str]]:
    """Dotted name, reason and repair of whatever keeps `module` from the one-backward engine."""
    found = []
    owner: dict[int, str] = {}
    for name, each in module.named_modules():
        own = [(key, value) for key, value in each.named_parameters(recurse=False) if value.requires_grad]
        for key, value in own:
            where = f"{name}.{key}".lstrip(".")
            if id(value) in owner:
                why = f"its {key} is also {owner[id(value)]}, and tied gradients must be added before they are clipped"
                found.append((name, why, "give each layer parameters of its own, or let vmap compute the gradients"))
            owner[id(value)] = where
        if own:
            refusal = _refusal(each, {key for key, _ in own})
            if refusal:
                found.append((name, *refusal))
    return found


def _refusal(layer: nn.Module, own: set[str]) -> tuple[str, str] | None:
    kind = type(layer).__name__
    if type(layer) not in SUPPORTED or not own <= {"weight", "bias"}:
        known = ", ".join(each.__name__ for each in SUPPORTED)
        return f"{kind} has parameters of its own and is not one of {known}", f"build it of {known}, or let vmap run it"
    if "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:  # noqa: SLF001 - torch shows them nowhere else
        return f"this {kind} runs somebody's hooks", "remove its hooks, or its replaced forward"
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        return (
            "an Embedding with max_norm or scale_grad_by_freq changes weights or gradients with the batch's tokens",
            "leave max_norm and scale_grad_by_freq out",
        )
    return None


@dataclass(frozen=True, slots=True)
class Use:
    """A weight's groups, its width in and out of each, how many positions of a record it meets, and copies of those."""

    groups: int
    inputs: int
    outputs: int
    positions: int
    copied: int = 0

    @property
    def values(self) -> int:
        """Of the weight."""
        return self.groups * self.inputs * self.outputs

    @property
    def products(self) -> int:
        """Multiplications for one record in one direction."""
        return self.positions * self.values


class Tape:
    """What the layers of one forward and one backward pass tell.

    Attributes:
        kept: Their parts of the gradients.
        uses: How each layer with many positions was used, by name.

    Args:
        rows: Records of the physical batch.
        buffers: The engine's memory, which this pass may overwrite.
    """

    def __init__(self, rows: int, buffers: Buffers) -> None:
        self.rows = rows
        self.buffers = buffers
        self.kept: list[Kept] = []
        self.uses: dict[str, Use] = {}
        self._met: set[str] = set()

    def meet(self, layer: Layer, inputs: Tensor, dimensions: int = 0) -> None:
        """Accepts one use of a layer on inputs whose first dimension is the batch.

        Args:
            layer: The layer.
            inputs: Its input.
            dimensions: How many it must have; 0 if any number will do.

        Raises:
            ConfigurationError: It has run already, or the batch is not its first dimension.
        """
        if layer.name in self._met:
            raise ConfigurationError(
                f"layer {layer.name!r} runs more than once in one pass, and its gradients would have to be added first",
                fix="use a layer of its own for each place, or let vmap compute the gradients",
            )
        self._met.add(layer.name)
        if inputs.dim() == 0 or len(inputs) != self.rows or (dimensions and inputs.dim() != dimensions):
            raise ConfigurationError(
                f"layer {layer.name!r} has an input of shape {list(inputs.shape)}, whose first dimension is not the "
                f"batch of {self.rows}",
                fix="keep the batch as every layer's first dimension",
            )


@contextmanager
def recording(layers: Sequence[Layer], tape: Tape) -> Iterator[None]:
    """Within the block, and in backward passes of what is computed in it, the layers tell `tape`."""
    for layer in layers:
        layer.module.forward = _run_of(layer, tape)  # the instance's hides the class's, and nothing else changes
    try:
        yield
    finally:
        for layer in layers:
            del layer.module.forward


class _Context(Protocol):
    """What torch gives to a Function's two passes."""

    keep: _KEEP
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    settings: tuple[Any, ...]
    norm: _Norm

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _LinearPass(torch.autograd.Function):
    """`functional.linear`; weight and bias take part so that there is a backward pass at all, and get no gradient."""

    @staticmethod
    def forward(ctx: _Context, inputs: Tensor, weight: Tensor, bias: Tensor | None, keep: _KEEP) -> Tensor:
        ctx.keep = keep
        ctx.save_for_backward(inputs, weight)
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: _Context, errors: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        back = errors @ weight.to(errors.dtype) if ctx.needs_input_grad[0] else None
        ctx.keep(inputs.detach(), errors)
        return back, None, None, None


class _ConvPass(torch.autograd.Function):
    """A convolution on inputs padded before, or by zeros on both sides alike."""

    @staticmethod
    def forward(
        ctx: _Context, inputs: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, ...], keep: _KEEP
    ) -> Tensor:
        ctx.keep = keep
        ctx.settings = settings
        outputs: Tensor = torch.convolution(inputs, weight, bias, *settings)
        ctx.save_for_backward(inputs, weight)
        return outputs

    @staticmethod
    def backward(ctx: _Context, errors: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        back = None
        if ctx.needs_input_grad[0]:
            kind = errors.dtype
            back, _, _ = torch.ops.aten.convolution_backward(
                errors, inputs.to(kind), weight.to(kind), None, *ctx.settings, [True, False, False]
            )
        ctx.keep(inputs.detach(), errors)
        return back, None, None, None, None


class _EmbeddingPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, tokens: Tensor, weight: Tensor, keep: _KEEP) -> Tensor:
        ctx.keep = keep
        ctx.save_for_backward(tokens)
        return functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: _Context, errors: Tensor) -> tuple[None, ...]:
        ctx.keep(ctx.saved_tensors[0], errors)
        return None, None, None


class _NormPass(torch.autograd.Function):
    """Layer or group normalisation with its weight and bias; what it keeps is normalised again."""

    @staticmethod
    def forward(ctx: _Context, inputs: Tensor, weight: Tensor, bias: Tensor | None, norm: _Norm, keep: _KEEP) -> Tensor:
        ctx.keep = keep
        ctx.norm = norm
        outputs, mean, scale = norm.forward(inputs.to(weight.dtype), weight, bias)
        ctx.save_for_backward(inputs, weight, mean, scale)
        return outputs

    @staticmethod
    def backward(ctx: _Context, errors: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, scale = ctx.saved_tensors
        inputs, errors = inputs.detach().to(weight.dtype), errors.to(weight.dtype)
        back = ctx.norm.backward(errors, inputs, mean, scale, weight) if ctx.needs_input_grad[0] else None
        ctx.keep(ctx.norm.normalised(inputs, mean, scale), errors)
        return back, None, None, None, None


class _Norm(Protocol):
    """A normalisation: torch's own operators, and what they multiply with the weight."""

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]: ...

    def backward(self, errors: Tensor, inputs: Tensor, mean: Tensor, scale: Tensor, weight: Tensor) -> Tensor: ...

    def normalised(self, inputs: Tensor, mean: Tensor, scale: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _LayerNorm:
    shape: tuple[int, ...]
    eps: float

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(inputs, self.shape, weight, bias, self.eps)

    def backward(self, errors: Tensor, inputs: Tensor, mean: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        back: Tensor = torch.ops.aten.native_layer_norm_backward(
            errors, inputs, self.shape, mean, scale, weight, None, [True, False, False]
        )[0]
        return back

    def normalised(self, inputs: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        return (inputs - mean).mul_(scale)


@dataclass(frozen=True, slots=True)
class _GroupNorm:
    groups: int
    eps: float

    def forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        inputs = inputs.contiguous()
        return torch.native_group_norm(inputs, weight, bias, *_sizes(inputs), self.groups, self.eps)

    def backward(self, errors: Tensor, inputs: Tensor, mean: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        back: Tensor = torch.ops.aten.native_group_norm_backward(
            errors.contiguous(),
            inputs.contiguous(),
            mean,
            scale,
            weight,
            *_sizes(inputs),
            self.groups,
            [True, False, False],
        )[0]
        return back

    def normalised(self, inputs: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        grouped = inputs.reshape(len(inputs), self.groups, -1)
        return (grouped - mean[:, :, None]).mul_(scale[:, :, None]).view(inputs.shape)


def _sizes(inputs: Tensor) -> tuple[int, int, int]:
    """Rows, channels, positions."""
    rows, channels = inputs.shape[:2]
    return rows, channels, inputs.numel() // (rows * channels)


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    outputs: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return outputs


def _run_of(layer: Layer, tape: Tape) -> Callable[[Tensor], Tensor]:
    """What takes the place of the layer's `forward`."""
    match layer.module:
        case nn.Linear() as module:
            return partial(_run_linear, layer, module, tape)
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d() as module:
            return partial(_run_conv, layer, module, tape)
        case nn.Embedding() as module if layer.places.weight is not None:
            return partial(_run_embedding, layer, module, layer.places.weight, tape)
        case nn.LayerNorm() as module:
            return partial(_run_layer_norm, layer, module, tape)
        case nn.GroupNorm() as module:
            return partial(_run_group_norm, layer, module, tape)
        case other:
            raise LocalProtocolError(f"layer {layer.name!r} of type {type(other).__name__} has no way to be run")


def _run_linear(layer: Layer, module: nn.Linear, tape: Tape, inputs: Tensor) -> Tensor:
    tape.meet(layer, inputs)

    def keep(inputs: Tensor, errors: Tensor) -> None:
        rows = tape.rows
        positions = inputs.numel() // (rows * inputs.shape[-1])
        tape.uses[layer.name] = Use(1, inputs.shape[-1], errors.shape[-1], positions)
        if positions == 1:
            tape.kept.append(Outer(inputs.reshape(rows, -1), errors.reshape(rows, -1), layer.places))
            return
        inputs = inputs.reshape(rows, 1, -1, inputs.shape[-1])
        errors = errors.reshape(rows, 1, -1, errors.shape[-1])
        tape.kept.extend(kept_positions(inputs, errors, layer.places, tape.buffers, ghost=layer.ghost))

    return _apply(_LinearPass, inputs, module.weight, module.bias, keep)


def _run_conv(layer: Layer, module: _Conv, tape: Tape, inputs: Tensor) -> Tensor:
    tape.meet(layer, inputs, 2 + len(module.kernel_size))
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        inputs = functional.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)  # noqa: SLF001 - torch names it nowhere else
        padding: tuple[int, ...] = (0,) * len(module.kernel_size)
    else:
        padding = module.padding

    def keep(inputs: Tensor, errors: Tensor) -> None:
        rows, groups = len(inputs), module.groups
        padded = functional.pad(inputs.float(), _both_sides(padding))
        patches = _patches(layer, module, tape, padded).view(rows, groups, -1, errors[0, 0].numel())
        errors = errors.reshape(rows, groups, -1, patches.shape[3])
        _, _, width, positions = patches.shape
        tape.uses[layer.name] = Use(groups, width, errors.shape[2], positions, groups * width * positions)
        tape.kept.extend(kept_positions(patches.mT, errors.mT, layer.places, tape.buffers, ghost=layer.ghost))

    still = (0,) * len(module.kernel_size)
    settings = (module.stride, padding, module.dilation, False, still, module.groups)
    return _apply(_ConvPass, inputs, module.weight, module.bias, settings, keep)


def _both_sides(padding: Sequence[int]) -> list[int]:
    return [each for size in reversed(padding) for each in (size, size)]


def _patches(layer: Layer, module: _Conv, tape: Tape, padded: Tensor) -> Tensor:
    """What each output sees: [rows, channels * kernel, positions], one copy of overlapping views."""
    rows, channels, *sizes = padded.shape
    first, second, *steps = padded.stride()
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    spots = [
        (size - hole * (width - 1) - 1) // pace + 1
        for size, width, hole, pace in zip(sizes, kernel, dilation, stride, strict=True)
    ]
    within = [step * hole for step, hole in zip(steps, dilation, strict=True)]
    across = [step * pace for step, pace in zip(steps, stride, strict=True)]
    shape = (rows, channels, *kernel, *spots)
    seen = tape.buffers.of("patches", layer.name, shape, padded)
    seen.copy_(padded.as_strided(shape, (first, second, *within, *across)))
    return seen.view(rows, -1, torch.Size(spots).numel())


def _run_embedding(layer: Layer, module: nn.Embedding, weight: int, tape: Tape, tokens: Tensor) -> Tensor:
    tape.meet(layer, tokens)

    def keep(tokens: Tensor, errors: Tensor) -> None:
        tape.kept.append(Sparse(tokens, errors, weight, module.num_embeddings, module.padding_idx))

    return _apply(_EmbeddingPass, tokens, module.weight, keep)


def _run_layer_norm(layer: Layer, module: nn.LayerNorm, tape: Tape, inputs: Tensor) -> Tensor:
    tape.meet(layer, inputs)

    def keep(normalised: Tensor, errors: Tensor) -> None:
        shape = (tape.rows, -1, torch.Size(module.normalized_shape).numel())
        _keep_affine(layer, tape, normalised.reshape(shape), errors.reshape(shape), 1)

    norm = _LayerNorm(tuple(module.normalized_shape), module.eps)
    return _apply(_NormPass, inputs, module.weight, module.bias, norm, keep)


def _run_group_norm(layer: Layer, module: nn.GroupNorm, tape: Tape, inputs: Tensor) -> Tensor:
    tape.meet(layer, inputs)

    def keep(normalised: Tensor, errors: Tensor) -> None:
        shape = (tape.rows, module.num_channels, -1)
        _keep_affine(layer, tape, normalised.reshape(shape), errors.reshape(shape), 2)

    return _apply(_NormPass, inputs, module.weight, module.bias, _GroupNorm(module.num_groups, module.eps), keep)


def _keep_affine(layer: Layer, tape: Tape, normalised: Tensor, errors: Tensor, positions: int) -> None:
    """Keeps the sums over a record's positions, which are one dimension; `normalised` may be overwritten."""
    gradients = {}
    if layer.places.weight is not None:
        gradients[layer.places.weight] = normalised.mul_(errors).sum(positions)
    if layer.places.bias is not None:
        gradients[layer.places.bias] = errors.sum(positions)
    tape.kept.append(Explicit(gradients))
