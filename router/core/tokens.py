"""Tokens on their way from workers to clients. Only this part of the router costs time for every token."""

from __future__ import annotations

from pdserve.core.errors import InternalBug
from pdserve.core.request_machine import RequestEvent, RequestState
from pdserve.core.sampling import FinishReason, Placement
from router.api.answer import Delta
from router.core.events import EmitDelta, Role, Row, StepRows
from router.core.live_request import LiveRequest, RemoteWork
from router.core.output import delta_of
from router.core.registry import Worker
from router.core.requests import Requests
from router.core.story import StoryKind

_S, _E = RequestState, RequestEvent


class Tokens:
    """Takes the rows of engine steps, and emits each request's tokens in order."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def step(self, worker: Worker, event: StepRows, now_s: float) -> None:
        """Take the rows of one engine step. A row of an unknown handle is stale and is dropped; a row that breaks the protocol
        fails its own request alone."""
        works = worker.work
        for row in event.rows:
            work = works.get(row.handle)  # type: ignore[call-overload]  # a Handle on the wire is a plain int
            if work is not None:
                try:
                    self._row(work, row, now_s)
                except InternalBug as exc:
                    self._requests.break_off(work.request, exc, now_s)

    def _row(self, work: RemoteWork, row: Row, now_s: float) -> None:
        request = work.request
        delta = delta_of(row, logprobs=request.sampling.logprobs is not None)
        if request.machine.state is _S.DECODING and work.role is Role.DECODE:
            if request.times.attempt.first_decode_s is None:
                _note_first(request, now_s)
            for ready in request.output.accept(delta):
                self._emit(request, ready, now_s)
        elif request.output.is_repeat(delta.index, len(delta.ids)):
            return
        elif work.role is Role.PREFILL:
            self._first_token(request, delta, now_s)
        else:
            request.machine.move(_E.TOKEN_OUT)  # legal while the first token is still on its way over the prefill worker's link
            request.output.hold(delta, after=request.resumed + 1)

    def _first_token(self, request: LiveRequest, delta: Delta, now_s: float) -> None:
        """Take the token that prefill draws: token 0, or in a replay the first token that the client does not have. Raises
        `InternalBug` for several tokens, or when no lease was granted."""
        if len(delta.ids) != 1 or request.lease is None:
            lease = "no lease" if request.lease is None else f"lease {request.lease.lease_id}"
            raise InternalBug(f"request {request.request_id}: prefill sent {len(delta.ids)} tokens, {lease}")
        request.output.pass_first(delta.index)
        request.times.attempt.prefill_ended_s = now_s
        if delta.finish_reason is not None:
            self._emit(request, delta, now_s, last=_E.FINAL_FIRST_TOKEN)
            return
        request.machine.move(_E.FIRST_TOKEN)
        self._emit(request, delta, now_s)
        if request.committed is not None:
            request.machine.move(_E.KV_COMMITTED)
            self.start_decoding(request, now_s)

    def start_decoding(self, request: LiveRequest, now_s: float) -> None:
        """Let decoded tokens out: the first token went out and decode has the KV. Prefill has nothing left to do."""
        if request.prefill is not None:
            self._requests.drop(request.prefill)
        for ready in request.output.drain():
            if request.times.attempt.first_decode_s is None:
                _note_first(request, now_s)
            self._emit(request, ready, now_s)

    def _emit(self, request: LiveRequest, delta: Delta, now_s: float, *, last: RequestEvent = _E.STOPPED) -> None:
        times = request.times
        if times.first_token_s is None:
            times.first_token_s = now_s
            request.story.note(now_s, StoryKind.FIRST_TOKEN)
        times.last_token_s = now_s
        request.emitted.extend(delta.ids)
        if delta.finish_reason is FinishReason.LENGTH and request.remaining_tokens:
            asked, worker = request.sampling.max_tokens, request.decode_worker if last is _E.STOPPED else request.prefill_worker
            raise InternalBug(f"{worker} ended request {request.request_id} at {len(request.emitted)} of {asked} tokens")
        if request.probe is None:
            self._requests.effects.append(EmitDelta(request.request_id, delta))
        if delta.finish_reason is not None:
            if last is _E.STOPPED and request.decode is not None:
                self._requests.drop(request.decode)  # the worker ended this work with its last token
            if request.probe is None:
                self._requests.outputs.saw(request.output.next_index)
            self._requests.end(request, last, now_s, None)


def _note_first(request: LiveRequest, now_s: float) -> None:
    """Record the time of a token from decode. The first token of a colocated attempt ends its prefill; the next one is the
    first decoded token."""
    times = request.times.attempt
    if request.placement is Placement.COLOCATED and times.prefill_ended_s is None:
        times.prefill_ended_s = now_s
    else:
        times.first_decode_s = now_s
