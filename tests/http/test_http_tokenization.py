"""vLLM's endpoints between text and token ids, and token ids in answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import grpc
import pytest
from http_fakes import MODEL, FakeApi, app_of
from raw_http import exchange, head, post, protocol_post

from pdserve import __version__
from pdserve.rpc.v1 import inference_pb2
from router.http import serve_http
from tests.router.local_cluster import local_cluster, tiny_model


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90):
            await story

    asyncio.run(bounded())


def sent(path: str, payload: Any) -> tuple[int, Any]:
    """The status and the JSON of a POST to the fake router."""

    async def story() -> tuple[int, Any]:
        api = FakeApi()
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        answer = await protocol_post(app_of(api), path, body)
        api.parser.close()
        return answer.status, json.loads(answer.body)

    return asyncio.run(story())


REFUSED = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
    ("/tokenize", {"prompt": [1, 2]}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "b"}], "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1 << 32]}, "tokens[0]"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ("/detokenize", {"tokens": [1] * 4097}, "tokens"),
    ("/detokenize", b'{"tokens":[' + b"1," * 999_999 + b"1]}", "tokens"),
]


@pytest.mark.parametrize(("path", "payload", "field"), REFUSED)
def test_a_bad_body_is_refused_with_its_field(path: str, payload: Any, field: str) -> None:
    """A million ids are refused as well as one of them, and large bodies are read in the parser's process."""
    status, told = sent(path, payload)
    if len(payload) > FakeApi().max_body_bytes:
        assert status == 413
        return
    assert status == 400
    assert told["error"]["param"] == field


def test_a_field_that_the_endpoint_does_not_have_is_refused() -> None:
    for path in ("/tokenize", "/detokenize"):
        status, told = sent(path, {"prompt": "a", "tokens": [1], "skip": True})
        assert status == 400
        assert "unknown field" in told["error"]["message"]


def test_the_shapes_are_those_of_vllm() -> None:
    ids = [1, 104, 105]
    shape = {"count": 3, "max_model_len": 4096, "tokens": ids, "token_strs": None}
    assert sent("/tokenize", {"model": MODEL, "prompt": "hi"}) == (200, shape)
    bare = {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True}
    spelled = {"count": 2, "max_model_len": 4096, "tokens": ids[1:], "token_strs": ["<104>", "<105>"]}
    assert sent("/tokenize", bare) == (200, spelled)
    assert sent("/detokenize", {"tokens": ids[1:]}) == (200, {"prompt": "hi"})
    assert sent("/detokenize", {"tokens": []}) == (200, {"prompt": ""})


def events(body: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in body.decode().split("\n\n") if line and line != "data: [DONE]"]


@pytest.mark.parametrize("usage", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}])
@pytest.mark.parametrize("chat", [True, False])
def test_streams_have_the_ids_of_prompt_and_output(chat: bool, usage: dict[str, bool]) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "xyz", "max_tokens": 9}
    path = "/v1/chat/completions" if chat else "/v1/completions"

    async def story(wanted: bool) -> list[Any]:
        body = {**prompt, "stream": True, "return_token_ids": wanted, **({"stream_options": usage} if usage else {})}
        api = FakeApi(words=("a", "", "\u2028\x00", "b"))
        return events((await protocol_post(app_of(api), path, json.dumps(body).encode())).body)

    told = asyncio.run(story(True))
    choices = [choice for event in told for choice in event["choices"]]
    assert [i for choice in choices for i in choice.get("token_ids", [])] == [0, 1, 2, 3]
    assert "".join(c["delta"]["content"] if chat else c["text"] for c in choices) == "a\u2028\x00b"
    places = told if chat else choices
    assert [one["prompt_token_ids"] for one in places if "prompt_token_ids" in one] == [[0] if chat else [0, 1, 2]]
    assert "prompt_token_ids" in places[0]
    assert not any(b"token_ids" in json.dumps(event).encode() for event in asyncio.run(story(False)))


def test_answers_have_the_ids_of_prompts_and_outputs() -> None:
    _, told = sent("/v1/completions", {"prompt": ["a", "bc"], "max_tokens": 2, "return_token_ids": True})
    assert [choice["token_ids"] for choice in told["choices"]] == [[0, 1], [0, 1]]
    assert [choice["prompt_token_ids"] for choice in told["choices"]] == [[0], [0, 1]]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    _, told = sent("/v1/chat/completions", {**chat, "return_token_ids": True})
    assert told["prompt_token_ids"] == [0]
    assert told["choices"][0]["token_ids"] == [0, 1]
    assert "token_ids" not in json.dumps(sent("/v1/chat/completions", chat)[1])


def test_the_real_tokenizer_answers_over_http_and_grpc() -> None:
    """There and back; special tokens are written out, ids outside the vocabulary and too many ids are refused by name."""

    async def story() -> None:
        tokenizer = tiny_model().tokenizer
        special = next(i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i) and tokenizer.written_bytes(i))
        async with local_cluster() as cluster:
            server = await serve_http(cluster.service, cluster.parser, "127.0.0.1", 0)
            base = f"http://127.0.0.1:{server.port}"
            try:
                for text in ("Hello, 世界\n", "a" * 40_000):
                    answer = json.loads(
                        (await exchange(base, post("/tokenize", {"prompt": text, "return_token_strs": True}))).body
                    )
                    assert answer["tokens"] == tokenizer.encode(text)
                    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
                ids = [*tokenizer.encode("hé", add_special_tokens=False), special]
                back = await exchange(base, post("/detokenize", {"tokens": ids}))
                assert json.loads(back.body) == {"prompt": "hé" + tokenizer.written_bytes(special).decode()}
                only = await exchange(base, post("/detokenize", {"tokens": [special] * 3}))
                assert json.loads(only.body) == {"prompt": tokenizer.written_bytes(special).decode() * 3}
                wrong = await exchange(base, post("/detokenize", {"tokens": [1, 1 << 20]}))
                assert (wrong.status, json.loads(wrong.body)["error"]["param"]) == (400, "tokens[1]")
                unknown = await exchange(base, post("/detokenize", {"model": "other", "tokens": [1]}))
                assert unknown.status == 404
                version = await exchange(base, head("GET", "/version") + b"\r\n")
                assert json.loads(version.body) == {"version": __version__}
            finally:
                await server.close()
            for skip, text in ((False, "hé" + tokenizer.written_bytes(special).decode()), (True, "hé")):
                asked = inference_pb2.DetokenizeRequest(ids=ids, skip_special_tokens=skip)
                assert (await cluster.stub.Detokenize(asked)).text == text
            for bad in ([1 << 20], [1] * 257, [1] * 1_000_000):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await cluster.stub.Detokenize(inference_pb2.DetokenizeRequest(ids=bad))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(story())
