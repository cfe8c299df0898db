"""What the tests of noise share: bytes that are fixed, so that no statistical test can fail by chance."""

import hashlib
from collections.abc import Callable
from itertools import count

import pytest


def _fixed(label: str) -> Callable[[int], bytes]:
    """Gives in place of the operating system's bytes others that depend on `label` and on how often it was called."""
    calls = count()
    return lambda size: hashlib.shake_256(f"{label}/{next(calls)}".encode()).digest(size)


@pytest.fixture
def fixed() -> Callable[[str], Callable[[int], bytes]]:
    """Makes a source of fixed bytes from a label."""
    return _fixed
