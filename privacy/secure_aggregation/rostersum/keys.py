"""A site's keys of one epoch, those of the others, and the roots that each pair shares (section 3); in memory only."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.errors import ParleyError
from privacy.crypto import agreement, canonical
from privacy.crypto.agreement import PairRoot
from privacy.secure_aggregation.rostersum.evidence import GuardError, Suspicion, contradiction
from privacy.secure_aggregation.rostersum.messages import Code, Encaps, Keys, Relayed, keyset, sign, verify
from privacy.secure_aggregation.rostersum.terms import Terms

__all__ = ["KEY_SECONDS", "KEY_UPLOADS", "SiteKeys"]

KEY_SECONDS = 24 * 3600.0
"""How long keys serve."""
KEY_UPLOADS = 1000
"""How many uploads keys serve, by the site's own count."""


class SiteKeys:
    """The private keys of this process in one epoch. What it refuses changes nothing.

    Each pair root is made from both sites' newest KEYS (and, with pq = 1, the ENCAPS for exactly these), so a replayed
    or copied key gives no root that anybody else holds.

    Args:
        terms: The job.
        idx: This site's place in its roster.
        private: This site's identity key.
        keys: Fresh private keys.
        epoch: The epoch they serve in.
        gen: Their generation, above all earlier ones of this site.
        nonce: 32 fresh bytes.
        made: When they were made, on the steady clock.
    """

    def __init__(
        self,
        terms: Terms,
        idx: int,
        private: Ed25519PrivateKey,
        keys: agreement.Keys,
        *,
        epoch: int,
        gen: int,
        nonce: bytes,
        made: float,
    ) -> None:
        self._terms, self._idx, self._private, self._keys = terms, idx, private, keys
        x25519_pk, mlkem_pk = keys.public
        self.mine = sign(Keys(terms.job_hash, epoch, idx, gen, x25519_pk, mlkem_pk, nonce), private)
        self.made = made
        self.uploads = 0
        self._peers: dict[int, Keys] = {}
        self._sent: dict[int, Encaps] = {}
        self._received: dict[int, Encaps] = {}
        self._roots: dict[int, PairRoot] = {}

    def root(self, peer: int) -> PairRoot:
        """The root shared with `peer`; that there is one is asked of `keyset` before."""
        return self._roots[peer]

    def keyset(self, members: tuple[int, ...]) -> bytes | None:
        """The digest of the members' keys as this site knows them; None where it has no root with one of them."""
        if not set(members) - {self._idx} <= self._roots.keys():
            return None
        known = {**self._peers, self._idx: self.mine}
        return keyset(tuple((idx, known[idx].digest) for idx in members))

    def spent(self, now: float) -> bool:
        """Whether these keys have served as long, or as often, as they may."""
        return now - self.made > KEY_SECONDS or self.uploads >= KEY_UPLOADS

    def again(self) -> tuple[Relayed, ...]:
        """What others must have of this site: its KEYS, and its ENCAPS to higher indices, the very same bytes."""
        return (self.mine, *(self._sent[idx] for idx in sorted(self._sent)))

    # ------------------------------------------------------------------------------------------------------------ KEYS

    def foreign(self, message: Keys) -> bool:
        """Whether KEYS of this site's own index were made by another process that is not older than this one.

        Raises:
            GuardError: This site's key did not sign them.
        """
        if message.idx != self._idx:
            return False
        self._guard(message, message.idx)
        return message.gen >= self.mine.gen and message.digest != self.mine.digest

    def take_keys(self, message: Keys, revoked: frozenset[bytes]) -> Encaps | None:
        """Takes another site's KEYS in; gives the ENCAPS that answers them, where there is one.

        Known or older ones are ignored. Attempts in flight hold what they need already.

        Raises:
            GuardError: They are refused (E_KEYS).
        """
        peer = message.idx
        if peer == self._idx:
            return None  # this process's own, relayed back, or an older process's
        self._guard(message, peer, revoked)
        known = self._peers.get(peer)
        if known is not None and (message.gen < known.gen or message.digest == known.digest):
            return None
        if known is not None and message.gen == known.gen:
            evidence = contradiction(Suspicion.TWO_KEYS, peer, known, message)
            raise GuardError(Code.E_KEYS, f"site {peer} has two KEYS of generation {known.gen}", peer, (evidence,))
        encaps, root = self._agreed(message)
        self._peers[peer] = message
        self._sent.pop(peer, None)
        self._received.pop(peer, None)
        self._roots.pop(peer, None)
        if root is not None:
            self._roots[peer] = root
        if encaps is not None:
            self._sent[peer] = encaps
        return encaps

    def _guard(self, message: Relayed, author: int, revoked: frozenset[bytes] = frozenset()) -> None:
        terms = self._terms
        members = terms.roster.members
        if message.job_hash != terms.job_hash or message.epoch != self.mine.epoch:
            raise GuardError(Code.E_KEYS, "they are of another job or epoch")
        if author >= terms.n:
            raise GuardError(Code.E_KEYS, f"the roster has no site {author}")
        if members[author].vk in revoked:
            raise GuardError(Code.E_KEYS, f"site {author} was revoked", author)
        if isinstance(message, Keys) and bool(message.mlkem_pk) != bool(terms.pq):
            raise GuardError(Code.E_KEYS, f"site {author} sent keys of another length", author)
        if not verify(message, members[author].vk):
            raise GuardError(Code.E_KEYS, f"site {author} did not sign them", author)

    def _agreed(self, theirs: Keys) -> tuple[Encaps | None, PairRoot | None]:
        """The root with the owner of these KEYS, and the ENCAPS it needs; the higher index of a pair waits for one."""
        try:
            shared = self._keys.exchange(theirs.x25519_pk)
            if not self._terms.pq:
                return None, self._root(theirs, b"", b"", shared)
            if theirs.idx < self._idx:
                return None, None
            ct, secret = agreement.encapsulate(theirs.mlkem_pk)
        except ParleyError as weak:
            raise GuardError(Code.E_KEYS, f"site {theirs.idx}: {weak.problem}", theirs.idx) from None
        mine = self.mine
        encaps = Encaps(mine.job_hash, mine.epoch, mine.idx, theirs.idx, mine.digest, theirs.digest, ct)
        return sign(encaps, self._private), self._root(theirs, ct, secret, shared)

    def _root(self, theirs: Keys, ct: bytes, secret: bytes, shared: bytes) -> PairRoot:
        lo, hi = sorted((self.mine, theirs), key=lambda keys: keys.idx)
        pair = (self._terms.job_hash, self.mine.epoch, lo.idx, hi.idx, lo.digest, hi.digest, ct)
        return agreement.pair_root(canonical.digest("pair-salt", *pair), secret, shared)

    # ---------------------------------------------------------------------------------------------------------- ENCAPS

    def take_encaps(self, message: Encaps, revoked: frozenset[bytes]) -> None:
        """Takes the first ENCAPS for a pair of keys in, which makes the pair's root; an identical one is ignored.

        Raises:
            GuardError: It is refused (E_KEYS), and resets nothing.
        """
        lo = message.lo
        if not self._terms.pq or message.hi != self._idx or not lo < self._idx:
            raise GuardError(Code.E_KEYS, "this ENCAPS is for no key of this site")
        self._guard(message, lo, revoked)
        theirs = self._peers.get(lo)
        pair = (message.keys_digest_lo, message.keys_digest_hi)
        if theirs is None or pair != (theirs.digest, self.mine.digest):
            raise GuardError(Code.E_KEYS, f"site {lo} made this ENCAPS for other keys than the newest", lo)
        first = self._received.get(lo)
        if first is not None and first.covered() == message.covered():
            return
        if first is not None:
            evidence = contradiction(Suspicion.TWO_ENCAPS, lo, first, message)
            raise GuardError(Code.E_KEYS, f"site {lo} made two ENCAPS for one pair of keys", lo, (evidence,))
        try:
            secret, shared = self._keys.decapsulate(message.ct), self._keys.exchange(theirs.x25519_pk)
        except ParleyError as weak:
            raise GuardError(Code.E_KEYS, f"site {lo}: {weak.problem}", lo) from None
        self._received[lo], self._roots[lo] = message, self._root(theirs, message.ct, secret, shared)
