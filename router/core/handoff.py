"""The handoff: a request's way from the reservation on its decode worker to committed KV, as both workers report it.

Prefill starts only after the decode worker has reserved. The decode worker is told which lease it reads as soon as the lease
exists and the worker has reserved. In a rebind the lease exists first.
"""

from __future__ import annotations

from pdserve.core.errors import InternalBug, ReplicaLost
from pdserve.core.request_machine import RequestEvent, RequestState
from pdserve.core.sampling import Placement
from router.core.dispatcher import Dispatcher
from router.core.events import KvCommitted, NoRoom, PrefillStarted, SendAttach
from router.core.live_request import LiveRequest, RemoteWork
from router.core.pairs import Pairs
from router.core.recovery import Recovery
from router.core.requests import Requests
from router.core.story import StoryKind

_S, _E = RequestState, RequestEvent


class Handoff:
    """Handles the reports of both workers between bind and commit."""

    def __init__(self, requests: Requests, dispatcher: Dispatcher, recovery: Recovery, pairs: Pairs) -> None:
        self._requests = requests
        self._dispatcher = dispatcher
        self._recovery = recovery
        self._pairs = pairs

    def reserved(self, work: RemoteWork, now_s: float) -> None:
        """Go on after a reservation: start prefill, attach the lease of a rebind, or let the worker prefill locally."""
        request = work.request
        if work.reserved:
            self._break(request, "a reservation came twice", now_s)
            return
        work.reserved = True
        request.story.note(now_s, StoryKind.RESERVED, decode_worker=request.decode_worker)
        times = request.times
        times.attempt.reserved_s = now_s
        if times.had_room_s is None:
            times.had_room_s = times.attempt.bind_sent_s
        if request.machine.state is not _S.BINDING:
            if self._requests.move(request, _E.RESERVED, now_s):
                self._attach(request, now_s)
        elif request.placement is Placement.COLOCATED:
            self._requests.move(request, _E.RESERVED_LOCAL, now_s)
        elif self._dispatcher.prefill(request, now_s):
            self._requests.move(request, _E.RESERVED, now_s)
        elif request.probe is not None:
            self._recovery.retry(request, ReplicaLost("its prefill worker has left or is leaving"), now_s)
        else:
            self._dispatcher.requeue(request, _E.PREFILL_POOL_EMPTY, now_s)

    def no_room(self, work: RemoteWork, event: NoRoom, now_s: float) -> None:
        """Go on after a refused bind: the request waits again, and a rebind becomes a retry."""
        request = work.request
        if work.reserved:
            self._break(request, "NoRoom came after a reservation", now_s)
            return
        worker = self._requests.drop(work)
        if worker is not None:
            worker.refused_blocks = event.blocks_needed
        request.story.note(now_s, StoryKind.NO_ROOM, decode_worker=request.decode_worker, blocks_needed=event.blocks_needed)
        loss = request.loss
        if request.machine.state is _S.BINDING and request.probe is None:
            self._dispatcher.requeue(request, _E.NO_ROOM, now_s)
        else:  # a rebind without room gives the lease back; `Probes` repeats a probe
            self._recovery.retry(request, loss or ReplicaLost(f"{request.decode_worker} has no room"), now_s)

    def prefill_started(self, work: RemoteWork, event: PrefillStarted, now_s: float) -> None:
        """Keep the granted lease, and attach it if the decode worker has reserved."""
        request = work.request
        if request.lease is not None:
            self._break(request, "prefill started twice", now_s)
        elif self._requests.move(request, _E.PREFILL_STARTED, now_s):
            request.lease = event
            request.times.attempt.prefill_started_s = now_s
            request.story.note(now_s, StoryKind.LEASE_GRANTED, lease=str(event.lease_id), prefill_worker=request.prefill_worker)
            self._attach(request, now_s)

    def _attach(self, request: LiveRequest, now_s: float) -> None:
        decode, lease = request.decode, request.lease
        if decode is not None and decode.reserved and lease is not None:
            decode.attached = True
            request.story.note(now_s, StoryKind.ATTACHED, decode_worker=request.decode_worker)
            attach = SendAttach(decode.link, decode.handle, lease.lease_id, lease.ticket)
            self._requests.effects.append(attach)

    def committed(self, work: RemoteWork, event: KvCommitted, now_s: float) -> None:
        """Record that the decode worker has the KV. The caller lets tokens out if the state is DECODING afterwards."""
        request = work.request
        if not work.attached or request.committed is not None:
            self._break(request, "KV was committed twice, or without an Attach", now_s)
        elif self._requests.move(request, _E.KV_COMMITTED, now_s):
            request.committed = event
            request.times.attempt.kv_committed_s = now_s
            request.story.note(now_s, StoryKind.COMMITTED, kv_bytes=event.kv_bytes, transfer_s=event.transfer_s)
            self._praise_pair(request)

    def _praise_pair(self, request: LiveRequest) -> None:
        if request.prefill is not None and request.decode is not None:
            registry = self._requests.registry
            lender, reader = registry.get(request.prefill.link), registry.get(request.decode.link)
            if lender is not None and reader is not None:
                self._pairs.succeeded(lender.hello, reader.hello)

    def _break(self, request: LiveRequest, what: str, now_s: float) -> None:
        self._requests.break_off(request, InternalBug(f"request {request.request_id}: {what}"), now_s)
