"""The command `parley`."""

import os
import sys

from federation.errors import ParleyError, StorageError

__all__ = ["main"]


def main() -> None:
    """Runs the command line; every refusal is one clear message and an exit code, never a traceback."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own log lines repeat, in its words, what errors say
    try:
        from parley.command_line import app  # in here, so that Ctrl-C is as quiet while libraries load

        app()
    except ParleyError as refused:
        _refuse(refused)
    except OSError as refused:  # where no command told it better: a full disk, a folder that may not be written
        where = f" ({refused.filename})" if refused.filename else ""
        _refuse(StorageError(f"the system refused: {refused.strerror or refused}{where}", fix="see to that and repeat"))
    except KeyboardInterrupt:
        sys.exit(130)


def _refuse(error: ParleyError) -> None:
    from parley import terminal

    terminal.complain(error, as_json="--json" in sys.argv)
    sys.exit(terminal.exit_code(error))


if __name__ == "__main__":
    main()
