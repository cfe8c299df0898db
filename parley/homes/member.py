"""A member's own files: its keys, its credential, and the strings that a coordinator's enrolment is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from federation import codec, files
from federation.errors import IdentityError, RemoteProtocolError, WhoActs
from federation.messages import Credential, EnrolmentRequest, MembershipStatement, RevocationList, Role
from privacy import identity
from privacy.identity import MemberKeys, RootCertificate

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Connection", "Identity", "MemberHome", "coordinator_request", "credential_text"]

_REQUEST = "parley-request1:"
_CREDENTIAL = "parley-credential1:"

_MADE_BY = {
    Role.SITE: "run `parley site join INVITATION` with the string that the consortium's administrator gave you",
    Role.OPERATOR: "run `parley operator join INVITATION`, or `parley consortium admit REQUEST` beside the root key",
    Role.COORDINATOR: (
        "run `parley coordinator init`, have its request admitted by `parley consortium admit REQUEST`, "
        "and run `parley coordinator install CREDENTIAL`"
    ),
}


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the coordinator is, and whom to expect there."""

    address: str
    consortium: str
    coordinator: str

    @property
    def tls_name(self) -> str:
        """The host name to expect in the coordinator's certificate."""
        return identity.tls_name(self.coordinator, self.consortium)


@dataclass(frozen=True, slots=True)
class Identity:
    """All that a member is: its keys, what the root said of them, and whom it trusts."""

    keys: MemberKeys
    certificate: bytes
    statement: MembershipStatement
    root: RootCertificate
    coordinator: MembershipStatement
    revocations: RevocationList
    connection: Connection


@dataclass(frozen=True, slots=True)
class MemberHome:
    """A member's folder. Its identity is made once: `begin` makes the keys, `install` adds the root's word on them."""

    folder: Path
    role: Role

    @property
    def identity_folder(self) -> Path:
        """Where keys and credential lie."""
        return self.folder / "identity"

    @property
    def complete(self) -> bool:
        """Whether an identity is installed."""
        return self._path("statement.bin").exists()

    def begin(self) -> MemberKeys:
        """The keys of an enrolment: made and stored on the first call, the same on each until `install`.

        Raises:
            IdentityError: An identity is installed already.
        """
        if self.complete:
            raise self._taken()
        if self._path("tls.key").exists() and self._path("protocol.key").exists():
            return self._keys()
        keys = MemberKeys.generate()
        files.write(self._path("protocol.key"), keys.protocol_pem, secret=True)
        files.write(self._path("tls.key"), keys.tls_pem, secret=True)
        return keys

    def install(
        self, credential: Credential, root: RootCertificate, connection: Connection, *, name: str, now: int
    ) -> Identity:
        """Stores a credential for the keys of `begin`; the same one may be installed again.

        Raises:
            IdentityError: The credential does not make this machine that member now, or another is installed already.
        """
        keys = self._keys()
        identity.accept_credential(
            credential, root, keys, name=name, role=self.role, coordinator=connection.coordinator, now=now
        )
        if self.complete and self._statement("statement.bin") != credential.statement:
            raise self._taken()
        files.write(self._path("certificate.pem"), credential.certificate)
        files.write(self._path("root.pem"), root.pem)
        files.write(self._path("coordinator.bin"), codec.encode(credential.coordinator))
        files.write(self._path("revocations.bin"), codec.encode(credential.revocations))
        files.write_json(self._path("connection.json"), connection)
        files.write(self._path("statement.bin"), codec.encode(credential.statement))
        return self.load()

    def request(self, name: str, organisation: str, software: str) -> str:
        """A request for membership as one string, for the administrator's `admit`; makes the keys if need be.

        Raises:
            IdentityError: An identity is installed already, or the names cannot be.
        """
        identity.require_name(name, "a member's name")
        identity.require_organisation(organisation)
        request = identity.request_for(name, organisation, self.role, self.begin(), software)
        return identity.armour(_REQUEST, codec.encode(request))

    def install_text(self, text: str, now: int) -> Identity:
        """Stores the credential in the string that the administrator's `admit` gave.

        Raises:
            IdentityError: It is no such string, cut short or mistyped, or not for these keys.
        """
        fix = "paste the whole string that `parley consortium admit` printed"
        content = identity.unarmour(_CREDENTIAL, text, "a credential", fix)
        try:
            address, root_der, encoded = identity.unpack(content, 3)
            credential = codec.decode(Credential, encoded)
            host = address.decode()
        except (ValueError, RemoteProtocolError) as broken:
            raise IdentityError("this credential cannot be read", fix=fix, who=WhoActs.YOU) from broken
        root = RootCertificate.parse(root_der)
        connection = Connection(host, root.consortium, credential.coordinator.name)
        return self.install(credential, root, connection, name=credential.statement.name, now=now)

    def load(self) -> Identity:
        """The installed identity; whether it is still valid is for `identity.verify_statement`.

        Raises:
            StorageError: It, or a part of it, is missing or damaged; the message says how it is made.
        """
        return Identity(
            keys=self._keys(),
            certificate=self._content("certificate.pem"),
            statement=self._statement("statement.bin"),
            root=RootCertificate.parse(self._content("root.pem")),
            coordinator=self._statement("coordinator.bin"),
            revocations=files.decode(RevocationList, self._path("revocations.bin"), self._missing),
            connection=files.read_json(Connection, self._path("connection.json"), self._missing),
        )

    def update_revocations(self, revocations: RevocationList) -> None:
        """Holds `revocations` from now on, durably, if the root signed them and they are not older than those held.

        Raises:
            IdentityError: They are another root's or older.
        """
        own = self.load()
        identity.verify_revocations(revocations, own.root.public_key, own.root.consortium, own.revocations)
        files.write(self._path("revocations.bin"), codec.encode(revocations))

    def _path(self, name: str) -> Path:
        return self.identity_folder / name

    @property
    def _missing(self) -> str:
        return _MADE_BY[self.role]

    def _content(self, name: str) -> bytes:
        return files.read(self._path(name), self._missing)

    def _statement(self, name: str) -> MembershipStatement:
        return files.decode(MembershipStatement, self._path(name), self._missing)

    def _keys(self) -> MemberKeys:
        return MemberKeys.load(self._content("tls.key"), self._content("protocol.key"))

    def _taken(self) -> IdentityError:
        held = self._statement("statement.bin")
        return IdentityError(
            f"{self.identity_folder} holds the identity of {held.role.value} {held.name} in {held.consortium} already",
            fix="keep using it, or move that folder away and enrol anew",
            who=WhoActs.YOU,
        )


def coordinator_request(text: str) -> EnrolmentRequest:
    """The request in a coordinator's string, proofs checked: show its `identity.fingerprints` before it is admitted.

    Raises:
        IdentityError: It is no such string, cut short or mistyped, not a coordinator's, or a proof does not verify.
    """
    fix = "paste the whole string that `parley coordinator init` printed"
    content = identity.unarmour(_REQUEST, text, "a coordinator's request", fix)
    try:
        request = codec.decode(EnrolmentRequest, content)
    except RemoteProtocolError as broken:
        raise IdentityError("this request cannot be read", fix=fix, who=WhoActs.YOU) from broken
    if request.role is not Role.COORDINATOR:
        problem = f"this is the request of a {request.role.value}, not of a coordinator"
        raise IdentityError(problem, fix="invite it instead: `parley consortium invite NAME`", who=WhoActs.YOU)
    identity.verify_proofs(request)
    return request


def credential_text(address: str, root: RootCertificate, credential: Credential) -> str:
    """The string that `MemberHome.install_text` takes. It holds no secret."""
    return identity.armour(_CREDENTIAL, identity.pack(address.encode(), root.der, codec.encode(credential)))
