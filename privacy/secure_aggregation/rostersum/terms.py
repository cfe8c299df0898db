"""A job's roster, plans and terms as frozen values, their digests, and what they mean in plain words (section 2).

A value here has fields of the right types and widths. Whether the terms are *acceptable* is judged by `rules.broken`,
and whether this site accepts them by its floor.
"""

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Annotated, ClassVar

from federation.errors import ConfigurationError, LocalProtocolError
from privacy.crypto import canonical
from privacy.secure_aggregation.rostersum.fields import Count, Hash, Index, Octets, Unsigned, pack, unpack

__all__ = [
    "FEWEST_SITES",
    "Churn",
    "Codec",
    "DpCodec",
    "FieldsCodec",
    "Kind",
    "Mechanism",
    "Member",
    "Noise",
    "Path",
    "Plan",
    "RecordCodec",
    "Ring",
    "Roster",
    "StatField",
    "Terms",
    "Thresholds",
    "TrainCodec",
    "Unit",
    "Weighting",
    "cell_sites",
    "default_c_max",
    "default_g_max",
    "default_thresholds",
    "explain",
    "org_floor",
    "propose_cells",
]

FEWEST_SITES = 3
"""Of two sites, or two organisations, each would learn the other's input from the sum."""

GUARD_WORDS = 4
"""Words at the end of every vector that are 1 at each site, so that a sum over P shows |P| there."""


class Kind(StrEnum):
    """What a plan computes."""

    TRAIN = "train"
    STAT = "stat"
    EVAL = "eval"


class Churn(StrEnum):
    """Who may be missing from a sum, and what stands between sums over differing sets."""

    CELLS = "cells"
    DP = "dp"
    OPEN = "open"


class Weighting(StrEnum):
    """Where a site's weight comes from."""

    UNIFORM = "uniform"
    DECLARED = "declared"
    RECORDS = "records"


class Unit(StrEnum):
    """What differential privacy protects."""

    SITE = "site"
    RECORD = "record"


class Mechanism(StrEnum):
    """The law of a site's noise share."""

    DDGAUSS = "ddgauss"
    SKELLAM = "skellam"


class Path(StrEnum):
    """How per-record sums become integers."""

    EXACT = "exact"
    DITHER = "dither"


class Ring(IntEnum):
    """Bits of a word; sums are modulo 2 to this power."""

    SHORT = 16
    WORD = 32
    LONG = 64


def _require(value: object) -> None:
    try:
        pack(value)
    except ValueError as wrong:
        raise ConfigurationError(f"the job's terms cannot hold this: {wrong}", fix="correct the job file") from None


class _Checked:
    """A value whose fields have the types and widths that they are declared with."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Refuses fields of another type or width."""
        _require(self)


# --------------------------------------------------------------------------------------------------------------- codecs


@dataclass(frozen=True, slots=True)
class TrainCodec(_Checked):
    """A weighted update: weight, values and guard; each value within +-`bound`, the whole within L2 norm `clip`."""

    TAG: ClassVar[str] = "train"
    bound: float
    clip: float
    q_bits: Count
    weighting: Weighting
    w_min: Count
    w_max: Count

    @property
    def steps(self) -> int:
        """Q, the largest integer that a value or weight becomes."""
        return (1 << min(self.q_bits, 64)) - 1


@dataclass(frozen=True, slots=True)
class StatField(_Checked):
    """`width` sums of a statistic, each clipped to [lo, hi] at a site and sent with `frac` binary places."""

    name: str
    width: Count
    frac: Count
    lo: float
    hi: float


@dataclass(frozen=True, slots=True)
class FieldsCodec(_Checked):
    """Named totals of statistics or evaluation, and guard."""

    TAG: ClassVar[str] = "fields"
    fields: tuple[StatField, ...]


@dataclass(frozen=True, slots=True)
class DpCodec(_Checked):
    """An update under site-level differential privacy, rotated: `dimension` values, a power of two, and guard."""

    TAG: ClassVar[str] = "dp"
    dimension: Count


@dataclass(frozen=True, slots=True)
class RecordCodec(_Checked):
    """Sums of per-record contributions under record-level differential privacy: `values` integers and guard."""

    TAG: ClassVar[str] = "record"
    values: Count
    path: Path
    bound: float
    n_pub: Count


Codec = TrainCodec | FieldsCodec | DpCodec | RecordCodec


def _words(codec: Codec) -> int | None:
    """The words of a vector of this codec with weight and guard; None where any number of values will do."""
    match codec:
        case TrainCodec():
            return None
        case FieldsCodec(fields):
            return sum(field.width for field in fields) + GUARD_WORDS
        case DpCodec(dimension):
            return dimension + GUARD_WORDS
        case RecordCodec(values=values):
            return values + GUARD_WORDS


# ---------------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class Noise(_Checked):
    """The differential privacy of a plan; epsilon is not among it, since each site computes it for itself."""

    unit: Unit
    mechanism: Mechanism
    clip: float
    scale: float
    z: float
    delta: float
    rounds: Count


@dataclass(frozen=True, slots=True)
class Plan(_Checked):
    """One kind of sum that a job may ask for.

    `m_min` counts sites and `o_min` organisations of a set; `t` shares rescue a self seed, 0 for no escrow; `words` is
    d, the words of a vector with weight and guard.
    """

    plan_id: Count
    kind: Kind
    churn: Churn
    group: Annotated[int, Unsigned(1)]
    m_min: Count
    o_min: Count
    t: Count
    ring: Ring
    words: Count
    task_digest: Hash
    rows_min: Count
    codec: Codec
    dp: Noise | None

    @property
    def exact(self) -> bool:
        """Whether what is opened is the sum itself, of statistics or evaluation: limited by S3 to S5."""
        return self.kind is not Kind.TRAIN and self.churn is not Churn.DP

    @property
    def digest(self) -> bytes:
        """What names the plan whatever its number in a job."""
        return canonical.digest("plan", *pack(self)[1:])

    @property
    def size(self) -> int:
        """Bytes of one vector."""
        return self.words * (self.ring // 8)

    @property
    def expected_words(self) -> int | None:
        """The words that the codec makes of its fields; None where any number of values will do."""
        return _words(self.codec)


# --------------------------------------------------------------------------------------------------------------- roster


@dataclass(frozen=True, slots=True)
class Member(_Checked):
    """One site: its organisation, its name within it, and its Ed25519 protocol key."""

    org: str
    site: str
    vk: Hash

    @property
    def name(self) -> str:
        """What a cell pin knows the site by."""
        return f"{self.org}/{self.site}"


@dataclass(frozen=True)
class Roster(_Checked):
    """The sites of a job, a site's index being its place, and the coordinator's protocol key."""

    coordinator_vk: Hash
    members: tuple[Member, ...]

    @cached_property
    def hash(self) -> bytes:
        """What people compare, out of band."""
        rows = tuple((idx, each.org, each.site, each.vk) for idx, each in enumerate(self.members))
        return canonical.digest("roster", self.coordinator_vk, rows)

    @property
    def orgs(self) -> int:
        """How many organisations there are."""
        return self.count_orgs(range(len(self.members)))

    def count_orgs(self, indices: range | tuple[int, ...]) -> int:
        """How many organisations these sites are of."""
        return len({self.members[idx].org for idx in indices})

    def index_of(self, vk: bytes) -> int | None:
        """The place of the site with this key."""
        return next((idx for idx, each in enumerate(self.members) if each.vk == vk), None)


@dataclass(frozen=True)
class Terms(_Checked):
    """All that a job's members agree on before its first round."""

    job_id: Annotated[bytes, Octets((16,))]
    roster: Roster
    c_max: Count
    g_max: Count
    pq: Annotated[int, Unsigned(1)]
    cells: tuple[tuple[Index, ...], ...]
    plans: tuple[Plan, ...]

    @cached_property
    def job_hash(self) -> bytes:
        """What every message of the job is bound to."""
        limits = (self.c_max, self.g_max, self.pq)
        plans = tuple(pack(plan) for plan in self.plans)
        return canonical.digest("job", self.job_id, self.roster.hash, limits, self.cells, plans)

    @property
    def n(self) -> int:
        """The sites of the roster."""
        return len(self.roster.members)

    def plan(self, plan_id: int) -> Plan | None:
        """The plan of this number, if there is one."""
        return next((plan for plan in self.plans if plan.plan_id == plan_id), None)

    def cell_of(self, idx: int) -> tuple[int, ...]:
        """The cell that site `idx` is in."""
        return next(cell for cell in self.cells if idx in cell)

    def cell_hash(self, idx: int) -> bytes:
        """What site `idx` pins: the names of all sites of its cell (8.4)."""
        return canonical.digest("cell", sorted(self.roster.members[each].name for each in self.cell_of(idx)))

    def encode(self) -> bytes:
        """The terms as bytes, for a store."""
        return canonical.enc(*pack(self))

    @staticmethod
    def decode(content: bytes) -> "Terms":
        """The terms of which `content` is the encoding.

        Raises:
            RemoteProtocolError: The bytes are not canonical.
            LocalProtocolError: `encode` gives these bytes for no terms.
        """
        fields = canonical.dec(content)
        try:
            return unpack(Terms, fields)
        except ValueError as wrong:
            raise LocalProtocolError(f"these bytes are no terms of a job: {wrong}") from None


# ------------------------------------------------------------------------------------------------------------- defaults


def cell_sites(c_max: int) -> int:
    """The least sites of a cell or set: one honest site beside the victim, and never two in all."""
    return max(FEWEST_SITES, c_max + 2)


def org_floor(g_max: int) -> int:
    """The least organisations of a cell or set."""
    return max(FEWEST_SITES, g_max + 2)


def default_c_max(n: int) -> int:
    """Colluding sites that a job of `n` sites bears unless its author says otherwise."""
    return max(1, (n - 1) // 3)


def default_g_max(c_max: int, orgs: int) -> int:
    """Organisations of the colluding sites, unless the author says otherwise."""
    return max(0, min(c_max, orgs - 2))


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The numbers of a plan that follow from its churn and the roster."""

    m_min: int
    o_min: int
    t: int


def default_thresholds(
    n: int, c_max: int, g_max: int, churn: Churn, cells: tuple[tuple[int, ...], ...], *, group: bool = False
) -> Thresholds:
    """The thresholds of a plan whose author names none: with escrow wherever one opening per round is still certain.

    With group = 1 the text leaves them open; a set is then one cell, so these are the least that every cell meets.
    """
    o_min = org_floor(g_max)
    if group:
        return Thresholds(cell_sites(c_max), o_min, c_max + 1)
    if churn is Churn.CELLS and len(cells) == 1:
        return Thresholds(n, o_min, c_max + 1)
    if n < 5:  # noqa: PLR2004 - below five sites escrow would ask for all of them (section 2, Defaults)
        return Thresholds(FEWEST_SITES, o_min, 0)
    m_min = max(cell_sites(c_max), (n + c_max + 1) // 2 + 1)
    return Thresholds(m_min, o_min, n + c_max + 1 - m_min)


def propose_cells(roster: Roster, c_max: int, g_max: int) -> tuple[tuple[int, ...], ...]:
    """The most cells that a roster allows, as equal as can be: each has max(3, c_max+2) sites of max(3, g_max+2) orgs.

    Sites are dealt to the cells in turn, the largest organisations first, so each organisation reaches as many cells as
    it has sites: no deal gives the poorest cell more organisations.

    Raises:
        ConfigurationError: Not even one cell of the whole roster has enough.
    """
    size = Counter(member.org for member in roster.members)
    ranked = sorted((-size[each.org], each.org, each.site, idx) for idx, each in enumerate(roster.members))
    order = [idx for *_, idx in ranked]
    for count in range(len(order) // cell_sites(c_max), 0, -1):
        cells = sorted(tuple(sorted(order[first::count])) for first in range(count))
        if all(roster.count_orgs(cell) >= org_floor(g_max) for cell in cells):
            return tuple(cells)
    raise ConfigurationError(
        f"{len(order)} sites of {roster.orgs} organisations make no cell of at least {cell_sites(c_max)} sites "
        f"of {org_floor(g_max)} organisations",
        fix="invite more organisations, or lower c_max and g_max as far as every site's floor allows",
    )


# ------------------------------------------------------------------------------------------------------- in plain words


def explain(terms: Terms) -> tuple[str, ...]:
    """Who may be missing from a job's sums and what that costs, a line for each promise, for whoever signs the job."""
    first = (
        f"{terms.n} sites of {terms.roster.orgs} organisations; every promise below holds while at most {terms.c_max} "
        f"of the sites, of at most {terms.g_max} organisations, work together with the coordinator. A site that is "
        "restored from a snapshot, or runs twice, counts as one of them."
    )
    return (first, *(line for plan in terms.plans for line in _explained(terms, plan)))


def _explained(terms: Terms, plan: Plan) -> tuple[str, ...]:
    name = f"plan {plan.plan_id} ({plan.kind}, {plan.churn})"
    return f"{name}: {_missing(terms, plan)}", f"{name}: {_lost(plan)}"


def _missing(terms: Terms, plan: Plan) -> str:
    least = f"at least {plan.m_min} sites of {plan.o_min} organisations"
    sizes = ", ".join(str(len(cell)) for cell in terms.cells)
    match plan.churn:
        case Churn.CELLS if plan.group:
            return (
                f"each sum is over exactly one cell ({sizes} sites); a cell with a missing site has no sum that round."
            )
        case Churn.CELLS if len(terms.cells) == 1:
            return (
                f"nobody may be missing: each round waits for all {terms.n} sites. No subtraction of sums shows a site."
            )
        case Churn.CELLS:
            return (
                f"whole cells ({sizes} sites) may be missing, {least} must be there; one missing site keeps its whole "
                "cell out. A site hides among its own cell, not among all."
            )
        case Churn.DP:
            return (
                f"anybody may be missing, {least} must be there. The price is noise in every sum, and each site's "
                "ledger is charged once a round, whether the round succeeds or not."
            )
        case Churn.OPEN:
            return (
                f"anybody may be missing, {least} must be there. The price: whoever sees two sums that differ by one "
                "site can subtract them and see that site's update. Every site's floor must allow this."
            )


def _lost(plan: Plan) -> str:
    if plan.t == 0:
        return (
            "a site lost between its upload and the end of a round burns the round; that one sum opens per set of "
            "sites depends on nobody's honesty."
        )
    return (
        f"a site lost after its upload costs nothing while {plan.t} others of the round are there; that one sum opens "
        "per round depends on the number of colluding sites named above."
    )
