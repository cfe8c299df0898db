"""Answers the agent's requests: keeps table, examples and model of the last job, so that a round is training alone."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import numpy as np

from client import tables
from client.data import contract, readers
from client.data.registry import DataSets
from client.training.protocol import (
    Answer,
    CheckData,
    ComputeStatistics,
    Done,
    Evaluate,
    Failed,
    Report,
    Request,
    Subject,
    Table,
    Train,
    Warm,
)
from federation import job as job_file
from federation import plugins
from federation.errors import DataContractError, ParleyError, StorageError
from federation.findings import refusals, told
from federation.vector import from_safetensors
from tasks.task import Loss

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd
    import torch

    from client.data.registry import DataSet
    from client.training.device import DevicePlan
    from federation.findings import Finding
    from federation.job import Job
    from tasks.task import Task, TaskFile

__all__ = ["Worker"]

_log = logging.getLogger(__name__)


class Worker:
    """Does one request at a time. At most one job's data is in memory: the last one's.

    The data is read again when its file, its registration or the job changes, and at each `CheckData`.
    """

    def __init__(self) -> None:
        self._case: _Case | None = None

    def answer(self, request: Request) -> Answer:
        """Does `request` and tells how it went; nothing is raised but what ends the process."""
        begin = time.perf_counter()
        try:
            done = self._do(request)
        except DataContractError as refused:
            return Failed("data", str(refused))
        except (StorageError, MemoryError) as exhausted:
            return Failed("resources", str(exhausted) or "the trainer ran out of memory")
        except ParleyError as refused:
            return Failed("internal", str(refused))
        except Exception as bug:  # noqa: BLE001 - the process must live to tell, without a foreign text that may show data
            _log.exception("a request failed")
            return _foreign(bug)
        return replace(done, seconds=time.perf_counter() - begin)

    def _do(self, request: Request) -> Done:
        match request:
            case Warm():
                import torch

                return Done(report=Report(reason=f"torch {torch.__version__}"))
            case CheckData():
                self._case = None
                case = self._open(request.subject)
                return Done(findings=case.findings, table=None if refusals(case.findings) else case.facts)
            case ComputeStatistics():
                case = self._ready(request.subject)
                training, _ = case.parts
                report = Report(rows=len(training))
                done = _write(request.output, case.task.statistics(training), len(training), report)
            case Train():
                case = self._ready(request.subject)
                done = _train(case, request)
            case Evaluate():
                case = self._ready(request.subject)
                done = _evaluate(case, request)
            case _:
                assert_never(request)
        return replace(done, table=case.facts)

    def _open(self, subject: Subject) -> _Case:
        """The case of `subject`, read anew if anything about it changed."""
        dataset = DataSets(Path(subject.registry)).get(subject.dataset)
        key = (job_file.digest(subject.job), dataset, dataset.identity)
        if self._case is None or self._case.key != key:
            self._case = None  # the old table's memory first
            self._case = _Case.read(key, subject.job, dataset)
        return self._case

    def _ready(self, subject: Subject) -> _Case:
        case = self._open(subject)
        refused = refusals(case.findings)
        if refused:
            raise DataContractError(f"the data does not meet the job's contract:\n{told(refused)}")
        return case


_Key = tuple[bytes, "DataSet", tuple[int, int]]


@dataclass
class _Case:
    """One job on one state of one data set, and what was made of them."""

    key: _Key
    job: Job
    task: Task
    table: pd.DataFrame
    findings: tuple[Finding, ...]
    _tensors: tuple[bytes, tuple[torch.Tensor, ...]] | None = None

    @classmethod
    def read(cls, key: _Key, text: str, dataset: DataSet) -> _Case:
        job = job_file.parse(text)
        file: TaskFile = plugins.load("tasks", job.task.kind)
        task = file.make(job)
        table = readers.read(dataset)
        return cls(key, job, task, table, contract.check(table, job.data, task))

    @cached_property
    def parts(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Training and test rows."""
        return self.task.split(self.table)

    @cached_property
    def facts(self) -> Table | None:
        """What secure aggregation must know of the table; None where the job has none."""
        if self.job.privacy.secure_aggregation == "plain":
            return None
        training, testing = self.parts
        return Table(tables.version(self.table).hex(), len(training), len(testing), self._rarest(training))

    def _rarest(self, training: pd.DataFrame) -> int | None:
        match self.task.loss:
            case Loss.SQUARED:
                return None
            case Loss.LOGISTIC:
                classes = 2
            case Loss.CROSS_ENTROPY:
                classes = self.task.outputs
            case _:
                assert_never(self.task.loss)
        return int(np.bincount(self.task.labels(training), minlength=classes).min())

    @cached_property
    def plan(self) -> DevicePlan:
        """Where and how precisely to compute."""
        from client.training import device

        return device.plan(self.job.training.precision)

    @cached_property
    def module(self) -> torch.nn.Module:
        """The job's model, on the plan's device; its weights are those of the last request."""
        from tasks.models import model

        built = model.build(self.job.model, self.task.features, self.task.outputs, self.job.training.seed)
        return built.to(self.plan.device)

    def tensors(self, preparation: Path) -> tuple[torch.Tensor, ...]:
        """Training inputs, training labels, test inputs, test labels, on the plan's device."""
        import torch

        content = _read(preparation)
        digest = hashlib.sha256(content).digest()
        if self._tensors is None or self._tensors[0] != digest:
            arrays = [
                array
                for part in self.parts
                for examples in [self.task.examples(part, content)]
                for array in (examples.inputs, examples.labels)
            ]
            self._tensors = (digest, tuple(torch.from_numpy(array).to(self.plan.device) for array in arrays))
        return self._tensors[1]


def _train(case: _Case, request: Train) -> Done:
    from client.training import loop
    from tasks.models import model

    _threads(request.threads)
    layout, start = from_safetensors(_read(Path(request.model)))
    inputs, labels, _, _ = case.tensors(Path(request.preparation))
    model.load_state(case.module, layout, start)
    noised = case.job.privacy.churn == "dp"  # then nothing fails because of records: what is not finite counts as zero
    loss: float | None = None
    try:
        loss = loop.train(
            case.module,
            inputs,
            labels,
            case.task.loss,
            case.job.training,
            proximal=request.proximal,
            seed=loop.row_seed(case.job.training.seed, request.round_number, request.site),
            plan=case.plan,
        )
    except DataContractError as failed:
        if not noised:
            raise
        _log.warning("its update counts as what training left of it, or as zero: %s", failed)
    with np.errstate(invalid="ignore", over="ignore"):  # told below, or counted as zero
        update = model.state_vector(case.module)[1] - start
    if not noised and not np.isfinite(update).all():
        raise DataContractError(
            "the update is not finite: training diverged on this site's rows",
            fix="ask the job's author for a smaller learning_rate, or for standardised inputs",
        )
    return _write(request.output, update.astype("<f4"), len(inputs), _report(case, len(inputs), loss))


def _evaluate(case: _Case, request: Evaluate) -> Done:
    from client.training import loop
    from tasks.models import model

    _threads(request.threads)
    layout, flat = from_safetensors(_read(Path(request.model)))
    _, _, inputs, labels = case.tensors(Path(request.preparation))
    model.load_state(case.module, layout, flat)
    words = case.task.evaluate(loop.infer(case.module, inputs), labels.numpy(force=True))
    return _write(request.output, words, len(inputs), _report(case, len(inputs), None))


def _report(case: _Case, rows: int, loss: float | None) -> Report:
    return Report(case.plan.device, case.plan.precision, case.plan.reason, rows, loss)


def _threads(count: int) -> None:
    import torch

    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as refused:
        raise StorageError(f"cannot read {path}: {refused.strerror}", fix="check the site's folder") from refused


def _write(output: str, values: npt.NDArray[np.floating], rows: int, report: Report) -> Done:
    """The values lie at `output` as little-endian bytes; making them durable is left to whoever sends them."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    try:
        little.tofile(output)
    except OSError as refused:
        Path(output).unlink(missing_ok=True)
        raise StorageError(f"cannot write {output}: {refused.strerror}", fix="free disk space") from refused
    return Done(length=values.size, weight=float(rows), report=report)


def _foreign(bug: Exception) -> Failed:
    """An error of a library, by its kind alone; torch tells of exhausted memory in an error of its own."""
    name = type(bug).__name__
    if name == "OutOfMemoryError" or (isinstance(bug, RuntimeError) and "allocate memory" in str(bug)):
        return Failed(
            "resources", "the trainer ran out of memory: train on a machine with more, or with smaller batches"
        )
    return Failed("internal", f"the trainer met an unexpected {name}; its log has the details")
