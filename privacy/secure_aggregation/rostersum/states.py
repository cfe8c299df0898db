"""Where a site can stand in a job, and the one table of what moves it (section 4.3).

`python -m privacy.secure_aggregation.rostersum.diagram` draws it.
"""

from enum import StrEnum

from privacy.secure_aggregation.rostersum.transitions import Transition

__all__ = ["SENT", "TRANSITIONS", "Cause", "State"]


class State(StrEnum):
    """Where a site stands in a job; whether it has a record of an opened attempt is apart from this."""

    IDLE = "idle"
    WORKING = "working"
    READY = "ready"
    MASKING = "masking"
    UPLOADED = "uploaded"
    OPENED = "opened"
    CLOSED = "closed"


class Cause(StrEnum):
    """What moves a site: a message that passes its guards, or something that happened to itself."""

    RESTART = "process start"
    DRIFT = "clock drift"
    EPOCH = "EPOCH"
    KEYS = "KEYS"
    ENCAPS = "ENCAPS"
    TRAIN = "TRAIN"
    DONE = "work done"
    CANNOT = "cannot"
    DRIFTED = "model drifted"
    START = "ROUND_START"
    MASKED = "masked"
    SENT = "upload sent"
    FULL = "FULL"
    FULL_AGAIN = "FULL of the record"
    RESCUE = "RESCUE"
    RESULT = "RESULT"
    CLOSE = "CLOSE"
    T_FULL = "T_full, 900 s"
    T_KEEP = "T_keep, 3600 s"
    T_OPEN = "T_open, 24 h"
    SUSPEND = "suspended"


_LIVE = (State.IDLE, State.WORKING, State.READY, State.MASKING, State.UPLOADED, State.OPENED)
SENT = (State.MASKING, State.UPLOADED)
"""Both are what section 4.3 calls UPLOADED: an attempt is under way."""
_REST = (State.IDLE, State.OPENED)


TRANSITIONS: tuple[Transition[State, Cause], ...] = (
    Transition(_LIVE, Cause.RESTART, _REST, "record: OPENED, else IDLE; wait for EPOCH"),
    Transition(_LIVE, Cause.DRIFT, _REST, "drop attempt and update; new keys (F2), KEYS"),
    Transition(_LIVE, Cause.SUSPEND, _REST, "drop attempt and update; tell the administrator"),
    Transition(SENT, Cause.EPOCH, (State.READY,), "seal; new keys (F2), KEYS, READY"),
    Transition((State.READY,), Cause.EPOCH, (), "new keys (F2), KEYS, READY"),
    Transition((*_REST, State.WORKING), Cause.EPOCH, (), "new keys (F2), KEYS"),
    Transition(_LIVE, Cause.KEYS, (), "pair root; ENCAPS to higher indices (pq)"),
    Transition(_LIVE, Cause.ENCAPS, (), "pair root"),
    Transition(_LIVE, Cause.TRAIN, (State.WORKING,), "erase update, seal; work"),
    Transition((State.WORKING, State.READY, *SENT), Cause.TRAIN, (), "the same again: READY if READY"),
    Transition((State.WORKING,), Cause.DONE, (State.READY,), "READY"),
    Transition((State.WORKING, State.MASKING), Cause.CANNOT, (State.IDLE,), "seal; DECLINE"),
    Transition((State.WORKING,), Cause.DRIFTED, (State.IDLE,), "REFUSE E_DRIFT"),
    Transition((State.READY, *SENT), Cause.START, (State.MASKING,), "seal the old attempt; F3; mask"),
    Transition((State.MASKING,), Cause.MASKED, (State.UPLOADED,), "UPLOAD, and the masked vector"),
    Transition((State.UPLOADED,), Cause.SENT, (), "T_full begins"),
    Transition((State.UPLOADED,), Cause.FULL, (State.OPENED,), "F4; erase update; OPEN"),
    Transition(_LIVE, Cause.FULL_AGAIN, (), "OPEN again, from the record"),
    Transition(_LIVE, Cause.RESCUE, (), "SHARES, from the record"),
    Transition((State.READY, *SENT, State.OPENED), Cause.RESULT, (State.IDLE,), "erase update and shares"),
    Transition(_LIVE, Cause.RESULT, (), "late: settles the record, if it is of its context"),
    Transition((State.UPLOADED,), Cause.T_FULL, (State.READY,), "seal; the update is kept"),
    Transition((State.READY,), Cause.T_KEEP, (State.IDLE,), "erase update"),
    Transition((State.OPENED,), Cause.T_OPEN, (State.IDLE,), "erase shares"),
    Transition(_LIVE, Cause.T_OPEN, (), "erase shares"),
    Transition(_LIVE, Cause.CLOSE, (State.CLOSED,), "F5; erase all"),
)
"""Section 4.3; MASKING is the part of its UPLOADED before the masked vector exists. Anything else: REFUSE E_STATE."""
