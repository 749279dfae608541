"""The generations of one call, and its answer. Whatever ends the call, every generation is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.sampling import FinishReason
from router.api.answer import Delta, Generation, unfinished
from router.api.choices import likeliest, submit_choices
from router.api.router_api import RouterApi
from router.api.timeline import report_of
from router.choices.beam_search import BeamAnswer, beam_search, ends_at_s
from router.choices.together import together
from router.http.reply import Reply
from router.openai.chunks import (
    DONE,
    LOGPROBS_MARK,
    ChunkFormat,
    Envelope,
    StopReason,
    add_ids,
    extension,
    usage,
    with_logprobs,
)
from router.openai.echo import NOTHING_SHOWN, PromptView
from router.openai.errors import encode_json
from router.openai.logprobs import JoinedLists, LogprobsFormat, logprobs_format
from router.openai.names import as_written
from router.openai.request import Call, candidate_ids
from router.openai.tool_chunks import GatheredCall, ReasoningTokens, tool_chunk

MIN_LISTED_BYTES: Final = 24
"""The JSON of one of the likeliest tokens has at least so many bytes: a number of 17 digits, and a short name in quotes. In a
chat it has about 70."""
ID_BYTES: Final = 8  # of a reference in a list; the numbers are shared with the delta that brought them
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Output:
    text: str
    ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: bytes
    """The log-probabilities as JSON, and behind them the member with those of the prompt, if it is asked for."""
    gathered: GatheredCall
    logprob: float
    """The log-probability of all tokens together, if it was asked for."""
    stop_reason: StopReason


async def answer(api: RouterApi, call: Call, reply: Reply) -> None:
    """Run a call and write its answer. Raises a `PdserveError`; `reply.started` then tells whether something was already
    sent."""
    with as_written(call.names):
        await (_beams if call.choices.beam_width else _candidates)(api, call, reply)


async def _candidates(api: RouterApi, call: Call, reply: Reply) -> None:
    """Answer with the choices of all prompts."""
    generations: list[Generation] = []  # of all candidates, those of a prompt side by side
    try:
        if not call.stream:
            _check_size(call, reply.max_gathered_bytes)
        for i, request in enumerate(call.inputs):
            with as_written(call.place_of(i)):
                await submit_choices(api, request, candidate_ids(call, i), generations, ranked=call.choices.ranked)
        envelope = Envelope(call, api.model_name)
        if call.stream:
            await _stream(api, call, envelope, generations, reply)
        else:
            await _whole(api, call, envelope, generations, reply)
    finally:
        for generation in generations:
            generation.close()


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


async def _stream(api: RouterApi, call: Call, envelope: Envelope, generations: Sequence[Generation], reply: Reply) -> None:
    turn = asyncio.Lock()
    pumps = [
        _pump(call, g, ChunkFormat(envelope, call, i), _logprobs_of(api, call, i), _view(api, call, i, g), reply, turn)
        for i, g in enumerate(generations)
    ]
    told = [_told(pump, g, reply) for pump, g in zip(pumps, generations, strict=True)]
    if len(told) == 1:
        chunks, last = await told[0]
        counted = [chunks]
    else:
        counted, last = await together([_written(one, reply) for one in told]), b""
    if call.include_usage:
        reasoning = sum([one.reasoning.count for one in counted])
        totals = _usage(call, generations, sum([one.tokens for one in counted]), reasoning)
        last += envelope.usage_chunk(totals, [g.report for g in generations])
    await reply.end(last + DONE)


def _usage(call: Call, generations: Sequence[Generation], output_tokens: int, reasoning_tokens: int) -> dict[str, Any]:
    """Return the usage of generations that have ended. Candidates of one prompt share it, so it counts once, as its first one
    has computed it."""
    leaders = generations[:: call.choices.best_of]
    cached = [one.report.cached_tokens for one in leaders]
    known = None if None in cached else sum(tokens or 0 for tokens in cached)
    return usage(sum(one.prompt_len for one in leaders), output_tokens, known, reasoning_tokens if call.chat else None)


async def _written(pump: Coroutine[Any, Any, tuple[_Chunks, bytes]], reply: Reply) -> _Chunks:
    """Write the last chunk of one of several choices. Return what counted its tokens."""
    chunks, last = await pump
    await reply.event(last)
    return chunks


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


class _Chunks:
    """Turns the deltas of one choice into chunks, and counts their tokens.

    A delta without text (half a character, part of a stop string) makes no chunk unless it carries other news.
    """

    def __init__(
        self, format_: ChunkFormat, logprobs: LogprobsFormat | None, prompt_len: int, prompt_ids: tuple[int, ...] | None
    ) -> None:
        """`prompt_ids`: each chunk has the ids of its tokens, and the first one those of the prompt. None: no chunk has ids."""
        self._format = format_
        self._logprobs = logprobs
        self._prompt_len = prompt_len
        self._prompt_ids = prompt_ids
        self._always = logprobs is not None or format_.continuous_usage or prompt_ids is not None
        self.tokens = 0
        self.reasoning = ReasoningTokens()

    def of(self, delta: Delta) -> bytes:
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
        return self._counted(chunk)

    def of_prompt(self, view: PromptView, first: Delta) -> Iterator[bytes]:
        """Yield the chunks that echo the prompt. The first one has its whole text."""
        text = view.text
        for told in view.echoed(first, self._logprobs):
            yield self._counted(self._format.chunk(text, None, told))
            text = ""

    def _counted(self, chunk: bytes) -> bytes:
        if not self._format.continuous_usage:
            return chunk
        return self._format.with_usage(chunk, usage(self._prompt_len, self.tokens))


async def _pump(
    call: Call,
    generation: Generation,
    format_: ChunkFormat,
    logprobs: LogprobsFormat | None,
    view: PromptView | None,
    reply: Reply,
    turn: asyncio.Lock,
) -> tuple[_Chunks, bytes]:
    """Write one choice's chunks but the last one. Return what counted its tokens, and its last chunk, so that what follows it
    can be written with it. `turn` is that of the call, as in `_collect`.

    The stream opens with the first delta and not before, so that an earlier error still gets its own HTTP status.
    """
    prompt_ids = generation.prompt_ids if call.return_token_ids else None
    chunks = _Chunks(format_, logprobs, generation.prompt_len, prompt_ids)
    opening = format_.opening(prompt_ids)

    def take(delta: Delta) -> bool:
        if not reply.keeps_up:
            return False
        reply.event_now(chunks.of(delta))
        return True

    async for delta in generation:
        if view is not None:
            async with turn:
                for echoed in chunks.of_prompt(view, delta):
                    await reply.event(echoed)
                    await asyncio.sleep(0)  # lets other tasks run, as in `_collect`
            delta, view = view.output(delta), None  # an output that is hidden has one token
        if logprobs:
            async with turn:
                chunk = chunks.of(delta)
                await asyncio.sleep(0)  # lets other tasks run, as in `_collect`
        else:
            chunk = chunks.of(delta)
        if opening:
            chunk, opening = opening + chunk, b""
        if delta.finish_reason:
            return chunks, format_.last_chunk(chunk, generation.report)
        await reply.event(chunk)
        if not logprobs:
            generation.take_by(take)
    raise unfinished(generation)


async def _whole(api: RouterApi, call: Call, envelope: Envelope, generations: Sequence[Generation], reply: Reply) -> None:
    turn = asyncio.Lock()
    collected = [
        _collect(g, _logprobs_of(api, call, i), _view(api, call, i, g), turn, reply) for i, g in enumerate(generations)
    ]
    told = together([_told(output, g, reply) for output, g in zip(collected, generations, strict=True)])
    parts = _body(call, envelope, generations, await told)  # nothing else keeps the outputs while the client takes the parts
    if len(generations) == 1:  # a header has no room for the reports of hundreds of prompts; they go into the body
        reply.served(generations[0].report)
    await reply.parts(200, parts)


def _body(call: Call, envelope: Envelope, generations: Sequence[Generation], outputs: Sequence[_Output]) -> list[bytes]:
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


def _returned(call: Call, outputs: Sequence[_Output]) -> list[int]:
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


async def _collect(
    generation: Generation, logprobs: LogprobsFormat | None, view: PromptView | None, turn: asyncio.Lock, reply: Reply
) -> _Output:
    """Gather one choice's output. Log-probabilities are encoded as they come, because those of a long answer take a second
    together.

    Only the choice that holds `turn` encodes them, so other calls wait for one piece of this call, and not for one of each of
    its choices: pieces of 128 prompts take half a second. The reply counts what is gathered.
    """
    texts: list[str] = [view.text] if view else []
    listed: list[bytes] = []
    ids: list[int] = []
    finish_reason, stop_reason = None, None
    told = JoinedLists()
    gathered = GatheredCall()
    logprob = 0.0
    async for delta in generation:
        if view is not None:
            async with turn:
                for echoed in view.echoed(delta, logprobs):
                    reply.gather(told.add(echoed or {}))
                    await asyncio.sleep(0)
                for piece in view.listed(delta):
                    listed.append(piece)
                    reply.gather(len(piece))
                    await asyncio.sleep(0)
            delta, view = view.output(delta), None  # an output that is hidden has one token
        gathered.add(delta)
        texts.append(delta.text)
        ids += delta.ids
        reply.gather(len(delta.text) + ID_BYTES * len(delta.ids))
        finish_reason, stop_reason = delta.finish_reason, delta.stop_reason
        logprob += sum([one.logprob for one in delta.logprobs])
        if logprobs is not None:
            async with turn:
                reply.gather(told.add(logprobs.of(delta.ids, delta.logprobs)))
                await asyncio.sleep(0)  # lets other tasks run, because buffered deltas come without a pause
    if finish_reason is None:
        raise unfinished(generation)
    logprobs_json = told.encode() + (b',"prompt_logprobs":[%b]' % b",".join(listed) if listed else b"")
    return _Output("".join(texts), tuple(ids), finish_reason, logprobs_json, gathered, logprob, stop_reason)


async def _told(work: Coroutine[Any, Any, T], generation: Generation, reply: Reply) -> T:
    """Await the work of one generation. If the request fails, the reply gets its report, which says how far it came."""
    try:
        return await work
    except PdserveError:
        report = report_of(generation)
        if report is not None:
            reply.served(report)
        raise
