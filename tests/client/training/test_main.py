from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from client.training import protocol
from client.training.protocol import CheckData, Done, Failed, Warm

if TYPE_CHECKING:
    from tests.client.training.conftest import Site


def converse(*lines: bytes, before: str = "") -> tuple[list[protocol.Answer], str]:
    """The answers to `lines` and what stood on standard error, once the input has closed and the process ended."""
    program = f"{before}\nfrom client.training.__main__ import main\nmain()"
    run = subprocess.run([sys.executable, "-c", program], input=b"".join(lines), capture_output=True, check=True)
    return [protocol.decode_answer(line) for line in run.stdout.splitlines()], run.stderr.decode()


def test_each_line_is_answered_and_the_end_of_the_input_ends_the_process(site: Site) -> None:
    """A line that is no request is answered too; the next one is served."""
    answers, _ = converse(
        protocol.encode(CheckData(site.subject)), b"nonsense\n", protocol.encode(CheckData(site.subject))
    )
    assert [type(answer) for answer in answers] == [Done, Failed, Done]
    assert "a line that is no request" in str(answers[1])


def test_stray_prints_go_to_standard_error(site: Site) -> None:
    """Nothing but protocol lines is on standard output, whether Python or a library in C prints."""
    noise = """
import os
from client.data import readers
read = readers.read
def loud(dataset):
    print("loud python", flush=True)
    os.write(1, b"loud library")
    return read(dataset)
readers.read = loud
"""
    answers, errors = converse(protocol.encode(CheckData(site.subject)), before=noise)
    assert [type(answer) for answer in answers] == [Done]
    assert "loud python" in errors
    assert "loud library" in errors


def test_torch_is_loaded_by_the_first_request_that_needs_it(site: Site) -> None:
    """Checking data does not wait for torch; warming loads it."""
    tell = "import atexit, sys\natexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"
    assert converse(protocol.encode(CheckData(site.subject)), before=tell)[1].split()[-1] == "False"
    assert converse(protocol.encode(Warm()), before=tell)[1].split()[-1] == "True"
