import asyncio
from pathlib import Path

import pytest

from client import agent as agents
from client.agent import Agent
from federation.messages import StepKind, StepStart
from tests.consortium import until

STEP = StepStart("risk-1", 1, 0, StepKind.STATISTICS, 0, None, None, 8, 60.0)


@pytest.mark.parametrize("training", [True, False], ids=["training", "transfer"])
def test_only_training_may_end_by_itself_when_nobody_waits_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    training: bool,  # noqa: FBT001 - drawn
) -> None:
    """A trainer costs seconds to start, so it gets a grace and is ended then; a transfer is let go at once."""
    monkeypatch.setattr(agents, "_GRACE_SECONDS", 0.2)
    ended: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def story() -> None:
        agent = Agent(tmp_path, None, None, None, None, object())
        agent._do(work(), STEP, training=training)
        await asyncio.sleep(0)
        agent._forget("")
        for _ in range(3):
            await asyncio.sleep(0)
        assert ended == ([] if training else [True])
        await until(lambda: ended == [True])

    asyncio.run(story())
