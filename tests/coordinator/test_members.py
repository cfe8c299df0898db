"""Enrolment and revocation as newcomers and members meet them, over real mutual TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from coordinator import members
from federation.errors import IdentityError, UnreachableError
from federation.messages import (
    ApproveEnrolment,
    Credential,
    Done,
    EnrolmentState,
    ListPending,
    ListSites,
    PublishRevocations,
    RevocationList,
    Role,
)
from parley.homes import Connection as HomeConnection
from parley.homes import MemberHome
from privacy import identity
from privacy.identity import MemberKeys
from tests.consortium import DAY, Consortium, Person, Running, Site, soon

if TYPE_CHECKING:
    from pathlib import Path

    from federation.messages import EnrolmentRequest, EnrolmentStatus, MembershipStatement
    from privacy.identity import Invitation

Serving = Callable[..., AbstractAsyncContextManager[Running]]
Sites = Callable[..., Site]


@pytest.fixture
def operator(consortium: Consortium) -> Person:
    """One who approves and revokes."""
    return consortium.member("op", Role.OPERATOR)


def _approval(consortium: Consortium, request: EnrolmentRequest) -> ApproveEnrolment:
    certificate, statement = consortium.root.approve(request, consortium.now)
    return ApproveEnrolment(request.invitation, certificate, statement)


async def _ask(hub: Running, operator: Person, request: object) -> object:
    async with hub.opened(operator) as connection:
        return await soon(connection.operate(request))


async def _statuses(hub: Running, invitation: Invitation, request: EnrolmentRequest) -> list[EnrolmentStatus]:
    """All that a newcomer is told, to the end of its stream."""
    async with hub.door(invitation) as connection:
        return [status async for status in connection.enrol(request)]


async def _refusal(hub: Running, invitation: Invitation, request: EnrolmentRequest) -> IdentityError:
    with pytest.raises(IdentityError) as refused:
        await soon(_statuses(hub, invitation, request))
    return refused.value


# ---------------------------------------------------------------------------------------------------------- enrolment


def test_a_newcomer_waits_and_is_told_at_once_when_it_is_approved(
    running: Serving, consortium: Consortium, operator: Person, tmp_path: Path
) -> None:
    """One stream: waiting, then, pushed, the credential, which makes its home a member's; then it may attend."""
    home = MemberHome(tmp_path / "home", Role.SITE)

    async def story() -> None:
        async with running() as hub:
            invitation = consortium.invitation("a", hub.address)
            request = identity.make_request(invitation, home.begin(), "0.1.0")
            async with hub.door(invitation) as connection:
                stream = connection.enrol(request)
                waiting = await soon(anext(stream))
                assert (waiting.state, waiting.credential) == (EnrolmentState.WAITING, None)
                assert (await _ask(hub, operator, ListPending())).requests == (request,)
                assert await _ask(hub, operator, _approval(consortium, request)) == Done()
                approved = await soon(anext(stream))
                assert [status async for status in stream] == []
            assert (await _ask(hub, operator, ListPending())).requests == ()
            assert approved.credential is not None
            where = HomeConnection(hub.address, consortium.root.consortium, "hub")
            own = home.install(approved.credential, invitation.root, where, name="a", now=consortium.now)
            assert own.coordinator == consortium.hub.statement
            member = Site(Person(own.keys, own.certificate, own.statement), tmp_path)
            async with hub.attending(member):
                assert [each.name for each in (await _ask(hub, operator, ListSites())).sites] == ["a"]

    asyncio.run(story())


def test_an_approval_is_picked_up_after_a_reconnect_and_after_a_restart(
    running: Serving, consortium: Consortium, operator: Person
) -> None:
    """The newcomer went away while it waited; its credential did not, and is given as often as it asks."""
    keys = MemberKeys.generate()

    async def story() -> None:
        async with running() as hub:
            invitation = consortium.invitation("a", hub.address)
            request = identity.make_request(invitation, keys, "0.1.0")
            async with hub.door(invitation) as connection:
                assert (await soon(anext(connection.enrol(request)))).state is EnrolmentState.WAITING
            async with hub.door(invitation) as connection:  # the same keys again: the same request
                assert (await soon(anext(connection.enrol(request)))).state is EnrolmentState.WAITING
            assert (await _ask(hub, operator, ListPending())).requests == (request,)
        async with running() as hub:
            assert (await _ask(hub, operator, ListPending())).requests == (request,)
            approval = _approval(consortium, request)
            await _ask(hub, operator, approval)
            (first,) = await soon(_statuses(hub, invitation, request))
        async with running() as hub:
            (second,) = await soon(_statuses(hub, invitation, request))
        credential = Credential(approval.certificate, approval.statement, consortium.hub.statement, consortium.nobody)
        assert first.credential == second.credential == credential

    asyncio.run(story())


def test_enrolments_that_cannot_be_are_refused_in_their_own_words(
    running: Serving, consortium: Consortium, operator: Person
) -> None:
    """A used, withdrawn or foreign invitation, a name that is taken, a request that is another's; none is kept."""

    async def story() -> None:
        async with running() as hub:
            used, taken = consortium.invitation("a", hub.address), consortium.invitation("b", hub.address)
            first = identity.make_request(used, MemberKeys.generate(), "0.1.0")
            async with hub.door(used) as connection:
                await soon(anext(connection.enrol(first)))
            refused = await _refusal(hub, used, identity.make_request(used, MemberKeys.generate(), "0.1.0"))
            assert refused.problem == "the invitation for a was used already, with other keys"

            await hub.coordinator.members.meet(consortium.member("b").statement)
            refused = await _refusal(hub, taken, identity.make_request(taken, MemberKeys.generate(), "0.1.0"))
            assert refused.problem == "the name b is taken by a member of the consortium"

            refused = await _refusal(hub, taken, first)
            assert refused.problem.startswith("the request is for site a of a-clinic (")
            assert f"and the invitation was for site b of b-clinic ({taken.invited.invitation[:8]})" in refused.problem

            unproven = replace(first, protocol_proof=bytes(64))
            assert "did not prove that it holds its protocol key" in (await _refusal(hub, used, unproven)).problem

            withdrawn = consortium.invitation("c", hub.address)
            serials = (withdrawn.invited.invitation,)
            revoked = consortium.root.sign_revocations(1, consortium.now, serials)
            await _ask(hub, operator, PublishRevocations(revoked))
            late = identity.make_request(withdrawn, MemberKeys.generate(), "0.1.0")
            assert (await _refusal(hub, withdrawn, late)).problem == "the invitation for c was withdrawn"

            old = consortium.root.invite(
                "d", "d", Role.SITE, address=hub.address, coordinator="hub", now=consortium.now - 3 * DAY
            )
            foreign = Consortium().invitation("e", hub.address)
            for invitation in (old, replace(foreign, root=consortium.root.public)):
                request = identity.make_request(invitation, MemberKeys.generate(), "0.1.0")
                with pytest.raises(UnreachableError, match="hung up in the TLS handshake"):
                    await soon(_statuses(hub, invitation, request))
            assert await hub.coordinator.members.pending() == (first,)

    asyncio.run(story())


def test_a_newcomer_whose_invitation_is_withdrawn_waits_no_longer(
    running: Serving, consortium: Consortium, operator: Person
) -> None:
    """The stream on which it waits ends with the reason."""

    async def story() -> None:
        async with running() as hub:
            invitation = consortium.invitation("a", hub.address)
            request = identity.make_request(invitation, MemberKeys.generate(), "0.1.0")
            async with hub.door(invitation) as connection:
                stream = connection.enrol(request)
                await soon(anext(stream))
                serials = (invitation.invited.invitation,)
                revoked = consortium.root.sign_revocations(1, consortium.now, serials)
                await _ask(hub, operator, PublishRevocations(revoked))
                with pytest.raises(IdentityError, match=r"the invitation for a was withdrawn.*ask for a new one"):
                    await soon(anext(stream))

    asyncio.run(story())


def test_an_approval_that_is_not_the_roots_on_who_waits_changes_nothing(
    running: Serving, consortium: Consortium, operator: Person
) -> None:
    """Of nobody, of another, by another root, with another certificate: refused, and the right one then taken."""
    keys, other = MemberKeys.generate(), Consortium()

    async def story() -> None:
        async with running() as hub:
            invitation = consortium.invitation("a", hub.address)
            request = identity.make_request(invitation, keys, "0.1.0")
            right = _approval(consortium, request)
            with pytest.raises(IdentityError, match="no enrolment waits under this invitation"):
                await _ask(hub, operator, right)
            async with hub.door(invitation) as connection:
                stream = connection.enrol(request)
                await soon(anext(stream))
                renamed = consortium.member("b", keys=keys)
                exchanged = consortium.member("a", keys=MemberKeys(MemberKeys.generate().tls, keys.protocol))
                for statement, certificate, words in (
                    (renamed.statement, renamed.certificate, "the approval is of b and its keys; who asked is a"),
                    (exchanged.statement, exchanged.certificate, "who asked is a, with keys of its own"),
                    (_approval(other, request).statement, right.certificate, "not signed by heart-study's root"),
                    (right.statement, renamed.certificate, "does not belong to the membership of a"),
                    (right.statement, b"no certificate", "the certificate cannot be read"),
                ):
                    with pytest.raises(IdentityError, match=words):
                        await _ask(hub, operator, ApproveEnrolment(request.invitation, certificate, statement))
                assert await hub.coordinator.members.pending() == (request,)
                assert await _ask(hub, operator, right) == Done()
                approved = await soon(anext(stream))
                assert approved.credential is not None
                assert approved.credential.statement == right.statement

    asyncio.run(story())


def test_an_approval_handed_in_again_changes_nothing(
    running: Serving, consortium: Consortium, operator: Person
) -> None:
    """An administrator whose connection broke tries again; another approval of the same request is refused."""

    async def story() -> None:
        async with running() as hub:
            invitation = consortium.invitation("a", hub.address)
            request = identity.make_request(invitation, MemberKeys.generate(), "0.1.0")
            async with hub.door(invitation) as connection:
                await soon(anext(connection.enrol(request)))
            approval = _approval(consortium, request)
            for _ in range(2):
                assert await _ask(hub, operator, approval) == Done()
            with pytest.raises(IdentityError, match="a was approved under this invitation already"):
                await _ask(hub, operator, _approval(consortium, request))
            (status,) = await soon(_statuses(hub, invitation, request))
            assert status.credential is not None
            assert status.credential.statement == approval.statement

    asyncio.run(story())


def test_an_expired_membership_is_not_handed_out_again(running: Serving, consortium: Consortium) -> None:
    """With the same keys and a new invitation, a former member is a newcomer that waits."""
    keys = MemberKeys.generate()

    async def story() -> None:
        async with running() as hub:
            former = consortium.member("a", days_ago=400, keys=keys)
            hub.coordinator.members._known[former.statement.serial] = former.statement
            invitation = consortium.invitation("a", hub.address)
            request = identity.make_request(invitation, keys, "0.1.0")
            async with hub.door(invitation) as connection:
                assert (await soon(anext(connection.enrol(request)))).state is EnrolmentState.WAITING

    asyncio.run(story())


def test_a_certificate_that_was_lost_with_the_store_is_said_to_be_lost(
    running: Serving, consortium: Consortium
) -> None:
    """A member known only because it attended cannot be given what the coordinator never had."""
    keys = MemberKeys.generate()

    async def story() -> None:
        async with running() as hub:
            await hub.coordinator.members.meet(consortium.member("a", keys=keys).statement)
            invitation = consortium.invitation("a", hub.address)
            refused = await _refusal(hub, invitation, identity.make_request(invitation, keys, "0.1.0"))
            assert refused.problem == "the coordinator lost the certificate of a, whose membership holds"

    asyncio.run(story())


# --------------------------------------------------------------------------------------------------------- revocation


def test_a_revoked_sites_stream_closes_and_the_others_are_told(
    running: Serving, site: Sites, consortium: Consortium, operator: Person
) -> None:
    """The revoked one reads why; the rest receive the root's list, and the site is no site any more."""

    async def story() -> None:
        a, b = site("a"), site("b")
        async with running() as hub:
            leaving = asyncio.create_task(a.attend(hub))
            await soon(a.welcomed.wait())
            async with hub.attending(b):
                revoked = consortium.revoked(a.member)
                assert await _ask(hub, operator, PublishRevocations(revoked)) == Done()
                with pytest.raises(IdentityError, match=r"the membership of a was revoked.*ask the administrator why"):
                    await soon(leaving)
                assert await b.until(RevocationList) == revoked
                assert not hub.coordinator.attendance.present("a")
                assert [each.name for each in (await _ask(hub, operator, ListSites())).sites] == ["b"]

    asyncio.run(story())


def test_a_revoked_site_cannot_come_back_not_even_after_a_restart(
    running: Serving, site: Sites, consortium: Consortium, operator: Person
) -> None:
    """The list is durable, and older lists do not replace it."""

    async def story() -> None:
        a, b = site("a"), site("b")
        async with running() as hub:
            await _ask(hub, operator, PublishRevocations(consortium.revoked(a.member, version=2)))
            with pytest.raises(IdentityError, match=r"the membership of a was revoked \(revocation list 2\)"):
                await soon(a.attend(hub))
        async with running() as hub:
            with pytest.raises(IdentityError, match=r"the membership of a was revoked \(revocation list 2\)"):
                await soon(a.attend(hub))
            with pytest.raises(IdentityError, match=r"has version 1, and version 2 is held already.*come back"):
                await _ask(hub, operator, PublishRevocations(consortium.revoked(version=1)))
            with pytest.raises(IdentityError, match="there are two different revocation lists of version 2"):
                await _ask(hub, operator, PublishRevocations(consortium.revoked(version=2)))
            with pytest.raises(IdentityError, match="not signed by heart-study's root"):
                await _ask(hub, operator, PublishRevocations(Consortium().revoked(version=3)))
            with pytest.raises(IdentityError, match="the membership of a was revoked"):
                await soon(a.attend(hub))
            async with hub.attending(b):
                (welcome,) = b.heard
                assert welcome.revocations == consortium.revoked(a.member, version=2)

    asyncio.run(story())


def test_a_membership_that_is_revoked_while_its_site_arrives_does_not_attend(
    running: Serving, site: Sites, consortium: Consortium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the gate and the open stream the store may take its time; what was published meanwhile counts."""

    async def story() -> None:
        a = site("a")
        async with running() as hub:
            room = hub.coordinator.members
            meet = room.meet

            async def slowly(member: MembershipStatement) -> None:
                await meet(member)
                await room.revoke(consortium.revoked(a.member))

            monkeypatch.setattr(room, "meet", slowly)
            with pytest.raises(IdentityError, match="the membership of a was revoked"):
                await soon(a.attend(hub))
            assert not hub.coordinator.attendance.present("a")

    asyncio.run(story())


def test_only_the_roots_members_are_known_as_sites(
    running: Serving, site: Sites, consortium: Consortium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a name's memberships the newest; none that is over; and a member met once is known after a restart."""

    async def story() -> None:
        a = site("a")
        async with running() as hub:
            async with hub.attending(a):
                pass
            older = consortium.member("a", days_ago=10)
            await hub.coordinator.members.meet(older.statement)
            await hub.coordinator.members.meet(consortium.member("op", Role.OPERATOR).statement)
            assert hub.coordinator.members.sites() == (a.member.statement,)
        async with running() as hub:
            assert hub.coordinator.members.sites() == (a.member.statement,)
            monkeypatch.setattr(members.time, "time", lambda: float(a.member.statement.not_after))
            assert hub.coordinator.members.sites() == ()

    asyncio.run(story())
