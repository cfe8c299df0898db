"""The self seeds that nobody opened: rescued from the shares their owners dealt, in spite of wrong ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from federation.errors import RemoteProtocolError
from privacy.crypto import shamir
from privacy.secure_aggregation.rostersum.messages import Share

__all__ = ["Escrow", "Rescued"]


@dataclass(frozen=True, slots=True)
class Rescued:
    """A self seed from shares; a wrong share convicts its holder or its dealer, and does not say which.

    Attributes:
        dealer: Whose seed it is.
        seed: 32 bytes that make the dealer's commitment.
        wrong: Holders whose shares are not those of this seed.
    """

    dealer: int
    seed: bytes = field(repr=False)
    wrong: frozenset[int]


class Escrow:
    """The shares collected for the members of one attempt that did not open.

    A seed is given once, and only if it makes the commitment that its owner uploaded: wrong shares can delay a rescue,
    and never change what it gives.

    Args:
        missing: The members whose seeds are wanted.
        threshold: Shares that give a seed.
        accept: Whether these bytes are the seed to which this member is committed.
    """

    def __init__(self, missing: tuple[int, ...], threshold: int, accept: Callable[[int, bytes], bool]) -> None:
        self.missing = missing
        self._threshold = threshold
        self._accept = accept
        self._shares: dict[int, dict[int, bytes]] = {dealer: {} for dealer in missing}
        self._rescued: set[int] = set()

    @property
    def wanted(self) -> tuple[int, ...]:
        """The members whose seeds are not rescued yet."""
        return tuple(dealer for dealer in self.missing if dealer not in self._rescued)

    @property
    def holders(self) -> frozenset[int]:
        """Those whose shares are here."""
        return frozenset(holder for shares in self._shares.values() for holder in shares)

    def add(self, holder: int, shares: Sequence[Share]) -> tuple[Rescued, ...]:
        """Takes the shares that `holder` keeps, and gives the seeds that they complete.

        Each seed is found as soon as `threshold` right shares are here with at least as many more as there are wrong.

        Raises:
            RemoteProtocolError: The dealers are not `missing`, a share is not an element of the field, or the holder
                sent other shares before; nothing changed.
        """
        dealers = tuple(share.idx for share in shares)
        if dealers != self.missing:
            raise RemoteProtocolError(
                f"site {holder} sent shares of {list(dealers)} where those of {list(self.missing)} were asked",
                fix=f"update Parley at site {holder} to the coordinator's release",
            )
        for each in shares:
            shamir.number(each.share)
        if any(self._shares[each.idx].get(holder, each.share) != each.share for each in shares):
            raise RemoteProtocolError(f"site {holder} has sent other shares before; its first ones stand")
        for each in shares:
            self._shares[each.idx][holder] = each.share
        return tuple(filter(None, (self._attempted(dealer) for dealer in self.wanted)))

    def drop(self, dealer: int) -> None:
        """Wants the seed of `dealer` no more: it opened after all."""
        self._rescued.add(dealer)

    def _attempted(self, dealer: int) -> Rescued | None:
        shares = self._shares[dealer]
        if len(shares) < self._threshold:
            return None
        try:
            seed, wrong = shamir.reconstruct(shares, self._threshold, lambda seed: self._accept(dealer, seed))
        except RemoteProtocolError:
            return None  # too many of them are wrong as yet: the next holder's may decide
        self._rescued.add(dealer)
        return Rescued(dealer, seed, wrong)
