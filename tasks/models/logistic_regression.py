"""Logistic regression: one linear layer that starts at zero; linear regression when the task's loss is squared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from federation.job import ModelSettings

if TYPE_CHECKING:
    import torch

__all__ = ["Settings", "build"]


class Settings(ModelSettings):
    """No settings: the problem is convex and the start does not matter."""

    name: Literal["logistic_regression"]


def build(settings: ModelSettings, features: int, outputs: int, seed: int) -> torch.nn.Module:  # noqa: ARG001 - interface
    """A linear layer of zeros: every class is equally likely before the first round."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):  # the layer's own start draws from the global generator
        layer = nn.Linear(features, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
