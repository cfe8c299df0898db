"""Which jobs that wait for a site's administrator may go on: files in its home, which its agent takes away as it heeds.

Under secure aggregation a job waits after rounds that this site opened in vain, or declined because of its data.
"""

import re
from collections.abc import Callable
from pathlib import Path

from federation import files
from federation.errors import ConfigurationError, WhoActs
from federation.job import NAME

__all__ = ["resume_job", "taken"]

_FOLDER = "resumed"
_DRAFT = ".new"
"""How a file ends that is being written; no job's id does."""


def resume_job(folder: Path, job: str) -> None:
    """Lets a job go on, once the agent of the site whose home is `folder` heeds it.

    Raises:
        ConfigurationError: No job can have this id.
        StorageError: The folder does not take the file.
    """
    if re.fullmatch(NAME, job) is None:
        raise ConfigurationError(
            f"{job[:70]!r} is no job's id", fix="give the id that the site's log names", who=WhoActs.YOU
        )
    files.write(folder / _FOLDER / job, b"")


def taken(folder: Path, known: Callable[[str], bool]) -> tuple[str, ...]:
    """The jobs that were let go on since the last call, of those that are `known`; others wait until they are."""
    written = (file for file in (folder / _FOLDER).glob("*") if not file.name.endswith(_DRAFT))
    found = sorted(file for file in written if known(file.name))
    for file in found:
        file.unlink(missing_ok=True)
    return tuple(file.name for file in found)
