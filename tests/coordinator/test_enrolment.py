"""Who may wait for approval, and which approval is the one that was asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from coordinator import enrolment
from federation.errors import IdentityError
from federation.messages import Role
from privacy import identity
from privacy.identity import MemberKeys

if TYPE_CHECKING:
    from federation.messages import EnrolmentRequest, MembershipStatement
    from tests.consortium import Consortium


def _request(consortium: Consortium, name: str = "a", keys: MemberKeys | None = None) -> EnrolmentRequest:
    return identity.make_request(consortium.invitation(name, "hub:8443"), keys or MemberKeys.generate(), "0.1.0")


def test_a_newcomer_with_a_free_name_may_wait(consortium: Consortium) -> None:
    """Nobody of that name is a member, and the invitation is fresh."""
    enrolment.admissible(_request(consortium), None, (consortium.hub.statement,), consortium.nobody, consortium.now)


def test_the_same_keys_again_are_the_same_request(consortium: Consortium) -> None:
    """A newcomer that was cut off asks again, even under a name that became a member's meanwhile: its own."""
    asked = _request(consortium)
    again = replace(asked, software="0.2.0")
    assert enrolment.same_keys(asked, again)
    taken = (consortium.member("a").statement,)
    enrolment.admissible(again, asked, taken, consortium.nobody, consortium.now)


def test_a_used_invitation_takes_no_other_keys(consortium: Consortium) -> None:
    """Whoever copied the invitation comes too late; either key alone is enough to tell."""
    asked, other = _request(consortium), _request(consortium)
    for forged in (
        replace(asked, tls_key=other.tls_key),
        replace(asked, protocol_key=other.protocol_key),
    ):
        with pytest.raises(IdentityError, match="the invitation for a was used already, with other keys") as refused:
            enrolment.admissible(forged, asked, (), consortium.nobody, consortium.now)
        assert refused.value.fix == "ask the consortium's administrator for a new invitation"


def test_a_members_name_is_taken_while_its_membership_holds(consortium: Consortium) -> None:
    """It is free again once that member is revoked or its time is over."""
    member = consortium.member("a")
    asked, members = _request(consortium), (member.statement,)
    with pytest.raises(IdentityError, match=r"the name a is taken by a member of the consortium.*revoke the old"):
        enrolment.admissible(asked, None, members, consortium.nobody, consortium.now)
    enrolment.admissible(asked, None, members, consortium.revoked(member), consortium.now)
    enrolment.admissible(asked, None, members, consortium.nobody, member.statement.not_after)


def test_an_approval_is_of_the_one_who_asked(consortium: Consortium) -> None:
    """Name, organisation, role and both keys are those of the request."""
    keys = MemberKeys.generate()
    asked = _request(consortium, keys=keys)
    enrolment.matches(asked, consortium.member("a", keys=keys).statement)
    other = MemberKeys.generate()
    wrong: tuple[MembershipStatement, ...] = (
        consortium.member("b", keys=keys).statement,
        consortium.member("a", Role.OPERATOR, keys=keys).statement,
        replace(consortium.member("a", keys=keys).statement, organisation="elsewhere"),
        consortium.member("a", keys=MemberKeys(other.tls, keys.protocol)).statement,
        consortium.member("a", keys=MemberKeys(keys.tls, other.protocol)).statement,
    )
    for statement in wrong:
        with pytest.raises(IdentityError, match="who asked is a, with keys of its own") as refused:
            enrolment.matches(asked, statement)
        assert refused.value.fix == "approve the request that is pending: parley consortium approve NAME"
