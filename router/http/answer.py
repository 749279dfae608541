"""The answers of completions, chats and responses: what deltas become on HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.sampling import FinishReason
from pdserve.core.speculation import total
from router.api.answer import Delta, Generation
from router.api.request import likeliest
from router.api.router_api import RouterApi
from router.choices.beam_search import BeamAnswer, beam_search, ends_at_s
from router.choices.deliver import Delivery, Sink
from router.http.reply import Reply
from router.openai.chunks import (
    DONE,
    LOGPROBS_MARK,
    ChunkFormat,
    Envelope,
    GatheredCall,
    ReasoningTokens,
    StopReason,
    add_ids,
    extension,
    tool_chunk,
    usage,
    with_logprobs,
)
from router.openai.echo import NOTHING_SHOWN, PromptView
from router.openai.json import encode_json
from router.openai.logprobs import ChatLogprobs, JoinedLists, LogprobsFormat, logprobs_format
from router.openai.request import Call, as_written, candidate_ids
from router.openai.responses.events import ResponseWriter
from router.openai.responses.request import ResponsesCall

MIN_LISTED_BYTES: Final = 24
"""The JSON of one of the likeliest tokens has at least so many bytes: a number of 17 digits, and a short name in quotes. In a
chat it has about 70."""
ID_BYTES: Final = 8  # of a reference in a list; the numbers are shared with the delta that brought them


async def answer(api: RouterApi, call: Call, reply: Reply) -> None:
    """Run a call and write its answer. Raises a `PdserveError`; `reply.started` then tells whether something was already
    sent."""
    with as_written(call.names):
        if call.choices.beam_width:
            await _beams(api, call, reply)
            return
        if not call.stream:
            _check_size(call, reply.max_gathered_bytes)
        with Delivery(api, ends_stalled_writes=False) as delivery:
            for i, request in enumerate(call.inputs):
                with as_written(call.place_of(i)):
                    await delivery.submit(request, candidate_ids(call, i), ranked=call.choices.ranked)
            envelope = Envelope(call, api.model_name)
            await (_stream if call.stream else _whole)(api, call, envelope, delivery, reply)


async def respond(api: RouterApi, asked: ResponsesCall, reply: Reply) -> None:
    """Run a request of `/v1/responses` and write its answer, otherwise like `answer`."""
    (request,) = asked.call.inputs
    with Delivery(api, ends_stalled_writes=False) as delivery:
        try:
            await delivery.submit(request, (asked.request_id,))
        except InvalidRequest as exc:
            raise asked.names.renamed(exc) from exc
        (generation,) = delivery.generations
        writer = ResponseWriter(asked, api.model_name)
        logprobs = ChatLogprobs(api.token_bytes) if asked.logprobs else None
        sink = _StreamedResponse if asked.call.stream else _WholeResponse
        await run_delivery(delivery, [sink(generation, writer, logprobs, reply)], reply)


async def run_delivery(delivery: Delivery, sinks: Sequence[Sink], reply: Reply) -> None:
    """Run all generations. If one fails, the reply gets its report, which says how far it came."""
    try:
        await delivery.run(sinks)
    except PdserveError:
        if (report := delivery.failure_report) is not None:
            reply.served(report)
        raise


def _check_size(call: Call, max_bytes: int | None) -> None:
    """Refuse a whole answer that could not be gathered if it became as long as the client allows."""
    tokens = sum([request.sampling.get("max_tokens") or 0 for request in call.inputs]) * call.choices.best_of
    listed = max([request.sampling.get("logprobs") or 0 for request in call.inputs])
    if max_bytes is not None and tokens * listed * MIN_LISTED_BYTES > max_bytes:
        message = (
            f"of {tokens} tokens in all choices, with {listed} likeliest ones each, would take over {max_bytes} bytes "
            "(router.max_inflight_answer_bytes); ask for fewer, or for a stream"
        )
        raise InvalidRequest(message, field="top_logprobs" if call.chat else "logprobs")


async def _stream(api: RouterApi, call: Call, envelope: Envelope, delivery: Delivery, reply: Reply) -> None:
    """Write the chunks of all choices. The end of the stream goes out with the last chunk of a choice that is alone."""

    def end() -> bytes:
        if not call.include_usage:
            return DONE
        reasoning = sum([one.reasoning.count for one in choices])
        totals = _usage(call, delivery.generations, sum([one.tokens for one in choices]), reasoning)
        return envelope.usage_chunk(totals, [one.report for one in delivery.generations]) + DONE

    turn = asyncio.Lock()
    alone = len(delivery.generations) == 1
    choices = [
        _StreamedChoice(api, call, envelope, i, one, reply, turn, end if alone else None)
        for i, one in enumerate(delivery.generations)
    ]
    await run_delivery(delivery, choices, reply)
    if not alone:
        await reply.end(end())


def _usage(call: Call, generations: Sequence[Generation], output_tokens: int, reasoning_tokens: int) -> dict[str, Any]:
    """Return the usage of generations that have ended. Candidates of one prompt share it, so it counts once, as its first one
    has computed it."""
    leaders = generations[:: call.choices.best_of]
    cached = [one.report.cached_tokens for one in leaders]
    known = None if None in cached else sum(tokens or 0 for tokens in cached)
    prompt_tokens, reasoning = sum(one.prompt_len for one in leaders), reasoning_tokens if call.chat else None
    return usage(prompt_tokens, output_tokens, known, reasoning, total(one.report.speculation for one in generations))


def _logprobs_of(api: RouterApi, call: Call, index: int) -> LogprobsFormat | None:
    """Return the format of log-probabilities for candidate `index`. None: the client asks for none."""
    if call.inputs[index // call.choices.best_of].sampling.get("logprobs") is None:
        return None
    return logprobs_format(api.token_bytes, chat=call.chat)


def _view(api: RouterApi, call: Call, index: int, generation: Generation) -> PromptView | None:
    """Return the prompt of choice `index` as the answer shows it. None: it shows nothing of it."""
    if call.shown == NOTHING_SHOWN:
        return None
    return PromptView(call.shown, call.inputs[index // call.choices.best_of].prompt, generation.prompt_ids, api.token_bytes)


class _StreamedChoice:
    """Implements `Sink`: it writes the chunks of one choice, and counts their tokens.

    The stream opens with the first delta and not before, so that an earlier error still gets its own HTTP status. A delta
    without text (half a character, part of a stop string) makes no chunk unless it carries other news.
    """

    def __init__(
        self,
        api: RouterApi,
        call: Call,
        envelope: Envelope,
        index: int,
        generation: Generation,
        reply: Reply,
        turn: asyncio.Lock,
        end: Callable[[], bytes] | None,
    ) -> None:
        """`turn` is that of the call: only the choice that holds it encodes log-probabilities, so other calls wait for one
        piece of this call, and not for one of each of its choices. `end` returns what follows the last chunk. None: other
        choices may follow."""
        self.tokens = 0
        self._generation = generation
        self._reply = reply
        self._turn = turn
        self._end = end
        self._logprobs = _logprobs_of(api, call, index)
        self._view = _view(api, call, index, generation)
        self._prompt_ids = generation.prompt_ids if call.return_token_ids else None
        """Each chunk has the ids of its tokens, and the first one those of the prompt. None: no chunk has ids."""
        self.reasoning = ReasoningTokens()
        self._format = ChunkFormat(envelope, call, index)
        self._opening = self._format.opening(self._prompt_ids)
        self._always = self._logprobs is not None or self._format.continuous_usage or self._prompt_ids is not None
        self.is_quick = self._logprobs is None

    async def take(self, delta: Delta) -> None:
        """Implements `Sink.take`."""
        if self._view is not None:
            view, self._view = self._view, None
            async with self._turn:
                await self._echo(view, delta)
            delta = view.output(delta)  # an output that is hidden has one token
        if self._logprobs is None:
            chunk = self._chunk(delta)
        else:
            async with self._turn:
                chunk = self._chunk(delta)
                await asyncio.sleep(0)  # lets other tasks run: log-probabilities take long to encode
        if self._opening:
            chunk, self._opening = self._opening + chunk, b""
        if delta.finish_reason is None:
            await self._reply.event(chunk)
            return
        last = self._format.last_chunk(chunk, self._generation.report)
        if self._end is None:
            await self._reply.event(last)
        else:
            await self._reply.end(last + self._end())

    def take_now(self, delta: Delta) -> bool:
        """Implements `Sink.take_now`."""
        if not self._reply.keeps_up:
            return False
        self._reply.event_now(self._chunk(delta))
        return True

    def _chunk(self, delta: Delta) -> bytes:
        """Return the chunk of a delta, or nothing."""
        is_first = not self.tokens
        self.tokens += len(delta.ids)
        self.reasoning.add(delta)
        chunk = b""
        if delta.calls or delta.reasoning:
            chunk = tool_chunk(self._format, delta, self._logprobs.of(delta.ids, delta.logprobs) if self._logprobs else None)
        elif delta.text or delta.finish_reason or self._always:
            told = self._logprobs.of(delta.ids, delta.logprobs) if self._logprobs else None
            chunk = self._format.chunk(delta.text, delta.finish_reason, told, delta.stop_reason)
        if self._prompt_ids is not None:
            chunk = self._format.with_ids(chunk, delta.ids, self._prompt_ids if is_first else None)
        return self._counted(chunk) if self._format.continuous_usage else chunk

    async def _echo(self, view: PromptView, first: Delta) -> None:
        """Write the chunks that echo the prompt. The first one has its whole text."""
        text = view.text
        for told in view.echoed(first, self._logprobs):
            chunk = self._format.chunk(text, None, told)
            await self._reply.event(self._counted(chunk) if self._format.continuous_usage else chunk)
            await asyncio.sleep(0)  # lets other tasks run, as in `take`
            text = ""

    def _counted(self, chunk: bytes) -> bytes:
        return self._format.with_usage(chunk, usage(self._generation.prompt_len, self.tokens))


async def _whole(api: RouterApi, call: Call, envelope: Envelope, delivery: Delivery, reply: Reply) -> None:
    turn = asyncio.Lock()
    generations = delivery.generations
    outputs = [_GatheredChoice(api, call, i, one, reply, turn) for i, one in enumerate(generations)]
    await run_delivery(delivery, outputs, reply)
    parts = _body(call, envelope, generations, outputs)
    outputs.clear()  # nothing else keeps the outputs while the client takes the parts
    if len(generations) == 1:  # a header has no room for the reports of hundreds of prompts; they go into the body
        reply.served(generations[0].report)
    await reply.parts(200, parts)


class _GatheredChoice:
    """Implements `Sink`: it gathers the output of one choice. Log-probabilities are encoded as they come, because those of a
    long answer take a second together. The reply counts what is gathered."""

    is_quick = False

    def __init__(
        self, api: RouterApi, call: Call, index: int, generation: Generation, reply: Reply, turn: asyncio.Lock
    ) -> None:
        """`turn` is that of the call: only the choice that holds it encodes log-probabilities, because pieces of 128 prompts
        take half a second."""
        self._reply = reply
        self._turn = turn
        self._logprobs = _logprobs_of(api, call, index)
        self._view = _view(api, call, index, generation)
        self._texts: list[str] = [self._view.text] if self._view else []
        self._listed: list[bytes] = []
        self._told = JoinedLists()
        self.gathered = GatheredCall()
        self.ids: list[int] = []
        self.logprob = 0.0
        """The log-probability of all tokens together, if it was asked for."""
        self.finish_reason = FinishReason.STOP
        self.stop_reason: StopReason = None

    async def take(self, delta: Delta) -> None:
        """Implements `Sink.take`."""
        if self._view is not None:
            view, self._view = self._view, None
            async with self._turn:
                for echoed in view.echoed(delta, self._logprobs):
                    self._reply.gather(self._told.add(echoed or {}))
                    await asyncio.sleep(0)
                for piece in view.listed(delta):
                    self._listed.append(piece)
                    self._reply.gather(len(piece))
                    await asyncio.sleep(0)
            delta = view.output(delta)  # an output that is hidden has one token
        self.gathered.add(delta)
        self._texts.append(delta.text)
        self.ids += delta.ids
        self._reply.gather(len(delta.text) + ID_BYTES * len(delta.ids))
        self.finish_reason, self.stop_reason = delta.finish_reason or self.finish_reason, delta.stop_reason
        self.logprob += sum([one.logprob for one in delta.logprobs])
        if self._logprobs is not None:
            async with self._turn:
                self._reply.gather(self._told.add(self._logprobs.of(delta.ids, delta.logprobs)))
                await asyncio.sleep(0)  # lets other tasks run, because buffered deltas come without a pause

    def take_now(self, delta: Delta) -> bool:
        """Implements `Sink.take_now`: nothing is written before the end."""
        return False

    @property
    def text(self) -> str:
        """The text, behind that of an echoed prompt."""
        return "".join(self._texts)

    @property
    def logprobs(self) -> bytes:
        """The log-probabilities as JSON, and behind them the member with those of the prompt, if it is asked for."""
        return self._told.encode() + (b',"prompt_logprobs":[%b]' % b",".join(self._listed) if self._listed else b"")


def _body(call: Call, envelope: Envelope, generations: Sequence[Generation], outputs: Sequence[_GatheredChoice]) -> list[bytes]:
    """Return the parts of the JSON of a whole answer."""
    reasoning = sum([out.gathered.reasoning.count for out in outputs])
    totals = _usage(call, generations, sum(len(out.ids) for out in outputs), reasoning)
    returned = _returned(call, outputs)
    told = [outputs[i] for i in returned]
    choices = [
        out.gathered.into(envelope.choice(i, out.text, out.finish_reason, LOGPROBS_MARK, out.stop_reason))
        for i, out in enumerate(told)
    ]
    rest = extension([generations[i].report for i in returned])
    if call.return_token_ids:
        prompts = [generations[i].prompt_ids for i in returned]
        rest |= add_ids(choices, [out.ids for out in told], prompts, chat=call.chat)
    body = encode_json(envelope.wrap(envelope.whole_type, choices=choices, usage=totals, **rest))
    return with_logprobs(body, [out.logprobs for out in told])


def _returned(call: Call, outputs: Sequence[_GatheredChoice]) -> list[int]:
    """Return the indices of the candidates that the client gets: for each prompt the likeliest ones, or all in order."""
    if not call.choices.ranked:
        return list(range(len(outputs)))
    scores = [out.logprob / max(1, len(out.ids)) for out in outputs]
    count = call.choices.best_of
    starts = range(0, len(outputs), count)
    return [start + i for start in starts for i in likeliest(scores[start : start + count], call.choices.n)]


async def _beams(api: RouterApi, call: Call, reply: Reply) -> None:
    """Answer with the beams of one prompt after the other. They have no report: a search is many requests."""
    envelope = Envelope(call, api.model_name)
    ends_s = ends_at_s(api, call.inputs[0].deadline_s)
    answers: list[BeamAnswer] = []
    for i, request in enumerate(call.inputs):
        with as_written(call.place_of(i)):
            answers.append(await beam_search(api, request, call.choices, ends_s))
    outputs = [out for one in answers for out in one.outputs]
    choices = [envelope.choice(i, out.text, out.finish_reason, LOGPROBS_MARK) for i, out in enumerate(outputs)]
    prompt_tokens, tokens = sum(len(one.prompt_ids) for one in answers), sum(len(out.ids) for out in outputs)
    totals = usage(prompt_tokens, tokens, reasoning_tokens=0 if call.chat else None)
    rest: dict[str, Any] = {}
    if call.return_token_ids:
        prompts = [one.prompt_ids for one in answers for _ in one.outputs]
        rest = add_ids(choices, [out.ids for out in outputs], prompts, chat=call.chat)
    body = encode_json(envelope.wrap(envelope.whole_type, choices=choices, usage=totals, **rest))
    await reply.parts(200, with_logprobs(body, [b"null" for _ in outputs]))


class _ResponseSink:
    """Turns deltas into the events of a response. Log-probabilities are encoded as they come."""

    def __init__(self, generation: Generation, writer: ResponseWriter, logprobs: ChatLogprobs | None, reply: Reply) -> None:
        self._generation = generation
        self._writer = writer
        self._logprobs = logprobs
        self._reply = reply

    def _events(self, delta: Delta) -> bytes:
        """Return the events of a delta, or nothing."""
        if self._logprobs is None or not delta.ids:
            return self._writer.delta(delta, b"")
        told = encode_json(self._logprobs.of(delta.ids, delta.logprobs)["content"])
        return self._writer.delta(delta, told[1:-1])


class _StreamedResponse(_ResponseSink):
    """Implements `Sink`. As in a chat, the stream opens with the first delta, so that an earlier error gets its own status."""

    def __init__(self, generation: Generation, writer: ResponseWriter, logprobs: ChatLogprobs | None, reply: Reply) -> None:
        super().__init__(generation, writer, logprobs, reply)
        self.is_quick = logprobs is None
        self._opening = writer.opening()
        reply.on_failure(writer.failed)

    async def take(self, delta: Delta) -> None:
        """Implements `Sink.take`."""
        chunk, self._opening = self._opening + self._events(delta), b""
        if delta.finish_reason:
            await self._reply.end(chunk + self._writer.closing(delta.finish_reason, self._generation.report))
            return
        await self._reply.event(chunk)
        if self._logprobs:
            await asyncio.sleep(0)  # lets other tasks run: log-probabilities take long to encode

    def take_now(self, delta: Delta) -> bool:
        """Implements `Sink.take_now`."""
        if not self._reply.keeps_up:
            return False
        self._reply.event_now(self._events(delta))
        return True


class _WholeResponse(_ResponseSink):
    """Implements `Sink`: the object at the end is the answer."""

    is_quick = False

    async def take(self, delta: Delta) -> None:
        """Implements `Sink.take`."""
        self._reply.gather(len(self._events(delta)))
        if delta.finish_reason:
            self._reply.served(self._generation.report)
            await self._reply.parts(200, [self._writer.whole(delta.finish_reason, self._generation.report)])
        elif self._logprobs:
            await asyncio.sleep(0)  # as in a stream

    def take_now(self, delta: Delta) -> bool:
        """Implements `Sink.take_now`: nothing is written before the end."""
        return False
