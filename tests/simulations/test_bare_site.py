import asyncio
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from client.training import protocol
from client.training.protocol import Subject
from federation import job, plugins
from federation.messages import Role
from privacy.identity import Root
from simulations.bare_site import Membership, PreparedWork, prepare


@pytest.fixture
def subject() -> Subject:
    """The tabular task's example job."""
    text, _ = plugins.load("tasks", "tabular").example(np.random.default_rng(0))
    return Subject(text, "patients", "nowhere")


def _ask(work: PreparedWork, request: protocol.Request) -> protocol.Answer:
    return asyncio.run(work.ask(request))


def test_every_round_sends_the_prepared_vector_under_its_own_name(tmp_path: Path, subject: Subject) -> None:
    """An update is the prepared vector with the round's number in front: no payload is ever held already."""
    work = PreparedWork(np.array([0.0, 0.5, -0.5], dtype=np.float32))
    outputs = tmp_path / "first", tmp_path / "second"

    answers = [
        _ask(work, protocol.Train(subject, "north", number, "model", "preparation", str(output)))
        for number, output in enumerate(outputs, 1)
    ]

    assert [(each.length, each.weight) for each in answers if isinstance(each, protocol.Done)] == [(3, 100.0)] * 2
    assert [np.fromfile(output, dtype="<f4").tolist() for output in outputs] == [[1.0, 0.5, -0.5], [2.0, 0.5, -0.5]]


def test_a_prepared_vector_is_mapped_and_its_file_stays_as_it_is(tmp_path: Path, subject: Subject) -> None:
    """The same values each time, over a block's end as well; a site that sends them leaves the file to the others."""
    path, output = tmp_path / "update.npy", tmp_path / "sent"
    prepare(path, 70_000)
    before = np.load(path)

    work = PreparedWork(np.load(path, mmap_mode="c"))
    _ask(work, protocol.Train(subject, "north", 7, "model", "preparation", str(output)))

    prepare(tmp_path / "again.npy", 70_000)
    sent = np.fromfile(output, dtype="<f4")
    assert (before.dtype, before.shape, bool(np.isfinite(before).all())) == (np.float32, (70_000,), True)
    assert (sent[0], np.array_equal(sent[1:], before[1:])) == (7.0, True)
    assert np.array_equal(np.load(path), before)
    assert path.read_bytes() == (tmp_path / "again.npy").read_bytes()


def test_an_evaluation_is_one_that_the_task_can_read(tmp_path: Path, subject: Subject) -> None:
    """What is sent for an evaluation step has the task's length, and metrics of a hundred rows come of it."""
    output = tmp_path / "evaluation"

    answer = _ask(PreparedWork(np.zeros(3, np.float32)), protocol.Evaluate(subject, "model", "prep", str(output)))

    task = plugins.load("tasks", "tabular").make(job.parse(subject.job))
    words = np.fromfile(output, dtype="<f8")
    assert isinstance(answer, protocol.Done)
    assert (answer.length, words.size) == (task.evaluation_size, task.evaluation_size)
    assert task.metrics(words)["n"] == 100


def test_a_bare_site_has_no_rows_for_statistics(tmp_path: Path, subject: Subject) -> None:
    """A statistics step is declined for want of data, and nothing is written."""
    answer = _ask(PreparedWork(np.zeros(3, np.float32)), protocol.ComputeStatistics(subject, str(tmp_path / "sums")))

    assert answer == protocol.Failed("data", "a bare site has no rows: give the job a task without statistics")
    assert list(tmp_path.iterdir()) == []


def test_a_membership_comes_back_from_its_file(tmp_path: Path) -> None:
    """What a bare site reads is what was signed for it, and nobody else may read the file, which holds a key."""
    now = int(time.time())
    root = Root.create("rounds", now)
    signed = Membership.sign(
        root, root.sign_revocations(0, now, ()), "north", Role.SITE, address="127.0.0.1:1", coordinator="hub", now=now
    )

    signed.store(tmp_path)
    read = Membership.load(tmp_path)

    assert read.line == signed.line
    assert (read.me.statement, read.me.revocations) == (signed.me.statement, signed.me.revocations)
    assert read.me.root.pem == root.certificate_pem
    assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [0o600]


def test_a_bare_site_never_imports_torch_or_pandas() -> None:
    """It costs what the agent's session and I/O cost, and no more."""
    code = "import sys, simulations.bare_site; print(sorted({'torch', 'pandas', 'scipy'} & sys.modules.keys()))"

    printed = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"
