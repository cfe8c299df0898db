"""Sites' open streams over real mutual TLS: how they begin, who is let go, and what is refused while they go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import grpc.aio
import pytest

from client import policy
from client.session import Session
from client.session_events import Connected, Disconnect, Note, Received, SiteIdentity
from coordinator import attendance
from coordinator.attendance import Peer
from coordinator.records import SitePresence
from federation import codec
from federation.blobs import BlobRef
from federation.errors import IdentityError, ParleyError, RemoteProtocolError, StorageError
from federation.messages import (
    Contribution,
    FromCoordinator,
    Heartbeat,
    Hello,
    JobAccepted,
    Refusal,
    Welcome,
)
from tests.consortium import Consortium, Running, Site, soon, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

Serving = Callable[..., AbstractAsyncContextManager[Running]]
Sites = Callable[..., Site]

RULES = policy.parse(policy.example(plain=True), "policy.toml")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come at once, and nobody counts as silent."""
    monkeypatch.setattr(attendance, "HEARTBEAT_SECONDS", 0.01)


async def _told(site: Site, hub: Running) -> ParleyError:
    """Why the site's stream ended."""
    with pytest.raises(ParleyError) as ended:
        await soon(site.attend(hub))
    return ended.value


# ------------------------------------------------------------------------------------------------------- how it begins


def test_a_site_accepts_the_welcome(running: Serving, site: Sites, consortium: Consortium) -> None:
    """The proof over its own nonce satisfies a real session, and no other session's nonce."""

    async def story() -> Welcome:
        a = site("a")
        session, other = (
            Session(SiteIdentity(a.member.statement, consortium.root.public, consortium.nobody)) for _ in "ab"
        )
        (hello,) = session.receive(Connected(b"n" * 32, "0.1.0"), consortium.now)
        other.receive(Connected(b"m" * 32, "0.1.0"), consortium.now)
        a.hello = lambda **_: hello.message
        async with running() as hub, hub.attending(a):
            (welcome,) = a.heard
        assert session.receive(Received(welcome, RULES), consortium.now) == (Note("attending hub as a"),)
        assert session.attending
        (refused,) = other.receive(Received(welcome, RULES), consortium.now)
        assert isinstance(refused, Disconnect)
        assert "did not prove that it holds its protocol key" in refused.reason.problem
        return welcome

    welcome = asyncio.run(story())
    assert (welcome.protocol, welcome.statement, welcome.heartbeat_seconds) == (1, consortium.hub.statement, 5.0)


def test_another_version_of_the_protocol_is_refused_with_both_named(running: Serving, site: Sites) -> None:
    """The site's administrator reads what both speak and what to install."""

    async def story() -> None:
        a = site("a")
        a.hello = lambda: Hello(2, "9.9", a.member.statement, bytes(32), 1.0)
        async with running() as hub:
            refused = await _told(a, hub)
            assert isinstance(refused, RemoteProtocolError)
            assert refused.problem == "site a speaks version 2 of the protocol, the coordinator 1"
            assert refused.fix.startswith("install Parley ")
            assert not hub.coordinator.attendance.present("a")

    asyncio.run(story())


def test_a_hello_must_come_first_and_be_the_members_own(running: Serving, site: Sites) -> None:
    """Another word, none, and another member's statement in the hello are refused; nobody attends."""

    async def story() -> None:
        async with running() as hub:
            a, b = site("a"), site("b")
            a.hello = Heartbeat
            assert (await _told(a, hub)).problem == "a must say hello first, not Heartbeat"
            a.hello = lambda: Hello(1, "0.1.0", b.member.statement, bytes(32), 1.0)
            assert (await _told(a, hub)).problem == "site a presents another member's statement"

            async def nothing() -> AsyncIterator[bytes]:
                for _ in ():
                    yield b""

            async with hub.opened(a.member) as connection:
                call = connection._attend(nothing(), metadata=connection._metadata)
                with pytest.raises(grpc.aio.AioRpcError, match="a ended the stream before its first word"):
                    await soon(anext(aiter(call)))
            assert not hub.coordinator.attendance.present("a")

    asyncio.run(story())


def test_a_second_stream_replaces_the_first(running: Serving, site: Sites) -> None:
    """The older stream is told why it ends, and its end does not end the newer one."""

    async def story() -> None:
        a = site("a")
        b = Site(a.member, a.folder)
        async with running() as hub:
            first = asyncio.create_task(_told(a, hub))
            await soon(a.welcomed.wait())
            async with hub.attending(b):
                told = await first
                assert told.problem == "site a opened another stream"
                assert told.fix == "run one agent per site"
                assert hub.coordinator.attendance.present("a")
            await until(lambda: not hub.coordinator.attendance.present("a"))

    asyncio.run(story())


# -------------------------------------------------------------------------------------------------- while it goes on


def test_what_cannot_be_is_refused_and_the_stream_goes_on(running: Serving, site: Sites) -> None:
    """Bytes that are no message, a second hello, and words on a job that is none: each answered, nothing ended."""

    async def story() -> None:
        a = site("a")
        async with running() as hub, hub.opened(a.member) as connection:
            said: asyncio.Queue[bytes] = asyncio.Queue()
            said.put_nowait(codec.encode_from_site(a.hello()))

            async def requests() -> AsyncIterator[bytes]:
                while True:
                    yield await said.get()

            stream = aiter(connection._attend(requests(), metadata=connection._metadata))

            async def heard() -> FromCoordinator:
                while isinstance(message := codec.decode_from_coordinator(await soon(anext(stream))), Heartbeat):
                    pass
                return message

            assert isinstance(await heard(), Welcome)
            said.put_nowait(b"\xff\xff\xff")
            refusal = await heard()
            assert isinstance(refusal, Refusal)
            assert (refusal.about, refusal.problem[:18]) == ("a message", "malformed FromSite")
            said.put_nowait(codec.encode_from_site(a.hello()))
            assert await heard() == Refusal(
                "Hello", "site a says Hello where it should speak of a job", "Parley's developers", ""
            )
            said.put_nowait(codec.encode_from_site(JobAccepted("heart-1", bytes(32))))
            assert await heard() == Refusal(
                "JobAccepted", "there is no running job 'heart-1'", "you", "see: parley job list"
            )
            assert hub.coordinator.attendance.present("a")

    asyncio.run(story())


@pytest.mark.usefixtures("quick")
def test_heartbeats_come_and_say_who_attends(running: Serving, site: Sites) -> None:
    """The store learns with each of them who is here, and at the end that nobody is."""

    async def story() -> None:
        a = site("a")
        async with running() as hub, hub.attending(a):
            await a.until(Heartbeat, 3)
            await until(lambda: _seen(hub) == [("a", True, "attending")])

    async def after() -> None:
        async with running() as hub:
            assert _seen(hub) == [("a", False, "away")]

    asyncio.run(story())
    asyncio.run(after())


def _seen(hub: Running) -> list[tuple[str, bool, str]]:
    return [(each.name, each.connected, each.state) for each in hub.store.presence()]


@pytest.mark.usefixtures("quick")
def test_sites_that_were_here_before_a_crash_are_away_after_it(running: Serving) -> None:
    """A coordinator that was killed wrote no farewell; until a site comes back, it is not here."""

    async def story() -> None:
        async with running() as hub:
            hub.store.set_presence((SitePresence("a", connected=True, last_seen=1000.0, state="training"),))
        async with running() as hub:
            await until(lambda: _seen(hub) == [("a", False, "away")])
            assert [each.last_seen for each in hub.store.presence()] == [1000.0]

    asyncio.run(story())


@pytest.mark.usefixtures("quick")
def test_heartbeats_do_not_wait_for_the_store(
    running: Serving, site: Sites, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the disk refuses to note who attends, sites are not left without a word; afterwards it is noted."""

    async def story() -> None:
        a = site("a")
        async with running() as hub:
            taken = hub.store.set_presence

            def refused(_: Iterable[SitePresence]) -> None:
                raise StorageError("no room on the disk")

            monkeypatch.setattr(hub.store, "set_presence", refused)
            async with hub.attending(a):
                await a.until(Heartbeat, 3)
                assert _seen(hub) == []
                monkeypatch.setattr(hub.store, "set_presence", taken)
                await until(lambda: _seen(hub) == [("a", True, "attending")])

    asyncio.run(story())
    assert "cannot store who attends: no room on the disk" in caplog.text


# ------------------------------------------------------------------------------------------------------ who is let go


@pytest.mark.usefixtures("quick")
def test_a_silent_site_is_let_go(running: Serving, site: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that says nothing for so long is told so and no longer attends; it may come back."""

    async def story() -> None:
        a = site("a")
        async with running() as hub:
            stream = asyncio.create_task(_told(a, hub))
            await soon(a.welcomed.wait())
            assert hub.coordinator.attendance.present("a")
            monkeypatch.setattr(attendance, "SILENCE_SECONDS", -1.0)
            assert (await stream).problem == "nothing heard from a for -1 s"
            assert not hub.coordinator.attendance.present("a")
            monkeypatch.setattr(attendance, "SILENCE_SECONDS", 20.0)
            async with hub.attending(Site(a.member, a.folder)):
                pass

    asyncio.run(story())


@pytest.mark.usefixtures("quick")
def test_a_site_whose_membership_ends_is_let_go(running: Serving, site: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream does not outlive the membership under which it was opened."""

    async def story() -> None:
        a = site("a")
        async with running() as hub:
            stream = asyncio.create_task(_told(a, hub))
            await soon(a.welcomed.wait())
            monkeypatch.setattr(attendance.time, "time", lambda: float(a.member.statement.not_after))
            told = await stream
            assert isinstance(told, IdentityError)
            assert told.problem == "the membership of a has expired"
            assert not hub.coordinator.attendance.present("a")

    asyncio.run(story())


@pytest.mark.usefixtures("quick")
def test_a_site_that_does_not_read_is_let_go_and_no_longer_heard(
    running: Serving, site: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue fills to the limit and no further; it counts as away, and what it still says changes nothing."""
    monkeypatch.setattr(attendance, "_QUEUE", 10)
    heard: list[str] = []

    async def story() -> None:
        a = site("a")
        async with running() as hub, hub.opened(a.member) as connection:
            room = hub.coordinator.attendance
            monkeypatch.setattr(hub.coordinator.conductor, "heard", lambda name, _: heard.append(name))
            said: asyncio.Queue[bytes] = asyncio.Queue()
            said.put_nowait(codec.encode_from_site(a.hello()))

            async def requests() -> AsyncIterator[bytes]:
                while True:
                    yield await said.get()

            call = connection._attend(requests(), metadata=connection._metadata)
            await until(lambda: room.present("a"))
            peer = room._peers["a"]
            said.put_nowait(codec.encode_from_site(JobAccepted("heart-1", bytes(32))))
            await until(lambda: heard == ["a"])
            long = Refusal("a", "x" * 4000, "x" * 4000, "x" * 4000)
            for _ in range(10_000):  # as many as the network takes, and then the queue
                room.send("a", long)
                if peer.closed_for is not None:
                    break
                await asyncio.sleep(0.002)  # the network's turn
            assert str(peer.closed_for) == "site a does not read its stream"
            assert peer.outgoing.qsize() <= 1
            await until(lambda: not room.present("a"))
            said.put_nowait(codec.encode_from_site(JobAccepted("heart-1", bytes(32))))
            async with hub.attending(Site(a.member, a.folder)):  # whoever does read may come back
                assert room.present("a")
            assert heard == ["a"]
            call.cancel()

    asyncio.run(story())


def test_a_peer_that_was_closed_keeps_its_first_reason(consortium: Consortium) -> None:
    """Nothing is queued after the end, and a second reason does not replace the first."""
    peer = Peer(consortium.member("a").statement, asyncio.Queue(1), 0.0)
    peer.send(Heartbeat())
    peer.send(None)
    assert str(peer.closed_for) == "site a does not read its stream"
    roomy = Peer(peer.member, asyncio.Queue(3), 0.0)
    roomy.close(ParleyError("the coordinator is shutting down"))
    roomy.send(Heartbeat())
    assert (roomy.outgoing.qsize(), roomy.outgoing.get_nowait()) == (1, None)
    peer.close(ParleyError("the coordinator is shutting down"))
    assert str(peer.closed_for) == "site a does not read its stream"
    assert (peer.outgoing.qsize(), peer.outgoing.get_nowait()) == (1, None)


def test_a_revoked_site_that_does_not_read_is_not_heard(running: Serving, site: Sites, consortium: Consortium) -> None:
    """Its stream may take long to close; its words count for nothing from then on."""

    async def story() -> None:
        a = site("a")
        async with running() as hub, hub.attending(a):
            room = hub.coordinator.attendance
            peer = room._peers["a"]
            heard: list[object] = []

            class Recorder:
                def left(self, name: str, *, for_good: bool) -> None:
                    assert for_good
                    heard.append(name)

                def heard(self, *said: object) -> None:
                    heard.append(said)

            room.revoked(consortium.revoked(a.member), Recorder())
            assert heard == ["a"]
            room.hear(peer, Contribution("heart-1", 1, 0, BlobRef.of(b""), 1.0, 0.0), Recorder())
            assert heard == ["a"]

    asyncio.run(story())


def test_an_ending_coordinator_says_so(running: Serving, site: Sites) -> None:
    """Sites learn that it is no fault of theirs and that they come back by themselves."""

    async def story() -> None:
        a = site("a")
        async with running() as hub:
            stream = asyncio.create_task(_told(a, hub))
            await soon(a.welcomed.wait())
        told = await stream
        assert told.problem == "the coordinator is shutting down"
        assert told.fix == "nothing: sites come back by themselves"

    asyncio.run(story())


def test_operators_see_who_is_here_and_who_was(running: Serving, site: Sites) -> None:
    """A site that never came, one that attends, and one that went away."""

    async def story() -> None:
        a, b = site("a"), site("b")
        async with running() as hub:
            room, jobs = hub.coordinator.attendance, hub.coordinator.conductor
            never = room.view(b.member.statement, jobs)
            assert (never.connected, never.state, never.last_seen, never.trouble) == (
                False,
                "away",
                0.0,
                "not attending",
            )
            async with hub.attending(a):
                here = room.view(a.member.statement, jobs)
                assert (here.connected, here.state, here.trouble) == (True, "attending", "")
                assert here.last_seen > 0
            await until(lambda: not room.present("a"))
            gone = room.view(a.member.statement, jobs)
            assert (gone.connected, gone.state, gone.trouble) == (False, "away", "not attending")
            assert gone.last_seen >= here.last_seen

    asyncio.run(story())
