"""Errors on the wire: what one side refused, the other raises again as the same error, with the same words."""

from federation import errors
from federation.errors import ParleyError, RemoteProtocolError, StorageError, WhoActs
from federation.messages import Refusal

__all__ = ["DETAIL", "STATEMENT", "raised", "told"]

DETAIL = "parley-refusal-bin"
"""Name of the metadata entry that carries an encoded `Refusal` beside a call's status."""

STATEMENT = "parley-statement-bin"
"""Name of the metadata entry in which a member shows its encoded `MembershipStatement` with every call."""

_LIMIT = 4000


def told(about: str, error: ParleyError) -> Refusal:
    """The words with which the coordinator tells a peer that what it sent changed nothing; `about` names it."""
    who = error.who
    if isinstance(error, StorageError) and who is WhoActs.YOU:
        who = WhoActs.COORDINATOR  # the peer cannot free the coordinator's disk
    return Refusal(about[:_LIMIT], error.problem[:_LIMIT], who.value, error.fix[:_LIMIT])


def raised(refusal: Refusal) -> ParleyError:
    """The error that the peer raised: of the class that `about` names, or a `RemoteProtocolError`."""
    kind = getattr(errors, refusal.about, None) if refusal.about in errors.__all__ else None
    if not (isinstance(kind, type) and issubclass(kind, ParleyError)):
        kind = RemoteProtocolError
    who = next((each for each in WhoActs if each.value == refusal.who), WhoActs.DEVELOPERS)
    return kind(refusal.problem, fix=refusal.fix, who=who)
