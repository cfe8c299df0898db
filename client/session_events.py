"""What happens to a site, and what it wants done: events and effects of `session.py`."""

from dataclasses import dataclass

from client.policy import Policy
from federation.blobs import BlobRef
from federation.errors import ParleyError
from federation.findings import Finding
from federation.messages import (
    DeclineCause,
    FromCoordinator,
    FromSite,
    JobOffer,
    MembershipStatement,
    RevocationList,
    StepStart,
)
from privacy.identity import RootCertificate
from privacy.secure_aggregation.rostersum import site_events as sums

__all__ = [
    "Assigned",
    "CheckData",
    "Connected",
    "Contribute",
    "DataChecked",
    "Disconnect",
    "Disconnected",
    "Effect",
    "Event",
    "Fetch",
    "Fetched",
    "Forget",
    "Held",
    "JobResumed",
    "Keep",
    "KeepRevocations",
    "MaskFailed",
    "Note",
    "Paused",
    "Received",
    "Record",
    "Remembered",
    "Send",
    "SiteIdentity",
    "StopUploads",
    "TableFacts",
    "Upload",
    "UploadMasked",
    "Uploaded",
    "Work",
    "WorkFailed",
    "Worked",
]


@dataclass(frozen=True, slots=True)
class SiteIdentity:
    """Who this site is and whom it trusts."""

    statement: MembershipStatement
    root: RootCertificate
    revocations: RevocationList


@dataclass(frozen=True, slots=True)
class TableFacts:
    """What secure aggregation asks of a table: its version, and whether it is large enough; none of it is sent.

    Attributes:
        digest: SHA-256 that names the table's version.
        rows: Rows to train on.
        test_rows: Rows to test on.
        rarest: Rows of the rarest class; None where there are no classes.
    """

    digest: bytes
    rows: int
    test_rows: int
    rarest: int | None


@dataclass(frozen=True, slots=True)
class Assigned:
    """The work that a TRAIN of secure aggregation asks for, and the step that it is of.

    Attributes:
        step: What the coordinator said of the step before.
        work: What the machine of secure sums wants done.
        update: Names the result, in this process alone, until it is erased.
    """

    step: StepStart
    work: sums.Work
    update: str

    @property
    def job(self) -> str:
        """The job's id."""
        return self.step.job


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Connected:
    """A stream is open; `nonce` is fresh from the operating system."""

    nonce: bytes
    software: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The stream has ended."""


@dataclass(frozen=True, slots=True)
class Received:
    """The coordinator said something; `policy` is the site's policy as its file states it now."""

    message: FromCoordinator
    policy: Policy


@dataclass(frozen=True, slots=True)
class DataChecked:
    """The data set was held against the job's contract; `table` says what was read, where it could be."""

    job: str
    findings: tuple[Finding, ...]
    table: TableFacts | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """The step's payloads are here."""

    step: StepStart | Assigned


@dataclass(frozen=True, slots=True)
class Worked:
    """The step's work is done; its result lies ready as `payload`."""

    step: StepStart
    payload: BlobRef
    weight: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Held:
    """The work is done and its result, found finite, is held until it is erased; `table` was read for it."""

    assigned: Assigned
    table: bytes


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """What was being done, a job's check or a step, cannot be done here."""

    subject: JobOffer | StepStart | Assigned
    cause: DeclineCause
    problem: str


@dataclass(frozen=True, slots=True)
class MaskFailed:
    """A held result cannot be masked here."""

    mask: sums.Mask
    problem: str


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The coordinator holds the step's result, durably."""

    step: StepStart


@dataclass(frozen=True, slots=True)
class Paused:
    """The site's administrator has paused it (`paused`), or let it go on."""

    paused: bool


@dataclass(frozen=True, slots=True)
class JobResumed:
    """The site's administrator has looked into a job that waited for it, and lets it go on."""

    job: str


Event = (
    Connected
    | Disconnected
    | Received
    | DataChecked
    | Fetched
    | Worked
    | Held
    | WorkFailed
    | MaskFailed
    | Uploaded
    | Paused
    | JobResumed
    | sums.Masked
    | sums.UploadDone
    | sums.Drifted
    | sums.TimePassed
)
"""What happens to a site; the last four are for its machine of secure sums."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """A job of which this site holds a result that was not counted yet."""

    offer: JobOffer
    result: Worked


# ------------------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class Send:
    """Says something to the coordinator."""

    message: FromSite


@dataclass(frozen=True, slots=True)
class CheckData:
    """Holds the data set against the job's contract; answers `DataChecked` or `WorkFailed`."""

    offer: JobOffer


@dataclass(frozen=True, slots=True)
class Fetch:
    """Brings the step's payloads here; answers `Fetched`, or `Drifted` where the work limits how far a model moves."""

    step: StepStart | Assigned


@dataclass(frozen=True, slots=True)
class Work:
    """Does the step; answers `Worked` or `WorkFailed`."""

    step: StepStart
    offer: JobOffer


@dataclass(frozen=True, slots=True)
class Contribute:
    """Does the work and holds its result, found finite, for masking; answers `Held` or `WorkFailed`.

    `declared` is this site's public weight.
    """

    assigned: Assigned
    offer: JobOffer
    declared: int


@dataclass(frozen=True, slots=True)
class Upload:
    """Brings the result to the coordinator; answers `Uploaded`."""

    step: StepStart
    payload: BlobRef


@dataclass(frozen=True, slots=True)
class UploadMasked:
    """Brings a masked vector to the coordinator, beside other work; answers `UploadDone`."""

    job: str
    payload: sums.UploadPayload


@dataclass(frozen=True, slots=True)
class StopUploads:
    """Stops the uploads of masked vectors; those that still count are asked for again."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Drops what was kept for a job: its payloads and results; `job` empty: stops what is being done, and no more."""

    job: str


@dataclass(frozen=True, slots=True)
class Keep:
    """Remembers a job's result through a crash: durable before anything that follows it is performed."""

    remembered: Remembered


@dataclass(frozen=True, slots=True)
class KeepRevocations:
    """Stores a newer revocation list."""

    revocations: RevocationList


@dataclass(frozen=True, slots=True)
class Record:
    """Appends to the audit log, durably, before what follows is performed: kind and content of each entry."""

    entries: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Ends the attendance for good: whom we reached is not our coordinator, or does not want us."""

    reason: ParleyError


@dataclass(frozen=True, slots=True)
class Note:
    """Tells the site's administrator something; `trouble` when somebody should act."""

    text: str
    trouble: bool = False


Effect = (
    Send
    | CheckData
    | Fetch
    | Work
    | Contribute
    | Upload
    | UploadMasked
    | StopUploads
    | Keep
    | Forget
    | KeepRevocations
    | Record
    | Disconnect
    | Note
    | sums.Persist
    | sums.Mask
    | sums.Erase
    | sums.Abandon
)
"""What a site wants done; the last four are its machine of secure sums', performed as `site_events` says."""
