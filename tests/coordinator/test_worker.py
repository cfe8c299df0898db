"""One thread beside the event loop: in order, with its errors, and insisting on what a disk refuses."""

import asyncio
import threading

import pytest

from coordinator import worker
from coordinator.worker import Worker
from federation.errors import LocalProtocolError, StorageError


def test_work_is_done_in_the_order_in_which_it_was_asked_for() -> None:
    """All of it in one thread of its own, whatever waits for it."""

    async def story() -> list[tuple[int, str]]:
        single = Worker("sums")
        done: list[tuple[int, str]] = []
        asked = [single.do(lambda at=at: done.append((at, threading.current_thread().name))) for at in range(20)]
        await asyncio.gather(*asked)
        single.close()
        return done

    assert asyncio.run(story()) == [(at, "sums_0") for at in range(20)]


def test_an_error_is_that_of_the_work() -> None:
    """Who asked gets it, and the thread does the next piece."""

    async def story() -> int:
        single = Worker("store")

        def refused() -> None:
            raise LocalProtocolError("no such job")

        with pytest.raises(LocalProtocolError, match="no such job"):
            await single.do(refused)
        with pytest.raises(LocalProtocolError, match="no such job"):
            await single.insist("a job", refused)
        answer = await single.do(lambda: 7)
        single.close()
        return answer

    assert asyncio.run(story()) == 7


def test_what_a_disk_refuses_is_asked_again_until_it_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk costs time and loses nothing; the log tells each refusal, with what it was about."""
    monkeypatch.setattr(worker, "_RETRY_SECONDS", 0.0)

    async def story() -> int:
        single = Worker("store")
        tries = iter([StorageError("no room on the disk"), StorageError("still no room"), None])

        def stubborn() -> int:
            refused = next(tries)
            if refused is not None:
                raise refused
            return 7

        answer = await single.insist("step 3", stubborn)
        single.close()
        return answer

    assert asyncio.run(story()) == 7
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "cannot store step 3: no room on the disk; trying again in 0 s",
        "cannot store step 3: still no room; trying again in 0 s",
    ]


def test_closing_waits_for_what_was_asked() -> None:
    """What was handed over before is done when `close` returns."""
    done: list[int] = []
    may_go_on = threading.Event()

    async def story() -> None:
        single = Worker("store")
        first = asyncio.ensure_future(single.do(may_go_on.wait))
        second = asyncio.ensure_future(single.do(lambda: done.append(1)))
        await asyncio.sleep(0)  # both are handed over
        asyncio.get_running_loop().call_soon(may_go_on.set)
        await asyncio.sleep(0)
        single.close()
        assert done == [1]
        await asyncio.gather(first, second)

    asyncio.run(story())
