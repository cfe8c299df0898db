"""The protocol's test vectors (annex B), each computed by this code from fields laid out as sections 2 to 4 say."""

import hashlib

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from privacy.crypto import agreement, canonical, masks, seal, shamir, signatures
from privacy.crypto.agreement import Keys, PairRoot
from privacy.crypto.canonical import Field
from privacy.crypto.masks import SignedKey, Words
from privacy.secure_aggregation.rostersum.encoding import TrainCodec

SITES = range(3)
IDENTITIES = [Ed25519PrivateKey.from_private_bytes(bytes([i + 1]) * 32) for i in SITES]
COORDINATOR = Ed25519PrivateKey.from_private_bytes(b"\xc0" * 32)
KEYS = [Keys(X25519PrivateKey.from_private_bytes(bytes([0x40 + i]) * 32), None) for i in SITES]
NONCES = [bytes([0x80 + i]) * 32 for i in SITES]
SEEDS = [bytes([0x20 + i]) * 32 for i in SITES]
EPOCH = GEN = ROUND = PLAN = 1
ATTEMPT = 0
CODEC = TrainCodec(0.5, 1.0, 22, "uniform", 1, 1)
MODEL, ARGUMENTS = hashlib.sha256(b"model").digest(), hashlib.sha256(b"").digest()
D = 12


def public(key: Ed25519PrivateKey) -> bytes:
    """The verifying key."""
    return key.public_key().public_bytes_raw()


def roster_hash() -> bytes:
    """Section 2: the coordinator's key and every site's line."""
    lines: list[Field] = [[i, f"org{i}", f"s{i}", public(IDENTITIES[i])] for i in SITES]
    return canonical.digest("roster", public(COORDINATOR), lines)


def job_hash() -> bytes:
    """Section 2: c_max = g_max = 1, no post-quantum agreement, one cell, one plan."""
    plan: list[Field] = [PLAN, "train", "cells", 0, 3, 3, 0, 32, D, b"\x11" * 32, 10, CODEC.terms, []]
    return canonical.digest("job", bytes(range(16)), roster_hash(), [1, 1, 0], [[0, 1, 2]], [plan])


def keys_fields(i: int) -> tuple[Field, ...]:
    """Section 3: all fields of KEYS but its signature."""
    return (job_hash(), EPOCH, i, GEN, *KEYS[i].public, NONCES[i])


def keys_digest(i: int) -> bytes:
    """Section 3."""
    return canonical.digest("keys-digest", *keys_fields(i))


def root(i: int, j: int) -> PairRoot:
    """Section 3: the pair root, as made by either of the two sites."""
    lo, hi = sorted((i, j))
    salt = canonical.digest("pair-salt", job_hash(), EPOCH, lo, hi, keys_digest(lo), keys_digest(hi), b"")
    return agreement.pair_root(salt, b"", KEYS[i].exchange(KEYS[j].public[0]))


def keyset() -> bytes:
    """Section 4.2."""
    return canonical.digest("keyset", [[j, keys_digest(j)] for j in SITES])


def ctx() -> bytes:
    """Section 4.2: the context of attempt 0 over all three."""
    where: tuple[Field, ...] = (job_hash(), EPOCH, ROUND, ATTEMPT, PLAN, list(SITES))
    return canonical.digest("ctx", *where, keyset(), MODEL, ARGUMENTS)


def commitment(i: int) -> bytes:
    """Section 4.2: C."""
    return canonical.digest("commit", ctx(), i, SEEDS[i])


def self_key(i: int) -> bytes:
    """Section 4.2: the self mask's key."""
    return canonical.derive(SEEDS[i], "self-mask", ctx())


def pair_key(i: int, j: int) -> bytes:
    """Section 4.2: the pair mask's key."""
    return canonical.derive(root(i, j).mask, "pair-mask", ctx())


def upload(i: int) -> Words:
    """Section 4.2: y, of eight words i + 1 and the guard."""
    y = np.array([i + 1] * 8 + [1] * 4, "<u4")
    keys: list[SignedKey] = [(1, self_key(i))]
    keys += [(1 if i < j else -1, pair_key(i, j)) for j in SITES if j != i]
    masks.add(y, keys)
    return y


def y_hash(i: int) -> bytes:
    """Section 4.2."""
    return hashlib.sha256(upload(i).tobytes()).digest()


def sealed(i: int, j: int) -> bytes:
    """Section 4.2: the seal of i to j, empty for t = 0."""
    key = canonical.derive(root(i, j).seal, "seal", ctx(), i, j)
    return seal.close(key, canonical.enc(ctx(), i, j, commitment(i)), b"")


def transcript() -> bytes:
    """Section 4.2: T."""
    return canonical.digest("transcript", ctx(), [[j, y_hash(j), commitment(j)] for j in SITES])


def opening(i: int) -> tuple[Field, ...]:
    """Section 4.2: the fields of OPEN."""
    return ctx(), i, SEEDS[i], transcript()


@pytest.mark.parametrize(
    ("name", "computed", "expected"),
    [
        (
            "enc",
            canonical.enc(1, "a", b"", [2], 0.5),
            (
                "6900000008000000000000000173000000016162000000006c0000000d69000000080000000000000002"
                "66000000083fe0000000000000"
            ),
        ),
        ("roster_hash", roster_hash(), "52e9199d72b2c88a49445d4de48811ec9cbd875aa1d38019a511b8f28b4712a4"),
        ("job_hash", job_hash(), "fb24972f172c5662f432fea2075a6900590670d21dc82c4a5543351891418afc"),
        ("keys_digest_0", keys_digest(0), "43e0a65c4256a08887a279531c622c76dbfbe26a72193c003793a0a77aa0ff8a"),
        (
            "sig keys_0",
            signatures.sign(IDENTITIES[0], "keys", *keys_fields(0)),
            (
                "cc3fdd056c5372339c859ba7c64236b9588c2df939b27c424b9a29c1bf37f2ec"
                "7b1a1428fb3699efd62daa0cb0e02afd375a5835b40e29abbf1cf11293f22405"
            ),
        ),
        ("mask_01", root(0, 1).mask, "e597d9eca3b9814f76c5241348d77d16f3198d4edee5a1942e0af8792899fbf9"),
        ("seal_01", root(0, 1).seal, "3d66c6f3e7b85387d88664fdf7f9bfc0aa35c818fc782a0b1f5e20e1afb14f62"),
        ("keyset", keyset(), "7eef6bb8b0727285a75a69f01ad461e530a0ff552e32ef3a99164acfc8d4659b"),
        ("ctx", ctx(), "75dc6605326617e9c8e80d31e7d17b4207a863d02692b28db6ef6c0c01e4eaf0"),
        ("C_0", commitment(0), "e462c358e033e6f6176a292830603ea0a4d9a855f9c45312bcf2aac600bb1e71"),
        ("self-mask key 0", self_key(0), "9ef25e18ce1bf3c1749a981217931aad2f6f6efdd2503c1521dbf85301ecfa64"),
        ("pair-mask key 01", pair_key(0, 1), "924fa13294721d294ed697e4bee700e34aa3cb971023624f9f85f25127ba10e4"),
        (
            "y_0",
            upload(0).tobytes(),
            "e8b83d41ad8618a15afdcec0c391bf5608b7af09d1e4376932e9c18241e2d65498e2202d2914dca325a86774c7b5b474",
        ),
        (
            "y_1",
            upload(1).tobytes(),
            "19f5ce7dfa6e8ae5f684413a7cf3b68da16b41e44274f00271bb9e7f4b41bbdc6e46a96081e823fb21bd85f815ced5a8",
        ),
        ("y_hash_0", y_hash(0), "431d7bef56da78229c22a02b9775356155fa8324d5e9efd3300560d965a400d0"),
        ("seal 0 to 1", sealed(0, 1), "41c8e704bef1608ac3f1e75c05b3d652"),
        ("T", transcript(), "e91e5901dcf049042ddfdd00e70d36e14bae746a946d888af95894d300a971c2"),
        (
            "sig open_0",
            signatures.sign(IDENTITIES[0], "open", *opening(0)),
            (
                "44c6a05032e5ebe9b1b9a6f4bdeb25926ceda68427cf3ca149ffbd4f999f0ae7"
                "0b17af6d37f9157c5b8179dbf74dd382f71dfdf1485bb8cb644ad580570fbe06"
            ),
        ),
        (
            "share x=2 of b=20..20, coefficient 5",
            shamir.split(b"\x20" * 32, 2, [1, 2], lambda _: 5)[1],
            "00202020202020202020202020202020202020202020202020202020202020202a",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
def test_annex_b(name: str, computed: bytes, expected: str) -> None:
    """I20: what this code computes is what the text lists, byte for byte."""
    assert {name: computed.hex()} == {name: expected}


def test_annex_bs_sum() -> None:
    """I20: the three uploads, less the three self masks, are eight sixes, and a guard that says three members."""
    total = sum((upload(i) for i in SITES), np.zeros(D, "<u4"))
    masks.add(total, [(-1, self_key(i)) for i in SITES])
    assert total.tolist() == [6] * 8 + [3] * 4


def test_annex_bs_roots_are_common() -> None:
    """I20: both sites of each pair make the same root, and no two pairs do."""
    assert all(root(i, j) == root(j, i) for i in SITES for j in SITES if i < j)
    assert len({root(i, j).mask for i, j in ((0, 1), (0, 2), (1, 2))}) == 3


def test_annex_bs_signatures_are_verified() -> None:
    """I20: signatures over KEYS and OPEN verify under the roster's keys, and not as each other."""
    signature = signatures.sign(IDENTITIES[0], "keys", *keys_fields(0))
    assert signatures.verify(public(IDENTITIES[0]), signature, "keys", *keys_fields(0))
    assert not signatures.verify(public(IDENTITIES[1]), signature, "keys", *keys_fields(0))
    assert not signatures.verify(public(IDENTITIES[0]), signature, "open", *keys_fields(0))
