"""What the front ends call. `router.service.service.RouterService` implements it."""

from __future__ import annotations

from typing import Protocol

from router.api.answer import Generation
from router.api.request import GenerateInput, Prompt


class RouterApi(Protocol):
    """Implemented by `router.service.service.RouterService`."""

    model_name: str
    max_body_bytes: int

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
