"""Small consortia of n sites with keys, and a bench where their machines run against a coordinator played by hand."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from privacy.crypto import agreement, masks
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum.durable import Charge, Durable
from privacy.secure_aggregation.rostersum.evidence import Suspicion
from privacy.secure_aggregation.rostersum.floor import Data, Floor
from privacy.secure_aggregation.rostersum.messages import (
    Code,
    Encaps,
    Epoch,
    Full,
    Keys,
    Message,
    Outcome,
    Refuse,
    Result,
    RoundStart,
    Seal,
    Train,
    Upload,
)
from privacy.secure_aggregation.rostersum.site import Site
from privacy.secure_aggregation.rostersum.site_events import (
    Assignment,
    Clock,
    Effect,
    Event,
    Log,
    Mask,
    Masked,
    Offered,
    Persist,
    Received,
    Send,
    Updated,
    UploadDone,
    Work,
)
from privacy.secure_aggregation.rostersum.states import State
from privacy.secure_aggregation.rostersum.terms import (
    Churn,
    FieldsCodec,
    Kind,
    Member,
    Plan,
    Ring,
    Roster,
    StatField,
    Terms,
    TrainCodec,
    Weighting,
)

TABLE = hashlib.sha256(b"table").digest()
EMPTY = hashlib.sha256(b"").digest()


def private(byte: int) -> Ed25519PrivateKey:
    """The signing key of annex B whose seed is this byte 32 times."""
    return Ed25519PrivateKey.from_private_bytes(bytes([byte]) * 32)


def public(key: Ed25519PrivateKey) -> bytes:
    """The key's 32 public bytes."""
    return key.public_key().public_bytes_raw()


TRAIN = Plan(
    plan_id=1,
    kind=Kind.TRAIN,
    churn=Churn.CELLS,
    group=0,
    m_min=3,
    o_min=3,
    t=0,
    ring=Ring.WORD,
    words=12,
    task_digest=b"\x11" * 32,
    rows_min=10,
    codec=TrainCodec(0.5, 1.0, 22, Weighting.UNIFORM, 1, 1),
    dp=None,
)
"""The plan of annex B."""

STAT = replace(
    TRAIN,
    plan_id=2,
    kind=Kind.STAT,
    ring=Ring.LONG,
    words=7,
    codec=FieldsCodec((StatField("age", 2, 8, 0.0, 100.0), StatField("n", 1, 0, 0.0, 1e6))),
)
"""Sums of three statistics."""

EVAL = replace(STAT, plan_id=3, kind=Kind.EVAL)
"""An exact evaluation."""


@dataclass(frozen=True)
class Consortium:
    """The members' and the coordinator's signing keys, and the terms of a job among them."""

    coordinator: Ed25519PrivateKey
    sites: tuple[Ed25519PrivateKey, ...]
    terms: Terms


def consortium_of(n: int = 3, plans: tuple[Plan, ...] = (TRAIN,), **changes: Any) -> Consortium:
    """`n` sites of one organisation each, and a job of these plans; further words change the terms."""
    coordinator, sites = private(0xC0), tuple(private(i + 1) for i in range(n))
    members = tuple(Member(f"org{i}", f"s{i}", public(key)) for i, key in enumerate(sites))
    terms = Terms(
        job_id=bytes(range(16)),
        roster=Roster(public(coordinator), members),
        c_max=1,
        g_max=1,
        pq=0,
        cells=(tuple(range(n)),),
        plans=plans,
    )
    return Consortium(coordinator, sites, replace(terms, **changes))


class Budget:
    """A ledger that pays so many rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def affords(self, charge: Charge) -> bool:
        """Whether the rounds are left."""
        return charge.rounds <= self.rounds


@dataclass
class Bench:
    """The machines of n sites, each effect they asked for, and a coordinator that says whatever a test makes it say."""

    consortium: Consortium
    floor: Floor
    ledger: Budget | None = None
    data: Data = field(default_factory=lambda: Data("hearts", TABLE, rows=1000, test_rows=100))
    clock: Clock = field(default_factory=lambda: Clock(1_800_000_000.0, 1000.0))
    sites: list[Site] = field(default_factory=list)
    effects: list[list[Effect]] = field(default_factory=list)
    keys: dict[int, Keys] = field(default_factory=dict)
    ys: dict[tuple[bytes, int], npt.NDArray[Any]] = field(default_factory=dict)
    draw: dict[int, Callable[[int], bytes]] = field(default_factory=dict)
    generate: dict[int, Callable[[bool], agreement.Keys]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Starts each site, for the first time."""
        for idx in range(self.terms.n):
            self.effects.append([])
            self.sites.append(self.started(idx, Durable()))

    @property
    def terms(self) -> Terms:
        """The job's terms."""
        return self.consortium.terms

    @property
    def job_hash(self) -> bytes:
        """The job."""
        return self.terms.job_hash

    def started(self, idx: int, durable: Durable) -> Site:
        """A new process of site `idx` on this durable state."""
        extra = {}
        if idx in self.draw:
            extra = {"draw": self.draw[idx], "generate": self.generate[idx]}
        return Site(self.consortium.sites[idx], self.floor, durable, self.ledger, **extra)

    def crash(self, idx: int, durable: Durable | None = None) -> None:
        """The process of site `idx` ends; a new one starts on what was durable, or on an older `durable`."""
        kept = durable if durable is not None else self.durable(idx)
        self.sites[idx] = self.started(idx, Durable.decode(kept.encode()))

    def durable(self, idx: int) -> Durable:
        """What the last Persist of site `idx` made durable."""
        persists = [effect for effect in self.effects[idx] if isinstance(effect, Persist)]
        return persists[-1].durable if persists else Durable()

    def pass_time(self, seconds: float) -> None:
        """Both clocks go on."""
        self.clock = Clock(self.clock.wall + seconds, self.clock.steady + seconds)

    # ------------------------------------------------------------------------------------------------------ the words

    def sign(self, message: Any) -> Any:
        """The message, signed by the coordinator."""
        return messages.sign(message, self.consortium.coordinator)

    def do(self, idx: int, event: Event) -> tuple[Effect, ...]:
        """Site `idx` takes the event in."""
        effects = self.sites[idx].receive(event, self.clock)
        self.effects[idx] += effects
        for message in self.sent(effects, Keys):
            self.keys[idx] = message
        return effects

    def say(self, idx: int, message: Message) -> tuple[Effect, ...]:
        """Site `idx` receives the message."""
        return self.do(idx, Received(self.job_hash, message))

    def state(self, idx: int) -> State:
        """Where site `idx` stands."""
        return self.sites[idx].state(self.job_hash)

    # ------------------------------------------------------------------------------------------------- an honest round

    def accept(self) -> None:
        """Every site accepts the job."""
        for idx in range(self.terms.n):
            self.do(idx, Offered(self.terms, self.data))

    def epoch(self, epoch: int = 1, sites: Iterable[int] | None = None) -> None:
        """These sites (all) make new keys, and all KEYS and ENCAPS reach everybody."""
        for idx in self._all(sites):
            self.say(idx, self.sign(Epoch(self.job_hash, epoch)))
        encaps: list[Encaps] = []
        for idx in range(self.terms.n):
            for other, keys in sorted(self.keys.items()):
                if other != idx:
                    encaps += self.sent(self.say(idx, keys), Encaps)
        for each in encaps:
            self.say(each.hi, each)

    def ask(self, r: int, plan_id: int = 1, model: bytes = b"model", args: bytes = b"") -> Train:
        """The TRAIN of round r."""
        model_hash, args_hash = hashlib.sha256(model).digest(), hashlib.sha256(args).digest()
        epoch = max((keys.epoch for keys in self.keys.values()), default=0)
        train: Train = self.sign(Train(self.job_hash, epoch, r, plan_id, model_hash, args_hash))
        return train

    def train(self, r: int, plan_id: int = 1, sites: Iterable[int] | None = None, model: bytes = b"model") -> None:
        """These sites (all) do the work of round r and are READY."""
        asked = self.ask(r, plan_id, model)
        assignment = Assignment(asked.r, asked.plan_id, asked.model_hash, asked.args_hash)
        for idx in self._all(sites):
            (work,) = self.of(self.say(idx, asked), Work)
            self.do(idx, Updated(self.job_hash, assignment, f"update {r} of {idx}", work.table))

    def start(
        self, r: int, a: int = 0, members: Iterable[int] | None = None, plan_id: int = 1, model: bytes = b"model"
    ) -> RoundStart:
        """The ROUND_START of this attempt."""
        chosen, asked = tuple(self._all(members)), self.ask(r, plan_id, model)
        keyset = messages.keyset(tuple((idx, self.keys[idx].digest) for idx in chosen if idx in self.keys))
        hashes = (asked.model_hash, asked.args_hash)
        start: RoundStart = self.sign(RoundStart(self.job_hash, asked.epoch, r, a, plan_id, chosen, keyset, *hashes))
        return start

    def upload(self, idx: int, start: RoundStart) -> Upload:
        """Site `idx` takes the ROUND_START, masks eight words of idx + 1 and a guard, and uploads."""
        return self.mask(idx, self.of(self.say(idx, start), Mask)[0])

    def mask(self, idx: int, mask: Mask) -> Upload:
        """Performs the effect; the masked vector is kept in `ys`."""
        y = np.full(mask.plan.words, idx + 1, masks.dtype(mask.plan.ring.value))
        y[-4:] = 1
        masks.add(y, mask.masks)
        self.ys[mask.ctx, idx] = y
        masked = Masked(self.job_hash, mask.ctx, hashlib.sha256(y.tobytes()).digest())
        (upload,) = self.sent(self.do(idx, masked), Upload)
        self.do(idx, UploadDone(self.job_hash, mask.ctx))
        return upload

    def full(self, idx: int, uploads: Iterable[Upload]) -> Full:
        """The FULL for site `idx` over these uploads."""
        ordered = sorted(uploads, key=lambda upload: upload.idx)
        seals = tuple(Seal(upload.idx, seal.sealed) for upload in ordered for seal in upload.seals if seal.idx == idx)
        full: Full = self.sign(Full(ordered[0].ctx, tuple(upload.entry for upload in ordered), seals))
        return full

    def result(self, ctx: bytes, outcome: Outcome = Outcome.OPENED) -> Result:
        """The RESULT of this attempt."""
        sum_hash = b"\x22" * 32 if outcome is Outcome.OPENED else messages.NOTHING
        result: Result = self.sign(Result(ctx, outcome, sum_hash))
        return result

    def uploads(self, start: RoundStart) -> tuple[Upload, ...]:
        """All members upload."""
        return tuple(self.upload(idx, start) for idx in start.members)

    def open(self, r: int, a: int = 0, members: Iterable[int] | None = None, plan_id: int = 1) -> RoundStart:
        """All members, READY for r, go through the attempt and open it."""
        start = self.start(r, a, members, plan_id)
        uploads = self.uploads(start)
        for idx in start.members:
            self.say(idx, self.full(idx, uploads))
        return start

    def refused(self, idx: int, message: Message) -> Code | None:
        """The code with which site `idx` refuses the message, None if it does not; a refusal leaves all as it was."""
        before = self.sites[idx].durable, self.state(idx), len(self.of(self.effects[idx], Persist))
        said = self.sent(self.say(idx, message))
        if len(said) != 1 or not isinstance(said[0], Refuse):
            return None
        after = self.sites[idx].durable, self.state(idx), len(self.of(self.effects[idx], Persist))
        assert after == before, "a refusal changed something"
        assert messages.verify(said[0], public(self.consortium.sites[idx]))
        return said[0].code

    def evidence(self, idx: int) -> list[Suspicion]:
        """What site `idx` has logged so far, without mere refusals."""
        logged = [log.evidence.kind for log in self.of(self.effects[idx], Log)]
        return [kind for kind in logged if kind is not Suspicion.REFUSED]

    @staticmethod
    def of(effects: Iterable[Effect], kind: type[Any]) -> list[Any]:
        """The effects of this kind."""
        return [effect for effect in effects if isinstance(effect, kind)]

    @staticmethod
    def sent(effects: Iterable[Effect], kind: type[Any] | None = None) -> list[Any]:
        """The messages of this kind (of all) that the effects send."""
        said = [effect.message for effect in effects if isinstance(effect, Send)]
        return [message for message in said if kind is None or isinstance(message, kind)]

    def _all(self, sites: Iterable[int] | None) -> Iterable[int]:
        return range(self.terms.n) if sites is None else sites


def floor_for(terms: Terms, **changes: Any) -> Floor:
    """Limits that let this job in; further words change them."""
    floor = Floor(
        c_max=1,
        g_max=1,
        rosters=frozenset({terms.roster.hash}),
        tasks=frozenset(plan.task_digest for plan in terms.plans),
        families=frozenset({"hearts"}),
        churns=frozenset((kind, churn) for kind in Kind for churn in Churn),
        allow_open=True,
    )
    return replace(floor, **changes)


@pytest.fixture
def consortium() -> Callable[..., Consortium]:
    """Makes a consortium: `n` sites of one organisation each, and a job of these plans; further words change the terms.

    With n = 3 and nothing else it is that of annex B.
    """
    return consortium_of


@pytest.fixture
def bench() -> Callable[..., Bench]:
    """Makes a bench whose sites have accepted the job and have keys of epoch 1; words as for `consortium`.

    `floor` changes the sites' limits, `ledger` is theirs; with `ready=False` nothing has happened yet.
    """

    def make(
        n: int = 3,
        plans: tuple[Plan, ...] = (TRAIN,),
        *,
        ready: bool = True,
        ledger: Budget | None = None,
        floor: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Bench:
        consortium = consortium_of(n, plans, **changes)
        made = Bench(consortium, floor_for(consortium.terms, **(floor or {})), ledger)
        if ready:
            made.accept()
            made.epoch()
        return made

    return make


@pytest.fixture
def annex() -> Bench:
    """The bench of annex B: three sites whose keys, nonces and self seeds are the annex's; nothing has happened yet."""
    consortium = consortium_of()

    def drawn(idx: int) -> Callable[[int], bytes]:
        supply = iter((bytes([0x80 + idx]) * 32, bytes([0x20 + idx]) * 32))
        return lambda _: next(supply)

    def generated(idx: int) -> Callable[[bool], agreement.Keys]:
        return lambda _: agreement.Keys(X25519PrivateKey.from_private_bytes(bytes([0x40 + idx]) * 32), None)

    return Bench(
        consortium,
        floor_for(consortium.terms),
        clock=Clock(0.0, 0.0),
        draw={idx: drawn(idx) for idx in range(3)},
        generate={idx: generated(idx) for idx in range(3)},
    )


@pytest.fixture
def fund() -> type[Budget]:
    """Makes a ledger that pays so many rounds."""
    return Budget


@pytest.fixture
def train() -> Plan:
    """The plan of annex B."""
    return TRAIN


@pytest.fixture
def stat() -> Plan:
    """A plan of three statistics."""
    return STAT


@pytest.fixture
def evaluation() -> Plan:
    """A plan of an exact evaluation."""
    return EVAL
