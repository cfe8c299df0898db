"""Sums with noise at the coordinator: rotated back, divided by |P|, without padding, and burned by their guard."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.secure_sums import SummedUpdates, perform
from federation.errors import LocalProtocolError, StorageError
from federation.vector import BLOCK
from privacy.secure_aggregation.rostersum.coordinator_events import Broken, Sum
from privacy.secure_aggregation.rostersum.encoding import GUARD
from privacy.secure_aggregation.rostersum.noise import round_noise
from tests.coordinator.test_secure_sums import CTX, Round
from tests.privacy.secure_aggregation.rostersum.noisy import plan

NOISY = {"z": 0.25, "scale": 2.0**14}


def summed(folder: Path, dimension: int, updates: list[np.ndarray]) -> Round:
    """The uploads of an attempt with noise of a quarter of the clip."""
    made = Round(folder, plan(dimension, **NOISY))
    made.upload(updates)
    return made


def updates(sites: int, size: int) -> list[np.ndarray]:
    """Updates of length 1, half the clip."""
    random = np.random.default_rng(sites)
    made = (random.normal(size=size) for _ in range(sites))
    return [(each / np.linalg.norm(each)).astype("<f4") for each in made]


@pytest.mark.parametrize("size", [5, 8, BLOCK + 5])
def test_a_sum_with_noise_is_the_updates_mean_and_no_more_than_its_noise(tmp_path: Path, size: int) -> None:
    """Each member counts as 1; for a model of `size` values the padding is left out."""
    sent = updates(4, size)
    made = summed(tmp_path, 8 if size <= 8 else 2 * BLOCK, sent)
    done = made.sum()
    assert isinstance(done, SummedUpdates)
    found = done.of(size)
    assert (found.size, found.weight, found.event) == (size, 4.0, done.event)
    deviation = (4 * round_noise(made.plan, 4, 1).variance) ** 0.5 / 2.0**14
    assert np.abs(found.total() - np.sum(sent, axis=0)).max() < 7 * deviation
    means = list(found.mean(block=1000))
    assert sum(each.size for each in means) == size
    assert np.concatenate(means) * 4 == pytest.approx(found.total())


def test_a_sum_is_of_no_other_model(tmp_path: Path) -> None:
    """A model of nine values pads to sixteen."""
    done = summed(tmp_path, 8, updates(3, 5)).sum()
    assert isinstance(done, SummedUpdates)
    with pytest.raises(LocalProtocolError, match="a sum of 8 values was taken for one of updates of 9 values"):
        done.of(9)


def test_an_exact_sum_has_no_padding(tmp_path: Path) -> None:
    """It is what it is, whatever size is asked for: the arithmetic holds it against its own."""
    from tests.coordinator.test_secure_sums import train

    made = Round(tmp_path, train(10))
    made.upload(updates(3, 10), [10, 10, 10])
    done = made.sum()
    assert isinstance(done, SummedUpdates)
    assert done.of(7) is done


def test_a_member_without_its_guard_burns_the_sum(tmp_path: Path) -> None:
    """Nothing else of a sum with noise can be held against what members may send (I23)."""
    made = summed(tmp_path, 8, updates(3, 8))

    def add(words: np.ndarray) -> None:
        words[-GUARD:] += 1

    made.forge(1, add)
    done = made.sum()
    assert isinstance(done, Broken)
    assert "its guard says [4, 4, 4, 4], where 3 members were summed" in str(done)


def test_memory_holds_a_block_however_long_the_vector_is(tmp_path: Path) -> None:
    """The rotation is made in a file without a name: Python's own memory stays below that of the vector."""
    size = 16 * BLOCK
    made = summed(tmp_path, size, updates(3, size))
    tracemalloc.start()
    try:
        done = made.sum()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(done, SummedUpdates)
    assert most < 8 * size / 2
    assert list((tmp_path / "sums").iterdir()) == []


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file too, in which the sum is rotated back: the same sum can be made again."""
    made = summed(tmp_path, 8, updates(3, 8))
    files: list[int] = []
    real: Any = np.memmap

    def full(file: object, *arguments: object, **words: object) -> object:
        files.append(1)
        if len(files) == 2:
            raise OSError(28, "No space left on device")
        return real(file, *arguments, **words)

    monkeypatch.setattr("coordinator.secure_sums.np.memmap", full)
    with pytest.raises(StorageError, match=r"cannot write a sum of 64 bytes to .*No space left.*free disk space"):
        perform(Sum(CTX, 1, tuple(made.terms)), made.plan, made.source, made.folder)
