"""A model's flat view and its safetensors bytes mean the same, and nothing else passes for a model."""

import json
import struct

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import LocalProtocolError, RemoteProtocolError
from federation.vector import F32, Layout, TensorSpec, from_safetensors, to_safetensors

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
ONE = struct.pack("<f", 1.0)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12)
LAYOUTS = st.dictionaries(NAMES.filter(lambda name: name != "__metadata__"), SHAPES, max_size=5).map(
    lambda shapes: Layout(tuple(TensorSpec(name, shape) for name, shape in shapes.items()))
)


def values(layout: Layout, seed: int) -> F32:
    """Some finite values for `layout`."""
    return np.random.default_rng(seed).normal(size=layout.size).astype(np.float32)


def file(header: object, data: bytes = b"") -> bytes:
    """Safetensors bytes with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin: object = 0, end: object = 4, shape: object = (1,), dtype: object = "F32") -> dict[str, object]:
    """A tensor's declaration."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@given(LAYOUTS, st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_bytes_give_back_layout_and_values(layout: Layout, seed: int) -> None:
    """What is written is read: every tensor, and the order of those that hold values."""
    flat = values(layout, seed)
    read, again = from_safetensors(to_safetensors(layout, flat, {"job": "heart"}))
    assert set(read.tensors) == set(layout.tensors)
    assert [t for t in read.tensors if t.size] == [t for t in layout.tensors if t.size]
    assert again.tobytes() == flat.tobytes()


@given(LAYOUTS, st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_flattening_and_views_are_each_other_s_inverse(layout: Layout, seed: int) -> None:
    """Views of a vector flatten to that vector, and have the declared shapes."""
    flat = values(layout, seed)
    views = layout.views(flat)
    assert Layout.of(views) == layout
    assert layout.flatten(views).tobytes() == flat.tobytes()


@given(st.binary(max_size=120))
@settings(deadline=None, max_examples=50)
def test_random_bytes_are_refused_and_nothing_worse(blob: bytes) -> None:
    """No bytes break the reader."""
    with pytest.raises(RemoteProtocolError):
        from_safetensors(blob)


@given(st.integers(0, 10**6), st.integers(0, 255))
@settings(deadline=None, max_examples=50)
def test_a_changed_byte_gives_a_model_or_a_refusal(place: int, byte: int) -> None:
    """One changed byte never breaks the reader."""
    layout = Layout((TensorSpec("w", (2, 3)), TensorSpec("b", (3,))))
    blob = bytearray(to_safetensors(layout, values(layout, 0)))
    blob[place % len(blob)] = byte
    try:
        read, flat = from_safetensors(bytes(blob))
    except RemoteProtocolError:
        return
    assert flat.shape == (read.size,)


def test_the_reference_library_reads_what_we_write() -> None:
    """The bytes are a safetensors file to safetensors itself."""
    layout = Layout((TensorSpec("w", (2, 3)), TensorSpec("b", ())))
    flat = values(layout, 1)
    read = safetensors.numpy.load(to_safetensors(layout, flat))
    assert {name: array.tolist() for name, array in read.items()} == {
        name: view.tolist() for name, view in layout.views(flat).items()
    }


def test_we_read_what_the_reference_library_writes() -> None:
    """A file of safetensors itself is a model to us."""
    blob = safetensors.numpy.save({"w": np.ones((2, 2), np.float32)})
    layout, flat = from_safetensors(memoryview(blob))
    assert (layout, flat.tolist()) == (Layout((TensorSpec("w", (2, 2)),)), [1.0] * 4)


def test_tensors_may_be_declared_in_any_order_empty_ones_too() -> None:
    """The offsets order them; an empty one stands before what begins where it lies."""
    blob = file({"b": entry(4, 8), "a": entry(0, 4), "none": entry(4, 4, (0,))}, ONE * 2)
    layout, _ = from_safetensors(blob)
    assert [tensor.name for tensor in layout.tensors] == ["a", "none", "b"]


def test_equal_models_have_equal_bytes() -> None:
    """Metadata in another order changes nothing: the digest names the model."""
    layout = Layout((TensorSpec("w", (2,)),))
    flat = values(layout, 0)
    assert to_safetensors(layout, flat, {"a": "1", "b": "2"}) == to_safetensors(layout, flat, {"b": "2", "a": "1"})


def test_a_read_vector_cannot_be_written_to() -> None:
    """The vector is a read-only view, even of bytes that are not."""
    layout = Layout((TensorSpec("w", (2,)),))
    _, flat = from_safetensors(memoryview(bytearray(to_safetensors(layout, values(layout, 0)))))
    with pytest.raises(ValueError, match="read-only"):
        flat[0] = 1.0


def test_a_write_to_a_view_is_a_write_to_the_vector() -> None:
    """Views share the vector's memory."""
    layout = Layout((TensorSpec("a", (2,)), TensorSpec("b", (2,))))
    flat = np.zeros(4, np.float32)
    layout.views(flat)["b"][0] = 7
    assert flat.tolist() == [0, 0, 7, 0]


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[31m", "x" * 513])
def test_a_name_that_no_tensor_has_is_refused(name: str) -> None:
    """Names are 1 to 512 printable characters."""
    with pytest.raises(RemoteProtocolError, match=r"must be 1\.\.512 printable characters"):
        TensorSpec(name, (1,))


@pytest.mark.parametrize(
    "shape",
    [(-1,), (1,) * 9, (2**40 + 1,), (2**20, 2**21), (0, 2**63), (2**40, 0, 2**40), (-1, 10**4000)],
    ids=["negative", "rank", "extent", "values", "beside nothing", "around nothing", "digits"],
)
def test_a_shape_that_no_tensor_has_is_refused(shape: tuple[int, ...]) -> None:
    """Shapes have at most eight extents, none negative, and 2^40 values; also those of tensors without values."""
    with pytest.raises(RemoteProtocolError, match="declares the impossible shape") as refused:
        TensorSpec("w", shape)
    assert len(refused.value.problem) < 200


def test_two_tensors_of_one_name_are_refused() -> None:
    """A name means one tensor."""
    with pytest.raises(RemoteProtocolError, match="bear the same name"):
        Layout((TensorSpec("w", (1,)), TensorSpec("w", (2,))))


def test_a_vector_of_another_length_is_refused() -> None:
    """A vector has as many values as its layout."""
    layout = Layout((TensorSpec("w", (3,)),))
    with pytest.raises(RemoteProtocolError, match="a vector of 4 values cannot be a model of 3"):
        layout.views(np.zeros(4, np.float32))
    with pytest.raises(LocalProtocolError, match="a vector of 4 values cannot be a model of 3"):
        to_safetensors(layout, np.zeros(4, np.float32))


@pytest.mark.parametrize("tensors", [{}, {"w": np.zeros(1)}, {"w": np.zeros((1, 3))}])
def test_a_missing_or_misshapen_tensor_is_not_flattened(tensors: dict[str, F32]) -> None:
    """Nothing is broadcast into a model."""
    with pytest.raises(LocalProtocolError, match=r"tensor 'w' is missing or has not the shape \(3,\)"):
        Layout((TensorSpec("w", (3,)),)).flatten(tensors)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"1234567", "shorter than its header"),
        (struct.pack("<Q", 2**63) + b"{}", f"a header of {2**63} bytes, more than it has"),
        (file(b"{nonsense"), "header is not JSON"),
        (file(b"\xff\xfe"), "header is not JSON"),
        (file(b"[" * 100_000), "header is not JSON"),
        (file([]), "header is not an object"),
        (file({"w": 3}), "tensor 'w' of a model is not declared as safetensors are"),
        (file({"w": {}}), "is not declared as safetensors are"),
        (file({"w": entry(begin=0.0)}, ONE), "is not declared as safetensors are"),
        (file({"w": entry(shape="1")}, ONE), "is not declared as safetensors are"),
        (file({"w": entry(shape=[True])}, ONE), "is not declared as safetensors are"),
        (file(b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}', ONE), "is not declared as"),
        (file({"w": entry(dtype="F64")}, ONE), "is not float32 of its declared shape"),
        (file({"w": entry(shape=[2])}, ONE), "is not float32 of its declared shape"),
        (file({"w": entry(), "v": entry()}, ONE), "overlaps another or leaves a gap"),
        (file({"w": entry(begin=4, end=8)}, ONE * 2), "overlaps another or leaves a gap"),
        (file({"w": entry(begin=-4, end=0)}, ONE), "overlaps another or leaves a gap"),
        (file({"w": entry()}, ONE * 2), "do not fill its file"),
        (file({"w": entry()}), "do not fill its file"),
        (file({"w": entry()}, struct.pack("<f", np.nan)), "NaN or infinite values"),
        (file({"w": entry()}, struct.pack("<f", np.inf)), "NaN or infinite values"),
        (file({"": entry()}, ONE), r"must be 1\.\.512 printable characters"),
        (file({"w": entry(shape=[-1])}, ONE), "declares the impossible shape"),
    ],
)
def test_what_is_no_finite_float32_safetensors_file_is_refused(blob: bytes, message: str) -> None:
    """Each way of not being a model has its own words."""
    with pytest.raises(RemoteProtocolError, match=message):
        from_safetensors(blob)


def test_a_header_longer_than_any_model_s_is_refused() -> None:
    """A header has at most 16 MiB, even where the file is longer."""
    length = 16 * 1024 * 1024 + 1
    with pytest.raises(RemoteProtocolError, match=f"a header of {length} bytes"):
        from_safetensors(struct.pack("<Q", length) + bytes(length))
