"""Finds the line of every key and list item of a TOML text, which no parser of Python's tells."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["KeyPath", "excess", "line_of", "lines"]

KeyPath = tuple[str | int, ...]
"""Where a value stands: keys of tables and, in lists and arrays of tables, positions from 0."""

_TOKEN = re.compile(
    r"""
      (?P<string> \"{3} [^"\\]* (?: (?: \\. | "{1,2}(?!") ) [^"\\]* )* (?: \"{3,5} )?
                | '{3} .*? (?: '{3,5} | \Z )
                | " [^"\\\n]* (?: \\. [^"\\\n]* )* "?
                | ' [^'\n]* '? )
    | (?P<comment> \#[^\n]* )
    | (?P<mark> [\[\]{},=] )
    | (?P<bare> (?: \d{4}-\d\d-\d\d [ ] (?=\d\d:) )? [^\s\#"'\[\]{},=]+ )
    """,
    re.VERBOSE | re.DOTALL,
)
"""Every alternative matches at its first try, even where a closing quote is missing: hostile text costs linear time."""


def excess(text: str, *, depth: int, values: int) -> tuple[int, str] | None:
    """The line where `text` is more than a parser should be given, and what is too much there; None if all is well.

    Too much is a key of more than `depth` parts, a value inside more than `depth` brackets, or more than `values`
    commas and equals signs. `text` may be anything. Python's parser takes minutes and gigabytes for a key of 100 000
    parts.
    """
    level = dots = line = marks = 0
    for token in _tokens(text):
        if token.kind == "mark" or token.line != line:
            dots = 0
        if token.is_mark("[", "{"):
            level += 1
        elif token.is_mark("]", "}"):
            level = max(0, level - 1)
        elif token.kind == "mark":
            marks += 1
        elif token.kind == "bare":
            dots += token.text.count(".")
        line = token.line
        if level > depth or dots >= depth:
            return line, f"more than {depth} levels of tables or lists"
        if marks > values:
            return line, f"more than {values} values up to here"
    return None


def lines(text: str) -> dict[KeyPath, int]:
    """The line, from 1, on which each key and each list item of `text` begins; `text` must be valid TOML.

    A table stands where its header does, or else where the first key below it does.
    """
    scan = _Scan(_tokens(text))
    scan.run()
    return scan.found


def line_of(path: KeyPath, known: Mapping[KeyPath, int]) -> int:
    """The line of `path`, or of the nearest table or list around it; 0 if none is known."""
    for length in range(len(path), 0, -1):
        if path[:length] in known:
            return known[path[:length]]
    return 0


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int

    def is_mark(self, *marks: str) -> bool:
        return self.kind == "mark" and self.text in marks


def _tokens(text: str) -> Iterator[_Token]:
    line, seen = 1, 0
    for match in _TOKEN.finditer(text):
        if match.lastgroup is not None and match.lastgroup != "comment":
            line += text.count("\n", seen, match.start())
            seen = match.start()
            yield _Token(match.lastgroup, match.group(), line)


@dataclass(slots=True)
class _Open:
    """A list or inline table whose closing bracket has not come; `item` counts a list's commas."""

    kind: Literal["list", "table"]
    path: KeyPath
    item: int = 0


@dataclass(slots=True)
class _Scan:
    """One pass over the tokens: a key, then its value, and so on; open brackets cost no recursion."""

    tokens: Iterator[_Token]
    found: dict[KeyPath, int] = field(default_factory=dict)
    counts: dict[KeyPath, int] = field(default_factory=dict)
    table: KeyPath = ()
    open: list[_Open] = field(default_factory=list)

    def run(self) -> None:
        for token in self.tokens:
            if not self.open:
                self._statement(token)
            elif token.is_mark("]", "}"):
                self.open.pop()
            elif token.is_mark(","):
                self.open[-1].item += 1
            elif self.open[-1].kind == "list":
                self._value(token, (*self.open[-1].path, self.open[-1].item))
            else:
                self._pair(token, self.open[-1].path)

    def _statement(self, token: _Token) -> None:
        """A `[table]`, a `[[list of tables]]` or a `key = value`, from its first token."""
        if not token.is_mark("["):
            self._pair(token, self.table)
            return
        first = next(self.tokens)
        repeated = first.is_mark("[")
        *parents, last = self._keys(next(self.tokens) if repeated else first, "]")
        path: KeyPath = ()
        for key in parents:
            path = self._newest((*path, key))
            self.found.setdefault(path, token.line)
        path = (*path, last)
        if repeated:
            next(self.tokens)
            self.found.setdefault(path, token.line)
            self.counts[path] = self.counts.get(path, 0) + 1
        self.table = self._newest(path)
        self.found[self.table] = token.line

    def _newest(self, path: KeyPath) -> KeyPath:
        """`path`, or the last table in it so far where it is an array of tables."""
        return (*path, self.counts[path] - 1) if path in self.counts else path

    def _pair(self, token: _Token, table: KeyPath) -> None:
        path = table
        for key in self._keys(token, "="):
            path = (*path, key)
            self.found.setdefault(path, token.line)
        self._value(next(self.tokens), path)

    def _keys(self, token: _Token, end: str) -> list[str]:
        """The parts of a dotted key that begins with `token`; takes the mark `end` as well."""
        keys: list[str] = []
        while not token.is_mark(end):
            if token.kind == "string":
                keys.extend(tomllib.loads(f"{token.text} = 0"))
            else:
                keys.extend(part for part in token.text.split(".") if part)
            token = next(self.tokens)
        return keys

    def _value(self, token: _Token, path: KeyPath) -> None:
        self.found.setdefault(path, token.line)
        if token.is_mark("[", "{"):
            self.open.append(_Open("list" if token.text == "[" else "table", path))
