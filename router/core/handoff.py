"""The handoff: a request's way from the reservation on its decode worker to committed KV, as both workers report it.

Prefill starts only after the decode worker has reserved. The decode worker learns which lease it reads as soon as the lease
exists and the worker has reserved. In a rebind the lease exists first. The first token goes to the client meanwhile, and the
others follow once the KV is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from pdserve.core.errors import InternalBug, ReplicaLost
from pdserve.core.sampling import FinishReason, Placement
from pdserve.core.worker import Role
from router.api.answer import Delta
from router.core.dispatcher import Dispatcher
from router.core.events import (
    Effect,
    Effects,
    EmitDelta,
    KvCommitted,
    NoRoom,
    PrefillStarted,
    Refused,
    Reserved,
    Row,
    SendAttach,
    StepRows,
)
from router.core.forecast import Transfers
from router.core.health import Health, Pairs
from router.core.live_request import LiveRequest, RemoteWork, StoryKind, delta_of
from router.core.recovery import Cost, Recovery
from router.core.request_machine import RequestEvent, RequestState
from router.core.requests import Requests
from router.core.work_machine import WorkEvent, WorkState

_S, _E = RequestState, RequestEvent

# Tokens ---------------------------------------------------------------------------------------------------------------
#
# Tokens on their way from workers to clients. Only this part of the router costs time for every token.


class Tokens:
    """Takes the rows of engine steps, and emits each request's tokens in order."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def step(self, event: StepRows, now_s: float) -> Effects:
        """Take the rows of one engine step. A row of an unknown link or handle is stale and is dropped; a row that breaks the
        protocol fails only its own request."""
        worker = self._requests.registry.seen(event.link, now_s=now_s)
        if worker is None:
            return
        for row in event.rows:
            work = worker.work.get(row.handle)  # type: ignore[call-overload]  # a Handle on the wire is a plain int
            if work is not None:
                try:
                    yield from self._row(work, row, now_s)
                except Exception as exc:  # noqa: BLE001 - `Requests.alone` would cost a generator for each token
                    yield from self._requests.contain(work.request, exc, now_s)

    def _row(self, work: RemoteWork, row: Row, now_s: float) -> Iterable[Effect]:
        """Take a row, and return the effects of the tokens that may go out now. It is no generator, to cost less."""
        request = work.request
        delta = delta_of(row, request.spec)
        if delta.finish_reason is not None:
            request.told(row.speculation)
        if request.machine.state is _S.DECODING and work.role is Role.DECODE:
            ready = request.output.accept(delta)
            if ready and request.times.attempt.first_decode_s is None:  # a row that came before is no decoded token
                self._note_first(work, now_s)
            return self._out(request, ready[0], now_s) if len(ready) == 1 else self._emit(request, ready, now_s)
        if request.output.is_repeat(delta.index, len(delta.ids)):
            return ()
        if work.role is Role.PREFILL:
            return self._first_token(work, delta, now_s)
        request.machine.move(_E.TOKEN_OUT)  # legal while the first token is still on its way over the prefill worker's link
        request.output.hold(delta, after=len(request.resumed) + 1)
        return ()

    def _first_token(self, work: RemoteWork, delta: Delta, now_s: float) -> Effects:
        """Take the token that prefill draws: token 0, or in a replay the first token that the client does not have. Raises
        `InternalBug` for several tokens, when no lease was granted, or when the token came already."""
        request = work.request
        if len(delta.ids) != 1:
            raise InternalBug(f"request {request.request_id}: prefill sent {len(delta.ids)} tokens")
        work.machine.move(WorkEvent.FIRST_TOKEN)
        request.output.pass_first(delta.index)
        self._note_computed(work, now_s)
        if delta.finish_reason is not None:
            yield from self._emit(request, (delta,), now_s, last=_E.FINAL_FIRST_TOKEN)
            return
        request.machine.move(_E.FIRST_TOKEN)
        yield from self._emit(request, (delta,), now_s)
        if request.decode is not None and request.decode.machine.state is WorkState.COMMITTED:
            yield from self.start_decoding(request, now_s)

    def _note_first(self, work: RemoteWork, now_s: float) -> None:
        """Record the time of a token from decode. The first token of a colocated attempt ends its prefill; the next token is
        the first decoded token."""
        times = work.request.times.attempt
        if work.request.placement is Placement.COLOCATED and times.prefill_ended_s is None:
            self._note_computed(work, now_s)
        else:
            times.first_decode_s = now_s

    def _note_computed(self, work: RemoteWork, now_s: float) -> None:
        """Record that a worker has computed the prompt of its work."""
        work.request.times.attempt.prefill_ended_s = now_s
        worker = self._requests.registry.get(work.link)
        if worker is not None:
            worker.computed(work.handle)
        if work.role is Role.DECODE:
            self._requests.free_siblings(work.request, now_s)

    def start_decoding(self, request: LiveRequest, now_s: float) -> Effects:
        """Let decoded tokens out: the first token went out and decode has the KV. Prefill has nothing left to do."""
        request.machine.move(_E.KV_COMMITTED)
        if request.prefill is not None:
            self._requests.drop(request.prefill)
        held = request.output.drain()
        if held:
            request.times.attempt.first_decode_s = now_s
        yield from self._emit(request, held, now_s)

    def _emit(self, request: LiveRequest, deltas: Sequence[Delta], now_s: float, *, last: RequestEvent = _E.STOPPED) -> Effects:
        """Let deltas out that are next in order. The finish reason of the last delta ends the request by the event `last`."""
        for delta in deltas:
            yield from self._out(request, delta, now_s, last=last)

    def _out(self, request: LiveRequest, delta: Delta, now_s: float, *, last: RequestEvent = _E.STOPPED) -> Iterable[Effect]:
        """Let one delta out, as `_emit` does with several deltas. This is no generator, because a call then costs less."""
        times = request.times
        request.emitted.extend(delta.ids)
        if delta.finish_reason is FinishReason.LENGTH and request.remaining_tokens:
            raise _too_short(request, last)
        if times.first_token_s is None:
            times.first_token_s, times.drew_first = now_s, times.attempt
            request.story.note(now_s, StoryKind.FIRST_TOKEN)
        times.last_token_s = now_s
        shown = (EmitDelta(request.request_id, delta),) if request.probe is None else ()
        return shown if delta.finish_reason is None else itertools.chain(shown, self._finish(request, last, now_s))

    def _finish(self, request: LiveRequest, last: RequestEvent, now_s: float) -> Effects:
        if last is _E.STOPPED and request.decode is not None:
            self._requests.drop(request.decode)  # the worker ended this work with its last token
        if request.probe is None:
            self._requests.outputs.saw(request, request.output.next_index)
            if (bound_s := request.times.attempt.bind_sent_s) is not None:
                self._requests.stays.saw(now_s - bound_s)
        yield from self._requests.end(request, last, now_s, None)


def _too_short(request: LiveRequest, last: RequestEvent) -> InternalBug:
    asked, worker = request.spec.sampling.max_tokens, request.decode_worker if last is _E.STOPPED else request.prefill_worker
    return InternalBug(f"{worker} ended request {request.request_id} at {len(request.emitted)} of {asked} tokens")


_S, _E, _W = RequestState, RequestEvent, WorkEvent


# The handoff -----------------------------------------------------------------------------------------------------


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
