"""What of one job's secure aggregation goes into the coordinator's hash-chained audit log (section 8.7 of the text).

```
Started             -> terms     whose keys sign what follows
a site's message    -> received  once its signature held, whatever became of it; a contradiction also as evidence
the machine's Send  -> sent      what the coordinator signs, once: at the first site that it goes to
```

What is kept is what was signed, and no more: an UPLOAD and a FULL without their seals, which no signature covers, and
of SHARES the digest. So no share, no seed that was not opened, no key and no vector is ever in it.

**What is durable when.** Everything is in the log before anything is done about it: before a state that follows from it
is stored, before an answer leaves. An fsync for each message would cost a hundred sites more than their sums do, so all
messages that wait are taken in together and share one; only then is the first of them acted upon (`sealed.py`).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from federation.errors import RemoteProtocolError, WhoActs
from privacy.secure_aggregation.rostersum import coordinator_events as sums
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.evidence import Evidence, Suspicion
from privacy.secure_aggregation.rostersum.logged import Logged, evidence_entry, message_entry, terms_entry
from privacy.secure_aggregation.rostersum.messages import FromCoordinator, FromSite, Full, Message, Relayed, Upload
from privacy.secure_aggregation.rostersum.terms import Terms

__all__ = ["Entry", "EvidenceLog"]

Entry = tuple[str, bytes]
"""Kind and content, as `federation.audit` takes them."""

_REMEMBERED = 256
"""Signatures of its own by which it knows what was said before."""

_T = TypeVar("_T", bound=Message)


class EvidenceLog:
    """Says what of a job is to be in the log. It owns no file: what it gives is to be durable before it is acted upon.

    The same signed message twice in a round is there once. A site can fill no disk: there is a number of different
    messages that it may have said in one round, far more than an honest one needs, and then it is not heard until the
    next. So whatever was acted upon is in the log.

    Args:
        terms: The job's terms.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._most = 16 * terms.n + 256
        self._said: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._heard: dict[int, set[bytes]] = {}
        self._round = -1

    def require_room(self, idx: int, message: FromSite | Relayed, r: int) -> None:
        """Accepts one more message of site `idx` in round `r`.

        Raises:
            RemoteProtocolError: It has said as many different ones in this round as are kept; nothing changed.
        """
        if r != self._round:
            self._round = r
            self._heard.clear()
        heard = self._heard.get(idx, set())
        if len(heard) >= self._most and message.signature not in heard:
            raise RemoteProtocolError(
                f"site {idx} has said {self._most} different things in one round, and is heard again in the next",
                fix="find out what that site does; if nothing else helps, have its membership revoked",
                who=WhoActs.SITE,
            )

    def passed(self, event: sums.Event, effects: Iterable[sums.Effect]) -> tuple[Entry, ...]:
        """What is to be durable before the effects of an event that the machine took are performed."""
        entries: list[Entry] = []
        match event:
            case sums.Started():
                entries.append(terms_entry(self._terms))
            case sums.Received(idx, message):
                entries += self._signed(idx, message)
            case _:
                pass
        return (*entries, *self._sent(effects))

    def refused(self, event: sums.Received, why: RemoteProtocolError) -> tuple[Entry, ...]:
        """What is to be durable of a message that the machine refused: it is evidence if its signature holds."""
        entries = self._signed(event.idx, event.message)
        if isinstance(why, sums.ContradictionError) and entries:
            return (*entries, evidence_entry(self._terms.job_hash, _bare_evidence(why.evidence)))
        return entries

    def said(self, message: FromCoordinator, idx: int) -> tuple[Entry, ...]:
        """What is to be durable before the coordinator says this to site `idx`: nothing if it was said before."""
        if message.signature in self._said:
            return ()
        self._said.append(message.signature)
        return (message_entry(Logged.SENT, _bare(message), idx),)

    def _sent(self, effects: Iterable[sums.Effect]) -> Iterable[Entry]:
        for effect in effects:
            match effect:
                case sums.Send(idx, message) if isinstance(message, FromCoordinator):
                    yield from self.said(message, idx)
                case sums.Suspect(dealer, holders):
                    text = (
                        f"shares of the seed of site {dealer} that {sorted(holders)} held are wrong: theirs, or its own"
                    )
                    yield evidence_entry(self._terms.job_hash, Evidence(Suspicion.REFUSED, text))
                case _:
                    continue

    def _signed(self, idx: int, message: FromSite | Relayed) -> tuple[Entry, ...]:
        """The entry of a message that is new in this round and bears the signature of the site that said it."""
        heard = self._heard.setdefault(idx, set())
        if message.signature in heard or len(heard) >= self._most:
            return ()
        if not messages.verify(message, self._terms.roster.members[idx].vk):  # no work where the machine has done it
            return ()
        heard.add(message.signature)
        return (message_entry(Logged.RECEIVED, _bare(message), idx),)


def _bare(message: _T) -> _T:
    """What is signed of a message."""
    return replace(message, seals=()) if isinstance(message, Upload | Full) else message


def _bare_evidence(evidence: Evidence) -> Evidence:
    seen = (messages.decode(each) for each in evidence.messages)
    return replace(evidence, messages=tuple(messages.encode(_bare(each)) for each in seen))
