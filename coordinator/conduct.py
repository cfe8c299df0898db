"""Performs what the run machines ask for: sends, stores, sums, calls back at deadlines. It decides nothing itself."""

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TypeVar, assert_never

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator import enrolment, registry
from coordinator.arithmetic import Arithmetic
from coordinator.records import JobRecord, ModelRecord, SitePresence
from coordinator.run import (
    Answer,
    Commit,
    Committed,
    Complete,
    Completed,
    Effect,
    Event,
    Run,
    SaveSite,
    SaveState,
    Send,
    SetDeadline,
    SiteArrived,
    SiteLeft,
    StopAsked,
    TimeUp,
)
from coordinator.store.store import Store
from federation.blobs import BlobRef, BlobStore, Incoming
from federation.errors import ConfigurationError, IdentityError, ParleyError, RemoteProtocolError, StorageError, WhoActs
from federation.job import parse
from federation.messages import (
    PROTOCOL,
    ApproveEnrolment,
    Credential,
    Done,
    EnrolmentRequest,
    EnrolmentState,
    EnrolmentStatus,
    FromCoordinator,
    FromSite,
    Heartbeat,
    Hello,
    JobAdded,
    Jobs,
    JobState,
    JobView,
    ListJobs,
    ListModels,
    ListPending,
    ListSites,
    MembershipStatement,
    Models,
    ModelView,
    OperatorReply,
    OperatorRequest,
    Pending,
    PublishRevocations,
    RevocationList,
    Role,
    RoundView,
    ShowJob,
    ShowModel,
    Sites,
    SiteView,
    StepKind,
    StopJob,
    SubmitJob,
    UploadOpen,
    Welcome,
)
from federation.refusals import told
from federation.vector import from_safetensors
from privacy import identity

__all__ = ["Conductor", "CoordinatorIdentity", "Peer"]

log = logging.getLogger("parley.coordinator")

T = TypeVar("T")

HEARTBEAT_SECONDS = 5.0
"""A site and the coordinator say that they are there this often (200 sites then cost 2.3 % of a core, measured)."""

SILENCE_SECONDS = 4 * HEARTBEAT_SECONDS
"""After so long without a word a stream counts as dead."""

_RETRY_SECONDS = 5.0
_QUEUE = 1000


@dataclass(frozen=True, slots=True)
class CoordinatorIdentity:
    """The coordinator's keys and papers (PEM). The consortium's root key is not among them."""

    consortium: str
    root_certificate: bytes
    certificate: bytes
    tls_key: bytes
    protocol_key: Ed25519PrivateKey
    statement: MembershipStatement
    revocations: RevocationList


@dataclass(eq=False, slots=True)
class Peer:
    """A site's open stream: what waits to be sent to it, and why the stream must end, once it must."""

    member: MembershipStatement
    outgoing: asyncio.Queue[FromCoordinator | None]
    heard: float
    closed_for: ParleyError | None = None

    @property
    def name(self) -> str:
        """The site's name."""
        return self.member.name

    def send(self, message: FromCoordinator) -> None:
        """Queues a message; a peer that does not read its stream is let go."""
        try:
            self.outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self.close(RemoteProtocolError(f"site {self.name} does not read its stream", who=WhoActs.SITE))

    def close(self, reason: ParleyError) -> None:
        """Ends the stream, for this reason."""
        if self.closed_for is None:
            self.closed_for = reason
            while not self.outgoing.empty():
                self.outgoing.get_nowait()
            self.outgoing.put_nowait(None)


@dataclass(eq=False, slots=True)
class _Conducted:
    """A run with what performs its arithmetic."""

    run: Run
    arithmetic: Arithmetic
    blobs: BlobStore
    watchers: set[asyncio.Event] = field(default_factory=set)


class Conductor:
    """The coordinator without its sockets.

    Args:
        folder: Where payloads lie.
        store: The durable memory; used from one thread of ours.
        me: The coordinator's identity.
    """

    def __init__(self, folder: Path, store: Store, me: CoordinatorIdentity) -> None:
        self._folder = folder
        self._store = store
        self._me = me
        self._root = identity.RootCertificate.parse(me.root_certificate).public_key
        self._members = {member.serial: member for member in store.members()}
        self._revocations = max(store.revocations() or me.revocations, me.revocations, key=lambda each: each.version)
        self._peers: dict[str, Peer] = {}
        self._presence: dict[str, SitePresence] = {}
        self._runs: dict[str, _Conducted] = {}
        self._uploads: dict[tuple[str, bytes], Incoming] = {}
        self._newcomers: dict[str, set[asyncio.Event]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._store_thread = ThreadPoolExecutor(1, "store")
        self._sum_thread = ThreadPoolExecutor(1, "sums")
        self._incoming = BlobStore(folder / "incoming")
        self._started = time.time()

    # --------------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Takes up every job that is not over, and begins to listen for silence. Call inside the running loop."""
        for record in self._store.jobs():
            if not record.state.over:
                self._take_up(record, self._rounds_of(record.id))
        self._spawn(self._pulse())

    async def close(self) -> None:
        """Ends all streams and waits until what was being stored is stored."""
        for peer in list(self._peers.values()):
            peer.close(ParleyError("the coordinator is shutting down", fix="nothing: sites come back by themselves"))
        await asyncio.sleep(0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sum_thread.shutdown(wait=True)
        self._store_thread.shutdown(wait=True)

    def _take_up(self, record: JobRecord, history: tuple[RoundView, ...]) -> _Conducted:
        blobs = BlobStore(self._folder / "jobs" / record.id)
        job = parse(record.text, record.id)
        layout, _ = from_safetensors(blobs.get(record.initial_model))
        arithmetic = Arithmetic(job, layout, blobs, self._spool)
        conducted = _Conducted(Run(record, job, arithmetic.lengths, history), arithmetic, blobs)
        self._runs[record.id] = conducted
        return conducted

    def _spool(self, site: str) -> BlobStore:
        return BlobStore(self._folder / "spool" / site)

    def _rounds_of(self, job: str) -> tuple[RoundView, ...]:
        views: dict[int, RoundView] = {}
        for step in self._store.steps(job):
            if step.kind is StepKind.STATISTICS:
                continue
            old = views.get(step.round, RoundView(step.round, (), 0, 0.0, 0))
            views[step.round] = RoundView(
                step.round,
                step.metrics or old.metrics,
                len(step.shares) if step.kind is StepKind.TRAIN else old.sites,
                old.seconds + step.ended - step.started,
                old.bytes + sum(share.bytes for share in step.shares),
            )
        return tuple(views.values())

    # ----------------------------------------------------------------------------------------------------- members

    def member(self, certificate: bytes, statement: MembershipStatement | None, now: float) -> MembershipStatement:
        """The member that holds this TLS certificate and shows the root's statement on it.

        Raises:
            IdentityError: It is no member, or one whose membership is over or revoked.
        """
        match identity.peer_of(certificate):
            case identity.Bootstrap():
                raise IdentityError(
                    "an invitation's certificate is good for enrolment only",
                    fix="join first: parley site join INVITATION",
                    who=WhoActs.SITE,
                )
            case identity.Member() as peer:
                if statement is None:
                    raise IdentityError("the call shows no membership statement", fix="use this release of Parley")
                identity.verify_statement(statement, self._root, self._me.consortium, int(now), self._revocations)
                identity.verify_binding(peer, statement)
                return statement

    async def enrol(self, certificate: bytes, request: EnrolmentRequest) -> AsyncIterator[EnrolmentStatus]:
        """Keeps a newcomer's request and says at once that it waits, then, when it is approved, with what.

        Raises:
            IdentityError: The request is not what its invitation allows.
        """
        peer = identity.peer_of(certificate)
        if not isinstance(peer, identity.Bootstrap):
            raise IdentityError("enrolment needs an invitation's certificate", fix="run: parley site join INVITATION")
        identity.verify_request(request, peer)
        earlier = await self._in_store(lambda: self._store.enrolment(request.invitation))
        approved = self._approved(request)
        if approved is None:
            enrolment.admissible(request, earlier, tuple(self._members.values()), self._revocations)
            if earlier is None:
                await self._in_store(lambda: self._store.add_enrolment(request, time.time()))
                log.info("%s of %s asks to join as %s", request.name, request.organisation, request.role.value)
            yield EnrolmentStatus(EnrolmentState.WAITING)
            waiting = asyncio.Event()
            self._newcomers.setdefault(request.invitation, set()).add(waiting)
            try:
                while (approved := self._approved(request)) is None:
                    waiting.clear()
                    await waiting.wait()
            finally:
                self._newcomers[request.invitation].discard(waiting)
        certificate = await self._in_store(lambda: self._store.certificate(approved.serial)) or b""
        credential = Credential(certificate, approved, self._me.statement, self._revocations)
        yield EnrolmentStatus(EnrolmentState.APPROVED, credential)

    def _approved(self, request: EnrolmentRequest) -> MembershipStatement | None:
        """The membership that this very request led to, if it did."""
        key = request.protocol_key
        return next((m for m in self._members.values() if m.protocol_key == key and m.name == request.name), None)

    # -------------------------------------------------------------------------------------------------- attendance

    def arrive(self, member: MembershipStatement, hello: Hello) -> Peer:
        """Opens a site's stream; an older stream of the same site ends.

        Raises:
            RemoteProtocolError: The site speaks another version, or says that it is somebody else.
        """
        if hello.protocol != PROTOCOL:
            raise RemoteProtocolError(
                f"site {member.name} speaks version {hello.protocol} of the protocol, the coordinator {PROTOCOL}",
                fix=f"install Parley {metadata.version('parley-fl')} on both sides",
                who=WhoActs.SITE,
            )
        if hello.statement.serial != member.serial:
            raise RemoteProtocolError(f"site {member.name} presents another member's statement", who=WhoActs.SITE)
        older = self._peers.get(member.name)
        if older is not None:
            older.close(ParleyError(f"site {member.name} opened another stream", fix="run one agent per site"))
            self._left(older)
        if member.serial not in self._members:  # enrolled at an earlier coordinator, or before a lost database
            self._members[member.serial] = member
            self._spawn(self._save(lambda: self._store.add_member(member, b"", time.time())))
        peer = Peer(member, asyncio.Queue(_QUEUE), time.time())
        self._peers[member.name] = peer
        proof = identity.sign_welcome(self._me.protocol_key, hello.nonce, member.serial, self._me.statement.serial)
        peer.send(
            Welcome(
                PROTOCOL,
                metadata.version("parley-fl"),
                self._me.statement,
                proof,
                self._revocations,
                HEARTBEAT_SECONDS,
                time.time(),
            )
        )
        log.info("%s attends", member.name)
        self._note(peer, "attending")
        for conducted in list(self._runs.values()):
            if member.name in {each.name for each in conducted.run.record.roster} and not conducted.run.over:
                self._feed(conducted, SiteArrived(member.name))
        return peer

    def leave(self, peer: Peer) -> None:
        """The stream of `peer` has ended."""
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            self._left(peer)

    def _left(self, peer: Peer) -> None:
        log.info("%s went away", peer.name)
        self._note(peer, "away", connected=False)
        for conducted in list(self._runs.values()):
            if peer.name in {each.name for each in conducted.run.record.roster}:
                self._feed(conducted, SiteLeft(peer.name))

    def hear(self, peer: Peer, message: FromSite) -> None:
        """Takes in what a site says; what cannot be is answered with a refusal and changes nothing."""
        peer.heard = time.time()
        match message:
            case Heartbeat():
                return
            case Hello():
                peer.send(told("hello", RemoteProtocolError("hello is said once", who=WhoActs.SITE)))
            case _:
                self._hear_answer(peer, message)

    def _hear_answer(self, peer: Peer, message: Answer) -> None:
        try:
            conducted = self._conducted(message.job)
            self._perform(conducted, conducted.run.hear(peer.name, message, time.time()))
        except RemoteProtocolError as refused:
            log.warning("%s: %s", peer.name, refused)
            peer.send(told(f"{type(message).__name__} of job {message.job}", refused))

    def _note(self, peer: Peer, state: str, *, connected: bool = True) -> None:
        self._presence[peer.name] = SitePresence(peer.name, connected, time.time(), state)

    async def _pulse(self) -> None:
        """Says that we are here, lets silent sites go, and stores who attends: once every heartbeat."""
        while True:
            now = time.time()
            for peer in list(self._peers.values()):
                if now - peer.heard > SILENCE_SECONDS:
                    silent = ParleyError(f"nothing heard from {peer.name} for {SILENCE_SECONDS:.0f} s", who=WhoActs.SITE)
                    peer.close(silent)
                    self.leave(peer)
                else:
                    peer.send(Heartbeat())
                    self._note(peer, self._doing(peer.name))
            seen = tuple(self._presence.values())
            if seen:
                await self._insist("who attends", lambda seen=seen: self._store.set_presence(seen))  # type: ignore[misc] - the default binds this turn's value
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _doing(self, site: str) -> str:
        for conducted in self._runs.values():
            if not conducted.run.over:
                for view in conducted.run.view(time.time()).sites:
                    if view.name == site:
                        return view.state
        return "attending"

    # ---------------------------------------------------------------------------------------------------- payloads

    def download(self, member: MembershipStatement, payload: BlobRef) -> tuple[BlobStore, Callable[[int], None]]:
        """The folder of a payload that this member may have, and whom to tell of bytes sent.

        Raises:
            RemoteProtocolError: No job offers it to this member.
        """
        for conducted in self._runs.values():
            run = conducted.run
            if run.offers(payload) and any(each.serial == member.serial for each in run.record.roster):
                return conducted.blobs, lambda count, run=run: run.moved(member.name, count)  # type: ignore[misc] - as above
        if member.role is Role.OPERATOR:
            for final in self._store.models():
                if final.payload == payload:
                    return BlobStore(self._folder / "jobs" / final.job), lambda _: None
        raise RemoteProtocolError(
            f"payload {payload.hex[:12]} is not offered to {member.name}",
            fix="ask for the payload that the step names",
            who=WhoActs.SITE,
        )

    def upload(self, member: MembershipStatement, opened: UploadOpen) -> tuple[Incoming | None, Callable[[int], None]]:
        """Where to put a payload that this member may send (None: it is here already), and whom to tell of bytes.

        Raises:
            RemoteProtocolError: Nobody asked this member for it.
        """
        if member.role is Role.OPERATOR and not opened.job:
            return self._receive(member, self._incoming, opened.payload), lambda _: None
        conducted = self._conducted(opened.job)
        if not conducted.run.expects(member.name, opened.payload):
            raise RemoteProtocolError(
                f"job {opened.job} does not wait for {opened.payload.length} bytes of {member.name} now",
                fix="wait until the next step starts; if this comes back, install the same release on both sides",
                who=WhoActs.SITE,
            )
        spool = self._spool(member.name)
        return self._receive(member, spool, opened.payload), lambda count: conducted.run.moved(member.name, count)

    def _receive(self, member: MembershipStatement, blobs: BlobStore, payload: BlobRef) -> Incoming | None:
        key = (member.name, payload.digest)
        older = self._uploads.pop(key, None)
        if older is not None:
            older.pause()  # the member lost that stream and continues here
        if blobs.has(payload):
            return None
        incoming = blobs.receive(payload)
        self._uploads[key] = incoming
        return incoming

    def uploaded(self, member: MembershipStatement, incoming: Incoming) -> None:
        """The transfer is over, whole or not."""
        if self._uploads.get((member.name, incoming.ref.digest)) is incoming:
            del self._uploads[member.name, incoming.ref.digest]

    # ---------------------------------------------------------------------------------------------------- operators

    async def operate(self, member: MembershipStatement, request: OperatorRequest) -> OperatorReply:
        """Does what an operator asks.

        Raises:
            ParleyError: It was refused and nothing changed.
        """
        match request:
            case SubmitJob():
                return await self._submit(request, member.name)
            case ListJobs():
                return await self._jobs()
            case ShowJob(job):
                return await self._job_view(job)
            case StopJob(job):
                self._feed(self._conducted(job), StopAsked(member.name))
                return Done()
            case ListPending():
                return Pending(await self._in_store(self._store.pending))
            case ApproveEnrolment():
                await self._approve(request)
                return Done()
            case PublishRevocations(revocations):
                await self._revoke(revocations)
                return Done()
            case ListModels():
                return Models(tuple(_model_view(each) for each in await self._in_store(self._store.models)))
            case ShowModel(model):
                return await self._model(model)
            case ListSites():
                return Sites(tuple(self._site_view(each) for each in sorted(self._sites(), key=lambda s: s.name)))
            case _:
                assert_never(request)

    async def watch(self, job: str) -> AsyncIterator[JobView]:
        """The job now and after each change, at most ten times a second, until it is over."""
        view = await self._job_view(job)
        yield view
        conducted = self._runs.get(job)
        if conducted is None:
            return
        changed = asyncio.Event()
        conducted.watchers.add(changed)
        try:
            while not view.state.over:
                try:
                    async with asyncio.timeout(1.0):
                        await changed.wait()
                except TimeoutError:
                    pass  # a second has passed: the seconds shown have changed
                changed.clear()
                view = conducted.run.view(time.time())
                yield view
                await asyncio.sleep(0.1)
        finally:
            conducted.watchers.discard(changed)

    async def _jobs(self) -> Jobs:
        now = time.time()
        records = await self._in_store(self._store.jobs)
        live = {job: conducted.run.view(now) for job, conducted in self._runs.items()}
        return Jobs(tuple([live.get(record.id) or await self._stored_view(record) for record in records]))

    async def _job_view(self, job: str) -> JobView:
        conducted = self._runs.get(job)
        if conducted is not None:
            return conducted.run.view(time.time())
        record = await self._in_store(lambda: self._store.job(job))
        if record is None:
            raise _no_job(job)
        return await self._stored_view(record)

    async def _stored_view(self, record: JobRecord) -> JobView:
        history = await self._in_store(lambda: self._rounds_of(record.id))
        job = parse(record.text, record.id)
        return JobView(
            id=record.id,
            name=record.name,
            state=record.state,
            round=record.round,
            rounds=job.rounds.maximum,
            best_round=record.best_round,
            reason=record.reason,
            submitted=record.submitted,
            seconds=max(0.0, record.ended - (record.started or record.submitted)),
            text=record.text,
            sites=tuple(self._site_view(member) for member in record.roster),
            history=history,
        )

    async def _submit(self, request: SubmitJob, by: str) -> JobAdded:
        job = parse(request.text, "job file")
        members = {member.name: member for member in self._sites()}
        unknown = [name for name in job.cohort.sites if name not in members]
        if unknown:
            raise ConfigurationError(
                f"cohort.sites names {', '.join(unknown)}, which the consortium does not have",
                fix=f"use members: {', '.join(sorted(members)) or 'none has joined yet'}",
            )
        chosen = job.cohort.sites or tuple(sorted(members))
        if len(chosen) < job.cohort.minimum_sites:
            raise ConfigurationError(
                f"the job needs {job.cohort.minimum_sites} sites (cohort.minimum_sites), but {len(chosen)} have joined",
                fix="invite and approve more sites, or lower cohort.minimum_sites",
            )
        if not self._incoming.has(request.model):
            raise RemoteProtocolError("the initial model was not uploaded", fix="submit with: parley job submit FILE")
        from_safetensors(self._incoming.get(request.model))
        now = time.time()
        record = JobRecord(
            id=f"{job.name[:50]}-{secrets.token_hex(3)}",
            name=job.name,
            text=request.text,
            submitted=now,
            roster=tuple(members[name] for name in chosen),
            initial_model=request.model,
        )
        blobs = BlobStore(self._folder / "jobs" / record.id)
        blobs.put(self._incoming.get(request.model))
        self._incoming.drop(request.model)
        await self._in_store(lambda: self._store.add_job(record))
        log.info("%s submitted job %s", by, record.id)
        conducted = self._take_up(record, ())
        for name in chosen:
            if name in self._peers:
                self._feed(conducted, SiteArrived(name))
        return JobAdded(record.id)

    async def _approve(self, request: ApproveEnrolment) -> None:
        asked = await self._in_store(lambda: self._store.enrolment(request.invitation))
        if asked is None:
            raise IdentityError("no enrolment waits under this invitation", fix="see: parley consortium pending")
        enrolment.matches(asked, request.statement)
        now = time.time()
        identity.verify_statement(request.statement, self._root, self._me.consortium, int(now), self._revocations)
        await self._in_store(
            lambda: self._store.approve_enrolment(request.invitation, request.statement, request.certificate, now)
        )
        self._members[request.statement.serial] = request.statement
        log.info("%s is a member now", request.statement.name)
        for waiting in self._newcomers.get(request.invitation, ()):
            waiting.set()

    async def _revoke(self, revocations: RevocationList) -> None:
        identity.verify_revocations(revocations, self._root, self._me.consortium, self._revocations)
        await self._in_store(lambda: self._store.put_revocations(revocations))
        self._revocations = revocations
        for peer in list(self._peers.values()):
            if peer.member.serial in revocations.serials:
                peer.close(IdentityError(f"the membership of {peer.name} was revoked", fix="ask the administrator why"))
                self.leave(peer)
            else:
                peer.send(revocations)

    async def _model(self, name: str) -> ModelView:
        found = await self._in_store(lambda: self._store.model(name))
        if found is None:
            raise ConfigurationError(f"there is no model {name!r}", fix="see: parley model list")
        return _model_view(found)

    def _sites(self) -> tuple[MembershipStatement, ...]:
        sites = (
            member
            for member in self._members.values()
            if member.role is Role.SITE
            and member.serial not in self._revocations.serials
            and member.not_after > time.time()
        )
        newest = {member.name: member for member in sorted(sites, key=lambda each: each.not_before)}
        return tuple(newest.values())

    def _site_view(self, member: MembershipStatement) -> SiteView:
        seen = self._presence.get(member.name)
        connected = member.name in self._peers
        return SiteView(
            name=member.name,
            organisation=member.organisation,
            connected=connected,
            state=self._doing(member.name) if connected else "away",
            last_seen=seen.last_seen if seen else 0.0,
            seconds=0.0,
            bytes=0,
            trouble="" if connected else "not attending",
        )

    # ----------------------------------------------------------------------------------------------------- effects

    def _conducted(self, job: str) -> _Conducted:
        conducted = self._runs.get(job)
        if conducted is None:
            raise _no_job(job)
        return conducted

    def _feed(self, conducted: _Conducted, event: Event) -> None:
        self._perform(conducted, conducted.run.receive(event, time.time()))

    def _perform(self, conducted: _Conducted, effects: tuple[Effect, ...]) -> None:
        run = conducted.run
        for effect in effects:
            match effect:
                case Send(site, message):
                    if site in self._peers:
                        self._peers[site].send(message)
                case SetDeadline(step, attempt, seconds):
                    loop = asyncio.get_running_loop()
                    loop.call_later(seconds, self._feed, conducted, TimeUp(step, attempt))
                case Complete():
                    self._spawn(self._complete(conducted, effect))
                case Commit():
                    self._spawn(self._commit(conducted, effect))
                case SaveSite(site):
                    self._spawn(self._save(lambda site=site: self._store.set_job_site(run.id, site)))  # type: ignore[misc] - the default binds this turn's value
                case SaveState(state, reason):
                    now = time.time()
                    self._spawn(self._save(lambda s=state, r=reason: self._store.set_job_state(run.id, s, r, now)))  # type: ignore[misc] - as above
                    self._log_end(run, state, reason)
                case _:
                    assert_never(effect)
        for changed in conducted.watchers:
            changed.set()

    async def _complete(self, conducted: _Conducted, work: Complete) -> None:
        completion = await self._insist(
            f"step {work.step} of {conducted.run.id}",
            lambda: conducted.arithmetic.complete(work),
            self._sum_thread,
        )
        self._feed(conducted, Completed(work.step, work.attempt, completion))

    async def _commit(self, conducted: _Conducted, effect: Commit) -> None:
        run, record = conducted.run, effect.record
        if record.final is not None:
            text = registry.card(run.record, run.job, record, conducted.blobs)
            record = replace(record, final=replace(record.final, card=text))
        before = run.record
        await self._insist(f"step {record.step} of {run.id}", lambda: self._store.commit_step(record))
        if run.over:
            return  # stopped while the step was being stored: it counts, and the job stays stopped
        run.store(record)
        self._forget(conducted, before)
        self._feed(conducted, Committed(record.step))
        if run.over:
            self._log_end(run, run.record.state, run.record.reason)

    def _forget(self, conducted: _Conducted, before: JobRecord) -> None:
        """Drops payloads that no later step, restart or reader needs."""
        after = conducted.run.record
        needed = {after.model, after.best_model, after.initial_model, after.strategy_state, after.preparation}
        for ref in {before.model, before.best_model, before.strategy_state} - needed:
            if ref is not None:
                conducted.blobs.drop(ref)
        for member in after.roster:
            shutil.rmtree(self._folder / "spool" / member.name, ignore_errors=True)

    async def _save(self, write: Callable[[], None]) -> None:
        await self._insist("a job's state", write)

    async def _insist(self, what: str, work: Callable[[], T], thread: ThreadPoolExecutor | None = None) -> T:
        """Does `work` in a thread; what the disk or database refuses is tried again until it is taken."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await loop.run_in_executor(thread or self._store_thread, work)
            except StorageError as refused:
                log.error("cannot store %s: %s; trying again in %.0f s", what, refused, _RETRY_SECONDS)  # noqa: TRY400 - the cause stands in the message
                await asyncio.sleep(_RETRY_SECONDS)

    async def _in_store(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._store_thread, work)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the coordinator failed", exc_info=error)

    def _log_end(self, run: Run, state: JobState, reason: str) -> None:
        log.info("job %s %s%s", run.id, state.value, f": {reason}" if reason else "")


def _model_view(model: ModelRecord) -> ModelView:
    return ModelView(model.job, model.name, model.payload, model.round, model.created, model.metrics, model.card)


def _no_job(job: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"there is no running job {job!r}", fix="see: parley job list", who=WhoActs.YOU)
