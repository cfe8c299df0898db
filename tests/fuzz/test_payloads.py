"""Whatever bytes come in the place of a payload are its values or refused, and no store ever holds half of one."""

import json
import struct
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from federation.blobs import BlobRef, BlobStore, Incoming
from federation.errors import RemoteProtocolError
from federation.vector import BLOCK, F32, Layout, TensorSpec, from_safetensors, to_safetensors
from privacy.secure_aggregation import interface
from privacy.secure_aggregation.plain import Plain
from tests.fuzz import corpus
from tests.fuzz.profiles import budget
from tests.fuzz.snapshot import refusal

EXTENTS = st.integers(0, 5) | st.sampled_from((2**31, 2**32, 2**63 - 1, 2**63, 10**4000, -1))
ABSURD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    EXTENTS,
    st.floats(),
    st.text(max_size=5),
    st.lists(EXTENTS, max_size=10),
    st.dictionaries(st.text(max_size=3), EXTENTS, max_size=2),
)
NAMES = st.text(max_size=6) | st.sampled_from(
    ("weight", "bias", "__metadata__", "\ud800", "\u0000", "x" * 513, "\u202e")
)


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    """The header of a model of a few tensors, in which any part may be wrong."""
    found: dict[str, Any] = {}
    start = 0
    for name in draw(st.lists(NAMES, max_size=4, unique=True)):
        shape = draw(st.lists(EXTENTS, max_size=3) | st.lists(st.integers(0, 3), max_size=9))
        size = int(np.prod([min(max(extent, 0), 6) for extent in shape], dtype=int))
        entry: dict[str, Any] = {"dtype": "F32", "shape": shape, "data_offsets": [start, start + 4 * size]}
        if draw(st.integers(0, 4)) == 0:
            entry[draw(st.sampled_from(sorted(entry)))] = draw(ABSURD)
        if draw(st.integers(0, 9)) == 0:
            entry = draw(ABSURD)
        found[name] = entry
        start += 4 * size
    return found


@st.composite
def models(draw: st.DrawFn) -> bytes:
    """Bytes that are nearly a safetensors file, or quite one: of entries as above, or of a model with bytes changed."""
    if kept := draw(st.sampled_from([b"", *corpus.seeds("safetensors")])):
        blob = bytearray(kept)
    elif draw(st.booleans()):
        text = json.dumps(draw(entries())).encode()
        length = draw(st.sampled_from((len(text),) * 6 + (0, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1)))
        values = draw(st.lists(st.floats(width=32), max_size=12))
        blob = bytearray(struct.pack("<Q", max(0, length)) + text + np.array(values, dtype="<f4").tobytes())
    else:
        layout = Layout((TensorSpec("weight", (2, 2)), TensorSpec("none", (0, 3)), TensorSpec("bias", (2,))))
        blob = bytearray(to_safetensors(layout, np.arange(6, dtype=np.float32), {"a": "b"}))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(blob) - 1)))
        blob[at : at + draw(st.integers(0, 2))] = draw(
            st.binary(max_size=3) | st.sampled_from((b"[", b'"', b"-", b"9"))
        )
    return bytes(blob)


def try_with(blob: bytes) -> None:
    """Holds what comes of `blob` to the promise."""
    read: list[tuple[Layout, F32]] = []
    if refused := refusal(lambda: read.append(from_safetensors(blob))):
        assert isinstance(refused, RemoteProtocolError)
        assert "model" in refused.problem or "tensor" in refused.problem
        assert len(refused.problem) < 1000
        assert refused.fix or "shape" in refused.problem or "name" in refused.problem
        corpus.keep("safetensors", refused.problem, blob)
        return
    ((layout, flat),) = read
    assert flat.shape == (layout.size,)
    assert bool(np.isfinite(flat).all())
    again, values = from_safetensors(to_safetensors(layout, flat))
    assert again == layout
    assert values.tobytes() == flat.tobytes()
    views = layout.views(flat)
    assert [view.shape for view in views.values()] == [tensor.shape for tensor in layout.tensors]
    corpus.keep("safetensors", f"a model of {layout.size and 'some'} values", blob)


def test_what_was_kept_is_a_model_or_refused() -> None:
    """Every model of the corpus meets the promise."""
    for blob in corpus.seeds("safetensors"):
        try_with(blob)


def declared(shape: list[int]) -> bytes:
    """A model of one tensor of this shape, and of no values."""
    text = json.dumps({"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    return struct.pack("<Q", len(text)) + text


@given(models())
@example(declared([0, 2**63]))
@example(declared([2**40, 2**40, 0]))
@example(declared([-1, 10**4000]))
@budget(100)
def test_nearly_models_are_models_or_refused(blob: bytes) -> None:
    """Headers with wrong types, absurd shapes and lengths, gaps, overlaps and strange names: values, or a refusal."""
    try_with(blob)


@given(
    size=st.integers(1, 6) | st.just(BLOCK + 1),
    words=st.sampled_from(("<f4", "<f8")),
    sent=st.lists(st.tuples(st.floats() | st.just(1.0), st.binary(max_size=50) | st.none()), max_size=5),
)
@budget(60)
def test_random_contributions_are_summed_or_refused(
    size: int, words: interface.WordType, sent: list[tuple[float, bytes | None]]
) -> None:
    """Of any bytes and weights those that are refused leave the sum as it was; what it comes to is finite."""
    total, honest = Plain().open(size, words), Plain().open(size, words)
    whole = np.ones(size, dtype=words).tobytes()
    for weight, content in sent:
        vector = whole if content is None else content.ljust(len(whole), b"\x00") if len(content) % 2 else content

        def source(start: int, count: int, vector: bytes = vector) -> bytes:
            return vector[start : start + count]

        if refused := refusal(partial(total.add, "a", weight, source)):
            assert "'a'" in refused.problem
            assert refused.fix
        else:
            honest.add("a", weight, source)
    assert total.total().tobytes() == honest.total().tobytes()
    assert bool(np.isfinite(total.total()).all())


CONTENTS = (b"", b"a", b"update" * 10, b"updatE" * 10)


class Store(RuleBasedStateMachine):
    """A folder of payloads whose transfers are begun, cut, continued, overrun and corrupted in any order."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.transfers: list[Incoming] = []

    def teardown(self) -> None:
        """The folder goes with the machine."""
        for transfer in self.transfers:
            transfer.pause()
        self._folder.cleanup()

    @initialize()
    def empty(self) -> None:
        """Nothing is here."""
        self.store = BlobStore(Path(self._folder.name), durable=False)

    @rule(content=st.sampled_from(CONTENTS), longer=st.sampled_from((0, 0, 0, -1, 1)))
    def begin(self, content: bytes, longer: int) -> None:
        """A transfer begins, or goes on where one was cut; its name may belong to a payload of another length."""
        ref = BlobRef(BlobRef.of(content).digest, max(0, len(content) + longer))
        if refused := refusal(lambda: self.transfers.append(self.store.receive(ref))):
            assert "being received already" in refused.problem
            assert any(each.ref.hex == ref.hex for each in self.transfers)

    @rule(at=st.integers(0, 5), chunk=st.sampled_from((b"", b"a", b"update", b"updatE", b"update" * 10)))
    def append(self, at: int, chunk: bytes) -> None:
        """Bytes come, the right ones or others; one too many ends the transfer and leaves nothing of it."""
        for transfer in self.transfers[at : at + 1]:
            before = transfer.offset
            if refused := refusal(partial(transfer.append, chunk)):
                assert "past its end" in refused.problem or "has ended" in refused.problem
                assert transfer.offset == before
            else:
                assert transfer.offset == before + len(chunk) <= transfer.ref.length

    @rule(at=st.integers(0, 5))
    def finish(self, at: int) -> None:
        """A transfer is said to be done: its payload is here, or it is refused."""
        for transfer in self.transfers[at : at + 1]:
            if not refusal(transfer.finish):
                assert BlobRef.of(self.store.path(transfer.ref).read_bytes()) == transfer.ref

    @rule(at=st.integers(0, 5), forget=st.booleans())
    def cut(self, at: int, forget: bool) -> None:  # noqa: FBT001 - hypothesis names it
        """A transfer is cut off, and taken up again or forgotten."""
        for transfer in self.transfers[at : at + 1]:
            if forget:
                transfer.discard()
            else:
                transfer.pause()

    @invariant()
    def whole(self) -> None:
        """Whatever bears a payload's name is that payload."""
        for path in self.store.folder.iterdir():
            if path.suffix != ".part":
                assert BlobRef.of(path.read_bytes()).hex == path.name
                assert self.store.has(BlobRef.of(path.read_bytes()))


TestStore = Store.TestCase
TestStore.settings = budget(15)
