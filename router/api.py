"""What a front end (gRPC, HTTP) asks of the router and gets back. No wire types: both speak these."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pdserve.core.logprobs import TokenLogprobs
from pdserve.core.sampling import FinishReason, Placement

if TYPE_CHECKING:
    from router.parser import RequestParser


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """One request as a client wrote it, not yet checked against the model's limits.

    `sampling` holds the fields of `SamplingParams` that the client set, by name (`logit_bias` as a mapping); the others
    take their defaults,
    an unset `max_tokens` means as many as fit, an unset `seed` is drawn by the router.
    """

    prompt: Prompt
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    request_id: str | None = None
    """The router's own, if the front end has made it already: unique. Never what a client sent."""
    correlation_id: str = ""
    """What the client calls it: is logged and told again, and need not be unique."""
    deadline_s: float | None = None
    priority: int = 0
    placement: Placement | None = None
    cache_salt: str = ""
    """KV of equal prefixes is shared only among requests with the same one: a tenant cannot time another's prompts."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens [index, index + len(ids)) of a request's output, and the text that became certain with them."""

    index: int
    ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each id, where the request asks for them."""


@dataclass(frozen=True, slots=True)
class Report:
    """How a request was served; see RequestReport in inference.proto for each field."""

    placement: Placement
    placement_reason: str
    prompt_tokens: int
    output_tokens: int
    prefill_worker: str = ""
    decode_worker: str = ""
    queue_s: float = 0.0
    reserve_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    total_s: float = 0.0
    kv_bytes: int = 0
    transfer_s: float = 0.0
    commit_s: float = 0.0
    exposed_transfer_s: float = 0.0
    attempts: int = 1
    binds: int = 1
    prefill_start_s: float = 0.0
    prefill_end_s: float = 0.0
    kv_committed_s: float = 0.0
    first_decode_s: float = 0.0
    retry_reasons: tuple[str, ...] = ()  # error codes: why each attempt but the first was needed
    rebinds: int = 0
    request_id: str = ""
    correlation_id: str = ""
    exact: bool = True

    def values(self) -> dict[str, Any]:
        """By field name. `dataclasses.asdict` copies deeply, which takes 30 us, once or twice a request."""
        return {name: getattr(self, name) for name in self.__slots__}


class Generation(Protocol):
    """One running request. Iterate it to its end, or `close` it: then everything it holds is released."""

    request_id: str
    prompt_len: int

    def __aiter__(self) -> AsyncIterator[Delta]:
        """The last delta has a finish reason. Raises a `PdserveError`."""

    @property
    def report(self) -> Report:
        """From the last delta, or the error, on. Raises `InternalBug` before."""

    def close(self) -> None:
        """The client is gone: cancel at once what is still running. Idempotent, never blocks."""


class RouterApi(Protocol):
    """Implemented by `router.service.RouterService`."""

    model_name: str
    max_body_bytes: int
    parser: RequestParser

    async def submit(self, request: GenerateInput) -> Generation:
        """Check, tokenise, queue. Raises `InvalidRequest`, `UnknownModel`, `Overloaded`, `DeadlineExceeded`."""

    def cancel(self, request_id: str) -> bool: ...

    async def tokenize(self, model: str | None, prompt: Prompt) -> tuple[int, ...]: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text; of a special one the way it is written. Empty for an id without a token."""

    @property
    def max_prompt_tokens(self) -> int: ...

    @property
    def ready(self) -> bool:
        """A request that arrives now would be served."""

    @property
    def not_ready_reason(self) -> str:
        """Why not; empty when ready."""

    def metrics(self) -> bytes:
        """Prometheus text."""
