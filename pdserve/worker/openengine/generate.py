"""The service Inference: one direct request for each call of Generate.

A request is accepted once its blocks are there. What goes wrong before that is a gRPC status, and afterwards one `EngineError`
at the end of the stream, as the protocol wants. The call's end, however it comes, ends the request.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

from pdserve.core.error_table import retry_after_s
from pdserve.core.errors import (
    Cancelled,
    DeadlineExceeded,
    ErrorCode,
    InvalidRequest,
    Overloaded,
    PdserveError,
    Unavailable,
)
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, TokenLogprobs, unpack_logprobs
from pdserve.core.structured.constraint import FIELD
from pdserve.core.worker import Role
from pdserve.rpc import codec, status
from pdserve.rpc.v1 import decode_pb2, link_pb2, openengine_pb2, openengine_pb2_grpc, prefill_pb2
from pdserve.worker.host import Host, request_hash
from pdserve.worker.openengine.direct import DirectRequest, DirectRequests, Ending, Told, refuse_drained
from pdserve.worker.openengine.request import published, read_generate
from pdserve.worker.openengine.session import Session, read_session

DEADLINE_S: Final = 600.0
"""The longest time of a call that sets no deadline, as the router's default."""
MAX_DEADLINE_S: Final = 3600.0  # as the router's default
STALLED_S: Final = 30.0  # as the router's for its clients
INLINE_CHARS: Final = 4096
"""Texts up to this length are encoded on the loop, in about 1 ms. Longer ones are encoded in a thread."""
TURN_TOKENS: Final = 64
"""The tokens of a prompt that are written at a time: with 20 candidates each they take some 3 ms."""
Response = openengine_pb2.GenerateResponse
Send = Callable[[Response], Awaitable[None]]
_Codes = openengine_pb2.ErrorCode
_CODES: Final = {
    ErrorCode.INVALID_REQUEST: _Codes.ERROR_CODE_INVALID_ARGUMENT,
    ErrorCode.OVERLOADED: _Codes.ERROR_CODE_OVERLOADED,
    ErrorCode.CANCELLED: _Codes.ERROR_CODE_CANCELLED,
    ErrorCode.LEASE_GONE: _Codes.ERROR_CODE_KV_SESSION_NOT_FOUND,
    ErrorCode.UNAVAILABLE: _Codes.ERROR_CODE_DRAINING,
    **dict.fromkeys(
        (
            ErrorCode.TRANSFER_FAILED,
            ErrorCode.REPLICA_LOST,
            ErrorCode.KV_CORRUPT,
            ErrorCode.KV_ROTTED,
            ErrorCode.INCOMPATIBLE_PEER,
        ),
        _Codes.ERROR_CODE_KV_TRANSFER_FAILED,
    ),
}
"""The protocol's code of each error that may end an accepted request. All others are INTERNAL."""
_FINISHES: Final = {
    FinishReason.STOP: openengine_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: openengine_pb2.FINISH_REASON_LENGTH,
}
_DUPLICATE: Final = "request_id: a request of this id runs here"


class GenerateService(openengine_pb2_grpc.InferenceServicer):
    """The service for callers that generate. `close` it."""

    def __init__(
        self, host: Host, role: Role, model: str, directs: DirectRequests, authorise: Callable[[Any], Awaitable[None]]
    ):
        """`model` is the name by which callers know the model. `authorise` aborts calls of those who may not call."""
        self._host = host
        self._lends = role is Role.PREFILL
        self._model = model
        self._directs = directs
        self._authorise = authorise
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")

    def close(self) -> None:
        """Let the thread end."""
        self._encoder.shutdown(wait=False, cancel_futures=True)

    async def Generate(self, request: openengine_pb2.GenerateRequest, context: Any) -> None:
        await self._authorise(context)
        remaining_s = context.time_remaining()
        limit_s = DEADLINE_S if remaining_s is None else min(remaining_s, MAX_DEADLINE_S)
        try:
            await self._generate(request, context, limit_s)
        except TimeoutError:
            await status.abort(context, DeadlineExceeded(f"the request was not finished within {limit_s:.1f} s"))
        except PdserveError as exc:
            await status.abort(context, published(exc) if isinstance(exc, InvalidRequest) else exc)

    async def _generate(self, message: openengine_pb2.GenerateRequest, context: Any, limit_s: float) -> None:
        """Run one request. Raises a `PdserveError` for one that is not accepted."""
        host = self._host
        refuse_drained(host)
        given = context.invocation_metadata() or ()
        longest = host.max_model_len
        asked = read_generate(message, given, model=self._model, max_model_len=longest, lends=self._lends)
        end_s = asyncio.get_running_loop().time() + limit_s
        async with asyncio.timeout_at(end_s):
            prompt_ids = await self._encode(asked.prompt)
        spec = asked.spec(prompt_ids, longest, lends=self._lends)
        session = None if asked.session is None else self._session(asked.session, spec)
        refuse_drained(host)
        request = self._directs.open(asked.request_id, end_s)
        if request is None:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, _DUPLICATE)
            return
        running = _Phase(self._host, request, spec, session, lambda message: _taken(context.write(message)))
        try:
            if self._lends:
                self._directs.prefill(request, spec)
            else:
                self._directs.bind(request, spec, limit_s, local_prefill=session is None)
            running.accepted(await _first(request))
            listed = ((status.IGNORED_FIELDS_METADATA, ", ".join(asked.ignored)),) if asked.ignored else ()
            await _taken(context.send_initial_metadata(listed))
            if session is not None:
                request.session_id = session.session_id
                self._directs.attach(request, session)
            await (self._lend(running) if self._lends else running.decode())
        finally:
            self._directs.end(request, cancel=not running.ended)

    async def _lend(self, running: _Phase) -> None:
        session = await running.lend()
        if session is not None:
            self._directs.keep(running.request, session)
            await running.ready(session)

    async def _encode(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        """Return the ids of a prompt, each of which the model has."""
        tokenizer, vocab_size = self._host.tokenizer, self._host.card.vocab_size
        if isinstance(prompt, str):
            if len(prompt) <= INLINE_CHARS:
                ids = tokenizer.encode(prompt)
            else:
                ids = await asyncio.get_running_loop().run_in_executor(self._encoder, tokenizer.encode, prompt)
            if not ids:
                raise InvalidRequest("has no tokens", field="prompt")
            return tuple(ids)
        if (highest := max(prompt)) >= vocab_size:
            raise InvalidRequest(f"token id {highest} is not in [0, {vocab_size - 1}]", field="token_ids")
        return prompt

    def _session(self, ref: openengine_pb2.KvSessionRef, spec: RequestSpec) -> Session:
        """Read the session of a request. Raises `InvalidRequest`."""
        session = read_session(ref, self._host, request_hash(codec.pack_ids(spec.prompt_ids), spec))
        wanted = spec.sampling.logprobs
        if wanted is not None and (session.first is None or len(session.first.top) < wanted):
            raise InvalidRequest(
                f"token 0 was drawn without {wanted} candidates: ask the prefill phase for them as well",
                field="response.return_output_logprobs",
            )
        return session


async def _taken(writing: Awaitable[None]) -> None:
    """Wait until the caller takes what is written. One that takes nothing for `STALLED_S` is given up: what is under way is
    never finished then, so no status could follow it."""
    try:
        async with asyncio.timeout(STALLED_S):
            await writing
    except TimeoutError:
        raise asyncio.CancelledError from None


async def _first(request: DirectRequest) -> prefill_pb2.PrefillStarted | decode_pb2.Reserved:
    """Return the answer that accepts a request. Raises a `PdserveError` when it is not accepted."""
    told = await request.next()
    match told:
        case prefill_pb2.PrefillStarted() | decode_pb2.Reserved():
            return told
        case decode_pb2.NoRoom():
            raise Overloaded(f"there is no room: {told.blocks_needed} blocks are needed", retry_after_s=1.0)
        case _:
            raise _error_of(told)


def _error_of(told: Told) -> PdserveError:
    """Return the error that an answer means where a token is due."""
    match told:
        case link_pb2.RequestFailed():
            if told.message.startswith(FIELD):  # the role names its own field
                return InvalidRequest(told.message.partition(": ")[2], field="guided")
            return status.from_reason(told.reason, told.message)
        case link_pb2.Refused() | decode_pb2.NoRoom():
            return Unavailable("this worker drains: it takes no new request")
        case Ending.CLOSED:
            return Unavailable("this worker ends, or changes its role")
        case _:
            return Cancelled("the request was aborted")


class _Phase:
    """The answer to one call. `accepted` first, then `decode`, or `lend` and `ready`."""

    def __init__(self, host: Host, request: DirectRequest, spec: RequestSpec, session: Session | None, send: Send) -> None:
        self.request = request
        self.ended = False
        """Nothing of the request runs any more, or it lends under a session that its caller has."""
        self._host = host
        self._spec = spec
        self._session = session
        self._send = send
        self._lease: prefill_pb2.PrefillStarted | None = None
        self._cached_tokens: int | None = None
        self._tokens = 0
        self._unsaid_ids = frozenset(() if spec.sampling.include_stop_str_in_output else spec.sampling.stop_token_ids)

    def accepted(self, told: prefill_pb2.PrefillStarted | decode_pb2.Reserved) -> None:
        """Note what the answer tells that accepts the request."""
        if told.HasField("cached_tokens"):
            self._cached_tokens = told.cached_tokens
        if isinstance(told, prefill_pb2.PrefillStarted):
            self._lease = told

    async def lend(self) -> Session | None:
        """Wait until the prompt is computed, and return its session. Return None when the stream has ended with an error."""
        row = await self._row()
        if row is None:
            return None
        if row.prompt_logprobs.chosen:
            await self._prompt(row)
        assert self._lease is not None
        first = _logprobs_of(row)[0] if row.HasField("logprobs") else None
        return Session(codec.lease_id_from_wire(self._lease.lease_id), self._lease.ticket, first)

    async def ready(self, session: Session) -> None:
        """End the stream with a session."""
        ready = openengine_pb2.PrefillReady(kv_session=session.to_wire(self._host))
        await self._send(self._response(prefill_ready=ready, usage=self._usage()))
        self.ended = True

    async def decode(self) -> None:
        """Send all tokens."""
        while (row := await self._row()) is not None:
            if row.prompt_logprobs.chosen:
                await self._prompt(row)
            self._tokens += len(row.ids)
            finish = codec.finish_from_wire(row.finish_reason)
            stopped = finish is FinishReason.STOP and not row.stop_string
            tokens = [] if stopped and row.ids[-1] in self._unsaid_ids else self._infos(row)
            if tokens or row.text:
                token = openengine_pb2.TokenOutput(output_index=0, tokens=tokens, text=row.text.decode())
                await self._send(self._response(token=token))
            if finish is not None:
                self.ended = True
                await self._finish(_FINISHES[finish], self._match(row) if finish is FinishReason.STOP else None)
                return

    async def _row(self) -> link_pb2.StepRow | None:
        """Return the next row. Return None when the stream has ended without one."""
        while True:
            told = await self.request.next()
            match told:
                case link_pb2.StepRow():
                    return told
                case decode_pb2.KvCommitted():
                    continue
                case Ending.ABORTED if self._lease is None:
                    await self._finish(openengine_pb2.FINISH_REASON_CANCELLED, None)
                case _:
                    await self._fail(_error_of(told))
            return None

    async def _finish(self, reason: openengine_pb2.FinishReason, match: openengine_pb2.StopMatch | None) -> None:
        finished = openengine_pb2.GenerationFinished(output_index=0, reason=reason, stop_match=match)
        await self._send(self._response(finished=finished, usage=self._usage()))

    async def _fail(self, error: PdserveError) -> None:
        """End the stream with an error. A session is used up by the request that failed with it."""
        again = retry_after_s(error) is not None and self._session is None
        code = _CODES.get(error.code, _Codes.ERROR_CODE_INTERNAL)
        if error.code is ErrorCode.INVALID_REQUEST:
            error = published(error) if isinstance(error, InvalidRequest) else error
        wire = openengine_pb2.EngineError(code=code, message=error.message, retryable=again)
        await self._send(self._response(error=wire, usage=self._usage()))

    def _match(self, row: link_pb2.StepRow) -> openengine_pb2.StopMatch | None:
        """Return what the output has matched. None: the end of its grammar, for which the protocol has no name."""
        params, last = self._spec.sampling, row.ids[-1]
        if row.stop_string:
            return openengine_pb2.StopMatch(stop_text=params.stop[row.stop_string - 1])
        if last in params.stop_token_ids:
            return openengine_pb2.StopMatch(stop_token_id=last)
        if last in self._host.card.eos_token_ids and not params.ignore_eos:
            return openengine_pb2.StopMatch(eos_token_id=last)
        return None

    async def _prompt(self, row: link_pb2.StepRow) -> None:
        ids = self._spec.prompt_ids
        scored = unpack_logprobs(row.prompt_logprobs, len(ids) - 1)
        infos = [self._info(ids[0], None)]
        for token_id, logprobs in zip(ids[1:], scored, strict=True):
            infos.append(self._info(token_id, logprobs))
            if not len(infos) % TURN_TOKENS:
                await asyncio.sleep(0)  # other requests have their turns
        await self._send(self._response(prompt=openengine_pb2.PromptOutput(tokens=infos)))

    def _infos(self, row: link_pb2.StepRow) -> list[openengine_pb2.TokenInfo]:
        wanted, logprobs = self._spec.sampling.logprobs, _logprobs_of(row)
        if wanted is not None and not logprobs and self._session is not None and self._session.first is not None:
            first = self._session.first  # only the lender knew them
            logprobs = (dataclasses.replace(first, top=first.top[:wanted]),)
        return [self._info(token_id, logprobs[i] if logprobs else None) for i, token_id in enumerate(row.ids)]

    def _info(self, token_id: int, logprobs: TokenLogprobs | None) -> openengine_pb2.TokenInfo:
        info = openengine_pb2.TokenInfo(token_id=token_id, token=self._spelled(token_id))
        if logprobs is not None:
            info.logprob = logprobs.logprob
            for candidate, logprob in logprobs.top:
                info.candidates.add(token_id=candidate, token=self._spelled(candidate), logprob=logprob)
        return info

    def _spelled(self, token_id: int) -> str:
        return self._host.tokenizer.decode((token_id,), skip_special_tokens=False)

    def _usage(self) -> openengine_pb2.Usage:
        prompt = len(self._spec.prompt_ids)
        return openengine_pb2.Usage(
            prompt_tokens=prompt,
            completion_tokens=self._tokens,
            total_tokens=prompt + self._tokens,
            cached_prompt_tokens=self._cached_tokens,
        )

    def _response(self, **fields: Any) -> Response:
        return Response(request_id=self.request.request_id, **fields)


def _logprobs_of(row: link_pb2.StepRow) -> tuple[TokenLogprobs, ...]:
    return unpack_logprobs(row.logprobs, len(row.ids)) if row.HasField("logprobs") else ()
