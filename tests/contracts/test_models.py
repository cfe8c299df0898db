"""What every model promises; a new file in `tasks/models/` is picked up by itself."""

import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch

from federation import plugins
from federation.job import ModelSettings
from federation.vector import from_safetensors, to_safetensors
from tasks.models import model

FEATURES, OUTPUTS = 5, 3


@pytest.fixture(params=plugins.names("tasks.models"))
def name(request: pytest.FixtureRequest) -> str:
    """Each model's name."""
    return str(request.param)


@pytest.fixture
def settings(name: str) -> ModelSettings:
    """Each model's settings with nothing chosen but the name."""
    chosen: ModelSettings = plugins.load("tasks.models", name).Settings(name=name)
    return chosen


@pytest.fixture
def module(settings: ModelSettings) -> torch.nn.Module:
    """Each model, untrained."""
    return model.build(settings, FEATURES, OUTPUTS, seed=3)


def test_its_file_offers_settings_of_its_own_name_and_documents_itself(name: str) -> None:
    """The file's name is the `name` that a job writes."""
    file = plugins.load("tasks.models", name)
    assert issubclass(file.Settings, ModelSettings)
    assert file.Settings.model_fields["name"].annotation.__args__ == (name,)
    assert all(inspect.getdoc(getattr(file, public)) for public in file.__all__)


def test_its_file_does_not_load_torch(name: str) -> None:
    """The coordinator reads a job's settings without torch."""
    program = f"import sys, tasks.models.{name}, tasks.models.model; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_outputs_are_finite_and_have_the_declared_shape(module: torch.nn.Module) -> None:
    """[rows, features] becomes [rows, outputs], for no rows as well."""
    module.eval()
    outputs = module(torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(0)))
    assert outputs.shape == (4, OUTPUTS)
    assert torch.isfinite(outputs).all()
    assert module(torch.empty(0, FEATURES)).shape == (0, OUTPUTS)


def test_a_rows_output_does_not_depend_on_the_other_rows(module: torch.nn.Module) -> None:
    """A prediction for one row is the same alone and in company."""
    module.eval()
    rows = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(module(rows)[:1], module(rows[:1]))


def test_its_state_survives_the_way_through_a_file(module: torch.nn.Module, settings: ModelSettings) -> None:
    """All parameters and buffers are float32 and travel as safetensors, bit for bit."""
    layout, flat = model.state_vector(module)
    again, read = from_safetensors(to_safetensors(layout, flat))
    other = model.build(settings, FEATURES, OUTPUTS, seed=4)
    model.load_state(other, again, read)
    assert model.state_vector(other)[0] == layout
    assert model.state_vector(other)[1].tobytes() == flat.tobytes()


def test_the_seed_alone_decides_the_start(settings: ModelSettings, module: torch.nn.Module) -> None:
    """Equal seeds give equal weights, and torch's global generator stays as it was."""
    state = torch.random.get_rng_state()
    again = model.build(settings, FEATURES, OUTPUTS, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    np.testing.assert_array_equal(model.state_vector(again)[1], model.state_vector(module)[1])


def test_every_parameter_learns(module: torch.nn.Module) -> None:
    """Each parameter takes part in the output, so each has a gradient."""
    module(torch.ones(2, FEATURES)).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
