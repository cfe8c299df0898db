"""A whole consortium in one process: its root, its members, and a coordinator served over real mutual TLS."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256")  # with ECDSA leaves: TLS 1.3 only

import numpy as np

from client.connection import Connection, Line
from coordinator.members import CoordinatorIdentity
from federation import codec
from federation.blobs import BlobStore
from federation.job import digest
from federation.messages import (
    Contribution,
    DeclineCause,
    Declined,
    Hello,
    JobAccepted,
    JobOffer,
    Role,
    StepKind,
    StepStart,
    SubmitJob,
    Welcome,
)
from federation.vector import Layout, TensorSpec, to_safetensors
from privacy import identity
from privacy.identity import Invitation, MemberKeys, Root

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from coordinator.coordinator import Coordinator
    from coordinator.store import Store
    from federation.messages import (
        FromCoordinator,
        FromSite,
        MembershipStatement,
        RevocationList,
    )

T = TypeVar("T")

DAY = 24 * 3600
PATIENCE = 20.0
"""Seconds after which what a test waits for counts as never coming."""

LAYOUT = Layout((TensorSpec("weight", (1, 1)), TensorSpec("bias", (1,))))
"""A logistic regression on one column."""


@dataclass(frozen=True)
class Person:
    """One member of a consortium, with all that it holds."""

    keys: MemberKeys
    certificate: bytes
    statement: MembershipStatement

    @property
    def name(self) -> str:
        """Its name."""
        return self.statement.name


class Consortium:
    """A root two years old, its coordinator `hub`, and as many members as a test asks for."""

    def __init__(self, name: str = "heart-study") -> None:
        self.now = int(time.time())
        self.root = Root.create(name, self.now - 800 * DAY)
        self.hub = self.member("hub", Role.COORDINATOR)
        self.nobody = self.root.sign_revocations(0, self.now, ())

    def member(self, name: str, role: Role = Role.SITE, *, days_ago: int = 0, keys: MemberKeys | None = None) -> Person:
        """A member for 365 days from `days_ago` on."""
        held = keys or MemberKeys.generate()
        request = identity.request_for(name, f"{name}-clinic", role, held, "0.1.0")
        certificate, statement = self.root.approve(request, self.now - days_ago * DAY)
        return Person(held, certificate, statement)

    def revoked(self, *members: Person, version: int = 1) -> RevocationList:
        """The list that revokes these members."""
        return self.root.sign_revocations(version, self.now, [member.statement.serial for member in members])

    def invitation(self, name: str, address: str, role: Role = Role.SITE) -> Invitation:
        """An invitation that is good for two days."""
        return self.root.invite(name, f"{name}-clinic", role, address=address, coordinator="hub", now=self.now)

    @property
    def me(self) -> CoordinatorIdentity:
        """The coordinator's identity."""
        return CoordinatorIdentity(
            self.root.consortium,
            self.root.certificate_pem,
            self.hub.certificate,
            self.hub.keys.tls_pem,
            self.hub.keys.protocol,
            self.hub.statement,
            self.nobody,
        )


@dataclass(frozen=True)
class Running:
    """A coordinator that listens on loopback."""

    consortium: Consortium
    coordinator: Coordinator
    store: Store
    folder: Path
    port: int

    @property
    def address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def line(self, member: Person, statement: bytes | None = None) -> Line:
        """The line of a member; `statement` shows another than its own."""
        root = self.consortium.root
        return Line(
            self.address,
            identity.tls_name("hub", root.consortium),
            root.certificate_pem,
            member.certificate,
            member.keys.tls_pem,
            codec.encode(member.statement) if statement is None else statement,
        )

    def opened(self, member: Person, statement: bytes | None = None) -> AbstractAsyncContextManager[Connection]:
        """A member's connection."""
        return Connection.opened(self.line(member, statement))

    def door(self, invitation: Invitation) -> AbstractAsyncContextManager[Connection]:
        """A newcomer's connection."""
        return Connection.opened(
            Line(
                self.address,
                invitation.tls_name,
                invitation.root.pem,
                invitation.certificate_pem,
                invitation.key_pem,
            )
        )

    @asynccontextmanager
    async def attending(self, *sites: Site) -> AsyncIterator[None]:
        """These sites attend, in this order, until the block ends."""
        tasks = []
        try:
            for site in sites:
                tasks.append(asyncio.create_task(site.attend(self)))
                await soon(site.welcomed.wait())
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(self, operator: Person, text: str, model: bytes | None = None) -> str:
        """Submits a job, as the command does, and returns its id."""
        blobs = BlobStore(self.folder / "desk")
        async with self.opened(operator) as connection:
            ref = blobs.put(model or initial_model())
            await connection.upload("", ref, blobs)
            return (await connection.operate(SubmitJob(text, ref))).job


def initial_model(*values: float) -> bytes:
    """The safetensors file of a model; zeros unless told otherwise."""
    return to_safetensors(LAYOUT, np.array(values or (0.0, 0.0), dtype=np.float32))


def prepared(step: StepStart, count: int = 0) -> bytes:
    """An honest contribution of a site with few rows; `count` makes it differ from another's."""
    match step.kind:
        case StepKind.STATISTICS:
            return np.array([10.0, 1.0 + count / 10, 5.0], dtype="<f8").tobytes()
        case StepKind.TRAIN:
            return np.array([0.5, -0.25 - count], dtype="<f4").tobytes()
        case StepKind.EVALUATE:
            words = np.zeros(step.length // 8, dtype="<f8")
            words[:3] = 4, 3, 2.0 / (1 + step.round)  # rows, correct, summed loss
            words[3 + 300] = words[3 + 512 + 200] = 2  # two rows of each class, told apart
            return words.tobytes()


Answer = bytes | DeclineCause | None
"""What a site does for a step: it uploads these bytes, declines, or says nothing."""


@dataclass(eq=False)
class Site:
    """A site's end of the protocol, which answers steps with prepared vectors and never trains."""

    member: Person
    folder: Path
    answer: Callable[[StepStart], Answer] = prepared
    weight: float = 1.0
    heard: list[FromCoordinator] = field(default_factory=list)
    outgoing: asyncio.Queue[FromSite] = field(default_factory=asyncio.Queue)
    welcomed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def name(self) -> str:
        """Its name."""
        return self.member.name

    @property
    def steps(self) -> list[StepStart]:
        """The steps that it was asked for."""
        return [message for message in self.heard if isinstance(message, StepStart)]

    def hello(self, **changes: object) -> Hello:
        """Its first word."""
        said = {
            "protocol": 1,
            "software": "0.1.0",
            "statement": self.member.statement,
            "nonce": bytes(32),
            "clock": 1.0,
        }
        return Hello(**(said | changes))

    async def attend(self, running: Running) -> None:
        """Attends and answers until the coordinator ends the stream; raises what it is told."""
        self.outgoing = asyncio.Queue()
        self.outgoing.put_nowait(self.hello())
        try:
            async with running.opened(self.member) as connection:
                async for message in connection.attend(self._said()):
                    self.heard.append(message)
                    await self._react(connection, message)
                    async with self.news:
                        self.news.notify_all()
        finally:
            self.ended.set()

    async def until(self, kind: type[FromCoordinator], count: int = 1) -> FromCoordinator:
        """Waits until it has heard `count` messages of a kind, and returns the last of them."""
        found: list[FromCoordinator] = []

        def enough() -> bool:
            found[:] = [message for message in self.heard if isinstance(message, kind)]
            return len(found) >= count

        async with self.news:
            await soon(self.news.wait_for(enough))
        return found[count - 1]

    async def _said(self) -> AsyncIterator[FromSite]:
        while True:
            yield await self.outgoing.get()

    async def _react(self, connection: Connection, message: FromCoordinator) -> None:
        match message:
            case Welcome():
                self.welcomed.set()
            case JobOffer(job, text, _):
                self.outgoing.put_nowait(JobAccepted(job, digest(text)))
            case StepStart(job, step, attempt):
                match self.answer(message):
                    case DeclineCause() as cause:
                        self.outgoing.put_nowait(Declined(job, step, attempt, cause))
                    case bytes() as content:
                        blobs = BlobStore(self.folder / self.name)
                        ref = blobs.put(content)
                        await connection.upload(job, ref, blobs)
                        self.outgoing.put_nowait(Contribution(job, step, attempt, ref, self.weight, 0.25))


async def until(holds: Callable[[], bool]) -> None:
    """Returns once `holds` does."""
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - it looks at the product's own state, which sets no event
            await asyncio.sleep(0.002)


async def soon(waited: Awaitable[T]) -> T:
    """The result of what must come soon."""
    async with asyncio.timeout(PATIENCE):
        return await waited


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
