"""`parley job check` and `parley job new` tell and write job files, and run nothing."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from federation import plugins
from federation.errors import ConfigurationError
from federation.job import LARGEST, CategoricalColumn, Job, NumericColumn, Privacy, digest, parse
from parley.commands import job_files

APP = typer.Typer()
APP.command()(job_files.check)
APP.command()(job_files.new)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with the example."""
    path = tmp_path / "heart.toml"
    path.write_text(job_files.example())
    return path


def run(*arguments: object) -> Result:
    """One call of a command; nothing but an exit code may come out of it."""
    result = CliRunner().invoke(APP, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def one_line(text: str) -> str:
    """`text` without the line breaks that fit it to a screen."""
    return re.sub(r"\s+", " ", text)


# ------------------------------------------------------------------------------------------------------- the example


def test_the_example_is_a_valid_job_with_heart_disease_s_contract() -> None:
    """Ten columns, their public ranges, and the label."""
    job = parse(job_files.example())
    numeric = {c.name: (c.range, c.unit, c.missing) for c in job.data.columns if isinstance(c, NumericColumn)}
    categorical = {c.name: c.categories for c in job.data.columns if isinstance(c, CategoricalColumn)}
    assert numeric == {
        "age": ((0, 120), "years", "refuse"),
        "trestbps": ((0, 260), "mmHg", "mean"),
        "chol": ((0, 700), "mg/dl", "mean"),
        "thalach": ((40, 250), "bpm", "mean"),
        "oldpeak": ((-5, 10), "mm", "mean"),
    }
    assert categorical == {"sex": (0, 1), "cp": (1, 2, 3, 4), "fbs": (0, 1), "restecg": (0, 1, 2), "exang": (0, 1)}
    assert [c.name for c in job.data.columns if isinstance(c, NumericColumn) and c.zero_is_missing] == ["chol"]
    assert job.data.label == "disease"


def schema_keys(schema: Mapping[str, Any]) -> Iterator[str]:
    """Every key of every table in a JSON schema."""
    yield from schema.get("properties", {})
    for definition in schema.get("$defs", {}).values():
        yield from schema_keys(definition)


def test_the_example_shows_every_key_and_every_plug_in() -> None:
    """Nothing that a job file may say is left out, those of every installed plug-in included."""
    keys, names = set(schema_keys(Job.model_json_schema())), set()
    for room in ("tasks", "tasks.models", "strategies"):
        for name in plugins.names(room):
            names.add(name)
            keys |= set(schema_keys(plugins.load(room, name).Settings.model_json_schema()))
    shown = set(re.findall(r"^(?:# )?\[*(?:\w+\.)*(\w+)(?:\]| =)", job_files.example(), re.MULTILINE))
    assert keys - shown == set()
    assert {name for name in names if name not in job_files.example()} == set()


def test_the_defaults_that_the_example_tells_are_the_defaults() -> None:
    """An optional key behind `#` stands with the default of the value that does not set it."""
    sections: dict[str, dict[str, Any]] = {}
    section = ""
    for line in job_files.example().splitlines():
        if header := re.match(r"\[+([\w.]+)\]", line):
            section = header[1]
        elif re.match(r"# \w+ = ", line) and "no default" not in line and "default: " not in line:
            sections.setdefault(section, {}).update(tomllib.loads(line.removeprefix("# ")))
    job = parse(job_files.example())
    settings = {name: plugins.load("strategies", name).Settings(name=name) for name in plugins.names("strategies")}
    assert sections["training"] == {key: getattr(job.training, key) for key in sections["training"]}
    assert sections["data.split"] == {"column": job.data.split.column}
    assert Privacy.model_validate(sections["privacy"]) == Privacy(weighting="records")  # unless churn is open
    assert sections["model"] == {
        "hidden": [32],
        "dropout": plugins.load("tasks.models", "mlp").Settings(name="mlp").dropout,
    }
    assert sections["strategy"] == {
        "learning_rate": settings["fedavg"].learning_rate,
        "mu": settings["fedprox"].mu,
        "momentum": settings["fedavgm"].momentum,
        "beta1": settings["fedadam"].beta1,
        "beta2": settings["fedyogi"].beta2,
        "tau": settings["fedadagrad"].tau,
        "beta": settings["trimmed_mean"].beta,
    }


# --------------------------------------------------------------------------------------------------------------- new


def test_new_writes_the_example_and_says_what_comes_next(tmp_path: Path) -> None:
    """The file is the example, byte for byte, and passes the check."""
    path = tmp_path / "job.toml"
    result = run("new", path)
    assert (result.exit_code, path.read_bytes()) == (0, job_files.example().encode())
    assert f"parley job check {path}" in result.stderr
    assert run("check", path).exit_code == 0


def test_new_without_a_file_prints_the_example() -> None:
    """Standard output has the example and nothing else."""
    result = run("new")
    assert (result.exit_code, result.stdout) == (0, job_files.example())


def test_new_does_not_overwrite_unless_told_to(file: Path) -> None:
    """A file that is there stays; the message says how to overwrite it."""
    file.write_text("mine")
    result = run("new", file)
    assert (result.exit_code, file.read_text()) == (2, "mine")
    assert "heart.toml is there already and stays as it is. To overwrite it, add --force" in result.stderr
    assert run("new", file, "--force").exit_code == 0
    assert file.read_text() == job_files.example()


def test_new_names_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """No traceback, but the cause."""
    result = run("new", tmp_path / "nowhere" / "job.toml")
    assert result.exit_code == 2
    assert "cannot write" in result.stderr
    assert "No such file or directory" in result.stderr


# ------------------------------------------------------------------------------------------------------------- check


def test_check_tells_a_right_job_in_plain_words(file: Path) -> None:
    """What is learned, from what, by whom, and who sees what."""
    result = run("check", file)
    words = one_line(result.stdout)
    assert (result.exit_code, result.stderr) == (0, "")
    for expected in [
        "heart-disease: no problems found",
        "tabular: target binary, standardise federated",
        "chol: number from 0 to 700 mg/dl, 0 means missing; a missing value becomes the mean over all sites",
        "cp: one of 1, 2, 3, 4; a missing value is refused",
        "20% of each site's rows, drawn there (seed 0)",
        "Model logistic_regression",
        "4 passes over the rows in batches of 64 at each site and round, sgd with learning rate 0.3",
        "fedavg: learning_rate 1.0",
        "at most 50; stops after 8 rounds in which loss got no better; the final model is the best by auc",
        "waits for 4 sites (any member that serves the data set); a round counts with 4 of them",
        "No record leaves its site. The coordinator sees sums over many sites (RosterSum) and no site's own update",
        digest(file.read_text()).hex(),
    ]:
        assert expected in words


def test_check_tells_what_plain_aggregation_shows(file: Path) -> None:
    """A job has it only by a line of its own."""
    assert parse(job_files.example()).privacy == Privacy()
    file.write_text(file.read_text().replace('# secure_aggregation = "rostersum"', 'secure_aggregation = "plain"'))
    words = one_line(run("check", file).stdout)
    assert "No record leaves its site. The coordinator sees each site's update" in words
    assert "only if its policy allows that" in words


def test_check_tells_the_other_choices_too(file: Path) -> None:
    """Steps, a column's split, named sites, a constant, and no early stop."""
    text = file.read_text()
    for old, new in [
        ("epochs = 4", "steps = 10\nmomentum = 0.9"),
        ('method = "stratified"', 'method = "column"'),
        ("test_fraction = 0.2", ""),
        ("seed = 0 ", "# "),
        ("minimum_sites = 4", 'minimum_sites = 2\nsites = ["north", "south"]\nquorum = 1'),
        ('metric = "loss"', 'metric = "auc"'),
        ('best_metric = "auc"', ""),
        ('zero_is_missing = false\nmissing = "refuse"', "missing = 55"),
        ('name = "logistic_regression"', 'name = "mlp"\nhidden = [8, 4]'),
        ('label = "disease"', 'label = "disease"\nlabel_above = 0'),
    ]:
        assert old in text
        text = text.replace(old, new, 1)
    file.write_text(text)
    words = one_line(run("check", file).stdout)
    for expected in [
        "10 steps in batches of 64 at each site and round, sgd with learning rate 0.3, momentum 0.9",
        'those in which column "split" says test',
        "waits for 2 sites (only north, south); a round counts with 1 of them",
        "the final model is the last round's",
        "age: number from 0 to 120 years; a missing value becomes 55",
        "mlp: hidden 8, 4, dropout 0.0",
        "whether disease is above 0",
    ]:
        assert expected in words


def test_check_prints_every_problem_on_standard_error(file: Path) -> None:
    """Each in one unbroken line, exit code 2, and nothing on standard output."""
    file.write_text(file.read_text().replace("epochs = 4", "epocs = 4").replace('"fedavg"', '"fedavgg"'))
    result = run("check", file)
    first, second = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.match(rf"{re.escape(str(file))}:\d+: training\.epocs: unknown key; expected one of epochs, .*\?", first)
    assert re.match(rf"{re.escape(str(file))}:\d+: strategy\.name: expected one of .*did you mean \"fedavg\"\?", second)


def test_check_prints_json_for_programs(file: Path) -> None:
    """A right job has its digest and all its values; a wrong one its problems; both are one JSON object."""
    right = run("check", file, "--json")
    report = json.loads(right.stdout)
    assert (right.exit_code, report["ok"], report["problems"]) == (0, True, [])
    assert report["digest"] == digest(file.read_text()).hex()
    assert (report["job"]["strategy"], report["job"]["training"]["batch_size"]) == (
        {"name": "fedavg", "learning_rate": 1.0},
        64,
    )
    file.write_text("format = 2\n" + file.read_text().replace("format = 1", ""))
    wrong = run("check", file, "--json")
    report = json.loads(wrong.stdout)
    assert (wrong.exit_code, report["ok"], report["job"]) == (2, False, None)
    assert report["problems"] == [
        {"path": "format", "line": 1, "problem": "expected 1, found 2", "expected": "1"},
    ]


def test_a_summary_prints_no_markup_or_control_characters(file: Path) -> None:
    """What an author writes is text to the terminal, never a command."""
    file.write_text(file.read_text().replace("Heart disease from", "[red]Heart[/red] [/] disease from"))
    assert "[red]Heart[/red] [/] disease" in one_line(run("check", file).stdout)
    file.write_text('"\\u001b[31m" = 1\n')
    assert "\x1b" not in run("check", file).stderr


UNREADABLE: list[tuple[bytes | None, str]] = [
    (None, "cannot read .*heart.toml: No such file or directory.*`parley job new FILE` writes an example"),
    (b"a = 1\nb = '\xff'\n", "heart.toml:2: not UTF-8 text.*save the file as UTF-8"),
    (b"#" * (LARGEST + 1), f"heart.toml has more than {LARGEST} bytes"),
]


@pytest.mark.parametrize(("content", "message"), UNREADABLE)
def test_a_file_that_cannot_be_read_is_told(file: Path, content: bytes | None, message: str) -> None:
    """Exit code 2 with the cause, in words and as JSON."""
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    told, report = run("check", file), run("check", file, "--json")
    assert (told.exit_code, report.exit_code) == (2, 2)
    assert re.search(message, told.stderr)
    parsed = json.loads(report.stdout)
    assert (parsed["ok"], parsed["digest"], len(parsed["problems"])) == (False, None, 1)
    assert re.search(message, parsed["problems"][0]["problem"])
    with pytest.raises(ConfigurationError, match=message):
        job_files.load(file)


def test_a_folder_is_no_job_file(tmp_path: Path) -> None:
    """No traceback, but the cause."""
    result = run("check", tmp_path)
    assert (result.exit_code, "Is a directory" in result.stderr) == (2, True)


def test_load_gives_the_job_and_its_text_byte_for_byte(file: Path) -> None:
    """The digest is that of the file, whatever its line endings."""
    content = job_files.example().replace("\n", "\r\n").encode()
    file.write_bytes(content)
    job, text = job_files.load(file)
    assert (job.name, text.encode()) == ("heart-disease", content)


def test_load_raises_every_problem(file: Path) -> None:
    """With the file's name and line."""
    file.write_text(file.read_text().replace("epochs = 4", "epocs = 4"))
    with pytest.raises(ConfigurationError, match=r"heart\.toml:\d+: training\.epocs: unknown key"):
        job_files.load(file)


def test_checking_a_job_needs_no_heavy_library() -> None:
    """Whoever reads a job, the coordinator too, does not pay for torch or pandas."""
    code = (
        "import sys; from federation.job import parse; from parley.commands.job_files import example; parse(example());"
        "sys.exit(' '.join({'torch', 'pandas', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "\n"


DP = 'churn = "dp"\n[privacy.differential_privacy]\nlevel = "site"\nepsilon = 4.0\ndelta = 0.001'


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        (
            "",
            "Nobody may be missing from a sum: each round waits for all sites, and no subtraction of sums shows one of",
        ),
        ('churn = "open"', "The price: whoever sees two sums that differ by one site can subtract them"),
        (DP, "Any site may be missing from a sum of updates. The price is noise in each"),
        (DP, "(epsilon = 4, delta = 0.001)-indistinguishable"),
        (DP, "those of 4 sites, the fewest that it begins with. Each value of a mean over all of them has noise of"),
        (DP, "Outside it: statistics and evaluations are exact sums over whole cells"),
        (DP.replace("0.001", "0.1"), "None: delta = 0.1 would allow that one of 4 sites is laid open. To fix"),
        ("colluding_sites = 2", "That holds while at most 2 sites work together with the coordinator."),
        (
            'cells = [["a", "b", "c"], ["d", "e", "f"]]',
            "A sum holds whole cells of sites (2 cells): one missing site keeps its cell out",
        ),
    ],
)
def test_check_tells_who_may_be_missing_from_a_sum_and_its_price(file: Path, privacy: str, words: str) -> None:
    """Secure aggregation is what a job has that does not ask for plain."""
    file.write_text(f"{file.read_text()}{privacy}\n")
    told = one_line(run("check", file).stdout)
    assert words in told
    assert "no site's own update" in told


@pytest.mark.parametrize(
    ("privacy", "asked"),
    [
        ("rows_minimum = 25", 25),
        ("rows_minimum = 25\nweights = [30, 40_960]", 30),
        ('rows_minimum = 25\nweights = [30, 40_960]\nweighting = "uniform"', 25),
        ('churn = "open"\nweights = [30, 40_960]\nrows_minimum = 11', 11),
    ],
)
def test_check_tells_what_a_site_s_policy_needs_to_answer_a_number_of_rows(
    file: Path, privacy: str, asked: int
) -> None:
    """The larger of the rows asked for and, where records weigh, the least weight: with both a site is compared."""
    file.write_text(f"{file.read_text()}{privacy}\n")
    told = one_line(run("check", file).stdout)
    assert (
        f"It asks for {asked} rows at each site: a site refuses it unless its policy has rows_asked_most = {asked}"
        in told
    )


def test_check_says_nothing_of_rows_that_every_site_answers(file: Path) -> None:
    """Ten rows, and weights from ten on, are what a policy allows that says nothing of them."""
    assert "rows_asked_most" not in run("check", file).stdout
