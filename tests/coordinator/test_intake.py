import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from coordinator import intake as intakes
from coordinator.intake import Intake
from federation.blobs import BlobRef, BlobStore, Incoming
from federation.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

CONTENT = b"the whole payload"
REF = BlobRef.of(CONTENT)
_PATIENCE = 60.0


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    """An empty store."""
    return BlobStore(tmp_path)


class Slow:
    """A transfer whose chunks are added only when the test says so."""

    def __init__(self, incoming: Incoming) -> None:
        self.adding, self.going_on = threading.Event(), threading.Event()
        self._append: Callable[[bytes], None] = incoming.append
        self.incoming = mock.Mock(wraps=incoming, append=self._wait)

    def _wait(self, chunk: bytes) -> None:
        self.adding.set()
        assert self.going_on.wait(_PATIENCE)
        self._append(chunk)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk is long enough for a thread."""
    monkeypatch.setattr(intakes, "_SMALL", 0)


@pytest.mark.parametrize("small", [8, 9])
def test_what_is_soon_added_is_added_at_once(store: BlobStore, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    """A chunk that takes less time than handing it to a thread stays in the event loop's."""
    monkeypatch.setattr(intakes, "_SMALL", small)
    incoming, threads = store.receive(REF), list[int]()

    def append(chunk: bytes) -> None:
        threads.append(threading.get_ident())
        Incoming.append(incoming, chunk)

    monkeypatch.setattr(incoming, "append", append)
    asyncio.run(Intake(incoming).append(CONTENT[:9]))
    assert (threads == [threading.get_ident()]) == (small == 9)


@pytest.mark.usefixtures("beside")
def test_a_payload_goes_through_it_chunk_by_chunk(store: BlobStore) -> None:
    """What it finishes is the payload, under its name; its offset says how much is here."""

    async def story() -> None:
        intake = Intake(store.receive(REF))
        await intake.append(CONTENT[:9])
        assert intake.offset == 9
        await intake.append(memoryview(CONTENT)[9:])
        assert intake.finish() == store.path(REF)

    asyncio.run(story())
    assert store.get(REF) == CONTENT


@pytest.mark.usefixtures("beside")
def test_what_a_transfer_refuses_it_refuses(store: BlobStore) -> None:
    """An error in the other thread is raised to the caller."""
    with pytest.raises(RemoteProtocolError, match="went on past its end"):
        asyncio.run(Intake(store.receive(REF)).append(CONTENT + b"!"))


@pytest.mark.usefixtures("beside")
def test_a_chunk_that_has_come_is_kept_though_its_call_is_cut_off(store: BlobStore) -> None:
    """The call is cancelled while the chunk is being added: the site goes on behind it."""
    slow = Slow(store.receive(REF))

    async def story() -> None:
        intake = Intake(slow.incoming)
        call = asyncio.create_task(intake.append(CONTENT[:9]))
        await asyncio.to_thread(slow.adding.wait, _PATIENCE)
        call.cancel()
        await asyncio.sleep(0)
        assert not call.done()
        slow.going_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        intake.pause()

    asyncio.run(story())
    assert store.receive(REF).offset == 9


@pytest.mark.usefixtures("beside")
def test_whoever_takes_an_upload_over_waits_for_the_chunk_that_is_being_added(store: BlobStore) -> None:
    """A pause from the event loop comes after the chunk, not into the middle of it."""
    slow = Slow(store.receive(REF))

    async def story() -> None:
        intake = Intake(slow.incoming)
        adding = asyncio.create_task(intake.append(CONTENT[:9]))
        await asyncio.to_thread(slow.adding.wait, _PATIENCE)
        pausing = asyncio.create_task(asyncio.to_thread(intake.pause))
        done, _ = await asyncio.wait([pausing], timeout=0.1)
        assert not done
        slow.going_on.set()
        await asyncio.gather(adding, pausing)

    asyncio.run(story())
    assert store.receive(REF).offset == 9
