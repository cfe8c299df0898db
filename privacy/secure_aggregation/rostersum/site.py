"""A site's half of RosterSum: all its jobs, what they share, and when it must distrust itself (sections 2 to 4).

```
Offered ----> a Seat for each job it accepts (F1); `seat.py` is the machine of one job, `states.py` its table
Received ---> the seat of its job; refused messages change nothing
clocks drift apart by 30 s ---> every seat drops what it holds in memory and makes new keys
KEYS of its own, made elsewhere ---> everything stops until the administrator has looked
```
"""

import os
from collections.abc import Callable
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.errors import ConfigurationError, PolicyRefused, RemoteProtocolError, WhoActs
from privacy.crypto import agreement
from privacy.secure_aggregation.rostersum import messages, rules
from privacy.secure_aggregation.rostersum.attempt import Draw
from privacy.secure_aggregation.rostersum.durable import Durable, Job, Point
from privacy.secure_aggregation.rostersum.evidence import ForeignKeysError
from privacy.secure_aggregation.rostersum.floor import Data, Floor, Ledger, job_refusals
from privacy.secure_aggregation.rostersum.messages import Code, Refuse
from privacy.secure_aggregation.rostersum.premises import Premises
from privacy.secure_aggregation.rostersum.rules import Broken, Rule
from privacy.secure_aggregation.rostersum.seat import Seat
from privacy.secure_aggregation.rostersum.site_events import (
    Accepted,
    Clock,
    Connected,
    Effect,
    Erase,
    Event,
    FloorChanged,
    JobEvent,
    JobRefused,
    Log,
    Offered,
    Received,
    ReCell,
    Resumed,
    ReTable,
    Send,
    Suspend,
    TimePassed,
    Unreadable,
    Updated,
)
from privacy.secure_aggregation.rostersum.states import TRANSITIONS, Cause, State
from privacy.secure_aggregation.rostersum.terms import Terms

__all__ = ["MOST_DRIFT", "TRANSITIONS", "Cause", "Ledger", "Site", "State"]

MOST_DRIFT = 30.0
"""Seconds by which wall clock and steady clock may drift apart before this process may be a resumed snapshot."""


class Site:
    """The state of a site in all its jobs. It owns no socket, clock, thread or file.

    Effects are performed in their order, and what follows a `Persist` only once that is durable.

    **Formal guarantee** (section 5 of the text, an external review outstanding). With at most c_max colluding sites of
    at most g_max organisations, this site's input of one round enters at most one opened sum, over exactly the set that
    it and every other honest member of it signed; a crash and restart on the current durable state changes nothing of
    this. A copy, a snapshot or an older durable state does: such a site counts as colluding.

    Args:
        private: This site's identity key, which serves this protocol only.
        floor: Its own limits.
        durable: What it knew last; `Durable()` where it never ran.
        ledger: Its ledger; without one it accepts no plan with churn "dp".
        draw: The operating system's generator; another one only where annex B is checked.
        generate: Fresh key-agreement keys; others only where annex B is checked.
    """

    def __init__(
        self,
        private: Ed25519PrivateKey,
        floor: Floor,
        durable: Durable,
        ledger: Ledger | None = None,
        draw: Draw = os.urandom,
        generate: Callable[[bool], agreement.Keys] = agreement.generate,
    ) -> None:
        self._premises = Premises(private, floor, ledger, durable, draw, generate)
        self._vk = private.public_key().public_bytes_raw()
        self._seats = {job.job_hash: Seat(self._premises, job) for job in durable.jobs}
        self._offset: float | None = None
        self._stopped = False

    @property
    def durable(self) -> Durable:
        """The durable state, as the last Persist has it."""
        return self._premises.durable

    def state(self, job_hash: bytes) -> State:
        """Where the site stands in a job; CLOSED in one that is over."""
        seat = self._seats.get(job_hash)
        return State.CLOSED if seat is None else seat.state

    def wake_at(self, clock: Clock) -> float | None:
        """When, on the steady clock, a `TimePassed` will change something; None while it will not."""
        times = (seat.wake_at(clock) for seat in self._seats.values())
        return min((at for at in times if at is not None), default=None)

    def receive(self, event: Event, clock: Clock) -> tuple[Effect, ...]:
        """Takes an event in and says what to do. A refused message is answered, logged, and changes nothing.

        Raises:
            RemoteProtocolError: A message came for a job that this site is not in; nothing changed.
            PolicyRefused: The administrator asks for what no floor allows, or this site has stopped; nothing changed.
            LocalProtocolError: The event cannot be now: a bug of ours; nothing changed.
        """
        if self._stopped:
            raise PolicyRefused(
                "this site has stopped: another process holds its identity key",
                fix="find and end the other process, end this one, start it again, and resume its jobs",
            )
        effects = [*self._clocks(clock), *self._timers(clock)]
        try:
            return (*effects, *self._taken(event, clock))
        except ForeignKeysError as foreign:
            return (*effects, *self._stop(foreign))

    def _taken(self, event: Event, clock: Clock) -> list[Effect]:
        match event:
            case Offered(terms, data):
                return self._offered(terms, data)
            case Connected() | TimePassed():
                return [effect for seat in self._seats.values() for effect in seat.receive(event, clock)]
            case FloorChanged(floor):
                self._premises.floor = floor
                return []
            case ReCell(family, cell):
                return self._recelled(family, cell)
            case ReTable():
                return self._retabled(event)
            case _:
                return self._seated(event, clock)

    # ------------------------------------------------------------------------------------------------- self-distrust

    def _clocks(self, clock: Clock) -> list[Effect]:
        """A snapshot that comes back has a wall clock that ran on and a steady clock that did not, or the reverse."""
        offset, before = clock.wall - clock.steady, self._offset
        if before is None or abs(offset - before) > MOST_DRIFT:
            self._offset = offset
        if before is None or self._offset == before:
            return []
        return [effect for seat in self._seats.values() for effect in seat.clocks_drifted(clock)]

    def _timers(self, clock: Clock) -> list[Effect]:
        """What time has done comes before what the event does: a FULL after T_full finds its attempt sealed."""
        return [effect for seat in self._seats.values() for effect in seat.receive(TimePassed(), clock)]

    def _stop(self, foreign: ForeignKeysError) -> list[Effect]:
        self._stopped = True
        effects: list[Effect] = []
        for seat in self._seats.values():
            effects += [*seat.stop(foreign.problem), Log(seat.job_hash, foreign.evidence)]
        return effects

    # ---------------------------------------------------------------------------------------------------------- jobs

    def _seated(self, event: JobEvent, clock: Clock) -> list[Effect]:
        seat = self._seats.get(event.job_hash)
        if seat is not None:
            effects = seat.receive(event, clock)
            if seat.state is State.CLOSED:
                del self._seats[event.job_hash]
            return effects
        match event:
            case Received() | Unreadable():
                raise RemoteProtocolError(
                    f"this site is not in the job {event.job_hash.hex()[:16]}..., or it is over",
                    fix="offer the job first; a closed one is never opened again",
                    who=WhoActs.COORDINATOR,
                )
            case Resumed():
                raise PolicyRefused("there is no such job here to resume", fix="name a job that is suspended")
            case Updated():
                return [Erase(event.job_hash, event.update)]
            case _:
                return []  # what was under way when the job ended

    def _offered(self, terms: Terms, data: Data) -> list[Effect]:
        job_hash, idx = terms.job_hash, terms.roster.index_of(self._vk)
        known = self._seats.get(job_hash)
        if known is not None and (known.job.family, known.job.table) == (data.family, data.table):
            return [Accepted(job_hash)]
        found = self._refusals(terms, idx, data)
        if idx is None or found:
            return self._not_accepted(job_hash, idx, found)
        job = Job(job_hash=job_hash, idx=idx, encoded=terms.encode(), family=data.family, table=data.table)
        persist = self._premises.persist(Point.JOB, job=job)
        self._seats[job_hash] = Seat(self._premises, job)
        family = self.durable.family(data.family)
        return [persist, Accepted(job_hash), *([Suspend(job_hash, family.why)] if family.waits else [])]

    def _refusals(self, terms: Terms, idx: int | None, data: Data) -> tuple[Broken, ...]:
        """All rules of section 2 that the job breaks here, but the floor's only where it can be asked."""
        found = rules.broken(terms)
        if found:
            return found
        if idx is None:
            return (Broken(Rule.NOT_MEMBER, "the roster does not hold this site's key", "submit the job anew"),)
        if terms.pq:
            try:
                agreement.require_ml_kem()
            except ConfigurationError as absent:
                found = (Broken(Rule.ML_KEM, absent.problem, absent.fix),)
        return found + job_refusals(self._premises.floor, terms, idx, data, self.durable, self._premises.ledger)

    def _not_accepted(self, job_hash: bytes, idx: int | None, found: tuple[Broken, ...]) -> list[Effect]:
        refused = JobRefused(job_hash, found)
        if idx is None:
            return [refused]
        code = Code.E_PIN if {each.rule for each in found} == {Rule.PIN} else Code.E_TERMS
        refuse = Refuse(job_hash, 0, 0, idx, code, messages.NOBODY, 0, 0, 0)
        return [Send(job_hash, messages.sign(refuse, self._premises.private)), refused]

    # ------------------------------------------------------------------------------------------- the administrator's

    def _recelled(self, name: str, cell: bytes) -> list[Effect]:
        family = replace(self.durable.family(name), pin=cell)
        return [self._premises.persist(Point.NOTE, family=family)]

    def _retabled(self, event: ReTable) -> list[Effect]:
        if any(job.family == event.family for job in self.durable.jobs):
            raise PolicyRefused(
                f"a job on {event.family!r} is open: its sums and those over a new version would differ by the change",
                fix="wait until the job is closed",
            )
        least = self._premises.floor.rows_min
        if event.rows_changed < least:
            raise PolicyRefused(
                f"fewer than {least} rows changed: the difference of two sums would show them",
                fix="collect more changes, then accept them together",
            )
        family = replace(self.durable.family(event.family), table=event.table)
        return [self._premises.persist(Point.NOTE, family=family)]
