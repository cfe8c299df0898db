"""A step's arithmetic: sums what the sites sent and makes of it a preparation, the next model, or metrics."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol, assert_never

from coordinator.events import Broken, Complete, Completion, Lengths, Measured, Prepared, Rejected, Stepped
from coordinator.memory import Memory
from federation import plugins
from federation.blobs import BlobStore
from federation.errors import ConfigurationError, LocalProtocolError, ParleyError, RemoteProtocolError
from federation.job import Job
from federation.messages import Metric, StepKind
from federation.vector import F64, Layout, from_safetensors, header
from privacy.secure_aggregation import interface
from strategies import strategy
from tasks.task import Better, Task

__all__ = ["Arithmetic", "Opened"]


class Opened(Protocol):
    """A step's sum, however it was made; read as `privacy.secure_aggregation.interface.Sum` is."""

    @property
    def size(self) -> int:
        """Values of the sum."""
        ...

    def mean(self) -> Iterator[F64]:
        """The weighted mean, in blocks, `size` values in all."""
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

    def complete(self, work: Complete, opened: Opened | None = None) -> Completion:
        """What the step comes to; everything it names is durable.

        Args:
            work: The step.
            opened: Its sum, where secure aggregation has made it; else it is made of the step's contributions.
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

    def _prepared(self, work: Complete, opened: Opened | None) -> Prepared:
        total = None
        if self._task.statistics_size:
            total = self._sum(work, opened, self._task.statistics_size, "<f8").total()
        return Prepared(self._blobs.put(self._task.prepare(total)))

    def _measured(self, work: Complete, opened: Opened | None) -> Measured:
        total = self._sum(work, opened, self._task.evaluation_size, "<f8").total()
        metrics = self._task.metrics(total)
        return Measured(tuple(Metric(name, float(value)) for name, value in metrics.items()))

    def _stepped(self, work: Complete, opened: Opened | None) -> Stepped:
        """The next model, made a block at a time: neither model, sum nor state is ever whole in memory."""
        total = self._sum(work, opened, self._layout.size, "<f4")
        _, model = from_safetensors(self._blobs.mapped(work.model))
        state = Memory.opened(self._blobs, work.strategy_state, self._strategy, self._layout.size)
        try:
            with self._blobs.draft() as draft:
                draft.write(header(self._layout))
                start = 0
                for mean in total.mean():
                    part = slice(start, start + mean.size)
                    moved, kept = self._strategy.step(model[part], mean, state.read(part))
                    draft.write(moved.astype("<f4", copy=False).tobytes())
                    state.write(part, kept)
                    start += mean.size
                following = draft.keep()
            return Stepped(following, state.kept())
        finally:
            state.close()

    def _sum(self, work: Complete, opened: Opened | None, size: int, words: interface.WordType) -> Opened:
        if self._aggregation == "plain":
            return self._summed(work, size, words)
        if opened is None:
            raise LocalProtocolError(f"step {work.step} is to be completed before its sum is open")
        if opened.size != size:
            raise LocalProtocolError(f"the sum of step {work.step} has {opened.size} values where {size} belong")
        return opened

    def _summed(self, work: Complete, size: int, words: interface.WordType) -> interface.Sum:
        """The sum of what lies in the spool; only updates are weighted."""
        total = interface.load(self._aggregation).open(size, words)
        problems: list[tuple[str, str]] = []
        for each in work.contributions:
            source = partial(self._spool(work.step, each.site).read, each.payload)
            weight = each.weight if work.kind is StepKind.TRAIN else 1.0
            try:
                total.add(each.site, weight, source)
            except RemoteProtocolError as refused:
                problems.append((each.site, refused.problem))
        if problems:
            raise _RejectedError(tuple(problems))
        return total


class _RejectedError(ParleyError):
    """Some contributions cannot be summed."""

    def __init__(self, problems: tuple[tuple[str, str], ...]) -> None:
        super().__init__("contributions were refused")
        self.problems = problems
