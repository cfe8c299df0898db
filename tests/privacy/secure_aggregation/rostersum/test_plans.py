"""The terms that a job file and a roster come to."""

from dataclasses import replace

import pytest

from federation import job as job_file
from federation.blobs import BlobRef
from federation.errors import ConfigurationError
from federation.messages import MembershipStatement, Role, StepKind, StepStart
from federation.sums import SumField
from privacy.secure_aggregation.rostersum import rules
from privacy.secure_aggregation.rostersum.plans import (
    args_of,
    foreseen,
    index_of,
    model_size,
    plan_id,
    seats,
    task_digest,
    terms_of,
)
from privacy.secure_aggregation.rostersum.promise import epsilon_of, promise_of
from privacy.secure_aggregation.rostersum.terms import (
    Churn,
    DpCodec,
    Kind,
    Mechanism,
    Ring,
    Terms,
    TrainCodec,
    Unit,
)

JOB = """
format = 1
name = "heart"
[task]
kind = "tabular"
target = "binary"
[data]
dataset = "heart"
label = "disease"
columns = [{ name = "age", kind = "numeric", range = [0, 120] }]
[model]
name = "logistic_regression"
[strategy]
name = "fedavg"
[rounds]
maximum = 3
[cohort]
minimum_sites = 3
"""
STATISTICS = (SumField("count", 1, 0, 0.0, 1e6), SumField("sum", 1, 20, -1e6, 1e6))
EVALUATION = (SumField("rows", 1, 0, 0.0, 1e6), SumField("bins", 32, 0, 0.0, 1e6))


def _roster(sites: int) -> tuple[MembershipStatement, ...]:
    return tuple(
        MembershipStatement(
            "heart", f"{n:032x}", f"site{n}", f"org{n}", Role.SITE, bytes(32), bytes([n + 1]) * 32, 1, 2, bytes(64)
        )
        for n in range(sites)
    )


def _job(privacy: str, job: str = JOB) -> job_file.Job:
    return job_file.parse(f"{job}[privacy]\n{privacy}\n")


def _terms(privacy: str = "", sites: int = 4, job: str = JOB, statistics: tuple[SumField, ...] = STATISTICS) -> Terms:
    return terms_of(_job(privacy, job), bytes(16), _roster(sites), b"\xc0" * 32, 14, statistics, EVALUATION)


NOISE = """churn = "dp"
[privacy.differential_privacy]
level = "site"
epsilon = 4.0
delta = 1e-4
"""


@pytest.mark.parametrize("churn", ["cells", "open"])
@pytest.mark.parametrize("sites", [3, 4, 5, 10, 50, 100])
def test_the_terms_of_a_job_that_names_nothing_are_such_as_sites_accept(sites: int, churn: str) -> None:
    """Defaults hold for every size of roster: no rule is broken, and the words are those of model and fields."""
    terms = _terms(f'churn = "{churn}"', sites)
    keys = {rule.rule for rule in rules.broken(terms)}
    assert keys <= {rules.Rule.WEAK_KEY}  # this roster's keys are made up
    statistics, train, evaluation = terms.plans
    assert [plan.kind for plan in terms.plans] == [Kind.STAT, Kind.TRAIN, Kind.EVAL]
    assert (train.ring, train.words, train.churn) == (Ring.WORD, 14 + 5, Churn(churn))
    assert (statistics.words, evaluation.words) == (2 + 4, 33 + 4)
    assert isinstance(train.codec, TrainCodec)
    assert sites * train.codec.steps < 2**31 <= 2 * sites * (train.codec.steps + 1) + sites
    assert train.codec.weighting == ("records" if churn == "cells" else "uniform")


def test_open_churn_takes_the_jobs_quorum_and_rescues_only_where_one_opening_stays_certain() -> None:
    """m_min is the quorum where that is safe; t + m_min >= n + c_max + 1, or no escrow."""
    text = JOB.replace("minimum_sites = 3", "minimum_sites = 10\nquorum = 8")
    train = _terms('churn = "open"', 10, text).plans[1]
    assert (train.m_min, train.t) == (8, 6)
    assert _terms('churn = "open"\nrescue = false', 10, text).plans[1].t == 0
    low = _terms('churn = "open"', 10).plans[1]
    assert (low.m_min, low.t) == (5, 0)


@pytest.mark.parametrize("sites", [3, 4, 5, 10, 50, 100])
def test_noise_makes_terms_that_sites_accept_and_keep_the_promise(sites: int) -> None:
    """Updates alone have noise: no weight word, a padded vector, the least noise for the epsilon and all its rounds."""
    terms = _terms(NOISE, sites)
    assert {rule.rule for rule in rules.broken(terms)} <= {rules.Rule.WEAK_KEY}
    statistics, train, evaluation = terms.plans
    assert (statistics.churn, train.churn, evaluation.churn) == (Churn.CELLS, Churn.DP, Churn.CELLS)
    assert (train.codec, train.words, train.ring) == (DpCodec(16), 16 + 4, Ring.WORD)
    assert (statistics.dp, evaluation.dp) == (None, None)
    noise = train.dp
    assert noise is not None
    assert (noise.unit, noise.mechanism, noise.clip, noise.delta) == (Unit.SITE, Mechanism.DDGAUSS, 10.0, 1e-4)
    assert noise.rounds == 3 + 1, "three planned, and a tenth more for those that come to nothing"
    assert 0 < epsilon_of(terms, train) <= 4
    assert model_size(train) == 16
    assert model_size(_terms(sites=sites).plans[1]) == 14
    again = terms_of(_job(NOISE), bytes(16), _roster(sites), b"\xc0" * 32, model_size(train), STATISTICS, EVALUATION)
    assert again == terms, "a site, which knows the padded size, finds the same terms"


def test_noise_follows_the_job_file() -> None:
    """Clip, spare rounds and quorum are the author's; a smaller quorum leaves fewer shares that count."""
    text = JOB.replace("minimum_sites = 3", "minimum_sites = 10\nquorum = 8")
    noise = NOISE + "spare_rounds = 5\n"
    train = _terms(noise.replace('churn = "dp"', 'churn = "dp"\nclip = 2.0'), 10, text).plans[1]
    assert train.dp is not None
    assert (train.dp.clip, train.dp.rounds) == (2.0, 8)
    assert (train.m_min, train.o_min, train.t) == (8, 5, 6)
    assert _terms(NOISE, 10).plans[1].m_min == 5
    assert _terms(NOISE + "spare_rounds = 0\n", 10).plans[1].dp != _terms(NOISE, 10).plans[1].dp


def test_a_delta_that_lays_a_site_open_is_refused() -> None:
    """One site in ten times as many as there are: what may happen at worst to each must not be expected of one."""
    text = NOISE.replace("1e-4", "0.01")
    assert _terms(text, 10).plans[1].dp is not None
    with pytest.raises(
        ConfigurationError,
        match=r"delta = 0\.01 would allow that one of 11 sites is laid open.*to at most 1/\(10 \* 11\) = 0\.00909091",
    ):
        _terms(text, 11)


def test_what_a_job_with_noise_comes_to_is_foreseen_among_as_few_sites_as_it_begins_with() -> None:
    """Before anybody has joined, nearly as the terms then say; a job without noise promises nothing."""
    found = foreseen(_job(NOISE))
    assert found is not None
    terms = _terms(NOISE, 3)
    promised = promise_of(terms, terms.plans[1])
    assert (found.sites, found.colluding, found.shares, found.rounds) == (3, 1, 2, 4)
    assert (found.sites, found.shares, found.clip) == (promised.sites, promised.shares, promised.clip)
    assert found.z == pytest.approx(promised.z, rel=0.01)
    assert found.blur == pytest.approx(found.z * 10 / (3 * 2) ** 0.5)
    four = foreseen(_job(f"colluding_sites = 2\n{NOISE}", JOB.replace("minimum_sites = 3", "minimum_sites = 4")))
    assert four is not None
    assert (four.colluding, four.shares, foreseen(_job(""))) == (2, 2, None)


def test_cells_are_named_by_sites_and_an_unknown_one_is_refused() -> None:
    """Their order in the file does not matter."""
    cells = 'cells = [["site5", "site3", "site4"], ["site0", "site2", "site1"]]\ncolluding_sites = 1'
    assert _terms(cells, 6).cells == ((0, 1, 2), (3, 4, 5))
    with pytest.raises(ConfigurationError, match="the roster does not hold the site 'site5'"):
        _terms(cells, 5)


@pytest.mark.parametrize("sites", [9, 30, 100])
def test_groups_are_the_cells_and_only_updates_are_summed_in_them(sites: int) -> None:
    """As many as the roster allows; statistics and evaluations pool whole cells as ever, and no rule is broken."""
    terms = _terms("groups = true\ncolluding_sites = 1", sites)
    assert {rule.rule for rule in rules.broken(terms)} <= {rules.Rule.WEAK_KEY}
    assert [len(cell) for cell in terms.cells] == sorted((len(cell) for cell in terms.cells), reverse=True)
    assert len(terms.cells) == sites // 3
    statistics, train, evaluation = terms.plans
    assert [plan.group for plan in terms.plans] == [0, 1, 0]
    assert (train.m_min, train.o_min, train.t, train.churn) == (3, 3, 2, Churn.CELLS)
    assert statistics.m_min == evaluation.m_min > 3
    assert _terms("groups = true\ncolluding_sites = 1\nrescue = false", sites).plans[1].t == 0


def test_named_cells_are_the_groups_and_groups_are_fixed_in_the_job_hash() -> None:
    """Another grouping, or none, is another job."""
    cells = 'cells = [["site5", "site3", "site4"], ["site0", "site2", "site1"]]\ncolluding_sites = 1\n'
    other = cells.replace("site5", "siteX").replace("site0", "site5").replace("siteX", "site0")
    grouped = _terms(cells + "groups = true", 6)
    assert grouped.cells == ((0, 1, 2), (3, 4, 5))
    assert _terms("groups = true\ncolluding_sites = 1", 6).cells != grouped.cells
    hashes = {each.job_hash for each in (grouped, _terms(other + "groups = true", 6), _terms(cells, 6))}
    assert len(hashes) == 3


def test_a_strategy_that_needs_more_groups_than_there_are_is_refused() -> None:
    """By default a third of the sites may collude, so nine sites make two groups: in words, with what can be done."""
    text = JOB.replace("fedavg", "median")
    with pytest.raises(
        ConfigurationError,
        match=r"'median' needs 3 groups of sites, and 9 sites of 9 organisations make 2 of at least 4 sites of 4 "
        r"organisations each.*To fix \(the job's author\): invite more sites, lower privacy\.colluding_sites",
    ):
        _terms("groups = true", 9, text)
    assert len(_terms("groups = true\ncolluding_sites = 1", 9, text).cells) == 3
    assert len(_terms("groups = true", 9).cells) == 2


def test_more_sites_than_a_roster_may_have_are_refused_however_they_are_grouped() -> None:
    """101 have terms that no site accepts, and the reason says what to do."""
    found = rules.broken(_terms("groups = true\ncolluding_sites = 1", 101))
    (size,) = [each for each in found if each.rule is rules.Rule.ROSTER_SIZE]
    assert size.problem == "the roster has 101 sites"
    assert size.fix == "name 3 to 100 sites in cohort.sites: more cannot sum together, not even in groups"


def test_a_task_without_statistics_has_no_plan_for_them() -> None:
    """Plans keep their numbers."""
    assert [plan.plan_id for plan in _terms(statistics=()).plans] == [2, 3]
    assert [plan_id(kind) for kind in StepKind] == [1, 2, 3]


def test_the_order_of_a_roster_does_not_matter() -> None:
    """Indices go by organisation and name."""
    roster = _roster(5)
    assert seats(roster[::-1]) == roster
    assert index_of(roster[::-1], "site3") == 3
    assert _terms().job_hash == _terms().job_hash


def test_one_site_alone_has_no_terms() -> None:
    """There is nobody to hide among."""
    with pytest.raises(ConfigurationError, match="needs at least 3 sites of 3 organisations"):
        _terms(sites=1)


def test_the_task_digest_names_the_work_and_not_the_run() -> None:
    """Another model is other work; more rounds are not."""
    job = job_file.parse(JOB)
    assert task_digest(job) == task_digest(job_file.parse(JOB.replace("maximum = 3", "maximum = 9")))
    assert task_digest(job) != task_digest(job_file.parse(JOB.replace("[0, 120]", "[0, 130]")))


def test_the_arguments_of_a_step_are_its_preparation_and_round() -> None:
    """Statistics have none; two rounds differ."""
    ref = BlobRef.of(b"x")
    train = StepStart("heart-1", 2, 0, StepKind.TRAIN, 1, ref, ref, 8, 1.0)
    assert args_of(train) != args_of(replace(train, round=2))
    assert args_of(train) == args_of(replace(train, step=4, attempt=3))
    assert args_of(StepStart("heart-1", 1, 0, StepKind.STATISTICS, 0, None, None, 8, 1.0)) == b""
