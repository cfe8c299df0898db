"""Every bit of what a site says to the coordinator: flipped, it is unreadable or refused, and nothing has changed.

What the coordinator says to sites, and what is relayed, is fuzzed in the same way in the tests of the sites' machine.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from federation.errors import RemoteProtocolError
from privacy.secure_aggregation.rostersum import coordinator_attempt, keybook, messages
from privacy.secure_aggregation.rostersum.coordinator import Stage
from privacy.secure_aggregation.rostersum.coordinator_events import Received
from privacy.secure_aggregation.rostersum.messages import (
    NOBODY,
    Code,
    Decline,
    Encaps,
    Keys,
    Open,
    Ready,
    Refuse,
    Shares,
    Upload,
)
from privacy.secure_aggregation.rostersum.terms import Churn, Terms
from simulations.loopback import Delivery, Loopback, Parcel, reliable
from tests.privacy.secure_aggregation.rostersum.looped import at, decoded, exact, job, key, loop_of, losing, vector

AUTHOR = 0
"""The site whose message is held back and changed."""


class Held:
    """A network that keeps the first message of this kind of site 0 to itself, and all OPENs of a silent site."""

    def __init__(self, kind: type, silent: int | None = None) -> None:
        self.kind = kind
        self.message: Any = None
        self._silent = silent

    def __call__(self, parcel: Parcel) -> Sequence[Delivery]:
        """Nothing of what is kept; the rest as it is."""
        message = decoded(parcel)
        if isinstance(message, Open) and parcel.sender == self._silent:
            return ()
        if self.message is None and type(message) is self.kind and parcel.sender == AUTHOR:
            self.message = message
            return ()
        return reliable(parcel)


def held(kind: type, terms: Terms, silent: int | None = None, **changes: Any) -> tuple[Loopback, Any]:
    """A step that has come as far as the message, which the coordinator has not got."""
    network = Held(kind, silent)
    loop = loop_of(terms, network=network, **changes)
    loop.pass_time(5)
    if loop.idle:
        loop.begin(1, b"model")
    loop.run(lambda: network.message is not None)
    loop.run(lambda: not loop.in_flight)
    return loop, network.message


def declined() -> tuple[Loopback, Any]:
    """One of five sites declines."""
    terms = job(5, churn=Churn.OPEN, m_min=4, t=3)

    def contribute(idx: int, asked: Any) -> Any:
        return None if idx == AUTHOR else vector(terms, idx, asked.r)

    return held(Decline, terms, contribute=contribute)


def refused() -> tuple[Loopback, Any]:
    """A site refuses the ROUND_START."""
    loop = at(loop_of(job(t=2), network=losing(messages.RoundStart, receiver=AUTHOR, times=1)), Stage.UPLOADING)
    refuse = Refuse(loop.terms.job_hash, 1, 0, AUTHOR, Code.E_KEYSET, NOBODY, 0, 0, 0)
    return loop, messages.sign(refuse, key(AUTHOR + 1))


SAID: dict[str, tuple[int, Callable[[], tuple[Loopback, Any]]]] = {
    "keys": (1, lambda: held(Keys, job())),
    "encaps": (7, lambda: held(Encaps, job(pq=1))),
    "ready": (1, lambda: held(Ready, job())),
    "decline": (1, declined),
    "upload": (1, lambda: held(Upload, job(t=2))),
    "open": (1, lambda: held(Open, job(t=2))),
    "shares": (1, lambda: held(Shares, job(t=2), silent=2)),
    "refuse": (1, refused),
}
"""Which of its bytes are flipped, and what brings the coordinator to where it takes the message."""


def inside(loop: Loopback) -> Any:
    """All that the coordinator's machine knows, durable or not."""
    machine: Any = loop.coordinator
    lanes = [
        (
            lane.stage,
            lane.deadline,
            lane.way,
            sorted(lane.failing),
            sorted(lane._lost),
            sorted(lane._unable),
            *(sorted(each) for each in (lane._muster.ready, lane._muster.out, lane._muster.late)),
            _attempt(lane._attempt),
            None if lane._escrow is None else repr(lane._escrow._shares),
        )
        for lane in machine._lanes
    ]
    book = machine._job.keys
    return (
        machine.standing,
        lanes,
        dict(book._keys),
        dict(book._encaps),
        machine._job.stale,
        sorted(machine._job.present),
    )


def _attempt(attempt: Any) -> Any:
    if attempt is None:
        return None
    known = attempt.uploads, attempt.opens, attempt.rescued
    return attempt.start, sorted(attempt.stored), *(sorted(each.items()) for each in known)


def flips(message: Any, stride: int) -> Iterator[bytes]:
    """The message's bytes with one bit changed, for each bit of each `stride`-th byte but those of seals.

    Nobody signs seals, and the coordinator cannot judge them: a changed one is refused by the site that opens it.
    """
    content = messages.encode(message)
    sealed = [each.sealed for each in getattr(message, "seals", ())]
    skipped = {content.index(each) + at for each in sealed for at in range(len(each))}
    for at_byte in range(0, len(content), stride):
        for bit in range(8) if at_byte not in skipped else ():
            yield content[:at_byte] + bytes([content[at_byte] ^ 1 << bit]) + content[at_byte + 1 :]


def taken(loop: Loopback, message: Any, stride: int) -> bytes | None:
    """The first of the message's flips that the coordinator takes, or that changes anything; none where all fail."""
    assert loop.coordinator is not None
    before = inside(loop)
    for wrong in flips(message, stride):
        try:
            loop.coordinator.receive(Received(AUTHOR, messages.decode(wrong)), loop.now)  # type: ignore[arg-type] # of whatever kind the flip makes it
        except RemoteProtocolError:
            if inside(loop) == before:
                continue
        return wrong
    return None


@pytest.mark.parametrize("kind", SAID)
def test_no_bit_of_what_a_site_says_can_be_changed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flip is refused and leaves all as it was: the true message is taken afterwards, and the sum is exact.

    Where signatures are not looked at, some flip is taken.
    """
    stride, reach = SAID[kind]
    loop, message = reach()
    assert taken(loop, message, stride) is None
    loop._tell_coordinator(Received(AUTHOR, message))
    loop.run(lambda: loop.idle)
    assert exact(loop, loop.outcome())
    for module in (coordinator_attempt, keybook):
        monkeypatch.setattr(module, "verify", lambda *_: True)
    assert taken(*reach(), stride) is not None
