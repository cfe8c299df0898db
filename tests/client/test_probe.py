from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from client import probe
from client.probe import Presented, Stage, Walk, walk
from client.proxy import Proxy as Named
from privacy import identity
from tests.consortium import DAY, Consortium, free_port
from tests.faults.network import Inspector, Proxy, Wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from tests.consortium import Running

    Serving = Callable[..., AbstractAsyncContextManager[Running]]

TLS_NAME = identity.tls_name("hub", "heart-study")


@asynccontextmanager
async def _saying(answer: bytes) -> AsyncIterator[int]:
    """A port at which whoever connects is told this and no more, once it has spoken."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _walk(address: str, proxy: Named | None = None, seconds: float = 10.0) -> Walk:
    return await asyncio.to_thread(walk, address, TLS_NAME, proxy, seconds)


def test_a_walk_to_the_coordinator_arrives_at_its_certificate(running: Serving, consortium: Consortium) -> None:
    """Without a certificate of one's own; the root's signature, names and times are those of the coordinator."""

    async def story() -> None:
        async with running() as hub:
            walked = await _walk(hub.address)
            assert (walked.ended, walked.trouble, walked.resolved) == (Stage.ARRIVED, "", ("127.0.0.1",))
            assert walked.presented is not None
            assert walked.presented.signed_by(consortium.root.public)
            assert not walked.presented.signed_by(Consortium().root.public)
            assert (walked.presented.names, walked.presented.issuer) == ((TLS_NAME,), "heart-study")
            ends = (walked.presented.not_before, walked.presented.not_after)
            assert ends == (consortium.hub.statement.not_before, consortium.hub.statement.not_after)

    asyncio.run(story())


def test_a_walk_goes_through_a_proxy(running: Serving) -> None:
    """The proxy's name is resolved, and the proxy resolves the coordinator's."""

    async def story() -> None:
        async with running() as hub, Proxy(credentials="ann:pw", hosts={"hub.example.org": "127.0.0.1"}) as proxy:
            address = f"hub.example.org:{hub.port}"
            walked = await _walk(address, Named.parse(proxy.url("ann:pw"), "--proxy"))
            assert (walked.ended, walked.status) == (Stage.ARRIVED, 200)
            walked = await _walk(address, Named.parse(proxy.url(), "--proxy"))
            assert (walked.ended, walked.status, walked.presented) == (Stage.PROXY, 407, None)

    asyncio.run(story())


def test_a_walk_ends_where_it_ends() -> None:
    """Each layer that does not let it through is told from the others, in words."""

    async def story() -> None:
        unknown = await _walk("hub.invalid:443")
        assert unknown.ended is Stage.NAME
        assert unknown.trouble
        port = free_port()
        refused = await _walk(f"127.0.0.1:{port}")
        assert (refused.ended, refused.trouble) == (Stage.PORT, "Connection refused")
        async with _saying(b"SSH-2.0-OpenSSH_9.2\r\n") as other:
            no_tls = await _walk(f"127.0.0.1:{other}")
            assert (no_tls.ended, no_tls.trouble) == (Stage.TLS, "what answers does not speak TLS")
            no_proxy = await _walk("hub:1", Named("127.0.0.1", other, "--proxy"))
            assert (no_proxy.ended, no_proxy.trouble) == (Stage.PROXY, "its answer is not HTTP")
        async with _saying(b"") as silent:
            hung_up = await _walk("hub:1", Named("127.0.0.1", silent, "--proxy"))
            assert (hung_up.ended, hung_up.trouble) == (Stage.PROXY, "it hung up without an answer")
            assert (await _walk(f"127.0.0.1:{silent}")).ended is Stage.TLS

    asyncio.run(story())


def test_a_walk_does_not_wait_for_ever(running: Serving) -> None:
    """A firewall that swallows everything after the connection was made is told as a time-out."""

    async def story() -> None:
        async with running() as hub, Wire(("127.0.0.1", hub.port)) as wire:
            wire.hold_new()
            walked = await _walk(wire.address, seconds=0.2)
            assert (walked.ended, walked.trouble) == (Stage.TLS, "no answer within 0.2 s")

    asyncio.run(story())


def _shown(inspector: Inspector, name: str) -> Presented:
    """What a walk sees when an inspector is on the way."""

    async def story() -> Walk:
        async with _saying(b"") as port, Wire(("127.0.0.1", port), inspector=inspector) as wire:
            return await asyncio.to_thread(walk, wire.address, name, None)

    presented = asyncio.run(story()).presented
    assert presented is not None
    return presented


def _coordinators(certificate: bytes) -> Presented:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    return Presented.parse(x509.load_pem_x509_certificate(certificate).public_bytes(Encoding.DER))


def test_an_inspector_of_tls_is_told_from_another_server(consortium: Consortium) -> None:
    """It shows the coordinator's very name; whoever shows another name is just not the coordinator."""
    root, inspector = consortium.root.public, Inspector("Zealous Firewalls")
    opened = probe.judged(_shown(inspector, TLS_NAME), "hub:1", TLS_NAME, root, consortium.now)
    assert opened is not None
    assert "TLS to hub:1 is opened on the way" in opened.problem
    assert "'Zealous Firewalls Inspection CA (Zealous Firewalls)'" in opened.problem
    assert "exempt hub:1 from TLS inspection" in opened.fix
    other = probe.judged(_shown(inspector, "www.example.org"), "hub:1", TLS_NAME, root, consortium.now)
    assert other is not None
    assert "does not show a certificate of this consortium's root, but one for www.example.org" in other.problem
    assert "check the address" in other.fix


def test_a_consortium_that_was_founded_anew_is_no_inspector(consortium: Consortium) -> None:
    """The name is right and the root is another of the same name: the way out is a new invitation."""
    shown = _coordinators(Consortium().hub.certificate)
    told = probe.judged(shown, "hub:1", TLS_NAME, consortium.root.public, consortium.now)
    assert told is not None
    assert told.problem.endswith(f"but one for {TLS_NAME} that was made by 'heart-study'")
    assert "join again with a new invitation" in told.fix


@pytest.mark.parametrize(
    ("name", "days", "problem", "fix"),
    [
        ("hub2.heart-study.parley", 0, "for hub.heart-study.parley, not for hub2.heart-study.parley", "dial the coord"),
        (TLS_NAME, -2, "the coordinator's certificate begins on", "set this machine's clock"),
        (TLS_NAME, 400, "the coordinator's certificate expired on", "check this machine's clock"),
    ],
)
def test_a_certificate_of_the_root_may_still_be_the_wrong_one(
    consortium: Consortium, name: str, days: int, problem: str, fix: str
) -> None:
    """Another name, not yet valid, or no longer."""
    shown = _coordinators(consortium.hub.certificate)
    told = probe.judged(shown, "hub:1", name, consortium.root.public, consortium.now + days * DAY)
    assert told is not None
    assert problem in told.problem
    assert fix in told.fix


def test_the_coordinators_certificate_is_accepted(consortium: Consortium) -> None:
    """Nothing is wrong with it."""
    shown = _coordinators(consortium.hub.certificate)
    assert probe.judged(shown, "hub:1", TLS_NAME, consortium.root.public, consortium.now) is None


def test_a_stranger_that_is_gone_when_looked_for_is_still_told_of(consortium: Consortium) -> None:
    """TLS did not accept it a moment ago; now nothing answers."""
    told = probe.stranger(f"127.0.0.1:{free_port()}", TLS_NAME, consortium.root.certificate_pem, None)
    assert "does not show a certificate of this consortium's root" in told.problem
