"""What the coordinator heard and said is in its audit log before anything follows from it, and convicts who lied."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from coordinator import sealed as sealed_sums
from coordinator import worker
from coordinator.evidence_log import EvidenceLog
from federation import audit
from federation.audit import AuditLog
from federation.errors import RemoteProtocolError, StorageError
from federation.messages import JobEnded, JobState, Refusal, Role, Sealed
from privacy.secure_aggregation.rostersum import coordinator_events as sums
from privacy.secure_aggregation.rostersum import logged, messages, proof
from privacy.secure_aggregation.rostersum.evidence import Suspicion
from privacy.secure_aggregation.rostersum.logged import Logged, Noted, Passed, Withheld
from privacy.secure_aggregation.rostersum.messages import (
    NOBODY,
    Code,
    Encaps,
    Epoch,
    Full,
    Keys,
    Open,
    Outcome,
    Ready,
    Refuse,
    Result,
    RoundStart,
    Seal,
    Share,
    Shares,
    Upload,
    sign,
)
from privacy.secure_aggregation.rostersum.proof import Rule
from privacy.secure_aggregation.rostersum.site_events import Send
from privacy.secure_aggregation.rostersum.terms import Terms
from tests.consortium import Consortium, Person, Running, until
from tests.coordinator.sealed_site import SealedSite
from tests.coordinator.test_sealed import Bench, answer_of
from tests.parley.commands.calls import run
from tests.privacy.secure_aggregation.rostersum.looped import job, key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from client.connection import Connection
    from coordinator.evidence_log import Entry
    from privacy.secure_aggregation.rostersum.messages import FromSite, Message, Relayed
    from privacy.secure_aggregation.rostersum.site_events import Effect

Serving = Callable[..., AbstractAsyncContextManager[Running]]
Text = Callable[..., str]

TERMS = job()
JOB = TERMS.job_hash
H, OTHER = b"\x11" * 32, b"\x22" * 32


def held(entries: tuple[Entry, ...]) -> list[Terms | Passed | Noted | None]:
    """What entries say."""
    return [logged.read(*entry) for entry in entries]


def kept(folder: Path) -> list[Terms | Passed | Noted | None]:
    """What the log in a coordinator's folder says."""
    return [logged.read(entry.kind, entry.content) for entry in audit.entries(folder / audit.FILE)]


def bare(message: Message) -> Message:
    """A message without what no signature covers."""
    return replace(message, seals=()) if isinstance(message, Upload | Full) else message


def ready(idx: int = 0, r: int = 1, model: bytes = H) -> Ready:
    """A READY as a site signs it."""
    return sign(Ready(JOB, 1, r, 1, model, H, idx, H), key(idx + 1))


def upload(y_hash: bytes = H) -> Upload:
    """An UPLOAD of site 0, with its seals."""
    return sign(Upload(H, 0, y_hash, H, (Seal(1, b"s" * 49), Seal(2, b"s" * 49))), key(1))


# -------------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    "message",
    [
        ready(),
        sign(Open(H, 0, OTHER, H), key(1)),
        sign(Keys(JOB, 1, 0, 7, H, b"", H), key(1)),
        sign(Encaps(JOB, 1, 0, 1, H, H, bytes(1088)), key(1)),
        sign(Refuse(JOB, 1, 0, 0, Code.E_PIN, NOBODY, 0, 0, 0), key(1)),
    ],
    ids=lambda message: message.TAG,
)
def test_what_a_site_signed_is_kept_whatever_became_of_it(message: FromSite | Relayed) -> None:
    """Taken or refused, once a round; without its signature it is nobody's word, and is not kept."""
    passed = Passed(Logged.RECEIVED, 0, message)
    event = sums.Received(0, message)
    assert held(EvidenceLog(TERMS).passed(event, ())) == [passed]
    log = EvidenceLog(TERMS)
    assert held(log.refused(event, RemoteProtocolError("late"))) == [passed]
    assert log.passed(event, ()) == ()
    forged = sums.Received(0, replace(message, signature=bytes(64)))
    assert log.refused(forged, RemoteProtocolError("unsigned")) == log.passed(forged, ()) == ()
    others = sums.Received(1, message)
    assert log.refused(others, RemoteProtocolError("another's")) == ()


def test_neither_shares_nor_seals_are_kept() -> None:
    """Of SHARES the digest; of an UPLOAD and a FULL what their signatures cover."""
    log, secret = EvidenceLog(TERMS), b"\x5a" * 33
    shares = sign(Shares(H, 0, (Share(1, secret),)), key(1))
    full = sign(Full(H, (upload().entry,), (Seal(1, b"s" * 49),)), key(0xC0))
    entries = (
        *log.passed(sums.Received(0, shares), ()),
        *log.passed(sums.Received(0, upload()), (sums.Send(1, full),)),
    )
    assert not any(secret in content or b"s" * 49 in content for _, content in entries)
    withheld, uploaded, said = held(entries)
    assert isinstance(withheld, Passed)
    assert isinstance(withheld.message, Withheld)
    assert uploaded == Passed(Logged.RECEIVED, 0, bare(upload()))
    assert said == Passed(Logged.SENT, 1, bare(full))


def test_what_the_coordinator_signs_is_kept_once_and_what_it_relays_not() -> None:
    """The same words to all sites, and again to one that comes back, are one entry; a FULL's seals make no other."""
    log, result = EvidenceLog(TERMS), sign(Result(H, Outcome.BURNED, bytes(32)), key(0xC0))
    keys = sign(Keys(JOB, 1, 0, 7, H, b"", H), key(1))
    effects = (*(sums.Send(idx, result) for idx in range(3)), sums.Send(1, keys))
    assert held(log.passed(sums.TimeUp(), effects)) == [Passed(Logged.SENT, 0, result)]
    assert log.passed(sums.Arrived(2), (sums.Send(2, result),)) == ()
    full = sign(Full(H, (upload().entry,), ()), key(0xC0))
    fulls = tuple(sums.Send(idx, replace(full, seals=(Seal(idx, b"s" * 16),))) for idx in range(3))
    assert held(log.passed(sums.TimeUp(), fulls)) == [Passed(Logged.SENT, 0, full)]


def test_the_terms_come_first() -> None:
    """They say whose keys sign what follows."""
    assert held(EvidenceLog(TERMS).passed(sums.Started(), ())) == [TERMS]


def test_a_contradiction_is_evidence_of_both_messages() -> None:
    """Once, however often the second is said; as words, and for whoever proves it later."""
    log, first, second = EvidenceLog(TERMS), upload(), upload(OTHER)
    event = sums.Received(0, second)
    why = sums.ContradictionError(0, Suspicion.TWO_UPLOADS, first, second)
    received, noted = held(log.refused(event, why))
    assert received == Passed(Logged.RECEIVED, 0, bare(second))
    assert isinstance(noted, Noted)
    assert (noted.job_hash, noted.evidence.kind, noted.evidence.about) == (JOB, Suspicion.TWO_UPLOADS, 0)
    assert [messages.decode(each) for each in noted.evidence.messages] == [bare(first), bare(second)]
    assert log.refused(event, why) == ()


def test_wrong_shares_are_told_of_without_being_shown() -> None:
    """They convict holder or dealer, and nobody knows which."""
    (noted,) = held(EvidenceLog(TERMS).passed(sums.TimeUp(), (sums.Suspect(1, frozenset({0, 2})),)))
    assert isinstance(noted, Noted)
    assert (noted.evidence.about, noted.evidence.messages) == (None, ())
    assert "shares of the seed of site 1 that [0, 2] held are wrong: theirs, or its own" in logged.words(noted)


def test_a_site_fills_no_disk() -> None:
    """What it may say in one round is bounded, whatever it signs; it may repeat itself, and is heard in the next."""
    log = EvidenceLog(TERMS)
    said = [sums.Received(0, ready(r=number)) for number in range(16 * 3 + 256)]
    for event in said:
        log.require_room(0, event.message, 1)
        assert len(log.refused(event, RemoteProtocolError("of no round"))) == 1
    one_more = sums.Received(0, ready(r=10_000))
    with pytest.raises(RemoteProtocolError, match=r"site 0 has said 304 different things in one round") as refused:
        log.require_room(0, one_more.message, 1)
    assert log.refused(one_more, refused.value) == ()
    log.require_room(0, said[0].message, 1)
    log.require_room(1, ready(1), 1)
    log.require_room(0, one_more.message, 2)
    assert len(log.passed(one_more, ())) == 1


# ------------------------------------------------------------------------------------------------- what is durable when


def test_all_that_waits_is_made_durable_together_before_any_of_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three messages, one write; only then is a word said. What comes after another event is not taken before it."""

    async def story() -> None:
        bench = Bench(tmp_path)
        async with bench.at_work() as summing:
            summing.seat(frozenset({"s0", "s1", "s2"}))
            await asyncio.sleep(0)
            for idx in range(3):
                summing.hear(f"s{idx}", messages.encode(ready(idx)))
            before = len(bench.posted)
            while len(bench.recorded) < 3:
                assert not any(isinstance(said, Refusal) for _, said in bench.posted)
                await asyncio.sleep(0)
            terms, epoch, heard = map(held, bench.recorded)
            assert terms == [TERMS]
            assert [type(each.message) for each in epoch if isinstance(each, Passed)] == [Epoch]
            assert heard == [Passed(Logged.RECEIVED, idx, ready(idx)) for idx in range(3)]
            await until(lambda: sum(isinstance(said, Refusal) for _, said in bench.posted[before:]) == 3)
            assert summing._waiting == 0

            monkeypatch.setattr(sealed_sums, "_MOST_AT_ONCE", 2)
            for idx in range(3):
                summing.hear(f"s{idx}", messages.encode(ready(idx, r=2)))
            summing.revoke("s2")
            summing.hear("s0", messages.encode(ready(0, r=3)))
            await until(lambda: len(bench.recorded) == 6)
            assert [len(entries) for entries in bench.recorded[3:]] == [2, 1, 1]

    asyncio.run(story())


@dataclass(eq=False)
class Liar(SealedSite):
    """A site that does all that it should, and then signs another UPLOAD of the same attempt."""

    lies: list[Upload] = field(default_factory=list)

    async def _perform(self, connection: Connection, effect: Effect) -> None:
        await super()._perform(connection, effect)
        if isinstance(effect, Send) and isinstance(effect.message, Upload):
            lie = sign(replace(effect.message, y_hash=OTHER), self.member.keys.protocol)
            self.lies.append(lie)
            self.outgoing.put_nowait(Sealed(self.job, messages.encode(lie)))


@pytest.fixture
def operator(consortium: Consortium) -> Person:
    """One who submits."""
    return consortium.member("op", Role.OPERATOR)


@pytest.fixture
def text(job_text: Text) -> str:
    """A job file under secure aggregation."""
    return job_text().replace('secure_aggregation = "plain"', "")


@pytest.fixture
def sites(consortium: Consortium, tmp_path: Path) -> tuple[SealedSite, SealedSite, Liar]:
    """Three hospitals, the last of which lies."""
    a, b = (SealedSite(consortium.member(name), tmp_path / "sites", answer_of(name)) for name in "ab")
    return a, b, Liar(consortium.member("c"), tmp_path / "sites", answer_of("c"))


def test_a_job_is_in_the_log_and_a_site_that_lied_is_proven_by_it(
    running: Serving, sites: tuple[SealedSite, SealedSite, Liar], text: str, operator: Person, tmp_path: Path
) -> None:
    """All that was heard and said; two UPLOADs that one key signed become a file, which convinces by itself.

    The lie changes nothing: the job ends as it would have. A restarted coordinator goes on with the same log.
    """
    liar = sites[-1]

    async def story() -> None:
        async with running() as hub:
            async with hub.attending(*sites):
                await hub.submit(operator, text)
                for each in sites:
                    ended = await each.until(JobEnded)
                    assert isinstance(ended, JobEnded)
                    assert ended.state is JobState.FINISHED, ended.reason
            with pytest.raises(StorageError, match="another process appends to"):
                AuditLog(tmp_path / audit.FILE, audit.LogName("hub", "coordinator"), 1.0)
        async with running():
            pass

    asyncio.run(story())
    verdict = audit.verify(tmp_path / audit.FILE)
    assert (verdict.whole, verdict.name) == (True, audit.LogName("hub", "coordinator"))
    entries = [each for each in kept(tmp_path) if each is not None]
    assert isinstance(entries[0], Terms)
    heard = [each.message for each in entries if isinstance(each, Passed) and each.way is Logged.RECEIVED]
    said = [each.message for each in entries if isinstance(each, Passed) and each.way is Logged.SENT]
    for each in sites:
        assert all(bare(message) in heard for message in each.said)
        assert all(bare(message) in said for message in each.told if not isinstance(message, Keys | Encaps))
    assert len({message.signature for message in said if not isinstance(message, Withheld)}) == len(said)
    assert not any(message.seals for message in (*heard, *said) if isinstance(message, Upload | Full))
    assert len([message for message in said if isinstance(message, RoundStart)]) == 5

    made = json.loads(run("audit", "proof", tmp_path / audit.FILE, "--to", tmp_path / "proofs", "--json").stdout)
    assert (made["unproven"], len(made["proofs"])) == (0, len(liar.lies)) == (0, 5)
    assert {(each["rule"], each["site"]) for each in made["proofs"]} == {("UPLOADS", "c")}
    for file in made["files"]:
        told = run("audit", "proof", "--check", file).stdout
        assert "PROVEN: one key signed two UPLOADs of one site in one attempt." in told


def test_a_seed_that_was_not_committed_to_is_proven(tmp_path: Path) -> None:
    """The machine refuses the OPEN; the log holds it beside the UPLOAD."""
    log, opened = EvidenceLog(TERMS), sign(Open(H, 0, OTHER, H), key(1))
    why = sums.ContradictionError(0, Suspicion.REFUSED, upload(), opened)
    entries = (
        *log.passed(sums.Started(), ()),
        *log.passed(sums.Received(0, upload()), ()),
        *log.refused(sums.Received(0, opened), why),
    )
    with AuditLog(tmp_path / audit.FILE, audit.LogName("hub", "coordinator"), 1.0) as file:
        file.extend(entries, 1.0)

    def material() -> Iterator[Terms | Message]:
        for each in kept(tmp_path):
            if isinstance(each, Terms):
                yield each
            elif isinstance(each, Passed) and not isinstance(each.message, Withheld):
                yield each.message

    found = proof.prove(material)
    (convicted,) = found.proofs
    assert (convicted.rule, convicted.signer.site) == (Rule.SEED, "s0")
    proof.check(convicted)


def test_nothing_leaves_while_the_log_does_not_take_it(
    running: Serving,
    sites: tuple[SealedSite, SealedSite, Liar],
    text: str,
    operator: Person,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No site hears a word of the job's sums, the view says what holds it back, and it goes on once there is room."""
    monkeypatch.setattr(worker, "_RETRY_SECONDS", 0.01)
    extend, refusing = AuditLog.extend, [True]

    def full(log: AuditLog, items: tuple[Entry, ...], at: float) -> None:
        if refusing:
            raise StorageError("the disk is full", fix="make room")
        extend(log, items, at)

    async def story() -> None:
        monkeypatch.setattr(AuditLog, "extend", full)
        async with running() as hub, hub.attending(*sites):
            job = await hub.submit(operator, text)
            conducted = hub.coordinator.conductor.job(job)
            await until(lambda: "its audit log: the disk is full (make room)" in conducted.run.view(0.0).reason)
            await until(lambda: all(each.steps for each in sites))
            assert not any(each.told for each in sites)
            refusing.clear()
            ended = await sites[0].until(JobEnded)
            assert isinstance(ended, JobEnded)
            assert ended.state is JobState.FINISHED

    asyncio.run(story())
