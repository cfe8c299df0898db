"""The consortium's own files, and what its administrator does with them: invite, approve, admit, revoke."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from federation import codec, files
from federation.errors import IdentityError, WhoActs
from federation.messages import Credential, EnrolmentRequest, MembershipStatement, RevocationList, Role
from parley.homes.member import Connection, MemberHome, coordinator_request, credential_text
from privacy import identity
from privacy.identity import Bootstrap, Root, RootCertificate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from privacy.identity import Invitation

__all__ = ["Consortium", "ConsortiumHome", "ConsortiumSettings", "InvitationRecord", "Registered"]

_INIT = "run `parley consortium init NAME`, or name the right folder with --home or PARLEY_HOME"
_COORDINATOR_DAYS = 3 * 365
_OPERATOR_DAYS = 3650
"""The first operator's keys lie beside the root key, which could sign it anew at any time."""


@dataclass(frozen=True, slots=True)
class ConsortiumSettings:
    """What every invitation says, and the first operator's name."""

    name: str
    address: str
    coordinator: str
    operator: str


@dataclass(frozen=True, slots=True)
class InvitationRecord:
    """An invitation that was given out, without its secret; the keys (hexadecimal) are those that used it, or empty."""

    serial: str
    name: str
    organisation: str
    role: Role
    expires: int
    tls_key: str = ""
    protocol_key: str = ""

    @property
    def used(self) -> bool:
        """Whether a newcomer was approved under it."""
        return bool(self.tls_key)

    @property
    def invited(self) -> Bootstrap:
        """Whom it invited."""
        return Bootstrap(self.serial, self.name, self.organisation, self.role)


@dataclass(frozen=True, slots=True)
class Registered:
    """A member as the root signed it."""

    statement: MembershipStatement
    certificate: bytes


@dataclass(frozen=True, slots=True)
class ConsortiumHome:
    """The consortium's folder, on its administrator's machine, and where the first operator's identity lies."""

    folder: Path
    operator: MemberHome

    def create(
        self,
        name: str,
        address: str,
        coordinator: str,
        *,
        passphrase: str | None,
        now: int,
        operator: str = "admin",
        organisation: str | None = None,
    ) -> Consortium:
        """Makes root key, empty revocation list and first operator; they appear in `folder` all at once.

        The operator (of `organisation`, by default the consortium's name) is complete when the coordinator is admitted.

        Raises:
            IdentityError: A consortium or an operator is here already, or a name, the address or passphrase cannot be.
        """
        if self.folder.exists():
            raise IdentityError(
                f"{self.folder} holds a consortium already",
                fix="keep using it, or choose another folder with --home or PARLEY_HOME",
                who=WhoActs.YOU,
            )
        settings = ConsortiumSettings(name, address, coordinator, operator)
        identity.require_address(address)
        identity.require_name(name, "a consortium's name")
        identity.require_organisation(organisation or name)
        for value in (coordinator, operator):
            identity.require_name(value, "a member's name")
        if coordinator == operator:
            raise IdentityError(
                f"the coordinator cannot be called {operator}: that is the first operator's name",
                fix="choose another name with --coordinator",
                who=WhoActs.YOU,
            )
        root = Root.create(name, now)
        root_key = root.key_pem(passphrase)
        request = identity.request_for(operator, organisation or name, Role.OPERATOR, self.operator.begin(), "init")
        certificate, statement = root.approve(request, now, _OPERATOR_DAYS)

        draft = replace(self, folder=self.folder.with_name(self.folder.name + ".new"))
        shutil.rmtree(draft.folder, ignore_errors=True)
        files.write(draft.folder / "root.key", root_key, secret=True)
        files.write(draft.folder / "root.pem", root.certificate_pem)
        files.write_json(draft.folder / "consortium.json", settings)
        draft.put_revocations(root.sign_revocations(0, now, ()))
        draft.put_member(Registered(statement, certificate))
        files.rename(draft.folder, self.folder)
        return Consortium(self, root)

    @property
    def encrypted(self) -> bool:
        """Whether the root key wants a passphrase."""
        return b"ENCRYPTED" in self._content("root.key")

    def unlock(self, passphrase: str | None) -> Consortium:
        """The consortium with its root key, ready to sign.

        Raises:
            IdentityError: The passphrase is wrong, missing or not needed.
            StorageError: There is no consortium here.
        """
        return Consortium(self, Root.load(self._content("root.key"), self._content("root.pem"), passphrase))

    def settings(self) -> ConsortiumSettings:
        """Names and address."""
        return files.read_json(ConsortiumSettings, self.folder / "consortium.json", _INIT)

    def root_certificate(self) -> RootCertificate:
        """The root's public half."""
        return RootCertificate.parse(self._content("root.pem"))

    def revocations(self) -> RevocationList:
        """The newest revocation list."""
        return files.decode(RevocationList, self.folder / "revocations.bin", _INIT)

    def members(self) -> tuple[Registered, ...]:
        """The newest membership under each name, by name; some may be expired or revoked."""
        found = sorted((self.folder / "members").glob("*.bin"))
        return tuple(member for path in found if (member := self.member(path.stem)) is not None)

    def member(self, name: str) -> Registered | None:
        """The newest membership under `name`."""
        identity.require_name(name, "a member's name")
        path = self.folder / "members" / f"{name}.bin"
        if not path.exists():
            return None
        return Registered(files.decode(MembershipStatement, path, _INIT), files.read(path.with_suffix(".pem"), _INIT))

    def invitations(self) -> tuple[InvitationRecord, ...]:
        """All invitations ever given out, by expiry."""
        serials = (path.stem for path in (self.folder / "invitations").glob("*.json"))
        records = (record for serial in serials if (record := self.invitation(serial)) is not None)
        return tuple(sorted(records, key=lambda record: (record.expires, record.serial)))

    def invitation(self, serial: str) -> InvitationRecord | None:
        """The invitation given out under `serial` (32 hexadecimal digits)."""
        path = self.folder / "invitations" / f"{serial}.json"
        return files.read_json(InvitationRecord, path, _INIT) if path.exists() else None

    def put_revocations(self, revocations: RevocationList) -> None:
        """Stores the newest revocation list."""
        files.write(self.folder / "revocations.bin", codec.encode(revocations))

    def put_member(self, member: Registered) -> None:
        """Stores a membership under its name."""
        path = self.folder / "members" / f"{member.statement.name}.bin"
        files.write(path.with_suffix(".pem"), member.certificate)
        files.write(path, codec.encode(member.statement))

    def put_invitation(self, record: InvitationRecord) -> None:
        """Stores an invitation under its serial."""
        files.write_json(self.folder / "invitations" / f"{record.serial}.json", record)

    def _content(self, name: str) -> bytes:
        return files.read(self.folder / name, _INIT)


@dataclass(frozen=True, slots=True)
class Consortium:
    """A consortium whose root key is at hand. Each act is durable before it returns; a repeated one changes nothing."""

    home: ConsortiumHome
    root: Root

    def invite(self, name: str, organisation: str, role: Role, *, now: int, hours: int = 48) -> Invitation:
        """An invitation for one newcomer, recorded without its secret.

        Raises:
            IdentityError: The name is taken by a member or an open invitation, or something about it cannot be.
        """
        self._require_free(name, now)
        settings = self.home.settings()
        invitation = self.root.invite(
            name,
            organisation,
            role,
            address=settings.address,
            coordinator=settings.coordinator,
            now=now,
            hours=hours,
        )
        serial = invitation.invited.invitation
        self.home.put_invitation(InvitationRecord(serial, name, organisation, role, invitation.expires))
        return invitation

    def approve(self, request: EnrolmentRequest, *, now: int, days: int = 365) -> Registered:
        """Makes a newcomer the member that its invitation says; asked again with the same keys, gives the same.

        Raises:
            IdentityError: The invitation was never given out, was withdrawn, expired or used with other keys, the name
                is taken, or the request is not that of the one invited.
        """
        record = self._record(request)
        identity.verify_request(request, record.invited)
        keys = (request.tls_key.hex(), request.protocol_key.hex())
        if record.used and (record.tls_key, record.protocol_key) != keys:
            raise IdentityError(
                f"the invitation for {record.name} was already used, with other keys",
                fix=f"if {record.name} lost its keys, `parley consortium revoke {record.name}` and invite it again",
            )
        member = self.home.member(record.name)
        if record.used and member is not None and self._active(member, now) and _holds(member, request):
            return member
        if now >= record.expires:
            raise IdentityError(
                f"the invitation for {record.name} expired on {identity.date(record.expires)}",
                fix=f"give out a new one: `parley consortium invite {record.name}`",
            )
        self._require_free(record.name, now, apart_from=record.serial)
        certificate, statement = self.root.approve(request, now, days)
        self.home.put_invitation(replace(record, tls_key=keys[0], protocol_key=keys[1]))
        member = Registered(statement, certificate)
        self.home.put_member(member)
        return member

    def admit(self, text: str, hosts: Sequence[str] = (), *, now: int, days: int = _COORDINATOR_DAYS) -> str:
        """Makes the sender of a request string the coordinator, and completes the first operator: a credential string.

        Asked again with the same keys and hosts, it gives the same membership.

        Raises:
            IdentityError: It is not a coordinator's request or not of the name expected, or there is a coordinator.
        """
        request = coordinator_request(text)
        settings = self.home.settings()
        if request.name != settings.coordinator:
            raise IdentityError(
                f"the request is of {request.name}; {settings.name}'s coordinator is called {settings.coordinator}",
                fix=f"run `parley coordinator init --name {settings.coordinator}` there",
                who=WhoActs.COORDINATOR,
            )
        member = self.home.member(request.name)
        if member is None or not self._active(member, now):
            certificate, statement = self.root.approve(request, now, days, hosts)
            member = Registered(statement, certificate)
            self.home.put_member(member)
        elif not _holds(member, request) or identity.hosts_of(member.certificate) != identity.host_names(hosts):
            raise IdentityError(
                f"{request.name} is the coordinator already, with other keys or hosts",
                fix=f"to replace it, `parley consortium revoke {request.name}` and admit this one then",
            )
        self._complete_operator(settings, member.statement, now)
        credential = Credential(member.certificate, member.statement, member.statement, self.home.revocations())
        return credential_text(settings.address, self.root.public, credential)

    def revoke(self, name: str, *, now: int) -> RevocationList:
        """Revokes a member and all invitations of its name; its name is free then. The new list is to be published.

        Raises:
            IdentityError: There is no such member and no such open invitation, or it is the last operator.
        """
        held = self.home.revocations()
        member = self.home.member(name)
        records = [record for record in self.home.invitations() if record.name == name]
        serials = {record.serial for record in records if record.used or now < record.expires}
        if member is not None and self._active(member, now):
            self._require_other_operator(member, now)
            serials.add(member.statement.serial)
        if serials <= set(held.serials):
            raise IdentityError(
                f"there is no member and no open invitation of the name {name}",
                fix="see who is: `parley consortium members`",
                who=WhoActs.YOU,
            )
        revocations = self.root.sign_revocations(held.version + 1, now, serials | set(held.serials))
        self.home.put_revocations(revocations)
        if self.home.operator.complete:
            self.home.operator.update_revocations(revocations)
        return revocations

    def _active(self, member: Registered, now: int) -> bool:
        statement = member.statement
        return now < statement.not_after and statement.serial not in self.home.revocations().serials

    def _record(self, request: EnrolmentRequest) -> InvitationRecord:
        record = self.home.invitation(request.invitation)
        if record is None:
            raise IdentityError(
                f"{request.name} names the invitation {request.invitation[:8]}, which was never given out",
                fix="do not approve it; somebody may be posing as a newcomer",
            )
        if record.serial in self.home.revocations().serials:
            raise IdentityError(
                f"the invitation for {record.name} was withdrawn (`parley consortium revoke`)",
                fix=f"give out a new one: `parley consortium invite {record.name}`",
            )
        return record

    def _require_free(self, name: str, now: int, apart_from: str = "") -> None:
        if name == self.home.settings().coordinator:
            raise _name_taken(name, "the coordinator")
        member = self.home.member(name)
        if member is not None and self._active(member, now):
            raise _name_taken(name, f"a member ({member.statement.role.value} of {member.statement.organisation})")
        revoked = self.home.revocations().serials
        for record in self.home.invitations():
            waits = not record.used and now < record.expires and record.serial not in revoked
            if waits and record.name == name and record.serial != apart_from:
                raise _name_taken(name, f"an open invitation until {identity.date(record.expires)}")

    def _require_other_operator(self, leaving: Registered, now: int) -> None:
        operators = [
            member
            for member in self.home.members()
            if member.statement.role is Role.OPERATOR and self._active(member, now)
        ]
        if operators == [leaving]:
            raise IdentityError(
                f"{leaving.statement.name} is the last operator: nobody could publish the new list",
                fix="let another operator join first: `parley consortium invite NAME --role operator`",
                who=WhoActs.YOU,
            )

    def _complete_operator(self, settings: ConsortiumSettings, coordinator: MembershipStatement, now: int) -> None:
        member = self.home.member(settings.operator)
        if member is None or not self._active(member, now):
            return
        credential = Credential(member.certificate, member.statement, coordinator, self.home.revocations())
        connection = Connection(settings.address, settings.name, settings.coordinator)
        self.home.operator.install(credential, self.root.public, connection, name=settings.operator, now=now)


def _holds(member: Registered, request: EnrolmentRequest) -> bool:
    statement = member.statement
    return (statement.tls_key, statement.protocol_key) == (identity.tls_digest(request.tls_key), request.protocol_key)


def _name_taken(name: str, holder: str) -> IdentityError:
    return IdentityError(
        f"the name {name} is taken by {holder}",
        fix=f"choose another name, or free this one by `parley consortium revoke {name}`",
        who=WhoActs.YOU,
    )
