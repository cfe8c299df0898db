from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from client import doctor
from client.checks import Check, Level
from client.data.registry import DataSet, DataSets
from client.doctor import Answer, Disk
from client.policy import EXAMPLE
from client.probe import Stage, Walk
from client.proxy import Proxy
from client.session_events import SiteIdentity
from client.training import protocol
from federation.errors import IdentityError, UnreachableError, WhoActs
from federation.greeting import Greeting
from federation.messages import PROTOCOL
from privacy.identity import MemberKeys
from tests.consortium import DAY, free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.consortium import Consortium, Person, Running

    Serving = Callable[..., AbstractAsyncContextManager[Running]]

ADDRESS = "hub.example.org:8443"
PROXY = Proxy("proxy.example.org", 3128, "the environment variable HTTPS_PROXY")
TLS_NAME = "hub.heart-study.parley"


def _holds(check: Check | None, name: str, level: Level, found: str, fix: str = "", who: WhoActs | None = None) -> None:
    """Reads a check: cause and fix contain these words."""
    assert check is not None
    assert (check.name, check.level) == (name, level)
    assert found in check.found
    assert fix in check.fix
    assert bool(check.fix) == (level is not Level.OK)
    if who is not None:
        assert check.who is who


def _me(consortium: Consortium, member: Person) -> SiteIdentity:
    return SiteIdentity(member.statement, consortium.root.public, consortium.nobody)


# ------------------------------------------------------------------------------------------------------------- papers


def test_a_membership_that_holds_says_for_how_long(consortium: Consortium) -> None:
    """Days are counted to the end of the membership."""
    member = consortium.member("a")
    check = doctor.papers(_me(consortium, member), member.certificate, member.keys, consortium.now + 5 * DAY)
    _holds(check, "identity", Level.OK, "site a of heart-study, for 360 more days")


def test_a_membership_that_ends_soon_is_a_warning(consortium: Consortium) -> None:
    """A month before, because enrolment goes by way of people."""
    member = consortium.member("a", days_ago=336)
    check = doctor.papers(_me(consortium, member), member.certificate, member.keys, consortium.now)
    _holds(check, "identity", Level.WARN, "for 29 more days", "new invitation in time", WhoActs.CONSORTIUM)


def test_a_membership_that_does_not_hold_is_told_in_its_own_words(consortium: Consortium) -> None:
    """Expired, revoked, or not begun by this machine's clock."""
    member = consortium.member("a")
    me, now = _me(consortium, member), consortium.now
    late = doctor.papers(me, member.certificate, member.keys, now + 400 * DAY)
    _holds(late, "identity", Level.FAIL, "the membership of a expired on", "new invitation")
    early = doctor.papers(me, member.certificate, member.keys, now - 2 * DAY)
    _holds(early, "identity", Level.FAIL, "the membership of a begins on", "set this machine's clock")
    revoked = replace(me, revocations=consortium.revoked(member))
    gone = doctor.papers(revoked, member.certificate, member.keys, now)
    _holds(gone, "identity", Level.FAIL, "the membership of a was revoked")


def test_papers_that_do_not_belong_together_are_told(consortium: Consortium) -> None:
    """Another member's certificate, or other keys, beside the membership."""
    member, other = consortium.member("a"), consortium.member("b")
    mixed = doctor.papers(_me(consortium, member), other.certificate, member.keys, consortium.now)
    _holds(mixed, "identity", Level.FAIL, "does not belong to the membership of a")
    keys = doctor.papers(_me(consortium, member), member.certificate, MemberKeys.generate(), consortium.now)
    _holds(keys, "identity", Level.FAIL, "the keys here are not those of a's membership", "restore the identity folder")


# ------------------------------------------------------------------------------------------------------- this machine


def test_a_folder_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    """Free bytes are those of its disk."""
    found = doctor.look_at_disk(tmp_path)
    assert (found.trouble, found.free > 0, list(tmp_path.iterdir())) == ("", True, [])


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """The system's own word, and the unit's line that is forgotten most often."""
    check = doctor.disk(doctor.look_at_disk(tmp_path / "missing"))
    _holds(check, "disk", Level.FAIL, "missing cannot be written: No such file or directory", "ReadWritePaths")


@pytest.mark.parametrize(
    ("free", "level"), [(100 * 2**30, Level.OK), (2**30, Level.WARN), (100 * 2**20, Level.FAIL), (0, Level.FAIL)]
)
def test_a_disk_that_fills_is_told_in_time(tmp_path: Path, free: int, level: Level) -> None:
    """First a warning, then a failure."""
    fix = "" if level is Level.OK else "free disk space"
    _holds(doctor.disk(Disk(tmp_path, free)), "disk", level, f"{free / 2**30:.1f} GiB free at {tmp_path}", fix)


def test_the_policy_is_read(tmp_path: Path) -> None:
    """Missing, wrong, and one that allows nothing, each with its way out."""
    path = tmp_path / "policy.toml"
    _holds(doctor.rules(path), "policy", Level.FAIL, f"no policy at {path}", "`parley site join` makes", WhoActs.SITE)
    path.write_text(EXAMPLE)
    _holds(doctor.rules(path), "policy", Level.OK, str(path))
    path.write_text("minimum_sites = 1\n")
    _holds(doctor.rules(path), "policy", Level.FAIL, "minimum_sites", "use the keys")
    path.write_text('tasks = ["*"]\n')
    _holds(doctor.rules(path), "policy", Level.WARN, "allows no datasets, no models, no jobs", "list what is allowed")
    path.write_bytes(b"\xff")
    _holds(doctor.rules(path), "policy", Level.FAIL, "cannot be read", "make it readable")


def test_no_data_set_is_a_failure(tmp_path: Path) -> None:
    """Every job would be refused."""
    (check,) = doctor.data(doctor.look_at_data(tmp_path, deep=False))
    _holds(check, "data", Level.FAIL, "no data set is registered", "parley site dataset add", WhoActs.SITE)


def test_data_sets_are_opened_and_when_asked_read(tmp_path: Path) -> None:
    """A file that went away is told at once; one that is no table any more, when it is read."""
    file = tmp_path / "heart.csv"
    file.write_text("age\n60\n61\n")
    DataSets(tmp_path).add(DataSet.of("heart", str(file)))
    (check,) = doctor.data(doctor.look_at_data(tmp_path, deep=False))
    _holds(check, "data heart", Level.OK, str(file))
    (check,) = doctor.data(doctor.look_at_data(tmp_path, deep=True))
    _holds(check, "data heart", Level.OK, f"2 rows at {file}")
    file.write_text("")
    (check,) = doctor.data(doctor.look_at_data(tmp_path, deep=False))
    assert check.level is Level.OK
    (check,) = doctor.data(doctor.look_at_data(tmp_path, deep=True))
    _holds(check, "data heart", Level.FAIL, "is empty", "a header and records")
    file.unlink()
    (check,) = doctor.data(doctor.look_at_data(tmp_path, deep=False))
    _holds(check, "data heart", Level.FAIL, "No such file or directory", "register its new place", WhoActs.SITE)


def test_a_trainer_that_starts_says_how_long_it_took() -> None:
    """And one that does not, why."""
    done = protocol.Done(seconds=3.5, report=protocol.Report(reason="torch 2.13"))
    _holds(doctor.trainer(done), "trainer", Level.OK, "torch 2.13 loaded in 3.5 s")
    died = protocol.Failed("internal", "the trainer ended with status 1")
    _holds(doctor.trainer(died), "trainer", Level.FAIL, "does not start: the trainer ended with status 1", "install")


def test_the_trainer_that_is_looked_at_is_real() -> None:
    """A child process loads torch and is gone afterwards."""
    _holds(doctor.trainer(asyncio.run(doctor.look_at_trainer())), "trainer", Level.OK, "torch 2.")


# ------------------------------------------------------------------------------------------------------------ the way


@pytest.mark.parametrize(
    ("walked", "name", "found", "fix"),
    [
        (Walk(ADDRESS, None, Stage.NAME, "unknown"), "name", "the coordinator's name hub.example.org cannot", "DNS"),
        (Walk(ADDRESS, PROXY, Stage.NAME, "unknown"), "name", "the proxy's name proxy.example.org cannot", "DNS"),
        (
            Walk(ADDRESS, None, Stage.PORT, "Connection refused"),
            "port",
            f"{ADDRESS} takes no connection: Connection refused",
            "parley coordinator serve",
        ),
        (
            Walk(ADDRESS, None, Stage.PORT, "no answer within 5 s"),
            "port",
            "no answer within 5 s",
            "a firewall that drops",
        ),
        (
            Walk(ADDRESS, PROXY, Stage.PORT, "Connection refused"),
            "port",
            "the proxy http://proxy.example.org:3128 (from the environment variable HTTPS_PROXY) cannot be reached",
            "check the proxy's address",
        ),
        (Walk(ADDRESS, PROXY, Stage.PROXY, "", status=407), "proxy", "asks for a user name", "correct them in"),
        (
            Walk(ADDRESS, PROXY, Stage.PROXY, "", status=403),
            "proxy",
            "refuses to connect",
            f"allow CONNECT to {ADDRESS}",
        ),
        (
            Walk(ADDRESS, PROXY, Stage.PROXY, "its answer is not HTTP"),
            "proxy",
            "does not behave like an HTTP proxy: its answer is not HTTP",
            "check the proxy's address and port",
        ),
        (
            Walk(ADDRESS, None, Stage.TLS, "what answers does not speak TLS"),
            "TLS",
            "the TLS handshake does not end: what answers does not speak TLS",
            f"check that {ADDRESS} is the coordinator's address",
        ),
    ],
)
def test_the_way_ends_at_the_first_layer_that_fails(
    consortium: Consortium, walked: Walk, name: str, found: str, fix: str
) -> None:
    """What was passed is well, and nothing is said of what lies behind."""
    checks = doctor.way(walked, _me(consortium, consortium.member("a")), TLS_NAME, consortium.now)
    assert [check.level for check in checks[:-1]] == [Level.OK] * (len(checks) - 1)
    _holds(checks[-1], name, Level.FAIL, found, fix, WhoActs.SITE)


# ------------------------------------------------------------------------------------------- what the coordinator says


def test_a_refusal_is_told_in_the_coordinators_words() -> None:
    """And who must act, by its word."""
    refused = IdentityError("the membership of a was revoked", fix="ask why", who=WhoActs.CONSORTIUM)
    check = doctor.acceptance(Answer(refused=refused))
    _holds(check, "membership", Level.FAIL, "the membership of a was revoked", "ask why", WhoActs.CONSORTIUM)
    _holds(doctor.acceptance(Answer()), "membership", Level.OK, "accepts")


@pytest.mark.parametrize(
    ("greeting", "level", "found", "fix", "who"),
    [
        (Greeting(PROTOCOL, "0.1.0", 1), Level.OK, "Parley 0.1.0 on both sides", "", None),
        (
            Greeting(PROTOCOL, "0.2.0", 1),
            Level.WARN,
            "runs Parley 0.2.0, this machine 0.1.0",
            "both sides",
            WhoActs.YOU,
        ),
        (Greeting(PROTOCOL + 1, "2.0", 1), Level.FAIL, "(Parley 2.0)", "install Parley 2.0 here", WhoActs.SITE),
        (Greeting(0, "0.0.9", 1), Level.FAIL, "version 0", "install Parley 0.1.0 there", WhoActs.COORDINATOR),
        (None, Level.WARN, "does not say its release", "install Parley 0.1.0 there", WhoActs.COORDINATOR),
    ],
)
def test_releases_are_compared(
    greeting: Greeting | None, level: Level, found: str, fix: str, who: WhoActs | None
) -> None:
    """Another protocol fails, another release is worth a warning; whoever is behind must act."""
    _holds(doctor.release(greeting, "0.1.0"), "release", level, found, fix, who)


@pytest.mark.parametrize(
    ("ahead", "level", "found"),
    [
        (0.2, Level.OK, "agrees"),
        (-29.0, Level.OK, "agrees"),
        (45.0, Level.WARN, "this machine's clock is 45 s behind the coordinator's"),
        (-3600.0, Level.WARN, "this machine's clock is 3600 s ahead of the coordinator's"),
    ],
)
def test_clocks_are_compared(ahead: float, level: Level, found: str) -> None:
    """Half a minute is nothing; more makes logs unreadable and may make certificates invalid."""
    fix = "" if level is Level.OK else "timedatectl"
    _holds(doctor.clock(Greeting(PROTOCOL, "0.1.0", 1), ahead), "clock", level, found, fix)
    assert doctor.clock(None, ahead) is None


# ------------------------------------------------------------------------------------------------------------ together


def test_a_member_in_good_health(running: Serving, consortium: Consortium, tmp_path: Path) -> None:
    """All layers up to the coordinator's own word; an agent that attends meanwhile is not disturbed."""

    async def story() -> None:
        async with running() as hub:
            member = consortium.member("a")
            checks = await doctor.member(
                _me(consortium, member), hub.line(member), member.keys, tmp_path, consortium.now
            )
            names = ["identity", "disk", "name", "port", "proxy", "TLS", "membership", "release", "clock"]
            assert [check.name for check in checks] == names
            assert {check.level for check in checks if check.name != "disk"} == {Level.OK}
            assert hub.store.presence() == ()

    asyncio.run(story())


def test_a_member_that_was_revoked_hears_it_from_the_coordinator(
    running: Serving, consortium: Consortium, tmp_path: Path
) -> None:
    """Its own list is older and knows nothing of it."""

    async def story() -> None:
        async with running() as hub:
            member = consortium.member("a")
            await hub.coordinator.members.revoke(consortium.revoked(member))
            checks = await doctor.member(
                _me(consortium, member), hub.line(member), member.keys, tmp_path, consortium.now
            )
            _holds(checks[-1], "membership", Level.FAIL, "the membership of a was revoked")

    asyncio.run(story())


def test_a_coordinator_that_is_away_ends_the_checks_at_its_port(consortium: Consortium, tmp_path: Path) -> None:
    """Nothing is asked of what cannot be reached."""
    from tests.consortium import Running as At

    member = consortium.member("a")
    line = At(consortium, None, None, tmp_path, free_port()).line(member)  # type: ignore[arg-type]  # an address alone
    checks = asyncio.run(doctor.member(_me(consortium, member), line, member.keys, tmp_path, consortium.now))
    assert [check.name for check in checks] == ["identity", "disk", "name", "port"]
    _holds(checks[-1], "port", Level.FAIL, "Connection refused", "parley coordinator serve")


def test_a_coordinator_that_does_not_answer_is_told(
    running: Serving, consortium: Consortium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections and says nothing: a time-out, with who must look."""

    async def never(_: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(doctor.Connection, "greeting", never, raising=False)
    monkeypatch.setattr(doctor, "_ANSWER_SECONDS", 0.05)

    async def story() -> None:
        async with running() as hub:
            answer = await doctor.ask(hub.line(consortium.member("a")))
            assert isinstance(answer.refused, UnreachableError)
            _holds(
                doctor.acceptance(answer),
                "membership",
                Level.FAIL,
                "the coordinator did not answer within",
                "look at the coordinator's load",
                WhoActs.COORDINATOR,
            )

    asyncio.run(story())


def test_a_site_is_looked_at_as_a_whole(tmp_path: Path) -> None:
    """Policy and data; the list of data sets may itself be damaged."""
    (tmp_path / "policy.toml").write_text(EXAMPLE)
    assert [check.name for check in asyncio.run(doctor.site("a", tmp_path, deep=False))] == [
        "policy",
        "vault",
        "audit log",
        "data",
    ]
    (tmp_path / "datasets.json").write_text("{")
    damaged = asyncio.run(doctor.site("a", tmp_path, deep=False))[-1]
    _holds(damaged, "data", Level.FAIL, "is not a list of data sets", "register the data sets anew")
