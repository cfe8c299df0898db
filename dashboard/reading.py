"""The one store that this dashboard reads."""

import os

import streamlit as st

from coordinator.store import StoreReader
from federation.errors import StorageError

__all__ = ["VARIABLE", "store"]

VARIABLE = "PARLEY_STORE"
"""Environment variable with the store's URL; not an argument, because a URL may hold a password."""


def store() -> StoreReader:
    """The store that `PARLEY_STORE` names, opened once for all pages and people.

    Raises:
        StorageError: None is named, it does not exist, or this release cannot read it.
        ConfigurationError: What is named is no store's URL.
    """
    url = os.environ.get(VARIABLE, "")
    if not url:
        raise StorageError(f"no store is named: {VARIABLE} is empty", fix="start the dashboard with: parley dashboard")
    return _opened(url)


@st.cache_resource(show_spinner=False)
def _opened(url: str) -> StoreReader:
    return StoreReader(url)
