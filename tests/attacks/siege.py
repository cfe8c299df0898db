"""A siege: real site machines whose inputs are secret, and an attacker who holds the coordinator's signing key.

An attack is a function of a siege that returns what the attacker has learned; nothing, if the sites did not play along.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from privacy.crypto import canonical, masks, shamir
from privacy.crypto.masks import SignedKey, Words
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.encoding import DeclineError
from privacy.secure_aggregation.rostersum.messages import Message, Open, Rescue, RoundStart, Shares, Upload
from privacy.secure_aggregation.rostersum.site_events import (
    Assignment,
    Because,
    Cannot,
    Mask,
    Masked,
    Updated,
    UploadDone,
    Work,
)
from privacy.secure_aggregation.rostersum.states import State
from privacy.secure_aggregation.rostersum.terms import Churn, Plan, TrainCodec, Weighting
from tests.privacy.secure_aggregation.rostersum.conftest import TRAIN, Bench, consortium_of, floor_for

__all__ = [
    "ESCROW",
    "OPEN",
    "Contribution",
    "Secret",
    "Siege",
    "besiege",
    "by_records",
    "combined",
    "isolated",
    "less",
    "secret",
    "signed",
    "words_of",
]

Secret = tuple[int, ...]
"""A site's input, or a sum of inputs: signed numbers, without the guard."""

OPEN = replace(TRAIN, churn=Churn.OPEN)
"""A train plan over any three sites, without escrow."""

ESCROW = replace(TRAIN, m_min=4, t=2)
"""A train plan over all of four sites, two of whose shares give a seed."""

Contribution = Callable[[int, Assignment], Secret]
"""What a site does for an assignment."""

_GUARD = 4


def by_records(w_min: int, w_max: int) -> Plan:
    """A train plan over all sites in which each weighs as many records as it has, within these limits."""
    return replace(TRAIN, codec=TrainCodec(0.5, 1.0, 22, Weighting.RECORDS, w_min, w_max))


def secret(*seed: int, size: int = 8) -> Secret:
    """An input that nobody guesses, the same for the same seed."""
    return tuple(int(each) for each in np.random.default_rng(seed).integers(-(2**20), 2**20, size))


def less(one: Secret | None, other: Secret | None) -> Secret | None:
    """The difference of two sums; nothing if one of them was not opened."""
    return None if one is None or other is None else tuple(a - b for a, b in zip(one, other, strict=True))


def isolated(sums: Mapping[frozenset[int], Secret]) -> dict[int, Secret]:
    """The sites' inputs that follow from sums over these sets: all that do, exactly (Gauss-Jordan elimination)."""
    sites = sorted(set().union(*sums))
    rows = [[Fraction(site in of) for site in sites] + [Fraction(each) for each in total] for of, total in sums.items()]
    pivots = 0
    for column in range(len(sites)):
        found = next((row for row in rows[pivots:] if row[column]), None)
        if found is None:
            continue
        rows.remove(found)
        lead = [each / found[column] for each in found]
        rows = [[a - row[column] * b for a, b in zip(row, lead, strict=True)] for row in rows]
        rows.insert(pivots, lead)
        pivots += 1
    alone = [row for row in rows if sum(1 for each in row[: len(sites)] if each) == 1]
    return {sites[row.index(Fraction(1))]: tuple(int(each) for each in row[len(sites) :]) for row in alone}


def unspoilt(idx: int, assignment: Assignment) -> Secret:
    """What a site contributes unless a test says otherwise: another secret for each site and round."""
    return secret(idx, assignment.r)


@dataclass
class Siege(Bench):
    """The machines of n sites, against an attacker who says in the coordinator's name whatever it likes.

    Attributes:
        work: A site's input for an assignment, of its plan's length without the guard; `DeclineError` declines.
        updates: What each site holds, by site and name.
        heard: What each site was told.
    """

    work: Contribution = unspoilt
    updates: dict[tuple[int, str], Secret] = field(default_factory=dict)
    heard: dict[int, list[Message]] = field(default_factory=lambda: defaultdict(list))

    # ------------------------------------------------------------------------------------------------------- the sites

    def mask(self, idx: int, mask: Mask) -> Upload:
        """Site `idx` masks its input and uploads it: the attacker finds the vector in `ys`."""
        y = words_of((*self.updates[idx, mask.update], *[1] * _GUARD), mask.plan)
        masks.add(y, mask.masks)
        self.ys[mask.ctx, idx] = y
        masked = Masked(self.job_hash, mask.ctx, hashlib.sha256(y.tobytes()).digest())
        upload: Upload = self.sent(self.do(idx, masked), Upload)[0]
        self.do(idx, UploadDone(self.job_hash, mask.ctx))
        return upload

    def say(self, idx: int, message: Message) -> Any:
        """Site `idx` receives the message."""
        self.heard[idx].append(message)
        return super().say(idx, message)

    def finish(self, idx: int, work: Work) -> None:
        """Site `idx` does its work, and is READY; or declines, where the work finds something that is not finite."""
        update = f"update {work.assignment.r} of {idx}"
        try:
            self.updates[idx, update] = self.work(idx, work.assignment)
        except DeclineError:
            self.do(idx, Cannot(self.job_hash, work.assignment, Because.DATA))
        else:
            self.do(idx, Updated(self.job_hash, work.assignment, update, work.table))

    def inside(self, idx: int) -> bool:
        """Whether site `idx` has accepted the job."""
        return self.state(idx) is not State.CLOSED

    def another(self, job_id: bytes, *, work: "Contribution | None" = None, **changes: Any) -> "Siege":
        """Another job of the same sites, as far as its roster has them, on the same data.

        Further words change its terms. They have keys of epoch 1 in it, if all accept it.
        """
        terms = replace(self.terms, job_id=job_id, **changes)
        made = Siege(replace(self.consortium, terms=terms), self.floor, data=self.data, work=work or self.work)
        made.sites = self.sites[: terms.n]
        made.enter()
        return made

    def enter(self) -> None:
        """The sites are offered the job; if all accept it they have keys of epoch 1."""
        self.accept()
        if all(self.inside(idx) for idx in range(self.terms.n)):
            self.epoch()

    # ---------------------------------------------------------------------------------------------------- the attacker

    def order(
        self,
        r: int,
        sites: Iterable[int] | None = None,
        *,
        plan_id: int = 1,
        model: bytes = b"model",
        args: bytes = b"",
    ) -> None:
        """Asks these sites (all) for the work of round r; those that take it do it."""
        asked = self.ask(r, plan_id, model, args)
        for idx in self._all(sites):
            for work in self.of(self.say(idx, asked), Work):
                self.finish(idx, work)

    def tried(self, start: RoundStart, sites: Iterable[int] | None = None) -> dict[int, Upload]:
        """The UPLOADs of those of these members (all) that take the ROUND_START."""
        taken = {idx: self.of(self.say(idx, start), Mask) for idx in (start.members if sites is None else sites)}
        return {idx: self.mask(idx, work[0]) for idx, work in taken.items() if work}

    def seeds(self, uploads: Mapping[int, Upload], sites: Iterable[int] | None = None) -> dict[int, bytes]:
        """The self seeds of those of these uploaders (all) that open for the FULL of these uploads."""
        told = {idx: self.say(idx, self.full(idx, uploads.values())) for idx in (uploads if sites is None else sites)}
        return {idx: opened.b for idx, effects in told.items() for opened in self.sent(effects, Open)}

    def shared(self, upload: Upload, holders: Iterable[int], t: int) -> bytes | None:
        """The self seed behind an upload from the shares that these sites give; nothing if they are too few."""
        rescue = self.sign(Rescue(upload.ctx, (upload.idx,)))
        given = {idx: self.sent(self.say(idx, rescue), Shares) for idx in holders}
        return combined(upload, {idx: each[0].shares[0].share for idx, each in given.items() if each}, t)

    def unmasked(self, ctx: bytes, seeds: Mapping[int, bytes], more: Sequence[SignedKey] = ()) -> Secret:
        """The sum of the vectors of these members less their self masks, and less other masks that are known."""
        vectors = [self.ys[ctx, idx] for idx in seeds]
        total: Words = np.add.reduce(vectors, dtype=vectors[0].dtype)
        masks.add(total, [(-1, canonical.derive(b, "self-mask", ctx)) for b in seeds.values()])
        masks.add(total, more)
        return signed(total)

    def sum_of(self, uploads: Mapping[int, Upload], members: Sequence[int]) -> Secret | None:
        """The sum of these members' inputs, if all have uploaded and all open."""
        if not members or uploads.keys() != set(members):
            return None
        seeds = self.seeds(uploads)
        return self.unmasked(uploads[members[0]].ctx, seeds) if seeds.keys() == set(members) else None

    def round(
        self,
        r: int,
        a: int = 0,
        members: Sequence[int] | None = None,
        *,
        plan_id: int = 1,
        model: bytes = b"model",
        args: bytes = b"",
    ) -> Secret | None:
        """A whole attempt, from TRAIN to RESULT: its sum, if every member plays along.

        The attacker says RESULT, lest the sites ask their administrators why rounds end without one.
        """
        chosen = tuple(self._all(members))
        self.order(r, chosen, plan_id=plan_id, model=model, args=args)
        start = self.start(r, a, chosen, plan_id, model)
        start = self.sign(replace(start, args_hash=hashlib.sha256(args).digest()))
        total = self.sum_of(self.tried(start), chosen)
        if total is not None:
            for idx in chosen:
                self.say(idx, self.result(start.ctx))
        return total

    def total(self, members: Iterable[int], r: int) -> Secret:
        """The sum that is due, of the inputs of these members in this round."""
        held = [self.updates[idx, f"update {r} of {idx}"] for idx in members]
        return tuple(sum(each) for each in zip(*held, strict=True))


def combined(upload: Upload, shares: Mapping[int, bytes], t: int) -> bytes | None:
    """The self seed that an upload is committed to, from shares of it by holder; nothing if they do not give it."""
    if len(shares) < t:
        return None
    committed = upload.commitment
    return shamir.reconstruct(shares, t, lambda b: messages.commitment(upload.ctx, upload.idx, b) == committed)[0]


def signed(words: Words) -> Secret:
    """The words as signed numbers, without the guard."""
    return tuple(int(each) for each in words.view(f"<i{words.itemsize}")[:-_GUARD])


def words_of(numbers: Sequence[int], plan: Plan) -> Words:
    """Signed numbers, guard and all, as the words of a plan's ring."""
    if len(numbers) != plan.words:
        raise ValueError(f"{len(numbers)} numbers are no vector of {plan.words} words")
    return np.array(numbers, np.int64).astype(f"<i{plan.ring // 8}").view(masks.dtype(plan.ring))


def besiege(
    n: int = 3,
    plans: tuple[Plan, ...] = (TRAIN,),
    *,
    work: Contribution = unspoilt,
    ready: bool = True,
    floor: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Siege:
    """A siege of n sites that have accepted a job of these plans and have keys of epoch 1, unless `ready` is false.

    `floor` changes the sites' own limits, further words the terms. Sites that refuse the job stay outside.
    """
    consortium = consortium_of(n, plans, **changes)
    made = Siege(consortium, floor_for(consortium.terms, **(floor or {})), work=work)
    if ready:
        made.enter()
    return made
