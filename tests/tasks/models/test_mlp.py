import numpy as np
import pytest
import torch
from pydantic import ValidationError

from federation.errors import ConfigurationError
from federation.job import ModelSettings
from tasks.models import model
from tasks.models.mlp import Settings, build


def test_hidden_layers_have_the_widths_of_the_settings() -> None:
    """Linear and ReLU alternate; dropout stands behind each hidden layer only where it is asked for."""
    kinds = [
        type(layer).__name__ for layer in build(Settings(name="mlp", hidden=(8, 4), dropout=0.5), 13, 2, 0).children()
    ]
    assert kinds == ["Linear", "ReLU", "Dropout", "Linear", "ReLU", "Dropout", "Linear"]
    layout, _ = model.state_vector(build(Settings(name="mlp", hidden=(8, 4)), 13, 2, 0))
    assert [tensor.shape for tensor in layout.tensors] == [(8, 13), (8,), (4, 8), (4,), (2, 4), (2,)]


def test_weights_follow_the_seed_and_have_he_variance() -> None:
    """The seed alone decides the start; the first layer's variance is two over its inputs."""
    settings = Settings(name="mlp", hidden=(400,))
    first, again, other = (model.state_vector(build(settings, 100, 1, seed))[1] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first[: 400 * 100].var() == pytest.approx(2 / 100, rel=0.05)


@pytest.mark.parametrize("wrong", [{"hidden": ()}, {"hidden": (0,)}, {"dropout": 1.0}, {"hiden": (3,)}])
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    """No layer, an empty layer, dropping everything, an unknown key."""
    with pytest.raises(ValidationError):
        Settings.model_validate({"name": "mlp", **wrong})


def test_another_models_settings_are_refused() -> None:
    """A perceptron is not built from settings that say nothing about it."""
    with pytest.raises(ConfigurationError, match="'tree' is not a perceptron"):
        build(ModelSettings(name="tree"), 3, 1, 0)


def test_it_learns_what_a_line_cannot() -> None:
    """A few hundred steps of plain gradient descent separate exclusive-or."""
    module = build(Settings(name="mlp", hidden=(16,)), 2, 1, seed=0)
    inputs = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0])
    for _ in range(500):
        module.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(module(inputs)[:, 0], labels)
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.5)
    assert ((module(inputs)[:, 0] > 0) == (labels > 0)).all()
