"""Frozen values as canonical fields and back, driven by their dataclasses' own annotations: one table, no second list.

```
Hash, Count, Index ... (Annotated)   ->  a checked unsigned integer, byte string, text or real number
tuple[X, ...]                        ->  a list of X
an Enum                              ->  its value
a dataclass                          ->  a list of its fields in the order written; behind its TAG where it has one
X | None                             ->  a list of none or of X's fields
X | Y (dataclasses with a TAG each)  ->  whichever the tag names
```
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from math import isfinite
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from privacy.crypto.canonical import Field

__all__ = [
    "Attempt",
    "Context",
    "Count",
    "Form",
    "Hash",
    "Index",
    "Octets",
    "Real",
    "Signature",
    "Small",
    "Text",
    "Unsigned",
    "pack",
    "unpack",
]

T = TypeVar("T")

_MOST = 1 << 16
"""Items that a list may have; those of a message are bounded by the roster, far below."""


class Form(ABC):
    """What one annotated field may hold, and how it is written."""

    @abstractmethod
    def write(self, value: Any) -> Field:
        """`value` as a canonical field.

        Raises:
            ValueError: It is not of this form.
        """

    @abstractmethod
    def read(self, field: Any) -> Any:
        """The value that `write` turned into `field`.

        Raises:
            ValueError: There is none.
        """


@dataclass(frozen=True, slots=True)
class Unsigned(Form):
    """An unsigned integer of so many bits."""

    bits: int

    def write(self, value: Any) -> Field:
        """The integer itself."""
        if type(value) is not int or not 0 <= value < 1 << self.bits:
            raise ValueError(f"an unsigned integer of {self.bits} bits is expected")
        return value

    def read(self, field: Any) -> Any:
        """The integer itself."""
        return self.write(field)


@dataclass(frozen=True, slots=True)
class Octets(Form):
    """Bytes of one of these lengths; of any length where none is given."""

    lengths: tuple[int, ...] = ()

    def write(self, value: Any) -> Field:
        """The bytes themselves."""
        if type(value) is not bytes or (self.lengths and len(value) not in self.lengths):
            allowed = " or ".join(map(str, self.lengths)) or "any number of"
            raise ValueError(f"{allowed} bytes are expected")
        return value

    def read(self, field: Any) -> Any:
        """The bytes themselves."""
        return self.write(field)


@dataclass(frozen=True, slots=True)
class Text(Form):
    """ASCII text."""

    def write(self, value: Any) -> Field:
        """The text itself."""
        if type(value) is not str or not value.isascii():
            raise ValueError("ASCII text is expected")
        return value

    def read(self, field: Any) -> Any:
        """The text itself."""
        return self.write(field)


@dataclass(frozen=True, slots=True)
class Real(Form):
    """A finite binary64 other than -0."""

    def write(self, value: Any) -> Field:
        """The number itself."""
        if type(value) is not float or not isfinite(value) or str(value) == "-0.0":
            raise ValueError("a finite number is expected")
        return value

    def read(self, field: Any) -> Any:
        """The number itself."""
        return self.write(field)


@dataclass(frozen=True, slots=True)
class _Choice(Form):
    kind: type[Enum]

    def write(self, value: Any) -> Field:
        if not isinstance(value, self.kind):
            raise ValueError(f"one of {self.kind.__name__} is expected")  # noqa: TRY004 - one error for all of a value
        plain: int | str = value.value
        return plain

    def read(self, field: Any) -> Any:
        return self.kind(field)


@dataclass(frozen=True, slots=True)
class _Listed(Form):
    item: Form

    def write(self, value: Any) -> Field:
        if type(value) is not tuple or len(value) > _MOST:
            raise ValueError("a list is expected")
        return tuple(self.item.write(each) for each in value)

    def read(self, field: Any) -> Any:
        if type(field) is not tuple or len(field) > _MOST:
            raise ValueError("a list is expected")
        return tuple(self.item.read(each) for each in field)


@dataclass(frozen=True, slots=True)
class _Record(Form):
    kind: type

    def write(self, value: Any) -> Field:
        if type(value) is not self.kind:
            raise ValueError(f"a {self.kind.__name__} is expected")
        return pack(value)

    def read(self, field: Any) -> Any:
        return unpack(self.kind, field)


@dataclass(frozen=True, slots=True)
class _Perhaps(Form):
    item: Form

    def write(self, value: Any) -> Field:
        return () if value is None else self.item.write(value)

    def read(self, field: Any) -> Any:
        return None if field == () else self.item.read(field)


@dataclass(frozen=True, slots=True)
class _OneOf(Form):
    kinds: tuple[type, ...]

    def write(self, value: Any) -> Field:
        if type(value) not in self.kinds:
            raise ValueError(f"one of {', '.join(kind.__name__ for kind in self.kinds)} is expected")
        return pack(value)

    def read(self, field: Any) -> Any:
        tag = field[0] if type(field) is tuple and field else None
        for kind in self.kinds:
            if tag == _tag(kind):
                return unpack(kind, field)
        raise ValueError(f"one of {', '.join(str(_tag(kind)) for kind in self.kinds)} is expected")


Hash = Annotated[bytes, Octets((32,))]
"""A SHA-256 digest, a key, or another secret of 32 bytes."""
Context = Hash
"""What names one attempt: `messages.context`."""
Signature = Annotated[bytes, Octets((64,))]
"""An Ed25519 signature."""
Index = Annotated[int, Unsigned(16)]
"""A site's place in the roster."""
Attempt = Annotated[int, Unsigned(8)]
"""An attempt at a round."""
Small = Annotated[int, Unsigned(32)]
"""An epoch, or another number of 32 bits."""
Count = Annotated[int, Unsigned(64)]
"""A round, a generation of keys, or another number of 64 bits."""


def pack(value: object) -> tuple[Field, ...]:
    """The fields of a dataclass in the order written, behind its `TAG` where its class has one.

    Raises:
        ValueError: A field holds what its annotation does not allow; it is named.
    """
    kind = type(value)
    layout = _layout(kind)
    packed: list[Field] = [*layout.lead]
    for write, held in zip(layout.writers, layout.values(value), strict=True):
        try:
            packed.append(write(held))
        except ValueError as wrong:
            name = layout.names[len(packed) - len(layout.lead)]
            raise ValueError(f"{kind.__name__}.{name}: {wrong}") from None
    return tuple(packed)


def unpack(kind: type[T], content: object) -> T:
    """The value of the class `kind` that `pack` turned into `content`.

    Raises:
        ValueError: There is none.
        ParleyError: The class itself refuses such a value.
    """
    layout = _layout(kind)
    lead, expected = layout.lead, len(layout.lead) + len(layout.names)
    if not isinstance(content, tuple) or len(content) != expected or content[: len(lead)] != lead:
        raise ValueError(f"{expected} fields of a {kind.__name__} are expected")
    values: list[Any] = []
    for read, field in zip(layout.readers, content[len(lead) :], strict=True):
        try:
            values.append(read(field))
        except ValueError as wrong:
            raise ValueError(f"{kind.__name__}.{layout.names[len(values)]}: {wrong}") from None
    return kind(*values)


def _tag(kind: type) -> str | None:
    tag: str | None = getattr(kind, "TAG", None)
    return tag


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a class is packed: its TAG where it has one, and of each field its name, its value and its form."""

    lead: tuple[str, ...]
    names: tuple[str, ...]
    values: Callable[[object], tuple[Any, ...]]
    writers: tuple[Callable[[Any], Field], ...]
    readers: tuple[Callable[[Any], Any], ...]


_KNOWN: dict[type, _Layout] = {}
"""Each class's layout, read from its annotations once: every message of a round is packed by one."""


def _layout(kind: type) -> _Layout:
    layout = _KNOWN.get(kind)
    if layout is None:
        hints = get_type_hints(kind, include_extras=True)
        names = tuple(each.name for each in fields(kind))
        forms = tuple(_form(hints[name]) for name in names)
        tag = _tag(kind)
        layout = _KNOWN[kind] = _Layout(
            lead=() if tag is None else (tag,),
            names=names,
            values=_getter(names),
            writers=tuple(form.write for form in forms),
            readers=tuple(form.read for form in forms),
        )
    return layout


def _getter(names: tuple[str, ...]) -> Callable[[object], tuple[Any, ...]]:
    """The values of all these attributes; `attrgetter` gives a tuple of two or more only."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _form(hint: Any) -> Form:
    arguments = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            (form,) = (each for each in arguments[1:] if isinstance(each, Form))
            return form
        case origin if origin is tuple:
            return _Listed(_form(arguments[0]))
        case origin if origin in (Union, UnionType):
            kinds = [each for each in arguments if each is not NoneType]
            form = _form(kinds[0]) if len(kinds) == 1 else _OneOf(tuple(kinds))
            return form if len(kinds) == len(arguments) else _Perhaps(form)
        case _:
            return _plain(hint)


def _plain(hint: Any) -> Form:
    if hint is str:
        return Text()
    if hint is float:
        return Real()
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _Choice(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return _Record(hint)
    raise TypeError(f"no form is known for {hint!r}")
