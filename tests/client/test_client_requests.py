"""What a program asks for reaches the wire whole, and what it cannot ask for is an error that names the field."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

from pdserve import AsyncClient, Client
from pdserve.client.params import Options, SamplingParams, chat_request, prompt_request, text_request
from pdserve.client.results import Gathered, ToolCall, delta_of
from pdserve.client.retries import Retries
from pdserve.core.error_table import CLASSES, TABLE
from pdserve.core.errors import InvalidRequest, Overloaded, PdserveError, Unavailable
from pdserve.core.sampling import FinishReason
from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc

TEXT = {"type": "text", "text": "hi"}
MESSAGES = [{"role": "user", "content": "hi"}]
VALUES: dict[str, Any] = {
    "max_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 7, "stop": ["a", "b"],
    "stop_token_ids": [5], "min_tokens": 1, "ignore_eos": True, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    "repetition_penalty": 1.5, "logit_bias": {3: 0.5}, "logprobs": 2, "prompt_logprobs": 1, "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "model": "m", "request_id": "r", "deadline_s": 5.0, "priority": 3, "placement": "colocated", "cache_salt": "s",
    "slo_class": "chat", "session_id": "c", "n": 2, "best_of": 3, "beam_width": 2, "length_penalty": 0.5,
    "structured_outputs": {"regex": "a+"}, "speculation": "auto", "num_speculative_tokens": 4,
}  # fmt: skip
CHATS: dict[str, Any] = {
    "tools": [{"type": "function"}], "tool_choice": "required", "parallel_tool_calls": False, "template_kwargs": {"x": 1},
}  # fmt: skip


def test_every_field_of_sampling_can_be_set_and_reaches_the_wire() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert names == {*common_pb2.SamplingParams.DESCRIPTOR.fields_by_name} == {*VALUES}
    wire = SamplingParams(**VALUES).to_wire()
    assert {field.name for field, _ in wire.ListFields()} | {"skip_special_tokens"} == names
    assert wire.HasField("skip_special_tokens")
    assert not SamplingParams().to_wire().ListFields()
    assert list(SamplingParams(stop="END").to_wire().stop) == ["END"]


def test_every_field_of_a_request_can_be_set_and_reaches_the_wire() -> None:
    assert {*OPTIONS, *CHATS} == {*Options.__annotations__}
    wire = chat_request(MESSAGES, SamplingParams(max_tokens=1), {**OPTIONS, **CHATS})
    set_here = {field.name for field, _ in wire.ListFields()}
    assert set_here == {*inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name} - {"text", "tokens"}
    assert {field.name for field, _ in wire.chat.ListFields()} == {*inference_pb2.ChatPrompt.DESCRIPTOR.fields_by_name}
    assert wire.tool_choice.at_most_one
    assert text_request("a", None, {}).text == "a"
    assert list(text_request([1, 2], None, {}).tokens.ids) == [1, 2]
    assert prompt_request(MESSAGES).chat.messages[0].content == "hi"
    assert chat_request(MESSAGES, None, {"structured_outputs": {"json": {"type": "object"}}}).structured_outputs.json
    assert list(text_request("a", None, {"structured_outputs": {"choice": ["x", "y"]}}).structured_outputs.choice.texts) == [
        "x",
        "y",
    ]


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("prompt", lambda: text_request([1, -2], None, {})),
        ("max_tokens", lambda: text_request("a", SamplingParams(max_tokens=-1), {})),
        ("temperature", lambda: text_request("a", SamplingParams(temperature="hot"), {})),  # type: ignore[arg-type]
        ("placement", lambda: text_request("a", None, {"placement": "elsewhere"})),
        ("priorty", lambda: text_request("a", None, {"priorty": 1})),
        ("temperature", lambda: text_request("a", None, {"temperature": 1})),
        ("n", lambda: text_request("a", None, {"n": -1})),
        ("tools", lambda: text_request("a", None, CHATS)),
        ("tool_choice", lambda: chat_request(MESSAGES, None, {"tool_choice": "maybe"})),
        ("messages[1].colour", lambda: chat_request([*MESSAGES, {"role": "user", "colour": 1}], None, {})),
        ("messages[0].tool_calls", lambda: chat_request([{"role": "assistant", "tool_calls": [{"id": "x"}]}], None, {})),
        ("messages[0]", lambda: chat_request(["hi"], None, {})),  # type: ignore[list-item]
        ("messages[0].content", lambda: chat_request([{"role": "user", "content": {"text": "x"}}], None, {})),
        ("messages[0].content[0]", lambda: chat_request([{"role": "user", "content": [{"text": "x"}]}], None, {})),
        ("messages[0].content[1]", lambda: chat_request([{"role": "user", "content": [TEXT, {"type": "image"}]}], None, {})),
        ("messages[0].content[0].size", lambda: chat_request([{"role": "user", "content": [{**TEXT, "size": 1}]}], None, {})),
        ("messages[0].content[0].text", lambda: chat_request([{"role": "user", "content": [{"type": "text"}]}], None, {})),
        ("prompt", lambda: text_request(b"a", None, {})),
        ("prompt", lambda: text_request(7, None, {})),  # type: ignore[arg-type]
        ("prompt", lambda: text_request({}, None, {})),
        ("prompt", lambda: text_request({"prompt": "a", "prompt_token_ids": [1]}, None, {})),
        ("prompt['image']", lambda: text_request({"image": "a"}, None, {})),
        ("prompt_token_ids", lambda: text_request({"prompt_token_ids": "abc"}, None, {})),
        ("prompt_token_ids", lambda: text_request({"prompt_token_ids": ["a"]}, None, {})),
        ("structured_outputs", lambda: text_request("a", None, {"structured_outputs": {"json": {}, "regex": "x"}})),
        ("structured_outputs", lambda: text_request("a", None, {"structured_outputs": {}})),
        ("structured_outputs.yaml", lambda: text_request("a", None, {"structured_outputs": {"yaml": "x"}})),
    ],
)
def test_what_cannot_be_sent_names_its_field(field: str, make: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("says", "make"),
    [
        (
            'prompt: must be a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, got 7',
            lambda: text_request(7, None, {}),
        ),  # type: ignore[arg-type]
        (
            "prompt: must be a list, of which each item is a whole number from 0 to 4294967295, got ['a']",
            lambda: text_request(["a"], None, {}),  # type: ignore[list-item]
        ),
        ("temperature: must be a number, got 'hot'", lambda: SamplingParams(temperature="hot").to_wire()),  # type: ignore[arg-type]
        ("ignore_eos: must be True or False, got 'no'", lambda: SamplingParams(ignore_eos="no").to_wire()),  # type: ignore[arg-type]
        (
            "logit_bias: must be an object with a whole number from 0 to 4294967295 as each key and a number as its value, ",
            lambda: SamplingParams(logit_bias={"a": 1}).to_wire(),  # type: ignore[dict-item]
        ),
    ],
)
def test_an_error_spoke_of_python_and_not_of_the_value(says: str, make: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.message.startswith(says)


def test_prompts_and_messages_have_the_forms_of_vllm() -> None:
    assert text_request({"prompt": "a"}, None, {}) == text_request("a", None, {})
    assert text_request({"prompt_token_ids": (1, 2)}, None, {}) == text_request([1, 2], None, {})
    parts = [TEXT, {"type": "text", "text": "there"}]
    joined = chat_request([{"role": "user", "content": parts}], None, {}).chat.messages[0].content
    assert joined == "hi\nthere"
    assert prompt_request([{"role": "user", "content": [TEXT]}]) == prompt_request(MESSAGES)


def test_an_answer_of_openais_client_can_be_sent_back() -> None:
    """Its empty fields are None."""
    called = ChatCompletionMessageFunctionToolCall(id="a", type="function", function=Function(name="f", arguments="{}"))
    for answer in (
        ChatCompletionMessage(role="assistant", content="x"),
        ChatCompletionMessage(role="assistant", tool_calls=[called]),
    ):
        (sent,) = chat_request([answer.model_dump()], None, {}).chat.messages
        assert (sent.role, sent.content, len(sent.tool_calls)) == (
            "assistant",
            answer.content or "",
            len(answer.tool_calls or ()),
        )


def errors() -> list[PdserveError]:
    made = []
    for kind in CLASSES.values():
        named: dict[str, Any] = {"field": "f"} if issubclass(kind, InvalidRequest) else {}
        made.append(kind("why", **({"retry_after_s": 2.0} if kind is Overloaded else named)))
    return made


def test_a_client_tries_again_what_the_table_marks_and_nothing_else() -> None:
    for error in errors():
        again = Retries().wait_s(error, 1, None, 0.0) is not None
        assert again == TABLE[error.code].client_retries, error.code


@given(attempt=st.integers(1, 12), left_s=st.none() | st.floats(0, 30), share=st.floats(0, 0.999))
def test_waits_are_bounded_and_honour_the_server_and_the_deadline(attempt: int, left_s: float | None, share: float) -> None:
    retries = Retries(attempts=8, longest_wait_s=5.0)
    wait_s = retries.wait_s(Overloaded("full", retry_after_s=2.0), attempt, left_s, share)
    if wait_s is None:
        assert attempt >= 8 or (left_s is not None and left_s <= 5.0 * 1.25)
    else:
        assert 2.0 <= wait_s <= 5.0 * 1.25
        assert left_s is None or wait_s < left_s
    assert Retries(1).wait_s(Overloaded("full", retry_after_s=2.0), 1, None, 0.0) is None


def test_pieces_of_several_choices_join_to_whole_answers() -> None:
    gathered, asked = Gathered(), text_request([7, 8], None, {})
    call = inference_pb2.ToolCallDelta
    parts = [
        inference_pb2.GenerateResponse(choice=1, ids=[1], text="a"),
        inference_pb2.GenerateResponse(choice=0, ids=[2], text="x", tool_calls=[call(id="c", name="f", arguments="{")]),
        inference_pb2.GenerateResponse(choice=0, ids=[3], text="y", tool_calls=[call(arguments="}")], finish_reason=1),
    ]
    for part in parts:
        gathered.add(delta_of(part))
    assert gathered.whole("r", asked) is None, "choice 1 has not ended"
    gathered.add(delta_of(inference_pb2.GenerateResponse(choice=1, ids=[4], text="b", finish_reason=2)))
    whole = gathered.whole("r", asked)
    assert whole is not None
    assert [(one.text, one.ids, one.finish_reason) for one in whole.outputs] == [
        ("xy", (2, 3), FinishReason.STOP),
        ("ab", (1, 4), FinishReason.LENGTH),
    ]
    assert (whole.prompt, whole.prompt_token_ids) == (None, (7, 8))
    assert whole.outputs[0].cumulative_logprob is None
    assert whole.outputs[0].finish_reason == "stop", "vLLM's finish reasons are texts"
    assert whole.outputs[0].tool_calls == (ToolCall(0, "c", "f", "{}"),)


class _Stops(inference_pb2_grpc.InferenceServicer):
    """It ends its first call with the bare status of a cancel, as a server that stops may do, and answers the second."""

    calls = 0

    def Generate(self, request: Any, context: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            context.abort(grpc.StatusCode.CANCELLED, "")
        yield inference_pb2.GenerateResponse(ids=[1], text="a", finish_reason=1)


def test_a_call_that_a_stopping_server_ends_is_no_cancel_of_the_client() -> None:
    server, service = grpc.server(ThreadPoolExecutor(1)), _Stops()
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with Client(address, retries=Retries(2, longest_wait_s=0.0)) as client:
            assert client.generate("a").text == "a"
    finally:
        server.stop(0).wait()
    assert service.calls == 2


class _Full(inference_pb2_grpc.InferenceServicer):
    """It holds its first call until it is let go, while the server takes no second one."""

    def __init__(self) -> None:
        self.holds, self.go_on = threading.Event(), threading.Event()

    def Generate(self, request: Any, context: Any) -> Any:
        self.holds.set()
        self.go_on.wait(60.0)
        yield inference_pb2.GenerateResponse(ids=[1], text="a", finish_reason=1)


def test_a_refusal_of_grpc_itself_is_tried_again_as_overloaded() -> None:
    """(1) The server has room for one call, and has it. (2) gRPC refuses another one, and gives no reason of ours. (3) The
    client tries again, until there is room."""
    service, refusals = _Full(), list[PdserveError]()

    class Noting(Retries):
        def wait_s(self, error: PdserveError, attempt: int, left_s: float | None, share: float) -> float | None:
            refusals.append(error)
            service.go_on.set()
            return super().wait_s(error, attempt, left_s, share)

    server = grpc.server(ThreadPoolExecutor(2), maximum_concurrent_rpcs=1)
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        noting = Noting(1000, longest_wait_s=0.01)
        with Client(address) as first, Client(address, retries=noting) as second, ThreadPoolExecutor(1) as threads:
            held = threads.submit(first.generate, "a")
            assert service.holds.wait(60.0)
            assert second.generate("a").text == "a"
            assert held.result(60.0).text == "a"
    finally:
        server.stop(0).wait()
    assert {type(refusal) for refusal in refusals} == {Overloaded}


class _Noting(Retries):
    """It notes each error, and never lets a test wait."""

    def wait_s(self, error: PdserveError, attempt: int, left_s: float | None, share: float) -> float | None:
        NOTED.append(error)
        return None if super().wait_s(error, attempt, left_s, share) is None else 0.0


NOTED: list[PdserveError] = []


async def _asked(address: str) -> None:
    async with AsyncClient(address, retries=_Noting()) as client:
        await client.generate("a")


async def _streamed(address: str) -> None:
    async with AsyncClient(address, retries=_Noting()) as client:
        async for _ in client.stream("a"):
            pass


CALLS: tuple[Callable[[str], object], ...] = (
    lambda address: Client(address, retries=_Noting()).generate("a"),
    lambda address: list(Client(address, retries=_Noting()).stream("a")),
    lambda address: asyncio.run(_asked(address)),
    lambda address: asyncio.run(_streamed(address)),
)


@pytest.fixture(params=["nothing", "HTTP", "another service"])
def wrong(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """An address, and what its error says."""
    if request.param == "another service":
        server = grpc.server(ThreadPoolExecutor(1))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield address, f"what answers at {address} is another port or another server"
        server.stop(0).wait()
    elif request.param == "HTTP":
        http = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{http.server_port}", "speaks no gRPC, and may be the HTTP port; "
        http.shutdown()
        thread.join()
        http.server_close()
    else:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))  # nobody listens
            yield f"127.0.0.1:{bound.getsockname()[1]}", "nothing answers at 127.0.0.1:"


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_address_was_told_after_five_attempts(wrong: tuple[str, str], call: Callable[[str], object]) -> None:
    address, says = wrong
    NOTED.clear()
    with pytest.raises(Unavailable, match=re.escape(says)) as caught:
        call(address)
    assert "gRPC port (50051 unless it is set)" in caught.value.message
    assert len(NOTED) == 1


def test_a_server_that_is_gone_is_asked_again_by_who_has_met_it_or_waits_for_it() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    inference_pb2_grpc.add_InferenceServicer_to_server(_Stops(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    address = f"127.0.0.1:{port}"
    server.start()
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with Client(address, retries=_Noting(3)) as client:
            assert client.generate("a").text == "a"
            server.stop(0).wait()
            held.bind(("127.0.0.1", port))  # so that no server of another test takes its calls
            NOTED.clear()
            with pytest.raises(Unavailable):
                client.generate("a")
            assert len(NOTED) == 3
        NOTED.clear()
        with pytest.raises(Unavailable), Client(address, retries=_Noting(3, wait_for_server=True)) as client:
            client.generate("a")
        assert len(NOTED) == 3


def test_the_package_loads_neither_grpc_nor_torch_before_they_are_needed() -> None:
    code = (
        "import sys, pdserve; assert 'grpc' not in sys.modules; "
        "from pdserve import Client, AsyncClient, LLM, SamplingParams; "
        "bad = {'torch', 'ray', 'numpy', 'pdserve.engine', 'router'} & {*sys.modules}; assert not bad, bad"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
