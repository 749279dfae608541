"""The OpenAPI document: routes, bodies, answers and errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from router.document.answers import ANSWERS, error_statuses
from router.document.schemas import PLACE, body_schemas

JSON: Final = "application/json"
_HELLO: Final = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: its method, what it does, its body and its answer."""

    method: str
    summary: str
    answer: str = ""
    """The name of the answer's schema. Empty: the answer is no JSON that this document describes."""
    body: str = ""
    """The name of the body's schema. Empty: the request has no body."""
    example: Any = None
    media_type: str = JSON
    streams: bool = False
    """With `stream: true` the answer is an event stream."""
    error: str = "Error"
    """The name of the schema of errors."""


_TENSORS: Final = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hello"]}]}
_TEXT: Final = {"text_input": "Hello", "max_tokens": 16}
_OF_MODEL: Final = {
    "": Operation("get", "Describe the tensors of the served model.", "InferModel", error="InferError"),
    "/ready": Operation("get", "Say whether a request would be served now: 200 or 503.", "InferReady", error="InferError"),
    "/infer": Operation(
        "post", "Continue a prompt that is given as a tensor. Binary tensors may follow the JSON, in Triton's form.",
        "InferAnswer", "InferBody", _TENSORS, error="InferError",
    ),
    "/generate": Operation(
        "post", "Continue a prompt, in the form of Triton's generate extension.", "GenerateAnswer", "GenerateBody", _TEXT,
        error="InferError",
    ),
    "/generate_stream": Operation(
        "post", "The same as a stream: one event with the whole answer, or with `stream: true` one for each step.",
        body="GenerateBody", example={**_TEXT, "stream": True}, media_type="text/event-stream", error="InferError",
    ),
}  # fmt: skip
"""The routes of the Open Inference Protocol that follow the name of a model, and that of its version."""
_OPEN_INFERENCE: Final[dict[str, Operation]] = {
    "/v2": Operation("get", "Name the service, its version and its extensions of the Open Inference Protocol.", "InferServer"),
    "/v2/health/live": Operation("get", "Say that the router runs.", "InferLive"),
    "/v2/health/ready": Operation("get", "Say whether a request would be served now: 200 or 503.", "InferReady"),
    **{f"/v2/models/{{model}}{rest}": told for rest, told in _OF_MODEL.items()},
    **{f"/v2/models/{{model}}/versions/{{version}}{rest}": told for rest, told in _OF_MODEL.items()},
}

OPERATIONS: Final[dict[str, Operation]] = {
    "/v1/chat/completions": Operation(
        "post", "Continue a chat.", "ChatCompletion", "ChatBody", {"messages": _HELLO, "max_tokens": 16}, streams=True
    ),
    "/v1/completions": Operation(
        "post", "Continue a prompt.", "Completion", "CompletionBody", {"prompt": "Hello", "max_tokens": 16}, streams=True
    ),
    "/v1/responses": Operation(
        "post", "Continue a chat, in the form of OpenAI's Responses API. Nothing is stored.", "Response", "ResponsesBody",
        {"input": "Hello", "max_output_tokens": 16}, streams=True,
    ),
    "/tokenize": Operation("post", "Return the token ids of a text or a chat.", "Tokens", "TokenizeBody", {"prompt": "Hello"}),
    "/detokenize": Operation("post", "Return the text of token ids.", "Text", "DetokenizeBody", {"tokens": [1, 2]}),
    "/version": Operation("get", "Name the version of the service.", "Version"),
    "/v1/models": Operation("get", "List the served model and its limits.", "Models"),
    "/v1/models/{model}": Operation("get", "Describe the served model and its limits.", "Model"),
    "/health": Operation("get", "Say whether a request would be served now: 200 or 503.", "Health"),
    "/metrics": Operation("get", "Return the metrics.", media_type="text/plain"),
    "/openapi.json": Operation("get", "Return this document."),
    "/docs": Operation("get", "Return this document as a page.", media_type="text/html"),
    "/": Operation("get", "Name the service, its version and its model.", "Service"),
} | _OPEN_INFERENCE  # fmt: skip
"""The routes by path. A test compares them with those of the application."""


def document(version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pdserve",
            "version": version,
            "description": "Text generation with OpenAI's API, and with the Open Inference Protocol under /v2. What "
            "pdserve does not do is refused by name. A field of a "
            "generation that no API documents is left out, and listed in the header x-pdserve-ignored-fields of the answer.",
        },
        "paths": {path: {one.method: _operation(path, one)} for path, one in OPERATIONS.items()},
        "components": {"schemas": {**body_schemas(), **ANSWERS}},
    }


def _operation(path: str, operation: Operation) -> dict[str, Any]:
    told: dict[str, Any] = {"summary": operation.summary, "responses": {"200": _answer(operation)}}
    if operation.body:
        body = {"schema": _ref(operation.body), "example": operation.example}
        told["requestBody"] = {"required": True, "content": {JSON: body}}
        told["responses"] |= {status: _error(operation, codes) for status, codes in error_statuses().items()}
    if names := re.findall(r"{(\w+)}", path):
        told["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        told["responses"]["404"] = _error(operation, error_statuses()["404"])
    if operation.answer in ("Health", "InferReady"):
        told["responses"]["503"] = _answer(operation)
    return told


def _answer(operation: Operation) -> dict[str, Any]:
    schema = _ref(operation.answer) if operation.answer else {"type": "object" if operation.media_type == JSON else "string"}
    content: dict[str, Any] = {operation.media_type: {"schema": schema}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string", "description": "With `stream: true`."}}
    return {"description": "The answer.", "content": content}


def _error(operation: Operation, codes: str) -> dict[str, Any]:
    return {"description": codes, "content": {JSON: {"schema": _ref(operation.error)}}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": PLACE.format(name=name)}
