"""No site's own numbers are in the coordinator's memory, files or mail under secure aggregation; plain, they are.

Real processes with mutual TLS; only the work is light, so that it is known. The coordinator stops itself at moments of
its work, and is looked through while it stands still.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from federation import plugins
from federation.job import parse
from federation.messages import JobState
from tests.faults.outside import PLAIN, SEALED, SITES, Founded, Study, found, job_text
from tests.integration.image import Traces, memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="this system shows no process's memory as a file"),
]

ROUNDS = 2
STORE, BLOBS = "coordinator.store:Store", "federation.blobs"
MOMENTS = {
    PLAIN: (
        f"after:{BLOBS}:Incoming.append 6",  # some chunks of the first updates
        f"after:{BLOBS}:Incoming.finish 6",
        "before:coordinator.arithmetic:Arithmetic.complete 2",
        "after:coordinator.arithmetic:Arithmetic.complete 2",
        f"after:{STORE}.commit_step 2",
    ),
    SEALED: (
        f"after:{STORE}.set_standing 9",  # all sites have trained, and are told whose updates are summed
        f"after:{BLOBS}:Incoming.append 6",  # some chunks of the first masked updates
        f"after:{STORE}.set_standing 10",  # all of them are here
        "before:coordinator.secure_sums:perform 2",  # all self masks are known
        "after:coordinator.secure_sums:perform 2",  # the sum is
        f"after:{STORE}.commit_step 2",
        f"after:{STORE}.commit_step 5",  # the last
    ),
}


@dataclass
class Image:
    """What was seen of a coordinator, moment by moment: the number of places that hold a site's own numbers."""

    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Where sites put copies of their results, for the test alone."""
    folder = tmp_path / "kept"
    folder.mkdir()
    return folder


@pytest.fixture
def founded(tmp_path: Path, kept: Path) -> Iterator[Founded]:
    """A consortium whose sites keep copies."""
    with found(tmp_path / "consortium", options=("--keep", str(kept))) as consortium:
        yield consortium


def plain_vectors(kept: Path) -> Iterator[bytes]:
    """Each site's updates and statistics, as it has them, and as whole numbers as they are before they are masked."""
    units = [field.frac for field in plugins.load("tasks", "tabular").make(parse(TEXT)).statistics_fields]
    for path in kept.glob("*.npy"):
        values = np.load(path)
        if "-train-" in path.name:
            yield values.astype("<f4").tobytes()
            yield np.round(values * 2.0**10).astype("<i4").tobytes()
        elif "-statistics-" in path.name:
            yield from (
                values.astype("<f8").tobytes(),
                np.round(values * 2.0 ** np.array(units)).astype("<i8").tobytes(),
            )


TEXT = job_text(ROUNDS, privacy=SEALED)


@pytest.mark.parametrize("privacy", [PLAIN, SEALED], ids=["plain", "rostersum"])
def test_a_coordinator_has_no_site_s_own_numbers_unless_the_job_is_plain(
    founded: Founded, tmp_path: Path, kept: Path, privacy: str
) -> None:
    """Memory, spool, masked vectors, store, log, and every message that came: plain, they are full of them."""
    study, mail = Study.of(founded, tmp_path), tmp_path / "mail"
    moments = MOMENTS[privacy]
    stops = [word for moment in moments for word in ("--stop-at", *moment.split())]
    study.coordinator.options = ("--record", str(mail), *stops)
    seen = Image()
    with study.serving():
        job = study.submit(job_text(ROUNDS, privacy=privacy))
        for moment in moments:
            study.until(lambda: stopped(study.coordinator.pid), moment)
            look(study, Traces(plain_vectors(kept)), seen)
            os.kill(study.coordinator.pid, signal.SIGCONT)
        study.exactly_once(job)
        look(study, Traces(plain_vectors(kept)), seen)
    traces = Traces(plain_vectors(kept))
    assert len(list(kept.glob("*-train-*"))) == ROUNDS * len(SITES)
    assert study.over(job)[0].state is JobState.FINISHED
    if privacy == PLAIN:
        assert max(seen.memory) > 0, seen
        assert max(seen.files) > 0, seen
        assert traces.count([mail.read_bytes()]) > 0
    else:
        assert (set(seen.memory), set(seen.files)) == ({0}, {0}), seen
        assert traces.count([mail.read_bytes()]) == 0


def stopped(pid: int) -> bool:
    """Whether the process stands still."""
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def look(study: Study, traces: Traces, seen: Image) -> None:
    """Looks through the coordinator's memory and all its files."""
    try:
        seen.memory.append(traces.count(memory(study.coordinator.pid)))
    except PermissionError:
        pytest.skip("this system lets nobody read another process's memory")
    files = [path for path in study.folder.rglob("*") if path.is_file()]
    seen.files.append(traces.count(path.read_bytes() for path in files))


@pytest.mark.parametrize("begin", range(9))
def test_sixteen_bytes_of_a_vector_are_found_wherever_they_begin(begin: int) -> None:
    """In any part of it and at any place; fifteen are not, nor are zeros."""
    draw = np.random.default_rng(0)
    vector, around = draw.bytes(400), draw.bytes(999)
    traces = Traces([vector, bytes(400)])
    for at in (0, 17, 300, 999):
        assert traces.count([around[:at] + vector[begin : begin + 16] + around[at:]]) == 1
        assert traces.count([around[:at] + vector[begin : begin + 15] + b"\0" + around[at:]]) == 0
    assert traces.count([vector[begin:], bytes(500), around, b"", vector[:7]]) == 1


def test_a_process_finds_in_its_own_memory_what_it_holds() -> None:
    """The search reaches the heap of a Python process, and hands on what lies there."""
    assert Traces([np.random.default_rng(1).bytes(64)]).count(memory(os.getpid())) > 0
