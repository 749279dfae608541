"""The gRPC front end: `Inference`, the Open Inference Protocol, vLLM's `VllmEngine`, health and reflection on one port."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import closing
from typing import Any, Final

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.ids import RequestId
from pdserve.rpc import status
from pdserve.rpc.malformed import LargeMessage, MalformedGuard
from pdserve.rpc.server import CALLS_PER_CONNECTION, bind_port, client_options, make_server, stop_server
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc
from router.api.identity import Claim
from router.api.request import DetokenizeInput, TokenizeInput
from router.api.router_api import RouterApi
from router.grpc.answer import RunningRequest, Writer, run_batch
from router.grpc.calls import ClientCalls, trailing
from router.grpc.open_inference import LARGE_INFERENCES, OPEN_INFERENCE, add_open_inference
from router.grpc.vllm_engine import VllmEngineService
from router.parsing.generate import detokenize_input, generate_batch, generate_call, prompt_of
from router.parsing.parser import INLINE_BYTES, Job, JobKind, RequestParser

LARGE: Final = frozenset({"Generate", "GenerateBatch", "Tokenize", "Detokenize"})
SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
VLLM_SERVICE: Final = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The gRPC service for clients."""

    def __init__(self, router: RouterApi, calls: ClientCalls) -> None:
        self._router = router
        self._calls = calls
        self._running: dict[str, RunningRequest] = {}  # by the id that cancels them

    async def Generate(self, request: inference_pb2.GenerateRequest | LargeMessage, context: Any) -> None:
        """Run one request and stream its tokens. gRPC cancels this task when the client leaves; the end of the task then
        cancels the request at once.

        The report of a request stands in the trailing metadata. Those of several choices are in their last messages, since
        metadata has no room for so many; an error has that of the choice that failed.
        """
        running = None
        try:
            client = self._calls.client(context)
            asked = await self._calls.asked(request, generate_call, JobKind.GENERATE, client, context.time_remaining())
            call = asked.of_client(client)
            running = RunningRequest(self._router, call)
            await running.start()
            self._running[running.request_id] = running
            await context.send_initial_metadata(self._calls.initial_metadata(RequestId(running.request_id), call.input))
            if call.choices.plain:
                await running.run(context.write, lambda report: context.set_trailing_metadata(trailing(report)))
            else:
                with closing(Writer(context)) as writer:
                    await running.run(writer.write)
        except PdserveError as exc:
            report = None if running is None else running.delivery.failure_report
            await status.abort(context, exc, *trailing(report))
        finally:
            if running is not None:
                self._running.pop(running.request_id, None)
                running.close()

    async def GenerateBatch(self, request: inference_pb2.GenerateBatchRequest | LargeMessage, context: Any) -> None:
        """Run several requests in one call."""
        client = self._calls.client(context)
        try:
            batch = await self._calls.asked(request, generate_batch, JobKind.GENERATE_BATCH, client, context.time_remaining())
            await run_batch(self._router, batch.of_client(client), context)
        except PdserveError as exc:
            await status.abort(context, exc)

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Any) -> inference_pb2.CancelResponse:
        if not request.cancel_token:
            missing = f"is missing: the initial metadata of Generate has it as {status.CANCEL_TOKEN_METADATA}"
            await status.abort(context, InvalidRequest(missing, field="cancel_token"))
        claim = self._router.cancel_tokens.check(RequestId(request.request_id), request.cancel_token)
        if claim is not Claim.VALID:
            return inference_pb2.CancelResponse(found=False, not_here=claim is Claim.NOT_HERE)
        running = self._running.get(request.request_id)
        found = self._router.cancel(request.request_id) if running is None else running.cancel()
        return inference_pb2.CancelResponse(found=found)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest | LargeMessage, context: Any
    ) -> inference_pb2.TokenizeResponse:
        longest, client = self._router.max_prompt_tokens, self._calls.client(context)
        try:
            if isinstance(request, LargeMessage):
                parsed = await self._calls.parse(Job(JobKind.TOKENIZE, request.data, longest), client)
                assert isinstance(parsed, TokenizeInput)
            else:
                parsed = TokenizeInput(request.model or None, prompt_of(request, longest))
            ids = await self._router.tokenize(dataclasses.replace(parsed, client=client))
        except PdserveError as exc:
            await status.abort(context, exc)
            raise
        return inference_pb2.TokenizeResponse(ids=ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest | LargeMessage, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        longest, client = self._router.max_prompt_tokens, self._calls.client(context)
        try:
            if isinstance(request, LargeMessage):
                parsed = await self._calls.parse(Job(JobKind.DETOKENIZE, request.data, longest), client)
                assert isinstance(parsed, DetokenizeInput)
            else:
                parsed = detokenize_input(request, longest)
            text = await self._router.detokenize(dataclasses.replace(parsed, client=client))
        except PdserveError as exc:
            await status.abort(context, exc)
            raise
        return inference_pb2.DetokenizeResponse(text=text)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Any
    ) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(**dataclasses.asdict(self._router.model_info()))


class GrpcFront:
    """The running server of the gRPC port. `close` it."""

    def __init__(self, router: RouterApi, parser: RequestParser, max_connections: int) -> None:
        self._router = router
        self._parser = parser
        self._server = make_server(
            max_receive_bytes=router.max_body_bytes,
            interceptors=[
                MalformedGuard(SERVICE, LARGE, inline_bytes=INLINE_BYTES),
                MalformedGuard(OPEN_INFERENCE, LARGE_INFERENCES, inline_bytes=INLINE_BYTES),
                MalformedGuard(VLLM_SERVICE, frozenset({"Generate"}), inline_bytes=INLINE_BYTES),
            ],
            options=client_options(max_connections),
            max_calls=max_connections * CALLS_PER_CONNECTION,
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
        self._follower: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen and serve. Raises `ConfigError` naming --grpc-port."""
        self.port = bind_port(self._server, host, port, "--grpc-port")
        calls = ClientCalls(self._router, self._parser)
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(self._router, calls), self._server)
        add_open_inference(self._server, self._router, calls)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineService(self._router, calls), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, OPEN_INFERENCE, VLLM_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self._publish(self._router.ready)
        await self._server.start()
        self._follower = asyncio.create_task(self._follow_ready())

    async def close(self) -> None:
        """Stop serving."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
            self._follower = None
        await stop_server(self._server)

    async def _follow_ready(self) -> None:
        ready = self._router.ready
        while True:
            await self._publish(ready)
            ready = await self._router.next_ready(ready)

    async def _publish(self, ready: bool) -> None:
        response = health_pb2.HealthCheckResponse
        state = response.SERVING if ready else response.NOT_SERVING
        for name in ("", SERVICE, OPEN_INFERENCE, VLLM_SERVICE):
            await self._health.set(name, state)
