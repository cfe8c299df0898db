import math
import os
import tracemalloc
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import ConfigurationError, LocalProtocolError
from federation.vector import BLOCK, F32, F64
from privacy.crypto import canonical, masks
from privacy.crypto.masks import Ring, SignedKey, Words
from privacy.secure_aggregation.rostersum import terms
from privacy.secure_aggregation.rostersum.encoding import (
    GUARD,
    BurnedError,
    Codec,
    DeclineError,
    Field,
    FieldsCodec,
    TrainCodec,
    Weighting,
    codec_of,
)
from privacy.secure_aggregation.rostersum.fields import pack

QUICK = settings(max_examples=40, deadline=None)
KEY = bytes(range(32))

CODEC = TrainCodec(bound=0.5, clip=1.0, q_bits=22, weighting="records", w_min=10, w_max=1000)
UNIFORM = TrainCodec(bound=0.5, clip=1.0, q_bits=22, weighting="uniform", w_min=1, w_max=1)
FIELDS = FieldsCodec.of(
    Field("rows", 1, 0, 0.0, 1e6), Field("mean", 3, 20, -100.0, 100.0), Field("share", 2, 30, 0.0, 1.0)
)


def whole(blocks: Iterable[Words]) -> Words:
    """Blocks as one vector."""
    return np.concatenate(list(blocks))


def update(seed: int, size: int, norm: float = 0.9) -> F32:
    """An update of this norm."""
    values = np.random.default_rng(seed).standard_normal(size)
    return np.asarray(values * (norm / float(np.linalg.norm(values))), np.float32)


def encoded(codec: TrainCodec, values: F32, number: int = 1, ring: Ring = 32) -> Words:
    """One site's vector for one attempt."""
    return whole(codec.prepare(values, number).encode(ring, os.urandom(32)))


def largest_q_bits(sites: int, ring: Ring) -> int:
    """The most bits that leave room for so many sites, among those that binary64 can round."""
    return min(52, (((1 << (ring - 1)) - 1) // sites + 1).bit_length() - 1)


# ---------------------------------------------------------------------------------------------------------- train codec


@QUICK
@given(
    sites=st.integers(3, 12),
    size=st.integers(1, 40),
    weights=st.lists(st.integers(0, 3000), min_size=12, max_size=12),
    data=st.data(),
)
def test_the_opened_sum_is_the_weighted_mean(sites: int, size: int, weights: list[int], data: st.DataObject) -> None:
    """I1: masked, summed, unmasked and decoded, updates give their weighted mean to one unit for each site.

    The sum of the encoded vectors is exact modulo the ring; weights count as clipped into the codec's limits.
    """
    ring: Ring = data.draw(st.sampled_from(masks.RINGS[1:]))
    updates = [update(seed, size) for seed in range(sites)]
    vectors = [encoded(CODEC, each, number, ring) for each, number in zip(updates, weights, strict=False)]
    plain = sum(vectors[1:], vectors[0].copy())
    selves = [os.urandom(32) for _ in range(sites)]
    pairs = {(i, j): os.urandom(32) for i in range(sites) for j in range(i + 1, sites)}
    total = np.zeros(size + 1 + GUARD, masks.dtype(ring))
    for i, vector in enumerate(vectors):
        keys: list[SignedKey] = [(1, selves[i])]
        keys += [(1 if i < j else -1, pairs[min(i, j), max(i, j)]) for j in range(sites) if j != i]
        masks.add(vector, keys)
        total += vector
    masks.add(total, [(-1, key) for key in selves])

    assert (total == plain).all()
    opened = CODEC.decode(total, sites)
    clipped = np.clip(weights[:sites], 10, 1000).astype(float)
    wanted = sum(w * u.clip(-0.5, 0.5).astype(float) for w, u in zip(clipped, updates, strict=True)) / clipped.sum()
    unit = CODEC.bound * 2 * sites / opened.units
    assert np.abs(np.concatenate(list(opened.mean())) - wanted).max() <= unit
    assert opened.weight == pytest.approx(clipped.sum(), abs=sites * 1000 / CODEC.q)


@pytest.mark.parametrize("ring", masks.RINGS)
@pytest.mark.parametrize("extreme", [1, -1])
def test_nothing_overflows_at_saturation(ring: Ring, extreme: int) -> None:
    """I2: for 3 to 100 sites and the largest Q with room, all at the bound and the largest weight, sums stay exact."""
    for sites in range(3, 101):
        bits = largest_q_bits(sites, ring)
        codec = TrainCodec(0.5, 10.0, bits, "uniform", 1, 1)
        codec.require_room(sites, ring, 12)
        one = encoded(codec, np.full(7, extreme * 3e38 * 1.0, np.float32), 1, ring)
        signed = one.view(f"<i{ring // 8}")
        assert signed[0] == codec.q
        assert abs(int(signed[1]) - extreme * codec.q) <= 1
        total = np.zeros(12, masks.dtype(ring))
        for _ in range(sites):
            total += one
        assert total.view(f"<i{ring // 8}").tolist() == [sites * int(word) for word in signed]
        (mean,) = codec.decode(total, sites).mean()
        assert mean == pytest.approx(extreme * 0.5, rel=2 / codec.q)


@pytest.mark.parametrize("ring", masks.RINGS)
def test_a_ring_without_room_is_refused(ring: Ring) -> None:
    """I2: one bit more than fits is refused, for every number of sites, before anything could overflow."""
    for sites in range(3, 101):
        bits = largest_q_bits(sites, ring)
        if bits < 52:
            with pytest.raises(ConfigurationError, match=f"{sites} sites' updates can overflow {ring} bits.*author"):
                TrainCodec(0.5, 1.0, bits + 1, "uniform", 1, 1).require_room(sites, ring, 12)


def test_the_texts_examples_of_head_room_hold() -> None:
    """22 bits fit a ring of 32 at n = 100, and 8 bits one of 16."""
    assert largest_q_bits(100, 32) >= 22
    assert largest_q_bits(100, 16) == 8


@pytest.mark.parametrize("size", [1, 4, BLOCK - 5, BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 4])
def test_a_vector_comes_in_blocks(size: int) -> None:
    """Blocks of at most BLOCK words hold weight, values in their order, and the guard, wherever a border falls."""
    values = np.linspace(-0.4, 0.4, size).astype(np.float32)
    prepared = TrainCodec(0.5, 1e6, 22, "uniform", 1, 1).prepare(values, 1)

    blocks = list(prepared.encode(32, KEY))

    assert all(block.size == BLOCK for block in blocks[:-1])
    vector = whole(blocks).view("<i4")
    assert vector.size == prepared.words == size + 1 + GUARD
    assert vector[0] == 2**22 - 1
    assert vector[-GUARD:].tolist() == [1] * GUARD
    assert np.abs(vector[1:-GUARD] - values.astype(float) / 0.5 * (2**22 - 1)).max() <= 1


def test_each_attempt_is_rounded_afresh() -> None:
    """Another key rounds otherwise, the same key the same; blocks are the caller's to change."""
    prepared = UNIFORM.prepare(update(1, 1000), 1)
    first = whole(prepared.encode(32, KEY))
    for block in prepared.encode(32, KEY):
        block[:] = 0

    assert (whole(prepared.encode(32, KEY)) == first).all()
    difference = (whole(prepared.encode(32, bytes(32))) - first).view("<i4")
    assert set(np.unique(difference)) == {-1, 0, 1}


@pytest.mark.parametrize("weight", [1, 3])
@pytest.mark.parametrize("value", [0.31, -0.31, 0.0009765625 * 0.5])
def test_rounding_is_unbiased(value: float, weight: int) -> None:
    """I16: over many values the mean of what is sent is the value itself, and only its two neighbours are sent."""
    codec = TrainCodec(0.5, 1e6, 4, "declared", 1, 3)
    count = 400_000
    sent = encoded(codec, np.full(count, value, np.float32), weight).view("<i4")[1:-GUARD]
    exact = weight / 3 * float(np.float32(value)) * 15 / 0.5
    low, share = math.floor(exact), exact - math.floor(exact)

    assert set(np.unique(sent)) == {low, low + 1}
    assert abs((sent - low).mean() - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_the_weights_rounding_is_unbiased() -> None:
    """I16: so is the weight's: 3 of 7 at Q = 15 is sent as 6 or 7, 3/7 of the times as 7."""
    codec = TrainCodec(0.5, 1.0, 4, "declared", 1, 7)
    prepared = codec.prepare(np.zeros(1, np.float32), 3)
    count = 3000
    sent = [int(next(prepared.encode(32, os.urandom(32)))[0]) for _ in range(count)]
    share = 3 / 7 * 15 - 6

    assert set(sent) == {6, 7}
    assert abs(sum(sent) / count - 6 - share) < 5 * math.sqrt(share * (1 - share) / count)


@QUICK
@given(
    size=st.integers(1, 400),
    norm=st.sampled_from([0.01, 0.9, 1.0, 5.0, 1e6]),
    bits=st.integers(1, 22),
    bound=st.sampled_from([0.05, 0.5, 1.0]),
    number=st.integers(1, 9),
)
def test_each_word_is_the_texts_formula(size: int, norm: float, bits: int, bound: float, number: int) -> None:
    """Weight clamp(floor(w Q + u), 0, Q), value clamp(floor(w delta Q / B + u), -Q, Q), u the key's 32-bit words.

    delta is the update clipped to its norm and then to the bound; a word may be another's neighbour only where binary64
    cannot tell on which side of an integer its formula lies.
    """
    codec = TrainCodec(bound, 1.0, bits, "declared", 2, 7)
    values = update(size, size, norm)
    sent = whole(codec.prepare(values, number).encode(32, KEY)).view("<i4")[:-GUARD]

    random = masks.keystream(KEY).update(bytes(4 * (size + 1)))
    share = min(max(number, 2), 7) / 7
    length = float(np.linalg.norm(values.astype(np.float64)))
    clipped = np.clip(values.astype(np.float64) * min(1.0, 1.0 / length), -bound, bound)
    exact = (
        np.concatenate([[share * codec.q], share * clipped * codec.q / bound]) + np.frombuffer(random, "<u4") / 2**32
    )
    sure = np.abs(exact - np.rint(exact)) > 1e-8
    assert sure.mean() > 0.9 or size < 20
    assert (sent == np.clip(np.floor(exact), -codec.q, codec.q))[sure].all()


def test_whole_values_are_sent_exactly() -> None:
    """A value that is a whole number of units is not moved: zero stays zero, the bound is Q, the least weight exact."""
    codec = TrainCodec(0.5, 10.0, 22, "declared", 1, 3)
    vector = encoded(codec, np.array([0, 0.5, -0.5, 9], np.float32), 3).view("<i4")
    assert vector.tolist() == [codec.q, 0, codec.q, -codec.q, codec.q, 1, 1, 1, 1]
    for number in (1, 2, 3):
        assert encoded(codec, np.zeros(1, np.float32), number)[0] == number * (codec.q // 3)


def test_an_update_is_clipped_to_its_norm_and_then_to_the_bound() -> None:
    """L2 first: (3, 4) at C = 1 is (0.6, 0.8), of which B = 0.7 leaves (0.6, 0.7)."""
    codec = TrainCodec(0.7, 1.0, 20, "uniform", 1, 1)
    prepared = codec.prepare(np.array([3, 4], np.float32), 1)

    vector = whole(prepared.encode(32, KEY)).view("<i4")

    assert np.abs(vector[1:3] / codec.q * 0.7 - [0.6, 0.7]).max() < 2e-6
    assert prepared.clipped == ("the update's norm of 5 to 1", "values of up to 0.8 to 0.7")


def test_what_is_within_limits_is_not_reported() -> None:
    """An update within norm, bound and weights has nothing cut off."""
    assert CODEC.prepare(np.array([0.3, -0.4], np.float32), 10).clipped == ()
    assert UNIFORM.prepare(np.zeros(3, np.float32), 77).clipped == ()


@pytest.mark.parametrize(("number", "weight"), [(0, 10), (9, 10), (10, 10), (500, 500), (1000, 1000), (10**9, 1000)])
def test_an_overweight_site_is_clipped_and_never_refused(number: int, weight: int) -> None:
    """I15: a record count outside the limits counts as the limit; only the site's own log knows."""
    prepared = CODEC.prepare(np.zeros(2, np.float32), number)
    assert prepared.weight == weight
    assert prepared.clipped == (() if number == weight else (f"the weight of {number} to {weight}",))
    assert abs(int(next(prepared.encode(32, KEY))[0]) - weight / 1000 * CODEC.q) < 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 1, BLOCK, 2 * BLOCK - 1])
def test_an_update_that_is_not_finite_is_declined(bad: float, position: int) -> None:
    """I15: one NaN or infinity anywhere declines the step, before anything is encoded."""
    values = np.zeros(2 * BLOCK, np.float32)
    values[position] = bad
    with pytest.raises(DeclineError, match="NaN or infinite"):
        UNIFORM.prepare(values, 1)


def test_the_largest_and_least_floats_are_finite() -> None:
    """Updates at float32's ends are clipped like others: their norm does not overflow, nor vanish."""
    huge = UNIFORM.prepare(np.full(1000, 3.4e38, np.float32), 1)
    tiny = UNIFORM.prepare(np.full(1000, 1e-45, np.float32), 1)
    assert huge.norm == pytest.approx(3.4e38 * math.sqrt(1000), rel=1e-6)
    assert 0 < tiny.norm < 1e-43
    assert (
        np.abs(whole(huge.encode(32, KEY)).view("<i4")[1:-GUARD] / UNIFORM.q * 0.5 - 1 / math.sqrt(1000)).max() < 1e-6
    )


def test_memory_does_not_grow_with_the_update() -> None:
    """Preparing, encoding and decoding 16 MiB holds a few blocks at a time."""
    values = update(1, 1 << 22)
    total = np.empty(values.size + 1 + GUARD, "<u4")
    tracemalloc.start()
    start = 0
    for block in UNIFORM.prepare(values, 1).encode(32, KEY):
        total[start : start + block.size] = block
        start += block.size
    counted = sum(block.size for block in UNIFORM.decode(total, 1).mean())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert counted == values.size
    assert peak < 3 << 20


# --------------------------------------------------------------------------------------------------------- burned sums


def honest(members: int = 4, size: int = 50) -> Words:
    """The sum of honest members' vectors at different weights."""
    vectors = [encoded(CODEC, update(seed, size), 10 + 300 * seed) for seed in range(members)]
    return sum(vectors[1:], vectors[0])


@QUICK
@given(
    members=st.integers(1, 8), size=st.integers(1, 60), scale=st.sampled_from([0, 1e-9, 1, 1e9, 3e38]), data=st.data()
)
def test_no_honest_sum_is_burned(members: int, size: int, scale: float, data: st.DataObject) -> None:
    """I23: whatever finite updates and weights honest members have, at the limits too, the checks let the sum pass."""
    bits = data.draw(st.integers(2, 22))
    codec = TrainCodec(
        data.draw(st.sampled_from([1e-3, 0.5, 100.0])), 1.0, bits, "records", 1, data.draw(st.integers(1, 3))
    )
    one = (np.random.default_rng(size).choice([-1, 1], size) * scale).astype(np.float32)
    vectors = [encoded(codec, one, data.draw(st.integers(0, 5))) for _ in range(members)]

    assert codec.decode(sum(vectors[1:], vectors[0]), members).values.size == size


@pytest.mark.parametrize("word", [-1, -2, -3, -4])
@pytest.mark.parametrize("off", [1, -1, 1 << 31])
def test_each_guard_word_burns(word: int, off: int) -> None:
    """I23: a guard word that is not the number of members shows a sum that is not theirs."""
    total = honest()
    total[[word]] += np.uint32(off % 2**32)
    with pytest.raises(BurnedError, match=r"its guard says.*4 members were summed.*burned.*consortium"):
        CODEC.decode(total, 4)


def test_the_guard_counts_members() -> None:
    """I23: a sum of four is not one of three or five."""
    for members in (3, 5):
        with pytest.raises(BurnedError, match=f"{members} members were summed"):
            CODEC.decode(honest(), members)


@pytest.mark.parametrize("weight", [0, 1, 4 * (10 * CODEC.q // 1000) - 1, 4 * CODEC.q + 1, 2**31, 2**32 - 1])
def test_a_weight_that_members_cannot_have_burns(weight: int) -> None:
    """I23: below |P| times the least, above |P| Q, or negative: the mean would be scaled at will."""
    total = honest()
    total[0] = weight
    with pytest.raises(BurnedError, match="its weight is"):
        CODEC.decode(total, 4)


def test_weights_at_the_limits_pass() -> None:
    """The least and the largest sum of weights are not refused."""
    total = np.array([0, 0, *[4] * GUARD], "<u4")
    for weight in (4 * (10 * CODEC.q // 1000), 4 * CODEC.q):
        total[0] = weight
        assert CODEC.decode(total, 4).units == weight


def test_a_weight_of_zero_burns_though_the_least_is_zero() -> None:
    """I23: where Q is too coarse for the least weight, a sum of weight 0 has no mean and is burned."""
    codec = TrainCodec(0.5, 1.0, 1, "records", 1, 2)
    with pytest.raises(BurnedError, match="its weight is 0, where 3 members have 1 to 3"):
        codec.decode(np.array([0, 0, *[3] * GUARD], "<u4"), 3)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_beyond_its_weight_burns(sign: int) -> None:
    """I23: |V| may be W + 2 |P| and no more; the norm would let it pass."""
    codec = TrainCodec(0.5, 100.0, 22, "records", 10, 1000)
    weight = 2 * codec.q
    for value, passes in ((weight + 8, True), (weight + 9, False)):
        total = np.array([weight, (sign * value) % 2**32, *[4] * GUARD], "<u4")
        if passes:
            assert codec.decode(total, 4).units == weight
        else:
            with pytest.raises(BurnedError, match=f"larger than its weight of {weight} allows"):
                codec.decode(total, 4)


def test_a_norm_beyond_the_clip_burns() -> None:
    """I23: B ||V|| may be C (W + |P|) + B |P| sqrt(D) and no more, though each value is within its weight."""
    size, weight = 100, 4 * UNIFORM.q
    limit = (1.0 * (weight + 4) + 0.5 * 4 * math.sqrt(size)) / 0.5 / math.sqrt(size)
    for value, passes in ((math.floor(limit), True), (math.floor(limit) + 1, False)):
        total = np.array([weight, *[value] * size, *[4] * GUARD], "<u4")
        if passes:
            assert UNIFORM.decode(total, 4).units == weight
        else:
            with pytest.raises(BurnedError, match=r"its norm is .* is allowed"):
                UNIFORM.decode(total, 4)


def test_noise_in_place_of_a_sum_burns() -> None:
    """I23: a sum that a lost mask turned to noise does not pass by chance."""
    for seed in range(20):
        noise = np.frombuffer(np.random.default_rng(seed).bytes(4 * 55), "<u4")
        with pytest.raises(BurnedError, match="guard"):
            CODEC.decode(noise, 4)


def test_a_burned_sum_is_found_in_any_block() -> None:
    """I23: the check looks at all of a long vector."""
    size = 3 * BLOCK
    total = np.zeros(size + 1 + GUARD, "<u4")
    total[0], total[-GUARD:] = UNIFORM.q * 3, 3
    assert UNIFORM.decode(total, 3).values.size == size
    total[-GUARD - 1] = UNIFORM.q * 3 + 7
    with pytest.raises(BurnedError, match="larger than its weight"):
        UNIFORM.decode(total, 3)


@pytest.mark.parametrize("words", [0, 4, 5])
def test_a_sum_holds_a_value(words: int) -> None:
    """What has no room for a value, or no members, is not decoded: our own mistake."""
    with pytest.raises(LocalProtocolError, match=f"{words} words was decoded as an update"):
        CODEC.decode(np.ones(words, "<u4"), 1)
    with pytest.raises(LocalProtocolError, match="are no sum"):
        CODEC.decode(np.zeros(10, "<u4"), 0)


# ---------------------------------------------------------------------------------------------------------------- terms


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bound": 0.0}, "not both finite"),
        ({"bound": math.inf}, "not both finite"),
        ({"bound": math.nan}, "not both finite"),
        ({"clip": -1.0}, "not both finite"),
        ({"clip": math.inf}, "not both finite"),
        ({"q_bits": 0}, "0 bits"),
        ({"q_bits": 53}, "53 bits"),
        ({"bound": 5e-324}, "22 bits"),
        ({"weighting": "rows"}, "weighting 'rows' is unknown.*uniform, declared, records"),
        ({"w_min": 0}, "weights from 0"),
        ({"w_min": 1001}, "weights from 1001 to 1000"),
        ({"w_max": 40961}, "weights from 10 to 40961.*4096"),
    ],
)
def test_terms_that_cannot_be_are_refused(change: dict[str, object], message: str) -> None:
    """Each of a train codec's rules refuses by itself, and tells the job's author what to change."""
    given_ = {"bound": 0.5, "clip": 1.0, "q_bits": 22, "weighting": "records", "w_min": 10, "w_max": 1000} | change
    with pytest.raises(ConfigurationError, match=message) as refused:
        TrainCodec(**given_)  # type: ignore[arg-type] # the point
    assert "the job's author" in str(refused.value)


def test_a_plan_has_room_for_a_value() -> None:
    """Weight, one value and guard are six words."""
    CODEC.require_room(3, 32, 6)
    with pytest.raises(ConfigurationError, match="5 words hold no update"):
        CODEC.require_room(3, 32, 5)


@pytest.mark.parametrize("codec", [CODEC, UNIFORM, FIELDS])
def test_a_codec_is_read_from_its_terms(codec: Codec) -> None:
    """Listed, encoded, decoded and read again, it is the same codec."""
    (listed,) = canonical.dec(canonical.enc(codec.terms))
    assert isinstance(listed, tuple)
    assert codec_of(listed) == codec


def test_a_jobs_terms_list_these_codecs() -> None:
    """What a plan says of its codec, packed as it is signed, is read as the codec that encodes and decodes."""
    fields = tuple(terms.StatField(each.name, each.width, each.frac, each.low, each.high) for each in FIELDS.fields)
    train = terms.TrainCodec(0.5, 1.0, 22, terms.Weighting.RECORDS, 10, 1000)

    assert codec_of(pack(train)) == CODEC
    assert codec_of(pack(terms.FieldsCodec(fields))) == FIELDS
    assert canonical.enc(pack(train)) == canonical.enc(CODEC.terms)


@pytest.mark.parametrize(
    "listed",
    [
        [],
        ["dp", 8],
        ["train", 1, 1.0, 22, "uniform", 1, 1],
        ["train", 0.5, 1.0, 22, "uniform", 1],
        ["train", 0.5, 1.0, 22, "uniform", 1, 1, 1],
        ["fields"],
        ["fields", "rows"],
        ["fields", [["rows", 1, 0, 0, 1]]],
        ["fields", [["rows", 1, 0, 0.0]]],
        ["fields", [["rows", 1, 0, 0.0, 1.0], 7]],
    ],
    ids=str,
)
def test_other_terms_are_refused(listed: list[canonical.Field]) -> None:
    """Another codec, another number of items, or an item of another type is refused."""
    with pytest.raises(ConfigurationError, match=r"codec is not one|a field is not"):
        codec_of(listed)


# --------------------------------------------------------------------------------------------------------- fields codec


def totals(rows: float, mean: list[float], share: list[float]) -> dict[str, F64]:
    """Totals of `FIELDS`."""
    return {"rows": np.array([rows]), "mean": np.array(mean), "share": np.array(share)}


@QUICK
@given(
    sites=st.integers(3, 8),
    rows=st.lists(st.integers(0, 10**6), min_size=8, max_size=8),
    means=st.lists(st.floats(-100, 100), min_size=24, max_size=24),
    shares=st.lists(st.floats(0, 1), min_size=16, max_size=16),
)
def test_pooled_totals_are_the_sums(sites: int, rows: list[int], means: list[float], shares: list[float]) -> None:
    """Counts are exact, fractions to half a unit for each site."""
    total = np.zeros(FIELDS.words, "<u8")
    for i in range(sites):
        one = FIELDS.prepare(totals(rows[i], means[3 * i : 3 * i + 3], shares[2 * i : 2 * i + 2]))
        assert one.clipped == ()
        total += whole(one.encode(64, KEY))

    pooled = FIELDS.decode(total, sites)

    assert list(pooled) == ["rows", "mean", "share"]
    assert pooled["rows"].tolist() == [sum(rows[:sites])]
    wanted = np.array(means[: 3 * sites]).reshape(sites, 3).sum(0)
    assert np.abs(pooled["mean"] - wanted).max() <= sites * 2.0**-21 + 1e-9
    assert (
        np.abs(pooled["share"] - np.array(shares[: 2 * sites]).reshape(sites, 2).sum(0)).max()
        <= sites * 2.0**-31 + 1e-12
    )


@pytest.mark.parametrize("extreme", [1, -1])
def test_fields_do_not_overflow_at_saturation(extreme: int) -> None:
    """I2: at the widest limits with room for 3 to 100 sites, all sites at a limit sum exactly."""
    for sites in range(3, 101):
        limit = 2.0 ** math.floor(math.log2(2**62 / sites))
        codec = FieldsCodec.of(Field("x", 1, 0, -limit, limit))
        codec.require_room(sites, 64, 5)
        one = whole(codec.prepare({"x": np.array([extreme * 1e300])}).encode(64, KEY))
        total = np.zeros(5, "<u8")
        for _ in range(sites):
            total += one
        assert codec.decode(total, sites)["x"].tolist() == [extreme * limit * sites]
        with pytest.raises(ConfigurationError, match=f"field 'x' over {sites} sites can pass"):
            FieldsCodec.of(Field("x", 1, 1, -limit, 0.0)).require_room(sites, 64, 5)


def test_totals_outside_the_limits_are_clipped() -> None:
    """What is cut off is named for the site's own log, and the limit is sent."""
    prepared = FIELDS.prepare(totals(-5, [0, 101, -1e300], [0.5, 1]))
    assert prepared.clipped == (
        "totals of field 'rows' to [0, 1e+06]",
        "totals of field 'mean' to [-100, 100]",
    )
    pooled = FIELDS.decode(whole(prepared.encode(64, KEY)), 1)
    assert pooled["rows"].tolist() == [0]
    assert pooled["mean"].tolist() == [0, 100, -100]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_totals_that_are_not_finite_are_declined(bad: float) -> None:
    """I15: one NaN or infinity declines the step, rather than being clipped."""
    with pytest.raises(DeclineError, match="field 'mean' holds NaN or infinite"):
        FIELDS.prepare(totals(1, [0, bad, 0], [0, 0]))


def test_long_fields_come_in_blocks() -> None:
    """A vector longer than a block is cut, and whole again."""
    codec = FieldsCodec.of(Field("x", BLOCK + 7, 0, 0.0, 9.0))
    values = np.mod(np.arange(BLOCK + 7), 9).astype(np.float64)
    prepared = codec.prepare({"x": values})
    blocks = list(prepared.encode(64, KEY))
    assert [block.size for block in blocks] == [BLOCK, 7 + GUARD]
    assert prepared.words == codec.words
    assert (codec.decode(whole(blocks), 1)["x"] == values).all()
    blocks[0][:] = 0
    assert whole(prepared.encode(64, KEY))[1] == 1


@pytest.mark.parametrize("word", range(10))
@pytest.mark.parametrize("off", [1 << 40, 2**64 - (1 << 40)])
def test_a_corrupted_total_burns(word: int, off: int) -> None:
    """I23: a guard word that is off, or a total outside what the members can have, burns the sum."""
    one = whole(FIELDS.prepare(totals(10, [1, 2, 3], [0.5, 1])).encode(64, KEY))
    total = one * np.uint64(3)
    assert FIELDS.decode(total, 3)["rows"].tolist() == [30]
    total[[word]] += np.uint64(off)
    with pytest.raises(BurnedError, match=r"outside what 3 members can have|its guard says"):
        FIELDS.decode(total, 3)


def test_another_length_of_sum_is_not_decoded() -> None:
    """A sum of other fields, or of less than a guard, is our own mistake."""
    with pytest.raises(LocalProtocolError, match="a sum of 9 words was decoded as 10"):
        FIELDS.decode(np.ones(9, "<u8"), 1)
    with pytest.raises(LocalProtocolError, match="4 words of 1 members are no sum"):
        FIELDS.decode(np.ones(4, "<u8"), 1)


def test_totals_are_those_of_the_fields() -> None:
    """Another name or width is our own mistake; so is another ring."""
    right = totals(1, [0, 0, 0], [0, 0])
    wrong: dict[str, F64]
    for wrong in (right | {"more": np.zeros(1)}, {"rows": np.zeros(1)}):
        with pytest.raises(LocalProtocolError, match="not the codec's 3 fields"):
            FIELDS.prepare(wrong)
    with pytest.raises(LocalProtocolError, match=r"field 'mean' has shape \(2,\), not \(3,\)"):
        FIELDS.prepare(right | {"mean": np.zeros(2)})
    with pytest.raises(LocalProtocolError, match="64 bits, not of 32"):
        list(FIELDS.prepare(right).encode(32, KEY))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (("", 1, 0, 0.0, 1.0), "cannot be called ''"),
        (("é", 1, 0, 0.0, 1.0), "cannot be called 'é'"),
        (("a\n", 1, 0, 0.0, 1.0), "cannot be called"),
        (("a", 0, 0, 0.0, 1.0), "has width 0"),
        (("a", 1, -1, 0.0, 1.0), "-1 binary places"),
        (("a", 1, 63, 0.0, 1.0), "63 binary places"),
        (("a", 1, 0, 1.0, 0.0), r"within \[1.0, 0.0\]"),
        (("a", 1, 0, 0.0, math.inf), "finite limits"),
        (("a", 1, 0, math.nan, 1.0), "finite limits"),
    ],
    ids=str,
)
def test_fields_that_cannot_be_are_refused(field: tuple[str, int, int, float, float], message: str) -> None:
    """Each of a field's rules refuses by itself."""
    with pytest.raises(ConfigurationError, match=message):
        Field(*field)


def test_statistics_that_cannot_be_are_refused() -> None:
    """No field, two of one name, another ring or another number of words."""
    for fields in ((), (FIELDS.fields[0], FIELDS.fields[0])):
        with pytest.raises(ConfigurationError, match="different names"):
            FieldsCodec(fields)
    with pytest.raises(ConfigurationError, match="ring of 64 bits, not 32"):
        FIELDS.require_room(3, 32, 10)
    with pytest.raises(ConfigurationError, match="are 10 words, not 11"):
        FIELDS.require_room(3, 64, 11)


def test_the_choices_of_weighting_are_the_texts() -> None:
    """uniform, declared, records; "uniform" weighs the most, whatever the number."""
    choices: tuple[Weighting, ...] = ("uniform", "declared", "records")
    codecs = [TrainCodec(0.5, 1.0, 22, weighting, 10, 1000) for weighting in choices]
    assert [codec.weight_of(20) for codec in codecs] == [1000, 20, 20]
