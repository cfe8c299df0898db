"""The sites' keys as the coordinator relays them: the newest of each site and epoch, and what goes with each pair."""

from collections.abc import Collection
from itertools import combinations

from federation.errors import RemoteProtocolError
from privacy.crypto import agreement
from privacy.secure_aggregation.rostersum.cohorts import Pair
from privacy.secure_aggregation.rostersum.coordinator_events import ContradictionError
from privacy.secure_aggregation.rostersum.evidence import Suspicion
from privacy.secure_aggregation.rostersum.messages import Encaps, Keys, Relayed, keyset, verify
from privacy.secure_aggregation.rostersum.terms import Terms

__all__ = ["KeyBook"]

_FIX = "update Parley at the site to the coordinator's release"


class KeyBook:
    """The keys of one epoch. It relays no keys that a site would refuse: one bad key must not stop all others.

    Args:
        terms: The job.
        epoch: The epoch it begins with.
    """

    def __init__(self, terms: Terms, epoch: int) -> None:
        if terms.pq:
            agreement.require_ml_kem()
        self.epoch = epoch
        self._terms = terms
        self._probe = agreement.generate(pq=False)
        self._keys: dict[int, Keys] = {}
        self._encaps: dict[Pair, Encaps] = {}

    def begin(self, epoch: int) -> None:
        """Forgets all keys: this epoch has new ones."""
        self.epoch = epoch
        self._keys.clear()
        self._encaps.clear()

    def digest(self, idx: int) -> bytes | None:
        """What names the newest keys of a site; None while it has sent none in this epoch."""
        keys = self._keys.get(idx)
        return None if keys is None else keys.digest

    def keyset(self, members: tuple[int, ...]) -> bytes:
        """The digest of the members' newest keys; all of them are here."""
        return keyset(tuple((idx, self._keys[idx].digest) for idx in members))

    def known(self, idx: int) -> tuple[Relayed, ...]:
        """All keys, and the ENCAPS that are for site `idx`: what it must have to share a root with each other.

        Its own keys are among them: were they not its own, it would learn that another process holds its identity.
        """
        keys = tuple(keys for _, keys in sorted(self._keys.items()))
        lower = ((lo, idx) for lo in range(idx))
        return (*keys, *(self._encaps[pair] for pair in lower if pair in self._encaps))

    def unsettled(self, sites: Collection[int]) -> frozenset[Pair]:
        """The pairs among these sites that cannot have a root yet, since the ENCAPS between them has not come."""
        if not self._terms.pq:
            return frozenset()
        return frozenset(pair for pair in combinations(sorted(sites), 2) if pair not in self._encaps)

    def take_keys(self, idx: int, keys: Keys) -> bool:
        """Takes the keys that site `idx` sent; whether they are new, to be relayed to all others.

        Raises:
            ContradictionError: The site signed other keys under the same `gen`.
            RemoteProtocolError: They are another's, of another job or epoch, unsigned, or no keys.
        """
        if keys.idx != idx:
            raise RemoteProtocolError(f"site {idx} sent the keys of site {keys.idx}; its own are wanted", fix=_FIX)
        self._check(idx, keys)
        known = self._keys.get(idx)
        if known is not None and (keys.gen < known.gen or keys.digest == known.digest):
            return False
        if known is not None and keys.gen == known.gen:
            raise ContradictionError(idx, Suspicion.TWO_KEYS, known, keys)
        self._keys[idx] = keys
        self._encaps = {pair: encaps for pair, encaps in self._encaps.items() if idx not in pair}
        return True

    def take_encaps(self, idx: int, encaps: Encaps) -> bool:
        """Takes an ENCAPS of site `idx`; whether it is new, to be relayed to its `hi`.

        Raises:
            ContradictionError: The site signed another for the same two keys.
            RemoteProtocolError: It is another's, of another job or epoch, for older keys, or unsigned.
        """
        if encaps.lo != idx or not idx < encaps.hi < self._terms.n or not self._terms.pq:
            raise RemoteProtocolError(f"site {idx} sent the ENCAPS of {encaps.lo} to {encaps.hi}", fix=_FIX)
        self._check(idx, encaps)
        if (encaps.keys_digest_lo, encaps.keys_digest_hi) != (self.digest(idx), self.digest(encaps.hi)):
            raise RemoteProtocolError(
                f"the ENCAPS of site {idx} to {encaps.hi} is for keys that have been replaced",
                fix="make one for the newest keys of both",
            )
        pair = (idx, encaps.hi)
        known = self._encaps.get(pair)
        if known is not None and known.ct != encaps.ct:
            raise ContradictionError(idx, Suspicion.TWO_ENCAPS, known, encaps)
        self._encaps[pair] = encaps
        return known is None

    def _check(self, idx: int, message: Keys | Encaps) -> None:
        terms = self._terms
        if message.job_hash != terms.job_hash or message.epoch != self.epoch:
            raise RemoteProtocolError(
                f"the {message.TAG} of site {idx} are of another job, or of epoch {message.epoch}, not {self.epoch}",
                fix="send those of this epoch",
            )
        if not verify(message, terms.roster.members[idx].vk):
            raise RemoteProtocolError(f"the {message.TAG} of site {idx} do not bear its signature", fix=_FIX)
        if isinstance(message, Keys):
            self._check_keys(message)

    def _check_keys(self, keys: Keys) -> None:
        if bool(keys.mlkem_pk) != bool(self._terms.pq):
            wanted = "a" if self._terms.pq else "no"
            raise RemoteProtocolError(f"the keys of site {keys.idx} must hold {wanted} key of ML-KEM-768", fix=_FIX)
        self._probe.exchange(keys.x25519_pk)
        if keys.mlkem_pk:
            agreement.encapsulate(keys.mlkem_pk)
