"""Fields that nobody documents are left out and named; fields that OpenAI or vLLM documents are never left out."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import openai.types.chat as chat_types
import pytest
from http_fakes import MODEL, FakeApi, app_of, served
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.shared_params import response_format_json_schema
from raw_http import exchange, post, protocol_post

from pdserve.core.errors import InvalidRequest
from pdserve.core.limits import MAX_MESSAGES
from router.api.request import ChatMessage
from router.openai.body import (
    WITHOUT_EFFECT,
    ChatBody,
    CompletionBody,
    ContentPart,
    JsonSchema,
    Message,
    ResponseFormat,
    StreamOptions,
)
from router.openai.json import MAX_NAME_CHARS, MAX_NAMES
from router.openai.request import parse_chat, parse_completion
from router.openai.responses.request import parse_responses

HEADER = "x-pdserve-ignored-fields"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SAFE = re.compile(r"[A-Za-z0-9_.?\[\]-]+(, [A-Za-z0-9_.?\[\]-]+)*")

VLLM_SAMPLING = """
    best_of use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    allowed_token_ids bad_words logits_processors logprob_token_ids
"""
VLLM_EXTRA = """
    echo add_special_tokens structured_outputs guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
    guided_whitespace_pattern structural_tag priority request_id return_tokens_as_token_ids return_token_ids cache_salt
    kv_transfer_params vllm_xargs repetition_detection response_format
"""
VLLM_CHAT = """
    add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
    mm_processor_kwargs include_reasoning thinking_token_budget reasoning_effort parallel_tool_calls
"""
"""The fields that vLLM adds to OpenAI's: `CompletionRequest` and `ChatCompletionRequest` of
vllm/entrypoints/openai/protocol.py, as known from its releases 0.6 to 0.11, and some that came later."""


def documented(*kinds: Any) -> set[str]:
    """The fields of a TypedDict of the openai package."""
    return {name for kind in kinds for name in kind.__annotations__}


def message_kinds() -> list[Any]:
    roles = ("System", "Developer", "User", "Assistant", "Tool", "Function")
    return [getattr(chat_types, f"ChatCompletion{role}MessageParam") for role in roles]


def part_kinds() -> list[Any]:
    names = ("Text", "Image", "InputAudio", "Refusal")
    return [getattr(chat_types, f"ChatCompletionContentPart{name}Param") for name in names] + [
        __import__("openai.types.chat.chat_completion_content_part_param", fromlist=["File"]).File
    ]


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (CompletionBody, documented(completion_create_params.CompletionCreateParamsBase)),
        (ChatBody, documented(chat_params.CompletionCreateParamsBase)),
        (StreamOptions, documented(chat_types.ChatCompletionStreamOptionsParam)),
        (Message, documented(*message_kinds())),
        (ContentPart, documented(*part_kinds())),
        (ResponseFormat, documented(response_format_json_schema.ResponseFormatJSONSchema)),
        (JsonSchema, documented(response_format_json_schema.JSONSchema)),
        (CompletionBody, {*VLLM_SAMPLING.split(), *VLLM_EXTRA.split(), "prompt_embeds"}),
        (ChatBody, {*VLLM_SAMPLING.split(), *VLLM_EXTRA.split(), *VLLM_CHAT.split()}),
    ],
    ids=[
        "completion",
        "chat",
        "stream_options",
        "message",
        "part",
        "response_format",
        "json_schema",
        "vllm completion",
        "vllm chat",
    ],
)
def test_no_documented_field_is_left_out(shape: type[Struct], names: set[str]) -> None:
    """A newer client's field fails here until somebody supports it, refuses it, or says why it has no effect."""
    assert len(names) > 1
    assert names - {*shape.__struct_fields__} == set()
    assert shape.__struct_config__.forbid_unknown_fields


def test_every_field_without_effect_exists() -> None:
    tops = {name for name in WITHOUT_EFFECT if "." not in name}
    assert tops <= {*ChatBody.__struct_fields__}
    assert all(reason.endswith(".") for reason in WITHOUT_EFFECT.values())


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("moderation", {"moderation": {"model": "m"}}),
        ("web_search_options", {"web_search_options": {}}),
        (
            "messages[0].content[0].image_url",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": {"url": "u"}}]}]},
        ),
    ],
)
def test_a_documented_field_that_is_lacking_is_refused_by_name(field: str, fields: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(json.dumps({**CHAT, **fields, "unknown": 1}).encode(), None)
    assert caught.value.field == field


HINTS: dict[str, Any] = {
    "service_tier": "flex", "verbosity": "low", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"},
    "store": True, "prediction": {"type": "content", "content": "x"}, "guided_decoding_backend": "xgrammar",
}  # fmt: skip


def test_hints_that_change_nothing_here_are_taken_and_listed() -> None:
    """OpenAI's own clients and agents send them, and were refused."""
    streamed = {"stream": True, "stream_options": {"include_obfuscation": True, "include_usage": True}}
    call = parse_chat(json.dumps({**CHAT, **HINTS, **streamed, "unknown": 1}).encode(), None)
    assert {*call.ignored.names} == {*HINTS, "stream_options.include_obfuscation", "unknown"}
    assert call.include_usage
    body = {
        "input": [{"role": "assistant", "content": "x", "phase": "commentary"},
                  {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "e"}],
        "truncation": "auto", "store": True, "service_tier": "priority", "max_tool_calls": 3, "reasoning": {"summary": "auto"},
        "text": {"verbosity": "high"}, "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    }  # fmt: skip
    asked = parse_responses(json.dumps(body).encode(), None)
    assert {*asked.ignored.names} == {
        "input[].phase", "input[].summary", "input[].encrypted_content", "truncation", "store", "service_tier",
        "max_tool_calls", "reasoning.summary", "text.verbosity", "include.reasoning.encrypted_content",
    }  # fmt: skip
    assert asked.logprobs
    assert [*asked.call.inputs[0].prompt] == [ChatMessage("assistant", "x")]  # type: ignore[misc]


def test_formats_that_nobody_enforces_are_listed() -> None:
    """pydantic writes `path`, `password` and more, which were refused. Formats are enforced where the compiler knows them."""
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "date"},
            "a": {"anyOf": [{"type": "string", "format": "path"}, {"type": "null"}]},
            "b": {"const": {"format": "binary"}},
        },
        "$defs": {"c": {"items": {"format": "a, b\r\n"}}},
    }
    wrapped = {"type": "json_schema", "json_schema": {"schema": schema}}
    names = ["path", "a??b??"]
    for parse, place, fields in (
        (parse_chat, "response_format.json_schema.schema", {**CHAT, "response_format": wrapped}),
        (parse_completion, "structured_outputs.json", {"prompt": "p", "structured_outputs": {"json": schema}}),
        (parse_responses, "text.format.schema", {"input": "x", "text": {"format": {"type": "json_schema", "schema": schema}}}),
    ):
        read: Any = parse(json.dumps(fields).encode(), None)
        assert sorted(read.ignored.names) == sorted(f"{place}.format.{name}" for name in names)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for choice, listed in (("auto", []), ("required", names)):
        call = parse_chat(json.dumps({**CHAT, "tools": [tool], "tool_choice": choice}).encode(), None)
        assert sorted(call.ignored.names) == sorted(f"tools[].function.parameters.format.{name}" for name in listed)


def test_an_earlier_refusal_is_text_of_its_message_and_its_annotations_are_left_out() -> None:
    spoken = {"role": "assistant", "annotations": [{"type": "url_citation"}]}
    messages = [
        {**spoken, "content": None, "refusal": "No."},
        {**spoken, "content": [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": [{"type": "text", "text": "Why?", "prompt_cache_breakpoint": {"mode": "explicit"}}]},
    ]
    call = parse_chat(json.dumps({"messages": messages}).encode(), None)
    told = (ChatMessage("assistant", "No."), ChatMessage("assistant", "Well.\nNo."), ChatMessage("user", "Why?"))
    assert call.inputs[0].prompt == told
    part = {"type": "output_text", "text": "Well.", "annotations": [{"type": "file_citation"}]}
    items = [{"role": "assistant", "content": [part, {"type": "refusal", "refusal": "No."}]}]
    assert parse_responses(json.dumps({"input": items}).encode(), None).call.inputs[0].prompt == told[1:2]
    for bad, field in (
        ({"role": "user", "content": "x", "refusal": "No."}, "refusal"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "refusal": "No."}]}, "content[0].refusal"),
        ({"role": "user", "content": [{"type": "refusal"}]}, "content[0].refusal"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            parse_chat(json.dumps({"messages": [bad]}).encode(), None)
        assert caught.value.field == f"messages[0].{field}"


def test_names_at_every_depth_are_told() -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "p": 1}], "m": 1},
                     {"role": "user", "content": "b", "m": 2}],
        "stream": True, "stream_options": {"include_usage": True, "s": 1}, "seed": 3, "top": None,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "free": 1}, "j": 1}, "r": 1},
    }  # fmt: skip
    call = parse_chat(b"\xef\xbb\xbf" + json.dumps(body).encode(), None)
    places = [
        "messages[].content[].p",
        "messages[].m",
        "stream_options.s",
        "top",
        "response_format.json_schema.j",
        "response_format.r",
    ]
    assert sorted(call.ignored.names) == sorted(places)
    assert (call.ignored.count, call.ignored.more) == (7, False)
    assert call.inputs[0].sampling == {"seed": 3}
    assert call.include_usage
    assert call.inputs[0].constraint is not None
    assert json.loads(call.inputs[0].constraint.text) == {"type": "object", "free": 1}


def test_names_in_tools_and_calls_are_told() -> None:
    tool = {"type": "function", "function": {"name": "f", "cache": 1, "parameters": {"free": 1}}, "cache_control": {}}
    spoken = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}
    messages = [*CHAT["messages"], {"role": "assistant", "tool_calls": [spoken]}]
    call = parse_chat(json.dumps({"messages": messages, "tools": [tool, {**tool, "function": {"name": "g"}}]}).encode(), None)
    assert sorted(call.ignored.names) == ["messages[].tool_calls[].index", "tools[].cache_control", "tools[].function.cache"]
    assert call.ignored.count == 4


def test_names_in_the_choice_of_a_tool_are_told() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    choice = {"type": "function", "function": {"name": "f", "yy": 1}, "xx": 1}
    body = {**CHAT, "tools": [tool], "tool_choice": choice}
    names = parse_chat(json.dumps(body).encode(), None).ignored.names
    assert sorted(names) == ["tool_choice.function.yy", "tool_choice.xx"]
    told = {
        "input": "x",
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": {"type": "function", "name": "f", "xx": 1},
    }
    assert parse_responses(json.dumps(told).encode(), None).ignored.names == ("tool_choice.xx",)


@given(st.dictionaries(st.text(max_size=100), st.none() | st.integers() | st.lists(st.text(max_size=3)), max_size=30))
def test_any_names_make_a_safe_header_and_change_nothing(unknown: dict[str, Any]) -> None:
    unknown = {f"\r\n{name}": value for name, value in unknown.items()}
    call = parse_completion(json.dumps({**unknown, "prompt": "p", "seed": 1}).encode(), None)
    assert call.inputs[0].prompt == "p"
    assert call.ignored.count == len(unknown)
    told = call.ignored.header.decode("ascii")
    assert not unknown or SAFE.fullmatch(told)
    assert len(told) <= (MAX_NAMES + 1) * (MAX_NAME_CHARS + 5)


def test_errors_of_other_fields_keep_their_places() -> None:
    body = {"zz": 1, "messages": [{"role": "user", "content": "x", "yy": 1}, {"role": "user", "content": [{"type": 3}]}]}
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(json.dumps(body).encode(), None)
    assert caught.value.field == "messages[1].content[0].type"
    for bad in (b'{"zz": 1, "messages": "x"}', b'{"zz": 1, "messages": [7]}', b'{"zz": 1, "messages": {"a": {}}}'):
        with pytest.raises(InvalidRequest, match=r"^messages"):
            parse_chat(bad, None)
    with pytest.raises(InvalidRequest, match=r"^body: is not valid JSON"):
        parse_chat(b'{"zz": 1, "messages": [}', None)


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_lists_what_was_left_out_and_it_is_counted(stream: bool) -> None:
    async def run() -> None:
        api = FakeApi()
        async with served(api) as base:
            hostile = {"typo_p": 1, "a\r\nset-cookie: x=1": 2, "b\x00\u4e16": 3}
            answer = await exchange(base, post("/v1/chat/completions", {**CHAT, **hostile, "stream": stream}))
            assert answer.status == 200
            assert answer.headers[HEADER] == "typo_p, a??set-cookie??x?1, b??"
            assert "set-cookie" not in answer.headers
            plain = await exchange(base, post("/v1/chat/completions", {**CHAT, "stream": stream}))
            assert HEADER not in plain.headers
            refused = await exchange(base, post("/v1/completions", {"prompt": "p", "model": "other", "typo": 1}))
            assert (refused.status, refused.headers[HEADER]) == (404, "typo")
        assert api.ignored == {"chat": 3, "completion": 1}

    asyncio.run(run())


def test_a_hundred_thousand_unknown_fields_cost_one_bounded_header() -> None:
    async def run() -> None:
        api = FakeApi(max_body_bytes=8 << 20)
        async with served(api) as base:
            many = {f"f{i}": {} for i in range(100_000)}
            answer = await exchange(base, post("/v1/chat/completions", {**CHAT, **many}))
            assert answer.status == 200
            assert answer.headers[HEADER] == ", ".join([*(f"f{i}" for i in range(MAX_NAMES)), "..."])
            long = await exchange(base, post("/v1/chat/completions", {**CHAT, "x" * (1 << 20): 1}))
            assert (long.status, long.headers[HEADER]) == (200, "x" * MAX_NAME_CHARS + "...")
        assert api.ignored == {"chat": 100_001}

    asyncio.run(run())


def test_deep_and_crowded_unknown_fields_are_refused_or_left_out() -> None:
    async def run() -> None:
        app = app_of(FakeApi())
        deep = b'{"messages": [{"role": "user", "content": "x"}], "u": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
        answer = await protocol_post(app, "/v1/chat/completions", deep)
        assert (answer.status, answer.error["param"]) == (400, "body")
        crowd = json.dumps({"messages": [{"u": 1}] * (MAX_MESSAGES + 1)}).encode()
        with pytest.raises(InvalidRequest, match=r"^messages: .*at most 4096"):
            parse_chat(crowd, None)

    asyncio.run(run())
