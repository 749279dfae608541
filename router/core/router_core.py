"""The router's core: every request, the ledger, and placement. Pure: `handle(event, now_s=...)` returns the effects.

The core uses no asyncio, no sockets and no clock. The shell in `router.service.service` performs the effects and turns what
happens into events. The core drops events whose handle is unknown on their link, because they are stale, and gives each other
event to the part that it concerns. After each event that freed room or queued a request, waiting requests are placed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.config import RouterConfig
from pdserve.core.errors import (
    Cancelled,
    DeadlineExceeded,
    IncompatiblePeer,
    InternalBug,
    ReplicaLost,
    UnknownWorker,
    WorkerIdTaken,
)
from pdserve.core.ids import Handle, Incarnation, RequestId, WorkerId
from pdserve.core.request_machine import RequestEvent, RequestState
from router.core.dispatcher import Dispatcher
from router.core.events import (
    ClientGone,
    CloseLink,
    DrainAsked,
    Effect,
    Event,
    HeartbeatSeen,
    KvCommitted,
    LinkId,
    NoRoom,
    PrefillStarted,
    RequestFailed,
    Reserved,
    Role,
    SendAlive,
    SendDrain,
    SendWelcome,
    StepRows,
    Submit,
    Tick,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from router.core.handoff import Handoff
from router.core.live_request import RemoteWork
from router.core.pairs import Pairs
from router.core.placer import Placer
from router.core.policy.ranking import BUILT_IN, Rankings
from router.core.probes import Probes
from router.core.recovery import Recovery
from router.core.registry import Registry, Worker
from router.core.requests import Requests
from router.core.story import RequestStory, StoryKind
from router.core.tokens import Tokens
from router.core.waiting import WaitingRequests

_S, _E = RequestState, RequestEvent


class RouterCore:
    """Holds all state of the router, and turns each event into effects."""

    def __init__(self, config: RouterConfig, model_fingerprint: str, rankings: Rankings = BUILT_IN) -> None:
        self.registry = Registry(model_fingerprint, allow_mixed_quantization=config.allow_mixed_quantization)
        self.waiting = WaitingRequests(max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens)
        self.requests = Requests(self.registry, self.waiting)
        self.ledger = self.requests.ledger
        self.pairs = Pairs(aside_s=config.pair_aside_s, aside_max_s=config.pair_aside_max_s)
        self.placer = Placer(config, self.registry, self.ledger, self.requests.outputs, self.pairs, rankings)
        self._dispatcher = Dispatcher(self.requests, self.placer, recovery_wait_s=config.recovery_wait_s)
        self.recovery = Recovery(self.requests, self._dispatcher, self.pairs, config)
        self._handoff = Handoff(self.requests, self._dispatcher, self.recovery, self.pairs)
        self._tokens = Tokens(self.requests)
        self._probes = Probes(
            self.registry, self.requests, self._dispatcher, self.placer, self.pairs, enabled=config.probe_workers
        )
        self._lost_s = config.heartbeat_lost_s
        self._drained: dict[WorkerId, Incarnation] = {}
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
            Submit: self._submit,
            ClientGone: self._client_gone,
            Tick: self._tick,
            WorkerJoined: self._worker_joined,
            WorkerLeft: self._worker_left,
            WorkerLost: self._worker_lost,
            HeartbeatSeen: self._heartbeat,
            DrainAsked: self._drain_asked,
            Reserved: self._reserved,
            NoRoom: self._no_room,
            PrefillStarted: self._prefill_started,
            KvCommitted: self._kv_committed,
            RequestFailed: self._request_failed,
            StepRows: self._step_rows,
        }

    @property
    def num_requests(self) -> int:
        """Count the live requests of clients."""
        return len(self.requests)

    def is_live(self, request_id: RequestId) -> bool:
        """Tell whether the request has been accepted and has not ended."""
        return self.requests.get(request_id) is not None

    def stories_of(self, name: str) -> list[RequestStory]:
        """Return the stories of this request or correlation id, the newest first. Raises `UnknownRequest`."""
        return self.requests.stories_of(name)

    def handle(self, event: Event, *, now_s: float) -> list[Effect]:
        """Apply an event and return the effects, in the order in which they are to be performed. A Submit or DrainAsked that is
        refused raises its error and changes nothing."""
        self._handlers[type(event)](event, now_s)
        requests = self.requests
        if requests.changed:
            self._probes.start_claimed(now_s)
            self._dispatcher.pump(now_s, recheck=requests.recheck)
            requests.changed = requests.recheck = False  # requests that the pump itself ended held no room that others wait for
        effects, requests.effects = requests.effects, []
        return effects

    # Clients and time ----------------------------------------------------------------------------------------------

    def _submit(self, submit: Submit, now_s: float) -> None:
        if self.is_live(submit.request_id):
            raise InternalBug(f"request id {submit.request_id!r} was given twice")
        if submit.deadline_s <= now_s:
            raise DeadlineExceeded("deadline_s had passed before the request could be queued")
        request = self.requests.make(submit)
        self.placer.check(request, now_s=now_s)
        self.waiting.check_room(len(submit.prompt_ids), now_s=now_s)
        self.recovery.bucket.admitted()
        self.requests.add(request)
        request.story.note(now_s, StoryKind.QUEUED, prompt_tokens=len(submit.prompt_ids), waiting=len(self.waiting))
        self.requests.wait(request)

    def _client_gone(self, event: ClientGone, now_s: float) -> None:
        request = self.requests.get(event.request_id)
        if request is not None:
            self.recovery.doubt_pair(request, now_s)
            self.requests.end(request, _E.CLIENT_GONE, now_s, Cancelled(f"request {event.request_id} was cancelled"))

    def _tick(self, event: Tick, now_s: float) -> None:
        for worker in self.registry:
            silent_s = now_s - worker.last_seen_s
            if silent_s > self._lost_s:
                self._lose(worker, ReplicaLost(f"{worker.name} was silent for {silent_s:.1f} s"), now_s, close=True)
        for request in self.requests.deadlines.passed(now_s=now_s):
            self.recovery.doubt_pair(request, now_s)
            self.requests.expire(request, now_s)
        if len(self.pairs):
            self.pairs.forget({worker.hello.incarnation for worker in self.registry}, now_s=now_s)
        self._probes.start_due(now_s)
        self.requests.changed = self.requests.recheck = True  # a pair may be usable again, and a wait may be over

    # Workers -------------------------------------------------------------------------------------------------------

    def _worker_joined(self, event: WorkerJoined, now_s: float) -> None:
        hello = event.hello
        try:
            self.registry.check(hello)
            self.registry.check_id(hello, now_s=now_s, lost_s=self._lost_s)
        except (IncompatiblePeer, WorkerIdTaken) as exc:
            self.requests.effects.append(CloseLink(event.link, exc))
            return
        before = self.registry.find(hello.worker_id)
        if before is not None:
            self._lose(before, ReplicaLost(f"worker {hello.worker_id} dialled again"), now_s, close=True)
        worker = self.registry.join(event.link, hello, now_s=now_s)
        self.requests.effects.append(SendWelcome(event.link))
        if self._drained.get(hello.worker_id) == hello.incarnation:
            self._drain(worker)  # its last link may have broken before the worker was told
        else:
            self._drained.pop(hello.worker_id, None)
        self._probes.start_due(now_s)
        self.requests.changed = self.requests.recheck = True

    def _worker_left(self, event: WorkerLeft, now_s: float) -> None:
        worker = self.registry.get(event.link)
        if worker is not None:
            self._lose(worker, ReplicaLost(f"the link of {worker.name} broke"), now_s, close=False)

    def _worker_lost(self, event: WorkerLost, now_s: float) -> None:
        worker = self.registry.get(event.link)
        if worker is not None:
            self._lose(worker, ReplicaLost(f"{worker.name} gave itself up: {event.message}"), now_s, close=True)

    def _lose(self, worker: Worker, error: ReplicaLost, now_s: float, *, close: bool) -> None:
        self.registry.leave(worker.link)
        if close:
            self.requests.effects.append(CloseLink(worker.link, error))
        for work in list(worker.work.values()):
            self.recovery.worker_lost(work, error, now_s)
        self.requests.changed = True

    def _heartbeat(self, event: HeartbeatSeen, now_s: float) -> None:
        worker = self._seen(event.link, now_s)
        if worker is not None:
            worker.saw_heartbeat(event.load)
            if worker.stuck:
                stalled_s = event.load.engine_stalled_s
                error = ReplicaLost(f"the engine of {worker.name} has made no step for {stalled_s:.1f} s while work waits")
                self._lose(worker, error, now_s, close=True)
                return
            self.requests.effects.append(SendAlive(event.link))
            self.requests.changed = True

    def _drain_asked(self, event: DrainAsked, now_s: float) -> None:
        worker = self.registry.find(event.worker_id)
        if worker is None:
            raise UnknownWorker(f"worker {event.worker_id!r} is not linked to this router", field="worker_id")
        self._drained[worker.hello.worker_id] = worker.hello.incarnation
        self._drain(worker)

    def _drain(self, worker: Worker) -> None:
        worker.draining = True
        self.requests.effects.append(SendDrain(worker.link))

    def _seen(self, link: LinkId, now_s: float) -> Worker | None:
        worker = self.registry.get(link)
        if worker is not None:
            worker.last_seen_s = now_s
        return worker

    # Reports of workers about one request -----------------------------------------------------------------------------

    def _reserved(self, event: Reserved, now_s: float) -> None:
        work = self._work(event.link, event.handle, Role.DECODE, now_s)
        if work is not None:
            self._handoff.reserved(work, now_s)

    def _no_room(self, event: NoRoom, now_s: float) -> None:
        work = self._work(event.link, event.handle, Role.DECODE, now_s)
        if work is not None:
            self._handoff.no_room(work, event, now_s)

    def _prefill_started(self, event: PrefillStarted, now_s: float) -> None:
        work = self._work(event.link, event.handle, Role.PREFILL, now_s)
        if work is not None:
            self._handoff.prefill_started(work, event, now_s)

    def _kv_committed(self, event: KvCommitted, now_s: float) -> None:
        work = self._work(event.link, event.handle, Role.DECODE, now_s)
        if work is not None:
            self._handoff.committed(work, event, now_s)
            if work.request.machine.state is _S.DECODING:
                self._tokens.start_decoding(work.request, now_s)

    def _request_failed(self, event: RequestFailed, now_s: float) -> None:
        work = self._work(event.link, event.handle, None, now_s)
        if work is not None:
            self.recovery.work_failed(work, event, now_s)

    def _step_rows(self, event: StepRows, now_s: float) -> None:
        worker = self._seen(event.link, now_s)
        if worker is not None:
            self._tokens.step(worker, event, now_s)

    def _work(self, link: LinkId, handle: Handle, role: Role | None, now_s: float) -> RemoteWork | None:
        """Return the work that a report is about. None: its link or handle is unknown or has ended. A report of the wrong role
        fails the request."""
        worker = self._seen(link, now_s)
        work = worker.work.get(handle) if worker is not None else None
        if work is not None and role is not None and work.role is not role:
            error = InternalBug(f"a {work.role.value} worker sent what only a {role.value} worker reports")
            self.requests.break_off(work.request, error, now_s)
            return None
        return work

    def check_invariants(self) -> None:
        """Assert that all books agree. This walks over all requests and workers."""
        self.requests.check_invariants()
        self.pairs.check_invariants()
        self.recovery.bucket.check_invariants()
        self._probes.check_invariants()
        assert not self.requests.changed
        assert not self.requests.recheck
        assert not self.requests.effects
