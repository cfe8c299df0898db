import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from client.training.private import plan as planning
from client.training.private.losses import Loss, Precision
from client.training.private.plan import EngineName, Plan, choose
from client.training.private.probe import Example, require_independent, require_right
from client.training.private.repair import repaired
from client.training.private.sums import gamma_of
from federation.errors import ConfigurationError

Zoo = Callable[[int], Any]


class Last(nn.Module):
    """The last position of a recurrent layer, and a linear one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = layer, nn.Linear(5, 3)

    def forward(self, values: Tensor) -> Tensor:
        """Values [rows, 4, 3] to logits."""
        logits: Tensor = self.head(self.cell(values)[0][:, -1])
        return logits


class Attention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, values: Tensor) -> Tensor:
        """Values [rows, positions, 4] to logits."""
        logits: Tensor = self.head(self.attend(values, values, values, need_weights=False)[0].mean(1))
        return logits


def example(*shape: int) -> Example:
    """Random inputs and labels."""
    return Example(torch.randn(shape), torch.arange(shape[0]) % 3)


@pytest.mark.parametrize("number", range(5))
def test_models_of_supported_layers_get_the_one_backward_engine(number: int, animal: Zoo, cross_entropy: Loss) -> None:
    """The plan names the engine and why, and its gamma is that of its records."""
    found = animal(number)
    inputs, labels = found.inputs.repeat(3, *(1,) * (found.inputs.dim() - 1)), found.labels.repeat(3)

    plan = choose(found.module, cross_entropy, Example(inputs, labels), expected=256)

    assert plan.engine is EngineName.ONE_BACKWARD
    assert plan.reason.startswith("every layer is supported: one backward pass")
    assert plan.values == sum(each.numel() for each in found.trained)
    assert plan.most == 256 + 6 * 16 + 16
    assert plan.gamma == gamma_of(plan.most)
    assert plan.rows % 16 == 0


@pytest.mark.parametrize(
    ("module", "shape", "name"),
    [
        (Attention(), (3, 2, 4), "'attend': MultiheadAttention"),
        (Last(nn.LSTM(3, 5, batch_first=True)), (3, 4, 3), "'cell': LSTM"),
        (repaired(Last(nn.GRU(3, 5, batch_first=True))), (3, 4, 3), "'cell.*DPGRU|RNNLinear"),
    ],
)
def test_other_layers_get_vmap_and_the_reason_names_them(
    module: nn.Module, shape: tuple[int, ...], name: str, cross_entropy: Loss
) -> None:
    """Attention, LSTM and Opacus' GRU fall back to vmap; which layer it is for stands in the reason."""
    plan = choose(module, cross_entropy, example(*shape), expected=64)

    assert plan.engine is EngineName.VMAP
    assert "one-backward cannot: layer " in plan.reason
    assert re.search(name, plan.reason)


def test_what_vmap_does_not_know_gets_opacus_hooks(monkeypatch: pytest.MonkeyPatch, cross_entropy: Loss) -> None:
    """Where vmap fails too, Opacus' hooks are taken, and both reasons are told."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no batching rule")

    monkeypatch.setattr("client.training.private.fallback.vmap", fails)
    module = repaired(Last(nn.GRU(3, 5, batch_first=True)))

    plan = choose(module, cross_entropy, example(3, 4, 3), expected=64)

    assert plan.engine is EngineName.HOOKS
    assert "one-backward cannot: " in plan.reason
    assert plan.reason.endswith("vmap cannot: RuntimeError: no batching rule")
    engine = plan.engine_of(module, cross_entropy, Precision())
    require_right(engine, module, cross_entropy, example(3, 4, 3), training=True)


class Branching(nn.Module):
    """A model that asks its numbers which way to go, with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, values: Tensor) -> Tensor:
        """One of two products."""
        return values @ self.weight if float(values.sum()) > 0 else values @ self.weight.T


def test_a_model_that_no_engine_knows_is_refused_with_every_reason(
    monkeypatch: pytest.MonkeyPatch, cross_entropy: Loss
) -> None:
    """All three engines say why they cannot."""
    monkeypatch.setattr(planning, "require_independent", lambda *_: None)

    with pytest.raises(
        ConfigurationError, match=r"(?s)no engine computes.*one-backward cannot.*vmap cannot.*opacus-hooks cannot"
    ):
        choose(Branching(), cross_entropy, example(3, 3), expected=64)


class Mixing(nn.Module):
    """A model that subtracts its batch's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, values: Tensor) -> Tensor:
        """Centred logits."""
        logits: Tensor = self.inner(values - values.mean(0))
        return logits


class Remembering(nn.Module):
    """A model that keeps a running mean without being BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, values: Tensor) -> Tensor:
        """Logits; the mean is remembered."""
        self.seen += values.detach().mean(0)
        logits: Tensor = self.inner(values)
        return logits


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Mixing(), "output for one record changes with the other records.*from its own input alone"),
        (Remembering(), "changes the buffer 'seen', which would keep statistics.*use layers that keep none"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "(?s)cannot be trained privately.*BatchNorm1d"),
        (nn.Sequential(nn.Tanh()), "no parameters to train"),
    ],
)
def test_models_that_mix_records_or_keep_statistics_are_refused(
    module: nn.Module, message: str, cross_entropy: Loss
) -> None:
    """Whatever would carry one record into another's gradient, or past the noise, is found on the example."""
    with pytest.raises(ConfigurationError, match=message):
        choose(module, cross_entropy, example(3, 3), expected=64)

    assert all(not each.any() for name, each in module.named_buffers() if name == "seen")


def test_dropout_is_no_mixing(cross_entropy: Loss) -> None:
    """A model with dropout is accepted, and torch's generator stays as it was."""
    module, batch = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3)), example(3, 3)
    state = torch.get_rng_state()

    assert choose(module, cross_entropy, batch, expected=64).engine is EngineName.ONE_BACKWARD
    require_independent(module, batch)
    assert module.training
    assert torch.equal(torch.get_rng_state(), state)


def test_an_engine_that_is_wrong_is_found(cross_entropy: Loss) -> None:
    """An engine whose rows are not each record's own gradient is refused before it trains anything."""

    class Shifted:
        """The right gradients, at the wrong records."""

        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def gradients(self, inputs: Tensor, labels: Tensor) -> Any:
            """Those of the records in another order."""
            return self._engine.gradients(inputs.flip(0), labels.flip(0))

    module = nn.Sequential(nn.Linear(3, 3))
    right = Plan(EngineName.VMAP, 8, 8, 12, "").engine_of(module, cross_entropy, Precision())

    require_right(right, module, cross_entropy, example(3, 3))
    with pytest.raises(ConfigurationError, match="gradient of a single record is not the record's own"):
        require_right(Shifted(right), module, cross_entropy, example(3, 3))


def test_an_example_of_one_row_shows_nothing() -> None:
    """Two rows at least, and a label for each."""
    with pytest.raises(ConfigurationError, match="1 inputs with 1 labels are no example"):
        example(1, 3)
    with pytest.raises(ConfigurationError, match="3 inputs with 2 labels"):
        Example(torch.zeros(3, 2), torch.zeros(2))


def test_memory_bounds_the_physical_batch_and_makes_ghosts(cross_entropy: Loss) -> None:
    """Less memory gives smaller physical batches; layers that do not fit are told, and not kept."""
    module = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 3), nn.Flatten(1), nn.Linear(120, 3))
    batch = Example(torch.randn(3, 40, 64), torch.zeros(3, dtype=torch.long))
    kept = 4 * (64 * 96 + 96 * 3)

    large = choose(module, cross_entropy, batch, expected=256, memory=400 * kept)
    small = choose(module, cross_entropy, batch, expected=256, memory=20 * kept)
    none = choose(module, cross_entropy, batch, expected=256, memory=4 * kept)
    whole = choose(module, cross_entropy, batch, expected=256, memory=20 * kept, whole_rows=True)

    assert (large.rows, small.rows) == (400, 16)
    assert not small.ghosts
    assert none.ghosts == {"0"}
    assert "too large to be kept, so by inner products: 0" in none.reason
    assert whole.rows <= 16
    assert not whole.ghosts


def test_wide_layers_of_few_positions_are_ghosts(cross_entropy: Loss) -> None:
    """Where reading kept gradients would cost more than inner products do, nothing is kept."""
    module = nn.Sequential(nn.Linear(600, 600), nn.Flatten(1), nn.Linear(1200, 3))
    batch = Example(torch.randn(3, 2, 600), torch.zeros(3, dtype=torch.long))

    assert choose(module, cross_entropy, batch, expected=16).ghosts == {"0"}


def test_physical_batches_fit_the_memory() -> None:
    """As many rows as fit, in multiples of sixteen where there are as many, and one at least."""
    assert planning._rows(4, 4 * 100) == 96
    assert planning._rows(4, 4 * 16) == 16
    assert planning._rows(4, 4 * 15) == 15
    assert planning._rows(4, 1) == 1
    assert planning._rows(0, 1 << 20) == 512
