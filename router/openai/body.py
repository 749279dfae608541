"""The fields of a request's body and their types. Unknown fields are ignored.

JSON's `null` means absent, as in OpenAI's own clients, which send it for arguments that were not given. A `Raw` field stays
undecoded JSON, so a large value of a field that is refused anyway costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw, Struct, defstruct

from pdserve.core.limits import field_types
from pdserve.core.request_spec import OPTIONS, RequestSpec
from pdserve.core.sampling import SamplingParams
from router.openai.unsupported import unsupported

NULL: Final = Raw(b"null")
"""The default of a field that is decoded where it is used. (A `Raw` cannot be optional.)"""
EMPTY: Final[tuple[Any, ...]] = ([], {}, "", 0, 0.0, False)
"""The values that ask for nothing. Clients send back an answer's message with them in fields that the answer did not use."""


class FunctionFields(Struct):
    """The function of a tool."""

    name: str
    description: str | None = None
    parameters: Raw = NULL
    strict: bool | None = None


class ToolFields(Struct):
    """One tool that the model may call."""

    type: str
    function: FunctionFields | None = None


class StreamOptions(Struct):
    """The options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Part(Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(Struct):
    """The function of a call."""

    name: str
    arguments: str | dict[str, Raw] | None = None


class MessageCall(Struct):
    """A call that the assistant made."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(Struct):
    """One message of a chat."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: Raw = NULL
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Raw = unsupported(*EMPTY)
    audio: Raw = unsupported(*EMPTY)


SCALARS: Final[dict[str, Any]] = {
    name: kind
    for fields, names in ((field_types(RequestSpec), OPTIONS), (field_types(SamplingParams), field_types(SamplingParams)))
    for name in names
    if (kind := fields[name]) in (bool, int, float, str)
}
"""The fields of a request that have the same name and form in JSON, with their types."""

if TYPE_CHECKING:

    class _Scalars(Struct, kw_only=True):
        max_tokens: int | None
        top_k: int | None
        seed: int | None

else:
    _Scalars = defstruct("_Scalars", [(name, kind | None, None) for name, kind in SCALARS.items()], kw_only=True)


class Body(_Scalars, kw_only=True):
    """The fields that both endpoints share, after those of `SCALARS`. Ranges are checked where the values are used."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    deadline_s: float | None = None
    placement: str | None = None
    slo_class: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    return_token_ids: bool | None = None

    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, Raw] | None = None
    response_format: dict[str, Raw] | None = None
    structured_outputs: dict[str, Raw] | None = None

    n: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None

    prompt_logprobs: Raw = unsupported()
    echo: Raw = unsupported(False)
    suffix: Raw = unsupported("")
    guided_json: Raw = unsupported()
    guided_regex: Raw = unsupported()
    guided_choice: Raw = unsupported()
    guided_grammar: Raw = unsupported()
    bad_words: Raw = unsupported([])
    allowed_token_ids: Raw = unsupported()
    truncate_prompt_tokens: Raw = unsupported()
    prompt_embeds: Raw = unsupported()
    spaces_between_special_tokens: Raw = unsupported(True)


class CompletionBody(Body, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]] | None = None
    """The prompt is "text", [ids], ["text", ...] or [[ids], ...]. `read_prompts` refuses a mixed list."""
    logprobs: int | bool | None = None
    """The number of likeliest tokens. Some clients write false for none."""
    best_of: int | None = None

    add_special_tokens: bool | None = None


class ChatBody(Body, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    add_special_tokens: Raw = unsupported(False)
    """The template alone decides for a chat prompt."""
    tools: list[Raw] | None = None
    tool_choice: str | dict[str, Raw] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Raw = NULL
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    best_of: Raw = unsupported(1)
    functions: Raw = unsupported([])
    function_call: Raw = unsupported("none", "auto")
    modalities: Raw = unsupported(["text"])
    audio: Raw = unsupported()
    web_search_options: Raw = unsupported()
    chat_template: Raw = unsupported()
    documents: Raw = unsupported([])
