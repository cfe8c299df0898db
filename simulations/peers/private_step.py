"""What a private training step costs beside a plain one: Parley's, and each mode of Opacus, in multiples of plain SGD.

Every side trains a copy of the same model with SGD on this machine's processor, on one thread. Plain SGD and Opacus
take batches of 256 records; Parley draws its own, 256 on average, and its time holds the sampling, the filling up of
physical batches, and the noise on an integer grid. Opacus adds its usual floating-point noise. The sides take turns of
a few steps each, so that all have the same neighbours on the machine; the first step of a turn does not count, since it
finds the processor's caches full of another side's numbers. What is compared is the median CPU time of the others.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from client.training.private import Example, PrivateSteps, Terms, choose, per_record
from federation.errors import ConfigurationError, ParleyError, WhoActs
from simulations.peers.trial import progress
from simulations.unmeasured import unmeasured
from tasks.task import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

__all__ = ["BATCH", "Encoder", "Trial", "main", "sides", "table", "trials"]

BATCH = 256
_RECORDS = 5000
_CLASSES = 10
_TOKENS, _LENGTH = 1000, 32
_RATE, _CLIP, _Z = 0.01, 1.0, 1.1
_MODES = {"opacus_hooks": "hooks", "opacus_functorch": "functorch", "opacus_ghost": "ghost"}

Result = dict[str, dict[str, float]]
"""CPU seconds of a step by model and side."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A model, the records [_RECORDS, ...] and labels that it is trained on, and how many of a turn's steps count."""

    module: nn.Module
    inputs: Tensor
    labels: Tensor
    steps: int


class Encoder(nn.Module):
    """A pre-norm transformer encoder (Xiong et al. 2020) of layers that have parameters, and a mean over tokens."""

    def __init__(self, tokens: int, length: int, width: int = 64) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads=4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [rows, length] to logits [rows, classes]."""
        places = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        hidden = self.word(tokens) + self.place(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden).mean(1))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        projected = self.project(self.before(hidden)).view(rows, length, 3, self._heads, -1)
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)
        hidden = hidden + self.join(seen.reshape(rows, length, width))
        widened: Tensor = self.narrow(functional.relu(self.widen(self.between(hidden))))
        return hidden + widened


def trials() -> dict[str, Trial]:
    """A perceptron of 51 thousand parameters, a CNN for digits of 824 thousand, and an encoder of 167 thousand."""
    torch.manual_seed(0)
    perceptron = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, _CLASSES))
    convolutions = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(3136, 256), nn.ReLU(), nn.Linear(256, _CLASSES)),
    )
    labels = torch.randint(0, _CLASSES, (_RECORDS,))
    tokens = torch.randint(0, _TOKENS, (_RECORDS, _LENGTH))
    return {
        "mlp": Trial(perceptron, torch.randn(_RECORDS, 64), labels, 20),
        "cnn": Trial(convolutions, torch.randn(_RECORDS, 1, 28, 28), labels, 2),
        "transformer": Trial(Encoder(_TOKENS, _LENGTH), tokens, labels, 4),
    }


def sides(trial: Trial) -> dict[str, Callable[[], None]]:
    """One step of each side, as functions that go on with their own copy of the model.

    Raises:
        ConfigurationError: Opacus is not installed.
    """
    found = {"plain": _plain(trial), "parley": _parley(trial)}
    return found | {name: _opacus(trial, mode) for name, mode in _MODES.items()}


def _batches(trial: Trial) -> Iterator[tuple[Tensor, Tensor]]:
    """One batch of 256 records after the other, without end."""
    whole = range(0, len(trial.inputs) - BATCH + 1, BATCH)
    return cycle([(trial.inputs[each : each + BATCH], trial.labels[each : each + BATCH]) for each in whole])


def _plain(trial: Trial) -> Callable[[], None]:
    module, batches = copy.deepcopy(trial.module), _batches(trial)
    optimiser = torch.optim.SGD(module.parameters(), lr=_RATE)

    def step() -> None:
        inputs, labels = next(batches)
        optimiser.zero_grad()
        functional.cross_entropy(module(inputs), labels).backward()  # type: ignore[no-untyped-call]  # torch's
        optimiser.step()

    return step


def _parley(trial: Trial) -> Callable[[], None]:
    module = copy.deepcopy(trial.module)
    loss = per_record(Loss.CROSS_ENTROPY)
    plan = choose(module, loss, Example(trial.inputs[:4], trial.labels[:4]), expected=BATCH)
    progress(f"  {plan.engine}, physical batches of {plan.rows}: {plan.reason}")
    terms = Terms(_CLIP, BATCH / _RECORDS, _RECORDS, _Z, epsilon=3.0, delta=1e-5, steps=1000)
    steps = PrivateSteps(module, loss, plan, terms.mechanism(plan))
    optimiser = torch.optim.SGD(module.parameters(), lr=_RATE)

    def step() -> None:
        steps.take(trial.inputs, trial.labels)
        optimiser.step()

    return step


def _opacus(trial: Trial, mode: str) -> Callable[[], None]:
    try:
        from opacus import PrivacyEngine  # type: ignore[import-untyped]  # it brings no types
    except ImportError as missing:
        raise ConfigurationError(
            f"Opacus cannot be measured: {missing}", fix='pip install "parley-fl[privacy]"', who=WhoActs.YOU
        ) from missing
    module, batches = copy.deepcopy(trial.module), _batches(trial)
    made = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=_RATE),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(trial.inputs, trial.labels), batch_size=BATCH),
        noise_multiplier=_Z,
        max_grad_norm=_CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    private, optimiser = made[:2]
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()

    def step() -> None:
        inputs, labels = next(batches)
        optimiser.zero_grad()
        criterion(private(inputs), labels).backward()
        optimiser.step()

    return step


def _measured(trial: Trial, turns: int) -> dict[str, float]:
    """The median CPU seconds of each side's steps."""
    every = sides(trial)
    spent: dict[str, list[float]] = {name: [] for name in every}
    for turn in range(turns + 1):
        for name, step in every.items():
            step()
            for _ in range(trial.steps):
                begun = time.process_time()
                step()
                if turn:  # the first warms all sides up
                    spent[name].append(time.process_time() - begun)
    return {name: median(each) for name, each in spent.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for, prints it, and returns the exit status."""
    asked = _parser().parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = _all(asked.models.split(","), asked.turns)
    except (KeyboardInterrupt, ParleyError) as ended:
        return unmeasured(ended)
    finally:
        torch.set_num_threads(threads)
    if asked.json:
        print(json.dumps({model: _ratios(each) for model, each in result.items()}, indent=2))
    Console(stderr=asked.json, soft_wrap=True).print(table(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulations.peers.private_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON; the table then goes to standard error")
    parser.add_argument("--models", default="mlp,cnn,transformer", help="which of them [default: %(default)s]")
    parser.add_argument("--turns", type=int, default=5, help="turns of each side [default: %(default)s]")
    return parser


def _all(models: Sequence[str], turns: int) -> Result:
    if turns < 1:
        raise ConfigurationError(f"{turns} turns measure nothing", fix="ask for 1 or more", who=WhoActs.YOU)
    known = trials()
    unknown = [model for model in models if model not in known]
    if unknown:
        raise ConfigurationError(
            f"there is no model {unknown[0]!r}", fix=f"choose of {', '.join(known)}", who=WhoActs.YOU
        )
    result: Result = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus': its noise is not secure, its hooks are old
        for model in models:
            progress(f"{model}: {turns} turns of {known[model].steps} steps")
            result[model] = _measured(known[model], turns)
    return result


def _ratios(seconds: Mapping[str, float]) -> dict[str, float]:
    return {side: round(each / seconds["plain"], 2) for side, each in seconds.items()}


def table(result: Result) -> Table:
    """The figures as people read them."""
    drawn = Table("model", "plain SGD", "parley", *_MODES, title="A private step, in multiples of a plain one")
    for model, seconds in result.items():
        ratios = _ratios(seconds)
        others = (f"{ratios[side]:.2f} x" for side in ("parley", *_MODES))
        drawn.add_row(model, f"{1000 * seconds['plain']:.1f} ms", *others)
    return drawn


if __name__ == "__main__":
    sys.exit(main())
