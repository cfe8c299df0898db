"""The interface of a model file, and the way between a torch module and its flat float32 vector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from federation import plugins
from federation.errors import ConfigurationError, RemoteProtocolError, WhoActs
from federation.vector import Layout

if TYPE_CHECKING:
    import torch

    from federation.job import ModelSettings
    from federation.vector import F32

__all__ = ["ModelFile", "build", "load_state", "state_vector"]


class ModelFile(Protocol):
    """What a file in `tasks/models/` offers, beside `Settings` (below `ModelSettings`, its `name` the file's name)."""

    def build(self, settings: ModelSettings, features: int, outputs: int, seed: int) -> torch.nn.Module:
        """A module from inputs [rows, features] to outputs [rows, outputs], float32 on the CPU.

        Equal arguments give equal weights, and torch's global generator stays as it was.
        """
        ...


def build(settings: ModelSettings, features: int, outputs: int, seed: int) -> torch.nn.Module:
    """The untrained model that `settings` names; equal arguments give equal weights."""
    file: ModelFile = plugins.load("tasks.models", settings.name)  # the contract suite holds each file to it
    return file.build(settings, features, outputs, seed)


def state_vector(module: torch.nn.Module) -> tuple[Layout, F32]:
    """Layout and values of all parameters and buffers, in the module's order; a copy.

    Raises:
        ConfigurationError: A tensor is not float32, so a weighted mean over sites would mean nothing.
    """
    tensors = {name: tensor.numpy(force=True) for name, tensor in _state(module).items()}
    layout = Layout.of(tensors)
    return layout, layout.flatten(tensors)


def load_state(module: torch.nn.Module, layout: Layout, flat: F32) -> None:
    """Sets all parameters and buffers of `module` from `flat`; nothing changes when it does not fit.

    Raises:
        RemoteProtocolError: The layout or the length is another model's.
    """
    import torch

    state = _state(module)
    own = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if [(tensor.name, tensor.shape) for tensor in layout.tensors] != list(own.items()):
        theirs = {tensor.name: tensor.shape for tensor in layout.tensors}
        names = [*own, *theirs]
        first = next((name for name in names if own.get(name) != theirs.get(name)), "the order of its tensors")
        raise RemoteProtocolError(
            f"the model's tensors are not those this job's model has; the first difference is {first}",
            fix="use a model that was made for this job",
        )
    views = layout.views(flat)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(torch.from_numpy(np.array(views[name])))


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, sharing their memory with the module."""
    import torch

    state: dict[str, torch.Tensor] = module.state_dict()
    for name, tensor in state.items():
        if tensor.dtype != torch.float32:
            raise ConfigurationError(
                f"the model's tensor {name!r} is {str(tensor.dtype).removeprefix('torch.')}; "
                "only float32 can be averaged over sites",
                fix="use layers without counters: GroupNorm or LayerNorm instead of BatchNorm",
                who=WhoActs.DEVELOPERS,
            )
    return state
