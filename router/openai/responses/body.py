"""The fields of the body of `/v1/responses`. Each field that OpenAI's API documents is named here.

What has the same meaning for a chat has the chat's types, so the two endpoints give the same tokens. The fields that pdserve
adds to OpenAI's are those of a chat as well.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw, Struct

from router.openai.body import EMPTY, ChatBody, Scalars, json_null
from router.openai.json import hint, neutral_values, unsupported

LOGPROBS: Final = "message.output_text.logprobs"
"""The one entry of `include` that exists here."""
NEVER_INCLUDED: Final = frozenset({
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
})  # fmt: skip
"""The entries of `include` that ask for parts of an answer that no answer has here. They are hints."""


class TextPart(Struct, forbid_unknown_fields=True):
    """One part of a message's content. Its type is checked before its other fields."""

    type: str
    text: str | None = None
    logprobs: Raw = msgspec.field(default_factory=json_null)
    """The log-probabilities of an earlier answer, which clients send back. No model sees them."""
    annotations: Raw = msgspec.field(default_factory=json_null)
    prompt_cache_breakpoint: Raw = msgspec.field(default_factory=json_null)
    refusal: str | None = None
    image_url: Raw = unsupported(*EMPTY)
    file_id: Raw = unsupported(*EMPTY)
    file_data: Raw = unsupported(*EMPTY)
    file_url: Raw = unsupported(*EMPTY)
    filename: Raw = unsupported(*EMPTY)
    detail: Raw = unsupported(*EMPTY)
    input_audio: Raw = unsupported(*EMPTY)


class ItemKind(Struct):
    """The type of an item, whatever else it holds. OpenAI's clients may leave out the type of a message."""

    type: str | None = None


class MessageItem(Struct, forbid_unknown_fields=True):
    """A message of the input, or of an earlier answer."""

    role: str
    type: str | None = None
    content: str | list[TextPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: Raw = hint()


class CallItem(Struct, forbid_unknown_fields=True, rename={"in_background": "async"}):
    """A call of an earlier answer."""

    type: str
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    in_background: Raw = unsupported(False)
    caller: Raw = unsupported()
    namespace: Raw = unsupported("")


class CallOutputItem(Struct, forbid_unknown_fields=True):
    """The result of a call."""

    type: str
    call_id: str
    output: str | list[TextPart]
    id: str | None = None
    status: str | None = None
    name: Raw = unsupported("")
    caller: Raw = unsupported()
    namespace: Raw = unsupported("")


class ReasoningItem(Struct, forbid_unknown_fields=True):
    """The reasoning of an earlier answer."""

    type: str
    id: str | None = None
    status: str | None = None
    content: list[TextPart] | None = None
    summary: Raw = hint([])
    encrypted_content: Raw = hint("")


class FunctionTool(Struct, forbid_unknown_fields=True, rename={"in_background": "async"}):
    """A tool that the model may call. Its type is checked before its other fields."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Raw = msgspec.field(default_factory=json_null)
    strict: bool | None = None
    in_background: Raw = unsupported(False)
    allowed_callers: Raw = unsupported([], ["direct"])
    defer_loading: Raw = unsupported(False)
    output_schema: Raw = unsupported()


class FunctionChoice(Struct, forbid_unknown_fields=True):
    """The one tool that is to be called."""

    type: str
    name: str | None = None


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    """The options of reasoning."""

    effort: str | None = None
    summary: Raw = hint()
    generate_summary: Raw = hint()
    context: Raw = unsupported()
    mode: Raw = unsupported()


class TextFormat(Struct, forbid_unknown_fields=True):
    """The form of the output's text."""

    type: str | None = None
    schema: Raw = msgspec.field(default_factory=json_null)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    """The options of the output's text."""

    format: TextFormat | None = None
    verbosity: Raw = hint("medium")


class EventOptions(Struct, forbid_unknown_fields=True):
    """The options of a streamed answer."""

    include_obfuscation: Raw = hint(False)


class ResponsesBody(Scalars, kw_only=True):
    """The body of `/v1/responses`."""

    model: str | None = None
    input: str | list[Raw] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    text: TextOptions | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[Raw] | None = None
    tool_choice: str | dict[str, Raw] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: Raw = msgspec.field(default_factory=json_null)
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None

    request_id: str | None = None
    deadline_s: float | None = None
    placement: str | None = None
    slo_class: str | None = None
    session_id: str | None = None
    speculation: str | None = None
    num_speculative_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, Raw] | None = None
    structured_outputs: dict[str, Raw] | None = None
    skip_special_tokens: bool | None = None

    store: Raw = hint(False)
    truncation: Raw = hint("disabled")
    service_tier: Raw = hint("auto", "default")
    max_tool_calls: Raw = hint()
    prompt_cache_retention: Raw = hint("in_memory", "in-memory")
    prompt_cache_options: Raw = hint({})
    previous_response_id: Raw = unsupported("")
    conversation: Raw = unsupported()
    background: Raw = unsupported(False)
    prompt: Raw = unsupported()
    context_management: Raw = unsupported([])
    moderation: Raw = unsupported()
    access_programs: Raw = unsupported()
    image: Raw = unsupported()

    max_tokens: Raw = unsupported()  # type: ignore[assignment] # it has another name here
    max_completion_tokens: Raw = unsupported()
    prompt_logprobs: Raw = unsupported()
    n: Raw = unsupported(1)
    best_of: Raw = unsupported(1)
    use_beam_search: Raw = unsupported(False)
    length_penalty: Raw = unsupported(1, 1.0)
    response_format: Raw = unsupported()
    enable_response_messages: Raw = unsupported(False)
    previous_input_messages: Raw = unsupported()
    mm_processor_kwargs: Raw = unsupported({})
    vllm_xargs: Raw = unsupported({})


_OWN: Final = {"tools", "tool_choice", "reasoning", "input", "text", "stream_options", "top_logprobs"}
SHARED: Final = tuple(
    name
    for name in ResponsesBody.__struct_fields__
    if name in ChatBody.__struct_fields__ and name not in neutral_values(ResponsesBody) and name not in _OWN
)
"""The fields that a chat takes as they are."""
assert {*Scalars.__struct_fields__} - {"max_tokens"} <= {*SHARED, *neutral_values(ResponsesBody)}
