import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from federation.errors import ParleyError
from simulations.peers.measure import AnonymousPeaks, Figures, Mark, Processes, figures, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc")

_STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""
"""Ignores the polite signal, and has a child that has left its session."""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """No processes yet."""
    with Processes(tmp_path) as started:
        yield started


def _gone(pid: int) -> bool:
    """Whether a process has ended, be it waited for or not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] in "ZX"


def test_the_first_round_does_not_count() -> None:
    """Wall time is the median between rounds' ends, and CPU time what was used between the first end and the last."""
    ends = (10.0, 12.0, 15.0, 17.0)
    marks = [Mark(0.0, 0.0, 0.0), Mark(8.0, 50.0, 100.0), Mark(12.0, 54.0, 108.0), Mark(17.0, 59.0, 118.0)]

    found = figures(ends, marks, values=3, peak=100.0)

    assert found == Figures(
        seconds_per_round=2.0,
        cpu_seconds=7 / 3,
        peak_rss_mb=100.0,
        slowest_round_seconds=3.0,
        others_load=1.0,
        rounds=3,
        values=3,
    )


def test_a_childs_work_counts_for_its_side(processes: Processes) -> None:
    """CPU time that a process's ended child has used is in the mark, and the process has a peak of memory."""
    work = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    code = f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {work!r}])\ntime.sleep(60)"
    before = processes.mark()

    processes.start("parent", sys.executable, "-c", code)
    until(lambda: processes.mark().cpu >= 0.2, processes, "the child's work", patience=20)

    assert before.cpu == 0.0
    assert processes.peak_mb("parent") > 1
    assert processes.peak_mb_of("no such program") == 0.0


_HILL = """
import mmap, pathlib, sys, time
hill = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE)
for start in range(0, len(hill), mmap.PAGESIZE):
    hill[start] = 1
time.sleep(0.3)
hill.close()
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""
"""Takes 64 MiB for a while, gives them back, and says so."""


def test_a_peak_of_anonymous_memory_is_seen_when_it_is_over(processes: Processes, tmp_path: Path) -> None:
    """64 MiB that were taken and given back are in the peak, and no longer in what the process has now."""
    given_back = tmp_path / "given back"
    processes.start("climber", sys.executable, "-c", _HILL, str(given_back))

    with AnonymousPeaks(processes, "climber") as peaks:
        until(given_back.exists, processes, "the hill's end", patience=20)

    assert peaks.mb("climber") > 64
    assert processes.anonymous_mb("climber") < 64
    assert processes.rss_mb("climber") >= processes.anonymous_mb("climber") > 0


def test_a_process_that_was_killed_may_be_started_again(processes: Processes) -> None:
    """It is not taken for one that ended by itself, and the next of its name counts its own CPU time."""
    spin = "import time\nwhile time.process_time() < 0.6: pass\ntime.sleep(60)"
    processes.start("victim", sys.executable, "-c", spin)
    until(lambda: processes.cpu_of("victim") >= 0.3, processes, "its work", patience=20)

    processes.kill("victim")
    processes.start("victim", sys.executable, "-c", "import time; time.sleep(60)")

    processes.check()
    assert processes.cpu_of("victim") < 0.3


def test_nothing_outlives_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted, it ends a process that ignores SIGTERM, and that one's child in another session."""
    monkeypatch.setattr("simulations.peers.measure._GRACE", 0.1)
    told = tmp_path / "child"

    def interrupted() -> None:
        with Processes(tmp_path) as processes:
            processes.start("stubborn", sys.executable, "-c", _STUBBORN, str(told))
            until(lambda: told.exists() and told.read_text() != "", processes, "the child", patience=20)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    child = int(told.read_text())
    limit = time.monotonic() + 20
    while not _gone(child) and time.monotonic() < limit:
        os.sched_yield()
    assert _gone(child)


def test_a_process_that_ends_too_early_is_told_with_its_last_words(processes: Processes) -> None:
    """Waiting ends at once, and the refusal has the status and the output of the process."""
    processes.start("hasty", sys.executable, "-c", "import sys; print('no such port'); sys.exit(3)")

    with pytest.raises(ParleyError, match="hasty ended with status 3") as refused:
        until(lambda: False, processes, "what never comes", patience=20)

    assert "no such port" in str(refused.value)


def test_patience_has_an_end(processes: Processes) -> None:
    """What does not come in time is named, with what the processes have said."""
    processes.start("idler", sys.executable, "-uc", "import time; print('still thinking'); time.sleep(60)")
    until(lambda: processes.tail("idler") != "", processes, "its first words", patience=20)

    with pytest.raises(ParleyError, match="waited 0 s for a miracle") as refused:
        until(lambda: False, processes, "a miracle", patience=0)

    assert refused.value.problem.endswith("--- idler\nstill thinking")


def test_a_killed_process_is_told_too(processes: Processes) -> None:
    """A signal is as good an end as any."""
    processes.start("victim", sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")

    with pytest.raises(ParleyError, match=f"victim ended with status -{int(signal.SIGKILL)}"):
        until(lambda: False, processes, "what never comes", patience=20)
