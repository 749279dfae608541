"""The fields of a request's body and their types. Every field that OpenAI's or vLLM's API documents is named here.

A field whose effect does not exist here is `unsupported`, or a `hint`; one that changes no answer is in `WITHOUT_EFFECT`. The
structs forbid all others, and `router.openai.json` leaves those out.

JSON's `null` means absent, as in OpenAI's own clients, which send it for arguments that were not given. A `Raw` field stays
undecoded JSON, so a large value of a field that is refused anyway costs nothing.
"""

from __future__ import annotations

from typing import Any, Final, get_type_hints

import msgspec
from msgspec import Raw, Struct

from pdserve.core.limits import field_types
from pdserve.core.request_spec import OPTIONS, RequestSpec
from pdserve.core.sampling import SamplingParams
from router.openai.json import hint, unsupported

NULL: Final = Raw(b"null")
"""The default of a field that is decoded where it is used. (A `Raw` cannot be optional.)"""


json_null: Final = NULL.copy
"""It returns `NULL`. A struct has this function in its place, since msgspec writes no `Raw` into a schema."""


EMPTY: Final[tuple[Any, ...]] = ([], {}, "", 0, 0.0, False)
"""The values that ask for nothing. Clients send back an answer's message with them in fields that the answer did not use."""


WITHOUT_EFFECT: Final[dict[str, str]] = {
    "messages[].annotations": "The sources of an earlier answer. No model sees them.",
    "messages[].content[].prompt_cache_breakpoint": "OpenAI's place to end a cached prompt. Here each full block is cached.",
    "user": "The name of an end user, by which OpenAI finds misuse. It is neither logged nor sent to workers.",
    "safety_identifier": "OpenAI's newer name of `user`.",
    "metadata": "Labels of a stored answer. Nothing is stored here; an answer of /v1/responses repeats them.",
    "input[].id": "The name of an item of an earlier answer. Nothing is stored here.",
    "input[].status": "The state of an item of an earlier answer. Its text is taken as it is.",
    "input[].content[].logprobs": "The log-probabilities of an earlier answer. No model sees them.",
    "response_format.json_schema.name": "OpenAI demands a name for a schema. No model sees it.",
    "response_format.json_schema.description": "The description of a schema. No model sees it.",
    "response_format.json_schema.strict": "A schema is always enforced.",
}
"""The accepted fields that change no token and no behaviour, each with the reason why it may be accepted."""


class FunctionFields(Struct):
    """The function of a tool."""

    name: str
    description: str | None = None
    parameters: Raw = msgspec.field(default_factory=json_null)
    strict: bool | None = None


class ToolFields(Struct):
    """One tool that the model may call."""

    type: str
    function: FunctionFields | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """The options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Raw = hint(False)


class ContentPart(Struct, forbid_unknown_fields=True):
    """One part of a message's content. Its type is checked before its other fields."""

    type: str
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: Raw = msgspec.field(default_factory=json_null)
    image_url: Raw = unsupported(*EMPTY)
    image_pil: Raw = unsupported(*EMPTY)
    image_embeds: Raw = unsupported(*EMPTY)
    input_audio: Raw = unsupported(*EMPTY)
    audio_url: Raw = unsupported(*EMPTY)
    audio_embeds: Raw = unsupported(*EMPTY)
    video_url: Raw = unsupported(*EMPTY)
    file: Raw = unsupported(*EMPTY)
    uuid: Raw = unsupported(*EMPTY)


class ChosenFunction(Struct):
    """The function that the model must call."""

    name: str


class ChoiceFields(Struct):
    """The choice of one function."""

    type: str
    function: ChosenFunction | None = None


class CalledFunction(Struct):
    """The function of a call."""

    name: str
    arguments: str | dict[str, Raw] | None = None


class MessageCall(Struct):
    """A call that the assistant made."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(Struct, forbid_unknown_fields=True):
    """One message of a chat. Clients send back the messages of answers, so also their fields have a neutral value."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: Raw = msgspec.field(default_factory=json_null)
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Raw = unsupported(*EMPTY)
    refusal: str | None = None
    annotations: Raw = msgspec.field(default_factory=json_null)
    audio: Raw = unsupported(*EMPTY)


class JsonSchema(Struct, forbid_unknown_fields=True):
    """OpenAI's wrapping of a JSON schema."""

    schema: Raw = msgspec.field(default_factory=json_null)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """OpenAI's form of a constraint on the output."""

    type: str | None = None
    json_schema: JsonSchema | None = None


class Scalars(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a request that have the same name and form in JSON. `SamplingParams` and `RequestSpec` declare them."""

    priority: int | None = None
    cache_salt: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None


_DECLARED: Final = {name: field_types(RequestSpec)[name] for name in OPTIONS} | dict(field_types(SamplingParams))
assert get_type_hints(Scalars) == {n: kind | None for n, kind in _DECLARED.items() if kind in (bool, int, float, str)}


class Body(Scalars, kw_only=True):
    """The fields that both endpoints share, after those of `Scalars`. Ranges are checked where the values are used."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    deadline_s: float | None = None
    placement: str | None = None
    slo_class: str | None = None
    session_id: str | None = None
    speculation: str | None = None
    num_speculative_tokens: int | None = None
    prompt_cache_key: str | None = None
    return_token_ids: bool | None = None

    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, Raw] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Raw] | None = None
    prompt_logprobs: int | None = None

    user: str | None = None
    n: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None

    suffix: Raw = unsupported("")
    guided_json: Raw = unsupported()
    guided_regex: Raw = unsupported()
    guided_choice: Raw = unsupported()
    guided_grammar: Raw = unsupported()
    bad_words: Raw = unsupported([])
    allowed_token_ids: Raw = unsupported()
    truncate_prompt_tokens: Raw = unsupported()
    prompt_embeds: Raw = unsupported()
    guided_decoding_backend: Raw = hint("auto")
    guided_whitespace_pattern: Raw = unsupported()
    structural_tag: Raw = unsupported()
    spaces_between_special_tokens: Raw = unsupported(True)
    truncation_side: Raw = unsupported()
    return_tokens_as_token_ids: Raw = unsupported(False)
    logits_processors: Raw = unsupported([])
    logprob_token_ids: Raw = unsupported([])
    repetition_detection: Raw = unsupported()
    kv_transfer_params: Raw = unsupported({})
    vllm_xargs: Raw = unsupported({})


class CompletionBody(Body, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    """The prompt is "text", [ids], ["text", ...] or [[ids], ...]. `read_prompts` refuses a mixed list."""
    logprobs: int | bool | None = None
    """The number of likeliest tokens. Some clients write false for none."""
    echo: bool | None = None
    best_of: int | None = None

    add_special_tokens: bool | None = None


class ChatBody(Body, kw_only=True):
    """The body of `/v1/chat/completions`."""

    best_of: Raw = unsupported(1)
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None

    messages: list[Message] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: list[Raw] | None = None
    tool_choice: str | dict[str, Raw] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Raw = msgspec.field(default_factory=json_null)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    echo: Raw = unsupported(False)
    functions: Raw = unsupported([])
    function_call: Raw = unsupported("none", "auto")
    modalities: Raw = unsupported(["text"])
    audio: Raw = unsupported()
    web_search_options: Raw = unsupported()
    chat_template: Raw = unsupported()
    documents: Raw = unsupported([])
    add_special_tokens: Raw = unsupported(False)
    """The template alone decides about special tokens of a chat prompt. vLLM's default is false as well."""
    store: Raw = hint(False)
    service_tier: Raw = hint("auto", "default")
    verbosity: Raw = hint("medium")
    prediction: Raw = hint()
    prompt_cache_retention: Raw = hint("in_memory", "in-memory")
    prompt_cache_options: Raw = hint({})
    moderation: Raw = unsupported()
    include_reasoning: Raw = unsupported(True)
    thinking_token_budget: Raw = unsupported()
    mm_processor_kwargs: Raw = unsupported({})
    media_io_kwargs: Raw = unsupported({})
