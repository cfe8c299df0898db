"""What tests of the whole product share: a consortium, and its coordinator served on loopback."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from coordinator.coordinator import Coordinator
from coordinator.service import serve
from coordinator.store import Store, url_in
from tests.consortium import Consortium, Running, Site, free_port, prepared

os.environ.pop("COLUMNS", None)  # rich takes a width set when it is imported for good; tests set their own later

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from federation.messages import StepStart
    from tests.consortium import Answer


@pytest.fixture(scope="session")
def consortium() -> Consortium:
    """A consortium; members are made by the tests."""
    return Consortium()


@pytest.fixture
def running(consortium: Consortium, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Running]]:
    """Serves a coordinator; entered again, it is the same one after a restart: on the same folder, store and port."""
    port = free_port()

    @asynccontextmanager
    async def served(*, health_port: int = 0) -> AsyncIterator[Running]:
        with Store(url_in(tmp_path)) as store:
            coordinator = Coordinator(tmp_path, store, consortium.me)
            coordinator.start()
            server = await serve(coordinator, f"127.0.0.1:{port}", health_port)
            try:
                yield Running(consortium, coordinator, store, tmp_path, port)
            finally:
                await coordinator.leave()
                await server.stop(grace=None)
                await coordinator.close()

    return served


@pytest.fixture
def site(consortium: Consortium, tmp_path: Path) -> Callable[..., Site]:
    """Makes a site that answers steps with prepared vectors."""

    def make(name: str, answer: Callable[[StepStart], Answer] = prepared, weight: float = 1.0) -> Site:
        return Site(consortium.member(name), tmp_path / "sites", answer, weight)

    return make
