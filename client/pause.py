"""Whether a site is paused: a file in its home, which its administrator's commands write and its agent looks for."""

import time
from pathlib import Path

from federation import files
from federation.errors import StorageError, WhoActs

__all__ = ["pause", "paused", "resume"]

_FILE = "paused"


def pause(folder: Path) -> bool:
    """Pauses the site whose home is `folder`, durably, also through restarts; False when it was paused already.

    Raises:
        StorageError: The folder does not take the file.
    """
    if paused(folder):
        return False
    files.write(folder / _FILE, f"{time.time():.0f}\n".encode())
    return True


def resume(folder: Path) -> bool:
    """Lets the site go on; False when it was not paused.

    Raises:
        StorageError: The file that pauses it cannot be removed.
    """
    try:
        (folder / _FILE).unlink()
    except FileNotFoundError:
        return False
    except OSError as refused:
        fix = f"remove {folder / _FILE} as its owner"
        raise StorageError(f"the site stays paused: {refused}", fix=fix, who=WhoActs.SITE) from refused
    return True


def paused(folder: Path) -> bool:
    """Whether the site is paused."""
    return (folder / _FILE).exists()
