"""What of a model cannot be trained privately, by the layer's dotted name, and the same model without it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from client.training.private.fallback import require_opacus
from federation.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Problem", "problems", "repaired", "require_private"]

_GROUPS = 32
"""Wu & He 2018, "Group Normalization", table 3; `opacus.validators` has the same."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A layer that no engine can train privately: its dotted name, why, and what `repaired` puts in its place."""

    layer: str
    why: str
    repair: str

    def __str__(self) -> str:
        return f"layer {self.layer!r}: {self.why}; {self.repair}"


def problems(model: nn.Module) -> list[Problem]:
    """Every layer that mixes records, keeps statistics of them, or has no per-record gradient; none, if all is well."""
    return [Problem(name, *found) for name, each in model.named_modules() if (found := _problem(each)) is not None]


def require_private(model: nn.Module) -> None:
    """Accepts a model without problems.

    Raises:
        ConfigurationError: It has some: all are named.
    """
    found = problems(model)
    if found:
        raise ConfigurationError(
            "this model cannot be trained privately:\n" + "\n".join(map(str, found)),
            fix="set privacy.repair = true, or build the model without these layers",
        )


def repaired(model: nn.Module) -> nn.Module:
    """A copy of `model` without problems: equal calls give equal copies, and other layers keep their weights.

    BatchNorm becomes GroupNorm of gcd(32, channels) groups, as Opacus' ModuleValidator has it, and keeps its weight and
    bias. BatchNorm1d becomes GroupNorm of one group: on inputs [rows, channels] groups of one channel would all be 0,
    and groups of two all be 1 and -1. GRU and RNN become Opacus' layers of the same parameters.

    Raises:
        ConfigurationError: Opacus is needed and not installed, or a layer cannot be repaired.
    """
    copied = copy.deepcopy(model)
    if _problem(copied) is not None:
        return _replacement("", copied)
    for name, each in list(copied.named_modules()):
        if _problem(each) is not None:
            parent, _, own = name.rpartition(".")
            setattr(copied.get_submodule(parent), own, _replacement(name, each))
    return copied


def _problem(layer: nn.Module) -> tuple[str, str] | None:
    kind = type(layer).__name__
    if isinstance(layer, _BatchNorm):
        return f"{kind} normalises each record by the others of its batch", "use GroupNorm or LayerNorm"
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        return f"{kind} keeps running statistics of the records", "set track_running_stats = False"
    if isinstance(layer, nn.RNNBase) and not isinstance(layer, nn.LSTM):
        return (
            f"no engine finds the per-record gradients of torch's {kind}",
            "use LSTM, or Opacus' DPGRU or DPRNN",
        )
    return None


def _replacement(name: str, layer: nn.Module) -> nn.Module:
    if isinstance(layer, _BatchNorm):
        return _group_norm(layer)
    if isinstance(layer, _InstanceNorm):
        return _without_statistics(layer)
    if isinstance(layer, nn.GRU | nn.RNN):
        return _private_recurrent(layer)
    raise ConfigurationError(f"layer {name!r}: {type(layer).__name__} cannot be repaired", fix="use LSTM")


def _group_norm(layer: _BatchNorm) -> nn.GroupNorm:
    groups = 1 if isinstance(layer, nn.BatchNorm1d) else gcd(_GROUPS, layer.num_features)
    norm = nn.GroupNorm(groups, layer.num_features, eps=layer.eps, affine=layer.affine)
    if layer.affine:
        norm.weight, norm.bias = layer.weight, layer.bias
    return norm.train(layer.training)


def _without_statistics(layer: _InstanceNorm) -> _InstanceNorm:
    layer.track_running_stats = False
    for buffer in ("running_mean", "running_var", "num_batches_tracked"):
        layer.register_buffer(buffer, None)
    return layer


def _private_recurrent(layer: nn.GRU | nn.RNN) -> nn.Module:
    layers = require_opacus().layers
    make: Callable[..., Any] = layers.DPGRU if isinstance(layer, nn.GRU) else layers.DPRNN
    with torch.random.fork_rng(devices=[]):  # the weights that it starts with are replaced
        made: nn.Module = make(
            input_size=layer.input_size,
            hidden_size=layer.hidden_size,
            num_layers=layer.num_layers,
            bias=layer.bias,
            batch_first=layer.batch_first,
            dropout=layer.dropout,
            bidirectional=layer.bidirectional,
            **({} if isinstance(layer, nn.GRU) else {"nonlinearity": layer.nonlinearity}),
        )
    made.load_state_dict(layer.state_dict())
    return made.to(next(layer.parameters()).device).train(layer.training)
