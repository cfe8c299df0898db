import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from client.training.private.layers import layers_of, unsupported
from client.training.private.losses import Loss, Precision
from client.training.private.one_backward import OneBackward
from client.training.private.sums import Total, factors_of
from federation.errors import ConfigurationError

Zoo = Callable[[int], Any]
CPU = torch.device("cpu")


def reference(module: nn.Module, loss: Loss, inputs: Tensor, labels: Tensor) -> Tensor:
    """Per-record gradients [rows, values] by `torch.func` in float64."""
    named = {name: each.detach() for name, each in module.named_parameters()}
    trained = {name: each for name, each in named.items() if module.get_parameter(name).requires_grad}

    def of(weights: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        return loss(functional_call(module, named | weights, (record[None],)), label[None])[0]

    found = vmap(grad(of), in_dims=(None, 0, 0))(trained, inputs, labels)
    return torch.cat([each.flatten(1) for each in found.values()], dim=1)


def double(values: Tensor) -> Tensor:
    """Float64, unless they are tokens."""
    return values.double() if values.is_floating_point() else values


def double_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy that does not round to float32."""
    return functional.cross_entropy(outputs, labels, reduction="none")


def ghosts(module: nn.Module) -> frozenset[str]:
    """Every layer's name."""
    return frozenset(layer.name for layer in layers_of(module))


@pytest.mark.parametrize("number", range(20))
def test_gradients_norms_and_sums_are_those_of_vmap(number: int, animal: Zoo) -> None:
    """Gradients, norms and clipped sum are `torch.func`'s float64 ones to 1e-6, kept or by inner products."""
    found = animal(number)
    module, inputs = found.module.double(), double(found.inputs)
    expected = reference(module, double_loss, inputs, found.labels)
    clip = float(expected.norm(dim=1).median())

    for names in (frozenset[str](), ghosts(module)):
        gradients = OneBackward(module, double_loss, Precision(), names).gradients(inputs, found.labels)
        norms = gradients.norms()
        assert torch.linalg.vector_norm(gradients.rows() - expected) <= 1e-6 * torch.linalg.vector_norm(expected)
        assert torch.allclose(norms, expected.norm(dim=1), rtol=1e-6)
        factors = factors_of(norms, clip, 1.0)
        total = Total([each.shape for each in found.trained], 2, CPU)
        gradients.weigh(factors)
        total.add(gradients, len(inputs))
        total.flush()
        weighed = (expected * factors.double()[:, None]).sum(0)
        assert torch.linalg.vector_norm(total.whole - weighed) <= 1e-6 * torch.linalg.vector_norm(weighed)


@pytest.mark.parametrize("number", range(5))
def test_kept_gradients_and_inner_products_agree_in_float32(number: int, animal: Zoo, cross_entropy: Loss) -> None:
    """Without noise, a layer's kept gradients and its inner products give the same clipped sum."""
    found = animal(number)
    sums = []
    for names in (frozenset[str](), ghosts(found.module)):
        gradients = OneBackward(found.module, cross_entropy, Precision(), names).gradients(found.inputs, found.labels)
        gradients.weigh(factors_of(gradients.norms(), 0.05, 1.0))
        total = Total([each.shape for each in found.trained], 64, CPU)
        total.add(gradients, len(found.inputs))
        total.flush()
        sums.append(total.whole)

    assert float(sums[0].norm()) > 0
    assert torch.allclose(sums[0], sums[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4])
def test_a_records_gradient_has_the_same_bits_whatever_else_fills_the_batch(
    number: int, animal: Zoo, cross_entropy: Loss
) -> None:
    """In physical batches of one size, no neighbour changes a bit of a record's gradient, be it a record or padding."""
    found = animal(number)
    engine = OneBackward(found.module, cross_entropy, Precision())
    record, label = found.inputs[:1], found.labels[:1]
    seen = []
    for others in (found.inputs.flip(0), torch.zeros_like(found.inputs)):
        pick = torch.arange(8) % len(others)
        inputs, labels = others[pick].clone(), found.labels[pick].clone()
        inputs[3], labels[3] = record[0], label[0]
        seen.append(engine.gradients(inputs, labels).rows()[3].clone())

    assert torch.equal(seen[0], seen[1])


def test_nothing_of_the_module_changes(animal: Zoo, cross_entropy: Loss) -> None:
    """A pass leaves `.grad`, weights, buffers and `forward` as they were: ordinary training may go on."""
    found = animal(2)
    found.trained[0].grad = torch.ones_like(found.trained[0])
    state = copy.deepcopy(found.module.state_dict())

    OneBackward(found.module, cross_entropy, Precision()).gradients(found.inputs, found.labels)

    assert torch.equal(found.trained[0].grad, torch.ones_like(found.trained[0]))
    assert all(each.grad is None for each in found.trained[1:])
    assert all(torch.equal(each, state[name]) for name, each in found.module.state_dict().items())
    assert not any("forward" in vars(each) for each in found.module.modules())


def test_a_static_scale_multiplies_every_gradient(animal: Zoo, cross_entropy: Loss) -> None:
    """Gradients are the loss's times the scale, exactly: a power of two rounds nothing."""
    found = animal(0)
    plain, scaled = (
        OneBackward(found.module, cross_entropy, Precision(scale=scale)).gradients(found.inputs, found.labels).rows()
        for scale in (1.0, 1024.0)
    )

    assert torch.equal(plain * 1024, scaled)


def test_layers_that_take_no_part_have_gradients_of_zero(cross_entropy: Loss) -> None:
    """A layer that the output does not need has zeros, and a model whose output needs none has zeros throughout."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, values: Tensor) -> Tensor:
            """The first layer, or neither."""
            return self.used(values) if self.training else torch.zeros(len(values), 3)

    module = Idle()
    engine = OneBackward(module, cross_entropy, Precision())
    batch = torch.randn(4, 2), torch.zeros(4, dtype=torch.long)

    rows = engine.gradients(*batch).rows()
    module.eval()
    nothing = engine.gradients(*batch)

    assert rows[:, :9].any()
    assert not rows[:, 9:].any()
    assert not nothing.rows().any()
    assert not nothing.norms().any()


def test_bf16_autocast_is_clipped_by_norms_of_the_very_gradients(animal: Zoo, cross_entropy: Loss) -> None:
    """Under bfloat16 autocast every clipped gradient is within C: norms and sums read the same float32 numbers."""
    for number in range(8):
        found = animal(number)
        engine = OneBackward(found.module, cross_entropy, Precision(torch.bfloat16, 64.0))
        gradients = engine.gradients(found.inputs, found.labels)
        norms = gradients.norms()
        clip = float(norms.min()) / 128
        factors = factors_of(norms, clip, 64.0)
        lengths = (gradients.rows().double() * factors[:, None]).norm(dim=1)
        assert float(lengths.max()) <= clip
        assert torch.allclose(lengths, torch.full_like(lengths, clip), rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------ refusals


class Twice(nn.Module):
    """A layer that runs two times."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(3, 3)

    def forward(self, values: Tensor) -> Tensor:
        """Through it and through it again."""
        out: Tensor = self.same(self.same(values))
        return out


class Folded(nn.Module):
    """Positions folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, values: Tensor) -> Tensor:
        """All positions as rows."""
        out: Tensor = self.inner(values.reshape(-1, 3)).view(len(values), -1, 3)
        return out.mean(1)


class Outside(nn.Module):
    """A weight that is used without its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """Twice the same product, once behind the layer's back."""
        out: Tensor = self.inner(values) + values @ self.inner.weight.T
        return out


@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (Twice(), torch.randn(4, 3), "layer 'same' runs more than once.*use a layer of its own"),
        (Folded(), torch.randn(4, 2, 3), r"layer 'inner' has an input of shape \[8, 3\].*batch of 4.*keep the batch"),
        (Outside(), torch.randn(4, 3), "parameter 'inner.weight' is used outside its layer"),
        (nn.Sequential(nn.Conv1d(4, 3, 2)), torch.randn(4, 3), r"layer '0' has an input of shape \[4, 3\]"),
    ],
)
def test_what_would_add_gradients_up_before_the_clip_is_refused(
    module: nn.Module, inputs: Tensor, message: str, cross_entropy: Loss
) -> None:
    """A pass in which a layer's gradients would be sums over records, or over uses, names the layer and stops."""
    engine = OneBackward(module, cross_entropy, Precision())

    with pytest.raises(ConfigurationError, match=message):
        engine.gradients(inputs, torch.zeros(len(inputs), dtype=torch.long))

    assert all(each.grad is None for each in module.parameters())
    assert not any("forward" in vars(each) for each in module.modules())


def _tied() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, second)


def _hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3))
    module[0].register_forward_hook(lambda *_: None)
    return module


class Own(nn.Linear):
    """A subclass, which may compute anything."""


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (_tied(), "layer '1': its weight is also 0.weight, and tied gradients.*parameters of its own"),
        (nn.Sequential(nn.MultiheadAttention(4, 2)), "layer '0': MultiheadAttention has parameters of its own.*vmap"),
        (nn.Sequential(Own(3, 3)), "layer '0': Own has parameters of its own and is not one of Linear"),
        (nn.Sequential(nn.BatchNorm1d(3)), "layer '0': BatchNorm1d has parameters"),
        (_hooked(), "layer '0': this Linear runs somebody's hooks.*remove its hooks"),
        (nn.Sequential(nn.Embedding(3, 3, max_norm=1.0)), "layer '0': an Embedding with max_norm.*leave max_norm"),
        (nn.Sequential(nn.Embedding(3, 3, scale_grad_by_freq=True)), "scale_grad_by_freq changes weights or gradients"),
    ],
)
def test_layers_that_it_does_not_know_are_refused_by_name(module: nn.Module, message: str, cross_entropy: Loss) -> None:
    """A tied, unknown, hooked or batch-dependent layer is named before anything runs, with what to do about it."""
    with pytest.raises(ConfigurationError, match=message):
        OneBackward(module, cross_entropy, Precision())


def test_frozen_layers_of_any_kind_are_let_be() -> None:
    """What is not trained has no gradient, so an unknown layer may stay if it is frozen."""
    module = nn.Sequential(nn.PReLU(), nn.Linear(3, 3))
    assert [name for name, _, _ in unsupported(module)] == ["0"]

    module[0].weight.requires_grad_(False)  # noqa: FBT003 - torch's own

    assert [layer.name for layer in layers_of(module)] == ["1"]
