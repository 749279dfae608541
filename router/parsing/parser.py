"""The parser of requests: small ones are parsed at once, large ones in a process of their own.

msgspec and protobuf hold the interpreter lock from a body's first byte to its last. 8 MiB take up to 0.5 s, during which no
token and no heartbeat would move, in any thread. So a child process parses the large ones, one after the other. The first large
request starts it, and it ends with the router.

The same code parses both. The bodies of all large requests in progress, and all large answers, have a budget of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import pickle
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from pdserve.core.errors import InternalBug, InvalidRequest, Overloaded, RequestTooLarge
from pdserve.killable_child import ChildEnded, KillableChild
from pdserve.rpc.v1 import inference_pb2, open_inference_pb2, vllm_engine_pb2
from router.api.request import DetokenizeInput, TokenizeInput
from router.kserve.request import InferCall, parse_generate, parse_infer
from router.openai.request import NO_HEADERS, Call, ClassHeaders, parse_chat, parse_completion
from router.openai.responses.request import ResponsesCall, parse_responses
from router.openai.tokenization import parse_detokenize, parse_tokenize
from router.parsing.generate import GenerateCall, RequestBatch, detokenize_input, generate_batch, generate_call, prompt_of
from router.parsing.infer import infer_call
from router.parsing.vllm_engine import VllmCall, vllm_call
from router.service.loop_time import SerialThread

INLINE_BYTES: Final = 32 << 10
"""Requests up to this size are parsed on the loop: 2.5 ms at worst, for 256 prompts of token ids. Most requests are smaller,
and a child would cost them more than that."""
PARSE_TIMEOUT_S: Final = 20.0  # for one request, and for the start; 8 MiB take 0.5 s of a core, and the child starts in 0.5 s
WAIT_TIMEOUT_S: Final = 60.0  # for the requests before it and the request itself
MAX_WAITING: Final = 4096  # the front ends hold the bytes of those that wait, and bound them before
COMMAND: Final = (sys.executable, "-m", "router.parsing.child")


class RequestParser:
    """Parses requests of all front ends. It owns a thread and a process; `close` it."""

    def __init__(self, max_body_bytes: int, command: Sequence[str] = COMMAND) -> None:
        """The front ends hold the bytes of requests that wait, and bound how many there may be."""
        self._thread = SerialThread("parse", MAX_WAITING)
        self._child = KillableChild(
            (*command, str(max_body_bytes)), start_timeout_s=PARSE_TIMEOUT_S, most_bytes=memory_bytes(max_body_bytes)
        )

    @property
    def child_pid(self) -> int | None:
        """The child's process id. None: no large request has started a child."""
        return self._child.pid

    async def parse(self, job: Job) -> Parsed:
        """Parse a request. Raises `InvalidRequest` naming the field, `Overloaded` when it takes too long, `Unavailable` after
        `close`, and `InternalBug` when the child ends."""
        if len(job.data) <= INLINE_BYTES:
            return parse(job)
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                return await self._thread.run(lambda: self._in_child(job), job.client, len(job.data))
        except TimeoutError:
            raise Overloaded(f"the request was not read within {WAIT_TIMEOUT_S:g} s", retry_after_s=1.0) from None

    def close(self) -> None:
        """Stop the thread and the child. Bounded. A caller that waits for the child gets an error."""
        self._thread.close()
        self._child.close()

    def _in_child(self, job: Job) -> Parsed:
        try:
            self._child.start()
            answer = self._child.ask(pickle.dumps(job, protocol=5), PARSE_TIMEOUT_S)
        except TimeoutError:
            raise Overloaded(f"the request was not read within {PARSE_TIMEOUT_S:g} s", retry_after_s=1.0) from None
        except ChildEnded as exc:
            raise InternalBug(f"the process that reads large requests ended: {exc}") from exc
        verdict: Verdict = unpack(answer)
        if isinstance(verdict, tuple):
            kind, message, field = verdict
            raise kind(message, field=field)
        return verdict


class JobKind(Enum):
    """The format of a request, by endpoint or method."""

    COMPLETION = "completion"  # OpenAI's JSON
    CHAT = "chat"
    RESPONSES = "responses"
    GENERATE = "generate"  # protobuf
    GENERATE_BATCH = "generate batch"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    VLLM_GENERATE = "vllm generate"
    HTTP_TOKENIZE = "http_tokenize"  # vLLM's JSON
    HTTP_DETOKENIZE = "http_detokenize"
    HTTP_INFER = "http_infer"  # the Open Inference Protocol's JSON, with binary tensors behind it
    HTTP_GENERATE = "http_generate"  # Triton's JSON
    MODEL_INFER = "model_infer"  # the Open Inference Protocol's protobuf


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
    json_bytes: int | None = None
    """The body's JSON has so many bytes, and binary tensors follow it. None: all of it is JSON."""
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
    open_inference_pb2.ModelInferRequest,
    vllm_engine_pb2.GenerateRequest,
)
Parsed = InferCall | Call | ResponsesCall | GenerateCall | VllmCall | RequestBatch | TokenizeInput | DetokenizeInput


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
        case JobKind.VLLM_GENERATE:
            return vllm_call(
                _message(vllm_engine_pb2.GenerateRequest(), job.data),
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
        case JobKind.HTTP_INFER:
            return parse_infer(job.data, job.json_bytes, job.header_id, job.headers)
        case JobKind.HTTP_GENERATE:
            return parse_generate(job.data, job.header_id, job.headers)
        case JobKind.MODEL_INFER:
            return infer_call(
                _message(open_inference_pb2.ModelInferRequest(), job.data),
                call_remaining_s=job.call_remaining_s,
                max_deadline_s=job.max_deadline_s,
            )


def _message(message: Message, data: bytes) -> Message:
    try:
        message.ParseFromString(data)
    except DecodeError as exc:
        raise InvalidRequest("is not a message of the type that this method takes", field="request") from exc
    return message


FREE_BYTES: Final = 64 << 10
"""The first bytes of each body are not counted. A connection buffers as many anyway, and small requests get in however many
large ones are in progress."""
RETRY_AFTER_S: Final = 1.0


class BodyBudget:
    """Counts the bytes that large bodies have taken, at most `max_bytes`."""

    def __init__(self, max_bytes: int, what: str = "body", setting: str = "router.max_body_bytes") -> None:
        """`what` and `setting` name the bodies and the limit in errors."""
        self.max_bytes = max_bytes
        self.what = what
        self.setting = setting
        self.taken_bytes = 0

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        """Open the share of one body. It is returned when nothing needs the body any more."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            self.taken_bytes -= share.taken_bytes


class BodyShare:
    """The bytes that one body has taken from the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.taken_bytes = 0

    @property
    def max_bytes(self) -> int:
        """The bytes that all bodies of the budget may take together."""
        return self._budget.max_bytes

    def grow(self, length: int) -> None:
        """Take bytes for a body that has `length` bytes, or declares them. Raises `Overloaded` when the budget has no room for
        them, and `RequestTooLarge` when it would have none if it were empty."""
        more = max(0, length - FREE_BYTES) - self.taken_bytes
        if more <= 0:
            return
        limit, what, setting = self._budget.max_bytes, self._budget.what, self._budget.setting
        if self.taken_bytes + more > limit:
            raise RequestTooLarge(f"{what}: is over the limit of {limit} bytes for all in progress ({setting})", field=what)
        if self._budget.taken_bytes + more > limit:
            raise Overloaded(
                f"{what}: together with others in progress it would be over the limit of {limit} bytes ({setting})",
                retry_after_s=RETRY_AFTER_S,
            )
        self._budget.taken_bytes += more
        self.taken_bytes += more


BASE_BYTES: Final = 512 << 20
BYTES_PER_BYTE: Final = 64
"""The address space for each byte of the largest body, over twice what was measured. The worst bodies are a prompt of many
lists of one token id as JSON (27.5 with msgspec 0.22), and a chat of empty messages as protobuf (28). The limit must not become
tight: msgspec does not survive every allocation that fails, so the process may end instead of refusing the body."""

Verdict = Parsed | tuple[type[InvalidRequest], str, str]
"""The request, or the class, the message and the field of its refusal."""


def memory_bytes(max_body_bytes: int) -> int:
    """Return the address space that the process may have. No answer is larger."""
    return BASE_BYTES + BYTES_PER_BYTE * max_body_bytes


class _Pickler(pickle.Pickler):
    """Pickles token ids as arrays: these are sent and read a hundred times as fast as tuples."""

    def persistent_id(self, obj: Any) -> array[int] | None:
        """Return what stands for the object. None: it is pickled as ever."""
        if type(obj) is tuple and obj and type(obj[0]) is int:
            with contextlib.suppress(TypeError, OverflowError):  # these are no token ids
                return array("I", obj)
        return None


class _Unpickler(pickle.Unpickler):
    """Makes tuples of token ids again, one prompt after the other. Another thread may run between two of them."""

    def persistent_load(self, pid: array[int]) -> tuple[int, ...]:
        """Return the object for which the array stands."""
        return tuple(pid)


def pack(verdict: Verdict) -> bytes:
    """Return a verdict as bytes."""
    packed = io.BytesIO()
    _Pickler(packed, protocol=5).dump(verdict)
    return packed.getvalue()


def unpack(packed: bytes) -> Verdict:
    """Return the verdict that was packed. It must come from a child of ours."""
    verdict: Verdict = _Unpickler(io.BytesIO(packed)).load()
    return verdict
