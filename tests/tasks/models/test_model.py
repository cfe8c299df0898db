import numpy as np
import pytest
import torch

from federation.errors import ConfigurationError, RemoteProtocolError
from federation.vector import Layout, TensorSpec
from tasks.models import model
from tasks.models.mlp import Settings


def perceptron(seed: int = 0) -> torch.nn.Module:
    """A perceptron of four inputs and two outputs."""
    return model.build(Settings(name="mlp", hidden=(3,)), 4, 2, seed)


def test_a_model_survives_the_way_through_its_vector() -> None:
    """Another module takes all weights, buffers included, bit for bit."""
    source = torch.nn.Sequential(perceptron(), torch.nn.GroupNorm(1, 2))
    source.register_buffer("offset", torch.arange(3.0))
    target = torch.nn.Sequential(perceptron(seed=1), torch.nn.GroupNorm(1, 2))
    target.register_buffer("offset", torch.zeros(3))
    layout, flat = model.state_vector(source)
    model.load_state(target, layout, flat)
    again, same = model.state_vector(target)
    assert again == layout
    assert same.tobytes() == flat.tobytes()


def test_the_vector_is_a_copy() -> None:
    """Training on does not change a vector that was taken before."""
    module = perceptron()
    _, flat = model.state_vector(module)
    before = flat.copy()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    np.testing.assert_array_equal(flat, before)


def test_counters_are_refused() -> None:
    """A number of batches cannot be averaged; the way out is named."""
    with pytest.raises(ConfigurationError) as refused:
        model.state_vector(torch.nn.BatchNorm1d(2))
    assert "the model's tensor 'num_batches_tracked' is int64; only float32 can be averaged" in str(refused.value)
    assert "GroupNorm or LayerNorm instead of BatchNorm" in str(refused.value)


@pytest.mark.parametrize("change", ["shape", "name", "missing", "order"])
def test_another_models_vector_is_refused_and_changes_nothing(change: str) -> None:
    """Names, shapes and order must all agree."""
    module = perceptron()
    layout, flat = model.state_vector(module)
    first, *others = layout.tensors
    tensors = {
        "shape": (TensorSpec(first.name, (first.size,)), *others),
        "name": (TensorSpec("other", first.shape), *others),
        "missing": tuple(others),
        "order": (*others, first),
    }[change]
    with pytest.raises(RemoteProtocolError, match="not those this job's model has; the first difference is"):
        model.load_state(module, Layout(tensors), np.zeros(Layout(tensors).size, np.float32))
    np.testing.assert_array_equal(model.state_vector(module)[1], flat)


def test_a_vector_of_another_length_is_refused() -> None:
    """The layout may be right and the values too few."""
    module = perceptron()
    layout, flat = model.state_vector(module)
    with pytest.raises(RemoteProtocolError, match="cannot be a model of"):
        model.load_state(module, layout, flat[:-1])
