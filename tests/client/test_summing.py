"""What an agent performs under secure aggregation: durable before it returns, one vector an attempt, nothing left."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from client.session_events import Assigned, Event, MaskFailed, Record, StopUploads, UploadMasked
from client.summing import Sealing, Summing, Transfer
from client.vault import Vault
from federation import audit
from federation.audit import AuditLog, LogName
from federation.errors import RemoteProtocolError, StorageError
from federation.messages import StepKind, StepStart
from privacy.identity import MemberKeys
from privacy.secure_aggregation.rostersum import site_events as sums
from privacy.secure_aggregation.rostersum.durable import Durable, Family, Point
from privacy.secure_aggregation.rostersum.encoding import DeclineError
from tests.consortium import until
from tests.privacy.secure_aggregation.rostersum.conftest import TRAIN

JOB_HASH, CTX = b"j" * 32, b"c" * 32
STEP = StepStart("risk-1", 1, 0, StepKind.STATISTICS, 0, None, None, 8, 60.0)
VALUES = np.arange(TRAIN.words - 5, dtype="<f4") / 100


@dataclass
class Desk:
    """A site's performing half, with its vault and log, and a line that is as good as a test says."""

    folder: Path
    vault: Vault
    log: AuditLog
    events: list[Event] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    line: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        """Opens it, in a running loop."""
        key = MemberKeys.generate().protocol
        self.summing = Summing(
            self.folder / "updates", Sealing(key, self.vault, self.log), self.events.append, self.send
        )

    async def send(self, transfer: Transfer) -> None:
        """A transfer is begun."""
        self.transfers.append(transfer)
        if self.line is not None:
            await self.line()

    async def hold(self, values: np.ndarray = VALUES, update: str = "u1") -> None:
        """The trainer has written a result, which is then held."""
        work = sums.Work(JOB_HASH, sums.Assignment(1, TRAIN.plan_id, bytes(32), bytes(32)), TRAIN, "heart", bytes(32))
        self.summing.contributions.result(update).write_bytes(values.tobytes())
        await self.summing.hold(Assigned(STEP, work, update), rows=20, declared=1)

    async def masked(self, ctx: bytes = CTX) -> sums.Masked:
        """The masked vector of an attempt."""
        self.summing.perform(mask(ctx))
        await until(lambda: bool(self.events))
        event = self.events.pop()
        assert isinstance(event, sums.Masked)
        return event

    def files(self) -> list[str]:
        """What lies in the folder of updates."""
        return sorted(path.name for path in (self.folder / "updates").rglob("*") if path.is_file())


def mask(ctx: bytes = CTX, update: str = "u1") -> sums.Mask:
    """What the machine asks for."""
    return sums.Mask(JOB_HASH, ctx, update, TRAIN, 3, 1, b"\x01" * 32, ((-1, b"\x02" * 32),))


def upload(masked: sums.Masked) -> UploadMasked:
    """What the machine asks for next."""
    return UploadMasked("risk-1", sums.UploadPayload(JOB_HASH, masked.ctx, masked.y_hash, TRAIN.size))


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[[Callable[[Desk], Coroutine[None, None, None]]], None]]:
    """Plays a story at a desk, and closes it."""
    with ExitStack() as stack:

        def run(story: Callable[[Desk], Coroutine[None, None, None]]) -> None:
            vault = stack.enter_context(Vault(tmp_path / "vault.db", tmp_path / "vault.count"))
            log = stack.enter_context(AuditLog(tmp_path / audit.FILE, LogName("a", "site"), 1.0))

            async def played() -> None:
                desk = Desk(tmp_path, vault, log)
                await story(desk)
                await desk.summing.close()

            asyncio.run(played())

        yield run


Play = Callable[[Callable[[Desk], Coroutine[None, None, None]]], None]


def test_what_is_persisted_and_recorded_is_durable_on_return(play: Play, tmp_path: Path) -> None:
    """Before anything that follows is performed: a second reader sees it at once."""

    async def story(desk: Desk) -> None:
        durable = Durable(families=(Family("heart"),))
        desk.summing.perform(sums.Persist(Point.NOTE, durable))
        assert desk.vault.durable == durable
        desk.summing.perform(Record((("sent", b"one"), ("received", b"two"))))
        told = [(each.kind, each.content) for each in audit.entries(tmp_path / audit.FILE)][1:]
        assert told == [("sent", b"one"), ("received", b"two")]

    play(story)


def test_a_vault_that_does_not_take_a_change_is_told(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent must end: it is for whoever performs to heed."""

    def full(_vault: Vault, _work: sums.Persist) -> None:
        raise StorageError("vault.db has no room on its disk", fix="free disk space")

    async def story(desk: Desk) -> None:
        monkeypatch.setattr(Vault, "persist", full)
        with pytest.raises(StorageError, match="no room"):
            desk.summing.perform(sums.Persist(Point.NOTE, Durable()))

    play(story)


def test_a_held_update_is_masked_uploaded_and_erased(play: Play) -> None:
    """The payload that is sent is the one whose digest was told; afterwards nothing lies there."""

    async def story(desk: Desk) -> None:
        await desk.hold()
        masked = await desk.masked()
        assert desk.files() == sorted([masked.y_hash.hex(), "u1.result"])
        desk.summing.perform(upload(masked))
        await until(lambda: bool(desk.events))
        assert desk.events == [sums.UploadDone(JOB_HASH, CTX)]
        (transfer,) = desk.transfers
        assert transfer.keywords["job"] == "risk-1"  # type: ignore[attr-defined]  # a partial
        assert transfer.keywords["ref"].digest == masked.y_hash  # type: ignore[attr-defined]  # as above
        desk.summing.perform(sums.Abandon(JOB_HASH, CTX))
        desk.summing.perform(sums.Erase(JOB_HASH, "u1"))
        assert desk.files() == []

    play(story)


def test_a_result_that_is_not_finite_is_not_held(play: Play) -> None:
    """It is gone when the refusal is told."""

    async def story(desk: Desk) -> None:
        with pytest.raises(DeclineError):
            await desk.hold(np.full_like(VALUES, np.nan))
        assert desk.files() == []

    play(story)


def test_an_update_that_is_not_here_is_not_masked(play: Play) -> None:
    """The session is told, once, and no payload is left."""

    async def story(desk: Desk) -> None:
        desk.summing.perform(mask())
        await until(lambda: bool(desk.events))
        (failed,) = desk.events
        assert isinstance(failed, MaskFailed)
        assert "there is no update 'u1'" in failed.problem
        assert desk.files() == []

    play(story)


def test_an_abandoned_attempt_is_not_masked(play: Play) -> None:
    """Nothing is told of it, however it ends."""

    async def story(desk: Desk) -> None:
        await desk.hold()
        desk.summing.perform(mask())
        desk.summing.perform(sums.Abandon(JOB_HASH, CTX))
        desk.summing.perform(mask(b"d" * 32))
        await until(lambda: bool(desk.events))
        assert [each.ctx for each in desk.events if isinstance(each, sums.Masked)] == [b"d" * 32]
        assert len(desk.events) == 1

    play(story)


@pytest.mark.parametrize("stop", [StopUploads(), sums.Abandon(JOB_HASH, CTX)], ids=["the stream", "the attempt"])
def test_an_upload_ends_with_the_stream_and_with_its_attempt(play: Play, stop: StopUploads | sums.Abandon) -> None:
    """It is begun once however often it is asked for, and anew after a cut."""
    ended: list[bool] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def story(desk: Desk) -> None:
        await desk.hold()
        masked = await desk.masked()
        desk.line = forever
        for _ in range(2):
            desk.summing.perform(upload(masked))
        await until(lambda: bool(desk.transfers))
        desk.summing.perform(stop)
        await until(lambda: bool(ended))
        assert (len(desk.transfers), desk.events) == (1, [])
        desk.line = None
        desk.summing.perform(upload(masked))
        await until(lambda: bool(desk.events))
        assert desk.events == [sums.UploadDone(JOB_HASH, CTX)]

    play(story)


def test_an_upload_that_is_refused_is_told_and_not_said_to_be_done(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    """The coordinator's deadline ends its attempt."""

    async def refused() -> None:
        raise RemoteProtocolError("nobody waits for this payload")

    async def story(desk: Desk) -> None:
        await desk.hold()
        masked = await desk.masked()
        desk.line = refused
        with caplog.at_level(logging.WARNING, "parley.site"):
            desk.summing.perform(upload(masked))
            await until(lambda: "nobody waits for this payload" in caplog.text)
        assert desk.events == []

    play(story)


def test_what_an_ended_process_left_is_gone(play: Play, tmp_path: Path) -> None:
    """An update of an earlier process serves nobody."""
    (tmp_path / "updates" / "payloads").mkdir(parents=True)
    for name in ("u1.result", "payloads/left"):
        (tmp_path / "updates" / name).write_bytes(b"left")

    async def story(desk: Desk) -> None:
        assert desk.files() == []

    play(story)
