"""What a site writes into its hash-chained log when something is refused or contradicts itself (section 8.7)."""

from dataclasses import dataclass, field
from enum import StrEnum

from federation.errors import ParleyError, WhoActs
from privacy.secure_aggregation.rostersum.messages import NOBODY, Code, Message, encode

__all__ = ["Evidence", "ForeignKeysError", "GuardError", "Suspicion", "contradiction"]


class Suspicion(StrEnum):
    """What was seen. A restored disk or a second copy of an honest site looks like malice; E_SEAL proves nothing."""

    REFUSED = "a message was refused"
    TWO_KEYS = "two KEYS of one generation"
    TWO_ENCAPS = "two ENCAPS of one pair of keys"
    TWO_UPLOADS = "two UPLOADs of one site in one attempt"
    TWO_STARTS = "two ROUND_STARTs of one attempt"
    TWO_FULLS = "two FULLs of one attempt"
    TWO_RESULTS = "two RESULTs of one attempt"
    FOREIGN_KEYS = "another process holds this site's identity key"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One entry of the log: what, about which site (None: the coordinator), and the signed messages, encoded.

    It never holds a self seed before F4, a share, a key, or what a site contributes.
    """

    kind: Suspicion
    text: str
    about: int | None = None
    messages: tuple[bytes, ...] = field(default=(), repr=False)


def contradiction(kind: Suspicion, about: int | None, *messages: Message) -> Evidence:
    """Messages that no honest party signs both of."""
    return Evidence(kind, kind.value, about, tuple(encode(message) for message in messages))


class GuardError(ParleyError):
    """A message does not pass a guard: it is answered with a REFUSE of this code, logged, and nothing changes."""

    who = WhoActs.COORDINATOR

    def __init__(self, code: Code, problem: str, about: int = NOBODY, evidence: tuple[Evidence, ...] = ()) -> None:
        super().__init__(problem)
        self.code = code
        self.about = about
        self.evidence = evidence


class ForeignKeysError(ParleyError):
    """KEYS of this site that another process made, not an older one: two processes hold its identity key."""

    who = WhoActs.SITE

    def __init__(self, evidence: Evidence) -> None:
        super().__init__(
            "another process has made keys with this site's identity key: a second copy runs, or the key was stolen",
            fix="find and end the other process, or have the consortium revoke this site; then resume its jobs",
        )
        self.evidence = evidence
