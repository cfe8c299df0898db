import os
import signal
import subprocess
import sys

import pytest

_TWICE = """
import threading
from tests.faults.killing import stand_still
def work():
    stand_still()
    stand_still()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system stops no threads")
def test_a_process_stands_still_each_time_it_is_to() -> None:
    """Two stops of one thread, one right after the other, are two: whoever looks at each finds each."""
    child = subprocess.Popen([sys.executable, "-c", _TWICE])
    stops = 0
    while True:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        stops += 1
        os.kill(child.pid, signal.SIGCONT)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert (child.returncode, stops) == (0, 2)
