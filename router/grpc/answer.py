"""The answers of the gRPC front end: of one request with its choices, and of several requests in one call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing
from typing import Any, Final, TypeVar

import msgspec

from pdserve.core.error_table import retry_after_s
from pdserve.core.errors import Cancelled, PdserveError
from pdserve.core.report import Report
from pdserve.rpc import status
from pdserve.rpc.codec import finish_to_wire, logprobs_to_wire, placement_to_wire
from pdserve.rpc.v1 import inference_pb2
from router.api.answer import Delta, Generation, unexpected
from router.api.request import choice_ids, first_id, likeliest
from router.api.router_api import RouterApi
from router.choices.beam_search import BeamAnswer, beam_search, ends_at_s
from router.choices.deliver import Delivery, together
from router.parsing.generate import GenerateCall, RefusedRequest, RequestBatch

logger = logging.getLogger(__name__)

WRITE_TIMEOUT_S: Final = 60.0
"""A message of an answer that is complete waits at most so long for its client to read."""
_COUNTS: Final = ("prompt_tokens", "output_tokens", "cached_tokens")
"""The fields of a report that stand in `Usage`."""

Message = TypeVar("Message")
Send = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]
OnReport = Callable[[Report], None]


class RunningRequest:
    """One request with its choices: candidates, each of which is a request of its own, or a beam search, which is many and so
    has no report. `start` it once, `run` it once, and `close` it in any case."""

    def __init__(self, router: RouterApi, call: GenerateCall) -> None:
        self.request_id = first_id(call.input)
        """The router's own id, which cancels all choices."""
        self.delivery = Delivery(router, ends_stalled_writes=True)
        self._router = router
        self._call = call
        self._search: asyncio.Task[BeamAnswer] | None = None
        self._cancelled = False

    async def start(self) -> None:
        """Hand the request to the router, which sees nothing of a beam search before it runs. Raises a `PdserveError`."""
        choices = self._call.choices
        if not choices.beam_width:
            ids = choice_ids(self.request_id, choices.best_of)
            await self.delivery.submit(self._call.input, ids, ranked=choices.ranked)

    async def run(self, send: Send, on_report: OnReport = lambda report: None) -> None:
        """Send all messages. `on_report` gets the report of each choice before its last message. Raises a `PdserveError`."""
        if self._call.choices.beam_width:
            await self._beams(send)
        elif self._call.choices.ranked:
            await self._best(send)
        else:
            generations = self.delivery.generations
            await self.delivery.run([_Messages(one, i, send, on_report) for i, one in enumerate(generations)])

    async def _best(self, send: Send) -> None:
        """Send the likeliest candidates, once all have ended."""
        shows_logprobs = self._call.input.sampling.get("logprobs") is not None
        outputs = [_Candidate(shows_logprobs=shows_logprobs) for _ in self.delivery.generations]
        await self.delivery.run(outputs)
        best = likeliest([out.score for out in outputs], self._call.choices.n)
        left_out = sum(out.tokens for i, out in enumerate(outputs) if i not in best)
        messages = []
        for choice, i in enumerate(best):
            messages += [response(self.delivery.generations[i], delta, choice) for delta in outputs[i].deltas]
            messages[-1].usage.output_tokens += left_out
            left_out = 0
        await send_all(messages, send)

    async def _beams(self, send: Send) -> None:
        ends_s = ends_at_s(self._router, self._call.input.deadline_s)
        self._search = asyncio.create_task(beam_search(self._router, self._call.input, self._call.choices, ends_s))
        try:
            answer = await self._search
        except asyncio.CancelledError:
            task: asyncio.Task[Any] | None = asyncio.current_task()
            if not self._cancelled or (task is not None and task.cancelling()):
                raise
            raise Cancelled(f"request {self.request_id} was cancelled") from None
        messages = [
            inference_pb2.GenerateResponse(
                request_id=self.request_id,
                ids=output.ids,
                text=output.text,
                finish_reason=finish_to_wire(output.finish_reason),
                usage=inference_pb2.Usage(prompt_tokens=len(answer.prompt_ids), output_tokens=len(output.ids)),
                choice=choice,
            )
            for choice, output in enumerate(answer.outputs)
        ]
        await send_all(messages, send)

    def cancel(self) -> bool:
        """Cancel all choices. False: none is running."""
        if not self._call.choices.beam_width:
            found = [self._router.cancel(generation.request_id) for generation in self.delivery.generations]
            return any(found)
        if self._search is None or self._search.done():
            return False
        self._cancelled = True
        return self._search.cancel()

    def close(self) -> None:
        """Cancel at once what is still running. A call that ends while its search runs has cancelled it by then."""
        self.delivery.close()


class _Messages:
    """Implements `Sink`: each delta is a message at once."""

    is_quick = False

    def __init__(self, generation: Generation, choice: int, send: Send, on_report: OnReport) -> None:
        self._generation = generation
        self._choice = choice
        self._send = send
        self._on_report = on_report

    async def take(self, delta: Delta) -> None:
        """Implements `Sink.take`."""
        if delta.finish_reason is not None:
            self._on_report(self._generation.report)
        await self._send(response(self._generation, delta, self._choice))

    def take_now(self, delta: Delta) -> bool:
        """Implements `Sink.take_now`: gRPC has no write without a wait."""
        return False


class _Candidate:
    """Implements `Sink`: it keeps the output of a candidate that is ranked."""

    is_quick = False

    def __init__(self, *, shows_logprobs: bool) -> None:
        self.deltas: list[Delta] = []
        self.tokens = 0
        self._logprob = 0.0
        self._shows_logprobs = shows_logprobs

    async def take(self, delta: Delta) -> None:
        """Implements `Sink.take`. The client does not get log-probabilities that only the ranking asked for."""
        self._logprob += sum([one.logprob for one in delta.logprobs])
        self.tokens += len(delta.ids)
        self.deltas.append(delta if self._shows_logprobs else msgspec.structs.replace(delta, logprobs=()))

    def take_now(self, delta: Delta) -> bool:
        """Implements `Sink.take_now`: nothing is written before the end."""
        return False

    @property
    def score(self) -> float:
        """The mean log-probability of its tokens."""
        return self._logprob / max(1, self.tokens)


async def run_batch(router: RouterApi, batch: RequestBatch, context: Any) -> None:
    """Run all requests of a batch and write their answers. Raises `Cancelled` for a client that stopped reading."""
    with closing(Writer(context)) as writer:
        await together([_run(router, i, call, writer) for i, call in enumerate(batch.calls)])


async def _run(router: RouterApi, index: int, call: GenerateCall | RefusedRequest, writer: Writer) -> None:
    error = call.error if isinstance(call, RefusedRequest) else await _answered(router, index, call, writer)
    if error is not None:
        await writer.write(inference_pb2.GenerateBatchResponse(index=index, error=error_response(error)))


async def _answered(router: RouterApi, index: int, call: GenerateCall, writer: Writer) -> PdserveError | None:
    """Write the answer of one request. Return its error if it fails."""

    async def send(message: inference_pb2.GenerateResponse) -> None:
        await writer.write(inference_pb2.GenerateBatchResponse(index=index, response=message))

    running = RunningRequest(router, call)
    try:
        await running.start()
        await running.run(send)
    except PdserveError as exc:
        if running.delivery.lost_reader:
            raise  # the client reads nothing, so it would not read this error either
        return exc
    except Exception:
        logger.exception("request %s of a batch failed", running.request_id)
        return unexpected()
    finally:
        running.close()
    return None


async def send_all(messages: Iterable[Message], send: Callable[[Message], Awaitable[None]]) -> None:
    """Send an answer that is complete. Raises `Cancelled` for a client that does not read it."""
    try:
        for message in messages:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await send(message)
    except TimeoutError:
        raise Cancelled(f"the client took nothing for {WRITE_TIMEOUT_S:g} s") from None


class Writer:
    """Writes messages one at a time, and tasks take turns. A task may be cancelled while its message is written: the message is
    still written to its end, because gRPC takes no other one before. `close` it."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._turn = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None

    async def write(self, message: Any) -> None:
        """Write a message, after those that other tasks have begun."""
        async with self._turn:
            if self._writing is not None:  # the task that began this one was cancelled
                await asyncio.shield(self._writing)
            self._writing = asyncio.ensure_future(self._context.write(message))
            await asyncio.shield(self._writing)
            self._writing = None

    def close(self) -> None:
        """Give up a message that is still being written."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing.add_done_callback(lambda done: done.cancelled() or done.exception())


def response(generation: Generation, delta: Delta, choice: int = 0) -> inference_pb2.GenerateResponse:
    """Return the message of one delta. The last one also has the usage and the report."""
    told = inference_pb2.GenerateResponse(
        request_id=generation.request_id,
        index=delta.index,
        ids=delta.ids,
        text=delta.text,
        logprobs=logprobs_to_wire(delta.logprobs),
        prompt_logprobs=logprobs_to_wire(delta.prompt_logprobs),
        tool_calls=[inference_pb2.ToolCallDelta(**msgspec.structs.asdict(call)) for call in delta.calls],
        reasoning=delta.reasoning,
        choice=choice,
    )
    if delta.finish_reason is None:
        return told
    report = generation.report
    told.finish_reason = finish_to_wire(delta.finish_reason)
    counts = {name: getattr(report, name) for name in _COUNTS}
    told.usage.CopyFrom(inference_pb2.Usage(**counts))
    told.report.CopyFrom(_report(report))
    return told


def error_response(error: PdserveError) -> inference_pb2.GenerateError:
    """Return the error of one request of a batch."""
    return inference_pb2.GenerateError(
        reason=status.to_reason(error.code), message=error.message, retry_after_s=retry_after_s(error)
    )


def _report(report: Report) -> inference_pb2.RequestReport:
    values = report.values()
    for name in (*_COUNTS, "retry_reasons", "rebinds", "migrations"):
        del values[name]
    values["placement"] = placement_to_wire(report.placement)
    if report.speculation is not None:
        values["speculation"] = report.speculation.summary()
    return inference_pb2.RequestReport(**values)
