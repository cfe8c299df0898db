"""A multi-layer perceptron: linear layers with ReLU between them, and dropout behind each hidden layer."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, Strict

from federation.errors import ConfigurationError
from federation.job import ModelSettings

if TYPE_CHECKING:
    import torch

__all__ = ["Settings", "build"]


_Width = Annotated[int, Field(ge=1, le=65536)]


class Settings(ModelSettings):
    """`hidden`: width of each hidden layer, first to last. `dropout`: share of hidden values that training drops."""

    name: Literal["mlp"]
    hidden: Annotated[tuple[_Width, ...], Strict(strict=False), Field(min_length=1, max_length=16)] = (32,)
    dropout: float = Field(default=0.0, ge=0, lt=1)


def build(settings: ModelSettings, features: int, outputs: int, seed: int) -> torch.nn.Module:
    """The perceptron; weights He-normal (He et al. 2015, eq. 10) from a generator of `seed`, biases zero."""
    import torch
    from torch import nn

    if not isinstance(settings, Settings):
        raise ConfigurationError(f"model.name: {settings.name!r} is not a perceptron", fix='use name = "mlp"')
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    widths = (features, *settings.hidden, outputs)
    for position, (before, after) in enumerate(pairwise(widths)):
        with torch.random.fork_rng(devices=[]):  # the layer's own start draws from the global generator
            linear = nn.Linear(before, after)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu", generator=generator)
        nn.init.zeros_(linear.bias)
        layers.append(linear)
        if position < len(settings.hidden):
            layers.append(nn.ReLU())
            if settings.dropout:
                layers.append(nn.Dropout(settings.dropout))
    return nn.Sequential(*layers)
