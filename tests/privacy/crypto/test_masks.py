import os
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import LocalProtocolError
from privacy.crypto import masks
from privacy.crypto.canonical import derive
from privacy.crypto.masks import Ring, SignedKey, Words

QUICK = settings(max_examples=40, deadline=None)
RINGS = st.sampled_from(masks.RINGS)
CHUNKS = [64, 4096, masks._CHUNK]
"""Bytes of the engine's own chunks: vectors of tests cross the borders of the small ones many times."""


def generated(key: bytes, ring: Ring, words: int) -> list[int]:
    """G as the text defines it: AES of a 16-byte big-endian counter from 0, read as little-endian words."""
    block = Cipher(AES(key), ECB()).encryptor()  # noqa: S305 - counter mode written out
    width = ring // 8
    stream = b"".join(block.update(count.to_bytes(16, "big")) for count in range((words * width + 15) // 16))
    return [int.from_bytes(stream[start : start + width], "little") for start in range(0, words * width, width)]


def expected(values: Words, ring: Ring, keys: Sequence[SignedKey]) -> list[int]:
    """The masked vector in Python's integers."""
    total = [int(value) for value in values]
    for sign, key in keys:
        total = [
            (value + sign * mask) % 2**ring for value, mask in zip(total, generated(key, ring, len(total)), strict=True)
        ]
    return total


def random_words(ring: Ring, size: int, seed: int) -> Words:
    """Words over the whole ring."""
    return np.frombuffer(np.random.default_rng(seed).bytes(size * ring // 8), masks.dtype(ring)).copy()


@QUICK
@given(
    ring=RINGS, size=st.integers(0, 300), signs=st.lists(st.sampled_from((1, -1)), max_size=4), seed=st.integers(0, 99)
)
def test_masks_are_the_texts_generator(ring: Ring, size: int, signs: list[bool], seed: int) -> None:
    """Each word is the value plus the signed words of AES-256-CTR, modulo the ring."""
    keys: list[SignedKey] = [(1 if sign else -1, bytes([index]) * 32) for index, sign in enumerate(signs)]
    values = random_words(ring, size, seed)
    wanted = expected(values, ring, keys)

    masks.add(values, keys)

    assert values.tolist() == wanted


@QUICK
@given(ring=RINGS, lengths=st.lists(st.integers(0, 700), max_size=8), chunk=st.sampled_from(CHUNKS))
def test_blocks_give_what_the_whole_gives(ring: Ring, lengths: list[int], chunk: int) -> None:
    """I1: in whatever blocks a vector comes, and whatever chunks are worked on, its masks are the same."""
    keys: list[SignedKey] = [(1, b"a" * 32), (-1, b"b" * 32)]
    values = random_words(ring, sum(lengths), 1)
    whole = values.copy()
    masks.add(whole, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "_CHUNK", chunk)
        engine = masks.Masks(ring, keys)
        start = 0
        for length in lengths:
            engine.add(values[start : start + length], start)
            start += length

    assert values.tolist() == whole.tolist()


@QUICK
@given(ring=RINGS, sites=st.integers(3, 7), size=st.integers(1, 200), data=st.data())
def test_the_sum_is_exact(ring: Ring, sites: int, size: int, data: st.DataObject) -> None:
    """I1: the masked vectors of all members, less their self masks, sum to exactly the sum of their vectors."""
    members = sorted(data.draw(st.sets(st.integers(0, 99), min_size=sites, max_size=sites)))
    roots = {(i, j): os.urandom(32) for i in members for j in members if i < j}
    selves = {i: os.urandom(32) for i in members}
    vectors = {i: random_words(ring, size, i) for i in members}
    total = np.zeros(size, masks.dtype(ring))
    for i in members:
        keys: list[SignedKey] = [(1, derive(selves[i], "self-mask", b"ctx"))]
        others = [(1 if i < j else -1, roots[min(i, j), max(i, j)]) for j in members if j != i]
        keys += [(1 if sign > 0 else -1, derive(root, "pair-mask", b"ctx")) for sign, root in others]
        masked = vectors[i].copy()
        masks.add(masked, keys)
        assert (masked != vectors[i]).any() or size < 16
        total += masked

    masks.add(total, [(-1, derive(selves[i], "self-mask", b"ctx")) for i in members])

    assert total.tolist() == [sum(int(vectors[i][k]) for i in members) % 2**ring for k in range(size)]


def test_what_was_added_is_subtracted() -> None:
    """A mask with the sign turned takes it off again, over chunk borders."""
    values = random_words(32, 3 * masks._CHUNK // 4 + 5, 3)
    masked = values.copy()
    masks.add(masked, [(1, b"k" * 32)])
    assert (masked != values).mean() > 0.99
    masks.add(masked, [(-1, b"k" * 32)])
    assert (masked == values).all()


def test_no_mask_changes_nothing() -> None:
    """Without keys a vector stays as it is."""
    values = random_words(64, 10, 4)
    before = values.copy()
    masks.add(values, [])
    assert (values == before).all()


@QUICK
@given(ring=RINGS, blocks=st.integers(0, 5), rest=st.integers(0, 300), chunk=st.sampled_from(CHUNKS))
def test_masks_may_begin_at_any_block_of_a_keystream(ring: Ring, blocks: int, rest: int, chunk: int) -> None:
    """I1: what threads mask apart is what one thread masks."""
    keys: list[SignedKey] = [(1, b"a" * 32), (-1, b"b" * 32)]
    start = blocks * 128 // ring
    values = random_words(ring, start + rest, 1)
    whole = values.copy()
    masks.add(whole, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "_CHUNK", chunk)
        masks.Masks(ring, keys, start).add(values[start:], start)
        masks.Masks(ring, keys).add(values[:start], 0)

    assert values.tolist() == whole.tolist()


@pytest.mark.parametrize("start", [1, 7, -8])
def test_a_keystream_is_not_read_from_the_middle_of_a_block(start: int) -> None:
    """Its counter counts blocks of 16 bytes, eight words of 16 bits, from 0."""
    with pytest.raises(LocalProtocolError, match=f"from a multiple of 16 bytes on, not from {2 * start}"):
        masks.Masks(16, [(1, b"k" * 32)], start)


@pytest.mark.parametrize("start", [0, 9, 11])
def test_a_keystream_is_read_once_forwards(start: int) -> None:
    """A block that does not begin where the last one ended is refused, and the next right one is masked rightly."""
    keys: list[SignedKey] = [(1, b"k" * 32)]
    whole = random_words(16, 20, 5)
    values = whole.copy()
    masks.add(whole, keys)
    engine = masks.Masks(16, keys)
    engine.add(values[:10], 0)

    with pytest.raises(LocalProtocolError, match=f"from word {start} was masked where word 10 comes next"):
        engine.add(values[10:], start)

    engine.add(values[10:], 10)
    assert (values == whole).all()


@pytest.mark.parametrize("words", ["<u4", "<i8", ">u2", "<f8"])
def test_masks_fit_their_ring(words: str) -> None:
    """A block of another type than the ring's little-endian unsigned words is refused."""
    with pytest.raises(LocalProtocolError, match="cannot be added"):
        masks.Masks(16, []).add(np.zeros(3, words), 0)


@pytest.mark.parametrize("words", ["<u1", "<i4", ">u4", "<f4"])
def test_a_vector_has_the_words_of_a_ring(words: str) -> None:
    """Signed, byte-swapped, narrow or fractional values have no ring."""
    with pytest.raises(LocalProtocolError, match="not to"):
        masks.add(np.zeros(3, words), [])


def test_a_table_is_no_vector() -> None:
    """Two dimensions have no word order."""
    with pytest.raises(LocalProtocolError, match="2-d"):
        masks.add(np.zeros((2, 2), "<u4"), [])


def test_keys_have_32_bytes_and_signs_are_one() -> None:
    """A shorter key would be AES-128, and a factor no sign."""
    for key in (b"", bytes(16), bytes(33)):
        with pytest.raises(LocalProtocolError, match=f"32 bytes, not of {len(key)}"):
            masks.add(np.zeros(3, "<u4"), [(1, key)])
    with pytest.raises(LocalProtocolError, match=r"added \(\+1\) or subtracted"):
        masks.add(np.zeros(3, "<u4"), [(2, bytes(32))])  # type: ignore[list-item] # the point


@pytest.mark.parametrize("bits", [8, 24, 128])
def test_there_are_three_rings(bits: int) -> None:
    """16, 32 and 64 bits, no other."""
    with pytest.raises(LocalProtocolError, match="rings have"):
        masks.Masks(bits, [])


def test_memory_does_not_grow_with_the_vector() -> None:
    """Masking 16 MiB with three keys needs less than 1 MiB beside the vector."""
    values = np.zeros(1 << 22, "<u4")
    tracemalloc.start()
    masks.add(values, [(1, bytes([index]) * 32) for index in range(3)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
