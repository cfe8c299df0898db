import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import LocalProtocolError, StorageError
from federation.vector import BLOCK
from privacy.crypto import masks
from privacy.secure_aggregation.interface import Source
from privacy.secure_aggregation.rostersum.sums import MaskedSum

RINGS: tuple[masks.Ring, ...] = (16, 32, 64)


def source(words: Any) -> Source:
    """Reads a vector's bytes as they would lie on disk."""
    content = words.tobytes()
    return lambda start, count: content[start : start + count]


def digest(words: Any) -> bytes:
    """What names the vector."""
    return hashlib.sha256(words.tobytes()).digest()


def self_key(idx: int) -> bytes:
    """The key of a site's self mask."""
    return bytes([idx + 1]) * 32


def pair_key(low: int, high: int) -> bytes:
    """The key of a pair's mask."""
    return bytes([low, high]) * 16


def masked(values: Any, idx: int, sites: range) -> Any:
    """What a site of `sites` uploads for these words: masked with its self mask and one mask for each pair."""
    words = values.copy()
    pairs = [(1 if idx < j else -1, pair_key(min(idx, j), max(idx, j))) for j in sites if j != idx]
    masks.add(words, [(1, self_key(idx)), *pairs])
    return words


def uploads(ring: masks.Ring, n: int, d: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Random vectors of `n` sites, and the same masked."""
    generator = np.random.default_rng(seed)
    plain = [generator.integers(0, 2**ring, d, dtype=masks.dtype(ring)) for _ in range(n)]
    return plain, [masked(words, idx, range(n)) for idx, words in enumerate(plain)]


def summed(ring: masks.Ring, vectors: list[Any]) -> MaskedSum:
    """The sum of these vectors, still masked."""
    total = MaskedSum(np.zeros(vectors[0].size, masks.dtype(ring)))
    for idx, words in enumerate(vectors):
        total.add(idx, digest(words), source(words))
    return total


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(RINGS), st.integers(3, 6), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_unmasked_sum_is_the_exact_modular_sum(ring: masks.Ring, n: int, d: int, seed: int) -> None:
    """I1: whatever ring, sites and length: pair masks cancel, self masks are subtracted, sums wrap modulo the ring."""
    plain, sent = uploads(ring, n, d, seed)
    total = summed(ring, sent)

    sum_hash = total.unmask((idx, self_key(idx)) for idx in reversed(range(n)))

    expected = sum(words.astype(object) for words in plain) % 2**ring
    assert total.words().tolist() == expected.tolist()
    assert sum_hash == digest(total.words())


@pytest.mark.parametrize("ring", RINGS)
def test_blocks_of_a_long_vector_join(ring: masks.Ring) -> None:
    """A vector of more than two blocks, the last one short, is summed as one of one block is."""
    plain, sent = uploads(ring, 3, 2 * BLOCK + 17, 1)
    total = summed(ring, sent)

    total.unmask((idx, self_key(idx)) for idx in range(3))

    assert np.array_equal(total.words(), plain[0] + plain[1] + plain[2])


def backwards(size: int, most: int, work: Callable[[slice], Any], /) -> Iterator[Any]:
    """Works on the last part first, as threads may."""
    parts = [slice(start, min(size, start + most)) for start in range(0, size, most)]
    return reversed([work(part) for part in reversed(parts)])


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("checked", [False, True])
def test_parts_may_be_worked_on_in_any_order(ring: masks.Ring, *, checked: bool) -> None:
    """I1: the same words and the same hash, whether digests are checked here or were when the bytes came in."""
    plain, sent = uploads(ring, 3, 17 * BLOCK + 3, 1)
    total = MaskedSum(np.zeros(plain[0].size, masks.dtype(ring)), backwards)
    for idx, words in enumerate(sent):
        total.add(idx, None if checked else digest(words), source(words))

    sum_hash = total.unmask((idx, self_key(idx)) for idx in range(3))

    assert np.array_equal(total.words(), plain[0] + plain[1] + plain[2])
    assert sum_hash == digest(total.words())


@pytest.mark.parametrize("size", [9, 11])
def test_a_vector_of_another_length_is_refused_though_its_digest_was_checked(size: int) -> None:
    """Too few or too many bytes make the sum useless, whatever they are."""
    total = MaskedSum(np.zeros(10, "<u4"))
    with pytest.raises(StorageError, match=r"stored vector of site 0 (ends after 36|has other) bytes"):
        total.add(0, None, source(np.zeros(size, "<u4")))
    with pytest.raises(StorageError, match="whose bytes were not those its site signed"):
        total.add(1, None, source(np.zeros(10, "<u4")))


def test_no_read_is_longer_than_a_block() -> None:
    """Memory does not grow with the vectors: sources are asked for at most a block of words at a time."""
    words = np.ones(3 * BLOCK + 5, "<u4")
    asked: list[int] = []

    def counted(start: int, count: int) -> bytes:
        asked.append(count)
        return source(words)(start, count)

    MaskedSum(np.zeros(words.size, "<u4")).add(0, digest(words), counted)

    assert max(asked) == 4 * BLOCK
    assert len(asked) == 5  # four blocks, and whether anything follows


def test_the_accumulator_may_be_a_mapped_file(tmp_path: Path) -> None:
    """A sum in a file is the sum in memory: the caller chooses where the words are."""
    plain, sent = uploads(32, 3, 1000, 2)
    mapped = np.memmap(tmp_path / "sum", dtype="<u4", mode="w+", shape=(1000,))
    total = MaskedSum(mapped)
    for idx, words in enumerate(sent):
        total.add(idx, digest(words), source(words))

    sum_hash = total.unmask((idx, self_key(idx)) for idx in range(3))
    mapped.flush()

    stored = np.fromfile(tmp_path / "sum", "<u4")
    assert np.array_equal(stored, plain[0] + plain[1] + plain[2])
    assert sum_hash == digest(stored)


def test_a_sum_with_one_self_mask_left_shows_nothing_of_the_values() -> None:
    """Zeros from all sites look like random words as long as one self mask is in the sum: no two are alike."""
    zeros = [np.zeros(4096, "<u4") for _ in range(3)]
    total = summed(32, [masked(words, idx, range(3)) for idx, words in enumerate(zeros)])
    part = total._words.copy()
    masks.add(part, [(-1, self_key(0)), (-1, self_key(1))])

    assert np.unique(part).size > 4090


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda words: words[:-1], "ends after 396 bytes of 400"),
        (lambda words: np.append(words, words[:1]), "has other bytes"),
        (lambda words: words ^ np.uint32(1), "has other bytes"),
    ],
    ids=["short", "long", "changed"],
)
def test_bytes_that_were_not_signed_make_the_sum_useless(spoil: Callable[[Any], Any], problem: str) -> None:
    """A stored vector that is shorter, longer or other than its digest says is told, and the sum refuses to go on."""
    _, sent = uploads(32, 3, 100, 3)
    total = summed(32, sent[:2])

    with pytest.raises(StorageError, match=problem) as told:
        total.add(2, digest(sent[2]), source(spoil(sent[2])))
    assert "the stored vector of site 2" in str(told.value)

    for again in (lambda: total.add(2, digest(sent[2]), source(sent[2])), lambda: total.unmask([])):
        with pytest.raises(StorageError, match="sum the attempt's stored vectors anew"):
            again()
    assert total.added == {0, 1}


def test_a_source_that_fails_half_way_makes_the_sum_useless() -> None:
    """An error of the disk leaves a sum with part of a vector in it: it is not opened afterwards."""
    _, sent = uploads(32, 3, 2 * BLOCK, 4)
    total = summed(32, sent[:2])

    def failing(start: int, count: int) -> bytes:
        if start:
            raise OSError("the disk is gone")
        return source(sent[2])(start, count)

    with pytest.raises(OSError, match="the disk is gone"):
        total.add(2, digest(sent[2]), failing)

    with pytest.raises(StorageError, match="sum the attempt's stored vectors anew"):
        total.unmask((idx, self_key(idx)) for idx in range(2))


def test_a_site_is_added_once() -> None:
    """The second vector of a site is refused, and the sum is as it was."""
    plain, sent = uploads(32, 3, 10, 5)
    total = summed(32, sent)

    with pytest.raises(LocalProtocolError, match="site 1 comes a second time"):
        total.add(1, digest(sent[1]), source(sent[1]))

    total.unmask((idx, self_key(idx)) for idx in range(3))
    assert np.array_equal(total.words(), plain[0] + plain[1] + plain[2])


@pytest.mark.parametrize("keys", [[0, 1], [0, 1, 2, 3], [0, 1, 1]], ids=["missing", "foreign", "twice"])
def test_self_masks_are_subtracted_for_exactly_the_sites_added(keys: list[int]) -> None:
    """A missing, foreign or doubled self mask is refused before anything is subtracted."""
    _, sent = uploads(32, 3, 10, 6)
    total = summed(32, sent)
    before = total._words.copy()

    with pytest.raises(LocalProtocolError, match=r"sites \[0, 1, 2\] are subtracted together"):
        total.unmask((idx, self_key(idx)) for idx in keys)

    assert np.array_equal(total._words, before)


def test_self_masks_are_subtracted_once() -> None:
    """Unmasking twice would mask again: it is refused, as is adding to an unmasked sum."""
    plain, sent = uploads(32, 3, 10, 7)
    total = summed(32, sent)
    total.unmask((idx, self_key(idx)) for idx in range(3))

    with pytest.raises(LocalProtocolError, match="and once"):
        total.unmask((idx, self_key(idx)) for idx in range(3))
    with pytest.raises(LocalProtocolError, match="or after the sum was unmasked"):
        total.add(3, digest(sent[0]), source(sent[0]))

    assert np.array_equal(total.words(), plain[0] + plain[1] + plain[2])


def test_a_masked_sum_is_not_read() -> None:
    """Decoding waits for the self masks: a sum that is read before says so."""
    _, sent = uploads(32, 3, 10, 8)

    with pytest.raises(LocalProtocolError, match="decoded after its self masks were subtracted"):
        summed(32, sent).words()


@pytest.mark.parametrize("words", [np.zeros(4, "<f4"), np.zeros(4, ">u4"), np.zeros((2, 2), "<u4")])
def test_an_accumulator_is_one_vector_of_a_rings_words(words: Any) -> None:
    """Floats, words of the other byte order and tables are no sum."""
    with pytest.raises(LocalProtocolError, match="a sum is of one vector of little-endian words"):
        MaskedSum(words)
