"""What a body may hold: each refusal names its field, and nothing a client writes makes a 500."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, cast

import pytest
from http_fakes import FakeApi, app_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from raw_http import protocol_post

from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import Placement
from router.api.request import ChatMessage
from router.http.answer import answer
from router.http.reply import Reply
from router.openai.body import ChatBody, CompletionBody
from router.openai.json import hints, neutral_values
from router.openai.request import ClassHeaders, parse_chat, parse_completion
from router.openai.responses.request import parse_responses

ENDPOINTS = {"completion": CompletionBody, "chat": ChatBody}
HI = [{"role": "user", "content": "hi"}]


def first_name(field: str) -> str:
    """The name in the body, of a field such as `stop[1]` or `logit_bias.7`."""
    return re.split(r"[.\[]", field)[0]


def completion(**fields: Any) -> Any:
    return parse_completion(json.dumps({"prompt": "p", **fields}).encode(), None)


def chat(**fields: Any) -> Any:
    return parse_chat(json.dumps({"messages": HI, **fields}).encode(), None)


async def asked(call: Any, error: InvalidRequest) -> InvalidRequest:
    """Return the error of a call that the router refuses with `error`."""
    with pytest.raises(InvalidRequest) as caught:
        await answer(FakeApi(error=error), call, Reply(cast(Any, None)))
    return caught.value


PARSERS = {"completion": completion, "chat": chat}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def test_defaults_are_openais() -> None:
    assert completion().inputs[0].sampling == {"max_tokens": 16}
    assert chat().inputs[0].sampling == {}
    assert chat(max_tokens=5, max_completion_tokens=7).inputs[0].sampling == {"max_tokens": 7}
    nulls = dict.fromkeys(("max_tokens", "temperature", "stop", "seed", "stream", "stream_options", "n", "logprobs", "tools"))
    assert chat(**nulls).inputs[0].sampling == {}
    assert chat(logit_bias={}, stop="x").inputs[0].sampling == {"logit_bias": {}, "stop": ("x",)}
    assert completion(placement="auto").inputs[0].placement is Placement.AUTO


@pytest.mark.parametrize("parse", [parse_completion, parse_chat])
def test_a_lower_priority_goes_first_as_in_vllm(parse: Any) -> None:
    """The router, gRPC and the classes have a higher one go first. An error has the number that the client wrote."""

    def sent(priority: int) -> Any:
        return parse(json.dumps({"prompt": "p", "messages": HI, "priority": priority}).encode(), None).inputs[0].options

    assert [sent(priority)["priority"] for priority in (-10, 0, 2, 100)] == [10, 0, -2, -100]
    with pytest.raises(InvalidRequest, match=r"^priority: must be from -100 to 100, got -101$"):
        sent(-101)


def test_logprobs_are_asked_for_as_each_endpoint_does_it() -> None:
    def listed(call: Any) -> Any:
        return call.inputs[0].sampling.get("logprobs")

    assert [listed(completion(logprobs=n)) for n in (None, False, 0, 5, 20)] == [None, None, 0, 5, 20]
    assert listed(chat(logprobs=True)) == 0
    assert listed(chat(logprobs=True, top_logprobs=4)) == 4
    assert listed(chat(logprobs=False, top_logprobs=0)) is None
    for name, parse, fields in [
        ("logprobs", completion, {"logprobs": True}), ("logprobs", completion, {"logprobs": 21}),
        ("logprobs", completion, {"logprobs": -1}), ("logprobs", chat, {"logprobs": 2}),
        ("top_logprobs", chat, {"top_logprobs": 2}), ("top_logprobs", chat, {"logprobs": True, "top_logprobs": 21}),
        ("top_logprobs", chat, {"logprobs": False, "top_logprobs": 1}),
    ]:  # fmt: skip
        with pytest.raises(InvalidRequest, match=f"^{name}: ") as caught:
            parse(**fields)
        assert caught.value.field == name


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat(messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts, "name": "x"}])
    assert call.inputs[0].prompt == (ChatMessage("system", "be brief"), ChatMessage("user", "a\nb", name="x"))


@pytest.mark.parametrize("endpoint", ["completion", "chat"])
def test_fields_without_effect_are_refused_unless_neutral(endpoint: str) -> None:
    """A hint is taken and listed."""
    parse = PARSERS[endpoint]
    for name, neutral in neutral_values(ENDPOINTS[endpoint]).items():
        for value in (*neutral, None):
            assert parse(**{name: value}).ignored.count == 0
        for value in (2, True, 0.5, "zz", ["y"], {"k": 1}):
            if any(type(value) is type(n) and value == n for n in neutral):
                continue
            if name in hints(ENDPOINTS[endpoint]):
                assert parse(**{name: value}).ignored.names == (name,)
            else:
                with pytest.raises(InvalidRequest, match=f"^{name}: ") as caught:
                    parse(**{name: value})
                assert caught.value.field == name


BAD_COMPLETIONS: list[tuple[str, Any]] = [
    ("prompt", None), ("prompt", 5), ("prompt", {}), ("prompt", []), ("prompt[0]", [[]]), ("prompt[1]", [1, "a"]),
    ("prompt[1]", ["a", 1]), ("prompt[1]", [[1], 2]), ("prompt[0]", [-1]), ("prompt[1]", [0, 1 << 40]),
    ("prompt[0]", [True]), ("prompt[0]", [1.0]), ("prompt[0][1]", [[1, None]]), ("prompt", ["x"] * 257),
    ("prompt[1][2]", [[1], [2, 3, 1 << 32]]), ("prompt[1][0]", [[1], [[2]]]), ("prompt[2]", [1, 2, [3]]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "prompt"), BAD_COMPLETIONS)
def test_bad_prompts_name_their_place(field: str, prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.field == field
    assert caught.value.message.startswith(field)


BAD_FIELDS: list[tuple[str, Any]] = [
    ("max_completion_tokens", 0), ("temperature", 10**400), ("seed", int("9" * 4300)),
    ("stop[1]", ["a", None]), ("stop_token_ids[0]", [-1]), ("stop_token_ids[0]", [True]),
    ("stream_options", {"include_usage": True}), ("placement", "moon"),
    ("request_id", "a b"), ("request_id", ""), ("request_id", "x" * 129), ("request_id", "a\r\nb: c"),
    ("n", 0), ("n", 129), ("n", 10**9), ("n", -1), ("best_of", 2), ("length_penalty", 2),
    ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"07": 1}),
    ("logit_bias.1", {"1": None}), ("logit_bias.2", {"1": 0, "2": "x"}), ("logit_bias", {"99999999999": 1}),
]  # fmt: skip
"""Values beyond limits, or of wrong types, are in tests/router/service/test_request_fields.py and below."""


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_bad_values_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{first_name(field): value})
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")
    assert len(caught.value.message) < 400


BAD_MESSAGES: list[tuple[str, Any]] = [
    ("messages", None), ("messages", "hi"), ("messages", []), ("messages[0]", ["hi"]), ("messages[0].role", [{}]),
    ("messages[0].role", [{"role": "function", "content": "x"}]), ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": 1}]), ("messages[0].content[0]", [{"role": "user", "content": ["x"]}]),
    ("messages[0].content[0].type", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages[1].tool_calls[0].function", [*HI, {"role": "assistant", "content": "", "tool_calls": [{}]}]),
    ("messages[0].tool_calls", [{"role": "user", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]),
    ("messages[0].tool_calls[0].type", [{"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}]),
    ("messages[0].tool_calls[0].function.name", [{"role": "assistant", "tool_calls": [{"function": {}}]}]),
    ("messages[0].tool_calls[0].function.arguments", [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]},
    ]),
    ("messages[0].tool_call_id", [{"role": "tool", "content": "x"}]),
    ("messages[0].tool_call_id", [{"role": "user", "content": "x", "tool_call_id": "a"}]),
    ("messages[0].reasoning_content", [{"role": "user", "content": "x", "reasoning": "a"}]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "messages"), BAD_MESSAGES)
def test_bad_messages_name_their_place(field: str, messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=messages)
    assert caught.value.field == field


def test_empty_values_of_an_answers_message_ask_for_nothing() -> None:
    for value in ([], {}, "", 0, 0.0, False, None):
        chat(messages=[*HI, {"role": "assistant", "content": "x", "tool_calls": value, "function_call": value, "audio": value}])


def test_what_replaced_a_field_is_named() -> None:
    for parse, name, replaced_by in (
        (completion, "guided_json", "structured_outputs.json"),
        (chat, "guided_choice", "structured_outputs.choice"),
        (chat, "functions", "tools"),
    ):
        with pytest.raises(InvalidRequest, match=f"^{name}: .* is not supported.*; use {re.escape(replaced_by)}$"):
            parse(**{name: [{"x": 1}]})


@pytest.mark.parametrize(
    ("own", "written", "call"),
    [
        ("max_tokens", "max_completion_tokens", chat(max_completion_tokens=9, max_tokens=8)),
        ("max_tokens", "max_tokens", chat(max_tokens=8)),
        ("structured_outputs.json", "response_format.json_schema.schema", chat(response_format=SCHEMA)),
        ("structured_outputs.json", "structured_outputs.json", completion(structured_outputs={"json": {}})),
        ("structured_outputs", "response_format", chat(response_format={"type": "json_object"})),
        ("prompt_logprobs", "logprobs", completion(echo=True, logprobs=3)),
        ("prompt_logprobs", "prompt_logprobs", completion(echo=True, logprobs=3, prompt_logprobs=1)),
        ("top_p", "top_p", chat(max_completion_tokens=9, response_format=SCHEMA)),
        ("chat_template_kwargs.reasoning_effort", "reasoning_effort", chat(reasoning_effort="low")),
        ("prompt", "prompt", completion(prompt=[1, 2])),
        ("prompt", "prompt[0]", completion(prompt=["a", "b"])),
        ("prompt", "prompt[0]", completion(prompt=[[1]], use_beam_search=True, temperature=0)),
    ],
)
def test_an_error_of_the_router_has_the_name_that_the_client_wrote(own: str, written: str, call: Any) -> None:
    error = asyncio.run(asked(call, InvalidRequest("is wrong", field=own)))
    assert (error.field, error.message) == (written, f"{written}: is wrong")


def test_a_large_value_without_effect_is_refused_unread() -> None:
    for value in ("[" + "0, " * 50_000 + "0]", "[" * 900 + "]" * 900, "[1e999" + " " * 100 + "]"):
        with pytest.raises(InvalidRequest) as caught:
            parse_chat(b'{"messages": [], "documents": ' + value.encode() + b"}", None)
        assert caught.value.field == "documents"
        assert value[:5] in caught.value.message
        assert len(caught.value.message) < 150


def test_another_part_type_is_named() -> None:
    with pytest.raises(InvalidRequest, match="image_url"):
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"x":' * 100_000, b'{"tools":' + b"[" * 100_000, b"nul",
        b'{"x": 1} {}', b'{"x": 1,}', b'{"x": 01}', b'{"x": "\n"}', b'{"x": "\xff"}', b'{"\xff": 1}', b'{"x": "\xed\xa0\x80"}',
        '{"seed": 1}'.encode("utf-16"), b'{"temperature": NaN}', b'{"x": -Infinity}',
        rb'{"x": "\ud800"}', rb'{"model": "\udc00 is half a pair"}', rb'{"\ud83d": 1}',
    ],
)  # fmt: skip
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body, None)
    assert caught.value.field == "body"
    assert len(caught.value.message) < 120


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("temperature", b'{"temperature": 1e999}'), ("temperature", b'{"temperature": -1e999}'),
        ("temperature", b'{"temperature": ' + b"9" * 100_000 + b"}"), ("seed", b'{"seed": ' + b"9" * 5000 + b"}"),
        ("n", b'{"n": -' + b"9" * 5000 + b"}"), ("tools", b'{"tools": [1e999]}'),
    ],
)  # fmt: skip
def test_numbers_that_no_computer_holds_are_refused(field: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}") as caught:
        parse_chat(body, None)
    assert first_name(caught.value.field) == field


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_completion(b'\xef\xbb\xbf{"prompt": "p"}', None).inputs[0].prompt == "p"


def test_the_last_of_two_equal_names_counts() -> None:
    assert parse_completion(b'{"prompt": "p", "seed": 1, "seed": 2, "prompt": "q"}', None).inputs[0].prompt == "q"


NULL, BOOL, INT, FLOAT, TEXT, LIST, OBJECT = None, True, 1, 1.5, "user", [], {}
"""A value of each of JSON's types; numbers with and without a fraction are told apart."""
TAKEN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["model", "request_id", "cache_salt", "slo_class", "session_id", "prompt_cache_key", "user"], (TEXT,)),
    **dict.fromkeys(["deadline_s", "temperature", "top_p", "min_p"], (INT, FLOAT)),
    **dict.fromkeys(["presence_penalty", "frequency_penalty", "repetition_penalty"], (INT, FLOAT)),
    **dict.fromkeys(["priority", "max_tokens", "max_completion_tokens", "top_k", "seed", "min_tokens", "n"], (INT,)),
    **dict.fromkeys(["stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "use_beam_search"], (BOOL,)),
    **dict.fromkeys(["prompt_logprobs", "num_speculative_tokens"], (INT,)),
    "return_token_ids": (BOOL,),
    "stop_token_ids": (LIST,),
    "stop": (TEXT, LIST),
    "logit_bias": (OBJECT,),
    **dict.fromkeys(["placement", "speculation", "stream_options", "response_format", "structured_outputs"], ()),
}


CHAT_TAKEN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["logprobs", "parallel_tool_calls", "add_generation_prompt"], (BOOL,)),
    **dict.fromkeys(["top_logprobs", "tool_choice", "continue_final_message"], ()),
    "tools": (LIST,),
    "chat_template_kwargs": (OBJECT,),
    **dict.fromkeys(["reasoning_effort", "safety_identifier"], (TEXT,)),
    "metadata": (OBJECT,),
}


@pytest.mark.parametrize("endpoint", ["completion", "chat"])
def test_each_field_takes_its_types_and_no_other(endpoint: str) -> None:
    """Nothing is coerced: 1.5 or 1.0 is no integer, true is no 1, "1" is no number. Null is always as if absent."""
    unsupported = neutral_values(ENDPOINTS[endpoint])
    completion = {"logprobs": (INT,), "best_of": (INT,), "echo": (BOOL,), "add_special_tokens": (BOOL,)}
    own = completion if endpoint == "completion" else CHAT_TAKEN
    taken = {**TAKEN, **own}
    assert {*taken, *unsupported} == {*ENDPOINTS[endpoint].__struct_fields__} - {"prompt", "messages", "length_penalty"}
    for name, values in taken.items():
        for value in (NULL, BOOL, INT, FLOAT, 1.0, TEXT, "1", LIST, OBJECT):
            if value is None or any(type(value) is type(one) for one in values):
                PARSERS[endpoint](**{name: value})
                continue
            with pytest.raises(InvalidRequest) as caught:
                PARSERS[endpoint](**{name: value})
            assert caught.value.field == name, (name, value)
            assert caught.value.message.startswith(f"{name}: ")
            assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("message", "parse", "fields"),
    [
        ("max_tokens: must be an integer, got a decimal number", chat, {"max_tokens": 5.0}),
        ("max_tokens: must be an integer, got a boolean", chat, {"max_tokens": True}),
        ("max_tokens: must be from 1 to 2147483648, got 0", chat, {"max_tokens": 0}),
        ("temperature: must be a number, got a string", chat, {"temperature": "hot"}),
        ("temperature: is too large for a number", chat, {"temperature": 10**400}),
        ("stream: must be a boolean, got an integer", chat, {"stream": 1}),
        ("stop: must be a string or a list, got an object", chat, {"stop": {}}),
        ("stop[1]: must be a string, got null", chat, {"stop": ["a", None]}),
        ("stream_options.include_usage: must be a boolean, got a string", chat, {"stream_options": {"include_usage": "x"}}),
        ("logit_bias.7: must be a number, got a boolean", chat, {"logit_bias": {"7": True}}),
        ("logit_bias: ' - at `$.n`' is not a token id", chat, {"logit_bias": {" - at `$.n`": 1}}),
        ("logprobs: must be an integer or false, got true", completion, {"logprobs": True}),
        ("placement: must be one of auto, disaggregated, colocated, got '\\xe9'", chat, {"placement": "é"}),
        ("best_of: 2 is not supported; only 1 is accepted", chat, {"best_of": 2}),
        ("n: must be from 1 to 128, got 0", chat, {"n": 0}),
        ("echo: true is not supported; only false is accepted", chat, {"echo": True}),
        ("prompt_logprobs: is not allowed with stream: true (nor is it in vLLM)", chat, {"prompt_logprobs": 1, "stream": True}),
        ("echo: is not allowed with use_beam_search: true", completion, {"echo": True, "use_beam_search": True}),
        ("max_tokens: must be from 1 to 2147483648, got 0", completion, {"max_tokens": 0}),
        ("messages[0].role: is missing", chat, {"messages": [{}]}),
        ("messages[0].content: is missing", chat, {"messages": [{"role": "user"}]}),
        ("messages[0]: must be an object, got a string", chat, {"messages": ["hi"]}),
        ("prompt: must be a string or a list, got an object", completion, {"prompt": {}}),
        ("prompt[1]: must be a string, got an integer", completion, {"prompt": ["a", 1]}),
        ("prompt[0][1]: must be an integer, got null", completion, {"prompt": [[1, None]]}),
        ("prompt[1]: must be from 0 to 4294967295, got -1", completion, {"prompt": [0, -1]}),
        ("body: must be an object, got a list", lambda: parse_chat(b"[]", None), {}),
    ],
)  # fmt: skip
def test_messages_name_the_field_the_limit_and_what_came(message: str, parse: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.message == message


@pytest.mark.parametrize("parse", [parse_completion, parse_chat])
def test_the_body_goes_before_the_headers_of_class_and_session(parse: Any) -> None:
    def read(headers: ClassHeaders, **fields: Any) -> tuple[str, str]:
        body = json.dumps({"prompt": "p", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
        request = parse(body, None, headers=headers).inputs[0]
        return request.slo_class, request.session_id

    headers = ClassHeaders("voice", "from-header")
    assert read(ClassHeaders()) == ("", "")
    assert read(headers) == ("voice", "from-header")
    assert read(headers, slo_class="chat", session_id="s", prompt_cache_key="k") == ("chat", "s")
    assert read(headers, prompt_cache_key="k") == ("voice", "k")
    assert read(headers, slo_class=None, session_id=None) == ("voice", "from-header")


@pytest.mark.parametrize("parse", [parse_completion, parse_chat])
def test_no_request_fails_for_a_long_session_in_a_header_or_a_cache_key(parse: Any) -> None:
    def session(header: str | None, **fields: Any) -> str:
        body = json.dumps({"prompt": "p", "messages": HI, **fields}).encode()
        return str(parse(body, None, headers=ClassHeaders(None, header)).inputs[0].session_id)

    assert session("x" * 128) == "x" * 128
    assert session(None, prompt_cache_key="é" * 64) == "é" * 64
    told = [session("x" * 129), session("x" * 130), session(None, prompt_cache_key="é" * 65)]
    assert len(set(told)) == 3, "two long keys are two sessions"
    assert all(len(one) == 64 for one in told)
    assert session(None, prompt_cache_key="x" * 129) == told[0]


def test_request_ids() -> None:
    body = json.dumps({"prompt": ["a", "b"]}).encode()
    call = parse_completion(body, "from-header")
    assert [request.request_id for request in call.inputs] == [f"{call.request_id}-0", f"{call.request_id}-1"]
    assert {request.correlation_id for request in call.inputs} == {call.correlation_id} == {"from-header"}
    assert completion(request_id="mine").correlation_id == "mine"
    assert len({completion(request_id="mine").request_id for _ in range(2)}) == 2
    with pytest.raises(InvalidRequest, match=r"^request_id: must be 1 to 128 printable"):
        completion(request_id="a b")


@pytest.mark.parametrize(
    ("header", "kept"),
    [("a, b", "a,b"), ("", ""), (" \x00\xe9\r\n", ""), ("x" * 200, "x" * 128), ("a\tb" + "c" * 200, "ab" + "c" * 126)],
)
def test_no_request_fails_for_its_tracing_header(header: str, kept: str) -> None:
    """Proxies join ids as "a, b", which was refused. What is kept is safe as a header and in a log line."""
    assert parse_chat(json.dumps({"messages": HI}).encode(), header).correlation_id == kept
    assert parse_responses(b'{"input": "x"}', header).correlation_id == kept


NAMES = st.sampled_from(sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, "extra"}))
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["user", "text", "\ud800"])
)
VALUES = st.recursive(
    SCALARS,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), v),
    max_leaves=6,
)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "text", "auto", "none", " - at `$.n`"]),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "7"]), v),
    max_leaves=8,
)
BODIES = st.dictionaries(NAMES, VALUES, max_size=4)


@settings(max_examples=500, deadline=None)
@given(endpoint=st.sampled_from(sorted(ENDPOINTS)), data=st.data())
def test_any_value_of_any_field_is_taken_or_refused_by_its_name(endpoint: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(ENDPOINTS[endpoint].__struct_fields__))
    value = data.draw(JSON_VALUES)
    try:
        PARSERS[endpoint](**{name: value})
    except InvalidRequest as refused:
        caught = refused
    else:
        return
    assert first_name(caught.field) == name
    assert caught.message.startswith(f"{caught.field}: ")


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]), body=BODIES, good=st.booleans())
@example(path="/v1/completions", body={"use_beam_search": True}, good=True)
def test_no_body_makes_a_server_error(path: str, body: dict[str, Any], good: bool) -> None:
    payload = {"prompt": "p", "messages": HI, **body} if good else body
    answer = asyncio.run(protocol_post(app_of(FakeApi()), path, json.dumps(payload).encode()))
    assert answer.status in (200, 400, 404), answer
    if answer.status != 200:
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["param"]


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=40), request_id=st.binary(max_size=20).map(lambda value: value.translate(None, b"\r\n")))
def test_no_bytes_make_a_server_error(body: bytes, request_id: bytes) -> None:
    """A header with a line end would be two."""
    answer = asyncio.run(protocol_post(app_of(FakeApi()), "/v1/completions", body, ((b"x-request-id", request_id),)))
    assert answer.status == 400
