"""How a benchmark ends that was interrupted or refused: in words, and with an exit status that scripts tell apart."""

from federation.errors import ConfigurationError, ParleyError
from simulations.peers.trial import progress

__all__ = ["unmeasured"]

_INTERRUPTED = 130
"""As a shell says of a program that Ctrl-C ended."""
_ASKED_WRONGLY = 2
_FAILED = 1


def unmeasured(ended: KeyboardInterrupt | ParleyError, *, processes: bool = False) -> int:
    """Says on standard error why there are no figures, and returns the exit status.

    Args:
        ended: What ended the benchmark.
        processes: Whether it starts processes of its own, of which an interrupted one says that they have ended.
    """
    match ended:
        case ParleyError():
            progress(f"refused: {ended}")
            return _ASKED_WRONGLY if isinstance(ended, ConfigurationError) else _FAILED
        case KeyboardInterrupt():
            progress(f"interrupted{'; all processes have ended' if processes else ''}")
            return _INTERRUPTED
