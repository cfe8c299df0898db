"""How far a model has moved: exactly, and refused where it cannot be said."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.drift import farthest
from federation.errors import RemoteProtocolError, StorageError
from federation.vector import Layout, TensorSpec, to_safetensors

LAYOUT = Layout((TensorSpec("weight", (1, 2)), TensorSpec("bias", (1,))))
WEIGHTS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3)


def written(file: Path, *weights: float, layout: Layout = LAYOUT) -> Path:
    """A model's file."""
    file.write_bytes(to_safetensors(layout, np.array(weights, dtype=np.float32)))
    return file


@given(WEIGHTS, WEIGHTS)
@settings(max_examples=30, deadline=None)
def test_it_is_the_largest_difference_of_a_weight(
    tmp_path_factory: pytest.TempPathFactory, now: list[float], before: list[float]
) -> None:
    """Over all tensors, in either direction, also where float32 would overflow."""
    folder = tmp_path_factory.mktemp("models")
    moved = farthest(written(folder / "now", *now), written(folder / "before", *before))
    assert moved == max(abs(a - b) for a, b in zip(now, before, strict=True))


def test_models_of_other_tensors_are_not_compared(tmp_path: Path) -> None:
    """A job has one layout."""
    other = Layout((TensorSpec("weight", (1, 3)),))
    with pytest.raises(RemoteProtocolError, match="other tensors"):
        farthest(written(tmp_path / "now", 1, 2, 3), written(tmp_path / "before", 1, 2, 3, layout=other))


def test_an_earlier_model_that_is_gone_is_told(tmp_path: Path) -> None:
    """The site's administrator must act."""
    with pytest.raises(StorageError, match="cannot compare a model with an earlier one"):
        farthest(written(tmp_path / "now", 1, 2, 3), tmp_path / "before")
