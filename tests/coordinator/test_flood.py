"""A member that asks for more than its share, over real mutual TLS, beside two that do a job."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from coordinator import limits
from coordinator.records import Outcome
from federation.blobs import BlobRef, BlobStore
from federation.errors import RemoteProtocolError, UnreachableError, WhoActs
from federation.messages import Contribution, JobEnded, JobState, ListJobs, Phase, Progress, Role, StepKind
from tests.consortium import PATIENCE, prepared, soon, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from federation.messages import FromSite
    from tests.consortium import Running, Site

    Serving = Callable[..., AbstractAsyncContextManager[Running]]
    Sites = Callable[..., Site]

_MILLION = 1_000_000


def test_a_million_tiny_messages_end_the_stream_of_who_sends_them_and_nothing_else(
    running: Serving, site: Sites, job_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender is told who must act, and coming back at once gives it no more; the others' job ends as it should."""
    monkeypatch.setattr(limits, "BURST", 500.0)
    monkeypatch.setattr(limits, "MESSAGES_PER_SECOND", 50.0)  # on a busy machine nobody can send a thousand
    read = 0

    async def story() -> None:
        nonlocal read
        a, b, c = site("a"), site("b"), site("c")
        async with running() as hub:
            operator = hub.consortium.member("op", Role.OPERATOR)
            heard = hub.coordinator.attendance.hear

            def counted(*arguments: object) -> None:
                nonlocal read
                read += 1
                heard(*arguments)

            monkeypatch.setattr(hub.coordinator.attendance, "hear", counted)
            async with hub.attending(a, b):
                job = await hub.submit(operator, job_text(rounds=20, minimum=2))
                sent = 0

                async def flood() -> AsyncIterator[FromSite]:
                    nonlocal sent
                    yield c.hello()
                    while sent < _MILLION:
                        sent += 1
                        yield Progress(job, 1, Phase.WORKING)

                began = asyncio.get_running_loop().time()
                for _ in range(3):
                    ended = await _told(lambda: _listens(hub, c, flood()))
                    assert ended.problem == "c sends more than 50 messages a second"
                    assert ended.who is WhoActs.SITE
                    assert "install this release of Parley at c" in str(ended)
                seconds = asyncio.get_running_loop().time() - began
                assert read < limits.BURST + limits.MESSAGES_PER_SECOND * (seconds + 1)
                assert sent < _MILLION
                over = await a.until(JobEnded)
                assert isinstance(over, JobEnded)
                assert over.state is JobState.FINISHED
            counted_sites = {
                tuple(share.site for share in step.shares if share.outcome is Outcome.COUNTED)
                for step in hub.store.steps(job)
            }
            assert counted_sites == {("a", "b")}

    asyncio.run(story())


async def _listens(hub: Running, site: Site, said: AsyncIterator[FromSite]) -> None:
    async with hub.opened(site.member) as connection:
        async for _ in connection.attend(said):
            pass


class _Crumbs(BlobStore):
    """A store that reads a byte at a time."""

    def chunks(self, ref: BlobRef, offset: int = 0) -> Iterator[bytes]:
        """The payload in as many chunks as it has bytes."""
        return (bytes([byte]) for chunk in super().chunks(ref, offset) for byte in chunk)


def test_an_upload_in_tiny_chunks_is_refused_and_goes_on_in_larger_ones(
    running: Serving, site: Sites, job_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came is kept; the site is told what it does, and its contribution is counted in the end."""
    monkeypatch.setattr(limits, "BURST", 200.0)
    a = site("a")
    b = site("b", lambda step: None if step.kind is StepKind.EVALUATE else prepared(step))

    async def story() -> None:
        async with running() as hub, hub.attending(a, b):
            job = await hub.submit(hub.consortium.member("op", Role.OPERATOR), job_text(rounds=1, minimum=2))
            await until(lambda: any(step.kind is StepKind.EVALUATE for step in b.steps))
            step = b.steps[-1]
            blobs = _Crumbs(b.folder / "crumbs")
            ref = blobs.put(prepared(step))
            async with hub.opened(b.member) as connection:
                refused = await _told(lambda: connection.upload(job, ref, blobs))
                assert refused.problem == "b sends more than 1000 messages a second"
                await _once_let(lambda: connection.upload(job, ref, BlobStore(b.folder / "crumbs")))
            b.outgoing.put_nowait(Contribution(job, step.step, step.attempt, ref, 1.0, 0.1))
            over = await a.until(JobEnded)
            assert isinstance(over, JobEnded)
            assert over.state is JobState.FINISHED

    asyncio.run(story())


async def _told(call: Callable[[], Awaitable[object]]) -> RemoteProtocolError:
    """What a call is refused for; who is writing when it ends may have to ask again to hear it."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await call()
            except UnreachableError:
                continue
            except RemoteProtocolError as refused:
                return refused


async def _once_let(call: Callable[[], Awaitable[object]]) -> None:
    """Calls until the caller has earned enough messages again, or an ended call has made room."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await call()
            except RemoteProtocolError:
                await asyncio.sleep(0.01)
            else:
                return


def test_a_member_holds_so_many_calls_open_and_no_more(
    running: Serving, site: Sites, job_text: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one too many is refused in words; ending one makes room; other members are not touched."""
    monkeypatch.setattr(limits, "CALLS", 3)

    async def story() -> None:
        silent = site("a", lambda _: None), site("b", lambda _: None)
        async with running() as hub, hub.attending(*silent):
            watcher, other = (hub.consortium.member(name, Role.OPERATOR) for name in ("op", "other"))
            job = await hub.submit(other, job_text(minimum=2))
            async with AsyncExitStack() as stack:
                for _ in range(3):
                    connection = await stack.enter_async_context(hub.opened(watcher))
                    await soon(anext(connection.watch(job)))
                async with hub.opened(watcher) as connection, hub.opened(other) as another:
                    with pytest.raises(RemoteProtocolError, match="op holds 3 calls open already"):
                        await connection.operate(ListJobs())
                    assert (await another.operate(ListJobs())).jobs
            async with hub.opened(watcher) as connection:
                await _once_let(lambda: connection.operate(ListJobs()))

    asyncio.run(story())
