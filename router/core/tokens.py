"""Tokens on their way from workers to clients. Only this part of the router costs time for every token."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from pdserve.core.errors import InternalBug
from pdserve.core.sampling import FinishReason, Placement
from pdserve.core.worker import Role
from router.api.answer import Delta
from router.core.events import Effect, Effects, EmitDelta, Row, StepRows
from router.core.live_request import LiveRequest, RemoteWork, StoryKind, delta_of
from router.core.request_machine import RequestEvent, RequestState
from router.core.requests import Requests
from router.core.work_machine import WorkEvent, WorkState

_S, _E = RequestState, RequestEvent


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
        if request.machine.state is _S.DECODING and work.role is Role.DECODE:
            if request.times.attempt.first_decode_s is None:
                self._note_first(work, now_s)
            ready = request.output.accept(delta)
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
