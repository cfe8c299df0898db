"""What the codec promises of every message that `federation.messages` declares, found by itself."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from federation import codec, messages
from federation.blobs import BlobRef
from federation.errors import LocalProtocolError, RemoteProtocolError
from federation.findings import Finding
from federation.proto import parley_pb2

ROOT = Path(__file__).parents[2]
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
FEW = settings(PATIENT, max_examples=10)
MANY = settings(PATIENT, max_examples=40)

MESSAGES = [cls for cls in vars(messages).values() if isinstance(cls, type) and is_dataclass(cls)]


@dataclass(frozen=True)
class Envelope:
    """One of the codec's envelopes: the messages it carries and its two functions."""

    name: str
    union: UnionType
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]

    @property
    def carried(self) -> tuple[type, ...]:
        """The messages that the envelope carries."""
        return get_args(self.union)


ENVELOPES = [
    Envelope("FromSite", messages.FromSite, codec.encode_from_site, codec.decode_from_site),
    Envelope("FromCoordinator", messages.FromCoordinator, codec.encode_from_coordinator, codec.decode_from_coordinator),
    Envelope("UploadRequest", messages.UploadRequest, codec.encode_upload_request, codec.decode_upload_request),
    Envelope("UploadReply", messages.UploadReply, codec.encode_upload_reply, codec.decode_upload_reply),
    Envelope("OperatorRequest", messages.OperatorRequest, codec.encode_operator_request, codec.decode_operator_request),
    Envelope("OperatorReply", messages.OperatorReply, codec.encode_operator_reply, codec.decode_operator_reply),
]

every_message = pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
every_envelope = pytest.mark.parametrize("envelope", ENVELOPES, ids=lambda envelope: envelope.name)

# ------------------------------------------------------------------------------------- strategies, from the type hints

NAMES = st.text("abcxyz0189", min_size=1, max_size=63)
SERIALS = st.binary(min_size=16, max_size=16).map(bytes.hex)
DIGESTS = st.binary(min_size=32, max_size=32)
SIGNATURES = st.binary(min_size=64, max_size=64)

BY_TYPE: dict[object, SearchStrategy[Any]] = {
    bool: st.booleans(),
    bytes: st.binary(min_size=1, max_size=100),
    messages.Bytes: st.binary(min_size=1, max_size=100),
    float: st.floats(0, 253_402_300_799),
    int: st.integers(0, 2**63 - 1),
    str: st.text(max_size=100),
}
BY_NAME: dict[str, SearchStrategy[Any]] = {
    "consortium": NAMES,
    "deadline_seconds": st.floats(0, 1e9, exclude_min=True),
    "digest": DIGESTS,
    "heartbeat_seconds": st.floats(0, 3600, exclude_min=True),
    "id": NAMES,
    "invitation": SERIALS,
    "issued": st.integers(0, 253_402_300_799),
    "job": NAMES,
    "job_digest": DIGESTS,
    "name": NAMES,
    "nonce": DIGESTS,
    "not_after": st.integers(2**31, 253_402_300_799),
    "not_before": st.integers(1, 2**31 - 1),
    "offset": st.integers(0, 2**20),
    "organisation": NAMES,
    "proof": SIGNATURES,
    "protocol_key": DIGESTS,
    "protocol_proof": SIGNATURES,
    "serial": SERIALS,
    "serials": st.lists(SERIALS, max_size=3).map(tuple),
    "signature": SIGNATURES,
    "step": st.integers(1, 2**63 - 1),
    "tls_key": DIGESTS,
    "weight": st.floats(0, 1e15, exclude_min=True),
}
"""Values of a field that a message takes only some of; whatever else a message refuses is drawn anew."""
BY_FIELD: dict[tuple[type, str], SearchStrategy[Any]] = {
    (messages.Metric, "value"): st.floats(allow_nan=False, allow_infinity=False),
}


def values(hint: Any) -> SearchStrategy[Any]:
    """Values of a field declared as `hint`."""
    arguments = get_args(hint)
    if hint in BY_TYPE:
        return BY_TYPE[hint]
    if get_origin(hint) is Literal:
        return st.sampled_from(arguments)
    if get_origin(hint) is tuple:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    if NoneType in arguments:
        return st.none() | values(arguments[0])
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    return valid(hint)


def built(cls: type, drawn: Mapping[str, Any]) -> Any:
    """The message of these fields, or None where it refuses them."""
    try:
        return cls(**drawn)
    except RemoteProtocolError:
        return None


@cache
def valid(cls: type) -> SearchStrategy[Any]:
    """Instances of `cls`."""
    drawn = st.fixed_dictionaries(
        {
            name: BY_FIELD[cls, name] if (cls, name) in BY_FIELD else BY_NAME[name] if name in BY_NAME else values(hint)
            for name, hint in get_type_hints(cls).items()
        }
    )
    return drawn.map(lambda found: built(cls, found)).filter(lambda message: message is not None)


# ------------------------------------------------------------------------------------------------------------ examples

STATEMENT = messages.MembershipStatement(
    consortium="heart",
    serial="0f" * 16,
    name="cleveland",
    organisation="clinic",
    role=messages.Role.SITE,
    tls_key=b"t" * 32,
    protocol_key=b"p" * 32,
    not_before=1,
    not_after=2,
    signature=b"s" * 64,
)
PAYLOAD = BlobRef(b"d" * 32, 1000)
STEP = messages.StepStart("job-1", 3, 0, messages.StepKind.TRAIN, 2, PAYLOAD, PAYLOAD, 14, 600.0)
HELLO = messages.Hello(messages.PROTOCOL, "parley 0.1.0", STATEMENT, b"n" * 32, 1.5)
REFUSED = messages.JobRefused("job-1", (Finding("data.columns[2]", "the unit differs", "convert to mg/dl"),))


def varint(value: int) -> bytes:
    """Protobuf's variable-length integer."""
    head = b""
    while value > 0x7F:
        head += bytes([value & 0x7F | 0x80])
        value >>= 7
    return head + bytes([value])


# --------------------------------------------------------------------------------------------------------- round trips


@every_message
@given(data=st.data())
@FEW
def test_every_message_comes_back_equal(cls: type, data: st.DataObject) -> None:
    """What `encode` made of a message, `decode` makes into an equal one of the same types; a payload into a view."""
    message = data.draw(valid(cls))
    back: object = codec.decode(cls, codec.encode(message))
    assert back == message
    assert repr(back) == repr(message)
    assert not isinstance(back, messages.UploadChunk) or isinstance(back.content, memoryview)


@every_envelope
@given(data=st.data())
@MANY
def test_every_envelope_gives_back_what_it_carries(envelope: Envelope, data: st.DataObject) -> None:
    """Any message that an envelope carries comes out of it equal, and of the same type."""
    message = data.draw(st.sampled_from(envelope.carried).flatmap(valid))
    back = envelope.decode(envelope.encode(message))
    assert back == message
    assert type(back) is type(message)


@every_message
@given(data=st.data())
@FEW
def test_the_bytes_are_those_that_protobuf_itself_writes(cls: type, data: st.DataObject) -> None:
    """Parsing and serialising anew with protobuf alone changes nothing: a foreign implementation can read and write."""
    encoded = codec.encode(data.draw(valid(cls)))
    assert getattr(parley_pb2, cls.__name__).FromString(encoded).SerializeToString() == encoded


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, 2 * 1024 * 1024])
def test_a_chunk_of_any_size_is_framed_as_protobuf_does(size: int) -> None:
    """Our own framing of payloads equals protobuf's, on both sides of each length of the length."""
    chunk = messages.UploadChunk(bytes(size))
    wire = parley_pb2.UploadChunk(content=chunk.content)
    assert codec.encode(chunk) == wire.SerializeToString()
    assert codec.encode_upload_request(chunk) == parley_pb2.UploadRequest(upload_chunk=wire).SerializeToString()
    assert codec.decode_upload_request(codec.encode_upload_request(chunk)) == chunk


FRAMES = {
    "content": (wire_chunk := b"\x0a\x01x"),
    "a length in more bytes than it needs": b"\x0a\x81\x00x",
    "an unknown field behind it": wire_chunk + b"\xba\x3e\x00",
    "the field twice: the last one counts": b"\x0a\x01y" + wire_chunk,
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_chunk_framed_otherwise_means_what_protobuf_takes_it_for(name: str) -> None:
    """Our reading of a payload without protobuf takes no other message for one, and leaves none out."""
    wire = FRAMES[name]
    assert codec.decode(messages.UploadChunk, wire) == messages.UploadChunk(b"x")
    envelope = b"\x12" + bytes([len(wire)]) + wire
    assert codec.decode_upload_request(envelope) == messages.UploadChunk(b"x")


@given(st.binary(max_size=40))
@MANY
def test_a_chunk_is_read_as_protobuf_reads_it(tail: bytes) -> None:
    """Whatever follows a payload's tag: our own reading and protobuf's agree on content and on refusal."""
    wire = b"\x0a" + tail
    try:
        expected = parley_pb2.UploadChunk.FromString(wire).content
    except DecodeError:
        expected = b""
    if expected:
        assert codec.decode(messages.UploadChunk, wire).content == expected
    else:
        assert "malformed UploadChunk" in refusal(partial(codec.decode, messages.UploadChunk), wire)


def test_a_nested_message_without_any_value_is_still_there() -> None:
    """A part whose every field is at protobuf's default is told from a part that is missing."""
    field = codec._field("FromSite", "heartbeat", messages.Heartbeat)
    wire = parley_pb2.FromSite()
    field.write(wire, messages.Heartbeat())
    assert field.read(parley_pb2.FromSite.FromString(wire.SerializeToString())) == messages.Heartbeat()


def test_fields_of_a_later_release_are_ignored() -> None:
    """A field that this release does not know, in a message or in an envelope, changes nothing."""
    unknown = varint(999 << 3 | 2) + b"\x05later"
    assert codec.decode(messages.Hello, codec.encode(HELLO) + unknown) == HELLO
    assert codec.decode_from_site(codec.encode_from_site(HELLO) + unknown) == HELLO


# ---------------------------------------------------------------------------------------------- refused on the way in


def refusal(decode: Callable[[bytes], object], data: bytes) -> str:
    """The text with which `decode` refuses `data`, or nothing if it takes it; any other error fails the test."""
    try:
        decode(data)
    except RemoteProtocolError as refused:
        return refused.problem
    return ""


@every_message
@given(data=st.binary(max_size=200))
@FEW
def test_arbitrary_bytes_are_a_message_or_refused_by_name(cls: type, data: bytes) -> None:
    """Whatever bytes come, `decode` gives a valid message or a refusal that names the message."""
    problem = refusal(lambda sent: codec.decode(cls, sent), data)
    assert not problem or cls.__name__ in problem


@every_envelope
@given(data=st.binary(max_size=200))
@MANY
def test_arbitrary_bytes_are_an_envelope_or_refused_by_name(envelope: Envelope, data: bytes) -> None:
    """Whatever bytes come, an envelope gives a valid message or a refusal that names it or the message in it."""
    problem = refusal(envelope.decode, data)
    names = [envelope.name, *(cls.__name__ for cls in envelope.carried)]
    assert not problem or any(name in problem for name in names)


FLIPPED: list[tuple[Any, Envelope]] = [
    (HELLO, ENVELOPES[0]),
    (REFUSED, ENVELOPES[0]),
    (messages.Contribution("job-1", 3, 0, PAYLOAD, 199.0, 0.25), ENVELOPES[0]),
    (STEP, ENVELOPES[1]),
    (messages.JobOffer("job-1", "format = 1", (STATEMENT, STATEMENT)), ENVELOPES[1]),
    (messages.UploadChunk(b"bytes of a model"), ENVELOPES[2]),
]


@pytest.mark.parametrize(("message", "envelope"), FLIPPED, ids=lambda value: type(value).__name__)
def test_every_flipped_bit_is_another_message_or_refused(message: object, envelope: Envelope) -> None:
    """No single bit, flipped on the way, raises anything but a refusal that names a message."""
    sent = envelope.encode(message)
    names = [envelope.name, *(cls.__name__ for cls in envelope.carried)]
    for bit in range(8 * len(sent)):
        flipped = bytearray(sent)
        flipped[bit // 8] ^= 1 << bit % 8
        problem = refusal(envelope.decode, bytes(flipped))
        assert not problem or any(name in problem for name in names)


@pytest.mark.parametrize(("message", "envelope"), FLIPPED, ids=lambda value: type(value).__name__)
def test_every_truncation_is_refused(message: object, envelope: Envelope) -> None:
    """An envelope that lost its end is refused, however much it lost."""
    sent = envelope.encode(message)
    for length in range(len(sent)):
        assert envelope.name in refusal(envelope.decode, sent[:length])


@every_envelope
def test_an_empty_envelope_is_refused(envelope: Envelope) -> None:
    """An envelope without a message is refused by its name."""
    assert refusal(envelope.decode, b"") == f"{envelope.name} carries no message known here"


@every_envelope
def test_a_message_of_a_later_release_is_refused(envelope: Envelope) -> None:
    """An envelope whose message this release does not know is refused, with the way out."""
    with pytest.raises(RemoteProtocolError) as refused:
        envelope.decode(varint(99 << 3 | 2) + b"\x00")
    assert str(refused.value) == (
        f"{envelope.name} carries no message known here. "
        "To fix (Parley's developers): install the same release of Parley on both sides"
    )


def wire_hello(**changes: Any) -> Any:
    """A valid Hello as protobuf has it, with the statement's fields changed."""
    wire = parley_pb2.Hello.FromString(codec.encode(HELLO))
    for name, value in changes.items():
        setattr(wire.statement, name, value)
    return wire


def wire_refused(**changes: Any) -> Any:
    """A valid JobRefused as protobuf has it, with the finding's fields changed."""
    wire = parley_pb2.JobRefused.FromString(codec.encode(REFUSED))
    for name, value in changes.items():
        setattr(wire.findings[0], name, value)
    return wire


def wire_contribution(**changes: Any) -> Any:
    """A valid Contribution as protobuf has it, with fields changed."""
    wire = parley_pb2.Contribution.FromString(codec.encode(FLIPPED[2][0]))
    for name, value in changes.items():
        setattr(wire, name, value)
    return wire


def without(wire: Any, name: str) -> Any:
    """The wire message without field `name`."""
    wire.ClearField(name)
    return wire


REFUSALS: list[tuple[type, Callable[[], Any], str]] = [
    (
        messages.Hello,
        lambda: wire_hello(role="king"),
        "malformed Hello: MembershipStatement.role must be one of site, operator, coordinator, not 'king'",
    ),
    (
        messages.Hello,
        lambda: wire_hello(role="k" * 1000),
        "malformed Hello: MembershipStatement.role must be one of site, operator, coordinator, not '" + "k" * 40 + "'",
    ),
    (messages.Hello, lambda: wire_hello(signature=b""), "malformed Hello: a root signature must have 64 bytes"),
    (messages.Hello, lambda: without(wire_hello(), "statement"), "malformed Hello: Hello.statement is missing"),
    (
        messages.JobRefused,
        lambda: wire_refused(level="rumour"),
        "malformed JobRefused: Finding.level must be one of refusal, warning, not 'rumour'",
    ),
    (
        messages.Contribution,
        lambda: wire_contribution(weight=float("nan")),
        "malformed Contribution: a weight must be a positive number of at most 1e15",
    ),
    (
        messages.Contribution,
        lambda: wire_contribution(step=2**64 - 1),
        "malformed Contribution: a count must be a whole number from 0 to 2^63 - 1",
    ),
    (
        messages.Contribution,
        lambda: without(wire_contribution(), "payload"),
        "malformed Contribution: Contribution.payload is missing",
    ),
]


@pytest.mark.parametrize(("cls", "wire", "problem"), REFUSALS, ids=[problem[:60] for *_, problem in REFUSALS])
def test_a_refusal_names_message_and_cause(cls: type, wire: Callable[[], Any], problem: str) -> None:
    """Unknown words, missing parts and values that a dataclass refuses: each is told with its message's name."""
    with pytest.raises(RemoteProtocolError) as refused:
        codec.decode(cls, wire().SerializeToString())
    assert refused.value.problem == problem
    assert refused.value.fix == "install the same release of Parley on both sides"


BROKEN_TEXT = b"\x12\x02\xff\xff"
"""A Hello whose `software` is not UTF-8."""


def test_bytes_that_are_not_protobuf_are_refused_by_name() -> None:
    """Bytes that protobuf cannot parse, and text that is not UTF-8, are refused with the message's name."""
    for data in (b"\xff", BROKEN_TEXT):
        expected = f"malformed Hello: its {len(data)} bytes are not that protobuf message"
        assert refusal(lambda sent: codec.decode(messages.Hello, sent), data) == expected


def test_protobuf_without_its_compiled_part_refuses_alike() -> None:
    """Where protobuf runs as plain Python, text that is not UTF-8 is refused in the same words."""
    program = (
        "from federation import codec, messages\n"
        "from federation.errors import RemoteProtocolError\n"
        "try:\n"
        f"    codec.decode(messages.Hello, {BROKEN_TEXT!r})\n"
        "except RemoteProtocolError as refused:\n"
        "    print(refused.problem)\n"
    )
    plain = {**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=plain, capture_output=True, text=True, check=True
    )
    assert run.stdout == "malformed Hello: its 4 bytes are not that protobuf message\n"


# --------------------------------------------------------------------------------------------- refused on the way out


def test_a_value_that_is_no_message_cannot_be_encoded() -> None:
    """Encoding anything but a message is our own bug, and named so."""
    with pytest.raises(LocalProtocolError, match="str cannot be encoded"):
        codec.encode("hello")


@every_envelope
def test_an_envelope_carries_only_its_own_messages(envelope: Envelope) -> None:
    """A message put into an envelope that does not carry it is our own bug; nothing is sent."""
    with pytest.raises(LocalProtocolError) as refused:
        envelope.encode(STATEMENT)
    assert refused.value.problem == f"{envelope.name} carries no MembershipStatement"


UNENCODABLE: list[Any] = [
    messages.Refusal("lone surrogate \ud800", "", "", ""),
    messages.ShowJob(["not a text"]),  # type: ignore[arg-type]  # the bug under test
    messages.Progress("job-1", 1, "working"),  # type: ignore[arg-type]  # the bug under test
    messages.UploadChunk("not bytes"),  # type: ignore[arg-type]  # the bug under test
]


@pytest.mark.parametrize("message", UNENCODABLE, ids=lambda message: type(message).__name__)
def test_a_value_of_the_wrong_type_cannot_be_encoded(message: object) -> None:
    """A field that does not hold what it declares is our own bug, told with the message's name."""
    with pytest.raises(LocalProtocolError, match=f"^{type(message).__name__} cannot be encoded: "):
        codec.encode(message)


@dataclass(frozen=True)
class Unmappable:
    """A message with a field of a type that the wire does not have."""

    table: dict[str, str]


def test_a_field_that_the_wire_has_no_type_for_is_refused_when_it_is_declared() -> None:
    """Whoever declares such a field learns of it at import, not when the first message is sent."""
    with pytest.raises(TypeError, match="the wire has no type for dict"):
        codec._field("Unmappable", "table", get_type_hints(Unmappable)["table"])


# ---------------------------------------------------------------------------------------------------------- the schema


@every_message
def test_the_schema_has_the_dataclass_fields_in_their_order(cls: Any) -> None:
    """Message and dataclass have the same fields, in the same order, numbered in it."""
    schema = parley_pb2.DESCRIPTOR.message_types_by_name[cls.__name__].fields
    assert [field.name for field in schema] == [field.name for field in fields(cls)]
    assert [field.number for field in schema] == sorted(field.number for field in schema)


@every_envelope
def test_an_envelope_carries_its_union(envelope: Envelope) -> None:
    """An envelope's oneof has the messages of its union, in their order."""
    body = parley_pb2.DESCRIPTOR.message_types_by_name[envelope.name].oneofs_by_name["body"]
    carried = [field.message_type for field in body.fields]
    assert [message.name for message in carried if message] == [cls.__name__ for cls in envelope.carried]


def test_the_schema_has_no_message_of_its_own() -> None:
    """Every message of the schema is a dataclass or an envelope, and the other way round."""
    declared = {cls.__name__ for cls in MESSAGES} | {envelope.name for envelope in ENVELOPES}
    assert set(parley_pb2.DESCRIPTOR.message_types_by_name) == declared


def test_the_paths_are_those_of_the_service() -> None:
    """The codec's constants name the service and the methods of the schema."""
    service = parley_pb2.DESCRIPTOR.services_by_name["Coordinator"]
    paths = {codec.ENROL, codec.ATTEND, codec.DOWNLOAD, codec.UPLOAD, codec.OPERATE, codec.WATCH}
    assert service.full_name == codec.SERVICE
    assert {f"/{codec.SERVICE}/{method.name}" for method in service.methods} == paths


def test_the_stubs_are_up_to_date(tmp_path: Path) -> None:
    """Generating the stubs anew from the schema gives the very files that are there."""
    tools = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", f"--mypy_out={tmp_path}"]
    subprocess.run(
        [*protoc, "federation/proto/parley.proto"], cwd=ROOT, env=tools, capture_output=True, text=True, check=True
    )
    for name in ("parley_pb2.py", "parley_pb2.pyi"):
        made = tmp_path / "federation" / "proto" / name
        assert made.read_text() == (ROOT / "federation" / "proto" / name).read_text()
