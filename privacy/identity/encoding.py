"""Canonical bytes under every signature, and their armour: one line of text that people paste, with a checksum."""

import base64
import binascii
import hashlib
import re
from datetime import UTC, datetime

from federation.errors import IdentityError, WhoActs

__all__ = ["armour", "date", "pack", "require_name", "require_organisation", "unarmour", "unpack"]

_LENGTH = 4
_CHECKSUM = 4
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_ORGANISATION = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def pack(*fields: bytes) -> bytes:
    """The fields, each behind its length in 4 bytes: two different sequences of fields never give the same bytes."""
    return b"".join(len(field).to_bytes(_LENGTH, "big") + field for field in fields)


def unpack(content: bytes, count: int) -> tuple[bytes, ...]:
    """The `count` fields that `pack` joined.

    Raises:
        ValueError: `content` is not exactly `count` packed fields.
    """
    fields: list[bytes] = []
    rest = content
    for _ in range(count):
        length = int.from_bytes(rest[:_LENGTH], "big")
        field = rest[_LENGTH : _LENGTH + length]
        if len(rest) < _LENGTH or len(field) != length:
            raise ValueError("a field is cut short")
        fields.append(field)
        rest = rest[_LENGTH + length :]
    if rest:
        raise ValueError("bytes follow the last field")
    return tuple(fields)


def armour(prefix: str, content: bytes) -> str:
    """`content` as one line: `prefix`, then base64url of the content and its checksum."""
    return prefix + _base64(content + _checksum(prefix, content))


def unarmour(prefix: str, text: str, what: str, fix: str) -> bytes:
    """The content of `armour(prefix, content)`; white space (a mail program's line breaks) does not matter.

    Raises:
        IdentityError: The text has another prefix, or is cut short or mistyped; `what` and `fix` word the message.
    """
    line = "".join(text.split())
    if not line.startswith(prefix):
        raise IdentityError(f"this is not {what}: it does not begin with {prefix}", fix=fix, who=WhoActs.YOU)
    body = line.removeprefix(prefix)
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    content, checksum = raw[:-_CHECKSUM], raw[-_CHECKSUM:]
    if checksum != _checksum(prefix, content) or _base64(raw) != body:
        raise IdentityError(f"this is {what} that was cut short or mistyped (checksum)", fix=fix, who=WhoActs.YOU)
    return content


def date(seconds: int) -> str:
    """Unix seconds as people read them."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def require_name(value: str, what: str) -> None:
    """Accepts a name that can stand in a host name, and in a file name.

    Raises:
        IdentityError: It cannot.
    """
    if _LABEL.fullmatch(value) is None:
        raise IdentityError(
            f"{what} becomes part of a host name: {value[:70]!r} cannot",
            fix="use 1-63 of a-z 0-9 and -, with a letter or digit first and last",
            who=WhoActs.YOU,
        )


def require_organisation(value: str) -> None:
    """Accepts an organisation's name as messages carry it.

    Raises:
        IdentityError: It is spelt otherwise.
    """
    if _ORGANISATION.fullmatch(value) is None:
        raise IdentityError(
            f"an organisation cannot be called {value[:70]!r} here",
            fix="use 1-63 of a-z 0-9 . _ -, with a letter or digit first",
            who=WhoActs.YOU,
        )


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def _checksum(prefix: str, content: bytes) -> bytes:
    return hashlib.sha256(prefix.encode() + content).digest()[:_CHECKSUM]
