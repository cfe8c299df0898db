"""One context masked twice: the difference of the two vectors, less their self masks, is that of two inputs of a site.

A site's training is never quite the same twice, so the two inputs of these tests are two secrets. The self seed of the
first vector comes from its shares, which the others gave when they had opened; that of the second from its OPEN.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest

from privacy.crypto import canonical
from privacy.secure_aggregation.rostersum import messages, site
from privacy.secure_aggregation.rostersum.durable import Durable
from privacy.secure_aggregation.rostersum.messages import Epoch
from privacy.secure_aggregation.rostersum.seat import Seat
from privacy.secure_aggregation.rostersum.site import Site
from privacy.secure_aggregation.rostersum.site_events import Assignment, Clock, Work
from tests.attacks.siege import ESCROW, Secret, Siege, besiege, less, secret

VICTIM, OTHERS = 0, (1, 2, 3)


@dataclass(frozen=True)
class Before:
    """The victim as it stood before it masked anything: its machine, in memory, its disk, and the work it was doing."""

    machine: Site
    disk: Durable
    work: Work


def replay(b: Siege, _: Before) -> None:
    """Nothing happens to the victim: it is asked about another model, then about the first again."""
    b.order(1, (VICTIM,), model=b"another")


def restart(b: Siege, _: Before) -> None:
    """The victim is killed, and starts again from its disk."""
    b.crash(VICTIM)
    greet(b)


def rollback(b: Siege, before: Before) -> None:
    """The victim is killed, and starts again from an older copy of its disk."""
    b.crash(VICTIM, before.disk)
    greet(b)


def snapshot(b: Siege, before: Before) -> None:
    """A copy of the victim's running machine, made before, wakes up an hour later beside it."""
    b.sites[VICTIM] = before.machine
    b.clock = Clock(b.clock.wall + 3600, b.clock.steady)
    b.finish(VICTIM, before.work)


def greet(b: Siege) -> None:
    """The victim hears the EPOCH, and the others' KEYS, as after each start."""
    b.say(VICTIM, b.sign(Epoch(b.job_hash, 1)))
    for idx in OTHERS:
        b.say(VICTIM, b.keys[idx])


def twice(back: Callable[[Siege, Before], None]) -> tuple[Secret | None, Secret]:
    """What the attacker learns by the very same ROUND_START after `back`, and what there was to learn."""
    calls = count()
    made: list[Secret] = []

    def trained(idx: int, _: Assignment) -> Secret:
        vector = secret(idx, 77, next(calls))
        if idx == VICTIM:
            made.append(vector)
        return vector

    b = besiege(4, (ESCROW,), work=trained)
    (work,) = b.of(b.say(VICTIM, b.ask(1)), Work)
    before = Before(copy.deepcopy(b.sites[VICTIM]), b.durable(VICTIM), work)
    b.finish(VICTIM, work)
    b.order(1, OTHERS)
    start = b.start(1)
    uploads = b.tried(start)
    b.seeds(uploads, OTHERS)
    seed = b.shared(uploads[VICTIM], OTHERS, ESCROW.t)
    assert seed is not None
    first = b.unmasked(start.ctx, {VICTIM: seed})

    back(b, before)
    b.order(1, (VICTIM,))
    again = b.tried(start, (VICTIM,))
    seeds = b.seeds({**uploads, **again}, tuple(again))
    second = b.unmasked(start.ctx, seeds) if seeds else None
    return less(second, first), less(made[-1], made[0]) or ()


@pytest.fixture(autouse=True)
def messages_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of a machine shares the messages that it holds, which never change."""
    for kind in messages.MESSAGES.values():
        monkeypatch.setattr(kind, "__deepcopy__", lambda message, _memo: message, raising=False)


@pytest.fixture
def keep_keys(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes sites keep their private keys over the end of a process, as if they lay on a disk."""
    rekeyed: Any = Seat._rekeyed

    def keep() -> None:
        kept: dict[int, Any] = {}

        def again(seat: Seat, epoch: int, clock: Clock) -> list[Any]:
            if seat._idx not in kept:
                effects = rekeyed(seat, epoch, clock)
                kept[seat._idx] = seat._keys
                return list(effects)
            seat._keys = kept[seat._idx]
            return [seat._send(kept[seat._idx].mine)]

        monkeypatch.setattr(Seat, "_rekeyed", again)

    return keep


def learned(back: Callable[[Siege, Before], None]) -> bool:
    """Whether the attacker has the difference of two of the victim's inputs."""
    found, true = twice(back)
    assert found in (None, true)
    return found is not None


def test_a_replayed_round_start_is_refused(disarm: Callable[..., None]) -> None:
    """(r, a) grows: the same ROUND_START is not taken again, though the work was done again meanwhile."""
    assert not learned(replay)
    disarm("_fresh")
    assert learned(replay)


@pytest.mark.parametrize(("guards", "keys"), [(1, 1), (0, 1), (1, 0), (0, 0)], ids=["both", "keys", "guard", "none"])
def test_a_restart_brings_no_context_back(
    guards: int, keys: int, disarm: Callable[..., None], keep_keys: Callable[[], None]
) -> None:
    """What was masked is durable before it is masked, and keys die with their process: either line holds by itself.

    With neither, a site that is killed after its upload masks the context again.
    """
    if not guards:
        disarm("_fresh")
    if not keys:
        keep_keys()
    assert learned(restart) == (not guards and not keys)


def test_a_disk_rolled_back_brings_no_context_back(keep_keys: Callable[[], None]) -> None:
    """An older disk has forgotten (r, a): what is left is that no process has an earlier one's keys."""
    assert not learned(rollback)
    keep_keys()
    assert learned(rollback)


def test_a_snapshot_that_wakes_up_drops_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies of a site in memory share keys and update; the one whose clocks have drifted apart forgets both."""
    assert not learned(snapshot)
    monkeypatch.setattr(site, "MOST_DRIFT", float("inf"))
    assert learned(snapshot)


def over_rounds(b: Siege) -> Secret | None:
    """Two rounds, both opened as they should be; in the second all updates are zero. The victim's part of the first."""
    vectors = []
    for r in (1, 2):
        b.order(r)
        uploads = b.tried(b.start(r))
        seeds = b.seeds(uploads)
        if seeds.keys() != uploads.keys():
            return None
        vectors.append(b.unmasked(uploads[VICTIM].ctx, {VICTIM: seeds[VICTIM]}))
    return less(*vectors)


def dead(idx: int, assignment: Assignment) -> Secret:
    """A secret in the first round; nothing in the second, whose model the attacker has made so."""
    return secret(idx, 1) if assignment.r == 1 else (0,) * 8


def test_each_attempt_has_masks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """(r, a) is in the context, hence in every mask; else a round with a dead model shows the updates of another."""
    assert over_rounds(besiege(4, (ESCROW,), work=dead)) != secret(VICTIM, 1)

    monkeypatch.setattr(messages, "context", lambda start: canonical.digest("ctx", *replace(start, r=0, a=0).covered()))
    assert over_rounds(besiege(4, (ESCROW,), work=dead)) == secret(VICTIM, 1)
