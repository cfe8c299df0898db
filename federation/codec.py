"""Messages to bytes and back: protobuf behind the dataclasses of `federation.messages`, mapped by field name alone.

A message's plan is made once, at import, from its type hints and the wire class of the same name; no message has code
of its own here. Fields that this release does not know are ignored, so that a later one may add some. A message that it
does not know, or a known one with a value that its dataclass refuses, is a `RemoteProtocolError` that names it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import partial
from operator import attrgetter
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from federation import messages
from federation.errors import LocalProtocolError, RemoteProtocolError
from federation.messages import (
    Bytes,
    FromCoordinator,
    FromSite,
    OperatorReply,
    OperatorRequest,
    UploadReply,
    UploadRequest,
)
from federation.proto import parley_pb2

__all__ = [
    "ATTEND",
    "DOWNLOAD",
    "ENROL",
    "OPERATE",
    "SERVICE",
    "UPLOAD",
    "WATCH",
    "decode",
    "decode_from_coordinator",
    "decode_from_site",
    "decode_operator_reply",
    "decode_operator_request",
    "decode_upload_reply",
    "decode_upload_request",
    "encode",
    "encode_from_coordinator",
    "encode_from_site",
    "encode_operator_reply",
    "encode_operator_request",
    "encode_upload_reply",
    "encode_upload_request",
]

SERVICE = "parley.v1.Coordinator"
"""The gRPC service; the constants below are its methods' full paths."""
ENROL = f"/{SERVICE}/Enrol"
ATTEND = f"/{SERVICE}/Attend"
DOWNLOAD = f"/{SERVICE}/Download"
UPLOAD = f"/{SERVICE}/Upload"
OPERATE = f"/{SERVICE}/Operate"
WATCH = f"/{SERVICE}/Watch"

_FIX = "install the same release of Parley on both sides"
_SCALARS = frozenset({bool, bytes, Bytes, float, int, str})
_LONGEST_VARINT = 5
"""Bytes of a length: no gRPC message is longer than such a one says."""
_UNENCODABLE = (AttributeError, KeyError, TypeError, ValueError)
"""What protobuf, or a plan, raises over a value that is not of its field's declared type."""

M = TypeVar("M")


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits a byte
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _tag(number: int) -> bytes:
    """What stands before the length of a field of bytes or of a message."""
    return _varint(number << 3 | 2)


@dataclass(frozen=True, slots=True)
class _Field:
    """How one field is written to a wire message and read from it."""

    name: str
    write: Callable[[Any, Any], None]
    read: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Plan(Generic[M]):
    """How one dataclass is written to its wire message, in place and so without a copy, and read from it.

    `payload` is the tag and name of the one field of a message that is nothing but a payload.
    """

    cls: type[M]
    wire: type[Message]
    fields: tuple[_Field, ...]
    payload: tuple[bytes, str] | None

    def write(self, wire: Message, message: M) -> None:
        for field in self.fields:
            field.write(wire, getattr(message, field.name))

    def read(self, wire: Message) -> M:
        return self.cls(*[field.read(wire) for field in self.fields])


def _choice(owner: str, name: str, values: Mapping[str, object]) -> _Field:
    """A field whose values travel as words: an Enum's values, or a Literal's own."""
    words = {value: word for word, value in values.items()}

    def write(wire: Any, value: object) -> None:
        setattr(wire, name, words[value])

    def read(wire: Any) -> object:
        word = getattr(wire, name)
        if word not in values:
            problem = f"{owner}.{name} must be one of {', '.join(values)}, not {word[:40]!r}"
            raise RemoteProtocolError(problem, fix=_FIX)
        return values[word]

    return _Field(name, write, read)


def _nested(owner: str, name: str, plan: _Plan[Any], *, optional: bool) -> _Field:
    def write(wire: Any, value: object) -> None:
        if value is not None or not optional:
            part = getattr(wire, name)
            part.SetInParent()
            plan.write(part, value)

    def read(wire: Any) -> object:
        if wire.HasField(name):
            return plan.read(getattr(wire, name))
        if optional:
            return None
        raise RemoteProtocolError(f"{owner}.{name} is missing", fix=_FIX)

    return _Field(name, write, read)


def _repeated(name: str, plan: _Plan[Any] | None) -> _Field:
    """A tuple: of messages where there is a plan, of scalars where there is none."""

    def write(wire: Any, values: tuple[object, ...]) -> None:
        entries = getattr(wire, name)
        if plan is None:
            entries.extend(values)
        else:
            for value in values:
                plan.write(entries.add(), value)

    def read(wire: Any) -> tuple[object, ...]:
        entries = getattr(wire, name)
        return tuple(entries) if plan is None else tuple([plan.read(entry) for entry in entries])

    return _Field(name, write, read)


def _field(owner: str, name: str, hint: Any) -> _Field:
    arguments = get_args(hint)
    if hint in _SCALARS:
        return _Field(name, lambda wire, value: setattr(wire, name, value), attrgetter(name))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _choice(owner, name, {member.value: member for member in hint})
    if get_origin(hint) is Literal:
        return _choice(owner, name, {word: word for word in arguments})
    if arguments[1:] == (...,):
        return _repeated(name, None if arguments[0] in _SCALARS else _plan(arguments[0]))
    if arguments[1:] == (NoneType,):
        return _nested(owner, name, _plan(arguments[0]), optional=True)
    return _nested(owner, name, _plan(hint), optional=False)


def _plan(cls: Any) -> _Plan[Any]:
    """The plan of dataclass `cls`; whoever gives it a field that the wire has no type for learns of it at import."""
    if not is_dataclass(cls) or not isinstance(cls, type):
        raise TypeError(f"the wire has no type for {cls}")
    hints = get_type_hints(cls)
    wire: type[Message] = getattr(parley_pb2, cls.__name__)
    fields = tuple(_field(cls.__name__, name, hint) for name, hint in hints.items())
    marks = [(_tag(field.number), field.name) for field in wire.DESCRIPTOR.fields]
    return _Plan(cls, wire, fields, marks[0] if list(hints.values()) == [Bytes] else None)


_PLANS: Mapping[type, _Plan[Any]] = {
    cls: _plan(cls) for cls in vars(messages).values() if isinstance(cls, type) and is_dataclass(cls)
}


def _parse(wire: type[Message], data: bytes) -> Any:
    try:
        return wire.FromString(data)
    except (DecodeError, UnicodeDecodeError) as broken:  # the latter by protobuf without its compiled part
        problem = f"malformed {wire.__name__}: its {len(data)} bytes are not that protobuf message"
        raise RemoteProtocolError(problem, fix=_FIX) from broken


def _valid(plan: _Plan[M], read: Callable[[], M]) -> M:
    try:
        return read()
    except RemoteProtocolError as refused:
        problem = f"malformed {plan.cls.__name__}: {refused.problem}"
        raise RemoteProtocolError(problem, fix=refused.fix) from refused


def _encoded(message: object, tag: bytes | None = None) -> bytes:
    """The wire form of `message`, within the envelope's field of this `tag` if one is given.

    A payload is framed here, so that it is copied once: protobuf's own serialisation copies it into the wire message,
    and again each time that its output grows.
    """
    try:
        plan = _PLANS[type(message)]
        if plan.payload:
            mark, name = plan.payload
            content: Bytes = getattr(message, name)
            parts: tuple[Bytes, ...] = (mark, _varint(len(content)), content)
        else:
            wire = plan.wire()
            plan.write(wire, message)
            parts = (wire.SerializeToString(),)
        return b"".join(parts if tag is None else (tag, _varint(sum(map(len, parts))), *parts))
    except _UNENCODABLE as broken:
        raise LocalProtocolError(f"{type(message).__name__} cannot be encoded: {broken}") from broken


def _framed(plan: _Plan[M], data: bytes, tag: bytes = b"") -> M | None:
    """The payload that `_encoded` framed, as a view of `data`; None: protobuf must see what these bytes are.

    Bytes that are nothing but a tag, a length and so many bytes, once or twice over, mean the same to protobuf, which
    copies them twice.
    """
    if plan.payload is None:
        return None
    at = 0
    for mark in (tag, plan.payload[0]) if tag else (plan.payload[0],):
        if not data.startswith(mark, at):
            return None
        at += len(mark)
        length = 0
        for place, byte in enumerate(data[at : at + _LONGEST_VARINT]):
            length |= (byte & 0x7F) << 7 * place
            if byte < 0x80:  # noqa: PLR2004 - the last byte of a length
                at += place + 1
                break
        else:
            return None
        if at + length != len(data):
            return None
    make: Callable[[Bytes], M] = plan.cls
    return _valid(plan, partial(make, memoryview(data)[at:]))


def encode(message: object) -> bytes:
    """The bytes of one message on its own: a file's, a database column's, or those of a call that carries no other.

    Raises:
        LocalProtocolError: `message` is none of `federation.messages`, or a field's value is not of its declared type.
    """
    return _encoded(message)


def decode(cls: type[M], data: bytes) -> M:
    """The message of type `cls` whose bytes `encode` made; fields that this release does not know are ignored.

    Raises:
        RemoteProtocolError: `data` is no valid `cls`; the text names it, and the field where there is one.
    """
    plan: _Plan[M] = _PLANS[cls]
    return _framed(plan, data) or _valid(plan, partial(plan.read, _parse(plan.wire, data)))


@dataclass(frozen=True, slots=True)
class _Envelope(Generic[M]):
    """One of several messages, each under its own field of the oneof `body` of a wire message."""

    wire: type[Message]
    plans: Mapping[str, _Plan[Any]]
    tags: Mapping[type, bytes]
    payloads: tuple[tuple[bytes, _Plan[M]], ...]

    def encode(self, message: M) -> bytes:
        """The bytes of `message` in its envelope.

        Raises:
            LocalProtocolError: The envelope carries no such message, or a field's value is not of its declared type.
        """
        tag = self.tags.get(type(message))
        if tag is None:
            raise LocalProtocolError(f"{self.wire.__name__} carries no {type(message).__name__}")
        return _encoded(message, tag)

    def decode(self, data: bytes) -> M:
        """The message in the envelope `data`; fields that this release does not know are ignored.

        Raises:
            RemoteProtocolError: There is none, none that this release knows, or no valid one.
        """
        for tag, plan in self.payloads:
            if (payload := _framed(plan, data, tag)) is not None:
                return payload
        wire = _parse(self.wire, data)
        name = wire.WhichOneof("body")
        if name is None:
            raise RemoteProtocolError(f"{self.wire.__name__} carries no message known here", fix=_FIX)
        known: _Plan[M] = self.plans[name]
        return _valid(known, partial(known.read, getattr(wire, name)))


def _envelope(wire: type[Message]) -> _Envelope[Any]:
    fields = [(field, field.message_type) for field in wire.DESCRIPTOR.fields]
    plans = {field.name: _PLANS[getattr(messages, body.name)] for field, body in fields if body}
    tags = {plans[field.name].cls: _tag(field.number) for field, _ in fields}
    return _Envelope(wire, plans, tags, tuple((tags[plan.cls], plan) for plan in plans.values() if plan.payload))


_FROM_SITE: _Envelope[FromSite] = _envelope(parley_pb2.FromSite)
_FROM_COORDINATOR: _Envelope[FromCoordinator] = _envelope(parley_pb2.FromCoordinator)
_UPLOAD_REQUEST: _Envelope[UploadRequest] = _envelope(parley_pb2.UploadRequest)
_UPLOAD_REPLY: _Envelope[UploadReply] = _envelope(parley_pb2.UploadReply)
_OPERATOR_REQUEST: _Envelope[OperatorRequest] = _envelope(parley_pb2.OperatorRequest)
_OPERATOR_REPLY: _Envelope[OperatorReply] = _envelope(parley_pb2.OperatorReply)

encode_from_site, decode_from_site = _FROM_SITE.encode, _FROM_SITE.decode
encode_from_coordinator, decode_from_coordinator = _FROM_COORDINATOR.encode, _FROM_COORDINATOR.decode
encode_upload_request, decode_upload_request = _UPLOAD_REQUEST.encode, _UPLOAD_REQUEST.decode
encode_upload_reply, decode_upload_reply = _UPLOAD_REPLY.encode, _UPLOAD_REPLY.decode
encode_operator_request, decode_operator_request = _OPERATOR_REQUEST.encode, _OPERATOR_REQUEST.decode
encode_operator_reply, decode_operator_reply = _OPERATOR_REPLY.encode, _OPERATOR_REPLY.decode
