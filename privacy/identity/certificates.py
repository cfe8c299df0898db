"""X.509 as Parley uses it: one Ed25519 root, P-256 leaves, and a mark that tells invited newcomers from members."""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from federation.errors import IdentityError, WhoActs
from federation.messages import Role
from privacy.identity.encoding import require_name
from privacy.identity.keys import protocol_public, spki, tls_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from federation.messages import MembershipStatement

__all__ = [
    "Bootstrap",
    "Member",
    "Peer",
    "RootCertificate",
    "bootstrap_certificate",
    "host_names",
    "hosts_of",
    "member_certificate",
    "peer_of",
    "root_certificate",
    "tls_name",
    "verify_binding",
    "verify_certificate",
]

_BOOTSTRAP = ObjectIdentifier("2.25.172575195477083300392979001023709666055")
"""The mark of a bootstrap certificate: holds the invited role. A UUID's own branch (ITU-T X.667), so nobody else's."""

_USAGE = {
    Role.SITE: ExtendedKeyUsageOID.CLIENT_AUTH,
    Role.OPERATOR: ExtendedKeyUsageOID.CLIENT_AUTH,
    Role.COORDINATOR: ExtendedKeyUsageOID.SERVER_AUTH,
}
"""What each role's certificate is good for in TLS: no site can pose as a coordinator, nor the other way round."""

_UTF8_STRING = 0x0C
_SERIAL_BITS = 128


@dataclass(frozen=True, slots=True)
class RootCertificate:
    """The public half of a consortium's root: what every member trusts, and nothing else."""

    certificate: x509.Certificate

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """The root certificate in `content` (PEM or DER), self-signature checked.

        Raises:
            IdentityError: It is none.
        """
        broken = IdentityError("this is not a consortium's root certificate", fix="get root.pem anew and compare it")
        try:
            load = x509.load_pem_x509_certificate if content.startswith(b"-----") else x509.load_der_x509_certificate
            certificate = load(content)
            certificate.verify_directly_issued_by(certificate)
            authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
            key = certificate.public_key()
            require_name(_text(certificate.subject, NameOID.COMMON_NAME), "a consortium's name")
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as problem:
            raise broken from problem
        if not authority or not isinstance(key, Ed25519PublicKey):
            raise broken
        protocol_public(key.public_bytes_raw())
        return cls(certificate)

    @property
    def consortium(self) -> str:
        """The consortium's name."""
        return _text(self.certificate.subject, NameOID.COMMON_NAME)

    @property
    def public_key(self) -> Ed25519PublicKey:
        """The root's public key."""
        key = self.certificate.public_key()
        if not isinstance(key, Ed25519PublicKey):
            raise IdentityError("a consortium's root key is Ed25519; this is not", fix="get root.pem anew")
        return key

    @property
    def pem(self) -> bytes:
        """The certificate as a PEM text."""
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def der(self) -> bytes:
        """The certificate as DER."""
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the DER certificate in 16 groups of 4 hexadecimal digits, for people to compare aloud."""
        digest = self.certificate.fingerprint(hashes.SHA256()).hex()
        return " ".join(digest[at : at + 4] for at in range(0, len(digest), 4))

    @property
    def not_after(self) -> int:
        """Unix seconds at which the root, and with it every certificate below it, ends."""
        return int(self.certificate.not_valid_after_utc.timestamp())


@dataclass(frozen=True, slots=True)
class Member:
    """A TLS peer with a member's certificate; who that is stands in the statement of the same serial and TLS key."""

    serial: str
    tls_key: bytes


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A TLS peer with an invitation's certificate: it may ask to be enrolled as this, and nothing else."""

    invitation: str
    name: str
    organisation: str
    role: Role


Peer = Member | Bootstrap


def tls_name(name: str, consortium: str) -> str:
    """The host name in a member's certificate, which a client expects whatever the address it dials."""
    return f"{name}.{consortium}.parley"


def root_certificate(key: Ed25519PrivateKey, consortium: str, not_before: int, not_after: int) -> x509.Certificate:
    """A self-signed authority that may sign leaves and no other authority."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, consortium)])
    public = key.public_key()
    builder = _builder(name, name, secrets.randbits(_SERIAL_BITS) | 1, not_before, not_after).public_key(public)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(authority=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    return builder.sign(key, None)


def member_certificate(
    key: Ed25519PrivateKey,
    root: RootCertificate,
    statement: MembershipStatement,
    tls_key: EllipticCurvePublicKey,
    hosts: Sequence[str],
) -> x509.Certificate:
    """The TLS certificate that goes with `statement`: same serial, names and validity."""
    names = [x509.DNSName(tls_name(statement.name, statement.consortium)), *(_host(host) for host in hosts)]
    builder = _builder(
        _subject(statement.name, statement.organisation),
        root.certificate.subject,
        int(statement.serial, 16),
        statement.not_before,
        statement.not_after,
    ).public_key(tls_key)
    builder = _leaf(builder, root, _USAGE[statement.role])
    return builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(key, None)


def bootstrap_certificate(
    key: Ed25519PrivateKey,
    root: RootCertificate,
    invited: Bootstrap,
    tls_key: EllipticCurvePublicKey,
    not_before: int,
    not_after: int,
) -> x509.Certificate:
    """The marked client certificate of an invitation; its serial is the invitation's."""
    subject = _subject(invited.name, invited.organisation)
    serial = int(invited.invitation, 16)
    builder = _builder(subject, root.certificate.subject, serial, not_before, not_after).public_key(tls_key)
    role = invited.role.value.encode()
    mark = x509.UnrecognizedExtension(_BOOTSTRAP, bytes([_UTF8_STRING, len(role)]) + role)
    builder = _leaf(builder, root, ExtendedKeyUsageOID.CLIENT_AUTH)
    return builder.add_extension(mark, critical=False).sign(key, None)


def peer_of(certificate_pem: bytes) -> Peer:
    """What a peer is by the certificate (PEM or DER) that TLS has already checked against the root.

    Raises:
        IdentityError: It is no leaf that a root of this release signs.
    """
    fix = "enrol again with this release"
    certificate = _load(certificate_pem)
    serial = f"{certificate.serial_number:032x}"
    key = certificate.public_key()
    try:
        authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        marks = [mark for mark in certificate.extensions if mark.oid == _BOOTSTRAP]
        if authority or not isinstance(key, EllipticCurvePublicKey) or len(serial) > _SERIAL_BITS // 4:
            raise IdentityError("the certificate is not a member's", fix=fix)
        if not marks:
            return Member(serial, tls_digest(spki(key)))
        value = marks[0].value.public_bytes()
        name, organisation = (_text(certificate.subject, oid) for oid in _SUBJECT)
        return Bootstrap(serial, name, organisation, Role(value[2:].decode()))
    except (ValueError, x509.ExtensionNotFound) as broken:
        raise IdentityError("the certificate is not a member's", fix=fix) from broken


def verify_binding(peer: Member, statement: MembershipStatement) -> None:
    """Accepts `statement` as that of the TLS peer.

    Raises:
        IdentityError: It is another member's.
    """
    if peer != Member(statement.serial, statement.tls_key):
        raise IdentityError(
            f"the membership of {statement.name} was shown over another member's TLS certificate",
            fix="use the certificate and the statement of one enrolment",
            who=WhoActs.SITE,
        )


def verify_certificate(certificate_pem: bytes, statement: MembershipStatement, root: RootCertificate) -> None:
    """Accepts the TLS certificate that the root signed for `statement`, good for its role and no other.

    Raises:
        IdentityError: It is by another root, of another member, or good for something else.
    """
    certificate = _load(certificate_pem)
    fix = "ask the consortium's administrator to approve again"
    try:
        certificate.verify_directly_issued_by(root.certificate)
    except (ValueError, TypeError, InvalidSignature) as foreign:
        raise IdentityError(
            f"the certificate of {statement.name} was signed by another root than {root.consortium}'s", fix=fix
        ) from foreign
    if peer_of(certificate_pem) != Member(statement.serial, statement.tls_key):
        raise IdentityError(f"the certificate does not belong to the membership of {statement.name}", fix=fix)
    try:
        usage = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        usage = []
    if usage != [_USAGE[statement.role]]:
        raise IdentityError(f"the certificate of {statement.name} is not one for a {statement.role.value}", fix=fix)


def host_names(names: Sequence[str]) -> frozenset[x509.GeneralName]:
    """Host names and addresses as a certificate carries them.

    Raises:
        IdentityError: A certificate cannot carry one.
    """
    return frozenset(_host(name) for name in names)


def hosts_of(certificate_pem: bytes) -> frozenset[x509.GeneralName]:
    """The further hosts in a member's certificate, without its own `tls_name`."""
    names = _load(certificate_pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return frozenset(list(names)[1:])


_SUBJECT = (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME)


def _subject(*values: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in zip(_SUBJECT, values, strict=True)])


def _text(name: x509.Name, oid: ObjectIdentifier) -> str:
    """The one value of `oid` in a name.

    Raises:
        ValueError: There is none, or there are several.
    """
    (attribute,) = name.get_attributes_for_oid(oid)
    if not isinstance(attribute.value, str):
        raise ValueError("a name must be text")  # noqa: TRY004 - callers treat all malformed certificates alike
    return attribute.value


def _load(content: bytes) -> x509.Certificate:
    try:
        if content.startswith(b"-----"):
            return x509.load_pem_x509_certificate(content)
        return x509.load_der_x509_certificate(content)
    except ValueError as broken:
        raise IdentityError("the certificate cannot be read", fix="enrol again with this release") from broken


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as broken:
        raise IdentityError(
            f"a certificate cannot carry the host {host!r}", fix="give host names in ASCII", who=WhoActs.YOU
        ) from broken


def _builder(
    subject: x509.Name, issuer: x509.Name, serial: int, not_before: int, not_after: int
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        serial_number=serial,
        not_valid_before=datetime.fromtimestamp(not_before, UTC),
        not_valid_after=datetime.fromtimestamp(not_after, UTC),
    )


def _leaf(builder: x509.CertificateBuilder, root: RootCertificate, usage: ObjectIdentifier) -> x509.CertificateBuilder:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(authority=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    return builder.add_extension(issuer, critical=False)


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )
