"""A job file is a valid job, or everything wrong with it is told in plain words with its place."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import tasks
from federation import plugins
from federation.errors import ConfigurationError, WhoActs
from federation.job import LARGEST, CategoricalColumn, Job, JobProblem, NumericColumn, Privacy, check, digest, parse

JOB = """\
format = 1
name = "heart"

[task]
kind = "tabular"
target = "binary"

[data]
dataset = "heart"
label = "disease"

[[data.columns]]
name = "age"
kind = "numeric"
range = [0, 120]
missing = 50

[[data.columns]]
name = "pain"
kind = "categorical"
categories = ["none", "typical"]

[data.split]
method = "stratified"
test_fraction = 0.25

[model]
name = "logistic_regression"

[training]
epochs = 4
learning_rate = 1

[strategy]
name = "fedprox"
mu = 1

[rounds]
maximum = 20
best_metric = "auc"

[rounds.early_stop]
metric = "loss"

[cohort]
minimum_sites = 3
deadline_seconds = 60

[privacy]
secure_aggregation = "plain"
"""


def changed(old: str, new: str) -> str:
    """The job with one text replaced."""
    assert JOB.count(old) == 1
    return JOB.replace(old, new)


def told(text: str) -> list[str]:
    """The problems of `text`, as people read them."""
    job, problems = check(text)
    assert (job is None) == bool(problems)
    return [problem.told("heart.toml") for problem in problems]


def test_a_right_file_is_a_job_with_its_plug_ins_settings() -> None:
    """Every table has the type of its plug-in, and what is left out its default."""
    job = parse(JOB)
    assert isinstance(job.task, plugins.load("tasks", "tabular").Settings)
    assert isinstance(job.model, plugins.load("tasks.models", "logistic_regression").Settings)
    assert isinstance(job.strategy, plugins.load("strategies", "fedprox").Settings)
    age, pain = job.data.columns
    assert isinstance(age, NumericColumn)
    assert isinstance(pain, CategoricalColumn)
    assert (age.range, age.missing, pain.categories) == ((0.0, 120.0), 50.0, ("none", "typical"))
    assert (job.training.batch_size, job.training.precision, job.cohort.needed) == (32, "auto", 3)


def test_whole_numbers_stand_for_numbers_everywhere() -> None:
    """`learning_rate = 1` is 1.0, in core tables, unions, lists and plug-ins alike."""
    job = parse(JOB)
    age = job.data.columns[0]
    assert isinstance(age, NumericColumn)
    numbers = [job.training.learning_rate, job.cohort.deadline_seconds, age.missing, *age.range]
    assert [type(number) for number in [*numbers, job.strategy.model_dump()["mu"]]] == [float] * 6


def test_a_job_survives_being_dumped_and_read_again() -> None:
    """A value that was valid once is valid again."""
    job = parse(JOB)
    assert Job.model_validate(job.model_dump()) == job


def test_a_job_cannot_be_changed() -> None:
    """What was checked stays as it was."""
    with pytest.raises(ValidationError, match="frozen"):
        parse(JOB).name = "other"  # type: ignore[misc] # the point of the test


def test_the_quorum_is_what_a_round_needs() -> None:
    """Without a quorum it is all sites that the job waits for."""
    assert parse(changed("minimum_sites = 3", "minimum_sites = 3\nquorum = 2")).cohort.needed == 2


def test_the_digest_is_that_of_the_bytes() -> None:
    """Another line ending is another file."""
    assert digest(JOB) != digest(JOB.replace("\n", "\r\n"))
    assert digest("").hex().startswith("e3b0c44298fc1c14")


def test_windows_line_endings_are_fine() -> None:
    """The same job, written on Windows."""
    assert parse(JOB.replace("\n", "\r\n")) == parse(JOB)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "epochs = 4",
            "epocs = 4",
            (
                "heart.toml:31: training.epocs: unknown key; expected one of epochs, steps, batch_size, optimiser, "
                'learning_rate, momentum, weight_decay, precision, seed; did you mean "epochs"?'
            ),
        ),
        (
            "epochs = 4",
            'epochs = "three"',
            'heart.toml:31: training.epochs: expected a whole number from 1 to 1000, found "three"',
        ),
        (
            "epochs = 4",
            "epochs = true",
            "heart.toml:31: training.epochs: expected a whole number from 1 to 1000, found true",
        ),
        (
            "epochs = 4",
            "epochs = 4.0",
            "heart.toml:31: training.epochs: expected a whole number from 1 to 1000, found 4.0",
        ),
        (
            "learning_rate = 1",
            'learning_rate = "1"',
            'heart.toml:32: training.learning_rate: expected a number above 0, found "1"',
        ),
        (
            "learning_rate = 1",
            "learning_rate = inf",
            "heart.toml:32: training.learning_rate: expected a number above 0, found inf",
        ),
        (
            "learning_rate = 1",
            "learning_rate = 0",
            "heart.toml:32: training.learning_rate: expected a number above 0, found 0",
        ),
        ("format = 1", "format = 2", "heart.toml:1: format: expected 1, found 2"),
        ("format = 1", "format = true", "heart.toml:1: format: expected 1, found true"),
        ("format = 1", "format = 1.0", "heart.toml:1: format: expected 1, found 1.0"),
        (
            'name = "heart"',
            'name = "Heart attack"',
            (
                "heart.toml:2: name: expected a name of 1 to 63 small letters, digits, dots, hyphens and underscores, "
                'found "Heart attack"'
            ),
        ),
        (
            'kind = "tabular"',
            'kind = "tabuler"',
            'heart.toml:5: task.kind: expected "tabular", found "tabuler"; did you mean "tabular"?',
        ),
        ('kind = "tabular"', "kind = 3", 'heart.toml:5: task.kind: expected "tabular", found 3'),
        ('kind = "tabular"\n', "", 'heart.toml:4: task.kind: missing; expected "tabular"'),
        (
            'name = "logistic_regression"',
            'name = "mpl"',
            'heart.toml:28: model.name: expected one of "logistic_regression", "mlp", found "mpl"; did you mean "mlp"?',
        ),
        (
            'name = "logistic_regression"',
            'name = "mlp"\nhidden = ["x"]',
            'heart.toml:29: model.hidden[0]: expected a whole number from 1 to 65536, found "x"',
        ),
        (
            'target = "binary"',
            'target = "binery"',
            (
                'heart.toml:6: task.target: expected one of "binary", "multiclass", "regression", found "binery"; '
                'did you mean "binary"?'
            ),
        ),
        (
            "mu = 1",
            "mu = -1",
            "heart.toml:36: strategy.mu: expected a number of at least 0, found -1",
        ),
        (
            "mu = 1",
            "mue = 1",
            'heart.toml:36: strategy.mue: unknown key; expected one of name, mu, learning_rate; did you mean "mu"?',
        ),
        ("range = [0, 120]\n", "", "heart.toml:12: data.columns[0].range: missing; expected a list of 2 items"),
        (
            "range = [0, 120]",
            "range = [0]",
            "heart.toml:15: data.columns[0].range: expected a list of 2 items: a number, a number, found [0]",
        ),
        (
            "range = [0, 120]",
            "range = [0,\n  '120']",
            'heart.toml:16: data.columns[0].range[1]: expected a number, found "120"',
        ),
        (
            "missing = 50",
            'missing = "men"',
            (
                'heart.toml:16: data.columns[0].missing: expected one of "refuse", "mean", "drop_row", or a number, '
                'found "men"; did you mean "mean"?'
            ),
        ),
        (
            'kind = "categorical"',
            'kind = "catgorical"',
            (
                'heart.toml:20: data.columns[1].kind: expected one of "categorical", "numeric", found "catgorical"; '
                'did you mean "categorical"?'
            ),
        ),
        (
            'kind = "categorical"\n',
            "",
            'heart.toml:18: data.columns[1].kind: missing; expected one of "categorical", "numeric"',
        ),
        (
            '["none", "typical"]',
            '["none", 1]',
            (
                "heart.toml:21: data.columns[1].categories: expected a list of 2 to 10000 items, each a text of 1 "
                'to 200 characters, or a list of 2 to 10000 items, each a whole number, found ["none", 1]'
            ),
        ),
        (
            'categories = ["none", "typical"]',
            'categories = ["none", "typical"]\nrnage = [1, 2]',
            "heart.toml:22: data.columns[1].rnage: unknown key; expected one of name, kind, unit, categories, missing",
        ),
        (
            "maximum = 20",
            "maximum = 20\nmomentum = 0.5",
            (
                "heart.toml:40: rounds.momentum: unknown key; expected one of maximum, best_metric, early_stop; "
                "it belongs in [training]"
            ),
        ),
        (
            "[privacy]\n",
            "[privacy]\nepsilon.value = 3\n",
            "heart.toml:50: privacy.epsilon: unknown key; expected one of secure_aggregation",
        ),
        (
            "[rounds.early_stop]\nmetric",
            '[rounds]\n[privacy."an odd\\nkey"]\nmetric',
            "heart.toml:42: not valid TOML: Cannot declare ('rounds',) twice at column 8",
        ),
        (
            'secure_aggregation = "plain"\n',
            'secure_aggregation = "plain"\n"an odd\\nkey" = 1\n',
            'heart.toml:51: privacy."an odd\\nkey": unknown key; expected one of secure_aggregation',
        ),
        (
            "[model]",
            "[model",
            "heart.toml:27: not valid TOML: Expected ']' at the end of a table declaration at column 7",
        ),
        (
            'secure_aggregation = "plain"\n',
            "x = [1,\n",
            "heart.toml:50: not valid TOML: Invalid value at the end of the file",
        ),
        ("epochs = 4", "epochs = 1" + "0" * 5000, "heart.toml: a number has too many digits"),
        (
            "epochs = 4",
            "epochs = 1" + "0" * 50,
            "expected a whole number from 1 to 1000, found a number of too many digits",
        ),
        ("epochs = 4", "epochs = 2026-01-01", "expected a whole number from 1 to 1000, found 2026-01-01"),
        ("epochs = 4", "epochs = {a = 1}", "expected a whole number from 1 to 1000, found a table"),
        ("epochs = 4", "epochs = [[1], 2]", "expected a whole number from 1 to 1000, found a list of 2 items"),
    ],
)
def test_a_wrong_key_or_value_is_told_with_place_expectation_and_nearest(old: str, new: str, message: str) -> None:
    """One problem, in one line."""
    (line,) = told(changed(old, new))
    assert message in line


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "minimum_sites = 3",
            "minimum_sites = 3\nquorum = 4",
            "heart.toml:47: cohort.quorum: the quorum of 4 must not be above minimum_sites, which is 3",
        ),
        (
            "minimum_sites = 3",
            'minimum_sites = 3\nsites = ["a", "b"]',
            "heart.toml:47: cohort.sites: names 2 sites; minimum_sites asks for 3",
        ),
        (
            "minimum_sites = 3",
            'minimum_sites = 3\nsites = ["a", "b",\n"a"]',
            'heart.toml:48: cohort.sites[2]: the site "a" stands twice',
        ),
        (
            'label = "disease"',
            'label = "age"',
            'heart.toml:10: data.label: the label "age" must not be one of the columns',
        ),
        ('name = "pain"', 'name = "age"', 'heart.toml:19: data.columns[1].name: the column "age" stands twice'),
        (
            '["none", "typical"]',
            '["none", "none"]',
            'heart.toml:21: data.columns[1].categories[1]: the category "none" stands twice',
        ),
        (
            "range = [0, 120]",
            "range = [120, 0]",
            "heart.toml:15: data.columns[0].range: the range must go from a lower to a higher number, not",
        ),
        ("range = [0, 120]", "range = [0, 1e31]", "data.columns[0].range: the range must lie within -1e+30 and 1e+30"),
        ("missing = 50", "missing = 121", "data.columns[0].missing: the constant 121 must lie in the range, 0 to 120"),
        (
            'best_metric = "auc"',
            'best_metric = "aucc"',
            "heart.toml:40: rounds.best_metric: this task has no metric 'aucc'; use one of accuracy, auc, loss",
        ),
        (
            'metric = "loss"',
            'metric = "rmse"',
            "heart.toml:43: rounds.early_stop.metric: this task has no metric 'rmse'",
        ),
        (
            'method = "stratified"\ntest_fraction = 0.25',
            'method = "column"\ncolumn = "disease"',
            "heart.toml:25: data.split.column: 'disease' is also the label or an input",
        ),
        (
            'method = "stratified"\ntest_fraction = 0.25',
            'method = "column"\ncolumn = "pain"',
            "heart.toml:25: data.split.column: 'pain' is also the label or an input",
        ),
        (
            "test_fraction = 0.25",
            'column = "fold"',
            'heart.toml:25: data.split.column: means nothing while method is "stratified"; set "column", or remove it',
        ),
        (
            'method = "stratified"',
            'method = "column"',
            "heart.toml:25: data.split.test_fraction: means nothing while method is",
        ),
        (
            "epochs = 4",
            "epochs = 4\nsteps = 10",
            "heart.toml:31: training.epochs: epochs and steps are two ways to say how much a site trains; remove one",
        ),
        (
            "epochs = 4",
            'epochs = 4\noptimiser = "adam"\nmomentum = 0.9',
            'heart.toml:33: training.momentum: only "sgd" has a momentum, and the optimiser is "adam"; remove one',
        ),
        (
            'target = "binary"',
            'target = "multiclass"',
            "heart.toml:4: task.classes: multiclass needs the label's values",
        ),
        (
            'name = "age"',
            'name = "a\\u001b[31m"',
            "heart.toml:13: data.columns[0].name: must not have control characters",
        ),
        ("format = 1", 'format = 1\ndescription = "\\u0000"', "heart.toml:2: description: must not have control char"),
    ],
)
def test_what_cannot_be_together_is_told_where_it_stands(old: str, new: str, message: str) -> None:
    """Each key is right by itself; the line names the one to change, and why."""
    (line,) = told(changed(old, new))
    assert message in line


def test_everything_wrong_is_told_at_once_in_the_file_s_order() -> None:
    """One run of the check suffices; what has no line comes last."""
    text = changed("epochs = 4", "epocs = 4").replace("mu = 1", "mu = []").replace("[model]", "[modell]")
    assert [line.split(": ")[:2] for line in told(text)] == [
        ["heart.toml:27", "modell"],
        ["heart.toml:31", "training.epocs"],
        ["heart.toml:36", "strategy.mu"],
        ["heart.toml", "model"],
    ]


def test_the_expectation_is_also_told_by_itself() -> None:
    """Programs get the path, the line and the expectation apart from the sentence."""
    _, problems = check(changed("epochs = 4", "epochs = 0"))
    expected = "a whole number from 1 to 1000"
    assert problems == (JobProblem("training.epochs", 31, f"expected {expected}, found 0", expected),)


def test_parsing_raises_every_problem_for_the_author() -> None:
    """One line for each, with the source's name."""
    with pytest.raises(ConfigurationError) as refused:
        parse(changed("epochs = 4", "epocs = 4").replace("format = 1", "format = 2"), "heart.toml")
    assert refused.value.who is WhoActs.AUTHOR
    assert [line.split(": ")[1] for line in str(refused.value).splitlines()] == ["format", "training.epocs"]


DP = 'churn = "dp"\n[privacy.differential_privacy]\nlevel = "site"\nepsilon = 4.0\ndelta = 0.001'


@pytest.mark.parametrize(
    ("privacy", "problem"),
    [
        (
            'secure_aggregation = "plain"\nclip = 5.0',
            "privacy.clip: belongs to secure aggregation; plain aggregation does not heed it",
        ),
        (
            "weights = [10, 50_000]",
            "privacy.weights: must be the least and the largest weight, which may be at most 4096 times as large",
        ),
        (
            'churn = "open"\nweighting = "records"',
            'privacy.weighting: must be "uniform" with open churn: a missing site would show its number of records',
        ),
        ('cells = [["a", "b", "c"], ["d", "b", "e"]]', 'privacy.cells: the site "b" stands twice'),
        (
            'churn = "open"\ngroups = true',
            'privacy.groups: needs churn "cells", as each group is one whole cell; set one of them otherwise',
        ),
        (
            'secure_aggregation = "plain"\ngroups = true',
            "privacy.groups: belongs to secure aggregation; plain aggregation does not heed it",
        ),
        (
            'churn = "dp"',
            'privacy.churn: "dp" needs a table [privacy.differential_privacy] with level = "site", an epsilon',
        ),
        (
            DP.replace('churn = "dp"', ""),
            'privacy.differential_privacy.level: "site" belongs to churn "dp", and churn is "cells"; set one of them',
        ),
        (
            DP.replace('churn = "dp"', 'churn = "open"'),
            'privacy.differential_privacy.level: "site" belongs to churn "dp", and churn is "open"; set one of them',
        ),
        (
            f'secure_aggregation = "plain"\n{DP}',
            "privacy.differential_privacy: belongs to secure aggregation; plain aggregation does not heed it",
        ),
        (
            f"groups = true\n{DP}",
            'privacy.groups: needs churn "cells", as each group is one whole cell; set one of them otherwise',
        ),
        (
            f'weighting = "records"\n{DP}',
            'privacy.weighting: must be "uniform" with churn "dp": a sum with noise is divided by its number of sites',
        ),
        (
            f"bound = 1.0\n{DP}",
            'privacy.bound: means nothing with churn "dp", where an update is cut to its clip alone; remove it',
        ),
        (
            f"weights = [10, 20]\n{DP}",
            'privacy.weights: means nothing with churn "dp", where an update is cut to its clip alone; remove it',
        ),
        (
            DP.replace('level = "site"', ""),
            'privacy.differential_privacy.level: missing; expected "site"',
        ),
        (DP.replace("4.0", "21"), "privacy.differential_privacy.epsilon: expected a number above 0 and of at most 20"),
        (DP.replace("0.001", "0"), "privacy.differential_privacy.delta: expected a number above 0 and of at most 0.1"),
        (f"{DP}\nclip = 1.0", "privacy.differential_privacy.clip: unknown key; expected one of level, epsilon, delta"),
    ],
)
def test_privacy_that_contradicts_itself_is_refused(privacy: str, problem: str) -> None:
    """Each key by its path."""
    lines = told(changed('secure_aggregation = "plain"', privacy))
    assert any(problem in line for line in lines), lines


MEDIAN = JOB.replace('name = "fedprox"\nmu = 1', 'name = "median"')
NEEDS = 'the strategy "median" needs the mean update of each of at least 3 groups of sites'


@pytest.mark.parametrize(
    ("privacy", "minimum", "problem"),
    [
        (
            "",
            9,
            (
                f"heart.toml:35: strategy.name: {NEEDS}, and secure aggregation shows only the sum over all of them; "
                'set privacy.groups = true, or choose a strategy that needs only the sum, such as "fedavg"'
            ),
        ),
        (
            'groups = true\ncells = [["a", "b", "c"], ["d", "e", "f"]]',
            6,
            f"heart.toml:50: privacy.cells: {NEEDS}, and these are 2; name 3 cells or more",
        ),
        (
            DP,
            9,
            (
                f'heart.toml:35: strategy.name: {NEEDS}, and churn "dp" shows only the noisy sum over all of them; '
                'choose a strategy that needs only the sum, such as "fedavg"'
            ),
        ),
        (
            'secure_aggregation = "plain"',
            2,
            f"heart.toml:45: cohort.minimum_sites: {NEEDS}, each site being one here; ask for 3 sites or more",
        ),
    ],
)
def test_a_strategy_without_the_groups_that_it_must_see_is_refused(privacy: str, minimum: int, problem: str) -> None:
    """In the file, where its author mends it: by its line, with the way out."""
    text = MEDIAN.replace("minimum_sites = 3", f"minimum_sites = {minimum}")
    assert told(text.replace('secure_aggregation = "plain"', privacy)) == [problem]


@pytest.mark.parametrize(
    "privacy", ["groups = true", 'groups = true\ncells = [["a"], ["b"], ["c"]]', 'secure_aggregation = "plain"']
)
def test_a_strategy_with_its_groups_is_a_job(privacy: str) -> None:
    """The roster's cells, named ones, and under plain aggregation each site."""
    job = parse(MEDIAN.replace('secure_aggregation = "plain"', privacy))
    assert job.strategy.fewest_groups == 3
    assert parse(JOB).strategy.fewest_groups == 0


def test_more_sites_than_can_sum_together_are_refused_in_groups_too() -> None:
    """RosterSum's roster holds 100; what the author can do stands beside it. Plain aggregation takes more."""
    many = JOB.replace("minimum_sites = 3", "minimum_sites = 101")
    assert parse(many).cohort.minimum_sites == 101
    for privacy in ("", "groups = true"):
        (line,) = told(many.replace('secure_aggregation = "plain"', privacy))
        assert line == (
            "heart.toml:46: cohort.minimum_sites: asks for 101 sites under secure aggregation; at most 100 sites can "
            "sum together, in groups too; name those that take part in cohort.sites, or, if the policy of every site "
            'allows it, set privacy.secure_aggregation = "plain"'
        )
    sites = [f"s{number}" for number in range(101)]
    (line,) = told(
        changed("minimum_sites = 3", f"minimum_sites = 3\nsites = {sites}").replace('secure_aggregation = "plain"', "")
    )
    assert "cohort.sites: asks for 101 sites under secure aggregation" in line


def test_noise_pays_for_the_planned_rounds_and_some_that_come_to_nothing() -> None:
    """A tenth more, rounded up, unless the author says how many; uniform weights may be named."""
    job = parse(changed('secure_aggregation = "plain"', f'weighting = "uniform"\n{DP}'))
    table = job.privacy.differential_privacy
    assert table is not None
    assert [table.charged(rounds) for rounds in (1, 10, 11, 20)] == [2, 11, 13, 22]
    spare = parse(changed('secure_aggregation = "plain"', f"{DP}\nspare_rounds = 0")).privacy.differential_privacy
    assert spare is not None
    assert spare.charged(20) == 20
    assert table.level == "site"


def test_secure_aggregation_is_the_default_and_plain_needs_its_line() -> None:
    """A job without the table, and one with an empty table, are summed securely over whole cells."""
    for line in ('[privacy]\nsecure_aggregation = "plain"\n', 'secure_aggregation = "plain"'):
        assert parse(changed(line, "")).privacy == Privacy()
    assert (Privacy().secure_aggregation, Privacy().churn) == ("rostersum", "cells")


def test_an_empty_file_misses_every_table() -> None:
    """Nothing is assumed."""
    assert {line.split(": ")[1] for line in told("")} == {
        "format", "name", "task", "data", "model", "strategy", "rounds", "cohort",
    }  # fmt: skip


def test_at_most_fifty_problems_are_told_and_the_others_counted() -> None:
    """A file of nonsense does not flood the screen."""
    lines = told(JOB + "".join(f"k{number} = 1\n" for number in range(53)))
    assert len(lines) == 51
    assert lines[-1] == "heart.toml: and 3 more problems"
    assert told(JOB + "".join(f"k{number} = 1\n" for number in range(51)))[-1] == "heart.toml: and 1 more problem"


def test_thousands_of_problems_are_counted_without_wording_each() -> None:
    """The count goes on beyond what is put in words."""
    lines = told(JOB + "".join(f"k{number} = 1\n" for number in range(3000)))
    assert lines[-1] == "heart.toml: and 2950 more problems"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"format = 1", "heart.toml: a job file is a text, not bytes"),
        (None, "heart.toml: a job file is a text, not NoneType"),
        ("a" * (LARGEST + 1), f"heart.toml: the text has {LARGEST + 1} bytes; a job file has {LARGEST} at most"),
        ("\udc80", "heart.toml: the text is not valid Unicode; save it as UTF-8"),
        ("\ufeff" + JOB, "heart.toml:1: the text begins with a byte-order mark; save it as UTF-8 without one"),
        ("a = 1\x00", "heart.toml:1: not valid TOML: Expected newline or end of document after a statement"),
        ("\na = " + "[" * 500_000, "heart.toml:2: more than 32 levels of tables or lists; no job needs so many"),
        ("\na = " + "{a = " * 100_000, "heart.toml:2: more than 32 levels of tables or lists; no job needs so many"),
        ("\n" + "a." * 500_000 + "a = 1", "heart.toml:2: more than 32 levels of tables or lists"),
        ("\n[" + "a . " * 200_000 + "a]", "heart.toml:2: more than 32 levels of tables or lists"),
        ("\n" + '"a".' * 200_000 + "a = 1", "heart.toml:2: more than 32 levels of tables or lists"),
        ("a = [\n" + "1," * 500_000 + "]", "heart.toml:2: more than 100000 values up to here; no job needs so many"),
        ("'" * 1_000_000, "heart.toml:1: not valid TOML"),
        ('a = "' + '\\"' * 500_000, "heart.toml:1: not valid TOML"),
    ],
)
def test_hostile_input_is_refused_and_nothing_worse(text: str, message: str) -> None:
    """Neither the parser's stack nor its memory can be used up: such text never reaches it."""
    (line,) = told(text)
    assert message in line


@given(st.text(max_size=200))
@settings(deadline=None, max_examples=50)
def test_random_text_is_refused_and_nothing_worse(text: str) -> None:
    """No text breaks the check."""
    assert told(text)


@given(st.integers(0, len(JOB)), st.integers(0, 12), st.text(st.sampled_from("[]{}=,.#\"'\\\n\r 1aé\x00"), max_size=8))
@settings(deadline=None, max_examples=50)
def test_a_mutated_job_is_a_job_or_has_problems_on_its_lines(place: int, cut: int, put: str) -> None:
    """Whatever is cut out or put in, the answer is a job or problems whose lines exist."""
    text = JOB[:place] + put + JOB[place + cut :]
    job, problems = check(text)
    assert (job is None) == bool(problems)
    assert all(0 <= problem.line <= text.count("\n") + 1 for problem in problems)


@given(st.sampled_from(sorted(set(re.findall(r"^(\w+) =", JOB, re.MULTILINE)))), st.sampled_from(
    ["3", "-1", "0.5", "nan", "true", '""', '"x"', "[]", "[[]]", "{}", "{a = [1]}", "1979-05-27 07:32:00", "'''\n'''"]
))  # fmt: skip
@settings(deadline=None, max_examples=50)
def test_any_value_under_any_key_is_a_job_or_has_problems_at_that_key(key: str, value: str) -> None:
    """A single wrong value is told at its own line, or at the table whose plug-in it makes unknown."""
    lines = JOB.splitlines(keepends=True)
    number = next(index for index, line in enumerate(lines) if line.startswith(f"{key} ="))
    lines[number] = f"{key} = {value}\n"
    _, problems = check("".join(lines))
    assert not problems or number + 1 in {problem.line for problem in problems}


FAKE_TASK = '''
from typing import Literal
from federation.errors import ConfigurationError
from federation.job import TaskSettings

class Settings(TaskSettings):
    """Settings."""
    kind: Literal["faketask"]
    depth: int = 3

def check_job(job):
    if job.task.depth > 3:
        raise ConfigurationError("task.depth: too deep for this task", fix="choose at most 3")
    if job.task.depth < 0:
        raise ConfigurationError("this task does not like the job: at all")
'''


@pytest.fixture
def _fake_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A task that someone has just put into its room."""
    (tmp_path / "faketask.py").write_text(FAKE_TASK)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    plugins.names.cache_clear()
    yield
    plugins.names.cache_clear()


@pytest.mark.usefixtures("_fake_task")
def test_a_new_task_file_is_checked_like_the_others() -> None:
    """Its settings, its keys and what it refuses are told with their places."""
    text = changed('kind = "tabular"\ntarget = "binary"', 'kind = "faketask"\ndepth = 3')
    assert parse(text).task.kind == "faketask"
    assert told(text.replace("depth = 3", "dept = 3")) == [
        'heart.toml:6: task.dept: unknown key; expected one of kind, depth; did you mean "depth"?'
    ]
    assert told(text.replace("depth = 3", "depth = 4")) == [
        "heart.toml:6: task.depth: too deep for this task; choose at most 3"
    ]
    assert told(text.replace("depth = 3", "depth = -1")) == ["heart.toml: this task does not like the job: at all"]
