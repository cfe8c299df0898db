"""A member's line to the coordinator: one outbound mutual-TLS channel; errors are those that the other side raised."""

import os

# Leaves only TLS 1.3 in gRPC's BoringSSL when certificates are ECDSA; read once, when grpc is first imported.
os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256")

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc
import grpc.aio

from client import probe
from client import proxy as proxies
from client.proxy import Proxy
from federation import codec
from federation.blobs import BlobRef, BlobStore
from federation.errors import ParleyError, RemoteProtocolError, UnreachableError, WhoActs
from federation.greeting import Greeting
from federation.messages import (
    DownloadRequest,
    EnrolmentRequest,
    EnrolmentStatus,
    FromCoordinator,
    FromSite,
    JobView,
    OperatorReply,
    OperatorRequest,
    Refusal,
    ShowJob,
    UploadChunk,
    UploadOffset,
    UploadOpen,
    UploadStored,
)
from federation.refusals import DETAIL, STATEMENT, raised

__all__ = ["Connection", "Line"]

_WINDOW = 4 * 1024 * 1024
"""Bytes that may wait unread on one stream: 335 Mbit/s over a round trip of 100 ms. gRPC's own estimate follows the
line's speed, and a site that is slower than its line then holds hundreds of MB of a model."""

_METADATA = 128 * 1024
"""Bytes of metadata taken with an answer: a refusal's texts, in any script (gRPC's own limit is below 16 KiB)."""

_CUT_IN_HANDSHAKE = re.compile(r"failed to connect.*(Socket closed|Connection reset|ALERT)", re.DOTALL)
"""How gRPC tells that a server hung up on our certificate: in TLS 1.3 the client is done before the server looks."""


_CUT_WHILE_WRITING = "Internal error from Core"
"""The status that grpc.aio makes up when a write fails, in the place of the one that the server sent."""


_NO_PAYLOAD = BlobRef(bytes(32), 0)
"""The name of nothing: SHA-256 gives no content this digest."""


@dataclass(frozen=True, slots=True)
class Line:
    """How to reach a coordinator and as whom.

    Args:
        address: host:port to dial.
        tls_name: The name that the coordinator's certificate must bear, wherever it is reached.
        root_certificate: The consortium's root (PEM), the only one trusted.
        certificate: This member's, or the invitation's, certificate (PEM).
        tls_key: Its private key (PEM).
        statement: The root's word on this member (an encoded `MembershipStatement`), shown with every call; empty for
            an invitation.
        proxy: The CONNECT proxy to dial through; None: directly, whatever the environment says.
    """

    address: str
    tls_name: str
    root_certificate: bytes
    certificate: bytes
    tls_key: bytes
    statement: bytes = b""
    proxy: Proxy | None = None


class Connection:
    """One channel to the coordinator; all calls of a member go through it. Close it when done, or use `opened`."""

    def __init__(self, line: Line) -> None:
        self._line = line
        options: list[tuple[str, int | str]] = [
            ("grpc.ssl_target_name_override", line.tls_name),
            ("grpc.max_receive_message_length", 64 * 1024 * 1024),  # the longest answers are lists of jobs
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", _WINDOW),
            ("grpc.max_metadata_size", _METADATA),
            ("grpc.absolute_max_metadata_size", _METADATA),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            ("grpc.use_local_subchannel_pool", 1),  # a channel of its own: another member's must not carry our calls
        ]
        target, through = proxies.dialled(line.address, line.proxy)
        options.extend(through)
        credentials = grpc.ssl_channel_credentials(line.root_certificate, line.tls_key, line.certificate)
        self._metadata = ((STATEMENT, line.statement),) if line.statement else ()
        self._channel = channel = grpc.aio.secure_channel(target, credentials, options=options)
        self._enrol: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(codec.ENROL)
        self._attend: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(codec.ATTEND)
        self._download: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(codec.DOWNLOAD)
        self._upload: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(codec.UPLOAD)
        self._operate: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(codec.OPERATE)
        self._watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(codec.WATCH)

    @classmethod
    @asynccontextmanager
    async def opened(cls, line: Line) -> "AsyncIterator[Connection]":
        """A connection that is closed at the end of the block."""
        connection = cls(line)
        try:
            yield connection
        finally:
            await connection.close()

    async def close(self) -> None:
        """Closes the channel; open calls end."""
        await self._channel.close()

    async def enrol(self, request: EnrolmentRequest) -> AsyncIterator[EnrolmentStatus]:
        """The coordinator's answers to an enrolment: waiting, then approved."""
        async with self._telling():
            async for status in self._enrol(codec.encode(request)):
                yield codec.decode(EnrolmentStatus, status)

    async def attend(self, outgoing: AsyncIterator[FromSite]) -> AsyncGenerator[FromCoordinator, None]:
        """What the coordinator says while `outgoing` is what we say.

        A message that this release cannot read ends the stream with a `RemoteProtocolError`.
        """

        async def encoded() -> AsyncIterator[bytes]:
            await call.initial_metadata()  # the gate is open; a refusal's words would be lost on a call that writes
            async for message in outgoing:
                yield codec.encode_from_site(message)

        call = self._attend(encoded(), metadata=self._metadata)
        try:
            async with self._telling():
                async for message in call:
                    yield codec.decode_from_coordinator(message)
        finally:
            call.cancel()

    async def download(self, ref: BlobRef, blobs: BlobStore) -> None:
        """Brings a payload into `blobs`, continuing where an earlier try ended."""
        if blobs.has(ref):
            return
        incoming = blobs.receive(ref)
        try:
            request = codec.encode(DownloadRequest(ref, incoming.offset))
            async with self._telling():
                async for part in self._download(request, metadata=self._metadata):
                    incoming.append(codec.decode(UploadChunk, part).content)
            incoming.finish()
        finally:
            incoming.pause()

    async def upload(self, job: str, ref: BlobRef, blobs: BlobStore) -> None:
        """Sends a payload from `blobs`, continuing where an earlier try ended; stored at the coordinator afterwards.

        Raises:
            StorageError: It is not in `blobs`, or cannot be read.
        """
        offset: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        unread: list[Exception] = []

        async def requests() -> AsyncIterator[bytes]:
            await call.initial_metadata()  # as for `attend`
            yield codec.encode_upload_request(UploadOpen(job, ref))
            try:
                for chunk in blobs.chunks(ref, await offset):
                    yield codec.encode_upload_request(UploadChunk(chunk))
            except Exception as failed:
                unread.append(failed)
                raise

        call = self._upload(requests(), metadata=self._metadata)
        stored = False
        try:
            async with self._telling():
                async for part in call:
                    match codec.decode_upload_reply(part):
                        case UploadOffset(held):
                            if not offset.done():
                                offset.set_result(held)
                        case UploadStored():
                            stored = True
        except asyncio.CancelledError:
            if unread:  # gRPC cancels a call whose requests fail, and keeps the reason to itself
                raise unread[0] from None
            raise
        finally:
            offset.cancel()
            call.cancel()
        if not stored:
            raise UnreachableError(
                "the coordinator ended an upload before it was stored", fix="nothing: it is sent again"
            )

    async def operate(self, request: OperatorRequest) -> OperatorReply:
        """The coordinator's answer to an operator."""
        async with self._telling():
            reply = await self._operate(codec.encode_operator_request(request), timeout=60, metadata=self._metadata)
        return codec.decode_operator_reply(reply)

    async def watch(self, job: str) -> AsyncIterator[JobView]:
        """The job's view, now and at each change, until the job is over."""
        async with self._telling():
            async for view in self._watch(codec.encode(ShowJob(job)), metadata=self._metadata):
                yield codec.decode(JobView, view)

    async def greeting(self) -> Greeting | None:
        """What the coordinator says about itself to a member that it accepts; None: its release says nothing yet.

        Asking changes nothing and disturbs no open stream of the member's.

        Raises:
            IdentityError: It does not accept this member.
        """
        call = self._download(codec.encode(DownloadRequest(_NO_PAYLOAD, 0)), metadata=self._metadata)
        with suppress(RemoteProtocolError):  # who is admitted is told that nothing offers this payload
            async with self._telling():
                async for _ in call:
                    pass
        return Greeting.of(await call.initial_metadata())

    @asynccontextmanager
    async def _telling(self) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise await _on_the_way(error, self._line) or _meaning(error, self._line) from None


async def _on_the_way(error: grpc.aio.AioRpcError, line: Line) -> ParleyError | None:
    """What kept a call from ever reaching the coordinator, if a proxy or another's certificate did."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return None
    details = f"{error.details() or ''} {error.debug_error_string() or ''}"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return await asyncio.to_thread(probe.stranger, line.address, line.tls_name, line.root_certificate, line.proxy)
    return proxies.meaning(line.proxy, line.address, details) if line.proxy is not None else None


def _meaning(error: grpc.aio.AioRpcError, line: Line) -> ParleyError:
    """What a failed call means for the person at this end."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAIL and isinstance(value, bytes):
            return raised(codec.decode(Refusal, value))
    details = f"{error.details() or ''} {error.debug_error_string() or ''}"
    match error.code():
        case grpc.StatusCode.UNAVAILABLE if "CERTIFICATE_VERIFY_FAILED" in details:
            return UnreachableError(
                f"what answers at {line.address} does not show a certificate of this consortium's root",
                fix="check the address; if a firewall opens TLS, have it let this connection through untouched",
                who=WhoActs.SITE,
            )
        case grpc.StatusCode.UNAVAILABLE if _CUT_IN_HANDSHAKE.search(details):
            return UnreachableError(
                f"the coordinator at {line.address} hung up in the TLS handshake, as it does on a certificate that is "
                "another consortium's or has expired",
                fix="enrol with a new invitation if this member's certificate is; otherwise check the address",
                who=WhoActs.SITE,
            )
        case grpc.StatusCode.INTERNAL if _CUT_WHILE_WRITING in details:
            return UnreachableError(
                f"the coordinator at {line.address} ended a call that was being written to",
                fix="nothing: it is tried again, and tells the reason if there is one",
            )
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
            return UnreachableError(
                f"the coordinator at {line.address} cannot be reached ({_short(error.details())})",
                fix="check that it runs (parley coordinator serve) and that this machine may dial that address",
            )
        case code:
            return RemoteProtocolError(
                f"the coordinator answered {code.name}: {_short(error.details())}",
                fix="install the same release of Parley on both sides",
            )


def _short(details: str | None) -> str:
    return (details or "no details")[:300]
