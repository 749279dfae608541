"""Runs one request of `/v1/responses`, and writes its answer. Whatever ends the request, its generation is closed."""

from __future__ import annotations

import asyncio

from pdserve.core.errors import InvalidRequest, PdserveError
from router.api.answer import Delta, Generation, unfinished
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
    try:
        generation = await api.submit(request)
    except InvalidRequest as exc:
        raise asked.names.renamed(exc) from exc
    try:
        output = _ResponseOutput(
            ResponseWriter(asked, api.model_name), ChatLogprobs(api.token_bytes) if asked.logprobs else None
        )
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


class _ResponseOutput:
    """Turns deltas into events. Log-probabilities are encoded as they come."""

    def __init__(self, writer: ResponseWriter, logprobs: ChatLogprobs | None) -> None:
        self.writer = writer
        self.logprobs = logprobs

    def events(self, delta: Delta) -> bytes:
        """Return the events of a delta, or nothing."""
        if self.logprobs is None or not delta.ids:
            return self.writer.delta(delta, b"")
        told = encode_json(self.logprobs.of(delta.ids, delta.logprobs)["content"])
        return self.writer.delta(delta, told[1:-1])


async def _stream(generation: Generation, output: _ResponseOutput, reply: Reply) -> None:
    """Write the events. As in a chat, the stream opens with the first delta, so that an earlier error gets its own status."""
    opening = output.writer.opening()
    reply.on_failure(output.writer.failed)

    def take(delta: Delta) -> bool:
        if not reply.keeps_up:
            return False
        reply.event_now(output.events(delta))
        return True

    async for delta in generation:
        chunk = opening + output.events(delta)
        opening = b""
        if delta.finish_reason:
            await reply.end(chunk + output.writer.closing(delta.finish_reason, generation.report))
            return
        await reply.event(chunk)
        if output.logprobs:
            await asyncio.sleep(0)  # lets other tasks run: log-probabilities take long to encode
        else:
            generation.take_by(take)
    raise unfinished(generation)


async def _whole(generation: Generation, output: _ResponseOutput, reply: Reply) -> None:
    async for delta in generation:
        reply.gather(len(output.events(delta)))
        if delta.finish_reason:
            reply.served(generation.report)
            await reply.parts(200, [output.writer.whole(delta.finish_reason, generation.report)])
            return
        if output.logprobs:
            await asyncio.sleep(0)  # as above
    raise unfinished(generation)
