"""The gate and the payload streams over real mutual TLS: who is refused learns why, and no room behind hears of it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from client.connection import Connection
from coordinator import service
from coordinator.events import StopAsked
from coordinator.service import serve
from federation import codec
from federation.blobs import CHUNK, BlobRef, BlobStore
from federation.errors import (
    ConfigurationError,
    IdentityError,
    LocalProtocolError,
    ParleyError,
    RemoteProtocolError,
    StorageError,
    UnreachableError,
)
from federation.messages import (
    Contribution,
    DownloadRequest,
    JobEnded,
    ListJobs,
    Role,
    StepKind,
    StepStart,
    UploadChunk,
    UploadOffset,
    UploadOpen,
)
from federation.vector import Layout, TensorSpec, to_safetensors
from privacy import identity
from tests.consortium import Consortium, Person, Running, Site, free_port, prepared, soon, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator
    from pathlib import Path

    from federation.messages import FromSite, UploadReply

Serving = Callable[..., AbstractAsyncContextManager[Running]]
Sites = Callable[..., Site]
Call = Callable[[Connection, Site, BlobStore], "Awaitable[object]"]

# ----------------------------------------------------------------------------------------------------------- the gate


async def _attend(connection: Connection, member: Site, _: BlobStore) -> None:
    async def said() -> AsyncIterator[FromSite]:
        yield member.hello()

    async for _message in connection.attend(said()):
        pass


async def _download(connection: Connection, _: Site, blobs: BlobStore) -> None:
    await connection.download(BlobRef.of(b"a model"), blobs)


async def _upload(connection: Connection, _: Site, blobs: BlobStore) -> None:
    await connection.upload("heart-1", blobs.put(b"an update"), blobs)


async def _operate(connection: Connection, _: Site, __: BlobStore) -> None:
    await connection.operate(ListJobs())


async def _watch(connection: Connection, _: Site, __: BlobStore) -> None:
    async for _view in connection.watch("heart-1"):
        pass


CALLS: dict[str, Call] = {
    "attend": _attend,
    "download": _download,
    "upload": _upload,
    "operate": _operate,
    "watch": _watch,
}
DOORS = {
    "attendance": ("arrive",),
    "conductor": ("download", "upload"),
    "operation": ("download", "upload", "operate", "watch"),
    "members": ("enrol",),
}


def _rooms(hub: Running, patch: pytest.MonkeyPatch) -> list[str]:
    """What was reached behind the gate from now on; everything there answers with an error of its own."""
    reached: list[str] = []

    def door(name: str) -> Callable[..., object]:
        def entered(*_: object) -> object:
            reached.append(name)
            raise LocalProtocolError("the room was reached")

        return entered

    for room, doors in DOORS.items():
        for each in doors:
            patch.setattr(getattr(hub.coordinator, room), each, door(f"{room}.{each}"))
    return reached


def _refusals(
    serving: Serving,
    member: Person,
    folder: Path,
    patch: pytest.MonkeyPatch,
    *,
    statement: bytes | None = None,
    calls: tuple[str, ...] = tuple(CALLS),
    before: Callable[[Running], Awaitable[object]] | None = None,
) -> list[ParleyError]:
    """What a member is told that makes these calls, once it is sure that none reached a room."""

    async def story() -> list[ParleyError]:
        told: list[ParleyError] = []
        async with serving() as hub:
            if before is not None:
                await before(hub)
            reached = _rooms(hub, patch)
            async with hub.opened(member, statement) as connection:
                for name in calls:
                    with pytest.raises(ParleyError) as refused:
                        await soon(CALLS[name](connection, Site(member, folder), BlobStore(folder / "own")))
                    told.append(refused.value)
            assert reached == []
        return told

    return asyncio.run(story())


def test_members_with_the_right_role_reach_the_rooms(
    running: Serving, consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate opens: each of these calls gets as far as the room behind it, which the refusals below never do."""
    member, operator = consortium.member("a"), consortium.member("op", Role.OPERATOR)
    allowed = [(member, "attend"), (member, "download"), (member, "upload")]
    allowed += [(operator, "download"), (operator, "upload"), (operator, "operate"), (operator, "watch")]

    async def story() -> list[str]:
        async with running() as hub:
            reached = _rooms(hub, monkeypatch)
            for who, name in allowed:
                async with hub.opened(who) as connection:
                    with pytest.raises(LocalProtocolError, match="the room was reached"):
                        await soon(CALLS[name](connection, Site(who, tmp_path), BlobStore(tmp_path / "own")))
            return reached

    assert asyncio.run(story()) == [
        "attendance.arrive",
        "conductor.download",
        "conductor.upload",
        "operation.download",
        "operation.upload",
        "operation.operate",
        "operation.watch",
    ]


def test_an_invitation_opens_nothing_but_enrolment(
    running: Serving, consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificate is the root's, and yet every other call is refused, even with a member's statement beside it."""
    invitation = consortium.invitation("a", "127.0.0.1:1")
    keys = replace(consortium.member("a").keys, tls=invitation.key)
    newcomer = Person(keys, invitation.certificate_pem, consortium.member("a", keys=keys).statement)
    told = _refusals(running, newcomer, tmp_path, monkeypatch)
    assert {type(each) for each in told} == {IdentityError}
    assert {each.problem for each in told} == {"an invitation's certificate is good for enrolment only"}
    assert {each.fix for each in told} == {"join first: parley site join INVITATION"}


def test_a_member_cannot_enrol(running: Serving, consortium: Consortium) -> None:
    """Enrolment is for those who are not members yet."""

    async def story() -> None:
        member = consortium.member("a")
        request = identity.request_for("b", "b-clinic", Role.SITE, member.keys, "0.1.0")
        async with running() as hub, hub.opened(member) as connection:
            with pytest.raises(IdentityError, match="enrolment needs an invitation's certificate"):
                await soon(anext(connection.enrol(request)))
            assert await hub.coordinator.members.pending() == ()

    asyncio.run(story())


def test_another_consortiums_member_is_refused_in_the_handshake(
    running: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root of the same name is another root; the member is told what the coordinator did not accept, and why."""
    told = _refusals(running, Consortium().member("a"), tmp_path, monkeypatch)
    assert {type(each) for each in told} == {UnreachableError}
    for each in told:
        assert "hung up in the TLS handshake, as it does on a certificate that is another consortium's" in each.problem
        assert each.fix.startswith("enrol with a new invitation if this member's certificate is")


def test_an_expired_member_is_refused_in_the_handshake(
    running: Serving, consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate ends with the membership, and TLS holds it to that."""
    told = _refusals(running, consortium.member("a", days_ago=400), tmp_path, monkeypatch)
    assert {type(each) for each in told} == {UnreachableError}
    for each in told:
        assert "hung up in the TLS handshake" in each.problem
        assert "has expired" in each.problem


def test_a_membership_that_ends_on_an_open_connection_is_refused(
    running: Serving, consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS asked once, when the connection was made; the gate asks at every call."""
    member, operator = consortium.member("a"), consortium.member("op", Role.OPERATOR)

    async def story() -> None:
        async with running() as hub, hub.opened(operator) as connection:
            await soon(connection.operate(ListJobs()))
            reached = _rooms(hub, monkeypatch)
            monkeypatch.setattr(service.time, "time", lambda: float(operator.statement.not_after))
            with pytest.raises(IdentityError, match=r"the membership of op expired on .* UTC"):
                await soon(_operate(connection, Site(member, tmp_path), BlobStore(tmp_path)))
            assert reached == []

    asyncio.run(story())


def test_a_revoked_member_is_refused_at_every_call(
    running: Serving, consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificate still passes TLS; the root's list stops it."""
    for role in (Role.SITE, Role.OPERATOR):
        member = consortium.member("a", role)

        async def revoke(hub: Running, member: Person = member) -> None:
            number = hub.coordinator.members.revocations.version + 1
            await hub.coordinator.members.revoke(consortium.revoked(member, version=number))

        told = _refusals(running, member, tmp_path, monkeypatch, before=revoke)
        assert {type(each) for each in told} == {IdentityError}
        for each in told:
            assert each.problem.startswith("the membership of a was revoked (revocation list ")


def test_a_member_that_shows_another_members_statement_is_refused(
    running: Serving, consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement is no secret; it is good only over the TLS key that it names, even for the same name and role."""
    operator = codec.encode(consortium.member("op", Role.OPERATOR).statement)
    member = consortium.member("a")
    namesake = codec.encode(consortium.member("a").statement)
    for shown, name in ((operator, "op"), (namesake, "a")):
        told = _refusals(running, member, tmp_path, monkeypatch, statement=shown)
        assert {type(each) for each in told} == {IdentityError}
        problem = f"the membership of {name} was shown over another member's TLS certificate"
        assert {each.problem for each in told} == {problem}


def test_a_statement_of_another_root_is_refused(
    running: Serving, consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody promotes itself: only the root's own word on the TLS key counts."""
    member = consortium.member("a")
    forged = Consortium().member("a", Role.OPERATOR, keys=member.keys).statement
    forged = replace(forged, serial=member.statement.serial)
    told = _refusals(running, member, tmp_path, monkeypatch, statement=codec.encode(forged))
    assert {type(each) for each in told} == {IdentityError}
    problem = "the membership of a was not signed by heart-study's root, but by another root or nobody"
    assert {each.problem for each in told} == {problem}


def test_a_member_without_a_statement_is_refused(
    running: Serving, consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate alone does not say which role its holder has."""
    told = _refusals(running, consortium.member("a"), tmp_path, monkeypatch, statement=b"")
    assert {type(each) for each in told} == {IdentityError}
    assert {each.problem for each in told} == {"the call shows no membership statement"}


def test_a_member_that_shows_garbage_is_refused(
    running: Serving, consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are no statement are named as such."""
    told = _refusals(running, consortium.member("a"), tmp_path, monkeypatch, statement=b"\xff garbage")
    assert {type(each) for each in told} == {RemoteProtocolError}
    for each in told:
        assert each.problem.startswith("malformed MembershipStatement")


def test_each_role_keeps_to_its_calls(
    running: Serving, consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site does not operate and an operator does not attend; both learn which role the call is for."""
    told = _refusals(running, consortium.member("a"), tmp_path, monkeypatch, calls=("operate", "watch"))
    problem = "a is enrolled as site; this call is for the role operator"
    assert [(type(each), each.problem) for each in told] == [(IdentityError, problem)] * 2
    operator = consortium.member("op", Role.OPERATOR)
    (refused,) = _refusals(running, operator, tmp_path, monkeypatch, calls=("attend",))
    assert refused.problem == "op is enrolled as operator; this call is for the role site"
    assert refused.fix == "use the home of a member with the role site (--home)"


def test_the_longest_refusal_arrives_whole(
    running: Serving, consortium: Consortium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All words that a refusal carries, in any script, come through, and not a limit of gRPC's in their place."""

    async def story() -> ParleyError:
        async with running() as hub, hub.opened(consortium.member("op", Role.OPERATOR)) as connection:

            async def refused(*_: object) -> None:
                raise ConfigurationError("😀" * 5000, fix="💥" * 5000)

            monkeypatch.setattr(hub.coordinator.operation, "operate", refused)
            with pytest.raises(ConfigurationError) as told:
                await soon(connection.operate(ListJobs()))
            return told.value

    told = asyncio.run(story())
    assert (told.problem, told.fix) == ("😀" * 4000, "💥" * 4000)


# ---------------------------------------------------------------------------------------------------------------- TLS


def _tls(hub: Running, newest: ssl.TLSVersion, member: Person | None) -> tuple[str | None, bytes]:
    """The TLS version of a hand-made connection, and the first bytes that the server says on it."""
    context = ssl.create_default_context(cadata=hub.consortium.root.certificate_pem.decode())
    context.maximum_version = newest
    context.set_alpn_protocols(["h2"])
    if member is not None:
        certificate, key = hub.folder / "certificate.pem", hub.folder / "key.pem"
        certificate.write_bytes(member.certificate)
        key.write_bytes(member.keys.tls_pem)
        context.load_cert_chain(certificate, key)
    with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as plain:
        name = identity.tls_name("hub", hub.consortium.root.consortium)
        with context.wrap_socket(plain, server_hostname=name) as secure:
            return secure.version(), secure.recv(64)


def test_only_tls_1_3_is_spoken(running: Serving, consortium: Consortium) -> None:
    """A member that knows nothing newer than TLS 1.2 gets no connection; with 1.3 the same one is spoken to."""

    async def story() -> None:
        member = consortium.member("a")
        async with running() as hub:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.to_thread(_tls, hub, ssl.TLSVersion.TLSv1_2, member)
            version, said = await asyncio.to_thread(_tls, hub, ssl.TLSVersion.TLSv1_3, member)
            assert (version, len(said) > 0) == ("TLSv1.3", True)

    asyncio.run(story())


def test_nothing_is_said_to_a_peer_without_a_certificate(running: Serving) -> None:
    """The connection ends before the first byte of HTTP/2."""

    async def story() -> None:
        async with running() as hub:
            said = b""
            with suppress(ssl.SSLError, ConnectionError):  # told so by an alert, or cut off
                _, said = await asyncio.to_thread(_tls, hub, ssl.TLSVersion.TLSv1_3, None)
            assert said == b""

    asyncio.run(story())


def test_a_grpc_client_without_a_certificate_reaches_nothing(
    running: Serving, consortium: Consortium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither over TLS without a certificate nor in the clear."""

    async def story() -> None:
        async with running() as hub:
            reached = _rooms(hub, monkeypatch)
            trusting = grpc.ssl_channel_credentials(consortium.root.certificate_pem)
            named = [("grpc.ssl_target_name_override", identity.tls_name("hub", consortium.root.consortium))]
            for channel in (
                grpc.aio.secure_channel(hub.address, trusting, options=named),
                grpc.aio.insecure_channel(hub.address),
            ):
                async with channel:
                    for method in (codec.ENROL, codec.OPERATE):
                        with pytest.raises(grpc.aio.AioRpcError) as refused:
                            await soon(channel.unary_unary(method)(b""))
                        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert reached == []

    asyncio.run(story())


def test_accepted_connections_say_tls_1_3(
    running: Serving, consortium: Consortium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What gRPC tells of an accepted peer carries the TLS version by the name that the gate looks for."""
    seen: list[dict[str, list[bytes]]] = []
    taken = service._Service._certificate

    def spied(self: service._Service, context: service.Context) -> bytes:
        seen.append({key: list(values) for key, values in context.auth_context().items()})
        return taken(self, context)

    async def story() -> None:
        async with running() as hub, hub.opened(consortium.member("op", Role.OPERATOR)) as connection:
            await connection.operate(ListJobs())

    monkeypatch.setattr(service._Service, "_certificate", spied)
    asyncio.run(story())
    assert [each["ssl_tls_version"] for each in seen] == [[b"TLSv1.3"]]


@pytest.mark.parametrize("version", [[b"TLSv1.2"], [b""], []])
def test_a_connection_that_is_not_known_to_be_tls_1_3_is_refused(
    version: list[bytes], running: Serving, consortium: Consortium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older version, an unnamed one, and none at all are refused although the certificate is a member's."""
    taken = service._Service._certificate

    class Downgraded:
        def __init__(self, context: service.Context) -> None:
            self._context = context

        def auth_context(self) -> dict[str, list[bytes]]:
            known = {key: list(values) for key, values in self._context.auth_context().items()}
            del known["ssl_tls_version"]
            return known | ({"ssl_tls_version": version} if version else {})

    monkeypatch.setattr(service._Service, "_certificate", lambda self, context: taken(self, Downgraded(context)))

    async def story() -> None:
        async with running() as hub, hub.opened(consortium.member("op", Role.OPERATOR)) as connection:
            with pytest.raises(IdentityError, match=r"the connection uses .*, not TLS 1\.3"):
                await connection.operate(ListJobs())

    asyncio.run(story())


def test_the_health_probe_answers_on_loopback_and_says_nothing_else(
    running: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says SERVING without a certificate, on 127.0.0.1 only, and no other call on that port reaches a room."""

    async def story() -> None:
        port = free_port()
        async with running(health_port=port) as hub:
            reached = _rooms(hub, monkeypatch)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                probe = health_pb2_grpc.HealthStub(channel)
                answer = await soon(probe.Check(health_pb2.HealthCheckRequest()))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                for method in (codec.OPERATE, codec.ENROL, codec.ATTEND, codec.DOWNLOAD, codec.UPLOAD, codec.WATCH):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await soon(channel.unary_unary(method)(b""))
                    assert "not TLS 1.3" in str(refused.value.details())
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), timeout=10)
            assert reached == []

    asyncio.run(story())


def test_a_port_that_is_taken_is_named(running: Serving) -> None:
    """Two coordinators on one port would share its sites between them; the second is told what to do."""

    async def story() -> None:
        async with running() as hub:
            with pytest.raises(StorageError, match=rf"cannot listen on 127.0.0.1:{hub.port}.*choose another with"):
                await serve(hub.coordinator, hub.address)

    asyncio.run(story())


# ----------------------------------------------------------------------------------------------------------- payloads

BIG = Layout((TensorSpec("weight", (1, 700_000)),))
"""A model of 2.8 MB: three chunks, the last not whole."""
BIG_MODEL = to_safetensors(BIG, np.zeros(BIG.size, dtype=np.float32))
UPDATE = np.linspace(0, 1, BIG.size, dtype="<f4").tobytes()


@dataclass
class Training:
    """A job of the sites a and b that stands in its first training step, which nobody has answered yet."""

    hub: Running
    job: str
    a: Site
    b: Site
    step: StepStart

    async def offset(self, payload: BlobRef, *chunks: bytes, job: str = "") -> int:
        """Opens an upload of a's, sends these chunks, and cuts the call off once the coordinator has them on disk."""
        partial = self.hub.folder / "spool" / (job or self.job) / str(self.step.step) / "a" / f"{payload.hex}.part"
        async with self.hub.opened(self.a.member) as connection:
            call = connection._upload(
                _said(UploadOpen(job or self.job, payload), *chunks), metadata=connection._metadata
            )
            reply = codec.decode_upload_reply(await anext(aiter(call)))
            assert isinstance(reply, UploadOffset)
            expected = reply.offset + sum(map(len, chunks))
            await until(lambda: partial.stat().st_size == expected)
            call.cancel()
        return reply.offset


async def _said(opened: UploadOpen, *chunks: bytes) -> AsyncIterator[bytes]:
    """An upload that stops without an end after these chunks."""
    yield codec.encode_upload_request(opened)
    for chunk in chunks:
        yield codec.encode_upload_request(UploadChunk(chunk))
    await asyncio.Event().wait()


@pytest.fixture
def training(
    running: Serving, site: Sites, consortium: Consortium, job_text: Callable[..., str]
) -> Callable[[], AbstractAsyncContextManager[Training]]:
    """Brings a job with a model of 2.8 MB to its first training step."""

    def silent(step: StepStart) -> bytes | None:
        return prepared(step) if step.kind is StepKind.STATISTICS else None

    @asynccontextmanager
    async def brought() -> AsyncIterator[Training]:
        a, b = site("a", silent), site("b", silent)
        async with running() as hub, hub.attending(a, b):
            operator = consortium.member("op", Role.OPERATOR)
            job = await hub.submit(operator, job_text(minimum=2), BIG_MODEL)
            step = await a.until(StepStart, 2)
            await b.until(StepStart, 2)
            assert isinstance(step, StepStart)
            yield Training(hub, job, a, b, step)

    return brought


@pytest.fixture
def offsets(monkeypatch: pytest.MonkeyPatch) -> Mapping[BlobRef, list[int]]:
    """From which offsets each payload was read to be sent, on either side."""
    seen = defaultdict[BlobRef, list[int]](list)
    chunks = BlobStore.chunks

    def spied(self: BlobStore, ref: BlobRef, offset: int = 0) -> Iterator[bytes]:
        seen[ref].append(offset)
        return chunks(self, ref, offset)

    monkeypatch.setattr(BlobStore, "chunks", spied)
    return seen


def test_an_upload_goes_on_from_where_it_was_cut(
    training: Callable[[], AbstractAsyncContextManager[Training]], offsets: Mapping[BlobRef, list[int]], tmp_path: Path
) -> None:
    """After a cut in the second chunk, and another, the rest alone is sent; what arrives is the payload."""

    async def story() -> None:
        async with training() as at:
            blobs = BlobStore(tmp_path / "own")
            ref = blobs.put(UPDATE)
            first, second = UPDATE[: CHUNK + 1000], UPDATE[CHUNK + 1000 : 2 * CHUNK + 1000]
            assert await at.offset(ref, first) == 0
            assert await at.offset(ref, second) == len(first)
            async with at.hub.opened(at.a.member) as connection:
                await connection.upload(at.job, ref, blobs)
                assert offsets[ref] == [len(first) + len(second)]
                await connection.upload(at.job, ref, blobs)  # it is there: nothing is sent again
                assert offsets[ref][1:] == [len(UPDATE)]
            stored = tmp_path / "spool" / at.job / str(at.step.step) / "a" / ref.hex
            assert stored.read_bytes() == UPDATE
            view = at.hub.coordinator.conductor.job(at.job).run.view(0.0)
            assert view.sites[0].bytes == 24 + len(UPDATE)  # its statistics, and each byte of its update once

    asyncio.run(story())


def test_a_stream_that_replaces_another_takes_its_upload_over(
    training: Callable[[], AbstractAsyncContextManager[Training]], offsets: Mapping[BlobRef, list[int]], tmp_path: Path
) -> None:
    """A site that lost its connection unnoticed goes on at once; the older call is told that it has ended."""

    async def story() -> None:
        async with training() as at, at.hub.opened(at.a.member) as stale, at.hub.opened(at.a.member) as fresh:
            blobs = BlobStore(tmp_path / "own")
            ref = blobs.put(UPDATE)
            more = asyncio.Event()

            async def slow() -> AsyncIterator[bytes]:
                yield codec.encode_upload_request(UploadOpen(at.job, ref))
                yield codec.encode_upload_request(UploadChunk(UPDATE[:CHUNK]))
                await more.wait()
                yield codec.encode_upload_request(UploadChunk(UPDATE[CHUNK : 2 * CHUNK]))

            call = stale._upload(slow(), metadata=stale._metadata)
            assert codec.decode_upload_reply(await anext(aiter(call))) == UploadOffset(0)
            partial = tmp_path / "spool" / at.job / str(at.step.step) / "a" / f"{ref.hex}.part"
            await until(lambda: partial.stat().st_size == CHUNK)
            await soon(fresh.upload(at.job, ref, blobs))
            assert offsets[ref] == [CHUNK]
            more.set()
            with pytest.raises(grpc.aio.AioRpcError, match="has ended"):
                await soon(anext(aiter(call)))
            assert (tmp_path / "spool" / at.job / str(at.step.step) / "a" / ref.hex).read_bytes() == UPDATE

    asyncio.run(story())


def test_a_download_goes_on_from_where_it_was_cut(
    training: Callable[[], AbstractAsyncContextManager[Training]], offsets: Mapping[BlobRef, list[int]], tmp_path: Path
) -> None:
    """The coordinator reads on from the bytes that the site has."""

    async def story() -> None:
        async with training() as at, at.hub.opened(at.a.member) as connection:
            blobs, model = BlobStore(tmp_path / "own"), at.step.model
            assert model == BlobRef.of(BIG_MODEL)
            incoming = blobs.receive(model)
            call = connection._download(codec.encode(DownloadRequest(model, 0)), metadata=connection._metadata)
            incoming.append(codec.decode(UploadChunk, await anext(aiter(call))).content)
            incoming.pause()
            call.cancel()
            await soon(connection.download(model, blobs))
            assert offsets[model][1:] == [0, CHUNK]  # after the reading by which it was submitted
            assert blobs.get(model) == BIG_MODEL
            await soon(connection.download(model, blobs))  # it is there: nothing is asked for again
            assert len(offsets[model]) == 3

    asyncio.run(story())


def _open(job: str, payload: BlobRef) -> bytes:
    return codec.encode_upload_request(UploadOpen(job, payload))


def _chunk(content: bytes) -> bytes:
    return codec.encode_upload_request(UploadChunk(content))


GOOD = BlobRef.of(UPDATE)
OTHER = BlobRef(bytes(32), len(UPDATE))
SHORTER = BlobRef.of(UPDATE[:-4])
CHUNKS = [_chunk(UPDATE[at : at + CHUNK]) for at in range(0, len(UPDATE), CHUNK)]


@dataclass(frozen=True)
class Wrong:
    """An upload that cannot be: its requests, whether they end, and the words that refuse it."""

    requests: Callable[[str], list[bytes]]
    words: str
    ends: bool = False

    async def said(self, job: str) -> AsyncIterator[bytes]:
        """The requests; an upload that does not end waits for what it is told."""
        for request in self.requests(job):
            yield request
        if not self.ends:
            await asyncio.Event().wait()


WRONG = (
    Wrong(lambda _: [], "a ended the stream before its first word", ends=True),
    Wrong(lambda _: [_chunk(b"x")], "a must name its payload before sending it"),
    Wrong(lambda _: [b"\xff\xff"], "malformed UploadRequest"),
    Wrong(lambda job: [_open(job, GOOD), _open(job, GOOD)], "a opened a second payload in one stream"),
    Wrong(
        lambda job: [_open(job, OTHER), *CHUNKS],
        "a payload's bytes are not those its digest 000000000000 names",
        ends=True,
    ),
    Wrong(
        lambda job: [_open(job, GOOD), *CHUNKS[:2], CHUNKS[0]],
        f"a payload declared as {len(UPDATE)} bytes went on past its end",
    ),
    Wrong(lambda job: [_open(job, GOOD), CHUNKS[0]], f"a payload of {len(UPDATE)} bytes stopped at {CHUNK}", ends=True),
    Wrong(lambda job: [_open(job, SHORTER)], f"does not wait for {len(UPDATE) - 4} bytes of a now"),
    Wrong(lambda _: [_open("heart-9", GOOD)], "there is no running job 'heart-9'"),
)


def test_an_upload_that_cannot_be_is_refused_and_the_right_one_then_taken(
    training: Callable[[], AbstractAsyncContextManager[Training]], tmp_path: Path
) -> None:
    """Each is refused in its own words; nothing of any stands in the way of the payload that was waited for."""

    async def story() -> None:
        async with training() as at, at.hub.opened(at.a.member) as connection:
            for wrong in WRONG:
                call = connection._upload(wrong.said(at.job), metadata=connection._metadata)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await soon(_drained(call))
                assert wrong.words in str(refused.value.details())
                assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            blobs = BlobStore(tmp_path / "own")
            await soon(connection.upload(at.job, blobs.put(UPDATE), blobs))
            assert (tmp_path / "spool" / at.job / str(at.step.step) / "a" / GOOD.hex).read_bytes() == UPDATE

    asyncio.run(story())


async def _drained(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> list[UploadReply]:
    return [codec.decode_upload_reply(reply) async for reply in call]


def test_only_a_site_that_is_asked_may_upload_and_only_once(
    training: Callable[[], AbstractAsyncContextManager[Training]], consortium: Consortium, tmp_path: Path
) -> None:
    """A member outside the roster, and one that has answered, are refused in the same words."""

    async def story() -> None:
        async with training() as at:
            blobs = BlobStore(tmp_path / "own")
            ref = blobs.put(UPDATE)
            async with at.hub.opened(consortium.member("c")) as stranger:
                with pytest.raises(RemoteProtocolError, match=r"does not wait for 2800000 bytes of c now.*next step"):
                    await stranger.upload(at.job, ref, blobs)
            async with at.hub.opened(at.a.member) as connection:
                await connection.upload(at.job, ref, blobs)
                at.a.outgoing.put_nowait(Contribution(at.job, at.step.step, at.step.attempt, ref, 1.0, 0.1))
                run = at.hub.coordinator.conductor.job(at.job).run
                await until(lambda: not run.expects("a", ref))
                with pytest.raises(RemoteProtocolError, match="does not wait for 2800000 bytes of a now"):
                    await connection.upload(at.job, ref, blobs)

    asyncio.run(story())


def test_what_is_not_offered_cannot_be_downloaded(
    training: Callable[[], AbstractAsyncContextManager[Training]], consortium: Consortium, tmp_path: Path
) -> None:
    """Neither another site's update, nor a payload nobody knows, nor, for those outside the roster, the job's model."""

    async def story() -> None:
        async with training() as at:
            blobs, model = BlobStore(tmp_path / "own"), at.step.model
            update = blobs.put(UPDATE)
            async with at.hub.opened(at.a.member) as connection:
                await connection.upload(at.job, update, blobs)
            fetched = BlobStore(tmp_path / "fetched")
            stranger, operator = consortium.member("c"), consortium.member("op", Role.OPERATOR)
            renewed = consortium.member("a", keys=at.a.member.keys)  # not the membership in the roster
            for who, payload in (
                (at.b.member, update),
                (at.b.member, BlobRef.of(b"x")),
                (stranger, model),
                (renewed, model),
            ):
                async with at.hub.opened(who) as connection:
                    words = f"payload {payload.hex[:12]} is not offered to {who.name}"
                    with pytest.raises(RemoteProtocolError, match=words):
                        await connection.download(payload, fetched)
            async with at.hub.opened(operator) as connection:
                with pytest.raises(RemoteProtocolError, match=f"no job ended with the model {model.hex[:12]}"):
                    await connection.download(model, fetched)
            assert [path for path in fetched.folder.iterdir() if path.suffix != ".part"] == []

    asyncio.run(story())


def test_a_step_that_is_over_takes_no_more_of_an_upload(
    training: Callable[[], AbstractAsyncContextManager[Training]], tmp_path: Path
) -> None:
    """A site that is still sending when the job ends is told so at its next chunk, and nothing of it stays."""

    async def story() -> None:
        async with training() as at, at.hub.opened(at.a.member) as connection:
            more = asyncio.Event()

            async def slow() -> AsyncIterator[bytes]:
                yield _open(at.job, GOOD)
                yield _chunk(UPDATE[:CHUNK])
                await more.wait()
                yield _chunk(UPDATE[CHUNK : 2 * CHUNK])
                await asyncio.Event().wait()

            call = connection._upload(slow(), metadata=connection._metadata)
            await soon(anext(aiter(call)))
            partial = tmp_path / "spool" / at.job / str(at.step.step) / "a" / f"{GOOD.hex}.part"
            await until(lambda: partial.stat().st_size == CHUNK)
            at.hub.coordinator.conductor.feed(at.job, StopAsked("op"))
            await at.a.until(JobEnded)
            more.set()
            with pytest.raises(grpc.aio.AioRpcError, match="does not wait for 2800000 bytes of a now"):
                await soon(_drained(call))
            await until(lambda: not (tmp_path / "spool" / at.job).exists())

    asyncio.run(story())


def test_a_payload_is_written_as_it_comes(running: Serving, consortium: Consortium, tmp_path: Path) -> None:
    """20 MB pass through both ends of one process in a few MB of memory: no side ever holds the whole."""
    operator, content = consortium.member("op", Role.OPERATOR), bytes(20 * 1024 * 1024)

    async def story() -> int:
        blobs = BlobStore(tmp_path / "own")
        ref = blobs.put(content)
        async with running() as hub, hub.opened(operator) as connection:
            tracemalloc.start()
            try:
                await soon(connection.upload("", ref, blobs))
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    assert asyncio.run(story()) < 8 * 1024 * 1024
    assert (tmp_path / "incoming" / BlobRef.of(content).hex).stat().st_size == len(content)


def test_a_revoked_site_is_cut_off_in_the_middle_of_a_payload(
    training: Callable[[], AbstractAsyncContextManager[Training]], consortium: Consortium, tmp_path: Path
) -> None:
    """A call that began while the membership held ends with the next chunk after it."""

    async def story() -> None:
        async with training() as at, at.hub.opened(at.a.member) as connection:
            more = asyncio.Event()

            async def slow() -> AsyncIterator[bytes]:
                yield _open(at.job, GOOD)
                await more.wait()
                yield _chunk(UPDATE[:CHUNK])
                await asyncio.Event().wait()

            call = connection._upload(slow(), metadata=connection._metadata)
            await soon(anext(aiter(call)))
            await at.hub.coordinator.members.revoke(consortium.revoked(at.a.member))
            more.set()
            with pytest.raises(grpc.aio.AioRpcError, match="the membership of a was revoked"):
                await soon(_drained(call))
            assert at.step.model is not None
            blobs = BlobStore(tmp_path / "own")
            with pytest.raises(IdentityError, match="the membership of a was revoked"):
                await soon(connection.download(at.step.model, blobs))

    asyncio.run(story())
