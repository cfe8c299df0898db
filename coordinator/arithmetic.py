"""A step's arithmetic: sums what the sites sent and makes of it a preparation, the next model, or metrics."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Protocol, assert_never

import numpy as np

from coordinator.events import Broken, Complete, Completion, Lengths, Measured, Prepared, Rejected, Stepped
from coordinator.memory import Memory
from coordinator.parallel import Settling, in_parts
from coordinator.secure_sums import SummedUpdates
from federation import plugins
from federation.blobs import BlobStore
from federation.errors import ConfigurationError, LocalProtocolError, ParleyError, RemoteProtocolError
from federation.job import Job
from federation.messages import Metric, StepKind
from federation.vector import BLOCK, F32, F64, Layout, from_safetensors, header, spans
from privacy.secure_aggregation import interface
from strategies import strategy
from strategies.strategy import GroupStrategy, State, SumStrategy
from tasks.task import Better, Task

__all__ = ["Arithmetic", "Opened"]

_PART = 8 * BLOCK
"""Values of the next model that one thread makes at a time: it gives way to the others seldom."""
_ABREAST = 32 * BLOCK
"""Values of all groups' means that a thread has in memory at a time: with more than 32 groups, blocks are shorter."""


class Opened(Protocol):
    """A sum, however it was made; read as `privacy.secure_aggregation.interface.Sum` is."""

    @property
    def size(self) -> int:
        """Values of the sum."""
        ...

    @property
    def weight(self) -> float:
        """Sum of the weights."""
        ...

    def mean(self, block: int = BLOCK, start: int = 0, stop: int | None = None) -> Iterator[F64]:
        """The weighted mean from value `start` to `stop` (the end), in blocks of `block` values but for the last.

        Several threads may each read a range.
        """
        ...

    def total(self) -> F64:
        """The weighted sum [size]."""
        ...


class Arithmetic:
    """The arithmetic of one job; pure but for the blob folders it reads and writes. Runs in a worker thread.

    Args:
        job: The job.
        layout: Names and shapes of its model.
        blobs: Where models, strategy states and preparations lie.
        spool: The folder of a site's uploads for a step.
    """

    def __init__(self, job: Job, layout: Layout, blobs: BlobStore, spool: Callable[[int, str], BlobStore]) -> None:
        task: Task = plugins.load("tasks", job.task.kind).make(job)
        self._task = task
        self._layout = layout
        self._blobs = blobs
        self._spool = spool
        self._strategy = strategy.load(job.strategy)
        self._aggregation = job.privacy.secure_aggregation

    @property
    def lengths(self) -> Lengths:
        """Bytes of each kind's contributions."""
        return Lengths(8 * self._task.statistics_size, 4 * self._layout.size, 8 * self._task.evaluation_size)

    @property
    def better(self) -> Mapping[str, Better]:
        """Of each metric of the task, whether higher or lower is better."""
        return self._task.better

    def complete(self, work: Complete, opened: Sequence[Opened] = ()) -> Completion:
        """What the step comes to; everything it names is durable.

        Args:
            work: The step.
            opened: Its sum, or those of its groups, where secure aggregation has made them; else they are made of the
                step's contributions.
        """
        try:
            match work.kind:
                case StepKind.STATISTICS:
                    return self._prepared(work, opened)
                case StepKind.TRAIN:
                    return self._stepped(work, opened)
                case StepKind.EVALUATE:
                    return self._measured(work, opened)
                case _:
                    assert_never(work.kind)
        except _RejectedError as rejected:
            return Rejected(rejected.problems)
        except (ConfigurationError, RemoteProtocolError) as broken:  # a sum that none of its sites can be blamed for
            return Broken(str(broken))

    def _prepared(self, work: Complete, opened: Sequence[Opened]) -> Prepared:
        total = None
        if self._task.statistics_size:
            with self._sums(work, opened, self._task.statistics_size, "<f8") as (one,):
                total = one.total()
        return Prepared(self._blobs.put(self._task.prepare(total)))

    def _measured(self, work: Complete, opened: Sequence[Opened]) -> Measured:
        with self._sums(work, opened, self._task.evaluation_size, "<f8") as (one,):
            metrics = self._task.metrics(one.total())
        return Measured(tuple(Metric(name, float(value)) for name, value in metrics.items()))

    def _stepped(self, work: Complete, opened: Sequence[Opened]) -> Stepped:
        """The next model, made a part at a time: neither model, sums nor state are ever whole in memory."""
        _, model = from_safetensors(self._blobs.mapped(work.model))
        state = Memory.opened(self._blobs, work.strategy_state, self._strategy, self._layout.size)
        try:
            with (
                self._sums(work, opened, self._layout.size, "<f4") as sums,
                self._blobs.draft() as draft,
                Settling(draft) as settling,
            ):
                moved = partial(self._moved, model, sums, state)
                settling.write(header(self._layout))
                for made in in_parts(self._layout.size, _PART, moved):
                    settling.write(made.data.cast("B"))
                following = settling.keep()
            return Stepped(following, state.kept())
        finally:
            state.close()

    def _moved(self, model: F32, sums: Sequence[Opened], state: Memory, part: slice) -> F32:
        """This part of the next model, little endian, its state kept; several threads may each make a part."""
        weights = [each.weight for each in sums]
        block = max(1, min(BLOCK, _ABREAST // len(sums)))
        means = zip(*(each.mean(block, part.start, part.stop) for each in sums), strict=True)
        moved: F32 = np.empty(part.stop - part.start, "<f4")
        for (first, last), abreast in zip(spans(block, part.start, part.stop), means, strict=True):
            here = slice(first, last)
            values, kept = self._step(model[here], abreast, weights, state.read(here))
            state.write(here, kept)
            moved[first - part.start : last - part.start] = values
        return moved

    def _step(self, model: F32, means: Sequence[F64], weights: Sequence[float], state: State) -> tuple[F32, State]:
        """The strategy's step: over the groups' means, or over that of all, into which they add up."""
        match self._strategy:
            case SumStrategy():
                mean = means[0] if len(means) == 1 else np.average(means, axis=0, weights=weights)
                return self._strategy.step(model, mean, state)
            case GroupStrategy():
                return self._strategy.step_groups(model, np.stack(means), state)
            case _:
                assert_never(self._strategy)

    @contextmanager
    def _sums(
        self, work: Complete, opened: Sequence[Opened], size: int, words: interface.WordType
    ) -> Iterator[Sequence[Opened]]:
        """The step's sums, at least one: several only of updates. They are read in this block alone."""
        if self._aggregation == "plain":
            with ExitStack() as files:
                yield self._summed(work, size, words, files)
            return
        if not opened:
            raise LocalProtocolError(f"step {work.step} is to be completed before its sum is open")
        sums = tuple(each.of(size) if isinstance(each, SummedUpdates) else each for each in opened)
        for each in sums:
            if each.size != size:
                raise LocalProtocolError(f"a sum of step {work.step} has {each.size} values where {size} belong")
        yield sums

    def _summed(self, work: Complete, size: int, words: interface.WordType, files: ExitStack) -> Sequence[Opened]:
        """One sum of what lies in the spool, or one of each site where each is a group; only updates are weighted."""
        train = work.kind is StepKind.TRAIN
        apart = train and isinstance(self._strategy, GroupStrategy)
        protocol = interface.load(self._aggregation)
        sums: list[interface.Sum] = []
        problems: list[tuple[str, str]] = []
        for each in work.contributions:
            source = files.enter_context(self._spool(work.step, each.site).reader(each.payload))
            if apart or not sums:
                sums.append(protocol.open(size, words))
            try:
                sums[-1].add(each.site, each.weight if train else 1.0, source)
            except RemoteProtocolError as refused:
                problems.append((each.site, refused.problem))
        if problems:
            raise _RejectedError(tuple(problems))
        if not sums:
            raise LocalProtocolError(f"step {work.step} is to be completed without a contribution")
        return sums


class _RejectedError(ParleyError):
    """Some contributions cannot be summed."""

    def __init__(self, problems: tuple[tuple[str, str], ...]) -> None:
        super().__init__("contributions were refused")
        self.problems = problems
