"""The dispatcher puts requests on workers: waiting requests in their order, and requests that lost their decode worker in a
handoff.

Waiting requests are placed in the order of their turns. A request without room claims one worker: among the candidates, the
worker with the most free KV. From then on only this request and earlier requests get room on that worker. The request goes
elsewhere if another worker has room first. Only the first request of a kind claims, so few workers are claimed however many
wait.

Later requests may *pass* the claiming request on its worker, in KV that it does not need: together they leave it enough KV once
the running requests have ended, and none passes any more as soon as the claiming request would have room without them. So the
claiming request waits at most until its worker has finished its present requests, and it delays no request that can be served
beside it or elsewhere.

A request that no linked worker could serve is parked. It waits `recovery_wait_s` for a worker to come back, because some worker
could serve it when it was admitted.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.core.errors import Unavailable
from pdserve.core.ids import RequestId, WorkerId
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role
from router.core.events import Effect, Effects, SendBind, SendPrefill
from router.core.forecast import check_target, predict, queue_wait_s
from router.core.live_request import LiveRequest, Reason, StoryKind
from router.core.placer import Pick, Placer
from router.core.pools import Pools
from router.core.probe_book import ProbeBook
from router.core.registry import Worker
from router.core.request_machine import RequestEvent
from router.core.requests import Requests
from router.core.turns import Turn
from router.core.waiting import Kind

_E = RequestEvent


class Dispatcher:
    """Sends binds and prefills, and returns requests to the queue."""

    def __init__(
        self, requests: Requests, placer: Placer, pools: Pools, probe_book: ProbeBook, *, recovery_wait_s: float
    ) -> None:
        self._requests = requests
        self._placer = placer
        self._probe_book = probe_book
        self._recovery_wait_s = recovery_wait_s
        self._pools = pools
        self._claims: dict[RequestId, LiveRequest] = {}
        """The requests that claimed a worker. Some may have let go since."""
        self._seen = self._news()
        self._seen_shifts = -1
        self._seen_tiers = 0

    def _news(self) -> tuple[int, int]:
        """Return numbers that change when there may be room for a request or a claimed probe that had none."""
        self._pools.refresh()
        return self._pools.opened + self._pools.shifts, self._probe_book.results

    @property
    def may_place(self) -> bool:
        """Something has changed since the last `pump` that waiting requests or claimed probes wait for. Probe results always
        end a probe."""
        waiting = self._requests.waiting
        return bool(waiting.fresh) or (bool(len(waiting) or self._probe_book.claims) and self._news() != self._seen)

    def foresee(self, request: LiveRequest, now_s: float) -> None:
        """Write the predicted TTFT into a new request whose class has a target for it. Raises `Overloaded` when the request
        would miss the target for want of a free worker. For a request without a target, no worker is looked at."""
        if request.slo.ttft_s is None:
            return
        requests, late_s = self._requests, now_s - request.times.arrived_s
        computer, has_room = self._placer.outlook(request, now_s=now_s)
        prediction = None
        if computer is not None:
            wait_s: float | None = 0.0
            if not has_room:
                drained_per_s = requests.stays.drained_per_s(len(requests.ledger))
                wait_s = queue_wait_s(requests.waiting.ahead_of(request), drained_per_s)
            prediction = predict(computer, request.work_len, wait_s)
        check_target(request.slo, prediction, late_s=late_s)
        if prediction is not None:
            request.predicted_ttft_s = late_s + prediction.ttft_s

    def admit(self, request: LiveRequest, now_s: float) -> Iterable[Effect]:
        """Place a new request at once when nobody waits and a worker has room. Otherwise it waits for its turn."""
        if not len(self._requests.waiting) and not self._probe_book.claims:
            try:
                pick = self._placer.place(request, now_s=now_s)
            except Unavailable:  # it passed the check, so a worker may come
                pick = None
            if pick is not None:
                return (self._bind_charged(request, pick, now_s),)
        self._requests.wait(request)
        return ()

    def pump(self, now_s: float, *, tick: bool = False) -> Effects:
        """Place waiting requests, as far as there is room. At a `tick`, also look at requests for which only time has passed: a
        wait may be over, or a pair may be usable again."""
        waiting = self._requests.waiting
        opened = self._news() != self._seen or (tick and self._placer.pairs_in_trouble)
        self._unpark(now_s, everyone=self._pools.shifts != self._seen_shifts or (tick and self._placer.pairs_in_trouble))
        if self._pools.tier_changes != self._seen_tiers:
            waiting.sort_anew()
        kinds = waiting.kinds() if opened else list(waiting.fresh)
        self._seen_tiers, self._seen_shifts = self._pools.tier_changes, self._pools.shifts
        waiting.fresh.clear()
        yield from self._walk(waiting.kinds() if self._renew_claims() else kinds, now_s)
        while self._renew_claims():  # a walk that places nobody changes no turn, so this ends
            yield from self._walk(waiting.kinds(), now_s)
        # Requests that the walk itself ended or placed held no room that others wait for.
        self._seen = self._news()
        waiting.fresh.clear()

    def _unpark(self, now_s: float, *, everyone: bool) -> None:
        """Let the next walk look at parked requests again: at all parked requests, or only at requests that have waited long
        enough."""
        waiting = self._requests.waiting
        for request in waiting.parked():
            since_s = request.unplaceable_since_s
            if everyone or since_s is None or now_s - since_s >= self._recovery_wait_s:
                waiting.unpark(request)

    def _walk(self, kinds: list[Kind], now_s: float) -> Effects:
        """Place requests in the order of their turns. A kind is left at its first request without room."""
        waiting = self._requests.waiting
        walk = waiting.walk(kinds)
        while (first := walk.next()) is not None:
            yield from self._requests.alone(first.request, self._place(first.request, first.turn, now_s), now_s)
            if waiting.kind(first.request) == first.kind:
                walk.left(first.kind)

    def _renew_claims(self) -> bool:
        """Set each claim to the present turn of its request. A turn becomes later while the client is served elsewhere. True: a
        claim has changed, so a request that came behind it may come before it now."""
        waiting, registry = self._requests.waiting, self._requests.registry
        self._claims = {request.request_id: request for request in self._claims.values() if request.keeps is not None}
        later = False
        for request in self._claims.values():
            worker = None if request.keeps is None else registry.get(request.keeps)
            if worker is None or worker.kept_for is None or waiting.kind(request) is None:
                continue
            turn = waiting.turn_of(request)
            if worker.kept_for != turn:
                later = later or worker.kept_for < turn
                self._requests.keep(request, turn, worker, self._placer.need_tokens(request))
        return later

    def _place(self, request: LiveRequest, turn: Turn, now_s: float) -> Effects:
        """Bind a waiting request if a worker has room. If none has, claim one."""
        try:
            pick = self._placer.place(request, now_s=now_s, turn=turn)
        except Unavailable as exc:
            yield from self._find_nobody(request, exc, now_s)
            return
        request.unplaceable_since_s = None
        if pick is None:
            self._claim(request, turn, now_s)
        else:
            yield self._bind_charged(request, pick, now_s)

    def place_first(self, request: LiveRequest, now_s: float) -> Effects:
        """Bind a waiting request before all others if a worker has room. The worker may be claimed by another request."""
        pick = self._placer.place(request, now_s=now_s)
        if pick is not None:
            yield self._bind_charged(request, pick, now_s)

    def _bind_charged(self, request: LiveRequest, pick: Pick, now_s: float) -> SendBind:
        """Bind a request in its turn. Its client is charged for the tokens that will probably be computed."""
        waiting = self._requests.waiting
        waiting.serve(request, pick.need_tokens - pick.cached_tokens, now_s)
        if waiting.holds(request):
            self._requests.stop_waiting(request)
        return self.bind(request, pick, now_s)

    def _claim(self, request: LiveRequest, turn: Turn, now_s: float) -> None:
        """Let a request without room claim a worker, unless it has claimed a worker already that could serve it."""
        if request.story.last_kind is not StoryKind.WAITS:
            request.story.waits(now_s, len(self._placer.waited_for(request, now_s=now_s)))
        kept = None if request.keeps is None else self._requests.registry.get(request.keeps)
        if kept is not None and self._placer.may_keep(request, kept, now_s=now_s):
            return
        self._requests.let_go(request)
        kind = self._requests.waiting.kind(request)
        for other in self._claims.values():
            if self._requests.waiting.kind(other) == kind:
                self._requests.let_go(other)  # it is not the first of its kind any more
        worker = self._placer.to_keep(request, now_s=now_s)
        if worker is not None:
            self._requests.keep(request, turn, worker, self._placer.need_tokens(request))
            self._claims[request.request_id] = request

    def _find_nobody(self, request: LiveRequest, error: Unavailable, now_s: float) -> Effects:
        """Park a request that no worker could serve. Once it has waited `recovery_wait_s`, it fails with `error`."""
        self._requests.let_go(request)
        if request.unplaceable_since_s is None:
            request.unplaceable_since_s = now_s
            request.story.note(now_s, StoryKind.NO_WORKER, message=error.message)
        if now_s - request.unplaceable_since_s >= self._recovery_wait_s:
            yield from self._requests.end(request, _E.UNPLACEABLE, now_s, error)
        else:
            self._requests.waiting.park(request)

    def bind(self, request: LiveRequest, pick: Pick, now_s: float) -> SendBind:
        """Ask a decode worker to reserve all blocks of the request. A prefill worker is picked only after the reservation."""
        request.machine.move(_E.DECODE_PICKED)
        request.placement, request.placement_reason = pick.placement, pick.reason.value
        request.prefill_worker, request.beside = WorkerId(""), None
        request.story.note(
            now_s,
            StoryKind.PLACED,
            placement=pick.placement,
            reason=pick.reason,
            decode_worker=pick.worker.hello.worker_id,
            why=pick.why,
            scores=pick.scores,
            attempt=request.machine.attempt,
            bind=request.machine.bind,
        )
        return self._send_bind(request, pick, now_s)

    def rebind(self, request: LiveRequest, now_s: float) -> SendBind | None:
        """Let another decode worker replace the lost one under the same lease. None: no worker has room now.

        A rebind comes before all waiting requests, because the lease will expire.
        """
        assert request.prefill is not None
        assert request.decode is None
        pick = self._placer.rebind_worker(request, request.prefill.link, now_s=now_s)
        if pick is None:
            return None
        request.machine.move(_E.REBOUND)
        request.story.note(
            now_s,
            StoryKind.REBOUND,
            decode_worker=pick.worker.hello.worker_id,
            why=pick.why,
            scores=pick.scores,
            bind=request.machine.bind,
        )
        self._requests.ledger.give_back(request.request_id)
        return self._send_bind(request, pick, now_s)

    def _send_bind(self, request: LiveRequest, pick: Pick, now_s: float) -> SendBind:
        worker = pick.worker
        self._placer.took(pick)
        shared = pick.cached_tokens if pick.reason is Reason.SIBLING else 0  # charged to its leader
        passed = worker.kept_for is not None
        self._requests.ledger.take(request.request_id, worker.link, pick.need_tokens - shared, passed=passed)
        if passed:
            self._note_pass(worker)
        work = self._requests.place_on(worker, request)
        request.times.attempt.bind_sent_s = now_s
        local = request.placement is Placement.COLOCATED
        if local:
            worker.sent(work.handle, request.work_len - pick.cached_tokens)
        remaining_s = max(0.0, request.deadline_s - now_s)
        return SendBind(worker.link, request.work(work.handle), remaining_s, local)

    def _note_pass(self, worker: Worker) -> None:
        """Count a request that gets room on a claimed worker before the claiming request."""
        for request in self._claims.values():
            if request.keeps == worker.link and worker.kept_for is not None:
                request.passed_by += 1
                self._requests.keep(request, worker.kept_for, worker, self._placer.need_tokens(request))

    def prefill(self, request: LiveRequest, now_s: float) -> SendPrefill | None:
        """Start the prefill of a request whose decode worker has reserved. None: no prefill worker can compute it now."""
        assert request.decode is not None
        pick = self._placer.prefill_worker(request, request.decode.link, now_s=now_s)
        if pick is None:
            return None
        worker = pick.worker
        self._placer.took(pick)
        work = self._requests.place_on(worker, request)
        request.times.attempt.prefill_sent_s = now_s
        request.story.note(
            now_s,
            StoryKind.PREFILL_SENT,
            prefill_worker=worker.hello.worker_id,
            why=pick.why,
            scores=pick.scores,
        )
        worker.sent(work.handle, request.work_len - pick.cached_tokens)
        self._requests.demand.placed(request, Role.PREFILL)
        return SendPrefill(worker.link, request.work(work.handle))

    def requeue(self, request: LiveRequest, event: RequestEvent) -> Effects:
        """Withdraw a bind for which nothing was computed. The same attempt waits for another bind."""
        request.machine.move(event)
        yield from self._requests.withdraw(request)
        self._requests.wait(request)
