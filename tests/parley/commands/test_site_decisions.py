"""`parley site recell`, `answer`, `restore` and `witness`: what follows is said first, and stands in the log after."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from client import decisions
from client.decisions import Grant, Wanted
from client.policy import EXAMPLE
from federation import audit
from federation.errors import ConfigurationError, ParleyError, StorageError
from federation.messages import Credential
from parley.commands.site import only_agent, sealing
from parley.homes import Connection, Home, Identity
from privacy.secure_aggregation.rostersum.durable import Durable, Family, Job, Point
from privacy.secure_aggregation.rostersum.logged import Logged, message_entry, terms_entry
from privacy.secure_aggregation.rostersum.messages import RoundStart, Upload, sign
from privacy.secure_aggregation.rostersum.site_events import Persist
from privacy.secure_aggregation.rostersum.terms import Member, Terms
from tests.consortium import Consortium
from tests.parley.commands.calls import refused, run
from tests.privacy.secure_aggregation.rostersum.conftest import STAT, consortium_of

H, T = b"\x11" * 32, b"\x22" * 32
STUDY = consortium_of(3, (STAT,))
NEW = Wanted(Grant.CELL, "heart", H, "org1/s1 org2/s2 zoo/z")
PLAN = Wanted(Grant.PLAN, "heart", T, "of job risk-1: rows")


@dataclass(frozen=True)
class Place:
    """A site that has joined, and was in a job with two others."""

    home: Path
    own: Identity

    @property
    def folder(self) -> Path:
        """Its folder."""
        return Home(self.home).site.folder

    @property
    def terms(self) -> Terms:
        """Of the job: this site is the first."""
        mine = Member("a-clinic", "a", self.own.keys.protocol_key)
        roster = replace(STUDY.terms.roster, members=(mine, *STUDY.terms.roster.members[1:]))
        return replace(STUDY.terms, roster=roster)

    def write(self, *entries: tuple[str, bytes], durable: Durable | None = None) -> None:
        """Its agent writes into its log, and keeps a state."""
        with sealing(self.folder, self.own) as held:
            if entries:
                held.audit.extend(entries, 1_764_529_770.0)
            if durable is not None:
                held.vault.persist(Persist(Point.NOTE, durable))

    def families(self) -> Sequence[Family]:
        """What its vault knows."""
        with sealing(self.folder, self.own) as held:
            return held.vault.durable.families

    def last(self) -> tuple[str, str]:
        """The last entry of its log."""
        *_, entry = audit.entries(self.folder / audit.FILE)
        return entry.kind, entry.content.decode()


@pytest.fixture
def place(tmp_path: Path, consortium: Consortium) -> Place:
    """Such a site."""
    member = Home(tmp_path / "home").site
    person = consortium.member("a", keys=member.begin())
    credential = Credential(person.certificate, person.statement, consortium.hub.statement, consortium.nobody)
    where = Connection("127.0.0.1:9000", consortium.root.consortium, "hub")
    own = member.install(credential, consortium.root.public, where, name="a", now=consortium.now)
    (member.folder / "policy.toml").write_text(EXAMPLE)
    return Place(tmp_path / "home", own)


# -------------------------------------------------------------------------------------------------------------- recell


def test_another_cell_is_granted_once_it_was_said_whom_it_exposes(place: Place) -> None:
    """By name: who left and who came. Refused at the question, nothing is changed; asked again, it is said so."""
    pin = place.terms.cell_hash(0)
    job = Job(place.terms.job_hash, 0, place.terms.encode(), "heart", T)
    place.write(terms_entry(place.terms), NEW.asked, durable=Durable((job,), (), (Family("heart", pin, T),)))
    command = ("site", "recell", "heart", "--cell", H.hex(), "--home", place.home)
    error = refused(*command, typed="n\n")
    assert isinstance(error, ParleyError)
    assert error.problem == "nothing was changed: it was not confirmed"
    assert place.families() == (Family("heart", pin, T),)
    assert place.last() == (decisions.ASKED, NEW.asked[1].decode())

    done = run(*command, typed="y\n")
    assert "Exact sums of 'heart' would be over the cell org1/s1, org2/s2, zoo/z." in done.stderr
    assert "Until now they were over the cell a-clinic/a, org1/s1, org2/s2." in done.stderr
    assert "can subtract those of the old from those of the new" in done.stderr
    assert "Exposed, by the difference of two sums: a-clinic/a left; zoo/z came." in done.stderr
    assert "1 open job on it over another cell can make no exact sum any more." in done.stderr
    assert "Granted, and in the audit log." in done.stdout
    assert place.families() == (Family("heart", H, T),)
    assert place.last() == ("cell", f"heart {H.hex()} org1/s1 org2/s2 zoo/z")
    assert run(*command).stdout == "That is granted already; nothing was changed.\n"


def test_a_cell_that_the_log_does_not_name_is_said_to_be_unknown(place: Place) -> None:
    """And one that follows none exposes nobody."""
    command = ("site", "recell", "heart", "--cell", H.hex(), "--yes", "--home", place.home)
    place.write(NEW.asked, durable=Durable(families=(Family("heart", T),)))
    assert "the audit log does not say" in run(*command).stderr
    place.write(replace(NEW, family="lungs").asked)
    done = run("site", "recell", "lungs", "--cell", H.hex(), "--yes", "--home", place.home)
    assert "They were over no cell yet: nobody is exposed." in done.stderr


def test_what_nobody_asked_for_is_not_granted(place: Place) -> None:
    """The refusal of a job names it; a mistyped digest would pin the data to a cell that nobody has."""
    place.write(NEW.asked)
    for command in (("recell", "heart", "--cell", T.hex()), ("answer", "heart", "--plan", H.hex())):
        error = refused("site", *command, "--yes", "--home", place.home)
        assert isinstance(error, ConfigurationError)
        assert "parley audit show --kind asked" in error.fix
    assert place.families() == ()


def test_a_statistic_more_is_granted(place: Place) -> None:
    """With what it costs."""
    place.write(PLAN.asked, durable=Durable(families=(Family("heart", H, T, (H,)),)))
    done = run("site", "answer", "heart", "--plan", T.hex(), "--home", place.home, typed="y\n")
    told = "'heart' has answered 1 exact statistics, and would answer one more, of job risk-1: rows."
    assert told in done.stderr
    assert "Noise (churn dp) bounds that" in done.stderr
    assert place.families() == (Family("heart", H, T, (H, T)),)
    assert place.last() == ("plan", f"heart {T.hex()} of job risk-1: rows")


@pytest.mark.parametrize(
    "command",
    [
        ("recell", "heart", "--cell", H.hex()),
        ("answer", "heart", "--plan", T.hex()),
        ("restore", "--yes"),
        ("witness", "disk"),
    ],
    ids=lambda command: command[0],
)
def test_nothing_is_decided_beside_a_running_agent(place: Place, command: tuple[str, ...]) -> None:
    """It would not know of it."""
    place.write(NEW.asked, PLAN.asked)
    with only_agent(place.folder):
        error = refused("site", *command, "--home", place.home)
    assert isinstance(error, StorageError)
    assert "another agent of this site runs already" in error.problem
    assert "end it, do this, and start it again" in error.fix


# ------------------------------------------------------------------------------------------------------------- restore


def answered(place: Place) -> None:
    """It accepts a job, and a sum of statistics is made; then its vault is put back as it was before that."""
    terms = place.terms
    start = sign(RoundStart(terms.job_hash, 1, 1, 0, 2, (0, 1, 2), H, H, H), STUDY.coordinator)
    upload = sign(Upload(start.ctx, 0, H, H, ()), place.own.keys.protocol)
    place.write(durable=Durable(families=(Family("lungs", T),)))
    shutil.copy(place.folder / "vault.db", place.home / "backup.db")
    job = Job(terms.job_hash, 0, terms.encode(), "heart", T)
    place.write(
        terms_entry(terms),
        decisions.reads(job),
        message_entry(Logged.RECEIVED, start, None),
        message_entry(Logged.SENT, upload, None),
        durable=Durable((job,), (), (Family("lungs", T), Family("heart", terms.cell_hash(0), T, (STAT.digest,)))),
    )
    shutil.copy(place.home / "backup.db", place.folder / "vault.db")


def test_a_vault_put_back_has_what_the_log_knows_before_it_serves(place: Place) -> None:
    """It is refused, with the command; then pin, table and statistics are back, and the job is never taken up again."""
    answered(place)
    with pytest.raises(StorageError, match="run `parley site restore`"):
        place.families()
    log = place.folder / audit.FILE
    head = audit.verify(log).head.hex()
    error = refused("site", "restore", "--home", place.home, typed="n\n")
    assert "it was not confirmed" in error.problem
    with pytest.raises(StorageError, match="may be an older copy"):
        place.families()
    done = run("site", "restore", "--head", head, "--home", place.home, typed="y\n")
    assert "The audit log's last line is 5, of 2025-11-30 19:09:30 UTC; what came later is lost." in done.stderr
    assert f"data family heart: cell {place.terms.cell_hash(0).hex()[:16]}, 1 exact statistics" in done.stderr
    assert "1 jobs that the vault does not know to be closed" in done.stderr
    assert "data family lungs" not in done.stderr
    assert "Its witness takes this vault for the newest" not in done.stderr
    assert "Next:  parley site run" in done.stdout
    with sealing(place.folder, place.own) as held:
        durable = held.vault.durable
    assert durable.families == (Family("lungs", T), Family("heart", place.terms.cell_hash(0), T, (STAT.digest,)))
    assert durable.jobs == ()
    assert durable.knows(place.terms.job_hash)
    assert place.last() == ("restored", f"0 charges and 1 jobs, from line 5 {head}")


def test_a_whole_disk_put_back_is_restored_all_the_same(place: Place) -> None:
    """Its witness came back with it and notices nothing; the newest log does."""
    place.write(durable=Durable(families=(Family("lungs", T),)))
    shutil.copytree(place.folder, place.home / "disk")
    answered(place)
    for name in ("vault.db", "vault.count"):
        shutil.copy(place.home / "disk" / name, place.folder)
    assert place.families() == (Family("lungs", T),)
    done = run("site", "restore", "--yes", "--home", place.home)
    assert "Its witness takes this vault for the newest." in done.stderr
    assert [family.name for family in place.families()] == ["lungs", "heart"]


def test_a_log_that_is_not_the_newest_or_not_whole_restores_nothing(place: Place) -> None:
    """A head noted elsewhere tells; so does the chain."""
    answered(place)
    log = place.folder / audit.FILE
    error = refused("site", "restore", "--yes", "--head", H.hex(), "--home", place.home)
    assert "does not hold the head noted elsewhere" in error.problem
    assert "enrol the site anew" in error.fix
    assert "is no digest" in refused("site", "restore", "--yes", "--head", "12", "--home", place.home).problem
    content = log.read_bytes()
    log.write_bytes(content.replace(b'"kind":"sent"', b'"kind":"sunk"'))
    assert "line 5 is broken" in refused("site", "restore", "--yes", "--home", place.home).problem
    log.unlink()
    assert "there is no audit log" in refused("site", "restore", "--yes", "--home", place.home).problem
    with pytest.raises(StorageError, match="may be an older copy"):
        place.families()


# ------------------------------------------------------------------------------------------------------------- witness


def test_the_vaults_changes_are_counted_elsewhere(place: Place, tmp_path: Path) -> None:
    """In a folder of the site's own, which it says; the folder that was named keeps its rights."""
    disk = tmp_path / "disk"
    disk.mkdir()
    rights = disk.stat().st_mode
    assert run("site", "witness", "--home", place.home).stdout.strip() == str(place.folder / "vault.count")
    done = run("site", "witness", disk, "--home", place.home)
    where = disk / "parley-heart-study-a" / "vault.count"
    assert f"The vault's changes are counted in {where}." in done.stdout
    assert "It is on the disk of the vault itself" in done.stderr
    assert where.exists()
    assert disk.stat().st_mode == rights
    assert run("site", "witness", "--home", place.home).stdout.strip() == str(where)
    answered(place)
    with pytest.raises(StorageError, match="where its witness has counted 2"):
        place.families()
    assert "may be an older copy" in refused("site", "witness", tmp_path / "other", "--home", place.home).problem
