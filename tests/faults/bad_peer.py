"""A member of the consortium that says whatever a test wants, byte by byte, to a coordinator that others trust."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from federation import codec
from federation.blobs import BlobStore
from federation.errors import ParleyError
from federation.job import digest
from federation.messages import (
    Contribution,
    DeclineCause,
    Declined,
    Heartbeat,
    Hello,
    JobAccepted,
    JobOffer,
    StepStart,
    Welcome,
)
from tests.consortium import prepared, soon

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    import grpc.aio

    from client.connection import Connection
    from federation.messages import FromCoordinator, FromSite, UploadOpen
    from tests.consortium import Person, Running

__all__ = ["BadPeer"]

T = TypeVar("T")


@dataclass(eq=False)
class BadPeer:
    """An open stream of a member that obeys nobody: it hears when it likes and says what it is told to."""

    member: Person
    connection: Connection
    folder: Path
    stream: grpc.aio.StreamStreamCall[bytes, bytes]
    outgoing: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)

    @classmethod
    @asynccontextmanager
    async def attending(cls, member: Person, hub: Running) -> AsyncIterator[BadPeer]:
        """A bad peer that was welcomed: its identity is in order, as is its first word."""
        outgoing: asyncio.Queue[bytes] = asyncio.Queue()

        async def said() -> AsyncIterator[bytes]:
            while True:
                yield await outgoing.get()

        async with hub.opened(member) as connection:
            stream = connection._attend(said(), metadata=connection._metadata)
            peer = cls(member, connection, hub.folder / "bad" / member.name, stream, outgoing)
            peer.say(Hello(1, "0.1.0", member.statement, bytes(32), 1.0))
            await peer.hear(Welcome)
            try:
                yield peer
            finally:
                stream.cancel()

    def say(self, message: FromSite | bytes) -> None:
        """Says a message, or bytes in the place of one."""
        self.outgoing.put_nowait(message if isinstance(message, bytes) else codec.encode_from_site(message))

    async def next(self) -> FromCoordinator:
        """What the coordinator says next, heartbeats left out."""
        while isinstance(message := codec.decode_from_coordinator(await soon(anext(aiter(self.stream)))), Heartbeat):
            pass
        return message

    async def hear(self, kind: type[T]) -> T:
        """The next message of a kind; what comes before it is passed over."""
        while not isinstance(message := await self.next(), kind):
            pass
        return message

    async def accept(self) -> None:
        """Accepts the job that it is offered, as an honest site does."""
        offer = await self.hear(JobOffer)
        self.say(JobAccepted(offer.job, digest(offer.text)))

    async def ended(self) -> ParleyError:
        """Why the coordinator ended the stream."""
        return await self._refused(self.next)

    async def upload(self, opened: UploadOpen, *requests: bytes) -> ParleyError:
        """Why an upload of these requests, which does not end by itself, was refused."""

        async def said() -> AsyncIterator[bytes]:
            yield codec.encode_upload_request(opened)
            for request in requests:
                yield request
            await asyncio.Event().wait()

        call = self.connection._upload(said(), metadata=self.connection._metadata)
        return await self._refused(lambda: soon(anext(aiter(call))))

    async def _refused(self, read: Callable[[], Awaitable[object]]) -> ParleyError:
        """The error in which reading ends, as our own client would have it."""
        try:
            async with self.connection._telling():
                while True:
                    await read()
        except ParleyError as told:
            return told

    async def contribution(self, step: StepStart, content: bytes | None = None) -> Contribution:
        """Uploads a payload, by default an honest one, and returns the words that would have it counted."""
        blobs = BlobStore(self.folder)
        payload = blobs.put(prepared(step) if content is None else content)
        await soon(self.connection.upload(step.job, payload, blobs))
        return Contribution(step.job, step.step, step.attempt, payload, 1.0, 0.1)

    def decline(self, step: StepStart) -> None:
        """Lets the others go on without it."""
        self.say(Declined(step.job, step.step, step.attempt, DeclineCause.DATA))
