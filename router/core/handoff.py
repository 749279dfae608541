"""The handoff: a request's way from the reservation on its decode worker to committed KV, as both workers report it.

Prefill starts only after the decode worker has reserved. The decode worker learns which lease it reads as soon as the lease
exists and the worker has reserved. In a rebind the lease exists first.
"""

from __future__ import annotations

from pdserve.core.errors import ReplicaLost
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role
from router.core.dispatcher import Dispatcher
from router.core.events import Effects, KvCommitted, NoRoom, PrefillStarted, Refused, Reserved, SendAttach
from router.core.forecast import Transfers
from router.core.health import Health, Pairs
from router.core.live_request import LiveRequest, RemoteWork, StoryKind
from router.core.recovery import Cost, Recovery
from router.core.request_machine import RequestEvent, RequestState
from router.core.requests import Requests
from router.core.tokens import Tokens
from router.core.work_machine import WorkEvent, WorkState

_S, _E, _W = RequestState, RequestEvent, WorkEvent


class Handoff:
    """Handles the reports of both workers between bind and commit. A report that the work's machine does not allow fails the
    request."""

    def __init__(
        self,
        requests: Requests,
        dispatcher: Dispatcher,
        recovery: Recovery,
        pairs: Pairs,
        tokens: Tokens,
        transfers: Transfers,
        health: Health,
    ) -> None:
        self._requests = requests
        self._dispatcher = dispatcher
        self._recovery = recovery
        self._pairs = pairs
        self._tokens = tokens
        self._transfers = transfers
        self._health = health

    def reserved(self, work: RemoteWork, event: Reserved, now_s: float) -> Effects:
        """Go on after a reservation: start prefill, attach the lease of a rebind, or let the worker prefill locally."""
        request = work.request
        work.machine.move(_W.RESERVED)
        request.story.note(now_s, StoryKind.RESERVED, decode_worker=request.decode_worker)
        request.no_room = ""
        if request.placement is Placement.COLOCATED:
            request.cached(event.cached_tokens)
        times = request.times
        times.attempt.reserved_s = now_s
        if times.had_room_s is None:
            times.had_room_s = times.attempt.bind_sent_s
        if request.machine.state is not _S.BINDING:
            yield from self._attach(request, now_s)
        elif request.placement is Placement.COLOCATED:
            request.machine.move(_E.RESERVED_LOCAL)
            self._requests.demand.placed(request, Role.DECODE)
        else:
            yield from self._prefill(request, _E.RESERVED, now_s)

    def _prefill(self, request: LiveRequest, event: RequestEvent, now_s: float) -> Effects:
        """Start the prefill, which is `event`. Without a prefill worker the bind is given back and the request waits again."""
        command = self._dispatcher.prefill(request, now_s)
        if command is not None:
            yield command
            request.machine.move(event)
        elif request.probe is not None:
            yield from self._recovery.retry(
                request, ReplicaLost("its prefill worker has left or is leaving"), now_s, Cost.NOTHING
            )
        else:
            request.story.note(now_s, StoryKind.REQUEUED, why=_E.PREFILL_POOL_EMPTY)
            yield from self._dispatcher.requeue(request, _E.PREFILL_POOL_EMPTY)

    def no_room(self, work: RemoteWork, event: NoRoom, now_s: float) -> Effects:
        """Go on after a refused bind: the request waits again, and a rebind becomes a retry."""
        request = work.request
        work.machine.move(_W.NO_ROOM)
        decode_worker, lacking = request.decode_worker, _lacking(event)
        needed = event.blocks_needed
        request.story.note(now_s, StoryKind.NO_ROOM, decode_worker=decode_worker, blocks_needed=needed, **lacking)
        request.no_room = ": ".join([f"{decode_worker} has no room", *lacking.values()])
        worker = self._requests.drop(work)
        if worker is not None:
            worker.refused_blocks = event.blocks_needed
            worker.touch()
        loss = request.loss
        if request.machine.state is _S.BINDING and request.probe is None:
            yield from self._dispatcher.requeue(request, _E.NO_ROOM)
        else:  # a rebind without room gives the lease back; `Probes` repeats a probe
            yield from self._recovery.retry(request, loss or ReplicaLost(request.no_room), now_s, Cost.NOTHING)

    def place_elsewhere(self, work: RemoteWork, event: Refused, now_s: float) -> Effects:
        """Place work elsewhere that a draining worker has refused. This is no failure: no attempt, retry or pair is charged.

        After a refused prefill the reservation on the decode worker stays. A refused rebind goes to the next decode worker. If
        none has room, the loss that made the rebind necessary decides.
        """
        request = work.request
        work.machine.move(_W.DRAINING)
        worker = self._requests.drop(work)
        assert worker is not None
        self._health.drains(worker, now_s)  # also if its heartbeat has not said so yet: nobody asks it again
        request.story.note(now_s, StoryKind.REFUSED, role=work.role, worker=worker.hello.worker_id, why=_E.DRAINING)
        if work.role is Role.PREFILL:
            yield from self._prefill(request, _E.DRAINING, now_s)
        elif request.probe is not None:
            yield from self._recovery.retry(request, ReplicaLost(f"{worker.name} drains"), now_s, Cost.NOTHING)
        elif request.machine.state is _S.BINDING:
            yield from self._dispatcher.requeue(request, _E.DRAINING)
        else:
            yield from self._recovery.rebind(request, request.loss or ReplicaLost(f"{worker.name} drains"), now_s)

    def prefill_started(self, work: RemoteWork, event: PrefillStarted, now_s: float) -> Effects:
        """Keep the granted lease, and attach it if the decode worker has reserved."""
        request = work.request
        work.machine.move(_W.PREFILL_STARTED)
        request.lease = event
        request.cached(event.cached_tokens)
        request.times.attempt.prefill_started_s = now_s
        request.story.note(now_s, StoryKind.LEASE_GRANTED, lease=event.lease_id, prefill_worker=request.prefill_worker)
        yield from self._attach(request, now_s)

    def _attach(self, request: LiveRequest, now_s: float) -> Effects:
        decode, lease = request.decode, request.lease
        if decode is not None and decode.machine.state is WorkState.RESERVED and lease is not None:
            decode.machine.move(_W.ATTACHED)
            request.story.note(now_s, StoryKind.ATTACHED, decode_worker=request.decode_worker)
            yield SendAttach(decode.link, decode.handle, lease.lease_id, lease.ticket)

    def committed(self, work: RemoteWork, event: KvCommitted, now_s: float) -> Effects:
        """Record that the decode worker has the KV. If the first token went out already, let decoded tokens out."""
        request = work.request
        work.machine.move(_W.KV_COMMITTED)
        request.committed = event
        bind_s = request.times.attempt.bind_sent_s
        took_s = 0.0 if bind_s is None else now_s - bind_s  # no transfer took longer, whatever its worker says
        self._transfers.saw(event.kv_bytes, min(event.exposed_transfer_s, took_s))
        request.times.attempt.kv_committed_s = now_s
        request.story.note(now_s, StoryKind.COMMITTED, kv_bytes=event.kv_bytes, transfer_s=event.transfer_s)
        self._praise_pair(request)
        self._requests.free_siblings(request, now_s)
        if request.machine.state is _S.HANDOFF:
            yield from self._tokens.start_decoding(request, now_s)

    def _praise_pair(self, request: LiveRequest) -> None:
        if request.prefill is not None and request.decode is not None:
            registry = self._requests.registry
            lender, reader = registry.get(request.prefill.link), registry.get(request.decode.link)
            if lender is not None and reader is not None:
                self._pairs.succeeded(lender.hello, reader.hello)


def _lacking(event: NoRoom) -> dict[str, str]:
    """Return a story's field that names the KV group without room, if the worker has named one."""
    return {} if event.shortage is None else {"shortage": str(event.shortage)}
