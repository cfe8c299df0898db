"""The terms that a job file, a roster and a task come to: made by the coordinator, and made again by every site."""

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from federation.errors import ConfigurationError, WhoActs
from federation.job import Job, Privacy
from federation.messages import MembershipStatement, StepKind, StepStart
from federation.sums import SumField
from privacy.crypto import canonical
from privacy.differential_privacy.rotation import padded
from privacy.secure_aggregation.rostersum.terms import (
    FEWEST_SITES,
    GUARD_WORDS,
    Churn,
    Codec,
    DpCodec,
    FieldsCodec,
    Kind,
    Mechanism,
    Member,
    Noise,
    Plan,
    Ring,
    Roster,
    StatField,
    Terms,
    Thresholds,
    TrainCodec,
    Weighting,
    cell_sites,
    default_c_max,
    default_g_max,
    default_thresholds,
    org_floor,
    propose_cells,
)

if TYPE_CHECKING:
    from privacy.secure_aggregation.rostersum.promise import SitePromise

__all__ = ["args_of", "foreseen", "index_of", "model_size", "plan_id", "seats", "task_digest", "terms_of"]

_PLANS = {StepKind.STATISTICS: 1, StepKind.TRAIN: 2, StepKind.EVALUATE: 3}
_KINDS = {StepKind.STATISTICS: Kind.STAT, StepKind.TRAIN: Kind.TRAIN, StepKind.EVALUATE: Kind.EVAL}


def plan_id(kind: StepKind) -> int:
    """The number of the plan by which steps of a kind are summed."""
    return _PLANS[kind]


def model_size(plan: Plan) -> int:
    """Values of a model of which a train plan sums updates; with churn "dp", what its updates are padded to.

    `terms_of` makes the same plan of it either way.
    """
    return plan.words - GUARD_WORDS - (0 if isinstance(plan.codec, DpCodec) else 1)


def args_of(step: StepStart) -> bytes:
    """What a step's `args_hash` is the SHA-256 of: nothing for statistics, else the preparation and the round."""
    if step.kind is StepKind.STATISTICS or step.preparation is None:
        return b""
    return canonical.enc(step.preparation.digest, step.round)


def task_digest(job: Job) -> bytes:
    """What names the work of a job: its task, contract, model and local training, as this release reads them."""
    return hashlib.sha256(job.model_dump_json(include={"task", "data", "model", "training"}).encode()).digest()


def seats(roster: Sequence[MembershipStatement]) -> tuple[MembershipStatement, ...]:
    """The sites of a roster in the order of their indices: by organisation and name."""
    return tuple(sorted(roster, key=lambda member: (member.organisation, member.name)))


def index_of(roster: Sequence[MembershipStatement], name: str) -> int:
    """The index of a site of the roster.

    Raises:
        ConfigurationError: The roster does not hold it.
    """
    for index, member in enumerate(seats(roster)):
        if member.name == name:
            return index
    raise ConfigurationError(f"the roster does not hold the site {name!r}", fix="name sites that take part in the job")


def terms_of(
    job: Job,
    job_id: bytes,
    roster: Sequence[MembershipStatement],
    coordinator_vk: bytes,
    model_size: int,
    statistics: tuple[SumField, ...],
    evaluation: tuple[SumField, ...],
) -> Terms:
    """The terms of a job. Whether sites may accept them is for `rules.broken` and their floors.

    Args:
        job: The job file.
        job_id: 16 bytes, fresh for each job.
        roster: The statements of its sites, in any order.
        coordinator_vk: The coordinator's protocol key.
        model_size: Values of its model.
        statistics: Totals of the statistics step; none where there is no such step.
        evaluation: Totals of an evaluation.

    Raises:
        ConfigurationError: The job names cells of sites that the roster does not hold, too few sites for any, a
            strategy that needs more groups than there are, or a guarantee that no noise gives.
    """
    privacy = job.privacy
    members = seats(roster)
    held = Roster(coordinator_vk, tuple(Member(each.organisation, each.name, each.protocol_key) for each in members))
    if len(members) < 2:  # noqa: PLR2004 - with one site there is no organisation to collude with
        raise ConfigurationError(
            "secure aggregation needs at least 3 sites of 3 organisations",
            fix="invite more sites",
            who=WhoActs.CONSORTIUM,
        )
    n = len(members)
    c_max = default_c_max(n) if privacy.colluding_sites is None else privacy.colluding_sites
    orgs = held.orgs
    g_max = privacy.colluding_organisations
    g_max = default_g_max(c_max, orgs) if g_max is None else g_max
    cells = _cells(job, held, members, c_max, g_max)
    digest = task_digest(job)

    def plan(kind: StepKind, churn: Churn, ring: Ring, words: int, codec: Codec, at: Thresholds) -> Plan:
        group = privacy.groups and kind is StepKind.TRAIN  # statistics and evaluations pool all cells
        numbers = int(group), at.m_min, at.o_min, at.t if privacy.rescue else 0
        noise = _noise(job, codec, n, at.m_min, c_max) if isinstance(codec, DpCodec) else None
        return Plan(
            plan_id(kind), _KINDS[kind], churn, *numbers, ring, words, digest, privacy.rows_minimum, codec, noise
        )

    whole = _thresholds(job, n, c_max, g_max, Churn.CELLS, cells, group=False)

    plans = [
        plan(kind, Churn.CELLS, Ring.LONG, sum(field.width for field in fields) + GUARD_WORDS, _fields(fields), whole)
        for kind, fields in ((StepKind.STATISTICS, statistics), (StepKind.EVALUATE, evaluation))
        if fields
    ]
    churn = Churn(privacy.churn)
    at = _thresholds(job, n, c_max, g_max, churn, cells, group=privacy.groups)
    codec, words = _train(privacy, n, model_size)
    plans.append(plan(StepKind.TRAIN, churn, Ring.WORD, words, codec, at))
    plans.sort(key=lambda each: each.plan_id)
    return Terms(job_id, held, c_max, g_max, int(privacy.post_quantum), cells, tuple(plans))


def _thresholds(
    job: Job, n: int, c_max: int, g_max: int, churn: Churn, cells: tuple[tuple[int, ...], ...], *, group: bool
) -> Thresholds:
    """The thresholds of a plan; where any site may be missing the job's own quorum, if it is not below what is safe."""
    if churn is Churn.CELLS:
        return default_thresholds(n, c_max, g_max, churn, cells, group=group)
    m_min = min(n, max(cell_sites(c_max), job.cohort.needed))
    t = n + c_max + 1 - m_min
    return Thresholds(m_min, org_floor(g_max), t if t < m_min else 0)


def _cells(
    job: Job, roster: Roster, members: tuple[MembershipStatement, ...], c_max: int, g_max: int
) -> tuple[tuple[int, ...], ...]:
    """The cells that the job names; else all sites are one, or with groups as many as the roster allows."""
    privacy, fewest = job.privacy, job.strategy.fewest_groups
    if privacy.cells:
        return tuple(sorted(tuple(sorted(index_of(members, name) for name in cell)) for cell in privacy.cells))
    if not privacy.groups:
        return (tuple(range(len(members))),)
    cells = propose_cells(roster, c_max, g_max)
    if len(cells) < fewest:
        raise ConfigurationError(
            f"the strategy {job.strategy.name!r} needs {fewest} groups of sites, and {len(members)} sites of "
            f"{roster.orgs} organisations make {len(cells)} of at least {cell_sites(c_max)} sites of "
            f"{org_floor(g_max)} organisations each",
            fix="invite more sites, lower privacy.colluding_sites as far as every site's policy allows, or choose a "
            'strategy that needs only the sum, such as "fedavg"',
        )
    return cells


def _train(privacy: Privacy, n: int, size: int) -> tuple[Codec, int]:
    """How updates are encoded, and the words of one."""
    if privacy.churn == "dp":
        dimension = padded(size)
        return DpCodec(dimension), dimension + GUARD_WORDS
    weighting = privacy.weighting or ("records" if privacy.churn == "cells" else "uniform")
    q_bits = 31 - n.bit_length()  # n * (2^q_bits - 1) < 2^31
    bound = privacy.clip if privacy.bound is None else privacy.bound
    codec = TrainCodec(bound, privacy.clip, q_bits, Weighting(weighting), *privacy.weights)
    return codec, 1 + size + GUARD_WORDS


def _noise(job: Job, codec: DpCodec, n: int, m_min: int, c_max: int) -> Noise:
    """The noise that keeps the job's promise over all rounds that may be charged, whatever set of sites is summed."""
    from privacy.secure_aggregation.rostersum import promise  # its accountants take memory that other jobs need not pay

    wanted = job.privacy.differential_privacy
    if wanted is None:
        raise ConfigurationError('churn "dp" is without a guarantee', fix="add a table [privacy.differential_privacy]")
    if wanted.delta > 1 / (10 * n):
        raise ConfigurationError(
            f"delta = {wanted.delta:g} would allow that one of {n} sites is laid open",
            fix=f"set privacy.differential_privacy.delta to at most 1/(10 * {n}) = {1 / (10 * n):g}",
        )
    rounds, law = wanted.charged(job.rounds.maximum), Mechanism.DDGAUSS
    aim = promise.Aim(wanted.epsilon, wanted.delta, rounds, job.privacy.clip, law)
    return promise.calibrated(aim, codec.dimension, n, m_min, c_max)


def foreseen(job: Job, sites: int | None = None, values: int | None = None) -> "SitePromise | None":
    """What a job with noise promises among so many sites, or as few as it may begin with; None of a job without.

    How many values the model has, which no job file says, changes its noise in the third digit at most.

    Args:
        job: The job file.
        sites: Sites of its roster.
        values: Values of its model; 1,024 where nobody knows.

    Raises:
        ConfigurationError: No noise gives what it promises, or it would promise nothing.
    """
    from privacy.secure_aggregation.rostersum import promise

    if job.privacy.churn != "dp":
        return None
    n = sites or max(FEWEST_SITES, job.cohort.minimum_sites, len(job.cohort.sites))
    asked = job.privacy.colluding_sites
    c_max = default_c_max(n) if asked is None else asked
    at = _thresholds(job, n, c_max, 0, Churn.DP, (tuple(range(n)),), group=False)
    noise = _noise(job, DpCodec(padded(values or _TYPICAL)), n, at.m_min, c_max)
    wanted = job.privacy.differential_privacy
    return promise.SitePromise(
        epsilon=wanted.epsilon if wanted else math.inf,
        delta=noise.delta,
        rounds=noise.rounds,
        clip=noise.clip,
        z=noise.z,
        law=noise.mechanism,
        sites=n,
        colluding=max(1, c_max),
        shares=at.m_min - max(1, c_max),
    )


_TYPICAL = 1 << 10
"""Values of a model, where the model is not known."""


def _fields(fields: tuple[SumField, ...]) -> FieldsCodec:
    return FieldsCodec(tuple(StatField(each.name, each.width, each.frac, each.low, each.high) for each in fields))
