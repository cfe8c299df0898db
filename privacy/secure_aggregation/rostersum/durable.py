"""What a site knows again after a crash, as one frozen value that any store can keep (section 4.1).

Each of the points F1 to F5 is one transaction with fsync; a store that cannot fsync refuses to run. Private keys, pair
roots, updates and self seeds are never part of this value; a self seed enters it only inside the OPEN that F4 keeps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, ClassVar

from federation.errors import LocalProtocolError, RemoteProtocolError, StorageError
from privacy.crypto import canonical
from privacy.secure_aggregation.rostersum.fields import (
    Attempt,
    Context,
    Count,
    Hash,
    Index,
    Octets,
    Small,
    Unsigned,
    pack,
    unpack,
)
from privacy.secure_aggregation.rostersum.messages import Share
from privacy.secure_aggregation.rostersum.terms import Plan, Terms

__all__ = ["MOST_DECLINES", "Charge", "Durable", "Family", "Job", "Point", "Record", "Rounds", "Tombstone"]

_Flag = Annotated[int, Unsigned(1)]
_MaybeHash = Annotated[bytes, Octets((0, 32))]


class Point(StrEnum):
    """Why something becomes durable; everything that follows it among the effects waits until it is."""

    JOB = "F1"
    KEYS = "F2"
    ATTEMPT = "F3"
    OPENED = "F4"
    CLOSED = "F5"
    NOTE = "note"
    """Shares erased, counts of burned rounds and declines, what the administrator decided: no secrecy waits for it."""


@dataclass(frozen=True, slots=True)
class Record:
    """That this site opened attempt `a` of round `r`, with what it still needs to say so again and to help others.

    Attributes:
        opening: The encoded OPEN.
        shares: Its shares of the other members' self seeds; empty where t = 0, or once they are erased.
        opened_at: Unix seconds.
        settled: Whether the round's outcome is known, or was given up.
    """

    r: Count
    a: Attempt
    ctx: Context
    members: tuple[Index, ...]
    t: Count
    opening: Annotated[bytes, Octets()] = field(repr=False)
    shares: tuple[Share, ...] = field(repr=False)
    opened_at: Count
    settled: _Flag = 0


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of plan `plan_id` that reached F3, each counted once."""

    plan_id: Count
    count: Count


@dataclass(frozen=True, slots=True)
class Job:
    """One job that this site has accepted and that is not closed.

    Attributes:
        encoded: The terms, as `Terms.encode` wrote them.
        family: The data family that this site's administrator says the job reads.
        table: Digest of the table version that the job reads.
        last_r: Round of the last F3; (0, 0) before the first.
        opened_r: Round of the last F4, 0 before the first.
        burned: Rounds opened here since one ended well.
        suspended: Whether the job waits for the administrator.
    """

    job_hash: Hash
    idx: Index
    encoded: Annotated[bytes, Octets()] = field(repr=False)
    family: str
    table: Hash
    epoch: Small = 0
    gen: Count = 0
    last_r: Count = 0
    last_a: Attempt = 0
    last_plan: Count = 0
    opened_r: Count = 0
    record: Record | None = None
    rounds: tuple[Rounds, ...] = ()
    burned: Small = 0
    suspended: _Flag = 0

    @property
    def terms(self) -> Terms:
        """The job's terms."""
        return Terms.decode(self.encoded)

    @property
    def last(self) -> tuple[int, int]:
        """(r, a) of the last F3."""
        return self.last_r, self.last_a

    def count(self, plan_id: int) -> int:
        """Rounds of this plan that reached F3."""
        return sum(each.count for each in self.rounds if each.plan_id == plan_id)

    def started(self, r: int, a: int, plan_id: int) -> "Job":
        """The job after F3 of (r, a): a round is counted once, whatever its attempts."""
        rounds = {each.plan_id: each.count for each in self.rounds}
        rounds[plan_id] = rounds.get(plan_id, 0) + (r != self.last_r)
        counted = tuple(Rounds(*each) for each in sorted(rounds.items()))
        return replace(self, last_r=r, last_a=a, last_plan=plan_id, record=None, rounds=counted)

    def given_up(self) -> "Job":
        """The job once the round that it opened last is known to have had no outcome."""
        if self.record is None or self.record.settled:
            return self
        return replace(self, burned=self.burned + 1, record=replace(self.record, settled=1))

    def settled(self, ctx: bytes, *, opened: bool) -> "Job | None":
        """The job after the result of the attempt `ctx`, its shares erased; None if it changes nothing."""
        record = self.record
        if record is None or record.ctx != ctx or (record.settled and not record.shares):
            return None
        burned = 0 if opened else self.given_up().burned
        return replace(self, burned=burned, record=replace(record, settled=1, shares=()))

    def without_shares(self) -> "Job":
        """The job with its shares of others' self seeds erased."""
        return self if self.record is None else replace(self, record=replace(self.record, shares=()))

    @property
    def tombstone(self) -> "Tombstone":
        """What stays of the job for ever."""
        return Tombstone(self.job_hash, self.last_r, self.last_a, self.opened_r)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A closed job: its hash is never accepted again."""

    job_hash: Hash
    last_r: Count
    last_a: Attempt
    opened_r: Count


MOST_DECLINES = 3
"""Declines because of data, each of which tells one bit, before a family's administrator is asked (8.6)."""


@dataclass(frozen=True, slots=True)
class Family:
    """What all jobs on one data family have in common (8.4, S3, S5).

    Attributes:
        pin: Digest of the cell that this family's exact sums are over; empty before the first.
        table: Digest of the table version that exact statistics and evaluations read; empty before the first.
        plans: Digests of the exact statistics asked so far.
        declines: Rounds declined because of data, in all jobs, since the administrator last looked.
    """

    name: str
    pin: _MaybeHash = b""
    table: _MaybeHash = b""
    plans: tuple[Hash, ...] = ()
    declines: Small = 0

    @property
    def waits(self) -> bool:
        """Whether its administrator must look before another question is answered, in any job."""
        return self.declines >= MOST_DECLINES

    @property
    def why(self) -> str:
        """Why its administrator must look."""
        return f"{self.declines} rounds on {self.name} were declined because of this site's data"


@dataclass(frozen=True, slots=True)
class Charge:
    """What a site's ledger is asked for, or charged: `rounds` rounds of a plan with noise, over `members` sites."""

    family: str
    job_hash: bytes
    r: int
    plan: Plan
    members: int
    c_max: int
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class Durable:
    """All of a site's durable state but the ledger."""

    TAG: ClassVar[str] = "rostersum-site-1"
    jobs: tuple[Job, ...] = ()
    closed: tuple[Tombstone, ...] = ()
    families: tuple[Family, ...] = ()

    def family(self, name: str) -> Family:
        """The family of this name, as it was last left."""
        return next((each for each in self.families if each.name == name), Family(name))

    def knows(self, job_hash: bytes) -> bool:
        """Whether this job was ever accepted."""
        hashes = (*(job.job_hash for job in self.jobs), *(stone.job_hash for stone in self.closed))
        return job_hash in hashes

    def with_job(self, job: Job) -> "Durable":
        """The state with `job` as it is now."""
        return replace(self, jobs=(*_others(self.jobs, job.job_hash), job))

    def with_family(self, family: Family) -> "Durable":
        """The state with `family` as it is now."""
        others = tuple(each for each in self.families if each.name != family.name)
        return replace(self, families=(*others, family))

    def without(self, job: Job) -> "Durable":
        """The state with `job` closed."""
        return replace(self, jobs=_others(self.jobs, job.job_hash), closed=(*self.closed, job.tombstone))

    def encode(self) -> bytes:
        """The state as bytes."""
        return canonical.enc(*pack(self))

    @staticmethod
    def decode(content: bytes) -> "Durable":
        """The state of which `content` is the encoding.

        Raises:
            StorageError: `encode` gives these bytes for no state.
        """
        try:
            durable = unpack(Durable, canonical.dec(content))
            _ = [job.terms for job in durable.jobs]
        except (ValueError, RemoteProtocolError, LocalProtocolError) as wrong:
            raise StorageError(
                f"the stored state of secure aggregation cannot be read: {wrong}",
                fix="put the vault's newest copy back; if it is an older one, run: parley site restore",
            ) from None
        return durable


def _others(jobs: Iterable[Job], job_hash: bytes) -> tuple[Job, ...]:
    return tuple(each for each in jobs if each.job_hash != job_hash)
