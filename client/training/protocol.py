"""What the agent asks of the trainer and what it answers: one JSON object a line, read back as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import pydantic

from federation.errors import LocalProtocolError
from federation.findings import Finding  # noqa: TC001 - pydantic reads the annotation at run time

__all__ = [
    "Answer",
    "CheckData",
    "ComputeStatistics",
    "Done",
    "Evaluate",
    "Failed",
    "FailureCause",
    "Report",
    "Request",
    "Subject",
    "Table",
    "Train",
    "Warm",
    "decode_answer",
    "decode_request",
    "encode",
]

FailureCause = Literal["data", "resources", "cancelled", "internal"]


@dataclass(frozen=True, slots=True)
class Subject:
    """The job (its TOML text), the data set's name, and the folder of the registry that knows the name."""

    job: str
    dataset: str
    registry: str


@dataclass(frozen=True, slots=True)
class Warm:
    """Import torch now, so that the first round does not wait for it."""

    kind: Literal["warm"] = "warm"


@dataclass(frozen=True, slots=True)
class CheckData:
    """Read the data anew and check it against the job's contract; `Done.findings` tells what was found."""

    subject: Subject
    kind: Literal["check"] = "check"


@dataclass(frozen=True, slots=True)
class ComputeStatistics:
    """Write this site's share of the federated statistics to `output`, as little-endian float64."""

    subject: Subject
    output: str
    kind: Literal["statistics"] = "statistics"


@dataclass(frozen=True, slots=True)
class Train:
    """Train from the safetensors file `model` and write local minus global model to `output`, little-endian float32.

    `site` and `round_number` seed the order of the rows, together with the job's own seed. `proximal` is the strategy's
    local term. `threads` is for torch: one is fastest for small models.
    """

    subject: Subject
    site: str
    round_number: int
    model: str
    preparation: str
    output: str
    proximal: float = 0.0
    threads: int = 1
    kind: Literal["train"] = "train"


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Write this site's share of the evaluation of `model` on its test rows to `output`, as little-endian float64."""

    subject: Subject
    model: str
    preparation: str
    output: str
    threads: int = 1
    kind: Literal["evaluate"] = "evaluate"


Request = Warm | CheckData | ComputeStatistics | Train | Evaluate


@dataclass(frozen=True, slots=True)
class Report:
    """What this site's own people see of the work; none of it is sent. `loss` is the mean over the last epoch."""

    device: str = ""
    precision: str = ""
    reason: str = ""
    rows: int = 0
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """What was read for a job under secure aggregation; none of it is sent.

    `digest` names the table's version: SHA-256, in hexadecimal, of its columns and of all rows in their order. `rows`
    and `test_rows` are those left to train and to test on, `rarest` the training rows of the class that has the fewest
    (0 where one has none); None where there are no classes.
    """

    digest: str
    rows: int
    test_rows: int
    rarest: int | None


@dataclass(frozen=True, slots=True)
class Done:
    """It is done: `length` values lie at the output path (0 when none was asked for).

    `weight` is the number of rows behind them, `seconds` the time from request to answer. `table` is of jobs under
    secure aggregation alone, and of none whose data is refused.
    """

    length: int = 0
    weight: float = 0.0
    seconds: float = 0.0
    findings: tuple[Finding, ...] = ()
    report: Report = Report()
    table: Table | None = None
    kind: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class Failed:
    """It is not done and nothing lies at the output path; `message` is for this site's people and shows no record."""

    cause: FailureCause
    message: str
    kind: Literal["failed"] = "failed"


Answer = Done | Failed

_REQUEST: pydantic.TypeAdapter[Request] = pydantic.TypeAdapter(Annotated[Request, pydantic.Discriminator("kind")])
_ANSWER: pydantic.TypeAdapter[Answer] = pydantic.TypeAdapter(Annotated[Answer, pydantic.Discriminator("kind")])


def encode(message: Request | Answer) -> bytes:
    """The message as one line of JSON, line feed included."""
    if isinstance(message, Answer):
        return _ANSWER.dump_json(message) + b"\n"
    return _REQUEST.dump_json(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """The request on `line`.

    Raises:
        LocalProtocolError: It is none.
    """
    try:
        return _REQUEST.validate_json(line)
    except pydantic.ValidationError as broken:
        raise LocalProtocolError("the trainer was sent a line that is no request") from broken


def decode_answer(line: bytes) -> Answer:
    """The answer on `line`.

    Raises:
        LocalProtocolError: It is none.
    """
    try:
        return _ANSWER.validate_json(line)
    except pydantic.ValidationError as broken:
        raise LocalProtocolError("the trainer sent a line that is no answer") from broken
