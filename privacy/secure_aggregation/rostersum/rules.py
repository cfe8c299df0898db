"""What every site checks of a job's terms, rule by rule: each is broken by itself, and says how to mend it (section 2).

A site's own limits are not here but in `floor.py`: nothing a job says can move them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import floor, log, sqrt
from typing import TypeAlias

from federation.errors import ConfigurationError, IdentityError
from privacy.crypto import signatures
from privacy.secure_aggregation.rostersum.terms import (
    Churn,
    DpCodec,
    FieldsCodec,
    Kind,
    Mechanism,
    Noise,
    Path,
    Plan,
    RecordCodec,
    Ring,
    Roster,
    StatField,
    Terms,
    TrainCodec,
    Unit,
    Weighting,
    cell_sites,
    org_floor,
)

__all__ = ["MOST_SITES", "Broken", "Rule", "TermsError", "broken", "require"]

MOST_SITES = 100
"""Sites of a roster, however it is grouped (section 0)."""

_FEWEST_ROWS = 10
"""S1: the least that `rows_min` may be."""
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")
_WIDEST = 52
"""Bits of Q: dithered values are then exact integers of binary64."""
_MOST_WEIGHT_RATIO = 4096
_FIELDS_HEADROOM = 2.0**62
_LEAST_DIMENSION = 8
_LEAST_VARIANCE = 64.0
"""Of one site's share: below it the sum of shares is not close enough to one discrete Gaussian (L2 of the DP text)."""
_TAILS = 12
"""Standard deviations of noise that must fit the ring beside the data: a wrap then has probability below exp(-72)."""
_GAMMA = 2.0**-20
"""What floating point may add to a record's norm (DP text, section 2.3)."""
_FLATNESS = 4.0
"""k of section 7: standard deviations of a rotated coordinate that must fit the ring."""


_MOST_FACTOR = 2.0**64
"""Of a clip norm, scale or noise multiplier: no ring holds more, and their products stay finite below it."""


class Rule(StrEnum):
    """What a job can be refused for: rules of section 2 for all sites, then those that are a site's own."""

    ROSTER_SIZE = "3 to 100 sites"
    NAME = "names of [a-z0-9][a-z0-9.-]{0,62}"
    SITE_TWICE = "each (org, site) once"
    KEY_TWICE = "each key once"
    WEAK_KEY = "no key for which anybody can sign"
    C_MAX = "c_max <= n - 2"
    G_MAX = "g_max <= c_max"
    CELL_PARTITION = "cells are a partition"
    CELL_ORDER = "cells sorted"
    CELL_SITES = "sites of a cell"
    CELL_ORGS = "organisations of a cell"
    PLAN_TWICE = "each plan_id once"
    NO_PLAN = "at least one plan"
    M_MIN = "bounds of m_min"
    O_MIN = "bounds of o_min"
    ESCROW = "t + m_min >= n + c_max + 1"
    ESCROW_MOST = "t <= m_min - 1"
    GROUP_CHURN = "groups have churn cells"
    GROUP_SITES = "m_min of each group"
    GROUP_ORGS = "o_min of each group"
    GROUP_ESCROW = "t of each group"
    RING = "ring of a kind"
    CHURN = "churn of a kind"
    NOISE = "dp exactly with churn dp"
    CODEC = "codec of a plan"
    WORDS = "d of a codec"
    ROWS = "rows_min at least 10"
    WEIGHTS = "1 <= w_min <= w_max <= 4096 * w_min"
    WEIGHTING = "weights by records only in cells"
    CODEC_VALUES = "values of a codec"
    NOISE_VALUES = "values of a dp"
    HEADROOM = "sums fit the ring"

    FLOOR_C_MAX = "this site's c_max"
    FLOOR_G_MAX = "this site's g_max"
    FLOOR_ROSTER = "rosters compared by people"
    FLOOR_KIND = "this site's kinds"
    FLOOR_CHURN = "this site's churn of a kind"
    FLOOR_OPEN = "this site's allow_open"
    FLOOR_TASK = "this site's tasks"
    FLOOR_FAMILY = "this site's data families"
    FLOOR_ROWS = "this site's rows_min"
    LEDGER = "the family's budget"
    PIN = "the family's cell"
    SAMPLER = "noise that passes its test here"
    JOB_KNOWN = "a job is accepted once"
    ML_KEM = "ML-KEM-768 here"
    NOT_MEMBER = "this site stands in the roster"
    DATA_ROWS = "rows here"
    DATA_CLASSES = "rows of each class here"
    DATA_WEIGHT = "weight here"
    EXACT_PLANS = "exact statistics of a family"
    TABLE = "table version of a family"


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule that is broken: where, and how to mend it."""

    rule: Rule
    problem: str
    fix: str


class TermsError(ConfigurationError):
    """A job's terms break rules that no site may overlook."""

    def __init__(self, found: tuple[Broken, ...]) -> None:
        first, more = found[0], len(found) - 1
        super().__init__(first.problem + (f", and {more} more" if more else ""), fix=first.fix)
        self.found = found


_Found: TypeAlias = Iterator[Broken]


def broken(terms: Terms) -> tuple[Broken, ...]:
    """The rules these terms break, none where a site may go on to ask its own floor."""
    found = tuple(_roster(terms.roster)) or tuple(_partition(terms))
    if found:
        return found  # what follows reads the roster by the cells' indices
    found = (*_limits(terms), *_cells(terms))
    ids = [plan.plan_id for plan in terms.plans]
    if not ids:
        found += (Broken(Rule.NO_PLAN, "the job has no plan: nothing would be summed", "add a plan"),)
    if len(set(ids)) != len(ids):
        found += (Broken(Rule.PLAN_TWICE, f"two plans share a number among {ids}", "number each plan differently"),)
    for plan in terms.plans:
        found += (*_plan(terms, plan), *_vector(terms.n, plan), *_noise(terms, plan))
    return found


def require(terms: Terms) -> None:
    """Accepts terms that break no rule.

    Raises:
        TermsError: They break some; all are told.
    """
    if found := broken(terms):
        raise TermsError(found)


# --------------------------------------------------------------------------------------------------- roster and cells


def _roster(roster: Roster) -> _Found:
    members, n = roster.members, len(roster.members)
    if not 3 <= n <= MOST_SITES:  # noqa: PLR2004 - the text's own bound
        fix = f"name 3 to {MOST_SITES} sites in cohort.sites: more cannot sum together, not even in groups"
        yield Broken(Rule.ROSTER_SIZE, f"the roster has {n} sites", fix)
    for member in members:
        if not (_NAME.fullmatch(member.org) and _NAME.fullmatch(member.site)):
            yield Broken(Rule.NAME, f"a site cannot be called {member.name[:130]!r}", "use a-z 0-9 . and -, at most 63")
    if len({member.name for member in members}) != n:
        yield Broken(Rule.SITE_TWICE, "a site stands in the roster twice", "list each site once")
    if len({roster.coordinator_vk, *(member.vk for member in members)}) != n + 1:
        yield Broken(Rule.KEY_TWICE, "two parties of the roster have one key", "each must make its own identity key")
    for vk in (roster.coordinator_vk, *(member.vk for member in members)):
        try:
            signatures.refuse_weak_key(vk)
        except IdentityError as weak:
            yield Broken(Rule.WEAK_KEY, weak.problem, weak.fix)


def _limits(terms: Terms) -> _Found:
    if terms.g_max > terms.c_max:
        problem = f"g_max = {terms.g_max} organisations cannot be those of c_max = {terms.c_max} sites"
        yield Broken(Rule.G_MAX, problem, "choose g_max <= c_max")
    if terms.c_max > terms.n - 2:
        problem = f"with c_max = {terms.c_max} of {terms.n} sites no two honest ones are left"
        yield Broken(Rule.C_MAX, problem, f"choose c_max <= {terms.n - 2}")


def _partition(terms: Terms) -> _Found:
    indices = sorted(idx for cell in terms.cells for idx in cell)
    if indices != list(range(terms.n)) or not all(terms.cells):
        yield Broken(Rule.CELL_PARTITION, "some site is in no cell, or in two", "put each site into exactly one cell")


def _cells(terms: Terms) -> _Found:
    if list(terms.cells) != sorted(tuple(sorted(cell)) for cell in terms.cells):
        fix = "sort each cell, and the cells by their first member"
        yield Broken(Rule.CELL_ORDER, "the cells are not in order, so one partition would have two digests", fix)
    for cell in terms.cells:
        orgs = terms.roster.count_orgs(cell)
        if len(cell) < cell_sites(terms.c_max):
            problem = (
                f"cell {list(cell)} has {len(cell)} sites where c_max = {terms.c_max} needs {cell_sites(terms.c_max)}"
            )
            yield Broken(Rule.CELL_SITES, problem, "merge cells, or take one cell of all sites")
        if orgs < org_floor(terms.g_max):
            problem = f"cell {list(cell)} is of {orgs} organisations where g_max = {terms.g_max} needs "
            yield Broken(Rule.CELL_ORGS, problem + str(org_floor(terms.g_max)), "mix organisations within each cell")


# --------------------------------------------------------------------------------------------------------- one plan


def _plan(terms: Terms, plan: Plan) -> _Found:
    name, n = f"plan {plan.plan_id}", terms.n
    if not cell_sites(terms.c_max) <= plan.m_min <= n:
        problem = f"{name}: m_min = {plan.m_min} is not within {cell_sites(terms.c_max)}..{n}"
        yield Broken(Rule.M_MIN, problem, "choose m_min within these bounds")
    if not org_floor(terms.g_max) <= plan.o_min <= plan.m_min:
        problem = f"{name}: o_min = {plan.o_min} is not within {org_floor(terms.g_max)}..{plan.m_min}"
        yield Broken(Rule.O_MIN, problem, "choose o_min within these bounds")
    yield from _group(terms, plan, name) if plan.group else _escrow(terms, plan, name)
    if plan.kind is not Kind.TRAIN and plan.churn is Churn.OPEN:
        problem = f"{name}: exact sums of kind {plan.kind} over any set would show single sites by subtraction"
        yield Broken(Rule.CHURN, problem, "choose churn cells or dp")
    ring = _ring(plan)
    if plan.ring is not ring:
        problem = f"{name}: ring {plan.ring} is not what kind {plan.kind} with codec {plan.codec.TAG} is summed in"
        yield Broken(Rule.RING, problem, f"choose ring {ring}")
    if (plan.dp is not None) != (plan.churn is Churn.DP):
        problem = f"{name}: noise belongs to churn dp, which is {plan.churn} here"
        yield Broken(Rule.NOISE, problem, "state dp exactly where churn is dp")
    if plan.rows_min < _FEWEST_ROWS:
        problem = f"{name}: rows_min = {plan.rows_min} lets in tables in which each row stands out"
        yield Broken(Rule.ROWS, problem, f"choose rows_min >= {_FEWEST_ROWS}")


def _ring(plan: Plan) -> Ring:
    """The ring that a plan must have; section 7 sends record-level sums of every kind to 32 bits."""
    if isinstance(plan.codec, RecordCodec):
        return Ring.WORD
    return plan.ring if plan.kind is Kind.TRAIN else Ring.LONG


def _escrow(terms: Terms, plan: Plan, name: str) -> _Found:
    if plan.t == 0:
        return
    least = terms.n + terms.c_max + 1
    if plan.t + plan.m_min < least:
        problem = f"{name}: t + m_min = {plan.t + plan.m_min} < {least} lets two sums of one round open"
        yield Broken(Rule.ESCROW, problem, f"choose t = 0, or t + m_min >= {least}")
    if plan.t > plan.m_min - 1:
        problem = f"{name}: t = {plan.t} shares of one seed do not exist among m_min = {plan.m_min} sites"
        yield Broken(Rule.ESCROW_MOST, problem, f"choose t <= {plan.m_min - 1}")


def _group(terms: Terms, plan: Plan, name: str) -> _Found:
    sites = min(len(cell) for cell in terms.cells)
    orgs = min(terms.roster.count_orgs(cell) for cell in terms.cells)
    if plan.churn is not Churn.CELLS:
        yield Broken(Rule.GROUP_CHURN, f"{name}: a group is a cell, and churn is {plan.churn}", "choose churn cells")
    if plan.m_min > sites:
        problem = f"{name}: m_min = {plan.m_min} is more than the smallest cell's {sites} sites"
        yield Broken(Rule.GROUP_SITES, problem, f"choose m_min <= {sites}")
    if plan.o_min > orgs:
        problem = f"{name}: o_min = {plan.o_min} is more than the poorest cell's {orgs} organisations"
        yield Broken(Rule.GROUP_ORGS, problem, f"choose o_min <= {orgs}")
    if plan.t and not terms.c_max + 1 <= plan.t <= sites - 1:
        problem = f"{name}: t = {plan.t} is not within {terms.c_max + 1}..{sites - 1}"
        yield Broken(Rule.GROUP_ESCROW, problem, "choose t = 0, or t within these bounds")


# --------------------------------------------------------------------------------------------------- its vector (6, 7)


def _vector(n: int, plan: Plan) -> _Found:
    name = f"plan {plan.plan_id}"
    if not isinstance(plan.codec, _codecs(plan)):
        problem = f"{name}: the codec {plan.codec.TAG} does not serve kind {plan.kind} with churn {plan.churn}"
        yield Broken(Rule.CODEC, problem, "choose the codec that the kind and the unit of dp ask for")
        return
    expected = plan.expected_words
    if (expected is None and plan.words < _LEAST_TRAIN_WORDS) or expected not in (None, plan.words):
        problem = f"{name}: d = {plan.words} is not what its codec makes"
        yield Broken(Rule.WORDS, problem, f"choose d = {expected or f'{_LEAST_TRAIN_WORDS} or more'}")
    match plan.codec:
        case TrainCodec():
            yield from _train(n, plan, plan.codec, name)
        case FieldsCodec(fields):
            yield from _fields(n, fields, name)
        case DpCodec(dimension):
            if dimension < _LEAST_DIMENSION or dimension & (dimension - 1):
                problem = f"{name}: D = {dimension} is no power of two of at least {_LEAST_DIMENSION}"
                yield Broken(Rule.CODEC_VALUES, problem, "pad the update with zeros to the next power of two")
        case RecordCodec(values, _, bound, n_pub):
            if not (values >= 1 and bound > 0 and n_pub >= 1):
                yield Broken(Rule.CODEC_VALUES, f"{name}: d, B and N_pub must be positive", "choose positive numbers")


_LEAST_TRAIN_WORDS = 6
"""A weight, a value, and the guard."""


def _codecs(plan: Plan) -> type | tuple[type, ...]:
    if plan.dp is not None and plan.dp.unit is Unit.RECORD:
        return RecordCodec
    if plan.kind is not Kind.TRAIN:
        return FieldsCodec
    return TrainCodec if plan.dp is None else DpCodec


def _train(n: int, plan: Plan, codec: TrainCodec, name: str) -> _Found:
    if not (codec.bound > 0 and codec.clip > 0 and 1 <= codec.q_bits <= _WIDEST):
        fix = f"choose B and C above 0, and 1 <= q_bits <= {_WIDEST}"
        yield Broken(Rule.CODEC_VALUES, f"{name}: its codec's numbers cannot be meant", fix)
    if not 1 <= codec.w_min <= codec.w_max <= _MOST_WEIGHT_RATIO * codec.w_min:
        problem = f"{name}: weights {codec.w_min}..{codec.w_max} cannot be told apart in one sum"
        yield Broken(Rule.WEIGHTS, problem, f"choose 1 <= w_min <= w_max <= {_MOST_WEIGHT_RATIO} * w_min")
    if codec.weighting is Weighting.RECORDS and plan.churn is not Churn.CELLS:
        problem = f"{name}: the first change of members would show one site's record count exactly"
        yield Broken(Rule.WEIGHTING, problem, "choose weighting uniform or declared, or churn cells")
    most = 2 ** (plan.ring - 1) - 1
    if n * codec.steps > most:
        problem = f"{name}: {n} sites times 2^{codec.q_bits} - 1 do not fit a ring of {plan.ring} bits"
        yield Broken(Rule.HEADROOM, problem, f"choose q_bits <= {(most // n + 1).bit_length() - 1}")


def _fields(n: int, fields: tuple[StatField, ...], name: str) -> _Found:
    names = {field.name for field in fields}
    if not fields or len(names) != len(fields) or not all(field.width and field.lo <= field.hi for field in fields):
        fix = "name each field once, with a width of at least 1 and lo <= hi"
        yield Broken(Rule.CODEC_VALUES, f"{name}: its fields are not well formed", fix)
    for field in fields:
        if field.frac > _MOST_FRAC or n * max(abs(field.lo), abs(field.hi)) * 2.0**field.frac > _FIELDS_HEADROOM:
            problem = f"{name}: {n} sites' totals of {field.name!r} do not fit 62 bits"
            yield Broken(Rule.HEADROOM, problem, "choose a narrower range or fewer binary places")


_MOST_FRAC = 62
"""Binary places: more would leave no room even for a range of one."""


# ----------------------------------------------------------------------------------------------- its noise (7, DP text)


def _noise(terms: Terms, plan: Plan) -> _Found:
    dp, name = plan.dp, f"plan {plan.plan_id}"
    if dp is None:
        return
    record = dp.unit is Unit.RECORD
    sound = min(dp.clip, dp.scale, dp.z) > 0 and max(dp.clip, dp.scale, dp.z) < _MOST_FACTOR
    sound = sound and 0 < dp.delta < 1 and dp.rounds >= 1
    if not sound or (record and dp.mechanism is not Mechanism.DDGAUSS):
        fix = "choose clip, scale, z within (0, 2^64), rounds >= 1, delta within (0, 1), and ddgauss for unit record"
        yield Broken(Rule.NOISE_VALUES, f"{name}: its dp is not well formed", fix)
        return
    shares = plan.m_min - max(1, terms.c_max)
    if shares < 2:  # noqa: PLR2004 - the DP text's section 7: n_eff < 2 is refused; m_min is then broken too
        return
    if isinstance(plan.codec, RecordCodec):
        yield from _record_noise(terms.n, plan, plan.codec, dp, shares)
    elif not _site_fits(terms.n, plan, dp, shares):
        problem = f"{name}: the sum of {terms.n} sites with its noise wraps around a ring of {plan.ring} bits"
        yield Broken(Rule.HEADROOM, problem, "choose a smaller scale or a wider ring")


def _record_noise(n: int, plan: Plan, codec: RecordCodec, dp: Noise, shares: int) -> _Found:
    name = f"plan {plan.plan_id}"
    sensitivity = _record_sensitivity(codec, dp)
    variance = (dp.z**2 * sensitivity**2 + 4) / shares
    if variance < _LEAST_VARIANCE:
        problem = f"{name}: a site's share has variance {variance:.3g}, below {_LEAST_VARIANCE:g}"
        yield Broken(Rule.NOISE_VALUES, problem, "choose a finer scale or a larger z")
    if n * codec.bound + _TAILS * sqrt(n * variance) > 2.0**31 - 1:
        problem = f"{name}: the sum of {n} sites with its noise wraps around a ring of 32 bits"
        yield Broken(Rule.HEADROOM, problem, "choose a smaller scale or bound")


def _record_sensitivity(codec: RecordCodec, dp: Noise) -> float:
    """D of the DP text, section 2.3."""
    if codec.path is Path.EXACT:
        return float(floor(dp.scale * dp.clip))
    reach = dp.scale * dp.clip * (1 + _GAMMA)
    tail = sqrt(2 * log(1000 * dp.rounds / dp.delta))
    return sqrt(reach**2 + codec.values / 4 + tail * (reach + sqrt(codec.values) / 2))


def _site_fits(n: int, plan: Plan, dp: Noise, shares: int) -> bool:
    """The modulus rule of section 7; what is not rotated can stand in one coordinate, so its D is 1 there."""
    dimension = plan.codec.dimension if isinstance(plan.codec, DpCodec) else 1
    local = (dp.scale * dp.z * dp.clip) ** 2 / shares
    spread = sqrt((dp.clip * n * dp.scale) ** 2 / max(1, dimension) + (1 / 4 + local) * n)
    return 2.0**plan.ring >= 2 * _FLATNESS * spread
