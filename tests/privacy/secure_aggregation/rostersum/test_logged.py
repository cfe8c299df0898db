"""What RosterSum writes into an audit log is read back, shows no secret, and is said in plain words."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federation.errors import LocalProtocolError, RemoteProtocolError
from privacy.crypto import canonical
from privacy.secure_aggregation.rostersum import logged, messages
from privacy.secure_aggregation.rostersum.evidence import Evidence, Suspicion, contradiction
from privacy.secure_aggregation.rostersum.logged import (
    Logged,
    Noted,
    Passed,
    Withheld,
    evidence_entry,
    message_entry,
    read,
    terms_entry,
    words,
)
from privacy.secure_aggregation.rostersum.messages import Message, Outcome, Refuse, Result, RoundStart, Share, Shares
from tests.privacy.secure_aggregation.rostersum.conftest import consortium_of
from tests.privacy.secure_aggregation.rostersum.test_messages import EXAMPLES

TERMS = consortium_of(3).terms
H = bytes(range(32))


@pytest.mark.parametrize("message", [each for each in EXAMPLES if not isinstance(each, Shares)])
@pytest.mark.parametrize(("way", "peer"), [(Logged.SENT, None), (Logged.RECEIVED, 2)])
def test_every_message_is_read_back_with_its_peer(message: Message, way: Logged, peer: int | None) -> None:
    """Which way it went, who was on the other side, and all that was signed."""
    kind, content = message_entry(way, message, peer)
    assert kind == way.value
    assert read(kind, content) == Passed(way, peer, message)


def test_shares_are_never_written() -> None:
    """Of SHARES their digest is kept, and nothing that they hold."""
    share = b"\x00" + b"secret" * 5 + b"se"
    message = Shares(H, 0, (Share(1, share),))
    kind, content = message_entry(Logged.SENT, message, None)
    assert share not in content
    digest = hashlib.sha256(messages.encode(message)).digest()
    held = read(kind, content)
    assert held == Passed(Logged.SENT, None, Withheld("shares", digest))
    assert held is not None
    assert words(held) == f"sent to the coordinator: SHARES (what it holds is not kept; SHA-256 {digest.hex()[:8]})"


def test_terms_are_read_back() -> None:
    """With the keys that sign what follows."""
    assert read(*terms_entry(TERMS)) == TERMS


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(Suspicion),
    st.text(),
    st.none() | st.integers(0, 65534),
    st.lists(st.binary(max_size=40), max_size=3),
)
def test_evidence_is_read_back(kind: Suspicion, text: str, about: int | None, content: list[bytes]) -> None:
    """Whatever its text says, and though its messages be none."""
    text = text.encode("utf-8", "ignore").decode()
    evidence = Evidence(kind, text, about, tuple(content))
    assert read(*evidence_entry(H, evidence)) == Noted(H, evidence)


def test_other_kinds_are_not_rostersums() -> None:
    """They are left to whoever wrote them."""
    assert read("decision", b"re-cell") is None


@pytest.mark.parametrize("kind", [Logged.TERMS, Logged.EVIDENCE])
def test_a_message_goes_one_way_or_the_other(kind: Logged) -> None:
    """It is sent or received."""
    with pytest.raises(LocalProtocolError, match=f"a message is sent or received, not {kind}"):
        message_entry(kind, EXAMPLES[0], None)


@pytest.mark.parametrize("kind", list(Logged))
@pytest.mark.parametrize(
    "content",
    [
        b"\x00",
        b"",
        canonical.enc(1, b"", 2),
        canonical.enc(1, b"x"),
        canonical.enc(H, "NO_SUSPICION", b"", 1, ()),
        canonical.enc(H, "REFUSED", b"\xff", 1, ()),
        canonical.enc(H, "REFUSED", b"", 1, (1,)),
    ],
    ids=["no field", "empty", "too many", "no message", "suspicion", "text", "message"],
)
def test_what_is_no_such_entry_is_told(kind: Logged, content: bytes) -> None:
    """With the kind that promised it."""
    with pytest.raises(RemoteProtocolError, match=f"an entry of the kind {kind} does not hold what its kind promises"):
        read(kind, content)


def test_entries_are_said_in_plain_words() -> None:
    """Names and numbers; digests by their first digits."""
    start = RoundStart(H, 1, 7, 2, 1, (0, 2), H, H, H)
    refuse = Refuse(H, 7, 2, 0, messages.Code.E_COHORT, messages.NOBODY, 6, 0, 6)
    two = contradiction(Suspicion.TWO_RESULTS, None, Result(H, Outcome.OPENED, H), Result(H, Outcome.BURNED, H))
    expected = {
        terms_entry(
            TERMS
        ): f"job {TERMS.job_hash.hex()[:8]} accepted: 3 sites of 3 organisations, plans 1 (train, cells)",
        message_entry(Logged.RECEIVED, start, None): (
            "received from the coordinator: ROUND_START, job 00010203, epoch 1, "
            "round 7, attempt 2, plan 1, sites 0 2, model 00010203"
        ),
        message_entry(Logged.RECEIVED, refuse, 0): (
            "received from site 0: REFUSE, job 00010203, round 7, attempt 2, site 0, code E_COHORT"
        ),
        evidence_entry(H, two): (
            "evidence about the coordinator: two RESULTs of one attempt: "
            "RESULT, context 00010203, outcome OPENED, sum 00010203; "
            "RESULT, context 00010203, outcome BURNED, sum 00010203"
        ),
        evidence_entry(H, Evidence(Suspicion.REFUSED, "E_SIG: who?", 2, (b"x",))): (
            "evidence about site 2: a message was refused (E_SIG: who?): 1 bytes that are no message"
        ),
        evidence_entry(H, Evidence(Suspicion.REFUSED, "E_STATE: no", None)): (
            "evidence: a message was refused (E_STATE: no)"
        ),
    }
    for entry, said in expected.items():
        held = logged.read(*entry)
        assert held is not None
        assert words(held) == said
