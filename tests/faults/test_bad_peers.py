"""A peer with a real identity breaks the protocol in mid-round: it is told so, and the others' round commits.

What each layer refuses is tested where it stands, and not again here:

| what a bad peer does | refused in |
| --- | --- |
| another version's hello, another word before it, another member's statement | tests/coordinator/test_attendance.py |
| bytes that are no message; a second hello; a stream beside its first | tests/coordinator/test_attendance.py |
| does not read its stream; falls silent | tests/coordinator/test_attendance.py |
| more messages or calls than its share; a million tiny messages | tests/coordinator/test_flood.py, test_limits.py |
| an upload unnamed, truncated, corrupted, of another digest, longer than declared | tests/coordinator/test_service.py |
| an upload of another length, of no job, after its answer, twice on a stream | tests/coordinator/test_service.py |
| the same upload on two streams | tests/coordinator/test_service.py |
| a contribution that it has not uploaded; NaN and infinite values | tests/coordinator/test_conduct.py |
| every single event of a round and a job that cannot be | tests/coordinator/test_round.py, test_run.py |
| any bytes, any text, any order of events | tests/fuzz/ |
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from coordinator.records import Outcome
from federation import codec
from federation.blobs import BlobRef, BlobStore
from federation.errors import RemoteProtocolError, WhoActs
from federation.messages import (
    Contribution,
    DeclineCause,
    Declined,
    JobAccepted,
    JobEnded,
    JobState,
    Phase,
    Progress,
    Refusal,
    Role,
    StepEnded,
    StepKind,
    StepStart,
    UploadOpen,
)
from federation.proto import parley_pb2
from federation.vector import from_safetensors
from tests.consortium import prepared, soon, until
from tests.faults.bad_peer import BadPeer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from federation.messages import FromSite
    from tests.consortium import Consortium, Running, Site

    Serving = Callable[..., AbstractAsyncContextManager[Running]]
    Started = Callable[[], AbstractAsyncContextManager["Ward"]]

_JOB = """
format = 1
name = "heart"

[task]
kind = "tabular"
target = "binary"

[data]
dataset = "heart"
label = "disease"
columns = [{ name = "age", kind = "numeric", range = [0, 120] }]

[model]
name = "logistic_regression"

[strategy]
name = "fedavg"

[rounds]
maximum = 1

[cohort]
minimum_sites = 3
quorum = 2
deadline_seconds = 600

[privacy]
secure_aggregation = "plain"
"""
UPDATE = 8
"""Bytes of a contribution to the training step."""
ANY_UPDATE = BlobRef(bytes(32), UPDATE)


@dataclass(eq=False)
class Ward:
    """A job in its training step: the honest `a` has contributed, `b` holds back, and the third site is `peer`."""

    hub: Running
    honest: tuple[Site, Site]
    peer: BadPeer
    first: Contribution
    step: StepStart

    async def goes_on(self, peer: BadPeer | None = None) -> None:
        """The bad peer steps aside, and the round, with both honest updates and none of its own, ends the job."""
        peer = peer or self.peer
        peer.decline(self.step)
        await self.release()
        peer.decline(await peer.hear(StepStart))  # the evaluation
        await self.ends(Outcome.DECLINED)

    async def counts_its_first(self, peer: BadPeer) -> None:
        """The round commits with all three updates, of which all are the same: nothing else was added to the model."""
        await self.release()
        evaluation = await peer.hear(StepStart)
        assert evaluation.model is not None
        model = self.hub.coordinator.conductor.job(self.step.job).blobs.get(evaluation.model)
        assert from_safetensors(model)[1].tobytes() == prepared(self.step)
        peer.decline(evaluation)
        await self.ends(Outcome.COUNTED)

    async def release(self) -> None:
        """The second honest site, which held its update back, sends it."""
        site = self.honest[1]
        site.answer = prepared
        blobs = BlobStore(site.folder / site.name)
        payload = blobs.put(prepared(self.step))
        async with self.hub.opened(site.member) as connection:
            await soon(connection.upload(self.step.job, payload, blobs))
        site.outgoing.put_nowait(Contribution(self.step.job, self.step.step, self.step.attempt, payload, 1.0, 0.1))

    async def ends(self, became: Outcome) -> None:
        """The job ends as it should, and of the training step the bad peer's part became this."""
        for site in self.honest:
            over = await site.until(JobEnded)
            assert isinstance(over, JobEnded)
            assert over.state is JobState.FINISHED, over.reason
            assert not any(isinstance(message, Refusal) for message in site.heard)
        steps = self.hub.store.steps(self.step.job)
        assert [record.step for record in steps] == [1, 2, 3]
        shares = {share.site: share.outcome for share in steps[1].shares}
        assert shares == {"a": Outcome.COUNTED, "b": Outcome.COUNTED, "c": became}


@pytest.fixture
def ward(running: Serving, site: Callable[..., Site], consortium: Consortium) -> Started:
    """Brings a job to its training step; its statistics are those of all three."""

    @asynccontextmanager
    async def brought() -> AsyncIterator[Ward]:
        a, b = site("a"), site("b", lambda step: None if step.kind is StepKind.TRAIN else prepared(step))
        async with running() as hub, hub.attending(a, b), BadPeer.attending(consortium.member("c"), hub) as peer:
            job = await hub.submit(consortium.member("op", Role.OPERATOR), _JOB)
            await peer.accept()
            first = await peer.contribution(await peer.hear(StepStart))
            peer.say(first)
            step = await peer.hear(StepStart)
            assert (step.job, step.kind, step.length) == (job, StepKind.TRAIN, UPDATE)
            run = hub.coordinator.conductor.job(job).run
            await until(lambda: not run.expects("a", ANY_UPDATE))
            yield Ward(hub, (a, b), peer, first, step)

    return brought


# ------------------------------------------------------------------------------------------- words that cannot be

ANSWERED = "site c has answered this step already; its first answer stands"
SITE, DEVELOPERS = "the site's administrator", "Parley's developers"
SAME_RELEASE = "install the same release of Parley on both sides"


@dataclass(frozen=True)
class Wrong:
    """A word that cannot be said now, and the refusal that answers it."""

    said: Callable[[Ward], FromSite | bytes]
    problem: str
    who: str
    fix: str


def _answer(ward: Ward, **changes: object) -> Contribution:
    step = ward.step
    return replace(Contribution(step.job, step.step, step.attempt, BlobRef.of(prepared(step)), 1.0, 0.1), **changes)


def _raw(ward: Ward, **changes: object) -> bytes:
    """A contribution with values that no site of ours could send."""
    wire = parley_pb2.FromSite.FromString(codec.encode_from_site(_answer(ward)))
    for name, value in changes.items():
        setattr(wire.contribution, name, value)
    return wire.SerializeToString()


WRONG: dict[str, Wrong] = {
    "another length": Wrong(
        lambda ward: _answer(ward, payload=BlobRef(bytes(32), UPDATE + 4)),
        "site c contributed 12 bytes where this step takes 8",
        DEVELOPERS,
        "update Parley at c to the coordinator's release",
    ),
    "no upload": Wrong(
        lambda ward: _answer(ward, payload=BlobRef(b"n" * 32, UPDATE)),
        "site c contributed payload 6e6e6e6e6e6e to job JOB without having uploaded it",
        SITE,
        "upload a contribution before naming it",
    ),
    "another site's payload": Wrong(
        _answer,
        "site c contributed payload PAYLOAD to job JOB without having uploaded it",
        SITE,
        "upload a contribution before naming it",
    ),
    "a step that was never asked": Wrong(
        lambda ward: Declined(ward.step.job, ward.step.step + 1, 0, DeclineCause.DATA),
        "site c answered step 3 of job JOB, which was never asked",
        DEVELOPERS,
        "",
    ),
    "an attempt that was never made": Wrong(
        lambda ward: Declined(ward.step.job, ward.step.step, 7, DeclineCause.DATA),
        "site c answered step 2 of job JOB, which was never asked",
        DEVELOPERS,
        "",
    ),
    "another job": Wrong(
        lambda ward: _answer(ward, job="heart-9"), "there is no running job 'heart-9'", "you", "see: parley job list"
    ),
    "another job file": Wrong(
        lambda ward: JobAccepted(ward.step.job, bytes(32)),
        "site c accepted another job file than job JOB's",
        DEVELOPERS,
        "",
    ),
    "a later release's message": Wrong(
        lambda _: b"\xfa\x3e\x02hi", "FromSite carries no message known here", DEVELOPERS, SAME_RELEASE
    ),
    "the coordinator's words": Wrong(
        lambda ward: codec.encode_from_coordinator(ward.step),
        "malformed JobRefused: a refusal must say why",
        DEVELOPERS,
        SAME_RELEASE,
    ),
    "a weight of NaN": Wrong(
        lambda ward: _raw(ward, weight=float("nan")),
        "malformed Contribution: a weight must be a positive number of at most 1e15",
        DEVELOPERS,
        SAME_RELEASE,
    ),
    "an infinite weight": Wrong(
        lambda ward: _raw(ward, weight=float("inf")),
        "malformed Contribution: a weight must be a positive number of at most 1e15",
        DEVELOPERS,
        SAME_RELEASE,
    ),
    "no weight": Wrong(
        lambda ward: _raw(ward, weight=0.0),
        "malformed Contribution: a weight must be a positive number of at most 1e15",
        DEVELOPERS,
        SAME_RELEASE,
    ),
    "a step beyond counting": Wrong(
        lambda ward: _raw(ward, step=2**64 - 1),
        "malformed Contribution: a count must be a whole number from 0 to 2^63 - 1",
        DEVELOPERS,
        SAME_RELEASE,
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_word_that_cannot_be_is_refused_and_the_round_commits(ward: Started, case: str) -> None:
    """The peer learns what was wrong, who must act and how; its stream stays open, and two updates make the model."""
    wrong = WRONG[case]

    async def story() -> None:
        async with ward() as at:
            at.peer.say(wrong.said(at))
            refusal = await at.peer.next()
            assert isinstance(refusal, Refusal)
            payload = BlobRef.of(prepared(at.step)).hex[:12]
            problem = wrong.problem.replace("JOB", at.step.job) if "malformed" not in wrong.problem else wrong.problem
            assert refusal.problem == problem.replace("PAYLOAD", payload)
            assert (refusal.who, refusal.fix) == (wrong.who, wrong.fix)
            await at.goes_on()

    asyncio.run(story())


def test_a_word_of_no_consequence_gets_no_answer(ward: Started) -> None:
    """Progress of a step that is over, or that never was, is for people; nothing waits for it, and nothing comes."""

    async def story() -> None:
        async with ward() as at:
            for step in (1, 2**62):
                at.peer.say(Progress(at.step.job, step, Phase.UPLOADING))
            at.peer.say(b"\xff")
            refusal = await at.peer.next()
            assert isinstance(refusal, Refusal)
            assert refusal.problem == "malformed FromSite: its 1 bytes are not that protobuf message"
            await at.goes_on()

    asyncio.run(story())


# ------------------------------------------------------------------------------------------ duplicates and replays


def test_a_contribution_said_ten_times_counts_once(ward: Started) -> None:
    """The same words again say nothing new; other words after the first are refused, and the first stand."""

    async def story() -> None:
        async with ward() as at:
            first = await at.peer.contribution(at.step)
            other = replace(first, payload=BlobRef(bytes(32), first.payload.length))
            for contribution in (*[first] * 10, other, replace(first, weight=1e15)):
                at.peer.say(contribution)
            for _ in range(2):
                refusal = await at.peer.next()
                assert refusal == Refusal("Contribution", ANSWERED, DEVELOPERS, "")
            await at.counts_its_first(at.peer)

    asyncio.run(story())


def test_a_second_stream_does_not_count_twice(ward: Started) -> None:
    """Whoever comes back under the same name has answered already, and the stream that it left is told why it ends."""

    async def story() -> None:
        async with ward() as at:
            first = await at.peer.contribution(at.step)
            other = replace(first, payload=BlobRef(bytes(32), first.payload.length))
            at.peer.say(first)
            run = at.hub.coordinator.conductor.job(at.step.job).run
            await until(lambda: not run.expects("c", ANY_UPDATE))
            async with BadPeer.attending(at.peer.member, at.hub) as again:
                told = await at.peer.ended()
                assert (told.problem, told.fix) == ("site c opened another stream", "run one agent per site")
                await again.accept()
                for contribution in (first, other):
                    again.say(contribution)
                assert await again.next() == Refusal("Contribution", ANSWERED, DEVELOPERS, "")
                await at.counts_its_first(again)

    asyncio.run(story())


def test_an_earlier_step_said_again_is_over(ward: Started) -> None:
    """A site that was cut off may not know better: it is told that the step has ended, and nothing counts twice."""

    async def story() -> None:
        async with ward() as at:
            for _ in range(3):
                at.peer.say(at.first)
                assert await at.peer.next() == StepEnded(at.step.job, 1, counted=False)
            await at.goes_on()

    asyncio.run(story())


# --------------------------------------------------------------------------------------------------------- too large


def test_a_message_beyond_all_size_ends_its_stream_and_no_other(ward: Started) -> None:
    """GRPC takes no more than 3 MiB; the peer is told how much was too much, may come back, and is asked again."""

    async def story() -> None:
        async with ward() as at:
            at.peer.say(bytes(3 * 1024 * 1024 + 1))
            told = await at.peer.ended()
            assert isinstance(told, RemoteProtocolError)
            assert told.who is WhoActs.DEVELOPERS
            assert "RESOURCE_EXHAUSTED" in told.problem
            assert "3145729 vs. 3145728" in told.problem
            async with BadPeer.attending(at.peer.member, at.hub) as again:
                await again.accept()
                step = await again.hear(StepStart)
                assert replace(step, deadline_seconds=1.0) == replace(at.step, deadline_seconds=1.0)
                await at.goes_on(again)

    asyncio.run(story())


@pytest.mark.parametrize("content", [b"", bytes(2 * 1024 * 1024 + 1)], ids=["empty", "oversized"])
def test_a_chunk_of_another_size_is_refused_and_the_round_commits(ward: Started, content: bytes) -> None:
    """A chunk of nothing would keep a call open for ever, and one above 2 MiB no honest site sends."""

    async def story() -> None:
        async with ward() as at:
            chunk = parley_pb2.UploadRequest(upload_chunk=parley_pb2.UploadChunk(content=content))
            told = await at.peer.upload(UploadOpen(at.step.job, ANY_UPDATE), chunk.SerializeToString())
            assert isinstance(told, RemoteProtocolError)
            assert told.problem == "malformed UploadChunk: a chunk must have 1 byte to 2 MiB"
            assert (told.who, told.fix) == (WhoActs.DEVELOPERS, SAME_RELEASE)
            await at.goes_on()

    asyncio.run(story())
