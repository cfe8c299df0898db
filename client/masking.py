"""What a site contributes under RosterSum, on its way out: results found finite, and the masked payloads made of them.

```
trainer --> result(update) --> prepare --> mask, once for each attempt --> payloads --> the coordinator
                 |                |                                           |
                 `---- erase -----'                                        abandon
```
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Literal, assert_never

import numpy as np
import numpy.typing as npt

from federation.blobs import BlobRef, BlobStore
from federation.errors import ConfigurationError, LocalProtocolError, StorageError, WhoActs
from privacy.crypto.masks import Masks, Words
from privacy.secure_aggregation.rostersum import noised
from privacy.secure_aggregation.rostersum.encoding import (
    GUARD,
    DeclineError,
    FieldsCodec,
    Prepared,
    TrainCodec,
    codec_of,
)
from privacy.secure_aggregation.rostersum.fields import pack
from privacy.secure_aggregation.rostersum.noised import NoisedUpdate
from privacy.secure_aggregation.rostersum.site_events import Mask
from privacy.secure_aggregation.rostersum.terms import DpCodec, Plan

__all__ = ["Contribution", "Contributions", "prepare"]

log = logging.getLogger("parley.site")

_ROUNDING = 32
"""Bytes of the key of an attempt's stochastic rounding."""
_NAME = re.compile(r"[0-9a-z][0-9a-z-]{0,99}")
_RESULT = ".result"


Contribution = Prepared | NoisedUpdate
"""A result that can be encoded for each attempt: exactly, or with noise."""


def prepare(result: Path, plan: Plan, *, rows: int, declared: int) -> Contribution:
    """The trainer's result, looked through once; it stays in its file, which must not change.

    With noise everything is contributed, whatever it holds; else it was found finite.

    Args:
        result: Little-endian float32 for an update, float64 for totals, in the order of the plan's codec.
        plan: What it is a result of.
        rows: Records behind it, for plans whose weighting is "records".
        declared: The site's public weight, for plans whose weighting is "declared".

    Raises:
        DeclineError: A value is NaN or infinite: nothing else makes a site decline because of its data.
        ConfigurationError: The plan promises noise of a kind that this release cannot make.
        LocalProtocolError: The file has not the plan's length.
        StorageError: It cannot be read.
    """
    if plan.dp is not None:
        return _prepare_noised(result, plan)
    codec = codec_of(pack(plan.codec))
    match codec:
        case TrainCodec(weighting=weighting):
            number = {"uniform": codec.w_max, "declared": declared, "records": rows}[weighting]
            return codec.prepare(_mapped(result, "<f4", plan.words - 1 - GUARD), number)
        case FieldsCodec(fields):
            ends = np.cumsum([each.width for each in fields])
            values = np.split(_mapped(result, "<f8", plan.words - GUARD), ends[:-1])
            return codec.prepare({each.name: part for each, part in zip(fields, values, strict=True)})
        case _:
            assert_never(codec)


def _prepare_noised(result: Path, plan: Plan) -> NoisedUpdate:
    """The update, of any length that pads to the plan's."""
    if not isinstance(plan.codec, DpCodec):
        raise ConfigurationError(
            f"plan {plan.plan_id} promises noise that this release cannot make: nothing was contributed",
            fix='choose level "site", or install a release that offers this one',
        )
    size, rest = divmod(_length(result), np.dtype("<f4").itemsize)
    if rest or size > plan.codec.dimension:
        raise _misfit(_length(result), f"at most {plan.codec.dimension} values")
    return noised.prepare(plan, _mapped(result, "<f4", size))


def _blocks(held: Contribution, work: Mask) -> Iterator[Words]:
    """What is sent in one attempt, before its masks: encoded afresh, with noise for so many members."""
    if isinstance(held, NoisedUpdate):
        return held.encode(work.ctx, work.members, work.c_max)
    return held.encode(work.plan.ring, os.urandom(_ROUNDING))


@dataclass(eq=False, slots=True)
class _Update:
    """A result that is held; `erased` stops whoever is reading it, and it is never read after `erase` returned."""

    plan: Plan
    prepared: Contribution | None
    erased: bool = False
    reading: Lock = field(default_factory=Lock)

    def erase(self) -> None:
        self.erased = True
        with self.reading:
            self.prepared = None


@dataclass(eq=False, slots=True)
class _Attempt:
    """An attempt whose keys were used, or will never be."""

    abandoned: bool = False
    payload: BlobRef | None = None


class Contributions:
    """The results that a site holds, and the masked payloads made of them; of neither anything outlives its process.

    A file that is erased is unlinked, not written over: what the disk keeps of it is for its encryption to hide. Masked
    payloads look uniform to whoever has not their keys, which are never in a file.

    One thread of the site may mask while another prepares, erases and abandons.

    Args:
        folder: Theirs alone, on a local disk or in memory. What an ended process left there is gone: no update serves a
            later one. Only the process that holds the site's vault may do this.

    Raises:
        StorageError: The folder cannot be made or emptied.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _disk(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        self.payloads = BlobStore(folder / "payloads", durable=False)  # after a crash no attempt goes on
        with _disk(folder):
            for file in (*folder.glob(f"*{_RESULT}"), *self.payloads.folder.iterdir()):
                file.unlink()
        self._updates: dict[str, _Update] = {}
        self._attempts: dict[bytes, _Attempt] = {}
        self._change = Lock()

    def result(self, update: str) -> Path:
        """Where the trainer writes the result of this name: lower-case letters, digits and hyphens."""
        if _NAME.fullmatch(update) is None:
            raise LocalProtocolError(f"{update!r} cannot name an update: 1 to 100 of [0-9a-z-] can")
        return self._folder / f"{update}{_RESULT}"

    def prepare(self, update: str, plan: Plan, *, rows: int, declared: int) -> None:
        """Holds the result of this name until `erase`, once `prepare` has found it finite; else it is erased.

        What encoding will cut off, and that a value was not finite, goes to this site's log and nowhere else.

        Raises:
            ParleyError: As `prepare` does.
        """
        try:
            prepared = prepare(self.result(update), plan, rows=rows, declared=declared)
        except DeclineError as declined:
            log.warning("update %s is not sent, and its round declined: %s", update, declined.problem)
            self.erase(update)
            raise
        except BaseException:
            self.erase(update)
            raise
        for cut in prepared.clipped:
            log.warning("update %s is cut down before it is sent: %s", update, cut)
        self._updates[update] = _Update(plan, prepared)

    def mask(self, work: Mask) -> BlobRef | None:
        """The masked vector of an attempt, in `payloads`: its digest is the upload's y_hash. None if it was abandoned.

        The update is encoded afresh and masked a block at a time on its one way to the disk; with noise it is first
        rotated whole.

        Raises:
            LocalProtocolError: These keys were used before, or there is no such update of this plan: a bug of ours.
            StorageError: The disk does not take it; nothing of it is left, and these keys are spent.
        """
        with self._change:
            known = self._attempts.get(work.ctx)
            if known is not None and not known.abandoned:
                raise LocalProtocolError("an attempt's keys were to mask a second vector: the two would differ openly")
            if known is not None:
                return None
            attempt = self._attempts[work.ctx] = _Attempt()
        update = self._updates.get(work.update)
        if update is None or update.plan != work.plan:
            raise LocalProtocolError(f"there is no update {work.update!r} of plan {work.plan.plan_id} to mask")
        with update.reading:
            payload = self._masked(work, update, attempt)
        with self._change:
            if payload is not None and not attempt.abandoned:
                attempt.payload = payload
                return payload
        if payload is not None:
            self.payloads.drop(payload)
        return None

    def _masked(self, work: Mask, update: _Update, attempt: _Attempt) -> BlobRef | None:
        if update.prepared is None:
            return None
        masks = Masks(work.plan.ring, work.masks)
        start = 0
        with self.payloads.draft() as draft:
            for block in _blocks(update.prepared, work):
                if attempt.abandoned or update.erased:
                    return None
                masks.add(block, start)
                draft.write(block.data.cast("B"))
                start += block.size
            return draft.keep()

    def abandon(self, ctx: bytes) -> None:
        """The masked vector of this attempt is gone, or will never be; masking it ends within a block."""
        with self._change:
            attempt = self._attempts.setdefault(ctx, _Attempt())
            attempt.abandoned = True
            payload, attempt.payload = attempt.payload, None
        if payload is not None:
            with _disk(self._folder):
                self.payloads.drop(payload)

    def erase(self, update: str) -> None:
        """The result of this name is gone, from memory and disk, if it was here; masking it ends within a block."""
        held = self._updates.pop(update, None)
        if held is not None:
            held.erase()
        with _disk(self._folder):
            self.result(update).unlink(missing_ok=True)


def _mapped(file: Path, kind: Literal["<f4", "<f8"], size: int) -> npt.NDArray[np.floating]:
    """The file's values as read-only memory that the system pages in and out."""
    expected, found = size * np.dtype(kind).itemsize, _length(file)
    if found != expected or not found:
        raise _misfit(found, f"{expected}")
    with _readable(file):
        return np.memmap(file, kind, "r")


def _length(file: Path) -> int:
    with _readable(file):
        return file.stat().st_size


def _misfit(found: int, expected: str) -> LocalProtocolError:
    return LocalProtocolError(f"a result has {found} bytes where its plan has {expected}: it is not contributed")


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as refused:
        raise StorageError(
            f"cannot read {file}: {refused.strerror}", fix="give this user the right to read", who=WhoActs.SITE
        ) from refused


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as refused:
        raise StorageError(
            f"cannot make, empty or change {folder}: {refused.strerror}; updates may be left in it",
            fix="give this user the right to write there, and remove what lies in it",
            who=WhoActs.SITE,
        ) from refused
