"""The bytes of one request become what the router takes. The same code parses small requests on the loop and large ones in a
process of their own (`router.parsing.parser`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from google.protobuf.message import DecodeError

from pdserve.core.errors import InvalidRequest
from pdserve.rpc.v1 import inference_pb2
from router.api.request import DetokenizeInput, TokenizeInput
from router.openai.request import NO_HEADERS, Call, ClassHeaders, parse_chat, parse_completion
from router.openai.responses.request import ResponsesCall, parse_responses
from router.openai.tokenization import parse_detokenize, parse_tokenize
from router.parsing.generate import GenerateCall, RequestBatch, detokenize_input, generate_batch, generate_call, prompt_of


class JobKind(Enum):
    """The format of a request, by endpoint or method."""

    COMPLETION = "completion"  # OpenAI's JSON
    CHAT = "chat"
    RESPONSES = "responses"
    GENERATE = "generate"  # protobuf
    GENERATE_BATCH = "generate batch"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    HTTP_TOKENIZE = "http_tokenize"  # vLLM's JSON
    HTTP_DETOKENIZE = "http_detokenize"


@dataclass(frozen=True, slots=True)
class Job:
    """One request to be parsed."""

    kind: JobKind
    data: bytes
    max_prompt_tokens: int
    """More token ids than this are refused by their count, before the ids are looked at."""
    header_id: str | None = None
    """The X-Request-Id header. Only HTTP requests have it."""
    headers: ClassHeaders = NO_HEADERS
    """The headers of the class and the session. Only HTTP requests have them."""
    call_remaining_s: float | None = None
    """Seconds that are left of the call's own deadline. Only gRPC requests have it."""
    max_deadline_s: float = 0.0
    client: tuple[str, ...] = ()
    """The names of the client, its connection and its call, by which large requests take turns."""


Message = TypeVar(
    "Message",
    inference_pb2.GenerateRequest,
    inference_pb2.GenerateBatchRequest,
    inference_pb2.TokenizeRequest,
    inference_pb2.DetokenizeRequest,
)
Parsed = Call | ResponsesCall | GenerateCall | RequestBatch | TokenizeInput | DetokenizeInput


def parse(job: Job) -> Parsed:
    """Parse a request. Raises `InvalidRequest` naming the field."""
    match job.kind:
        case JobKind.COMPLETION:
            return parse_completion(job.data, job.header_id, job.max_prompt_tokens, job.headers)
        case JobKind.CHAT:
            return parse_chat(job.data, job.header_id, job.headers)
        case JobKind.RESPONSES:
            return parse_responses(job.data, job.header_id, job.headers)
        case JobKind.GENERATE:
            return generate_call(
                _message(inference_pb2.GenerateRequest(), job.data),
                call_remaining_s=job.call_remaining_s,
                max_deadline_s=job.max_deadline_s,
                max_prompt_tokens=job.max_prompt_tokens,
            )
        case JobKind.GENERATE_BATCH:
            return generate_batch(
                _message(inference_pb2.GenerateBatchRequest(), job.data),
                call_remaining_s=job.call_remaining_s,
                max_deadline_s=job.max_deadline_s,
                max_prompt_tokens=job.max_prompt_tokens,
            )
        case JobKind.TOKENIZE:
            request = _message(inference_pb2.TokenizeRequest(), job.data)
            return TokenizeInput(request.model or None, prompt_of(request, job.max_prompt_tokens))
        case JobKind.DETOKENIZE:
            return detokenize_input(_message(inference_pb2.DetokenizeRequest(), job.data), job.max_prompt_tokens)
        case JobKind.HTTP_TOKENIZE:
            return parse_tokenize(job.data)
        case JobKind.HTTP_DETOKENIZE:
            return parse_detokenize(job.data, job.max_prompt_tokens + 1)


def _message(message: Message, data: bytes) -> Message:
    try:
        message.ParseFromString(data)
    except DecodeError as exc:
        raise InvalidRequest("is not a message of the type that this method takes", field="request") from exc
    return message
