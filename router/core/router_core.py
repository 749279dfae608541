"""The router's core: every request, the ledger, and placement. Pure: `handle(event, now_s=...)` returns the effects.

The core uses no asyncio, no sockets and no clock. The shell in `router.service.service` performs the effects and turns what
happens into events. The core drops events whose handle is unknown on their link, because they are stale, and gives each other
event to the part that it concerns. After each event that freed room or queued a request, waiting requests are placed.

Every action of every part returns its effects, so a failed action leaves no effects for the next event (design note 0020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from pdserve.config import RouterConfig
from pdserve.core.errors import (
    Cancelled,
    DeadlineExceeded,
    IncompatiblePeer,
    InternalBug,
    Overloaded,
    ReplicaLost,
    StaleOrder,
    UnknownWorker,
    WorkerIdTaken,
)
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.slo import DemandCounts
from pdserve.core.worker import Role, check_budget
from router.core.dispatcher import Dispatcher
from router.core.events import (
    BudgetAsked,
    ClientGone,
    CloseLink,
    DrainAsked,
    Effect,
    Effects,
    Event,
    FlipAsked,
    HeartbeatSeen,
    KvCommitted,
    LinkId,
    NoRoom,
    PrefillStarted,
    PrefixSeen,
    Refused,
    ReportBug,
    RequestFailed,
    Reserved,
    SendAlive,
    SendBudget,
    SendDrain,
    SendFlip,
    SendPrefixResync,
    SendWelcome,
    StepRows,
    Submit,
    Tick,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from router.core.fair_slots import FairSlots
from router.core.forecast import ExpectedOutputs
from router.core.handoff import Handoff, Tokens
from router.core.health import Health, Pairs
from router.core.live_request import LiveRequest, RemoteWork, RequestStory, StoryKind
from router.core.migration import Migration
from router.core.placer import Placer
from router.core.policy import BUILT_IN, Rankings
from router.core.pools import Pools, Sessions
from router.core.prefix_index import PrefixIndex
from router.core.probe_book import ProbeBook
from router.core.probes import Probes
from router.core.queue_limits import DerivedLimits, QueueLimits
from router.core.recovery import Recovery
from router.core.registry import Ledger, Registry, Worker
from router.core.request_machine import RequestEvent
from router.core.requests import Requests
from router.core.suspects import Suspects
from router.core.waiting import WaitingRequests

_E = RequestEvent
_Report = Reserved | NoRoom | Refused | PrefillStarted | KvCommitted | RequestFailed


class _Leaving(NamedTuple):
    """An order to an incarnation of a worker: to take `role` when it is empty, or to end if that is None."""

    incarnation: Incarnation
    role: Role | None


class RouterCore:
    """Holds all state of the router, and turns each event into effects."""

    def __init__(self, config: RouterConfig, model_fingerprint: str, rankings: Rankings = BUILT_IN, seed: int = 0) -> None:
        """`seed` is the only source of chance: policies that draw workers draw by it."""
        self.registry = registry = Registry(
            model_fingerprint,
            allow_mixed_quantization=config.allow_mixed_quantization,
            require_exact=config.require_exact,
        )
        self._derived = DerivedLimits(config)
        self.limits = self._derived.now()
        """The limits that hold now."""
        self._limits = QueueLimits(
            max_requests=self.limits.queued_requests,
            max_tokens=self.limits.queued_tokens,
            client_share=config.client_queue_share,
        )
        self._probe_book = book = ProbeBook(registry)
        self.prefix_index = index = PrefixIndex(self.limits.index_bytes)
        self.ledger = Ledger(registry.touch)
        self.health = Health(registry, enabled=config.eject_workers)
        self.pairs = Pairs(aside_s=config.pair_aside_s, aside_max_s=config.pair_aside_max_s)
        self.pools = Pools(registry, self.ledger)
        outputs, sessions = ExpectedOutputs(), Sessions(registry)
        self.placer = placer = Placer(
            config, registry, self.pools, outputs, self.pairs, index, self.health, sessions, rankings, seed
        )
        self.waiting = WaitingRequests(placer.kind_of)
        self.requests = requests = Requests(
            registry, self.ledger, outputs, sessions, self.waiting, self._limits, book, index, self.health
        )
        wait_s = config.recovery_wait_s
        self._dispatcher = dispatcher = Dispatcher(requests, placer, self.pools, book, recovery_wait_s=wait_s)
        self.recovery = Recovery(requests, dispatcher, self.pairs, self.health, config)
        self._migration = Migration(requests, dispatcher, placer)
        self._fair_slots = FairSlots(requests, dispatcher, placer)
        self.suspects = Suspects(requests, dispatcher, placer, wait_s=wait_s)
        self._probes = Probes(registry, requests, dispatcher, placer, self.pairs, book, enabled=config.probe_workers)
        tokens = Tokens(requests)
        handoff = Handoff(requests, dispatcher, self.recovery, self.pairs, tokens, placer.transfers, self.health)
        self._lost_s = config.heartbeat_lost_s
        self._needs_prefill = config.placement == "disaggregated"
        self._leaving: dict[WorkerId, _Leaving] = {}

        decode, prefill, any_role = Role.DECODE, Role.PREFILL, None
        self._handlers: dict[type[Any], Callable[[Any, float], Iterable[Effect]]] = {
            # Clients and time
            Submit: self._submit,
            ClientGone: self._client_gone,
            Tick: self._tick,
            # Workers
            WorkerJoined: self._worker_joined,
            WorkerLeft: self._worker_left,
            WorkerLost: self._worker_lost,
            HeartbeatSeen: self._heartbeat,
            PrefixSeen: self._prefix_seen,
            # Operators
            DrainAsked: self._drain_asked,
            FlipAsked: self._flip_asked,
            BudgetAsked: self._budget_asked,
            # Reports of workers about one request, with the role that may send them
            Reserved: partial(self._about, decode, handoff.reserved),
            NoRoom: partial(self._about, decode, handoff.no_room),
            Refused: partial(self._about, any_role, handoff.place_elsewhere),
            PrefillStarted: partial(self._about, prefill, handoff.prefill_started),
            KvCommitted: partial(self._about, decode, handoff.committed),
            RequestFailed: partial(self._about, any_role, self.recovery.work_failed),
            # Tokens
            StepRows: tokens.step,
        }
        """What follows each event."""

    @property
    def num_requests(self) -> int:
        """Count the live requests of clients."""
        return len(self.requests)

    def demand(self, *, now_s: float, uptime_s: float) -> DemandCounts:
        """Return the load since the router's start."""
        live, waiting = self.requests.of_clients(), self.waiting.unsorted()
        return self.requests.demand.snapshot(live, waiting, now_s=now_s, uptime_s=uptime_s)

    def linked(self, worker_id: WorkerId) -> Worker:
        """Return the worker that an operator names. Raises `UnknownWorker`."""
        worker = self.registry.find(worker_id)
        if worker is None:
            raise UnknownWorker(f"worker {worker_id!r} is not linked to this router", field="worker_id")
        return worker

    def stories_of(self, name: str) -> list[RequestStory]:
        """Return the stories of this request or correlation id, the newest first. Raises `UnknownRequest`."""
        return self.requests.stories_of(name)

    def handle(self, event: Event, *, now_s: float) -> list[Effect]:
        """Apply an event and return the effects, in the order in which they are to be performed.

        A Submit, DrainAsked, FlipAsked or BudgetAsked that is refused raises its error and changes nothing but the count of
        refusals. A bug is returned as an effect, after the effects of the work that was done.
        """
        action = self._handlers[type(event)](event, now_s)
        effects: list[Effect] = []
        try:
            effects.extend(action)
            if self._dispatcher.may_place:
                effects.extend(self._place(now_s))
        except Exception as exc:  # noqa: BLE001 - the shell reports it, once the effects of what was done are performed
            effects.append(ReportBug(exc))
        return effects

    def _place(self, now_s: float, *, tick: bool = False) -> Effects:
        """Place all that has room now: claimed probes first, then requests that must leave their worker, then waiting
        requests."""
        yield from self._probes.start_claimed(now_s)
        yield from self.suspects.place(now_s)
        yield from self._migration.migrate(now_s)  # who runs has waited for longer than who waits
        yield from self._dispatcher.pump(now_s, tick=tick)

    # Clients and time ----------------------------------------------------------------------------------------------

    def _submit(self, submit: Submit, now_s: float) -> Effects:
        if self.requests.get(submit.request_id) is not None:
            raise InternalBug(f"request id {submit.request_id!r} was given twice")
        if submit.deadline_s <= now_s:
            raise DeadlineExceeded("deadline_s had passed before the request could be queued")
        request = self.requests.make(submit)
        self.placer.check(request, now_s=now_s)
        shed: list[LiveRequest] = []
        if not request.leader:  # siblings come with their leader, so that a group is never half refused
            try:
                self._dispatcher.foresee(request, now_s)
                shed = self._limits.make_room(request.slo, request.new_prompt_tokens, now_s=now_s, client=request.client)
            except Overloaded:
                self.requests.demand.count_refusal(request.slo.name)
                raise
        foreseen = {"predicted_ttft_s": request.predicted_ttft_s} if request.predicted_ttft_s else {}
        request.story.note(
            now_s,
            StoryKind.QUEUED,
            prompt_tokens=len(submit.spec.prompt_ids),
            waiting=len(self.waiting),
            slo_class=submit.slo.name,
            shed=len(shed),
            **foreseen,
        )
        return self.requests.alone(request, self._accept(request, shed, now_s), now_s)

    def _accept(self, request: LiveRequest, shed: list[LiveRequest], now_s: float) -> Effects:
        for other in shed:
            yield from self.requests.alone(other, self.requests.shed(other, request.slo, now_s), now_s)
        self.recovery.bucket.admitted()
        self.requests.add(request)
        self.requests.demand.admitted(request)
        leader = self.requests.get(request.leader) if request.leader else None
        if leader is not None and request.prefix_keys:  # without keys nobody shares a block of the prompt
            if leader.kv_link is None:
                request.story.note(now_s, StoryKind.BEHIND, leader=leader.request_id)
                self.requests.wait_behind(request)
                return
            self.requests.follow(request, leader, now_s)
        yield from self._dispatcher.admit(request, now_s)

    def _client_gone(self, event: ClientGone, now_s: float) -> Effects:
        request = self.requests.get(event.request_id)
        if request is not None:
            cancelled = Cancelled(f"request {event.request_id} was cancelled")
            end = self.requests.end(request, _E.CLIENT_GONE, now_s, cancelled)
            yield from self.requests.alone(request, self._give_up(request, end, now_s), now_s)

    def _give_up(self, request: LiveRequest, end: Effects, now_s: float) -> Effects:
        self.recovery.doubt_pair(request, now_s)
        yield from end

    def _tick(self, event: Tick, now_s: float) -> Effects:
        if event.late_s:
            self.registry.forgive(event.late_s, now_s=now_s)
        for link in event.alive:
            self.registry.seen(link, now_s=now_s)
        self.placer.note_silence(now_s=now_s)
        for worker in self.registry.silent_since(now_s - self._lost_s):
            silent_s = now_s - worker.last_seen_s
            if silent_s > self._lost_s:
                error = ReplicaLost(f"{worker.name} was silent for {silent_s:.1f} s")
                yield from self._lose(worker, error, now_s, close=True)
        for request in self.requests.deadlines.passed(now_s=now_s):
            end = self.requests.expire(request, now_s)
            yield from self.requests.alone(request, self._give_up(request, end, now_s), now_s)
        self.health.look(now_s)
        if self.pairs.failures:
            self.pairs.forget({worker.hello.incarnation for worker in self.registry}, now_s=now_s)
        yield from self._probes.start_due(now_s)
        self.suspects.look(now_s)
        self._migration.look()
        yield from self._place(now_s, tick=True)  # a pair may be usable again, and a wait may be over
        if len(self.requests.waiting):
            yield from self._fair_slots.share(self.registry.of_role(Role.DECODE), now_s)

    # Workers -------------------------------------------------------------------------------------------------------

    def _worker_joined(self, event: WorkerJoined, now_s: float) -> Effects:
        hello = event.hello
        try:
            self.registry.check(hello)
            self.registry.check_id(hello, now_s=now_s, lost_s=self._lost_s)
        except (IncompatiblePeer, WorkerIdTaken) as exc:
            yield CloseLink(event.link, exc)
            return
        before = self.registry.find(hello.worker_id)
        if before is not None:
            again, lives = ReplicaLost(f"worker {hello.worker_id} dialled again"), before.hello.incarnation == hello.incarnation
            yield from self._lose(before, again, now_s, close=True, lives=lives)
        worker = self.registry.join(event.link, hello, now_s=now_s)
        self.health.joined(worker, now_s)
        self.suspects.came_back(hello.incarnation)
        self._derived.join(hello)
        self._follow_workers()
        self.prefix_index.join(event.link, hello)
        yield SendWelcome(event.link, worker.link_version)
        leaving = self._leaving.get(hello.worker_id)
        if leaving is not None and leaving.incarnation == hello.incarnation:
            yield from self._send_away(worker, leaving.role, now_s)  # its last link may have broken before the worker was told
        else:
            self._leaving.pop(hello.worker_id, None)
        yield from self._probes.start_due(now_s)

    def _follow_workers(self) -> None:
        """Let the limits follow the workers that are linked now."""
        self.limits = self._derived.now()
        self._limits.resize(max_requests=self.limits.queued_requests, max_tokens=self.limits.queued_tokens)
        self.prefix_index.set_max_bytes(self.limits.index_bytes)

    @property
    def queue_bound(self) -> int:
        """The number of requests that were refused or shed because the queue was full."""
        return self._limits.bound

    def _worker_left(self, event: WorkerLeft, now_s: float) -> Effects:
        worker = self.registry.get(event.link)
        if worker is not None:
            yield from self._lose(worker, ReplicaLost(f"the link of {worker.name} broke"), now_s, close=False)

    def _worker_lost(self, event: WorkerLost, now_s: float) -> Effects:
        worker = self.registry.get(event.link)
        if worker is not None:
            error = ReplicaLost(f"{worker.name} gave itself up: {event.message}")
            yield from self._lose(worker, error, now_s, close=True)

    def _lose(self, worker: Worker, error: ReplicaLost, now_s: float, *, close: bool, lives: bool = False) -> Effects:
        self.registry.leave(worker.link)
        if lives:
            self.suspects.link_broke(worker)
        else:
            self.suspects.worker_died(worker)
        self.prefix_index.leave(worker.link)
        self.health.left(worker, now_s)
        self._derived.leave(worker.hello)
        self._follow_workers()
        if close:
            yield CloseLink(worker.link, error)
        for work in list(worker.work.values()):
            yield from self.requests.alone(work.request, self.recovery.worker_lost(work, error, now_s), now_s)

    def _heartbeat(self, event: HeartbeatSeen, now_s: float) -> Effects:
        worker = self.registry.seen(event.link, now_s=now_s)
        if worker is not None:
            self.registry.saw_heartbeat(worker, event.load)
            if event.load.draining:
                self.health.drains(worker, now_s)
            self.prefix_index.beat(event.link)
            yield from self._ask_keys(self.prefix_index.turn(now_s))
            if worker.stuck:
                stalled_s = event.load.engine_stalled_s
                error = ReplicaLost(f"the engine of {worker.name} has made no step for {stalled_s:.1f} s while work waits")
                yield from self._lose(worker, error, now_s, close=True)
                return
            yield SendAlive(event.link)

    def _prefix_seen(self, event: PrefixSeen, now_s: float) -> Effects:
        worker = self.registry.seen(event.link, now_s=now_s)
        if worker is not None:
            try:
                yield from self._ask_keys(self.prefix_index.apply(event.link, event.delta, now_s=now_s))
            except ReplicaLost as exc:
                yield from self._lose(worker, exc, now_s, close=True)

    def _ask_keys(self, link: LinkId | None) -> Effects:
        if link is not None:
            yield SendPrefixResync(link)

    def _drain_asked(self, event: DrainAsked, now_s: float) -> Effects:
        worker = self.linked(event.worker_id)
        if event.spare_last:
            self.registry.check_drain(worker)
        return self._send_away(worker, None, now_s)

    def _flip_asked(self, event: FlipAsked, now_s: float) -> Effects:
        worker = self.linked(event.worker_id)
        now = worker.hello.incarnation
        if event.incarnation not in (None, now):
            raise StaleOrder(f"{worker.name} has incarnation {now:x} now, not {event.incarnation:x}")
        self.registry.check_flip(worker, event.role, needs_prefill=self._needs_prefill)
        return self._send_away(worker, event.role, now_s)

    def _budget_asked(self, event: BudgetAsked, now_s: float) -> Iterable[Effect]:
        worker = self.linked(event.worker_id)
        check_budget(worker.hello, event.max_num_batched_tokens, event.max_num_seqs)
        return (SendBudget(worker.link, event.max_num_batched_tokens, event.max_num_seqs),)

    def _send_away(self, worker: Worker, role: Role | None, now_s: float) -> Effects:
        """Let a worker become empty, and then come back in `role`. None: the worker ends. Its requests move as far as other
        workers have room, and it finishes the rest."""
        self._leaving[worker.hello.worker_id] = _Leaving(worker.hello.incarnation, role)
        self.health.drains(worker, now_s)
        yield SendDrain(worker.link) if role is None else SendFlip(worker.link, role)
        self._migration.look()
        yield from self._migration.migrate(now_s)

    def _about(
        self, role: Role | None, action: Callable[[RemoteWork, Any, float], Effects], event: _Report, now_s: float
    ) -> Effects:
        """Handle a report about one request. Nothing happens when the link or the handle is unknown or has ended. A report of
        the wrong role fails the request."""
        worker = self.registry.seen(event.link, now_s=now_s)
        work = worker.work.get(event.handle) if worker is not None else None
        if work is not None:
            try:
                if role is not None and work.role is not role:
                    raise InternalBug(f"a {work.role.value} worker sent what only a {role.value} worker reports")
                yield from action(work, event, now_s)
            except Exception as exc:  # noqa: BLE001 - `Requests.alone` would cost two generators for each report
                yield from self.requests.contain(work.request, exc, now_s)

    def check_invariants(self) -> None:
        """Assert that all books agree. This walks over all requests and workers."""
        self.requests.check_invariants()
        self.pairs.check_invariants()
        self.suspects.check_invariants()
        self.recovery.bucket.check_invariants()
        self._probes.check_invariants()
        self.pools.check_invariants()
        self._probe_book.check_invariants()
        self.health.check_invariants()
