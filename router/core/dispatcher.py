"""The dispatcher puts requests on workers: waiting requests in their order, and requests that lost their decode worker in a
handoff.

Waiting requests are placed strictly in order, so that a large request at the head is not overtaken for ever. A request without
room keeps every worker that could serve it from the requests behind it, and no other worker: one that is too small for it, or
that the KV of no prefill worker reaches, goes on with the next requests. A request that no linked worker could serve is passed
over and keeps its place. It waits `recovery_wait_s` for a worker to come back, because some worker could serve it when it was
admitted.
"""

from __future__ import annotations

from typing import Final

from pdserve.core.errors import Unavailable
from pdserve.core.ids import WorkerId
from pdserve.core.sampling import Placement
from router.core.events import Effects, EffectsThen, LinkId, SendBind, SendPrefill
from router.core.live_request import LiveRequest
from router.core.machines.request_machine import RequestEvent
from router.core.placer import Placer, Wanted
from router.core.policy.decider import Reason
from router.core.policy.shortlist import Why
from router.core.probe_book import ProbeBook
from router.core.registry import Worker
from router.core.requests import Requests
from router.core.story import StoryKind

_E = RequestEvent

LOOK_PAST: Final = 16
"""At most this many requests without room are looked past in one go. Each takes 0.1 ms (measured, four workers in each pool),
so a long queue costs an event at most 2 ms."""


class Dispatcher:
    """Sends binds and prefills, and returns requests to the queue."""

    def __init__(self, requests: Requests, placer: Placer, probe_book: ProbeBook, *, recovery_wait_s: float) -> None:
        self._requests = requests
        self._placer = placer
        self._probe_book = probe_book
        self._recovery_wait_s = recovery_wait_s
        self._seen_room, self._seen_workers = self._room(), self._workers()

    def _room(self) -> tuple[int, int, int]:
        """Return numbers that change when a request begins to wait, or when there may be room."""
        return self._requests.waiting.added, self._requests.ended, self._requests.registry.news

    def _workers(self) -> tuple[int, int]:
        """Return numbers that change when a request that no worker could serve may have a worker."""
        return self._requests.registry.joined, self._probe_book.results

    @property
    def may_place(self) -> bool:
        """Something has changed since the last `pump` that waiting requests or claimed probes wait for. Probe results always
        end a probe."""
        return bool(len(self._requests.waiting) or self._probe_book.claims) and self._room() != self._seen_room

    def pump(self, now_s: float, *, recheck: bool) -> Effects:
        """Place waiting requests, as far as there is room. With `recheck`, or after a change of the workers that serve, also
        look again at requests that no worker could serve.

        Without that distinction, every request that ends would cost a look at all of those requests, perhaps a thousand.
        """
        yield from self._walk(now_s, recheck=recheck or self._workers() != self._seen_workers)
        # Requests that the walk itself ended held no room that others wait for.
        self._seen_room, self._seen_workers = self._room(), self._workers()

    def _walk(self, now_s: float, *, recheck: bool) -> Effects:
        position, blocked = 0, 0
        kept: set[LinkId] = set()
        while (request := self._requests.waiting.at(position)) is not None:
            if request.unplaceable_since_s is None or recheck:
                wanted = yield from self._requests.alone(request, self._place(request, kept, now_s), now_s)
                if wanted is not None:
                    blocked += 1
                    kept.update(wanted.links)
                    if blocked == LOOK_PAST or not self._placer.room_beside(kept, now_s=now_s):
                        return
            if self._requests.waiting.at(position) is request:
                position += 1

    def _place(self, request: LiveRequest, kept: set[LinkId], now_s: float) -> EffectsThen[Wanted | None]:
        """Bind a waiting request if a worker that is not in `kept` has room. Return the workers that it waits for, or None when
        it waits for none."""
        try:
            place = self._placer.place(request, now_s=now_s, kept=kept)
        except Unavailable as exc:
            yield from self._find_nobody(request, exc, now_s)
            return None
        request.unplaceable_since_s = None
        if isinstance(place, Wanted):
            request.story.waits(now_s, len(place.links))
            return place
        self._requests.stop_waiting(request)
        yield from self.bind(request, place.worker, place.placement, place.reason, now_s)
        return None

    def _find_nobody(self, request: LiveRequest, error: Unavailable, now_s: float) -> Effects:
        """Let a request wait on that no worker could serve. Once it has waited `recovery_wait_s`, it fails with `error`."""
        if request.unplaceable_since_s is None:
            request.unplaceable_since_s = now_s
            request.story.note(now_s, StoryKind.NO_WORKER, message=error.message)
        if now_s - request.unplaceable_since_s >= self._recovery_wait_s:
            yield from self._requests.end(request, _E.UNPLACEABLE, now_s, error)

    def bind(self, request: LiveRequest, worker: Worker, placement: Placement, reason: Reason, now_s: float) -> Effects:
        """Ask a decode worker to reserve all blocks of the request. A prefill worker is picked only after the reservation."""
        request.machine.move(_E.DECODE_PICKED)
        request.placement, request.placement_reason = placement, reason.value
        request.prefill_worker = WorkerId("")
        request.story.note(
            now_s,
            StoryKind.PLACED,
            placement=placement,
            reason=reason,
            decode_worker=worker.hello.worker_id,
            why=self._placer.why if request.probe is None else Why.PROBE,
            scores=self._placer.scores if request.probe is None else (),
            attempt=request.machine.attempt,
            bind=request.machine.bind,
        )
        yield from self._send_bind(request, worker, now_s)

    def rebind(self, request: LiveRequest, now_s: float) -> EffectsThen[bool]:
        """Let another decode worker replace the lost one under the same lease. False: no worker has room now.

        A rebind comes before all waiting requests, because the lease lasts only so long.
        """
        assert request.prefill is not None
        assert request.decode is None
        worker = self._placer.rebind_worker(request, request.prefill.link, now_s=now_s)
        if worker is None:
            return False
        request.machine.move(_E.REBOUND)
        request.story.note(
            now_s,
            StoryKind.REBOUND,
            decode_worker=worker.hello.worker_id,
            why=self._placer.why,
            scores=self._placer.scores,
            bind=request.machine.bind,
        )
        self._requests.ledger.give_back(request.request_id)
        yield from self._send_bind(request, worker, now_s)
        return True

    def _send_bind(self, request: LiveRequest, worker: Worker, now_s: float) -> Effects:
        self._requests.ledger.take(request.request_id, worker.link, self._placer.need_tokens(request))
        work = self._requests.place_on(worker, request)
        request.times.attempt.bind_sent_s = now_s
        local = request.placement is Placement.COLOCATED
        if local:
            worker.sent(work.handle, request.work_len)
        remaining_s = max(0.0, request.deadline_s - now_s)
        yield SendBind(worker.link, request.work(work.handle), remaining_s, local)

    def prefill(self, request: LiveRequest, now_s: float) -> EffectsThen[bool]:
        """Start the prefill of a request whose decode worker has reserved. False: no prefill worker can compute it now."""
        assert request.decode is not None
        worker = self._placer.prefill_worker(request, request.decode.link, now_s=now_s)
        if worker is None:
            return False
        work = self._requests.place_on(worker, request)
        request.times.attempt.prefill_sent_s = now_s
        request.story.note(
            now_s,
            StoryKind.PREFILL_SENT,
            prefill_worker=worker.hello.worker_id,
            why=self._placer.why,
            scores=self._placer.scores,
        )
        worker.sent(work.handle, request.work_len)
        yield SendPrefill(worker.link, request.work(work.handle))
        return True

    def requeue(self, request: LiveRequest, event: RequestEvent) -> Effects:
        """Withdraw a bind for which nothing was computed. The same attempt waits for another bind."""
        request.machine.move(event)
        yield from self._requests.withdraw(request)
        self._requests.wait(request)
