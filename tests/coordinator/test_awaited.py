"""Whom a sealed sum waits for, followed through rounds of real machines joined by the loopback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from coordinator.awaited import Awaited
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.coordinator import Stage
from privacy.secure_aggregation.rostersum.coordinator_events import Received
from privacy.secure_aggregation.rostersum.messages import Code, Open, Ready, Refuse, Upload
from simulations.loopback import COORDINATOR, Loopback
from tests.privacy.secure_aggregation.rostersum.looped import at, job, key, losing, vector

if TYPE_CHECKING:
    from privacy.secure_aggregation.rostersum import coordinator_events

TERMS = job()


class Watched(Loopback):
    """A loopback whose coordinator is followed; it keeps each answer that was new."""

    def __init__(self, **changes: Any) -> None:
        self.awaited = Awaited(changes.get("terms", TERMS))
        self.seen: list[tuple[str, frozenset[int]]] = []
        terms = changes.pop("terms", TERMS)
        changes.setdefault("contribute", lambda idx, assignment: vector(terms, idx, assignment.r))
        super().__init__(terms, key(0xC0), [key(idx + 1) for idx in range(terms.n)], **changes)

    def _tell_coordinator(self, event: coordinator_events.Event) -> None:
        refusals = len(self.refusals)
        super()._tell_coordinator(event)
        if len(self.refusals) == refusals and self.coordinator is not None:
            self.awaited.note(event)
            if self.awaited.follow(self.coordinator):
                self.seen.append((self.awaited.waits, self.awaited.behind))

    def refuse(self, code: Code, last_r: int = 0, opened_r: int = 0) -> dict[int, str]:
        """What is known of who will not take part, after site 1 has refused with this code."""
        refuse = Refuse(self.terms.job_hash, 1, 0, 1, code, messages.NOBODY, last_r, 0, opened_r)
        watched = Awaited(TERMS)
        assert self.coordinator is not None
        watched.follow(self.coordinator)
        watched.note(Received(1, messages.sign(refuse, key(2))))
        return watched.declined


def test_a_step_waits_for_all_to_get_ready_to_upload_and_to_open() -> None:
    """In this order, for fewer and fewer of them, and for nobody while it sums and when it is over."""
    loop = Watched()
    loop.pass_time(1)
    loop.seen.clear()
    loop.step(1)

    waits = [waits for waits, _ in loop.seen]
    assert list(dict.fromkeys(waits)) == ["to get ready", "to upload", "to open the sum", ""]
    for what in dict.fromkeys(waits):
        behind = [behind for waits, behind in loop.seen if waits == what]
        assert behind[0] == ({0, 1, 2} if what else set())
        assert behind == sorted(behind, key=len, reverse=True)


@pytest.mark.parametrize(
    ("lost", "what"),
    [(Ready, "to get ready"), (Upload, "to upload"), (Open, "to open the sum")],
)
def test_the_one_that_holds_the_others_back_is_named(lost: type, what: str) -> None:
    """Whatever it owes: all others have done it."""
    loop = Watched(network=losing(lost, sender=1))
    loop.pass_time(1)
    loop.begin(1)
    loop.run(lambda: (what, {1}) in loop.seen)
    assert (loop.awaited.waits, loop.awaited.behind) == (what, {1})


def test_a_new_process_is_waited_for_again() -> None:
    """Its READY went with what it had forgotten."""
    loop = Watched(network=losing(Ready, sender=2))
    loop.pass_time(1)
    loop.begin(1)
    loop.run(lambda: ("to get ready", {2}) in loop.seen)
    loop.stop(1, downtime=0.5)
    loop.run(lambda: loop.seen[-1] == ("to get ready", {1, 2}))


def test_a_restarted_coordinator_waits_for_those_only_who_have_not_opened() -> None:
    """What the others said before is in its durable state."""
    loop = Watched(network=losing(Open, sender=1))
    at(loop, Stage.OPENING)
    loop.run(lambda: loop.awaited.behind == {1})
    loop.awaited = Awaited(TERMS)
    loop.stop(COORDINATOR, downtime=0.5)
    loop.run(lambda: loop.coordinator is not None and bool(loop.awaited.behind))
    assert (loop.awaited.waits, loop.awaited.behind) == ("to open the sum", {1})


def test_a_decline_is_told_until_the_next_step_begins() -> None:
    """Nobody waits for that site, and no reason is known."""
    loop = Watched()
    loop._contribute = lambda idx, assignment: None if idx == 1 else vector(loop.terms, idx, assignment.r)
    loop.pass_time(1)
    loop.step(1)
    assert loop.awaited.declined == {1: "declined this step; its own log says why"}
    loop.begin(1)
    assert loop.awaited.declined == {}


def test_groups_are_waited_for_side_by_side() -> None:
    """Each for what its own sum needs: both are named, with both words, until each is done."""
    network = losing(Upload, sender=4, times=1)
    ready = losing(Ready, sender=1)
    loop = Watched(
        terms=job(6, cells=((0, 1, 2), (3, 4, 5)), group=1), network=lambda parcel: ready(parcel) and network(parcel)
    )
    loop.pass_time(1)
    loop.begin(1)
    loop.run(lambda: ("to get ready or to upload", {1, 4}) in loop.seen)
    loop.run(lambda: ("to get ready", {1}) in loop.seen)
    loop.run(lambda: loop.idle)
    assert (loop.awaited.waits, loop.awaited.behind) == ("", frozenset())
    assert [each.members for each in loop.outcome().sums] == [(3, 4, 5)]


def test_a_refusal_is_judged_by_where_the_sites_own_group_stands() -> None:
    """What a site refuses when its group is open keeps nobody out, though another group still gathers."""
    loop = Watched(terms=job(6, cells=((0, 1, 2), (3, 4, 5)), group=1), network=losing(Ready, sender=4))
    loop.pass_time(1)
    loop.begin(1)
    loop.run(lambda: loop.coordinator is not None and loop.coordinator.stages == (Stage.SUMMED, Stage.GATHERING))
    for idx, told in ((1, {}), (5, {5: "refused this step (E_CHURN); its own log says why"})):
        refuse = Refuse(loop.terms.job_hash, 1, 0, idx, Code.E_CHURN, messages.NOBODY, 0, 0, 0)
        loop.awaited.note(Received(idx, messages.sign(refuse, key(idx + 1))))
        assert loop.awaited.declined == told


def test_only_a_refusal_that_keeps_a_site_out_counts_as_one() -> None:
    """What is said again, or mended by new keys, does not; nor does a replay of what the site has behind it."""
    loop = Watched(network=losing(Ready))
    assert loop.refuse(Code.E_CHURN) == {}, "no step is under way"
    loop.pass_time(1)
    loop.begin(1)

    assert loop.refuse(Code.E_CHURN) == {1: "refused this step (E_CHURN); its own log says why"}
    assert loop.refuse(Code.E_SEAL) == {1: "refused this step (E_SEAL); its own log says why"}
    for code in (Code.E_SIG, Code.E_EPOCH, Code.E_STATE, Code.E_KEYSET, Code.E_KEYS, Code.E_KEYAGE):
        assert loop.refuse(code) == {}
    assert loop.refuse(Code.E_REPLAY, last_r=1, opened_r=0) == {}
    assert loop.refuse(Code.E_REPLAY, last_r=2) == loop.refuse(Code.E_REPLAY, opened_r=1)
    assert loop.refuse(Code.E_REPLAY, last_r=2) == {1: "refused this step (E_REPLAY); its own log says why"}
