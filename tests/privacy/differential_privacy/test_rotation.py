from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import LocalProtocolError
from privacy.crypto import masks
from privacy.differential_privacy import rotation
from privacy.differential_privacy.rotation import rotate, unrotate, walsh_hadamard

QUICK = settings(max_examples=30, deadline=None)
POWERS = st.integers(3, 11)
KEY = bytes(range(32))


def sylvester(power: int) -> np.ndarray:
    """The matrix as Sylvester made it."""
    pair = np.array([[1.0, 1.0], [1.0, -1.0]])
    return reduce(np.kron, [pair] * power) / 2 ** (power / 2)


@QUICK
@given(power=POWERS, seed=st.integers(0, 99), cached=st.sampled_from((8, 64, 1 << 14)))
def test_the_transform_is_sylvesters(power: int, seed: int, cached: int) -> None:
    """In whatever blocks it is computed, the transform is multiplication by Sylvester's matrix over sqrt(D)."""
    values = np.random.default_rng(seed).standard_normal(1 << power)
    wanted = sylvester(power) @ values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotation, "_CACHED", cached)
        walsh_hadamard(values)

    assert np.abs(values - wanted).max() < 1e-13


@QUICK
@given(power=POWERS, key=st.binary(min_size=32, max_size=32), part=st.sampled_from((8, 64, 1 << 16)))
def test_the_signs_are_the_texts(power: int, key: bytes, part: int) -> None:
    """Sign k is 1 - 2 bit, bit = (byte[k >> 3] >> (7 - (k & 7))) & 1 of the key's stream."""
    size = 1 << power
    stream = np.zeros(max(1, size // 16), np.dtype("<u2"))
    masks.add(stream, [(1, key)])
    octets = stream.tobytes()
    signs = [1 - 2 * (octets[k >> 3] >> (7 - (k & 7)) & 1) for k in range(size)]
    values = np.random.default_rng(1).standard_normal(size)
    wanted = sylvester(power) @ (values * signs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotation, "_SIGNS", part)
        rotate(values, key)

    assert np.abs(values - wanted).max() < 1e-13


@pytest.mark.parametrize("power", [3, 14, 15, 18])
def test_rotating_back_gives_the_vector(power: int) -> None:
    """Rotation keeps the norm to 1e-14, spreads a single value over all, and is undone by the same key."""
    values = np.random.default_rng(2).standard_normal(1 << power)
    turned, single = values.copy(), np.zeros(1 << power)
    single[5] = 1

    rotate(turned, KEY)
    rotate(single, KEY)

    assert abs(np.linalg.norm(turned) / np.linalg.norm(values) - 1) < 1e-14
    assert np.allclose(np.abs(single), 2 ** (-power / 2), rtol=1e-12)
    assert not np.allclose(turned, values)
    unrotate(turned, KEY)
    assert np.abs(turned - values).max() < 1e-13


@pytest.mark.parametrize("size", [0, 1, 4, 7, 12, 1000])
def test_other_lengths_are_refused(size: int) -> None:
    """D is a power of two from 8 on."""
    for turn in (rotate, unrotate):
        with pytest.raises(LocalProtocolError, match=f"a vector of {size} values was rotated"):
            turn(np.zeros(size), KEY)


def test_a_short_key_is_refused() -> None:
    """Signs are made of 32 bytes."""
    with pytest.raises(LocalProtocolError, match="a key of 32 bytes, not of 31"):
        rotate(np.zeros(8), KEY[:31])
