"""What adding a site's masks costs: Parley's engine, the floor under any such engine, and Flower's functions."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from privacy.crypto import masks

__all__ = ["KEYS", "MaskCost", "measure"]

KEYS = 9
"""Masks of one site among nine: its own, and one for each of eight others."""

_TRIES = 15
_SLOW_TRIES = 2
"""Flower's, which take many times as long and vary less."""
_QUICK = 2_000_000
"""Parameters up to which there are tries of all; larger vectors have a third of them."""
_CHUNK = 1 << 17
"""Bytes of the floor's keystream: as fast as any on processors with 512 KiB of second-level cache."""
_SLACK = 15
_MODULUS = 1 << 32
"""Flower's default, which is Parley's ring of 32 bits."""
_LARGEST = 1 << 22
"""Flower's default quantisation, about Parley's."""


@dataclass(frozen=True, slots=True)
class MaskCost:
    """Nanoseconds of CPU time for each parameter, on one thread: the least of several tries.

    Attributes:
        parley_ns: `privacy.crypto.masks.add` with `KEYS` keys, in place.
        floor_ns: `KEYS` times a keystream of AES-256-CTR and an addition of it, both in the processor's cache.
        flower_ns: Flower's masks and sums of as many seeds, and its reduction.
    """

    parley_ns: float
    floor_ns: float
    flower_ns: float


def measure(size: int) -> MaskCost:
    """The three costs for a vector of `size` parameters, taken in turns so that all have the same neighbours."""
    rng = np.random.default_rng(size)
    values = rng.integers(0, _LARGEST, size, dtype=np.int32)
    seeds = [rng.bytes(32) for _ in range(KEYS)]
    words: masks.Words = values.astype("<u4")
    keys: list[masks.SignedKey] = [(1 if index % 2 else -1, seed) for index, seed in enumerate(seeds)]
    parley, floor, flower = [], [], []
    tries = _TRIES if size <= _QUICK else _TRIES // 3
    for attempt in range(tries):
        parley.append(_seconds(lambda: masks.add(words, keys)))
        floor.append(_floor(size, seeds[0]))
        if attempt < _SLOW_TRIES:
            flower.append(_seconds(lambda: _flower(values, seeds)))
    return MaskCost(*(1e9 * min(each) / size for each in (parley, floor, flower)))


def _seconds(work: Callable[[], object]) -> float:
    """This thread's CPU time: what others do on the machine is not counted."""
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def _floor(size: int, key: bytes) -> float:
    """Seconds of `KEYS` keystreams as long as the vector, and of adding as many words to words in the cache."""
    chunks = KEYS * max(1, round(4 * size / _CHUNK))
    zeros, buffer = bytes(_CHUNK), memoryview(bytearray(_CHUNK + _SLACK))
    keystream: masks.Words = np.frombuffer(buffer[:_CHUNK], "<u4")
    values: masks.Words = np.zeros(keystream.size, "<u4")
    fill = masks.keystream(key).update_into

    def generate() -> None:
        for _ in range(chunks):
            fill(zeros, buffer)

    def add() -> None:
        for _ in range(chunks):
            np.add(values, keystream, values)

    return (_seconds(generate) + _seconds(add)) * KEYS * size / (chunks * keystream.size)


def _flower(values: npt.NDArray[np.int32], seeds: list[bytes]) -> list[npt.NDArray[np.int64]]:
    """Masks `values` as Flower's client does (`secaggplus_mod._collect_masked_vectors`): own mask, pairs, reduction."""
    from flwr.common.secure_aggregation import ndarrays_arithmetic as arithmetic
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    shapes = [values.shape]
    masked = arithmetic.parameters_addition([values], pseudo_rand_gen(seeds[0], _MODULUS, shapes))
    for index, seed in enumerate(seeds[1:]):
        combine = arithmetic.parameters_addition if index % 2 else arithmetic.parameters_subtraction
        masked = combine(masked, pseudo_rand_gen(seed, _MODULUS, shapes))
    reduced: list[npt.NDArray[np.int64]] = arithmetic.parameters_mod(masked, _MODULUS)
    return reduced
