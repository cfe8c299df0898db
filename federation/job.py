"""The job file: one TOML text that describes a training run, as frozen, validated types."""

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import AfterValidator, ConfigDict, Field, SerializeAsAny, Strict, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from federation import plugins
from federation.errors import ConfigurationError
from federation.job_problems import JobProblem, Schema, describe, problem_at
from federation.toml_lines import KeyPath, excess, lines

__all__ = [
    "LARGEST",
    "NAME",
    "CategoricalColumn",
    "Cohort",
    "Column",
    "DataContract",
    "DifferentialPrivacy",
    "EarlyStop",
    "Frozen",
    "Job",
    "JobProblem",
    "ModelSettings",
    "NumericColumn",
    "Privacy",
    "Rounds",
    "Split",
    "StrategySettings",
    "TaskSettings",
    "Training",
    "check",
    "digest",
    "parse",
]

NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
"""What jobs and data sets may be called: safe in file names, addresses and terminals."""
LARGEST = 1024 * 1024
"""Bytes that a job file may have."""

_DEEPEST = 32
"""Brackets within brackets, or parts of one key; the deepest real key has four."""
_MOST_VALUES = 100_000
_MOST_PROBLEMS = 50
_MOST_ERRORS = 2_000
"""Errors that are put in words; hostile text can hold a hundred times as many."""
_MOST_ITEMS = 10_000
_COUNT = 1_000_000_000
"""Bound of whole numbers that have no tighter one: each fits 32 bits on the wire."""
_MOST_SUMMED = 100
"""Sites of one roster under RosterSum (its text, section 0)."""
_WIDEST = 1e30
"""Bound of public ranges: the square of a value stays finite, however many are summed."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise PydanticCustomError("printable", "must not have control characters")
    return text


def _printable_lines(text: str) -> str:
    _printable(re.sub(r"[\n\t]|\r\n", "", text))
    return text


_NAME_WORDS = "a name of 1 to 63 small letters, digits, dots, hyphens and underscores"
_Name = Annotated[str, Field(pattern=NAME, json_schema_extra={"expected": _NAME_WORDS})]
_Word = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]
_Unit = Annotated[str, Field(max_length=40), AfterValidator(_printable)]
_Whole = Annotated[int, Field(ge=-(2**63), lt=2**63, json_schema_extra={"expected": "a whole number"})]
_Seed = Annotated[int, Field(ge=0, lt=2**63, json_schema_extra={"expected": "a whole number from 0 to 2^63 - 1"})]
_AsTuple = Strict(strict=False)
"""Takes TOML's list where a frozen value has a tuple; the items stay exact."""
_Choices = Field(min_length=2, max_length=_MOST_ITEMS)


class Frozen(pydantic.BaseModel):
    """A value of the job file: immutable, exact in its types, without unknown keys.

    A whole number may stand for any number; otherwise nothing is converted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def contradictions(self) -> Iterator[tuple[KeyPath, str]]:
        """What cannot be although each key is right by itself: where (below this table) and why."""
        yield from ()

    @model_validator(mode="after")
    def _free_of_contradictions(self) -> Self:
        found = [
            InitErrorDetails(type=PydanticCustomError("contradiction", "{why}", {"why": why}), loc=path, input=None)
            for path, why in self.contradictions()
        ]
        if found:
            raise ValidationError.from_exception_data(type(self).__name__, found)
        return self


class TaskSettings(Frozen):
    """What is learned. Each file in `tasks/` declares its own `Settings` below this, with its `kind`."""

    kind: str


class ModelSettings(Frozen):
    """The model. Each file in `tasks/models/` declares its own `Settings` below this, with its `name`."""

    name: str


class StrategySettings(Frozen):
    """How updates become the next model. Each file in `strategies/` declares its own `Settings` below this.

    Attributes:
        fewest_groups: Groups of sites whose mean updates the strategy must see one by one, without which it would not
            hold against one bad group; 0 for a strategy that needs no more than the sum over all sites.
    """

    fewest_groups: ClassVar[int] = 0
    name: str


class NumericColumn(Frozen):
    """A column of numbers with its unit and the public range in which every site's values must lie.

    `zero_is_missing` reads an impossible zero as not measured. `missing` says what a missing value becomes: the
    federation's mean, a constant, or a refusal.
    """

    name: _Word
    kind: Literal["numeric"]
    unit: _Unit = ""
    range: Annotated[tuple[float, float], _AsTuple]
    zero_is_missing: bool = False
    missing: Literal["refuse", "mean", "drop_row"] | float = "refuse"

    def contradictions(self) -> Iterator[tuple[KeyPath, str]]:
        """A range of nothing or of everything; a constant outside it."""
        low, high = self.range
        if low >= high:
            yield ("range",), f"the range must go from a lower to a higher number, not from {low:g} to {high:g}"
        elif max(-low, high) > _WIDEST:
            yield ("range",), f"the range must lie within -{_WIDEST:g} and {_WIDEST:g}"
        elif isinstance(self.missing, float) and not low <= self.missing <= high:
            yield ("missing",), f"the constant {self.missing:g} must lie in the range, {low:g} to {high:g}"


class CategoricalColumn(Frozen):
    """A column of categories; one-hot encoded, the first category (the reference) left out.

    A missing value is refused, takes the reference category, or gets a category of its own.
    """

    name: _Word
    kind: Literal["categorical"]
    unit: _Unit = ""
    categories: Annotated[tuple[_Word, ...], _AsTuple, _Choices] | Annotated[tuple[_Whole, ...], _AsTuple, _Choices]
    missing: Literal["refuse", "reference", "own_category", "drop_row"] = "refuse"

    def contradictions(self) -> Iterator[tuple[KeyPath, str]]:
        """A category that stands twice."""
        for index in _repeated(self.categories):
            yield ("categories", index), f"the category {_quoted(self.categories[index])} stands twice"


Column = Annotated[NumericColumn | CategoricalColumn, Field(discriminator="kind")]


class Split(Frozen):
    """Which rows train and which test.

    `column`: a column of the data says `train` or `test` (optional others are ignored).
    `stratified`: `test_fraction` of each class, drawn at the site from `seed`.
    """

    method: Literal["column", "stratified"] = "stratified"
    column: _Word = "split"
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    seed: _Seed = 0


class DataContract(Frozen):
    """What every site's data must be: columns with types, units and public ranges, the label, and enough rows."""

    dataset: _Name
    label: _Word
    label_above: float | None = None
    minimum_rows: int = Field(default=10, ge=2, le=_COUNT)
    columns: Annotated[tuple[Column, ...], _AsTuple, Field(min_length=1, max_length=_MOST_ITEMS)]
    split: Split = Split()

    def contradictions(self) -> Iterator[tuple[KeyPath, str]]:
        """A column that stands twice, or is what the model is to predict."""
        names = [column.name for column in self.columns]
        for index in _repeated(names):
            yield ("columns", index, "name"), f"the column {_quoted(names[index])} stands twice"
        if self.label in names:
            yield ("label",), f"the label {_quoted(self.label)} must not be one of the columns"


class Training(Frozen):
    """What a site does in one round: `epochs` passes over its rows, or `steps` batches when given."""

    epochs: int = Field(default=1, ge=1, le=1000)
    steps: int | None = Field(default=None, ge=1, le=_COUNT)
    batch_size: int = Field(default=32, ge=1, le=_COUNT)
    optimiser: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: float = Field(default=0.1, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    precision: Literal["auto", "fp32"] = "auto"
    seed: _Seed = 0

    def contradictions(self) -> Iterator[tuple[KeyPath, str]]:
        """A setting of another optimiser."""
        if self.momentum and self.optimiser != "sgd":
            yield ("momentum",), f'only "sgd" has a momentum, and the optimiser is "{self.optimiser}"; remove one'


class EarlyStop(Frozen):
    """Stops when `metric` has not got better by `minimum_gain` for `patience` rounds."""

    metric: _Word
    patience: int = Field(default=5, ge=1, le=_COUNT)
    minimum_gain: float = Field(default=0.0, ge=0)


class Rounds(Frozen):
    """How many rounds at most, how the best model is chosen, and when to stop early."""

    maximum: int = Field(ge=1, le=100_000)
    best_metric: _Word | None = None
    early_stop: EarlyStop | None = None


class Cohort(Frozen):
    """Who takes part: the job waits for `minimum_sites`; a round counts with `quorum` of them at its deadline."""

    minimum_sites: int = Field(ge=2, le=1000)
    sites: Annotated[tuple[_Word, ...], _AsTuple, Field(max_length=_MOST_ITEMS)] = ()
    quorum: int | None = Field(default=None, ge=1)
    deadline_seconds: float = Field(default=600.0, gt=0, le=604_800)

    def contradictions(self) -> Iterator[tuple[KeyPath, str]]:
        """A round that could never count, or a job that could never begin."""
        least, named = self.minimum_sites, len(self.sites)
        if self.quorum is not None and self.quorum > least:
            yield ("quorum",), f"the quorum of {self.quorum} must not be above minimum_sites, which is {least}"
        if self.sites and named < least:
            yield (
                ("sites",),
                f"names {named} site{'' if named == 1 else 's'}; minimum_sites asks for {least}",
            )
        for index in _repeated(self.sites):
            yield ("sites", index), f"the site {_quoted(self.sites[index])} stands twice"

    @property
    def needed(self) -> int:
        """Contributions without which a round does not count."""
        return self.quorum if self.quorum is not None else self.minimum_sites


class DifferentialPrivacy(Frozen):
    """The guarantee of a job with noise: what is protected (`level`), and how well. The noise is discrete Gaussian.

    `site`: all records of a site, so that nobody learns more than epsilon at delta of what it trained on. The noise is
    such that it holds over all rounds that may be charged: `rounds.maximum`, and `spare_rounds` more for rounds that
    were charged and came to nothing (by default a tenth of the maximum, rounded up).
    """

    level: Literal["site"]
    epsilon: float = Field(gt=0, le=20)
    delta: float = Field(gt=0, le=0.1)
    spare_rounds: int | None = Field(default=None, ge=0, le=100_000)

    def charged(self, maximum: int) -> int:
        """Rounds that may be charged, of a job of so many rounds at most."""
        return maximum + (-(-maximum // 10) if self.spare_rounds is None else self.spare_rounds)


class Privacy(Frozen):
    """What the coordinator may see: with `rostersum`, the default, sums of many sites and nothing of any one.

    `plain` shows it each site's update; that must stand here, and the sites' policies must allow it. The other keys
    are RosterSum's. `churn`: who may be missing from a sum; with `cells` (the default) a sum holds whole cells only, so
    that no two sums differ by one site; with `dp` any site may be missing from a sum of updates, each site adds its
    share of noise, and `differential_privacy` says how much; with `open` any site may be missing, and subtracting sums
    may show its update.
    `cells`: the sites of each cell; without it the whole roster is one, or with `groups` as many as it allows.
    `groups`: whether updates are summed in each cell by itself, as robust strategies need it: the coordinator sees one
    sum for each cell, and a cell with a missing site has none in that round, which counts if the others hold the
    quorum. `colluding_sites` and
    `colluding_organisations`: how many may collude with the coordinator; by default a third of the sites. `clip`: the
    largest L2 norm of an update, `bound`: the largest magnitude of one of its values (by default as large as `clip`).
    `weighting`: what a site weighs; records counts only in cells. `weights`: the least and the largest weight.
    `rows_minimum`: rows with which a site may take part. `rescue`: whether the others may end the round of a site that
    is lost after its upload. `post_quantum`: whether keys are agreed by ML-KEM-768 as well.
    """

    secure_aggregation: Literal["rostersum", "plain"] = "rostersum"
    churn: Literal["cells", "dp", "open"] = "cells"
    differential_privacy: DifferentialPrivacy | None = None
    cells: Annotated[tuple[Annotated[tuple[_Word, ...], _AsTuple], ...], _AsTuple, Field(max_length=_MOST_ITEMS)] = ()
    groups: bool = False
    colluding_sites: int | None = Field(default=None, ge=0, le=98)
    colluding_organisations: int | None = Field(default=None, ge=0, le=98)
    clip: float = Field(default=10.0, gt=0, le=1e9)
    bound: float | None = Field(default=None, gt=0, le=1e9)
    weighting: Literal["records", "uniform"] | None = None
    weights: Annotated[tuple[int, int], _AsTuple] = (10, 40_960)
    rows_minimum: int = Field(default=10, ge=10, le=1_000_000)
    rescue: bool = True
    post_quantum: bool = True

    def contradictions(self) -> Iterator[tuple[KeyPath, str]]:
        """Keys that plain aggregation does not heed; weights out of proportion; a site that stands in two cells."""
        least, most = self.weights
        if self.secure_aggregation == "plain":
            for key, field in type(self).model_fields.items():
                if key != "secure_aggregation" and getattr(self, key) != field.default:
                    yield (key,), "belongs to secure aggregation; plain aggregation does not heed it"
        if not 1 <= least <= most <= 4096 * least:
            yield ("weights",), "must be the least and the largest weight, which may be at most 4096 times as large"
        if self.groups and self.churn != "cells":
            yield ("groups",), 'needs churn "cells", as each group is one whole cell; set one of them otherwise'
        if self.weighting == "records" and self.churn == "open":
            yield ("weighting",), 'must be "uniform" with open churn: a missing site would show its number of records'
        if self.secure_aggregation != "plain":
            yield from self._noise()
        sites = tuple(site for cell in self.cells for site in cell)
        for index in _repeated(sites):
            yield ("cells",), f"the site {_quoted(sites[index])} stands twice"

    def _noise(self) -> Iterator[tuple[KeyPath, str]]:
        """Noise without a guarantee, a guarantee without noise, and keys that sums with noise do not heed."""
        table = "differential_privacy"
        if self.churn != "dp":
            if self.differential_privacy is not None:
                level = self.differential_privacy.level
                yield (table, "level"), f'"{level}" belongs to churn "dp", and churn is "{self.churn}"; set one of them'
            return
        if self.differential_privacy is None:
            needs = 'level = "site", an epsilon and a delta: they say how much noise the sites add'
            yield ("churn",), f'"dp" needs a table [privacy.{table}] with {needs}'
        if self.weighting not in (None, "uniform"):
            yield (
                ("weighting",),
                'must be "uniform" with churn "dp": a sum with noise is divided by its number of sites',
            )
        for key in ("weights", "bound"):
            if getattr(self, key) != type(self).model_fields[key].default:
                yield (key,), 'means nothing with churn "dp", where an update is cut to its clip alone; remove it'


class Job(Frozen):
    """One training run."""

    format: Literal[1]
    name: _Name
    description: Annotated[str, Field(max_length=10_000), AfterValidator(_printable_lines)] = ""
    task: SerializeAsAny[TaskSettings]
    data: DataContract
    model: SerializeAsAny[ModelSettings]
    training: Training = Training()
    strategy: SerializeAsAny[StrategySettings]
    rounds: Rounds
    cohort: Cohort
    privacy: Privacy = Field(default_factory=Privacy)

    @field_validator("format", mode="before")
    @classmethod
    def _exactly(cls, value: object) -> object:
        """Python takes true and 1.0 for 1; a job file does not."""
        return value if type(value) is int else None

    @field_validator("task", mode="before")
    @classmethod
    def _task(cls, value: object) -> object:
        return _plugin("task", value)

    @field_validator("model", mode="before")
    @classmethod
    def _model(cls, value: object) -> object:
        return _plugin("model", value)

    @field_validator("strategy", mode="before")
    @classmethod
    def _strategy(cls, value: object) -> object:
        return _plugin("strategy", value)

    def contradictions(self) -> Iterator[tuple[KeyPath, str]]:
        """More sites than can be summed together; a strategy that cannot have the groups that it must see."""
        if self.privacy.secure_aggregation != "plain":
            yield from self._too_many()
        fewest = self.strategy.fewest_groups
        if not fewest:
            return
        name, least, cells = self.strategy.name, self.cohort.minimum_sites, len(self.privacy.cells)
        needs = f'the strategy "{name}" needs the mean update of each of at least {fewest} groups of sites'
        if self.privacy.secure_aggregation == "plain":
            if least < fewest:
                yield ("cohort", "minimum_sites"), f"{needs}, each site being one here; ask for {fewest} sites or more"
        elif self.privacy.churn == "dp":
            fix = 'choose a strategy that needs only the sum, such as "fedavg"'
            yield ("strategy", "name"), f'{needs}, and churn "dp" shows only the noisy sum over all of them; {fix}'
        elif not self.privacy.groups:
            fix = 'set privacy.groups = true, or choose a strategy that needs only the sum, such as "fedavg"'
            yield ("strategy", "name"), f"{needs}, and secure aggregation shows only the sum over all of them; {fix}"
        elif 0 < cells < fewest:
            yield ("privacy", "cells"), f"{needs}, and these are {cells}; name {fewest} cells or more"

    def _too_many(self) -> Iterator[tuple[KeyPath, str]]:
        """A cohort that is larger than a roster may be, however it is grouped."""
        fix = (
            f"at most {_MOST_SUMMED} sites can sum together, in groups too; name those that take part in cohort.sites, "
            'or, if the policy of every site allows it, set privacy.secure_aggregation = "plain"'
        )
        for key, count in (("minimum_sites", self.cohort.minimum_sites), ("sites", len(self.cohort.sites))):
            if count > _MOST_SUMMED:
                yield ("cohort", key), f"asks for {count} sites under secure aggregation; {fix}"

    @model_validator(mode="after")
    def _together(self) -> Self:
        plugins.load("tasks", self.task.kind).check_job(self)
        return self


def check(text: str) -> tuple[Job | None, tuple[JobProblem, ...]]:
    """The job that `text` describes, or everything that is wrong with it, by line; at most 50 problems and a count.

    Never raises for what `text` holds, be it hostile.
    """
    document = _document(text)
    if isinstance(document, JobProblem):
        return None, (document,)
    job: Job | None = None
    found: list[JobProblem] = []
    unsaid = 0
    try:
        job = Job.model_validate(document)
    except ValidationError as wrong:
        errors = wrong.errors(include_url=False, include_input=False)
        unsaid = max(0, len(errors) - _MOST_ERRORS)
        found.extend(describe(errors[:_MOST_ERRORS], document, _schema(document), lines(text)))
    except ConfigurationError as refused:
        found.append(_plugin_refusal(refused, text))
    found.extend(problem_at(path, lines(text), problem) for path, problem in _idle(document))
    return (None, _bounded(found, unsaid)) if found else (job, ())


def parse(text: str, source: str = "job file") -> Job:
    """The job that `text` describes.

    Raises:
        ConfigurationError: With every problem, one a line: source, line, key path, what was expected, nearest key.
    """
    job, problems = check(text)
    if job is None:
        raise ConfigurationError("\n".join(problem.told(source) for problem in problems))
    return job


def digest(text: str) -> bytes:
    """SHA-256 of the job file's bytes: what sites and coordinator compare."""
    return hashlib.sha256(text.encode()).digest()


_ROOMS: Mapping[str, tuple[str, str]] = {
    "task": ("tasks", "kind"),
    "model": ("tasks.models", "name"),
    "strategy": ("strategies", "name"),
}
"""Tables that a plug-in describes: the room of its file, and the key that names it."""


def _settings(table: str, value: Mapping[str, Any]) -> type[Frozen] | None:
    """The settings class of the plug-in that `value` names; None when there is no such plug-in."""
    room, key = _ROOMS[table]
    if value.get(key) not in plugins.names(room):
        return None
    settings: type[Frozen] = plugins.load(room, value[key]).Settings
    return settings


def _plugin(table: str, value: object) -> object:
    """The settings that the plug-in named in the table makes of it."""
    if not isinstance(value, Mapping):
        return value
    settings = _settings(table, value)
    if settings is not None:
        return settings.model_validate(value)
    room, key = _ROOMS[table]
    known = ", ".join(plugins.names(room))
    wrong = InitErrorDetails(type="literal_error", loc=(key,), input=value.get(key), ctx={"expected": known})
    raise ValidationError.from_exception_data(table, [wrong])


def _schema(document: Mapping[str, object]) -> Schema:
    """The JSON schema of a job with the plug-ins that `document` names, as far as there are such."""
    schema = Job.model_json_schema()
    for table, (room, key) in _ROOMS.items():
        value = document.get(table)
        settings = _settings(table, value) if isinstance(value, Mapping) else None
        choice = {"type": "object", "properties": {key: {"enum": list(plugins.names(room))}}}
        schema["properties"][table] = settings.model_json_schema() if settings else choice
    return schema


def _document(text: str) -> dict[str, Any] | JobProblem:
    """The parsed text, or why it cannot be parsed."""
    refused = _refused_unread(text)
    if refused is not None:
        return refused
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as broken:
        return _syntax_problem(str(broken), text)
    except ValueError:  # Python reads no whole number of more than 4300 digits
        return JobProblem("", 0, "a number has too many digits")


def _refused_unread(text: object) -> JobProblem | None:
    """What keeps the text from the parser, whose time and memory hostile text could use up."""
    if not isinstance(text, str):
        return JobProblem("", 0, f"a job file is a text, not {type(text).__name__}")
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        return JobProblem("", 0, "the text is not valid Unicode; save it as UTF-8")
    if length > LARGEST:
        return JobProblem("", 0, f"the text has {length} bytes; a job file has {LARGEST} at most")
    if text.startswith("\ufeff"):
        return JobProblem("", 1, "the text begins with a byte-order mark; save it as UTF-8 without one")
    if too_much := excess(text, depth=_DEEPEST, values=_MOST_VALUES):
        line, what = too_much
        return JobProblem("", line, f"{what}; no job needs so many")
    return None


def _syntax_problem(message: str, text: str) -> JobProblem:
    place = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    if place is None:
        return JobProblem("", 0, f"not valid TOML: {message}")
    what = message[: place.start()]
    if place[1] is None:
        return JobProblem("", text.rstrip().count("\n") + 1, f"not valid TOML: {what} at the end of the file")
    return JobProblem("", int(place[1]), f"not valid TOML: {what} at column {place[2]}")


def _idle(document: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Keys that another key leaves without effect: whoever wrote both meant something that will not happen."""
    training = document.get("training")
    if isinstance(training, Mapping) and {"epochs", "steps"} <= training.keys():
        yield ("training", "epochs"), "epochs and steps are two ways to say how much a site trains; remove one"
    data = document.get("data")
    split = data.get("split") if isinstance(data, Mapping) else None
    if not isinstance(split, Mapping):
        return
    method = split.get("method", "stratified")
    for key, needed in (("column", "column"), ("test_fraction", "stratified"), ("seed", "stratified")):
        if key in split and method in ("column", "stratified") and method != needed:
            yield ("data", "split", key), f'means nothing while method is "{method}"; set "{needed}", or remove it'


def _plugin_refusal(refused: ConfigurationError, text: str) -> JobProblem:
    """What a task's `check_job` says: its message begins with the key's full path."""
    path, colon, problem = refused.problem.partition(": ")
    if not colon or re.fullmatch(r"[\w.\[\]-]+", path) is None:
        path, problem = "", refused.problem
    keys = (int(index) if index else key for key, index in re.findall(r"([\w-]+)|\[(\d+)\]", path))
    return problem_at(tuple(keys), lines(text), f"{problem}; {refused.fix}" if refused.fix else problem)


def _bounded(problems: Sequence[JobProblem], unsaid: int) -> tuple[JobProblem, ...]:
    """The first problems by line, those without one last, and how many more there are, `unsaid` ones included."""
    ordered = sorted(problems, key=lambda problem: (problem.line == 0, problem.line))
    more = max(0, len(ordered) - _MOST_PROBLEMS) + unsaid
    rest = (JobProblem("", 0, f"and {more} more problem{'s' if more > 1 else ''}"),) if more else ()
    return (*ordered[:_MOST_PROBLEMS], *rest)


def _repeated(values: Sequence[str] | Sequence[int]) -> Iterator[int]:
    """The positions of values that stood before."""
    seen: set[object] = set()
    for index, value in enumerate(values):
        if value in seen:
            yield index
        seen.add(value)


def _quoted(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
