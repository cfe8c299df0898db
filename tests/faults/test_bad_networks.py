"""Every fault of a network heals without an operator, and the job ends with the same rounds, each of them once."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest

from coordinator import attendance, conduct
from federation.messages import StepKind
from privacy.secure_aggregation.rostersum.coordinator import Patience
from tests.consortium import free_port, until
from tests.faults.network import Cut, End, Way, Weather
from tests.faults.outside import PLAIN, SEALED

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from tests.faults.conftest import Study

    Started = Callable[..., AbstractAsyncContextManager[Study]]

pytestmark = pytest.mark.usefixtures("quick")

UPDATE = 60_000
"""Bytes of a model, and of an update; masked, it has 20 more."""

either = pytest.mark.parametrize("privacy", [PLAIN, SEALED], ids=["plain", "rostersum"])


@either
def test_a_good_network_ends_the_job(study: Started, privacy: str) -> None:
    """What the other tests compare with; each site needs one connection."""

    async def story() -> None:
        async with study(privacy=privacy) as here:
            await here.finished(await here.submit())
            assert [wire.opened_links for wire in here.wires.values()] == [1, 1, 1]

    asyncio.run(story())


@either
@pytest.mark.parametrize("end", list(End))
@pytest.mark.parametrize("way", list(Way))
def test_connections_cut_in_the_middle_of_a_payload(study: Started, way: Way, end: End, privacy: str) -> None:
    """One site's first four connections end within its model or its update; transfers go on where they were cut."""

    async def story() -> None:
        async with study(privacy=privacy) as here:
            wire = here.wires["b"]
            await until(lambda: wire.opened_links == 1)
            wire.cut_next(*[Cut(UPDATE // 2, way, end)] * 3)
            wire.cut()
            await here.finished(await here.submit())
            assert wire.opened_links >= 5  # on a stalled machine silence may end one more

    asyncio.run(story())


@either
def test_all_connections_are_cut_at_once_in_every_round(study: Started, privacy: str) -> None:
    """As when the coordinator's router restarts."""

    async def story() -> None:
        async with study(privacy=privacy) as here:
            job = await here.submit()
            for number in range(1, 4):
                await until(lambda: here.work["c"].trained >= number)  # noqa: B023 - awaited within the turn
                for wire in here.wires.values():
                    wire.cut(End.RST)
            await here.finished(job)

    asyncio.run(story())


@either
@pytest.mark.parametrize("ways", [(Way.UP,), (Way.DOWN,), (Way.UP, Way.DOWN)], ids=["up", "down", "both"])
def test_a_half_open_connection_is_given_up_for_a_new_one(study: Started, ways: tuple[Way, ...], privacy: str) -> None:
    """A firewall forgot the connection in the middle of a round: nothing comes through, and nobody is told."""

    async def story() -> None:
        async with study(privacy=privacy) as here:
            here.work["a"].may_train.clear()
            job = await here.submit()
            await until(lambda: here.work["b"].trained == 1)
            here.wires["a"].freeze(*ways)
            here.work["a"].may_train.set()
            await here.finished(job)
            assert here.wires["a"].opened_links == 2

    asyncio.run(story())


@either
def test_a_slow_and_lossy_line(study: Started, privacy: str) -> None:
    """300 ms there and back, with jitter, and 2 % loss: it takes longer and nothing else."""

    async def story() -> None:
        async with study(Weather(latency=0.15, jitter=0.02, loss=0.02, retransmission=0.1), privacy) as here:
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


@either
def test_a_coordinator_that_moved(study: Started, privacy: str) -> None:
    """It ends, and starts elsewhere on the same store; the name that sites dial leads there now."""

    async def story() -> None:
        async with study(privacy=privacy) as here:
            job = await here.submit()
            await until(lambda: here.work["b"].trained >= 1)
            await here.stop()
            await here.serve(free_port())
            for wire in here.wires.values():
                wire.target = ("127.0.0.1", here.port)
            await here.finished(job)

    asyncio.run(story())


def test_a_survivor_set_below_the_minimum_aborts_with_nothing_opened(
    study: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site goes with half of its masked vector sent: those of the two others are there, and nobody opens them.

    The step is begun anew once it is back, and each update counts once.
    """
    monkeypatch.setattr(conduct, "Patience", partial(Patience, again=1.0, upload=2.0))

    async def story() -> None:
        async with study(privacy=SEALED, deadline=2.0) as here:
            wire = here.wires["c"]
            here.work["c"].may_train.clear()
            job = await here.submit()
            await until(lambda: here.work["b"].trained == 1)
            wire.cut_next(Cut(UPDATE // 2, Way.UP, End.RST))
            wire.cut()
            await until(lambda: wire.opened_links == 2 and here.present("c"))
            wire.refuse()
            here.work["c"].may_train.set()
            await until(lambda: masked(here, job) == {"a", "b"} and not here.present("c"))
            await until(lambda: here.attempt(job) == 1)
            assert [step.kind for step in here.steps(job)] == [StepKind.STATISTICS]
            assert opened(here) == {"a": 1, "b": 1, "c": 1}  # the statistics, in which all three were
            await wire.listen()
            await here.finished(job)

    asyncio.run(story())


def masked(here: Study, job: str) -> set[str]:
    """The sites whose masked update is at the coordinator, whole."""
    files = (here.folder / "sealed" / job / "2").glob("*/*")
    return {path.parent.name for path in files if path.stat().st_size == UPDATE + 20}


def opened(here: Study) -> dict[str, int]:
    """The last round that each site has let be opened."""
    known = {name: vault.durable for name, vault in here.vaults.items()}
    return {name: max(each.opened_r for each in (*held.jobs, *held.closed)) for name, held in known.items()}
