from pathlib import Path

import numpy as np
import pytest

from federation.errors import ConfigurationError
from simulations.peers.parley_side import _layout
from simulations.peers.trial import Size, Trial


@pytest.mark.parametrize(("text", "wanted"), [("64kB", 2**14), ("1MB", 262_144), ("42MB", 42 * 262_144)])
def test_a_size_is_a_perceptron_of_about_so_many_values(text: str, wanted: int) -> None:
    """The model has the named size within 0.1 %, and its layout as many values as each vector."""
    size = Size.parse(text)

    assert abs(size.values - wanted) < wanted / 1000
    assert _layout(size).size == size.values


@pytest.mark.parametrize("text", ["", "MB", "0MB", "-1MB", "1.5MB", "1mb", "1 MB", "42"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """The refusal quotes it and shows how a size is written."""
    with pytest.raises(ConfigurationError, match="is not a size") as refused:
        Size.parse(text)

    assert "such as 1MB" in refused.value.fix


def test_both_sides_are_given_the_same_vectors(tmp_path: Path) -> None:
    """Prepared twice for one size, the files hold the same finite float32 values, different for each site."""
    size = Size.parse("4kB")
    folders = tmp_path / "parley", tmp_path / "flower"
    for folder in folders:
        folder.mkdir()

    first, second = (Trial.prepare(folder, size, rounds=2, sites=2) for folder in folders)

    vectors = [np.load(path) for path in (first.model, *first.updates)]
    again = [np.load(path) for path in (second.model, *second.updates)]
    assert [(each.dtype, each.shape) for each in vectors] == [(np.float32, (size.values,))] * 3
    assert all(np.isfinite(each).all() for each in vectors)
    assert all(np.array_equal(one, other) for one, other in zip(vectors, again, strict=True))
    assert len({each.tobytes() for each in vectors}) == 3
