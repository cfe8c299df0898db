import hmac
from dataclasses import FrozenInstanceError

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from federation.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from privacy.crypto import agreement
from privacy.crypto.agreement import Keys

ML_KEM = pytest.mark.skipif(not agreement._has_ml_kem(), reason="this cryptography has no ML-KEM-768")

SMALL = [
    "00" * 32,
    "01" + "00" * 31,
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ec" + "ff" * 30 + "7f",
    "ed" + "ff" * 30 + "7f",
    "ee" + "ff" * 30 + "7f",
]
"""The public keys of small order on Curve25519 (and those that equal them modulo its prime)."""


def test_two_sites_agree() -> None:
    """Each gets the same X25519 secret from its private key and the other's public key."""
    one, other = agreement.generate(pq=False), agreement.generate(pq=False)

    assert one.exchange(other.public[0]) == other.exchange(one.public[0])
    assert [len(key) for key in one.public] == [32, 0]


@pytest.mark.parametrize("encoded", SMALL)
def test_a_key_that_gives_an_all_zero_secret_is_refused(encoded: str) -> None:
    """I10: with a public key of small order the secret would be zero whatever the private key is."""
    with pytest.raises(RemoteProtocolError, match=r"gives no secret.*To fix"):
        agreement.generate(pq=False).exchange(bytes.fromhex(encoded))


@pytest.mark.parametrize("length", [0, 31, 33])
def test_an_x25519_key_has_32_bytes(length: int) -> None:
    """A public key of another length is refused."""
    with pytest.raises(RemoteProtocolError, match=f"of {length} bytes gives no secret"):
        agreement.generate(pq=False).exchange(b"\t" * length)


@ML_KEM
def test_a_secret_travels_in_a_ciphertext() -> None:
    """What is encapsulated for a public key is decapsulated by its owner, and differs each time."""
    keys = agreement.generate(pq=True)
    first, second = agreement.encapsulate(keys.public[1]), agreement.encapsulate(keys.public[1])

    assert len(keys.public[1]) == agreement.MLKEM_KEY
    assert (len(first[0]), len(first[1])) == (agreement.CIPHERTEXT, 32)
    assert keys.decapsulate(first[0]) == first[1]
    assert first[1] != second[1]


@ML_KEM
def test_a_changed_ciphertext_gives_another_secret() -> None:
    """A forged ciphertext is not told from a real one (implicit rejection): its secret is nobody else's."""
    keys = agreement.generate(pq=True)
    ciphertext, shared = agreement.encapsulate(keys.public[1])
    forged = bytes([ciphertext[0] ^ 1]) + ciphertext[1:]

    assert keys.decapsulate(forged) != shared
    assert keys.decapsulate(forged) == keys.decapsulate(forged)


@ML_KEM
@pytest.mark.parametrize("change", ["short", "long", "empty", "not reduced", "last not reduced"])
def test_fips_203s_check_of_an_encapsulation_key_is_made(change: str) -> None:
    """A key of another length, or with a coefficient of 3329 or more, is refused (section 7.2)."""
    key = agreement.generate(pq=True).public[1]
    broken = {
        "short": key[:-1],
        "long": key + b"\0",
        "empty": b"",
        "not reduced": (3329 | int.from_bytes(key[:2], "little") & 0xF000).to_bytes(2, "little") + key[2:],
        "last not reduced": key[:1151] + b"\xff" + key[1152:],
    }[change]
    with pytest.raises(RemoteProtocolError, match=r"no ML-KEM-768 public key.*1184"):
        agreement.encapsulate(broken)


@ML_KEM
@pytest.mark.parametrize("length", [0, 1087, 1089])
def test_fips_203s_check_of_a_ciphertext_is_made(length: int) -> None:
    """A ciphertext of another length is refused (section 7.3)."""
    with pytest.raises(RemoteProtocolError, match=f"{length} bytes are no ML-KEM-768 ciphertext"):
        agreement.generate(pq=True).decapsulate(bytes(length))


def test_keys_without_ml_kem_decapsulate_nothing() -> None:
    """A ciphertext in a job without post-quantum agreement is our own mistake."""
    with pytest.raises(LocalProtocolError, match="without ML-KEM-768"):
        agreement.generate(pq=False).decapsulate(bytes(agreement.CIPHERTEXT))


def test_an_installation_without_ml_kem_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pq = 1 is refused with what to install; pq = 0 goes on."""
    monkeypatch.setattr(agreement, "MLKEM768PrivateKey", None)
    agreement._has_ml_kem.cache_clear()
    try:
        for refused in (lambda: agreement.generate(pq=True), lambda: agreement.encapsulate(bytes(1184))):
            with pytest.raises(ConfigurationError, match=r"no ML-KEM-768.*site's administrator.*cryptography to 50"):
                refused()
        assert agreement.generate(pq=False).public[1] == b""
    finally:
        agreement._has_ml_kem.cache_clear()


def test_pair_roots_are_hkdf_of_both_secrets() -> None:
    """Extract under the salt, then 64 bytes with the info D("pair-root"): RFC 5869 written out."""
    salt, mlkem, x25519 = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32
    for secret in (b"", mlkem):
        extracted = hmac.digest(salt, secret + x25519, "sha256")
        info = b"rostersum/v2/pair-root\0"
        first = hmac.digest(extracted, info + b"\1", "sha256")
        second = hmac.digest(extracted, first + info + b"\2", "sha256")

        root = agreement.pair_root(salt, secret, x25519)

        assert (root.mask, root.seal) == (first, second)


@pytest.mark.parametrize("lengths", [(31, 0, 32), (32, 31, 32), (32, 32, 0), (32, 0, 33), (0, 0, 32)])
def test_a_root_is_not_made_of_less(lengths: tuple[int, int, int]) -> None:
    """Secrets and salt have their lengths: concatenation is then injective."""
    with pytest.raises(LocalProtocolError, match="32 bytes each"):
        agreement.pair_root(*(bytes(length) for length in lengths))


def test_secrets_are_not_printed_and_not_changed() -> None:
    """Neither private keys nor roots show in a log line or traceback, and both are frozen."""
    root = agreement.pair_root(bytes(32), b"", b"\x07" * 32)
    keys = Keys(X25519PrivateKey.generate(), None)

    assert repr(root) == "PairRoot()"
    assert repr(keys) == "Keys()"
    with pytest.raises(FrozenInstanceError):
        root.mask = b""  # type: ignore[misc] # the point
