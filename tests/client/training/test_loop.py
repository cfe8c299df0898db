import subprocess
import sys

import numpy as np
import pytest
import torch

from client.training import loop
from client.training.device import DevicePlan
from federation.errors import DataContractError
from federation.job import Training
from tasks.models import mlp, model
from tasks.task import Loss

CPU = DevicePlan("cpu", None, "test")
ROWS = 50


def data(classes: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose label follows from their first value."""
    inputs = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] > 0).long() * (classes - 1)


def fit(
    settings: Training, module: torch.nn.Module | None = None, *, proximal: float = 0.0, seed: int = 1
) -> np.ndarray:
    """The weights after training a line, or `module`, on the rows."""
    chosen = module if module is not None else line()
    loop.train(chosen, *data(), Loss.LOGISTIC, settings, proximal=proximal, seed=seed, plan=CPU)
    return model.state_vector(chosen)[1]


def line(outputs: int = 1) -> torch.nn.Module:
    """A linear model of zeros."""
    module = torch.nn.Linear(3, outputs)
    torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(module.bias)
    return module


def test_training_lowers_the_loss_and_reports_it() -> None:
    """The reported loss is the last epoch's mean."""
    module = line()
    first = loop.train(module, *data(), Loss.LOGISTIC, Training(), proximal=0, seed=1, plan=CPU)
    later = loop.train(module, *data(), Loss.LOGISTIC, Training(epochs=20), proximal=0, seed=1, plan=CPU)
    assert later < first < np.log(2) + 1e-6


def test_one_full_batch_is_one_gradient_step() -> None:
    """With all rows in one batch the update is minus rate times the mean gradient, computed here by hand."""
    inputs, labels = data()
    found = fit(Training(batch_size=ROWS, learning_rate=0.5))
    error = 0.5 - labels.float()
    expected = [*(-0.5 * (error[:, None] * inputs).mean(0)), -0.5 * error.mean()]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("loss", "outputs", "classes"), [(Loss.CROSS_ENTROPY, 3, 3), (Loss.SQUARED, 1, 2)])
def test_every_loss_trains(loss: Loss, outputs: int, classes: int) -> None:
    """Classes and values learn as binary labels do."""
    inputs, labels = data(classes)
    target = labels.float() if loss is Loss.SQUARED else labels
    module = line(outputs)
    before = loop.train(module, inputs, target, loss, Training(), proximal=0, seed=1, plan=CPU)
    after = loop.train(module, inputs, target, loss, Training(epochs=30), proximal=0, seed=1, plan=CPU)
    assert after < before


def test_the_seed_decides_the_order_of_rows_and_dropout_and_nothing_else_changes() -> None:
    """Equal seeds give equal weights; torch's global generator stays as it was."""
    settings = mlp.Settings(name="mlp", hidden=(8,), dropout=0.5)
    state = torch.random.get_rng_state()
    runs = [fit(Training(batch_size=8), mlp.build(settings, 3, 1, 0), seed=seed) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_sites_and_rounds_have_unrelated_seeds() -> None:
    """Seed, round and site all count, and none runs into another."""
    seeds = {
        loop.row_seed(*key) for key in ((0, 1, "a"), (1, 1, "a"), (0, 2, "a"), (0, 1, "b"), (0, 11, "a"), (0, 1, "1a"))
    }
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_an_epoch_visits_every_row_once() -> None:
    """Each epoch is a new order of all rows; the last batch may be short."""
    batches = list(
        loop._batches(50, Training(epochs=2, batch_size=16), torch.Generator().manual_seed(0), torch.device("cpu"))
    )
    assert [len(chosen) for chosen, _ in batches] == [16, 16, 16, 2] * 2
    assert [first for _, first in batches] == [True, False, False, False] * 2
    epochs = [torch.cat([chosen for chosen, _ in batches[k : k + 4]]).tolist() for k in (0, 4)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(("steps", "expected"), [(1, 1), (4, 4), (9, 9)])
def test_steps_count_batches_instead_of_epochs(steps: int, expected: int) -> None:
    """A number of steps may end within an epoch, or need several."""
    settings = Training(epochs=7, steps=steps, batch_size=16)
    generator = torch.Generator().manual_seed(0)
    assert len(list(loop._batches(50, settings, generator, torch.device("cpu")))) == expected


def test_the_proximal_term_adds_its_gradient() -> None:
    """Two full-batch steps under mu: the second gradient is pulled back by mu times the way gone."""
    inputs, labels = data()
    module = line()
    rate, mu = 0.5, 2.0
    weights = torch.zeros(4)
    rows = torch.cat([inputs, torch.ones(ROWS, 1)], dim=1)
    for _ in range(2):
        gradient = rows.T @ (torch.sigmoid(rows @ weights) - labels.float()) / ROWS
        weights = weights - rate * (gradient + mu * weights)
    found = fit(Training(epochs=2, batch_size=ROWS, learning_rate=rate), module, proximal=mu)
    np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-7)


def test_a_strong_proximal_term_keeps_the_model_near_its_start() -> None:
    """The larger mu, the shorter the way."""
    lengths = [np.linalg.norm(fit(Training(epochs=20), proximal=mu)) for mu in (0.0, 1.0, 9.0)]
    assert lengths == sorted(lengths, reverse=True)


def test_a_loss_that_is_not_finite_is_refused() -> None:
    """Diverged training says so and names the remedy."""
    inputs, labels = data()
    with pytest.raises(DataContractError, match="the training loss is not finite") as refused:
        loop.train(
            line(), inputs * 1e30, labels.float(), Loss.SQUARED, Training(epochs=5), proximal=0, seed=1, plan=CPU
        )
    assert "a smaller learning_rate" in refused.value.fix


def test_no_rows_are_refused() -> None:
    """There is nothing to learn from."""
    with pytest.raises(DataContractError, match="no rows are left for training"):
        loop.train(line(), torch.empty(0, 3), torch.empty(0), Loss.SQUARED, Training(), proximal=0, seed=1, plan=CPU)


def test_inference_drops_nothing_and_works_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation mode, all rows in their order, however many at once."""
    module = mlp.build(mlp.Settings(name="mlp", dropout=0.5), 3, 2, 0)
    inputs, _ = data()
    whole = loop.infer(module, inputs)
    monkeypatch.setattr(loop, "_INFERENCE_ROWS", 7)
    np.testing.assert_allclose(loop.infer(module, inputs), whole, rtol=1e-5)
    assert whole.shape == (ROWS, 2)
    assert loop.infer(module, inputs[:0]).shape == (0, 2)


def test_outputs_that_are_not_finite_are_refused() -> None:
    """A diverged model is told as such, not as metrics."""
    module = line()
    torch.nn.init.constant_(module.weight, 1e38)  # type: ignore[arg-type]  # a linear layer's weight is a tensor
    with pytest.raises(DataContractError, match="the model's outputs are not finite"):
        loop.infer(module, data()[0] * 1e10)


def test_bfloat16_trains_the_float32_weights() -> None:
    """Autocast changes the arithmetic inside; weights stay float32 and learn."""
    module = line()
    plan = DevicePlan("cpu", "bfloat16", "test")
    loop.train(module, *data(), Loss.LOGISTIC, Training(epochs=5), proximal=0, seed=1, plan=plan)
    assert np.abs(model.state_vector(module)[1]).max() > 0.01


def test_training_does_not_load_torchs_compiler() -> None:
    """Its import costs a fresh trainer more than all rounds of a small model."""
    program = """
import sys, torch
from client.training import loop
from client.training.device import plan
from federation.job import Training
from tasks.task import Loss
for name in ("sgd", "adam", "adamw"):
    loop.train(torch.nn.Linear(3, 1), torch.ones(9, 3), torch.ones(9), Loss.LOGISTIC, Training(optimiser=name),
               proximal=0.1, seed=1, plan=plan("auto"))
print("torch._dynamo" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
