"""What the tests of private training share: bytes that are fixed, and a zoo of small models."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from client.training.private.losses import Loss, per_record
from tasks import task

CROSS_ENTROPY: Loss = per_record(task.Loss.CROSS_ENTROPY)
CLASSES = 3


@dataclass(frozen=True)
class Animal:
    """A model with records that it can be trained on."""

    module: nn.Module
    inputs: Tensor
    labels: Tensor

    @property
    def trained(self) -> list[nn.Parameter]:
        """Its parameters, in order."""
        return [each for each in self.module.parameters() if each.requires_grad]


class Sentence(nn.Module):
    """Embedding, layer norms and linear layers on inputs of three dimensions, then a mean."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        width = rng.choice((4, 6))
        self.word = nn.Embedding(11, width, padding_idx=rng.choice((None, 0)))
        self.norm = nn.LayerNorm(width, bias=rng.random() < 0.5)
        self.wide = nn.Linear(width, 7, bias=rng.random() < 0.5)
        self.head = nn.Linear(7, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [rows, 5] to logits."""
        hidden: Tensor = self.head(torch.tanh(self.wide(self.norm(self.word(tokens)))))
        return hidden.mean(1)


def _perceptron(rng: random.Random) -> Animal:
    module = nn.Sequential(
        nn.Linear(5, 300, bias=rng.random() < 0.5), nn.Tanh(), nn.LayerNorm(300), nn.Linear(300, CLASSES)
    )
    if rng.random() < 0.5:
        module[0].weight.requires_grad_(False)  # noqa: FBT003 - torch's own
    return Animal(module, torch.randn(6, 5), torch.randint(0, CLASSES, (6,)))


def _sentence(rng: random.Random) -> Animal:
    return Animal(Sentence(rng), torch.randint(0, 11, (6, 5)), torch.randint(0, CLASSES, (6,)))


def _convolution(rng: random.Random, dimensions: int, *, same: bool = False) -> Animal:
    kinds = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
    groups = rng.choice((1, 2))
    padding = "same" if same else rng.choice((0, 1, 2))
    first = kinds[dimensions](
        2,
        4,
        rng.choice((1, 2, 3)),
        stride=1 if same else rng.choice((1, 2)),
        padding=padding,
        dilation=rng.choice((1, 2)),
        groups=groups,
        bias=rng.random() < 0.5,
        padding_mode=rng.choice(("zeros", "circular", "replicate")),
    )
    module = nn.Sequential(
        first,
        nn.GroupNorm(rng.choice((1, 2, 4)), 4),
        nn.Tanh(),
        kinds[dimensions](4, CLASSES, 1, groups=1),
        nn.Flatten(2),
    )
    whole = nn.Sequential(module, _Mean())
    size = 8 if dimensions < 3 else 6
    return Animal(whole, torch.randn(4, 2, *(size,) * dimensions), torch.randint(0, CLASSES, (4,)))


class _Mean(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        """The mean over the last dimension."""
        return values.mean(-1)


def _deep(rng: random.Random) -> Animal:
    """Linear layers on four dimensions, and a layer norm over two."""
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm((2, 4)), nn.Tanh(), nn.Linear(4, CLASSES), nn.Flatten(1, 2))
    rows = rng.choice((1, 5))
    return Animal(nn.Sequential(module, _First()), torch.randn(rows, 3, 2, 3), torch.randint(0, CLASSES, (rows,)))


class _First(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        """The sum over the second dimension, each position weighed."""
        return (values * torch.arange(1, values.shape[1] + 1)[:, None]).sum(1)


def zoo(number: int) -> Animal:
    """The same small model and records for the same number; twenty of them show every layer in several settings."""
    rng = random.Random(number)  # noqa: S311 - no secret
    torch.manual_seed(number)
    makers: tuple[Callable[[], Animal], ...] = (
        lambda: _perceptron(rng),
        lambda: _sentence(rng),
        lambda: _convolution(rng, 2, same=number in (7, 17)),
        lambda: _convolution(rng, 1, same=number in (8, 18)),
        lambda: _deep(rng) if number % 2 else _convolution(rng, 3),
    )
    return makers[number % len(makers)]()


def _fixed(label: str) -> Callable[[int], bytes]:
    """Gives in place of the operating system's bytes others that depend on `label` and on how often it was called."""
    calls = count()
    return lambda size: hashlib.shake_256(f"{label}/{next(calls)}".encode()).digest(size)


@pytest.fixture
def fixed() -> Callable[[str], Callable[[int], bytes]]:
    """Makes a source of fixed bytes from a label."""
    return _fixed


@pytest.fixture
def animal() -> Callable[[int], Animal]:
    """A model of the zoo by its number, 0 to 19."""
    return zoo


@pytest.fixture
def cross_entropy() -> Loss:
    """The loss of each record."""
    return CROSS_ENTROPY
