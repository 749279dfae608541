"""What a client asks for, as a front end (gRPC or HTTP) hands it on. No type of a wire format is in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.core.sampling import Placement


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
