"""The trainer's process: reads requests from standard input, answers on standard output, ends when the input closes."""

import contextlib
import os
import sys

from client.training import protocol
from client.training.protocol import Answer, Failed
from client.training.worker import Worker
from federation.errors import LocalProtocolError


def main() -> None:
    """Answers one line for each line read; whatever else is printed goes to standard error."""
    with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # libraries that print, in Python or in C, must not break the protocol
        worker = Worker()
        for line in sys.stdin.buffer:
            answers.write(protocol.encode(_answer(worker, line)))
            answers.flush()


def _answer(worker: Worker, line: bytes) -> Answer:
    try:
        request = protocol.decode_request(line)
    except LocalProtocolError as broken:
        return Failed("internal", str(broken))
    return worker.answer(request)


if __name__ == "__main__":
    main()
