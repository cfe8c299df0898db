"""The hospitals' records as `make data` cached them: tests never reach for the network."""

import os
from pathlib import Path

import pytest

from federation.errors import ParleyError, UnreachableError
from parley.heart import data


def _never(_folder: Path) -> Path:
    raise UnreachableError("the heart data is not cached, and tests download nothing", fix="run make data")


@pytest.fixture(scope="session")
def heart_csv() -> Path:
    """The checked file of all four hospitals' records."""
    try:
        return data.obtain(data.cache_folder(os.environ), fetch=_never)
    except ParleyError as missing:
        pytest.skip(str(missing))
