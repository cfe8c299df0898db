"""Performs a RosterSum sum: adds the uploads in a file, subtracts the self masks, checks and decodes what is left."""

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, assert_never

import numpy as np
import numpy.typing as npt

from coordinator.parallel import in_parts
from federation.errors import StorageError, WhoActs
from federation.vector import BLOCK, F64, spans
from privacy.crypto.masks import dtype
from privacy.secure_aggregation.interface import Source
from privacy.secure_aggregation.rostersum import noised
from privacy.secure_aggregation.rostersum.coordinator_events import Broken, Sum, Summed, Term
from privacy.secure_aggregation.rostersum.encoding import BurnedError, FieldsCodec, TrainCodec, TrainSum, codec_of
from privacy.secure_aggregation.rostersum.fields import pack
from privacy.secure_aggregation.rostersum.noised import NoisedSum
from privacy.secure_aggregation.rostersum.sums import MaskedSum
from privacy.secure_aggregation.rostersum.terms import DpCodec, Plan

__all__ = ["SummedTotals", "SummedUpdates", "perform"]

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class SummedUpdates:
    """The opened sum of a train plan, all its checks held; read as `privacy.secure_aggregation.interface.Sum` is.

    Its words lie in a file without a name, which is gone with this value.

    Attributes:
        event: What the machine is told: it names the sum by its hash.
        decoded: The sum.
    """

    event: Summed
    decoded: TrainSum | NoisedSum

    def of(self, size: int) -> "SummedUpdates":
        """The same sum for a model of `size` values: without what updates with noise were padded with.

        Raises:
            LocalProtocolError: Such updates are padded to another size.
        """
        return replace(self, decoded=self.decoded.first(size)) if isinstance(self.decoded, NoisedSum) else self

    @property
    def size(self) -> int:
        """Values of the mean."""
        return self.decoded.values.size

    @property
    def weight(self) -> float:
        """The members' total weight, as they rounded it; with noise each member counts as 1."""
        return self.decoded.weight

    def mean(self, block: int = BLOCK, start: int = 0, stop: int | None = None) -> Iterator[F64]:
        """The weighted mean of the updates from `start` to `stop`, in blocks of `block` values but for the last."""
        return self.decoded.mean(block, start, stop)

    def total(self) -> F64:
        """The weighted sum [size], whole in memory."""
        return np.concatenate([*self.mean()]) * self.weight


@dataclass(frozen=True, slots=True)
class SummedTotals:
    """The opened sum of a plan of statistics or evaluation, all its checks held; read as `SummedUpdates` is.

    Attributes:
        event: What the machine is told: it names the sum by its hash.
        values: The pooled totals [size], fields in the codec's order.
        members: How many sites are in it.
    """

    event: Summed
    values: F64
    members: int

    @property
    def size(self) -> int:
        """Totals."""
        return self.values.size

    @property
    def weight(self) -> float:
        """Each member counts as 1."""
        return float(self.members)

    def mean(self, block: int = BLOCK, start: int = 0, stop: int | None = None) -> Iterator[F64]:
        """The totals of an average site from `start` to `stop`, in blocks of `block` values but for the last."""
        for first, last in spans(block, start, self.size if stop is None else stop):
            yield self.values[first:last] / self.members

    def total(self) -> F64:
        """The pooled totals [size]."""
        return self.values


def perform(
    work: Sum,
    plan: Plan,
    source: Callable[[Term], AbstractContextManager[Source]],
    folder: Path,
    *,
    checked: bool = False,
) -> SummedUpdates | SummedTotals | Broken:
    """The opened sum of exactly the members of `work`, or why it is broken, for the machine to burn.

    In memory there is a block of words at a time, however many sites and words there are; the accumulator is a file
    without a name in `folder`, as large as one upload. It holds a sum of masked vectors, then the sum. A sum with noise
    is rotated back in another such file, twice as large.

    Args:
        work: What the machine asks for.
        plan: The plan that it names.
        source: Opens the stored upload of a member.
        folder: Where there is room for one more upload.
        checked: Whether this process checked each upload's digest when it came in; else it is checked now.

    Raises:
        StorageError: An upload cannot be read now, or the folder takes no file: the same sum can be made again.
        LocalProtocolError: A member is in it twice: a bug of ours.
        ConfigurationError: The plan has a codec that this release cannot decode.
    """
    codec = plan.codec if isinstance(plan.codec, DpCodec) else codec_of(pack(plan.codec))
    total = MaskedSum(_accumulator(folder, plan.words, dtype(plan.ring)), in_parts)
    for term in work.terms:
        with source(term) as read:
            try:
                total.add(term.idx, None if checked else term.payload.digest, read)
            except StorageError as refused:
                if _digest(read, plan.size) == term.payload.digest:
                    raise  # a disk that errs now and then
                return Broken(work.ctx, refused.problem)
    event = Summed(work.ctx, total.unmask((term.idx, term.self_key) for term in work.terms))
    members = len(work.terms)
    try:
        match codec:
            case TrainCodec():
                return SummedUpdates(event, codec.decode(total.words(), members))
            case DpCodec(dimension):
                room = _accumulator(folder, dimension, np.dtype(np.float64))
                return SummedUpdates(event, noised.decode(plan, total.words(), members, work.ctx, room))
            case FieldsCodec(fields):
                pooled = codec.decode(total.words(), members)
                return SummedTotals(event, np.concatenate([pooled[each.name] for each in fields]), members)
            case _:
                assert_never(codec)
    except BurnedError as burned:
        return Broken(work.ctx, burned.problem)


def _accumulator(folder: Path, length: int, kind: np.dtype[T]) -> npt.NDArray[T]:
    """Zeros in a file that ends with them; its room is taken now, since a full disk kills who writes to a map."""
    size = length * kind.itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            for start in range(0, size, BLOCK):
                file.write(bytes(min(BLOCK, size - start)))
            file.flush()
            return np.memmap(file, kind, "r+", shape=(length,))
    except OSError as refused:
        raise StorageError(
            f"cannot write a sum of {size} bytes to {folder}: {refused.strerror}",
            fix="free disk space, or make the folder writable",
            who=WhoActs.COORDINATOR,
        ) from refused


def _digest(source: Source, size: int) -> bytes:
    """SHA-256 of an upload, one byte past its end included.

    Raises:
        StorageError: It cannot be read.
    """
    seen = hashlib.sha256()
    for start in range(0, size + 1, BLOCK):
        seen.update(source(start, min(BLOCK, size + 1 - start)))
    return seen.digest()
