"""The live requests: the remote work of each, its ledger entry, and its end. This file alone writes all three.

When a request enters a terminal state, its running work is cancelled, its ledger entry is given back, and one outcome is
emitted. Each happens exactly once, because all three happen in `_forget`, which also forgets the request.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

from pdserve.core.errors import DeadlineExceeded, InternalBug, Overloaded, PdserveError
from pdserve.core.ids import Handle, RequestId
from pdserve.core.slo import SloClass
from pdserve.core.worker import Role
from pdserve.observe.story import Value
from router.core.demand import Demand
from router.core.events import Effects, EffectsThen, EmitDone, EmitFailed, LinkId, ReportBug, SendCancel, Submit
from router.core.forecast import ExpectedOutputs, StayMean
from router.core.health import Health
from router.core.live_request import LiveRequest, Probe, RemoteWork, RequestStory, Stories, StoryKind
from router.core.pools import Sessions
from router.core.prefix_index import PrefixIndex
from router.core.probe_book import ProbeBook
from router.core.queue_limits import SHED, QueueLimits
from router.core.registry import Ledger, Registry, Worker
from router.core.request_machine import RequestEvent, RequestState
from router.core.turns import Turn
from router.core.waiting import WaitingRequests
from router.core.work_machine import WorkMachine, WorkState

# Deadlines -------------------------------------------------------------------------------------------------------
#
# The deadlines of live requests, soonest first.


STALE_MIN: Final = 1024
"""Ended requests leave stale deadlines in the heap. The heap is rebuilt when it holds this many more than twice the live
requests."""


class Deadlines:
    """A heap of the deadlines of `requests`."""

    def __init__(self, requests: Mapping[RequestId, LiveRequest]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, int, RequestId]] = []

    def __len__(self) -> int:
        """Return the number of deadlines in the heap, including deadlines of ended requests."""
        return len(self._heap)

    def add(self, request: LiveRequest) -> None:
        """Add the deadline of a live request."""
        heapq.heappush(self._heap, (request.deadline_s, request.arrival, request.request_id))

    def passed(self, *, now_s: float) -> Iterator[LiveRequest]:
        """Yield the live requests whose deadline has passed, each once."""
        while self._heap and self._heap[0][0] <= now_s:
            _, arrival, request_id = heapq.heappop(self._heap)
            request = self._requests.get(request_id)
            if request is not None and request.arrival == arrival:
                yield request
        if len(self._heap) > 2 * len(self._requests) + STALE_MIN:
            self._heap = [(r.deadline_s, r.arrival, r.request_id) for r in self._requests.values()]
            heapq.heapify(self._heap)


# Requests --------------------------------------------------------------------------------------------------------


_S, _E = RequestState, RequestEvent
_T = TypeVar("_T")

_RESERVING: Final = (_S.BINDING, _S.PREFILLING, _S.HANDOFF)
"""States in which the decode worker may not have reserved yet: the first bind of an attempt, and rebinds."""
MAX_PASSES: Final = 256
"""The most requests that may pass one waiting request. A claim begins anew when its worker refuses, so only this number bounds
them: a large request that waits a minute is passed by four light requests a second."""


class Requests:
    """Holds the live requests."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        outputs: ExpectedOutputs,
        sessions: Sessions,
        waiting: WaitingRequests,
        limits: QueueLimits,
        probe_book: ProbeBook,
        index: PrefixIndex,
        health: Health,
    ) -> None:
        self.registry = registry
        self.ledger = ledger
        self.outputs = outputs
        self.waiting = waiting
        self._sessions = sessions
        self._limits = limits
        self._index = index
        self._health = health
        self.stays = StayMean()
        self.stories = Stories()
        self.demand = Demand()
        self._probe_book = probe_book
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
        return self.stories.find(name, [r.story for r in self.of_clients()])

    def of_clients(self) -> list[LiveRequest]:
        """Return the live requests of clients."""
        return [r for r in self._by_id.values() if r.probe is None]

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
        self.end_trial(request)
        if request.suspect:
            self.waiting.add_alone(request)
        else:
            self.waiting.add(request)
        self._limits.add(request)

    def wait_behind(self, request: LiveRequest) -> None:
        """Let a new sibling wait for its leader, which runs."""
        assert request.machine.state is _S.QUEUED
        self.waiting.add_behind(request)
        self._limits.add(request)

    def free_siblings(self, leader: LiveRequest, now_s: float) -> None:
        """Let the siblings of a request take their turns: the KV of the request is on a decode worker, or the request has
        ended."""
        for request in self.waiting.free(leader.request_id):
            request.times.leader, request.times.freed_s = leader.times, now_s
            self.follow(request, leader, now_s)

    def follow(self, request: LiveRequest, leader: LiveRequest, now_s: float) -> None:
        """Let a sibling be placed beside the KV of its leader. If the leader's worker shares no blocks, any worker is as
        good."""
        link = leader.kv_link
        request.beside = link if link is not None and self._index.shares(link) else None
        worker = leader.decode_worker if request.beside is not None else ""
        request.story.note(now_s, StoryKind.FOLLOWS, leader=leader.request_id, decode_worker=worker)

    def stop_waiting(self, request: LiveRequest) -> None:
        """Take a request out of the queue."""
        self.waiting.remove(request)
        self._limits.remove(request)
        self.let_go(request)

    def keep(self, request: LiveRequest, turn: Turn, worker: Worker, need_tokens: int) -> None:
        """Claim the next room on a decode worker for a waiting request, which needs `need_tokens` of KV."""
        request.keeps, worker.kept_for = worker.link, turn
        worker.kept_tokens = need_tokens if request.passed_by < MAX_PASSES else None
        worker.touch()

    def let_go(self, request: LiveRequest) -> None:
        """End the claim of a request on a worker, if it has one."""
        worker = None if request.keeps is None else self.registry.get(request.keeps)
        if worker is not None:
            worker.kept_for = worker.kept_tokens = None
            worker.touch()
        request.keeps = None

    def keep_alone(self, request: LiveRequest, worker: Worker, now_s: float) -> None:
        """Keep a decode worker for one request alone. The requests that run there move elsewhere or end."""
        if request.alone_on is None:
            request.kept_alone_s = now_s
        request.alone_on, worker.alone_for = worker.link, request.request_id
        worker.touch()

    def end_trial(self, request: LiveRequest) -> None:
        """Give the worker that was kept for a request alone back to all."""
        worker = None if request.alone_on is None else self.registry.get(request.alone_on)
        if worker is not None:
            worker.alone_for = None
            worker.touch()
        request.alone_on = request.trial_from = None

    # What runs remotely --------------------------------------------------------------------------------------------

    def place_on(self, worker: Worker, request: LiveRequest) -> RemoteWork:
        """Record new work of the request on a worker, under a new handle. The caller sends the command."""
        self._handles += 1
        handle = Handle(self._handles)
        work = RemoteWork(handle, worker.link, worker.hello.role, request, WorkMachine(request.request_id, handle))
        if work.role is Role.DECODE:
            request.decode, request.decode_worker = work, worker.hello.worker_id
        else:
            request.prefill, request.prefill_worker = work, worker.hello.worker_id
        worker.work[handle] = work
        worker.touch()
        self._index.expect(worker.link, handle, request.prefix_keys)
        request.story.took_part(worker.hello)
        request.computed_by(worker.hello)
        if request.session_id:
            self._sessions.placed(request, worker)
        return work

    def drop(self, work: RemoteWork) -> Worker | None:
        """Forget work that has ended at its worker. Return the worker, or None when it has left."""
        request, worker = work.request, self.registry.get(work.link)
        if worker is not None:
            worker.ended(work.handle)
            self._index.ended(work.link, work.handle)
        if request.prefill is work:  # the request names its work until all else is done, so a failed drop can be repeated
            request.prefill = None
        if request.decode is work:
            request.decode = None
        return worker

    def cancel(self, work: RemoteWork) -> Effects:
        """Forget work that still runs, and tell its worker to cancel it."""
        if self.drop(work) is not None:
            yield SendCancel(work.link, work.handle)

    def withdraw(self, request: LiveRequest) -> Effects:
        """Cancel the running work of a request and give back its ledger entry. Cancelled prefill work also loses its lease."""
        for work in (request.prefill, request.decode):
            if work is not None:
                yield from self.cancel(work)
        if self.ledger.has(request.request_id):
            self.ledger.give_back(request.request_id)

    # Moves and ends ------------------------------------------------------------------------------------------------

    def alone(self, request: LiveRequest, action: EffectsThen[_T], now_s: float) -> EffectsThen[_T | None]:
        """Run an action that concerns one request, and return its value. An action that raises fails only this request, and the
        value is None."""
        try:
            return (yield from action)
        except Exception as exc:  # noqa: BLE001 - the shell reports it
            yield from self.contain(request, exc, now_s)
            return None

    def contain(self, request: LiveRequest, exc: Exception, now_s: float) -> Effects:
        """Fail the one request whose action raised. An `InternalBug` is known to concern this request; any other exception is
        reported as well."""
        if isinstance(exc, InternalBug):
            yield from self.break_off(request, exc, now_s)
        else:
            yield from self.break_off(request, InternalBug(f"request {request.request_id}: {exc!r}"), now_s)
            yield ReportBug(exc)

    def break_off(self, request: LiveRequest, error: InternalBug, now_s: float) -> Effects:
        """Fail one request for a bug, also a request whose end has failed. A request that is forgotten stays as it is."""
        if self._by_id.get(request.request_id) is request:
            if not request.machine.terminal:
                request.machine.move(_E.BROKEN)
            yield from self._forget(request, now_s, error)

    def shed(self, request: LiveRequest, by: SloClass, now_s: float) -> Effects:
        """Fail a waiting request that gives way to a request of the class `by`, or to a client with a smaller share."""
        request.story.note(now_s, StoryKind.SHED, slo_class=request.slo.name, by_class=by.name)
        came = f"a request of class {by.name!r} came: its priority is {by.priority}, "
        came += f"and that of class {request.slo.name!r} is {request.slo.priority}"
        if by.priority <= request.slo.priority:
            came = "a request of a client came for whom fewer requests or prompt tokens wait"
        error = Overloaded(
            f"the queue was full, and {came}",
            retry_after_s=self._limits.retry_after_s(now_s),
            reason=SHED,
        )
        yield from self.end(request, _E.SHED, now_s, error)

    def expire(self, request: LiveRequest, now_s: float) -> Effects:
        """Fail a request whose deadline has passed."""
        limit_s = request.deadline_s - request.times.arrived_s
        lacked = request.no_room and f"; {request.no_room}"
        error = DeadlineExceeded(f"deadline_s of {limit_s:.3g} s passed while {request.machine.state.value}{lacked}")
        yield from self.end(request, _E.DEADLINE_PASSED, now_s, error)

    def end(self, request: LiveRequest, event: RequestEvent, now_s: float, error: PdserveError | None) -> Effects:
        """Bring a request to the terminal state that `event` leads to, and forget it. `error` is None for a finished
        request."""
        request.machine.move(event)
        yield from self._forget(request, now_s, error)

    def _forget(self, request: LiveRequest, now_s: float, error: PdserveError | None) -> Effects:
        assert request.machine.terminal
        if self.waiting.holds(request):
            self.waiting.remove(request)
        self._limits.remove(request)
        self.let_go(request)
        self.end_trial(request)
        yield from self.withdraw(request)
        self.free_siblings(request, now_s)
        report = request.report(now_s=now_s)
        self.waiting.settle(request, report.prompt_tokens - (report.cached_tokens or 0) + report.output_tokens)
        self._end_story(request, now_s, error)
        del self._by_id[request.request_id]
        if request.probe is not None:
            self._probes -= 1
            self._probe_book.ended(request.probe, error, now_s)
            return
        self._health.ended(request, error)
        yield EmitDone(request.request_id, report) if error is None else EmitFailed(request.request_id, error, report)
        self.demand.ended(request, report, error)
        self._limits.saw_finish(now_s)

    def _end_story(self, request: LiveRequest, now_s: float, error: PdserveError | None) -> None:
        """Keep the story. This may be repeated when the end of the request has failed."""
        state = request.machine.state
        why: dict[str, Value] = {} if error is None else {"error": error.code, "message": error.message}
        drafts: dict[str, Value] = {}
        if (told := request.speculation) is not None:
            drafts = {"draft_tokens": told.num_draft_tokens, "accepted_tokens": told.num_accepted_tokens}
            drafts["acceptance_length"] = told.acceptance_length
        request.story.note(now_s, StoryKind.ENDED, state=state, tokens=len(request.emitted), **drafts, **why)
        if request.probe is None:
            self.stories.ended(request.story, state)

    def check_invariants(self) -> None:
        """Assert that all books agree. This walks over all requests and workers."""
        self.ledger.check_invariants()
        self.waiting.check_invariants()
        waiting = self.waiting.all()
        self._limits.check_invariants(waiting)
        remote = {id(w) for worker in self.registry for w in worker.work.values()}
        held = [w for r in self._by_id.values() for w in (r.prefill, r.decode) if w is not None]
        assert remote == {id(w) for w in held}
        assert len(held) == len(remote)
        assert self._probes == sum(r.probe is not None for r in self._by_id.values())
        for worker in self.registry:
            worker.backlog.check_invariants(worker.work)
            self._index.check_credit(worker.link, worker.work)
        kept = {worker.link: worker.kept_for.arrival for worker in self.registry if worker.kept_for is not None}
        claims = {r.keeps: r.arrival for r in waiting if r.keeps is not None and self.registry.get(r.keeps) is not None}
        assert kept == claims
        for leader in map(self._by_id.get, self.waiting.leaders()):
            assert leader is not None, "siblings wait for a request that has ended"
            assert leader.kv_link is None, "siblings wait for KV that is there"
        for request in self._by_id.values():
            assert request.keeps is None or request in waiting
            _check_request(request, request in waiting, self.ledger.link_of(request.request_id))
        assert len(self.ledger) == len(self._by_id) - len(waiting)


def _check_request(request: LiveRequest, waits: bool, charged: LinkId | None) -> None:
    state, prefill, decode = request.machine.state, request.prefill, request.decode
    assert not request.machine.terminal
    assert waits == (state is _S.QUEUED)
    assert charged == (None if decode is None else decode.link)
    assert (decode is not None) == (state is not _S.QUEUED)
    assert (prefill is not None) == (state in (_S.PREFILLING, _S.HANDOFF))
    assert len(request.emitted) == request.output.next_index
    assert request.resumed == tuple(request.emitted[: len(request.resumed)])
    assert request.work_len == len(request.spec.prompt_ids) + len(request.resumed)
    assert not request.resumed or request.replay
    if prefill is not None:
        assert (request.lease is None) == (prefill.machine.state is WorkState.SENT)
        assert (prefill.machine.state is WorkState.PREFILLED) == (state is _S.HANDOFF)
    if decode is not None:
        assert decode.machine.state is not WorkState.SENT or state in _RESERVING
        assert request.lease is not None or decode.machine.state not in (WorkState.ATTACHED, WorkState.COMMITTED)
        assert (request.committed is not None) == (decode.machine.state is WorkState.COMMITTED)
    else:
        assert request.committed is None
