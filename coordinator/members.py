"""Who may call: members by the root's word on them, newcomers by their invitation, nobody who was revoked."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator import enrolment
from coordinator.store.store import Store
from coordinator.worker import Worker
from federation.errors import IdentityError, WhoActs
from federation.messages import (
    ApproveEnrolment,
    Credential,
    EnrolmentRequest,
    EnrolmentState,
    EnrolmentStatus,
    MembershipStatement,
    RevocationList,
    Role,
)
from privacy import identity

__all__ = ["CoordinatorIdentity", "Members"]

log = logging.getLogger("parley.coordinator")


@dataclass(frozen=True, slots=True)
class CoordinatorIdentity:
    """The coordinator's keys and papers (PEM). The consortium's root key is not among them."""

    consortium: str
    root_certificate: bytes
    certificate: bytes
    tls_key: bytes
    protocol_key: Ed25519PrivateKey
    statement: MembershipStatement
    revocations: RevocationList


class Members:
    """The consortium as the coordinator knows it. It can let in only whom the root signed.

    Args:
        me: The coordinator's identity.
        store: The durable memory.
        worker: The thread in which the store is used.
    """

    def __init__(self, me: CoordinatorIdentity, store: Store, worker: Worker) -> None:
        self.me = me
        self._store = store
        self._worker = worker
        self._root = identity.RootCertificate.parse(me.root_certificate)
        self._known = {member.serial: member for member in store.members()}
        self.revocations = max(store.revocations() or me.revocations, me.revocations, key=lambda each: each.version)
        self._newcomers: dict[str, set[asyncio.Event]] = {}

    def member(self, certificate: bytes, statement: MembershipStatement | None, now: float) -> MembershipStatement:
        """The member that holds this TLS certificate and shows the root's statement on it.

        Raises:
            IdentityError: It is no member, or one whose membership is over or revoked.
        """
        match identity.peer_of(certificate):
            case identity.Bootstrap():
                raise IdentityError(
                    "an invitation's certificate is good for enrolment only",
                    fix="join first: parley site join INVITATION",
                    who=WhoActs.SITE,
                )
            case identity.Member() as peer:
                if statement is None:
                    raise IdentityError("the call shows no membership statement", fix="use this release of Parley")
                self._verify(statement, now)
                identity.verify_binding(peer, statement)
                return statement

    def still(self, member: MembershipStatement, now: float) -> None:
        """Passes one who was let in before, as long as the membership holds: a stream may outlive it.

        Raises:
            IdentityError: The membership is over or was revoked.
        """
        if member.serial in self.revocations.serials:
            raise IdentityError(f"the membership of {member.name} was revoked", fix="ask the administrator why")
        if now >= member.not_after:
            raise IdentityError(f"the membership of {member.name} has expired", fix="enrol with a new invitation")

    def sites(self) -> tuple[MembershipStatement, ...]:
        """The newest membership of each site that is neither revoked nor expired, by name."""
        now = time.time()
        current = (
            member
            for member in self._known.values()
            if member.role is Role.SITE and member.serial not in self.revocations.serials and member.not_after > now
        )
        newest = {member.name: member for member in sorted(current, key=lambda each: each.not_before)}
        return tuple(newest[name] for name in sorted(newest))

    async def meet(self, member: MembershipStatement) -> None:
        """Remembers a verified member that was enrolled elsewhere, or before the store was lost."""
        if member.serial not in self._known:
            self._known[member.serial] = member
            await self._worker.insist("a member", lambda: self._store.add_member(member, b"", time.time()))

    async def pending(self) -> tuple[EnrolmentRequest, ...]:
        """The newcomers that wait for approval; not those whose invitation was withdrawn meanwhile."""
        waiting = await self._worker.do(self._store.pending)
        return tuple(each for each in waiting if each.invitation not in self.revocations.serials)

    async def enrol(self, certificate: bytes, request: EnrolmentRequest) -> AsyncIterator[EnrolmentStatus]:
        """Keeps a newcomer's request and says at once that it waits, then, when it is approved, with what.

        Raises:
            IdentityError: The request is not what its invitation allows.
        """
        peer = identity.peer_of(certificate)
        if not isinstance(peer, identity.Bootstrap):
            raise IdentityError("enrolment needs an invitation's certificate", fix="run: parley site join INVITATION")
        identity.verify_request(request, peer)
        self._check_invitation(request)
        approved = self._approved(request)
        if approved is None:
            await self._admit(request)
            yield EnrolmentStatus(EnrolmentState.WAITING)
            approved = await self._approval(request)
        signed = await self._worker.do(lambda: self._store.certificate(approved.serial))
        if not signed:
            raise IdentityError(
                f"the coordinator lost the certificate of {request.name}, whose membership holds",
                fix="have that membership revoked, and join with a new invitation",
            )
        credential = Credential(signed, approved, self.me.statement, self.revocations)
        yield EnrolmentStatus(EnrolmentState.APPROVED, credential)

    async def approve(self, approval: ApproveEnrolment) -> None:
        """Takes in what the root signed for a newcomer, who picks it up.

        Raises:
            IdentityError: Nobody waits under that invitation, or statement and certificate are not the root's on who
                waits, or another approval came first. The same one again changes nothing.
        """
        asked = await self._worker.do(lambda: self._store.enrolment(approval.invitation))
        if asked is None:
            raise IdentityError("no enrolment waits under this invitation", fix="see: parley consortium pending")
        enrolment.matches(asked, approval.statement)
        now = time.time()
        self._verify(approval.statement, now)
        statement, certificate = approval.statement, approval.certificate
        identity.verify_certificate(certificate, statement, self._root)
        earlier = await self._worker.do(lambda: self._store.enrolled(approval.invitation))
        if earlier not in {None, statement}:
            raise IdentityError(
                f"{asked.name} was approved under this invitation already, until another date",
                fix="nothing: the first approval stands",
            )
        if earlier is None:
            invitation = approval.invitation
            await self._worker.do(lambda: self._store.approve_enrolment(invitation, statement, certificate, now))
            log.info("%s is a member now", statement.name)
        self._known[statement.serial] = statement
        for waiting in self._newcomers.get(approval.invitation, ()):
            waiting.set()

    async def revoke(self, revocations: RevocationList) -> None:
        """Holds a newer revocation list, durably.

        Raises:
            IdentityError: It is not the root's, or older than the one held.
        """
        identity.verify_revocations(revocations, self._root.public_key, self.me.consortium, self.revocations)
        await self._worker.do(lambda: self._store.put_revocations(revocations))
        self.revocations = revocations
        for newcomers in self._newcomers.values():
            for waiting in newcomers:
                waiting.set()

    def _verify(self, statement: MembershipStatement, now: float) -> None:
        identity.verify_statement(statement, self._root.public_key, self.me.consortium, int(now), self.revocations)

    async def _admit(self, request: EnrolmentRequest) -> None:
        earlier = await self._worker.do(lambda: self._store.enrolment(request.invitation))
        enrolment.admissible(request, earlier, tuple(self._known.values()), self.revocations, time.time())
        if earlier is None:
            await self._worker.do(lambda: self._store.add_enrolment(request, time.time()))
            log.info("%s of %s asks to join as %s", request.name, request.organisation, request.role.value)

    async def _approval(self, request: EnrolmentRequest) -> MembershipStatement:
        """The membership of a newcomer, once there is one."""
        waiting = asyncio.Event()
        self._newcomers.setdefault(request.invitation, set()).add(waiting)
        try:
            while (approved := self._approved(request)) is None:
                self._check_invitation(request)
                waiting.clear()
                await waiting.wait()
            return approved
        finally:
            self._newcomers[request.invitation].discard(waiting)

    def _check_invitation(self, request: EnrolmentRequest) -> None:
        if request.invitation in self.revocations.serials:
            raise IdentityError(f"the invitation for {request.name} was withdrawn", fix="ask for a new one")

    def _approved(self, request: EnrolmentRequest) -> MembershipStatement | None:
        """The membership that this very request led to, if it did and holds."""
        now, revoked = time.time(), self.revocations.serials
        mine = (request.name, request.protocol_key, identity.tls_digest(request.tls_key))
        same = (m for m in self._known.values() if (m.name, m.protocol_key, m.tls_key) == mine)
        return next((m for m in same if m.serial not in revoked and now < m.not_after), None)
