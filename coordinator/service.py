"""The coordinator's gRPC face: admits peers by their certificate, decodes, hands over, encodes. It decides nothing."""

import os

# Leaves only TLS 1.3 in gRPC's BoringSSL when certificates are ECDSA; read once, when grpc is first imported.
os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256")

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from typing import TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from coordinator.attendance import Peer
from coordinator.coordinator import Coordinator
from coordinator.limits import CALLS, Limits, raise_file_limit
from federation import codec, heap
from federation.errors import (
    ConfigurationError,
    IdentityError,
    LocalProtocolError,
    ParleyError,
    RemoteProtocolError,
    StorageError,
)
from federation.greeting import Greeting
from federation.messages import (
    PROTOCOL,
    DownloadRequest,
    EnrolmentRequest,
    Hello,
    MembershipStatement,
    Role,
    ShowJob,
    UploadChunk,
    UploadOffset,
    UploadOpen,
    UploadStored,
)
from federation.refusals import DETAIL, STATEMENT, told

__all__ = ["serve"]

log = logging.getLogger("parley.coordinator")

Context = grpc.aio.ServicerContext[bytes, bytes]
T = TypeVar("T")

_WINDOW = 1024 * 1024
"""Bytes that may wait unread on one stream. gRPC's own estimate follows the speed of the line and lets each upload take
ten times as much, while 1 MiB still carries 84 Mbit/s over a round trip of 100 ms."""

_OPTIONS = (
    ("grpc.max_receive_message_length", 3 * 1024 * 1024),  # a chunk of 2 MiB and its frame
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _WINDOW),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_concurrent_streams", 2 * CALLS),  # the limit that tells why is coordinator/limits.py's
    ("grpc.max_connection_idle_ms", 60_000),  # a connection that carries no call is closed
    ("grpc.so_reuseport", 0),  # two coordinators on one port would share its sites between them
)

_SOFTWARE = metadata.version("parley-fl")
"""Read once: looking it up takes a millisecond, and every call says it."""

_SUMMARY = 300
"""Characters of an error in a call's status, for whoever is no Parley; the whole of it travels beside, for who is."""

_CODES: tuple[tuple[type[ParleyError], grpc.StatusCode], ...] = (
    (IdentityError, grpc.StatusCode.PERMISSION_DENIED),
    (ConfigurationError, grpc.StatusCode.INVALID_ARGUMENT),
    (RemoteProtocolError, grpc.StatusCode.FAILED_PRECONDITION),
    (StorageError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (LocalProtocolError, grpc.StatusCode.INTERNAL),
)


async def serve(coordinator: Coordinator, address: str, health_port: int = 0) -> grpc.aio.Server:
    """Listens on `address` (host:port) with mutual TLS 1.3, and returns the started server.

    With a `health_port` the standard gRPC health service answers without TLS on 127.0.0.1, and nowhere else.

    Raises:
        StorageError: The port is taken or may not be used.
    """
    heap.set_up()
    raise_file_limit()
    server = grpc.aio.server(options=_OPTIONS)
    me = coordinator.members.me
    server.add_generic_rpc_handlers((_handlers(coordinator),))
    credentials = grpc.ssl_server_credentials(
        [(me.tls_key, me.certificate)], root_certificates=me.root_certificate, require_client_auth=True
    )
    try:
        server.add_secure_port(address, credentials)
        if health_port:
            servicer = health.aio.HealthServicer()
            await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
            health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
            server.add_insecure_port(f"127.0.0.1:{health_port}")
    except RuntimeError as taken:
        raise StorageError(
            f"cannot listen on {address}",
            fix="stop what uses the port (see: ss -ltnp), or choose another with --listen",
        ) from taken
    await server.start()
    return server


def _handlers(coordinator: Coordinator) -> grpc.GenericRpcHandler:
    service = _Service(coordinator)
    return grpc.method_handlers_generic_handler(
        codec.SERVICE,
        {
            "Enrol": grpc.unary_stream_rpc_method_handler(service.enrol),
            "Attend": grpc.stream_stream_rpc_method_handler(service.attend),
            "Download": grpc.unary_stream_rpc_method_handler(service.download),
            "Upload": grpc.stream_stream_rpc_method_handler(service.upload),
            "Operate": grpc.unary_unary_rpc_method_handler(service.operate),
            "Watch": grpc.unary_stream_rpc_method_handler(service.watch),
        },
    )


class _Service:
    """One coroutine per method; bytes in, bytes out."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._members = coordinator.members
        self._attendance = coordinator.attendance
        self._conductor = coordinator.conductor
        self._operation = coordinator.operation
        self._limits = Limits()

    # The gate stands in front of every method: no handler runs before the peer is known, current and allowed.

    def _certificate(self, context: Context) -> bytes:
        auth = context.auth_context()
        version = b"".join(auth.get("ssl_tls_version", ()))
        if version != b"TLSv1.3":
            used = version.decode() or "no TLS that gRPC names"
            raise IdentityError(f"the connection uses {used}, not TLS 1.3", fix="update the peer's Parley")
        certificate = b"".join(auth.get("x509_pem_cert", ()))
        if not certificate:
            raise IdentityError("the peer shows no certificate", fix="join first: parley site join INVITATION")
        return certificate

    def _admit(self, context: Context, *roles: Role) -> MembershipStatement:
        shown = dict(context.invocation_metadata() or ()).get(STATEMENT)
        statement = codec.decode(MembershipStatement, shown) if isinstance(shown, bytes) else None
        member = self._members.member(self._certificate(context), statement, time.time())
        if member.role not in roles:
            wanted = " or ".join(role.value for role in roles)
            raise IdentityError(
                f"{member.name} is enrolled as {member.role.value}; this call is for the role {wanted}",
                fix=f"use the home of a member with the role {wanted} (--home)",
            )
        return member

    @asynccontextmanager
    async def _admitted(self, context: Context, *roles: Role) -> AsyncIterator[MembershipStatement]:
        """A block that is a call of a member with one of these roles, and one of the calls that it may hold open."""
        member = self._admit(context, *roles)
        with self._limits.call(member.name, time.monotonic()):
            yield member

    async def enrol(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        """A newcomer asks; the stream stays open until it is approved."""
        async with _Refusing(context):
            certificate = self._certificate(context)
            newcomer = f"the newcomer with certificate {hashlib.sha256(certificate).hexdigest()[:16]}"
            with self._limits.call(newcomer, time.monotonic()):
                async for status in self._members.enrol(certificate, codec.decode(EnrolmentRequest, request)):
                    yield codec.encode(status)

    async def attend(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """A site attends: small typed messages both ways, for as long as it stays."""
        async with _Refusing(context), self._admitted(context, Role.SITE) as member:
            await _greet(context)  # the site speaks once it sees that the gate is open
            hello = codec.decode_from_site(await _first(requests, member))
            if not isinstance(hello, Hello):
                raise RemoteProtocolError(f"{member.name} must say hello first, not {type(hello).__name__}")
            peer = await self._attendance.arrive(member, hello, self._conductor)
            reader = asyncio.create_task(self._read(requests, peer))
            try:
                while (message := await peer.outgoing.get()) is not None:
                    yield codec.encode_from_coordinator(message)
                if peer.closed_for is not None:
                    raise peer.closed_for
            finally:
                reader.cancel()
                self._attendance.leave(peer, self._conductor)

    async def _read(self, requests: AsyncIterator[bytes], peer: Peer) -> None:
        try:
            async for request in requests:
                try:
                    self._limits.message(peer.name, time.monotonic())
                except RemoteProtocolError as flood:
                    log.warning("%s; its stream is closed", flood)
                    peer.close(flood)
                    return
                try:
                    message = codec.decode_from_site(request)
                except RemoteProtocolError as refused:
                    log.warning("%s: %s", peer.name, refused)
                    peer.send(told("a message", refused))
                    continue
                self._attendance.hear(peer, message, self._conductor)
        finally:
            peer.send(None)

    async def download(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        """A payload, from the offset asked for to its end; gRPC's flow control holds the reading back."""
        async with _Refusing(context), self._admitted(context, Role.SITE, Role.OPERATOR) as member:
            wanted = codec.decode(DownloadRequest, request)
            await _greet(context)
            if member.role is Role.OPERATOR:
                blobs, moved = await self._operation.download(wanted.payload)
            else:
                blobs, moved = self._conductor.download(member, wanted.payload)
            for chunk in blobs.chunks(wanted.payload, wanted.offset):
                self._members.still(member, time.time())
                moved(len(chunk))
                part = codec.encode(UploadChunk(chunk))
                del chunk  # however long the site takes to read on: its stream holds one copy
                yield part

    async def upload(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """A payload comes in, from where an earlier try ended."""
        async with _Refusing(context), self._admitted(context, Role.SITE, Role.OPERATOR) as member:
            await _greet(context)  # the member sends once it sees that the gate is open
            opened = codec.decode_upload_request(await _first(requests, member))
            if not isinstance(opened, UploadOpen):
                raise RemoteProtocolError(f"{member.name} must name its payload before sending it")
            with self._conductor.taking(opened.job):
                if member.role is Role.OPERATOR:
                    incoming, moved = await self._operation.upload(opened.payload)
                else:
                    incoming, moved = await self._conductor.upload(member, opened)
                if incoming is None:
                    self._conductor.stored(member.name, opened)
                    yield codec.encode_upload_reply(UploadOffset(opened.payload.length))
                    yield codec.encode_upload_reply(UploadStored())
                    return
                try:
                    yield codec.encode_upload_reply(UploadOffset(incoming.offset))
                    async for request in requests:
                        self._limits.message(member.name, time.monotonic())
                        self._members.still(member, time.time())
                        chunk = codec.decode_upload_request(request)
                        if not isinstance(chunk, UploadChunk):
                            raise RemoteProtocolError(f"{member.name} opened a second payload in one stream")
                        moved(len(chunk.content))
                        await incoming.append(chunk.content)
                        del request, chunk  # however long the next one takes to come
                    incoming.finish()
                    self._conductor.stored(member.name, opened)
                    yield codec.encode_upload_reply(UploadStored())
                finally:
                    incoming.pause()

    async def operate(self, request: bytes, context: Context) -> bytes:
        """An operator asks something."""
        async with _Refusing(context), self._admitted(context, Role.OPERATOR) as member:
            reply = await self._operation.operate(member, codec.decode_operator_request(request))
            return codec.encode_operator_reply(reply)
        raise AssertionError  # the context has been aborted

    async def watch(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        """A job's view, now and at each change, until the job is over."""
        async with _Refusing(context), self._admitted(context, Role.OPERATOR) as member:
            async for view in self._operation.watch(codec.decode(ShowJob, request).job):
                self._members.still(member, time.time())
                yield codec.encode(view)


async def _greet(context: Context) -> None:
    greeting = Greeting(PROTOCOL, _SOFTWARE, time.time())
    await context.send_initial_metadata(greeting.entries())


async def _first(requests: AsyncIterator[bytes], member: MembershipStatement) -> bytes:
    async for request in requests:
        return request
    raise RemoteProtocolError(f"{member.name} ended the stream before its first word")


class _Refusing:
    """Turns an error of the tree into the call's status, and sends it along for the peer to raise again."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ParleyError):
            code = next((code for cls, code in _CODES if isinstance(error, cls)), grpc.StatusCode.UNAVAILABLE)
            detail = codec.encode(told(type(error).__name__, error))
            log.info("refused a call: %s", error)
            await self._context.abort(code, str(error)[:_SUMMARY], trailing_metadata=((DETAIL, detail),))
