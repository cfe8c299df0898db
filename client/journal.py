"""What a site must not forget when it is killed: results that were not counted yet.

One small file per job, written whole before anything that it tells of leaves the site. It outlives a kill, and often a
power cut: what that damages is noticed, and done again, as with the result itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - pydantic and people read it

from client.session_events import Remembered, Worked
from federation import codec, files
from federation.blobs import BlobRef
from federation.errors import ParleyError
from federation.messages import JobOffer, StepStart

__all__ = ["Journal"]

log = logging.getLogger("parley.site")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A job as it stands in its file; messages as they travel, in hexadecimal."""

    offer: str
    step: str
    payload: str
    length: int
    weight: float
    seconds: float


class Journal:
    """A site's journal.

    Args:
        folder: Where its files lie; made at the first entry.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, remembered: Remembered) -> None:
        """Remembers a job's result; an earlier one of that job is forgotten.

        Raises:
            StorageError: The disk does not take it.
        """
        result = remembered.result
        entry = _Entry(
            codec.encode(remembered.offer).hex(),
            codec.encode(result.step).hex(),
            result.payload.hex,
            result.payload.length,
            result.weight,
            result.seconds,
        )
        files.write_json(self._path(remembered.offer.job), entry, durable=False)

    def forget(self, job: str) -> None:
        """The job is over."""
        self._path(job).unlink(missing_ok=True)
        files.draft_of(self._path(job)).unlink(missing_ok=True)  # of a kill in the middle of `keep`

    def remembered(self) -> tuple[Remembered, ...]:
        """Every result kept; a damaged file is told of and left aside: its step is asked again and done again."""
        found: list[Remembered] = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                found.append(_read(path))
            except (ParleyError, ValueError) as damaged:
                log.warning("%s cannot be read and is left aside: %s", path, damaged)
        return tuple(found)

    def _path(self, job: str) -> Path:
        return self._folder / f"{job}.json"


def _read(path: Path) -> Remembered:
    entry = files.read_json(_Entry, path, "it is made when a step is done")
    offer = codec.decode(JobOffer, bytes.fromhex(entry.offer))
    step = codec.decode(StepStart, bytes.fromhex(entry.step))
    payload = BlobRef(bytes.fromhex(entry.payload), entry.length)
    return Remembered(offer, Worked(step, payload, entry.weight, entry.seconds))
