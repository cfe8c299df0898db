"""Enrolment as the coordinator sees it: it keeps requests and hands out what the root signed, and decides nothing."""

from federation.errors import IdentityError
from federation.messages import EnrolmentRequest, MembershipStatement, RevocationList
from privacy import identity

__all__ = ["admissible", "matches", "same_keys"]


def same_keys(one: EnrolmentRequest, other: EnrolmentRequest) -> bool:
    """Whether two requests come from the holder of the same keys."""
    return (one.tls_key, one.protocol_key) == (other.tls_key, other.protocol_key)


def admissible(
    request: EnrolmentRequest,
    earlier: EnrolmentRequest | None,
    members: tuple[MembershipStatement, ...],
    revocations: RevocationList,
    now: float,
) -> None:
    """Passes a request that may wait for approval.

    Raises:
        IdentityError: The invitation was used with other keys, or the name belongs to a member whose membership holds.
    """
    if earlier is not None and not same_keys(request, earlier):
        raise IdentityError(
            f"the invitation for {request.name} was used already, with other keys",
            fix="ask the consortium's administrator for a new invitation",
        )
    if earlier is not None:
        return
    current = (m for m in members if m.serial not in revocations.serials and now < m.not_after)
    taken = any(member.name == request.name for member in current)
    if taken:
        raise IdentityError(
            f"the name {request.name} is taken by a member of the consortium",
            fix="ask the consortium's administrator for an invitation under another name, or to revoke the old member",
        )


def matches(request: EnrolmentRequest, statement: MembershipStatement) -> None:
    """Passes a statement that is about the newcomer who asked.

    Raises:
        IdentityError: It names somebody else.
    """
    keys = (identity.tls_digest(request.tls_key), request.protocol_key)
    asked = (request.name, request.organisation, request.role, *keys)
    named = (statement.name, statement.organisation, statement.role, statement.tls_key, statement.protocol_key)
    if asked != named:
        raise IdentityError(
            f"the approval is of {statement.name} and its keys; who asked is {request.name}, with keys of its own",
            fix="approve the request that is pending: parley consortium approve NAME",
        )
