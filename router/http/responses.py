"""Runs one request of `/v1/responses`, and writes its answer. Whatever ends the request, its generation is closed."""

from __future__ import annotations

import asyncio

from pdserve.core.errors import InternalBug, PdserveError
from router.api.answer import Delta, Generation
from router.api.router_api import RouterApi
from router.api.timeline import report_of
from router.http.reply import Reply
from router.openai.errors import encode_json
from router.openai.logprobs import ChatLogprobs
from router.openai.responses.events import ResponseWriter
from router.openai.responses.request import ResponsesCall


async def respond(api: RouterApi, asked: ResponsesCall, reply: Reply) -> None:
    """Run a request and write its answer. Raises a `PdserveError`; `reply.started` then tells whether something was already
    sent."""
    (request,) = asked.call.inputs
    generation = await api.submit(request)
    try:
        output = _Output(ResponseWriter(asked, api.model_name), ChatLogprobs(api.token_bytes) if asked.logprobs else None)
        if asked.call.stream:
            await _stream(generation, output, reply)
        else:
            await _whole(generation, output, reply)
    except PdserveError:
        report = report_of(generation)
        if report is not None:
            reply.served(report)
        raise
    finally:
        generation.close()


class _Output:
    """The output so far: its text and its log-probabilities, which are encoded as they come."""

    def __init__(self, writer: ResponseWriter, logprobs: ChatLogprobs | None) -> None:
        self.writer = writer
        self.logprobs = logprobs
        self._texts: list[str] = []
        self._told: list[bytes] = []

    def add(self, delta: Delta) -> bytes:
        """Add a delta. Return its log-probabilities as a JSON list."""
        self._texts.append(delta.text)
        if self.logprobs is None or not delta.ids:
            return b"[]"
        told = encode_json(self.logprobs.of(delta.ids, delta.logprobs)["content"])
        self._told.append(told[1:-1])
        return told

    def event(self, delta: Delta) -> bytes:
        """Add a delta. Return its event, or nothing if it has no text and no log-probabilities."""
        told = self.add(delta)
        return self.writer.delta(delta.text, told) if delta.text or told != b"[]" else b""

    @property
    def whole(self) -> tuple[str, bytes]:
        """The text, and the log-probabilities as a JSON list."""
        return "".join(self._texts), b"[" + b",".join(self._told) + b"]"


async def _stream(generation: Generation, output: _Output, reply: Reply) -> None:
    """Write the events. As in a chat, the stream opens with the first delta, so that an earlier error gets its own status."""
    opening = output.writer.opening()
    reply.on_failure(output.writer.failed)

    def take(delta: Delta) -> bool:
        if not reply.keeps_up:
            return False
        reply.event_now(output.event(delta))
        return True

    async for delta in generation:
        chunk = opening + output.event(delta)
        opening = b""
        if delta.finish_reason:
            await reply.end(chunk + output.writer.closing(*output.whole, delta.finish_reason, generation.report))
            return
        await reply.event(chunk)
        if output.logprobs:
            await asyncio.sleep(0)  # lets other tasks run: log-probabilities take long to encode
        else:
            generation.take_by(take)
    raise _unfinished(generation)


async def _whole(generation: Generation, output: _Output, reply: Reply) -> None:
    async for delta in generation:
        output.add(delta)
        if delta.finish_reason:
            reply.served(generation.report)
            await reply.encoded(200, output.writer.whole(*output.whole, delta.finish_reason, generation.report))
            return
        if output.logprobs:
            await asyncio.sleep(0)  # as above
    raise _unfinished(generation)


def _unfinished(generation: Generation) -> InternalBug:
    return InternalBug(f"request {generation.request_id} ended without a finish reason")
