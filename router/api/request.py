"""A client's request, as a front end (gRPC or HTTP) hands it on. This file has no type of a wire format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pdserve.core.limits import MaxBytes
from pdserve.core.sampling import Placement
from pdserve.core.structured.constraint import Constraint

SESSION_ID: Final = MaxBytes(128)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat prompt."""

    role: str
    content: str


Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class TokenizeInput:
    """A prompt to be tokenised for a model. None means the served model."""

    model: str | None
    prompt: Prompt
    add_special_tokens: bool = True
    """A text prompt is encoded with the model's special tokens."""
    with_spellings: bool = False
    """The answer has each token as the vocabulary spells it."""


@dataclass(frozen=True, slots=True)
class DetokenizeInput:
    """Token ids to be written as text."""

    model: str | None
    ids: tuple[int, ...]
    skip_special_tokens: bool = False
    field: str = "tokens"
    """The name of the ids in the client's API, for errors."""


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """One request as a client wrote it, not yet checked against the model's limits.

    `sampling` holds by name the fields of `SamplingParams` that the client set (`logit_bias` as a mapping), and `options` those
    of `RequestSpec` beside them. Other fields take their defaults. Without `max_tokens` the output may be as long as fits;
    without `seed` the router draws one.
    """

    prompt: Prompt
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    request_id: str | None = None
    """The router's own unique id, if the front end has made it already. It is never what a client sent."""
    correlation_id: str = ""
    """The client's name for the request. It is logged and sent back, and need not be unique."""
    deadline_s: float | None = None
    placement: Placement | None = None
    slo_class: str = ""
    """The name of the request's class. Empty: the default class."""
    session_id: str = ""
    """The client's name for the conversation that the request belongs to. Empty: it belongs to none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    """A text prompt is encoded with the model's special tokens. Token ids and chats are taken as they are."""
    constraint: Constraint | None = None
    """What the text of the output must be. None: any text."""
