"""The router's core: every request, the ledger, placement. Pure: `handle(event, now_s=...)` returns what is to be done.

No asyncio, no sockets, no clock: the shell in `router.service` performs the effects and feeds back what happens. Two
rules hold everywhere. A handle that is unknown on its link is stale and is dropped at the door. Entering a terminal
state cancels the work that still runs remotely, returns the ledger entry and emits one outcome, each exactly once,
because all three happen in `_end`, which also forgets the request.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Final

from pdserve.config import RouterConfig
from pdserve.core.errors import (
    Cancelled,
    DeadlineExceeded,
    ErrorCode,
    IncompatiblePeer,
    InternalBug,
    InvalidRequest,
    PdserveError,
    ReplicaLost,
    Unavailable,
)
from pdserve.core.ids import Handle, RequestId
from pdserve.core.request import RequestEvent, RequestState
from pdserve.core.sampling import Placement
from router.api import Delta
from router.events import (
    ClientGone,
    CloseLink,
    Effect,
    EmitDelta,
    EmitDone,
    EmitFailed,
    Event,
    HeartbeatSeen,
    KvCommitted,
    LinkId,
    NoRoom,
    PrefillStarted,
    RequestFailed,
    Reserved,
    Role,
    Row,
    SendAttach,
    SendBind,
    SendCancel,
    SendPrefill,
    SendWelcome,
    StepRows,
    Submit,
    Tick,
    WorkerJoined,
    WorkerLeft,
)
from router.ledger import Ledger, OutputMean
from router.live import LiveRequest, RemoteWork
from router.output import delta_of
from router.placer import Placer
from router.registry import Registry, Worker
from router.waiting import WaitingRequests

_S, _E = RequestState, RequestEvent

_FAILURE_EVENTS: Final = {ErrorCode.LEASE_GONE: _E.LEASE_LOST, ErrorCode.TRANSFER_FAILED: _E.TRANSFER_FAILED}
"""What a worker's RequestFailed means to the request, while its KV is on the way; any other reason is WORK_FAILED."""

_STALE_DEADLINES_MIN: Final = 1024


class RouterCore:
    def __init__(self, config: RouterConfig, model_fingerprint: str) -> None:
        self.registry = Registry(model_fingerprint)
        self.ledger = Ledger()
        self.waiting = WaitingRequests(max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens)
        self._outputs = OutputMean()
        self.placer = Placer(config, self.registry, self.ledger, self._outputs)
        self._lost_s = config.heartbeat_lost_s
        self._requests: dict[RequestId, LiveRequest] = {}
        self._deadlines: list[tuple[float, int, RequestId]] = []
        self._arrivals = 0
        self._handles = 0
        self._effects: list[Effect] = []
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
            Submit: self._submit,
            ClientGone: self._client_gone,
            Tick: self._tick,
            WorkerJoined: self._worker_joined,
            WorkerLeft: self._worker_left,
            HeartbeatSeen: self._heartbeat,
            Reserved: self._reserved,
            NoRoom: self._no_room,
            PrefillStarted: self._prefill_started,
            KvCommitted: self._kv_committed,
            RequestFailed: self._request_failed,
            StepRows: self._step_rows,
        }

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def is_live(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    def handle(self, event: Event, *, now_s: float) -> list[Effect]:
        """What is to be done, in order. A Submit that is refused raises its error and leaves no trace."""
        self._handlers[type(event)](event, now_s)
        effects, self._effects = self._effects, []
        return effects

    # Clients and time ----------------------------------------------------------------------------------------------

    def _submit(self, submit: Submit, now_s: float) -> None:
        if submit.request_id in self._requests:
            raise InvalidRequest(f"{submit.request_id!r} is running already", field="request_id")
        if submit.deadline_s <= now_s:
            raise DeadlineExceeded("deadline_s had passed before the request could be queued")
        request = LiveRequest.of(submit, self._arrivals)
        self.placer.decide(request, now_s=now_s)  # raises Unavailable at once instead of after a wait
        self.waiting.check_room(len(submit.prompt_ids), now_s=now_s)
        self._arrivals += 1
        self._requests[submit.request_id] = request
        heapq.heappush(self._deadlines, (request.deadline_s, request.arrival, request.request_id))
        self.waiting.add(request)
        self._pump(now_s)

    def _client_gone(self, event: ClientGone, now_s: float) -> None:
        request = self._requests.get(event.request_id)
        if request is not None:
            self._end(request, _E.CLIENT_GONE, now_s, Cancelled(f"request {event.request_id} was cancelled"))
            self._pump(now_s)

    def _tick(self, event: Tick, now_s: float) -> None:
        for worker in self.registry:
            silent_s = now_s - worker.last_seen_s
            if silent_s > self._lost_s:
                name = f"{worker.hello.role.value} worker {worker.hello.worker_id}"
                self._lose(worker.link, ReplicaLost(f"{name} was silent for {silent_s:.1f} s"), now_s, close=True)
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.arrival == arrival:
                limit_s = request.deadline_s - request.times.arrived_s
                error = DeadlineExceeded(f"deadline_s of {limit_s:.3g} s passed while {request.machine.state.value}")
                self._end(request, _E.DEADLINE_PASSED, now_s, error)
        self._forget_stale_deadlines()
        self._pump(now_s)

    def _forget_stale_deadlines(self) -> None:
        """Ended requests leave theirs behind; rebuilt before the heap outgrows the requests."""
        if len(self._deadlines) > 2 * len(self._requests) + _STALE_DEADLINES_MIN:
            self._deadlines = [(r.deadline_s, r.arrival, r.request_id) for r in self._requests.values()]
            heapq.heapify(self._deadlines)

    # Workers -------------------------------------------------------------------------------------------------------

    def _worker_joined(self, event: WorkerJoined, now_s: float) -> None:
        try:
            self.registry.check(event.hello)
        except IncompatiblePeer as exc:
            self._effects.append(CloseLink(event.link, exc))
            return
        before = self.registry.find(event.hello.worker_id)
        if before is not None:
            self._lose(before.link, ReplicaLost(f"worker {event.hello.worker_id} dialled again"), now_s, close=True)
        self.registry.join(event.link, event.hello, now_s=now_s)
        self._effects.append(SendWelcome(event.link))
        self._pump(now_s)

    def _worker_left(self, event: WorkerLeft, now_s: float) -> None:
        worker = self.registry.get(event.link)
        if worker is not None:
            name = f"{worker.hello.role.value} worker {worker.hello.worker_id}"
            self._lose(event.link, ReplicaLost(f"the link of {name} broke"), now_s, close=False)
            self._pump(now_s)

    def _lose(self, link: LinkId, error: ReplicaLost, now_s: float, *, close: bool) -> None:
        worker = self.registry.leave(link)
        if worker is None:
            return
        if close:
            self._effects.append(CloseLink(link, error))
        event = _E.PREFILL_LOST if worker.hello.role is Role.PREFILL else _E.DECODE_LOST
        for work in list(worker.work.values()):
            self._drop(work)
            self._fail(work.request, event, now_s, error)

    def _heartbeat(self, event: HeartbeatSeen, now_s: float) -> None:
        worker = self._seen(event.link, now_s)
        if worker is not None:
            worker.saw_heartbeat(event.load)
            self._pump(now_s)

    def _seen(self, link: LinkId, now_s: float) -> Worker | None:
        worker = self.registry.get(link)
        if worker is not None:
            worker.last_seen_s = now_s
        return worker

    # One request, as its workers tell it -----------------------------------------------------------------------------

    def _reserved(self, event: Reserved, now_s: float) -> None:
        work = self._work(event.link, event.handle, Role.DECODE, now_s)
        if work is None:
            return
        request = work.request
        request.times.reserved_s = now_s
        if request.placement is Placement.COLOCATED:
            self._move(request, _E.RESERVED_LOCAL, now_s)
            return
        worker = self.placer.prefill_worker(request, now_s=now_s)
        if worker is None:
            self._cancel(work)
            self._requeue(request, _E.PREFILL_POOL_EMPTY, now_s)
            self._pump(now_s)
        elif self._move(request, _E.RESERVED, now_s):
            self._send_prefill(request, worker, now_s)

    def _send_prefill(self, request: LiveRequest, worker: Worker, now_s: float) -> None:
        work = request.prefill = self._place_on(worker, request)
        request.prefill_worker = worker.hello.worker_id
        request.times.prefill_sent_s = now_s
        worker.placed_tokens += len(request.prompt_ids)
        self._effects.append(SendPrefill(worker.link, request.work(work.handle, now_s=now_s)))

    def _no_room(self, event: NoRoom, now_s: float) -> None:
        work = self._work(event.link, event.handle, Role.DECODE, now_s)
        if work is None:
            return
        worker = self._drop(work)
        if worker is not None:
            worker.refused_blocks = event.blocks_needed
        self._requeue(work.request, _E.NO_ROOM, now_s)
        self._pump(now_s)

    def _requeue(self, request: LiveRequest, event: RequestEvent, now_s: float) -> None:
        if self._move(request, event, now_s):
            self.ledger.give_back(request.request_id)
            self.waiting.add(request)

    def _prefill_started(self, event: PrefillStarted, now_s: float) -> None:
        work = self._work(event.link, event.handle, Role.PREFILL, now_s)
        if work is None:
            return
        request = work.request
        if request.attached:
            self._break(request, InternalBug(f"request {request.request_id}: prefill started twice"), now_s)
        elif self._move(request, _E.PREFILL_STARTED, now_s) and request.decode is not None:
            request.attached = True
            decode = request.decode
            self._effects.append(SendAttach(decode.link, decode.handle, event.lease_id, event.ttl_s, event.ticket))

    def _kv_committed(self, event: KvCommitted, now_s: float) -> None:
        work = self._work(event.link, event.handle, Role.DECODE, now_s)
        if work is None:
            return
        request = work.request
        if not request.attached or request.committed is not None:
            self._break(request, InternalBug(f"request {request.request_id}: KV committed unasked or twice"), now_s)
        elif self._move(request, _E.KV_COMMITTED, now_s):
            request.committed = event
            if request.machine.state is _S.DECODING:
                self._start_decoding(request, now_s)

    def _request_failed(self, event: RequestFailed, now_s: float) -> None:
        work = self._work(event.link, event.handle, None, now_s)
        if work is None:
            return
        request = work.request
        self._drop(work)
        in_handoff = request.machine.state in (_S.PREFILLING, _S.HANDOFF)
        kind = _FAILURE_EVENTS.get(event.error.code, _E.WORK_FAILED) if in_handoff else _E.WORK_FAILED
        self._fail(request, kind, now_s, event.error)
        self._pump(now_s)

    # Tokens: the only part whose cost is paid for every token ----------------------------------------------------------

    def _step_rows(self, event: StepRows, now_s: float) -> None:
        worker = self._seen(event.link, now_s)
        if worker is None:
            return
        ended = len(self._requests)
        works = worker.work
        for row in event.rows:
            work = works.get(row.handle)  # type: ignore[call-overload]  # a Handle on the wire is a plain int
            if work is not None:
                try:
                    self._row(work, row, now_s)
                except InternalBug as exc:
                    self._break(work.request, exc, now_s)
        if len(self._requests) != ended:
            self._pump(now_s)

    def _row(self, work: RemoteWork, row: Row, now_s: float) -> None:
        request = work.request
        delta = delta_of(row)
        if request.machine.state is _S.DECODING and work.role is Role.DECODE:
            for ready in request.output.accept(delta):
                self._emit(request, ready, now_s)
        elif request.output.is_repeat(delta.index, len(delta.ids)):
            return
        elif work.role is Role.PREFILL:
            self._first_token(request, delta, now_s)
        else:
            request.machine.move(_E.TOKEN_OUT)  # legal while token 0 is on its way by the other link
            request.output.hold(delta, after=1)

    def _first_token(self, request: LiveRequest, delta: Delta, now_s: float) -> None:
        if delta.index != 0 or len(delta.ids) != 1 or not request.attached:
            raise InternalBug(f"request {request.request_id}: prefill sent {delta}, attached: {request.attached}")
        request.output.start()
        if delta.finish_reason is not None:
            self._emit(request, delta, now_s, last=_E.FINAL_FIRST_TOKEN)
            return
        request.machine.move(_E.FIRST_TOKEN)
        self._emit(request, delta, now_s)
        if request.committed is not None:
            request.machine.move(_E.KV_COMMITTED)
            self._start_decoding(request, now_s)

    def _start_decoding(self, request: LiveRequest, now_s: float) -> None:
        """Token 0 went out and the KV is on decode: nothing is left on prefill, and what came early may go out."""
        if request.prefill is not None:
            self._drop(request.prefill)
        for ready in request.output.drain():
            self._emit(request, ready, now_s)

    def _emit(self, request: LiveRequest, delta: Delta, now_s: float, *, last: RequestEvent = _E.STOPPED) -> None:
        times = request.times
        if times.first_token_s is None:
            times.first_token_s = now_s
        times.last_token_s = now_s
        self._effects.append(EmitDelta(request.request_id, delta))
        if delta.finish_reason is not None:
            if last is _E.STOPPED and request.decode is not None:
                self._drop(request.decode)  # the worker ended it by saying so
            self._outputs.saw(request.output.next_index)
            self._end(request, last, now_s, None)

    # Placing and ending ------------------------------------------------------------------------------------------------

    def _pump(self, now_s: float) -> None:
        """Place what waits, strictly in order: a large request at the head is not overtaken for ever."""
        while (request := self.waiting.first()) is not None:
            try:
                placement, reason = self.placer.decide(request, now_s=now_s)
            except Unavailable as exc:
                self._end(request, _E.UNPLACEABLE, now_s, exc)
                continue
            worker = self.placer.decode_worker(request, now_s=now_s)
            if worker is None:
                return
            self.waiting.remove(request)
            request.placement, request.placement_reason = placement, reason.value
            self._send_bind(request, worker, now_s)

    def _send_bind(self, request: LiveRequest, worker: Worker, now_s: float) -> None:
        request.machine.move(_E.DECODE_PICKED)
        self.ledger.take(request.request_id, worker.link, self.placer.need_tokens(request))
        work = request.decode = self._place_on(worker, request)
        request.decode_worker = worker.hello.worker_id
        request.times.bind_sent_s = now_s
        local = request.placement is Placement.COLOCATED
        self._effects.append(SendBind(worker.link, request.work(work.handle, now_s=now_s), request.machine.bind, local))

    def _place_on(self, worker: Worker, request: LiveRequest) -> RemoteWork:
        self._handles += 1
        work = RemoteWork(Handle(self._handles), worker.link, worker.hello.role, request)
        worker.work[work.handle] = work
        return work

    def _drop(self, work: RemoteWork) -> Worker | None:
        """Forget work that ended at its worker. Returns the worker, None when it has left."""
        request = work.request
        if request.prefill is work:
            request.prefill = None
        if request.decode is work:
            request.decode = None
        worker = self.registry.get(work.link)
        if worker is not None:
            worker.work.pop(work.handle, None)
            worker.refused_blocks = None  # something was freed there
        return worker

    def _cancel(self, work: RemoteWork) -> None:
        """Drop work that still runs at its worker."""
        if self._drop(work) is not None:
            self._effects.append(SendCancel(work.link, work.handle))

    def _work(self, link: LinkId, handle: Handle, role: Role | None, now_s: float) -> RemoteWork | None:
        """The door: None for a link or handle that is not, or no longer, known. The wrong role fails the request."""
        worker = self._seen(link, now_s)
        work = worker.work.get(handle) if worker is not None else None
        if work is not None and role is not None and work.role is not role:
            self._break(work.request, InternalBug(f"a {work.role.value} worker spoke as {role.value}"), now_s)
            return None
        return work

    def _move(self, request: LiveRequest, event: RequestEvent, now_s: float) -> bool:
        """False: the event was illegal, and has failed this request alone."""
        try:
            request.machine.move(event)
        except InternalBug as exc:
            self._break(request, exc, now_s)
            return False
        return True

    def _break(self, request: LiveRequest, error: InternalBug, now_s: float) -> None:
        if not request.machine.terminal:
            self._end(request, _E.BROKEN, now_s, error)
            self._pump(now_s)

    def _fail(self, request: LiveRequest, event: RequestEvent, now_s: float, error: PdserveError) -> None:
        """A loss: ends the request unless its state does not mind."""
        if request.machine.terminal:
            return
        try:
            lives_on = request.machine.move(event) is _S.DECODING
        except InternalBug as exc:
            self._break(request, exc, now_s)
            return
        if not lives_on:
            self._forget(request, now_s, error)

    def _end(self, request: LiveRequest, event: RequestEvent, now_s: float, error: PdserveError | None) -> None:
        was_queued = request.machine.state is _S.QUEUED
        request.machine.move(event)
        if was_queued:
            self.waiting.remove(request)
        self._forget(request, now_s, error)

    def _forget(self, request: LiveRequest, now_s: float, error: PdserveError | None) -> None:
        """The request is over: cancel what still runs, return its ledger entry, say so once."""
        assert request.machine.terminal
        for work in (request.prefill, request.decode):
            if work is not None:
                self._cancel(work)
        if self.ledger.has(request.request_id):
            self.ledger.give_back(request.request_id)
        self.waiting.saw_finish(now_s)
        del self._requests[request.request_id]
        report = request.report(now_s=now_s)
        if error is None:
            self._effects.append(EmitDone(request.request_id, report))
        else:
            self._effects.append(EmitFailed(request.request_id, error, report))

    def check_invariants(self) -> None:
        """For tests after every event; costs a walk over all requests and workers."""
        self.ledger.check_invariants()
        self.waiting.check_invariants()
        waiting = self.waiting.all()
        remote = {id(w) for worker in self.registry for w in worker.work.values()}
        held = [w for r in self._requests.values() for w in (r.prefill, r.decode) if w is not None]
        assert remote == {id(w) for w in held}
        assert len(held) == len(remote)
        for request in self._requests.values():
            state = request.machine.state
            assert not request.machine.terminal
            assert (request in waiting) == (state is _S.QUEUED)
            assert self.ledger.has(request.request_id) == (state is not _S.QUEUED)
            assert (request.decode is not None) == (state is not _S.QUEUED)
            assert (request.prefill is not None) == (state in (_S.PREFILLING, _S.HANDOFF))
        assert len(self.ledger) == len(self._requests) - len(waiting)
