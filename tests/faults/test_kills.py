"""Whoever is killed, and at whatever point of the work: the job ends with the same rounds and the same model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import random
import resource
import signal
import sqlite3
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Protocol

import psutil
import psycopg
import pytest
from sqlalchemy.engine import make_url

from client.backoff import Backoff
from client.connection import Connection
from client.data.registry import DataSet, DataSets
from coordinator.records import Outcome
from coordinator.store.meaning import file_of
from federation import codec
from federation.errors import IdentityError, RemoteProtocolError
from federation.messages import (
    ApproveEnrolment,
    JobState,
    ListPending,
    ListSites,
    Pending,
    PublishRevocations,
    Role,
    Sites,
    StepKind,
    StopJob,
)
from federation.vector import Layout, TensorSpec
from parley.commands.site import approved, door
from parley.dialling import line
from parley.homes import Home
from privacy import identity
from tests.faults.outside import (
    NOISY,
    OPEN,
    PLAIN,
    ROUNDS,
    SEALED,
    SITES,
    Founded,
    Process,
    Study,
    found,
    job_text,
    learnt,
)
from tests.servers.postgresql import running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from federation.messages import Credential, EnrolmentRequest, SiteView
    from tests.servers.postgresql import PostgreSQL

    Undisturbed = Callable[..., tuple[object, ...]]

pytestmark = [
    pytest.mark.kill,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork and SIGKILL"),
]

NUMBERS = itertools.count(1)
"""Of newcomers, whose names are taken once."""

MANY = 12
"""Rounds of a job that is long enough to be disturbed by hand."""


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Founded]:
    """A consortium whose sites attend whatever coordinator there is at its address."""
    with found(tmp_path_factory.mktemp("kills")) as consortium:
        yield consortium


@pytest.fixture(scope="module")
def undisturbed(founded: Founded, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What a job comes to when nobody is killed, by what it says of privacy and its number of rounds."""

    @functools.cache
    def comes_to(privacy: str = PLAIN, rounds: int = ROUNDS) -> tuple[object, ...]:
        study = Study.of(founded, tmp_path_factory.mktemp("undisturbed"))
        with study.serving():
            return learnt(study.exactly_once(study.submit(job_text(rounds, privacy=privacy))))

    return comes_to


@pytest.fixture(scope="module")
def undisturbed_long(undisturbed: Undisturbed) -> tuple[object, ...]:
    """What a plain job comes to with many rounds."""
    return undisturbed(rounds=MANY)


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgreSQL]:
    """A PostgreSQL server."""
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def introduced(founded: Founded, postgresql: PostgreSQL) -> str:
    """A database with a store that knows the sites, to be copied."""
    name = postgresql.database()
    founded.introduce(postgresql.url(name))
    return name


@pytest.fixture
def on_server(founded: Founded, tmp_path: Path, postgresql: PostgreSQL, introduced: str) -> Study:
    """A study with its store in PostgreSQL."""
    return Study.of(founded, tmp_path, postgresql.url(postgresql.database(like=introduced)))


@pytest.fixture
def in_file(founded: Founded, tmp_path: Path) -> Study:
    """A study with its store in a file."""
    return Study.of(founded, tmp_path)


@pytest.fixture(params=["in_file", "on_server"])
def study(request: pytest.FixtureRequest) -> Study:
    """A study with its store in either in turn."""
    kept: Study = request.getfixturevalue(request.param)
    return kept


# ------------------------------------------------------------------------------------------------------ the coordinator

STORE, CONDUCT, BLOBS = "coordinator.store:Store", "coordinator.conduct:Conductor", "federation.blobs"
SEND = "coordinator.attendance:Attendance.send"

SUBMITTING = (
    f"after:{BLOBS}:BlobStore.take 1",  # the initial model lies in the job's folder, and there is no job
    f"before:{STORE}.add_job 1",
    f"after:{STORE}.add_job 1",
)
WORKING = (
    f"after:{SEND}?JobOffer 2",
    f"before:{STORE}.set_job_site 2",
    f"after:{STORE}.set_job_site 2",
    f"before:{STORE}.set_job_state 1",
    f"after:{STORE}.set_job_state 1",
    f"after:{BLOBS}:BlobStore.put 1",  # a preparation that no step names
    f"before:{SEND}?StepStart 2",
    f"after:{SEND}?StepStart 5",
    f"before:{BLOBS}:Incoming.append 4",  # half an update is there
    f"after:{BLOBS}:Incoming.finish 5",  # a whole one, of which nobody has spoken
    f"before:{CONDUCT}.heard?Contribution 3",
    f"after:{CONDUCT}.heard?Contribution 2",
    "before:coordinator.arithmetic:Arithmetic.complete 2",
    f"after:{BLOBS}:Draft.keep 2",  # a model that no step names
    f"before:{BLOBS}:BlobStore.adopt 8",  # one that has no name yet
    f"after:{BLOBS}:BlobStore.take 2",  # a strategy's state
    "after:coordinator.arithmetic:Arithmetic.complete 2",
    f"before:{STORE}.commit_step 2",
    f"after:{STORE}.commit_step 2",
    f"before:{CONDUCT}._tidy 2",
    f"after:{CONDUCT}._tidy 2",
    f"before:{SEND}?StepEnded 4",
    f"after:{SEND}?StepEnded 5",
)
ENDING = (
    "before:coordinator.registry:card 1",
    f"before:{STORE}.commit_step 7",
    f"after:{STORE}.commit_step 7",
    f"before:{SEND}?JobEnded 1",
    f"after:{SEND}?JobEnded 2",
    f"before:{CONDUCT}._tidy 7",
)

SUMS = "coordinator.sealed:SealedSums"
SUMMING = (  # under secure aggregation, one stage of its machine after the other; step 2 is the first to train
    f"after:{SEND}?JobOffer 2",
    f"before:{SUMS}._send?Epoch 2",  # idle: one site makes keys, the others were not asked
    f"before:{SUMS}._send?Keys 3",  # some have one another's keys
    f"before:{SUMS}._send?Encaps 2",
    f"before:{STORE}.set_standing 8",
    f"after:{STORE}.set_standing 8",  # gathering
    f"before:{SUMS}._send?Train 5",
    f"before:{SUMS}.hear 17",  # one site is ready, or two
    f"before:{STORE}.set_standing 9",
    f"after:{STORE}.set_standing 9",  # an attempt is chosen and stored, and nobody has heard of it
    f"before:{SUMS}._send?RoundStart 5",  # uploading
    f"after:{SUMS}._send?RoundStart 6",
    f"before:{BLOBS}:Incoming.append 6",  # half a masked vector is there
    f"after:{BLOBS}:Incoming.finish 5",  # a whole one, of which the machine does not know
    f"before:{STORE}.set_standing 10",  # all of them, and nobody may open
    f"after:{STORE}.set_standing 10",  # opening
    f"before:{SUMS}._send?Full 5",  # one site may open, the others not
    f"before:{STORE}.set_standing 11",
    f"after:{STORE}.set_standing 11",  # one site has opened
    f"before:{STORE}.set_standing 13",
    f"after:{STORE}.set_standing 13",  # summing: all have
    "before:coordinator.secure_sums:perform 2",
    "after:coordinator.secure_sums:perform 2",  # summed, which stands nowhere yet
    "before:coordinator.arithmetic:Arithmetic.complete 2",
    "after:coordinator.arithmetic:Arithmetic.complete 2",
    "before:federation.audit:AuditLog.extend 20",
    "after:federation.audit:AuditLog.extend 25",
    f"before:{STORE}.commit_step 2",
    f"after:{STORE}.commit_step 2",  # the next step may begin, and the sites have no RESULT
    f"before:{SUMS}._send?Result 5",
    f"after:{SUMS}._send?Result 6",
    f"before:{SUMS}._drop_round 2",
    f"after:{CONDUCT}._tidy 2",
    f"before:{SEND}?StepEnded 4",
)
CLOSING = (*ENDING[:3], f"before:{SUMS}._close 1", *ENDING[3:])

COORDINATORS = [
    *((PLAIN, point) for point in (*SUBMITTING, *WORKING, *ENDING)),
    *((SEALED, point) for point in (SUBMITTING[-1], *SUMMING, *CLOSING)),
]


def named(value: str) -> str:
    """A point, or what a job says of privacy, as the id of a test."""
    if ":" not in value:
        return {PLAIN: "plain", SEALED: "rostersum", OPEN: "open", NOISY: "dp"}[value]
    where, _, count = value.rpartition(" ")
    when, module, function = where.split(":")
    return f"{when} {module.rpartition('.')[2]}.{function} {count}".replace(" ", "-")


@pytest.mark.parametrize(("privacy", "point"), COORDINATORS, ids=named)
def test_a_coordinator_killed_at_any_point_loses_and_doubles_nothing(
    in_file: Study, undisturbed: Undisturbed, privacy: str, point: str
) -> None:
    """Started again it goes on, and ends with the very same models; no payload, file or note is left over."""
    expected = undisturbed(privacy)
    with in_file.serving(point):
        in_file.exactly_once(in_file.submit(job_text(privacy=privacy)), expected)
        in_file.until(lambda: in_file.coordinator.deaths == 1, f"a death at {point}")
    assert len(in_file.jobs()) == 1


@pytest.mark.parametrize(
    ("privacy", "points", "rounds"),
    [
        (PLAIN, WORKING, MANY),
        *((privacy, SUMMING[::2], 2 * MANY) for privacy in (SEALED, OPEN, NOISY)),
    ],
    ids=["plain", "rostersum", "open", "dp"],
)
def test_a_coordinator_killed_at_every_point_in_turn_loses_and_doubles_nothing(
    on_server: Study, undisturbed: Undisturbed, privacy: str, points: tuple[str, ...], rounds: int
) -> None:
    """One job with its store on a server outlives them all, each life of the coordinator ended at another point.

    With noise no two jobs come to the same models: each round is there once, and each site was charged for it, once.
    """
    noisy = privacy == NOISY
    commit, expected = f"{STORE}.commit_step 1", None if noisy else undisturbed(privacy, rounds)
    before = {name: on_server.founded.charged(name) for name in SITES}
    fates = (*points, "before:coordinator.registry:card 1", f"before:{commit}", f"after:{commit}", *ENDING[3:5])
    with on_server.serving(*fates):
        on_server.exactly_once(on_server.submit(job_text(rounds, privacy=privacy)), expected)
        on_server.until(lambda: on_server.coordinator.deaths == len(fates), "all deaths")
    assert len(on_server.jobs()) == 1
    for name in SITES:
        charged = on_server.founded.charged(name, since=before[name])
        assert rounds <= charged <= rounds + len(fates) if noisy else charged == 0


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Founded]:
    """A consortium of four sites, of which a round can do without one."""
    with found(tmp_path_factory.mktemp("four"), sites=(*SITES, "d")) as consortium:
        yield consortium


@pytest.mark.parametrize("privacy", [OPEN, NOISY], ids=named)
def test_a_round_goes_on_without_a_site_that_is_lost_in_it(four: Founded, tmp_path: Path, privacy: str) -> None:
    """Killed as it masks its update, and away: the others' sum counts, and the job waits only for the evaluation.

    With noise the lost round is charged to it too, once: it had begun. To the others also once, whatever the attempts.
    """
    study, lost = Study.of(four, tmp_path), four.sites["d"]
    study.coordinator.options = ("--patience", "4")
    lost.end()
    lost.start(f"before:{HELD}._masked 2")
    before = {name: four.charged(name) for name in four.sites}

    def stays_away() -> None:
        if lost.running is not None and lost.running.exitcode is not None:
            lost.end()

    study.meanwhile = stays_away
    with study.serving():
        job = study.submit(job_text(rounds=2, privacy=privacy, deadline=8))
        study.reaches(job, 2)
        outcomes = {share.site: share.outcome for share in study.steps(job)[1].shares}
        study.meanwhile = lambda: None
        lost.start()
        record, steps = study.over(job)
    assert lost.running is not None
    assert {name for name, outcome in outcomes.items() if outcome is Outcome.COUNTED} == set(SITES)
    assert (record.state, len(steps)) == (JobState.FINISHED, 5), record.reason
    assert all(share.outcome is Outcome.COUNTED for step in (steps[0], *steps[2:]) for share in step.shares)
    charged = {name: four.charged(name, since=before[name]) for name in four.sites}
    assert charged == dict.fromkeys(four.sites, 2 if privacy == NOISY else 0)


def test_a_stop_that_was_stored_outlives_the_coordinator(in_file: Study) -> None:
    """The operator hears no answer, asks again, and learns that it is done; sites forget the job."""
    with in_file.serving(f"after:{STORE}.set_job_state 2"):
        job = in_file.submit(job_text(rounds=1000))
        in_file.reaches(job, 3)
        with contextlib.suppress(RemoteProtocolError):  # it is over already
            in_file.asks(StopJob(job))
        record, steps = in_file.over(job)
        in_file.until(lambda: in_file.coordinator.deaths == 1, "a death")
        in_file.nothing_left(job)
    assert (record.state, record.reason) == (JobState.STOPPED, "stopped by admin")
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))


# ------------------------------------------------------------------------------------------------------------- a site

AGENT, JOURNAL = "client.agent:Agent", "client.journal:Journal"
VAULT, HELD, SAID = "client.vault:Vault", "client.masking:Contributions", "client.session:Session"

ALONE = (
    f"before:{AGENT}._check 1",
    f"after:{AGENT}._check 1",  # the job is accepted, and nobody has heard of it
    f"before:{AGENT}._fetch 2",  # it was accepted, and a step begun
    f"before:{BLOBS}:Incoming.append 2",  # half a model is there
    f"after:{AGENT}._fetch 2",
    f"after:{BLOBS}:BlobStore.adopt 3",  # some of the payloads are
    f"after:{AGENT}._train 2",  # a result of which nobody knows
    f"before:{JOURNAL}.keep 2",
    "after:federation.files:draft_of 2",  # no note of it yet
    f"after:{JOURNAL}.keep 2",
    f"before:{AGENT}._upload 4",
    f"after:{AGENT}._upload 4",
    "before:federation.codec:encode_from_site?Contribution 2",
    "after:federation.codec:encode_from_site?Contribution 2",
    "before:client.session:Session._ended 2",  # it was counted, and the site does not know
    f"before:{JOURNAL}.forget 1",
    f"after:{JOURNAL}.forget 1",
)
_ENCODE = "privacy.secure_aggregation.rostersum.messages:encode"
MASKED = (  # under secure aggregation, one state of its machine and one durable point after the other
    f"after:{AGENT}._check 1",
    f"before:{VAULT}.persist 1",  # F1: the job is accepted
    f"after:{VAULT}.persist 1",
    f"before:{VAULT}.persist 2",  # F2: epoch and generation of keys
    f"after:{VAULT}.persist 2",
    f"before:{_ENCODE}?Keys 1",
    f"before:{AGENT}._contribute 2",  # working
    f"after:{HELD}.prepare 2",
    f"before:{_ENCODE}?Ready 3",
    f"after:{_ENCODE}?Ready 4",  # ready
    f"before:{VAULT}.persist 6",  # F3: the attempt, before any mask
    f"after:{VAULT}.persist 6",
    f"before:{HELD}.mask 2",  # masking
    f"before:{HELD}._masked 2",
    f"after:{HELD}.mask 2",
    f"before:{_ENCODE}?Upload 3",
    f"after:{_ENCODE}?Upload 4",  # uploaded, while some or all of the vector is missing
    "before:client.connection:Connection.upload 2",
    "after:client.connection:Connection.upload 2",
    f"before:{_ENCODE}?Full 2",  # FULL has come
    f"before:{VAULT}.persist 7",  # F4: what it opens, before that leaves
    f"after:{VAULT}.persist 7",
    f"before:{HELD}.erase 2",
    f"after:{HELD}.abandon 2",
    f"after:{_ENCODE}?Open 6",  # opened
    "before:federation.audit:AuditLog.extend 18",
    "after:federation.audit:AuditLog.extend 18",
    f"before:{VAULT}.persist 8",  # RESULT has come
    f"after:{VAULT}.persist 8",
    f"before:{SAID}._ended 2",
    f"before:{SAID}._closed 1",
    f"after:{SAID}._closed 1",  # CLOSE has come, and is not durable
    f"before:{JOURNAL}.forget 1",  # F5: closed
)


@pytest.mark.parametrize(
    ("privacy", "point"), [*((PLAIN, point) for point in ALONE), *((SEALED, point) for point in MASKED)], ids=named
)
def test_a_site_killed_at_any_point_loses_and_doubles_nothing(
    founded: Founded, in_file: Study, undisturbed: Undisturbed, privacy: str, point: str
) -> None:
    """Started again it takes its place, and the job ends with the very same models; nothing is left over anywhere."""
    expected = undisturbed(privacy)
    site = founded.sites["b"]
    site.end()
    before = site.deaths
    site.start(point)
    with in_file.serving():
        job = in_file.submit(job_text(privacy=privacy))
        in_file.exactly_once(job, expected)
        in_file.until(lambda: site.deaths == before + 1, f"a death at {point}")
        in_file.nothing_left(job)


@pytest.mark.parametrize("point", ["before:parley.homes.member:MemberHome.install 1", "after:federation.files:write 5"])
def test_a_newcomer_killed_while_it_joins_is_the_same_member_afterwards(
    founded: Founded, in_file: Study, tmp_path: Path, point: str
) -> None:
    """It runs the same command again, with the same invitation, and needs no second approval."""
    name = f"late-{point.partition(':')[0]}"
    invitation = founded.consortium.invite(name, name, Role.SITE, now=_now())
    command = ("site", "join", invitation.text, "--home", str(tmp_path / name))
    newcomer = Process(command, tmp_path / "newcomer.log")
    with in_file.serving():
        newcomer.start(point)
        request = _request(in_file, name)
        member = founded.consortium.approve(request, now=_now())
        in_file.asks(ApproveEnrolment(request.invitation, member.certificate, member.statement))
        for expected in (-signal.SIGKILL, 0):
            newcomer.ends(expected)
            if expected:
                newcomer.start()
    assert Home(tmp_path / name).site.load().statement == member.statement


# ---------------------------------------------------------------------------------------------- members come and go


def _now() -> int:
    return int(time.time())


def _request(study: Study, name: str) -> EnrolmentRequest:
    """A newcomer's request, once the coordinator has it."""
    found: list[EnrolmentRequest] = []

    def asks() -> bool:
        reply = study.asks(ListPending())
        assert isinstance(reply, Pending)
        found[:] = [each for each in reply.requests if each.name == name]
        return bool(found)

    study.until(asks, f"{name} to ask")
    return found[0]


@pytest.mark.parametrize(
    "point",
    [f"{when}:{STORE}.{change} 1" for change in ("add_enrolment", "approve_enrolment") for when in ("before", "after")],
    ids=named,
)
def test_an_enrolment_outlives_the_coordinator(
    founded: Founded, study: Study, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newcomer waits on, the administrator repeats what had no answer, and there is one member more."""
    monkeypatch.setattr(Backoff, "seconds", lambda _: 0.05)
    name = f"new-{next(NUMBERS)}"
    invitation = founded.consortium.invite(name, name, Role.SITE, now=_now())
    asked = identity.make_request(invitation, Home(tmp_path / name).site.begin(), "0.1.0")
    credentials: list[Credential] = []
    joining = threading.Thread(target=lambda: credentials.append(asyncio.run(approved(door(invitation), asked))))
    with study.serving(point):
        joining.start()
        assert _request(study, name) == asked
        earlier = {each.name for each in study.store.members()}  # a server's database is shared with other tests
        member = founded.consortium.approve(asked, now=_now())
        study.asks(ApproveEnrolment(asked.invitation, member.certificate, member.statement))
        study.until(lambda: bool(credentials), "a credential")
        joining.join()
        assert study.coordinator.deaths == 1
    assert credentials[0].statement == member.statement
    assert sorted(each.name for each in study.store.members()) == sorted({*SITES, *earlier, name})
    assert name not in earlier
    assert study.store.pending() == ()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_revocation_outlives_the_coordinator(founded: Founded, study: Study, when: str) -> None:
    """The administrator publishes again what had no answer; whom it revokes is refused, and the others attend."""
    name = f"gone-{next(NUMBERS)}"
    keys = identity.MemberKeys.generate()
    invitation = founded.consortium.invite(name, name, Role.OPERATOR, now=_now())
    member = founded.consortium.approve(identity.make_request(invitation, keys, "0.1.0"), now=_now())
    visitor = dataclasses.replace(
        line(founded.hub.operator),
        certificate=member.certificate,
        tls_key=keys.tls_pem,
        statement=codec.encode(member.statement),
    )

    async def visits() -> object:
        async with Connection.opened(visitor) as connection:
            return await connection.operate(ListSites())

    with study.serving(f"{when}:{STORE}.put_revocations 1"):
        study.asks(ListSites())
        asyncio.run(visits())
        revocations = founded.consortium.revoke(name, now=_now())
        founded.hub.coordinator.update_revocations(revocations)  # later coordinators begin with it: sites know it now
        study.asks(PublishRevocations(revocations))
        with pytest.raises(IdentityError, match=f"the membership of {name} was revoked"):
            asyncio.run(visits())
        assert study.coordinator.deaths == 1
        study.until(lambda: _attending(study) == set(SITES), "all sites to attend")
    assert study.store.revocations() == revocations


def _attending(study: Study) -> set[str]:
    reply = study.asks(ListSites())
    assert isinstance(reply, Sites)
    return {site.name for site in reply.sites if site.connected}


# ------------------------------------------------------------------------------------- disk, lock, memory and clock


class Room(Protocol):
    """A disk of a coordinator's that can be filled."""

    def fill(self, coordinator: Process) -> None:
        """From now on it takes nothing more."""

    def free(self, coordinator: Process) -> None:
        """It takes more again."""


class SmallDisk:
    """A file system of its own."""

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def fill(self, coordinator: Process) -> None:  # noqa: ARG002 - the other one's
        """Writes to it until it is full."""
        with contextlib.suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self, coordinator: Process) -> None:  # noqa: ARG002 - the other one's
        """Removes what was written."""
        self._ballast.unlink()


class Limit:
    """Where no file system may be made: a limit on the length of the files that the coordinator writes."""

    def fill(self, coordinator: Process) -> None:
        """Lets them grow by no more than what it logs."""
        resource.prlimit(coordinator.pid, resource.RLIMIT_FSIZE, (14_000, resource.RLIM_INFINITY))

    def free(self, coordinator: Process) -> None:
        """Lets them grow."""
        resource.prlimit(coordinator.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture(params=["small disk", "limit"])
def room(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Room]:
    """The disk of the coordinator of `in_file`, which is made after it."""
    if request.param == "limit":
        yield Limit()
        return
    folder = tmp_path / "study" / "coordinator"
    folder.mkdir(parents=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def told(study: Study, job: str, *causes: str) -> None:
    """Returns once the coordinator's log and `parley job show` both tell one of the causes."""

    def tells() -> bool:
        return any(cause in study.coordinator.said() and cause in study.view(job).reason for cause in causes)

    study.until(tells, f"{causes} in the log and in the view, which is {study.view(job).reason!r}", every=0.2)


def test_a_full_disk_is_told_and_the_job_goes_on_when_it_has_room(
    room: Room, in_file: Study, undisturbed_long: tuple[object, ...]
) -> None:
    """Whatever it is that finds no room first: an update on its way, a model, or the store."""
    with in_file.serving():
        job = in_file.submit(job_text(rounds=MANY))
        in_file.reaches(job, 4)
        room.fill(in_file.coordinator)
        told(in_file, job, "No space left on device", "File too large", "has no room on its disk", "by its disk")
        reached = len(in_file.steps(job))
        room.free(in_file.coordinator)
        in_file.exactly_once(job, undisturbed_long)
        assert in_file.coordinator.deaths == 0
        assert in_file.view(job).reason == f"all {MANY} rounds done"
    assert reached < len(undisturbed_long)


def test_a_folder_that_may_not_be_written_is_told_and_the_job_goes_on_when_it_may(
    in_file: Study, undisturbed_long: tuple[object, ...]
) -> None:
    """Nothing was lost meanwhile: updates wait where they are."""
    in_file.coordinator.options = ("--obedient",)
    with in_file.serving():
        job = in_file.submit(job_text(rounds=MANY))
        in_file.reaches(job, 4)
        folders = [in_file.payloads / "spool" / job, in_file.payloads / "jobs" / job]
        for folder in folders:
            folder.chmod(0o500)
        told(in_file, job, "Permission denied")
        for folder in folders:
            folder.chmod(0o700)
        in_file.exactly_once(job, undisturbed_long)
        assert in_file.coordinator.deaths == 0


def test_a_store_locked_by_another_program_is_told_and_the_job_goes_on_when_it_is_not(
    study: Study, undisturbed_long: tuple[object, ...]
) -> None:
    """Its commits wait; after a kill while it waits, too."""
    with study.serving():
        job = study.submit(job_text(rounds=MANY))
        study.reaches(job, 4)
        with locked(study.url):
            told(study, job, "is locked by another program")
            reached = len(study.steps(job))
            study.coordinator.kill()
        study.exactly_once(job, undisturbed_long)
        assert study.coordinator.deaths == 1
    assert reached < len(undisturbed_long)


@contextlib.contextmanager
def locked(url: str) -> Iterator[None]:
    """Another program holds the store's write lock."""
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(file_of(make_url(url)), isolation_level=None, timeout=30)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
        return
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE job IN EXCLUSIVE MODE")
        yield


@pytest.mark.parametrize("where", ["coordinator", "site"])
def test_a_clock_that_is_set_back_changes_nothing(
    founded: Founded, in_file: Study, undisturbed: Undisturbed, where: str
) -> None:
    """By an hour, in the middle of a step."""
    expected = undisturbed()
    back, site = "--set-back 3600", founded.sites["b"]
    if where == "site":
        site.end()
        site.start(f"before:{AGENT}._train 2 {back}")
    with in_file.serving(*([f"before:{CONDUCT}.heard?Contribution 5 {back}"] if where == "coordinator" else [])):
        in_file.exactly_once(in_file.submit(), expected)
        assert in_file.coordinator.deaths == 0
    if where == "coordinator":
        _, steps = in_file.over(in_file.jobs()[0].id)
        assert steps[2].started < steps[1].started, "the clock was not set back"
    site.end()
    site.start()


@pytest.mark.slow
def test_a_trainer_that_ran_out_of_memory_is_told_and_the_quorum_goes_on(
    founded: Founded, in_file: Study, tmp_path: Path
) -> None:
    """The real trainer: the system kills it in the first round; in the second the site takes part again."""
    site, data = founded.sites["c"], tmp_path / "heart.csv"
    draw = random.Random(0)  # noqa: S311 - made-up patients
    rows = [f"{draw.uniform(20, 90):.0f},{draw.randrange(2)}" for _ in range(200)]
    data.write_text("\n".join(["age,disease", *rows]))
    DataSets(founded.home("c").site.folder).add(DataSet.of("heart", str(data)))
    layout = Layout((TensorSpec("weight", (1, 1)), TensorSpec("bias", (1,))))
    site.end()
    site.options, light = (), site.options
    site.start()
    try:
        with in_file.serving():
            job = in_file.submit(job_text(rounds=2, quorum=2, epochs=150), layout)
            in_file.until(lambda: doing(in_file, job, "c").state == "training", "c to train", every=0.2)
            (trainer,) = psutil.Process(site.pid).children()
            trainer.kill()
            cause = "it ran out of memory or disk"
            in_file.until(lambda: doing(in_file, job, "c").trouble == cause, "the cause in the view", every=0.2)
            steps = in_file.exactly_once(job)
        trained = {step.round: [each.outcome for each in step.shares] for step in steps if step.kind is StepKind.TRAIN}
        good, declined = Outcome.COUNTED, Outcome.DECLINED
        assert trained == {1: [good, good, declined], 2: [good, good, good]}
        assert "the trainer was killed, most likely because this machine ran out of memory" in site.said()
    finally:
        site.end()
        site.options = light
        site.start()


def doing(study: Study, job: str, site: str) -> SiteView:
    """A site as `parley job show` shows it."""
    return next(each for each in study.view(job).sites if each.name == site)
