"""The public openai client, unmodified, over a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from http_fakes import MODEL, WORDS, FakeApi, served

from pdserve.core.errors import DeadlineExceeded, InternalBug, Overloaded, ReplicaLost
from pdserve.core.sampling import Placement
from router.api.request import ChatMessage

HELLO: list[Any] = [{"role": "user", "content": "Say hello"}]


def client(base: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=60)


def test_chat_whole() -> None:
    async def run() -> None:
        api = FakeApi()
        async with served(api) as base, client(base) as c:
            answer = await c.chat.completions.create(
                model=MODEL, messages=HELLO, max_completion_tokens=3, temperature=0, seed=-1, stop=["x", "y"],
                extra_body={"top_k": -1, "min_p": 0.1, "placement": "colocated", "deadline_s": 5, "request_id": "mine"},
            )  # fmt: skip
        assert answer.choices[0].message.content == "".join(WORDS[:3])
        assert answer.choices[0].finish_reason == "length"
        assert answer.id == f"chatcmpl-{api.requests[0].request_id}"
        assert answer.usage is not None
        assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4)
        assert answer.model_extra is not None
        assert answer.model_extra["pdserve"]["kv_bytes"] == 4096
        assert answer.model_extra["pdserve"]["placement"] == "disaggregated"
        request = api.requests[0]
        assert request.prompt == (ChatMessage("user", "Say hello"),)
        assert (request.placement, request.deadline_s, request.correlation_id) == (Placement.COLOCATED, 5.0, "mine")
        assert request.sampling == {
            "max_tokens": 3, "temperature": 0.0, "top_k": 0, "min_p": 0.1, "seed": 2**64 - 1, "stop": ("x", "y"),
        }  # fmt: skip

    asyncio.run(run())


def test_chat_stream_with_usage() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base, client(base) as c:
            stream = await c.chat.completions.create(
                model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "".join(WORDS)
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * len(WORDS) + ["length"]
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(WORDS)

    asyncio.run(run())


def test_chat_logprobs_whole_and_streamed() -> None:
    words = ("a", "", "wör")  # nothing is certain with the second token: it has log-probabilities all the same

    async def run() -> None:
        async with served(FakeApi(words=words)) as base, client(base) as c:
            ask: Any = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 2}
            whole = (await c.chat.completions.create(**ask)).choices[0].logprobs
            stream = await c.chat.completions.create(**ask, stream=True)
            told = [chunk.choices[0].logprobs async for chunk in stream]
        assert whole is not None
        assert whole.content is not None
        assert [(one.token, one.logprob, one.bytes) for one in whole.content] == [
            ("a", -0.5, [97]), ("", -1.5, []), ("wör", -2.5, list("wör".encode())),
        ]  # fmt: skip
        assert [(top.token, top.logprob) for top in whole.content[0].top_logprobs] == [("", 0.0), ("wör", -1.0)]
        half = whole.content[1].top_logprobs[1]
        assert (half.token, half.bytes) == ("\ufffd", [0xC3])
        assert told[0] is None, "the role's chunk"
        assert [one for part in told[1:] if part and part.content for one in part.content] == whole.content
        assert len(told) == 1 + len(words)

    asyncio.run(run())


def test_completion_logprobs_whole_and_streamed() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base, client(base) as c:
            for count in (0, 2):
                ask: Any = {"model": MODEL, "prompt": ["p", "q"], "logprobs": count, "max_tokens": 3}
                answer = await c.completions.create(**ask)
                whole = answer.choices[1].logprobs
                parts = [chunk.choices[0] async for chunk in await c.completions.create(**ask, stream=True)]
                assert whole is not None
                assert whole.tokens == list(WORDS[:3])
                assert whole.token_logprobs == [-0.5, -1.5, -2.5]
                assert whole.text_offset == [0, 3, 6]
                first = {"Hal": -0.5} | ({"lo ": 0.0, "wör": -1.0} if count else {})
                assert whole.top_logprobs is not None
                assert whole.top_logprobs[0] == first
                streamed = [part.logprobs for part in parts if part.index == 1 and part.logprobs]
                for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                    assert [x for one in streamed for x in getattr(one, name)] == getattr(whole, name)
            without = await c.completions.create(model=MODEL, prompt="p")
            assert without.choices[0].logprobs is None

    asyncio.run(run())


def test_continuous_usage_counts_up() -> None:
    async def run() -> None:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        async with served(FakeApi(words=("a", "", "b"))) as base, client(base) as c:
            stream = await c.completions.create(model=MODEL, prompt="p", stream=True, stream_options=options)
            counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
        assert counts == [1, 2, 3, 3]

    asyncio.run(run())


def test_several_prompts_are_several_choices() -> None:
    async def run() -> None:
        api = FakeApi()
        async with served(api) as base, client(base) as c:
            whole = await c.completions.create(model=MODEL, prompt=[[1, 2], [3]], max_tokens=2)
            texts = {0: "", 1: "", 2: ""}
            stream = await c.completions.create(model=MODEL, prompt=["a", "b", "c"], stream=True, max_tokens=4)
            async for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].text
        assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "Hallo "), (1, "Hallo ")]
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 3
        assert [request.prompt for request in api.requests] == [(1, 2), (3,), "a", "b", "c"]
        assert len({request.request_id for request in api.requests}) == 5
        assert set(texts.values()) == {"".join(WORDS[:4])}

    asyncio.run(run())


def test_errors_have_their_classes_in_the_client() -> None:
    async def run() -> None:
        cases: list[tuple[BaseException, type[openai.APIStatusError], int]] = [
            (Overloaded("the queue is full", retry_after_s=2.2), openai.RateLimitError, 429),
            (ReplicaLost("a worker is gone"), openai.InternalServerError, 503),
            (DeadlineExceeded("late"), openai.InternalServerError, 504),
            (InternalBug("oops"), openai.InternalServerError, 500),
        ]
        for error, kind, status in cases:
            for fail_at in (None, 0):
                async with served(FakeApi(error=error, fail_at=fail_at)) as base, client(base) as c:
                    for stream in (False, True):
                        with pytest.raises(kind) as caught:
                            await c.chat.completions.create(model=MODEL, messages=HELLO, stream=stream)
                        assert caught.value.status_code == status
                        retry_after = {429: "3", 503: "1"}.get(status)
                        assert caught.value.response.headers.get("retry-after") == retry_after
        async with served(FakeApi()) as base, client(base) as c:
            with pytest.raises(openai.NotFoundError) as missing:
                await c.completions.create(model="other", prompt="p")
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.NotFoundError):
                await c.models.retrieve("other")
            assert (await c.models.retrieve(MODEL)).id == MODEL
            assert [model.id async for model in c.models.list()] == [MODEL]

    asyncio.run(run())


def test_an_error_inside_a_stream_is_raised_by_the_client() -> None:
    async def run() -> None:
        api = FakeApi(error=ReplicaLost("a worker is gone"), fail_at=2)
        async with served(api) as base, client(base) as c:
            got = ""
            stream = await c.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            for _ in range(3):  # the role, and two words
                got += (await anext(stream)).choices[0].delta.content or ""
            with pytest.raises(openai.APIError, match="a worker is gone"):
                await anext(stream)
            assert got == "".join(WORDS[:2])

    asyncio.run(run())


def test_closing_a_stream_closes_the_generation() -> None:
    async def run() -> None:
        api = FakeApi(words=("w",) * 1000)
        async with served(api) as base, client(base) as c:
            stream = await c.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            await anext(aiter(stream))
            api.gate.clear()
            await stream.close()
            await asyncio.wait_for(api.closed.wait(), 60)
        assert not api.generations[0].finished

    asyncio.run(run())


def test_the_synchronous_client() -> None:
    def talk(base: str) -> str:
        with openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=60) as c:
            stream = c.completions.create(model=MODEL, prompt="p", stream=True, max_tokens=5)
            return "".join(chunk.choices[0].text for chunk in stream)

    async def run() -> None:
        async with served(FakeApi()) as base:
            assert await asyncio.to_thread(talk, base) == "".join(WORDS[:5])

    asyncio.run(run())
