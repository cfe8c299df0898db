"""A step's arithmetic: sums become a preparation, the next model and metrics; what cannot be summed is said of whom."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from coordinator.arithmetic import Arithmetic
from coordinator.events import Broken, Complete, Lengths, Measured, Prepared, Rejected, Stepped
from coordinator.round import Contributed
from federation.blobs import BlobRef, BlobStore
from federation.errors import LocalProtocolError, StorageError
from federation.job import parse
from federation.messages import StepKind
from federation.vector import Layout, TensorSpec, from_safetensors, to_safetensors
from privacy.secure_aggregation import plain
from tests.consortium import LAYOUT, initial_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt


@dataclass(frozen=True)
class Desk:
    """One job's arithmetic with its folders."""

    arithmetic: Arithmetic
    folder: Path
    model: BlobRef

    @property
    def blobs(self) -> BlobStore:
        """The job's payloads."""
        return BlobStore(self.folder / "job")

    def spool(self, site: str) -> BlobStore:
        """A site's uploads."""
        return BlobStore(self.folder / "spool" / site)

    def sent(self, site: str, values: npt.NDArray[np.generic], weight: float = 1.0) -> Contributed:
        """A contribution that lies in the spool."""
        return Contributed(site, self.spool(site).put(values.tobytes()), weight, 0.1)

    def work(self, kind: StepKind, *contributions: Contributed, state: BlobRef | None = None) -> Complete:
        """What the run asks for."""
        return Complete(1, 0, kind, contributions, self.model, state)


@pytest.fixture
def desk(tmp_path: Path, job_text: Callable[..., str]) -> Callable[..., Desk]:
    """Makes a desk for a job; `changes` are replaced in its text."""

    def make(**changes: str) -> Desk:
        text = job_text()
        for old, new in changes.values():
            assert old in text
            text = text.replace(old, new)
        blobs = BlobStore(tmp_path / "job")
        model = blobs.put(initial_model(1.0, 2.0))
        arithmetic = Arithmetic(parse(text), LAYOUT, blobs, lambda _, site: BlobStore(tmp_path / "spool" / site))
        return Desk(arithmetic, tmp_path, model)

    return make


ADAM = ('name = "fedavg"', 'name = "fedadam"\nlearning_rate = 0.1')
RANGES = ('target = "binary"', 'target = "binary"\nstandardise = "ranges"')


def test_the_lengths_are_those_of_the_task_and_the_model(desk: Callable[..., Desk]) -> None:
    """Eight bytes a statistic and a count, four a parameter; no statistics where the public ranges will do."""
    assert desk().arithmetic.lengths == Lengths(8 * 3, 4 * 2, 8 * 1027)
    assert desk(task=RANGES).arithmetic.lengths.statistics == 0


def test_statistics_become_a_preparation(desk: Callable[..., Desk]) -> None:
    """Summed over sites, whatever their weights: 4 values of mean 0.5 around the middle of 0..120."""
    at = desk()
    contributions = [at.sent(site, np.array([2.0, 1.0, 0.5]), weight=9.0) for site in "ab"]
    done = at.arithmetic.complete(at.work(StepKind.STATISTICS, *contributions))
    assert isinstance(done, Prepared)
    assert b'"shift":90.0' in at.blobs.get(done.preparation)


def test_without_statistics_the_contract_is_the_preparation(desk: Callable[..., Desk]) -> None:
    """No site is asked for anything."""
    at = desk(task=RANGES)
    done = at.arithmetic.complete(at.work(StepKind.STATISTICS))
    assert isinstance(done, Prepared)
    assert b'"scale":120.0' in at.blobs.get(done.preparation)


def test_updates_become_the_next_model(desk: Callable[..., Desk]) -> None:
    """The weighted mean is added to the model that the step names, and the same work gives the same bytes."""
    at = desk()
    heavy = at.sent("a", np.array([1, 0], dtype="<f4"), weight=3.0)
    light = at.sent("b", np.array([-1, 4], dtype="<f4"), weight=1.0)
    done = at.arithmetic.complete(at.work(StepKind.TRAIN, heavy, light))
    assert isinstance(done, Stepped)
    layout, values = from_safetensors(at.blobs.get(done.model))
    assert (layout, values.tolist()) == (LAYOUT, [1.5, 3.0])
    assert at.arithmetic.complete(at.work(StepKind.TRAIN, heavy, light)) == done


def test_a_strategys_memory_goes_from_step_to_step(desk: Callable[..., Desk]) -> None:
    """FedAdam's second step differs when it is given the state that its first one left."""
    at = desk(strategy=ADAM)
    update = at.sent("a", np.array([1, -1], dtype="<f4"))
    first = at.arithmetic.complete(at.work(StepKind.TRAIN, update))
    assert isinstance(first, Stepped)
    fresh = at.arithmetic.complete(at.work(StepKind.TRAIN, update))
    second = at.arithmetic.complete(at.work(StepKind.TRAIN, update, state=first.strategy_state))
    assert isinstance(second, Stepped)
    assert fresh == first
    assert second.model != first.model
    assert second.strategy_state != first.strategy_state


def test_evaluations_become_metrics(desk: Callable[..., Desk]) -> None:
    """Counts of both sites together."""
    at = desk()
    words = np.zeros(1027)
    words[:3], words[3 + 300], words[3 + 512 + 200] = (4, 3, 2.0), 2, 2
    done = at.arithmetic.complete(at.work(StepKind.EVALUATE, at.sent("a", words), at.sent("b", words)))
    assert isinstance(done, Measured)
    found = {metric.name: metric.value for metric in done.metrics}
    assert found == {"n": 8.0, "loss": 0.5, "accuracy": 0.75, "auc": 1.0}


def test_what_cannot_be_summed_is_said_of_each_site(desk: Callable[..., Desk]) -> None:
    """All of those that are at fault, and no other; no model is written."""
    at = desk()
    before = set(at.blobs.folder.iterdir())
    done = at.arithmetic.complete(
        at.work(
            StepKind.TRAIN,
            at.sent("a", np.array([np.nan, 0], dtype="<f4")),
            at.sent("b", np.array([1, 1], dtype="<f4")),
            at.sent("c", np.array([1], dtype="<f4")),
        )
    )
    assert isinstance(done, Rejected)
    assert [site for site, _ in done.problems] == ["a", "c"]
    assert "holds NaN or infinite values" in done.problems[0][1]
    assert "has 4 bytes instead of 8" in done.problems[1][1]
    assert set(at.blobs.folder.iterdir()) == before


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (StepKind.STATISTICS, np.array([-1.0, 0.0, 0.0]), "statistics"),
        (StepKind.EVALUATE, np.full(1027, 0.5), "a summed evaluation holds counts that no test rows give"),
        (StepKind.TRAIN, np.array([3e38, 3e38], dtype="<f4"), "the strategy's step leads to NaN or infinite values"),
    ],
)
def test_a_sum_that_makes_no_sense_breaks_the_job_in_words(
    kind: StepKind, values: npt.NDArray[np.generic], words: str, desk: Callable[..., Desk]
) -> None:
    """Nobody can be blamed for a sum; whoever reads the job's end learns what was found."""
    at = desk(strategy=('name = "fedavg"', 'name = "fedavg"\nlearning_rate = 10.0'))
    done = at.arithmetic.complete(at.work(kind, at.sent("a", values)))
    assert isinstance(done, Broken)
    assert words in done.problem


def test_a_disk_that_does_not_give_is_the_conductors_affair(desk: Callable[..., Desk]) -> None:
    """It insists; no site is blamed for a payload that the coordinator lost."""
    at = desk()
    sent = at.sent("a", np.array([1, 1], dtype="<f4"))
    at.spool("a").drop(sent.payload)
    with pytest.raises(StorageError, match=f"payload {sent.payload.hex[:12]} is not in"):
        at.arithmetic.complete(at.work(StepKind.TRAIN, sent))


# ------------------------------------------------------------------------------------------------- secure aggregation

SEALED = ('secure_aggregation = "plain"', "")


def test_a_sum_that_was_opened_elsewhere_is_made_into_the_next_model(desk: Callable[..., Desk]) -> None:
    """What secure aggregation opened is read as the plain sum is: the mean moves the model."""
    at = desk(privacy=SEALED)
    total = plain.make().open(2, "<f4")
    total.add("a", 1.0, lambda start, count: np.array([1, -1], dtype="<f4").tobytes()[start : start + count])
    done = at.arithmetic.complete(at.work(StepKind.TRAIN), [total])
    assert isinstance(done, Stepped)
    assert from_safetensors(at.blobs.get(done.model))[1].tolist() == [2.0, 1.0]


def test_a_sealed_job_is_never_completed_from_single_contributions(desk: Callable[..., Desk]) -> None:
    """Without an opened sum, or with one of another length, there is no model: a bug of ours."""
    at = desk(privacy=SEALED)
    update = at.sent("a", np.array([1, -1], dtype="<f4"))
    with pytest.raises(LocalProtocolError, match="before its sum is open"):
        at.arithmetic.complete(at.work(StepKind.TRAIN, update))
    with pytest.raises(LocalProtocolError, match="has 3 values where 2 belong"):
        at.arithmetic.complete(at.work(StepKind.TRAIN), [plain.make().open(3, "<f4")])


# ------------------------------------------------------------------------------------------------------------- groups

MEDIAN = ('name = "fedavg"', 'name = "median"')
GROUPED = ('secure_aggregation = "plain"', "groups = true")


def summed(*values: list[float], weight: float = 1.0) -> plain.PlainSum:
    """A sum of these updates, each of this weight."""
    total = plain.PlainSum(len(values[0]), "<f4")
    for place, each in enumerate(values):
        content = np.array(each, dtype="<f4").tobytes()
        total.add(f"site-{place}", weight, lambda start, count, content=content: content[start : start + count])
    return total


def model_of(at: Desk, done: object) -> list[float]:
    """The model that a step came to."""
    assert isinstance(done, Stepped)
    return list(from_safetensors(at.blobs.get(done.model))[1])


def test_groups_sums_add_up_for_a_strategy_that_needs_only_the_sum(desk: Callable[..., Desk]) -> None:
    """The mean over all sites of all groups, each group weighing what its sites weigh together."""
    at = desk(privacy=GROUPED)
    groups = [summed([1, 0], [3, 0], weight=2.0), summed([0, 8], weight=12.0)]
    done = at.arithmetic.complete(at.work(StepKind.TRAIN), groups)
    assert model_of(at, done) == [1 + (2 * 1 + 2 * 3) / 16, 2 + 12 * 8 / 16]


def test_a_robust_strategy_hears_each_group_as_one(desk: Callable[..., Desk]) -> None:
    """The median of the groups' means, whatever they weigh."""
    at = desk(strategy=MEDIAN, privacy=GROUPED)
    groups = [summed([1, 0], [3, 0], weight=2.0), summed([-1, 8], weight=1e6), summed([0.5, 0.25])]
    done = at.arithmetic.complete(at.work(StepKind.TRAIN), groups)
    assert model_of(at, done) == [1 + 0.5, 2 + 0.25]


def test_under_plain_aggregation_a_robust_strategy_hears_each_site(desk: Callable[..., Desk]) -> None:
    """Each is a group of one; what cannot be summed is said of whom, and statistics are pooled as ever."""
    at = desk(strategy=MEDIAN)
    sent = [at.sent("a", np.array([1, -1], dtype="<f4")), at.sent("b", np.array([9, 9], dtype="<f4"), weight=1e6)]
    sent.append(at.sent("c", np.array([2, 0.5], dtype="<f4")))
    assert model_of(at, at.arithmetic.complete(at.work(StepKind.TRAIN, *sent))) == [1 + 2, 2 + 0.5]
    bad = at.sent("d", np.array([np.nan, 0], dtype="<f4"))
    done = at.arithmetic.complete(at.work(StepKind.TRAIN, *sent, bad))
    assert isinstance(done, Rejected)
    assert [site for site, _ in done.problems] == ["d"]
    pooled = at.work(StepKind.STATISTICS, *(at.sent(site, np.array([2.0, 1.0, 0.5])) for site in "ab"))
    assert isinstance(at.arithmetic.complete(pooled), Prepared)


def test_a_step_without_a_contribution_is_our_mistake(desk: Callable[..., Desk]) -> None:
    """There is no mean of nothing."""
    at = desk(strategy=MEDIAN)
    with pytest.raises(LocalProtocolError, match="step 1 is to be completed without a contribution"):
        at.arithmetic.complete(at.work(StepKind.TRAIN))


def test_memory_grows_with_the_groups_only_up_to_a_bound(
    tmp_path: Path, job_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More groups make shorter blocks: never the whole set of models, nor a long block of each."""
    size = 30_000
    monkeypatch.setattr("coordinator.arithmetic._ABREAST", 8_000)
    layout, blobs = Layout((TensorSpec("weight", (size,)),)), BlobStore(tmp_path / "job")
    model = blobs.put(to_safetensors(layout, np.zeros(size, np.float32)))
    spool = BlobStore(tmp_path / "spool")
    payload = spool.put(np.ones(size, "<f4").tobytes())
    arithmetic = Arithmetic(parse(job_text().replace(*MEDIAN)), layout, blobs, lambda _, __: spool)

    def peak(groups: int) -> int:
        """The least of three: what other threads of this process hold meanwhile is counted too."""
        return min(once(groups) for _ in range(3))

    def once(groups: int) -> int:
        sent = tuple(Contributed(f"site-{place:02}", payload, 1.0, 0.1) for place in range(groups))
        tracemalloc.start()
        done = arithmetic.complete(Complete(1, 0, StepKind.TRAIN, sent, model, None))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert isinstance(done, Stepped)
        assert from_safetensors(blobs.get(done.model))[1].tolist() == [1.0] * size
        return most

    once(4)  # what is imported at the first use counts for no groups
    assert peak(40) < peak(4) + 8 * 8_000
