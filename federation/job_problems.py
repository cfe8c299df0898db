"""Says in plain words what is wrong with a job file: which key, where, what was expected and the nearest right one."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic_core import ErrorDetails, core_schema

from federation.toml_lines import KeyPath, line_of

__all__ = ["JobProblem", "Schema", "describe", "problem_at", "render_path"]

Schema = Mapping[str, Any]
"""A JSON schema as pydantic writes it. A field's `expected` entry, if it has one, is its plain words."""

_LONGEST_VALUE = 60
_LONGEST_LIST = 6
_LONGEST_NUMBER = 10**30
_PYDANTIC_TYPES = frozenset(get_args(core_schema.ErrorType))
"""Errors whose words are pydantic's own, for programmers; all others were written for the job's author."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class JobProblem:
    """One thing wrong in a job file: where (key path, line from 1, 0 if unknown), what, and what was expected.

    `problem` is a whole sentence that says what was expected, too; `expected` repeats that alone.
    """

    path: str
    line: int
    problem: str
    expected: str = ""

    def told(self, source: str) -> str:
        """One line for people: source, line, key path, problem."""
        place = f"{source}:{self.line}" if self.line else source
        return f"{place}: {self.path}: {self.problem}" if self.path else f"{place}: {self.problem}"


def problem_at(path: KeyPath, lines: Mapping[KeyPath, int], problem: str, expected: str = "") -> JobProblem:
    """The problem of the value at `path`, with its line, or else that of the table around it."""
    return JobProblem(render_path(path), line_of(path, lines), problem, expected)


def describe(
    errors: Iterable[ErrorDetails],
    document: Mapping[str, object],
    schema: Schema,
    lines: Mapping[KeyPath, int],
) -> tuple[JobProblem, ...]:
    """The problems that pydantic's `errors` mean, at most one for each key, and none of a list for its bad items.

    Args:
        errors: What pydantic found in `document`.
        document: The job file as parsed TOML.
        schema: The JSON schema of the whole file.
        lines: Where each key stands.
    """
    root = _Place((), schema, document)
    found: dict[KeyPath, JobProblem] = {}
    for error in errors:
        place = _find(error, root)
        if place.path not in found:
            problem, expected = _words(error, place, root)
            found[place.path] = problem_at(place.path, lines, problem, expected)
    around = {path[:length] for path in found for length in range(len(path))}
    return tuple(problem for path, problem in found.items() if path not in around)


def render_path(path: KeyPath) -> str:
    """`path` as people write it: `data.columns[2].range`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE_KEY.fullmatch(part) else _quoted(part))
    return text


@dataclass(frozen=True, slots=True)
class _Place:
    """A value of the document beside the schema that it should meet."""

    path: KeyPath
    schema: Schema
    value: object
    """None where the document has nothing (TOML has no null)."""

    @property
    def keys(self) -> Mapping[str, Schema]:
        """What may stand in this table."""
        properties: Mapping[str, Schema] = self.schema.get("properties", {})
        return properties

    def under(self, part: str | int) -> "_Place | None":
        """The key or list item `part` below; None when pydantic's `part` names no place but a member of a union."""
        match part:
            case str() if "properties" in self.schema:
                value = self.value.get(part) if isinstance(self.value, Mapping) else None
                return _Place((*self.path, part), self._resolved(self.keys.get(part, {})), value)
            case int() if isinstance(self.value, Sequence) and part < len(self.value):
                prefix = self.schema.get("prefixItems", ())
                item = prefix[part] if part < len(prefix) else self.schema.get("items", {})
                return _Place((*self.path, part), self._resolved(item), self.value[part])
            case _:
                return None

    def member(self, tag: str | int) -> "_Place":
        """The same value with the one schema that its discriminator `tag` chooses."""
        return _Place(self.path, self._resolved({"$ref": self.schema["discriminator"]["mapping"][tag]}), self.value)

    def _resolved(self, schema: Schema) -> Schema:
        """`schema` without references and without the null of an optional key; it keeps the definitions."""
        definitions = {**self.schema.get("$defs", {}), **schema.get("$defs", {})}
        if "anyOf" in schema:
            members = [member for member in schema["anyOf"] if member.get("type") != "null"]
            schema = members[0] if len(members) == 1 else {**schema, "anyOf": members}
        if "$ref" in schema:
            schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
        return {**schema, "$defs": definitions}


def _find(error: ErrorDetails, root: _Place) -> _Place:
    """Where `error` lies; one inside a union that fits no member lies at the union as a whole."""
    place = root
    for part in error["loc"]:
        if "discriminator" in place.schema and part in place.schema["discriminator"]["mapping"]:
            place = place.member(part)
            continue
        below = _tagged(place).under(part)
        if below is None:
            break
        place = below
    if error["type"] in {"union_tag_invalid", "union_tag_not_found"}:
        choice = place.schema["discriminator"]
        value = place.value.get(choice["propertyName"]) if isinstance(place.value, Mapping) else None
        return _Place((*place.path, choice["propertyName"]), {"enum": list(choice["mapping"])}, value)
    return place


def _words(error: ErrorDetails, place: _Place, root: _Place) -> tuple[str, str]:
    """The problem as a sentence, and what was expected."""
    if error["type"] == "extra_forbidden":
        return _unknown_key(place, root)
    if error["type"] in {"value_error", "assertion_error"}:
        return str(error["ctx"]["error"]), ""
    if error["type"] not in _PYDANTIC_TYPES:
        return error["msg"], ""
    expected = _expected(place.schema)
    if place.value is None:
        return f"missing; expected {expected}", expected
    problem = f"expected {expected}, found {_found(place.value)}"
    return problem + _did_you_mean(place.value, _choices(place.schema)), expected


def _unknown_key(place: _Place, root: _Place) -> tuple[str, str]:
    key, table = place.path[-1], root
    for part in place.path[:-1]:
        table = _tagged(table.under(part) or table)
    expected = f"one of {', '.join(table.keys)}"
    hint = _did_you_mean(key, table.keys) or _belongs(key, root)
    return f"unknown key; expected {expected}{hint}", expected


def _belongs(key: str | int, root: _Place) -> str:
    """The table of the file that has such a key."""
    for name in root.keys:
        table = root.under(name)
        if table is not None and key in table.keys:
            return f"; it belongs in [{name}]"
    return ""


def _tagged(place: _Place) -> _Place:
    """`place` with the schema that its own discriminator chooses, if it has one."""
    if "discriminator" not in place.schema or not isinstance(place.value, Mapping):
        return place
    return place.member(str(place.value[place.schema["discriminator"]["propertyName"]]))


def _did_you_mean(found: object, choices: Iterable[object]) -> str:
    known = [choice for choice in choices if isinstance(choice, str)]
    near = (
        difflib.get_close_matches(found, known, n=1) if isinstance(found, str) and len(found) <= _LONGEST_VALUE else []
    )
    return f'; did you mean "{near[0]}"?' if near else ""


def _choices(schema: Schema) -> tuple[object, ...]:
    """The literals that `schema` allows."""
    own = schema.get("enum", (schema["const"],) if "const" in schema else ())
    return (*own, *(choice for member in schema.get("anyOf", ()) for choice in _choices(member)))


def _expected(schema: Schema) -> str:
    """What meets `schema`, in plain words."""
    if "expected" in schema:
        return str(schema["expected"])
    if "anyOf" in schema:
        return ", or ".join(_expected(member) for member in schema["anyOf"])
    if choices := [_found(choice) for choice in _choices(schema)]:
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    match schema.get("type"):
        case "integer":
            words = "a whole number" + _bounds(schema)
        case "number":
            words = "a number" + _bounds(schema)
        case "string":
            words = "a text" + _length(schema, "Length", "character")
        case "boolean":
            words = "true or false"
        case "array":
            words = _expected_list(schema)
        case _:
            words = "a table"
    return words


def _bounds(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    words = {
        "minimum": "of at least",
        "exclusiveMinimum": "above",
        "maximum": "of at most",
        "exclusiveMaximum": "below",
    }
    parts = [f"{word} {schema[key]}" for key, word in words.items() if key in schema]
    return f" {' and '.join(parts)}" if parts else ""


def _length(schema: Schema, what: str, unit: str) -> str:
    low, high = schema.get(f"min{what}"), schema.get(f"max{what}")
    if low and high:
        return f" of {low} to {high} {unit}s"
    if low:
        return f" of at least {low} {unit}{'s' if low > 1 else ''}"
    return f" of at most {high} {unit}s" if high else ""


def _expected_list(schema: Schema) -> str:
    if "prefixItems" in schema:
        items = [_expected(item) for item in schema["prefixItems"]]
        return f"a list of {len(items)} items: {', '.join(items)}"
    if "$ref" in schema.get("items", {}) or "discriminator" in schema.get("items", {}):
        return "a list" + _length(schema, "Items", "table")
    return "a list" + _length(schema, "Items", "item") + f", each {_expected(schema.get('items', {}))}"


def _found(value: object) -> str:
    """`value` as it stands in the file, shortened."""
    match value:
        case bool():
            words = "true" if value else "false"
        case str():
            words = _quoted(value)
        case int() if abs(value) >= _LONGEST_NUMBER:
            words = "a number of too many digits"
        case list() | tuple() if len(value) > _LONGEST_LIST or any(isinstance(item, list | Mapping) for item in value):
            words = f"a list of {len(value)} item{'s' if len(value) > 1 else ''}"
        case list() | tuple():
            words = f"[{', '.join(_found(item) for item in value)}]"
        case Mapping():
            words = "a table"
        case _:
            words = str(value)  # a number, date or time
    return words


def _quoted(text: str) -> str:
    """`text` in double quotes, shortened, with every character that is not printable escaped."""
    return json.dumps(_shortened(text), ensure_ascii=not text.isprintable())


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."
