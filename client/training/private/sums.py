"""Clipped sums of per-record gradients: norms that are never too short, factors, float32 chunks within float64 totals.

    norms [rows] -> factors [rows] = min(1, C (1 - 2^-20) / norm), 0 for what is not finite or only fills the batch
    Sum_j factor_j g_j: at most `chunk` records at a time in float32, the chunks in float64

**Formal guarantee.** Let M be the records that a `Total` is made for. Whatever the gradients are, whatever order and
micro-batches they come in, one record more or less moves `Total.whole` by at most C (1 + `gamma_of(M)`) in L2 norm. It
pays for three things, in units of C. The float32 chunks: m c 2^-23 <= M 2^-17 for m records in chunks of c
(`gamma_of_chunks`), and c shrinks as m passes M. Norms: three levels of at most 256 float32 terms each, hence at
most 2^-14 too short. Float64 totals: 2^-20.

| edge | what happens |
| --- | --- |
| a gradient with NaN or infinity, or whose squares leave float32 | it adds nothing |
| a gradient of zeros | factor 1 |
| no records | zeros |
| more records than M | smaller chunks, down to one record; the bound stands |
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch

from privacy.differential_privacy.record import CHUNK, GAMMA, gamma_of_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = ["Gradients", "Total", "chunk_of", "factors_of", "gamma_of", "norms"]

_BLOCK = 256
"""Squares that are added in float32 at a time: any order of adding them is off by at most 256 * 2^-24."""

_NORM_SLACK = 8
"""Of norms, counted in records of `gamma_of_chunks`: 8 * 2^-17 = 2^-14, the most of two factors' three levels."""

_INSIDE = 1 - 2.0**-20


class Gradients(Protocol):
    """The per-record gradients of one physical batch, however they are kept: rows in the batch's order.

    Every gradient is `scale` times that of the loss, `scale` being the engine's static loss scale.
    """

    def norms(self) -> Tensor:
        """L2 norms [rows], float64, each at least the true norm less 2^-14 of it; not finite where a value is not."""
        ...

    def weigh(self, factors: Tensor) -> None:
        """Multiplies every row with its factor [rows], float32; where that is 0 the row becomes 0, whatever it was."""
        ...

    def add(self, records: slice, total: Total) -> None:
        """Adds these weighed rows to `total`."""
        ...

    def rows(self) -> Tensor:
        """The gradients themselves [rows, values], float32, in the order of the parameters."""
        ...


def gamma_of(most: int) -> float:
    """What floating point adds to one record's part of a `Total` made for `most` records, in clip norms."""
    return gamma_of_chunks(most + _NORM_SLACK) + GAMMA


def chunk_of(records: int, most: int) -> int:
    """Records that may be summed in float32 at a time so that `gamma_of(most)` holds for a batch of `records`."""
    return CHUNK if records <= most else max(1, CHUNK * most // records)


def norms(values: Tensor) -> Tensor:
    """L2 norms [rows] of float32 values [rows, n] in float32, at most 2^-15 too short for n up to 256^3."""
    size = values.shape[1]
    if size <= _BLOCK:
        whole: Tensor = torch.linalg.vector_norm(values, dim=1)
        return whole
    head = size - size % _BLOCK
    blocks = torch.linalg.vector_norm(values[:, :head].view(len(values), -1, _BLOCK), dim=2)
    if head < size:
        rest = torch.linalg.vector_norm(values[:, head:], dim=1, keepdim=True)
        blocks = torch.cat((blocks, rest), dim=1)
    return norms(blocks)


def factors_of(found: Tensor, clip: float, scale: float) -> Tensor:
    """What gradients [rows] of these norms, `scale` times too large, are multiplied with: float32, 0 if not finite.

    `scale` is a power of two, so that dividing by it rounds nothing.
    """
    limited = (clip * _INSIDE * scale / found).clamp_(max=1.0).div_(scale)
    return limited.nan_to_num_(0.0).float()  # over infinity it is 0 already


class Total:
    """The sum of clipped gradients, flat in the order of the parameters.

    Attributes:
        whole: The sum up to the last `flush` [values], float64.
        wholes: Views of it, one in each parameter's shape.
        part: The float32 chunk that is being summed [values].
        parts: Views of it.

    Args:
        shapes: The parameters' shapes.
        chunk: Records in one float32 chunk at most.
        device: Where the gradients are.
    """

    def __init__(self, shapes: Sequence[torch.Size], chunk: int, device: torch.device) -> None:
        sizes = [shape.numel() for shape in shapes]
        self.whole = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self.part = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self._wide = torch.empty_like(self.whole)
        self.wholes = _views(self.whole, sizes, shapes)
        self.parts = _views(self.part, sizes, shapes)
        self._chunk = chunk
        self._held = 0

    def add(self, gradients: Gradients, records: int) -> None:
        """Adds the first `records` rows, which have been weighed."""
        for rows in self._slices(records):
            gradients.add(rows, self)

    def clear(self) -> None:
        """Back to no records."""
        self.whole.zero_()
        self.part.zero_()
        self._held = 0

    def flush(self) -> None:
        """Takes the last chunk into `whole`."""
        if self._held:
            self.whole += self._wide.copy_(self.part)
            self.part.zero_()
            self._held = 0

    def _slices(self, records: int) -> Iterator[slice]:
        start = 0
        while start < records:
            if self._held == self._chunk:
                self.flush()
            stop = min(records, start + self._chunk - self._held)
            self._held += stop - start
            yield slice(start, stop)
            start = stop


def _views(flat: Tensor, sizes: list[int], shapes: Sequence[torch.Size]) -> list[Tensor]:
    ends = accumulate(sizes)
    return [flat[end - size : end].view(shape) for end, size, shape in zip(ends, sizes, shapes, strict=True)]
