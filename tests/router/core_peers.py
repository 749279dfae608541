"""Workers as the router's core sees them, played by a test: no sockets, every message delivered when the test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.config import RouterConfig
from pdserve.core.block_hash import PrefixDelta
from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import PdserveError, TransferFailed, Unavailable
from pdserve.core.ids import Handle, Incarnation, LeaseId, RequestId, WorkerId
from pdserve.core.report import Report
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import Placement, SamplingParams
from pdserve.core.slo import DEFAULT_CLASS, SloClass
from pdserve.core.speculation import DraftCounts
from pdserve.core.structured.constraint import Constraint
from pdserve.core.worker import LINK_VERSIONS, PEER_VERSIONS, Role, WorkerHello, WorkerLoad, used_features
from pdserve.rpc.codec import drafts_to_fields
from pdserve.rpc.v1 import common_pb2, link_pb2
from router.core import events as ev
from router.core.router_core import RouterCore
from router.service.policies import rankings_of
from sim.faults.recorded import MemoryNotes

FINGERPRINT = "model"


def hello(worker_id: str, role: Role, **changes: object) -> WorkerHello:
    values: dict[str, object] = {
        "worker_id": WorkerId(worker_id),
        "role": role,
        "incarnation": Incarnation(1),
        "address": "127.0.0.1:1",
        "model_fingerprint": FINGERPRINT,
        "block_size": 4,
        "num_blocks": 16,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "dtype": "bfloat16",
        "kv_bytes_per_token": 8,
        "link_version": LINK_VERSIONS.newest,
        "peer_version": PEER_VERSIONS.newest,
        "numerics": "one",
    }
    return WorkerHello(**(values | changes))  # type: ignore[arg-type]


@dataclass
class Job:
    """One handle at a worker: what it says next."""

    work: ev.Work
    runs: bool
    attached: bool = False
    committed: bool = False
    next_index: int = 0
    lender: Incarnation | None = None

    def __post_init__(self) -> None:
        self.next_index = len(self.work.resumed)


@dataclass
class Peer:
    """One link. `upward` is what it said and the router has not heard yet."""

    link: ev.LinkId
    hello: WorkerHello
    jobs: dict[Handle, Job] = field(default_factory=dict)
    upward: deque[ev.Event] = field(default_factory=deque)
    past: list[Handle] = field(default_factory=list)
    refuse: int = 0
    slots: int = 0
    """The sequences that it runs at most, once an operator has said so. 0: as in its hello."""
    unreadable: set[Incarnation] = field(default_factory=set)
    """Prefill workers whose KV does not reach this one."""
    draining: bool = False
    next_role: Role | None = None
    """The role in which it comes back when it has drained. None: it ends."""
    refused: list[Handle] = field(default_factory=list)
    attached_to: list[Incarnation] = field(default_factory=list)
    """Whose KV it was sent to read."""
    cached_tokens: int | None = None
    """The tokens of each prompt that it says to have. None: it does not tell."""
    drafts: DraftCounts | None = None
    """The drafts that it tells of each job with its last token. None: it drafts nothing."""
    fault: Callable[[Job], PdserveError | None] = lambda job: None
    """Returns the error with which it gives up a job instead of its next token. None: the token comes."""

    def obey(self, effect: ev.Effect) -> None:
        match effect:
            case ev.SendBudget(max_num_seqs=seqs):
                self.slots = seqs or self.slots
            case ev.SendDrain():
                self.draining, self.next_role = True, None
            case ev.SendFlip(role=role):
                self.draining, self.next_role = True, role
            case ev.SendBind(work=work) | ev.SendPrefill(work=work) if self.draining and self.hello.link_version:
                self.refused.append(work.handle)
                self.upward.append(ev.Refused(self.link, work.handle))
            case ev.SendBind(work=work) | ev.SendPrefill(work=work) if self.draining:
                self.upward.append(ev.RequestFailed(self.link, work.handle, Unavailable("draining")))
            case ev.SendBind(work=work, local_prefill=local):
                self.past.append(work.handle)
                assert not (work.resumed and used_features(work.spec, self.hello.unresumed)), "it cannot go on from there"
                longest = len(work.spec.prompt_ids) + work.spec.sampling.max_tokens
                assert longest <= self.hello.max_model_len, "its answer would be cut short"
                if self.refuse or len(self.jobs) >= (self.slots or self.hello.max_num_seqs):
                    self.refuse = max(0, self.refuse - 1)
                    self.upward.append(ev.NoRoom(self.link, work.handle, 1))
                else:
                    self.jobs[work.handle] = Job(work, runs=local)
                    self.upward.append(ev.Reserved(self.link, work.handle, self.cached_tokens if local else None))
            case ev.SendPrefill(work=work):
                self.past.append(work.handle)
                assert len(work.spec.prompt_ids) + len(work.resumed) < self.hello.max_model_len, "it would be refused"
                self.jobs[work.handle] = Job(work, runs=True)
                lease = LeaseId(self.hello.incarnation, work.handle)
                self.upward.append(ev.PrefillStarted(self.link, work.handle, lease, b"ticket", self.cached_tokens))
            case ev.SendAttach(handle=handle, lease_id=lease_id) if lease_id.incarnation in self.unreadable:
                if self.jobs.pop(handle, None) is not None:
                    self.upward.append(ev.RequestFailed(self.link, handle, TransferFailed("no route"), pair_failed=True))
            case ev.SendAttach(handle=handle):
                self.attached_to.append(lease_id.incarnation)
                if (job := self.jobs.get(handle)) is not None and job.work.spec.sampling.max_tokens > len(job.work.resumed) + 1:
                    job.attached = job.runs = True
                    job.lender = lease_id.incarnation
                    job.next_index = len(job.work.resumed) + 1
            case ev.SendCancel(handle=handle):
                self.jobs.pop(handle, None)

    def progress(self) -> None:
        """One engine step: a token for every job that runs; a commit comes before the first token of a handoff."""
        rows = []
        for handle, job in list(self.jobs.items()):
            if not job.runs:
                continue
            if (error := self.fault(job)) is not None:
                del self.jobs[handle]
                self.upward.append(ev.RequestFailed(self.link, handle, error))
                continue
            if job.attached and not job.committed:
                job.committed = True
                self.upward.append(ev.KvCommitted(self.link, handle, 100, 0.1, 0.1, 0.1))
                continue
            rows.append(row(handle, job.next_index, last=job.next_index + 1 >= job.work.spec.sampling.max_tokens))
            job.next_index += 1
            if self.drafts is not None and rows[-1].finish_reason:
                rows[-1].speculation.CopyFrom(common_pb2.DraftCounts(**drafts_to_fields(self.drafts)))
            if self.hello.role is Role.PREFILL or rows[-1].finish_reason:
                del self.jobs[handle]
        if rows:
            self.upward.append(ev.StepRows(self.link, rows))


def row(handle: int, index: int, *, last: bool = False, ids: list[int] | None = None) -> link_pb2.StepRow:
    finish = common_pb2.FINISH_REASON_LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED
    ids = [index] if ids is None else ids  # the oracle: the token of an index is the index, whoever draws it
    return link_pb2.StepRow(handle=handle, index=index, ids=ids, text=f"t{index} ".encode(), finish_reason=finish)


@dataclass
class Outcome:
    emitted: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    error: PdserveError | None = None
    report: Report | None = None


class Stage:
    """A core, its peers and what its clients saw."""

    def __init__(self, **config: object) -> None:
        settings = RouterConfig(**({"probe_workers": False} | config))  # type: ignore[arg-type]
        self.core = RouterCore(settings, FINGERPRINT, rankings_of(settings, lambda role, reason: None))
        self.notes = MemoryNotes(settings, FINGERPRINT)
        self.replayable = True
        """False: a test has changed the core by hand or breaks it, which no recording tells."""
        self.now_s = 0.0
        self.peers: dict[ev.LinkId, Peer] = {}
        self.outcomes: dict[RequestId, Outcome] = {}
        self.effects: list[ev.Effect] = []
        self.placed: dict[Handle, tuple[RequestId, int]] = {}
        """The request that each Bind and Prefill was sent for, and the number of its try: the attempts and moves."""
        self._links = 0
        self._hellos: dict[Incarnation, WorkerHello] = {}
        self._prefills: dict[tuple[Incarnation, int], ev.Work] = {}

    def tell(self, event: ev.Event) -> list[ev.Effect]:
        try:
            effects = self.core.handle(event, now_s=self.now_s)
        except Exception as exc:
            self.notes.note(self.now_s, event, exc)
            raise
        self.notes.note(self.now_s, event, effects)
        for effect in effects:
            if isinstance(effect, ev.SendBind | ev.SendPrefill):
                worker = self.core.registry.get(effect.link)
                assert worker is None or not worker.draining, "placed on a draining worker"
                self._note(effect)
            self._perform(effect)
        self.effects.extend(effects)
        return effects

    def _note(self, effect: ev.SendBind | ev.SendPrefill) -> None:
        """The command does not name the attempt. Work that the same event has withdrawn again is known by its command alone."""
        worker = self.core.registry.get(effect.link)
        work = None if worker is None else worker.work.get(effect.work.handle)
        attempt = 1 + bool(effect.work.resumed) if work is None else work.request.tries
        self.placed[effect.work.handle] = (effect.work.request_id, attempt)

    def request_of(self, effect: ev.SendBind | ev.SendPrefill) -> RequestId:
        return self.placed[effect.work.handle][0]

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.EmitDelta(request_id=request_id, delta=delta):
                outcome = self.outcomes[request_id]
                assert not outcome.ended, "a token after the end"
                assert delta.index == len(outcome.emitted), "a gap or a duplicate"
                outcome.emitted.extend(delta.ids)
                assert outcome.emitted == list(range(len(outcome.emitted))), "not the oracle's tokens"
            case ev.EmitDone(request_id=request_id, report=report):
                self.outcomes[request_id].ended.append("done")
                self.outcomes[request_id].report = report
            case ev.EmitFailed(request_id=request_id, error=error, report=report):
                outcome = self.outcomes[request_id]
                outcome.ended.append(error.code.value)
                outcome.error, outcome.report = error, report
            case ev.CloseLink(link=link):
                self.peers.pop(link, None)
            case ev.SendWelcome():
                pass
            case ev.ReportBug(bug=bug):
                raise bug
            case ev.SendAttach(link=link, handle=handle, lease_id=lease_id):
                self._check_attach(self.peers[link], handle, lease_id)
                self.peers[link].obey(effect)
            case ev.SendBind() | ev.SendPrefill() if self.request_of(effect) not in self.outcomes:
                assert self.request_of(effect).startswith("probe-")
                self.peers[effect.link].obey(effect)
            case _:
                if isinstance(effect, ev.SendBind | ev.SendPrefill):
                    self._check_replay(effect.work)
                if isinstance(effect, ev.SendPrefill) and effect.link in self.peers:
                    incarnation = self.peers[effect.link].hello.incarnation
                    self._prefills[incarnation, effect.work.handle] = effect.work
                if effect.link in self.peers:
                    self.peers[effect.link].obey(effect)

    def _check_attach(self, peer: Peer, handle: Handle, lease_id: LeaseId) -> None:
        """Nobody is sent to read the KV of another request or attempt, or of a worker whose protocol it does not speak."""
        lender = self._hellos[lease_id.incarnation]
        assert lender.peer_versions.common(peer.hello.peer_versions) is not None, "paired without a common version"
        assert lender.model_digest == peer.hello.model_digest, "paired with other weights"
        job, lent = peer.jobs.get(handle), self._prefills.get((lease_id.incarnation, lease_id.counter))
        if job is not None and lent is not None:
            assert self.placed[handle] == self.placed[lent.handle]
            assert (job.work.spec, job.work.resumed) == (lent.spec, lent.resumed)

    def _check_replay(self, work: ev.Work) -> None:
        """A worker is told of the prompt and of exactly what the client has."""
        request_id, attempt = self.placed[work.handle]
        emitted = self.outcomes[request_id].emitted
        assert list(work.resumed) == emitted[: len(work.resumed)]
        assert len(emitted) < work.spec.sampling.max_tokens
        assert bool(work.resumed) <= (attempt > 1)

    def join(self, worker_id: str, role: Role, **changes: object) -> Peer:
        self._links += 1
        link = ev.LinkId(self._links)
        changes.setdefault("incarnation", Incarnation(1_000_000 + self._links))
        peer = self.peers[link] = Peer(link, hello(worker_id, role, **changes))
        peer.draining = peer.hello.draining
        self._hellos[peer.hello.incarnation] = peer.hello
        self.tell(ev.WorkerJoined(link, peer.hello))
        return peer

    @property
    def joins(self) -> int:
        """The number of links that there have been."""
        return self._links

    def leave(self, peer: Peer) -> None:
        self.peers.pop(peer.link, None)
        self.tell(ev.WorkerLeft(peer.link))

    def flipped(self, peer: Peer) -> Peer:
        """A worker that has drained ends its life and begins the next one."""
        assert peer.next_role is not None
        assert not peer.jobs, "a flip is over when nothing is left"
        self.leave(peer)
        return self.join(peer.hello.worker_id, peer.next_role, flips=peer.hello.flips + 1, numerics=peer.hello.numerics)

    def share(self, peer: Peer) -> None:
        """A worker tells that it shares blocks, and has none yet."""
        self.tell(ev.PrefixSeen(peer.link, PrefixDelta(1, (), (), 0, full=True)))

    def heartbeat(self, peer: Peer, *, free: int = 16, queued_tokens: int = 0, last: Handle | None = None) -> None:
        """`last`: the last command that its counts include; without it, all that it was sent."""
        counts = BlockCounts(16, free, 0, 16 - free, 0)
        last = Handle(max(peer.past, default=0)) if last is None else last
        load = WorkerLoad(counts, queued_tokens=queued_tokens, last_handle=last, max_num_seqs=peer.slots)
        self.tell(ev.HeartbeatSeen(peer.link, load))

    def submit(
        self,
        name: str,
        *,
        prompt_len: int = 4,
        max_tokens: int = 3,
        deadline_s: float = 100.0,
        priority: int = 0,
        placement: Placement | None = None,
        slo: SloClass = DEFAULT_CLASS,
        session_id: str = "",
        leader: str = "",
        keys: tuple[int, ...] = (),
        client: tuple[str, ...] = (),
        constraint: Constraint | None = None,
    ) -> Outcome:
        """Raises what the core raises. `keys` are those of the prompt's full blocks."""
        request_id = RequestId(name)
        outcome = Outcome()
        before = self.outcomes.get(request_id)
        self.outcomes[request_id] = outcome
        submit = ev.Submit(
            request_id=request_id,
            spec=RequestSpec(tuple(range(prompt_len)), SamplingParams(max_tokens=max_tokens), priority, constraint=constraint),
            arrived_s=self.now_s,
            deadline_s=self.now_s + deadline_s,
            placement=placement,
            slo=slo,
            session_id=session_id,
            prefix_keys=keys,
            leader=RequestId(leader),
            client=client,
        )
        try:
            self.tell(submit)
        except PdserveError:
            del self.outcomes[request_id]
            if before is not None:
                self.outcomes[request_id] = before
            raise
        return outcome

    def deliver(self, peer: Peer, count: int = 1) -> None:
        """The router hears the oldest `count` messages of a link."""
        for _ in range(count):
            if peer.upward:
                self.tell(peer.upward.popleft())

    def run(self, steps: int = 200) -> None:
        """Everybody works and is heard until nothing moves."""
        for _ in range(steps):
            before = len(self.effects)
            moved = False
            for peer in list(self.peers.values()):
                peer.progress()
                moved = moved or bool(peer.upward)
                self.deliver(peer, len(peer.upward))
            if not moved and len(self.effects) == before:
                return

    def assert_empty(self) -> None:
        """Nothing is left: no request, ledger entry, remote work; every request ended once. A replay decides the same."""
        assert not self.replayable or not self.notes.problems(), self.notes.problems()
        self.core.check_invariants()
        self.core.prefix_index.check_invariants()
        assert self.core.num_requests == 0
        assert len(self.core.ledger) == 0
        assert len(self.core.waiting) == 0
        for peer in self.peers.values():
            assert not peer.jobs, f"{peer.hello.worker_id} still holds {list(peer.jobs)}"
        for request_id, outcome in self.outcomes.items():
            assert len(outcome.ended) == 1, f"{request_id} ended as {outcome.ended}"
            if self.replayable:
                self._check_story(request_id, outcome)

    def _check_story(self, request_id: RequestId, outcome: Outcome) -> None:
        """Check that a story is whole: it begins and ends once, in the order of time, and agrees with the report."""
        story = self.core.requests.stories.get(request_id)
        if story is None or outcome.report is None:
            return  # many requests have ended since
        kinds = [entry.kind for entry in story.entries]
        assert (kinds[0], kinds[-1], kinds.count("queued"), kinds.count("ended")) == ("queued", "ended", 1, 1)
        times = [entry.at_s for entry in story.entries]
        assert times == sorted(times)
        if not story.left_out:
            assert kinds.count("retried") == outcome.report.attempts - 1
            assert kinds.count("placed") + kinds.count("rebound") == outcome.report.binds
            assert kinds.count("rebound") == outcome.report.rebinds
            assert kinds.count("first_token") == bool(outcome.emitted)
