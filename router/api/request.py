"""A client's request, as a front end (gRPC or HTTP) hands it on. This file has no type of a wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Final

from pdserve.core.errors import InvalidRequest
from pdserve.core.limits import IntRange, MaxBytes, RealRange, limit_of
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import GREEDY_BELOW, Placement, SamplingParams
from pdserve.core.structured.constraint import FIELD, Constraint
from router.api.identity import new_request_id

SESSION_ID: Final = MaxBytes(128)
CLASS_HEADER: Final = "x-slo-class"
SESSION_HEADER: Final = "x-session-id"
"""The headers, and the metadata of gRPC, that stand for fields where a client cannot add any."""


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


SPECULATION: Final = ("auto", "off")
"""The values of the field `speculation`. The first one is the default."""


def draft_options(speculation: str | None, num_speculative_tokens: int | None) -> dict[str, int]:
    """Return the option `draft_limit` of a request with these two fields, of which None is one that the client did not set. The
    request has no such option if both leave the drafts to the settings. Raises `InvalidRequest` naming the field."""
    if speculation is not None and speculation not in SPECULATION:
        raise InvalidRequest(f"must be one of {', '.join(SPECULATION)}, got {speculation!r:.100}", field="speculation")
    if num_speculative_tokens is not None:
        limit_of(RequestSpec, "draft_limit", IntRange).check("num_speculative_tokens", num_speculative_tokens)
    if speculation != "off":
        return {} if num_speculative_tokens is None else {"draft_limit": num_speculative_tokens}
    if num_speculative_tokens:
        raise InvalidRequest(f"must be 0 beside speculation off, got {num_speculative_tokens}", field="num_speculative_tokens")
    return {"draft_limit": 0}


MAX_CHOICES: Final = IntRange(1, 128)
"""The limit for one prompt is OpenAI's. Each choice is a request of its own in the router's bounded queue."""
MAX_CALL_CHOICES: Final = 256
"""The most choices of one call: those of all its prompts or requests, with the candidates that are not returned."""
BEAM_WIDTHS: Final = IntRange(1, limit_of(SamplingParams, "logprobs", IntRange).high // 2)
"""A step needs the 2 x width likeliest tokens of each beam, and a request returns at most 20."""
LENGTH_PENALTIES: Final = RealRange(-10.0, 10.0)
_FREE_IN_BEAMS: Final = ("max_tokens", "temperature", "ignore_eos", "seed")


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices that a client wants for each prompt of its call."""

    n: int = 1
    best_of: int = 1
    """The number of candidates. If it is larger than `n`, the `n` likeliest ones are returned."""
    beam_width: int = 0
    """The number of beams, which is then also `n`. 0: there is no beam search."""
    length_penalty: float = 1.0
    """A beam's log-probability is divided by its number of tokens to this power."""

    @property
    def ranked(self) -> bool:
        """True when some candidates are not returned."""
        return self.best_of > self.n

    @property
    def plain(self) -> bool:
        """True when one request alone answers a prompt."""
        return self.best_of == 1 and not self.beam_width

    @property
    def requests(self) -> int:
        """The number of requests that run for one prompt at the same time."""
        return self.beam_width or self.best_of


ONE: Final = Choices()


def sampled(n: int, best_of: int | None) -> Choices:
    """Return `n` choices of `best_of` candidates; None: as many as choices. Raises `InvalidRequest` naming the field."""
    MAX_CHOICES.check("n", n)
    if best_of is None:
        return Choices(n, n)
    MAX_CHOICES.check("best_of", best_of)
    if best_of < n:
        raise InvalidRequest(f"must be at least n, which is {n}, got {best_of}", field="best_of")
    return Choices(n, best_of)


def check_number(choices: Choices, prompts: int, field: str) -> None:
    """Check the choices of `prompts` prompts together. Raises `InvalidRequest` naming `field`."""
    if prompts * choices.requests > MAX_CALL_CHOICES:
        raise InvalidRequest(
            f"{prompts} prompts with {choices.requests} choices each are {prompts * choices.requests} choices; "
            f"one call may have at most {MAX_CALL_CHOICES}",
            field=field,
        )


def check_beams(request: GenerateInput) -> None:
    """Check that a beam search can do what the request asks for. Raises `InvalidRequest` naming the first field that it
    cannot."""
    temperature = request.sampling.get("temperature", 0.0)
    if not 0.0 <= temperature < GREEDY_BELOW:
        raise InvalidRequest(f"must be 0 or not set beside a beam search, got {temperature:g}", field="temperature")
    for name, value in request.sampling.items():
        if name not in _FREE_IN_BEAMS and name in _NEUTRAL and value != _NEUTRAL[name]:
            raise InvalidRequest("is not allowed beside a beam search", field=name)
    if isinstance(request.prompt, ChatPrompt) and request.prompt.tools:
        raise InvalidRequest("are not allowed beside a beam search, which reads no calls", field="tools")
    if request.constraint is not None:
        raise InvalidRequest("is not allowed beside a beam search", field=FIELD)
    if request.options.get("draft_limit"):
        raise InvalidRequest("must be 0 or not set beside a beam search, which has no drafts", field="num_speculative_tokens")


_NEUTRAL: Final[dict[str, Any]] = {one.name: one.default for one in fields(SamplingParams) if one.init} | {"logit_bias": {}}
"""The value of each sampling field that asks for nothing."""


def choice_ids(first: str, count: int) -> tuple[str, ...]:
    """Return the request ids of the choices of one prompt, of which the first one is given."""
    return (first, *(f"{first}-{i}" for i in range(1, count)))


def first_id(request: GenerateInput) -> str:
    """Return the id of the request's first choice: the one that its front end has made, or a new one."""
    return request.request_id or new_request_id()


def likeliest(scores: Sequence[float], n: int) -> list[int]:
    """Return the indices of the `n` candidates with the highest scores, best first. Equal ones keep their order."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:n]
