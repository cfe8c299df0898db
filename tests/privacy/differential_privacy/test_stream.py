import inspect
import os
from collections.abc import Callable

import numpy as np
import pytest

from federation.errors import LocalProtocolError
from privacy.crypto import masks
from privacy.differential_privacy.exact import discrete_gaussian
from privacy.differential_privacy.rounding import dithered, round_within
from privacy.differential_privacy.sampler import Sampler, Share
from privacy.differential_privacy.sampling import poisson_sample
from privacy.differential_privacy.self_test import self_test
from privacy.differential_privacy.site_level import SiteMechanism
from privacy.differential_privacy.stream import PART, Stream

KEY = bytes(range(32))


def test_a_stream_is_the_mask_generator_under_the_drawn_key() -> None:
    """Its words are those of AES-256-CTR in order, whatever their widths and however many are asked for at a time."""
    wanted = np.zeros(4 * PART, np.dtype("<u4"))
    masks.add(wanted, [(1, KEY)])
    stream = Stream(lambda _: KEY)

    parts = [stream.words(1).copy(), stream.words(PART).copy()]
    parts += [stream.longs(PART).copy().view("<u4"), stream.words(5).copy()]

    assert np.array_equal(np.concatenate(parts), wanted[: 3 * PART + 6])


def test_every_stream_draws_one_key_of_its_own() -> None:
    """Two streams ask the operating system once each, for 32 bytes, and share no word."""
    asked: list[int] = []

    def draw(size: int) -> bytes:
        asked.append(size)
        return os.urandom(size)

    first, second = Stream(draw).longs(PART).copy(), Stream(draw).longs(PART)

    assert asked == [32, 32]
    assert not np.intersect1d(first, second).size


@pytest.mark.parametrize(
    "taker",
    [
        Stream,
        Share,
        Sampler.share,
        self_test,
        dithered,
        round_within,
        poisson_sample,
        discrete_gaussian,
        SiteMechanism.quantise,
    ],
)
def test_the_default_is_the_operating_system(taker: Callable[..., object]) -> None:
    """Whatever draws takes `os.urandom` unless a test hands it other bytes, and has no seed."""
    parameters = inspect.signature(taker).parameters

    assert parameters["draw"].default is os.urandom
    assert not {"seed", "generator", "rng"} & set(parameters)


def test_a_short_key_is_refused() -> None:
    """A source that gives less than it was asked for makes no stream."""
    with pytest.raises(LocalProtocolError, match="a key of 32 bytes, not of 16"):
        Stream(lambda _: bytes(16))
