"""What of RosterSum stands in a member's audit log: how it is written there, read back, and said in plain words.

```
terms      the terms of a job that was accepted: whose keys sign what follows
sent       a signed message, and to whom
received   a signed message whose signature held, and from whom
evidence   what was refused or contradicts itself (section 8.7)
```

Never a self seed before F4, a share, a key, or what a site contributes: of SHARES only the digest is kept.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum, StrEnum

from federation.errors import LocalProtocolError, ParleyError, RemoteProtocolError
from privacy.crypto import canonical
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.evidence import Evidence, Suspicion
from privacy.secure_aggregation.rostersum.messages import NOBODY, Message, RoundStart, Shares
from privacy.secure_aggregation.rostersum.terms import Terms

__all__ = [
    "Logged",
    "Noted",
    "Passed",
    "Withheld",
    "evidence_entry",
    "message_entry",
    "message_words",
    "read",
    "terms_entry",
    "words",
]


class Logged(StrEnum):
    """The kinds of entries, as the log names them."""

    TERMS = "terms"
    SENT = "sent"
    RECEIVED = "received"
    EVIDENCE = "evidence"


@dataclass(frozen=True, slots=True)
class Withheld:
    """A message that is not kept: its type, and the SHA-256 of its encoding."""

    tag: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Passed:
    """A message that was sent or received; `peer` is the site on the other side, None the coordinator."""

    way: Logged
    peer: int | None
    message: Message | Withheld


@dataclass(frozen=True, slots=True)
class Noted:
    """Evidence, and the job that it is about."""

    job_hash: bytes
    evidence: Evidence


# -------------------------------------------------------------------------------------------------------------- writing


def terms_entry(terms: Terms) -> tuple[str, bytes]:
    """Kind and content of the entry that a job was accepted on these terms."""
    return Logged.TERMS.value, terms.encode()


def message_entry(way: Logged, message: Message, peer: int | None) -> tuple[str, bytes]:
    """Kind and content of the entry that a message was sent to, or received from, `peer` (None: the coordinator).

    Raises:
        LocalProtocolError: `way` is neither `SENT` nor `RECEIVED`.
    """
    if way not in {Logged.SENT, Logged.RECEIVED}:
        raise LocalProtocolError(f"a message is sent or received, not {way}")
    encoded = messages.encode(message)
    kept = ("withheld", message.TAG, hashlib.sha256(encoded).digest()) if isinstance(message, Shares) else (encoded,)
    return way.value, canonical.enc(NOBODY if peer is None else peer, *kept)


def evidence_entry(job_hash: bytes, evidence: Evidence) -> tuple[str, bytes]:
    """Kind and content of the entry that something was refused or contradicts itself in a job."""
    about = NOBODY if evidence.about is None else evidence.about
    told = (job_hash, evidence.kind.name, evidence.text.encode(), about, evidence.messages)
    return Logged.EVIDENCE.value, canonical.enc(*told)


# -------------------------------------------------------------------------------------------------------------- reading


def read(kind: str, content: bytes) -> Terms | Passed | Noted | None:
    """What an entry holds; None if its kind is not of RosterSum.

    Raises:
        RemoteProtocolError: The content is not what the functions above write under this kind.
    """
    try:
        match kind:
            case Logged.TERMS:
                return Terms.decode(content)
            case Logged.SENT | Logged.RECEIVED:
                return _passed(Logged(kind), canonical.dec(content))
            case Logged.EVIDENCE:
                return _noted(canonical.dec(content))
            case _:
                return None
    except (ParleyError, ValueError, KeyError) as wrong:
        raise RemoteProtocolError(
            f"an entry of the kind {kind} does not hold what its kind promises: {wrong}",
            fix="read the log with the release of Parley that wrote it",
        ) from None


def _passed(way: Logged, held: Sequence[canonical.Value]) -> Passed:
    match held:
        case (int(peer), bytes(encoded)):
            return Passed(way, _party(peer), messages.decode(encoded))
        case (int(peer), "withheld", str(tag), bytes(digest)):
            return Passed(way, _party(peer), Withheld(tag, digest))
        case _:
            raise ValueError("a peer and a message are expected")


def _noted(held: Sequence[canonical.Value]) -> Noted:
    match held:
        case (bytes(job_hash), str(kind), bytes(text), int(about), tuple(encoded)):
            kept = tuple(each for each in encoded if isinstance(each, bytes))
            if len(kept) != len(encoded):
                raise ValueError("a message is no bytes")
            return Noted(job_hash, Evidence(Suspicion[kind], text.decode(), _party(about), kept))
        case _:
            raise ValueError("a job, a suspicion, its text, a site and messages are expected")


def _party(peer: int) -> int | None:
    return None if peer == NOBODY else peer


# ------------------------------------------------------------------------------------------------------- in plain words

_WORDS = {
    "epoch": "epoch",
    "r": "round",
    "a": "attempt",
    "plan_id": "plan",
    "idx": "site",
    "lo": "from site",
    "hi": "to site",
    "gen": "generation",
    "members": "sites",
    "missing": "for sites",
    "outcome": "outcome",
    "code": "code",
    "about": "about site",
    "job_hash": "job",
    "ctx": "context",
    "model_hash": "model",
    "y_hash": "vector",
    "commitment": "commitment",
    "transcript": "transcript",
    "sum_hash": "sum",
}
"""The fields that people are told, and what they are called; digests by their first digits."""

_DIGITS = 8


def words(held: Terms | Passed | Noted) -> str:
    """An entry in one line for people."""
    match held:
        case Terms():
            plans = ", ".join(f"{plan.plan_id} ({plan.kind}, {plan.churn})" for plan in held.plans)
            who = f"{held.n} sites of {held.roster.orgs} organisations"
            return f"job {_short(held.job_hash)} accepted: {who}, plans {plans}"
        case Passed():
            towards = "to" if held.way is Logged.SENT else "from"
            return f"{held.way.value} {towards} {_named(held.peer)}: {message_words(held.message)}"
        case Noted():
            seen = held.evidence
            shown = "; ".join(map(_encoded, seen.messages))
            told = "" if seen.text == seen.kind.value else f" ({seen.text})"
            about = "" if seen.kind is Suspicion.REFUSED and seen.about is None else f" about {_named(seen.about)}"
            return f"evidence{about}: {seen.kind.value}{told}" + (f": {shown}" if shown else "")


def _named(peer: int | None) -> str:
    return "the coordinator" if peer is None else f"site {peer}"


def message_words(message: Message | Withheld) -> str:
    """A message in one line for people; digests by their first digits."""
    if isinstance(message, Withheld):
        return f"{message.tag.upper()} (what it holds is not kept; SHA-256 {_short(message.digest)})"
    name = "ROUND_START" if isinstance(message, RoundStart) else message.TAG.upper()
    values = ((_WORDS.get(each.name), getattr(message, each.name)) for each in fields(message))
    told = [f"{word} {_value(value)}" for word, value in values if word and value != NOBODY]
    return f"{name}, " + ", ".join(told)


def _encoded(content: bytes) -> str:
    try:
        return message_words(messages.decode(content))
    except RemoteProtocolError:
        return f"{len(content)} bytes that are no message"


def _value(value: object) -> str:
    match value:
        case bytes():
            return _short(value)
        case tuple():
            return " ".join(map(str, value))
        case Enum():
            return value.name
        case _:
            return str(value)


def _short(digest: bytes) -> str:
    return digest.hex()[:_DIGITS]
