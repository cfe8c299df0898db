from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import RemoteProtocolError
from privacy.crypto import canonical, signatures
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.messages import (
    MESSAGES,
    NOBODY,
    Close,
    Code,
    Decline,
    Encaps,
    Entry,
    Epoch,
    Full,
    Keys,
    Message,
    Open,
    Outcome,
    Ready,
    Refuse,
    Rescue,
    Result,
    RoundStart,
    Seal,
    Share,
    Shares,
    Train,
    Upload,
)

Make = Callable[..., Any]

H = bytes(range(32))
EXAMPLES: tuple[Message, ...] = (
    Epoch(H, 1),
    Keys(H, 1, 2, 3, H, b"", H),
    Encaps(H, 1, 0, 1, H, H, bytes(1088)),
    Train(H, 1, 2, 3, H, H),
    Ready(H, 1, 2, 3, H, H, 4, H),
    Decline(H, 1, 2),
    RoundStart(H, 1, 2, 3, 4, (0, 1, 2), H, H, H),
    Upload(H, 1, H, H, (Seal(0, bytes(16)), Seal(2, bytes(49)))),
    Full(H, (Entry(0, H, H, bytes(64)), Entry(1, H, H, bytes(64))), (Seal(1, bytes(49)),)),
    Open(H, 1, H, H),
    Rescue(H, (1, 2)),
    Shares(H, 0, (Share(1, bytes(33)),)),
    Result(H, Outcome.BURNED, messages.NOTHING),
    Close(H),
    Refuse(H, 1, 2, 3, Code.E_SEAL, NOBODY, 1, 2, 3),
)

SMALL = {"idx": 16, "lo": 16, "hi": 16, "about": 16, "epoch": 32, "a": 8, "last_a": 8}


def test_there_is_one_example_of_every_message() -> None:
    """What the tests below say they say of all messages."""
    assert {type(each) for each in EXAMPLES} == set(MESSAGES.values())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.TAG)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    """Its encoding gives the same message, byte for byte."""
    assert messages.decode(messages.encode(message)) == message


def test_what_is_known_of_a_message_is_not_known_of_its_copies(consortium: Make) -> None:
    """A verified signature, keys' digest, context and transcript are worked out once, and anew for other fields."""
    key, other = consortium().sites[:2]
    vk, wrong = key.public_key().public_bytes_raw(), other.public_key().public_bytes_raw()
    for example in EXAMPLES:
        signed = messages.sign(example, key)
        assert messages.verify(signed, vk)
        assert not messages.verify(signed, wrong)
        assert messages.verify(signed, vk)
        assert not messages.verify(replace(signed, signature=bytes(64)), vk)
        assert not messages.verify(messages.decode(messages.encode(replace(signed, signature=bytes(64)))), vk)
    keys, start = Keys(H, 1, 2, 3, H, b"", H), RoundStart(H, 1, 2, 3, 4, (0, 1, 2), H, H, H)
    full = Full(H, (Entry(0, H, H, bytes(64)),), ())
    changed = replace(keys, gen=4), replace(start, a=4), replace(full, entries=(Entry(1, H, H, bytes(64)),))
    assert (keys.digest, start.ctx, full.transcript) == (keys.digest, start.ctx, full.transcript)
    assert keys.digest != changed[0].digest == Keys(H, 1, 2, 4, H, b"", H).digest
    assert start.ctx != changed[1].ctx == RoundStart(H, 1, 2, 4, 4, (0, 1, 2), H, H, H).ctx
    assert full.transcript != changed[2].transcript == messages.transcript(H, changed[2].entries)


def test_nothing_is_verified_twice(consortium: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature that was found right is not worked out again for the same key; one that was wrong is."""
    key = consortium().sites[0]
    vk = key.public_key().public_bytes_raw()
    right, wrong = messages.sign(Close(H), key), Close(H)
    asked: list[bytes] = []
    verify = signatures.verify

    def counted(vk: bytes, signature: bytes, *stated: Any) -> bool:
        asked.append(signature)
        return verify(vk, signature, *stated)

    monkeypatch.setattr(signatures, "verify", counted)
    assert [messages.verify(right, vk) for _ in range(3)] == [True] * 3
    assert [messages.verify(wrong, vk) for _ in range(2)] == [False] * 2
    assert asked == [right.signature, wrong.signature, wrong.signature]


def test_a_site_of_a_hundred_says_less_than_25_kb_beside_its_vector() -> None:
    """READY, UPLOAD with a sealed share for each other member, and OPEN: all that a site sends in a round."""
    seals = tuple(Seal(idx, bytes(49)) for idx in range(1, 100))
    said = Ready(H, 1, 2, 3, H, H, 0, H), Upload(H, 0, H, H, seals), Open(H, 0, H, H)

    assert sum(len(messages.encode(each)) for each in said) < 25_000


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.TAG)
def test_a_signature_covers_what_the_text_says(consortium: Make, message: Message) -> None:
    """A change of any covered field breaks it: all but the signature itself, and the seals of an UPLOAD or FULL."""
    key = consortium().sites[0]
    vk = key.public_key().public_bytes_raw()
    signed = messages.sign(message, key)
    loose = {Upload: {"seals"}, Full: {"seals"}}.get(type(message), set()) | {"signature"}
    assert messages.verify(signed, vk)
    for field in fields(message):
        changed = replace(signed, **{field.name: other(field.name, getattr(message, field.name))})
        if field.name != "signature":
            assert messages.verify(changed, vk) == (field.name in loose), field.name


def other(name: str, value: Any) -> Any:
    """Another value that the field may hold."""
    match value:
        case Code():
            return Code.E_SIG
        case Outcome():
            return Outcome.OPENED
        case int():
            return (value + 1) % (1 << SMALL.get(name, 64))
        case bytes():
            return bytes(1184) if not value else bytes([value[0] ^ 1, *value[1:]])
        case (Entry(), *_):
            return (replace(value[0], y_hash=bytes(32)), *value[1:])
        case _:
            return value[1:]


def test_a_fulls_transcript_covers_no_signature() -> None:
    """A mauled signature of an entry changes neither T nor what the coordinator signed; it is refused by itself."""
    full = next(each for each in EXAMPLES if isinstance(each, Full))
    mauled = replace(full, entries=(replace(full.entries[0], signature=bytes([1] * 64)), full.entries[1]))
    assert (mauled.transcript, mauled.covered()) == (full.transcript, full.covered())


def test_no_two_types_of_message_share_a_signature(consortium: Make) -> None:
    """RESCUE and RESULT over the same leading fields are signed under their own types."""
    key = consortium().sites[0]
    vk = key.public_key().public_bytes_raw()
    close = messages.sign(Close(H), key)
    assert not messages.verify(replace(Epoch(H, 0), signature=close.signature), vk)
    train = messages.sign(Train(H, 1, 2, 3, H, H), key)
    assert not messages.verify(Ready(H, 1, 2, 3, H, H, 0, H, train.signature), vk)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Epoch(H[1:], 1), "Epoch.job_hash: 32 bytes"),
        (lambda: Epoch(H, 1 << 32), "Epoch.epoch: an unsigned integer of 32 bits"),
        (lambda: Epoch(H, -1), "Epoch.epoch"),
        (lambda: Epoch(H, True), "Epoch.epoch"),  # noqa: FBT003 - a bool is no integer on the wire
        (lambda: Decline(H, 1, 1 << 16), "Decline.idx: an unsigned integer of 16 bits"),
        (lambda: Keys(H, 1, 2, 3, H, bytes(7), H), "Keys.mlkem_pk: 0 or 1184 bytes"),
        (lambda: Upload(H, 1, H, H, (Seal(0, bytes(17)),)), "Seal.sealed: 16 or 49 bytes"),
        (lambda: Result(H, 1, H), "Result.outcome: one of Outcome"),
        (lambda: Rescue(H, [1]), "Rescue.missing: a list"),
        (lambda: Full(H, (Seal(0, bytes(16)),), ()), "a Entry is expected"),
    ],
)
def test_a_message_cannot_exist_invalid(make: Callable[[], Message], problem: str) -> None:
    """A field of another type, width or length is refused where it would be made, and named."""
    with pytest.raises(RemoteProtocolError, match=problem):
        messages.encode(make())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        canonical.enc("hello"),
        canonical.enc("epoch", H),
        canonical.enc("epoch", H, 1, bytes(64), 1),
        canonical.enc("epoch", H, "1", bytes(64)),
        canonical.enc("result", H, 3, H, bytes(64)),
        canonical.enc(1, H, 1, bytes(64)),
        canonical.enc("rescue", H, 1, bytes(64)),
        canonical.enc("full", H, (1,), (), bytes(64)),
        messages.encode(Close(H)) + b"\0",
    ],
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    """Another type, number or kind of fields, or trailing bytes: RemoteProtocolError, saying what to do."""
    with pytest.raises(RemoteProtocolError, match=r"To fix"):
        messages.decode(content)


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(EXAMPLES), st.data())
def test_i19_one_message_has_one_encoding(message: Message, data: st.DataObject) -> None:
    """Changed bytes are refused, or are another message that encodes to exactly these bytes."""
    content = messages.encode(message)
    at = data.draw(st.integers(0, len(content) - 1))
    wrong = content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    try:
        changed = messages.decode(wrong)
    except RemoteProtocolError:
        return
    assert (messages.encode(changed), changed == message) == (wrong, False)


def test_the_context_covers_everything_that_an_attempt_fixes() -> None:
    """Another job, epoch, round, attempt, plan, set, keyset, model or arguments: another context."""
    start = next(each for each in EXAMPLES if isinstance(each, RoundStart))
    changed = [
        replace(start, **{field.name: other(field.name, getattr(start, field.name))})
        for field in fields(start)
        if field.name != "signature"
    ]
    assert len({start.ctx, *(each.ctx for each in changed)}) == 10
