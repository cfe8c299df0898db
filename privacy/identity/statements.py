"""What the root says of members (statements, revocations, rosters), and the coordinator's proof of its key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from federation.errors import IdentityError, WhoActs
from federation.messages import MembershipStatement, Role
from privacy.identity.encoding import date, pack
from privacy.identity.keys import protocol_public, verifies

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    from federation.messages import RevocationList

__all__ = [
    "revocation_bytes",
    "sign_welcome",
    "statement_bytes",
    "verify_revocations",
    "verify_roster",
    "verify_statement",
    "verify_welcome",
    "welcome_bytes",
]

_RENEW = "ask the consortium's administrator for a new invitation"


def statement_bytes(statement: MembershipStatement) -> bytes:
    """What the root signs: every field but the signature, so that no two memberships share a signature."""
    return pack(
        b"parley membership 1",
        statement.consortium.encode(),
        statement.serial.encode(),
        statement.name.encode(),
        statement.organisation.encode(),
        statement.role.value.encode(),
        statement.tls_key,
        statement.protocol_key,
        str(statement.not_before).encode(),
        str(statement.not_after).encode(),
    )


def revocation_bytes(revocations: RevocationList) -> bytes:
    """What the root signs: every field but the signature."""
    return pack(
        b"parley revocations 1",
        revocations.consortium.encode(),
        str(revocations.version).encode(),
        str(revocations.issued).encode(),
        *(serial.encode() for serial in revocations.serials),
    )


def welcome_bytes(nonce: bytes, site_serial: str, coordinator_serial: str) -> bytes:
    """What the coordinator signs to one site's nonce, good for this site and this coordinator only."""
    return pack(b"parley welcome 1", nonce, site_serial.encode(), coordinator_serial.encode())


def verify_statement(
    statement: MembershipStatement,
    root_public: Ed25519PublicKey,
    consortium: str,
    now: int,
    revocations: RevocationList,
) -> None:
    """Accepts a member of `consortium` at `now`; `revocations` are taken as verified.

    Raises:
        IdentityError: Another root signed it, it is of another consortium, it is not valid yet, expired or revoked, or
            its protocol key is one for which anybody could sign.
    """
    name = statement.name
    if not verifies(root_public, statement.signature, statement_bytes(statement)):
        raise IdentityError(
            f"the membership of {name} was not signed by {consortium}'s root, but by another root or nobody",
            fix=f"enrol {name} with an invitation of {consortium}",
        )
    if statement.consortium != consortium:
        raise IdentityError(
            f"{name} is a member of the consortium {statement.consortium}, not of {consortium}",
            fix=f"enrol {name} with an invitation of {consortium}",
        )
    if now < statement.not_before:
        raise IdentityError(
            f"the membership of {name} begins on {date(statement.not_before)}; here it is {date(now)}",
            fix="set this machine's clock",
            who=WhoActs.YOU,
        )
    if now >= statement.not_after:
        raise IdentityError(f"the membership of {name} expired on {date(statement.not_after)}", fix=_RENEW)
    if statement.serial in revocations.serials:
        raise IdentityError(
            f"the membership of {name} was revoked (revocation list {revocations.version})",
            fix=_RENEW,
        )
    protocol_public(statement.protocol_key)


def verify_revocations(
    revocations: RevocationList,
    root_public: Ed25519PublicKey,
    consortium: str,
    held: RevocationList | None = None,
) -> None:
    """Accepts a revocation list of `consortium` that is not older than the one `held`.

    Raises:
        IdentityError: Another root signed it, it is of another consortium, it would bring revoked members back, or it
            differs from the one held under the same version.
    """
    if not verifies(root_public, revocations.signature, revocation_bytes(revocations)):
        raise IdentityError(
            f"the revocation list was not signed by {consortium}'s root, but by another root or nobody",
            fix="publish the list that `parley consortium revoke` made",
        )
    if revocations.consortium != consortium:
        raise IdentityError(
            f"the revocation list is of the consortium {revocations.consortium}, not of {consortium}",
            fix="publish the list that `parley consortium revoke` made",
        )
    if held is None or revocations == held:
        return
    if revocations.version < held.version:
        raise IdentityError(
            f"the revocation list has version {revocations.version}, and version {held.version} is held already: "
            "revoked members would come back",
            fix="publish the newest list",
        )
    if revocations.version == held.version:
        raise IdentityError(
            f"there are two different revocation lists of version {held.version}",
            fix="revoke once more with the newest copy of the consortium's folder",
        )


def verify_roster(
    roster: Sequence[MembershipStatement],
    root_public: Ed25519PublicKey,
    consortium: str,
    now: int,
    revocations: RevocationList,
) -> None:
    """Accepts a roster of sites, all of them members now, in which nobody stands twice.

    Raises:
        IdentityError: One is no member, no site, or bears a name or a key of another.
    """
    for statement in roster:
        verify_statement(statement, root_public, consortium, now, revocations)
        if statement.role is not Role.SITE:
            raise IdentityError(
                f"the roster names {statement.name}, whose role is {statement.role.value}, as a site",
                fix="submit the job again with sites only",
                who=WhoActs.COORDINATOR,
            )
    _distinct("name", roster, lambda statement: statement.name)
    _distinct("membership", roster, lambda statement: statement.serial)
    _distinct("TLS key", roster, lambda statement: statement.tls_key)
    _distinct("protocol key", roster, lambda statement: statement.protocol_key)


def _distinct(
    what: str, roster: Sequence[MembershipStatement], value: Callable[[MembershipStatement], str | bytes]
) -> None:
    first: dict[str | bytes, MembershipStatement] = {}
    for statement in roster:
        other = first.setdefault(value(statement), statement)
        if other is not statement:
            raise IdentityError(
                f"the sites {other.name} and {statement.name} of the roster have the same {what}",
                fix="submit the job again with each site once; revoke a site that uses another's keys",
            )


def sign_welcome(key: Ed25519PrivateKey, nonce: bytes, site_serial: str, coordinator_serial: str) -> bytes:
    """The coordinator's proof that it holds the protocol key of its statement."""
    return key.sign(welcome_bytes(nonce, site_serial, coordinator_serial))


def verify_welcome(proof: bytes, coordinator: MembershipStatement, nonce: bytes, site_serial: str) -> None:
    """Accepts the coordinator's proof over this site's own nonce; its statement is taken as verified.

    Raises:
        IdentityError: The statement is not a coordinator's, or another key made the proof, or for another nonce.
    """
    require_coordinator(coordinator)
    signed = welcome_bytes(nonce, site_serial, coordinator.serial)
    if not verifies(protocol_public(coordinator.protocol_key), proof, signed):
        raise IdentityError(
            f"the coordinator {coordinator.name} did not prove that it holds its protocol key",
            fix="install the credential that belongs to the coordinator's keys",
            who=WhoActs.COORDINATOR,
        )


def require_coordinator(statement: MembershipStatement) -> None:
    """Accepts a statement whose role is coordinator.

    Raises:
        IdentityError: It is another role's.
    """
    if statement.role is not Role.COORDINATOR:
        raise IdentityError(
            f"{statement.name} poses as a coordinator; its role is {statement.role.value}",
            fix="do not send it anything, and report it to the consortium",
        )
