"""Invitations and members: what is expired, reused, forged, taken, foreign or revoked is refused in its own words."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen

import pytest

from client.connection import Connection as Wire
from client.connection import Line
from federation.errors import UnreachableError
from federation.messages import Credential, ListJobs, Role
from parley.dialling import line
from parley.homes import Connection, Consortium, Home
from privacy import identity
from tests.integration.alliance import Alliance, Running, Said, command, ended, started

HOUR = 3600


@dataclass(frozen=True)
class Newcomer:
    """A site that wants to join, with a home of its own."""

    home: Path

    def join(self, invitation: str) -> Said:
        """What `site join` says of an invitation that is refused: the command ends by itself."""
        return ended(started(self.home, "site", "join", invitation))


@pytest.fixture
def newcomer(tmp_path: Path) -> Newcomer:
    """A newcomer."""
    return Newcomer(tmp_path / "newcomer")


def crafted(alliance: Alliance, name: str, *, hours_ago: int = 0) -> str:
    """An invitation that no command would make: for any name, and long ago."""
    return (
        alliance.unlock()
        .root.invite(
            name,
            name,
            Role.SITE,
            address=alliance.address,
            coordinator="hub",
            now=int(time.time()) - hours_ago * HOUR,
            hours=1,
        )
        .text
    )


def test_an_expired_invitation_is_refused_before_anything_is_made(alliance: Alliance, newcomer: Newcomer) -> None:
    """It says when it expired and who can give a new one."""
    said = command(newcomer.home, "site", "join", crafted(alliance, "oslo", hours_ago=3))
    assert (said.code, said.out) == (1, "")
    assert "refused: this invitation for oslo expired on" in said.err
    assert "to fix (the consortium's administrator): ask the consortium's administrator for a new one" in said.err
    assert not newcomer.home.exists()


def test_a_mistyped_invitation_is_told_from_a_forged_one(alliance: Alliance, newcomer: Newcomer) -> None:
    """A wrong character fails the checksum; one whose checksum was mended fails the root's signature."""
    text = crafted(alliance, "oslo")
    flipped = text[:-40] + ("A" if text[-40] != "A" else "B") + text[-39:]
    said = command(newcomer.home, "site", "join", flipped)
    assert (said.code, said.out) == (1, "")
    assert "this is an invitation that was cut short or mistyped (checksum)" in said.err

    content = bytearray(identity.unarmour("parley1:", text, "an invitation", ""))
    at = content.index(alliance.address.encode())
    content[at : at + 3] = b"128"  # another machine poses as the coordinator
    said = command(newcomer.home, "site", "join", identity.armour("parley1:", bytes(content)))
    assert (said.code, said.out) == (1, "")
    assert "this invitation was altered after it was made: the root's signature does not fit" in said.err
    assert "do not use it" in said.err
    assert not newcomer.home.exists()


def test_an_invitation_serves_one_newcomer(alliance: Alliance, newcomer: Newcomer) -> None:
    """A second one, with keys of its own, is refused, whether or not the first was approved."""
    invitation = alliance.invitation("oslo")
    first = started(alliance.home("oslo"), "site", "join", invitation)
    try:
        alliance.until_pending("oslo")
        said = newcomer.join(invitation)
        assert said.code == 1
        assert "the invitation for oslo was used already, with other keys" in said.err
    finally:
        first.terminate()
        ended(first)
    revoked = alliance.admin_does("consortium", "revoke", "oslo", *alliance.unlocked)
    assert "oslo is revoked" in revoked.out
    assert "oslo" not in [each["name"] for each in alliance.pending()]
    said = newcomer.join(invitation)
    assert said.code == 1
    assert "the invitation for oslo was withdrawn" in said.err


def test_a_taken_name_is_not_invited_again_and_not_admitted(alliance: Alliance, newcomer: Newcomer) -> None:
    """Neither by the administrator's command nor, with an invitation made behind its back, by the coordinator."""
    said = command(alliance.admin, "consortium", "invite", "athens", *alliance.unlocked)
    assert said.code == 1
    assert "the name athens is taken by a member (site of athens)" in said.err
    assert "parley consortium revoke athens" in said.err
    said = newcomer.join(crafted(alliance, "athens"))
    assert said.code == 1
    assert "the name athens is taken by a member of the consortium" in said.err


def test_an_invitation_by_another_root_leads_nowhere(
    alliance: Alliance, newcomer: Newcomer, foreign: Consortium
) -> None:
    """The coordinator cannot show that root's certificate; the newcomer is told so, and nothing is asked."""
    invitation = foreign.invite("ghent", "ghent", Role.SITE, now=int(time.time()))
    process = started(newcomer.home, "site", "join", invitation.text)
    try:
        said = _lines_until(process, "does not show a certificate of this consortium's root")
        assert "check the address" in said
    finally:
        process.terminate()
        ended(process)
    assert "ghent" not in [each["name"] for each in alliance.pending()]


@pytest.fixture(scope="module")
def foreign(alliance: Alliance, tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    """Another consortium, with its own root, that names the same address."""
    home = Home(tmp_path_factory.mktemp("foreign"))
    now = int(time.time())
    return home.consortium.create("study", alliance.address, "hub", passphrase=None, now=now)


def test_another_consortium_s_site_never_attends(alliance: Alliance, foreign: Consortium, tmp_path: Path) -> None:
    """It does not trust our coordinator; and even one that does is refused in the handshake, before any handler."""
    home = Home(tmp_path / "stranger").site
    now = int(time.time())
    invitation = foreign.invite("stranger", "stranger", Role.SITE, now=now)
    member = foreign.approve(identity.make_request(invitation, home.begin(), "0.1.0"), now=now)
    request = identity.request_for("hub", "hub", Role.COORDINATOR, identity.MemberKeys.generate(), "0.1.0")
    _, hub = foreign.root.approve(request, now)
    credential = Credential(member.certificate, member.statement, hub, foreign.home.revocations())
    connection = Connection(alliance.address, "study", "hub")
    home.install(credential, foreign.root.public, connection, name="stranger", now=now)
    (home.folder / "policy.toml").write_text((alliance.home("athens") / "site" / "policy.toml").read_text())
    with _running(tmp_path / "stranger", tmp_path / "stranger.log") as stranger:
        stranger.says("does not show a certificate of this consortium's root")

    trusting = replace(line(home), root_certificate=Home(alliance.admin).consortium.root_certificate().pem)
    with pytest.raises(UnreachableError) as refused:
        asyncio.run(_asked(trusting))
    for words in ("in the TLS handshake", "another consortium's", "enrol with a new invitation"):
        assert words in str(refused.value)
    assert "stranger" not in alliance.coordinator.said


async def _asked(own: Line) -> None:
    async with Wire.opened(own) as wire:
        await wire.operate(ListJobs())


def test_a_revoked_member_s_stream_closes_and_it_cannot_come_back(alliance: Alliance) -> None:
    """`site run` ends with exit code 1 and says so; so does the next one; the name is free, the list is published."""
    alliance.enrol("essen")
    essen = alliance.attends("essen")
    said = alliance.admin_does("consortium", "revoke", "essen", *alliance.unlocked)
    assert "essen is revoked" in said.out
    assert "open streams of revoked members are closed" in said.out
    assert essen.code() == 1
    assert "refused: the membership of essen was revoked" in essen.said
    assert "Traceback" not in essen.said

    essen.start()
    assert essen.code() == 1
    assert essen.said.count("the membership of essen was revoked") == 2
    members = {each["statement"]["name"]: each["revoked"] for each in _members(alliance)}
    assert members["essen"] is True
    assert members["athens"] is False
    assert "parley1:" in alliance.invitation("essen")


def test_an_operator_joins_and_a_site_is_no_operator(alliance: Alliance) -> None:
    """Roles are told apart before anything is sent, and at the coordinator."""
    invitation = alliance.invitation("rita", "--role", "operator")
    said = command(alliance.home("rita"), "site", "join", invitation)
    assert said.code == 2
    assert "this invitation is for the role operator" in said.err
    assert "use: parley operator join INVITATION" in said.err
    joining = started(alliance.home("rita"), "operator", "join", invitation)
    alliance.until_pending("rita")
    alliance.admin_does("consortium", "approve", "rita", "--yes", *alliance.unlocked)
    said = ended(joining)
    assert said.code == 0
    assert "rita is a member of study." in said.out
    assert "parley consortium approve rita" in said.err
    assert command(alliance.home("rita"), "job", "list", "--json").code == 0
    said = command(alliance.home("athens"), "job", "list")
    assert said.code == 1
    assert "parley operator join INVITATION" in said.err


def test_a_second_agent_of_a_site_is_refused(alliance: Alliance) -> None:
    """It would close the first one's stream and delete its work; the first goes on undisturbed."""
    before = alliance.sites["athens"].said
    said = ended(started(alliance.home("athens"), "site", "run"))
    assert said.code == 1
    assert "another agent of this site runs already" in said.err
    assert alliance.sites["athens"].said == before


def _members(alliance: Alliance) -> list[dict[str, dict[str, str]]]:
    found: list[dict[str, dict[str, str]]] = alliance.admin_does("consortium", "members", "--json").json
    return found


@contextmanager
def _running(home: Path, log: Path) -> Iterator[Running]:
    running = Running(home, ("site", "run"), log)
    try:
        yield running
    finally:
        running.kill()


def _lines_until(process: Popen[str], words: str) -> str:
    """What a process says on standard error up to the line with `words`."""
    said = ""
    assert process.stderr is not None
    for told in process.stderr:
        said += told
        if words in told:
            return said
    raise AssertionError(said)
