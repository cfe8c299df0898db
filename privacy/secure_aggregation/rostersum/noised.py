"""What a site contributes to a sum with noise, and what such a sum means (RosterSum, section 7, unit "site").

Nothing in it depends on the data but the words themselves: what is not finite counts as zero, what is too long is cut,
every vector is rotated, rounded and noised, and every one is as long. The guard carries no noise.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from federation.errors import LocalProtocolError
from federation.vector import BLOCK, F32, F64, spans
from privacy.crypto import canonical
from privacy.crypto.masks import Words, dtype
from privacy.differential_privacy.rotation import padded, unrotate
from privacy.differential_privacy.stream import Draw
from privacy.secure_aggregation.rostersum.encoding import GUARD, guarded
from privacy.secure_aggregation.rostersum.noise import mechanism_of, round_noise
from privacy.secure_aggregation.rostersum.terms import Plan

__all__ = ["NoisedSum", "NoisedUpdate", "decode", "prepare", "rotation_key"]


def rotation_key(ctx: bytes) -> bytes:
    """What the signs of an attempt's rotation are drawn from; everybody in it knows it."""
    return canonical.digest("rotation", ctx)


@dataclass(frozen=True, slots=True)
class NoisedUpdate:
    """An update, to be encoded afresh for each attempt, with noise of its own each time.

    Attributes:
        plan: What it is summed by.
        update: Its values [d], which pad to the plan's D; they must not change before it is encoded for the last time.
        norm: Their L2 norm, infinite or NaN where one of them is.
    """

    plan: Plan
    update: F32
    norm: float

    @property
    def words(self) -> int:
        """Words of the vector: the guard included."""
        return self.plan.words

    @property
    def clipped(self) -> tuple[str, ...]:
        """What encoding cuts off, for this site's own log and nobody else's."""
        clip = mechanism_of(self.plan).clip
        if not self.norm < inf:
            return ("an update that holds NaN or infinite values to zero",)
        return (f"the update's norm of {self.norm:.6g} to {clip:g}",) if self.norm > clip else ()

    def encode(self, ctx: bytes, members: int, c_max: int, draw: Draw = os.urandom) -> Iterator[Words]:
        """The vector of one attempt over `members` sites, in fresh blocks of at most `federation.vector.BLOCK` words.

        Clipped, scaled, rotated by the attempt's signs, rounded within D^2, and with this site's share of noise for so
        many members; rounding and noise are drawn for this call alone. The rotation takes the whole vector: 8 bytes of
        memory for each value until the last block.

        Raises:
            ConfigurationError: Such noise cannot be drawn.
        """
        noise = round_noise(self.plan, members, c_max)
        share = noise.sampler.share(draw)
        integers = noise.mechanism.quantise(self.update, rotation_key(ctx), draw)
        yield from share.noised(integers, self.plan.ring)
        yield np.ones(GUARD, dtype(self.plan.ring))


def prepare(plan: Plan, update: F32) -> NoisedUpdate:
    """The update [d], looked through once and not copied; whatever it holds, it is contributed.

    Raises:
        LocalProtocolError: It does not pad to the plan's D, or the plan protects no site.
    """
    dimension = mechanism_of(plan).dimension
    if not update.size or padded(update.size) != dimension:
        raise LocalProtocolError(f"an update of {update.size} values does not pad to the plan's {dimension}")
    squares = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, update.size, BLOCK):
            exact = update[start : start + BLOCK].astype(np.float64)
            squares += float(np.einsum("i,i->", exact, exact))
    return NoisedUpdate(plan, update, sqrt(squares) if squares < inf else inf)


@dataclass(frozen=True, slots=True)
class NoisedSum:
    """The sum of a step's updates and of their noise shares, its guard held, divided by nothing but the scale.

    Attributes:
        values: The summed updates [d], or [D] with the padding.
        members: Sites in it, the public denominator: no weight was summed.
    """

    values: F64
    members: int

    @property
    def size(self) -> int:
        """Values."""
        return self.values.size

    @property
    def weight(self) -> float:
        """Each member counts as 1."""
        return float(self.members)

    def first(self, size: int) -> "NoisedSum":
        """The sum without its padding, where the updates had `size` values.

        Raises:
            LocalProtocolError: Updates of that size are padded to another one.
        """
        if padded(size) != padded(self.size):
            raise LocalProtocolError(f"a sum of {self.size} values was taken for one of updates of {size} values")
        return NoisedSum(self.values[:size], self.members)

    def mean(self, block: int = BLOCK, start: int = 0, stop: int | None = None) -> Iterator[F64]:
        """The noisy mean of the updates from `start` to `stop`, in blocks of `block` values but for the last."""
        for first, last in spans(block, start, self.size if stop is None else stop):
            yield self.values[first:last] / self.members


def decode(plan: Plan, total: Words, members: int, ctx: bytes, room: F64) -> NoisedSum:
    """What the opened sum [D + 4] of `members` vectors of the attempt `ctx` means, made in `room` [D].

    Raises:
        BurnedError: A guard word is not the number of members. Nothing else of a sum can be wrong: its values are
            whatever they are.
        LocalProtocolError: The sum or the room has not the plan's length.
    """
    mechanism = mechanism_of(plan)
    values = guarded(total, members)
    if values.shape != (mechanism.dimension,) or room.shape != values.shape:
        raise LocalProtocolError(f"a sum of {values.size} values was decoded as one of {mechanism.dimension}")
    for start in range(0, values.size, BLOCK):
        room[start : start + BLOCK] = values[start : start + BLOCK]
    unrotate(room, rotation_key(ctx))
    for start in range(0, values.size, BLOCK):
        room[start : start + BLOCK] /= mechanism.scale
    return NoisedSum(room, members)
