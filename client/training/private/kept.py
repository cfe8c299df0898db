"""What a layer keeps of one backward pass, and how it becomes per-record norms and a clipped sum of gradients.

    Outer      one position for each record     gradient e a^T: |e| |a| is its norm, e^T diag(f) a the clipped sum
    Explicit   the gradients themselves         norms and sum by reading them
    Ghost      many positions, too large        |sum_t e_t a_t^T|^2 = sum_tu (e_t . e_u)(a_t . a_u)   (Li et al. 2022)
    Sparse     an embedding's touched rows      the explicit gradient without its zeros

a are a layer's inputs and e the gradients of its outputs. Float32 is enough for `Outer`, where nothing can cancel, and
for `Explicit`, where norm and sum read the very same numbers. In `Ghost` a record's positions may cancel: products of
float32 would leave norms that are too short, so everything there is float64, and the norm is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch

from client.training.private.sums import norms

if TYPE_CHECKING:
    from torch import Tensor

    from client.training.private.sums import Total

__all__ = ["Buffers", "Explicit", "Ghost", "Kept", "Outer", "Places", "Sparse", "kept_positions"]


@dataclass(frozen=True, slots=True)
class Places:
    """Where a layer's weight and bias are among the trained parameters; None where it has none, or it is frozen."""

    weight: int | None
    bias: int | None


class Buffers:
    """Memory for what is made anew in every pass: large allocations cost more than what is written to them."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int | str], Tensor] = {}

    def of(self, use: str, place: int | str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Float32 memory of this shape, of any content; one use's at one place is the same memory each time."""
        size = prod(shape)
        held = self._held.get((use, place))
        if held is None or held.numel() < size or held.device != like.device:
            held = self._held[use, place] = torch.empty(size, dtype=torch.float32, device=like.device)
        return held[:size].view(shape)


class Kept(Protocol):
    """One layer's part of the per-record gradients of a physical batch."""

    def norms(self) -> list[Tensor]:
        """Norms [rows] of its parts, float32."""
        ...

    def weigh(self, factors: Tensor, *, clear: bool) -> None:
        """Multiplies each row with its factor; with `clear`, rows whose factor is 0 become 0 even if not finite."""
        ...

    def add(self, records: slice, total: Total) -> None:
        """Adds these weighed rows."""
        ...

    def rows(self) -> dict[int, Tensor]:
        """The gradients [rows, values of the parameter] by the parameter's place."""
        ...


def _shaped(factors: Tensor, like: Tensor) -> Tensor:
    return factors.view(-1, *(1,) * (like.dim() - 1))


def _cleared(values: Tensor, factors: Tensor) -> Tensor:
    """Zeros in the rows whose factor is 0: 0 times infinity would not be 0."""
    return values.masked_fill(_shaped(factors, values) == 0, 0)


class Outer:
    """A linear layer on inputs [rows, in]: the gradient of each record is an outer product, which is never made."""

    def __init__(self, inputs: Tensor, errors: Tensor, places: Places) -> None:
        self._inputs = inputs.float()
        self._errors = errors.float()
        self._places = places

    def norms(self) -> list[Tensor]:
        """|e| sqrt(|a|^2 + 1), the 1 for the bias."""
        lengths = norms(self._errors)
        if self._places.weight is None:
            return [lengths]
        widths = norms(self._inputs)
        if self._places.bias is not None:
            widths = torch.hypot(widths, widths.new_ones(()))
        return [widths.mul_(lengths)]

    def weigh(self, factors: Tensor, *, clear: bool) -> None:
        """Multiplies the errors."""
        self._errors = self._errors * factors[:, None]
        if clear:
            self._inputs, self._errors = _cleared(self._inputs, factors), _cleared(self._errors, factors)

    def add(self, records: slice, total: Total) -> None:
        """E^T a and e^T 1."""
        errors = self._errors[records].T
        if self._places.bias is not None:
            total.parts[self._places.bias] += errors.sum(1)
        if self._places.weight is not None:
            total.parts[self._places.weight].addmm_(errors, self._inputs[records])

    def rows(self) -> dict[int, Tensor]:
        """Outer products."""
        found = {}
        if self._places.weight is not None:
            found[self._places.weight] = torch.bmm(self._errors[:, :, None], self._inputs[:, None, :]).flatten(1)
        if self._places.bias is not None:
            found[self._places.bias] = self._errors
        return found


class Explicit:
    """Per-record gradients [rows, values], for each parameter by its place."""

    def __init__(self, gradients: dict[int, Tensor]) -> None:
        self._gradients = {place: each.flatten(1).float() for place, each in gradients.items()}
        self._factors = torch.empty(0)

    def norms(self) -> list[Tensor]:
        """The norms of what `add` will read."""
        return [norms(each) for each in self._gradients.values()]

    def weigh(self, factors: Tensor, *, clear: bool) -> None:
        """Keeps the factors: they are multiplied in while the rows are added."""
        self._factors = factors
        if clear:
            self._gradients = {place: _cleared(each, factors) for place, each in self._gradients.items()}

    def add(self, records: slice, total: Total) -> None:
        """One pass over the gradients."""
        factors = self._factors[records]
        for place, each in self._gradients.items():
            total.parts[place].view(-1).addmv_(each[records].T, factors)

    def rows(self) -> dict[int, Tensor]:
        """The gradients, not weighed."""
        return self._gradients


class Ghost:
    """Inputs and errors at many positions [rows, groups, positions, width], whose gradients would not fit in memory.

    With S = sum_t |e_t||a_t|, the squares below are off by at most (in + out + positions^2) 2^-53 S^2; twice that is
    added, so a norm is never too short, and what is clipped has f S <= C 2^26 / sqrt(in + out + positions^2): float64
    sums of it are far inside gamma.
    """

    def __init__(self, inputs: Tensor, errors: Tensor, weight: int) -> None:
        self._inputs = inputs.double()
        self._errors = errors.double()
        self._weight = weight

    def norms(self) -> list[Tensor]:
        """Upper bounds, by the positions' inner products."""
        inner = (self._inputs @ self._inputs.mT).mul_(self._errors @ self._errors.mT).sum((1, 2, 3))
        reach = (self._inputs.norm(dim=3) * self._errors.norm(dim=3)).sum((1, 2))
        width = self._inputs.shape[3] + self._errors.shape[3] + self._inputs.shape[2] ** 2
        return [inner.clamp_(min=0).add_(reach.square_(), alpha=width * 2.0**-52).sqrt_().float()]

    def weigh(self, factors: Tensor, *, clear: bool) -> None:
        """Multiplies the errors."""
        self._errors = self._errors * _shaped(factors, self._errors)
        if clear:
            self._inputs, self._errors = _cleared(self._inputs, factors), _cleared(self._errors, factors)

    def add(self, records: slice, total: Total) -> None:
        """One product for each group, straight into the float64 total."""
        errors = self._errors[records]
        whole = total.wholes[self._weight].view(errors.shape[1], errors.shape[3], self._inputs.shape[3])
        whole += torch.einsum("bgto,bgti->goi", errors, self._inputs[records])

    def rows(self) -> dict[int, Tensor]:
        """The gradients, for the exact path: there must be room for them."""
        return {self._weight: torch.matmul(self._errors.mT, self._inputs).float().flatten(1)}


class Sparse:
    """An embedding's rows [pairs, width]: the sums of the errors of each token that a record has, without zeros."""

    def __init__(self, tokens: Tensor, errors: Tensor, weight: int, size: int, padding: int | None) -> None:
        records = len(tokens)
        errors = errors.reshape(tokens.numel(), -1).float()
        if padding is not None:
            errors = errors.masked_fill((tokens == padding).view(-1, 1), 0)
        owners = torch.arange(records, device=tokens.device).view(-1, *(1,) * (tokens.dim() - 1))
        pairs, places = torch.unique((owners * size + tokens).view(-1), return_inverse=True)
        self._owners, self._tokens = pairs.div(size, rounding_mode="floor"), pairs % size
        self._sums = errors.new_zeros(len(pairs), errors.shape[1]).index_add_(0, places, errors)
        self._records, self._size, self._weight = records, size, weight

    def norms(self) -> list[Tensor]:
        """The norms of what `add` will read."""
        squares = norms(self._sums).double().square_()
        return [squares.new_zeros(self._records).index_add_(0, self._owners, squares).sqrt_().float()]

    def weigh(self, factors: Tensor, *, clear: bool) -> None:
        """Multiplies the sums."""
        owned = factors[self._owners]
        self._sums = self._sums * owned[:, None]
        if clear:
            self._sums = _cleared(self._sums, owned)

    def add(self, records: slice, total: Total) -> None:
        """Adds to the touched rows: each takes at most one term of a record."""
        edges = torch.tensor([records.start, records.stop], device=self._owners.device)
        first, last = torch.searchsorted(self._owners, edges).tolist()  # sorted by record
        total.parts[self._weight].index_add_(0, self._tokens[first:last], self._sums[first:last])

    def rows(self) -> dict[int, Tensor]:
        """The gradients with their zeros."""
        dense = self._sums.new_zeros(self._records, self._size, self._sums.shape[1])
        dense[self._owners, self._tokens] = self._sums
        return {self._weight: dense.flatten(1)}


def kept_positions(inputs: Tensor, errors: Tensor, places: Places, buffers: Buffers, *, ghost: bool) -> list[Kept]:
    """What a layer of positions keeps: inputs and errors [rows, groups, positions, width] of one weight, and its bias.

    Parameters of the weight are groups * out * in, those of the bias groups * out.
    """
    found: list[Kept] = []
    explicit: dict[int, Tensor] = {}
    if places.bias is not None:
        explicit[places.bias] = errors.float().sum(2)
    if places.weight is not None and ghost:
        found.append(Ghost(inputs, errors, places.weight))
    elif places.weight is not None:
        products = buffers.of("products", places.weight, (*errors.shape[:2], errors.shape[3], inputs.shape[3]), errors)
        torch.bmm(errors.float().flatten(0, 1).mT, inputs.float().flatten(0, 1), out=products.flatten(0, 1))
        explicit[places.weight] = products
    if explicit:
        found.append(Explicit(explicit))
    return found
