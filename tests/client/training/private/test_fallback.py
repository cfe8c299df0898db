import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from client.training.private.fallback import ByHooks, ByVmap, Rows
from client.training.private.losses import Loss, Precision
from client.training.private.one_backward import OneBackward
from client.training.private.sums import Total, factors_of
from federation.errors import ConfigurationError

Zoo = Callable[[int], Any]


@pytest.mark.parametrize(
    ("engine", "number"),
    [*((ByVmap, number) for number in range(5)), *((ByHooks, number) for number in (0, 1, 4, 13, 15))],
)
def test_both_find_what_the_one_backward_engine_finds(
    engine: type[ByVmap | ByHooks], number: int, animal: Zoo, cross_entropy: Loss
) -> None:
    """Where all engines know a model their gradients, norms and sums agree, the static scale included."""
    found = animal(number)
    precision = Precision(scale=4.0)
    sums, rows, norms = [], [], []
    for make in (OneBackward, engine):
        gradients = make(found.module, cross_entropy, precision).gradients(found.inputs, found.labels)
        rows.append(gradients.rows().clone())
        norms.append(gradients.norms())
        gradients.weigh(factors_of(norms[-1], 0.1, 4.0))
        total = Total([each.shape for each in found.trained], 3, torch.device("cpu"))
        total.add(gradients, len(found.inputs))
        total.flush()
        sums.append(total.whole)

    assert torch.allclose(*rows, rtol=1e-4, atol=1e-5)
    assert torch.allclose(*norms, rtol=1e-5)
    assert torch.allclose(*sums, rtol=1e-4, atol=1e-6)


def test_hooks_leave_the_module_as_it_was(animal: Zoo, cross_entropy: Loss) -> None:
    """After a pass there are no hooks, no attributes at parameters, and `.grad` is as before."""
    found = animal(1)
    found.trained[0].grad = torch.ones_like(found.trained[0])

    for _ in range(2):
        ByHooks(found.module, cross_entropy, Precision()).gradients(found.inputs, found.labels)

    assert torch.equal(found.trained[0].grad, torch.ones_like(found.trained[0]))
    assert all(each.grad is None for each in found.trained[1:])
    assert not any(hasattr(each, "grad_sample") for each in found.trained)
    assert not any(each._forward_hooks or each._backward_hooks for each in found.module.modules())


def test_vmap_runs_under_autocast_and_draws_dropout_for_each_record(cross_entropy: Loss) -> None:
    """Autocast's rounding shows, and equal records under dropout have different gradients."""
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5))
    inputs, labels = torch.randn(1, 8).repeat(6, 1), torch.zeros(6, dtype=torch.long)

    rows = ByVmap(module, cross_entropy, Precision()).gradients(inputs, labels).rows()
    module.eval()
    single, half = (
        ByVmap(module, cross_entropy, Precision(kind)).gradients(inputs, labels).rows()
        for kind in (None, torch.bfloat16)
    )

    assert len(torch.unique(rows, dim=0)) > 1
    assert not torch.equal(single, half)
    assert torch.allclose(single, half, rtol=0.1, atol=0.02)
    assert half.dtype == torch.float32


def test_a_row_that_is_not_finite_is_dropped_alone() -> None:
    """Rows whose factor is 0 add nothing, whatever they hold."""
    values = torch.ones(3, 4)
    values[1, 2] = torch.inf
    rows = Rows(values)
    total = Total([torch.Size((4,))], 64, torch.device("cpu"))

    rows.weigh(factors_of(rows.norms(), 2.0, 1.0))
    total.add(rows, 3)
    total.flush()

    assert total.whole.tolist() == pytest.approx([2 * (1 - 2.0**-20)] * 4, rel=1e-6)


def test_without_opacus_its_engine_is_refused(monkeypatch: pytest.MonkeyPatch, cross_entropy: Loss) -> None:
    """The missing package is named, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "opacus.grad_sample", None)

    with pytest.raises(ConfigurationError, match=r"need Opacus, which cannot be used.*pip install") as refused:
        ByHooks(nn.Linear(2, 3), cross_entropy, Precision())

    assert refused.value.who.value == "you"


def test_opacus_is_not_imported_with_the_package() -> None:
    """Opacus costs seconds: importing private training does without it."""
    import subprocess

    code = "import sys, client.training.private; print('opacus' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


def test_parts_that_opacus_stacks_are_one_gradient(cross_entropy: Loss) -> None:
    """A layer that runs twice has the sum of both uses as its gradient, as autograd has it."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Linear(3, 3)

        def forward(self, values: Tensor) -> Tensor:
            """Through it and through it again."""
            out: Tensor = self.same(torch.tanh(self.same(values)))
            return out

    torch.manual_seed(0)
    module, inputs, labels = Twice(), torch.randn(3, 3), torch.zeros(3, dtype=torch.long)
    alone = [
        torch.cat(
            [each.flatten() for each in torch.autograd.grad(cross_entropy(module(x), y).sum(), module.parameters())]
        )
        for x, y in zip(inputs.split(1), labels.split(1), strict=True)
    ]

    for engine in (ByVmap, ByHooks):
        assert torch.allclose(
            engine(module, cross_entropy, Precision()).gradients(inputs, labels).rows(), torch.stack(alone), atol=1e-6
        )
