"""What a page shows, read from the store as frozen values. No Streamlit, no clock: the time is an argument."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from coordinator.records import JobRecord, JobSite, ModelRecord, Outcome, Share, SitePresence, StepRecord
from coordinator.store import StoreReader
from dashboard import words
from federation import disclosure, plugins
from federation.errors import ConfigurationError
from federation.job import Job, parse
from federation.messages import JobState, StepKind

__all__ = ["Headline", "JobChoice", "JobPage", "RoundRow", "SiteRow", "choices", "page"]

SILENT_SECONDS = 60.0
"""A site that was attending and has not been told of for so long: the coordinator no longer tells."""

_SLOW = 2.0
"""A site that works so many times longer than the next slowest holds the others back."""
_NOTICEABLE_SECONDS = 1.0
_IDLE = frozenset({"ready", "attending", "away", "refused"})
"""States of a site of which nobody waits for an answer to a step."""


@dataclass(frozen=True, slots=True)
class JobChoice:
    """A job that can be picked."""

    id: str
    name: str
    state: JobState
    submitted: float


@dataclass(frozen=True, slots=True)
class Headline:
    """A metric of the last evaluated round and its change against the one before (None: there is none)."""

    name: str
    value: float
    change: float | None
    lower_is_better: bool


@dataclass(frozen=True, slots=True)
class SiteRow:
    """One site: is it here, what it does, what it cost so far, and what is wrong with it, in words.

    `last_seen` is the seconds since it was heard, None if it never was. `holds_back` is whether the job waits for it,
    or would go on faster without it.
    """

    name: str
    organisation: str
    attending: bool
    last_seen: float | None
    doing: str
    seconds: float
    bytes: int
    trouble: str
    holds_back: bool


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round with what its steps measured and cost: `seconds` by the clock, `work` the seconds of each site."""

    number: int
    metrics: Mapping[str, float]
    seconds: float
    work: Mapping[str, float]
    bytes: int


@dataclass(frozen=True, slots=True)
class JobPage:
    """All that the page on a job shows. `maximum` is None where the job file cannot be read by this release.

    `silent` is the seconds for which the coordinator has told nothing of a job that is not over, 0 while it tells.
    `withheld` is why metrics of the last evaluation are not shown, empty where they are.
    """

    id: str
    name: str
    state: JobState
    reason: str
    submitted: float
    seconds: float
    round: int
    maximum: int | None
    best_round: int
    headlines: tuple[Headline, ...]
    sites: tuple[SiteRow, ...]
    rounds: tuple[RoundRow, ...]
    bytes: int
    silent: float
    text: str
    model: ModelRecord | None
    withheld: str

    @property
    def attending(self) -> int:
        """How many sites of the roster attend."""
        return sum(site.attending for site in self.sites)

    @property
    def held_by(self) -> tuple[SiteRow, ...]:
        """The sites that hold the job back."""
        return tuple(site for site in self.sites if site.holds_back)


def choices(store: StoreReader) -> tuple[JobChoice, ...]:
    """All jobs, the newest first."""
    return tuple(JobChoice(job.id, job.name, job.state, job.submitted) for job in store.jobs())


def page(store: StoreReader, job: str, now: float) -> JobPage | None:
    """The page on this job as it stands at `now` (unix seconds); None when there is no such job."""
    record = store.job(job)
    if record is None:
        return None
    steps = store.steps(job)
    presence = {site.name: site for site in store.presence()}
    silent = 0.0 if record.state.over else _silence(record, presence, now)
    description = _description(record)
    rounds = _rounds(steps)
    return JobPage(
        id=record.id,
        name=record.name,
        state=record.state,
        reason=record.reason,
        submitted=record.submitted,
        seconds=max(0.0, (record.ended or now) - (record.started or record.submitted)),
        round=record.round,
        maximum=description.rounds.maximum if description else None,
        best_round=record.best_round,
        headlines=_headlines(rounds, description),
        sites=_sites(record, steps, presence, now, silent),
        rounds=rounds,
        bytes=sum(row.bytes for row in rounds),
        silent=silent,
        text=record.text,
        model=_shown(store.model(job)),
        withheld=disclosure.withheld(next((step.metrics for step in reversed(steps) if step.metrics), ())),
    )


def _shown(model: ModelRecord | None) -> ModelRecord | None:
    return None if model is None else replace(model, metrics=disclosure.shown(model.metrics))


def _description(record: JobRecord) -> Job | None:
    try:
        return parse(record.text, record.id)
    except ConfigurationError:  # of another release, or with a plug-in that is not installed here
        return None


# -------------------------------------------------------------------------------------------------------------- rounds


def _rounds(steps: tuple[StepRecord, ...]) -> tuple[RoundRow, ...]:
    by_round = defaultdict[int, list[StepRecord]](list)
    for step in steps:
        by_round[step.round].append(step)
    return tuple(_round(number, of_round) for number, of_round in sorted(by_round.items()))


def _round(number: int, steps: list[StepRecord]) -> RoundRow:
    work = defaultdict[str, float](float)
    for share in _shares(steps):
        work[share.site] += share.seconds
    evaluations = [step.metrics for step in steps if step.kind is StepKind.EVALUATE]
    return RoundRow(
        number=number,
        metrics={metric.name: metric.value for metric in disclosure.shown(evaluations[-1] if evaluations else ())},
        seconds=sum(step.ended - step.started for step in steps),
        work=dict(sorted(work.items())),
        bytes=sum(share.bytes for share in _shares(steps)),
    )


def _shares(steps: list[StepRecord]) -> list[Share]:
    return [share for step in steps for share in step.shares]


def _headlines(rounds: tuple[RoundRow, ...], description: Job | None) -> tuple[Headline, ...]:
    """The two metrics that tell most: the one that the job chooses its best round by, then the task's own order."""
    evaluated = [row.metrics for row in rounds if row.metrics]
    if not evaluated:
        return ()
    better = plugins.load("tasks", description.task.kind).make(description).better if description else {}
    first = description.rounds.best_metric if description else None
    names = [name for name in evaluated[-1] if name in better or not better]
    names.sort(key=lambda name: (name != first, name in {"loss", "n"}))
    before = evaluated[-2] if len(evaluated) > 1 else {}
    return tuple(
        Headline(
            name=name,
            value=evaluated[-1][name],
            change=evaluated[-1][name] - before[name] if name in before else None,
            lower_is_better=better.get(name) == "lower",
        )
        for name in names[:2]
    )


# --------------------------------------------------------------------------------------------------------------- sites


def _silence(record: JobRecord, presence: Mapping[str, SitePresence], now: float) -> float:
    """Seconds for which the coordinator has told nothing of sites that were attending when it last did."""
    heard = [presence[member.name].last_seen for member in record.roster if _here(presence.get(member.name))]
    silence = now - max(heard) if heard else 0.0
    return silence if silence > SILENT_SECONDS else 0.0


def _here(site: SitePresence | None) -> bool:
    return site is not None and site.connected


def _sites(
    record: JobRecord,
    steps: tuple[StepRecord, ...],
    presence: Mapping[str, SitePresence],
    now: float,
    silent: float,
) -> tuple[SiteRow, ...]:
    answers = {site.site: site for site in record.sites}
    seconds = defaultdict[str, float](float)
    moved = defaultdict[str, int](int)
    for share in _shares(list(steps)):
        seconds[share.site] += share.seconds
        moved[share.site] += share.bytes
    rows = []
    for member in record.roster:
        seen = presence.get(member.name)
        here = _here(seen) and not silent
        trouble, holds_back = _trouble(record, steps, presence, member.name, answers.get(member.name))
        last_seen = None if seen is None else max(0.0, now - seen.last_seen)
        row = SiteRow(
            name=member.name,
            organisation=member.organisation,
            attending=here,
            last_seen=last_seen,
            doing=seen.state if seen is not None and here else "",
            seconds=seconds[member.name],
            bytes=moved[member.name],
            trouble=trouble,
            holds_back=holds_back and not silent,
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: (not row.holds_back, row.name)))


def _trouble(
    record: JobRecord,
    steps: tuple[StepRecord, ...],
    presence: Mapping[str, SitePresence],
    name: str,
    answer: JobSite | None,
) -> tuple[str, bool]:
    """What is wrong with a site, in words, and whether the job is held back by it; the gravest cause alone."""
    if answer is not None and answer.answer == "refused":
        causes = [f"{each.path}: {each.problem}" for each in answer.findings if each.level == "refusal"]
        return f"refused the job: {'; '.join(causes) or 'it said no more'}", record.state is JobState.WAITING
    answered = record.state is not JobState.WAITING or (answer is not None and answer.answer != "")
    held = "" if record.state.over else _held(record, steps, presence, name, answered=answered)
    return (held, True) if held else (_last_share(steps, name), False)


def _held(
    record: JobRecord, steps: tuple[StepRecord, ...], presence: Mapping[str, SitePresence], name: str, *, answered: bool
) -> str:
    """The words on a site for which a job that is not over waits, empty where it does not."""
    seen = presence.get(name)
    if seen is None:
        return "has never attended"
    if seen.trouble or not seen.connected:
        return seen.trouble or "is not attending"
    if not answered:
        return "has not answered the job's offer yet"
    if seen.state not in _IDLE and _others_are_done(record, presence, name):
        return f"the others are done; it is {seen.state}"
    return _slow(steps, name)


def _others_are_done(record: JobRecord, presence: Mapping[str, SitePresence], name: str) -> bool:
    others = (presence.get(member.name) for member in record.roster if member.name != name)
    return any(site is not None and site.connected and site.state == "ready" for site in others)


def _slow(steps: tuple[StepRecord, ...], name: str) -> str:
    """The words on a site that worked far longer than all others in the last training step, empty if it did not."""
    trained = next((step for step in reversed(steps) if step.kind is StepKind.TRAIN), None)
    if trained is None:
        return ""
    work = sorted((share.seconds, share.site) for share in trained.shares if share.outcome is Outcome.COUNTED)
    if len(work) < 2 or work[-1][1] != name:  # noqa: PLR2004 - slower than another one
        return ""
    (next_slowest, _), (longest, _) = work[-2:]
    if longest < max(_NOTICEABLE_SECONDS, _SLOW * next_slowest):
        return ""
    return f"worked {words.span(longest)} in round {trained.round}, the next slowest {words.span(next_slowest)}"


def _last_share(steps: tuple[StepRecord, ...], name: str) -> str:
    """The words on a site whose part in the last step that asked it did not count, empty if it did."""
    for step in reversed(steps):
        for share in step.shares:
            if share.site == name:
                if share.outcome is Outcome.COUNTED:
                    return ""
                cause = f": {share.cause}" if share.cause else ""
                return f"{share.outcome.value} in round {step.round}{cause}"
    return ""
