"""A member's line: what fails at the other end, or on the way, is told here in words that say who must act."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from client.connection import Connection, Line, _meaning
from client.proxy import Proxy
from federation import codec
from federation.blobs import BlobRef, BlobStore
from federation.errors import IdentityError, ParleyError, RemoteProtocolError, StorageError, UnreachableError, WhoActs
from federation.messages import Heartbeat, ListJobs, Role, UploadChunk, UploadOffset
from federation.refusals import DETAIL, told
from tests.consortium import Consortium, Person, Running, Site, free_port, soon

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

Serving = Callable[..., AbstractAsyncContextManager[Running]]

NOWHERE = Line("hub.example.org:8443", "hub.heart-study.parley", b"", b"", b"")


@pytest.fixture
def operator(consortium: Consortium) -> Person:
    """One who asks."""
    return consortium.member("op", Role.OPERATOR)


def _error(code: grpc.StatusCode, details: str, *trailing: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)


# ------------------------------------------------------------------------------------------------- what an error means


@pytest.mark.parametrize(
    ("code", "details", "kind", "words"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: Connection refused",
            UnreachableError,
            r"hub.example.org:8443 cannot be reached \(failed to connect.*parley coordinator serve",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: Tls handshake failed: CERTIFICATE_VERIFY_FAILED",
            UnreachableError,
            "does not show a certificate of this consortium's root.*if a firewall opens TLS",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.1:8443: Socket closed",
            UnreachableError,
            "hung up in the TLS handshake",
        ),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", UnreachableError, "cannot be reached"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", UnreachableError, "cannot be reached"),
        (grpc.StatusCode.CANCELLED, "", UnreachableError, r"cannot be reached \(no details\)"),
        (
            grpc.StatusCode.INTERNAL,
            "Internal error from Core",
            UnreachableError,
            "ended a call that was being written to",
        ),
        (grpc.StatusCode.UNKNOWN, "Unexpected KeyError", RemoteProtocolError, "answered UNKNOWN: Unexpected KeyError"),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", RemoteProtocolError, "answered UNIMPLEMENTED"),
    ],
)
def test_a_failed_call_means_something(
    code: grpc.StatusCode, details: str, kind: type[ParleyError], words: str
) -> None:
    """Each status that gRPC gives is an error that names the address and what to look at."""
    meant = _meaning(_error(code, details), NOWHERE)
    assert type(meant) is kind
    with pytest.raises(kind, match=words):
        raise meant


def test_what_the_coordinator_refused_is_raised_again_as_the_same() -> None:
    """Class, words, who must act and the way out come from the refusal beside the status, whatever the status says."""
    refusal = codec.encode(told("StorageError", StorageError("no room on the disk", fix="free some")))
    meant = _meaning(_error(grpc.StatusCode.UNAVAILABLE, "cut", (DETAIL, refusal)), NOWHERE)
    assert type(meant) is StorageError
    assert (meant.problem, meant.fix, meant.who) == ("no room on the disk", "free some", WhoActs.COORDINATOR)
    with pytest.raises(RemoteProtocolError, match="malformed Refusal"):
        _meaning(_error(grpc.StatusCode.UNAVAILABLE, "cut", (DETAIL, b"\xff")), NOWHERE)


# ------------------------------------------------------------------------------------------------------ on the network


def test_whoever_is_not_the_consortiums_coordinator_is_not_spoken_to(running: Serving, operator: Person) -> None:
    """A server of another root, and one of the root's members that is not the coordinator named, get no call."""

    async def story() -> None:
        other = Consortium()
        async with running() as hub:
            theirs = Running(other, hub.coordinator, hub.store, hub.folder, hub.port)
            async with theirs.opened(other.member("op", Role.OPERATOR)) as connection:
                with pytest.raises(UnreachableError, match="does not show a certificate of this consortium's root"):
                    await soon(connection.operate(ListJobs()))
            line = hub.line(operator)
            elsewhere = Line(
                line.address,
                "hub2.heart-study.parley",
                *(getattr(line, name) for name in ("root_certificate", "certificate", "tls_key", "statement")),
            )
            async with Connection.opened(elsewhere) as connection:
                with pytest.raises(UnreachableError):
                    await soon(connection.operate(ListJobs()))

    asyncio.run(story())


def test_an_address_at_which_nothing_listens_is_named(operator: Person, consortium: Consortium) -> None:
    """The reader learns what to start, or which address to check."""

    async def story() -> None:
        port = free_port()
        line = Line(
            f"127.0.0.1:{port}",
            "hub.heart-study.parley",
            consortium.root.certificate_pem,
            operator.certificate,
            operator.keys.tls_pem,
        )
        async with Connection.opened(line) as connection:
            with pytest.raises(UnreachableError, match=rf"127.0.0.1:{port} cannot be reached.*Connection refused"):
                await soon(connection.operate(ListJobs()))

    asyncio.run(story())


def test_calls_go_through_a_proxy(running: Serving, operator: Person) -> None:
    """With a proxy named, it is asked for the coordinator by CONNECT, and TLS runs inside, end to end."""
    asked: list[bytes] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(65536):
            writer.write(content)
            await writer.drain()
        writer.close()

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        asked.append(request.split(b"\r\n")[0])
        host, _, port = request.split()[1].decode().partition(":")
        there, back = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(carry(reader, back), carry(there, writer), return_exceptions=True)

    async def story() -> None:
        async with running() as hub:
            proxy = await asyncio.start_server(tunnel, "127.0.0.1", 0)
            port = proxy.sockets[0].getsockname()[1]
            line = hub.line(operator)
            line = Line(
                line.address,
                line.tls_name,
                line.root_certificate,
                line.certificate,
                line.tls_key,
                line.statement,
                Proxy.parse(f"http://127.0.0.1:{port}", "the test"),
            )
            async with Connection.opened(line) as connection:
                assert (await soon(connection.operate(ListJobs()))).jobs == ()
            proxy.close()
            assert asked == [f"CONNECT {hub.address} HTTP/1.1".encode()]

    asyncio.run(story())


class _Odd:
    """A coordinator that answers each method as a test says."""

    def __init__(self, consortium: Consortium, **methods: grpc.RpcMethodHandler) -> None:
        self.consortium = consortium
        self.methods = methods

    async def __aenter__(self) -> Running:
        self.server = grpc.aio.server()
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(codec.SERVICE, self.methods),))
        hub = self.consortium.hub
        credentials = grpc.ssl_server_credentials(
            [(hub.keys.tls_pem, hub.certificate)], self.consortium.root.certificate_pem, require_client_auth=True
        )
        port = self.server.add_secure_port("127.0.0.1:0", credentials)
        await self.server.start()
        return Running(self.consortium, None, None, None, port)

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(None)


def test_a_download_takes_no_more_and_nothing_else_than_was_named(consortium: Consortium, tmp_path: Path) -> None:
    """A coordinator that sends other bytes, too many or too few is refused; nothing is taken for the payload."""
    content, member = b"the model", consortium.member("a")
    ref = BlobRef.of(content)

    async def story() -> None:
        blobs = BlobStore(tmp_path)
        for sent, words in (
            ((content, b"!"), "went on past its end"),
            ((b"the m0del",), "not those its digest"),
            ((b"the",), "stopped at 3"),
            ((b" model",), None),  # and here it goes on
        ):

            async def download(_: bytes, __: object, sent: tuple[bytes, ...] = sent) -> AsyncIterator[bytes]:
                for part in sent:
                    yield codec.encode(UploadChunk(part))

            async with (
                _Odd(consortium, Download=grpc.unary_stream_rpc_method_handler(download)) as hub,
                hub.opened(member) as connection,
            ):
                if words is None:
                    await soon(connection.download(ref, blobs))
                    continue
                with pytest.raises(RemoteProtocolError, match=words):
                    await soon(connection.download(ref, blobs))
                assert not blobs.has(ref)
        assert blobs.get(ref) == content

    asyncio.run(story())


def test_an_upload_that_the_coordinator_ends_early_is_not_taken_for_stored(
    consortium: Consortium, tmp_path: Path
) -> None:
    """Only its word that all is stored counts."""

    async def upload(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        await context.send_initial_metadata(())
        await anext(requests)
        yield codec.encode_upload_reply(UploadOffset(0))
        async for _request in requests:
            pass

    async def story() -> None:
        blobs = BlobStore(tmp_path)
        async with (
            _Odd(consortium, Upload=grpc.stream_stream_rpc_method_handler(upload)) as hub,
            hub.opened(consortium.member("a")) as connection,
        ):
            with pytest.raises(UnreachableError, match=r"ended an upload before it was stored.*sent again"):
                await soon(connection.upload("heart-1", blobs.put(b"an update"), blobs))

    asyncio.run(story())


def test_a_payload_that_cannot_be_read_here_ends_its_upload_in_words(
    running: Serving, operator: Person, tmp_path: Path
) -> None:
    """Whoever uploads is told what is missing; a bare cancellation would end the task that waits for the upload."""
    missing = BlobRef.of(b"a model that is not here")

    async def story() -> None:
        async with running() as hub, hub.opened(operator) as connection:
            with pytest.raises(StorageError, match=f"payload {missing.hex[:12]} is not in"):
                await soon(connection.upload("", missing, BlobStore(tmp_path)))

    asyncio.run(story())


def test_a_message_that_this_release_cannot_read_ends_the_stream_in_words(consortium: Consortium) -> None:
    """It is an error of the tree, and nothing is said before the coordinator has let us in."""
    order: list[str] = []
    let_in = asyncio.Event()

    async def attend(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        async def read() -> None:
            async for _ in requests:
                order.append("said")
                let_in.set()

        reader = asyncio.create_task(read())
        with suppress(TimeoutError):  # whoever would speak unasked does so now
            await asyncio.wait_for(let_in.wait(), 0.05)
        order.append("let in")
        await context.send_initial_metadata(())
        await let_in.wait()
        yield b"\xff\xff"
        reader.cancel()

    async def said() -> AsyncIterator[Heartbeat]:
        while True:
            yield Heartbeat()
            await asyncio.Event().wait()

    async def story() -> None:
        async with (
            _Odd(consortium, Attend=grpc.stream_stream_rpc_method_handler(attend)) as hub,
            hub.opened(consortium.member("a")) as connection,
        ):
            with pytest.raises(RemoteProtocolError, match="malformed FromCoordinator"):
                await soon(anext(connection.attend(said())))
        assert order == ["let in", "said"]

    asyncio.run(story())


def test_a_refusal_is_not_lost_on_a_member_that_would_speak_at_once(
    running: Serving, consortium: Consortium, tmp_path: Path
) -> None:
    """Twenty times in a row a site that was revoked reads that it was, and not that a write failed."""

    async def story() -> None:
        a = Site(consortium.member("a"), tmp_path)
        async with running() as hub:
            await hub.coordinator.members.revoke(consortium.revoked(a.member))
            for _ in range(20):
                with pytest.raises(IdentityError, match="the membership of a was revoked"):
                    await soon(a.attend(hub))

    asyncio.run(story())


def test_a_closed_connection_is_closed(running: Serving, operator: Person) -> None:
    """The socket goes with it."""

    async def story() -> None:
        async with running() as hub:
            connection = Connection(hub.line(operator))
            await connection.operate(ListJobs())
            await connection.close()
            with pytest.raises((grpc.aio.UsageError, UnreachableError)):
                await connection.operate(ListJobs())

    asyncio.run(story())
