"""How a command reaches the coordinator: as the member whose home it was given."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from client.proxy import Proxy
from federation import codec
from federation.errors import IdentityError, StorageError, UnreachableError
from federation.messages import Credential, Jobs, ListJobs, Role
from parley.dialling import ask, line
from parley.homes import Connection as HomeConnection
from parley.homes import MemberHome
from privacy import identity

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.consortium import Consortium, Running


@pytest.fixture
def home(consortium: Consortium, tmp_path: Path) -> Callable[[str, Role], MemberHome]:
    """Makes the home of a member whose coordinator is at an address."""

    def make(address: str, role: Role = Role.OPERATOR) -> MemberHome:
        home = MemberHome(tmp_path / "home", role)
        member = consortium.member("op", role, keys=home.begin())
        credential = Credential(member.certificate, member.statement, consortium.hub.statement, consortium.nobody)
        where = HomeConnection(address, consortium.root.consortium, "hub")
        home.install(credential, consortium.root.public, where, name="op", now=consortium.now)
        return home

    return make


def test_a_members_line_is_its_homes(consortium: Consortium, home: Callable[..., MemberHome]) -> None:
    """Address, the coordinator's name in TLS, the one trusted root, its keys and its statement."""
    member = home("hub.example.org:8443")
    me = member.load()
    dialled = line(member, "http://proxy:3128")
    assert (dialled.address, dialled.tls_name) == ("hub.example.org:8443", "hub.heart-study.parley")
    assert dialled.root_certificate == consortium.root.certificate_pem
    assert (dialled.certificate, dialled.tls_key) == (me.certificate, me.keys.tls_pem)
    assert codec.decode(type(me.statement), dialled.statement) == me.statement
    assert dialled.proxy == Proxy("proxy", 3128, "--proxy")
    assert dialled.tls_name == identity.tls_name("hub", "heart-study")


def test_an_operators_question_is_answered(
    running: Callable[..., AbstractAsyncContextManager[Running]], home: Callable[..., MemberHome]
) -> None:
    """A command that runs its own loop gets the coordinator's answer."""

    async def story() -> None:
        async with running() as hub:
            member = home(hub.address)
            assert await asyncio.to_thread(ask, member, ListJobs()) == Jobs(())

    asyncio.run(story())


def test_a_question_that_is_refused_is_refused_in_the_coordinators_words(
    running: Callable[..., AbstractAsyncContextManager[Running]], home: Callable[..., MemberHome]
) -> None:
    """A site's home is not an operator's."""

    async def story() -> None:
        async with running() as hub:
            member = home(hub.address, Role.SITE)
            with pytest.raises(IdentityError, match="op is enrolled as site; this call is for the role operator"):
                await asyncio.to_thread(ask, member, ListJobs())

    asyncio.run(story())


def test_a_home_without_an_identity_and_a_coordinator_that_is_away_are_told_apart(
    home: Callable[..., MemberHome], tmp_path: Path
) -> None:
    """The first must join; the second must be started."""
    with pytest.raises(StorageError, match="parley operator join INVITATION"):
        ask(MemberHome(tmp_path / "none", Role.OPERATOR), ListJobs())
    with pytest.raises(UnreachableError, match=r"at 127.0.0.1:1 cannot be reached.*parley coordinator serve"):
        ask(home("127.0.0.1:1"), ListJobs())
