"""The consortium's root: the one key that makes, invites and revokes members. It never lives on the coordinator."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from federation.errors import IdentityError, WhoActs
from federation.messages import MembershipStatement, RevocationList, Role
from privacy.identity.certificates import Bootstrap, RootCertificate, bootstrap_certificate, member_certificate
from privacy.identity.certificates import root_certificate as new_certificate
from privacy.identity.encoding import require_name, require_organisation
from privacy.identity.enrolment import Invitation, require_address, verify_proofs
from privacy.identity.keys import tls_digest, tls_public
from privacy.identity.statements import revocation_bytes, statement_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from federation.messages import EnrolmentRequest

__all__ = ["Root"]

_HOUR = 3600
_DAY = 24 * _HOUR
_ROOT_YEARS = 20
_LAG = _HOUR
"""Everything signed begins an hour early: a member's clock may lag behind the administrator's by as much."""
_MAX_HOURS = 30 * 24
_MAX_DAYS = 3650


@dataclass(frozen=True, slots=True)
class Root:
    """The root's private key and its self-signed certificate."""

    key: Ed25519PrivateKey = field(repr=False)
    public: RootCertificate

    @classmethod
    def create(cls, consortium: str, now: int) -> Self:
        """A fresh root for `consortium`, good for 20 years.

        Raises:
            IdentityError: The name cannot be a consortium's.
        """
        require_name(consortium, "a consortium's name")
        key = Ed25519PrivateKey.generate()
        end = now + _ROOT_YEARS * 365 * _DAY
        return cls(key, RootCertificate(new_certificate(key, consortium, now - _LAG, end)))

    @classmethod
    def load(cls, key_pem: bytes, certificate_pem: bytes, passphrase: str | None) -> Self:
        """The root in a PKCS8 key and its certificate.

        Raises:
            IdentityError: The passphrase is wrong, missing or not needed, or the key is not the certificate's.
        """
        public = RootCertificate.parse(certificate_pem)
        try:
            key = load_pem_private_key(key_pem, passphrase.encode() if passphrase is not None else None)
        except TypeError as mismatch:
            state, fix = ("is", "give its passphrase") if passphrase is None else ("is not", "give no passphrase")
            problem = f"the root key of {public.consortium} {state} encrypted"
            raise IdentityError(problem, fix=fix, who=WhoActs.YOU) from mismatch
        except ValueError as wrong:
            problem = f"this passphrase does not open the root key of {public.consortium}"
            raise IdentityError(problem, fix="give the right one; nobody can restore it", who=WhoActs.YOU) from wrong
        if not isinstance(key, Ed25519PrivateKey) or key.public_key() != public.public_key:
            problem = f"the root key is not that of {public.consortium}'s root certificate"
            raise IdentityError(problem, fix="restore root.key and root.pem from one backup", who=WhoActs.YOU)
        return cls(key, public)

    def key_pem(self, passphrase: str | None) -> bytes:
        """The private key as PKCS8, encrypted unless `passphrase` is None.

        Raises:
            IdentityError: The passphrase is empty.
        """
        if passphrase == "":
            raise IdentityError("an empty passphrase protects nothing", fix="give a longer one", who=WhoActs.YOU)
        protection = NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase.encode())
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection)

    @property
    def consortium(self) -> str:
        """The consortium's name."""
        return self.public.consortium

    @property
    def certificate_pem(self) -> bytes:
        """The root certificate, which every member holds."""
        return self.public.pem

    @property
    def fingerprint(self) -> str:
        """The root certificate's fingerprint, for people to compare aloud."""
        return self.public.fingerprint

    def sign_statement(
        self,
        *,
        serial: str,
        name: str,
        organisation: str,
        role: Role,
        tls_key: bytes,
        protocol_key: bytes,
        not_before: int,
        not_after: int,
    ) -> MembershipStatement:
        """The consortium's word that these two keys are this member's. `tls_key` is the SHA-256 of its DER form."""
        draft = MembershipStatement(
            consortium=self.consortium,
            serial=serial,
            name=name,
            organisation=organisation,
            role=role,
            tls_key=tls_key,
            protocol_key=protocol_key,
            not_before=not_before,
            not_after=not_after,
            signature=bytes(64),
        )
        return replace(draft, signature=self.key.sign(statement_bytes(draft)))

    def issue_certificate(
        self, statement: MembershipStatement, tls_key: EllipticCurvePublicKey, hosts: Sequence[str] = ()
    ) -> bytes:
        """The TLS certificate (PEM) that goes with `statement`; `hosts` are further names of a coordinator."""
        return member_certificate(self.key, self.public, statement, tls_key, hosts).public_bytes(Encoding.PEM)

    def sign_revocations(self, version: int, issued: int, serials: Iterable[str]) -> RevocationList:
        """The list of revoked serials, sorted, under `version`."""
        draft = RevocationList(self.consortium, version, issued, tuple(sorted(set(serials))), bytes(64))
        return replace(draft, signature=self.key.sign(revocation_bytes(draft)))

    def invite(
        self,
        name: str,
        organisation: str,
        role: Role,
        *,
        address: str,
        coordinator: str,
        now: int,
        hours: int = 48,
    ) -> Invitation:
        """A string's worth of trust for one newcomer, good for enrolment alone and for `hours` hours.

        Raises:
            IdentityError: A name, the address or the hours cannot be, or a coordinator is to be invited.
        """
        require_name(name, "a member's name")
        require_organisation(organisation)
        require_address(address)
        _within(hours, _MAX_HOURS, "an invitation", "hours")
        if role is Role.COORDINATOR:
            raise IdentityError(
                "a coordinator cannot be invited: enrolment goes through the coordinator",
                fix="run `parley coordinator init` there and `parley consortium admit` here",
                who=WhoActs.YOU,
            )
        key = generate_private_key(SECP256R1())
        invited = Bootstrap(secrets.token_hex(16), name, organisation, role)
        certificate = bootstrap_certificate(
            self.key, self.public, invited, key.public_key(), now - _LAG, now + hours * _HOUR
        )
        return Invitation.make(self.key, self.public, address, coordinator, certificate, key)

    def approve(
        self, request: EnrolmentRequest, now: int, days: int = 365, hosts: Sequence[str] = ()
    ) -> tuple[bytes, MembershipStatement]:
        """Certificate (PEM) and statement for a request, good for `days` days but never longer than the root.

        Whether the request is that of the one invited is checked before, by `verify_request`.

        Raises:
            IdentityError: A proof does not verify, `days` cannot be, or hosts are named for another than a coordinator.
        """
        require_name(request.name, "a member's name")
        _within(days, _MAX_DAYS, "a membership", "days")
        if hosts and request.role is not Role.COORDINATOR:
            problem = f"only a coordinator's certificate names hosts; {request.name} is a {request.role.value}"
            raise IdentityError(problem, fix="approve it without hosts", who=WhoActs.YOU)
        verify_proofs(request)
        statement = self.sign_statement(
            serial=secrets.token_hex(16),
            name=request.name,
            organisation=request.organisation,
            role=request.role,
            tls_key=tls_digest(request.tls_key),
            protocol_key=request.protocol_key,
            not_before=now - _LAG,
            not_after=min(now + days * _DAY, self.public.not_after),
        )
        return self.issue_certificate(statement, tls_public(request.tls_key), hosts), statement


def _within(value: int, limit: int, what: str, unit: str) -> None:
    if not 1 <= value <= limit:
        raise IdentityError(
            f"{what} cannot be good for {value} {unit}", fix=f"give 1 to {limit} {unit}", who=WhoActs.YOU
        )
