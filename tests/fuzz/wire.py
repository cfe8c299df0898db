"""Changes to protobuf bytes that know their structure: fields taken out, doubled, moved, retyped, and made absurd."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

__all__ = ["Part", "joined", "mutated", "parts", "varint"]

_VARINT, _FIXED64, _BYTES, _GROUP, _FIXED32 = 0, 1, 2, 3, 5
_TYPES = (_VARINT, _FIXED64, _BYTES, _GROUP, 4, _FIXED32, 6, 7)
"""Wire types; 4 ends a group, 6 and 7 are none."""

_WHOLES = (0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
_NUMBERS = (0.0, -0.0, 5e-324, -1.0, 1e15, 1.0000001e15, 1e308, float("inf"), float("-inf"), float("nan"))
_CONTENTS = (
    b"",
    b"\x00",
    b"a",
    b"A B",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    "\u202e\u0000é😀".encode(),
    b"x" * 5000,
    b"a" * 63,
)
_LENGTHS = (0, 1, 31, 33, 63, 65, 2**31 - 1, 2**31, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Part:
    """One field of a message as it travels: its number, its wire type, and its value's bytes (without a length)."""

    number: int
    kind: int
    content: bytes

    @property
    def encoded(self) -> bytes:
        """The bytes of the field."""
        length = varint(len(self.content)) if self.kind == _BYTES else b""
        return varint(self.number << 3 | self.kind) + length + self.content


def varint(value: int) -> bytes:
    """Protobuf's variable-length integer."""
    head = b""
    while value > 0x7F:
        head += bytes([value & 0x7F | 0x80])
        value >>= 7
    return head + bytes([value])


def _whole(data: bytes, at: int) -> tuple[int, int]:
    """The variable-length integer at a place, and the place after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def parts(data: bytes) -> list[Part] | None:
    """The fields of a message, or None where the bytes are none."""
    found: list[Part] = []
    at = 0
    try:
        while at < len(data):
            tag, at = _whole(data, at)
            kind, start = tag & 7, at
            match kind:
                case 0:
                    _, end = _whole(data, at)
                case 1 | 5:
                    end = at + (8 if kind == _FIXED64 else 4)
                case 2:
                    length, start = _whole(data, at)
                    end = start + length
                case _:
                    return None
            if end > len(data) or tag >> 3 == 0:
                return None
            found.append(Part(tag >> 3, kind, data[start:end]))
            at = end
    except IndexError:
        return None
    return found


def joined(fields: list[Part]) -> bytes:
    """The message of these fields."""
    return b"".join(field.encoded for field in fields)


Draw = Callable[[st.SearchStrategy[object]], object]


@st.composite
def _value(draw: st.DrawFn, part: Part) -> Part:
    """The same field with another value of its type, an absurd one more often than not."""
    match part.kind:
        case 0:
            return replace(part, content=varint(draw(st.sampled_from(_WHOLES) | st.integers(0, 2**64 - 1))))
        case 1:
            return replace(part, content=struct.pack("<d", draw(st.sampled_from(_NUMBERS) | st.floats())))
        case 2:
            cut = draw(st.integers(0, len(part.content)))
            return replace(
                part, content=draw(st.sampled_from((*_CONTENTS, part.content[:cut])) | st.binary(max_size=80))
            )
        case _:
            return replace(part, content=draw(st.binary(min_size=4, max_size=4)))


@st.composite
def _stranger(draw: st.DrawFn) -> Part:
    """A field that no release has."""
    kind = draw(st.sampled_from((_VARINT, _FIXED64, _BYTES, _FIXED32)))
    content = {_VARINT: b"\x07", _FIXED64: bytes(8), _FIXED32: bytes(4)}.get(kind, b"later")
    return Part(draw(st.integers(100, 2**29 - 1)), kind, content)


@st.composite
def _restructured(draw: st.DrawFn, data: bytes, depth: int = 0) -> bytes:
    """The message with one of its fields, or of those of a message within it, changed."""
    fields = parts(data)
    if not fields:
        return data + draw(_stranger()).encoded
    at = draw(st.integers(0, len(fields) - 1))
    part = fields[at]
    if part.kind == _BYTES and parts(part.content) and depth < 3 and draw(st.integers(0, 3)):
        fields[at] = replace(part, content=draw(_restructured(part.content, depth + 1)))
        return joined(fields)
    match draw(st.integers(0, 7)):
        case 0:
            del fields[at]
        case 1:
            fields.insert(draw(st.integers(0, len(fields))), part)
        case 2:
            fields.insert(draw(st.integers(0, len(fields))), draw(_stranger()))
        case 3:
            fields[at] = replace(part, kind=draw(st.sampled_from(_TYPES)))
        case 4:
            fields[at] = replace(part, number=draw(st.integers(1, 20)))
        case 5:
            promised = varint(part.number << 3 | _BYTES) + varint(draw(st.sampled_from(_LENGTHS))) + part.content
            return joined(fields[:at]) + promised + joined(fields[at + 1 :])
        case 6:
            deep = draw(st.integers(2, 150))
            for _ in range(deep):
                part = replace(part, kind=_BYTES, content=part.encoded)
            fields[at] = part
        case _:
            fields[at] = draw(_value(part))
    return joined(fields)


@st.composite
def mutated(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """A message of `whole` after one to three changes: of a field, of a bit, or of its end."""
    data = draw(whole)
    for _ in range(draw(st.integers(1, 3))):
        match draw(st.integers(0, 7)):
            case 0 if data:
                flipped = bytearray(data)
                bit = draw(st.integers(0, 8 * len(data) - 1))
                flipped[bit // 8] ^= 1 << bit % 8
                data = bytes(flipped)
            case 1:
                data = data[: draw(st.integers(0, len(data)))]
            case 2:
                data += draw(whole)
            case _:
                data = draw(_restructured(data))
    return data
