"""Jobs with noise at a site: what it must have before it joins, and a whole round of one through its session."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from client import sealed
from client.policy import SecureAggregation
from client.sealed import SealedJobs
from federation.errors import LocalProtocolError, WhoActs
from federation.messages import DeclineCause, JobAccepted, StepKind
from privacy.secure_aggregation.rostersum import noised
from privacy.secure_aggregation.rostersum import site_events as sums
from privacy.secure_aggregation.rostersum.durable import Charge, Durable
from privacy.secure_aggregation.rostersum.messages import Decline
from privacy.secure_aggregation.rostersum.noise import mechanism_of, round_noise
from privacy.secure_aggregation.rostersum.rules import Broken, Rule
from privacy.secure_aggregation.rostersum.terms import Terms
from tests.client.test_sealed_session import RULES, TEXT, Agent, Consortium, World

NOISY = f"""{TEXT}
churn = "dp"
clip = 1.0

[privacy.differential_privacy]
level = "site"
epsilon = 8.0
delta = 0.01
spare_rounds = 1
"""
ALLOWED = RULES.model_copy(update={"secure_aggregation": SecureAggregation(allow_dp=True)})


@dataclass
class Purse:
    """A ledger in memory that pays so many rounds."""

    rounds: int = 100
    asked: list[int] = field(default_factory=list)

    def affords(self, charge: Charge) -> bool:
        """Whether the rounds are left."""
        self.asked.append(charge.rounds)
        return charge.rounds <= self.rounds

    def refusal(self, terms: Terms, family: str) -> Broken | None:
        """Why it does not pay the whole job."""
        rounds = sum(plan.dp.rounds for plan in terms.plans if plan.dp)
        if rounds <= self.rounds:
            return None
        return Broken(Rule.LEDGER, f"{family} would pay {self.rounds} rounds", "plan fewer rounds")


@pytest.fixture(scope="module")
def consortium() -> Consortium:
    """Three hospitals and a coordinator."""
    return Consortium.found()


@pytest.fixture
def world(consortium: Consortium, tmp_path: Path) -> World:
    """A job with noise among sites whose policies and ledgers allow it; nobody attends yet."""
    world = World(consortium, tmp_path, NOISY)
    for agent in world.sites.values():
        agent.rules, agent.ledger = ALLOWED, Purse()
        agent.start()
    return world


def berlin(world: World, **changes: object) -> Agent:
    """One of the sites, changed, after all have heard of the job."""
    agent = world.sites["berlin"]
    for name, value in changes.items():
        setattr(agent, name, value)
    agent.start()
    world.attend()
    return agent


def charges(agent: Agent) -> list[Charge]:
    """What its ledger was charged."""
    return [each.charge for each in agent.effects if isinstance(each, sums.Persist) and each.charge is not None]


def test_a_round_with_noise_is_summed_and_charged(world: World) -> None:
    """The opened sum is the three sites' and their noise; each is charged once for it, and for exact sums nothing."""
    world.attend()
    for step, kind in enumerate((StepKind.STATISTICS, StepKind.TRAIN, StepKind.EVALUATE), 1):
        world.round(step, kind)
    assert (len(world.opened), world.failed, world.refusals) == (3, [], [])
    plan, members, words = world.opened[1]
    mechanism = mechanism_of(plan)
    found = noised.decode(plan, words, 3, world.contexts[1], np.empty(mechanism.dimension))
    vectors = [world.vector(name, plan) for name in world.sites]
    expected = sum(each * min(1.0, mechanism.clip / float(np.linalg.norm(each))) for each in vectors)
    deviation = (3 * round_noise(plan, 3, 1).variance) ** 0.5 / mechanism.scale
    assert members == (0, 1, 2)
    assert np.abs(found.values - expected).max() < 8 * deviation
    for agent in world.sites.values():
        assert [(each.r, each.rounds, each.members, each.plan) for each in charges(agent)] == [(2, 1, 3, plan)]
        assert list(agent.folder.glob("*.result")) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_update_that_is_not_finite_is_contributed_like_any_other(world: World, bad: float) -> None:
    """Nobody declines; the sum is that of the other two, and noise. The site's own log has it."""
    agent = berlin(world, vector=np.full(8, bad))
    world.round(1)
    (plan, members, _) = world.opened[0]
    assert members == (0, 1, 2)
    assert agent.said(Decline) == []
    assert len(charges(agent)) == 1
    assert plan.dp is not None


def test_work_that_fails_is_never_a_word_on_the_data(world: World) -> None:
    """What the trainer calls data is then a table that went away: a decline like any other, and none is counted."""
    agent = berlin(world, cause=DeclineCause.DATA)
    world.round(1)
    assert len(agent.said(Decline)) == 1
    assert [family.declines for family in Durable.decode(agent.disk).families] in ([], [0])
    assert charges(agent) == []


# ------------------------------------------------------------------------------------------------- before it joins


def refusal(world: World, agent: Agent) -> str:
    """Why the site refused the job, as the coordinator is told."""
    world.settle()
    assert not agent.told(JobAccepted)
    return "; ".join(f"{each.path}: {each.problem} ({each.fix})" for each in world.refused[agent.name].findings)


def test_a_policy_that_does_not_allow_noise_refuses(world: World) -> None:
    """By default it does not: the line is its administrator's, and no noise is tried for such a job."""
    agent = berlin(world, rules=RULES)
    agent.session._sealed._trial = _never  # type: ignore[union-attr]
    assert "privacy: plan 2: this site allows train no churn dp (ask this site's administrator" in refusal(world, agent)


def _never(_: Terms) -> None:
    raise AssertionError("noise was tried in vain")


def test_a_site_without_a_ledger_refuses(world: World) -> None:
    """Nothing could be charged there."""
    agent = berlin(world, ledger=None)
    assert "privacy: plan 2: the ledger does not pay 6 rounds of it" in refusal(world, agent)


def test_a_ledger_that_cannot_pay_the_whole_job_refuses_before_its_first_round(world: World) -> None:
    """Five rounds, and a spare one; the reason is the ledger's own, which knows what would help."""
    agent = berlin(world, ledger=Purse(5))
    assert refusal(world, agent) == "privacy: heart would pay 5 rounds (plan fewer rounds)"
    assert agent.ledger is not None
    assert agent.ledger.asked[0] == 6  # type: ignore[attr-defined]


def test_noise_that_fails_its_trial_is_never_sent(world: World) -> None:
    """The site refuses, names the machine's administrator, and says nothing more in the job."""

    def fails(_: Terms) -> None:
        raise LocalProtocolError("the noise sampler failed its self-test", fix="reinstall", who=WhoActs.SITE)

    agent = world.sites["berlin"]
    agent.session._sealed._trial = fails  # type: ignore[union-attr]
    world.attend()
    assert refusal(world, agent) == "privacy: the noise sampler failed its self-test (reinstall)"
    assert "reinstall" in agent.trouble()
    assert Durable.decode(agent.disk).jobs == ()


def test_noise_is_tried_in_each_process_before_the_first_word(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart too; for jobs without noise never."""
    tried: list[Terms] = []
    monkeypatch.setattr(SealedJobs.__init__, "__defaults__", (None, tried.append))
    for agent in world.sites.values():
        agent.start()
    world.attend()
    assert tried == [world.terms] * 3
    world.sites["berlin"].restart()
    world.settle()
    assert tried == [world.terms] * 4


def test_terms_with_less_noise_than_the_job_file_asks_for_are_refused(world: World) -> None:
    """Each site calibrates for itself: a multiplier, scale or number of rounds that differs is told."""

    def changed(change: Callable[[Terms], Terms]) -> str:
        altered = change(world.terms)
        with pytest.raises(Exception, match="the terms offered are not those of the job file") as refused:
            sealed.admitted(replace(world.offer, terms=altered.encode()), _job(), world.consortium.hub.statement)
        return str(refused.value)

    def less(**noise: float) -> Callable[[Terms], Terms]:
        def change(terms: Terms) -> Terms:
            one, two, *rest = terms.plans
            assert two.dp is not None
            return replace(terms, plans=(one, replace(two, dp=replace(two.dp, **noise)), *rest))

        return change

    noise = world.terms.plans[1].dp
    assert noise is not None
    for name, value in {"z": noise.z / 2, "scale": noise.scale / 2, "rounds": 1, "clip": 9.0, "delta": 0.02}.items():
        assert "dp of plan 2 is Noise(" in changed(less(**{name: value}))


def _job() -> object:
    from federation import job

    return job.parse(NOISY)
