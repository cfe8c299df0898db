"""A strategy's memory from step to step: named float64 vectors in a file, read and written a block at a time."""

import os
import secrets

import numpy as np
from safetensors import safe_open

from federation.blobs import BlobRef, BlobStore
from federation.errors import StorageError
from federation.vector import F64, Layout, TensorSpec, header
from strategies.strategy import State, Strategy

__all__ = ["Memory"]


class Memory:
    """A strategy's state on its way from one step to the next: read from one safetensors file, written to another."""

    def __init__(self, blobs: BlobStore, old: BlobRef | None, strategy: Strategy, size: int) -> None:
        self._blobs = blobs
        self._strategy = strategy
        names = tuple(sorted(strategy.initial(0)))
        self._old = None if old is None else safe_open(blobs.path(old), framework="numpy")
        self._layout = Layout(tuple(TensorSpec(name, (size,)) for name in names))
        beginning = header(self._layout, dtype="F64")
        self._path = blobs.folder / f"state-{secrets.token_hex(8)}.part"
        self._path.write_bytes(beginning)
        os.truncate(self._path, len(beginning) + 8 * self._layout.size)
        self._new = {
            name: np.memmap(self._path, "<f8", "r+", len(beginning) + 8 * size * place, (size,))
            for place, name in enumerate(names)
            if size
        }

    @classmethod
    def opened(cls, blobs: BlobStore, old: BlobRef | None, strategy: Strategy, size: int) -> "Memory":
        """The state after the step that gave `old`; before the first step, None."""
        try:
            return cls(blobs, old, strategy, size)
        except OSError as refused:
            problem = f"cannot write to {blobs.folder}: {refused.strerror}"
            raise StorageError(problem, fix="free disk space, or make the folder writable") from refused

    def read(self, part: slice) -> State:
        """A block of the old state."""
        return {name: self._slice(name, part) for name in self._new}

    def _slice(self, name: str, part: slice) -> F64:
        if self._old is None:
            return self._strategy.initial(part.stop - part.start)[name]
        values: F64 = self._old.get_slice(name)[part]  # type: ignore[no-untyped-call]
        return values

    def write(self, part: slice, state: State) -> None:
        """A block of the new state."""
        for name, values in self._new.items():
            values[part] = state[name]

    def kept(self) -> BlobRef:
        """The new state as a payload."""
        for values in self._new.values():
            values.flush()
        return self._blobs.take(self._path)

    def close(self) -> None:
        """Forgets a new state that was not kept."""
        self._new.clear()
        self._path.unlink(missing_ok=True)
