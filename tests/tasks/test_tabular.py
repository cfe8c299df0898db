import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation import job
from federation.errors import ConfigurationError, DataContractError, RemoteProtocolError
from tasks import tabular
from tasks._preparation import Preparation
from tasks.task import Loss

Make = Callable[..., tabular.TabularTask]
Text = Callable[..., str]

AGE = '{ name = "age", kind = "numeric", range = [0, 120], missing = %s },'
PAIN = '{ name = "pain", kind = "categorical", categories = ["none", "typical", "other"], missing = "%s" },'


def prepared(task: tabular.TabularTask, *sites: pd.DataFrame) -> bytes:
    """The preparation from all rows of some sites."""
    return task.prepare(np.sum([task.statistics(site) for site in sites], axis=0))


def test_the_file_loads_neither_torch_nor_pandas() -> None:
    """The coordinator makes preparations and metrics, and must not pay for torch or pandas."""
    program = "import sys, tasks.tabular, tasks.task; print(sorted({'torch', 'pandas'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"task": 'target = "multiclass"'}, "task.classes: multiclass needs the label's values"),
        (
            {"task": 'target = "binary"\nclasses = ["a", "b"]'},
            "task.classes: only multiclass has classes, the target is binary",
        ),
        ({"task": 'target = "regression"'}, "task.label_range: a regression needs the public range of its label"),
        (
            {"task": 'target = "binary"\nlabel_range = [0, 1]'},
            "task.label_range: only a regression has it, the target is binary",
        ),
        (
            {"task": 'target = "regression"\nlabel_range = [0, 9]', "data": 'label = "sick"\nlabel_above = 1'},
            "data.label_above: it makes a binary label, and the target is regression",
        ),
        (
            {"task": 'target = "binary"\nstandardise = "ranges"'},
            "which only the statistics step knows; task.standardise is 'ranges'; set task.standardise =",
        ),
        (
            {"data": 'label = "sick"\n[data.split]\nmethod = "column"\ncolumn = "age"'},
            "data.split.column: 'age' is also the label or an input",
        ),
        (
            {"rounds": 'best_metric = "rmse"'},
            "rounds.best_metric: this task has no metric 'rmse'; use one of accuracy, auc, loss",
        ),
        (
            {"rounds": '[rounds.early_stop]\nmetric = "r2"'},
            "rounds.early_stop.metric: this task has no metric 'r2'; use one of accuracy, auc, loss",
        ),
        ({"task": 'target = "multiclass"\nclasses = ["a", "a"]'}, "task.classes[1]: the class 'a' stands twice"),
        (
            {"task": 'target = "regression"\nlabel_range = [1, 1]'},
            "task.label_range: the range must go from a lower to a higher number",
        ),
    ],
)
def test_an_impossible_job_is_refused_with_the_keys_path(text: Text, parts: dict[str, str], told: str) -> None:
    """Each refusal names the key, what is wrong and the way out."""
    with pytest.raises(ConfigurationError) as refused:
        job.parse(text(**parts))
    assert told in str(refused.value)


def test_another_tasks_settings_are_refused(text: Text) -> None:
    """A job of another kind never becomes a table's task."""
    parsed = job.parse(text())
    other = parsed.model_copy(update={"task": job.TaskSettings(kind="image")})
    with pytest.raises(ConfigurationError, match=r"task\.kind: 'image' is not a table"):
        tabular.make(other)


def test_inputs_are_numbers_and_one_hot_categories_without_the_first(make: Make) -> None:
    """Column order is the contract's; the reference category is all zeros."""
    task = make(
        task='target = "binary"\nstandardise = "none"',
        columns=AGE % '"refuse"' + PAIN % "own_category",
    )
    table = pd.DataFrame({"pain": ["none", "other", None, "typical"], "age": [1.0, 2.0, 3.0, 4.0]})
    assert task.features == 4
    np.testing.assert_array_equal(
        task.inputs(table, task.prepare(None)), [[1, 0, 0, 0], [2, 0, 1, 0], [3, 0, 0, 1], [4, 1, 0, 0]]
    )


def test_a_missing_category_can_be_the_reference(make: Make) -> None:
    """It is encoded like the first category."""
    task = make(columns=AGE % '"refuse"' + PAIN % "reference")
    table = pd.DataFrame({"pain": [None, "none"], "age": [50.0, 50.0]})
    first, second = task.inputs(table, prepared(task, table))
    np.testing.assert_array_equal(first, second)


def test_ranges_are_mapped_onto_zero_to_one(make: Make) -> None:
    """Public ranges need no statistics step."""
    task = make(task='target = "binary"\nstandardise = "ranges"', columns=AGE % "30")
    assert task.statistics_size == 0
    assert task.statistics(pd.DataFrame({"age": [1.0]})).size == 0
    inputs = task.inputs(pd.DataFrame({"age": [0.0, 120.0, None]}), task.prepare(None))
    np.testing.assert_array_equal(inputs, np.array([[0], [1], [0.25]], np.float32))


@given(
    values=st.lists(st.one_of(st.floats(20, 90), st.just(float("nan"))), min_size=2, max_size=40),
    cut=st.integers(0, 40),
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_federated_mean_and_deviation_are_those_of_the_pooled_rows(make: Make, values: list[float], cut: int) -> None:
    """Summing two sites' statistics standardises exactly as if all measured values lay in one place."""
    task = make(columns=AGE % '"mean"')
    table = pd.DataFrame({"age": values})
    (column,) = Preparation.from_bytes(prepared(task, table[:cut], table[cut:])).columns
    measured = table["age"].dropna().to_numpy()
    if not measured.size:
        assert (column.shift, column.scale, column.fill) == (60.0, 60.0, 60.0)
        return
    assert column.shift == column.fill == pytest.approx(measured.mean())
    if measured.std() > 1e-3:
        assert column.scale == pytest.approx(measured.std(), rel=1e-5)


def test_a_column_that_one_site_never_measured_takes_the_others_mean(make: Make) -> None:
    """A hospital whose zeros all mean `not measured` adds nothing to the statistics and gets the federation's mean."""
    column = '{ name = "chol", kind = "numeric", range = [0, 700], zero_is_missing = true, missing = "mean" },'
    task = make(columns=column)
    measured, never = pd.DataFrame({"chol": [200.0, 260.0]}), pd.DataFrame({"chol": [0.0, 0.0, 0.0]})
    preparation = prepared(task, measured, never)
    assert preparation == prepared(task, measured)
    np.testing.assert_allclose(task.inputs(never, preparation), 0, atol=1e-6)


def test_a_constant_column_is_scaled_by_its_range(make: Make) -> None:
    """Without variance the half-width scales: training sees zeros, and a later, other value stays small."""
    task = make(columns=AGE % '"refuse"')
    table = pd.DataFrame({"age": [70.1] * 1000})
    (column,) = Preparation.from_bytes(prepared(task, table)).columns
    assert column.scale == 60.0
    np.testing.assert_allclose(task.inputs(table, prepared(task, table)), 0, atol=1e-6)


def test_a_small_spread_far_from_zero_is_not_lost_to_cancellation(make: Make) -> None:
    """Sums of centred and scaled values keep a deviation of one in a column whose values are ten million."""
    column = '{ name = "x", kind = "numeric", range = [9999900, 10000100] },'
    task = make(columns=column)
    values = 1e7 + np.random.default_rng(0).normal(size=1000)
    (read,) = Preparation.from_bytes(prepared(task, pd.DataFrame({"x": values}))).columns
    assert read.scale == pytest.approx(values.std(), rel=1e-9)


@pytest.mark.parametrize(
    "total",
    [None, np.zeros(2), np.array([np.nan, 0, 0]), np.array([-1.0, 0, 0]), np.array([2, 3.0, 1]), np.array([2, 0, 9.0])],
)
def test_statistics_of_no_possible_values_are_refused(make: Make, total: np.ndarray | None) -> None:
    """Wrong lengths, NaN, negative counts and sums beyond the public range come from a peer, not from rows."""
    task = make(columns=AGE % '"mean"')
    with pytest.raises(RemoteProtocolError, match="summed statistics"):
        task.prepare(total)


@pytest.mark.parametrize(
    ("name", "shift", "scale", "fill", "told"),
    [
        ("weight", 50, 10, 50, "is not of this contract's numeric columns"),
        ("age", 121, 10, 50, "scales 'age' as no values within its public range would"),
        ("age", 50, 61, 50, "scales 'age' as no values within its public range would"),
        ("age", 50, 1e-9, 50, "scales 'age' as no values within its public range would"),
        ("age", 50, 10, -1, "scales 'age' as no values within its public range would"),
    ],
)
def test_a_preparation_that_the_statistics_step_cannot_have_written_is_refused(
    make: Make, name: str, shift: float, scale: float, fill: float, told: str
) -> None:
    """A wrong column, or numbers outside the public range, never scale a site's data."""
    task = make(columns=AGE % '"mean"')
    forged = Preparation.model_validate(
        {"columns": ({"name": name, "shift": float(shift), "scale": float(scale), "fill": float(fill)},)}
    )
    with pytest.raises(RemoteProtocolError, match=told):
        task.inputs(pd.DataFrame({"age": [50.0]}), forged.to_bytes())


def test_public_ranges_allow_one_preparation_only(make: Make) -> None:
    """Without a statistics step the contract alone decides."""
    task = make(task='target = "binary"\nstandardise = "ranges"', columns=AGE % "30")
    (column,) = Preparation.from_bytes(task.prepare(None)).columns
    forged = Preparation(columns=(column.model_copy(update={"scale": 60.0}),))
    with pytest.raises(RemoteProtocolError, match="scales 'age' as no values"):
        task.inputs(pd.DataFrame({"age": [50.0]}), forged.to_bytes())


def test_cells_without_a_meaning_never_reach_a_model(make: Make, table: pd.DataFrame) -> None:
    """Even unchecked rows cannot become inputs that are not finite or mean nothing."""
    task = make()
    preparation = prepared(task, table)
    with pytest.raises(DataContractError, match="a value is missing where the contract refuses that"):
        task.inputs(table.assign(age=np.nan), preparation)
    with pytest.raises(DataContractError, match="column 'pain' holds what is none of its categories"):
        task.inputs(table.assign(pain="new"), preparation)


def test_rows_that_the_contract_drops_are_in_no_part(make: Make) -> None:
    """A row without a value in a `drop_row` column neither trains nor tests."""
    task = make(columns=AGE % '"drop_row"' + PAIN % "drop_row")
    table = pd.DataFrame(
        {"age": [1.0, None] * 20, "pain": ["none", "none", None, "none"] * 10, "sick": [0, 1, 1, 1] * 10}
    )
    train, test = task.split(table)
    kept = pd.concat([train, test]).sort_index()
    assert list(kept.index) == list(range(0, 40, 4))


def test_a_column_of_the_data_can_say_which_rows_test(make: Make, table: pd.DataFrame) -> None:
    """Rows marked as neither are in no part."""
    task = make(data='label = "sick"\n[data.split]\nmethod = "column"\ncolumn = "part"')
    marked = table.assign(part=["train"] * 40 + [" test "] * 15 + ["later"] * 3 + [None] * 2)
    train, test = task.split(marked)
    assert list(train.index) == list(range(40))
    assert list(test.index) == list(range(40, 55))
    assert "data.split.column: the data has no column 'part'" in str(task.inspect(table)[0])


def test_the_stratified_split_follows_the_jobs_seed(make: Make, table: pd.DataFrame) -> None:
    """Sites and reruns divide alike; another seed divides otherwise; classes keep their shares."""
    seeds = [make(data=f'label = "sick"\n[data.split]\nseed = {seed}').split(table)[1] for seed in (1, 1, 2)]
    assert list(seeds[0].index) == list(seeds[1].index)
    assert list(seeds[0].index) != list(seeds[2].index)
    assert seeds[0]["sick"].mean() == pytest.approx(table["sick"].mean(), abs=0.1)


@pytest.mark.parametrize(
    ("task", "data", "cells", "labels", "loss"),
    [
        ('target = "binary"', "", [0, 1, True], [0, 1, 1], Loss.LOGISTIC),
        ('target = "binary"', "label_above = 0", [0, 1, 4], [0, 1, 1], Loss.LOGISTIC),
        (
            'target = "multiclass"\nclasses = ["low", "mid", "high"]',
            "",
            ["high", "low", "mid"],
            [2, 0, 1],
            Loss.CROSS_ENTROPY,
        ),
        ('target = "multiclass"\nclasses = [4, 2]', "", [2.0, 4.0, 2.0], [1, 0, 1], Loss.CROSS_ENTROPY),
        ('target = "regression"\nlabel_range = [0, 20]', "", [0, 10, 15], [-1, 0, 0.5], Loss.SQUARED),
    ],
)
def test_labels_are_classes_or_scaled_values(
    make: Make, task: str, data: str, cells: list[object], labels: list[float], loss: Loss
) -> None:
    """Each target reads its labels and names its loss."""
    made = make(task=task, data=f'label = "sick"\n{data}', columns=AGE % '"refuse"')
    found = made.labels(pd.DataFrame({"sick": pd.Series(cells, dtype=object)}))
    assert list(found) == labels
    assert made.loss is loss
    assert found.dtype == (np.float32 if loss is Loss.SQUARED else np.int64)


@pytest.mark.parametrize(
    ("task", "cells", "told"),
    [
        (
            'target = "binary"',
            [0, 1, 2],
            "data.label: fewer than 5 rows hold none of the contract's values; use one of 0, 1",
        ),
        ('target = "binary"', [0, 1, None], "data.label: fewer than 5 rows have no label; label or remove those rows"),
        ('target = "multiclass"\nclasses = ["a", "b"]', ["a", "b", "c"], "use one of a, b"),
        ('target = "regression"\nlabel_range = [0, 5]', [1, 2, 7], "lie outside the public range 0 to 5"),
        ('target = "regression"\nlabel_range = [0, 5]', ["x", 2, 3], "hold something else where numbers are asked"),
    ],
)
def test_labels_that_the_contract_does_not_allow_are_told(
    make: Make, task: str, cells: list[object], told: str
) -> None:
    """Values, gaps and types of the label are checked like those of a column."""
    made = make(task=task, columns=AGE % '"refuse"')
    table = pd.DataFrame({"age": 50.0, "sick": pd.Series(cells, dtype=object)})
    assert told in str(made.inspect(table)[0])
    assert made.inspect(table, labelled=False) == ()


def test_a_missing_label_column_is_told(make: Make, table: pd.DataFrame) -> None:
    """It is asked for where rows are to train, and not where they are to be predicted for."""
    unlabelled = table.drop(columns="sick")
    assert "data.label: the data has no column 'sick'; add it" in str(make().inspect(unlabelled)[0])
    assert make().inspect(unlabelled, labelled=False) == ()


def test_predictions_are_described_in_the_labels_words(make: Make) -> None:
    """Probabilities, class names and values in the label's unit."""
    outputs = np.array([[-1000.0], [0.5]], np.float32)
    binary = make().describe(outputs)
    assert list(binary["class"]) == [0, 1]
    np.testing.assert_allclose(binary["probability"], [0, 1 / (1 + np.exp(-0.5))])
    classes = make(task='target = "multiclass"\nclasses = ["low", "high"]').describe(
        np.array([[1000.0, 0.0]], np.float32)
    )
    assert {name: list(column) for name, column in classes.items()} == {
        "class": ["low"],
        "probability_low": [1.0],
        "probability_high": [0.0],
    }
    value = make(task='target = "regression"\nlabel_range = [0, 20]').describe(np.array([[0.5]], np.float32))
    assert list(value["value"]) == [15.0]


def test_a_regression_without_its_range_cannot_be_scaled(make: Make) -> None:
    """A task that no `check_job` saw still says what it needs."""
    task = make(task='target = "regression"\nlabel_range = [0, 20]')
    bare = replace(task, settings=task.settings.model_copy(update={"label_range": None}))
    with pytest.raises(ConfigurationError, match=r"task\.label_range: a regression needs"):
        bare.describe(np.zeros((1, 1), np.float32))
