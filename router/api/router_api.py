"""The interface that the front ends call."""

from __future__ import annotations

from typing import Protocol

from router.api.answer import Generation
from router.api.request import GenerateInput, Prompt


class RouterApi(Protocol):
    """Implemented by `router.service.service.RouterService`."""

    model_name: str
    max_body_bytes: int

    async def submit(self, request: GenerateInput) -> Generation:
        """Check, tokenise and queue a request. Raises `InvalidRequest`, `UnknownModel`, `Overloaded`, `DeadlineExceeded` or
        `Unavailable`."""

    def cancel(self, request_id: str) -> bool:
        """Cancel a running request. False: no such request is running."""

    async def tokenize(self, model: str | None, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt. Raises `InvalidRequest`, `UnknownModel`, `Overloaded` or `Unavailable`."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, and for a special token the bytes of its written form. They are empty
        for an id without a token."""

    @property
    def max_prompt_tokens(self) -> int:
        """A prompt may have at most this many tokens, which leaves room for one token of output."""

    @property
    def ready(self) -> bool:
        """A request that arrives now would be served."""

    @property
    def not_ready_reason(self) -> str:
        """The reason why a request would not be served now. Empty: the router is ready."""

    def metrics(self) -> bytes:
        """Return the metrics as Prometheus text."""
