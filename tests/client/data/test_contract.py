import random
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.data import contract
from federation import job as job_file
from federation.findings import Finding
from tasks import tabular

TEXT, TABLE = tabular.example(np.random.default_rng(0))

Check = Callable[..., tuple[Finding, ...]]


def check(table: pd.DataFrame, *changes: tuple[str, str]) -> tuple[Finding, ...]:
    """What is found of `table` under the example's contract, changed."""
    text = TEXT
    for old, new in changes:
        text = text.replace(old, new)
    job = job_file.parse(text)
    return contract.check(table, job.data, tabular.make(job))


SPLIT = ("[model]\n", '[data.split]\nmethod = "column"\ncolumn = "part"\n\n[model]\n')


def test_a_table_that_meets_the_contract_has_no_findings() -> None:
    """Sixty good rows, a fifth of them to test: nothing to say."""
    assert check(TABLE) == ()


def test_all_faults_are_told_at_once() -> None:
    """An administrator corrects the data once, not fault by fault."""
    broken = TABLE.drop(columns="age").assign(pain="new", sick=7)
    assert [finding.path for finding in check(broken)] == ["data.columns.age", "data.columns.pain", "data.label"]


def test_too_few_training_rows_are_refused() -> None:
    """The contract's minimum is shown; a count of a few is not."""
    (finding, *_) = check(TABLE[TABLE["sick"] == 0][:4])
    assert finding == Finding(
        "data.minimum_rows",
        "fewer than 5 rows are left for training; the contract asks for at least 10",
        "register more records, or complete those that the contract drops",
    )


def test_no_test_rows_are_refused_and_few_are_a_warning() -> None:
    """Without test rows a site could not evaluate; with few it may, and is told."""
    none, few = (check(TABLE.assign(part=["train"] * (60 - n) + ["test"] * n), SPLIT) for n in (0, 6))
    assert none[0].problem == "no rows are left for testing"
    assert none[0].fix == "mark some rows as test in column 'part'"
    assert none[0].level == "refusal"
    assert few[0].problem.startswith("6 rows are left for testing")
    assert few[0].level == "warning"


def test_one_class_only_is_a_warning() -> None:
    """A hospital with one kind of patient takes part and knows it."""
    (finding,) = check(TABLE.assign(sick=1))
    assert finding.level == "warning"
    assert finding.problem == "all training rows have one and the same label"


def test_no_kept_rows_are_refused_with_the_way_out() -> None:
    """A table whose every row the contract drops trains and tests nothing."""
    drop = ("range = [0, 120] }", 'range = [0, 120], missing = "drop_row" }')
    found = check(TABLE.assign(age=np.nan), drop)
    assert [finding.path for finding in found] == ["data.minimum_rows", "data.split"]
    assert "ask the job's author for a larger test_fraction" in found[1].fix


cells = st.one_of(
    st.floats(1e5, 1e9, allow_nan=False).map(lambda number: round(number, 3)),
    st.text("qwxyzQWXYZ", min_size=6, max_size=12),
    st.none(),
)


@given(
    columns=st.fixed_dictionaries(
        {name: st.lists(cells, min_size=12, max_size=12) for name in ("age", "pressure", "pain", "sick")}
    ),
    seed=st.integers(0, 100),
)
@settings(max_examples=50, deadline=None)
def test_no_cell_of_the_data_is_in_any_finding(columns: dict[str, list[object]], seed: int) -> None:
    """Whatever stands in the table, findings hold contract words and counts alone."""
    mixed = random.Random(seed)  # noqa: S311 - which good rows are mixed in is no secret
    table = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})
    table = pd.concat(
        [table, TABLE.astype(object).sample(mixed.randrange(1, 40), random_state=seed)], ignore_index=True
    )
    told = "\n".join(f"{finding.path} {finding.problem} {finding.fix}" for finding in check(table))
    assert told
    for values in columns.values():
        for value in values:
            if value is not None:
                assert str(value) not in told
                assert not isinstance(value, float) or f"{value:g}" not in told


@pytest.mark.parametrize("count", [1, 4, 5, 20])
def test_counts_below_five_are_never_told(count: int) -> None:
    """From five rows on the count is told, below it is not."""
    table = TABLE.assign(age=[999.0] * count + [50.0] * (60 - count))
    (finding,) = check(table)
    assert finding.problem.startswith("fewer than 5 rows" if count < 5 else f"{count} rows")
