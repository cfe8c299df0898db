"""Whatever text comes in the place of a job file is a job, or everything wrong with it is told with its place."""

import re
import tomllib
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.errors import ConfigurationError
from federation.job import Job, JobProblem, check, parse
from federation.toml_lines import lines
from tests.federation.test_toml_lines import paths
from tests.fuzz import corpus
from tests.fuzz.profiles import budget

EXAMPLE = resources.files("parley.commands").joinpath("example_job.toml").read_text(encoding="utf-8")
"""What `parley job new` writes."""
UNCOMMENTED = re.sub(r"^# (\w+ = )", r"\1", EXAMPLE, flags=re.MULTILINE)
"""The example with its optional keys set; a few of them exclude each other."""
PLAIN = re.sub(r"\n{2,}", "\n", re.sub(r" *#.*", "", EXAMPLE)).lstrip()
"""The example without its comments: short enough to be kept, whatever becomes of it."""
LINES = EXAMPLE.splitlines(keepends=True)
KEYS = sorted(set(re.findall(r"^(?:# )?(\w+) =", EXAMPLE, re.MULTILINE)))
TABLES = re.findall(r"^\[\[?[\w.]+\]\]?", EXAMPLE, re.MULTILINE)

VALUES = st.sampled_from(
    (
        *("0", "-0", "1", "-1", "2", "1.0", "-0.0", "0.5", "1e308", "1e400", "-1e-400", "inf", "-inf", "nan", "+1"),
        *("9" * 19, "-" + "9" * 19, "9" * 4299, "9" * 4301, "0x" + "f" * 400, "0b1", "1_0", "01"),
        *("true", "false", "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00.999999", "9999-12-31 23:59:60"),
        *('""', '"a"', '"heart"', '"auc"', '"\\u0000"', '"\\ud800"', '"\\U0010ffff"', "'\\'", '"\u202e"', "'''a\nb'''"),
        *('"tabular"', '"mlp"', '"fedadam"', '"column"', '"binary"', '"multiclass"', '"regression"', '"mean"'),
        *("[]", "[[]]", "[1, 2]", "[1, 1]", "[1, 'a']", "[0, 120]", "[120, 0]", "[nan, inf]", "['a', 'b']", "[{}]"),
        *("{}", "{ a = 1 }", "{ a.b = 1 }", "{ kind = 'numeric' }", "[" * 40, "{a=" * 40, '"' + "x" * 3000 + '"'),
    )
)
FRAGMENTS = st.sampled_from(
    (
        *(
            "[",
            "]",
            "[[",
            "]]",
            "{",
            "}",
            "=",
            ".",
            ",",
            "#",
            '"',
            "'",
            '"""',
            "'''",
            "\\",
            "\n",
            "\r\n",
            "\r",
            "\t",
            " ",
        ),
        *("\x00", "\x1f", "\x7f", "\ufeff", "\u2028", "é", "😀", "a", "1", "-", "_", "=1\n", "a.b", '"a"', "\\u12"),
        *KEYS,
        *TABLES,
    )
)
HOSTILE = 200_000
"""Characters of the largest text; a job file may have five times as many."""


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A job file after one to four changes: lines lost, doubled, moved, given other values, and characters put in."""
    kept = [text.decode(errors="replace") for text in corpus.seeds("job")]
    found = draw(st.sampled_from((PLAIN, PLAIN, EXAMPLE, UNCOMMENTED, *kept))).splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(found)))
        line = found[at] if at < len(found) else ""
        match draw(st.integers(0, 6)):
            case 0:
                del found[at : at + draw(st.integers(1, 5))]
            case 1:
                found.insert(at, draw(st.sampled_from(LINES)))
            case 2:
                found.insert(at, line)
            case 3:
                found.insert(at, f"{draw(st.sampled_from(KEYS))} = {draw(VALUES)}\n")
            case 4 if "=" in line:
                found[at] = f"{line.partition('=')[0]}= {draw(VALUES)}\n"
            case 5:
                found.insert(at, draw(st.sampled_from(TABLES)) + "\n")
            case _:
                cut = draw(st.integers(0, len(line)))
                found[at : at + 1] = [line[:cut] + draw(FRAGMENTS) + line[cut + draw(st.integers(0, 3)) :]]
    return "".join(found)


@st.composite
def repeated(draw: st.DrawFn) -> str:
    """A few fragments, so often that whatever is not linear in the text's length would be felt."""
    pattern = "".join(draw(st.lists(FRAGMENTS, min_size=1, max_size=4)))
    start = draw(st.sampled_from(("", EXAMPLE, "a = ", "[", "a = '", 'a = """')))
    return start + pattern * (draw(st.sampled_from((10, 500, HOSTILE))) // len(pattern))


def try_with(text: str) -> None:
    """Holds what comes of `text` to the promise."""
    job, problems = check(text)
    assert (job is None) == bool(problems)
    if job is not None:
        assert parse(text) == job
        assert Job.model_validate(job.model_dump()) == job
        corpus.keep("job", f"a job of {job.task.kind} {job.model.name} {job.strategy.name}", text.encode())
        return
    last = text.count("\n") + 1
    assert all(0 <= problem.line <= last for problem in problems)
    told = [problem.told("job.toml") for problem in problems]
    assert all(words.startswith("job.toml:") and words.isprintable() and len(words) < 5000 for words in told)
    assert all(problem.line or problem.path or _of_the_whole(problem) for problem in problems)
    with pytest.raises(ConfigurationError) as refused:
        parse(text, "job.toml")
    assert str(refused.value) == "\n".join(told)
    corpus.keep("job", problems[0].problem, text.encode(errors="surrogatepass"))


def _of_the_whole(problem: JobProblem) -> bool:
    """Whether the problem is the file's and has no place in it."""
    whole = ("the text is not valid Unicode", "the text has ", "a number has too many digits", "and ")
    return problem.problem.startswith(whole)


def agree(text: str) -> None:
    """The keys found by line are those that Python's parser finds, if it takes the text."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError):  # of what `check` never hands on: too many digits, too deep
        return
    found = lines(text)
    assert set(found) == paths(document)
    assert all(1 <= line <= text.count("\n") + 1 for line in found.values())


def test_what_was_kept_is_a_job_or_has_problems() -> None:
    """Every text of the corpus meets the promise."""
    for kept in corpus.seeds("job"):
        try_with(kept.decode(errors="surrogatepass"))


@given(mutated())
@budget(60)
def test_mutated_job_files_are_jobs_or_have_problems(text: str) -> None:
    """The example of `parley job new`, changed in any way: a job, or problems with places, and never another error."""
    try_with(text)


@given(mutated())
@budget(40)
def test_keys_are_found_where_the_parser_finds_them(text: str) -> None:
    """No key of a changed example is missed, and none invented."""
    agree(text)


@given(st.text(max_size=400) | st.lists(FRAGMENTS | VALUES, max_size=60).map("".join))
@budget(60)
def test_random_text_is_a_job_or_has_problems(text: str) -> None:
    """The same of text that was never a job file, and of the marks of TOML in any order."""
    try_with(text)
    agree(text)


@given(repeated())
@budget(10)
def test_hostile_repetition_is_refused(text: str) -> None:
    """Brackets, quotes, keys, tables and commas by the hundred thousand are refused like a word too many."""
    try_with(text)


def test_mutations_start_from_jobs_and_from_every_key() -> None:
    """The texts that mutations start from are what they are said to be: two are jobs, the third has every key."""
    assert parse(PLAIN) == parse(EXAMPLE)
    document = tomllib.loads(UNCOMMENTED)
    assert {path[-1] for path in paths(document) if isinstance(path[-1], str)} >= set(KEYS)
