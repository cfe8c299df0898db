"""A coordinator that tells different sites of different sets of survivors (Bonawitz et al. 2017, section 6)."""

from collections.abc import Callable
from typing import Any

import pytest

from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.messages import Rescue, Share, Shares
from privacy.secure_aggregation.rostersum.seat import Seat
from privacy.secure_aggregation.rostersum.site_events import Send
from tests.attacks.siege import ESCROW, OPEN, Secret, Siege, besiege, less, secret

VICTIM = 3


def told_apart(b: Siege) -> Secret | None:
    """Three sites are told that they are all, then all four that they are, in one and the same attempt.

    The model has moved by one unit in between: it is a new one, and the sites' updates are as good as the same.
    """
    fewer = b.round(1, 0, (0, 1, 2))
    return less(b.round(1, 0, (0, 1, 2, VICTIM), model=b"model + 1"), fewer)


def test_two_sets_in_one_attempt_isolate_who_is_in_one(disarm: Callable[..., None]) -> None:
    """Who has masked or opened an attempt is in no other set of it: the difference of two sets is never opened.

    Two lines of defence hold, and both are taken away: (r, a) grows, and an opened round is not worked on again.
    """
    assert told_apart(besiege(4, (OPEN,))) is None
    disarm("_fresh", "_unopened")
    assert told_apart(besiege(4, (OPEN,))) == secret(VICTIM, 1)


def survived_and_dropped(b: Siege, victim: int = 0) -> Secret | None:
    """The victim is told that all survive, and opens; the others that it has dropped out, and are asked for its seeds.

    Of the answers the attacker reads the seed that each shares with the victim, as the survivors of Bonawitz et al.
    reveal it.
    """
    b.order(1)
    uploads = b.tried(b.start(1))
    seeds = b.seeds(uploads, (victim,))
    ctx = uploads[victim].ctx
    told = {idx: b.say(idx, b.sign(Rescue(ctx, (victim,)))) for idx in uploads if idx != victim}
    given = {idx: each.shares[0].share for idx, effects in told.items() for each in b.sent(effects, Shares)}
    if victim not in seeds or len(given) < len(told):
        return None
    return b.unmasked(ctx, seeds, [(-1 if victim < idx else 1, share[1:]) for idx, share in given.items()])


def revealing(seat: Seat, message: Rescue) -> list[Send]:
    """A RESCUE answered by a machine that gives the pair seeds of whoever is said to be missing."""
    attempt: Any = seat._attempt
    keys = dict(zip(attempt.inbound, attempt.pair_keys, strict=True))
    shares = tuple(Share(missing, b"\0" + keys[missing][1]) for missing in message.missing)
    return [seat._send(messages.sign(Shares(message.ctx, seat._idx, shares), seat._premises.private))]


def test_a_site_said_to_have_dropped_out_is_never_unmasked_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pair seeds are never given to anybody: with them one OPEN and one pretended drop-out give the victim's input.

    The guard is what RESCUE answers: shares of self seeds, and only of an attempt that the holder has opened itself.
    """
    assert survived_and_dropped(besiege(4, (ESCROW,))) is None
    monkeypatch.setattr(Seat, "_rescue", revealing)
    assert survived_and_dropped(besiege(4, (ESCROW,))) == secret(0, 1)
