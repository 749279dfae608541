"""The gRPC front end: `pdserve.rpc.v1.Inference`, health and reflection."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.core.errors import ConfigError, InvalidRequest, PdserveError
from pdserve.rpc import codec
from pdserve.rpc.status import abort
from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from router.api import ChatMessage, GenerateInput, Prompt, Report
from router.service import RouterService
from router.state import cluster_state

TIMELINE_METADATA: Final = "pdserve-timeline"
_PRESENCE_FIELDS: Final = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            generation = await self._service.submit(_input(request, context.time_remaining()))
        except PdserveError as exc:
            await abort(context, exc)
            return
        try:
            async for delta in generation:
                response = inference_pb2.GenerateResponse(
                    request_id=generation.request_id, index=delta.index, ids=delta.ids, text=delta.text
                )
                if delta.finish_reason is not None:
                    report = generation.report
                    response.finish_reason = codec.finish_to_wire(delta.finish_reason)
                    response.usage.CopyFrom(_usage(report))
                    response.report.CopyFrom(_report(report))
                    context.set_trailing_metadata(((TIMELINE_METADATA, _timeline(report)),))
                yield response
        except PdserveError as exc:
            await abort(context, exc)
        finally:
            generation.close()  # a client that left: its coroutine is cancelled, and so is its request

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Any) -> inference_pb2.CancelResponse:
        if not request.request_id:
            await abort(context, InvalidRequest("must not be empty", field="request_id"))
        return inference_pb2.CancelResponse(found=self._service.cancel(request.request_id))

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        try:
            prompt: Prompt = _chat(request.chat) if request.WhichOneof("prompt") == "chat" else request.text
            return inference_pb2.TokenizeResponse(ids=await self._service.tokenize(request.model, prompt))
        except PdserveError as exc:
            await abort(context, exc)
            raise

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Any
    ) -> inference_pb2.GetModelInfoResponse:
        service, card = self._service, self._service.card
        return inference_pb2.GetModelInfoResponse(
            model=service.model_name,
            architecture=card.architecture,
            vocab_size=card.vocab_size,
            max_model_len=service.max_model_len,
            block_size=service.layout.block_size,
            dtype=service.layout.dtype,
            kv_bytes_per_token=service.layout.bytes_per_token,
            eos_token_ids=card.eos_token_ids,
            has_chat_template=service.has_chat_template,
        )

    async def GetClusterState(
        self, request: inference_pb2.GetClusterStateRequest, context: Any
    ) -> inference_pb2.GetClusterStateResponse:
        return cluster_state(self._service)


def _input(request: inference_pb2.GenerateRequest, remaining_s: float | None) -> GenerateInput:
    """Raises `InvalidRequest`. The call's own deadline bounds the request like `deadline_s`."""
    sampling = request.sampling
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in _PRESENCE_FIELDS if sampling.HasField(name)}
    fields |= {
        "stop": tuple(sampling.stop),
        "stop_token_ids": tuple(sampling.stop_token_ids),
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
    }
    if request.placement not in common_pb2.Placement.values():
        raise InvalidRequest(f"{request.placement} is not a Placement", field="placement")
    return GenerateInput(
        prompt=_prompt(request),
        sampling=fields,
        model=request.model or None,
        request_id=request.request_id or None,
        deadline_s=request.deadline_s if request.HasField("deadline_s") else None,
        max_wait_s=remaining_s,
        priority=request.priority,
        placement=codec.placement_from_wire(request.placement),
    )


def _prompt(request: inference_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "tokens":
            return tuple(request.tokens.ids)
        case "chat":
            return _chat(request.chat)
    raise InvalidRequest("one of text, tokens or chat must be set", field="prompt")


def _chat(chat: inference_pb2.ChatPrompt) -> Prompt:
    return tuple(ChatMessage(message.role, message.content) for message in chat.messages)


def _usage(report: Report) -> inference_pb2.Usage:
    return inference_pb2.Usage(prompt_tokens=report.prompt_tokens, output_tokens=report.output_tokens)


def _report(report: Report) -> inference_pb2.RequestReport:
    fields = dataclasses.asdict(report) | {"placement": codec.placement_to_wire(report.placement)}
    del fields["prompt_tokens"], fields["output_tokens"]
    return inference_pb2.RequestReport(**fields)


def _timeline(report: Report) -> str:
    """The phases of a request as compact JSON, for clients that look at metadata only."""
    fields = dataclasses.asdict(report) | {"placement": report.placement.value}
    return json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in fields.items()}, separators=(",", ":"))


async def start_grpc(service: RouterService, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Serve on host:port (0: any free one). Raises `ConfigError` naming the flag when the port is busy."""
    options = [
        ("grpc.so_reuseport", 0),  # two processes on one port would share its calls
        ("grpc.max_receive_message_length", service.max_body_bytes),
        ("grpc.max_metadata_size", 16 << 10),
    ]
    server = grpc.aio.server(options=options)
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(service), server)
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
    for name in ("", SERVICE):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bound = bind(server, host, port, "--grpc-port")
    await server.start()
    return server, bound


def bind(server: grpc.aio.Server, host: str, port: int, flag: str) -> int:
    """The port that was bound. Raises `ConfigError` naming the flag."""
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as exc:
        raise ConfigError(f"cannot listen on {host}:{port}: the port is busy or not ours; choose another with {flag}") from exc
    if bound == 0:
        raise ConfigError(f"cannot listen on {host}:{port}: choose another with {flag}")
    return bound
