"""One private step of training: sample, per-record gradients, clip, sum, integers, noise, a public denominator.

    poisson sample -> physical batches of at most plan.rows, filled up -> engine -> norms -> factors -> Total
                   -> dither (or ExactSum) -> clamp -> noise -> / (s q N_pub) -> .grad of every trained parameter

**Formal guarantee.** What a step leaves in the parameters' `.grad` is, for its own batch, `Mechanism.mean` of a sum in
which every record's part has at most norm C (1 + gamma). Every random choice that protects a record is the operating
system's: torch's generators decide nothing but dropout, for which each step seeds them anew from it.

| edge | what happens |
| --- | --- |
| an empty batch | noise alone; the step goes on like any other |
| a record whose gradient is not finite | it adds nothing; nobody is told |
| a cancelled step | no `.grad` changes, and the charge for the step stays |
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from client.training.private.losses import Precision
from client.training.private.plan import ROUND
from client.training.private.sums import Total, chunk_of, factors_of
from federation.errors import LocalProtocolError
from privacy.differential_privacy.record import ExactSum
from privacy.differential_privacy.sampling import poisson_sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from client.training.private.losses import Loss
    from client.training.private.mechanism import Mechanism
    from client.training.private.plan import Plan
    from client.training.private.sums import Gradients
    from privacy.differential_privacy.stream import Draw
    from privacy.differential_privacy.table import I64

__all__ = ["PrivateSteps"]


def _never() -> bool:
    return False


class PrivateSteps:
    """The steps of one model: each leaves a noisy gradient, and the caller's optimiser does the rest.

    The ledger is charged by the caller, before anything of a step leaves the process, and for every step that began.

    Args:
        module: The model, in training mode; its parameters' device is where gradients are computed.
        loss: Losses [rows] of outputs and labels.
        plan: From `plan.choose`, for this model.
        mechanism: From `Terms.mechanism`, for this plan; its sampler is tested here.
        precision: Autocast's type and the static loss scale.
        draw: `os.urandom`; nothing takes another but tests.

    Raises:
        ConfigurationError: The plan's engine does not know the model.
        LocalProtocolError: The plan is of another model, or the noise fails its self-test.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        plan: Plan,
        mechanism: Mechanism,
        *,
        precision: Precision | None = None,
        draw: Draw = os.urandom,
    ) -> None:
        precision = precision or Precision()
        self._trained = [each for each in module.parameters() if each.requires_grad]
        values = sum(each.numel() for each in self._trained)
        if values != plan.values:
            raise LocalProtocolError(f"a plan for {plan.values} parameters was used for a model of {values}")
        self._plan, self._mechanism, self._draw = plan, mechanism.tested(draw), draw
        self._scale = precision.scale
        self._engine = plan.engine_of(module, loss, precision)
        self._shapes = [each.shape for each in self._trained]
        self._totals: dict[int, Total] = {}
        self._mean = np.empty(values, np.float32)

    def take(self, inputs: Tensor, labels: Tensor, cancelled: Callable[[], bool] = _never) -> bool:
        """Samples from these records, and sets every trained parameter's `.grad`; False if it was cancelled before.

        The gradients stand until the next step.

        Args:
            inputs: All records [records, ...] of the site, which may be none.
            labels: Theirs [records].
            cancelled: Asked before each physical batch; once it says so, the batch so far is forgotten.
        """
        chosen = poisson_sample(len(inputs), self._mechanism.terms.rate, self._draw)
        device = self._trained[0].device
        with self._own_randomness(device):
            batches = self._batches(inputs, labels, chosen, cancelled)
            done = self._exact(batches) if self._mechanism.terms.path == "exact" else self._dither(batches, len(chosen))
        if done:
            self._set_gradients(device)
        return done

    def _dither(self, batches: Iterator[tuple[Gradients, int] | None], records: int) -> bool:
        chunk = chunk_of(records, self._plan.most)
        total = self._totals.get(chunk)
        if total is None:
            total = self._totals[chunk] = Total(self._shapes, chunk, self._trained[0].device)
        total.clear()
        with torch.no_grad():
            for batch in batches:
                if batch is None:
                    return False
                gradients, count = batch
                gradients.weigh(factors_of(gradients.norms(), self._mechanism.terms.clip, self._scale))
                total.add(gradients, count)
            total.flush()
        self._mechanism.mean(total.whole.numpy(force=True), self._mean, self._draw)
        return True

    def _exact(self, batches: Iterator[tuple[Gradients, int] | None]) -> bool:
        total = ExactSum(self._mean.size, self._mechanism.grid)
        for batch in batches:
            if batch is None:
                return False
            gradients, count = batch
            total.add((gradients.rows()[:count] / self._scale).numpy(force=True))
        self._mechanism.mean_of_integers(total.parts(), self._mean, self._draw)
        return True

    def _batches(
        self, inputs: Tensor, labels: Tensor, chosen: I64, cancelled: Callable[[], bool]
    ) -> Iterator[tuple[Gradients, int] | None]:
        """The gradients of each physical batch, with how many of its rows are records; None once it is cancelled."""
        rows = self._plan.rows
        for start in range(0, len(chosen), rows):
            if cancelled():
                yield None
                return
            places = torch.from_numpy(chosen[start : start + rows]).to(inputs.device)
            count = len(places)
            filled = min(rows, -(-count // ROUND) * ROUND)
            records, marks = (_filled_up(each, places, filled) for each in (inputs, labels))
            with torch.enable_grad():
                yield self._engine.gradients(records, marks), count

    @contextmanager
    def _own_randomness(self, device: torch.device) -> Iterator[None]:
        """Dropout within draws from a seed of the operating system's, and torch's generators are as before after it.

        A seed of the job's would not do: how often dropout has drawn shows how many physical batches there were.
        """
        seed = int.from_bytes(self._draw(8), "little") >> 1
        if device.type == "cpu":
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                yield
        else:
            with torch.random.fork_rng(devices=[device], device_type=device.type):
                torch.manual_seed(seed)
                yield

    def _set_gradients(self, device: torch.device) -> None:
        flat = torch.from_numpy(self._mean).to(device)
        start = 0
        for each in self._trained:
            each.grad = flat[start : start + each.numel()].view(each.shape)
            start += each.numel()


def _filled_up(values: Tensor, places: Tensor, rows: int) -> Tensor:
    """The values at these places, and zeros up to so many rows."""
    found = values.new_zeros(rows, *values.shape[1:])
    torch.index_select(values, 0, places, out=found[: len(places)])
    return found
