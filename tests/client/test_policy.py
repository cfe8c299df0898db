from collections.abc import Callable
from dataclasses import dataclass

import pytest

from client import policy
from client.policy import Admitted, Policy, SecureAggregation
from federation import job
from federation.errors import ConfigurationError, WhoActs
from federation.messages import JobOffer, RevocationList, Role
from privacy.identity import MemberKeys, Root, request_for
from privacy.secure_aggregation.rostersum.floor import Floor
from privacy.secure_aggregation.rostersum.plans import terms_of
from privacy.secure_aggregation.rostersum.terms import Churn, Kind
from tasks import tabular

OPEN = Policy(datasets=("*",), tasks=("*",), models=("*",), jobs=("*",), allow_plain_aggregation=True)


@pytest.fixture(scope="session")
def judge(job_text: Callable[..., str]) -> Callable[..., dict[str, str]]:
    """Holds the job against a policy and gives what is found, path by path."""
    text = job_text()
    parsed = job.parse(text)

    def held(rules: Policy, roster: int = 2) -> dict[str, str]:
        found = policy.allowed(rules, parsed, text, roster)
        assert all(finding.level == "refusal" and finding.fix for finding in found)
        return {finding.path: finding.problem for finding in found}

    return held


def test_the_example_parses_and_allows(judge: Callable[..., dict[str, str]]) -> None:
    """The file that a new site begins with takes part in what its consortium offers, unless that is plain."""
    example = policy.parse(policy.EXAMPLE, "policy.toml")

    assert example == OPEN.model_copy(update={"allow_plain_aggregation": False})
    assert set(judge(example)) == {"privacy.secure_aggregation"}


def test_a_demonstrations_lines_are_lines_of_the_example(
    judge: Callable[..., dict[str, str]],
) -> None:
    """Nothing else in it changes, and unchanged it is the example."""
    plain = policy.example(plain=True)

    assert policy.example() == policy.EXAMPLE
    assert policy.parse(plain, "policy.toml") == OPEN
    assert judge(policy.parse(plain, "policy.toml")) == {}
    lowered = policy.parse(policy.example(rows_of_each_class=0), "policy.toml")
    assert lowered == OPEN.model_copy(
        update={
            "allow_plain_aggregation": False,
            "secure_aggregation": SecureAggregation(rows_of_each_class=0),
        }
    )


def test_an_empty_policy_allows_nothing(judge: Callable[..., dict[str, str]]) -> None:
    """Each rule that is not stated refuses; nothing is allowed by default."""
    empty = policy.parse("", "policy.toml")

    assert set(judge(empty)) == {"data.dataset", "task.kind", "model.name", "name", "privacy.secure_aggregation"}


@pytest.mark.parametrize(
    ("rule", "path", "problem"),
    [
        ({"datasets": ("lung",)}, "data.dataset", "this site's policy does not allow the data set 'heart'"),
        ({"tasks": ()}, "task.kind", "this site's policy does not allow the task 'tabular'"),
        ({"models": ("mlp",)}, "model.name", "this site's policy does not allow the model 'logistic_regression'"),
        ({"jobs": ("stroke", f"sha256:{'0' * 64}")}, "name", "this site's policy does not allow the job 'risk'"),
        (
            {"minimum_sites": 3},
            "cohort.quorum",
            "a round may count with 2 sites; this site takes part with at least 3",
        ),
        (
            {"allow_plain_aggregation": False},
            "privacy.secure_aggregation",
            "this site's policy does not let the coordinator see its update (plain aggregation)",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_rule_refuses_by_itself(
    judge: Callable[..., dict[str, str]], rule: dict[str, object], path: str, problem: str
) -> None:
    """A policy that allows all but one thing refuses for that one thing, in words that name it."""
    assert judge(OPEN.model_copy(update=rule)) == {path: problem}


def test_names_allow_without_the_wildcard(judge: Callable[..., dict[str, str]], job_text: Callable[..., str]) -> None:
    """Everything may be named one by one; a job by its name or by the digest of its file."""
    named = OPEN.model_copy(
        update={"datasets": ("lung", "heart"), "tasks": ("tabular",), "models": ("logistic_regression",)}
    )

    assert judge(named.model_copy(update={"jobs": ("risk",)})) == {}
    digest = job.digest(job_text()).hex()
    assert judge(named.model_copy(update={"jobs": (f"sha256:{digest}",)})) == {}


@pytest.mark.parametrize(
    ("settings", "roster", "fewest"),
    [({"minimum_sites": 3}, 3, 3), ({"minimum_sites": 3, "quorum": 2}, 3, 2), ({"minimum_sites": 3}, 2, 2)],
    ids=["all", "quorum", "a roster shorter than the job says"],
)
def test_what_counts_is_with_how_few_sites_a_round_may_end(
    job_text: Callable[..., str], settings: dict[str, int], roster: int, fewest: int
) -> None:
    """`minimum_sites` is held against the quorum and against the roster, whichever is smaller."""
    told = "\n".join(f"{key} = {value}" for key, value in settings.items())
    text = job_text().replace("minimum_sites = 2", told)
    parsed = job.parse(text)

    assert policy.allowed(OPEN.model_copy(update={"minimum_sites": fewest}), parsed, text, roster) == ()
    (finding,) = policy.allowed(OPEN.model_copy(update={"minimum_sites": fewest + 1}), parsed, text, roster)
    assert finding.problem.startswith(f"a round may count with {fewest} sites")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('data_sets = ["*"]', "data_sets: Extra inputs are not permitted"),
        ('datasets = "*"', "datasets: Input should be a valid tuple"),
        ('models = ["mlp", 3]', "models.1: Input should be a valid string"),
        ("minimum_sites = 1", "minimum_sites: Input should be greater than or equal to 2"),
        ('allow_plain_aggregation = "yes"', "allow_plain_aggregation: Input should be a valid boolean"),
    ],
    ids=["unknown", "no-list", "no-text", "alone", "no-truth"],
)
def test_a_wrong_key_is_named(text: str, words: str) -> None:
    """The site's administrator is told which file, which key, and which keys there are."""
    with pytest.raises(ConfigurationError) as refusal:
        policy.parse(text, "policy.toml")

    assert f"policy.toml is no policy: {words}" in str(refusal.value)
    assert "use the keys datasets, tasks, models, jobs, minimum_sites, allow_plain_aggregation" in refusal.value.fix
    assert refusal.value.who is WhoActs.SITE


def test_every_wrong_key_is_named_at_once() -> None:
    """Two mistakes are told in one message."""
    with pytest.raises(ConfigurationError) as refusal:
        policy.parse('tasks = 1\njobz = ["*"]', "policy.toml")

    assert "tasks: " in refusal.value.problem
    assert "jobz: " in refusal.value.problem


def test_a_text_that_is_not_toml_is_refused_with_its_line() -> None:
    """The line that breaks the file is told."""
    with pytest.raises(ConfigurationError, match=r"policy\.toml is not TOML: .*line 2"):
        policy.parse('datasets = ["*"]\ntasks = [all]\n', "policy.toml")


# ------------------------------------------------------------------------------------------------- secure aggregation


@dataclass(frozen=True)
class Asked:
    """A job under secure aggregation, and the consortium that made its roster."""

    job: Admitted
    root: Root

    @property
    def nobody(self) -> RevocationList:
        """Nobody is revoked."""
        return self.root.sign_revocations(1, 1_800_000_000, ())


@pytest.fixture(scope="module")
def asked(job_text: Callable[..., str]) -> Asked:
    """A job of three hospitals."""
    text = job_text().replace('"plain"', '"rostersum"').replace("minimum_sites = 2", "minimum_sites = 3")
    root, parsed = Root.create("heart", 1_800_000_000), job.parse(text)
    names = ("athens", "berlin", "cork")
    requests = [request_for(name, name, Role.SITE, MemberKeys.generate(), "test") for name in names]
    roster = tuple(root.approve(each, 1_800_000_000)[1] for each in requests)
    task = tabular.make(parsed)
    terms = terms_of(parsed, bytes(16), roster, bytes(32), 2, task.statistics_fields, task.evaluation_fields)
    return Asked(Admitted(parsed, JobOffer("risk-1", text, roster, terms.encode()), terms), root)


def _sums(**rules: object) -> Policy:
    return OPEN.model_copy(update={"secure_aggregation": SecureAggregation(**rules)})  # type: ignore[arg-type]


def test_the_floor_is_what_the_file_says(asked: Asked) -> None:
    """Each number by itself; what the file does not say is as the text has it."""
    text = """
        datasets = ["*"]
        tasks = ["*"]
        models = ["*"]
        jobs = ["*"]
        [secure_aggregation]
        colluding_sites = 4
        colluding_organisations = 3
        rows_minimum = 50
        rows_of_each_class = 0
        allow_open = true
        allow_dp = true
        declared_weight = 7
        drift_max = 2.5
        families = [{ dataset = "heart", family = "cardiology" }]
    """
    limits = policy.floor(policy.parse(text, "policy.toml"), (asked.job,), asked.nobody)
    churns = {(kind, churn) for kind in Kind for churn in Churn}
    assert limits.rows_of_each_class == 0
    assert (limits.c_max, limits.g_max, limits.rows_min, limits.declared, limits.drift_max) == (4, 3, 50, 7, 2.5)
    assert (limits.allow_open, limits.churns, limits.families) == (True, frozenset(churns), frozenset({"cardiology"}))

    usual = policy.floor(OPEN, (asked.job,), asked.nobody)
    terms = asked.job.terms
    tasks = {plan.task_digest for plan in terms.plans}
    assert usual == Floor(1, 1, frozenset({terms.roster.hash}), frozenset(tasks), frozenset({"heart"}))


@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        ({}, {Churn.CELLS}),
        ({"allow_dp": True}, {Churn.CELLS, Churn.DP}),
        ({"allow_open": True}, {Churn.CELLS, Churn.OPEN}),
    ],
)
def test_who_may_be_missing_from_a_sum_is_this_sites_own_word(
    asked: Asked, rules: dict[str, bool], allowed: set[Churn]
) -> None:
    """Without a line of its own the policy allows sums of whole cells alone, of every kind."""
    limits = policy.floor(_sums(**rules), (asked.job,), asked.nobody)
    assert limits.churns == frozenset((kind, churn) for kind in Kind for churn in allowed)


def test_an_example_says_what_it_is_asked_to() -> None:
    """Each line by itself; all else stays."""
    lines = {"allow_plain_aggregation": "plain", "allow_dp": "dp", "allow_open": "opened"}
    usual = policy.EXAMPLE.splitlines()
    for line, word in lines.items():
        text = policy.example(**{word: True}).splitlines()
        assert [(a, b) for a, b in zip(usual, text, strict=True) if a != b] == [
            (each, each.replace("= false", "= true")) for each in usual if each.startswith(line)
        ]
    assert policy.parse(policy.example(dp=True), "policy.toml").secure_aggregation.allow_dp


def test_a_job_that_the_policy_does_not_allow_opens_nothing(asked: Asked) -> None:
    """Neither its task, nor its family, nor its roster."""
    limits = policy.floor(OPEN.model_copy(update={"datasets": ()}), (asked.job,), asked.nobody)
    assert (limits.tasks, limits.families, limits.rosters) == (frozenset(), frozenset(), frozenset())


def test_rosters_are_those_that_the_root_signed_or_those_compared(asked: Asked) -> None:
    """A list of digests leaves out what is only signed."""
    signed, other = asked.job.terms.roster.hash, bytes(32)
    for rosters, allowed in (
        (("signed",), {signed}),
        ((other.hex(),), {other}),
        (("signed", other.hex()), {signed, other}),
        ((), set()),
    ):
        assert policy.floor(_sums(rosters=rosters), (asked.job,), asked.nobody).rosters == allowed


def test_a_revoked_member_is_in_no_sum(asked: Asked) -> None:
    """Its key, by the serial that the consortium's list names."""
    cork = asked.job.offer.roster[2]
    revoked = asked.root.sign_revocations(2, 1_800_000_000, (cork.serial,))
    assert policy.floor(OPEN, (asked.job,), revoked).revoked == {cork.protocol_key}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("colluding_sites = -1", "secure_aggregation.colluding_sites: Input should be greater than or equal to 0"),
        ("rows_of_each_class = -1", "rows_of_each_class: Input should be greater than or equal to 0"),
        ("rows_minimum = 9", "secure_aggregation.rows_minimum: Input should be greater than or equal to 10"),
        ('rosters = ["all"]', "secure_aggregation.rosters.0: String should match pattern"),
        ("drift_max = 0", "secure_aggregation.drift_max: Input should be greater than 0"),
        ("clip = 1", "secure_aggregation.clip: Extra inputs are not permitted"),
        ('families = [{ dataset = "heart" }]', "secure_aggregation.families.0.family: Field required"),
    ],
)
def test_a_wrong_rule_of_sums_is_named(rule: str, words: str) -> None:
    """With its table, and with the keys that there are."""
    with pytest.raises(ConfigurationError) as refusal:
        policy.parse(f"[secure_aggregation]\n{rule}", "policy.toml")
    assert words in refusal.value.problem
    assert "in [secure_aggregation] colluding_sites, colluding_organisations, rows_minimum" in refusal.value.fix
