"""What one peer may take of the coordinator: so many messages a second, and so many calls at a time."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from federation.errors import RemoteProtocolError, WhoActs

__all__ = ["BURST", "CALLS", "MESSAGES_PER_SECOND", "Limits", "raise_file_limit"]

MESSAGES_PER_SECOND = 1000.0
"""Messages and chunks that a peer may send for as long as it likes; a site's busiest step takes a dozen."""

BURST = 5000.0
"""Messages that it may send at once, after as long a silence as that takes to earn."""

CALLS = 16
"""Calls that it may hold open; a site needs three, and after a cut the old ones linger for a minute beside the new."""


def raise_file_limit() -> None:
    """Lets this process open as many files as its administrator allows, not the fewer that a shell begins with.

    Each site takes three: its connection, its upload, and the upload once more while it is summed.
    """
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(slots=True)
class _Peer:
    """What a peer has left of its messages (a token bucket) as of a moment, and its open calls."""

    messages: float
    at: float
    calls: int = 0


class Limits:
    """Every peer's share. It outlives their streams: who comes back at once has no more than it had.

    One small record is kept for each peer that was ever let in, so for none that the consortium's root did not sign.
    """

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def message(self, name: str, now: float) -> None:
        """Takes one message off a peer's share; `now` is any clock that does not run backwards, in seconds.

        Raises:
            RemoteProtocolError: Nothing is left of it.
        """
        peer = self._peers.setdefault(name, _Peer(BURST, now))
        peer.messages = min(BURST, peer.messages + MESSAGES_PER_SECOND * (now - peer.at))
        peer.at = now
        if peer.messages < 1:
            raise RemoteProtocolError(
                f"{name} sends more than {MESSAGES_PER_SECOND:.0f} messages a second",
                fix=f"install this release of Parley at {name}; if that is no cure, have its membership revoked",
                who=WhoActs.SITE,
            )
        peer.messages -= 1

    @contextmanager
    def call(self, name: str, now: float) -> Iterator[None]:
        """A block that is one of a peer's open calls; opening it counts as a message.

        Raises:
            RemoteProtocolError: The peer holds as many open as it may, or sends too many messages.
        """
        self.message(name, now)
        peer = self._peers[name]
        if peer.calls >= CALLS:
            raise RemoteProtocolError(
                f"{name} holds {CALLS} calls open already",
                fix="end what is not used; lost connections are given up after a minute",
                who=WhoActs.SITE,
            )
        peer.calls += 1
        try:
            yield
        finally:
            peer.calls -= 1
