"""Jobs of n sites joined by the loopback, and networks that lose or change certain messages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from privacy.crypto import masks
from privacy.secure_aggregation.rostersum import messages, rules
from privacy.secure_aggregation.rostersum.coordinator import Stage
from privacy.secure_aggregation.rostersum.messages import Message
from privacy.secure_aggregation.rostersum.site_events import Assignment
from privacy.secure_aggregation.rostersum.terms import (
    Churn,
    Kind,
    Member,
    Plan,
    Ring,
    Roster,
    Terms,
    TrainCodec,
    Weighting,
)
from simulations.loopback import COORDINATOR, Delivery, Loopback, Network, Outcome, Parcel, reliable


def key(byte: int) -> Ed25519PrivateKey:
    """A signing key."""
    return Ed25519PrivateKey.from_private_bytes(bytes([byte]) * 32)


def job(
    n: int = 3,
    *,
    churn: Churn = Churn.CELLS,
    m_min: int = 3,
    t: int = 0,
    c_max: int = 1,
    cells: tuple[tuple[int, ...], ...] | None = None,
    group: int = 0,
    words: int = 12,
    pq: int = 0,
    check: bool = True,
) -> Terms:
    """The terms of a job of `n` sites of one organisation each, with one train plan; acceptable ones, if `check`."""
    plan = Plan(
        plan_id=1,
        kind=Kind.TRAIN,
        churn=churn,
        group=group,
        m_min=m_min,
        o_min=3,
        t=t,
        ring=Ring.WORD,
        words=words,
        task_digest=b"\x11" * 32,
        rows_min=10,
        codec=TrainCodec(0.5, 1.0, 20, Weighting.UNIFORM, 1, 1),
        dp=None,
    )
    keys = [key(0xC0), *(key(idx + 1) for idx in range(n))]
    vk, *vks = [each.public_key().public_bytes_raw() for each in keys]
    roster = Roster(vk, tuple(Member(f"org{idx}", f"s{idx}", each) for idx, each in enumerate(vks)))
    terms = Terms(bytes(range(16)), roster, c_max, min(c_max, 1), pq, cells or (tuple(range(n)),), (plan,))
    assert not check or not rules.broken(terms), rules.broken(terms)
    return terms


def vector(terms: Terms, idx: int, r: int) -> Any:
    """What site `idx` sends in round `r`: words of both numbers that wrap when summed, and the guard."""
    words = np.arange(terms.plans[0].words, dtype=np.uint64) * (idx + 3) * 0x9E3779B1 + r * 0x7F4A7C15
    vector = words.astype(masks.dtype(terms.plans[0].ring.value))
    vector[-4:] = 1
    return vector


def total(terms: Terms, members: Sequence[int], r: int) -> Any:
    """The exact modular sum over `members`."""
    words = sum(vector(terms, idx, r).astype(object) for idx in members)
    return [int(word) % 2 ** terms.plans[0].ring for word in words]


def loop_of(terms: Terms, **changes: Any) -> Loopback:
    """The job's coordinator and sites, joined; further words are the loopback's."""

    def contribute(idx: int, assignment: Assignment) -> Any:
        return vector(terms, idx, assignment.r)

    changes.setdefault("contribute", contribute)
    return Loopback(terms, key(0xC0), [key(idx + 1) for idx in range(terms.n)], **changes)


def exact(loop: Loopback, outcome: Outcome) -> bool:
    """Whether a step was opened, and each of its sums is the exact one over its members (I1)."""
    r = round_of(loop)
    sums = outcome.sums
    return bool(sums) and all(each.words.tolist() == total(loop.terms, each.members, r) for each in sums)


def round_of(loop: Loopback) -> int:
    """The round the coordinator is in, or was in last."""
    assert loop.coordinator is not None
    return loop.coordinator.standing.r


def at(loop: Loopback, stage: Stage) -> Loopback:
    """Runs a step until its (first) sum stands there."""
    if loop.idle:
        loop.pass_time(5)
        loop.begin(1, b"model")
    loop.run(lambda: loop.coordinator is not None and loop.coordinator.stages[:1] == (stage,))
    return loop


def decoded(parcel: Parcel) -> Message | None:
    """The message in a parcel; None for a masked vector."""
    return None if parcel.payload else messages.decode(parcel.content)


def losing(*kinds: type, sender: int | None = None, receiver: int | None = None, times: int = 10**6) -> Network:
    """A reliable network that loses the first `times` messages of these kinds from or to these parties.

    `bytes` stands for masked vectors.
    """
    left = [times]

    def network(parcel: Parcel) -> Sequence[Delivery]:
        kind = bytes if parcel.payload else type(decoded(parcel))
        hit = kind in kinds and sender in (None, parcel.sender) and receiver in (None, parcel.receiver)
        if hit and left[0]:
            left[0] -= 1
            return ()
        return reliable(parcel)

    return network


def altering(kind: type, change: Callable[[Any], Any], sender: int) -> Network:
    """A reliable network that changes messages of this kind from this party."""

    def network(parcel: Parcel) -> Sequence[Delivery]:
        message = decoded(parcel)
        if type(message) is kind and parcel.sender == sender:
            parcel = replace(parcel, content=messages.encode(change(message)))
        return reliable(parcel)

    return network


class Tap:
    """All parcels that left, with what they say."""

    def __init__(self, loop: Loopback) -> None:
        self.parcels: list[Parcel] = []
        loop.sent = self.parcels.append

    def said(self, kind: type, sender: int | None = None, receiver: int | None = None) -> list[Any]:
        """The messages of this kind between these parties, in order."""
        return [
            message
            for parcel in self.parcels
            if type(message := decoded(parcel)) is kind
            and sender in (None, parcel.sender)
            and receiver in (None, parcel.receiver)
        ]

    def by_coordinator(self, kind: type) -> list[Any]:
        """The coordinator's messages of this kind."""
        return self.said(kind, sender=COORDINATOR)
