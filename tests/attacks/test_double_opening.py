"""Two sums of one round over sets that differ by a site: a drop-out that was only late, a retry, a rescue, a crash."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from privacy.crypto import canonical, seal
from privacy.secure_aggregation.rostersum.attempt import Attempt
from privacy.secure_aggregation.rostersum.messages import Full, Open, Rescue, Shares, Upload
from privacy.secure_aggregation.rostersum.rules import Rule
from privacy.secure_aggregation.rostersum.seat import Seat
from privacy.secure_aggregation.rostersum.site_events import Clock, Persist, Send
from privacy.secure_aggregation.rostersum.states import State
from privacy.secure_aggregation.rostersum.terms import Plan
from tests.attacks.siege import OPEN, Secret, Siege, besiege, combined, less, secret

VICTIM = 3
ALL, WITHOUT = (0, 1, 2, VICTIM), (0, 1, 2)


# ---------------------------------------------------------------------------------------------------- late, and retries


def late(b: Siege) -> Secret | None:
    """The victim is said to have dropped out; once the others have opened without it, all are shown its late upload."""
    b.order(1)
    first = b.tried(b.start(1, 0, ALL))
    fewer = b.sum_of(b.tried(b.start(1, 1, WITHOUT)), WITHOUT)
    return less(b.sum_of(first, ALL), fewer)


def retried(b: Siege) -> Secret | None:
    """The same the other way round: first without the victim, then all again; and the first FULL is held back."""
    b.order(1)
    first = b.tried(b.start(1, 0, WITHOUT))
    whole = b.sum_of(b.tried(b.start(1, 1, ALL)), ALL)
    return less(whole, b.sum_of(first, WITHOUT))


@pytest.fixture
def keep_attempts(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes sites keep an attempt when the next one begins, and open it when its FULL comes after all."""
    sealed: Any = Seat._sealed
    fully: Any = Seat._fully

    def keep() -> None:
        kept: dict[tuple[int, bytes], Attempt] = {}

        def put_aside(seat: Seat) -> Any:
            if seat._attempt is not None:
                kept[seat._idx, seat._attempt.ctx] = seat._attempt
            return sealed(seat)

        def taken_up(seat: Seat, message: Full, clock: Clock) -> Any:
            if (seat._idx, message.ctx) in kept:
                seat._attempt, seat.state = kept[seat._idx, message.ctx], State.UPLOADED
            return fully(seat, message, clock)

        monkeypatch.setattr(Seat, "_sealed", put_aside)
        monkeypatch.setattr(Seat, "_fully", taken_up)

    return keep


@pytest.mark.parametrize("attack", [late, retried])
def test_who_goes_on_to_the_next_attempt_opens_no_earlier_one(
    attack: Callable[[Siege], Secret | None], keep_attempts: Callable[[], None]
) -> None:
    """The next ROUND_START seals the attempt before: its seed is gone, and its FULL finds nothing to open."""
    assert attack(besiege(4, (OPEN,))) is None
    keep_attempts()
    assert attack(besiege(4, (OPEN,))) == secret(VICTIM, 1)


# -------------------------------------------------------------------------------------------------------------- rescue


def rescued(b: Siege, t: int) -> Secret | None:
    """With site 0 on its side the coordinator opens all sites' attempt by shares, and then one without the victim.

    The victim alone is shown the first FULL; its shares and those of site 0 are to open the others, who go on to the
    next attempt; all are asked for shares.
    """
    everybody, victim = tuple(range(b.terms.n)), b.terms.n - 1
    rest = everybody[:-1]
    b.order(1)
    first = b.tried(b.start(1, 0, everybody))
    if first.keys() != set(everybody):
        return None
    dealt = betrayed(b, first)
    seeds = {**b.seeds(first, (victim,)), 0: attempt_of(b).b}
    second = b.sum_of(b.tried(b.start(1, 1, rest)), rest)
    for idx in rest[1:]:
        shares = {0: dealt[idx], **asked(b, first[idx], (victim, *rest[1:]))}
        seed = combined(first[idx], shares, t)
        if seed is None:
            return None
        seeds[idx] = seed
    return less(b.unmasked(first[0].ctx, dict(sorted(seeds.items()))), second)


def attempt_of(b: Siege) -> Attempt:
    """What site 0, which colludes, has in memory."""
    attempt = b.sites[0]._seats[b.job_hash]._attempt
    assert attempt is not None
    return attempt


def betrayed(b: Siege, uploads: dict[int, Upload]) -> dict[int, bytes]:
    """The shares that the others dealt to site 0: it opens their seals without any FULL."""
    attempt, found = attempt_of(b), {}
    for idx, upload in uploads.items():
        for each in upload.seals:
            if each.idx == 0:
                associated = canonical.enc(upload.ctx, idx, 0, upload.commitment)
                found[idx] = seal.open(attempt.inbound[idx], associated, each.sealed)
    return found


def asked(b: Siege, upload: Upload, holders: Iterable[int]) -> dict[int, bytes]:
    """The shares of this uploader's seed that these sites give for the asking."""
    given: dict[int, bytes] = {}
    for idx in holders:
        if idx != upload.idx:
            told = b.sent(b.say(idx, b.sign(Rescue(upload.ctx, (upload.idx,)))), Shares)
            given.update((idx, each.shares[0].share) for each in told)
    return given


def plan(m_min: int, t: int) -> Plan:
    """Any set of so many sites, with shares."""
    return replace(OPEN, m_min=m_min, t=t)


def test_shares_never_open_a_second_sum(overlook: Callable[..., None]) -> None:
    """Of four sites any three, with two shares: t + m_min = n + c_max, and no site takes such a job.

    Made to take it, they open two sums whose difference is the victim's input. Of five sites any four, with three
    shares, is one above the condition: the same attack, on sites that take the job, opens one sum.
    """
    sharp, legal = (4, plan(3, 2)), (5, plan(4, 3))
    assert not any(besiege(sharp[0], (sharp[1],)).inside(idx) for idx in range(4))
    assert rescued(besiege(legal[0], (legal[1],)), 3) is None
    overlook(Rule.ESCROW)
    assert rescued(besiege(sharp[0], (sharp[1],)), 2) == secret(3, 1)


# --------------------------------------------------------------------------------------------------------------- crash


def killed(b: Siege) -> Secret | None:
    """Each site is killed as its OPEN leaves, and starts again from what was durable before that."""
    b.order(1)
    uploads = b.tried(b.start(1, 0, ALL))
    seeds = {}
    for idx in ALL:
        disk = b.durable(idx)
        for effect in b.say(idx, b.full(idx, uploads.values())):
            match effect:
                case Persist(durable=durable):
                    disk = durable
                case Send(message=Open(b=seed)):
                    seeds[idx] = seed
                    break
                case _:
                    pass
        b.crash(idx, disk)
    whole = b.unmasked(uploads[0].ctx, seeds)
    b.epoch(1)
    return less(whole, b.round(1, 1, WITHOUT))


def test_a_site_killed_as_its_open_leaves_has_opened_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a round is opened is durable before OPEN leaves; the other way round a kill in between opens it twice."""
    assert killed(besiege(4, (OPEN,))) is None
    opened: Any = Seat._opened
    monkeypatch.setattr(Seat, "_opened", lambda *given: [*reversed(opened(*given))])
    assert killed(besiege(4, (OPEN,))) == secret(VICTIM, 1)
