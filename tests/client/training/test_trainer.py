from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from client.training.protocol import CheckData, ComputeStatistics, Done, Failed
from client.training.trainer import Trainer
from federation.errors import LocalProtocolError, StorageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.client.training.conftest import Site


def play(home: Path, story: Callable[[Trainer], Awaitable[None]]) -> None:
    """Runs `story` with a trainer, which is closed afterwards."""

    async def whole() -> None:
        trainer = Trainer(home)
        try:
            await story(trainer)
        finally:
            await trainer.close()

    asyncio.run(whole())


def child(trainer: Trainer) -> int:
    """The process number of the running child."""
    assert trainer._process is not None
    return trainer._process.pid


@pytest.fixture
def stuck(site: Site) -> CheckData:
    """A request that never ends: its data come through a pipe into which nobody writes."""
    pipe = site.folder / "pipe.csv"
    os.mkfifo(pipe)
    registry = site.folder / "datasets.json"
    registry.write_text(registry.read_text().replace(str(site.csv), str(pipe)))
    return CheckData(site.subject)


async def started(trainer: Trainer) -> None:
    """Returns when the child runs."""
    while trainer._process is None:  # noqa: ASYNC110 - each turn of the loop brings the start on; nothing waits
        await asyncio.sleep(0)


def test_the_agents_end_loads_neither_torch_nor_pandas() -> None:
    """An agent stays small; only its child grows."""
    program = "import sys, client.training.trainer; print(sorted({'torch', 'pandas'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_one_child_answers_every_request(site: Site) -> None:
    """Statistics, training and evaluation in a real child, which keeps what it has read."""
    flat = site.write_model()

    async def story(trainer: Trainer) -> None:
        assert await trainer.ask(CheckData(site.subject)) == Done(seconds=pytest.approx(0, abs=60))
        first = child(trainer)
        assert isinstance(await trainer.ask(ComputeStatistics(site.subject, str(site.output))), Done)
        trained = await trainer.ask(site.train())
        assert isinstance(trained, Done)
        assert trained.length == flat.size
        assert np.frombuffer(site.output.read_bytes(), "<f4").size == flat.size
        assert isinstance(await trainer.ask(site.evaluate()), Done)
        assert child(trainer) == first

    play(site.folder, story)


def test_requests_wait_for_one_another(site: Site) -> None:
    """Two at once are answered each with its own answer."""

    async def story(trainer: Trainer) -> None:
        good, bad = await asyncio.gather(
            trainer.ask(CheckData(site.subject)),
            trainer.ask(site.quick),
        )
        assert isinstance(good, Done)
        assert isinstance(bad, Failed)

    play(site.folder, story)


def test_a_dead_child_is_replaced(site: Site) -> None:
    """A child that died between requests costs nothing but its start."""

    async def story(trainer: Trainer) -> None:
        answer = await trainer.ask(site.quick)
        first = child(trainer)
        assert trainer._process is not None
        os.kill(first, signal.SIGTERM)
        await trainer._process.wait()
        assert await trainer.ask(site.quick) == answer
        assert child(trainer) != first

    play(site.folder, story)


@pytest.mark.parametrize(
    ("number", "cause", "told"),
    [
        (signal.SIGKILL, "resources", "the trainer was killed, most likely because this machine ran out of memory"),
        (signal.SIGTERM, "internal", "the trainer ended with status -15; see "),
    ],
)
def test_a_child_that_dies_at_work_is_told_with_the_likely_cause(
    site: Site, stuck: CheckData, number: signal.Signals, cause: str, told: str
) -> None:
    """The system's kill points to memory; the next request finds a new child."""

    async def story(trainer: Trainer) -> None:
        asking = asyncio.create_task(trainer.ask(stuck))
        await started(trainer)
        os.kill(child(trainer), number)
        answer = await asking
        assert isinstance(answer, Failed)
        assert answer.cause == cause
        assert answer.message.startswith(told)

    play(site.folder, story)


def test_cancelling_the_work_answers_the_request(site: Site, stuck: CheckData) -> None:
    """The waiting request is answered `cancelled`, and the next one is served."""

    async def story(trainer: Trainer) -> None:
        asking = asyncio.create_task(trainer.ask(stuck))
        await started(trainer)
        await trainer.cancel()
        assert await asking == Failed("cancelled", "the work was cancelled")
        await trainer.cancel()
        answer = await trainer.ask(site.quick)
        assert isinstance(answer, Failed)
        assert answer.cause == "data"

    play(site.folder, story)


def test_cancelling_while_the_child_starts_is_not_forgotten(site: Site, stuck: CheckData) -> None:
    """A cancel that comes before there is a child to end still answers the request."""

    async def story(trainer: Trainer) -> None:
        asking = asyncio.create_task(trainer.ask(stuck))
        await asyncio.sleep(0)
        await trainer.cancel()
        assert await asking == Failed("cancelled", "the work was cancelled")

    play(site.folder, story)


def test_an_abandoned_request_never_answers_the_next_one(site: Site, stuck: CheckData) -> None:
    """Cancelling the awaiting task ends the child with its unread answer."""

    async def story(trainer: Trainer) -> None:
        asking = asyncio.create_task(trainer.ask(stuck))
        await started(trainer)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        answer = await trainer.ask(site.quick)
        assert isinstance(answer, Failed)
        assert "lungs" in answer.message

    play(site.folder, story)


def test_a_child_that_speaks_another_language_is_ended(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is no answer is this program's own fault and is not taken for one."""
    fake = site.folder / "python"
    fake.write_text("#!/bin/sh\nread line\necho hello\nread line\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))

    async def story(trainer: Trainer) -> None:
        with pytest.raises(LocalProtocolError, match="a line that is no answer"):
            await trainer.ask(CheckData(site.subject))
        assert trainer._process is not None
        assert trainer._process.returncode is not None

    play(site.folder, story)


def test_a_trainer_that_cannot_start_is_told(site: Site) -> None:
    """A home in which nothing can be written names itself."""
    (site.folder / "home").write_text("a file")

    async def story(trainer: Trainer) -> None:
        with pytest.raises(StorageError, match="the trainer cannot be started"):
            await trainer.ask(CheckData(site.subject))

    play(site.folder / "home", story)


def test_a_closed_trainer_starts_anew(site: Site) -> None:
    """Closing ends the child; asking again is allowed."""

    async def story(trainer: Trainer) -> None:
        answer = await trainer.ask(site.quick)
        await trainer.close()
        assert trainer._process is None
        assert await trainer.ask(site.quick) == answer

    play(site.folder, story)
