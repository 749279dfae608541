"""The choices of one request while they run: candidates side by side, or a beam search."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec

from pdserve.core.errors import Cancelled, PdserveError
from pdserve.core.report import Report
from pdserve.rpc.codec import finish_to_wire
from pdserve.rpc.v1 import inference_pb2
from router.api.answer import Delta, Generation
from router.api.choices import choice_ids, first_id, likeliest, submit_choices
from router.api.router_api import RouterApi
from router.api.timeline import report_of
from router.choices.beam_search import BeamAnswer, beam_search, ends_at_s
from router.choices.together import together
from router.grpc.responses import response
from router.parsing.generate import GenerateCall

WRITE_TIMEOUT_S: Final = 60.0
"""A message of an answer that is complete waits at most so long for its client to read."""

Send = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


class Running(Protocol):
    """One request that may have several choices. `start` it once, `run` it once, and `close` it in any case."""

    request_id: str
    """The router's own id, which cancels all choices."""
    report: Report | None
    """The report of the choice that failed. None: none has failed, or it has none."""
    stalled: bool
    """True when the client was dropped because it took nothing for too long."""

    async def start(self) -> None:
        """Hand the request to the router. Raises a `PdserveError`."""

    async def run(self, send: Send) -> None:
        """Send all messages. Raises a `PdserveError`."""

    def cancel(self) -> bool:
        """Cancel all choices. False: none is running."""

    def close(self) -> None:
        """Cancel at once what is still running."""


def running_of(router: RouterApi, call: GenerateCall) -> Running:
    """Return the request of a call, not yet started."""
    return RunningBeams(router, call) if call.choices.beam_width else RunningCandidates(router, call)


class _Candidate:
    """The output of a candidate that is ranked."""

    def __init__(self, *, shows_logprobs: bool) -> None:
        self.deltas: list[Delta] = []
        self.tokens = 0
        self._logprob = 0.0
        self._shows_logprobs = shows_logprobs

    def add(self, delta: Delta) -> None:
        """Add a delta. The client does not get log-probabilities that only the ranking asked for."""
        self._logprob += sum([one.logprob for one in delta.logprobs])
        self.tokens += len(delta.ids)
        self.deltas.append(delta if self._shows_logprobs else msgspec.structs.replace(delta, logprobs=()))

    @property
    def score(self) -> float:
        """The mean log-probability of its tokens."""
        return self._logprob / max(1, self.tokens)


class RunningCandidates:
    """Implements `Running`: each candidate is a request of its own."""

    def __init__(self, router: RouterApi, call: GenerateCall) -> None:
        self.request_id = first_id(call.input)
        self.report: Report | None = None
        self.stalled = False
        self._router = router
        self._call = call
        self._generations: list[Generation] = []

    async def start(self) -> None:
        """Implements `Running.start`."""
        choices = self._call.choices
        ids = choice_ids(self.request_id, choices.best_of)
        await submit_choices(self._router, self._call.input, ids, self._generations, ranked=choices.ranked)

    async def run(self, send: Send) -> None:
        """Implements `Running.run`."""
        if self._call.choices.ranked:
            await self._best(send)
        else:
            await together([self._stream(i, generation, send) for i, generation in enumerate(self._generations)])

    async def _stream(self, choice: int, generation: Generation, send: Send) -> None:
        """Send all deltas. For a client that stopped reading, the waiting write is cancelled and `Cancelled` is raised."""
        task = asyncio.current_task()
        assert task is not None
        generation.on_stalled(task.cancel)
        try:
            async for delta in generation:
                await send(response(generation, delta, choice))
        except asyncio.CancelledError:
            if generation.dropped is None:
                raise
            self.stalled = True
            task.uncancel()  # the router itself cancelled it; a bare cancel would leave the call open for ever
            raise generation.dropped from None
        except PdserveError:
            self.report = report_of(generation)
            raise

    async def _best(self, send: Send) -> None:
        """Send the likeliest candidates, once all have ended."""
        outputs = await together([self._whole(generation) for generation in self._generations])
        best = likeliest([out.score for out in outputs], self._call.choices.n)
        left_out = sum(out.tokens for i, out in enumerate(outputs) if i not in best)
        messages = []
        for choice, i in enumerate(best):
            messages += [response(self._generations[i], delta, choice) for delta in outputs[i].deltas]
            messages[-1].usage.output_tokens += left_out
            left_out = 0
        await _send_all(messages, send)

    async def _whole(self, generation: Generation) -> _Candidate:
        """Return the output of a candidate."""
        output = _Candidate(shows_logprobs=self._call.input.sampling.get("logprobs") is not None)
        try:
            async for delta in generation:
                output.add(delta)
        except PdserveError:
            self.report = report_of(generation)
            raise
        return output

    def cancel(self) -> bool:
        """Implements `Running.cancel`."""
        found = [self._router.cancel(generation.request_id) for generation in self._generations]
        return any(found)

    def close(self) -> None:
        """Implements `Running.close`."""
        for generation in self._generations:
            generation.close()


class RunningBeams:
    """Implements `Running` for a beam search. It has no report, because it is many requests."""

    def __init__(self, router: RouterApi, call: GenerateCall) -> None:
        self.request_id = first_id(call.input)
        self.report: Report | None = None
        self.stalled = False
        self._router = router
        self._call = call
        self._search: asyncio.Task[BeamAnswer] | None = None
        self._cancelled = False

    async def start(self) -> None:
        """Implements `Running.start`. The router sees nothing of the search before it runs."""

    async def run(self, send: Send) -> None:
        """Implements `Running.run`."""
        ends_s = ends_at_s(self._router, self._call.input.deadline_s)
        self._search = asyncio.create_task(beam_search(self._router, self._call.input, self._call.choices, ends_s))
        try:
            answer = await self._search
        except asyncio.CancelledError:
            task: asyncio.Task[Any] | None = asyncio.current_task()
            if not self._cancelled or (task is not None and task.cancelling()):
                raise
            raise Cancelled(f"request {self.request_id} was cancelled") from None
        await _send_all([self._message(answer, i) for i in range(len(answer.outputs))], send)

    def _message(self, answer: BeamAnswer, choice: int) -> inference_pb2.GenerateResponse:
        output = answer.outputs[choice]
        return inference_pb2.GenerateResponse(
            request_id=self.request_id,
            ids=output.ids,
            text=output.text,
            finish_reason=finish_to_wire(output.finish_reason),
            usage=inference_pb2.Usage(prompt_tokens=len(answer.prompt_ids), output_tokens=len(output.ids)),
            choice=choice,
        )

    def cancel(self) -> bool:
        """Implements `Running.cancel`."""
        if self._search is None or self._search.done():
            return False
        self._cancelled = True
        return self._search.cancel()

    def close(self) -> None:
        """Implements `Running.close`. A call that ends while its search runs has cancelled it by then."""


async def _send_all(messages: list[inference_pb2.GenerateResponse], send: Send) -> None:
    """Send an answer that is complete. Raises `Cancelled` for a client that does not read it."""
    try:
        for message in messages:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await send(message)
    except TimeoutError:
        raise Cancelled(f"the client took nothing for {WRITE_TIMEOUT_S:g} s") from None
