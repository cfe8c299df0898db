"""What both sides of a comparison are given: the same initial model, the same update for each site, so many rounds."""

import math
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from federation.errors import ConfigurationError, WhoActs

__all__ = ["Size", "Trial", "free_port", "progress"]

_UNITS = {"kB": 2**10, "MB": 2**20, "GB": 2**30}
_NARROWEST = 3
"""Width of the smallest square model: two hidden layers of one neuron each."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a model's float32 vector, such as 1MB (2^20 bytes: 262,144 values)."""

    name: str
    width: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The size that `text` names.

        Raises:
            ConfigurationError: It names none.
        """
        found = re.fullmatch(r"([1-9][0-9]{0,5})(kB|MB|GB)", text.strip())
        width = math.isqrt(int(found[1]) * _UNITS[found[2]] // 4) if found else 0
        if width < _NARROWEST:
            fix = "write a whole number and kB, MB or GB, such as 1MB, for a model of 9 values or more"
            raise ConfigurationError(f"{text!r} is not a size", fix=fix, who=WhoActs.YOU)
        return cls(text.strip(), width)

    @property
    def hidden(self) -> int:
        """Width of both hidden layers of the perceptron, with one input and one output, that has about this size."""
        return self.width - 2

    @property
    def values(self) -> int:
        """That perceptron's parameters: 2h + (h + 1)h + (h + 1), three short of a square."""
        return self.width**2 - 3


@dataclass(frozen=True, slots=True)
class Trial:
    """One size, given to one side.

    Attributes:
        folder: For all that the side writes; the side's alone.
        size: The model.
        rounds: Rounds to run, at least two: the first does not count.
        model: The initial model [size.values] as a .npy file of float32 values.
        updates: Each site's update, in the same form.
    """

    folder: Path
    size: Size
    rounds: int
    model: Path
    updates: tuple[Path, ...]

    @classmethod
    def prepare(cls, folder: Path, size: Size, *, rounds: int, sites: int) -> Self:
        """Writes the vectors, the same for the same size, below `folder`."""
        paths = tuple(folder / f"{name}.npy" for name in ("model", *(f"update-{site}" for site in range(sites))))
        for seed, path in enumerate(paths):
            np.save(path, 0.01 * np.random.default_rng(seed).standard_normal(size.values, dtype=np.float32))
        return cls(folder, size, rounds, paths[0], paths[1:])


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def progress(text: str) -> None:
    """Tells the person who waits, on standard error."""
    print(text, file=sys.stderr, flush=True)
