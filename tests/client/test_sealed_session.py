"""Sessions of sites under secure aggregation, against the coordinator's own machine, through whole rounds.

A `Hub` does what the product's conductor does with that machine, an `Agent` what the site's agent does with a session:
messages are bytes, disks keep what was persisted as bytes, updates and masked vectors are files. Nothing is faked but
the network, the clock, and the training.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from client.masking import Contributions
from client.policy import Policy, SecureAggregation
from client.sealed import SealedJobs
from client.session import Session
from client.session_events import (
    Assigned,
    CheckData,
    Connected,
    Contribute,
    DataChecked,
    Disconnected,
    Effect,
    Event,
    Fetch,
    Fetched,
    Forget,
    Held,
    JobResumed,
    MaskFailed,
    Note,
    Paused,
    Received,
    Record,
    Send,
    SiteIdentity,
    StopUploads,
    TableFacts,
    UploadMasked,
    Work,
    WorkFailed,
)
from federation import job as jobs
from federation.blobs import BlobRef
from federation.errors import LocalProtocolError, ParleyError, PolicyRefused, RemoteProtocolError
from federation.messages import (
    PROTOCOL,
    DeclineCause,
    Declined,
    FromCoordinator,
    JobAccepted,
    JobEnded,
    JobOffer,
    JobRefused,
    JobState,
    MembershipStatement,
    RevocationList,
    Role,
    Sealed,
    StepEnded,
    StepKind,
    StepStart,
    Welcome,
)
from privacy.identity import MemberKeys, Root, request_for, sign_welcome
from privacy.secure_aggregation.rostersum import coordinator_events as hub_events
from privacy.secure_aggregation.rostersum import messages
from privacy.secure_aggregation.rostersum import site_events as sums
from privacy.secure_aggregation.rostersum.coordinator import Coordinator
from privacy.secure_aggregation.rostersum.durable import Durable
from privacy.secure_aggregation.rostersum.encoding import DeclineError, FieldsCodec, codec_of
from privacy.secure_aggregation.rostersum.evidence import Suspicion
from privacy.secure_aggregation.rostersum.fields import pack
from privacy.secure_aggregation.rostersum.logged import Noted, Passed, read
from privacy.secure_aggregation.rostersum.messages import (
    Close,
    Code,
    Decline,
    FromSite,
    Full,
    Keys,
    Message,
    Open,
    Ready,
    Refuse,
    Relayed,
    RoundStart,
    Train,
    Upload,
)
from privacy.secure_aggregation.rostersum.messages import FromCoordinator as FromHub
from privacy.secure_aggregation.rostersum.plans import args_of, index_of, model_size, plan_id, terms_of
from privacy.secure_aggregation.rostersum.states import State
from privacy.secure_aggregation.rostersum.sums import MaskedSum
from privacy.secure_aggregation.rostersum.terms import Kind, Plan, Terms
from tasks import tabular

if TYPE_CHECKING:
    from privacy.crypto.masks import Words
    from privacy.ledger import Payer

NOW = 1_800_000_000.0
NONCE = bytes(range(32))
JOB = "risk-1"
RULES = Policy(datasets=("*",), tasks=("*",), models=("*",), jobs=("*",), minimum_sites=2)
TABLE = TableFacts(hashlib.sha256(b"table").digest(), 100, 40, 20)
PREPARATION = BlobRef.of(b"preparation")

F64 = npt.NDArray[np.float64]

TEXT = """
format = 1
name = "risk"

[task]
kind = "tabular"
target = "binary"

[data]
dataset = "heart"
label = "disease"
columns = [{ name = "age", kind = "numeric", range = [0, 120] }]

[model]
name = "logistic_regression"

[strategy]
name = "fedavg"

[rounds]
maximum = 5

[cohort]
minimum_sites = 3

[privacy]
post_quantum = false
"""


@dataclass(frozen=True)
class Member:
    """A member's statement and keys."""

    statement: MembershipStatement
    keys: MemberKeys


@dataclass(frozen=True)
class Consortium:
    """A root, a coordinator and three hospitals."""

    root: Root
    hub: Member
    sites: tuple[Member, ...]

    @classmethod
    def found(cls) -> "Consortium":
        """New keys for all."""
        root = Root.create("heart", int(NOW))

        def member(name: str, role: Role = Role.SITE) -> Member:
            keys = MemberKeys.generate()
            return Member(root.approve(request_for(name, name, role, keys, "test"), int(NOW))[1], keys)

        return cls(root, member("hub", Role.COORDINATOR), tuple(map(member, ("athens", "berlin", "cork"))))

    @property
    def roster(self) -> tuple[MembershipStatement, ...]:
        """The sites' statements."""
        return tuple(each.statement for each in self.sites)

    def nobody_revoked(self) -> RevocationList:
        """The first revocation list."""
        return self.root.sign_revocations(1, int(NOW), ())

    def terms(self, text: str = TEXT, job_id: bytes = bytes(16)) -> Terms:
        """What the coordinator makes of a job file."""
        job = jobs.parse(text)
        task = tabular.make(job)
        vk = self.hub.statement.protocol_key
        return terms_of(job, job_id, self.roster, vk, 2, task.statistics_fields, task.evaluation_fields)


def model_of(round_number: int) -> BlobRef:
    """The model that a round starts from."""
    return BlobRef.of(f"model {round_number}".encode())


def step_of(step: int, kind: StepKind, round_number: int = 1, attempt: int = 0, job: str = JOB) -> StepStart:
    """What the coordinator says of a step."""
    if kind is StepKind.STATISTICS:
        return StepStart(job, step, attempt, kind, round_number, None, None, 8, 60.0)
    return StepStart(job, step, attempt, kind, round_number, model_of(round_number), PREPARATION, 8, 60.0)


@dataclass
class Agent:
    """A site's session with all that its agent does, in memory but for updates and masked vectors."""

    world: "World"
    member: Member
    folder: Path
    rules: Policy = RULES
    ledger: "Payer | None" = None
    table: TableFacts = TABLE
    disk: bytes = field(default_factory=lambda: Durable().encode())
    audit: list[tuple[str, bytes]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    aside: set[type[object]] = field(default_factory=set)
    waiting: list[Effect] = field(default_factory=list)
    vector: F64 | None = None
    cause: DeclineCause | None = None
    doing: Effect | None = None

    def __post_init__(self) -> None:
        """Starts it."""
        self.start()

    def start(self) -> None:
        """A new process: what it knows is on its disk."""
        consortium = self.world.consortium
        me = SiteIdentity(self.member.statement, consortium.root.public, consortium.nobody_revoked())
        self.contributions = Contributions(self.folder)
        self.doing = None
        self.waiting = []
        self.session = Session(me, (), SealedJobs(self.member.keys.protocol, Durable.decode(self.disk), self.ledger))

    @property
    def name(self) -> str:
        """The site's name."""
        return self.member.statement.name

    @property
    def state(self) -> State:
        """Where its machine stands in the job."""
        return self.session._sealed.state(JOB)  # type: ignore[union-attr]

    # ------------------------------------------------------------------------------------------------------- events

    def feed(self, event: Event) -> tuple[Effect, ...]:
        """Something happens; effects are performed in their order, work a little later."""
        effects = self.session.receive(event, self.world.now, self.world.now - NOW)
        for effect in effects:
            self.effects.append(effect)
            self._perform(effect)
        return effects

    def hear(self, message: FromCoordinator) -> tuple[Effect, ...]:
        """The coordinator says something."""
        return self.feed(Received(message, self.rules))

    def attend(self) -> None:
        """Connects, is welcomed, and is offered the job."""
        consortium = self.world.consortium
        self.feed(Connected(NONCE, "test"))
        serials = self.member.statement.serial, consortium.hub.statement.serial
        proof = sign_welcome(consortium.hub.keys.protocol, NONCE, *serials)
        revocations = consortium.nobody_revoked()
        self.hear(Welcome(PROTOCOL, "test", consortium.hub.statement, proof, revocations, 5.0, int(NOW)))
        self.hear(self.world.offer)

    def cut(self) -> None:
        """The stream ends, and both sides know."""
        self.world.depart(self.name)
        self.feed(Disconnected())

    def restart(self) -> None:
        """The process is killed, and runs again."""
        self.world.depart(self.name)
        self.start()
        self.attend()

    def release(self) -> None:
        """What was put aside is done."""
        self.aside.clear()
        waiting, self.waiting = self.waiting, []
        for effect in waiting:
            self._begin(effect)

    # ------------------------------------------------------------------------------------------------------ effects

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self.world.hear(self.name, message)
            case sums.Persist(_, durable):
                self.disk = durable.encode()
            case Record(entries):
                self.audit.extend(entries)
            case Note():
                self.notes.append(effect)
            case Forget(""):
                self.doing = None
                self.waiting = [each for each in self.waiting if isinstance(each, sums.Mask | UploadMasked)]
            case StopUploads():
                self.waiting = [each for each in self.waiting if not isinstance(each, UploadMasked)]
            case sums.Erase(update=update):
                self.contributions.erase(update)
            case sums.Abandon(ctx=ctx):
                self.contributions.abandon(ctx)
            case CheckData() | Fetch() | Contribute() | Work():
                assert self.doing is None, f"{effect} while {self.doing}"
                self.doing = effect
                self._begin(effect)
            case sums.Mask() | UploadMasked():
                self._begin(effect)
            case _:
                pass

    def _begin(self, effect: Effect) -> None:
        if type(effect) in self.aside:
            self.waiting.append(effect)
        else:
            self.world.soon(lambda: self._do(effect))

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, CheckData | Fetch | Contribute | Work):
            if self.doing is not effect:
                return  # let go meanwhile
            self.doing = None
        match effect:
            case CheckData(offer):
                self.feed(DataChecked(offer.job, (), self.table))
            case Fetch(step):
                self.feed(Fetched(step))
            case Contribute():
                self.feed(self._contributed(effect))
            case sums.Mask(job_hash, ctx):
                payload = self.contributions.mask(effect)
                if payload is not None:
                    self.feed(sums.Masked(job_hash, ctx, payload.digest))
            case UploadMasked(_, payload):
                content = self.contributions.payloads.get(BlobRef(payload.y_hash, payload.size))
                self.world.store(self.name, content)
                self.feed(sums.UploadDone(payload.job_hash, payload.ctx))
            case _:
                raise AssertionError(effect)

    def _contributed(self, effect: Contribute) -> Event:
        assigned, plan = effect.assigned, effect.assigned.work.plan
        if self.cause is not None:
            return WorkFailed(assigned, self.cause, "no")
        values = self.world.vector(self.name, plan) if self.vector is None else self.vector
        kind = "<f4" if plan.kind is Kind.TRAIN else "<f8"
        self.contributions.result(assigned.update).write_bytes(values.astype(kind).tobytes())
        try:
            self.contributions.prepare(assigned.update, plan, rows=self.table.rows, declared=effect.declared)
        except DeclineError as declined:
            return WorkFailed(assigned, DeclineCause.DATA, str(declined))
        return Held(assigned, self.table.digest)

    # ---------------------------------------------------------------------------------------------------- questions

    def said(self, kind: type[Message]) -> list[Message]:
        """All messages of one kind that it said in the job."""
        sealed = (each.message for each in self.effects if isinstance(each, Send) and isinstance(each.message, Sealed))
        decoded = (messages.decode(each.content) for each in sealed)
        return [each for each in decoded if isinstance(each, kind)]

    def told(self, kind: type[object]) -> list[object]:
        """All other messages of one kind."""
        return [each.message for each in self.effects if isinstance(each, Send) and isinstance(each.message, kind)]

    def trouble(self) -> str:
        """What its administrator was told to look at."""
        return "\n".join(note.text for note in self.notes if note.trouble)


@dataclass
class World:
    """The coordinator's machine with all that its conductor does, the sites, and what lies between them."""

    consortium: Consortium
    folder: Path
    text: str = TEXT
    now: float = NOW
    offer: JobOffer = None  # type: ignore[assignment]  # made in `__post_init__`

    def __post_init__(self) -> None:
        """All sites and the coordinator run; nobody attends yet."""
        self.terms = self.consortium.terms(self.text)
        self.offer = JobOffer(JOB, self.text, self.consortium.roster, self.terms.encode())
        self.queue: deque[Callable[[], object]] = deque()
        self.change: Callable[[str, Message], bytes] = lambda _, message: messages.encode(message)
        self.refusals: list[ParleyError] = []
        self.refused: dict[str, JobRefused] = {}
        self.opened: list[tuple[Plan, tuple[int, ...], Words]] = []
        self.contexts: list[bytes] = []
        self.failed: list[hub_events.Failed] = []
        self.step: StepStart | None = None
        self._spool: dict[tuple[int, bytes], bytes] = {}
        self._expected: dict[tuple[int, bytes], BlobRef] = {}
        self._sums: dict[bytes, tuple[Plan, Words]] = {}
        self.present: set[str] = set()
        self.hub = Coordinator(self.terms, self.consortium.hub.keys.protocol)
        self.tell(hub_events.Started())
        self.sites = {
            each.statement.name: Agent(self, each, self.folder / each.statement.name) for each in self.members
        }

    @property
    def members(self) -> tuple[Member, ...]:
        """The sites' identities."""
        return self.consortium.sites

    # ------------------------------------------------------------------------------------------------------- running

    def soon(self, act: Callable[[], object]) -> None:
        """It happens after all that is to happen before it."""
        self.queue.append(act)

    def settle(self) -> "World":
        """Everything happens that can without time passing."""
        while self.queue:
            self.queue.popleft()()
        return self

    def attend(self) -> "World":
        """All sites attend and accept the job."""
        for agent in self.sites.values():
            agent.attend()
        return self.settle()

    def begin(self, step: StepStart) -> "World":
        """A step begins, as the conductor begins it: what it is about to all, and then the machine."""
        self.step = step
        for name in sorted(self.present):
            self.sites[name].hear(step)
        model = hashlib.sha256(b"").digest() if step.model is None else step.model.digest
        self.tell(hub_events.Begin(plan_id(step.kind), model, hashlib.sha256(args_of(step)).digest()))
        return self

    def round(self, number: int, kind: StepKind = StepKind.TRAIN) -> "World":
        """One step, to its end."""
        return self.begin(step_of(number, kind, number)).settle()

    def time_up(self) -> "World":
        """The coordinator's deadline passes."""
        self.now += 3000.0
        self.tell(hub_events.TimeUp())
        return self.settle()

    # ------------------------------------------------------------------------------------------------ the coordinator

    def index(self, name: str) -> int:
        """The site's index."""
        return index_of(self.consortium.roster, name)

    def agent(self, idx: int) -> Agent:
        """The site of an index."""
        return next(agent for agent in self.sites.values() if self.index(agent.name) == idx)

    def hear(self, name: str, message: object) -> None:
        """A site said something."""
        self.soon(lambda: self._heard(name, message))

    def _heard(self, name: str, message: object) -> None:
        match message:
            case JobAccepted():
                self.present.add(name)
                if self.step is not None:
                    self.sites[name].hear(self.step)
                self.tell(hub_events.Arrived(self.index(name)))
            case JobRefused():
                self.refused[name] = message
            case Sealed(_, content):
                decoded = messages.decode(content)
                assert isinstance(decoded, FromSite | Relayed)
                self.tell(hub_events.Received(self.index(name), decoded))
            case _:
                pass

    def depart(self, name: str) -> None:
        """A site's stream has ended."""
        if name in self.present:
            self.present.discard(name)
            self.tell(hub_events.Departed(self.index(name)))

    def store(self, name: str, content: bytes) -> None:
        """A payload has come, whole."""
        key = self.index(name), hashlib.sha256(content).digest()
        self._spool[key] = content
        self._stored(key)

    def _stored(self, key: tuple[int, bytes]) -> None:
        if key in self._expected and key in self._spool:
            ref = self._expected[key]
            self.soon(lambda: self.tell(hub_events.Stored(key[0], ref)))

    def tell(self, event: hub_events.Event) -> None:
        """The machine takes an event in, and what it wants is done."""
        try:
            effects = self.hub.receive(event, self.now)
        except LocalProtocolError:
            raise
        except RemoteProtocolError as refused:
            self.refusals.append(refused)
            return
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: hub_events.Effect) -> None:
        match effect:
            case hub_events.Send(idx, message):
                agent = self.agent(idx)
                content = self.change(agent.name, message)
                self.soon(lambda: agent.hear(Sealed(JOB, content)) if agent.name in self.present else None)
            case hub_events.Expect(idx, payload):
                self._expected[idx, payload.digest] = payload
                self._stored((idx, payload.digest))
            case hub_events.Sum():
                self.soon(lambda: self._sum(effect))
            case hub_events.Opened(r, opened):
                for each in opened:
                    plan, words = self._sums.pop(each.ctx)
                    self.opened.append((plan, each.members, words))
                    self.contexts.append(each.ctx)
                self.soon(lambda: self.tell(hub_events.Committed(r)))
                if self.step is not None:
                    done = StepEnded(JOB, self.step.step, counted=True)
                    for name in sorted(self.present):
                        self.soon(lambda agent=self.sites[name]: agent.hear(done))  # type: ignore[misc]
            case hub_events.Failed():
                self.failed.append(effect)
            case _:
                pass

    def _sum(self, effect: hub_events.Sum) -> None:
        plan = self.terms.plan(effect.plan_id)
        assert plan is not None
        total = MaskedSum(np.zeros(plan.words, dtype=np.dtype(f"<u{plan.ring // 8}")))
        for term in effect.terms:
            content = self._spool[term.idx, term.payload.digest]
            total.add(term.idx, term.payload.digest, partial(_slice, content))
        sum_hash = total.unmask((term.idx, term.self_key) for term in effect.terms)
        self._sums[effect.ctx] = plan, total.words()
        self.tell(hub_events.Summed(effect.ctx, sum_hash))

    # -------------------------------------------------------------------------------------------------------- the data

    def vector(self, name: str, plan: Plan) -> F64:
        """What a site computes: small numbers that differ from site to site."""
        train = plan.kind is Kind.TRAIN
        size, unit = (model_size(plan), 0.125) if train else (plan.words - 4, 1.0)
        values: F64 = (np.arange(size, dtype=np.float64) % 7 + 1.0) * unit * (1 + self.index(name))
        return values

    def expect_last(self, *names: str) -> None:
        """The last opened sum is that of these sites, or of all, and of nothing else."""
        plan, members, words = self.opened[-1]
        among = names or tuple(self.sites)
        assert members == tuple(sorted(self.index(name) for name in among))
        codec = codec_of(pack(plan.codec))
        vectors = [self.vector(name, plan) for name in among]
        if isinstance(codec, FieldsCodec):
            totals = np.concatenate(list(codec.decode(words, len(members)).values()))
            np.testing.assert_allclose(totals, sum(vectors), rtol=0, atol=1e-6)
        else:
            mean = np.concatenate(list(codec.decode(words, len(members)).mean()))
            np.testing.assert_allclose(mean, sum(vectors) / len(vectors), rtol=0, atol=1e-4)


def _slice(content: bytes, start: int, count: int) -> bytes:
    return content[start : start + count]


@pytest.fixture(scope="module")
def consortium() -> Consortium:
    """Three hospitals and a coordinator."""
    return Consortium.found()


@pytest.fixture
def world(consortium: Consortium, tmp_path: Path) -> World:
    """All of them, before anybody attends."""
    return World(consortium, tmp_path)


# --------------------------------------------------------------------------------------------------------- whole rounds


def test_statistics_training_and_evaluation_are_summed_and_nothing_else_is_shown(world: World) -> None:
    """Each sum is that of all three sites; not one word that left a site is one of its own vector."""
    world.attend()
    for step, kind in enumerate((StepKind.STATISTICS, StepKind.TRAIN, StepKind.EVALUATE, StepKind.TRAIN), 1):
        world.round(step, kind).expect_last()

    assert (len(world.opened), world.failed, world.refusals) == (4, [], [])
    assert not any(agent.trouble() for agent in world.sites.values())
    for agent in world.sites.values():
        assert agent.told(Declined) == []
        assert list(agent.folder.glob("*.result")) == []
    for (_, digest), content in world._spool.items():
        assert hashlib.sha256(content).digest() == digest
        for name in world.sites:
            for plan, *_ in world.opened:
                assert world.vector(name, plan).tobytes() not in content


def test_every_signed_message_stands_in_the_sites_log(world: World) -> None:
    """In the order in which it was received and sent, after the terms whose keys sign it."""
    world.attend().round(1)
    agent = world.sites["berlin"]
    entries = [read(kind, content) for kind, content in agent.audit]

    assert isinstance(entries[0], Terms)
    passed = [each for each in entries if isinstance(each, Passed)]
    tags = [(each.way.value, each.message.TAG) for each in passed if isinstance(each.message, FromSite | FromHub)]
    assert tags == [
        ("received", "epoch"),
        ("received", "train"),
        ("sent", "ready"),
        ("received", "start"),
        ("sent", "upload"),
        ("received", "full"),
        ("sent", "open"),
        ("received", "result"),
    ]
    sent = [each.message for each in passed if each.way == "sent"]
    assert sent == agent.said(FromSite | Relayed)  # type: ignore[arg-type]  # a union stands for its members


def test_what_is_said_is_durable_and_logged_before(world: World) -> None:
    """F3 is on the disk before masking begins, F4 before OPEN, and a message in the log before it leaves."""
    world.attend().round(1)
    for agent in world.sites.values():
        points = [each.point for each in agent.effects if isinstance(each, sums.Persist)]
        assert points == ["F1", "F2", "F3", "F4", "note"]
        order = [each for each in agent.effects if isinstance(each, sums.Persist | sums.Mask | Record | Send)]
        mask = next(at for at, each in enumerate(order) if isinstance(each, sums.Mask))
        assert order[mask - 1].point == "F3"  # type: ignore[union-attr]  # a Persist, or this fails
        for at, each in enumerate(order):
            if isinstance(each, Send) and isinstance(each.message, Sealed):
                said = messages.decode(each.message.content)
                logged = (record for record in order[:at] if isinstance(record, Record))
                kept = [read(*entry) for record in logged for entry in record.entries]
                assert any(isinstance(entry, Passed) and entry.message == said for entry in kept)


def test_a_site_trains_one_thing_at_a_time_and_masks_beside_it(world: World) -> None:
    """A plain job's work goes on while a masked vector is made and uploaded; `Agent` fails at two pieces of work."""
    world.attend()
    agent = world.sites["athens"]
    agent.rules = RULES.model_copy(update={"allow_plain_aggregation": True})
    plain = TEXT.replace("post_quantum = false", 'secure_aggregation = "plain"')
    agent.hear(JobOffer("plain-1", plain, world.consortium.roster))
    world.settle()
    agent.aside = {sums.Mask}
    world.begin(step_of(1, StepKind.TRAIN)).settle()
    agent.aside |= {Work}
    agent.hear(step_of(1, StepKind.TRAIN, job="plain-1"))
    world.settle()

    assert [type(each) for each in agent.waiting] == [sums.Mask, Work]
    agent.waiting.pop()
    agent.release()
    world.settle().expect_last()
    assert isinstance(agent.doing, Work)


# ------------------------------------------------------------------------------------------------------------- declines


def test_a_site_that_cannot_work_declines_and_takes_part_in_the_next_round(world: World) -> None:
    """It says so signed and without a reason; its own log has the reason."""
    agent = world.attend().sites["cork"]
    agent.cause = DeclineCause.RESOURCES
    world.round(1)

    assert [each.who for each in world.failed] == [(world.index("cork"),)]
    assert world.opened == []
    (decline,) = agent.said(Decline)
    assert decline == messages.sign(replace(decline, signature=messages.UNSIGNED), agent.member.keys.protocol)
    assert "job risk-1: no" in agent.trouble()
    agent.cause = None
    world.round(2).expect_last()


def test_a_result_that_is_not_finite_is_declined_and_after_three_the_job_waits(world: World) -> None:
    """Each decline tells a bit about records: the administrator is asked before a fourth, also after a restart."""
    agent = world.attend().sites["cork"]
    agent.vector = np.array([np.nan, 0.0])
    for number in range(1, 4):
        world.round(number)

    assert len(agent.said(Decline)) == 3
    assert "3 rounds on heart were declined because of this site's data" in agent.trouble()
    assert "parley site resume-job risk-1" in agent.trouble()
    agent.vector = None
    agent.restart()
    assert agent.session.knows(JOB)
    assert not agent.session.knows("risk-2")
    world.settle().round(4)
    assert world.opened == []
    assert len(agent.said(Ready)) == 0

    agent.feed(JobResumed(JOB))
    world.settle().expect_last()


def test_only_a_job_that_is_here_is_resumed(world: World) -> None:
    """A typing error is told."""
    agent = world.attend().sites["cork"]
    agent.feed(JobResumed("risk-2"))
    assert "there is no sealed job risk-2 here to resume" in agent.trouble()


def test_an_update_that_cannot_be_masked_is_declined(world: World) -> None:
    """The round fails, and the next one is as if nothing had been."""
    agent = world.attend().sites["athens"]
    agent.aside = {sums.Mask}
    world.round(1)
    (mask,) = agent.waiting
    assert isinstance(mask, sums.Mask)
    agent.feed(MaskFailed(mask, "the disk is full"))
    world.settle()

    assert agent.state is State.IDLE
    assert len(agent.said(Decline)) == 1
    assert "a result cannot be masked: the disk is full" in agent.trouble()
    agent.waiting.clear()
    agent.aside.clear()
    world.time_up()
    world.round(2).expect_last()


def test_a_train_is_not_worked_on_unless_its_step_was_described(world: World) -> None:
    """The signature is under a model and arguments; what was described is another model."""
    world.attend()
    world.step = step_of(1, StepKind.TRAIN, 2)
    for agent in world.sites.values():
        agent.hear(world.step)
    other = step_of(1, StepKind.TRAIN, 1)
    assert other.model is not None
    args = hashlib.sha256(args_of(other)).digest()
    world.tell(hub_events.Begin(plan_id(StepKind.TRAIN), other.model.digest, args))
    world.settle()

    for agent in world.sites.values():
        assert len(agent.said(Decline)) == 1
        assert not any(isinstance(each, Fetch) for each in agent.effects)
        assert "round 1 is signed for another step than was described" in agent.trouble()


def test_a_step_of_a_sealed_job_is_never_done_in_plain(world: World) -> None:
    """A coordinator that describes steps and signs no TRAIN gets no work, and no payload leaves."""
    world.attend()
    for agent in world.sites.values():
        agent.effects.clear()
        for step, kind in enumerate(StepKind, 1):
            agent.hear(step_of(step, kind))
        assert agent.effects == []


def test_a_job_whose_coordinator_is_not_known_is_refused_and_not_taken_for_plain(consortium: Consortium) -> None:
    """Where its terms cannot be checked, a job that asks for secure aggregation is in none."""
    me = SiteIdentity(consortium.sites[0].statement, consortium.root.public, consortium.nobody_revoked())
    session = Session(me, (), SealedJobs(consortium.sites[0].keys.protocol, Durable()))
    offer = JobOffer(JOB, TEXT, consortium.roster, consortium.terms().encode())
    with pytest.raises(PolicyRefused):
        session._admitted(offer, jobs.parse(TEXT))


@pytest.mark.parametrize("terms", [b"", b"x"], ids=["none", "nonsense"])
def test_an_offer_without_terms_is_refused_and_not_taken_for_plain(world: World, terms: bytes) -> None:
    """The job file asks for secure aggregation; leaving the terms out does not switch it off."""
    world.attend()
    agent = next(iter(world.sites.values()))
    agent.hear(JobOffer("risk-2", TEXT, world.consortium.roster, terms))
    (refused,) = agent.told(JobRefused)
    assert refused.findings[0].problem == "the terms of its secure aggregation cannot be read"


# ------------------------------------------------------------------------------------------------ pauses and the stream


@pytest.mark.parametrize("aside", [Fetch, Contribute])
def test_a_pause_declines_what_is_being_done(world: World, aside: type[object]) -> None:
    """The trainer is stopped, and the coordinator knows at once that nothing comes."""
    agent = world.attend().sites["berlin"]
    agent.aside = {aside}
    world.begin(step_of(1, StepKind.TRAIN)).settle()
    effects = agent.feed(Paused(paused=True))
    world.settle()

    assert Forget("") in effects
    assert len(agent.said(Decline)) == 1
    assert [each.who for each in world.failed] == [(world.index("berlin"),)]
    agent.aside.clear()
    agent.feed(Paused(paused=False))
    world.settle().round(2).expect_last()


def test_while_paused_every_assignment_is_declined(world: World) -> None:
    """No work is taken up, and nothing is fetched."""
    agent = world.attend().sites["berlin"]
    agent.feed(Paused(paused=True))
    world.settle().round(1)

    assert len(agent.said(Decline)) == 1
    assert not any(isinstance(each, Fetch) for each in agent.effects)


@pytest.mark.parametrize("aside", [Fetch, Contribute, sums.Mask, UploadMasked])
def test_a_cut_costs_no_work(world: World, aside: type[object]) -> None:
    """Whatever was under way goes on, or is said again, on the next stream; the round counts all three."""
    agent = world.attend().sites["athens"]
    agent.aside = {aside}
    world.begin(step_of(1, StepKind.TRAIN)).settle()
    agent.cut()
    world.settle()
    assert world.opened == []
    assert isinstance(agent.doing, Contribute) is (aside is Contribute)  # no payload is asked for where nobody is
    assert not isinstance(agent.doing, Fetch)
    agent.attend()
    agent.release()
    world.settle().expect_last()
    assert len([each for each in agent.effects if isinstance(each, Contribute)]) == 1


def test_nothing_of_a_job_is_said_before_the_coordinator_knows_it_accepted(world: World) -> None:
    """What the machine says while away is neither sent nor logged; it is said once the job is accepted again."""
    agent = world.attend().sites["athens"]
    agent.aside = {Contribute}
    world.begin(step_of(1, StepKind.TRAIN)).settle()
    agent.cut()
    logged = len(agent.audit)
    agent.release()
    world.settle()
    assert (agent.state, len(agent.said(Ready)), len(agent.audit)) == (State.READY, 0, logged)
    agent.attend()
    world.settle()
    assert len(agent.said(Ready)) >= 1
    world.expect_last()


def test_a_step_that_ended_without_this_site_is_let_go(world: World) -> None:
    """Its trainer is stopped and the coordinator, which has gone on, is not told."""
    agent = world.attend().sites["athens"]
    agent.aside = {Contribute}
    world.begin(step_of(1, StepKind.TRAIN)).settle()
    effects = agent.hear(StepEnded(JOB, 1, counted=False))

    assert Forget("") in effects
    assert (agent.state, agent.said(Decline)) == (State.IDLE, [])


# -------------------------------------------------------------------------------------------------------------- restart


@pytest.mark.parametrize("aside", [Fetch, Contribute, sums.Mask])
def test_a_killed_site_does_its_work_anew(world: World, aside: type[object]) -> None:
    """Before it has uploaded, nothing of the round is lost but its work; of its update nothing is left on the disk."""
    agent = world.attend().sites["athens"]
    agent.aside = {aside}
    world.begin(step_of(1, StepKind.TRAIN)).settle()
    agent.aside.clear()
    agent.restart()
    assert list(agent.folder.glob("*.result")) == []
    world.settle().expect_last()
    assert len([each for each in agent.effects if isinstance(each, Contribute)]) == (1 if aside is Fetch else 2)


def test_a_killed_site_says_its_open_again(world: World) -> None:
    """The record is on its disk: the very same OPEN ends the round, and no second vector is ever made of it."""
    agent = world.attend().sites["athens"]
    lost: list[bytes] = []
    real = world._heard

    def heard(name: str, message: object) -> None:
        if name == "athens" and isinstance(message, Sealed) and isinstance(messages.decode(message.content), Open):
            lost.append(message.content)
            if len(lost) == 1:
                return
        real(name, message)

    world._heard = heard  # type: ignore[method-assign]
    world.round(1)
    assert world.opened == []
    agent.restart()
    world.settle().expect_last()
    assert lost[0] == lost[1]
    assert len(agent.said(Upload)) == 1


def test_a_restarted_site_does_not_go_on_with_another_table(world: World) -> None:
    """The sums' difference would be the change; the administrator learns what to do."""
    agent = world.attend().sites["athens"]
    world.round(1)
    agent.table = replace(TABLE, digest=hashlib.sha256(b"another").digest())
    agent.restart()
    world.settle()

    (finding,) = world.refused["athens"].findings
    assert "the table is another version" in finding.problem
    assert "put the data set back" in finding.fix


def test_a_table_that_changes_in_a_job_suspends_it(world: World) -> None:
    """The trainer read another version than the one that the site promised: nothing of it is contributed."""
    agent = world.attend().sites["athens"]
    world.round(1)
    agent.table = replace(TABLE, digest=hashlib.sha256(b"another").digest())
    world.round(2)

    assert len(world.opened) == 1
    assert len(agent.said(Decline)) == 1
    assert "the table that was read is another version than the job's" in agent.trouble()
    assert list(agent.folder.glob("*.result")) == []


# ---------------------------------------------------------------------------------------------------- tampered messages


@pytest.mark.parametrize("kind", [Train, RoundStart, Full])
def test_a_changed_message_is_refused_logged_and_changes_nothing(world: World, kind: type[Message]) -> None:
    """Its signature does not hold; once the right one comes the round goes on to its end."""
    agent = world.attend().sites["cork"]
    right: list[Message] = []
    changed: list[Message] = []

    def change(name: str, message: Message) -> bytes:
        content = messages.encode(message)
        if name == "cork" and isinstance(message, kind) and not changed:
            right.append(message)
            changed.append(replace(message, signature=bytes(63) + b"\x01"))
            return messages.encode(changed[0])
        return content

    world.change = change
    world.begin(step_of(1, StepKind.TRAIN)).settle()

    refused = [each for each in agent.said(Refuse) if isinstance(each, Refuse)]
    assert [each.code for each in refused] == [Code.E_SIG]
    noted = [each for each in (read(*entry) for entry in agent.audit) if isinstance(each, Noted)]
    assert [each.evidence.text.partition(":")[0] for each in noted] == ["E_SIG"]
    passed = [each for each in (read(*entry) for entry in agent.audit) if isinstance(each, Passed)]
    assert not any(each.message == changed[0] for each in passed)
    if not world.opened:
        agent.hear(Sealed(JOB, messages.encode(right[0])))
        world.settle()
    world.expect_last()


def test_bytes_that_are_no_message_are_refused(world: World) -> None:
    """They are answered with a REFUSE, and the next round is summed."""
    agent = world.attend().sites["cork"]
    agent.hear(Sealed(JOB, b"nonsense"))
    world.settle()
    (refused,) = agent.said(Refuse)
    assert isinstance(refused, Refuse)
    assert refused.code is Code.E_STATE
    world.round(1).expect_last()


def test_a_message_of_a_job_that_is_not_accepted_changes_nothing(world: World) -> None:
    """Be it readable or not."""
    agent = world.attend().sites["cork"]
    disk = agent.disk
    for content in (b"nonsense", messages.encode(Train(bytes(32), 1, 1, 2, bytes(32), bytes(32)))):
        effects = agent.hear(Sealed("risk-9", content))
        assert effects == (Note("a message of job risk-9 came, in which this site is not; ignored"),)
    assert agent.disk == disk


# ------------------------------------------------------------------------------------------------------------ the offer


def _refused(world: World, offer: JobOffer | None = None, **rules: object) -> JobRefused:
    """What one site answers to an offer under a policy of these rules."""
    agent = world.sites["athens"]
    agent.rules = RULES.model_copy(update={"secure_aggregation": SecureAggregation(**rules)})  # type: ignore[arg-type]
    world.offer = offer or world.offer
    agent.attend()
    world.settle()
    assert agent.state is State.CLOSED
    return world.refused["athens"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"c_max": 0}, "c_max is 0, and this site finds 1"),
        ({"pq": 1}, "pq is 1, and this site finds 0"),
        ({"cells": ((0, 1), (2,))}, "cells is ((0, 1), (2,)), and this site finds ((0, 1, 2),)"),
    ],
)
def test_other_terms_than_the_job_files_are_refused_by_name(world: World, change: dict[str, object], told: str) -> None:
    """A coordinator cannot weaken what the job's author wrote."""
    offer = replace(world.offer, terms=replace(world.terms, **change).encode())  # type: ignore[arg-type]
    (finding,) = _refused(world, offer).findings
    assert finding.problem == f"the terms offered are not those of the job file: {told}"


def test_another_plan_or_roster_is_refused_by_name(world: World) -> None:
    """Down to the field of the plan and the site of the roster."""
    terms, members = world.terms, world.terms.roster.members
    weak = replace(terms, plans=(*terms.plans[:-1], replace(terms.plans[-1], m_min=2)))
    (finding,) = _refused(world, replace(world.offer, terms=weak.encode())).findings
    assert finding.problem.endswith("m_min of plan 3 is 2, and this site finds 3")

    sybil = replace(members[1], vk=MemberKeys.generate().protocol.public_key().public_bytes_raw())
    roster = replace(terms.roster, members=(members[0], sybil, members[2]))
    (finding,) = _refused(world, replace(world.offer, terms=replace(terms, roster=roster).encode())).findings
    assert finding.problem.endswith("the roster is another one from site 1 on")

    fewer = replace(terms, plans=terms.plans[1:])
    (finding,) = _refused(world, replace(world.offer, terms=fewer.encode())).findings
    assert finding.problem.endswith("the plans are [2, 3], and this site finds [1, 2, 3]")

    (finding,) = _refused(world, replace(world.offer, terms=b"")).findings
    assert finding.problem == "the terms of its secure aggregation cannot be read"


def test_the_sites_own_limits_refuse_by_name(world: World) -> None:
    """No message moves them."""
    (finding,) = _refused(world, colluding_sites=2).findings
    assert "the job bears 1 colluding sites, this site asks for 2" in finding.problem
    problems = {each.problem for each in _refused(world, rows_minimum=50).findings}
    assert problems == {f"plan {number}: rows_min = 10, this site asks for 50" for number in (1, 2, 3)}


def test_a_roster_is_allowed_when_the_root_signed_it_or_people_compared_it(world: World) -> None:
    """`signed` is the default; a list of digests takes these alone."""
    digest = world.terms.roster.hash.hex()
    (finding,) = _refused(world, rosters=("00" * 32,)).findings
    assert finding.problem == f"the roster {digest} is not one that was compared"
    agent = world.sites["athens"]
    agent.rules = RULES.model_copy(update={"secure_aggregation": SecureAggregation(rosters=(digest,))})
    agent.cut()
    agent.attend()
    world.settle()
    assert agent.state is State.IDLE


def test_a_site_with_too_little_data_does_not_say_what_is_too_little(world: World) -> None:
    """The coordinator learns that it is the data; the administrator, which rule."""
    agent = world.sites["athens"]
    agent.table = replace(TABLE, rows=9, rarest=2)
    (finding,) = _refused(world).findings

    assert finding.path == "data"
    assert finding.problem == "this site's data is not what the job's secure aggregation asks of every site"
    assert "a class has fewer than 5 rows here" in agent.trouble()


def test_a_site_without_its_key_takes_part_in_no_sealed_job(consortium: Consortium) -> None:
    """It says why, and that its administrator must act."""
    world_offer = JobOffer(JOB, TEXT, consortium.roster, consortium.terms().encode())
    me = SiteIdentity(consortium.sites[0].statement, consortium.root.public, consortium.nobody_revoked())
    session = Session(me)
    session.receive(Connected(NONCE, "test"), NOW)
    serials = me.statement.serial, consortium.hub.statement.serial
    proof = sign_welcome(consortium.hub.keys.protocol, NONCE, *serials)
    welcome = Welcome(PROTOCOL, "test", consortium.hub.statement, proof, consortium.nobody_revoked(), 5.0, int(NOW))
    session.receive(Received(welcome, RULES), NOW)
    effects = session.receive(Received(world_offer, RULES), NOW)

    (refused,) = [each.message for each in effects if isinstance(each, Send)]
    assert isinstance(refused, JobRefused)
    assert refused.findings[0].problem == "this agent runs without its protocol key"


def test_two_jobs_never_share_their_terms(world: World) -> None:
    """What is said in one would count in the other."""
    agent = world.attend().sites["athens"]
    agent.hear(replace(world.offer, job="risk-2"))
    world.settle()
    (finding,) = world.refused["athens"].findings
    assert finding.problem == "the job risk-1 has the same terms, with the same job_id"


def test_a_model_that_moved_too_far_is_not_trained_on(world: World) -> None:
    """With `drift_max` the fetch is told from which model, and how far; REFUSE says why, and its log too."""
    agent = world.sites["athens"]
    agent.rules = RULES.model_copy(update={"secure_aggregation": SecureAggregation(drift_max=1.5)})
    world.attend().round(1).expect_last()
    agent.aside = {Fetch}
    world.round(3)
    (fetch,) = agent.waiting
    assert isinstance(fetch, Fetch)
    assert isinstance(fetch.step, Assigned)
    work = fetch.step.work
    assert work.drift == sums.Drift(model_of(1).digest, 1.5)
    agent.waiting.clear()
    agent.feed(sums.Drifted(work.job_hash, work.assignment))
    world.settle()

    refused = agent.said(Refuse)[-1]
    assert isinstance(refused, Refuse)
    assert refused.code is Code.E_DRIFT
    assert "the model of round 3 moved further than this site's policy allows" in agent.trouble()
    assert (agent.state, len([each for each in agent.effects if isinstance(each, Contribute)])) == (State.IDLE, 1)


def test_a_policy_that_is_tightened_stops_the_next_round(world: World) -> None:
    """The site's file is heeded at once, also in a job that was accepted before."""
    world.attend().round(1)
    agent = world.sites["athens"]
    agent.rules = RULES.model_copy(update={"tasks": ()})
    world.round(2)

    assert len(world.opened) == 1
    refused = agent.said(Refuse)[-1]
    assert isinstance(refused, Refuse)
    assert refused.code is Code.E_TERMS


# -------------------------------------------------------------------------------------------------------------- the end


def test_a_closed_job_is_never_accepted_again(world: World) -> None:
    """Its tombstone is on the disk, its keys and updates are gone."""
    world.attend().round(1)
    world.tell(hub_events.Close())
    world.settle()
    agent = world.sites["athens"]
    agent.hear(JobEnded(JOB, JobState.FINISHED, "all rounds are done"))
    durable = Durable.decode(agent.disk)
    assert (durable.jobs, [stone.job_hash for stone in durable.closed]) == ((), [world.terms.job_hash])

    agent.hear(world.offer)
    world.settle()
    assert "this job was accepted before; it is never accepted twice" in world.refused["athens"].findings[0].problem


def test_a_job_is_closed_also_where_it_was_not_offered_again(world: World) -> None:
    """A site that comes back after the end learns it by the signature, whatever line it comes in; not by another's."""
    agent = world.attend().sites["athens"]
    world.offer = replace(world.offer, job="risk-2", text="no job")
    agent.restart()
    world.settle()
    close = Close(world.terms.job_hash)
    for key, jobs_left in ((agent.member.keys.protocol, 1), (world.consortium.hub.keys.protocol, 0)):
        agent.hear(Sealed(JOB, messages.encode(messages.sign(close, key))))
        assert len(Durable.decode(agent.disk).jobs) == jobs_left


def test_a_second_process_with_this_sites_key_stops_it(world: World) -> None:
    """All that it holds is dropped, the proof stands in its log, and the administrator is told what to do."""
    agent = world.attend().sites["athens"]
    agent.aside = {Contribute}
    world.begin(step_of(1, StepKind.TRAIN)).settle()
    (mine,) = (each for each in agent.said(Keys) if isinstance(each, Keys))
    other = replace(mine, gen=mine.gen + 1, nonce=bytes(32))
    agent.hear(Sealed(JOB, messages.encode(messages.sign(other, agent.member.keys.protocol))))

    noted = [each for each in (read(*entry) for entry in agent.audit) if isinstance(each, Noted)]
    assert noted[-1].evidence.kind is Suspicion.FOREIGN_KEYS
    assert (agent.doing, agent.waiting) == (None, [])
    assert "another process has made keys with this site's identity key" in agent.trouble()
    agent.feed(sums.TimePassed())
    assert "this site has stopped: another process holds its identity key" in agent.trouble()
    assert agent.session.wake_at(world.now, world.now - NOW) is None


def test_time_itself_is_an_event(world: World) -> None:
    """An update that no ROUND_START asks for is erased after an hour; the session says when to call."""
    agent = world.attend().sites["athens"]
    world.sites["cork"].aside = {Contribute}
    world.begin(step_of(1, StepKind.TRAIN)).settle()
    assert agent.state is State.READY
    at = agent.session.wake_at(world.now, world.now - NOW)
    assert at == pytest.approx(world.now - NOW + 3600)
    assert list(agent.folder.glob("*.result")) != []
    world.now += 3600
    agent.feed(sums.TimePassed())
    assert (agent.state, list(agent.folder.glob("*.result"))) == (State.IDLE, [])
