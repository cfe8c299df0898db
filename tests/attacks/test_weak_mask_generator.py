"""A mask generator with less key than it is given: 256 bits folded into 128 let other seeds make the same mask."""

from collections.abc import Callable
from typing import Any

import pytest

from privacy.crypto import masks
from privacy.secure_aggregation.rostersum.site_events import Mask
from tests.attacks.siege import Secret, besiege, secret, signed

VICTIM = 0


def folded(key: bytes, start: int = 0, keystream: Callable[[bytes, int], Any] = masks.keystream) -> Any:
    """The generator of a product that takes 16 bytes of key: both halves, XORed."""
    half = bytes(a ^ b for a, b in zip(key[:16], key[16:], strict=True))
    return keystream(half + half, start)


def twin(key: bytes, bit: int) -> bytes:
    """Another key with the same fold: one bit is changed in each half."""
    changed = bytearray(key)
    for half in (0, 16):
        changed[half + bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def unmasked_by_twins(bit: int) -> Secret:
    """The victim's vector less masks of which the attacker knows no seed, but for each a twin."""
    b = besiege()
    b.order(1)
    upload = b.tried(b.start(1))[VICTIM]
    (mask,) = b.of(b.effects[VICTIM], Mask)
    vector = b.ys[upload.ctx, VICTIM].copy()
    masks.add(vector, [(-1 if sign > 0 else 1, twin(key, bit)) for sign, key in mask.masks])
    return signed(vector)


@pytest.mark.parametrize("bit", [0, 7, 64, 127])
def test_equal_folds_do_not_make_equal_masks(bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin of each seed unmasks nothing, since the generator is keyed by all 256 bits; with the folded one, all."""
    assert unmasked_by_twins(bit) != secret(VICTIM, 1)
    monkeypatch.setattr(masks, "keystream", folded)
    assert unmasked_by_twins(bit) == secret(VICTIM, 1)


def collisions() -> set[int]:
    """The bits of a key whose change, with that of the bit 128 further on, leaves the mask's first block as it was."""
    key = bytes(range(32))
    zeros = bytes(16)
    mask = masks.keystream(key).update(zeros)
    return {bit for bit in range(128) if masks.keystream(twin(key, bit)).update(zeros) == mask}


def test_no_two_bits_of_a_key_cancel_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all 128 pairs of bits no one leaves the mask as it was; of the folded generator, each."""
    assert collisions() == set()
    monkeypatch.setattr(masks, "keystream", folded)
    assert collisions() == set(range(128))
