"""What a job may not have without the administrator: the refusal names the command, the log what it would grant."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from client import decisions
from client.decisions import Grant, Wanted
from client.policy import SecureAggregation
from client.session_events import UploadMasked
from client.summing import Sealing
from client.vault import Vault
from federation.audit import AuditLog, Entry, LogName, entries
from federation.errors import ConfigurationError
from federation.messages import StepKind
from privacy.secure_aggregation.rostersum.durable import Durable, Family
from privacy.secure_aggregation.rostersum.floor import EXACT_PLANS
from privacy.secure_aggregation.rostersum.messages import Code, Refuse
from privacy.secure_aggregation.rostersum.rules import Broken, Rule
from privacy.secure_aggregation.rostersum.site_events import Clock
from tests.client.test_sealed_session import NOW, RULES, Agent, Consortium, World
from tests.privacy.secure_aggregation.rostersum.conftest import consortium_of, floor_for

H, OTHER = b"\x11" * 32, b"\x22" * 32
FULL = tuple(bytes([number]) * 32 for number in range(EXACT_PLANS))
CELL = Wanted(Grant.CELL, "heart", H, "athens/athens berlin/berlin")
PLAN = Wanted(Grant.PLAN, "heart", H, "of job risk-1: rows, column 1: sum")


@pytest.fixture(scope="module")
def consortium() -> Consortium:
    """Three hospitals and a coordinator."""
    return Consortium.found()


@pytest.fixture
def world(consortium: Consortium, tmp_path: Path) -> World:
    """All of them, before anybody attends."""
    return World(consortium, tmp_path)


def remembering(world: World, family: Family) -> Agent:
    """A site that has answered before, as its disk says, once the job was offered to it."""
    agent = world.sites["athens"]
    agent.disk = Durable(families=(family,)).encode()
    agent.start()
    world.attend()
    return agent


def asked(agent: Agent) -> list[str]:
    """What its log says that it was asked for."""
    return [content.decode() for kind, content in agent.audit if kind == decisions.ASKED]


# --------------------------------------------------------------------------------------------------------------- asked


def test_another_cell_is_refused_with_the_command_that_grants_it(world: World) -> None:
    """To the administrator and to the coordinator; the log says whose cell it is, once."""
    agent = remembering(world, Family("heart", pin=OTHER))
    (finding,) = world.refused["athens"].findings
    cell = world.terms.cell_hash(0)
    command = f"parley site recell heart --cell {cell.hex()}"
    assert "exact sums of 'heart' were over another cell" in finding.problem
    assert finding.fix == (
        f"keep the old cell, or use churn dp; or this site's administrator, once no agent runs here:  {command}"
    )
    assert command in agent.trouble()
    assert asked(agent) == [f"cell heart {cell.hex()} athens/athens berlin/berlin cork/cork"]
    agent.cut()
    agent.attend()
    world.settle()
    assert len(asked(agent)) == 1


def test_a_statistic_too_many_is_refused_with_the_command_that_grants_it(world: World) -> None:
    """The log says which it is."""
    agent = remembering(world, Family("heart", plans=FULL))
    (finding,) = world.refused["athens"].findings
    plan = world.terms.plan(1)
    assert plan is not None
    assert "'heart' has answered 8 exact statistics of at most 8" in finding.problem
    assert finding.fix.endswith(f"parley site answer heart --plan {plan.digest.hex()}")
    (told,) = asked(agent)
    assert told.startswith(f"plan heart {plan.digest.hex()} of job risk-1: ")
    assert told.count(",") == len(plan.codec.fields) - 1  # type: ignore[union-attr] # statistics have fields


def test_another_version_of_a_table_is_refused_with_the_command_that_accepts_it(world: World) -> None:
    """By the data set's name, which the administrator knows it by."""
    agent = remembering(world, Family("heart", table=OTHER))
    (finding,) = world.refused["athens"].findings
    assert "exact sums of 'heart' were over another version of its table" in finding.problem
    assert "put the table back as it was; or" in finding.fix
    assert finding.fix.endswith("parley site dataset accept heart --rows-changed N")
    assert asked(agent) == []


def test_what_another_job_has_used_up_is_told_when_a_round_is_refused(world: World) -> None:
    """The job was accepted; then another one pinned the data to its cell. REFUSE says E_PIN, and a note what to do."""
    agent = world.attend().sites["athens"]
    sealed = agent.session._sealed
    assert sealed is not None
    premises = sealed._site._premises
    premises.durable = premises.durable.with_family(Family("heart", pin=OTHER))
    for other in ("berlin", "cork"):
        world.sites[other].aside.add(UploadMasked)  # of attempts that are given up
    world.round(1, StepKind.TRAIN)
    refusals = [each.code for each in agent.said(Refuse) if isinstance(each, Refuse)]
    assert Code.E_PIN in refusals
    command = f"parley site recell heart --cell {world.terms.cell_hash(0).hex()}"
    assert "exact sums of 'heart' were over another cell: subtracting them would expose" in agent.trouble()
    assert command in agent.trouble()
    assert len(asked(agent)) == 1


def test_a_refusal_that_nobody_can_grant_away_is_told_as_it_was(world: World) -> None:
    """The fix of any other rule stays."""
    broken = Broken(Rule.FLOOR_ROWS, "too few", "ask")
    terms = world.terms
    assert decisions.wanted("risk-1", terms, 0, Family("heart"), (broken,)) == ()
    assert decisions.advised((broken,), (), "heart") == (broken,)
    agent = world.sites["athens"]
    agent.rules = RULES.model_copy(update={"secure_aggregation": SecureAggregation(rows_minimum=99)})
    world.attend()
    assert "parley site" not in str(world.refused["athens"].findings)


def test_an_accepted_job_leaves_word_of_what_it_reads(world: World) -> None:
    """Neither terms nor messages say it, and a restored site must know."""
    agent = world.attend().sites["athens"]
    (job,) = Durable.decode(agent.disk).jobs
    assert decisions.reads(job) in agent.audit
    assert decisions.reads(job)[1].decode() == f"{job.job_hash.hex()} heart {job.table.hex()}"


# ------------------------------------------------------------------------------------------------------------- granted


@pytest.fixture
def sealing(tmp_path: Path) -> Iterator[Sealing]:
    """A site's vault and log, open."""
    study = consortium_of(3)
    with (
        Vault(tmp_path / "vault.db", tmp_path / "vault.count") as vault,
        AuditLog(tmp_path / "audit.log", LogName("athens", "site"), NOW) as log,
    ):
        yield Sealing(study.sites[0], vault, log)


@pytest.mark.parametrize(
    ("wanted", "family"),
    [(CELL, Family("heart", H, OTHER, FULL)), (PLAN, Family("heart", OTHER, OTHER, (*FULL, H)))],
    ids=["cell", "plan"],
)
def test_what_is_granted_is_durable_and_in_the_log(
    sealing: Sealing, tmp_path: Path, wanted: Wanted, family: Family
) -> None:
    """And nothing else changes; granted again it is the same."""
    before = replace(family, pin=OTHER, plans=FULL)
    sealing.vault.reenter(Durable(families=(before,)), ())
    floor = floor_for(consortium_of(3).terms)
    for _ in range(2):
        decisions.grant(sealing, floor, wanted, Clock(NOW, 0.0))
        assert sealing.vault.durable.families == (family,)
    *_, last = entries(tmp_path / "audit.log")
    assert (last.kind, last.content) == wanted.granted
    assert last.content.decode() == f"heart {H.hex()} {wanted.what}"


def test_what_was_asked_is_found_by_its_digest() -> None:
    """Of this family, and of this kind; digits may be large."""
    log = [Entry(1, H, 1.0, *each, H) for each in (CELL.asked, PLAN.asked, ("blob", b"\xff"), CELL.granted)]
    assert decisions.find(log, Grant.CELL, "heart", f" {H.hex().upper()}\n") == CELL
    assert decisions.find(log, Grant.PLAN, "heart", H.hex()) == PLAN
    for one, family, digest in (
        (Grant.CELL, "lungs", H.hex()),
        (Grant.PLAN, "heart", OTHER.hex()),
        (Grant.CELL, "heart", H.hex()[:8]),
        (Grant.CELL, "heart", ""),
    ):
        with pytest.raises(ConfigurationError, match=r"no job that was refused here asked .*audit show --kind asked"):
            decisions.find(log, one, family, digest)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (("a/a", "b/b", "c/c"), ("a/a", "b/b"), "c/c left. It is one site: its own"),
        (("a/a", "b/b"), ("a/a", "b/b", "c/c"), "c/c came. It is one site: its own"),
        (("a/a", "b/b"), ("a/a", "c/c"), "b/b left; c/c came."),
        (("a/a", "b/b"), ("c/c", "d/d"), "a/a, b/b left; c/c, d/d came."),
        (("a/a", "b/b"), ("b/b", "a/a"), "nobody is exposed"),
        (None, ("a/a",), "the audit log does not say: whoever left it, or came since, is exposed"),
    ],
)
def test_it_is_said_who_is_exposed(old: tuple[str, ...] | None, new: tuple[str, ...], told: str) -> None:
    """By name, and more plainly where it is a single site."""
    said = decisions.exposure(old, new)
    assert told in said
    assert ("It is one site" in said) is ("one site" in told)


def test_the_cells_of_earlier_jobs_are_named_by_the_log(world: World) -> None:
    """Those of this site."""
    agent = world.attend().sites["berlin"]
    log = [Entry(line, H, 1.0, *each, H) for line, each in enumerate(agent.audit, 1)]
    names = ("athens/athens", "berlin/berlin", "cork/cork")
    assert decisions.cells_of(log, agent.member.statement.protocol_key) == {world.terms.cell_hash(1): names}
    assert decisions.cells_of(log, H) == {}
