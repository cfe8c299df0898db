from collections.abc import Callable

import pytest
import torch

from client.training import optimiser
from federation.job import Training

Step = Callable[[list[torch.Tensor]], None]


def descend(parameters: list[torch.Tensor], step: Callable[[], None]) -> list[torch.Tensor]:
    """Thirty steps down an uneven bowl."""
    for _ in range(30):
        for parameter in parameters:
            parameter.grad = None
        loss = sum(((parameter - k - 1) ** 2 * (k + 1)).sum() for k, parameter in enumerate(parameters))
        loss.backward()
        step()
    return parameters


def start() -> list[torch.Tensor]:
    """Two parameters of unlike shape."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((3, 2), (4,))]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "momentum", "reference"),
    [
        ("sgd", 0.0, lambda p, decay: torch.optim.SGD(p, lr=0.05, weight_decay=decay)),
        ("sgd", 0.9, lambda p, decay: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=decay)),
        ("adam", 0.0, lambda p, decay: torch.optim.Adam(p, lr=0.05, weight_decay=decay)),
        ("adamw", 0.0, lambda p, decay: torch.optim.AdamW(p, lr=0.05, weight_decay=decay)),
    ],
)
def test_steps_are_those_of_torch(
    name: str, momentum: float, decay: float, reference: Callable[..., torch.optim.Optimizer]
) -> None:
    """The few lines here and torch's own optimiser reach the same point."""
    settings = Training.model_validate(
        {"optimiser": name, "learning_rate": 0.05, "momentum": momentum, "weight_decay": decay}
    )
    ours, theirs = start(), start()
    steps = optimiser.make(settings, ours)
    with torch.enable_grad():
        found = descend(ours, torch.no_grad()(steps.step))
        expected = descend(theirs, reference(theirs, decay).step)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_parameter_without_a_gradient_is_a_fault_of_the_model() -> None:
    """It would silently never learn."""
    with pytest.raises(ValueError, match="a parameter of the model takes no part in its output"):
        optimiser.make(Training(), start()).step()
