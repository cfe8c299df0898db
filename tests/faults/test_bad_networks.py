"""Every fault of a network heals without an operator, and the job ends with the same rounds, each of them once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from coordinator import attendance
from tests.consortium import free_port, until
from tests.faults.network import Cut, End, Way, Weather

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tests.faults.conftest import Study

    Started = Callable[..., AbstractAsyncContextManager[Study]]

pytestmark = pytest.mark.usefixtures("quick")

UPDATE = 60_000
"""Bytes of a model, and of an update."""


def test_a_good_network_ends_the_job(study: Started) -> None:
    """What the other tests compare with; each site needs one connection."""

    async def story() -> None:
        async with study() as here:
            await here.finished(await here.submit())
            assert [wire.opened_links for wire in here.wires.values()] == [1, 1, 1]

    asyncio.run(story())


@pytest.mark.parametrize("end", list(End))
@pytest.mark.parametrize("way", list(Way))
def test_connections_cut_in_the_middle_of_a_payload(study: Started, way: Way, end: End) -> None:
    """One site's first four connections end within its model or its update; transfers go on where they were cut."""

    async def story() -> None:
        async with study() as here:
            wire = here.wires["b"]
            await until(lambda: wire.opened_links == 1)
            wire.cut_next(*[Cut(UPDATE // 2, way, end)] * 3)
            wire.cut()
            await here.finished(await here.submit())
            assert wire.opened_links >= 5  # on a stalled machine silence may end one more

    asyncio.run(story())


def test_all_connections_are_cut_at_once_in_every_round(study: Started) -> None:
    """As when the coordinator's router restarts."""

    async def story() -> None:
        async with study() as here:
            job = await here.submit()
            for number in range(1, 4):
                await until(lambda: here.work["c"].trained >= number)  # noqa: B023 - awaited within the turn
                for wire in here.wires.values():
                    wire.cut(End.RST)
            await here.finished(job)

    asyncio.run(story())


@pytest.mark.parametrize("ways", [(Way.UP,), (Way.DOWN,), (Way.UP, Way.DOWN)], ids=["up", "down", "both"])
def test_a_half_open_connection_is_given_up_for_a_new_one(study: Started, ways: tuple[Way, ...]) -> None:
    """A firewall forgot the connection in the middle of a round: nothing comes through, and nobody is told."""

    async def story() -> None:
        async with study() as here:
            here.work["a"].may_train.clear()
            job = await here.submit()
            await until(lambda: here.work["b"].trained == 1)
            here.wires["a"].freeze(*ways)
            here.work["a"].may_train.set()
            await here.finished(job)
            assert here.wires["a"].opened_links == 2

    asyncio.run(story())


def test_a_slow_and_lossy_line(study: Started) -> None:
    """300 ms there and back, with jitter, and 2 % loss: it takes longer and nothing else."""

    async def story() -> None:
        async with study(Weather(latency=0.15, jitter=0.02, loss=0.02, retransmission=0.1)) as here:
            await here.finished(await here.submit())

    asyncio.run(story())


def test_a_throttled_line(study: Started) -> None:
    """At 100 kB/s an update takes longer than three heartbeats, which still come through beside it."""

    async def story() -> None:
        async with study() as here:
            here.wires["c"].weather = Weather(rate=100_000)
            await here.finished(await here.submit())
            assert here.wires["c"].opened_links == 1

    asyncio.run(story())


def test_connections_that_are_refused_for_a_while(study: Started) -> None:
    """Nothing listens at the coordinator's address; the sites come back when something does."""

    async def story() -> None:
        async with study() as here:
            job = await here.submit()
            await until(lambda: len(here.steps(job)) >= 2)
            for wire in here.wires.values():
                wire.refuse()
                wire.cut()
            await until(lambda: not any(here.present(name) for name in here.wires))
            for wire in here.wires.values():
                await wire.listen()
            await here.finished(job)

    asyncio.run(story())


def test_an_older_connection_speaks_up_after_the_site_is_back_on_a_newer_one(
    study: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the old one held arrives late and changes nothing: the newer stream stays, and each update counts once."""
    monkeypatch.setattr(attendance, "SILENCE_SECONDS", 3600.0)  # the coordinator still believes in the older one

    async def story() -> None:
        async with study() as here:
            wire = here.wires["a"]
            here.work["a"].may_train.clear()
            job = await here.submit()
            await until(lambda: here.work["b"].trained == 1)
            wire.freeze()
            here.work["a"].may_train.set()
            await until(lambda: wire.opened_links == 2 and here.work["b"].trained == 2)  # round 1 came over the newer
            wire.thaw()
            await here.finished(job)
            assert wire.opened_links == 2

    asyncio.run(story())


def test_a_coordinator_that_moved(study: Started) -> None:
    """It ends, and starts elsewhere on the same store; the name that sites dial leads there now."""

    async def story() -> None:
        async with study() as here:
            job = await here.submit()
            await until(lambda: here.work["b"].trained >= 1)
            await here.stop()
            await here.serve(free_port())
            for wire in here.wires.values():
                wire.target = ("127.0.0.1", here.port)
            await here.finished(job)

    asyncio.run(story())
