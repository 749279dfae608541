"""The HTTP front end: its routes. It knows no more about requests than `router.api.router_api` says."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pdserve import __version__
from pdserve.config import RouterConfig
from pdserve.core.error_table import TABLE
from pdserve.core.errors import PdserveError, UnknownModel
from pdserve.rpc.status import CORRELATION_ID_METADATA
from router.api.answer import unexpected
from router.api.router_api import RouterApi
from router.http.answer import answer, respond
from router.http.document import docs, openapi
from router.http.door import Refusal, shortened
from router.http.metrics import metrics_route
from router.http.open_inference import Inference, is_open_inference, open_inference_routes
from router.http.protocol import ConnectionTable, HttpServer, start_server
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
from router.http.tokenization import Tokenization
from router.kserve.answer import failure
from router.openai.json import Ignored, encode_json, error_headers, error_payload, joined
from router.openai.model_limits import model_limits
from router.openai.request import Call
from router.openai.responses.request import ResponsesCall
from router.parsing.parser import INLINE_BYTES, BodyBudget, Job, JobKind, RequestParser

DEFAULT_LIMITS: Final = RouterConfig()
MOST_CONNECTIONS: Final = 1 << 16  # about 30 KiB each

__all__ = ["HttpServer", "build_app", "serve_http"]


async def serve_http(
    api: RouterApi,
    parser: RequestParser,
    host: str,
    port: int,
    limits: RouterConfig = DEFAULT_LIMITS,
    most_connections: int = MOST_CONNECTIONS,
) -> HttpServer:
    """Listen and serve until the result is closed. Port 0 means any free port. Raises `ConfigError` naming the flag.

    Without `limits.max_connections`, the connections follow the streams that the router can serve, up to `most_connections`.
    """
    running = RunningCalls()
    fixed = limits.max_connections
    table = ConnectionTable(fixed or (lambda: min(api.streams, most_connections)), api.connection_refused)
    return await start_server(build_app(api, parser, running, limits), running, host, port, limits, table)


def build_app(api: RouterApi, parser: RequestParser, running: RunningCalls, limits: RouterConfig) -> Application:
    """Return the application alone. The server of this package alone can serve it."""
    info = _Info(api)
    metrics = [metrics_route(api, limits)] if limits.metrics_on_http else []
    budget = BodyBudget(limits.max_inflight_body_bytes)
    answers = BodyBudget(limits.max_inflight_answer_bytes, "answer", "router.max_inflight_answer_bytes")
    generate = {
        "/v1/completions": _Generate(api, parser, running, budget, answers, JobKind.COMPLETION),
        "/v1/chat/completions": _Generate(api, parser, running, budget, answers, JobKind.CHAT),
        "/v1/responses": _Generate(api, parser, running, budget, answers, JobKind.RESPONSES),
    }
    inference = {
        "infer": Inference(api, parser, running, budget, answers, JobKind.HTTP_INFER),
        "generate": Inference(api, parser, running, budget, answers, JobKind.HTTP_GENERATE),
        "generate_stream": Inference(api, parser, running, budget, answers, JobKind.HTTP_GENERATE, may_stream=True),
    }
    tokenization = {
        "/tokenize": Tokenization(api, parser, running, budget, JobKind.HTTP_TOKENIZE),
        "/detokenize": Tokenization(api, parser, running, budget, JobKind.HTTP_DETOKENIZE),
    }
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in tokenization.items()),
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generate.items()),  # Starlette refuses other methods
        *open_inference_routes(api, inference),
        Route("/v1/models", info.models),
        Route("/v1/models/{model:path}", info.model),
        Route("/health", info.health),
        *metrics,
        Route("/version", info.version),
        Route("/openapi.json", openapi),
        Route("/docs", docs),
        Route("/", info.root),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _no_route, PdserveError: _failed, Exception: _bug},  # type: ignore[dict-item]
    )
    app.router.redirect_slashes = False  # many clients lose the body of a redirected POST; 404 says what is wrong
    return Application(app, generate)


class Application:
    """The application. Requests for generations do not pass Starlette, which would cost several calls for each token."""

    def __init__(self, app: Starlette, generate: Mapping[str, _Generate]) -> None:
        self._app = app
        self._generate = generate

    @property
    def paths(self) -> list[str]:
        """The paths of all routes."""
        return [route.path for route in self._app.routes if isinstance(route, Route)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._generate.get(scope["path"]) if scope["method"] == "POST" else None
        await (endpoint or self._app)(scope, receive, send)


class _Generate:
    """An ASGI endpoint that runs generations."""

    def __init__(
        self,
        api: RouterApi,
        parser: RequestParser,
        running: RunningCalls,
        budget: BodyBudget,
        answers: BodyBudget,
        kind: JobKind,
    ) -> None:
        self._api = api
        self._parser = parser
        self._running = running
        self._budget = budget
        self._answers = answers
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        with self._answers.share() as owed:
            await self._serve(scope, receive, exchange, Reply(exchange, owed))

    async def _serve(self, scope: Scope, receive: Receive, exchange: Exchange, reply: Reply) -> None:
        header_id = header(scope, CORRELATION_ID_METADATA)
        reply.correlate(header_id)
        client = client_of(scope, self._api.clients)
        async with errors_told(scope, receive, reply):
            with self._budget.share() as share:
                body = await read_body(scope, receive, exchange, self._api.max_body_bytes, share)
                job = Job(self._kind, body, self._api.max_prompt_tokens, header_id, class_headers(scope), client=client)
                reading = self._parser.parse(job)
                # A large body waits for its turn. If its client leaves, it must not hold up the others.
                call = await (self._running.run(exchange, reading) if len(body) > INLINE_BYTES else reading)
                assert isinstance(call, Call | ResponsesCall)
            call = call.of_client(client)
            reply.name(call.request_id, call.correlation_id)
            ignored, unenforced = call.ignored, self._unenforced(call)
            if unenforced:
                ignored = joined([ignored, Ignored(unenforced, len(unenforced))])
            if ignored.count:
                self._api.ignored_fields(self._kind.value, ignored.count)
                reply.ignored(ignored.header)
            run = respond(self._api, call, reply) if isinstance(call, ResponsesCall) else answer(self._api, call, reply)
            await self._running.run(exchange, run)

    def _unenforced(self, call: Call | ResponsesCall) -> tuple[str, ...]:
        """Return the fields that no grammar can hold the model to, by the names that the client wrote."""
        if isinstance(call, Call):
            return self._api.unenforced(call.inputs[0])
        return tuple(map(call.names.written, self._api.unenforced(call.call.inputs[0])))


class _Info:
    """Endpoints that tell clients and operators about the service."""

    def __init__(self, api: RouterApi) -> None:
        self._api = api

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._api.model_name:
            raise UnknownModel(f"model: {name!r} is not served here; {self._api.model_name!r} is", field="model")
        return json_response(self._model_card())

    async def health(self, _: Request) -> Response:
        if self._api.ready:
            return json_response({"status": "ready"})
        return json_response({"status": "unavailable", "reason": self._api.not_ready_reason}, 503)

    async def version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def root(self, _: Request) -> Response:
        return json_response({"service": "pdserve", "version": __version__, "model": self._api.model_name})

    def _model_card(self) -> dict[str, object]:
        told = self._api.model_info()
        sizes = {"max_model_len": told.max_model_len, "vocab_size": told.vocab_size}  # the first one is vLLM's name
        limits = model_limits(self._api.max_prompt_tokens, self._api.max_body_bytes, self._api.max_deadline_s)
        return {"id": self._api.model_name, "object": "model", "created": 0, "owned_by": "pdserve", **sizes, "limits": limits}


async def _no_route(request: Request, exc: HTTPException) -> Response:
    message = f"{request.method} {shortened(request.scope['path'])}: {exc.detail}; GET /docs lists all routes"
    why = Refusal(HTTPStatus(exc.status_code), exc.detail.lower().replace(" ", "_"), message)
    told = {"error": message, "code": why.code, "param": None}
    body = encode_json(told) if is_open_inference(request.scope["path"]) else why.body
    return Response(body, why.status, exc.headers, media_type="application/json")


async def _failed(request: Request, exc: PdserveError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(exc)}
    payload = failure(exc) if is_open_inference(request.scope["path"]) else error_payload(exc)
    return Response(encode_json(payload), TABLE[exc.code].http, headers, media_type="application/json")


async def _bug(request: Request, _: Exception) -> Response:
    return await _failed(request, unexpected())
