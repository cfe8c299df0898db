from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from federation.errors import RemoteProtocolError
from privacy.crypto import agreement
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.coordinator_events import ContradictionError
from privacy.secure_aggregation.rostersum.evidence import Suspicion
from privacy.secure_aggregation.rostersum.keybook import KeyBook
from privacy.secure_aggregation.rostersum.messages import Encaps, Keys
from privacy.secure_aggregation.rostersum.terms import Terms
from tests.privacy.secure_aggregation.rostersum.looped import job, key

PRIVATE = [agreement.generate(pq=True) for _ in range(3)]


def signed(message: Any, idx: int | None = None) -> Any:
    """The message as its author, or site `idx`, signs it."""
    author = message.lo if isinstance(message, Encaps) else message.idx
    return messages.sign(message, key((author if idx is None else idx) + 1))


def keys_of(terms: Terms, idx: int, gen: int = 1, **changes: Any) -> Keys:
    """KEYS of a site in epoch 1."""
    x25519_pk, mlkem_pk = PRIVATE[idx].public
    keys = Keys(terms.job_hash, 1, idx, gen, x25519_pk, mlkem_pk if terms.pq else b"", bytes(32))
    made: Keys = signed(replace(keys, **changes))
    return made


def encaps_of(terms: Terms, lo: Keys, hi: Keys, **changes: Any) -> Encaps:
    """An ENCAPS for these keys."""
    encaps = Encaps(terms.job_hash, 1, lo.idx, hi.idx, lo.digest, hi.digest, bytes(1088))
    made: Encaps = signed(replace(encaps, **changes))
    return made


def refused(book: KeyBook, take: Callable[[int, Any], bool], idx: int, message: Any) -> str:
    """The words with which it is refused; the book is as it was."""
    before = dict(book._keys), dict(book._encaps)
    with pytest.raises(RemoteProtocolError) as refusal:
        take(idx, message)
    assert (book._keys, book._encaps) == before
    return str(refusal.value)


def test_new_keys_are_taken_once_and_replaced_by_a_greater_generation() -> None:
    """The same keys again, and older ones, are no error and not new."""
    terms = job()
    book, older, newer = KeyBook(terms, 1), keys_of(terms, 0), keys_of(terms, 0, 5)

    assert book.take_keys(0, older)
    assert not book.take_keys(0, older)
    assert book.take_keys(0, newer)
    assert not book.take_keys(0, older)
    assert book.digest(0) == newer.digest
    assert book.digest(1) is None


def test_a_new_epoch_begins_with_no_keys() -> None:
    """Keys of the old epoch are refused from then on."""
    terms = job()
    book = KeyBook(terms, 1)
    book.take_keys(0, keys_of(terms, 0))

    book.begin(2)

    assert book.known(1) == ()
    assert "of epoch 1, not 2" in refused(book, book.take_keys, 0, keys_of(terms, 0, 9))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"epoch": 2}, "of epoch 2, not 1"),
        ({"job_hash": bytes(32)}, "are of another job"),
        ({"mlkem_pk": bytes(1184)}, "must hold no key of ML-KEM-768"),
        ({"x25519_pk": bytes(32)}, "gives no secret"),
    ],
    ids=["epoch", "job", "ML-KEM without pq", "small order"],
)
def test_keys_that_every_site_would_refuse_are_not_relayed(changes: dict[str, Any], problem: str) -> None:
    """I10 at the coordinator: one site's bad keys must not stop all others with E_KEYSET."""
    terms = job()
    book = KeyBook(terms, 1)

    assert problem in refused(book, book.take_keys, 0, keys_of(terms, 0, **changes))


@pytest.mark.parametrize(
    ("mlkem_pk", "problem"), [(b"", "must hold a key of ML-KEM-768"), (b"\xff" * 1184, "no ML-KEM-768 public key")]
)
def test_keys_with_pq_hold_a_key_of_ml_kem(mlkem_pk: bytes, problem: str) -> None:
    """With pq = 1 a missing key, or one with unreduced coefficients, is refused."""
    terms = job(pq=1)
    book = KeyBook(terms, 1)

    assert problem in refused(book, book.take_keys, 0, keys_of(terms, 0, mlkem_pk=mlkem_pk))


def test_keys_bear_their_sites_signature_and_index() -> None:
    """Another's signature, and another's index, are refused."""
    terms = job()
    book, keys = KeyBook(terms, 1), keys_of(terms, 0)

    assert "do not bear its signature" in refused(book, book.take_keys, 0, signed(keys, 1))
    assert "site 1 sent the keys of site 0" in refused(book, book.take_keys, 1, keys)


def test_copied_public_keys_are_harmless() -> None:
    """I10: two members with one public key are taken: the salt tells them apart, a refusal would help the copier."""
    terms = job()
    book = KeyBook(terms, 1)

    assert book.take_keys(0, keys_of(terms, 0))
    assert book.take_keys(1, keys_of(terms, 1, x25519_pk=PRIVATE[0].public[0]))


def test_all_keys_go_to_every_site_and_encaps_to_the_higher() -> None:
    """What a site must know: everybody's newest keys, its own among them, and the ENCAPS for it."""
    terms = job(pq=1)
    book, keys = KeyBook(terms, 1), [keys_of(terms, idx) for idx in range(3)]
    for each in keys:
        book.take_keys(each.idx, each)
    encaps = encaps_of(terms, keys[0], keys[2])

    assert book.take_encaps(0, encaps)
    assert not book.take_encaps(0, encaps)

    assert book.known(1) == tuple(keys)
    assert book.known(2) == (*keys, encaps)
    assert book.unsettled({0, 1, 2}) == {(0, 1), (1, 2)}
    assert KeyBook(job(), 1).unsettled({0, 1, 2}) == frozenset()


def test_new_keys_drop_the_encaps_of_their_pairs() -> None:
    """An ENCAPS is for exactly two keys: with one of them it goes."""
    terms = job(pq=1)
    book, keys = KeyBook(terms, 1), [keys_of(terms, idx) for idx in range(3)]
    for each in keys:
        book.take_keys(each.idx, each)
    book.take_encaps(0, encaps_of(terms, keys[0], keys[2]))
    book.take_encaps(0, encaps_of(terms, keys[0], keys[1]))

    book.take_keys(2, keys_of(terms, 2, 7))

    assert book.unsettled({0, 1, 2}) == {(0, 2), (1, 2)}
    assert "for keys that have been replaced" in refused(book, book.take_encaps, 0, encaps_of(terms, keys[0], keys[2]))


def test_a_second_encaps_is_evidence() -> None:
    """I22: two ENCAPS of one pair of keys: the first stands."""
    terms = job(pq=1)
    book, keys = KeyBook(terms, 1), [keys_of(terms, idx) for idx in range(3)]
    for each in keys:
        book.take_keys(each.idx, each)
    first, second = encaps_of(terms, keys[0], keys[1]), encaps_of(terms, keys[0], keys[1], ct=b"\x01" * 1088)
    book.take_encaps(0, first)

    with pytest.raises(ContradictionError) as told:
        book.take_encaps(0, second)

    assert told.value.evidence.kind is Suspicion.TWO_ENCAPS
    assert told.value.evidence.messages == (messages.encode(first), messages.encode(second))
    assert book.known(1)[-1] == first


@pytest.mark.parametrize("sender", [0, 1, 2])
def test_encaps_go_from_lower_to_higher(sender: int) -> None:
    """An ENCAPS of another's, or downwards, is refused; without pq all are."""
    terms, plain = job(pq=1), job()
    book, keys = KeyBook(terms, 1), [keys_of(terms, idx) for idx in range(3)]

    assert f"site {sender} sent the ENCAPS of 2 to 1" in refused(
        book, book.take_encaps, sender, encaps_of(terms, keys[2], keys[1])
    )
    without = KeyBook(plain, 1)
    assert "sent the ENCAPS" in refused(without, without.take_encaps, 0, encaps_of(plain, keys[0], keys[1]))


def test_the_keyset_names_the_newest_keys_of_the_members() -> None:
    """What ROUND_START shows is what each member computes from the KEYS it has."""
    terms = job()
    book, keys = KeyBook(terms, 1), [keys_of(terms, idx) for idx in range(3)]
    for each in keys:
        book.take_keys(each.idx, each)

    assert book.keyset((0, 2)) == messages.keyset(((0, keys[0].digest), (2, keys[2].digest)))
