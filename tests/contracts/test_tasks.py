"""What every task promises; a new file in `tasks/` is picked up by itself."""

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest

from federation import job as job_file
from federation import plugins
from federation.findings import refusals
from federation.job import Job, TaskSettings
from tasks.task import Examples, Task, TaskFile


@pytest.fixture(params=plugins.names("tasks"))
def kind(request: pytest.FixtureRequest) -> str:
    """Each task's kind."""
    return str(request.param)


@pytest.fixture
def example(kind: str) -> tuple[Job, pd.DataFrame]:
    """Each task's own example: a job, and rows that meet it."""
    file: TaskFile = plugins.load("tasks", kind)
    text, table = file.example(np.random.default_rng(0))
    return job_file.parse(text), table


@pytest.fixture
def table(example: tuple[Job, pd.DataFrame]) -> pd.DataFrame:
    """The example's rows."""
    return example[1]


@pytest.fixture
def task(kind: str, example: tuple[Job, pd.DataFrame]) -> Task:
    """The example's task."""
    file: TaskFile = plugins.load("tasks", kind)
    return file.make(example[0])


@pytest.fixture
def preparation(task: Task, table: pd.DataFrame) -> bytes:
    """The preparation from the example's training rows."""
    return task.prepare(task.statistics(task.split(table)[0]) if task.statistics_size else None)


@pytest.fixture
def examples(task: Task, table: pd.DataFrame, preparation: bytes) -> Examples:
    """The example's rows as model inputs and labels."""
    return task.examples(table, preparation)


def halves(table: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """The rows as two sites hold them."""
    yield table.iloc[: len(table) // 3]
    yield table.iloc[len(table) // 3 :]


def test_its_file_offers_settings_of_its_own_name_and_documents_itself(kind: str) -> None:
    """The file's name is the `kind` that a job writes."""
    module = plugins.load("tasks", kind)
    assert issubclass(module.Settings, TaskSettings)
    assert module.Settings.model_fields["kind"].annotation.__args__ == (kind,)
    assert set(module.__all__) >= {"Settings", "check_job", "make", "example"}
    assert all(inspect.getdoc(getattr(module, name)) for name in module.__all__)


def test_its_file_loads_neither_torch_nor_pandas(kind: str) -> None:
    """The coordinator makes preparations and metrics without either."""
    program = f"import sys, tasks.{kind}; print(sorted({{'torch', 'pandas'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_it_keeps_the_interface(task: Task) -> None:
    """Every member of the interface is there, and sizes are whole numbers."""
    assert isinstance(task, Task)
    assert min(task.features, task.outputs, task.evaluation_size) >= 1
    assert task.statistics_size >= 0
    assert "loss" in task.better


def test_rows_that_meet_the_contract_are_not_refused(task: Task, table: pd.DataFrame) -> None:
    """The example is fit to train, and to be predicted for."""
    assert refusals(task.inspect(table)) == ()
    assert refusals(task.inspect(table, labelled=False)) == ()


def test_every_missing_column_is_refused_by_name(task: Task, table: pd.DataFrame) -> None:
    """Nothing is read that is not there."""
    for column in table.columns:
        assert repr(column) in refusals(task.inspect(table.drop(columns=column)))[0].problem


def test_no_row_trains_and_tests(task: Task, table: pd.DataFrame) -> None:
    """The parts are disjoint, come from the table, and are the same each time."""
    train, test = task.split(table)
    assert not set(train.index) & set(test.index)
    assert set(train.index) | set(test.index) <= set(table.index)
    assert len(train)
    assert len(test)
    assert [list(part.index) for part in task.split(table)] == [list(train.index), list(test.index)]


def test_statistics_of_sites_sum_to_those_of_the_pooled_rows(task: Task, table: pd.DataFrame) -> None:
    """What crosses sites is summed, so the sum must mean the union."""
    total = sum(task.statistics(part) for part in halves(table))
    np.testing.assert_allclose(total, task.statistics(table), rtol=1e-12)
    assert task.statistics(table).shape == (task.statistics_size,)
    assert task.statistics(table).dtype == np.float64


def test_its_fields_are_the_words_of_its_vectors_and_hold_what_rows_come_to(
    task: Task, table: pd.DataFrame, examples: Examples
) -> None:
    """A secure sum knows the limits of each word, and no more than 32 bins of any histogram of values."""
    outputs = np.random.default_rng(1).normal(size=(len(examples.inputs), task.outputs)).astype(np.float32)
    for fields, vector in (
        (task.statistics_fields, task.statistics(table)),
        (task.evaluation_fields, task.evaluate(outputs, examples.labels)),
    ):
        assert sum(field.width for field in fields) == vector.size
        assert len({field.name for field in fields}) == len(fields)
        start = 0
        for field in fields:
            words = vector[start : start + field.width]
            assert field.low <= words.min()
            assert words.max() <= field.high
            assert 100 * max(-field.low, field.high) * 2.0**field.frac <= 2.0**62  # a hundred sites' sum has room
            start += field.width


def test_equal_statistics_give_equal_preparations(task: Task, table: pd.DataFrame, preparation: bytes) -> None:
    """The preparation is JSON, and its digest may be compared."""
    again = task.prepare(task.statistics(task.split(table)[0]) if task.statistics_size else None)
    assert again == preparation
    assert json.loads(preparation)


def test_examples_are_finite_and_have_the_declared_shape(task: Task, table: pd.DataFrame, examples: Examples) -> None:
    """Inputs [rows, features] float32; labels [rows] int64 or float32."""
    assert examples.inputs.shape == (len(table), task.features)
    assert examples.inputs.dtype == np.float32
    assert np.isfinite(examples.inputs).all()
    assert examples.labels.shape == (len(table),)
    assert examples.labels.dtype in (np.int64, np.float32)


def test_a_rows_inputs_do_not_depend_on_the_other_rows(task: Task, table: pd.DataFrame, preparation: bytes) -> None:
    """A prediction for one row is the same alone and in company."""
    together = task.inputs(table, preparation)
    apart = np.concatenate([task.inputs(part, preparation) for part in halves(table)])
    np.testing.assert_array_equal(together, apart)


def test_evaluations_of_sites_sum_to_that_of_the_pooled_rows(task: Task, examples: Examples) -> None:
    """Metrics of the sum are the pooled rows' metrics, all finite, each with a direction or a count."""
    outputs = np.random.default_rng(1).normal(size=(len(examples.inputs), task.outputs)).astype(np.float32)
    cut = len(outputs) // 3
    parts = [task.evaluate(outputs[:cut], examples.labels[:cut]), task.evaluate(outputs[cut:], examples.labels[cut:])]
    whole = task.evaluate(outputs, examples.labels)
    np.testing.assert_allclose(parts[0] + parts[1], whole, rtol=1e-9)
    assert whole.shape == (task.evaluation_size,)
    found = task.metrics(whole)
    assert set(found) == {"n", *task.better}
    assert found["n"] == len(outputs)
    assert np.isfinite(list(found.values())).all()


def test_no_rows_give_no_metric_but_their_number(task: Task) -> None:
    """An empty sum is not an error."""
    assert task.metrics(np.zeros(task.evaluation_size)) == {"n": 0.0}


def test_predictions_have_a_row_for_each_output(task: Task) -> None:
    """Columns that people read, one entry a row, whatever the outputs."""
    outputs = np.array([[-50.0] * task.outputs, [50.0] * task.outputs, [0.0] * task.outputs], np.float32)
    columns = task.describe(outputs)
    assert columns
    assert all(len(column) == 3 for column in columns.values())
