"""What a coordinator must not forget: the durable state of one job under RosterSum, as frozen values and as bytes."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, ClassVar, Self

from federation.errors import ParleyError, StorageError, WhoActs
from privacy.crypto import canonical
from privacy.secure_aggregation.rostersum.fields import Count, Hash, Index, Octets, Small, Unsigned, pack, unpack

__all__ = ["Ending", "FailedPair", "Seed", "Standing", "Step", "Way"]

Encoded = Annotated[bytes, Octets()]
"""A message, encoded; empty where there is none yet."""


class Ending(IntEnum):
    """How a sum's way ended."""

    NONE = 0
    OPENED = 1
    BURNED = 2


@dataclass(frozen=True, slots=True)
class Step:
    """What sites do in a round: the work of this plan, on this model, with these arguments."""

    plan_id: Count
    model_hash: Hash
    args_hash: Hash


@dataclass(frozen=True, slots=True)
class Seed:
    """The self seed of a site, rescued from shares."""

    idx: Index
    b: Hash = field(repr=False)


@dataclass(frozen=True, slots=True)
class Way:
    """How far one sum of a round has come.

    Attributes:
        start: The ROUND_START of the last attempt that may have left.
        uploads: The UPLOADs of its members, in their order, from the moment that a FULL may have left.
        full_signature: The signature that all those FULLs bear; with `uploads` it gives their bytes.
        opens: The OPENs that came, in order of arrival.
        rescued: Seeds of members that did not open.
        ending: Whether the sum is opened, or will never be.
        result: The RESULT that says so.
    """

    start: Encoded = b""
    uploads: tuple[Encoded, ...] = field(default=(), repr=False)
    full_signature: Encoded = b""
    opens: tuple[Encoded, ...] = field(default=(), repr=False)
    rescued: tuple[Seed, ...] = ()
    ending: Ending = Ending.NONE
    result: Encoded = b""


@dataclass(frozen=True, slots=True)
class FailedPair:
    """Two sites between which seals did not open, and the epochs in which that was."""

    lo: Index
    hi: Index
    epochs: tuple[Small, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """The durable state of a job: whoever has it goes on where it was stored, and signs nothing that contradicts.

    Attributes:
        epoch: The last epoch that may have been announced.
        r: The last round that may have been announced.
        step: What round `r` is about; None before the first.
        ways: How far its sums have come: one, or in group mode one for each cell.
        failed_pairs: Pairs whose seals did not open.
        revoked: Sites that are in no set any more.
        closed: 1 when the job has ended.
    """

    TAG: ClassVar[str] = "rostersum-coordinator-1"
    epoch: Small = 0
    r: Count = 0
    step: Step | None = None
    ways: tuple[Way, ...] = ()
    failed_pairs: tuple[FailedPair, ...] = ()
    revoked: tuple[Index, ...] = ()
    closed: Annotated[int, Unsigned(1)] = 0

    def encode(self) -> bytes:
        """The state as bytes, for a store."""
        return canonical.enc(*pack(self))

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """The state of which `content` is the encoding; `decode(content).encode() == content`.

        Raises:
            StorageError: There is none: what was stored is damaged, or of another release.
        """
        try:
            return unpack(cls, canonical.dec(content))
        except (ValueError, ParleyError) as damaged:
            raise StorageError(
                f"the stored state of a job is not one of this release: {damaged}",
                fix="restore the coordinator's database from its last backup, and end the job",
                who=WhoActs.COORDINATOR,
            ) from None
