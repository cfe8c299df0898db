"""Contradictions: pairs of signed messages of which no honest party signs both, found and proven from bytes (8.7).

A message makes claims. Each claim fills a slot that an honest party fills once, whatever happens:

```
KEYS         (job, epoch, site, generation)       -> the keys
ENCAPS       (job, pair, digests of both's KEYS)   -> the ciphertext
UPLOAD       (attempt, site)                      -> digest of the vector, commitment
OPEN         (job, round, site)                   -> the attempt;  needs the ROUND_START that the attempt is a digest of
OPEN, UPLOAD (attempt, site)                      -> the commitment to the seed
ROUND_START  (job, round, attempt, each member)   -> all it fixes
FULL         (attempt)                            -> the transcript;  and each entry is an UPLOAD by itself
RESULT       (attempt)                            -> outcome, digest of the sum
```

Two claims that fill one slot differently, both signed with one key, are a contradiction. They prove that the key signed
both, not why: a site that was restored from a copy, or runs twice, looks the same.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import combinations

from federation.errors import IdentityError, WhoActs
from privacy.crypto import signatures
from privacy.crypto.canonical import Field
from privacy.secure_aggregation.rostersum.messages import (
    Encaps,
    Full,
    Keys,
    Message,
    Open,
    Result,
    RoundStart,
    Upload,
    commitment,
    decode,
    encode,
    verify,
)
from privacy.secure_aggregation.rostersum.terms import Terms

__all__ = ["Found", "Proof", "Rule", "Signer", "check", "prove"]


class Rule(Enum):
    """What of section 8.7 is broken."""

    KEYS = "two KEYS of one job, epoch, site and generation"
    ENCAPS = "two ENCAPS of one pair of KEYS"
    UPLOADS = "two UPLOADs of one site in one attempt"
    OPENS = "OPENs of two attempts at one round by one site"
    SEED = "an OPEN whose seed is not the one that the site's UPLOAD committed to"
    STARTS = "two ROUND_STARTs of one job, round and attempt that share a site"
    FULLS = "two FULLs of one attempt"
    RESULTS = "two RESULTs of one attempt"


@dataclass(frozen=True, slots=True)
class Signer:
    """Whose key it is by the job's terms: a site's index, organisation and name; none of these for the coordinator."""

    index: int | None = None
    organisation: str = ""
    site: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """A contradiction that convinces whoever has nothing but this value.

    Attributes:
        rule: What is broken.
        signer: Whose key it is, as the prover's copy of the job's terms says.
        key: The Ed25519 key that signed both messages.
        messages: Both, encoded; an UPLOAD or FULL without its seals, which no signature covers.
        starts: Under `Rule.OPENS`, the ROUND_STARTs of which the two contexts are the digests.
    """

    rule: Rule
    signer: Signer
    key: bytes
    messages: tuple[bytes, bytes] = field(repr=False)
    starts: tuple[bytes, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Attributes:
        messages: Messages that were looked at.
        proofs: One for each contradiction.
        unproven: Contradictions of which no key in the terms at hand has signed both sides: forged, or of another job.
    """

    messages: int
    proofs: tuple[Proof, ...]
    unproven: int


@dataclass(frozen=True, slots=True)
class _Claim:
    rule: Rule
    slot: bytes
    said: bytes


_Rounds = Mapping[bytes, tuple[bytes, int]]
"""Job and round of each context."""


# ------------------------------------------------------------------------------------------------------------- checking


def check(proof: Proof) -> None:
    """Accepts a proof that proves what it says: both messages are signed with its key, and break its rule.

    Raises:
        IdentityError: It does not.
        RemoteProtocolError: What it holds are no messages.
    """
    try:
        signatures.refuse_weak_key(proof.key)
    except IdentityError as weak:
        raise _unproven(weak.problem) from weak
    first, second = (decode(content) for content in proof.messages)
    starts = [decode(content) for content in proof.starts]
    rounds = {start.ctx: (start.job_hash, start.r) for start in starts if isinstance(start, RoundStart)}
    for number, message in enumerate((first, second), 1):
        if not verify(message, proof.key):
            raise _unproven(f"message {number} is not signed with the key {proof.key.hex()}")
        if _signer(message) != proof.signer.index:
            raise _unproven(
                f"message {number} is one of {_party(_signer(message))}, not of {_party(proof.signer.index)}"
            )
    if proof.rule not in _broken(first, second, rounds):
        raise _unproven(f"the two messages do not break the rule: {proof.rule.value}")


def _unproven(problem: str) -> IdentityError:
    fix = "accuse nobody by this file; ask whoever made it for the log that it was found in"
    return IdentityError(f"this proves nothing: {problem}", fix=fix, who=WhoActs.YOU)


def _party(index: int | None) -> str:
    return "the coordinator" if index is None else f"site {index}"


def _broken(first: Message, second: Message, rounds: _Rounds) -> frozenset[Rule]:
    """The rules that the two messages break together."""
    claimed = {(each.rule, each.slot): each.said for each in _claims(first, rounds)}
    differ = {
        each.rule for each in _claims(second, rounds) if claimed.get((each.rule, each.slot), each.said) != each.said
    }
    return frozenset(differ if type(first) is not type(second) else differ - {Rule.SEED})


def _claims(message: Message, rounds: _Rounds) -> Iterator[_Claim]:
    """What a message says that an honest party says once; of an unknown context, an OPEN says nothing on the round."""
    match message:
        case Keys():
            yield _claim(Rule.KEYS, (message.job_hash, message.epoch, message.idx, message.gen), message.covered())
        case Encaps():
            pair = (message.job_hash, message.lo, message.hi, message.keys_digest_lo, message.keys_digest_hi)
            yield _claim(Rule.ENCAPS, pair, message.covered())
        case Upload():
            yield _claim(Rule.UPLOADS, (message.ctx, message.idx), message.covered())
            yield _claim(Rule.SEED, (message.ctx, message.idx), (message.commitment,))
        case Open():
            yield _claim(Rule.SEED, (message.ctx, message.idx), (commitment(message.ctx, message.idx, message.b),))
            if message.ctx in rounds:
                job_hash, r = rounds[message.ctx]
                yield _claim(Rule.OPENS, (job_hash, r, message.idx), (message.ctx,))
        case RoundStart():
            said = (message.ctx,)
            for member in message.members:
                yield _claim(Rule.STARTS, (message.job_hash, message.r, message.a, member), said)
        case Full():
            yield _claim(Rule.FULLS, (message.ctx,), message.covered())
        case Result():
            yield _claim(Rule.RESULTS, (message.ctx,), message.covered())


def _claim(rule: Rule, slot: tuple[Field, ...], said: tuple[Field, ...]) -> _Claim:
    return _Claim(rule, _digest(rule.name, *slot), _digest(*said))


def _digest(*fields: Field) -> bytes:
    # Python writes no two different tuples of integers, text and bytes alike, and five times faster than canonical.enc
    return hashlib.sha256(repr(fields).encode()).digest()


def _signer(message: Message) -> int | None:
    """The index of the site that signs it; None for what the coordinator signs."""
    match message:
        case Encaps():
            return message.lo
        case Keys() | Upload() | Open():
            return message.idx
        case _:
            return None


# -------------------------------------------------------------------------------------------------------------- finding


def prove(read: Callable[[], Iterable[Terms | Message]]) -> Found:
    """Proves each contradiction among the messages that `read` gives, in whatever order and from whatever logs.

    All is read twice and little of it held: about 300 bytes for each claim, and what contradicts itself. Messages come
    with the terms of their jobs, which say whose keys sign them, and a ROUND_START before the OPENs of its context. A
    signature is verified only where two messages differ.
    """
    survey = _Survey()
    for each in read():
        survey.add(each)
    if not survey.contested:
        return Found(survey.messages, (), 0)
    contested = _Contested(survey, {slot: [] for slot in survey.contested})
    for each in read():
        contested.add(each)
    proofs, unproven = contested.proven()
    return Found(survey.messages, proofs, unproven)


class _Survey:
    """What was said first in each slot, and the slots where something else was said too."""

    def __init__(self) -> None:
        self.messages = 0
        self.terms: dict[bytes, Terms] = {}
        self.rounds: dict[bytes, tuple[bytes, int]] = {}
        self.contested: set[bytes] = set()
        self.reopened: set[tuple[bytes, int]] = set()
        self._said: dict[bytes, bytes] = {}

    def add(self, each: Terms | Message) -> None:
        """Takes in the next."""
        if isinstance(each, Terms):
            self.terms[each.job_hash] = each
            return
        self.messages += 1
        for message in _bare(each):
            if isinstance(message, RoundStart):
                self.rounds[message.ctx] = (message.job_hash, message.r)
            for claim in _claims(message, self.rounds):
                if self._said.setdefault(claim.slot, claim.said) == claim.said:
                    continue
                self.contested.add(claim.slot)
                if isinstance(message, Open) and claim.rule is Rule.OPENS:
                    self.reopened.add(self.rounds[message.ctx])

    def keys(self, index: int | None) -> Iterator[tuple[bytes, Signer]]:
        """The keys that may have signed as this party: one for each job."""
        for terms in self.terms.values():
            members = terms.roster.members
            if index is None:
                yield terms.roster.coordinator_vk, Signer()
            elif index < len(members):
                yield members[index].vk, Signer(index, members[index].org, members[index].site)


@dataclass(frozen=True, slots=True)
class _Contested:
    """All that was said in the slots where two things were said."""

    survey: _Survey
    slots: dict[bytes, list[Message]]
    starts: dict[bytes, RoundStart] = field(default_factory=dict)

    def add(self, each: Terms | Message) -> None:
        """Takes in the next, for the second time."""
        if isinstance(each, Terms):
            return
        for message in _bare(each):
            if isinstance(message, RoundStart) and (message.job_hash, message.r) in self.survey.reopened:
                self.starts[message.ctx] = message
            for claim in _claims(message, self.survey.rounds):
                said = self.slots.get(claim.slot)
                if said is not None and message not in said:
                    said.append(message)

    def proven(self) -> tuple[tuple[Proof, ...], int]:
        """One proof for each slot that can be proven, and how many contradictions no key at hand proves."""
        proofs: dict[Proof, None] = {}
        unproven: set[tuple[Rule, Message, Message]] = set()
        for said in self.slots.values():
            pairs = [(rule, *pair) for pair in combinations(said, 2) for rule in self._rules(*pair)]
            proof = next((proof for pair in pairs if (proof := self._proof(*pair)) is not None), None)
            if proof is not None:
                proofs[proof] = None
            elif pairs:
                unproven.add(pairs[0])
        return tuple(proofs), len(unproven)

    def _rules(self, first: Message, second: Message) -> frozenset[Rule]:
        return _broken(first, second, self.survey.rounds)

    def _proof(self, rule: Rule, first: Message, second: Message) -> Proof | None:
        for key, signer in self.survey.keys(_signer(first)):
            if verify(first, key) and verify(second, key):
                contexts = (first.ctx, second.ctx) if isinstance(first, Open) and isinstance(second, Open) else ()
                starts = tuple(encode(self.starts[ctx]) for ctx in contexts)
                return Proof(rule, signer, key, (encode(first), encode(second)), starts)
        return None


def _bare(message: Message) -> Iterator[Message]:
    """What is signed in a message: itself without seals, and each UPLOAD that a FULL shows."""
    match message:
        case Upload():
            yield replace(message, seals=())
        case Full():
            yield replace(message, seals=())
            for each in message.entries:
                yield Upload(message.ctx, each.idx, each.y_hash, each.commitment, (), each.signature)
        case _:
            yield message
