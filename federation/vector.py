"""The flat view of a model: named tensors in a fixed order, one float32 vector, and safetensors bytes between them."""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt

from federation.errors import LocalProtocolError, RemoteProtocolError

__all__ = [
    "BLOCK",
    "F32",
    "F64",
    "Layout",
    "TensorSpec",
    "finite",
    "from_safetensors",
    "header",
    "spans",
    "to_safetensors",
]

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

BLOCK = 65_536
"""Values worked on at a time where a vector may be large: they stay in the processor's cache."""

_MAX_HEADER = 16 * 1024 * 1024
_MAX_RANK = 8
_MAX_VALUES = 2**40
"""Of a tensor without its extents of 0: numpy refuses an empty array, too, whose other extents are absurd."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor's name and shape; its values are float32."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuses a name or shape that no model has."""
        if not self.name or len(self.name) > 512 or not self.name.isprintable():  # noqa: PLR2004 - a sane upper bound
            raise RemoteProtocolError(f"a tensor's name must be 1..512 printable characters, not {self.name[:40]!r}")
        real = len(self.shape) <= _MAX_RANK and all(0 <= extent <= _MAX_VALUES for extent in self.shape)
        if not real or prod(max(1, extent) for extent in self.shape) > _MAX_VALUES:
            raise RemoteProtocolError(f"tensor {self.name!r} declares the impossible shape {str(self.shape)[:80]}")

    @property
    def size(self) -> int:
        """Number of values."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and shapes of a model's tensors in the order in which they stand in its flat vector."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        """Refuses two tensors of one name."""
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            raise RemoteProtocolError("two tensors of one model bear the same name")

    @property
    def size(self) -> int:
        """Number of values in the flat vector."""
        return sum(tensor.size for tensor in self.tensors)

    @classmethod
    def of(cls, tensors: Mapping[str, npt.NDArray[np.floating]]) -> "Layout":
        """The layout of named arrays, in the mapping's order."""
        return cls(tuple(TensorSpec(name, tuple(array.shape)) for name, array in tensors.items()))

    def flatten(self, tensors: Mapping[str, npt.NDArray[np.floating]]) -> F32:
        """One float32 vector of length `size` that holds `tensors` in this order.

        Raises:
            LocalProtocolError: A tensor is missing or has another shape.
        """
        flat = np.empty(self.size, dtype=np.float32)
        for name, view in self.views(flat).items():
            if name not in tensors or tensors[name].shape != view.shape:
                raise LocalProtocolError(f"tensor {name!r} is missing or has not the shape {view.shape}")
            view[...] = tensors[name]
        return flat

    def views(self, flat: F32) -> dict[str, F32]:
        """Named views into `flat`; writing to one writes to the vector.

        Raises:
            RemoteProtocolError: `flat` has another length.
        """
        if flat.shape != (self.size,):
            raise RemoteProtocolError(f"a vector of {flat.size} values cannot be a model of {self.size}")
        views: dict[str, F32] = {}
        start = 0
        for tensor in self.tensors:
            views[tensor.name] = flat[start : start + tensor.size].reshape(tensor.shape)
            start += tensor.size
        return views


def header(layout: Layout, metadata: Mapping[str, str] | None = None, *, dtype: Literal["F32", "F64"] = "F32") -> bytes:
    """The beginning of a safetensors file of this layout, after which its values stand; equal input, equal bytes."""
    width = {"F32": 4, "F64": 8}[dtype]
    fields: dict[str, object] = {}
    if metadata:
        fields["__metadata__"] = dict(sorted(metadata.items()))
    start = 0
    for tensor in layout.tensors:
        end = start + width * tensor.size
        fields[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def to_safetensors(layout: Layout, flat: F32, metadata: Mapping[str, str] | None = None) -> bytes:
    """The model as the bytes of a safetensors file; equal input gives equal bytes.

    Raises:
        LocalProtocolError: `flat` has not the layout's length.
    """
    if flat.shape != (layout.size,):
        raise LocalProtocolError(f"a vector of {flat.size} values cannot be a model of {layout.size}")
    return b"".join((header(layout, metadata), np.ascontiguousarray(flat, dtype="<f4").data))


def spans(block: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) index of each block of `block` values from `start` to `stop`; the last is shorter."""
    return ((first, min(first + block, stop)) for first in range(start, stop, block))


def finite(values: npt.NDArray[np.floating]) -> bool:
    """Whether all values are finite; looks at a block at a time, so that it needs no memory to speak of."""
    return all(bool(np.isfinite(values[start : start + BLOCK]).all()) for start in range(0, values.size, BLOCK))


def from_safetensors(blob: bytes | memoryview) -> tuple[Layout, F32]:
    """Layout and flat vector of safetensors bytes; the vector is a read-only view of `blob`.

    Raises:
        RemoteProtocolError: The bytes are not a float32 safetensors file whose tensors fill it without gap or overlap,
            or a value is not finite.
    """
    view = memoryview(blob)
    fix = "send a safetensors file of finite float32 tensors"
    if len(view) < 8:  # noqa: PLR2004 - the length of the length
        raise RemoteProtocolError("a model must be a safetensors file; this is shorter than its header", fix=fix)
    (length,) = struct.unpack_from("<Q", view)
    if length > min(_MAX_HEADER, len(view) - 8):
        raise RemoteProtocolError(f"a model declares a header of {length} bytes, more than it has", fix=fix)
    try:
        fields = json.loads(bytes(view[8 : 8 + length]))
    except (ValueError, RecursionError) as broken:
        raise RemoteProtocolError("a model's safetensors header is not JSON", fix=fix) from broken
    if not isinstance(fields, dict):
        raise RemoteProtocolError("a model's safetensors header is not an object", fix=fix)
    fields.pop("__metadata__", None)
    specs: list[tuple[int, int, TensorSpec]] = []
    for name, entry in fields.items():
        try:
            begin, end = map(_whole, entry["data_offsets"])
            spec = TensorSpec(name, tuple(map(_whole, entry["shape"])))
            dtype = entry["dtype"]
        except (TypeError, KeyError, ValueError) as broken:
            raise RemoteProtocolError(
                f"tensor {name[:40]!r} of a model is not declared as safetensors are", fix=fix
            ) from broken
        if dtype != "F32" or end - begin != 4 * spec.size:
            raise RemoteProtocolError(f"tensor {name!r} of a model is not float32 of its declared shape", fix=fix)
        specs.append((begin, end, spec))
    specs.sort(key=lambda item: item[:2])
    expected = 0
    for begin, _, spec in specs:
        if begin != expected:
            raise RemoteProtocolError(f"tensor {spec.name!r} of a model overlaps another or leaves a gap", fix=fix)
        expected += 4 * spec.size
    if expected != len(view) - 8 - length:
        raise RemoteProtocolError("a model's tensors do not fill its file", fix=fix)
    flat = np.frombuffer(view[8 + length :], dtype="<f4")
    flat.flags.writeable = False
    if not finite(flat):
        raise RemoteProtocolError("a model holds NaN or infinite values", fix=fix)
    return Layout(tuple(spec for *_, spec in specs)), flat


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError
    return value
