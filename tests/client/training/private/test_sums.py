from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from client.training.private.fallback import Rows
from client.training.private.kept import Explicit, Ghost, Kept, Outer, Places, Sparse
from client.training.private.one_backward import KeptGradients
from client.training.private.sums import Total, chunk_of, factors_of, gamma_of, norms
from privacy.differential_privacy.record import CHUNK, GAMMA, gamma_of_chunks

CPU = torch.device("cpu")
QUICK = settings(max_examples=50, deadline=None)


@QUICK
@given(
    size=st.integers(1, 70_000),
    seed=st.integers(0, 99),
    spread=st.sampled_from((0.0, 1.0, 12.0)),
    scale=st.sampled_from((1e-12, 1.0, 1e15)),
)
def test_norms_are_never_too_short(size: int, seed: int, spread: float, scale: float) -> None:
    """Float32 norms of any length are the real ones to 2^-15, whatever the values' sizes are."""
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.standard_normal((2, size)) * np.exp(spread * rng.random(size)) * scale / 1e6).float()

    found, real = norms(values).double(), values.double().norm(dim=1)

    assert (found >= real * (1 - 2.0**-15)).all()
    assert (found <= real * (1 + 2.0**-15)).all()


def test_factors_clip_a_hair_within_and_drop_what_is_not_finite() -> None:
    """A factor is min(1, C (1 - 2^-20) / norm) over the scale; infinity and NaN have 0, and zeros have 1."""
    found = torch.tensor([0.0, 0.5, 2.0, 8.0, torch.inf, torch.nan], dtype=torch.float64)

    plain, scaled = factors_of(found, 2.0, 1.0), factors_of(found * 4, 2.0, 4.0)

    inside = 1 - 2.0**-20
    assert plain.tolist() == pytest.approx([1, 1, inside, inside / 4, 0, 0], rel=1e-7)
    assert (plain == 0).tolist() == [False] * 4 + [True] * 2
    assert torch.equal(plain, scaled * 4)


def test_chunks_shrink_when_there_are_more_records_than_planned() -> None:
    """M records in chunks of c keep m c within the plan's M * 64, so gamma holds; a chunk has a record at least."""
    for most in (1, 64, 300):
        for records in (0, 1, most, most + 1, 3 * most, 100 * most):
            chunk = chunk_of(records, most)
            assert 1 <= chunk <= CHUNK
            assert chunk == 1 or records * chunk <= max(most, 1) * CHUNK


def _outer(rng: np.random.Generator, records: int) -> Kept:
    inputs, errors = np.abs(rng.standard_normal((records, 40))), np.abs(rng.standard_normal((records, 30)))
    return Outer(torch.from_numpy(inputs).float(), torch.from_numpy(errors).float(), Places(0, None))


def _explicit(rng: np.random.Generator, records: int) -> Kept:
    return Explicit({0: torch.from_numpy(np.abs(rng.standard_normal((records, 30, 40)))).float()})


def _ghost(rng: np.random.Generator, records: int) -> Kept:
    inputs, errors = rng.standard_normal((records, 1, 6, 40)), rng.standard_normal((records, 1, 6, 30))
    return Ghost(torch.from_numpy(inputs), torch.from_numpy(errors), 0)


def _sparse(rng: np.random.Generator, records: int) -> Kept:
    tokens = torch.from_numpy(rng.integers(0, 30, (records, 4)))
    return Sparse(tokens, torch.from_numpy(np.abs(rng.standard_normal((records, 4, 40)))).float(), 0, 30, None)


@pytest.mark.parametrize(("make", "rounds"), [(_outer, True), (_explicit, True), (_ghost, False), (_sparse, True)])
def test_float_excess_below_gamma(make: Callable[..., Kept], rounds: bool) -> None:  # noqa: FBT001 - a parameter's value
    """What floats add to one record's part of a sum is within gamma, however it is kept, ordered and cut."""
    rng = np.random.default_rng(7)
    records = 700
    shape = torch.Size((30, 40))
    kept = make(rng, records)
    gradients = KeptGradients([kept], records, [shape], CPU)
    rows = gradients.rows().double()
    factors = factors_of(gradients.norms(), 1.0, 1.0)
    own = rows * factors.double()[:, None]
    lengths = own.norm(dim=1)
    assert float(lengths.max()) <= 1.0

    excess = 0.0
    for number in rng.permutation(records)[:20]:
        rest = rng.permutation(np.delete(np.arange(records), number))
        chunks = (chunk_of(records, 300), 17)
        moved = _sum(kept, factors, np.arange(records), chunks[0], shape) - _sum(kept, factors, rest, chunks[1], shape)
        excess = max(excess, float((moved - own[number]).norm()))

    assert excess <= gamma_of(300)
    assert (excess > GAMMA / 10) == rounds  # float32 chunks lose something, float64 nothing


def _sum(kept: Kept, factors: Tensor, order: np.ndarray, chunk: int, shape: torch.Size) -> Tensor:
    """The clipped sum of these records in this order, by the kept numbers' own way of adding."""
    places = torch.from_numpy(order)
    part = _part(kept, places)
    part.weigh(factors[places], clear=False)
    total = Total([shape], chunk, CPU)
    for rows in total._slices(len(order)):
        part.add(rows, total)
    total.flush()
    return total.whole


def _part(kept: Kept, places: Tensor) -> Kept:
    match kept:
        case Outer():
            return Outer(kept._inputs[places], kept._errors[places], Places(0, None))
        case Explicit():
            return Explicit({0: kept._gradients[0][places]})
        case Ghost():
            return Ghost(kept._inputs[places], kept._errors[places], 0)
        case Sparse():
            return Explicit({0: kept.rows()[0][places]})
        case _:
            raise AssertionError


def test_gamma_pays_for_chunks_norms_and_totals() -> None:
    """Gamma is the text's m * 2^-17 for chunks, 2^-14 for norms, and 2^-20 for float64."""
    assert gamma_of(256) == 256 * 2.0**-17 + 2.0**-14 + 2.0**-20 == gamma_of_chunks(264) + GAMMA


@pytest.mark.parametrize("make", [_outer, _explicit, _ghost, _sparse])
def test_a_row_that_is_not_finite_is_dropped_alone(make: Callable[..., Kept]) -> None:
    """Infinity or NaN in one record leaves the sum of the others as it would be without the record."""
    rng = np.random.default_rng(3)
    shape = torch.Size((30, 40))
    kept = make(rng, 5)
    for poison in (torch.inf, torch.nan):
        sums = []
        for spoilt in (False, True):
            part = make(np.random.default_rng(3), 5)
            if spoilt:
                _poison(part, 2, poison)
            gradients = KeptGradients([part], 5, [shape], CPU)
            factors = factors_of(gradients.norms(), 1.0, 1.0)
            assert (factors == 0).tolist() == [spoilt and row == 2 for row in range(5)]
            gradients.weigh(factors if spoilt else factors * torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]))
            total = Total([shape], 64, CPU)
            total.add(gradients, 5)
            total.flush()
            sums.append(total.whole)
        assert torch.isfinite(sums[1]).all()
        assert torch.equal(*sums)
    assert kept.norms()


def _poison(kept: Any, row: int, value: float) -> None:
    match kept:
        case Outer() | Ghost():
            kept._inputs[row] = value
        case Explicit():
            kept._gradients[0][row, 5] = value
        case Sparse():
            kept._sums[kept._owners == row] = value


@QUICK
@given(
    records=st.integers(0, 40),
    chunk=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_totals_are_the_same_in_any_micro_batches(records: int, chunk: int, cuts: list[int]) -> None:
    """However records are cut into physical batches, the total is theirs, and `clear` begins anew."""
    values = torch.from_numpy(np.random.default_rng(records).integers(-9, 9, (records, 5))).float()
    total = Total([torch.Size((2,)), torch.Size((3,))], chunk, CPU)
    total.add(_weighed(torch.ones(2, 5)), 2)
    total.clear()

    edges = sorted({0, records, *(cut % (records + 1) for cut in cuts)})
    for start, stop in pairwise(edges):
        total.add(_weighed(values[start:stop]), stop - start)
    total.flush()

    assert total.whole.tolist() == values.double().sum(0).tolist()
    assert [each.shape for each in total.wholes] == [torch.Size((2,)), torch.Size((3,))]
    assert not total.part.any()


def _weighed(rows: Tensor) -> Rows:
    found = Rows(rows)
    found.weigh(torch.ones(len(rows)))
    return found


def test_positions_that_cancel_do_not_shorten_a_norm() -> None:
    """Where a record's positions nearly cancel, inner products still give a norm that is not below the gradient's."""
    rng = np.random.default_rng(5)
    inputs = torch.from_numpy(rng.standard_normal((50, 1, 1, 40))).repeat(1, 1, 6, 1) * 1e4
    errors = torch.from_numpy(rng.standard_normal((50, 1, 6, 30)))
    errors[:, :, 1::2] = -errors[:, :, ::2] * (1 + 1e-7)

    (found,) = Ghost(inputs, errors, 0).norms()

    real = (errors.mT @ inputs).flatten(1).norm(dim=1)
    assert (found.double() >= real * (1 - 2.0**-23)).all()
    reach = (inputs.norm(dim=3) * errors.norm(dim=3)).sum((1, 2))
    assert float((real / reach).max()) < 1e-6
