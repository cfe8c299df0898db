from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from client.data import readers
from client.data.registry import DataSets
from client.training import loop
from client.training.protocol import Answer, CheckData, ComputeStatistics, Done, Failed, Subject, Train, Warm
from client.training.worker import Worker
from federation.vector import Layout, TensorSpec, to_safetensors
from tasks import tabular

if TYPE_CHECKING:
    from tests.client.training.conftest import Site


def done(answer: Answer) -> Done:
    """The answer, which must be a success."""
    assert isinstance(answer, Done), answer
    return answer


def failed(answer: Answer) -> Failed:
    """The answer, which must be a failure."""
    assert isinstance(answer, Failed), answer
    return answer


def test_warming_loads_torch() -> None:
    """The answer tells which one."""
    assert done(Worker().answer(Warm())).report.reason.startswith("torch 2.")


def test_good_data_have_no_findings_and_bad_data_tell_theirs(site: Site) -> None:
    """The findings come back as values; nothing is refused by the worker itself."""
    worker = Worker()
    assert done(worker.answer(CheckData(site.subject))).findings == ()
    pd.read_csv(site.csv).drop(columns="age").to_csv(site.csv, index=False)
    (finding,) = done(worker.answer(CheckData(site.subject))).findings
    assert finding.problem == "the data has no column 'age'"


def test_statistics_are_those_of_the_training_rows(site: Site) -> None:
    """Little-endian float64 at the output path; the weight is the number of rows."""
    answer = done(Worker().answer(ComputeStatistics(site.subject, str(site.output))))
    task = tabular.make(site.job)
    training, _ = task.split(pd.read_csv(site.csv))
    assert site.output.read_bytes() == task.statistics(training).astype("<f8").tobytes()
    assert (answer.length, answer.weight) == (6, len(training))


def test_training_writes_the_update_of_the_local_model(site: Site) -> None:
    """Local minus global, little-endian float32; equal requests give equal bytes; another round, another order."""
    flat = site.write_model()
    worker = Worker()
    answer = done(worker.answer(site.train()))
    first = site.output.read_bytes()
    assert (answer.length, len(first)) == (flat.size, 4 * flat.size)
    assert answer.weight == answer.report.rows == 48
    assert answer.report.loss is not None
    assert answer.report.loss < 0.7
    assert np.abs(np.frombuffer(first, "<f4")).max() > 0
    done(worker.answer(site.train()))
    assert site.output.read_bytes() == first
    done(Worker().answer(site.train()))
    assert site.output.read_bytes() == first
    done(worker.answer(site.train(round_number=2)))
    assert site.output.read_bytes() != first


def test_the_update_does_not_depend_on_what_was_asked_before(site: Site) -> None:
    """Cached weights of an earlier request never leak into the next."""
    site.write_model()
    worker = Worker()
    done(worker.answer(site.train()))
    first = site.output.read_bytes()
    done(worker.answer(site.train(round_number=2, proximal=5.0)))
    done(worker.answer(site.evaluate()))
    done(worker.answer(site.train()))
    assert site.output.read_bytes() == first


def test_the_proximal_term_reaches_the_loop(site: Site) -> None:
    """A strategy's mu shortens the update."""
    site.write_model()
    worker = Worker()
    done(worker.answer(site.train()))
    free = np.frombuffer(site.output.read_bytes(), "<f4")
    done(worker.answer(site.train(proximal=5.0)))
    assert np.linalg.norm(np.frombuffer(site.output.read_bytes(), "<f4")) < np.linalg.norm(free)


def test_evaluation_counts_the_test_rows(site: Site) -> None:
    """Little-endian float64 as the task counts; a model of zeros has a loss of log 2."""
    site.write_model()
    answer = done(Worker().answer(site.evaluate()))
    task = tabular.make(site.job)
    total = np.frombuffer(site.output.read_bytes(), "<f8")
    found = task.metrics(total)
    assert answer.length == task.evaluation_size
    assert found["n"] == answer.weight == 12
    assert found["loss"] == pytest.approx(np.log(2))


def test_data_are_read_once_while_they_do_not_change(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is training alone; a changed file, and each check, read anew."""
    site.write_model()
    reads: list[str] = []
    read = readers.read
    monkeypatch.setattr(readers, "read", lambda dataset: reads.append(dataset.name) or read(dataset))
    worker = Worker()
    for request in (ComputeStatistics(site.subject, str(site.output)), site.train(), site.evaluate(), site.train()):
        done(worker.answer(request))
    assert len(reads) == 1
    facts = site.csv.stat()
    os.utime(site.csv, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    done(worker.answer(site.train()))
    assert len(reads) == 2
    done(worker.answer(CheckData(site.subject)))
    assert len(reads) == 3


def test_a_sealed_job_is_told_what_was_read(site: Site) -> None:
    """Rows of each part of the split and of the rarest class, and the same version from the check and from the work."""
    sealed = replace(site, text=site.text.replace('secure_aggregation = "plain"', ""))
    worker = Worker()
    checked = done(worker.answer(CheckData(sealed.subject))).table
    assert checked is not None
    table = readers.read(DataSets(site.folder).get("patients"))
    training, testing = tabular.make(sealed.job).split(table)
    counts = training[sealed.job.data.label].value_counts()
    assert (checked.rows, checked.test_rows, checked.rarest) == (len(training), len(testing), counts.min())
    assert done(worker.answer(ComputeStatistics(sealed.subject, str(site.output)))).table == checked
    assert done(worker.answer(CheckData(site.subject))).table is None


@pytest.mark.parametrize("change", ["a value", "the order", "a column's name", "one row more"])
def test_another_version_of_a_table_has_another_digest(site: Site, change: str) -> None:
    """The same rows in another order are split in another way: sums over both would differ by what moved."""
    sealed = replace(site, text=site.text.replace('secure_aggregation = "plain"', ""))

    def version() -> str:
        found = done(Worker().answer(CheckData(sealed.subject))).table
        assert found is not None
        return found.digest

    table = pd.read_csv(site.csv)
    first = version()
    table.to_csv(site.csv, index=False)
    assert version() == first
    changed = {
        "a value": table.assign(age=[table["age"][0] + 1, *table["age"][1:]]),
        "the order": table.iloc[::-1],
        "a column's name": table.assign(other=1).rename(columns={"other": "another"}),
        "one row more": pd.concat([table, table.iloc[:1]]),
    }[change]
    changed.to_csv(site.csv, index=False)
    assert version() != first


def test_data_that_are_refused_are_told_nothing_of(site: Site) -> None:
    """They may not even be split."""
    sealed = replace(site, text=site.text.replace('secure_aggregation = "plain"', ""))
    pd.read_csv(site.csv).drop(columns="age").to_csv(site.csv, index=False)
    answer = done(Worker().answer(CheckData(sealed.subject)))
    assert (bool(answer.findings), answer.table) == (True, None)


def test_data_that_no_longer_meet_the_contract_train_nothing(site: Site) -> None:
    """A file that changes after the check is checked again; nothing is written."""
    site.write_model()
    worker = Worker()
    assert done(worker.answer(CheckData(site.subject))).findings == ()
    pd.read_csv(site.csv).assign(age=900).to_csv(site.csv, index=False)
    answer = failed(worker.answer(site.train()))
    assert answer.cause == "data"
    assert "60 rows lie outside the public range 0 to 120 years" in answer.message
    assert not site.output.exists()


def test_an_unknown_data_set_is_a_matter_of_data(site: Site) -> None:
    """The site's administrator registers it."""
    answer = failed(Worker().answer(CheckData(Subject(site.text, "lungs", str(site.folder)))))
    assert answer.cause == "data"
    assert "no data set named 'lungs' is registered here (registered: patients)" in answer.message


def test_a_job_that_cannot_be_read_is_refused(site: Site) -> None:
    """The agent should not have asked."""
    answer = failed(Worker().answer(CheckData(Subject("format = 2", "patients", str(site.folder)))))
    assert answer.cause == "internal"
    assert "format" in answer.message


def test_another_jobs_model_is_refused(site: Site) -> None:
    """Its tensors do not fit, and nothing is written."""
    layout = Layout((TensorSpec("weight", (1, 9)), TensorSpec("bias", (1,))))
    (site.folder / "model").write_bytes(to_safetensors(layout, np.zeros(10, np.float32)))
    answer = failed(Worker().answer(site.train()))
    assert answer.cause == "internal"
    assert "not those this job's model has; the first difference is weight" in answer.message
    assert not site.output.exists()


def test_a_model_that_is_not_finite_is_refused(site: Site) -> None:
    """NaN in a global model never meets the data."""
    layout = Layout((TensorSpec("weight", (1, 4)), TensorSpec("bias", (1,))))
    (site.folder / "model").write_bytes(to_safetensors(layout, np.full(5, np.nan, np.float32)))
    assert "NaN or infinite" in failed(Worker().answer(site.train())).message


NOISY = """
[privacy]
churn = "dp"
[privacy.differential_privacy]
level = "site"
epsilon = 4.0
delta = 0.001
"""


def test_with_noise_training_that_diverges_is_an_update_like_any_other(site: Site) -> None:
    """Nothing fails because of records: as many values are written as ever, whatever they are. Else it is told."""
    flat = site.write_model()
    text = site.text.replace("[strategy]", "[training]\nlearning_rate = 3e38\nepochs = 99\n\n[strategy]")
    text = text.replace('[privacy]\nsecure_aggregation = "plain"\n', NOISY)
    answer = done(Worker().answer(site.train(subject=Subject(text, "patients", str(site.folder)))))
    written = np.frombuffer(site.output.read_bytes(), "<f4")
    assert (answer.length, written.size) == (flat.size, flat.size)
    assert answer.report.loss is None
    assert (
        failed(
            Worker().answer(site.train(subject=Subject(text.replace(NOISY, ""), "patients", str(site.folder))))
        ).cause
        == "data"
    )


def test_training_that_diverges_is_a_matter_of_data(site: Site) -> None:
    """The message names the remedy; nothing that is not finite is ever written."""
    site.write_model()
    wild = site.train()
    text = site.text.replace("[strategy]", "[training]\nlearning_rate = 3e38\nepochs = 99\n\n[strategy]")
    answer = failed(Worker().answer(site.train(subject=Subject(text, "patients", str(site.folder)))))
    assert answer.cause == "data"
    assert "not finite" in answer.message
    assert "a smaller learning_rate" in answer.message
    assert not Path(wild.output).exists()


@pytest.mark.parametrize(
    ("error", "cause", "told"),
    [
        (MemoryError(), "resources", "the trainer ran out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "resources", "the trainer ran out of memory"),
        (
            RuntimeError("Meyer has 63"),
            "internal",
            "the trainer met an unexpected RuntimeError; its log has the details",
        ),
    ],
)
def test_a_librarys_error_is_told_by_its_kind_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: Exception, cause: str, told: str
) -> None:
    """Its text could show a record; exhausted memory is told apart."""
    site.write_model()

    def fail(*_: object, **__: object) -> float:
        raise error

    monkeypatch.setattr(loop, "train", fail)
    answer = failed(Worker().answer(site.train()))
    assert answer.cause == cause
    assert told in answer.message
    assert "Meyer" not in answer.message


def test_a_missing_model_or_a_full_disk_is_a_matter_of_resources(site: Site) -> None:
    """The path is named."""
    request: Train = site.train()
    assert failed(Worker().answer(request)).cause == "resources"
    site.write_model()
    answer = failed(Worker().answer(site.train(output=str(site.folder / "none" / "result"))))
    assert answer.cause == "resources"
    assert "cannot write" in answer.message
