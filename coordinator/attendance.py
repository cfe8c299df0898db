"""Who is here: the sites' open streams, what waits to be sent on each, and when silence counts as absence."""

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Protocol

from coordinator.members import Members
from coordinator.records import SitePresence
from coordinator.store.store import Store
from coordinator.worker import Worker
from federation.errors import IdentityError, ParleyError, RemoteProtocolError, StorageError, WhoActs
from federation.messages import (
    PROTOCOL,
    Availability,
    FromCoordinator,
    FromSite,
    Heartbeat,
    Hello,
    MembershipStatement,
    RevocationList,
    SiteView,
    Welcome,
)
from federation.refusals import told
from privacy import identity

__all__ = ["Attendance", "Listener", "Peer"]

log = logging.getLogger("parley.coordinator")

HEARTBEAT_SECONDS = 5.0
"""A site and the coordinator say that they are there this often (200 sites then cost 2.3 % of a core, measured)."""

SILENCE_SECONDS = 4 * HEARTBEAT_SECONDS
"""After so long without a word a stream counts as dead."""

_QUEUE = 1000
"""Messages that may wait for one site; one that does not read so many is let go."""


@dataclass(eq=False, slots=True)
class Peer:
    """A site's open stream: what waits to be sent to it, and why the stream must end, once it must."""

    member: MembershipStatement
    outgoing: asyncio.Queue[FromCoordinator | None]
    heard: float
    closed_for: ParleyError | None = None

    @property
    def name(self) -> str:
        """The site's name."""
        return self.member.name

    def send(self, message: FromCoordinator | None) -> None:
        """Queues a message (None: the stream's end); a peer that does not read its stream is let go.

        Nothing is queued after the end, so that what waits for a peer that was let go stays as small as it is.
        """
        if self.closed_for is not None:
            return
        try:
            self.outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self.close(RemoteProtocolError(f"site {self.name} does not read its stream", who=WhoActs.SITE))

    def close(self, reason: ParleyError) -> None:
        """Ends the stream, for this reason; what still waits is not sent."""
        if self.closed_for is None:
            self.closed_for = reason
            while not self.outgoing.empty():
                self.outgoing.get_nowait()
            self.outgoing.put_nowait(None)


class Listener(Protocol):
    """Who is told of what sites do."""

    def arrived(self, site: str) -> None:
        """A site attends."""

    def left(self, site: str, *, for_good: bool = False) -> None:
        """A site went away, or was revoked."""

    def paused(self, site: str, *, paused: bool) -> None:
        """A site's administrator has paused it, or let it go on."""

    def heard(self, site: str, message: FromSite) -> None:
        """A site said something about a job. May raise RemoteProtocolError, which the site is told."""

    def doing(self, site: str) -> tuple[str, str]:
        """What a site is doing and what holds it back, in words; both empty when nothing."""


class Attendance:
    """The sites' open streams, one per site.

    Args:
        members: Who may attend.
        store: Keeps who was here, for the dashboard.
        worker: The thread in which the store is used.
    """

    def __init__(self, members: Members, store: Store, worker: Worker) -> None:
        self._members = members
        self._store = store
        self._worker = worker
        self._peers: dict[str, Peer] = {}
        self._presence = {each.name: replace(each, connected=False, state="away") for each in store.presence()}

    def present(self, site: str) -> bool:
        """Whether the site attends."""
        return site in self._peers

    def send(self, site: str, message: FromCoordinator) -> None:
        """Says something to a site; lost when it is not here."""
        if site in self._peers:
            self._peers[site].send(message)

    async def arrive(self, member: MembershipStatement, hello: Hello, listener: Listener) -> Peer:
        """Opens a site's stream; an older stream of the same site ends.

        Raises:
            RemoteProtocolError: The site speaks another version, or says that it is somebody else.
            IdentityError: Its membership ended meanwhile.
        """
        if hello.protocol != PROTOCOL:
            raise RemoteProtocolError(
                f"site {member.name} speaks version {hello.protocol} of the protocol, the coordinator {PROTOCOL}",
                fix=f"install Parley {metadata.version('parley-fl')} on both sides",
                who=WhoActs.SITE,
            )
        if hello.statement != member:
            raise RemoteProtocolError(f"site {member.name} presents another member's statement", who=WhoActs.SITE)
        await self._members.meet(member)
        self._members.still(member, time.time())
        older = self._peers.get(member.name)
        if older is not None:
            older.close(ParleyError(f"site {member.name} opened another stream", fix="run one agent per site"))
            self.leave(older, listener)
        peer = Peer(member, asyncio.Queue(_QUEUE), time.time())
        self._peers[member.name] = peer
        me = self._members.me
        proof = identity.sign_welcome(me.protocol_key, hello.nonce, member.serial, me.statement.serial)
        version = metadata.version("parley-fl")
        revocations = self._members.revocations
        peer.send(Welcome(PROTOCOL, version, me.statement, proof, revocations, HEARTBEAT_SECONDS, time.time()))
        log.info("%s attends", member.name)
        self._note(member.name, "attending")
        listener.arrived(member.name)
        return peer

    def leave(self, peer: Peer, listener: Listener, *, for_good: bool = False) -> None:
        """The stream of `peer` has ended."""
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            log.info("%s went away", peer.name)
            self._note(peer.name, "away", connected=False)
            listener.left(peer.name, for_good=for_good)

    def hear(self, peer: Peer, message: FromSite, listener: Listener) -> None:
        """Takes in what a site says; what cannot be is answered with a refusal and changes nothing.

        A stream that was ended is not listened to, however long it takes to close.
        """
        if peer.closed_for is not None:
            return
        peer.heard = time.time()
        try:
            match message:
                case Heartbeat():
                    return
                case Availability(available):
                    listener.paused(peer.name, paused=not available)
                case _:
                    listener.heard(peer.name, message)
        except RemoteProtocolError as refused:
            log.warning("%s: %s", peer.name, refused)
            peer.send(told(type(message).__name__, refused))

    def revoked(self, revocations: RevocationList, listener: Listener) -> None:
        """Ends the streams of revoked members and tells the others."""
        for peer in list(self._peers.values()):
            if peer.member.serial in revocations.serials:
                peer.close(IdentityError(f"the membership of {peer.name} was revoked", fix="ask the administrator why"))
                self.leave(peer, listener, for_good=True)
            else:
                peer.send(revocations)

    async def pulse(self, listener: Listener) -> None:
        """Says that we are here, lets go who is not, and stores who attends: once every heartbeat, for ever."""
        while True:
            for peer in list(self._peers.values()):
                self._beat(peer, time.time(), listener)
            await self._save()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _beat(self, peer: Peer, now: float, listener: Listener) -> None:
        try:
            self._members.still(peer.member, now)
        except IdentityError as over:
            peer.close(over)
        if now - peer.heard > SILENCE_SECONDS:
            silence = f"nothing heard from {peer.name} for {SILENCE_SECONDS:.0f} s"
            peer.close(ParleyError(silence, who=WhoActs.SITE))
        if peer.closed_for is not None:
            self.leave(peer, listener)
            return
        peer.send(Heartbeat())
        state, trouble = listener.doing(peer.name)
        self._note(peer.name, state or "attending", trouble=trouble)

    def view(self, member: MembershipStatement, listener: Listener) -> SiteView:
        """A member as an operator sees it."""
        seen = self._presence.get(member.name)
        here = self.present(member.name)
        state, trouble = listener.doing(member.name) if here else ("away", "not attending")
        return SiteView(
            name=member.name,
            organisation=member.organisation,
            connected=here,
            state=state or "attending",
            last_seen=seen.last_seen if seen else 0.0,
            seconds=0.0,
            bytes=0,
            trouble=trouble,
        )

    async def close(self) -> None:
        """Ends all streams, and stores that nobody attends: the coordinator is about to end."""
        for peer in self._peers.values():
            peer.close(ParleyError("the coordinator is shutting down", fix="nothing: sites come back by themselves"))
            self._note(peer.name, "away", connected=False)
        await self._save()

    def _note(self, site: str, state: str, *, trouble: str = "", connected: bool = True) -> None:
        self._presence[site] = SitePresence(site, connected, time.time(), state, trouble)

    async def _save(self) -> None:
        seen = tuple(self._presence.values())
        try:
            await self._worker.do(lambda: self._store.set_presence(seen))
        except StorageError as refused:  # heartbeats do not wait for a disk: the next one tries again
            log.warning("cannot store who attends: %s", refused)
