import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import RemoteProtocolError
from privacy.crypto import seal

QUICK = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("plaintext", [b"", bytes(33), b"share"])
def test_what_was_closed_opens(plaintext: bytes) -> None:
    """The same key and associated data give the plaintext back; the seal is 16 bytes longer."""
    key = os.urandom(32)
    sealed = seal.close(key, b"ctx", plaintext)

    assert len(sealed) == len(plaintext) + seal.TAG
    assert seal.open(key, b"ctx", sealed) == plaintext


def test_it_is_rfc_8439s_construction_with_a_zero_nonce() -> None:
    """The keystream of block 1 under a zero nonce hides the plaintext (RFC 8439, appendix A.1, vector 2)."""
    sealed = seal.close(bytes(32), b"", bytes(16))
    assert sealed[:16].hex() == "9f07e7be5551387a98ba977c732d080d"


@QUICK
@given(bit=st.integers(0, 49 * 8 - 1))
def test_each_changed_bit_breaks_a_seal(bit: int) -> None:
    """Whichever bit of a sealed share is flipped, it does not open."""
    key = os.urandom(32)
    sealed = bytearray(seal.close(key, b"ctx", bytes(33)))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RemoteProtocolError, match=r"49 bytes does not open.*epoch"):
        seal.open(key, b"ctx", bytes(sealed))


def test_another_pair_or_context_does_not_open_it() -> None:
    """Another key or other associated data is refused."""
    key = os.urandom(32)
    sealed = seal.close(key, b"ctx", b"share")
    for other, associated in ((os.urandom(32), b"ctx"), (key, b"ctx2"), (key, b"")):
        with pytest.raises(RemoteProtocolError, match="does not open"):
            seal.open(other, associated, sealed)


@pytest.mark.parametrize("length", [0, 1, 15])
def test_what_is_shorter_than_a_tag_is_no_seal(length: int) -> None:
    """A seal cut to less than its tag is refused like any other."""
    with pytest.raises(RemoteProtocolError, match=f"a seal of {length} bytes does not open"):
        seal.open(bytes(32), b"", bytes(length))
