"""The Open Inference Protocol over HTTP, and Triton's generate extension: the routes under `/v2`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.rpc.status import CORRELATION_ID_METADATA
from router.api.answer import Delta, Generation
from router.api.router_api import RouterApi
from router.choices.deliver import Delivery, Sink
from router.http.answer import run_delivery
from router.http.reply import (
    Exchange,
    Reply,
    RunningCalls,
    class_headers,
    client_of,
    errors_told,
    exchange_of,
    header,
    json_response,
    read_body,
)
from router.kserve.answer import Output, failure, generate_json, infer_body
from router.kserve.request import InferCall
from router.kserve.signature import check_model, model_metadata, server_metadata
from router.openai.json import refuse
from router.openai.request import as_written
from router.parsing.parser import INLINE_BYTES, BodyBudget, Job, JobKind, RequestParser

JSON_BYTES_HEADER = "inference-header-content-length"
_MODEL = "/v2/models/{model:path}"
_OF_VERSION = "/versions/{version}"


def is_open_inference(path: str) -> bool:
    """Return True for a path whose errors have the protocol's form."""
    return path == "/v2" or path.startswith("/v2/")


def open_inference_routes(api: RouterApi, inference: Mapping[str, ASGIApp]) -> Iterator[Route]:
    """Yield the routes. `inference` has the endpoints of a model by the last part of their path. A model's name may hold a
    slash, so a longer path comes before a shorter one that would take it for a name."""
    info = _Descriptions(api)
    yield Route("/v2", info.server)
    yield Route("/v2/health/live", info.live)
    yield Route("/v2/health/ready", info.ready)
    for model in (_MODEL + _OF_VERSION, _MODEL):
        for name, endpoint in inference.items():
            yield Route(f"{model}/{name}", endpoint, methods=["POST"])
            yield Route(f"{model}/{name}", _only_post, methods=["GET"])
        yield Route(f"{model}/ready", info.model_ready)
    yield Route(_MODEL + _OF_VERSION, info.model)
    yield Route(_MODEL, info.model)


async def _only_post(_: Request) -> Response:
    """Refuse to GET what runs requests. The path would otherwise be that of a model with this name."""
    raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "POST"})


class _Descriptions:
    """Endpoints that tell clients about the server and the model."""

    def __init__(self, api: RouterApi) -> None:
        self._api = api

    async def server(self, _: Request) -> Response:
        return json_response(server_metadata())

    async def live(self, _: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, _: Request) -> Response:
        return self._ready({})

    async def model(self, request: Request) -> Response:
        check_model(self._api.model_name, **request.path_params)
        return json_response(model_metadata(self._api.model_name))

    async def model_ready(self, request: Request) -> Response:
        check_model(self._api.model_name, **request.path_params)
        return self._ready({"name": self._api.model_name})

    def _ready(self, told: dict[str, object]) -> Response:
        if self._api.ready:
            return json_response({**told, "ready": True})
        return json_response({**told, "ready": False, "reason": self._api.not_ready_reason}, 503)


class Inference:
    """An ASGI endpoint that runs one request."""

    def __init__(
        self,
        api: RouterApi,
        parser: RequestParser,
        running: RunningCalls,
        budget: BodyBudget,
        answers: BodyBudget,
        kind: JobKind,
        *,
        may_stream: bool = False,
    ) -> None:
        """`may_stream`: the answer is a stream of events, and without `stream: true` it has one event."""
        self._api = api
        self._parser = parser
        self._running = running
        self._budget = budget
        self._answers = answers
        self._kind = kind
        self._may_stream = may_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        with self._answers.share() as owed:
            reply = Reply(exchange, owed, failure)
            reply.correlate(header(scope, CORRELATION_ID_METADATA))
            async with errors_told(scope, receive, reply):
                check_model(self._api.model_name, **scope["path_params"])
                call = await self._read(scope, receive, exchange)
                await self._running.run(exchange, self._answer(call, reply))

    async def _read(self, scope: Scope, receive: Receive, exchange: Exchange) -> InferCall:
        client = client_of(scope, self._api.clients)
        with self._budget.share() as share:
            body = await read_body(scope, receive, exchange, self._api.max_body_bytes, share)
            job = Job(
                self._kind,
                body,
                self._api.max_prompt_tokens,
                header(scope, CORRELATION_ID_METADATA),
                class_headers(scope),
                json_bytes=_json_bytes(scope),
                client=client,
            )
            reading = self._parser.parse(job)
            # A large body waits for its turn. If its client leaves, it must not hold up the others.
            call = await (self._running.run(exchange, reading) if len(body) > INLINE_BYTES else reading)
        assert isinstance(call, InferCall)
        if call.stream and not self._may_stream:
            raise refuse("stream", "must be false or left out here: generate_stream returns more than one answer")
        return call.of_client(client)

    async def _answer(self, call: InferCall, reply: Reply) -> None:
        request = call.input
        assert request.request_id is not None
        reply.name(request.request_id, request.correlation_id)
        with Delivery(self._api, ends_stalled_writes=False) as delivery, as_written(call.names):
            await delivery.submit(request, (request.request_id,))
            (generation,) = delivery.generations
            output = Output(call, generation.prompt_len, lambda length: None if call.stream else reply.gather(length))
            sink: Sink = _Events(self._api.model_name, call, output, reply) if self._may_stream else output
            await run_delivery(delivery, [sink], reply)
            if not self._may_stream:
                await self._whole(call, output, generation, reply)

    async def _whole(self, call: InferCall, output: Output, generation: Generation, reply: Reply) -> None:
        reply.served(generation.report)
        if self._kind is JobKind.HTTP_GENERATE:
            await reply.parts(200, [generate_json(self._api.model_name, output.values())])
            return
        body, json_bytes = infer_body(self._api.model_name, call, output.values())
        if json_bytes is None:
            await reply.parts(200, [body])
        else:
            await reply.tensors(body, json_bytes)


class _Events:
    """Implements `Sink`: each delta is an event of a request that streams, and the last one is that of any other. The stream
    opens with the first event, so that an earlier error still gets its own HTTP status."""

    def __init__(self, model: str, call: InferCall, output: Output, reply: Reply) -> None:
        self.is_quick = call.stream
        self._model = model
        self._call = call
        self._output = output
        self._reply = reply

    async def take(self, delta: Delta) -> None:
        """Implements `Sink.take`."""
        self._output.add(delta)
        if delta.finish_reason is not None:
            await self._reply.end(self._event())
        elif self._call.stream:
            await self._reply.event(self._event())

    def take_now(self, delta: Delta) -> bool:
        """Implements `Sink.take_now`."""
        if not self._reply.keeps_up:
            return False
        self._output.add(delta)
        self._reply.event_now(self._event())
        return True

    def _event(self) -> bytes:
        return b"data: " + generate_json(self._model, self._output.values()) + b"\n\n"


def _json_bytes(scope: Scope) -> int | None:
    """Return the length of the JSON in front of binary tensors. None: there are none."""
    value = header(scope, JSON_BYTES_HEADER)
    if value is None:
        return None
    if not value.isdecimal() or len(value) > 20:
        raise refuse(JSON_BYTES_HEADER, "must be a number of bytes")
    return int(value)
