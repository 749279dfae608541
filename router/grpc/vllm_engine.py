"""vLLM's gRPC interface for gateways: each of its requests is one of ours, with the same limits, classes and errors."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import grpc

import pdserve
from pdserve.core.errors import Cancelled, InvalidRequest, PdserveError
from pdserve.core.ids import RequestId
from pdserve.core.sampling import TokenLogprobs
from pdserve.core.worker import Role
from pdserve.observe.snapshot import ClusterSnapshot
from pdserve.rpc import status
from pdserve.rpc.malformed import LargeMessage
from pdserve.rpc.v1 import smg_common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from router.api.answer import Delta, Generation
from router.api.request import CLASS_HEADER, SESSION_HEADER, choice_ids, first_id
from router.api.router_api import RouterApi
from router.choices.deliver import Delivery
from router.grpc.answer import OnReport, Writer, send_all
from router.grpc.calls import ClientCalls, metadata_of, trailing
from router.openai.request import as_written
from router.parsing.parser import BodyBudget, BodyShare, JobKind
from router.parsing.unparsed import leading_text
from router.parsing.vllm_engine import VllmCall, vllm_call

ID_FIELD: Final = vllm_engine_pb2.GenerateRequest.REQUEST_ID_FIELD_NUMBER
SERVER_TYPE: Final = "vllm-grpc"
CONSTRAINT_START: Final = "first_token"
"""The place from which a constraint holds, as vLLM names it: a model with one does not reason first."""
SECTION: Final = "core"
CHUNK_BYTES: Final = 64 << 10
"""A chunk of a tokenizer has so many bytes, as in vLLM. gRPC clients take messages of 4 MiB."""
SNAPSHOT_AGE_S: Final = 1.0
"""Loads are at most so old, as the metrics are: a snapshot of 400 workers holds the loop for some milliseconds."""
MAX_INT32: Final = (1 << 31) - 1
TOKEN_BYTES: Final = 8
"""A gathered answer takes so many bytes for a token, its log-probability, or a likeliest token."""

Send = Callable[[vllm_engine_pb2.GenerateResponse], Awaitable[None]]
Handler = Callable[[Any, Any, Any], Awaitable[None]]


def _not_served(method: str, why: str) -> Handler:
    async def refuse(_: Any, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served: {why}")

    return refuse


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The gRPC service for gateways that know vLLM."""

    def __init__(self, router: RouterApi, calls: ClientCalls) -> None:
        self._router = router
        self._calls = calls
        self._answers = BodyBudget(router.max_inflight_answer_bytes, "answer", "router.max_inflight_answer_bytes")
        self._running: dict[tuple[str, str], set[_RunningCall]] = defaultdict(set)
        """The calls by the name of their client and the id that the client gave them, which need not be unique."""
        self._seen: ClusterSnapshot | None = None
        self._seen_s = 0.0

    async def Generate(self, request: vllm_engine_pb2.GenerateRequest | LargeMessage, context: Any) -> None:
        running = None
        try:
            client = self._calls.client(context)
            with self._answers.share() as share:
                running = _RunningCall(self._router, share)
                with self._known(client[0], request, running):
                    read = await self._calls.asked(request, vllm_call, JobKind.VLLM_GENERATE, client, context.time_remaining())
                    asked = _of_class(read, context).of_client(client)
                    await running.start(asked)
                    own_id = RequestId(running.request_id)
                    await context.send_initial_metadata(self._calls.initial_metadata(own_id, asked.call.input, asked.ignored))
                    if asked.call.choices.plain:
                        await running.run(context.write, lambda report: context.set_trailing_metadata(trailing(report)))
                    else:
                        with closing(Writer(context)) as writer:
                            await running.run(writer.write)
        except PdserveError as exc:
            report = None if running is None else running.delivery.failure_report
            await status.abort(context, exc, *trailing(report))
        finally:
            if running is not None:
                running.close()

    @contextmanager
    def _known(
        self, client: str, request: vllm_engine_pb2.GenerateRequest | LargeMessage, running: _RunningCall
    ) -> Iterator[None]:
        """Let `Abort` find a call by its id, also while its message waits to be read. An empty id names none."""
        request_id = leading_text(request.data, ID_FIELD) if isinstance(request, LargeMessage) else request.request_id
        key = client, request_id
        if request_id:
            self._running[key].add(running)
        try:
            yield
        finally:
            if request_id:
                self._running[key].discard(running)
                if not self._running[key]:
                    del self._running[key]

    async def Abort(self, request: vllm_engine_pb2.AbortRequest, context: Any) -> vllm_engine_pb2.AbortResponse:
        client, *_ = self._calls.client(context)
        for request_id in request.request_ids:
            for running in self._running.get((client, request_id), ()):
                running.abort()
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Any
    ) -> vllm_engine_pb2.HealthCheckResponse:
        why = self._router.not_ready_reason
        return vllm_engine_pb2.HealthCheckResponse(healthy=not why, message=why)

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Any
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        info = self._router.model_info()
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=info.model,
            is_generation=True,
            max_context_length=info.max_model_len,
            vocab_size=info.vocab_size,
            served_model_name=info.model,
            architectures=[info.architecture],
            eos_token_ids=info.eos_token_ids,
            max_req_input_len=self._router.max_prompt_tokens,
        )

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Any
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        info, cluster = self._router.model_info(), self._snapshot()
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=cluster.running_requests + cluster.queued_requests,
            uptime_seconds=cluster.demand.uptime_s,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            kv_cache_dtype=info.kv_cache_dtype,
            block_size=info.block_size,
            model_dtype=info.dtype,
            max_num_seqs=_load_of(cluster).max_running_requests,
            constrained_decoding_start=CONSTRAINT_START,
        )

    async def GetLoads(self, request: vllm_engine_pb2.GetLoadsRequest, context: Any) -> vllm_engine_pb2.GetLoadsResponse:
        if request.dp_rank:
            await status.abort(context, InvalidRequest(f"must be 0, the only rank, got {request.dp_rank}", field="dp_rank"))
        if unknown := [section for section in request.include if section != SECTION]:
            wrong = f"{unknown[0]!r:.100} is no section here; {SECTION!r} is"
            await status.abort(context, InvalidRequest(wrong, field="include"))
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=pdserve.__version__,
            dp_rank_count=1,
            loads=[_load_of(self._snapshot())],
        )

    async def GetTokenizer(self, request: smg_common_pb2.GetTokenizerRequest, context: Any) -> None:
        try:
            archive = await self._router.tokenizer_files()
            size = len(archive.data)
            chunks = (
                smg_common_pb2.GetTokenizerChunk(
                    data=archive.data[at : at + CHUNK_BYTES], sha256=archive.sha256 if at + CHUNK_BYTES >= size else ""
                )
                for at in range(0, size, CHUNK_BYTES)
            )
            await send_all(chunks, context.write)
        except PdserveError as exc:
            await status.abort(context, exc)

    Embed = _not_served("Embed", "the model generates text")
    FlushCache = _not_served("FlushCache", "cached blocks give way by themselves")
    StartProfile = _not_served("StartProfile", "a worker's steps are in the metrics of the router")
    StopProfile = _not_served("StopProfile", "a worker's steps are in the metrics of the router")
    SubscribeKvEvents = _not_served("SubscribeKvEvents", "the router itself sends each prompt where its KV is")

    def _snapshot(self) -> ClusterSnapshot:
        now_s = asyncio.get_running_loop().time()
        if self._seen is None or now_s - self._seen_s >= SNAPSHOT_AGE_S:
            self._seen, self._seen_s = self._router.snapshot(), now_s
        return self._seen


def _of_class(asked: VllmCall, context: Any) -> VllmCall:
    """Return the request with the class and the session that the call's metadata name."""
    named = {"slo_class": metadata_of(context, CLASS_HEADER), "session_id": metadata_of(context, SESSION_HEADER)}
    given: dict[str, Any] = {name: value for name, value in named.items() if value}
    return replace(asked, call=replace(asked.call, input=replace(asked.call.input, **given)))


def _load_of(cluster: ClusterSnapshot) -> vllm_engine_pb2.SchedulerLoad:
    """Return the load of the cluster. Workers that drain get nothing new, so they do not count."""
    decode = [one for one in cluster.workers if one.hello.role is Role.DECODE and not one.draining]
    used = sum((one.load.blocks.held + one.load.blocks.quarantined) * one.hello.block_size for one in decode)
    total = sum(one.hello.kv_tokens for one in decode)
    return vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=cluster.running_requests,
        num_waiting_reqs=cluster.queued_requests,
        num_total_reqs=cluster.running_requests + cluster.queued_requests,
        num_used_tokens=min(used, MAX_INT32),
        max_total_num_tokens=min(total, MAX_INT32),
        token_usage=used / total if total else 0.0,
        max_running_requests=sum(one.hello.slots(one.load) for one in decode),
        num_waiting_uncached_tokens=cluster.demand.queued_prompt_tokens,
    )


class _RunningCall:
    """One call of Generate. `start` it once, `run` it once, and `close` it in any case."""

    def __init__(self, router: RouterApi, share: BodyShare) -> None:
        """`share` is for the memory of what is gathered."""
        self.request_id = ""
        """The router's own id of the first choice, once it is started."""
        self.delivery = Delivery(router, ends_stalled_writes=True)
        self._router = router
        self._share = share
        self._stream = False
        self._aborted = False
        self._gathered_bytes = 0

    async def start(self, asked: VllmCall) -> None:
        """Hand the request to the router. Raises a `PdserveError`."""
        call = asked.call
        self.request_id, self._stream = first_id(call.input), asked.stream
        with as_written(asked.names):
            await self.delivery.submit(call.input, choice_ids(self.request_id, call.choices.n))
        if self._aborted:
            self.abort()  # those that were submitted since

    async def run(self, send: Send, on_report: OnReport = lambda report: None) -> None:
        """Send all messages. `on_report` gets the report of each choice before its last message. Raises a `PdserveError`."""
        outputs = [
            _Output(one, i, self._grow, send, on_report, stream=self._stream) for i, one in enumerate(self.delivery.generations)
        ]
        try:
            await self.delivery.run(outputs)
        except Cancelled:
            if not self._aborted or self.delivery.lost_reader:
                raise
            await send_all([one.ended("abort") for one in outputs if not one.is_ended], send)

    def abort(self) -> None:
        """End all choices. Their answers end with what they have."""
        self._aborted = True
        for generation in self.delivery.generations:
            self._router.cancel(generation.request_id)

    def close(self) -> None:
        """Cancel at once what is still running."""
        self.delivery.close()

    def _grow(self, more_bytes: int) -> None:
        self._gathered_bytes += more_bytes
        self._share.grow(self._gathered_bytes)


class _Output:
    """Implements `Sink`: one choice, whose answer is gathered in its last message."""

    is_quick = False

    def __init__(
        self, generation: Generation, index: int, grow: Callable[[int], None], send: Send, on_report: OnReport, *, stream: bool
    ) -> None:
        self.is_ended = False
        self._generation = generation
        self._index = index
        self._grow = grow
        self._send = send
        self._on_report = on_report
        self._stream = stream
        self._whole = vllm_engine_pb2.GenerateComplete(index=index, prompt_tokens=generation.prompt_len)

    async def take(self, delta: Delta) -> None:
        """Implements `Sink.take`. Raises `RequestTooLarge` and `Overloaded` when the answer has no room."""
        self._whole.output_ids.extend(delta.ids)
        entries = len(delta.ids)  # of what is kept until the end
        if self._stream:
            if delta.ids or delta.prompt_logprobs:
                await self._send(vllm_engine_pb2.GenerateResponse(chunk=self._chunk(delta)))
        else:
            entries += self._gather(self._whole, delta)
        self._grow(entries * TOKEN_BYTES)
        if delta.finish_reason is not None:
            report = self._generation.report
            self._on_report(report)
            self._whole.cached_tokens = report.cached_tokens or 0
            if isinstance(delta.stop_reason, str):
                self._whole.matched_stop_str = delta.stop_reason
            elif delta.stop_reason is not None:
                self._whole.matched_token_id = delta.stop_reason
            await self._send(self.ended(delta.finish_reason.value))

    def take_now(self, delta: Delta) -> bool:
        """Implements `Sink.take_now`: gRPC has no write without a wait."""
        return False

    def ended(self, reason: str) -> vllm_engine_pb2.GenerateResponse:
        """Return the last message of the choice."""
        self.is_ended = True
        self._whole.finish_reason = reason
        self._whole.completion_tokens = len(self._whole.output_ids)
        return vllm_engine_pb2.GenerateResponse(complete=self._whole)

    def _chunk(self, delta: Delta) -> vllm_engine_pb2.GenerateStreamChunk:
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=delta.ids,
            prompt_tokens=self._generation.prompt_len,
            completion_tokens=len(delta.ids),
            index=self._index,
        )
        self._gather(chunk, delta)
        return chunk

    def _gather(self, message: vllm_engine_pb2.GenerateStreamChunk | vllm_engine_pb2.GenerateComplete, delta: Delta) -> int:
        """Add the log-probabilities of a delta to a message, and return the number of its new entries."""
        entries = 0
        if delta.logprobs:
            out = message.output_logprobs
            out.token_ids.extend(delta.ids)
            out.token_logprobs.extend([one.logprob for one in delta.logprobs])
            entries += _list(out, delta.logprobs)
        if delta.prompt_logprobs:
            read, prompt_ids = message.input_logprobs, self._generation.prompt_ids
            read.token_ids.extend(prompt_ids)
            read.token_logprobs.add()  # nothing comes before the first token
            read.token_logprobs.extend([vllm_engine_pb2.InputTokenLogProb(value=one.logprob) for one in delta.prompt_logprobs])
            if delta.prompt_logprobs[0].top:
                read.top_logprobs.add()
            entries += _list(read, delta.prompt_logprobs)
        return entries


def _list(message: vllm_engine_pb2.OutputLogProbs | vllm_engine_pb2.InputLogProbs, tokens: Sequence[TokenLogprobs]) -> int:
    """Add the likeliest tokens of each position, and return the number of entries that all positions have."""
    for one in tokens:
        if one.top:
            ids, values = zip(*one.top, strict=True)
            message.top_logprobs.add(token_ids=ids, values=values)
    return sum(1 + len(one.top) for one in tokens)
