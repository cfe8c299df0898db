from __future__ import annotations

import asyncio
import errno
import resource
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from client.checks import Check, Level
from client.probe import Stage, Walk
from client.session_events import SiteIdentity
from coordinator.store import Store, url_in
from federation.messages import Role
from parley.commands import coordinator_checks as checks
from parley.commands.coordinator_checks import Port, Room
from parley.homes import Connection, Identity
from tests.consortium import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.consortium import Consortium, Running

    Serving = Callable[..., AbstractAsyncContextManager[Running]]


def _me(consortium: Consortium) -> SiteIdentity:
    return SiteIdentity(consortium.hub.statement, consortium.root.public, consortium.nobody)


def test_a_port_that_this_coordinator_serves_is_well(running: Serving, consortium: Consortium) -> None:
    """It shows this coordinator's own certificate; another coordinator's would fail."""

    async def story() -> None:
        async with running() as hub:
            found = await asyncio.to_thread(checks.look_at_port, f"0.0.0.0:{hub.port}", "hub.heart-study.parley")
            check = checks.port(found, _me(consortium))
            assert (check.name, check.level) == ("port", Level.OK)
            assert "is served by this coordinator" in check.found
            other = replace(_me(consortium), statement=consortium.member("hub", Role.COORDINATOR).statement)
            check = checks.port(found, other)
            assert check.level is Level.FAIL
            assert "another program has" in check.found

    asyncio.run(story())


def test_a_port_that_another_program_has_is_told(consortium: Consortium) -> None:
    """With how to find out which."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        walked = Walk(address, None, Stage.TLS, "no answer within 5 s")
        check = checks.port(Port(address, errno.EADDRINUSE, walked), _me(consortium))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checks.probe, "walk", lambda *_: walked)
            assert checks.look_at_port(address, "hub") == Port(address, errno.EADDRINUSE, walked)
    assert check.level is Level.FAIL
    assert check.found == f"another program, or a coordinator that hangs, has {address}: no answer within 5 s"
    assert "ss -ltnp" in check.fix


@pytest.mark.parametrize(
    ("refused", "found", "fix"),
    [
        (errno.EACCES, "this user may not listen on 0.0.0.0:443", "a port above 1023"),
        (errno.EADDRNOTAVAIL, "cannot be listened on: Cannot assign requested address", "an address of this machine"),
    ],
)
def test_a_port_that_cannot_be_listened_on_is_told(consortium: Consortium, refused: int, found: str, fix: str) -> None:
    """A privileged port, or an address that this machine does not have."""
    check = checks.port(Port("0.0.0.0:443", refused), _me(consortium))
    assert check.level is Level.FAIL
    assert found in check.found
    assert fix in check.fix


def test_an_address_of_another_machine_is_not_listened_on() -> None:
    """The system refuses it, whatever the port."""
    assert checks.look_at_port("192.0.2.1:9", "hub").refused == errno.EADDRNOTAVAIL


def test_the_health_probe_is_asked(running: Serving) -> None:
    """SERVING, or what there is instead."""

    async def story() -> None:
        port = free_port()
        async with running(health_port=port):
            check = checks.health(port, await checks.ask_health(port))
            assert (check.level, check.found) == (Level.OK, f"SERVING on 127.0.0.1:{port}")
        check = checks.health(port, await checks.ask_health(port))
        assert check.level is Level.FAIL
        assert check.found == f"127.0.0.1:{port}: no health service answers"
        assert f"--health-port {port}" in check.fix

    asyncio.run(story())


# ---------------------------------------------------------------------------------------------------------- the store


def _store(url: str, consortium: Consortium) -> checks.Store:
    return checks.look_at_store(url, consortium.nobody, float(consortium.now))


def test_the_store_is_opened_and_left_as_it_is(tmp_path: Path, consortium: Consortium) -> None:
    """Missing, good, and damaged."""
    url = url_in(tmp_path)
    missing = checks.store(_store(url, consortium))
    assert (missing.level, "the first `serve` makes it" in missing.fix) == (Level.WARN, True)
    assert list(tmp_path.iterdir()) == []
    with Store(url):
        pass
    good = checks.store(_store(url, consortium))
    assert (good.level, good.found) == (Level.OK, "opens, and is of this release; 0 jobs")
    (tmp_path / "parley.db").write_bytes(b"not a database, but long enough to look like one" * 100)
    for leftover in tmp_path.glob("parley.db-*"):
        leftover.unlink()
    damaged = checks.store(_store(url, consortium))
    assert damaged.level is Level.FAIL
    assert "is not a SQLite database" in damaged.found
    assert "restore it from a backup" in damaged.fix


def test_sites_are_counted_that_may_attend(tmp_path: Path, consortium: Consortium) -> None:
    """Each once, however often it was enrolled: no operator, and nobody revoked or expired."""
    gone = consortium.member("gone")
    members = (
        consortium.member("a", days_ago=30),
        consortium.member("a"),
        consortium.member("b"),
        consortium.member("expired", days_ago=400),
        consortium.member("op", Role.OPERATOR),
        gone,
    )
    with Store(url_in(tmp_path)) as store:
        for member in members:
            store.add_member(member.statement, member.certificate, float(consortium.now))
    found = checks.look_at_store(url_in(tmp_path), consortium.revoked(gone), float(consortium.now))
    assert found.sites == 2


# ------------------------------------------------------------------------------------------------------ rooms and files


def _wrote(folder: Path, size: int) -> None:
    folder.mkdir(parents=True)
    (folder / "payload").write_bytes(bytes(size))


def test_uploads_of_jobs_that_are_over_are_told(tmp_path: Path) -> None:
    """A crash left them; of a job that is not over they are as they must be, and without a store nobody knows."""
    _wrote(tmp_path / "sealed" / "live" / "1" / "a", 2**20)
    _wrote(tmp_path / "sealed" / "over" / "1" / "a", 2**21)
    (room,) = checks.look_at_rooms(tmp_path)
    assert room == Room(tmp_path / "sealed", (("live", 2**20), ("over", 2**21)))
    told = checks.room(room, checks.Store(live=frozenset({"live"})))
    assert (told.name, told.level) == ("sealed", Level.WARN)
    assert told.found == f"2.0 MiB in {room.folder} of jobs that are over: over"
    assert "what stays, a crash left: remove it" in told.fix
    for known in (checks.Store(live=frozenset({"live", "over"})), checks.Store()):
        well = checks.room(room, known)
        assert (well.level, well.found) == (Level.OK, f"3.0 MiB of 2 jobs, in {room.folder}")


def test_a_room_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """No upload would be taken."""
    (tmp_path / "spool").write_text("no folder")
    (room,) = checks.look_at_rooms(tmp_path)
    told = checks.room(room, checks.Store())
    assert (told.name, told.level) == ("spool", Level.FAIL)
    assert told.found == f"{tmp_path / 'spool'} cannot be written: Not a directory"
    assert "writable to the user that runs Parley" in told.fix


@pytest.mark.parametrize(("most", "level"), [(3 * 100 + 63, Level.FAIL), (3 * 100 + 64, Level.OK)])
def test_too_few_open_files_for_the_members_are_a_failure(most: int, level: Level) -> None:
    """Three for each site, beside what the coordinator opens whoever attends."""
    told = checks.files(most, 100)
    assert (told.level, told.found) == (level, f"this user may have {most} files open, and 100 sites take up to 364")
    assert ("LimitNOFILE" in told.fix) == (level is Level.FAIL)


def test_the_limit_of_open_files_is_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator raises the soft one itself; without a limit there is nothing to tell."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    assert checks.look_at_files() == 4096
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, resource.RLIM_INFINITY))
    assert checks.look_at_files() is None


def test_a_running_coordinator_is_looked_at_as_a_whole(
    running: Serving, consortium: Consortium, tmp_path: Path
) -> None:
    """Beside it, and without disturbing it; where sums were sealed, a log that is missing is a failure."""
    hub, root = consortium.hub, consortium.root.public

    async def looked(address: str) -> dict[str, Check]:
        where = Connection(address, consortium.root.consortium, "hub")
        own = Identity(hub.keys, hub.certificate, hub.statement, root, hub.statement, consortium.nobody, where)
        now = float(consortium.now)
        found = await checks.coordinator(tmp_path, own, _me(consortium), now, listen=address, url="", health_port=0)
        return {check.name: check for check in found}

    async def story() -> dict[str, Check]:
        async with running() as served:
            return await looked(served.address)

    found = asyncio.run(story())
    assert [name for name, check in found.items() if check.level is not Level.OK and name != "disk"] == []
    assert {"identity", "disk", "store", "audit log", "port"} <= set(found)
    assert found["audit log"].found == f"{tmp_path / 'audit.log'}: 1 lines, and their chain holds"
    (tmp_path / "audit.log").unlink()
    assert asyncio.run(looked(f"127.0.0.1:{free_port()}"))["audit log"].level is Level.OK
    (tmp_path / "sealed").mkdir()
    gone = asyncio.run(looked(f"127.0.0.1:{free_port()}"))
    assert (gone["audit log"].level, gone["sealed"].level) == (Level.FAIL, Level.OK)
