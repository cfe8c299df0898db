"""Secure sums are the plain ones to the codec's precision, in memory that does not grow, and burn when they are not."""

import hashlib
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from client.masking import Contributions
from coordinator.secure_sums import SummedTotals, SummedUpdates, perform
from federation.blobs import BlobRef, BlobStore, Reader
from federation.errors import ConfigurationError, LocalProtocolError, StorageError
from federation.vector import BLOCK
from privacy.crypto import masks
from privacy.secure_aggregation.interface import Source
from privacy.secure_aggregation.rostersum.coordinator_events import Broken, Sum, Term
from privacy.secure_aggregation.rostersum.encoding import GUARD
from privacy.secure_aggregation.rostersum.site_events import Mask
from privacy.secure_aggregation.rostersum.terms import Path as Rounding
from privacy.secure_aggregation.rostersum.terms import Plan, RecordCodec, Ring, TrainCodec, Weighting
from tests.privacy.secure_aggregation.rostersum.conftest import STAT, TRAIN

CTX = b"c" * 32


def train(size: int, q_bits: int = 22, ring: Ring = Ring.WORD) -> Plan:
    """A plan for updates of so many values, within +-0.5 and norm 10, that weigh 1 to 1000 records."""
    codec = TrainCodec(0.5, 10.0, q_bits, Weighting.RECORDS, 1, 1000)
    return replace(TRAIN, ring=ring, words=size + 1 + GUARD, codec=codec)


def self_key(idx: int) -> bytes:
    """The key of a site's self mask."""
    return hashlib.sha256(b"self %d" % idx).digest()


def pair_key(one: int, other: int) -> bytes:
    """The key of a pair's mask."""
    return hashlib.sha256(b"%d and %d" % (min(one, other), max(one, other))).digest()


@dataclass
class Round:
    """One attempt of n sites whose uploads lie in the coordinator's spool."""

    folder: Path
    plan: Plan
    spool: BlobStore = field(init=False)
    terms: list[Term] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Makes the spool."""
        self.spool = BlobStore(self.folder / "spool")

    def upload(self, results: list[np.ndarray], weights: list[int] | None = None) -> None:
        """Each site masks its result, as the product does, and what it made is put into the spool."""
        for idx, values in enumerate(results):
            site = Contributions(self.folder / f"site-{idx}")
            site.result("u").write_bytes(values.tobytes())
            site.prepare("u", self.plan, rows=1 if weights is None else weights[idx], declared=1)
            others = [j for j in range(len(results)) if j != idx]
            pairs = tuple((1 if idx < j else -1, pair_key(idx, j)) for j in others)
            payload = site.mask(Mask(b"j" * 32, CTX, "u", self.plan, len(results), 1, self_key(idx), pairs))
            assert payload is not None
            site.payloads.path(payload).rename(self.spool.path(payload))
            self.terms.append(Term(idx, payload, self_key(idx)))

    def forge(self, idx: int, change: Callable[[np.ndarray], None]) -> None:
        """The site signs another vector than an honest one: the masks stay, what lies below them changes."""
        payload = self.terms[idx].payload
        words = np.frombuffer(self.spool.get(payload), masks.dtype(self.plan.ring)).copy()
        change(words)
        self.terms[idx] = replace(self.terms[idx], payload=self.spool.put(words.tobytes()))

    def source(self, term: Term) -> Reader:
        """Reads an upload."""
        return self.spool.reader(term.payload)

    def sum(self) -> SummedUpdates | SummedTotals | Broken:
        """What the coordinator makes of the uploads."""
        return perform(Sum(CTX, self.plan.plan_id, tuple(self.terms)), self.plan, self.source, self.folder / "sums")


@pytest.fixture
def attempt(tmp_path: Path) -> Callable[..., Round]:
    """Makes an attempt at a plan; given results and weights, their uploads are in the spool."""

    def make(plan: Plan, results: list[np.ndarray] | None = None, weights: list[int] | None = None) -> Round:
        made = Round(tmp_path, plan)
        made.upload(results or [], weights)
        return made

    return make


def updates(n: int, size: int, seed: int = 1) -> list[np.ndarray]:
    """Small random updates."""
    generator = np.random.default_rng(seed)
    return [generator.normal(0, 1e-3, size).astype("<f4") for _ in range(n)]


# ------------------------------------------------------------------------------------------------------- sums that hold


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 1000), min_size=3, max_size=7),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
    st.sampled_from([(12, Ring.SHORT), (22, Ring.WORD), (40, Ring.LONG)]),
)
def test_the_mean_is_the_plain_one(
    tmp_path_factory: pytest.TempPathFactory, weights: list[int], size: int, seed: int, width: tuple[int, Ring]
) -> None:
    """Whatever sites, weights, length and ring: each value is off by two units of each site at most."""
    q_bits, ring = width
    made = Round(tmp_path_factory.mktemp("round"), train(size, q_bits, ring))
    results = updates(len(weights), size, seed)
    made.upload(results, weights)
    total = made.sum()
    assert isinstance(total, SummedUpdates)
    mean = np.concatenate([*total.mean()])
    expected = np.average(np.array(results, dtype=float), axis=0, weights=weights)
    unit = 1000 / (2**q_bits - 1)  # of weight, as one rounding can be off
    error = 2 * len(weights) * unit * (0.5 + np.abs(expected).max()) / sum(weights)
    assert np.abs(mean - expected).max() <= error
    assert total.weight == pytest.approx(sum(weights), abs=len(weights) * unit)
    assert (total.size, mean.size) == (size, size)
    assert total.total() == pytest.approx(mean * total.weight)


def test_a_long_vector_is_summed_block_by_block(attempt: Callable[..., Round]) -> None:
    """Blocks of at most BLOCK values join; the hash is that of the d words of the sum."""
    size = 2 * BLOCK + 17
    results = updates(3, size)
    made = attempt(train(size), results, [100, 300, 600])
    total = made.sum()
    assert isinstance(total, SummedUpdates)
    blocks = [*total.mean()]
    assert [block.size for block in blocks] == [BLOCK, BLOCK, 17]
    expected = np.average(np.array(results, dtype=float), axis=0, weights=[100, 300, 600])
    assert np.abs(np.concatenate(blocks) - expected).max() < 1e-6
    assert [block.size for block in total.mean(BLOCK // 2)] == [BLOCK // 2] * 4 + [17]
    parts = [*total.mean(1000, 0, BLOCK + 5), *total.mean(BLOCK, BLOCK + 5)]
    assert np.concatenate(parts).tobytes() == np.concatenate(blocks).tobytes()
    assert np.concatenate([*total.mean(1000)]).tobytes() == np.concatenate(blocks).tobytes()
    words = np.concatenate([[total.decoded.units], total.decoded.values, [3] * GUARD]).astype("<i4")
    assert (total.event.ctx, total.event.sum_hash) == (CTX, hashlib.sha256(words.tobytes()).digest())
    assert made.sum().event == total.event  # type: ignore[union-attr] # it holds as the first did


def test_totals_are_pooled_exactly(attempt: Callable[..., Round]) -> None:
    """Statistics and evaluation: sums of fields in their order, to their binary places; a site's mean is their n-th."""
    made = attempt(STAT, [np.array([1.5, 2.25, 40.0]), np.array([0.0, 1.0, 7.0]), np.array([100.0, 0.25, 1e6])])
    total = made.sum()
    assert isinstance(total, SummedTotals)
    assert total.total().tolist() == [101.5, 3.5, 1_000_047.0]
    assert (total.size, total.weight) == (3, 3.0)
    assert [block.size for block in total.mean(2)] == [2, 1]
    assert (
        np.concatenate([*total.mean(1, 0, 2), *total.mean(2, 2)]).tolist() == np.concatenate([*total.mean()]).tolist()
    )
    assert np.concatenate([*total.mean()]) == pytest.approx(np.array([101.5, 3.5, 1_000_047.0]) / 3)


def test_nothing_of_a_sum_is_left_in_a_folder(attempt: Callable[..., Round], tmp_path: Path) -> None:
    """The accumulator never has a name, so a killed coordinator leaves none either."""
    made = attempt(train(10), updates(3, 10))
    total = made.sum()
    assert isinstance(total, SummedUpdates)
    assert list((tmp_path / "sums").iterdir()) == []


def test_memory_grows_neither_with_sites_nor_with_the_vector(attempt: Callable[..., Round]) -> None:
    """Sixteen sites take what four take, and sixteen blocks what four take: a block of words at a time."""

    def peak(sites: int, blocks: int) -> int:
        size = blocks * BLOCK
        content = bytes(4 * (size + 1 + GUARD))
        terms = tuple(Term(idx, BlobRef.of(content), self_key(idx)) for idx in range(sites))
        made = attempt(train(size))
        payload = made.spool.put(content)
        work, source = Sum(CTX, 1, terms), partial(made.spool.read, payload)
        tracemalloc.start()
        done = perform(work, made.plan, lambda _: nullcontext(source), made.folder)
        assert isinstance(done, Broken)  # nobody masked anything
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    few = peak(4, 4)
    assert abs(peak(16, 4) - few) < 2 * BLOCK
    assert abs(peak(4, 16) - few) < 2 * BLOCK


def test_the_mean_is_read_in_blocks(attempt: Callable[..., Round]) -> None:
    """So is the mean: reading a vector of eight blocks never holds two."""
    made = attempt(train(8 * BLOCK), updates(3, 8 * BLOCK))
    total = made.sum()
    assert isinstance(total, SummedUpdates)
    tracemalloc.start()
    for _ in total.mean():
        pass
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * 8 * BLOCK


# ------------------------------------------------------------------------------------------------------- sums that burn


def spoil(made: Round, idx: int, change: Callable[[bytes], bytes]) -> None:
    """The stored upload changes on the coordinator's disk."""
    path = made.spool.path(made.terms[idx].payload)
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: bytes([content[0] ^ 1]) + content[1:], "has other bytes"),
        (lambda content: content[:-1] + bytes([content[-1] ^ 128]), "has other bytes"),
        (lambda content: content[:-1], "ends after 59 bytes of 60"),
        (lambda content: content + b"x", "has other bytes"),
    ],
)
def test_a_changed_upload_burns(attempt: Callable[..., Round], change: Callable[[bytes], bytes], problem: str) -> None:
    """One bit, one byte less, one more: it is not what its site signed, and the site is named."""
    made = attempt(train(10), updates(3, 10))
    spoil(made, 1, change)
    assert made.sum() == Broken(CTX, f"the stored vector of site 1 {problem}: it is not what its site signed")


def guard(words: np.ndarray) -> None:
    """Adds to the last guard word."""
    words[-1] += 1


def weight(words: np.ndarray) -> None:
    """Takes the weight down to where it would scale the mean up."""
    words[0] -= 3 * (2**22 - 1) - 100


def value(words: np.ndarray) -> None:
    """Adds far more to one value than a weight allows."""
    words[1] += 2**30


@pytest.mark.parametrize(
    ("change", "problem"),
    [(guard, "its guard says"), (weight, "its weight is"), (value, "a value is larger than its weight of")],
)
def test_a_sum_that_no_honest_members_make_burns(
    attempt: Callable[..., Round], change: Callable[[np.ndarray], None], problem: str
) -> None:
    """The checks of guard, weight and values hold for masked vectors too; the words say which one did not."""
    made = attempt(train(10), updates(3, 10), [1000, 1000, 1000])
    made.forge(2, change)
    done = made.sum()
    assert isinstance(done, Broken)
    assert problem in done.problem


def test_totals_that_no_members_can_have_burn(attempt: Callable[..., Round]) -> None:
    """Each field has its limits, times the members."""
    made = attempt(STAT, [np.array([1.0, 1.0, 1.0])] * 3)
    made.forge(0, lambda words: words.__setitem__(2, words[2] + 3_000_000))
    done = made.sum()
    assert isinstance(done, Broken)
    assert "a total of field 'n' is outside what 3 members can have" in done.problem


def test_a_wrong_self_mask_burns(attempt: Callable[..., Round]) -> None:
    """What is left is noise, and the guard says so."""
    made = attempt(train(10), updates(3, 10))
    made.terms[1] = replace(made.terms[1], self_key=b"x" * 32)
    done = made.sum()
    assert isinstance(done, Broken)
    assert "its guard says" in done.problem


# -------------------------------------------------------------------------------------------------- what can be retried


def test_an_upload_that_cannot_be_read_is_no_verdict(attempt: Callable[..., Round]) -> None:
    """The disk may give it the next time: nothing is burned for it."""
    made = attempt(train(10), updates(3, 10))
    path = made.spool.path(made.terms[1].payload)
    path.rename(path.with_suffix(".away"))
    with pytest.raises(StorageError, match=rf"payload {path.name[:12]} is not in"):
        made.sum()
    path.with_suffix(".away").rename(path)
    assert isinstance(made.sum(), SummedUpdates)


def test_bytes_that_were_read_wrong_once_are_read_again(attempt: Callable[..., Round]) -> None:
    """A disk that errs is told of; the sum made again holds."""
    made = attempt(train(10), updates(3, 10))
    reads: list[int] = []

    @contextmanager
    def erring(term: Term) -> Iterator[Source]:
        with made.source(term) as right:

            def read(start: int, count: int) -> bytes:
                reads.append(start)
                return bytes(count) if len(reads) == 1 else right(start, count)

            yield read

    work = Sum(CTX, 1, tuple(made.terms))
    with pytest.raises(StorageError, match="the stored vector of site 0 has other bytes"):
        perform(work, made.plan, erring, made.folder)
    assert isinstance(perform(work, made.plan, erring, made.folder), SummedUpdates)


def test_what_was_checked_as_it_came_in_is_added_as_it_is(attempt: Callable[..., Round]) -> None:
    """The same sum; digests are not made again, which the wrong ones here would not survive."""
    made = attempt(train(10), updates(3, 10))
    work = Sum(CTX, 1, tuple(made.terms))
    total = perform(work, made.plan, made.source, made.folder, checked=True)
    assert isinstance(total, SummedUpdates)
    assert total.event == made.sum().event  # type: ignore[union-attr] # it is a sum
    other = made.spool.put(made.spool.get(made.terms[0].payload)[:-4] + b"\1\0\0\0")
    made.spool.path(other).replace(made.spool.path(made.terms[0].payload))
    unchecked = perform(work, made.plan, made.source, made.folder)
    assert isinstance(unchecked, Broken)
    assert "has other bytes" in unchecked.problem
    assert "its guard says" in perform(work, made.plan, made.source, made.folder, checked=True).problem  # type: ignore[union-attr] # broken


def test_a_folder_without_room_is_told(attempt: Callable[..., Round], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the sum is begun: to write to a map of a full disk would kill the coordinator."""
    made = attempt(train(10), updates(3, 10))

    class Full:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing was made."""

        def write(self, _: bytes) -> Any:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("coordinator.secure_sums.tempfile.TemporaryFile", lambda **_: Full())
    with pytest.raises(StorageError, match=r"cannot write a sum of 60 bytes to .*: No space.*coordinator's operator"):
        made.sum()


def test_what_cannot_be_summed_is_our_mistake(attempt: Callable[..., Round]) -> None:
    """A member twice, and a codec of another release."""
    made = attempt(train(10), updates(3, 10))
    twice = Sum(CTX, 1, (made.terms[0], *made.terms))
    with pytest.raises(LocalProtocolError, match="the vector of site 0 comes a second time"):
        perform(twice, made.plan, made.source, made.folder)
    with pytest.raises(ConfigurationError, match="a plan's codec is not one that this release knows"):
        perform(twice, replace(made.plan, codec=RecordCodec(8, Rounding.EXACT, 1.0, 100)), made.source, made.folder)
