"""Every key and list item of a TOML text is found on its line."""

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.toml_lines import KeyPath, excess, line_of, lines

TEXT = '''\
# [commented] = 1
a = 1                    # a = 2
b.c.d = "x # y = [1]"
'quo.ted'."k\\ney" = 3.14
long = """
[not.a.table] = 1
\\"""
"""
raw = \'\'\'
c = '1' \'\'\'\'
when = 1979-05-27 07:32:00
list = [ 07:32:00.5, [ "a", ']' ],
  # comment ]
  { x = 1, y.z = [ 2,
    3 ] },
]
empty = []
[ table . sub ]
k = true
[[rows]]
n = 1
[rows.inner]
m = 2
[[rows]]
n = 3
[[rows.deep]]
[[rows.deep]]
o = 4
[rows.deep.er]
p = -inf
[last]
'''


def test_every_form_of_key_has_its_line() -> None:
    """Tables, lists of tables, dotted and quoted keys, inline tables, and strings and lists over several lines."""
    assert lines(TEXT) == {
        ("a",): 2,
        ("b",): 3,
        ("b", "c"): 3,
        ("b", "c", "d"): 3,
        ("quo.ted",): 4,
        ("quo.ted", "k\ney"): 4,
        ("long",): 5,
        ("raw",): 9,
        ("when",): 11,
        ("list",): 12,
        ("list", 0): 12,
        ("list", 1): 12,
        ("list", 1, 0): 12,
        ("list", 1, 1): 12,
        ("list", 2): 14,
        ("list", 2, "x"): 14,
        ("list", 2, "y"): 14,
        ("list", 2, "y", "z"): 14,
        ("list", 2, "y", "z", 0): 14,
        ("list", 2, "y", "z", 1): 15,
        ("empty",): 17,
        ("table",): 18,
        ("table", "sub"): 18,
        ("table", "sub", "k"): 19,
        ("rows",): 20,
        ("rows", 0): 20,
        ("rows", 0, "n"): 21,
        ("rows", 0, "inner"): 22,
        ("rows", 0, "inner", "m"): 23,
        ("rows", 1): 24,
        ("rows", 1, "n"): 25,
        ("rows", 1, "deep"): 26,
        ("rows", 1, "deep", 0): 26,
        ("rows", 1, "deep", 1): 27,
        ("rows", 1, "deep", 1, "o"): 28,
        ("rows", 1, "deep", 1, "er"): 29,
        ("rows", 1, "deep", 1, "er", "p"): 30,
        ("last",): 31,
    }


def paths(value: object, path: KeyPath = ()) -> set[KeyPath]:
    """The paths of all keys and items in a parsed document."""
    match value:
        case dict():
            below: list[tuple[str | int, object]] = list(value.items())
        case list():
            below = list(enumerate(value))
        case _:
            below = []
    return {(*path, key) for key, _ in below}.union(*(paths(item, (*path, key)) for key, item in below))


KEYS = st.sampled_from(["a", "b-c", '"q.u"', "'l # l'", "1", 'a . "x y"', "d.e"])
SCALARS = st.sampled_from(
    ["1", "-1.5e3", "true", "1979-05-27 07:32:00.5", "07:32:00", '"t # \\" ]"', "'l } \"'", '"""m\n"\n"""', "'''m\n'''"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[ # c ]\n" + " ,\n".join(items) + "\n]")
        | st.dictionaries(st.sampled_from(["x", "'y'", "z.w"]), inner, max_size=2).map(
            lambda table: "{" + ", ".join(f"{key} = {value}" for key, value in table.items()) + "}"
        )
    ),
    max_leaves=6,
)
PAIRS = st.dictionaries(KEYS, VALUES, max_size=3).map(
    lambda table: "".join(f"{k} = {v} # c\n" for k, v in table.items())
)
TABLES = st.lists(st.tuples(st.sampled_from(["[t]", "[[r]]", "[r.s]", "[ u . 'v' ]", "[[r.w]]"]), PAIRS), max_size=5)


@given(PAIRS, TABLES)
@settings(deadline=None, max_examples=50)
def test_the_keys_found_are_those_that_the_parser_finds(first: str, tables: list[tuple[str, str]]) -> None:
    """Whatever the text, as long as it is TOML, no key is missed and none invented."""
    text = first + "".join(f"{header}\n{pairs}" for header, pairs in tables)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    found = lines(text)
    assert set(found) == paths(document)
    assert all(1 <= line <= text.count("\n") + 1 for line in found.values())


def test_a_missing_key_has_the_line_of_what_is_around_it() -> None:
    """The nearest table or list that is there; without any, no line."""
    known: dict[KeyPath, int] = {("a",): 3, ("a", 0): 4}
    assert [line_of(path, known) for path in [("a", 0, "x", "y"), ("a", 1), ("b",), ()]] == [4, 3, 0, 0]


@pytest.mark.parametrize(
    "text", ["a = [[[1]]]", "a.b.c = 1", "a = 1\n" * 3, "x = '.......'", "# ........", "1.2.3\n4.5.6"]
)
def test_what_is_within_the_limits_is_not_too_much(text: str) -> None:
    """Limits count brackets, parts of one key, and values; not what stands in strings, comments or on another line."""
    assert excess(text, depth=3, values=3) is None


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a = 1\nb = [[[[", 2, "more than 3 levels"),
        ("\na.b . 'c'.d = 1", 2, "more than 3 levels"),
        ("[a.b.c.d]", 1, "more than 3 levels"),
        ("a = 1\n" * 4, 4, "more than 3 values"),
        ("a = [1,\n2,3,\n4,5]", 2, "more than 3 values"),
    ],
)
def test_what_is_beyond_them_is_told_with_its_line(text: str, line: int, what: str) -> None:
    """The text need not be whole, or TOML, to be too much."""
    found = excess(text, depth=3, values=3)
    assert found is not None
    assert (found[0], found[1].startswith(what)) == (line, True)
