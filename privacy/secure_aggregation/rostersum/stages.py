"""The stages of one sum at the coordinator, as a table: the machine in `lane.py` obeys it, and diagrams show it."""

from enum import Enum

from privacy.secure_aggregation.rostersum.coordinator_events import (
    Arrived,
    Begin,
    Broken,
    Close,
    Committed,
    Revoked,
    Started,
    Stored,
    Summed,
    TimeUp,
)
from privacy.secure_aggregation.rostersum.messages import Decline, Encaps, Keys, Open, Ready, Refuse, Shares, Upload
from privacy.secure_aggregation.rostersum.transitions import Transition

__all__ = ["CAUSES", "TRANSITIONS", "Cause", "Stage"]


class Stage(Enum):
    """Where a sum stands."""

    IDLE = "idle"
    GATHERING = "gathering"
    UPLOADING = "uploading"
    OPENING = "opening"
    RESCUING = "rescuing"
    SUMMING = "summing"
    SUMMED = "summed"


class Cause(Enum):
    """What can happen to a sum."""

    BEGIN = "a step begins"
    RESTART = "the coordinator starts again"
    ARRIVED = "a site arrives"
    REVOKED = "a site is revoked"
    KEYS = "KEYS"
    ENCAPS = "ENCAPS"
    READY = "READY"
    DECLINE = "DECLINE"
    REFUSE = "REFUSE"
    UPLOAD = "UPLOAD"
    STORED = "a vector is here"
    OPEN = "OPEN"
    SHARES = "SHARES"
    SUMMED = "the sum holds"
    BROKEN = "the sum does not hold"
    COMMITTED = "the model is stored"
    TIME_UP = "time is up"
    CLOSE = "the job ends"


_ALL = tuple(Stage)
_I, _G, _U, _O, _R, _S, _D = _ALL

TRANSITIONS: tuple[Transition[Stage, Cause], ...] = (
    Transition((_I,), Cause.BEGIN, (_G, _I), "TRAIN to all; give up if no set can be allowed"),
    Transition((_I,), Cause.RESTART, (_I, _G, _O, _S), "go on: next attempt, FULL again, or sum"),
    Transition((_G,), Cause.READY, (_G, _U), "all wanted are ready: ROUND_START to the largest allowed set"),
    Transition((_G,), Cause.ENCAPS, (_G, _U), "the last pair is settled: ROUND_START"),
    Transition((_G,), Cause.DECLINE, (_G, _U, _I), "go without it, or give up"),
    Transition((_G,), Cause.REVOKED, (_G, _U, _I), "go without it, or give up"),
    Transition((_G,), Cause.REFUSE, (_G, _U, _I), "go without it, or give up"),
    Transition((_G,), Cause.KEYS, (), "its READY is void: TRAIN again"),
    Transition((_G,), Cause.ARRIVED, (_G, _U), "TRAIN"),
    Transition((_G,), Cause.TIME_UP, (_G, _U, _I), "ask again, ROUND_START to who is ready, or give up"),
    Transition((_U,), Cause.UPLOAD, (), "take its vector in"),
    Transition((_U,), Cause.STORED, (_U, _O, _G, _I), "all are here: FULL"),
    Transition((_U,), Cause.KEYS, (_U, _G, _I), "it has forgotten the attempt: the next one"),
    Transition((_U,), Cause.REVOKED, (_U, _G, _I), "the next attempt"),
    Transition((_U,), Cause.REFUSE, (_U, _G, _I), "the next attempt"),
    Transition((_U,), Cause.TIME_UP, (_U, _G, _I), "the next attempt; after the last give up"),
    Transition((_U,), Cause.READY, (), "ready for the next attempt"),
    Transition((_U,), Cause.DECLINE, (), "not in the next attempt"),
    Transition((_U,), Cause.ARRIVED, (), "ROUND_START again, or TRAIN"),
    Transition((_O,), Cause.OPEN, (_O, _R, _S, _I), "all are open: sum"),
    Transition((_O,), Cause.REFUSE, (_O, _R, _I), "nobody else will open: RESCUE, or RESULT burned"),
    Transition((_O,), Cause.TIME_UP, (_O, _R, _I), "FULL again, then RESCUE or RESULT burned"),
    Transition((_O, _R), Cause.ARRIVED, (), "FULL or RESCUE again"),
    Transition((_R,), Cause.SHARES, (_R, _S), "all seeds are known: sum"),
    Transition((_R,), Cause.OPEN, (_R, _S), "all seeds are known: sum"),
    Transition((_R,), Cause.TIME_UP, (_R, _I), "RESCUE again, then RESULT burned"),
    Transition((_S,), Cause.SUMMED, (_D,), "commit model and round"),
    Transition((_S,), Cause.BROKEN, (_I,), "RESULT burned"),
    Transition((_D,), Cause.COMMITTED, (_I,), "RESULT opened"),
    Transition((_O, _R, _S, _D), Cause.UPLOAD, (), "the same again: nothing"),
    Transition((_S, _D), Cause.OPEN, (), "the same again: nothing"),
    Transition((_S, _D), Cause.SHARES, (), "the same again: nothing"),
    Transition((_I,), Cause.READY, (), "its sum was given up meanwhile: nothing"),
    Transition((_I,), Cause.OPEN, (), "RESULT again"),
    Transition((_I,), Cause.ARRIVED, (), "RESULT again"),
    Transition((_S, _D), Cause.ARRIVED, (), "nothing"),
    Transition((_O,), Cause.KEYS, (_O, _R, _I), "a new process, without a record: it will not open"),
    Transition((_I, _R, _S, _D), Cause.KEYS, (), "nothing in flight changes"),
    Transition((_I, _O, _R, _S, _D), Cause.REVOKED, (), "from the next attempt on"),
    Transition((_I, _R, _S, _D), Cause.REFUSE, (), "nothing"),
    Transition((_I, _U, _O, _R, _S, _D), Cause.ENCAPS, (), "nothing in flight changes"),
    Transition((_I, _G, _O, _R, _S, _D), Cause.STORED, (), "of an attempt that is over: nothing"),
    Transition((_I, _G, _U, _O, _R, _S, _D), Cause.CLOSE, (_I,), "give up"),
)
"""Every row that a sum's machine has; UPLOADING to UPLOADING and the like include the attempt that follows at once."""

CAUSES: dict[type, Cause] = {
    Begin: Cause.BEGIN,
    Started: Cause.RESTART,
    Arrived: Cause.ARRIVED,
    Revoked: Cause.REVOKED,
    Stored: Cause.STORED,
    Summed: Cause.SUMMED,
    Broken: Cause.BROKEN,
    Committed: Cause.COMMITTED,
    TimeUp: Cause.TIME_UP,
    Close: Cause.CLOSE,
    Keys: Cause.KEYS,
    Encaps: Cause.ENCAPS,
    Ready: Cause.READY,
    Decline: Cause.DECLINE,
    Refuse: Cause.REFUSE,
    Upload: Cause.UPLOAD,
    Open: Cause.OPEN,
    Shares: Cause.SHARES,
}
"""Which cause an event is, or the message in it."""
