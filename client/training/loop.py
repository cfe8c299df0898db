"""Local training and inference in plain PyTorch: rows stay in two tensors that mini-batches index."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, assert_never

from client.training import optimiser
from federation.errors import DataContractError
from tasks.task import Loss

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from client.training.device import DevicePlan
    from federation.job import Training
    from federation.vector import F32

__all__ = ["infer", "row_seed", "train"]

_INFERENCE_ROWS = 8192


def row_seed(job_seed: int, round_number: int, site: str) -> int:
    """The 63-bit seed of one site's order of rows in one round; other sites and rounds have unrelated ones."""
    text = f"{job_seed}/{round_number}/{site}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def train(
    module: torch.nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    loss: Loss,
    settings: Training,
    *,
    proximal: float,
    seed: int,
    plan: DevicePlan,
) -> float:
    """Trains `module` in place and returns its mean loss over the last epoch (the last rows, when `steps` is given).

    Each epoch visits every row once, in an order drawn from `seed`. `proximal` = mu adds mu/2 * |w - w_start|^2 to the
    loss (FedProx, Li et al. 2020, eq. 2). Dropout draws from `seed` as well; torch's global generator stays as it was.

    Raises:
        DataContractError: There are no rows, or the loss is not finite.
    """
    import torch

    if not len(inputs):
        raise DataContractError("no rows are left for training", fix="register more records")
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    start = [parameter.detach().clone() for parameter in parameters] if proximal else []
    steps = optimiser.make(settings, parameters)
    generator = torch.Generator().manual_seed(seed)
    module.train()
    total = torch.zeros((), device=inputs.device)
    seen = 0
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for chosen, first_of_epoch in _batches(len(inputs), settings, generator, inputs.device):
            if first_of_epoch:
                total, seen = torch.zeros_like(total), 0
            for parameter in parameters:
                parameter.grad = None
            with torch.autocast(inputs.device.type, plan.torch_dtype, enabled=plan.amp_dtype is not None):
                value = _loss(module(inputs[chosen]), labels[chosen], loss)
            value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            with torch.no_grad():
                for parameter, origin in zip(parameters, start, strict=False):
                    if parameter.grad is not None:
                        parameter.grad.add_(parameter - origin, alpha=proximal)
                steps.step()
            total += value.detach() * len(chosen)
            seen += len(chosen)
    mean = float(total) / seen
    if not torch.isfinite(total):
        raise DataContractError(
            "the training loss is not finite: the steps are too long for this data",
            fix="ask the job's author for a smaller learning_rate, or for standardised inputs",
        )
    return mean


def infer(module: torch.nn.Module, inputs: torch.Tensor) -> F32:
    """Outputs [rows, outputs] of `module` in evaluation mode, float32 on the CPU.

    Raises:
        DataContractError: An output is not finite.
    """
    import torch

    module.eval()
    with torch.inference_mode():
        parts = [module(part).float().cpu() for part in torch.split(inputs, _INFERENCE_ROWS)]
        outputs = torch.cat(parts)
    if not torch.isfinite(outputs).all():
        raise DataContractError(
            "the model's outputs are not finite on this site's rows",
            fix="ask the job's author for a smaller learning_rate; this model has diverged",
        )
    found: F32 = outputs.numpy()
    return found


def _batches(
    rows: int, settings: Training, generator: torch.Generator, device: torch.device
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Row indices of each mini-batch, and whether it opens an epoch."""
    import torch

    per_epoch = -(-rows // settings.batch_size)
    left = settings.steps if settings.steps is not None else settings.epochs * per_epoch
    while left > 0:
        order = torch.split(torch.randperm(rows, generator=generator).to(device), settings.batch_size)
        for position, chosen in enumerate(order[:left]):
            yield chosen, position == 0
        left -= per_epoch


def _loss(outputs: torch.Tensor, labels: torch.Tensor, loss: Loss) -> torch.Tensor:
    from torch.nn import functional

    match loss:
        case Loss.LOGISTIC:
            return functional.binary_cross_entropy_with_logits(outputs[:, 0].float(), labels.float())
        case Loss.CROSS_ENTROPY:
            return functional.cross_entropy(outputs.float(), labels)
        case Loss.SQUARED:
            return functional.mse_loss(outputs[:, 0].float(), labels)
        case _:
            assert_never(loss)
