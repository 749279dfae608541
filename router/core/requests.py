"""The live requests: the remote work of each, its ledger entry, and its end. This file alone writes all three.

When a request enters a terminal state, its running work is cancelled, its ledger entry is given back, and one outcome is
emitted. Each happens exactly once, because all three happen in `_forget`, which also forgets the request.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.core.errors import DeadlineExceeded, InternalBug, PdserveError
from pdserve.core.ids import Handle, RequestId
from pdserve.core.request_machine import RequestEvent, RequestState
from pdserve.observe.story import Value
from router.core.deadlines import Deadlines
from router.core.events import Effect, EmitDone, EmitFailed, LinkId, SendCancel, Submit
from router.core.ledger import Ledger, OutputMean
from router.core.live_request import LiveRequest, Probe, RemoteWork
from router.core.registry import Registry, Worker
from router.core.story import RequestStory, Stories, StoryKind
from router.core.waiting import WaitingRequests

_S, _E = RequestState, RequestEvent


class Requests:
    """Holds the live requests, and collects the effects of the current event."""

    def __init__(self, registry: Registry, waiting: WaitingRequests) -> None:
        self.registry = registry
        self.waiting = waiting
        self.ledger = Ledger()
        self.outputs = OutputMean()
        self.stories = Stories()
        self.effects: list[Effect] = []
        self.changed = False
        """A request has begun to wait, or room may be free: waiting requests may be placed now."""
        self.recheck = False
        """Requests that no worker could serve may have a worker now."""
        self.on_probe_end: Callable[[LiveRequest, PdserveError | None, float], None] = _nobody
        self._by_id: dict[RequestId, LiveRequest] = {}
        self.deadlines = Deadlines(self._by_id)
        self._probes = 0
        self._arrivals = 0
        self._handles = 0

    def __len__(self) -> int:
        """Return the number of live requests of clients. The router's own probes are not counted."""
        return len(self._by_id) - self._probes

    def get(self, request_id: RequestId) -> LiveRequest | None:
        """Return a live request, or None when it has ended or never was."""
        return self._by_id.get(request_id)

    def stories_of(self, name: str) -> list[RequestStory]:
        """Return the stories of this request or correlation id, the newest first. Probes have none. Raises `UnknownRequest`."""
        return self.stories.find(name, [r.story for r in self._by_id.values() if r.probe is None])

    def probes(self) -> list[LiveRequest]:
        """Return the live probes."""
        return [r for r in self._by_id.values() if r.probe is not None]

    def make(self, submit: Submit, probe: Probe | None = None) -> LiveRequest:
        """Make a request that is not known here yet. The caller adds it, unless it is refused."""
        return LiveRequest.of(submit, self._arrivals, probe)

    def add(self, request: LiveRequest) -> None:
        """Register a new request, and watch its deadline."""
        assert request.request_id not in self._by_id
        self._arrivals += 1
        self._by_id[request.request_id] = request
        self._probes += request.probe is not None
        self.deadlines.add(request)

    def wait(self, request: LiveRequest) -> None:
        """Let a queued request wait for its turn to get a decode worker."""
        assert request.machine.state is _S.QUEUED
        self.waiting.add(request)
        self.changed = True

    # What runs remotely --------------------------------------------------------------------------------------------

    def place_on(self, worker: Worker, request: LiveRequest) -> RemoteWork:
        """Record new work of the request on a worker, under a new handle. The caller sends the command."""
        self._handles += 1
        work = RemoteWork(Handle(self._handles), worker.link, worker.hello.role, request)
        worker.work[work.handle] = work
        request.story.took_part(worker.hello)
        request.exact = request.exact and self.registry.exact
        return work

    def drop(self, work: RemoteWork) -> Worker | None:
        """Forget work that has ended at its worker. Return the worker, or None when it has left."""
        request = work.request
        if request.prefill is work:
            request.prefill = None
        if request.decode is work:
            request.decode = None
        worker = self.registry.get(work.link)
        if worker is not None:
            worker.ended(work.handle)
        return worker

    def cancel(self, work: RemoteWork) -> None:
        """Forget work that still runs, and tell its worker to cancel it."""
        if self.drop(work) is not None:
            self.effects.append(SendCancel(work.link, work.handle))

    def withdraw(self, request: LiveRequest) -> None:
        """Cancel the running work of a request and give back its ledger entry. Cancelled prefill work also loses its lease."""
        for work in (request.prefill, request.decode):
            if work is not None:
                self.cancel(work)
        if self.ledger.has(request.request_id):
            self.ledger.give_back(request.request_id)

    # Moves and ends ------------------------------------------------------------------------------------------------

    def move(self, request: LiveRequest, event: RequestEvent, now_s: float) -> bool:
        """Move the request to its next state. False: the event was illegal and has failed this request alone."""
        try:
            request.machine.move(event)
        except InternalBug as exc:
            self.break_off(request, exc, now_s)
            return False
        return True

    def break_off(self, request: LiveRequest, error: InternalBug, now_s: float) -> None:
        """Fail one request for a bug. A request that has already ended stays as it is."""
        if not request.machine.terminal:
            self.end(request, _E.BROKEN, now_s, error)

    def expire(self, request: LiveRequest, now_s: float) -> None:
        """Fail a request whose deadline has passed."""
        limit_s = request.deadline_s - request.times.arrived_s
        error = DeadlineExceeded(f"deadline_s of {limit_s:.3g} s passed while {request.machine.state.value}")
        self.end(request, _E.DEADLINE_PASSED, now_s, error)

    def end(self, request: LiveRequest, event: RequestEvent, now_s: float, error: PdserveError | None) -> None:
        """Bring a request to the terminal state that `event` leads to, and forget it. `error` is None for a finished one."""
        was_queued = request.machine.state is _S.QUEUED
        request.machine.move(event)
        if was_queued:
            self.waiting.remove(request)
        why: dict[str, Value] = {} if error is None else {"error": error.code.value, "message": error.message}
        request.story.note(now_s, StoryKind.ENDED, state=request.machine.state.value, tokens=len(request.emitted), **why)
        self._forget(request, now_s, error)

    def _forget(self, request: LiveRequest, now_s: float, error: PdserveError | None) -> None:
        assert request.machine.terminal
        self.withdraw(request)
        self.changed = True
        del self._by_id[request.request_id]
        if request.probe is not None:
            self._probes -= 1
            self.recheck = True
            self.on_probe_end(request, error, now_s)
            return
        self.waiting.saw_finish(now_s)
        self.stories.ended(request.story, request.machine.state)
        report = request.report(now_s=now_s)
        if error is None:
            self.effects.append(EmitDone(request.request_id, report))
        else:
            self.effects.append(EmitFailed(request.request_id, error, report))

    def check_invariants(self) -> None:
        """Assert that all books agree. This walks over all requests and workers."""
        self.ledger.check_invariants()
        self.waiting.check_invariants()
        waiting = self.waiting.all()
        remote = {id(w) for worker in self.registry for w in worker.work.values()}
        held = [w for r in self._by_id.values() for w in (r.prefill, r.decode) if w is not None]
        assert remote == {id(w) for w in held}
        assert len(held) == len(remote)
        assert self._probes == sum(r.probe is not None for r in self._by_id.values())
        for worker in self.registry:
            assert worker.on_the_way_tokens == sum(worker.on_the_way.values())
            assert worker.on_the_way.keys() <= worker.work.keys()
            assert list(worker.on_the_way) == sorted(worker.on_the_way)
        for request in self._by_id.values():
            _check_request(request, request in waiting, self.ledger.link_of(request.request_id))
        assert len(self.ledger) == len(self._by_id) - len(waiting)


def _check_request(request: LiveRequest, waits: bool, charged: LinkId | None) -> None:
    state, decode = request.machine.state, request.decode
    assert not request.machine.terminal
    assert waits == (state is _S.QUEUED)
    assert charged == (None if decode is None else decode.link)
    assert (decode is not None) == (state is not _S.QUEUED)
    assert (request.prefill is not None) == (state in (_S.PREFILLING, _S.HANDOFF))
    assert len(request.emitted) == request.output.next_index
    assert request.work_ids == (*request.prompt_ids, *request.emitted[: request.resumed])
    assert request.resumed == 0 or request.replay
    if decode is not None:
        assert decode.reserved or state in (_S.BINDING, _S.PREFILLING, _S.HANDOFF)
        assert not decode.attached or (decode.reserved and request.lease is not None)
    assert request.committed is None or (decode is not None and decode.attached)


def _nobody(request: LiveRequest, error: PdserveError | None, now_s: float) -> None:
    """Stand in for `on_probe_end` until probes are set up. Raises `InternalBug`."""
    raise InternalBug(f"nobody waits for probe {request.request_id}")
