"""A client's request, as a front end (gRPC or HTTP) hands it on. This file has no type of a wire format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from pdserve.core.limits import MaxBytes
from pdserve.core.sampling import Placement
from pdserve.core.structured.constraint import Constraint

SESSION_ID: Final = MaxBytes(128)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made in a message. `arguments` is the text of a JSON object, unless the answer was cut off in
    it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat prompt."""

    role: str
    content: str | None
    """None: the message has calls and no text."""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    """The id of the call that a message with the role `tool` answers."""
    name: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is the text of a JSON schema; empty: none was given."""

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat with more than messages: what its template gets beside them."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    variables: str = ""
    """Further variables of the template, as the text of a JSON object. Empty: none."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ToolMode(Enum):
    """The calls that a request may make. The values are OpenAI's."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The calls that a request with tools may make."""

    mode: ToolMode = ToolMode.AUTO
    function: str = ""
    """The output is a call of this tool. Empty: `mode` decides."""
    parallel: bool = True
    """False: the answer has at most one call."""

    @property
    def forced(self) -> bool:
        """True if the output must be calls, by a grammar."""
        return bool(self.function) or self.mode is ToolMode.REQUIRED


Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...] | ChatPrompt


def is_chat(prompt: Prompt) -> bool:
    """Return True for the messages of a chat, with or without more."""
    return isinstance(prompt, ChatPrompt) or (
        not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], ChatMessage)
    )


@dataclass(frozen=True, slots=True)
class TokenizeInput:
    """A prompt to be tokenised for a model. None means the served model."""

    model: str | None
    prompt: Prompt
    add_special_tokens: bool = True
    """A text prompt is encoded with the model's special tokens."""
    with_spellings: bool = False
    """The answer has each token as the vocabulary spells it."""
    client: tuple[str, ...] = ()
    """The names of the client, its connection and its call, as in `GenerateInput`."""


@dataclass(frozen=True, slots=True)
class DetokenizeInput:
    """Token ids to be written as text."""

    model: str | None
    ids: tuple[int, ...]
    skip_special_tokens: bool = False
    field: str = "tokens"
    """The name of the ids in the client's API, for errors."""
    client: tuple[str, ...] = ()
    """The names of the client, its connection and its call, as in `GenerateInput`."""


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
    tool_choice: ToolChoice = ToolChoice()
    """The calls that the output may have, if the prompt has tools."""
    leader: str = ""
    """The router's own id of a running request with the same prompt, whose KV this one shares: it is placed once that KV is
    there. Empty: none."""
    client: tuple[str, ...] = ()
    """The names of the client, its connection and its call, as `ClientNames` makes them. Empty: the client is not known."""
