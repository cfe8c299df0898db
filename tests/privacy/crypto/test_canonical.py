import hashlib
import hmac
import struct
from enum import IntEnum, StrEnum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import LocalProtocolError, RemoteProtocolError
from privacy.crypto import canonical
from privacy.crypto.canonical import Field, Value

QUICK = settings(max_examples=50, deadline=None)

FIELDS = st.lists(
    st.recursive(
        st.one_of(
            st.integers(0, 2**64 - 1),
            st.binary(max_size=20),
            st.text(st.characters(max_codepoint=127), max_size=20),
            st.floats(allow_nan=False, allow_infinity=False).map(lambda number: number + 0.0),
        ),
        lambda inner: st.lists(inner, max_size=4).map(tuple),
        max_leaves=10,
    ),
    max_size=5,
).map(tuple)


def nested(depth: int) -> Field:
    """An empty list within so many lists."""
    field: Field = []
    for _ in range(depth):
        field = [field]
    return field


def typed(value: Value) -> object:
    """A value beside its type: 1 and 1.0 are equal, and not the same."""
    return tuple(typed(each) for each in value) if isinstance(value, tuple) else (type(value), value)


@QUICK
@given(fields=FIELDS)
def test_what_was_encoded_is_decoded(fields: tuple[Value, ...]) -> None:
    """Decoding gives the same fields of the same types."""
    assert typed(canonical.dec(canonical.enc(*fields))) == typed(fields)


@QUICK
@given(first=FIELDS, second=FIELDS)
def test_different_fields_have_different_bytes(first: tuple[Value, ...], second: tuple[Value, ...]) -> None:
    """The encoding is injective: equal bytes mean equal fields."""
    assert (canonical.enc(*first) == canonical.enc(*second)) == (typed(first) == typed(second))


@QUICK
@given(fields=FIELDS.filter(len), data=st.data())
def test_changed_bytes_are_refused_or_encode_other_fields(fields: tuple[Value, ...], data: st.DataObject) -> None:
    """Whatever one byte is changed to, what is decoded encodes to exactly those bytes, or nothing is decoded."""
    content = bytearray(canonical.enc(*fields))
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))

    try:
        found = canonical.dec(bytes(content))
    except RemoteProtocolError:
        return

    assert canonical.enc(*found) == content
    assert typed(found) != typed(fields)


class Colour(IntEnum):
    """Numbers with names."""

    RED = 3


class Word(StrEnum):
    """Texts with names."""

    YES = "yes"


class Blob(bytes):
    """Bytes by another name."""

    __slots__ = ()


def test_a_value_of_a_derived_type_is_the_plain_value() -> None:
    """An Enum's member and a list have one form with the number, text or tuple that they are."""
    assert canonical.enc(Colour.RED, Word.YES, Blob(b"x"), [1, [2]]) == canonical.enc(3, "yes", b"x", (1, (2,)))


def test_each_truncation_and_each_appended_byte_is_refused() -> None:
    """An encoding cut anywhere but between two fields, or followed by a byte, is none."""
    fields: tuple[Field, ...] = (7, b"key", "site", 0.5, [1, ["x"]])
    content = canonical.enc(*fields)
    ends = [len(canonical.enc(*fields[:count])) for count in range(len(fields) + 1)]
    for length in range(len(content)):
        if length not in ends:
            with pytest.raises(RemoteProtocolError, match=r"cut short|not canonical"):
                canonical.dec(content[:length])
    for byte in range(256):
        with pytest.raises(RemoteProtocolError, match="cut short"):
            canonical.dec(content + bytes([byte]))


@pytest.mark.parametrize(
    "content",
    [
        b"i\0\0\0\7" + bytes(7),
        b"i\0\0\0\x09" + bytes(9),
        b"f\0\0\0\4" + struct.pack(">f", 0.5),
        b"f\0\0\0\x08" + struct.pack(">d", float("nan")),
        b"f\0\0\0\x08" + struct.pack(">d", float("inf")),
        b"f\0\0\0\x08" + struct.pack(">d", -0.0),
        b"s\0\0\0\2\xc3\xa9",
        b"u\0\0\0\0",
        b"\0\0\0\0\0",
    ],
    ids=["short int", "long int", "binary32", "nan", "infinity", "-0", "not ASCII", "no tag", "zero tag"],
)
def test_another_form_of_a_value_is_refused(content: bytes) -> None:
    """Each value has one form; any other is refused, and named."""
    with pytest.raises(RemoteProtocolError, match=r"is not canonical.*To fix") as refused:
        canonical.dec(content)
    assert "tag" in str(refused.value)


def test_a_list_may_not_reach_beyond_its_length() -> None:
    """A list's content is whole fields: an item longer than its list is refused though the bytes are there."""
    item = canonical.enc(b"abc")
    with pytest.raises(RemoteProtocolError, match="cut short"):
        canonical.dec(b"l" + (len(item) - 1).to_bytes(4, "big") + item)


def test_lists_nest_to_a_limit() -> None:
    """Lists are encoded and decoded to the same depth, and refused beyond it before Python's stack ends."""
    deepest = nested(canonical.DEPTH - 1)
    assert canonical.enc(*canonical.dec(canonical.enc(deepest))) == canonical.enc(deepest)
    with pytest.raises(LocalProtocolError, match="8 deep"):
        canonical.enc(nested(canonical.DEPTH))
    content = b""
    for _ in range(5000):
        content = b"l" + len(content).to_bytes(4, "big") + content
    with pytest.raises(RemoteProtocolError, match="more than 8 deep"):
        canonical.dec(content)


@pytest.mark.parametrize(
    "field", [True, -1, 2**64, "é", float("nan"), float("inf"), -0.0, None, {}, bytearray(b"x"), [1, [False]]], ids=repr
)
def test_what_has_no_form_is_not_encoded(field: Field) -> None:
    """A value that no field can be is our own mistake; the error does not show it."""
    with pytest.raises(LocalProtocolError, match="outside what is encoded"):
        canonical.enc(field)


def test_statement_digest_and_derived_key_are_the_texts_formulas() -> None:
    """D(type) || enc(f), its SHA-256, and HKDF-Expand's first block (RFC 5869: HMAC of info and a byte 1)."""
    stated = canonical.statement("keyset", [[0, b"digest"]])
    key = bytes(range(32))

    assert stated == b"rostersum/v2/keyset\0" + canonical.enc([[0, b"digest"]])
    assert canonical.digest("keyset", [[0, b"digest"]]) == hashlib.sha256(stated).digest()
    assert canonical.derive(key, "keyset", [[0, b"digest"]]) == hmac.digest(key, stated + b"\1", "sha256")


def test_the_types_are_those_of_the_text() -> None:
    """A type that the text does not list serves nothing, and all that it lists do."""
    assert len(canonical.TYPES) == 30
    assert len({canonical.digest(kind, 1) for kind in canonical.TYPES}) == 30
    for refused in ("", "Roster", "roster\0", "mask", "v1"):
        with pytest.raises(LocalProtocolError, match="no purpose"):
            canonical.statement(refused, 1)


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_keys_are_derived_from_keys(length: int) -> None:
    """HKDF-Expand takes a pseudorandom key of 32 bytes, no other."""
    with pytest.raises(LocalProtocolError, match="derived from 32 bytes"):
        canonical.derive(bytes(length), "seal", 1)
