"""The gRPC front end: `Inference`, health and reflection on one port."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import closing
from typing import Any, Final

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.ids import RequestId
from pdserve.core.report import Report
from pdserve.rpc import status
from pdserve.rpc.server import CALLS_PER_CONNECTION, bind_port, client_options, make_server, stop_server
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from router.api.answer import timeline
from router.api.identity import Claim
from router.api.request import DetokenizeInput, GenerateInput, TokenizeInput
from router.api.router_api import RouterApi
from router.grpc.answer import RunningRequest, Writer, run_batch
from router.grpc.malformed import LargeMessage, MalformedGuard
from router.openai.json import Ignored
from router.parsing.generate import GenerateCall, RequestBatch, detokenize_input, generate_batch, generate_call, prompt_of
from router.parsing.parser import BodyBudget, Job, JobKind, Parsed, RequestParser

LARGE: Final = frozenset({"Generate", "GenerateBatch", "Tokenize", "Detokenize"})
SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The gRPC service for clients."""

    def __init__(self, router: RouterApi, parser: RequestParser) -> None:
        self._router = router
        self._parser = parser
        self._budget = BodyBudget(router.max_inflight_body_bytes)
        self._running: dict[str, RunningRequest] = {}  # by the id that cancels them

    async def Generate(self, request: inference_pb2.GenerateRequest | LargeMessage, context: Any) -> None:
        """Run one request and stream its tokens. gRPC cancels this task when the client leaves; the end of the task then
        cancels the request at once.

        The report of a request stands in the trailing metadata. Those of several choices are in their last messages, since
        metadata has no room for so many; an error has that of the choice that failed.
        """
        running = None
        try:
            client = self._client(context)
            call = (await self._asked(request, client, context.time_remaining())).of_client(client)
            running = RunningRequest(self._router, call)
            await running.start()
            self._running[running.request_id] = running
            await context.send_initial_metadata(self._initial_metadata(RequestId(running.request_id), call.input))
            if call.choices.plain:
                await running.run(context.write, lambda report: context.set_trailing_metadata(_trailing(report)))
            else:
                with closing(Writer(context)) as writer:
                    await running.run(writer.write)
        except PdserveError as exc:
            report = None if running is None else running.delivery.failure_report
            await status.abort(context, exc, *_trailing(report))
        finally:
            if running is not None:
                self._running.pop(running.request_id, None)
                running.close()

    async def GenerateBatch(self, request: inference_pb2.GenerateBatchRequest | LargeMessage, context: Any) -> None:
        """Run several requests in one call."""
        longest, deadline_s = self._router.max_prompt_tokens, self._router.max_deadline_s
        remaining_s, client = context.time_remaining(), self._client(context)
        try:
            if isinstance(request, LargeMessage):
                job = Job(
                    JobKind.GENERATE_BATCH, request.data, longest, call_remaining_s=remaining_s, max_deadline_s=deadline_s
                )
                batch = await self._parse(job, client)
                assert isinstance(batch, RequestBatch)
            else:
                batch = generate_batch(
                    request, call_remaining_s=remaining_s, max_deadline_s=deadline_s, max_prompt_tokens=longest
                )
            await run_batch(self._router, batch.of_client(client), context)
        except PdserveError as exc:
            await status.abort(context, exc)

    async def _asked(
        self, request: inference_pb2.GenerateRequest | LargeMessage, client: tuple[str, ...], call_remaining_s: float | None
    ) -> GenerateCall:
        longest, deadline_s = self._router.max_prompt_tokens, self._router.max_deadline_s
        if not isinstance(request, LargeMessage):
            return generate_call(
                request, call_remaining_s=call_remaining_s, max_deadline_s=deadline_s, max_prompt_tokens=longest
            )
        job = Job(JobKind.GENERATE, request.data, longest, call_remaining_s=call_remaining_s, max_deadline_s=deadline_s)
        parsed = await self._parse(job, client)
        assert isinstance(parsed, GenerateCall)
        return parsed

    def _client(self, context: Any) -> tuple[str, str, str]:
        """Return the names of the client, its connection and a new call."""
        clients = self._router.clients
        shown = None
        if clients.header:
            shown = next((value for name, value in context.invocation_metadata() or () if name == clients.header), None)
        return clients.of_peer(context.peer(), shown if isinstance(shown, str) else None)

    async def _parse(self, job: Job, client: tuple[str, ...]) -> Parsed:
        with self._budget.share() as share:
            share.grow(len(job.data))
            return await self._parser.parse(dataclasses.replace(job, client=client))

    def _initial_metadata(self, request_id: RequestId, request: GenerateInput) -> tuple[tuple[str, str], ...]:
        own = [
            (status.REQUEST_ID_METADATA, request_id),
            (status.CANCEL_TOKEN_METADATA, self._router.cancel_tokens.issue(request_id)),
        ]
        if unenforced := self._router.unenforced(request):
            own.append((status.IGNORED_FIELDS_METADATA, Ignored(unenforced, len(unenforced)).header.decode()))
        correlation_id = request.correlation_id
        if correlation_id and correlation_id.isascii():  # metadata is ASCII; the report carries any id unchanged
            own.append((status.CORRELATION_ID_METADATA, correlation_id))
        return tuple(own)

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
        longest, client = self._router.max_prompt_tokens, self._client(context)
        try:
            if isinstance(request, LargeMessage):
                parsed = await self._parse(Job(JobKind.TOKENIZE, request.data, longest), client)
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
        longest, client = self._router.max_prompt_tokens, self._client(context)
        try:
            if isinstance(request, LargeMessage):
                parsed = await self._parse(Job(JobKind.DETOKENIZE, request.data, longest), client)
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


def _trailing(report: Report | None) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata that a report makes."""
    return () if report is None else ((status.TIMELINE_METADATA, timeline(report).decode()),)


class GrpcFront:
    """The running server of the gRPC port. `close` it."""

    def __init__(self, router: RouterApi, parser: RequestParser, max_connections: int) -> None:
        self._router = router
        self._parser = parser
        self._server = make_server(
            max_receive_bytes=router.max_body_bytes,
            interceptors=[MalformedGuard(SERVICE, LARGE)],
            options=client_options(max_connections),
            max_calls=max_connections * CALLS_PER_CONNECTION,
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
        self._follower: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen and serve. Raises `ConfigError` naming --grpc-port."""
        self.port = bind_port(self._server, host, port, "--grpc-port")
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(self._router, self._parser), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
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
        for name in ("", SERVICE):
            await self._health.set(name, state)
