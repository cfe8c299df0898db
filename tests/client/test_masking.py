"""Contributions on their way out: found finite once, masked in one pass an attempt, and gone when they must be."""

import hashlib
import logging
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from client import masking
from client.masking import Contributions, prepare
from federation.blobs import BlobRef
from federation.errors import ConfigurationError, LocalProtocolError, StorageError
from federation.vector import BLOCK
from privacy.crypto import masks
from privacy.secure_aggregation.rostersum import noised
from privacy.secure_aggregation.rostersum.encoding import GUARD, DeclineError
from privacy.secure_aggregation.rostersum.noise import round_noise
from privacy.secure_aggregation.rostersum.site_events import Mask
from privacy.secure_aggregation.rostersum.terms import (
    Churn,
    Mechanism,
    Noise,
    Plan,
    TrainCodec,
    Unit,
    Weighting,
)
from tests.privacy.secure_aggregation.rostersum.conftest import STAT, TRAIN
from tests.privacy.secure_aggregation.rostersum.noisy import plan as noisy

SELF, PAIR = b"\x01" * 32, b"\x02" * 32


def train(size: int, weighting: Weighting = Weighting.UNIFORM) -> Plan:
    """A plan for updates of so many values, within +-0.5 and norm 1, of weights 1 to 100."""
    return replace(TRAIN, words=size + 1 + GUARD, codec=TrainCodec(0.5, 1.0, 22, weighting, 1, 100))


def work(plan: Plan, ctx: bytes = b"c" * 32, update: str = "u1") -> Mask:
    """What the machine asks for: one self mask added, one pair mask subtracted."""
    return Mask(b"j" * 32, ctx, update, plan, 3, 1, SELF, ((-1, PAIR),))


def unmasked(contributions: Contributions, payload: BlobRef, plan: Plan) -> np.ndarray:
    """What the payload holds below its masks, signed."""
    words = np.frombuffer(contributions.payloads.get(payload), masks.dtype(plan.ring)).copy()
    masks.add(words, [(-1, SELF), (1, PAIR)])
    return words.view(f"<i{words.itemsize}")


@pytest.fixture
def contributions(tmp_path: Path) -> Contributions:
    """A site that holds nothing."""
    return Contributions(tmp_path / "secure")


@pytest.fixture
def hold(contributions: Contributions) -> Callable[..., None]:
    """Lets the trainer write a result, and prepares it."""

    def put(values: np.ndarray, plan: Plan, update: str = "u1", rows: int = 50, declared: int = 7) -> None:
        contributions.result(update).write_bytes(values.tobytes())
        contributions.prepare(update, plan, rows=rows, declared=declared)

    return put


def files(folder: Path) -> list[str]:
    """Every file in and below the folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("weighting", "weight"), [(Weighting.UNIFORM, 100), (Weighting.DECLARED, 7), (Weighting.RECORDS, 50)]
)
def test_an_update_becomes_a_masked_payload(
    contributions: Contributions, hold: Callable[..., None], weighting: Weighting, weight: int
) -> None:
    """Its name is its SHA-256 and length; below the masks are weight, weighted values, and guard, as the plan says."""
    size = 2 * BLOCK + 17
    values = np.random.default_rng(1).normal(0, 1e-3, size).astype("<f4")
    plan = train(size, weighting)
    hold(values, plan)
    payload = contributions.mask(work(plan))
    assert payload is not None
    content = contributions.payloads.get(payload)
    assert (payload.digest, payload.length) == (hashlib.sha256(content).digest(), plan.size)
    words = unmasked(contributions, payload, plan)
    q = 2**22 - 1
    assert words[0] == pytest.approx(weight / 100 * q, abs=1)
    assert words[-GUARD:].tolist() == [1] * GUARD
    assert np.abs(words[1:-GUARD] - weight / 100 * (values.astype(float) / 0.5) * q).max() <= 1


def test_totals_become_a_masked_payload(contributions: Contributions, hold: Callable[..., None]) -> None:
    """Fields are read in the codec's order, and rounded to its binary places."""
    hold(np.array([1.5, 2.25, 40.0]), STAT)
    payload = contributions.mask(work(STAT))
    assert payload is not None
    assert unmasked(contributions, payload, STAT).tolist() == [384, 576, 40, 1, 1, 1, 1]


def test_each_attempt_rounds_anew(contributions: Contributions, hold: Callable[..., None]) -> None:
    """Two attempts at one update never round alike: else their difference would show more than their masks'."""
    plan = train(1000)
    hold(np.full(1000, 0.01, "<f4"), plan)
    first, second = (contributions.mask(work(plan, ctx)) for ctx in (b"1" * 32, b"2" * 32))
    assert first is not None
    assert second is not None
    one, two = (unmasked(contributions, each, plan) for each in (first, second))
    assert (one != two).any()
    assert np.abs(one - two).max() <= 1


def test_keys_serve_once(contributions: Contributions, hold: Callable[..., None]) -> None:
    """A second vector under an attempt's keys is refused, also after a first that failed."""
    plan = train(10)
    with pytest.raises(LocalProtocolError, match="there is no update 'u1' of plan 1 to mask"):
        contributions.mask(work(plan, b"1" * 32))
    hold(np.zeros(10, "<f4"), plan)
    contributions.mask(work(plan, b"2" * 32))
    for ctx in (b"1" * 32, b"2" * 32):
        with pytest.raises(LocalProtocolError, match="keys were to mask a second vector"):
            contributions.mask(work(plan, ctx))
    with pytest.raises(LocalProtocolError, match="there is no update 'u1' of plan 9"):
        contributions.mask(work(replace(plan, plan_id=9), b"3" * 32))


# -------------------------------------------------------------------------------------------------------- with noise


@pytest.mark.parametrize("law", Mechanism)
def test_an_update_with_noise_becomes_a_masked_payload(
    contributions: Contributions, hold: Callable[..., None], law: Mechanism
) -> None:
    """Below the masks are its rotated values with this site's share of noise, and a bare guard; all are as long."""
    size = BLOCK + 17
    plan = noisy(2 * BLOCK, mechanism=law, z=0.25, scale=2.0**14)
    update = (np.random.default_rng(1).normal(size=size) / size**0.5).astype("<f4")
    hold(update, plan)
    payload = contributions.mask(work(plan))
    assert payload is not None
    assert payload.length == plan.size
    words = unmasked(contributions, payload, plan)
    assert words[-GUARD:].tolist() == [1] * GUARD
    total = words.view("<u4").copy()
    found = noised.decode(plan, total, 1, b"c" * 32, np.empty(2 * BLOCK)).first(size).values
    deviation = round_noise(plan, 3, 1).variance ** 0.5 / 2.0**14
    assert np.std(found - update) == pytest.approx(deviation, rel=0.02)


def test_each_attempt_has_noise_of_its_own_and_for_its_members(
    contributions: Contributions, hold: Callable[..., None]
) -> None:
    """Two attempts share none; one over more members has less, since more shares count."""
    plan = noisy(BLOCK)
    hold(np.zeros(BLOCK, "<f4"), plan)
    noise = []
    for ctx, members in ((b"1" * 32, 3), (b"2" * 32, 3), (b"3" * 32, 9)):
        payload = contributions.mask(replace(work(plan, ctx), members=members))
        assert payload is not None
        noise.append(unmasked(contributions, payload, plan)[:-GUARD].astype(float))
    assert abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 0.03
    expected = [round_noise(plan, members, 1).variance for members in (3, 3, 9)]
    assert [np.var(each) for each in noise] == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_with_noise_nothing_declines(
    contributions: Contributions, hold: Callable[..., None], caplog: pytest.LogCaptureFixture, bad: float
) -> None:
    """What is not finite, or too long, is cut and noised; the site's log alone says so."""
    plan = noisy(16)
    hold(np.array([1.0] * 12 + [bad], "<f4"), plan)
    hold(np.full(9, 3.0, "<f4"), plan, update="u2")
    assert contributions.mask(work(plan)) is not None
    assert contributions.mask(work(plan, b"d" * 32, "u2")) is not None
    assert [each.getMessage() for each in caplog.records] == [
        "update u1 is cut down before it is sent: an update that holds NaN or infinite values to zero",
        "update u2 is cut down before it is sent: the update's norm of 9 to 2",
    ]


@pytest.mark.parametrize("size", [0, 8, 17])
def test_an_update_of_another_model_is_refused_with_noise_too(
    contributions: Contributions, hold: Callable[..., None], size: int
) -> None:
    """Only what pads to the plan's vector; half a value is none. It is erased."""
    with pytest.raises(LocalProtocolError, match=f"a result has {4 * size} bytes|of {size} values does not pad to"):
        hold(np.zeros(size, "<f4"), noisy(16))
    with pytest.raises(LocalProtocolError, match="a result has 42 bytes where its plan has at most 16 values"):
        hold(np.zeros(42, "u1"), noisy(16))
    assert files(contributions.payloads.folder.parent) == []


# ------------------------------------------------------------------------------------------------------- before READY


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_declines(
    contributions: Contributions, hold: Callable[..., None], caplog: pytest.LogCaptureFixture, bad: float
) -> None:
    """Updates and totals alike; the site's log says so, and nothing of the result is left."""
    values = np.zeros(BLOCK + 3)
    values[-1] = bad
    with pytest.raises(DeclineError, match="the update holds NaN or infinite values"):
        hold(values.astype("<f4"), train(values.size))
    with pytest.raises(DeclineError, match="field 'n' holds NaN or infinite totals"):
        hold(np.array([1.0, 1.0, bad]), STAT)
    assert [record.getMessage() for record in caplog.records] == [
        "update u1 is not sent, and its round declined: the update holds NaN or infinite values",
        "update u1 is not sent, and its round declined: field 'n' holds NaN or infinite totals",
    ]
    assert files(contributions.payloads.folder.parent) == []


def test_what_is_cut_down_is_told_to_the_sites_log_alone(
    hold: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Norm, values and weight are clipped, never refused."""
    hold(np.array([30.0, 40.0], "<f4"), train(2, Weighting.RECORDS), rows=1000)
    assert [(each.name, each.levelno, each.getMessage()) for each in caplog.records] == [
        ("parley.site", logging.WARNING, f"update u1 is cut down before it is sent: {what}")
        for what in (
            "the update's norm of 50 to 1",
            "values of up to 0.8 to 0.5",
            "the weight of 1000 to 100",
        )
    ]


def test_a_result_of_another_length_is_refused(contributions: Contributions, hold: Callable[..., None]) -> None:
    """Too short, too long, empty, or of the other width: the plan says how long it is. It is erased."""
    for values in (np.zeros(9, "<f4"), np.zeros(11, "<f4"), np.zeros(0, "<f4"), np.zeros(10)):
        with pytest.raises(LocalProtocolError, match=rf"a result has {values.nbytes} bytes where its plan has 40"):
            hold(values, train(10))
        assert files(contributions.payloads.folder.parent) == []


def test_a_missing_result_is_told(tmp_path: Path) -> None:
    """With its path, and who must act."""
    with pytest.raises(StorageError, match=r"cannot read .*/none: No such file.*site's administrator"):
        prepare(tmp_path / "none", train(10), rows=1, declared=1)


@pytest.mark.parametrize("plan", [train(3), STAT])
def test_noise_that_was_promised_is_never_left_out(tmp_path: Path, plan: Plan) -> None:
    """A plan with churn dp is not encoded as if it had none."""
    noise = Noise(Unit.RECORD, Mechanism.DDGAUSS, 1.0, 64.0, 1.0, 1e-6, 10)
    (tmp_path / "result").write_bytes(bytes(8 * 3 if plan is STAT else 4 * 3))
    prepare(tmp_path / "result", plan, rows=1, declared=1)
    with pytest.raises(ConfigurationError, match="promises noise that this release cannot make"):
        prepare(tmp_path / "result", replace(plan, churn=Churn.DP, dp=noise), rows=1, declared=1)


# ------------------------------------------------------------------------------------------------ what must be gone


def test_an_erased_update_is_gone(contributions: Contributions, hold: Callable[..., None]) -> None:
    """From the disk, and for every later attempt; erasing what is not there is no error."""
    hold(np.zeros(10, "<f4"), train(10))
    contributions.erase("u1")
    contributions.erase("u1")
    assert files(contributions.payloads.folder.parent) == []
    with pytest.raises(LocalProtocolError, match="there is no update 'u1'"):
        contributions.mask(work(train(10)))


def test_an_abandoned_payload_is_gone(contributions: Contributions, hold: Callable[..., None]) -> None:
    """The update stays for another attempt, which masks it under other keys."""
    plan = train(10)
    hold(np.zeros(10, "<f4"), plan)
    contributions.mask(work(plan, b"1" * 32))
    contributions.abandon(b"1" * 32)
    assert files(contributions.payloads.folder.parent) == ["u1.result"]
    second = contributions.mask(work(plan, b"2" * 32))
    assert second is not None
    assert files(contributions.payloads.folder) == [second.hex]


def test_an_attempt_abandoned_before_it_is_masked_never_is(
    contributions: Contributions, hold: Callable[..., None]
) -> None:
    """Whoever masks in another thread may hear of it last."""
    hold(np.zeros(10, "<f4"), train(10))
    contributions.abandon(b"c" * 32)
    assert contributions.mask(work(train(10))) is None
    contributions.erase("u1")
    assert contributions.mask(work(train(10))) is None
    assert files(contributions.payloads.folder.parent) == []


@pytest.mark.parametrize("end", ["abandon", "erase"])
def test_masking_ends_within_a_block(
    contributions: Contributions, hold: Callable[..., None], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """When its attempt is abandoned or its update erased meanwhile; nothing of it is left in a file."""
    plan = train(4 * BLOCK)
    hold(np.zeros(4 * BLOCK, "<f4"), plan)
    begun, go_on, blocks = Event(), Event(), []

    class Slow(masks.Masks):
        def add(self, block: masks.Words, start: int) -> None:
            blocks.append(start)
            begun.set()
            assert go_on.wait(60)
            super().add(block, start)

    monkeypatch.setattr(masking, "Masks", Slow)
    made: list[BlobRef | None] = []
    masker = Thread(target=lambda: made.append(contributions.mask(work(plan))))
    masker.start()
    assert begun.wait(60)
    if end == "abandon":
        contributions.abandon(b"c" * 32)
        go_on.set()
    else:
        update, eraser = contributions._updates["u1"], Thread(target=contributions.erase, args=("u1",))
        eraser.start()
        while not update.erased:
            eraser.join(0.01)
        go_on.set()
        eraser.join(60)
    masker.join(60)
    assert (made, len(blocks) <= 2) == ([None], True)
    contributions.erase("u1")
    assert files(contributions.payloads.folder.parent) == []


def test_an_attempt_abandoned_at_its_last_block_leaves_nothing(
    contributions: Contributions, hold: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the payload has its name already."""
    plan = train(10)
    hold(np.zeros(10, "<f4"), plan)
    masked = contributions._masked

    def abandoned_just_after(*arguments: object) -> BlobRef | None:
        payload = masked(*arguments)
        contributions.abandon(b"c" * 32)
        return payload

    monkeypatch.setattr(contributions, "_masked", abandoned_just_after)
    assert contributions.mask(work(plan)) is None
    assert files(contributions.payloads.folder) == []


def test_a_full_disk_leaves_nothing(
    contributions: Contributions, hold: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half-written payload goes with the refusal, and its keys are spent."""
    plan = train(3 * BLOCK)
    hold(np.zeros(3 * BLOCK, "<f4"), plan)
    encode = type(contributions._updates["u1"].prepared).encode

    def cut(self: object, ring: int, key: bytes) -> Iterator[masks.Words]:
        blocks = encode(self, ring, key)
        yield next(blocks)
        raise StorageError("cannot write", fix="free disk space")

    monkeypatch.setattr(type(contributions._updates["u1"].prepared), "encode", cut)
    with pytest.raises(StorageError, match="cannot write"):
        contributions.mask(work(plan))
    assert files(contributions.payloads.folder) == []
    with pytest.raises(LocalProtocolError, match="second vector"):
        contributions.mask(work(plan))


def test_a_new_process_finds_nothing(contributions: Contributions, hold: Callable[..., None]) -> None:
    """Results, payloads and half-written ones of a killed process are gone, and its folder is this user's alone."""
    folder = contributions.payloads.folder.parent
    hold(np.zeros(10, "<f4"), train(10))
    contributions.mask(work(train(10)))
    (contributions.payloads.folder / "x.part").write_bytes(b"half")
    assert len(files(folder)) == 3
    Contributions(folder)
    assert files(folder) == []
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_emptied_is_told(tmp_path: Path) -> None:
    """What an earlier process left may not stay unnoticed."""
    (tmp_path / "secure" / "payloads" / "stuck").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"cannot make, empty or change .*; updates may be left in it"):
        Contributions(tmp_path / "secure")


@pytest.mark.parametrize("name", ["", "../u", "a/b", "A", "x" * 101])
def test_a_name_that_is_no_file_name_is_refused(contributions: Contributions, name: str) -> None:
    """A result lies in the folder that is emptied, and nowhere else."""
    with pytest.raises(LocalProtocolError, match=r"cannot name an update: 1 to 100 of \[0-9a-z-\] can"):
        contributions.result(name)


# --------------------------------------------------------------------------------------------------------------- memory


def test_memory_does_not_grow_with_the_vector(contributions: Contributions) -> None:
    """Preparing and masking sixteen blocks takes what four take: the vector is never whole in memory."""

    def peak(blocks: int) -> int:
        plan, name = train(blocks * BLOCK), f"u{blocks}"
        contributions.result(name).write_bytes(bytes(4 * blocks * BLOCK))
        tracemalloc.start()
        contributions.prepare(name, plan, rows=1, declared=1)
        contributions.mask(work(plan, bytes([blocks]) * 32, name))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(1)  # what is made once
    assert abs(peak(16) - peak(4)) < 4 * BLOCK
