"""RosterSum's canonical encoding: the one injective byte string under each of its signatures, digests and keys."""

import hashlib
import struct
from collections.abc import Sequence
from math import copysign, isfinite
from typing import TypeAlias

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from federation.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["DEPTH", "KEY", "LABEL", "TYPES", "Field", "Value", "dec", "derive", "digest", "enc", "statement"]

Field: TypeAlias = "int | bytes | str | float | Sequence[Field]"
"""What can be encoded: an unsigned integer, bytes, ASCII text, a finite float other than -0, a list of these."""

Value: TypeAlias = "int | bytes | str | float | tuple[Value, ...]"
"""A field as `dec` gives it back: every list is a tuple."""

_TYPES = (
    "roster job plan keys keys-digest encaps pair-salt pair-root keyset ctx pair-mask self-mask seal commit rotation "
    "cell epoch train ready decline start upload full transcript open rescue shares result refuse close"
)

LABEL = b"rostersum/v2/"
"""What the bytes of this version begin with wherever they are hashed, signed or expanded into a key."""

TYPES = frozenset(_TYPES.split())
"""The purposes bytes can have; none serves two."""

_DOMAINS = {kind: LABEL + kind.encode("ascii") + b"\0" for kind in TYPES}
"""D(type): what the bytes of each purpose begin with."""

KEY = 32
"""Bytes of a key or digest."""

DEPTH = 8
"""Lists within lists that are read and written; a job's plans need five."""

_NUMBER = 8
_MOST = (1 << 8 * _NUMBER) - 1
_HEAD = struct.Struct(">cI")
"""A tag, and the length of the content."""
_INTEGER = struct.Struct(">cIQ")
_REAL = struct.Struct(">cId")
_FIX = "send each field as its tag, its length in 4 bytes, and content of exactly that length"


def enc(*fields: Field) -> bytes:
    """The fields as bytes: two different sequences of fields never give the same.

    Each is a tag, its content's length in 4 bytes, big endian, and its content: `i` an unsigned integer of 8 bytes, big
    endian; `b` bytes; `s` ASCII text; `f` a binary64, big endian; `l` a list or tuple, whose content is `enc` of its
    items.

    Raises:
        LocalProtocolError: A field is none of these, or lists stand more than `DEPTH` deep.
    """
    return _encoded(fields, 0)


def dec(content: bytes) -> tuple[Value, ...]:
    """The fields of which `content` is the encoding; lists are tuples, and `enc(*dec(content)) == content`.

    Raises:
        RemoteProtocolError: `enc` gives these bytes for no fields.
    """
    return _decoded(content, 0)


def statement(kind: str, *fields: Field) -> bytes:
    """The bytes a signature of type `kind` covers: label, type, a zero byte, and the fields.

    Raises:
        LocalProtocolError: There is no such type, or a field cannot be encoded.
    """
    domain = _DOMAINS.get(kind)
    if domain is None:
        raise LocalProtocolError(f"{kind!r} is no purpose that bytes of {LABEL.decode()} have")
    return domain + _encoded(fields, 0)


def digest(kind: str, *fields: Field) -> bytes:
    """SHA-256 of `statement(kind, *fields)`, 32 bytes.

    Raises:
        LocalProtocolError: There is no such type, or a field cannot be encoded.
    """
    return hashlib.sha256(statement(kind, *fields)).digest()


def derive(key: bytes, kind: str, *fields: Field) -> bytes:
    """A key of 32 bytes for one purpose, by HKDF-Expand (RFC 5869, section 2.3) with SHA-256 from a key of 32 bytes.

    Raises:
        LocalProtocolError: `key` has another length, there is no such type, or a field cannot be encoded.
    """
    if len(key) != KEY:
        raise LocalProtocolError(f"keys are derived from {KEY} bytes, not from {len(key)}")
    return HKDFExpand(SHA256(), KEY, statement(kind, *fields)).derive(key)


def _encoded(fields: Sequence[Field], depth: int) -> bytes:
    """The fields in a row; the types that messages are made of come first, asked for in the quickest way."""
    if depth > DEPTH:
        raise LocalProtocolError(f"lists within lists are encoded {DEPTH} deep, not deeper")
    parts: list[bytes] = []
    for field in fields:
        if type(field) is bytes:
            parts.append(_HEAD.pack(b"b", len(field)))
            parts.append(field)
        elif type(field) is int and 0 <= field <= _MOST:
            parts.append(_INTEGER.pack(b"i", _NUMBER, field))
        elif type(field) is tuple:
            content = _encoded(field, depth + 1)
            parts.append(_HEAD.pack(b"l", len(content)))
            parts.append(content)
        else:
            parts.append(_rarer(field, depth))
    return b"".join(parts)


def _rarer(field: Field, depth: int) -> bytes:
    """Text, a real number, a list, or a value of a type that derives from one of an encoded field, as an Enum's may."""
    match field:
        case str() if field.isascii():
            return _HEAD.pack(b"s", len(field)) + field.encode("ascii")
        case float() if _canonical(field):
            return _REAL.pack(b"f", _NUMBER, field)
        case int() if not isinstance(field, bool) and 0 <= field <= _MOST:
            return _INTEGER.pack(b"i", _NUMBER, field)
        case bytes():
            return _HEAD.pack(b"b", len(field)) + field
        case list() | tuple():
            content = _encoded(field, depth + 1)
            return _HEAD.pack(b"l", len(content)) + content
        case _:  # the value is not shown: it may be a secret
            raise LocalProtocolError(f"a {type(field).__name__} outside what is encoded stands among the fields")


def _decoded(content: bytes, depth: int) -> tuple[Value, ...]:
    if depth > DEPTH:
        raise RemoteProtocolError(f"lists stand more than {DEPTH} deep in what was sent", fix=_FIX)
    fields: list[Value] = []
    start = 0
    while start < len(content):
        begin = start + _HEAD.size
        tag, length = _HEAD.unpack_from(content, start) if begin <= len(content) else (b"", len(content))
        start = begin + length
        if start > len(content):
            raise RemoteProtocolError("a field is cut short in what was sent", fix=_FIX)
        fields.append(_value(tag, content[begin:start], depth))
    return tuple(fields)


def _value(tag: bytes, content: bytes, depth: int) -> Value:
    match tag:
        case b"b":
            return content
        case b"i" if len(content) == _NUMBER:
            return int.from_bytes(content, "big")
        case b"l":
            return _decoded(content, depth + 1)
        case b"s" if content.isascii():
            return content.decode("ascii")
        case b"f" if len(content) == _NUMBER and _canonical(*struct.unpack(">d", content)):
            (number,) = struct.unpack(">d", content)
            return float(number)
        case _:
            raise RemoteProtocolError(f"a field of {len(content)} bytes with tag {tag!r} is not canonical", fix=_FIX)


def _canonical(number: float) -> bool:
    return isfinite(number) and (number != 0 or copysign(1, number) > 0)
