"""What a body may hold: each refusal names its field, and nothing a client writes makes a 500."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from http_fakes import FakeApi, app_of
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_http import asgi_post

from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import Placement
from router.api.request import ChatMessage
from router.openai.request import parse_chat, parse_completion
from router.openai.unsupported import NEUTRAL

HI = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> Any:
    return parse_completion(json.dumps({"prompt": "p", **fields}).encode(), None)


def chat(**fields: Any) -> Any:
    return parse_chat(json.dumps({"messages": HI, **fields}).encode(), None)


def test_defaults_are_openais() -> None:
    assert completion().inputs[0].sampling == {"max_tokens": 16}
    assert chat().inputs[0].sampling == {}
    assert chat(max_tokens=5, max_completion_tokens=7).inputs[0].sampling == {"max_tokens": 7}
    nulls = dict.fromkeys(("max_tokens", "temperature", "stop", "seed", "stream", "stream_options", "n", "logprobs", "tools"))
    assert chat(**nulls).inputs[0].sampling == {}


def test_every_sampling_field_arrives() -> None:
    fields = {"temperature": 1, "top_p": 0.5, "top_k": 4, "min_p": 0.25, "seed": 7, "min_tokens": 2, "max_tokens": 9}
    request = completion(
        **fields, ignore_eos=True, stop="x", stop_token_ids=[1, 2], priority=-3, placement="auto", cache_salt="t"
    ).inputs[0]
    assert request.sampling == {**fields, "ignore_eos": True, "stop": ("x",), "stop_token_ids": (1, 2)}
    assert (request.priority, request.placement, request.cache_salt) == (-3, Placement.AUTO, "t")


def test_penalties_and_biases_arrive() -> None:
    penalties = {"presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.5}
    for parse in (completion, chat):
        found = parse(**penalties, logit_bias={"7": -100, "50256": 1.5, "0": 0}).inputs[0].sampling
        assert {name: found[name] for name in penalties} == penalties
        assert found["logit_bias"] == {7: -100.0, 50256: 1.5, 0: 0.0}
    assert chat(logit_bias={}).inputs[0].sampling == {"logit_bias": {}}


def test_logprobs_are_asked_for_as_each_endpoint_does_it() -> None:
    def asked(call: Any) -> Any:
        return call.inputs[0].sampling.get("logprobs")

    assert [asked(completion(logprobs=n)) for n in (None, False, 0, 5, 20)] == [None, None, 0, 5, 20]
    assert asked(chat(logprobs=True)) == 0
    assert asked(chat(logprobs=True, top_logprobs=4)) == 4
    assert asked(chat(logprobs=False, top_logprobs=0)) is None
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
    assert call.inputs[0].prompt == (ChatMessage("system", "be brief"), ChatMessage("user", "a\nb"))


def test_unknown_fields_are_tolerated() -> None:
    assert chat(user="u", store=True, metadata={"a": "b"}, not_a_field=[1, {"x": None}]).inputs[0].sampling == {}


@pytest.mark.parametrize("endpoint", ["completion", "chat"])
def test_fields_without_effect_are_refused_unless_neutral(endpoint: str) -> None:
    parse = {"completion": completion, "chat": chat}[endpoint]
    for name, neutral in NEUTRAL[endpoint].items():
        for value in (*neutral, None):
            parse(**{name: value})
        for value in (2, True, 0.5, "zz", ["y"], {"k": 1}):
            if not any(type(value) is type(n) and value == n for n in neutral):
                with pytest.raises(InvalidRequest, match=f"^{name}: ") as caught:
                    parse(**{name: value})
                assert caught.value.field == name


BAD_COMPLETIONS: list[tuple[str, Any]] = [
    ("prompt", None), ("prompt", 5), ("prompt", {}), ("prompt", []), ("prompt[0]", [[]]), ("prompt[1]", [1, "a"]),
    ("prompt[1]", ["a", 1]), ("prompt[1]", [[1], 2]), ("prompt[0]", [-1]), ("prompt[1]", [0, 1 << 40]),
    ("prompt[0]", [True]), ("prompt[0]", [1.0]), ("prompt[0][1]", [[1, None]]), ("prompt", ["x"] * 257),
    ("prompt", "\ud800"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "prompt"), BAD_COMPLETIONS)
def test_bad_prompts_name_their_place(field: str, prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.field == field
    assert caught.value.message.startswith(field)


BAD_FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1 << 40), ("max_tokens", True), ("max_tokens", "5"),
    ("max_tokens", 5.0), ("max_completion_tokens", 0), ("temperature", "hot"), ("temperature", True),
    ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", 10**400), ("top_p", []),
    ("top_k", 1.5), ("min_tokens", "1"),
    ("seed", 1 << 64), ("seed", 0.5), ("stop", 3), ("stop[1]", ["a", None]), ("stop_token_ids", 3), ("stop_token_ids[0]", [-1]),
    ("stop_token_ids[0]", [True]), ("ignore_eos", 1), ("stream", "true"), ("stream_options", {"include_usage": True}),
    ("priority", "high"), ("placement", "moon"), ("placement", 1), ("deadline_s", "soon"), ("deadline_s", float("-inf")),
    ("request_id", "a b"), ("request_id", ""), ("request_id", "x" * 129), ("request_id", "a\r\nb: c"), ("model", 3),
    ("n", 2), ("n", True), ("presence_penalty", "1"), ("frequency_penalty", True), ("repetition_penalty", float("inf")),
    ("logit_bias", [1]), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"07": 1}),
    ("logit_bias", {"1": None}), ("logit_bias", {"99999999999": 1}), ("logit_bias", {str(i): 0 for i in range(301)}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_bad_values_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**{field.partition("[")[0]: value})
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")
    assert len(caught.value.message) < 400


BAD_MESSAGES: list[tuple[str, Any]] = [
    ("messages", None), ("messages", "hi"), ("messages", []), ("messages[0]", ["hi"]), ("messages[0].role", [{}]),
    ("messages[0].role", [{"role": "tool", "content": "x"}]), ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": 1}]), ("messages[0].content[0]", [{"role": "user", "content": ["x"]}]),
    ("messages[0].content[0].type", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages[1].tool_calls", [*HI, {"role": "assistant", "content": "", "tool_calls": [{}]}]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "messages"), BAD_MESSAGES)
def test_bad_messages_name_their_place(field: str, messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=messages)
    assert caught.value.field == field


def test_another_part_type_is_named() -> None:
    with pytest.raises(InvalidRequest, match="image_url"):
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}", b"nul"]
)
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body, None)
    assert caught.value.field == "body"


def test_request_ids() -> None:
    body = json.dumps({"prompt": ["a", "b"]}).encode()
    call = parse_completion(body, "from-header")
    assert [request.request_id for request in call.inputs] == [f"{call.request_id}-0", f"{call.request_id}-1"]
    assert {request.correlation_id for request in call.inputs} == {call.correlation_id} == {"from-header"}
    assert completion(request_id="mine").correlation_id == "mine"
    assert len({completion(request_id="mine").request_id for _ in range(2)}) == 2
    with pytest.raises(InvalidRequest, match=r"^X-Request-Id: "):
        parse_completion(body, "a b")


NAMES = st.sampled_from(
    sorted({*NEUTRAL["chat"], *(f.partition("[")[0] for f, _ in BAD_FIELDS), "messages", "prompt", "extra"})
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["user", "text", "\ud800"])
)
VALUES = st.recursive(
    SCALARS,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), v),
    max_leaves=6,
)
BODIES = st.dictionaries(NAMES, VALUES, max_size=4)


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]), body=BODIES, good=st.booleans())
def test_no_body_makes_a_server_error(path: str, body: dict[str, Any], good: bool) -> None:
    payload = {"prompt": "p", "messages": HI, **body} if good else body
    answer = asyncio.run(asgi_post(app_of(FakeApi()), path, json.dumps(payload).encode()))
    assert answer.status in (200, 400, 404), answer
    if answer.status != 200:
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["param"]


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=40), request_id=st.binary(max_size=20))
def test_no_bytes_make_a_server_error(body: bytes, request_id: bytes) -> None:
    answer = asyncio.run(asgi_post(app_of(FakeApi()), "/v1/completions", body, ((b"x-request-id", request_id),)))
    assert answer.status == 400
