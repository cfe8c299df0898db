"""How a newcomer becomes a member: one pasted invitation, one request with proofs of both keys, one credential back."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, EllipticCurvePrivateKey, derive_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from federation.errors import IdentityError, WhoActs
from federation.messages import EnrolmentRequest, Role
from privacy.identity.certificates import Bootstrap, RootCertificate, peer_of, tls_name, verify_certificate
from privacy.identity.encoding import armour, date, pack, unarmour, unpack
from privacy.identity.keys import MemberKeys, protocol_public, tls_public, verifies
from privacy.identity.statements import require_coordinator, verify_revocations, verify_statement

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from federation.messages import Credential

__all__ = [
    "Fingerprints",
    "Invitation",
    "accept_credential",
    "enrolment_bytes",
    "fingerprints",
    "make_request",
    "request_for",
    "require_address",
    "verify_proofs",
    "verify_request",
]

_PREFIX = "parley1:"
_SIGNATURE = 64
_SCALAR = 32
_PASTE = "paste the whole string that `parley consortium invite` printed"
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Invitation:
    """All that a newcomer needs to ask for membership. Who has it may ask in the invitee's name: keep it secret.

    Name, organisation, role, serial and expiry stand in the bootstrap certificate, the consortium in the root's, and
    only there, so that they cannot disagree.
    """

    address: str
    coordinator: str
    root: RootCertificate
    certificate: x509.Certificate
    key: EllipticCurvePrivateKey = field(repr=False)
    signature: bytes = field(repr=False)

    @classmethod
    def make(
        cls,
        root_key: Ed25519PrivateKey,
        root: RootCertificate,
        address: str,
        coordinator: str,
        certificate: x509.Certificate,
        key: EllipticCurvePrivateKey,
    ) -> Self:
        """The invitation to come as `certificate` says, signed by the root as a whole."""
        draft = cls(address, coordinator, root, certificate, key, b"")
        return replace(draft, signature=root_key.sign(_signed(draft._body)))

    @classmethod
    def parse(cls, text: str, now: int) -> Self:
        """The invitation in `text`, whole, unaltered and in time.

        Raises:
            IdentityError: It is no invitation, cut short or mistyped, altered, expired, or not valid yet.
        """
        content = unarmour(_PREFIX, text, "an invitation", _PASTE)
        try:
            invitation = cls._read(content)
        except (ValueError, TypeError, InvalidSignature, IdentityError) as forged:
            raise IdentityError(
                "this invitation was altered after it was made: the root's signature does not fit",
                fix="do not use it; ask the consortium's administrator, by another way, for a new one",
            ) from forged
        if now >= invitation.expires:
            raise IdentityError(
                f"this invitation for {invitation.invited.name} expired on {date(invitation.expires)}",
                fix="ask the consortium's administrator for a new one (`parley consortium invite`)",
            )
        begins = int(invitation.certificate.not_valid_before_utc.timestamp())
        if now < begins:
            raise IdentityError(
                f"this invitation begins on {date(begins)}; here it is {date(now)}",
                fix="set this machine's clock",
                who=WhoActs.YOU,
            )
        return invitation

    @classmethod
    def _read(cls, content: bytes) -> Self:
        body, signature = content[:-_SIGNATURE], content[-_SIGNATURE:]
        address, coordinator, root_der, scalar, certificate_der = unpack(body, 5)
        root = RootCertificate.parse(root_der)
        root.public_key.verify(signature, _signed(body))
        certificate = x509.load_der_x509_certificate(certificate_der)
        certificate.verify_directly_issued_by(root.certificate)
        key = derive_private_key(int.from_bytes(scalar, "big"), SECP256R1())
        if key.public_key() != certificate.public_key() or not isinstance(peer_of(certificate_der), Bootstrap):
            raise ValueError("the bootstrap certificate and key do not belong together")
        return cls(address.decode(), coordinator.decode(), root, certificate, key, signature)

    @property
    def text(self) -> str:
        """The string to paste."""
        return armour(_PREFIX, self._body + self.signature)

    @property
    def _body(self) -> bytes:
        scalar = self.key.private_numbers().private_value.to_bytes(_SCALAR, "big")
        certificate = self.certificate.public_bytes(Encoding.DER)
        return pack(self.address.encode(), self.coordinator.encode(), self.root.der, scalar, certificate)

    @property
    def invited(self) -> Bootstrap:
        """Whom it invites, under which serial."""
        peer = peer_of(self.certificate_pem)
        if not isinstance(peer, Bootstrap):
            raise IdentityError("this invitation carries a member's certificate", fix=_PASTE)
        return peer

    @property
    def expires(self) -> int:
        """Unix seconds from which it is good for nothing."""
        return int(self.certificate.not_valid_after_utc.timestamp())

    @property
    def consortium(self) -> str:
        """The consortium's name."""
        return self.root.consortium

    @property
    def tls_name(self) -> str:
        """The host name to expect in the coordinator's certificate."""
        return tls_name(self.coordinator, self.consortium)

    @property
    def certificate_pem(self) -> bytes:
        """The bootstrap certificate, for TLS during enrolment."""
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The bootstrap key (PKCS8), for TLS during enrolment."""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _signed(body: bytes) -> bytes:
    return pack(b"parley invitation 1", body)


def require_address(address: str) -> None:
    """Accepts `host:port`.

    Raises:
        IdentityError: It is something else.
    """
    host, _, port = address.rpartition(":")
    sane = host and host.isascii() and host.isprintable() and not set(host) & set(" /@")
    if not sane or not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
        raise IdentityError(
            f"the coordinator's address {address[:100]!r} is not host:port",
            fix="give the host name and port that sites dial, such as hub.example.org:8443",
            who=WhoActs.YOU,
        )


def enrolment_bytes(request: EnrolmentRequest) -> bytes:
    """What both of a newcomer's keys sign: every field but the proofs."""
    return pack(
        b"parley enrolment 1",
        request.invitation.encode(),
        request.name.encode(),
        request.organisation.encode(),
        request.role.value.encode(),
        request.tls_key,
        request.protocol_key,
        request.software.encode(),
    )


def make_request(invitation: Invitation, keys: MemberKeys, software: str) -> EnrolmentRequest:
    """The newcomer's request under its invitation."""
    return _prove(invitation.invited, keys, software)


def request_for(name: str, organisation: str, role: Role, keys: MemberKeys, software: str) -> EnrolmentRequest:
    """A request without an invitation, to be handed to the administrator by hand: how the coordinator enrols."""
    return _prove(Bootstrap(secrets.token_hex(16), name, organisation, role), keys, software)


def _prove(invited: Bootstrap, keys: MemberKeys, software: str) -> EnrolmentRequest:
    def request(tls_proof: bytes, protocol_proof: bytes) -> EnrolmentRequest:
        return EnrolmentRequest(
            invitation=invited.invitation,
            name=invited.name,
            organisation=invited.organisation,
            role=invited.role,
            tls_key=keys.tls_spki,
            protocol_key=keys.protocol_key,
            tls_proof=tls_proof,
            protocol_proof=protocol_proof,
            software=software,
        )

    content = enrolment_bytes(request(b"unsigned", bytes(_SIGNATURE)))
    return request(keys.tls.sign(content, ECDSA(hashes.SHA256())), keys.protocol.sign(content))


def verify_proofs(request: EnrolmentRequest) -> None:
    """Accepts a request whose sender holds both private keys.

    Raises:
        IdentityError: A key is not acceptable, or its proof does not verify.
    """
    content = enrolment_bytes(request)
    fix = "enrol again with this release"
    try:
        tls_public(request.tls_key).verify(request.tls_proof, content, ECDSA(hashes.SHA256()))
    except InvalidSignature as unproven:
        problem = f"{request.name} did not prove that it holds its TLS key"
        raise IdentityError(problem, fix=fix, who=WhoActs.SITE) from unproven
    if not verifies(protocol_public(request.protocol_key), request.protocol_proof, content):
        problem = f"{request.name} did not prove that it holds its protocol key"
        raise IdentityError(problem, fix=fix, who=WhoActs.SITE)


def verify_request(request: EnrolmentRequest, invited: Bootstrap) -> None:
    """Accepts a request of exactly the one who was invited, holding both private keys.

    Raises:
        IdentityError: Serial, name, organisation or role are not those of the invitation, or a proof does not verify.
    """
    asked = Bootstrap(request.invitation, request.name, request.organisation, request.role)
    if asked != invited:
        raise IdentityError(
            f"the request is for {_words(asked)}, and the invitation was for {_words(invited)}",
            fix="join with the invitation as it was given",
            who=WhoActs.SITE,
        )
    verify_proofs(request)


def _words(who: Bootstrap) -> str:
    return f"{who.role.value} {who.name} of {who.organisation} ({who.invitation[:8]})"


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """80 bits of SHA-256 of each of a newcomer's keys, for two people to compare aloud before an approval."""

    tls: str
    protocol: str


def fingerprints(request: EnrolmentRequest) -> Fingerprints:
    """What both sides show: five groups of 4 hexadecimal digits for each key."""
    return Fingerprints(_short(request.tls_key), _short(request.protocol_key))


def _short(key: bytes) -> str:
    digest = hashlib.sha256(key).hexdigest()
    return " ".join(digest[at : at + 4] for at in range(0, 20, 4))


def accept_credential(
    credential: Credential,
    root: RootCertificate,
    keys: MemberKeys,
    *,
    name: str,
    role: Role,
    coordinator: str,
    now: int,
) -> None:
    """Accepts what came back from an enrolment: it makes the holder of `keys` the member that it asked to be.

    Raises:
        IdentityError: The revocation list, a statement or the certificate is not by this root or not valid now, or is
            another's: name, role, keys; or the coordinator's statement is not of the coordinator expected.
    """
    verify_revocations(credential.revocations, root.public_key, root.consortium)
    own = credential.statement
    for statement in (own, credential.coordinator):
        verify_statement(statement, root.public_key, root.consortium, now, credential.revocations)
    if (own.name, own.role) != (name, role):
        raise IdentityError(
            f"the credential is for {own.role.value} {own.name}, and {role.value} {name} asked for one",
            fix="ask the consortium's administrator to approve again",
        )
    if (own.tls_key, own.protocol_key) != (keys.tls_key, keys.protocol_key):
        raise IdentityError(
            f"the credential for {name} is for other keys than this machine made",
            fix="compare the fingerprints with the consortium's administrator and enrol again",
        )
    verify_certificate(credential.certificate, own, root)
    require_coordinator(credential.coordinator)
    if credential.coordinator.name != coordinator:
        raise IdentityError(
            f"the credential names {credential.coordinator.name} as coordinator; expected was {coordinator}",
            fix="ask the consortium's administrator for a new invitation",
        )
