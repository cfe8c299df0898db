"""What a site contributes as words of a ring, and what their sum means (RosterSum, section 6): update and fields codec.

An update or a table of totals is *prepared* once, when a step's work is done: what is not finite is found there, before
a site promises anything. It is *encoded* afresh for each attempt, a block at a time, and the coordinator *decodes* the
opened sum, which fails one of the checks unless each member's words are such as an honest site sends.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite, sqrt
from typing import Literal, Protocol, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from federation.errors import ConfigurationError, LocalProtocolError, ParleyError, RemoteProtocolError, WhoActs
from federation.vector import BLOCK, F32, F64, spans
from privacy.crypto import canonical
from privacy.crypto.masks import Words, dtype, keystream

__all__ = [
    "GUARD",
    "BurnedError",
    "Codec",
    "DeclineError",
    "Field",
    "FieldsCodec",
    "Prepared",
    "PreparedFields",
    "PreparedUpdate",
    "TrainCodec",
    "TrainSum",
    "Weighting",
    "codec_of",
    "guarded",
]

GUARD = 4
"""Words of value 1 at a vector's end: in the sum each must be the number of members."""

Weighting = Literal["uniform", "declared", "records"]
"""What a site weighs: the same for all, a public number of its policy, or its record count."""

_Integers: TypeAlias = npt.NDArray[np.signedinteger]
_WIDEST = 52
"""Bits of Q at most: values, dithered, are then exact integers of binary64."""
_FINEST = 62
"""Binary places of a field at most."""
_SPREAD = 4096
"""Largest weight over the least: what the weakest voice is still heard at."""
_ROOM = 1 << 62
"""What the sum of a field may reach at most, in its units, in a ring of 64 bits."""
_PART = BLOCK // 2
"""Values worked on at a time. Measured at 2^13 to 2^16: smaller parts pay for numpy's calls."""
_DITHER = 4
"""Bytes of randomness for each rounding."""
_ZEROS = memoryview(bytes(_DITHER * _PART))


class DeclineError(ParleyError):
    """A contribution holds values that are not finite: the site declines the step, and says no reason."""

    who = WhoActs.SITE


class BurnedError(RemoteProtocolError):
    """A sum holds a check that honest members never fail: it is burned, and the model does not move."""

    who = WhoActs.CONSORTIUM


class Prepared(Protocol):
    """What a site contributes to one step, found finite; encoded for each attempt."""

    @property
    def words(self) -> int:
        """Words of the vector: weight and guard included."""
        ...

    @property
    def clipped(self) -> tuple[str, ...]:
        """What was or will be cut off, for this site's own log and nobody else's."""
        ...

    def encode(self, ring: int, key: bytes) -> Iterator[Words]:
        """The vector, in fresh blocks of at most `federation.vector.BLOCK` words.

        `key` is 32 bytes fresh from the operating system, for this attempt alone.
        """
        ...


@dataclass(frozen=True, slots=True)
class TrainCodec:
    """An update and a weight as words: [weight][values][guard 4], stochastically rounded.

    A value v of an update whose weight is w becomes about (w / w_max) * (v / bound) * Q, with Q = 2^q_bits - 1.

    Attributes:
        bound: Largest magnitude of a value, B; larger ones are clipped to it.
        clip: Largest L2 norm of an update, C; longer ones are scaled down to it, before `bound` is applied.
        q_bits: Bits of Q.
        weighting: What a site weighs.
        w_min: Least weight, from 1 on; less is counted as this.
        w_max: Largest weight, at most 4096 * w_min; more is counted as this.
    """

    bound: float
    clip: float
    q_bits: int
    weighting: Weighting
    w_min: int
    w_max: int

    def __post_init__(self) -> None:
        """Refuses numbers that no job can mean."""
        if not (self.bound > 0 and self.clip > 0 and isfinite(self.clip) and isfinite(self.bound)):
            raise _refused(f"bound {self.bound} and clip {self.clip} are not both finite and above 0", "give others")
        if not 1 <= self.q_bits <= _WIDEST or not isfinite(self.q / self.bound):
            raise _refused(f"{self.q_bits} bits cannot hold a value of up to {self.bound}", f"choose 1..{_WIDEST} bits")
        if self.weighting not in get_args(Weighting):
            raise _refused(f"weighting {self.weighting!r} is unknown", f"choose {', '.join(get_args(Weighting))}")
        if not 1 <= self.w_min <= self.w_max <= _SPREAD * self.w_min:
            fix = f"choose 1 <= w_min <= w_max <= {_SPREAD} * w_min"
            raise _refused(f"weights from {self.w_min} to {self.w_max} are out of proportion", fix)

    @property
    def q(self) -> int:
        """The integer that stands for the largest value at the largest weight."""
        return (1 << self.q_bits) - 1

    @property
    def terms(self) -> canonical.Field:
        """The codec as a plan's terms list it."""
        return ("train", self.bound, self.clip, self.q_bits, self.weighting, self.w_min, self.w_max)

    def require_room(self, sites: int, ring: int, words: int) -> None:
        """Accepts a plan in whose ring the sum of `sites` vectors of `words` words cannot overflow.

        Raises:
            ConfigurationError: It can, or the vectors have no room for a value.
        """
        if sites * self.q > (1 << (ring - 1)) - 1:
            fix = f"lower q_bits from {self.q_bits}, or choose a wider ring"
            raise _refused(f"the sum of {sites} sites' updates can overflow {ring} bits", fix)
        if words <= 1 + GUARD:
            raise _refused(f"{words} words hold no update", f"give each value a word, and {1 + GUARD} more")

    def weight_of(self, number: int) -> int:
        """What a site with this record count or declared number weighs: never refused, never outside w_min..w_max."""
        return self.w_max if self.weighting == "uniform" else min(max(number, self.w_min), self.w_max)

    def prepare(self, update: F32, number: int) -> "PreparedUpdate":
        """The update [D], looked through once and not copied, of a site with this record count or declared number.

        Raises:
            DeclineError: A value is NaN or infinite.
        """
        squares, largest = 0.0, 0.0
        wide = np.empty(_PART)
        for start in range(0, update.size, _PART):
            part = update[start : start + _PART]
            exact = wide[: part.size]
            np.copyto(exact, part)
            squares += float(np.einsum("i,i->", exact, exact))  # float32 values: finite if all of them are
            largest = max(largest, -float(part.min()), float(part.max()))
        if not isfinite(squares):
            raise DeclineError("the update holds NaN or infinite values", fix="see this site's training log")
        return PreparedUpdate(self, update, self.weight_of(number), number, sqrt(squares), largest)

    def decode(self, total: Words, members: int) -> "TrainSum":
        """What the opened sum of `members` vectors means; `total` [D + 5] is looked through once and not copied.

        Raises:
            BurnedError: A guard word is not the number of members, the weight is outside what they can have, a value
                is larger than the weight allows, or all of them are longer than it does.
        """
        if total.size <= 1 + GUARD:
            raise LocalProtocolError(f"a sum of {total.size} words was decoded as an update")
        values = guarded(total, members)
        weight = int(values[0])
        least = max(1, members * (self.w_min * self.q // self.w_max))
        if not least <= weight <= members * self.q:
            raise _burned(f"its weight is {weight}, where {members} members have {least} to {members * self.q}")
        squares, wide = 0.0, np.empty(_PART)
        for part in _parts(values[1:]):
            if max(-int(part.min()), int(part.max())) > weight + 2 * members:
                raise _burned(f"a value is larger than its weight of {weight} allows")
            exact = wide[: part.size]
            np.copyto(exact, part)
            squares += float(np.einsum("i,i->", exact, exact))
        allowed = self.clip * (weight + members) + self.bound * members * sqrt(values.size - 1)
        if self.bound * sqrt(squares) > allowed:
            raise _burned(f"its norm is {self.bound * sqrt(squares):.6g}, where {allowed:.6g} is allowed")
        return TrainSum(self, values[1:], weight)


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """A finite update and its weight, to be encoded afresh for each attempt.

    Attributes:
        codec: How it is encoded.
        update: Its values [D]; they must not change before it is encoded for the last time.
        weight: What it weighs.
        number: The record count or declared number of which that was made.
        norm: The L2 norm of the values.
        largest: The largest magnitude among them.
    """

    codec: TrainCodec
    update: F32
    weight: int
    number: int
    norm: float
    largest: float

    @property
    def words(self) -> int:
        """Words of the vector: weight and guard included."""
        return 1 + self.update.size + GUARD

    @property
    def clipped(self) -> tuple[str, ...]:
        """What encoding cuts off, for this site's own log and nobody else's."""
        codec, found = self.codec, []
        if self.norm > codec.clip:
            found.append(f"the update's norm of {self.norm:.6g} to {codec.clip:g}")
        if self._shrunk * self.largest > codec.bound:
            found.append(f"values of up to {self._shrunk * self.largest:.6g} to {codec.bound:g}")
        if codec.weighting != "uniform" and self.weight != self.number:
            found.append(f"the weight of {self.number} to {self.weight}")
        return tuple(found)

    def encode(self, ring: int, key: bytes) -> Iterator[Words]:
        """The vector, in fresh blocks of at most `federation.vector.BLOCK` words.

        Value and weight are floor(v + u), u uniform over the multiples of 2^-32 in [0, 1) and drawn from AES-256-CTR
        under `key`: 32 bytes fresh from the operating system, for this attempt alone. Computed in binary64.
        """
        codec, size = self.codec, self.update.size
        dither = _Dither(key, codec.q)
        reach = self.weight * codec.q / codec.w_max  # exact where it is whole, as the least weight may be
        scale = self._shrunk * reach / codec.bound
        near = self._shrunk * self.largest > codec.bound * (1 - 2 / codec.q)  # else no value comes near an edge
        cut = reach if near else None
        for start in range(0, self.words, BLOCK):
            block = np.empty(min(BLOCK, self.words - start), dtype(ring))
            if start == 0:
                dither.round(np.ones(1), reach, reach, _signed(block[:1]))
            first, last = max(start - 1, 0), min(start - 1 + block.size, size)
            begin = first + 1 - start
            end = begin + max(last - first, 0)
            dither.round(self.update[first:last], scale, cut, _signed(block[begin:end]))
            block[end:] = 1
            yield block

    @property
    def _shrunk(self) -> float:
        """The factor that brings the norm down to the codec's clip."""
        return min(1.0, self.codec.clip / self.norm) if self.norm else 1.0


@dataclass(frozen=True, slots=True)
class TrainSum:
    """The sum of a step's updates, after all its checks.

    Attributes:
        codec: How it was encoded.
        values: The summed values [D] as integers.
        units: The summed weight as an integer: `codec.q` for each member of the largest weight.
    """

    codec: TrainCodec
    values: _Integers
    units: int

    @property
    def weight(self) -> float:
        """The members' total weight, as stochastically rounded: its error is below one part in Q for each member."""
        return self.units / self.codec.q * self.codec.w_max

    def mean(self, block: int = BLOCK, start: int = 0, stop: int | None = None) -> Iterator[F64]:
        """The weighted mean of the updates from `start` to `stop` (D), in blocks of `block` values but for the last."""
        step = self.codec.bound / self.units
        for first, last in spans(block, start, self.values.size if stop is None else stop):
            yield np.multiply(self.values[first:last], step, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Field:
    """One named total of a site's records: `width` numbers, each within [low, high] and sent in units of 2^-frac."""

    name: str
    width: int
    frac: int
    low: float
    high: float

    def __post_init__(self) -> None:
        """Refuses a field that no statistic means."""
        if not (self.name and self.name.isascii() and self.name.isprintable()):
            raise _refused(f"a field cannot be called {self.name[:40]!r}", "name it in printable ASCII")
        if self.width < 1 or not 0 <= self.frac <= _FINEST:
            fix = f"give it a width of 1 or more and 0 to {_FINEST} binary places"
            raise _refused(f"field {self.name!r} has width {self.width} and {self.frac} binary places", fix)
        if not (isfinite(self.low) and isfinite(self.high) and self.low <= self.high):
            raise _refused(f"field {self.name!r} lies within [{self.low}, {self.high}]", "give finite limits in order")


@dataclass(frozen=True, slots=True)
class FieldsCodec:
    """Named totals as words: [fields in order][guard 4], in a ring of 64 bits; rounded to nearest, not dithered."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        """Refuses no fields, and two of one name."""
        names = [field.name for field in self.fields]
        if not names or len(set(names)) != len(names):
            raise _refused("a statistic needs fields of different names", "name each field once")

    @classmethod
    def of(cls, *fields: Field) -> Self:
        """The codec of these fields."""
        return cls(fields)

    @property
    def words(self) -> int:
        """Words of a vector: the guard included."""
        return sum(field.width for field in self.fields) + GUARD

    @property
    def terms(self) -> canonical.Field:
        """The codec as a plan's terms list it."""
        return ("fields", tuple((each.name, each.width, each.frac, each.low, each.high) for each in self.fields))

    def require_room(self, sites: int, ring: int, words: int) -> None:
        """Accepts a plan whose vectors are these fields and whose sums over `sites` sites cannot overflow.

        Raises:
            ConfigurationError: The ring has not 64 bits, the plan has another number of words, or a sum can overflow.
        """
        if ring != 64:  # noqa: PLR2004 - a ring's name is its bits
            raise _refused(f"statistics need a ring of 64 bits, not {ring}", "choose ring 64")
        if words != self.words:
            raise _refused(f"the fields and their guard are {self.words} words, not {words}", f"say {self.words}")
        for field in self.fields:
            if sites * Fraction(max(abs(field.low), abs(field.high))) * 2**field.frac > _ROOM:
                fix = "give it narrower limits or fewer binary places"
                raise _refused(f"the sum of field {field.name!r} over {sites} sites can pass 2^62", fix)

    def prepare(self, totals: Mapping[str, F64]) -> "PreparedFields":
        """A site's totals: for each field, by name, a vector of its width.

        Raises:
            DeclineError: A total is NaN or infinite.
            LocalProtocolError: The names or widths are not the fields'.
        """
        if set(totals) != {field.name for field in self.fields}:
            raise LocalProtocolError(f"totals of {sorted(totals)} are not the codec's {len(self.fields)} fields")
        sent, clipped = [], []
        for field in self.fields:
            values = totals[field.name]
            if values.shape != (field.width,):
                raise LocalProtocolError(f"field {field.name!r} has shape {values.shape}, not ({field.width},)")
            if not np.isfinite(values).all():
                raise DeclineError(f"field {field.name!r} holds NaN or infinite totals", fix="see this site's own log")
            within = np.clip(values, field.low, field.high)
            if (within != values).any():
                clipped.append(f"totals of field {field.name!r} to [{field.low:g}, {field.high:g}]")
            sent.append(_units(field, within))
        return PreparedFields(np.concatenate([*sent, np.ones(GUARD, np.int64)]), tuple(clipped))

    def decode(self, total: Words, members: int) -> dict[str, F64]:
        """The pooled totals by field, each [width], that the opened sum of `members` vectors holds.

        Raises:
            BurnedError: A guard word is not the number of members, or a total is outside what they can have.
        """
        values = guarded(total, members)
        if values.size != self.words - GUARD:
            raise LocalProtocolError(f"a sum of {total.size} words was decoded as {self.words}")
        pooled: dict[str, F64] = {}
        start = 0
        for field in self.fields:
            part = values[start : start + field.width]
            low, high = (members * int(_units(field, np.array([limit]))[0]) for limit in (field.low, field.high))
            if not low <= int(part.min()) <= int(part.max()) <= high:
                raise _burned(f"a total of field {field.name!r} is outside what {members} members can have")
            pooled[field.name] = np.ldexp(part.astype(np.float64), -field.frac)
            start += field.width
        return pooled


@dataclass(frozen=True, slots=True)
class PreparedFields:
    """A site's totals as integers, with their guard.

    Attributes:
        values: The vector, signed.
        clipped: What was cut off, for this site's own log and nobody else's.
    """

    values: npt.NDArray[np.int64]
    clipped: tuple[str, ...]

    @property
    def words(self) -> int:
        """Words of the vector: the guard included."""
        return self.values.size

    def encode(self, ring: int, key: bytes) -> Iterator[Words]:  # noqa: ARG002 - totals are rounded to nearest
        """The vector, in blocks of at most `federation.vector.BLOCK` words; the same for each attempt.

        Raises:
            LocalProtocolError: The ring has not 64 bits.
        """
        if ring != 64:  # noqa: PLR2004 - a ring's name is its bits
            raise LocalProtocolError(f"totals are words of 64 bits, not of {ring}")
        for start in range(0, self.values.size, BLOCK):
            yield self.values[start : start + BLOCK].astype("<i8").view(dtype(64))


Codec = TrainCodec | FieldsCodec


def codec_of(terms: Sequence[canonical.Field]) -> Codec:
    """The codec that a plan's terms list.

    Raises:
        ConfigurationError: They list none, or one that no job can mean.
    """
    match terms:
        case ["train", float(bound), float(clip), int(q_bits), str(weighting), int(w_min), int(w_max)]:
            return TrainCodec(bound, clip, q_bits, weighting, w_min, w_max)  # type: ignore[arg-type] # checked there
        case ["fields", [*fields]]:
            return FieldsCodec(tuple(_field(each) for each in fields))
        case _:
            raise _refused("a plan's codec is not one that this release knows", "choose the codec train or fields")


def _field(terms: canonical.Field) -> Field:
    match terms:
        case [str(name), int(width), int(frac), float(low), float(high)]:
            return Field(name, width, frac, low, high)
        case _:
            raise _refused("a field is not name, width, binary places, low, high", "list these five")


class _Dither:
    """Stochastic rounding under one key, in parts whose temporaries are made once."""

    def __init__(self, key: bytes, largest: int) -> None:
        self._make = keystream(key).update_into
        self._buffer = memoryview(bytearray(_DITHER * _PART + 15))  # update_into wants 15 bytes of slack
        self._random = np.frombuffer(self._buffer[: _DITHER * _PART], "<u4")
        self._scaled, self._uniform = np.empty(_PART), np.empty(_PART)
        self._largest = largest

    def round(self, values: npt.NDArray[np.floating], scale: float, cut: float | None, out: _Integers) -> None:
        """Makes `out` clamp(floor(clamp(scale * values, cut) + u), largest), u anew each. Without `cut`, no clamp."""
        for start in range(0, values.size, _PART):
            part = values[start : start + _PART]
            scaled, uniform = self._scaled[: part.size], self._uniform[: part.size]
            self._make(_ZEROS[: _DITHER * part.size], self._buffer)
            np.copyto(uniform, self._random[: part.size])
            uniform *= 2.0 ** (-8 * _DITHER)
            np.copyto(scaled, part)
            scaled *= scale
            if cut is not None:
                np.clip(scaled, -cut, cut, out=scaled)
            scaled += uniform
            np.floor(scaled, out=scaled)
            if cut is not None:
                np.clip(scaled, -self._largest, self._largest, out=scaled)
            np.copyto(out[start : start + _PART], scaled, casting="unsafe")


def _units(field: Field, values: F64) -> npt.NDArray[np.int64]:
    """Totals within the field's limits as integers."""
    return np.rint(np.ldexp(values, field.frac)).astype(np.int64)


def _signed(words: Words) -> _Integers:
    """The same memory, read as two's complement."""
    return words.view(f"<i{words.itemsize}")


def _parts(values: _Integers) -> Iterator[_Integers]:
    return (values[start : start + _PART] for start in range(0, values.size, _PART))


def guarded(total: Words, members: int) -> _Integers:
    """What stands before the guard of an opened sum of `members` vectors, signed, once the guard is found right.

    Raises:
        BurnedError: A guard word is not the number of members.
    """
    values = _signed(total)
    if values.size <= GUARD or members < 1:
        raise LocalProtocolError(f"{total.size} words of {members} members are no sum")
    guard = [int(word) for word in values[-GUARD:]]
    if guard != [members] * GUARD:
        raise _burned(f"its guard says {guard}, where {members} members were summed")
    return values[:-GUARD]


def _refused(problem: str, fix: str) -> ConfigurationError:
    return ConfigurationError(problem, fix=fix)


def _burned(problem: str) -> BurnedError:
    return BurnedError(
        f"a sum is not what honest members make: {problem}; the round is burned and the model stays as it was",
        fix="run the round again with other members; ask the site that is in every burned round",
    )
