import pytest

from federation.errors import ConfigurationError
from privacy.secure_aggregation.rostersum import rules
from privacy.secure_aggregation.rostersum.promise import epsilon_of
from privacy.secure_aggregation.rostersum.terms import GUARD_WORDS, Churn, DpCodec
from simulations.loopback_job import AIM, PLAN, LoopbackJob


@pytest.mark.parametrize("churn", [Churn.CELLS, Churn.OPEN])
def test_a_job_is_one_that_sites_accept(churn: Churn) -> None:
    """Its terms break no rule, its keys are those of its roster, and its vectors have a weight and a guard."""
    job = LoopbackJob.of(7, 50, churn, post_quantum=False)

    plan = job.terms.plan(PLAN)
    assert plan is not None
    assert rules.broken(job.terms) == ()
    assert (plan.churn, plan.words, job.terms.pq) == (churn, 1 + 50 + GUARD_WORDS, 0)
    assert [member.vk for member in job.terms.roster.members] == [
        private.public_key().public_bytes_raw() for private in job.sites
    ]
    assert job.terms.roster.coordinator_vk == job.coordinator.public_key().public_bytes_raw()


def test_a_job_with_noise_is_one_that_sites_accept() -> None:
    """Its vectors are padded and have no weight, and all rounds together keep what is aimed at."""
    job = LoopbackJob.of(7, 50, Churn.DP, post_quantum=False)

    plan = job.terms.plan(PLAN)
    assert plan is not None
    assert rules.broken(job.terms) == ()
    assert (plan.churn, plan.words, plan.codec) == (Churn.DP, 64 + GUARD_WORDS, DpCodec(64))
    assert plan.dp is not None
    assert (plan.dp.rounds, plan.dp.clip) == (AIM.rounds, AIM.clip)
    assert 0 < epsilon_of(job.terms, plan) <= AIM.epsilon


def test_no_two_jobs_are_the_same() -> None:
    """Sites accept a job once, ever."""
    first, second = (LoopbackJob.of(3, 10, Churn.CELLS).terms.job_hash for _ in range(2))

    assert first != second


@pytest.mark.parametrize(("sites", "parameters"), [(2, 10), (101, 10), (3, 0)])
def test_what_no_job_can_be_is_refused(sites: int, parameters: int) -> None:
    """The rule that it breaks is told, and the sizes that were asked for."""
    with pytest.raises(ConfigurationError, match=rf"no job is of {sites} sites and {parameters} parameters.*To fix"):
        LoopbackJob.of(sites, parameters, Churn.CELLS)
